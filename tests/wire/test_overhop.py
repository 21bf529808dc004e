"""The Overhop codec against the protocol's text and against its plain-Python twin."""

import struct
import tracemalloc
from itertools import pairwise
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.wire import overhop
from tests.oracle import overhop as twin

LIMIT = 8 * 1024 * 1024

Seen = tuple[int, str, dict[str, Any], int, int]
Outcome = tuple[list[Seen], bool, int]


def decode(pieces: list[bytes], limit: int = LIMIT) -> Outcome:
    """All messages of the pieces, whether an error ended them, and how many bytes are left over."""
    decoder = overhop.Decoder(limit)
    found: list[Seen] = []
    for piece in pieces:
        try:
            found += [(m.type, m.rid, m.payload, m.start, m.end) for m in decoder.feed(piece)]
        except overhop.FrameError:
            break
    return found, decoder.error is not None, decoder.pending


def decode_by_twin(pieces: list[bytes], limit: int = LIMIT) -> Outcome:
    decoder = twin.Decoder(limit)
    found: list[Seen] = []
    for piece in pieces:
        found += [(m.type, m.rid, m.payload, m.start, m.end) for m in decoder.feed(piece)]
    return found, decoder.failed, len(decoder.tail)


def verdict(payload: bytes) -> Any:
    try:
        message = overhop.parse(payload)
    except overhop.FrameError:
        assert not overhop.check(payload)
        return None
    assert overhop.check(payload)
    return message.type, message.rid, message.payload


def verdict_of_twin(payload: bytes) -> Any:
    try:
        return twin.parse(payload)
    except twin.Bad:
        return None


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(i, len(data)) for i in at), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
ints = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from(
        [-(2**63), -(2**31) - 1, -(2**31), -32769, -129, -128, -33, -32, 127, 128, 255, 256, 65535]
    ),
)
scalars = st.one_of(st.none(), st.booleans(), ints, texts, st.binary(max_size=300))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=20), st.dictionaries(texts, inner, max_size=20)),
    max_leaves=25,
)
payloads = st.dictionaries(texts, values, max_size=20)

# The same with what Overhop does not allow.
foul = st.recursive(
    st.one_of(
        scalars,
        st.floats(),
        st.integers(2**63, 2**64 - 1),
        st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(texts, st.integers(-5, 5), st.binary(max_size=3), st.none()), inner, max_size=4
        ),
    ),
    max_leaves=8,
)
envelopes = st.fixed_dictionaries(
    {"v": st.just(2), "t": ints, "rid": texts.filter(bool), "p": payloads}, optional={"other": values}
)
foul_envelopes = st.fixed_dictionaries(
    {},
    optional={
        "v": st.one_of(st.just(2), st.just(2), foul),
        "t": st.one_of(st.just(14), st.just(14), foul),
        "rid": st.one_of(st.just("1"), st.just("1"), foul),
        "p": st.one_of(st.just({}), st.dictionaries(texts, foul, max_size=3), foul),
        "other": foul,
    },
)


def shuffled(entries: list[tuple[str, Any]]) -> bytes:
    """A map in this order, with keys that may come twice."""
    packed = b"".join(msgpack.packb(key) + msgpack.packb(value) for key, value in entries)
    return bytes([0x80 | len(entries)]) + packed


repeated = st.lists(
    st.tuples(
        st.sampled_from(["v", "t", "rid", "p", "x"]), st.one_of(st.just(2), st.just("7"), payloads, scalars)
    ),
    max_size=12,
).map(shuffled)


# --- one envelope -----------------------------------------------------------------------------------------------


@given(st.integers(0, 200), texts.filter(bool), payloads)
def test_what_is_encoded_is_what_the_twin_reads_and_the_other_way_round(
    kind: int, rid: str, payload: dict[str, Any]
) -> None:
    ours = overhop.encode(kind, rid, payload)
    assert ours == twin.encode(kind, rid, payload)  # the same order, the shortest forms
    assert verdict(ours[4:]) == (kind, rid, payload) == verdict_of_twin(ours[4:])


