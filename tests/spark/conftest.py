"""One Spark session for all tests of this directory: a process can have but one, and it takes seconds to start."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headrace.spark import local_session
from tests.suites import find_java


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    java = find_java()
    assert java is not None
    os.environ.setdefault("JAVA_HOME", str(java.resolve().parents[1]))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = local_session(
        "tests",
        master="local[2]",
        config={
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
            "spark.sql.streaming.stopTimeout": "60s",
        },
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture
def drop(tmp_path: Path) -> Path:
    directory = tmp_path / "drop"
    directory.mkdir()
    return directory
