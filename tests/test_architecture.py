"""The rooms of docs/architecture.md: each uses only what the page lets it use. And its bounds, which are the code's."""

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from headrace import limits
from headrace.carriers import carrier, mqtt
from headrace.config import PROTOCOLS, Config
from headrace.config.kinds import parse_duration, parse_size
from headrace.drop.parquet import ROW_GROUP_ROWS
from headrace.gateway import process
from headrace.nodes import services
from headrace.quic import datagrams
from headrace.sink import exporter

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


# --- what waits ------------------------------------------------------------------------------------------------------

WAITING = dict(re.findall(r"^\| (\d+[a-z]?) \| (.*) \|$", PAGE, re.MULTILINE))
DEFAULTS = [found for line in WAITING.values() for found in re.findall(r"`([\w.]+)` \((\d[^)]*)\)", line)]
CONSTANTS = [
    ("2", process.READ_BYTES),
    ("3a", limits.QUIC_BLOCKED_BYTES),
    ("3c", limits.ZEROCTL_HASH_INLINE),
    ("6", ROW_GROUP_ROWS),
    ("6", exporter.ROW_GROUP_BYTES),
    ("7", limits.OVERHOP_QUEUE_OPEN),
    ("9a", datagrams.MOST_WAITING),
    ("9a", datagrams.MOST_SEGMENTS),
    ("9a", datagrams.MOST_BYTES),
    ("10a", mqtt.READ_AHEAD_BYTES),
    ("11", carrier.BATCH),
    ("12", services.MOST_OWED),
    ("13", limits.ZEROCTL_NODES),
    ("13", limits.ZEROCTL_HEARTBEAT_BYTES),
]


def defaults(key: str) -> set[float]:
    """What a setting is that nobody set; those of a listener are what they are for all that have it."""
    if key == "prefetch":
        return {limits.CARRIER_PREFETCH.default}
    section, _, name = key.rpartition(".")
    config: Any = Config()
    if section in ("", "listen.X"):
        return {getattr(config.listen.of(one), name) for one in PROTOCOLS}
    for word in section.split("."):
        config = getattr(config, word)
    return {getattr(config, name)}


@pytest.mark.parametrize(("key", "text"), DEFAULTS)
def test_a_bound_that_can_be_set_has_the_default_of_the_page(key: str, text: str) -> None:
    (default,) = defaults(key)
    read = parse_duration if isinstance(default, float) else parse_size
    assert read(text.replace(",", "").replace(" ", "")) == default


@pytest.mark.parametrize(("row", "constant"), CONSTANTS)
def test_a_bound_that_cannot_be_set_is_the_constant_of_the_code(row: str, constant: int) -> None:
    numbers = re.findall(r"(?<![\w,])\d[\d,]*(?: [KMG]iB)?", WAITING[row])
    assert constant in [parse_size(number.replace(",", "").replace(" ", "")) for number in numbers]


def test_the_page_says_these_bounds() -> None:
    assert {"listen.X.backlog", "log.retention_bytes", "log.block_timeout", "stall_timeout"} <= {
        key for key, _ in DEFAULTS
    }
