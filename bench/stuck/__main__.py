"""`python -m bench.stuck`: the latency from a publisher to a subscriber that reads, beside a subscriber of each
protocol that never does, and beside none; and the gateway's memory. Prints a table and writes it to bench/results.

Messages of 1 KiB go from BlipMQ to a subscriber of another protocol than the stuck one's, at a fixed rate, with
`log.sync = "interval:20"`, so that no disk is in the figures. The stuck subscriber comes and goes, in turns: what is
compared was measured in one gateway, one after the other. Before each turn a burst fills whatever the stuck one lets be
filled. One thread sends and receives.
"""

import asyncio
import json
import select
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.peers import load, machine, servers
from bench.peers.plan import Contender
from headrace.guarantees import PROTOCOLS
from headrace.wire import blipmq, relink, zeroctl
from tests.bridges import stuck
from tests.bridges.stuck import NODE_UUID, TOPIC, Stuck
from tests.gateway.gateways import GatewayProcess, Peer

RESULTS = load.REPOSITORY / "bench" / "results"
SIZE = 1024
BURST, BURST_BYTES = 1024, 16 << 10  # 16 MiB: more than sockets and the gateway's buffers hold for one peer
WARM_SECONDS = 0.2
PATIENCE = 60.0
STAMP = struct.Struct("<Q")
CONFIG = f"""
{stuck.CONFIG}
[[endpoints]]
name = "quick"
deliver = "{TOPIC}"
"""
EVERYONE = "all five"


class ZeroctlReader:
    """A subscriber that reads."""

    protocol = "zeroctl"

    def __init__(self, gateway: GatewayProcess) -> None:
        self.socket = connected(gateway.port("zeroctl"))
        self._decoder = zeroctl.Decoder()
        self.socket.sendall(
            zeroctl.encode_open("dev-key", "quick", NODE_UUID, 1) + zeroctl.encode_bind(1, TOPIC, 2)
        )
        answers = 0
        while answers < 2:
            answers += len(self._decoder.feed(self.socket.recv(1 << 16)))

    def payloads(self) -> list[bytes]:
        """Those that have come."""
        frames = self._decoder.feed(self.socket.recv(1 << 20))
        return [frame.body for frame in frames if isinstance(frame, zeroctl.Delivery)]


class RelinkReader:
    """The same for Relink, which wants to hear what was consumed."""

    protocol = "relink"

    def __init__(self, gateway: GatewayProcess) -> None:
        self.socket = connected(gateway.port("relink"))
        self._decoder = relink.Decoder("listener", connector_size=4, listener_size=4)
        self._consumed = 0
        self.socket.sendall(relink.encode_version() + relink.encode_hello("quick", 4, 4))
        while not any(
            isinstance(one, relink.Answer) for one in self._decoder.feed(self.socket.recv(1 << 16))
        ):
            pass

    def payloads(self) -> list[bytes]:
        items = self._decoder.feed(self.socket.recv(1 << 20))
        found = [item.payload for item in items if isinstance(item, relink.Message)]
        if found:
            self._consumed += len(found)
            last = (self._consumed - 1) % (1 << 32)
            self.socket.sendall(relink.encode_acknowledgement(relink.AckType.CONSUMED, 0, 4, last))
        return found


Reader = ZeroctlReader | RelinkReader


def connected(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.settimeout(PATIENCE)
    return made


@contextmanager
def beside(gateway: GatewayProcess, protocols: tuple[str, ...]) -> Iterator[Callable[[int], None]]:
    """Stuck subscribers, in a thread whose loop has nothing else to do; gives what has BlipMQ's ask for messages."""
    came = threading.Event()
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Event, Stuck]] = []

    async def stay() -> None:
        over = asyncio.Event()
        async with Stuck(gateway, protocols) as peers:
            begun.append((asyncio.get_running_loop(), over, peers))
            came.set()
            await over.wait()

    def run() -> None:
        try:
            asyncio.run(stay())
        finally:
            came.set()

    thread = threading.Thread(target=run)
    thread.start()
    came.wait(PATIENCE)
    if not begun:
        raise click.ClickException(f"{protocols} cannot be subscribed to")
    loop, over, peers = begun[0]
    try:
        yield peers.poll
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(PATIENCE)


def read_all(reader: Reader, count: int) -> None:
    while count > 0:
        count -= len(reader.payloads())


def latencies(publisher: Peer, reader: Reader, rate: float, seconds: float) -> list[float]:
    """Microseconds from a publish to its delivery, one for each message, sent at even distances."""
    found: list[float] = []
    total = round(rate * seconds)
    rest = bytes(SIZE - STAMP.size)
    sent = 0
    start = time.perf_counter_ns()
    while len(found) < total:
        now = time.perf_counter_ns()
        due = start + round(sent / rate * 1e9)
        if sent < total and now >= due:
            publisher.send(blipmq.encode_publish(TOPIC, STAMP.pack(now) + rest, 0, 1))
            sent += 1
            continue
        wait = (due - now) / 1e9 if sent < total else PATIENCE
        if not select.select([reader.socket], [], [], wait)[0]:
            if sent == total:
                raise click.ClickException("not everything was delivered")
            continue
        payloads = reader.payloads()
        now = time.perf_counter_ns()
        found += [(now - STAMP.unpack_from(payload)[0]) / 1e3 for payload in payloads]
    return found


