"""The drop directory as a data source of Spark, `format("headrace")`, for batches and for streams.

A stream's progress is the next offset of every node and log, whatever the files are called that have it. So its
checkpoint stays small, and files may be compacted or cleaned away behind it. Reads with pyarrow, in Spark's Python
workers: executors need the package, and nothing of the driver's.
"""

import datetime as dt
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import datasource as api
from pyspark.sql import types as T

from headrace.drop.catalog import Entry, catalog, choose, streams
from headrace.drop.filesystems import Place, place
from headrace.drop.schema import EMPTY_BEFORE_KEY
from headrace.spark.errors import SparkError
from headrace.spark.schema import arrow_fields, drop_schema
from headrace.spark.slices import Condition, Slice, may_have, read_slice

try:  # Spark 4.2 has limits and available-now triggers for sources in Python
    from pyspark.sql.streaming import datasource as limits
except ImportError:
    limits = None  # type: ignore[assignment]

NAME: Final = "headrace"

SPLIT_BYTES: Final = 64 << 20  # of a file: what one task reads, about
OPEN_BYTES: Final = (
    4 << 20
)  # what opening a file costs, in bytes that could be read meanwhile (as Spark counts)
MAX_FILES: Final = 1000  # in a stream's batch, unless told

Progress = dict[str, int]
"""By "node/log": the next offset. A log that is not named begins with its first file."""

_STREAM: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[0-9a-f]{32}")
_OPERATORS: Final = {
    "EqualTo": "=",
    "In": "in",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "StringStartsWith": "starts",
}
# What names, directories and statistics can tell; other filters would only be evaluated twice.
_PUSHED: Final[dict[str, type]] = {
    **dict.fromkeys(("node", "log", "protocol", "topic", "source"), str),
    **dict.fromkeys(("offset", "kind", "hour"), int),
    "ts": dt.datetime,
    "date": dt.date,
}


def register(spark: SparkSession) -> None:
    """Makes `format("headrace")` known to a session."""
    spark.dataSource.register(HeadraceSource)


@dataclass(frozen=True)
class Options:
    """What was said with option(); names do not depend on their case."""

    path: str
    compacted: str | None
    columns: tuple[str, ...]
    payload_json: bool
    starting_offsets: str | Progress
    max_files: int | None
    max_rows: int | None
    fail_on_data_loss: bool
    pushdown: bool

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        given = {key.lower(): value for key, value in options.items()}

        def truth(name: str, default: bool) -> bool:
            text = given.pop(name.lower(), str(default)).lower()
            if text not in ("true", "false"):
                raise SparkError(f"{name} is true or false, not {text!r}.")
            return text == "true"

        def number(name: str) -> int | None:
            text = given.pop(name.lower(), None)
            if text is None:
                return None
            if not text.isdecimal() or int(text) < 1:
                raise SparkError(f"{name} is a number from 1 on, not {text!r}.")
            return int(text)

        path = given.pop("path", "")
        if not path:
            raise SparkError('The source needs the drop directory: load(path), or option("path", …).')
        columns = tuple(name.strip() for name in given.pop("columns", "").split(",") if name.strip())
        max_files, max_rows = number("maxFilesPerTrigger"), number("maxRowsPerTrigger")
        if max_files and max_rows:
            raise SparkError("Give maxFilesPerTrigger or maxRowsPerTrigger, not both.")
        if (max_files or max_rows) and limits is None:
            raise SparkError("maxFilesPerTrigger and maxRowsPerTrigger need Spark 4.2 or later.")
        made = cls(
            path=_absolute(path),
            compacted=_absolute(given["compacted"]) if given.get("compacted") else None,
            columns=columns,
            payload_json=truth("payloadJson", False) or "payload_json" in columns,
            starting_offsets=_starting_offsets(given.pop("startingoffsets", "earliest")),
            max_files=max_files or (None if max_rows else MAX_FILES),
            max_rows=max_rows,
            fail_on_data_loss=truth("failOnDataLoss", True),
            pushdown=truth("pushdown", False),
        )
        given.pop("compacted", None)
        if given:
            raise SparkError(f"The source has no option {', '.join(sorted(given))}.")
        return made


def _absolute(path: str) -> str:
    """Workers have another working directory."""
    where = place(path)
    return str(getattr(where, "base", path)) if where.local else path


