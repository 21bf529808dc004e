"""The zeroctl codec of our own carrier as Python sees it; the grammar is at the top of the compiled module's source."""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, Final, final

from typing_extensions import Buffer

FRAMING_VERSION: Final = 1
MIN_MAX_HEADER: Final = 65536
MIN_MAX_BODY: Final = 4194304
MAX_MAX_HEADER: Final = 1048576
MAX_MAX_BODY: Final = 33554432
MAX_KEY: Final = 255
NO_LIMIT: Final = 0xFFFFFFFF
MESSAGE_OVERHEAD: Final = 275

class FrameType(IntEnum):
    OPEN = 1
    WELCOME = 2
    MESSAGE = 3
    CONFIRM = 4
    REFUSE = 5
    BIND = 6
    UNBIND = 7
    DELIVERY = 8
    ACK = 9
    REJECT = 10
    CREDIT = 11
    PING = 12
    PONG = 13

class Condition(IntEnum):
    EQUAL = 1
    PRESENT = 2
    PREFIX = 3

class FrameError(ValueError):
    """The byte stream cannot be read on: a length or a type that the framing does not have."""

    position: int
    kind: str
    reason: str
    def __init__(self, position: int, kind: str, reason: str) -> None: ...

class HeaderError(ValueError):
    """A header, or a routing key, that breaks the protocol's rules."""

class Frame:
    """A frame taken off the wire. `start` and `end` are its byte range in the stream."""

    @property
    def type(self) -> FrameType: ...
    @property
    def id(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    def fields(self) -> dict[str, object]:
        """What the payload says, by the names of the grammar."""

@final
class Open(Frame):
    @property
    def version(self) -> int: ...
    @property
    def secret(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def uuid(self) -> str: ...

@final
class Welcome(Frame):
    @property
    def version(self) -> int: ...
    @property
    def keepalive(self) -> int: ...
    @property
    def max_header(self) -> int: ...
    @property
    def max_body(self) -> int: ...
    @property
    def node(self) -> str: ...
    @property
    def uuid(self) -> str: ...

@final
class Message(Frame):
    """`header` is the JSON as it came; `headers` are its keys and values."""

    @property
    def flags(self) -> int: ...
    @property
    def key(self) -> str: ...
    @property
    def header(self) -> bytes: ...
    @property
    def body(self) -> bytes: ...
    @property
    def headers(self) -> dict[str, Any]: ...

@final
class Delivery(Frame):
    """`id` is the tag to acknowledge it by, where `flags` has bit 0."""

    @property
    def binding(self) -> int: ...
    @property
    def flags(self) -> int: ...
    @property
    def deliveries(self) -> int: ...
    @property
    def key(self) -> str: ...
    @property
    def header(self) -> bytes: ...
    @property
    def body(self) -> bytes: ...
    @property
    def headers(self) -> dict[str, Any]: ...

@final
class Confirm(Frame):
    """The messages `id` - `count` + 1 to `id` are safe; or the request `id` was done."""

    @property
    def count(self) -> int: ...

@final
class Refuse(Frame):
    @property
    def code(self) -> int: ...
    @property
    def text(self) -> str: ...

@final
class Bind(Frame):
    """`conditions` are tuples of kind, header key and value."""

    @property
    def binding(self) -> int: ...
    @property
    def flags(self) -> int: ...
    @property
    def credit(self) -> int: ...
    @property
    def filter(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def conditions(self) -> tuple[tuple[Condition, str, str], ...]: ...

@final
class Unbind(Frame):
    @property
    def binding(self) -> int: ...

@final
class Ack(Frame):
    @property
    def binding(self) -> int: ...
    @property
    def tags(self) -> tuple[int, ...]: ...

@final
class Reject(Frame):
    """`delay` is in milliseconds."""

    @property
    def binding(self) -> int: ...
    @property
    def delay(self) -> int: ...
    @property
    def tags(self) -> tuple[int, ...]: ...

@final
class Credit(Frame):
    @property
    def binding(self) -> int: ...
    @property
    def more(self) -> int: ...

@final
class Ping(Frame):
    @property
    def payload(self) -> bytes: ...

@final
class Pong(Frame):
    @property
    def payload(self) -> bytes: ...

@final
class Malformed(Frame):
    """A frame whose type is known and whose payload is not what the type asks for."""

    @property
    def payload(self) -> bytes: ...
    @property
    def kind(self) -> str: ...
    @property
    def reason(self) -> str: ...

@final
class Decoder:
    """Takes a byte stream in pieces of any size and gives back its frames."""

    def __init__(self, max_header: int = ..., max_body: int = ...) -> None: ...
    @property
    def position(self) -> int: ...
    @property
    def wanted(self) -> int: ...
    @property
    def error(self) -> FrameError | None: ...
    @property
    def pending(self) -> int:
        """How many bytes of the unfinished frame are kept."""

    def feed(self, data: Buffer) -> list[Frame]:
        """The frames that `data` completes, in order. Frames before a bad one are returned and the next call
        raises the FrameError; without any it is raised right away."""

def check_key(key: str | bytes) -> None:
    """Raises a HeaderError where this is no routing key."""

def is_key_text(key: str | bytes) -> bool:
    """Whether this is a routing key."""

def header_sha256(header: bytes, *, lenient: bool = False) -> bytes | None:
    """Judges a header: raises a HeaderError, or gives the digest that it states (None: none, which `lenient`
    allows)."""

def escape(header: bytes) -> bytes:
    """A header as the gateway keeps it: with `_passed-` before each key that begins with `_transport-` or
    `_passed-`."""

def unescape(header: bytes) -> bytes:
    """The other way."""

def header_has(header: bytes, kind: int, key: str, value: str = "") -> bool:
    """Whether a well-formed header holds a condition, as BIND has them."""

def encode_open(secret: str, node: str, uuid: str, id: int, version: int = 1) -> bytes: ...
def encode_welcome(
    node: str, uuid: str, keepalive: int, max_header: int, max_body: int, id: int, version: int = 1
) -> bytes: ...
def encode_message(key: str, header: bytes, body: Buffer, id: int, confirm: bool = True) -> bytes:
    """A MESSAGE. Neither key nor header are judged beyond their sizes."""

def encode_delivery(
    key: str, header: bytes, body: bytes, tag: int, binding: int, flags: int = 0, deliveries: int = 1
) -> bytes: ...
def encode_confirm(count: int, id: int) -> bytes: ...
def encode_refuse(code: int, text: str, id: int) -> bytes: ...
def encode_bind(
    binding: int,
    filter: str,
    id: int,
    flags: int = 0,
    credit: int = ...,
    name: str = "",
    conditions: Sequence[tuple[int, str, str]] = (),
) -> bytes:
    """`conditions` are tuples of kind, header key and value."""

def encode_unbind(binding: int, id: int) -> bytes: ...
def encode_ack(binding: int, tags: Iterable[int], id: int = 0) -> bytes: ...
def encode_reject(binding: int, tags: Iterable[int], id: int = 0, delay: int = 0) -> bytes:
    """`delay` is in milliseconds."""

def encode_credit(binding: int, more: int, id: int = 0) -> bytes: ...
def encode_ping(id: int) -> bytes: ...
def encode_pong(id: int) -> bytes: ...
