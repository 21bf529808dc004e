"""Relink's connector behind the face that all protocols share. It knows nothing of the command line.

An address is `endpoint/channel`. What the handshake has to say beside it stands behind a question mark:
`demo-tx/7?transactions=both`, `orders/1?ids=2,8&transactions=connector`. A subscriber's channel may be `*`, for all.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import parse_qsl

from headrace.clients.errors import ClientError
from headrace.clients.face import Client, Publisher, Received, Server, Subscriber, Wish
from headrace.clients.relink import RelinkConnector
from headrace.wire import relink

SIDES: Final = {
    "none": (False, False),
    "connector": (True, False),
    "listener": (False, True),
    "both": (True, True),
}


def take_apart(address: str) -> tuple[str, str, dict[str, Any]]:
    """Endpoint, channel, and what else the connector needs; ValueError says what is wrong."""
    place, _, said = address.partition("?")
    endpoint, slash, channel = place.rpartition("/")
    if not slash or not (channel == "*" or (channel.isascii() and channel.isdigit())):
        raise ValueError("an address is endpoint/channel, and the channel a number, like demo/7")
    options: dict[str, Any] = {}
    for name, value in parse_qsl(said, keep_blank_values=True, strict_parsing=bool(said)):
        if name == "ids":
            sizes = value.split(",")
            if len(sizes) != 2 or not all(size in "012345678" and size for size in sizes):
                raise ValueError(
                    "ids=C,L are the sizes of the connector's and the listener's ids, 0 to 8 bytes"
                )
            options["connector_id_bytes"], options["listener_id_bytes"] = map(int, sizes)
        elif name == "transactions" and value in SIDES:
            options["connector_transactions"], options["listener_transactions"] = SIDES[value]
        else:
            raise ValueError(
                f"{name}={value} is none of ids=C,L and transactions={'|'.join(SIDES)}, which may follow the ?"
            )
    return endpoint, channel, options


def connector(server: Server, endpoint: str, options: dict[str, Any]) -> RelinkConnector:
    return RelinkConnector(server.at, endpoint=endpoint, tls=server.tls, timeout=server.timeout, **options)


class RelinkPublisher:
    def __init__(self, link: RelinkConnector, channel: int) -> None:
        self._link = link
        self._channel = link.channel(channel)

    async def publish(self, payloads: Sequence[bytes]) -> None:
        if self._link.transactional:
            async with self._channel.transaction():
                for payload in payloads:
                    await self._channel.send(payload)
        else:
            for payload in payloads:
                await self._channel.send(payload)

    @property
    def losses(self) -> int:
        # What a lost connection left unconsumed was sent again; what a lost link left was not.
        return self._link.links_lost


@asynccontextmanager
async def relink_publisher(server: Server, wish: Wish) -> AsyncIterator[Publisher]:
    endpoint, channel, options = take_apart(wish.address)
    if channel == "*":
        raise ValueError("messages are published on one channel, by its number")
    link = connector(server, endpoint, options)
    publisher = RelinkPublisher(link, int(channel))
    async with link:
        yield publisher


@asynccontextmanager
async def relink_subscriber(server: Server, wish: Wish) -> AsyncIterator[Subscriber]:
    endpoint, channel, options = take_apart(wish.address)
    if wish.resume is not None:
        raise ClientError("a Relink link is resumed by the connector that has it, not by another one")
    link = connector(server, endpoint, options)

    async def received() -> AsyncIterator[Received]:
        while True:
            message = await (anext(link) if wish.acknowledge else link.receive())
            if channel != "*" and message.channel != int(channel):
                link.consumed(message)
                continue
            about: dict[str, object] = {
                "protocol": "relink",
                "endpoint": endpoint,
                "channel": message.channel,
                "number": message.number,
                "part_sizes": [len(part) for part in message.parts],
            }
            yield Received(message.payload, about)

    await link.connect()
    try:
        yield Subscriber(received(), f"linked to {endpoint!r} as {link.link}, channel {channel}")
    finally:
        # Nobody can come back to the link, so the listener need not keep it, also after Ctrl-C.
        if link.connected:
            await link.close()
        else:
            await link.abandon()


CLIENT: Final = Client(
    at="127.0.0.1:5600",
    form="endpoint/channel",
    max_message=relink.MAX_PAYLOAD,
    publisher=relink_publisher,
    subscriber=relink_subscriber,
)
