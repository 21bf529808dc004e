"""The Relink codec again, in plain Python from the words of the spec: slow, obvious, and the judge of the compiled
one. It shares no code with it."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

GENERALS = 5  # types of each format, as the tables of the spec count them
OPERATIONS = 3
ACKNOWLEDGEMENTS = 5
SEQUENCE_OPERATIONS = 2
SEQUENCE_ACKNOWLEDGEMENTS = 4


def padding(size: int, to: int) -> int:
    return -size % to


def padded(data: bytes, to: int = 8) -> bytes:
    return data + bytes(padding(len(data), to))


# --- writing ------------------------------------------------------------------------------------------------


def encode_version(version: int = 0) -> bytes:
    return struct.pack("<B7x", version)


def encode_hello(
    name: str, connector_size: int, listener_size: int, flags: int = 0, epoch: int = 0, link: int = 0
) -> bytes:
    text = name.encode()
    fields = bytes([len(text)]) + text + bytes([connector_size, listener_size, flags])
    return padded(fields) + struct.pack("<QQ", epoch, link)


def encode_answer(epoch: int, link: int) -> bytes:
    return struct.pack("<QQ", epoch, link)


def encode_general(type: int) -> bytes:
    return struct.pack("<B7x", type << 5)


def head(format: int, type: int, channel: int | Sequence[int], id_size: int, short: int = 0) -> bytes:
    """Header and channel fields."""
    if isinstance(channel, int):
        return bytes([1 | format << 2 | type << 5, short]) + channel.to_bytes(id_size, "little")
    first = struct.pack("<BB2xI", 3 | format << 2 | type << 5, short, len(channel))
    return first + b"".join(one.to_bytes(id_size, "little") for one in channel)


def targeted(
    format: int, type: int, channel: int | Sequence[int], id_size: int, sequence: int | None
) -> bytes:
    if sequence is None:
        return padded(head(format, type, channel, id_size))
    return padded(padded(head(format + 2, type, channel, id_size), 4) + struct.pack("<I", sequence))


def encode_operation(
    type: int, channel: int | Sequence[int], id_size: int, sequence: int | None = None
) -> bytes:
    return targeted(0, type, channel, id_size, sequence)


def encode_acknowledgement(
    type: int, channel: int | Sequence[int], id_size: int, sequence: int | None = None
) -> bytes:
    return targeted(1, type, channel, id_size, sequence)


def encode_message(
    channel: int | Sequence[int],
    id_size: int,
    parts: Iterable[bytes],
    *,
    long_form: bool | None = None,
    large_form: bool | None = None,
) -> bytes:
    pieces = list(parts)
    is_long = len(pieces) > 255 if long_form is None else long_form
    is_large = any(len(piece) > 65535 for piece in pieces) if large_form is None else large_form
    flags = (1 if is_long else 0) | (2 if is_large else 0)
    packet = padded(head(4, flags, channel, id_size, 0 if is_long else len(pieces)), 2)
    if is_long:
        packet += struct.pack("<I", len(pieces))
    if is_large:
        packet = padded(packet)
    packet += b"".join(struct.pack("<Q" if is_large else "<H", len(piece)) for piece in pieces)
    return padded(packet) + b"".join(padded(piece) for piece in pieces)


# --- reading ------------------------------------------------------------------------------------------------


class Short(Exception):
    """The bytes end before the item does."""


class Bad(Exception):
    """The stream cannot be read on."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass
class Item:
    name: str
    start: int
    end: int
    fields: dict[str, Any]


@dataclass
class Failure:
    position: int
    kind: str


class Reader:
    """A place in some bytes; alignment counts from where it began."""

    def __init__(self, data: bytes, start: int) -> None:
        self.data = data
        self.start = start
        self.at = start

    @property
    def size(self) -> int:
        return self.at - self.start

    def take(self, size: int) -> bytes:
        if len(self.data) - self.at < size:
            raise Short
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def align(self, to: int) -> None:
        self.take(padding(self.size, to))


