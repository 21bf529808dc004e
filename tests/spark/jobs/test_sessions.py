"""`sessions`: when sources were there, by window functions and by a stream that keeps state, with one result."""

import random
import shutil
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from headrace.spark.jobs import sessions
from headrace.spark.jobs.sessions import Presence, Sessions
from headrace.spark.jobs.table import read_table
from tests.spark.jobs.drops import START, Message, write_file

GAP = timedelta(minutes=5)

Row = tuple[str | None, int, int, int, int, float | None]


def plain(rows: DataFrame) -> list[Row]:
    begin = START.timestamp()
    return sorted(
        (
            (
                row.source,
                round(row.first.timestamp() - begin),
                round(row.last.timestamp() - begin),
                row.messages,
                row.gaps,
                row.longest_gap_s,
            )
            for row in rows.collect()
        ),
        key=str,
    )


def at(offset: int, second: int, source: str | None) -> Message:
    return Message(offset, b"", START + timedelta(seconds=second), source=source)


@given(st.lists(st.lists(st.integers(0, 200), min_size=1), min_size=1), st.integers(1, 20))
def test_spans_say_what_all_moments_say(batches: list[list[int]], gap: int) -> None:
    """Whatever the order in which messages come."""
    presence = Presence.since(sorted(batches[0])[0])
    for batch in batches:
        presence = Presence.from_text(presence.to_text())
        presence.add(sorted(batch), gap, late=10**9)
    moments = sorted(moment for batch in batches for moment in batch)
    silences = [after - before for before, after in pairwise(moments)]
    long = [silence for silence in silences if silence > gap]
    assert presence.row == {
        "first_us": moments[0],
        "last_us": moments[-1],
        "messages": len(moments),
        "gaps": len(long),
        "longest_us": max(long, default=None),
    }


def test_spans_that_are_long_over_are_forgotten_but_counted() -> None:
    presence = Presence.since(0)
    for moment in range(0, 100_000, 100):
        presence.add([moment], gap=50, late=1000)
    assert len(presence.spans) <= 12
    assert (presence.row["gaps"], presence.row["messages"], presence.row["longest_us"]) == (999, 1000, 100)
    presence.add([3], gap=50, late=1000)  # later than it may come: counted, and no more
    assert (presence.row["gaps"], presence.row["messages"]) == (999, 1001)


@pytest.mark.needs("java")
def test_a_batch_and_a_stream_have_the_same_result(spark: SparkSession, tmp_path: Path) -> None:
    drop, out = tmp_path / "drop", tmp_path / "out"
    choose = random.Random(7)
    offset = 0
    sources = ["a@1", "b@2", None]
    for number in range(4):
        # Files overlap in time, as those of several gateways do.
        seconds = sorted(choose.randrange(max(0, number * 600 - 900), number * 600 + 900) for _ in range(12))
        rows = [at(offset + n, second, choose.choice(sources)) for n, second in enumerate(seconds)]
        if number == 2:
            rows.append(at(offset + 12, 3599, "once@3"))
        write_file(drop, rows)
        offset += 20
    expected = plain(sessions.run(spark, str(drop), gap=GAP))
    assert {row[0] for row in expected} == {*sources, "once@3"}
    assert sum(row[4] for row in expected) > 3

    files = sorted(drop.rglob("*.parquet"))
    hidden = tmp_path / files[-1].name
    shutil.move(files[-1], hidden)
    assert Sessions(spark, str(drop), str(out), gap=GAP, max_files=2).wait() == 4
    before = plain(read_table(spark, str(out)))
    assert before == plain(sessions.run(spark, str(drop), gap=GAP)) != expected
    shutil.copy(hidden, files[-1])  # a new file, as far as the stream knows
    Sessions(spark, str(drop), str(out), gap=GAP).wait()
    assert plain(read_table(spark, str(out))) == expected
    # A lost checkpoint counts anew, and does not add up.
    shutil.rmtree(out / "_headrace/checkpoint")
    Sessions(spark, str(drop), str(out), gap=GAP).wait()
    assert plain(read_table(spark, str(out))) == expected
