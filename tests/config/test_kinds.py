"""Sizes, durations, filters and texts, as people write them."""

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.kinds import (
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    toml_string,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("10KB", 10_000),
        ("10KiB", 10_240),
        ("64MiB", 64 << 20),
        ("64mib", 64 << 20),
        ("64 MiB", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("1.1MB", 1_100_000),
        ("2TB", 2 * 10**12),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_are_read_in_both_families_of_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "MiB", "64K", "64 Mi B", "-1MiB", "1e6", "0.3B", "1.5", "1_000", "64MiBs"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"it is not|not one of the units"):
        parse_size(text)


@given(st.integers(0, 1 << 50))
@settings(deadline=None)
def test_written_size_reads_back_exactly(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 5.0),
        ("2.5", 2.5),
        ("250us", 0.00025),
        ("500ms", 0.5),
        ("1ms", 0.001),
        ("3ms", 0.003),
        ("5s", 5.0),
        ("2m", 120.0),
        ("1h", 3600.0),
        ("1.5 h", 5400.0),
        ("7d", 604_800.0),
    ],
)
def test_durations_are_read_exactly(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "nan", "inf", "-5s", "1_000", "5 minutes", "1h30m", "1e3"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"it is not|not one of the units"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.05, "50ms"), (5.0, "5s"), (120.0, "2m"), (3600.0, "1h"), (604_800.0, "7d"), (90.0, "90s")],
)
def test_durations_are_written_in_the_unit_a_person_would_choose(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.text())
@settings(deadline=None)
def test_any_text_survives_toml(text: str) -> None:
    assert tomllib.loads(f"key = {toml_string(text)}") == {"key": text}
