"""`headrace bench`: that its figures are right, and that it gets through to what it measures."""

import json
import os
import pty
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headrace.cli import bench, main
from headrace.clients import load
from headrace.clients.blipmq import NotAllowed
from headrace.clients.errors import (
    KEY_HINT,
    SERVE_HINT,
    ClientError,
    ConnectionFailed,
    ConnectionLost,
    OperationTimeout,
    ProtocolError,
)
from headrace.clients.load import BlipmqSpeech, Latencies, Load, Mode, NatsSpeech, Plan
from headrace.config.addresses import HostPort
from headrace.wire import blipmq
from tests.gateway.gateways import MAIN, PATIENCE, GatewayProcess
from tests.streams import run as run_loop
from tests.suites import REQUIREMENTS


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with GatewayProcess(tmp_path_factory.mktemp("gateway"), "log.retention_bytes=256MiB") as running:
        yield f"blipmq://{running.places['blipmq']}"


@pytest.fixture(scope="module")
def nats() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = REQUIREMENTS["nats-server"].find()
    assert program is not None
    server = subprocess.Popen([program, "-a", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        yield f"nats://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments], prog_name="headrace")


def figures(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def check(found: dict[str, Any], target: str, mode: str, count: int) -> None:
    assert (found["target"], found["mode"]) == (target, mode)
    assert (found["messages"], found["lost"]) == (count, 0)
    assert found["messages_per_second"] == pytest.approx(count / found["seconds"])
    assert found["bytes_per_second"] == pytest.approx(found["messages_per_second"] * found["size"])
    latency = found["latency_seconds"]
    assert 0 < latency["p50"] <= latency["p99"] <= latency["p99.9"] <= latency["slowest"] <= found["seconds"]


# --- against servers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", load.MODES)
@pytest.mark.parametrize(("connections", "count", "size"), [(1, 3000, 100), (3, 1000, 0), (2, 700, 5000)])
def test_every_mode_gets_every_message_through_a_gateway(
    gateway: str, mode: Mode, connections: int, count: int, size: int
) -> None:
    found = figures("--mode", mode, "--target", gateway, f"-c{connections}", f"-n{count}", f"--size={size}")
    assert (found["connections"], found["size"], found["rate"]) == (connections, size, None)
    check(found, gateway, mode, count)


@pytest.mark.needs("nats-server")
@pytest.mark.parametrize("mode", ["publish", "end-to-end", "round-trip"])
@pytest.mark.parametrize(("connections", "count", "size"), [(1, 3000, 100), (3, 1000, 0), (2, 700, 5000)])
def test_every_mode_gets_every_message_through_a_nats_server(
    nats: str, mode: Mode, connections: int, count: int, size: int
) -> None:
    found = figures("--mode", mode, "--target", nats, f"-c{connections}", f"-n{count}", f"--size={size}")
    check(found, nats, mode, count)


@pytest.mark.needs("nats-server")
def test_what_a_nats_server_refuses_is_told(nats: str) -> None:
    result = run("--mode", "publish", "--target", nats, "--size", "1048576", "-n1")
    assert result.exit_code == 0  # its limit
    plan = Plan("nats", place_of(nats), "publish", 1048577, 1, 1, 10.0)
    with pytest.raises(ClientError, match="the nats-server says: 'Maximum Payload Violation'"):
        run_loop("asyncio", Load(plan).run)


@pytest.mark.parametrize("mode", load.MODES)
def test_a_rate_is_kept_in_every_mode(gateway: str, mode: Mode) -> None:
    found = figures("--mode", mode, "--target", gateway, "-c2", "--rate", "2000", "-n", "400")
    assert found["rate"] == 2000
    check(found, gateway, mode, 400)
    assert found["messages_per_second"] < 2200  # the first is due at once


def test_it_stops_when_the_time_is_up(gateway: str) -> None:
    found = figures("--mode", "end-to-end", "--target", gateway, "--rate", "1000", "--seconds", "0.3")
    assert 0 < found["messages"] < 200_000
    assert found["lost"] == 0


def test_fewer_messages_than_connections_use_fewer_connections(gateway: str) -> None:
    check(figures("--mode", "publish", "--target", gateway, "-c10", "-n3"), gateway, "publish", 3)


def test_the_text_says_what_the_figures_say(gateway: str) -> None:
    result = run("--mode", "end-to-end", "--target", gateway, "-n", "5000", "--rate", "50000")
    title, messages, throughput, latency = result.stdout.splitlines()
    assert title == f"{gateway}  end-to-end, 100 bytes, 1 connection, 50,000 messages/s wanted"
    assert messages.startswith("messages    5,000 in 0.")
    assert " messages/s, " in throughput
    assert throughput.endswith(" MiB/s")
    assert [word in latency for word in ("p50 ", "p99 ", "p99.9 ", "slowest ")] == [True] * 4
    assert latency.endswith("(of a message, until it has arrived)")


def test_a_terminal_shows_progress(gateway: str) -> None:
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [
        sys.executable,
        "-c",
        MAIN,
        "bench",
        "--target",
        gateway,
        "--rate",
        "2000",
        "-n1000",
    ]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=theirs) as child:
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 65536):
                shown += data
        except OSError:
            pass  # the terminal's other side was closed
        finally:
            os.close(ours)
        assert child.stdout is not None
        assert b"1,000 in" in child.stdout.read(), shown
        assert child.wait(PATIENCE) == 0
    assert b"publish" in shown
    assert b"/1000" in shown


def test_a_pipe_gets_the_figures_alone(gateway: str) -> None:
    result = run("--mode", "publish", "--target", gateway, "-n10")
    assert result.stderr == ""


# --- errors -------------------------------------------------------------------------------------------------


def place_of(target: str) -> HostPort:
    host, _, port = target.partition("://")[2].rpartition(":")
    return HostPort(host, int(port))


def plan_for(port: int, mode: Mode = "publish", system: load.System = "blipmq") -> Plan:
    return Plan(system, HostPort("127.0.0.1", port), mode, 10, 1, 100_000, 10.0)


class Fake:
    """A server in a thread that answers with what a function makes of what it hears."""

    def __init__(self, answer: Callable[[bytes], bytes | None]) -> None:
        self._answer = answer
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        connected, _ = self._listening.accept()
        with connected:
            try:
                while data := connected.recv(1 << 20):
                    if (answer := self._answer(data)) is None:
                        return
                    connected.sendall(answer)
            except ConnectionError:
                pass

    def __enter__(self) -> "Fake":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()
        self._thread.join()


def greeted(data: bytes) -> bytes:
    return blipmq.encode_ack(0, 2) + blipmq.encode_ack(0, 3) + blipmq.encode_pong(1)


def test_a_server_that_is_not_there_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConnectionFailed, match=f"cannot connect to 127.0.0.1:{port}: connection refused"):
        run_loop("uvloop", Load(plan_for(port)).run)
    result = run("--target", f"blipmq://127.0.0.1:{port}")
    assert result.exit_code == 1
    assert (
        result.stderr
        == f"Error: cannot connect to 127.0.0.1:{port}: connection refused\nHint: {SERVE_HINT}\n"
    )


