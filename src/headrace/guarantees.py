"""What each protocol promises of the messages that it takes and gives, and what follows for each pair of them: data,
and the rules that combine it. docs/bridges.md, /api/guarantees and tests/bridges are made from it. It opens nothing,
and knows no session."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from headrace import limits


class Promise(StrEnum):
    """How often a message comes, put together from two things: whether it can be missed, and whether it can repeat."""

    AT_MOST_ONCE = "at most once"
    AT_LEAST_ONCE = "at least once"
    EXACTLY_ONCE = "exactly once"
    BEST_EFFORT = "best effort"  # may be missed, and may repeat

    @property
    def keeps(self) -> bool:
        """Nothing is missed."""
        return self in (Promise.AT_LEAST_ONCE, Promise.EXACTLY_ONCE)

    @property
    def repeats(self) -> bool:
        """Something may come twice."""
        return self in (Promise.AT_LEAST_ONCE, Promise.BEST_EFFORT)

    def then(self, other: "Promise") -> "Promise":
        """What is left of both, one behind the other."""
        keeps, repeats = self.keeps and other.keeps, self.repeats or other.repeats
        if keeps:
            return Promise.AT_LEAST_ONCE if repeats else Promise.EXACTLY_ONCE
        return Promise.BEST_EFFORT if repeats else Promise.AT_MOST_ONCE


class Beside(StrEnum):
    """What a protocol says beside the payload. The record has all of it."""

    HEADER = "header"
    PARTS = "parts"
    VALUE = "value"
    TIMING = "timing"


@dataclass(frozen=True, slots=True)
class Extra:
    """One of them in words."""

    meaning: str
    otherwise: str  # what those get who cannot say it


BESIDE: Final = {
    Beside.HEADER: Extra(
        "zeroctl's JSON object of keys and values",
        "the payload alone; the header is in the record and in the drop's `headers`",
    ),
    Beside.PARTS: Extra(
        "where the parts of a Relink message begin and end",
        "the parts joined, as one payload; their sizes are in the record and in the drop's `part_sizes`",
    ),
    Beside.VALUE: Extra(
        "that the payload of an Overhop job is a MessagePack value other than bin",
        "the value's MessagePack, as bytes",
    ),
    Beside.TIMING: Extra(
        "`scheduled_at`, `max_attempts` and `retry_interval_ms` of an Overhop job",
        "the message at once; the timing is in the record and in the drop's `headers`",
    ),
}


@dataclass(frozen=True, slots=True)
class Publishing:
    """One way to publish, from the peer into the log."""

    protocol: str
    mode: str  # how the peer asks for it
    promise: Promise  # of a peer that sends again what was not acknowledged when its connection was lost
    acknowledgement: str  # what tells the peer that its message is safe, and when

    @property
    def confirmed(self) -> bool:
        """The peer is told when its message is safe."""
        return self.promise.keeps


@dataclass(frozen=True, slots=True)
class Delivering:
    """One way to subscribe, from the log to the peer."""

    protocol: str
    mode: str
    promise: Promise
    of_all: bool  # it holds for all messages; otherwise for those that were published to be confirmed
    survives: bool  # it goes on after a lost connection, and after a restart and SIGKILL of the gateway
    acknowledgement: str  # what the peer says, and what follows if it does not


@dataclass(frozen=True, slots=True)
class Side:
    """What holds for a protocol in one direction, however it is asked."""

    order: str
    beside: frozenset[Beside]  # what it can say
    also: str  # what else stands beside the payload
    too_large: str


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A protocol's limit. It holds in both directions: what the gateway takes of a peer, and what it gives one."""

    setting: str
    default: int
    counted: str  # the session's event when a publisher goes beyond it
    ends: bool  # so does the connection; otherwise the message is refused, and the connection goes on


