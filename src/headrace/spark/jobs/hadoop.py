"""Files on whatever filesystem Spark can reach, through Hadoop's own interface in the driver's JVM. Local ones are
synced as well, so that a power cut takes nothing that was reported. Knows nothing of tables or what is in the files."""

import os
import posixpath
import uuid
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from pyspark.sql import SparkSession

from headrace.errors import HeadraceError


class Entry(NamedTuple):
    """A file, by its path below the directory that was listed."""

    path: str
    bytes: int


_locked: set[str] = set()


class Lock:
    """A lock that is held; on filesystems that are not local it is none, which the table's owner file makes up for."""

    def __init__(self, file: Any, place: str) -> None:
        self._file = file
        self._place = place

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            _locked.discard(self._place)


class Files:
    """The files below one directory; paths are relative to it."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._jvm: Any = spark._jvm
        if self._jvm is None:
            raise HeadraceError("this job needs a Spark session with a JVM of its own, not Spark Connect")
        jsc: Any = spark._jsc
        try:
            given = self._jvm.org.apache.hadoop.fs.Path(root)
            self._fs = given.getFileSystem(jsc.hadoopConfiguration())
        except Exception as error:
            raise HeadraceError(f"cannot use {root}: {_first_line(error)}") from None
        self.root: str = self._fs.makeQualified(given).toString()
        """With its scheme, as Spark's readers and writers take it."""
        scheme = urlsplit(self.root).scheme
        self.local: str | None = unquote(urlsplit(self.root).path) if scheme == "file" else None
        """The directory's path where it is one of this machine's."""

    def at(self, path: str) -> str:
        return posixpath.join(self.root, path) if path else self.root

    def exists(self, path: str) -> bool:
        return bool(self._fs.exists(self._path(path)))

    def list_names(self, path: str) -> list[str]:
        """What is directly in a directory, sorted; nothing where there is none."""
        try:
            return sorted(status.getPath().getName() for status in self._fs.listStatus(self._path(path)))
        except Exception as error:
            if "FileNotFoundException" in str(error):
                return []
            raise

    def list_files(self, path: str) -> list[Entry]:
        """Every file below a directory, sorted; nothing where there is none."""
        found: list[Entry] = []
        if not self.exists(path):
            return found
        base = self._fs.makeQualified(self._path(path)).toString().rstrip("/") + "/"
        listed = self._fs.listFiles(self._path(path), True)
        while listed.hasNext():
            status = listed.next()
            found.append(Entry(status.getPath().toString().removeprefix(base), int(status.getLen())))
        return sorted(found)

    def read(self, path: str) -> bytes:
        stream = self._fs.open(self._path(path))
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()

    def write(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """Writes a file that appears whole or not at all. With `replace` the one before may be gone by then."""
        directory = posixpath.dirname(path)
        draft = posixpath.join(directory, f"_{uuid.uuid4().hex}.tmp")
        self.make_directory(directory)
        stream = self._fs.create(self._path(draft), True)
        try:
            stream.write(data)
            stream.hsync()
        finally:
            stream.close()
        self.sync(draft)
        if replace:
            self.delete(path)  # a rename onto a name that is taken is refused
        elif self.exists(path):
            self.delete(draft)
            raise HeadraceError(f"{self.at(path)} is there already: somebody else writes there, too")
        self.move(draft, path)
        self.sync_parents(path)

    def make_directory(self, path: str) -> None:
        if not self._fs.mkdirs(self._path(path)):
            raise HeadraceError(f"cannot make the directory {self.at(path)}")

    def move(self, source: str, target: str) -> None:
        self.make_directory(posixpath.dirname(target))
        try:
            moved = self._fs.rename(self._path(source), self._path(target))
        except Exception as error:
            raise HeadraceError(f"cannot move {self.at(source)}: {_first_line(error)}") from error
        if not moved:
            raise HeadraceError(f"cannot move {self.at(source)} to {self.at(target)}")

    def delete(self, path: str) -> None:
        """Deletes a file, or a directory with all that is in it, if it is there."""
        self._fs.delete(self._path(path), True)

    def sync(self, path: str) -> None:
        """Makes a local file or directory durable; other filesystems do that when a file is closed."""
        if self.local is not None:
            descriptor = os.open(os.path.join(self.local, path), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def sync_parents(self, path: str) -> None:
        """Makes the name of a file durable, and those of the directories above it down from the root."""
        while path:
            path = posixpath.dirname(path)
            self.sync(path)

    def lock(self, path: str) -> "Lock | None":
        """Locks a local file until unlock() or the end of this JVM; nothing if another holds it."""
        if self.local is None:
            return Lock(None, "")
        self.make_directory(posixpath.dirname(path))
        place = os.path.realpath(os.path.join(self.local, path))
        # The system forgets all of a process's locks on a file when it closes any descriptor of it, so nobody here
        # may so much as try.
        if place in _locked:
            return None
        file = self._jvm.java.io.RandomAccessFile(place, "rw")
        if file.getChannel().tryLock() is None:
            file.close()
            return None
        _locked.add(place)
        return Lock(file, place)

    def footer(self, path: str) -> dict[str, str]:
        """The metadata of a Parquet file, by key; `path` may be a whole URI."""
        parquet = self._jvm.org.apache.parquet.hadoop
        place = self._jvm.org.apache.hadoop.fs.Path(path)
        reader = parquet.ParquetFileReader.open(
            parquet.util.HadoopInputFile.fromPath(place, self._fs.getConf())
        )
        try:
            return dict(reader.getFooter().getFileMetaData().getKeyValueMetaData())
        finally:
            reader.close()

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self.at(path))


def _first_line(error: Exception) -> str:
    java = getattr(error, "java_exception", None)
    return str(java.getMessage() if java is not None else error).partition("\n")[0]
