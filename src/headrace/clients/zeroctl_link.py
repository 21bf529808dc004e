"""One zeroctl connection of a client: frames out in one write per loop turn, answers by id in. It knows nothing of
reconnecting or of the API: who owns a link carries over what it leaves unfinished."""

import asyncio
from typing import Final, Protocol, cast

from headrace.clients.errors import KEY_HINT, ClientError, ConnectionLost, ProtocolError, reason_of
from headrace.wire.zeroctl import (
    Confirm,
    Decoder,
    Delivery,
    FrameError,
    Malformed,
    Ping,
    Refuse,
    Welcome,
    encode_open,
    encode_ping,
    encode_pong,
)

# What is put together before it is written even within one turn: as much as one read of the gateway takes.
WRITE_BYTES: Final = 256 * 1024
# What the transport may hold before publishers wait.
WRITE_BUFFER_BYTES: Final = 1024 * 1024
# Keep-alive intervals after which a gateway that says nothing is gone.
SILENT_AFTER: Final = 3

OPEN_ID: Final = 0


class Refused(ClientError):
    """The gateway refused a frame; `code` and `text` are its words."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text

    def __str__(self) -> str:
        return f"{self.text} ({self.code})"


class NotOpened(Refused):
    """401 and 426: the gateway does not know the key, or speaks another version."""

    hint = KEY_HINT


class NotAllowed(Refused):
    """403: the key has no right to do this, or a signature is missing."""


class BadMessage(Refused):
    """400, 413 and 422: the gateway does not take such a frame, key, header or body."""


class Conflict(Refused):
    """409: a binding is there already, or a transient node offers a service."""


class Busy(Refused):
    """503: the gateway cannot take it now, and may be able to later."""


REFUSALS: Final[dict[int, type[Refused]]] = {
    400: BadMessage,
    401: NotOpened,
    403: NotAllowed,
    409: Conflict,
    413: BadMessage,
    422: BadMessage,
    426: NotOpened,
    503: Busy,
}


def refusal(frame: Refuse) -> Refused:
    return REFUSALS.get(frame.code, Refused)(frame.code, frame.text)


class LinkOwner(Protocol):
    """Who a link belongs to: a client."""

    def on_confirm(self, first: int, last: int) -> None: ...
    def on_refusal(self, id: int, error: Refused) -> None: ...
    def on_delivery(self, delivery: Delivery) -> None: ...
    def on_writable(self) -> None: ...
    def on_lost(self, link: "Link", error: ClientError) -> None: ...


class Link(asyncio.Protocol):
    """A connection, from OPEN to its end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: LinkOwner, where: str) -> None:
        self.where = where
        self.paused = False  # the transport holds enough
        self.down = False  # it takes and gives nothing any more
        self.welcome: asyncio.Future[Welcome] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._owner = owner
        self._decoder = Decoder()
        self._outbox: list[bytes] = []
        self._held = 0
        self._scheduled = False
        self._heard = loop.time()
        self._watch: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport

    # --- sending --------------------------------------------------------------------------------------------

    def put(self, frames: bytes) -> bool:
        """Takes whole frames, to be written at the end of this turn. True where so much came together that it was
        written at once: then it is time to let the loop run."""
        self._outbox.append(frames)
        self._held += len(frames)
        if self._held >= WRITE_BYTES:
            self.write_now()
            return True
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._end_turn)
        return False

    def _end_turn(self) -> None:
        self._scheduled = False
        self.write_now()

    def write_now(self) -> None:
        if self._outbox and not self.down:
            self._transport.write(self._outbox[0] if len(self._outbox) == 1 else b"".join(self._outbox))
        self._outbox.clear()
        self._held = 0

    # --- the life of a connection ---------------------------------------------------------------------------

    async def open(self, key: str, node: str, uuid: str) -> Welcome:
        """Raises what the gateway has against it."""
        self.put(encode_open(key, node, uuid, OPEN_ID))
        welcome = await self.welcome
        if welcome.keepalive:
            self._watch = self._loop.call_later(welcome.keepalive, self._look, welcome.keepalive)
        return welcome

    def _look(self, every: int) -> None:
        """Asks a gateway that has been silent whether it is there."""
        silent = self._loop.time() - self._heard
        if silent >= SILENT_AFTER * every:
            self.fail(ConnectionLost(f"{self.where} has been silent for {silent:.0f} s"))
            return
        if silent >= every:
            self.put(encode_ping(0))
        self._watch = self._loop.call_later(every, self._look, every)

    def fail(self, error: ClientError) -> None:
        """Ends the connection for a reason of this side."""
        if not self.down:
            self._stop()
            self._transport.abort()
            self._owner.on_lost(self, error)

    def close(self) -> None:
        """Ends the connection when what was put has been written; the owner is not told."""
        if not self.down:
            self.write_now()
            self._stop()
            self._transport.close()

    def abort(self) -> None:
        self._stop()
        self._transport.abort()

    def _stop(self) -> None:
        self.down = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    # --- what the loop calls --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._owner.on_writable()

    def connection_lost(self, error: Exception | None) -> None:
        reason = reason_of(error) if error is not None else "it closed the connection"
        lost = ConnectionLost(f"the connection to {self.where} was lost: {reason}")
        if not self.closed.done():
            self.closed.set_result(None)
        if not self.welcome.done():
            self.welcome.set_exception(lost)
            self._stop()
        if not self.down:
            self._stop()
            self._owner.on_lost(self, lost)

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        if self.down:
            return
        try:
            frames = self._decoder.feed(data)
        except FrameError as error:
            self._violated(str(error))
            return
        for frame in frames:
            if self.down:
                return
            if isinstance(frame, Delivery):
                self._owner.on_delivery(frame)
            elif isinstance(frame, Confirm):
                self._owner.on_confirm(frame.id - frame.count + 1, frame.id)
            elif isinstance(frame, Refuse):
                self._on_refuse(frame)
            elif isinstance(frame, Welcome):
                if not self.welcome.done():
                    self.welcome.set_result(frame)
            elif isinstance(frame, Ping):
                self.put(encode_pong(frame.id))
            elif isinstance(frame, Malformed):
                self._violated(frame.reason)

    def _on_refuse(self, frame: Refuse) -> None:
        error = refusal(frame)
        if not self.welcome.done():
            self.welcome.set_exception(error)
        else:
            self._owner.on_refusal(frame.id, error)

    def _violated(self, what: str) -> None:
        error = ProtocolError(f"what answers at {self.where} does not speak zeroctl as it should: {what}")
        if not self.welcome.done():
            self.welcome.set_exception(error)
            self.abort()
        else:
            self.fail(error)
