"""Listens for QUIC: opens UDP sockets, runs an engine for each connection, and has every stream answered by a
session of its own. What is said on the streams it does not know.

All datagrams that wait are read in one turn of the loop and handed to their connections; then every stream that got
something, or has something to deliver, gets its turn; then each connection sends once. A stream is written to only
while the engine holds less than high_water bytes of it that were never sent: what a peer does not read stays in the
log, and delays nobody else.
"""

import asyncio
import errno
import ipaddress
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from headrace import events, limits
from headrace.config import Config
from headrace.config.addresses import Address, HostPort, InheritedSocket
from headrace.connection import Service
from headrace.errors import HeadraceError
from headrace.gateway.listeners import ListenError, OpenSocket
from headrace.gateway.systemd import PassedSockets
from headrace.quic.certificates import own_identity
from headrace.quic.datagrams import Batch, DatagramSocket
from headrace.quic.engine import (
    CONNECTION_ID_BYTES,
    SMALLEST_INITIAL,
    Engine,
    EngineConnection,
    Identity,
    NetworkAddress,
    Settings,
    load_engine,
)
from headrace.quic.retry import RetryTokens
from headrace.session import Session
from headrace.sessions.felix import Felix, FelixEvents, FelixPeer
from headrace.sessions.felix_peers import Peers
from headrace.substream import Substream, count, same_connection

# How often sessions are told the time, and silence is looked at.
TICK_SECONDS: Final = 0.25
# Of max_connections, how many may be in their handshake: at most half, so that whoever floods the port leaves room for
# others; and a quarter without a proof that their address is their own. Beyond that they are asked for it, as with
# `quic.retry`, and one address has a sixteenth.
YOUNG_SHARE: Final = 2
UNPROVEN_SHARE: Final = 4
ADDRESS_SHARE: Final = 16
# Error codes that a peer sees; the protocol defines none.
NO_ERROR: Final = 0
PROTOCOL_VIOLATION: Final = 1
INTERNAL_ERROR: Final = 2
STALLED: Final = 3

log = events.get("gateway.quic")


def settings_of(config: Config) -> Settings:
    quic = config.quic
    return Settings(
        idle_timeout=quic.idle_timeout,
        max_datagram_bytes=quic.max_datagram_bytes,
        probe_datagram_size=quic.probe_datagram_size,
        connection_window=quic.connection_window,
        stream_window=quic.stream_window,
        max_streams=quic.max_streams,
    )


def open_udp(key: str, addresses: Sequence[Address], passed: PassedSockets) -> list[OpenSocket]:
    """UDP sockets for all addresses, or none of them; `key` is the setting that names them."""
    opened: list[OpenSocket] = []
    try:
        for address in addresses:
            try:
                opened += _open(address, passed)
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


def _open(address: Address, passed: PassedSockets) -> list[OpenSocket]:
    if isinstance(address, InheritedSocket):
        return [OpenSocket(inherited) for inherited in passed.take(address.name)]
    assert isinstance(address, HostPort)
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)
    opened: list[OpenSocket] = []
    missing: OSError | None = None
    for family, kind, protocol, _, place in found:
        try:
            one = socket.socket(family, kind, protocol)
        except OSError as error:
            missing = error
            continue
        try:
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(place)
        except OSError as error:
            one.close()
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            missing = error
            continue
        opened.append(OpenSocket(one))
    if not opened:
        raise missing or OSError(errno.EADDRNOTAVAIL, "no such address")
    return opened


