"""What is measured: the families of runs, who takes part in each, and how much is sent. Starts nothing and
knows nothing of the figures that should come out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

SIZES = (16, 100, 256, 1024)
BUDGET_SIZES = (100, 256)

# A burst must fit into the segments that the gateway keeps ready (3 of 64 MiB by default), with room to
# spare: beyond them it measures how fast segments are prepared, which is what `sustained` is for.
BURST_BYTES = 128 << 20
RECORD_BYTES = 80  # more than a log record needs beside the payload

# The highest rate that lasts is found with twice what the gateway's log keeps (servers.RETENTION): after the first such
# run the log has its size and goes on in recycled segments, as it does in a long run.
LASTING_BYTES = 2 << 30

# The same pipelining for all that confirm: at most so many messages unconfirmed on a connection, written
# (and, in BlipMQ, followed by the PING whose answer confirms them) so many at a time.
WINDOW = 1024
BATCH = 128


class Contender(StrEnum):
    """Who is measured."""

    HEADRACE = "headrace"
    NATS = "nats"
    JETSTREAM = "jetstream"
    REDIS = "redis"
    DRAIN = "drain"
    MEMORY = "memory"

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS = {
    Contender.HEADRACE: "Headrace",
    Contender.NATS: "nats-server",
    Contender.JETSTREAM: "JetStream",
    Contender.REDIS: "Redis Streams",
    Contender.DRAIN: "read and discard",
    Contender.MEMORY: "memory copy",
}


class Family(StrEnum):
    """A kind of run; also what `--only` takes."""

    PUBLISH = "publish"
    SUSTAINED = "sustained"
    DELIVER = "deliver"
    DELIVER_QOS1 = "deliver-qos1"
    INTERVAL = "interval"
    ALWAYS = "always"
    ROUNDTRIP = "roundtrip"
    LATENCY = "latency"

    @property
    def headline(self) -> str:
        return _HEADLINES[self]

    @property
    def timed(self) -> bool:
        """Whether its figure is a time, where less is better."""
        return self in (Family.ROUNDTRIP, Family.LATENCY)


_HEADLINES = {
    Family.PUBLISH: "Publish, QoS 0: a burst into the warm segment pool",
    Family.SUSTAINED: "Publish, QoS 0: sustained",
    Family.DELIVER: "Publish → deliver, QoS 0",
    Family.DELIVER_QOS1: "Publish → deliver, QoS 1 with acknowledgements, interval:20",
    Family.INTERVAL: "Confirmed publish, QoS 1, interval:20",
    Family.ALWAYS: "Confirmed publish, QoS 1, always",
    Family.ROUNDTRIP: "One round trip at a time",
    Family.LATENCY: "Latency at half of the maximum rate",
}


@dataclass(frozen=True, slots=True)
class Amount:
    """How much a run sends. `bursts` are counted without the first, which only warms up."""

    messages: int = 0
    seconds: float = 0.0
    bursts: int = 0
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of a table: what each of its contenders is given to do."""

    family: Family
    size: int
    connections: int
    contenders: tuple[Contender, ...]
    amount: Amount
    rounds: int
    sync: str
    qos: int = 0

    @property
    def name(self) -> str:
        connections = f"{self.connections} connection{'s' if self.connections > 1 else ''}"
        return f"{self.family}, {self.size} B, {connections}"


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a whole run is."""

    sizes: tuple[int, ...]
    connections: tuple[int, ...]
    rounds: int
    bursts: int
    pause: float
    """Between bursts: the gateway prepares new segments meanwhile."""
    share: float
    """Of the messages of a whole run."""
    sustained_seconds: float
    latency_seconds: float
    always_messages: tuple[tuple[int, int], ...]
    """Connections, and how many messages they send: enough for many windows on each."""
    sync_qos0: str = "always"


FULL = Scale(
    sizes=SIZES,
    connections=(1, 16),
    rounds=3,
    bursts=5,
    pause=1.0,
    share=1.0,
    sustained_seconds=60.0,
    latency_seconds=5.0,
    always_messages=((1, 50_000), (16, 150_000), (64, 300_000)),
)
# A smoke run: every family once, in under a minute.
QUICK = Scale(
    sizes=(100,),
    connections=(1,),
    rounds=1,
    bursts=2,
    pause=0.5,
    share=0.25,
    sustained_seconds=2.0,
    latency_seconds=1.0,
    always_messages=((64, 100_000),),
)


def cells(scale: Scale, families: Sequence[Family]) -> Iterator[Cell]:
    """Every cell of these families."""
    for family in families:
        yield from _CELLS[family](scale)


def _burst(scale: Scale, size: int) -> Amount:
    messages = int(BURST_BYTES / (size + RECORD_BYTES) * scale.share)
    return Amount(messages=messages, bursts=scale.bursts, pause=scale.pause)


def _grid(scale: Scale) -> Iterator[tuple[int, int]]:
    return ((size, connections) for connections in scale.connections for size in scale.sizes)


def _budget_sizes(scale: Scale) -> Iterator[int]:
    return (size for size in BUDGET_SIZES if size in scale.sizes)


def _publish(scale: Scale) -> Iterator[Cell]:
    contenders = (Contender.HEADRACE, Contender.NATS, Contender.DRAIN, Contender.MEMORY)
    for size, connections in _grid(scale):
        # Copying memory has no connections.
        taking_part = contenders if connections == 1 else contenders[:-1]
        amount = _burst(scale, size)
        yield Cell(Family.PUBLISH, size, connections, taking_part, amount, scale.rounds, scale.sync_qos0)


def _sustained(scale: Scale) -> Iterator[Cell]:
    amount = Amount(seconds=scale.sustained_seconds)
    for size in _budget_sizes(scale):
        contenders = (Contender.HEADRACE, Contender.NATS)
        yield Cell(Family.SUSTAINED, size, 1, contenders, amount, min(scale.rounds, 2), scale.sync_qos0)


def _deliver(scale: Scale) -> Iterator[Cell]:
    for size, connections in _grid(scale):
        contenders = (Contender.HEADRACE, Contender.NATS)
        amount = _burst(scale, size)
        yield Cell(Family.DELIVER, size, connections, contenders, amount, scale.rounds, scale.sync_qos0)


def _deliver_qos1(scale: Scale) -> Iterator[Cell]:
    for size in _budget_sizes(scale):
        amount = _burst(scale, size)
        contenders = (Contender.HEADRACE,)
        yield Cell(Family.DELIVER_QOS1, size, 1, contenders, amount, scale.rounds, "interval:20", qos=1)


def _interval(scale: Scale) -> Iterator[Cell]:
    amount = Amount(messages=int(200_000 * scale.share), bursts=scale.bursts, pause=0.2)
    for size, connections in _grid(scale):
        contenders = (Contender.HEADRACE, Contender.JETSTREAM)
        yield Cell(Family.INTERVAL, size, connections, contenders, amount, scale.rounds, "interval:20", qos=1)


def _always(scale: Scale) -> Iterator[Cell]:
    contenders = (Contender.HEADRACE, Contender.REDIS)
    for connections, messages in scale.always_messages:
        amount = Amount(messages=messages, bursts=scale.bursts, pause=0.2)
        for size in scale.sizes:
            yield Cell(Family.ALWAYS, size, connections, contenders, amount, scale.rounds, "always", qos=1)


def _roundtrip(scale: Scale) -> Iterator[Cell]:
    amount = Amount(messages=int(20_000 * scale.share), seconds=10.0)
    contenders = (Contender.HEADRACE, Contender.NATS)
    yield Cell(Family.ROUNDTRIP, 100, 1, contenders, amount, scale.rounds, "interval:20", qos=1)


def _latency(scale: Scale) -> Iterator[Cell]:
    for size in _budget_sizes(scale):
        # The second of two long bursts finds the highest rate that lasts; then comes the timed run at half of it.
        messages = int(LASTING_BYTES / (size + RECORD_BYTES) * scale.share)
        amount = Amount(messages=messages, seconds=scale.latency_seconds, bursts=1, pause=scale.pause)
        contenders = (Contender.HEADRACE, Contender.NATS)
        yield Cell(Family.LATENCY, size, 1, contenders, amount, scale.rounds, scale.sync_qos0)


_CELLS = {
    Family.PUBLISH: _publish,
    Family.SUSTAINED: _sustained,
    Family.DELIVER: _deliver,
    Family.DELIVER_QOS1: _deliver_qos1,
    Family.INTERVAL: _interval,
    Family.ALWAYS: _always,
    Family.ROUNDTRIP: _roundtrip,
    Family.LATENCY: _latency,
}
