"""Load for a gateway or a nats-server, and how long their answers take. It speaks as little of each protocol
as that needs, in batches, so that it measures the server more than itself; it prints nothing and knows no
command line.

What is done in each mode, and between which two moments a message's latency is:

    publish      batches, a PING behind each            a batch's write, the answer to its PING
    qos1         the same, confirmed: then it is safe   the same
    end-to-end   one connection to another              the publisher's write, the arrival
    round-trip   one message at a time, out and back    the write, the arrival at the same connection
"""

import asyncio
import math
import random
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, cast

from headrace.clients.blipmq_link import AuthenticationError, NotAllowed, nack_error
from headrace.clients.errors import (
    ClientError,
    ConnectionLost,
    OperationTimeout,
    ProtocolError,
    cannot_connect,
    reason_of,
)
from headrace.config.addresses import HostPort
from headrace.wire import blipmq

System: TypeAlias = Literal["blipmq", "nats"]
Mode: TypeAlias = Literal["publish", "qos1", "end-to-end", "round-trip"]

SYSTEMS: Final[tuple[System, ...]] = ("blipmq", "nats")
MODES: Final[tuple[Mode, ...]] = ("publish", "qos1", "end-to-end", "round-trip")

# A batch is about what one read of a server takes, and not so many messages that a fence would be rare.
BATCH_BYTES: Final = 64 * 1024
BATCH_MESSAGES: Final = 1024
# Batches that may be without their answer, so that neither side waits for the other.
BATCHES_AHEAD: Final = 4
# Messages between a publisher and its receiver: enough to keep both busy, and what latency is made of at full
# speed.
MESSAGES_AHEAD: Final = 4096
# Polls in one round of a receiver.
POLLS: Final = 512
# Rounds that find nothing follow each other at once so often; then a receiver pauses, and does not eat the
# server's time.
IDLE_ROUNDS: Final = 20
IDLE_SECONDS: Final = 0.001
# With a rate, how often what is due is sent.
TICK_SECONDS: Final = 0.001
# How often progress is shown, and the time looked at.
WATCH_SECONDS: Final = 0.05
# Without an answer for this long, the server is taken to be gone.
PATIENCE_SECONDS: Final = 10.0
# Latencies within 1 % of each other are counted as one, and those below a nanosecond.
RESOLUTION: Final = 1.01
SHORTEST: Final = 1e-9

AUTH_ID: Final = 3  # BlipMQ


@dataclass(frozen=True, slots=True)
class Plan:
    """What load to make."""

    system: System
    place: HostPort
    mode: Mode
    size: int  # of a message, bytes
    connections: int  # in end-to-end, pairs of them
    count: int  # messages, over all connections
    seconds: float  # after so long nothing more is sent
    rate: float | None = None  # messages a second, over all connections; None: as fast as it goes
    key: str = "dev-key"  # BlipMQ


class Latencies:
    """How long each of many messages took, to within RESOLUTION, in as much memory as there are steps of
    it."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()  # messages by the logarithm of their latency
        self._slowest = 0.0

    def add(self, seconds: float, count: int) -> None:
        """So many messages took so long."""
        self._counts[math.ceil(math.log(max(seconds, SHORTEST)) / math.log(RESOLUTION))] += count
        self._slowest = max(self._slowest, seconds)

    def merge(self, others: "Latencies") -> None:
        """Adds all of the others."""
        self._counts.update(others._counts)
        self._slowest = max(self._slowest, others._slowest)

    def percentiles(self, wanted: Sequence[float]) -> list[float]:
        """The latencies that so many percent of all messages did not exceed; zeros where there were none."""
        steps = sorted(self._counts)
        below = list(accumulate(self._counts[step] for step in steps))
        if not steps:
            return [0.0 for _ in wanted]
        # A rank that is a whole number but for the error of its calculation is that number.
        ranks = [max(1, math.ceil(percent * below[-1] / 100 - 1e-6)) for percent in wanted]
        return [min(RESOLUTION ** steps[bisect_left(below, rank)], self._slowest) for rank in ranks]


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a plan."""

    plan: Plan
    messages: int  # answered or delivered
    lost: int  # sent, and not answered or delivered in time
    seconds: float
    p50: float
    p99: float
    p99_9: float
    slowest: float

    @property
    def messages_per_second(self) -> float:
        return self.messages / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        return self.messages_per_second * self.plan.size


