"""Which files there are, and which of them have each row once."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.drop import FileName
from headrace.drop.catalog import Entry, catalog, choose, hour_begin, overlaps, select
from headrace.drop.errors import DropError, DropOverlap
from headrace.drop.filesystems import place
from tests.drop.files import HOUR, LOG, NEXT_HOUR, OTHER_LOG, expected, put, rows_of


def entry(first: int, last: int, *, node: str = "gw-1", log: str = LOG, directory: str = HOUR) -> Entry:
    return Entry(directory, FileName(node, log, first, last), 1, 0.0)


def test_hour_of_a_directory_is_in_utc() -> None:
    assert hour_begin("date=1970-01-02/hour=03") == 27 * 3_600_000_000
    with pytest.raises(ValueError, match="does not match"):
        hour_begin("date=2026-13-01/hour=00")


def test_files_are_listed_by_hour_and_offset_and_strangers_apart(tmp_path: Path) -> None:
    later = put(tmp_path, 5, 9, hour=NEXT_HOUR)
    first = put(tmp_path, 0, 4)
    for stranger in ("notes.txt", f"{HOUR}/part-0.parquet", "date=2026-02-30/hour=07/" + first.name):
        (tmp_path / stranger).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / stranger).write_bytes(b"")
    for hidden in ("_staging/x.parquet", f"{HOUR}/.crc", f"{HOUR}/_temporary/0/{first.name}", "_SUCCESS"):
        (tmp_path / hidden).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / hidden).write_bytes(b"")
    found = catalog(place(tmp_path))
    assert [one.path for one in found.entries] == [f"{HOUR}/{first.name}", f"{NEXT_HOUR}/{later.name}"]
    assert found.entries[0].size == first.stat().st_size
    assert found.entries[0].mtime == first.stat().st_mtime
    assert sorted(found.strangers) == sorted(
        ["notes.txt", f"{HOUR}/part-0.parquet", "date=2026-02-30/hour=07/" + first.name]
    )


def test_directory_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert catalog(place(tmp_path / "nothing")) == ([], [])
    assert not place(tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    ("text", "compacted"),
    [
        ("/data/drop", "/data/drop-compacted"),
        ("/data/drop/", "/data/drop-compacted"),
        ("s3://bucket/a/drop?region=eu-west-1", "s3://bucket/a/drop-compacted?region=eu-west-1"),
        ("/odd?name", "/odd?name-compacted"),
    ],
)
def test_compacted_directory_is_beside_the_drop(text: str, compacted: str) -> None:
    assert place(text).beside("-compacted").text == compacted


def test_place_of_a_file_uri_is_local(tmp_path: Path) -> None:
    put(tmp_path / "a b", 0, 4)
    assert len(catalog(place(f"file://{tmp_path}/a%20b")).entries) == 1


def test_unknown_filesystem_is_said_so() -> None:
    with pytest.raises(DropError, match="foo://x/y cannot be reached"):
        place("foo://x/y")


def test_covered_files_are_left_out() -> None:
    drop = [entry(0, 9), entry(10, 19), entry(20, 29), entry(0, 9, node="gw-2"), entry(0, 9, log=OTHER_LOG)]
    compacted = [entry(0, 19)]
    chosen = choose(drop, compacted)
    assert chosen.compacted == compacted
    assert chosen.drop == sorted(drop[2:])


def test_files_that_overlap_are_refused() -> None:
    for drop, compacted in (
        ([entry(0, 9), entry(9, 19)], []),
        ([entry(0, 9), entry(0, 9, directory=NEXT_HOUR)], []),
        ([], [entry(0, 9), entry(5, 19)]),
        ([entry(0, 9)], [entry(5, 19)]),
        ([entry(0, 30)], [entry(5, 19)]),
    ):
        with pytest.raises(DropOverlap, match="cover the same offsets"):
            choose(drop, compacted)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8))
def test_overlaps_are_found_wherever_two_files_share_an_offset(ranges: list[tuple[int, int]]) -> None:
    entries = [entry(first, first + more) for first, more in ranges]
    counts = [sum(one.name.first <= offset <= one.name.last for one in entries) for offset in range(40)]
    assert bool(list(overlaps(entries))) == (max(counts) > 1)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=4),
    st.sets(st.integers(0, 12)),
)
def test_every_offset_is_chosen_once(
    sizes: list[int], merged: list[tuple[int, int]], pruned: set[int]
) -> None:
    """Whatever was compacted, and whatever of that was removed since."""
    files, at = [], 0
    for size in sizes:
        files.append(entry(at, at + size - 1))
        at += size
    compacted, taken = [], set()
    for begin, count in merged:
        run = range(begin, min(begin + count, len(files)))
        if run and not taken & set(run):
            taken |= set(run)
            compacted.append(entry(files[run[0]].name.first, files[run[-1]].name.last))
    drop = [one for number, one in enumerate(files) if number not in taken or number not in pruned]
    chosen = choose(drop, compacted)
    seen = sorted(
        offset
        for one in (*chosen.drop, *chosen.compacted)
        for offset in range(one.name.first, one.name.last + 1)
    )
    assert seen == list(range(at))


def test_select_reads_both_directories(tmp_path: Path) -> None:
    drop, compacted = place(tmp_path / "drop"), place(tmp_path / "drop-compacted")
    put(tmp_path / "drop", 0, 9)
    put(tmp_path / "drop", 10, 19)
    put(tmp_path / "drop-compacted", 0, 9)
    chosen = select(drop, compacted)
    assert [one.name.first for one in chosen.drop] == [10]
    assert rows_of(chosen, drop, compacted) == expected(range(20))
    assert rows_of(select(drop, None), drop) == expected(range(20))
