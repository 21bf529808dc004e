"""`headrace top`: what a running gateway does, live, from its admin address. It knows the gateway only by what
/api/status tells."""

import asyncio

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from headrace.admin.terminal import Moment, view
from headrace.clients.admin import NoAnswer, admin_option, ask_status, asker
from headrace.clients.shell import run


async def watch(url: str, every: float, once: bool) -> None:
    console = Console()
    async with asker() as session:
        now = Moment.now(await ask_status(session, url))
        if once:
            await asyncio.sleep(every)
            console.print(view(Moment.now(await ask_status(session, url)), now))
            return
        with Live(view(now, None), console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(every)
                try:
                    now, before = Moment.now(await ask_status(session, url)), now
                except NoAnswer as error:
                    # It may come back, as after a restart.
                    live.update(Text(str(error), style="bold red"), refresh=True)
                    continue
                live.update(view(now, before), refresh=True)


@click.command("top", short_help="Watch a running gateway.")
@admin_option
@click.option(
    "--every",
    metavar="SECONDS",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    help="How often to look.",
)
@click.option("--once", is_flag=True, help="Look twice, print the figures once, and end.")
def command(at: str, every: float, once: bool) -> None:
    """Watch a running gateway: rates by protocol, the log, the bus and the drops. Ctrl-C ends it."""
    run(watch(at, every, once))
