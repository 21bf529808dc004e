"""The speeds that the gateway is to reach, and whether it did. Measures nothing."""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.peers.measure import Results
from bench.peers.plan import BUDGET_SIZES, Cell, Contender, Family

ROUNDTRIP_P50_US = 100.0
ROUNDTRIP_RATIO = 1.5
LATENCY_P99_US = 2000.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure beside what was asked of it."""

    cell: Cell
    what: str
    measured: float
    bound: float
    at_least: bool
    unit: str

    @property
    def passed(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured < self.bound

    @property
    def score(self) -> float:
        """How well it did, whichever way is better: 1 is just what was asked."""
        return self.measured / self.bound if self.at_least else self.bound / self.measured

    @property
    def sentence(self) -> str:
        outcome = "pass" if self.passed else "FAIL"
        wanted = "at least" if self.at_least else "below"
        return (
            f"{outcome}  {self.cell.name}: {self.what}: {self.shown} ({wanted} {self.bound:,g} {self.unit})"
        )

    @property
    def shown(self) -> str:
        """What was measured, with its unit."""
        digits = f"{self.measured:,.0f}" if self.measured >= 100 else f"{self.measured:.3g}"
        return f"{digits} {self.unit}"


@dataclass(frozen=True, slots=True)
class Ratio:
    """So many times as fast as a peer."""

    family: Family
    peer: Contender
    at_least: float
    sizes: tuple[int, ...] | None = None
    connections: tuple[int, ...] | None = None

    def judge(self, results: Results) -> Iterator[Verdict]:
        for cell in results.cells(self.family):
            if self.sizes is not None and cell.size not in self.sizes:
                continue
            if self.connections is not None and cell.connections not in self.connections:
                continue
            ratio = results.ratio(cell, self.peer)
            if ratio is not None:
                yield Verdict(cell, f"rate, times that of {self.peer.label}", ratio, self.at_least, True, "×")


RATIOS = (
    Ratio(Family.PUBLISH, Contender.NATS, 2.0, sizes=BUDGET_SIZES),
    Ratio(Family.SUSTAINED, Contender.NATS, 1.5, sizes=BUDGET_SIZES),
    Ratio(Family.DELIVER, Contender.NATS, 1.0),
    Ratio(Family.INTERVAL, Contender.JETSTREAM, 3.0),
    Ratio(Family.ALWAYS, Contender.REDIS, 1.0, connections=(64,)),
)


def judge(results: Results) -> list[Verdict]:
    """A verdict for every budget whose figures were measured."""
    return [*(verdict for ratio in RATIOS for verdict in ratio.judge(results)), *_times(results)]


def _times(results: Results) -> Iterator[Verdict]:
    for cell in results.cells(Family.ROUNDTRIP):
        ours = results.figure(cell, Contender.HEADRACE)
        if ours is not None:
            yield Verdict(cell, "p50", ours, ROUNDTRIP_P50_US, False, "µs")
        ratio = results.ratio(cell, Contender.NATS)
        if ratio is not None:
            yield Verdict(
                cell, "p50, times that of nats-server's request/reply", ratio, ROUNDTRIP_RATIO, False, "×"
            )
    for cell in results.cells(Family.LATENCY):
        ours = results.figure(cell, Contender.HEADRACE)
        if ours is not None:
            yield Verdict(cell, "p99", ours, LATENCY_P99_US, False, "µs")
