"""`headrace nodes`: the zeroctl nodes that a running gateway has heard, from its web side."""

import json
import time
from typing import Any

import click

from headrace.clients.admin import admin_option, ask, asker
from headrace.clients.shell import run


@click.command("nodes", short_help="List the zeroctl nodes that were heard.")
@admin_option
@click.option(
    "--json", "as_json", is_flag=True, help="A JSON object a line, with all that a node says of itself."
)
def command(at: str, as_json: bool) -> None:
    """List the nodes whose heartbeat was heard within its time to live, by name, with their services.

    The exit code is 0 if the gateway answered, also if there are no nodes.
    """
    for node in run(heard(at)):
        if as_json:
            click.echo(json.dumps(node, ensure_ascii=False).encode())
        else:
            click.echo(line(node, time.time()))


async def heard(url: str) -> list[dict[str, Any]]:
    async with asker() as session:
        nodes: list[dict[str, Any]] = (await ask(session, url, "/api/nodes", "nodes"))["nodes"]
        return nodes


def line(node: dict[str, Any], now: float) -> str:
    services = ", ".join(sorted(node["services"])) or "no services"
    return f"{node['node-name']}  {node['node-uuid']}  heard {max(0.0, now - node['heard']):.0f} s ago  {services}"
