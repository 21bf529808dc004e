"""One BlipMQ connection of a client: what was sent and waits for an answer, in order, and one write per loop
turn.

It knows nothing of reconnecting or of the API: who owns a link carries over what it leaves unfinished.

The protocol answers neither a PUBLISH, nor an ACK, nor an empty POLL, but it answers all frames in order. So
a PING is put behind them as a fence: when its PONG is there, everything before it was handled, and what was
refused has had its NACK. A fence has the polls of at most one subscription before it, for deliveries do not
name theirs.
"""

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar, Final, Protocol, cast

from headrace.clients.errors import KEY_HINT, ClientError, again
from headrace.clients.link import StreamLink, StreamOwner
from headrace.wire.blipmq import (
    PROTOCOL_VERSION,
    Ack,
    Decoder,
    FrameError,
    Nack,
    Pong,
    Publish,
    encode_ack,
    encode_auth,
    encode_hello,
    encode_ping,
)

# The NACK of an ACK carries the delivery tag where others carry the client's own correlation id. Tags count
# up from 1, so ids from the upper half are never taken for one.
FIRST_CORRELATION: Final = 1 << 63


class BlipmqNack(ClientError):
    """The server refused a frame. `code` and `text` are its words, `correlation` is the frame's id (a refused
    acknowledgement's is its delivery tag)."""

    def __init__(self, code: int, text: str, correlation: int) -> None:
        super().__init__(code, text, correlation)
        self.code = code
        self.text = text
        self.correlation = correlation

    def __str__(self) -> str:
        return f"{self.text} ({self.code})"


class BadRequest(BlipmqNack):
    """400: the server does not take such a frame."""


class NotAllowed(BlipmqNack):
    """401: the key has no right to do this."""


class AuthenticationError(NotAllowed):
    """401 while connecting, or because the key was taken away: the server does not know it."""

    hint = KEY_HINT


class UnknownDelivery(BlipmqNack):
    """404: no delivery with this tag waits for an acknowledgement: it was acknowledged before, or given
    up."""


class VersionError(BlipmqNack):
    """426: the server speaks another version of the protocol."""


class ServerError(BlipmqNack):
    """500: the server could not do it, and may be able to later."""


NACKS: Final[dict[int, type[BlipmqNack]]] = {
    400: BadRequest,
    401: NotAllowed,
    404: UnknownDelivery,
    426: VersionError,
    500: ServerError,
}


def nack_error(nack: Nack) -> BlipmqNack:
    return NACKS.get(nack.code, BlipmqNack)(nack.code, nack.text, nack.correlation)


class RefusedMessages(BlipmqNack):
    """Some messages of a publish_many() were refused: `refused` has each one's error by its place in the
    list. `code`, `text` and `correlation` are the first one's."""

    def __init__(self, refused: dict[int, BlipmqNack], count: int) -> None:
        first = refused[min(refused)]
        super().__init__(first.code, first.text, first.correlation)
        self.args = (refused, count)
        self.refused = refused
        self.count = count

    def __str__(self) -> str:
        return f"{len(self.refused)} of {self.count} messages were refused, first: {self.text} ({self.code})"


class Publication:
    """QoS 1 messages of one call that the server has not confirmed: what to send again, and who waits."""

    __slots__ = ("chunks", "count", "fences", "first", "losses", "put", "refused", "retry", "since", "waiter")

    def __init__(
        self,
        chunks: list[bytes],
        first: int,
        count: int,
        retry: bool,
        since: float,
        waiter: asyncio.Future[None],
    ) -> None:
        self.chunks = chunks  # whole frames
        self.put = 0  # chunks that went to a link
        self.first = first  # correlation ids: first, first + 1, ...
        self.count = count
        self.fences = 0  # of its link, still without their PONG
        self.losses = 0  # links that were lost meanwhile
        self.refused: dict[int, BlipmqNack] | None = None
        self.retry = retry
        self.since = since
        self.waiter = waiter

    def confirm(self) -> None:
        if self.put < len(self.chunks) or self.waiter.done():
            return
        if self.refused is None:
            self.waiter.set_result(None)
        elif self.count == 1:
            self.waiter.set_exception(self.refused[0])
        else:
            self.waiter.set_exception(RefusedMessages(self.refused, self.count))

    def refuse(self, error: BlipmqNack) -> None:
        if self.refused is None:
            self.refused = {}
        self.refused[error.correlation - self.first] = error


class Poller(Protocol):
    """Who polls: a subscription."""

    def on_delivery(self, frame: Publish) -> None: ...
    def on_round_end(self, asked: int, got: int) -> None: ...
    def on_refused_poll(self, error: BlipmqNack) -> None: ...
    def on_refused_ack(self, error: BlipmqNack) -> None: ...
    def on_lost_ack(self, ack: "Acknowledgement") -> None: ...


