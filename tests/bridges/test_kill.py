"""Every way to publish with every way to subscribe that promises delivery, all at once, while the gateway is killed in
the middle of it and started again on the same data and ports: what was confirmed arrives, and nothing of what was not
committed."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.clients.blipmq import BlipmqClient
from headrace.clients.errors import ClientError
from headrace.clients.face import Server, Wish
from headrace.clients.overhop import OverhopClient
from headrace.clients.protocols import CLIENTS
from headrace.clients.relink import RelinkConnector, Uncommitted
from headrace.clients.relink_face import take_apart
from headrace.clients.zeroctl import ZeroctlClient
from headrace.guarantees import DELIVERING, PUBLISHING, Delivering, Publishing, Way, way
from headrace.log import Log, Record
from tests.bridges.conftest import (
    ENDS,
    PROTOCOLS,
    RELINK_TX,
    TIMEOUT,
    config_text,
    publish_address,
    subscribe_address,
    topic_of,
)
from tests.gateway.gateways import PATIENCE, GatewayProcess

KILLS = 2
SEGMENT = 1 << 20
MAX_UNCOMMITTED = 1 << 14
DEAD = "dead."
SETS = (
    f"log.segment_bytes={SEGMENT}",
    "log.retention_bytes=256MiB",
    "drop.enabled=false",
    "bus.max_deliveries=100",
    f"listen.relink.max_uncommitted_bytes={MAX_UNCOMMITTED}",
)


@dataclass(frozen=True)
class Course:
    """A way, from one end of a bridge to another."""

    publishing: Publishing
    delivering: Delivering
    publisher: str
    subscriber: str

    @property
    def way(self) -> Way:
        return way(self.publishing, self.delivering)

    def __str__(self) -> str:
        return f"{self.publisher}-{self.subscriber}"


def publisher_of(publishing: Publishing) -> str:
    return RELINK_TX if publishing.mode == "transaction" else publishing.protocol


def subscribers_of(delivering: Delivering) -> tuple[str, ...]:
    """A Relink link is promised the same with transactions and without."""
    return ("relink", RELINK_TX) if delivering.protocol == "relink" else (delivering.protocol,)


COURSES = [
    Course(publishing, delivering, publisher_of(publishing), subscriber)
    for publishing in PUBLISHING
    for delivering in DELIVERING
    if way(publishing, delivering).survives
    for subscriber in subscribers_of(delivering)
]


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


def is_rejected(message: bytes) -> bool:
    """By a subscriber that can say so: there is one in every second batch."""
    return int(message) % 10 == 7


@asynccontextmanager
async def relink_tx_subscriber(at: str, address: str) -> AsyncIterator[AsyncIterator[bytes]]:
    endpoint, _, options = take_apart(address)
    link = RelinkConnector(at, endpoint=endpoint, **options, **SOON)

    async def judged() -> AsyncIterator[bytes]:
        while True:
            message = await link.receive()
            yield message.payload
            if is_rejected(message.payload):
                link.rejected(message)
            else:
                link.consumed(message)

    async with link:
        yield judged()


@asynccontextmanager
async def zeroctl_subscriber(at: str, key: str) -> AsyncIterator[AsyncIterator[bytes]]:
    client = ZeroctlClient(at, key="dev-key", node="listener", **SOON)
    async with client, client.bind(key, durable=True, name="kept") as messages:
        yield (message.body async for message in messages)


SUBSCRIBERS: dict[str, Callable[[str, str], AbstractAsyncContextManager[AsyncIterator[bytes]]]] = {
    "blipmq": blipmq_subscriber,
    "overhop": overhop_subscriber,
    "relink": relink_subscriber,
    RELINK_TX: relink_tx_subscriber,
    "zeroctl": zeroctl_subscriber,
}


class RolledBack(Exception):
    """Why a publisher leaves a transaction."""


class Bridge:
    """A publisher and a subscriber, which know nothing of the kills."""

    def __init__(self, course: Course, places: dict[str, str]) -> None:
        self.course = course
        self.publisher = course.publisher
        self.subscriber = course.subscriber
        self.confirmed: list[bytes] = []
        self.undone: list[bytes] = []  # rolled back by the publisher, or not committed by the gateway
        self.heard: Counter[bytes] = Counter()
        self.logged: list[Record] = []
        self.dead: set[int] = set()  # offsets of those that are among the dead letters
        self.subscribed = asyncio.Event()
        self._places = places
        self._numbers = count()

    async def publish(self, over: asyncio.Event) -> None:
        """Confirmed batches, one after the other; what was not confirmed is not sent again here, but by its client."""
        if self.publisher == RELINK_TX:
            return await self._transact(over)
        # QUIC does not notice by itself that the other side was killed.
        timeout = 1.0 if self.publisher == "felix" else TIMEOUT
        server = Server(self._places[self.publisher], "dev-key", None, timeout)
        wish = Wish(publish_address(self.publisher, self.subscriber), qos=1)
        while not over.is_set():
            try:
                async with CLIENTS[self.publisher].publisher(server, wish) as sender:
                    batch = self._batch()
                    await sender.publish(batch)
            except ClientError:
                await asyncio.sleep(0.02)
            else:
                self.confirmed += batch

    async def _transact(self, over: asyncio.Event) -> None:
        """Transactions, one after the other, on one link. Every second one, and never the last, is rolled back or too
        large."""
        endpoint, channel_id, options = take_apart(publish_address(self.publisher, self.subscriber))
        async with RelinkConnector(
            self._places[self.publisher], endpoint=endpoint, **options, **SOON
        ) as link:
            channel = link.channel(int(channel_id))
            for turn in count():
                batch = self._batch()
                if turn % 4 == 2:
                    batch[2] = batch[2].ljust(MAX_UNCOMMITTED)
                try:
                    async with channel.transaction():
                        for message in batch:
                            await channel.send(message)
                            await asyncio.sleep(0.001)  # most kills come in the middle
                        if turn % 4 == 0:
                            raise RolledBack
                except (RolledBack, Uncommitted):
                    assert turn % 2 == 0
                    self.undone += batch
                else:
                    assert turn % 2 == 1
                    self.confirmed += batch
                if over.is_set() and turn % 2 == 1:
                    return

    def _batch(self) -> list[bytes]:
        return [b"%d" % next(self._numbers) for _ in range(5)]

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
def survivors(tmp_path_factory: pytest.TempPathFactory, soak: int) -> dict[Course, Bridge]:
    """All bridges, after the gateway was killed under them and is there again."""
    home = tmp_path_factory.mktemp("kill")
    config = home / "headrace.toml"
    config.write_text(config_text())
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rolls = random.Random(seed)
    bridges = asyncio.run(live_through(home / "data", config, rolls, KILLS * soak))
    look_up(home / "data", bridges)
    return {bridge.course: bridge for bridge in bridges}


async def live_through(data: Path, config: Path, rolls: random.Random, kills: int) -> list[Bridge]:
    async def started(*sets: str) -> GatewayProcess:
        gateway = GatewayProcess(data, *SETS, *sets, config=config)
        await asyncio.to_thread(gateway.__enter__)
        return gateway

    gateway = await started("listen.zeroctl.bind=127.0.0.1:0")
    same_ports = [f"listen.{one}.bind={gateway.places[one]}" for one in PROTOCOLS]
    places = {**gateway.places, RELINK_TX: gateway.places["relink"]}
    bridges = [Bridge(course, places) for course in COURSES]
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
    return bridges


def look_up(data: Path, bridges: list[Bridge]) -> None:
    """What the log has of each bridge's messages."""
    by_topic = {topic_of(bridge.publisher, bridge.subscriber): bridge for bridge in bridges}
    log = Log(data / "log", segment_bytes=SEGMENT)
    for record in log.reader():
        if record.control:
            continue
        topic = record.topic_name.decode()
        if topic in by_topic:
            by_topic[topic].logged.append(record)
        elif topic.startswith(DEAD) and topic.removeprefix(DEAD) in by_topic:
            offset = msgspec.json.decode(record.headers)["dead-offset"]
            by_topic[topic.removeprefix(DEAD)].dead.add(int(offset))
    log.close()


