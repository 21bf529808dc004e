"""The sink: a cursor on the log that writes Parquet files into one drop, each message exactly once whatever is killed.
Its work is done in a thread of its own; knows nothing of event loops, gateways or the command line.

A file is committed in this order: it is finished; the log is made safe up to its last offset, so that the drop never
knows more than the log; the file is synced and given a fresh time; the intent is noted; it is renamed into place; the
directories are synced; the progress is noted. What was not renamed is written anew after a restart, what was renamed
is known by its name.
"""

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import pyarrow as pa

from headrace import events
from headrace.columns import ColumnReader
from headrace.drop.layout import FileName, hour_directory
from headrace.drop.parquet import ROW_GROUP_ROWS, writer
from headrace.drop.schema import EMPTY_BEFORE_KEY, FILTERED_KEY, MISSING_KEY
from headrace.sink.delivery import Target
from headrace.sink.errors import REASONS, Reason, SinkError, SinkLocked, in_the_log, reason_of, text_of
from headrace.sink.notes import DIRECTORY, Intent, Progress, progress_path, read_progress, write_progress
from headrace.sink.plan import DropPlan
from headrace.sink.points import reach

ROW_GROUP_BYTES: Final = 32 << 20  # of messages; what is held in memory, about twice
POLL_SECONDS: Final = 0.1  # how often a log that had nothing more is looked at
EMPTY_SECONDS: Final = 1.0  # how often progress is noted that brought no file
FIRST_RETRY: Final = 0.5
LONGEST_RETRY: Final = 30.0

OnProgress: TypeAlias = Callable[[int, int], None]  # covered, file_end

log = events.get("sink")


@dataclass
class _File:
    """A file that is being written."""

    first: int
    directory: str  # date=…/hour=…
    first_ts: int
    staged: Path
    out: Any  # the Parquet writer
    opened: float = field(default_factory=time.monotonic)
    rows: int = 0
    message_bytes: int = 0
    gathered: list[pa.RecordBatch] = field(default_factory=list)  # for the next row group
    gathered_rows: int = 0
    gathered_bytes: int = 0
    intended: bool = False  # the note says that it is about to be put into its place