# --- what each system says ----------------------------------------------------------------------------------


class Answers(NamedTuple):
    """What was in a piece of what a server sent."""

    messages: int
    fences: int
    replies: bytes  # what the server wants to hear at once


class Speech(Protocol):
    """A system's words for one connection: bytes to send, and what bytes that came mean."""

    polls: bool
    """Whether messages come only when they are asked for."""
    fence: bytes

    def greet(self) -> bytes:
        """What opens a conversation; a fence behind it is answered when it was accepted."""

    def subscribe(self, topic: str) -> bytes: ...

    def publish(self, topic: str, payload: bytes, count: int, confirmed: bool) -> bytes: ...

    def ask(self, count: int) -> bytes:
        """So many polls of the subscription."""

    def hear(self, data: bytes) -> Answers: ...


class BlipmqSpeech:
    polls = True
    fence = blipmq.encode_ping(1)

    def __init__(self, key: str) -> None:
        self._key = key
        self._decoder = blipmq.Decoder()
        self._subscription = 0

    def greet(self) -> bytes:
        return blipmq.encode_hello(blipmq.PROTOCOL_VERSION, 2) + blipmq.encode_auth(self._key, AUTH_ID)

    def subscribe(self, topic: str) -> bytes:
        return blipmq.encode_subscribe(topic, 0, 4)

    def publish(self, topic: str, payload: bytes, count: int, confirmed: bool) -> bytes:
        return blipmq.encode_publish(topic, payload, int(confirmed), 5) * count

    def ask(self, count: int) -> bytes:
        return blipmq.encode_poll(self._subscription, 6) * count

    def hear(self, data: bytes) -> Answers:
        try:
            frames = self._decoder.feed(data)
        except blipmq.FrameError as bad:
            raise ProtocolError(f"what answers does not speak BlipMQ: {bad}") from None
        messages = fences = 0
        for frame in frames:
            kind = type(frame)
            if kind is blipmq.Publish:
                messages += 1
            elif kind is blipmq.Pong:
                fences += 1
            elif kind is blipmq.Nack:
                error = nack_error(cast(blipmq.Nack, frame))
                unknown_key = isinstance(error, NotAllowed) and error.correlation == AUTH_ID
                raise AuthenticationError(*error.args) if unknown_key else error
            elif kind is blipmq.Ack:
                self._subscription = cast(blipmq.Ack, frame).subscription
        return Answers(messages, fences, b"")


class NatsSpeech:
    polls = False
    fence = b"PING\r\n"

    def __init__(self) -> None:
        self._rest = b""

    def greet(self) -> bytes:
        return b'CONNECT {"verbose":false,"pedantic":false,"lang":"python","name":"headrace bench"}\r\n'

    def subscribe(self, topic: str) -> bytes:
        return b"SUB %s 1\r\n" % topic.encode()

    def publish(self, topic: str, payload: bytes, count: int, confirmed: bool) -> bytes:
        return b"PUB %s %d\r\n%s\r\n" % (topic.encode(), len(payload), payload) * count

    def ask(self, count: int) -> bytes:
        return b""

    def hear(self, data: bytes) -> Answers:
        data = self._rest + data if self._rest else data
        messages = fences = at = 0
        replies = b""
        while (end := data.find(b"\r\n", at)) >= 0:
            if data.startswith(b"MSG ", at):
                size = data[data.rfind(b" ", at, end) + 1 : end]
                if not size.isdigit():
                    raise ProtocolError(f"what answers does not speak NATS: {data[at:end]!r}")
                next_at = end + 4 + int(size)
                if next_at > len(data):
                    break
                messages += 1
            else:
                next_at = end + 2
                fences += data.startswith(b"PONG", at)
                if data.startswith(b"PING", at):
                    replies += b"PONG\r\n"
                elif data.startswith(b"-ERR", at):
                    raise ClientError(f"the nats-server says: {data[at + 5 : end].decode(errors='replace')}")
                elif not data.startswith((b"PONG", b"INFO ", b"+OK"), at):
                    raise ProtocolError(f"what answers does not speak NATS: {data[at : at + 40]!r}")
            at = next_at
        self._rest = data[at:]
        return Answers(messages, fences, replies)


