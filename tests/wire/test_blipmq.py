"""The BlipMQ codec against the spec's samples and against its plain-Python twin."""

import json
import pickle
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.wire import blipmq
from tests.oracle import blipmq as twin

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "blipmq.json").read_text("utf-8"))
MAX = 16 * 1024 * 1024

Seen = tuple[str, int, int, int, dict[str, object]]
Outcome = tuple[list[Seen], tuple[int, str] | None, int]


def seen(frame: blipmq.Frame) -> Seen:
    """A frame in the form both codecs can be compared in; the reason's words are the compiled one's alone."""
    fields = {name: value for name, value in frame.fields().items() if name != "reason"}
    return frame.type.name, frame.correlation, frame.start, frame.end, fields


def seen_by_twin(frame: twin.Frame) -> Seen:
    return frame.name, frame.correlation, frame.start, frame.end, frame.fields


def decode(pieces: list[bytes], max_frame: int = MAX) -> Outcome:
    """All frames of the pieces, the error that ended them, and how many bytes are left over."""
    decoder = blipmq.Decoder(max_frame)
    frames: list[Seen] = []
    for piece in pieces:
        try:
            frames += map(seen, decoder.feed(piece))
        except blipmq.FrameError:
            break
    error = None if decoder.error is None else (decoder.error.position, decoder.error.kind)
    return frames, error, decoder.pending


def decode_by_twin(pieces: list[bytes], max_frame: int = MAX) -> Outcome:
    decoder = twin.Decoder(max_frame)
    frames: list[Seen] = []
    for piece in pieces:
        frames += map(seen_by_twin, decoder.feed(piece))
    error = None if decoder.error is None else (decoder.error.position, decoder.error.kind)
    return frames, error, len(decoder.tail)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(i, len(data)) for i in at), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


u8 = st.integers(0, 0xFF)
u16 = st.integers(0, 0xFFFF)
u64 = st.integers(0, 2**64 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)

# One entry a frame type: the encoder's name and its arguments.
calls: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.tuples(st.just("encode_hello"), u16, u64),
    st.tuples(st.just("encode_auth"), texts, u64),
    st.tuples(st.just("encode_publish"), texts, st.binary(max_size=80), u8, u64),
    st.tuples(st.just("encode_subscribe"), texts, u8, u64),
    st.tuples(st.just("encode_ack"), u64, u64),
    st.tuples(st.just("encode_nack"), u16, texts, u64),
    st.tuples(st.just("encode_ping"), u64),
    st.tuples(st.just("encode_pong"), u64),
    st.tuples(st.just("encode_poll"), u64, u64),
)


def text_payload(before: bytes, raw: bytes, off_by: int, after: bytes) -> bytes:
    """A payload with a text in it whose length field may be wrong."""
    return before + struct.pack(">H", max(0, len(raw) + off_by)) + raw + after


# Payloads near to well-formed ones, so that each check of each type is on both sides of its edge.
payloads = st.one_of(
    st.binary(max_size=12),
    st.builds(
        text_payload,
        st.binary(max_size=2),
        st.one_of(texts.map(str.encode), st.binary(max_size=9)),
        st.integers(-2, 2),
        st.binary(max_size=2),
    ),
)
any_frames = st.builds(
    lambda kind, correlation, payload: struct.pack(">IBQ", 9 + len(payload), kind, correlation) + payload,
    st.integers(0x01, 0x09),
    u64,
    payloads,
)
good_frames = calls.map(lambda call: getattr(twin, call[0])(*call[1:]))
bad_frames = st.one_of(
    st.builds(
        lambda length, rest: struct.pack(">I", length) + rest,
        st.one_of(st.integers(0, 8), st.integers(MAX + 1, 2**32 - 1)),
        st.binary(max_size=12),
    ),
    st.builds(
        lambda kind, payload: struct.pack(">IBQ", 9 + len(payload), kind, 7) + payload,
        st.one_of(st.just(0), st.integers(0x0A, 0xFF)),
        st.binary(max_size=6),
    ),
)
streams = st.lists(st.one_of(good_frames, any_frames), max_size=6).map(b"".join)
# Good frames, then perhaps a bad one, an unfinished one or noise.
dirty_streams = st.builds(
    lambda good, end: good + end,
    streams,
    st.one_of(bad_frames, st.tuples(bad_frames, good_frames).map(b"".join), st.binary(max_size=30)),
)


# --- the spec's samples ------------------------------------------------------------------------------------


