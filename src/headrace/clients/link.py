"""What the connections of all clients over a stream of bytes share: one write per loop turn, a peer that does not
read, and the end. It knows no protocol, and nothing of reconnecting: who owns a link carries over what it leaves
unfinished."""

import asyncio
from typing import ClassVar, Final, Protocol, cast

from headrace.clients.errors import ClientError, ConnectionLost, ProtocolError, reason_of

# What is put together before it is written even within one turn: as much as one read of the gateway takes.
WRITE_BYTES: Final = 256 * 1024
# What the transport may hold before whoever sends waits: enough that the socket does not run dry between two
# turns.
WRITE_BUFFER_BYTES: Final = 1024 * 1024


class StreamOwner(Protocol):
    """Who a link belongs to: a client."""

    def on_writable(self) -> None: ...
    def on_lost(self, link: "StreamLink", error: ClientError) -> None: ...


class StreamLink(asyncio.Protocol):
    """A connection, from its handshake to its end."""

    protocol: ClassVar[str]  # its name, for texts

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: StreamOwner, where: str) -> None:
        self.where = where  # the server, for texts
        self.paused = False  # the transport holds enough
        self.down = False  # it takes and gives nothing any more
        self.closed: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._owner = owner
        self._outbox: list[bytes] = []
        self._held = 0  # bytes in it
        self._turn_scheduled = False
        self._transport: asyncio.Transport

    # --- sending --------------------------------------------------------------------------------------------

    def put(self, frames: bytes) -> bool:
        """Takes whole frames, to be written at the end of this turn. True where so much came together that it was
        written at once: then it is time to let the loop run."""
        self._outbox.append(frames)
        self._held += len(frames)
        self._end_turn_later()
        if self._held >= WRITE_BYTES:
            self._write()
            return True
        return False

    def write_now(self) -> None:
        """Does now what the end of the turn would do."""
        self._write()

    def _end_turn_later(self) -> None:
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._turn_scheduled = False
        self.write_now()

    def _write(self) -> None:
        if self._outbox and not self.down:
            self._transport.write(self._outbox[0] if len(self._outbox) == 1 else b"".join(self._outbox))
        self._outbox.clear()
        self._held = 0

    # --- its end --------------------------------------------------------------------------------------------

    def fail(self, error: ClientError) -> None:
        """Ends the connection for a reason of this side."""
        if not self.down:
            self._transport.abort()
            self._lose(error)

    def close(self, error: ClientError) -> None:
        """Ends the connection when what was put has been written; the owner is not told."""
        if not self.down:
            self.write_now()
            self._transport.close()
            self._end(error)

    def abort(self) -> None:
        """Ends the connection at once; the owner is not told."""
        self._transport.abort()
        if not self.down:
            self._end(ConnectionLost(f"the connection to {self.where} was given up"))

    def _lose(self, error: ClientError) -> None:
        self._end(error)
        self._owner.on_lost(self, error)

    def _end(self, error: ClientError) -> None:
        """The connection is down; whoever waits for an answer that only it can bring is given the error."""
        self.down = True

    def _violated(self, what: str) -> None:
        self.fail(
            ProtocolError(f"what answers at {self.where} does not speak {self.protocol} as it should: {what}")
        )

    # --- what the loop calls --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's derive from nothing
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._owner.on_writable()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set_result(None)
        if not self.down:
            how = "closed by the server" if error is None else f"lost: {reason_of(error)}"
            self._lose(ConnectionLost(f"the connection to {self.where} was {how}"))
