"""The rooms of docs/architecture.md: each uses only what the page lets it use."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
ROOMS = {
    room: set(re.findall(r"`([a-z_]+)`", uses))
    for room, uses in re.findall(r"^\| `([a-z_]+)` \| [^|]* \|([^|]*)\|$", PAGE, re.MULTILINE)
}
FOR_ALL = {"errors", "limits", "events", "headrace"}


def imported(path: Path) -> set[str]:
    """The rooms whose names this file imports."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        names = {
            f"{node.module}.{alias.name}" if node.module == "headrace" else node.module or ""
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ImportFrom) and node.level == 0
            for alias in node.names
        }
    else:
        names = {
            f"headrace.{what}" if module == "headrace" else module
            for module, what in re.findall(
                r"^\s*from (headrace[\w.]*) c?import \(?\s*(\w+)", text, re.MULTILINE
            )
        }
    found = {name.split(".")[1] for name in names if name.startswith("headrace.")}
    return {name for name in found if not name.startswith("__")}


def uses() -> dict[str, set[str]]:
    """What each room uses, by the files of both source trees."""
    found: dict[str, set[str]] = defaultdict(set)
    for base in (ROOT / "src" / "headrace", ROOT / "ext" / "headrace"):
        for path in base.rglob("*.p[yx]*"):
            if path.suffix in (".py", ".pyx", ".pxd") and path != base / f"__init__{path.suffix}":
                room = path.relative_to(base).parts[0].partition(".")[0]
                found[room] |= imported(path) - {room}
    return found


USES = uses()


def test_the_page_has_every_room() -> None:
    assert set(USES) - FOR_ALL - set(ROOMS) == set()


@pytest.mark.parametrize("room", sorted(set(ROOMS) - {"cli"}))
def test_a_room_uses_only_what_the_page_lets_it_use(room: str) -> None:
    assert USES[room] - FOR_ALL - ROOMS[room] == set()
