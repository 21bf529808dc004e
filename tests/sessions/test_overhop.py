"""What an Overhop peer is answered, message by message, and where its connection ends: the protocol's text, its
server's behaviour where the text is silent, and docs/protocols/overhop.md where this gateway does better."""

import re
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from headrace.config.schema import Key
from headrace.mapping import Map, Rule
from headrace.sessions import overhop
from headrace.sessions.overhop import Overhop
from headrace.wire import overhop as wire
from headrace.wire.overhop import MessageType as T
from tests.sessions.passive_overhop import SECOND, OverhopGateway, Peer

UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
NOBODY = "00000000-0000-4000-8000-000000000000"
STATES = ("new", "waiting", "delayed", "active", "completed", "failed")
CLIENT_TYPES = [kind for kind in T if kind <= 100]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[OverhopGateway]:
    gateway = OverhopGateway(tmp_path)
    yield gateway
    gateway.close()


def in_state(gateway: OverhopGateway, state: str) -> Peer:
    if state == "worker":
        return gateway.worker()
    peer = gateway.connect()
    if state == "greeted":
        peer.ask(T.HELLO)
    return peer


def stats(peer: Peer, queue: str) -> dict[str, int]:
    """How many jobs are in each state, without those that have none."""
    told = peer.ok(T.QSTATS, q=queue)
    assert told["q"] == queue
    assert set(told["stats"]) == set(STATES)
    return {state: count for state, count in told["stats"].items() if count}


# --- the handshake and the order of messages (spec: Handshake, Registration, Order Constraints) -------------


def test_hello_is_answered_with_hi_and_register_with_a_worker_id(gateway: OverhopGateway) -> None:
    peer = gateway.connect()
    assert peer.exchange(wire.encode(1, "abc", {"anything": [1]})) == wire.encode(103, "abc", {})
    answer = peer.ask(T.REGISTER)
    assert answer.type == T.OK
    assert set(answer.payload) == {"wid"}
    assert UUID4.fullmatch(answer.payload["wid"])
    assert peer.session.wid == answer.payload["wid"]


ALLOWED = {
    "anonymous": {T.HELLO},
    "greeted": {T.REGISTER},
    "worker": set(CLIENT_TYPES) - {T.HELLO, T.REGISTER},
}


@pytest.mark.parametrize("state", ALLOWED)
@pytest.mark.parametrize("kind", [*range(-1, 22), *range(60, 70), 100, *range(101, 112), 2**63 - 1, -(2**63)])
def test_message_out_of_order_is_a_violation_that_closes(
    gateway: OverhopGateway, state: str, kind: int
) -> None:
    peer = in_state(gateway, state)
    if kind in ALLOWED[state]:
        (answer,) = peer.say(kind, {})
        if answer.type == T.ERR:  # for its fields, not for its place
            assert f"type {kind}" not in answer.payload["msg"]
        return
    assert peer.err(kind, {}) == "PROTOCOL_VIOLATION"
    assert peer.closing


