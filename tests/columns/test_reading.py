"""Where a batch begins and ends, what is said about what the log has lost, and whose memory a batch is."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import headrace.columns
from headrace.columns import ColumnReader
from headrace.log import Log
from tests.log.patience import append, append_many, eventually
from tests.oracle import log as log_twin

OpenLog = Callable[..., Log]

HOUR = 3_600_000_000
LOTS = (1 << 20, 1 << 28)


def offsets(batch: pa.RecordBatch | None) -> list[int]:
    assert batch is not None
    batch.validate(full=True)
    found: list[int] = batch.column("offset").to_pylist()
    return found


def rest(reader: ColumnReader) -> list[int]:
    return [offset for batch in iter(lambda: reader.read(*LOTS), None) for offset in offsets(batch)]


# --- batches --------------------------------------------------------------------------------------------------------


def test_a_batch_ends_with_its_hour(open_log: OpenLog, directory: Path) -> None:
    log = open_log()
    seen, unseen = log.topic("a"), log.topic("b")
    begin = 4_000_000_000_000_000 // HOUR * HOUR  # the log's time does not go back, so it is later than now
    for topic, at in (
        (seen, begin), (seen, begin + HOUR - 1), (unseen, begin + HOUR), (seen, begin + HOUR), (seen, begin + 5 * HOUR),
        (unseen, begin + 6 * HOUR),
    ):  # fmt: skip
        log.append(topic, b"x", now=at)
    with ColumnReader(directory, node="n", filters=["a"]) as reader:
        assert offsets(reader.read(*LOTS)) == [0, 1]
        assert (reader.hour_of_next, reader.offset) == (begin + HOUR, 3)
        assert offsets(reader.read(*LOTS)) == [3]
        assert (reader.hour_of_next, reader.offset) == (begin + 5 * HOUR, 4)
        assert offsets(reader.read(*LOTS)) == [4]
        assert (reader.hour_of_next, reader.offset) == (None, 6)
        assert reader.read(*LOTS) is None
        assert reader.missing == []


def test_hours_before_the_epoch_end_too(directory: Path) -> None:
    segment = log_twin.Segment(bytes(16), 1)
    segment.control(log_twin.TOPIC, b"a", topic=1)
    for at in (-HOUR - 1, -HOUR, -1, 0, HOUR - 1):
        segment.message(b"x", time=at)
    log_twin.write_log(directory, bytes(16), [segment])
    with ColumnReader(directory, node="n") as reader:
        assert [offsets(batch) for batch in iter(lambda: reader.read(*LOTS), None)] == [[0], [1, 2], [3, 4]]


def test_a_batch_ends_with_the_row_that_reaches_the_limit(open_log: OpenLog, directory: Path) -> None:
    log = open_log()
    topic = log.topic("a")
    for size in (10, 20, 30, 40, 1000, 5):
        log.append(topic, bytes(size), headers=b"{}", parts=[size])
    with ColumnReader(directory, node="n") as reader:
        # 1 byte of the name "a", and 2 of headers and 4 of parts in each row
        assert offsets(reader.read(10, 1 + 16 + 26)) == [0, 1]
        assert reader.row_bytes == 42
        assert offsets(reader.read(10, 37)) == [2, 3]
        assert offsets(reader.read(1, 1 << 20)) == [4]
        assert reader.row_bytes == 1006
        assert offsets(reader.read(10, 1)) == [5]
        assert reader.read(10, 1) is None
        assert reader.row_bytes == 0
    for leave_out, size in ((["payload"], 36), (["payload", "headers"], 24), (["part_sizes"], 1105 + 12)):
        with ColumnReader(directory, node="n", leave_out=leave_out) as reader:
            assert offsets(reader.read(*LOTS)) == [0, 1, 2, 3, 4, 5]
            assert reader.row_bytes == size


def test_names_count_for_the_limit(open_log: OpenLog, directory: Path) -> None:
    log = open_log(segment_bytes=1 << 20)
    for i in range(10):
        log.append(log.topic("x" * 30_000 + str(i)), b"")
    with ColumnReader(directory, node="n") as reader:
        assert offsets(reader.read(100, 80_000)) == [0, 1, 2]


def test_the_cursor_moves_over_what_the_filters_leave_out(open_log: OpenLog, directory: Path) -> None:
    log = open_log()
    topic = log.topic("b")
    for _ in range(1000):
        append(log, topic, bytes(200))
    with ColumnReader(directory, node="n", filters=["a.#"]) as reader:
        assert reader.read(*LOTS) is None
        assert reader.offset == 1000
        append(log, log.topic("a.1"), b"")
        assert rest(reader) == [1000]
        assert reader.missing == []


def test_a_reader_goes_on_while_the_log_is_written(open_log: OpenLog, directory: Path) -> None:
    total = 30_000
    log = open_log()
    size = 96

    def write() -> None:
        topic = log.topic("a.b")
        for first in range(0, total, 100):
            payloads = b"".join(i.to_bytes(8, "little") * (size // 8) for i in range(first, first + 100))
            append_many(log, topic, payloads, size)

    thread = threading.Thread(target=write)
    thread.start()
    seen = 0
    try:
        with ColumnReader(directory, node="n") as reader:
            while seen < total:
                batch = reader.read(777, 1 << 20)
                if batch is None:
                    time.sleep(0.0005)
                    continue
                assert offsets(batch) == list(range(seen, seen + batch.num_rows))
                for i, payload in enumerate(batch.column("payload").to_pylist(), seen):
                    assert payload == i.to_bytes(8, "little") * (size // 8)
                seen += batch.num_rows
                if seen % 5 == 0:
                    reader.sync()
                assert reader.offset == seen
            assert reader.missing == []
    finally:
        thread.join()


# --- what is missing ------------------------------------------------------------------------------------------------


def test_what_retention_took_is_missing(open_log: OpenLog, directory: Path) -> None:
    log = open_log(retention_bytes=0)
    topic = log.topic("a")
    append_many(log, topic, bytes(400 * 1000), 1000)
    reader = ColumnReader(directory, node="n")
    first = reader.offset
    assert first == log.first > 0
    assert reader.take_missing() == [(0, first - 1)]
    assert reader.missing == []
    found = offsets(reader.read(10, 1 << 20))
    assert found == list(range(first, first + 10))
    while log.first < 800:
        append_many(log, topic, bytes(1000), 1000)
        log.on_event()
    found += rest(reader)
    assert len(reader.missing) == 1
    (gone,) = reader.take_missing()
    assert sorted([*range(first), *found, *range(gone[0], gone[1] + 1)]) == list(range(log.appended))
    reader.close()


def damaged(directory: Path, *places: tuple[int, int]) -> list[log_twin.Segment]:
    """Three segments of five messages each; those at (segment, message) are damaged."""
    segments = []
    for number in (1, 2, 3):
        segment = log_twin.Segment(bytes(16), number, first=5 * (number - 1))
        segment.control(log_twin.TOPIC, b"a", topic=1)
        for i in range(5):
            segment.message(bytes([number, i]) * 10)
        if number < 3:
            segment.seal()
        segments.append(segment)
    log_twin.write_log(directory, bytes(16), segments)
    for number, message in places:
        position = segments[number - 1].places[2 + message][0]
        with log_twin.segment_path(directory, number).open("r+b") as file:
            file.seek(position + 50)
            file.write(b"?")
    return segments


def test_damage_is_passed_and_said(directory: Path) -> None:
    damaged(directory, (1, 2), (2, 0), (2, 4), (3, 1), (3, 2))
    with ColumnReader(directory, node="n") as reader:
        batch = reader.read(*LOTS)
        assert offsets(batch) == [0, 1, 3, 4, 6, 7, 8, 10, 13, 14]
        assert reader.missing == [(2, 2), (5, 5), (9, 9), (11, 12)]
        assert reader.take_missing() == [(2, 2), (5, 5), (9, 9), (11, 12)]
        assert reader.take_missing() == []
        assert reader.offset == 15


def test_damage_between_two_batches_is_said_once(directory: Path) -> None:
    damaged(directory, (1, 2))
    with ColumnReader(directory, node="n") as reader:
        found = [offsets(batch) for batch in iter(lambda: reader.read(2, 1000), None)]
        assert found == [[0, 1], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12], [13, 14]]
        assert reader.missing == [(2, 2)]


@pytest.mark.parametrize("begin", [0, 3, 7])
def test_a_segment_that_cannot_be_entered_is_missing(directory: Path, begin: int) -> None:
    damaged(directory)
    with log_twin.segment_path(directory, 2).open("r+b") as file:
        file.write(b"?")
        file.seek(log_twin.HEADER)
        file.write(b"????")
    with ColumnReader(directory, begin, node="n") as reader:
        assert rest(reader) == [*range(begin, 5), *range(10, 15)]
        assert reader.missing == [(max(begin, 5), 9)]


def test_an_oldest_segment_that_cannot_be_entered_is_missing(directory: Path) -> None:
    damaged(directory)
    with log_twin.segment_path(directory, 1).open("r+b") as file:
        file.write(b"?")
        file.seek(log_twin.HEADER)
        file.write(b"????")
    with ColumnReader(directory, node="n") as reader:
        assert rest(reader) == list(range(5, 15))
        assert reader.missing == [(0, 4)]


def test_a_gap_that_recovery_left_is_missing(directory: Path) -> None:
    segment = log_twin.Segment(bytes(16), 1)
    segment.control(log_twin.TOPIC, b"a", topic=1)
    segment.message(b"x")
    segment.control(log_twin.GAP, bytes(40), correlation=3)
    segment.next += 3
    log_twin.write_log(directory, bytes(16), [segment])
    with ColumnReader(directory, node="n") as reader:
        assert offsets(reader.read(*LOTS)) == [0]
        assert reader.missing == [(1, 3)]
        assert reader.offset == 4
        segment.message(b"y")
        log_twin.write_log(directory, bytes(16), [segment])
        assert rest(reader) == [4]
        assert reader.missing == [(1, 3)]


def test_a_topic_whose_name_is_lost_is_found_in_another_segment(directory: Path) -> None:
    segments = damaged(directory)
    position = segments[1].places[1][0]
    with log_twin.segment_path(directory, 2).open("r+b") as file:
        file.seek(position + 50)
        file.write(b"?")
    with ColumnReader(directory, node="n", filters=["a"]) as reader:
        assert rest(reader) == list(range(15))


# --- whose memory ---------------------------------------------------------------------------------------------------


def test_a_batch_outlives_its_reader_and_its_log(open_log: OpenLog, directory: Path) -> None:
    log = open_log()
    for i in range(100):
        log.append(log.topic("a"), b"%d" % i, headers=b'{"i": "%d"}' % i)
    with ColumnReader(directory, node="n") as reader:
        batch = reader.read(*LOTS)
    del reader
    log.close()
    for path in directory.glob("*.seg"):
        path.unlink()
    gc.collect()
    assert batch is not None
    column = batch.column("payload")
    headers = batch.column("headers")
    del batch
    gc.collect()
    assert column.to_pylist() == [b"%d" % i for i in range(100)]
    assert headers.to_pylist() == [[("i", str(i))] for i in range(100)]


@pytest.mark.parametrize("taken", [False, True], ids=["before it was taken", "after it was taken"])
def test_rows_are_not_lost_when_a_batch_cannot_be_handed_over(
    open_log: OpenLog, directory: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    log = open_log(retention_bytes=0)
    topic = log.topic("a")
    append_many(log, topic, bytes(400 * 1000), 1000)
    real = headrace.columns.import_batch

    def interrupted(array: int, schema: pa.Schema) -> pa.RecordBatch:
        if taken:
            real(array, schema)
        raise KeyboardInterrupt

    with ColumnReader(directory, node="n") as reader:
        first = reader.offset
        gone = list(reader.missing)
        assert gone == [(0, first - 1)]
        assert len(offsets(reader.read(5, 1 << 20))) == 5
        monkeypatch.setattr(headrace.columns, "import_batch", interrupted)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                reader.read(*LOTS)
        assert (reader.offset, reader.missing) == (first + 5, gone)
        monkeypatch.setattr(headrace.columns, "import_batch", real)
        assert rest(reader) == list(range(first + 5, 400))
        assert reader.missing == gone
        reader.sync()


def test_a_refused_import_frees_the_batch(
    open_log: OpenLog, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    log.append(log.topic("a"), b"x")
    real = headrace.columns.import_batch
    monkeypatch.setattr(
        headrace.columns, "import_batch", lambda array, schema: real(array, pa.schema([("x", pa.int8())]))
    )
    with ColumnReader(directory, node="n") as reader:
        with pytest.raises(pa.ArrowInvalid):
            reader.read(*LOTS)
        monkeypatch.setattr(headrace.columns, "import_batch", real)
        assert rest(reader) == [0]


GROWTH = textwrap.dedent("""
    import resource, sys
    import pyarrow as pa
    import headrace.columns
    from headrace.columns import ColumnReader

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    def refuse(array, schema):
        raise pa.ArrowInvalid

    real = headrace.columns.import_batch

    def once() -> int:
        rows = 0
        with ColumnReader(sys.argv[1], node="n", payload_json=True) as reader:
            for limit in range(100, 10_000, 700):
                headrace.columns.import_batch = refuse
                try:
                    reader.read(limit, 1 << 20)
                except pa.ArrowInvalid:
                    pass
                headrace.columns.import_batch = real
                batch = reader.read(limit, 1 << 20)
                if batch is None:
                    break
                rows += batch.num_rows
        return rows

    for _ in range(20):
        once()
    before = resident()
    rows = sum(once() for _ in range(200))
    print(rows, resident() - before)
