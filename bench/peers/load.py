"""Builds load.c and runs it: options in, what it saw out. Knows nothing of servers, or what a run is for."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.peers.failures import RunFailed, Unavailable

SOURCE = Path(__file__).with_name("load.c")
REPOSITORY = Path(__file__).parents[2]
PROGRAM = REPOSITORY / "build" / "bench" / "load"
COMPILER_OPTIONS = ("-O2", "-std=gnu17", "-Wall", "-Wextra")
GRACE_SECONDS = 15.0  # beyond the program's own limit


def compiler() -> str:
    name = os.environ.get("CC", "cc")
    if shutil.which(name) is None:
        raise Unavailable(f"the C compiler {name} was not found; install one, or name it in CC")
    return name


def build() -> Path:
    """The program, compiled if its source is newer."""
    if PROGRAM.exists() and PROGRAM.stat().st_mtime >= SOURCE.stat().st_mtime:
        return PROGRAM
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    fresh = PROGRAM.with_suffix(".new")
    command = [compiler(), *COMPILER_OPTIONS, str(SOURCE), "-o", str(fresh)]
    outcome = subprocess.run(command, capture_output=True, text=True)
    if outcome.returncode != 0:
        raise Unavailable(f"{SOURCE.name} does not compile: {outcome.stderr.strip()}")
    fresh.replace(PROGRAM)
    return PROGRAM


@dataclass(frozen=True, slots=True)
class Seen:
    """What one run of the program saw."""

    rate: float
    """Messages a second: the median of its bursts, without the first where there are several."""
    percentiles_us: tuple[float, float, float] | None
    """p50, p99 and p99.9, where single messages were timed."""
    lost: int
    raw: dict[str, Any]


def run(program: Path, limit: float, **options: str | int | float) -> Seen:
    """Runs the program once; it ends by itself after `limit` seconds."""
    command = [str(program), "--limit", str(int(limit) + 1)]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    try:
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=limit + GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"the load did not end within {limit + GRACE_SECONDS:.0f} s") from None
    if outcome.returncode != 0:
        raise RunFailed(outcome.stderr.strip() or f"the load ended with code {outcome.returncode}")
    raw: dict[str, Any] = json.loads(outcome.stdout)
    rates: list[float] = raw["rates"]
    return Seen(
        rate=median(rates[1:] or rates),
        percentiles_us=(raw["p50_us"], raw["p99_us"], raw["p999_us"]) if "p50_us" in raw else None,
        lost=raw["lost"],
        raw=raw,
    )
