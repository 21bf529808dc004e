"""Speed of the BlipMQ codec and of its plain-Python twin over the same bytes; the budget is 20 × the twin.

It measures memory to memory: no socket, session or log is in it."""

from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from headrace.wire import blipmq
from tests.oracle import blipmq as twin

CODECS = pytest.mark.parametrize("codec", [blipmq, twin], ids=["compiled", "twin"])
SIZES = pytest.mark.parametrize("size", [16, 100, 256, 1024])
FRAMES = 1000  # a read event of some hundred KiB


@CODECS
@SIZES
def test_encode_publish_many(benchmark: BenchmarkFixture, codec: Any, size: int) -> None:
    benchmark.group = f"encode {FRAMES} PUBLISH of {size} bytes"
    messages = [bytes(size)] * FRAMES
    encoded = benchmark(codec.encode_publish_many, "sensors.room.7", messages, 0, 1)
    assert len(encoded) == FRAMES * (16 + len("sensors.room.7") + size)


@CODECS
@SIZES
def test_decode_publish(benchmark: BenchmarkFixture, codec: Any, size: int) -> None:
    benchmark.group = f"decode {FRAMES} PUBLISH of {size} bytes"
    raw = blipmq.encode_publish_many("sensors.room.7", [bytes(size)] * FRAMES, 0, 1)
    frames = benchmark(lambda: codec.Decoder().feed(raw))
    assert len(frames) == FRAMES


@CODECS
def test_decode_publish_on_changing_topics(benchmark: BenchmarkFixture, codec: Any) -> None:
    benchmark.group = f"decode {FRAMES} PUBLISH of 100 bytes, each on another topic"
    raw = b"".join(blipmq.encode_publish(f"sensors.room.{i}", bytes(100), 0, i) for i in range(FRAMES))
    frames = benchmark(lambda: codec.Decoder().feed(raw))
    assert len(frames) == FRAMES


@CODECS
def test_decode_ack_and_poll(benchmark: BenchmarkFixture, codec: Any) -> None:
    benchmark.group = f"decode {FRAMES} ACK and POLL in turn"
    raw = (blipmq.encode_ack(7, 1) + blipmq.encode_poll(7, 2)) * (FRAMES // 2)
    frames = benchmark(lambda: codec.Decoder().feed(raw))
    assert len(frames) == FRAMES


@CODECS
def test_encode_single_publish(benchmark: BenchmarkFixture, codec: Any) -> None:
    benchmark.group = "encode one PUBLISH of 100 bytes"
    message = bytes(100)
    assert len(benchmark(codec.encode_publish, "sensors.room.7", message, 0, 1)) == 130


@CODECS
def test_encode_single_ack(benchmark: BenchmarkFixture, codec: Any) -> None:
    benchmark.group = "encode one ACK"
    assert len(benchmark(codec.encode_ack, 7, 1)) == 21
