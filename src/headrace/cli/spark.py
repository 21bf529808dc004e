"""`headrace spark`: runs the jobs of headrace.spark.jobs. Their options are with them; here is only how they are
found, since they need PySpark and the rest of the command does not."""

from importlib import import_module
from typing import Final

import click

from headrace.errors import HeadraceError

JOBS: Final = {
    "ingest": "Take a drop into a table, each message once.",
    "replay": "Publish messages of a drop again.",
    "report": "An HTML page with charts of a day.",
    "rollup": "Traffic and latency per topic and minute.",
    "sessions": "When each source was there, and its silences.",
}


class SparkMissing(HeadraceError):
    """PySpark, or what it needs, is not installed."""


class Jobs(click.Group):
    """A group whose commands are the jobs; only the one that was asked for is imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(JOBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in JOBS:
            return None
        try:
            command = import_module(f"headrace.spark.jobs.{cmd_name}").command
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in ("pyspark", "py4j", "pandas"):
                raise
            raise SparkMissing(
                f"headrace spark needs {missing}, which is not installed: pip install 'headrace[spark]'"
                " (and Java 17 or later)"
            ) from None
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # Without importing the jobs, so that it also helps those who have no PySpark yet.
        with formatter.section("Commands"):
            formatter.write_dl(list(JOBS.items()))


@click.command(name="spark", cls=Jobs, short_help="Run a Spark job on a drop directory.")
def command() -> None:
    """Run a Spark job on a drop directory.

    A job runs on this machine unless --master names a cluster. It needs PySpark 4 (pip install 'headrace[spark]')
    and Java 17 or later. The jobs' files can be given to spark-submit as well.
    """
