"""How fast the log takes messages, by size and sync policy, and how fast it is opened again."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from headrace.log import Log, crc32c, verify

BATCH = 1000
SEGMENT = 64 << 20
POOL = 4


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "log"
    shutil.rmtree(tmp_path / "log", ignore_errors=True)


def wait_for_pool(log: Log) -> None:
    """Until the pool is warm again; it is not what is measured."""
    while log.stats()["pool_segments"] < POOL:
        log.on_event()
        time.sleep(0.005)


@pytest.mark.parametrize("sync", ["always", "every:1000", "interval:20", "none"])
@pytest.mark.parametrize("size", [16, 100, 256, 1024])
def test_append(benchmark: BenchmarkFixture, directory: Path, size: int, sync: str) -> None:
    """A batch of 1,000 messages in one call, into prepared segments."""
    payloads = os.urandom(size * BATCH)
    with Log(
        directory, sync=sync, segment_bytes=SEGMENT, pool_segments=POOL, retention_bytes=16 * SEGMENT
    ) as log:
        topic = log.topic("bench.topic")
        taken = 0

        def append() -> None:
            nonlocal taken
            assert log.append_many(topic, payloads, size) == BATCH
            taken += BATCH * (size + 56)

        def prepare() -> None:
            nonlocal taken
            if taken > SEGMENT:
                taken = 0
                wait_for_pool(log)

        wait_for_pool(log)
        benchmark.extra_info["messages"] = BATCH
        benchmark.pedantic(append, setup=prepare, rounds=2000, warmup_rounds=50)


def test_open_again(benchmark: BenchmarkFixture, directory: Path) -> None:
    """Opening a log of 256 MiB: every byte is read and every checksum computed."""
    payloads = os.urandom(256 * BATCH)
    with Log(
        directory, sync="none", segment_bytes=SEGMENT, pool_segments=POOL, retention_bytes=16 * SEGMENT
    ) as log:
        topic = log.topic("bench.topic")
        while log.stats()["bytes"] < 256 << 20:
            if log.append_many(topic, payloads, 256) < BATCH:
                wait_for_pool(log)

    def reopen() -> None:
        Log(
            directory, sync="none", segment_bytes=SEGMENT, pool_segments=1, retention_bytes=16 * SEGMENT
        ).close(sync=False)

    benchmark.extra_info["bytes"] = 256 << 20
    benchmark.pedantic(reopen, rounds=5)
    assert not verify(directory).problems


@pytest.mark.parametrize("portable", [False, True], ids=["hardware", "portable"])
@pytest.mark.parametrize("size", [64, 152, 304, 4096])
def test_crc32c(benchmark: BenchmarkFixture, size: int, portable: bool) -> None:
    benchmark(crc32c, os.urandom(size), 0, portable)
