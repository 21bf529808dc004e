"""What publishing costs with few and with many subscriptions, and what 100,000 topics and 10,000 filters cost."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from headrace.bus import Bus
from headrace.log import Log

BATCH = 1000
POOL = 4


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    with Log(tmp_path / "log", sync="none", pool_segments=POOL, retention_bytes=1 << 30) as log:
        opened = Bus(log)
        wait_for_pool(opened)
        yield opened
        opened.close()


def wait_for_pool(bus: Bus) -> None:
    while bus.log.stats()["pool_segments"] < POOL:
        bus.log.on_event()
        time.sleep(0.005)


@pytest.mark.parametrize("subscriptions", [1, 1000])
def test_publish(benchmark: BenchmarkFixture, bus: Bus, subscriptions: int) -> None:
    """The publisher's cost of 1,000 messages of 100 bytes; whoever subscribed is woken and served afterwards."""
    members = [bus.subscribe("bench.topic", exact=True).join(None, -1, 1) for _ in range(subscriptions)]
    payloads = os.urandom(100 * BATCH)
    rounds = 0

    def publish() -> None:
        assert bus.publish_many("bench.topic", payloads, 100) == BATCH

    def serve() -> None:
        nonlocal rounds
        rounds += 1
        bus.dispatch()
        if rounds % 200 == 0:
            wait_for_pool(bus)

    benchmark.extra_info["messages"] = BATCH
    benchmark.pedantic(publish, setup=serve, rounds=1000, warmup_rounds=20)
    for member in members:
        assert member.receive() is not None


def test_receive(benchmark: BenchmarkFixture, bus: Bus) -> None:
    """One delivery as a Python object; sessions take them without one."""
    member = bus.subscribe("bench.topic", exact=True, start=0).join(None, -1, 1)
    bus.publish_many("bench.topic", os.urandom(100 * 200_000), 100)
    benchmark.pedantic(member.receive, rounds=100_000)


def test_publish_among_many_topics_and_filters(benchmark: BenchmarkFixture, bus: Bus) -> None:
    """One message to each of 1,000 out of 100,000 topics, with 10,000 filters."""
    for i in range(10_000):
        bus.subscribe(f"site.{i % 1000}.*.{i}")
    for i in range(100_000):
        bus.publish(f"site.{i % 1000}.sensor.{i}", b"")
    topics = [f"site.{i % 1000}.sensor.{i}" for i in range(0, 100_000, 100)]

    def publish() -> None:
        for topic in topics:
            bus.publish(topic, b"x")

    benchmark.extra_info["messages"] = len(topics)
    benchmark.pedantic(publish, setup=lambda: bus.dispatch(), rounds=50)
