"""`read_drop` and `stream_drop`: every row once, typed, whatever else lies in the directory."""

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from headrace.drop import COLUMNS, arrow_schema
from headrace.drop.errors import DropOverlap
from headrace.spark import SparkError, drop_schema, read_drop, spark_schema, stream_drop
from headrace.spark.schema import arrow_fields
from tests.spark.files import BEGIN, LOG, OTHER_LOG, message, write_file, write_range

pytestmark = pytest.mark.needs("java")


def offsets(rows: DataFrame) -> list[int]:
    return sorted(row.offset for row in rows.select("offset").collect())


def test_schema_has_the_columns_of_the_drop_format() -> None:
    assert spark_schema().names == arrow_schema().names
    assert spark_schema(payload_json=True).names == arrow_schema(payload_json=True).names
    assert {one.name: one.dataType.simpleString() for one in spark_schema(payload_json=True)} == {
        "node": "string",
        "log": "string",
        "offset": "bigint",
        "ts": "timestamp",
        "protocol": "string",
        "topic": "string",
        "kind": "int",
        "source": "string",
        "correlation": "bigint",
        "headers": "map<string,string>",
        "part_sizes": "array<int>",
        "payload": "binary",
        "payload_json": "string",
    }
    assert drop_schema().names == [*spark_schema().names, "date", "hour"]


def test_arrow_schema_of_a_spark_schema_is_the_one_that_spark_expects() -> None:
    schema = T.StructType([*drop_schema(payload_json=True), T.StructField("price", T.DecimalType(5, 2))])
    assert arrow_fields(schema).equals(to_arrow_schema(schema, timezone="UTC"))


def test_rows_come_back_as_they_were_written(spark: SparkSession, drop: Path) -> None:
    written = [
        message(0, payload=b"\x00\xff", headers=[("a", "b"), ("c", "d")], part_sizes=[1, 1], correlation=-1),
        message(1, source=None, headers=None, topic="späte.züge", ts=BEGIN + timedelta(microseconds=1)),
    ]
    write_file(drop, written)
    rows = read_drop(spark, str(drop))
    assert rows.schema == drop_schema()
    found = [row.asDict() for row in rows.orderBy("offset").collect()]
    for row, expected in zip(found, written, strict=True):
        assert (row.pop("date"), row.pop("hour")) == (date(2026, 1, 31), 7)
        row["ts"] = row["ts"].astimezone(UTC)
        row["payload"] = bytes(row["payload"])
        headers = expected["headers"]
        assert row == {**expected, "headers": headers if headers is None else dict(headers)}


def test_columns_that_a_file_does_not_have_are_null(spark: SparkSession, drop: Path) -> None:
    write_range(drop, 0, 0, leave_out=["payload", "headers", "part_sizes", "correlation"])
    write_file(drop, [message(1, payload_json='{"n": 1}')], payload_json=True)
    rows = read_drop(spark, str(drop), payload_json=True).orderBy("offset").collect()
    assert [(row.payload, row.correlation, row.payload_json) for row in rows] == [
        (None, None, None),
        (bytearray(b'{"n": 1}'), 1, '{"n": 1}'),
    ]


def test_only_files_with_a_name_of_the_drop_are_read(spark: SparkSession, drop: Path) -> None:
    path = write_range(drop, 0, 1)
    name = path.name
    for stranger in (
        f"_staging/{name}",
        f"date=2026-01-31/hour=07/_{name}",
        "date=2026-01-31/hour=07/other.parquet",
        f"date=2026-01-31/hour=07/{name}.tmp",
        f"date=2026-01-31/{name}",
        f"date=2026-01-31/hour=x/{name}",
        f"elsewhere/hour=07/{name}",
        name,
    ):
        target = drop / stranger
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (drop / "README.txt").write_text("hello")
    assert offsets(read_drop(spark, str(drop))) == [0, 1]


def test_the_name_of_a_drop_is_no_pattern(spark: SparkSession, tmp_path: Path) -> None:
    write_range(tmp_path / "a*[1] b", 0, 0)
    write_range(tmp_path / "ab1 b", 1, 1)
    assert offsets(read_drop(spark, str(tmp_path / "a*[1] b"))) == [0]


