"""The zeroctl codec against its plain-Python twin, and the protocol's rules for keys and headers."""

import hashlib
import json
import struct
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.wire import zeroctl
from tests.oracle import zeroctl as twin

EMPTY = hashlib.sha256(b"").hexdigest()
UUID = "fdcab500-b417-5e99-aa62-9d2db81df9e0"
GOOD: dict[str, Any] = {"node-name": "testnode", "node-uuid": UUID, "ts": 1586721895, "sha256": EMPTY}

Seen = tuple[str, int, int, int, dict[str, object]]
Outcome = tuple[list[Seen], tuple[int, str] | None, int]


def dumped(**changes: Any) -> bytes:
    """A good header with these values instead; None takes a key away."""
    header = {**GOOD, **{name.replace("_", "-"): value for name, value in changes.items()}}
    return json.dumps({name: value for name, value in header.items() if value is not None}).encode()


def seen(frame: zeroctl.Frame) -> Seen:
    fields = {name: value for name, value in frame.fields().items() if name != "reason"}
    return frame.type.name, frame.id, frame.start, frame.end, fields


def decode(pieces: list[bytes], **limits: int) -> Outcome:
    decoder = zeroctl.Decoder(**limits)
    frames: list[Seen] = []
    for piece in pieces:
        try:
            frames += map(seen, decoder.feed(piece))
        except zeroctl.FrameError:
            break
    error = None if decoder.error is None else (decoder.error.position, decoder.error.kind)
    return frames, error, decoder.pending


def decode_by_twin(pieces: list[bytes], **limits: int) -> Outcome:
    decoder = twin.Decoder(**limits)
    frames: list[Seen] = []
    for piece in pieces:
        frames += [(one.name, one.id, one.start, one.end, one.fields) for one in decoder.feed(piece)]
    error = None if decoder.error is None else (decoder.error.position, decoder.error.kind)
    return frames, error, len(decoder.tail)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(i, len(data)) for i in at), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


u8 = st.integers(0, 0xFF)
u16 = st.integers(0, 0xFFFF)
u32 = st.integers(0, 0xFFFFFFFF)
u64 = st.integers(0, 2**64 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
asciis = st.text(st.characters(max_codepoint=127), max_size=20)
words = st.sampled_from(["service", "event", "a", "", "*", "#", "x*", "é"])
keys = st.one_of(st.lists(words, min_size=1, max_size=4).map(".".join), st.just("k" * 255), asciis)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=False, allow_infinity=False),
    texts,
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
times = st.one_of(
    st.sampled_from(
        [
            0,
            1586721895,
            1586721895.25,
            1586721895123,
            1586721895123456,
            10**17,
            10**17 - 1,
            -1,
            1e20,
            "1586721895.123456",
            "1.",
            ".5",
            "",
            "2020-04-12T22:04:55.123456789+02:00",
            "2020-02-29T00:00:00Z",
            "2021-02-29T00:00:00Z",
            "2020-04-12 22:04:60z",
            "2020-04-12T22:04:55",
            "2020-13-12T22:04:55Z",
            "2020-04-31T22:04:55Z",
            "2020-04-12T24:04:55Z",
            "2020-04-12T22:04:55+24:00",
            "2020-04-12T22:04:55.Z",
            True,
            None,
        ]
    ),
    values,
)
names = st.one_of(st.sampled_from(["testnode", "", "é" * 128, "é" * 129, "n" * 256, "n" * 257, 5]), values)
uuids = st.one_of(
    st.sampled_from(
        [UUID, UUID.upper(), UUID.replace("-", ""), "0" * 64, "0" * 63, "g" * 32, UUID[:-1] + "-", 7]
    ),
    values,
)
digests = st.one_of(st.sampled_from([EMPTY, EMPTY.upper(), "", "0" * 63, "x" * 64, 1]), values)
paths = st.one_of(st.sampled_from(["event.done", "event.*", "", "é", 3]), values)
members = st.one_of(
    st.tuples(st.just("node-name"), names),
    st.tuples(st.just("node-uuid"), uuids),
    st.tuples(st.just("ts"), times),
    st.tuples(st.just("sha256"), digests),
    st.tuples(st.sampled_from(["on-start", "on-finish"]), paths),
    st.tuples(
        st.sampled_from(["_sec-sig", "_transport-x", "_passed-", "", "k" * 250, "k" * 251, "é", "\n"]), values
    ),
    st.tuples(texts, values),
)


