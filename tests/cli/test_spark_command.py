"""`headrace spark`: help without Spark, clear words where something is missing, and a job from the shell."""

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from click.testing import CliRunner

from headrace.cli import main
from headrace.cli.spark import JOBS
from headrace.spark.jobs import ingest
from tests.spark.jobs.drops import messages, write_file
from tests.suites import find_java

WITHOUT = "import sys; sys.modules[{name!r}] = None\nfrom headrace.cli import main; main({words!r})"


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environ}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)


def test_help_lists_the_jobs_without_pyspark() -> None:
    shown = run(sys.executable, "-c", WITHOUT.format(name="pyspark", words=["spark", "--help"]))
    assert shown.returncode == 0, shown.stderr
    for name, sentence in JOBS.items():
        assert name in shown.stdout
        assert sentence in shown.stdout


@pytest.mark.parametrize("name", ["pyspark", "pandas"])
def test_what_is_not_installed_is_named(name: str) -> None:
    words = ["spark", "sessions", "drop", "--show"]
    shown = run(sys.executable, "-c", WITHOUT.format(name=name, words=words))
    assert (shown.returncode, shown.stdout) == (1, "")
    assert f"needs {name}, which is not installed: pip install 'headrace[spark]'" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_missing_java_is_named(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-c",
        "from headrace.cli import main; main()",
        "spark",
        "rollup",
        str(tmp_path),
        "--show",
    ]
    shown = run(*words, PATH=str(tmp_path), JAVA_HOME="")
    assert shown.returncode == 1
    assert "Java 17" in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["rollup", "drop"], "say where the result goes"),
        (["rollup", "drop", "--stream", "--show"], "--stream needs OUT"),
        (["sessions", "drop", "out", "--stream", "--since", "2026-01-31"], "are for a run without --stream"),
        (["ingest", "drop", "table", "--every", "soon"], "is no time span"),
        (["report", "drop", "out.html", "--date", "31.1."], "is no date or time"),
        (["replay", "drop", "--conf", "x"], "is not KEY=VALUE"),
        (["unknown"], "No such command"),
    ],
)
def test_a_wrong_command_line_is_refused_before_spark_starts(words: list[str], complaint: str) -> None:
    result = CliRunner().invoke(main, ["spark", *words])
    assert result.exit_code == 2
    assert complaint in result.output


@pytest.mark.needs("java")
def test_a_job_runs_with_spark_submit(tmp_path: Path) -> None:
    java = find_java()
    assert java is not None
    drop, table = tmp_path / "drop", tmp_path / "table"
    write_file(drop, messages(0, 9))
    shown = run(
        str(Path(pyspark.__file__).parent / "bin" / "spark-submit"),
        *("--master", "local[1]", "--conf", "spark.ui.enabled=false"),
        str(ingest.__file__),
        *(str(drop), str(table), "--once"),
        JAVA_HOME=str(java.resolve().parents[1]),
        PYSPARK_PYTHON=sys.executable,
        PYSPARK_DRIVER_PYTHON=sys.executable,
    )
    # It has the driver's warnings on its standard output, too.
    assert (shown.returncode, shown.stdout.splitlines()[-1:]) == (0, ["took 10 messages in 1 batch"]), (
        shown.stderr
    )
    assert list((table / "date=2026-01-31/hour=7").glob("*.parquet"))
