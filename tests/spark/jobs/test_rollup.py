"""`rollup`: counts and latencies per topic and minute, the same as a batch and as a stream, with late rows apart."""

import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.spark.jobs import rollup
from headrace.spark.jobs.rollup import Rollup, read_late, read_rollup
from tests.spark.jobs.drops import START, Message, messages, write_file

pytestmark = pytest.mark.needs("java")

NOW = datetime(2026, 1, 31, 7, 0, 0, 250_000, tzinfo=UTC)
NOW_US = 1_769_842_800_250_000


def test_what_counts_as_the_senders_time(spark: SparkSession) -> None:
    texts: dict[str, int | None] = {
        "1769842800.25": NOW_US,
        "1769842800250": NOW_US,
        "1769842800250000": NOW_US,
        "1769842800250000000": NOW_US,
        "1.76984280025e9": NOW_US,
        "2026-01-31T07:00:00.250Z": NOW_US,
        "2026-01-31T07:00:00.250": NOW_US,
        "2026-01-31 08:00:00.250+01:00": NOW_US,
        "2026-01-31T05:00:00.250-0200": NOW_US,
        "2026-01-31T07:00Z": NOW_US - 250_000,
        "2026-01-31": NOW_US - 250_000 - 7 * 3600 * 1_000_000,
        "12": None,  # perhaps seconds since the device was switched on
        "-1769842800": None,
        "true": None,
        "": None,
        "yesterday": None,
        "2026-13-01T00:00:00Z": None,
        '{"a": 1}': None,
    }
    frame = spark.createDataFrame([(text,) for text in texts], "text string")
    found = frame.select("text", rollup.moment_us(F.col("text")).alias("us")).collect()
    assert {row.text: row.us for row in found} == texts


def timed(offset: int, late_ms: int, minute: int = 0, **fields: Any) -> Message:
    """A message with the sender's time, so long before the append."""
    at = START + timedelta(minutes=minute, seconds=offset % 60)
    sent = (at - timedelta(milliseconds=late_ms)).timestamp()
    return Message(offset, json.dumps({"n": offset, "ts": sent}).encode(), at, **fields)


def plain(rows: DataFrame) -> list[dict[str, Any]]:
    """Rows in order, with times as minutes since the start."""
    begin = int(START.timestamp())
    shown = rows.withColumn("minute", ((F.unix_seconds("minute") - begin) / 60).cast("int"))
    return [row.asDict() for row in shown.orderBy("minute", "topic").collect()]


def test_a_batch_counts_per_topic_and_minute(spark: SparkSession, tmp_path: Path) -> None:
    drop = tmp_path / "drop"
    write_file(
        drop,
        [
            *(timed(n, n + 1, topic="a", source=f"s{n % 3}") for n in range(50)),
            Message(50, b"\xff\xfe", START, "a", "s9"),
            Message(51, b'{"ts": 1}', START, "b", None),
            Message(52, b"x" * 10, START, "b", "s1", headers={"ts": str(START.timestamp() - 2)}),
            timed(53, -5, minute=2, topic="a", source="s1"),
        ],
    )
    rows = plain(rollup.run(spark, str(drop)))
    size = sum(len(timed(n, n + 1).payload) for n in range(50)) + 2
    assert [(row["minute"], row["topic"]) for row in rows] == [(0, "a"), (0, "b"), (2, "a")]
    assert rows[0] == {
        "minute": 0,
        "topic": "a",
        "messages": 51,
        "bytes": size,
        "sources": 4,
        "timed": 50,
        "p50_ms": 25.0,
        "p95_ms": 48.0,
        "p99_ms": 50.0,
    }
    assert (rows[1]["messages"], rows[1]["sources"], rows[1]["timed"], rows[1]["p50_ms"]) == (2, 1, 1, 2000.0)
    assert rows[2]["p99_ms"] == -5.0  # its clock is ahead
    only = rollup.run(spark, str(drop), since=START + timedelta(minutes=1), until=START + timedelta(hours=1))
    assert plain(only) == rows[2:]


def test_a_stream_writes_what_a_batch_does_and_counts_late_rows(spark: SparkSession, tmp_path: Path) -> None:
    drop, out = tmp_path / "drop", tmp_path / "out"
    delay = timedelta(minutes=2)

    def follow() -> rollup.Rolled:
        return Rollup(spark, str(drop), str(out), delay=delay, max_files=1).wait()

    write_file(drop, [timed(n, n, minute=n % 3, topic=f"t{n % 2}") for n in range(60)])
    assert follow() == rollup.Rolled(rows=60, minutes=0, late=0)
    # Still in time: the watermark is two minutes before the newest.
    write_file(drop, [timed(60 + n, n, minute=1, topic="t1", source="other") for n in range(5)])
    write_file(drop, [timed(70, 7, minute=5)])
    first = follow()
    assert (first.rows, first.minutes, first.late) == (6, 6, 0)
    late = [timed(71 + n, 1, minute=n, topic="t0") for n in range(2)]
    write_file(drop, late)
    # The stream begins anew: nothing is counted twice.
    shutil.rmtree(out / "_headrace/checkpoint")
    assert follow() == rollup.Rolled(rows=2, minutes=0, late=2)
    write_file(drop, [timed(80, 7, minute=30)])
    assert follow().minutes == 1

    (tmp_path / "known").mkdir()
    for path in drop.rglob("*.parquet"):
        if not path.name.endswith((f"{72:020d}.parquet", f"{80:020d}.parquet")):
            target = tmp_path / "known" / path.relative_to(drop)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    assert plain(read_rollup(spark, str(out))) == plain(rollup.run(spark, str(tmp_path / "known")))
    assert [(row["minute"], row["messages"]) for row in plain(read_late(spark, str(out)))] == [(0, 1), (1, 1)]
    kept = list((out / "_headrace/open").iterdir())
    assert len(kept) == 1  # of the one minute that is open


def test_a_rollup_that_ends_before_its_commit_is_done_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop, out = tmp_path / "drop", tmp_path / "out"
    write_file(drop, messages(0, 599))

    def end_here(name: str) -> None:
        if name == "announced":
            raise RuntimeError("ended")

    with monkeypatch.context() as patched:
        patched.setattr("headrace.spark.jobs.table.pass_point", end_here)
        with pytest.raises(Exception, match="ended"):
            Rollup(spark, str(drop), str(out), delay=timedelta(seconds=1)).wait()
    assert Rollup(spark, str(drop), str(out), delay=timedelta(seconds=1)).wait().minutes == 9
    assert plain(read_rollup(spark, str(out))) == plain(rollup.run(spark, str(drop)))[:9]
    assert len(list((out / "_headrace/open").iterdir())) == 1
