"""Sockets for every kind of address, the sentence when one cannot be had, and TLS with certificates that
change."""

import asyncio
import shutil
import socket
import ssl
import traceback
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from headrace.config import BlipmqListener
from headrace.config.addresses import parse_address
from headrace.connection import Service, Switchboard
from headrace.gateway.listeners import ConnectionEvents, Listener, ListenError, OpenSocket, Tls, open_sockets
from headrace.gateway.systemd import PassedSockets
from tests.streams import (
    Certificates,
    Frames,
    frame,
    make_certificates,
    on_both_loops,
    read_frame,
    run,
    until,
)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


HAS_IPV6 = has_ipv6()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def opened(*texts: str, passed: PassedSockets | None = None) -> list[OpenSocket]:
    return open_sockets(
        "listen.test.bind", [parse_address(text) for text in texts], 16, passed or PassedSockets()
    )


class Listening:
    """A listener with connections that echo frames, on the running loop."""

    def __init__(self, sockets: list[OpenSocket], tls: Tls | None = None) -> None:
        self.listener = Listener("test", sockets, tls)
        self.service = Service(
            "test", Frames, max_frame=1 << 20, high_water=1 << 18, max_connections=100, stall_timeout=10
        )

    async def __aenter__(self) -> "Listening":
        self.board = Switchboard(
            asyncio.get_running_loop(), ConnectionEvents(), read_bytes=1 << 18, tick_seconds=0.01
        )
        await self.listener.start(lambda: self.board.answer(self.service), 16)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.listener.close()
        self.board.abort()
        await self.board.wait_empty()
        self.board.close()


async def echoed(address: str, **options: Any) -> bytes:
    """What a listener at this address answers to a frame."""
    if address.startswith("unix:"):
        reader, writer = await asyncio.open_unix_connection(address[5:], **options)
    else:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), **options)
    writer.write(frame(b"hello"))
    try:
        return await read_frame(reader)
    finally:
        writer.close()


# --- addresses ----------------------------------------------------------------------------------------------


