"""Every pair of protocols that promises delivery, all at once, while the gateway is killed in the middle of it and
started again on the same data and ports: what was confirmed arrives."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from headrace.clients.blipmq import BlipmqClient
from headrace.clients.errors import ClientError
from headrace.clients.face import Server, Wish
from headrace.clients.overhop import OverhopClient
from headrace.clients.protocols import CLIENTS
from headrace.clients.relink import RelinkConnector
from headrace.clients.zeroctl import ZeroctlClient
from headrace.guarantees import PROTOCOLS, Pair, Promise, pairs
from tests.bridges.conftest import TIMEOUT, config_text, publish_address, subscribe_address
from tests.gateway.gateways import PATIENCE, GatewayProcess

KEPT = [one for one in pairs() if one.best.survives]
KILLS = 2
SETS = (
    "log.segment_bytes=1MiB",
    "log.retention_bytes=256MiB",
    "drop.enabled=false",
    "bus.max_deliveries=100",
)


# Clients that come back soon.
SOON: dict[str, Any] = {"timeout": TIMEOUT, "max_reconnect_delay": 0.1}


@asynccontextmanager
async def blipmq_subscriber(at: str, topic: str) -> AsyncIterator[AsyncIterator[bytes]]:
    client = BlipmqClient(at, key="dev-key", **SOON)
    async with client, client.subscribe(topic, 1, auto_ack=True) as messages:
        yield (message.payload async for message in messages)


@asynccontextmanager
async def overhop_subscriber(at: str, queue: str) -> AsyncIterator[AsyncIterator[bytes]]:
    client = OverhopClient(at, **SOON)
    async with client, client.work(queue, auto_done=True) as jobs:
        yield (job.payload async for job in jobs)


@asynccontextmanager
async def relink_subscriber(at: str, address: str) -> AsyncIterator[AsyncIterator[bytes]]:
    async with RelinkConnector(at, endpoint=address.partition("/")[0], **SOON) as link:
        yield (message.payload async for message in link)


@asynccontextmanager
async def zeroctl_subscriber(at: str, key: str) -> AsyncIterator[AsyncIterator[bytes]]:
    client = ZeroctlClient(at, key="dev-key", node="listener", **SOON)
    async with client, client.bind(key, durable=True, name="kept") as messages:
        yield (message.body async for message in messages)


SUBSCRIBERS: dict[str, Callable[[str, str], AbstractAsyncContextManager[AsyncIterator[bytes]]]] = {
    "blipmq": blipmq_subscriber,
    "overhop": overhop_subscriber,
    "relink": relink_subscriber,
    "zeroctl": zeroctl_subscriber,
}


class Bridge:
    """A publisher and a subscriber of one pair, which know nothing of the kills."""

    def __init__(self, publisher: str, subscriber: str, places: dict[str, str]) -> None:
        self.publisher = publisher
        self.subscriber = subscriber
        self.confirmed: list[bytes] = []
        self.heard: Counter[bytes] = Counter()
        self.subscribed = asyncio.Event()
        self._places = places
        self._numbers = count()

    async def publish(self, over: asyncio.Event) -> None:
        """Confirmed batches, one after the other; what was not confirmed is not sent again here, but by its client."""
        # QUIC does not notice by itself that the other side was killed.
        timeout = 1.0 if self.publisher == "felix" else TIMEOUT
        server = Server(self._places[self.publisher], "dev-key", None, timeout)
        wish = Wish(publish_address(self.publisher, self.subscriber), qos=1)
        while not over.is_set():
            try:
                async with CLIENTS[self.publisher].publisher(server, wish) as sender:
                    batch = [b"%d" % next(self._numbers) for _ in range(5)]
                    await sender.publish(batch)
            except ClientError:
                await asyncio.sleep(0.02)
            else:
                self.confirmed += batch

    async def subscribe(self) -> None:
        address = subscribe_address(self.publisher, self.subscriber)
        async with SUBSCRIBERS[self.subscriber](self._places[self.subscriber], address) as messages:
            self.subscribed.set()
            async for message in messages:
                self.heard[message] += 1

    @property
    def missing(self) -> set[bytes]:
        return set(self.confirmed) - self.heard.keys()


@pytest.fixture(scope="module")
def survivors(tmp_path_factory: pytest.TempPathFactory, soak: int) -> dict[tuple[str, str], Bridge]:
    """All bridges, after the gateway was killed under them and is there again."""
    home = tmp_path_factory.mktemp("kill")
    config = home / "headrace.toml"
    config.write_text(config_text())
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rolls = random.Random(seed)
    return asyncio.run(live_through(home / "data", config, rolls, KILLS * soak))


async def live_through(
    data: Path, config: Path, rolls: random.Random, kills: int
) -> dict[tuple[str, str], Bridge]:
    async def started(*sets: str) -> GatewayProcess:
        gateway = GatewayProcess(data, *SETS, *sets, config=config)
        await asyncio.to_thread(gateway.__enter__)
        return gateway

    gateway = await started("listen.zeroctl.bind=127.0.0.1:0")
    same_ports = [f"listen.{one}.bind={gateway.places[one]}" for one in PROTOCOLS]
    bridges = [Bridge(one.publisher, one.subscriber, gateway.places) for one in KEPT]
    over = asyncio.Event()
    tasks = [asyncio.create_task(bridge.subscribe()) for bridge in bridges]
    try:
        async with asyncio.timeout(PATIENCE * (kills + 2)):
            for bridge in bridges:
                await bridge.subscribed.wait()
            publishers = [asyncio.create_task(bridge.publish(over)) for bridge in bridges]
            tasks += publishers
            for _ in range(kills):
                before = [len(bridge.confirmed) for bridge in bridges]
                while any(len(one.confirmed) < last + 10 for one, last in zip(bridges, before, strict=True)):
                    await asyncio.sleep(0.005)
                    assert not any(task.done() for task in tasks)
                await asyncio.sleep(rolls.random() / 50)
                await asyncio.to_thread(gateway.kill)
                gateway = await started(*same_ports)
            over.set()
            await asyncio.gather(*publishers)
        with suppress(TimeoutError):  # the tests say what is missing
            async with asyncio.timeout(PATIENCE):
                while any(bridge.missing for bridge in bridges):
                    await asyncio.sleep(0.01)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await asyncio.to_thread(gateway.kill)
    return {(bridge.publisher, bridge.subscriber): bridge for bridge in bridges}


def test_all_publishers_reach_all_subscribers_but_felix_through_kills() -> None:
    assert {(one.publisher, one.subscriber) for one in KEPT} == {
        (publisher, subscriber)
        for publisher in PROTOCOLS
        for subscriber in PROTOCOLS
        if subscriber != "felix"
    }


@pytest.mark.parametrize("pair", KEPT, ids=lambda one: f"{one.publisher}-{one.subscriber}")
def test_what_was_confirmed_arrives_although_the_gateway_is_killed(
    survivors: dict[tuple[str, str], Bridge], pair: Pair
) -> None:
    bridge = survivors[pair.publisher, pair.subscriber]
    assert not bridge.missing
    if pair.best.whole == Promise.EXACTLY_ONCE:
        assert set(bridge.heard.values()) == {1}
    if pair.subscriber != "overhop":  # whose further attempts have no place among the others
        first_deliveries = [int(message) for message in bridge.heard]
        assert first_deliveries == sorted(first_deliveries)