def as_text(fields: dict[str, object]) -> dict[str, object]:
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in fields.items()}


@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
def test_sample_of_the_spec_decodes_to_what_the_spec_says(vector: dict[str, Any]) -> None:
    raw = bytes.fromhex(vector["hex"])
    (frame,) = blipmq.Decoder().feed(raw)
    assert frame.type is blipmq.FrameType[vector["type"]]
    assert frame.correlation == vector["correlation"]
    assert as_text(frame.fields()) == vector["fields"]
    assert (frame.start, frame.end) == (0, len(raw))


@pytest.mark.parametrize("module", [blipmq, twin], ids=["compiled", "twin"])
@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
def test_sample_of_the_spec_is_what_the_encoder_writes(vector: dict[str, Any], module: Any) -> None:
    name, *arguments = vector["encode"]
    if name == "encode_publish":
        arguments[1] = arguments[1].encode()
    assert getattr(module, name)(*arguments) == bytes.fromhex(vector["hex"])


def test_frame_types_are_those_of_the_spec() -> None:
    assert {kind.name: kind.value for kind in blipmq.FrameType} == {
        "HELLO": 0x01,
        "AUTH": 0x02,
        "PUBLISH": 0x03,
        "SUBSCRIBE": 0x04,
        "ACK": 0x05,
        "NACK": 0x06,
        "PING": 0x07,
        "PONG": 0x08,
        "POLL": 0x09,
    }


# --- against the twin ---------------------------------------------------------------------------------------


@given(calls)
def test_every_frame_is_encoded_as_the_twin_encodes_it(call: tuple[Any, ...]) -> None:
    name, *arguments = call
    encoded = getattr(blipmq, name)(*arguments)
    assert encoded == getattr(twin, name)(*arguments)
    (frame,) = blipmq.Decoder().feed(encoded)
    assert not isinstance(frame, blipmq.Malformed)
    assert frame.correlation == arguments[-1]


@given(streams)
def test_frames_are_decoded_as_the_twin_decodes_them(stream: bytes) -> None:
    assert decode([stream]) == decode_by_twin([stream])


@given(dirty_streams)
def test_every_split_point_gives_the_same_frames_and_the_same_end(stream: bytes) -> None:
    whole = decode_by_twin([stream])
    for i in range(len(stream) + 1):
        assert decode([stream[:i], stream[i:]]) == whole


@given(dirty_streams, st.lists(st.integers(0, 400), max_size=12))
def test_many_pieces_give_the_same_frames_and_the_same_end(stream: bytes, at: list[int]) -> None:
    whole = decode_by_twin([stream])
    assert decode(cut(stream, at)) == whole
    assert decode([stream[i : i + 1] for i in range(len(stream))]) == whole


@given(st.binary(max_size=200), st.integers(9, 64), st.lists(st.integers(0, 200), max_size=5))
@example(b"\x00\x00\x00\x0a" + b"\x00" * 10, 10, [4, 13])
def test_noise_and_low_limits_end_where_the_twin_ends(noise: bytes, max_frame: int, at: list[int]) -> None:
    assert decode(cut(noise, at), max_frame) == decode_by_twin([noise], max_frame)


@given(streams)
def test_progress_is_told_at_every_byte(stream: bytes) -> None:
    decoder = blipmq.Decoder()
    judge = twin.Decoder()
    for i in range(len(stream)):
        decoder.feed(stream[i : i + 1])
        judge.feed(stream[i : i + 1])
        assert (decoder.position, decoder.pending) == (judge.position, len(judge.tail))
        length_is_there = len(judge.tail) >= 4
        assert decoder.wanted == (4 + int.from_bytes(judge.tail[:4], "big") if length_is_there else 0)


@given(texts, st.lists(st.binary(max_size=60)), st.integers(0, 1), st.integers(0, 2**63))
def test_many_publishes_in_one_call_are_the_frames_of_single_calls(
    topic: str, messages: list[bytes], qos: int, first: int
) -> None:
    single = [blipmq.encode_publish(topic, message, qos, first + i) for i, message in enumerate(messages)]
    assert blipmq.encode_publish_many(topic, messages, qos, first) == b"".join(single)
    assert twin.encode_publish_many(topic, messages, qos, first) == b"".join(single)


# --- what ends a stream -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 8, MAX + 1, 2**32 - 1])
def test_bad_length_is_found_with_its_fourth_byte(length: int) -> None:
    raw = struct.pack(">I", length)
    decoder = blipmq.Decoder()
    assert decoder.feed(raw[:3]) == []
    with pytest.raises(blipmq.FrameError) as caught:
        decoder.feed(raw[3:])
    assert (caught.value.position, caught.value.kind) == (0, "bad length")
    assert str(length) in caught.value.reason