@dataclass(frozen=True, slots=True)
class Room:
    """What else a message takes of its protocol's limit, in one way to say it. The rest is the payload's."""

    protocol: str
    mode: str
    beside: int  # bytes
    names: str  # what is said with them, whose bytes come on top; "" for nothing
    base64: bool = False

    def largest(self, limit: int, names: int = 0) -> int:
        """Bytes of the largest payload, with so many bytes of names."""
        left = limit - self.beside - names
        return max(left // 4 * 3 if self.base64 else left, 0)


# The strongest way of each protocol comes last.
PUBLISHING: Final = (
    Publishing("blipmq", "QoS 0", Promise.AT_MOST_ONCE, "none"),
    Publishing(
        "blipmq",
        "QoS 1",
        Promise.AT_LEAST_ONCE,
        "the PONG of a PING behind it: every QoS 1 message before it is safe",
    ),
    Publishing("felix", "ack none, binary batch", Promise.AT_MOST_ONCE, "none"),
    Publishing(
        "felix",
        "ack",
        Promise.AT_LEAST_ONCE,
        "`ok` or `publish_ok`: the message, or the whole batch, is safe",
    ),
    Publishing("overhop", "ENQUEUE", Promise.AT_LEAST_ONCE, "OK with the `jid`: the job is safe"),
    Publishing(
        "relink",
        "message",
        Promise.EXACTLY_ONCE,
        "`consumed`: the message is safe; a resumed link sends only what the gateway does not have",
    ),
    Publishing(
        "relink",
        "transaction",
        Promise.EXACTLY_ONCE,
        "`committed`: all messages of the transaction are safe; `uncommitted`: none of them is, and none will be",
    ),
    Publishing("zeroctl", "without confirmation", Promise.AT_MOST_ONCE, "none; a refusal is told"),
    Publishing("zeroctl", "confirmed", Promise.AT_LEAST_ONCE, "CONFIRM: the message is safe"),
)

DELIVERING: Final = (
    Delivering("blipmq", "QoS 0", Promise.AT_MOST_ONCE, True, False, "none"),
    Delivering(
        "blipmq",
        "QoS 1",
        Promise.AT_LEAST_ONCE,
        False,
        True,
        "ACK of the tag; without it the message is there again for a later POLL, and dead after the last delivery",
    ),
    Delivering("felix", "subscribe", Promise.AT_MOST_ONCE, True, False, "none"),
    Delivering(
        "overhop",
        "worker",
        Promise.AT_LEAST_ONCE,
        True,
        True,
        "DONE; without it the job goes to a worker again when the deadline has passed or the connection has ended,"
        " and is dead after the last attempt",
    ),
    Delivering(
        "relink",
        "link",
        Promise.EXACTLY_ONCE,
        True,
        True,
        "`received` or `consumed`: it is not sent again; without it, it is sent again on the resumed link, under the"
        " same number; `uncommitted`: it is dead",
    ),
    Delivering("zeroctl", "binding", Promise.AT_MOST_ONCE, True, False, "none"),
    Delivering(
        "zeroctl",
        "acknowledged binding",
        Promise.AT_LEAST_ONCE,
        True,
        False,
        "ACK of the tag; without it the message comes again, and is dead after the last delivery",
    ),
    Delivering("zeroctl", "durable binding", Promise.AT_LEAST_ONCE, True, True, "the same"),
)

TAKES: Final = {
    "blipmq": Side(
        "that of a connection",
        frozenset(),
        "the correlation id, which stays in the record",
        "for the log: NACK 400; for `listen.blipmq.max_frame_bytes`: the connection is closed",
    ),
    "felix": Side(
        "that of a QUIC stream",
        frozenset(),
        "a numeric `request_id`, which stays in the record",
        "for the log: `error` or `publish_error`; for `listen.felix.max_frame_bytes`: the connection is closed with a"
        " reason",
    ),
    "overhop": Side(
        "that of a connection",
        frozenset({Beside.VALUE, Beside.TIMING}),
        "nothing",
        "for the log: ERR `INVALID_JOB_PAYLOAD`; for an envelope: the connection is closed",
    ),
    "relink": Side(
        "that of a channel",
        frozenset({Beside.PARTS}),
        "the number on its channel, which stays in the record",
        "in a transaction: `uncommitted`; otherwise, and for `max_message_bytes`: the connection ends",
    ),
    "zeroctl": Side(
        "that of a connection",
        frozenset({Beside.HEADER}),
        "the id of its frame, which stays in the record",
        "REFUSE 413; a frame beyond both limits ends the connection with REFUSE 400",
    ),
}

GIVES: Final = {
    "blipmq": Side(
        "that of the log; what was not acknowledged comes again later",
        frozenset(),
        "topic, QoS, tag",
        "not offered, and counted (`too_large`); with QoS 1 it goes to the dead letters",
    ),
    "felix": Side("that of the log", frozenset(), "nothing", "not offered, and counted (`too_large`)"),
    "overhop": Side(
        "that of the log, but for schedules, delays and further attempts; one of the queue's workers gets a job",
        frozenset({Beside.VALUE, Beside.TIMING}),
        "topic, `jid`, attempt, deadline",
        "not offered, and counted (`too_large`); it goes to the dead letters",
    ),
    "relink": Side(
        "that of the log, on each channel",
        frozenset({Beside.PARTS}),
        "channel",
        "not offered, and counted (`too_large`); it goes to the dead letters",
    ),
    "zeroctl": Side(
        "that of the log; what was not acknowledged comes again later",
        frozenset({Beside.HEADER, Beside.TIMING}),
        "routing key, tag, deliveries; of other protocols' messages a header that the gateway makes, with"
        " `_transport-protocol`",
        "not offered, and counted (`too_large`); with acknowledgements it goes to the dead letters",
    ),
}

CEILINGS: Final = {
    "blipmq": Ceiling(
        "listen.blipmq.max_frame_bytes", limits.BLIPMQ_FRAME_BYTES.default, "bad_frames", ends=True
    ),
    "felix": Ceiling(
        "listen.felix.max_frame_bytes", limits.FELIX_FRAME_BYTES.default, "bad_headers", ends=True
    ),
    "overhop": Ceiling(
        "listen.overhop.wire.max_envelope_size_bytes",
        limits.OVERHOP_ENVELOPE_BYTES.default,
        "bad_frames",
        ends=True,
    ),
    "relink": Ceiling(
        "listen.relink.max_message_bytes", limits.RELINK_MESSAGE_BYTES.default, "bad_packets", ends=True
    ),
    "zeroctl": Ceiling(
        "listen.zeroctl.max_body_bytes", limits.ZEROCTL_BODY_BYTES.default, "too_large", ends=False
    ),
}

# The way that the gateway's own clients publish to be confirmed comes last, and so does the way they subscribe.
# MessagePack writes a text of 32 bytes with one byte more than here, and one of 256 with two.
ROOM_TO_TAKE: Final = (
    Room("blipmq", "PUBLISH", 12, "topic"),
    Room("felix", "binary batch of one", 14, "tenant, namespace, stream"),
    Room("felix", "`publish`", 107, "tenant, namespace, stream, `request_id`", base64=True),
    Room("felix", "`publish_batch` of one", 114, "tenant, namespace, stream, `request_id`", base64=True),
    Room("overhop", "ENQUEUE", 35, "queue, `rid`"),
    Room("relink", "message", 0, ""),
    Room("zeroctl", "MESSAGE", 0, ""),
)
ROOM_TO_GIVE: Final = (
    Room("blipmq", "PUBLISH", 12, "topic"),
    Room("felix", "`event`", 96, "tenant, namespace, stream", base64=True),
    Room("felix", "binary events", 16, ""),
    Room("overhop", "DELIVER", 149, "queue, topic"),
    Room("relink", "message", 0, ""),
    Room("zeroctl", "DELIVERY", 0, ""),
)

PROTOCOLS: Final = tuple(sorted(TAKES))


@dataclass(frozen=True, slots=True)
class Way:
    """One way to publish with one way to subscribe."""

    publishing: str
    delivering: str
    delivered: Promise  # from the log to the subscriber
    whole: Promise  # from the publisher to the subscriber
    survives: bool  # what was confirmed arrives although the gateway is killed


@dataclass(frozen=True, slots=True)
class Pair:
    """What a publisher of one protocol and a subscriber of another can count on."""

    publisher: str
    subscriber: str
    ways: tuple[Way, ...]  # the strongest comes last
    order: str
    acknowledgement: str  # what the publisher's means; the subscriber has no part in it
    carried: tuple[Beside, ...]
    not_carried: tuple[Beside, ...]
    too_large: str

    @property
    def best(self) -> Way:
        return self.ways[-1]


def way(publishing: Publishing, delivering: Delivering) -> Way:
    """Promises one behind the other. A subscription that keeps track of confirmed messages alone gives the others as
    they come."""
    delivered = delivering.promise
    if not (delivering.of_all or publishing.confirmed):
        delivered = Promise.AT_MOST_ONCE
    whole = publishing.promise.then(delivered)
    return Way(publishing.mode, delivering.mode, delivered, whole, whole.keeps and delivering.survives)


def pair(publisher: str, subscriber: str) -> Pair:
    ways = tuple(
        way(publishing, delivering)
        for publishing in PUBLISHING
        if publishing.protocol == publisher
        for delivering in DELIVERING
        if delivering.protocol == subscriber
    )
    said, can_say = TAKES[publisher].beside, GIVES[subscriber].beside
    (acknowledgement,) = (
        one.acknowledgement
        for one in PUBLISHING
        if (one.protocol, one.mode) == (publisher, ways[-1].publishing)
    )
    return Pair(
        publisher,
        subscriber,
        ways,
        f"taken: {TAKES[publisher].order}; given: {GIVES[subscriber].order}",
        acknowledgement,
        tuple(sorted(said & can_say)),
        tuple(sorted(said - can_say)),
        GIVES[subscriber].too_large,
    )


def room_to_take(protocol: str) -> Room:
    return [one for one in ROOM_TO_TAKE if one.protocol == protocol][-1]


def room_to_give(protocol: str) -> Room:
    return [one for one in ROOM_TO_GIVE if one.protocol == protocol][-1]


def largest(publisher: str, subscriber: str) -> int:
    """Bytes of the largest payload by the default limits, the names left out."""
    return min(
        room_to_take(publisher).largest(CEILINGS[publisher].default),
        room_to_give(subscriber).largest(CEILINGS[subscriber].default),
    )


def pairs() -> Iterator[Pair]:
    for publisher in PROTOCOLS:
        for subscriber in PROTOCOLS:
            yield pair(publisher, subscriber)


def as_data() -> dict[str, Any]:
    """All of it as what JSON knows."""

    def side(one: Side) -> dict[str, Any]:
        return {**asdict(one), "beside": sorted(one.beside)}

    return {
        "publishing": [asdict(one) for one in PUBLISHING],
        "delivering": [asdict(one) for one in DELIVERING],
        "takes": {protocol: side(one) for protocol, one in TAKES.items()},
        "gives": {protocol: side(one) for protocol, one in GIVES.items()},
        "beside": {name: asdict(one) for name, one in BESIDE.items()},
        "ceilings": {protocol: asdict(one) for protocol, one in CEILINGS.items()},
        "room_to_take": [asdict(one) for one in ROOM_TO_TAKE],
        "room_to_give": [asdict(one) for one in ROOM_TO_GIVE],
        "pairs": [{**asdict(one), "best": asdict(one.best)} for one in pairs()],
    }
