"""What a sink writes and when, how it fails and recovers, and where it goes on."""

import json
import shutil
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from headrace.drop.layout import hour_directory
from headrace.drop.schema import EMPTY_BEFORE_KEY, MISSING_KEY, arrow_schema
from headrace.errors import LogFull
from headrace.sink import exporter as sink_module
from headrace.sink.errors import SinkLocked
from headrace.sink.exporter import Sink
from headrace.sink.notes import Intent, Progress, progress_path, read_progress, write_progress
from tests.log.patience import append, eventually
from tests.sink.conftest import NODE, Bench
from tests.sink.drops import files, name, offsets, problems, ranges, rows

HOUR = 3_600_000_000


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "FIRST_RETRY", 0.01)
    monkeypatch.setattr(sink_module, "LONGEST_RETRY", 0.05)


def test_every_message_is_in_a_row_with_all_that_it_has(bench: Bench) -> None:
    topic = bench.log.topic("plant.a")
    now = 4_000_000_000_000_000
    bench.log.append(
        topic,
        b"ab\x00\xffc",
        headers=b'{"a": "b"}',
        parts=(2, 3),
        protocol=1,
        kind=7,
        correlation=2**64 - 1,
        now=now,
    )
    bench.log.append(topic, b"", now=now + 1)
    bench.export()
    (path,) = files(bench.drop)
    assert pq.ParquetFile(path).schema_arrow.names == arrow_schema().names
    first, second = rows(bench.drop)
    moment = first.pop("ts")
    assert (moment.timestamp(), str(moment.tzinfo)) == (now / 1e6, "UTC")
    assert first == {
        "node": NODE,
        "log": bench.log.id_text,
        "offset": 0,
        "protocol": "blipmq",
        "topic": "plant.a",
        "kind": 7,
        "source": None,
        "correlation": -1,
        "headers": [("a", "b")],
        "part_sizes": [2, 3],
        "payload": b"ab\x00\xffc",
    }
    assert (second["headers"], second["part_sizes"], second["payload"]) == (None, None, b"")
    assert problems(bench.drop) == []


def test_a_file_ends_after_so_many_rows(bench: Bench) -> None:
    bench.append(250)
    bench.export(bench.plan(roll_rows=100))
    assert ranges(bench.drop) == [(0, 99), (100, 199), (200, 249)]
    assert problems(bench.drop) == []


def test_a_file_ends_after_so_many_bytes_of_messages(bench: Bench) -> None:
    topic = bench.log.topic("a")
    for _ in range(10):
        append(bench.log, topic, bytes(30_000))
    bench.export(bench.plan(roll_bytes=64 * 1024))
    assert ranges(bench.drop) == [(0, 2), (3, 5), (6, 8), (9, 9)]


def test_a_file_ends_by_its_age_though_nothing_comes_any_more(bench: Bench) -> None:
    sink = bench.sink(bench.plan(roll_seconds=0.1))
    sink.start()
    bench.append(3)
    eventually(lambda: ranges(bench.drop) == [(0, 2)])
    bench.append(2)
    eventually(lambda: ranges(bench.drop) == [(0, 2), (3, 4)])


def test_a_file_has_rows_of_one_hour_also_when_the_clock_jumps(bench: Bench) -> None:
    start = 4_000_000_000_000_000 // HOUR * HOUR + HOUR - 2
    bench.append(2, now=start)
    bench.append(2, now=start + 2)
    bench.append(1, now=start + 5 * HOUR)
    bench.append(2, now=start)  # a clock that was set back: the log's time stands still
    bench.append(1, now=start + 5 * HOUR + 3)
    bench.export()
    assert ranges(bench.drop) == [(0, 1), (2, 3), (4, 6), (7, 7)]
    directories = [str(path.parent.relative_to(bench.drop)) for path in files(bench.drop)]
    times = (start, start + 2, start + 5 * HOUR, start + 5 * HOUR + 3)
    assert directories == [hour_directory(one) for one in times]
    assert problems(bench.drop) == []


def test_a_full_log_hurries_it(bench: Bench) -> None:
    sink = bench.sink()
    sink.start()
    bench.append(3)
    eventually(lambda: sink.stats()["open_rows"] == 3)
    assert files(bench.drop) == []
    sink.hurry()
    eventually(lambda: ranges(bench.drop) == [(0, 2)])


