"""Every kind of thing that can be wrong with a drop directory, and that a whole one is called whole."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.drop import FileName
from headrace.drop.catalog import hour_begin
from headrace.drop.filesystems import place
from headrace.drop.verify import Verified, verify
from tests.drop.files import HOUR, LOG, NEXT_HOUR, OTHER_LOG, moment, put, table


@pytest.fixture
def drop(tmp_path: Path) -> Path:
    return tmp_path / "drop"


@pytest.fixture
def compacted(tmp_path: Path) -> Path:
    return tmp_path / "drop-compacted"


def check(drop: Path, compacted: Path | None = None, *, quick: bool = False) -> Verified:
    return verify(place(drop), place(compacted) if compacted else None, quick=quick)


def kinds(found: Verified) -> set[str]:
    return {problem.kind for problem in found.problems}


def only(found: Verified, kind: str, file: Path) -> str:
    """The reason of the one problem that there is."""
    assert [(one.kind, one.file) for one in found.problems] == [(kind, str(file))]
    assert not found.missing
    return found.problems[0].reason


@pytest.mark.parametrize("quick", [False, True])
def test_whole_drop_of_several_nodes_logs_and_hours(drop: Path, quick: bool) -> None:
    put(drop, 100, 299)  # what was before has been pruned
    put(drop, 300, 2799, row_group=700)
    put(drop, 2800, 2900, hour=NEXT_HOUR, payload_json=True, leave_out=("headers",))
    put(drop, 0, 99, node="gw-2")
    put(drop, 0, 99, log=OTHER_LOG)
    (drop / "_staging").mkdir()
    (drop / "_staging" / "half.parquet").write_bytes(b"PAR1")
    seen: list[tuple[int, int]] = []
    found = verify(place(drop), quick=quick, progress=lambda done, total: seen.append((done, total)))
    assert found.whole, found
    assert (found.files, found.rows, found.lost, found.gone) == (5, 3001, 0, 0)
    assert sum(done for done, _ in seen) == found.bytes == seen[0][1]


@pytest.mark.parametrize("quick", [False, True])
def test_what_filters_and_losses_explain_is_no_problem(drop: Path, quick: bool) -> None:
    put(drop, 0, 99, offsets=range(0, 100, 3), filtered=True)
    put(drop, 150, 199, empty_before=50, filtered=True, offsets=[150, 199])
    put(drop, 200, 299, offsets=[*range(200, 210), *range(220, 299)], missing=[(210, 219), (299, 299)])
    put(drop, 300, 399, offsets=[301], filtered=True, missing=[(310, 319)])
    found = check(drop, quick=quick)
    assert found.whole, found
    assert found.lost == 21


# --- the bytes ----------------------------------------------------------------------------------------------


def end_of(chunk: pq.ColumnChunkMetaData) -> int:
    begin = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    return int(begin + chunk.total_compressed_size)


def test_flipped_bit_in_a_page_is_found(drop: Path) -> None:
    whole = put(drop, 0, 499)
    file = put(drop, 500, 999)
    group = pq.read_metadata(file).row_group(0)
    data = bytearray(file.read_bytes())
    data[end_of(group.column(group.num_columns - 1)) - 5] ^= 4  # of the payload
    file.write_bytes(data)
    assert "checksum" in only(check(drop), "unreadable", file).lower()
    assert check(drop, quick=True).whole  # which is what quick does not see
    assert whole.exists()


def test_every_damaged_page_of_every_column_is_found(drop: Path) -> None:
    file = put(drop, 0, 299)
    sound = file.read_bytes()
    group = pq.read_metadata(file).row_group(0)
    for number in range(group.num_columns):
        chunk = group.column(number)
        data = bytearray(sound)
        data[end_of(chunk) - 1] ^= 0x10
        file.write_bytes(data)
        assert kinds(check(drop)) == {"unreadable"}, chunk.path_in_schema


def test_flipped_bit_anywhere_is_found_or_changes_no_row(drop: Path, soak: int) -> None:
    """Page headers and the footer have no checksum of their own."""
    file = put(drop, 0, 99)
    sound, rows = file.read_bytes(), pq.read_table(file)
    found = 0
    for position in range(0, len(sound), max(1, 29 // soak)):
        data = bytearray(sound)
        data[position] ^= 1 << position % 8
        file.write_bytes(data)
        if check(drop).whole:
            assert pq.read_table(file).equals(rows), position
        else:
            found += 1
    assert found > len(sound) / 29 / 2


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("kept", [0, 3, 100, -1, -9])
def test_truncated_file_is_found(drop: Path, kept: int, quick: bool) -> None:
    file = put(drop, 0, 99)
    file.write_bytes(file.read_bytes()[:kept])
    assert "cannot be read" in only(check(drop, quick=quick), "unreadable", file)


def test_file_that_is_gone_when_it_is_opened_is_no_problem(
    drop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = put(drop, 0, 99), put(drop, 100, 199)
    here = place(drop)
    open_file = here.open

    def open_late(path: str) -> pa.NativeFile:
        if path.endswith(first.name):
            first.unlink()
        return open_file(path)

    monkeypatch.setattr(here, "open", open_late)
    found = verify(here)
    assert found.whole
    assert (found.gone, found.rows) == (1, 100)
    assert second.exists()


# --- the footer ---------------------------------------------------------------------------------------------


def with_columns(offsets: range, change: Callable[[pa.Table], pa.Table]) -> pa.Table:
    return change(table(offsets, dictionaries=False))


def drop_ts(rows: pa.Table) -> pa.Table:
    return rows.drop_columns(["ts"])


def text_kind(rows: pa.Table) -> pa.Table:
    column = rows["kind"].cast(pa.string())
    return rows.set_column(6, pa.field("kind", pa.string()), column)


def extra(rows: pa.Table) -> pa.Table:
    return rows.append_column("colour", pa.array(["red"] * len(rows)))


def swap(rows: pa.Table) -> pa.Table:
    return rows.select([*rows.schema.names[1:], "node"])


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    ("make", "kind", "reason"),
    [
        ({"version": 2}, "version", "schema version 2 is newer than the 1 that is known here"),
        ({"version": None}, "version", "no schema version"),
        ({"empty_before": b"many"}, "metadata", "is no number"),
        ({"missing": b"[[210"}, "metadata", "is no list of ranges"),
        ({"missing": b"[[90, 95]]"}, "metadata", "is no list of ranges"),
        ({"missing": b'[["a", "b"]]'}, "metadata", "is no list of ranges"),
        ({"missing": b"[[130, 120]]"}, "metadata", "is no list of ranges"),
        ({"missing": b"[[120, 130], [130, 140]]"}, "metadata", "is no list of ranges"),
        ({"missing": b"[[190, 200]]"}, "metadata", "is no list of ranges"),
        (
            {"offsets": range(100, 190)},
            "rows",
            "90 rows for 100 offsets, and neither .* why 10 are not there",
        ),
        ({"missing": [(110, 114)]}, "rows", "100 rows for 95 offsets"),
        (
            {"missing": [(110, 114)], "offsets": range(110, 200)},
            "rows",
            "90 rows for 100 offsets.* why 5 are not",
        ),
        ({"rows": with_columns(range(100, 200), text_kind)}, "schema", "kind is string, not int32"),
        ({"rows": with_columns(range(100, 200), drop_ts)}, "schema", "column ts is not there"),
        ({"rows": with_columns(range(100, 200), extra)}, "schema", "column colour is unknown"),
        ({"rows": with_columns(range(100, 200), swap)}, "schema", "columns are not in order"),
    ],
)
def test_footer_that_does_not_fit_is_found(
    drop: Path, make: dict[str, Any], kind: str, reason: str, quick: bool
) -> None:
    sound = put(drop, 0, 99)
    file = put(drop, 100, 199, **make)
    found = check(drop, quick=quick)
    assert kinds(found) == {kind}
    assert {one.file for one in found.problems} == {str(file)}
    assert any(re.search(reason, one.reason) for one in found.problems), found.problems
    assert sound.exists()


def test_new_columns_of_a_newer_version_are_not_held_against_it(drop: Path) -> None:
    file = put(drop, 0, 99, rows=with_columns(range(100), extra), version=2)
    assert "newer" in only(check(drop), "version", file)


def test_too_many_empty_offsets_are_found(drop: Path) -> None:
    file = put(drop, 100, 199, empty_before=101)
    assert "too many" in only(check(drop), "metadata", file)


# --- the rows -----------------------------------------------------------------------------------------------


def test_unsorted_rows_are_found(drop: Path) -> None:
    file = put(drop, 0, 99, offsets=[*range(50), 51, 50, *range(52, 100)])
    assert "do not ascend" in only(check(drop), "order", file)


def test_row_that_is_there_twice_is_found(drop: Path) -> None:
    file = put(drop, 0, 99, offsets=[*range(50), 49, *range(51, 100)])
    assert "do not ascend" in only(check(drop), "order", file)


def test_row_groups_out_of_order_are_found(drop: Path) -> None:
    file = put(drop, 0, 99, offsets=[*range(50, 100), *range(50)], row_group=50)
    assert "do not ascend" in only(check(drop), "order", file)


def test_rows_of_another_node_or_log_are_found(drop: Path) -> None:
    file = put(drop, 0, 99, rows=table(range(100), node="gw-9"))
    assert "rows of the node gw-9" in only(check(drop), "node", file)
    file = put(drop, 0, 99, rows=table(range(100), log=OTHER_LOG))
    assert f"rows of the log {OTHER_LOG}" in only(check(drop), "log", file)


def test_file_in_the_directory_of_another_hour_is_found(drop: Path) -> None:
    file = put(drop, 0, 99, name_hour=NEXT_HOUR)
    assert "times outside the hour of date=2026-01-31/hour=08" in only(check(drop), "hour", file)


@pytest.mark.parametrize("offsets", [range(101, 201), range(99, 199), [*range(100, 199), 1000]])
def test_rows_outside_the_range_of_the_name_are_found(drop: Path, offsets: range) -> None:
    file = put(drop, 100, 199, offsets=offsets)
    assert "offsets outside the range in its name" in only(check(drop), "range", file)


def test_one_row_of_another_hour_is_found(drop: Path) -> None:
    times = [moment(offset) for offset in range(100)]
    times[60] = hour_begin(NEXT_HOUR)
    file = put(drop, 0, 99, ts=times)
    assert "times outside the hour" in only(check(drop), "hour", file)
    times[60] = hour_begin(NEXT_HOUR) - 1
    put(drop, 0, 99, ts=times)
    assert check(drop).whole


def test_wrong_statistics_are_found(drop: Path) -> None:
    file = put(drop, 0, 99)
    data = file.read_bytes()
    footer = data.rindex(
        pq.read_metadata(file).row_group(0).column(2).statistics.max_raw.to_bytes(8, "little")
    )
    assert footer > data.rindex(b"offset")
    file.write_bytes(data[:footer] + (98).to_bytes(8, "little") + data[footer + 8 :])
    assert "statistics of the column offset are wrong" in only(check(drop), "statistics", file)


def test_null_where_none_may_be_is_found(drop: Path) -> None:
    rows = table(range(100), dictionaries=False)
    topics = pa.array([None, *rows["topic"].to_pylist()[1:]])
    rows = rows.set_column(5, pa.field("topic", pa.string()), topics)
    file = put(drop, 0, 99, rows=rows)
    assert "column topic has nulls" in only(check(drop), "null", file)


# --- the files together -------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [False, True])
def test_missing_files_are_named_by_their_offsets(drop: Path, quick: bool) -> None:
    put(drop, 0, 99)
    behind = put(drop, 150, 199, empty_before=20, filtered=True)
    put(drop, 200, 299, hour=NEXT_HOUR)
    last = put(drop, 301, 399, hour=NEXT_HOUR)
    put(drop, 1000, 1099, node="gw-2")
    found = check(drop, quick=quick)
    assert not found.problems
    assert not found.whole
    assert [tuple(one) for one in found.missing] == [
        ("gw-1", LOG, 100, 129, str(behind)),
        ("gw-1", LOG, 300, 300, str(last)),
    ]


@pytest.mark.parametrize("quick", [False, True])
def test_overlap_is_found(drop: Path, quick: bool) -> None:
    put(drop, 0, 99)
    file = put(drop, 50, 149)
    assert "its offsets are in date=" in only(check(drop, quick=quick), "overlap", file)


def test_same_range_in_two_hours_is_found(drop: Path) -> None:
    put(drop, 0, 99)
    file = put(drop, 0, 99, hour=NEXT_HOUR)
    only(check(drop), "overlap", file)


def test_foreign_file_is_found(drop: Path) -> None:
    file = put(drop, 0, 99)
    stranger = file.with_name("part-00000.parquet")
    stranger.write_bytes(file.read_bytes())
    assert "not named as a drop file" in only(check(drop), "name", stranger)


# --- compacted files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [False, True])
def test_compacted_files_have_what_they_cover(drop: Path, compacted: Path, quick: bool) -> None:
    put(drop, 0, 99)
    put(drop, 100, 199)
    put(drop, 200, 299)
    put(compacted, 0, 199, dictionaries=False, row_group=70)
    found = check(drop, compacted, quick=quick)
    assert found.whole, found
    assert (found.files, found.rows, found.compacted_files, found.compacted_rows) == (3, 300, 1, 200)


@pytest.mark.parametrize("gone", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_originals_that_were_pruned_are_not_missed(
    drop: Path, compacted: Path, gone: tuple[int, ...]
) -> None:
    files = [put(drop, first, first + 99) for first in (0, 100, 200)]
    put(drop, 300, 399)
    put(compacted, 0, 299, dictionaries=False)
    for number in gone:
        files[number].unlink()
    assert check(drop, compacted).whole
    assert check(drop, compacted, quick=True).whole
    assert bool(check(drop).missing) == (gone in ((1,), (2,), (0, 2)))


@pytest.mark.parametrize("column", ["payload", "topic", "headers", "part_sizes", "source"])
def test_compacted_row_that_differs_is_found(drop: Path, compacted: Path, column: str) -> None:
    put(drop, 0, 99)
    put(drop, 100, 199)
    values = table(range(200), dictionaries=False)[column].to_pylist()
    values[144] = {"payload": b"?", "topic": "?", "headers": [("?", "?")], "part_sizes": [9], "source": "?"}[
        column
    ]
    file = put(compacted, 0, 199, **{column: values})
    second = str(FileName("gw-1", LOG, 100, 199))
    assert only(check(drop, compacted), "content", file) == f"its rows are not those of {HOUR}/{second}"


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("lost", [0, 99, 150, 199])
def test_compacted_row_that_is_missing_is_found(drop: Path, compacted: Path, lost: int, quick: bool) -> None:
    put(drop, 0, 99)
    put(drop, 100, 199)
    offsets = [offset for offset in range(200) if offset != lost]
    put(compacted, 0, 199, offsets=offsets, filtered=True)
    assert kinds(check(drop, compacted, quick=quick)) == {"content"}


@pytest.mark.parametrize("quick", [False, True])
def test_compacted_row_that_no_original_has_is_found(drop: Path, compacted: Path, quick: bool) -> None:
    put(drop, 0, 99, offsets=range(90), filtered=True)
    put(drop, 110, 199, empty_before=10, filtered=True)
    put(compacted, 0, 199, offsets=[*range(91), *range(110, 200)], filtered=True)
    assert kinds(check(drop, compacted, quick=quick)) == {"content"}
    put(compacted, 0, 199, offsets=[*range(90), 105, *range(110, 200)], filtered=True)
    assert kinds(check(drop, compacted, quick=quick)) == {"content"}
    put(compacted, 0, 199, offsets=[*range(90), *range(110, 200)], filtered=True)
    assert check(drop, compacted, quick=quick).whole


@pytest.mark.parametrize("quick", [False, True])
def test_compacted_file_that_covers_part_of_a_file_is_found(drop: Path, compacted: Path, quick: bool) -> None:
    put(drop, 0, 99)
    put(drop, 100, 199)
    file = put(compacted, 0, 149)
    assert "covers a part of" in only(check(drop, compacted, quick=quick), "overlap", file)


def test_compacted_files_that_overlap_are_found(drop: Path, compacted: Path) -> None:
    put(drop, 0, 99)
    put(compacted, 0, 99)
    file = put(compacted, 0, 99, hour=NEXT_HOUR)
    assert {"overlap"} <= kinds(check(drop, compacted))
    assert file.exists()


def test_compacted_columns_that_differ_are_found(drop: Path, compacted: Path) -> None:
    put(drop, 0, 99)
    file = put(compacted, 0, 99, leave_out=("headers",))
    assert "its columns are not those of" in only(check(drop, compacted), "content", file)


def test_damaged_compacted_file_is_found_and_its_originals_are_checked_all_the_same(
    drop: Path, compacted: Path
) -> None:
    file = put(drop, 0, 99, rows=table(range(100), node="gw-9"))
    large = put(compacted, 0, 99)
    large.write_bytes(large.read_bytes()[:-1])
    found = check(drop, compacted)
    assert {(one.file, one.kind) for one in found.problems} == {
        (str(file), "node"),
        (str(large), "unreadable"),
    }
