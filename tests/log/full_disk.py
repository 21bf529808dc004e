"""A log on a disk that fills up, from the first refusal to a reopening; run by test_full_disk.py where its
argument is the
place of a small file system of its own. It knows nothing of how that came about."""

import os
import select
import sys
import time
from pathlib import Path

from headrace.errors import LogFull
from headrace.log import Log, verify
from tests.log.patience import eventually

OPTIONS = {"segment_bytes": 65536, "pool_segments": 1, "retention_bytes": 1 << 30}
SPACE = 2


def message(offset: int) -> bytes:
    return offset.to_bytes(8, "little") * 100


def fill(log: Log, topic: int) -> str:
    """Appends until the disk is full; what the refusal says."""
    while True:
        try:
            log.append(topic, message(log.appended))
        except LogFull as error:
            if "still being prepared" not in str(error):
                return str(error)
            select.select([log.event_fd], [], [], 0.01)
            log.on_event()


def check(log: Log) -> None:
    assert [record.payload for record in log.reader()] == [message(i) for i in range(log.appended)]


def free(disk: Path) -> int:
    info = os.statvfs(disk)
    return info.f_bavail * info.f_frsize


def main(disk: Path) -> None:
    (disk / "ballast").write_bytes(bytes(free(disk) // 3))
    log = Log(disk / "log", **OPTIONS)  # type: ignore[arg-type]
    topic = log.topic("a")

    said = fill(log, topic)
    assert said == "cannot prepare a segment: No space left on device", said
    assert log.full == said
    assert log.failed is None
    assert log.stats()["refused_full"] > 0
    taken = log.appended
    assert taken > 100
    check(log)

    # It is told once; the disk is then tried now and then without waking the loop.
    log.on_event()
    for _ in range(60):
        time.sleep(0.02)
        assert log.on_event() & SPACE == 0
    assert log.full == said

    # Acknowledgements and syncs still work.
    log.save_cursor("sink", 5)
    log.sync_now()
    assert log.safe == taken

    # Room by itself makes it go on; nobody has to tell the log.
    while select.select([log.event_fd], [], [], 0.1)[0]:
        log.on_event()
    (disk / "ballast").unlink()
    assert select.select([log.event_fd], [], [], 60)[0]
    assert log.on_event() & SPACE
    eventually(lambda: log.on_event() & SPACE or log.full is None)
    assert log.append(topic, message(taken)) == taken
    fill(log, topic)
    assert log.appended > taken + 100
    check(log)
    end = log.appended
    log.close()

    # A full disk does not keep a log from being opened and read.
    (disk / "ballast").write_bytes(bytes(free(disk)))
    assert free(disk) == 0
    log = Log(disk / "log", **OPTIONS)  # type: ignore[arg-type]
    assert (log.appended, log.cursors) == (end, {"sink": 5})
    assert log.recovery.damage == ()
    check(log)
    assert "No space left" in fill(log, log.topic("a"))
    assert verify(disk / "log").problems == []
    (disk / "ballast").unlink()
    # What is retired makes room too, and needs none itself.
    log.set_retention(0, 0)

    def goes_on() -> bool:
        log.on_event()
        return log.full is None

    eventually(goes_on)
    fill_once = log.append(log.topic("a"), b"last")
    assert fill_once >= end
    log.close()
    print("survived")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
