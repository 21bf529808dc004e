"""The BlipMQ codec as Python sees it; the grammar is at the top of the compiled module's source."""

from collections.abc import Iterable
from enum import IntEnum
from typing import Final, final

from typing_extensions import Buffer

PROTOCOL_VERSION: Final = 1
MAX_FRAME_LENGTH: Final = 16777216

class FrameType(IntEnum):
    HELLO = 1
    AUTH = 2
    PUBLISH = 3
    SUBSCRIBE = 4
    ACK = 5
    NACK = 6
    PING = 7
    PONG = 8
    POLL = 9

class FrameError(ValueError):
    """The byte stream cannot be read on: a length or a type that the protocol does not have."""

    position: int
    kind: str
    reason: str
    def __init__(self, position: int, kind: str, reason: str) -> None: ...

class Frame:
    """A frame taken off the wire. `start` and `end` are its byte range in the stream."""

    @property
    def type(self) -> FrameType: ...
    @property
    def correlation(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    def fields(self) -> dict[str, object]:
        """What the payload says, by the names of the grammar."""

@final
class Hello(Frame):
    @property
    def version(self) -> int: ...

@final
class Auth(Frame):
    @property
    def key(self) -> str: ...

@final
class Publish(Frame):
    """A message: published if a client sent it, delivered if a server did (then `correlation` is the tag)."""

    @property
    def topic(self) -> str: ...
    @property
    def message(self) -> bytes: ...
    @property
    def qos(self) -> int: ...

@final
class Subscribe(Frame):
    """`trailing` are bytes behind the last field, which a server takes no notice of."""

    @property
    def topic(self) -> str: ...
    @property
    def trailing(self) -> bytes: ...
    @property
    def qos(self) -> int: ...

@final
class Ack(Frame):
    @property
    def subscription(self) -> int: ...

@final
class Nack(Frame):
    @property
    def text(self) -> str: ...
    @property
    def code(self) -> int: ...

@final
class Ping(Frame):
    """`payload` should be empty; a server takes no notice of it."""

    @property
    def payload(self) -> bytes: ...

@final
class Pong(Frame):
    @property
    def payload(self) -> bytes: ...

@final
class Poll(Frame):
    @property
    def subscription(self) -> int: ...

@final
class Malformed(Frame):
    """A frame whose type is known and whose payload is not what the type asks for.

    `kind` is "bad size", "bad inner length" or "bad text"; `reason` says it to a person.
    """

    @property
    def payload(self) -> bytes: ...
    @property
    def kind(self) -> str: ...
    @property
    def reason(self) -> str: ...

@final
class Decoder:
    """Takes a byte stream in pieces of any size and gives back its frames."""

    def __init__(self, max_frame: int = 16777216) -> None: ...
    @property
    def position(self) -> int:
        """Where in the stream the first unfinished frame begins."""
    @property
    def wanted(self) -> int:
        """The whole size of that frame, or 0 while its length field is not there."""
    @property
    def pending(self) -> int:
        """How many bytes of it are kept."""
    @property
    def error(self) -> FrameError | None:
        """What ended the stream."""
    def feed(self, data: Buffer) -> list[Frame]:
        """The frames that `data` completes, in order.

        Frames before a bad one are returned and the next call raises the FrameError (`error` has it at once);
        without any it is raised right away.
        """

def encode_hello(version: int, correlation: int) -> bytes: ...
def encode_auth(key: str, correlation: int) -> bytes: ...
def encode_publish(topic: str, message: Buffer, qos: int, correlation: int) -> bytes: ...
def encode_publish_many(topic: str, payloads: Iterable[Buffer], qos: int, first_correlation: int) -> bytes:
    """A PUBLISH frame for each payload, one after another; correlations count up from the first."""

def encode_subscribe(topic: str, qos: int, correlation: int) -> bytes: ...
def encode_ack(subscription: int, correlation: int) -> bytes: ...
def encode_nack(code: int, text: str, correlation: int) -> bytes: ...
def encode_ping(correlation: int) -> bytes: ...
def encode_pong(correlation: int) -> bytes: ...
def encode_poll(subscription: int, correlation: int) -> bytes: ...