def test_nothing_behind_a_violation_is_handled(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    answers = peer.send(wire.encode(T.HELLO, "1", {}), wire.encode(T.PING, "2", {}))
    assert [answer.rid for answer in answers] == ["1"]
    assert peer.closing


def test_request_ids_of_any_size_are_echoed(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    for size in (1, 31, 32, 255, 256, 65535, 65536, 200_000):
        rid = "ü" * (size // 2) + "x" * (size % 2)
        (answer,) = peer.send(wire.encode(T.PING, rid, {}))
        assert (answer.type, answer.rid) == (T.PONG, rid)


def test_pong_has_the_servers_time(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    answer = peer.ask(T.PING)
    assert answer.type == T.PONG
    assert set(answer.payload) == {"server_time"}
    assert answer.payload["server_time"].endswith("+00:00")
    assert wire.parse_time(answer.payload["server_time"]) == gateway.now


# --- what closes without a word (notes: A) ------------------------------------------------------------------


@pytest.mark.parametrize("state", ALLOWED)
@pytest.mark.parametrize(
    "bad",
    [
        struct.pack(">I", 0),
        struct.pack(">I", 8 * 1024 * 1024 + 1),
        struct.pack(">I", 1) + b"\xc0",
        struct.pack(">I", 2) + b"\x80\x80",
        *[
            struct.pack(">I", len(body)) + body
            for body in (
                msgpack.packb({"v": 1, "t": 1, "rid": "1", "p": {}}),
                msgpack.packb({"v": 2, "t": "1", "rid": "1", "p": {}}),
                msgpack.packb({"v": 2, "t": 1, "rid": "", "p": {}}),
                msgpack.packb({"v": 2, "t": 1, "rid": "1", "p": []}),
                msgpack.packb({"v": 2, "t": 1, "rid": "1", "p": {}, "x": 1.0}),
                msgpack.packb({"v": 2, "t": 1, "rid": "1", "p": {"x": {"y": [2**63]}}}),
            )
        ],
    ],
    ids=range(10),
)
def test_broken_frame_closes_without_a_word_but_what_came_before_is_answered(
    gateway: OverhopGateway, state: str, bad: bytes
) -> None:
    peer = in_state(gateway, state)
    good = {"anonymous": T.HELLO, "greeted": T.REGISTER, "worker": T.PING}[state]
    answers = peer.send(wire.encode(good, "1", {}) + bad + wire.encode(T.PING, "2", {}))
    assert [answer.rid for answer in answers] == ["1"]
    assert peer.closing


def test_limit_is_the_configured_one(tmp_path: Path) -> None:
    for wrong in (0, 65535, 33554433):
        gateway = OverhopGateway(tmp_path / str(wrong))
        with pytest.raises(ValueError, match="65536"):
            Overhop(gateway.queues, gateway.keys, limit=wrong)
        gateway.close()
    gateway = OverhopGateway(tmp_path / "log", limit=65536)
    peer = gateway.worker()
    data = b"x" * (65536 - len(wire.encode(T.ENQUEUE, "1", {"q": "_system", "job_payload": b""})) + 4 - 1)
    frame = wire.encode(T.ENQUEUE, "1", {"q": "_system", "job_payload": data})
    assert len(frame) == 65536 + 4
    assert peer.send(frame)[0].type == T.OK
    assert peer.send(wire.encode(T.ENQUEUE, "1", {"q": "_system", "job_payload": data + b"x"})) == []
    assert peer.closing
    gateway.close()


def test_frames_may_be_split_and_pipelined_anywhere(gateway: OverhopGateway) -> None:
    stream = b"".join(
        [
            wire.encode(T.HELLO, "1", {}),
            wire.encode(T.REGISTER, "2", {}),
            wire.encode(T.ENQUEUE, "3", {"q": "_system", "job_payload": b"x"}),
            wire.encode(T.LQUEUES, "4", {}),
        ]
    )
    for at in range(len(stream) + 1):
        peer = gateway.connect()
        answers = [*peer.send(stream[:at]), *peer.send(stream[at:])]
        assert [(answer.type, answer.rid) for answer in answers] == [
            (103, "1"),
            (101, "2"),
            (101, "3"),
            (101, "4"),
        ]
    peer = gateway.connect()
    answers = [answer for i in range(len(stream)) for answer in peer.send(stream[i : i + 1])]
    assert len(answers) == 4


# --- the purge (spec: Heartbeat-Driven Connection Purge) ----------------------------------------------------


def wait(peer: Peer, seconds: int) -> list[wire.Message]:
    """What is said in so many seconds, told the time as often as a gateway tells it."""
    said = []
    for _ in range(seconds * 4):
        peer.gateway.now += SECOND // 4
        said += peer.tick()
    return said


def test_who_never_greets_is_closed_without_a_word(gateway: OverhopGateway) -> None:
    peer = gateway.connect()
    peer.tick()
    assert wait(peer, 9) == []
    assert not peer.closing
    assert wait(peer, 1) == []
    assert peer.closing


def test_who_never_registers_is_asked_and_then_closed(gateway: OverhopGateway) -> None:
    peer = gateway.connect()
    peer.ask(T.HELLO)
    assert wait(peer, 9) == []
    (ident,) = wait(peer, 1)
    assert (ident.type, ident.rid) == (T.IDENT, "0")
    assert set(ident.payload) == {"register_timeout_seconds", "reply_deadline"}
    assert ident.payload["register_timeout_seconds"] == 2
    assert wire.parse_time(ident.payload["reply_deadline"]) == gateway.now + 2 * SECOND
    assert not peer.closing
    (end,) = wait(peer, 2)
    assert (end.type, end.rid, end.payload["code"]) == (T.ERR, "0", "CONNECTION_TIMEOUT")
    assert peer.closing


def test_asked_peer_may_register_until_the_deadline(gateway: OverhopGateway) -> None:
    peer = gateway.connect()
    peer.ask(T.HELLO)
    wait(peer, 10)
    gateway.now += 2 * SECOND  # exactly at it, before the purge looks
    assert peer.ask(T.REGISTER).type == T.OK
    assert wait(peer, 30) == []
    assert not peer.closing


def test_registering_after_the_deadline_is_refused_with_its_own_code(gateway: OverhopGateway) -> None:
    peer = gateway.connect()
    peer.ask(T.HELLO)
    wait(peer, 10)
    gateway.now += 2 * SECOND + 1
    assert peer.err(T.REGISTER) == "REGISTER_TIMEOUT"
    assert peer.closing


def test_asked_peer_may_say_nothing_else(gateway: OverhopGateway) -> None:
    peer = gateway.connect()
    peer.ask(T.HELLO)
    wait(peer, 10)
    assert peer.err(T.HELLO) == "PROTOCOL_VIOLATION"
    assert peer.closing


@pytest.mark.parametrize(("times", "cadence"), [((10, 10, 2), 2), ((3, 10, 20), 3), ((7, 5, 6), 5)])
def test_purge_looks_in_the_cadence_of_the_shortest_time(
    tmp_path: Path, times: tuple[int, int, int], cadence: int
) -> None:
    unhelloed, unregistered, ident = times
    gateway = OverhopGateway(tmp_path, unhelloed=unhelloed, unregistered=unregistered, ident=ident)
    assert gateway.shared.cadence_us == cadence * SECOND
    silent, greeted = gateway.connect(), gateway.connect()
    silent.tick()
    greeted.ask(T.HELLO)
    begin = gateway.now
    said: dict[str, int] = {}
    while not (silent.closing and greeted.closing):
        gateway.now += SECOND // 4
        for message in greeted.tick():
            said[message.name] = gateway.now - begin
        silent.tick()
        if silent.closing:
            said.setdefault("closed", gateway.now - begin)
    rounded = {
        name: -(-seconds // cadence) * cadence * SECOND
        for name, seconds in (("u", unhelloed), ("r", unregistered))
    }
    assert said["closed"] == rounded["u"]
    assert said["IDENT"] == rounded["r"]
    assert said["ERR"] == rounded["r"] + -(-ident // cadence) * cadence * SECOND
    gateway.close()


def test_workers_are_never_purged(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    assert wait(peer, 60) == []
    assert not peer.closing


# --- fields (spec, notes: B) --------------------------------------------------------------------------------

VIOLATIONS: list[tuple[int, dict[str, Any]]] = [
    (T.PING, {"x": 1}),
    (T.LQUEUES, {"x": None}),
    (T.STATUS, {"x": 1}),
    *[(kind, {}) for kind in CLIENT_TYPES if kind not in (T.HELLO, T.REGISTER, T.PING, T.LQUEUES, T.STATUS)],
    *[
        (kind, {"q": wrong, "status": "new"})
        for kind in (T.GQUEUE, T.SUBSCRIBE, T.RMQUEUE, T.PAUSE, T.RESUME, T.ENQUEUE, T.LSJOB, T.QSTATS)
        for wrong in (None, 1, b"_system", True, ["_system"])
    ],
    *[
        (T.SUBSCRIBE, {"q": "_system", "credits": wrong})
        for wrong in (-1, 2**32, None, True, "1", 2**63 - 1, b"\x01")
    ],
    *[
        (T.UNSUBSCRIBE, {"sid": wrong})
        for wrong in (None, 1, "", "x", NOBODY[:-1], NOBODY + "0", "{" + NOBODY)
    ],
    *[(T.CREDIT, {"sid": NOBODY, "credits": wrong}) for wrong in (0, -1, 2**32, None, True, "1")],
    *[(T.CREDIT, {"sid": wrong, "credits": 1}) for wrong in (None, 1, "x")],
    (T.CREDIT, {"sid": NOBODY}),
    *[(T.ADDQUEUE, {"name": wrong}) for wrong in (None, 1, b"x")],
    *[(T.ADDQUEUE, {"name": "x", "config": wrong}) for wrong in (1, "", [])],
    *[
        (T.ADDQUEUE, {"name": "x", "config": {"concurrency_limit": wrong}})
        for wrong in (0, -1, "1", True, 2**32)
    ],
    *[(T.ADDQUEUE, {"name": "x", "config": {"allow_job_overrides": wrong}}) for wrong in (0, None, "yes")],
    *[
        (T.ENQUEUE, {"q": "_system", "scheduled_at": wrong})
        for wrong in (1, "", "tomorrow", b"2026-01-01T00:00:00Z")
    ],
    *[(T.ENQUEUE, {"q": "_system", "max_attempts": wrong}) for wrong in ("1", True, [1])],
    *[(T.ENQUEUE, {"q": "_system", "retry_interval_ms": wrong}) for wrong in ("1", False, {})],
    *[
        (kind, {"jid": wrong})
        for kind in (T.JOB, T.RMJOB, T.DONE, T.FAIL, T.EXTEND)
        for wrong in (None, 1, b"x:y")
    ],
    *[(T.LSJOB, {"q": "_system", "status": wrong}) for wrong in (None, 1)],
    *[(T.LSJOB, {"q": "_system", "status": "new", name: "1"}) for name in ("page", "page_size")],
    *[(T.FAIL, {"jid": f"_system:{NOBODY}", "retry_in_ms": wrong}) for wrong in (-1, "1", True, 2**62)],
    (T.FAIL, {"jid": f"_system:{NOBODY}", "reason": 1}),
]


@pytest.mark.parametrize(("kind", "payload"), VIOLATIONS, ids=[f"{T(k).name}-{p}" for k, p in VIOLATIONS])
def test_wrong_field_is_a_violation_that_closes(
    gateway: OverhopGateway, kind: int, payload: dict[str, Any]
) -> None:
    peer = gateway.worker()
    assert peer.err(kind, payload) == "PROTOCOL_VIOLATION"
    assert peer.closing


REFUSALS: list[tuple[str, int, dict[str, Any]]] = [
    *[
        ("QUEUE_NOT_FOUND", kind, {"q": queue, "status": "new"})
        for kind in (T.SUBSCRIBE, T.RMQUEUE, T.PAUSE, T.RESUME, T.ENQUEUE, T.LSJOB, T.QSTATS)
        for queue in ("", "missing", "_missing", "MAIL", "mail ", "x" * 1000)
    ],
    *[("SUBSCRIPTION_NOT_FOUND", T.UNSUBSCRIBE, {"sid": NOBODY})],
    *[("SUBSCRIPTION_NOT_FOUND", T.CREDIT, {"sid": NOBODY, "credits": 1})],
    ("DUPLICATE_QUEUE", T.ADDQUEUE, {"name": "mail"}),
    ("DUPLICATE_QUEUE", T.ADDQUEUE, {"name": "_system"}),
    ("SYSTEM_QUEUE_FORBIDDEN", T.ADDQUEUE, {"name": "_other"}),
    *[
        ("INVALID_QUEUE_NAME", T.ADDQUEUE, {"name": name})
        for name in ("", "-x", "a b", "a.b", "a*", "#", "ü", "a:b", "x" * 256, "a\n", "²")
    ],
    *[("SYSTEM_QUEUE_FORBIDDEN", kind, {"q": "_system"}) for kind in (T.RMQUEUE, T.PAUSE, T.RESUME)],
    ("QUEUE_ALREADY_RUNNING", T.RESUME, {"q": "mail"}),
    ("QUEUE_ALREADY_PAUSED", T.PAUSE, {"q": "held"}),
    *[("INVALID_MAX_ATTEMPTS", T.ENQUEUE, {"q": "mail", "max_attempts": wrong}) for wrong in (0, -1, 2**32)],
    *[
        ("INVALID_RETRY_INTERVAL_MS", T.ENQUEUE, {"q": "mail", "retry_interval_ms": wrong})
        for wrong in (0, -1, 2**62)
    ],
    ("INVALID_MAX_ATTEMPTS", T.ENQUEUE, {"q": "strict", "max_attempts": 1}),
    ("INVALID_RETRY_INTERVAL_MS", T.ENQUEUE, {"q": "strict", "retry_interval_ms": 1}),
    *[
        ("INVALID_JOB_ID", kind, {"jid": jid})
        for kind in (T.JOB, T.RMJOB, T.DONE, T.FAIL, T.EXTEND)
        for jid in ("", "mail", NOBODY, ":" + NOBODY, "mail:", "mail:x", f"mail:{NOBODY}0")
    ],
    *[
        ("JOB_NOT_FOUND", kind, {"jid": jid})
        for kind in (T.RMJOB, T.DONE, T.FAIL, T.EXTEND)
        for jid in (f"mail:{NOBODY}", f"missing:{NOBODY}")
    ],
    *[
        ("INVALID_JOB_STATUS_FILTER", T.LSJOB, {"q": "mail", "status": status})
        for status in ("", "done", "NEW")
    ],
    *[
        ("INVALID_PAGE_SIZE", T.LSJOB, {"q": "mail", "status": "new", "page_size": size})
        for size in (0, -1, 1001)
    ],
    *[("INVALID_PAGE", T.LSJOB, {"q": "mail", "status": "new", "page": page}) for page in (0, -1)],
]


@pytest.mark.parametrize(
    ("code", "kind", "payload"), REFUSALS, ids=[f"{c}-{T(k).name}-{str(p)[:40]}" for c, k, p in REFUSALS]
)
def test_refusal_has_its_code_and_leaves_the_connection_open(
    gateway: OverhopGateway, code: str, kind: int, payload: dict[str, Any]
) -> None:
    peer = gateway.worker()
    for name, config in (("mail", {}), ("held", {}), ("strict", {"allow_job_overrides": False})):
        peer.ok(T.ADDQUEUE, name=name, config=config)
    peer.ok(T.PAUSE, q="held")
    assert peer.err(kind, payload) == code
    assert not peer.closing
    assert peer.ask(T.PING).type == T.PONG


def test_unknown_fields_are_ignored_where_there_may_be_some(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    extra = {f"x{i}": [{}] for i in range(30)}
    peer.ok(T.ADDQUEUE, {**extra, "name": "mail", "config": {"x": 1}})
    assert peer.ok(T.GQUEUE, {**extra, "q": "mail"})["name"] == "mail"
    assert "jid" in peer.ok(T.ENQUEUE, {**extra, "q": "mail", "job_payload": 1})


# --- queues -------------------------------------------------------------------------------------------------


def test_new_gateway_has_the_system_queue_alone(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    (system,) = peer.ok(T.LQUEUES)["queues"]
    assert UUID4.fullmatch(system.pop("id"))
    assert system == {
        "config": {"allow_job_overrides": True, "concurrency_limit": None},
        "name": "_system",
        "state": "running",
    }
    assert peer.ok(T.GQUEUE, q="_system")["name"] == "_system"
    assert peer.ok(T.GQUEUE, q="missing") == {}
    assert peer.ok(T.GQUEUE, q="") == {}
    assert "sid" in peer.ok(T.SUBSCRIBE, q="_system")


def test_queues_are_added_listed_by_name_paused_and_removed(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    for name in ("zeta", "Alpha", "beta-1_x", "0"):
        qid = peer.ok(T.ADDQUEUE, name=name, config={"concurrency_limit": 7, "allow_job_overrides": False})[
            "qid"
        ]
        assert UUID4.fullmatch(qid)
        assert peer.ok(T.GQUEUE, q=name) == {
            "config": {"allow_job_overrides": False, "concurrency_limit": 7},
            "id": qid,
            "name": name,
            "state": "running",
        }
    listed = peer.ok(T.LQUEUES)["queues"]
    assert [queue["name"] for queue in listed] == ["0", "Alpha", "_system", "beta-1_x", "zeta"]
    assert peer.ok(T.PAUSE, q="zeta") == {}
    assert peer.ok(T.GQUEUE, q="zeta")["state"] == "paused"
    assert peer.ok(T.RESUME, q="zeta") == {}
    assert peer.ok(T.RMQUEUE, q="zeta") == {}
    assert peer.ok(T.GQUEUE, q="zeta") == {}


def test_queue_with_unfinished_jobs_is_not_removed(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    peer.ok(T.ADDQUEUE, name="mail")
    sid = peer.subscribe("mail", 1)
    peer.enqueue("mail")
    assert peer.err(T.RMQUEUE, q="mail") == "QUEUE_NOT_EMPTY"
    (job,) = peer.jobs()
    assert peer.err(T.RMQUEUE, q="mail") == "QUEUE_NOT_EMPTY"
    peer.ok(T.DONE, jid=job["jid"])
    peer.ok(T.RMQUEUE, q="mail")
    assert peer.err(T.CREDIT, sid=sid, credits=1) == "SUBSCRIPTION_NOT_FOUND"
    assert peer.err(T.UNSUBSCRIBE, sid=sid) == "SUBSCRIPTION_NOT_FOUND"
    assert peer.err(T.ENQUEUE, q="mail") == "QUEUE_NOT_FOUND"
    assert peer.ok(T.JOB, jid=job["jid"]) == {}
    peer.ok(T.ADDQUEUE, name="mail")  # a new one, with none of the old one's jobs
    assert stats(peer, "mail") == {}
    assert "sid" in peer.ok(T.SUBSCRIBE, q="mail")


def test_status_tells_of_everything(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    gateway.connect()
    gateway.elapse(90)
    told = peer.ok(T.STATUS)
    assert set(told) == {"application", "memory", "pools", "storage", "queues"}
    assert told["application"]["uptime_seconds"] == 90
    assert told["memory"]["max_resident_bytes"] > 1_000_000
    assert told["pools"] == {"anonymous": 1, "workers": 1}
    assert set(told["queues"]) == {"_system"}
    assert told["queues"]["_system"]["filter"] == "queue._system.#"
    assert told["storage"]["full"] is False


def test_idle_worker_is_told_that_its_queue_was_removed(gateway: OverhopGateway) -> None:
    peer, idle = gateway.worker(), gateway.worker()
    for name in ("mail", "other"):
        peer.ok(T.ADDQUEUE, name=name)
    sid = idle.subscribe("mail", 1)
    idle.subscribe("other", 1)
    woken: list[bool] = []
    idle.session.connection = Woken(woken)
    peer.ok(T.RMQUEUE, q="mail")
    assert woken
    (push,) = idle.pushed()
    assert (push.type, push.rid, push.payload) == (T.ENDED, "0", {"q": "mail", "sid": sid})
    assert idle.session.subscriptions == 1
    assert gateway.shared.counters()["subscriptions_ended"] == 1
    peer.enqueue("other")
    assert len(idle.jobs()) == 1


def test_worker_that_removes_a_queue_and_subscribes_to_another_at_once_is_told_of_the_end(
    gateway: OverhopGateway,
) -> None:
    peer = gateway.worker()
    for name in ("mail", "other"):
        peer.ok(T.ADDQUEUE, name=name)
    sid = peer.subscribe("mail", 1)
    both = wire.encode(T.RMQUEUE, "r", {"q": "mail"}) + wire.encode(T.SUBSCRIBE, "s", {"q": "other"})
    removed, ended, subscribed = peer.decoder.feed(peer.exchange(both))
    assert [(removed.type, removed.rid), (subscribed.type, subscribed.rid)] == [(T.OK, "r"), (T.OK, "s")]
    assert (ended.type, ended.rid, ended.payload) == (T.ENDED, "0", {"q": "mail", "sid": sid})
    assert gateway.shared.counters()["subscriptions_ended"] == 1
    assert peer.err(T.CREDIT, sid=sid, credits=1) == "SUBSCRIPTION_NOT_FOUND"
    assert peer.session.subscriptions == 1


class Woken:
    """Who carries a session's bytes."""

    peer = name = "test"

    def __init__(self, told: list[bool]) -> None:
        self.told = told

    def wake(self) -> None:
        self.told.append(True)


def test_nobody_is_told_of_removed_queues_without_the_extension(tmp_path: Path) -> None:
    gateway = OverhopGateway(tmp_path, deliver=False)
    peer = gateway.worker()
    peer.ok(T.ADDQUEUE, name="mail")
    sid = peer.subscribe("mail", 1)
    peer.ok(T.RMQUEUE, q="mail")
    assert peer.pushed() == []
    assert peer.err(T.CREDIT, sid=sid, credits=1) == "SUBSCRIPTION_NOT_FOUND"
    peer.ok(T.ADDQUEUE, name="other")
    peer.subscribe("other", 1)
    assert peer.pushed() == []
    assert peer.session.subscriptions == 1
    assert gateway.shared.counters()["subscriptions_ended"] == 0
    gateway.close()


def test_queue_whose_topic_cannot_be_made_leaves_nothing_behind(tmp_path: Path) -> None:
    gateway = OverhopGateway(tmp_path, bus={"max_topics": 2})
    peer = gateway.worker()
    gateway.bus.publish("one.more", b"")
    assert peer.err(T.ADDQUEUE, name="mail") == "QUEUE_POOL_ERROR"
    assert [one.owner for one in gateway.bus.subscriptions.values()] == ["_system"]
    assert set(gateway.bus.notes()) == {b"queue._system"}
    gateway.close()


def test_one_list_of_jobs_looks_at_so_many_and_no_more(
    gateway: OverhopGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhop, "OVERHOP_LISTED_JOBS", 10)
    peer = gateway.worker()
    ids = [peer.enqueue("_system") for _ in range(12)]

    def listed(status: str, page: int) -> list[str]:
        told = peer.ok(T.LSJOB, q="_system", status=status, page=page, page_size=6)
        return [job["jid"] for job in told["jobs"]]

    assert [listed("waiting", page) for page in (1, 2, 3)] == [ids[:6], ids[6:10], []]
    assert stats(peer, "_system") == {"waiting": 12}
    last = peer.enqueue("_system", scheduled_at="2999-01-01T00:00:00Z")
    assert listed("delayed", 1) == []
    peer.subscribe("_system", 12)
    assert len(peer.jobs()) == 12
    assert listed("delayed", 1) == [last]


def test_number_of_queues_is_bounded(tmp_path: Path) -> None:
    gateway = OverhopGateway(tmp_path, queues={"most": 3})
    peer = gateway.worker()
    peer.ok(T.ADDQUEUE, name="a")
    peer.ok(T.ADDQUEUE, name="b")
    assert peer.err(T.ADDQUEUE, name="c") == "QUEUE_POOL_ERROR"
    gateway.close()


# --- subscriptions and credits ------------------------------------------------------------------------------


def test_subscription_is_one_for_each_queue_and_worker(gateway: OverhopGateway) -> None:
    first, second = gateway.worker(), gateway.worker()
    first.ok(T.ADDQUEUE, name="mail")
    sid = first.subscribe("mail")
    assert UUID4.fullmatch(sid)
    assert first.err(T.SUBSCRIBE, q="mail") == "DUPLICATE_SUBSCRIPTION"
    other = first.subscribe("_system")
    theirs = second.subscribe("mail")
    assert len({sid, other, theirs}) == 3
    assert second.err(T.UNSUBSCRIBE, sid=sid) == "SUBSCRIPTION_NOT_FOUND"
    assert second.err(T.CREDIT, sid=sid, credits=1) == "SUBSCRIPTION_NOT_FOUND"
    assert first.ok(T.UNSUBSCRIBE, sid=sid) == {}
    assert first.err(T.UNSUBSCRIBE, sid=sid) == "SUBSCRIPTION_NOT_FOUND"
    assert first.subscribe("mail") != sid


def test_subscription_is_known_by_every_form_of_its_uuid(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    for form in (
        str,
        str.upper,
        lambda s: s.replace("-", ""),
        lambda s: f"{{{s}}}",
        lambda s: f"urn:uuid:{s.upper()}",
    ):
        sid = peer.subscribe("_system")
        assert peer.ok(T.CREDIT, sid=form(sid), credits=1) == {}
        assert peer.ok(T.UNSUBSCRIBE, sid=form(sid)) == {}


def test_push_costs_a_credit_and_more_are_given(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    peer.ok(T.ADDQUEUE, name="mail")
    ids = [peer.enqueue("mail", i) for i in range(10)]
    sid = peer.subscribe("mail", 3)
    assert [job["jid"] for job in peer.jobs()] == ids[:3]
    assert peer.ok(T.CREDIT, sid=sid, credits=2) == {}
    assert [job["jid"] for job in peer.jobs()] == ids[3:5]
    for jid in ids[:5]:  # finishing gives none back
        peer.ok(T.DONE, jid=jid)
    assert peer.jobs() == []
    peer.ok(T.CREDIT, sid=sid, credits=2**32 - 1)
    peer.ok(T.CREDIT, sid=sid, credits=2**32 - 1)
    assert [job["jid"] for job in peer.jobs()] == ids[5:]


def test_without_credits_nothing_is_pushed(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    sid = peer.subscribe("_system")
    peer.enqueue("_system")
    assert peer.jobs() == []
    peer.ok(T.CREDIT, sid=sid, credits=1)
    assert len(peer.jobs()) == 1


def test_push_is_as_documented(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    sid = peer.subscribe("_system", 1)
    jid = peer.enqueue("_system", b"\x00\xff")
    gateway.settle()
    pushed = peer.session.pull(gateway.now)
    assert pushed == wire.encode(
        110,
        "0",
        {
            "attempt": 1,
            "deadline_ms": 60000,
            "jid": jid,
            "job_payload": b"\x00\xff",
            "sid": sid,
            "topic": "queue._system.jobs",
        },
    )


def test_extension_can_be_turned_off(tmp_path: Path) -> None:
    gateway = OverhopGateway(tmp_path, deliver=False)
    peer = gateway.worker()
    sid = peer.subscribe("_system", 5)
    jid = peer.enqueue("_system")
    assert peer.jobs() == []
    assert peer.ok(T.CREDIT, sid=sid, credits=1) == {}
    assert peer.jobs() == []
    assert stats(peer, "_system") == {"waiting": 1}
    for kind in (T.DONE, T.FAIL, T.EXTEND):
        peer = gateway.worker()
        assert peer.err(kind, jid=jid) == "PROTOCOL_VIOLATION"
        assert peer.closing
    gateway.close()


# --- jobs ---------------------------------------------------------------------------------------------------

VALUES = [
    b"",
    b"bytes \x00\xff",
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    "",
    "täxt",
    [],
    [1, [b"x"]],
    {},
    {"a": {"b": None}},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_job_payload_comes_back_as_the_value_it_was(gateway: OverhopGateway, value: object) -> None:
    peer = gateway.worker()
    reader = gateway.bus.subscribe("queue.#").join(None, -1, gateway.now)
    peer.subscribe("_system", 1)
    jid = peer.enqueue("_system", value)
    (job,) = peer.jobs()
    assert job["job_payload"] == value
    assert type(job["job_payload"]) is type(value)
    told = peer.ok(T.JOB, jid=jid)["payload"]
    assert (told, type(told)) == (value, type(value))
    record = reader.receive(gateway.now)
    assert record is not None
    if isinstance(value, bytes):
        assert (record.payload, record.flags & 4) == (value, 0)
    else:
        assert (record.payload, record.flags & 4) == (wire.pack(value), 4)
    assert (record.topic, record.protocol) == (b"queue._system.jobs", 2)


def test_job_without_a_payload_has_nil(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    jid = peer.ok(T.ENQUEUE, q="_system")["jid"]
    assert peer.ok(T.JOB, jid=jid)["payload"] is None


def test_what_another_protocol_publishes_to_a_bound_topic_is_a_job(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    gateway.queues.add("readings", filter="sensors.*.temperature", now=gateway.now)
    gateway.bus.publish("sensors.7.temperature", b"21.5", protocol=1)
    gateway.bus.publish("sensors.7.humidity", b"40", protocol=1)
    peer.subscribe("readings", 10)
    (job,) = peer.jobs()
    assert (job["job_payload"], job["topic"], job["attempt"]) == (b"21.5", "sensors.7.temperature", 1)
    assert peer.ok(T.JOB, jid=job["jid"])["status"] == "active"
    peer.ok(T.DONE, jid=job["jid"])
    assert stats(peer, "readings") == {"completed": 1}


def test_job_record_tells_everything(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    at = gateway.now + 3600 * SECOND
    jid = peer.enqueue(
        "_system", {"x": 1}, scheduled_at=wire.time_text(at), max_attempts=7, retry_interval_ms=250
    )
    queue, _, job = jid.partition(":")
    assert uuid.UUID(job).version == 8
    record = peer.ok(T.JOB, jid=jid)
    assert list(record) == sorted(record)
    created = record.pop("created_at")
    assert abs(wire.parse_time(created) - gateway.now) < SECOND
    assert record == {
        "execution_start_at": wire.time_text(at),
        "jid": jid,
        "max_attempts": 7,
        "payload": {"x": 1},
        "queue_name": queue,
        "retry_interval_ms": 250,
        "runtime": {"attempts_so_far": 0},
        "status": "delayed",
        "uuid": job,
    }
    plain = peer.ok(T.JOB, jid=peer.enqueue("_system"))
    assert (plain["max_attempts"], plain["retry_interval_ms"], plain["execution_start_at"]) == (5, None, None)
    assert plain["status"] == "waiting"


def test_job_of_nowhere_is_an_empty_map(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    jid = peer.enqueue("_system")
    assert peer.ok(T.JOB, jid=f"_system:{NOBODY}") == {}
    assert peer.ok(T.JOB, jid=f"missing:{jid.partition(':')[2]}") == {}
    beyond = jid[:-1] + "f"
    assert peer.ok(T.JOB, jid=beyond) == {}
    assert peer.ok(T.JOB, jid="_system:" + jid.partition(":")[2].replace("-", "").upper())["jid"] == jid


def test_job_goes_through_its_states(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    at = gateway.now + 10 * SECOND
    jid = peer.enqueue(
        "_system", b"x", scheduled_at=wire.time_text(at), max_attempts=2, retry_interval_ms=5000
    )
    peer.subscribe("_system", 10)

    def state() -> tuple[str, int]:
        record = peer.ok(T.JOB, jid=jid)
        (only,) = stats(peer, "_system")
        assert only == record["status"]
        assert [job["jid"] for job in peer.ok(T.LSJOB, q="_system", status=only)["jobs"]] == [jid]
        return record["status"], record["runtime"]["attempts_so_far"]

    assert (peer.jobs(), state()) == ([], ("delayed", 0))
    gateway.elapse(10)
    assert state() == ("waiting", 0)
    (job,) = peer.jobs()
    assert (job["attempt"], state()) == (1, ("active", 1))
    assert peer.ok(T.FAIL, jid=jid) == {}
    assert state() == ("delayed", 1)
    gateway.elapse(5)
    assert state() == ("waiting", 1)
    (job,) = peer.jobs()
    assert (job["attempt"], state()) == (2, ("active", 2))
    peer.ok(T.FAIL, jid=jid, reason="it cannot be done")
    assert state() == ("failed", 2)
    assert peer.err(T.DONE, jid=jid) == "JOB_NOT_ACTIVE"


def test_done_job_is_completed_and_cannot_be_finished_again(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    peer.subscribe("_system", 1)
    jid = peer.enqueue("_system")
    for kind in (T.DONE, T.FAIL, T.EXTEND):
        assert peer.err(kind, jid=jid) == "JOB_NOT_ACTIVE"  # nobody was given it
    peer.jobs()
    assert peer.ok(T.DONE, jid=jid) == {}
    assert peer.ok(T.JOB, jid=jid)["status"] == "completed"
    for kind in (T.DONE, T.FAIL, T.EXTEND):
        assert peer.err(kind, jid=jid) == "JOB_NOT_ACTIVE"
    assert not peer.closing


def test_only_the_worker_that_has_a_job_may_end_it(gateway: OverhopGateway) -> None:
    holder, other = gateway.worker(), gateway.worker()
    holder.subscribe("_system", 1)
    other.subscribe("_system", 0)
    jid = holder.enqueue("_system")
    holder.jobs()
    for kind in (T.DONE, T.FAIL, T.EXTEND):
        assert other.err(kind, jid=jid) == "JOB_NOT_ACTIVE"
    assert holder.ok(T.EXTEND, jid=jid) == {}
    assert holder.ok(T.DONE, jid=jid) == {}


def test_failed_job_comes_again_when_its_worker_says(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    peer.subscribe("_system", 10)
    jid = peer.enqueue("_system", retry_interval_ms=60_000)
    peer.jobs()
    peer.ok(T.FAIL, jid=jid, retry_in_ms=3000)
    gateway.elapse(2)
    assert peer.jobs() == []
    gateway.elapse(1)
    assert [job["attempt"] for job in peer.jobs()] == [2]
    peer.ok(T.FAIL, jid=jid, retry_in_ms=0)
    assert [job["attempt"] for job in peer.jobs()] == [3]


def test_last_attempt_ends_in_the_dead_letter_topic_with_the_reason(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    letters = gateway.bus.subscribe("dead.#").join(None, -1, gateway.now)
    peer.subscribe("_system", 10)
    jid = peer.enqueue("_system", b"poison", max_attempts=1)
    peer.jobs()
    peer.ok(T.FAIL, jid=jid, reason="no such mailbox")
    letter = letters.receive(gateway.now)
    assert letter is not None
    assert (letter.topic, letter.payload) == (b"dead.queue._system.jobs", b"poison")
    assert b'"dead-reason": "no such mailbox"' in letter.headers
    assert peer.jobs() == []


def test_deadline_gives_a_job_to_another_and_the_late_one_is_told(gateway: OverhopGateway) -> None:
    slow, other = gateway.worker(), gateway.worker()
    slow.subscribe("_system", 1)
    other.subscribe("_system", 1)
    jid = slow.enqueue("_system")
    assert len(slow.jobs()) == 1
    gateway.elapse(59)
    assert other.jobs() == []
    gateway.elapse(1)
    assert [(job["jid"], job["attempt"]) for job in other.jobs()] == [(jid, 2)]
    assert slow.err(T.DONE, jid=jid) == "JOB_NOT_ACTIVE"
    assert other.ok(T.DONE, jid=jid) == {}


def test_late_end_counts_while_nobody_else_has_the_job(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    peer.subscribe("_system", 1)
    jid = peer.enqueue("_system")
    peer.jobs()
    gateway.elapse(61)
    assert stats(peer, "_system") == {"waiting": 1}
    assert peer.ok(T.DONE, jid=jid) == {}
    assert stats(peer, "_system") == {"completed": 1}


def test_extended_job_stays_with_its_worker(gateway: OverhopGateway) -> None:
    slow, other = gateway.worker(), gateway.worker()
    slow.subscribe("_system", 1)
    other.subscribe("_system", 1)
    jid = slow.enqueue("_system")
    slow.jobs()
    for _ in range(10):
        gateway.elapse(50)
        assert other.jobs() == []
        assert slow.ok(T.EXTEND, jid=jid) == {}
    assert slow.ok(T.DONE, jid=jid) == {}
    gateway.elapse(100)
    assert other.jobs() == []


@pytest.mark.parametrize("end", ["lost", "unsubscribe"])
def test_jobs_of_a_worker_that_goes_come_to_another_at_once(gateway: OverhopGateway, end: str) -> None:
    leaver, stayer = gateway.worker(), gateway.worker()
    sid = leaver.subscribe("_system", 5)
    ids = [leaver.enqueue("_system", i) for i in range(3)]
    leaver.jobs()
    leaver.ok(T.DONE, jid=ids[0])
    stayer.subscribe("_system", 5)
    assert stayer.jobs() == []
    if end == "lost":
        leaver.leave()
    else:
        leaver.ok(T.UNSUBSCRIBE, sid=sid)
    assert [(job["jid"], job["attempt"]) for job in stayer.jobs()] == [(jid, 2) for jid in ids[1:]]


def test_concurrency_limit_holds_over_all_workers(gateway: OverhopGateway) -> None:
    first, second = gateway.worker(), gateway.worker()
    first.ok(T.ADDQUEUE, name="mail", config={"concurrency_limit": 2})
    first.subscribe("mail", 10)
    second.subscribe("mail", 10)
    ids = [first.enqueue("mail", i) for i in range(6)]
    assert len(first.jobs()) == 2
    assert second.jobs() == []
    first.ok(T.DONE, jid=ids[0])
    assert len(first.jobs() + second.jobs()) == 1
    assert stats(first, "mail") == {"active": 2, "completed": 1, "waiting": 3}


def test_paused_queue_holds_its_jobs_and_takes_new_ones(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    peer.ok(T.ADDQUEUE, name="mail")
    peer.subscribe("mail", 10)
    before = peer.enqueue("mail")
    assert len(peer.jobs()) == 1
    peer.ok(T.PAUSE, q="mail")
    jid = peer.enqueue("mail")
    assert peer.jobs() == []
    assert peer.ok(T.DONE, jid=before) == {}  # what was given out goes on
    assert peer.jobs() == []
    gateway.restart()
    peer = gateway.worker()
    assert peer.ok(T.GQUEUE, q="mail")["state"] == "paused"
    peer.subscribe("mail", 10)
    assert peer.jobs() == []
    peer.ok(T.RESUME, q="mail")
    assert [job["jid"] for job in peer.jobs()] == [jid]


def test_time_that_has_passed_delays_nothing(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    peer.subscribe("_system", 1)
    peer.enqueue(
        "_system", scheduled_at="2020-01-01T00:00:00+02:00", max_attempts=None, retry_interval_ms=None
    )
    assert len(peer.jobs()) == 1


@pytest.mark.parametrize("state", ["delayed", "failed", "completed"])
def test_job_is_removed_in_the_states_that_allow_it(gateway: OverhopGateway, state: str) -> None:
    peer = gateway.worker()
    peer.subscribe("_system", 1)
    soon = wire.time_text(gateway.now + 5 * SECOND)
    jid = peer.enqueue("_system", max_attempts=1, scheduled_at=soon if state == "delayed" else None)
    if state != "delayed":
        peer.jobs()
        peer.ok(T.DONE if state == "completed" else T.FAIL, jid=jid)
    assert peer.ok(T.JOB, jid=jid)["status"] == state
    assert peer.ok(T.RMJOB, jid=jid) == {}
    assert peer.ok(T.JOB, jid=jid) == {}
    assert peer.err(T.RMJOB, jid=jid) == "JOB_NOT_FOUND"
    gateway.elapse(10)
    assert peer.jobs() == []
    gateway.restart()
    peer = gateway.worker()
    peer.subscribe("_system", 5)
    assert peer.jobs() == []
    assert stats(peer, "_system") == {}


@pytest.mark.parametrize("state", ["waiting", "active"])
def test_job_that_is_waiting_or_active_is_not_removed(gateway: OverhopGateway, state: str) -> None:
    peer = gateway.worker()
    jid = peer.enqueue("_system")
    if state == "active":
        peer.subscribe("_system", 1)
        peer.jobs()
    assert peer.err(T.RMJOB, jid=jid) == "JOB_STATUS_NOT_REMOVABLE"
    assert peer.ok(T.JOB, jid=jid)["status"] == state


def test_jobs_are_listed_in_pages(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    ids = [peer.enqueue("_system", i) for i in range(40)]
    first = peer.ok(T.LSJOB, q="_system", status="waiting")
    assert {name: first[name] for name in ("q", "status", "page", "page_size")} == {
        "q": "_system",
        "status": "waiting",
        "page": 1,
        "page_size": 15,
    }
    assert [job["jid"] for job in first["jobs"]] == ids[:15]
    assert first["jobs"][3]["payload"] == 3
    assert [job["jid"] for job in peer.ok(T.LSJOB, q="_system", status="waiting", page=3)["jobs"]] == ids[30:]
    listed = peer.ok(T.LSJOB, q="_system", status="waiting", page=2, page_size=7)["jobs"]
    assert [job["jid"] for job in listed] == ids[7:14]
    assert peer.ok(T.LSJOB, q="_system", status="waiting", page=2**32 - 1, page_size=1000)["jobs"] == []


def test_page_of_large_jobs_fits_into_one_envelope(tmp_path: Path) -> None:
    gateway = OverhopGateway(tmp_path, limit=65536)
    peer = gateway.worker()
    for _ in range(10):
        peer.enqueue("_system", b"x" * 20_000)
    jobs = peer.ok(T.LSJOB, q="_system", status="waiting")["jobs"]
    assert len(jobs) == 10
    assert jobs[0]["payload"] == b"x" * 20_000
    assert jobs[-1]["payload"] is None
    gateway.close()


def test_finished_jobs_are_kept_up_to_a_number(tmp_path: Path) -> None:
    gateway = OverhopGateway(tmp_path, queues={"keep_finished": 3})
    peer = gateway.worker()
    peer.subscribe("_system", 100)
    ids = [peer.enqueue("_system") for _ in range(5)]
    peer.jobs()
    for jid in ids:
        peer.ok(T.DONE, jid=jid)
    for _ in range(2):
        assert stats(peer, "_system") == {"completed": 3}
        assert [job["jid"] for job in peer.ok(T.LSJOB, q="_system", status="completed")["jobs"]] == ids[2:]
        assert peer.ok(T.JOB, jid=ids[0]) == {}
        gateway.restart()
        peer = gateway.worker()
    gateway.close()


def test_message_that_no_envelope_can_carry_is_given_up_and_costs_nothing(tmp_path: Path) -> None:
    gateway = OverhopGateway(tmp_path, limit=65536)
    peer = gateway.worker()
    peer.subscribe("_system", 1)
    gateway.bus.publish("queue._system.other", b"x" * 65500, protocol=1)
    gateway.bus.publish("queue._system.other", b"small", protocol=1)
    assert [job["job_payload"] for job in peer.jobs()] == [b"small"]
    assert stats(peer, "_system") == {"active": 1, "failed": 1}
    assert gateway.shared.counters()["too_large"] == 1
    gateway.close()


# --- what survives ------------------------------------------------------------------------------------------


def test_queues_and_jobs_survive_a_restart(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    qid = peer.ok(T.ADDQUEUE, name="mail", config={"concurrency_limit": 3, "allow_job_overrides": False})[
        "qid"
    ]
    later = wire.time_text(gateway.now + 1000 * SECOND)
    peer.subscribe("mail", 2)
    done, active, waiting = (peer.enqueue("mail", i) for i in range(3))
    delayed = peer.enqueue("mail", "later", scheduled_at=later)
    peer.jobs()
    peer.ok(T.DONE, jid=done)
    gateway.restart()
    peer = gateway.worker()
    assert peer.ok(T.GQUEUE, q="mail") == {
        "config": {"allow_job_overrides": False, "concurrency_limit": 3},
        "id": qid,
        "name": "mail",
        "state": "running",
    }
    states = {jid: peer.ok(T.JOB, jid=jid)["status"] for jid in (done, active, waiting, delayed)}
    assert states == {done: "completed", active: "waiting", waiting: "waiting", delayed: "delayed"}
    peer.subscribe("mail", 10)
    assert [job["jid"] for job in peer.jobs()] == [active, waiting]
    assert peer.ok(T.JOB, jid=delayed)["payload"] == "later"


def test_removed_queue_stays_away_after_a_restart(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    peer.ok(T.ADDQUEUE, name="mail")
    peer.ok(T.RMQUEUE, q="mail")
    gateway.restart()
    assert gateway.worker().ok(T.GQUEUE, q="mail") == {}
    assert len(gateway.bus.subscriptions) == 1


def test_job_delivered_before_a_restart_can_be_finished_after_it(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    peer.subscribe("_system", 1)
    jid = peer.enqueue("_system")
    peer.jobs()
    gateway.restart()
    peer = gateway.worker()
    assert peer.ok(T.DONE, jid=jid) == {}
    peer.subscribe("_system", 1)
    assert peer.jobs() == []


# --- what must be safe first --------------------------------------------------------------------------------


def test_job_is_confirmed_and_pushed_only_when_it_is_safe(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    peer.subscribe("_system", 1000)
    for _ in range(50):
        said = peer.session.feed(wire.encode(T.ENQUEUE, "1", {"q": "_system"}), gateway.now)
        pushed = peer.session.pull(gateway.now)
        if said or pushed:
            assert gateway.log.safe == gateway.log.stats()["appended_offset"]
        gateway.log.sync_now()
        peer.session.feed(b"", gateway.now)


def test_answers_keep_their_order_behind_a_promise(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    stream = (
        wire.encode(T.PING, "1", {})
        + wire.encode(T.ENQUEUE, "2", {"q": "_system"})
        + wire.encode(T.PING, "3", {})
    )
    answers = peer.send(stream * 20)
    assert [answer.rid for answer in answers] == ["1", "2", "3"] * 20


# --- rights -------------------------------------------------------------------------------------------------


def test_peers_have_the_rights_of_the_listeners_key(tmp_path: Path) -> None:
    key = Key(name="site", key="k", publish=["queue.mail.#"], subscribe=["queue.*.jobs"])
    gateway = OverhopGateway(tmp_path, keys=[key], key="site")
    gateway.queues.add("other", now=gateway.now)
    peer = gateway.worker()
    peer.ok(T.ADDQUEUE, name="mail")
    assert peer.err(T.ADDQUEUE, name="more") == "NOT_ALLOWED"
    jid = peer.enqueue("mail")
    assert peer.err(T.ENQUEUE, q="other") == "NOT_ALLOWED"
    for kind in (T.PAUSE, T.RESUME, T.RMQUEUE):
        assert peer.err(kind, q="other") == "NOT_ALLOWED"
    peer.subscribe("other", 1)
    gateway.keys.replace([Key(name="site", key="k", publish=["nothing"])])
    for kind in (T.SUBSCRIBE, T.LSJOB, T.QSTATS):
        assert peer.err(kind, q="mail", status="new") == "NOT_ALLOWED"
    assert peer.err(T.JOB, jid=jid) == "NOT_ALLOWED"
    assert peer.err(T.RMJOB, jid=jid) == "NOT_ALLOWED"
    gateway.keys.replace([])
    assert peer.err(T.ENQUEUE, q="mail") == "NOT_ALLOWED"
    assert not peer.closing
    gateway.close()


def test_right_to_add_a_queue_is_on_the_topic_that_the_map_has_for_its_jobs(tmp_path: Path) -> None:
    key = Key(name="site", key="k", publish=["plant.jobs.#"])
    rules = Map([Rule("job-{name}", "plant.jobs.{name}")])
    gateway = OverhopGateway(tmp_path, keys=[key], key="site", queues={"map": rules})
    peer = gateway.worker()
    peer.ok(T.ADDQUEUE, name="job-mail")
    peer.enqueue("job-mail")
    for kind in (T.PAUSE, T.RESUME):
        peer.ok(kind, q="job-mail")
    assert peer.err(T.ADDQUEUE, name="job-mail") == "DUPLICATE_QUEUE"
    for name in ("mail", "job-a/b"):
        assert peer.err(T.ADDQUEUE, name=name) == "INVALID_QUEUE_NAME"
    gateway.keys.replace([Key(name="site", key="k", publish=["queue.#"])])
    assert peer.err(T.ADDQUEUE, name="job-letters") == "NOT_ALLOWED"
    assert peer.err(T.ADDQUEUE, name="job-mail") == "NOT_ALLOWED"
    assert peer.err(T.ADDQUEUE, name="_system") == "DUPLICATE_QUEUE"
    assert [queue.name for queue in gateway.queues] == ["_system", "job-mail"]
    gateway.close()


@pytest.mark.parametrize("question", [T.QSTATS, T.STATUS, T.LSJOB, T.RMQUEUE])
def test_asking_about_jobs_that_wait_takes_none_from_the_workers(
    gateway: OverhopGateway, question: T
) -> None:
    peer = gateway.worker()
    peer.ok(T.ADDQUEUE, name="backlog")
    sid = peer.subscribe("backlog", 3)
    assert peer.jobs() == []  # from now on it is told what is new
    peer.send(*[wire.encode(T.ENQUEUE, f"e{i}", {"q": "backlog", "job_payload": i}) for i in range(10)])
    asked = {} if question is T.STATUS else {"q": "backlog", "status": "delayed"}
    got = []
    for _ in range(4):
        got += [job["job_payload"] for job in peer.jobs()]
        for _ in range(2):
            peer.ask(question, asked)
        peer.ok(T.CREDIT, sid=sid, credits=3)
    assert got == list(range(10))


def test_fields_that_a_message_does_not_have_are_not_looked_at_however_large(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    maps = [{} for _ in range(70_000)]
    assert peer.ok(T.GQUEUE, {"q": "_system", "more": maps})["name"] == "_system"
    assert peer.err(T.ADDQUEUE, {"name": "large", "config": {"more": maps}}) == "PROTOCOL_VIOLATION"
    assert peer.closing
