"""The Felix sessions: one for each stream of a QUIC connection. They own no socket, no clock and no task."""

from collections.abc import Callable, Iterable

from headrace.bus import Bus
from headrace.mapping import Map
from headrace.session import Session
from headrace.sessions.rights import Rights

Address = tuple[str, str, str]

class Cache:
    """Values by scope and key, bounded in number and bytes."""

    max_entries: int
    max_bytes: int

    @property
    def bytes(self) -> int: ...
    def __len__(self) -> int: ...

class Felix:
    """What all Felix streams of a gateway share. Options may be set while streams are open."""

    max_length: int
    block_timeout_us: int
    max_subscriptions: int
    map: Map | None
    mild: bool
    reference: bool
    batch_events: int
    batch_bytes: int
    batch_delay_us: int

    def __init__(
        self,
        bus: Bus,
        *,
        max_length: int = 16777216,
        block_timeout: float = 5,
        max_subscriptions: int = 1024,
        cache_entries: int = 100_000,
        cache_bytes: int = 67108864,
    ) -> None: ...
    @property
    def bus(self) -> Bus: ...
    @property
    def cache(self) -> Cache: ...
    @property
    def registry_changes(self) -> int: ...
    def register(self, strict: bool, streams: Iterable[Address], caches: Iterable[Address]) -> None:
        """Which streams and caches there are. Unless it is strict, others are made when they are first used."""

    def peer(
        self, address: str, rights: Rights | None, opener: Callable[[FelixEvents], object] | None
    ) -> FelixPeer:
        """A new connection. `opener` is called with the session of each event stream that it gets."""

    def counters(self) -> dict[str, int]:
        """All that was counted since the start, by name."""

    def gauges(self) -> dict[str, int]:
        """What is held now, by name."""

class FelixPeer:
    """One connection: who it is, what it may do, and what its streams have in common."""

    @property
    def shared(self) -> Felix: ...
    @property
    def address(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    def set_rights(self, rights: Rights | None, address: str) -> None: ...
    def stream(self, one_way: bool = False) -> FelixStream:
        """A session for a stream that the client opened; `one_way` if it cannot be answered."""

class FelixStream(Session):
    """A stream that the client opened."""

    violation: str | None

    @property
    def peer(self) -> FelixPeer: ...
    @property
    def one_way(self) -> bool: ...

class FelixEvents(Session):
    """A stream that the gateway opens: one subscription."""

    @property
    def peer(self) -> FelixPeer: ...
    @property
    def id(self) -> int | str: ...
    @property
    def topic(self) -> str: ...
