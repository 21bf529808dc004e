"""Processes that begin with what the gateway imports already imported: one that has done so is forked for each. Tests
start hundreds of gateways, and importing takes longer than most of them live. It knows nothing of what runs there."""

import atexit
import json
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

CALL = "import sys; from tests.gateway import zygote; zygote.serve(int(sys.argv[1]))"
MOST_REQUEST = 1 << 17


class Forked:
    """A child of the zygote, with as much of subprocess.Popen's face as tests look at."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.args: list[str] = []
        self.returncode: int | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        self.ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The one that is forked, from this side. It ends with this process, and so does all that came of it."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-c", CALL, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._born: queue.SimpleQueue[Forked] = queue.SimpleQueue()
        self._alive: dict[int, Forked] = {}
        self._asking = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        atexit.register(self.close)

    def close(self) -> None:
        self._channel.shutdown(socket.SHUT_RDWR)
        self._child.wait()
        self._reader.join()
        self._channel.close()

    def _read(self) -> None:
        while said := self._channel.recv(MOST_REQUEST):
            told = json.loads(said)
            if told["what"] == "born":
                self._alive[told["pid"]] = child = Forked(told["pid"])
                self._born.put(child)
            else:
                child = self._alive.pop(told["pid"])
                child.returncode = told["code"]
                child.ended.set()

    def run(self, program: str, arguments: Sequence[str], env: Mapping[str, str]) -> Forked:
        """A process that does as `python -c program arguments...` would."""
        request = {"program": program, "arguments": list(arguments), "env": dict(env), "cwd": os.getcwd()}
        out, their_out = os.pipe()
        errors, their_errors = os.pipe()
        with self._asking:
            socket.send_fds(self._channel, [json.dumps(request).encode()], [their_out, their_errors])
            child = self._born.get(timeout=60)
        os.close(their_out)
        os.close(their_errors)
        child.args = [sys.executable, "-c", program, *arguments]
        child.stdout, child.stderr = os.fdopen(out), os.fdopen(errors)
        return child


_zygote: Zygote | None = None


def run(program: str, arguments: Sequence[str], env: Mapping[str, str]) -> Forked:
    """The same, from the zygote of this process."""
    global _zygote
    if _zygote is None:
        _zygote = Zygote()
    return _zygote.run(program, arguments, env)


# --- in the zygote ------------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Forks as it is asked to, and tells who has ended; until the channel does, and then nobody is left."""
    import uvloop  # noqa: F401

    import headrace.cli
    import headrace.gateway.process
    import headrace.quic.aioquic_engine  # noqa: F401

    channel = socket.socket(fileno=descriptor)
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the tests
    signal.set_wakeup_fd(wake.fileno())
    alive: set[int] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if woken in ready:
                woken.recv(4096)
            for pid, code in reaped(alive):
                channel.send(json.dumps({"what": "ended", "pid": pid, "code": code}).encode())
            if channel not in ready:
                continue
            said, descriptors, _, _ = socket.recv_fds(channel, MOST_REQUEST, 2)
            if not said:
                break
            pid = os.fork()
            if pid == 0:
                break
            alive.add(pid)
            channel.send(json.dumps({"what": "born", "pid": pid}).encode())
            for one in descriptors:
                os.close(one)
    channel.close()
    signal.set_wakeup_fd(-1)
    woken.close()
    wake.close()
    if said:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        become(json.loads(said), *descriptors)
    else:
        for pid in alive:
            os.kill(pid, signal.SIGKILL)


def reaped(alive: set[int]) -> list[tuple[int, int]]:
    found = []
    for pid in list(alive):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            alive.discard(pid)
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


def become(request: dict[str, Any], out: int, errors: int) -> None:
    """Does what was asked for, as a process of its own would."""
    for ours, number in ((out, 1), (errors, 2)):
        os.dup2(ours, number)
        os.close(ours)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["-c", *request["arguments"]]
    exec(compile(request["program"], "<string>", "exec"), {"__name__": "__main__"})
