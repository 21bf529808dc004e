"""Gateways in processes of their own, for tests from the outside: what they print, answer and end with."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.config import PROTOCOLS
from headrace.wire import blipmq
from tests.gateway import zygote

MAIN = "from headrace.cli import main; main()"
PATIENCE = 30.0  # seconds until a test gives up; nothing is judged by it

# Small segments are prepared in no time; any free port will do.
SMALL = (
    "log.segment_bytes=256KiB",
    "log.retention_bytes=2MiB",
    "listen.blipmq.max_frame_bytes=64KiB",
    *(f"listen.{name}.bind=127.0.0.1:0" for name in PROTOCOLS),
    "listen.zeroctl.bind=",  # its largest messages need larger segments
    "zeroctl.heartbeat_interval=0",  # no messages but the tests' own
    "admin.bind=127.0.0.1:0",
)


class GatewayProcess:
    """`headrace serve` as a child; a test that forgets to end it finds it killed."""

    def __init__(
        self,
        data: Path,
        *sets: str,
        config: Path | None = None,
        environ: Mapping[str, str] | None = None,
        main: str = MAIN,
        pass_fds: Sequence[int] = (),
        launcher: Sequence[str] = (),
    ) -> None:
        arguments = ["serve", "--data", str(data)]
        if config is not None:
            arguments += ["--config", str(config)]
        for one in (*SMALL, *sets):
            arguments += ["--set", one]
        env = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        env.update(environ or {})
        self.child: subprocess.Popen[str] | zygote.Forked
        if environ or pass_fds or launcher or sys.platform != "linux":
            self.child = subprocess.Popen(
                [*launcher, sys.executable, "-c", main, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
                pass_fds=pass_fds,
            )
        else:
            self.child = zygote.run(main, arguments, env)
        self._sockets: list[socket.socket] = []
        self.out: list[str] = []
        self.errors: list[str] = []
        self.events: list[dict[str, Any]] = []
        self._readers = [
            threading.Thread(target=self._read_out, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> "GatewayProcess":
        self.until(lambda: self.out or self.child.poll() is not None)
        assert self.out, self.errors
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _read_out(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.out.append(line)

    def _read_errors(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.errors.append(line)
            if line.startswith("{"):
                self.events.append(json.loads(line))

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, (self.out, self.errors)
            time.sleep(0.005)

    def event(self, name: str) -> dict[str, Any]:
        """The first event of this name, as soon as it is there."""
        self.until(lambda: self.named(name))
        return self.named(name)[0]

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    def signal(self, number: signal.Signals) -> None:
        self.child.send_signal(number)

    def ended(self) -> int:
        """The exit code, once it has ended and all of its output was read."""
        code = self.child.wait(PATIENCE)
        for reader in self._readers:
            reader.join(PATIENCE)
        return code

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.ended()

    def kill(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.ended()
        for pipe in (self.child.stdout, self.child.stderr):
            if pipe is not None:
                pipe.close()
        for connected in self._sockets:
            connected.close()

    @property
    def places(self) -> dict[str, str]:
        """Where it listens, by protocol, from the line that it printed."""
        words = self.out[0].split()
        assert words[:2] == ["headrace", "ready"]
        return dict(word.split("=", 1) for word in words[2:])

    def port(self, name: str = "blipmq") -> int:
        return int(self.places[name].rpartition(":")[2])

    def connect(self) -> socket.socket:
        """A connection to it, closed with it at the latest."""
        connected = socket.create_connection(("127.0.0.1", self.port()))
        connected.settimeout(PATIENCE)
        self._sockets.append(connected)
        return connected

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        """Status and body of a page of the web side."""
        request = urllib.request.Request(f"http://{self.places['admin']}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.read().decode()

    def own_memory(self) -> int:
        """Bytes that the process has for itself, the mapped log left out; 0 where the system does not tell."""
        if sys.platform != "linux":
            return 0
        for line in Path(f"/proc/{self.child.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("there is no such line")

    def status(self) -> dict[str, Any]:
        code, body = self.get("/api/status")
        assert code == 200
        found: dict[str, Any] = json.loads(body)
        return found


def events_of(gateway: GatewayProcess, protocol: str) -> dict[str, int]:
    """What a protocol's sessions have counted."""
    (events,) = [one["events"] for one in gateway.status()["listeners"] if one["protocol"] == protocol]
    found: dict[str, int] = events
    return found


class Peer:
    """A blocking BlipMQ peer that says and hears frames."""

    def __init__(self, connected: socket.socket, key: str = "dev-key") -> None:
        self.socket = connected
        self.socket.settimeout(PATIENCE)
        self._decoder = blipmq.Decoder()
        self._frames: list[blipmq.Frame] = []
        self.send(blipmq.encode_hello(1, 1))
        self.send(blipmq.encode_auth(key, 2))
        self.greetings = [self.receive(), self.receive()]

    @classmethod
    def to(cls, gateway: GatewayProcess, key: str = "dev-key") -> "Peer":
        return cls(gateway.connect(), key)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> blipmq.Frame | None:
        """The next frame; None at the end of the stream."""
        while not self._frames:
            data = self.socket.recv(65536)
            if not data:
                return None
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def publish(self, topic: str, message: bytes, qos: int = 1) -> None:
        """Returns when the gateway has it in good hands."""
        self.send(blipmq.encode_publish(topic, message, qos, 3))
        self.send(blipmq.encode_ping(4))
        assert isinstance(self.receive(), blipmq.Pong)

    def close(self) -> None:
        self.socket.close()
