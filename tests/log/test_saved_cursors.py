"""Saved cursors as another process finds them, without opening the log."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import LogError
from headrace.log import Log, saved_cursors
from tests.log.patience import append, append_many
from tests.oracle import log as twin

OpenLog = Callable[..., Log]


def test_the_newest_of_each_name_counts(directory: Path, open_log: OpenLog) -> None:
    log = open_log(sync="none")
    assert saved_cursors(directory) == {}
    topic = log.topic("a")
    for i in range(1000):
        append(log, topic, bytes(300))
        log.save_cursor("sink:main", i)
        if i == 20:
            log.save_cursor("größe", 2**64 - 1)
    assert len(log.segments()) > 4
    assert saved_cursors(directory) == {"sink:main": 999, "größe": 2**64 - 1} == log.cursors
    log.close()
    assert saved_cursors(directory) == {"sink:main": 999, "größe": 2**64 - 1}


def test_what_is_no_log_has_none(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="not a headrace log"):
        saved_cursors(tmp_path)


def test_one_behind_damage_is_found(directory: Path) -> None:
    segments = []
    for number in (1, 2):
        segment = twin.Segment(bytes(16), number, first=2 * (number - 1))
        segment.control(twin.CURSOR, b"a", correlation=10 * number)
        segment.message(b"x" * 50)
        segment.message(b"y" * 50)
        segment.control(twin.CURSOR, b"b", correlation=20 * number)
        if number == 1:
            segment.seal()
        segments.append(segment)
    twin.write_log(directory, bytes(16), segments)
    for number in (1, 2):
        with twin.segment_path(directory, number).open("r+b") as file:
            file.seek(segments[number - 1].places[2][0] + 50)
            file.write(b"?")
    assert saved_cursors(directory) == {"a": 20, "b": 40}
    with twin.segment_path(directory, 2).open("r+b") as file:
        file.seek(segments[1].places[1][0] + 50)  # the cursor itself: the one before is the newest that holds
        file.write(b"?")
    assert saved_cursors(directory) == {"a": 10, "b": 40}


def test_none_is_missed_while_retention_carries_them_along(directory: Path, open_log: OpenLog) -> None:
    """Found at any time: both the one that moves, and the one that is only carried from segment to segment."""
    log = open_log(sync="none", retention_bytes=0)
    topic = log.topic("a")
    log.save_cursor("carried", 7)
    log.save_cursor("moving", 0)
    done = threading.Event()
    wrong: list[object] = []
    looks = 0

    def look() -> None:
        nonlocal looks
        last = 0
        while not done.is_set():
            found = saved_cursors(directory)
            looks += 1
            if found.get("carried") != 7 or found.get("moving", -1) < last:
                wrong.append((last, found))
                return
            last = found["moving"]

    thread = threading.Thread(target=look)
    thread.start()
    try:
        while (log.stats()["retired_segments"] < 300 or looks < 100) and not wrong:
            append_many(log, topic, bytes(20 * 1000), 1000)
            log.save_cursor("moving", log.appended)
            log.on_event()
    finally:
        done.set()
        thread.join()
    assert wrong == []
