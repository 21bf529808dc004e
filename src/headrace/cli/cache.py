"""`headrace cache`: puts values into a Felix server's cache and gets them out again. It knows how a value looks on
standard output, and nothing of how the protocol brings it."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from headrace.clients.felix import FelixClient, Scope
from headrace.clients.felix_face import CLIENT, MAX_MESSAGE
from headrace.clients.shell import TIMEOUT_SECONDS, good_address, run, write_out
from headrace.errors import HeadraceError
from headrace.wire.felix import split_address


class NoValue(HeadraceError):
    """The cache has no value for the key."""


def cache_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --at, --scope and those for TLS; the command gets a client, and the scope."""

    @functools.wraps(command)
    def with_client(
        *args: Any,
        at: str | None,
        scope: str | None,
        tls_ca: Path | None,
        tls_cert: Path | None,
        tls_key: Path | None,
        **rest: Any,
    ) -> None:
        if tls_key is not None and tls_cert is None:
            raise click.UsageError("--tls-key needs --tls-cert")

        def client() -> FelixClient:
            return FelixClient(
                at or CLIENT.at,
                authorities=tls_ca,
                certificate=tls_cert,
                key=tls_key or tls_cert,
                timeout=TIMEOUT_SECONDS,
            )

        try:
            found = split_address(scope) if scope is not None else None
        except ValueError:
            raise click.BadParameter(
                f'{scope!r} is not "tenant/namespace/cache"', param_hint="--scope"
            ) from None
        try:
            command(client, found, *args, **rest)
        except ValueError as error:
            raise HeadraceError(f"cannot use the cache: {error}") from None

    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    for option in (
        click.option("--tls-key", metavar="FILE", type=file, help="Its key, if in another file."),
        click.option("--tls-cert", metavar="FILE", type=file, help="Show the certificate in FILE."),
        click.option("--tls-ca", metavar="FILE", type=file, help="Trust the certificates in FILE."),
        click.option(
            "--scope", metavar="TENANT/NAMESPACE/CACHE", help="The cache; without it, a scope of its own."
        ),
        click.option(
            "--at",
            metavar="HOST:PORT",
            callback=good_address,
            help=f"Where the server listens.  [default: {CLIENT.at}]",
        ),
    ):
        with_client = option(with_client)
    return with_client


@click.group("cache", short_help="Use a Felix server's cache.")
def command() -> None:
    """Put values into a Felix server's cache, and get them out again."""


@command.command("put", short_help="Store a value.")
@cache_options
@click.argument("key")
@click.argument("value", required=False)
@click.option("--ttl", metavar="SECONDS", type=click.FloatRange(min=0), help="Forget it after so long.")
def put(
    client: Callable[[], FelixClient], scope: Scope | None, key: str, value: str | None, ttl: float | None
) -> None:
    """Store VALUE, or else standard input byte for byte, under KEY.

    The exit code is 0 if the server took it, 1 if not, and 2 for a wrong command line.
    """
    content = value.encode() if value is not None else sys.stdin.buffer.read(MAX_MESSAGE + 1)
    if len(content) > MAX_MESSAGE:
        raise HeadraceError(f"the value is longer than a message can be ({MAX_MESSAGE} bytes)")

    async def main() -> None:
        async with client() as connected:
            await connected.cache_put(key, content, ttl=ttl, scope=scope)

    run(main())


@command.command("get", short_help="Print a value.")
@cache_options
@click.argument("key")
def get(client: Callable[[], FelixClient], scope: Scope | None, key: str) -> None:
    """Print the value under KEY, byte for byte.

    The exit code is 0 if there is one, 1 if there is none or it could not be had, and 2 for a wrong command line.
    """

    async def main() -> bytes | None:
        async with client() as connected:
            return await connected.cache_get(key, scope=scope)

    found = run(main())
    if found is None:
        raise NoValue(f"there is no value for {key!r}")
    write_out(found)
