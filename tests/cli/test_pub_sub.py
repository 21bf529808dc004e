"""`headrace pub` and `headrace sub` as a shell sees them, against a gateway in a process of its own."""

import base64
import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.cli import main, pub
from headrace.clients import protocols, shell
from headrace.clients.errors import KEY_HINT, SERVE_HINT
from headrace.clients.protocols import CLIENTS
from headrace.log import LogReader
from tests.gateway.gateways import MAIN, PATIENCE, GatewayProcess
from tests.streams import make_certificates

KEYS = (
    'keys=[{name="dev", key="dev-key", publish=["#"], subscribe=["#"]},'
    ' {name="narrow", key="narrow-key", publish=["open.#"], subscribe=["open.#"]}]'
)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path_factory.mktemp("gateway"), KEYS, "log.retention_bytes=64MiB") as running:
        yield running


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic of its own for each test, since they share the gateway."""
    return f"test.{request.node.name}"


class Command:
    """A command of the package as a child of the test."""

    def __init__(self, *arguments: str, environ: dict[str, str] | None = None, **pipes: Any) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        env.update(environ or {})
        given = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes}
        self.child = subprocess.Popen([sys.executable, "-c", MAIN, *arguments], env=env, **given)

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout, self.child.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what was not written before it ended
                    pipe.close()

    def send(self, data: bytes) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(data)
        self.child.stdin.flush()

    def out_line(self) -> bytes:
        assert self.child.stdout is not None
        return bytes(self.child.stdout.readline())

    def error_line(self) -> str:
        assert self.child.stderr is not None
        return str(self.child.stderr.readline().decode())

    def finish(self, stdin: bytes | None = None) -> tuple[int, bytes, str]:
        """Exit code, output and errors, when it has ended by itself."""
        out, errors = self.child.communicate(stdin, timeout=PATIENCE)
        return self.child.returncode, out, errors.decode()


def call(
    *arguments: str, stdin: bytes = b"", environ: dict[str, str] | None = None
) -> tuple[int, bytes, str]:
    with Command(*arguments, environ=environ) as command:
        return command.finish(stdin)


def to(gateway: GatewayProcess, *arguments: str) -> list[str]:
    """The arguments with which pub and sub talk to a gateway."""
    return ["--protocol", "blipmq", "--at", gateway.places["blipmq"], *arguments]


def subscribed(gateway: GatewayProcess, *arguments: str, **pipes: Any) -> Command:
    """A `sub` that has begun."""
    command = Command("sub", *to(gateway, *arguments), **pipes)
    line = command.error_line()
    assert line.startswith("subscribed to "), line
    return command


# --- from pub to sub ----------------------------------------------------------------------------------------


def test_each_line_is_a_message_and_each_payload_a_line(gateway: GatewayProcess, topic: str) -> None:
    with subscribed(gateway, topic, "--count", "4") as sub:
        code, out, errors = call("pub", *to(gateway, topic), stdin=b"one\n\n three \r\nlast")
        assert (code, out) == (0, b"")
        assert errors.startswith("4 messages in ")
        assert sub.finish() == (0, b"one\n\n three \r\nlast\n", "")


def test_messages_come_from_arguments(gateway: GatewayProcess, topic: str) -> None:
    with subscribed(gateway, topic, "--count", "2") as sub:
        code, _, errors = call("pub", *to(gateway, topic, "--", "first", "-ä second"))
        assert code == 0
        assert errors.startswith("2 messages in ")
        assert sub.finish()[1] == "first\n-ä second\n".encode()


def test_messages_come_from_a_file(gateway: GatewayProcess, topic: str, tmp_path: Path) -> None:
    lines = [b"%d %s" % (number, b"x" * (number % 300)) for number in range(20_000)]  # more than one read
    (tmp_path / "lines").write_bytes(b"\n".join(lines) + b"\n")
    with subscribed(gateway, topic, "--count", "20000") as sub:
        code, _, errors = call("pub", *to(gateway, topic, "--file", str(tmp_path / "lines"), "--qos", "1"))
        assert code == 0
        assert errors.startswith("20,000 messages in ")
        assert sub.finish()[1].splitlines() == lines


def test_raw_input_is_one_message_byte_for_byte(gateway: GatewayProcess, topic: str, tmp_path: Path) -> None:
    payload = bytes(range(256)) * 200
    (tmp_path / "payload").write_bytes(payload)
    with subscribed(gateway, topic, "--count", "3", "--raw") as sub:
        assert call("pub", *to(gateway, topic, "--raw"), stdin=payload)[0] == 0
        file = str(tmp_path / "payload")
        assert call("pub", *to(gateway, topic, "--raw", "--file", file, "--count", "2"))[0] == 0
        assert sub.finish()[1] == payload * 3


def test_count_stops_lines_and_repeats_arguments(gateway: GatewayProcess, topic: str) -> None:
    with subscribed(gateway, topic, "--count", "7") as sub:
        assert call("pub", *to(gateway, topic, "--count", "2"), stdin=b"1\n2\n3\n")[0] == 0
        assert call("pub", *to(gateway, topic, "--count", "5", "a", "b"))[0] == 0
        assert sub.finish()[1].split() == [b"1", b"2", b"a", b"b", b"a", b"b", b"a"]


def test_lines_leave_as_they_are_written(gateway: GatewayProcess, topic: str) -> None:
    with subscribed(gateway, topic) as sub, Command("pub", *to(gateway, topic)) as pub:
        for number in range(3):
            pub.send(b"line %d\n" % number)
            assert sub.out_line() == b"line %d\n" % number
        code, _, errors = pub.finish()
        assert code == 0
        assert errors.startswith("3 messages in ")


def test_a_terminal_is_read_line_by_line(gateway: GatewayProcess, topic: str) -> None:
    ours, theirs = pty.openpty()
    try:
        with (
            subscribed(gateway, topic, "--count", "1") as sub,
            Command("pub", *to(gateway, topic), stdin=theirs) as pub,
        ):
            os.write(ours, b"typed\n")
            assert sub.finish()[1] == b"typed\n"
            os.write(ours, b"\x04")  # Ctrl-D
            assert pub.finish()[0] == 0
    finally:
        os.close(ours)
        os.close(theirs)


def test_no_input_is_no_message_and_no_error(gateway: GatewayProcess, topic: str) -> None:
    code, _, errors = call("pub", *to(gateway, topic))
    assert code == 0
    assert errors.startswith("0 messages in ")
    assert call("pub", *to(gateway, topic, "--quiet"), stdin=b"one")[2] == ""


def test_json_says_everything_about_a_message(gateway: GatewayProcess, topic: str) -> None:
    with subscribed(gateway, topic, "--json", "--qos", "1", "--count", "3") as sub:
        call("pub", *to(gateway, topic, "--qos", "1"), stdin='ä"\n\\x'.encode())
        call("pub", *to(gateway, topic, "--raw"), stdin=b"\xff\n")
        first, second, third = map(json.loads, sub.finish()[1].splitlines())
    subscription = first["subscription"]
    assert first == {
        "protocol": "blipmq",
        "topic": topic,
        "qos": 1,
        "tag": first["tag"],
        "subscription": subscription,
        "payload": 'ä"',
    }
    assert second["payload"] == "\\x"
    assert second["tag"] == first["tag"] + 1
    assert base64.b64decode(third["payload_base64"]) == b"\xff\n"
    assert (third["qos"], third["tag"], third["subscription"]) == (0, None, subscription)
    assert "payload" not in third


def test_a_durable_subscription_is_resumed(gateway: GatewayProcess, topic: str) -> None:
    with Command("sub", *to(gateway, topic, "--qos", "1", "--count", "1")) as sub:
        label = sub.error_line()
        subscription = label.split("--resume ")[1].split()[0]
        assert label == (
            f"subscribed to {topic!r} as subscription {subscription};"
            f" --resume {subscription} goes on with it later\n"
        )
        call("pub", *to(gateway, topic, "--qos", "1", "1", "2", "3"))
        assert sub.finish()[1] == b"1\n"
    code, out, _ = call("sub", *to(gateway, topic, "--resume", subscription, "--count", "2", "--quiet"))
    assert (code, out) == (0, b"2\n3\n")
    code, out, errors = call("sub", *to(gateway, topic, "--resume", subscription, "--timeout", "0.2", "-q"))
    assert (code, out, errors) == (0, b"", "")


def test_what_is_not_acknowledged_comes_again(gateway: GatewayProcess, topic: str) -> None:
    with subscribed(gateway, topic, "--qos", "1", "--count", "1", "--no-ack", "--json") as sub:
        call("pub", *to(gateway, topic, "--qos", "1", "again"))
        first = json.loads(sub.finish()[1])
    resume = ["--resume", str(first["subscription"]), "--count", "1", "--json"]
    assert json.loads(call("sub", *to(gateway, topic, *resume))[1]) == first


def test_a_rate_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: how many may have gone at each moment."""
    now = 100.0
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    monkeypatch.setattr(pub.time, "perf_counter", lambda: now)
    monkeypatch.setattr(pub.asyncio, "sleep", sleep)

    def allow(pace: pub.Pace, wanted: int) -> int:
        waiting = pace.allow(wanted)
        with pytest.raises(StopIteration) as done:
            waiting.send(None)
        return int(done.value.value)

    pace = pub.Pace(10)
    assert allow(pace, 5) == 1
    assert slept == []
    assert allow(pace, 5) == 1
    assert slept == pytest.approx([0.1])
    now += 1.0  # something else took long
    assert allow(pace, 50) == 10
    assert allow(pace, 50) == 1
    assert slept == pytest.approx([0.1, 0.1])


