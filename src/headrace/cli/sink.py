"""`headrace sink`: writes the drops as a process of its own, on the log of a gateway that runs, or does not."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import click

from headrace import events
from headrace.config import load
from headrace.config.options import config_options, data_option
from headrace.errors import HeadraceError
from headrace.log import read_identity, saved_cursors
from headrace.sink.errors import SinkError
from headrace.sink.exporter import Sink
from headrace.sink.notes import Progress
from headrace.sink.plan import plans

STOP_SECONDS = 60.0  # for finishing the open files; what is not finished is redone by the next sink

log = events.get("sink")


@click.command("sink")
@config_options
@data_option
@click.option("--once", is_flag=True, help="Export what is in the log now, then end.")
@click.pass_context
def command(
    ctx: click.Context, config_file: Path | None, sets: Sequence[str], data: Path, once: bool
) -> None:
    """Write the drops in a process of their own.

    For a gateway with `drop.run = false` and the same configuration, on the same data directory. It may be started
    before or after the gateway, stopped, killed and started again: every message gets into each drop exactly once.
    SIGTERM and SIGINT let it finish its files first; a second one does not.

    The exit code is 1 if a drop could not be written at the end.
    """
    loaded = load(config_file, os.environ, sets)
    config = loaded.config
    events.setup(config.logging.level, config.logging.format)
    wanted = plans(config, data)
    if not wanted:
        raise SinkError("drop.enabled is false: there is nothing to write")
    directory = data / "log"
    try:
        log_id: str = read_identity(directory)["id"]
        cursors = saved_cursors(directory)
    except FileNotFoundError:
        raise SinkError(
            f"there is no log in {directory}; a gateway makes it when it is first started"
        ) from None
    sinks = []
    for plan in wanted:
        covered, file_end = (cursors.get(name, 0) for name in (plan.cursor, plan.file_cursor))
        sinks.append(
            Sink(
                plan,
                data=data.absolute(),
                node=config.node.name,
                log_path=directory,
                log_id=log_id,
                saved=Progress(log_id, covered, file_end),
                once=once,
            )
        )
    ctx.exit(_run(sinks))


def _run(sinks: list[Sink]) -> int:
    stopping = threading.Event()

    def stop(number: int, _frame: FrameType | None) -> None:
        if stopping.is_set():
            os._exit(1)  # what is unfinished is redone by the next sink
        stopping.set()
        log.info("sink.stopping", reason=f"signal {signal.Signals(number).name}")

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        for sink in sinks:
            sink.start()
        with_names = ", ".join(f"{sink.plan.name}={sink.plan.uri}" for sink in sinks)
        click.echo(f"headrace sink ready {with_names}")
        while any(sink.running for sink in sinks) and not stopping.wait(0.1):
            pass
    except HeadraceError:
        _finish(sinks)
        raise
    return 0 if _finish(sinks) else 1


def _finish(sinks: list[Sink]) -> bool:
    deadline = time.monotonic() + STOP_SECONDS
    for sink in sinks:
        sink.ask_to_stop()
    whole = True
    for sink in sinks:
        if not sink.stop(max(0.0, deadline - time.monotonic())):
            whole = False
            log.warning(
                "sink.cut_short",
                drop=sink.plan.name,
                covered=sink.covered,
                reason=sink.error or "out of time",
            )
    events.report_suppressed()
    return whole
