"""The BlipMQ session: one peer's state machine on the bus. It owns no socket, no clock and no task."""

from headrace.bus import Bus
from headrace.mapping import Map
from headrace.session import Session
from headrace.sessions.rights import Keyring

class Blipmq:
    """What all BlipMQ sessions of a gateway share. Times may be set while sessions are open."""

    max_length: int
    handshake_timeout_us: int
    block_timeout_us: int
    max_subscriptions: int
    map: Map | None

    def __init__(
        self,
        bus: Bus,
        keys: Keyring,
        *,
        max_length: int = 16777216,
        handshake_timeout: float = 0,
        block_timeout: float = 5,
        max_subscriptions: int = 10_000,
    ) -> None:
        """`max_length` bounds a frame's length field, `handshake_timeout` (0: none) the seconds until AUTH,
        `block_timeout` those that a publish waits for room in the log, `max_subscriptions` those of a
        connection."""

    @property
    def bus(self) -> Bus: ...
    @property
    def keys(self) -> Keyring: ...
    def session(self) -> BlipmqSession:
        """A session for one new connection."""

    def counters(self) -> dict[str, int]:
        """All that was counted since the start, by name."""

class BlipmqSession(Session):
    """One peer."""

    def __init__(self, shared: Blipmq) -> None: ...
    @property
    def authenticated(self) -> str | None:
        """The name of the key that this peer gave, or None."""
