"""Logs in temporary directories, small enough that a test sees them roll and recycle."""

import os
import shlex
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.log import Log

SMALL = {"segment_bytes": 65536, "pool_segments": 1, "retention_bytes": 64 * 65536}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory whose files live in memory where the system has such a place: thousands of syncs cost
    nothing there."""
    if os.path.isdir("/dev/shm"):
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="headrace-") as path:
            yield Path(path)
    else:
        yield tmp_path


@pytest.fixture
def open_log(directory: Path) -> Iterator[Callable[..., Log]]:
    """Opens the log of the test's directory, with small segments unless told otherwise; closed when the test ends."""
    opened: list[Log] = []

    def open_it(**options: Any) -> Log:
        opened.append(Log(directory, **(SMALL | options)))
        return opened[-1]

    yield open_it
    for log in opened:
        log.close()


@pytest.fixture(scope="session")
def compile_c(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a shared library of a C file that stands next to this one."""

    def compile_it(name: str) -> Path:
        library = tmp_path_factory.mktemp("compiled") / Path(name).with_suffix(".so")
        source = Path(__file__).with_name(name)
        headers = Path(__file__).parents[2] / "ext" / "headrace"
        compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
        flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", f"-I{headers}"]
        subprocess.run([compiler, *flags, "-o", library, source, "-ldl"], check=True)
        return library

    return compile_it


@pytest.fixture(scope="session")
def disk_library(compile_c: Callable[[str], Path]) -> Path:
    """The disk for tests, to be preloaded."""
    return compile_c("disk.c")
