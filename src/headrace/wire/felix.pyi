"""The Felix codec as Python sees it; the grammar is at the top of the compiled module's source."""

from collections.abc import Iterable
from typing import Final, final

from msgspec import Raw
from typing_extensions import Buffer

from headrace.wire.felix_json import AnyMessage, Message

PROTOCOL_VERSION: Final = 1
MAX_FRAME_LENGTH: Final = 16777216
HEADER_BYTES: Final = 12
FLAG_PUBLISH_BATCH: Final = 1
FLAG_EVENT_BATCH: Final = 2

class FrameError(ValueError):
    """The byte stream cannot be read on: a header that the protocol does not have."""

    position: int
    kind: str
    reason: str
    def __init__(self, position: int, kind: str, reason: str) -> None: ...

class PayloadError(ValueError):
    """A frame whose payload is not what its flags or its message type ask for."""

    kind: str
    def __init__(self, kind: str, reason: str) -> None: ...

@final
class Frame:
    """A frame taken off the wire. `start` and `end` are its byte range in the stream."""

    @property
    def flags(self) -> int: ...
    @property
    def payload(self) -> bytes: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...

@final
class Decoder:
    """Takes a byte stream in pieces of any size and gives back its frames."""

    def __init__(self, max_frame: int = 16777216) -> None: ...
    @property
    def position(self) -> int: ...
    @property
    def wanted(self) -> int: ...
    @property
    def error(self) -> FrameError | None: ...
    @property
    def pending(self) -> int: ...
    def feed(self, data: Buffer) -> list[Frame]:
        """The frames that `data` completes, in order."""

def decode_publish_batch(payload: bytes) -> tuple[str, str, str, list[bytes]]:
    """Tenant, namespace, stream and payloads of a binary publish batch."""

def decode_event_batch(payload: bytes) -> tuple[int, list[bytes]]:
    """Subscription id and payloads of a binary event batch."""

def measure_batches(data: Buffer) -> tuple[int, int]:
    """How many payloads, and bytes of them, are in a buffer of whole publish batch frames."""

def decode_message(payload: Buffer) -> AnyMessage:
    """The JSON message in a payload. Its Raw fields borrow the payload's bytes."""

def payload_of(raw: Raw | Buffer) -> bytes | None:
    """The bytes of a `payload` or `value`; None for null."""

def payloads_of(raw: Raw | Buffer) -> list[bytes]:
    """The bytes of all `payloads`."""

def raw_payload(data: Buffer | None) -> Raw:
    """These bytes as a message has them in `payload` or `value`; None becomes null."""

def raw_payloads(payloads: Iterable[Buffer]) -> Raw:
    """These bytes as a message has them in `payloads`."""

def encode_frame(payload: Buffer, flags: int = 0) -> bytes: ...
def encode_message(message: Message) -> bytes: ...
def encode_publish_batch(tenant: str, namespace: str, stream: str, payloads: Iterable[Buffer]) -> bytes: ...
def encode_event_batch(subscription: int, payloads: Iterable[Buffer]) -> bytes: ...
def topic_of(tenant: str, namespace: str, stream: str) -> str:
    """The topic of an address; ValueError if it has none."""

def address_of(topic: str) -> tuple[str, str, str] | None:
    """Tenant, namespace and stream of a topic; None if it has no counterpart."""

def split_address(text: str) -> tuple[str, str, str]:
    """Tenant, namespace and stream of "tenant/namespace/stream"."""

def join_address(tenant: str, namespace: str, stream: str) -> str:
    """The way back from split_address()."""
