"""Carries out a plan: starts a contender's server, loads it, stops it, the contenders of a cell in turn
(A B A B), and keeps what was seen. Judges nothing and prints nothing."""

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.peers import load
from bench.peers.failures import RunFailed
from bench.peers.load import Seen
from bench.peers.machine import Places
from bench.peers.plan import BATCH, WINDOW, Amount, Cell, Contender, Family
from bench.peers.servers import Server, server_for

RUN_SECONDS = 90.0  # for one load, beside the time that it is asked to take

MODES = {
    Family.PUBLISH: "publish",
    Family.SUSTAINED: "publish",
    Family.DELIVER: "deliver",
    Family.DELIVER_QOS1: "deliver",
    Family.INTERVAL: "confirm",
    Family.ALWAYS: "confirm",
    Family.ROUNDTRIP: "roundtrip",
    Family.LATENCY: "latency",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One contender's turn in one round of a cell."""

    cell: Cell
    contender: Contender
    round: int
    seen: Seen
    server_cpu_seconds: float | None

    @property
    def figure(self) -> float:
        """What its family is about: messages a second, or microseconds."""
        if self.seen.percentiles_us is None:
            return self.seen.rate
        p50, p99, _ = self.seen.percentiles_us
        return p50 if self.cell.family is Family.ROUNDTRIP else p99


@dataclass(slots=True)
class Results:
    """Everything that was seen, and what went wrong."""

    runs: list[Run] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def cells(self, family: Family) -> list[Cell]:
        """The cells of a family, in the order in which they were first measured."""
        return list(dict.fromkeys(run.cell for run in self.runs if run.cell.family is family))

    def of(self, cell: Cell, contender: Contender) -> list[Run]:
        return [run for run in self.runs if run.cell == cell and run.contender is contender]

    def figure(self, cell: Cell, contender: Contender) -> float | None:
        """The median of the rounds."""
        figures = [run.figure for run in self.of(cell, contender)]
        return median(figures) if figures else None

    def percentiles(self, cell: Cell, contender: Contender) -> tuple[float, float, float] | None:
        """p50, p99 and p99.9 in microseconds, each the median of the rounds."""
        timed = [run.seen.percentiles_us for run in self.of(cell, contender) if run.seen.percentiles_us]
        if not timed:
            return None
        p50, p99, p999 = (median(values) for values in zip(*timed, strict=True))
        return p50, p99, p999

    def rate(self, cell: Cell, contender: Contender) -> float | None:
        """Messages a second, the median of the rounds."""
        rates = [run.seen.rate for run in self.of(cell, contender)]
        return median(rates) if rates else None

    def ratio(self, cell: Cell, peer: Contender) -> float | None:
        """The gateway's figure by a peer's."""
        ours, theirs = self.figure(cell, Contender.HEADRACE), self.figure(cell, peer)
        return ours / theirs if ours is not None and theirs else None


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and with what to measure."""

    load_program: Path
    gateway_program: Path
    work: Path
    """Directory for the servers' data: on a real disk, for those that sync."""
    apart: Places | None = None
    """Where the load and the gateway's event loop run, if not where the system puts them."""

    def measure(
        self,
        plan: Iterable[Cell],
        contenders: frozenset[Contender],
        results: Results,
        progress: Callable[[Run], None],
    ) -> None:
        """Measures every cell; what one run's failure leaves out is in `results.failures`."""
        for cell in plan:
            for number in range(cell.rounds):
                for contender in cell.contenders:
                    if contender not in contenders:
                        continue
                    try:
                        run = self._turn(cell, contender, number)
                    except RunFailed as error:
                        results.failures.append(f"{cell.name}, {contender.label}: {error}")
                        continue
                    results.runs.append(run)
                    progress(run)

    def _turn(self, cell: Cell, contender: Contender, number: int) -> Run:
        # A fresh server and directory each time: what is still to be written back goes with its files.
        with tempfile.TemporaryDirectory(prefix="peers-", dir=self.work) as directory:
            home = Path(directory)
            server = server_for(contender, home / "server", cell.sync, self.gateway_program)
            if server is None:
                seen = self._load(cell, contender, None, home)
                return Run(cell, contender, number, seen, None)
            with server:
                if self.apart is not None and contender is Contender.HEADRACE:
                    server.put_first_thread_on(self.apart.loop)
                before = server.cpu_seconds()
                seen = self._load(cell, contender, server, home)
                after = server.cpu_seconds()
            used = after - before if before is not None and after is not None else None
            if seen.lost:
                raise RunFailed(f"{seen.lost} messages were not delivered")
            return Run(cell, contender, number, seen, used)

    def _load(self, cell: Cell, contender: Contender, server: Server | None, home: Path) -> Seen:
        options = _options(cell, contender, server, home)
        if self.apart is not None and server is not None:
            options["cpu"] = self.apart.load
        mode = MODES[cell.family]
        if cell.family is Family.LATENCY:
            highest = load.run(
                self.load_program, RUN_SECONDS, mode="deliver", **options, **_burst(cell.amount)
            )
            # Twice: in the first run the server settles to this load, the second one counts.
            for _ in range(2):
                seen = load.run(
                    self.load_program,
                    cell.amount.seconds + RUN_SECONDS,
                    mode=mode,
                    rate=highest.rate / 2,
                    seconds=cell.amount.seconds,
                    **options,
                )
            return seen
        if cell.amount.bursts:
            return load.run(self.load_program, RUN_SECONDS, mode=mode, **options, **_burst(cell.amount))
        return load.run(
            self.load_program,
            cell.amount.seconds + RUN_SECONDS,
            mode=mode,
            seconds=cell.amount.seconds,
            messages=max(cell.amount.messages, 1),
            **options,
        )


def _options(
    cell: Cell, contender: Contender, server: Server | None, home: Path
) -> dict[str, str | int | float]:
    options: dict[str, str | int | float] = {
        "system": "blipmq" if contender is Contender.HEADRACE else contender.value,
        "size": cell.size,
        "connections": cell.connections,
        "qos": cell.qos,
        "window": WINDOW,
        "batch": BATCH,
    }
    if server is not None:
        options["port"] = server.port
    if contender is Contender.MEMORY:
        options["file"] = str(home / "region")
    return options


def _burst(amount: Amount) -> dict[str, int | float]:
    return {"messages": amount.messages, "repeat": amount.bursts + 1, "pause": amount.pause}
