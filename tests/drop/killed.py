"""Compacts a drop and is killed on the way, at every point in turn; a program of its own, because it forks.

    python -m tests.drop.killed DROP COMPACTED TARGET_BYTES

For each point: a process compacts into COMPACTED<n> and kills itself there with SIGKILL; another one looks at what is
there, compacts to the end, and looks again. Prints one line of JSON: the points, in order, with what was there after
the kill.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq

from headrace.drop.catalog import catalog, select
from headrace.drop.compact import compact
from headrace.drop.filesystems import place
from headrace.drop.verify import verify
from tests.drop.files import LATER, rows_of

POINTS = (
    (os, "mkdir"),
    (os, "fsync"),
    (os, "utime"),
    (os, "rename"),
    (os, "unlink"),
    (pq.ParquetWriter, "write_table"),
    (pq.ParquetWriter, "close"),
)


def main(drop: str, compacted: str, target_bytes: int) -> None:
    whole = fork(lambda: look(drop, f"{compacted}-none"))[1]["rows"]
    points = []
    for number in range(1000):
        to = f"{compacted}{number}"
        killed, point = fork(lambda to=to, number=number: compact_until(drop, to, target_bytes, number))
        if not killed:
            break
        found, then = fork(lambda to=to: look_twice(drop, to, target_bytes))[1]
        assert found["rows"] == then["rows"] == whole, point
        points.append({"point": point, "files": found["files"], "then": then["files"]})
    print(json.dumps(points))


def fork(work: Callable[[], Any]) -> tuple[bool, Any]:
    """Does the work in a process of its own; whether it was killed, and the last line that it said."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            say(writer, work_said(work, writer))
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    os.close(writer)
    with open(reader) as lines:
        said = lines.read().splitlines()
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or os.waitstatus_to_exitcode(status) == 0, f"a process ended with {status}"
    return killed, json.loads(said[-1])


def work_said(work: Callable[[], Any], writer: int) -> Any:
    global pipe
    pipe = writer
    return work()


def say(writer: int, what: Any) -> None:
    os.write(writer, json.dumps(what).encode() + b"\n")


pipe = -1


def compact_until(drop: str, to: str, target_bytes: int, number: int) -> None:
    """Compacts; before or after the call of a function of POINTS that is the one of this number, dies."""
    left = number

    def point(name: str) -> None:
        nonlocal left
        if left == 0:
            say(pipe, name)
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: Any, **options: Any) -> Any:
            point(f"before {name}")
            result = call(*args, **options)
            point(f"after {name}")
            return result

        return around

    for owner, name in POINTS:
        setattr(owner, name, watched(name, getattr(owner, name)))
    compact(place(drop), place(to), target_bytes=target_bytes, now=LATER)


def look_twice(drop: str, to: str, target_bytes: int) -> list[dict[str, Any]]:
    """What is there, and what is there when another one has compacted to the end."""
    found = look(drop, to)
    compact(place(drop), place(to), target_bytes=target_bytes, now=LATER)
    assert verify(place(drop), place(to)).whole
    assert [found.path for found in place(to).staged()] == ["_staging/compact.lock"]
    return [found, look(drop, to)]


def look(drop: str, to: str) -> dict[str, Any]:
    """What a reader sees: the offsets, each as often as it is there."""
    rows = rows_of(select(place(drop), place(to)), place(drop), place(to))
    files = [str(entry.name) for entry in catalog(place(to)).entries]
    return {"rows": [(node, log, offset) for node, log, offset, _ in rows], "files": files}


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]))
