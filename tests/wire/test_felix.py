"""The Felix codec against the reference's vectors and against its plain-Python twin."""

import json
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import UNSET

from headrace.wire import felix, felix_json
from tests.oracle import felix as twin

VECTORS = Path(__file__).parent.parent / "vectors" / "felix"
NAMES = ["cache_put", "error", "ok", "publish", "subscribe"]
MAX = 16 * 1024 * 1024

Outcome = tuple[list[tuple[int, bytes, int, int]], tuple[int, str] | None, int]


def decode(pieces: list[bytes], max_frame: int = MAX) -> Outcome:
    """All frames of the pieces, the error that ended them, and how many bytes are left over."""
    decoder = felix.Decoder(max_frame)
    frames = []
    for piece in pieces:
        try:
            frames += [(one.flags, one.payload, one.start, one.end) for one in decoder.feed(piece)]
        except felix.FrameError:
            break
    error = None if decoder.error is None else (decoder.error.position, decoder.error.kind)
    return frames, error, decoder.pending


def decode_by_twin(pieces: list[bytes], max_frame: int = MAX) -> Outcome:
    decoder = twin.Decoder(max_frame)
    frames = []
    for piece in pieces:
        frames += [(one.flags, one.payload, one.start, one.end) for one in decoder.feed(piece)]
    error = None if decoder.error is None else (decoder.error.position, decoder.error.kind)
    return frames, error, len(decoder.tail)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(i, len(data)) for i in at), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def outcome(do: Callable[..., Any], *args: Any) -> Any:
    """What a parser returns, or the kind of what it complains about."""
    try:
        return do(*args)
    except (felix.PayloadError, twin.BadPayload) as bad:
        return bad.kind


names = st.text(max_size=8)
payloads = st.lists(st.binary(max_size=12), max_size=6)
batches = st.builds(twin.encode_publish_batch, names, names, names, payloads)
events = st.builds(twin.encode_event_batch, st.integers(0, 2**64 - 1), payloads)
plain = st.builds(twin.frame, st.binary(max_size=20), st.integers(0, 0xFFFF))
good_frames = st.one_of(batches, events, plain)
bad_frames = st.sampled_from(
    [
        b"FLX2\x00\x01\x00\x00\x00\x00\x00\x00",
        b"FLX1\x00\x02",
        b"FLX1\x00\x01\x00\x00\x7f\xff\xff\xff",
        b"GET /",
    ]
)


# --- the reference's vectors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_vectors_hold_byte_for_byte_in_both_directions(name: str) -> None:
    vector = json.loads((VECTORS / f"{name}.json").read_text())
    raw = bytes.fromhex((VECTORS / f"{name}.hex").read_text())
    assert raw == bytes.fromhex(vector["frame_hex"])
    (frame,) = felix.Decoder().feed(raw)
    assert frame.payload.decode() == vector["payload_json"]
    assert (frame.flags, frame.start, frame.end) == (0, 0, len(raw))
    message = felix.decode_message(frame.payload)
    assert felix_json.encode(message).hex() == vector["payload_hex"]
    assert felix.encode_message(message) == raw


def test_samples_of_the_notes_hold() -> None:
    def sample(message: felix_json.Message) -> str:
        return felix.encode_message(message)[:12].hex()

    assert sample(felix_json.Subscribed(1)) == "464c58310001000000000029"
    assert sample(felix_json.EventStreamHello(1)) == "464c58310001000000000031"
    assert sample(felix_json.PublishOk(1)) == "464c58310001000000000024"
    assert sample(felix_json.CacheOk(1)) == "464c58310001000000000022"
    assert felix.encode_publish_batch("t1", "default", "demo", [b"a", b"bc"]).hex() == (
        "464c5831000100010000002200027431000764656661756c74000464656d6f000000020000000161000000026263"
    )
    assert felix.encode_event_batch(7, [b"a", b"bc"]).hex() == (
        "464c58310001000200000017000000000000000700000002000000016100000002" + "6263"
    )


# --- frames against the twin ----------------------------------------------------------------------------------


@given(st.lists(good_frames, max_size=6), st.lists(st.integers(0, 200), max_size=8), st.none() | bad_frames)
def test_any_pieces_give_the_twins_frames(frames: list[bytes], at: list[int], bad: bytes | None) -> None:
    data = b"".join(frames) + (bad or b"")
    assert decode(cut(data, at)) == decode_by_twin(cut(data, at))


@given(st.lists(good_frames, min_size=1, max_size=3))
def test_every_split_point_gives_the_same_frames(frames: list[bytes]) -> None:
    data = b"".join(frames)
    whole = decode([data])
    assert len(whole[0]) == len(frames)
    for at in range(len(data) + 1):
        assert decode([data[:at], data[at:]]) == whole
    assert decode([data[i : i + 1] for i in range(len(data))]) == whole


@given(st.binary(max_size=64), st.lists(st.integers(0, 64), max_size=4))
@example(b"FLX1\x00\x01\x00\x00\x00\x00\x00", [3])
def test_any_bytes_are_judged_as_the_twin_judges_them(data: bytes, at: list[int]) -> None:
    assert decode(cut(data, at)) == decode_by_twin(cut(data, at))


