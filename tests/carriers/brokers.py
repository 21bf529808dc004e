"""Brokers of the system, each started by a test for itself: RabbitMQ and mosquitto on free ports, with their data in
the test's directory. It knows nothing of zeroctl."""

import os
import shutil
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

PATIENCE = 90.0  # seconds; an Erlang system takes its time on a busy machine


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class Broker(ABC):
    """A broker as a child; a test that forgets to end it finds it killed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.child: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def command(self) -> tuple[list[str], dict[str, str]]:
        """What starts it, and the environment that it needs."""

    def answers(self) -> bool:
        """Whether it lets clients in."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connected:
                connected.settimeout(5)
                connected.sendall(self.greeting)
                return bool(connected.recv(1))
        except OSError:
            return False

    greeting = b""

    def start(self) -> None:
        command, environ = self.command()
        with (self.directory / "output").open("ab") as output:
            self.child = subprocess.Popen(
                command, env={**os.environ, **environ}, stdout=output, stderr=output, start_new_session=True
            )
        deadline = time.monotonic() + PATIENCE
        while not self.answers():
            said = (self.directory / "output").read_text("utf-8", "replace")[-2000:]
            assert self.child.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends it as abruptly as a power cut."""
        if self.child is not None:
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()
            self.child = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Mosquitto(Broker):
    # CONNECT of MQTT 3.1.1 with a clean session and the name "probe".
    greeting = bytes.fromhex("101100044d5154540402003c000570726f6265")

    def command(self) -> tuple[list[str], dict[str, str]]:
        file = self.directory / "mosquitto.conf"
        file.write_text(
            f"listener {self.port} 127.0.0.1\nallow_anonymous true\npersistence false\nmax_inflight_messages 0\n"
        )
        program = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
        assert program is not None
        # As root it would become another user, who may not read the file.
        file.write_text(file.read_text() + ("user root\n" if os.geteuid() == 0 else ""))
        return [program, "-c", str(file)], {}

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"


class Rabbit(Broker):
    greeting = b"AMQP\x00\x00\x09\x01"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.epmd_port = free_port()
        self.distribution_port = free_port()

    def command(self) -> tuple[list[str], dict[str, str]]:
        (self.directory / "plugins").write_text("[].")
        (self.directory / "rabbitmq.conf").write_text("log.console.level = error\nloopback_users = none\n")
        scripts = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server"))
        # Debian's own script becomes another user; the one behind it does not.
        program = str(scripts[-1]) if scripts else shutil.which("rabbitmq-server")
        assert program is not None
        place = str(self.directory)
        return [program], {
            "HOME": place,
            "RABBITMQ_NODENAME": f"headrace{self.port}@localhost",
            "RABBITMQ_MNESIA_BASE": f"{place}/mnesia",
            "RABBITMQ_LOG_BASE": f"{place}/log",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_DIST_PORT": str(self.distribution_port),
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{place}/plugins",
            "RABBITMQ_PID_FILE": f"{place}/pid",
            "RABBITMQ_CONFIG_FILE": f"{place}/rabbitmq",
            "RABBITMQ_CONF_ENV_FILE": f"{place}/none",
            "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_RELAXED_COMMAND_CHECK": "1",  # it may be told to end, whatever it believes to be alive
        }

    def stop(self) -> None:
        super().stop()
        # Erlang's port mapper is a daemon of its own.
        subprocess.run(["epmd", "-port", str(self.epmd_port), "-kill"], capture_output=True)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"
