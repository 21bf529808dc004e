"""One drop file, opened: what its footer says, whether that fits its name, and its rows with the same question. Knows
nothing of other files."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.drop.catalog import Entry
from headrace.drop.filesystems import Place, first_line
from headrace.drop.schema import (
    COLUMNS,
    EMPTY_BEFORE_KEY,
    FILTERED_KEY,
    KEY_COLUMNS,
    MISSING_KEY,
    OPTIONAL_COLUMNS,
    SCHEMA_VERSION,
    VERSION_KEY,
)

THREADS: Final = min(8, os.cpu_count() or 1)
READ_BUFFER: Final = 1 << 20  # of each column: a row group is not read into memory as a whole
BATCH_BYTES: Final = 16 << 20  # about; a single row may have more
BATCH_ROWS: Final = 65_536

_KNOWN: Final = {column.name: column for column in (*COLUMNS, *OPTIONAL_COLUMNS)}
_ORDER: Final = {name: place for place, name in enumerate(_KNOWN)}

_BOUNDED: Final = ("offset", "ts")  # columns whose statistics are checked

# What a Parquet file that does not hold can end in.
UNREADABLE: Final = (OSError, pa.ArrowException, ValueError)

Note = Callable[[str, str], None]
"""Takes a problem: its kind, in a word, and a sentence."""


@dataclass(slots=True)
class Footer:
    """What a file says of itself, and in which points it cannot be believed."""

    rows: int
    version: int = 0  # 0: it does not say
    filtered: bool = False
    empty_before: int = 0
    missing: tuple[tuple[int, int], ...] = ()
    schema: pa.Schema = field(default_factory=lambda: pa.schema([]))  # without metadata
    problems: list[tuple[str, str]] = field(default_factory=list)  # kind and sentence

    @property
    def lost(self) -> int:
        """How many offsets of its range the log had lost."""
        return sum(last - first + 1 for first, last in self.missing)


class DropFile:
    """A drop file that is open for reading."""

    def __init__(self, entry: Entry, parquet: pq.ParquetFile) -> None:
        self.entry = entry
        self.parquet = parquet
        self.footer = _examine(entry, parquet)

    def batches(self, note: Note) -> Iterator[pa.RecordBatch]:
        """Every row, with page checksums, some at a time; what does not fit the name or the footer is noted. Raises
        one of UNREADABLE where the file ends or does not hold."""
        if not set(KEY_COLUMNS) <= set(self.parquet.schema_arrow.names):
            return  # which the footer's problems say
        leaves = {
            self.parquet.schema.column(number).path: number for number in range(len(self.parquet.schema))
        }
        check = _Check(self.entry, note)
        metadata = self.parquet.metadata
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            rows = _rows_at_a_time(group)
            for batch in self.parquet.iter_batches(rows, row_groups=[number], use_threads=False):
                batch.validate(full=True)  # page headers have no checksum: a dictionary may be cut short
                check.batch(batch)
                yield batch
            # Only now: pyarrow ends the process where a column's metadata do not fit the schema, unless it reads it.
            check.end_of_group(
                group.num_rows, {name: _bounds(group.column(leaves[name])) for name in _BOUNDED}
            )
        check.end(self.footer)


@contextmanager
def opened(place: Place, entry: Entry) -> Iterator[DropFile]:
    """Opens a file; raises one of UNREADABLE where that cannot be done."""
    with (
        place.open(entry.path) as source,
        pq.ParquetFile(source, buffer_size=READ_BUFFER, page_checksum_verification=True) as parquet,
    ):
        yield DropFile(entry, parquet)


def read_footer(place: Place, entry: Entry) -> Footer:
    """A file's footer alone; raises one of UNREADABLE."""
    with opened(place, entry) as file:
        return file.footer


