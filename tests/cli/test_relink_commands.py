"""`headrace pub`, `sub` and `decode` with Relink, as a person runs them."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.cli.decode import command as decode
from headrace.clients.relink_face import take_apart
from headrace.wire import relink as wire
from tests.gateway.gateways import PATIENCE, GatewayProcess, Peer, events_of

MAIN = "from headrace.cli import main; main()"


def headrace(*arguments: str, said: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", MAIN, *arguments],
        input=said,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )


def decoded(*arguments: str, code: int = 0) -> list[dict[str, Any]]:
    result = CliRunner().invoke(decode, ["relink", *arguments])
    assert result.exit_code == code, result.output
    return [json.loads(line) for line in result.output.splitlines()]


def test_lines_go_in_and_messages_come_out(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, "listen.relink.bind=127.0.0.1:0") as gateway:
        at = gateway.places["relink"]
        for address in ("demo/7", "demo-tx/7?transactions=both"):
            done = headrace("pub", "-p", "relink", "--at", at, address, said=b"one\ntwo\n")
            assert done.returncode == 0, done.stderr
            assert b"2 messages" in done.stderr
        watching = subprocess.Popen(
            [sys.executable, "-c", MAIN, "sub", "-p", "relink", "--at", at, "demo/9", "--json", "-n", "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert watching.stderr is not None
        assert b"linked to 'demo'" in watching.stderr.readline()
        peer = Peer.to(gateway)
        for channel, payload in ((9, b"a"), (8, b"not shown"), (9, b"b")):
            peer.publish(f"demo.out.{channel}", payload)
        out, _ = watching.communicate(timeout=PATIENCE)
        assert watching.returncode == 0
        assert [json.loads(line) for line in out.splitlines()] == [
            {
                "protocol": "relink",
                "endpoint": "demo",
                "channel": 9,
                "number": number,
                "part_sizes": [1],
                "payload": payload,
            }
            for number, payload in enumerate("ab")
        ]
        events = events_of(gateway, "relink")
        assert (events["messages"], events["commits"], events["violations"]) == (4, 1, 0)


@pytest.mark.parametrize("more", [("-n", "1"), ("-n", "1", "--no-ack"), ("--timeout", "0.2")])
def test_what_was_subscribed_leaves_no_link_behind(tmp_path: Path, more: tuple[str, ...]) -> None:
    with GatewayProcess(tmp_path, "listen.relink.bind=127.0.0.1:0") as gateway:
        watching = subprocess.Popen(
            [
                sys.executable,
                "-c",
                MAIN,
                "sub",
                "-p",
                "relink",
                "--at",
                gateway.places["relink"],
                "demo/9",
                *more,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert watching.stderr is not None
        assert b"linked to 'demo'" in watching.stderr.readline()
        peer = Peer.to(gateway)
        for payload in (b"a", b"b", b"c"):
            peer.publish("demo.out.9", payload)
        _, told = watching.communicate(timeout=PATIENCE)
        assert (watching.returncode, told) == (0, b"")
        gateway.until(lambda: events_of(gateway, "relink")["links_ended"] == 1)
        assert events_of(gateway, "relink")["violations"] == 0


def test_an_interrupted_subscriber_leaves_no_link_behind(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, "listen.relink.bind=127.0.0.1:0") as gateway:
        watching = subprocess.Popen(
            [sys.executable, "-c", MAIN, "sub", "-p", "relink", "--at", gateway.places["relink"], "demo/*"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert watching.stderr is not None
        assert b"linked to 'demo'" in watching.stderr.readline()
        watching.send_signal(signal.SIGINT)
        _, told = watching.communicate(timeout=PATIENCE)
        assert (watching.returncode, told) == (130, b"")
        gateway.until(lambda: events_of(gateway, "relink")["links_ended"] == 1)


@pytest.mark.parametrize(
    "address", ["demo", "demo/x", "demo/1?ids=9,1", "demo/1?ids=4", "demo/1?transactions=maybe", "demo/1?x=1"]
)
def test_wrong_address_is_told(address: str) -> None:
    done = headrace("pub", "-p", "relink", "--at", "127.0.0.1:1", address, "x")
    assert done.returncode == 1
    assert b"cannot publish to" in done.stderr


def test_address_says_what_the_handshake_needs() -> None:
    assert take_apart("a/b/7") == ("a/b", "7", {})
    assert take_apart("orders/*?ids=2,8&transactions=connector") == (
        "orders",
        "*",
        {
            "connector_id_bytes": 2,
            "listener_id_bytes": 8,
            "connector_transactions": True,
            "listener_transactions": False,
        },
    )


def test_connector_stream_tells_its_sizes() -> None:
    raw = (
        wire.encode_version()
        + wire.encode_hello("orders", 2, 8, 5, 7, 9)
        + wire.encode_message(0x1234, 2, [b"text", b"\xff"])
        + wire.encode_message([1, 2], 2, [])
        + wire.encode_acknowledgement(1, 5, 8, 3)
        + wire.encode_general(1)
    )
    assert decoded("--role", "client", raw.hex()) == [
        {"start": 0, "end": 8, "type": "version", "version": 0},
        {
            "start": 8,
            "end": 40,
            "type": "hello",
            "name": "orders",
            "connector_size": 2,
            "listener_size": 8,
            "flags": ["connector_transactions", "require_link"],
            "epoch": 7,
            "link": 9,
        },
        {
            "start": 40,
            "end": 64,
            "type": "message",
            "channel": 0x1234,
            "long": False,
            "large": False,
            "parts": ["text", {"part_hex": "ff"}],
        },
        {
            "start": 64,
            "end": 80,
            "type": "message",
            "channels": [1, 2],
            "long": False,
            "large": False,
            "parts": [],
        },
        {"start": 80, "end": 96, "type": "consumed", "channel": 5, "sequence": 3, "of": "receiver"},
        {"start": 96, "end": 104, "type": "ping"},
    ]


def test_listener_stream_is_read_with_the_sizes_that_are_given() -> None:
    raw = bytes(8) + wire.encode_answer(3, 4) + wire.encode_operation(2, 0x050403, 3)
    lines = decoded("--role", "server", "--id-sizes", "1,3", raw.hex())
    assert lines[1:] == [
        {"start": 8, "end": 24, "type": "answer", "epoch": 3, "link": 4},
        {"start": 24, "end": 32, "type": "close", "channel": 0x050403, "of": "sender"},
    ]
    packets = decoded("--role", "server", "--id-sizes", "1,3", "--no-handshake", raw[24:].hex())
    assert [line["type"] for line in packets] == ["close"]


def test_what_is_wrong_is_told_with_its_place() -> None:
    assert decoded("00", code=1)[0]["error"] == "no role"
    (bad,) = decoded("--role", "client", "--no-handshake", "a0", code=1)
    assert (bad["error"], bad["position"]) == ("bad type", 0)
    (_, short) = decoded("--role", "client", "00" * 8 + "04", code=1)
    assert (short["unfinished"], short["wanted"]) == (1, 24)


def test_options_of_relink_are_for_relink_alone() -> None:
    result = CliRunner().invoke(decode, ["blipmq", "--no-handshake", "00"])
    assert result.exit_code == 2
    result = CliRunner().invoke(decode, ["relink", "--id-sizes", "9,1", "00"])
    assert result.exit_code == 2
