"""What was safe survives a power cut, whatever became of the pages that were not yet synced, and the rest
is whole records
that follow on, or nothing. The model is in disk.c and power_cut.py."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.log import Log, verify
from tests.log import writer
from tests.log.patience import append, eventually
from tests.log.power_cut import Names, cut
from tests.oracle import log as twin

POLICIES = ["always", "every:50", "interval:5", "none"]


class Writer:
    """A writer process whose disk is watched, and that can be made to stand still."""

    def __init__(self, library: Path, directory: Path, place: Path, **task: object) -> None:
        self.directory, self.shadow, self.report = directory, place / "shadow", place / "report"
        self.shadow.mkdir(parents=True, exist_ok=True)
        with writer.report(self.report) as view:
            view[writer.FIELDS.index("ready")] = 0
        environment = {
            **os.environ,
            "LD_PRELOAD": f"{os.environ.get('LD_PRELOAD', '')} {library}".strip(),
            "DISK_WATCH": str(directory),
            "DISK_SHADOW": str(self.shadow),
        }
        program = [sys.executable, writer.__file__, str(directory), str(self.report), json.dumps(task)]
        self.process = subprocess.Popen(program, env=environment)

    def numbers(self) -> dict[str, int]:
        with writer.report(self.report) as view:
            return dict(zip(writer.FIELDS, view, strict=True))

    def stop(self) -> bool:
        """Makes it stand still; False where it has not come as far as to watch its disk."""
        while True:
            os.kill(self.process.pid, signal.SIGSTOP)
            _, status = os.waitpid(self.process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), f"the writer ended by itself: {status}"
            journal = self.shadow / "journal"
            if not journal.exists() or "= \n" not in journal.read_text():
                return False
            noted = {name for name in Names(journal.read_text().splitlines()).files if "/" not in name}
            if noted == {path.name for path in self.directory.iterdir() if path.is_file()}:
                return True
            self.go_on()  # it was between the change of a name and its note
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def first_kept(directory: Path) -> int:
    """Where the oldest segment begins that still has its name."""
    numbers = sorted(int(path.name[:20]) for path in directory.glob("*.seg"))
    log = twin.log_id(directory)
    for number in numbers:
        with twin.segment_path(directory, number).open("rb") as file:
            data = file.read(twin.HEADER + 64)
        found = twin.decode(data, twin.HEADER, twin.seed(log, number))
        if found is not None:
            return found[0].offset
    return 0


def check_image(
    image: Path, options: dict[str, object], sizes: str, numbers: dict[str, int], first: int
) -> None:
    problems = verify(image).problems
    with Log(image, **options) as log:  # type: ignore[arg-type]
        assert log.recovery.damage == ()
        assert all(
            "torn tail" in p.reason or "no sync mark" in p.reason or "missing" in p.reason for p in problems
        )
        assert log.appended >= numbers["synced"]
        kept, end = writer.check(image, sizes)
        assert kept <= first
        assert end == log.appended
        assert log.cursors.get("sink", 0) >= numbers["cursor"]
        if numbers["pinned"]:
            assert log.cursors["pinned"] == writer.PINNED
        # it goes on, and what was cut stays away
        for offset in range(end, end + 5):
            append(log, log.topic(f"t.{offset % 3}"), writer.payload(offset, sizes))
    with Log(image, **options) as log:  # type: ignore[arg-type]
        assert log.recovery.cut_bytes == 0
        assert log.appended == end + 5
        assert writer.check(image, sizes)[1] == end + 5


@pytest.mark.parametrize("sizes", ["same", "mixed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_safe_survives_a_power_cut(
    memory: Path, disk_library: Path, policy: str, sizes: str, soak: int
) -> None:
    """Several lives. One ends with a power cut, and the next begins with what that left; or with a kill, and the next
    one begins with what the kernel has, of which the disk may not know yet."""
    seed = random.randrange(2**32)
    print("seed", seed)  # shown where this fails
    chance = random.Random(seed)
    directory, image, checked = memory / "log", memory / "image", memory / "checked"
    directory.mkdir()
    disks = rolled = 0
    for life in range(6 * soak):
        options = {
            "sync": policy,
            "segment_bytes": 65536 * chance.choice((1, 1, 2)),
            "pool_segments": chance.choice((1, 2)),
            "retention_bytes": chance.choice((0, 10 * 65536)),
            # Recycled segments are never remade, mostly, or now and then.
            "large_sync": chance.choice((1 << 24, 1000, 10_000)),
        }
        place = memory / f"disk-{disks}"
        task = {"options": options, "sizes": sizes, "seed": chance.getrandbits(32)}
        running = Writer(disk_library, directory, place, **task)
        try:
            if life == 0 or chance.random() < 0.7:  # else it may also be cut while it opens
                eventually(lambda: running.numbers()["ready"], "the writer is ready")  # noqa: B023
            for _ in range(4):
                time.sleep(chance.choice((0.002, 0.02, 0.06)))
                if running.stop():
                    shutil.rmtree(image, ignore_errors=True)
                    cut(directory, running.shadow, image, chance)
                    if (image / "LOG").exists():
                        shutil.copytree(image, checked)
                        check_image(checked, options, sizes, running.numbers(), first_kept(directory))
                        shutil.rmtree(checked)
                running.go_on()
            rolled = max(rolled, max((int(path.name[:20]) for path in directory.glob("*.seg")), default=0))
            watched = running.stop()
        finally:
            running.end()
        if chance.random() < 0.5 and (image / "LOG").exists():
            shutil.rmtree(directory)
            image.rename(directory)
            disks += 1
        elif not watched:  # it has touched nothing yet, nor begun to remember
            disks += 1
    assert rolled > 20, "the log has not rolled often enough for this to say much"
