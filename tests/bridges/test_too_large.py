"""Messages that are larger than the log or a subscriber's protocol takes: the publisher is told or hung up on, or the
message is passed over there and counted. Nothing is delivered in part, and what follows arrives."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from headrace.clients.blipmq import BlipmqClient
from headrace.clients.errors import ConnectionLost
from headrace.clients.face import Wish
from headrace.clients.felix import FelixClient, FelixRefused
from headrace.clients.overhop import OverhopClient, OverhopError
from headrace.clients.protocols import CLIENTS
from headrace.clients.relink import RelinkConnector
from headrace.clients.zeroctl import Refused, ZeroctlClient
from headrace.guarantees import DELIVERING, PROTOCOLS, Promise
from tests.bridges.conftest import (
    CHANNEL,
    TIMEOUT,
    config_text,
    publish_address,
    server_of,
    subscribe_address,
)
from tests.gateway.gateways import GatewayProcess, events_of

LARGE = 600 << 10  # more than half of a segment, which is what the log takes


@pytest.fixture(scope="module")
def small_log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home: Path = tmp_path_factory.mktemp("small")
    config = home / "headrace.toml"
    config.write_text(config_text())
    with GatewayProcess(
        home / "data",
        "log.segment_bytes=1MiB",
        "log.retention_bytes=64MiB",
        "listen.zeroctl.bind=127.0.0.1:0",
        "drop.enabled=false",
        config=config,
    ) as running:
        yield running


async def blipmq_refuses(gateway: GatewayProcess, address: str) -> None:
    # Two frames must fit in a segment, so a message that the log has no room for is longer than a frame.
    client = BlipmqClient(gateway.places["blipmq"], key="dev-key", reconnect=False)
    with pytest.raises(ConnectionLost):
        async with client:
            await client.publish_many(address, [bytes(LARGE)], 1)


async def felix_refuses(gateway: GatewayProcess, address: str) -> None:
    async with FelixClient(gateway.places["felix"]) as client:
        with pytest.raises(FelixRefused, match="too large"):
            await client.publish(*address.split("/"), bytes(LARGE))
        with pytest.raises(FelixRefused, match="too large"):
            await client.publish_batch(*address.split("/"), [b"first of the batch", bytes(LARGE)])


async def overhop_refuses(gateway: GatewayProcess, address: str) -> None:
    async with OverhopClient(gateway.places["overhop"]) as client:
        with pytest.raises(OverhopError, match="too large"):
            await client.enqueue(address, bytes(LARGE))


async def relink_refuses(gateway: GatewayProcess, address: str) -> None:
    link = RelinkConnector(gateway.places["relink"], endpoint=address.partition("/")[0], reconnect=False)
    await link.connect()
    await link.channel(CHANNEL).send(b"first part", bytes(LARGE))
    with pytest.raises(ConnectionLost):
        await link.flush()
    await link.abandon()


async def zeroctl_refuses(gateway: GatewayProcess, address: str) -> None:
    async with ZeroctlClient(gateway.places["zeroctl"], key="dev-key", node="teller") as client:
        with pytest.raises(Refused, match="too large"):
            await client.publish(address, bytes(LARGE))


REFUSES: dict[str, Callable[[GatewayProcess, str], Awaitable[None]]] = {
    "blipmq": blipmq_refuses,
    "felix": felix_refuses,
    "overhop": overhop_refuses,
    "relink": relink_refuses,
    "zeroctl": zeroctl_refuses,
}


def appended(gateway: GatewayProcess) -> int:
    offset: int = gateway.status()["log"]["stats"]["appended_offset"]
    return offset


@pytest.mark.parametrize("publisher", PROTOCOLS)
def test_publisher_of_what_the_log_cannot_take_learns_it_and_nothing_of_it_is_kept(
    small_log: GatewayProcess, publisher: str
) -> None:
    subscriber = "zeroctl"
    address = publish_address(publisher, subscriber)

    async def talk() -> bytes:
        wish = Wish(subscribe_address(publisher, subscriber), qos=1)
        async with (
            asyncio.timeout(TIMEOUT),
            CLIENTS[subscriber].subscriber(server_of(small_log, subscriber), wish) as messages,
        ):
            before = await asyncio.to_thread(appended, small_log)
            await REFUSES[publisher](small_log, address)
            assert await asyncio.to_thread(appended, small_log) == before
            async with CLIENTS[publisher].publisher(
                server_of(small_log, publisher), Wish(address, qos=1)
            ) as sender:
                await sender.publish([b"small"])
            async for message in messages:
                return message.payload
        raise AssertionError("the subscription ended")

    assert asyncio.run(talk()) == b"small"


ONE_TOPIC = """
[[queues]]
name = "jobs"
filter = "site.large.7"

[[endpoints]]
name = "from"
publish = "site.large.{channel}"

[[endpoints]]
name = "to"
deliver = "site.large.7"
"""
ADDRESSES = {
    "blipmq": "site.large.7",
    "felix": "site/large/7",
    "overhop": "jobs",
    "relink": "to/0",
    "zeroctl": "site.large.7",
}
# More than a BlipMQ frame can be, which is the largest of the limits.
HUGE = (16 << 20) + 1


def test_what_a_subscribers_protocol_cannot_take_is_passed_over_there_and_counted(tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(ONE_TOPIC)

    async def hear(gateway: GatewayProcess, subscriber: str, ready: asyncio.Semaphore) -> list[int]:
        """The sizes of what came, up to the last."""
        wish = Wish(ADDRESSES[subscriber], qos=0 if subscriber == "felix" else 1)
        sizes: list[int] = []
        async with CLIENTS[subscriber].subscriber(server_of(gateway, subscriber), wish) as messages:
            ready.release()
            async for message in messages:
                sizes.append(len(message.payload))
                if message.payload == b"last":
                    break
        return sizes

    async def talk(gateway: GatewayProcess) -> dict[str, list[int]]:
        ready = asyncio.Semaphore(0)
        async with asyncio.timeout(TIMEOUT):
            hearing = [asyncio.create_task(hear(gateway, one, ready)) for one in PROTOCOLS]
            for _ in hearing:
                await ready.acquire()
            async with RelinkConnector(gateway.places["relink"], endpoint="from", timeout=TIMEOUT) as link:
                for payload in (b"first", bytes(HUGE), b"last"):
                    await link.channel(CHANNEL).send(payload)
                await link.flush()
            return dict(zip(PROTOCOLS, await asyncio.gather(*hearing), strict=True))

    with GatewayProcess(
        tmp_path / "data",
        "log.segment_bytes=80MiB",  # room for it and three dead letters, so that none of these has to wait
        "log.retention_bytes=640MiB",
        "log.pool_segments=1",
        "listen.zeroctl.bind=127.0.0.1:0",
        "listen.relink.max_message_bytes=32MiB",
        "drop.enabled=false",
        config=config,
    ) as gateway:
        passed_over = {one: [5, 4] for one in PROTOCOLS}
        assert asyncio.run(talk(gateway)) == {**passed_over, "relink": [5, HUGE, 4]}
        for protocol in set(PROTOCOLS) - {"relink"}:
            assert events_of(gateway, protocol)["too_large"] == 1, protocol
        # Whoever was to acknowledge it has it among the dead letters.
        acknowledging = {one.protocol for one in DELIVERING if one.promise == Promise.AT_LEAST_ONCE}
        assert gateway.status()["bus"]["dead"] == len(acknowledging)
