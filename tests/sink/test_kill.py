"""Killed with SIGKILL at every named point: each message is in the drop exactly once, in order, none missing."""

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.log import read_identity
from headrace.sink.points import POINTS
from tests.sink import child
from tests.sink.drops import files, name, problems, rows

COUNT = 200
KILLS = 20  # with the default factor, shared by the tests below


def run(
    data: Path, drop: Path | str, seed: int, kill_at: str = "", environment: dict[str, str] | None = None
) -> int:
    """One life of the process; its exit code, -9 where it was killed."""
    path = os.pathsep.join(filter(None, sys.path))
    ended = subprocess.run(
        [sys.executable, child.__file__, str(data), str(drop), str(COUNT), str(seed)],
        env={**os.environ, "PYTHONPATH": path, "HEADRACE_SINK_KILL_AT": kill_at, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
    return ended.returncode


def expect_every_message_once(drop: Path, data: Path) -> None:
    log = read_identity(data / "log")["id"]
    ours = [row for row in rows(drop) if row["log"] == log]
    found = [row["offset"] for row in ours]
    assert found == list(range(len(found)))
    assert len(found) >= COUNT
    assert [row["payload"] for row in ours] == [child.payload(log, offset) for offset in found]


def lives(data: Path, drop: Path, kills: int, seed: int, between: object = None) -> int:
    """Lives that end at points, each in turn, and a last one that ends by itself; how many were killed."""
    chance = random.Random(seed)
    killed = 0
    for number in range(kills):
        point = POINTS[(seed + number) % len(POINTS)]
        killed += run(data, drop, seed + number, f"{point}:{chance.randint(1, 3)}") != 0
        if callable(between):
            between()
    assert run(data, drop, seed + kills) == 0
    return killed


def test_every_message_is_there_once_whenever_it_is_killed(tmp_path: Path, soak: int) -> None:
    data, drop = tmp_path / "data", tmp_path / "drop"
    kills = KILLS // 2 * soak
    assert lives(data, drop, kills, seed=0) == kills
    expect_every_message_once(drop, data)
    assert problems(drop) == []


def test_files_that_were_taken_away_between_the_kills_do_not_come_again(tmp_path: Path, soak: int) -> None:
    """As Spark's cleanSource and `headrace drop prune` do: whatever is there is moved to an archive."""
    data, drop, archive = tmp_path / "data", tmp_path / "drop", tmp_path / "archive"

    def clean() -> None:
        for path in files(drop):
            to = archive / path.relative_to(drop)
            to.parent.mkdir(parents=True, exist_ok=True)
            assert not to.exists()
            path.rename(to)

    kills = KILLS // 2 * soak
    assert lives(data, drop, kills, seed=100, between=clean) == kills
    clean()
    expect_every_message_once(archive, data)
    assert problems(archive) == []


def test_a_wiped_data_directory_begins_a_new_log_in_the_same_drop(tmp_path: Path) -> None:
    data, drop = tmp_path / "data", tmp_path / "drop"
    assert run(data, drop, 1, "renamed:2") != 0
    shutil.rmtree(data)
    assert run(data, drop, 2, "intent:2") != 0
    assert run(data, drop, 3) == 0
    expect_every_message_once(drop, data)
    assert len({name(path).log for path in files(drop)}) == 2
    assert problems(drop) == []


@pytest.mark.parametrize("point", ["intent", "renamed", "progress-saved"])
def test_object_stores_get_every_message_once_too(
    point: str, tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.drop.catalog import catalog
    from headrace.drop.filesystems import place
    from headrace.drop.verify import verify

    uri = bucket.format("drop")
    assert run(tmp_path, uri, 1, f"{point}:2") != 0
    assert run(tmp_path, uri, 2) == 0
    there = place(uri)
    found = verify(there)
    assert found.whole
    last = max(entry.name.last for entry in catalog(there).entries)
    assert found.rows == last + 1 >= COUNT
