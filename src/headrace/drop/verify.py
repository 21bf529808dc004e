"""Proves that a drop directory is whole: every file holds and is what its name says, no offset is in two files, none is
missing, and compacted files have exactly the rows of what they were made from. It only reads."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from headrace.drop.catalog import Catalog, Entry, Ranges, catalog, overlaps, streams
from headrace.drop.filesystems import Place
from headrace.drop.footer import (
    UNREADABLE,
    DropFile,
    Footer,
    gap_between,
    in_threads,
    opened,
    unreadable,
)

Progress = Callable[[int, int], None]
"""Takes how many bytes of files were done since the last call, and of how many; called from several threads."""


class Problem(NamedTuple):
    file: str  # with the directory that was given
    kind: str  # a word: unreadable, version, schema, metadata, rows, range, order, …
    reason: str  # a sentence about the file


class Missing(NamedTuple):
    """Offsets that no file has and nothing explains."""

    node: str
    log: str
    first: int
    last: int
    before: str  # the file behind them


@dataclass
class Verified:
    """What was found."""

    files: int = 0
    compacted_files: int = 0
    rows: int = 0  # of the drop's own files
    compacted_rows: int = 0
    bytes: int = 0
    lost: int = 0  # offsets that the log itself had lost, as the files say
    gone: int = 0  # files that were removed while this ran
    problems: list[Problem] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return not self.problems and not self.missing


@dataclass(slots=True)
class _File:
    """One file on its way: what was found out about it."""

    place: Place
    entry: Entry
    footer: Footer | None = None
    gone: bool = False
    problems: list[Problem] = field(default_factory=list)

    def note(self, kind: str, reason: str) -> None:
        problem = Problem(self.place.full(self.entry.path), kind, reason)
        if problem not in self.problems:  # the rows may say again what the footer said
            self.problems.append(problem)


def verify(
    drop: Place,
    compacted: Place | None = None,
    *,
    quick: bool = False,
    progress: Progress = lambda done, total: None,
) -> Verified:
    """Checks a drop directory, and that of its compacted files. `quick` reads names and footers only."""
    # In this order: a file that is compacted and removed in between is then in the second listing.
    listed = catalog(drop)
    merged = catalog(compacted) if compacted is not None else Catalog([], [])
    originals = {entry: _File(drop, entry) for entry in listed.entries}
    covering = {entry: _File(compacted, entry) for entry in merged.entries} if compacted is not None else {}
    found = Verified()
    _strangers(found, drop, listed)
    if compacted is not None:
        _strangers(found, compacted, merged)
    _overlaps(originals, covering)
    work = list(_work(originals, covering))
    total = sum(one.bytes for one in work)

    def check(one: "_Work") -> None:
        _check(one, quick=quick)
        progress(one.bytes, total)

    in_threads(check, work)
    _sum_up(found, originals, covering)
    _find_missing(found, originals, covering)
    return found


def _strangers(found: Verified, place: Place, listed: Catalog) -> None:
    for path in listed.strangers:
        reason = "it is not named as a drop file is, and a reader of the directory would read it"
        found.problems.append(Problem(place.full(path), "name", reason))


def _overlaps(originals: dict[Entry, _File], covering: dict[Entry, _File]) -> None:
    for files in (originals, covering):
        for one, other in overlaps(files):
            files[other].note("overlap", f"its offsets are in {one.path} too")
    ranges = Ranges(covering)
    for entry in originals:
        for cover in ranges.touching(entry.name):
            if not cover.name.covers(entry.name):
                covering[cover].note("overlap", f"it covers a part of {entry.path}, but not all of it")
            elif cover.directory != entry.directory:
                covering[cover].note("hour", f"it covers {entry.path}, which is of another hour")


def _sum_up(found: Verified, originals: dict[Entry, _File], covering: dict[Entry, _File]) -> None:
    for file in (*originals.values(), *covering.values()):
        found.problems += file.problems
        found.gone += file.gone
        found.bytes += file.entry.size
    found.files = len(originals)
    found.compacted_files = len(covering)
    found.rows = sum(file.footer.rows for file in originals.values() if file.footer)
    found.compacted_rows = sum(file.footer.rows for file in covering.values() if file.footer)
    found.lost = sum(file.footer.lost for file in originals.values() if file.footer)


def _find_missing(found: Verified, originals: dict[Entry, _File], covering: dict[Entry, _File]) -> None:
    """Goes along the ranges of all files. What is before the first one was pruned, or is elsewhere."""
    files = {entry: file for entry, file in (*originals.items(), *covering.items()) if not file.gone}
    for (node, log), entries in streams(files).items():
        farthest = entries[0]
        for entry in entries[1:]:
            footer = files[entry].footer
            gap = gap_between(farthest, entry, footer.empty_before if footer else 0)
            if gap is not None:
                found.missing.append(Missing(node, log, *gap, files[entry].place.full(entry.path)))
            if entry.name.last > farthest.name.last:
                farthest = entry


# --- one file, or a compacted one with those it was made from ------------------------------------------------


class _Work(NamedTuple):
    file: _File
    parts: list[_File]  # the originals that a compacted file covers, by offset

    @property
    def bytes(self) -> int:
        return self.file.entry.size + sum(part.entry.size for part in self.parts)


def _work(originals: dict[Entry, _File], covering: dict[Entry, _File]) -> Iterator[_Work]:
    left = dict(originals)
    ranges = Ranges(originals)
    for entry, file in covering.items():
        covered = [one for one in ranges.inside(entry.name) if left.pop(one, None) is not None]
        yield _Work(file, [originals[one] for one in covered])
    for file in left.values():
        yield _Work(file, [])


def _check(work: _Work, *, quick: bool) -> None:
    with _reading(work.file) as rows:
        for part in work.parts:
            with _reading(part) as original:
                if quick or original is None:
                    continue
                if rows is not None:
                    _compare(work.file, rows, part.entry, original)
                original.drain()
        if rows is not None:
            if not quick:
                rows.drain()
            _compare_counts(work)


@contextmanager
def _reading(file: _File) -> Iterator["_Rows | None"]:
    """Opens a file and notes what its footer says; gives its rows, or nothing where it cannot be read."""
    with ExitStack() as stack:
        rows = None
        try:
            rows = _Rows(file, stack.enter_context(opened(file.place, file.entry)))
        except FileNotFoundError:
            file.gone = True
        except UNREADABLE as error:
            file.note("unreadable", unreadable(error))
        yield rows


class _Rows:
    """The rows of a file as a stream from which any number can be taken. One that does not hold ends there."""

    def __init__(self, file: _File, opened_file: DropFile) -> None:
        self.file = file
        self.footer = file.footer = opened_file.footer
        self.broken = False
        for problem in self.footer.problems:
            file.note(*problem)
        self._batches = opened_file.batches(file.note)
        self._ahead: pa.RecordBatch | None = None

    def peek(self) -> pa.RecordBatch | None:
        """Rows that come next, at least one; nothing at the end."""
        while self._ahead is None or self._ahead.num_rows == 0:
            try:
                self._ahead = next(self._batches, None)
            except FileNotFoundError:
                self.file.gone = self.broken = True
                return None
            except UNREADABLE as error:
                self.broken = True
                self.file.note("unreadable", unreadable(error))
                return None
            if self._ahead is None:
                return None
        return self._ahead

    def skip(self, count: int) -> None:
        """Passes over rows that peek() gave."""
        assert self._ahead is not None
        self._ahead = self._ahead.slice(count)

    def pass_over(self, offset: int) -> None:
        """Passes over the rows before an offset."""
        while (ahead := self.peek()) is not None:
            before = bisect_left(range(ahead.num_rows), offset, key=partial(_offset, ahead))
            self.skip(before)
            if before < ahead.num_rows:
                break

    def drain(self) -> None:
        """Reads on to the end, for the sake of the checks."""
        while (ahead := self.peek()) is not None:
            self.skip(ahead.num_rows)


def _offset(batch: pa.RecordBatch, row: int) -> int:
    offset: int | None = batch.column("offset")[row].as_py()
    return -1 if offset is None else offset  # a null is noted elsewhere


def _compare(file: _File, rows: _Rows, part: Entry, original: _Rows) -> None:
    """Reads a compacted file and one of its originals side by side. What comes before is of originals that are gone."""
    if not rows.footer.schema.equals(original.footer.schema):
        file.note("content", f"its columns are not those of {part.path}")
        return
    rows.pass_over(part.name.first)
    while True:
        expected, found = original.peek(), rows.peek()
        if rows.broken or original.broken:
            return
        if expected is None:
            more = found is not None and _offset(found, 0) <= part.name.last
            if more:
                file.note("content", f"it has rows that are not in {part.path}")
            return
        count = min(expected.num_rows, found.num_rows) if found is not None else 0
        same = found is not None and found.slice(0, count).equals(expected.slice(0, count))
        if not same:
            file.note("content", f"its rows are not those of {part.path}")
            return
        rows.skip(count)
        original.skip(count)


def _compare_counts(work: _Work) -> None:
    footer = work.file.footer
    assert footer is not None
    if not work.parts:
        return
    known = sum(part.footer.rows for part in work.parts if part.footer is not None)
    if footer.rows < known or (footer.rows > known and _all_there(work)):
        work.file.note("content", f"it has {footer.rows} rows, and the files that it covers have {known}")


def _all_there(work: _Work) -> bool:
    """Whether every file that the compacted one was made from is still there."""
    at = work.file.entry.name.first
    for part in work.parts:
        if part.footer is None or part.entry.name.first - part.footer.empty_before > at:
            return False
        at = part.entry.name.last + 1
    return at == work.file.entry.name.last + 1