@pytest.mark.parametrize("kind", [0x00, 0x0A, 0xFF])
def test_unknown_type_is_found_only_when_the_whole_frame_is_there(kind: int) -> None:
    raw = struct.pack(">IBQ", 12, kind, 1) + b"abc"
    decoder = blipmq.Decoder()
    assert decoder.feed(raw[:-1]) == []
    with pytest.raises(blipmq.FrameError) as caught:
        decoder.feed(raw[-1:])
    assert (caught.value.position, caught.value.kind) == (4, "bad type")
    assert str(caught.value) == f"frame type 0x{kind:02X} is unknown, at byte 4"


def test_frames_before_a_bad_one_come_out_and_the_next_call_raises() -> None:
    decoder = blipmq.Decoder()
    (frame,) = decoder.feed(blipmq.encode_ping(5) + bytes(4) + blipmq.encode_ping(6))
    assert isinstance(frame, blipmq.Ping)
    assert decoder.error is not None
    assert decoder.error.position == 13
    for _ in range(2):
        with pytest.raises(blipmq.FrameError) as caught:
            decoder.feed(blipmq.encode_ping(7))
        assert caught.value is decoder.error


def test_error_survives_pickling() -> None:
    error = blipmq.FrameError(4, "bad type", "frame type 0x0A is unknown")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.position, copy.kind, copy.reason) == (4, "bad type", "frame type 0x0A is unknown")


# --- malformed payloads -------------------------------------------------------------------------------------


def framed(kind: int, payload: bytes) -> bytes:
    return struct.pack(">IBQ", 9 + len(payload), kind, 77) + payload


@pytest.mark.parametrize(
    ("kind", "payload", "expected", "reason"),
    [
        (0x01, b"", "bad size", "the payload of HELLO has 2 bytes, not 0"),
        (0x01, b"\0\1\0", "bad size", "the payload of HELLO has 2 bytes, not 3"),
        (0x02, b"\0", "bad size", "the payload of AUTH has at least 2 bytes, not 1"),
        (0x02, b"\0\3ab", "bad inner length", "the key length 3 points past the payload"),
        (0x02, b"\0\1ab", "bad size", "bytes follow the key, which is the last field"),
        (0x02, b"\0\1\xff", "bad text", "the key is not UTF-8"),
        (0x03, b"\0\0", "bad size", "the payload of PUBLISH has at least 3 bytes, not 2"),
        (0x03, b"\0\0\2a", "bad inner length", "the topic length 2 points past the payload"),
        (0x03, b"\0\0\2\xc3a", "bad text", "the topic is not UTF-8"),
        (0x04, b"\0\0", "bad size", "the payload of SUBSCRIBE has at least 3 bytes, not 2"),
        (0x04, b"\0\1a", "bad inner length", "the topic length 1 points past the payload"),
        (0x04, b"\0\1\x80\0", "bad text", "the topic is not UTF-8"),
        (0x05, bytes(7), "bad size", "the payload of ACK has 8 bytes, not 7"),
        (0x05, bytes(9), "bad size", "the payload of ACK has 8 bytes, not 9"),
        (0x06, b"\1\x90\0", "bad size", "the payload of NACK has at least 4 bytes, not 3"),
        (0x06, b"\1\x90\0\2a", "bad inner length", "the text length 2 points past the payload"),
        (0x06, b"\1\x90\0\0a", "bad size", "bytes follow the text, which is the last field"),
        (0x06, b"\1\x90\0\1\xff", "bad text", "the text is not UTF-8"),
        (0x09, b"", "bad size", "the payload of POLL has 8 bytes, not 0"),
    ],
)
def test_malformed_payload_says_why_and_the_stream_goes_on(
    kind: int, payload: bytes, expected: str, reason: str
) -> None:
    bad, after = blipmq.Decoder().feed(framed(kind, payload) + blipmq.encode_pong(1))
    assert isinstance(bad, blipmq.Malformed)
    assert bad.type == kind
    assert (bad.correlation, bad.payload, bad.kind) == (77, payload, expected)
    assert bad.reason == reason
    assert isinstance(after, blipmq.Pong)