@given(envelopes)
def test_sound_envelope_is_read_as_the_twin_reads_it(envelope: dict[str, Any]) -> None:
    payload = msgpack.packb(envelope)
    assert verdict(payload) == verdict_of_twin(payload) == (envelope["t"], envelope["rid"], envelope["p"])


@given(st.one_of(foul_envelopes, foul).map(msgpack.packb))
def test_envelope_with_forbidden_parts_is_judged_as_the_twin_judges_it(payload: bytes) -> None:
    assert verdict(payload) == verdict_of_twin(payload)


@given(repeated)
@example(shuffled([("v", 1), ("v", 2), ("t", 1), ("rid", "1"), ("p", 1), ("p", {})]))
@example(shuffled([("v", 2), ("t", 1), ("rid", "1"), ("p", {}), ("p", 1)]))
@example(shuffled([("v", 2), ("t", 1), ("rid", "1"), ("rid", 1), ("p", {})]))
def test_of_a_key_that_comes_twice_the_last_one_counts(payload: bytes) -> None:
    assert verdict(payload) == verdict_of_twin(payload)


@given(envelopes.map(msgpack.packb), st.data())
def test_damaged_envelope_is_judged_as_the_twin_judges_it(payload: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(payload) - 1))
    changed = payload[:at] + bytes([data.draw(st.integers(0, 255))]) + payload[at + 1 :]
    for damaged in (payload[:at], changed, payload + payload[at : at + 1]):
        assert verdict(damaged) == verdict_of_twin(damaged)


@given(st.binary(max_size=60))
def test_noise_is_judged_as_the_twin_judges_it(noise: bytes) -> None:
    assert verdict(noise) == verdict_of_twin(noise)


GOOD: dict[str, Any] = {"v": 2, "t": 3, "rid": "7", "p": {}}
FAULTS: list[tuple[str, bytes]] = [
    ("bad MessagePack", b""),
    ("bad MessagePack", msgpack.packb(GOOD)[:-1]),
    ("no map", msgpack.packb([])),
    ("no map", b"\xc0"),
    ("trailing bytes", msgpack.packb(GOOD) + b"\xc0"),
    ("forbidden type", b"\xc1"),
    ("forbidden type", msgpack.packb(GOOD | {"x": 1.5})),
    ("forbidden type", msgpack.packb(GOOD | {"x": 1.5}, use_single_float=True)),
    ("forbidden type", msgpack.packb(GOOD | {"p": {"deep": [{"x": msgpack.ExtType(1, b"")}]}})),
    ("forbidden type", msgpack.packb(GOOD | {"x": msgpack.Timestamp(1)})),
    ("bad integer", msgpack.packb(GOOD | {"x": 2**63})),
    ("bad key", msgpack.packb(GOOD | {"x": {1: 2}})),
    ("bad key", msgpack.packb(GOOD | {"x": {b"y": 2}})),
    ("bad text", b"\x85" + msgpack.packb(GOOD)[1:] + b"\xa1x\xa1\xff"),
    ("bad text", b"\x85" + msgpack.packb(GOOD)[1:] + b"\xa1x\x81\xa1\xff\xc0"),
    *[("bad v", msgpack.packb(GOOD | {"v": value})) for value in (1, 3, -2, "2", None, True, [2], {"v": 2})],
    ("bad v", msgpack.packb({"t": 3, "rid": "7", "p": {}})),
    *[("bad t", msgpack.packb(GOOD | {"t": value})) for value in ("3", None, True, [3], b"\x03")],
    ("bad t", msgpack.packb({"v": 2, "rid": "7", "p": {}})),
    *[("bad rid", msgpack.packb(GOOD | {"rid": value})) for value in ("", 7, None, b"7", ["7"])],
    ("bad rid", msgpack.packb({"v": 2, "t": 3, "p": {}})),
    *[("bad p", msgpack.packb(GOOD | {"p": value})) for value in ([], None, "", 0, b"")],
    ("bad p", msgpack.packb({"v": 2, "t": 3, "rid": "7"})),
    ("bad v", msgpack.packb({"v": 1, "t": None, "rid": "", "p": 1})),  # in the order v, t, rid, p
    ("bad t", msgpack.packb({"v": 2, "t": None, "rid": "", "p": 1})),
    ("bad rid", msgpack.packb({"v": 2, "t": 1, "rid": "", "p": 1})),
]


