"""What the web side may know of a running gateway. Whoever puts a gateway together hands this over; it is
made anew for each question and changes nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class ListenerFigures:
    """One protocol's listeners and connections."""

    protocol: str
    addresses: list[str]
    tls: bool
    connections: int
    max_connections: int
    counters: Mapping[str, int]  # of connections
    events: Mapping[str, int]  # of sessions
    gauges: Mapping[str, int] = field(default_factory=dict)  # what sessions hold now


@dataclass(frozen=True)
class LogFigures:
    """The log, once it is open."""

    id: str
    path: str
    sync: str
    stats: Mapping[str, Any]
    full: str | None
    failed: str | None
    recovery: Mapping[str, Any]


@dataclass(frozen=True)
class SinkFigures:
    """One drop and how far the sink is that writes it."""

    drop: str
    uri: str
    run: bool  # False: a process of its own writes it, and only `covered` is known here
    covered: int  # everything below this offset is in the drop, or is not for it
    lag_offsets: int
    lag_seconds: float  # age of the oldest message that is not in the drop yet; 0 if there is none
    stats: Mapping[str, Any]  # empty if a process of its own writes it


@dataclass(frozen=True)
class CarrierFigures:
    """One broker that the gateway is a client of."""

    name: str
    kind: str
    connected: bool
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Figures:
    """A gateway at one moment."""

    version: str
    node: str
    loop: str
    started: float  # Unix time
    uptime: float  # seconds
    listeners: list[ListenerFigures] = field(default_factory=list)
    log: LogFigures | None = None  # None: not open yet
    bus: Mapping[str, Any] | None = None
    sinks: list[SinkFigures] = field(default_factory=list)


class Statistics(Protocol):
    """A running gateway, to be looked at."""

    def figures(self) -> Figures: ...

    def segments(self) -> list[Mapping[str, Any]]:
        """The log's segments, oldest first."""

    def nodes(self) -> list[dict[str, Any]]:
        """zeroctl's nodes that were heard, by name."""

    def carriers(self) -> list[CarrierFigures]:
        """The brokers that the gateway is a client of, and what was carried."""

    def not_ready(self) -> list[str]:
        """Why the gateway should get no traffic now; empty if it should."""

    def warnings(self) -> list[str]:
        """What an operator should look at although the gateway takes traffic."""
