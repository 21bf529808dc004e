"""The columns of a drop file. No unsigned 64-bit integers and no nanoseconds: Spark does not read them. A new version
only adds columns, nullable and last, so that readers accept older files."""

from collections.abc import Collection
from typing import Final, NamedTuple

import pyarrow as pa

SCHEMA_VERSION: Final = 1

# Keys of the file's metadata.
VERSION_KEY: Final = b"headrace.schema"  # SCHEMA_VERSION, in digits
EMPTY_BEFORE_KEY: Final = b"headrace.empty_before"
"""How many offsets right before `first` were looked at and had no row for this drop, in digits; absent: none. With it,
a gap between two files is known to be none."""
MISSING_KEY: Final = b"headrace.missing"
"""Offsets between `first` and `last` that the log itself has lost to damage or retention: a JSON list of
[first, last] pairs; absent: none."""
FILTERED_KEY: Final = (
    b"headrace.filtered"  # "1" where a topic filter leaves messages out, so that rows are fewer than offsets
)


class Column(NamedTuple):
    name: str
    type: pa.DataType
    nullable: bool
    meaning: str


def _list_of(type_: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", type_, nullable=False))


COLUMNS: Final[tuple[Column, ...]] = (
    Column("node", pa.string(), False, "The gateway that took the message."),
    Column("log", pa.string(), False, "The id of its log; with `offset` it names the message for ever."),
    Column("offset", pa.int64(), False, "The message's place in the log, counted from 0."),
    Column("ts", pa.timestamp("us", tz="UTC"), False, "When it was appended to the log."),
    Column(
        "protocol",
        pa.string(),
        False,
        "What it came over: blipmq, overhop, relink, zeroctl, felix, or headrace.",
    ),
    Column("topic", pa.string(), False, "The dotted name that it was published to."),
    Column("kind", pa.int32(), False, "The protocol's own kind of message; 0 where it has one kind."),
    Column(
        "source", pa.string(), True, "Who sent it: the key's name and the peer; null for the gateway itself."
    ),
    Column(
        "correlation",
        pa.int64(),
        False,
        "The sender's own id of the message (its 64 bits), 0 if it gave none.",
    ),
    Column("headers", pa.map_(pa.string(), pa.string()), True, "What the protocol says beside the payload."),
    Column(
        "part_sizes",
        _list_of(pa.int32()),
        True,
        "Sizes of the payload's parts, where the protocol has parts.",
    ),
    Column("payload", pa.binary(), False, "The message, byte for byte."),
)

# Asked for by the configuration, behind the others.
OPTIONAL_COLUMNS: Final[tuple[Column, ...]] = (
    Column(
        "payload_json", pa.string(), True, "The payload as text where it is valid JSON in UTF-8, else null."
    ),
)

# A row is named by these, so they cannot be left out.
KEY_COLUMNS: Final = ("node", "log", "offset", "ts")


def arrow_schema(leave_out: Collection[str] = (), *, payload_json: bool = False) -> pa.Schema:
    """The schema of a file, with its version."""
    columns = [*COLUMNS, *(OPTIONAL_COLUMNS if payload_json else ())]
    fields = [pa.field(one.name, one.type, one.nullable) for one in columns if one.name not in leave_out]
    return pa.schema(fields, metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()})
