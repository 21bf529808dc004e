"""The Overhop codec as Python sees it; the grammar is at the top of the compiled module's source."""

from enum import IntEnum
from typing import Any, Final, final

from typing_extensions import Buffer

PROTOCOL_VERSION: Final = 2
LEAST_PAYLOAD_LIMIT: Final = 65536
MOST_PAYLOAD_LIMIT: Final = 33554432
DEFAULT_PAYLOAD_LIMIT: Final = 8388608
DEPTH_LIMIT: Final = 512

class MessageType(IntEnum):
    HELLO = 1
    REGISTER = 2
    PING = 3
    GQUEUE = 4
    LQUEUES = 5
    SUBSCRIBE = 6
    UNSUBSCRIBE = 7
    CREDIT = 8
    ADDQUEUE = 9
    STATUS = 10
    RMQUEUE = 11
    PAUSE = 12
    RESUME = 13
    ENQUEUE = 14
    JOB = 15
    RMJOB = 16
    LSJOB = 17
    QSTATS = 18
    DONE = 64
    FAIL = 65
    EXTEND = 66
    OK = 101
    ERR = 102
    HI = 103
    IDENT = 104
    PONG = 105
    DELIVER = 110
    ENDED = 111

class FrameError(ValueError):
    """The byte stream cannot be read on. `position` is the place in the stream, `kind` names the fault in two
    words."""

    position: int
    kind: str
    reason: str
    def __init__(self, position: int, kind: str, reason: str) -> None: ...

@final
class Raw:
    """MessagePack that is written as it is, where a value is expected."""

    @property
    def data(self) -> bytes: ...
    def __init__(self, data: bytes) -> None: ...

@final
class Message:
    """An envelope taken off the wire. `start` and `end` are its frame's byte range in the stream."""

    @property
    def type(self) -> int: ...
    @property
    def rid(self) -> str: ...
    @property
    def packed(self) -> bytes:
        """`p` as MessagePack."""
    @property
    def payload(self) -> dict[str, Any]:
        """`p` as a dict."""
    @property
    def name(self) -> str:
        """The type's name, or its number in digits where it has none."""
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...

@final
class Decoder:
    """Takes a byte stream in pieces of any size and gives back its messages."""

    def __init__(self, limit: int = 8388608) -> None: ...
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
    def feed(self, data: Buffer) -> list[Message]:
        """The messages that `data` completes, in order.

        Messages before a bad one are returned and the next call raises the FrameError (`error` has it at once);
        without any it is raised right away.
        """

def parse(data: Buffer) -> Message:
    """The message of one payload, a frame without its length; FrameError where it is no sound envelope."""

def check(data: Buffer) -> bool:
    """Whether one payload is a sound envelope; builds nothing."""

def pack(value: object) -> bytes:
    """A value as MessagePack, in the types that Overhop allows; a Raw is taken for what it holds."""

def unpack(data: Buffer) -> Any:
    """The value that MessagePack stands for; it must be sound."""

def encode(type: int, rid: str, payload: object) -> bytes:
    """One whole frame. What does not fit the protocol's types is an error; what a server would refuse is not."""

def time_text(time: int) -> str:
    """Microseconds since the epoch as RFC 3339."""

def parse_time(text: str) -> int:
    """RFC 3339 as microseconds since the epoch."""
