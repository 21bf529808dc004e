"""The drops of a running gateway: starts and stops their sinks, keeps their cursors in the log, and holds back
retention for what they do not have yet. Where a process of its own writes them, follows what that one notes."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace import events
from headrace.admin.statistics import SinkFigures
from headrace.errors import LogError
from headrace.log import Log
from headrace.sink.exporter import Sink
from headrace.sink.notes import Progress, progress_path, read_progress
from headrace.sink.plan import DropPlan

log = events.get("gateway")


@dataclass
class _Drop:
    """One drop, and what the log knows of its sink."""

    plan: DropPlan
    covered: int
    file_end: int
    sink: Sink | None = None  # None: another process writes it
    unsaved: bool = False  # the log had no room for its cursors


class Drops:
    """All of a gateway's drops. Everything is for the event loop's thread, which is the log's."""

    def __init__(self, log_: Log, loop: asyncio.AbstractEventLoop, data: Path, node: str) -> None:
        self._log = log_
        self._loop = loop
        self._data = data.absolute()
        self._node = node
        self._drops: dict[str, _Drop] = {}
        self._started = time.time()

    def start(self, plans: Sequence[DropPlan], *, run: bool) -> None:
        """Holds back retention for every drop, and (`run`) starts its sink; SinkLocked where another process has it."""
        for plan in plans:
            covered, file_end = (self._log.cursors.get(name, 0) for name in (plan.cursor, plan.file_cursor))
            drop = self._drops[plan.name] = _Drop(plan, covered, file_end)
            self._log.hold(plan.cursor, covered)
            if run:
                sink = Sink(
                    plan,
                    data=self._data,
                    node=self._node,
                    log_path=Path(self._log.path),
                    log_id=self._log.id_text,
                    saved=Progress(self._log.id_text, covered, file_end),
                    on_progress=partial(self._from_sink, drop),
                    log_failed=lambda: self._log.failed,
                )
                sink.start()
                drop.sink = sink
        self.tick()

    def tick(self) -> None:
        """Follows the sinks of other processes, saves again what could not be saved, and hurries sinks that keep the
        log full; to be called now and then."""
        full = self._log.full is not None
        for drop in self._drops.values():
            if drop.sink is not None:
                if full:
                    drop.sink.hurry()
            else:
                noted = read_progress(progress_path(self._data, drop.plan.name), self._log.id_text)
                if noted.covered > drop.covered or noted.file_end > drop.file_end:
                    self._keep(drop, noted.covered, noted.file_end)
            if drop.unsaved:
                self._save(drop)

    async def stop(self, seconds: float) -> None:
        """Lets the sinks finish their files; what does not finish in time is redone after the next start."""
        sinks = [drop.sink for drop in self._drops.values() if drop.sink is not None]
        for sink in sinks:
            sink.ask_to_stop()
        deadline = time.monotonic() + seconds
        for sink in sinks:
            left = max(0.0, deadline - time.monotonic())
            if not await asyncio.to_thread(sink.stop, left):
                log.warning(
                    "sink.cut_short",
                    drop=sink.plan.name,
                    covered=sink.covered,
                    reason=sink.error or "out of time",
                )
        await asyncio.sleep(0)  # what the sinks have told the loop is heard before the log is closed

    def failing(self) -> list[str]:
        """Why drops cannot be written now, a sentence each."""
        return [drop.sink.error for drop in self._drops.values() if drop.sink is not None and drop.sink.error]

    def figures(self) -> list[SinkFigures]:
        return [self._figures(drop) for drop in self._drops.values()]

    def _figures(self, drop: _Drop) -> SinkFigures:
        appended = self._log.appended
        stats = drop.sink.stats() if drop.sink is not None else {}
        covered = max(drop.covered, stats.get("covered", 0))
        oldest = stats.get("oldest_ts")
        lag = 0.0
        if covered < appended and drop.sink is not None:
            # A sink that could not begin has not seen how old the oldest one is; this long it waits at least.
            lag = max(0.0, time.time() - (oldest / 1e6 if oldest is not None else self._started))
        return SinkFigures(
            drop=drop.plan.name,
            uri=drop.plan.uri,
            run=drop.sink is not None,
            covered=covered,
            lag_offsets=max(0, appended - covered),
            lag_seconds=lag,
            stats=stats,
        )

    def _from_sink(self, drop: _Drop, covered: int, file_end: int) -> None:
        """Called in the sink's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._keep, drop, covered, file_end)

    def _keep(self, drop: _Drop, covered: int, file_end: int) -> None:
        drop.covered = max(drop.covered, covered)
        drop.file_end = max(drop.file_end, file_end)
        self._save(drop)

    def _save(self, drop: _Drop) -> None:
        drop.unsaved = True
        name, file_name = drop.plan.cursor, drop.plan.file_cursor
        try:
            if self._log.cursors.get(file_name) != drop.file_end:
                self._log.save_cursor(file_name, drop.file_end)
            if self._log.cursors.get(name) != drop.covered:
                self._log.save_cursor(name, drop.covered)
            self._log.hold(name, drop.covered)
            drop.unsaved = False
        except LogError as error:
            # The drop's names and the sink's own note say the same; it is tried again.
            log.limited("sink.cursor_unsaved", drop=drop.plan.name, reason=str(error))
