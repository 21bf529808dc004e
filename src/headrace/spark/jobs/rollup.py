"""Messages, bytes, sources and latencies per topic and minute: `headrace spark rollup`.

A latency is the time of append minus the sender's own `ts`: the header `ts`, or else the field `ts` of a payload that
is a JSON object. A number there counts seconds, milli-, micro- or nanoseconds since the epoch, whichever puts it
between the years 2000 and 2100; a text is such a number or an ISO 8601 time, UTC where it names no zone. Anything else
is no `ts`, and the message has no latency. A sender whose clock is ahead has negative ones.

As a stream it keeps what is needed of the messages of minutes that are still open, and writes a minute when the
watermark (the newest message's time minus a delay) has passed its end. What comes later is counted apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import click
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.streaming.query import StreamingQuery

from headrace.spark import read_drop, stream_drop
from headrace.spark.jobs import (
    Duration,
    JobError,
    Session,
    compacted_option,
    counted,
    feed,
    run_main,
    selection_options,
    wait_for,
    with_session,
)
from headrace.spark.jobs.hadoop import Files
from headrace.spark.jobs.table import Table, read_table

MINUTE_US: Final = 60_000_000
PERCENTILES: Final = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
ACCURACY: Final = 10_000  # a percentile's rank is off by one in so many at most

YEAR_2000: Final = 946_684_800  # seconds since the epoch
YEAR_2100: Final = 4_102_444_800
UNITS: Final = (1, 1_000, 1_000_000, 1_000_000_000)  # to the second

OPEN: Final = "_headrace/open"  # rows of minutes that are not written yet, a directory per batch
MINUTES: Final = "minutes"  # what is in which directory of the stream's table
LATE: Final = "late"

SCHEMA: Final = T.StructType(
    [
        T.StructField("minute", T.TimestampType()),
        T.StructField("topic", T.StringType()),
        T.StructField("messages", T.LongType()),
        T.StructField("bytes", T.LongType()),
        T.StructField("sources", T.LongType()),
        T.StructField("timed", T.LongType()),
        *(T.StructField(name, T.DoubleType()) for name in PERCENTILES),
        T.StructField("output", T.StringType()),
    ]
)


# --- the sender's time --------------------------------------------------------------------------------------


def sent_us() -> Column:
    """The sender's own time of a row of the drop, in microseconds since the epoch; null where it gave none."""
    payload = F.col("payload")
    named = F.expr("contains(payload, X'22747322')")  # "ts" with its quotes; the others are not parsed
    field = F.when(named, F.get_json_object(payload.cast("string"), "$.ts"))
    return moment_us(F.coalesce(F.try_element_at(F.col("headers"), F.lit("ts")), field))


def moment_us(text: Column) -> Column:
    """What a text says as a time, in microseconds since the epoch; null where it is none."""
    number = text.try_cast("double")
    from_number = F.lit(None).cast("long")
    for unit in reversed(UNITS):
        fits = number.between(YEAR_2000 * unit, YEAR_2100 * unit)
        from_number = F.when(fits, F.round(number / unit * 1_000_000).cast("long")).otherwise(from_number)
    looks = text.rlike(r"^\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?$")
    zoned = text.rlike(r"\d\d:\d\d.*(Z|z|[+-]\d\d(:?\d\d)?)$")
    # As Spark's cast reads it: with seconds, and a colon in the zone.
    day = text.rlike(r"^\d{4}-\d\d-\d\d$")
    full = (
        F.when(day, F.concat(text, F.lit("T00:00:00Z")))
        .when(zoned, text)
        .otherwise(F.concat(text, F.lit("Z")))
    )
    full = F.regexp_replace(F.upper(full), r"^(.{10}.\d\d:\d\d)(?!:)", "$1:00")
    full = F.regexp_replace(full, r"([+-]\d\d)(\d\d)$", "$1:$2")
    from_text = F.unix_micros(F.when(looks, full).try_cast("timestamp"))
    return F.when(number.isNull(), from_text).otherwise(from_number)


# --- what is counted ----------------------------------------------------------------------------------------


def narrow(rows: DataFrame, *others: str) -> DataFrame:
    """What of the drop's rows is counted, and other columns of theirs."""
    stamp = F.unix_micros("ts")
    return rows.select(
        F.timestamp_micros(stamp - F.pmod(stamp, F.lit(MINUTE_US))).alias("minute"),
        F.col("topic"),
        F.col("source"),
        F.octet_length("payload").cast("long").alias("bytes"),
        ((stamp - sent_us()) / 1000).alias("latency_ms"),
        *others,
    )


def per_minute(rows: DataFrame) -> DataFrame:
    """The rollup of rows that narrow() has made."""
    latency = F.percentile_approx("latency_ms", list(PERCENTILES.values()), ACCURACY)
    counted_rows = rows.groupBy("minute", "topic").agg(
        F.count(F.lit(1)).alias("messages"),
        F.sum("bytes").alias("bytes"),
        F.count_distinct("source").alias("sources"),
        F.count("latency_ms").alias("timed"),
        latency.alias("latency"),
    )
    percentiles = [F.col("latency")[place].alias(name) for place, name in enumerate(PERCENTILES)]
    return counted_rows.select("minute", "topic", "messages", "bytes", "sources", "timed", *percentiles)