def test_a_command_with_a_rate_sends_everything(gateway: GatewayProcess, topic: str) -> None:
    with subscribed(gateway, topic, "--count", "60") as sub:
        assert call("pub", *to(gateway, topic, "--rate", "1000", "--count", "60", "x"))[0] == 0
        assert sub.finish()[1] == b"x\n" * 60


# --- ends ---------------------------------------------------------------------------------------------------


def test_sub_ends_quietly_when_nobody_reads_on(gateway: GatewayProcess, topic: str) -> None:
    """Like `sub | head -1`: also if no second message ever comes."""
    with subscribed(gateway, topic) as sub:
        call("pub", *to(gateway, topic, "one"))
        assert sub.out_line() == b"one\n"
        assert sub.child.stdout is not None
        sub.child.stdout.close()
        assert sub.child.stderr is not None
        assert sub.child.stderr.read() == b""
        assert sub.child.wait(PATIENCE) == 141


def test_sub_ends_quietly_when_it_writes_to_a_closed_pipe(gateway: GatewayProcess, topic: str) -> None:
    """A socket pair is not watched for its reader's end, so the write is what fails."""
    ours, theirs = socket.socketpair()
    with subscribed(gateway, topic, stdout=theirs.fileno()) as sub:
        theirs.close()
        ours.close()
        call("pub", *to(gateway, topic, "one"))
        assert sub.child.stderr is not None
        assert sub.child.stderr.read() == b""
        assert sub.child.wait(PATIENCE) == 141


