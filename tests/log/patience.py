"""Waiting for what other threads and processes of a test do, without judging how long it takes."""

import time
from collections.abc import Callable
from typing import TypeVar

from headrace.errors import LogFull
from headrace.log import Log

Answer = TypeVar("Answer")

LONG = 60.0  # seconds; only a test that fails waits that long


def eventually(condition: Callable[[], Answer], what: str = "") -> Answer:
    """The first true answer of a condition."""
    give_up = time.monotonic() + LONG
    while True:
        answer = condition()
        if answer:
            return answer
        assert time.monotonic() < give_up, f"waited in vain: {what or condition}"
        time.sleep(0.001)


def append(log: Log, topic: int, payload: bytes) -> int:
    """Appends as a loop would: where the log has no room it lets retention work and tries again."""

    def taken() -> list[int]:
        try:
            return [log.append(topic, payload)]
        except LogFull:
            log.on_event()
            return []

    return eventually(taken, "room in the log")[0]


def append_many(log: Log, topic: int, payloads: bytes, size: int) -> None:
    """The same for many messages of one size."""
    done = 0
    while done < len(payloads):
        count = log.append_many(topic, payloads[done:], size)
        done += count * size
        if not count:
            log.on_event()
            time.sleep(0.001)


def fill_pool(log: Log, segments: int = 1) -> None:
    """Until so many segments are prepared."""

    def full() -> bool:
        log.on_event()
        return log.stats()["pool_segments"] >= segments

    eventually(full, "the pool is full")
