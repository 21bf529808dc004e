"""The Relink codec as Python sees it; the grammar is at the top of the compiled module's source."""

from collections.abc import Iterable, Sequence
from enum import IntEnum, IntFlag
from typing import Final, Literal, final

from typing_extensions import Buffer

PROTOCOL_VERSION: Final = 0
MAX_TARGETS: Final = 1024
MAX_PARTS: Final = 65536
MAX_PAYLOAD: Final = 67108864

class Flags(IntFlag):
    CONNECTOR_TRANSACTIONS = 1
    LISTENER_TRANSACTIONS = 2
    REQUIRE_LINK = 4

class GeneralType(IntEnum):
    NOP = 0
    PING = 1
    PONG = 2
    RESUME = 3
    SHUTDOWN = 4

class OperationType(IntEnum):
    COMMIT = 0
    ROLLBACK = 1
    CLOSE = 2

class AckType(IntEnum):
    RECEIVED = 0
    CONSUMED = 1
    COMMITTED = 2
    UNCOMMITTED = 3
    CLOSED = 4

class PacketError(ValueError):
    """The byte stream cannot be read on: a value that the protocol does not use, or more than a limit allows."""

    position: int
    kind: str
    reason: str
    def __init__(self, position: int, kind: str, reason: str) -> None: ...

class Item:
    """Something taken off the wire. `start` and `end` are its byte range in the stream."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    def fields(self) -> dict[str, object]:
        """What it says, by the names of the grammar."""

@final
class Version(Item):
    """Either side's first word."""

    @property
    def version(self) -> int: ...

@final
class Hello(Item):
    """The connector's second one."""

    @property
    def name(self) -> str: ...
    @property
    def connector_size(self) -> int: ...
    @property
    def listener_size(self) -> int: ...
    @property
    def flags(self) -> Flags: ...
    @property
    def epoch(self) -> int: ...
    @property
    def link(self) -> int: ...

@final
class Answer(Item):
    """The listener's second one."""

    @property
    def epoch(self) -> int: ...
    @property
    def link(self) -> int: ...

@final
class General(Item):
    @property
    def type(self) -> GeneralType: ...

class Targeted(Item):
    """A packet about channels, by their ids."""

    @property
    def channels(self) -> tuple[int, ...]: ...
    @property
    def multicast(self) -> bool: ...

@final
class Operation(Targeted):
    """About the sender's channels; `sequence` is None where none is given."""

    @property
    def type(self) -> OperationType: ...
    @property
    def sequence(self) -> int | None: ...

@final
class Acknowledgement(Targeted):
    """About the receiver's channels; `sequence` is None where none is given."""

    @property
    def type(self) -> AckType: ...
    @property
    def sequence(self) -> int | None: ...

@final
class Message(Targeted):
    """A message on the sender's channels. Its parts are made when they are first asked for."""

    @property
    def long_form(self) -> bool: ...
    @property
    def large_form(self) -> bool: ...
    @property
    def size(self) -> int:
        """Of the payload, all parts together."""

    @property
    def parts(self) -> tuple[bytes, ...]: ...
    @property
    def payload(self) -> bytes:
        """All parts, joined."""

Sender = Literal["connector", "listener"]

@final
class Decoder:
    """Takes what one side sends, in pieces of any size, and gives back what is in it.

    With `handshake` the stream begins with it: a connector's tells the sizes of the channel ids, a listener's does
    not, so they are given, or set before packets come.
    """

    connector_size: int
    listener_size: int
    def __init__(
        self,
        sender: str,
        *,
        handshake: bool = True,
        connector_size: int = 0,
        listener_size: int = 0,
        max_targets: int = 1024,
        max_parts: int = 65536,
        max_payload: int = 67108864,
    ) -> None: ...
    @property
    def sender(self) -> str: ...
    @property
    def position(self) -> int:
        """Where in the stream the first unfinished item begins."""

    @property
    def wanted(self) -> int:
        """How many bytes that has at least."""

    @property
    def pending(self) -> int:
        """How many bytes of it are kept."""

    @property
    def error(self) -> PacketError | None:
        """What ended the stream."""

    def feed(self, data: Buffer) -> list[Item]:
        """What these bytes complete, in order. Raises PacketError if nothing whole precedes the place where the
        stream goes wrong; else the next call does."""

def encode_version(version: int = 0) -> bytes: ...
def encode_hello(
    name: str, connector_size: int, listener_size: int, flags: int = 0, epoch: int = 0, link: int = 0
) -> bytes: ...
def encode_answer(epoch: int, link: int) -> bytes: ...
def encode_general(type: int) -> bytes: ...
def encode_operation(
    type: int, channel: int | Sequence[int], id_size: int, sequence: int | None = None
) -> bytes: ...
def encode_acknowledgement(
    type: int, channel: int | Sequence[int], id_size: int, sequence: int | None = None
) -> bytes: ...
def encode_message(
    channel: int | Sequence[int],
    id_size: int,
    parts: Iterable[Buffer],
    *,
    long_form: bool | None = None,
    large_form: bool | None = None,
) -> bytes:
    """One message. Its forms are chosen by what is needed where they are None."""
