"""Speed of Relink: the codec next to its plain-Python twin and to copying memory, and messages from a peer's bytes
through the log to a peer's bytes, next to BlipMQ. There are no sockets in it."""

import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from headrace.bus import Bus
from headrace.config.schema import Key
from headrace.log import Log
from headrace.session import Session
from headrace.sessions.blipmq import Blipmq
from headrace.sessions.relink import Endpoint, Relink
from headrace.sessions.rights import Keyring
from headrace.wire import blipmq, relink
from tests.oracle import relink as twin

CODECS = pytest.mark.parametrize("codec", [relink, twin], ids=["compiled", "twin"])
PARTS = pytest.mark.parametrize("parts", [1, 8])
PART = bytes(range(100))
MESSAGES = 1000  # of the codec: a read event of some hundred KiB
BATCH = 4800  # of the sessions: as many on each of 16 channels


def stream(parts: int, channels: int = 1, count: int = MESSAGES) -> bytes:
    return b"".join([relink.encode_message(i % channels, 4, [PART] * parts) for i in range(count)])


@CODECS
@PARTS
def test_build(benchmark: BenchmarkFixture, codec: Any, parts: int) -> None:
    benchmark.group = f"build {MESSAGES} Relink messages of {parts} x 100 bytes"
    pieces = [PART] * parts
    encode = codec.encode_message

    def build() -> None:
        for _ in range(MESSAGES):
            encode(7, 4, pieces)

    benchmark(build)
    benchmark.extra_info["bytes"] = len(stream(parts))


@CODECS
@PARTS
def test_parse(benchmark: BenchmarkFixture, codec: Any, parts: int) -> None:
    benchmark.group = f"parse {MESSAGES} Relink messages of {parts} x 100 bytes"
    raw = stream(parts)

    def parse() -> int:
        return len(codec.Decoder("connector", handshake=False, connector_size=4, listener_size=4).feed(raw))

    assert benchmark(parse) == MESSAGES
    benchmark.extra_info["bytes"] = len(raw)


@CODECS
@PARTS
def test_parse_and_take_the_parts(benchmark: BenchmarkFixture, codec: Any, parts: int) -> None:
    benchmark.group = f"parse {MESSAGES} Relink messages of {parts} x 100 bytes, and take their parts"
    raw = stream(parts)
    fields = (lambda item: item.parts) if codec is relink else (lambda item: item.fields["parts"])

    def parse() -> int:
        decoder = codec.Decoder("connector", handshake=False, connector_size=4, listener_size=4)
        return sum([len(fields(item)) for item in decoder.feed(raw)])

    assert benchmark(parse) == MESSAGES * parts
    benchmark.extra_info["bytes"] = len(raw)


@PARTS
def test_copy_as_much_memory(benchmark: BenchmarkFixture, parts: int) -> None:
    benchmark.group = f"parse {MESSAGES} Relink messages of {parts} x 100 bytes"
    raw = stream(parts)
    assert len(benchmark(bytearray, raw)) == len(raw)
    benchmark.extra_info["bytes"] = len(raw)


@CODECS
def test_parse_acknowledgements(benchmark: BenchmarkFixture, codec: Any) -> None:
    benchmark.group = f"parse {MESSAGES} Relink acknowledgements"
    raw = relink.encode_acknowledgement(1, 7, 4) * (MESSAGES // 2)
    raw += relink.encode_acknowledgement(0, 7, 4, 9) * (MESSAGES // 2)

    def parse() -> int:
        return len(codec.Decoder("connector", handshake=False, connector_size=4, listener_size=4).feed(raw))

    assert benchmark(parse) == MESSAGES


# --- publish to deliver -------------------------------------------------------------------------------------


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    log = Log(tmp_path / "log", sync="none", pool_segments=8, on_full="drop_oldest")
    made = Bus(log)
    yield made
    made.close()
    log.close()


def fed(bus: Bus, session: Session, data: bytes) -> int:
    """Has a session take all of this; how many bytes it answered. A log that prepares a segment is waited for."""
    size = len(session.feed(data))
    while session.blocked:
        if session.waits_space:
            select.select([bus.log.event_fd], [], [], 0.1)
        bus.log.on_event()
        size += len(session.feed())
    return size


def relink_round(bus: Bus, parts: int, channels: int) -> Callable[[], int]:
    """One link that gets what it sends: bytes in, log, bytes out, acknowledgements."""
    endpoint = Endpoint("loop", publish="loop.{channel}", deliver="loop.{channel}")
    shared = Relink(bus, Keyring(), [endpoint], window=1 << 20, max_outstanding=1 << 22)
    session = shared.session()
    session.feed(relink.encode_version() + relink.encode_hello("loop", 4, 4))
    raw = stream(parts, channels, BATCH)
    chunks = list(in_chunks(raw, 1 << 18))
    sent = 0

    def turn() -> int:
        nonlocal sent
        size = 0
        for chunk in chunks:
            size += fed(bus, session, chunk)
            size += len(session.pull(room=1 << 20))
        while more := session.pull(room=1 << 20):
            size += len(more)
        sent += BATCH // channels
        session.feed(
            b"".join(
                [relink.encode_acknowledgement(1, i, 4, (sent - 1) & 0xFFFFFFFF) for i in range(channels)]
            )
        )
        bus.log.on_event()
        assert not session.closing
        return size

    return turn


def blipmq_round(bus: Bus, size: int) -> Callable[[], int]:
    """The same with BlipMQ: QoS 1 publishes, polls, acknowledgements."""
    key = Key(name="dev", key="k", publish=["#"], subscribe=["#"])
    session = Blipmq(bus, Keyring([key])).session()
    session.feed(blipmq.encode_hello(1, 1) + blipmq.encode_auth("k", 2))
    (made,) = blipmq.Decoder().feed(session.feed(blipmq.encode_subscribe("loop", 0, 3)))
    assert isinstance(made, blipmq.Ack)
    raw = blipmq.encode_publish_many("loop", [bytes(size)] * BATCH, 1, 10)
    chunks = list(in_chunks(raw, 1 << 18))
    polls = blipmq.encode_poll(made.subscription, 5) * 400

    def turn() -> int:
        total = 0
        for chunk in chunks:
            fed(bus, session, chunk)
        for _ in range(BATCH // 400):
            total += fed(bus, session, polls)
        bus.log.on_event()
        assert not session.closing
        return total

    return turn


def in_chunks(raw: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(raw), size):
        yield raw[at : at + size]


@PARTS
@pytest.mark.parametrize("channels", [1, 16])
def test_publish_to_deliver(benchmark: BenchmarkFixture, bus: Bus, parts: int, channels: int) -> None:
    benchmark.group = f"publish to deliver {BATCH} messages of {100 * parts} bytes"
    turn = relink_round(bus, parts, channels)
    head = len(stream(parts, 1, 1))
    assert turn() >= BATCH * head
    benchmark(turn)
    benchmark.extra_info["messages"] = BATCH


@PARTS
def test_publish_to_deliver_with_blipmq(benchmark: BenchmarkFixture, bus: Bus, parts: int) -> None:
    benchmark.group = f"publish to deliver {BATCH} messages of {100 * parts} bytes"
    turn = blipmq_round(bus, 100 * parts)
    assert turn() >= BATCH * 100 * parts
    benchmark(turn)
    benchmark.extra_info["messages"] = BATCH
