"""A Relink connector for asyncio: channels, acknowledgements and transactions, over connections that come back by
themselves and resume their link.

    async with RelinkConnector("127.0.0.1:5600", endpoint="demo") as link:
        channel = link.channel(7)
        await channel.send(b"one part")
        await channel.send(b"two", b"parts")
        await channel.flush()                       # the listener has them safe

        async for message in link:
            print(message.channel, message.parts)   # it is consumed when the next one is asked for

With transactions, all or nothing of a block is taken:

    async with channel.transaction():
        await channel.send(b"a")
        await channel.send(b"b")

A lost connection is made again and the link goes on where it was: nothing is lost and nothing comes twice, in either
direction. It knows nothing of the gateway's insides, and works with any listener of the protocol.
"""

import asyncio
import contextlib
import logging
import random
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Final, Self, TypeVar, cast

from typing_extensions import Buffer

from headrace.clients.errors import (
    ClientClosed,
    ClientError,
    ConnectionFailed,
    ConnectionLost,
    OperationTimeout,
    ProtocolError,
    reason_of,
)
from headrace.clients.relink_link import Link, LinkLost, Message, Uncommitted
from headrace.config.addresses import HostPort, InheritedSocket, UnixPath, parse_address
from headrace.wire import relink as wire
from headrace.wire.relink import Flags, GeneralType

__all__ = [
    "Channel",
    "ClientClosed",
    "ClientError",
    "ConnectionFailed",
    "ConnectionLost",
    "LinkLost",
    "Message",
    "OperationTimeout",
    "ProtocolError",
    "RelinkConnector",
    "Uncommitted",
]

T = TypeVar("T")

log = logging.getLogger(__name__)

# Until a connection has lived this long, the next loss goes on with the back-off instead of starting it anew.
SETTLED_SECONDS: Final = 5.0


class Wire(asyncio.Protocol):
    """One connection: the handshake, then packets to and from the link."""

    def __init__(self, connector: "RelinkConnector") -> None:
        self._connector = connector
        self._loop = asyncio.get_running_loop()
        self._decoder = wire.Decoder(
            "listener",
            connector_size=connector._sizes[0],
            listener_size=connector._sizes[1],
            max_payload=connector._max_message,
        )
        self._out: list[bytes] = []
        self._flushing = False
        self._transport: asyncio.Transport | None = None
        self._link: Link | None = None  # once the handshake is done
        self.paused = False
        self.greeted: asyncio.Future[None] = self._loop.create_future()
        self.closed: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's derive from nothing
        self._transport.write(wire.encode_version(wire.PROTOCOL_VERSION))

    def data_received(self, data: bytes) -> None:
        try:
            items = self._decoder.feed(data)
            if self._link is None:
                items = self._greet(items)
            if self._link is not None:
                self._link.handle(items)
            if self._decoder.error is not None:
                raise self._decoder.error
        except LinkLost as error:
            self._fail(error)
        except (ProtocolError, wire.PacketError) as error:
            self._fail(ProtocolError(f"{self._connector.address} broke the protocol: {error}"))

    def _greet(self, items: list[wire.Item]) -> list[wire.Item]:
        """The listener's part of the handshake, taken off the front."""
        assert self._transport is not None
        while items and self._link is None:
            item = items.pop(0)
            if isinstance(item, wire.Version):
                if item.version > wire.PROTOCOL_VERSION:
                    raise ProtocolError(f"it answered with version {item.version}, which nobody offered")
                self._transport.write(self._connector._hello())
            elif isinstance(item, wire.Answer):
                if item.link >> 63:
                    raise ProtocolError("its link id is out of bounds")
                if item.link == 0:
                    raise LinkLost(f"{self._connector.address} does not know the link any more")
                self._link = self._connector._link
                self._connector._wire = self
                if not self._link.connected(item.epoch, item.link):
                    self._connector._inbox.clear()  # of the old link; the new one's may follow at once
                if not self.greeted.done():
                    self.greeted.set_result(None)
        return items

    def put(self, data: bytes) -> None:
        """Sends with all that this turn of the loop puts."""
        self._out.append(data)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        self._flushing = False
        if self._out and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out = []

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._connector._progress()

    def _fail(self, error: ClientError) -> None:
        if not self.greeted.done():
            self.greeted.set_exception(error)
        else:
            self._connector._trouble = error
        self.abort()

    def close(self) -> None:
        if self._transport is not None:
            self.flush()
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.greeted.done():
            reason = (
                reason_of(error)
                if error is not None
                else f"does it speak Relink, and has an endpoint {self._connector.endpoint!r} with these options?"
            )
            self.greeted.set_exception(
                ConnectionFailed(
                    f"{self._connector.address} closed the connection during the handshake: {reason}"
                )
            )
        if not self.closed.done():
            self.closed.set_result(None)
        if self._link is not None:
            self._connector._lost(self)


