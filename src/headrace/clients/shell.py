"""What the commands that talk through a client share: the options that say to whom, the loop they run on, and
how they end in a shell. It knows click, and nothing of what the commands say."""

import asyncio
import contextlib
import difflib
import functools
import os
import select
import signal
import ssl
import stat
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import click

from headrace.clients.errors import reason_of
from headrace.clients.face import Client, Server
from headrace.clients.protocols import CLIENTS
from headrace.config.addresses import parse_address
from headrace.errors import HeadraceError

P = ParamSpec("P")
T = TypeVar("T")

# 128 and the signal's number, as a shell shows the end by a signal.
INTERRUPTED: Final = 128 + signal.SIGINT
BROKEN_PIPE: Final = 128 + signal.SIGPIPE

# How long connecting and each answer may take: a gateway that blocks on a full disk says so after half of it.
TIMEOUT_SECONDS: Final = 10.0

KEY_VARIABLE: Final = "HEADRACE_CLIENT_KEY"

# What every protocol calls an address, for the end of a help text.
ADDRESSES: Final = (
    "Addresses: " + "; ".join(f"{name}: {client.form}" for name, client in CLIENTS.items()) + "."
)


class Unread(Exception):
    """Nobody reads standard output any more."""


# --- whom to talk to ----------------------------------------------------------------------------------------


def known_protocol(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    if value is None:
        raise click.MissingParameter(f"There are: {', '.join(CLIENTS)}.", ctx, param)
    name = value.lower()
    if name in CLIENTS:
        return name
    near = difflib.get_close_matches(name, CLIENTS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(CLIENTS)}."
    raise click.BadParameter(f"unknown protocol {value!r}; {hint}", ctx, param)


def good_address(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None:
        try:
            parse_address(value)
        except ValueError as error:
            raise click.BadParameter(f"{value!r}: {error}", ctx, param) from None
    return value


def key_option(command: Callable[P, T]) -> Callable[P, T]:
    """Adds --key."""
    return click.option(
        "--key",
        metavar="KEY",
        default="dev-key",
        show_default=True,
        envvar=KEY_VARIABLE,
        show_envvar=True,
        help="The key to authenticate with. Others can see command lines, but not the variable.",
    )(command)


def server_options(command: Callable[Concatenate[Client, Server, P], T]) -> Callable[..., T]:
    """Adds --protocol, --at, --key and those for TLS; the command gets the protocol's client and the
    server."""

    @functools.wraps(command)
    def with_server(
        *args: Any,
        protocol: str,
        at: str | None,
        key: str,
        tls: bool,
        tls_ca: Path | None,
        tls_cert: Path | None,
        tls_key: Path | None,
        **rest: Any,
    ) -> T:
        client = CLIENTS[protocol]
        context = tls_context(tls, tls_ca, tls_cert, tls_key)
        server = Server(at or client.at, key, context, TIMEOUT_SECONDS, tls_ca, tls_cert, tls_key)
        return command(client, server, *args, **rest)

    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    addresses = ", ".join(f"{client.at} for {name}" for name, client in CLIENTS.items())
    options: list[Callable[[Callable[..., T]], Callable[..., T]]] = [
        click.option(
            "--protocol",
            "-p",
            metavar="NAME",
            callback=known_protocol,
            help=f"The protocol to speak: {', '.join(CLIENTS)}.",
        ),
        click.option(
            "--at",
            metavar="HOST:PORT",
            callback=good_address,
            help=f'Where the server listens, also "unix:/path".  [default: {addresses}]',
        ),
        key_option,
        click.option("--tls", is_flag=True, help="Encrypt; so do the options that follow."),
        click.option("--tls-ca", metavar="FILE", type=file, help="Trust the authorities in FILE."),
        click.option("--tls-cert", metavar="FILE", type=file, help="Show the certificate in FILE."),
        click.option("--tls-key", metavar="FILE", type=file, help="Its key, if in another file."),
    ]
    return functools.reduce(lambda decorated, option: option(decorated), reversed(options), with_server)


def tls_context(
    tls: bool, ca: Path | None, certificate: Path | None, key: Path | None
) -> ssl.SSLContext | None:
    if key is not None and certificate is None:
        raise click.UsageError("--tls-key needs --tls-cert")
    if not tls and ca is None and certificate is None:
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except OSError as error:
        raise HeadraceError(
            f"cannot use the files for TLS: {reason_of(error)}; they are to be PEM files"
        ) from None
    return context


# --- running ------------------------------------------------------------------------------------------------


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a command on the fastest loop there is. Ctrl-C, and a pipe that nobody reads any more, end it as a
    shell expects: without a word."""
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(main)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Unread:
        code = BROKEN_PIPE
        # Python would complain about what it cannot flush at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def write_out(data: bytes) -> None:
    """Writes to standard output at once, for whoever reads along."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise Unread from None


def until_unread() -> asyncio.Future[None]:
    """Cancelled when standard output is a pipe whose reader has gone, so that a command that has nothing to
    write notices, too."""
    loop = asyncio.get_running_loop()
    unread: asyncio.Future[None] = loop.create_future()
    number = sys.stdout.fileno()

    def watch() -> None:
        poll = select.poll()
        poll.register(number, 0)  # errors are told without being asked for
        poll.poll()
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(unread.cancel)

    if stat.S_ISFIFO(os.fstat(number).st_mode):
        # A loop of its own, because uvloop takes an error on a descriptor it watches for its own failure.
        threading.Thread(target=watch, name="until-unread", daemon=True).start()
    return unread
