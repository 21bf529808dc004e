"""`headrace demo`: a gateway with devices and subscribers on all five protocols, shown live, and the proof at the end
that its numbers add up. What happens in it is in headrace.demo."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import aiohttp
import click
from rich.console import Console
from rich.live import Live

from headrace.admin.terminal import Moment
from headrace.cli.spark import SparkMissing
from headrace.clients.admin import NoAnswer, ask_status, asker
from headrace.clients.shell import INTERRUPTED, run
from headrace.demo import plant as plants
from headrace.demo.gateway import Gateway, GatewayFailed
from headrace.demo.plant import Plant
from headrace.demo.proof import prove
from headrace.demo.rollup import Rollup, RollupFailed
from headrace.demo.view import Screen, show_summary, wrongs
from headrace.drop.catalog import Entry, catalog
from headrace.drop.filesystems import place
from headrace.errors import HeadraceError

LOOK_SECONDS: Final = 1.0
ROLLUP_ROWS: Final = 20  # the plant's own topics; behind them each answer to a request has its own
PLAIN_WIDTH: Final = 130  # of the summary, where there is no terminal


class Demo:
    """One run."""

    def __init__(self, home: Path, seconds: float, rate: float, live: bool, spark: bool) -> None:
        self._home = home
        self._seconds = seconds
        self._rate = rate
        self._live = live
        self._spark = spark
        self._rollup: Rollup | None = None
        self._console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
        self._stop = asyncio.Event()
        self._begun = 0.0
        self._published_for = 0.0  # seconds

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted)
        self._main = asyncio.current_task()
        self._console.print("starting a gateway ...", highlight=False)
        gateway = await Gateway.start(self._home, plants.CONFIG)
        try:
            places = "  ".join(f"{name} {where}" for name, where in gateway.places.items())
            self._console.print(f"it listens: {places}", highlight=False, soft_wrap=True)
            plant = Plant(gateway.places, self._rate)
            if self._spark:
                self._rollup = await Rollup.start(gateway.data / "drop", self._home / "rollup", self._heard)
            await self._watch(gateway, plant)
            await gateway.stop()
            proof = await asyncio.to_thread(prove, gateway.data)
            if self._rollup is not None:
                await self._rollup.take(proof.verified.rows)
                await self._rollup.stop()
        except BaseException:
            if self._rollup is not None:
                await self._rollup.kill()
            await gateway.kill()
            raise
        rolled = self._rollup.messages if self._rollup is not None else None
        wrong = wrongs(plant, proof, rolled)
        show_summary(self._console, plant, proof, self._published_for, rolled, wrong)
        return 1 if wrong else 0

    def _interrupted(self) -> None:
        if self._stop.is_set() and self._main is not None:
            self._main.cancel()  # the second time
        self._stop.set()

    async def _watch(self, gateway: Gateway, plant: Plant) -> None:
        """Runs the plant, and shows it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                guards = [tasks.create_task(gateway.ended())]
                if self._rollup is not None:
                    guards.append(tasks.create_task(self._rollup.ended()))
                clock = tasks.create_task(self._end_in_time())
                living = tasks.create_task(plant.live(self._stop, self._begin))
                shown = tasks.create_task(self._show(gateway, plant))
                await living
                for task in (*guards, clock, shown):
                    task.cancel()
        except BaseExceptionGroup as group:
            raise cause_of(group) from None

    def _heard(self, line: str) -> None:
        if not self._live:
            self._console.print(f"        Spark's rollup: {line}", highlight=False, soft_wrap=True)

    def _begin(self) -> None:
        self._begun = time.monotonic()

    async def _end_in_time(self) -> None:
        while not self._stop.is_set():
            left = self._begun + self._seconds - time.monotonic() if self._begun else LOOK_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(left, 0)):
                    await self._stop.wait()
            if self._begun and time.monotonic() >= self._begun + self._seconds:
                self._stop.set()
        self._published_for = time.monotonic() - self._begun if self._begun else 0.0

    async def _show(self, gateway: Gateway, plant: Plant) -> None:
        screen = Screen(plant, self._seconds)
        drop = place(gateway.data / "drop")
        async with asker() as session:
            if not self._live:
                while True:
                    await asyncio.sleep(LOOK_SECONDS)
                    if (now := await self._look(session, gateway, plant)) is not None:
                        self._console.print(screen.line(now, self._passed), highlight=False, soft_wrap=True)
            with Live(console=self._console, screen=True, auto_refresh=False) as shown:
                while True:
                    if (now := await self._look(session, gateway, plant)) is not None:
                        files: list[Entry] = await asyncio.to_thread(lambda: catalog(drop).entries)
                        spark = self._rollup.batches if self._rollup is not None else ()
                        shown.update(screen.draw(now, self._passed, files, spark), refresh=True)
                    await asyncio.sleep(LOOK_SECONDS)

    @property
    def _passed(self) -> float:
        return time.monotonic() - self._begun

    async def _look(self, session: aiohttp.ClientSession, gateway: Gateway, plant: Plant) -> Moment | None:
        if not self._begun:
            return None
        with contextlib.suppress(NoAnswer):  # if it has ended, somebody else says so
            await plant.look()
            return Moment.now(await ask_status(session, gateway.admin))
        return None


