"""The protocols that there is a client for, all with one face: what publishes to and subscribes to an
address. It knows each protocol's client, and nothing of the command line that asks for one."""

import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from headrace.clients.blipmq import BlipmqClient, BlipmqNack
from headrace.wire import blipmq


@dataclass(frozen=True, slots=True)
class Server:
    """Whom to talk to, and how."""

    at: str  # "host:port" or "unix:/path"
    key: str
    tls: ssl.SSLContext | None
    timeout: float  # seconds that connecting and each answer may take


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


class Subscriber(Protocol):
    """Messages of one address. One is acknowledged when the next is asked for."""

    @property
    def label(self) -> str:
        """What it is, in a sentence for the person who asked for it."""

    def __aiter__(self) -> AsyncIterator[Received]: ...


@dataclass(frozen=True, slots=True)
class Client:
    """One protocol."""

    at: str  # where its server listens by default
    form: str  # what its addresses are
    max_message: int  # bytes
    publisher: Callable[[Server, Wish], AbstractAsyncContextManager[Publisher]]
    subscriber: Callable[[Server, Wish], AbstractAsyncContextManager[Subscriber]]


# --- BlipMQ -------------------------------------------------------------------------------------------------


class BlipmqPublisher:
    def __init__(self, server: Server, wish: Wish) -> None:
        self._wish = wish
        self._refusal: BlipmqNack | None = None
        self.client = BlipmqClient(
            server.at, key=server.key, tls=server.tls, timeout=server.timeout, on_refusal=self._refused
        )

    def _refused(self, error: BlipmqNack) -> None:
        self._refusal = self._refusal or error

    async def publish(self, payloads: Sequence[bytes]) -> None:
        if self._refusal is not None:
            raise self._refusal
        await self.client.publish_many(self._wish.address, payloads, self._wish.qos)

    @property
    def losses(self) -> int:
        # What was not confirmed at QoS 1 was sent again.
        return 0 if self._wish.qos else self.client.reconnects


@asynccontextmanager
async def blipmq_publisher(server: Server, wish: Wish) -> AsyncIterator[Publisher]:
    publisher = BlipmqPublisher(server, wish)
    async with publisher.client:
        yield publisher


class BlipmqSubscriber:
    def __init__(self, messages: AsyncIterator[Received], label: str) -> None:
        self._messages = messages
        self.label = label

    def __aiter__(self) -> AsyncIterator[Received]:
        return self._messages


@asynccontextmanager
async def blipmq_subscriber(server: Server, wish: Wish) -> AsyncIterator[Subscriber]:
    client = BlipmqClient(server.at, key=server.key, tls=server.tls, timeout=server.timeout)
    if wish.resume is not None:
        subscription = client.resume(wish.resume, wish.address, auto_ack=wish.acknowledge)
    else:
        subscription = client.subscribe(wish.address, wish.qos, auto_ack=wish.acknowledge)

    async def received() -> AsyncIterator[Received]:
        async for message in subscription:
            about: dict[str, object] = {
                "protocol": "blipmq",
                "topic": message.topic,
                "qos": message.qos,
                "tag": message.tag,
                "subscription": subscription.id,
            }
            yield Received(message.payload, about)

    async with client, subscription:
        label = f"subscribed to {wish.address!r}"
        if subscription.qos:
            label += f" as subscription {subscription.id}; --resume {subscription.id} goes on with it later"
        yield BlipmqSubscriber(received(), label)


# A protocol joins with one entry.
CLIENTS: Final[dict[str, Client]] = {
    "blipmq": Client(
        at="127.0.0.1:5555",
        form="a topic",
        max_message=blipmq.MAX_FRAME_LENGTH,
        publisher=blipmq_publisher,
        subscriber=blipmq_subscriber,
    ),
}