def test_an_empty_drop_has_no_rows_and_a_missing_one_is_an_error(spark: SparkSession, drop: Path) -> None:
    empty = read_drop(spark, str(drop))
    assert (empty.schema, empty.count()) == (drop_schema(), 0)
    (drop / "_staging").mkdir()
    (drop / "date=2026-01-31" / "hour=07").mkdir(parents=True)
    assert read_drop(spark, str(drop)).count() == 0
    for read in (read_drop, stream_drop):
        with pytest.raises(SparkError, match=r"There is no drop directory .*/nowhere"):
            read(spark, str(drop / "nowhere"))


@pytest.mark.parametrize(
    ("since", "until", "expected"),
    [
        (BEGIN + timedelta(hours=1), None, [3600, 7200, 86400]),
        (None, BEGIN + timedelta(hours=1), [0, 1]),
        (BEGIN + timedelta(seconds=1), BEGIN + timedelta(hours=2), [1, 3600]),
        (datetime(2026, 1, 31, 9), None, [7200, 86400]),
        (datetime(2026, 1, 31, 10, tzinfo=timezone(timedelta(hours=1))), datetime(2026, 2, 1), [7200]),
        (datetime(2026, 2, 1), None, [86400]),
    ],
)
def test_since_and_until_select_rows(
    spark: SparkSession, drop: Path, since: datetime | None, until: datetime | None, expected: list[int]
) -> None:
    for offset in (0, 1, 3600, 7200, 86400):
        write_range(drop, offset, offset)
    assert offsets(read_drop(spark, str(drop), since=since, until=until)) == expected


def test_since_and_until_leave_directories_out(spark: SparkSession, drop: Path) -> None:
    write_range(drop, 0, 0)
    write_range(drop, 3600, 3600)
    # No row can be read from these, so that no task opens them is the only way to an answer.
    for bad in (7200, 86400):
        write_range(drop, bad, bad).write_bytes(b"no Parquet")
    rows = read_drop(spark, str(drop), since=BEGIN, until=BEGIN + timedelta(hours=1, seconds=1))
    assert offsets(rows) == [0, 3600]
    with pytest.raises(SparkError, match="must be before until"):
        read_drop(spark, str(drop), since=BEGIN, until=BEGIN)


def test_compacted_files_stand_for_their_originals(spark: SparkSession, drop: Path, tmp_path: Path) -> None:
    compacted = tmp_path / "drop-compacted"
    for first in (0, 10, 20, 30):
        write_range(drop, first, first + 9)
    write_range(drop, 0, 9, node="edge-2")
    compacted.mkdir()

    def both() -> list[tuple[str, int]]:
        rows = read_drop(spark, str(drop), compacted=str(compacted))
        return sorted((row.node, row.offset) for row in rows.collect())

    every = [*(("edge-1", offset) for offset in range(40)), *(("edge-2", offset) for offset in range(10))]
    assert both() == every
    write_range(compacted, 10, 29)
    assert both() == every
    # An original that is damaged is not looked at.
    for path in drop.rglob(f"*-{10:020}-*.parquet"):
        path.write_bytes(b"gone")
    assert both() == every
    for path in drop.rglob(f"*-{20:020}-*.parquet"):
        path.unlink()
    assert both() == every


def test_a_compacted_file_that_comes_after_the_call_changes_nothing(
    spark: SparkSession, drop: Path, tmp_path: Path
) -> None:
    compacted = tmp_path / "drop-compacted"
    write_range(drop, 0, 9)
    write_range(drop, 10, 19)
    write_range(compacted, 0, 9)
    rows = read_drop(spark, str(drop), compacted=str(compacted))
    write_range(compacted, 10, 19)
    assert offsets(rows) == list(range(20))


def test_files_that_cover_an_offset_twice_are_refused(
    spark: SparkSession, drop: Path, tmp_path: Path
) -> None:
    write_range(drop, 0, 9)
    write_range(tmp_path / "drop-compacted", 5, 14)
    with pytest.raises(DropOverlap, match="cover the same offsets"):
        read_drop(spark, str(drop), compacted=str(tmp_path / "drop-compacted"))


