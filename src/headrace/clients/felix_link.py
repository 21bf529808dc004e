"""One QUIC connection of a Felix client: streams, frames and answers. It knows nothing of pools, nor of what to do
when the connection is lost."""

import asyncio
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from headrace.clients.errors import (
    ClientError,
    ConnectionFailed,
    ConnectionLost,
    OperationTimeout,
    ProtocolError,
    cannot_connect,
)
from headrace.config.addresses import HostPort
from headrace.quic.datagrams import Batch, DatagramSocket
from headrace.quic.engine import Engine, EngineConnection, Settings, Trust
from headrace.wire import felix as wire
from headrace.wire import felix_json as messages

# Bytes of one stream that may wait to be sent; beyond it who publishes waits.
HIGH_WATER: Final = 1 << 20


class FelixRefused(ClientError):
    """The server refused a request; the text is the server's."""


class NotAllowed(FelixRefused):
    """The server says that this client has no right to it."""


class NotFound(FelixRefused):
    """The server says that there is no such stream or cache."""


def refusal(text: str) -> FelixRefused:
    kind = NotAllowed if "unauthorized" in text else NotFound if "not found" in text else FelixRefused
    return kind(text)


class Requests:
    """A bidirectional stream: requests, and the answers to them. Those of the protocol's reference have ids; an error
    may have none, and is then of the oldest request."""

    def __init__(self, link: "FelixLink", number: int) -> None:
        self.link = link
        self.number = number
        self._decoder = wire.Decoder()
        self._waiting: dict[int | str, asyncio.Future[Any]] = {}
        self._order: deque[int | str] = deque()
        self._next = 1
        self.ended = False

    def take_id(self) -> int:
        self._next += 1
        return self._next - 1

    def ask(self, id: int | str, frame: bytes) -> "asyncio.Future[Any]":
        """Sends a request; the future is of its answer."""
        future: asyncio.Future[Any] = self.link.loop.create_future()
        self._waiting[id] = future
        self._order.append(id)
        self.link.send(self.number, frame)
        return future

    def tell(self, frame: bytes) -> None:
        """Sends what has no answer."""
        self.link.send(self.number, frame)

    def on_data(self, data: bytes, fin: bool) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._on_answer(wire.decode_message(frame.payload))
        except (wire.FrameError, wire.PayloadError) as error:
            self.fail(ProtocolError(f"{self.link.address} sent what is not of the protocol: {error}"))
            return
        if fin:
            self.fail(ConnectionLost(f"{self.link.address} ended the stream before it answered"))

    def _on_answer(self, answer: Any) -> None:
        id = getattr(answer, "request_id", None)
        if isinstance(answer, messages.Subscribed):
            id = answer.subscription_id
        if not isinstance(id, int | str) and self._waiting:
            while self._order and self._order[0] not in self._waiting:
                self._order.popleft()
            # A text is in the answer to whoever sent one, whatever the answer is.
            id = self._order[0] if isinstance(self._order[0], int) else None
        future = self._waiting.pop(id, None) if isinstance(id, int | str) else None
        if not self._waiting:
            self._order.clear()
        if future is None or future.done():
            if isinstance(answer, messages.Error | messages.PublishError):
                self.link.on_refusal(refusal(answer.message))
            return
        if isinstance(answer, messages.Error | messages.PublishError):
            future.set_exception(refusal(answer.message))
        else:
            future.set_result(answer)

    def on_reset(self) -> None:
        self.fail(ConnectionLost(f"{self.link.address} gave up the stream before it answered"))

    def fail(self, error: ClientError) -> None:
        self.ended = True
        waiting, self._waiting = self._waiting, {}
        self._order.clear()
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever waited may have given up


class Events:
    """A stream that the server opened: a hello, then events."""

    def __init__(self, link: "FelixLink", number: int) -> None:
        self.link = link
        self.number = number
        self._decoder = wire.Decoder()
        self._handler: Callable[[list[bytes] | ClientError | None], None] | None = None
        self.id: int | None = None

    def on_data(self, data: bytes, fin: bool) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._on_frame(frame)
        except (wire.FrameError, wire.PayloadError) as error:
            self.fail(ProtocolError(f"{self.link.address} sent what is not of the protocol: {error}"))
            self.link.stop(self.number)
            return
        if fin and self._handler is not None:
            self._handler(None)

    def _on_frame(self, frame: wire.Frame) -> None:
        if frame.flags & wire.FLAG_EVENT_BATCH:
            payloads = wire.decode_event_batch(frame.payload)[1]
        else:
            message = wire.decode_message(frame.payload)
            if isinstance(message, messages.EventStreamHello):
                if isinstance(message.subscription_id, int):
                    self.id = message.subscription_id
                    self._handler = self.link.claim(self.id, self)
                return
            if isinstance(message, messages.Event):
                payloads = [wire.payload_of(message.payload) or b""]
            elif isinstance(message, messages.EventBatch):
                payloads = wire.payloads_of(message.payloads)
            else:
                return
        if payloads and self._handler is not None:
            self._handler(payloads)

    def on_reset(self) -> None:
        self.fail(ConnectionLost(f"{self.link.address} gave up the stream of events"))

    def fail(self, error: ClientError) -> None:
        if self._handler is not None:
            self._handler(error)


