"""A process that appends until it is killed, and says in shared memory how far it came. What it appends
follows from the
offset alone, so that whoever opens the log afterwards can tell right from wrong.

    python writer.py DIRECTORY REPORT '{"options": {...}, "sizes": "mixed", "seed": 1}'
"""

import json
import mmap
import random
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.errors import LogFull
from headrace.log import Log, LogReader

FIELDS = ("appended", "safe", "synced", "cursor", "ready", "pinned")
PINNED = 7  # the offset of a cursor that is saved once and must be carried ever after

SAME = 200


def payload(offset: int, sizes: str) -> bytes:
    """Of one size, so that old records stand exactly where new ones will, or of many."""
    size = SAME if sizes == "same" else random.Random(offset).choice((0, 8, 40, 100, 300, 900, 2500, 9000))
    return (offset.to_bytes(8, "little") * (size // 8 + 1))[:size]


def check(directory: Path, sizes: str) -> tuple[int, int]:
    """Every record is there from the first to the last one, in order, and says what it should; the first
    offset, and the
    one after the last."""
    with LogReader(directory) as reader:
        first = end = -1
        for record in reader:
            if first < 0:
                first = end = record.offset
            assert record.offset == end
            assert record.payload == payload(end, sizes), f"offset {end}"
            assert record.topic_name == f"t.{end % 3}".encode()
            end += 1
        return (first, end) if first >= 0 else (reader.offset, reader.offset)


@contextmanager
def report(path: Path) -> Iterator[Any]:
    """A few 64-bit numbers that the writer sets and others read; each is set and read at once."""
    if not path.exists():
        path.write_bytes(bytes(8 * len(FIELDS)))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8 * len(FIELDS)) as memory:
        view = memoryview(memory).cast("Q")
        try:
            yield view
        finally:
            view.release()


def write(directory: Path, view: Any, options: dict[str, Any], sizes: str, seed: int) -> None:
    chance = random.Random(seed)
    log = Log(directory, **options)
    topics = [log.topic(f"t.{i}") for i in range(3)]
    view[FIELDS.index("ready")] = 1
    if "pinned" not in log.cursors:
        log.save_cursor("pinned", PINNED)
        log.sync_now()
    view[FIELDS.index("pinned")] = 1
    cursor = log.cursors.get("sink", 0)
    while True:
        try:
            for _ in range(chance.choice((1, 5, 50))):
                log.append(topics[log.appended % 3], payload(log.appended, sizes))
            view[FIELDS.index("appended")] = log.appended
            if chance.random() < 0.1:
                cursor = max(cursor, log.appended)
                log.save_cursor("sink", cursor)
        except LogFull:
            select.select([log.event_fd], [], [], 0.01)
        if chance.random() < 0.3:
            log.request_sync()
        if chance.random() < 0.03:
            log.sync_now()
            view[FIELDS.index("cursor")] = cursor
        if select.select([log.event_fd], [], [], 0)[0]:
            log.on_event()
        view[FIELDS.index("safe")] = log.safe
        view[FIELDS.index("synced")] = log.synced


if __name__ == "__main__":
    task = json.loads(sys.argv[3])
    with report(Path(sys.argv[2])) as numbers:
        write(Path(sys.argv[1]), numbers, task["options"], task["sizes"], task["seed"])
