"""A day of a drop as one HTML page with charts: `headrace spark report`. The page needs nothing from elsewhere, and
suits light and dark screens. Spark counts; what comes back to be drawn is bounded, however long the day was."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from html import escape
from pathlib import Path
from typing import Final

import click
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.drop import FileName
from headrace.drop.schema import EMPTY_BEFORE_KEY
from headrace.spark import read_drop
from headrace.spark.jobs import (
    JobError,
    Moment,
    Session,
    charts,
    compacted_option,
    counted,
    run_main,
    with_session,
)
from headrace.spark.jobs.hadoop import Files
from headrace.spark.jobs.ranges import Ranges
from headrace.spark.jobs.rollup import ACCURACY, PERCENTILES, narrow

TOPICS: Final = 15  # that have a row of their own
TALKERS: Final = 12
STREAMS: Final = 200  # logs in the table of offsets
GAPS: Final = 20  # of the largest gaps, by name
FOOTERS: Final = 500  # files after a hole that are asked how much of it is empty
HOURS: Final = [f"{hour:02d}" for hour in range(24)]


@dataclass
class Gap:
    node: str
    log: str
    first: int
    last: int


@dataclass
class Stream:
    """A log of a node on this day."""

    node: str
    log: str
    rows: int
    first: int
    last: int
    missing: int = 0
    """Offsets between those that no file covers."""


@dataclass
class Day:
    """What is known of a day."""

    date: date
    messages: int = 0
    bytes: int = 0
    topics: int = 0
    sources: int = 0
    timed: int = 0
    busiest: tuple[datetime, int] | None = None
    """The minute with the most messages, and how many."""
    latency: list[float | None] = field(default_factory=lambda: [None] * len(PERCENTILES))
    by_protocol: dict[str, list[float]] = field(default_factory=dict)
    bytes_by_protocol: dict[str, list[float]] = field(default_factory=dict)
    by_topic: dict[str, list[float]] = field(default_factory=dict)
    latency_by_hour: dict[str, list[float | None]] = field(default_factory=dict)
    talkers: list[tuple[str, int, int, int]] = field(default_factory=list)
    """Source, messages, bytes, topics."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Messages by the bits of their size: 0 for empty ones, n for less than 2 to the n."""
    streams: list[Stream] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)


# --- counting -----------------------------------------------------------------------------------------------


def last_day(spark: SparkSession, drop: str, compacted: str | None = None) -> date:
    """The last day of which there is something, by the names of the directories."""
    days = [
        date.fromisoformat(name.removeprefix("date="))
        for place in (drop, compacted)
        if place is not None
        for name in Files(spark, place).list_names("")
        if name.startswith("date=")
    ]
    if not days:
        raise JobError(f"there is nothing in {drop} yet")
    return max(days)


def run(spark: SparkSession, drop: str, day: date, *, compacted: str | None = None) -> Day:
    """Counts a day (of UTC)."""
    since = datetime(day.year, day.month, day.day, tzinfo=UTC)
    rows = read_drop(spark, drop, since=since, until=since + timedelta(days=1), compacted=compacted)
    kept = narrow(rows, "node", "log", "offset", "protocol").withColumn(
        "hour", (F.unix_seconds("minute") % 86400 / 3600).cast("int")
    )
    kept.persist()
    try:
        return _counted(kept, Day(day), _names(spark, [drop, *([compacted] if compacted else [])], day))
    finally:
        kept.unpersist()


