"""A BlipMQ client for asyncio: publish, subscribe, acknowledge, over connections that come back by
themselves.

    async with BlipmqClient("127.0.0.1:5555", key="dev-key") as client:
        await client.publish("demo", b"hello", qos=1)

        async with client.subscribe("demo", qos=1) as messages:
            async for message in messages:
                print(message.payload)
                messages.ack_nowait(message)

Everything is pipelined: what the tasks of one loop turn send leaves in one write, and no call waits for
another's answer. It knows nothing of the gateway's insides, and works with any server of the protocol.
"""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Final, NamedTuple, Self

from typing_extensions import Buffer

from headrace.clients.blipmq_link import (
    FIRST_CORRELATION,
    Acknowledgement,
    AuthenticationError,
    BadRequest,
    BlipmqNack,
    Link,
    NotAllowed,
    Publication,
    RefusedMessages,
    ServerError,
    UnknownDelivery,
    VersionError,
)
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
from headrace.clients.link import WRITE_BYTES
from headrace.clients.reconnect import FIRST_PAUSE, LONGEST_PAUSE, ReconnectingClient
from headrace.wire.blipmq import Publish, encode_poll, encode_publish, encode_publish_many, encode_subscribe

__all__ = [
    "AuthenticationError",
    "BadRequest",
    "BlipmqClient",
    "BlipmqNack",
    "ClientClosed",
    "ClientError",
    "ConnectionFailed",
    "ConnectionLost",
    "Message",
    "NotAllowed",
    "OperationTimeout",
    "ProtocolError",
    "RefusedMessages",
    "ServerError",
    "Subscription",
    "UnknownDelivery",
    "VersionError",
]

# A timer that is this late says that the loop, not the server, was busy.
STANDSTILL_SECONDS: Final = 0.1
# A poll that found nothing is repeated after this, then after twice as long, and so on up to max_wait.
LEAST_POLL_WAIT: Final = 0.001
# How long a message may wait in a subscription's buffer. The gateway delivers again after 2 s by default, and
# what is fetched ahead of a slow consumer would run into that.
MOST_BUFFERED_SECONDS: Final = 0.5
# How fast the estimate of a consumer's pace follows its last message.
PACE_WEIGHT: Final = 0.2


class Message(NamedTuple):
    """A message that was delivered."""

    topic: str
    payload: bytes
    qos: int
    """What the delivery has: the lower of what it was published and subscribed with."""
    tag: int | None
    """What a QoS 1 delivery is acknowledged by, the same each time it is delivered; None at QoS 0."""


