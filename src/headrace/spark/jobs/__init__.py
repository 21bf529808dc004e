"""Jobs on a drop directory, one module each: `headrace spark <job>`, or its file with spark-submit. What they share is
here: the options that say where Spark is, the session that they make, and what a selection by topic and time means.

Each module has `run(spark, ...)` for a session of one's own, and `command` and `main` for the shell."""

import functools
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import FrameType
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import click
from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from headrace.errors import HeadraceError
from headrace.spark import local_session

P = ParamSpec("P")
T = TypeVar("T")

POLL_SECONDS: Final = 1  # how soon a stream notices that it is to end

INTERRUPTED: Final = 128 + signal.SIGINT  # the exit code, as a shell shows the end by this signal

_DURATION: Final = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>ms|s|min|m|h|d)")
_UNITS: Final = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


class JobError(HeadraceError):
    """A job was refused or has failed; its text is for the person who started it."""


# --- the shell ----------------------------------------------------------------------------------------------


class Duration(click.ParamType[timedelta]):
    """A time span: "10s", "5m", "1h"."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        match = _DURATION.fullmatch(value)
        if match is None or not float(match["number"]):
            self.fail(f'{value!r} is no time span like "10s", "5m" or "1h"', param, ctx)
        return timedelta(seconds=float(match["number"]) * _UNITS[match["unit"]])


class Moment(click.ParamType[datetime]):
    """A date or a time in ISO 8601; UTC where it names no zone."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f'{value!r} is no date or time like "2026-01-31" or "2026-01-31T07:30Z"', param, ctx)
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)


def _setting(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    settings = {}
    for value in values:
        key, separator, rest = value.partition("=")
        if not separator or not key:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE", ctx, param)
        settings[key] = rest
    return settings


class Session:
    """The session that the shell asks for; nothing starts before it is opened."""

    def __init__(self, name: str, master: str | None, settings: Mapping[str, str]) -> None:
        self._name = name
        self._master = master
        self._settings = settings
        self._spark: SparkSession | None = None

    def open(self) -> SparkSession:
        """Under spark-submit the submit decides, but for what is said here."""
        if "PYSPARK_GATEWAY_PORT" in os.environ and self._master is None:
            builder = SparkSession.Builder().appName(f"headrace {self._name}")
            for key, value in {"spark.sql.session.timeZone": "UTC", **self._settings}.items():
                builder = builder.config(key, value)
            self._spark = builder.getOrCreate()
        else:
            self._spark = local_session(
                f"headrace {self._name}",
                master=self._master or "local[*]",
                config={"spark.log.level": "ERROR", **self._settings},
            )
        return self._spark

    def close(self) -> None:
        if self._spark is not None:
            with _undisturbed():
                self._spark.stop()


def with_session(
    command: Callable[Concatenate[Session, P], T], settings: Mapping[str, str] | None = None
) -> Callable[..., T]:
    """Adds --master and --conf; the command gets the session that they describe, which ends with it."""

    @functools.wraps(command)
    def with_spark(*args: Any, master: str | None, conf: dict[str, str], **rest: Any) -> T:
        name = click.get_current_context().info_name or ""
        session = Session(name, master, {**(settings or {}), **conf})
        try:
            return command(session, *args, **rest)
        finally:
            session.close()

    options: list[Callable[[Callable[..., T]], Callable[..., T]]] = [
        click.option(
            "--master",
            metavar="URL",
            help="Spark's master: spark://HOST:PORT, yarn, k8s://…  [default: local[*], or spark-submit's]",
        ),
        click.option(
            "--conf",
            metavar="KEY=VALUE",
            multiple=True,
            callback=_setting,
            help="A setting of Spark's; may be repeated.",
        ),
    ]
    return functools.reduce(lambda decorated, option: option(decorated), reversed(options), with_spark)


def selection_options(command: Callable[P, T]) -> Callable[P, T]:
    """Adds --since and --until."""
    since = click.option(
        "--since", metavar="TIME", type=Moment(), help="Only messages from this moment on (UTC)."
    )
    until = click.option("--until", metavar="TIME", type=Moment(), help="Only messages before this moment.")
    return since(until(command))


compacted_option = click.option(
    "--compacted", metavar="DIR", help="Where the drop's compacted files are, to be read in their stead."
)


def run_main(command: click.Command, argv: Sequence[str] | None) -> None:
    """Runs a job's command as a program of its own."""
    try:
        command.main(args=None if argv is None else list(argv), standalone_mode=False)
    except HeadraceError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)


# --- streams ------------------------------------------------------------------------------------------------


def trigger(writer: DataStreamWriter, every: timedelta | None) -> DataStreamWriter:
    """Has a stream look for new files every so often, or without that take what is there now and end."""
    if every is None:
        return writer.trigger(availableNow=True)
    return writer.trigger(processingTime=f"{every / timedelta(milliseconds=1):.0f} milliseconds")


def wait_for(query: StreamingQuery, failure: Callable[[], BaseException | None]) -> None:
    """Waits until a stream has ended. Ctrl-C and SIGTERM stop it; what its batches have raised is raised here."""
    asked = threading.Event()

    # It only takes note: an exception in the midst of a call into the JVM would break the connection to it.
    def stop(number: int, frame: FrameType | None) -> None:
        asked.set()

    previous = {}
    if threading.current_thread() is threading.main_thread():  # elsewhere signals are somebody else's
        previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not asked.is_set() and not query.awaitTermination(POLL_SECONDS):
            pass
        if asked.is_set():
            query.stop()
    except StreamingQueryException:
        raised = failure()
        if isinstance(raised, HeadraceError):
            raise raised from None
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _undisturbed() -> Generator[None]:
    """A second Ctrl-C must not break off what the first has begun."""
    try:
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


# --- selections ---------------------------------------------------------------------------------------------


def topic_pattern(filter: str) -> str:
    """A topic filter as a regular expression: `*` is exactly one word, `#` any number of words, none included."""
    words = filter.split(".")
    if set(words) == {"#"}:
        return r"(?s)\A.*\z"
    pattern = ""
    begun = False  # a word that is not "#" was there, so the next one has a dot before it
    for word in words:
        if word == "#":
            pattern += r"(?:\.[^.]*)*" if begun else r"(?:[^.]*\.)*"
        else:
            one = "[^.]*" if word == "*" else re.escape(word)
            pattern += rf"\.{one}" if begun else one
            begun = True
    return rf"(?s)\A{pattern}\z"


def topic_matches(topic: Column, filters: Iterable[str]) -> Column:
    """Whether any of these filters matches."""
    condition = F.lit(False)
    for filter in filters:
        exact = not {"*", "#"} & set(filter.split("."))
        condition |= topic == F.lit(filter) if exact else topic.rlike(topic_pattern(filter))
    return condition


# --- words --------------------------------------------------------------------------------------------------


def counted(number: int, one: str, many: str | None = None) -> str:
    """ "1 message", "1,200 messages"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
