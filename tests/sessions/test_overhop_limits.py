"""Overhop sessions where something has run out: room in the log, a peer that does not read, a disk that does not
sync. Nothing may be lost silently, said twice, or grow."""

import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.wire import overhop as wire
from headrace.wire.overhop import MessageType as T
from tests.sessions.passive_gateway import break_syncs
from tests.sessions.passive_overhop import SECOND, OverhopGateway, Peer

TINY_LOG: dict[str, Any] = {"segment_bytes": 64 << 10, "pool_segments": 1, "retention_bytes": 3 * (64 << 10)}
JOB = wire.encode(T.ENQUEUE, "e", {"q": "_system", "job_payload": bytes(1000)})


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[OverhopGateway]:
    """A gateway with a log of three small segments, which cannot let go of any."""
    gateway = OverhopGateway(tmp_path, log=TINY_LOG, block_timeout=5)
    gateway.log.hold("reader", 0)
    yield gateway
    gateway.close()


def wait_for_log(gateway: OverhopGateway, condition: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        select.select([gateway.log.event_fd], [], [], 0.1)
        gateway.log.on_event(gateway.now)


def fill(gateway: OverhopGateway, peer: Peer) -> None:
    """Puts jobs in until the log is full and the peer waits with one more in its hands."""
    while True:
        peer.session.feed(JOB, gateway.now)
        gateway.log.sync_now()
        if peer.session.blocked:  # perhaps only until the next segment is prepared
            wait_for_log(gateway, lambda: gateway.log.full or gateway.log.stats()["pool_segments"] > 0)
            peer.session.feed(b"", gateway.now)
        if peer.session.blocked:
            return


def test_full_log_blocks_who_enqueues_and_neither_loses_nor_doubles_a_job(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    fill(gateway, peer)
    stored = gateway.log.appended
    assert peer.session.waits_space
    assert peer.session.kept == len(JOB)
    for _ in range(3):
        assert peer.session.feed(b"", gateway.now) == b""
    assert gateway.log.appended == stored
    gateway.log.release("reader")
    wait_for_log(gateway, lambda: gateway.log.full is None and gateway.log.stats()["pool_segments"] > 0)
    (answer,) = wire.Decoder().feed(peer.exchange(b""))
    assert (answer.type, gateway.log.appended) == (T.OK, stored + 1)


def test_job_is_refused_after_block_timeout_and_work_goes_on(gateway: OverhopGateway) -> None:
    peer, worker = gateway.worker(), gateway.worker()
    fill(gateway, peer)
    gateway.now += 5 * SECOND - 1
    assert peer.session.feed(b"", gateway.now) == b""
    gateway.now += 1
    (answer,) = wire.Decoder().feed(peer.exchange(b""))
    assert (answer.type, answer.payload["code"]) == (T.ERR, "JOB_PERSISTENCE_ERROR")
    assert "held back by reader" in answer.payload["msg"]
    assert peer.ask(T.PING).type == T.PONG
    assert gateway.shared.counters()["refused_full"] == 1
    # There is room for what control records take: what is there can be worked off.
    worker.subscribe("_system", 20)
    for job in worker.jobs():
        assert worker.ok(T.DONE, jid=job["jid"]) == {}
    assert worker.ok(T.QSTATS, q="_system")["stats"]["completed"] == 20


def test_blocked_session_asks_to_be_called_when_its_time_is_over(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    fill(gateway, peer)
    unblocked: list[int] = []
    peer.session.connection = SimpleNamespace(unblock=lambda: unblocked.append(1), peer="p", name="n")
    gateway.now += 4 * SECOND
    peer.tick()
    assert unblocked == []
    gateway.now += 2 * SECOND
    peer.tick()
    assert unblocked == [1]


def test_job_that_no_log_can_take_is_refused_at_once(gateway: OverhopGateway) -> None:
    peer = gateway.worker()
    assert peer.err(T.ENQUEUE, q="_system", job_payload=bytes(70_000)) == "INVALID_JOB_PAYLOAD"
    assert not peer.closing
    assert "jid" in peer.ok(T.ENQUEUE, q="_system", job_payload=b"small")


def test_answers_wait_while_the_peer_does_not_read(tmp_path: Path) -> None:
    gateway = OverhopGateway(tmp_path)
    peer = gateway.worker()
    peer.session.high_water = 4096
    asked = wire.encode(T.LQUEUES, "q", {})
    said = peer.session.feed(asked * 1000, gateway.now)
    assert peer.session.blocked
    assert peer.session.waits_room
    assert len(said) < 8192
    answers = wire.Decoder().feed(said)
    while peer.session.blocked:
        answers += wire.Decoder().feed(peer.session.feed(b"", gateway.now))
    assert len(answers) == 1000
    gateway.close()


def test_pushes_fill_no_more_than_there_is_room_for(tmp_path: Path) -> None:
    gateway = OverhopGateway(tmp_path)
    peer = gateway.worker()
    for _ in range(100):
        peer.enqueue("_system", bytes(1000))
    sid = peer.subscribe("_system")
    peer.session.high_water = 4096
    woken: list[int] = []
    peer.session.connection = SimpleNamespace(wake=lambda: woken.append(1), peer="p", name="n")
    said = peer.session.feed(wire.encode(T.CREDIT, "c", {"sid": sid, "credits": 1000}), gateway.now)
    assert len(said) < 8192
    assert woken  # there is more
    got = len(wire.Decoder().feed(said)) - 1
    while pushed := peer.session.pull(gateway.now, 4096):
        assert len(pushed) < 8192
        got += len(wire.Decoder().feed(pushed))
    assert got == 100
    gateway.close()


def test_what_cannot_be_made_safe_is_never_confirmed(tmp_path: Path) -> None:
    gateway = OverhopGateway(tmp_path)
    peer, idle = gateway.worker(), gateway.worker()
    break_syncs(gateway.log)
    assert (
        peer.session.feed(wire.encode(T.PING, "1", {}) + JOB + wire.encode(T.PING, "2", {}), gateway.now)
        != b""
    )
    wait_for_log(gateway, lambda: gateway.log.failed)
    assert peer.session.elapse(gateway.now) == b""
    assert peer.closing
    assert idle.session.elapse(gateway.now) == b""
    assert not idle.closing
    assert idle.err(T.ENQUEUE, q="_system") == "JOB_PERSISTENCE_ERROR"
    assert idle.err(T.ADDQUEUE, name="x") == "QUEUE_PERSISTENCE_ERROR"
    assert gateway.shared.counters()["unconfirmed"] == 1
    gateway.close()


def test_session_outlives_its_log_without_harm(tmp_path: Path) -> None:
    gateway = OverhopGateway(tmp_path)
    peer = gateway.worker()
    peer.subscribe("_system", 1)
    gateway.close()
    assert peer.session.feed(JOB, gateway.now) == b""
    assert peer.closing
    peer.session.elapse(gateway.now)
    peer.session.pull(gateway.now)
    peer.leave()
    assert gateway.shared.workers == 0
