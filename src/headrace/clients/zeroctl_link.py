"""One zeroctl connection of a client: frames out in one write per loop turn, answers by id in. It knows nothing of
reconnecting or of the API: who owns a link carries over what it leaves unfinished."""

import asyncio
from typing import ClassVar, Final, Protocol

from headrace.clients.errors import KEY_HINT, ClientError, ConnectionLost, again
from headrace.clients.link import StreamLink, StreamOwner
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


class LinkOwner(StreamOwner, Protocol):
    """Who a link belongs to: a client."""

    def on_confirm(self, first: int, last: int) -> None: ...
    def on_refusal(self, id: int, error: Refused) -> None: ...
    def on_delivery(self, delivery: Delivery) -> None: ...


class Link(StreamLink):
    """A connection, from OPEN to its end."""

    protocol: ClassVar[str] = "zeroctl"
    _owner: LinkOwner

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: LinkOwner, where: str) -> None:
        super().__init__(loop, owner, where)
        self.welcome: asyncio.Future[Welcome] = loop.create_future()
        self._decoder = Decoder()
        self._heard = loop.time()
        self._watch: asyncio.TimerHandle | None = None

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

    def _end(self, error: ClientError) -> None:
        super()._end(error)
        if not self.welcome.done():
            self.welcome.set_exception(again(error))
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

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
