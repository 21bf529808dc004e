"""Draws what was measured as one picture: a panel for each family with its rates and ratios, and one for the
budgets. Needs matplotlib (the `bench` extra); measures nothing."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.peers.budgets import Verdict
from bench.peers.measure import Results
from bench.peers.plan import Cell, Contender, Family

COLOURS = {
    Contender.HEADRACE: "#0b6e99",
    Contender.NATS: "#e0873a",
    Contender.JETSTREAM: "#b3541e",
    Contender.REDIS: "#c23b3b",
    Contender.DRAIN: "#b8bec4",
    Contender.MEMORY: "#82898f",
}
PANEL_INCHES = (7.5, 3.6)


def draw(path: Path, title: str, results: Results, verdicts: Sequence[Verdict]) -> None:
    """Writes the picture to `path`."""
    families = [family for family in Family if results.cells(family)]
    panels = len(families) + bool(verdicts)
    columns = 2 if panels > 1 else 1
    rows = -(-panels // columns)
    budget_inches = 1.2 + 0.22 * len(verdicts)
    heights = [PANEL_INCHES[1]] * rows
    if verdicts:
        heights[-1] = max(PANEL_INCHES[1], budget_inches)
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, sum(heights) + 0.6), layout="constrained")
    grid = figure.add_gridspec(rows, columns, height_ratios=heights)
    figure.suptitle(title, fontsize=8, wrap=True)
    places = [(index // columns, index % columns) for index in range(panels)]
    for family, (row, column) in zip(families, places, strict=False):
        _draw_family(figure.add_subplot(grid[row, column]), family, results)
    if verdicts:
        row, column = places[-1]
        _draw_budgets(figure.add_subplot(grid[row, column]), verdicts)
    figure.savefig(path, dpi=110)


def _draw_family(axes: Axes, family: Family, results: Results) -> None:
    cells = results.cells(family)
    contenders = [
        contender
        for contender in Contender
        if any(results.figure(cell, contender) is not None for cell in cells)
    ]
    width = 0.8 / len(contenders)
    for position, contender in enumerate(contenders):
        places = [index + (position - (len(contenders) - 1) / 2) * width for index in range(len(cells))]
        figures = [results.figure(cell, contender) or 0.0 for cell in cells]
        axes.bar(places, figures, width, label=contender.label, color=COLOURS[contender])
        if contender is Contender.HEADRACE:
            for place, figure, cell in zip(places, figures, cells, strict=True):
                if figure:
                    axes.annotate(
                        _ratio_text(cell, results),
                        (place, figure),
                        ha="center",
                        va="bottom",
                        fontsize=7,
                        color=COLOURS[contender],
                    )
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_xticks(range(len(cells)), [f"{cell.size} B\n× {cell.connections}" for cell in cells], fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_ylabel("µs (less is better)" if family.timed else "messages a second", fontsize=7)
    axes.set_title(family.headline, fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=6, loc="best")


def _ratio_text(cell: Cell, results: Results) -> str:
    """The gateway's figure by that of the cell's first peer."""
    for peer in cell.contenders:
        if peer is not Contender.HEADRACE and (ratio := results.ratio(cell, peer)) is not None:
            return f"{ratio:.2g}×"
    return ""


def _draw_budgets(axes: Axes, verdicts: Sequence[Verdict]) -> None:
    places = range(len(verdicts), 0, -1)
    colours = ["#3a8f4d" if verdict.passed else "#c23b3b" for verdict in verdicts]
    axes.barh(places, [verdict.score for verdict in verdicts], color=colours)
    axes.axvline(1.0, color="black", linewidth=1)
    names = [f"{verdict.cell.name}: {verdict.what}" for verdict in verdicts]
    axes.set_yticks(places, names, fontsize=6)
    for place, verdict in zip(places, verdicts, strict=True):
        axes.annotate(
            f" {verdict.measured:.3g} {verdict.unit}", (verdict.score, place), va="center", fontsize=6
        )
    axes.margins(x=0.12)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title("Budgets: 1 is what is asked, more is better", fontsize=9)
