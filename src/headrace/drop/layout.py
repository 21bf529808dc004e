"""Names in a drop directory: `date=2026-01-31/hour=07/<node>-<log id>-<first>-<last>.parquet`.

A name says which offsets of which log a file covers. No two files of one directory cover the same offset, and a file
is never rewritten, so names alone prove what is there. A compacted file has the same kind of name in a directory of
its own and covers the ranges of all the files that it was made from. Knows nothing of filesystems or Parquet.

An hour's directory that is empty may be removed at any time. So who moves a file into one makes the directory, moves
the file, and begins again if the directory has gone in between.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self

STAGING: Final = "_staging"  # files that are being written; Spark ignores what begins with an underscore
COMPACTED_SUFFIX: Final = (
    "-compacted"  # behind the drop directory's name: where compacted files go by default
)

OFFSET_DIGITS: Final = 20  # of the largest offset, so that names sort as offsets do

_NAME: Final = re.compile(
    r"(?P<node>[A-Za-z0-9][A-Za-z0-9._-]*)-(?P<log>[0-9a-f]{32})-(?P<first>\d{20})-(?P<last>\d{20})\.parquet"
)
_HOUR: Final = re.compile(r"date=(?P<date>\d{4}-\d\d-\d\d)/hour=(?P<hour>\d\d)")

MICROSECONDS_PER_HOUR: Final = 3_600_000_000


@dataclass(frozen=True, order=True, slots=True)
class FileName:
    """What a file covers: the offsets from `first` to `last`, both included, of the log `log` at `node`. Some of them
    may have no row: a filter left them out, or damage took them."""

    node: str
    log: str  # the log's id, 32 hexadecimal digits
    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise ValueError(f"offsets {self.first} to {self.last} are no range")

    def __str__(self) -> str:
        return f"{self.node}-{self.log}-{self.first:0{OFFSET_DIGITS}d}-{self.last:0{OFFSET_DIGITS}d}.parquet"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """What a file's name (without directories) says; nothing for other files."""
        match = _NAME.fullmatch(name)
        if match is None or int(match["first"]) > int(match["last"]):
            return None
        return cls(match["node"], match["log"], int(match["first"]), int(match["last"]))

    @property
    def stream(self) -> tuple[str, str]:
        """Whose offsets these are: node and log."""
        return (self.node, self.log)

    def covers(self, other: "FileName") -> bool:
        """Whether every offset of `other` is in this range too."""
        return self.stream == other.stream and self.first <= other.first and other.last <= self.last


def hour_directory(time_us: int) -> str:
    """The directory of a row, by its `ts` in microseconds since the epoch (UTC)."""
    return datetime.fromtimestamp(time_us // 1_000_000, UTC).strftime("date=%Y-%m-%d/hour=%H")


def parse_path(path: str) -> tuple[str, FileName] | None:
    """A path or URI that ends in `date=…/hour=…/<name>`, taken apart into that directory and the name; nothing for
    others, and for what lies below a name that begins with an underscore."""
    parts = path.rstrip("/").split("/")
    if len(parts) < 3 or any(part.startswith("_") for part in parts[-3:]):
        return None
    directory = "/".join(parts[-3:-1])
    name = FileName.parse(parts[-1])
    if name is None or _HOUR.fullmatch(directory) is None:
        return None
    return directory, name
