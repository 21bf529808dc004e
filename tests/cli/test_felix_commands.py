"""`headrace pub`, `sub`, `cache` and `decode` for Felix, as a shell sees them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.cli import main
from headrace.wire import felix
from tests.cli.test_pub_sub import Command
from tests.gateway.gateways import GatewayProcess

VECTORS = Path(__file__).parent.parent / "vectors" / "felix"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="module")
def at(data: Path) -> Iterator[str]:
    with GatewayProcess(data, "log.retention_bytes=64MiB", "drop.enabled=false") as gateway:
        yield gateway.places["felix"]


def run(*arguments: str, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(main, arguments, input=stdin)


@pytest.mark.parametrize("qos", ["0", "1"])
def test_what_pub_sends_sub_prints(at: str, qos: str) -> None:
    address = f"t1/default/demo-{qos}"
    with Command("sub", "-p", "felix", "--at", at, address, "-n", "4", "--json") as sub:
        assert sub.error_line() == f"subscribed to {address!r}\n"
        with Command("pub", "-p", "felix", "--at", at, "--qos", qos, address) as pub:
            code, _, said = pub.finish(b"one\ntwo\n\n\xff\n")
        assert code == 0, said
        assert said.startswith("4 messages in ")
        code, out, said = sub.finish()
    assert code == 0, said
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line.get("payload", line.get("payload_base64")) for line in lines] == ["one", "two", "", "/w=="]
    assert lines[0] | {"payload": ""} == {
        "protocol": "felix",
        "tenant": "t1",
        "namespace": "default",
        "stream": f"demo-{qos}",
        "payload": "",
    }


def test_addresses_and_wishes_that_felix_has_no_word_for_are_explained(at: str) -> None:
    with Command("pub", "-p", "felix", "--at", at, "demo", "x") as pub:
        code, _, said = pub.finish()
    assert code == 1
    assert "cannot publish to 'demo': an address is \"tenant/namespace/stream\"" in said
    with Command("sub", "-p", "felix", "--at", at, "t/n/s", "--qos", "1") as sub:
        code, _, said = sub.finish()
    assert code == 1
    assert "Felix has no durable subscriptions" in said


def test_a_certificate_can_be_asked_for(at: str, data: Path) -> None:
    trusted = str(data / "quic" / "certificate.pem")
    with Command("pub", "-p", "felix", "--at", at, "--tls-ca", trusted, "t/n/s", "x") as pub:
        assert pub.finish()[0] == 0


def test_values_go_into_the_cache_and_out_again(at: str) -> None:
    assert run("cache", "put", "--at", at, "k", "value").exit_code == 0
    assert run("cache", "put", "--at", at, "--scope", "t/n/c", "k", stdin=b"\x00\xff").exit_code == 0
    assert run("cache", "get", "--at", at, "k").stdout == "value"
    assert run("cache", "get", "--at", at, "--scope", "t/n/c", "k").stdout_bytes == b"\x00\xff"
    assert run("cache", "put", "--at", at, "--ttl", "0", "k", "gone").exit_code == 0
    result = run("cache", "get", "--at", at, "k")
    assert (result.exit_code, result.stderr) == (1, "Error: there is no value for 'k'\n")


def test_a_wrong_cache_command_is_explained() -> None:
    result = run("cache", "get", "--scope", "t/n", "k")
    assert result.exit_code == 2
    assert 'is not "tenant/namespace/cache"' in result.stderr
    assert run("cache", "get", "--tls-key", __file__, "k").exit_code == 2
    result = run("cache", "get", "--at", "unix:/x", "k")
    assert result.exit_code == 1
    assert "nothing to connect to" in result.stderr


# --- decode -----------------------------------------------------------------------------------------------------


def lines(result: Result) -> list[dict[str, object]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_vectors_are_shown() -> None:
    found = lines(run("decode", "felix", (VECTORS / "cache_put.hex").read_text()))
    assert found == [
        {
            "start": 0,
            "end": 139,
            "type": "cache_put",
            "key": "demo-key",
            "value": "cached",
            "tenant_id": "t1",
            "namespace": "default",
            "cache": "primary",
            "ttl_ms": 1000,
        }
    ]


def test_batches_are_shown_by_role() -> None:
    batch = felix.encode_publish_batch("t", "n", "s", [b"a", b"\xff"])
    result = run("decode", "felix", batch.hex())
    assert result.exit_code == 0
    (line,) = lines(result)
    assert (line["type"], line["stream"], line["payloads"]) == ("publish_batch", "s", ["a", {"hex": "ff"}])
    events = felix.encode_event_batch(7, [b"a"])
    (line,) = lines(run("decode", "felix", "--role", "server", events.hex()))
    assert (line["type"], line["subscription_id"], line["payloads"]) == ("event_batch", 7, ["a"])
    (line,) = lines(run("decode", "felix", "--role", "server", (VECTORS / "publish.hex").read_text()))
    assert line["warnings"] == ["unexpected direction"]


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"FLX2", {"error": "bad magic", "position": 0}),
        (felix.encode_frame(b"{"), {"malformed": "bad json", "start": 0, "end": 13}),
        (felix.encode_frame(b"", 1), {"malformed": "bad size"}),
        (felix.encode_frame(b"{}")[:13], {"unfinished": 13, "wanted": 14}),
        (felix.encode_frame(b'{"type":"ok"}', 0x10), {"warnings": ["flags 0x0010 mean nothing"]}),
    ],
)
def test_where_and_why_bytes_go_wrong_is_said(data: bytes, complaint: dict[str, object]) -> None:
    result = run("decode", "felix", data.hex())
    (line,) = lines(result)
    assert line.items() >= complaint.items()
    assert result.exit_code == (0 if "warnings" in complaint else 1)
