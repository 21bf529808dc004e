"""Overhop's client behind the face that all protocols share: to publish is to enqueue, to subscribe is to work. It
knows nothing of the command line."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from headrace.clients.face import Client, Publisher, Received, Server, Subscriber, Wish
from headrace.clients.overhop import OverhopClient
from headrace.wire import overhop

# Jobs that are fetched ahead of the output: what is not printed goes back to the queue.
CREDITS: Final = 64


class OverhopPublisher:
    def __init__(self, client: OverhopClient, wish: Wish) -> None:
        self._client = client
        self._wish = wish

    async def publish(self, payloads: Sequence[bytes]) -> None:
        await self._client.enqueue_many(self._wish.address, payloads)

    @property
    def losses(self) -> int:
        return 0  # what was not confirmed was sent again


@asynccontextmanager
async def overhop_publisher(server: Server, wish: Wish) -> AsyncIterator[Publisher]:
    async with OverhopClient(server.at, tls=server.tls, timeout=server.timeout) as client:
        yield OverhopPublisher(client, wish)


@asynccontextmanager
async def overhop_subscriber(server: Server, wish: Wish) -> AsyncIterator[Subscriber]:
    if wish.resume is not None:
        raise ValueError("a queue keeps its jobs by itself; there is no subscription to resume")
    client = OverhopClient(server.at, tls=server.tls, timeout=server.timeout)
    async with client, client.work(wish.address, credits=CREDITS, auto_done=wish.acknowledge) as jobs:

        async def received() -> AsyncIterator[Received]:
            async for job in jobs:
                about: dict[str, object] = {
                    "protocol": "overhop",
                    "queue": wish.address,
                    "topic": job.topic,
                    "jid": job.jid,
                    "attempt": job.attempt,
                }
                # A job that is no bytes is shown as its MessagePack.
                payload = job.payload if isinstance(job.payload, bytes) else overhop.pack(job.payload)
                if not isinstance(job.payload, bytes):
                    about["encoding"] = "msgpack"
                yield Received(payload, about)

        yield Subscriber(received(), f"working on the queue {wish.address!r}")


CLIENT: Final = Client(
    at="127.0.0.1:9876",
    form="a queue",
    max_message=overhop.DEFAULT_PAYLOAD_LIMIT - 1024,  # the envelope's other fields, and a long name
    publisher=overhop_publisher,
    subscriber=overhop_subscriber,
)
