"""Real Relink sessions over real sockets in the test's own loop, and a proxy before them that cuts, stalls and splits
connections where a test says. They are here to misbehave on demand; the gateway's own process is not."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.bus import Bus, Received
from headrace.connection import Service, Switchboard
from headrace.log import Log
from headrace.sessions.relink import Endpoint, Relink
from headrace.sessions.rights import Keyring
from headrace.wire import relink as wire
from tests.streams import Recorder


class RelinkBroker:
    """A log, a bus and Relink sessions behind a listening socket."""

    def __init__(
        self,
        directory: Path,
        *,
        endpoints: Sequence[Endpoint] | None = None,
        sync: str = "none",
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        self._directory = directory
        self._endpoints = endpoints or (
            Endpoint("demo"),
            Endpoint("demo-tx", connector_transactions=True, listener_transactions=True),
        )
        self._sync = sync
        self._tls = tls
        self._options = options
        self._port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def __aenter__(self) -> "RelinkBroker":
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
        self.bus = Bus(self.log)
        self.bus.schedule = lambda: self._loop.call_soon(self.bus.dispatch)
        self._loop.add_reader(self.log.event_fd, self._on_log_event)
        self.sessions = Relink(self.bus, Keyring(), self._endpoints, **self._options)
        self.service = Service(
            "relink",
            self.sessions.session,
            max_frame=self.sessions.max_packet,
            high_water=1 << 18,
            max_connections=1000,
            stall_timeout=60.0,
        )
        self.seen = Recorder()
        self.board = Switchboard(self._loop, self.seen, read_bytes=1 << 18, tick_seconds=0.01)
        self._server = await self._loop.create_server(
            lambda: self.board.answer(self.service),
            "127.0.0.1",
            self._port,
            ssl=self._tls,
            reuse_address=True,
        )
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        await self.cut()
        self.board.close()
        self._loop.remove_reader(self.log.event_fd)
        self.bus.close()
        self.log.close()
        assert self.seen.failures == []

    async def cut(self) -> None:
        """Drops all connections."""
        self.board.abort()
        await self.board.wait_empty()

    def count(self, what: str) -> int:
        return int(self.sessions.counters()[what])

    def published(self, filter: str = "#") -> list[Received]:
        """Every message that the log has of these topics."""
        member = self.bus.subscribe(filter, start=0).join(None, -1, 1)
        found = []
        while (one := member.receive(1)) is not None:
            found.append(one)
        member.leave()
        return found

    def _on_log_event(self) -> None:
        happened = self.log.on_event()
        self.bus.on_safe()
        self.board.safe_moved()
        if happened & 2:
            self.board.space_made()


@dataclass
class Trouble:
    """What happens to one connection."""

    side: str = "connector"  # whose bytes are counted
    item: int | None = None  # cut at this item of it: the handshake's are the first two
    middle: bool = False  # in its middle, not behind it
    pieces: int = 1 << 16  # bytes that go at once
    stall: float = 0.0  # seconds between them


class Proxy:
    """Between a connector and a listener; `trouble` says what happens to the n-th connection."""

    def __init__(
        self, target: str, trouble: Callable[[int], Trouble], sizes: tuple[int, int] = (4, 4)
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._trouble = trouble
        self._sizes = sizes
        self.connections = 0
        self.cuts = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        trouble = self._trouble(self.connections)
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            self._tasks.discard(task)
            return
        pumps = [
            asyncio.ensure_future(self._pump("connector", reader, far_writer, trouble)),
            asyncio.ensure_future(self._pump("listener", far_reader, writer, trouble)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            writer.transport.abort()
            far_writer.transport.abort()
            await asyncio.wait(pumps)
            self._tasks.discard(task)

    async def _pump(
        self, side: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trouble: Trouble
    ) -> None:
        decoder = wire.Decoder(side, connector_size=self._sizes[0], listener_size=self._sizes[1])
        position = seen = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                end = None
                if side == trouble.side and trouble.item is not None:
                    for item in decoder.feed(data):
                        if seen == trouble.item:
                            end = (item.start + item.end) // 2 if trouble.middle else item.end
                        seen += 1
                        if end is not None:
                            break
                if end is not None:
                    data = data[: max(0, end - position)]
                for at in range(0, len(data), trouble.pieces):
                    writer.write(data[at : at + trouble.pieces])
                    await writer.drain()
                    if trouble.pieces < 1 << 16:
                        await asyncio.sleep(trouble.stall)
                position += len(data)
                if end is not None:
                    self.cuts += 1
                    # What was sent before the cut arrives, as far as a cut allows that.
                    await asyncio.sleep(0.001)
                    return
