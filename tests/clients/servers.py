"""Servers for clients to meet: real BlipMQ sessions over real sockets that can be cut and restarted, and one
whose answers a test scripts frame by frame. They are here to misbehave on demand; the gateway's own process
is not."""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType

from headrace.bus import Bus
from headrace.config import Key
from headrace.connection import Service, Switchboard
from headrace.log import Log
from headrace.sessions.blipmq import Blipmq
from headrace.sessions.rights import Keyring
from headrace.wire import blipmq as wire
from tests.streams import Recorder

KEY = "dev-key"
EVERYTHING = Key(name="dev", key=KEY, publish=["#"], subscribe=["#"])


class Broker:
    """A log, a bus and BlipMQ sessions behind a listening socket, in the test's own loop."""

    def __init__(
        self,
        directory: Path,
        *,
        keys: Sequence[Key] = (EVERYTHING,),
        sync: str = "none",
        unix: Path | None = None,
        tls: ssl.SSLContext | None = None,
        redelivery_delay: float = 2.0,
    ) -> None:
        self.keys = Keyring(keys)
        self._directory = directory
        self._sync = sync
        self._unix = unix
        self._tls = tls
        self._redelivery_delay = redelivery_delay
        self._port = 0

    @property
    def address(self) -> str:
        return f"unix:{self._unix}" if self._unix is not None else f"127.0.0.1:{self._port}"

    async def __aenter__(self) -> "Broker":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Opens the log and listens; after a stop(), at the same address."""
        self._loop = asyncio.get_running_loop()
        self.log = Log(self._directory / "log", sync=self._sync, segment_bytes=1 << 22, pool_segments=1)
        self.bus = Bus(self.log, redelivery_delay=self._redelivery_delay)
        self._loop.add_reader(self.log.event_fd, self._on_log_event)
        self.sessions = Blipmq(self.bus, self.keys)
        self.service = Service(
            "blipmq",
            self.sessions.session,
            max_frame=(1 << 24) + 4,
            high_water=1 << 18,
            max_connections=1000,
            stall_timeout=60.0,
        )
        self.board = Switchboard(self._loop, Recorder(), read_bytes=1 << 18, tick_seconds=0.01)
        await self.listen()
        self._tick()

    async def listen(self) -> None:
        if self._unix is not None:
            self._unix.unlink(missing_ok=True)
            self._server = await self._loop.create_unix_server(self._answer, str(self._unix), ssl=self._tls)
        else:
            self._server = await self._loop.create_server(
                self._answer, "127.0.0.1", self._port, ssl=self._tls, reuse_address=True
            )
            self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._ticking.cancel()
        await self.hide()
        self.board.close()
        self._loop.remove_reader(self.log.event_fd)
        self.bus.close()
        self.log.close()

    async def hide(self) -> None:
        """Stops listening and drops all connections; listen() ends it."""
        self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """Drops all connections."""
        self.board.abort()
        await self.board.wait_empty()

    def count(self, what: str) -> int:
        """What the sessions have counted: "polls", "pings", ..."""
        return int(self.sessions.counters()[what])

    def payloads(self) -> list[bytes]:
        """All messages in the log."""
        with_payloads = self.log.reader()
        return [record.payload for record in with_payloads]

    def _answer(self) -> asyncio.BaseProtocol:
        return self.board.answer(self.service)

    def _on_log_event(self) -> None:
        self.log.on_event()
        self.bus.on_safe()
        self.board.safe_moved()
        self.board.space_made()

    def _tick(self) -> None:
        self.bus.tick(time.time_ns() // 1000)
        self._ticking = self._loop.call_later(0.01, self._tick)


class Peer:
    """One connection to a scripted server, as the script sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = wire.Decoder()
        self._frames: list[wire.Frame] = []

    async def frame(self) -> wire.Frame:
        """The client's next frame."""
        while not self._frames:
            data = await self._reader.read(65536)
            if not data:
                raise EOFError
            self._frames = self._decoder.feed(data)
        return self._frames.pop(0)

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
        self._writer.write(b"".join(frames))

    def pong(self, ping: wire.Frame) -> None:
        self.send(wire.encode_pong(ping.correlation))

    def hang_up(self) -> None:
        self._writer.transport.abort()


class Scripted:
    """A server that plays one script per connection, in turn; later connections are refused by hanging up."""

    def __init__(self, *scripts: Callable[[Peer], Awaitable[None]]) -> None:
        self._scripts = list(scripts)
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0

    async def __aenter__(self) -> "Scripted":
        self._server = await asyncio.start_server(self._play, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def _play(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            if self._scripts:
                await self._scripts.pop(0)(Peer(reader, writer))
                await reader.read()  # the client's end is the script's
        except (EOFError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
