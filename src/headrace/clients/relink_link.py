"""The connector's side of a Relink link: what was sent and is not acknowledged, what was received, and what has to
be said again after a reconnection. It does no I/O: packets in, bytes out; who waits for what is told through
futures."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from typing_extensions import Buffer

from headrace.clients.errors import ClientError, ConnectionLost, ProtocolError
from headrace.wire import relink as wire
from headrace.wire.relink import AckType, GeneralType, OperationType

U32: Final = (1 << 32) - 1
# Outcomes of transactions that are remembered, for a listener that did not hear of them.
OUTCOMES: Final = 4096


class LinkLost(ClientError):
    """The listener does not know the link any more: what was not consumed may or may not have arrived."""


class Uncommitted(ClientError):
    """The listener did not commit a transaction: nothing of it was taken."""


class Message(NamedTuple):
    """A message that was delivered."""

    channel: int
    parts: tuple[bytes, ...]
    number: int
    """Its place on the channel, counted from the channel's opening."""
    opening: int = 0
    """Which opening of a channel that was, of all that the connector saw."""

    @property
    def payload(self) -> bytes:
        """All parts, joined."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


@dataclass
class Wish:
    """A commit or a rollback that is not known to have arrived."""

    commit: bool
    upto: int
    done: asyncio.Future[None] | None


@dataclass
class Sending:
    """A channel of ours. All numbers count from its opening and do not wrap."""

    id: int
    next: int = 0
    received: int = 0
    consumed: int = 0
    asked: int = 0  # up to where a commit or a rollback was sent
    unreceived: deque[bytes] = field(default_factory=deque)  # packets from `received` on
    wishes: deque[Wish] = field(default_factory=deque)
    closing: asyncio.Future[None] | None = None
    waiters: list[tuple[int, asyncio.Future[None]]] = field(
        default_factory=list
    )  # until so many are consumed


@dataclass
class Receiving:
    """A channel of the listener."""

    id: int
    opening: int
    received: int = 0
    told: int = 0
    consumed: int = 0
    told_consumed: int = 0
    resolved: int = 0  # transactions: committed or rolled back, by the listener
    asked: int = 0  # and its outcome asked for, on this connection
    answered: int = 0  # and known to us
    held: deque[Message] = field(default_factory=deque)  # not committed yet
    commits: deque[int] = field(default_factory=deque)  # ends of those that are not answered
    refused: set[int] = field(default_factory=set)  # numbers that the caller rejected
    outcomes: deque[tuple[int, bool]] = field(default_factory=lambda: deque(maxlen=OUTCOMES))
    done: set[int] = field(default_factory=set)  # consumed out of order


class Link:
    """One link. `put` takes bytes for the listener, `deliver` messages for the caller."""

    def __init__(
        self,
        *,
        sizes: tuple[int, int],
        transactions: tuple[bool, bool],
        put: Callable[[bytes], None],
        deliver: Callable[[Message], None],
        progress: Callable[[], None],
    ) -> None:
        self.size, self.listener_size = sizes
        self.commits, self.is_committed_to = transactions
        self.put = put
        self.deliver = deliver
        self.progress = progress
        self.epoch = 0
        self.id = 0
        self.outs: dict[int, Sending] = {}
        self.ins: dict[int, Receiving] = {}
        self.openings = 0  # of the listener's channels, on this link and those before it
        self.touched: dict[int, Receiving] = {}
        self.untold: ClientError | None = None  # why messages may be lost that flush() has not told of
        self.ready = False  # messages and operations may be sent
        self.shut = False
        self.peer_shut = False
        self.over: asyncio.Future[None] | None = None  # both have shut down
        self.pongs: deque[asyncio.Future[None]] = deque()

    # --- connections ----------------------------------------------------------------------------------------

    def connected(self, epoch: int, id: int) -> bool:
        """The listener's answer; whether the link is the old one."""
        old = bool(self.id) and (epoch, id) == (self.epoch, self.id)
        if not old:
            if self.id:
                self.discard(LinkLost("the listener does not know the link any more"))
            self.epoch, self.id = epoch, id
            self.ready = True
            return False
        for channel in self.ins.values():
            channel.asked = 0
            if channel.received:
                self._ack(AckType.RECEIVED, channel, channel.received)
                channel.told = channel.received
            if channel.consumed:
                self._ack(AckType.CONSUMED, channel, channel.consumed)
                channel.told_consumed = channel.consumed
        self.put(wire.encode_general(GeneralType.RESUME))
        return True

    def disconnected(self) -> None:
        self.ready = False
        for waiter in self.pongs:
            if not waiter.done():
                waiter.set_exception(ConnectionLost("the connection was lost before the listener answered"))
        self.pongs.clear()

    def discard(self, error: ClientError) -> None:
        """Forgets everything; whoever waits for something is told, or who flushes next."""
        if any(channel.consumed < channel.next for channel in self.outs.values()):
            self.untold = error
        for channel in self.outs.values():
            waiting = [waiter for _, waiter in channel.waiters]
            waiting += [wish.done for wish in channel.wishes if wish.done is not None]
            if channel.closing is not None:
                waiting.append(channel.closing)
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_exception(error)
        self.outs.clear()
        self.ins.clear()
        self.touched.clear()
        self.peer_shut = self.shut = False
        self.progress()

    def _resume(self) -> None:
        """The listener has told what it has: the rest goes again, then what was asked for without an answer."""
        self.ready = True
        for channel in self.outs.values():
            for packet in channel.unreceived:
                self.put(packet)
            for wish in channel.wishes:
                self._operate(channel, wish)
            if channel.closing is not None:
                self.put(wire.encode_operation(OperationType.CLOSE, channel.id, self.size))
        if self.shut:
            self.put(wire.encode_general(GeneralType.SHUTDOWN))
        self.progress()

    # --- sending --------------------------------------------------------------------------------------------

    def sending(self, id: int) -> Sending:
        channel = self.outs.get(id)
        if channel is None:
            channel = self.outs[id] = Sending(id)
        return channel

    def send(self, channel: Sending, parts: Sequence[Buffer]) -> int:
        """Sends a message, now or as soon as there is a connection; its number."""
        packet = wire.encode_message(channel.id, self.size, parts)
        channel.unreceived.append(packet)
        channel.next += 1
        if self.ready:
            self.put(packet)
        return channel.next - 1

    def wish(self, channel: Sending, commit: bool, done: asyncio.Future[None] | None) -> None:
        """Commits, or rolls back, all that was sent on a channel since the last time."""
        wish = Wish(commit, channel.next, done)
        channel.asked = channel.next
        channel.wishes.append(wish)
        if self.ready:
            self._operate(channel, wish)

    def _operate(self, channel: Sending, wish: Wish) -> None:
        # Always by number: one that was resolved before the connection was lost is then known as such.
        type = OperationType.COMMIT if wish.commit else OperationType.ROLLBACK
        self.put(wire.encode_operation(type, channel.id, self.size, (wish.upto - 1) & U32))

    def close(self, channel: Sending, done: asyncio.Future[None]) -> None:
        channel.closing = done
        if self.ready:
            self.put(wire.encode_operation(OperationType.CLOSE, channel.id, self.size))

    def shutdown(self, over: asyncio.Future[None]) -> None:
        self.over = over
        self.shut = True
        if self.ready:
            self.put(wire.encode_general(GeneralType.SHUTDOWN))
        self._consider_end()

    def _consider_end(self) -> None:
        if self.over is not None and self.shut and self.peer_shut and not self.over.done():
            self.over.set_result(None)

    # --- receiving ------------------------------------------------------------------------------------------

    def handle(self, items: Sequence[wire.Item]) -> None:
        """What one read event brought."""
        for item in items:
            if isinstance(item, wire.Message):
                for id in item.channels:
                    self._on_message(id, item.parts)
            elif isinstance(item, wire.Acknowledgement):
                for id in item.channels:
                    self._on_ack(item.type, id, item.sequence)
            elif isinstance(item, wire.Operation):
                for id in item.channels:
                    self._on_operation(item.type, id, item.sequence)
            elif isinstance(item, wire.General):
                self._on_general(item.type)
        self.tell()

    def _on_general(self, type: GeneralType) -> None:
        if type is GeneralType.PING:
            self.put(wire.encode_general(GeneralType.PONG))
        elif type is GeneralType.PONG:
            if self.pongs:
                waiter = self.pongs.popleft()
                if not waiter.done():
                    waiter.set_result(None)
        elif type is GeneralType.RESUME:
            if not self.ready:
                self._resume()
        elif type is GeneralType.SHUTDOWN:
            self.peer_shut = True
            self._consider_end()

    def _on_message(self, id: int, parts: tuple[bytes, ...]) -> None:
        channel = self.ins.get(id)
        if channel is None:
            self.openings += 1
            channel = self.ins[id] = Receiving(id, self.openings)
        message = Message(id, parts, channel.received, channel.opening)
        channel.received += 1
        self.touched[id] = channel
        if self.is_committed_to:
            channel.held.append(message)
        else:
            self.deliver(message)

    def _on_operation(self, type: OperationType, id: int, sequence: int | None) -> None:
        channel = self.ins.get(id)
        if type is OperationType.CLOSE:
            if channel is not None:
                self.tell()
                del self.ins[id]
                self.touched.pop(id, None)
            self.put(wire.encode_acknowledgement(AckType.CLOSED, id, self.listener_size))
            return
        if channel is None or not self.is_committed_to:
            raise ProtocolError(f"the listener resolves messages of channel {id}, which has none to resolve")
        upto = channel.resolved + 1
        if sequence is not None:
            ahead = (sequence + 1 - channel.resolved) & U32
            if ahead > channel.received - channel.resolved:
                # Resolved before the connection was lost.
                upto = channel.resolved - ((channel.resolved - sequence - 1) & U32)
                if type is OperationType.COMMIT:
                    self._answer_again(channel, upto)
                return
            upto = channel.resolved + ahead
        if upto > channel.received:
            raise ProtocolError(f"the listener resolves more of channel {id} than it sent")
        if upto == channel.resolved:
            if type is OperationType.COMMIT:
                self._answer_again(channel, upto)
            return
        while channel.held and channel.held[0].number < upto:
            message = channel.held.popleft()
            if type is OperationType.COMMIT:
                self.deliver(message)
            else:
                self._consume(channel, message.number)
        channel.resolved = upto
        if type is OperationType.COMMIT:
            channel.asked = upto
            channel.commits.append(upto)
            self._answer(channel)

    def _answer_again(self, channel: Receiving, upto: int) -> None:
        channel.asked = max(channel.asked, upto)
        if upto > channel.answered:
            return  # it will be, when the caller is done with it
        for end, committed in channel.outcomes:
            if end >= upto:
                self._put_outcome(channel, upto, committed)
                return

    def _answer(self, channel: Receiving) -> None:
        """Answers the commits all of whose messages the caller is done with. Those of an earlier connection wait until
        the listener asks again: an answer holds for all that it has none for, which may be more than this commit."""
        while channel.commits and channel.consumed >= channel.commits[0]:
            end = channel.commits.popleft()
            refused = {number for number in channel.refused if number < end}
            channel.refused -= refused
            channel.answered = end
            channel.outcomes.append((end, not refused))
            if end <= channel.asked:
                self._put_outcome(channel, end, not refused)

    def _put_outcome(self, channel: Receiving, upto: int, committed: bool) -> None:
        type = AckType.COMMITTED if committed else AckType.UNCOMMITTED
        self._ack(type, channel, upto)

    def _on_ack(self, type: AckType, id: int, sequence: int | None) -> None:
        channel = self.outs.get(id)
        if channel is None:
            raise ProtocolError(f"the listener acknowledges messages of channel {id}, which is not open")
        if type is AckType.CLOSED:
            if channel.closing is None:
                raise ProtocolError(f"the listener closed channel {id}, which it cannot")
            del self.outs[id]
            if not channel.closing.done():
                channel.closing.set_result(None)
            self.progress()
            return
        if type is AckType.RECEIVED:
            self._received(channel, self._reached(channel, channel.received, sequence))
            self.progress()
        elif type is AckType.CONSUMED:
            channel.consumed = self._reached(channel, channel.consumed, sequence)
            self._received(channel, channel.consumed)
            while (
                channel.wishes and not channel.wishes[0].commit and channel.wishes[0].upto <= channel.consumed
            ):
                channel.wishes.popleft()  # a rollback that arrived
            waiting = channel.waiters
            channel.waiters = []
            for count, waiter in waiting:
                if count > channel.consumed:
                    channel.waiters.append((count, waiter))
                elif not waiter.done():
                    waiter.set_result(None)
            self.progress()
        else:
            self._resolved(channel, type is AckType.COMMITTED, sequence)

    def _reached(self, channel: Sending, cursor: int, sequence: int | None) -> int:
        ahead = 1 if sequence is None else (sequence + 1 - cursor) & U32
        if ahead > channel.next - cursor:
            raise ProtocolError(
                f"the listener acknowledges more of channel {channel.id} than was sent, or less"
            )
        return cursor + ahead

    def _received(self, channel: Sending, upto: int) -> None:
        while channel.received < upto:
            channel.received += 1
            channel.unreceived.popleft()

    def _resolved(self, channel: Sending, committed: bool, sequence: int | None) -> None:
        """An answer to a commit, and to all rollbacks before it."""
        for wish in list(channel.wishes):
            if sequence is not None and ((wish.upto - 1 - sequence) & U32) > 1 << 31:
                # Before the one that is answered.
                channel.wishes.popleft()
                self._tell_outcome(wish, committed)
                continue
            if wish.commit and (sequence is None or (wish.upto - 1) & U32 == sequence):
                channel.wishes.popleft()
                self._tell_outcome(wish, committed)
                return
            if wish.commit:
                return
            if sequence is None:
                channel.wishes.popleft()

    def _tell_outcome(self, wish: Wish, committed: bool) -> None:
        if not wish.commit or wish.done is None or wish.done.done():
            return
        if committed:
            wish.done.set_result(None)
        else:
            wish.done.set_exception(Uncommitted("the listener did not commit the transaction"))

    # --- acknowledging --------------------------------------------------------------------------------------

    def consume(self, message: Message, accepted: bool = True) -> None:
        """The caller is done with a message."""
        channel = self.ins.get(message.channel)
        if channel is None or message.opening != channel.opening:
            return  # its channel was closed, or the link lost
        if not accepted:
            channel.refused.add(message.number)
        self._consume(channel, message.number)
        if self.is_committed_to:
            self._answer(channel)

    def _consume(self, channel: Receiving, number: int) -> None:
        if number < channel.consumed:
            return
        channel.done.add(number)
        while channel.consumed in channel.done:
            channel.done.remove(channel.consumed)
            channel.consumed += 1
        self.touched[channel.id] = channel

    def tell(self) -> None:
        """Acknowledges what was received and consumed since the last time."""
        for channel in self.touched.values():
            if channel.received > max(channel.told, channel.consumed):
                self._ack(AckType.RECEIVED, channel, channel.received)
            channel.told = max(channel.told, channel.received)
            if channel.consumed > channel.told_consumed:
                self._ack(AckType.CONSUMED, channel, channel.consumed)
                channel.told_consumed = channel.consumed
        self.touched.clear()

    def _ack(self, type: AckType, channel: Receiving, upto: int) -> None:
        self.put(wire.encode_acknowledgement(type, channel.id, self.listener_size, (upto - 1) & U32))