def test_a_wrong_key_is_said(gateway: str) -> None:
    result = run("--target", gateway, "--key", "wrong")
    assert (result.exit_code, result.stderr) == (1, f"Error: invalid API key (401)\nHint: {KEY_HINT}\n")


@pytest.mark.parametrize(
    ("second", "kind", "what"),
    [
        (None, ConnectionLost, "was closed"),
        (b"HTTP/1.1 400\r\n", ProtocolError, "does not speak BlipMQ"),
        (blipmq.encode_nack(401, "no", 5), NotAllowed, "no"),
        (blipmq.encode_pong(1) * 100, ProtocolError, "answered more than it was asked"),
    ],
    ids=["hangs up", "another protocol", "refusal", "too many answers"],
)
def test_what_goes_wrong_on_the_way_ends_the_run(
    second: bytes | None, kind: type[ClientError], what: str
) -> None:
    heard: list[bytes] = []

    def answer(data: bytes) -> bytes | None:
        heard.append(data)
        return greeted(data) if len(heard) == 1 else second

    with Fake(answer) as server, pytest.raises(kind, match=what):
        run_loop("asyncio", Load(plan_for(server.port)).run)


def test_a_server_that_never_answers_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "PATIENCE_SECONDS", 0.1)
    with (
        Fake(lambda data: b"") as server,
        pytest.raises(OperationTimeout, match=r"did not answer within 0\.1 s"),
    ):
        run_loop("asyncio", Load(plan_for(server.port)).run)
    heard: list[bytes] = []

    def greets_only(data: bytes) -> bytes:
        heard.append(data)
        return greeted(data) if len(heard) == 1 else b""

    with Fake(greets_only) as server, pytest.raises(OperationTimeout, match="did not answer"):
        run_loop("asyncio", Load(plan_for(server.port)).run)


def test_messages_that_do_not_arrive_are_counted_and_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "PATIENCE_SECONDS", 0.1)
    answers = [b'INFO {"server_id":"x"}\r\nPONG\r\n', b"PONG\r\n"]
    with Fake(lambda data: answers.pop(0) if answers else b"") as server:
        target = f"nats://127.0.0.1:{server.port}"
        result = run(
            "--mode", "publish", "--target", target, "--size", "100000", "-n3"
        )  # each is a batch of its own
    assert result.exit_code == 1
    assert "messages    1 in " in result.stdout
    assert "lost        2 messages were never answered" in result.stdout


