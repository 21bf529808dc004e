"""A log in another process, whose disk a test can hold up or break. Calls and attributes go through a pipe."""

import os
import pickle
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.log import Log


class Disk:
    """The switches of disk.c."""

    def __init__(self, library: Path, place: Path) -> None:
        self.library, self.held, self.broken = library, place / "held", place / "broken"

    def hold(self) -> None:
        """From now on syncs wait."""
        self.held.touch()

    def release(self) -> None:
        self.held.unlink(missing_ok=True)

    def fail(self) -> None:
        """From now on syncs fail."""
        self.broken.touch()

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "LD_PRELOAD": f"{os.environ.get('LD_PRELOAD', '')} {self.library}".strip(),
            "DISK_HOLD": str(self.held),
            "DISK_FAIL": str(self.broken),
        }


class RemoteLog:
    """Looks like a Log; what raises there raises here."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process

    def ask(self, kind: str, name: str, *values: object, **named: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        pickle.dump((kind, name, values, named), self.process.stdin)
        self.process.stdin.flush()
        good, answer = pickle.load(self.process.stdout)
        if not good:
            raise answer
        return answer

    def __getattr__(self, name: str) -> Any:
        if callable(getattr(Log, name)):
            return lambda *values, **named: self.ask("call", name, *values, **named)
        return self.ask("get", name)

    def wait(self) -> int:
        """Waits for event_fd and answers what on_event() does; 0 where nothing came in time."""
        events: int = self.ask("wait", "")
        return events


@contextmanager
def remote_log(disk: Disk, directory: Path, **options: object) -> Iterator[RemoteLog]:
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=disk.environment
    )
    try:
        log = RemoteLog(process)
        log.ask("open", "", str(directory), **options)
        yield log
    finally:
        disk.release()
        process.kill()
        process.communicate()


def serve() -> None:
    log: Any = None
    while True:
        try:
            kind, name, values, named = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: Any = None
        try:
            if kind == "open":
                log = Log(*values, **named)
            elif kind == "wait":
                answer = log.on_event() if select.select([log.event_fd], [], [], 60)[0] else 0
            elif kind == "get":
                answer = getattr(log, name)
            else:
                answer = getattr(log, name)(*values, **named)
        except Exception as error:
            answer = error
        sys.stdout.buffer.write(pickle.dumps((not isinstance(answer, Exception), answer)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