def test_all_publishers_reach_all_subscribers_but_felix_through_kills() -> None:
    assert sorted((one.publisher, one.subscriber) for one in COURSES) == sorted(
        (publisher, subscriber) for publisher in ENDS for subscriber in ENDS if subscriber != "felix"
    )


@pytest.mark.parametrize("course", COURSES, ids=str)
def test_what_was_confirmed_arrives_although_the_gateway_is_killed(
    survivors: dict[Course, Bridge], course: Course
) -> None:
    bridge = survivors[course]
    assert not bridge.missing
    if not course.way.whole.repeats:
        assert set(bridge.heard.values()) == {1}
    if course.subscriber != "overhop":  # whose further attempts have no place among the others
        first_deliveries = [int(message) for message in bridge.heard]
        assert first_deliveries == sorted(first_deliveries)


@pytest.mark.parametrize("course", COURSES, ids=str)
def test_log_has_all_or_nothing_of_each_batch_whose_outcome_was_told(
    survivors: dict[Course, Bridge], course: Course
) -> None:
    bridge = survivors[course]
    logged = Counter(record.payload for record in bridge.logged)
    assert logged.keys() >= set(bridge.confirmed)
    assert not logged.keys() & set(bridge.undone)
    assert not bridge.heard.keys() & set(bridge.undone)
    assert bool(bridge.undone) is (course.publisher == RELINK_TX)
    if not course.publishing.promise.repeats:
        assert set(logged.values()) == {1}


@pytest.mark.parametrize("course", [course for course in COURSES if course.subscriber == RELINK_TX], ids=str)
def test_what_the_subscriber_rejects_is_dead_and_what_has_no_such_neighbour_is_not(
    survivors: dict[Course, Bridge], course: Course
) -> None:
    bridge = survivors[course]
    rejected = {record.offset for record in bridge.logged if is_rejected(record.payload)}
    # What the log has behind the last confirmed one, from a publisher that sent it again, may not have come yet.
    last = next(record.offset for record in bridge.logged if record.payload == bridge.confirmed[-1])
    came = {offset for offset in rejected if offset <= last}
    assert came
    assert came <= bridge.dead
    # A transaction is dead as a whole, and is a run of messages.
    for dead, run in groupby(bridge.logged, lambda record: record.offset in bridge.dead):
        assert not dead or any(record.offset in rejected for record in run)
