"""The BlipMQ codec again, in plain Python with struct: the judge of the compiled one, and its yardstick.

It is written from the protocol's text alone and shares nothing with the compiled module."""

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

LENGTH = struct.Struct(">I")
HEADER = struct.Struct(">IBQ")
U16 = struct.Struct(">H")
U64 = struct.Struct(">Q")
PUBLISH_START = struct.Struct(">BH")
NACK_START = struct.Struct(">HH")

MAX_LENGTH = 16 * 1024 * 1024


class BadStream(Exception):
    """The stream cannot be read on."""

    def __init__(self, position: int, kind: str) -> None:
        super().__init__(position, kind)
        self.position = position
        self.kind = kind


class BadPayload(Exception):
    """A payload that is not what its frame type asks for."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(slots=True)
class Frame:
    name: str
    correlation: int
    start: int
    end: int
    fields: dict[str, object]


def text_at(payload: bytes, size: int, start: int, needed_after: int = 0) -> str:
    """The UTF-8 text of `size` bytes at `start`, with at least `needed_after` bytes behind it."""
    if len(payload) - start < size + needed_after:
        raise BadPayload("bad inner length")
    try:
        return payload[start : start + size].decode("utf-8")
    except UnicodeDecodeError:
        raise BadPayload("bad text") from None


def read_hello(payload: bytes) -> dict[str, object]:
    if len(payload) != 2:
        raise BadPayload("bad size")
    return {"version": U16.unpack(payload)[0]}


def read_auth(payload: bytes) -> dict[str, object]:
    if len(payload) < 2:
        raise BadPayload("bad size")
    (size,) = U16.unpack_from(payload)
    if len(payload) > 2 + size:
        raise BadPayload("bad size")
    return {"key": text_at(payload, size, 2)}


def read_publish(payload: bytes) -> dict[str, object]:
    if len(payload) < 3:
        raise BadPayload("bad size")
    qos, size = PUBLISH_START.unpack_from(payload)
    return {"topic": text_at(payload, size, 3), "qos": qos, "message": payload[3 + size :]}


def read_subscribe(payload: bytes) -> dict[str, object]:
    if len(payload) < 3:
        raise BadPayload("bad size")
    (size,) = U16.unpack_from(payload)
    topic = text_at(payload, size, 2, needed_after=1)
    return {"topic": topic, "qos": payload[2 + size], "trailing": payload[3 + size :]}


def read_subscription(payload: bytes) -> dict[str, object]:
    if len(payload) != 8:
        raise BadPayload("bad size")
    return {"subscription": U64.unpack(payload)[0]}


def read_nack(payload: bytes) -> dict[str, object]:
    if len(payload) < 4:
        raise BadPayload("bad size")
    code, size = NACK_START.unpack_from(payload)
    if len(payload) > 4 + size:
        raise BadPayload("bad size")
    return {"code": code, "text": text_at(payload, size, 4)}


def read_nothing(payload: bytes) -> dict[str, object]:
    return {"payload": payload}


READERS: dict[int, tuple[str, Callable[[bytes], dict[str, object]]]] = {
    0x01: ("HELLO", read_hello),
    0x02: ("AUTH", read_auth),
    0x03: ("PUBLISH", read_publish),
    0x04: ("SUBSCRIBE", read_subscribe),
    0x05: ("ACK", read_subscription),
    0x06: ("NACK", read_nack),
    0x07: ("PING", read_nothing),
    0x08: ("PONG", read_nothing),
    0x09: ("POLL", read_subscription),
}


class Decoder:
    """Takes a byte stream in pieces and gives back its frames; `error` is set where it cannot go on."""

    def __init__(self, max_frame: int = MAX_LENGTH) -> None:
        self.max_frame = max_frame
        self.position = 0
        self.tail = b""
        self.error: BadStream | None = None

    def feed(self, data: bytes) -> list[Frame]:
        frames: list[Frame] = []
        data = self.tail + data
        at = 0
        while self.error is None and len(data) - at >= 4:
            (length,) = LENGTH.unpack_from(data, at)
            if length < 9 or length > self.max_frame:
                self.error = BadStream(self.position, "bad length")
                break
            end = at + 4 + length
            if len(data) < end:
                break
            _, kind, correlation = HEADER.unpack_from(data, at)
            if kind not in READERS:
                self.error = BadStream(self.position + 4, "bad type")
                break
            name, read = READERS[kind]
            payload = data[at + 13 : end]
            try:
                fields = read(payload)
            except BadPayload as bad:
                fields = {"payload": payload, "kind": bad.kind}
            start, self.position = self.position, self.position + 4 + length
            frames.append(Frame(name, correlation, start, self.position, fields))
            at = end
        self.tail = data[at:] if self.error is None else b""
        return frames


def frame(kind: int, correlation: int, payload: bytes) -> bytes:
    return HEADER.pack(9 + len(payload), kind, correlation) + payload


def encode_hello(version: int, correlation: int) -> bytes:
    return frame(0x01, correlation, U16.pack(version))


def encode_auth(key: str, correlation: int) -> bytes:
    raw = key.encode()
    return frame(0x02, correlation, U16.pack(len(raw)) + raw)


def encode_publish(topic: str, message: bytes, qos: int, correlation: int) -> bytes:
    raw = topic.encode()
    return frame(0x03, correlation, PUBLISH_START.pack(qos, len(raw)) + raw + message)


def encode_publish_many(topic: str, payloads: Iterable[bytes], qos: int, first_correlation: int) -> bytes:
    raw = topic.encode()
    start = PUBLISH_START.pack(qos, len(raw)) + raw
    pack = HEADER.pack
    parts = []
    for correlation, message in enumerate(payloads, first_correlation):
        parts.append(pack(9 + len(start) + len(message), 0x03, correlation))
        parts.append(start)
        parts.append(message)
    return b"".join(parts)


def encode_subscribe(topic: str, qos: int, correlation: int) -> bytes:
    raw = topic.encode()
    return frame(0x04, correlation, U16.pack(len(raw)) + raw + bytes([qos]))


def encode_ack(subscription: int, correlation: int) -> bytes:
    return frame(0x05, correlation, U64.pack(subscription))


def encode_nack(code: int, text: str, correlation: int) -> bytes:
    raw = text.encode()
    return frame(0x06, correlation, NACK_START.pack(code, len(raw)) + raw)


def encode_ping(correlation: int) -> bytes:
    return frame(0x07, correlation, b"")


def encode_pong(correlation: int) -> bytes:
    return frame(0x08, correlation, b"")


def encode_poll(subscription: int, correlation: int) -> bytes:
    return frame(0x09, correlation, U64.pack(subscription))