class FelixLink:
    """A connection, from connect() until `down` says why it is no more."""

    def __init__(
        self,
        address: HostPort,
        engine: Engine,
        settings: Settings,
        trust: Trust,
        keep_alive: float,
        *,
        on_refusal: Callable[[FelixRefused], None],
        on_lost: Callable[[ConnectionLost], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.address = address
        self.on_refusal = on_refusal
        self._on_lost = on_lost
        self.down: ClientError | None = None
        self._engine = engine
        self._settings = settings
        self._trust = trust
        self._keep_alive = keep_alive
        self._connection: EngineConnection
        self._endpoint: DatagramSocket | None = None
        self._streams: dict[int, Requests | Events] = {}
        self._claims: dict[int, Callable[[list[bytes] | ClientError | None], None]] = {}
        self._connected: asyncio.Future[None] = self.loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._ping_timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._transmit_due = False
        self._moved: list[asyncio.Future[None]] = []  # of those who wait until some of their bytes were sent
        self._pings = 0
        self._place: Any = None
        self._holding: set[object] = set()

    async def connect(self, seconds: float) -> None:
        """Makes the connection; ConnectionFailed or OperationTimeout say why not."""
        try:
            async with asyncio.timeout(seconds):
                self._connection = self._new_connection()
                try:
                    await self._open_socket()
                except OSError as error:
                    raise cannot_connect(self.address, error) from error
                self._connection.connect(self._place, self.loop.time())
                self._transmit()
                await asyncio.shield(self._connected)
        except TimeoutError:
            self.abort()
            raise OperationTimeout(
                f"{self.address} did not accept a connection within {seconds:g} s"
            ) from None
        except BaseException:
            self.abort()
            raise
        if self._keep_alive:
            self._ping_timer = self.loop.call_later(self._keep_alive, self._ping)

    def _new_connection(self) -> EngineConnection:
        try:
            return self._engine.client(self._settings, self._trust)
        except (OSError, ValueError) as error:
            raise ConnectionFailed(
                f"cannot connect to {self.address} with these certificates: {error}"
            ) from error

    async def _open_socket(self) -> None:
        found = await self.loop.getaddrinfo(self.address.host, self.address.port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, self._place = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", 0))
            if sys.platform == "linux" and self._place[0] in ("127.0.0.1", "::1"):
                # So it hears that nobody listens. A server with several addresses may answer from another one, and
                # other systems take no address with the datagrams of a connected socket.
                sock.connect(self._place)
        except BaseException:
            sock.close()
            raise
        self._endpoint = DatagramSocket(sock, self.loop, self._on_datagrams, self._on_refused)

    def _on_refused(self, error: ConnectionRefusedError) -> None:
        """Nobody listens there. Of a connection that was made that says little: its server may come back."""
        if not self._connected.done():
            self._fail(cannot_connect(self.address, error))

    # --- streams --------------------------------------------------------------------------------------------

    def hold(self, who: object, too_much: bool) -> None:
        """Reads nothing while somebody has more than it should: what is not read is not acknowledged, and the server
        waits."""
        (self._holding.add if too_much else self._holding.discard)(who)
        if self._endpoint is not None and self.down is None:
            self._endpoint.pause(bool(self._holding))

    def requests(self) -> Requests:
        """A new bidirectional stream."""
        number = self._connection.get_next_available_stream_id()
        self._connection.send_stream_data(number, b"")  # so that the number is taken
        stream = self._streams[number] = Requests(self, number)
        return stream

    def send(self, number: int, data: bytes, fin: bool = False) -> None:
        if self.down is not None:
            raise self.down
        self._connection.send_stream_data(number, data, fin)
        self._transmit_soon()

    async def room(self, number: int) -> None:
        """Returns when the stream may be written to."""
        while self.down is None and self._connection.unsent(number) >= HIGH_WATER:
            moved = self.loop.create_future()
            self._moved.append(moved)
            await moved
        if self.down is not None:
            raise self.down

    async def settled(self) -> None:
        """Returns when the server has received all that was sent."""
        while self.down is None and not self._connection.settled():
            moved = self.loop.create_future()
            self._moved.append(moved)
            await moved
        if self.down is not None:
            raise self.down

    def expect(self, id: int, handler: Callable[[list[bytes] | ClientError | None], None]) -> None:
        """Has the events of a subscription handled; None is their end."""
        self._claims[id] = handler

    def claim(self, id: int, events: Events) -> Callable[[list[bytes] | ClientError | None], None] | None:
        handler = self._claims.get(id)
        if handler is None:
            self.stop(events.number)
        return handler

    def unsubscribe(self, id: int) -> None:
        """Tells the server to send no more of a subscription."""
        self._claims.pop(id, None)
        for stream in self._streams.values():
            if isinstance(stream, Events) and stream.id == id and self.down is None:
                self.stop(stream.number)
                break

    def stop(self, number: int) -> None:
        try:
            self._connection.stop_stream(number, 0)
        except ValueError:
            return  # it has ended already
        self._transmit_soon()

    def finish(self, stream: Requests) -> None:
        """Says that no more requests come on a stream."""
        if self.down is None:
            self.send(stream.number, b"", fin=True)

    # --- packets --------------------------------------------------------------------------------------------

    def _on_datagrams(self, batch: Batch) -> None:
        now = self.loop.time()
        for data, size, address in batch:
            if size < len(data):
                self._connection.receive_many(data, size, address, now)
            else:
                self._connection.receive_datagram(data, address, now)
        self._handle_events()
        self._transmit()

    def _handle_events(self) -> None:
        kinds = self._engine.events
        while (event := self._connection.next_event()) is not None:
            if isinstance(event, kinds.StreamDataReceived):
                stream = self._streams.get(event.stream_id)
                if stream is None:
                    if event.stream_id & 3 != 3:
                        continue
                    stream = self._streams[event.stream_id] = Events(self, event.stream_id)
                if event.end_stream:
                    del self._streams[event.stream_id]
                stream.on_data(event.data, event.end_stream)
            elif isinstance(event, kinds.StreamReset):
                if (stream := self._streams.pop(event.stream_id, None)) is not None:
                    stream.on_reset()
            elif isinstance(event, kinds.HandshakeCompleted):
                if not self._connected.done():
                    self._connected.set_result(None)
            elif isinstance(event, kinds.ConnectionTerminated):
                self._on_end(event.error_code, event.reason_phrase)

    def _transmit_soon(self) -> None:
        if not self._transmit_due:
            self._transmit_due = True
            self.loop.call_soon(self._transmit)

    def _transmit(self) -> None:
        self._transmit_due = False
        if self._endpoint is None or self.down is not None:
            return
        datagrams = self._connection.datagrams_to_send(self.loop.time())
        if datagrams:
            self._endpoint.send(datagrams)
        if self._moved:
            moved, self._moved = self._moved, []
            for future in moved:
                if not future.done():
                    future.set_result(None)
        self._arm()

    def _arm(self) -> None:
        at = self._connection.get_timer()
        if at is None:
            return
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self.loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self.down is not None:
            return
        now = self.loop.time()
        at = self._connection.get_timer()
        if at is not None and at <= now + 0.0005:
            self._connection.handle_timer(max(now, at))
            self._handle_events()
            self._transmit()
        if self.down is None:
            self._arm()

    def _ping(self) -> None:
        self._ping_timer = self.loop.call_later(self._keep_alive, self._ping)
        self._pings += 1
        self._connection.send_ping(self._pings)
        self._transmit_soon()

    # --- ends -----------------------------------------------------------------------------------------------

    def _on_end(self, code: int, reason: str) -> None:
        why = reason or f"error code {code:#x}"
        if not self._connected.done():
            self._fail(ConnectionFailed(f"cannot connect to {self.address}: {why}"))
        else:
            self._fail(ConnectionLost(f"the connection to {self.address} was lost: {why}"))

    def _fail(self, error: ClientError) -> None:
        if self.down is not None:
            return
        self.down = error
        for timer in (self._timer, self._ping_timer):
            if timer is not None:
                timer.cancel()
        if self._endpoint is not None:
            self._endpoint.close()
        if not self._connected.done():
            self._connected.set_exception(error)
            self._connected.exception()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        claims, self._claims = self._claims, {}
        for handler in claims.values():
            handler(error)
        for future in self._moved:
            if not future.done():
                future.set_result(None)
        if isinstance(error, ConnectionLost):
            self._on_lost(error)

    def close(self, error: ClientError) -> None:
        """Ends the connection now."""
        if self.down is None and self._endpoint is not None:
            self._connection.close(error_code=0, reason_phrase="")
            self._endpoint.send(self._connection.datagrams_to_send(self.loop.time()))
        self._fail(error)

    def abort(self) -> None:
        self.close(ConnectionFailed(f"no connection to {self.address} was made"))