def _counted(rows: DataFrame, day: Day, files: dict[FileName, str]) -> Day:
    quantiles = F.percentile_approx("latency_ms", list(PERCENTILES.values()), ACCURACY)
    messages, size = F.count(F.lit(1)).alias("messages"), F.sum("bytes").alias("bytes")
    total = rows.agg(
        messages,
        size,
        F.count_distinct("topic").alias("topics"),
        F.count_distinct("source").alias("sources"),
        F.count("latency_ms").alias("timed"),
        quantiles.alias("latency"),
    ).collect()[0]
    if not total.messages:
        return day
    day.messages, day.bytes, day.topics = total.messages, total.bytes, total.topics
    day.sources, day.timed = total.sources, total.timed
    day.latency = list(total.latency or day.latency)
    busiest = rows.groupBy("minute").agg(messages).orderBy(F.desc("messages"), "minute").limit(1)
    row = busiest.select(F.unix_seconds("minute").alias("s"), "messages").collect()[0]
    day.busiest = datetime.fromtimestamp(row.s, UTC), row.messages
    for row in rows.groupBy("protocol", "hour").agg(messages, size).orderBy("protocol").collect():
        day.by_protocol.setdefault(row.protocol, [0.0] * 24)[row.hour] = row.messages
        day.bytes_by_protocol.setdefault(row.protocol, [0.0] * 24)[row.hour] = row.bytes
    top = [
        one.topic
        for one in rows.groupBy("topic").count().orderBy(F.desc("count"), "topic").limit(TOPICS).collect()
    ]
    shown = F.when(F.col("topic").isin(top), F.col("topic"))
    found = {one: [0.0] * 24 for one in (*top, None)}
    for row in rows.groupBy(shown.alias("topic"), "hour").agg(messages).collect():
        found[row.topic][row.hour] = row.messages
    others = found.pop(None)
    day.by_topic = found
    if any(others):
        day.by_topic[f"{counted(day.topics - len(top), 'other topic')}"] = others
    day.latency_by_hour = {name.removesuffix("_ms"): [None] * 24 for name in PERCENTILES}
    for row in rows.groupBy("hour").agg(quantiles.alias("latency")).collect():
        for place, name in enumerate(day.latency_by_hour):
            day.latency_by_hour[name][row.hour] = row.latency[place] if row.latency else None
    talkers = rows.groupBy("source").agg(messages, size, F.count_distinct("topic").alias("topics"))
    day.talkers = [
        (one.source or "the gateway itself", one.messages, one.bytes, one.topics)
        for one in talkers.orderBy(F.desc("messages"), "source").limit(TALKERS).collect()
    ]
    bits = F.when(F.col("bytes") > 0, F.length(F.bin("bytes"))).otherwise(0)
    day.sizes = {one.bits: one["count"] for one in rows.groupBy(bits.alias("bits")).count().collect()}
    _look_at_offsets(rows, day, files)
    return day


def _names(spark: SparkSession, places: Sequence[str], day: date) -> dict[FileName, str]:
    """The files of a day and where they are; their names say what offsets they cover."""
    found = {}
    for place in places:
        files = Files(spark, place)
        for entry in files.list_files(f"date={day}"):
            name = FileName.parse(entry.path.rpartition("/")[2])
            if name is not None:
                found[name] = files.at(f"date={day}/{entry.path}")
    return found


def _look_at_offsets(rows: DataFrame, day: Day, files: dict[FileName, str]) -> None:
    streams = rows.groupBy("node", "log").agg(
        F.count(F.lit(1)).alias("rows"), F.min("offset").alias("first"), F.max("offset").alias("last")
    )
    day.streams = [
        Stream(**one.asDict()) for one in streams.orderBy("node", "first").limit(STREAMS).collect()
    ]
    place = Files(rows.sparkSession, next(iter(files.values()))) if files else None
    ranges, looked = Ranges(), 0
    for name, path in sorted(files.items()):
        first = name.first
        if not ranges.follows(name) and place is not None and looked < FOOTERS:
            looked += 1
            first -= min(first, int(place.footer(path).get(EMPTY_BEFORE_KEY.decode(), "0")))
        ranges.add(name.stream, first, name.last)
    known = {(one.node, one.log): one for one in day.streams}
    last: tuple[tuple[str, str], int] | None = None
    for stream, (first, end) in ranges:
        if last is not None and last[0] == stream:
            day.gaps.append(Gap(*stream, last[1] + 1, first - 1))
            if stream in known:
                known[stream].missing += first - 1 - last[1]
        last = stream, end
    day.gaps.sort(key=lambda gap: gap.first - gap.last)
    del day.gaps[GAPS:]


# --- the page -----------------------------------------------------------------------------------------------

STYLE: Final = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1b2330; --faint: #5b6676; --grid: #e3e7ed;
  --c1: #2767d8; --c2: #e0813a; --c3: #2b9a76; --c4: #9a56c8; --c5: #d2486a; --c6: #8a8f1f; --c7: #1b9bb8;
  --c8: #7a6552; }
