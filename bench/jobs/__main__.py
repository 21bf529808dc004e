"""`python -m bench.jobs`: jobs put in, delivered and finished a second, by the gateway over Overhop and by lists of
Redis, in turns, in one run on one machine with one sender. Prints the ratios; the budget is 1."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from bench.peers.failures import RunFailed, Unavailable
from bench.peers.load import COMPILER_OPTIONS, compiler
from bench.peers.machine import describe, keep, line
from bench.peers.plan import Contender
from bench.peers.servers import (
    LOOPBACK,
    Server,
    answers,
    find_program,
    free_port,
    gateway_program,
    ready_and_warm,
)

SOURCE = Path(__file__).with_name("load.c")
RESULTS = Path(__file__).parents[1] / "results"
PROGRAM = Path(__file__).parents[2] / "build" / "bench" / "jobs"
LIMIT_SECONDS = 120
# What is promised when a job's answer is there: by the gateway's log.sync, and by Redis's appendonly and appendfsync.
SAFETY = {
    "always": ("always", ("yes", "always")),
    "interval": ("interval:1000", ("yes", "everysec")),
    "none": ("none", ("no", "no")),
}


def build() -> Path:
    """The sender, compiled if its source is newer."""
    if not PROGRAM.exists() or PROGRAM.stat().st_mtime < SOURCE.stat().st_mtime:
        PROGRAM.parent.mkdir(parents=True, exist_ok=True)
        command = [compiler(), *COMPILER_OPTIONS, str(SOURCE), "-o", str(PROGRAM)]
        outcome = subprocess.run(command, capture_output=True, text=True)
        if outcome.returncode != 0:
            raise Unavailable(f"{SOURCE.name} does not compile: {outcome.stderr.strip()}")
    return PROGRAM


def gateway(home: Path, safety: str) -> Server:
    """This gateway, with the sink and the other protocols off."""
    port, admin_port = free_port(), free_port()
    settings = [
        f"listen.overhop.bind={LOOPBACK}:{port}",
        f"admin.bind={LOOPBACK}:{admin_port}",
        "drop.enabled=false",
        f"log.sync={SAFETY[safety][0]}",
        *(f"listen.{protocol}.bind=" for protocol in ("blipmq", "relink", "zeroctl", "felix")),
    ]
    command = [str(gateway_program()), "serve", "--data", str(home / "data")]
    for setting in settings:
        command += ["--set", setting]
    return Server("the gateway", port, command, home, ready_and_warm(admin_port))


def redis(home: Path, safety: str) -> Server:
    port = free_port()
    keeps, syncs = SAFETY[safety][1]
    command = [str(find_program("redis-server")), "--bind", LOOPBACK, "--port", str(port), "--dir", str(home)]
    command += ["--save", "", "--appendonly", keeps, "--appendfsync", syncs, "--daemonize", "no"]
    command += ["--auto-aof-rewrite-percentage", "0"]
    return Server("redis-server", port, command, home, answers(b"PING\r\n", b"+PONG"))


def jobs_a_second(
    system: str, safety: str, connections: int, window: int, size: int, jobs: int, work: Path
) -> tuple[float, float]:
    """A figure, with a fresh server and an empty directory, and how busy the sender was for it."""
    with tempfile.TemporaryDirectory(dir=work) as home:
        server = (gateway if system == "overhop" else redis)(Path(home) / "server", safety)
        with server:
            arguments = [system, server.port, connections, window, size, jobs, LIMIT_SECONDS]
            outcome = subprocess.run(
                [str(build()), *map(str, arguments)],
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS + 30,
            )
            if outcome.returncode != 0:
                raise RunFailed(f"{system}: {outcome.stderr.strip()} | {server.last_words()}")
            seen = json.loads(outcome.stdout)
            return seen["jobs"] / seen["seconds"], seen["busy"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.jobs", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=200_000)
    parser.add_argument("--window", type=int, default=128, help="jobs under way on each connection")
    parser.add_argument("--bytes", type=int, default=256, help="of a job's payload, 256 to 4096")
    parser.add_argument("--connections", type=int, action="append", help="default: 1 and 16")
    parser.add_argument("--safety", choices=SAFETY, action="append", help="default: all three")
    parser.add_argument("--quick", action="store_true", help="one round, few jobs: whether it works at all")
    parser.add_argument(
        "--work", type=Path, default=RESULTS, help="where the servers' data is; on a real disk"
    )
    chosen = parser.parse_args()
    if not 256 <= chosen.bytes <= 4096:
        parser.error("--bytes is from 256 to 4096")
    if chosen.quick:
        chosen.rounds, chosen.jobs = 1, min(chosen.jobs, 20_000)
    chosen.work.mkdir(parents=True, exist_ok=True)
    facts = describe(chosen.work, frozenset({Contender.HEADRACE, Contender.REDIS}), gateway_program())
    print(line(facts))
    results: list[dict[str, object]] = []
    failed = False
    for safety in chosen.safety or SAFETY:
        for connections in chosen.connections or (1, 16):
            rates: dict[str, list[float]] = {"overhop": [], "redis": []}
            busy: dict[str, list[float]] = {"overhop": [], "redis": []}
            for _ in range(chosen.rounds):
                for system in rates:  # in turns, so that a slow minute is everybody's
                    rate, share = jobs_a_second(
                        system, safety, connections, chosen.window, chosen.bytes, chosen.jobs, chosen.work
                    )
                    rates[system].append(rate)
                    busy[system].append(share)
            ours, theirs = median(rates["overhop"]), median(rates["redis"])
            verdict = "pass" if ours >= theirs else "FAIL"
            failed |= ours < theirs
            print(
                f"{verdict}  sync {safety}, {connections} connections: overhop {ours:,.0f} jobs/s, redis"
                f" {theirs:,.0f} jobs/s, {ours / theirs:.2f} ×  (sender busy {median(busy['overhop']):.0%},"
                f" {median(busy['redis']):.0%})",
                flush=True,
            )
            results.append(
                {"sync": safety, "connections": connections, "jobs_per_second": rates, "sender_busy": busy}
            )
    print(f"Written: {keep(chosen.work, 'jobs', facts, results)}")
    return int(failed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RunFailed, Unavailable) as error:
        sys.exit(f"Error: {error}")