class Sink:
    """Writes one drop. start() and stop() are for its owner's thread; stats() is for any."""

    def __init__(
        self,
        plan: DropPlan,
        *,
        data: Path,
        node: str,
        log_path: Path,
        log_id: str,
        saved: Progress | None = None,
        on_progress: OnProgress = lambda covered, file_end: None,
        log_failed: Callable[[], str | None] = lambda: None,
        once: bool = False,
    ) -> None:
        """`saved` is what the log's cursors say. `on_progress` is called in the sink's thread after every commit;
        `log_failed` says why the log can no longer be made safe. With `once` it ends when it has caught up."""
        self.plan = plan
        self._data = data
        self._node = node
        self._log_path = log_path
        self._log_id = log_id
        self._on_progress = on_progress
        self._log_failed = log_failed
        self._once = once
        self._progress_file = progress_path(data, plan.name)
        self._progress = saved or Progress(log_id)
        self._target = Target(plan.uri, data / DIRECTORY / f"{plan.name}-staging", (node, log_id))
        self._reader: ColumnReader | None = None
        self._file: _File | None = None
        self._missing: list[tuple[int, int]] = []
        self._noted = 0.0  # when progress without a file was last noted
        self._located = False
        self._stopping = threading.Event()
        self._hurried = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock_fd = -1
        self._counted = {"files": 0, "rows": 0, "bytes": 0, "message_bytes": 0, "missing": 0}
        self._failures: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self._write_seconds = 0.0
        self._last_commit = 0.0
        self._oldest_ts: int | None = None
        self._error: tuple[Reason, str] | None = None  # reason and text
        self._retry = FIRST_RETRY

    # --- for the owner --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins, in a thread of its own; SinkLocked where another process writes this drop from this log."""
        self._take_lock()
        self._thread = threading.Thread(target=self._run, name=f"sink-{self.plan.name}", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """The same in the caller's thread, until stop() is called elsewhere, or (`once`) all is exported."""
        self._take_lock()
        self._run()

    def ask_to_stop(self) -> None:
        """Tells it to finish its file and end; returns at once."""
        self._stopping.set()

    def stop(self, timeout: float) -> bool:
        """Finishes the open file and ends; whether that succeeded in time. What is not finished is redone by the next
        sink."""
        self.ask_to_stop()
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive() and self._error is None
        return True

    def hurry(self) -> None:
        """Commits what there is without waiting for the file to be due: the log has no room for more. Returns at
        once."""
        self._hurried.set()

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def error(self) -> str | None:
        """Why the drop cannot be written now; None while it can."""
        failing = self._error
        return failing[1] if failing else None

    @property
    def covered(self) -> int:
        return self._progress.covered

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and where it stands."""
        file = self._file
        return {
            "covered": self._progress.covered,
            "file_end": self._progress.file_end,
            **self._counted,
            "write_seconds": self._write_seconds,
            "last_commit": self._last_commit,
            "failing": self._error is not None,
            "error": self.error,
            "failures": dict(self._failures),
            "open_rows": file.rows if file is not None else 0,
            "oldest_ts": self._oldest_ts,
        }

    # --- the thread -----------------------------------------------------------------------------------------------

    def _take_lock(self) -> None:
        directory = self._data / DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.plan.name}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise SinkLocked(
                f"another process writes the drop {self.plan.name!r} from {self._data}; it holds {path}"
            ) from None
        self._lock_fd = fd

    def _run(self) -> None:
        try:
            while True:
                try:
                    with self._target.open():
                        self._locate()
                        self._export()
                    return
                except Exception as error:
                    self._note_failure(error)
                if self._once or self._stopping.wait(self._retry):
                    return
                self._retry = min(self._retry * 2, LONGEST_RETRY)
        finally:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _note_failure(self, error: Exception) -> None:
        reason, text = reason_of(error), text_of(error)
        self._failures[reason] += 1
        self._error = (reason, f"the drop {self.plan.name!r} ({self.plan.uri}) cannot be written: {text}")
        log.limited(
            "sink.failing",
            key=self.plan.name,
            level=events.LEVELS["error" if reason == "bug" else "warning"],
            drop=self.plan.name,
            uri=self.plan.uri,
            reason=reason,
            error=text,
            again_in=self._retry,
            exc_info=error if reason == "bug" else None,
        )

    def _note_success(self) -> None:
        if self._error is not None:
            log.info("sink.recovered", drop=self.plan.name)
        self._error = None
        self._retry = FIRST_RETRY

    def _locate(self) -> None:
        """Where to go on: the farthest that names, the log's cursors or the progress file prove. Names are listed again
        after each failure, because a commit may have failed half-way."""
        found = read_progress(self._progress_file, self._log_id)
        ends = [name.last + 1 for name in self._target.names()]
        covered = max([self._progress.covered, found.covered, *ends])
        file_end = max([self._progress.file_end, found.file_end, *ends])
        intent = found.intent
        if intent is not None and intent.last >= covered and not os.path.exists(intent.staged):
            # It was put into its place, and has been taken away from there since.
            covered = file_end = intent.last + 1
        self._progress = Progress(self._log_id, covered, file_end)
        if intent is not None:
            # Before what was not put into its place is removed: else that would look as if it had been.
            write_progress(self._progress_file, self._progress)
        self._target.clear()
        if not self._located:
            self._located = True
            log.info("sink.open", drop=self.plan.name, uri=self.plan.uri, covered=covered)
        self._on_progress(covered, file_end)

    def _export(self) -> None:
        """Reads and writes until it is told to stop."""
        plan = self.plan
        poll = min(POLL_SECONDS, plan.roll_seconds / 2)
        self._missing = []
        with (
            ColumnReader(
                self._log_path,
                self._progress.covered,
                node=self._node,
                filters=plan.topics,
                leave_out=plan.leave_out,
                payload_json=plan.payload_json,
            ) as reader,
            self._abandoned(),
        ):
            self._reader = reader
            while True:
                stopping = self._stopping.is_set()
                began = time.monotonic()
                more = self._step(reader)
                self._write_seconds += time.monotonic() - began
                if more:
                    continue
                if stopping or self._once:
                    self._commit(reader.offset)
                    self._note_empty(reader, at_once=True)
                    self._note_success()
                    return
                self._stopping.wait(poll)

    @contextlib.contextmanager
    def _abandoned(self) -> Iterator[None]:
        """Leaves no open file behind; it is written anew. One that was about to be put into its place stays until
        _locate() has looked whether it was."""
        try:
            yield
        finally:
            file, self._file, self._reader = self._file, None, None
            if file is not None:
                with contextlib.suppress(Exception):
                    file.out.close()
                if not file.intended:
                    with contextlib.suppress(OSError):
                        file.staged.unlink(missing_ok=True)

    def _step(self, reader: ColumnReader) -> bool:
        """Reads once and writes what came; whether there may be more at once."""
        plan, file = self.plan, self._file
        rows = plan.roll_rows - (file.rows if file is not None else 0)
        size = plan.roll_bytes - (file.message_bytes if file is not None else 0)
        with in_the_log():
            batch = reader.read(min(rows, ROW_GROUP_ROWS), min(size, ROW_GROUP_BYTES))
        if taken := reader.take_missing():
            self._missing += taken
        if batch is None:
            if file is None:
                self._note_empty(reader, at_once=self._hurried.is_set())
                self._hurried.clear()
                if reader.offset == self._progress.covered:
                    self._note_success()  # what was to be written is
            elif self._is_due(file):
                self._commit(reader.offset)
                self._hurried.clear()
            return False
        first, ts = _first_row(batch)
        directory = hour_directory(ts)
        if file is not None and file.directory != directory:
            self._commit(first)
            file = None
        if file is None:
            file = self._begin(reader, directory, ts)
        self._add(file, batch, reader.row_bytes)
        if file.rows >= plan.roll_rows or file.message_bytes >= plan.roll_bytes or self._is_due(file):
            self._commit(reader.offset)
        return True

    def _is_due(self, file: _File) -> bool:
        """By its age, or because its hour is over: who reads the hour need not wait for it; or it is asked for."""
        return (
            self._hurried.is_set()
            or time.monotonic() - file.opened >= self.plan.roll_seconds
            or hour_directory(time.time_ns() // 1000) > file.directory
        )

    # --- one file -------------------------------------------------------------------------------------------------

    def _begin(self, reader: ColumnReader, directory: str, ts: int) -> _File:
        covered, file_end = self._progress.covered, self._progress.file_end
        metadata: dict[bytes, bytes] = {}
        if covered > file_end:
            metadata[EMPTY_BEFORE_KEY] = str(covered - file_end).encode()
        if self.plan.filtered:
            metadata[FILTERED_KEY] = b"1"
        staged = self._target.staged(covered)
        out = writer(staged, reader.schema, metadata, compression=self.plan.compression)
        reach("opened")
        self._oldest_ts = ts
        self._file = _File(covered, directory, ts, staged, out)
        return self._file

    def _add(self, file: _File, batch: pa.RecordBatch, size: int) -> None:
        """Gathers batches until they are a row group."""
        file.rows += batch.num_rows
        file.message_bytes += size
        file.gathered.append(batch)
        file.gathered_rows += batch.num_rows
        file.gathered_bytes += size
        if file.gathered_rows >= ROW_GROUP_ROWS or file.gathered_bytes >= ROW_GROUP_BYTES:
            self._write_group(file)

    def _write_group(self, file: _File) -> None:
        batches, file.gathered = file.gathered, []
        file.gathered_rows = file.gathered_bytes = 0
        if len(batches) == 1:
            file.out.write_batch(batches[0])
        elif batches:
            file.out.write_table(pa.Table.from_batches(batches).unify_dictionaries().combine_chunks())
        reach("written")

    def _commit(self, end: int) -> None:
        """Commits the open file, if there is one, as covering everything before `end`."""
        file = self._file
        if file is None:
            return
        assert self._reader is not None
        self._write_group(file)
        inside = [(first, last) for first, last in self._missing if first < end]
        if inside:
            file.out.add_key_value_metadata({MISSING_KEY: json.dumps(inside)})
        file.out.close()
        reach("closed")
        with in_the_log():
            self._reader.sync()
        reach("log-synced")
        self._check_log()
        size = file.staged.stat().st_size
        self._target.finish(file.staged)
        path = f"{file.directory}/{FileName(self._node, self._log_id, file.first, end - 1)}"
        before = self._progress
        intent = Intent(end - 1, str(file.staged), path)
        file.intended = True
        write_progress(self._progress_file, Progress(self._log_id, before.covered, before.file_end, intent))
        reach("intent")
        self._target.put(file.staged, path)
        self._file = None
        self._oldest_ts = None
        self._progress = Progress(self._log_id, end, end)
        self._missing = [one for one in self._missing if one[0] >= end]
        for name, count in {
            "files": 1,
            "rows": file.rows,
            "bytes": size,
            "message_bytes": file.message_bytes,
            "missing": sum(last - first + 1 for first, last in inside),
        }.items():
            self._counted[name] += count
        self._last_commit = time.time()
        self._save()
        reach("progress-saved")
        self._note_success()
        log.debug("sink.committed", drop=self.plan.name, path=path, rows=file.rows, bytes=size)

    def _note_empty(self, reader: ColumnReader, *, at_once: bool = False) -> None:
        """A range in which there was nothing for this drop advances the cursor alone. What the log has lost waits for
        the next file, which says so."""
        now = time.monotonic()
        if self._file is not None or self._missing or reader.offset <= self._progress.covered:
            return
        if not at_once and now - self._noted < EMPTY_SECONDS:
            return
        self._noted = now
        self._check_log()
        with in_the_log():
            reader.sync()
        self._progress = Progress(self._log_id, reader.offset, self._progress.file_end)
        self._save()

    def _check_log(self) -> None:
        """Nothing of a log may be exported that can no longer be made safe."""
        if why := self._log_failed():
            raise SinkError(f"the log has failed: {why}", "log")

    def _save(self) -> None:
        write_progress(self._progress_file, self._progress)
        self._on_progress(self._progress.covered, self._progress.file_end)


def _first_row(batch: pa.RecordBatch) -> tuple[int, int]:
    """Offset and time of a batch's first row."""
    return batch.column("offset")[0].as_py(), batch.column("ts")[0].value