@pytest.mark.parametrize(
    ("data", "position", "kind"),
    [
        (b"HTTP", 0, "bad magic"),
        (b"FLX1\x00\x00", 4, "bad version"),
        (b"FLX1\x00\x02", 4, "bad version"),
        (b"FLX1\x00\x01\x00\x00\x01\x00\x00\x01", 8, "bad length"),
    ],
)
def test_a_bad_header_is_judged_before_its_body_comes(data: bytes, position: int, kind: str) -> None:
    with pytest.raises(felix.FrameError) as caught:
        felix.Decoder().feed(data)
    assert (caught.value.position, caught.value.kind) == (position, kind)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_length_of_the_limit_is_accepted_and_one_more_is_not() -> None:
    header = b"FLX1\x00\x01\x00\x00"
    decoder = felix.Decoder(max_frame=100)
    (frame,) = decoder.feed(header + struct.pack(">I", 100) + bytes(100))
    assert len(frame.payload) == 100
    with pytest.raises(felix.FrameError, match="length 101 is above 100"):
        decoder.feed(header + struct.pack(">I", 101))


def test_an_announced_length_allocates_nothing() -> None:
    decoder = felix.Decoder()
    tracemalloc.start()
    try:
        assert decoder.feed(b"FLX1\x00\x01\x00\x00" + struct.pack(">I", MAX)) == []
        assert decoder.wanted == MAX + 12
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_unknown_flag_bits_are_ignored() -> None:
    (frame,) = felix.Decoder().feed(twin.frame(b"{}", 0xFFF8))
    assert frame.payload == b"{}"


# --- batches against the twin ---------------------------------------------------------------------------------


@given(names, names, names, payloads)
def test_a_publish_batch_goes_there_and_back(
    tenant: str, namespace: str, stream: str, data: list[bytes]
) -> None:
    frame = felix.encode_publish_batch(tenant, namespace, stream, data)
    assert frame == twin.encode_publish_batch(tenant, namespace, stream, data)
    assert felix.decode_publish_batch(frame[12:]) == (tenant, namespace, stream, data)
    assert felix.measure_batches(frame + frame) == (2 * len(data), 2 * sum(map(len, data)))


@given(st.integers(0, 2**64 - 1), payloads)
def test_an_event_batch_goes_there_and_back(subscription: int, data: list[bytes]) -> None:
    frame = felix.encode_event_batch(subscription, data)
    assert frame == twin.encode_event_batch(subscription, data)
    assert felix.decode_event_batch(frame[12:]) == (subscription, data)


@given(batches, st.integers(0, 100), st.binary(max_size=6))
def test_a_broken_publish_batch_is_judged_as_the_twin_judges_it(frame: bytes, at: int, patch: bytes) -> None:
    payload = frame[12:]
    payload = payload[:at] + patch + payload[at + len(patch) :]
    assert outcome(felix.decode_publish_batch, payload) == outcome(twin.decode_publish_batch, payload)
    for end in range(len(payload)):
        assert outcome(felix.decode_publish_batch, payload[:end]) == outcome(
            twin.decode_publish_batch, payload[:end]
        )


@given(st.binary(max_size=40))
def test_any_bytes_as_event_batch_are_judged_as_the_twin_judges_them(payload: bytes) -> None:
    assert outcome(felix.decode_event_batch, payload) == outcome(twin.decode_event_batch, payload)


def test_a_count_beyond_the_bytes_allocates_nothing() -> None:
    payload = b"\0\1t\0\1n\0\1s" + b"\xff\xff\xff\xff" + bytes(1000)
    tracemalloc.start()
    try:
        with pytest.raises(felix.PayloadError, match="more items than there are bytes for"):
            felix.decode_publish_batch(payload)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_what_follows_a_batch_is_ignored() -> None:
    payload = felix.encode_publish_batch("t", "n", "s", [b"a"])[12:] + b"trailing"
    assert felix.decode_publish_batch(payload) == ("t", "n", "s", [b"a"])


def test_what_does_not_fit_its_field_is_refused() -> None:
    with pytest.raises(ValueError, match="65536 bytes in UTF-8"):
        felix.encode_publish_batch("t" * 65536, "n", "s", [])
    with pytest.raises(ValueError, match="the most is 16777216"):
        felix.encode_publish_batch("t", "n", "s", [bytes(MAX)])
    with pytest.raises(ValueError, match="the most is 16777216"):
        felix.encode_event_batch(1, [bytes(MAX)])
    with pytest.raises(ValueError, match="the most is 16777216"):
        felix.encode_frame(bytes(MAX + 1))


def test_payloads_may_be_any_buffer() -> None:
    given_ = [bytearray(b"a"), memoryview(b"bc"), b"d"]
    assert felix.decode_publish_batch(felix.encode_publish_batch("t", "n", "s", given_)[12:])[3] == [
        b"a",
        b"bc",
        b"d",
    ]


# --- JSON ---------------------------------------------------------------------------------------------------


