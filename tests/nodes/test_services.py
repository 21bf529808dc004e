"""The gateway as a provider: tasks and answers, without sockets or a loop."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.bus import ANSWERS, Bus, Received
from headrace.config.schema import ServiceConfig
from headrace.errors import LogError, LogFull
from headrace.log import Log
from headrace.nodes.headers import encode_header, required
from headrace.nodes.services import Services

JOBS = ServiceConfig(name="jobs", key="service.jobs.#", topic="queue.bulk.jobs", description="bulk work")
TOLD = ServiceConfig(name="told", key="service.told", topic="queue.told.jobs", finished="queue.told.done")


class Gateway:
    """A log, a bus and services; a test says when they run."""

    def __init__(self, path: Path, *services: ServiceConfig, **log: Any) -> None:
        self.path = path
        self.log_options = {"segment_bytes": 1 << 18, "pool_segments": 1, **log}
        self.services_configured = services
        self.open()

    def open(self) -> None:
        self.log = Log(self.path, **self.log_options)
        self.bus = Bus(self.log)
        self.pending: list[Any] = []
        self.services = Services(self.bus, "gw", "0" * 32, self.services_configured, self.pending.append)

    def close(self) -> None:
        self.bus.close()
        self.log.close()

    def restart(self) -> None:
        self.close()
        self.open()

    def run(self) -> None:
        """All that there is to do."""
        self.log.sync_now()
        self.bus.dispatch()
        self.bus.on_safe()
        self.services._wake()
        while self.pending:
            self.pending.pop(0)()

    def ask(self, key: str, body: bytes = b"work", answers: bool = True, **more: Any) -> None:
        fields = required("web1.example.com-parser", "1" * 32, body)
        fields |= {name.replace("_", "-"): value for name, value in more.items()}
        self.bus.publish(
            key, body, headers=encode_header(fields), protocol=4, confirmed=True, answers=answers
        )

    def seen(self, filter: str) -> list[tuple[dict[str, Any], bytes]]:
        """Headers and bodies of all that was ever published there."""
        member = self.bus.subscribe(filter, start=0).join(None, -1, 0)
        found: list[Received] = []
        while (received := member.receive()) is not None:
            found.append(received)
        member.leave()
        return [(json.loads(one.headers), one.payload) for one in found]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    made = Gateway(tmp_path / "log", JOBS, TOLD)
    yield made
    made.close()


def test_request_becomes_a_job_and_is_acknowledged_with_its_task(gateway: Gateway) -> None:
    gateway.ask("service.jobs.dc1", on_start="reply.s", on_finish="reply.f", correlation_id="c", size=3)
    gateway.run()
    ((job, body),) = gateway.seen("queue.bulk.jobs")
    ((answer, _),) = gateway.seen("reply.s")
    assert (body, job["size"], job["node-name"]) == (b"work", 3, "web1.example.com-parser")
    assert job["task-id"].startswith("web1_example_com-parser.")
    assert (answer["ack"], answer["task-id"], answer["correlation-id"]) == (1, job["task-id"], "c")
    assert (answer["no-on-finish"], answer["node-name"]) == (1, "gw")


def test_every_task_has_a_name_of_its_own_and_the_same_request_the_same(gateway: Gateway) -> None:
    for _ in range(200):
        gateway.ask("service.jobs.x")
    gateway.run()
    names = {job["task-id"] for job, _ in gateway.seen("queue.bulk.jobs")}
    assert len(names) == 200
    assert gateway.services._task_name({"node-name": "n"}, 5) == gateway.services._task_name(
        {"node-name": "n"}, 5
    )


def test_request_without_return_paths_is_answered_nowhere(gateway: Gateway) -> None:
    gateway.ask("service.jobs")
    gateway.run()
    assert len(gateway.seen("queue.#")) == 1
    assert len(gateway.seen("#")) == 2


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"output_to": "a", "maybe_output_to": "b"}, "output-to and maybe-output-to exclude each other"),
        ({"output_to": "a"}, "this service has no output"),
        ({"on_finish": "a.#"}, "on-finish is not a routing key"),
    ],
)
def test_invalid_request_is_answered_with_a_nak_and_becomes_no_job(
    gateway: Gateway, more: dict[str, str], reason: str
) -> None:
    gateway.ask("service.jobs", on_start="reply.s", **more)
    gateway.run()
    ((answer, _),) = gateway.seen("reply.s")
    assert (answer["nak"], answer["reason"], "task-id" in answer) == (1, reason, False)
    assert gateway.seen("queue.#") == []


@pytest.mark.parametrize("more", [{"on_start": "reply.s"}, {"on_finish": "reply.f"}])
def test_request_of_who_may_not_publish_to_its_return_paths_becomes_no_job(
    gateway: Gateway, more: dict[str, str]
) -> None:
    gateway.ask("service.told", answers=False, **more)
    gateway.run()
    assert len(gateway.seen("#")) == 1
    assert gateway.bus.notes() == {}
    assert gateway.services.counters() == {"service_accepted": 0, "service_refused": 1, "service_done": 0}
    assert gateway.bus.stats()["inflight"] == 0


def test_request_without_return_paths_is_anybodys(gateway: Gateway) -> None:
    gateway.ask("service.jobs", answers=False)
    gateway.run()
    assert len(gateway.seen("queue.bulk.jobs")) == 1


def test_job_that_was_not_made_here_is_told_of_only_where_its_sender_may_publish(gateway: Gateway) -> None:
    header = encode_header({"task-id": "forged.1", "on-finish": "reply.f"})
    gateway.services.on_job(4, 0, header, True)
    assert gateway.seen("reply.f") == []
    gateway.services.on_job(4, ANSWERS, header, True)
    assert len(gateway.seen("reply.f")) == 1


def fill(gateway: Gateway) -> None:
    """Leaves the log no room for messages, however small, and none on its way."""
    deadline = time.monotonic() + 60
    for size in (1000, 0):
        while True:
            assert time.monotonic() < deadline
            try:
                gateway.bus.publish("filler", bytes(size))
            except LogFull:
                gateway.log.on_event()
                if gateway.log.full is not None:  # else a segment is being prepared
                    break


def test_request_waits_for_room_in_the_log_however_long_it_takes(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path / "log", JOBS, retention_bytes=1 << 20)
    gateway.bus.hold_for_subscriptions = True
    gateway.ask("service.jobs", on_start="reply.s")
    gateway.log.sync_now()
    gateway.bus.on_safe()
    fill(gateway)
    now = time.time_ns() // 1000
    member = gateway.services._services[0].requests
    for _ in range(20):  # each attempt fails
        now += 1_000_000
        gateway.bus.tick(now)
        (received,) = [one for one in [member.receive(now)] if one]
        with pytest.raises(LogFull):
            gateway.services._accept(gateway.services._services[0], received)
        member.subscription.reject(received.tag, now=now)
    assert gateway.bus.dead == 0
    assert member.subscription.inflight == 1
    gateway.close()


def test_job_whose_answer_had_no_room_is_made_once(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, full = gateway.services._answer, [LogFull("full"), LogFull("full")]

    def answer_or_not(*what: Any) -> None:
        if full:
            raise full.pop()
        answer(*what)

    monkeypatch.setattr(gateway.services, "_answer", answer_or_not)
    gateway.ask("service.jobs", on_start="reply.s")
    deadline = time.monotonic() + 60
    while not gateway.seen("reply.s"):
        assert time.monotonic() < deadline
        gateway.bus.tick()
        gateway.run()
    assert len(gateway.seen("queue.bulk.jobs")) == 1
    assert len(gateway.seen("reply.s")) == 1
    assert not gateway.services._made


def test_request_that_can_never_be_a_job_gets_a_nak(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path / "log", TOLD)
    size = next(n for n in range(gateway.log.max_record, 0, -1) if published(gateway, n))
    gateway.run()
    ((answer, _),) = gateway.seen("reply.s")
    assert answer["nak"] == 1
    assert "bytes" in answer["reason"]
    assert gateway.seen("queue.told.jobs") == []
    assert gateway.bus.notes() == {}
    assert gateway.bus.stats()["inflight"] == 0
    assert size > 1000
    gateway.close()


def published(gateway: Gateway, size: int) -> bool:
    try:
        gateway.ask("service.told", bytes(size), on_start="reply.s", on_finish="reply.f")
    except LogError:
        return False
    return True


def test_end_of_a_job_that_had_no_room_is_told_later(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = encode_header({"task-id": "n.1", "on-finish": "reply.f"})
    answer = gateway.services._answer

    def no_room(*what: Any) -> None:
        raise LogFull("full")

    monkeypatch.setattr(gateway.services, "_answer", no_room)
    gateway.services.on_job(4, ANSWERS, header, True)
    gateway.services.tick()
    monkeypatch.setattr(gateway.services, "_answer", answer)
    gateway.services.on_job(4, ANSWERS, header.replace(b"n.1", b"n.2"), False)
    assert gateway.seen("reply.f") == []  # in their order
    gateway.services.tick()
    gateway.services.tick()
    assert [(one["task-id"], "ack" in one) for one, _ in gateway.seen("reply.f")] == [
        ("n.1", True),
        ("n.2", False),
    ]


def test_finished_job_is_told_to_who_asked_once(gateway: Gateway) -> None:
    gateway.ask("service.told", on_start="reply.s", on_finish="reply.f", correlation_id="c")
    gateway.run()
    ((job, _),) = gateway.seen("queue.told.jobs")
    ((answer, _),) = gateway.seen("reply.s")
    assert "no-on-finish" not in answer
    gateway.restart()
    for _ in range(2):
        gateway.bus.publish(
            "queue.told.done", json.dumps({"task-id": job["task-id"]}).encode(), confirmed=True
        )
    gateway.bus.publish("queue.told.done", b"no task")
    gateway.run()
    ((finished, _),) = gateway.seen("reply.f")
    assert (finished["ack"], finished["task-id"], finished["correlation-id"]) == (1, job["task-id"], "c")
    assert gateway.bus.notes(b"zeroctl/task/") == {}


def test_queue_of_this_process_reports_with_the_header_of_the_job(gateway: Gateway) -> None:
    gateway.services.told_here = lambda topic: topic == "queue.bulk.jobs"
    gateway.ask("service.jobs", on_start="reply.s", on_finish="reply.f")
    gateway.run()
    ((answer, _),) = gateway.seen("reply.s")
    assert "no-on-finish" not in answer
    ((job, _),) = gateway.seen("queue.bulk.jobs")
    assert gateway.services.finished(encode_header(job), result=b"done")
    assert gateway.services.finished(encode_header(job), ok=False, reason="no disk")
    assert not gateway.services.finished(b"{}")
    assert not gateway.services.finished(b"no json")
    (good, body), (bad, _) = gateway.seen("reply.f")
    assert (good["ack"], body) == (1, b"done")
    assert (bad["nak"], bad["reason"], bad["task-id"]) == (1, "no disk", job["task-id"])


def test_request_from_before_a_restart_is_served_after_it(gateway: Gateway) -> None:
    gateway.ask("service.jobs", on_start="reply.s")
    gateway.log.sync_now()
    gateway.restart()
    gateway.run()
    assert len(gateway.seen("queue.bulk.jobs")) == 1
    gateway.restart()
    gateway.run()
    assert len(gateway.seen("queue.bulk.jobs")) == 1


def test_service_that_is_not_configured_any_more_is_forgotten(gateway: Gateway) -> None:
    assert len(gateway.bus.subscriptions) == 3
    gateway.services_configured = (JOBS,)
    gateway.restart()
    assert [one.owner for one in gateway.bus.subscriptions.values()] == ["service:jobs"]
    assert gateway.services.described() == {"jobs": {"path": "service.jobs.#", "description": "bulk work"}}
