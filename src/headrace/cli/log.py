"""`headrace log`: what is in a log directory, record by record, and whether every byte of it holds. It only reads,
also while a gateway writes."""

import base64
import itertools
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from headrace.bus import PROTOCOL_NAMES
from headrace.errors import LogDamaged
from headrace.log import CONTROL_NAMES, Damage, LogReader, Record, read_identity, segment_name, survey, verify

SEGMENT_HEADER = 4096  # where records begin; a segment that ends there is prepared and has none
BUS_CONTROL_NAMES = {
    16: "subscription",
    17: "unsubscribe",
    18: "ack",
    19: "attempt",
    20: "carry",
    21: "ids",
    22: "part",
    23: "passed",
    24: "note",
    25: "forget",
    32: "finished",
}

directory = click.argument(
    "directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)


@click.group(name="log", short_help="Look into a log directory.")
def command() -> None:
    """Look into a log directory (DATA/log), also while the gateway runs."""


@command.command()
@directory
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def info(directory: Path, as_json: bool) -> None:
    """Show a log's identity, its segments and the offsets in them."""
    identity = read_identity(directory)
    segments = survey(directory)
    used = [one for one in segments if one.bytes > SEGMENT_HEADER]
    aside = sorted(file.name for file in directory.glob("aside/*"))
    summary = {
        "path": str(directory.resolve()),
        "version": identity["version"],
        "id": identity["id"],
        "made": _moment(identity["made"] * 1_000_000),
        "first_offset": used[0].first_offset if used else 0,
        "end_offset": used[-1].end_offset if used else 0,
        "prepared_segments": len(segments) - len(used),
    }
    if as_json:
        click.echo(json.dumps({**summary, "segments": [one._asdict() for one in used], "aside": aside}))
        return
    for name, value in summary.items():
        click.echo(f"{name.replace('_', ' '):<18} {value}")
    table = Table("segment", "first offset", "end offset", "messages", "bytes", "synced", "state")
    for one in used:
        messages = one.end_offset - one.first_offset
        state = "sealed" if one.sealed else "open"
        table.add_row(
            *(
                str(value)
                for value in (one.number, one.first_offset, one.end_offset, messages, one.bytes, one.marked)
            ),
            state,
        )
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120).print(table)
    for name in aside:
        click.echo(f"kept aside by a repair: aside/{name}")


@command.command()
@directory
@click.option(
    "--from", "start", type=click.IntRange(0), default=0, help="Begin at this offset.", show_default=True
)
@click.option("--count", type=click.IntRange(1), help="Stop after so many records.")
@click.option("--controls", is_flag=True, help="Show control records too.")
@click.option("--topic", help="Only messages of this topic.")
@click.option("--follow", is_flag=True, help="Go on as messages come, until interrupted.")
def dump(
    directory: Path, start: int, count: int | None, controls: bool, topic: str | None, follow: bool
) -> None:
    """Show records, one line of JSON each. A payload that is not UTF-8 text is shown as payload_base64."""
    damaged = False
    wanted = None if topic is None else topic.encode()
    shown = itertools.count(1)
    with LogReader(directory, start) as reader:
        while True:
            try:
                record = reader.read(controls=controls)
            except LogDamaged as error:
                damaged = True
                click.echo(f"Error: {error}", err=True)
                if reader.resume() is None:
                    break
                continue
            if record is None:
                if not follow:
                    break
                time.sleep(0.05)
                continue
            if wanted is not None and record.topic_name != wanted:
                continue
            click.echo(json.dumps(_line(record)))
            if next(shown) == count:
                break
        if reader.overtaken:
            click.echo(f"{reader.overtaken} offsets were retired before they could be read.", err=True)
    if damaged:
        sys.exit(1)


def _line(record: Record) -> dict[str, Any]:
    place = {"segment": record.segment, "position": record.position}
    if record.control:
        kind = CONTROL_NAMES.get(record.kind) or BUS_CONTROL_NAMES.get(record.kind) or str(record.kind)
        line: dict[str, Any] = {"control": kind, "next_offset": record.offset, "time": _moment(record.time)}
        line |= {"topic_id": record.topic} if record.topic else {}
        line |= {"origin_id": record.origin} if record.origin else {}
        line |= {"correlation": record.correlation} if record.correlation else {}
        return {**line, **_text("payload", record.payload), **place}
    protocol = (
        PROTOCOL_NAMES[record.protocol] if record.protocol < len(PROTOCOL_NAMES) else str(record.protocol)
    )
    line = {
        "offset": record.offset,
        "time": _moment(record.time),
        "topic": record.topic_name.decode(errors="replace"),
        "protocol": protocol,
        "source": record.origin_name.decode(errors="replace"),
        "kind": record.kind,
        "flags": record.flags,
        "correlation": record.correlation,
    }
    line |= _text("headers", record.headers) if record.headers else {}
    line |= {"parts": list(record.parts)} if record.parts else {}
    return {**line, **_text("payload", record.payload), **place}


def _text(name: str, data: bytes) -> dict[str, str]:
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def _moment(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / 1e6, UTC).isoformat(timespec="microseconds")


@command.command(name="verify")
@directory
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def verify_command(directory: Path, as_json: bool) -> None:
    """Check every byte of a log. Each place that does not hold is named, and the exit code is then 1."""
    found = verify(directory)
    if as_json:
        click.echo(json.dumps({**found._asdict(), "problems": [one._asdict() for one in found.problems]}))
    else:
        for problem in found.problems:
            click.echo(_sentence(problem))
        click.echo(
            f"{len(found.problems) or 'no'} problem{'s' * (len(found.problems) != 1)}: {found.segments} segments, "
            f"{found.records} records, {found.messages} messages, offsets {found.first_offset} to {found.end_offset}"
        )
    if found.problems:
        sys.exit(1)


def _sentence(problem: Damage) -> str:
    lost = f", {problem.lost} offset{'s' * (problem.lost != 1)} lost" if problem.lost else ""
    place = f"{segment_name(problem.segment)} position {problem.position}"
    return f"{place} (offset {problem.offset}{lost}): {problem.reason}"
