"""Publishes messages of a drop into a gateway again: `headrace spark replay`. In order per topic, topics in parallel,
each message confirmed.

BlipMQ takes a topic and a payload; what else the drop knows of a message (headers, parts, kind, source) is not sent,
and the new gateway gives it an offset and a time of its own.

Confirmed is at least once: the confirmation of a message that has arrived may be lost, and then it is sent again. A
task that Spark tries a second time, and a job that is run again, would publish everything twice. So a second try is
refused (with a session of one's own, set ONE_TRY for it, too), unless `state` names a directory in which each topic's
progress is kept after every confirmed portion: then both go on from there, and what may come twice is the portion that
was under way, PORTION messages of a topic at most.
"""

import asyncio
import functools
import hashlib
import json
import os
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click
import pyarrow as pa
from pyarrow import fs
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.clients.blipmq import BlipmqClient, RefusedMessages
from headrace.clients.shell import good_address, key_option
from headrace.errors import HeadraceError
from headrace.spark import read_drop
from headrace.spark.jobs import (
    JobError,
    Session,
    compacted_option,
    counted,
    run_main,
    selection_options,
    topic_matches,
    with_session,
)

PORTION: Final = 500  # messages that are confirmed together
TIMEOUT_SECONDS: Final = 30.0

# Within a log time never goes back, so this is the order of each log, too, and that of several gateways together.
ORDER: Final = ("topic", "ts", "node", "log", "offset")

# A stage that Spark runs again, because a machine with sorted messages was lost, looks to its tasks like the first.
ONE_TRY: Final = {"spark.task.maxFailures": "1", "spark.stage.maxConsecutiveAttempts": "1"}

_RESULT: Final = "topic string, published long, skipped long, failure string"


@dataclass(frozen=True)
class Target:
    """Where messages go, and how."""

    at: str
    key: str
    tls: bool = False
    tls_ca: str | None = None
    prefix: str = ""
    rate: float | None = None
    """Messages a second, of one task."""
    state: str | None = None


@dataclass
class Replayed:
    """What a run has done, by topic of the drop."""

    published: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    """Messages that an earlier run had published, as its state says."""

    @property
    def messages(self) -> int:
        return sum(self.published.values())


# --- progress -----------------------------------------------------------------------------------------------


class Progress:
    """How far a topic has come, per log, in a file of its own. Any filesystem that pyarrow knows will do."""

    def __init__(self, directory: str | None, target: Target, topic: str) -> None:
        self._place: fs.FileSystem | None = None
        self._path = ""
        self._identity = {"topic": topic, "prefix": target.prefix, "at": target.at}
        self.reached: dict[str, int] = {}
        """By node and log: the last offset that was confirmed."""
        if directory is None:
            return
        plain = not urlsplit(directory).scheme
        self._place, base = fs.FileSystem.from_uri(os.path.abspath(directory) if plain else directory)
        self._place.create_dir(base, recursive=True)
        name = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()[:32]
        self._path = f"{base}/{name}.json"
        if self._place.get_file_info(self._path).type == fs.FileType.File:
            with self._place.open_input_stream(self._path) as file:
                self.reached = json.loads(file.read())["reached"]

    def has(self, node: str, log: str, offset: int) -> bool:
        return offset <= self.reached.get(f"{node}/{log}", -1)

    def advance(self, node: str, log: str, offset: int) -> None:
        self.reached[f"{node}/{log}"] = offset

    def save(self) -> None:
        if self._place is None:
            return
        data = json.dumps({**self._identity, "reached": self.reached}).encode()
        if isinstance(self._place, fs.LocalFileSystem):
            draft = Path(f"{self._path}.tmp")
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
        else:
            with self._place.open_output_stream(self._path) as stream:
                stream.write(data)


# --- what a task does ---------------------------------------------------------------------------------------


