"""Removes whole files from a drop directory, oldest hours first: by age, by size, or because compacted files have their
rows. First it says what it would remove; then it removes that and nothing else."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from headrace.drop.catalog import Entry, Ranges, catalog, hour_begin, streams
from headrace.drop.errors import DropError
from headrace.drop.filesystems import LOCK_SUFFIX, Found, Place, first_line
from headrace.drop.footer import Footer, read_footers
from headrace.drop.layout import MICROSECONDS_PER_HOUR

GRACE: Final = 3600.0  # a reader that listed the originals has long opened them
STAGING_AGE: Final = 86_400.0  # a file is written for an hour at most


class Kept(NamedTuple):
    """A file that would go if something did not speak against it."""

    file: str
    reason: str


@dataclass
class Plan:
    """What is to be removed from one directory."""

    place: Place
    entries: list[Entry] = field(default_factory=list)  # oldest first
    staged: list[Found] = field(default_factory=list)  # what nobody finishes any more
    kept: list[Kept] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(entry.size for entry in self.entries)


def plan_prune(
    drop: Place,
    *,
    older_than: float | None = None,
    keep_bytes: int | None = None,
    compacted: Place | None = None,
    grace: float = GRACE,
    keep_newest: bool = True,
    now: float | None = None,
) -> Plan:
    """What prune() is to remove: files whose hour was over `older_than` seconds ago, and, oldest hours first, what
    there is beyond `keep_bytes`. With `compacted`, only files that a compacted one covers, and without the other two,
    all of those. `keep_newest` spares the last file of each node and log: the sink may read from its name where to
    go on."""
    moment = time.time() if now is None else now
    entries = catalog(drop).entries
    plan = Plan(drop, staged=_forgotten(drop, moment))
    spared = {files[-1] for files in streams(entries).values()} if keep_newest else set()
    candidates = [entry for entry in entries if entry not in spared]
    if compacted is not None:
        candidates = _covered(drop, compacted, candidates, moment - grace, plan)
    wanted = set()
    if older_than is not None:
        wanted |= {entry for entry in candidates if entry.end <= (moment - older_than) * 1e6}
    if keep_bytes is not None:
        beyond = sum(entry.size for entry in entries) - keep_bytes - sum(entry.size for entry in wanted)
        for entry in candidates:
            if beyond <= 0:
                break
            if entry not in wanted:
                wanted.add(entry)
                beyond -= entry.size
    if older_than is None and keep_bytes is None and compacted is not None:
        wanted = set(candidates)
    plan.entries = sorted(wanted)
    return plan


def _forgotten(place: Place, now: float) -> list[Found]:
    return [
        found
        for found in place.staged()
        if not found.path.endswith(LOCK_SUFFIX)
        and found.mtime < now - STAGING_AGE
        and not place.held(found.path)
    ]


def _covered(drop: Place, compacted: Place, entries: list[Entry], since: float, plan: Plan) -> list[Entry]:
    """Those that a compacted file covers which is older than `since` and has as many rows as they have."""
    ranges = Ranges(catalog(compacted).entries)
    parts: dict[Entry, list[Entry]] = {}
    for entry in entries:
        cover = ranges.covering(entry)
        if cover is not None and cover.mtime <= since:
            parts.setdefault(cover, []).append(entry)
    large = dict(zip(parts, read_footers(compacted, parts), strict=True))
    small = dict(zip(entries, read_footers(drop, entries), strict=True)) if parts else {}
    found = []
    for cover, originals in parts.items():
        reason = _doubt(large[cover], [footer for one in originals if (footer := small[one]) is not None])
        if reason:
            plan.kept.append(Kept(compacted.full(cover.path), f"{reason}; what it covers stays"))
        else:
            found += originals
    return sorted(found)


def _doubt(footer: Footer | None, originals: list[Footer]) -> str:
    """Why a compacted file may not have all that its originals have; empty if it has."""
    if footer is None:
        return "it is gone"
    if footer.problems:
        return footer.problems[0][1]
    if any(one.problems for one in originals):
        return "a file that it covers does not hold"
    rows = sum(one.rows for one in originals)
    return f"it has {footer.rows} rows of {rows}" if footer.rows < rows else ""


def prune(
    plan: Plan,
    *,
    staging: bool = False,
    now: float | None = None,
    each: Callable[[str], None] = lambda path: None,
) -> None:
    """Removes what the plan says, and then directories of past hours that are empty; with `staging` also what was left
    in the staging directory. Tells `each` of every file."""
    place = plan.place
    moment = time.time() if now is None else now
    paths = [entry.path for entry in plan.entries]
    paths += [found.path for found in plan.staged] if staging else []
    path = ""
    try:
        for path in paths:
            if place.remove(path):
                each(path)
        for path in place.directories():
            if _is_over(path, moment):
                place.remove_empty(path)
    except OSError as error:
        raise DropError(f"{place.full(path)} cannot be removed: {first_line(error)}") from None


def _is_over(directory: str, now: float) -> bool:
    try:
        return hour_begin(directory) + MICROSECONDS_PER_HOUR <= now * 1e6
    except ValueError:
        return False
