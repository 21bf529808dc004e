"""Starts each measured server on free loopback ports with its data in a directory of its own, and stops
exactly what it started. Knows nothing of what is measured."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.peers.failures import RunFailed, Unavailable
from bench.peers.plan import Contender

START_SECONDS = 30.0
STOP_SECONDS = 20.0
LOOPBACK = "127.0.0.1"
POOL_SEGMENTS = 3  # the gateway's default, named because bursts are sized by it
# Less than the default: all of the log stays well below what the kernel lets be dirty, and from 1 GiB on segments are
# recycled. While a log grows to its retention, new files limit it: their pages have to be had from the system first.
RETENTION = "1GiB"
POOL_GAUGE = re.compile(r"^headrace_log_pool_segments (\S+)$", re.MULTILINE)
OTHER_LISTENERS = ("overhop", "relink", "zeroctl", "felix")
# Debian puts nats-server where only an administrator's shell looks.
SYSTEM_PLACES = ("/usr/sbin", "/usr/local/sbin", "/usr/local/bin", "/usr/bin")
PACKAGES = {"nats-server": "nats-server", "redis-server": "redis-server"}


def find_program(name: str) -> Path:
    """Where a program of the system is."""
    places = os.pathsep.join((os.environ.get("PATH", ""), *SYSTEM_PLACES))
    found = shutil.which(name, path=places)
    if found is None:
        raise Unavailable(f"{name} was not found; install it (Debian's package is {PACKAGES[name]})")
    return Path(found)


def gateway_program() -> Path:
    """The `headrace` command of the environment that runs this."""
    return Path(sys.executable).parent / "headrace"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A server process: up inside a `with`, gone after it."""

    def __init__(
        self, name: str, port: int, command: list[str], home: Path, is_up: Callable[["Server"], bool]
    ) -> None:
        self.name = name
        self.port = port
        self._command = command
        self._home = home
        self._is_up = is_up
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def printed(self) -> Path:
        """What it printed to standard output."""
        return self._home / "stdout"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        self._home.mkdir(parents=True)
        with self.printed.open("wb") as out, (self._home / "stderr").open("wb") as err:
            try:
                # A session of its own, so that an interrupt at the terminal reaches only this program,
                # which then stops the server in order.
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
                )
            except OSError as error:
                raise Unavailable(
                    f"{self.name} did not start: {self._command[0]}: {error.strerror}"
                ) from error
        try:
            self._wait_until_up()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = self._process.poll() if self._process else None
        self._stop()
        if ended is not None and (kind is None or issubclass(kind, RunFailed)):
            seen = f"{error}; " if error else ""
            raise RunFailed(f"{seen}{self.name} ended by itself with code {ended}: {self.last_words()}")

    def put_first_thread_on(self, cpu: int) -> None:
        """Its other threads, which are there already, may still run anywhere."""
        os.sched_setaffinity(self.pid, {cpu})

    def cpu_seconds(self) -> float | None:
        """What its process has used so far, where the system tells."""
        try:
            # The command's name, in parentheses, may itself hold spaces.
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def last_words(self) -> str:
        """The end of what it wrote, for a message about its failure."""
        for name in ("stderr", "stdout"):
            lines = (self._home / name).read_text(errors="replace").strip().splitlines()
            if lines:
                return " | ".join(lines[-5:])
        return "it wrote nothing"

    def _wait_until_up(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while not self._is_up(self):
            if (code := self._process.poll()) is not None:
                raise Unavailable(f"{self.name} did not come up: exit code {code}: {self.last_words()}")
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{self.name} did not come up within {START_SECONDS:.0f} s: {self.last_words()}"
                )
            time.sleep(0.01)

    def _stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def ready_and_warm(admin_port: int) -> Callable[[Server], bool]:
    """Whether the gateway has printed that everything listens, and its pool of segments is full."""

    def is_up(server: Server) -> bool:
        if not any(line.startswith("headrace ready") for line in server.printed.read_text().splitlines()):
            return False
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{admin_port}/metrics", timeout=5.0) as answer:
                metrics: str = answer.read().decode()
        except OSError:
            return False
        pool = POOL_GAUGE.search(metrics)
        if pool is None:
            raise Unavailable(f"{server.name} does not tell in /metrics how many segments are ready")
        return float(pool[1]) >= POOL_SEGMENTS

    return is_up


def answers(request: bytes, answer: bytes) -> Callable[[Server], bool]:
    """Whether the server says `answer` after `request`."""

    def is_up(server: Server) -> bool:
        try:
            with socket.create_connection((LOOPBACK, server.port), timeout=1.0) as connection:
                connection.sendall(request)
                return connection.recv(4096).startswith(answer)
        except OSError:
            return False

    return is_up


def headrace(home: Path, sync: str, program: Path) -> Server:
    """This gateway, with the sink and the other protocols off."""
    port, admin_port = free_port(), free_port()
    settings = [
        f"listen.blipmq.bind={LOOPBACK}:{port}",
        f"admin.bind={LOOPBACK}:{admin_port}",
        "drop.enabled=false",
        f"log.pool_segments={POOL_SEGMENTS}",
        f"log.retention_bytes={RETENTION}",
        f"log.sync={sync}",
        *(f"listen.{protocol}.bind=" for protocol in OTHER_LISTENERS),
    ]
    command = [str(program), "serve", "--data", str(home / "data")]
    for setting in settings:
        command += ["--set", setting]
    return Server("the gateway", port, command, home, ready_and_warm(admin_port))


def nats(home: Path, *, jetstream: bool) -> Server:
    """nats-server: its core, or with JetStream keeping files."""
    port = free_port()
    command = [str(find_program("nats-server")), "-a", LOOPBACK, "-p", str(port)]
    if jetstream:
        command += ["-js", "-sd", str(home / "jetstream")]
    return Server("nats-server", port, command, home, answers(b"", b"INFO "))


def redis(home: Path) -> Server:
    """redis-server that syncs its append-only file before it answers, and never rewrites it meanwhile."""
    port = free_port()
    options = {
        "bind": LOOPBACK,
        "port": str(port),
        "dir": str(home),
        "save": "",
        "appendonly": "yes",
        "appendfsync": "always",
        "auto-aof-rewrite-percentage": "0",
        "daemonize": "no",
    }
    command = [str(find_program("redis-server"))]
    for name, value in options.items():
        command += [f"--{name}", value]
    return Server("redis-server", port, command, home, answers(b"PING\r\n", b"+PONG"))


def server_for(contender: Contender, home: Path, sync: str, program: Path) -> Server | None:
    """The server of a contender; memory copy and the discarding reader have none."""
    match contender:
        case Contender.HEADRACE:
            return headrace(home, sync, program)
        case Contender.NATS:
            return nats(home, jetstream=False)
        case Contender.JETSTREAM:
            return nats(home, jetstream=True)
        case Contender.REDIS:
            return redis(home)
        case Contender.DRAIN | Contender.MEMORY:
            return None
