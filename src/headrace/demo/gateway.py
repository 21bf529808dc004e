"""A gateway of the demo's own: a child process on free ports of this machine, with its data in one directory. It knows
nothing of what is sent to it."""

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from headrace.clients.protocols import CLIENTS
from headrace.errors import HeadraceError

READY_SECONDS: Final = 60.0  # making a log's first segments takes a moment on a slow disk
STOP_SECONDS: Final = 60.0  # for the last files of the drop
LAST_LINES: Final = 5  # of what a gateway wrote that has failed

LINES: Final = "\n".join(f'{name}.bind = "127.0.0.1:0"' for name in sorted(CLIENTS))
SETTINGS: Final = f"""\
[node]
name = "demo"

[log]
segment_bytes = "16MiB"
retention_bytes = "1GiB"

[listen]
{LINES}
blipmq.max_frame_bytes = "4MiB"

[admin]
bind = "127.0.0.1:0"

[drop]
roll_seconds = 1
"""


class GatewayFailed(HeadraceError):
    """The gateway did not start, or ended before its time."""


class Gateway:
    """`headrace serve` as a child. Made by start()."""

    def __init__(self, data: Path, child: asyncio.subprocess.Process, errors: Path) -> None:
        self.data = data
        self.places: dict[str, str] = {}  # where it listens, by protocol
        self._child = child
        self._errors = errors

    @classmethod
    async def start(cls, home: Path, more_config: str) -> "Gateway":
        """A gateway that is ready. Its configuration, its output and its data are in `home`."""
        config, errors, data = home / "headrace.toml", home / "gateway.log", home / "data"
        config.write_text(SETTINGS + more_config)
        # What is set for the user's own gateway is not for this one.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        command = ["-m", "headrace.demo.child", "serve", "--config", str(config), "--data", str(data)]
        with errors.open("wb") as written:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=written,
                env=environ,
                start_new_session=True,  # Ctrl-C is the demo's, which stops it in its own time
            )
        gateway = cls(data, child, errors)
        try:
            await gateway._until_ready()
        except BaseException:
            await gateway.kill()
            raise
        return gateway

    async def _until_ready(self) -> None:
        assert self._child.stdout is not None
        try:
            async with asyncio.timeout(READY_SECONDS):
                words = (await self._child.stdout.readline()).decode().split()
        except TimeoutError:
            raise GatewayFailed(f"the gateway was not ready after {READY_SECONDS:g} s") from None
        if words[:2] != ["headrace", "ready"]:
            await self._child.wait()
            raise self._failed("could not start")
        self.places = dict(word.split("=", 1) for word in words[2:])

    @property
    def admin(self) -> str:
        return f"http://{self.places['admin']}"

    async def ended(self) -> None:
        """Raises what is wrong, if it ends."""
        await self._child.wait()
        raise self._failed(f"ended with {self._child.returncode}")

    async def stop(self) -> None:
        """Lets it finish its files."""
        with contextlib.suppress(ProcessLookupError):
            self._child.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                code = await self._child.wait()
        except TimeoutError:
            await self.kill()
            raise GatewayFailed(f"the gateway did not stop within {STOP_SECONDS:g} s") from None
        if code:
            raise self._failed(f"stopped with {code}")

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()
        await self._child.wait()

    def _failed(self, how: str) -> GatewayFailed:
        lines = self._errors.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return GatewayFailed("\n  ".join([f"the gateway {how}; its last lines:", *lines]))