class BlipmqClient(ReconnectingClient[Link]):
    """A client of one BlipMQ server.

    `address` is "host:port", "[v6]:port" or "unix:/path". `key` is the API key. With `tls` the connection is
    encrypted; `server_hostname` is the name to find in the server's certificate if it is not the host's.

    `timeout` is how many seconds any operation may take, connecting and waiting for a lost connection
    included; then it raises OperationTimeout. A subscription waits for messages without a limit.

    With `reconnect` a lost connection is made again, with growing and randomly shortened pauses from
    `reconnect_delay` to `max_reconnect_delay`; operations wait for it meanwhile. Without, and when the server
    does not take the key any more, all that is under way and all that follows raises the reason.

    `on_refusal` is called for each refused frame that nobody waits for, that is for QoS 0 messages. The first
    of them is also raised by the next flush(), or by close().
    """

    def __init__(
        self,
        address: str,
        *,
        key: str,
        tls: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        timeout: float = 10.0,
        reconnect: bool = True,
        reconnect_delay: float = FIRST_PAUSE,
        max_reconnect_delay: float = LONGEST_PAUSE,
        on_refusal: Callable[[BlipmqNack], None] | None = None,
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
        self._key = key
        self._on_refusal = on_refusal
        self._refusal: BlipmqNack | None = None  # the first that flush() has not raised
        self._next_correlation = FIRST_CORRELATION
        self._carried: list[Publication] = []  # unconfirmed, to be sent again by the next link
        self._subscriptions: dict[Subscription, None] = {}  # in order
        self._watch: asyncio.TimerHandle | None = None

    # --- connecting and closing -----------------------------------------------------------------------------

    def _new_link(self) -> Link:
        return Link(self._loop, self, self.address)

    async def _greet(self, link: Link) -> None:
        await link.handshake(self._key)

    def _is_final(self, error: ClientError) -> bool:
        return isinstance(error, BlipmqNack)

    async def close(self) -> None:
        """Waits until the server has handled all that was sent, then disconnects.

        Raises what the server refused of it, as flush() does, and ConnectionLost if the connection ended
        before.
        """
        try:
            if self._connection is not None and (self._connection.busy or self._refusal is not None):
                await self.flush()
        finally:
            await self._shut()

    # --- publishing -----------------------------------------------------------------------------------------

    async def publish(self, topic: str, payload: Buffer, qos: int = 0, *, retry: bool = True) -> None:
        """Publishes one message.

        QoS 0 returns when the message was handed over to be sent; it waits only where the server does not
        keep up. QoS 1 returns when the server has it safe, and raises a BlipmqNack if it refused it. A
        message whose connection was lost before that is sent again by the next one, so it may arrive twice; a
        second loss raises ConnectionLost, and so does the first without `retry`.
        """
        check_topic(topic, qos)
        correlation = self.take_correlations(1)
        frame = encode_publish(topic, payload, qos, correlation)
        if qos == 0:
            link = self._connection
            if link is None or link.paused:
                link = await self._ready("publish")
            if link.tell(frame):
                await asyncio.sleep(0)
        else:
            await self._publish_safely([frame], correlation, 1, retry)

    async def publish_many(
        self, topic: str, payloads: Iterable[Buffer], qos: int = 0, *, retry: bool = True
    ) -> None:
        """Publishes messages to one topic, in order and together, as publish() does with one.

        At QoS 1 it returns when all are safe. If some were refused, RefusedMessages says which: the others
        are safe.
        """
        check_topic(topic, qos)
        messages = payloads if isinstance(payloads, Sequence) else tuple(payloads)
        if not messages:
            return
        first = self.take_correlations(len(messages))
        chunks = list(encode_chunks(topic, messages, qos, first))
        if qos:
            await self._publish_safely(chunks, first, len(messages), retry)
            return
        link = await self._ready("publish")
        for number, chunk in enumerate(chunks):
            if number:
                await asyncio.sleep(0)
                if await self._ready("publish") is not link:
                    raise ConnectionLost(
                        f"the connection to {self.address} was lost while {len(messages)} messages were sent"
                    )
            link.tell(chunk)

    async def _publish_safely(self, chunks: list[bytes], first: int, count: int, retry: bool) -> None:
        link = self._connection
        if link is None or link.paused:
            link = await self._ready("publish")
        confirmed: asyncio.Future[None] = self._loop.create_future()
        publication = Publication(chunks, first, count, retry, self._loop.time(), confirmed)
        link.publish(publication)
        try:
            while publication.put < len(chunks) and not confirmed.done():
                await asyncio.sleep(0)
                link = await self._ready("publish")
                if not confirmed.done():
                    link.publish(publication)
        except BaseException:
            confirmed.cancel()  # so that nothing sends it again
            raise
        await confirmed

    async def flush(self) -> None:
        """Returns when the server has handled everything that was sent before, QoS 0 messages included.

        Raises the first refusal of a QoS 0 message since the last flush(); ConnectionLost if the connection
        ended before the answer, because then some of it may not have arrived.
        """
        link = await self._ready("flush")
        await link.pass_fence()
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            raise refusal

    async def ping(self) -> float:
        """The time to the server and back, in seconds. If QoS 1 messages are on their way, the server's
        answer waits until those are safe."""
        link = await self._ready("ping")
        passed = link.pass_fence()
        start = time.perf_counter()  # the loop's clock may tick in milliseconds
        link.write_now()
        await passed
        return time.perf_counter() - start

    # --- subscribing ----------------------------------------------------------------------------------------

    def subscribe(
        self,
        topic: str,
        qos: int = 1,
        *,
        prefetch: int = 64,
        auto_ack: bool = False,
        max_wait: float = 0.05,
        on_gap: Callable[["Subscription"], None] | None = None,
    ) -> "Subscription":
        """A new subscription, from now on; to be used as `async with client.subscribe(...) as messages`.

        At QoS 1 it is durable: the server keeps it, by its id, with all that is not acknowledged, across lost
        connections and its own restarts. At QoS 0 it ends with its connection; after a reconnection it is
        made anew, `gaps` counts that and `on_gap` is called.

        `prefetch` is how many messages are asked for ahead of the consumer. A consumer that is slow gets
        fewer: what it could not take within half a second is left to the server. `auto_ack` acknowledges a
        message when the next one is asked for, or when the block is left without an exception. `max_wait` is
        the longest pause between two polls that find nothing.
        """
        check_topic(topic, qos)
        return Subscription(self, topic, qos, 0, prefetch, auto_ack, max_wait, on_gap)

    def resume(
        self,
        subscription: int,
        topic: str,
        *,
        prefetch: int = 64,
        auto_ack: bool = False,
        max_wait: float = 0.05,
    ) -> "Subscription":
        """Goes on with a durable subscription of the same key by its id, as after a restart of this program.

        The protocol does not tell an id that the server does not have from one that has no messages: such a
        subscription stays silent.
        """
        check_topic(topic, 1)
        if subscription < 1:
            raise ValueError(f"a subscription id is 1 or more, not {subscription}")
        return Subscription(self, topic, 1, subscription, prefetch, auto_ack, max_wait, None)

    # --- connections lost and found -------------------------------------------------------------------------

    def _take_over(self, link: Link) -> None:
        super()._take_over(link)
        for publication in self._carried:
            if not publication.waiter.done():
                chunks, publication.put = publication.put, 0
                for _ in range(chunks):
                    link.publish(publication)
        for subscription in list(self._subscriptions):
            subscription.relink(link)

    def _leave(self, link: Link, error: ClientError, carry: bool) -> None:
        self._carried.clear()  # what is left of it is among the link's
        for fence in link.outstanding():
            for ack in fence.acks.values():
                ack.poller.on_lost_ack(ack)
            for publication in fence.publications:
                if publication.fences and not publication.waiter.done():
                    publication.losses += 1
                    publication.refused = None
                    if (
                        carry
                        and publication.retry
                        and publication.losses == 1
                        and not self._overdue(publication)
                    ):
                        self._carried.append(publication)
                    else:
                        publication.waiter.set_exception(again(error))
                publication.fences = 0
        self._watch_time()

    def _finish(self, error: ClientError) -> None:
        super()._finish(error)
        for publication in self._carried:
            if not publication.waiter.done():
                publication.waiter.set_exception(again(error))
        self._carried.clear()
        for subscription in list(self._subscriptions):
            subscription.fail(error)
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    # --- time -----------------------------------------------------------------------------------------------

    def _overdue(self, publication: Publication) -> bool:
        return publication.since + self._timeout <= self._loop.time()

    def _check_time(self, planned: float) -> None:
        """One timer for everything that waits. A link that does not answer in time is given up: answers come
        in order, so none will come before that one."""
        self._watch = None
        now = self._loop.time()
        if now - planned > STANDSTILL_SECONDS:
            # The loop stood still, so the answer may be here and nobody has read it yet.
            again_at = now + STANDSTILL_SECONDS
            self._watch = self._loop.call_at(again_at, self._check_time, again_at)
            return
        no_answer = OperationTimeout(f"{self.address} did not answer within {self._timeout:g} s")
        if self._connection is not None:
            oldest = self._connection.oldest()
            if oldest is not None and oldest + self._timeout <= now:
                self._connection.fail(no_answer)
        for publication in self._carried:
            if not publication.waiter.done() and self._overdue(publication):
                publication.waiter.set_exception(again(no_answer))
        self._carried = [publication for publication in self._carried if not publication.waiter.done()]
        self._watch_time()

    def _watch_time(self) -> None:
        since = [publication.since for publication in self._carried]
        if self._connection is not None and (oldest := self._connection.oldest()) is not None:
            since.append(oldest)
        if since and self._watch is None:
            planned = min(since) + self._timeout
            self._watch = self._loop.call_at(planned, self._check_time, planned)

    # --- what a link tells its owner ------------------------------------------------------------------------

    def take_correlations(self, count: int) -> int:
        first = self._next_correlation
        self._next_correlation += count
        return first

    def on_fence_sent(self) -> None:
        if self._watch is None:
            self._watch_time()

    def on_refusal(self, error: BlipmqNack) -> None:
        if self._refusal is None:
            self._refusal = error
        if self._on_refusal is not None:
            self._on_refusal(error)


class Subscription:
    """Messages of one topic, as an asynchronous iterator. Made by BlipmqClient.subscribe() and resume().

    Deliveries are asked for ahead of the consumer, in rounds: so many POLLs, and a fence that tells when they
    are answered. A round that brought less than it asked for found the end of what there is, and the next one
    waits.
    """

    def __init__(
        self,
        client: BlipmqClient,
        topic: str,
        qos: int,
        subscription: int,
        prefetch: int,
        auto_ack: bool,
        max_wait: float,
        on_gap: Callable[["Subscription"], None] | None,
    ) -> None:
        if prefetch < 1:
            raise ValueError(f"prefetch is 1 or more, not {prefetch}")
        if max_wait <= 0:
            raise ValueError(f"max_wait is more than 0 seconds, not {max_wait}")
        self.id = subscription
        """What the server calls it; at QoS 1 a later resume() takes it. 0 while there is none."""
        self.topic = topic
        self.qos = qos
        self.gaps = 0
        """How often a QoS 0 subscription was made anew, each time missing what was published meanwhile."""
        self.late_acks = 0
        """Acknowledgements nobody waited for that were refused: the message had been acknowledged or given
        up."""
        self._client = client
        self._prefetch = prefetch
        self._auto_ack = auto_ack
        self._max_wait = max_wait
        self._on_gap = on_gap
        self._buffer: deque[Message] = deque()
        self._here: set[int | None] = set()  # tags that a new connection may deliver again for nothing
        self._kept_acks: list[Acknowledgement] = []  # for the next link
        self._poll_frame = b""
        self._poll_correlation = 0
        self._ramp = 1  # how many to ask for at once; grows while rounds come back full
        self._pace: float | None = None  # seconds that the consumer takes for a message; None: not known yet
        self._handed: Message | None = None  # what the consumer has
        self._handed_at = 0.0
        self._wait = min(LEAST_POLL_WAIT, max_wait)  # before the next poll, if this one finds nothing
        self._round = False  # one is under way
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None  # the consumer's
        self._entered = False
        self._iterated = False
        self._error: ClientError | None = ClientClosed("the subscription's block was not entered yet")

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a subscription is entered once; make another one")
        self._entered = True
        client = self._client
        if client._end is not None:
            raise again(client._end)
        subscription = self.id
        while not subscription:
            link = await client._ready("subscribe")
            correlation = client.take_correlations(1)
            subscription = await link.call(encode_subscribe(self.topic, self.qos, correlation), correlation)
            if self.qos == 0 and link is not client._connection:
                subscription = 0  # it went with its connection, between the answer and now
        self._error = None
        self._named(subscription)
        client._subscriptions[self] = None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._auto_ack and self._handed is not None and self._error is None:
            self.ack_nowait(self._handed)
        self.fail(ClientClosed("the subscription's block was left"))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        if self._handed is not None:
            took = time.perf_counter() - self._handed_at
            self._pace = took if self._pace is None else self._pace + PACE_WEIGHT * (took - self._pace)
            if self._auto_ack:
                self.ack_nowait(self._handed)
            self._handed = None
        self._iterated = True
        while not self._buffer:
            if self._error is not None:
                raise again(self._error)
            if self._waiter is not None:
                raise RuntimeError("one task at a time takes a subscription's messages")
            self._waiter = self._client._loop.create_future()
            self._ask()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._buffer.popleft()
        self._ask()
        self._handed = message
        self._handed_at = time.perf_counter()
        return message

    async def ack(self, message: Message) -> None:
        """Acknowledges a message; returns when the server has taken note.

        Raises UnknownDelivery if no delivery of it waits for that. A QoS 0 message needs none: nothing
        happens.
        """
        if message.tag is None:
            return
        client = self._client
        late = f"{client.address} did not confirm an acknowledgement within {client._timeout:g} s"
        async with Limit(client._timeout, late):
            link = await client._ready("acknowledge")
            waiter: asyncio.Future[None] = client._loop.create_future()
            link.acknowledge(self.id, Acknowledgement(self, message.tag, waiter, False))
            await waiter

    def ack_nowait(self, message: Message) -> None:
        """Acknowledges a message at the end of this loop turn; `late_acks` counts those that were refused."""
        if message.tag is None:
            return
        if self._client._end is not None:
            raise again(self._client._end)
        ack = Acknowledgement(self, message.tag, None, False)
        if self._client._connection is None:
            self._kept_acks.append(ack)
        else:
            self._client._connection.acknowledge(self.id, ack)

    # --- polling --------------------------------------------------------------------------------------------

    def _named(self, subscription: int) -> None:
        self.id = subscription
        self._poll_correlation = self._client.take_correlations(1)
        self._poll_frame = encode_poll(subscription, self._poll_correlation)

    def _window(self) -> int:
        """How many messages may be here at once."""
        at_this_pace = self._ramp
        if self._pace is None:
            at_this_pace = 0
        elif self._pace * self._ramp > MOST_BUFFERED_SECONDS:
            at_this_pace = int(MOST_BUFFERED_SECONDS / self._pace)
        return max(at_this_pace, 1 if self._waiter is not None else 0)

    def _ask(self) -> None:
        """Begins a round if it is time for one."""
        link = self._client._connection
        if self._round or self._timer is not None or link is None or not self.id or self._error is not None:
            return
        window = self._window()
        held = len(self._buffer)
        if window and held <= window // 2:
            self._round = True
            link.poll(self, self._poll_frame, self._poll_correlation, window - held)

    def _ask_again(self) -> None:
        self._timer = None
        self._ask()

    def _pause(self) -> None:
        if self._error is None:
            self._timer = self._client._loop.call_later(self._wait, self._ask_again)

    # --- what a link and the client tell --------------------------------------------------------------------

    def on_delivery(self, frame: Publish) -> None:
        if self._error is not None:
            return  # left: what is to be acknowledged will be delivered again
        if frame.topic != self.topic:
            self.fail(
                ProtocolError(f"subscription {self.id} is of topic {frame.topic!r}, not {self.topic!r}")
            )
            return
        tag = frame.correlation if frame.qos else None
        if tag in self._here:
            self._here.remove(tag)
            return
        self._buffer.append(Message(frame.topic, frame.message, frame.qos, tag))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def on_round_end(self, asked: int, got: int) -> None:
        self._round = False
        if got:
            self._wait = min(LEAST_POLL_WAIT, self._max_wait)
        if got == asked:
            self._ramp = min(self._ramp * 2, self._prefetch)
            self._ask()
        else:
            self._pause()
            self._wait = min(self._wait * 2, self._max_wait)

    def on_refused_poll(self, error: BlipmqNack) -> None:
        self.fail(error)

    def on_refused_ack(self, error: BlipmqNack) -> None:
        self.late_acks += 1

    def on_lost_ack(self, ack: Acknowledgement) -> None:
        ack.again = True
        self._kept_acks.append(ack)

    def relink(self, link: Link) -> None:
        """Goes on with a new connection."""
        self._rest()
        acks, self._kept_acks = self._kept_acks, []
        if self.qos:
            # The server takes what it has no acknowledgement of for undelivered, but this much is still here.
            self._here = {message.tag for message in self._buffer}
            if self._handed is not None:
                self._here.add(self._handed.tag)
            for ack in acks:
                if ack.waiter is None or not ack.waiter.done():
                    link.acknowledge(self.id, ack)
            if self._iterated:
                self._ask()
        else:
            self.id = 0
            self.gaps += 1
            correlation = self._client.take_correlations(1)
            answer = link.call(encode_subscribe(self.topic, 0, correlation), correlation)
            answer.add_done_callback(self._resubscribed)

    def _resubscribed(self, answer: asyncio.Future[int]) -> None:
        error = answer.exception()
        if error is None:
            self._named(answer.result())
            if self._on_gap is not None:
                self._on_gap(self)
            if self._iterated:
                self._ask()
        elif isinstance(error, BlipmqNack):
            self.fail(error)

    def fail(self, error: ClientError) -> None:
        """Ends it: the consumer gets what is here, and then the error."""
        if self._error is None:
            self._error = error
        self._rest()
        self._client._subscriptions.pop(self, None)
        for ack in self._kept_acks:
            if ack.waiter is not None and not ack.waiter.done():
                ack.waiter.set_exception(again(error))
        self._kept_acks.clear()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _rest(self) -> None:
        self._round = False
        self._wait = min(LEAST_POLL_WAIT, self._max_wait)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def check_topic(topic: str, qos: int) -> None:
    """What the server would refuse, where nobody may be waiting for its answer."""
    if not topic:
        raise ValueError("a topic has at least one character")
    if qos not in (0, 1):
        raise ValueError(f"QoS is 0 or 1, not {qos!r}")


def encode_chunks(topic: str, messages: Sequence[Buffer], qos: int, first: int) -> Iterator[bytes]:
    """All messages as frames, in pieces of about what is written at once."""
    size = sum(
        len(message) if isinstance(message, bytes) else memoryview(message).nbytes for message in messages
    )
    step = max(1, len(messages) * WRITE_BYTES // max(size, WRITE_BYTES))
    for start in range(0, len(messages), step):
        yield encode_publish_many(topic, messages[start : start + step], qos, first + start)
