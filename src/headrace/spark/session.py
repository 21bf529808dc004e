"""A Spark session on this machine, with settings that suit the drop. A cluster's own sessions need none of this."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

from headrace.spark.errors import SparkError


def find_java() -> Path:
    """The java that Spark will run; SparkError where there is none."""
    home = os.environ.get("JAVA_HOME")
    java = Path(home, "bin", "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        raise SparkError("Spark needs Java 17 or later: put java on the PATH, or set JAVA_HOME.")
    return Path(java)


def local_session(
    name: str = "headrace", *, master: str = "local[*]", config: Mapping[str, str] | None = None
) -> SparkSession:
    """A session, new or the one that this process has; `master` may name a cluster as well. Python workers run the
    Python that this process runs, times are shown in UTC, and a local session listens on loopback alone."""
    find_java()
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
    }
    if master.startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        settings |= {
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
        }
    builder = SparkSession.Builder().appName(name).master(master)
    for key, value in (settings | dict(config or {})).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
