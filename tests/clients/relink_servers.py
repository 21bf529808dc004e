"""Real Relink sessions for connectors to meet, and a proxy before them that cuts, stalls and splits connections where a
test says."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.bus import Received
from headrace.sessions.relink import Endpoint, Relink
from headrace.sessions.rights import Keyring
from headrace.wire import relink as wire
from tests.clients.servers import Broker, StreamServer


class RelinkBroker(Broker):
    protocol = "relink"

    def __init__(
        self, directory: Path, *, endpoints: Sequence[Endpoint] | None = None, **options: Any
    ) -> None:
        listening = {name: options.pop(name) for name in ("sync", "tls") if name in options}
        super().__init__(directory, **listening)
        self._endpoints = endpoints or (
            Endpoint("demo"),
            Endpoint("demo-tx", connector_transactions=True, listener_transactions=True),
        )
        self._options = options

    def _begin(self) -> int:
        self.sessions = Relink(self.bus, Keyring(), self._endpoints, **self._options)
        return int(self.sessions.max_packet)

    def published(self, filter: str = "#") -> list[Received]:
        """Every message that the log has of these topics."""
        member = self.bus.subscribe(filter, start=0).join(None, -1, 1)
        found = []
        while (one := member.receive(1)) is not None:
            found.append(one)
        member.leave()
        return found


@dataclass
class Trouble:
    """What happens to one connection."""

    side: str = "connector"  # whose bytes are counted
    item: int | None = None  # cut at this item of it: the handshake's are the first two
    middle: bool = False  # in its middle, not behind it
    pieces: int = 1 << 16  # bytes that go at once
    stall: float = 0.0  # seconds between them


class Proxy(StreamServer):
    """Between a connector and a listener; `trouble` says what happens to the n-th connection."""

    def __init__(
        self, target: str, trouble: Callable[[int], Trouble], sizes: tuple[int, int] = (4, 4)
    ) -> None:
        super().__init__()
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._trouble = trouble
        self._sizes = sizes
        self.cuts = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        trouble = self._trouble(self.connections - 1)
        far_reader, far_writer = await asyncio.open_connection(*self._target)
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
