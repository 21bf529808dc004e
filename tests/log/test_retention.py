"""Retention: what goes by size and by age, what holds it back, what is carried forward, and what happens
to those who are
overrun."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import LogFull
from headrace.log import Log, LogReader, verify
from tests.log.patience import append, append_many, eventually, fill_pool
from tests.oracle import log as twin

OpenLog = Callable[..., Log]

SEGMENT = 65536
HOUR = 3_600_000_000


def files(directory: Path) -> list[int]:
    return sorted(int(path.name[:20]) for path in directory.glob("*.seg"))


def settle(log: Log) -> None:
    """Lets retention do all that it can do now."""

    def settled() -> bool:
        retired = log.tick()
        log.sync_now()
        log.on_event()
        return not retired and log.stats()["pool_segments"] > 0

    eventually(settled)


def later() -> int:
    """A time that is not yet: the log's clock never goes back behind when it was opened."""
    return time.time_ns() // 1000 + HOUR


# --- by size ------------------------------------------------------------------------------------------------


def test_the_oldest_segments_go_when_the_log_is_as_large_as_it_may_be(
    directory: Path, open_log: OpenLog
) -> None:
    log = open_log(sync="none", retention_bytes=10 * SEGMENT)
    append_many(log, log.topic("a"), bytes(2000 * 1000), 1000)
    assert log.stats()["segments"] <= 10
    settle(log)
    assert len(files(directory)) <= 10
    assert log.first > 0
    assert [record.offset for record in log.reader()] == list(range(log.first, 2000))
    assert log.stats()["retired_segments"] == log.segments()[0].number - 1


def test_a_log_can_always_hold_its_pool_and_two_segments(open_log: OpenLog) -> None:
    log = open_log(sync="none", retention_bytes=0, pool_segments=3)
    append_many(log, log.topic("a"), bytes(500 * 1000), 1000)
    assert log.appended == 500
    assert log.stats()["segments"] >= 1


def test_segments_are_recycled_not_made_anew(directory: Path, open_log: OpenLog) -> None:
    log = open_log(sync="none", retention_bytes=8 * SEGMENT)
    topic = log.topic("a")
    fill_pool(log)
    while log.stats()["retired_segments"] == 0:
        append(log, topic, bytes(1000))
    made = log.stats()["prepared_new"]
    inodes = {os.stat(path).st_ino for path in directory.glob("*.seg")}
    append_many(log, topic, bytes(1000 * 1000), 1000)
    settle(log)
    assert log.stats()["prepared_recycled"] > 10
    assert log.stats()["prepared_new"] == made
    assert {os.stat(path).st_ino for path in directory.glob("*.seg")} == inodes


def test_segments_are_remade_where_syncs_become_large_and_again_where_they_become_small(
    directory: Path, open_log: OpenLog
) -> None:
    segment = 4 << 20
    log = open_log(sync="none", segment_bytes=segment, pool_segments=1, retention_bytes=6 * segment)
    topic = log.topic("a")
    payload = bytes(range(250)) * 4000
    fill_pool(log)

    def append_until_remade(times: int) -> None:
        def remade() -> bool:
            append(log, topic, log.appended.to_bytes(8, "little") + payload)
            fill_pool(log)
            return bool(log.stats()["prepared_remade"] >= times)

        eventually(remade)

    for _ in range(160):
        append(log, topic, log.appended.to_bytes(8, "little") + payload)
    log.sync_now()
    assert log.stats()["prepared_remade"] == 0
    inodes = {os.stat(path).st_ino for path in directory.glob("*.seg")}
    append_until_remade(6)
    for _ in range(30):
        append(log, topic, log.appended.to_bytes(8, "little") + payload)
        log.sync_now()
    append_until_remade(12)
    settle(log)
    assert {os.stat(path).st_ino for path in directory.glob("*.seg")} == inodes
    first, appended = log.first, log.appended
    log.close()
    log = open_log(sync="none", segment_bytes=segment, pool_segments=1, retention_bytes=6 * segment)
    assert (log.recovery.cut_bytes, log.recovery.damage) == (0, ())
    assert (log.first, log.appended) == (first, appended)
    for offset, record in enumerate(log.reader(), first):
        assert (record.offset, record.payload) == (offset, offset.to_bytes(8, "little") + payload)
    assert verify(directory).problems == []


