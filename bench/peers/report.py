"""Writes what was measured: tables in Markdown, everything in JSON. Measures and draws nothing."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.peers import machine
from bench.peers.budgets import Verdict
from bench.peers.measure import Results
from bench.peers.plan import Cell, Contender, Family


def shown_figure(family: Family, figure: float) -> str:
    """A figure as people say it."""
    if family.timed:
        return f"{figure:,.0f} µs" if figure < 10_000 else f"{figure / 1000:,.1f} ms"
    return shown_rate(figure)


def shown_rate(rate: float) -> str:
    """Messages a second, with a prefix."""
    return f"{rate / 1_000_000:.2f} M/s" if rate >= 1_000_000 else f"{rate / 1000:.1f} k/s"


def markdown(
    facts: dict[str, str], results: Results, verdicts: Sequence[Verdict], picture: str | None
) -> str:
    """The whole report."""
    parts = ["# The gateway beside its peers", machine.line(facts) + "."]
    if picture:
        parts.append(f"![Rates, and ratios to what is asked]({picture})")
    if verdicts:
        parts.append("## Budgets")
        parts.append("\n".join(_budget_rows(verdicts)))
    for family in Family:
        cells = results.cells(family)
        if cells:
            parts.append(f"## {family.headline}")
            if family.timed:
                parts.append("p50 / p99 / p99.9 of single messages, and the rate at which they were sent.")
            parts.append("\n".join(_family_rows(family, cells, results)))
    if results.failures:
        parts.append("## Runs that failed")
        parts.append("\n".join(f"- {failure}" for failure in results.failures))
    return "\n\n".join(parts) + "\n"


def _budget_rows(verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield "| what | measured | asked | |"
    yield "| --- | --- | --- | --- |"
    for verdict in verdicts:
        asked = f"{'≥' if verdict.at_least else '<'} {verdict.bound:,g} {verdict.unit}"
        outcome = "pass" if verdict.passed else "**fail**"
        yield f"| {verdict.cell.name}: {verdict.what} | {verdict.shown} | {asked} | {outcome} |"


def _family_rows(family: Family, cells: Sequence[Cell], results: Results) -> Iterator[str]:
    contenders = [
        contender
        for contender in Contender
        if any(results.figure(cell, contender) is not None for cell in cells)
    ]
    peers = (
        [contender for contender in contenders if contender is not Contender.HEADRACE]
        if Contender.HEADRACE in contenders
        else []
    )
    columns = ["bytes", "connections", *(contender.label for contender in contenders)]
    columns += [f"{_RATIO_OF.get(family, '')}× {peer.label}" for peer in peers]
    yield _row(columns)
    yield _row(["---:"] * len(columns))
    for cell in cells:
        ratios = [results.ratio(cell, peer) for peer in peers]
        yield _row(
            [
                f"{cell.size:,}",
                str(cell.connections),
                *(_shown(results, cell, contender) for contender in contenders),
                *(f"{ratio:.2f}" if ratio is not None else "" for ratio in ratios),
            ]
        )


_RATIO_OF = {Family.ROUNDTRIP: "p50 ", Family.LATENCY: "p99 "}


def _shown(results: Results, cell: Cell, contender: Contender) -> str:
    """A contender's median; where messages were timed, p50, p99 and p99.9, and the rate that was held."""
    rate = results.rate(cell, contender)
    if rate is None:
        return ""
    percentiles = results.percentiles(cell, contender)
    if percentiles is None:
        return shown_rate(rate)
    return " / ".join(f"{value:,.0f}" for value in percentiles) + f" µs at {shown_rate(rate)}"


def _row(columns: Sequence[str]) -> str:
    return "| " + " | ".join(columns) + " |"


def as_json(facts: dict[str, str], results: Results, verdicts: Sequence[Verdict]) -> str:
    """Every run, with all that the load saw."""
    content = {
        "machine": facts,
        "budgets": [
            {
                "cell": verdict.cell.name,
                "what": verdict.what,
                "measured": verdict.measured,
                "bound": verdict.bound,
                "at_least": verdict.at_least,
                "unit": verdict.unit,
                "passed": verdict.passed,
            }
            for verdict in verdicts
        ],
        "medians": [
            {
                "family": cell.family,
                "size": cell.size,
                "connections": cell.connections,
                "qos": cell.qos,
                "sync": cell.sync,
                "contender": contender,
                "figure": figure,
                "unit": "us" if family.timed else "messages/s",
            }
            for family in Family
            for cell in results.cells(family)
            for contender in cell.contenders
            if (figure := results.figure(cell, contender)) is not None
        ],
        "runs": [
            {
                "family": run.cell.family,
                "contender": run.contender,
                "round": run.round,
                "sync": run.cell.sync,
                "server_cpu_seconds": run.server_cpu_seconds,
                "load": run.seen.raw,
            }
            for run in results.runs
        ],
        "failures": results.failures,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def write(directory: Path, name: str, texts: dict[str, str]) -> list[Path]:
    """Puts each text into a file of its own, by suffix."""
    paths = []
    for suffix, text in texts.items():
        path = directory / f"{name}.{suffix}"
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths
