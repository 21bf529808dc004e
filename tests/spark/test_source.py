"""`format("headrace")`: batches with filters pushed down, and streams whose progress is offsets."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import datasource as api

from headrace.drop.schema import EMPTY_BEFORE_KEY
from headrace.spark import HeadraceSource, SparkError, drop_schema, read_drop, register
from headrace.spark import source as source_module
from headrace.spark.source import Options, StreamReader
from tests.spark.files import BEGIN, LOG, OTHER_LOG, message, write_file, write_range

pytestmark = pytest.mark.needs("java")

STREAM = f"edge-1/{LOG}"


PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module", autouse=True)
def registered(spark: SparkSession) -> None:
    register(spark)


@pytest.fixture
def pushdown(spark: SparkSession) -> Iterator[None]:
    """Spark hands its filters to sources in Python."""
    spark.conf.set(PUSHDOWN, "true")
    yield
    spark.conf.unset(PUSHDOWN)


def load(spark: SparkSession, drop: Path, **options: str) -> DataFrame:
    return spark.read.format("headrace").options(**options).load(str(drop))


def offsets(rows: DataFrame) -> list[int]:
    return sorted(row.offset for row in rows.select("offset").collect())


# --- batches ------------------------------------------------------------------------------------------------


def test_a_batch_has_the_rows_that_sparks_own_reader_finds(spark: SparkSession, drop: Path) -> None:
    write_file(
        drop,
        [
            message(0, payload=b"\x00\xff", headers=[("a", "b"), ("c", "d")], part_sizes=[1, 1]),
            message(1, source=None, headers=None, topic="späte.züge", ts=BEGIN + timedelta(microseconds=1)),
        ],
    )
    write_range(drop, 3600, 3610, node="edge-2", row_group_size=3)
    write_range(drop, 10, 12, leave_out=["payload", "headers", "kind"])
    rows = load(spark, drop)
    assert rows.schema == drop_schema()
    expected = read_drop(spark, str(drop)).orderBy("node", "offset").collect()
    assert rows.orderBy("node", "offset").collect() == expected
    assert len(expected) == 16


def test_columns_can_be_chosen(spark: SparkSession, drop: Path) -> None:
    write_file(drop, [message(0, payload_json="{}")], payload_json=True)
    rows = load(spark, drop, columns="hour, topic,payload_json")
    assert rows.columns == ["hour", "topic", "payload_json"]
    assert [tuple(row) for row in rows.collect()] == [(7, "site.0", "{}")]
    assert "payload_json" in load(spark, drop, payloadJson="true").columns
    chosen = spark.read.format("headrace").schema("topic string, offset bigint").load(str(drop))
    assert [tuple(row) for row in chosen.collect()] == [("site.0", 0)]


def test_compacted_files_stand_for_their_originals(spark: SparkSession, drop: Path, tmp_path: Path) -> None:
    for first in (0, 10, 20):
        write_range(drop, first, first + 9)
    write_range(tmp_path / "merged", 0, 19)
    next(drop.rglob(f"*-{0:020}-*.parquet")).write_bytes(b"not looked at")
    assert offsets(load(spark, drop, compacted=str(tmp_path / "merged"))) == list(range(30))


def test_an_empty_drop_has_no_rows(spark: SparkSession, drop: Path) -> None:
    assert load(spark, drop).collect() == []


def filtered(
    monkeypatch: pytest.MonkeyPatch, drop: Path, filters: list[api.Filter]
) -> tuple[list[str], list[int], list[int]]:
    """What a reader plans and reads for some filters: files, row groups and offsets."""
    reader: Any = HeadraceSource({"path": str(drop), "pushdown": "true"}).reader(drop_schema())
    assert list(reader.pushFilters(filters)) == filters
    parts = reader.partitions()
    groups: list[int] = []
    plain = pq.ParquetFile.iter_batches

    def counted(self: Any, *args: Any, row_groups: list[int], **more: Any) -> Any:
        groups.extend(row_groups)
        return plain(self, *args, row_groups=row_groups, **more)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    found = [
        offset for part in parts for batch in reader.read(part) for offset in batch["offset"].to_pylist()
    ]
    files = [one.entry.directory for part in parts for one in part.slices]
    return files, groups, sorted(found)


def test_pushed_filters_choose_files_row_groups_and_rows(monkeypatch: pytest.MonkeyPatch, drop: Path) -> None:
    # Ten offsets an hour, and each row group has a topic of its own.
    for hour in range(3):
        rows = [
            message(hour * 10 + n, ts=BEGIN + timedelta(hours=hour, minutes=n), topic=f"t.{n // 5}")
            for n in range(10)
        ]
        write_file(drop, rows, row_group_size=5)
    seven, eight, nine = (f"date=2026-01-31/hour=0{hour}" for hour in (7, 8, 9))
    cases: list[tuple[list[api.Filter], list[str], list[int], list[int]]] = [
        ([], [seven, eight, nine], [0, 1] * 3, list(range(30))),
        ([api.EqualTo(("offset",), 12)], [eight], [0], [12]),
        ([api.In(("offset",), (1, 29, None))], [seven, nine], [0, 1], [1, 29]),
        (
            [
                api.GreaterThanOrEqual(("ts",), BEGIN + timedelta(hours=1, minutes=8)),
                api.LessThan(("ts",), BEGIN + timedelta(hours=2)),
            ],
            [eight],
            [1],
            [18, 19],
        ),
        (
            [api.EqualTo(("topic",), "t.1")],
            [seven, eight, nine],
            [1] * 3,
            [*range(5, 10), *range(15, 20), *range(25, 30)],
        ),
        (
            [api.StringStartsWith(("topic",), "t.0"), api.LessThan(("offset",), 10)],
            [seven],
            [0],
            list(range(5)),
        ),
        ([api.EqualTo(("topic",), "x")], [seven, eight, nine], [], []),
        ([api.EqualTo(("node",), "edge-2")], [], [], []),
        ([api.EqualTo(("hour",), 9), api.GreaterThan(("offset",), 27)], [nine], [1], [28, 29]),
        # Not understood, so nothing is left out.
        (
            [api.Not(api.EqualTo(("offset",), 1)), api.IsNull(("source",))],
            [seven, eight, nine],
            [0, 1] * 3,
            list(range(30)),
        ),
    ]
    for filters, files, groups, found in cases:
        with monkeypatch.context() as patch:
            assert filtered(patch, drop, filters) == (files, groups, found), filters


@pytest.mark.usefixtures("pushdown")
def test_spark_pushes_filters_and_finds_the_same_rows(spark: SparkSession, drop: Path) -> None:
    for first in (0, 3600, 7200):
        write_range(drop, first, first + 9)
    # Only who leaves this file out can answer.
    write_range(drop, 10800, 10801).write_bytes(b"no Parquet")

    def where(condition: str) -> list[int]:
        return offsets(load(spark, drop, pushdown="true").where(condition))

    assert where("ts < timestamp'2026-01-31 09:00:05'") == [
        *range(10),
        *range(3600, 3610),
        *range(7200, 7205),
    ]
    assert where("offset between 3602 and 3603") == [3602, 3603]
    assert where("date = date'2026-01-31' and hour in (7, 8) and topic like 'site.2%'") == [
        *(2, 5, 8),
        *(3602, 3605, 3608),
    ]
    with pytest.raises(PySparkException, match=r"10801\.parquet cannot be read"):
        load(spark, drop).where("offset = 1").collect()


@pytest.mark.usefixtures("pushdown")
def test_a_dataframe_has_all_its_rows_after_a_query_with_a_filter(spark: SparkSession, drop: Path) -> None:
    write_range(drop, 0, 9)
    rows = load(spark, drop)
    assert offsets(rows.where("offset = 3")) == [3]
    assert offsets(rows) == list(range(10))
    assert offsets(rows.where("offset = 3").union(rows.where("offset = 4"))) == [3, 4]


def test_a_large_file_is_read_by_several_tasks(monkeypatch: pytest.MonkeyPatch, drop: Path) -> None:
    write_range(drop, 0, 99, row_group_size=10)
    for first in (100, 200):
        write_range(drop, first, first + 1)
    monkeypatch.setattr(source_module, "SPLIT_BYTES", 2000)
    monkeypatch.setattr(source_module, "OPEN_BYTES", 1)
    reader = HeadraceSource({"path": str(drop)}).reader(drop_schema())
    parts: list[Any] = list(reader.partitions())
    large = [one for part in parts for one in part.slices if one.entry.name.last == 99]
    assert len(large) > 1
    assert [group for one in large for group in one.groups] == list(range(10))
    found = [
        offset for part in parts for batch in reader.read(part) for offset in batch["offset"].to_pylist()
    ]
    assert sorted(found) == [*range(100), 100, 101, 200, 201]


def test_small_files_share_a_task(drop: Path) -> None:
    for first in range(40):
        write_range(drop, first, first)
    parts: list[Any] = list(HeadraceSource({"path": str(drop)}).reader(drop_schema()).partitions())
    assert [len(part.slices) for part in parts] == [15, 15, 10]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"path": ""}, "needs the drop directory"),
        ({"columns": "topic,nothing"}, "no column nothing"),
        ({"columns": "topic,topic"}, "twice"),
        ({"startingOffsets": "middle"}, "startingOffsets is"),
        ({"startingOffsets": '{"edge-1": 5}'}, "startingOffsets is"),
        ({"startingOffsets": f'{{"{STREAM}": -1}}'}, "startingOffsets is"),
        ({"maxFilesPerTrigger": "0"}, "maxFilesPerTrigger is a number from 1"),
        ({"maxRowsPerTrigger": "many"}, "maxRowsPerTrigger is a number from 1"),
        ({"maxRowsPerTrigger": "1", "maxFilesPerTrigger": "1"}, "not both"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss is true or false"),
        ({"startOffsets": "latest"}, "no option startoffsets"),
    ],
)
def test_options_that_are_wrong_are_refused(options: dict[str, str], text: str) -> None:
    with pytest.raises(SparkError, match=text):
        HeadraceSource({"path": "/drop", **options}).schema()


def test_errors_reach_who_loads(spark: SparkSession, drop: Path) -> None:
    with pytest.raises(PySparkException, match="A drop has no column nothing"):
        load(spark, drop, columns="nothing")
    with pytest.raises(PySparkException, match=r"There is no drop directory .*/nowhere"):
        load(spark, drop / "nowhere").collect()
    with pytest.raises(PySparkException, match="no column topic of the type int"):
        spark.read.format("headrace").schema("topic int").load(str(drop)).collect()


# --- streams ------------------------------------------------------------------------------------------------


class Stream:
    """A stream into a Parquet directory, with one checkpoint for all its runs."""

    def __init__(self, spark: SparkSession, drop: Path, base: Path) -> None:
        self.spark = spark
        self.drop = drop
        self.out = base / "out"
        self.checkpoint = base / "checkpoint"

    def run(self, **options: str) -> list[tuple[str, int]]:
        """Reads all that is there; gives node and offset of all rows of all runs."""
        query = (
            self.spark.readStream.format("headrace")
            .options(**options)
            .load(str(self.drop))
            .writeStream.format("parquet")
            .option("path", str(self.out))
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        self.batches = [progress.numInputRows for progress in query.recentProgress]
        rows = self.spark.read.schema(drop_schema()).parquet(str(self.out)).collect()
        return sorted((row.node, row.offset) for row in rows)

    def progress(self) -> dict[str, int]:
        """What the newest batch has been planned up to."""
        newest = max(int(path.name) for path in (self.checkpoint / "offsets").glob("[0-9]*"))
        found: dict[str, int] = json.loads(
            (self.checkpoint / "offsets" / str(newest)).read_text().splitlines()[-1]
        )
        return found

    def forget_last_commit(self) -> None:
        """As if it had been killed after the last batch was planned, and before it was done."""
        newest = max((self.checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
        for path in (newest, newest.with_name(f".{newest.name}.crc")):
            path.unlink(missing_ok=True)


@pytest.fixture
def stream(spark: SparkSession, drop: Path, tmp_path: Path) -> Stream:
    return Stream(spark, drop, tmp_path)


def test_a_stream_reads_every_offset_once_across_restarts(stream: Stream, drop: Path) -> None:
    write_range(drop, 0, 9)
    assert stream.run() == [("edge-1", offset) for offset in range(10)]
    assert stream.progress() == {STREAM: 10}
    write_range(drop, 10, 12)
    write_range(drop, 3600, 3601, metadata={EMPTY_BEFORE_KEY: b"3587"})  # a log that comes later, and a gap
    write_range(drop, 5, 7, node="edge-2", log=OTHER_LOG)
    expected = [
        *(("edge-1", offset) for offset in (*range(13), 3600, 3601)),
        *(("edge-2", offset) for offset in (5, 6, 7)),
    ]
    assert stream.run() == expected
    assert stream.progress() == {STREAM: 3602, f"edge-2/{OTHER_LOG}": 8}
    assert stream.run() == expected


def test_a_batch_that_was_planned_is_read_again_as_planned(
    stream: Stream, drop: Path, tmp_path: Path
) -> None:
    write_range(drop, 0, 9)
    stream.run()
    write_range(drop, 10, 19)
    stream.run()
    # The file sink knows which batches it has, so the same batch with other rows would lose or double some.
    for path in sorted(stream.out.glob("_spark_metadata/*"))[-1:]:
        path.unlink()
    (stream.out / "_spark_metadata" / ".1.crc").unlink(missing_ok=True)
    stream.forget_last_commit()
    write_range(drop, 20, 29)
    # What has been read is merged meanwhile, and the originals are gone.
    write_range(tmp_path / "merged", 0, 19)
    for path in [*drop.rglob(f"*-{0:020}-*.parquet"), *drop.rglob(f"*-{10:020}-*.parquet")]:
        path.unlink()
    assert stream.run(compacted=str(tmp_path / "merged")) == [("edge-1", offset) for offset in range(30)]


def test_a_batch_has_at_most_so_many_files_or_rows(stream: Stream, drop: Path) -> None:
    for first in (0, 10, 20):
        write_range(drop, first, first + 9)
    stream.run(maxFilesPerTrigger="2")
    assert [count for count in stream.batches if count] == [20, 10]
    write_range(drop, 30, 39)
    write_range(drop, 0, 4, node="edge-2")
    found = stream.run(maxRowsPerTrigger="4")
    assert [count for count in stream.batches if count] == [4, 4, 4, 3]
    assert found == [
        *(("edge-1", offset) for offset in range(40)),
        *(("edge-2", offset) for offset in range(5)),
    ]


def test_a_stream_may_begin_with_what_comes(stream: Stream, drop: Path) -> None:
    write_range(drop, 0, 2)
    stream.run(startingOffsets="latest")
    write_range(drop, 3, 5)
    assert [offset for _, offset in stream.run(startingOffsets="latest")] == [3, 4, 5]


def test_files_that_are_gone_before_they_were_read_are_an_error(stream: Stream, drop: Path) -> None:
    write_range(drop, 0, 4)
    stream.run()
    write_range(drop, 5, 9).unlink()
    write_range(drop, 10, 14)
    text = f"The offsets 5 to 9 of {STREAM} are in no file"
    with pytest.raises(PySparkException, match=text):
        stream.run()
    found = stream.run(failOnDataLoss="false")
    assert [offset for _, offset in found] == [*range(5), *range(10, 15)]


def reader(drop: Path, **options: str) -> StreamReader:
    return StreamReader(Options.parse({"path": str(drop), **options}), drop_schema())


def everything() -> Any:
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    return ReadAllAvailable()


def rows_of(one: StreamReader, start: dict[str, int], end: dict[str, int]) -> list[int]:
    parts = one.partitions(start, end)
    return [offset for part in parts for batch in one.read(part) for offset in batch["offset"].to_pylist()]


@pytest.mark.parametrize(
    ("starting", "expected"), [("earliest", [0, 1, 2, 3, 4]), (json.dumps({STREAM: 1}), [1, 2, 3, 4])]
)
def test_a_stream_begins_where_it_is_told(drop: Path, starting: str, expected: list[int]) -> None:
    write_range(drop, 0, 2)
    write_range(drop, 3, 4)
    one = reader(drop, startingOffsets=starting)
    start = one.initialOffset()
    assert rows_of(one, start, one.latestOffset(start, everything())) == expected


def test_a_stream_goes_on_behind_files_that_were_cleaned_away(drop: Path) -> None:
    write_range(drop, 10, 11)
    one = reader(drop)
    end = one.latestOffset({STREAM: 10}, everything())
    assert (end, rows_of(one, {STREAM: 10}, end)) == ({STREAM: 12}, [10, 11])


def test_a_file_that_goes_after_planning_is_an_error_in_the_task(drop: Path) -> None:
    path = write_range(drop, 0, 4)
    write_range(drop, 5, 9)
    for options, lost in (({}, True), ({"failOnDataLoss": "false"}, False)):
        one = reader(drop, **options)
        end = one.latestOffset({}, everything())
        parts = one.partitions({}, end)
        hidden = path.rename(path.with_name("_gone"))
        if lost:
            with pytest.raises(SparkError, match=r"edge-1.*\.parquet is gone"):
                [list(one.read(part)) for part in parts]
        else:
            found = [n for part in parts for batch in one.read(part) for n in batch["offset"].to_pylist()]
            assert found == [5, 6, 7, 8, 9]
        hidden.rename(path)


def test_a_planned_range_whose_files_are_gone_is_an_error(drop: Path) -> None:
    write_range(drop, 0, 4)
    last = write_range(drop, 5, 9)
    assert rows_of(reader(drop), {STREAM: 2}, {STREAM: 8}) == [2, 3, 4, 5, 6, 7]
    last.unlink()
    with pytest.raises(SparkError, match="The offsets 5 to 7 of"):
        reader(drop).partitions({STREAM: 2}, {STREAM: 8})
    assert rows_of(reader(drop, failOnDataLoss="false"), {STREAM: 2}, {STREAM: 8}) == [2, 3, 4]


def test_a_file_that_a_listing_overlooked_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, drop: Path
) -> None:
    write_range(drop, 0, 4)
    write_range(drop, 3600, 3601, metadata={EMPTY_BEFORE_KEY: b"3590"})
    one = reader(drop)
    listing, count = source_module.catalog, 0

    def while_it_is_listed(place: Any) -> Any:
        # The hour's directory has been listed when its last file comes, and the next hour's has not.
        nonlocal count
        count += 1
        found = listing(place)
        if count == 1:
            write_range(drop, 5, 9)
        return found

    monkeypatch.setattr(source_module, "catalog", while_it_is_listed)
    end = one.latestOffset({STREAM: 0}, everything())
    assert (count, end) == (2, {STREAM: 3602})
    assert sorted(rows_of(one, {STREAM: 0}, end)) == [*range(10), 3600, 3601]


def test_no_log_runs_ahead_of_the_others_by_hours(drop: Path) -> None:
    from pyspark.sql.streaming.datasource import ReadMaxFiles

    for hour in range(3):
        write_range(drop, hour * 3600, hour * 3600, metadata={EMPTY_BEFORE_KEY: b"3599"})
    for offset in (0, 1, 2):
        write_range(drop, offset, offset, node="edge-2")
    other = f"edge-2/{LOG}"
    one, position, steps = reader(drop), dict[str, int](), []
    while (position := one.latestOffset(position, ReadMaxFiles(2))) not in steps:
        steps.append(position)
    assert steps == [
        {STREAM: 1, other: 1},
        {STREAM: 1, other: 3},
        {STREAM: 7201, other: 3},
    ]


def test_what_comes_after_an_available_now_query_began_is_left_for_the_next(drop: Path) -> None:
    write_range(drop, 0, 4)
    one = reader(drop)
    one.prepareForTriggerAvailableNow()
    write_range(drop, 5, 9)
    write_range(drop, 0, 0, node="edge-2")
    end = one.latestOffset({}, everything())
    assert end == {STREAM: 5}
    assert one.latestOffset(end, everything()) == end
    assert one.reportLatestOffset() == {STREAM: 10, f"edge-2/{LOG}": 1}


def test_the_latest_offset_is_the_same_until_the_stream_has_begun(drop: Path) -> None:
    write_range(drop, 0, 4)
    one = reader(drop, startingOffsets="latest")
    assert one.initialOffset() == {STREAM: 5}
    write_range(drop, 5, 9)
    assert one.initialOffset() == {STREAM: 5}
    # The first batch writes down where the stream begins, and no more.
    assert one.latestOffset({STREAM: 5}, everything()) == {STREAM: 5}
    assert one.partitions({STREAM: 5}, {STREAM: 5}) == []
    assert one.latestOffset({STREAM: 5}, everything()) == {STREAM: 10}
    # Killed before that batch was done, it asks anew, and reads nothing twice.
    assert reader(drop, startingOffsets="latest").partitions({STREAM: 10}, {STREAM: 5}) == []


def test_older_versions_of_spark_give_no_start_and_no_limit(drop: Path) -> None:
    write_range(drop, 0, 4)
    assert reader(drop).latestOffset() == {STREAM: 5}
