"""One stream of a connection that has many, between whoever runs the transport and a session."""

from collections.abc import Callable
from typing import Protocol

from headrace.connection import Service
from headrace.session import Session

class Owner(Protocol):
    """The connection that a stream belongs to."""

    def schedule(self, stream: Substream) -> None:
        """Has its turn() called soon."""

    def schedule_later(self, stream: Substream, seconds: float) -> None:
        """Has it woken after a while."""

    def wait_safe(self, stream: Substream) -> None: ...
    def wait_space(self, stream: Substream) -> None: ...
    def wait_room(self, stream: Substream) -> None: ...
    def over(self, stream: Substream) -> None:
        """It has nothing more to say or to hear."""

    def failed(self, stream: Substream, error: Exception) -> None: ...

def count(service: Service, what: str, n: int = 1) -> None:
    """Counts for a service what its connections' owner sees."""

def same_connection(data: bytes, size: int, id_size: int) -> bool:
    """Whether datagrams of `size` bytes each all have a short QUIC header and the same connection id."""

class Substream:
    def __init__(
        self,
        session: Session,
        service: Service,
        owner: Owner,
        send: Callable[[int, bytes, bool], None],
        unsent: Callable[[int], int],
        number: int,
        *,
        readable: bool,
        writable: bool,
        name: str,
        peer: str,
    ) -> None: ...

    scheduled: bool
    watched: int
    watched_at: float

    @property
    def session(self) -> Session | None: ...
    @property
    def owner(self) -> Owner: ...
    @property
    def number(self) -> int: ...
    @property
    def readable(self) -> bool: ...
    @property
    def writable(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def peer(self) -> str: ...
    @property
    def kept_size(self) -> int: ...
    @property
    def fin(self) -> bool: ...
    @property
    def stuck(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    def wake(self) -> None: ...
    def wake_later(self, delay_us: int) -> None: ...
    def unblock(self) -> None: ...
    def receive(self, data: bytes, fin: bool) -> None:
        """Takes what came for this stream; the session sees it in the next turn."""

    def turn(self, now: int) -> None:
        """Has the session take and give what it can now."""

    def sent(self) -> None:
        """The transport has sent some of what it held."""

    def safe_moved(self) -> None: ...
    def sweep(self, now: int) -> None: ...
    def drain(self, now: int) -> None: ...
    def lost(self, now: int) -> None: ...
