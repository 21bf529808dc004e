"""The zeroctl framing and header rules in plain Python: judges the compiled codec. Slow, and short enough to be
read next to docs/protocols/zeroctl.md."""

import json
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_HEADER = 1 << 20
MAX_BODY = 32 << 20
OVERHEAD = 9 + 4 + 1 + 1 + 1 + 255 + 4

START = struct.Struct(">IBQ")
TIME = re.compile(r"0*[0-9]{0,17}(\.[0-9]+)?")
RFC3339 = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt ]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.[0-9]+)?"
    r"(?:[Zz]|[+-]([0-9]{2}):([0-9]{2}))"
)
UUID = re.compile(r"[0-9a-fA-F]{32}|[0-9a-fA-F]{64}|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
SHA256 = re.compile(r"[0-9a-fA-F]{64}")
HEADER_KEY = re.compile(r"[\x20-\x7e]{1,250}")
KEY = re.compile(r"[\x20-\x7e]{1,255}")


class BadPayload(Exception):
    def __init__(self, kind: str, reason: str = "") -> None:
        self.kind = kind
        self.reason = reason


@dataclass
class BadStream:
    position: int
    kind: str


@dataclass
class Frame:
    name: str
    id: int
    start: int
    end: int
    fields: dict[str, Any]


class Number(str):
    """A number as it was written."""


class Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, n: int) -> bytes:
        if n > len(self.data):
            raise BadPayload("bad inner length")
        taken, self.data = self.data[:n], self.data[n:]
        return taken

    def number(self, n: int) -> int:
        if n > len(self.data):
            raise BadPayload("bad size")
        return int.from_bytes(self.take(n), "big")

    def sized(self, n: int) -> bytes:
        return self.take(self.number(n))

    def end(self) -> None:
        if self.data:
            raise BadPayload("bad size")


def text(raw: bytes, encoding: str = "utf-8") -> str:
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError:
        raise BadPayload("bad text") from None


# --- rules --------------------------------------------------------------------------------------------------


def key_valid(key: str) -> bool:
    return KEY.fullmatch(key) is not None and not {"*", "#"} & set(key.split("."))


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


def time_valid(value: object) -> bool:
    if not isinstance(value, str):
        return False
    if value and value[0] != "." and TIME.fullmatch(value):
        return True
    if isinstance(value, Number):
        return False
    match = RFC3339.fullmatch(value)
    if match is None:
        return False
    year, month, day, hour, minute, second, zone_hour, zone_minute = (int(one or 0) for one in match.groups())
    if not 1 <= month <= 12:
        return False
    leap = (year % 4 == 0 and year % 100 != 0) or year % 400 == 0
    days = [31, 29 if leap else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31][month - 1]
    return (
        1 <= day <= days
        and hour < 24
        and minute < 60
        and second <= 60
        and zone_hour < 24
        and zone_minute < 60
    )


def is_text(value: object) -> bool:
    return isinstance(value, str) and not isinstance(value, Number)


RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "node-name": (
        "node-name is not a text of 1 to 256 bytes",
        lambda value: is_text(value) and 1 <= len(value.encode()) <= 256,
    ),
    "node-uuid": (
        "node-uuid is not a UUID of 32 or 36 characters, nor 64 hex digits",
        lambda value: is_text(value) and UUID.fullmatch(value) is not None,
    ),
    "ts": (
        "ts is neither unix time (s, ms or us; a number or decimal text) nor RFC 3339",
        time_valid,
    ),
    "sha256": (
        "sha256 is not 64 hex digits",
        lambda value: is_text(value) and (value == "" or SHA256.fullmatch(value) is not None),
    ),
    "on-start": (
        "on-start and on-finish are routing keys",
        lambda value: is_text(value) and key_valid(value),
    ),
    "on-finish": (
        "on-start and on-finish are routing keys",
        lambda value: is_text(value) and key_valid(value),
    ),
    "_sec-sig": ("", lambda value: True),
}


def longest_number(value: Any) -> int:
    if isinstance(value, Number):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max(map(longest_number, inner), default=0)


