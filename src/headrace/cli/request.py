"""`headrace request`: asks a zeroctl service for something, and waits until a provider has accepted and finished it."""

import asyncio
import json
import os
import sys
from pathlib import Path

import click

from headrace.clients.errors import OperationTimeout
from headrace.clients.shell import (
    TIMEOUT_SECONDS,
    good_address,
    key_option,
    run,
    tls_context,
    write_out,
)
from headrace.clients.zeroctl import Task, ZeroctlClient
from headrace.clients.zeroctl_face import CLIENT, node_for_commands

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def read_headers(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, str]:
    headers = {}
    for text in value:
        name, separator, rest = text.partition("=")
        if not separator or not name:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", ctx, param)
        headers[name] = rest
    return headers


@click.command("request", short_help="Ask a zeroctl service for something.")
@click.argument("service")
@click.argument("body", required=False)
@click.option(
    "--at",
    metavar="HOST:PORT",
    callback=good_address,
    help=f"Where the gateway listens.  [default: {CLIENT.at}]",
)
@key_option
@click.option("--tls", is_flag=True, help="Encrypt; so do the options that follow.")
@click.option("--tls-ca", metavar="FILE", type=FILE, help="Trust the authorities in FILE.")
@click.option("--tls-cert", metavar="FILE", type=FILE, help="Show the certificate in FILE.")
@click.option("--tls-key", metavar="FILE", type=FILE, help="Its key, if in another file.")
@click.option(
    "--header",
    "-H",
    "headers",
    metavar="NAME=VALUE",
    multiple=True,
    callback=read_headers,
    help="A header more.",
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=TIMEOUT_SECONDS,
    show_default=True,
    help="How long a provider may take to accept, and then to finish.",
)
@click.option("--no-finish", is_flag=True, help="End when the request was accepted.")
@click.option(
    "--json", "as_json", is_flag=True, help="The last answer as a JSON object: task, headers and body."
)
@click.option("--quiet", "-q", is_flag=True, help="No task name on standard error.")
def command(
    service: str,
    body: str | None,
    at: str | None,
    key: str,
    tls: bool,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    headers: dict[str, str],
    timeout: float,
    no_finish: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Send BODY, or standard input, to SERVICE, a routing key like service.jobs.bulk.

    The name of the task is told when a provider has accepted the request, and the body of its last answer is printed
    when it has finished. A provider that cannot tell when it has finished says so; then that is not waited for.

    The exit code is 0 if the task was accepted and finished, 1 if it was refused, failed or nobody answered, 2 for a
    wrong command line and 130 for Ctrl-C.
    """
    payload = os.fsencode(body) if body is not None else sys.stdin.buffer.read()
    context = tls_context(tls, tls_ca, tls_cert, tls_key)

    async def main() -> None:
        client = ZeroctlClient(
            at or CLIENT.at, key=key, node=node_for_commands(), tls=context, timeout=timeout
        )
        async with client:
            task = await client.request(service, payload, headers, on_finish=not no_finish)
            if not quiet:
                click.echo(f"accepted as {task.id}", err=True)
            if no_finish or not task.will_finish:
                if not no_finish and not quiet:
                    click.echo("the provider does not tell when it has finished", err=True)
                return
            await show(task)

    async def show(task: Task) -> None:
        try:
            async with asyncio.timeout(timeout):
                answer = await task.finished()
        except TimeoutError:
            raise OperationTimeout(f"task {task.id} was not finished within {timeout:g} s") from None
        if as_json:
            said = {
                "task": task.id,
                "headers": answer.headers,
                "body": answer.body.decode("utf-8", "replace"),
            }
            write_out(json.dumps(said, ensure_ascii=False).encode() + b"\n")
        elif answer.body:
            write_out(answer.body + b"\n")

    run(main())