def speech_of(plan: Plan) -> Speech:
    return BlipmqSpeech(plan.key) if plan.system == "blipmq" else NatsSpeech()


# --- connections --------------------------------------------------------------------------------------------


class Lane(asyncio.Protocol):
    """One connection, which hands on what was answered."""

    def __init__(self, speech: Speech, on_error: Callable[[ClientError], None], where: str) -> None:
        self.speech = speech
        self.on_answers: Callable[[int, int], None] = lambda messages, fences: None
        self._on_error = on_error
        self._where = where
        self._closing = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closing:
            why = f": {reason_of(exc)}" if exc is not None else " by the server"
            self._on_error(ConnectionLost(f"the connection to {self._where} was closed{why}"))

    def data_received(self, data: bytes) -> None:
        try:
            answers = self.speech.hear(data)
        except ClientError as error:
            self.close()
            self._on_error(error)
            return
        if answers.replies:
            self.write(answers.replies)
        self.on_answers(answers.messages, answers.fences)

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        self._closing = True
        self._transport.abort()


class Share:
    """One connection's part of the load, from the first message to the last answer."""

    def __init__(self, load: "Load", topic: str, count: int, rate: float | None) -> None:
        self.load = load
        self.topic = topic
        self.count = count
        self.rate = rate
        self.sent = 0
        self.answered = 0
        self.ended = False
        self._waiting: deque[tuple[float, int]] = deque()  # when written, and how many of them are unanswered
        self._due_since: deque[tuple[float, int]] = deque()  # with a rate: due and not written
        self._due = 0
        self._stopped = False

    async def open(self) -> None:
        """Connects and subscribes."""
        raise NotImplementedError

    def room(self) -> int:
        """How many messages may be written now."""
        raise NotImplementedError

    def write(self, count: int) -> None:
        """Writes so many messages."""
        raise NotImplementedError

    def start(self, now: float) -> None:
        self._start = now
        if self.rate is not None:
            self._tick()
        else:
            self.send()

    def stop(self) -> None:
        """Sends no more; what is under way may still be answered."""
        self._stopped = True
        self._check_end()

    def send(self) -> None:
        """Writes as much as there is room for."""
        while not self._stopped and (size := min(self.room(), self._allowed())) > 0:
            if self.rate is None:
                self._waiting.append((time.perf_counter(), size))
            else:
                self._move_due(size)
            self.sent += size
            self.write(size)

    def _allowed(self) -> int:
        return self.count - self.sent if self.rate is None else self._due

    def _tick(self) -> None:
        """With a rate: counts what has become due. Its latency begins now, also if the server leaves no
        room."""
        if self._stopped:
            return
        assert self.rate is not None
        now = time.perf_counter()
        due = min(int((now - self._start) * self.rate) + 1, self.count) - self.sent - self._due
        if due > 0:
            self._due += due
            self._due_since.append((now, due))
            self.send()
        if self.sent + self._due < self.count:
            asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _move_due(self, size: int) -> None:
        self._due -= size
        while size:
            since, count = self._due_since.popleft()
            taken = min(count, size)
            self._waiting.append((since, taken))
            if taken < count:
                self._due_since.appendleft((since, count - taken))
            size -= taken

    def take_answers(self, count: int) -> None:
        """So many of the oldest messages were answered."""
        if count > self.sent - self.answered:
            self.load.fail(ProtocolError(f"{self.load.plan.place} answered more than it was asked"))
            return
        now = time.perf_counter()
        self.load.note_answers(count, now)
        self.answered += count
        while count:
            since, waiting = self._waiting.popleft()
            taken = min(waiting, count)
            self.load.latencies.add(now - since, taken)
            if taken < waiting:
                self._waiting.appendleft((since, waiting - taken))
            count -= taken
        self._check_end()

    def _check_end(self) -> None:
        if (self._stopped or self.sent == self.count) and self.answered == self.sent:
            self.ended = True
            self.load.check_end()


