"""`python -m bench.drop`: measures the gateway with its sink beside the same gateway without, the rate that both
sustain together beside what pyarrow writes, Spark's ingest, and the time from a publish to a row in Spark. Prints a
table and writes it to bench/results."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click
import pyarrow.dataset

from bench.peers import load, machine, servers
from bench.peers.plan import Contender
from headrace.clients.blipmq import BlipmqClient
from headrace.columns import ColumnReader
from headrace.drop.parquet import writer
from headrace.drop.schema import arrow_schema

RESULTS = load.REPOSITORY / "bench" / "results"
SIZE = 100
RATE = 200_000  # messages a second at which the publish path is compared: the sink keeps up with more
ROUNDS = 3
DRAIN_SECONDS = 120.0


class Gateway:
    """A gateway with its drop, up inside a `with`."""

    def __init__(self, home: Path, *sets: str) -> None:
        self.data = home / "data"
        self.port, self.admin = servers.free_port(), servers.free_port()
        settings = [
            f"listen.blipmq.bind={servers.LOOPBACK}:{self.port}",
            f"admin.bind={servers.LOOPBACK}:{self.admin}",
            *(f"listen.{protocol}.bind=" for protocol in servers.OTHER_LISTENERS),
            *sets,
        ]
        command = [str(servers.gateway_program()), "serve", "--data", str(self.data)]
        for setting in settings:
            command += ["--set", setting]
        self._server = servers.Server(
            "the gateway", self.port, command, home / "server", servers.ready_and_warm(self.admin)
        )

    def __enter__(self) -> "Gateway":
        self._server.__enter__()
        return self

    def __exit__(self, *what: Any) -> None:
        self._server.__exit__(*what)

    def cpu(self) -> dict[str, float]:
        """Seconds of the event loop's thread and of all the others."""
        ticks = os.sysconf("SC_CLK_TCK")
        used = {"loop": 0.0, "others": 0.0}
        for task in Path(f"/proc/{self._server.pid}/task").iterdir():
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            who = "loop" if int(task.name) == self._server.pid else "others"
            used[who] += (int(fields[11]) + int(fields[12])) / ticks
        return used

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://{servers.LOOPBACK}:{self.admin}/metrics") as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(name):
                    return float(line.rpartition(" ")[2])
        raise AssertionError(f"{name} is not in /metrics")

    def drained(self) -> float:
        """Waits until everything appended is in the drop; how many seconds that took."""
        began = time.monotonic()
        while self.metric("headrace_sink_lag_offsets"):
            if time.monotonic() - began > DRAIN_SECONDS:
                raise click.ClickException("the sink did not catch up")
            time.sleep(0.1)
        return time.monotonic() - began


@contextmanager
def fresh(work: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="drop-", dir=work) as directory:
        yield Path(directory)


def publish_path(program: Path, work: Path) -> dict[str, Any]:
    """At one fixed rate, publish to deliver: the loop's CPU time for a message and the latency, sink on and off in
    turns."""
    seen: dict[str, list[tuple[float, float, float]]] = {"on": [], "off": []}
    seconds = 10
    for _ in range(ROUNDS):
        for state in ("off", "on"):
            with fresh(work) as home, Gateway(home, f"drop.enabled={str(state == 'on').lower()}") as gateway:
                before = gateway.cpu()
                run = load.run(
                    program,
                    60.0,
                    system="blipmq",
                    mode="latency",
                    port=gateway.port,
                    size=SIZE,
                    rate=RATE,
                    seconds=seconds,
                )
                loop = gateway.cpu()["loop"] - before["loop"]
                assert run.percentiles_us is not None
                seen[state].append(
                    (loop / (RATE * seconds) * 1e9, run.percentiles_us[0], run.percentiles_us[1])
                )
                if state == "on":
                    gateway.drained()
    ns = {state: median(one[0] for one in runs) for state, runs in seen.items()}
    p50 = {state: median(one[1] for one in runs) for state, runs in seen.items()}
    return {
        "rate": RATE,
        "loop_ns_per_message": ns,
        "cost": ns["on"] / ns["off"] - 1,
        "p50_us": p50,
        "p99_us": {state: median(one[2] for one in runs) for state, runs in seen.items()},
    }


def sustained(program: Path, work: Path, seconds: float) -> dict[str, Any]:
    """Publishers as fast as they can, for longer than the log has room: retention holds them back to what the sink
    writes. Beside it, pyarrow's write_table of the same rows, ready-made."""
    with fresh(work) as home:
        with Gateway(home, "log.retention_bytes=1GiB", "log.block_timeout=1h") as gateway:
            began = time.monotonic()
            load.run(
                program,
                seconds * 10,
                system="blipmq",
                mode="publish",
                port=gateway.port,
                size=SIZE,
                seconds=seconds,
            )
            gateway.drained()
            took = time.monotonic() - began
            rows = gateway.metric("headrace_sink_rows_total")
        table = pyarrow.dataset.dataset(gateway.data / "drop", exclude_invalid_files=False).head(2_000_000)
        peer = median(_write_rate(table, home / "peer.parquet") for _ in range(3))
        sink = _log_rate(gateway.data / "log", home / "alone.parquet")
    return {
        "rows": rows,
        "seconds": took,
        "rows_per_second": rows / took,
        "write_table_rows_per_second": peer,
        "ratio": rows / took / peer,
        "sink_alone_rows_per_second": sink,
    }


