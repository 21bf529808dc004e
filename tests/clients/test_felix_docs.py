"""The program and the commands in docs/protocols/felix.md do what the page says."""

import re
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from headrace.cli import main
from tests.gateway.gateways import PATIENCE, GatewayProcess

PAGE = (Path(__file__).parents[2] / "docs" / "protocols" / "felix.md").read_text("utf-8")


def test_the_program_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with GatewayProcess(tmp_path) as gateway:
        script = program.replace("127.0.0.1:5000", gateway.places["felix"])
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True
        )
    assert done.stdout == "b'hello' b'a' b'b'\nb'value'\n"


def test_commands_have_options_that_exist() -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines():
        words = line.split()
        group = words[1:3] if words[1] == "cache" else words[1:2]
        help_text = CliRunner().invoke(main, [*group, "--help"]).stdout
        for option in re.findall(r"--[a-z-]+", line):
            assert option in help_text


def test_the_configuration_is_valid(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    authority = tmp_path / "clients.pem"
    authority.touch()
    file = tmp_path / "headrace.toml"
    file.write_text(block.replace("/etc/headrace/clients.pem", str(authority)))
    checked = CliRunner().invoke(main, ["config", "check", str(file)])
    assert checked.exit_code == 0, checked.output
