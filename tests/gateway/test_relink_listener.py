"""Relink spoken by a gateway process, over real sockets: TCP, TLS and Unix."""

import socket
import ssl
from pathlib import Path

import pytest

from headrace.wire import relink as wire
from tests.gateway.gateways import PATIENCE, GatewayProcess, Peer
from tests.streams import make_certificates

HELLO = wire.encode_version() + wire.encode_hello("demo", 4, 4)


def read(connected: socket.socket, decoder: wire.Decoder, count: int) -> list[wire.Item]:
    items: list[wire.Item] = []
    connected.settimeout(PATIENCE)
    while len(items) < count:
        data = connected.recv(65536)
        assert data, items
        items += decoder.feed(data)
    return items


@pytest.mark.parametrize("way", ["tcp", "tls", "unix"])
def test_message_goes_in_and_out_over_every_kind_of_socket(tmp_path: Path, way: str) -> None:
    sets = ["listen.relink.bind=127.0.0.1:0"]
    context: ssl.SSLContext | None = None
    if way == "tls":
        made = make_certificates(tmp_path)
        context = made.client()
        sets += [f"listen.relink.tls_cert={made.cert}", f"listen.relink.tls_key={made.key}"]
    elif way == "unix":
        sets = [f"listen.relink.bind=unix:{tmp_path}/s"]
    with GatewayProcess(tmp_path / "data", *sets) as gateway:
        if way == "unix":
            raw = socket.socket(socket.AF_UNIX)
            raw.connect(f"{tmp_path}/s")
        else:
            raw = socket.create_connection(("127.0.0.1", gateway.port("relink")))
        connected = raw if context is None else context.wrap_socket(raw, server_hostname="127.0.0.1")
        with connected:
            decoder = wire.Decoder("listener", connector_size=4, listener_size=4)
            connected.sendall(HELLO)
            read(connected, decoder, 2)
            connected.sendall(wire.encode_message(7, 4, [b"a", b"b"]))
            (consumed,) = read(connected, decoder, 1)
            assert isinstance(consumed, wire.Acknowledgement)
            assert (consumed.type, consumed.channels) == (wire.AckType.CONSUMED, (7,))
            Peer.to(gateway).publish("demo.out.9", b"hello")
            (message,) = read(connected, decoder, 1)
            assert isinstance(message, wire.Message)
            assert (message.channels, message.parts) == ((9,), (b"hello",))
        assert gateway.status()["listeners"][1]["events"]["messages"] == 1


def test_endpoints_come_from_the_configuration(tmp_path: Path) -> None:
    endpoints = (
        'endpoints=[{name="orders", connector_id_bytes=0, listener_id_bytes=1, publish="o.in",'
        ' deliver="o.out.{channel}", key="dev"}]'
    )
    with GatewayProcess(tmp_path / "data", "listen.relink.bind=127.0.0.1:0", endpoints) as gateway:
        with socket.create_connection(("127.0.0.1", gateway.port("relink"))) as connected:
            connected.sendall(HELLO)
            connected.settimeout(PATIENCE)
            assert connected.recv(100) == bytes(8)
            assert connected.recv(100) == b""
        with socket.create_connection(("127.0.0.1", gateway.port("relink"))) as connected:
            decoder = wire.Decoder("listener", connector_size=0, listener_size=1)
            connected.sendall(wire.encode_version() + wire.encode_hello("orders", 0, 1))
            read(connected, decoder, 2)
            Peer.to(gateway).publish("o.out.255", b"x")
            (message,) = read(connected, decoder, 1)
            assert isinstance(message, wire.Message)
            assert message.channels == (255,)
