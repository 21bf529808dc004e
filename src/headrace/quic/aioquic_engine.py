"""The engine aioquic, which is always there. What it has no public way for is reached here, and nowhere else."""

import ssl
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

from aioquic import tls
from aioquic._buffer import Buffer
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import (
    QuicPacketType,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
    pull_quic_transport_parameters,
)
from aioquic.quic.recovery import QuicPacketPacer
from cryptography.hazmat.primitives.serialization import Encoding

from headrace.quic.certificates import names_of
from headrace.quic.engine import (
    CONNECTION_ID_BYTES,
    EngineConnection,
    Header,
    Identity,
    NetworkAddress,
    Settings,
    Trust,
)

# The first packets of a client leave before it knows what the server takes.
FIRST_DATAGRAM = 1200
# Twice the millisecond in which uvloop counts.
BURST_SECONDS = 0.002


class Pacer(QuicPacketPacer):
    """Spreads packets over time, in bursts that are as long as the loop's timers are apart: what waits for a timer
    waits at least that long, and with shorter bursts the timers would set the pace."""

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        super().update_rate(congestion_window, smoothed_rtt)
        self.bucket_max = max(self.bucket_max, BURST_SECONDS)


class Connection(QuicConnection):
    """A connection that answers the first ALPN offer of a client, and none if there is none; that can ask a client
    for its certificate; that sends no larger datagrams than its peer takes; and that lets a peer send a window beyond
    what has come without a gap, and no more. (aioquic doubles its windows as a peer fills them, and holds what is
    behind a gap as if all of it had come: a few bytes far ahead would take any amount of memory.)"""

    def __init__(self, *, settings: Settings, client_authorities: Path | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._loss._pacer = Pacer(max_datagram_size=self._max_datagram_size)
        self._wanted_datagram = settings.max_datagram_bytes
        self._connection_window = settings.connection_window
        self._stream_window = settings.stream_window
        self._client_authorities = client_authorities
        for limit in (self._local_max_streams_bidi, self._local_max_streams_uni):
            limit.value = limit.sent = settings.max_streams

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        if self._is_client:
            return
        plain_hello = self.tls._server_handle_hello
        plain_certificate = self.tls._server_handle_certificate

        def hello(context: Any, input_buf: Any, *rest: Any) -> None:
            begin = input_buf.tell()
            offered = tls.pull_client_hello(input_buf).alpn_protocols
            input_buf.seek(begin)
            context._alpn_protocols = offered[:1] if offered else None
            plain_hello(input_buf, *rest)

        def certificate(context: Any, input_buf: Any) -> None:
            plain_certificate(input_buf)
            if context._peer_certificate is None:
                raise tls.AlertHandshakeFailure("a client certificate is required")
            tls.verify_certificate(
                certificate=context._peer_certificate,
                chain=context._peer_certificate_chain,
                cafile=str(self._client_authorities),
            )

        setattr(self.tls, "_server_handle_hello", MethodType(hello, self.tls))  # noqa: B010
        if self._client_authorities is not None:
            self.tls._request_client_certificate = True
            setattr(self.tls, "_server_handle_certificate", MethodType(certificate, self.tls))  # noqa: B010

    def _parse_transport_parameters(self, data: bytes, from_session_ticket: bool = False) -> None:
        super()._parse_transport_parameters(data, from_session_ticket)
        most = pull_quic_transport_parameters(Buffer(data=data)).max_udp_payload_size
        self._max_datagram_size = min(self._wanted_datagram, most or 65527)

    def _write_connection_limits(self, builder: Any, space: Any) -> None:
        limit = self._local_max_data
        if 2 * (limit.value - limit.used) < self._connection_window:
            held = sum(
                stream.receiver.highest_offset - stream.receiver._buffer_start
                for stream in self._streams.values()
                if not stream.receiver.is_finished
            )
            limit.value = max(limit.value, limit.used - held + self._connection_window)
        # Of nothing used, it finds nothing to double, and tells the peer what is new.
        used, limit.used = limit.used, 0
        try:
            super()._write_connection_limits(builder, space)
        finally:
            limit.used = used

    def _write_stream_limits(self, builder: Any, space: Any, stream: Any) -> None:
        receiver = stream.receiver
        highest = receiver.highest_offset
        if (
            2 * (stream.max_stream_data_local - highest) < self._stream_window
            and stream.max_stream_data_local
        ):
            stream.max_stream_data_local = max(
                stream.max_stream_data_local, receiver._buffer_start + self._stream_window
            )
        receiver.highest_offset = 0
        try:
            super()._write_stream_limits(builder, space, stream)
        finally:
            receiver.highest_offset = highest

    def receive_many(self, buffer: bytes, segment: int, addr: NetworkAddress, now: float) -> None:
        for start in range(0, len(buffer), segment):
            self.receive_datagram(buffer[start : start + segment], addr, now)

    def unsent(self, stream_id: int) -> int:
        stream = self._streams.get(stream_id)
        return 0 if stream is None else stream.sender._buffer_stop - stream.sender.highest_offset

    def settled(self) -> bool:
        if self._loss.bytes_in_flight:
            return False
        return all(stream.sender.buffer_is_empty for stream in self._streams.values())

    def peer_names(self) -> list[str]:
        certificate = self.tls._peer_certificate
        return [] if certificate is None else names_of(certificate.public_bytes(Encoding.DER))

    @property
    def peer_address(self) -> NetworkAddress | None:
        return self._network_paths[0].addr if self._network_paths else None

    @property
    def round_trip(self) -> float:
        return float(self._loss._rtt_smoothed)


class AioquicEngine:
    name = "aioquic"
    events = events

    def _configuration(self, settings: Settings, is_client: bool) -> QuicConfiguration:
        return QuicConfiguration(
            is_client=is_client,
            congestion_control_algorithm="cubic",
            connection_id_length=CONNECTION_ID_BYTES,
            idle_timeout=settings.idle_timeout,
            max_data=settings.connection_window,
            max_stream_data=settings.stream_window,
            max_datagram_size=min(settings.max_datagram_bytes, FIRST_DATAGRAM),
        )

    def server(
        self, settings: Settings, identity: Identity, client_authorities: Path | None
    ) -> Callable[[bytes, bytes | None], EngineConnection]:
        configuration = self._configuration(settings, False)
        configuration.load_cert_chain(identity.certificate, identity.key)

        def accept(first: bytes, retry: bytes | None) -> EngineConnection:
            return Connection(
                settings=settings,
                client_authorities=client_authorities,
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
        if trust.identity is not None:
            configuration.load_cert_chain(trust.identity.certificate, trust.identity.key)
        return Connection(settings=settings, configuration=configuration)

    def header(self, data: bytes) -> Header | None:
        try:
            found = pull_quic_header(Buffer(data=data), host_cid_length=CONNECTION_ID_BYTES)
        except ValueError:
            return None
        return Header(
            found.version,
            found.packet_type == QuicPacketType.INITIAL,
            found.packet_type == QuicPacketType.VERSION_NEGOTIATION,
            found.destination_cid,
            found.source_cid,
            found.token,
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
ENGINE = AioquicEngine()