def interrupted(command: Command) -> tuple[int, str]:
    command.child.send_signal(signal.SIGINT)
    code, _, errors = command.finish()
    return code, errors


def test_ctrl_c_ends_both_quietly(gateway: GatewayProcess, topic: str) -> None:
    with subscribed(gateway, topic) as sub, Command("pub", *to(gateway, topic)) as pub:
        pub.send(b"one\n")
        assert sub.out_line() == b"one\n"
        assert interrupted(sub) == (130, "")
        assert interrupted(pub) == (130, "")


def test_sub_says_how_many_came_when_it_gave_up(gateway: GatewayProcess, topic: str) -> None:
    with subscribed(gateway, topic, "--count", "3", "--timeout", "1.5") as sub:
        call("pub", *to(gateway, topic, "one", "two"))
        code, out, errors = sub.finish()
    assert (code, out) == (1, b"one\ntwo\n")
    assert errors == "Error: 2 of 3 messages came, and then none for 1.5 s\n"


def test_sub_goes_on_through_a_restart_of_the_gateway(tmp_path: Path, topic: str) -> None:
    with GatewayProcess(tmp_path) as first:
        place = first.places["blipmq"]
        sub = subscribed(first, topic, "--qos", "1", "--count", "2")
        call("pub", *to(first, topic, "--qos", "1", "before"))
        assert sub.out_line() == b"before\n"
        first.stop()
    with sub, GatewayProcess(tmp_path, f"listen.blipmq.bind={place}") as second:
        call("pub", *to(second, topic, "--qos", "1", "after"))
        code, out, errors = sub.finish()
    assert (code, out) == (0, b"after\n")
    assert errors == (
        f"the connection to {place} was closed by the server; connecting again\nconnected to {place} again\n"
    )