def written(pairs: list[tuple[str, Any]], ascii_only: bool, spaces: str) -> bytes:
    """A JSON object with these members in this order, also if a key comes twice."""
    inside = f",{spaces}".join(
        f"{json.dumps(key, ensure_ascii=ascii_only)}{spaces}:{json.dumps(value, ensure_ascii=ascii_only)}"
        for key, value in pairs
    )
    return f"{spaces}{{{spaces}{inside}{spaces}}}{spaces}".encode()


good_members = st.just(list(GOOD.items()))
spaces = st.sampled_from(["", " ", "\r\n\t"])
headers = st.one_of(
    st.builds(written, st.lists(members, max_size=6), st.booleans(), spaces),
    st.builds(
        lambda good, more, *how: written(good + more, *how),
        good_members,
        st.lists(members, max_size=3),
        st.booleans(),
        spaces,
    ),
    st.builds(
        lambda good, at, more, *how: written(good[:at] + more + good[at + 1 :], *how),
        good_members,
        st.integers(0, 3),
        st.lists(members, min_size=1, max_size=1),
        st.booleans(),
        spaces,
    ),
)
broken_headers = st.builds(
    lambda header, at, junk, drop: (
        header[: at % (len(header) + 1)] + junk + header[at % (len(header) + 1) + drop :]
    ),
    headers,
    st.integers(0, 400),
    st.one_of(
        st.binary(max_size=3), st.sampled_from([b"\\", b'"', b"\\u12", b"\\ud800", b"NaN", b"01", b"[", b"{"])
    ),
    st.integers(0, 3),
)
any_header = st.one_of(headers, broken_headers, st.binary(max_size=10))
conditions = st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["k", "x" * 250]), texts), max_size=3)

calls: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.tuples(st.just("encode_open"), texts, texts, asciis, u64, u8),
    st.tuples(st.just("encode_welcome"), texts, asciis, u16, u32, u32, u64, u8),
    st.tuples(st.just("encode_message"), keys, any_header, st.binary(max_size=40), u64, st.booleans()),
    st.tuples(st.just("encode_delivery"), keys, any_header, st.binary(max_size=40), u64, u32, u8, u8),
    st.tuples(st.just("encode_confirm"), u32, u64),
    st.tuples(st.just("encode_refuse"), u16, texts, u64),
    st.tuples(st.just("encode_bind"), u32, texts, u64, u8, u32, texts, conditions),
    st.tuples(st.just("encode_unbind"), u32, u64),
    st.tuples(st.just("encode_ack"), u32, st.lists(u64, max_size=3), u64),
    st.tuples(st.just("encode_reject"), u32, st.lists(u64, max_size=3), u64, u32),
    st.tuples(st.just("encode_credit"), u32, u32, u64),
    st.tuples(st.just("encode_ping"), u64),
    st.tuples(st.just("encode_pong"), u64),
)
frames = calls.map(lambda call: getattr(twin, call[0])(*call[1:]))
any_frames = st.builds(twin.frame, st.integers(1, 13), u64, st.binary(max_size=24))


def shortened(data: bytes, at: int, junk: bytes) -> bytes:
    """A frame with a few bytes of its payload changed, and a length that fits."""
    at = 13 + at % (len(data) - 12)
    payload = data[13:at] + junk + data[at + 1 :]
    return twin.frame(data[4], 7, payload)


near_frames = st.builds(shortened, frames, st.integers(0, 400), st.binary(max_size=2))
bad_frames = st.one_of(
    st.builds(
        lambda length, rest: struct.pack(">I", length) + rest,
        st.one_of(st.integers(0, 8), st.integers(40 << 20, 2**32 - 1)),
        st.binary(max_size=12),
    ),
    st.builds(
        lambda kind, payload: struct.pack(">IBQ", 9 + len(payload), kind, 7) + payload,
        st.one_of(st.just(0), st.integers(14, 255)),
        st.binary(max_size=6),
    ),
)
streams = st.lists(st.one_of(frames, near_frames, any_frames), max_size=5).map(b"".join)
dirty_streams = st.builds(
    lambda good, end: good + end, streams, st.one_of(st.just(b""), bad_frames, st.binary(max_size=30))
)


# --- frames -------------------------------------------------------------------------------------------------


@given(calls)
def test_encoder_writes_what_the_twin_writes(call: tuple[Any, ...]) -> None:
    name, *arguments = call
    assert getattr(zeroctl, name)(*arguments) == getattr(twin, name)(*arguments)