class Acknowledgement:
    """An ACK that no fence has passed yet. `again`: a link that was lost had it before, and may have
    delivered it."""

    __slots__ = ("again", "poller", "tag", "waiter")

    def __init__(self, poller: Poller, tag: int, waiter: asyncio.Future[None] | None, again: bool) -> None:
        self.poller = poller
        self.tag = tag
        self.waiter = waiter
        self.again = again


class Fence:
    """What was sent between two PINGs."""

    __slots__ = (
        "acks",
        "asked",
        "correlation",
        "got",
        "poll_correlation",
        "poller",
        "publications",
        "since",
        "sorted_to",
        "waiters",
        "wanted",
    )

    def __init__(self) -> None:
        self.since = 0.0  # when the first frame was put
        self.correlation = 0  # of the PING, once it is sent
        self.wanted = False  # somebody waits for the PONG
        self.waiters: list[asyncio.Future[None]] = []
        self.publications: list[Publication] = []
        self.sorted_to = 0  # how many of them are in the order of their ids
        self.acks: dict[int, Acknowledgement] = {}
        self.poller: Poller | None = None
        self.poll_correlation = 0
        self.asked = 0
        self.got = 0

    def publication(self, correlation: int) -> Publication | None:
        """Whose message has this id. Publications of several chunks may come out of order, so they are sorted
        first."""
        if self.sorted_to != len(self.publications):
            self.publications.sort(key=lambda publication: publication.first)
            self.sorted_to = len(self.publications)
        at = bisect_right(self.publications, correlation, key=lambda publication: publication.first) - 1
        if at >= 0 and correlation < self.publications[at].first + self.publications[at].count:
            return self.publications[at]
        return None


class LinkOwner(StreamOwner, Protocol):
    """Who a link belongs to: a client."""

    def take_correlations(self, count: int) -> int:
        """The first of so many ids that nothing else has."""

    def on_fence_sent(self) -> None: ...
    def on_refusal(self, error: BlipmqNack) -> None:
        """A frame that nobody waits for was refused."""


