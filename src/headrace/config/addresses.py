"""Where a listener may listen, as text and as parts: "host:port", "[v6]:port", "unix:/path" and "fd:NAME".
Opens nothing and resolves no names."""

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace import limits

Form: TypeAlias = Literal["host", "unix", "fd"]

FORMS: dict[Form, str] = {
    "host": '"host:port", "[v6]:port"',
    "unix": '"unix:/path"',
    "fd": '"fd:NAME"',
}

_PORT = re.compile(r"[0-9]{1,5}")
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_FD_NAME = re.compile(
    r"[!-9;-~]+"
)  # printable ASCII without the colon that separates names in LISTEN_FDNAMES


@dataclass(frozen=True, slots=True)
class HostPort:
    """A TCP or UDP address; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it; a name other than localhost is taken to be public."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True, slots=True)
class UnixPath:
    """A Unix socket."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class InheritedSocket:
    """A socket that the service manager opened and passed by name."""

    name: str

    def __str__(self) -> str:
        return f"fd:{self.name}"


Address: TypeAlias = HostPort | UnixPath | InheritedSocket


def parse_address(text: str) -> Address:
    """The parts of an address; ValueError says what is wrong with it."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix":
        return _unix(rest)
    if scheme == "fd":
        return _inherited(rest)
    return _host_port(text)


def form_of(address: Address) -> Form:
    match address:
        case HostPort():
            return "host"
        case UnixPath():
            return "unix"
        case InheritedSocket():
            return "fd"


def _unix(path: str) -> UnixPath:
    if not path.startswith("/"):
        raise ValueError("a Unix socket needs an absolute path")
    if "\0" in path:
        raise ValueError("a path has no NUL in it")
    size = len(path.encode())
    if size > limits.UNIX_PATH_BYTES:
        raise ValueError(f"a Unix socket's path has at most {limits.UNIX_PATH_BYTES} bytes, this one {size}")
    return UnixPath(path)


def _inherited(name: str) -> InheritedSocket:
    if not _FD_NAME.fullmatch(name) or len(name) > limits.FD_NAME_CHARS:
        raise ValueError('"fd:" is followed by the name of a passed socket, like "fd:blipmq"')
    return InheritedSocket(name)


def _host_port(text: str) -> HostPort:
    host, colon, port_text = text.rpartition(":")
    if not colon or port_text.endswith("]"):
        raise ValueError("the port is missing")
    if not _PORT.fullmatch(port_text) or int(port_text) > 65_535:
        raise ValueError(f'"{port_text}" is no port from 0 to 65535')
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f'"{host}" is no IPv6 address') from None
    elif ":" in host:
        raise ValueError('an IPv6 address is written in brackets, like "[::1]:5555"')
    else:
        _check_host(host)
    return HostPort(host, int(port_text))


def _check_host(host: str) -> None:
    if not host:
        raise ValueError('the host is missing; all interfaces are "0.0.0.0" or "[::]"')
    labels = host.split(".")
    if labels[-1].isdigit():  # no top-level domain is a number, so this was meant to be an address
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise ValueError(f'"{host}" is no IPv4 address') from None
    elif len(host) > limits.HOST_NAME_CHARS or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f'"{host}" is no host name')