class PublishShare(Share):
    """Batches of messages, a fence behind each."""

    async def open(self) -> None:
        plan = self.load.plan
        self._lane = await self.load.connect(None)
        self._batches: deque[int] = deque()  # their sizes
        self._confirmed = plan.mode == "qos1"
        self._payload = random.randbytes(plan.size)
        self._full = self._lane.speech.publish(self.topic, self._payload, batch_size(plan), self._confirmed)
        self._lane.on_answers = self._on_answers

    def room(self) -> int:
        return batch_size(self.load.plan) if len(self._batches) < BATCHES_AHEAD else 0

    def write(self, count: int) -> None:
        speech = self._lane.speech
        frames = self._full
        if count != batch_size(self.load.plan):
            frames = speech.publish(self.topic, self._payload, count, self._confirmed)
        self._batches.append(count)
        self._lane.write(frames + speech.fence)

    def _on_answers(self, messages: int, fences: int) -> None:
        for _ in range(fences):
            self.take_answers(self._batches.popleft() if self._batches else 1)
        self.send()


class DeliveryShare(Share):
    """Messages that one connection publishes and another receives."""

    async def open(self) -> None:
        plan = self.load.plan
        self._publisher = await self.load.connect(None)
        self._receiver = await self.load.connect(self.topic)
        self._payload = random.randbytes(plan.size)
        self._full = self._publisher.speech.publish(self.topic, self._payload, batch_size(plan), False)
        self._round = self._receiver.speech.ask(POLLS) + self._receiver.speech.fence
        self._in_round = 0
        self._idle_rounds = 0
        self._receiver.on_answers = self._on_answers

    def start(self, now: float) -> None:
        super().start(now)
        self._ask()

    def room(self) -> int:
        size = batch_size(self.load.plan)
        return size if self.sent - self.answered <= MESSAGES_AHEAD - size else 0

    def write(self, count: int) -> None:
        frames = self._full
        if count != batch_size(self.load.plan):
            frames = self._publisher.speech.publish(self.topic, self._payload, count, False)
        self._publisher.write(frames)

    def _ask(self) -> None:
        if self._receiver.speech.polls and not self.ended:
            self._receiver.write(self._round)

    def _on_answers(self, messages: int, fences: int) -> None:
        self._in_round += messages
        if messages:
            self.take_answers(messages)
            self.send()
        if fences:
            self._idle_rounds = 0 if self._in_round else self._idle_rounds + 1
            self._in_round = 0
            if self._idle_rounds < IDLE_ROUNDS:
                self._ask()
            else:
                asyncio.get_running_loop().call_later(IDLE_SECONDS, self._ask)


class RoundTripShare(Share):
    """One message at a time, which comes back to the connection that sent it."""

    async def open(self) -> None:
        plan = self.load.plan
        self._lane = await self.load.connect(self.topic)
        speech = self._lane.speech
        self._trip = speech.publish(self.topic, random.randbytes(plan.size), 1, False) + speech.ask(1)
        self._lane.on_answers = self._on_answers

    def room(self) -> int:
        return 1 if self.sent == self.answered else 0

    def write(self, count: int) -> None:
        self._lane.write(self._trip)

    def _on_answers(self, messages: int, fences: int) -> None:
        if messages:
            self.take_answers(messages)
            self.send()


