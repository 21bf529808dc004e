"""Merges the small files of hours that are over into larger ones, in a directory of their own, for batch readers. The
originals stay as they are. Wherever it is killed, nothing is lost or doubled: a compacted file appears whole, under a
name that says what it covers."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from headrace.drop.catalog import Entry, Ranges, catalog, overlaps, streams
from headrace.drop.errors import DropError, DropOverlap
from headrace.drop.filesystems import LOCK_SUFFIX, Place, first_line
from headrace.drop.footer import UNREADABLE, Footer, gap_between, opened, read_footers, unreadable
from headrace.drop.layout import STAGING, FileName
from headrace.drop.parquet import ROW_GROUP_BYTES, ROW_GROUP_ROWS, writer
from headrace.drop.schema import EMPTY_BEFORE_KEY, FILTERED_KEY, MISSING_KEY, VERSION_KEY

LOCK: Final = "compact"
TARGET_BYTES: Final = 128 << 20  # Spark's default split
CLOSED_AFTER: Final = (
    600.0  # longer than a file is open (drop.roll_seconds) by default, with time to catch up
)


class Source(NamedTuple):
    """A file to merge."""

    entry: Entry
    footer: Footer


@dataclass(frozen=True)
class Group:
    """Neighbours of one hour that become one file."""

    sources: tuple[Source, ...]

    @property
    def directory(self) -> str:
        return self.sources[0].entry.directory

    @property
    def name(self) -> FileName:
        first, last = self.sources[0].entry.name, self.sources[-1].entry.name
        return FileName(first.node, first.log, first.first, last.last)

    @property
    def path(self) -> str:
        return f"{self.directory}/{self.name}"

    @property
    def bytes(self) -> int:
        return sum(source.entry.size for source in self.sources)

    @property
    def rows(self) -> int:
        return sum(source.footer.rows for source in self.sources)


class Left(NamedTuple):
    """A file that was not compacted although its hour is over."""

    file: str
    reason: str


@dataclass
class Compacted:
    """What was done, or would be."""

    groups: list[Group] = field(default_factory=list)
    bytes: int = 0  # of the compacted files
    left: list[Left] = field(default_factory=list)


class _SourceFailed(Exception):
    """A source does not hold, or is gone, which is no reason; it is to be left out."""

    def __init__(self, entry: Entry, reason: str) -> None:
        self.entry = entry
        self.reason = reason


def compact(
    drop: Place,
    to: Place,
    *,
    target_bytes: int = TARGET_BYTES,
    closed_after: float = CLOSED_AFTER,
    now: float | None = None,
    dry_run: bool = False,
    each: Callable[[Group], None] = lambda group: None,
) -> Compacted:
    """Compacts every hour that has been over for `closed_after` seconds into files of about `target_bytes`. Tells
    `each` of every file that it has made. DropLocked where another one runs."""
    done = Compacted()
    moment = time.time() if now is None else now
    if dry_run:
        sources = _sources(drop, to, moment - closed_after, done)
        done.groups = list(_groups(sources, target_bytes))
        return done
    with to.lock(LOCK):
        _sweep(to)
        sources = _sources(drop, to, moment - closed_after, done)
        while True:
            try:
                for group in _groups(sources, target_bytes):
                    done.bytes += _merge(drop, to, group)
                    done.groups.append(group)
                    each(group)
                    finished = {source.entry for source in group.sources}
                    sources = [source for source in sources if source.entry not in finished]
                return done
            except _SourceFailed as failed:
                # Without it there is a gap, which no file may span; the others are grouped anew.
                if failed.reason:
                    done.left.append(Left(drop.full(failed.entry.path), failed.reason))
                sources = [source for source in sources if source.entry != failed.entry]


def _sweep(to: Place) -> None:
    """Removes what a compaction that was killed has left; the lock says that none is running."""
    for found in to.staged():
        if found.path.startswith(f"{STAGING}/") and not found.path.endswith(LOCK_SUFFIX):
            to.remove(found.path)


def _sources(drop: Place, to: Place, closed: float, done: Compacted) -> list[Source]:
    """The files of hours that were over at `closed`, which no compacted file covers yet, in their order."""
    entries = [entry for entry in catalog(drop).entries if entry.end <= closed * 1e6]
    present = Ranges(catalog(to).entries)
    doubtful = {entry for pair in overlaps(entries) for entry in pair}
    wanted = []
    for entry in entries:
        if entry in doubtful:
            done.left.append(Left(drop.full(entry.path), "another file covers some of its offsets, too"))
            continue
        try:
            if present.covering(entry) is None:
                wanted.append(entry)
        except DropOverlap:
            done.left.append(Left(drop.full(entry.path), "a compacted file covers a part of it"))
    sources = []
    for entry, footer in zip(wanted, read_footers(drop, wanted), strict=True):
        if footer is None:
            continue  # removed in between
        if footer.problems:
            done.left.append(Left(drop.full(entry.path), footer.problems[0][1]))
        else:
            sources.append(Source(entry, footer))
    return sources


def _groups(sources: Iterable[Source], target_bytes: int) -> Iterator[Group]:
    footers = {source.entry: source.footer for source in sources}
    for entries in streams(footers).values():
        group: list[Source] = []
        size = 0
        for source in (Source(entry, footers[entry]) for entry in entries):
            if group and (not _joins(group[-1], source) or size + source.entry.size > target_bytes):
                yield Group(tuple(group))
                group, size = [], 0
            group.append(source)
            size += source.entry.size
        yield Group(tuple(group))


def _joins(before: Source, after: Source) -> bool:
    """Whether two may be in one file. What lies between them and is not explained may come yet, or be elsewhere."""
    return (
        before.entry.directory == after.entry.directory
        and gap_between(before.entry, after.entry, after.footer.empty_before) is None
        and before.footer.version == after.footer.version
        and before.footer.schema.equals(after.footer.schema)
    )


def _merge(drop: Place, to: Place, group: Group) -> int:
    """Makes one compacted file; returns its size."""
    try:
        with to.stage(str(group.name)) as staged:
            _write(drop, group, staged)
            size = staged.stat().st_size
            if not to.local:
                _look_again(to, group)
            to.commit(staged, group.path)
            return size
    except (OSError, pa.ArrowException) as error:
        raise DropError(f"{to.full(group.path)} cannot be written: {first_line(error)}") from None


def _look_again(to: Place, group: Group) -> None:
    """There is no lock in an object store; a second compaction is at least noticed, if not always in time."""
    if found := Ranges(catalog(to).entries).touching(group.name):
        raise DropOverlap(f"{to.full(found[0].path)} has appeared: does another compaction run?")


def _write(drop: Place, group: Group, staged: Path) -> None:
    schema = group.sources[0].footer.schema
    with writer(str(staged), schema, _metadata(group)) as out:
        for row_group in _row_groups(chain.from_iterable(_read(drop, one) for one in group.sources)):
            out.write_table(row_group, row_group_size=ROW_GROUP_ROWS)


def _read(drop: Place, source: Source) -> Iterator[pa.RecordBatch]:
    """The rows of a source; one that does not hold must not get new checksums."""

    def note(kind: str, reason: str) -> None:
        raise _SourceFailed(source.entry, reason)

    try:
        with opened(drop, source.entry) as file:
            for batch in file.batches(note):
                yield batch.replace_schema_metadata(None)
    except FileNotFoundError:
        raise _SourceFailed(source.entry, "") from None
    except UNREADABLE as error:
        raise _SourceFailed(source.entry, unreadable(error)) from None


def _row_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Gathers rows into row groups of the size that the sink makes."""
    gathered: list[pa.RecordBatch] = []
    rows = size = 0
    for whole in batches:
        batch = whole
        while batch.num_rows:
            part = batch.slice(0, ROW_GROUP_ROWS - rows)
            batch = batch.slice(part.num_rows)
            gathered.append(part)
            rows += part.num_rows
            size += part.nbytes
            if rows == ROW_GROUP_ROWS or size >= ROW_GROUP_BYTES:
                yield pa.Table.from_batches(gathered)
                gathered, rows, size = [], 0, 0
    if gathered:
        yield pa.Table.from_batches(gathered)


def _metadata(group: Group) -> dict[bytes, bytes]:
    first = group.sources[0].footer
    metadata = {VERSION_KEY: str(first.version).encode()}
    if first.empty_before:
        metadata[EMPTY_BEFORE_KEY] = str(first.empty_before).encode()
    missing = [pair for source in group.sources for pair in source.footer.missing]
    if missing:
        metadata[MISSING_KEY] = json.dumps(missing).encode()
    offsets = sum(source.entry.name.last - source.entry.name.first + 1 for source in group.sources)
    between = group.name.last - group.name.first + 1 - offsets  # looked at, and empty
    if between or any(source.footer.filtered for source in group.sources):
        metadata[FILTERED_KEY] = b"1"
    return metadata
