"""Whole records survive SIGKILL at any moment: while appending, rolling, recycling, syncing, and while the
log is opened."""

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.log import Log, verify
from tests.log import writer
from tests.log.patience import eventually

KILLS = 20


def kill_and_count(directory: Path, place: Path, kills: int, options: dict[str, object], sizes: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)  # shown where this fails
    chance = random.Random(seed)
    report = place / "report"
    for _ in range(kills):
        task = {"options": options, "sizes": sizes, "seed": chance.getrandbits(32)}
        process = subprocess.Popen(
            [sys.executable, writer.__file__, str(directory), str(report), json.dumps(task)]
        )
        with writer.report(report) as view:
            view[writer.FIELDS.index("ready")] = 0
            try:
                if chance.random() < 0.8:  # else also while it opens, or before
                    eventually(lambda: view[writer.FIELDS.index("ready")])
                    time.sleep(chance.random() * 0.1)
                else:
                    time.sleep(chance.random() * 0.3)
                assert process.poll() is None, "the writer ended by itself"
            finally:
                process.kill()
                process.wait()
            told = dict(zip(writer.FIELDS, view, strict=True))
        if not (directory / "LOG").exists():
            continue
        assert verify(directory).problems == []
        before = place / "before"
        shutil.copytree(directory, before)
        with Log(directory, **options) as log:  # type: ignore[arg-type]
            assert log.recovery.damage == ()
            assert log.recovery.cut_bytes == 0
            assert log.appended >= told["appended"]
            assert log.safe >= told["safe"]
            assert log.cursors.get("sink", 0) >= told["cursor"]
            first, end = log.first, log.appended
            assert writer.check(directory, sizes) == (first, end)
        # A reader sees them without a repair, too; not what was just being published.
        assert writer.check(before, sizes)[0] <= first
        assert told["appended"] <= writer.check(before, sizes)[1] <= end
        shutil.rmtree(before)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ("mixed", {"sync": "always", "segment_bytes": 65536, "pool_segments": 1, "retention_bytes": 1 << 20}),
        ("same", {"sync": "none", "segment_bytes": 65536, "pool_segments": 2, "retention_bytes": 0}),
    ],
    ids=["always", "recycling"],
)
def test_whole_records_survive_a_kill(
    memory: Path, sizes: str, options: dict[str, object], soak: int
) -> None:
    kill_and_count(memory / "log", memory, KILLS // 2 * soak, options, sizes)
    newest = max(int(path.name[:20]) for path in (memory / "log").glob("*.seg"))
    assert newest > 20, "the log has not rolled often enough for this to say much"
