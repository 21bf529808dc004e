"""How a drop file is written as Parquet, so that the sink and compaction write the same. Knows nothing of names,
directories or commits."""

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.drop.schema import VERSION_KEY

# A row group is what Spark skips, and what a reader holds at a time: it ends after so many rows, or with the batch in
# which its data pass so many bytes.
ROW_GROUP_ROWS: Final = 131_072
ROW_GROUP_BYTES: Final = 64 << 20

# Few values in many rows. A dictionary that grows too large is given up by the writer for the rest of a column.
_DICTIONARY: Final = (
    "node",
    "log",
    "protocol",
    "topic",
    "kind",
    "source",
    "headers.key_value.key",
    "headers.key_value.value",
    "part_sizes.list.element",
)

# Each value is little more than the one before.
_DELTA: Final = ("offset", "ts", "correlation")

# Nobody searches for a range of payloads or headers, and their bounds would make the footer as large as they are.
_NO_STATISTICS: Final = ("payload", "payload_json", "headers")


def writer(
    where: Any, schema: pa.Schema, metadata: Mapping[bytes, bytes], *, compression: str = "zstd"
) -> pq.ParquetWriter:
    """A writer of one file. `where` is a path or a file that is open for writing; `metadata` are keys of
    headrace.drop.schema, beside the schema's own. What is known only at the end goes to the writer's
    add_key_value_metadata(). Every write_batch() or write_table() ends a row group, so rows are gathered first."""
    own = {key: value for key, value in (schema.metadata or {}).items() if key == VERSION_KEY}
    present = set(schema.names)
    leaves = [leaf for name in schema.names for leaf in _leaves(name)]
    out = pq.ParquetWriter(
        where,
        schema,
        version="2.6",
        data_page_version="1.0",
        compression=compression,
        use_dictionary=[leaf for leaf in leaves if leaf in _DICTIONARY],
        column_encoding={name: "DELTA_BINARY_PACKED" for name in _DELTA if name in present},
        write_statistics=[leaf for leaf in leaves if leaf.partition(".")[0] not in _NO_STATISTICS],
        write_page_checksum=True,
        store_schema=False,  # a batch may have dictionaries where a reader is to find plain strings
    )
    # Not as the schema's own, which is what is not stored.
    out.add_key_value_metadata({**own, **metadata})
    return out


def _leaves(name: str) -> tuple[str, ...]:
    """What Parquet calls the values of a column."""
    if name == "headers":
        return ("headers.key_value.key", "headers.key_value.value")
    return ("part_sizes.list.element",) if name == "part_sizes" else (name,)