class Link(StreamLink):
    """A connection, from the handshake to its end."""

    protocol: ClassVar[str] = "BlipMQ"
    _owner: LinkOwner

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: LinkOwner, where: str) -> None:
        super().__init__(loop, owner, where)
        self.calls: dict[
            int, tuple[asyncio.Future[int], float]
        ] = {}  # HELLO, AUTH, SUBSCRIBE: answered by id
        self.fences: deque[Fence] = deque()  # sent, oldest first
        self.open = Fence()  # the one that is being filled
        self._unfenced = False  # frames that nobody waits for were put behind the last PING
        self._decoder = Decoder()

    # --- sending --------------------------------------------------------------------------------------------

    def tell(self, frames: bytes) -> bool:
        """Puts frames that nobody waits for."""
        self._unfenced = True
        return self.put(frames)

    def call(self, frame: bytes, correlation: int) -> asyncio.Future[int]:
        """Puts a frame that is answered by its id: with an ACK, whose subscription id is the result."""
        answer: asyncio.Future[int] = self._loop.create_future()
        self.calls[correlation] = (answer, self._loop.time())
        self.put(frame)
        self._owner.on_fence_sent()
        return answer

    def publish(self, publication: Publication) -> bool:
        """Puts the next chunk of a publication; behind the last one a fence follows at the turn's end."""
        fence = self._filling()
        if not fence.publications or fence.publications[-1] is not publication:
            fence.publications.append(publication)
            publication.fences += 1
        publication.put += 1
        if publication.put == len(publication.chunks):
            fence.wanted = True
        return self.put(publication.chunks[publication.put - 1])

    def acknowledge(self, subscription: int, ack: Acknowledgement) -> None:
        """Puts an ACK. If somebody waits for it, its fence follows at the end of the turn."""
        if ack.tag in self.open.acks:
            self.fence_now()  # a refusal names the tag alone, so between two fences each may be there once
        fence = self._filling()
        fence.acks[ack.tag] = ack
        if ack.waiter is not None:
            fence.wanted = True
        self.tell(encode_ack(subscription, ack.tag))

    def poll(self, poller: Poller, frame: bytes, correlation: int, count: int) -> None:
        """Puts so many POLLs; the poller hears of the round's end when their fence was passed."""
        if self.open.poller is not None:
            self.fence_now()
        fence = self._filling()
        fence.poller = poller
        fence.poll_correlation = correlation
        fence.asked = count
        fence.wanted = True
        self.put(frame * count)

    def pass_fence(self) -> asyncio.Future[None]:
        """Done when everything that was put until now has been handled."""
        passed: asyncio.Future[None] = self._loop.create_future()
        fence = self._filling()
        fence.waiters.append(passed)
        fence.wanted = True
        self._end_turn_later()
        return passed

    def fence_now(self) -> None:
        fence = self._filling()
        fence.correlation = self._owner.take_correlations(1)
        self.put(encode_ping(fence.correlation))
        self._unfenced = False
        self.fences.append(fence)
        self.open = Fence()
        self._owner.on_fence_sent()

    def write_now(self) -> None:
        if self.open.wanted:
            self.fence_now()
        super().write_now()

    def _filling(self) -> Fence:
        if not self.open.since:
            self.open.since = self._loop.time()
        return self.open

    # --- the life of a connection ---------------------------------------------------------------------------

    async def handshake(self, key: str) -> None:
        """HELLO and AUTH in one write; raises what the server has against either."""
        first = self._owner.take_correlations(2)
        calls = [
            self.call(encode_hello(PROTOCOL_VERSION, first), first),
            self.call(encode_auth(key, first + 1), first + 1),
        ]
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, NotAllowed):
                raise AuthenticationError(*answer.args)
            if isinstance(answer, BaseException):
                raise answer

    def _end(self, error: ClientError) -> None:
        super()._end(error)
        waiting: list[asyncio.Future[Any]] = [answer for answer, _ in self.calls.values()]
        for fence in self.outstanding():
            waiting += fence.waiters
        for waiter in waiting:
            if not waiter.done():
                waiter.set_exception(again(error))

    @property
    def busy(self) -> bool:
        """Whether the server may not have handled all that was put."""
        return self._unfenced or self.open.wanted or bool(self.fences)

    def outstanding(self) -> Iterator[Fence]:
        yield from self.fences
        yield self.open

    def oldest(self) -> float | None:
        """Since when the oldest of what waits for an answer has waited."""
        since = [self.fences[0].since] if self.fences else []
        if self.calls:
            since.append(next(iter(self.calls.values()))[1])
        return min(since, default=None)

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._decoder.feed(data)
        except FrameError as bad:
            self._violated(str(bad))
            return
        for frame in frames:
            if self.down:
                return
            # By type instead of isinstance() because this is the path of every message.
            kind = type(frame)
            if kind is Publish:
                self._on_publish(cast(Publish, frame))
            elif kind is Pong:
                self._on_pong(frame.correlation)
            elif kind is Ack:
                self._on_ack(cast(Ack, frame))
            elif kind is Nack:
                self._on_nack(cast(Nack, frame))
            else:
                self._violated(f"it sent {frame!r}")
        if self._decoder.error is not None:
            self._violated(str(self._decoder.error))

    # --- answers --------------------------------------------------------------------------------------------

    def _front(self) -> Fence:
        """What the next answer belongs to."""
        return self.fences[0] if self.fences else self.open

    def _on_publish(self, frame: Publish) -> None:
        fence = self._front()
        if fence.poller is None or fence.got == fence.asked:
            self._violated("a message came that no poll had asked for")
            return
        fence.got += 1
        fence.poller.on_delivery(frame)

    def _on_pong(self, correlation: int) -> None:
        if not self.fences or self.fences[0].correlation != correlation:
            self._violated(f"a PONG came that answers no PING ({correlation})")
            return
        fence = self.fences.popleft()
        for publication in fence.publications:
            publication.fences -= 1
            if publication.fences == 0:
                publication.confirm()
        for ack in fence.acks.values():
            if ack.waiter is not None and not ack.waiter.done():
                ack.waiter.set_result(None)
        for waiter in fence.waiters:
            if not waiter.done():
                waiter.set_result(None)
        if fence.poller is not None:
            fence.poller.on_round_end(fence.asked, fence.got)

    def _on_ack(self, frame: Ack) -> None:
        call = self.calls.pop(frame.correlation, None)
        if call is None:
            self._violated(f"an ACK came that answers nothing ({frame.correlation})")
        elif not call[0].done():
            call[0].set_result(frame.subscription)

    def _on_nack(self, frame: Nack) -> None:
        error = nack_error(frame)
        correlation = frame.correlation
        fence = self._front()
        if correlation in self.calls:
            answer, _ = self.calls.pop(correlation)
            if not answer.done():
                answer.set_exception(error)
        elif correlation in fence.acks:
            self._refuse_ack(fence.acks.pop(correlation), error)
        elif correlation == fence.correlation:
            # PING is always answered, unless the key was taken away.
            self.fail(AuthenticationError(*error.args) if isinstance(error, NotAllowed) else error)
        elif fence.poller is not None and correlation == fence.poll_correlation:
            fence.poller.on_refused_poll(error)
        elif (publication := fence.publication(correlation)) is not None:
            publication.refuse(error)
        else:
            self._owner.on_refusal(error)

    def _refuse_ack(self, ack: Acknowledgement, error: BlipmqNack) -> None:
        waiting = ack.waiter is not None and not ack.waiter.done()
        if ack.again and isinstance(error, UnknownDelivery):
            # The lost link got it through.
            if waiting:
                cast("asyncio.Future[None]", ack.waiter).set_result(None)
        elif waiting:
            cast("asyncio.Future[None]", ack.waiter).set_exception(error)
        else:
            ack.poller.on_refused_ack(error)
