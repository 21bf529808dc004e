"""A gateway's log, bus and one BlipMQ session in a process of its own, spoken to through a socket, so that it
can be killed; run as a program it is that process. It knows nothing of what is said."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.bus import Bus
from headrace.config.schema import Key
from headrace.log import Log
from headrace.sessions.blipmq import Blipmq
from headrace.sessions.rights import Keyring
from headrace.wire import blipmq as wire

PATIENT = {"max_deliveries": 100_000, "max_inflight": 65_536}
KEY = Key(name="dev", key="dev-key", publish=["#"], subscribe=["#"])


def serve(path: str, connection: socket.socket, options: dict[str, Any]) -> None:
    """What a gateway's loop does, for one peer; `options` are the bus's."""
    log = Log(path, sync="always", segment_bytes=1 << 18, pool_segments=1)
    bus = Bus(log, **options)
    session = Blipmq(bus, Keyring([KEY])).session()
    sources: list[socket.socket | int] = [connection, log.event_fd]
    while not session.closing:
        ready, _, _ = select.select(sources, [], [], 0.1)
        data = b""
        if log.event_fd in ready:
            log.on_event()
            bus.on_safe()
        if connection in ready and not session.blocked:
            data = connection.recv(1 << 16)
            if not data:
                break
        connection.sendall(session.feed(data))
        connection.sendall(session.elapse())


class KillableGateway:
    """The process, and this side of its socket. It does not outlive its `with` block."""

    def __init__(
        self, path: Path, preload: Path | None = None, *, bus: dict[str, Any] = PATIENT, **environment: str
    ) -> None:
        self.connection, theirs = socket.socketpair()
        preloaded = [os.environ.get("LD_PRELOAD", ""), str(preload or "")]
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(path), str(theirs.fileno()), json.dumps(bus)],
            pass_fds=[theirs.fileno()],
            env={
                **os.environ,
                **environment,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "LD_PRELOAD": " ".join(filter(None, preloaded)),
            },
        )
        theirs.close()
        self.decoder = wire.Decoder()
        self.arrived: list[wire.Frame] = []

    def __enter__(self) -> "KillableGateway":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def receive(self, count: int) -> list[wire.Frame]:
        """The next so many frames."""
        while len(self.arrived) < count:
            data = self.connection.recv(1 << 16)
            assert data, "the gateway has hung up"
            self.arrived += self.decoder.feed(data)
        frames, self.arrived = self.arrived[:count], self.arrived[count:]
        return frames

    def silent(self, seconds: float) -> bool:
        """Whether it says nothing more for so long."""
        return not self.arrived and not select.select([self.connection], [], [], seconds)[0]

    def kill(self) -> list[wire.Frame]:
        """Kills it at once; the frames that had left it before and were not received yet."""
        frames, self.arrived = self.arrived, []
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            while data := self._rest():
                frames += self.decoder.feed(data)
            self.connection.close()
        return frames

    def _rest(self) -> bytes:
        try:
            return self.connection.recv(1 << 16)
        except ConnectionResetError:  # it left input unread, and we have read all there was
            return b""


if __name__ == "__main__":
    serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), json.loads(sys.argv[3]))
