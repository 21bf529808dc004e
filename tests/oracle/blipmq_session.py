"""The BlipMQ sessions of a gateway again, in plain Python: what every peer is answered, byte for byte.

It is written from the protocol's text and the choices in docs/protocols/blipmq.md, on the twin of the codec.
It knows nothing of logs, files or syncs: everything it is told is safe at once."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tests.oracle import blipmq as codec
from tests.oracle.filters import matches

SECOND = 1_000_000  # times are in microseconds
TOPIC_WORDS = 128
SHOWN_CHARS = 100


class Key(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def publish(self) -> list[str]: ...
    @property
    def subscribe(self) -> list[str]: ...


@dataclass(slots=True)
class Message:
    topic: str
    body: bytes
    qos: int


@dataclass(slots=True)
class Flight:
    deliveries: int
    due: int
    held: bool = True  # a peer got it since the last restart


@dataclass(slots=True)
class Subscription:
    id: int
    topic: str
    qos: int
    owner: str
    start: int  # offset of the first message that it sees
    cursor: int  # offset of the next one to look at
    peers: "set[Peer]" = field(default_factory=set)
    alone_since: int = 0
    flights: dict[int, Flight] = field(default_factory=dict)  # by offset
    done: set[int] = field(default_factory=set)  # offsets acknowledged or buried
    attempts: dict[int, int] = field(
        default_factory=dict
    )  # by offset: deliveries, of what was delivered again
    restored_below: int = 0  # messages from before the last restart
    late_acks: int = 0  # since then, of messages that it has not come to again


class Broker:
    """What all peers share."""

    def __init__(
        self,
        keys: Iterable[Key],
        *,
        redelivery: int = 2 * SECOND,
        max_redelivery: int = 300 * SECOND,
        max_deliveries: int = 5,
        max_inflight: int = 1024,
        grace: int = 3600 * SECOND,
        max_subscriptions: int = 10_000,
        max_length: int = codec.MAX_LENGTH,
    ) -> None:
        self.keys = list(keys)
        self.redelivery = redelivery
        self.max_redelivery = max_redelivery
        self.max_deliveries = max_deliveries
        self.max_inflight = max_inflight
        self.grace = grace
        self.max_subscriptions = max_subscriptions
        self.max_length = max_length
        self.messages: list[Message] = []  # by offset
        self.topics: set[str] = set()
        self.subscriptions: dict[int, Subscription] = {}
        self.next_id = 1
        self.peers: list[Peer] = []

    def connect(self) -> "Peer":
        peer = Peer(self)
        self.peers.append(peer)
        return peer

    def make_topic(self, topic: str) -> str:
        """Why there can be no such topic; empty if there is one now."""
        if topic not in self.topics:
            if topic.count(".") >= TOPIC_WORDS:
                return f"a topic has {TOPIC_WORDS} words at most"
            self.topics.add(topic)
        return ""

    def tick(self, now: int) -> None:
        """Time passes for those who say nothing."""
        for subscription in list(self.subscriptions.values()):
            self.bury_due(subscription, now)
            if subscription.qos and not subscription.peers and subscription.alone_since + self.grace <= now:
                del self.subscriptions[subscription.id]

    def replace(self, keys: Iterable[Key], now: int) -> None:
        """Other keys and rights from now on; who has a key that is gone, or another secret, is unknown."""
        self.keys = list(keys)
        for peer in self.peers:
            if peer.key is not None:
                same = [key for key in self.keys if (key.name, key.key) == (peer.key.name, peer.key.key)]
                if same:
                    peer.key = same[0]
                else:
                    peer.key = None
                    peer.let_go(now)

    def restart(self, next_id: int, now: int) -> None:
        """All peers are gone, and with them their QoS 0 subscriptions. Ids may have been skipped.

        Redeliveries are remembered, first deliveries are not; but whatever comes before something that was
        delivered again, acknowledged or buried was delivered as well.
        """
        self.peers.clear()
        self.next_id = next_id
        for subscription in list(self.subscriptions.values()):
            if subscription.qos == 0:
                del self.subscriptions[subscription.id]
                continue
            known = 1 + max([*subscription.done, *subscription.attempts], default=-1)
            subscription.peers.clear()
            subscription.alone_since = now
            subscription.restored_below = len(self.messages)
            subscription.late_acks = 0
            subscription.flights.clear()
            for offset in range(subscription.start, known):
                message = self.messages[offset]
                if (message.topic, message.qos) == (
                    subscription.topic,
                    1,
                ) and offset not in subscription.done:
                    flight = self.flown(subscription.attempts.get(offset, 1), now)
                    if flight.deliveries < self.max_deliveries:
                        flight.due = now
                    flight.held = False
                    subscription.flights[offset] = flight
            subscription.cursor = max(subscription.start, known)

    def bury_due(self, subscription: Subscription, now: int) -> None:
        """What is due and had its last delivery goes to the dead letters."""
        for offset, flight in sorted(subscription.flights.items(), key=lambda item: (item[1].due, item[0])):
            if flight.due <= now and flight.deliveries >= self.max_deliveries:
                self.bury(subscription, offset)

    def bury(self, subscription: Subscription, offset: int) -> None:
        self.finish(subscription, offset)
        message = self.messages[offset]
        if not message.topic.startswith("dead."):
            self.topics.add("dead." + message.topic)
            self.messages.append(Message("dead." + message.topic, message.body, message.qos))

    def finish(self, subscription: Subscription, offset: int) -> None:
        subscription.flights.pop(offset, None)
        subscription.attempts.pop(offset, None)
        subscription.done.add(offset)

    def flown(self, deliveries: int, now: int) -> Flight:
        return Flight(deliveries, now + min(self.redelivery << (deliveries - 1), self.max_redelivery))

    def take(self, subscription: Subscription, now: int) -> tuple[int, Message, bool] | None:
        """The next delivery: offset, message, and whether it is to be acknowledged."""
        self.bury_due(subscription, now)
        for offset, flight in sorted(subscription.flights.items()):
            if flight.due <= now:
                subscription.flights[offset] = self.flown(flight.deliveries + 1, now)
                subscription.attempts[offset] = flight.deliveries + 1
                return offset, self.messages[offset], True
        if len(subscription.flights) >= self.max_inflight:
            return None
        while subscription.cursor < len(self.messages):
            offset = subscription.cursor
            message = self.messages[offset]
            subscription.cursor += 1
            if message.topic != subscription.topic or offset in subscription.done:
                continue
            confirm = subscription.qos == 1 and message.qos == 1
            if offset < subscription.restored_below and not confirm:
                continue
            if confirm:
                subscription.flights[offset] = self.flown(1, now)
            return offset, message, confirm
        return None


class Peer:
    """One connection."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.decoder = codec.Decoder(broker.max_length)
        self.greeted = False
        self.key: Key | None = None
        self.closing = False

    def feed(self, data: bytes, now: int) -> bytes:
        """What these bytes are answered with."""
        if self.closing:
            return b""
        answers = b"".join(self.answer(frame, now) for frame in self.decoder.feed(data))
        self.closing = self.decoder.error is not None
        return answers

    def leave(self, now: int) -> None:
        """The connection is gone."""
        self.broker.peers.remove(self)
        self.let_go(now)

    def let_go(self, now: int) -> None:
        for subscription in list(self.broker.subscriptions.values()):
            if self not in subscription.peers:
                continue
            subscription.peers.remove(self)
            if subscription.peers:
                continue
            if subscription.qos == 0:
                del self.broker.subscriptions[subscription.id]
                continue
            subscription.alone_since = now
            for flight in subscription.flights.values():
                if flight.held:
                    flight.due = min(flight.due, now)

    def answer(self, frame: codec.Frame, now: int) -> bytes:
        cid = frame.correlation
        malformed = "kind" in frame.fields
        if frame.name == "HELLO":
            return self.hello(cid, malformed, frame.fields)
        if frame.name == "AUTH":
            return self.auth(cid, malformed, frame.fields)
        if self.key is None:
            return codec.encode_nack(401, "unauthenticated", cid)
        if frame.name in ("PING", "PONG", "NACK"):
            return codec.encode_pong(cid) if frame.name == "PING" else b""
        if malformed:
            return codec.encode_nack(400, f"invalid {frame.name} payload", cid)
        if frame.name in ("PUBLISH", "SUBSCRIBE"):
            return self.on_topic(frame, self.key)
        id = frame.fields["subscription"]
        assert isinstance(id, int)
        if id == 0:
            return codec.encode_nack(400, "subscription_id must be non-zero", cid)
        subscription = self.broker.subscriptions.get(id)
        if subscription is not None and subscription.owner != self.key.name:
            subscription = None
        if frame.name == "ACK":
            return self.ack(cid, subscription)
        return b"" if subscription is None else self.poll(cid, subscription, self.key, now)

    def hello(self, cid: int, malformed: bool, fields: dict[str, object]) -> bytes:
        if self.greeted:
            return codec.encode_nack(400, "HELLO already performed", cid)
        if malformed:
            return codec.encode_nack(400, "invalid HELLO payload", cid)
        if fields["version"] != 1:
            return codec.encode_nack(426, "unsupported protocol version", cid)
        self.greeted = True
        return codec.encode_ack(0, cid)

    def auth(self, cid: int, malformed: bool, fields: dict[str, object]) -> bytes:
        if not self.greeted:
            return codec.encode_nack(400, "HELLO not performed", cid)
        if self.key is not None:
            return codec.encode_nack(400, "already authenticated", cid)
        if malformed:
            return codec.encode_nack(400, "invalid AUTH payload", cid)
        self.key = next((key for key in self.broker.keys if key.key == fields["key"]), None)
        if self.key is None:
            return codec.encode_nack(401, "invalid API key", cid)
        return codec.encode_ack(0, cid)

    def on_topic(self, frame: codec.Frame, key: Key) -> bytes:
        cid, topic, qos = frame.correlation, frame.fields["topic"], frame.fields["qos"]
        assert isinstance(topic, str)
        assert isinstance(qos, int)
        if topic == "":
            return codec.encode_nack(400, "empty topic", cid)
        if qos not in (0, 1):
            return codec.encode_nack(400, "invalid QoS value", cid)
        right = frame.name.lower()
        if not may(key.publish if right == "publish" else key.subscribe, topic):
            return codec.encode_nack(401, forbidden(key, right, topic), cid)
        if right == "publish":
            if wrong := self.broker.make_topic(topic):
                return codec.encode_nack(400, wrong, cid)
            body = frame.fields["message"]
            assert isinstance(body, bytes)
            self.broker.messages.append(Message(topic, body, qos))
            return b""
        limit = self.broker.max_subscriptions
        if sum(self in subscription.peers for subscription in self.broker.subscriptions.values()) >= limit:
            return codec.encode_nack(400, f"too many subscriptions: a connection has {limit} at most", cid)
        if wrong := self.broker.make_topic(topic):
            return codec.encode_nack(400, wrong, cid)
        id, end = self.broker.next_id, len(self.broker.messages)
        self.broker.next_id += 1
        self.broker.subscriptions[id] = Subscription(id, topic, qos, key.name, end, end, {self})
        return codec.encode_ack(id, cid)

    def poll(self, cid: int, subscription: Subscription, key: Key, now: int) -> bytes:
        subscription.peers.add(self)
        if not may(key.subscribe, subscription.topic):
            return codec.encode_nack(401, forbidden(key, "subscribe", subscription.topic), cid)
        taken = self.broker.take(subscription, now)
        if taken is None:
            return b""
        offset, message, confirm = taken
        return codec.encode_publish(
            subscription.topic, message.body, int(confirm), offset + 1 if confirm else cid
        )

    def ack(self, tag: int, subscription: Subscription | None) -> bytes:
        offset = tag - 1
        if subscription is not None and offset in subscription.flights:
            self.broker.finish(subscription, offset)
            return b""
        if (
            subscription is not None
            and subscription.cursor <= offset < subscription.restored_below
            and offset not in subscription.done
            and (message := self.broker.messages[offset]).topic == subscription.topic
            and message.qos == 1
            and subscription.late_acks < self.broker.max_inflight
        ):
            # Delivered before a restart, as far as anybody knows, and not come to again yet.
            subscription.late_acks += 1
            self.broker.finish(subscription, offset)
            return b""
        return codec.encode_nack(404, "unknown subscription or delivery tag", tag)


def may(filters: list[str], topic: str) -> bool:
    return any(matches(filter.encode(), topic.encode()) for filter in filters)


def forbidden(key: Key, right: str, topic: str) -> str:
    shown = topic if len(topic) <= SHOWN_CHARS else topic[:SHOWN_CHARS] + "…"
    return f"key {key.name!r} may not {right} to {shown!r}"
