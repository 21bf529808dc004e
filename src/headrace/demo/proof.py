"""Proves from the files alone that everything in a gateway's log is in its drop directory, and counts what is there by
topic. For a gateway that has stopped."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from headrace.drop.catalog import catalog, streams
from headrace.drop.filesystems import Place, place
from headrace.drop.footer import UNREADABLE
from headrace.drop.verify import Verified, verify
from headrace.log import read_identity, survey


@dataclass
class Proof:
    """What was found."""

    end: int  # offsets that the log gave out
    verified: Verified
    topics: Counter[str] = field(default_factory=Counter)  # rows
    wrong: list[str] = field(default_factory=list)  # sentences


def prove(data: Path) -> Proof:
    """Checks every offset of the log in a data directory against the drop in it."""
    log, drop = data / "log", place(data / "drop")
    end = max((segment.end_offset for segment in survey(log)), default=0)
    proof = Proof(end, verify(drop))
    found = proof.verified
    proof.wrong += [f"{problem.file}: {problem.reason}" for problem in found.problems]
    proof.wrong += [f"offsets {gap.first} to {gap.last} are in no file" for gap in found.missing]
    # What is before the first file and behind the last one, verify() cannot know of.
    files = streams(catalog(drop).entries)
    mine = [
        entry.name
        for (_, id), entries in files.items()
        if id == read_identity(log)["id"]
        for entry in entries
    ]
    first, last = (
        min((name.first for name in mine), default=end),
        max((name.last for name in mine), default=-1),
    )
    if first > 0:
        proof.wrong.append(f"offsets 0 to {first - 1} are in no file")
    if last + 1 < end:
        proof.wrong.append(f"offsets {last + 1} to {end - 1} are in no file")
    if found.rows != end:
        proof.wrong.append(f"the log has {end:,} offsets, and the drop {found.rows:,} rows")
    proof.topics = rows_by_topic(drop)
    return proof


def rows_by_topic(drop: Place) -> Counter[str]:
    rows: Counter[str] = Counter()
    for entry in catalog(drop).entries:
        try:
            with drop.open(entry.path) as file:
                topics = pq.read_table(file, columns=["topic"]).column("topic")
        except UNREADABLE:
            continue  # verify() has said why
        for pair in topics.value_counts().to_pylist():
            rows[pair["values"]] += pair["counts"]
    return rows
