"""How a finished file gets into a drop, step by step, and what is there already of one log. On a local filesystem a
file is written in the drop's own staging directory and renamed; elsewhere it is written beside the log and uploaded."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.drop.errors import DropLocked
from headrace.drop.filesystems import LOCK_SUFFIX, LocalPlace, Place, place, sync
from headrace.drop.layout import STAGING, FileName, parse_path
from headrace.sink.errors import SinkLocked
from headrace.sink.points import reach


class Target:
    """The drop of one sink. Nothing is touched before open() is entered."""

    def __init__(self, uri: str, spool: Path, owner: tuple[str, str]) -> None:
        self.uri = uri
        self._spool = spool
        self._node, self._log = owner
        self._place: Place | None = None

    @property
    def place(self) -> Place:
        assert self._place is not None
        return self._place

    @contextmanager
    def open(self) -> Iterator[None]:
        """Reaches the drop, takes its lock, and removes what an earlier sink of this log left unfinished, but for what
        take_over() is asked for first."""
        self._place = place(self.uri)
        os.makedirs(self.staging, exist_ok=True)
        try:
            with self._place.lock(f"{self._node}-{self._log}"):
                yield
        except DropLocked:
            raise SinkLocked(f"another sink writes this log into {self.uri}") from None
        finally:
            self._place = None

    @property
    def staging(self) -> Path:
        """Where files are written."""
        found = self.place
        return Path(found.base, STAGING) if isinstance(found, LocalPlace) else self._spool

    def staged(self, first: int) -> Path:
        """Where to write the file that begins with this offset."""
        return self.staging / f"{self._node}-{self._log}-{first}.parquet"

    def clear(self) -> None:
        """Removes unfinished files of this log."""
        for path in self.staging.glob(f"{self._node}-{self._log}-*"):
            if path.suffix != LOCK_SUFFIX:
                path.unlink(missing_ok=True)

    def names(self) -> Iterator[FileName]:
        """Every file of this log that is in the drop."""
        for found in self.place.files():
            parsed = parse_path(found.path)
            if parsed is not None and parsed[1].stream == (self._node, self._log):
                yield parsed[1]

    def finish(self, staged: Path) -> None:
        """Makes a written file ready to be put in its place."""
        if isinstance(self.place, LocalPlace):
            sync(staged)
            reach("file-synced")
            os.utime(staged)  # Spark orders files by it and may skip what looks old
            reach("touched")

    def put(self, staged: Path, path: str) -> None:
        """Puts a file into its place, durably; whole or not at all."""
        found = self.place
        if isinstance(found, LocalPlace):
            parents = found.move(staged, path)
            reach("renamed")
            for parent in parents:
                sync(parent)
            reach("directory-synced")
        else:
            found.commit(staged, path)
            reach("renamed")
            staged.unlink()
