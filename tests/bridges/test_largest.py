"""The largest payload of every pair of protocols, to the byte: it arrives. One byte more is an error for its publisher,
or is not offered to the subscriber and counted, by whose limit it is beyond; nothing of it arrives, and what follows
does."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from headrace.clients.blipmq import BlipmqClient
from headrace.clients.errors import ConnectionLost
from headrace.clients.face import Wish
from headrace.clients.felix import FelixClient
from headrace.clients.overhop import OverhopClient
from headrace.clients.protocols import CLIENTS
from headrace.clients.relink import RelinkConnector
from headrace.clients.zeroctl import Refused, ZeroctlClient
from headrace.guarantees import CEILINGS, PROTOCOLS, room_to_give, room_to_take
from headrace.limits import KiB, MiB
from tests.bridges.conftest import (
    CHANNEL,
    TIMEOUT,
    config_text,
    publish_address,
    server_of,
    subscribe_address,
    topic_of,
)
from tests.gateway.gateways import GatewayProcess, events_of

PAIRS = [(publisher, subscriber) for publisher in PROTOCOLS for subscriber in PROTOCOLS]
# In one of these two orders the publisher's limit is the smaller one, in the other the subscriber's. Felix publishes in
# Base64, so that its order holds with three quarters of its limit, too.
LIMITS = {
    "felix highest": {
        "zeroctl": 4 * MiB,
        "overhop": 4 * MiB + 256 * KiB,
        "blipmq": 4 * MiB + 512 * KiB,
        "relink": 4 * MiB + 768 * KiB,
        "felix": 7 * MiB,
    },
    "felix lowest": {
        "felix": 3 * MiB,
        "relink": 3 * MiB + 256 * KiB,
        "blipmq": 3 * MiB + 512 * KiB,
        "overhop": 3 * MiB + 768 * KiB,
        "zeroctl": 4 * MiB,
    },
}
RANDOM = random.Random(1).randbytes(8 * MiB)

Publish = Callable[[bytes], Awaitable[object]]


def largest_taken(publisher: str, subscriber: str, limits: dict[str, int]) -> int:
    """What the publisher's side allows."""
    address = publish_address(publisher, subscriber)
    names = {
        "blipmq": len(address),
        "felix": len(address.replace("/", "")) + len("1"),  # a client's first request
        "overhop": len(address) + len("3"),  # after HELLO and REGISTER
    }
    return room_to_take(publisher).largest(limits[publisher], names.get(publisher, 0))


def largest_given(publisher: str, subscriber: str, limits: dict[str, int]) -> int:
    """What the subscriber's side allows."""
    topic = topic_of(publisher, subscriber)
    names = {"blipmq": len(topic), "overhop": len(subscribe_address(publisher, subscriber)) + len(topic)}
    return room_to_give(subscriber).largest(limits[subscriber], names.get(subscriber, 0))


@pytest.fixture(scope="module", params=LIMITS)
def limits(request: pytest.FixtureRequest) -> dict[str, int]:
    found: dict[str, int] = LIMITS[request.param]
    return found


