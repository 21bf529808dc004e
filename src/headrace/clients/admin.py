"""A gateway's admin address as commands ask it: whom, how, and what to say when no gateway answers there. It knows
nothing of what the answers mean."""

import json
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import aiohttp
import click

from headrace.clients.errors import reason_of
from headrace.config.addresses import HostPort, parse_address
from headrace.errors import HeadraceError

P = ParamSpec("P")
T = TypeVar("T")

ANSWER_SECONDS: Final = 5.0


class NoAnswer(HeadraceError):
    """The admin address does not answer as a gateway does; the text says what came instead."""

    hint = "--at is where the gateway's web side listens, the 'admin=' of the line that it prints when it is ready"


# --- whom ---------------------------------------------------------------------------------------------------


def url_of(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """The address as a URL; a port alone is one on this machine."""
    if "://" in value:
        return value.rstrip("/")
    place = f"127.0.0.1:{value}" if value.isdigit() else value
    try:
        if not isinstance(parse_address(place), HostPort):
            raise ValueError('it is "host:port"')
    except ValueError as error:
        raise click.BadParameter(f"{value!r}: {error}", ctx, param) from None
    return f"http://{place}"


def admin_option(command: Callable[P, T]) -> Callable[P, T]:
    """Adds --at; the command gets it as a URL."""
    return click.option(
        "--at",
        metavar="HOST:PORT",
        default="127.0.0.1:8600",
        show_default=True,
        callback=url_of,
        help="Where the gateway's web side listens (admin.bind).",
    )(command)


# --- asking -------------------------------------------------------------------------------------------------


def asker() -> aiohttp.ClientSession:
    """What ask() asks with."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS))


async def ask(session: aiohttp.ClientSession, url: str, path: str, needed: str) -> dict[str, Any]:
    """The object that a gateway answers with, which has the `needed` member."""
    try:
        async with session.get(url + path) as answer:
            if answer.status != 200:
                raise NoAnswer(f"cannot ask the gateway at {url}: it answers {answer.status} to {path}")
            found = json.loads(await answer.read())
    except TimeoutError:
        reason = f"no answer within {ANSWER_SECONDS:g} s"
    except aiohttp.InvalidURL:
        reason = "that is no URL"
    except aiohttp.ClientConnectorError as error:
        reason = reason_of(error.os_error)
    except (aiohttp.ClientError, OSError) as error:
        reason = reason_of(error)
    except ValueError:
        reason = f"what it answers to {path} is not JSON"
    else:
        if isinstance(found, dict) and needed in found:
            return found
        reason = f"what it answers to {path} has no {needed!r}"
    raise NoAnswer(f"cannot ask the gateway at {url}: {reason}")


async def ask_status(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """What a gateway tells of itself now."""
    return await ask(session, url, "/api/status", "listeners")
