"""The output buffer's bytes and gates, judged by a plain list, and the passive entry of sessions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.session import Output, PySession, Session

ALL = 2**64 - 1


def test_empty_output_gives_nothing() -> None:
    out = Output()
    assert out.size == len(out) == out.releasable(ALL) == 0
    assert out.take(ALL) is None


def test_bytes_leave_in_one_piece_and_only_once() -> None:
    out = Output()
    out.write(b"one ")
    out.write(bytearray(b"two "))
    out.write(memoryview(b"three"))
    assert out.size == 13
    assert out.take(0) == b"one two three"
    assert out.size == 0
    assert out.take(0) is None


def test_taken_bytes_do_not_change_when_the_output_is_used_again() -> None:
    out = Output()
    out.write(b"first")
    first = out.take(0)
    out.write(b"other")
    assert first == b"first"
    assert out.take(0) == b"other"


@pytest.mark.parametrize("size", [1, 255, 256, 257, 65_535, 65_536, 65_537, 3_000_000])
def test_output_of_any_size_is_whole(size: int) -> None:
    out = Output()
    data = bytes(i * 7 % 251 for i in range(size))
    for start in range(0, size, 1021):
        out.write(data[start : start + 1021])
    assert out.take(0) == data
    out.write(b"again")
    assert out.take(0) == b"again"


def test_bytes_behind_a_gate_wait_for_its_offset() -> None:
    out = Output()
    out.write(b"free")
    out.gate(10)
    out.write(b"gated")
    assert out.releasable(9) == 4
    assert out.take(9) == b"free"
    assert out.take(9) is None
    assert out.size == 5
    assert out.take(10) == b"gated"


def test_a_reply_that_need_not_wait_keeps_its_place_behind_one_that_must() -> None:
    out = Output()
    out.gate(5)
    out.write(b"slow")
    out.gate(3)
    out.write(b"quick")
    assert out.take(4) is None
    assert out.take(5) == b"slowquick"


def test_a_gate_holds_for_bytes_that_come_later() -> None:
    out = Output()
    out.gate(7)
    assert out.take(6) is None
    out.write(b"late")
    assert out.take(6) is None
    assert out.take(7) == b"late"


def test_the_higher_of_two_gates_at_one_place_holds() -> None:
    out = Output()
    out.gate(3)
    out.gate(8)
    out.write(b"x")
    assert out.take(7) is None
    assert out.take(8) == b"x"


def test_a_gate_can_be_put_before_bytes_that_are_there_already() -> None:
    out = Output()
    out.write(b"free")
    out.write(b"promised")
    out.gate(5)
    out.write(b"later")
    out.gate_from(4, 9)  # the one for less is behind it, and is of no use any more
    assert out.take(5) == b"free"
    assert out.take(8) is None
    out.write(b" more")
    assert out.take(9) == b"promisedlater more"


def test_gate_before_bytes_adds_nothing_where_more_is_waited_for_already() -> None:
    out = Output()
    out.gate(9)
    out.write(b"ab")
    out.gate_from(1, 5)
    assert out.take(8) is None
    assert out.take(9) == b"ab"


def test_gates_open_one_after_the_other() -> None:
    out = Output()
    for i in range(1, 1001):
        out.gate(i)
        out.write(f"{i};".encode())
    assert out.take(0) is None
    for i in range(1, 1001):
        assert out.take(i) == f"{i};".encode()
    assert out.size == 0


class OutputMachine(RuleBasedStateMachine):
    """An output next to a list of (byte, offset it waits for)."""

    def __init__(self) -> None:
        super().__init__()
        self.out = Output()
        self.expected: list[tuple[int, int]] = []
        self.gate = 0
        self.safe = 0

    @rule(data=st.binary(max_size=600))
    def write(self, data: bytes) -> None:
        self.out.write(data)
        self.expected += [(byte, self.gate) for byte in data]

    @rule(ahead=st.integers(-5, 20))
    def close_gate(self, ahead: int) -> None:
        offset = max(0, self.safe + ahead)
        self.out.gate(offset)
        self.gate = max(self.gate, offset)

    @rule(step=st.integers(0, 10))
    def take(self, step: int) -> None:
        self.safe += step
        free = [byte for byte, gate in self.expected if gate <= self.safe]
        assert self.out.releasable(self.safe) == len(free)
        assert self.out.take(self.safe) == (bytes(free) or None)
        del self.expected[: len(free)]

    @invariant()
    def size_is_what_is_held(self) -> None:
        assert self.out.size == len(self.expected)


TestOutputMachine = OutputMachine.TestCase


class Lines(PySession):
    """Answers every line with its length; the line "wait" blocks, the line "bye" closes."""

    def __init__(self) -> None:
        self.calls: list[tuple[bytes, int]] = []
        self.safe = 0
        self.waited = False
        self.lost_at: int | None = None

    def on_bytes(self, data: bytes, now: int) -> int:
        self.calls.append((data, now))
        used = 0
        while (end := data.find(b"\n", used)) >= 0:
            line = data[used:end]
            if line == b"wait" and not self.waited:
                self.waited = self.blocked = self.waits_space = True
                break
            if line.startswith(b"gate "):
                self.gate(int(line[5:]))
            self.put(f"{len(line)} ".encode())
            self.closing = line == b"bye"
            used = end + 1
        return used

    def on_deliver(self, now: int, room: int) -> None:
        self.put(b"d" * room)
        self.more = True

    def on_tick(self, now: int) -> None:
        self.put(f"tick {now}".encode())

    def on_drain(self, now: int) -> None:
        self.put(f"bye {now}".encode())

    def on_lost(self, now: int) -> None:
        self.lost_at = now

    def on_safe_end(self) -> int:
        return self.safe


def test_feed_answers_whole_frames_and_keeps_the_rest() -> None:
    session = Lines()
    assert session.feed(b"abc\nde", now=5) == b"3 "
    assert session.kept == 2
    assert session.feed(b"fg\n\nx", now=6) == b"4 0 "
    assert session.kept == 1
    assert session.calls == [(b"abc\nde", 5), (b"defg\n\nx", 6)]


@given(
    st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line and line != b"wait"), max_size=8)
)
def test_feed_answers_the_same_however_bytes_are_split(lines: list[bytes]) -> None:
    lines = [line for line in lines if not line.startswith(b"gate ")]
    data = b"".join(line + b"\n" for line in lines)
    whole = Lines().feed(data, now=1)
    session = Lines()
    assert b"".join(session.feed(data[i : i + 1], now=1) for i in range(len(data))) == whole
    assert whole == b"".join(f"{len(line)} ".encode() for line in lines)


def test_feed_gives_gated_output_once_it_is_safe() -> None:
    session = Lines()
    assert session.feed(b"a\ngate 3\nbc\n", now=1) == b"1 "
    assert session.feed(now=2) == b""
    session.safe = 3
    assert session.feed(now=3) == b"6 2 "


def test_a_blocked_session_gets_the_kept_bytes_again() -> None:
    session = Lines()
    assert session.feed(b"a\nwait\nbc\n", now=1) == b"1 "
    assert session.blocked
    assert session.waits_space
    assert session.kept == 8
    assert session.feed(now=2) == b"4 2 "
    assert not session.blocked
    assert not session.waits_space


def test_passive_entries_reach_every_callback() -> None:
    session = Lines()
    assert session.pull(now=1, room=4) == b"dddd"
    assert session.more
    assert session.elapse(now=7) == b"tick 7"
    assert session.stop(now=8) == b"bye 8"
    session.feed(b"unfinished", now=9)
    session.leave(now=10)
    assert session.lost_at == 10
    assert session.kept == 0


def test_feed_reads_the_clock_when_no_time_is_given() -> None:
    session = Lines()
    session.feed(b"x\n")
    [(_, now)] = session.calls
    assert now > 1_600_000_000_000_000  # microseconds since the epoch


def test_an_error_in_receive_reaches_the_caller() -> None:
    class Broken(PySession):
        def on_bytes(self, data: bytes, now: int) -> int:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        Broken().feed(b"x", now=0)


@pytest.mark.parametrize("used", [-1, 4])
def test_a_session_cannot_use_bytes_that_are_not_there(used: int) -> None:
    class Greedy(PySession):
        def on_bytes(self, data: bytes, now: int) -> int:
            return used

    with pytest.raises(ValueError, match="Greedy"):
        Greedy().feed(b"abc", now=0)


def test_the_base_does_not_receive() -> None:
    with pytest.raises(NotImplementedError):
        Session().feed(b"x", now=0)
    with pytest.raises(NotImplementedError):
        PySession().feed(b"x", now=0)


def test_unblock_tells_the_connection_if_there_is_one() -> None:
    class Carrier:
        name = peer = "test"
        told = 0

        def wake(self) -> None: ...

        def unblock(self) -> None:
            self.told += 1

    session = Lines()
    session.unblock()
    carrier = Carrier()
    session.connection = carrier
    session.unblock()
    assert carrier.told == 1
