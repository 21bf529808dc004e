"""A table that jobs write into batch by batch, each batch once: a directory of Parquet files and, in `_headrace/`, a
manifest per batch. Knows nothing of what a batch holds.

A batch is written by Spark to `_staging/`, announced in `<n>.moving.json`, moved into place under names that begin
with its number `n`, and committed by `<n>.json`. A batch that was announced and not committed is undone by the next
writer, and its number is never used again. So the names alone say what is committed: everything up to the last
number, without those that were undone. Manifests are folded into one file now and then.
"""

import json
import os
import posixpath
import signal
import socket
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Self

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from headrace.errors import HeadraceError
from headrace.spark.jobs.hadoop import Files, Lock
from headrace.spark.jobs.ranges import Ranges

MANIFEST_VERSION: Final = 1
FOLD_AFTER: Final = 50  # manifests; reading them all takes well below a second
LOCK_PATIENCE: Final = 30.0  # seconds; the JVM of a driver that was killed needs a moment to end
LIST_ATTEMPTS: Final = 5  # a reader begins again when manifests were folded under its hands

OWN: Final = "_headrace"
MANIFESTS: Final = "_headrace/manifests"
LOCK: Final = "_headrace/lock"
OWNER: Final = "_headrace/owner.json"
CHECKPOINT: Final = "_headrace/checkpoint"
STAGING: Final = "_staging"

KILL_VARIABLE: Final = "HEADRACE_INGEST_KILL_AT"
"""For tests: "moved:2" kills the driver when it comes to that point for the second time."""

_passed: Counter[str] = Counter()


class TableError(HeadraceError):
    """A table cannot be read or written."""


class TableTaken(TableError):
    """Another process writes this table."""


def pass_point(name: str) -> None:
    """A place where tests kill the driver."""
    wanted = os.environ.get(KILL_VARIABLE)
    if wanted is not None:
        _passed[name] += 1
        if wanted == f"{name}:{_passed[name]}":
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class State:
    """What the manifests say."""

    sequence: int = 0  # of the last batch, committed or undone
    floor: int = 0  # batches up to this one were replaced
    undone: tuple[int, ...] = ()
    run: str = ""  # the checkpoint that the last batch belongs to
    batch: int = -1  # and its number there
    rows: int = 0
    ranges: Ranges = field(default_factory=Ranges)
    schema: dict[str, Any] | None = None
    notes: dict[str, Any] = field(default_factory=dict)  # what the job itself keeps from batch to batch

    def after(self, manifest: dict[str, Any]) -> "State":
        sequence = manifest["sequence"]
        if manifest.get("undone"):
            return replace(self, sequence=sequence, undone=(*self.undone, sequence))
        ranges = Ranges()
        ranges.update(self.ranges)
        ranges.update(Ranges.from_json(manifest["ranges"]))
        replaced = manifest["replaces"]
        return State(
            sequence=sequence,
            floor=sequence - 1 if replaced else self.floor,
            undone=() if replaced else self.undone,
            run=manifest["run"],
            batch=manifest["batch"],
            rows=manifest["rows"] + (0 if replaced else self.rows),
            ranges=ranges,
            schema=manifest["schema"] if replaced else _merged(self.schema, manifest["schema"]),
            notes=manifest["notes"],
        )

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "version": MANIFEST_VERSION, "ranges": self.ranges.to_json()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        known = {key: value[key] for key in cls.__dataclass_fields__}
        return cls(**{**known, "ranges": Ranges.from_json(value["ranges"]), "undone": tuple(value["undone"])})


