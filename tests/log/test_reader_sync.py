"""A reader that makes durable what it has read, whatever the log's own sync policy."""

import json
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import LogError
from headrace.log import Log, LogReader
from tests.log.patience import append
from tests.log.power_cut import cut
from tests.log.remote import Disk

OpenLog = Callable[..., Log]

OPTIONS = {"sync": "none", "segment_bytes": 65536, "pool_segments": 1, "retention_bytes": 1 << 30}


def run(program: str, environment: dict[str, str], *arguments: object) -> str:
    """A program on the disk for tests; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_only_a_reader_that_was_opened_for_it_can_sync(open_log: OpenLog) -> None:
    log = open_log(sync="none")
    log.append(log.topic("a"), b"x")
    with log.reader() as reader, pytest.raises(LogError, match="not opened to sync"):
        reader.sync()


def test_a_live_log_can_be_synced_by_its_reader(directory: Path, open_log: OpenLog) -> None:
    log = open_log(sync="none")
    topic = log.topic("a")
    with LogReader(directory, sync=True) as reader:
        reader.sync()
        for i in range(3000):
            append(log, topic, bytes(500))
            record = reader.read()
            assert record is not None
            assert record.offset == i
            if i % 100 == 0:
                reader.sync()
        reader.sync()
        assert reader.read() is None
    assert len(log.segments()) > 20


def test_the_mapping_is_one_that_msync_writes(directory: Path, open_log: OpenLog) -> None:
    """Linux drops the shared flag of a mapping whose file cannot be written, and then msync returns at once."""
    log = open_log(sync="none")
    log.append(log.topic("a"), b"x")

    def shared() -> list[bool]:
        """For every read-only mapping of a segment."""
        found = []
        of_segment = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split(" ")[0]:
                of_segment = line.endswith(".seg") and " r--s " in line
            elif of_segment and line.startswith("VmFlags:"):
                found.append("sh" in line.split())
        return found

    with LogReader(directory) as reader:
        assert reader.read() is not None
        assert shared() == [False]
    with LogReader(directory, sync=True) as reader:
        assert reader.read() is not None
        assert shared() == [True]


APPEND_AND_SYNC = """
    import json, sys
    from headrace.log import Log, LogReader
    from tests.log.patience import append

    directory, options, begin, end = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    log = Log(directory, **options)
    topic = log.topic("a")
    for i in range(3000):
        append(log, topic, i.to_bytes(8, "little") * 50)
    with LogReader(directory, begin, sync=True) as reader:
        while reader.offset < end:
            assert reader.read() is not None
        reader.sync()
        assert len(log.segments()) > 15
        sys.stdout.flush()
        import os
        os._exit(0)  # no sync at the end
"""


@pytest.mark.parametrize(("begin", "end"), [(0, 10), (0, 2000), (0, 3000), (1500, 1600), (2999, 3000)])
def test_what_was_read_and_synced_survives_a_power_cut(
    memory: Path, disk_library: Path, begin: int, end: int
) -> None:
    """Also where the reader began in the middle: what lies before must be there too, else opening cuts it all."""
    directory, shadow = memory / "log", memory / "shadow"
    directory.mkdir()
    shadow.mkdir()
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{os.environ.get('LD_PRELOAD', '')} {disk_library}".strip(),
        "DISK_WATCH": str(directory),
        "DISK_SHADOW": str(shadow),
    }
    run(APPEND_AND_SYNC, environment, directory, json.dumps(OPTIONS), begin, end)
    for seed in range(5):
        image = memory / f"image-{seed}"
        cut(directory, shadow, image, random.Random(seed))
        with Log(image, **OPTIONS) as log:  # type: ignore[arg-type]
            assert log.recovery.damage == ()
            assert log.appended >= end
            for record in log.reader():
                assert record.payload == record.offset.to_bytes(8, "little") * 50


FAIL = """
    import sys
    from pathlib import Path
    from headrace.log import Log, LogReader
    from tests.log.patience import append

    directory, broken, many = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    log = Log(directory, sync="none", segment_bytes=65536, pool_segments=1, retention_bytes=1 << 30)
    topic = log.topic("a")
    for i in range(3000):
        append(log, topic, bytes(500))
    reader = LogReader(directory, sync=True)
    for _ in range(100):
        reader.read()
    reader.sync()
    broken.touch()
    said = []
    try:
        for _ in range(many):
            assert reader.read() is not None
        reader.sync()
    except OSError as error:
        said.append((error.errno, error.strerror, Path(error.filename).name))
    broken.unlink()
    for _ in range(2):                       # what the disk lost does not come back because it works again
        try:
            reader.sync()
        except OSError as error:
            said.append((error.errno, error.strerror, Path(error.filename).name))
    for one in said:
        print(*one, sep="|")
    while reader.offset < 3000:              # reading does not depend on it, as far as it has room
        try:
            before = reader.offset
            record = reader.read()
            assert record.offset == before
        except OSError:
            assert reader.offset == before
            break
    print(reader.offset)
    sys.stdout.flush()
    reader.close()
    log.close(sync=False)
"""


@pytest.mark.parametrize(
    ("many", "first"), [(10, 1), (500, 1), (2900, 1)], ids=["here", "left behind", "by itself"]
)
def test_a_sync_that_fails_is_said_and_final(
    tmp_path: Path, disk_library: Path, many: int, first: int
) -> None:
    disk = Disk(disk_library, tmp_path)
    lines = run(FAIL, disk.environment, tmp_path / "log", disk.broken, many).splitlines()
    *said, offset = lines
    assert said == [f"5|cannot sync the log: Input/output error|{first:020d}.seg"] * 3
    assert int(offset) > 1500


BUSY = """
    import sys, threading, time
    from pathlib import Path
    from headrace.log import Log, LogReader

    directory, held = sys.argv[1], Path(sys.argv[2])
    log = Log(directory, sync="none", segment_bytes=65536, pool_segments=1)
    for i in range(10):
        log.append(log.topic("a"), b"x")
    reader = LogReader(directory, sync=True)
    reader.read()
    held.touch()
    thread = threading.Thread(target=reader.sync)
    thread.start()
    refused = 0
    while not refused:
        for use in (reader.read, reader.sync, reader.close):
            try:
                use()
            except RuntimeError as error:
                assert str(error) == "another thread is using this reader"
                refused += 1
            else:
                assert use == reader.read and not refused
                break
        time.sleep(0.001)
    held.unlink()
    thread.join()
    print(refused)
    reader.sync()
    reader.close()
    log.close()
"""


def test_a_reader_that_syncs_in_another_thread_is_left_alone(tmp_path: Path, disk_library: Path) -> None:
    disk = Disk(disk_library, tmp_path)
    assert run(BUSY, disk.environment, tmp_path / "log", disk.held) == "3\n"