def test_its_files_are_young_and_nothing_is_left_in_staging(bench: Bench) -> None:
    bench.append(10)
    before = time.time() - 1
    bench.export()
    (path,) = files(bench.drop)
    assert path.stat().st_mtime >= before
    assert [one.suffix for one in (bench.drop / "_staging").iterdir()] == [".lock"]
    assert stat.S_ISREG(path.stat().st_mode)


def test_the_end_finishes_the_open_file(bench: Bench) -> None:
    sink = bench.sink()
    sink.start()
    bench.append(5)
    eventually(lambda: sink.stats()["open_rows"] == 5)
    assert sink.stop(30)
    assert ranges(bench.drop) == [(0, 4)]
    assert sink.stats()["covered"] == 5


def test_it_goes_on_where_names_say(bench: Bench) -> None:
    bench.append(10)
    bench.export()
    shutil.rmtree(bench.data / "sink")
    bench.append(10)
    sink = bench.sink(once=True)
    sink._progress = Progress(bench.log.id_text)  # as if the log had lost its cursors
    sink.run()
    assert ranges(bench.drop) == [(0, 9), (10, 19)]


def test_it_goes_on_where_the_log_says_when_files_were_taken_away(bench: Bench) -> None:
    bench.append(10)
    bench.export()
    for path in files(bench.drop):
        path.unlink()
    shutil.rmtree(bench.data / "sink")
    bench.append(5)
    bench.export()
    assert ranges(bench.drop) == [(10, 14)]


def test_it_goes_on_where_its_own_note_says(bench: Bench) -> None:
    """As a process of its own does, whose gateway is down and saves no cursors."""
    bench.append(10)
    bench.sink(once=True).run()
    for path in files(bench.drop):
        path.unlink()
    bench.append(5)
    bench.sink(once=True).run()
    assert ranges(bench.drop) == [(10, 14)]


def test_a_file_that_was_put_in_place_and_taken_away_before_anything_was_noted_is_not_written_again(
    bench: Bench,
) -> None:
    bench.append(10)
    note = progress_path(bench.data, "default")
    note.parent.mkdir()
    intent = Intent(9, str(bench.drop / "_staging" / "gone.parquet"), "date=x/hour=y/z.parquet")
    write_progress(note, Progress(bench.log.id_text, 0, 0, intent))
    bench.append(5)
    bench.export()
    assert ranges(bench.drop) == [(10, 14)]


def test_a_file_that_was_about_to_be_put_in_place_is_written_anew(bench: Bench) -> None:
    bench.append(10)
    staged = bench.drop / "_staging" / f"{NODE}-{bench.log.id_text}-0.parquet"
    staged.parent.mkdir(parents=True)
    staged.write_bytes(b"half")
    note = progress_path(bench.data, "default")
    note.parent.mkdir()
    write_progress(note, Progress(bench.log.id_text, 0, 0, Intent(9, str(staged), "x")))
    bench.export()
    assert offsets(bench.drop) == list(range(10))
    assert not staged.exists()


def test_a_note_of_another_log_means_nothing(bench: Bench) -> None:
    note = progress_path(bench.data, "default")
    note.parent.mkdir()
    write_progress(note, Progress("0" * 32, 100, 100))
    assert read_progress(note, bench.log.id_text) == Progress(bench.log.id_text)
    bench.append(3)
    bench.export()
    assert ranges(bench.drop) == [(0, 2)]


def test_a_new_log_in_the_same_drop_begins_at_its_own_beginning(
    bench: Bench, new_bench: Callable[[Path], Bench]
) -> None:
    bench.append(10)
    bench.export()
    wiped = new_bench(bench.data / "again")
    wiped.drop = bench.drop
    wiped.append(4)
    wiped.export()
    found = {(name(path).log, name(path).first, name(path).last) for path in files(bench.drop)}
    assert found == {(bench.log.id_text, 0, 9), (wiped.log.id_text, 0, 3)}
    assert problems(bench.drop) == []


