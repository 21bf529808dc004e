"""A bus on a log of small segments, which can be closed and opened again, or left as a killed process leaves it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.bus import Bus, Member, Received
from headrace.errors import LogFull
from headrace.log import Log
from tests.log.patience import eventually

SMALL = {"segment_bytes": 65536, "pool_segments": 2, "retention_bytes": 16 * 65536, "sync": "interval:20"}
START = 4_000_000_000_000_000  # microseconds: tests turn their own clock
SECOND = 1_000_000


class Place:
    """A data directory and the bus that is open on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.options: dict[str, Any] = {}
        self.log: Log
        self.bus: Bus

    def open(self, **options: Any) -> Bus:
        self.options = {**self.options, **options}
        log_options = {
            name: value for name, value in self.options.items() if name in ("sync", "retention_bytes")
        }
        bus_options = {name: value for name, value in self.options.items() if name not in log_options}
        self.log = Log(self.path, **(SMALL | log_options))
        self.bus = Bus(self.log, **bus_options)
        return self.bus

    def close(self) -> None:
        self.bus.close()
        self.log.close()

    def reopen(self) -> Bus:
        self.close()
        return self.open()

    def killed(self) -> Bus:
        """The bus on what a process leaves that dies here: its files as they are now, nothing closed."""
        copy = self.path.with_name(self.path.name + "-killed")
        # While segments are on their way from one number to another, a copy would not be of one moment.
        eventually(self.quiet, "prepared segments")
        shutil.copytree(self.path, copy)
        self.close()
        self.path = copy
        return self.open()

    def quiet(self) -> bool:
        self.log.on_event()
        return bool(self.log.stats()["pool_segments"] == SMALL["pool_segments"])

    def publish(self, topic: str, payload: bytes, **options: Any) -> int:
        """Publishes as a loop would: where the log has no room it lets retention work and tries again."""

        def taken() -> list[int]:
            try:
                return [self.bus.publish(topic, payload, **options)]
            except LogFull:
                self.log.on_event()
                return []

        return eventually(taken, "room in the log")[0]

    def roll(self, segments: int, topic: str = "filler") -> None:
        """Publishes until the log went on by so many segments."""
        target = self.log.segments()[-1].number + segments
        while self.log.segments()[-1].number < target:
            self.publish(topic, b"." * 8000)
        self.log.on_event()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "log")
    made.open()
    yield made
    made.close()


def take_all(member: Member, now: int | None = None) -> list[Received]:
    """Everything that there is for a member."""
    received = []
    while (one := member.receive(now)) is not None:
        received.append(one)
    return received


def payloads(received: list[Received]) -> list[bytes]:
    return [one.payload for one in received]