class QuicTls:
    """The TLS side of the listener: its own certificate, or the one that is configured; it can be read anew."""

    def __init__(self, config: Config, data: Path) -> None:
        listen = config.listen.felix
        self._engine = load_engine(config.quic.engine)
        self._settings = settings_of(config)
        self._authorities = Path(listen.tls_client_ca) if listen.tls_client_ca else None
        if listen.tls_cert:
            self._identity = Identity(Path(listen.tls_cert), Path(listen.tls_key))
        else:
            hosts = [one.host for one in listen.addresses if isinstance(one, HostPort)]
            self._identity, made = own_identity(data / "quic", _certifiable(hosts))
            if made:
                log.info("certificate.made", path=str(self._identity.certificate))
        self.accept = self._load()

    def _load(self) -> Callable[[bytes, bytes | None], EngineConnection]:
        try:
            return self._engine.server(self._settings, self._identity, self._authorities)
        except (OSError, ValueError, IndexError) as error:
            raise ListenError(
                f"the certificate {self._identity.certificate} with the key {self._identity.key} cannot be used:"
                f" {error}; both are to be PEM files, and of one pair"
            ) from error

    def check(self) -> None:
        """Raises ListenError if the files could not be used now."""
        self._load()

    def renew(self) -> None:
        """Reads the certificate and its key again, for connections from now on."""
        self.accept = self._load()


def _certifiable(hosts: Sequence[str]) -> list[str]:
    """Addresses that a client can have connected to; "all of them" is none."""
    return [host for host in hosts if host not in ("", "0.0.0.0", "::", "localhost")]