def _merged(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """The columns of both: older files may have some that the last one has not."""
    if old is None:
        return new
    names = {one["name"] for one in new["fields"]}
    return {**new, "fields": [*new["fields"], *(one for one in old["fields"] if one["name"] not in names)]}


def read_state(files: Files) -> State:
    """What is committed, also while somebody writes."""
    for _ in range(LIST_ATTEMPTS):
        names = files.list_names(MANIFESTS)
        folds = [name for name in names if name.endswith(".fold.json")]
        state = State()
        try:
            if folds:
                state = State.from_json(_parse(files, folds[-1]))
            for name in names:
                number = name.removesuffix(".json")
                if number.isdigit() and int(number) > state.sequence:
                    state = state.after(_parse(files, name))
        except Exception as error:
            if "FileNotFoundException" not in str(error):
                raise
            continue
        return state
    raise TableError(f"{files.root} changes faster than it can be read")


def _parse(files: Files, name: str) -> dict[str, Any]:
    path = f"{MANIFESTS}/{name}"
    try:
        found: dict[str, Any] = json.loads(files.read(path))
    except ValueError:
        raise TableError(f"{files.at(path)} is damaged: it is no JSON") from None
    if found.get("version") != MANIFEST_VERSION:
        raise TableError(
            f"{files.at(path)} has the version {found.get('version')}; this is for {MANIFEST_VERSION}"
        )
    return found


def read_table(spark: SparkSession, path: str) -> DataFrame:
    """The rows of a table that are committed now. What a batch that is under way has put in place is left out."""
    files = Files(spark, path)
    state = read_state(files)
    if state.schema is None:
        raise TableError(f"{path} is no table that a job has written to")
    number = F.substring(F.col("_metadata.file_name"), 1, NUMBER_DIGITS)
    committed = (number > F.lit(_number(state.floor))) & (number <= F.lit(_number(state.sequence)))
    if state.undone:
        committed &= ~number.isin([_number(one) for one in state.undone])
    frame = spark.read.schema(StructType.fromJson(state.schema)).parquet(files.root)
    return frame.where(committed)


NUMBER_DIGITS: Final = 12


def _number(sequence: int) -> str:
    return f"{sequence:0{NUMBER_DIGITS}d}"


class Table:
    """A table that is open for writing, by one process at a time."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self.files = Files(spark, path)
        self.state = State()
        self._owner = uuid.uuid4().hex
        self._lock: Lock | None = None
        # A stream that is stopped does not wait for its batch, which goes on in a thread of its own.
        self._committing = threading.RLock()
        self._since_fold = 0

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def path(self) -> str:
        return self.files.root

    def open(self, patience: float = LOCK_PATIENCE) -> None:
        """Takes the table over, and undoes what an earlier writer has left half done."""
        deadline = time.monotonic() + patience
        while (lock := self.files.lock(LOCK)) is None:
            if time.monotonic() > deadline:
                raise TableTaken(f"another process writes {self.path}; a table has one writer")
            time.sleep(0.1)
        self._lock = lock
        try:
            self._take_over()
        except BaseException:
            self.close()
            raise

    def _take_over(self) -> None:
        owner = {"owner": self._owner, "host": socket.gethostname(), "pid": os.getpid(), "since": _now()}
        self.files.write(OWNER, json.dumps(owner).encode(), replace=True)
        self.state = read_state(self.files)
        names = self.files.list_names(MANIFESTS)
        self._since_fold = sum(name.removesuffix(".json").isdigit() for name in names)
        for name in names:
            if name.endswith(".tmp"):
                self.files.delete(f"{MANIFESTS}/{name}")
            elif name.endswith(".moving.json"):
                self._settle(name)
        self.files.delete(STAGING)

    def _settle(self, name: str) -> None:
        """Undoes a batch that was announced, unless it was committed."""
        announced = _parse(self.files, name)
        if announced["sequence"] > self.state.sequence:
            for path in announced["files"]:
                self.files.delete(path)
            self._record({"sequence": announced["sequence"], "undone": True})
        self.files.delete(f"{MANIFESTS}/{name}")

    def close(self) -> None:
        """Gives the table free, after a commit that is under way; none will follow."""
        with self._committing:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def has(self, run: str, batch: int) -> bool:
        """Whether this batch of this checkpoint was committed."""
        return self.state.run == run and batch <= self.state.batch

    def staging(self, name: str) -> str:
        """Where Spark may write what commit() will move into place."""
        return self.files.at(f"{STAGING}/{name}")

    def commit(
        self,
        staged: str,
        *,
        run: str,
        batch: int,
        rows: int,
        schema: StructType,
        ranges: Ranges | None = None,
        notes: dict[str, Any] | None = None,
        replaces: bool = False,
    ) -> list[str]:
        """Makes a batch of what is in `_staging/<staged>` (which may be nothing), and gives the paths of its files.
        With `replaces` it takes the place of all that was there before."""
        with self._committing:
            if self._lock is None:
                raise TableError(f"{self.path} was closed before this batch was committed")
            return self._commit(
                staged,
                {
                    "run": run,
                    "batch": batch,
                    "rows": rows,
                    "ranges": (ranges or Ranges()).to_json(),
                    "schema": json.loads(schema.json()),
                    "notes": notes or {},
                    "replaces": replaces,
                },
            )

    def _commit(self, staged: str, about: dict[str, Any]) -> list[str]:
        sequence = self.state.sequence + 1
        number = _number(sequence)
        moves: list[tuple[str, str]] = []
        found = [one for one in self.files.list_files(f"{STAGING}/{staged}") if one.path.endswith(".parquet")]
        for count, entry in enumerate(found):
            directory = posixpath.dirname(entry.path)
            name = f"{number}-{count:05d}.parquet"
            moves.append((f"{STAGING}/{staged}/{entry.path}", posixpath.join(directory, name)))
        targets = [target for _, target in moves]
        for source, _ in moves:
            self.files.sync(source)
        pass_point("staged")
        self._check_owner()  # not only at the end: files that are moved now may be seen
        announcement = {"version": MANIFEST_VERSION, "sequence": sequence, "files": targets}
        self.files.write(f"{MANIFESTS}/{number}.moving.json", json.dumps(announcement).encode())
        pass_point("announced")
        for source, target in moves:
            self.files.move(source, target)
            pass_point("moved")
        for target in targets:
            self.files.sync_parents(target)
        self._check_owner()
        manifest = {"sequence": sequence, "written": _now(), "files": targets, **about}
        old_floor = self.state.floor
        self._record(manifest)
        pass_point("committed")
        self.files.delete(f"{MANIFESTS}/{number}.moving.json")
        self.files.delete(f"{STAGING}/{staged}")
        if about["replaces"]:
            self._remove_until(old_floor)
        if self._since_fold >= FOLD_AFTER:
            self._fold()
        pass_point("cleaned")
        return targets

    def _record(self, manifest: dict[str, Any]) -> None:
        name = f"{_number(manifest['sequence'])}.json"
        data = json.dumps({"version": MANIFEST_VERSION, **manifest}).encode()
        self.files.write(f"{MANIFESTS}/{name}", data)
        self.state = self.state.after(manifest)
        self._since_fold += 1

    def _check_owner(self) -> None:
        try:
            owner = json.loads(self.files.read(OWNER))
        except Exception as error:
            if "FileNotFoundException" not in str(error):
                raise
            owner = {"owner": "", "pid": "just beginning", "host": "some machine"}
        if owner["owner"] != self._owner:
            raise TableTaken(
                f"{self.path} was taken over by another process ({owner['pid']} on {owner['host']});"
                " this one ends without having committed its batch"
            )

    def _fold(self) -> None:
        number = _number(self.state.sequence)
        self.files.write(f"{MANIFESTS}/{number}.fold.json", json.dumps(self.state.to_json()).encode())
        pass_point("folded")
        for name in self.files.list_names(MANIFESTS):
            if name <= f"{number}.json" and name != f"{number}.fold.json":
                self.files.delete(f"{MANIFESTS}/{name}")
        self._since_fold = 0

    def _remove_until(self, sequence: int) -> None:
        """Removes files of batches that were replaced; the last one before now stays for those who still read it."""
        limit = _number(sequence + 1)
        for name in self.files.list_names(""):
            if name[:NUMBER_DIGITS].isdigit() and name < limit:
                self.files.delete(name)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