@given(st.binary(max_size=100))
def test_base64_is_as_the_standard_has_it(data: bytes) -> None:
    raw = felix.raw_payload(data)
    assert bytes(raw) == b'"' + twin.b64(data).encode() + b'"'
    assert felix.payload_of(raw) == data
    assert felix.payloads_of(felix.raw_payloads([data, b"", data])) == [data, b"", data]


@given(st.text(alphabet="Aa0+/=-_ \nZ9", max_size=12))
def test_what_is_no_strict_base64_is_refused_as_by_the_twin(text: str) -> None:
    raw = json.dumps(text).encode()
    assert outcome(felix.payload_of, raw) == outcome(twin.unb64, text)


def test_escapes_in_base64_are_read() -> None:
    assert felix.payload_of(rb'"\/\/\u0038="') == b"\xff\xff"
    assert felix.payloads_of(rb'[ "\/\/8=" , "YQ==" ]') == [b"\xff\xff", b"a"]


@pytest.mark.parametrize("raw", [b"1", b"{}", b'["YQ==", 1]', b'["YQ==", ["YQ=="]]', b'[""", ""]'])
def test_payloads_that_are_no_list_of_texts_are_refused(raw: bytes) -> None:
    with pytest.raises(felix.PayloadError):
        felix.payloads_of(raw)


def test_a_type_may_stand_anywhere_and_unknown_fields_are_ignored() -> None:
    message = felix.decode_message(b' {"later":[{}],"key":"k","type":"cache_get"} ')
    assert isinstance(message, felix_json.CacheGet)
    assert (message.key, message.cache, message.request_id) == ("k", UNSET, UNSET)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"type":"hop"}',
        b'{"type":"publish","tenant_id":"t","namespace":"n","stream":"s"}',
        b'{"type":"publish","tenant_id":1,"namespace":"n","stream":"s","payload":""}',
        b'{"type":"publish","tenant_id":"t","namespace":"n","stream":"s","payload":"","ack":"all"}',
        b'{"type":"publish","tenant_id":"t","namespace":"n","stream":"s","payload":"","request_id":-1}',
        b'{"type":"publish","tenant_id":"t","namespace":"n","stream":"s","payload":"","request_id":1.5}',
        b'{"type":"publish","tenant_id":"t","namespace":"n","stream":"s","payload":"","request_id":true}',
        b'{"type":"cache_get","key":"k","request_id":18446744073709551616}',
        b'{"type":"cache_get","key":"k"} x',
        b'\xef\xbb\xbf{"type":"ok"}',
        b'{"type":"ok","\xff":1}',
    ],
)
def test_what_is_no_message_is_refused_with_a_reason(payload: bytes) -> None:
    with pytest.raises(felix.PayloadError) as caught:
        felix.decode_message(payload)
    assert caught.value.kind in ("bad json", "bad text")
    assert str(caught.value)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (felix_json.Ok(), '{"type":"ok"}'),
        (felix_json.Ok("r1"), '{"type":"ok","request_id":"r1"}'),
        (felix_json.Error("no", "r1"), '{"type":"error","request_id":"r1","message":"no"}'),
        (felix_json.PublishError("no", 7), '{"type":"publish_error","request_id":7,"message":"no"}'),
        (
            felix_json.CacheValue("k", felix.raw_payload(None), request_id="r"),
            '{"type":"cache_value","request_id":"r","key":"k","value":null}',
        ),
        (
            felix_json.CacheValue("k", felix.raw_payload(b"v"), "t", "n", "c", 3),
            '{"type":"cache_value","tenant_id":"t","namespace":"n","cache":"c","key":"k","value":"dg==","request_id":3}',
        ),
        (
            felix_json.CachePut("k", felix.raw_payload(b"v"), request_id="r"),
            '{"type":"cache_put","key":"k","value":"dg==","request_id":"r","ttl_ms":null}',
        ),
    ],
)
def test_fields_are_written_in_the_dialects_order(message: felix_json.Message, text: str) -> None:
    assert felix_json.encode(message).decode() == text


# --- addresses ------------------------------------------------------------------------------------------------


@given(st.text(min_size=1), st.text(min_size=1), st.text(min_size=1))
@example("a.b", "50%", "x.y.z")
@example("%2E", "%25", "%")
def test_an_address_and_its_topic_go_there_and_back(tenant: str, namespace: str, stream: str) -> None:
    topic = felix.topic_of(tenant, namespace, stream)
    assert topic == twin.topic_of(tenant, namespace, stream)
    assert felix.address_of(topic) == (tenant, namespace, stream)
    assert felix.split_address(felix.join_address(tenant, namespace, stream)) == (tenant, namespace, stream)


@pytest.mark.parametrize("topic", ["", "demo", "a.b", "a..c", ".b.c", "a.b.", "a%41.b.c", "a.%.c", "50%.b.c"])
def test_a_topic_without_counterpart_has_no_address(topic: str) -> None:
    assert felix.address_of(topic) is None


@pytest.mark.parametrize("address", ["", "t", "t/n", "/n/s", "t//s", "t/n/"])
def test_an_address_is_three_names(address: str) -> None:
    with pytest.raises(ValueError, match="tenant/namespace/stream"):
        felix.split_address(address)
