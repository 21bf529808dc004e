"""Which drops there are and what goes into each, taken from the configuration. Opens nothing."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from headrace.config import Config

MAIN: Final = "default"  # the name of the drop that [drop] describes
LOG_SHARE: Final = 8  # of what the log may keep, a file has at most this part
ROW_BYTES: Final = 64  # what a small message takes in the log


class _Described(Protocol):
    """What [drop] and each of [[drops]] say of a drop."""

    @property
    def uri(self) -> str: ...
    @property
    def topics(self) -> list[str]: ...
    @property
    def leave_out(self) -> list[str]: ...
    @property
    def payload_json(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class DropPlan:
    """One drop."""

    name: str
    uri: str  # a URI, or the path of a directory
    topics: tuple[str, ...] = ("#",)
    leave_out: tuple[str, ...] = ()
    payload_json: bool = False
    roll_rows: int = 1_000_000
    roll_bytes: int = 128 << 20
    roll_seconds: float = 60.0
    compression: str = "zstd"

    @property
    def filtered(self) -> bool:
        """Whether there are messages that do not go here."""
        return "#" not in self.topics

    @property
    def cursor(self) -> str:
        """The saved cursor below which everything is in files or has none."""
        return f"sink:{self.name}"

    @property
    def file_cursor(self) -> str:
        """The saved cursor of one past the last offset of the last file."""
        return f"sink:{self.name}:file"


def plans(config: Config, data: Path) -> list[DropPlan]:
    """The drops of a configuration, the main one first; none where it has them switched off."""
    drop = config.drop
    if not drop.enabled:
        return []
    # A file that is not finished holds back retention: it must not fill a small log before it is due.
    room = config.log.retention_bytes // LOG_SHARE
    described: Iterable[tuple[str, _Described, Path]] = [
        (MAIN, drop, data / "drop"),
        *((further.name, further, data / f"drop-{further.name}") for further in config.drops),
    ]
    return [
        DropPlan(
            name=name,
            uri=one.uri or str(directory.absolute()),
            topics=tuple(one.topics),
            leave_out=tuple(one.leave_out),
            payload_json=one.payload_json,
            roll_rows=min(drop.roll_rows, room // ROW_BYTES),
            roll_bytes=min(drop.roll_bytes, room),
            roll_seconds=drop.roll_seconds,
            compression=drop.compression,
        )
        for name, one, directory in described
    ]
