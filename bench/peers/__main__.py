"""`python -m bench.peers`: measures, prints what it sees and how it compares with the budgets, and writes the
tables, the data and the picture to bench/results."""

import os
import signal
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import click

from bench.peers import load, machine, report, servers
from bench.peers.budgets import judge
from bench.peers.failures import PeersError, Unavailable
from bench.peers.measure import Bench, Results, Run
from bench.peers.plan import FULL, QUICK, Contender, Family, cells

RESULTS = load.REPOSITORY / "bench" / "results"
QUIET = 0.5  # load average for each CPU above which figures mean little


def _stop_in_order(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not disturb what the first one starts
    raise KeyboardInterrupt  # so that the servers are stopped and their directories removed


def _check_programs(contenders: frozenset[Contender], gateway: Path) -> None:
    if contenders & {Contender.NATS, Contender.JETSTREAM}:
        servers.find_program("nats-server")
    if Contender.REDIS in contenders:
        servers.find_program("redis-server")
    if Contender.HEADRACE in contenders and not gateway.exists():
        raise Unavailable(
            f"the gateway's command is not at {gateway}; install the package, or give --gateway"
        )


def _say(run: Run) -> None:
    figure = report.shown_figure(run.cell.family, run.figure)
    busy: float = run.seen.raw["load_busy"]
    click.echo(
        f"{run.cell.name:<40} round {run.round + 1}/{run.cell.rounds}  {run.contender.label:<17} {figure:>12}"
        f"  (sender {busy:.0%} busy)"
    )


def _finish(directory: Path, facts: dict[str, str], results: Results) -> None:
    verdicts = judge(results)
    directory.mkdir(parents=True, exist_ok=True)
    name = f"peers-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    try:
        from bench.peers import plot
    except ImportError:
        click.echo("No picture: matplotlib is not installed (pip install '.[bench]').", err=True)
        picture = None
    else:
        picture = directory / f"{name}.png"
        plot.draw(picture, machine.line(facts), results, verdicts)
    texts = {
        "md": report.markdown(facts, results, verdicts, picture.name if picture else None),
        "json": report.as_json(facts, results, verdicts),
    }
    paths = report.write(directory, name, texts)
    click.echo()
    for verdict in verdicts:
        click.echo(verdict.sentence)
    for failure in results.failures:
        click.echo(f"failed: {failure}", err=True)
    click.echo("Written: " + ", ".join(str(path) for path in [*paths, *([picture] if picture else [])]))


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--quick", is_flag=True, help="A smoke run: every family once, small, in under a minute.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([family.value for family in Family]),
    help="Only this family of runs (repeatable).",
)
@click.option(
    "--system",
    "systems",
    multiple=True,
    type=click.Choice([contender.value for contender in Contender]),
    help="Only this system (repeatable).",
)
@click.option(
    "--rounds", type=click.IntRange(1, 99), help="Turns of each system; the medians count. [default: 3]"
)
@click.option(
    "--sustained-seconds", type=click.FloatRange(1, 3600), help="Length of a sustained run. [default: 60]"
)
@click.option("--sync", default="always", help="The gateway's log.sync where QoS 0 is measured.")
@click.option(
    "--apart",
    is_flag=True,
    help="Put the sender on one CPU and the gateway's event loop on another; the peers may use all of them.",
)
@click.option(
    "--gateway",
    type=click.Path(path_type=Path),
    default=servers.gateway_program,
    show_default="headrace beside this Python",
    help="The gateway's command.",
)
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=RESULTS,
    show_default="bench/results",
    help="Where to write.",
)
@click.option(
    "--work",
    type=click.Path(file_okay=False, path_type=Path),
    show_default="the results' directory",
    help="Where the servers keep their data; a real disk, or syncs cost nothing.",
)
def main(
    quick: bool,
    only: tuple[str, ...],
    systems: tuple[str, ...],
    rounds: int | None,
    sustained_seconds: float | None,
    sync: str,
    apart: bool,
    gateway: Path,
    results: Path,
    work: Path | None,
) -> None:
    """Measures this gateway, nats-server, Redis Streams and memory copy with the same sender."""
    signal.signal(signal.SIGTERM, _stop_in_order)
    scale = QUICK if quick else FULL
    scale = replace(
        scale,
        sync_qos0=sync,
        rounds=rounds or scale.rounds,
        sustained_seconds=sustained_seconds or scale.sustained_seconds,
    )
    families = [Family(name) for name in only] or [*Family]
    plan = list(cells(scale, families))
    wanted = frozenset(Contender(name) for name in systems) or frozenset(Contender)
    contenders = wanted & {contender for cell in plan for contender in cell.contenders}
    if not contenders:
        raise click.UsageError("none of these systems takes part in these runs")
    work = work or results
    seen = Results()
    try:
        _check_programs(contenders, gateway)
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(load.build(), gateway, work, machine.places() if apart else None)
        facts = machine.describe(work, contenders, gateway)
        facts["sender and loop"] = "on CPUs of their own" if apart else "where the system puts them"
        click.echo(machine.line(facts))
        if os.getloadavg()[0] > QUIET * (os.cpu_count() or 1):
            click.echo("The machine is busy with something else: these figures will mean little.", err=True)
    except PeersError as error:
        raise click.ClickException(str(error)) from error
    stopped: str | None = None
    try:
        bench.measure(plan, contenders, seen, _say)
    except PeersError as error:
        stopped = str(error)
    except KeyboardInterrupt:
        stopped = "interrupted"
    if seen.runs:
        _finish(results, facts, seen)
    if stopped:
        raise click.ClickException(stopped)
    if seen.failures:
        sys.exit(1)


if __name__ == "__main__":
    main(prog_name="python -m bench.peers")
