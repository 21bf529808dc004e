"""Speed of the zeroctl codec and of its plain-Python twin over the same bytes; the budget is 20 × the twin.

It measures memory to memory: no socket or log is in it. `python -m bench.zeroctl` measures the gateway beside
RabbitMQ."""

import hashlib
import json
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from headrace.wire import zeroctl
from tests.oracle import zeroctl as twin

CODECS = pytest.mark.parametrize("codec", [zeroctl, twin], ids=["compiled", "twin"])
MESSAGES = 1000
KEY = "event.parser.web1"


def header(body: bytes) -> bytes:
    """200 bytes, as a node on our carrier sends them."""
    fields = {
        "node-name": "web1.example.com-parser",
        "node-uuid": "fdcab500-b417-5e99-aa62-9d2db81df9e0",
        "ts": 1586721895.123456,
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    made = json.dumps(fields).encode()
    return made[:-1] + b" " * (200 - len(made)) + b"}"


@CODECS
@pytest.mark.parametrize("size", [100, 1024])
def test_decode_and_judge_messages(benchmark: BenchmarkFixture, codec: Any, size: int) -> None:
    benchmark.group = f"decode {MESSAGES} MESSAGE with headers of 200 and bodies of {size} bytes"
    body = bytes(size)
    raw = b"".join(zeroctl.encode_message(KEY, header(body), body, i) for i in range(MESSAGES))
    frames = benchmark(lambda: codec.Decoder().feed(raw))
    assert len(frames) == MESSAGES


@CODECS
def test_decode_acknowledgements(benchmark: BenchmarkFixture, codec: Any) -> None:
    benchmark.group = f"decode {MESSAGES} ACK of one tag each"
    raw = b"".join(zeroctl.encode_ack(1, [i]) for i in range(MESSAGES))
    frames = benchmark(lambda: codec.Decoder().feed(raw))
    assert len(frames) == MESSAGES


@pytest.mark.parametrize("judge", ["compiled", "twin"])
@pytest.mark.parametrize("size", [200, 65536])
def test_judge_a_header(benchmark: BenchmarkFixture, judge: str, size: int) -> None:
    benchmark.group = f"judge a header of {size} bytes"
    raw = header(b"")
    if size > 200:
        raw = raw.rstrip(b"} ") + b', "filler": "' + b"x" * (size - len(raw.rstrip(b"} ")) - 15) + b'"}'
    if judge == "compiled":
        benchmark(zeroctl.header_sha256, raw)
    else:
        benchmark(twin.read_header, raw)
