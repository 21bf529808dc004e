"""`headrace nodes`: the zeroctl nodes that a running gateway has heard, from its web side."""

import json
import time
import urllib.error
import urllib.request
from typing import Any, Final

import click

from headrace.clients.errors import reason_of
from headrace.errors import HeadraceError

TIMEOUT_SECONDS: Final = 10.0


class NoAnswer(HeadraceError):
    """The gateway's web side cannot be asked."""

    hint = (
        "--at is where the web side listens, the 'admin=' of the line that a gateway prints when it is ready"
    )


@click.command("nodes", short_help="List the zeroctl nodes that were heard.")
@click.option(
    "--at",
    metavar="HOST:PORT",
    default="127.0.0.1:8600",
    show_default=True,
    help="Where the gateway's web side listens (admin.bind).",
)
@click.option(
    "--json", "as_json", is_flag=True, help="A JSON object a line, with all that a node says of itself."
)
def command(at: str, as_json: bool) -> None:
    """List the nodes whose heartbeat was heard within its time to live, by name, with their services.

    The exit code is 0 if the gateway answered, also if there are no nodes.
    """
    for node in ask(at):
        if as_json:
            click.echo(json.dumps(node, ensure_ascii=False).encode())
        else:
            click.echo(line(node, time.time()))


def ask(at: str) -> list[dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://{at}/api/nodes", timeout=TIMEOUT_SECONDS) as answer:
            found: list[dict[str, Any]] = json.load(answer)["nodes"]
            return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = getattr(error, "reason", None) or error
        reason = reason_of(cause) if isinstance(cause, BaseException) else cause
        raise NoAnswer(f"cannot ask the gateway at {at}: {reason}") from None


def line(node: dict[str, Any], now: float) -> str:
    services = ", ".join(sorted(node["services"])) or "no services"
    return f"{node['node-name']}  {node['node-uuid']}  heard {max(0.0, now - node['heard']):.0f} s ago  {services}"
