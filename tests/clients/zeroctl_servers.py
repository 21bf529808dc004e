"""A server for zeroctl clients to meet, whose answers a test scripts frame by frame."""

import asyncio
from collections.abc import Awaitable, Callable

from headrace.wire import zeroctl as wire
from tests.clients.servers import ScriptedPeer, ScriptedServer

UUID = "77ab2b23-4f1b-4247-be45-dcc2d93ffb94"


class ZeroctlPeer(ScriptedPeer):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(wire.Decoder(), reader, writer)

    async def frame(self) -> wire.Frame:
        """The client's next frame."""
        frame: wire.Frame = await self.next()
        return frame

    async def greet(self) -> None:
        """Answers OPEN."""
        welcome = wire.encode_welcome(
            "gw", UUID, 0, wire.MIN_MAX_HEADER, wire.MIN_MAX_BODY, (await self.frame()).id
        )
        self.write(welcome)

    def confirm(self, frame: wire.Frame) -> None:
        self.write(wire.encode_confirm(1, frame.id))

    def refuse(self, frame: wire.Frame, code: int, text: str) -> None:
        self.write(wire.encode_refuse(code, text, frame.id))


class ZeroctlScripted(ScriptedServer[ZeroctlPeer]):
    def __init__(self, *scripts: Callable[[ZeroctlPeer], Awaitable[None]]) -> None:
        super().__init__(ZeroctlPeer, *scripts)
