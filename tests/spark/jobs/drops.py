"""Drop directories for the jobs' tests: files as a sink writes them, from a few words about their rows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import sleep
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.drop import FileName, arrow_schema, hour_directory
from headrace.drop.schema import EMPTY_BEFORE_KEY

START = datetime(2026, 1, 31, 7, 0, tzinfo=UTC)
LOG = "0123456789abcdef" * 2
# Spark takes files in the order of their times, and those of the same millisecond in any; a kernel's file times may go
# on in steps of some milliseconds.
CLOCK_SECONDS = 0.012


@dataclass
class Message:
    offset: int
    payload: bytes = b""
    ts: datetime = START
    topic: str = "site.temperature"
    source: str | None = "key@10.0.0.1:5000"
    protocol: str = "blipmq"
    headers: Mapping[str, str] | None = field(default=None)


def messages(first: int, last: int, **fields: Any) -> list[Message]:
    """One message a second from the first offset's second on, each payload another."""
    return [
        Message(
            **{
                "offset": offset,
                "payload": bytes([offset % 256, 0, 255]) * (offset % 7),
                "ts": START + timedelta(seconds=offset),
                **fields,
            }
        )
        for offset in range(first, last + 1)
    ]


def write_file(
    drop: Path,
    rows: Iterable[Message],
    *,
    node: str = "edge-1",
    log: str = LOG,
    covers: tuple[int, int] | None = None,
    empty_before: int = 0,
) -> Path:
    """A file of the drop with these rows, which are all of one hour."""
    rows = list(rows)
    first, last = covers or (rows[0].offset, rows[-1].offset)
    schema = arrow_schema()
    metadata = dict(schema.metadata or {})
    if empty_before:
        metadata[EMPTY_BEFORE_KEY] = str(empty_before).encode()
    values = [
        {
            "node": node,
            "log": log,
            "offset": row.offset,
            "ts": row.ts,
            "protocol": row.protocol,
            "topic": row.topic,
            "kind": 0,
            "source": row.source,
            "correlation": -row.offset,
            "headers": None if row.headers is None else list(row.headers.items()),
            "part_sizes": None,
            "payload": row.payload,
        }
        for row in rows
    ]
    directory = drop / hour_directory(int(rows[0].ts.timestamp()) * 1_000_000)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / str(FileName(node, log, first, last))
    sleep(CLOCK_SECONDS)
    pq.write_table(pa.Table.from_pylist(values, schema.with_metadata(metadata)), path)
    return path
