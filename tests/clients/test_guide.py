"""The programs in docs/clients.md do what the page says, as they stand there."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.gateways import PATIENCE, GatewayProcess

GUIDE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text("utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
OUTPUTS = [  # in their order
    r"demo b'hello'\n",
    r"\d+ µs to the server and back\n",
    r"",
    r"b'1'\nb'2' b'3'\n",
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path_factory.mktemp("gateway")) as running:
        yield running


@pytest.mark.parametrize(
    ("program", "output"),
    list(zip(PROGRAMS, OUTPUTS, strict=True)),
)
def test_a_program_of_the_guide_prints_what_it_should(
    gateway: GatewayProcess, program: str, output: str
) -> None:
    assert "127.0.0.1:5555" in program
    program = program.replace("127.0.0.1:5555", gateway.places["blipmq"])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, encoding="utf-8", timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(output, done.stdout)
