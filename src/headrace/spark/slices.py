"""Parts of drop files, read as Arrow batches: which row groups a condition can need, and the rows of those. Runs where
Spark's Python workers run, and knows nothing of plans or progress."""

import datetime as dt
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.drop.catalog import Entry, hour_begin
from headrace.drop.filesystems import first_line, place
from headrace.drop.layout import MICROSECONDS_PER_HOUR
from headrace.spark.errors import SparkError

BATCH_BYTES: Final = 16 << 20  # about; a single row may have more
BATCH_ROWS: Final = 16_384
READ_BUFFER: Final = 1 << 20  # of each column: a row group is not read into memory as a whole

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True, slots=True)
class Slice:
    """The rows of one file with offsets from `first` to `last`, both included, in some row groups or in all."""

    where: str  # the drop directory, as a path or URI
    entry: Entry
    first: int
    last: int
    groups: tuple[int, ...] | None = None


class Condition(NamedTuple):
    """One thing that is asked of every row: `column` `operator` `value`. Null is never what is asked for."""

    column: str
    operator: str  # =, in, <, <=, >, >=, or starts
    value: Any

    def rows(self, batch: pa.RecordBatch) -> pa.Array:
        """Whether each row fits."""
        column = batch.column(self.column)
        match self.operator:
            case "in":
                return pc.is_in(column, pa.array(self.value, column.type))
            case "starts":
                return pc.starts_with(column, self.value)
        compare = {"=": "equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}
        return pc.call_function(compare[self.operator], [column, pa.scalar(self.value, column.type)])

    def possible(self, low: Any, high: Any) -> bool:
        """Whether a row can fit, where the least value is `low` and the greatest `high`."""
        match self.operator:
            case "=":
                return bool(low <= self.value <= high)
            case "in":
                return any(low <= one <= high for one in self.value)
            case "starts":
                return bool(low[: len(self.value)] <= self.value <= high[: len(self.value)])
            case "<":
                return bool(low < self.value)
            case "<=":
                return bool(low <= self.value)
            case ">":
                return bool(high > self.value)
        return bool(high >= self.value)


def may_have(entry: Entry, conditions: Iterable[Condition]) -> bool:
    """Whether a file can have a row that fits, by its path alone."""
    begin = _EPOCH + dt.timedelta(microseconds=hour_begin(entry.directory))
    hour = dt.timedelta(microseconds=MICROSECONDS_PER_HOUR - 1)
    known = {
        "node": (entry.name.node, entry.name.node),
        "log": (entry.name.log, entry.name.log),
        "offset": (entry.name.first, entry.name.last),
        "ts": (begin, begin + hour),
        "date": (begin.date(), begin.date()),
        "hour": (begin.hour, begin.hour),
    }
    return all(one.possible(*known[one.column]) for one in conditions if one.column in known)


def read_slice(
    part: Slice, schema: pa.Schema, conditions: Sequence[Condition] = (), *, ignore_missing: bool = False
) -> Iterator[pa.RecordBatch]:
    """The rows in a schema whose columns are some of a drop's, `date` and `hour` among them; what the file does not
    have is null."""
    directory = place(part.where)
    try:
        source = directory.open(part.entry.path)
    except FileNotFoundError:
        if ignore_missing:
            return
        raise SparkError(
            f"{directory.full(part.entry.path)} is gone, though it was there when this was planned. It was pruned, "
            "cleaned away or compacted too soon; where that loss is accepted, set failOnDataLoss to false."
        ) from None
    try:
        with source, pq.ParquetFile(source, buffer_size=READ_BUFFER, page_checksum_verification=True) as file:
            yield from _read(file, part, schema, conditions)
    except (OSError, pa.ArrowException) as error:
        raise SparkError(f"{directory.full(part.entry.path)} cannot be read: {first_line(error)}") from error


def _read(
    file: pq.ParquetFile, part: Slice, schema: pa.Schema, conditions: Sequence[Condition]
) -> Iterator[pa.RecordBatch]:
    wanted = {*schema.names, *(one.column for one in conditions), "offset"}
    columns = [name for name in file.schema_arrow.names if name in wanted]
    within = (Condition("offset", ">=", part.first), Condition("offset", "<=", part.last))
    trimmed = part.first > part.entry.name.first or part.last < part.entry.name.last
    asked = [*(within if trimmed else ()), *conditions]
    full = pa.schema([*schema, *(_field(file, name) for name in columns if name not in schema.names)])
    for number in range(file.num_row_groups) if part.groups is None else part.groups:
        group = file.metadata.row_group(number)
        if not _may_have(group, asked):
            continue
        rows = max(1, min(BATCH_ROWS, group.num_rows * BATCH_BYTES // max(1, group.total_byte_size)))
        for batch in file.iter_batches(rows, row_groups=[number], columns=columns, use_threads=False):
            whole = _complete(batch, full, part.entry)
            for one in asked:
                if one.column in full.names:
                    whole = whole.filter(one.rows(whole))
            if whole.num_rows:
                yield pa.RecordBatch.from_arrays([whole.column(name) for name in schema.names], schema=schema)


def _field(file: pq.ParquetFile, name: str) -> pa.Field:
    field = file.schema_arrow.field(name)
    return field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field


def _complete(batch: pa.RecordBatch, schema: pa.Schema, entry: Entry) -> pa.RecordBatch:
    """The batch with all columns of a schema, in its types."""
    begin = _EPOCH + dt.timedelta(microseconds=hour_begin(entry.directory))
    constant = {"date": begin.date(), "hour": begin.hour}
    columns = []
    for field in schema:
        if field.name in constant:
            columns.append(pa.repeat(pa.scalar(constant[field.name], field.type), batch.num_rows))
        elif field.name in batch.schema.names:
            column = batch.column(field.name)
            columns.append(column if column.type == field.type else column.cast(field.type))
        else:
            columns.append(pa.nulls(batch.num_rows, field.type))
    return pa.RecordBatch.from_arrays(columns, names=schema.names)


def _may_have(group: Any, conditions: Iterable[Condition]) -> bool:
    """Whether a row group can have a row that fits, by its statistics."""
    asked = list(conditions)
    for number in range(group.num_columns if asked else 0):
        column = group.column(number)
        statistics = column.statistics
        if statistics is None or not statistics.has_min_max:
            continue
        for one in asked:
            if one.column == column.path_in_schema and not one.possible(statistics.min, statistics.max):
                return False
    return True
