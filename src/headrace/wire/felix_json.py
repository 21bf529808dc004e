"""Felix's JSON messages as structs, read and written by msgspec. What a message means, and what its Base64 texts
hold, is not known here: these stay as they are in the JSON, to be decoded where they are needed.

An id is a number in the reference's dialect and a text in the specification's; a request may have none. Fields that
are UNSET were not there, and are not written.
"""

from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Raw, UnsetType

Id: TypeAlias = int | str | UnsetType | None
Ack: TypeAlias = Literal["none", "per_message", "per_batch"] | UnsetType | None
Text: TypeAlias = str | UnsetType | None

U64: Final = 1 << 64


class Message(msgspec.Struct, tag_field="type", gc=False):
    """Any message; `type` comes first when it is written."""


class Publish(Message, tag="publish"):
    tenant_id: str
    namespace: str
    stream: str
    payload: Raw
    request_id: Id = UNSET
    ack: Ack = UNSET


class PublishBatch(Message, tag="publish_batch"):
    tenant_id: str
    namespace: str
    stream: str
    payloads: Raw
    request_id: Id = UNSET
    ack: Ack = UNSET


class Subscribe(Message, tag="subscribe"):
    tenant_id: str
    namespace: str
    stream: str
    subscription_id: Id = UNSET
    request_id: Id = UNSET


class CachePut(Message, tag="cache_put"):
    key: str
    value: Raw
    tenant_id: Text = UNSET
    namespace: Text = UNSET
    cache: Text = UNSET
    request_id: Id = UNSET
    ttl_ms: int | None = None


class CacheGet(Message, tag="cache_get"):
    key: str
    tenant_id: Text = UNSET
    namespace: Text = UNSET
    cache: Text = UNSET
    request_id: Id = UNSET


class Subscribed(Message, tag="subscribed"):
    subscription_id: Id = UNSET


class EventStreamHello(Message, tag="event_stream_hello"):
    subscription_id: Id = UNSET


class Event(Message, tag="event"):
    tenant_id: str
    namespace: str
    stream: str
    payload: Raw


class EventBatch(Message, tag="event_batch"):
    tenant_id: str
    namespace: str
    stream: str
    payloads: Raw


class CacheValue(Message, tag="cache_value"):
    """`value` is "null" where there is none."""

    key: str
    value: Raw
    tenant_id: Text = UNSET
    namespace: Text = UNSET
    cache: Text = UNSET
    request_id: Id = UNSET


class CacheOk(Message, tag="cache_ok"):
    request_id: Id = UNSET


class PublishOk(Message, tag="publish_ok"):
    request_id: Id = UNSET


class PublishError(Message, tag="publish_error"):
    message: str
    request_id: Id = UNSET


class Ok(Message, tag="ok"):
    request_id: Id = UNSET


class Error(Message, tag="error"):
    message: str
    request_id: Id = UNSET


AnyMessage: TypeAlias = (
    Publish
    | PublishBatch
    | Subscribe
    | CachePut
    | CacheGet
    | Subscribed
    | EventStreamHello
    | Event
    | EventBatch
    | CacheValue
    | CacheOk
    | PublishOk
    | PublishError
    | Ok
    | Error
)

# The order in which fields are written: required ones cannot come after others in a struct.
ORDER: Final[dict[type[Message], tuple[str, ...]]] = {
    CachePut: ("tenant_id", "namespace", "cache", "key", "value", "request_id", "ttl_ms"),
    CacheGet: ("tenant_id", "namespace", "cache", "key", "request_id"),
    CacheValue: ("tenant_id", "namespace", "cache", "request_id", "key", "value"),
    Error: ("request_id", "message"),
    PublishError: ("request_id", "message"),
}
# The reference writes a value's id last.
SCOPED_VALUE: Final = ("tenant_id", "namespace", "cache", "key", "value", "request_id")

_decoder: Final = msgspec.json.Decoder(AnyMessage)
_encoder: Final = msgspec.json.Encoder()
_texts: Final = msgspec.json.Decoder(str | list[str])


def decode(payload: Any) -> AnyMessage:
    """The message in a frame's payload; ValueError says what is wrong with it. Its Raw fields borrow the bytes."""
    try:
        message: AnyMessage = _decoder.decode(payload)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None
    for name in ("request_id", "subscription_id", "ttl_ms"):
        number = getattr(message, name, None)
        if isinstance(number, int) and not 0 <= number < U64:
            raise ValueError(f"{name} is not a whole number from 0 to 2^64 - 1")
    return message


def encode(message: Message) -> bytes:
    """A message as JSON, its fields in the order that both dialects have."""
    order = ORDER.get(type(message))
    if order is None:
        return _encoder.encode(message)
    if isinstance(message, CacheValue) and message.cache is not UNSET:
        order = SCOPED_VALUE
    fields: dict[str, Any] = {"type": message.__struct_config__.tag}
    for name in order:
        value = getattr(message, name)
        if value is not UNSET:
            fields[name] = value
    return _encoder.encode(fields)


def quote(text: str) -> bytes:
    """A text as JSON."""
    return _encoder.encode(text)


def unescape(raw: bytes) -> bytes:
    """A JSON text, or list of texts, written without the escapes that it does not need."""
    return _encoder.encode(_texts.decode(raw))