@media (prefers-color-scheme: dark) { :root { --page: #10141b; --card: #181e28; --ink: #e6ebf2; --faint: #98a4b5;
  --grid: #2a3342; --c1: #6ea2ff; --c2: #f2a365; --c3: #55c79f; --c4: #c58bea; --c5: #f07f9c; --c6: #c5ca58;
  --c7: #5ac8e0; --c8: #bda48c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 32px 20px 48px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 16px; margin: 0 0 2px; }
p { margin: 0; } .note { color: var(--faint); font-size: 13px; margin-bottom: 12px; }
header p { color: var(--faint); margin-top: 4px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin: 22px 0; padding: 0; }
.tiles div { background: var(--card); border-radius: 10px; padding: 12px 16px; }
.tiles dt { color: var(--faint); font-size: 13px; } .tiles dd { margin: 0; font-size: 23px; font-weight: 620;
  font-variant-numeric: tabular-nums; }
.tiles small { display: block; font-size: 12px; font-weight: 400; color: var(--faint); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 16px; }
section { background: var(--card); border-radius: 10px; padding: 16px 18px; min-width: 0; }
section.wide { grid-column: 1 / -1; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font-size: 13px; } svg .tick, svg .axis { fill: var(--faint); font-size: 12px; }
svg .grid { stroke: var(--grid); } svg .none { fill: var(--grid); fill-opacity: .45; }
.line { fill: none !important; stroke-width: 2.2; stroke-linejoin: round; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 8px 0 0; padding: 0;
  font-size: 13px; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 10px 6px 0; border-bottom: 1px solid var(--grid); }
th { color: var(--faint); font-weight: 500; } .n { text-align: right; padding-right: 16px; }
.scroll { overflow-x: auto; } code { font: 12px ui-monospace, "DejaVu Sans Mono", monospace; }
.good { color: var(--c3); } .bad { color: var(--c5); font-weight: 600; }
footer { color: var(--faint); font-size: 13px; margin-top: 20px; }
@media print { body { background: #fff; } section, .tiles div { border: 1px solid var(--grid); break-inside: avoid; } }
"""
MARKS: Final = "".join(
    f".c{n} {{ fill: var(--c{n}); background: var(--c{n}); }} .line.c{n} {{ stroke: var(--c{n}); }}\n"
    for n in range(1, charts.COLOURS + 1)
)


def page(day: Day, drop: str) -> str:
    """The day as HTML."""
    title = f"{day.date:%A}, {day.date.day} {day.date:%B %Y}"
    if day.messages:
        body = f'{_tiles(day)}<div class="cards">{"".join(_sections(day))}</div>'
    else:
        body = "<section><p>No message was appended on this day.</p></section>"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Headrace · {day.date}</title>\n<style>{STYLE}{MARKS}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{title}</h1><p>The drop <code>{escape(drop)}</code>. All times are UTC.</p></header>\n"
        f"{body}\n<footer>Made by headrace spark report.</footer>\n</main>\n</body>\n</html>\n"
    )


def _tiles(day: Day) -> str:
    at, most = day.busiest or (None, 0)
    p50, _, p99 = day.latency
    tiles = [
        ("Messages", f"{day.messages:,}", f"{day.messages / 86400:,.3g} a second"),
        ("Payload", charts.size(day.bytes), f"{charts.size(day.bytes / day.messages)} a message"),
        ("Topics", f"{day.topics:,}", ""),
        ("Sources", f"{day.sources:,}", ""),
        ("Busiest minute", f"{at:%H:%M}" if at else "–", counted(most, "message")),
        (
            "Latency, median",
            charts.milliseconds(p50) if p50 is not None else "–",
            f"p99 {charts.milliseconds(p99)}" if p99 is not None else "no sender gave its time",
        ),
    ]
    items = "".join(
        f"<div><dt>{name}</dt><dd>{escape(value)}<small>{escape(remark)}</small></dd></div>"
        for name, value, remark in tiles
    )
    return f'<dl class="tiles">{items}</dl>'


def _sections(day: Day) -> list[str]:
    protocols = ", ".join(f"{name} {sum(values):,.0f}" for name, values in day.by_protocol.items())
    busiest = max(day.by_topic, key=lambda topic: sum(day.by_topic[topic]))
    share = f"{sum(day.by_topic[busiest]) / day.messages:.0%}"
    found = [
        _section(
            "Messages by protocol",
            "How many were appended in each hour.",
            charts.stacked(
                "Messages by protocol and hour",
                protocols,
                HOURS,
                day.by_protocol,
                x="hour",
                y="messages",
                every=2,
            ),
        ),
        _section(
            "Bytes by protocol",
            "Payloads, before compression.",
            charts.stacked(
                "Payload bytes by protocol and hour",
                ", ".join(
                    f"{name} {charts.size(sum(values))}" for name, values in day.bytes_by_protocol.items()
                ),
                HOURS,
                day.bytes_by_protocol,
                x="hour",
                y="bytes",
                form=charts.size,
                every=2,
            ),
        ),
        _section(
            "Topics over the day",
            "Messages per hour, the busiest topics first; the fuller a square, the more. Point at one for its number.",
            charts.heatmap(
                "Messages by topic and hour", f"{busiest} has {share} of all", HOURS, day.by_topic, x="hour"
            ),
            wide=True,
        ),
    ]
    if day.timed:
        found.append(
            _section(
                "Latency",
                f"From the sender's own time to the append, for the {day.timed / day.messages:.0%} of messages that"
                " carry one; logarithmic.",
                charts.lines_of(
                    "Latency percentiles by hour",
                    ", ".join(
                        f"{name} {charts.milliseconds(value)}"
                        for name, value in zip(day.latency_by_hour, day.latency, strict=True)
                        if value is not None
                    ),
                    HOURS,
                    day.latency_by_hour,
                    x="hour",
                    y="latency",
                    every=2,
                ),
            )
        )
    largest = max(day.sizes)
    bits = range(min(day.sizes), largest + 1)
    found.append(
        _section(
            "Sizes of payloads",
            "A bar counts the payloads of less than its size, and at least half of it.",
            charts.stacked(
                "Messages by size of payload",
                f"up to {charts.size(2**largest)}",
                ["0" if bit == 0 else f"{charts.size(2**bit)}" for bit in bits],
                {"messages": [float(day.sizes.get(bit, 0)) for bit in bits]},
                x="size of the payload",
                y="messages",
                every=max(1, (len(bits) + 6) // 7),
            ),
        )
    )
    found.append(
        _section(
            "Top talkers",
            "The sources with the most messages.",
            charts.ranked(
                "Sources with the most messages",
                f"{day.talkers[0][0]} is first",
                [
                    (source, messages, f"{charts.size(size)}, {counted(topics, 'topic')}")
                    for source, messages, size, topics in day.talkers
                ],
                colour=3,
            ),
        )
    )
    found.append(_section("Offsets", _verdict(day), _offsets(day)))
    return found


def _section(title: str, note: str, body: str, *, wide: bool = False) -> str:
    kind = ' class="wide"' if wide else ""
    return f'<section{kind}><h2>{title}</h2><p class="note">{note}</p>{body}</section>'


def _verdict(day: Day) -> str:
    missing = sum(one.missing for one in day.streams)
    if not missing:
        return '<span class="good">No gap</span>: the files of the day cover every offset from the first to the last.'
    return (
        f'<span class="bad">{counted(missing, "offset")}</span> between first and last are in no file of the day:'
        " pruned, lost, or not written yet."
    )


def _offsets(day: Day) -> str:
    rows = "".join(
        f"<tr><td>{escape(one.node)}</td><td><code>{escape(one.log[:12])}…</code></td>"
        f'<td class="n">{one.first:,}</td><td class="n">{one.last:,}</td><td class="n">{one.rows:,}</td>'
        f'<td class="n {"bad" if one.missing else ""}">{one.missing:,}</td></tr>'
        for one in day.streams
    )
    table = (
        '<div class="scroll"><table><thead><tr><th>node</th><th>log</th><th class="n">first offset</th>'
        '<th class="n">last offset</th><th class="n">messages</th><th class="n">in no file</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    if day.gaps:
        gaps = "".join(
            f"<li>{escape(one.node)} <code>{escape(one.log[:12])}…</code>: {one.first:,} to {one.last:,}"
            f" ({counted(one.last - one.first + 1, 'offset')})</li>"
            for one in day.gaps
        )
        table += f"<p class='note' style='margin-top:12px'>The largest gaps:</p><ul>{gaps}</ul>"
    return table


# --- the shell ----------------------------------------------------------------------------------------------


@click.command("report", short_help="An HTML page with charts of a day.")
@click.argument("drop")
@click.argument("out", metavar="FILE", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
@click.option(
    "--date", "moment", metavar="DAY", type=Moment(), help="A day (UTC).  [default: the last one there is]"
)
@compacted_option
@with_session
def command(session: Session, drop: str, out: Path, moment: datetime | None, compacted: str | None) -> None:
    """Draw a day of a DROP as one HTML page: traffic by protocol and topic, latency, sizes, the sources with the
    most messages, and gaps in the offsets. FILE may be - for standard output.
    """
    spark = session.open()
    day = run(spark, drop, moment.date() if moment else last_day(spark, drop, compacted), compacted=compacted)
    text = page(day, drop)
    if str(out) == "-":
        sys.stdout.write(text)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise JobError(f"cannot write {out}: {error.strerror}") from None
    click.echo(f"{out}: {day.date}, {counted(day.messages, 'message')}")


def main(argv: Sequence[str] | None = None) -> None:
    run_main(command, argv)


if __name__ == "__main__":
    # Under its own name, so that what it sends to executors is found there.
    from headrace.spark.jobs import report

    report.main()
