"""The `headrace` command: finds its subcommands by file name and imports only the one that was asked for.
Each file of this package is one subcommand, and its click command or group is called `command`."""

import errno
import pkgutil
from importlib import import_module
from typing import Any

import click

from headrace import __version__
from headrace.errors import HeadraceError


class Commands(click.Group):
    """A group whose commands are the modules of this package."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = (module.name for module in pkgutil.iter_modules(__path__))
        return sorted(name.replace("_", "-") for name in names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = import_module(f"{__name__}.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HeadraceError as error:
            click.echo(f"Error: {error}", err=True)
            if error.hint:
                click.echo(f"Hint: {error.hint}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            # A file that cannot be made, a disk that is full: the system's word for it says enough.
            if error.errno == errno.EPIPE or error.strerror is None:
                raise
            where = f"{error.filename}: " if error.filename else ""
            click.echo(f"Error: {where}{error.strerror}", err=True)
            ctx.exit(1)


@click.command(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="'headrace demo' shows all of it at work, 'headrace serve' runs a gateway.",
)
@click.version_option(__version__, prog_name="headrace", message="%(prog)s %(version)s")
def main() -> None:
    """A message gateway: five wire protocols in, one bus, Parquet for Spark out."""
