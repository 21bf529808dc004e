"""One Overhop connection of a client: requests that wait for their answers by id, pushes, and one write per loop
turn.

It knows nothing of reconnecting or of the API."""

import asyncio
from typing import Any, ClassVar, Final, Protocol

from headrace.clients.errors import ClientError, ConnectionLost, ProtocolError, again
from headrace.clients.link import StreamLink, StreamOwner
from headrace.wire.overhop import Decoder, FrameError, Message, MessageType, encode


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


class LinkOwner(StreamOwner, Protocol):
    """Who a link belongs to: a client."""

    def on_push(self, link: "Link", message: Message) -> None: ...


class Link(StreamLink):
    """A connection, from the handshake to its end."""

    protocol: ClassVar[str] = "Overhop"
    _owner: LinkOwner

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: LinkOwner, where: str, limit: int) -> None:
        super().__init__(loop, owner, where)
        self.wid = ""
        self._decoder = Decoder(limit)
        self._calls: dict[str, asyncio.Future[Message]] = {}
        self._next_rid = 0

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
        self.put(frame)
        return answer

    async def handshake(self) -> None:
        """HELLO, and REGISTER when it is answered: not every server reads more than one message at a time."""
        hi = await self.call(MessageType.HELLO, {})
        if hi.type != MessageType.HI:
            raise ProtocolError(f"{self.where} answered HELLO with {hi.name}")
        self.wid = str((await self.call(MessageType.REGISTER, {})).payload.get("wid", ""))

    def _end(self, error: ClientError) -> None:
        super()._end(error)
        calls, self._calls = self._calls, {}
        for answer in calls.values():
            if not answer.done():
                answer.set_exception(again(error))

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
            self._violated(str(self._decoder.error))

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