class RelinkConnector:
    """A connector to one endpoint of a Relink listener.

    `address` is "host:port", "[v6]:port" or "unix:/path". The sizes of channel ids and the transactions must be those
    that the listener has for the endpoint. With `tls` the connection is encrypted.

    `timeout` is how many seconds connecting, and any wait for the listener, may take. `window` is how many messages of
    a channel may be on their way: send() waits while there are more that are not consumed. With `reconnect` a lost
    connection is made again, with growing and randomly shortened pauses from `reconnect_delay` to
    `max_reconnect_delay`, and the link resumed. If the listener does not know it any more, LinkLost is raised by all
    that waits, `links_lost` counts, and a new link begins.
    """

    def __init__(
        self,
        address: str,
        *,
        endpoint: str,
        connector_id_bytes: int = 4,
        listener_id_bytes: int = 4,
        connector_transactions: bool = False,
        listener_transactions: bool = False,
        tls: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        timeout: float = 10.0,
        window: int = 1024,
        max_message: int = wire.MAX_PAYLOAD,
        reconnect: bool = True,
        reconnect_delay: float = 0.05,
        max_reconnect_delay: float = 5.0,
    ) -> None:
        place = parse_address(address)
        if isinstance(place, InheritedSocket):
            raise ValueError(f'"{address}" is nothing to connect to; it is "host:port" or "unix:/path"')
        if timeout <= 0:
            raise ValueError(f"a timeout is more than 0 seconds, not {timeout}")
        if not 0 < reconnect_delay <= max_reconnect_delay:
            raise ValueError("reconnect_delay is more than 0 and at most max_reconnect_delay")
        if window < 1:
            raise ValueError("a window has room for at least one message")
        wire.encode_hello(endpoint, connector_id_bytes, listener_id_bytes)  # says what is wrong with these
        self.endpoint = endpoint
        self.transactional = connector_transactions
        self.reconnects = 0
        """How many times a lost connection was made again."""
        self.links_lost = 0
        """How many times the listener did not know the link any more."""
        self._place: HostPort | UnixPath = place
        self._sizes = connector_id_bytes, listener_id_bytes
        self._flags = (Flags.CONNECTOR_TRANSACTIONS if connector_transactions else 0) | (
            Flags.LISTENER_TRANSACTIONS if listener_transactions else 0
        )
        self._tls = tls
        self._server_hostname = server_hostname
        self._timeout = timeout
        self._window = window
        self._max_message = max_message
        self._reconnect = reconnect
        self._reconnect_delay = reconnect_delay
        self._max_reconnect_delay = max_reconnect_delay
        self._link = Link(
            sizes=self._sizes,
            transactions=(connector_transactions, listener_transactions),
            put=self._put,
            deliver=self._deliver,
            progress=self._progress,
        )
        self._wire: Wire | None = None
        self._trouble: ClientError | None = None  # why there is no connection now
        self._end: ClientError | None = ClientClosed(f"the connector of {place} is not connected yet")
        self._begun = False
        self._attempts = 0
        self._connected_at = 0.0
        self._reconnecting: asyncio.Task[None] | None = None
        self._waiters: set[asyncio.Future[None]] = set()  # for anything that progress may bring
        self._inbox: deque[Message] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._handed: Message | None = None
        self._telling = False
        self._loop: asyncio.AbstractEventLoop

    @property
    def address(self) -> str:
        """Whom this connector talks to."""
        return str(self._place)

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._wire is not None

    @property
    def link(self) -> int:
        """The link's id, 0 before there is one."""
        return self._link.id

    @property
    def epoch(self) -> int:
        """The listener's epoch, 0 before it told."""
        return self._link.epoch

    # --- connecting and closing -----------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
        else:
            await self.abandon()

    async def connect(self) -> None:
        """Connects and makes a link. It is tried once: ConnectionFailed, ProtocolError or OperationTimeout say what was
        wrong. A listener that does not know the endpoint, or has other sizes for it, just hangs up."""
        if self._begun:
            raise RuntimeError(f"the connector of {self.address} was connected before")
        self._loop = asyncio.get_running_loop()
        await self._open()
        self._begun = True
        self._end = None

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                try:
                    made = await self._open_transport()
                except OSError as error:
                    raise ConnectionFailed(f"cannot connect to {self.address}: {reason_of(error)}") from error
                try:
                    await made.greeted
                except BaseException:
                    made.abort()
                    raise
        except TimeoutError as error:
            if isinstance(error, ClientError):
                raise
            raise OperationTimeout(
                f"{self.address} did not accept a connection within {self._timeout:g} s"
            ) from None
        self._trouble = None
        self._connected_at = self._loop.time()
        self._progress()

    async def _open_transport(self) -> Wire:
        name = self._server_hostname
        if isinstance(self._place, UnixPath):
            if self._tls is not None:
                name = name or "localhost"
            _, made = await self._loop.create_unix_connection(
                lambda: Wire(self), self._place.path, ssl=self._tls, server_hostname=name
            )
            return made
        if self._tls is not None:
            name = name or self._place.host
        _, made = await self._loop.create_connection(
            lambda: Wire(self), self._place.host, self._place.port, ssl=self._tls, server_hostname=name
        )
        return made

    def _hello(self) -> bytes:
        return wire.encode_hello(
            self.endpoint, *self._sizes, int(self._flags), self._link.epoch, self._link.id
        )

    def _lost(self, gone: Wire) -> None:
        """A connection has ended."""
        if self._wire is not gone:
            return
        self._wire = None
        self._link.disconnected()
        self._trouble = self._trouble or ConnectionLost(f"the connection to {self.address} was lost")
        over = self._link.over
        if over is not None and not over.done():
            # It may have heard our shutdown and ended; whether it has, the next connection would tell.
            over.set_result(None)
        if self._end is not None:
            return
        if not self._reconnect:
            self._finish(self._trouble)
            return
        log.warning("%s; connecting again", self._trouble)
        if self._loop.time() - self._connected_at > SETTLED_SECONDS:
            self._attempts = 0
        self._reconnecting = self._loop.create_task(self._come_back())

    async def _come_back(self) -> None:
        while True:
            pause = min(self._max_reconnect_delay, self._reconnect_delay * 2 ** min(self._attempts, 16))
            self._attempts += 1
            await asyncio.sleep(pause * random.uniform(0.5, 1))
            before = self._link.epoch, self._link.id
            try:
                await self._open()
            except ProtocolError as error:
                self._finish(error)
                return
            except ClientError as error:
                self._trouble = error
                log.debug("cannot reconnect to %s: %s", self.address, error)
                continue
            self.reconnects += 1
            log.warning("connected to %s again", self.address)
            if (self._link.epoch, self._link.id) != before:
                self.links_lost += 1
            if self._wire is not None:
                return

    def _finish(self, error: ClientError) -> None:
        """Nothing more will happen."""
        if self._end is None:
            self._end = error
        self._link.discard(error)
        self._progress()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def abandon(self) -> None:
        """Disconnects at once; the listener keeps the link for its grace time, and nobody comes back to it."""
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.wait([self._reconnecting])
        gone = self._wire
        self._finish(ClientClosed(f"the connector of {self.address} was closed"))
        if gone is not None:
            gone.abort()
            await asyncio.wait([gone.closed], timeout=self._timeout)

    async def close(self) -> None:
        """Waits until the listener has consumed all that was sent, closes the channels, and ends the link.

        Messages that the caller has not consumed stay unconsumed, and end with the link.
        """
        try:
            if self._end is None:
                if self._handed is not None:
                    self.consumed(self._handed)
                for id in list(self._link.outs):
                    await Channel(self, id).close()
                over: asyncio.Future[None] = self._loop.create_future()
                self._link.shutdown(over)
                await self._within(over, "end the link")
        finally:
            if self._wire is not None:
                self._wire.close()
                await asyncio.wait([self._wire.closed], timeout=self._timeout)
            await self.abandon()

    # --- waiting --------------------------------------------------------------------------------------------

    def _put(self, data: bytes) -> None:
        if self._wire is not None:
            self._wire.put(data)

    def _progress(self) -> None:
        waiting, self._waiters = self._waiters, set()
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def _within(self, waiter: asyncio.Future[T], what: str) -> T:
        try:
            async with asyncio.timeout(self._timeout):
                return await waiter
        except TimeoutError as error:
            if isinstance(error, ClientError):
                raise
            trouble = f"; {self._trouble}" if self._trouble is not None and self._wire is None else ""
            raise OperationTimeout(
                f"{self.address} did not {what} within {self._timeout:g} s{trouble}"
            ) from None

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            if self._end is not None:
                raise self._end
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.add(waiter)
            try:
                await self._within(waiter, what)
            finally:
                self._waiters.discard(waiter)
        if self._end is not None:
            raise self._end

    # --- channels -------------------------------------------------------------------------------------------

    def channel(self, id: int = 0) -> "Channel":
        """A channel to send on; the same id is the same channel."""
        if not 0 <= id < 1 << (8 * self._sizes[0]):
            raise ValueError(f"channel {id} has no id of {self._sizes[0]} bytes")
        return Channel(self, id)

    async def flush(self) -> None:
        """Returns when the listener has consumed everything that was sent on any channel. Raises LinkLost if the link
        was lost since the last time with messages that were not consumed."""
        self._raise_untold()
        for id in list(self._link.outs):
            await Channel(self, id).flush()

    def _raise_untold(self) -> None:
        error, self._link.untold = self._link.untold, None
        if error is not None:
            raise error

    async def ping(self) -> None:
        """Returns when the listener has answered; ConnectionLost if the connection ended before."""
        await self._until(lambda: self._wire is not None, "come back")
        answered: asyncio.Future[None] = self._loop.create_future()
        self._link.pongs.append(answered)
        self._put(wire.encode_general(GeneralType.PING))
        await self._within(answered, "answer a ping")

    # --- receiving ------------------------------------------------------------------------------------------

    def _deliver(self, message: Message) -> None:
        self._inbox.append(message)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """The next message on any of the listener's channels; the one before it is consumed."""
        if self._handed is not None:
            self.consumed(self._handed)
        message = await self.receive()
        self._handed = message
        return message

    async def receive(self) -> Message:
        """The next message, to be acknowledged with consumed() or rejected(). It waits without a limit."""
        while not self._inbox:
            if self._end is not None:
                raise self._end
            if self._reader is not None:
                raise RuntimeError("one task at a time takes messages")
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._inbox.popleft()

    def consumed(self, message: Message) -> None:
        """The caller is done with a message. The listener is told with the next packets."""
        if self._handed is message:
            self._handed = None
        self._link.consume(message)
        self._tell_soon()

    def rejected(self, message: Message) -> None:
        """The caller could not process a message: if the listener commits what it sends, the transaction that it
        came in is answered with `uncommitted`."""
        if self._handed is message:
            self._handed = None
        self._link.consume(message, accepted=False)
        self._tell_soon()

    def _tell_soon(self) -> None:
        if not self._telling:
            self._telling = True
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = False
        if self._wire is not None:
            self._link.tell()


