"""What the demo shows while it runs, as a screen or as lines, and at its end. It only reads the books and the gateway's
status."""

from collections.abc import Iterable
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.admin.terminal import Moment, rate, size, view
from headrace.clients.load import Latencies
from headrace.demo.books import Reader, milliseconds
from headrace.demo.plant import Plant
from headrace.demo.proof import Proof
from headrace.drop.catalog import Entry

NEWEST_FILES: Final = 3


class Screen:
    """Draws from one look to the next, so that it can tell rates."""

    def __init__(self, plant: Plant, seconds: float) -> None:
        self._plant = plant
        self._seconds = seconds
        self._before: Moment | None = None
        self._counts: dict[object, int] = {}  # at the last look
        self._at = 0.0

    def draw(
        self, now: Moment, passed: float, files: list[Entry], spark: Iterable[str] = ()
    ) -> RenderableType:
        """Everything on one screen; `spark` are its last batches, where it runs."""
        recent = {reader: reader.take_recent() for reader in self._plant.readers}
        by_protocol: dict[str, Latencies] = {}
        for reader, latencies in recent.items():
            by_protocol.setdefault(reader.protocol, Latencies()).merge(latencies)
        shown = {protocol: milliseconds(latencies) for protocol, latencies in by_protocol.items()}
        more = {
            name: {protocol: pair[place] for protocol, pair in shown.items()}
            for place, name in enumerate(("p50", "p99"))
        }
        left = (
            f"{self._seconds - passed:.0f} s left"
            if passed < self._seconds
            else "waiting for what is on its way"
        )
        title = Text.assemble(("headrace demo", "bold"), f"   {left}   Ctrl-C ends it early")
        parts = [title, self._streams(passed, recent), view(now, self._before, more), newest(files)]
        if spark:
            parts.append(Text("\n  ".join(["Spark's rollup of the drop", *spark]), overflow="ellipsis"))
        self._before, self._at = now, passed
        return Group(*parts)

    def line(self, now: Moment, passed: float) -> str:
        """The same in few words."""
        plant = self._plant
        latencies = Latencies()
        for reader in plant.readers:
            latencies.merge(reader.take_recent())
        p50, p99 = milliseconds(latencies)
        sinks = now.status.get("sinks") or [{"stats": {}}]
        stats = sinks[0]["stats"]
        files = stats.get("files", 0)
        text = (
            f"{passed:4.0f} s  published {plant.published:,} ({self._rate('in', plant.published, passed)}/s)"
            f"  delivered {plant.delivered:,} ({self._rate('out', plant.delivered, passed)}/s)"
            f"  p50 {p50}  p99 {p99}"
            f"  log {now.status['log']['stats']['appended_offset']:,}"
            f"  drop {files} {'file' if files == 1 else 'files'}, {stats.get('rows', 0):,} rows"
        )
        self._at = passed
        return text

    def _rate(self, what: object, count: int, passed: float) -> str:
        before = self._counts.get(what, 0)
        self._counts[what] = count
        return rate(count, before, passed - self._at)

    def _streams(self, passed: float, recent: dict[Reader, Latencies]) -> RenderableType:
        table = Table(title="streams", title_justify="left", expand=True)
        for name in ("stream", "from", "to"):
            table.add_column(name)
        for name in ("published", "in /s", "delivered", "out /s", "dead", "held", "p50", "p99"):
            table.add_column(name, justify="right")
        for stream in self._plant.streams.values():
            incoming = self._rate(stream, stream.published, passed)
            for reader in stream.readers:
                table.add_row(
                    stream.name,
                    stream.protocol,
                    reader.protocol,
                    f"{stream.published:,}",
                    incoming,
                    f"{reader.delivered:,}",
                    self._rate(reader, reader.delivered, passed),
                    f"{reader.dead:,}" if reader.queue else "",
                    f"{reader.held:,}" if reader.queue else "",
                    *milliseconds(recent[reader]),
                )
        return table


def newest(files: list[Entry]) -> RenderableType:
    """The drop's last files."""
    lines = [f"  {entry.path}  {size(entry.size)}" for entry in files[-NEWEST_FILES:]]
    return Text(
        "\n".join(["newest drop files", *lines]) if lines else "no drop files yet", overflow="ellipsis"
    )


# --- the end ------------------------------------------------------------------------------------------------


def wrongs(plant: Plant, proof: Proof, rolled: int | None) -> list[str]:
    """Everything that does not add up, as sentences; `rolled` is how many messages Spark has taken, if it ran."""
    found = [
        f"{reader.name}: {reader.stream.published:,} published, but {reader.delivered:,} delivered, "
        f"{reader.dead:,} dead and {reader.held:,} held: {abs(reader.missing):,} "
        + ("are missing" if reader.missing > 0 else "too many")
        for reader in plant.readers
        if reader.missing
    ]
    for stream in plant.streams.values():
        rows = in_drop(proof, stream.topics)
        if rows != stream.published:
            found.append(f"{stream.name}: {stream.published:,} published, but {rows:,} rows in the drop")
    requests = plant.streams["requests"].published
    if plant.answered != requests:
        found.append(f"requests: {requests:,} published, but {plant.answered:,} answered")
    if rolled is not None and rolled != proof.verified.rows:
        found.append(f"the drop has {proof.verified.rows:,} rows, but Spark's rollup took {rolled:,}")
    return found + proof.wrong


def in_drop(proof: Proof, topics: Iterable[str]) -> int:
    return sum(proof.topics[topic] for topic in topics)


def show_summary(
    console: Console, plant: Plant, proof: Proof, seconds: float, rolled: int | None, wrong: list[str]
) -> None:
    table = Table(title="published = delivered + dead + held", title_justify="left")
    for name in ("stream", "from", "to"):
        table.add_column(name)
    for name in ("published", "delivered", "dead", "held", "again", "in the drop", "p50", "p99"):
        table.add_column(name, justify="right")
    for stream in plant.streams.values():
        rows = in_drop(proof, stream.topics)
        for reader in stream.readers:
            counts = (stream.published, reader.delivered, reader.dead, reader.held, reader.again, rows)
            good = not reader.missing and rows == stream.published
            table.add_row(
                stream.name,
                stream.protocol,
                reader.protocol,
                *(f"{count:,}" for count in counts),
                *milliseconds(reader.latencies),
                style="" if good else "bold red",
            )
    console.print(table)
    verified = proof.verified
    others = proof.end - sum(in_drop(proof, stream.topics) for stream in plant.streams.values())
    lines = [
        f"{plant.published:,} messages published in {seconds:.1f} s ({rate(plant.published, 0, seconds)}/s), "
        f"{plant.delivered:,} delivered; {plant.answered:,} requests answered",
        f"the log has {proof.end:,} offsets: those messages, and {others:,} of the gateway and of "
        "services (jobs made of requests, answers, dead letters, heartbeats)",
        f"the drop has {verified.files} files, {size(verified.bytes)}, with {verified.rows:,} rows",
    ]
    if rolled is not None:
        lines.append(f"Spark's rollup, which followed the drop, took {rolled:,} messages")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if wrong:
        for line in wrong:
            console.print(line, style="bold red", highlight=False, markup=False, soft_wrap=True)
        console.print("the numbers do not add up", style="bold red")
    else:
        console.print(
            "the numbers add up, and every offset is in the drop once", style="green", highlight=False
        )