def read_header(raw: bytes, lenient: bool = False) -> dict[str, Any]:
    """A header's keys and values, if it keeps all rules."""
    try:
        pairs: list[tuple[str, Any]] | None = None

        def note(found: list[tuple[str, Any]]) -> dict[str, Any]:
            nonlocal pairs
            pairs = found
            return dict(found)

        value = json.loads(
            raw.decode(),
            object_pairs_hook=note,
            parse_constant=refuse_constant,
            parse_int=Number,
            parse_float=Number,
        )
        json.dumps(value, ensure_ascii=False).encode()  # no halves of surrogate pairs
    except (ValueError, RecursionError):
        raise BadPayload("bad header", "the header is not a JSON object in UTF-8") from None
    if not isinstance(value, dict):
        raise BadPayload("bad header", "the header is not a JSON object in UTF-8")
    if longest_number(value) > 1000:
        raise BadPayload("bad header", "the header has a number of more than 1000 characters")
    if depth(value) > 32:
        raise BadPayload("bad header", "the header has values nested deeper than 32")
    assert pairs is not None
    seen: set[str] = set()
    for key, one in pairs:
        if HEADER_KEY.fullmatch(key) is None:
            raise BadPayload("bad header", "a header key has 1 to 250 printable ASCII characters")
        if key in RULES:
            if key in seen:
                raise BadPayload("bad header", "a key is in the header twice")
            reason, holds = RULES[key]
            if not holds(one):
                raise BadPayload("bad header", reason)
        seen.add(key)
    for key in ("node-name", "node-uuid", "ts"):
        if key not in seen:
            raise BadPayload("bad header", f"{key} is missing")
    if not value.get("sha256") and not lenient:
        raise BadPayload("bad header", "sha256 is missing")
    return value


def escape(headers: dict[str, Any]) -> dict[str, Any]:
    return {
        f"_passed-{key}" if key.startswith(("_transport-", "_passed-")) else key: value
        for key, value in headers.items()
    }


def holds(headers: dict[str, Any], kind: int, key: str, value: str) -> bool:
    """A condition of BIND, on a header from read_header()."""
    if key not in headers:
        return False
    found = headers[key]
    if kind == 2:
        return True
    if isinstance(found, bool) or found is None:
        found = Number({True: "true", False: "false", None: "null"}[found])
    if not isinstance(found, str):
        return False
    return found == value if kind == 1 else is_text(found) and found.startswith(value)


# --- payloads -----------------------------------------------------------------------------------------------


def read_open(payload: bytes) -> dict[str, Any]:
    rest = Reader(payload)
    if len(payload) < 3:
        raise BadPayload("bad size")
    version, secret, node, uuid = rest.number(1), rest.sized(2), rest.sized(2), rest.sized(1)
    rest.end()
    return {"version": version, "secret": text(secret), "node": text(node), "uuid": text(uuid, "ascii")}


def read_welcome(payload: bytes) -> dict[str, Any]:
    rest = Reader(payload)
    if len(payload) < 13:
        raise BadPayload("bad size")
    numbers = {name: rest.number(size) for name, size in WELCOME_NUMBERS}
    node, uuid = rest.sized(2), rest.sized(1)
    rest.end()
    return {**numbers, "node": text(node), "uuid": text(uuid, "ascii")}


WELCOME_NUMBERS = (("version", 1), ("keepalive", 2), ("max_header", 4), ("max_body", 4))


def read_content(payload: bytes, at: int) -> tuple[str, bytes, bytes]:
    """Key, header and body, where the key's size stands at `at`; they are judged when the flags are."""
    key_size = payload[at]
    if len(payload) < at + 1 + key_size + 4:
        raise BadPayload("bad inner length")
    key = payload[at + 1 : at + 1 + key_size]
    (size,) = struct.unpack_from(">I", payload, at + 1 + key_size)
    rest = payload[at + 5 + key_size :]
    if size > len(rest):
        raise BadPayload("bad inner length")
    return key.decode("latin-1"), rest[:size], rest[size:]


def judge_content(key: str, header: bytes) -> None:
    if not key_valid(key):
        raise BadPayload("bad key")
    read_header(header)


