"""The one face that every protocol's client shows to the command line: what publishes to and subscribes to an
address. It knows no protocol."""

import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Server:
    """Whom to talk to, and how."""

    at: str  # "host:port" or "unix:/path"
    key: str
    tls: ssl.SSLContext | None
    timeout: float  # seconds that connecting and each answer may take
    # For who makes no use of `tls`: the files that it was made of.
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """What is wanted of an address, as far as its protocol has a word for it."""

    address: str
    qos: int = 0
    acknowledge: bool = True
    resume: int | None = None  # a subscription's id


class Publisher(Protocol):
    """Sends to one address. When its block is left, the server has handled everything."""

    async def publish(self, payloads: Sequence[bytes]) -> None: ...

    @property
    def losses(self) -> int:
        """How often the connection was lost, and with it perhaps messages."""


class Received(NamedTuple):
    """A message and what its protocol says beside it, by name."""

    payload: bytes
    about: dict[str, object]


class Subscriber:
    """Messages of one address. One is acknowledged when the next is asked for. `label` is what it is, in a sentence for
    the person who asked for it."""

    def __init__(self, messages: AsyncIterator[Received], label: str) -> None:
        self._messages = messages
        self.label = label

    def __aiter__(self) -> AsyncIterator[Received]:
        return self._messages


@dataclass(frozen=True, slots=True)
class Client:
    """One protocol."""

    at: str  # where its server listens by default
    form: str  # what its addresses are
    max_message: int  # bytes
    publisher: Callable[[Server, Wish], AbstractAsyncContextManager[Publisher]]
    subscriber: Callable[[Server, Wish], AbstractAsyncContextManager[Subscriber]]
