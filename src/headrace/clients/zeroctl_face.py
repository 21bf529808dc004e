"""zeroctl's client behind the face that all protocols share. It knows nothing of the command line."""

import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from headrace.clients.face import Client, Publisher, Received, Server, Subscriber, Wish
from headrace.clients.zeroctl import ZeroctlClient
from headrace.wire import zeroctl


def node_for_commands() -> str:
    """What a command calls itself as a node."""
    return f"{socket.gethostname()[:200]}-headrace-cli"


def client_of(server: Server) -> ZeroctlClient:
    """A node for one command."""
    return ZeroctlClient(
        server.at,
        key=server.key,
        node=node_for_commands(),
        tls=server.tls,
        timeout=server.timeout,
    )


class ZeroctlPublisher:
    def __init__(self, client: ZeroctlClient, wish: Wish) -> None:
        self._client = client
        self._wish = wish

    async def publish(self, payloads: Sequence[bytes]) -> None:
        # Each is confirmed or refused, whatever the wish: without, nobody would hear of a refusal.
        await self._client.publish_many(self._wish.address, payloads)

    @property
    def losses(self) -> int:
        return 0  # what was not confirmed was sent again


@asynccontextmanager
async def zeroctl_publisher(server: Server, wish: Wish) -> AsyncIterator[Publisher]:
    async with client_of(server) as client:
        yield ZeroctlPublisher(client, wish)


@asynccontextmanager
async def zeroctl_subscriber(server: Server, wish: Wish) -> AsyncIterator[Subscriber]:
    durable = bool(wish.qos) or wish.resume is not None
    number = wish.resume if wish.resume is not None else secrets.randbits(31) + 1
    async with client_of(server) as client:
        binding = client.bind(
            wish.address,
            durable=durable,
            name=f"sub-{number}" if durable else "",
            auto_ack=wish.acknowledge,
        )

        async def received() -> AsyncIterator[Received]:
            async for message in binding:
                about: dict[str, object] = {
                    "protocol": "zeroctl",
                    "topic": message.key,
                    "headers": message.headers,
                    "tag": message.tag,
                    "deliveries": message.deliveries,
                }
                yield Received(message.body, about)

        async with binding:
            label = f"bound to {wish.address!r}"
            if durable:
                label += f" as subscription {number}; --resume {number} goes on with it later"
            yield Subscriber(received(), label)


CLIENT: Final = Client(
    at="127.0.0.1:5700",
    form="a routing key, or a filter",
    max_message=zeroctl.MAX_MAX_BODY,
    publisher=zeroctl_publisher,
    subscriber=zeroctl_subscriber,
)