def read_message(payload: bytes) -> dict[str, Any]:
    if len(payload) < 6:
        raise BadPayload("bad size")
    key, header, body = read_content(payload, 1)
    if payload[0] > 1:
        raise BadPayload("bad flags")
    judge_content(key, header)
    return {"flags": payload[0], "key": key, "header": header, "body": body}


def read_delivery(payload: bytes) -> dict[str, Any]:
    if len(payload) < 11:
        raise BadPayload("bad size")
    binding, flags, deliveries = struct.unpack_from(">IBB", payload)
    key, header, body = read_content(payload, 6)
    if flags > 3:
        raise BadPayload("bad flags")
    judge_content(key, header)
    return {
        "binding": binding,
        "flags": flags,
        "deliveries": deliveries,
        "key": key,
        "header": header,
        "body": body,
    }


def read_exactly(*fields: tuple[str, int]) -> Callable[[bytes], dict[str, Any]]:
    def read(payload: bytes) -> dict[str, Any]:
        if len(payload) != sum(size for _, size in fields):
            raise BadPayload("bad size")
        rest = Reader(payload)
        return {name: rest.number(size) for name, size in fields}

    return read


def read_refuse(payload: bytes) -> dict[str, Any]:
    if len(payload) < 4:
        raise BadPayload("bad size")
    rest = Reader(payload)
    code, said = rest.number(2), rest.sized(2)
    rest.end()
    return {"code": code, "text": text(said)}


def read_bind(payload: bytes) -> dict[str, Any]:
    if len(payload) < 11:
        raise BadPayload("bad size")
    rest = Reader(payload)
    binding, flags, credit = rest.number(4), rest.number(1), rest.number(4)
    filter, name = rest.sized(2), rest.sized(1)
    conditions = []
    for _ in range(rest.number(1)):
        if len(rest.data) < 2:
            raise BadPayload("bad size")
        kind, key, value = rest.number(1), rest.sized(1), rest.sized(2)
        if not 1 <= kind <= 3 or HEADER_KEY.fullmatch(key.decode("latin-1")) is None:
            raise BadPayload("bad condition")
        conditions.append((kind, text(key), text(value)))
    rest.end()
    texts = text(filter), text(name)
    if flags > 7:
        raise BadPayload("bad flags")
    return {
        "binding": binding,
        "flags": flags,
        "credit": credit,
        "filter": texts[0],
        "name": texts[1],
        "conditions": tuple(conditions),
    }


def read_tags(payload: bytes, *fields: tuple[str, int]) -> dict[str, Any]:
    before = sum(size for _, size in fields)
    if len(payload) < before + 8 or (len(payload) - before) % 8:
        raise BadPayload("bad size")
    rest = Reader(payload)
    found: dict[str, Any] = {name: rest.number(size) for name, size in fields}
    return {**found, "tags": tuple(tag for (tag,) in struct.iter_unpack(">Q", rest.data))}


READERS: dict[int, tuple[str, Callable[[bytes], dict[str, Any]]]] = {
    0x01: ("OPEN", read_open),
    0x02: ("WELCOME", read_welcome),
    0x03: ("MESSAGE", read_message),
    0x04: ("CONFIRM", read_exactly(("count", 4))),
    0x05: ("REFUSE", read_refuse),
    0x06: ("BIND", read_bind),
    0x07: ("UNBIND", read_exactly(("binding", 4))),
    0x08: ("DELIVERY", read_delivery),
    0x09: ("ACK", lambda payload: read_tags(payload, ("binding", 4))),
    0x0A: ("REJECT", lambda payload: read_tags(payload, ("binding", 4), ("delay", 4))),
    0x0B: ("CREDIT", read_exactly(("binding", 4), ("more", 4))),
    0x0C: ("PING", lambda payload: {"payload": payload}),
    0x0D: ("PONG", lambda payload: {"payload": payload}),
}


