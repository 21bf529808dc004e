"""How far a sink is, in a small file beside the log: `<data>/sink/<drop>.json`. It is replaced as a whole and synced.

The gateway copies it into the log as saved cursors. A sink that is started again takes the farthest of what the drop's
names, the log and this file say. Its `intent` closes the one gap that is left: a file that was renamed into place,
taken away by a reader, and not yet noted anywhere when the sink was killed.
"""

import os
from pathlib import Path
from typing import Final

import msgspec

from headrace.drop.filesystems import sync

DIRECTORY: Final = "sink"  # below the data directory


class Intent(msgspec.Struct, frozen=True):
    """A finished file that is about to be put into its place."""

    last: int  # its last offset
    staged: str  # where it is before
    path: str  # where it will be, below the drop


class Progress(msgspec.Struct, frozen=True):
    """Of one log: everything below `covered` is in files or not for this drop; the last file ended at `file_end`."""

    log: str
    covered: int = 0
    file_end: int = 0
    intent: Intent | None = None


def progress_path(data: Path, drop: str) -> Path:
    return data / DIRECTORY / f"{drop}.json"


def read_progress(path: Path, log_id: str) -> Progress:
    """What a sink has left; nothing of another log, and nothing where the file cannot be read: then names and the log's
    cursors have to do."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Progress)
    except (OSError, msgspec.DecodeError):
        return Progress(log_id)
    return found if found.log == log_id else Progress(log_id)


def write_progress(path: Path, progress: Progress) -> None:
    """Replaces the file; returns when the new one is on disk."""
    fresh = path.with_suffix(".new")
    with open(fresh, "wb") as out:
        out.write(msgspec.json.encode(progress))
        out.flush()
        os.fsync(out.fileno())
    os.replace(fresh, path)
    sync(path.parent)