def _write_rate(table: Any, path: Path) -> float:
    began = time.perf_counter()
    with writer(path, table.schema.remove_metadata(), {}) as out:
        out.write_table(table, row_group_size=131_072)
    return float(table.num_rows / (time.perf_counter() - began))


def _log_rate(log: Path, path: Path) -> float:
    """Rows a second from a log to Parquet with nothing else going on."""
    rows = 0
    began = time.perf_counter()
    with ColumnReader(log, 0, node="bench") as reader, writer(path, arrow_schema(), {}) as out:
        while (batch := reader.read(131_072, 32 << 20)) is not None and rows < 4_000_000:
            out.write_batch(batch.cast(arrow_schema()))
            rows += batch.num_rows
    return rows / (time.perf_counter() - began)


def ingest(program: Path, work: Path, messages: int) -> dict[str, Any]:
    """Rows a second of `headrace spark ingest`, with one core and with all."""
    figures: dict[str, Any] = {"rows": messages}
    with fresh(work) as home:
        with Gateway(home, "drop.roll_rows=250000") as gateway:
            load.run(
                program,
                120.0,
                system="blipmq",
                mode="publish",
                port=gateway.port,
                size=SIZE,
                messages=messages,
            )
            _stop_sink(gateway)
        for cores in (1, os.cpu_count() or 1):
            table = home / f"table-{cores}"
            command = [
                str(servers.gateway_program()),
                "spark",
                "ingest",
                str(gateway.data / "drop"),
                str(table),
            ]
            command += ["--once", "--master", f"local[{cores}]"]
            began = time.monotonic()
            subprocess.run(command, check=True, capture_output=True)
            took = time.monotonic() - began
            rows = pyarrow.dataset.dataset(table, format="parquet", partitioning="hive").count_rows()
            figures[f"local[{cores}]"] = {
                "seconds": took,
                "rows": rows,
                "rows_per_second_per_core": rows / took / cores,
            }
    return figures


def _stop_sink(gateway: Gateway) -> None:
    """Until the drop has everything; the last file waits for its time or for the gateway's end."""
    gateway.drained()


def visible(work: Path, rounds: int) -> dict[str, Any]:
    """Seconds from a confirmed publish until a Spark stream with its default trigger has the row, default settings."""
    from headrace.spark import stream_drop
    from headrace.spark.session import local_session

    times: list[float] = []
    with fresh(work) as home, Gateway(home) as gateway:
        asyncio.run(_publish(gateway.port, "0"))
        gateway.drained()
        spark = local_session("bench")
        seen: dict[str, float] = {}

        def note(rows: Any, _batch: int) -> None:
            now = time.monotonic()
            for row in rows.select("payload").collect():
                seen.setdefault(bytes(row["payload"]).decode(), now)

        query = stream_drop(spark, str(gateway.data / "drop")).writeStream.foreachBatch(note).start()
        try:
            _until(lambda: "0" in seen)
            for number in range(1, rounds + 1):
                began = time.monotonic()
                asyncio.run(_publish(gateway.port, str(number)))
                _until(lambda number=number: str(number) in seen)  # type: ignore[misc]
                times.append(seen[str(number)] - began)
        finally:
            query.stop()
            spark.stop()
    return {"rounds": rounds, "seconds": {"median": median(times), "most": max(times)}}


async def _publish(port: int, text: str) -> None:
    async with BlipmqClient(f"{servers.LOOPBACK}:{port}", key="dev-key") as client:
        await client.publish("bench.visible", text.encode(), qos=1)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DRAIN_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise click.ClickException("the row did not appear")
        time.sleep(0.01)


PARTS = ("cost", "sustained", "ingest", "visible")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--only", multiple=True, type=click.Choice(PARTS), help="Only this part (repeatable).")
@click.option("--seconds", default=60.0, help="How long publishers push in the sustained part.")
@click.option("--messages", default=4_000_000, help="Rows for ingest.")
@click.option("--rounds", default=3, help="Publishes that are followed into Spark; each waits for a file.")
@click.option("--work", type=click.Path(path_type=Path), default=RESULTS, show_default="bench/results")
def main(only: tuple[str, ...], seconds: float, messages: int, rounds: int, work: Path) -> None:
    """Measure the way from the wire to Spark."""
    work.mkdir(parents=True, exist_ok=True)
    program = load.build()
    doing: dict[str, Callable[[], dict[str, Any]]] = {
        "cost": lambda: publish_path(program, work),
        "sustained": lambda: sustained(program, work, seconds),
        "ingest": lambda: ingest(program, work, messages),
        "visible": lambda: visible(work, rounds),
    }
    facts = machine.describe(work, frozenset({Contender.HEADRACE}), servers.gateway_program())
    click.echo(machine.line(facts))
    results: dict[str, Any] = {}
    for part in only or PARTS:
        results[part] = doing[part]()
        click.echo(f"{part}: {json.dumps(results[part])}")
    click.echo(f"Written: {machine.keep(work, 'drop', facts, results)}")


if __name__ == "__main__":
    sys.exit(main())
