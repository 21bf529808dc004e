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
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import ClassVar, Self, TypeVar

from typing_extensions import Buffer

from headrace.clients.errors import (
    ClientClosed,
    ClientError,
    ConnectionFailed,
    ConnectionLost,
    Limit,
    OperationTimeout,
    ProtocolError,
    again,
)
from headrace.clients.link import StreamLink
from headrace.clients.reconnect import FIRST_PAUSE, LONGEST_PAUSE, ReconnectingClient
from headrace.clients.relink_link import Link, LinkLost, Message, Uncommitted
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


class Wire(StreamLink):
    """One connection: the handshake, then packets to and from the link."""

    protocol: ClassVar[str] = "Relink"
    _owner: "RelinkConnector"

    def __init__(self, loop: asyncio.AbstractEventLoop, connector: "RelinkConnector", where: str) -> None:
        super().__init__(loop, connector, where)
        self.greeted: asyncio.Future[wire.Answer] = loop.create_future()
        self._decoder = wire.Decoder(
            "listener",
            connector_size=connector._sizes[0],
            listener_size=connector._sizes[1],
            max_payload=connector._max_message,
        )
        self._link: Link | None = None  # once the handshake is done
        self._early: list[wire.Item] = []  # what came behind it before the link was told

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.put(wire.encode_version(wire.PROTOCOL_VERSION))
        self.write_now()

    def data_received(self, data: bytes) -> None:
        if self.down:
            return
        try:
            items = self._decoder.feed(data)
            if not self.greeted.done():
                items = self._greet(items)
            if self._link is None:
                self._early += items
            else:
                self._link.handle(items)
            if self._decoder.error is not None:
                raise self._decoder.error
        except LinkLost as error:
            self.fail(error)
        except (ProtocolError, wire.PacketError) as error:
            self._violated(str(error))

    def _greet(self, items: list[wire.Item]) -> list[wire.Item]:
        """The listener's part of the handshake, taken off the front."""
        while items and not self.greeted.done():
            item = items.pop(0)
            if isinstance(item, wire.Version):
                if item.version > wire.PROTOCOL_VERSION:
                    raise ProtocolError(f"it answered with version {item.version}, which nobody offered")
                self.put(self._owner._hello())
            elif isinstance(item, wire.Answer):
                if item.link >> 63:
                    raise ProtocolError("its link id is out of bounds")
                if item.link == 0:
                    raise LinkLost(f"{self.where} does not know the link any more")
                self.greeted.set_result(item)
        return items

    def begin(self, link: Link) -> None:
        """Gives the link all packets from here on, and those that have come."""
        self._link = link
        early, self._early = self._early, []
        try:
            link.handle(early)
        except ProtocolError as error:
            self._violated(str(error))

    def _end(self, error: ClientError) -> None:
        super()._end(error)
        if not self.greeted.done():
            self.greeted.set_exception(again(error))


class RelinkConnector(ReconnectingClient[Wire]):
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
        reconnect_delay: float = FIRST_PAUSE,
        max_reconnect_delay: float = LONGEST_PAUSE,
    ) -> None:
        super().__init__(
            address,
            tls=tls,
            server_hostname=server_hostname,
            timeout=timeout,
            reconnect=reconnect,
            reconnect_delay=reconnect_delay,
            max_reconnect_delay=max_reconnect_delay,
        )
        if window < 1:
            raise ValueError("a window has room for at least one message")
        wire.encode_hello(endpoint, connector_id_bytes, listener_id_bytes)  # says what is wrong with these
        self.endpoint = endpoint
        self.transactional = connector_transactions
        self.links_lost = 0
        """How many times the listener did not know the link any more."""
        self._sizes = connector_id_bytes, listener_id_bytes
        self._flags = (Flags.CONNECTOR_TRANSACTIONS if connector_transactions else 0) | (
            Flags.LISTENER_TRANSACTIONS if listener_transactions else 0
        )
        self._window = window
        self._max_message = max_message
        self._link = Link(
            sizes=self._sizes,
            transactions=(connector_transactions, listener_transactions),
            put=self._put,
            deliver=self._deliver,
            progress=self._wake,
        )
        self._inbox: deque[Message] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._handed: Message | None = None
        self._telling = False

    @property
    def link(self) -> int:
        """The link's id, 0 before there is one."""
        return self._link.id

    @property
    def epoch(self) -> int:
        """The listener's epoch, 0 before it told."""
        return self._link.epoch

    # --- connecting and closing -----------------------------------------------------------------------------

    def _new_link(self) -> Wire:
        return Wire(self._loop, self, self.address)

    async def _greet(self, link: Wire) -> None:
        try:
            await link.greeted
        except ConnectionLost as error:
            # A listener that does not know the endpoint, or has other sizes for it, just hangs up.
            raise ConnectionFailed(
                f"{error} during the handshake: does it speak Relink, and has an endpoint {self.endpoint!r} "
                "with these options?"
            ) from error

    def _hello(self) -> bytes:
        return wire.encode_hello(
            self.endpoint, *self._sizes, int(self._flags), self._link.epoch, self._link.id
        )

    def _take_over(self, link: Wire) -> None:
        super()._take_over(link)
        answer = link.greeted.result()
        had_one = self._link.id != 0
        if not self._link.connected(answer.epoch, answer.link):
            self._inbox.clear()  # of the old link
            self.links_lost += had_one
        link.begin(self._link)

    def _leave(self, link: Wire, error: ClientError, carry: bool) -> None:
        self._link.disconnected()
        over = self._link.over
        if over is not None and not over.done():
            # It may have heard our shutdown and ended; whether it has, the next connection would tell.
            over.set_result(None)

    def _finish(self, error: ClientError) -> None:
        super()._finish(error)
        self._link.discard(error)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def abandon(self) -> None:
        """Disconnects at once; the listener keeps the link for its grace time, and nobody comes back to it."""
        await self._shut(at_once=True)

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
            await self._shut()

    # --- waiting --------------------------------------------------------------------------------------------

    def _put(self, data: bytes) -> None:
        if self._connection is not None:
            self._connection.put(data)

    async def _within(self, waiter: Awaitable[T], what: str) -> T:
        def late() -> str:
            trouble = f"; {self._trouble}" if self._connection is None else ""
            return f"{self.address} did not {what} within {self._timeout:g} s{trouble}"

        async with Limit(self._timeout, late):
            return await waiter

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            self._raise_end()
            await self._within(self._changed(), what)
        self._raise_end()

    def _raise_end(self) -> None:
        if self._end is not None:
            raise again(self._end)

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
        await self._until(lambda: self._connection is not None, "come back")
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
            self._raise_end()
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
        if self._connection is not None:
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
            made = connector._connection
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
        connector._raise_end()
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
            connector._raise_end()
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
        connector._raise_end()
        if connector.transactional and sending.next > sending.asked:
            connector._link.wish(sending, False, None)
        await self.flush()
        if sending.closing is None:
            connector._link.close(sending, connector._loop.create_future())
        assert sending.closing is not None
        await connector._within(asyncio.shield(sending.closing), "close a channel")
