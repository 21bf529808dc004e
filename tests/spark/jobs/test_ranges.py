"""Intervals of offsets against sets of offsets, which are the same thing at length."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.drop import FileName
from headrace.spark.jobs.ranges import Ranges, overlap

A, B = "a" * 32, "b" * 32
names = st.builds(
    lambda node, log, first, size: FileName(node, log, first, first + size),
    st.sampled_from(["n", "m"]),
    st.sampled_from([A, B]),
    st.integers(0, 40),
    st.integers(0, 10),
)


def offsets(name: FileName) -> set[tuple[str, str, int]]:
    return {(name.node, name.log, offset) for offset in range(name.first, name.last + 1)}


@given(st.lists(names, max_size=20), names)
def test_ranges_say_what_sets_of_offsets_say(given_names: list[FileName], asked: FileName) -> None:
    ranges = Ranges(given_names)
    held = set().union(*map(offsets, given_names))
    assert {
        (*stream, offset) for stream, (first, last) in ranges for offset in range(first, last + 1)
    } == held
    assert ranges.covers(asked) == (offsets(asked) <= held)
    before = (asked.node, asked.log, asked.first - 1)
    assert ranges.follows(asked) == (
        asked.first == 0 or before in held or (asked.node, asked.log, asked.first) in held
    )
    # As few as can be: none touches the next.
    runs = sum((node, log, offset - 1) not in held for node, log, offset in held)
    assert len(ranges) == runs
    assert Ranges.from_json(ranges.to_json()) == ranges


@given(st.lists(names, max_size=6, unique=True))
def test_files_overlap_if_they_have_an_offset_in_common(given_names: list[FileName]) -> None:
    common = any(
        offsets(one) & offsets(other) for one in given_names for other in given_names if one is not other
    )
    assert overlap(given_names) == common
