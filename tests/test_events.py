"""Log lines: their two formats, what they hide, and how a flood of them is held back."""

import io
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headrace import events, limits
from headrace.events import EventLog, RateLimiter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger(events.ROOT)
    before = root.level, ours.level, list(root.handlers)
    yield
    root.setLevel(before[0])
    ours.setLevel(before[1])
    root.handlers[:] = before[2]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> EventLog:
    return EventLog(logging.getLogger(f"{events.ROOT}.test"), RateLimiter(clock))


@pytest.fixture
def stream() -> io.StringIO:
    """A stream that is set up for JSON and everything from info."""
    stream = io.StringIO()
    events.setup("info", "auto", stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def human() -> io.StringIO:
    """A stream that is set up for people, and is no terminal."""
    stream = io.StringIO()
    events.setup("info", "human", stream)
    return stream


# --- JSON ---------------------------------------------------------------------------------------------------


def test_event_is_one_json_line_with_time_level_name_and_fields(log: EventLog, stream: io.StringIO) -> None:
    log.info("listener.open", protocol="blipmq", address="127.0.0.1:5555", backlog=5, tls=False, ca=None)
    (line,) = lines(stream)
    moment = line.pop("ts")
    assert moment.endswith("Z")
    assert datetime.fromisoformat(moment).tzinfo == UTC
    assert line == {
        "level": "info",
        "logger": "headrace.test",
        "event": "listener.open",
        "protocol": "blipmq",
        "address": "127.0.0.1:5555",
        "backlog": 5,
        "tls": False,
        "ca": None,
    }
    assert stream.getvalue().count("\n") == 1


def test_events_below_the_level_are_not_written_and_the_level_may_change(
    log: EventLog, stream: io.StringIO
) -> None:
    log.debug("a")
    events.set_level("debug")
    log.debug("b")
    events.set_level("error")
    log.warning("c")
    log.error("d")
    assert [(line["event"], line["level"]) for line in lines(stream)] == [("b", "debug"), ("d", "error")]


def test_second_setup_replaces_the_first(log: EventLog, stream: io.StringIO) -> None:
    other = io.StringIO()
    events.setup("info", "json", other)
    log.info("a")
    assert stream.getvalue() == ""
    assert len(lines(other)) == 1


def test_exception_is_one_field(log: EventLog, stream: io.StringIO) -> None:
    try:
        raise ValueError("bad\nthing")
    except ValueError as error:
        log.exception("a", peer="x")
        log.warning("b", exc_info=error)
    log.error("c", exc_info=True)
    first, second, third = lines(stream)
    for line in (first, second):
        assert line["exception"].startswith("Traceback (most recent call last):\n")
        assert line["exception"].endswith("ValueError: bad\nthing\n")
    assert first["level"] == "error"
    assert first["peer"] == "x"
    assert "exception" not in third
    assert stream.getvalue().count("\n") == 3


def test_endless_traceback_is_cut(log: EventLog, stream: io.StringIO) -> None:
    log.error("a", exc_info=ValueError("x" * 100_000))
    (line,) = lines(stream)
    assert len(line["exception"]) < limits.EVENT_EXCEPTION_CHARS + 30


def test_field_that_is_called_like_a_part_of_the_line_does_not_hide_it(
    log: EventLog, stream: io.StringIO
) -> None:
    log.info("a", level="high", ts=1, event="b", exception="none", name="n", args=3)
    (line,) = lines(stream)
    assert (line["event"], line["level"]) == ("a", "info")
    assert (line["event_"], line["level_"], line["ts_"], line["exception_"]) == ("b", "high", 1, "none")
    assert (line["name"], line["args"]) == ("n", 3)


def test_any_value_has_a_bounded_json_form(log: EventLog, stream: io.StringIO) -> None:
    nested: list[Any] = []
    for _ in range(50):
        nested = [nested]
    log.info(
        "a",
        path=Path("/x"),
        raw=b"ok\xff\n",
        view=memoryview(b"v"),
        infinite=float("inf"),
        long="x" * 5000,
        long_raw=b"x" * 5000,
        many=list(range(1000)),
        table={1: {"a": (1, 2)}},
        nested=nested,
        surrogate="\udcff",
    )
    (line,) = lines(stream)
    assert line["path"] == "/x"
    assert line["raw"] == "ok\\xff\n"
    assert line["view"] == "v"
    assert line["infinite"] == "inf"
    assert line["long"] == "x" * limits.EVENT_VALUE_CHARS + "...(3976 more)"
    assert len(line["long_raw"]) < limits.EVENT_VALUE_CHARS + 30
    assert line["many"] == list(range(limits.EVENT_VALUE_ITEMS))
    assert line["table"] == {"1": {"a": [1, 2]}}
    assert stream.getvalue().isascii()
    assert len(stream.getvalue()) < 5000


def test_line_of_a_library_looks_the_same(stream: io.StringIO) -> None:
    logging.getLogger("asyncio").warning("took %d s\nand more", 5)
    logging.getLogger("asyncio").info("chatter")
    (line,) = lines(stream)
    assert (line["level"], line["logger"], line["event"]) == ("warning", "asyncio", "log")
    assert line["message"] == "took 5 s\nand more"


# --- for people ---------------------------------------------------------------------------------------------


def test_auto_is_for_people_with_colours_on_a_terminal(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    events.setup("info", "auto", terminal)
    log.warning("peer.gone", peer="1.2.3.4:5")
    text = terminal.getvalue()
    assert "\x1b[33mwarning\x1b[0m \x1b[1mpeer.gone\x1b[0m \x1b[36mpeer=\x1b[0m1.2.3.4:5\n" in text


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_refused(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    terminal = Terminal()
    events.setup("info", "auto", terminal)
    log.info("a")
    assert "\x1b" not in terminal.getvalue()
    assert terminal.getvalue().endswith(" info    a\n")


def test_json_can_be_asked_for_on_a_terminal(log: EventLog) -> None:
    terminal = Terminal()
    events.setup("info", "json", terminal)
    log.info("a")
    assert lines(terminal)[0]["event"] == "a"


def test_human_line_elsewhere_has_no_colours_and_quotes_where_needed(log: EventLog) -> None:
    stream = human()
    log.info(
        "a.b", plain="x.y:5", spaced="x y", quoted='x"y', empty="", number=5, flag=True, many=["x"], größe="ö"
    )
    text = stream.getvalue()
    assert text.endswith(
        ' info    a.b plain=x.y:5 spaced="x y" quoted="x\\"y" empty="" number=5 flag=true many=["x"]'
        " größe=ö\n"
    )


def test_nothing_that_a_peer_sends_breaks_the_line_or_reaches_the_terminal_raw(log: EventLog) -> None:
    stream = human()
    log.info("a", peer="x\n2020 info forged\x1b[2J\x9b\u202e\u2028\udcff", raw=b"\x1b[2J\n")
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text[:-1].isprintable()
    assert 'peer="x\\n2020 info forged\\x1b[2J\\x9b\\u202e\\u2028\\udcff"' in text


def test_human_exception_is_on_the_line_with_the_way_it_took(log: EventLog) -> None:
    stream = human()

    def fail() -> None:
        raise ValueError("bad\nthing")

    try:
        fail()
    except ValueError:
        log.exception("a")
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert 'exception="ValueError: bad\\nthing [test_events.py:' in text
    assert " fail]" in text


def test_human_line_of_a_library_says_whose_it_is() -> None:
    stream = human()
    logging.getLogger("asyncio").error("oh no")
    assert stream.getvalue().endswith(' error   log logger=asyncio message="oh no"\n')


# --- floods -------------------------------------------------------------------------------------------------


def test_flood_is_held_back_after_a_burst_and_its_size_is_told(
    log: EventLog, clock: Clock, stream: io.StringIO
) -> None:
    for number in range(1000):
        log.limited("peer.bad_frame", key="a", every=1.0, number=number)
    assert [line["number"] for line in lines(stream)] == list(range(limits.EVENT_BURST))
    assert all("suppressed" not in line for line in lines(stream))
    clock.now += 1.0
    for number in range(1000):
        log.limited("peer.bad_frame", key="a", every=1.0, number=number)
    last = lines(stream)[-1]
    assert len(lines(stream)) == limits.EVENT_BURST + 1
    assert (last["number"], last["suppressed"], last["level"]) == (0, 1000 - limits.EVENT_BURST, "warning")
    clock.now += 3600.0
    log.limited("peer.bad_frame", key="a", every=1.0)
    log.limited("peer.bad_frame", key="a", every=1.0)
    assert [line.get("suppressed") for line in lines(stream)[-2:]] == [999, None]


def test_one_peer_does_not_silence_another_nor_one_event_another(log: EventLog, stream: io.StringIO) -> None:
    for _ in range(50):
        log.limited("a", key=1)
    log.limited("a", key=2)
    log.limited("b", key=1)
    assert [line["event"] for line in lines(stream)] == ["a"] * limits.EVENT_BURST + ["a", "b"]


def test_many_peers_are_one_flood(log: EventLog, clock: Clock, stream: io.StringIO) -> None:
    for peer in range(10_000):
        log.limited("a", key=peer)
    assert len(lines(stream)) == limits.EVENT_NAME_BURST
    clock.now += 1.0
    for peer in range(10_000, 20_000):
        log.limited("a", key=peer)
    assert len(lines(stream)) == limits.EVENT_NAME_BURST + limits.EVENT_NAME_RATE


def test_memory_is_bounded_and_no_suppressed_line_goes_uncounted(clock: Clock) -> None:
    limiter = RateLimiter(clock)
    told = admitted = 0
    for peer in range(3 * limits.EVENT_BUCKETS):
        for event in ("a", "b"):
            before = limiter.admit(event, f"{peer}" * 100, 1.0)
            if before is not None:
                admitted += 1
                told += before
        clock.now += 0.001
    assert len(limiter._keys) == limits.EVENT_BUCKETS
    rest = limiter.take_suppressed()
    assert set(rest) == {"a", "b"}
    assert told + admitted + sum(rest.values()) == 6 * limits.EVENT_BUCKETS
    assert limiter.take_suppressed() == {}


def test_flood_that_just_stops_is_reported_once(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_limiter", RateLimiter(Clock()))
    log = events.get("test")
    for peer in range(3):
        for _ in range(100):
            log.limited("peer.bad_frame", key=peer)
    written = len(lines(stream))
    events.report_suppressed()
    events.report_suppressed()
    (report,) = lines(stream)[written:]
    assert (report["event"], report["of"], report["count"]) == (
        "events.suppressed",
        "peer.bad_frame",
        300 - written,
    )


def test_events_below_the_level_are_not_counted_as_suppressed(clock: Clock, stream: io.StringIO) -> None:
    limiter = RateLimiter(clock)
    log = EventLog(logging.getLogger(f"{events.ROOT}.test"), limiter)
    for _ in range(100):
        log.limited("a", level=logging.DEBUG)
    assert limiter.take_suppressed() == {}
    assert stream.getvalue() == ""
