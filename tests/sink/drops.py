"""What is in a drop, read without the code under test but for the names."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from headrace.drop import FileName, parse_path
from headrace.drop.filesystems import place
from headrace.drop.verify import verify


def files(drop: Path) -> list[Path]:
    """A drop's files by the offsets in their names."""
    found = [path for path in drop.glob("date=*/hour=*/*") if parse_path(str(path))]
    return sorted(found, key=lambda path: path.name)


def name(path: Path) -> FileName:
    parsed = FileName.parse(path.name)
    assert parsed is not None
    return parsed


def ranges(drop: Path) -> list[tuple[int, int]]:
    return [(name(path).first, name(path).last) for path in files(drop)]


def rows(drop: Path) -> list[dict[str, Any]]:
    """Every row, by file and place in it."""
    return [row for path in files(drop) for row in pq.ParquetFile(path).read().to_pylist()]


def offsets(drop: Path) -> list[int]:
    return [row["offset"] for row in rows(drop)]


def problems(drop: Path) -> list[str]:
    """What `headrace drop verify` finds, which is all there is to a drop but its completeness."""
    return [str(problem) for problem in verify(place(drop)).problems]
