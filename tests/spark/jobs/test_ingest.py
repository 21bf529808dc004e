"""`ingest`: every message of the drop once in the table, byte for byte, whatever is killed, lost or read again."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace.drop import COMPACTED_SUFFIX
from headrace.errors import HeadraceError
from headrace.spark.jobs import JobError, feed, ingest, table
from headrace.spark.jobs.hadoop import Lock
from headrace.spark.jobs.ingest import read_table
from headrace.spark.jobs.table import Table, TableError, TableTaken, read_state
from tests.spark.jobs.drops import LOG, START, Message, messages, write_file

pytestmark = pytest.mark.needs("java")

Row = tuple[str, str, int, bytes]


def rows(spark: SparkSession, path: Path) -> list[Row]:
    found = read_table(spark, str(path)).select("node", "log", "offset", "payload").collect()
    return sorted((row.node, row.log, row.offset, bytes(row.payload)) for row in found)


def expected(sent: Iterable[Message], node: str = "edge-1", log: str = LOG) -> list[Row]:
    return sorted((node, log, one.offset, one.payload) for one in sent)


def take(spark: SparkSession, drop: Path, to: Path, **options: Any) -> ingest.Taken:
    return ingest.run(spark, str(drop), str(to), **options)


@pytest.fixture
def drop(tmp_path: Path) -> Path:
    """Three files of two hours and one of another gateway."""
    made = tmp_path / "drop"
    write_file(made, messages(0, 99))
    write_file(made, messages(100, 199))
    write_file(made, messages(200, 259, ts=START + timedelta(hours=1)))
    write_file(made, messages(0, 9), node="edge-2")
    return made


def all_rows() -> list[Row]:
    return sorted(expected(messages(0, 259)) + expected(messages(0, 9), "edge-2"))


def test_the_table_has_every_column_of_the_drop_and_the_name_of_the_file(
    spark: SparkSession, drop: Path, tmp_path: Path
) -> None:
    headed = Message(260, b"\x00\xff{", START + timedelta(hours=2), "a.b", None, "felix", {"k": "v"})
    written = write_file(drop, [headed])
    taken = take(spark, drop, tmp_path / "table")
    assert (taken.rows, taken.files, taken.skipped) == (271, 5, 0)
    assert rows(spark, tmp_path / "table") == sorted([*all_rows(), *expected([headed])])
    row = read_table(spark, str(tmp_path / "table")).where("offset = 260").collect()[0].asDict()
    shown = {key: value for key, value in row.items() if key not in ("ts", "payload", "date")}
    assert shown == {
        "node": "edge-1",
        "log": LOG,
        "offset": 260,
        "protocol": "felix",
        "topic": "a.b",
        "kind": 0,
        "source": None,
        "correlation": -260,
        "headers": {"k": "v"},
        "part_sizes": None,
        "file": written.name,
        "hour": 9,
    }
    assert (row["ts"].timestamp(), str(row["date"])) == (headed.ts.timestamp(), "2026-01-31")


def test_what_came_since_is_taken_by_the_next_run(spark: SparkSession, drop: Path, tmp_path: Path) -> None:
    assert take(spark, drop, tmp_path / "table", max_files=1).batches == 4
    assert take(spark, drop, tmp_path / "table").rows == 0
    write_file(drop, messages(260, 300))
    taken = take(spark, drop, tmp_path / "table")
    assert (taken.batches, taken.rows, taken.skipped) == (1, 41, 0)
    assert rows(spark, tmp_path / "table") == sorted([*all_rows(), *expected(messages(260, 300))])


def test_a_lost_checkpoint_brings_nothing_twice(spark: SparkSession, drop: Path, tmp_path: Path) -> None:
    take(spark, drop, tmp_path / "table")
    shutil.rmtree(tmp_path / "table/_headrace/checkpoint")
    write_file(drop, messages(260, 269))
    assert take(spark, drop, tmp_path / "table").rows == 10
    assert rows(spark, tmp_path / "table") == sorted([*all_rows(), *expected(messages(260, 269))])


@pytest.mark.parametrize("compared", [64, 0], ids=["compared", "joined"])
def test_compacted_files_bring_only_what_is_new(
    spark: SparkSession, drop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compared: int
) -> None:
    """Also where one covers files of which some were taken and some were pruned before."""
    monkeypatch.setattr(feed, "COMPARED_INTERVALS", compared)
    shutil.move(next(drop.rglob("edge-1*100-*199.parquet")), tmp_path)
    take(spark, drop, tmp_path / "table")
    compacted = Path(f"{drop}{COMPACTED_SUFFIX}")
    write_file(compacted, messages(0, 199))
    taken = take(spark, compacted, tmp_path / "table", checkpoint=str(tmp_path / "checkpoint"))
    assert taken.rows == 100
    assert rows(spark, tmp_path / "table") == all_rows()
    state = read_state(Table(spark, str(tmp_path / "table")).files)
    assert [interval for stream, interval in state.ranges if stream[0] == "edge-1"] == [(0, 259)]


def test_files_of_one_batch_that_cover_the_same_offsets_come_once(
    spark: SparkSession, drop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "COMPARED_INTERVALS", 0)
    write_file(drop, messages(0, 199))
    assert take(spark, drop, tmp_path / "table").rows == 270
    again = take(spark, drop, tmp_path / "table", checkpoint=str(tmp_path / "another"))
    assert (again.rows, again.skipped) == (0, 470)
    assert rows(spark, tmp_path / "table") == all_rows()


def test_holes_that_filters_left_are_no_intervals(spark: SparkSession, tmp_path: Path) -> None:
    """The files say how many offsets before them are empty, so that what is remembered does not grow."""
    drop = tmp_path / "drop"
    write_file(drop, messages(10, 19), empty_before=10)
    write_file(drop, messages(25, 25))  # 20 to 24 are really missing
    write_file(drop, messages(40, 49), empty_before=14, covers=(40, 59))
    take(spark, drop, tmp_path / "table")
    state = read_state(Table(spark, str(tmp_path / "table")).files)
    assert list(state.ranges) == [(("edge-1", LOG), (0, 19)), (("edge-1", LOG), (25, 59))]


def test_rows_that_a_name_does_not_vouch_for_are_left_out_and_told(
    spark: SparkSession, drop: Path, tmp_path: Path
) -> None:
    write_file(drop, messages(300, 309), covers=(300, 305))
    write_file(drop, messages(400, 409)).rename(
        drop / "date=2026-01-31/hour=07" / f"other-{LOG}-{400:020d}-{409:020d}.parquet"
    )
    taken = take(spark, drop, tmp_path / "table")
    assert (taken.rows, taken.strange) == (276, 2)
    assert rows(spark, tmp_path / "table") == sorted([*all_rows(), *expected(messages(300, 305))])


POINTS = [
    "staged:1",
    "announced:1",
    "moved:1",
    "moved:2",
    "committed:1",
    "cleaned:1",
    "staged:2",
    "moved:4",
    "folded:1",
]


class Killed(Exception):
    """Stands for the end of the driver."""


@pytest.mark.parametrize("point", POINTS)
def test_a_driver_that_ends_anywhere_loses_nothing_and_leaves_nothing_behind(
    spark: SparkSession, drop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """The end is an exception here: at these points the files are as a kill leaves them."""
    to = tmp_path / "table"
    monkeypatch.setattr(table, "FOLD_AFTER", 2)
    name, _, wanted = point.partition(":")
    count = 0

    def end_here(passed: str) -> None:
        nonlocal count
        count += passed == name
        if passed == name and count == int(wanted):
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(table, "pass_point", end_here)
        with pytest.raises(Exception, match="Killed"):
            take(spark, drop, to, max_files=2)
    if read_state(Table(spark, str(to)).files).schema:
        seen = rows(spark, to)  # whole batches, and nothing of what is half done
        assert len(seen) == len(set(seen)) < len(all_rows()) or point == "folded:1"
        assert set(seen) <= set(all_rows())
    if wanted == "1":
        shutil.rmtree(to / "_headrace/checkpoint")
    take(spark, drop, to, max_files=2)
    assert rows(spark, to) == all_rows()
    # Whoever reads the directory itself sees no more than that.
    assert spark.read.parquet(str(to)).count() == len(all_rows())
    assert not (to / "_staging").exists() or not list((to / "_staging").iterdir())
    assert not list((to / "_headrace/manifests").glob("*moving*"))


DRIVER = """
import sys
from headrace.cli import main
from headrace.spark.jobs import table
table.FOLD_AFTER = 2
main(["spark", "ingest", *sys.argv[1:], "--once", "--max-files", "1", "--master", "local[2]"])
"""


def drive(drop: Path, to: Path, kill_at: str) -> int:
    """A driver of its own, which is killed on the way."""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        table.KILL_VARIABLE: kill_at,
    }
    command = [sys.executable, "-c", DRIVER, str(drop), str(to)]
    return subprocess.run(command, env=environ, capture_output=True, timeout=200).returncode


def test_a_driver_that_is_killed_is_followed_by_one_that_goes_on(
    spark: SparkSession, drop: Path, tmp_path: Path, soak: int
) -> None:
    to = tmp_path / "table"
    more = ["staged:1", "announced:1", "committed:1", "cleaned:1"] if soak > 1 else []
    for point in ["moved:2", "announced:2", *more]:
        assert drive(drop, to, point) == -signal.SIGKILL
    shutil.rmtree(to / "_headrace/checkpoint")
    taken = take(spark, drop, to)
    assert taken.rows < len(all_rows())
    assert rows(spark, to) == all_rows()
    assert spark.read.parquet(str(to)).count() == len(all_rows())


def test_a_second_writer_is_refused(spark: SparkSession, drop: Path, tmp_path: Path) -> None:
    take(spark, drop, tmp_path / "table")
    with Table(spark, str(tmp_path / "table")), pytest.raises(TableTaken, match="one writer"):
        Table(spark, str(tmp_path / "table")).open(patience=0)
    Table(spark, str(tmp_path / "table")).open(patience=0)


@pytest.mark.parametrize("moment", ["staged", "announced", "moved"])
def test_a_writer_that_was_overtaken_commits_nothing(
    spark: SparkSession, drop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """As on filesystems that have no locks: another has begun meanwhile, and goes on from what is committed."""
    to = tmp_path / "table"
    monkeypatch.setattr("headrace.spark.jobs.hadoop.Files.lock", lambda *_: Lock(None, ""))
    passed: list[str] = []

    def another(name: str) -> None:
        passed.append(name)
        if name == moment and passed.count(name) == 1:
            Table(spark, str(to)).open()

    with monkeypatch.context() as patched:
        patched.setattr(table, "pass_point", another)
        with pytest.raises(HeadraceError, match=r"taken over|cannot move"):
            take(spark, drop, to)
    assert "committed" not in passed
    assert take(spark, drop, to).rows == 270
    assert rows(spark, to) == all_rows()


def test_a_table_that_was_closed_takes_no_batch(spark: SparkSession, tmp_path: Path) -> None:
    """A stream that was stopped may still be busy with its last batch."""
    with Table(spark, str(tmp_path / "table")) as closed:
        pass
    with pytest.raises(TableError, match="closed"):
        closed.commit("nothing", run="", batch=0, rows=0, schema=spark.range(1).schema)


def test_a_stream_goes_on_until_it_is_stopped(spark: SparkSession, drop: Path, tmp_path: Path) -> None:
    following = ingest.Ingest(spark, str(drop), str(tmp_path / "table"), every=timedelta(milliseconds=200))
    deadline = time.monotonic() + 60
    while following.taken.rows < 270 and time.monotonic() < deadline:
        time.sleep(0.05)
    write_file(drop, messages(260, 264))
    while following.taken.rows < 275 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert following.stop().rows == 275
    assert rows(spark, tmp_path / "table") == sorted([*all_rows(), *expected(messages(260, 264))])


def test_a_table_takes_one_drop(spark: SparkSession, drop: Path, tmp_path: Path) -> None:
    take(spark, drop, tmp_path / "table")
    other = drop.rename(tmp_path / "other")
    with pytest.raises(JobError, match="a table takes one drop"):
        take(spark, other, tmp_path / "table", checkpoint=str(tmp_path / "c"))
    write_file(other, messages(260, 260))
    assert take(spark, other, tmp_path / "table", checkpoint=str(tmp_path / "c"), moved=True).rows == 1


def test_manifests_are_folded_and_remembered(
    spark: SparkSession, drop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "FOLD_AFTER", 3)
    take(spark, drop, tmp_path / "table", max_files=1)
    names = sorted(one.name for one in (tmp_path / "table/_headrace/manifests").glob("*.json"))
    assert names == ["000000000003.fold.json", "000000000004.json"]
    assert rows(spark, tmp_path / "table") == all_rows()


def test_what_is_no_table_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(TableError, match="no table"):
        read_table(spark, str(tmp_path))
