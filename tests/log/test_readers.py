"""Readers in other threads and processes while a log is written at full speed: they see whole records, in order, across
rolls and recycling, and count what they were too slow for."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import LogDamaged
from headrace.log import Log, LogReader, verify
from tests.log.patience import append, append_many, eventually
from tests.oracle import log as twin

OpenLog = Callable[..., Log]

SIZE = 96


def numbered(first: int, count: int) -> bytes:
    """Messages that say their offset from end to end."""
    return b"".join(offset.to_bytes(8, "little") * (SIZE // 8) for offset in range(first, first + count))


def follow(directory: Path, stop_at: int) -> dict[str, int]:
    """Reads to the message before `stop_at`, and checks each."""
    seen = waits = 0
    with LogReader(directory) as reader:
        expected = reader.offset
        while reader.offset < stop_at:
            overtaken = reader.overtaken
            record = reader.read()
            if record is None:
                waits += 1
                time.sleep(0.0005)
                continue
            if reader.overtaken == overtaken:
                assert record.offset == expected
            assert record.offset >= expected
            assert record.payload == numbered(record.offset, 1)
            assert record.topic_name == b"a.b"
            expected = record.offset + 1
            seen += 1
        return {"seen": seen, "overtaken": reader.overtaken, "waits": waits, "lost": reader.lost}


FOLLOW = """
import json, sys
from pathlib import Path
from tests.log.test_readers import follow
print("ready", flush=True)
print(json.dumps(follow(Path(sys.argv[1]), int(sys.argv[2]))))
"""


@pytest.mark.parametrize("retention", [1 << 30, 0], ids=["everything kept", "recycled at once"])
def test_readers_never_see_torn_or_unordered_records(
    directory: Path, open_log: OpenLog, retention: int, soak: int
) -> None:
    total = 40_000 * soak
    log = open_log(sync="none", retention_bytes=retention, segment_bytes=65536 * 2)
    topic = log.topic("a.b")
    log.append_many(topic, numbered(0, 10), SIZE)
    process = subprocess.Popen(
        [sys.executable, "-c", FOLLOW, str(directory), str(total)], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    results: list[dict[str, int]] = []
    threads = [threading.Thread(target=lambda: results.append(follow(directory, total))) for _ in range(2)]
    for thread in threads:
        thread.start()
    while log.appended < total:
        batch = min(200, total - log.appended)
        append_many(log, topic, numbered(log.appended, batch), SIZE)
    for thread in threads:
        thread.join()
    results.append(json.loads(process.communicate(timeout=120)[0]))
    assert process.returncode == 0
    assert len(results) == 3
    for result in results:
        assert result["seen"] + result["overtaken"] == total
        assert result["lost"] == 0
    if retention:
        assert [result["overtaken"] for result in results] == [0, 0, 0]
    else:
        assert log.stats()["retired_segments"] > 20


def test_a_reader_goes_on_where_the_log_goes_on(open_log: OpenLog) -> None:
    log = open_log(sync="none")
    topic = log.topic("a")
    with log.reader() as reader:
        assert reader.read() is None
        for i in range(300):
            append(log, topic, bytes(1000))
            record = reader.read()
            assert record is not None
            assert record.offset == i
            assert reader.read() is None
        assert len(log.segments()) > 3


def test_a_reader_survives_the_log_being_closed_and_opened_again(directory: Path, open_log: OpenLog) -> None:
    reader = None
    for i in range(5):
        log = open_log(sync="none")
        append(log, log.topic("a"), bytes(20000))
        reader = reader or LogReader(directory)
        record = reader.read()
        assert record is not None
        assert record.offset == i
        log.close()
        assert reader.read() is None


def test_control_records_are_shown_only_if_asked_for(open_log: OpenLog) -> None:
    log = open_log(sync="none")
    log.append(log.topic("a"), b"x")
    log.save_cursor("sink", 1)
    assert [record.control for record in log.reader()] == [False]
    reader = log.reader()
    shown = list(iter(lambda: reader.read(controls=True), None))
    assert [(r.control, r.kind, r.payload) for r in shown] == [
        (True, twin.OPEN, b""),
        (True, twin.TOPIC, b"a"),
        (False, 0, b"x"),
        (True, twin.CURSOR, b"sink"),
    ]
    assert shown[3].correlation == 1


@pytest.mark.parametrize("offset", [0, 1, 57, 58, 59, 150, 299])
def test_a_reader_begins_at_any_offset(open_log: OpenLog, offset: int) -> None:
    log = open_log(sync="none")
    topic = log.topic("a")
    for _ in range(300):
        append(log, topic, bytes(1000))
    assert [record.offset for record in log.reader(offset)] == list(range(offset, 300))


def test_a_reader_beyond_the_end_waits_for_its_offset(open_log: OpenLog) -> None:
    log = open_log(sync="none")
    topic = log.topic("a")
    log.append(topic, b"x")
    reader = log.reader(3)
    assert reader.read() is None
    for _ in range(3):
        log.append(topic, b"x")
    record = reader.read()
    assert record is not None
    assert record.offset == 3
    assert reader.overtaken == 0


def test_a_reader_of_a_log_without_a_segment_finds_it_when_it_comes(directory: Path) -> None:
    twin.write_log(directory, bytes(16), [])
    reader = LogReader(directory)
    assert reader.read() is None
    segment = twin.Segment(bytes(16), 1)
    segment.control(twin.TOPIC, b"a", topic=1)
    segment.message(b"x")
    twin.write_log(directory, segment.log, [segment])
    assert [record.payload for record in reader] == [b"x"]


def test_a_reader_stops_at_damage_and_can_go_on_behind_it(directory: Path) -> None:
    segments = []
    for number in (1, 2):
        segment = twin.Segment(bytes(16), number, first=4 * (number - 1))
        segment.control(twin.TOPIC, b"a", topic=1)
        for i in range(4):
            segment.message(bytes([number, i]) * 10)
        if number == 1:
            segment.seal()
        segments.append(segment)
    twin.write_log(directory, bytes(16), segments)
    position = segments[0].places[3][0]
    with twin.segment_path(directory, 1).open("r+b") as file:
        file.seek(position + 50)
        file.write(b"?")
        file.seek(twin.END)
        file.write(b"?")
    reader = LogReader(directory)
    with pytest.raises(
        LogDamaged, match=r"00000000000000000001.seg: the segment's readable end does not hold"
    ):
        reader.read()
    damage = reader.resume()
    assert (damage.segment, damage.position, damage.lost) == (1, twin.END, 0)
    first = reader.read()
    assert first is not None
    assert first.offset == 0
    for _ in range(2):  # it does not go on by itself
        with pytest.raises(LogDamaged, match=rf"position {position} does not hold \(offset 1\)"):
            reader.read()
    damage = reader.resume()
    assert (damage.segment, damage.position, damage.offset, damage.lost) == (1, position, 1, 1)
    assert reader.resume() is None
    assert [record.offset for record in reader] == [2, 3, 4, 5, 6, 7]
    assert reader.lost == 1
    assert reader.resume() is None


def test_a_segment_whose_header_is_damaged_can_still_be_read(directory: Path) -> None:
    segment = twin.Segment(bytes(16), 1)
    segment.control(twin.TOPIC, b"a", topic=1)
    segment.message(b"x")
    twin.write_log(directory, bytes(16), [segment])
    with twin.segment_path(directory, 1).open("r+b") as file:
        file.write(b"?")
    assert [record.payload for record in LogReader(directory)] == [b"x"]
    with twin.segment_path(directory, 1).open("r+b") as file:
        file.seek(twin.HEADER)
        file.write(b"????")
    with pytest.raises(LogDamaged, match="the segment's header does not hold"):
        LogReader(directory)


def test_verify_finds_nothing_wrong_while_the_log_is_written(directory: Path, open_log: OpenLog) -> None:
    log = open_log(retention_bytes=0)
    topic = log.topic("a")
    found: list[object] = []
    done = threading.Event()

    def check() -> None:
        while not done.is_set():
            found.extend(verify(directory).problems)

    thread = threading.Thread(target=check)
    thread.start()
    try:
        while log.stats()["retired_segments"] < 300 and not found:
            append_many(log, topic, numbered(log.appended, 100), SIZE)
            log.request_sync()
            log.on_event()
    finally:
        done.set()
        thread.join()
    assert found == []
    assert verify(directory).end_offset == log.appended


def test_verify_says_what_it_read(directory: Path, open_log: OpenLog) -> None:
    log = open_log(sync="none", retention_bytes=0)
    append_many(log, log.topic("a"), bytes(500 * 1000), 1000)
    eventually(lambda: (log.on_event(), log.stats()["pool_segments"])[1])
    report = verify(directory)
    assert report.problems == []
    assert (report.first_offset, report.end_offset) == (log.first, 500)
    assert report.messages == 500 - log.first
    assert report.records > report.messages
    assert report.segments == len(log.segments())
