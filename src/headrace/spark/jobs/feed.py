"""The drop as a stream whose every row comes once into a table, whatever becomes of the stream and its checkpoint: a
drop file's name says which offsets it covers, the table's manifests say which were taken, and only others are passed
on. Knows nothing of what is made of the rows."""

import posixpath
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final
from urllib.parse import unquote

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from headrace.drop import COMPACTED_SUFFIX, FileName
from headrace.drop.layout import OFFSET_DIGITS
from headrace.drop.schema import EMPTY_BEFORE_KEY
from headrace.spark.jobs import JobError, trigger
from headrace.spark.jobs.hadoop import Files
from headrace.spark.jobs.ranges import Ranges, overlap
from headrace.spark.jobs.table import CHECKPOINT, Table

PATH: Final = "_headrace_path"  # a column on the way from the stream to the batch

# More intervals than this are joined instead of compared one by one.
COMPARED_INTERVALS: Final = 64


def unseen(rows: DataFrame, taken: Ranges) -> DataFrame:
    """The rows whose offsets were not taken."""
    if not len(taken):
        return rows
    if len(taken) <= COMPARED_INTERVALS:
        return rows.where(~_compared(taken))
    spark = rows.sparkSession
    values = [(*stream, *interval) for stream, interval in taken]
    intervals = spark.createDataFrame(values, "t_node string, t_log string, t_first long, t_last long")
    same = (
        (F.col("node") == F.col("t_node"))
        & (F.col("log") == F.col("t_log"))
        & F.col("offset").between(F.col("t_first"), F.col("t_last"))
    )
    return rows.join(F.broadcast(intervals), same, "left_anti")


def _compared(taken: Ranges) -> Column:
    condition = F.lit(False)
    for (node, log), (first, last) in taken:
        condition |= (F.col("node") == node) & (F.col("log") == log) & F.col("offset").between(first, last)
    return condition


def vouched() -> Column:
    """Whether the name of its file says that a row is in there."""
    name = F.col("file")
    start = F.concat(F.col("node"), F.lit("-"), F.col("log"), F.lit("-"))
    size = F.length(start)
    first = name.substr(size + 1, F.lit(OFFSET_DIGITS)).try_cast("long")
    last = name.substr(size + OFFSET_DIGITS + 2, F.lit(OFFSET_DIGITS)).try_cast("long")
    return F.coalesce(name.startswith(start) & F.col("offset").between(first, last), F.lit(False))


class Batch:
    """The rows of a micro-batch that are new, and after they were written once: what files they came from."""

    def __init__(self, rows: DataFrame, taken: Ranges, *, distinct: bool = False) -> None:
        self._read = Observation()
        self._kept = Observation()
        rows = rows.withColumn("_vouched", vouched()).observe(
            self._read,
            F.count(F.lit(1)).alias("rows"),
            F.count_if(~F.col("_vouched")).alias("strange_rows"),
            F.collect_set(F.when(~F.col("_vouched"), F.col(PATH))).alias("strange"),
            F.collect_set(F.when(F.col("_vouched"), F.col(PATH))).alias("paths"),
        )
        rows = unseen(rows.where("_vouched"), taken).drop("_vouched", PATH)
        if distinct:
            rows = rows.dropDuplicates(["node", "log", "offset"])
        moment = F.unix_micros("ts")
        self.rows = rows.observe(
            self._kept,
            F.count(F.lit(1)).alias("rows"),
            F.min(moment).alias("oldest"),
            F.max(moment).alias("newest"),
        )

    @property
    def count(self) -> int:
        return int(self._kept.get["rows"])

    @property
    def skipped(self) -> int:
        """Rows that were taken before."""
        return int(self._read.get["rows"]) - int(self._read.get["strange_rows"]) - self.count

    @property
    def period(self) -> tuple[int, int] | None:
        """When the first and the last of the rows were appended, in microseconds since the epoch; nothing without
        rows."""
        found = self._kept.get
        return (found["oldest"], found["newest"]) if found["rows"] else None

    @property
    def strange(self) -> list[str]:
        """Files with rows that their names do not vouch for."""
        return sorted(self._read.get["strange"])

    @property
    def files(self) -> dict[FileName, str]:
        """Where the files are that the rows came from."""
        return dict(_named(self._read.get["paths"]))


def _named(paths: list[str]) -> Iterator[tuple[FileName, str]]:
    for path in sorted(paths):
        name = FileName.parse(posixpath.basename(unquote(path)))
        assert name is not None  # vouched() has looked at it
        yield name, path


def written(rows: DataFrame, taken: Ranges, write: Callable[[DataFrame], None]) -> Batch:
    """Has the new rows of a micro-batch written. Files that cover the same offsets, as a compacted file and one that
    it was made from do, come together seldom; then they are written again without what is there twice."""
    batch = Batch(rows, taken)
    write(batch.rows)
    if overlap(batch.files):
        batch = Batch(rows, taken, distinct=True)
        write(batch.rows)
    return batch


def covered(files: Files, batch: Batch, taken: Ranges) -> Ranges:
    """What a batch adds to the offsets that were taken. Where a file leaves a hole before it, its footer tells how
    many offsets of that are empty, so that the hole is closed and the intervals stay few."""
    ranges = Ranges()
    ranges.update(taken)
    added = Ranges()
    for name, path in sorted(batch.files.items()):
        first = name.first
        if not ranges.follows(name):
            first -= min(first, int(files.footer(path).get(EMPTY_BEFORE_KEY.decode(), "0")))
        for one in (ranges, added):
            one.add(name.stream, first, name.last)
    return added


def checked_drop(files: Files, table: Table, moved: bool) -> str:
    """The drop's name for the table's manifests. A table takes one drop: two drops of one log may differ in what
    their filters leave out, and a file's name does not say that."""
    name = files.root.rstrip("/").removesuffix(COMPACTED_SUFFIX)
    before = table.state.notes.get("drop", name)
    if before != name and not moved:
        raise JobError(
            f"{table.path} was made from {before}, not from {name}; a table takes one drop."
            " If the drop was moved, say --moved."
        )
    return name


def start(
    rows: DataFrame,
    table: Table,
    handle: Callable[[DataFrame, str, int], None],
    *,
    name: str,
    checkpoint: str | None,
    every: timedelta | None,
) -> StreamingQuery:
    """Starts the stream: `handle` gets each micro-batch that was not committed, with its run and number. Without
    `every` it ends when all that is there now was read."""
    rows = rows.select(
        "*", F.col("_metadata.file_name").alias("file"), F.col("_metadata.file_path").alias(PATH)
    )
    # Only to read less after a checkpoint was lost; each batch is compared with what is taken by then.
    if len(table.state.ranges) <= COMPARED_INTERVALS:
        rows = unseen(rows, table.state.ranges)

    def process(batch: DataFrame, number: int) -> None:
        run = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId") or ""
        if not table.has(run, number):
            handle(batch, run, number)

    writer = (
        rows.writeStream.queryName(name)
        .foreachBatch(process)
        .option("checkpointLocation", checkpoint or table.files.at(CHECKPOINT))
    )
    return trigger(writer, every).start()


def write_parquet(rows: DataFrame, path: str, *partitions: str) -> None:
    """Writes rows as Parquet with times that other readers know, too."""
    rows.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    rows.write.mode("overwrite").option("compression", "zstd").partitionBy(*partitions).parquet(path)
