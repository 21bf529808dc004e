"""`headrace top`: a running gateway's figures from its admin address."""

import io
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from headrace.admin import terminal
from headrace.admin.terminal import Moment
from headrace.cli import main
from headrace.clients.admin import NoAnswer
from tests.gateway.gateways import MAIN, PATIENCE, GatewayProcess


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["top", *words], catch_exceptions=False, env={"COLUMNS": "160"})


def admin_of(gateway: GatewayProcess) -> str:
    found = re.search(r"admin=(\S+)", gateway.out[0])
    assert found is not None
    return found[1]


def shown(now: Moment, before: Moment | None) -> str:
    console = Console(width=160, file=io.StringIO())
    with console.capture() as captured:
        console.print(terminal.view(now, before))
    return captured.get()


def test_once_shows_protocols_log_and_drops(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path) as gateway:
        result = run("--at", admin_of(gateway), "--once", "--every", "0.1")
    assert result.exit_code == 0
    for word in ("ready", "blipmq", "127.0.0.1", "log and bus", "0 messages", "drops", "drop"):
        assert word in result.output


def test_rates_are_what_came_between_two_looks(tmp_path: Path) -> None:
    def moment(at: float, published: int, rows: int) -> Moment:
        listener = {"protocol": "blipmq", "addresses": ["here:1"], "tls": True, "connections": 2}
        bus = {
            "published": {"blipmq": published},
            "delivered": {"blipmq": 0},
            "published_bytes": {"blipmq": 0},
        }
        sink = {"drop": "d", "uri": "u", "lag_offsets": 5, "lag_seconds": 2.0, "stats": {"rows": rows}}
        status = {"listeners": [listener], "bus": bus, "sinks": [sink], "ready": True, "node": "n"}
        return Moment(at, status)

    first, second = moment(10.0, 1000, 50), moment(12.0, 5000, 350)
    assert "here:1 (TLS)" in shown(first, None)
    later = shown(second, first)
    assert "2.0k" in later  # messages a second
    assert "150" in later  # rows a second
    assert terminal.NO_RATE in shown(first, second)  # it was started anew


def test_a_narrow_terminal_has_every_figure_and_no_addresses() -> None:
    listener = {"protocol": "blipmq", "addresses": ["127.0.0.1:5555"], "tls": False, "connections": 12_345}
    counts = {"blipmq": 123_456_789}
    delays = {"blipmq": {"seconds": 1.0, "steps": [[0.00032, 9]]}}
    bus = {"published": counts, "delivered": counts, "published_bytes": counts, "delays": delays}
    status = {"listeners": [listener], "bus": bus, "ready": True, "node": "n"}
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(terminal.view(Moment(2.0, status), None))
    text = captured.get()
    for word in ("protocol", "blipmq", "12,345", "123M", "delivered", "p99", "320 µs"):
        assert word in text
    assert "…" not in text
    assert "5555" not in text


def test_delays_are_those_of_deliveries_between_two_looks() -> None:
    def status(*steps: tuple[float, int]) -> terminal.Status:
        return {"bus": {"delays": {"felix": {"seconds": 1.0, "steps": [list(step) for step in steps]}}}}

    first = status((0.001, 1000), (2.5, 7))
    assert terminal.delays(first, None) == {"p50": {"felix": "1 ms"}, "p99": {"felix": "1 ms"}}
    second = status((0.000048, 90), (0.001, 1000), (2.5, 17))
    assert terminal.delays(second, first) == {"p50": {"felix": "48 µs"}, "p99": {"felix": "2.5 s"}}
    assert terminal.delays(first, first) == {"p50": {}, "p99": {}}
    # Started anew: what there is came since.
    assert terminal.delays(status((0.25, 3)), first)["p50"] == {"felix": "250 ms"}


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    status = {"listeners": [], "ready": False, "reasons": ["the log is full"], "warnings": ["the drop fails"]}
    text = shown(Moment(1.0, status), None)
    assert "not ready: the log is full" in text
    assert "the drop fails" in text


@pytest.mark.parametrize("form", ["{}", "127.0.0.1:{}", "http://127.0.0.1:{}/"])
def test_address_may_be_a_port_a_place_or_a_url(form: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        result = run("--at", form.format(port), "--once")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        f"Error: cannot ask the gateway at http://127.0.0.1:{port}: connection refused",
        f"Hint: {NoAnswer.hint}",
    ]


@pytest.mark.parametrize("at", ["nowhere", "127.0.0.1:x", "127.0.0.1:70000", "unix:/tmp/x", ""])
def test_an_address_that_is_none_is_a_wrong_command_line(at: str) -> None:
    result = run("--at", at, "--once")
    assert result.exit_code == 2
    assert "Invalid value for '--at'" in result.stderr


def test_what_is_no_gateway_is_said_so() -> None:
    answers = {"/": (404, b""), "/text": (200, b"<html>"), "/list": (200, b"[]"), "/other": (200, b"{}")}
    reasons = {
        "/": "it answers 404 to /api/status",
        "/text": "what it answers to /api/status is not JSON",
        "/list": "what it answers to /api/status has no 'listeners'",
        "/other": "what it answers to /api/status has no 'listeners'",
    }

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers[self.path.removesuffix("/api/status") or "/"]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for path, reason in reasons.items():
            url = f"http://127.0.0.1:{server.server_port}{path}".rstrip("/")
            result = run("--at", url, "--once")
            assert result.exit_code == 1
            assert result.stderr.startswith(f"Error: cannot ask the gateway at {url}: {reason}\n")
        server.shutdown()


def test_it_goes_on_until_it_is_interrupted_and_outlives_the_gateway(tmp_path: Path) -> None:
    screen, terminal = pty.openpty()
    seen = bytearray()

    def shows(word: bytes) -> None:
        while word not in seen:
            assert select.select([screen], [], [], PATIENCE)[0], bytes(seen)
            seen.extend(os.read(screen, 65536))

    with GatewayProcess(tmp_path) as gateway:
        command = [sys.executable, "-c", MAIN, "top", "--at", admin_of(gateway), "--every", "0.1"]
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "50"}
        child = subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environ)
        try:
            shows(b"blipmq")
            gateway.child.send_signal(signal.SIGTERM)
            gateway.child.wait(PATIENCE)
            shows(b"cannot ask")
            child.send_signal(signal.SIGINT)
            assert child.wait(PATIENCE) == 128 + signal.SIGINT
        finally:
            child.kill()
            child.wait()
            os.close(terminal)
            os.close(screen)
