"""When each source was there: `headrace spark sessions`. Per source the first and last message, how many there are,
and the silences between them that are longer than a given gap.

As a batch it uses window functions. As a stream it keeps, per source, the spans of time in which it was heard; a
message that comes out of order joins, widens or connects them, so that the result is the batch's, as long as messages
come no later than `late`. Later ones are counted, but change no gap.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, Final, Self

import click
import pandas as pd  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.streaming.query import StreamingQuery

from headrace.spark import read_drop, stream_drop
from headrace.spark.jobs import (
    Duration,
    Session,
    compacted_option,
    counted,
    feed,
    run_main,
    selection_options,
    trigger,
    wait_for,
    with_session,
)
from headrace.spark.jobs.rollup import write
from headrace.spark.jobs.table import CHECKPOINT, Table, read_table

MICROSECOND: Final = timedelta(microseconds=1)

SCHEMA: Final = T.StructType(
    [
        T.StructField("source", T.StringType()),
        T.StructField("first", T.TimestampType()),
        T.StructField("last", T.TimestampType()),
        T.StructField("messages", T.LongType()),
        T.StructField("gaps", T.LongType()),
        T.StructField("longest_gap_s", T.DoubleType()),
    ]
)
# As the pandas function gives it: Spark makes the times of it.
_RAW: Final = "source string, first_us long, last_us long, messages long, gaps long, longest_us long"


# --- as a batch ---------------------------------------------------------------------------------------------


def run(
    spark: SparkSession,
    drop: str,
    *,
    gap: timedelta,
    since: datetime | None = None,
    until: datetime | None = None,
    compacted: str | None = None,
) -> DataFrame:
    """A row per source of what is in the drop."""
    rows = read_drop(spark, drop, since=since, until=until, compacted=compacted)
    moments = rows.select("source", F.unix_micros("ts").alias("us"))
    silence = F.col("us") - F.lag("us").over(Window.partitionBy("source").orderBy("us"))
    long_silence = F.when(F.col("silence") > gap // MICROSECOND, F.col("silence"))
    return _shown(
        moments.withColumn("silence", silence)
        .groupBy("source")
        .agg(
            F.min("us").alias("first_us"),
            F.max("us").alias("last_us"),
            F.count(F.lit(1)).alias("messages"),
            F.count(long_silence).alias("gaps"),
            F.max(long_silence).alias("longest_us"),
        )
    )


def _shown(rows: DataFrame) -> DataFrame:
    return rows.select(
        "source",
        F.timestamp_micros("first_us").alias("first"),
        F.timestamp_micros("last_us").alias("last"),
        "messages",
        "gaps",
        (F.col("longest_us") / 1e6).alias("longest_gap_s"),
    )


# --- as a stream --------------------------------------------------------------------------------------------


@dataclass
class Presence:
    """When a source was heard: spans without a long silence in them, and of those that are over, only what counts.
    Times are microseconds since the epoch."""

    spans: list[tuple[int, int]]  # first and last, in order, each pair further apart than the gap
    first: int
    messages: int = 0
    gaps: int = 0  # before the spans that are kept
    longest: int = 0  # of those

    @classmethod
    def since(cls, moment: int) -> Self:
        return cls([(moment, moment)], moment)

    def add(self, moments: Sequence[int], gap: int, late: int) -> None:
        """Takes messages, in the order of their times."""
        for moment in moments:
            self.messages += 1
            self.first = min(self.first, moment)
            if self.gaps and moment < self.spans[0][0] - gap:
                continue  # later than was to be expected: between which spans it falls is forgotten
            start = bisect_left(self.spans, moment - gap, key=lambda span: span[1])
            end = bisect_right(self.spans, moment + gap, key=lambda span: span[0])
            if start < end:
                joined = min(moment, self.spans[start][0]), max(moment, self.spans[end - 1][1])
                self.spans[start:end] = [joined]
            else:
                self.spans.insert(start, (moment, moment))
        while len(self.spans) > 1 and self.spans[1][0] < self.spans[-1][1] - late:
            over = self.spans.pop(0)
            self.gaps += 1
            self.longest = max(self.longest, self.spans[0][0] - over[1])

    @property
    def row(self) -> dict[str, Any]:
        silences = [after[0] - before[1] for before, after in pairwise(self.spans)]
        gaps = self.gaps + len(silences)
        return {
            "first_us": self.first,
            "last_us": self.spans[-1][1],
            "messages": self.messages,
            "gaps": gaps,
            "longest_us": max([self.longest, *silences]) if gaps else None,
        }

    def to_text(self) -> str:
        return json.dumps([self.spans, self.first, self.messages, self.gaps, self.longest])

    @classmethod
    def from_text(cls, text: str) -> Self:
        spans, *rest = json.loads(text)
        return cls([(first, last) for first, last in spans], *rest)


def _follow(gap: int, late: int) -> Any:
    """What Spark calls for each source that has new messages."""

    def update(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        moments = sorted(int(moment) for frame in frames for moment in frame["us"])
        presence = Presence.from_text(state.get[0]) if state.exists else Presence.since(moments[0])
        presence.add(moments, gap, late)
        state.update((presence.to_text(),))
        row = pd.DataFrame([{"source": key[0], **presence.row}])
        yield row.astype({"longest_us": "Int64"})

    return update


class Sessions:
    """Sessions that follow the drop: `query` is its stream. The table has the row of each source as of the last
    batch."""

    def __init__(
        self,
        spark: SparkSession,
        drop: str,
        out: str,
        *,
        gap: timedelta,
        late: timedelta = timedelta(hours=1),
        every: timedelta | None = None,
        checkpoint: str | None = None,
        max_files: int = 1000,
    ) -> None:
        self.sources = 0
        """Sources in the table."""
        self.failure: BaseException | None = None
        rows = stream_drop(spark, drop, max_files_per_trigger=max_files)
        self.table = Table(spark, out)
        self.table.open()
        try:
            update = _follow(gap // MICROSECOND, late // MICROSECOND)
            updates = (
                rows.select("source", F.unix_micros("ts").alias("us"))
                .groupBy("source")
                .applyInPandasWithState(update, _RAW, "presence string", "update", "NoTimeout")
            )
            writer = (
                updates.writeStream.queryName(f"headrace sessions {out}")
                .outputMode("update")
                .foreachBatch(self._handle)
                .option("checkpointLocation", checkpoint or self.table.files.at(CHECKPOINT))
            )
            self.query: StreamingQuery = trigger(writer, every).start()
        except BaseException:
            self.table.close()
            raise

    def wait(self) -> int:
        """Waits until the stream has ended, gives the table free, and says how many sources it has."""
        try:
            wait_for(self.query, lambda: self.failure)
        finally:
            self.table.close()
        return self.sources

    def _handle(self, updates: DataFrame, number: int) -> None:
        try:
            self._replace(updates, number)
        except BaseException as error:
            self.failure = error
            raise

    def _replace(self, updates: DataFrame, number: int) -> None:
        spark = updates.sparkSession
        run = spark.sparkContext.getLocalProperty("sql.streaming.queryId") or ""
        state = self.table.state
        changed = self.table.staging(f"{run}-{number}-changed")
        # Also for a batch that was committed: the state is kept only if its result is asked for.
        feed.write_parquet(_shown(updates), changed)
        if self.table.has(run, number):
            self.table.files.delete(f"_staging/{run}-{number}-changed")
            return
        rows = spark.read.schema(SCHEMA).parquet(changed)
        if state.run == run:  # another checkpoint begins anew
            # A source may be null, and is one all the same.
            same = F.col("before.source").eqNullSafe(F.col("now.source"))
            before = read_table(spark, self.table.path).alias("before")
            rows = before.join(rows.alias("now"), same, "left_anti").unionByName(rows)
        staged = f"{run}-{number}"
        feed.write_parquet(rows.coalesce(1), self.table.staging(staged))
        self.sources = spark.read.parquet(self.table.staging(staged)).count()
        self.table.commit(staged, run=run, batch=number, rows=self.sources, schema=SCHEMA, replaces=True)
        self.table.files.delete(f"_staging/{run}-{number}-changed")


# --- the shell ----------------------------------------------------------------------------------------------


@click.command("sessions", short_help="When each source was there, and its silences.")
@click.argument("drop")
@click.argument("out", required=False)
@click.option(
    "--gap",
    metavar="TIME",
    type=Duration(),
    default="5m",
    show_default=True,
    help="A silence that is longer is a gap.",
)
@selection_options
@compacted_option
@click.option("--show", "show_rows", is_flag=True, help="Print the result instead of writing it to OUT.")
@click.option(
    "--limit", metavar="N", type=click.IntRange(1), default=50, show_default=True, help="Rows to print."
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it is there.")
@click.option("--stream", is_flag=True, help="Follow the drop, and keep OUT up to date.")
@click.option("--once", is_flag=True, help="With --stream: take what is there now, then end.")
@click.option(
    "--every",
    metavar="TIME",
    type=Duration(),
    default="10s",
    show_default=True,
    help="With --stream: how often to look for new files.",
)
@click.option(
    "--late",
    metavar="TIME",
    type=Duration(),
    default="1h",
    show_default=True,
    help="With --stream: how far out of order messages may come and still change a gap.",
)
@click.option(
    "--checkpoint", metavar="DIR", help="With --stream: where it keeps its place.  [default: in OUT]"
)
@with_session
def command(
    session: Session,
    drop: str,
    out: str | None,
    gap: timedelta,
    since: datetime | None,
    until: datetime | None,
    compacted: str | None,
    show_rows: bool,
    limit: int,
    overwrite: bool,
    stream: bool,
    once: bool,
    every: timedelta,
    late: timedelta,
    checkpoint: str | None,
) -> None:
    """Say when each source of a DROP was heard, and write the result to OUT as Parquet.

    \b
    source          the key's name and the peer
    first, last     its first and last message
    messages        how many there are
    gaps            silences between two of them that are longer than --gap
    longest_gap_s   the longest of those, in seconds

    With --stream OUT always has the newest row of each source; headrace.spark.jobs.table.read_table reads it.
    """
    if out is None and (stream or not show_rows):
        raise click.UsageError(
            "say where the result goes (OUT), or --show" if not stream else "--stream needs OUT"
        )
    if stream and (since or until or compacted or overwrite):
        raise click.UsageError("--since, --until, --compacted and --overwrite are for a run without --stream")
    spark = session.open()
    if stream:
        assert out is not None
        following = Sessions(
            spark, drop, out, gap=gap, late=late, every=None if once else every, checkpoint=checkpoint
        )
        click.echo(f"{counted(following.wait(), 'source')} in {out}")
        rows = read_table(spark, out) if show_rows else None
    else:
        rows = run(spark, drop, gap=gap, since=since, until=until, compacted=compacted)
    if show_rows and rows is not None:
        rows.orderBy(F.desc("messages"), "source").show(limit, truncate=False)
    elif rows is not None:
        assert out is not None
        write(rows, out, overwrite)
        click.echo(f"wrote {out}")


def main(argv: Sequence[str] | None = None) -> None:
    run_main(command, argv)


if __name__ == "__main__":
    # Under its own name, so that what it sends to executors is found there.
    from headrace.spark.jobs import sessions

    sessions.main()
