"""Carries bytes between an event loop's transports and sessions: one shared read buffer, bounded output, closing
without loss. It knows nothing of protocols, logs or configuration.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from headrace.session import Session

class Observer(Protocol):
    """Who is told of what happens to connections against their will."""

    def refused(self, connection: Connection) -> None: ...
    def stalled(self, connection: Connection) -> None: ...
    def idled(self, connection: Connection) -> None: ...
    def failed(self, connection: Connection, error: Exception) -> None: ...

class Service:
    """What one protocol offers on all of its listeners: how sessions are made, their limits, what was counted."""

    factory: Callable[[], Session] | None  # None: whatever carries the protocol makes its sessions
    max_frame: int
    high_water: int
    max_connections: int
    stall_timeout: float
    idle_timeout: float
    quickack: bool

    def __init__(
        self,
        protocol: str,
        factory: Callable[[], Session] | None,
        *,
        max_frame: int,
        high_water: int,
        max_connections: int,
        stall_timeout: float,
        idle_timeout: float = 0.0,
        quickack: bool = False,
    ) -> None: ...
    @property
    def protocol(self) -> str: ...
    @property
    def connections(self) -> int: ...
    def counters(self) -> dict[str, int]: ...

class ReadBuffer:
    """The memory that a read lands in, for all connections of a loop."""

    def __init__(self, size: int) -> None: ...
    @property
    def size(self) -> int: ...

class Switchboard:
    """All connections of one loop, and what they share."""

    max_connections: int
    """Of all services together; unlimited until it is set."""
    def __init__(
        self, loop: asyncio.AbstractEventLoop, observer: Observer, *, read_bytes: int, tick_seconds: float
    ) -> None: ...
    @property
    def draining(self) -> bool: ...
    def __len__(self) -> int: ...
    def answer(self, service: Service) -> StreamConnection: ...
    def safe_moved(self) -> None: ...
    def space_made(self) -> None: ...
    def drain(self) -> None: ...
    async def wait_empty(self) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...

class Connection:
    """One peer's stream between an event loop and a session."""

    def __init__(self, board: Switchboard, service: Service) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def peer(self) -> str: ...
    @property
    def protocol(self) -> str: ...
    def wake(self) -> None: ...
    def unblock(self) -> None: ...

class StreamConnection(Connection, asyncio.BufferedProtocol):
    """A connection that both loops know for a buffered protocol."""
