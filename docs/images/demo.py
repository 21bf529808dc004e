"""Runs `headrace demo --spark` for a minute and keeps its screen, as it was after three quarters of the time.

python docs/images/demo.py docs/images/demo.svg
"""

import io
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from rich.console import Console, RenderableType

from headrace.cli import demo
from headrace.clients.shell import run
from headrace.demo.view import Screen

SECONDS = 60.0
RATE = 1000.0
WIDTH = 132

seen: list[RenderableType] = []


class KeptScreen(Screen):
    def draw(self, *what: object, **more: object) -> RenderableType:
        seen.append(super().draw(*what, **more))  # type: ignore[arg-type]
        return seen[-1]


def main(picture: str) -> None:
    demo.Screen = KeptScreen  # type: ignore[misc]
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as home, redirect_stdout(printed):
        code = run(demo.Demo(Path(home), SECONDS, RATE, live=True, spark=True).run())
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(seen[len(seen) * 3 // 4])
    console.save_svg(picture, title="headrace demo --spark")
    print(printed.getvalue())
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