def stream_into(
    spark: SparkSession, tmp_path: Path, make: Callable[[], DataFrame]
) -> Callable[[], list[dict[str, Any]]]:
    """What runs the stream until all is read that is there, and gives all rows of all runs."""

    def run() -> list[dict[str, Any]]:
        query = (
            make()
            .writeStream.format("parquet")
            .option("path", str(tmp_path / "out"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return [row.asDict() for row in spark.read.parquet(str(tmp_path / "out")).orderBy("offset").collect()]

    return run


def test_a_stream_reads_every_file_once_across_restarts(
    spark: SparkSession, drop: Path, tmp_path: Path
) -> None:
    run = stream_into(spark, tmp_path, lambda: stream_drop(spark, str(drop), max_files_per_trigger=1))
    for first in (0, 5):
        write_range(drop, first, first + 4)
    (drop / "_staging" / "x.parquet").write_bytes(b"half")
    (drop / "notes.txt").write_text("hello")
    assert [row["offset"] for row in run()] == list(range(10))
    write_range(drop, 3600, 3601)
    write_range(drop, 0, 1, node="edge-2", log=OTHER_LOG)
    rows = run()
    assert sorted((row["node"], row["offset"]) for row in rows) == [
        *(("edge-1", offset) for offset in (*range(10), 3600, 3601)),
        *(("edge-2", offset) for offset in range(2)),
    ]
    assert {(row["date"], row["hour"]) for row in rows} == {(date(2026, 1, 31), 7), (date(2026, 1, 31), 8)}
    assert set(rows[0]) == {*(one.name for one in COLUMNS), "date", "hour"}


def test_a_stream_may_begin_before_the_first_file(spark: SparkSession, drop: Path, tmp_path: Path) -> None:
    rows = stream_drop(spark, str(drop), max_files_per_trigger=None)
    assert (rows.isStreaming, rows.schema) == (True, drop_schema())
    write_range(drop, 0, 2)
    run = stream_into(spark, tmp_path, lambda: rows)
    assert [row["offset"] for row in run()] == [0, 1, 2]


def test_a_stream_archives_what_it_has_read(spark: SparkSession, drop: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    run = stream_into(
        spark,
        tmp_path,
        lambda: stream_drop(spark, str(drop), clean_source="archive", archive_dir=str(archive)),
    )
    first = write_range(drop, 0, 4)
    run()
    write_range(drop, 5, 9)
    run()
    write_range(drop, 10, 14)
    assert [row["offset"] for row in run()] == list(range(15))
    assert not first.exists()
    assert [path.name for path in archive.rglob(first.name)] == [first.name]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"clean_source": "archive"}, "needs archive_dir"),
        ({"clean_source": "archive", "archive_dir": "{drop}/done"}, "must not contain each other"),
        ({"clean_source": "archive", "archive_dir": "file://{drop}/done"}, "must not contain each other"),
        ({"clean_source": "archive", "archive_dir": "{drop}/x/.."}, "must not contain each other"),
        ({"clean_source": "archive", "archive_dir": "/"}, "must not contain each other"),
        ({"clean_source": "delete", "archive_dir": "/x"}, "deletes files"),
        ({"archive_dir": "/x"}, "only with clean_source"),
        ({"clean_source": "burn"}, '"archive", "delete" or None'),
        ({"max_files_per_trigger": 0}, "at least 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    spark: SparkSession, drop: Path, options: dict[str, Any], text: str
) -> None:
    options = {
        key: value.format(drop=drop) if isinstance(value, str) else value for key, value in options.items()
    }
    with pytest.raises(SparkError, match=text):
        stream_drop(spark, str(drop), **options)


def test_an_archive_beside_the_drop_is_accepted(spark: SparkSession, drop: Path) -> None:
    rows = stream_drop(spark, str(drop), clean_source="archive", archive_dir=f"{drop}-archive")
    assert rows.isStreaming


def test_options_of_sparks_own_are_passed_on(spark: SparkSession, drop: Path, tmp_path: Path) -> None:
    write_range(drop, 0, 1)
    write_range(drop, 2, 3)
    rows = stream_drop(spark, str(drop), options={"maxBytesPerTrigger": "1000000"})
    assert [row["offset"] for row in stream_into(spark, tmp_path, lambda: rows)()] == [0, 1, 2, 3]
    assert LOG in {row.log for row in read_drop(spark, str(drop)).collect()}
