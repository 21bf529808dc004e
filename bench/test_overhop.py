"""Validating Overhop's envelopes: the compiled pass beside its twin with msgpack's unpacker (the budget is 20 ×), and
beside msgspec's decoder.

All of them are given the same payloads and must tell the same type. msgspec gets the struct that it is best at; it
does not look into `p` where that is raw, and so does less than the protocol asks for."""

import os
from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from headrace.wire import overhop
from tests.oracle import overhop as twin


class Envelope(msgspec.Struct):
    v: int
    t: int
    rid: str
    p: msgspec.Raw


class WholeEnvelope(msgspec.Struct):
    v: int
    t: int
    rid: str
    p: dict[str, Any]


NESTED = {
    "to": ["a@example.org", "b@example.org"],
    "vars": {f"name-{i}": [i, str(i), None, True] for i in range(20)},
}
PAYLOADS = {
    "ping": msgpack.packb({"v": 2, "t": 3, "rid": "17", "p": {}}),
    "enqueue-bin-256": msgpack.packb(
        {"p": {"q": "mail", "job_payload": os.urandom(256)}, "rid": "4711", "t": 14, "v": 2}
    ),
    "enqueue-nested": msgpack.packb(
        {"p": {"q": "mail", "job_payload": NESTED, "max_attempts": 3}, "rid": "4711", "t": 14, "v": 2}
    ),
}

raw_decoder = msgspec.msgpack.Decoder(Envelope)
whole_decoder = msgspec.msgpack.Decoder(WholeEnvelope)

CHECKS: dict[str, Callable[[bytes], object]] = {
    "check": overhop.check,
    "parse": lambda payload: overhop.parse(payload).type,
    "twin": lambda payload: twin.parse(payload)[0],
    "msgspec-raw": lambda payload: raw_decoder.decode(payload).t,
    "msgspec-whole": lambda payload: whole_decoder.decode(payload).t,
}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_validate(benchmark: BenchmarkFixture, payload: str, name: str) -> None:
    data, judge = PAYLOADS[payload], CHECKS[name]
    kind = overhop.parse(data).type
    assert judge(data) == (True if name == "check" else kind)
    benchmark.group = payload
    benchmark.extra_info["bytes"] = len(data)
    benchmark(judge, data)


def test_stream(benchmark: BenchmarkFixture) -> None:
    """A read event's worth of jobs through the decoder, which makes a message of each."""
    frame = overhop.encode(14, "4711", {"q": "mail", "job_payload": os.urandom(256)})
    stream = frame * (256 * 1024 // len(frame))
    benchmark.extra_info["frames"] = len(stream) // len(frame)

    def decode() -> int:
        return len(overhop.Decoder().feed(stream))

    assert benchmark(decode) == len(stream) // len(frame)