def cause_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that explains the others which happened with it."""
    leaves = list(leaves_of(group))
    for kind in (GatewayFailed, RollupFailed, HeadraceError, BaseException):
        for error in leaves:
            if isinstance(error, kind):
                return error
    return group


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from leaves_of(one)
    else:
        yield error


# --- Spark --------------------------------------------------------------------------------------------------


def check_spark() -> None:
    """Says what is missing before the demo runs, not after it."""
    for name in ("pyspark", "pandas"):
        if find_spec(name) is None:
            raise SparkMissing(
                f"--spark needs {name}, which is not installed: pip install 'headrace[spark]' (and Java 17 or later)"
            )
    from headrace.spark.session import find_java

    find_java()


def roll_up(drop: Path) -> int:
    """Runs the rollup as a user would; its exit code."""
    words = ["spark", "rollup", str(drop), "--show", "--limit", str(ROLLUP_ROWS)]
    click.echo(f"$ headrace {' '.join(words)}")
    main = "from headrace.cli import main; main()"
    return subprocess.run([sys.executable, "-c", main, *words], check=False).returncode


# --- the command --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def home_of(data: Path | None) -> Iterator[Path]:
    """Where the demo keeps its files: a directory that stays, or one that goes with it."""
    if data is None:
        with tempfile.TemporaryDirectory(prefix="headrace-demo-") as made:
            yield Path(made)
        return
    if data.exists() and any(data.iterdir()):
        raise HeadraceError(f"{data} is not empty; the demo counts from nothing, in a directory of its own")
    data.mkdir(parents=True, exist_ok=True)
    yield data


@click.command("demo", short_help="See all five protocols at work.")
@click.option(
    "--seconds",
    metavar="N",
    type=click.FloatRange(0.5, 86_400),
    default=60.0,
    show_default=True,
    help="How long the devices publish.",
)
@click.option(
    "--rate",
    metavar="N",
    type=click.FloatRange(10, 100_000),
    default=1000.0,
    show_default=True,
    help="Messages a second, of all devices together.",
)
@click.option(
    "--data",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep log and drop in DIR, which is new or empty.  [default: a temporary directory]",
)
@click.option(
    "--live/--no-live", default=None, help="A live screen, or plain lines.  [default: as the output allows]"
)
@click.option(
    "--spark",
    is_flag=True,
    help="Let Spark follow the drop, and roll all of it up at the end; needs PySpark and Java.",
)
@click.pass_context
def command(
    ctx: click.Context, seconds: float, rate: float, data: Path | None, live: bool | None, spark: bool
) -> None:
    """See all five protocols at work: a gateway on free ports of this machine, a plant of devices and services that
    talk through it across protocols, and a drop that fills with Parquet.

    At the end everything is counted: for each stream, what was published is what was delivered, dead or held, and every
    offset of the log is in the drop. The exit code is 1 if not. Ctrl-C ends it early, with the same summary.
    """
    if spark:
        check_spark()
    with home_of(data) as home:
        demo = Demo(home, seconds, rate, sys.stdout.isatty() if live is None else live, spark)
        try:
            code = run(demo.run())
        except asyncio.CancelledError:
            ctx.exit(INTERRUPTED)
        if data is not None:
            click.echo(f"log and drop are in {home / 'data'}")
        if spark:
            code = max(code, 1 if roll_up(home / "data" / "drop") else 0)
    ctx.exit(code)