@pytest.fixture(scope="module")
def limited(limits: dict[str, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = tmp_path_factory.mktemp("largest")
    config = home / "headrace.toml"
    config.write_text(config_text())
    with GatewayProcess(
        home / "data",
        "log.segment_bytes=16MiB",
        "log.retention_bytes=256MiB",
        "listen.zeroctl.bind=127.0.0.1:0",
        "drop.enabled=false",
        *(f"{CEILINGS[one].setting}={limit}" for one, limit in limits.items()),
        config=config,
    ) as running:
        yield running


@asynccontextmanager
async def blipmq_publisher(gateway: GatewayProcess, address: str) -> AsyncIterator[Publish]:
    async with BlipmqClient(gateway.places["blipmq"], key="dev-key", reconnect=False) as client:
        yield lambda payload: client.publish_many(address, [payload], 1)


@asynccontextmanager
async def felix_publisher(gateway: GatewayProcess, address: str) -> AsyncIterator[Publish]:
    async with FelixClient(gateway.places["felix"]) as client:
        yield lambda payload: client.publish_batch(*address.split("/"), [payload])


@asynccontextmanager
async def overhop_publisher(gateway: GatewayProcess, address: str) -> AsyncIterator[Publish]:
    async with OverhopClient(gateway.places["overhop"]) as client:
        yield lambda payload: client.enqueue(address, payload, retry=False)


@asynccontextmanager
async def relink_publisher(gateway: GatewayProcess, address: str) -> AsyncIterator[Publish]:
    link = RelinkConnector(gateway.places["relink"], endpoint=address.partition("/")[0], reconnect=False)
    await link.connect()

    async def publish(payload: bytes) -> None:
        await link.channel(CHANNEL).send(payload)
        await link.flush()

    try:
        yield publish
    finally:
        await link.abandon()


@asynccontextmanager
async def zeroctl_publisher(gateway: GatewayProcess, address: str) -> AsyncIterator[Publish]:
    async with ZeroctlClient(gateway.places["zeroctl"], key="dev-key", node="teller") as client:
        yield lambda payload: client.publish(address, payload)


PUBLISHERS: dict[str, Callable[[GatewayProcess, str], AbstractAsyncContextManager[Publish]]] = {
    "blipmq": blipmq_publisher,
    "felix": felix_publisher,
    "overhop": overhop_publisher,
    "relink": relink_publisher,
    "zeroctl": zeroctl_publisher,
}


async def publish(gateway: GatewayProcess, publisher: str, address: str, payload: bytes) -> None:
    async with PUBLISHERS[publisher](gateway, address) as say:
        await say(payload)


async def is_refused(gateway: GatewayProcess, publisher: str, address: str, payload: bytes) -> None:
    """What the guarantees say of one who goes beyond its limit."""
    before = await asyncio.to_thread(events_of, gateway, publisher)
    async with PUBLISHERS[publisher](gateway, address) as say:
        if CEILINGS[publisher].ends:
            with pytest.raises(ConnectionLost):
                await say(payload)
        else:
            with pytest.raises(Refused, match="at most"):
                await say(payload)
            await say(b"on the same connection")
    after = await asyncio.to_thread(events_of, gateway, publisher)
    counted = CEILINGS[publisher].counted
    assert after[counted] == before[counted] + 1


def test_each_side_of_each_pair_has_the_smaller_limit_once() -> None:
    for publisher, subscriber in PAIRS:
        if publisher != subscriber:
            smaller = {
                largest_taken(publisher, subscriber, limits) < largest_given(publisher, subscriber, limits)
                for limits in LIMITS.values()
            }
            assert smaller == {True, False}, (publisher, subscriber)


def passed_over(gateway: GatewayProcess, subscriber: str) -> int:
    """Messages that its protocol could not give to a subscriber, or take."""
    return events_of(gateway, subscriber)["too_large"]


@pytest.mark.parametrize(("publisher", "subscriber"), PAIRS)
def test_largest_payload_arrives_and_one_byte_more_is_told_or_counted(
    limited: GatewayProcess, limits: dict[str, int], publisher: str, subscriber: str
) -> None:
    address = publish_address(publisher, subscriber)
    taken = largest_taken(publisher, subscriber, limits)
    given = largest_given(publisher, subscriber, limits)
    largest = RANDOM[: min(taken, given)]
    larger = RANDOM[: len(largest) + 1]

    async def talk() -> list[bytes]:
        wish = Wish(subscribe_address(publisher, subscriber), qos=0 if subscriber == "felix" else 1)
        heard = []
        async with (
            asyncio.timeout(TIMEOUT),
            CLIENTS[subscriber].subscriber(server_of(limited, subscriber), wish) as messages,
        ):
            await publish(limited, publisher, address, largest)
            if taken <= given:
                await is_refused(limited, publisher, address, larger)
            else:
                await publish(limited, publisher, address, larger)
            await publish(limited, publisher, address, b"last")
            async for message in messages:
                heard.append(message.payload)
                if message.payload == b"last":
                    break
        return heard

    before = passed_over(limited, subscriber)
    heard = asyncio.run(talk())
    assert heard.pop() == b"last"
    assert heard.pop(0) == largest
    if taken <= given:
        assert heard == ([] if CEILINGS[publisher].ends else [b"on the same connection"])
    else:
        assert heard == []
        assert passed_over(limited, subscriber) == before + 1