def test_only_what_a_filter_matches_is_written_and_gaps_are_explained(bench: Bench) -> None:
    plan = bench.plan(topics=("plant.*.temperature", "orders"), roll_rows=2)
    bench.append(3, "plant.a.temperature")
    bench.append(5, "noise")
    first = bench.export(plan)
    assert (first.stats()["covered"], first.stats()["file_end"]) == (8, 8)
    bench.append(5, "noise")
    second = bench.export(plan)
    assert (second.stats()["covered"], second.stats()["file_end"], second.stats()["files"]) == (13, 8, 0)
    bench.append(1, "orders")
    bench.export(plan)
    assert [row["topic"] for row in rows(bench.drop)] == ["plant.a.temperature"] * 3 + ["orders"]
    assert ranges(bench.drop) == [(0, 1), (2, 7), (13, 13)]
    metadata = pq.ParquetFile(files(bench.drop)[-1]).metadata.metadata
    assert metadata[EMPTY_BEFORE_KEY] == b"5"
    assert problems(bench.drop) == []


def test_columns_are_left_out_and_json_is_asked_for(bench: Bench) -> None:
    topic = bench.log.topic("a")
    bench.log.append(topic, b'{"a": 1}')
    bench.log.append(topic, b"{no")
    bench.export(bench.plan(leave_out=("headers", "payload"), payload_json=True))
    assert [row["payload_json"] for row in rows(bench.drop)] == ['{"a": 1}', None]
    (path,) = files(bench.drop)
    assert (
        pq.ParquetFile(path).schema_arrow.names
        == arrow_schema(("headers", "payload"), payload_json=True).names
    )
    assert problems(bench.drop) == []


def test_several_drops_get_each_their_own(bench: Bench) -> None:
    bench.append(3, "a")
    bench.append(2, "b")
    other = bench.plan(name="other", uri=str(bench.data / "other"), topics=("b",))
    bench.export()
    bench.export(other)
    assert offsets(bench.drop) == [0, 1, 2, 3, 4]
    assert offsets(bench.data / "other") == [3, 4]


def test_what_the_log_has_lost_is_said_in_the_next_file(
    tmp_path: Path, new_bench: Callable[[Path], Bench]
) -> None:
    bench = new_bench(tmp_path / "small")
    bench.log.set_retention(4 * 256 * 1024, 0)
    bench.append(1)
    bench.export()
    topic = bench.log.topic("a")
    while bench.log.first < 1000:
        try:
            bench.log.append(topic, bytes(2000))
        except LogFull:
            time.sleep(0.001)
        bench.log.on_event()
    sink = bench.export()
    gone = offsets(bench.drop)[1]  # a retired segment can be read until it is used again
    assert 1 < gone <= bench.log.first
    assert sink.stats()["missing"] == gone - 1
    path = files(bench.drop)[-1]
    assert json.loads(pq.ParquetFile(path).metadata.metadata[MISSING_KEY]) == [[1, gone - 1]]
    assert name(path).first == 1
    assert problems(bench.drop) == []


def test_a_second_sink_of_the_same_drop_is_refused(bench: Bench) -> None:
    first = bench.sink()
    first.start()
    with pytest.raises(SinkLocked, match="another process writes the drop 'default'"):
        bench.sink().start()


def test_a_drop_that_cannot_be_written_is_tried_again_until_it_can(bench: Bench) -> None:
    bench.drop.write_text("a file where a directory should be")
    bench.append(5)
    sink = bench.sink(bench.plan(roll_seconds=0.05))
    sink.start()
    eventually(lambda: sink.stats()["failures"]["unreachable"] > 2)
    stats = sink.stats()
    assert stats["failing"]
    assert stats["error"].startswith(f"the drop 'default' ({bench.drop}) cannot be written: ")
    assert stats["covered"] == 0
    bench.append(5)
    bench.drop.unlink()
    eventually(lambda: sink.stats()["covered"] == 10)
    eventually(lambda: sink.error is None)
    assert offsets(bench.drop) == list(range(10))


