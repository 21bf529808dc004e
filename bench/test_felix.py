"""Speed of Felix: the codec against its plain-Python twin (the budget is 20 ×), and the whole way over QUIC on
loopback, with the gateway in a process of its own: binary batches in, next to the same bytes over TCP with TLS; events
out to 1 and 10 subscribers; the cache with 32 requests in flight.

The figures of the QUIC runs are in extra_info: MB/s of payload, messages a second, latencies in microseconds."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from headrace.clients.felix import FelixClient
from headrace.clients.shell import new_loop
from headrace.quic.certificates import make_certificate
from headrace.quic.engine import Settings
from headrace.wire import felix
from tests.gateway.gateways import GatewayProcess
from tests.oracle import felix as twin

CODECS = pytest.mark.parametrize("codec", [felix, twin], ids=["compiled", "twin"])
ENGINES = pytest.mark.parametrize("engine", ["aioquic", "qh3"])
BATCHES = pytest.mark.parametrize(("count", "size"), [(64, 256), (64, 4096)], ids=["64x256", "64x4096"])
# As over a network, and as on one machine or with jumbo frames.
DATAGRAMS = pytest.mark.parametrize("datagram", [1350, 8900])
FRAMES = 100
BYTES = 32 << 20  # of payload in a round
ROUNDS = 3
IN_FLIGHT = 32
REQUESTS = 6400


# --- the codec ----------------------------------------------------------------------------------------------------


@CODECS
def test_read_headers(benchmark: BenchmarkFixture, codec: Any) -> None:
    benchmark.group = f"read {FRAMES * 10} empty frames"
    raw = felix.encode_frame(b"") * (FRAMES * 10)
    assert len(benchmark(lambda: codec.Decoder().feed(raw))) == FRAMES * 10


@CODECS
@BATCHES
def test_read_batches(benchmark: BenchmarkFixture, codec: Any, count: int, size: int) -> None:
    """As a session reads them: every payload found and measured, none made an object."""
    benchmark.group = f"read {FRAMES} batches of {count} × {size} bytes"
    raw = felix.encode_publish_batch("t1", "default", "demo", [bytes(size)] * count) * FRAMES
    assert benchmark(codec.measure_batches, raw) == (FRAMES * count, FRAMES * count * size)


@CODECS
@BATCHES
def test_decode_batches_to_objects(benchmark: BenchmarkFixture, codec: Any, count: int, size: int) -> None:
    benchmark.group = f"decode {FRAMES} batches of {count} × {size} bytes to bytes objects"
    payload = felix.encode_publish_batch("t1", "default", "demo", [bytes(size)] * count)[12:]

    def decode() -> int:
        return sum(len(codec.decode_publish_batch(payload)[3]) for _ in range(FRAMES))

    assert benchmark(decode) == FRAMES * count


@CODECS
def test_encode_batch(benchmark: BenchmarkFixture, codec: Any) -> None:
    benchmark.group = "encode a batch of 64 × 256 bytes"
    payloads = [bytes(256)] * 64
    assert len(benchmark(codec.encode_publish_batch, "t1", "default", "demo", payloads)) > 64 * 256


@pytest.mark.parametrize("way", ["compiled", "twin"])
def test_base64(benchmark: BenchmarkFixture, way: str) -> None:
    benchmark.group = "decode 64 Base64 texts of 256 bytes in JSON"
    raw = bytes(felix.raw_payloads([bytes(256)] * 64))
    if way == "compiled":
        assert len(benchmark(felix.payloads_of, raw)) == 64
    else:
        import json

        assert len(benchmark(lambda: [twin.unb64(text) for text in json.loads(raw)])) == 64


# --- over QUIC ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gateway(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GatewayProcess]:
    """On its own engine, with a log that is large enough to be written to freely."""
    engine = request.getfixturevalue("engine")
    datagram = request.getfixturevalue("datagram") if "datagram" in request.fixturenames else 1350
    sets = (
        "log.segment_bytes=64MiB",
        "log.retention_bytes=2GiB",
        "log.on_full=drop_oldest",
        "log.sync=interval:20",
        "drop.enabled=false",
        f"quic.engine={engine}",
        f"quic.max_datagram_bytes={datagram}",
    )
    with GatewayProcess(tmp_path, *sets) as running:
        yield running


def measure(
    benchmark: BenchmarkFixture,
    gateway: GatewayProcess,
    engine: Any,
    do: Callable[[FelixClient], Awaitable[Any]],
    datagram: int = 1350,
) -> None:
    """Rounds of `do` on one connection."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        settings = Settings(max_datagram_bytes=datagram)
        client = FelixClient(gateway.places["felix"], engine=engine, settings=settings, timeout=120)
        runner.run(client.connect())
        runner.run(do(client))  # once to warm up
        benchmark.pedantic(lambda: runner.run(do(client)), rounds=ROUNDS)

        async def close() -> None:
            client.abort()

        runner.run(close())


