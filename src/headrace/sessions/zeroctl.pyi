"""The zeroctl session on our own carrier: one node's state machine on the bus. It owns no socket, no clock and no
task."""

from collections.abc import Callable, Iterable
from typing import Protocol

from headrace.bus import Bus
from headrace.mapping import Map
from headrace.session import Session
from headrace.sessions.rights import Keyring

class Registry(Protocol):
    """Who knows which nodes are persistent."""

    def knows(self, uuid: str) -> bool: ...

class Zeroctl:
    """What all zeroctl sessions of a gateway share. What is public may be set while sessions are open."""

    anonymous: str
    handshake_timeout_us: int
    block_timeout_us: int
    keepalive_us: int
    max_bindings: int
    hash_inline: int
    hash_later: Callable[[bytes, Callable[[bytes], None]], object] | None
    """Called with a body and who is to be told its sha256, in the loop's thread; None: the session does it itself."""
    registry: Registry | None
    map: Map | None
    verifier: Callable[[bytes, bytes], str] | None
    """Called with header and body of what needs a signature: why it is none, or an empty text."""

    def __init__(
        self,
        bus: Bus,
        keys: Keyring,
        *,
        node_name: str,
        node_uuid: str,
        max_header: int = 65536,
        max_body: int = 4194304,
        anonymous: str = "",
        handshake_timeout: float = 0,
        block_timeout: float = 5,
        keepalive: float = 0,
        max_bindings: int = 10_000,
        signing: Iterable[str] = (),
        hash_inline: int = 262144,
    ) -> None:
        """`node_name` and `node_uuid` are the gateway's own; `anonymous` is the name of the key whose rights a peer
        without one has; `signing` are filters of the keys whose messages need a signature."""

    @property
    def bus(self) -> Bus: ...
    @property
    def keys(self) -> Keyring: ...
    @property
    def max_header(self) -> int: ...
    @property
    def max_body(self) -> int: ...
    @property
    def max_length(self) -> int:
        """The largest length field."""

    @property
    def node_name(self) -> str: ...
    @property
    def node_uuid(self) -> str: ...
    def set_signing(self, filters: Iterable[str]) -> None:
        """Other topics from now on that need a signature."""

    def set_served(self, filters: Iterable[str]) -> None:
        """Other topics from now on whose messages are requests to the gateway's own services."""

    def session(self) -> ZeroctlSession:
        """A session for one new connection."""

    def counters(self) -> dict[str, int]:
        """All that was counted since the start, by name."""

class ZeroctlSession(Session):
    """One peer."""

    def __init__(self, shared: Zeroctl) -> None: ...
    @property
    def opened(self) -> str | None:
        """The name of the key that this peer has the rights of, or None."""