def test_segments_are_remade_when_their_turn_comes_also_while_many_are_wanted(open_log: OpenLog) -> None:
    segment = 1 << 20
    log = open_log(
        sync="interval:1",
        segment_bytes=segment,
        pool_segments=8,
        retention_bytes=24 * segment,
        large_sync=1000,
    )
    topic = log.topic("a")
    payloads = bytes(8_000_000)

    def all_remade() -> bool:
        log.append_many(topic, payloads, 1000)  # takes the whole pool
        log.on_event()
        return bool(log.stats()["prepared_remade"] >= 24)

    eventually(all_remade)
    # Each of them once, but for those that came before syncs were known to be large.
    assert log.stats()["prepared_recycled"] <= 3 * 24
    appended = log.appended
    log.close()
    log = open_log(segment_bytes=segment, pool_segments=8, retention_bytes=24 * segment)
    assert (log.recovery.cut_bytes, log.recovery.damage) == (0, ())
    assert log.appended == appended
    assert [record.offset for record in log.reader()] == list(range(log.first, appended))


def test_retention_can_be_changed_while_running(directory: Path, open_log: OpenLog) -> None:
    log = open_log(sync="none", retention_bytes=20 * SEGMENT)
    append_many(log, log.topic("a"), bytes(2000 * 1000), 1000)
    before = log.first
    log.set_retention(8 * SEGMENT, 0)
    settle(log)
    eventually(lambda: len(files(directory)) <= 8)
    assert log.first > before
    numbers = files(directory)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert [record.offset for record in log.reader()] == list(range(log.first, 2000))
    assert verify(directory).problems == []


def test_larger_segments_of_an_earlier_life_do_not_make_syncs_look_large(open_log: OpenLog) -> None:
    log = open_log(sync="none", segment_bytes=16 * SEGMENT, retention_bytes=0)
    topic = log.topic("a")
    while log.segments()[-1].bytes < 12 * SEGMENT:
        append(log, topic, bytes(1000))
    log.close()
    log = open_log(sync="none", retention_bytes=0)
    topic = log.topic("a")
    last = log.segments()[-1].number
    while log.segments()[-1].number == last:
        append(log, topic, bytes(1000))
    log.sync_now()
    while log.stats()["prepared_recycled"] < 10:
        append(log, topic, bytes(1000))
        fill_pool(log)
    assert log.stats()["prepared_remade"] == 0


# --- by age -------------------------------------------------------------------------------------------------


