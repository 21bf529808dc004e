"""Every way to subscribe, with messages that were published to be confirmed and others: what nobody acknowledges comes
again where the guarantees say so, and nowhere else."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from headrace.clients.blipmq import BlipmqClient
from headrace.clients.face import Wish
from headrace.clients.overhop import OverhopClient, Worker
from headrace.clients.protocols import CLIENTS
from headrace.clients.zeroctl import ZeroctlClient
from headrace.guarantees import DELIVERING, PUBLISHING, way
from tests.bridges.conftest import TIMEOUT, server_of
from tests.gateway.gateways import GatewayProcess

TOPIC = "site.line.temp"
CONFIG = f"""
[[queues]]
name = "jobs"
filter = "{TOPIC}"

[[endpoints]]
name = "to"
deliver = "{TOPIC}"
"""
Heard = AbstractAsyncContextManager[AsyncIterator[bytes]]


@asynccontextmanager
async def by_face(
    gateway: GatewayProcess, protocol: str, address: str, qos: int
) -> AsyncIterator[AsyncIterator[bytes]]:
    wish = Wish(address, qos=qos, acknowledge=False)
    async with CLIENTS[protocol].subscriber(server_of(gateway, protocol), wish) as messages:
        yield (message.payload async for message in messages)


@asynccontextmanager
async def by_binding(gateway: GatewayProcess) -> AsyncIterator[AsyncIterator[bytes]]:
    client = ZeroctlClient(gateway.places["zeroctl"], key="dev-key", node="listener", timeout=TIMEOUT)
    async with client, client.bind(TOPIC, acknowledge=True, auto_ack=False) as messages:
        yield (message.body async for message in messages)


@asynccontextmanager
async def by_working(gateway: GatewayProcess) -> AsyncIterator[AsyncIterator[bytes]]:
    """A client that has a job still takes the same one for that, so this one gives each back."""

    async def given_back(jobs: Worker) -> AsyncIterator[bytes]:
        async for job in jobs:
            yield job.payload
            await job.fail("not now", retry_in=0.05)

    client = OverhopClient(gateway.places["overhop"], timeout=TIMEOUT)
    async with client, client.work("jobs") as jobs:
        yield given_back(jobs)


SUBSCRIBE: dict[tuple[str, str], Callable[[GatewayProcess], Heard]] = {
    ("blipmq", "QoS 0"): lambda gateway: by_face(gateway, "blipmq", TOPIC, 0),
    ("blipmq", "QoS 1"): lambda gateway: by_face(gateway, "blipmq", TOPIC, 1),
    ("felix", "subscribe"): lambda gateway: by_face(gateway, "felix", TOPIC.replace(".", "/"), 0),
    ("overhop", "worker"): by_working,
    ("relink", "link"): lambda gateway: by_face(gateway, "relink", "to/0", 1),
    ("zeroctl", "binding"): lambda gateway: by_face(gateway, "zeroctl", TOPIC, 0),
    ("zeroctl", "acknowledged binding"): by_binding,
    ("zeroctl", "durable binding"): lambda gateway: by_face(gateway, "zeroctl", TOPIC, 1),
}
# By BlipMQ's two qualities of service.
PAYLOADS = {"QoS 0": b"unconfirmed", "QoS 1": b"confirmed"}
REPEATS = {
    (delivering.protocol, delivering.mode): {
        PAYLOADS[publishing.mode]: way(publishing, delivering).delivered.repeats
        for publishing in PUBLISHING
        if publishing.protocol == "blipmq"
    }
    for delivering in DELIVERING
}


@pytest.fixture(scope="module")
def deliveries(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Counter[bytes]]:
    """What came, by way, once all that is to come again has done so twice."""
    home: Path = tmp_path_factory.mktemp("ways")
    config = home / "headrace.toml"
    config.write_text(CONFIG)
    heard: dict[tuple[str, str], Counter[bytes]] = {one: Counter() for one in SUBSCRIBE}

    async def hear(gateway: GatewayProcess, one: tuple[str, str], ready: asyncio.Semaphore) -> None:
        async with SUBSCRIBE[one](gateway) as messages:
            ready.release()
            async for message in messages:
                heard[one][message] += 1

    def enough() -> bool:
        return all(
            heard[one][payload] >= (3 if repeats else 1)
            for one, expected in REPEATS.items()
            for payload, repeats in expected.items()
        )

    async def talk(gateway: GatewayProcess) -> None:
        ready = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(hear(gateway, one, ready)) for one in SUBSCRIBE]
        async with asyncio.timeout(TIMEOUT):
            for _ in tasks:
                await ready.acquire()
            async with BlipmqClient(gateway.places["blipmq"], key="dev-key") as client:
                for qos, payload in enumerate(PAYLOADS.values()):
                    await client.publish_many(TOPIC, [payload], qos)
            while not enough():
                assert not any(task.done() for task in tasks)
                await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    with GatewayProcess(
        home / "data",
        "log.segment_bytes=16MiB",
        "log.retention_bytes=128MiB",
        "listen.zeroctl.bind=127.0.0.1:0",
        "bus.redelivery_delay=100ms",
        "bus.max_redelivery_delay=100ms",
        "bus.max_deliveries=1000",
        "drop.enabled=false",
        config=config,
    ) as gateway:
        asyncio.run(talk(gateway))
    return heard


def test_every_way_to_subscribe_is_tried() -> None:
    assert SUBSCRIBE.keys() == REPEATS.keys()


@pytest.mark.parametrize("one", REPEATS, ids=" ".join)
def test_what_is_not_acknowledged_comes_again_where_it_is_promised_and_nowhere_else(
    deliveries: dict[tuple[str, str], Counter[bytes]], one: tuple[str, str]
) -> None:
    for payload, repeats in REPEATS[one].items():
        assert (deliveries[one][payload] > 1) is repeats, payload
