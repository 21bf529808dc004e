"""One stream of a connection that has many, carried for a session: what it holds, when it goes on, and how it ends."""

from typing import Any

import pytest

from headrace.connection import Service
from headrace.session import PySession
from headrace.substream import Substream, count

HIGH_WATER = 1000
NOW = 1_000_000


class Lines(PySession):
    """Answers each line with itself; "block" blocks, "gate" waits for what is safe, "end" ends, "fail" fails."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.pending = 0
        self.safe = 0
        self.gone = False
        self.calls = 0

    def on_bytes(self, data: bytes, now: int) -> int:
        self.calls += 1
        used = 0
        while (end := data.find(b"\n", used)) >= 0:
            line = data[used:end]
            if line == b"block" and line not in self.seen:
                self.seen.append(line)
                self.blocked = self.waits_space = True
                return used
            used = end + 1
            if line == b"fail":
                raise RuntimeError("as told")
            if line == b"gate":
                self.gate(1)
            if line == b"end":
                self.closing = True
            self.seen.append(line)
            self.put(line + b"\n")
        return used

    def on_deliver(self, now: int, room: int) -> None:
        while self.pending and room > 0:
            self.put(bytes(100))
            self.pending -= 1
            room -= 100
        self.more = self.pending > 0

    def on_safe_end(self) -> int:
        return self.safe

    def on_lost(self, now: int) -> None:
        self.gone = True


class Owner:
    """A connection that sends what it is given at once, unless it holds it."""

    def __init__(self) -> None:
        self.sent = b""
        self.holding = 0
        self.due: list[Substream] = []
        self.waiting: list[str] = []
        self.ended: list[Substream] = []
        self.failures: list[Exception] = []
        self.later: list[float] = []

    def send(self, number: int, data: bytes, fin: bool) -> None:
        assert number == 4
        self.sent += data

    def unsent(self, number: int) -> int:
        return self.holding

    def schedule(self, stream: Substream) -> None:
        stream.scheduled = True
        self.due.append(stream)

    def schedule_later(self, stream: Substream, seconds: float) -> None:
        self.later.append(seconds)

    def wait_safe(self, stream: Substream) -> None:
        self.waiting.append("safe")

    def wait_space(self, stream: Substream) -> None:
        self.waiting.append("space")

    def wait_room(self, stream: Substream) -> None:
        self.waiting.append("room")

    def over(self, stream: Substream) -> None:
        self.ended.append(stream)
        stream.lost(NOW)

    def failed(self, stream: Substream, error: Exception) -> None:
        self.failures.append(error)
        stream.lost(NOW)

    def turn(self) -> None:
        due, self.due = self.due, []
        for stream in due:
            stream.scheduled = False
            stream.turn(NOW)


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def session() -> Lines:
    return Lines()


def service() -> Service:
    return Service(
        "lines", PySession, max_frame=100, high_water=HIGH_WATER, max_connections=1, stall_timeout=1
    )


def carry(owner: Owner, session: Lines, **options: Any) -> Substream:
    given = {"readable": True, "writable": True, "name": "lines-1", "peer": "here", **options}
    return Substream(session, service(), owner, owner.send, owner.unsent, 4, **given)


@pytest.fixture
def stream(owner: Owner, session: Lines) -> Substream:
    return carry(owner, session)


def test_all_that_came_in_a_turn_is_one_call(owner: Owner, session: Lines, stream: Substream) -> None:
    for piece in (b"on", b"e\ntw", b"o\nth"):
        stream.receive(piece, False)
    assert len(owner.due) == 1
    owner.turn()
    assert session.calls == 1
    assert (owner.sent, stream.kept_size) == (b"one\ntwo\n", 2)
    stream.receive(b"ree\n", False)
    owner.turn()
    assert owner.sent == b"one\ntwo\nthree\n"


def test_an_unfinished_frame_beyond_the_limit_is_a_failure(owner: Owner, stream: Substream) -> None:
    stream.receive(bytes(101), False)
    owner.turn()
    assert "above the protocol's 100 bytes" in str(owner.failures[0])


def test_a_blocked_session_gets_its_bytes_again(owner: Owner, session: Lines, stream: Substream) -> None:
    stream.receive(b"a\nblock\nb\n", True)
    owner.turn()
    assert (owner.sent, owner.waiting, owner.ended) == (b"a\n", ["space"], [])
    stream.unblock()
    owner.turn()
    assert owner.sent == b"a\nblock\nb\n"
    assert owner.ended == [stream]


def test_what_is_gated_leaves_when_it_is_safe(owner: Owner, session: Lines, stream: Substream) -> None:
    stream.receive(b"a\ngate\n", True)
    owner.turn()
    assert (owner.sent, owner.waiting, owner.ended) == (b"a\n", ["safe"], [])
    session.safe = 1
    stream.safe_moved()
    assert owner.sent == b"a\ngate\n"
    assert owner.ended == [stream]


def test_nothing_is_given_to_a_transport_that_holds_enough(owner: Owner, session: Lines) -> None:
    stream = carry(owner, session, readable=False)
    session.pending = 100
    owner.holding = HIGH_WATER
    stream.wake()
    owner.turn()
    assert (owner.sent, owner.waiting, stream.stuck) == (b"", ["room"], True)
    assert session.pending == 90
    stream.wake()
    assert owner.due == []
    owner.holding = HIGH_WATER // 2 + 1
    stream.sent()
    assert stream.stuck
    owner.holding = HIGH_WATER // 2
    stream.sent()
    owner.turn()
    assert not stream.stuck
    assert len(owner.sent) == 1000
    owner.holding = 0
    while owner.due:
        owner.turn()
    assert len(owner.sent) == 10_000


def test_its_end_comes_when_all_is_answered(owner: Owner, session: Lines, stream: Substream) -> None:
    stream.receive(b"a\n", False)
    owner.turn()
    assert owner.ended == []
    stream.receive(b"rest that is no line", True)
    owner.turn()
    assert owner.ended == [stream]
    assert session.gone
    assert stream.session is None
    stream.receive(b"late\n", True)
    for call in (stream.wake, stream.unblock, stream.sent, stream.safe_moved):
        call()
    stream.turn(NOW)
    stream.sweep(NOW)
    stream.drain(NOW)
    stream.lost(NOW)
    assert owner.ended == [stream]


def test_a_session_that_closes_ends_it(owner: Owner, session: Lines, stream: Substream) -> None:
    stream.receive(b"end\nmore\n", False)
    owner.turn()
    assert owner.sent == b"end\nmore\n"
    assert owner.ended == [stream]


def test_draining_takes_nothing_more_and_ends_with_what_is_owed(
    owner: Owner, session: Lines, stream: Substream
) -> None:
    stream.receive(b"gate\n", False)
    owner.turn()
    stream.drain(NOW)
    stream.receive(b"late\n", False)
    owner.turn()
    assert owner.ended == []
    session.safe = 1
    stream.safe_moved()
    assert (owner.sent, owner.ended) == (b"gate\n", [stream])


def test_a_session_that_fails_is_its_owners_to_tell(owner: Owner, session: Lines, stream: Substream) -> None:
    stream.receive(b"fail\n", False)
    owner.turn()
    assert str(owner.failures[0]) == "as told"


def test_waking_later_is_left_to_the_owner(owner: Owner, session: Lines, stream: Substream) -> None:
    stream.wake_later(2500)
    assert owner.later == [0.0025]
    stream.wake()
    stream.wake_later(2500)
    assert owner.later == [0.0025]


def test_an_owner_counts_for_its_service() -> None:
    counted = service()
    for what in counted.counters():
        count(counted, what, 3)
    assert set(counted.counters().values()) == {3}
    with pytest.raises(ValueError, match="is not counted"):
        count(counted, "other")