def _starting_offsets(text: str) -> str | Progress:
    if text.lower() in ("earliest", "latest"):
        return text.lower()
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict) or not all(
        _STREAM.fullmatch(key) and type(value) is int and value >= 0 for key, value in given.items()
    ):
        raise SparkError(
            'startingOffsets is "earliest", "latest" or a JSON object of offsets by node and log, '
            f'{{"edge-1/0123…": 0}}, not {text!r}.'
        )
    return given


class HeadraceSource(api.DataSource):
    """What register() makes known to Spark."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> T.StructType:
        options = Options.parse(self.options)
        known = drop_schema(options.payload_json)
        if unknown := [name for name in options.columns if name not in known.names]:
            raise SparkError(f"A drop has no column {', '.join(unknown)}; it has {', '.join(known.names)}.")
        if len(set(options.columns)) != len(options.columns):
            raise SparkError("columns names a column twice.")
        return T.StructType([known[name] for name in options.columns]) if options.columns else known

    def reader(self, schema: T.StructType) -> api.DataSourceReader:
        options = Options.parse(self.options)
        _check_schema(schema)
        return PushdownReader(options, schema) if options.pushdown else BatchReader(options, schema)

    def streamReader(self, schema: T.StructType) -> "StreamReader":
        _check_schema(schema)
        return StreamReader(Options.parse(self.options), schema)


def _check_schema(schema: T.StructType) -> None:
    """A schema that the user gave has to be a part of the drop's."""
    known = drop_schema(payload_json=True)
    for field in schema:
        if field.name not in known.names or known[field.name].dataType != field.dataType:
            raise SparkError(
                f"A drop has no column {field.name} of the type {field.dataType.simpleString()}; leave the schema to "
                "the source, and choose with the option columns."
            )


class Part(api.InputPartition):
    """What one task reads."""

    def __init__(self, slices: tuple[Slice, ...]) -> None:
        super().__init__(slices)
        self.slices = slices


class Listing:
    """The drop directory, and that of compacted files, as they were at one time: each offset in one file."""

    def __init__(self, options: Options) -> None:
        self.place = place(options.path)
        self.compacted = place(options.compacted) if options.compacted is not None else None
        for one in (self.place, self.compacted):
            # A store of objects has no empty directories, so nothing there means nothing yet.
            if one is not None and one.local and not one.exists():
                raise SparkError(f"There is no drop directory {one}.")
        originals = catalog(self.place).entries
        merged = catalog(self.compacted).entries if self.compacted is not None else []
        chosen = choose(originals, merged)
        self._homes = dict.fromkeys(chosen.drop, self.place)
        if self.compacted is not None:
            self._homes |= dict.fromkeys(chosen.compacted, self.compacted)
        self.streams = {"/".join(key): files for key, files in streams(self._homes).items()}
        self._empty_before: dict[Entry, int] = {}

    def files(self) -> list[tuple[Entry, Place]]:
        """By hour, and each with the directory that it is in."""
        return sorted(self._homes.items(), key=lambda item: item[0])

    def home(self, entry: Entry) -> Place:
        return self._homes[entry]

    def ends(self) -> Progress:
        return {stream: files[-1].name.last + 1 for stream, files in self.streams.items()}

    def empty_before(self, entry: Entry) -> int:
        """How many offsets before a file's first one are known to have no row."""
        if entry not in self._empty_before:
            try:
                with self.home(entry).open(entry.path) as source:
                    text = (pq.read_metadata(source).metadata or {}).get(EMPTY_BEFORE_KEY, b"0")
            except FileNotFoundError:  # so it explains nothing
                text = b"0"
            self._empty_before[entry] = int(text) if text.isdigit() else 0
        return self._empty_before[entry]

    def gaps(self, start: Progress, end: Progress | None = None) -> Iterator[tuple[str, int, int]]:
        """Offsets from `start` on (and before `end`) that are in no file and that nothing explains: the stream, the
        first and the last of them."""
        for stream in self.streams.keys() | (end or {}).keys():
            upto = None if end is None else end.get(stream, 0)
            reached = start.get(stream)
            for entry in self.streams.get(stream, []):
                name = entry.name
                if upto is not None and (reached or 0) >= upto:
                    break
                if reached is not None and name.last < reached:
                    continue
                if reached is not None and name.first > reached:
                    last = name.first - 1 - self.empty_before(entry)
                    if reached <= last:
                        yield stream, reached, last if upto is None else min(last, upto - 1)
                reached = name.last + 1
            if upto is not None and (reached or 0) < upto:
                yield stream, reached or 0, upto - 1


