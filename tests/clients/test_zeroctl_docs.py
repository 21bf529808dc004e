"""The program in docs/protocols/zeroctl.md does what the page says, as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

from tests.gateway.gateways import PATIENCE, GatewayProcess

PAGE = (Path(__file__).parents[2] / "docs" / "protocols" / "zeroctl.md").read_text("utf-8")


def test_the_program_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    sets = ("listen.zeroctl.bind=127.0.0.1:0", "log.segment_bytes=16MiB", "log.retention_bytes=128MiB")
    with GatewayProcess(tmp_path, *sets) as gateway:
        script = program.replace("127.0.0.1:5700", gateway.places["zeroctl"])
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True
        )
    assert done.stdout == "event.parser.web1 web1.example.com-parser b'{\"lines\": 3}'\nb'done'\n"
