"""Takes a drop into a bronze table, each message once: `headrace spark ingest`.

The table is a directory of Parquet files by date and hour, with all columns of the drop and `file`, the name of the
drop's file that a row came from. What was taken is known from the table alone, so neither a kill at any moment nor a
lost checkpoint loses a message or brings one twice. Knows nothing of what the payloads are.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import click
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from headrace.spark import stream_drop
from headrace.spark.jobs import Duration, Session, counted, feed, run_main, wait_for, with_session
from headrace.spark.jobs.hadoop import Files
from headrace.spark.jobs.table import Table, read_table

__all__ = ["Ingest", "Taken", "command", "main", "read_table", "run"]

log = logging.getLogger(__name__)


@dataclass
class Taken:
    """What a run has done."""

    batches: int = 0
    rows: int = 0
    files: int = 0
    """Files of the drop that rows came from."""
    skipped: int = 0
    """Rows that were in the table before."""
    strange: int = 0
    """Files with rows that their names do not vouch for; these rows were left out."""


class Ingest:
    """An ingest that is under way: `query` is its stream."""

    def __init__(
        self,
        spark: SparkSession,
        drop: str,
        table: str,
        *,
        checkpoint: str | None = None,
        every: timedelta | None = None,
        payload_json: bool = False,
        max_files: int = 1000,
        moved: bool = False,
        on_batch: Callable[[int, feed.Batch], None] | None = None,
    ) -> None:
        self.taken = Taken()
        self.failure: BaseException | None = None
        self._on_batch = on_batch
        rows = stream_drop(spark, drop, payload_json=payload_json, max_files_per_trigger=max_files)
        self.table = Table(spark, table)
        self.table.open()
        try:
            self._drop = feed.checked_drop(Files(spark, drop), self.table, moved)
            self.query: StreamingQuery = feed.start(
                rows,
                self.table,
                self._handle,
                name=f"headrace ingest {table}",
                checkpoint=checkpoint,
                every=every,
            )
        except BaseException:
            self.table.close()
            raise

    def wait(self) -> Taken:
        """Waits until the stream has ended, and gives the table free."""
        try:
            wait_for(self.query, lambda: self.failure)
        finally:
            self.table.close()
        return self.taken

    def stop(self) -> Taken:
        self.query.stop()
        self.table.close()
        return self.taken

    def _handle(self, rows: DataFrame, run: str, number: int) -> None:
        try:
            self._take(rows, run, number)
        except BaseException as error:
            self.failure = error
            raise

    def _take(self, rows: DataFrame, run: str, number: int) -> None:
        taken = self.table.state.ranges
        staged = f"{run}-{number}"
        path = self.table.staging(staged)
        batch = feed.written(rows, taken, lambda new: feed.write_parquet(new, path, "date", "hour"))
        self.taken.skipped += batch.skipped
        if batch.strange:
            self.taken.strange += len(batch.strange)
            log.warning("left out rows that the names of their files do not vouch for: %s", batch.strange)
        if not batch.count:
            self.table.files.delete(f"_staging/{staged}")
            return
        self.table.commit(
            staged,
            run=run,
            batch=number,
            rows=batch.count,
            schema=batch.rows.schema,
            ranges=feed.covered(self.table.files, batch, taken),
            notes={"drop": self._drop},
        )
        self.taken.batches += 1
        self.taken.rows += batch.count
        self.taken.files += len(batch.files)
        if self._on_batch is not None:
            self._on_batch(number, batch)


def run(
    spark: SparkSession,
    drop: str,
    table: str,
    *,
    checkpoint: str | None = None,
    every: timedelta | None = None,
    payload_json: bool = False,
    max_files: int = 1000,
    moved: bool = False,
    on_batch: Callable[[int, feed.Batch], None] | None = None,
) -> Taken:
    """Takes what is in the drop into the table and ends, or with `every` goes on until it is stopped."""
    return Ingest(
        spark,
        drop,
        table,
        checkpoint=checkpoint,
        every=every,
        payload_json=payload_json,
        max_files=max_files,
        moved=moved,
        on_batch=on_batch,
    ).wait()


@click.command("ingest", short_help="Take a drop into a table, each message once.")
@click.argument("drop")
@click.argument("table")
@click.option("--once", is_flag=True, help="Take what is there now, then end.  [default: go on]")
@click.option(
    "--every",
    metavar="TIME",
    type=Duration(),
    default="10s",
    show_default=True,
    help="How often to look for new files.",
)
@click.option(
    "--checkpoint", metavar="DIR", help="Where the stream keeps its place.  [default: inside the table]"
)
@click.option(
    "--max-files",
    metavar="N",
    type=click.IntRange(1),
    default=1000,
    show_default=True,
    help="Files of the drop in one batch, at most.",
)
@click.option("--payload-json", is_flag=True, help="The drop has the column payload_json; take it, too.")
@click.option("--moved", is_flag=True, help="The drop is the same as before in another place.")
@click.option("--quiet", "-q", is_flag=True, help="No line for each batch.")
@with_session
def command(
    session: Session,
    drop: str,
    table: str,
    once: bool,
    every: timedelta,
    checkpoint: str | None,
    max_files: int,
    payload_json: bool,
    moved: bool,
    quiet: bool,
) -> None:
    """Take the messages of a DROP directory into a TABLE, each once.

    DROP and TABLE are paths or URIs of any filesystem that Spark reads and writes. The table is a directory of
    Parquet files by date and hour. It may be killed at any moment and started again; its checkpoint may be
    deleted: what is in the table is known from the table itself.

    Ctrl-C ends it. The exit code is 0 then, 1 for an error and 2 for a wrong command line.
    """

    def tell(number: int, batch: feed.Batch) -> None:
        if not quiet:
            rows, files = counted(batch.count, "message"), counted(len(batch.files), "file")
            click.echo(f"batch {number}: {rows} from {files}", err=True)

    taken = run(
        session.open(),
        drop,
        table,
        checkpoint=checkpoint,
        every=None if once else every,
        payload_json=payload_json,
        max_files=max_files,
        moved=moved,
        on_batch=tell,
    )
    before = f"; {taken.skipped:,} were there before" if taken.skipped else ""
    click.echo(
        f"took {counted(taken.rows, 'message')} in {counted(taken.batches, 'batch', 'batches')}{before}"
    )
    if taken.strange:
        click.echo(
            f"{counted(taken.strange, 'file')} had rows that the names do not vouch for; they were left out",
            err=True,
        )


def main(argv: Sequence[str] | None = None) -> None:
    run_main(command, argv)


if __name__ == "__main__":
    # Under its own name, so that what it sends to executors is found there.
    from headrace.spark.jobs import ingest

    ingest.main()