def run(
    spark: SparkSession,
    drop: str,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    compacted: str | None = None,
) -> DataFrame:
    """The rollup of what is in the drop, a row per minute and topic."""
    return per_minute(narrow(read_drop(spark, drop, since=since, until=until, compacted=compacted)))


# --- the stream ---------------------------------------------------------------------------------------------


@dataclass
class Rolled:
    """What a run has done."""

    rows: int = 0
    """Messages that were read for the first time."""
    minutes: int = 0
    """Rows that were written, one for each topic of a minute."""
    late: int = 0
    """Messages whose minute had been written before."""


def _end_of_minute(moment: int) -> int:
    return moment - moment % MINUTE_US + MINUTE_US


def _over(watermark: int | None) -> Column:
    """Whether a row's minute is over by then."""
    return F.lit(False) if watermark is None else F.unix_micros("minute") + MINUTE_US <= watermark


class Rollup:
    """A rollup that follows the drop: `query` is its stream."""

    def __init__(
        self,
        spark: SparkSession,
        drop: str,
        out: str,
        *,
        delay: timedelta = timedelta(minutes=10),
        every: timedelta | None = None,
        checkpoint: str | None = None,
        max_files: int = 1000,
        moved: bool = False,
        on_batch: Callable[[int, Rolled], None] | None = None,
    ) -> None:
        self.rolled = Rolled()
        self.failure: BaseException | None = None
        self._delay = delay // timedelta(microseconds=1)
        self._on_batch = on_batch
        rows = stream_drop(spark, drop, max_files_per_trigger=max_files)
        self.table = Table(spark, out)
        self.table.open()
        try:
            self._drop = feed.checked_drop(Files(spark, drop), self.table, moved)
            self._forget()
            self.query: StreamingQuery = feed.start(
                rows,
                self.table,
                self._handle,
                name=f"headrace rollup {out}",
                checkpoint=checkpoint,
                every=every,
            )
        except BaseException:
            self.table.close()
            raise

    def wait(self) -> Rolled:
        """Waits until the stream has ended, and gives the table free."""
        try:
            wait_for(self.query, lambda: self.failure)
        finally:
            self.table.close()
        return self.rolled

    def _handle(self, rows: DataFrame, run: str, number: int) -> None:
        try:
            rolled = self._roll(rows, run, number)
        except BaseException as error:
            self.failure = error
            raise
        if rolled is not None:
            self.rolled.rows += rolled.rows
            self.rolled.minutes += rolled.minutes
            self.rolled.late += rolled.late
            if self._on_batch is not None:
                self._on_batch(number, rolled)

    def _roll(self, rows: DataFrame, run: str, number: int) -> Rolled | None:
        state = self.table.state
        files = self.table.files
        name = f"{state.sequence + 1}"
        batch = feed.written(
            rows, state.ranges, lambda new: feed.write_parquet(narrow(new), files.at(f"{OPEN}/{name}"))
        )
        if batch.period is None:
            files.delete(f"{OPEN}/{name}")
            return None
        oldest, newest = batch.period
        before: int | None = state.notes.get("watermark")
        now = newest - self._delay if before is None else max(before, newest - self._delay)
        spark = rows.sparkSession
        staged = f"{run}-{number}"
        rolled = Rolled(batch.count)
        still_open: dict[str, int] = {**state.notes.get("open", {}), name: newest}
        if now != before:
            kept = spark.read.parquet(*(files.at(f"{OPEN}/{one}") for one in still_open))
            due = per_minute(kept.where(~_over(before) & _over(now)))
            rolled.minutes = self._stage(staged, MINUTES, due).count()
        if before is not None and _end_of_minute(oldest) <= before:
            late = (
                spark.read.parquet(files.at(f"{OPEN}/{name}")).where(_over(before)).groupBy("minute", "topic")
            )
            counts = late.agg(F.count(F.lit(1)).alias("messages"), F.sum("bytes").alias("bytes"))
            rolled.late = self._stage(staged, LATE, counts).agg(F.sum("messages")).collect()[0][0]
        left = {one: last for one, last in still_open.items() if _end_of_minute(last) > now}
        self.table.commit(
            staged,
            run=run,
            batch=number,
            rows=rolled.minutes,
            schema=SCHEMA,
            ranges=feed.covered(files, batch, state.ranges),
            notes={
                "drop": self._drop,
                "watermark": now,
                "open": left,
                "late": state.notes.get("late", 0) + rolled.late,
            },
        )
        self._forget()
        return rolled

    def _stage(self, staged: str, output: str, rows: DataFrame) -> DataFrame:
        """Writes an output of a batch, and gives what was written."""
        path = self.table.staging(f"{staged}/output={output}")
        feed.write_parquet(rows.coalesce(1), path)  # a batch's minutes and topics are few: one file is enough
        return rows.sparkSession.read.parquet(path)

    def _forget(self) -> None:
        """Removes rows of minutes that were written, and of batches that were never committed."""
        known = self.table.state.notes.get("open", {})
        for name in self.table.files.list_names(OPEN):
            if name not in known:
                self.table.files.delete(f"{OPEN}/{name}")


