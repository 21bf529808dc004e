"""The drop of several gateways, read by executors that are processes of their own: in Spark's local cluster, and on a
standalone master with two workers."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyspark
import pytest

from tests.spark.files import LOG, OTHER_LOG, write_range
from tests.suites import find_java

pytestmark = pytest.mark.needs("java")

ROOT = Path(__file__).parents[2]
SPARK = Path(pyspark.__file__).parent


def environment(home: Path = SPARK) -> dict[str, str]:
    java = find_java()
    assert java is not None
    return {
        **os.environ,
        "JAVA_HOME": str(java.resolve().parents[1]),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }


@contextmanager
def daemon(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Spark's, for as long as it is needed; what it says goes to a file."""
    with open(log, "wb") as file:
        # spark-class becomes the JVM, so the process is what is to be ended.
        process = subprocess.Popen(
            [SPARK / "bin" / "spark-class", *words],
            stdout=file,
            stderr=file,
            env=environment(),
            cwd=log.parent,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[str]:
    """A master and two workers on loopback; gives the master's URL."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    master = f"spark://127.0.0.1:{port}"
    own = ("--host", "127.0.0.1", "--webui-port", "0")
    with ExitStack() as stack:
        log = tmp_path / "master.log"
        running = stack.enter_context(
            daemon(log, "org.apache.spark.deploy.master.Master", *own, "--port", str(port))
        )
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert running.poll() is None, log.read_text()
                time.sleep(0.1)
        for number in range(2):
            size = (
                "--port",
                "0",
                "--cores",
                "1",
                "--memory",
                "600m",
                "--work-dir",
                str(tmp_path / f"work{number}"),
            )
            stack.enter_context(
                daemon(
                    tmp_path / f"worker{number}.log",
                    "org.apache.spark.deploy.worker.Worker",
                    *own,
                    *size,
                    master,
                )
            )
        yield master


def run_driver(what: str, master: str, drop: Path, work: Path) -> dict[str, Any]:
    work.mkdir()
    # A local cluster's executors work below SPARK_HOME, which is no place for that if it is an installed package.
    home = work / "home"
    home.mkdir()
    for one in SPARK.iterdir():
        (home / one.name).symlink_to(one)
    driver = subprocess.run(
        [sys.executable, Path(__file__).with_name("on_cluster.py"), what, master, drop, work],
        env=environment(home),
        cwd=work,
        capture_output=True,
        text=True,
    )
    assert driver.returncode == 0, driver.stderr
    found: dict[str, Any] = json.loads(driver.stdout.splitlines()[-1])
    return found


def check(what: str, master: str, drop: Path, work: Path) -> tuple[dict[str, Any], list[list[Any]]]:
    """Three gateways write into one drop directory, one of them with a second log after its first was wiped. Gives
    what a driver finds, and every row by node and log: how many, how many different ones, and their sum."""
    expected = []
    for node, log, files in (
        ("edge-1", LOG, 3),
        ("edge-1", OTHER_LOG, 1),
        ("edge-2", LOG, 2),
        ("edge-3", LOG, 2),
    ):
        for number in range(files):
            write_range(drop, number * 8, number * 8 + 7, node=node, log=log)
        rows = files * 8
        expected.append([node, log, rows, rows, sum(range(rows))])
    found = run_driver(what, master, drop, work)
    executors = found.pop("executors")
    assert len(executors) == 2
    assert found.pop("driver") not in executors
    return found, sorted(expected)


def test_executors_of_a_local_cluster_read_the_drop_of_several_gateways(drop: Path, tmp_path: Path) -> None:
    found, every = check("batch", "local-cluster[2,1,1024]", drop, tmp_path / "driver")
    # JSON is no MessagePack, so all payloads are quarantined there.
    assert found == {"read_drop": every, "source": every, "filtered": 8, "msgpack": 64}


def test_workers_of_a_standalone_master_stream_the_drop_of_several_gateways(
    standalone: str, drop: Path, tmp_path: Path
) -> None:
    found, every = check("stream", standalone, drop, tmp_path / "driver")
    assert found == {"stream": every}