@given(dirty_streams, st.lists(st.integers(0, 600), max_size=6))
def test_stream_decodes_as_by_the_twin_however_it_is_cut(data: bytes, at: list[int]) -> None:
    expected = decode_by_twin([data])
    assert decode([data]) == expected
    assert decode(cut(data, at)) == expected


@given(dirty_streams)
def test_stream_decodes_the_same_at_every_split_point(data: bytes) -> None:
    data = data[:400]
    expected = decode_by_twin([data])
    for at in range(len(data) + 1):
        assert decode([data[:at], data[at:]]) == expected
    assert decode([data[i : i + 1] for i in range(len(data))]) == expected


def test_length_is_judged_with_its_four_bytes_and_type_with_its_one() -> None:
    decoder = zeroctl.Decoder()
    with pytest.raises(zeroctl.FrameError, match="length 8 is below 9"):
        decoder.feed(bytes.fromhex("00000008"))
    decoder = zeroctl.Decoder()
    assert decoder.feed(bytes.fromhex("00000009")) == []
    with pytest.raises(zeroctl.FrameError, match="0x0E is unknown, at byte 4"):
        decoder.feed(b"\x0e")


def test_limits_bound_the_length_field() -> None:
    most = zeroctl.MESSAGE_OVERHEAD + (64 << 10) + (4 << 20)
    limits = {"max_header": 64 << 10, "max_body": 4 << 20}
    assert decode([struct.pack(">I", most)], **limits) == ([], None, 4)
    assert decode([struct.pack(">I", most + 1)], **limits) == ([], (0, "bad length"), 0)
    assert decode_by_twin([struct.pack(">I", most + 1)], **limits) == ([], (0, "bad length"), 0)


def test_largest_key_header_and_body_fit_in_a_frame() -> None:
    header = dumped(filler="x" * ((64 << 10) - len(dumped(filler=""))))
    assert len(header) == 64 << 10
    message = zeroctl.encode_message("k" * 255, header, bytes(4 << 20), 1)
    delivery = zeroctl.encode_delivery("k" * 255, header, bytes(4 << 20), 1, 1)
    for raw in (message, delivery):
        (frame,) = zeroctl.Decoder(max_header=64 << 10, max_body=4 << 20).feed(raw)
        assert isinstance(frame, zeroctl.Message | zeroctl.Delivery)
        assert frame.header == header
        assert len(frame.body) == 4 << 20


# --- headers ------------------------------------------------------------------------------------------------


def judged(header: bytes, lenient: bool = False) -> str | bytes | None:
    try:
        return zeroctl.header_sha256(header, lenient=lenient)
    except zeroctl.HeaderError as error:
        return str(error)


def judged_by_twin(header: bytes, lenient: bool = False) -> str | bytes | None:
    try:
        found = twin.read_header(header, lenient)
    except twin.BadPayload as bad:
        return bad.reason
    return bytes.fromhex(found["sha256"]) if found.get("sha256") else None


@given(any_header, st.booleans())
@example(b'{"a":1}{', False)
@example(b'{"a":[1,{"b":[]}]}', True)
@example(b"{} ", True)
@example(b"\xef\xbb\xbf{}", True)
@example(b'{"node-name":"\\ud83d\\ude00"}', True)
@example(b'{"node\\u002dname":"n","node-name":"n"}', True)
@example(b'{"ts":1e3}', True)
@example(b'{"ts":-0}', True)
def test_header_is_judged_as_by_the_twin(header: bytes, lenient: bool) -> None:
    assert judged(header, lenient) == judged_by_twin(header, lenient)


@pytest.mark.parametrize("name", ["node-name", "node-uuid", "ts", "sha256"])
def test_required_key_that_is_missing_is_named(name: str) -> None:
    assert judged(dumped(**{name: None})) == f"{name} is missing"


@pytest.mark.parametrize(
    "uuid",
    [UUID, UUID.upper(), UUID.replace("-", ""), "ab" * 32],
    ids=["dashed", "upper case", "32 digits", "64 digits"],
)
def test_every_form_of_node_uuid_is_taken(uuid: str) -> None:
    assert isinstance(judged(dumped(node_uuid=uuid)), bytes)


