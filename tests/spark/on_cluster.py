"""What a driver does on a cluster, as a program of its own: a process can have but one Spark context. Prints what it
found as a line of JSON."""

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from headrace.spark import decode_json, decode_msgpack, local_session, read_drop, register


def executors(spark: SparkSession) -> list[str]:
    """The working directories of the processes that tasks run in."""

    def where(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            time.sleep(0.2)  # so that one executor does not take all tasks while the other takes its first
            yield pa.RecordBatch.from_pydict({"where": [os.getcwd()]})

    rows = spark.range(0, 4, 1, 4).mapInArrow(where, "where string").collect()
    return sorted({row["where"] for row in rows})


def count(rows: DataFrame) -> list[list[Any]]:
    """By node and log: rows, different offsets, and their sum."""
    found: dict[tuple[str, str], list[int]] = {}
    for row in rows.select("node", "log", "offset").collect():
        found.setdefault((row.node, row.log), []).append(row.offset)
    return sorted([*key, len(some), len(set(some)), sum(some)] for key, some in found.items())


def batch(spark: SparkSession, drop: str, work: str) -> dict[str, Any]:
    source = spark.read.format("headrace").load(drop)
    return {
        "read_drop": count(read_drop(spark, drop)),
        "source": count(source),
        "filtered": source.where("node = 'edge-2' and offset >= 8").count(),
        "msgpack": decode_msgpack(source, "n bigint").where("value_error is not null").count(),
    }


def stream(spark: SparkSession, drop: str, work: str) -> dict[str, Any]:
    rows = spark.readStream.format("headrace").option("maxFilesPerTrigger", 5).load(drop)
    query = (
        decode_json(rows, "n bigint")
        .writeStream.format("parquet")
        .option("path", f"{work}/out")
        .option("checkpointLocation", f"{work}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return {"stream": count(spark.read.parquet(f"{work}/out").where("value.n = offset"))}


def main(what: str, master: str, drop: str, work: str) -> None:
    spark = local_session(
        "cluster",
        master=master,
        config={
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            # No task is given out before both executors are there: what to wait for is a part of cores.max.
            "spark.cores.max": "2",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.enabled": "false",
        },
    )
    register(spark)
    found = {"driver": os.getcwd(), "executors": executors(spark), **WORK[what](spark, drop, work)}
    spark.stop()
    print(json.dumps(found))


WORK = {"batch": batch, "stream": stream}

if __name__ == "__main__":
    main(*sys.argv[1:])