def usage(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2
    return result.stderr


def test_a_wrong_command_line_is_explained() -> None:
    assert "'kafka://x:1' is not blipmq://HOST:PORT or nats://HOST:PORT" in usage("--target", "kafka://x:1")
    assert "'nats://x': the port is missing" in usage("--target", "nats://x")
    assert "load goes over TCP" in usage("--target", "blipmq://unix:/x")
    assert "core NATS does not" in usage("--mode", "qos1", "--target", "nats://127.0.0.1:4222")
    assert "'puplish' is not one of" in usage("--mode", "puplish")


def test_it_is_bounded_unless_told_otherwise() -> None:
    defaults = {parameter.name: parameter.default for parameter in bench.command.params}
    assert (defaults["count"], defaults["seconds"]) == (200_000, 10.0)


# --- figures ------------------------------------------------------------------------------------------------


def test_percentiles_count_messages_not_batches() -> None:
    latencies = Latencies()
    latencies.add(3.0, 1)
    latencies.add(1.0, 989)
    latencies.add(2.0, 10)
    wanted = [1.0, 1.0, 1.0, 2.0, 2.0, 3.0]
    assert latencies.percentiles([0, 50, 98.9, 99, 99.9, 100]) == pytest.approx(wanted, rel=0.01)
    assert latencies.percentiles([100]) == [3.0]
    assert Latencies().percentiles([50, 99]) == [0.0, 0.0]


def test_percentiles_are_right_from_nanoseconds_to_minutes() -> None:
    choose = random.Random(5)
    samples = sorted(10 ** choose.uniform(-9, 2) for _ in range(10_000))
    latencies = Latencies()
    for sample in choose.sample(samples, len(samples)):
        latencies.add(sample, 1)
    wanted = [samples[4999], samples[9899], samples[9989], samples[-1]]
    assert latencies.percentiles([50, 99, 99.9, 100]) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "text"), [(25e-6, "25 µs"), (0.00123, "1.23 ms"), (0.25, "250.00 ms"), (2.5, "2.50 s")]
)
def test_durations_have_a_fitting_unit(seconds: float, text: str) -> None:
    assert bench.duration(seconds) == text


NATS_STREAM = (
    b'INFO {"server_id":"x"}\r\nPONG\r\nMSG a.b 1 5\r\nMSG 1\r\nMSG a.b 1 0\r\n\r\nPING\r\n+OK\r\n'
    b"MSG a.b 1 reply.to 11\r\nhello\r\nPING\r\nPONG\r\n"
)


def test_nats_is_heard_the_same_however_the_stream_is_cut() -> None:
    for cut in range(len(NATS_STREAM) + 1):
        speech = NatsSpeech()
        parts = [speech.hear(NATS_STREAM[:cut]), speech.hear(NATS_STREAM[cut:])]
        assert sum(part.messages for part in parts) == 3
        assert sum(part.fences for part in parts) == 2
        assert b"".join(part.replies for part in parts) == b"PONG\r\n"


def test_what_is_not_nats_is_noticed() -> None:
    for stream in (b"HTTP/1.1 400 Bad Request\r\n", b"MSG a.b 1 x\r\n"):
        with pytest.raises(ProtocolError, match="does not speak NATS"):
            NatsSpeech().hear(stream)
    with pytest.raises(ClientError, match="the nats-server says: 'Authorization Violation'"):
        NatsSpeech().hear(b"-ERR 'Authorization Violation'\r\n")


def test_blipmq_polls_the_subscription_that_it_was_given() -> None:
    speech = BlipmqSpeech("key")
    speech.hear(blipmq.encode_ack(0, 2) + blipmq.encode_ack(0, 3) + blipmq.encode_ack(7, 4))
    polls = blipmq.Decoder().feed(speech.ask(3))
    assert [poll.subscription for poll in polls if isinstance(poll, blipmq.Poll)] == [7, 7, 7]
    answers = speech.hear(blipmq.encode_publish("t", b"", 0, 6) * 2 + blipmq.encode_pong(1))
    assert answers == (2, 1, b"")


def test_batches_fit_what_a_server_reads_at_once(tmp_path: Path) -> None:
    for size in (0, 100, 5000, 1 << 20):
        plan = Plan("blipmq", HostPort("127.0.0.1", 1), "publish", size, 1, 1, 1.0)
        assert load.batch_size(plan) * size <= max(load.BATCH_BYTES, size)
        assert 1 <= load.batch_size(plan) <= load.BATCH_MESSAGES
