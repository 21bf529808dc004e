"""The log: a segmented, append-only, memory-mapped file of records with checksums."""

import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from typing_extensions import Buffer

VERSION: int
CONTROL_NAMES: dict[int, str]

class SegmentInfo(NamedTuple):
    """One segment: how far its records reach (`bytes`) and how far a sync mark covers them (`marked`)."""

    number: int
    path: str
    first_offset: int
    end_offset: int
    bytes: int
    sealed: bool
    marked: int

class Damage(NamedTuple):
    """A place that does not hold: segment number, position, the offset expected there, offsets lost, and why."""

    segment: int
    position: int
    offset: int
    lost: int
    reason: str

class Recovery(NamedTuple):
    """What opening found: how much was read, the torn tail that was cut (0 bytes: none), and the damage."""

    segments: int
    records: int
    seconds: float
    cut_segment: int
    cut_position: int
    cut_bytes: int
    cut_records: int
    damage: tuple[Damage, ...]

class Record(NamedTuple):
    """One record; `control` ones have no offset of their own."""

    offset: int
    time: int
    topic: int
    topic_name: bytes
    protocol: int
    kind: int
    flags: int
    origin: int
    origin_name: bytes
    correlation: int
    headers: bytes
    parts: tuple[int, ...]
    payload: bytes
    control: bool
    segment: int
    position: int

class Verified(NamedTuple):
    """What verify() read, and its problems."""

    segments: int
    records: int
    messages: int
    first_offset: int
    end_offset: int
    problems: list[Damage]

def crc32c(data: Buffer, state: int = 0xFFFFFFFF, portable: bool = False) -> int:
    """CRC-32C register over `data`; `portable` uses the implementation for CPUs without an instruction for it."""

def parse_sync(text: str) -> tuple[Literal["always", "every", "interval", "none"], int]:
    """A sync policy, taken apart: ("always", 0), ("every", N), ("interval", milliseconds), ("none", 0)."""

def segment_name(number: int) -> str: ...
def list_segments(path: str | os.PathLike[str]) -> list[int]:
    """Segment numbers in a log directory, ascending."""

def read_identity(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The LOG file of a log directory: {"version", "id", "made"}; raises where this is not one, or a newer one."""

def verify(path: str | os.PathLike[str]) -> Verified:
    """Checks every byte of a log directory without changing it, also while it is written; all problems that it has."""

def survey(path: str | os.PathLike[str]) -> list[SegmentInfo]:
    """The segments of a log directory, also while it is written; one that is prepared ends where records begin."""

def saved_cursors(path: str | os.PathLike[str]) -> dict[str, int]:
    """The saved cursors of a log directory, name -> offset, also while it is written."""

class Keeper:
    """Who keeps state that lives in segments: compiled code derives from it."""

class Log:
    """The writer's side of a log directory. One thread appends; two others sync and prepare segments."""

    keeper: Keeper
    retention_seconds: float
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        sync: str = "always",
        segment_bytes: int = 67108864,
        pool_segments: int = 3,
        retention_bytes: int = 4294967296,
        retention_seconds: float = 0,
        on_full: str = "block",
        large_sync: int = 16777216,
    ) -> None:
        """Where a usual sync covers `large_sync` bytes, recycled segments are remade in large pieces of memory."""

    @property
    def id(self) -> bytes: ...
    @property
    def id_text(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def sync(self) -> str: ...
    @property
    def recovery(self) -> Recovery: ...
    @property
    def max_record(self) -> int: ...
    @property
    def drop_oldest(self) -> bool: ...
    @property
    def appended(self) -> int:
        """The next message's offset: everything below is appended."""

    @property
    def safe(self) -> int:
        """Everything below this offset is safe by the sync policy."""

    @property
    def synced(self) -> int:
        """Everything below this offset was covered by a sync, whatever the policy."""

    @property
    def first(self) -> int:
        """The oldest offset that is kept."""

    @property
    def event_fd(self) -> int: ...
    @property
    def failed(self) -> str | None:
        """Why nothing is confirmed any more, or None."""

    @property
    def full(self) -> str | None:
        """Why messages cannot be taken now, or None. A segment that is just being prepared is no reason."""

    @property
    def cursors(self) -> dict[str, int]:
        """Saved cursors: name -> offset."""

    def topic(self, name: str | bytes) -> int:
        """The id of a topic, made if it is new."""

    def topic_name(self, id: int) -> bytes: ...
    def append(
        self,
        topic: int,
        payload: Buffer,
        *,
        headers: Buffer = b"",
        parts: Sequence[int] = (),
        protocol: int = 0,
        kind: int = 0,
        flags: int = 0,
        correlation: int = 0,
        now: int | None = None,
    ) -> int:
        """Appends one message and makes it readable; its offset."""

    def append_many(self, topic: int, payloads: Buffer, size: int, *, now: int | None = None) -> int:
        """Appends `payloads`, cut into messages of `size` bytes, in one call; how many were taken before the log was
        full."""

    def request_sync(self) -> None:
        """Asks for a sync and returns at once."""

    def sync_now(self) -> None:
        """Returns when everything appended so far was covered by a sync, whatever the policy."""

    def save_cursor(self, name: str, offset: int) -> None:
        """Keeps a cursor in the log; the newest one of a name is found again when the log is opened."""

    def hold(self, name: str, offset: int) -> None:
        """Holds back retention: segments with messages at or after `offset` stay (on_full "block")."""

    def release(self, name: str) -> None: ...
    def set_retention(self, retention_bytes: int, retention_seconds: float) -> None: ...
    def on_event(self, now: int | None = None) -> int:
        """To be called when event_fd is readable: which of SAFE=1, SPACE=2, FAILED=4 happened since the last call."""

    def tick(self, now: int | None = None) -> int:
        """Retires what has become too old; to be called now and then."""

    def segments(self) -> list[SegmentInfo]: ...
    def stats(self) -> dict[str, Any]:
        """Counters since the log was opened, and where it stands."""

    def reader(self, offset: int = 0) -> LogReader:
        """A cursor over this log from `offset`; it sees what is readable, and goes on when there is more."""

    def close(self, *, sync: bool = True) -> None:
        """Syncs (unless told not to), stops the threads, and lets go of the directory."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...

class LogReader:
    """A cursor over a log directory, in any thread or process, also while it is written; one thread at a time uses it.
    With `sync` it needs to be allowed to write the segments' files."""

    check: bool
    def __init__(
        self, path: str | os.PathLike[str], offset: int = 0, *, check: bool = True, sync: bool = False
    ) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def id(self) -> bytes: ...
    @property
    def overtaken(self) -> int:
        """Offsets that were retired before this reader came to them."""

    @property
    def lost(self) -> int:
        """Offsets that were lost to damage on the way."""

    @property
    def offset(self) -> int:
        """Of the next message."""

    def read(self, *, controls: bool = False) -> Record | None:
        """The next record, or None where there is none yet. Control records only if asked for."""

    def resume(self) -> Damage | None:
        """After LogDamaged: goes on behind the place that does not hold."""

    def sync(self) -> None:
        """Returns when everything that this cursor has passed is on disk, so that opening the log after a power cut
        finds it; OSError where that failed, now or earlier: what the system could not write it does not try again."""

    def __iter__(self) -> Iterator[Record]: ...
    def __next__(self) -> Record: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...
    def close(self) -> None:
        """Lets go of the log, without a sync."""
