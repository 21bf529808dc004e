"""What the clients that keep one connection to their server share: making it, making it again with growing pauses, and
letting operations wait for it. It knows no protocol: a client says what a connection begins with, what it carries over
from the last one, and which refusal is final."""

import asyncio
import logging
import random
import ssl
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

from headrace.clients.errors import (
    ClientClosed,
    ClientError,
    ConnectionLost,
    Limit,
    again,
    cannot_connect,
    hung_up,
)
from headrace.clients.link import StreamLink
from headrace.config.addresses import HostPort, InheritedSocket, UnixPath, parse_address

LinkT = TypeVar("LinkT", bound=StreamLink)

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 5.0
# Until a connection has lived this long, the next loss goes on with the back-off instead of starting it anew:
# a server that accepts and then hangs up is as good as one that is away.
SETTLED_SECONDS: Final = 5.0


class Backoff:
    """Pauses between attempts: they double up to a limit, and each is shortened at random so that a fleet does not come
    back at once."""

    def __init__(self, first: float = FIRST_PAUSE, longest: float = LONGEST_PAUSE) -> None:
        if not 0 < first <= longest:
            raise ValueError("reconnect_delay is more than 0 and at most max_reconnect_delay")
        self._first = first
        self._longest = longest
        self._attempts = 0

    async def pause(self) -> None:
        most = min(self._first * 2 ** min(self._attempts, 32), self._longest)
        self._attempts += 1
        await asyncio.sleep(most * random.uniform(0.5, 1))

    def begin_anew(self) -> None:
        self._attempts = 0


