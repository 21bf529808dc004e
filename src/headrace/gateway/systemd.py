"""What a service manager and its service say to each other: readiness, reloading, stopping and the watchdog
one way (sd_notify), sockets the other way (socket activation). Knows nothing of what the service does;
without a service manager all of it is silent."""

import os
import socket
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field

from headrace import events
from headrace.errors import HeadraceError

FIRST_FD = 3  # SD_LISTEN_FDS_START

log = events.get("gateway.systemd")


class Notifier:
    """Tells the service manager, if there is one, how the service is."""

    def __init__(self, environ: MutableMapping[str, str], pid: int) -> None:
        """Takes its variables out of the environment, so that no child believes they are its own."""
        self._address = environ.pop("NOTIFY_SOCKET", "")
        self._socket: socket.socket | None = None
        if self._address.startswith("@"):  # an abstract name
            self._address = "\0" + self._address[1:]
        watchdog = environ.pop("WATCHDOG_USEC", "")
        watched = environ.pop("WATCHDOG_PID", str(pid))
        # Half of what the manager allows, as sd_watchdog_enabled(3) recommends; None: it watches nobody, or
        # another.
        self.watchdog_seconds: float | None = None
        if watchdog.isdecimal() and int(watchdog) > 0 and watched == str(pid):
            self.watchdog_seconds = int(watchdog) / 2_000_000

    def ready(self, status: str) -> None:
        """All that was to be opened is open; also said when a reload is done."""
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", f"STATUS={status}")

    def alive(self) -> None:
        """To be said every `watchdog_seconds`."""
        self._send("WATCHDOG=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                self._socket.setblocking(False)
                self._socket.connect(self._address)
            self._socket.send("\n".join(lines).encode())
        except OSError as error:
            # A manager that does not listen must not stop the service.
            log.limited("systemd.unreachable", said=lines[0], reason=error.strerror or str(error))


class ActivationError(HeadraceError):
    """A socket that the configuration names was not passed, or is of the wrong kind."""


@dataclass
class PassedSockets:
    """The listening sockets that the service manager opened, by name. Each can be taken once."""

    by_name: dict[str, list[socket.socket]] = field(default_factory=dict)

    @classmethod
    def inherited(cls, environ: MutableMapping[str, str], pid: int) -> "PassedSockets":
        """Those that were passed to this process; takes the variables out of the environment."""
        for_pid = environ.pop("LISTEN_PID", "")
        count = environ.pop("LISTEN_FDS", "")
        names = environ.pop("LISTEN_FDNAMES", "").split(":")
        environ.pop("LISTEN_PIDFDID", None)
        passed = cls()
        if for_pid != str(pid) or not count.isdecimal():
            return passed
        for index in range(int(count)):
            fd = FIRST_FD + index
            os.set_inheritable(fd, False)
            name = names[index] if index < len(names) and names[index] else "unknown"
            passed.by_name.setdefault(name, []).append(socket.socket(fileno=fd))
        return passed

    def take(self, name: str) -> list[socket.socket]:
        """All sockets of this name, as streams that listen."""
        found = self.by_name.pop(name, [])
        if not found:
            known = ", ".join(sorted(self.by_name)) or "none"
            raise ActivationError(
                f'no socket called "{name}" was passed by the service manager (passed: {known})'
            )
        for passed in found:
            listens = passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if passed.type != socket.SOCK_STREAM or not listens:
                raise ActivationError(f'the passed socket "{name}" is no stream socket that listens')
            passed.setblocking(False)
        return found

    def close_rest(self) -> None:
        """Closes what nobody took, and says so: it is a sign of names that do not match."""
        for name, rest in self.by_name.items():
            log.warning("systemd.socket_unused", name=name, count=len(rest))
            for passed in rest:
                passed.close()
        self.by_name.clear()
