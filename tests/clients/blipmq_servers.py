"""Servers for BlipMQ clients to meet: real sessions, and one whose answers a test scripts frame by frame."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.config import Key
from headrace.sessions.blipmq import Blipmq
from headrace.sessions.rights import Keyring
from headrace.wire import blipmq as wire
from tests.clients.servers import Broker, ScriptedPeer, ScriptedServer

KEY = "dev-key"
EVERYTHING = Key(name="dev", key=KEY, publish=["#"], subscribe=["#"])


class BlipmqBroker(Broker):
    protocol = "blipmq"

    def __init__(self, directory: Path, *, keys: Sequence[Key] = (EVERYTHING,), **options: Any) -> None:
        super().__init__(directory, **options)
        self.keys = Keyring(keys)

    def _begin(self) -> int:
        self.sessions = Blipmq(self.bus, self.keys)
        return (1 << 24) + 4

    def payloads(self) -> list[bytes]:
        """All messages in the log."""
        return [record.payload for record in self.log.reader()]


class BlipmqPeer(ScriptedPeer):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(wire.Decoder(), reader, writer)

    async def frame(self) -> wire.Frame:
        """The client's next frame."""
        frame: wire.Frame = await self.next()
        return frame

    async def until(self, kind: type[wire.Frame]) -> list[wire.Frame]:
        """The client's next frames, up to one of this kind."""
        frames = [await self.frame()]
        while not isinstance(frames[-1], kind):
            frames.append(await self.frame())
        return frames

    async def greet(self) -> None:
        """Answers HELLO and AUTH."""
        for _ in range(2):
            self.send(wire.encode_ack(0, (await self.frame()).correlation))

    def send(self, *frames: bytes) -> None:
        self.write(b"".join(frames))

    def pong(self, ping: wire.Frame) -> None:
        self.send(wire.encode_pong(ping.correlation))


class BlipmqScripted(ScriptedServer[BlipmqPeer]):
    def __init__(self, *scripts: Callable[[BlipmqPeer], Awaitable[None]]) -> None:
        super().__init__(BlipmqPeer, *scripts)