def note_rate(benchmark: BenchmarkFixture, messages: int, size: int) -> None:
    best = benchmark.stats.stats.min
    benchmark.extra_info["messages_per_second"] = round(messages / best)
    benchmark.extra_info["megabytes_per_second"] = round(messages * size / best / 1e6, 1)


@ENGINES
@BATCHES
@DATAGRAMS
def test_publish_binary_batches(
    benchmark: BenchmarkFixture, gateway: GatewayProcess, engine: str, count: int, size: int, datagram: int
) -> None:
    benchmark.group = f"publish binary batches of {count} × {size} bytes"
    batch = [bytes(size)] * count
    batches = BYTES // (count * size)

    async def publish(client: FelixClient) -> None:
        for _ in range(batches):
            await client.publish_batch("t1", "default", "demo", batch, binary=True, ack=False)
        await client.flush()

    measure(benchmark, gateway, engine, publish, datagram)
    note_rate(benchmark, batches * count, size)


SINK = """
import socket, ssl, sys
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1], sys.argv[2])
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    plain, _ = server.accept()
    with context.wrap_socket(plain, server_side=True) as peer:
        buffer = bytearray(1 << 18)
        wanted = int(sys.argv[3])
        while True:
            got = 0
            while got < wanted:
                n = peer.recv_into(buffer)
                if n == 0:
                    sys.exit()
                got += n
            peer.sendall(b"!")
"""


@BATCHES
def test_the_same_bytes_over_tcp_with_tls(
    benchmark: BenchmarkFixture, tmp_path: Path, count: int, size: int
) -> None:
    """The limit: encrypted bytes from one process to another, which throws them away."""
    benchmark.group = f"publish binary batches of {count} × {size} bytes"
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = make_certificate(["localhost"])
    certificate.write_bytes(made[0])
    key.write_bytes(made[1])
    frame = felix.encode_publish_batch("t1", "default", "demo", [bytes(size)] * count)
    batches = BYTES // (count * size)
    arguments = [str(certificate), str(key), str(batches * len(frame))]
    with subprocess.Popen(
        [sys.executable, "-c", SINK, *arguments], stdout=subprocess.PIPE, text=True
    ) as sink:
        assert sink.stdout is not None
        port = int(sink.stdout.readline())
        context = ssl.create_default_context(cafile=certificate)
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as peer,
        ):

            def send() -> None:
                for _ in range(batches):
                    peer.sendall(frame)
                assert peer.recv(1) == b"!"

            benchmark.pedantic(send, rounds=ROUNDS, warmup_rounds=1)
    note_rate(benchmark, batches * count, size)


@ENGINES
@pytest.mark.parametrize("subscribers", [1, 10])
def test_fan_out(benchmark: BenchmarkFixture, gateway: GatewayProcess, engine: str, subscribers: int) -> None:
    """Events of 256 bytes; a message counts once for each subscriber that gets it."""
    benchmark.group = "events of 256 bytes to 1 and 10 subscribers"
    messages = 16_384 // subscribers // 64 * 64

    async def deliver(client: FelixClient) -> None:
        async with contextlib.AsyncExitStack() as stack:
            subscriptions = [
                await stack.enter_async_context(client.subscribe("t1", "default", "fan"))
                for _ in range(subscribers)
            ]

            async def drain(events: Any) -> None:
                for _ in range(messages):
                    await anext(events)

            readers = [asyncio.create_task(drain(one)) for one in subscriptions]
            for _ in range(messages // 64):
                await client.publish_batch("t1", "default", "fan", [bytes(256)] * 64, binary=True, ack=False)
            await asyncio.gather(*readers)

    measure(benchmark, gateway, engine, deliver)
    note_rate(benchmark, messages * subscribers, 256)


@ENGINES
@pytest.mark.parametrize("what", ["put", "get"])
def test_cache(benchmark: BenchmarkFixture, gateway: GatewayProcess, engine: str, what: str) -> None:
    benchmark.group = f"cache {what}, 100 bytes, {IN_FLIGHT} in flight"
    latencies: list[float] = []

    async def ask(client: FelixClient) -> None:
        latencies.clear()
        keys = iter(range(REQUESTS))

        async def worker() -> None:
            for number in keys:
                start = time.perf_counter()
                if what == "put":
                    await client.cache_put(f"key-{number}", bytes(100))
                else:
                    await client.cache_get(f"key-{number % 100}")
                latencies.append(time.perf_counter() - start)

        await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))

    measure(benchmark, gateway, engine, ask)
    latencies.sort()
    benchmark.extra_info["requests_per_second"] = round(REQUESTS / benchmark.stats.stats.min)
    for percent in (50, 99):
        microseconds = latencies[len(latencies) * percent // 100] * 1e6
        benchmark.extra_info[f"p{percent}_us"] = round(microseconds)
