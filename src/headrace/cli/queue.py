"""`headrace queue`: looks after Overhop's queues, through its client. It knows how queues and jobs look on a
screen, and nothing of how the protocol tells of them."""

import functools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec

import click

from headrace.clients.overhop import OverhopClient
from headrace.clients.overhop_face import CLIENT
from headrace.clients.shell import TIMEOUT_SECONDS, good_address, run, tls_context
from headrace.decoders.overhop import as_json

P = ParamSpec("P")

STATES: Final = ("new", "waiting", "delayed", "active", "completed", "failed")


def through_client(do: Callable[Concatenate[OverhopClient, P], Awaitable[None]]) -> Callable[..., None]:
    """Makes a command of a coroutine that is given a connected client; adds --at and those for TLS."""

    @functools.wraps(do)
    def command(
        *args: Any,
        at: str | None,
        tls: bool,
        tls_ca: Path | None,
        tls_cert: Path | None,
        tls_key: Path | None,
        **rest: Any,
    ) -> None:
        context = tls_context(tls, tls_ca, tls_cert, tls_key)

        async def main() -> None:
            async with OverhopClient(at or CLIENT.at, tls=context, timeout=TIMEOUT_SECONDS) as client:
                await do(client, *args, **rest)

        run(main())

    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    options: list[Callable[[Callable[..., None]], Callable[..., None]]] = [
        click.option(
            "--at",
            metavar="HOST:PORT",
            callback=good_address,
            help=f'Where the gateway listens for Overhop, also "unix:/path".  [default: {CLIENT.at}]',
        ),
        click.option("--tls", is_flag=True, help="Encrypt; so do the options that follow."),
        click.option("--tls-ca", metavar="FILE", type=file, help="Trust the authorities in FILE."),
        click.option("--tls-cert", metavar="FILE", type=file, help="Show the certificate in FILE."),
        click.option("--tls-key", metavar="FILE", type=file, help="Its key, if in another file."),
    ]
    return functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


json_option = click.option("--json", "json_lines", is_flag=True, help="A JSON object a line.")


def emit(line: object) -> None:
    # As bytes: the output is UTF-8 whatever the terminal's encoding is.
    click.echo(json.dumps(as_json(line), ensure_ascii=False).encode())


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    """Columns as wide as they have to be; numbers to the right."""
    texts = [head, *[tuple(map(str, row)) for row in rows]]
    widths = [max(len(row[column]) for row in texts) for column in range(len(head))]
    for number, row in enumerate(texts):
        cells = [
            text.rjust(width) if number and isinstance(rows[number - 1][column], int) else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())


@click.group("queue", short_help="Look after Overhop's queues.")
def command() -> None:
    """Look after Overhop's queues and their jobs, in a running gateway.

    The exit code is 0 if it was done, 1 if not, and 2 for a wrong command line.
    """


@command.command("ls")
@json_option
@through_client
async def ls(client: OverhopClient, json_lines: bool) -> None:
    """List all queues, with how many of their jobs are in each state."""
    told = (await client.status())["queues"]
    listed = await client.queues()
    if json_lines:
        for queue in listed:
            emit(queue | told.get(queue["name"], {}))
        return
    rows: list[tuple[object, ...]] = []
    for queue in listed:
        more = told.get(queue["name"], {})
        limit = queue["config"]["concurrency_limit"]
        counts = more.get("stats", {})
        rows.append(
            (
                queue["name"],
                queue["state"],
                more.get("filter", ""),
                "-" if limit is None else limit,
                more.get("workers", 0),
                *(counts.get(state, 0) for state in STATES),
            )
        )
    table(("NAME", "STATE", "FILTER", "LIMIT", "WORKERS", *map(str.upper, STATES)), rows)


@command.command("add")
@click.argument("name")
@click.option(
    "--concurrency-limit",
    metavar="N",
    type=click.IntRange(1, 2**32 - 1),
    help="Jobs that all workers together may have at once.",
)
@click.option("--no-overrides", is_flag=True, help="Let no job have its own attempts or retry interval.")
@through_client
async def add(client: OverhopClient, name: str, concurrency_limit: int | None, no_overrides: bool) -> None:
    """Make the queue NAME, and print its id.

    Its jobs are what is published to `queue.NAME.#`. A queue with another filter is made by the configuration.
    """
    click.echo(
        await client.add_queue(
            name, concurrency_limit=concurrency_limit, allow_job_overrides=not no_overrides
        )
    )


@command.command("rm")
@click.argument("name")
@through_client
async def rm(client: OverhopClient, name: str) -> None:
    """Remove the queue NAME, which must have no unfinished jobs."""
    await client.remove_queue(name)


@command.command("pause")
@click.argument("name")
@through_client
async def pause(client: OverhopClient, name: str) -> None:
    """Hold the jobs of the queue NAME back; what workers have goes on."""
    await client.pause(name)


@command.command("resume")
@click.argument("name")
@through_client
async def resume(client: OverhopClient, name: str) -> None:
    """Let the queue NAME go on."""
    await client.resume(name)


@command.command("stats")
@click.argument("name")
@json_option
@through_client
async def stats(client: OverhopClient, name: str, json_lines: bool) -> None:
    """Tell how many jobs of the queue NAME are in each state."""
    counts = await client.stats(name)
    if json_lines:
        emit(counts)
    else:
        table(tuple(map(str.upper, STATES)), [tuple(counts.get(state, 0) for state in STATES)])


@command.command("jobs")
@click.argument("name")
@click.option(
    "--status", type=click.Choice(STATES), default="waiting", show_default=True, help="Those in this state."
)
@click.option("--page", metavar="N", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--page-size", metavar="N", type=click.IntRange(min=1, max=1000), default=15, show_default=True)
@json_option
@through_client
async def jobs(
    client: OverhopClient, name: str, status: str, page: int, page_size: int, json_lines: bool
) -> None:
    """List jobs of the queue NAME, oldest first."""
    found = await client.jobs(name, status, page=page, page_size=page_size)
    if json_lines:
        for job in found:
            emit(job)
        return
    rows: list[tuple[object, ...]] = [
        (
            job["jid"],
            job["status"],
            job["runtime"]["attempts_so_far"],
            job["max_attempts"],
            job["created_at"],
            job["execution_start_at"] or "-",
            short(job["payload"]),
        )
        for job in found
    ]
    table(("JID", "STATUS", "ATTEMPTS", "OF", "CREATED", "NOT BEFORE", "PAYLOAD"), rows)


def short(payload: object, longest: int = 40) -> str:
    """A payload as one line of a table."""
    if isinstance(payload, bytes):
        text = payload.decode("utf-8", "backslashreplace")
    else:
        text = json.dumps(as_json(payload), ensure_ascii=False)
    text = "".join(char if char.isprintable() else " " for char in text)
    return text if len(text) <= longest else text[: longest - 1] + "…"
