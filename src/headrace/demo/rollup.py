"""Spark beside the demo: `headrace spark rollup --stream` as a child that follows the drop, and what it says. It knows
nothing of the gateway."""

import asyncio
import contextlib
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from headrace.errors import HeadraceError

SHOWN_BATCHES: Final = 3
LAST_LINES: Final = 5  # of what it wrote, if it fails
EVERY: Final = "2s"
DELAY: Final = "2s"  # all clocks of the demo are one, so nothing comes late
TAKE_SECONDS: Final = 60.0  # for the files of the end
STOP_SECONDS: Final = 60.0

# What the job says of a batch; the rest of what comes is Java's and Spark's own.
BATCH: Final = re.compile(r"batch \d+: (?P<messages>[\d,]+) messages?, .*")


class RollupFailed(HeadraceError):
    """Spark did not start, or ended before its time."""


class Rollup:
    """A stream that follows a drop. Made by start()."""

    def __init__(self, child: asyncio.subprocess.Process, heard: Callable[[str], None]) -> None:
        self.batches: deque[str] = deque(["starting ..."], maxlen=SHOWN_BATCHES)
        self.messages = 0  # that it has taken so far
        self._child = child
        self._heard = heard
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._took = asyncio.Event()
        self._ended = False
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, drop: Path, out: Path, heard: Callable[[str], None]) -> "Rollup":
        """The drop may still be empty; `heard` is called with the line of each batch."""
        words = ["spark", "rollup", str(drop), str(out), "--stream", "--every", EVERY, "--delay", DELAY]
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "headrace.demo.child", *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is the demo's
        )
        return cls(child, heard)

    async def _read(self) -> None:
        assert self._child.stdout is not None
        async for written in self._child.stdout:
            line = written.decode(errors="replace").strip()
            self._last.append(line)
            if batch := BATCH.fullmatch(line):
                self.messages += int(batch["messages"].replace(",", ""))
                self.batches.append(line)
                self._heard(line)
                self._took.set()
        self._ended = True
        self._took.set()

    async def ended(self) -> None:
        """Raises what is wrong, if it ends."""
        code = await self._child.wait()
        await self._reading
        raise RollupFailed("\n  ".join([f"the rollup ended with {code}; its last lines:", *self._last]))

    async def take(self, messages: int) -> None:
        """Waits until it has taken so many, or for as long as that may take, or until it has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TAKE_SECONDS):
                while self.messages < messages and not self._ended:
                    self._took.clear()
                    await self._took.wait()

    async def stop(self) -> None:
        """Lets it finish its batch."""
        with contextlib.suppress(ProcessLookupError):
            self._child.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._child.wait()
                await self._reading
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()
        await self._child.wait()
        self._reading.cancel()
