"""`headrace drop`: what is in a drop directory, whether it is whole, and how it stays small. Works while gateways write
and Spark reads."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from headrace.config import load
from headrace.config.kinds import format_duration, format_size, parse_duration, parse_size
from headrace.config.options import config_options, data_option
from headrace.config.schema import MAIN_DROP
from headrace.drop.catalog import Entry, catalog, streams
from headrace.drop.compact import CLOSED_AFTER, TARGET_BYTES, Group, compact
from headrace.drop.filesystems import Place, place
from headrace.drop.footer import Footer, gap_between, read_footers
from headrace.drop.layout import COMPACTED_SUFFIX
from headrace.drop.prune import GRACE, Plan, plan_prune, prune
from headrace.drop.verify import Verified, verify
from headrace.errors import HeadraceError

Command = TypeVar("Command", bound=Callable[..., Any])
Number = TypeVar("Number", int, float)


def _size(text: str) -> int:
    return _amount(parse_size, text)


def _time(text: str) -> float:
    return _amount(parse_duration, text)


def _amount(parse: Callable[[str], Number], text: str) -> Number:
    """A number with a unit, as the configuration reads it."""
    try:
        return parse(text)
    except ValueError as error:
        raise click.BadParameter(f'"{text}": {error}') from None


def drop_argument(command: Command) -> Command:
    """Adds DROP and what finds it where it is not given; the command gets `drop`."""
    for decorate in (
        click.option("--name", default=MAIN_DROP, show_default=True, help="Which drop of the configuration."),
        data_option,
        config_options,
        click.argument("drop", metavar="[DROP]", required=False),
    ):
        command = decorate(command)
    return command


def _place(drop: str | None, config_file: Path | None, sets: Sequence[str], data: Path, name: str) -> Place:
    """The place that is meant; without DROP, where the configuration says that the files go."""
    if drop is None:
        config = load(config_file, os.environ, sets).config
        uris = {MAIN_DROP: config.drop.uri or str(data / "drop")}
        uris |= {one.name: one.uri or str(data / f"drop-{one.name}") for one in config.drops}
        if name not in uris:
            raise HeadraceError(f'the configuration has no drop "{name}"; it has {", ".join(sorted(uris))}')
        drop = uris[name]
    found = place(drop)
    if not found.exists():
        raise HeadraceError(f"{found} is not there")
    return found


def _beside(drop: Place, given: str | None) -> Place:
    return place(given) if given else drop.beside(COMPACTED_SUFFIX)


@click.group(name="drop")
def command() -> None:
    """Look into a drop directory, check it, and keep it small.

    DROP is a path or a URI; without it, it is what the configuration says (DATA/drop)."""


# --- ls -----------------------------------------------------------------------------------------------------


@command.command("ls", short_help="Show files, rows and bytes by the hour.")
@drop_argument
@click.option("--files", "each_file", is_flag=True, help="Each file, not each hour.")
@click.option("--json", "as_json", is_flag=True, help="Lines of JSON instead of a table.")
def ls_command(each_file: bool, as_json: bool, **where: Any) -> None:
    """Show what is there: for each hour of a node's log, files, rows, bytes and offsets.

    Gaps are offsets before or between the files of the hour that no file has and nothing explains."""
    drop = _place(**where)
    lines = list((_files if each_file else _hours)(drop))
    if as_json:
        for line in lines:
            click.echo(json.dumps(line))
        return
    if not lines:
        click.echo(f"{drop}: no files")
        return
    names = ["file", "rows", "bytes", "gap"] if each_file else list(lines[0])
    table = Table(*(name.replace("_", " ") for name in names))
    for line in lines:
        table.add_row(*("?" if line[name] is None else str(line[name]) for name in names))
    _console().print(table)
    total = {name: sum(line[name] or 0 for line in lines) for name in ("rows", "bytes")}
    files = len(lines) if each_file else sum(line["files"] for line in lines)
    click.echo(f"{files} files, {total['rows']} rows, {total['bytes']} bytes")


def _files(drop: Place) -> Iterator[dict[str, Any]]:
    for entry, footer, gap in _in_order(drop):
        yield {
            "file": entry.path,
            "node": entry.name.node,
            "log": entry.name.log,
            "first": entry.name.first,
            "last": entry.name.last,
            "rows": footer.rows if footer else None,
            "bytes": entry.size,
            "gap": gap,
        }


def _hours(drop: Place) -> Iterator[dict[str, Any]]:
    hours: dict[tuple[str, str, str], dict[str, Any]] = {}
    for entry, footer, gap in _in_order(drop):
        name = entry.name
        line = hours.setdefault(
            (entry.directory, *name.stream),
            {
                "hour": entry.directory,
                "node": name.node,
                "log": name.log,
                "files": 0,
                "rows": 0,
                "bytes": 0,
                "first": name.first,
                "last": name.last,
                "gaps": 0,
            },
        )
        line["files"] += 1
        line["bytes"] += entry.size
        line["rows"] = None if footer is None or line["rows"] is None else line["rows"] + footer.rows
        line["last"] = max(line["last"], name.last)
        line["gaps"] += gap
    yield from (hours[key] for key in sorted(hours))


def _in_order(drop: Place) -> Iterator[tuple[Entry, Footer | None, int]]:
    """Every file by node, log and offset; its footer, unless it cannot be read; and how many offsets before it are in
    no file and unexplained."""
    for entries in streams(catalog(drop).entries).values():
        before: Entry | None = None
        for entry, footer in zip(entries, read_footers(drop, entries), strict=True):
            readable = footer if footer and ("unreadable" not in dict(footer.problems)) else None
            gap: tuple[int, int] | None = None
            if before is not None:
                gap = gap_between(before, entry, readable.empty_before if readable else 0)
            yield entry, readable, gap[1] - gap[0] + 1 if gap else 0
            if before is None or entry.name.last > before.name.last:
                before = entry


# --- verify -------------------------------------------------------------------------------------------------


@command.command("verify", short_help="Prove that a drop is whole.")
@drop_argument
@click.option(
    "--compacted",
    metavar="DIR",
    help="The directory of compacted files.  [default: DROP-compacted, if it is there]",
)
@click.option("--quick", is_flag=True, help="Read names and footers only.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def verify_command(compacted: str | None, quick: bool, as_json: bool, **where: Any) -> None:
    """Prove that a drop is whole: checksums hold, and every offset is there once.

    Each problem is named with its file, each range of offsets that is missing with its bounds; the exit code is then
    1. What is before the first file of a log counts as pruned."""
    drop = _place(**where)
    beside = _beside(drop, compacted)
    if compacted and not beside.exists():
        raise HeadraceError(f"{beside} is not there")
    with _progress() as advance:
        found = verify(drop, beside if beside.exists() else None, quick=quick, progress=advance)
    if as_json:
        click.echo(json.dumps(_verified(found)))
    else:
        for problem in found.problems:
            click.echo(f"{problem.file}: {problem.reason}")
        for missing in found.missing:
            span = f"offset {missing.first}" if missing.first == missing.last else ""
            span = span or f"offsets {missing.first} to {missing.last}"
            click.echo(f"{missing.node} {missing.log}: {span} missing before {missing.before}")
        count = len(found.problems) + len(found.missing)
        click.echo(
            f"{count or 'no'} problem{'s' * (count != 1)}: {found.files} files with {found.rows} rows, "
            f"{found.compacted_files} compacted with {found.compacted_rows}"
            + (f", {found.lost} offsets lost by the log" if found.lost else "")
            + (f", {found.gone} files removed meanwhile" if found.gone else "")
        )
    if not found.whole:
        sys.exit(1)


def _verified(found: Verified) -> dict[str, Any]:
    return {
        **vars(found),
        "problems": [one._asdict() for one in found.problems],
        "missing": [one._asdict() for one in found.missing],
    }


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, on standard error."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verifying", total=None)
        yield lambda done, total: bar.update(task, advance=done, total=total)


# --- compact ------------------------------------------------------------------------------------------------


@command.command("compact", short_help="Merge the files of past hours.")
@drop_argument
@click.option("--to", metavar="DIR", help="Where compacted files go.  [default: DROP-compacted]")
@click.option(
    "--target-bytes",
    type=_size,
    metavar="SIZE",
    default=format_size(TARGET_BYTES),
    show_default=True,
    help="How large files are to become, about.",
)
@click.option(
    "--closed-after",
    type=_time,
    metavar="TIME",
    default=format_duration(CLOSED_AFTER),
    show_default=True,
    help="How long an hour must have been over.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be made.")
def compact_command(
    to: str | None, target_bytes: int, closed_after: float, dry_run: bool, **where: Any
) -> None:
    """Merge the files of past hours into large ones, in a directory of their own.

    The originals stay, for streams; `headrace drop prune --compacted-only` removes them. It may be run again at any
    time and goes on where it was, also after it was killed. One at a time runs in a directory."""
    drop = _place(**where)
    into = _beside(drop, to)

    def tell(group: Group) -> None:
        count = len(group.sources)
        click.echo(f"{into.full(group.path)}: {count} file{'s' * (count != 1)}, {group.rows} rows")

    done = compact(
        drop, into, target_bytes=target_bytes, closed_after=closed_after, dry_run=dry_run, each=tell
    )
    if dry_run:
        for group in done.groups:
            tell(group)
    for left in done.left:
        click.echo(f"{left.file} was left: {left.reason}", err=True)
    sources = sum(len(group.sources) for group in done.groups)
    size = sum(group.bytes for group in done.groups)
    made = f"{len(done.groups)} files from {sources}"
    click.echo(
        f"would make {made}, {size} bytes" if dry_run else f"made {made}, {done.bytes} bytes from {size}"
    )
    if done.left:
        sys.exit(1)


# --- prune --------------------------------------------------------------------------------------------------


@command.command("prune", short_help="Remove old files.")
@drop_argument
@click.option(
    "--older-than",
    type=_time,
    metavar="TIME",
    help='Remove what is older, by the hour of the rows; like "30d".',
)
@click.option(
    "--keep-bytes",
    type=_size,
    metavar="SIZE",
    help='Remove the oldest hours until there is no more; like "500GiB".',
)
@click.option("--compacted-only", is_flag=True, help="Remove only what a compacted file has, too.")
@click.option(
    "--grace",
    type=_time,
    metavar="TIME",
    default=format_duration(GRACE),
    show_default=True,
    help="How old that compacted file must be, for readers that have just listed the originals.",
)
@click.option(
    "--to",
    metavar="DIR",
    help="The directory of compacted files (--compacted-only: default DROP-compacted). Without --compacted-only it is"
    " pruned, too, by --older-than.",
)
@click.option("--staging", is_flag=True, help="Remove what was left in _staging more than a day ago.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def prune_command(
    older_than: float | None,
    keep_bytes: int | None,
    compacted_only: bool,
    grace: float,
    to: str | None,
    staging: bool,
    dry_run: bool,
    yes: bool,
    **where: Any,
) -> None:
    """Remove whole files, oldest hours first.

    The newest file of each node and log always stays."""
    if older_than is None and keep_bytes is None and not (compacted_only or staging):
        raise click.UsageError("say what is to go: --older-than, --keep-bytes, --compacted-only or --staging")
    drop = _place(**where)
    compacted = _beside(drop, to) if compacted_only else None
    plans = [plan_prune(drop, older_than=older_than, keep_bytes=keep_bytes, compacted=compacted, grace=grace)]
    if to and not compacted_only:
        plans.append(plan_prune(place(to), older_than=older_than, keep_newest=False))
    files = sum(len(plan.entries) + (len(plan.staged) if staging else 0) for plan in plans)
    for plan in plans:
        _show(plan, staging=staging)
    size = sum(plan.bytes + sum(one.size for one in plan.staged if staging) for plan in plans)
    what = f"{files} file{'s' * (files != 1)}, {size} bytes"
    if dry_run or not files:
        click.echo(f"would remove {what}" if dry_run else "nothing to remove")
        return
    if not yes:
        click.confirm(f"Remove {what}?", abort=True)
    for plan in plans:
        prune(plan, staging=staging)
    click.echo(f"removed {what}")


def _show(plan: Plan, *, staging: bool) -> None:
    for kept in plan.kept:
        click.echo(f"{kept.file}: {kept.reason}", err=True)
    for path in _paths(plan, staging=staging):
        click.echo(plan.place.full(path))
    if plan.staged and not staging:
        count = len(plan.staged)
        click.echo(
            f"{plan.place}: {count} file{'s' * (count != 1)} left in _staging more than a day ago; --staging"
            " removes them",
            err=True,
        )


def _paths(plan: Plan, *, staging: bool) -> Iterable[str]:
    yield from (entry.path for entry in plan.entries)
    if staging:
        yield from (found.path for found in plan.staged)


def _console() -> Console:
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200)
