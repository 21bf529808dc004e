"""A small server of connections on a real loop, sessions to run on it, and certificates: for tests of
whatever carries bytes. It knows no protocol of the gateway."""

import asyncio
import datetime
import ipaddress
import ssl
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headrace.connection import Connection, Service, Switchboard
from headrace.session import PySession, Session

T = TypeVar("T")

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

on_both_loops = pytest.mark.parametrize("loop", list(LOOPS))


def run(loop: str, main: Callable[[], Awaitable[T]]) -> T:
    """Runs a coroutine on a loop of this kind; an error that only the loop saw is one of the test's."""
    unhandled: list[dict[str, Any]] = []

    async def watched() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        return await asyncio.wait_for(main(), 60)

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        result = runner.run(watched())
    assert unhandled == []
    return result


async def until(condition: Callable[[], object]) -> None:
    """Returns when the condition holds; a test in which it never does fails by run()'s time limit."""
    while not condition():
        await asyncio.sleep(0.001)


async def steady(value: Callable[[], int]) -> int:
    """What the value is once it has not changed for a while."""
    last = value()
    unchanged = 0
    while unchanged < 10:
        await asyncio.sleep(0.005)
        unchanged = unchanged + 1 if value() == last else 0
        last = value()
    return last


@dataclass
class Recorder:
    """An observer that remembers."""

    refusals: list[str] = field(default_factory=list)
    stalls: list[str] = field(default_factory=list)
    idles: list[str] = field(default_factory=list)
    failures: list[tuple[str, Exception]] = field(default_factory=list)

    def refused(self, connection: Connection) -> None:
        self.refusals.append(connection.peer)

    def stalled(self, connection: Connection) -> None:
        self.stalls.append(connection.name)

    def idled(self, connection: Connection) -> None:
        self.idles.append(connection.name)

    def failed(self, connection: Connection, error: Exception) -> None:
        self.failures.append((connection.name, error))


class Server:
    """A switchboard with one service that listens on a free port, or on a Unix socket."""

    def __init__(
        self,
        factory: Callable[[], Session],
        *,
        unix: Path | None = None,
        tls: ssl.SSLContext | None = None,
        tick: float = 0.01,
        send_buffer: int = 0,
        **limits: Any,
    ) -> None:
        given: dict[str, Any] = {
            "max_frame": 1 << 24,
            "high_water": 1 << 18,
            "max_connections": 10_000,
            "stall_timeout": 60.0,
            **limits,
        }
        self.sessions: list[Any] = []
        self.seen = Recorder()
        self.service = Service("test", self._made, **given)
        self._factory = factory
        self._unix = unix
        self._tls = tls
        self._tick = tick
        self._send_buffer = send_buffer

    def _made(self) -> Session:
        session = self._factory()
        self.sessions.append(session)
        return session

    async def __aenter__(self) -> "Server":
        loop = asyncio.get_running_loop()
        self.board = Switchboard(loop, self.seen, read_bytes=1 << 18, tick_seconds=self._tick)
        if self._unix is not None:
            self._server = await loop.create_unix_server(self._answer, str(self._unix), ssl=self._tls)
        else:
            self._server = await loop.create_server(self._answer, "127.0.0.1", 0, ssl=self._tls, backlog=4096)
            self.port = self._server.sockets[0].getsockname()[1]
            if self._send_buffer:  # connections inherit it
                self._server.sockets[0].setsockopt(*SEND_BUFFER, self._send_buffer)
        return self

    def _answer(self) -> asyncio.BufferedProtocol:
        return self.board.answer(self.service)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.board.abort()
        await asyncio.wait_for(self.board.wait_empty(), 10)
        self.board.close()

    async def connect(
        self, tls: ssl.SSLContext | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._unix is not None:
            return await asyncio.open_unix_connection(str(self._unix), ssl=tls)
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)


SEND_BUFFER = (1, 7)  # SOL_SOCKET, SO_SNDBUF


class Frames(PySession):
    """Frames of a four-byte length and a body; each is answered with a frame that has the same body."""

    def __init__(self, states_length: bool = True) -> None:
        self.states_length = states_length
        self.receives: list[int] = []  # how many bytes each call saw
        self.losses = 0
        self.safe = 0
        self.delivers: list[int] = []  # the room of each call

    def on_bytes(self, data: bytes, now: int) -> int:
        self.receives.append(len(data))
        used = 0
        while len(data) - used >= 4:
            (size,) = struct.unpack_from(">I", data, used)
            if len(data) - used < 4 + size:
                if self.states_length:
                    self.wanted = 4 + size
                break
            body = data[used + 4 : used + 4 + size]
            if not self.on_frame(body):
                break
            used += 4 + size
        return used

    def on_frame(self, body: bytes) -> bool:
        """Whether it is done with the frame."""
        self.put(frame(body))
        return True

    def on_deliver(self, now: int, room: int) -> None:
        self.delivers.append(room)

    def on_lost(self, now: int) -> None:
        self.losses += 1

    def on_safe_end(self) -> int:
        return self.safe


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    (size,) = struct.unpack(">I", await reader.readexactly(4))
    return await reader.readexactly(size)


@dataclass(frozen=True)
class Certificates:
    """An authority, and a certificate for 127.0.0.1 and one for a client that it signed."""

    ca: Path
    cert: Path
    key: Path
    client_cert: Path
    client_key: Path

    def client(self, *, with_certificate: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        if with_certificate:
            context.load_cert_chain(self.client_cert, self.client_key)
        return context


def make_certificates(directory: Path, name: str = "headrace") -> Certificates:
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} test authority")])
    ca = _signed(ca_name, ca_key, ca_name, ca_key, authority=True)
    paths = Certificates(
        *(directory / f"{name}-{part}.pem" for part in ("ca", "cert", "key", "client-cert", "client-key"))
    )
    paths.ca.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    for cert_path, key_path in ((paths.cert, paths.key), (paths.client_cert, paths.client_key)):
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        cert = _signed(subject, key, ca_name, ca_key, authority=False)
        cert_path.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
    return paths


def _signed(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    authority: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
        )
        .add_extension(
            x509.KeyUsage(
                digital_signature=True,
                key_cert_sign=authority,
                crl_sign=authority,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
    )
    if not authority:
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())