@pytest.mark.parametrize(("kind", "payload"), FAULTS, ids=range(len(FAULTS)))
def test_fault_has_its_name(kind: str, payload: bytes) -> None:
    with pytest.raises(overhop.FrameError) as caught:
        overhop.parse(payload)
    assert caught.value.kind == kind
    assert verdict_of_twin(payload) is None


@pytest.mark.parametrize(
    "opening", [b"\x91", b"\xdc\x00\x01", b"\xdd\x00\x00\x00\x01", b"\x81\xa1k", b"\xde\x00\x01\xa1k"]
)
def test_nesting_is_bounded(opening: bytes) -> None:
    for depth, sound in ((510, True), (511, False), (100_000, False)):
        payload = msgpack.packb(GOOD)[:-1] + b"\x81\xa1x" + opening * depth + b"\xc0"
        assert overhop.check(payload) is sound
        assert (verdict_of_twin(payload) is not None) is sound


@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xdb", b"\xc6"])
def test_announced_size_beyond_the_payload_costs_no_memory(head: bytes) -> None:
    payload = msgpack.packb(GOOD)[:-1] + b"\x81\xa1x" + head + b"\xff\xff\xff\xff" + b"\x01" * 40
    tracemalloc.start()
    assert not overhop.check(payload)
    assert tracemalloc.get_traced_memory()[1] < 10_000
    tracemalloc.stop()


def test_fields_are_found_among_any_number_of_others() -> None:
    for count in (0, 3, 15, 16, 17, 40, 70_000):
        payload = {f"other-{i}": [i] for i in range(count)} | {"q": "here"}
        message = overhop.parse(msgpack.packb(GOOD | {"p": payload}))
        assert message.payload == payload


def test_encoder_refuses_what_the_protocol_does_not_have() -> None:
    for value in (1.5, 2**63, -(2**63) - 1, {1: 2}, {b"x": 2}, object(), {"x": [{1, 2}]}):
        with pytest.raises((TypeError, ValueError)):
            overhop.encode(1, "1", {"x": value})
    deep: Any = None
    for _ in range(600):
        deep = [deep]
    with pytest.raises(ValueError, match="nested"):
        overhop.pack(deep)


def test_raw_value_is_written_as_it_is() -> None:
    inner = {"a": [1, b"x", None]}
    assert overhop.pack({"x": overhop.Raw(overhop.pack(inner))}) == overhop.pack({"x": inner})
    assert overhop.unpack(overhop.pack(inner)) == inner


# --- streams ------------------------------------------------------------------------------------------------------

streams = st.lists(st.one_of(envelopes, foul_envelopes).map(msgpack.packb).map(frame), max_size=5).map(
    b"".join
)


@given(st.lists(envelopes.map(msgpack.packb).map(frame), min_size=1, max_size=3).map(b"".join))
def test_stream_cut_at_every_point_gives_the_same_messages(stream: bytes) -> None:
    whole = decode([stream])
    assert whole == decode_by_twin([stream])
    for at in range(len(stream) + 1):
        assert decode([stream[:at], stream[at:]]) == whole


@given(streams, st.binary(max_size=8), st.lists(st.integers(0, 400), max_size=6))
def test_dirty_stream_in_any_pieces_ends_where_the_twin_ends(
    stream: bytes, noise: bytes, at: list[int]
) -> None:
    pieces = cut(stream + noise, at)
    assert decode(pieces) == decode_by_twin(pieces) == decode([stream + noise])
    assert decode([bytes([byte]) for byte in stream + noise]) == decode([stream + noise])


