"""The Felix codec again, in plain Python with struct, json and base64: the judge of the compiled one, and its
yardstick.

It is written from the protocol's text alone and shares nothing with the compiled module."""

import base64
import binascii
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

HEADER = struct.Struct(">4sHHI")
U16 = struct.Struct(">H")
U32 = struct.Struct(">I")
EVENTS = struct.Struct(">QI")

MAGIC = b"FLX1"
MAX_LENGTH = 16 * 1024 * 1024
PUBLISH_BATCH = 1
EVENT_BATCH = 2


class BadStream(Exception):
    """The stream cannot be read on."""

    def __init__(self, position: int, kind: str) -> None:
        super().__init__(position, kind)
        self.position = position
        self.kind = kind


class BadPayload(Exception):
    """A payload that is not what its frame asks for."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(slots=True)
class Frame:
    flags: int
    payload: bytes
    start: int
    end: int


class Decoder:
    def __init__(self, max_frame: int = MAX_LENGTH) -> None:
        self.max_frame = max_frame
        self.tail = b""
        self.position = 0
        self.error: BadStream | None = None

    def feed(self, data: bytes) -> list[Frame]:
        frames: list[Frame] = []
        if self.error is not None:
            return frames
        data = self.tail + data
        at = 0
        try:
            while True:
                frame = self.next_frame(data, at)
                if frame is None:
                    break
                frames.append(frame)
                at += HEADER.size + len(frame.payload)
                self.position += HEADER.size + len(frame.payload)
        except BadStream as bad:
            self.error = bad
            at = len(data)
        self.tail = data[at:]
        return frames

    def next_frame(self, data: bytes, at: int) -> Frame | None:
        there = len(data) - at
        if there >= 4 and data[at : at + 4] != MAGIC:
            raise BadStream(self.position, "bad magic")
        if there >= 6 and U16.unpack_from(data, at + 4)[0] != 1:
            raise BadStream(self.position + 4, "bad version")
        if there < HEADER.size:
            return None
        _, _, flags, length = HEADER.unpack_from(data, at)
        if length > self.max_frame:
            raise BadStream(self.position + 8, "bad length")
        if there < HEADER.size + length:
            return None
        begin = at + HEADER.size
        return Frame(flags, data[begin : begin + length], self.position, self.position + HEADER.size + length)


def frame(payload: bytes, flags: int = 0) -> bytes:
    return HEADER.pack(MAGIC, 1, flags, len(payload)) + payload


def read_name(payload: bytes, at: int) -> tuple[str, int]:
    if len(payload) - at < 2:
        raise BadPayload("bad size")
    (size,) = U16.unpack_from(payload, at)
    if len(payload) - at - 2 < size:
        raise BadPayload("bad size")
    try:
        return payload[at + 2 : at + 2 + size].decode("utf-8"), at + 2 + size
    except UnicodeDecodeError:
        raise BadPayload("bad text") from None


def read_items(payload: bytes, at: int, count: int) -> list[bytes]:
    if 4 * count > len(payload) - at:
        raise BadPayload("bad count")
    items = []
    for _ in range(count):
        if len(payload) - at < 4:
            raise BadPayload("bad size")
        (size,) = U32.unpack_from(payload, at)
        at += 4
        if len(payload) - at < size:
            raise BadPayload("bad size")
        items.append(payload[at : at + size])
        at += size
    return items


def decode_publish_batch(payload: bytes) -> tuple[str, str, str, list[bytes]]:
    tenant, at = read_name(payload, 0)
    namespace, at = read_name(payload, at)
    stream, at = read_name(payload, at)
    if len(payload) - at < 4:
        raise BadPayload("bad size")
    (count,) = U32.unpack_from(payload, at)
    return tenant, namespace, stream, read_items(payload, at + 4, count)


def decode_event_batch(payload: bytes) -> tuple[int, list[bytes]]:
    if len(payload) < EVENTS.size:
        raise BadPayload("bad size")
    subscription, count = EVENTS.unpack_from(payload)
    return subscription, read_items(payload, EVENTS.size, count)


def measure_batches(data: bytes) -> tuple[int, int]:
    count = size = 0
    for one in Decoder().feed(data):
        payloads = decode_publish_batch(one.payload)[3]
        count += len(payloads)
        size += sum(map(len, payloads))
    return count, size


def encode_items(payloads: Iterable[bytes]) -> bytes:
    return b"".join(U32.pack(len(payload)) + payload for payload in payloads)


def encode_publish_batch(tenant: str, namespace: str, stream: str, payloads: list[bytes]) -> bytes:
    names = b"".join(U16.pack(len(name.encode())) + name.encode() for name in (tenant, namespace, stream))
    return frame(names + U32.pack(len(payloads)) + encode_items(payloads), PUBLISH_BATCH)


def encode_event_batch(subscription: int, payloads: list[bytes]) -> bytes:
    return frame(EVENTS.pack(subscription, len(payloads)) + encode_items(payloads), EVENT_BATCH)


def encode_message(message: dict[str, Any]) -> bytes:
    return frame(json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode())


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def unb64(text: str) -> bytes:
    """Strictly: the standard alphabet, whole padding, no bits left over."""
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise BadPayload("bad base64") from None
    if b64(data) != text:
        raise BadPayload("bad base64")
    return data


def topic_of(tenant: str, namespace: str, stream: str) -> str:
    return ".".join([*(name.replace("%", "%25").replace(".", "%2E") for name in (tenant, namespace)), stream])
