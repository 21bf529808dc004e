"""Opens the sockets that the configuration names, over TCP, TLS, Unix sockets or passed by the service
manager, and has every connection answered. Knows nothing of what is said on them."""

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace import events
from headrace.config import ListenerConfig
from headrace.config.addresses import Address, HostPort, InheritedSocket, UnixPath
from headrace.connection import Connection
from headrace.errors import HeadraceError
from headrace.gateway.systemd import PassedSockets

# A dead peer is noticed after two minutes: a minute of silence, then four questions without an answer.
KEEPALIVE_IDLE = 60
KEEPALIVE_INTERVAL = 15
KEEPALIVE_PROBES = 4
# A peer that connects to a TLS listener and does not greet holds a socket that max_connections does not
# count yet.
TLS_HANDSHAKE_SECONDS = 10.0

log = events.get("gateway.listeners")


class ListenError(HeadraceError):
    """An address cannot be listened on; the text names it."""


class ConnectionEvents:
    """Says what happens to connections against their will; peers can cause any of it, so lines are
    limited."""

    def refused(self, connection: Connection) -> None:
        log.limited(
            "connection.refused",
            key=connection.protocol,
            protocol=connection.protocol,
            peer=connection.peer,
            reason="too many connections, or the gateway is stopping",
        )

    def stalled(self, connection: Connection) -> None:
        log.limited(
            "connection.stalled",
            key=connection.protocol,
            connection=connection.name,
            peer=connection.peer,
            reason="the peer does not read what it is sent",
        )

    def idled(self, connection: Connection) -> None:
        log.debug("connection.idle", connection=connection.name, peer=connection.peer)

    def failed(self, connection: Connection, error: Exception) -> None:
        log.limited(
            "session.failed",
            key=(connection.protocol, type(error)),
            level=events.LEVELS["error"],
            connection=connection.name,
            peer=connection.peer,
            exc_info=error,
        )


@dataclass
class OpenSocket:
    """A socket that listens, and the file that it leaves behind."""

    socket: socket.socket
    path: Path | None = None  # of a Unix socket that was made here

    @property
    def address(self) -> str:
        """Where it listens really, as text; the port is known even if the system chose it."""
        return _text_of(self.socket)

    def close(self) -> None:
        self.remove_file()
        self.socket.close()

    def remove_file(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None


def open_sockets(
    key: str, addresses: Sequence[Address], backlog: int, passed: PassedSockets
) -> list[OpenSocket]:
    """Sockets for all addresses, or none of them; `key` is the setting that names them."""
    opened: list[OpenSocket] = []
    try:
        for address in addresses:
            try:
                opened += _open(address, backlog, passed)
            except OSError as error:
                reason = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
                raise ListenError(f"{key}: cannot listen on {address}: {reason}") from error
            except HeadraceError as error:
                raise ListenError(f"{key}: cannot listen on {address}: {error}") from error
    except BaseException:
        for done in opened:
            done.close()
        raise
    return opened


class Tls:
    """The TLS side of a listener; its certificate can be read anew while it is in use."""

    def __init__(self, config: ListenerConfig) -> None:
        self._files = (config.tls_cert, config.tls_key, config.tls_client_ca)
        self.context = self._load()

    def _load(self) -> ssl.SSLContext:
        certificate, key, client_ca = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(certificate, key, password=_no_password)
        except (OSError, ValueError) as error:
            raise ListenError(
                f"the certificate {certificate} with the key {key} cannot be used: {error}; both are to be PEM files,"
                " and of one pair"
            ) from error
        if client_ca:
            try:
                context.load_verify_locations(client_ca)
            except OSError as error:
                raise ListenError(f"the client authority {client_ca} cannot be used: {error}") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def check(self) -> None:
        """Raises ListenError if the files could not be used now."""
        self._load()

    def renew(self) -> None:
        """Reads the certificate and its key again, for connections from now on."""
        certificate, key, _ = self._files
        self.context.load_cert_chain(certificate, key, password=_no_password)


class Listener:
    """One protocol's sockets, answered by the loop."""

    def __init__(self, name: str, sockets: list[OpenSocket], tls: Tls | None) -> None:
        self.name = name
        self.tls = tls
        self.addresses = [opened.address for opened in sockets]
        self._sockets = sockets
        self._servers: list[asyncio.Server] = []

    async def start(self, answer: Callable[[], asyncio.BaseProtocol], backlog: int) -> None:
        """Has every connection answered from now on."""
        loop = asyncio.get_running_loop()
        context = self.tls.context if self.tls else None
        handshake = TLS_HANDSHAKE_SECONDS if self.tls else None
        for opened in self._sockets:
            create = loop.create_unix_server if opened.socket.family == socket.AF_UNIX else loop.create_server
            server = await create(
                answer,
                sock=opened.socket,
                backlog=backlog,
                ssl=context,
                ssl_handshake_timeout=handshake,
                ssl_shutdown_timeout=handshake,
            )
            self._servers.append(server)
            log.info("listener.open", protocol=self.name, address=opened.address, tls=self.tls is not None)

    def close(self) -> None:
        """Accepts no more; connections stay as they are."""
        for server in self._servers:
            server.close()
        for opened in self._sockets:
            opened.close()
        if self._servers:
            log.info("listener.closed", protocol=self.name)
        self._servers.clear()
        self._sockets.clear()


def _no_password() -> str:
    # Without this OpenSSL would ask on the terminal.
    raise ValueError("the key has a password")


def _open(address: Address, backlog: int, passed: PassedSockets) -> list[OpenSocket]:
    match address:
        case HostPort():
            return list(_open_host(address, backlog))
        case UnixPath():
            return [_open_unix(Path(address.path), backlog)]
        case InheritedSocket():
            return [OpenSocket(inherited) for inherited in passed.take(address.name)]


def _open_host(address: HostPort, backlog: int) -> Iterator[OpenSocket]:
    """A socket for each address that a host's name has; those that this machine does not have are left
    out."""
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    missing: OSError | None = None
    some = False
    for family, kind, protocol, _, place in found:
        try:
            opened = socket.socket(family, kind, protocol)
        except OSError as error:
            missing = error
            continue
        try:
            _listen_tcp(opened, place, backlog)
        except OSError as error:
            opened.close()
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            missing = error
            continue
        some = True
        yield OpenSocket(opened)
    if not some:
        raise missing or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


def _listen_tcp(opened: socket.socket, place: tuple[object, ...], backlog: int) -> None:
    opened.setblocking(False)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit these.
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if (number := getattr(socket, option, None)) is not None:
            opened.setsockopt(socket.IPPROTO_TCP, number, value)
    if opened.family == socket.AF_INET6:
        opened.setsockopt(
            socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1
        )  # "[::]" and "0.0.0.0" may stand side by side
    opened.bind(place)
    opened.listen(backlog)


def _open_unix(path: Path, backlog: int) -> OpenSocket:
    _remove_stale(path)
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        opened.setblocking(False)
        opened.bind(str(path))
        opened.listen(backlog)
    except OSError:
        opened.close()
        raise
    return OpenSocket(opened, path)


def _remove_stale(path: Path) -> None:
    """Removes a socket that a process left behind which ended without a chance to do so."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _text_of(opened: socket.socket) -> str:
    place = opened.getsockname()
    if opened.family == socket.AF_UNIX:
        return f"unix:{place.decode() if isinstance(place, bytes) else place}"
    return str(HostPort(place[0], place[1]))