def test_what_a_server_refuses_by_meaning_is_well_formed() -> None:
    publish, subscribe, auth = blipmq.Decoder().feed(
        blipmq.encode_publish("", b"", 7, 1) + blipmq.encode_subscribe("", 255, 2) + blipmq.encode_auth("", 3)
    )
    assert isinstance(publish, blipmq.Publish)
    assert (publish.topic, publish.message, publish.qos) == ("", b"", 7)
    assert isinstance(subscribe, blipmq.Subscribe)
    assert (subscribe.topic, subscribe.qos) == ("", 255)
    assert isinstance(auth, blipmq.Auth)
    assert auth.key == ""


def test_bytes_after_a_subscribe_and_inside_a_ping_are_accepted() -> None:
    subscribe, ping, pong = blipmq.Decoder().feed(
        framed(0x04, b"\0\1a\1more") + framed(0x07, b"x") + framed(0x08, b"y")
    )
    assert isinstance(subscribe, blipmq.Subscribe)
    assert (subscribe.topic, subscribe.qos, subscribe.trailing) == ("a", 1, b"more")
    assert isinstance(ping, blipmq.Ping)
    assert ping.payload == b"x"
    assert isinstance(pong, blipmq.Pong)
    assert pong.payload == b"y"


def suspicious_texts() -> Iterator[bytes]:
    """Every lead byte with up to three bytes behind it from the edges of every range."""
    edges = b"\x7f\x80\x8f\x90\x9f\xa0\xbf\xc0"
    for lead in range(256):
        for size in range(4):
            for rest in product(edges, repeat=size):
                yield bytes([lead, *rest])


