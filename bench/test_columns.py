"""How fast the log becomes Parquet, against pyarrow writing the same columns ready-made."""

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from headrace.columns import ColumnReader
from headrace.drop.parquet import ROW_GROUP_BYTES, ROW_GROUP_ROWS, writer
from headrace.errors import LogFull
from headrace.log import Log

SEGMENT = 64 << 20
TOTAL = 128 << 20
TOPICS = 50
BATCH_ROWS = 1 << 16
BATCH_BYTES = 16 << 20
ROUNDS = 7


def messages(size: int, count: int) -> list[bytes]:
    """JSON of a sensor, about half of which a compressor can save."""
    chance = random.Random(size)
    made = []
    for i in range(count):
        fields = {"id": i, "sensor": f"s-{chance.randrange(500):03d}", "value": round(chance.gauss(20, 5), 4)}
        text = json.dumps(fields)[:-1] + ', "data": "'
        made.append((text + chance.randbytes(size // 2).hex())[: size - 2].encode() + b'"}')
    return made


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


def fill(directory: Path, size: int) -> int:
    """A log with TOTAL bytes of payloads, all of one hour; how many messages."""
    payloads = messages(size, 20_000)
    count = TOTAL // size
    with Log(directory, sync="none", segment_bytes=SEGMENT, retention_bytes=64 * SEGMENT) as log:
        topics = [log.topic(f"plant.line{i}.sensor") for i in range(TOPICS)]
        while (i := log.appended) < count:
            now = 4_000_000_000_000_000 + 500 * i
            try:
                log.append(topics[7 * i % TOPICS], payloads[i % 20_000], protocol=1, correlation=i, now=now)
            except LogFull:  # a segment is being prepared
                log.on_event()
                time.sleep(0.001)
    return count


def row_groups(log: Path) -> Iterator[pa.Table]:
    """The log, gathered as the sink does it."""
    gathered: list[pa.RecordBatch] = []
    rows = size = 0
    with ColumnReader(log, node="bench") as reader:
        while (batch := reader.read(min(BATCH_ROWS, ROW_GROUP_ROWS - rows), BATCH_BYTES)) is not None:
            gathered.append(batch)
            rows += batch.num_rows
            size += reader.row_bytes
            if rows >= ROW_GROUP_ROWS or size >= ROW_GROUP_BYTES:
                yield pa.Table.from_batches(gathered)
                gathered, rows, size = [], 0, 0
    if gathered:
        yield pa.Table.from_batches(gathered)


def write(file: Path, groups: Iterator[pa.Table] | list[pa.Table]) -> None:
    out = None
    for group in groups:
        out = out or writer(file, group.schema, {})
        out.write_table(group)
    assert out is not None
    out.close()


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@pytest.mark.parametrize("size", [100, 1024])
def test_log_to_parquet(benchmark: BenchmarkFixture, directory: Path, size: int) -> None:
    """Against the same row groups ready-made and written the same way, and against write_table() with its own
    ideas of row groups and encodings. All take turns, and the best time of each counts."""
    count = fill(directory / "log", size)
    ready_made = list(row_groups(directory / "log"))
    table = pa.concat_tables(ready_made).combine_chunks()
    assert table.num_rows == count
    same: list[float] = []
    plain: list[float] = []
    reading: list[float] = []

    def others() -> None:
        same.append(seconds(lambda: write(directory / "ready.parquet", ready_made)))
        plain.append(seconds(lambda: pq.write_table(table, directory / "plain.parquet", compression="zstd")))
        reading.append(seconds(lambda: sum(group.num_rows for group in row_groups(directory / "log"))))

    benchmark.pedantic(
        lambda: write(directory / "log.parquet", row_groups(directory / "log")),
        setup=others,
        rounds=ROUNDS,
        warmup_rounds=1,
    )
    assert benchmark.stats is not None
    best: float = benchmark.stats.stats.min
    benchmark.extra_info["rows"] = count
    benchmark.extra_info["rows_per_second"] = round(count / best)
    benchmark.extra_info["rows_per_second_read_alone"] = round(count / min(reading))
    benchmark.extra_info["ratio_to_ready_made"] = round(min(same) / best, 3)
    benchmark.extra_info["ratio_to_write_table"] = round(min(plain) / best, 3)
    assert (directory / "log.parquet").read_bytes() == (directory / "ready.parquet").read_bytes()
