"""The engine qh3, whose core is compiled. What it has no public way for is reached here, and nowhere else."""

import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

from qh3 import tls
from qh3._hazmat import pull_quic_header
from qh3.quic import events
from qh3.quic.configuration import QuicConfiguration
from qh3.quic.connection import QuicConnection
from qh3.quic.packet import QuicPacketType, encode_quic_retry, encode_quic_version_negotiation

from headrace.quic.certificates import pinned_fingerprint
from headrace.quic.engine import (
    CONNECTION_ID_BYTES,
    EngineConnection,
    EngineUnavailable,
    Header,
    Identity,
    NetworkAddress,
    Settings,
    Trust,
)

# It warns of every peer that says goodbye.
logging.getLogger("quic").setLevel(logging.ERROR)

# Of the tuple that describes a path.
REMOTE = 2


class Connection(QuicConnection):
    """A connection that answers the first ALPN offer of a client, and none if there is none."""

    _told = False  # that it is over

    def _create_tls(self, remote_source_cid: bytes | None) -> Any:
        bridge = super()._create_tls(remote_source_cid)
        if not self._is_client:
            plain_hello = bridge.tls._server_handle_hello

            def hello(context: Any, input_buf: Any, *rest: Any) -> None:
                begin = input_buf.tell()
                offered = tls.pull_client_hello(input_buf).alpn_protocols
                input_buf.seek(begin)
                context._alpn_protocols = offered[:1] if offered else None
                plain_hello(input_buf, *rest)

            setattr(bridge.tls, "_server_handle_hello", MethodType(hello, bridge.tls))  # noqa: B010
        return bridge

    def next_event(self) -> Any:
        """The next event. That the peer has closed the connection is told at once, not when its time is over."""
        event = super().next_event()
        if event is None and self._close_event is not None and not self._told:
            self._told = True
            return self._close_event
        return event

    def datagrams_to_send(self, now: float) -> list[tuple[bytes, NetworkAddress]]:
        datagrams: list[tuple[bytes, NetworkAddress]] = []
        core = self._core
        while core is not None:
            try:
                transmit = core.poll_transmit(now)
            except RuntimeError:
                break  # a packet would have had too much to acknowledge; the next one has less
            if transmit is None:
                break
            datagrams.append((transmit[0], transmit[1]))
        return datagrams

    def receive_many(self, buffer: bytes, segment: int, addr: NetworkAddress, now: float) -> None:
        if self._core is None or not self._handshake_complete:
            self.receive_gro_buffer(buffer, segment, addr, now)
            return
        # The same without a look at each datagram.
        self._call_core(self._core.receive_gro_buffer, buffer, segment, self._normalize_address(addr), now)
        self._drain_core()

    def unsent(self, stream_id: int) -> int:
        return self.get_send_buffer_size(stream_id)

    def settled(self) -> bool:
        if self._core is None:
            return True
        return self._core.bytes_in_flight == 0 and self.get_send_buffer_size() == 0

    def peer_names(self) -> list[str]:
        return []

    @property
    def peer_address(self) -> NetworkAddress | None:
        return None if self._core is None else self._core.active_path[REMOTE]

    @property
    def round_trip(self) -> float:
        return 0.0 if self._core is None else self._core.smoothed_rtt or 0.0


class Qh3Engine:
    name = "qh3"
    events = events

    def _configuration(self, settings: Settings, is_client: bool) -> QuicConfiguration:
        return QuicConfiguration(
            is_client=is_client,
            connection_id_length=CONNECTION_ID_BYTES,
            idle_timeout=settings.idle_timeout,
            max_data=settings.connection_window,
            max_stream_data=settings.stream_window,
            max_datagram_size=settings.max_datagram_bytes,
            probe_datagram_size=settings.probe_datagram_size,
        )

    def server(
        self, settings: Settings, identity: Identity, client_authorities: Path | None
    ) -> Callable[[bytes, bytes | None], EngineConnection]:
        if client_authorities is not None:
            raise EngineUnavailable("qh3 cannot ask clients for certificates")
        configuration = self._configuration(settings, False)
        configuration.load_cert_chain(identity.certificate, identity.key)

        def accept(first: bytes, retry: bytes | None) -> EngineConnection:
            return Connection(
                configuration=configuration,
                original_destination_connection_id=first,
                retry_source_connection_id=retry,
            )

        return accept

    def client(self, settings: Settings, trust: Trust) -> EngineConnection:
        configuration = self._configuration(settings, True)
        configuration.server_name = trust.server_name
        configuration.alpn_protocols = trust.alpn
        configuration.verify_mode = ssl.CERT_REQUIRED if trust.verify else ssl.CERT_NONE
        if trust.authorities is not None:
            configuration.load_verify_locations(cafile=str(trust.authorities))
            # It takes nobody for an authority that is none, so a server's own certificate is recognized by itself.
            pinned = pinned_fingerprint(trust.authorities, trust.server_name or "")
            if pinned is not None and trust.verify:
                configuration.verify_mode = ssl.CERT_NONE
                configuration.assert_fingerprint = pinned
        if trust.identity is not None:
            configuration.load_cert_chain(trust.identity.certificate, trust.identity.key)
        return Connection(configuration=configuration)

    def header(self, data: bytes) -> Header | None:
        try:
            found = pull_quic_header(data, 0, CONNECTION_ID_BYTES)
        except ValueError:
            return None
        version, kind, _, destination, source, token = found[:6]
        return Header(
            version,
            kind == int(QuicPacketType.INITIAL),
            kind == int(QuicPacketType.VERSION_NEGOTIATION),
            destination,
            source,
            token,
        )

    def supports(self, version: int) -> bool:
        return version in VERSIONS

    def version_negotiation(self, header: Header) -> bytes:
        return encode_quic_version_negotiation(
            source_cid=header.destination, destination_cid=header.source, supported_versions=VERSIONS
        )

    def retry(self, header: Header, source: bytes, token: bytes) -> bytes:
        assert header.version is not None
        return encode_quic_retry(
            version=header.version,
            source_cid=source,
            destination_cid=header.source,
            original_destination_cid=header.destination,
            retry_token=token,
        )


VERSIONS = QuicConfiguration().supported_versions
ENGINE = Qh3Engine()
