"""Logs, sinks on them, and what is in a drop."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.log import Log
from headrace.sink.exporter import Sink
from headrace.sink.notes import Progress
from headrace.sink.plan import DropPlan
from tests.drop.conftest import bucket, s3_server

__all__ = ["bucket", "s3_server"]

NODE = "edge-1"


class Bench:
    """A data directory with a log, and sinks as a gateway would run them: their cursors are saved in the log."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.drop = data / "drop"
        self._sinks: list[Sink] = []
        self.log = Log(data / "log", segment_bytes=256 * 1024, pool_segments=1, retention_bytes=64 << 20)

    def close(self) -> None:
        for sink in self._sinks:
            sink.ask_to_stop()
        for sink in self._sinks:
            sink.stop(30)
        self.log.close()

    def append(self, count: int, topic: str = "a.b", **options: Any) -> None:
        number = self.log.topic(topic)
        for _ in range(count):
            self.log.append(number, b"message %d" % self.log.appended, **options)

    def plan(self, **options: Any) -> DropPlan:
        return DropPlan(**{"name": "default", "uri": str(self.drop), "roll_seconds": 3600.0, **options})

    def sink(self, plan: DropPlan | None = None, **options: Any) -> Sink:
        plan = plan or self.plan()
        told: list[tuple[int, int]] = []
        saved = [self.log.cursors.get(name, 0) for name in (plan.cursor, plan.file_cursor)]
        made = Sink(
            plan,
            data=self.data,
            node=NODE,
            log_path=Path(self.log.path),
            log_id=self.log.id_text,
            saved=Progress(self.log.id_text, *saved),
            **{"on_progress": lambda *progress: told.append(progress), **options},
        )
        self._sinks.append(made)
        return made

    def export(self, plan: DropPlan | None = None, **options: Any) -> Sink:
        """Exports what is in the log, and ends; a gateway would have saved the cursors."""
        sink = self.sink(plan, once=True, **options)
        sink.run()
        assert sink.error is None
        self.log.save_cursor(sink.plan.file_cursor, sink.stats()["file_end"])
        self.log.save_cursor(sink.plan.cursor, sink.covered)
        return sink


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


@pytest.fixture
def new_bench(tmp_path: Path) -> Iterator[Callable[[Path], Bench]]:
    """More of them, in directories below the test's own."""
    made: list[Bench] = []

    def make(data: Path) -> Bench:
        made.append(Bench(data))
        return made[-1]

    yield make
    for one in made:
        one.close()