class BatchReader(api.DataSourceReader):
    """Reads what is there when the query is planned."""

    def __init__(self, options: Options, schema: T.StructType) -> None:
        self.options = options
        self.schema = schema
        self.conditions: list[Condition] = []

    def partitions(self) -> list[api.InputPartition]:
        listing = Listing(self.options)
        return list(
            _parts(
                Slice(str(home), entry, entry.name.first, entry.name.last)
                for entry, home in listing.files()
                if may_have(entry, self.conditions)
            )
        )

    def read(self, partition: api.InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition, self.schema, self.options, self.conditions)


class PushdownReader(BatchReader):
    """The same, and leaves out what Spark's filters cannot need. Spark 4.0 never asks it to.

    Only for who asks for it: Spark (4.3 was tried) keeps the plan of the last filters with the DataFrame, and uses it
    for the DataFrame's other queries too, which then miss rows. The source is not asked again, so it cannot tell.
    """

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:
        self.conditions = [made for one in filters if (made := _condition(one)) is not None]
        # Spark evaluates all of them again: what is left out here is only what cannot matter.
        return filters


def _condition(given: Any) -> Condition | None:
    """A filter of Spark's as a condition, if files can be chosen by it."""
    operator = _OPERATORS.get(type(given).__name__)
    if operator is None or len(given.attribute) != 1 or given.attribute[0] not in _PUSHED:
        return None
    column = given.attribute[0]
    values = [one for one in given.value if one is not None] if operator == "in" else [given.value]
    if not all(type(one) is _PUSHED[column] for one in values):
        return None
    if column == "ts":
        values = [one.astimezone(dt.UTC) if one.tzinfo else one.replace(tzinfo=dt.UTC) for one in values]
    return Condition(column, operator, tuple(values) if operator == "in" else values[0])


_Available: Any = limits.SupportsTriggerAvailableNow if limits is not None else object


class StreamReader(api.DataSourceStreamReader, _Available):  # type: ignore[misc]
    """Reads what comes, in order of its offsets, and every offset once."""

    def __init__(self, options: Options, schema: T.StructType) -> None:
        self.options = options
        self.schema = schema
        self._listing: Listing | None = None  # the newest
        self._initial: Progress | None = None
        self._begun = False
        self._target: Progress | None = None  # where a query ends that reads what was there when it began

    def initialOffset(self) -> Progress:
        # Spark asks again until a batch has been committed, and must hear the same.
        if self._initial is None:
            match self.options.starting_offsets:
                case "earliest":
                    self._initial = {}
                case "latest":
                    self._initial = self._list().ends()
                case dict() as given:
                    self._initial = given
        assert self._initial is not None
        return dict(self._initial)

    def getDefaultReadLimit(self) -> Any:
        if self.options.max_rows is not None:
            return limits.ReadMaxRows(self.options.max_rows)
        return limits.ReadMaxFiles(self.options.max_files or MAX_FILES)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._list().ends()

    # Spark 4.0 and 4.1 call it with nothing, and have no limits.
    def latestOffset(self, start: Progress | None = None, limit: Any = None) -> Progress:
        if start is None:
            start = self.initialOffset()
            listing = self._list_whole({})
            return {**start, **_later(start, listing.ends())}
        if self.options.starting_offsets == "latest" and not self._begun and start == self._initial:
            # The first batch is empty and fixes where the stream begins: it would begin elsewhere if it were killed
            # now and asked again for the latest offsets.
            self._begun = True
            return start
        listing = self._list_whole(start)
        self._check(listing.gaps(start, self._target), listing)
        return _advance(start, listing, self._target, limit)

    def reportLatestOffset(self) -> Progress | None:
        return self._listing.ends() if self._listing is not None else None

    def partitions(self, start: Progress, end: Progress) -> list[api.InputPartition]:
        advanced = {stream: upto for stream, upto in end.items() if start.get(stream, 0) < upto}
        if not advanced:
            return []
        listing = self._listing
        if listing is None or any(True for _ in listing.gaps(start, advanced)):
            listing = self._list()
        self._check(listing.gaps(start, advanced), listing)
        return list(_parts(_slices(listing, start, advanced)))

    def read(self, partition: api.InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition, self.schema, self.options, ())

    def _list(self) -> Listing:
        self._listing = Listing(self.options)
        return self._listing

    def _list_whole(self, start: Progress) -> Listing:
        """A listing that has every file before the last one of its stream.

        Directories are listed one after the other, and files come meanwhile: a listing may have a file of this hour
        and not yet the one before it, of the last hour. It was committed before, so another listing has it.
        """
        listing = self._list()
        begun = {stream: start.get(stream, 0) for stream in listing.streams}
        if any(True for _ in listing.gaps(begun)):
            listing = self._list()
        return listing

    def _check(self, gaps: Iterable[tuple[str, int, int]], listing: Listing) -> None:
        for stream, first, last in gaps:
            text = (
                f"The offsets {first} to {last} of {stream} are in no file of {listing.place} any more, and this "
                "stream has not read them. They were pruned or cleaned away too soon, or the log has lost them; "
                "where that loss is accepted, set failOnDataLoss to false."
            )
            if self.options.fail_on_data_loss:
                raise SparkError(text)
            print(f"headrace: {text}", file=sys.stderr)


