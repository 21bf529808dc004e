"""`headrace queue`, and pub, sub and decode with Overhop, as a person at a shell sees them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headrace.cli import main
from headrace.wire import overhop as wire
from tests.gateway.gateways import MAIN, PATIENCE, GatewayProcess


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path_factory.mktemp("gateway")) as running:
        yield running


def headrace(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def queue(gateway: GatewayProcess, name: str, *arguments: str, code: int = 0) -> str:
    result = headrace("queue", name, "--at", gateway.places["overhop"], *arguments)
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


@dataclass
class Ended:
    exit_code: int
    stdout: str
    stderr: str


def speak(gateway: GatewayProcess, command: str, *arguments: str, stdin: bytes = b"") -> Ended:
    """pub or sub, as a process of its own: they watch the descriptors of their input and output."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    whole = [command, "-p", "overhop", "--at", gateway.places["overhop"], "-q", *arguments]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *whole], env=env, input=stdin, capture_output=True, timeout=PATIENCE
    )
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


def test_queue_is_made_listed_filled_emptied_and_removed(gateway: GatewayProcess) -> None:
    assert len(queue(gateway, "add", "mail", "--concurrency-limit", "5").strip()) == 36
    assert speak(gateway, "pub", "mail", "one", "two", "three").exit_code == 0
    rows = [line.split() for line in queue(gateway, "ls").splitlines()]
    assert rows[0] == ["NAME", "STATE", "FILTER", "LIMIT", "WORKERS", *map(str.upper, wire_states())]
    assert rows[2] == ["mail", "running", "queue.mail.#", "5", "0", "0", "3", "0", "0", "0", "0"]
    assert queue(gateway, "stats", "mail").splitlines()[1].split() == ["0", "3", "0", "0", "0", "0"]
    assert json.loads(queue(gateway, "stats", "mail", "--json"))["waiting"] == 3
    listed = queue(gateway, "jobs", "mail", "--page-size", "2").splitlines()
    assert [line.split()[-1] for line in listed] == ["PAYLOAD", "one", "two"]
    (third,) = map(
        json.loads, queue(gateway, "jobs", "mail", "--page-size", "2", "--page", "2", "--json").splitlines()
    )
    assert third["payload"] == {"bin": "three"}
    assert "QUEUE_NOT_EMPTY" in queue(gateway, "rm", "mail", code=1)
    got = speak(gateway, "sub", "mail", "--count", "3")
    assert (got.exit_code, got.stdout) == (0, "one\ntwo\nthree\n")
    assert json.loads(queue(gateway, "stats", "mail", "--json"))["completed"] == 3
    queue(gateway, "rm", "mail")
    assert "mail" not in queue(gateway, "ls")


def wire_states() -> list[str]:
    return ["new", "waiting", "delayed", "active", "completed", "failed"]


def test_paused_queue_holds_until_it_is_resumed(gateway: GatewayProcess) -> None:
    queue(gateway, "add", "held")
    queue(gateway, "pause", "held")
    assert "QUEUE_ALREADY_PAUSED" in queue(gateway, "pause", "held", code=1)
    speak(gateway, "pub", "held", "x")
    assert speak(gateway, "sub", "held", "--timeout", "0.3").stdout == ""
    (told,) = [json.loads(line) for line in queue(gateway, "ls", "--json").splitlines() if '"held"' in line]
    assert (told["state"], told["stats"]["waiting"]) == ("paused", 1)
    queue(gateway, "resume", "held")
    assert speak(gateway, "sub", "held", "--count", "1").stdout == "x\n"


def test_lines_are_jobs_and_sub_tells_everything(gateway: GatewayProcess) -> None:
    queue(gateway, "add", "lines")
    assert speak(gateway, "pub", "lines", stdin=b"a\n\nb\xff\n").exit_code == 0
    got = speak(gateway, "sub", "lines", "--count", "3", "--json")
    told = [json.loads(line) for line in got.stdout.splitlines()]
    assert [one.get("payload", one.get("payload_base64")) for one in told] == ["a", "", "Yv8="]
    assert {name: told[0][name] for name in ("protocol", "queue", "topic", "attempt")} == {
        "protocol": "overhop",
        "queue": "lines",
        "topic": "queue.lines.jobs",
        "attempt": 1,
    }
    assert told[0]["jid"].startswith("lines:")


def test_unacknowledged_job_stays_in_the_queue(gateway: GatewayProcess) -> None:
    queue(gateway, "add", "kept")
    speak(gateway, "pub", "kept", "x")
    assert speak(gateway, "sub", "kept", "--count", "1", "--no-ack").stdout == "x\n"
    assert speak(gateway, "sub", "kept", "--count", "1").stdout == "x\n"
    assert json.loads(queue(gateway, "stats", "kept", "--json"))["completed"] == 1


def test_what_cannot_be_done_is_said_in_a_sentence(gateway: GatewayProcess) -> None:
    for result in (speak(gateway, "pub", "missing", "x"), speak(gateway, "sub", "missing", "--count", "1")):
        assert result.exit_code == 1
        assert "there is no queue 'missing' (QUEUE_NOT_FOUND)" in result.stderr
    assert "QUEUE_NOT_FOUND" in queue(gateway, "stats", "missing", code=1)
    assert "INVALID_QUEUE_NAME" in queue(gateway, "add", "a.b", code=1)
    refused = headrace("queue", "ls", "--at", "127.0.0.1:1")
    assert (refused.exit_code, "cannot connect" in refused.stderr) == (1, True)
    assert headrace("queue", "ls", "--at", "nowhere").exit_code == 2
    resumed = speak(gateway, "sub", "kept", "--resume", "3")
    assert "there is no subscription to resume" in resumed.stderr


def decoded(*frames: bytes, role: str = "any") -> tuple[int, list[dict[str, Any]]]:
    result = headrace("decode", "overhop", "--role", role, b"".join(frames).hex())
    return result.exit_code, [json.loads(line) for line in result.stdout.splitlines()]


def test_frames_are_decoded() -> None:
    first = wire.encode(14, "7", {"q": "mail", "job_payload": b"hi", "more": [b"\xff", {"x": None}]})
    second = wire.encode(101, "7", {"jid": "x"})
    code, lines = decoded(first, second)
    assert code == 0
    assert lines == [
        {
            "start": 0,
            "end": len(first),
            "type": "ENQUEUE",
            "rid": "7",
            "payload": {
                "q": "mail",
                "job_payload": {"bin": "hi"},
                "more": [{"bin_base64": "/w=="}, {"x": None}],
            },
        },
        {
            "start": len(first),
            "end": len(first) + len(second),
            "type": "OK",
            "rid": "7",
            "payload": {"jid": "x"},
        },
    ]


def test_faults_warnings_and_unfinished_frames_are_told() -> None:
    code, (good, bad) = decoded(wire.encode(1, "1", {}), b"\0\0\0\x01\xc0")
    assert (code, good["type"], bad["error"]) == (1, "HELLO", "no map")
    assert bad["position"] == good["end"] + 4
    code, (line,) = decoded(wire.encode(1, "1", {})[:-1])
    assert code == 1
    assert "unfinished" in line
    assert decoded(wire.encode(1, "1", {}), role="server")[1][0]["warnings"] == ["unexpected direction"]
    assert decoded(wire.encode(110, "0", {}), role="client")[1][0]["warnings"] == ["unexpected direction"]
    assert decoded(wire.encode(50, "1", {}))[1][0]["warnings"] == ["unknown type"]
    assert "warnings" not in decoded(wire.encode(110, "0", {}), role="server")[1][0]
