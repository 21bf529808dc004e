"""What the figures were measured on: processor, kernel, filesystem, versions, date. Measures nothing."""

import json
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.peers import load, servers
from bench.peers.failures import Unavailable
from bench.peers.plan import Contender


@dataclass(frozen=True, slots=True)
class Places:
    """Two CPUs that this process may use: the load has one for itself, as it would on a machine of its own."""

    loop: int
    load: int


def places() -> Places:
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(usable) < 2:
        raise Unavailable("two CPUs that processes can be put on are needed for --apart")
    return Places(usable[0], usable[-1])


def describe(work: Path, contenders: frozenset[Contender], gateway: Path) -> dict[str, str]:
    """One short text for each fact."""
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{_cpu_model()} ({os.cpu_count()} CPUs)",
        "kernel": f"{platform.system()} {platform.release()}",
        "filesystem": _filesystem(work),
        "congestion control": _congestion_control(),
        "load before": f"{os.getloadavg()[0]:.2f}",
        "python": platform.python_version(),
        "compiler": _first_line([load.compiler(), "--version"]),
    }
    if Contender.HEADRACE in contenders:
        facts["headrace"] = _version([str(gateway), "--version"])
    if contenders & {Contender.NATS, Contender.JETSTREAM}:
        facts["nats-server"] = _version([str(servers.find_program("nats-server")), "--version"])
    if Contender.REDIS in contenders:
        facts["redis-server"] = _version([str(servers.find_program("redis-server")), "--version"])
    return facts


def line(facts: dict[str, str]) -> str:
    """All of them in one line."""
    return "; ".join(f"{name} {text}" for name, text in facts.items())


def keep(directory: Path, name: str, facts: dict[str, str], results: object) -> Path:
    """Writes results with what they were measured on to a file of their own."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps({"machine": facts, "results": results}, indent=2) + "\n")
    return path


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _congestion_control() -> str:
    """How TCP paces its senders, over loopback too: with some of them the figures differ by half."""
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return "unknown"


def _filesystem(directory: Path) -> str:
    """The type of the filesystem that holds a directory: syncs cost nothing on some."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return "unknown"
    at = directory.resolve()
    found = ("", "unknown")
    for mount in lines:
        _, point, kind = mount.split()[:3]
        if at.is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, kind)
    return found[1]


def _first_line(command: list[str]) -> str:
    try:
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} does not run: {error}") from error
    if outcome.returncode != 0 or not outcome.stdout:
        raise Unavailable(f"{' '.join(command)} failed: {outcome.stderr.strip()}")
    return outcome.stdout.splitlines()[0]


def _version(command: list[str]) -> str:
    stated = re.search(r"\d+(\.\w+)+", _first_line(command))
    return stated[0] if stated else "unknown"