class Decoder:
    """As the compiled one; an error ends the stream and is kept instead of raised."""

    def __init__(self, max_header: int = MAX_HEADER, max_body: int = MAX_BODY) -> None:
        self.max_length = OVERHEAD + max_header + max_body
        self.position = 0
        self.tail = b""
        self.error: BadStream | None = None

    def feed(self, data: bytes) -> list[Frame]:
        frames: list[Frame] = []
        data = self.tail + data
        at = 0
        while self.error is None and len(data) - at >= 4:
            (length,) = struct.unpack_from(">I", data, at)
            if not 9 <= length <= self.max_length:
                self.error = BadStream(self.position, "bad length")
                break
            if len(data) - at > 4 and data[at + 4] not in READERS:
                self.error = BadStream(self.position + 4, "bad type")
                break
            end = at + 4 + length
            if len(data) < end:
                break
            _, kind, id = START.unpack_from(data, at)
            name, read = READERS[kind]
            payload = data[at + 13 : end]
            try:
                fields = read(payload)
            except BadPayload as bad:
                fields = {"payload": payload, "kind": bad.kind}
            start, self.position = self.position, self.position + 4 + length
            frames.append(Frame(name, id, start, self.position, fields))
            at = end
        self.tail = data[at:] if self.error is None else b""
        return frames


# --- writing ------------------------------------------------------------------------------------------------


def frame(kind: int, id: int, payload: bytes) -> bytes:
    return START.pack(9 + len(payload), kind, id) + payload


def sized(value: str | bytes, n: int) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return len(raw).to_bytes(n, "big") + raw


def encode_open(secret: str, node: str, uuid: str, id: int, version: int = 1) -> bytes:
    return frame(0x01, id, bytes([version]) + sized(secret, 2) + sized(node, 2) + sized(uuid, 1))


def encode_welcome(
    node: str, uuid: str, keepalive: int, max_header: int, max_body: int, id: int, version: int = 1
) -> bytes:
    numbers = struct.pack(">BHII", version, keepalive, max_header, max_body)
    return frame(0x02, id, numbers + sized(node, 2) + sized(uuid, 1))


def encode_message(key: str, header: bytes, body: bytes, id: int, confirm: bool = True) -> bytes:
    return frame(0x03, id, bytes([confirm]) + sized(key, 1) + sized(header, 4) + body)


def encode_delivery(
    key: str, header: bytes, body: bytes, tag: int, binding: int, flags: int = 0, deliveries: int = 1
) -> bytes:
    start = struct.pack(">IBB", binding, flags, deliveries)
    return frame(0x08, tag, start + sized(key, 1) + sized(header, 4) + body)


def encode_confirm(count: int, id: int) -> bytes:
    return frame(0x04, id, struct.pack(">I", count))


def encode_refuse(code: int, text: str, id: int) -> bytes:
    return frame(0x05, id, struct.pack(">H", code) + sized(text, 2))


def encode_bind(
    binding: int,
    filter: str,
    id: int,
    flags: int = 0,
    credit: int = 0xFFFFFFFF,
    name: str = "",
    conditions: Iterable[tuple[int, str, str]] = (),
) -> bytes:
    conditions = list(conditions)
    payload = struct.pack(">IBI", binding, flags, credit) + sized(filter, 2) + sized(name, 1)
    payload += bytes([len(conditions)])
    for kind, key, value in conditions:
        payload += bytes([kind]) + sized(key, 1) + sized(value, 2)
    return frame(0x06, id, payload)


def encode_unbind(binding: int, id: int) -> bytes:
    return frame(0x07, id, struct.pack(">I", binding))


def encode_ack(binding: int, tags: Iterable[int], id: int = 0) -> bytes:
    return frame(0x09, id, struct.pack(">I", binding) + b"".join(struct.pack(">Q", tag) for tag in tags))


def encode_reject(binding: int, tags: Iterable[int], id: int = 0, delay: int = 0) -> bytes:
    start = struct.pack(">II", binding, delay)
    return frame(0x0A, id, start + b"".join(struct.pack(">Q", tag) for tag in tags))


def encode_credit(binding: int, more: int, id: int = 0) -> bytes:
    return frame(0x0B, id, struct.pack(">II", binding, more))


def encode_ping(id: int) -> bytes:
    return frame(0x0C, id, b"")


def encode_pong(id: int) -> bytes:
    return frame(0x0D, id, b"")
