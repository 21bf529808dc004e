"""A gateway's status as a terminal shows it, drawn as tables. It knows the gateway only by what /api/status tells."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

Status = dict[str, Any]

NO_RATE: Final = "–"
WIDE: Final = 110  # columns; a terminal that nobody made larger has 80


@dataclass(frozen=True, slots=True)
class Moment:
    """A gateway's figures, and when they were asked for."""

    at: float  # monotonic seconds
    status: Status

    @classmethod
    def now(cls, status: Status) -> Self:
        return cls(time.monotonic(), status)


def rate(now: float | None, before: float | None, seconds: float) -> str:
    """How much came a second; nothing to say without a moment before, or if the gateway was started anew."""
    if now is None or before is None or seconds <= 0 or now < before:
        return NO_RATE
    return human((now - before) / seconds)


class Fitting:
    """A table, or where the terminal is narrow a smaller one."""

    def __init__(self, wide: Table, narrow: Table) -> None:
        self._wide = wide
        self._narrow = narrow

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._wide if options.max_width >= WIDE else self._narrow


def human(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if abs(value) < 1000 or unit == "G":
            break
        value /= 1000
    return f"{value:,.0f}{unit}" if unit == "" or value >= 100 else f"{value:,.1f}{unit}"


def size(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"


def duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:,.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def _of(status: Status | None, *path: str) -> Any:
    found: Any = status
    for name in path:
        if not isinstance(found, dict):
            return None
        found = found.get(name)
    return found


def view(
    now: Moment, before: Moment | None, more: Mapping[str, Mapping[str, str]] | None = None
) -> RenderableType:
    """Everything on one screen; `more` as protocols() has it, by default how long deliveries took."""
    status, earlier = now.status, before.status if before else None
    seconds = now.at - before.at if before else 0.0
    if more is None:
        more = delays(status, earlier)
    parts: list[RenderableType] = [head(status), protocols(status, earlier, seconds, more)]
    if status.get("log"):
        parts.append(log(status, earlier, seconds))
    if status.get("sinks"):
        parts.append(drops(status, earlier, seconds))
    return Group(*parts)


def head(status: Status) -> RenderableType:
    line = Text()
    line.append(f"headrace {status.get('node', '?')}", style="bold")
    up = int(status.get("uptime") or 0)
    line.append(
        f"   version {status.get('version', '?')}   up {up // 3600}:{up // 60 % 60:02}:{up % 60:02}   "
    )
    if status.get("ready"):
        line.append("ready", style="green")
    else:
        line.append("not ready: " + "; ".join(status.get("reasons") or ["starting"]), style="bold red")
    for warning in status.get("warnings") or []:
        line.append(f"\n{warning}", style="yellow")
    return line


def protocols(
    status: Status,
    earlier: Status | None,
    seconds: float,
    more: Mapping[str, Mapping[str, str]] | None = None,
) -> RenderableType:
    """A line for each protocol; `more` are further columns, by name and protocol."""
    more = more or {}
    return Fitting(
        _protocols(status, earlier, seconds, more, narrow=False),
        _protocols(status, earlier, seconds, more, narrow=True),
    )


def _protocols(
    status: Status,
    earlier: Status | None,
    seconds: float,
    more: Mapping[str, Mapping[str, str]],
    narrow: bool,
) -> Table:
    table = Table(title="protocols", title_justify="left", expand=True)
    table.add_column("protocol", no_wrap=True)
    names = ["open", "published", "in /s", "delivered", "out /s"]
    if not narrow:
        table.add_column("listens on", overflow="fold")
        names.append("bytes in /s")
    for name in (*names, *more):
        table.add_column(name, justify="right", no_wrap=True)
    for listener in status["listeners"]:
        name = listener["protocol"]
        published, delivered = _of(status, "bus", "published", name), _of(status, "bus", "delivered", name)
        in_bytes = _of(status, "bus", "published_bytes", name)
        where = ", ".join(listener["addresses"]) + (" (TLS)" if listener["tls"] else "")
        counts = [human(count or 0) if narrow else f"{count or 0:,}" for count in (published, delivered)]
        table.add_row(
            name,
            *([] if narrow else [where]),
            f"{listener['connections']:,}",
            counts[0],
            rate(published, _of(earlier, "bus", "published", name), seconds),
            counts[1],
            rate(delivered, _of(earlier, "bus", "delivered", name), seconds),
            *([] if narrow else [rate(in_bytes, _of(earlier, "bus", "published_bytes", name), seconds)]),
            *(column.get(name, "") for column in more.values()),
        )
    return table


def delays(status: Status, earlier: Status | None) -> dict[str, dict[str, str]]:
    """How long after its arrival a message went to a subscriber, since the moment before: the median and the 99th
    percentile, by protocol."""
    shown: dict[str, dict[str, str]] = {"p50": {}, "p99": {}}
    for protocol, seen in (_of(status, "bus", "delays") or {}).items():
        before = dict(_of(earlier, "bus", "delays", protocol, "steps") or [])
        steps = [(end, count - before.get(end, 0)) for end, count in seen["steps"]]
        if any(count < 0 for _, count in steps):  # it was started anew
            steps = seen["steps"]
        total = sum(count for _, count in steps)
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            passed = 0
            for end, count in steps:
                passed += count
                if total and passed >= share * total:
                    shown[name][protocol] = duration(end)
                    break
    return shown


def log(status: Status, earlier: Status | None, seconds: float) -> RenderableType:
    stats = _of(status, "log", "stats")
    end = stats["appended_offset"]
    line = Text(
        f"{end:,} messages, {rate(end, _of(earlier, 'log', 'stats', 'appended_offset'), seconds)}/s,"
        f" {end - stats['safe_offset']:,} not yet safe (sync {_of(status, 'log', 'sync')});"
        f" {stats['segments']} of {stats['max_segments']} segments, {stats['pool_segments']} more ready"
    )
    bus = status.get("bus") or {}
    line.append(
        f"\n{bus.get('topics', 0):,} topics, {bus.get('subscriptions', 0):,} subscriptions"
        f" ({bus.get('durable', 0):,} durable), {bus.get('inflight', 0):,} in flight,"
        f" {bus.get('redelivered', 0):,} redelivered, {bus.get('dead', 0):,} dead, {bus.get('lost', 0):,} passed over"
    )
    for name in ("full", "failed"):
        if _of(status, "log", name):
            line.append(f"\n{_of(status, 'log', name)}", style="bold red")
    return Panel(line, title="log and bus", title_align="left")


def drops(status: Status, earlier: Status | None, seconds: float) -> RenderableType:
    table = Table(title="drops", title_justify="left", expand=True)
    table.add_column("drop")
    table.add_column("where", overflow="fold")
    for name in ("files", "rows", "rows /s", "written", "behind", "oldest"):
        table.add_column(name, justify="right")
    before = {one["drop"]: one for one in (earlier or {}).get("sinks") or []}
    for sink in status["sinks"]:
        stats = sink["stats"]
        table.add_row(
            sink["drop"],
            sink["uri"],
            f"{stats.get('files', 0):,}",
            f"{stats.get('rows', 0):,}",
            rate(stats.get("rows"), _of(before.get(sink["drop"]), "stats", "rows"), seconds),
            size(stats.get("bytes", 0)),
            f"{sink['lag_offsets']:,}",
            f"{sink['lag_seconds']:.0f} s",
            style="red" if stats.get("failing") else "",
        )
    return table