class Channel:
    """A channel that the connector sends on. It is open from its first message on."""

    def __init__(self, connector: RelinkConnector, id: int) -> None:
        self._connector = connector
        self.id = id

    async def send(self, *parts: Buffer) -> int:
        """Sends one message of these parts, in order with all others of the channel; its number on the channel.

        It returns when the message was handed over to be sent, and waits only where the window is full or the
        connection is not there. A message whose connection is lost is sent again by the next one.
        """
        connector = self._connector
        link = connector._link

        def may_send() -> bool:
            sending = link.sending(self.id)
            made = connector._wire
            # What is not committed is not consumed either.
            done = sending.received if connector.transactional else sending.consumed
            return (
                sending.next - done < connector._window
                and sending.closing is None
                and made is not None
                and not made.paused
            )

        if not may_send() or connector._end is not None:
            await connector._until(may_send, "take more messages")
        return link.send(link.sending(self.id), parts)

    async def flush(self) -> None:
        """Returns when the listener has consumed everything that was sent on the channel: it is in good hands.

        Raises LinkLost if the link was lost since the last time with messages that were not consumed.
        """
        connector = self._connector
        connector._raise_untold()
        sending = connector._link.outs.get(self.id)
        if sending is None or sending.consumed >= sending.next:
            return
        if connector._end is not None:
            raise connector._end
        waiter: asyncio.Future[None] = connector._loop.create_future()
        sending.waiters.append((sending.next, waiter))
        await connector._within(waiter, "consume all messages")

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Self]:
        """Commits what was sent on the channel inside the block, or rolls it back if an error leaves it.

        Leaving the block raises Uncommitted if the listener refused it, and LinkLost if the link was lost in the middle
        of it: then nothing of it was taken. The endpoint must be one whose connectors commit.
        """
        connector = self._connector
        if not connector.transactional:
            raise ValueError(f"endpoint {connector.endpoint!r} has no transactions here")
        begun = connector._link.sending(self.id)
        try:
            yield self
        except BaseException:
            sending = connector._link.outs.get(self.id)
            if sending is not None and sending.next > sending.asked and connector._end is None:
                connector._link.wish(sending, False, None)
            raise
        sending = connector._link.sending(self.id)
        if sending is not begun and begun.next > begun.asked:
            # What came first in the block was lost with the link, so the rest is not taken either.
            if sending.next > sending.asked:
                connector._link.wish(sending, False, None)
            raise LinkLost(f"{connector.address} lost the link in the middle of a transaction")
        if sending.next > sending.asked:
            if connector._end is not None:
                raise connector._end
            done: asyncio.Future[None] = connector._loop.create_future()
            connector._link.wish(sending, True, done)
            await connector._within(done, "answer a commit")

    async def close(self) -> None:
        """Closes the channel, when all that was sent on it is consumed; what is not committed is rolled back. It may be
        opened again, by sending on it."""
        connector = self._connector
        sending = connector._link.outs.get(self.id)
        if sending is None:
            return
        if connector._end is not None:
            raise connector._end
        if connector.transactional and sending.next > sending.asked:
            connector._link.wish(sending, False, None)
        await self.flush()
        if sending.closing is None:
            connector._link.close(sending, connector._loop.create_future())
        assert sending.closing is not None
        await connector._within(asyncio.shield(sending.closing), "close a channel")
