"""How a drop file is written: what Spark can skip by, and what it costs."""

from pathlib import Path

import pyarrow.parquet as pq

from headrace.drop import arrow_schema
from headrace.drop.parquet import writer
from headrace.drop.schema import EMPTY_BEFORE_KEY, MISSING_KEY, VERSION_KEY
from tests.drop.files import put, table


def columns_of(path: Path) -> dict[str, pq.ColumnChunkMetaData]:
    group = pq.read_metadata(path).row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    return {column.path_in_schema: column for column in columns}


def test_what_repeats_has_a_dictionary_and_what_ascends_is_deltas(tmp_path: Path) -> None:
    columns = columns_of(put(tmp_path, 0, 999, payload_json=True))
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    dictionary = {name for name, column in columns.items() if column.has_dictionary_page}
    assert dictionary == {
        "node",
        "log",
        "protocol",
        "topic",
        "kind",
        "source",
        "headers.key_value.key",
        "headers.key_value.value",
        "part_sizes.list.element",
    }
    deltas = {name for name, column in columns.items() if "DELTA_BINARY_PACKED" in column.encodings}
    assert deltas == {"offset", "ts", "correlation"}


def test_statistics_are_for_what_is_searched(tmp_path: Path) -> None:
    columns = columns_of(put(tmp_path, 0, 999, payload_json=True))
    without = {name for name, column in columns.items() if column.statistics is None}
    assert without == {"headers.key_value.key", "headers.key_value.value", "payload", "payload_json"}


def test_metadata_is_kept_and_can_be_added_at_the_end(tmp_path: Path) -> None:
    rows = table(range(10), dictionaries=False)
    with writer(tmp_path / "x.parquet", arrow_schema(), {EMPTY_BEFORE_KEY: b"7"}) as out:
        out.write_table(rows)
        out.add_key_value_metadata({MISSING_KEY: b"[[1,2]]"})
    found = pq.read_metadata(tmp_path / "x.parquet").metadata
    assert (found[VERSION_KEY], found[EMPTY_BEFORE_KEY], found[MISSING_KEY]) == (b"1", b"7", b"[[1,2]]")


def test_columns_may_be_left_out_and_compression_chosen(tmp_path: Path) -> None:
    rows = table(range(10), leave_out=("headers", "correlation", "payload", "source", "part_sizes"))
    with writer(tmp_path / "x.parquet", rows.schema, {}, compression="snappy") as out:
        out.write_table(rows)
    plain = table(
        range(10), dictionaries=False, leave_out=("headers", "correlation", "payload", "source", "part_sizes")
    )
    assert pq.read_table(tmp_path / "x.parquet").equals(plain)
    assert {column.compression for column in columns_of(tmp_path / "x.parquet").values()} == {"SNAPPY"}


def test_reader_finds_plain_strings_where_the_writer_had_dictionaries(tmp_path: Path) -> None:
    file = put(tmp_path, 0, 9, dictionaries=True)
    assert pq.read_schema(file).equals(arrow_schema())
    assert pq.read_metadata(file).metadata[VERSION_KEY] == b"1"
