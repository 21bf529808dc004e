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
    gateway: GatewayProcess, publisher: str, subscriber: str, payloads: Sequence[bytes]
) -> list[bytes]:
    """What the subscriber gets of what the publisher sends."""
    # Felix has no acknowledged deliveries.
    to_hear = Wish(subscribe_address(publisher, subscriber), qos=0 if subscriber == "felix" else 1)
    to_say = Wish(publish_address(publisher, subscriber), qos=1)
    heard: list[bytes] = []
    async with (
        asyncio.timeout(TIMEOUT),
        CLIENTS[subscriber].subscriber(server_of(gateway, subscriber), to_hear) as messages,
    ):
        async with CLIENTS[publisher].publisher(server_of(gateway, publisher), to_say) as sender:
            await sender.publish(payloads)
        if payloads:
            async for message in messages:
                heard.append(message.payload)
                if len(heard) == len(payloads):
                    break
    return heard


@pytest.mark.parametrize(("publisher", "subscriber"), PAIRS)
def test_payloads_of_all_sizes_arrive_byte_for_byte(
    gateway: GatewayProcess, publisher: str, subscriber: str
) -> None:
    assert asyncio.run(passed(gateway, publisher, subscriber, SIZES)) == SIZES


@pytest.mark.parametrize(("publisher", "subscriber"), PAIRS)
def test_order_is_kept(gateway: GatewayProcess, publisher: str, subscriber: str) -> None:
    sent = [b"%d" % number for number in range(200)]
    assert asyncio.run(passed(gateway, publisher, subscriber, sent)) == sent