def source_of(address: NetworkAddress) -> bytes:
    """Who is behind an address: in IPv6 whoever has one has all of its network's."""
    found = ipaddress.ip_address(address[0].partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return found.packed[:8]


class QuicListener:
    """The Felix listener: its sockets, and all connections on them."""

    def __init__(self, config: Config, sockets: list[OpenSocket], tls: QuicTls | None) -> None:
        """`tls` may be set later, before start()."""
        self.name = "felix"
        self.tls = tls
        self.addresses = [opened.address for opened in sockets]
        self.peers = Peers(config.listen.felix.peers)
        self._engine: Engine = load_engine(config.quic.engine)
        self._tokens = RetryTokens()
        self._retry = config.quic.retry
        self._sockets = sockets
        self._endpoints: list[DatagramSocket] = []
        self._links: dict[bytes, Link] = {}  # by each of their connection ids
        self.links: set[Link] = set()
        self._young: set[Link] = set()  # of these, those whose handshake is not done
        self._young_from: Counter[bytes] = Counter()  # how many of them, by source, if it is proven
        self._due: list[Substream] = []
        self._dirty: set[Link] = set()
        self._turn_scheduled = False
        self._in_turn = False
        self._accepting = False
        self._draining = False
        self._empty: list[asyncio.Future[None]] = []
        self.safe_waiters: set[Substream] = set()
        self.space_waiters: set[Substream] = set()
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Takes over what may change while it runs."""
        listen = config.listen.felix
        self.keep_alive = config.quic.keep_alive
        self.handshake_timeout = config.quic.handshake_timeout
        self.most_kept = listen.max_frame_bytes + limits.QUIC_BLOCKED_BYTES
        self.peers.replace(listen.peers)
        for link in self.links:
            link.renew_rights()

    def start(self, felix: Felix, service: Service) -> None:
        """Has every connection answered from now on."""
        self._loop = asyncio.get_running_loop()
        self.felix = felix
        self.service = service
        for opened in self._sockets:
            endpoint: DatagramSocket = DatagramSocket(opened.socket, self._loop, lambda batch: None)
            endpoint._handle = partial(self._on_datagrams, endpoint)
            self._endpoints.append(endpoint)
            log.info("listener.open", protocol=self.name, address=opened.address, engine=self._engine.name)
        self._accepting = True
        self._timer = self._loop.call_later(TICK_SECONDS, self._sweep)

    def close(self) -> None:
        """Accepts no more; connections stay as they are."""
        if self._accepting:
            log.info("listener.closed", protocol=self.name)
        self._accepting = False

    def shut(self) -> None:
        """Closes the sockets, when no connection is left."""
        if self._endpoints:
            self._timer.cancel()
        for endpoint in self._endpoints:
            endpoint.close()
        for opened in self._sockets:
            opened.close()
        self._endpoints.clear()
        self._sockets.clear()

    # --- what the gateway tells all connections -------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.links)

    def safe_moved(self) -> None:
        """The log's safe end moved: output that waited for it leaves."""
        waiters, self.safe_waiters = self.safe_waiters, set()
        for stream in waiters:
            stream.safe_moved()
        self._send_dirty()

    def space_made(self) -> None:
        """The log has space again: who was blocked on it goes on."""
        waiters, self.space_waiters = self.space_waiters, set()
        for stream in waiters:
            stream.unblock()

    def drain(self) -> None:
        """Takes nothing new from any peer; each connection closes once all that it owes its peer has arrived."""
        self._accepting = False
        self._draining = True
        for link in list(self.links):
            link.begin_drain()
        self._send_dirty()

    async def wait_empty(self) -> None:
        """Returns when no connection is left."""
        if self.links:
            waiter = self._loop.create_future()
            self._empty.append(waiter)
            await waiter

    def abort(self) -> None:
        """Drops all connections at once, with what they hold."""
        for link in list(self.links):
            link.close(NO_ERROR, "the gateway stops")
            link.transmit()
            link.gone()

    # --- datagrams ------------------------------------------------------------------------------------------

    def _on_datagrams(self, endpoint: DatagramSocket, batch: Batch) -> None:
        now = self._loop.time()
        received = 0
        for data, size, address in batch:
            received += len(data)
            if size >= len(data):
                self._on_datagram(endpoint, data, address, now)
                continue
            # Datagrams that came together may be of several connections.
            if same_connection(data, size, CONNECTION_ID_BYTES):
                link = self._links.get(data[1 : 1 + CONNECTION_ID_BYTES])
                if link is not None:
                    link.take(data, size, address, now)
                continue
            for start in range(0, len(data), size):
                self._on_datagram(endpoint, data[start : start + size], address, now)
        count(self.service, "reads")
        count(self.service, "bytes_in", received)
        for link in list(self._dirty):
            link.handle_events()
        self._run_turn()

    def _on_datagram(
        self, endpoint: DatagramSocket, data: bytes, address: NetworkAddress, now: float
    ) -> None:
        link = None
        if not data[0] & 0x80:
            link = self._links.get(data[1 : 1 + CONNECTION_ID_BYTES])
        else:
            header = self._engine.header(data)
            if header is None:
                return
            link = self._links.get(header.destination)
            if link is None:
                link = self._accept(endpoint, header, data, address, now)
        if link is not None:
            link.take(data, len(data), address, now)

    def _accept(
        self, endpoint: DatagramSocket, header: Any, data: bytes, address: NetworkAddress, now: float
    ) -> "Link | None":
        """A new connection, if this datagram begins one."""
        if header.negotiation or header.version is None:
            return None
        if not self._engine.supports(header.version):
            if len(data) >= SMALLEST_INITIAL:
                endpoint.send([(self._engine.version_negotiation(header), address)])
            return None
        if not header.initial or len(data) < SMALLEST_INITIAL or not self._accepting:
            return None
        if len(self.links) >= self.service.max_connections:
            self._refuse(address, "too many connections")
            return None
        first, retry = header.destination, None
        most = self.service.max_connections
        crowded = len(self._young) >= max(1, most // UNPROVEN_SHARE)
        needs_token = self._retry or crowded
        if header.token:
            try:
                first, retry = self._tokens.open(header.token, address, first, now), first
            except ValueError:
                if needs_token:
                    return None
        elif needs_token:
            other = os.urandom(CONNECTION_ID_BYTES)
            token = self._tokens.make(address, first, other, now)
            endpoint.send([(self._engine.retry(header, other, token), address)])
            return None
        if len(self._young) >= max(1, most // YOUNG_SHARE):
            self._refuse(address, "too many handshakes are under way")
            return None
        # An address that is not proven is not counted: whoever makes one up would use up its share.
        source = b"" if retry is None else source_of(address)
        if crowded and source and self._young_from[source] >= max(1, most // ADDRESS_SHARE):
            self._refuse(address, "too many handshakes of this address are under way")
            return None
        assert self.tls is not None
        link = Link(self, endpoint, self.tls.accept(first, retry), address, now)
        link.source = source
        count(self.service, "opened")
        link.name = f"felix-{self.service.counters()['opened']}"
        self.links.add(link)
        self._young.add(link)
        if source:
            self._young_from[source] += 1
        for cid in (header.destination, link.connection.host_cid):
            self.know(cid, link)
        return link

    def _refuse(self, address: NetworkAddress, reason: str) -> None:
        count(self.service, "refused")
        log.limited(
            "connection.refused", key="felix", protocol="felix", peer=_text_of(address), reason=reason
        )

    def grown(self, link: "Link") -> None:
        """A connection's handshake is done, or will never be."""
        if link not in self._young:
            return
        self._young.remove(link)
        if link.source:
            self._young_from[link.source] -= 1
            if not self._young_from[link.source]:
                del self._young_from[link.source]

    def know(self, cid: bytes, link: "Link") -> None:
        self._links[cid] = link
        link.cids.add(cid)

    def forget(self, cid: bytes, link: "Link") -> None:
        if self._links.get(cid) is link:
            del self._links[cid]
        link.cids.discard(cid)

    def lost(self, link: "Link") -> None:
        """A connection is gone."""
        for cid in list(link.cids):
            self.forget(cid, link)
        self.links.discard(link)
        self.grown(link)
        self._dirty.discard(link)
        count(self.service, "closed")
        if not self.links:
            for waiter in self._empty:
                if not waiter.done():
                    waiter.set_result(None)
            self._empty.clear()

    # --- turns of the loop ----------------------------------------------------------------------------------

    def schedule(self, stream: Substream) -> None:
        """Has a stream's turn() called, in this turn of the loop if one is under way, else in the next."""
        stream.scheduled = True
        self._due.append(stream)
        if not self._turn_scheduled and not self._in_turn:
            self._turn_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_scheduled = False
        self._run_turn()

    def _run_turn(self) -> None:
        now = time.time_ns() // 1000
        due, self._due = self._due, []
        self._in_turn = True
        try:
            for stream in due:
                stream.scheduled = False
                stream.turn(now)
        finally:
            self._in_turn = False
        self._send_dirty()
        if self._due and not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon(self._turn)

    def touched(self, link: "Link") -> None:
        """A connection got something in the turn that is under way."""
        self._dirty.add(link)

    def dirty(self, link: "Link") -> None:
        """A connection has something to send at the end of this turn."""
        self._dirty.add(link)
        if not self._turn_scheduled and not self._in_turn:
            self._turn_scheduled = True
            self._loop.call_soon(self._turn)

    def _send_dirty(self) -> None:
        links, self._dirty = self._dirty, set()
        for link in links:
            link.transmit()

    def _sweep(self) -> None:
        self._timer = self._loop.call_later(TICK_SECONDS, self._sweep)
        time_, now = self._loop.time(), time.time_ns() // 1000
        for link in list(self.links):
            link.sweep(time_, now)
        self._send_dirty()


class Link:
    """One connection."""

    def __init__(
        self,
        listener: QuicListener,
        endpoint: DatagramSocket,
        connection: EngineConnection,
        address: NetworkAddress,
        now: float,
    ) -> None:
        self.listener = listener
        self.endpoint = endpoint
        self.connection = connection
        self.name = "felix"
        self.protocol = "felix"
        self.cids: set[bytes] = set()
        self.source = b""  # of its handshake, if it is proven
        self._address = address  # where its datagrams come from
        self._first_address = address  # where it was when it made the handshake
        self._names: list[str] = []  # in its certificate
        self._felix: FelixPeer | None = None
        self._streams: dict[int, Substream] = {}
        self._stuck: set[Substream] = set()
        self._overfull: set[Substream] = set()  # hold more than a blocked stream may
        self._later: dict[Substream, asyncio.TimerHandle] = {}
        self._began = self._heard = now
        self._answered = False  # it was sent something
        self._stirred = now  # when something was last said, beside signs of life
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._pings = 0
        self._closing = False
        self._gone = False
        self._draining = False

    @property
    def peer(self) -> str:
        """Whom it is with."""
        return _text_of(self._address)

    # --- what comes -----------------------------------------------------------------------------------------

    def takes_more(self) -> bool:
        """Whether its datagrams are taken: not while a stream of it is blocked and has too much already. What is not
        taken is as lost as on the network, and comes again."""
        if self._overfull:
            self._overfull = {one for one in self._overfull if one.kept_size > self.listener.most_kept}
        return not self._overfull

    def take(self, data: bytes, size: int, address: NetworkAddress, now: float) -> None:
        """Datagrams for this connection, each of `size` bytes, the last one perhaps shorter."""
        if self._gone or not self.takes_more():
            return
        if self._felix is None and address != self._address:
            return  # who makes the handshake does so from one place: that is what its rights are of
        self._heard = now
        try:
            if size < len(data):
                self.connection.receive_many(data, size, address, now)
            else:
                self.connection.receive_datagram(data, address, now)
        except Exception as error:
            self._broken(error)
            return
        place = self.connection.peer_address
        if self._felix is not None and place is not None and place != self._address:
            self._address = place
            self.renew_rights()
        self.listener.touched(self)

    def renew_rights(self) -> None:
        """The rights of where it made the handshake. Who moves to where the rights are others has none there: an
        address is easily made up."""
        if self._felix is None:
            return
        rights = self.listener.peers.find(self._first_address[0], self._names)
        if self._address != self._first_address and rights is not self.listener.peers.find(
            self._address[0], self._names
        ):
            rights = None
        self._felix.set_rights(rights, self.peer)

    def handle_events(self) -> None:
        kinds = self.listener._engine.events
        while (event := self.connection.next_event()) is not None:
            if isinstance(event, kinds.StreamDataReceived):
                self._on_data(event.stream_id, event.data, event.end_stream)
            elif isinstance(event, kinds.StreamReset):
                self._on_reset(event.stream_id)
            elif isinstance(event, kinds.StopSendingReceived):
                self._on_stop(event.stream_id)
            elif isinstance(event, kinds.HandshakeCompleted):
                self._on_handshake()
            elif isinstance(event, kinds.ConnectionIdIssued):
                self.listener.know(event.connection_id, self)
            elif isinstance(event, kinds.ConnectionIdRetired):
                self.listener.forget(event.connection_id, self)
            elif isinstance(event, kinds.ConnectionTerminated):
                self.gone()

    def _on_handshake(self) -> None:
        self._first_address = self._address
        self._names = self.connection.peer_names()
        rights = self.listener.peers.find(self._address[0], self._names)
        self._felix = self.listener.felix.peer(self.peer, rights, self._open_events)
        self.listener.grown(self)
        log.debug("connection.made", connection=self.name, peer=self.peer, rights=self._felix.name)

    def _on_data(self, number: int, data: bytes, fin: bool) -> None:
        self._stirred = self._heard
        stream = self._streams.get(number)
        if stream is None:
            if self._felix is None or self._draining or self._closing or number & 1:
                return
            one_way = bool(number & 2)
            stream = self._carry(self._felix.stream(one_way), number, readable=True, writable=not one_way)
        stream.receive(data, fin)
        if stream.kept_size > self.listener.most_kept:
            self._overfull.add(stream)
        if stream.session is None and stream.fin:
            del self._streams[number]

    def _on_reset(self, number: int) -> None:
        """The peer gave up what it was saying."""
        stream = self._streams.get(number)
        if stream is not None:
            live = stream.session is not None
            self._drop(stream)
            if live and stream.writable:
                self.connection.reset_stream(number, NO_ERROR)
                self.listener.dirty(self)

    def _on_stop(self, number: int) -> None:
        """The peer wants to hear no more: a subscription ends."""
        stream = self._streams.get(number)
        if stream is not None and stream.session is not None:
            if stream.readable and not stream.fin:
                self.connection.stop_stream(number, NO_ERROR)
                self._lose(stream)
            else:
                self._drop(stream)
            self.connection.reset_stream(number, NO_ERROR)
            self.listener.dirty(self)

    # --- streams --------------------------------------------------------------------------------------------

    def _carry(self, session: Session, number: int, *, readable: bool, writable: bool) -> Substream:
        stream = Substream(
            session,
            self.listener.service,
            self,
            self._send,
            self.connection.unsent,
            number,
            readable=readable,
            writable=writable,
            name=self.name,
            peer=self.peer,
        )
        self._streams[number] = stream
        return stream

    def _open_events(self, session: FelixEvents) -> None:
        """Opens a stream for a subscription."""
        if self._draining or self._closing:
            raise RuntimeError("the connection is closing")
        number = self.connection.get_next_available_stream_id(is_unidirectional=True)
        stream = self._carry(session, number, readable=False, writable=True)
        # At once, so that the number is taken and the client hears of the stream.
        try:
            self.connection.send_stream_data(number, session.pull(0, 0), False)
        except Exception as error:
            del self._streams[number]
            session.connection = None
            raise RuntimeError(f"no stream can be opened for it: {error}") from error
        self.listener.dirty(self)
        stream.wake()

    def _send(self, number: int, data: bytes, fin: bool) -> None:
        self._stirred = self._heard
        self.connection.send_stream_data(number, data, fin)
        self.listener.dirty(self)

    def _lose(self, stream: Substream) -> None:
        self._stuck.discard(stream)
        self.listener.safe_waiters.discard(stream)
        self.listener.space_waiters.discard(stream)
        if (timer := self._later.pop(stream, None)) is not None:
            timer.cancel()
        stream.lost(time.time_ns() // 1000)

    def _drop(self, stream: Substream) -> None:
        self._lose(stream)
        self._streams.pop(stream.number, None)

    # What a stream asks for.

    def schedule(self, stream: Substream) -> None:
        self.listener.schedule(stream)

    def schedule_later(self, stream: Substream, seconds: float) -> None:
        if stream not in self._later:

            def wake() -> None:
                self._later.pop(stream, None)
                stream.wake()

            self._later[stream] = self.listener._loop.call_later(seconds, wake)

    def wait_safe(self, stream: Substream) -> None:
        self.listener.safe_waiters.add(stream)

    def wait_space(self, stream: Substream) -> None:
        self.listener.space_waiters.add(stream)

    def wait_room(self, stream: Substream) -> None:
        if stream not in self._stuck:
            stream.watched = self.connection.unsent(stream.number)
            stream.watched_at = self.listener._loop.time()
            self._stuck.add(stream)

    def over(self, stream: Substream) -> None:
        """A stream has nothing more to say or to hear."""
        number = stream.number
        violation = getattr(stream.session, "violation", None)
        # A subscription whose gateway stops has not ended: the client may make it again.
        if stream.writable and (stream.readable or not self._draining):
            self.connection.send_stream_data(number, b"", True)
        if stream.readable and not stream.fin:
            self.connection.stop_stream(number, NO_ERROR)
            self._lose(stream)  # what still comes is thrown away
        else:
            self._drop(stream)
        self.listener.dirty(self)
        if violation is not None:
            log.limited(
                "protocol.violation", key="felix", connection=self.name, peer=self.peer, reason=violation
            )
            self.close(PROTOCOL_VIOLATION, violation)

    def failed(self, stream: Substream, error: Exception) -> None:
        """A session's error ends its own connection and nothing else."""
        count(self.listener.service, "failed")
        log.limited(
            "session.failed",
            key=("felix", type(error)),
            level=events.LEVELS["error"],
            connection=self.name,
            peer=self.peer,
            exc_info=error,
        )
        self._drop(stream)
        self.close(INTERNAL_ERROR, "internal error")

    def _broken(self, error: Exception) -> None:
        """The engine failed, which a peer may have caused: this connection is over, the others go on."""
        count(self.listener.service, "failed")
        log.limited(
            "quic.failed",
            key=("felix", type(error)),
            level=events.LEVELS["error"],
            connection=self.name,
            peer=self.peer,
            exc_info=error,
        )
        self.gone()

    # --- what goes ------------------------------------------------------------------------------------------

    def transmit(self) -> None:
        """Sends all that may be sent now."""
        if self._gone:
            return
        now = self.listener._loop.time()
        try:
            datagrams = self.connection.datagrams_to_send(now)
        except Exception as error:
            self._broken(error)
            return
        if datagrams:
            self._answered = True
            count(self.listener.service, "bytes_out", self.endpoint.send(datagrams))
        elif not self._answered:
            self.gone()  # what looked like a first packet was none: each that is one is acknowledged at once
            return
        if self._stuck:
            for stream in list(self._stuck):
                stream.sent()
                if not stream.stuck:
                    self._stuck.discard(stream)
        if self._draining:
            self._drained()
        self._arm()

    def _arm(self) -> None:
        at = None if self._gone else self.connection.get_timer()
        if at is None:
            return
        if self._timer is not None:
            # One that fires early finds out by itself; so a moving deadline costs nothing.
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self.listener._loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._gone:
            return
        now = self.listener._loop.time()
        at = self.connection.get_timer()
        if at is not None and at <= now + 0.0005:
            try:
                self.connection.handle_timer(max(now, at))
            except Exception as error:
                self._broken(error)
                return
            self.handle_events()
            if not self._gone:
                self.listener.dirty(self)
        self._arm()

    def sweep(self, time_: float, now: int) -> None:
        if self._gone:
            return
        service = self.listener.service
        for stream in list(self._streams.values()):
            stream.sweep(now)
        for stream in list(self._stuck):
            unsent = self.connection.unsent(stream.number)
            if unsent != stream.watched:
                stream.watched, stream.watched_at = unsent, time_
            elif time_ - stream.watched_at >= service.stall_timeout:
                count(service, "stalled")
                log.limited(
                    "stream.stalled",
                    key="felix",
                    connection=self.name,
                    peer=self.peer,
                    reason="the peer does not read what it is sent",
                )
                self.connection.reset_stream(stream.number, STALLED)
                self._drop(stream)
                self.listener.dirty(self)
        if self._felix is None and time_ - self._began >= self.listener.handshake_timeout:
            count(service, "idled")
            log.debug("connection.idle", connection=self.name, peer=self.peer)
            self.close(NO_ERROR, "the handshake took too long")
            self.transmit()
            self.gone()
        elif 0 < service.idle_timeout <= time_ - self._stirred and not self._closing:
            count(service, "idled")
            log.debug("connection.idle", connection=self.name, peer=self.peer)
            self.close(NO_ERROR, "idle")
        elif 0 < self.listener.keep_alive <= time_ - self._heard and self._felix is not None:
            self._pings += 1
            self.connection.send_ping(self._pings)
            self.listener.dirty(self)

    # --- ends -----------------------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        self._draining = True
        now = time.time_ns() // 1000
        for stream in list(self._streams.values()):
            stream.drain(now)
        self.listener.dirty(self)

    def _drained(self) -> None:
        """Whether all has arrived that the peer is owed."""
        if (
            any(stream.session is not None for stream in self._streams.values())
            or not self.connection.settled()
        ):
            return
        self.close(NO_ERROR, "the gateway stops")
        self.endpoint.send(self.connection.datagrams_to_send(self.listener._loop.time()))
        self.gone()

    def close(self, code: int, reason: str) -> None:
        """Ends the connection, with all of its streams."""
        if self._closing or self._gone:
            return
        self._closing = True
        for stream in list(self._streams.values()):
            self._drop(stream)
        self.connection.close(error_code=code, reason_phrase=reason[:200])
        self.listener.dirty(self)

    def gone(self) -> None:
        """The connection is no more."""
        if self._gone:
            return
        self._gone = True
        for stream in list(self._streams.values()):
            self._drop(stream)
        if self._timer is not None:
            self._timer.cancel()
        self.listener.lost(self)


def _text_of(address: NetworkAddress) -> str:
    return str(HostPort(address[0], address[1]))
