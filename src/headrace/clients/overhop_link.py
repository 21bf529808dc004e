"""One Overhop connection of a client: requests that wait for their answers by id, pushes, and one write per loop
turn.

It knows nothing of reconnecting or of the API."""

import asyncio
from typing import Any, Final, Protocol, cast

from headrace.clients.errors import ClientError, ConnectionLost, ProtocolError, reason_of
from headrace.wire.overhop import Decoder, FrameError, Message, MessageType, encode

# What is put together before it is written even within one turn: as much as one read of the server takes.
WRITE_BYTES: Final = 256 * 1024
# What the transport may hold before requests wait.
WRITE_BUFFER_BYTES: Final = 1024 * 1024


class OverhopError(ClientError):
    """The server answered ERR. `code` and `text` are its words, `details` what else it said."""

    def __init__(self, code: str, text: str, details: object = None) -> None:
        super().__init__(code, text, details)
        self.code = code
        self.text = text
        self.details = details

    def __str__(self) -> str:
        return f"{self.text} ({self.code})" if self.text else self.code


class QueueNotFound(OverhopError):
    """There is no such queue."""

    hint = "'headrace queue ls' lists the queues, 'headrace queue add NAME' makes one"


class QueueExists(OverhopError):
    """There is a queue of this name."""


class JobNotFound(OverhopError):
    """There is no such job, or none any more."""


class JobNotActive(OverhopError):
    """The job is not this worker's: it was finished before, or has been given to another."""


class NotAllowed(OverhopError):
    """The listener gives its peers no right to do this."""


class Violation(OverhopError):
    """The server takes the request for none of the protocol, and closes the connection."""


class ServerError(OverhopError):
    """The server could not do it, and may be able to later."""


ERRORS: Final[dict[str, type[OverhopError]]] = {
    "QUEUE_NOT_FOUND": QueueNotFound,
    "DUPLICATE_QUEUE": QueueExists,
    "JOB_NOT_FOUND": JobNotFound,
    "JOB_NOT_ACTIVE": JobNotActive,
    "NOT_ALLOWED": NotAllowed,
    "PROTOCOL_VIOLATION": Violation,
    "JOB_PERSISTENCE_ERROR": ServerError,
    "QUEUE_PERSISTENCE_ERROR": ServerError,
    "CONNECTION_TIMEOUT": ServerError,
    "REGISTER_TIMEOUT": ServerError,
}


def error_of(answer: Message) -> OverhopError:
    code = str(answer.payload.get("code", ""))
    text = str(answer.payload.get("msg", ""))
    return ERRORS.get(code, OverhopError)(code, text, answer.payload.get("details"))


class LinkOwner(Protocol):
    """Who a link belongs to: a client."""

    def on_push(self, link: "Link", message: Message) -> None: ...
    def on_writable(self) -> None: ...
    def on_lost(self, link: "Link", error: ClientError) -> None: ...


class Link(asyncio.Protocol):
    """A connection, from the handshake to its end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: LinkOwner, where: str, limit: int) -> None:
        self.where = where  # the server, for texts
        self.paused = False  # the transport holds enough
        self.down = False  # it takes and gives nothing any more
        self.wid = ""
        self.closed: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._owner = owner
        self._decoder = Decoder(limit)
        self._calls: dict[str, asyncio.Future[Message]] = {}
        self._next_rid = 0
        self._outbox: list[bytes] = []
        self._held = 0  # bytes in it
        self._turn_scheduled = False
        self._transport: asyncio.Transport

    # --- sending --------------------------------------------------------------------------------------------

    def call(self, type: int, payload: dict[str, Any]) -> asyncio.Future[Message]:
        """Puts a request, to be written at the end of this turn; its answer is the result, an ERR its error."""
        self._next_rid += 1
        rid = f"{self._next_rid:x}"
        frame = encode(type, rid, payload)
        answer: asyncio.Future[Message] = self._loop.create_future()
        if self.down:
            answer.set_exception(ConnectionLost(f"the connection to {self.where} was lost"))
            return answer
        self._calls[rid] = answer
        self._outbox.append(frame)
        self._held += len(frame)
        if self._held >= WRITE_BYTES:
            self._write()
        elif not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon(self._end_turn)
        return answer

    def _end_turn(self) -> None:
        self._turn_scheduled = False
        self._write()

    def _write(self) -> None:
        if self._outbox and not self.down:
            self._transport.write(self._outbox[0] if len(self._outbox) == 1 else b"".join(self._outbox))
        self._outbox.clear()
        self._held = 0

    # --- the life of a connection ---------------------------------------------------------------------------

    async def handshake(self) -> None:
        """HELLO, and REGISTER when it is answered: not every server reads more than one message at a time."""
        hi = await self.call(MessageType.HELLO, {})
        if hi.type != MessageType.HI:
            raise ProtocolError(f"{self.where} answered HELLO with {hi.name}")
        self.wid = str((await self.call(MessageType.REGISTER, {})).payload.get("wid", ""))

    def fail(self, error: ClientError) -> None:
        """Ends the connection for a reason of this side."""
        if not self.down:
            self._transport.abort()
            self._end(error)

    def close(self) -> None:
        """Ends the connection when what was put has been written; the owner is not told."""
        self._write()
        self.down = True
        self._transport.close()
        self._fail_calls(ConnectionLost(f"the connection to {self.where} was closed"))

    def abort(self) -> None:
        """Ends the connection at once; the owner is not told."""
        self.down = True
        self._transport.abort()
        self._fail_calls(ConnectionLost(f"the connection to {self.where} was closed"))

    def _end(self, error: ClientError) -> None:
        self.down = True
        self._fail_calls(error)
        self._owner.on_lost(self, error)

    def _fail_calls(self, error: ClientError) -> None:
        calls, self._calls = self._calls, {}
        for answer in calls.values():
            if not answer.done():
                answer.set_exception(type(error)(*error.args))

    # --- what the loop calls --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        if self.down:
            return
        try:
            messages = self._decoder.feed(data)
        except FrameError:
            messages = []
        for message in messages:
            self._on_message(message)
        if self._decoder.error is not None:
            self.fail(ProtocolError(f"{self.where} does not speak Overhop: {self._decoder.error}"))

    def _on_message(self, message: Message) -> None:
        if message.rid == "0":
            if message.type == MessageType.ERR:
                self.fail(error_of(message))
            elif not self.down:
                self._owner.on_push(self, message)
            return
        answer = self._calls.pop(message.rid, None)
        if answer is None or answer.done():
            return  # whoever asked has gone
        if message.type == MessageType.ERR:
            answer.set_exception(error_of(message))
        else:
            answer.set_result(message)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._owner.on_writable()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
        if not self.down:
            why = f": {reason_of(error)}" if error is not None else ""
            self._end(ConnectionLost(f"the connection to {self.where} was lost{why}"))
