"""A full disk is an error to publishers and not the end of the process, and work goes on once there is room."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.log import full_disk
from tests.suites import private_mounts

MOUNT_AND_RUN = 'mount -t tmpfs -o size=1m headrace "$0" && exec "$@"'


@pytest.mark.needs("mount")
def test_a_full_disk_is_survived(tmp_path: Path) -> None:
    """On a file system of one mebibyte that only this child sees."""
    prefix = private_mounts()
    assert prefix is not None
    program = [
        *prefix,
        "sh",
        "-c",
        MOUNT_AND_RUN,
        str(tmp_path),
        sys.executable,
        full_disk.__file__,
        str(tmp_path),
    ]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    answer = subprocess.run(
        program, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=250
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "survived\n"
