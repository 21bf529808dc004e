"""`headrace config`: shows, checks and explains configurations. Starts nothing and writes only to standard
output."""

import os
from collections.abc import Sequence
from pathlib import Path

import click

from headrace.config import PROTOCOLS, Protocol
from headrace.config.load import load
from headrace.config.options import config_options
from headrace.config.render import default_toml, effective_toml, reference_markdown
from headrace.gateway.addresses import addresses_of_topic, topic_of_address


@click.group("config")
def command() -> None:
    """Show, check and explain the configuration."""


@command.command("show")
@config_options
@click.option("--secrets", is_flag=True, help="Show keys instead of hiding them.")
@click.option("--origin", is_flag=True, help="Say where each value that was set came from.")
def show(config_file: Path | None, sets: tuple[str, ...], secrets: bool, origin: bool) -> None:
    """Print the configuration that is in effect, as TOML."""
    loaded = load(config_file, os.environ, sets)
    _warn(loaded.warnings)
    click.echo(effective_toml(loaded.config, loaded.origins, secrets=secrets, origin=origin), nl=False)


@command.command("check")
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> None:
    """Check a configuration FILE by itself, without the environment.

    Exit status 0 if a gateway would start with it, 2 if not."""
    loaded = load(file, {}, ())
    _warn(loaded.warnings)
    click.echo(f"{file}: good")


@command.command("map")
@config_options
@click.argument("listener", type=click.Choice(PROTOCOLS))
@click.argument("address")
def show_map(config_file: Path | None, sets: tuple[str, ...], listener: Protocol, address: str) -> None:
    """Show which topic an ADDRESS of a LISTENER has, and how the peers of every listener get that topic's messages.

    An address is written as for `headrace pub`: a topic, a key, tenant/namespace/stream, a queue, endpoint/channel.
    A `-` stands for a listener whose peers cannot ask for the topic."""
    loaded = load(config_file, os.environ, sets)
    _warn(loaded.warnings)
    try:
        topic = topic_of_address(loaded.config, listener, address)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"topic    {topic}")
    for name in PROTOCOLS:
        click.echo(f"{name:<8} {', '.join(addresses_of_topic(loaded.config, name, topic)) or '-'}")


@command.command("default")
def default() -> None:
    """Print a commented file with every default."""
    click.echo(default_toml(), nl=False)


@command.command("reference")
def reference() -> None:
    """Print every key with its meaning, as Markdown."""
    click.echo(reference_markdown(), nl=False)


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        click.echo(f"Warning: {warning}", err=True)
