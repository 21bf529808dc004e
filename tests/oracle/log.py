"""The log's format in plain Python, after the description that opens log.pyx: makes segment files byte by
byte and takes
them apart again. It knows nothing of appending, syncing or recovery."""

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HEADER = 4096
END = 128
MARKS = 192
MARK_SIZE = 32
RECORD = struct.Struct("<IIQqQIIBBHI")

PARTS = 1
CONTROL = 0x8000

OPEN, SEAL, TOPIC, ORIGIN, GAP, CURSOR = range(1, 7)


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


TABLE = _table()


def crc32c(data: bytes, state: int = 0xFFFFFFFF) -> int:
    """The register after `data`, without the final inversion."""
    for byte in data:
        state = (state >> 8) ^ TABLE[(state ^ byte) & 255]
    return state


def seed(log: bytes, number: int) -> int:
    return crc32c(number.to_bytes(8, "little"), crc32c(log))


@dataclass(frozen=True, slots=True)
class Record:
    offset: int
    payload: bytes = b""
    kind: int = 0
    control: bool = False
    topic: int = 0
    time: int = 0
    correlation: int = 0
    origin: int = 0
    protocol: int = 0
    flags: int = 0  # without CONTROL and PARTS, which follow from the other fields
    headers: bytes = b""
    parts: tuple[int, ...] = ()

    def encode(self, seed: int) -> bytes:
        body = self.headers + self.payload
        flags = self.flags | (CONTROL if self.control else 0)
        if self.parts:
            flags |= PARTS
            body = struct.pack(f"<{len(self.parts) + 1}I", len(self.parts), *self.parts) + body
        length = RECORD.size + len(body)
        fields = (
            length, self.offset, self.time, self.correlation, self.topic, self.origin, self.protocol, self.kind,
            flags, len(self.headers),
        )  # fmt: skip
        covered = RECORD.pack(0, *fields)[4:] + body + bytes(-length % 8)
        return crc32c(covered, seed).to_bytes(4, "little") + covered


def decode(data: bytes, position: int, seed: int) -> tuple[Record, int] | None:
    """The record at a position and where the next one begins, or nothing if no whole one stands there."""
    if position + RECORD.size > len(data):
        return None
    crc, length, offset, time, correlation, topic, origin, protocol, kind, flags, headers_size = (
        RECORD.unpack_from(data, position)
    )
    end = position + length + -length % 8
    if length < RECORD.size or end > len(data) or crc32c(data[position + 4 : end], seed) != crc:
        return None
    body = data[position + RECORD.size : position + length]
    parts: tuple[int, ...] = ()
    if flags & PARTS:
        count = int.from_bytes(body[:4], "little")
        parts = struct.unpack_from(f"<{count}I", body, 4)
        body = body[4 + 4 * count :]
    record = Record(
        offset, body[headers_size:], kind, bool(flags & CONTROL), topic, time, correlation, origin, protocol,
        flags & ~(CONTROL | PARTS), body[:headers_size], parts,
    )  # fmt: skip
    return record, end


def checked_end(position: int, number: int) -> int:
    return position | (crc32c(struct.pack("<QQ", position, number)) & 0xFFFFFF) << 40


def mark(seed: int, position: int, offset: int, count: int) -> bytes:
    fields = struct.pack("<QQQ", position, offset, count)
    return fields + struct.pack("<II", crc32c(fields, seed), 0)


def header(log: bytes, number: int, size: int, end: int, marks: Sequence[bytes] = ()) -> bytes:
    static = log + struct.pack("<QQ", number, size) + bytes(16)
    page = bytearray(HEADER)
    page[:64] = b"HEADRACE" + struct.pack("<II", 1, crc32c(static)) + static
    page[END : END + 8] = checked_end(end, number).to_bytes(8, "little")
    for slot, bytes_of_mark in enumerate(marks):
        page[MARKS + MARK_SIZE * slot : MARKS + MARK_SIZE * (slot + 1)] = bytes_of_mark
    return bytes(page)


@dataclass(slots=True)
class Segment:
    """A segment that is made record by record; small ones can be sealed long before they are full."""

    log: bytes
    number: int
    size: int = 65536
    first: int = 0
    next: int = field(init=False)
    body: bytearray = field(init=False, default_factory=bytearray)
    marked: int = field(init=False, default=0)
    marked_offset: int = field(init=False, default=0)
    places: list[tuple[int, int, Record]] = field(init=False, default_factory=list)  # begin, end, record

    def __post_init__(self) -> None:
        self.next = self.first
        self.control(OPEN)

    @property
    def seed(self) -> int:
        return seed(self.log, self.number)

    @property
    def end(self) -> int:
        return HEADER + len(self.body)

    def _put(self, record: Record) -> None:
        begin = self.end
        self.body += record.encode(self.seed)
        self.places.append((begin, self.end, record))

    def control(self, kind: int, payload: bytes = b"", *, topic: int = 0, correlation: int = 0) -> None:
        self._put(Record(self.next, payload, kind, control=True, topic=topic, correlation=correlation))

    def message(self, payload: bytes, *, topic: int = 1, time: int = 0) -> None:
        self._put(Record(self.next, payload, topic=topic, time=time))
        self.next += 1

    def mark(self) -> None:
        """As a sync would: covers what is there."""
        self.marked, self.marked_offset = self.end, self.next

    def seal(self) -> None:
        self.control(SEAL)

    def encode(self) -> bytes:
        marks = [mark(self.seed, self.marked, self.marked_offset, 2)] if self.marked else []
        page = header(self.log, self.number, self.size, self.end, marks)
        return page + bytes(self.body) + bytes(self.size - self.end)


def write_log(directory: Path, log: bytes, segments: Iterable[Segment]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "LOG").write_text(json.dumps({"version": 1, "id": log.hex(), "made": 0}) + "\n")
    for segment in segments:
        segment_path(directory, segment.number).write_bytes(segment.encode())


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:020d}.seg"


def log_id(directory: Path) -> bytes:
    return bytes.fromhex(json.loads((directory / "LOG").read_text())["id"])


def walk(data: bytes, log: bytes, number: int) -> Iterator[tuple[int, Record]]:
    """Positions and records of a segment, as far as they hold and up to its seal."""
    position, state = HEADER, seed(log, number)
    while found := decode(data, position, state):
        yield position, found[0]
        if found[0].control and found[0].kind == SEAL:
            return
        position = found[1]