def payloads_in(data: Path) -> list[bytes]:
    return [record.payload for record in LogReader(data / "log")]


def test_pub_sends_again_what_a_killed_gateway_did_not_confirm(tmp_path: Path, topic: str) -> None:
    with GatewayProcess(tmp_path) as first:
        place = first.places["blipmq"]
        pub = Command("pub", *to(first, topic, "--qos", "1"))
        pub.send(b"0\n")
        first.until(lambda: payloads_in(tmp_path) == [b"0"])
        first.kill()
    with pub, GatewayProcess(tmp_path, f"listen.blipmq.bind={place}"):
        pub.send(b"1\n2\n")
        code, _, errors = pub.finish()
        assert code == 0
        assert "3 messages in " in errors.splitlines()[-1]
        assert set(payloads_in(tmp_path)) == {b"0", b"1", b"2"}


# --- errors -------------------------------------------------------------------------------------------------


def test_a_gateway_that_is_not_there_is_said(topic: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
    for name in ("pub", "sub"):
        code, out, errors = call(name, "-p", "blipmq", "--at", place, topic)
        assert (code, out) == (1, b"")
        assert errors == f"Error: cannot connect to {place}: connection refused\nHint: {SERVE_HINT}\n"


@pytest.mark.parametrize(
    ("options", "question"),
    [
        (["-p", "overhop"], "does it speak Overhop without TLS?"),
        (["-p", "relink"], "does it speak Relink, and has an endpoint 'demo' with these options?"),
        (["-p", "blipmq", "--tls"], "does it speak TLS?"),
    ],
)
def test_a_server_of_another_protocol_is_asked_about(
    gateway: GatewayProcess, options: list[str], question: str
) -> None:
    code, out, errors = call("pub", *options, "--at", gateway.places["blipmq"], "demo/7", "m")
    assert (code, out) == (1, b"")
    assert errors.startswith("Error: ")
    assert errors.endswith(f"{question}\n")


def test_a_protocol_that_was_left_out_is_asked_for_by_name() -> None:
    code, _, errors = call("pub", "demo", "m")
    assert code == 2
    assert "There are: blipmq, zeroctl, felix, overhop, relink." in errors


def test_keys_come_from_an_option_or_the_environment(gateway: GatewayProcess) -> None:
    code, _, errors = call("pub", *to(gateway, "--key", "wrong", "t", "m"))
    assert (code, errors) == (1, f"Error: invalid API key (401)\nHint: {KEY_HINT}\n")
    code, _, errors = call("pub", *to(gateway, "t", "m"), environ={"HEADRACE_CLIENT_KEY": "narrow-key"})
    assert (code, errors) == (1, "Error: key 'narrow' may not publish to 't' (401)\n")
    assert call("pub", *to(gateway, "--key", "narrow-key", "open.t", "m"))[0] == 0


@pytest.mark.parametrize("qos", ["0", "1"])
def test_a_refused_message_is_an_error(gateway: GatewayProcess, qos: str) -> None:
    arguments = to(gateway, "--key", "narrow-key", "--qos", qos, "closed")
    code, _, errors = call("pub", *arguments, stdin=b"1\n2\n")
    assert code == 1
    assert "key 'narrow' may not publish to 'closed' (401)\n" in errors


def test_refused_messages_end_a_pub_that_has_more_to_say(gateway: GatewayProcess) -> None:
    with Command("pub", *to(gateway, "--key", "narrow-key", "closed")) as pub:
        while pub.child.poll() is None:
            try:
                pub.send(b"line\n")
            except BrokenPipeError:
                break
            time.sleep(0.01)
        assert pub.child.stderr is not None
        assert "may not publish to 'closed'" in pub.child.stderr.read().decode()
        assert pub.child.wait(PATIENCE) == 1


def test_a_topic_that_may_not_be_read_is_an_error(gateway: GatewayProcess) -> None:
    code, _, errors = call("sub", *to(gateway, "--key", "narrow-key", "closed"))
    assert (code, errors) == (1, "Error: key 'narrow' may not subscribe to 'closed' (401)\n")


def test_what_no_frame_can_hold_is_an_error(gateway: GatewayProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, errors = call("pub", *to(gateway, "t" * 70_000, "m"))
    assert code == 1
    assert "topic has 70000 bytes in UTF-8, the most is 65535" in errors
    code, _, errors = call("sub", *to(gateway, ""))
    assert (code, errors) == (1, "Error: cannot subscribe to '': a topic has at least one character\n")
    for option in ("--qos=0", "--raw"):
        code, _, errors = call("pub", *to(gateway, "t", option), stdin=bytes(17 << 20))
        assert code == 1
        assert "longer than a message can be (16777216 bytes)" in errors


def usage(*arguments: str) -> str:
    """What is said about a wrong command line."""
    result = CliRunner().invoke(main, list(arguments), prog_name="headrace")
    assert result.exit_code == 2
    return result.stderr


def test_a_wrong_command_line_is_explained(tmp_path: Path) -> None:
    assert "unknown protocol 'blipnq'; did you mean 'blipmq'?" in usage("pub", "-p", "blipnq", "t")
    assert "unknown protocol 'xyz'; there are: blipmq" in usage("sub", "-p", "xyz", "t")
    assert "Missing option '--protocol'" in usage("sub", "t")
    assert "'localhost': the port is missing" in usage("sub", "-p", "blipmq", "--at", "localhost", "t")
    assert "--json and --raw exclude each other" in usage("sub", "-p", "blipmq", "--json", "--raw", "t")
    assert "messages come from the command line" in usage("pub", "-p", "blipmq", "--raw", "t", "m")
    assert "--tls-key needs --tls-cert" in usage("pub", "-p", "blipmq", "--tls-key", __file__, "t")
    assert "No such file" in usage("pub", "-p", "blipmq", "--file", str(tmp_path / "none"), "t")


def test_a_protocol_joins_with_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(protocols.CLIENTS, "another", CLIENTS["blipmq"])
    assert shell.CLIENTS is protocols.CLIENTS
    assert "did you mean 'another'?" in usage("pub", "-p", "anuther", "t")


def test_both_talk_over_tls(tmp_path: Path, topic: str) -> None:
    certificates = make_certificates(tmp_path)
    sets = [
        f"listen.blipmq.tls_cert={certificates.cert}",
        f"listen.blipmq.tls_key={certificates.key}",
        f"listen.blipmq.tls_client_ca={certificates.ca}",
    ]
    with GatewayProcess(tmp_path / "data", *sets) as gateway:
        trust = ["--tls-ca", str(certificates.ca)]
        show = ["--tls-cert", str(certificates.client_cert), "--tls-key", str(certificates.client_key)]
        with subscribed(gateway, topic, "--count", "1", *trust, *show) as sub:
            assert call("pub", *to(gateway, topic, "secret", *trust, *show))[0] == 0
            assert sub.finish()[1] == b"secret\n"
        code, _, errors = call("pub", *to(gateway, topic, "secret", "--tls"))
        assert code == 1
        assert "certificate is not trusted" in errors
        code, _, errors = call("pub", *to(gateway, topic, "secret", "--tls-ca", __file__))
        assert code == 1
        wrong = "Error: cannot use the files for TLS: no certificate or crl found; they are to be PEM files\n"
        assert errors == wrong


def test_both_talk_over_a_unix_socket(tmp_path: Path, topic: str) -> None:
    place = f"unix:{tmp_path / 'socket'}"
    with (
        GatewayProcess(tmp_path / "data", f"listen.blipmq.bind={place}") as gateway,
        subscribed(gateway, topic, "--count", "1") as sub,
    ):
        assert call("pub", *to(gateway, topic, "near"))[0] == 0
        assert sub.finish()[1] == b"near\n"


@pytest.mark.parametrize("command", ["pub", "sub"])
def test_help_is_told(command: str) -> None:
    text = " ".join(CliRunner().invoke(main, [command, "--help"]).stdout.split())
    assert "ADDRESS is the protocol's own" in text
    assert all(f"{name}: {client.form}" in text for name, client in CLIENTS.items())
    assert "[default: 127.0.0.1:5555 for blipmq" in text
