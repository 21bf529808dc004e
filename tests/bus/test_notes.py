"""Notes: small state that sessions keep in the log, through restarts, kills and retention."""

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BusError, LogError
from tests.bus.conftest import Place


def test_the_last_value_of_a_key_is_kept(place: Place) -> None:
    place.bus.note(b"link/1", b"first")
    place.bus.note(b"link/2", b"other")
    place.bus.note(b"link/1", b"second")
    assert place.bus.notes() == {b"link/1": b"second", b"link/2": b"other"}
    assert place.bus.notes(b"link/2") == {b"link/2": b"other"}
    assert place.reopen().notes(b"link/") == {b"link/1": b"second", b"link/2": b"other"}


def test_a_forgotten_note_stays_forgotten(place: Place) -> None:
    place.bus.note(b"a", b"1")
    assert place.bus.forget(b"a") > 0
    assert place.bus.forget(b"a") == 0
    assert place.bus.forget(b"never") == 0
    assert place.reopen().notes() == {}
    place.bus.note(b"a", b"2")
    assert place.reopen().notes() == {b"a": b"2"}


def test_notes_are_found_by_whatever_their_keys_begin_with(place: Place) -> None:
    source = random.Random(5)
    keys = [b"a", b"a/", b"a/b", b"a//b", b"/", b"ab", b"a/b/c", b"a/b/d", b"a/bc/d", b"b.c", b"b/c/d/e"]
    keys += [b"b/c/d/", b"b/c/d/e/f", b"b/c/d/e/g/h", b"b/c/d//", b"b/c/d/eh/", b"b/c/e/////"]
    prefixes = [key[:n] for key in keys for n in range(len(key) + 1)] + [b"x", b"a/x/", b"a/b/c/"]
    known: dict[bytes, bytes] = {}
    for step in range(300):
        key = source.choice(keys)
        if source.random() < 0.5:
            known[key] = b"%d" % step
            place.bus.note(key, known[key])
        else:
            assert (place.bus.forget(key) > 0) == (known.pop(key, None) is not None)
        if step % 50 == 49:
            place.reopen()
        for prefix in prefixes:
            expected = {key: value for key, value in known.items() if key.startswith(prefix)}
            assert place.bus.notes(prefix) == expected, prefix


def test_slashes_in_a_key_cost_no_memory_of_their_own(place: Place) -> None:
    keys = [b"zeroctl/task/" + b"%d/" % i * 60 for i in range(100)]
    tracemalloc.start()
    try:
        for key in keys:
            place.bus.note(key, b"")
        assert tracemalloc.get_traced_memory()[0] < 100 * 2000
    finally:
        tracemalloc.stop()
    for key in keys:
        place.bus.forget(key)
    assert place.bus.notes() == {}


def test_notes_survive_a_kill(place: Place) -> None:
    place.bus.note(b"kept", b"\0" * 1000)
    place.bus.note(b"gone", b"x")
    place.bus.forget(b"gone")
    assert place.killed().notes() == {b"kept": b"\0" * 1000}


def test_a_note_becomes_safe_at_the_lsn_that_it_answers(place: Place) -> None:
    first = place.bus.note(b"a", b"1")
    second = place.bus.note(b"a", b"2")
    assert second > first
    assert place.bus.forget(b"a") > second


def test_notes_outlive_the_segments_that_they_were_written_in(place: Place) -> None:
    place.bus.note(b"old", b"value")
    place.bus.note(b"dropped", b"value")
    place.roll(8)
    place.bus.forget(b"dropped")
    for _ in range(3):
        place.roll(12)
        assert place.log.segments()[0].number > 1
        assert place.bus.notes() == {b"old": b"value"}
    assert place.reopen().notes() == {b"old": b"value"}
    place.roll(40)
    assert place.killed().notes() == {b"old": b"value"}


def test_keys_and_values_have_limits(place: Place) -> None:
    with pytest.raises(BusError, match="1 to 512 bytes"):
        place.bus.note(b"", b"")
    with pytest.raises(BusError, match="1 to 512 bytes"):
        place.bus.note(b"k" * 513, b"")
    with pytest.raises(LogError, match="larger than half a segment"):
        place.bus.note(b"k", b"v" * 65536)
    assert place.bus.notes() == {}
    place.bus.note(b"k" * 512, b"")
    assert place.reopen().notes() == {b"k" * 512: b""}


@settings(max_examples=settings.default.max_examples // 10)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.one_of(st.none(), st.binary(max_size=2000))),
        max_size=40,
    )
)
def test_any_history_leaves_what_a_dictionary_would(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bytes, bytes | None]]
) -> None:
    place = Place(tmp_path_factory.mktemp("notes") / "log")
    place.open()
    model: dict[bytes, bytes] = {}
    for key, value in steps:
        if value is None:
            place.bus.forget(key)
            model.pop(key, None)
        else:
            place.bus.note(key, value)
            model[key] = value
    assert place.bus.notes() == model
    assert place.reopen().notes() == model
    place.close()
