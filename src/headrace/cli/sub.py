"""`headrace sub`: prints what arrives at an address, through any protocol's client. It knows how a message
looks on standard output, and nothing of how a protocol brings it."""

import asyncio
import base64
import json

import click

from headrace.clients.face import Client, Received, Server, Wish
from headrace.clients.shell import ADDRESSES, Unread, run, server_options, until_unread, write_out
from headrace.errors import HeadraceError


class TooFew(HeadraceError):
    """The messages that were waited for did not all come."""


def as_json(received: Received) -> bytes:
    """One line with everything; bytes that are no text are under a name that says so."""
    line = dict(received.about)
    try:
        line["payload"] = received.payload.decode()
    except UnicodeDecodeError:
        line["payload_base64"] = base64.b64encode(received.payload).decode()
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def as_line(received: Received) -> bytes:
    return received.payload + b"\n"


def as_is(received: Received) -> bytes:
    return received.payload


@click.command("sub", short_help="Print messages as they arrive.", epilog=ADDRESSES)
@server_options
@click.argument("address")
@click.option("--count", "-n", metavar="N", type=click.IntRange(min=1), help="End after N messages.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="End when no message came for so long; with --count that is an error.",
)
@click.option("--json", "json_lines", is_flag=True, help="A JSON object a line, with everything about it.")
@click.option("--raw", is_flag=True, help="Payloads one after another, with nothing between them.")
@click.option(
    "--qos",
    type=click.Choice(["0", "1"]),
    default="0",
    show_default=True,
    help="1: durable. The server keeps the subscription, and each message until it was printed.",
)
@click.option("--resume", metavar="ID", type=click.IntRange(min=1), help="Go on with a durable subscription.")
@click.option(
    "--no-ack", is_flag=True, help="Acknowledge nothing: messages come again, and are then given up."
)
@click.option("--quiet", "-q", is_flag=True, help="Nothing on standard error when all is well.")
def command(
    client: Client,
    server: Server,
    address: str,
    count: int | None,
    timeout: float | None,
    json_lines: bool,
    raw: bool,
    qos: str,
    resume: int | None,
    no_ack: bool,
    quiet: bool,
) -> None:
    """Print what arrives at ADDRESS from now on, a payload a line.

    ADDRESS is the protocol's own, as named at the end.

    A payload is printed as it is, with a line end added; one that contains line ends is several lines, unless
    --json or --raw are given. In --json, payload is text, and payload_base64 is there instead where it is not
    UTF-8.

    A message is acknowledged after it was printed. A lost connection is made again: a durable subscription
    goes on where it was, another one misses what was published meanwhile.

    The exit code is 0 after --count messages or --timeout without --count, 1 for an error, 2 for a wrong
    command line, 130 for Ctrl-C and 141 when nobody reads the output any more.
    """
    if json_lines and raw:
        raise click.UsageError("--json and --raw exclude each other")
    wish = Wish(address, int(qos), acknowledge=not no_ack, resume=resume)
    shape = as_json if json_lines else as_is if raw else as_line

    async def show() -> None:
        got = 0
        async with client.subscriber(server, wish) as subscriber:
            if not quiet:
                click.echo(subscriber.label, err=True)
            try:
                async with asyncio.timeout(timeout) as limit:
                    async for received in subscriber:
                        write_out(shape(received))
                        got += 1
                        if got == count:
                            return
                        if timeout is not None:
                            limit.reschedule(asyncio.get_running_loop().time() + timeout)
            except TimeoutError:
                if not limit.expired():
                    raise
        if count is not None:
            raise TooFew(f"{got} of {count} messages came, and then none for {timeout:g} s")

    async def main() -> None:
        showing = asyncio.create_task(show())
        unread = until_unread()
        try:
            await asyncio.wait([showing, unread], return_when=asyncio.FIRST_COMPLETED)
            if not showing.done():
                raise Unread
        finally:
            showing.cancel()
            await asyncio.wait([showing])
        showing.result()

    try:
        run(main())
    except ValueError as error:
        raise HeadraceError(f"cannot subscribe to {address!r}: {error}") from None
