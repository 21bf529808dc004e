"""What can go wrong between a client and its server, whatever the protocol. A protocol's own refusals are
next to its client."""

import asyncio
import os
import re
import socket
import ssl
from collections.abc import Callable
from types import TracebackType
from typing import Final, TypeVar

from headrace.errors import HeadraceError


class ClientError(HeadraceError):
    """Anything that a client could not do; its text names the server."""


class ConnectionFailed(ClientError, ConnectionError):
    """No connection could be made."""


class ConnectionLost(ClientError, ConnectionError):
    """The connection ended before the answer came; whether the server acted is not known."""


class OperationTimeout(ClientError, TimeoutError):
    """The server did not answer, read or come back in time; whether it acted is not known."""


class ProtocolError(ClientError):
    """What the server sent is not of the protocol."""


class ClientClosed(ClientError):
    """The client was closed before, or while it was used."""


Error = TypeVar("Error", bound=ClientError)


def again(error: Error) -> Error:
    """An error of its own for each who gets it: raising one adds to its traceback."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy


class Limit:
    """An asyncio.timeout() that says what took too long, by an OperationTimeout with this text."""

    def __init__(self, seconds: float, text: str | Callable[[], str]) -> None:
        self._timeout = asyncio.timeout(seconds)
        self._text = text

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise OperationTimeout(self._text if isinstance(self._text, str) else self._text()) from None


PLACE_IN_OPENSSL: Final = re.compile(r"^\[.*?\] | \(_ssl\.c:\d+\)$")
SERVE_HINT: Final = (
    "'headrace serve' starts a gateway, and the line that it prints when it is ready says where it listens"
)
KEY_HINT: Final = "--key or HEADRACE_CLIENT_KEY says which key to use; the gateway's are its [[keys]]"


def hung_up(protocol: str, tls: bool) -> str:
    """What to ask when a server ends a connection before it has said anything."""
    return f"during the handshake: does it speak {protocol} {'with' if tls else 'without'} TLS?"


def reason_of(error: BaseException) -> str:
    """What an error of the system means, in words: "connection refused"."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, OSError) and error.strerror:
        if isinstance(error, ssl.SSLError):
            return PLACE_IN_OPENSSL.sub("", error.strerror)
        # The loops put addresses into strerror; the number says it best, unless it is of a library.
        library = isinstance(error, socket.gaierror)
        return error.strerror if library or not error.errno else os.strerror(error.errno).lower()
    if isinstance(error, ConnectionResetError) and not error.args:
        # A loop's own word for the end of a connection in the middle of a TLS handshake.
        return "it hung up during the TLS handshake: does it speak TLS?"
    return str(error) or type(error).__name__


def cannot_connect(where: object, error: OSError) -> ConnectionFailed:
    """What to raise where the system could not make a connection."""
    failed = ConnectionFailed(f"cannot connect to {where}: {reason_of(error)}")
    if isinstance(error, ConnectionRefusedError | FileNotFoundError):
        failed.hint = SERVE_HINT
    return failed
