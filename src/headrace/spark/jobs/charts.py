"""Charts as SVG, for a page that has the colours as variables (--c1 to --c8, --ink, --faint, --grid). Each has a title
and a sentence for those who do not see it, and every mark says its value. Knows nothing of what is drawn."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Final

WIDTH: Final = 540  # of a chart, two of which are side by side on a page
WIDE: Final = 1100  # of one that has the page to itself; letters are then of the same size
LEFT: Final = 64  # room for the labels of the vertical axis
BOTTOM: Final = 40  # room for those of the horizontal one, and its title
TOP: Final = 26
RIGHT: Final = 12
COLOURS: Final = 8

Format = Callable[[float], str]


def short(value: float) -> str:
    """A number in at most five characters: 950, 1.2k, 34M."""
    for limit, divisor, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (1e12, 1e9, "G")):
        if abs(value) < limit * 0.9995:
            return _trimmed(value / divisor) + unit
    return _trimmed(value / 1e12) + "T"


def size(value: float) -> str:
    """Bytes: 950 B, 1.2 KiB, 34 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1023.5:
            return f"{_trimmed(value)} {unit}"
        value /= 1024
    return f"{_trimmed(value)} TiB"


def milliseconds(value: float) -> str:
    """A time: 0.2 ms, 15 ms, 1.2 s."""
    if abs(value) < 999.5:
        return f"{_trimmed(value)} ms"
    return f"{_trimmed(value / 1000)} s" if abs(value) < 600_000 else f"{_trimmed(value / 60_000)} min"


def _trimmed(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.5 else f"{value:.3g}"


def steps(largest: float, count: int = 4) -> list[float]:
    """Round numbers from 0 to at least the largest value, for the lines of an axis."""
    if largest <= 0:
        return [0.0, 1.0]
    rough = largest / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.9999)
    return [step * number for number in range(math.ceil(largest / step - 1e-9) + 1)]


def byte_steps(largest: float) -> list[float]:
    """The same for bytes: round numbers of KiB, MiB and so on."""
    unit = 1024.0 ** max(0, math.floor(math.log(largest, 1024))) if largest > 0 else 1.0
    return [step * unit for step in steps(largest / unit)]


def picture(name: str, sentence: str, height: float, body: str, width: float = WIDTH) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height:g}" role="img" aria-label="{escape(name)}: {escape(sentence)}">'
        f"<title>{escape(name)}</title><desc>{escape(sentence)}</desc>{body}</svg>"
    )


def legend(names: Sequence[str]) -> str:
    items = "".join(
        f'<li><span class="key c{place % COLOURS + 1}"></span>{escape(name)}</li>'
        for place, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'


def _frame(
    height: float, lines: Sequence[tuple[float, str]], columns: Sequence[tuple[float, str]], x: str, y: str
) -> str:
    """The lines behind a chart with their labels: (place, label) each."""
    base = height - BOTTOM
    parts = []
    for place, label in lines:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>'
            f'<text class="tick" x="{LEFT - 8}" y="{place + 4:.1f}" text-anchor="end">{escape(label)}</text>'
        )
    for place, label in columns:
        parts.append(
            f'<text class="tick" x="{place:.1f}" y="{base + 16:.1f}" text-anchor="middle">{escape(label)}</text>'
        )
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(
        f'<text class="axis" x="{middle:.1f}" y="{height - 6:.1f}" text-anchor="middle">{escape(x)}</text>'
    )
    parts.append(f'<text class="axis" x="0" y="11">{escape(y)}</text>')
    return "".join(parts)


def stacked(
    name: str,
    sentence: str,
    columns: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    x: str,
    y: str,
    form: Format = short,
    every: int = 1,
    height: float = 260,
) -> str:
    """Bars, one a column, with a part for each series."""
    totals = [sum(values[place] for values in series.values()) for place in range(len(columns))]
    marks = (byte_steps if form is size else steps)(max(totals, default=0))
    base, room = height - BOTTOM, height - BOTTOM - TOP
    step = (WIDTH - LEFT - RIGHT) / max(1, len(columns))
    scale = room / marks[-1]
    lines = [(base - mark * scale, form(mark)) for mark in marks]
    labels = [(LEFT + step * (n + 0.5), text) for n, text in enumerate(columns) if n % every == 0]
    body = [_frame(height, lines, labels, x, y)]
    for place, column in enumerate(columns):
        below = 0.0
        for number, (label, values) in enumerate(series.items()):
            if values[place]:
                tall = values[place] * scale
                body.append(
                    f'<rect class="c{number % COLOURS + 1}" x="{LEFT + step * place + step * 0.12:.1f}"'
                    f' y="{base - below - tall:.1f}" width="{step * 0.76:.1f}" height="{max(tall, 0.5):.1f}" rx="1.5">'
                    f"<title>{escape(f'{column}, {label}: {form(values[place])}')}</title></rect>"
                )
                below += tall
    return picture(name, sentence, height, "".join(body)) + (legend(list(series)) if len(series) > 1 else "")


