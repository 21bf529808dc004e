"""A server for Overhop clients to meet: real sessions over real sockets that can be cut and restarted, in the
test's own loop; and one whose answers a test scripts."""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.bus import Bus
from headrace.connection import Service, Switchboard
from headrace.log import Log
from headrace.sessions.overhop import Overhop
from headrace.sessions.queues import Queues
from headrace.sessions.rights import Keyring
from headrace.wire import overhop as wire
from tests.streams import Recorder


class OverhopBroker:
    """A log, a bus, queues and Overhop sessions behind a listening socket."""

    def __init__(
        self,
        directory: Path,
        *,
        queues: tuple[str, ...] = ("mail",),
        unix: Path | None = None,
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        self._directory = directory
        self._queues = queues
        self._unix = unix
        self._tls = tls
        self._options = options
        self._port = 0

    @property
    def address(self) -> str:
        return f"unix:{self._unix}" if self._unix is not None else f"127.0.0.1:{self._port}"

    async def __aenter__(self) -> "OverhopBroker":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Opens the log and listens; after a stop(), at the same address."""
        self._loop = asyncio.get_running_loop()
        self.log = Log(self._directory / "log", sync="none", segment_bytes=1 << 22, pool_segments=1)
        self.bus = Bus(self.log, redelivery_delay=0.05)
        self.bus.schedule = lambda: self._loop.call_soon(self.bus.dispatch)
        self._loop.add_reader(self.log.event_fd, self._on_log_event)
        self.queues = Queues(self.bus, **self._options)
        for name in self._queues:
            if self.queues.get(name) is None:
                self.queues.add(name)
        self.sessions = Overhop(self.queues, Keyring())
        self.service = Service(
            "overhop",
            self.sessions.session,
            max_frame=(1 << 23) + 4,
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
        self.bus.schedule = None
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

    def stats(self, queue: str = "mail") -> dict[str, int]:
        """How many jobs are in each state, without those that have none."""
        found = self.queues.get(queue)
        assert found is not None
        return {state: count for state, count in found.counts(time.time_ns() // 1000).items() if count}

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


class ScriptedPeer:
    """One connection to a scripted server, as the script sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = wire.Decoder()
        self._messages: list[wire.Message] = []

    async def message(self) -> wire.Message:
        """The client's next message."""
        while not self._messages:
            data = await self._reader.read(65536)
            if not data:
                raise EOFError
            self._messages = self._decoder.feed(data)
        return self._messages.pop(0)

    async def greet(self) -> None:
        """Answers HELLO and REGISTER."""
        self.send(103, (await self.message()).rid, {})
        self.send(101, (await self.message()).rid, {"wid": "w"})

    def send(self, type: int, rid: str, payload: object) -> None:
        self.write(wire.encode(type, rid, payload))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def hang_up(self) -> None:
        self._writer.transport.abort()


class ScriptedServer:
    """A server that plays one script per connection, in turn; later connections are refused by hanging up."""

    def __init__(self, *scripts: Callable[[ScriptedPeer], Awaitable[None]]) -> None:
        self._scripts = list(scripts)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "ScriptedServer":
        self._server = await asyncio.start_server(self._play, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def _play(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._scripts:
                await self._scripts.pop(0)(ScriptedPeer(reader, writer))
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
