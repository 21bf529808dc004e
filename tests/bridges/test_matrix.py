"""Every publisher reaches every subscriber: all pairs of protocols, with their real clients over real sockets."""

import asyncio
import random
from collections.abc import Sequence

import pytest

from headrace.clients.face import Wish
from headrace.clients.protocols import CLIENTS
from tests.bridges.conftest import PROTOCOLS, TIMEOUT, publish_address, server_of, subscribe_address
from tests.gateway.gateways import GatewayProcess

PAIRS = [(publisher, subscriber) for publisher in PROTOCOLS for subscriber in PROTOCOLS]
SIZES = [b"", b"x", bytes(range(256)), random.Random(1).randbytes(1 << 20)]


async def passed(
    gateway: GatewayProcess, publisher: str, subscriber: str, *senders: Sequence[Sequence[bytes]]
) -> list[bytes]:
    """What the subscriber gets of what publishers send at once, each in one call after the other."""
    # Felix has no acknowledged deliveries.
    to_hear = Wish(subscribe_address(publisher, subscriber), qos=0 if subscriber == "felix" else 1)
    to_say = Wish(publish_address(publisher, subscriber), qos=1)
    heard: list[bytes] = []
    count = sum(len(call) for calls in senders for call in calls)

    async def send(calls: Sequence[Sequence[bytes]]) -> None:
        async with CLIENTS[publisher].publisher(server_of(gateway, publisher), to_say) as sender:
            for call in calls:
                await sender.publish(call)

    async with (
        asyncio.timeout(TIMEOUT),
        CLIENTS[subscriber].subscriber(server_of(gateway, subscriber), to_hear) as messages,
    ):
        await asyncio.gather(*map(send, senders))
        async for message in messages:
            heard.append(message.payload)
            if len(heard) == count:
                break
    return heard


@pytest.mark.parametrize(("publisher", "subscriber"), PAIRS)
def test_payloads_of_all_sizes_arrive_byte_for_byte(
    gateway: GatewayProcess, publisher: str, subscriber: str
) -> None:
    assert asyncio.run(passed(gateway, publisher, subscriber, [SIZES])) == SIZES


@pytest.mark.parametrize(("publisher", "subscriber"), PAIRS)
def test_order_of_each_publisher_is_kept(gateway: GatewayProcess, publisher: str, subscriber: str) -> None:
    calls = {
        name: [[b"%s%d" % (name, number) for number in range(first, first + 50)] for first in (0, 50)]
        for name in (b"a", b"b")
    }
    heard = asyncio.run(passed(gateway, publisher, subscriber, *calls.values()))
    for name, (first, second) in calls.items():
        assert [message for message in heard if message.startswith(name)] == first + second
