"""A protocol for tests in BlipMQ's place, whose sessions do what a test needs to see a gateway do: wait for
something to be safe, never get there, or deliver what is published."""

import time
from collections.abc import Mapping
from typing import Any

from headrace.bus import Bus
from headrace.config import Config
from headrace.gateway.protocols import SPEAKERS
from headrace.session import Session
from headrace.sessions.rights import Keyring
from tests.streams import Frames, frame


class Obliging(Frames):
    """Echoes frames, but for these: "later" is echoed when half a second has passed, "never" never is,
    "break" raises an error, and "subscribe" has everything delivered that is published to "news"."""

    def __init__(self, bus: Bus) -> None:
        super().__init__()
        self.bus = bus
        self.later = 0.0
        self.member: Any = None

    def on_frame(self, body: bytes) -> bool:
        if body == b"later":
            self.later = time.monotonic() + 0.5
            self.gate(1)
        elif body == b"never":
            self.gate(2)
        elif body == b"break":
            raise RuntimeError("a test asked for it")
        elif body == b"subscribe":
            self.member = self.bus.subscribe("news").join(self, -1, 0)
        return super().on_frame(body)

    def on_deliver(self, now: int, room: int) -> None:
        while self.member is not None and (received := self.member.receive(now)) is not None:
            self.put(frame(received.payload))

    def on_safe_end(self) -> int:
        return 1 if time.monotonic() >= self.later else 0

    def on_drain(self, now: int) -> None:
        self.put(frame(b"goodbye"))

    def on_lost(self, now: int) -> None:
        if self.member is not None:
            self.member.leave(now)


class ObligingSpeaker:
    quickack = False
    max_frame = 1 << 20

    def __init__(self, bus: Bus, keys: Keyring, config: Config) -> None:
        self._bus = bus

    def session(self) -> Session:
        return Obliging(self._bus)

    def configure(self, config: Config) -> None: ...

    def counters(self) -> Mapping[str, int]:
        return {}


def install() -> None:
    SPEAKERS["blipmq"] = ObligingSpeaker


MAIN = "import tests.gateway.speakers as s; s.install(); from headrace.cli import main; main()"
