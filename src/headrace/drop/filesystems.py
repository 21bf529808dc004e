"""A path or URI as a place with files: a local directory, or whatever pyarrow has a filesystem for. Knows how a
finished file gets there so that nobody ever sees a part of it; knows nothing of what is in the files."""

import contextlib
import errno
import fcntl
import glob
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from headrace.drop.errors import DropError, DropLocked
from headrace.drop.layout import STAGING

LOCK_SUFFIX: Final = ".lock"  # of files in the staging directory that are there to be locked

# Where an object appears when its upload is complete, and renaming is copying.
_OBJECT_STORES: Final = ("s3", "gcs", "abfs")


class Found(NamedTuple):
    """A file of a place."""

    path: str  # below the place, with "/"
    size: int
    mtime: float  # seconds since the epoch


class Place(ABC):
    """A directory of a filesystem. Paths are relative to it and have "/" between their parts."""

    def __init__(self, text: str) -> None:
        self.text = text  # as a person would give it

    def __str__(self) -> str:
        return self.text

    def full(self, path: str) -> str:
        """A path of this place as a person would give it."""
        head, mark, query = _split_query(self.text)
        return f"{head.rstrip('/')}/{path}{mark}{query}"

    def beside(self, suffix: str) -> "Place":
        """The place whose name is this one's with `suffix` behind it."""
        head, mark, query = _split_query(self.text)
        return place(f"{head.rstrip('/')}{suffix}{mark}{query}")

    @property
    @abstractmethod
    def local(self) -> bool:
        """Whether it is a directory of this machine."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether there is such a directory; an object store has it where it has something below."""

    @abstractmethod
    def files(self) -> Iterator[Found]:
        """Every file that a reader of the directory would see, in no order: not what is, or lies below, a name that
        begins with "_" or "."."""

    @abstractmethod
    def staged(self) -> list[Found]:
        """What is in the staging directory."""

    @abstractmethod
    def directories(self) -> list[str]:
        """The directories of hours, also empty ones; none where directories are but a part of names."""

    @abstractmethod
    def open(self, path: str) -> pa.NativeFile:
        """A file for reading; FileNotFoundError where it is gone."""

    @abstractmethod
    def remove(self, path: str) -> bool:
        """Removes a file; False where it was gone already."""

    @abstractmethod
    def remove_empty(self, directory: str) -> bool:
        """Removes a directory of an hour, and that of its date, if there is nothing in it."""

    @abstractmethod
    def held(self, path: str) -> bool:
        """Whether a process holds a lock on a file."""

    @abstractmethod
    def lock(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Keeps other processes from doing the same in this place; DropLocked where one does already."""

    @abstractmethod
    def stage(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """Where to write a file that is to be committed. What was not committed is removed at the end."""

    @abstractmethod
    def commit(self, staged: Path, path: str) -> None:
        """Puts a finished file into its place, durably, and whole or not at all. There is no file of that name yet."""


def place(where: str | Path) -> Place:
    """The place that a path or URI means; it need not exist. DropError where nothing is known of its filesystem."""
    text = os.fspath(where)
    scheme, separator, _ = text.partition("://")
    if not separator:
        return LocalPlace(text)
    if scheme == "file":
        return LocalPlace(unquote(urlsplit(text).path))
    from pyarrow.fs import FileSystem

    try:
        filesystem, base = FileSystem.from_uri(text)
    except (OSError, pa.ArrowException) as error:
        raise DropError(f"{text} cannot be reached: {first_line(error)}") from None
    return RemotePlace(text, filesystem, base)


def first_line(error: BaseException) -> str:
    """What an error says, without the pages that some libraries add."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _split_query(text: str) -> tuple[str, str, str]:
    return text.partition("?") if "://" in text else (text, "", "")


class LocalPlace(Place):
    """A directory of this machine."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.base = os.path.abspath(text)

    @property
    def local(self) -> bool:
        return True

    def exists(self) -> bool:
        return os.path.isdir(self.base)

    def files(self) -> Iterator[Found]:
        return self._walk("", hidden=False)

    def staged(self) -> list[Found]:
        return list(self._walk(f"{STAGING}/", hidden=True))

    def directories(self) -> list[str]:
        return [
            os.path.relpath(found, self.base)
            for found in glob.iglob(f"{glob.escape(self.base)}/date=*/hour=*")
        ]

    def _walk(self, below: str, *, hidden: bool) -> Iterator[Found]:
        try:
            entries = list(os.scandir(os.path.join(self.base, below)))
        except FileNotFoundError:  # a directory that was empty may be removed at any time
            return
        except OSError as error:
            raise DropError(f"{self.full(below)} cannot be listed: {error.strerror}") from None
        for entry in entries:
            if entry.name.startswith(("_", ".")) and not hidden:
                continue
            path = f"{below}{entry.name}"
            if entry.is_dir():
                yield from self._walk(f"{path}/", hidden=hidden)
                continue
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat()
                yield Found(path, status.st_size, status.st_mtime)

    def open(self, path: str) -> pa.NativeFile:
        return pa.OSFile(os.path.join(self.base, path))

    def remove(self, path: str) -> bool:
        try:
            os.unlink(os.path.join(self.base, path))
        except FileNotFoundError:
            return False
        return True

    def remove_empty(self, directory: str) -> bool:
        removed = False
        while directory:
            try:
                os.rmdir(os.path.join(self.base, directory))
                removed = True
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    break
                raise
            directory = os.path.dirname(directory)
        return removed

    def held(self, path: str) -> bool:
        try:
            file = os.open(os.path.join(self.base, path), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        staging = self._staging()
        # Never removed: a process that waits to open it and one that makes it anew would hold different locks.
        file = os.open(staging / f"{name}{LOCK_SUFFIX}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DropLocked(f"another {name} runs in {self.text}") from None
            yield
        finally:
            os.close(file)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Path]:
        staged = self._staging() / name
        try:
            yield staged
        finally:
            staged.unlink(missing_ok=True)

    def _staging(self) -> Path:
        staging = Path(self.base, STAGING)
        staging.mkdir(parents=True, exist_ok=True)
        return staging

    def commit(self, staged: Path, path: str) -> None:
        sync(staged)
        os.utime(staged)  # Spark orders files by it and may skip what looks old
        for directory in self.move(staged, path):
            sync(directory)

    def move(self, staged: Path, path: str) -> list[str]:
        """Renames a file into its place; the directories that must be synced for its name to stay."""
        final = os.path.join(self.base, path)
        while True:
            made = self._make(os.path.dirname(path))
            if os.path.lexists(final):
                raise DropError(f"{self.full(path)} is there already")
            try:
                os.rename(staged, final)
                return made
            except FileNotFoundError:
                # The directory was empty and somebody removed it; if it was the file that went, that is an error.
                if not staged.exists():
                    raise

    def _make(self, directory: str) -> list[str]:
        """Makes a directory and what is above it; returns what must be synced for a new name in it to stay."""
        to_sync = [os.path.join(self.base, directory)]
        missing = []
        at = to_sync[0]
        while not os.path.isdir(at):
            missing.append(at)
            at = os.path.dirname(at)
        for each in reversed(missing):
            with contextlib.suppress(FileExistsError):
                try:
                    os.mkdir(each)
                except FileNotFoundError:  # removed above us just now
                    return self._make(directory)
            to_sync.append(os.path.dirname(each))
        return to_sync


def sync(path: str | Path) -> None:
    """Makes a file's data, or a directory's names, durable."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class RemotePlace(Place):
    """A directory of one of pyarrow's filesystems."""

    def __init__(self, text: str, filesystem: Any, base: str) -> None:
        super().__init__(text)
        self.filesystem = filesystem
        self.base = base.rstrip("/")

    @property
    def local(self) -> bool:
        return False

    def exists(self) -> bool:
        from pyarrow.fs import FileType

        with self._reaching():
            return bool(self.filesystem.get_file_info(self.base).type == FileType.Directory)

    def files(self) -> Iterator[Found]:
        for found in self._list(""):
            if not any(part.startswith(("_", ".")) for part in found.path.split("/")):
                yield found

    def staged(self) -> list[Found]:
        return list(self._list(STAGING))

    def directories(self) -> list[str]:
        return []

    def _list(self, below: str) -> Iterator[Found]:
        from pyarrow.fs import FileSelector, FileType

        top = f"{self.base}/{below}".rstrip("/")
        with self._reaching():
            infos = self.filesystem.get_file_info(FileSelector(top, recursive=True, allow_not_found=True))
        prefix = f"{self.base}/"
        for info in infos:
            if info.type == FileType.File:
                path = info.path[len(prefix) :] if info.path.startswith(prefix) else info.path
                yield Found(path, info.size, (info.mtime_ns or 0) / 1e9)

    def open(self, path: str) -> pa.NativeFile:
        return self.filesystem.open_input_file(f"{self.base}/{path}")

    def remove(self, path: str) -> bool:
        try:
            self.filesystem.delete_file(f"{self.base}/{path}")
        except FileNotFoundError:
            return False
        return True

    def remove_empty(self, directory: str) -> bool:
        # These filesystems remove a directory with all that is in it, also with what came a moment ago.
        return False

    def held(self, path: str) -> bool:
        return False

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        yield  # there are no locks there: that only one runs is for who starts it to see to

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="headrace-") as spool:
            yield Path(spool, name)

    def commit(self, staged: Path, path: str) -> None:
        final = f"{self.base}/{path}"
        with self._reaching():
            if self.filesystem.type_name in _OBJECT_STORES:
                self._upload(staged, final)
                return
            between = f"{self.base}/{STAGING}/{staged.name}"
            self.filesystem.create_dir(os.path.dirname(between), recursive=True)
            self._upload(staged, between)
            self.filesystem.create_dir(os.path.dirname(final), recursive=True)
            self.filesystem.move(between, final)

    def _upload(self, staged: Path, to: str) -> None:
        with pa.memory_map(os.fspath(staged)) as source:
            whole = source.read_buffer()
        # In one write: closing a stream completes its upload, also when only some of several writes were made.
        with self.filesystem.open_output_stream(to) as stream:
            stream.write(whole)
        if self.filesystem.get_file_info(to).size != whole.size:
            self.filesystem.delete_file(to)
            raise OSError(f"{to} did not arrive whole")

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise DropError(f"{self.text} cannot be used: {first_line(error)}") from None
