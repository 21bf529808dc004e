"""What pruning removes, and what it never does."""

import fcntl
import os
from pathlib import Path

import pytest

from headrace.drop.catalog import hour_begin
from headrace.drop.filesystems import place
from headrace.drop.prune import Plan, plan_prune, prune
from tests.drop.files import HOUR, LATER, NEXT_HOUR, OTHER_LOG, put

END = hour_begin(HOUR) / 1e6 + 3600  # of the first hour


@pytest.fixture
def drop(tmp_path: Path) -> Path:
    return tmp_path / "drop"


@pytest.fixture
def compacted(tmp_path: Path) -> Path:
    return tmp_path / "drop-compacted"


def ranges(plan: Plan) -> list[tuple[int, int]]:
    return [(entry.name.first, entry.name.last) for entry in plan.entries]


def test_old_hours_go_when_all_of_their_rows_are_too_old(drop: Path) -> None:
    put(drop, 0, 9)
    put(drop, 10, 19)
    put(drop, 20, 29, hour=NEXT_HOUR)
    put(drop, 30, 39, hour=NEXT_HOUR)
    here = place(drop)
    assert ranges(plan_prune(here, older_than=100, now=END + 99)) == []
    assert ranges(plan_prune(here, older_than=100, now=END + 100)) == [(0, 9), (10, 19)]
    assert ranges(plan_prune(here, older_than=100, now=END + 3700)) == [(0, 9), (10, 19), (20, 29)]


def test_newest_file_of_each_node_and_log_stays(drop: Path) -> None:
    put(drop, 0, 9)
    put(drop, 10, 19)
    put(drop, 0, 9, log=OTHER_LOG)
    put(drop, 0, 9, node="gw-2")
    put(drop, 5, 9, node="gw-3")
    put(drop, 10, 19, node="gw-3", hour=NEXT_HOUR)
    plan = plan_prune(place(drop), older_than=0, keep_bytes=0, now=LATER)
    assert [(one.name.node, one.name.first) for one in plan.entries] == [("gw-1", 0), ("gw-3", 5)]
    plan = plan_prune(place(drop), older_than=0, keep_newest=False, now=LATER)
    assert len(plan.entries) == 6


def test_oldest_hours_go_until_there_are_few_enough_bytes(drop: Path) -> None:
    files = [put(drop, first, first + 9) for first in (0, 10)]
    files += [put(drop, first, first + 9, hour=NEXT_HOUR) for first in (20, 30, 40)]
    sizes = [file.stat().st_size for file in files]
    here = place(drop)
    assert ranges(plan_prune(here, keep_bytes=sum(sizes))) == []
    assert ranges(plan_prune(here, keep_bytes=sum(sizes) - 1)) == [(0, 9)]
    assert ranges(plan_prune(here, keep_bytes=sum(sizes[1:]) - 1)) == [(0, 9), (10, 19)]
    assert ranges(plan_prune(here, keep_bytes=sum(sizes[3:]))) == [(0, 9), (10, 19), (20, 29)]
    # What goes by age counts.
    plan = plan_prune(here, older_than=0, keep_bytes=sum(sizes[2:]), now=END)
    assert ranges(plan) == [(0, 9), (10, 19)]


def test_only_what_an_older_compacted_file_covers_goes(drop: Path, compacted: Path) -> None:
    for first in (0, 10, 20, 30, 40):
        put(drop, first, first + 9)
    old, young = put(compacted, 0, 19), put(compacted, 20, 29)
    os.utime(old, (LATER - 3600, LATER - 3600))
    os.utime(young, (LATER - 3599, LATER - 3599))

    def planned(**rules: float) -> list[tuple[int, int]]:
        plan = plan_prune(place(drop), compacted=place(compacted), now=LATER, **rules)  # type: ignore[arg-type]
        assert not plan.kept
        return ranges(plan)

    assert planned() == [(0, 9), (10, 19)]
    assert planned(grace=0) == [(0, 9), (10, 19), (20, 29)]
    assert planned(older_than=0) == [(0, 9), (10, 19)]
    assert planned(older_than=10 * 86_400) == []
    assert planned(keep_bytes=0, grace=1e9) == []


