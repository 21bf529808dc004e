"""Drop files as a sink would have made them, without one."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.drop import FileName, arrow_schema, hour_directory

LOG = "0123456789abcdef" * 2
OTHER_LOG = "fedcba9876543210" * 2
BEGIN = datetime(2026, 1, 31, 7, 0, tzinfo=UTC)
Row = dict[str, Any]


def message(
    offset: int, *, node: str = "edge-1", log: str = LOG, ts: datetime | None = None, **more: Any
) -> Row:
    """A row: one a second, all different."""
    return {
        "node": node,
        "log": log,
        "offset": offset,
        "ts": ts or BEGIN + timedelta(seconds=offset),
        "protocol": "blipmq",
        "topic": f"site.{offset % 3}",
        "kind": 0,
        "source": f"key@{offset % 2}",
        "correlation": offset,
        "headers": [("n", str(offset))],
        "part_sizes": None,
        "payload": json.dumps({"n": offset}).encode(),
        **more,
    }


def write_file(
    directory: Path,
    rows: Sequence[Row],
    *,
    first: int | None = None,
    last: int | None = None,
    leave_out: Iterable[str] = (),
    payload_json: bool = False,
    metadata: Mapping[bytes, bytes] | None = None,
    row_group_size: int | None = None,
) -> Path:
    """Writes rows of one hour, node and log; `first` and `last` where the range is wider than the rows."""
    name = FileName(
        rows[0]["node"],
        rows[0]["log"],
        rows[0]["offset"] if first is None else first,
        rows[-1]["offset"] if last is None else last,
    )
    hours = {hour_directory(int(row["ts"].timestamp() * 1_000_000)) for row in rows}
    assert len(hours) == 1, "a file has rows of one hour"
    path = directory / hours.pop() / str(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = arrow_schema(list(leave_out), payload_json=payload_json)
    schema = schema.with_metadata({**schema.metadata, **(metadata or {})})
    table = pa.Table.from_pylist([{key: row.get(key) for key in schema.names} for row in rows], schema)
    # Appears at once, as a sink's does.
    staged = directory / "_staging" / path.name
    staged.parent.mkdir(exist_ok=True)
    pq.write_table(table, staged, row_group_size=row_group_size)
    staged.rename(path)
    return path


def write_range(directory: Path, first: int, last: int, **more: Any) -> Path:
    """A file with a message for each offset; what write_file() does not take goes to message()."""
    names = ("leave_out", "payload_json", "metadata", "row_group_size")
    options = {key: more.pop(key) for key in names if key in more}
    return write_file(directory, [message(offset, **more) for offset in range(first, last + 1)], **options)
