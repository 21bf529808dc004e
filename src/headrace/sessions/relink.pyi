"""The Relink session: the listener's side of one connection, and of the links that outlive connections."""

from collections.abc import Iterable

from headrace.bus import Bus
from headrace.session import Session
from headrace.sessions.rights import Keyring

class Endpoint:
    """A service that connectors ask for by name: the sizes of its channels' ids, its transactions, and its topics.

    In the rules `publish` and `deliver`, "{channel}" stands for the number of a channel, as a word of the topic. A
    `publish` without it is one topic for all channels; a `deliver` without it is a filter, all of which goes to
    channel 0. `key` names the key whose rights apply; without, the rules are all it may do.
    """

    def __init__(
        self,
        name: str,
        *,
        connector_size: int = 4,
        listener_size: int = 4,
        connector_transactions: bool = False,
        listener_transactions: bool = False,
        publish: str = "",
        deliver: str = "",
        key: str = "",
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def connector_size(self) -> int: ...
    @property
    def listener_size(self) -> int: ...
    @property
    def flags(self) -> int: ...
    @property
    def publish(self) -> str: ...
    @property
    def deliver(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def filter(self) -> bytes: ...

class Link:
    """What two peers know of each other's messages, from one connection to the next."""

    @property
    def id(self) -> int: ...
    @property
    def endpoint(self) -> Endpoint: ...

class Relink:
    """What all Relink sessions of a gateway share: endpoints, the epoch and the links."""

    handshake_timeout_us: int
    block_timeout_us: int
    ping_interval_us: int
    ping_timeout_us: int
    grace_us: int
    window: int
    max_outstanding: int
    max_channels: int
    max_links: int
    max_uncommitted: int

    def __init__(
        self,
        bus: Bus,
        keys: Keyring,
        endpoints: Iterable[Endpoint],
        *,
        max_targets: int = 1024,
        max_parts: int = 65536,
        max_message: int = 16777216,
        handshake_timeout: float = 0,
        block_timeout: float = 5,
        ping_interval: float = 0,
        ping_timeout: float = 30,
        grace: float = 3600,
        window: int = 1024,
        max_outstanding: int = 65536,
        max_channels: int = 1024,
        max_links: int = 10_000,
        max_uncommitted: int = 67108864,
        now: int | None = None,
    ) -> None: ...
    @property
    def bus(self) -> Bus: ...
    @property
    def keys(self) -> Keyring: ...
    @property
    def epoch(self) -> int: ...
    @property
    def max_packet(self) -> int:
        """Bytes of the largest packet."""

    def renew_keys(self) -> None:
        """Looks the endpoints' keys up again, after they were replaced."""

    def session(self) -> RelinkSession:
        """A session for one new connection."""

    def link(self, id: int) -> Link | None:
        """A link by its id, or None."""

    def counters(self) -> dict[str, int]:
        """All that was counted since the start, by name."""

    def gauges(self) -> dict[str, int]:
        """What there is now, by name."""

class RelinkSession(Session):
    """One peer."""

    def __init__(self, shared: Relink) -> None: ...
    @property
    def link(self) -> Link | None: ...
