"""The command line options with which a command is told its configuration and data directory. Knows click,
and nothing of what the commands do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_DATA: Final = Path("headrace-data")


def config_options(command: Command) -> Command:
    """Adds --config FILE and --set KEY=VALUE; the command gets `config_file` and `sets`, as load() takes
    them."""
    command = click.option(
        "--set",
        "sets",
        metavar="KEY=VALUE",
        multiple=True,
        help="Set one key, over the file and the environment. May be repeated.",
    )(command)
    return click.option(
        "--config",
        "config_file",
        metavar="FILE",
        type=click.Path(path_type=Path),
        envvar="HEADRACE_CONFIG",
        show_envvar=True,
        help="The configuration, in TOML.",
    )(command)


def data_option(command: Command) -> Command:
    """Adds --data DIR; the command gets `data`."""
    return click.option(
        "--data",
        metavar="DIR",
        type=click.Path(path_type=Path, file_okay=False),
        default=DEFAULT_DATA,
        show_default=True,
        envvar="HEADRACE_DATA",
        show_envvar=True,
        help="Where the log lives.",
    )(command)