def test_segments_go_when_their_last_message_is_too_old(directory: Path, open_log: OpenLog) -> None:
    start = later()
    log = open_log(sync="none", retention_seconds=3600)
    topic = log.topic("a")
    for minute in range(120):
        for _ in range(5):
            while True:
                try:
                    log.append(topic, bytes(1000), now=start + minute * HOUR // 60)
                    break
                except LogFull:
                    log.on_event(start)
    assert log.first == 0
    now = start + 2 * HOUR
    assert log.tick(now) > 0
    for info in log.segments()[:-1]:
        with twin.segment_path(directory, info.number).open("rb") as file:
            last = list(twin.walk(file.read(), log.id, info.number))[-1][1]
        assert now - last.time <= HOUR
    kept = [record.time for record in log.reader()]
    assert 0 < len(kept) < 600
    # whole segments go, so that up to one of them holds older messages too
    assert sum(time < now - HOUR for time in kept) < 70
    assert log.tick(now) == 0
    log.sync_now()
    eventually(lambda: (log.on_event(now), len(files(directory)) <= log.stats()["segments"] + 2)[1])
    assert verify(directory).problems == []


def test_the_newest_segment_stays_however_old(open_log: OpenLog) -> None:
    start = later()
    log = open_log(sync="none", retention_seconds=1)
    log.append(log.topic("a"), b"old", now=start)
    assert log.tick(start + 100 * HOUR) == 0
    assert [record.payload for record in log.reader()] == [b"old"]


def test_age_has_no_say_by_default(open_log: OpenLog) -> None:
    start = later()
    log = open_log(sync="none")
    topic = log.topic("a")
    while len(log.segments()) < 4:
        try:
            log.append(topic, bytes(1000), now=start)
        except LogFull:
            log.on_event(start)
    assert log.tick(start + 10**4 * HOUR) == 0
    assert log.first == 0


def test_a_crash_between_two_retirements_leaves_no_hole(directory: Path, open_log: OpenLog) -> None:
    """Many segments become too old at once: they leave the disk oldest first, whatever becomes of each."""
    start = later()
    log = open_log(sync="none", retention_bytes=100 * SEGMENT, retention_seconds=3600)
    topic = log.topic("a")
    while len(log.segments()) < 30:
        try:
            log.append_many(topic, bytes(50 * 1000), 1000, now=start)
        finally:
            log.on_event(start)
    log.tick(start + 10 * HOUR)
    for _ in range(100):
        numbers = files(directory)
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        if log.on_event(start + 10 * HOUR) == 0 and len(numbers) < 6:
            break


# --- holding back -------------------------------------------------------------------------------------------


def test_a_hold_blocks_and_full_says_who_holds(open_log: OpenLog) -> None:
    log = open_log(sync="none", retention_bytes=0)
    topic = log.topic("a")
    log.append(topic, b"x")
    assert log.full is None
    log.hold("sink", 1)
    log.hold("other", 1 << 60)
    with pytest.raises(LogFull, match=r"retention is reached and held back by sink at offset 1$"):  # noqa: PT012
        while True:
            append_once(log, topic)
    assert log.full == "retention is reached and held back by sink at offset 1"
    assert log.first == 0
    refused = log.stats()["refused_full"]
    with pytest.raises(LogFull):
        log.append(topic, bytes(1000))
    assert log.stats()["refused_full"] == refused + 1
    held = log.segments()[0].end_offset
    log.hold("sink", held)  # it has read that far
    append(log, topic, bytes(1000))
    assert log.full is None
    assert log.first == held
    log.release("sink")
    append_many(log, topic, bytes(500 * 1000), 1000)
    assert log.first > held


def append_once(log: Log, topic: int) -> None:
    """Appends, unless a segment is only just being prepared."""
    try:
        log.append(topic, bytes(1000))
    except LogFull as error:
        if "still being prepared" not in str(error):
            raise
        log.on_event()


def test_a_message_too_large_for_what_is_left_makes_the_log_full(open_log: OpenLog) -> None:
    log = open_log(sync="none", retention_bytes=0)
    topic = log.topic("a")
    log.hold("sink", 0)
    fill_pool(log)
    largest = bytes(log.max_record - 48)
    with pytest.raises(LogFull, match="held back by sink"):  # noqa: PT012
        while True:
            log.append(topic, largest)
            settle_pool(log)
    assert log.full is not None
    assert "held back by sink" in log.full


def settle_pool(log: Log) -> None:
    eventually(lambda: (log.on_event(), log.stats()["pool_segments"] or "held" in str(log._why_full()))[1])


def test_a_hold_is_kept_against_age_too(open_log: OpenLog) -> None:
    start = later()
    log = open_log(sync="none", retention_seconds=1)
    topic = log.topic("a")
    log.hold("sink", 0)
    while len(log.segments()) < 4:
        try:
            log.append(topic, bytes(1000), now=start)
        except LogFull:
            log.on_event(start)
    assert log.tick(start + 100 * HOUR) == 0
    log.release("sink")
    log.tick(start + 100 * HOUR)
    assert len(log.segments()) == 1


def test_drop_oldest_overruns_a_hold_and_counts(open_log: OpenLog) -> None:
    log = open_log(sync="none", retention_bytes=0, on_full="drop_oldest")
    topic = log.topic("a")
    log.hold("sink", 0)
    append_many(log, topic, bytes(500 * 1000), 1000)
    assert log.appended == 500
    assert log.first > 0
    assert log.stats()["overrun_holds"] == log.stats()["retired_segments"] > 0
    assert log.full is None


# --- what is carried ----------------------------------------------------------------------------------------


def test_saved_cursors_survive_retention_and_reopening(open_log: OpenLog) -> None:
    log = open_log(sync="none", retention_bytes=0)
    topic = log.topic("a")
    log.save_cursor("once", 3)
    log.save_cursor("ünïcode", 4)
    for i in range(5):
        log.save_cursor("often", i)
    for _ in range(3):
        append_many(log, topic, bytes(500 * 1000), 1000)
        log.save_cursor("often", log.appended)
        expected = {"once": 3, "ünïcode": 4, "often": log.appended}
        assert log.cursors == expected
        log.close(sync=False)
        log = open_log(sync="none", retention_bytes=0)
        topic = log.topic("a")
        assert log.cursors == expected
    assert log.first > 0


def test_a_segment_goes_only_when_what_was_carried_from_it_is_on_disk(
    directory: Path, open_log: OpenLog
) -> None:
    """Else a power cut could lose both. With the policy none there is no other sync than the one this needs."""
    log = open_log(sync="none", retention_bytes=0)
    topic = log.topic("a")
    log.save_cursor("sink", 1)
    before = log.stats()["syncs"]
    while log.stats()["retired_segments"] == 0:
        append(log, topic, bytes(1000))
    eventually(lambda: not twin.segment_path(directory, 1).exists())
    assert log.stats()["syncs"] > before
    carried = [
        record
        for info in log.segments()
        for _, record in twin.walk(Path(info.path).read_bytes(), log.id, info.number)
        if record.control and record.kind == twin.CURSOR
    ]
    assert [(record.payload, record.correlation) for record in carried] == [(b"sink", 1)]


def test_retention_needs_no_sync_where_nothing_is_carried(open_log: OpenLog) -> None:
    log = open_log(sync="none", retention_bytes=0)
    before = log.stats()["syncs"]
    append_many(log, log.topic("a"), bytes(1000 * 1000), 1000)
    assert log.stats()["retired_segments"] > 5
    assert log.stats()["syncs"] == before


# --- readers ------------------------------------------------------------------------------------------------


def test_a_reader_that_is_overtaken_moves_forward_and_counts(open_log: OpenLog) -> None:
    log = open_log(sync="none", retention_bytes=6 * SEGMENT)
    topic = log.topic("a")
    append_many(log, topic, b"".join(i.to_bytes(1000, "little") for i in range(100)), 1000)
    reader = log.reader()
    assert next(reader).offset == 0
    append_many(log, topic, b"".join(i.to_bytes(1000, "little") for i in range(100, 2000)), 1000)
    assert log.first > 200
    seen = [record.offset for record in reader]
    assert seen == sorted(set(seen))
    assert seen[-1] == 1999
    # The segment that it stood in was kept for it; those behind were not.
    assert reader.overtaken == 2000 - 1 - len(seen)
    assert reader.overtaken > 100


def test_a_segment_that_a_reader_holds_is_unlinked_instead_of_recycled(
    directory: Path, open_log: OpenLog
) -> None:
    log = open_log(sync="none", retention_bytes=0)
    topic = log.topic("a")
    append_many(log, topic, bytes(20 * 1000), 1000)
    reader = LogReader(directory)
    assert next(reader).offset == 0
    inode = os.stat(twin.segment_path(directory, 1)).st_ino
    append_many(log, topic, bytes(500 * 1000), 1000)
    settle(log)
    assert 1 not in files(directory)
    assert inode not in {os.stat(path).st_ino for path in directory.glob("*.seg")}
    rest = [record.offset for record in reader]
    assert rest[:19] == list(range(1, 20))
    assert rest[-1] == 519


def test_reading_from_before_the_first_counts_what_is_gone(open_log: OpenLog) -> None:
    log = open_log(sync="none", retention_bytes=0)
    append_many(log, log.topic("a"), bytes(500 * 1000), 1000)
    reader = log.reader(10)
    assert next(reader).offset == log.first
    assert reader.overtaken == log.first - 10
