"""`report`: the numbers of a day, and that the page holds them in well-formed charts and nothing from elsewhere."""

import json
import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from headrace.spark.jobs import JobError, charts, report
from headrace.spark.jobs.report import Gap
from tests.spark.jobs.drops import LOG, START, Message, messages, write_file

DAY = date(2026, 1, 31)


@pytest.fixture
def drop(tmp_path: Path) -> Path:
    made = tmp_path / "drop"
    sent = START.timestamp() - 0.02
    write_file(
        made, [Message(n, json.dumps({"ts": sent}).encode(), topic=f"t.{n % 20:02d}") for n in range(40)]
    )
    write_file(
        made,
        [
            Message(50 + n, b"x" * 2**n, START + timedelta(hours=2), "<b>&", "loud@1", "felix")
            for n in range(10)
        ],
    )
    write_file(made, messages(70, 79, ts=START + timedelta(hours=3)), empty_before=10)
    write_file(made, messages(80, 89, ts=START + timedelta(days=1)))  # the day after
    return made


@pytest.mark.needs("java")
def test_a_day_is_counted(spark: SparkSession, drop: Path) -> None:
    day = report.run(spark, str(drop), DAY)
    assert (day.messages, day.topics, day.sources, day.timed) == (60, 22, 2, 40)
    assert day.busiest == (datetime(2026, 1, 31, 7, 0, tzinfo=UTC), 40)
    assert day.latency == [20.0, 20.0, 20.0]
    assert {name: (values[7], values[9], values[10]) for name, values in day.by_protocol.items()} == {
        "blipmq": (40, 0, 10),
        "felix": (0, 10, 0),
    }
    assert sum(day.bytes_by_protocol["felix"]) == 1023
    assert len(day.by_topic) == report.TOPICS + 1
    assert list(day.by_topic)[:2] == ["<b>&", "site.temperature"]
    assert sum(day.by_topic["7 other topics"]) == 14
    assert sum(map(sum, day.by_topic.values())) == 60
    assert [day.latency_by_hour["p50"][hour] for hour in (7, 9)] == [20.0, None]
    assert day.talkers == [("key@10.0.0.1:5000", 50, day.bytes - 1023, 21), ("loud@1", 10, 1023, 1)]
    assert {bits: day.sizes[bits] for bits in (9, 10)} == {9: 1, 10: 1}
    assert sum(day.sizes.values()) == 60
    # Offsets 60 to 69 are empty, as the file after them says; nobody knows of 40 to 49.
    assert day.gaps == [Gap("edge-1", LOG, 40, 49)]
    assert [(one.first, one.last, one.rows, one.missing) for one in day.streams] == [(0, 79, 60, 10)]

    page = report.page(day, str(drop))
    assert "<b>&" not in page
    assert not re.search(r"(src|href)=|url\(|@import|<script", page)
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 6
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        assert root.get("role") == "img"
        assert root.get("aria-label")
    assert "10 offsets</span> between first and last are in no file" in page
    assert "Saturday, 31 January 2026" in page


@pytest.mark.needs("java")
def test_the_last_day_is_found_by_the_directories(spark: SparkSession, drop: Path, tmp_path: Path) -> None:
    assert report.last_day(spark, str(drop)) == date(2026, 2, 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(JobError, match="nothing in"):
        report.last_day(spark, str(tmp_path / "empty"))
    assert report.last_day(spark, str(tmp_path / "empty"), str(drop)) == date(2026, 2, 1)
    assert "No message" in report.page(report.run(spark, str(drop), date(2026, 3, 1)), str(drop))


@given(st.just(0.0) | st.floats(1e-6, 1e15))
def test_an_axis_has_few_round_steps_that_reach_the_largest_value(largest: float) -> None:
    steps = charts.steps(largest)
    assert steps[0] == 0
    assert steps[-1] >= largest * 0.999999
    assert 2 <= len(steps) <= 7


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (950, "950"), (999.9, "1k"), (1234, "1.23k"), (34_000_000, "34M"), (2.5e12, "2.5T")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert charts.short(value) == text


def test_sizes_and_times_have_units() -> None:
    assert [charts.size(value) for value in (0, 1023, 1024, 1536, 5 << 30)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "5 GiB",
    ]
    assert [charts.milliseconds(value) for value in (0.25, 15, 1200, 900_000)] == [
        "0.25 ms",
        "15 ms",
        "1.2 s",
        "15 min",
    ]
