"""Which files a drop directory has, by their names alone, and which of them a batch reader must read so that it sees
each row once. Opens no file."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from headrace.drop.errors import DropOverlap
from headrace.drop.filesystems import Place
from headrace.drop.layout import MICROSECONDS_PER_HOUR, FileName, parse_path


@dataclass(frozen=True, order=True, slots=True)
class Entry:
    """One file. Entries sort by hour, and within one by node, log and offset."""

    directory: str  # date=…/hour=…
    name: FileName
    size: int
    mtime: float  # seconds since the epoch

    @property
    def path(self) -> str:
        """Below the drop directory."""
        return f"{self.directory}/{self.name}"

    @property
    def begin(self) -> int:
        """When its hour begins, in microseconds since the epoch."""
        return hour_begin(self.directory)

    @property
    def end(self) -> int:
        """When its hour is over."""
        return self.begin + MICROSECONDS_PER_HOUR


def hour_begin(directory: str) -> int:
    """When the hour of `date=…/hour=…` begins, in microseconds since the epoch; ValueError where there is none such."""
    moment = datetime.strptime(directory, "date=%Y-%m-%d/hour=%H").replace(tzinfo=UTC)
    return int(moment.timestamp()) * 1_000_000


class Catalog(NamedTuple):
    """What is in a directory."""

    entries: list[Entry]  # sorted
    strangers: list[
        str
    ]  # paths of files that a reader of the directory would read, though they are no drop files


def catalog(place: Place) -> Catalog:
    """Lists a drop directory, or one of compacted files; one that does not exist is empty."""
    entries, strangers = [], []
    for found in place.files():
        entry = _entry(found.path, found.size, found.mtime)
        if entry is None:
            strangers.append(found.path)
        else:
            entries.append(entry)
    return Catalog(sorted(entries), sorted(strangers))


def _entry(path: str, size: int, mtime: float) -> Entry | None:
    parsed = parse_path(path) if path.count("/") == 2 else None
    if parsed is None:
        return None
    directory, name = parsed
    try:
        hour_begin(directory)
    except ValueError:  # a thirteenth month
        return None
    return Entry(directory, name, size, mtime)


def streams(entries: Iterable[Entry]) -> dict[tuple[str, str], list[Entry]]:
    """The files of each node and log, by offset."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in sorted(entries, key=lambda one: (one.name, one.directory)):
        found.setdefault(entry.name.stream, []).append(entry)
    return found


def overlaps(entries: Iterable[Entry]) -> Iterator[tuple[Entry, Entry]]:
    """Pairs of files that cover an offset both, each with the one before it that reaches farthest."""
    for files in streams(entries).values():
        farthest = files[0]
        for entry in files[1:]:
            if entry.name.first <= farthest.name.last:
                yield farthest, entry
            if entry.name.last > farthest.name.last:
                farthest = entry


class Selection(NamedTuple):
    """What to read, from where; both sorted."""

    drop: list[Entry]
    compacted: list[Entry]


class Ranges:
    """Files by the offsets that they cover. They must not overlap each other."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._streams = streams(entries)

    def touching(self, name: FileName) -> list[Entry]:
        """The files that have an offset in common with a range."""
        files = self._streams.get(name.stream, [])
        begin = bisect_left(files, name.first, key=lambda one: one.name.last)
        end = bisect_right(files, name.last, key=lambda one: one.name.first)
        return files[begin:end]

    def inside(self, name: FileName) -> list[Entry]:
        """The files that a range covers."""
        return [entry for entry in self.touching(name) if name.covers(entry.name)]

    def covering(self, entry: Entry) -> Entry | None:
        """The file that covers all of another one; DropOverlap where one covers only a part of it."""
        for found in self.touching(entry.name):
            if not found.name.covers(entry.name):
                raise _overlap(found, entry)
            return found
        return None


def choose(entries: Iterable[Entry], compacted: Iterable[Entry]) -> Selection:
    """The files that have each row once: all compacted ones, and those of the drop that none of them covers.

    The drop must have been listed first: then a file that was compacted and removed in between is in the compacted
    listing. DropOverlap where no selection can be right.
    """
    compacted = sorted(compacted)
    for one, other in overlaps(compacted):
        raise _overlap(one, other)
    ranges = Ranges(compacted)
    chosen = sorted(entry for entry in entries if ranges.covering(entry) is None)
    for one, other in overlaps(chosen):
        raise _overlap(one, other)
    return Selection(chosen, compacted)


def select(drop: Place, compacted: Place | None) -> Selection:
    """Lists both directories, in the order that choose() needs, and chooses."""
    entries = catalog(drop).entries
    return choose(entries, catalog(compacted).entries if compacted is not None else [])


def _overlap(one: Entry, other: Entry) -> DropOverlap:
    return DropOverlap(f"{one.path} and {other.path} cover the same offsets, so rows would be read twice")
