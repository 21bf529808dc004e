"""`headrace bench`: drives load at a gateway or a nats-server and prints how much went through, and how fast.
The load itself is in headrace.clients.load."""

import json
from typing import Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headrace.clients.load import MODES, SYSTEMS, Load, Mode, Plan, Result, System
from headrace.clients.shell import key_option, run
from headrace.config.addresses import HostPort, parse_address

LATENCY_OF: Final[dict[Mode, str]] = {
    "publish": "of a batch, until the server has handled it",
    "qos1": "of a batch, until the server has it safe",
    "end-to-end": "of a message, until it has arrived",
    "round-trip": "of a message, until it is back",
}


def system_and_place(ctx: click.Context, param: click.Parameter, value: str) -> tuple[System, HostPort]:
    """What a target's URL says."""
    system, separator, rest = value.partition("://")
    if not separator or system not in SYSTEMS:
        known = " or ".join(f"{one}://HOST:PORT" for one in SYSTEMS)
        raise click.BadParameter(f"{value!r} is not {known}", ctx, param)
    try:
        place = parse_address(rest)
    except ValueError as error:
        raise click.BadParameter(f"{value!r}: {error}", ctx, param) from None
    if not isinstance(place, HostPort):
        raise click.BadParameter(f"{value!r}: load goes over TCP", ctx, param)
    return system, place


@click.command("bench", short_help="Measure a gateway or a nats-server.")
@click.option(
    "--mode",
    "-m",
    type=click.Choice(MODES),
    default="publish",
    show_default=True,
    help="What to do; see above.",
)
@click.option(
    "--target",
    metavar="URL",
    callback=system_and_place,
    default="blipmq://127.0.0.1:5555",
    show_default=True,
    help="What to measure: blipmq://HOST:PORT or nats://HOST:PORT.",
)
@key_option
@click.option(
    "--size", type=click.IntRange(0, 1 << 20), default=100, show_default=True, help="Bytes of a message."
)
@click.option(
    "--connections",
    "-c",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Connections that publish; end-to-end has as many that receive.",
)
@click.option(
    "--count", "-n", type=click.IntRange(1), default=200_000, show_default=True, help="Messages in all."
)
@click.option(
    "--seconds",
    "-s",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    help="Stop sending after so long.",
)
@click.option(
    "--rate",
    "-r",
    type=click.FloatRange(0, min_open=True),
    help="Messages a second in all.  [default: as fast as it goes]",
)
@click.option("--json", "as_json", is_flag=True, help="The result as one JSON object.")
def command(
    mode: Mode,
    target: tuple[System, HostPort],
    key: str,
    size: int,
    connections: int,
    count: int,
    seconds: float,
    rate: float | None,
    as_json: bool,
) -> None:
    """Drive load at a server and print throughput and latency.

    \b
    publish     pipelined messages; a batch is done when the server has handled it
    qos1        the same, and a batch is done when the server has it safe (blipmq)
    end-to-end  each message from the connection that publishes to one that receives
    round-trip  one message at a time, out and back on one connection

    It ends after --count messages or --seconds, whatever comes first. Without --rate the latencies are those
    of a server with as much to do as it can; with one, they begin when a message was due, to the millisecond.

    This program is a load of its own: on one machine with the server, both share its processors. The exit
    code is 0 if every message was answered, 1 if not, 2 for a wrong command line.
    """
    system, place = target
    if mode == "qos1" and system == "nats":
        raise click.UsageError("qos1 needs a server that confirms messages, which core NATS does not")
    load = Load(Plan(system, place, mode, size, connections, count, seconds, rate, key))
    result = run(watched(load))
    click.echo(json_text(result) if as_json else text(result))
    if result.lost:
        raise click.exceptions.Exit(1)


async def watched(load: Load) -> Result:
    """Runs it, with a progress bar where somebody is at a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(load.plan.mode, total=load.plan.count)
        return await load.run(lambda: progress.update(task, completed=load.answered))


def text(result: Result) -> str:
    plan = result.plan
    many = "connection" if plan.connections == 1 else "connections"
    pace = "" if plan.rate is None else f", {plan.rate:,.0f} messages/s wanted"
    lines = [
        f"{plan.system}://{plan.place}  {plan.mode}, {plan.size:,} bytes, {plan.connections} {many}{pace}",
        f"messages    {result.messages:,} in {result.seconds:.3f} s",
        f"throughput  {result.messages_per_second:,.0f} messages/s,"
        f" {result.bytes_per_second / (1 << 20):,.1f} MiB/s",
        f"latency     p50 {duration(result.p50)}, p99 {duration(result.p99)}, p99.9 {duration(result.p99_9)},"
        f" slowest {duration(result.slowest)} ({LATENCY_OF[plan.mode]})",
    ]
    if result.lost:
        lines.append(f"lost        {result.lost:,} messages were never answered")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def json_text(result: Result) -> str:
    plan = result.plan
    return json.dumps(
        {
            "target": f"{plan.system}://{plan.place}",
            "mode": plan.mode,
            "size": plan.size,
            "connections": plan.connections,
            "rate": plan.rate,
            "messages": result.messages,
            "lost": result.lost,
            "seconds": result.seconds,
            "messages_per_second": result.messages_per_second,
            "bytes_per_second": result.bytes_per_second,
            "latency_seconds": {
                "p50": result.p50,
                "p99": result.p99,
                "p99.9": result.p99_9,
                "slowest": result.slowest,
            },
        }
    )