class Task:
    """Publishes the messages of a partition, topic after topic."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.published: dict[str, int] = {}
        self.skipped: dict[str, int] = {}
        self.failure: str | None = None
        self._begun = time.monotonic()
        self._sent = 0

    async def run(self, batches: Iterable[pa.RecordBatch]) -> None:
        target = self._target
        context = ssl.create_default_context(cafile=target.tls_ca) if target.tls or target.tls_ca else None
        client: BlipmqClient | None = None
        progress: Progress | None = None
        topic = ""
        try:
            for batch in batches:
                rows = zip(*(batch.column(name).to_pylist() for name in _SENT), strict=True)
                for portion_topic, portion in _portions(rows, self._portion_size):
                    if progress is None or portion_topic != topic:
                        topic = portion_topic
                        progress = Progress(target.state, target, topic)
                        self.published.setdefault(topic, 0)
                        self.skipped.setdefault(topic, 0)
                    new = [row for row in portion if not progress.has(*row[1:4])]
                    self.skipped[topic] += len(portion) - len(new)
                    if not new:
                        continue
                    if client is None:
                        client = BlipmqClient(target.at, key=target.key, tls=context, timeout=TIMEOUT_SECONDS)
                        await client.connect()
                    await self._pace(len(new))
                    await client.publish_many(target.prefix + topic, [row[4] for row in new], qos=1)
                    self.published[topic] += len(new)
                    for _, node, log, offset, _ in new:
                        progress.advance(node, log, offset)
                    progress.save()
        except RefusedMessages as error:
            first = min(error.refused)
            self.failure = (
                f"the gateway refused {len(error.refused)} messages to {topic!r}: {error.refused[first]}"
            )
        except (HeadraceError, OSError, ValueError) as error:
            self.failure = f"{topic}: {error}" if topic else str(error)
        finally:
            if client is not None and client.connected:
                await client.close()

    @property
    def _portion_size(self) -> int:
        # A slow rate must not come in bursts of many seconds.
        return PORTION if self._target.rate is None else max(1, min(PORTION, int(self._target.rate)))

    async def _pace(self, count: int) -> None:
        if self._target.rate is not None:
            due = self._begun + self._sent / self._target.rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._sent += count


_SENT: Final = ("topic", "node", "log", "offset", "payload")


def _portions(rows: Iterable[tuple[Any, ...]], size: int) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """Rows in portions of one topic each, in order."""
    portion: list[tuple[Any, ...]] = []
    for row in rows:
        if portion and (row[0] != portion[0][0] or len(portion) == size):
            yield portion[0][0], portion
            portion = []
        portion.append(row)
    if portion:
        yield portion[0][0], portion


def _publish(target: Target) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        work = Task(target)
        context = TaskContext.get()
        assert context is not None
        if target.state is None and context.attemptNumber():
            work.failure = (
                "a task failed and was tried again, but what it had published is not known;"
                " give a directory with --state to have it go on from there"
            )
        else:
            asyncio.run(work.run(batches))
        rows = [
            {"topic": topic, "published": count, "skipped": work.skipped[topic], "failure": None}
            for topic, count in work.published.items()
        ]
        if work.failure is not None:
            rows.append({"topic": None, "published": 0, "skipped": 0, "failure": work.failure})
        yield pa.RecordBatch.from_pylist(
            rows,
            schema=pa.schema(
                [
                    ("topic", pa.string()),
                    ("published", pa.int64()),
                    ("skipped", pa.int64()),
                    ("failure", pa.string()),
                ]
            ),
        )

    return task


# --- the job ------------------------------------------------------------------------------------------------


class ReplayFailed(JobError):
    """Not everything was published; `replayed` says what was."""

    def __init__(self, text: str, replayed: Replayed) -> None:
        super().__init__(text)
        self.replayed = replayed


def select(
    spark: SparkSession,
    drop: str,
    *,
    topics: Sequence[str] = ("#",),
    since: datetime | None = None,
    until: datetime | None = None,
    compacted: str | None = None,
) -> DataFrame:
    """The messages that would be published, in no order."""
    rows = read_drop(spark, drop, since=since, until=until, compacted=compacted)
    return rows if "#" in topics else rows.where(topic_matches(F.col("topic"), topics))


def run(
    spark: SparkSession,
    messages: DataFrame,
    at: str,
    *,
    key: str,
    prefix: str = "",
    rate: float | None = None,
    parallel: int | None = None,
    state: str | None = None,
    tls: bool = False,
    tls_ca: str | None = None,
) -> Replayed:
    """Publishes messages (rows of a drop) to the gateway `at`. `rate` is for all of the `parallel` tasks together."""
    if spark.conf.get("spark.speculation", "false") == "true":
        raise JobError("spark.speculation would publish messages twice; turn it off for a replay")
    tasks = parallel or spark.sparkContext.defaultParallelism
    target = Target(at, key, tls, tls_ca, prefix, None if rate is None else rate / tasks, state)
    chosen = messages.select(*ORDER, "payload").repartition(tasks, "topic").sortWithinPartitions(*ORDER)
    replayed = Replayed()
    failures = []
    for row in chosen.mapInArrow(_publish(target), _RESULT).collect():
        if row.failure is not None:
            failures.append(row.failure)
        else:
            replayed.published[row.topic] = replayed.published.get(row.topic, 0) + row.published
            replayed.skipped[row.topic] = replayed.skipped.get(row.topic, 0) + row.skipped
    if failures:
        done = f"{counted(replayed.messages, 'message')} had been confirmed before"
        advice = (
            "run it again with the same --state to go on"
            if state
            else "--state lets a rerun go on from there"
        )
        raise ReplayFailed(f"{failures[0]} ({done}; {advice})", replayed)
    return replayed


@click.command("replay", short_help="Publish messages of a drop again.")
@click.argument("drop")
@click.option(
    "--topic",
    "topics",
    metavar="FILTER",
    multiple=True,
    default=("#",),
    show_default=True,
    help='Only these topics: "*" is one word, "#" any number; may be repeated.',
)
@selection_options
@compacted_option
@click.option(
    "--at",
    metavar="HOST:PORT",
    callback=good_address,
    default="127.0.0.1:5555",
    show_default=True,
    help="The gateway's BlipMQ address, as the executors reach it.",
)
@key_option
@click.option("--tls", is_flag=True, help="Encrypt.")
@click.option(
    "--tls-ca", metavar="FILE", help="Trust the authorities in FILE, a path on the executors; encrypts."
)
@click.option("--prefix", default="", help="Put in front of each topic, like replay.")
@click.option(
    "--rate", metavar="N", type=click.FloatRange(min=0, min_open=True), help="Messages a second in all."
)
@click.option(
    "--parallel",
    metavar="N",
    type=click.IntRange(1),
    help="Tasks; each publishes its share of the topics.  [default: one per core]",
)
@click.option(
    "--state",
    metavar="DIR",
    help="Keep each topic's progress in DIR, which all executors share, so that a rerun goes on from there.",
)
@click.option("--dry-run", is_flag=True, help="Publish nothing; say how many messages there are.")
@functools.partial(with_session, settings=ONE_TRY)
def command(
    session: Session,
    drop: str,
    topics: tuple[str, ...],
    since: datetime | None,
    until: datetime | None,
    compacted: str | None,
    at: str,
    key: str,
    tls: bool,
    tls_ca: str | None,
    prefix: str,
    rate: float | None,
    parallel: int | None,
    state: str | None,
    dry_run: bool,
) -> None:
    """Publish messages of a DROP into a gateway, by BlipMQ with QoS 1.

    The messages of a topic go in the order in which they were appended, topics go in parallel. Only topic and
    payload are sent.

    Each message is confirmed, that is at least once. Without --state a failed run cannot be continued, and running
    it again publishes all of it again. With --state a run goes on after the last message that is known to be
    confirmed; up to 500 messages of a topic that was under way may then come twice.
    """
    spark = session.open()
    messages = select(spark, drop, topics=topics, since=since, until=until, compacted=compacted)
    if dry_run:
        found = {row.topic: row["count"] for row in messages.groupBy("topic").count().collect()}
        _tell(found, prefix)
        click.echo(
            f"would publish {counted(sum(found.values()), 'message')} to {counted(len(found), 'topic')}"
        )
        return
    replayed = run(
        spark,
        messages,
        at,
        key=key,
        prefix=prefix,
        rate=rate,
        parallel=parallel,
        state=state,
        tls=tls,
        tls_ca=tls_ca,
    )
    _tell(replayed.published, prefix)
    skipped = sum(replayed.skipped.values())
    before = f"; {counted(skipped, 'message')} had been published before" if skipped else ""
    click.echo(
        f"published {counted(replayed.messages, 'message')} to {counted(len(replayed.published), 'topic')}{before}"
    )


def _tell(counts: dict[str, int], prefix: str) -> None:
    for topic, count in sorted(counts.items()):
        click.echo(f"{count:>12,}  {prefix}{topic}")


def main(argv: Sequence[str] | None = None) -> None:
    run_main(command, argv)


if __name__ == "__main__":
    # Under its own name, so that what it sends to executors is found there.
    from headrace.spark.jobs import replay

    replay.main()