def test_newest_file_stays_also_where_it_was_compacted(drop: Path, compacted: Path) -> None:
    put(drop, 0, 9)
    put(drop, 10, 19)
    put(compacted, 0, 19)
    assert ranges(plan_prune(place(drop), compacted=place(compacted), grace=-60)) == [(0, 9)]


def test_originals_stay_where_the_compacted_file_is_doubtful(drop: Path, compacted: Path) -> None:
    for first in (0, 10, 20, 30, 40, 50):
        put(drop, first, first + 9)
    torn = put(compacted, 0, 9)
    torn.write_bytes(torn.read_bytes()[:-3])
    put(compacted, 10, 19, offsets=range(11, 20), filtered=True)
    put(compacted, 20, 29)
    put(drop, 30, 39, offsets=range(30, 38))  # which itself does not hold
    put(compacted, 30, 39, offsets=range(30, 38), filtered=True)
    plan = plan_prune(place(drop), compacted=place(compacted), grace=-60)
    assert ranges(plan) == [(20, 29)]
    assert [one.reason.partition(":")[0].partition(";")[0] for one in plan.kept] == [
        "it cannot be read",
        "it has 9 rows of 10",
        "a file that it covers does not hold",
    ]


def test_pruning_removes_files_and_empty_directories_of_past_hours(drop: Path) -> None:
    first, second, third = (
        put(drop, 0, 9),
        put(drop, 10, 19, hour=NEXT_HOUR),
        put(drop, 20, 29, hour=NEXT_HOUR),
    )
    emptied = drop / "date=2026-01-01" / "hour=03"  # by somebody else
    emptied.mkdir(parents=True)
    (drop / "date=2999-01-01" / "hour=03").mkdir(parents=True)  # a sink may be about to move a file there
    (drop / "date=x" / "hour=y").mkdir(parents=True)
    plan = plan_prune(place(drop), older_than=0, now=LATER)
    first.unlink()  # gone already is no error
    removed: list[str] = []
    prune(plan, now=LATER, each=removed.append)
    assert removed == [f"{NEXT_HOUR}/{second.name}"]
    assert not first.parent.exists()
    assert not emptied.parent.exists()
    assert sorted(path.name for path in drop.iterdir()) == ["date=2026-01-31", "date=2999-01-01", "date=x"]
    assert list((drop / NEXT_HOUR).iterdir()) == [third]


def test_directory_that_is_filled_at_the_last_moment_stays(
    drop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(drop, 0, 9)
    put(drop, 10, 19, hour=NEXT_HOUR)
    plan = plan_prune(place(drop), older_than=0, now=LATER)
    rmdir = os.rmdir

    def late(path: str) -> None:
        if path.endswith(HOUR):
            put(drop, 100, 109)
        rmdir(path)

    monkeypatch.setattr(os, "rmdir", late)
    prune(plan, now=LATER)
    assert [path.name[-27:-8] for path in (drop / HOUR).iterdir()] == [f"{109:019d}"]


def test_staged_leftovers_go_when_they_are_old_and_nobody_holds_them(drop: Path) -> None:
    put(drop, 0, 9)
    staging = drop / "_staging"
    (staging / "sub").mkdir(parents=True)
    for name in ("old.parquet", "held.parquet", "young.parquet", "compact.lock", "sub/old.parquet"):
        (staging / name).write_bytes(b"12345")
        os.utime(staging / name, (LATER - 86_500, LATER - 86_500))
    os.utime(staging / "young.parquet", (LATER - 100, LATER - 100))
    with (staging / "held.parquet").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        plan = plan_prune(place(drop), older_than=0, now=LATER)
    assert sorted(found.path for found in plan.staged) == ["_staging/old.parquet", "_staging/sub/old.parquet"]
    prune(plan, now=LATER)
    assert (staging / "old.parquet").exists()
    prune(plan, staging=True, now=LATER)
    assert not (staging / "old.parquet").exists()
    assert sorted(path.name for path in staging.iterdir()) == [
        "compact.lock",
        "held.parquet",
        "sub",
        "young.parquet",
    ]
