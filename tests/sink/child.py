"""A gateway's log and sink in a process that tests kill: appends messages while the sink writes them, and ends when all
are in the drop. Run by test_kill.py with a data directory, a drop, how many messages, and a seed."""

import queue
import random
import sys
import time
from pathlib import Path

from headrace.errors import LogFull
from headrace.log import Log
from headrace.sink.exporter import Sink
from headrace.sink.notes import Progress
from headrace.sink.plan import DropPlan

NODE = "edge"
ROLL_ROWS = 60


def payload(log: str, offset: int) -> bytes:
    """What is at an offset: a file of another log or a wrong row is found out."""
    return f"{log} {offset} ".encode() + b"x" * (offset % 50)


def main(data: Path, drop: str, count: int, seed: int) -> None:
    chance = random.Random(seed)
    with Log(
        data / "log", sync="none", segment_bytes=65536, pool_segments=2, retention_bytes=16 << 20
    ) as log:
        plan = DropPlan("default", drop, roll_rows=ROLL_ROWS, roll_seconds=0.05)
        told: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        sink = Sink(
            plan,
            data=data,
            node=NODE,
            log_path=data / "log",
            log_id=log.id_text,
            saved=Progress(
                log.id_text, log.cursors.get(plan.cursor, 0), log.cursors.get(plan.file_cursor, 0)
            ),
            on_progress=lambda covered, end: told.put((covered, end)),
        )
        topic = log.topic("a.b")
        now = time.time_ns() // 1000
        sink.start()
        done = 0
        while done < count or sink.covered < log.appended:
            while not told.empty():
                covered, end = told.get()
                log.save_cursor(plan.file_cursor, end)
                log.save_cursor(plan.cursor, covered)
                log.hold(plan.cursor, covered)
            if done < count:
                if chance.random() < 0.01:
                    now += chance.choice((-7200, 1, 1800, 3600)) * 1_000_000  # a clock that jumps
                try:
                    log.append(topic, payload(log.id_text, log.appended), now=now)
                    done += 1
                except LogFull:
                    pass
            else:
                time.sleep(0.001)
            log.on_event()
        assert sink.stop(60)
        while not told.empty():
            covered, end = told.get()
            log.save_cursor(plan.cursor, covered)
    print(log.appended)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
