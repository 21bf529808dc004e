"""Overhop over real sockets, in a gateway's own process: its options, its queues beside other protocols, and what is
there after a kill."""

import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.wire import overhop as wire
from headrace.wire.overhop import MessageType as T
from tests.gateway import gateways
from tests.gateway.gateways import PATIENCE, GatewayProcess


class Worker:
    """A blocking peer that says and hears messages."""

    def __init__(self, gateway: GatewayProcess, *, register: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", gateway.port("overhop")))
        self.socket.settimeout(PATIENCE)
        self._decoder = wire.Decoder(wire.MOST_PAYLOAD_LIMIT)
        self._messages: list[wire.Message] = []
        self.pushed: list[dict[str, Any]] = []
        self._rid = 0
        if register:
            assert self.ask(T.HELLO).type == T.HI
            assert self.ask(T.REGISTER).type == T.OK

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> wire.Message | None:
        """The next message; None at the end of the stream."""
        while not self._messages:
            try:
                data = self.socket.recv(65536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._messages += self._decoder.feed(data)
        return self._messages.pop(0)

    def answer(self) -> wire.Message:
        """The next message that is no push."""
        while True:
            message = self.receive()
            assert message is not None
            if message.type != T.DELIVER:
                return message
            self.pushed.append(message.payload)

    def ask(self, type: int, **fields: object) -> wire.Message:
        self._rid += 1
        self.send(wire.encode(type, str(self._rid), fields))
        answer = self.answer()
        assert answer.rid == str(self._rid)
        return answer

    def ok(self, type: int, **fields: object) -> dict[str, Any]:
        answer = self.ask(type, **fields)
        assert answer.type == T.OK, answer
        return answer.payload

    def job(self) -> dict[str, Any]:
        if not self.pushed:
            message = self.receive()
            assert message is not None
            assert (message.type, message.rid) == (T.DELIVER, "0")
            return message.payload
        return self.pushed.pop(0)

    def close(self) -> None:
        self.socket.close()


def test_job_goes_from_one_connection_to_another_and_is_finished(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path) as gateway:
        worker, maker = Worker(gateway), Worker(gateway)
        worker.ok(T.ADDQUEUE, name="mail")
        worker.ok(T.SUBSCRIBE, q="mail", credits=10)
        jid = maker.ok(T.ENQUEUE, q="mail", job_payload={"to": "you"})["jid"]
        job = worker.job()
        assert (job["jid"], job["job_payload"]) == (jid, {"to": "you"})
        worker.ok(T.DONE, jid=jid)
        assert maker.ok(T.QSTATS, q="mail")["stats"]["completed"] == 1
        events = {one["protocol"]: one["events"] for one in gateway.status()["listeners"]}["overhop"]
        assert (events["enqueued"], events["pushed"], events["done"]) == (1, 1, 1)
        worker.close()
        maker.close()


def test_job_of_a_worker_that_dies_goes_to_another(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path) as gateway:
        first, second = Worker(gateway), Worker(gateway)
        first.ok(T.SUBSCRIBE, q="_system", credits=1)
        jid = second.ok(T.ENQUEUE, q="_system")["jid"]
        assert first.job()["jid"] == jid
        second.ok(T.SUBSCRIBE, q="_system", credits=1)
        first.close()
        job = second.job()
        assert (job["jid"], job["attempt"]) == (jid, 2)
        second.close()


def test_retry_and_schedule_come_by_themselves(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path) as gateway:
        worker = Worker(gateway)
        worker.ok(T.SUBSCRIBE, q="_system", credits=9)
        soon = wire.time_text(time.time_ns() // 1000 + 300_000)
        jid = worker.ok(T.ENQUEUE, q="_system", scheduled_at=soon, retry_interval_ms=100)["jid"]
        assert worker.job()["attempt"] == 1
        worker.ok(T.FAIL, jid=jid)
        assert worker.job()["attempt"] == 2
        worker.close()


def test_program_of_the_documentation_does_what_it_says(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocols" / "overhop.md").read_text("utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    with GatewayProcess(tmp_path) as gateway:
        done = subprocess.run(
            [sys.executable, "-c", program.replace("127.0.0.1:9876", gateway.places["overhop"])],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "{'to': 'someone'} 1\n", "")


def test_queue_of_the_configuration_takes_what_blipmq_publishes(tmp_path: Path) -> None:
    queues = 'queues=[{name="readings", filter="sensors.#", concurrency_limit=1}]'
    with GatewayProcess(tmp_path, queues) as gateway:
        worker = Worker(gateway)
        config = worker.ok(T.GQUEUE, q="readings")["config"]
        assert config == {"allow_job_overrides": True, "concurrency_limit": 1}
        worker.ok(T.SUBSCRIBE, q="readings", credits=5)
        peer = gateways.Peer.to(gateway)
        peer.publish("sensors.7", b"21.5")
        peer.publish("sensors.8", b"22", qos=0)
        job = worker.job()
        assert (job["topic"], job["job_payload"]) == ("sensors.7", b"21.5")
        worker.ok(T.DONE, jid=job["jid"])
        assert worker.job()["job_payload"] == b"22"
        worker.close()
    with GatewayProcess(
        tmp_path, 'queues=[{name="readings", filter="sensors.#", concurrency_limit=3}]'
    ) as gateway:
        worker = Worker(gateway)
        assert worker.ok(T.GQUEUE, q="readings")["config"]["concurrency_limit"] == 3
        assert worker.ok(T.QSTATS, q="readings")["stats"]["waiting"] == 1
        worker.close()


def test_bound_queue_cannot_be_bound_to_something_else(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, 'queues=[{name="readings", filter="sensors.#"}]') as gateway:
        assert gateway.stop() == 0
    gateway = GatewayProcess(tmp_path, 'queues=[{name="readings", filter="rooms.#"}]')
    assert gateway.ended() == 1
    assert any("bound to 'sensors.#'" in line for line in gateway.errors)
    gateway.kill()


def test_purge_runs_by_the_configured_times(tmp_path: Path) -> None:
    session = "listen.overhop.wire.session"
    with GatewayProcess(
        tmp_path,
        f"{session}.unhelloed_max_lifetime_seconds=1",
        f"{session}.helloed_unregistered_max_lifetime_seconds=1",
        f"{session}.ident_register_timeout_seconds=1",
    ) as gateway:
        silent, greeted = Worker(gateway, register=False), Worker(gateway, register=False)
        greeted.send(wire.encode(T.HELLO, "1", {}))
        assert [greeted.answer().type for _ in range(2)] == [T.HI, T.IDENT]
        end = greeted.answer()
        assert (end.type, end.rid, end.payload["code"]) == (T.ERR, "0", "CONNECTION_TIMEOUT")
        assert greeted.receive() is None
        assert silent.receive() is None
        silent.close()
        greeted.close()


def test_limit_and_extension_are_options(tmp_path: Path) -> None:
    with GatewayProcess(
        tmp_path, "listen.overhop.wire.max_envelope_size_bytes=64KiB", "listen.overhop.deliver=false"
    ) as gateway:
        worker = Worker(gateway)
        worker.ok(T.SUBSCRIBE, q="_system", credits=1)
        worker.ok(T.ENQUEUE, q="_system")
        assert worker.ok(T.QSTATS, q="_system")["stats"]["waiting"] == 1
        worker.send(wire.encode(T.ENQUEUE, "x", {"q": "_system", "job_payload": b"x" * 65536}))
        assert worker.receive() is None
        worker.close()


@pytest.mark.parametrize("size", ["65535", "33554433"])
def test_limit_outside_the_protocols_range_is_refused(tmp_path: Path, size: str) -> None:
    gateway = GatewayProcess(tmp_path, f"listen.overhop.wire.max_envelope_size_bytes={size}")
    assert gateway.ended() == 2
    assert any("64KiB to 32MiB" in line for line in gateway.errors)
    gateway.kill()


def test_what_was_confirmed_survives_a_kill_at_any_moment(tmp_path: Path, soak: int) -> None:
    """Jobs that were confirmed are there, those that were confirmed to be done do not come again, and the queues are
    as they were: over many lives of the gateway."""
    sets = ("bus.max_deliveries=1000", "log.retention_bytes=64MiB", "listen.overhop.finished_jobs=100000")
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rolls = random.Random(seed)
    jobs: dict[str, bytes] = {}  # by id: those that were confirmed
    done: set[str] = set()  # confirmed to be done
    perhaps: set[str] = set()  # DONE was sent, and not answered before the end
    for life in range(5 * soak):
        with GatewayProcess(tmp_path, *sets) as gateway:
            worker = Worker(gateway)
            if life == 0:
                worker.ok(T.ADDQUEUE, name="mail", config={"concurrency_limit": 100})
                worker.ok(T.ADDQUEUE, name="held")
                worker.ok(T.PAUSE, q="held")
            assert worker.ok(T.GQUEUE, q="mail")["config"]["concurrency_limit"] == 100
            assert worker.ok(T.GQUEUE, q="held")["state"] == "paused"
            for jid in rolls.sample(sorted(done), min(20, len(done))):
                assert worker.ok(T.JOB, jid=jid).get("status") == "completed"
            worker.ok(T.SUBSCRIBE, q="mail", credits=10_000)
            asked: dict[str, tuple[str, bytes | str]] = {}
            rid = 0
            for _ in range(rolls.randrange(1, 8)):
                batch = []
                for _ in range(rolls.randrange(60)):
                    rid += 1
                    body = f"{life} {rid} ".encode() * rolls.randrange(1, 30)
                    asked[f"e{rid}"] = ("enqueue", body)
                    batch.append(wire.encode(T.ENQUEUE, f"e{rid}", {"q": "mail", "job_payload": body}))
                for job in worker.pushed:
                    jid = job["jid"]
                    assert jid not in done, "a finished job came again"
                    assert jobs.get(jid, job["job_payload"]) == job["job_payload"]
                    if rolls.random() < 0.7:
                        rid += 1
                        asked[f"d{rid}"] = ("done", jid)
                        perhaps.add(jid)
                        batch.append(wire.encode(T.DONE, f"d{rid}", {"jid": jid}))
                worker.pushed.clear()
                worker.send(b"".join(batch) + wire.encode(T.PING, "ping", {}))
                if rolls.random() < 0.3:
                    break  # killed with all of it under way
                while (answer := worker.answer()).rid != "ping":
                    what, of = asked.pop(answer.rid)
                    assert answer.type == T.OK
                    if what == "enqueue":
                        assert isinstance(of, bytes)
                        jobs[answer.payload["jid"]] = of
                    else:
                        assert isinstance(of, str)
                        done.add(of)
            gateway.kill()
            worker.close()
    with GatewayProcess(tmp_path, *sets) as gateway:
        worker = Worker(gateway)
        worker.ok(T.SUBSCRIBE, q="mail", credits=100_000)
        missing = set(jobs) - done - perhaps
        while missing:
            job = worker.job()
            assert job["jid"] not in done
            missing.discard(job["jid"])
            worker.ok(T.DONE, jid=job["jid"])
        worker.close()
