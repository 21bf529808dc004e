"""Servers for Overhop clients to meet: real sessions and queues, and one whose answers a test scripts."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from headrace.sessions.overhop import Overhop
from headrace.sessions.queues import Queues
from headrace.sessions.rights import Keyring
from headrace.wire import overhop as wire
from tests.clients.servers import Broker, ScriptedPeer, ScriptedServer


class OverhopBroker(Broker):
    protocol = "overhop"

    def __init__(self, directory: Path, *, queues: tuple[str, ...] = ("mail",), **options: Any) -> None:
        listening = {name: options.pop(name) for name in ("unix", "tls") if name in options}
        super().__init__(directory, redelivery_delay=0.05, **listening)
        self._names = queues
        self._options = options

    def _begin(self) -> int:
        self.queues = Queues(self.bus, **self._options)
        for name in self._names:
            if self.queues.get(name) is None:
                self.queues.add(name)
        self.sessions = Overhop(self.queues, Keyring())
        return (1 << 23) + 4

    def stats(self, queue: str = "mail") -> dict[str, int]:
        """How many jobs are in each state, without those that have none."""
        found = self.queues.get(queue)
        assert found is not None
        return {state: count for state, count in found.counts(time.time_ns() // 1000).items() if count}


class OverhopPeer(ScriptedPeer):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(wire.Decoder(), reader, writer)

    async def message(self) -> wire.Message:
        """The client's next message."""
        message: wire.Message = await self.next()
        return message

    async def greet(self) -> None:
        """Answers HELLO and REGISTER."""
        self.send(103, (await self.message()).rid, {})
        self.send(101, (await self.message()).rid, {"wid": "w"})

    def send(self, type: int, rid: str, payload: object) -> None:
        self.write(wire.encode(type, rid, payload))


class OverhopScripted(ScriptedServer[OverhopPeer]):
    def __init__(self, *scripts: Callable[[OverhopPeer], Awaitable[None]]) -> None:
        super().__init__(OverhopPeer, *scripts)