@pytest.mark.parametrize("before", [0, 1, 5, 8, 13])
def test_utf8_is_judged_as_python_judges_it(before: int) -> None:
    texts = [b"a" * before + text + b"z" * (before // 2) for text in suspicious_texts()]
    frames = blipmq.Decoder().feed(b"".join(framed(0x03, struct.pack(">BH", 0, len(t)) + t) for t in texts))
    valid = 0
    for text, frame in zip(texts, frames, strict=True):
        try:
            expected = text.decode()
        except UnicodeDecodeError:
            assert isinstance(frame, blipmq.Malformed), text
            assert frame.kind == "bad text"
        else:
            assert isinstance(frame, blipmq.Publish), text
            assert frame.topic == expected
            valid += 1
    assert 0 < valid < len(texts)


def test_topics_that_change_and_return_are_told_apart() -> None:
    topics = ["a", "a", "b", "", "ab", "a", "grün", "grün", "gr"]
    raw = b"".join(blipmq.encode_publish(topic, b"m", 0, 1) for topic in topics)
    frames = blipmq.Decoder().feed(raw)
    assert [frame.fields()["topic"] for frame in frames] == topics


def test_malformed_topic_after_a_good_one_of_the_same_size_is_found() -> None:
    raw = framed(0x03, b"\0\0\2ab") + framed(0x03, b"\0\0\2a\xff") + framed(0x03, b"\0\0\2ab")
    assert [type(f).__name__ for f in blipmq.Decoder().feed(raw)] == ["Publish", "Malformed", "Publish"]


# --- limits -------------------------------------------------------------------------------------------------


def test_frame_of_the_largest_length_passes_and_one_byte_more_does_not() -> None:
    message = bytes(MAX - 9 - 3 - 1)
    raw = blipmq.encode_publish("t", message, 0, 1)
    assert len(raw) == MAX + 4
    (frame,) = blipmq.Decoder().feed(raw)
    assert isinstance(frame, blipmq.Publish)
    assert frame.message == message
    encoders: list[Callable[[], bytes]] = [
        lambda: blipmq.encode_publish("t", message + b"\0", 0, 1),
        lambda: blipmq.encode_publish_many("t", [b"", message + b"\0"], 0, 1),
    ]
    for encode in encoders:
        with pytest.raises(ValueError, match="length would be 16777217, the most is 16777216"):
            encode()


def test_largest_frame_arrives_in_pieces() -> None:
    message = bytes(range(256)) * (MAX // 256)
    raw = blipmq.encode_publish("t", message[: MAX - 9 - 3 - 1], 0, 1) + blipmq.encode_ping(2)
    decoder = blipmq.Decoder()
    frames = [frame for i in range(0, len(raw), 100_000) for frame in decoder.feed(raw[i : i + 100_000])]
    publish, ping = frames
    assert isinstance(publish, blipmq.Publish)
    assert publish.message == message[: MAX - 9 - 3 - 1]
    assert isinstance(ping, blipmq.Ping)
    assert decoder.pending == 0


def test_announced_length_takes_no_memory_before_its_bytes_arrive() -> None:
    decoders = [blipmq.Decoder() for _ in range(16)]
    tracemalloc.start()
    try:
        for decoder in decoders:
            assert decoder.feed(struct.pack(">I", MAX) + b"\x03") == []
            assert (decoder.pending, decoder.wanted) == (5, MAX + 4)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024


def test_lower_limit_is_judged_by_the_length_field() -> None:
    raw = blipmq.encode_ack(1, 1)
    assert len(blipmq.Decoder(max_frame=17).feed(raw)) == 1
    with pytest.raises(blipmq.FrameError, match="length 17 is above 16"):
        blipmq.Decoder(max_frame=16).feed(raw)


@pytest.mark.parametrize("limit", [8, 0, -1, MAX + 1])
def test_limit_outside_the_protocol_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="max_frame must be from 9 to 16777216"):
        blipmq.Decoder(max_frame=limit)


def test_text_longer_than_its_length_field_can_say_is_refused() -> None:
    longest = "ä" * 32767 + "a"
    assert len(longest.encode()) == 0xFFFF
    encoders: list[Callable[[str], bytes]] = [
        lambda text: blipmq.encode_auth(text, 1),
        lambda text: blipmq.encode_publish(text, b"m", 0, 1),
        lambda text: blipmq.encode_publish_many(text, [b"m"], 0, 1),
        lambda text: blipmq.encode_subscribe(text, 0, 1),
        lambda text: blipmq.encode_nack(400, text, 1),
    ]
    for encode in encoders:
        (frame,) = blipmq.Decoder().feed(encode(longest))
        assert longest in frame.fields().values()
        with pytest.raises(ValueError, match="has 65536 bytes in UTF-8, the most is 65535"):
            encode(longest + "a")


@pytest.mark.parametrize(
    "encode",
    [
        lambda: blipmq.encode_hello(0x10000, 1),
        lambda: blipmq.encode_hello(1, 2**64),
        lambda: blipmq.encode_ping(-1),
        lambda: blipmq.encode_publish("t", b"", 256, 1),
        lambda: blipmq.encode_nack(-1, "", 1),
        lambda: blipmq.encode_poll(2**64, 1),
    ],
)
def test_number_that_does_not_fit_its_field_is_refused(encode: Callable[[], bytes]) -> None:
    with pytest.raises(OverflowError):
        encode()


def test_lone_surrogate_is_refused_by_the_encoder() -> None:
    with pytest.raises(UnicodeEncodeError):
        blipmq.encode_subscribe("\ud800", 0, 1)


# --- Python objects -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_taken(kind: Callable[[bytes], Any]) -> None:
    plain = blipmq.encode_publish("t", b"hello", 1, 9)
    assert blipmq.encode_publish("t", kind(b"hello"), 1, 9) == plain
    assert blipmq.encode_publish_many("t", iter([kind(b"hello")]), 1, 9) == plain
    (frame,) = blipmq.Decoder().feed(kind(plain))
    assert frame.fields() == {"topic": "t", "qos": 1, "message": b"hello"}


@pytest.mark.parametrize("wrong", ["text", 5, None, [1]])
def test_what_is_not_a_buffer_is_refused(wrong: Any) -> None:
    for use in (
        lambda: blipmq.encode_publish("t", wrong, 0, 1),
        lambda: blipmq.encode_publish_many("t", [b"first", wrong], 0, 1),
        lambda: blipmq.Decoder().feed(wrong),
    ):
        with pytest.raises(TypeError):
            use()


def test_frames_keep_their_bytes_when_the_fed_buffer_changes() -> None:
    buffer = bytearray(blipmq.encode_publish("topic", b"message", 0, 1) + blipmq.encode_ping(2)[:6])
    decoder = blipmq.Decoder()
    (frame,) = decoder.feed(buffer)
    buffer[:] = bytes(len(buffer))
    (ping,) = decoder.feed(blipmq.encode_ping(2)[6:])
    assert frame.fields() == {"topic": "topic", "qos": 0, "message": b"message"}
    assert ping.correlation == 2


def test_frame_shows_itself_and_is_made_only_by_a_decoder() -> None:
    (frame,) = blipmq.Decoder().feed(blipmq.encode_nack(404, "unknown", 12))
    assert repr(frame) == "<Nack correlation=12 code=404 text='unknown' [0:24]>"
    with pytest.raises(TypeError, match="come out of a Decoder"):
        blipmq.Nack()