def percentiles(found: list[float]) -> tuple[float, float]:
    cuts = quantiles(found, n=100)
    return cuts[49], cuts[98]


def measure(
    work: Path, protocols: tuple[str, ...], rate: float, seconds: float, rounds: int
) -> dict[str, Any]:
    """With these stuck and without, in turns."""
    with tempfile.TemporaryDirectory(prefix="stuck-", dir=work) as home:
        config = Path(home) / "headrace.toml"
        config.write_text(CONFIG)
        with GatewayProcess(
            Path(home) / "data",
            "log.segment_bytes=64MiB",
            "log.retention_bytes=512MiB",
            "log.sync=interval:20",
            "listen.zeroctl.bind=127.0.0.1:0",
            "drop.enabled=false",
            config=config,
        ) as gateway:
            reader = ZeroctlReader(gateway) if protocols != ("zeroctl",) else RelinkReader(gateway)
            publisher = Peer(connected(gateway.port("blipmq")))
            burst = blipmq.encode_publish(TOPIC, bytes(BURST_BYTES), 0, 1)

            def turn(poll: Callable[[int], None]) -> tuple[float, float]:
                for _ in range(BURST // 64):
                    publisher.send(burst * 64)
                    read_all(reader, 64)
                    poll(64)
                latencies(publisher, reader, rate, WARM_SECONDS)
                return percentiles(latencies(publisher, reader, rate, seconds))

            def nobody(_messages: int) -> None:
                pass

            messages = BURST + round(rate * WARM_SECONDS) + round(rate * seconds)
            turn(nobody)
            runs: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
            memory: list[tuple[int, int]] = []
            for _ in range(rounds):
                runs["without"].append(turn(nobody))
                before, delivered = gateway.own_memory(), gateway.status()["bus"]["delivered"]
                with beside(gateway, protocols) as poll:
                    runs["with"].append(turn(poll))
                    memory.append((before, gateway.own_memory()))
                    after = gateway.status()["bus"]["delivered"]
                for one in protocols:
                    taken = after[one] - delivered[one] - (messages if one == reader.protocol else 0)
                    if taken >= BURST:
                        raise click.ClickException(f"{one} was not stuck: it got {taken} messages")
            return {
                "reader": reader.protocol,
                "p50_us": {who: median(one[0] for one in found) for who, found in runs.items()},
                "p99_us": {who: median(one[1] for one in found) for who, found in runs.items()},
                "runs": runs,
                "memory": memory,
                "unread_bytes": (BURST * BURST_BYTES + (messages - BURST) * SIZE) * len(protocols),
            }


def table(results: dict[str, dict[str, Any]]) -> Table:
    made = Table(title="microseconds from publish to deliver, medians; MiB of the gateway's own memory")
    for title in (
        "stuck",
        "reads",
        "p50 without",
        "with",
        "p99 without",
        "with",
        "memory before",
        "after",
        "unread",
    ):
        made.add_column(title, justify="left" if title in ("stuck", "reads") else "right")
    for name, one in results.items():
        made.add_row(
            name,
            one["reader"],
            *(f"{one[key][who]:.0f}" for key in ("p50_us", "p99_us") for who in ("without", "with")),
            *(f"{one['memory'][-1][at] / (1 << 20):.1f}" for at in (0, 1)),
            f"{one['unread_bytes'] / (1 << 20):.0f}",
        )
    return made


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([*PROTOCOLS, EVERYONE]),
    help="Only this one stuck (repeatable).",
)
@click.option("--rate", default=2000.0, help="Messages a second.")
@click.option("--seconds", default=1.5, help="How long each turn measures.")
@click.option("--rounds", default=3, help="Turns with and without.")
@click.option("--work", type=click.Path(path_type=Path), default=RESULTS, show_default="bench/results")
def main(only: tuple[str, ...], rate: float, seconds: float, rounds: int, work: Path) -> None:
    """Measure what subscribers that never read cost the others."""
    work.mkdir(parents=True, exist_ok=True)
    facts = machine.describe(work, frozenset({Contender.HEADRACE}), servers.gateway_program())
    click.echo(machine.line(facts))
    results: dict[str, dict[str, Any]] = {}
    for name in only or (*PROTOCOLS, EVERYONE):
        protocols = PROTOCOLS if name == EVERYONE else (name,)
        results[name] = measure(work, protocols, rate, seconds, rounds)
    Console(width=120).print(table(results))
    path = work / f"stuck-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.write_text(
        json.dumps({"machine": facts, "rate": rate, "size": SIZE, "results": results}, indent=2) + "\n"
    )
    click.echo(f"Written: {path}")


if __name__ == "__main__":
    sys.exit(main())