def _later(start: Progress, ends: Progress) -> Progress:
    return {stream: end for stream, end in ends.items() if end > start.get(stream, 0)}


def _advance(start: Progress, listing: Listing, target: Progress | None, limit: Any) -> Progress:
    """How far a batch goes: by hours, so that no log runs ahead of the others in time, and by turns in an hour."""
    files = rows = sys.maxsize
    match type(limit).__name__:
        case "ReadMaxFiles":
            files = limit.max_files
        case "ReadMaxRows":
            rows = limit.max_rows
    waiting = []
    for stream, entries in listing.streams.items():
        upto = sys.maxsize if target is None else target.get(stream, 0)
        hour, turn = "", 0
        for entry in entries:
            if entry.name.last < start.get(stream, 0) or entry.name.first >= upto:
                continue
            # Offsets decide, should the hours ever go back.
            turn = turn + 1 if entry.directory <= hour else 0
            hour = max(hour, entry.directory)
            waiting.append((hour, turn, stream, entry.name.first, entry))
    end = dict(start)
    for _, _, stream, _, entry in sorted(waiting, key=lambda one: one[:4]):
        if not files or not rows:
            break
        # There are at most as many rows as offsets.
        begin = max(end.get(stream, 0), entry.name.first)
        last = min(entry.name.last, begin + rows - 1)
        end[stream] = last + 1
        files -= 1
        rows -= last + 1 - begin
    return end


def _slices(listing: Listing, start: Progress, end: Progress) -> Iterator[Slice]:
    for stream, upto in sorted(end.items()):
        for entry in listing.streams.get(stream, []):
            first, last = max(entry.name.first, start.get(stream, 0)), min(entry.name.last, upto - 1)
            if first <= last:
                yield Slice(str(listing.home(entry)), entry, first, last)


def _parts(slices: Iterable[Slice]) -> Iterator[Part]:
    """Small files together, large ones by row groups."""
    gathered: list[Slice] = []
    size = 0
    for one in slices:
        if one.entry.size > 2 * SPLIT_BYTES:
            yield from (Part((part,)) for part in _split(one))
            continue
        cost = one.entry.size + OPEN_BYTES
        if gathered and size + cost > SPLIT_BYTES:
            yield Part(tuple(gathered))
            gathered, size = [], 0
        gathered.append(one)
        size += cost
    if gathered:
        yield Part(tuple(gathered))


def _split(one: Slice) -> Iterator[Slice]:
    try:
        with place(one.where).open(one.entry.path) as source:
            metadata = pq.read_metadata(source)
    except FileNotFoundError:  # which the task will say
        yield one
        return
    groups: list[int] = []
    size = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        groups.append(number)
        size += sum(group.column(column).total_compressed_size for column in range(group.num_columns))
        if size >= SPLIT_BYTES:
            yield replace(one, groups=tuple(groups))
            groups, size = [], 0
    if groups:
        yield replace(one, groups=tuple(groups))


def _read(
    partition: api.InputPartition, schema: T.StructType, options: Options, conditions: Sequence[Condition]
) -> Iterator[pa.RecordBatch]:
    if not isinstance(partition, Part):  # Spark's own, where there are none
        return
    wanted = arrow_fields(schema)
    for part in partition.slices:
        yield from read_slice(part, wanted, conditions, ignore_missing=not options.fail_on_data_loss)
