"""The Overhop session: one peer's state machine on the bus. It owns no socket, no clock and no task."""

from headrace.bus import Bus
from headrace.session import Session
from headrace.sessions.queues import Queues
from headrace.sessions.rights import Keyring

class Overhop:
    """What all Overhop sessions of a gateway share. Times may be set while sessions are open."""

    key: str
    limit: int
    unhelloed_us: int
    unregistered_us: int
    ident_us: int
    block_timeout_us: int
    deliver: bool

    def __init__(
        self,
        queues: Queues,
        keys: Keyring,
        *,
        key: str = "",
        limit: int = 8388608,
        unhelloed: float = 10,
        unregistered: float = 10,
        ident: float = 2,
        block_timeout: float = 5,
        deliver: bool = True,
        now: int | None = None,
    ) -> None:
        """`key` names the key whose rights all peers have, and without one they may do all; `limit` bounds a payload.
        The next three are the seconds that a peer has for HELLO, for REGISTER until it is asked for it, and then for
        its answer; `block_timeout` those that a job waits for room in the log. Without `deliver` no job is pushed."""

    @property
    def bus(self) -> Bus: ...
    @property
    def queues(self) -> Queues: ...
    @property
    def workers(self) -> int: ...
    @property
    def anonymous(self) -> int: ...
    @property
    def started(self) -> int: ...
    @property
    def cadence_us(self) -> int:
        """How often the purge looks at a connection."""
    def session(self) -> OverhopSession:
        """A session for one new connection."""

    def counters(self) -> dict[str, int]:
        """All that was counted since the start, by name."""

class OverhopSession(Session):
    """One peer."""

    def __init__(self, shared: Overhop) -> None: ...
    @property
    def wid(self) -> str | None:
        """The worker's id, once it has registered."""
    @property
    def subscriptions(self) -> int:
        """How many queues this worker is subscribed to."""