SHARES: Final[dict[Mode, type[Share]]] = {
    "publish": PublishShare,
    "qos1": PublishShare,
    "end-to-end": DeliveryShare,
    "round-trip": RoundTripShare,
}


def batch_size(plan: Plan) -> int:
    return max(1, min(BATCH_MESSAGES, BATCH_BYTES // (plan.size + 1)))


# --- all of it ----------------------------------------------------------------------------------------------


class Load:
    """A plan being carried out."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.answered = 0
        """How many messages so far, for whoever watches."""
        self.latencies = Latencies()
        self._lanes: list[Lane] = []
        self._shares: list[Share] = []
        self._last_answer = 0.0
        self._end: asyncio.Future[None]

    async def run(self, watch: Callable[[], None] = lambda: None) -> Result:
        """Does it all; calls `watch` now and then."""
        plan = self.plan
        self._end = asyncio.get_running_loop().create_future()
        run = random.getrandbits(32)
        self._shares = [
            SHARES[plan.mode](
                self,
                f"bench.{run:08x}.{number}",
                plan.count // plan.connections + (number < plan.count % plan.connections),
                plan.rate / plan.connections if plan.rate is not None else None,
            )
            for number in range(min(plan.connections, plan.count))
        ]
        try:
            for share in self._shares:
                await share.open()
            start = self._last_answer = time.perf_counter()
            for share in self._shares:
                share.start(start)
            await self._until_end(start, watch)
        finally:
            for lane in self._lanes:
                lane.close()
            self._end.cancel()
        lost = sum(share.sent for share in self._shares) - self.answered
        p50, p99, p99_9, slowest = self.latencies.percentiles([50, 99, 99.9, 100])
        return Result(plan, self.answered, lost, self._last_answer - start, p50, p99, p99_9, slowest)

    async def _until_end(self, start: float, watch: Callable[[], None]) -> None:
        """Stops sending when the time is up, and waits for answers as long as some come."""
        stopped = False
        while not self._end.done():
            await asyncio.wait([self._end], timeout=WATCH_SECONDS)
            watch()
            now = time.perf_counter()
            if not stopped and now - start >= self.plan.seconds:
                stopped = True
                for share in self._shares:
                    share.stop()
            waiting = any(share.sent > share.answered for share in self._shares)
            if waiting and now - self._last_answer > PATIENCE_SECONDS:
                if self.answered:
                    return  # the rest is lost
                raise OperationTimeout(f"{self.plan.place} did not answer within {PATIENCE_SECONDS:g} s")
        self._end.result()

    def note_answers(self, count: int, now: float) -> None:
        self.answered += count
        self._last_answer = now

    def check_end(self) -> None:
        if all(share.ended for share in self._shares) and not self._end.done():
            self._end.set_result(None)

    def fail(self, error: ClientError) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    async def connect(self, topic: str | None) -> Lane:
        """A connection that was accepted and, if there is a topic, receives it."""
        loop = asyncio.get_running_loop()
        place = self.plan.place
        lane = Lane(speech_of(self.plan), self.fail, str(place))
        accepted: asyncio.Future[None] = loop.create_future()
        lane.on_answers = lambda messages, fences: accepted.set_result(None) if fences else None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                try:
                    await loop.create_connection(lambda: lane, place.host, place.port)
                except OSError as error:
                    raise cannot_connect(place, error) from None
                self._lanes.append(lane)
                subscribe = b"" if topic is None else lane.speech.subscribe(topic)
                lane.write(lane.speech.greet() + subscribe + lane.speech.fence)
                await asyncio.wait([accepted, self._end], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise OperationTimeout(f"{place} did not answer within {PATIENCE_SECONDS:g} s") from None
        if self._end.done():
            self._end.result()
        return lane