def read_footers(
    place: Place, entries: Iterable[Entry], each: Callable[[], None] = lambda: None
) -> list[Footer | None]:
    """The footers of many files; one with a single problem where a file cannot be read, and none where it is gone."""

    def read(entry: Entry) -> Footer | None:
        try:
            return read_footer(place, entry)
        except FileNotFoundError:
            return None
        except UNREADABLE as error:
            return Footer(0, problems=[("unreadable", unreadable(error))])
        finally:
            each()

    return in_threads(read, entries)


def in_threads(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Does the work for each item, some at a time; what it raises ends all."""
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="drop")
    try:
        return list(pool.map(work, items))
    finally:
        pool.shutdown(cancel_futures=True)


def unreadable(error: BaseException) -> str:
    return f"it cannot be read: {first_line(error)}"


def gap_between(before: Entry, after: Entry, empty_before: int) -> tuple[int, int] | None:
    """The offsets between two neighbours that nothing explains; `empty_before` is the later one's."""
    first, last = before.name.last + 1, after.name.first - 1 - empty_before
    return (first, last) if first <= last else None


def _rows_at_a_time(group: Any) -> int:
    size: int = max(1, group.total_byte_size)
    return max(1, min(BATCH_ROWS, int(group.num_rows) * BATCH_BYTES // size))


# --- the footer ---------------------------------------------------------------------------------------------


def _examine(entry: Entry, parquet: pq.ParquetFile) -> Footer:
    metadata = parquet.metadata
    keys: dict[bytes, bytes] = metadata.metadata or {}
    footer = Footer(metadata.num_rows)
    footer.schema = parquet.schema_arrow.remove_metadata()
    note = _noting(footer.problems)
    footer.version = _number(keys, VERSION_KEY, note)
    if footer.version == 0:
        note("version", "it has no schema version, so Headrace did not write it")
    elif footer.version > SCHEMA_VERSION:
        note(
            "version",
            f"its schema version {footer.version} is newer than the {SCHEMA_VERSION} that is known here",
        )
    footer.filtered = keys.get(FILTERED_KEY) == b"1"
    footer.empty_before = _number(keys, EMPTY_BEFORE_KEY, note)
    if footer.empty_before > entry.name.first:
        note("metadata", f"{footer.empty_before} empty offsets before {entry.name.first} are too many")
        footer.empty_before = entry.name.first
    footer.missing = _missing(entry, keys, note)
    _check_schema(footer, note)
    _check_rows(entry, footer, metadata, note)
    return footer


def _noting(problems: list[tuple[str, str]]) -> Note:
    return lambda kind, reason: problems.append((kind, reason))


def _number(keys: dict[bytes, bytes], key: bytes, note: Note) -> int:
    text = keys.get(key, b"0")
    if text.isdigit() and len(text) <= 20:
        return int(text)
    note("metadata", f"{key.decode()} is no number: {text[:40]!r}")
    return 0


def _missing(entry: Entry, keys: dict[bytes, bytes], note: Note) -> tuple[tuple[int, int], ...]:
    text = keys.get(MISSING_KEY)
    if text is None:
        return ()
    try:
        ranges = tuple((first, last) for first, last in json.loads(text))
        bounds = [entry.name.first - 1, *(bound for pair in ranges for bound in pair), entry.name.last + 1]
        # Ranges may be one offset long, but not touch backwards or leave the file's own.
        good = all(
            isinstance(low, int) and (low <= high if place % 2 else low < high)
            for place, (low, high) in enumerate(pairwise(bounds))
        )
    except (ValueError, TypeError, RecursionError):
        good = False
    if not good:
        note("metadata", f"{MISSING_KEY.decode()} is no list of ranges inside the file's own: {text[:80]!r}")
        return ()
    return ranges


def _check_schema(footer: Footer, note: Note) -> None:
    names = footer.schema.names
    for name in KEY_COLUMNS:
        if name not in names:
            note("schema", f"the column {name} is not there")
    for one in footer.schema:
        known = _KNOWN.get(one.name)
        if known is None:
            if footer.version <= SCHEMA_VERSION:
                note("schema", f"the column {one.name} is unknown")
        elif one.type != known.type:
            note("schema", f"the column {one.name} is {one.type}, not {known.type}")
    places = [_ORDER[name] for name in names if name in _ORDER]
    if len(set(names)) != len(names):
        note("schema", "a column is there twice")
    elif places != sorted(places):
        note("schema", f"its columns are not in order: {', '.join(names)}")


def _check_rows(entry: Entry, footer: Footer, metadata: Any, note: Note) -> None:
    groups = sum(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
    if groups != footer.rows:
        note("rows", f"its row groups have {groups} rows, but its footer says {footer.rows}")
    offsets = entry.name.last - entry.name.first + 1
    left = offsets - footer.lost
    if footer.rows > left:
        note("rows", f"it has {footer.rows} rows for {left} offsets")
    elif footer.rows < left and not footer.filtered:
        note(
            "rows",
            f"it has {footer.rows} rows for {offsets} offsets, and neither a filter nor losses of the log explain "
            f"why {left - footer.rows} are not there",
        )


# --- the rows -----------------------------------------------------------------------------------------------


def _bounds(column: Any) -> tuple[int, int] | None:
    """The least and the greatest value of a column in a row group by its statistics, which Spark skips by."""
    statistics = column.statistics
    if statistics is None or not statistics.has_min_max or statistics.physical_type != "INT64":
        return None
    return statistics.min_raw, statistics.max_raw


class _Check:
    """Follows the rows of one file. Notes each kind of problem once."""

    def __init__(self, entry: Entry, note: Note) -> None:
        self.entry = entry
        self.report = note
        self.noted: set[tuple[str, str]] = set()
        self.rows = 0
        self.group_rows = 0
        self.last = -1  # offset
        self.bounds: dict[str, tuple[int, int]] = {}  # of the row group

    def note(self, kind: str, reason: str) -> None:
        if (kind, reason) not in self.noted:
            self.noted.add((kind, reason))
            self.report(kind, reason)

    def batch(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.num_rows
        self.group_rows += batch.num_rows
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            known = _KNOWN.get(name)
            if known is not None and not known.nullable and column.null_count:
                self.note("null", f"the column {name} has nulls")
        self._offsets(batch.column("offset"))
        if not self._within("ts", batch.column("ts"), self.entry.begin, self.entry.end - 1):
            self.note("hour", f"it has times outside the hour of {self.entry.directory}")
        for name, value in (("node", self.entry.name.node), ("log", self.entry.name.log)):
            for found in batch.column(name).unique().to_pylist()[:3]:
                if found != value and found is not None:
                    self.note(name, f"it has rows of the {name} {found[:80]}")

    def _offsets(self, column: pa.Array) -> None:
        if not self._within("offset", column, self.entry.name.first, self.entry.name.last):
            self.note("range", "it has offsets outside the range in its name")
        if not len(column) or column.null_count:
            return
        begins = column[0].as_py()
        steady = pc.all(pc.less(column[:-1], column[1:])).as_py()  # nothing for a single row
        if begins <= self.last or steady is False:
            self.note("order", "its offsets do not ascend")
        self.last = column[-1].as_py()

    def _within(self, name: str, column: pa.Array, low: int, high: int) -> bool:
        least, greatest = pc.min_max(column.cast(pa.int64())).as_py().values()
        if least is None:
            return True
        before = self.bounds.get(name, (least, greatest))
        self.bounds[name] = (min(before[0], least), max(before[1], greatest))
        return bool(low <= least and greatest <= high)

    def end_of_group(self, rows: int, stated: dict[str, tuple[int, int] | None]) -> None:
        if self.group_rows != rows:
            self.note("rows", f"a row group has {self.group_rows} rows, not {rows}")
        for name, seen in self.bounds.items():
            if stated[name] is not None and stated[name] != seen:
                self.note("statistics", f"the statistics of the column {name} are wrong")
        self.group_rows = 0
        self.bounds = {}

    def end(self, footer: Footer) -> None:
        if self.rows != footer.rows:
            self.note("rows", f"it has {self.rows} rows, but its footer says {footer.rows}")