def test_a_failure_in_the_middle_of_a_file_writes_it_anew(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = sink_module.Target.put
    trouble = iter(
        [OSError(28, "No space left on device"), OSError(5, "Input/output error"), RuntimeError("odd")]
    )

    def failing(self: sink_module.Target, staged: Path, path: str) -> None:
        if (error := next(trouble, None)) is not None:
            raise error
        put(self, staged, path)

    monkeypatch.setattr(sink_module.Target, "put", failing)
    bench.append(10)
    sink = bench.sink(bench.plan(roll_seconds=0.05))
    sink.start()
    eventually(lambda: sink.stats()["covered"] == 10)
    failures = sink.stats()["failures"]
    assert (failures["space"], failures["io"], failures["bug"]) == (1, 1, 1)
    assert offsets(bench.drop) == list(range(10))
    assert sink.stats()["files"] == 1


def test_a_file_whose_directories_could_not_be_synced_is_known_by_its_name(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = sink_module.Target.put
    told = []

    def failing_late(self: sink_module.Target, staged: Path, path: str) -> None:
        put(self, staged, path)
        if not told:
            told.append(path)
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sink_module.Target, "put", failing_late)
    bench.append(10)
    sink = bench.sink(bench.plan(roll_seconds=0.05))
    sink.start()
    eventually(lambda: sink.stats()["covered"] == 10)
    bench.append(1)
    eventually(lambda: sink.stats()["covered"] == 11)
    assert ranges(bench.drop) == [(0, 9), (10, 10)]


def test_nothing_of_a_log_that_has_failed_is_exported(bench: Bench) -> None:
    trouble: list[str] = ["the disk is gone"]
    bench.append(3)
    sink = bench.sink(bench.plan(roll_seconds=0.05), log_failed=lambda: trouble[0] if trouble else None)
    sink.start()
    eventually(lambda: sink.stats()["failures"]["log"] > 1)
    assert files(bench.drop) == []
    assert "the log has failed: the disk is gone" in str(sink.error)


def test_it_tells_how_far_it_is_after_every_file(bench: Bench) -> None:
    told: list[tuple[int, int]] = []
    threads = set()

    def hear(covered: int, file_end: int) -> None:
        told.append((covered, file_end))
        threads.add(threading.current_thread())

    bench.append(25)
    bench.sink(bench.plan(roll_rows=10), once=True, on_progress=hear).run()
    assert told == [(0, 0), (10, 10), (20, 20), (25, 25)]


def test_the_empty_hour_that_somebody_removes_meanwhile_is_made_again(bench: Bench) -> None:
    sink = bench.sink(bench.plan(roll_seconds=0.02))
    sink.start()
    ended = threading.Event()

    def remove() -> None:
        while not ended.is_set():
            for directory in [*bench.drop.glob("date=*/hour=*"), *bench.drop.glob("date=*")]:
                try:
                    directory.rmdir()
                except OSError:
                    continue

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for _ in range(20):
            bench.append(1)
            eventually(lambda: sink.covered == bench.log.appended)
            for path in files(bench.drop):
                path.unlink()
    finally:
        ended.set()
        remover.join()
    assert sink.stats()["files"] >= 1
    assert sink.stats()["failures"] == dict.fromkeys(sink.stats()["failures"], 0)


def test_s3_gets_every_message_once_also_after_the_server_was_away(bench: Bench, bucket: str) -> None:
    uri = bucket.format("some/drop")
    bench.append(10)
    bench.export(bench.plan(uri=uri))
    bench.append(5)
    away = bench.sink(bench.plan(uri=uri.replace("127.0.0.1:", "127.0.0.2:1"), roll_seconds=0.05), once=True)
    away.run()
    assert away.error is not None
    assert away.covered == 10
    bench.export(bench.plan(uri=uri))
    from headrace.drop.catalog import catalog
    from headrace.drop.filesystems import place
    from headrace.drop.verify import verify

    there = place(uri)
    assert [(one.name.first, one.name.last) for one in catalog(there).entries] == [(0, 9), (10, 14)]
    found = verify(there)
    assert (found.rows, found.whole) == (15, True)
    assert not list((bench.data / "sink" / "default-staging").iterdir())


def test_the_sink_of_a_wrong_place_says_so(bench: Bench) -> None:
    sink: Sink = bench.sink(bench.plan(uri="s3://"), once=True)
    sink.run()
    assert sink.error is not None
    assert "cannot be" in sink.error
