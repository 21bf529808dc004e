"""Compaction: what becomes one file, and that nobody ever misses a row or sees one twice, whatever happens."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.drop import parquet
from headrace.drop.catalog import catalog, hour_begin, select
from headrace.drop.compact import Compacted, compact
from headrace.drop.errors import DropError, DropLocked, DropOverlap
from headrace.drop.filesystems import place
from headrace.drop.prune import plan_prune, prune
from headrace.drop.schema import EMPTY_BEFORE_KEY, FILTERED_KEY, MISSING_KEY, VERSION_KEY
from headrace.drop.verify import verify
from tests.drop.files import HOUR, LATER, LOG, NEXT_HOUR, OTHER_LOG, expected, put, read, rows_of, table

ROOT = Path(__file__).parents[2]


@pytest.fixture
def drop(tmp_path: Path) -> Path:
    return tmp_path / "drop"


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "drop-compacted"


def run(drop: Path, to: Path, *, now: float = LATER, **options: int) -> Compacted:
    done = compact(place(drop), place(to), now=now, **options)  # type: ignore[arg-type]
    assert verify(place(drop), place(to)).problems == []
    return done


def ranges(where: Path) -> list[tuple[str, int, int]]:
    return [(one.directory[-2:], one.name.first, one.name.last) for one in catalog(place(where)).entries]


def seen(drop: Path, to: Path) -> list[tuple[str, str, int, bytes]]:
    return rows_of(select(place(drop), place(to)), place(drop), place(to))


def metadata(to: Path) -> dict[bytes, bytes]:
    (entry,) = catalog(place(to)).entries
    found = pq.read_metadata(to / entry.path).metadata
    return {key: value for key, value in found.items() if key.startswith(b"headrace.")}


def test_neighbours_of_an_hour_become_one_file(drop: Path, to: Path) -> None:
    for first in range(0, 500, 50):
        put(drop, first, first + 49)
    put(drop, 500, 549, hour=NEXT_HOUR)
    put(drop, 0, 9, node="gw-2")
    put(drop, 0, 9, log=OTHER_LOG)
    done = run(drop, to)
    assert ranges(to) == [("07", 0, 499), ("07", 0, 9), ("07", 0, 9), ("08", 500, 549)]
    assert not done.left
    assert done.bytes == sum(entry.size for entry in catalog(place(to)).entries)
    assert seen(drop, to) == sorted(
        expected(range(550)) + expected(range(10), "gw-2") + expected(range(10), log=OTHER_LOG)
    )
    chosen = select(place(drop), place(to))
    assert not chosen.drop
    assert len(chosen.compacted) == 4
    merged = read(place(to), chosen.compacted[0].path)
    assert merged.equals(table(range(500), dictionaries=False))


def test_compacted_file_is_written_as_the_sink_writes(
    drop: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.drop.compact.ROW_GROUP_ROWS", 128)
    for first in range(0, 500, 50):
        put(drop, first, first + 49)
    run(drop, to)
    file = pq.read_metadata(to / catalog(place(to)).entries[0].path)
    assert [file.row_group(number).num_rows for number in range(file.num_row_groups)] == [128, 128, 128, 116]
    assert {file.row_group(0).column(number).compression for number in range(file.num_columns)} == {"ZSTD"}
    assert file.row_group(0).column(12).statistics is None
    assert parquet.ROW_GROUP_ROWS == 131_072


def test_row_group_ends_where_its_data_are_large(
    drop: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.drop.compact.ROW_GROUP_BYTES", 100_000)
    for first in (0, 10, 20):
        put(drop, first, first + 9, payload=[bytes(40_000)] * 10)
    run(drop, to)
    file = pq.read_metadata(to / catalog(place(to)).entries[0].path)
    assert file.num_row_groups == 3


def test_files_are_of_about_the_target_size_and_of_whole_sources(drop: Path, to: Path) -> None:
    sizes = [put(drop, first, first + 99).stat().st_size for first in range(0, 1000, 100)]
    run(drop, to, target_bytes=3 * max(sizes))
    assert ranges(to)[0] == ("07", 0, 299)
    assert len(ranges(to)) == 4
    assert seen(drop, to) == expected(range(1000))


def test_source_that_is_large_by_itself_is_alone(drop: Path, to: Path) -> None:
    put(drop, 0, 9)
    put(drop, 10, 999)
    put(drop, 1000, 1009)
    run(drop, to, target_bytes=1)
    assert ranges(to) == [("07", 0, 9), ("07", 10, 999), ("07", 1000, 1009)]


def test_hour_that_may_still_grow_is_left(drop: Path, to: Path) -> None:
    put(drop, 0, 9)
    put(drop, 10, 19, hour=NEXT_HOUR)
    end = hour_begin(NEXT_HOUR) / 1e6  # of the first hour
    run(drop, to, now=end + 599, closed_after=600)
    assert ranges(to) == []
    run(drop, to, now=end + 600, closed_after=600)
    assert ranges(to) == [("07", 0, 9)]


def test_late_files_of_an_hour_become_further_files(drop: Path, to: Path) -> None:
    put(drop, 0, 9)
    put(drop, 10, 19)
    run(drop, to)
    before = (to / catalog(place(to)).entries[0].path).read_bytes()
    put(drop, 20, 29)
    put(drop, 30, 39)
    assert len(run(drop, to).groups) == 1
    assert run(drop, to).groups == []
    assert ranges(to) == [("07", 0, 19), ("07", 20, 39)]
    assert (to / catalog(place(to)).entries[0].path).read_bytes() == before
    assert seen(drop, to) == expected(range(40))


def test_gap_is_not_spanned_because_its_file_may_come_yet(drop: Path, to: Path) -> None:
    put(drop, 0, 9)
    put(drop, 20, 29)
    run(drop, to)
    put(drop, 10, 19)
    assert seen(drop, to) == expected(range(30))
    run(drop, to)
    assert ranges(to) == [("07", 0, 9), ("07", 10, 19), ("07", 20, 29)]
    assert seen(drop, to) == expected(range(30))


def test_gap_that_is_explained_is_spanned_and_metadata_are_carried_over(drop: Path, to: Path) -> None:
    put(drop, 100, 109, empty_before=30, offsets=range(100, 108), missing=[(108, 109)])
    put(drop, 120, 129, empty_before=10, offsets=range(121, 130), missing=[(120, 120)])
    run(drop, to)
    assert metadata(to) == {
        VERSION_KEY: b"1",
        EMPTY_BEFORE_KEY: b"30",
        MISSING_KEY: b"[[108, 109], [120, 120]]",
        FILTERED_KEY: b"1",
    }
    assert verify(place(drop), place(to)).whole


def test_filter_of_one_source_is_that_of_all(drop: Path, to: Path) -> None:
    put(drop, 0, 9)
    put(drop, 10, 19, offsets=[12], filtered=True)
    run(drop, to)
    assert metadata(to) == {VERSION_KEY: b"1", FILTERED_KEY: b"1"}


def test_plain_sources_have_nothing_to_carry_over(drop: Path, to: Path) -> None:
    put(drop, 0, 9)
    put(drop, 10, 19)
    run(drop, to)
    assert metadata(to) == {VERSION_KEY: b"1"}


def test_sources_with_other_columns_are_not_merged(drop: Path, to: Path) -> None:
    put(drop, 0, 9)
    put(drop, 10, 19, payload_json=True)
    put(drop, 20, 29, payload_json=True)
    put(drop, 30, 39, leave_out=("headers",))
    run(drop, to)
    assert ranges(to) == [("07", 0, 9), ("07", 10, 29), ("07", 30, 39)]
    assert "payload_json" in read(place(to), catalog(place(to)).entries[1].path).schema.names


@pytest.mark.parametrize("dictionaries", [(True, False), (False, True)])
def test_sources_written_with_and_without_dictionaries_are_merged(
    drop: Path, to: Path, dictionaries: tuple[bool, bool]
) -> None:
    for number, how in enumerate(dictionaries):
        put(drop, number * 10, number * 10 + 9, dictionaries=how)
    run(drop, to)
    assert ranges(to) == [("07", 0, 19)]


def test_dry_run_makes_nothing(drop: Path, to: Path) -> None:
    put(drop, 0, 9)
    put(drop, 10, 19)
    done = compact(place(drop), place(to), now=LATER, dry_run=True)
    assert [group.path for group in done.groups] == [f"{HOUR}/gw-1-{LOG}-{0:020d}-{19:020d}.parquet"]
    assert not to.exists()


# --- what does not hold -------------------------------------------------------------------------------------


def test_damaged_source_gets_no_new_checksums(drop: Path, to: Path) -> None:
    for first in range(0, 50, 10):
        put(drop, first, first + 9)
    damaged = drop / catalog(place(drop)).entries[2].path
    chunk = pq.read_metadata(damaged).row_group(0).column(12)
    data = bytearray(damaged.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size - 3] ^= 1
    damaged.write_bytes(data)
    done = compact(place(drop), place(to), now=LATER)
    assert [left.file for left in done.left] == [str(damaged)]
    assert "CRC" in done.left[0].reason
    assert ranges(to) == [("07", 0, 19), ("07", 30, 49)]
    assert [one.name.first for one in select(place(drop), place(to)).drop] == [20]


def test_source_that_is_not_what_its_name_says_is_left(drop: Path, to: Path) -> None:
    put(drop, 0, 9)
    unsorted = put(drop, 10, 19, offsets=[11, 10, *range(12, 20)])
    torn = put(drop, 20, 29)
    torn.write_bytes(torn.read_bytes()[:-1])
    newer = put(drop, 30, 39, version=2)
    done = compact(place(drop), place(to), now=LATER)
    assert {left.file for left in done.left} == {str(unsorted), str(torn), str(newer)}
    assert ranges(to) == [("07", 0, 9)]


def test_sources_that_overlap_are_left(drop: Path, to: Path) -> None:
    put(drop, 0, 9)
    put(drop, 5, 14)
    put(drop, 15, 19)
    done = compact(place(drop), place(to), now=LATER)
    assert len(done.left) == 2
    assert ranges(to) == [("07", 15, 19)]


def test_source_that_a_compacted_file_covers_in_part_is_left(drop: Path, to: Path) -> None:
    put(drop, 0, 9)
    put(drop, 10, 19)
    put(to, 0, 14)
    done = compact(place(drop), place(to), now=LATER)
    assert [left.reason for left in done.left] == ["a compacted file covers a part of it"]
    assert ranges(to) == [("07", 0, 14)]


def test_source_that_goes_away_meanwhile_is_passed_over(
    drop: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [put(drop, first, first + 9) for first in (0, 10, 20)]
    here = place(drop)
    open_file, opens = here.open, 0

    def open_late(path: str) -> pa.NativeFile:
        nonlocal opens
        opens += path.endswith(files[1].name)
        if opens == 2:  # the first time was for the footer
            files[1].unlink(missing_ok=True)
        return open_file(path)

    monkeypatch.setattr(here, "open", open_late)
    done = compact(here, place(to), now=LATER)
    assert not done.left
    assert ranges(to) == [("07", 0, 9), ("07", 20, 29)]


def test_directory_that_cannot_be_written_is_said_so(
    drop: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(drop, 0, 9)

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(DropError, match=r"cannot be written: .*No space left on device"):
        compact(place(drop), place(to), now=LATER)
    assert [path.name for path in (to / "_staging").iterdir()] == ["compact.lock"]
    assert ranges(to) == []


def test_only_one_compacts_at_a_time(drop: Path, to: Path) -> None:
    put(drop, 0, 9)
    with place(to).lock("compact"), pytest.raises(DropLocked, match="another compact runs in"):
        compact(place(drop), place(to), now=LATER)
    assert len(run(drop, to).groups) == 1


# --- whatever happens ---------------------------------------------------------------------------------------


def test_killed_anywhere_it_loses_and_doubles_nothing(drop: Path, to: Path) -> None:
    sizes = [put(drop, first, first + 49).stat().st_size for first in range(0, 200, 50)]
    put(drop, 200, 249, hour=NEXT_HOUR)
    target = 2 * max(sizes)  # two files each
    program = [sys.executable, "-m", "tests.drop.killed", str(drop), str(to), str(target)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout)
    names = {point["point"] for point in points}
    assert {
        f"{when} {what}" for when in ("before", "after") for what in ("rename", "fsync", "utime", "mkdir")
    } <= names
    assert {"before write_table", "after close"} <= names
    files = [len(point["files"]) for point in points]
    assert files == sorted(files)  # a later point never has less
    assert files[0] == 0
    last = points[-1]["then"]
    assert files[-1] == len(last) == 3
    # Wherever it was killed, the next one came to the same files.
    assert all(point["then"] == last for point in points)


def test_readers_see_every_row_once_while_files_are_compacted_and_removed(drop: Path, to: Path) -> None:
    for first in range(0, 600, 20):
        put(drop, first, first + 19, hour=HOUR if first < 300 else NEXT_HOUR)
    stop = threading.Event()
    wrong: list[object] = []
    reads = threading.Semaphore(0)

    def read_on() -> None:
        while not stop.is_set():
            try:
                found = seen(drop, to)
            except FileNotFoundError:  # listed, and pruned before it was opened, as there is no grace here
                continue
            except Exception as error:
                wrong.append(error)
                found = expected(range(600))
            if found != expected(range(600)):
                wrong.append([row[2] for row in found])
            reads.release()

    readers = [threading.Thread(target=read_on) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for more in range(6):
            assert reads.acquire(timeout=60)
            hours = hour_begin(HOUR) / 1e6 + 3600 * (1 + more // 3)
            compact(place(drop), place(to), now=hours, closed_after=0, target_bytes=15_000)
            assert reads.acquire(timeout=60)
            prune(plan_prune(place(drop), compacted=place(to), grace=-3600))
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert not wrong, wrong[0]
    assert len(catalog(place(drop)).entries) == 1
    assert verify(place(drop), place(to)).whole


def test_commit_makes_its_directory_again_if_somebody_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = place(tmp_path / "to")
    rename, removed = os.rename, 0

    def late(source: str, target: str) -> None:
        nonlocal removed
        if removed < 2:
            removed += 1
            assert here.remove_empty(HOUR)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    with here.stage("x") as staged:
        staged.write_bytes(b"data")
        os.utime(staged, (1, 1))
        here.commit(staged, f"{HOUR}/x")
    assert removed == 2
    assert (tmp_path / "to" / HOUR / "x").read_bytes() == b"data"
    assert (tmp_path / "to" / HOUR / "x").stat().st_mtime > LATER - 86_400 * 365


def test_commit_replaces_nothing(tmp_path: Path) -> None:
    here = place(tmp_path / "to")
    with here.stage("x") as staged:
        staged.write_bytes(b"one")
        here.commit(staged, f"{HOUR}/x")
    with here.stage("x") as staged:
        staged.write_bytes(b"two")
        with pytest.raises(DropError, match="is there already"):
            here.commit(staged, f"{HOUR}/x")
    assert (tmp_path / "to" / HOUR / "x").read_bytes() == b"one"


def test_overlapping_compacted_files_are_refused_to_readers(drop: Path, to: Path) -> None:
    put(drop, 0, 9)
    put(to, 0, 9)
    put(to, 5, 14)
    with pytest.raises(DropOverlap):
        select(place(drop), place(to))
