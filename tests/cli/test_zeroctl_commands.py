"""`headrace pub`, `sub`, `request`, `nodes` and `decode` with zeroctl, as a shell sees them."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.cli import main
from headrace.clients.zeroctl import ZeroctlClient
from headrace.wire import zeroctl as wire
from tests.gateway.gateways import MAIN, PATIENCE, GatewayProcess
from tests.sessions.passive_zeroctl import UUID, header


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    sets = ("listen.zeroctl.bind=127.0.0.1:0", "log.retention_bytes=64MiB", "zeroctl.heartbeat_interval=40")
    with GatewayProcess(tmp_path_factory.mktemp("gateway"), *sets) as running:
        yield running


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    with child:
        out, errors = child.communicate(timeout=PATIENCE)
        return child.returncode, out, errors


def test_what_pub_sends_sub_prints(gateway: GatewayProcess) -> None:
    at = gateway.places["zeroctl"]
    child = command("sub", "-p", "zeroctl", "--at", at, "event.#", "--count", "3", "--json")
    assert child.stderr is not None
    assert child.stderr.readline() == "bound to 'event.#'\n"
    code, _, said = result(command("pub", "-p", "zeroctl", "--at", at, "event.demo", "one", "two", "three"))
    assert (code, said.startswith("3 messages in")) == (0, True)
    code, out, _ = result(child)
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(line["topic"], line["payload"]) for line in lines] == [
        ("event.demo", "one"),
        ("event.demo", "two"),
        ("event.demo", "three"),
    ]
    assert lines[0]["headers"]["node-name"] == f"{socket.gethostname()}-headrace-cli"


def test_durable_sub_goes_on_by_its_number(gateway: GatewayProcess) -> None:
    at = gateway.places["zeroctl"]
    child = command("sub", "-p", "zeroctl", "--at", at, "durable.#", "--qos", "1", "--count", "1")
    assert child.stderr is not None
    label = child.stderr.readline()
    number = label.split("--resume ")[1].split()[0]
    assert result(command("pub", "-p", "zeroctl", "--at", at, "durable.a", "1", "-q"))[0] == 0
    assert result(child)[:2] == (0, "1\n")
    assert result(command("pub", "-p", "zeroctl", "--at", at, "durable.a", "2", "-q"))[0] == 0
    again = command("sub", "-p", "zeroctl", "--at", at, "durable.#", "--resume", number, "--count", "1", "-q")
    assert result(again) == (0, "2\n", "")


def test_pub_to_what_is_no_key_fails_with_the_reason(gateway: GatewayProcess) -> None:
    code, _, said = result(command("pub", "-p", "zeroctl", "--at", gateway.places["zeroctl"], "event.*", "x"))
    assert code == 1
    assert "a routing key has 1 to 255" in said


class EchoService(threading.Thread):
    """A provider on a loop of its own."""

    def __init__(self, at: str) -> None:
        super().__init__(daemon=True)
        self.at = at
        self.ready = threading.Event()
        self.over = asyncio.Event()

    def run(self) -> None:
        asyncio.run(self.serve())

    async def serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        async with (
            ZeroctlClient(self.at, key="dev-key", node="echo.node") as client,
            client.provide("service.echo", name="echo") as requests,
        ):
            self.ready.set()
            serving = asyncio.create_task(self.answer(requests))
            await self.over.wait()
            serving.cancel()
            await asyncio.wait([serving])

    async def answer(self, requests: Any) -> None:
        async for request in requests:
            if request.body == b"bad":
                await request.refuse("no such thing")
            else:
                await request.accept(will_finish=request.headers.get("mood") != "silent")
                await request.finish(request.body.upper())

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.over.set)
        self.join(PATIENCE)


@pytest.fixture
def echo(gateway: GatewayProcess) -> Iterator[EchoService]:
    service = EchoService(gateway.places["zeroctl"])
    service.start()
    assert service.ready.wait(PATIENCE)
    yield service
    service.stop()


def test_request_prints_what_the_provider_answers(gateway: GatewayProcess, echo: EchoService) -> None:
    request = ["request", "--at", gateway.places["zeroctl"], "service.echo"]
    code, out, said = result(command(*request, "hello"))
    assert (code, out) == (0, "HELLO\n")
    assert said.startswith("accepted as ")
    code, out, said = result(command(*request, "hello", "-H", "mood=silent"))
    assert (code, out) == (0, "")
    assert said.endswith("the provider does not tell when it has finished\n")
    code, out, said = result(command(*request, "bad"))
    assert (code, out, said) == (1, "", "Error: no such thing\n")
    code, out, _ = result(command(*request, "x", "--json", "-q"))
    assert json.loads(out)["body"] == "X"
    code, _, said = result(command("request", "--at", request[2], "service.nobody", "x", "--timeout", "0.3"))
    assert code == 1
    assert "nobody has answered the request to service.nobody for 0.3 s" in said


def test_nodes_lists_who_was_heard(gateway: GatewayProcess, echo: EchoService) -> None:
    admin = gateway.places["admin"]
    runner = CliRunner()
    text = runner.invoke(main, ["nodes", "--at", admin]).output
    assert any(line.startswith("echo.node ") and line.endswith(" echo") for line in text.splitlines())
    listed = [
        json.loads(line)
        for line in runner.invoke(main, ["nodes", "--at", admin, "--json"]).output.splitlines()
    ]
    (ours,) = (node for node in listed if node["node-name"].endswith("-headrace"))
    assert (ours["hb-interval"], ours["ttl"]) == (40, 120)
    nowhere = runner.invoke(main, ["nodes", "--at", "127.0.0.1:1"])
    assert nowhere.exit_code == 1
    assert nowhere.output.startswith(
        "Error: cannot ask the gateway at http://127.0.0.1:1: connection refused"
    )


def decoded(*frames: bytes, role: str = "any") -> tuple[int, list[dict[str, Any]]]:
    found = CliRunner().invoke(main, ["decode", "zeroctl", "--role", role, b"".join(frames).hex()])
    return found.exit_code, [json.loads(line) for line in found.output.splitlines()]


def test_decode_shows_frames_with_their_headers() -> None:
    body = b'{"n": 1}'
    code, (message, bind, ack) = decoded(
        wire.encode_message("event.a", header(body), body, 7),
        wire.encode_bind(1, "event.#", 8, 1, 10, "me", [(wire.Condition.PREFIX, "host", "web")]),
        wire.encode_ack(1, [5, 6]),
        role="client",
    )
    assert code == 0
    assert (message["type"], message["id"], message["key"], message["body"]) == (
        "MESSAGE",
        7,
        "event.a",
        '{"n": 1}',
    )
    assert message["header"]["node-uuid"] == UUID
    assert (bind["filter"], bind["credit"], bind["conditions"]) == (
        "event.#",
        10,
        [["prefix", "host", "web"]],
    )
    assert ack["tags"] == [5, 6]


def test_decode_tells_what_is_wrong() -> None:
    code, (bad, wrong, unfinished) = decoded(
        wire.encode_message("event.a", b"{}", b"", 7),
        wire.encode_message("event.a", header(b"other"), b"body", 8),
        b"\0\0\0\x09",
        role="server",
    )
    assert code == 1
    assert (bad["malformed"], bad["reason"]) == ("bad header", "node-name is missing")
    assert wrong["warnings"] == ["unexpected direction", "sha256 is not that of the body"]
    assert unfinished["unfinished"] == 4
