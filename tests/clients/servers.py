"""What the servers for clients to meet share: real sessions over real sockets in the test's own loop, which can be cut
and restarted, and a server that plays a script for each connection. They are here to misbehave on demand; the gateway's
own process is not."""

import asyncio
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from headrace.bus import Bus
from headrace.connection import Service, Switchboard
from headrace.log import Log
from tests.streams import Recorder

P = TypeVar("P")


class Broker(ABC):
    """A log, a bus and the sessions of one protocol behind a listening socket."""

    protocol: str
    sessions: Any

    def __init__(
        self,
        directory: Path,
        *,
        sync: str = "none",
        unix: Path | None = None,
        tls: ssl.SSLContext | None = None,
        redelivery_delay: float = 2.0,
    ) -> None:
        self._directory = directory
        self._sync = sync
        self._unix = unix
        self._tls = tls
        self._redelivery_delay = redelivery_delay
        self._port = 0

    @abstractmethod
    def _begin(self) -> int:
        """Makes `sessions` for the bus; how long a frame may be."""

    @property
    def address(self) -> str:
        return f"unix:{self._unix}" if self._unix is not None else f"127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
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
        self.bus.schedule = lambda: self._loop.call_soon(self.bus.dispatch)
        self._loop.add_reader(self.log.event_fd, self._on_log_event)
        max_frame = self._begin()
        self.service = Service(
            self.protocol,
            self.sessions.session,
            max_frame=max_frame,
            high_water=1 << 18,
            max_connections=1000,
            stall_timeout=60.0,
        )
        self.seen = Recorder()
        self.board = Switchboard(self._loop, self.seen, read_bytes=1 << 18, tick_seconds=0.01)
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
        self.bus.schedule = None
        self.bus.close()
        self.log.close()
        assert self.seen.failures == []

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


class StreamServer(ABC):
    """A listening socket, and a task for each connection, which ends with it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0

    @abstractmethod
    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What happens to a connection. It is aborted in the end."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            await self.handle(reader, writer)
        except (EOFError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


class ScriptedPeer:
    """One connection to a scripted server, as the script sees it."""

    def __init__(self, decoder: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._came: list[Any] = []

    async def next(self) -> Any:
        """The client's next frame."""
        while not self._came:
            data = await self._reader.read(65536)
            if not data:
                raise EOFError
            self._came = self._decoder.feed(data)
        return self._came.pop(0)

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def hang_up(self) -> None:
        self._writer.transport.abort()


class ScriptedServer(StreamServer, Generic[P]):
    """A server that plays one script per connection, in turn; later connections are refused by hanging up."""

    def __init__(
        self,
        peer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], P],
        *scripts: Callable[[P], Awaitable[None]],
    ) -> None:
        super().__init__()
        self._peer = peer
        self._scripts = list(scripts)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._scripts:
            await self._scripts.pop(0)(self._peer(reader, writer))
            await reader.read()  # the client's end is the script's
