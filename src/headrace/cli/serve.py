"""`headrace serve`: runs the gateway. Knows only where its configuration comes from."""

import os
from collections.abc import Sequence
from pathlib import Path

import click

from headrace.config import Loaded, load
from headrace.config.options import config_options, data_option
from headrace.gateway.process import serve


@click.command("serve")
@config_options
@data_option
@click.pass_context
def command(ctx: click.Context, config_file: Path | None, sets: Sequence[str], data: Path) -> None:
    """Run the gateway until a signal stops it.

    SIGTERM and SIGINT let work in flight finish first; a second one does not. SIGHUP reads the configuration
    again and takes over what can change while the gateway runs.
    """

    def read() -> Loaded:
        return load(config_file, os.environ, sets)

    ctx.exit(serve(data, read))
