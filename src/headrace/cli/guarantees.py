"""`headrace guarantees`: what each pair of protocols promises. Asks no gateway: it is the same for all."""

import json

import click

from headrace.bridges_page import page
from headrace.guarantees import as_data


@click.command("guarantees")
@click.option("--json", "as_json", is_flag=True, help="As JSON, like /api/guarantees.")
def command(as_json: bool) -> None:
    """Print what each pair of protocols promises, as Markdown."""
    click.echo(json.dumps(as_data()) if as_json else page(), nl=as_json)