def lines_of(
    name: str,
    sentence: str,
    columns: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    x: str,
    y: str,
    form: Format = milliseconds,
    every: int = 1,
    height: float = 260,
) -> str:
    """A line for each series on a logarithmic scale, broken where there is no value. What is not above zero has no
    place on it, and is drawn at its lower end."""
    values = [value for one in series.values() for value in one if value is not None and value > 0]
    low = math.floor(math.log10(min(values))) if values else 0
    high = max(low + 1, math.ceil(math.log10(max(values)) - 1e-9)) if values else 1
    base, room = height - BOTTOM, height - BOTTOM - TOP
    step = (WIDTH - LEFT - RIGHT) / max(1, len(columns))

    def up(value: float) -> float:
        exponent = math.log10(value) if value > 0 else low
        return base - (max(exponent, low) - low) / (high - low) * room

    powers = range(low, high + 1, max(1, (high - low + 5) // 6))
    lines = [(up(10.0**power), form(10.0**power)) for power in powers]
    labels = [(LEFT + step * (n + 0.5), text) for n, text in enumerate(columns) if n % every == 0]
    body = [_frame(height, lines, labels, x, y)]
    for number, (label, given) in enumerate(series.items()):
        colour = f"c{number % COLOURS + 1}"
        path, pen = "", "M"
        dots = []
        for place, value in enumerate(given):
            if value is None:
                pen = "M"
                continue
            across, down = LEFT + step * (place + 0.5), up(value)
            path += f"{pen}{across:.1f} {down:.1f}"
            pen = "L"
            dots.append(
                f'<circle class="{colour}" cx="{across:.1f}" cy="{down:.1f}" r="3">'
                f"<title>{escape(f'{columns[place]}, {label}: {form(value)}')}</title></circle>"
            )
        body.append(f'<path class="line {colour}" d="{path}"/>{"".join(dots)}')
    return picture(name, sentence, height, "".join(body)) + legend(list(series))


def ranked(
    name: str,
    sentence: str,
    values: Sequence[tuple[str, float, str]],
    *,
    form: Format = short,
    colour: int = 1,
) -> str:
    """Bars from the left, longest first: a label, a value and a remark each."""
    row = 36
    largest = max((value for _, value, _ in values), default=0) or 1
    body = []
    for place, (label, value, remark) in enumerate(values):
        top = place * row
        wide = (WIDTH - 190) * value / largest
        body.append(
            f'<text class="label" x="0" y="{top + 12}">{escape(_cut(label, 70))}</text>'
            f'<rect class="c{colour}" x="0" y="{top + 17}" width="{max(wide, 1):.1f}" height="9" rx="2">'
            f"<title>{escape(f'{label}: {form(value)}, {remark}')}</title></rect>"
            f'<text class="tick" x="{max(wide, 1) + 8:.1f}" y="{top + 26}">'
            f"{escape(form(value))} · {escape(remark)}</text>"
        )
    return picture(name, sentence, max(row, row * len(values)), "".join(body))


def heatmap(
    name: str,
    sentence: str,
    columns: Sequence[str],
    rows: Mapping[str, Sequence[float]],
    *,
    x: str,
    form: Format = short,
    every: int = 1,
) -> str:
    """A square for each row and column, the fuller the larger its value, on a logarithmic scale."""
    row, label = 24, 230
    height = row * len(rows) + BOTTOM
    step = (WIDE - label - RIGHT) / max(1, len(columns))
    largest = max((value for values in rows.values() for value in values), default=0) or 1
    body = []
    for place, (title, values) in enumerate(rows.items()):
        top = place * row
        body.append(
            f'<text class="label" x="{label - 10}" y="{top + 16}" text-anchor="end">{escape(_cut(title, 34))}'
            f"<title>{escape(title)}</title></text>"
        )
        for number, value in enumerate(values):
            strength = 0.12 + 0.88 * math.log1p(value) / math.log1p(largest) if value else 0.0
            tone = f'class="c1" fill-opacity="{strength:.2f}"' if value else 'class="none"'
            body.append(
                f'<rect {tone} x="{label + step * number + 1:.1f}" y="{top + 1}" width="{step - 2:.1f}"'
                f' height="{row - 2}" rx="3">'
                f"<title>{escape(f'{title}, {columns[number]}: {form(value)}')}</title></rect>"
            )
    for number, text in enumerate(columns):
        if number % every == 0:
            body.append(
                f'<text class="tick" x="{label + step * (number + 0.5):.1f}" y="{row * len(rows) + 15}"'
                f' text-anchor="middle">{escape(text)}</text>'
            )
    middle = label + (WIDE - label - RIGHT) / 2
    body.append(
        f'<text class="axis" x="{middle:.1f}" y="{height - 6}" text-anchor="middle">{escape(x)}</text>'
    )
    return picture(name, sentence, height, "".join(body), WIDE)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