@on_both_loops
def test_every_kind_of_address_is_listened_on(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        inherited = socket.create_server(("127.0.0.1", 0))
        passed = PassedSockets({"given": [inherited]})
        six = ["[::1]:0"] if HAS_IPV6 else []
        sockets = opened("127.0.0.1:0", *six, "localhost:0", f"unix:{tmp_path}/s", "fd:given", passed=passed)
        async with Listening(sockets) as listening:
            addresses = listening.listener.addresses
            assert addresses[0].startswith("127.0.0.1:")
            assert addresses[1].startswith("[::1]:") or not HAS_IPV6
            assert f"unix:{tmp_path}/s" in addresses
            assert not any(address.endswith(":0") for address in addresses)
            for address in addresses:
                assert await echoed(address) == b"hello"
            await until(lambda: listening.service.connections == 0)
            assert listening.service.counters()["opened"] == len(addresses)

    run(loop, main)


@on_both_loops
def test_a_closed_listener_accepts_no_more_and_leaves_connections_alone(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with Listening(opened("127.0.0.1:0", f"unix:{tmp_path}/s")) as listening:
            tcp, unix = listening.listener.addresses
            port = int(tcp.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await until(lambda: listening.service.connections == 1)
            listening.listener.close()
            await asyncio.sleep(0)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            with pytest.raises(FileNotFoundError):
                await asyncio.open_unix_connection(unix[5:])
            assert not (tmp_path / "s").exists()
            writer.write(frame(b"still here"))
            assert await read_frame(reader) == b"still here"
            writer.close()

    run(loop, main)


def test_connections_are_watched_by_keep_alive() -> None:
    [one] = opened("127.0.0.1:0")
    assert one.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    with socket.create_connection(one.socket.getsockname()):
        accepted, _ = one.socket.accept()
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        accepted.close()
    one.close()


def test_an_address_in_use_is_told_with_its_setting() -> None:
    [taken] = opened("127.0.0.1:0")
    with pytest.raises(ListenError) as refused:
        opened(taken.address)
    assert str(refused.value) == f"listen.test.bind: cannot listen on {taken.address}: it is in use"
    taken.close()


@pytest.mark.parametrize("text", ["203.0.113.7:5555", "fd:missing", "unix:/nowhere/at/all"])
def test_an_address_that_cannot_be_had_is_told_with_its_setting(text: str) -> None:
    with pytest.raises(ListenError, match=f"listen.test.bind: cannot listen on {text}: ."):
        opened(text)


def test_all_sockets_are_closed_if_one_cannot_be_had(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with pytest.raises(ListenError):
        opened(f"unix:{path}", "203.0.113.7:5555")
    assert not path.exists()


def test_both_families_may_listen_on_all_interfaces_of_one_port() -> None:
    [four] = opened("0.0.0.0:0")
    port = four.socket.getsockname()[1]
    if HAS_IPV6:
        [six] = opened(f"[::]:{port}")
        assert six.socket.getsockname()[1] == port
        six.close()
    else:
        with pytest.raises(ListenError, match=r"\[::\]"):
            opened(f"[::]:{port}")
    four.close()


def test_a_unix_socket_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.listen()
    left.close()
    assert path.exists()
    [one] = opened(f"unix:{path}")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    one.close()
    assert not path.exists()


def test_a_unix_socket_that_is_in_use_is_not_replaced(tmp_path: Path) -> None:
    [one] = opened(f"unix:{tmp_path}/s")
    with pytest.raises(ListenError, match="it is in use"):
        opened(f"unix:{tmp_path}/s")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"{tmp_path}/s")
    one.close()


def test_a_file_in_place_of_a_unix_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ListenError, match="no socket"):
        opened(f"unix:{path}")
    assert path.read_text() == "data"


# --- TLS ----------------------------------------------------------------------------------------------------


def tls_of(certificates: Certificates, *, client_ca: bool = False) -> Tls:
    return Tls(
        BlipmqListener(
            tls_cert=str(certificates.cert),
            tls_key=str(certificates.key),
            tls_client_ca=str(certificates.ca) if client_ca else "",
        )
    )


@on_both_loops
def test_tls_is_spoken_from_version_1_2_on(loop: str, certificates: Certificates) -> None:
    async def main() -> None:
        async with Listening(opened("127.0.0.1:0"), tls_of(certificates)) as listening:
            [address] = listening.listener.addresses
            for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
                client = certificates.client()
                client.minimum_version = client.maximum_version = version
                assert await echoed(address, ssl=client) == b"hello"

    run(loop, main)
    assert tls_of(certificates).context.minimum_version == ssl.TLSVersion.TLSv1_2


@on_both_loops
def test_a_client_needs_a_certificate_where_an_authority_is_given(
    loop: str, certificates: Certificates
) -> None:
    async def main() -> None:
        async with Listening(opened("127.0.0.1:0"), tls_of(certificates, client_ca=True)) as listening:
            [address] = listening.listener.addresses
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the handshake that fails
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await echoed(address, ssl=certificates.client())
            assert listening.service.counters()["opened"] == 0
            assert await echoed(address, ssl=certificates.client(with_certificate=True)) == b"hello"

    run(loop, main)


@on_both_loops
def test_a_renewed_certificate_is_used_for_new_connections(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        old = make_certificates(tmp_path, "old")
        new = make_certificates(tmp_path, "new")
        tls = tls_of(old)
        async with Listening(opened("127.0.0.1:0"), tls) as listening:
            [address] = listening.listener.addresses
            assert await echoed(address, ssl=old.client()) == b"hello"
            shutil.copy(new.cert, old.cert)
            with pytest.raises(ListenError, match="cannot be used"):
                tls.check()  # the key does not belong to it yet
            assert await echoed(address, ssl=old.client()) == b"hello"
            shutil.copy(new.key, old.key)
            tls.check()
            tls.renew()
            assert await echoed(address, ssl=new.client()) == b"hello"

    run(loop, main)


def test_a_key_with_a_password_is_refused_and_not_asked_for(
    certificates: Certificates, tmp_path: Path
) -> None:
    key = serialization.load_pem_private_key(certificates.key.read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ListenError, match="the key has a password"):
        Tls(BlipmqListener(tls_cert=str(certificates.cert), tls_key=str(locked)))


@pytest.mark.parametrize("which", ["tls_cert", "tls_key", "tls_client_ca"])
def test_a_file_that_is_no_certificate_is_told_by_name(
    which: str, certificates: Certificates, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing of the kind")
    files = {
        "tls_cert": str(certificates.cert),
        "tls_key": str(certificates.key),
        "tls_client_ca": str(certificates.ca),
        which: str(wrong),
    }
    with pytest.raises(ListenError, match=r"wrong\.pem"):
        Tls(BlipmqListener(**files))


# --- what is said of connections ----------------------------------------------------------------------------


@on_both_loops
def test_a_refused_connection_is_told(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with Listening(opened("127.0.0.1:0")) as listening:
            listening.service.max_connections = 0
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await echoed(listening.listener.addresses[0])

    run(loop, main)
    [record] = [record for record in caplog.records if record.message == "connection.refused"]
    assert record.fields["protocol"] == "test"
    assert record.fields["peer"].startswith("127.0.0.1:")


@on_both_loops
def test_a_session_s_error_is_told_with_its_traceback(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Frames):
        def on_frame(self, body: bytes) -> bool:
            raise ZeroDivisionError(f"on {loop}")

    async def main() -> None:
        listening = Listening(opened("127.0.0.1:0"))
        listening.service.factory = Broken
        async with listening:
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await echoed(listening.listener.addresses[0])

    run(loop, main)
    [record] = [record for record in caplog.records if record.message == "session.failed"]
    assert record.levelname == "ERROR"
    assert record.fields["connection"] == "test-1"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == f"on {loop}"
    assert [frame.name for frame in traceback.extract_tb(record.exc_info[2])][-1] == "on_frame"