def read_rollup(spark: SparkSession, path: str) -> DataFrame:
    """What the stream has written: a row per minute and topic."""
    return read_table(spark, path).where(F.col("output") == MINUTES).drop("output")


def read_late(spark: SparkSession, path: str) -> DataFrame:
    """What came too late for the stream: messages and bytes per minute and topic."""
    late = read_table(spark, path).where(F.col("output") == LATE)
    return late.groupBy("minute", "topic").agg(
        F.sum("messages").alias("messages"), F.sum("bytes").alias("bytes")
    )


# --- the shell ----------------------------------------------------------------------------------------------


def show(rows: DataFrame, limit: int) -> None:
    rows.orderBy("minute", "topic").show(limit, truncate=False)


def write(rows: DataFrame, out: str, overwrite: bool) -> None:
    """Writes a result of a batch job."""
    files = Files(rows.sparkSession, out)
    if files.exists("") and not overwrite:
        raise JobError(f"{out} is there already; --overwrite replaces it")
    if files.exists("_headrace"):
        raise JobError(f"{out} is the table of a stream, which a batch job does not replace")
    feed.write_parquet(rows, files.root)


@click.command("rollup", short_help="Traffic and latency per topic and minute.")
@click.argument("drop")
@click.argument("out", required=False)
@selection_options
@compacted_option
@click.option("--show", "show_rows", is_flag=True, help="Print the result instead of writing it to OUT.")
@click.option(
    "--limit", metavar="N", type=click.IntRange(1), default=50, show_default=True, help="Rows to print."
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it is there.")
@click.option("--stream", is_flag=True, help="Follow the drop, and write each minute when it is over.")
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
    "--delay",
    metavar="TIME",
    type=Duration(),
    default="10m",
    show_default=True,
    help="With --stream: how long a minute waits for late messages.",
)
@click.option(
    "--checkpoint", metavar="DIR", help="With --stream: where it keeps its place.  [default: in OUT]"
)
@click.option("--moved", is_flag=True, help="With --stream: the drop is the same in another place.")
@with_session
def command(
    session: Session,
    drop: str,
    out: str | None,
    since: datetime | None,
    until: datetime | None,
    compacted: str | None,
    show_rows: bool,
    limit: int,
    overwrite: bool,
    stream: bool,
    once: bool,
    every: timedelta,
    delay: timedelta,
    checkpoint: str | None,
    moved: bool,
) -> None:
    """Count the messages of a DROP per topic and minute, and write the result to OUT as Parquet.

    \b
    minute, topic
    messages, bytes   how many, and how large their payloads are together
    sources           how many different senders
    timed             how many gave a time of their own, so that they have a latency
    p50_ms … p99_ms   percentiles of the time of append minus the sender's own

    The sender's own time is the header "ts", or else the field "ts" of a JSON payload: seconds, milli-, micro- or
    nanoseconds since the epoch, or an ISO 8601 time.

    With --stream OUT has two directories: output=minutes, and output=late for messages that came after their
    minute was written.
    """
    if out is None and (stream or not show_rows):
        raise click.UsageError(
            "say where the result goes (OUT), or --show" if not stream else "--stream needs OUT"
        )
    if stream and (since or until or compacted or overwrite):
        raise click.UsageError(
            "--since, --until, --compacted and --overwrite are for a rollup without --stream"
        )
    spark = session.open()
    if not stream:
        rows = run(spark, drop, since=since, until=until, compacted=compacted)
        if show_rows:
            show(rows, limit)
        else:
            assert out is not None
            write(rows, out, overwrite)
            click.echo(f"wrote {out}")
        return
    assert out is not None

    def tell(number: int, rolled: Rolled) -> None:
        click.echo(f"batch {number}: {summary(rolled)}", err=True)

    rollup = Rollup(
        spark,
        drop,
        out,
        delay=delay,
        every=None if once else every,
        checkpoint=checkpoint,
        moved=moved,
        on_batch=tell,
    )
    click.echo(summary(rollup.wait()))
    if show_rows:
        show(read_rollup(spark, out), limit)


def summary(rolled: Rolled) -> str:
    late = f", {rolled.late:,} late" if rolled.late else ""
    return f"{counted(rolled.rows, 'message')}, {counted(rolled.minutes, 'row')} written{late}"


def main(argv: Sequence[str] | None = None) -> None:
    run_main(command, argv)


if __name__ == "__main__":
    # Under its own name, so that what it sends to executors is found there.
    from headrace.spark.jobs import rollup

    rollup.main()
