"""The Overhop codec in plain Python, with msgpack's own unpacker: slow and easy to check against the protocol's text.
It judges the compiled one, and shares nothing with it."""

import re
import struct
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgpack

DEPTH = 512
LIMIT = 8 * 1024 * 1024


class Bad(ValueError):
    """A payload that is no envelope."""


class Pairs(list[tuple[Any, Any]]):
    """A map, as it was written: keys that come twice are both here."""


def pairs_of(entries: Any) -> Pairs:
    return Pairs(entries)


def no_ext(code: int, data: bytes) -> None:
    raise Bad("ext")


def allowed(value: object, depth: int) -> None:
    """Raises Bad for a type, a key or a depth that Overhop does not have. `depth` counts what it is inside of."""
    if value is None or isinstance(value, bool | str | bytes):
        return
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise Bad("integer")
    elif isinstance(value, Pairs):
        if depth >= DEPTH:
            raise Bad("depth")
        for key, inner in value:
            if not isinstance(key, str):
                raise Bad("key")
            allowed(inner, depth + 1)
    elif isinstance(value, list):
        if depth >= DEPTH:
            raise Bad("depth")
        for inner in value:
            allowed(inner, depth + 1)
    else:
        raise Bad(type(value).__name__)


def plain(value: Any) -> Any:
    """The value with maps as dicts. Loops, because a comprehension would be a level of recursion by itself."""
    if isinstance(value, Pairs):
        as_dict = {}
        for key, inner in value:
            as_dict[key] = plain(inner)
        return as_dict
    if isinstance(value, list):
        as_list = []
        for inner in value:
            as_list.append(plain(inner))
        return as_list
    return value


def parse(payload: bytes) -> tuple[int, str, dict[str, Any]]:
    """t, rid and p of a payload."""
    try:
        value = msgpack.unpackb(
            payload, raw=False, strict_map_key=False, object_pairs_hook=pairs_of, ext_hook=no_ext
        )
    except Bad:
        raise
    except (ValueError, TypeError) as error:
        raise Bad("MessagePack") from error
    allowed(value, 0)
    if not isinstance(value, Pairs):
        raise Bad("no map")
    envelope = dict(value)
    version, kind, rid, inner = (envelope.get(name) for name in ("v", "t", "rid", "p"))
    if isinstance(version, bool) or version != 2:
        raise Bad("v")
    if isinstance(kind, bool) or not isinstance(kind, int):
        raise Bad("t")
    if not isinstance(rid, str) or not rid:
        raise Bad("rid")
    if not isinstance(inner, Pairs):
        raise Bad("p")
    return kind, rid, plain(inner)


def encode(kind: int, rid: str, payload: dict[str, Any]) -> bytes:
    body = msgpack.packb({"p": payload, "rid": rid, "t": kind, "v": 2}, use_bin_type=True)
    return struct.pack(">I", len(body)) + body


@dataclass
class Message:
    type: int
    rid: str
    payload: dict[str, Any]
    start: int
    end: int


class Decoder:
    """Frames of a stream that comes in pieces; the first bad one ends it."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.tail = b""
        self.position = 0
        self.failed = False

    def feed(self, data: bytes) -> list[Message]:
        messages: list[Message] = []
        self.tail += data
        while not self.failed and len(self.tail) >= 4:
            (length,) = struct.unpack(">I", self.tail[:4])
            if not 0 < length <= self.limit:
                self.failed = True
            elif len(self.tail) < 4 + length:
                break
            else:
                try:
                    kind, rid, payload = parse(self.tail[4 : 4 + length])
                except Bad:
                    self.failed = True
                    break
                end = self.position + 4 + length
                messages.append(Message(kind, rid, payload, self.position, end))
                self.position = end
                self.tail = self.tail[4 + length :]
        if self.failed:
            self.tail = b""
        return messages


TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.(\d+))?(?:([Zz])|([+-])(\d\d):(\d\d))", re.ASCII
)


def parse_time(text: str) -> int:
    """RFC 3339 as microseconds since the epoch."""
    found = TIME.fullmatch(text)
    if found is None:
        raise ValueError(text)
    year, month, day, hour, minute, second = map(int, found.groups()[:6])
    if second > 60:
        raise ValueError(text)
    micros = int((found[7] or "0")[:6].ljust(6, "0"))
    zone = timedelta(0)
    if found[9]:
        if int(found[10]) > 23 or int(found[11]) > 59:
            raise ValueError(text)
        zone = timedelta(hours=int(found[10]), minutes=int(found[11])) * (1 if found[9] == "+" else -1)
    local = datetime(year, month, day, hour, minute, tzinfo=UTC)
    since = local - datetime(1970, 1, 1, tzinfo=UTC) - zone
    return (since.days * 86400 + since.seconds + second) * 1_000_000 + micros


def time_text(time: int) -> str:
    """As chrono writes it: as many digits behind the second as it takes, in threes."""
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time)
    micros = moment.microsecond
    timespec = "seconds" if not micros else "microseconds" if micros % 1000 else "milliseconds"
    return moment.isoformat(timespec=timespec)