""")


@pytest.mark.memory
def test_memory_does_not_grow(open_log: OpenLog, directory: Path) -> None:
    log = open_log(segment_bytes=1 << 20)
    topics = [log.topic(f"t.{i}") for i in range(100)]
    for i in range(5000):
        while not log.stats()["pool_segments"]:
            log.on_event()
        log.append(topics[i % 100], b'{"n": %d}' % i, headers=b'{"a": "b", "a": "c", "n": 1}', parts=[1, 2])
    # In a process of its own, since other tests leave memory behind that would be used again unseen.
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, str(directory)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    rows, growth = map(int, done.stdout.split())
    assert rows == 200 * 5000
    assert growth < 4 << 20  # one byte in each row would be a fourth of that for each column


def test_one_thread_at_a_time(open_log: OpenLog, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log()
    log.append(log.topic("a"), b"x")
    real = headrace.columns.import_batch
    with ColumnReader(directory, node="n") as reader:
        inside: list[str] = []

        def meanwhile(array: int, schema: pa.Schema) -> pa.RecordBatch:
            uses: list[Callable[[], object]] = [lambda: reader.read(1, 1), reader.sync, reader.close]
            for use in uses:
                with pytest.raises(RuntimeError, match="another thread is using this reader"):
                    use()
                inside.append("refused")
            return real(array, schema)

        monkeypatch.setattr(headrace.columns, "import_batch", meanwhile)
        assert offsets(reader.read(1, 1)) == [0]
        assert inside == ["refused"] * 3
        assert eventually(lambda: reader.read(1, 1) is None)