class ReconnectingClient(ABC, Generic[LinkT]):
    """A client of one server. It has at most one connection at a time, `_connection`; `_end` is why it is of no use
    before it was connected, or any more."""

    def __init__(
        self,
        address: str,
        *,
        tls: ssl.SSLContext | None,
        server_hostname: str | None,
        timeout: float,
        reconnect: bool,
        reconnect_delay: float,
        max_reconnect_delay: float,
    ) -> None:
        place = parse_address(address)
        if isinstance(place, InheritedSocket):
            raise ValueError(f'"{address}" is nothing to connect to; it is "host:port" or "unix:/path"')
        if timeout <= 0:
            raise ValueError(f"a timeout is more than 0 seconds, not {timeout}")
        self.reconnects = 0
        """How many times a lost connection was made again."""
        self._place: HostPort | UnixPath = place
        self._tls = tls
        self._server_hostname = server_hostname
        self._timeout = timeout
        self._reconnect = reconnect
        self._backoff = Backoff(reconnect_delay, max_reconnect_delay)
        self._connection: LinkT | None = None
        self._connected_at = 0.0
        self._begun = False  # there was a connection
        self._end: ClientError | None = ClientClosed(f"the client of {place} is not connected yet")
        self._trouble: ClientError | None = None  # why there is no connection now
        self._reconnecting: asyncio.Task[None] | None = None
        self._waiting: dict[asyncio.Future[None], None] = {}  # for any change, in order
        self._log = logging.getLogger(type(self).__module__)
        self._loop: asyncio.AbstractEventLoop

    # --- what a protocol adds -------------------------------------------------------------------------------

    @abstractmethod
    def _new_link(self) -> LinkT:
        """A link that is not connected yet."""

    @abstractmethod
    async def _greet(self, link: LinkT) -> None:
        """The handshake; raises what the server has against it."""

    async def _prepare(self, link: LinkT) -> None:
        """What has to be asked and answered before the connection is used."""

    def _take_over(self, link: LinkT) -> None:
        """Makes a new connection the one to use. A client begins it with what the last one left."""
        self._connection = link
        self._connected_at = self._loop.time()
        self._trouble = None

    def _leave(self, link: LinkT, error: ClientError, carry: bool) -> None:
        """A connection is no more. What waits for it is kept for the next one where `carry` says that one will come."""

    def _finish(self, error: ClientError) -> None:
        """Nothing works from here on. A client tells that to all who wait."""
        self._end = error
        self._connection = None
        self._wake()

    def _is_final(self, error: ClientError) -> bool:
        """Whether to connect again would only lead to the same error."""
        return False

    # --- connecting and closing -----------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Whom this client talks to."""
        return str(self._place)

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._connection is not None

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
        else:
            await self._shut()

    async def connect(self) -> None:
        """Connects. A first connection is tried once: ConnectionFailed, ConnectionLost, ProtocolError, OperationTimeout
        or the server's refusal say what was wrong."""
        if self._begun:
            raise RuntimeError(f"the client of {self.address} was connected before")
        self._loop = asyncio.get_running_loop()
        link = await self._open()
        if link.down:
            raise ConnectionLost(f"{self.address} closed the connection")
        self._begun = True
        self._end = None
        self._adopt(link)

    async def close(self) -> None:
        """Disconnects. What is under way raises ClientClosed."""
        await self._shut()

    async def _shut(self, *, at_once: bool = False) -> None:
        closed = ClientClosed(f"the client of {self.address} was closed")
        link = self._connection
        if link is not None:
            self._leave(link, closed, False)
        if self._end is None:
            self._finish(closed)  # first, so that a loss from here on begins nothing anew
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.wait([self._reconnecting])
        if link is None:
            return
        if not at_once:
            link.close(closed)
            try:
                await asyncio.wait([link.closed], timeout=self._timeout)
            finally:
                link.abort()  # of no effect where it is closed
        else:
            link.abort()
            await asyncio.wait([link.closed], timeout=self._timeout)

    async def _open(self) -> LinkT:
        """A connection that the server has accepted."""
        link = self._new_link()
        async with Limit(
            self._timeout, f"{self.address} did not accept a connection within {self._timeout:g} s"
        ):
            try:
                await self._open_transport(link)
            except OSError as error:
                raise cannot_connect(self.address, error) from error
            try:
                await self._greet(link)
            except ConnectionLost as error:
                link.abort()
                raise ConnectionLost(f"{error} {hung_up(link.protocol, self._tls is not None)}") from error
            except BaseException:
                link.abort()
                raise
        try:
            await self._prepare(link)
        except BaseException:
            link.abort()
            raise
        return link

    async def _open_transport(self, link: LinkT) -> None:
        name = self._server_hostname
        if isinstance(self._place, UnixPath):
            if self._tls is not None:
                name = name or "localhost"
            await self._loop.create_unix_connection(
                lambda: link, self._place.path, ssl=self._tls, server_hostname=name
            )
        else:
            if self._tls is not None:
                name = name or self._place.host
            await self._loop.create_connection(
                lambda: link, self._place.host, self._place.port, ssl=self._tls, server_hostname=name
            )

    # --- connections lost and found -------------------------------------------------------------------------

    def _adopt(self, link: LinkT) -> None:
        self._take_over(link)
        self._wake()  # last, so that whoever waits comes behind what the connection begins with

    def on_lost(self, link: StreamLink, error: ClientError) -> None:
        if link is not self._connection:
            return  # it is still in its handshake, and whoever opens it has the error
        carry = self._reconnect and not self._is_final(error)
        lost, self._connection = self._connection, None
        self._trouble = error
        self._leave(lost, error, carry)
        if not carry:
            self._finish(error)
            return
        self._log.warning("%s; connecting again", error)
        if self._loop.time() - self._connected_at >= SETTLED_SECONDS:
            self._backoff.begin_anew()
        self._reconnecting = self._loop.create_task(self._restore())

    async def _restore(self) -> None:
        """Connects again, however often it takes."""
        while True:
            await self._backoff.pause()
            try:
                link = await self._open()
            except ClientError as error:
                if self._is_final(error):
                    self._finish(error)
                    return
                self._trouble = error
                continue
            if not link.down:
                break
        self.reconnects += 1
        self._log.warning("connected to %s again", self.address)
        self._adopt(link)

    # --- waiting --------------------------------------------------------------------------------------------

    def on_writable(self) -> None:
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def _changed(self) -> None:
        """Returns when the connection was lost or found, or takes more."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting[waiter] = None
        try:
            await waiter
        finally:
            del self._waiting[waiter]

    async def _ready(self, doing: str) -> LinkT:
        """A connection that takes frames, as soon as there is one."""
        if self._connection is not None and not self._connection.paused:
            return self._connection
        async with Limit(self._timeout, lambda: self._late(doing)):
            while self._end is None:
                link = self._connection
                if link is not None and not link.paused:
                    return link
                await self._changed()
        raise again(self._end)

    def _late(self, doing: str) -> str:
        """Why an operation took longer than it may."""
        if self._connection is None:
            what = f"there was no connection to {self.address} for {self._timeout:g} s ({self._trouble})"
        elif self._connection.paused:
            what = f"{self.address} has not read what was sent for {self._timeout:g} s"
        else:
            what = f"{self.address} did not answer within {self._timeout:g} s"
        return f"cannot {doing}: {what}"
