"""What an engine of QUIC does for a listener or a client: packets in, events and packets out, time as an argument.
The engines themselves are imported only when they are chosen."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from headrace.errors import HeadraceError

ENGINES: Final = ("aioquic", "qh3")

# As sockets have it: host and port, and two numbers more for IPv6.
NetworkAddress: TypeAlias = Any

SMALLEST_INITIAL: Final = 1200
CONNECTION_ID_BYTES: Final = 8


class EngineUnavailable(HeadraceError):
    """The engine that was chosen is not installed."""


@dataclass(frozen=True)
class Settings:
    """What both sides of a connection can choose."""

    idle_timeout: float = 30.0
    max_datagram_bytes: int = 1350
    probe_datagram_size: bool = True
    connection_window: int = 16 << 20
    stream_window: int = 8 << 20
    max_streams: int = 1024


@dataclass(frozen=True)
class Identity:
    """Who one is: a certificate chain and its key, as PEM files."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Trust:
    """Whose certificates are good. Without a file those of the system are; `verify` off takes anybody's."""

    authorities: Path | None = None
    verify: bool = True
    server_name: str | None = None
    identity: Identity | None = None
    alpn: list[str] | None = field(default=None)


class Header(NamedTuple):
    """The part of a packet that is not encrypted; `version` is None for a short header."""

    version: int | None
    initial: bool
    negotiation: bool
    destination: bytes
    source: bytes
    token: bytes


class EngineConnection(Protocol):
    """One connection."""

    host_cid: bytes

    def connect(self, addr: NetworkAddress, now: float) -> None: ...
    def receive_datagram(self, data: bytes, addr: NetworkAddress, now: float) -> None: ...
    def receive_many(self, buffer: bytes, segment: int, addr: NetworkAddress, now: float) -> None:
        """Datagrams that came together: each has `segment` bytes, the last one perhaps fewer."""

    def datagrams_to_send(self, now: float) -> list[tuple[bytes, NetworkAddress]]: ...
    def next_event(self) -> Any: ...
    def get_timer(self) -> float | None: ...
    def handle_timer(self, now: float) -> None: ...
    def send_stream_data(self, stream_id: int, data: bytes, end_stream: bool = False) -> None: ...
    def reset_stream(self, stream_id: int, error_code: int) -> None: ...
    def stop_stream(self, stream_id: int, error_code: int) -> None: ...
    def send_ping(self, uid: int) -> None: ...
    def get_next_available_stream_id(self, is_unidirectional: bool = False) -> int: ...
    def close(self, error_code: int = 0, frame_type: int | None = None, reason_phrase: str = "") -> None: ...
    def unsent(self, stream_id: int) -> int:
        """Bytes of a stream that were never sent."""

    def settled(self) -> bool:
        """Whether nothing waits to be sent or acknowledged."""

    def peer_names(self) -> list[str]:
        """The names in the certificate that the peer showed."""

    @property
    def peer_address(self) -> NetworkAddress | None:
        """Where the peer is, as far as packets of its own have shown; anybody can send others from anywhere."""

    @property
    def round_trip(self) -> float:
        """Seconds to the peer and back, as far as it is known."""


class Engine(Protocol):
    """One implementation."""

    name: str
    events: Any  # the module with the classes of its events

    def server(
        self, settings: Settings, identity: Identity, client_authorities: Path | None
    ) -> Callable[[bytes, bytes | None], EngineConnection]:
        """Reads the files, and returns what makes a connection for a client: of the connection id that it first sent
        to, and the one of the retry that it was asked for."""

    def client(self, settings: Settings, trust: Trust) -> EngineConnection: ...
    def header(self, data: bytes) -> Header | None:
        """What is readable of a packet; None if it is none."""

    def supports(self, version: int) -> bool: ...
    def version_negotiation(self, header: Header) -> bytes: ...
    def retry(self, header: Header, source: bytes, token: bytes) -> bytes:
        """The packet that has a client come back with a token, to another connection id."""


def load_engine(name: str) -> Engine:
    """An engine by its name."""
    if name not in ENGINES:
        raise ValueError(f"{name!r} is not one of the engines {', '.join(ENGINES)}")
    try:
        module = importlib.import_module(f"headrace.quic.{name}_engine")
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == name:
            raise EngineUnavailable(f"the QUIC engine {name} is not installed here") from None
        raise
    engine: Engine = module.ENGINE
    return engine