class Decoder:
    """Like the compiled one, but it keeps all that is unfinished and begins anew with each piece."""

    def __init__(
        self,
        sender: str,
        *,
        handshake: bool = True,
        connector_size: int = 0,
        listener_size: int = 0,
        max_targets: int = 1024,
        max_parts: int = 65536,
        max_payload: int = 64 << 20,
    ) -> None:
        self.sender = sender
        self.steps = ["version", "second"] if handshake else []
        self.connector_size = connector_size
        self.listener_size = listener_size
        self.max_targets = max_targets
        self.max_parts = max_parts
        self.max_payload = max_payload
        self.position = 0
        self.tail = b""
        self.error: Failure | None = None

    def feed(self, data: bytes) -> list[Item]:
        items: list[Item] = []
        self.tail += data
        at = 0
        while at < len(self.tail) and self.error is None:
            reader = Reader(self.tail, at)
            try:
                name, fields = self.item(reader)
            except Short:
                break
            except Bad as bad:
                self.error = Failure(self.position, bad.kind)
                at = len(self.tail)
                break
            items.append(Item(name, self.position, self.position + reader.size, fields))
            self.position += reader.size
            at = reader.at
        self.tail = self.tail[at:]
        return items

    def item(self, reader: Reader) -> tuple[str, dict[str, Any]]:
        if not self.steps:
            return self.packet(reader)
        if self.steps[0] == "version":
            version = reader.number(1)
            reader.align(8)
            del self.steps[0]
            return "Version", {"version": version}
        if self.sender == "listener":
            answer = {"epoch": reader.number(8), "link": reader.number(8)}
            del self.steps[0]
            return "Answer", answer
        text = reader.take(reader.number(1))
        connector_size, listener_size, flags = reader.take(3)
        reader.align(8)
        epoch, link = reader.number(8), reader.number(8)
        try:
            name = text.decode()
        except UnicodeDecodeError:
            raise Bad("bad hello") from None
        if connector_size > 8 or listener_size > 8:
            raise Bad("bad hello")
        self.connector_size, self.listener_size = connector_size, listener_size
        del self.steps[0]
        return "Hello", {
            "name": name,
            "connector_size": connector_size,
            "listener_size": listener_size,
            "flags": flags & 7,
            "epoch": epoch,
            "link": link,
        }

    def packet(self, reader: Reader) -> tuple[str, dict[str, Any]]:
        first = reader.number(1)
        multicast, format, type = bool(first >> 1 & 1), first >> 2 & 7, first >> 5
        if not first & 1:
            if type >= GENERALS:
                raise Bad("bad type")
            reader.align(8)
            return "General", {"type": type}
        known = (OPERATIONS, ACKNOWLEDGEMENTS, SEQUENCE_OPERATIONS, SEQUENCE_ACKNOWLEDGEMENTS, 8, 0, 0, 0)
        if type >= known[format]:
            raise Bad("bad type")
        if len(reader.data) - reader.start < 8:
            raise Short
        short = reader.number(1)
        sizes = (
            (self.listener_size, self.connector_size)
            if self.sender == "listener"
            else (self.connector_size, self.listener_size)
        )
        id_size = sizes[format & 1]
        count = 1
        if multicast:
            reader.take(2)
            count = reader.number(4)
            if count > self.max_targets:
                raise Bad("bad count")
        if format == 4 and not type & 1 and short > self.max_parts:
            raise Bad("bad length")  # it stands before the ids
        channels = tuple(reader.number(id_size) for _ in range(count))
        fields: dict[str, Any] = {"channels": channels, "multicast": multicast}
        if format < 4:
            sequence = None
            if format & 2:
                reader.align(4)
                sequence = reader.number(4)
            reader.align(8)
            fields |= {"type": type, "sequence": sequence}
            return ("Acknowledgement" if format & 1 else "Operation"), fields
        is_long, is_large = bool(type & 1), bool(type & 2)
        reader.align(2)
        parts = reader.number(4) if is_long else short
        if parts > self.max_parts:
            raise Bad("bad length")
        if is_large:
            reader.align(8)
        lengths = [reader.number(8 if is_large else 2) for _ in range(parts)]
        reader.align(8)
        if sum(lengths) > self.max_payload:
            raise Bad("bad size")
        pieces = []
        for length in lengths:
            pieces.append(reader.take(length))
            reader.align(8)
        fields |= {"long": is_long, "large": is_large, "parts": tuple(pieces)}
        return "Message", fields
