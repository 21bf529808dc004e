"""BlipMQ's client behind the face that all protocols share. It knows nothing of the command line."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from headrace.clients.blipmq import BlipmqClient, BlipmqNack
from headrace.clients.face import Client, Publisher, Received, Server, Subscriber, Wish
from headrace.wire import blipmq


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
        yield Subscriber(received(), label)


CLIENT: Final = Client(
    at="127.0.0.1:5555",
    form="a topic",
    max_message=blipmq.MAX_FRAME_LENGTH,
    publisher=blipmq_publisher,
    subscriber=blipmq_subscriber,
)
