"""Felix's client behind the face that all protocols share. It knows nothing of the command line."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from headrace.clients.face import Client, Publisher, Received, Server, Subscriber, Wish
from headrace.clients.felix import FelixClient
from headrace.wire import felix

# Of one batch: the server takes it as a whole, so it should not be larger than a log's segment.
BATCH_BYTES: Final = 1 << 20
BATCH_MESSAGES: Final = 1000
# A message in JSON grows by a third, and names go with it.
MAX_MESSAGE: Final = felix.MAX_FRAME_LENGTH // 4 * 3 - (256 << 10)


def client_of(server: Server) -> FelixClient:
    return FelixClient(
        server.at,
        authorities=server.tls_ca,
        certificate=server.tls_cert,
        key=server.tls_key or server.tls_cert,
        timeout=server.timeout,
    )


def batches(payloads: Sequence[bytes]) -> Iterator[list[bytes]]:
    """The payloads in order, so many at a time that each batch stays small."""
    batch: list[bytes] = []
    size = 0
    for payload in payloads:
        if batch and (size + len(payload) > BATCH_BYTES or len(batch) == BATCH_MESSAGES):
            yield batch
            batch, size = [], 0
        batch.append(payload)
        size += len(payload)
    if batch:
        yield batch


class FelixPublisher:
    def __init__(self, server: Server, wish: Wish) -> None:
        self.client = client_of(server)
        self._address = felix.split_address(wish.address)
        self._safely = wish.qos > 0

    async def publish(self, payloads: Sequence[bytes]) -> None:
        for batch in batches(payloads):
            await self.client.publish_batch(*self._address, batch, ack=self._safely, binary=not self._safely)

    @property
    def losses(self) -> int:
        # With --qos 1 a lost connection is an error of the batch that was under way.
        return 0 if self._safely else self.client.reconnects


@asynccontextmanager
async def felix_publisher(server: Server, wish: Wish) -> AsyncIterator[Publisher]:
    publisher = FelixPublisher(server, wish)
    async with publisher.client:
        yield publisher


@asynccontextmanager
async def felix_subscriber(server: Server, wish: Wish) -> AsyncIterator[Subscriber]:
    if wish.qos or wish.resume is not None:
        raise ValueError("Felix has no durable subscriptions, and acknowledges no deliveries")
    tenant, namespace, stream = felix.split_address(wish.address)
    client = client_of(server)
    subscription = client.subscribe(tenant, namespace, stream)

    async def received() -> AsyncIterator[Received]:
        async for payload in subscription:
            about: dict[str, object] = {
                "protocol": "felix",
                "tenant": tenant,
                "namespace": namespace,
                "stream": stream,
            }
            yield Received(payload, about)

    async with client, subscription:
        yield Subscriber(received(), f"subscribed to {wish.address!r}")


CLIENT: Final = Client(
    at="127.0.0.1:5000",
    form="tenant/namespace/stream",
    max_message=MAX_MESSAGE,
    publisher=felix_publisher,
    subscriber=felix_subscriber,
)