@pytest.mark.parametrize("limit", [65536, 8 * 1024 * 1024, 33554432])
def test_length_is_judged_by_its_four_bytes(limit: int) -> None:
    for length, sound in ((0, False), (1, True), (limit, True), (limit + 1, False), (2**32 - 1, False)):
        decoder = overhop.Decoder(limit)
        head = struct.pack(">I", length)
        assert decoder.feed(head[:3]) == []
        if sound:
            assert decoder.feed(head[3:]) == []
            assert (decoder.wanted, decoder.pending) == (4 + length, 4)
        else:
            with pytest.raises(overhop.FrameError, match="length"):
                decoder.feed(head[3:])


def test_largest_payload_passes_and_one_byte_more_does_not() -> None:
    empty = len(overhop.encode(14, "1", {"x": b""})) + 1  # a bin of this size has one byte more before it
    data = b"x" * (65536 + 4 - empty)
    whole = overhop.encode(14, "1", {"x": data})
    assert len(whole) == 65540
    assert overhop.Decoder(65536).feed(whole)[0].payload == {"x": data}
    with pytest.raises(overhop.FrameError):
        overhop.Decoder(65536).feed(overhop.encode(14, "1", {"x": data + b"x"}))


def test_announced_frame_does_not_take_memory_before_it_arrives() -> None:
    decoder = overhop.Decoder(33554432)
    tracemalloc.start()
    decoder.feed(struct.pack(">I", 33554432) + b"x" * 1000)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_messages_before_a_bad_one_are_given_first() -> None:
    decoder = overhop.Decoder()
    (one,) = decoder.feed(overhop.encode(1, "1", {}) + frame(b"\xc0"))
    assert (one.name, one.rid) == ("HELLO", "1")
    assert decoder.error is not None
    assert decoder.error.position == one.end + 4
    with pytest.raises(overhop.FrameError):
        decoder.feed(b"")


# --- times ----------------------------------------------------------------------------------------------------------


@given(st.integers(-62135596800000000, 253402300799999999))
@example(0)
@example(1709164800000000)  # a leap day
@example(-1)
def test_time_is_written_as_the_twin_writes_it_and_read_back(time: int) -> None:
    assert overhop.time_text(time) == twin.time_text(time)
    assert overhop.parse_time(overhop.time_text(time)) == time


def time_or_none(parse: Any, text: str) -> int | None:
    try:
        return int(parse(text))
    except ValueError:
        return None


TIMES = [
    "2026-11-18T12:00:00Z",
    "2026-11-18t12:00:00z",
    "2026-11-18 12:00:00+00:00",
    "2026-11-18T12:00:00.5Z",
    "2026-11-18T12:00:00.123456789+01:30",
    "2026-11-18T12:00:60Z",
    "2026-11-18T23:59:59-23:59",
    "2024-02-29T00:00:00Z",
]
NO_TIMES = [
    "",
    "tomorrow",
    "2026-11-18",
    "2026-11-18T12:00:00",
    "2026-11-18T12:00Z",
    "2026-11-18T12:00:00.Z",
    "2026-02-29T00:00:00Z",
    "2026-13-01T00:00:00Z",
    "2026-00-01T00:00:00Z",
    "2026-01-00T00:00:00Z",
    "2026-01-01T24:00:00Z",
    "2026-01-01T00:60:00Z",
    "2026-01-01T00:00:61Z",
    "2026-01-01T00:00:00+24:00",
    "2026-01-01T00:00:00+0100",
    "2026-01-01T00:00:00Zz",
    "2026-01-01T00:00:00+01:00 ",
]


@pytest.mark.parametrize("text", TIMES)
def test_time_of_a_peer_is_understood(text: str) -> None:
    assert time_or_none(overhop.parse_time, text) == twin.parse_time(text)


@pytest.mark.parametrize("text", NO_TIMES)
def test_what_is_no_time_is_refused(text: str) -> None:
    assert time_or_none(overhop.parse_time, text) is None
    assert time_or_none(twin.parse_time, text) is None


@given(st.sampled_from(TIMES + NO_TIMES[1:]), st.data())
def test_damaged_time_is_judged_as_the_twin_judges_it(text: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.sampled_from("0123456789-:.TZ+ ")) + text[at + 1 :]
    if changed[:4] != "0000":  # Python's calendar begins with the year 1
        assert time_or_none(overhop.parse_time, changed) == time_or_none(twin.parse_time, changed)