@pytest.mark.parametrize(
    "ts",
    [
        1586721895,
        1586721895.123456,
        1586721895123,
        1586721895123456,
        "1586721895",
        "1586721895.123456",
        "2020-04-12T22:04:55.123456789+02:00",
        "1970-01-01T00:00:00Z",
    ],
)
def test_every_form_of_ts_is_taken(ts: object) -> None:
    assert isinstance(judged(dumped(ts=ts)), bytes)


def test_empty_sha256_counts_as_none() -> None:
    assert judged(dumped(sha256="")) == "sha256 is missing"
    assert judged(dumped(sha256=""), lenient=True) is None
    assert judged(dumped(sha256=None), lenient=True) is None


def test_key_that_is_read_may_not_be_there_twice_and_another_may() -> None:
    assert judged(dumped()[:-1] + b', "ts": 1}') == "a key is in the header twice"
    assert isinstance(judged(dumped()[:-1] + b', "a": 1, "a": 2}'), bytes)


def test_header_may_be_nested_to_a_depth_of_32() -> None:
    deepest = b"[" * 31 + b"]" * 31
    assert isinstance(judged(dumped()[:-1] + b', "a": ' + deepest + b"}"), bytes)
    too_deep = judged(dumped()[:-1] + b', "a": [' + deepest + b"]}")
    assert too_deep == "the header has values nested deeper than 32"
    endless = b'{"a":' * 100_000
    assert judged(endless) == "the header has values nested deeper than 32"


@given(headers)
def test_reserved_keys_are_escaped_and_given_back_byte_for_byte(header: bytes) -> None:
    try:
        headers = twin.read_header(header, lenient=True)
    except twin.BadPayload:
        return
    escaped = zeroctl.escape(header)
    assert twin.read_header(escaped, lenient=True) == twin.escape(headers)
    assert zeroctl.unescape(escaped) == header


def test_escaping_touches_reserved_keys_alone() -> None:
    header = dumped()[:-1] + b', "_sec-sig": "s", "_transport": "x", "transport-y": 1}'
    assert zeroctl.escape(header) is header
    reserved = header[:-1] + b', "_transport-ttl": 1.50, "\\u005fpassed-": [ 2 ], "_sec-x": 1}'
    kept = header[:-1] + b', "_passed-_transport-ttl": 1.50, "_passed-\\u005fpassed-": [ 2 ], "_sec-x": 1}'
    assert zeroctl.escape(reserved) == kept
    assert zeroctl.unescape(kept) == reserved


@given(st.lists(st.tuples(st.sampled_from(["k", "n", "é"]), values), max_size=4), st.booleans(), st.data())
def test_conditions_hold_as_by_the_twin(pairs: list[tuple[str, Any]], ascii_only: bool, data: Any) -> None:
    pairs = list(dict(pairs).items())
    header = written(pairs, ascii_only, "")
    read = json.loads(header, parse_int=twin.Number, parse_float=twin.Number)
    near = [
        json.dumps(value, ensure_ascii=False).strip('"') for _, value in pairs if not isinstance(value, str)
    ]
    near += [
        value[:cut]
        for _, value in pairs
        if isinstance(value, str)
        for cut in (0, 1, len(value), len(value) - 1)
    ]
    kind = data.draw(st.integers(1, 3))
    key = data.draw(st.sampled_from(["k", "n", "m"]))
    value = data.draw(st.one_of(st.sampled_from(near), texts) if near else texts)
    assert zeroctl.header_has(header, kind, key, value) == twin.holds(read, kind, key, value)


# --- keys ---------------------------------------------------------------------------------------------------


@given(keys)
def test_key_is_judged_as_by_the_twin(key: str) -> None:
    assert zeroctl.is_key_text(key) == twin.key_valid(key)


@pytest.mark.parametrize("key", ["", "k" * 256, "event.*", "#", "event.#.x", "event.é", "event.\n"])
def test_what_is_no_routing_key_is_refused(key: str) -> None:
    with pytest.raises(zeroctl.HeaderError, match="a routing key has"):
        zeroctl.check_key(key)


def test_encoder_refuses_what_its_size_fields_cannot_say() -> None:
    with pytest.raises(ValueError, match="a routing key has"):
        zeroctl.encode_message("k" * 256, b"{}", b"", 1)
    with pytest.raises(ValueError, match="a key has 65535 bytes"):
        zeroctl.encode_open("k" * 65536, "", "", 1)
    with pytest.raises(ValueError, match="a body has"):
        zeroctl.encode_message("k", b"{}", bytes(zeroctl.MAX_MAX_BODY + 1), 1)
