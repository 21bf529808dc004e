"""Logs in temporary directories, small enough that a test sees them roll."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.log import Log

SMALL: dict[str, Any] = {
    "segment_bytes": 65536,
    "pool_segments": 1,
    "retention_bytes": 1 << 30,
    "sync": "none",
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def open_log(directory: Path) -> Iterator[Callable[..., Log]]:
    """Opens the log of the test's directory, with small segments unless told otherwise; closed when the test ends."""
    opened: list[Log] = []

    def open_it(**options: Any) -> Log:
        opened.append(Log(directory, **(SMALL | options)))
        return opened[-1]

    yield open_it
    for log in opened:
        log.close()
