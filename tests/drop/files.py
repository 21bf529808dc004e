"""Makes drop files as the sink does, right ones and wrong ones, and reads whole drops back."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.drop import FileName, arrow_schema
from headrace.drop.catalog import Selection, hour_begin
from headrace.drop.filesystems import Place
from headrace.drop.parquet import writer
from headrace.drop.schema import EMPTY_BEFORE_KEY, FILTERED_KEY, MISSING_KEY, VERSION_KEY

LOG = "0123456789abcdef" * 2
OTHER_LOG = "f" * 32
HOUR = "date=2026-01-31/hour=07"
NEXT_HOUR = "date=2026-01-31/hour=08"
LATER = hour_begin(NEXT_HOUR) / 1e6 + 86_400  # a moment at which both are long over
MANY = 5_000_000  # more offsets than an hour of these rows has


def moment(offset: int, hour: str = HOUR) -> int:
    """The time of a row: later with every offset, and never out of its hour."""
    return hour_begin(hour) + offset * 600 % 3_600_000_000


def payload(offset: int) -> bytes:
    return b"%d:" % offset + bytes((offset * 7 + i) % 256 for i in range(offset % 40))


def table(
    offsets: Sequence[int],
    *,
    node: str = "gw-1",
    log: str = LOG,
    hour: str = HOUR,
    dictionaries: bool = True,
    payload_json: bool = False,
    leave_out: Sequence[str] = (),
    **instead: Any,
) -> pa.Table:
    """Rows for offsets; `instead` has the values of columns that are to be otherwise."""
    count = len(offsets)
    values: dict[str, Any] = {
        "node": [node] * count,
        "log": [log] * count,
        "offset": list(offsets),
        "ts": [moment(offset, hour) for offset in offsets],
        "protocol": ["blipmq"] * count,
        "topic": [f"site.{offset % 5}" for offset in offsets],
        "kind": [0] * count,
        "source": [None if offset % 3 else f"dev@10.0.0.{offset % 4}" for offset in offsets],
        "correlation": [offset * 11 for offset in offsets],
        "headers": [None if offset % 4 else [("qos", str(offset % 2)), ("n", "ä")] for offset in offsets],
        "part_sizes": [[2, offset] if offset % 2 else None for offset in offsets],
        "payload": [payload(offset) for offset in offsets],
        "payload_json": [None if offset % 2 else str(offset) for offset in offsets],
    } | instead
    schema = arrow_schema(leave_out, payload_json=payload_json)
    columns, fields = [], []
    for field in schema:
        column = pa.array(values[field.name], field.type)
        if dictionaries and field.type == pa.string() and field.name != "payload_json":
            column = column.dictionary_encode()  # as the sink's columns are
        columns.append(column)
        fields.append(pa.field(field.name, column.type, field.nullable))
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=schema.metadata))


def put(
    drop: Path,
    first: int,
    last: int,
    *,
    offsets: Sequence[int] | None = None,
    rows: pa.Table | None = None,
    name_hour: str | None = None,
    name: FileName | None = None,
    row_group: int = 1000,
    filtered: bool = False,
    missing: Sequence[tuple[int, int]] | bytes = (),
    empty_before: int | bytes = 0,
    version: int | None = 1,
    **columns: Any,
) -> Path:
    """A file for the offsets from `first` to `last`, with a row for each, or for `offsets`, or with `rows`."""
    if rows is None:
        rows = table(range(first, last + 1) if offsets is None else offsets, **columns)
    file_name = name or FileName(columns.get("node", "gw-1"), columns.get("log", LOG), first, last)
    path = drop / (name_hour or columns.get("hour", HOUR)) / str(file_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {} if version is None else {VERSION_KEY: b"%d" % version}
    if filtered:
        metadata[FILTERED_KEY] = b"1"
    if missing:
        metadata[MISSING_KEY] = missing if isinstance(missing, bytes) else json.dumps(missing).encode()
    if empty_before:
        metadata[EMPTY_BEFORE_KEY] = empty_before if isinstance(empty_before, bytes) else b"%d" % empty_before
    schema = rows.schema if version is not None else rows.schema.remove_metadata()
    with writer(str(path), schema, metadata) as out:
        out.write_table(rows, row_group_size=row_group)
    return path


def read(place: Place, path: str) -> pa.Table:
    with place.open(path) as source, pq.ParquetFile(source) as file:
        return file.read(use_threads=False)


def rows_of(
    selection: Selection, drop: Place, compacted: Place | None = None
) -> list[tuple[str, str, int, bytes]]:
    """Every row of a selection as node, log, offset and payload, sorted."""
    found: list[tuple[str, str, int, bytes]] = []
    for place, entries in ((drop, selection.drop), (compacted, selection.compacted)):
        for entry in entries:
            assert place is not None
            rows = read(place, entry.path).select(["node", "log", "offset", "payload"])
            found += zip(*(column.to_pylist() for column in rows.columns), strict=True)
    return sorted(found)


def expected(offsets: Sequence[int], node: str = "gw-1", log: str = LOG) -> list[tuple[str, str, int, bytes]]:
    return [(node, log, offset, payload(offset)) for offset in offsets]
