"""Draws what was measured as one picture: a panel for each family with its rates and ratios, and one for the
budgets. Needs matplotlib (the `bench` extra); measures nothing."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from bench.peers.budgets import Verdict
from bench.peers.measure import Results
from bench.peers.plan import Cell, Contender, Family

COLOURS = {
    Contender.HEADRACE: "#0b6e99",
    Contender.NATS: "#e0873a",
    Contender.JETSTREAM: "#b3541e",
    Contender.REDIS: "#c23b3b",
    Contender.DRAIN: "#b8bec4",
}
COLUMNS = 2
PANEL_INCHES = (7.5, 3.6)


def draw(path: Path, title: str, results: Results, verdicts: Sequence[Verdict]) -> None:
    """Writes the picture to `path`."""
    families = [family for family in Family if results.cells(family)]
    rows = -(-len(families) // COLUMNS)
    heights = [PANEL_INCHES[1]] * rows
    if verdicts:
        heights.append(1.0 + 0.2 * len(verdicts))
    figure = Figure(figsize=(PANEL_INCHES[0] * COLUMNS, sum(heights) + 0.6), layout="constrained")
    grid = figure.add_gridspec(len(heights), COLUMNS, height_ratios=heights)
    figure.suptitle(title, fontsize=8, wrap=True)
    for index, family in enumerate(families):
        _draw_family(figure.add_subplot(grid[index // COLUMNS, index % COLUMNS]), family, results)
    if verdicts:
        _draw_budgets(figure.add_subplot(grid[rows, :]), verdicts)
    figure.savefig(path, dpi=110)


def _draw_family(axes: Axes, family: Family, results: Results) -> None:
    cells = results.cells(family)
    contenders = [
        contender
        for contender in Contender
        if contender is not Contender.MEMORY
        and any(results.figure(cell, contender) is not None for cell in cells)
    ]
    width = min(0.8 / max(len(contenders), 1), 0.25)
    for position, contender in enumerate(contenders):
        places = [index + (position - (len(contenders) - 1) / 2) * width for index in range(len(cells))]
        figures = [results.figure(cell, contender) or 0.0 for cell in cells]
        axes.bar(places, figures, width, label=contender.label, color=COLOURS[contender])
        if contender is not Contender.HEADRACE:
            continue
        for place, figure, cell in zip(places, figures, cells, strict=True):
            where = (place, figure)
            axes.annotate(_ratio_text(cell, results), where, ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(cells)), [_cell_text(cell, results) for cell in cells], fontsize=7)
    axes.set_xlim(-0.6, len(cells) - 0.4)
    axes.margins(y=0.12)
    axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.tick_params(axis="y", labelsize=7)
    axes.set_ylabel(_Y_LABELS.get(family, "messages a second"), fontsize=7)
    axes.set_title(family.headline, fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    if contenders:
        axes.legend(fontsize=6, loc="best")


_Y_LABELS = {
    Family.ROUNDTRIP: "p50 in µs, less is better",
    Family.LATENCY: "p99 in µs, less is better",
}


def _cell_text(cell: Cell, results: Results) -> str:
    """The cell's name; and the memory limit in words, for its bar would dwarf all the others."""
    name = f"{cell.size} B × {cell.connections}"
    limit = results.figure(cell, Contender.MEMORY)
    return name if limit is None else f"{name}\n(memory copy\n{limit / 1_000_000:.0f} M/s)"


def _ratio_text(cell: Cell, results: Results) -> str:
    """The gateway's figure by that of the cell's first peer."""
    for peer in cell.contenders:
        if peer is not Contender.HEADRACE and (ratio := results.ratio(cell, peer)) is not None:
            return f"{ratio:,.0f}×" if ratio >= 10 else f"{ratio:.2f}×"
    return ""


def _draw_budgets(axes: Axes, verdicts: Sequence[Verdict]) -> None:
    places = range(len(verdicts), 0, -1)
    colours = ["#3a8f4d" if verdict.passed else "#c23b3b" for verdict in verdicts]
    axes.barh(places, [verdict.score for verdict in verdicts], color=colours)
    axes.axvline(1.0, color="black", linewidth=1)
    names = [f"{verdict.cell.name}: {verdict.what}" for verdict in verdicts]
    axes.set_yticks(places, names, fontsize=6)
    for place, verdict in zip(places, verdicts, strict=True):
        axes.annotate(f" {verdict.shown}", (verdict.score, place), va="center", fontsize=6)
    axes.margins(x=0.12)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title("Budgets: 1 is what is asked, more is better", fontsize=9)
