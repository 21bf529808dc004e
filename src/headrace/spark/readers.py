"""A drop directory as DataFrames: `read_drop` for batches, `stream_drop` for Structured Streaming. Spark's own Parquet
reader does the work, so any filesystem will do that the session can read.

Knows nothing of what the payloads are.
"""

import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from posixpath import normpath
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.drop import parse_path
from headrace.drop.catalog import Entry, choose
from headrace.spark.errors import SparkError
from headrace.spark.schema import drop_schema

# What lies elsewhere or is called otherwise was not made by a sink, and is left alone. As Hadoop's globs.
HOURS_GLOB: Final = "date=[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]/hour=[0-9][0-9]"
NAMES_GLOB: Final = "-".join(["[A-Za-z0-9]*", "[0-9a-f]" * 32, "[0-9]" * 20, "[0-9]" * 20]) + ".parquet"

_FILE_NAME: Final = "_metadata.file_name"


def read_drop(
    spark: SparkSession,
    path: str,
    *,
    compacted: str | None = None,
    payload_json: bool = False,
    since: datetime | None = None,
    until: datetime | None = None,
) -> DataFrame:
    """The rows of a drop directory, each once, as they are now: later files need another call.

    `compacted` names the directory that `headrace drop compact` fills: its files are read instead of the drop's files
    that they were made from, also while it runs. With `since` and `until` (until is not included; without a zone they
    are UTC) only the hours in question are read. A column that a file does not have is null.
    """
    if since is not None and until is not None and _in_utc(since) >= _in_utc(until):
        raise SparkError(f"since ({since}) must be before until ({until}).")
    # In this order: whatever is taken away from the drop has been in a compacted file for a while.
    rows = _read_directory(spark, path, payload_json)
    if compacted is not None:
        rows = _with_compacted(rows, _read_directory(spark, compacted, payload_json))
    for condition in _between(since, until):
        rows = rows.where(condition)
    return rows


def stream_drop(
    spark: SparkSession,
    path: str,
    *,
    payload_json: bool = False,
    max_files_per_trigger: int | None = 1000,
    clean_source: Literal["archive", "delete"] | None = None,
    archive_dir: str | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """The rows of a drop directory as a stream: what is there, then what comes, each file once per checkpoint.

    `clean_source` archives or deletes files after they were read; then no other stream may read this drop. `options`
    are further options of Spark's file source and win over those set here.
    """
    if max_files_per_trigger is not None and max_files_per_trigger < 1:
        raise SparkError("max_files_per_trigger must be at least 1, or None for no limit.")
    settings: dict[str, str] = {}
    if max_files_per_trigger is not None:
        settings["maxFilesPerTrigger"] = str(max_files_per_trigger)
    match clean_source:
        case None:
            if archive_dir is not None:
                raise SparkError('archive_dir has a meaning only with clean_source="archive".')
        case "delete":
            if archive_dir is not None:
                raise SparkError(
                    'clean_source="delete" deletes files; archive_dir is for clean_source="archive".'
                )
            settings["cleanSource"] = "delete"
        case "archive":
            if archive_dir is None:
                raise SparkError('clean_source="archive" needs archive_dir, where the files go.')
            if _is_below(archive_dir, path) or _is_below(path, archive_dir):
                raise SparkError(
                    f"archive_dir ({archive_dir}) and the drop ({path}) must not contain each other: "
                    "the stream would read its archive as new files."
                )
            settings |= {"cleanSource": "archive", "sourceArchiveDir": archive_dir}
        case _:
            raise SparkError(f'clean_source is "archive", "delete" or None, not {clean_source!r}.')
    settings |= dict(options or {})
    if "maxbytespertrigger" in {key.lower() for key in settings}:
        # Spark refuses both; who asks for bytes does not mean our number of files.
        settings.pop("maxFilesPerTrigger", None)
    _require(spark, path, payload_json)
    return (
        spark.readStream.schema(drop_schema(payload_json))
        .options(**_file_options(path))
        .options(**settings)
        .parquet(_hours(path))
    )


def _file_options(path: str) -> dict[str, str]:
    return {"basePath": path, "pathGlobFilter": NAMES_GLOB}


def _literal(path: str) -> str:
    """A path that Spark takes as it is written, not as a pattern."""
    return "".join("\\" + letter if letter in "{}[]*?\\" else letter for letter in path)


def _hours(path: str) -> str:
    return f"{_literal(path.rstrip('/'))}/{HOURS_GLOB}"


def _read_directory(spark: SparkSession, path: str, payload_json: bool) -> DataFrame:
    schema = drop_schema(payload_json)
    try:
        rows = spark.read.schema(schema).options(**_file_options(path)).parquet(_hours(path))
        rows.schema  # noqa: B018 (a session of Spark Connect has not looked before)
        return rows
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
    _require(spark, path, payload_json)
    return spark.createDataFrame([], schema)


def _require(spark: SparkSession, path: str, payload_json: bool) -> None:
    """Refuses a drop directory that does not exist. An empty one is fine."""
    try:
        spark.read.schema(drop_schema(payload_json)).parquet(_literal(path)).schema  # noqa: B018
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        raise SparkError(f"There is no drop directory {path}.") from None


def _with_compacted(rows: DataFrame, compacted: DataFrame) -> DataFrame:
    """Both, without the files of the drop that a compacted one covers.

    What is read from the second directory is also named: where a plan is looked at anew (Spark Connect does that for
    every action), a compacted file that has come since would be read beside its originals.
    """
    originals, merged = _entries(rows), _entries(compacted)
    chosen = {entry.name for entry in choose(originals, merged).drop}
    covered = [str(entry.name) for entry in originals if entry.name not in chosen]
    if covered:
        rows = rows.where(~F.col(_FILE_NAME).isin(covered))
    if not merged:
        return rows
    return rows.unionByName(compacted.where(F.col(_FILE_NAME).isin([str(entry.name) for entry in merged])))


def _entries(rows: DataFrame) -> list[Entry]:
    """The files that a DataFrame reads."""
    parsed = (parse_path(unquote(file)) for file in rows.inputFiles())
    return [Entry(*place, size=0, mtime=0.0) for place in parsed if place is not None]


def _between(since: datetime | None, until: datetime | None) -> Iterator[Column]:
    """Conditions on the directories, which need not be listed file by file, and on the rows."""
    hour = F.struct("date", "hour")
    if since is not None:
        since = _in_utc(since)
        yield F.col("date") >= F.lit(since.date())
        yield hour >= _hour_of(since)
        yield F.col("ts") >= F.lit(since)
    if until is not None:
        until = _in_utc(until)
        yield F.col("date") <= F.lit(until.date())
        yield hour <= _hour_of(until)
        yield F.col("ts") < F.lit(until)


def _hour_of(moment: datetime) -> Column:
    return F.struct(F.lit(moment.date()).alias("date"), F.lit(moment.hour).alias("hour"))


def _in_utc(moment: datetime) -> datetime:
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)


def _is_below(path: str, other: str) -> bool:
    """Whether a directory is another one, or inside it, as far as the texts tell."""
    inner, outer = _parts(path), _parts(other)
    return inner[: len(outer)] == outer


def _parts(path: str) -> list[str]:
    place = urlsplit(path if "://" in path else "")
    if place.scheme in ("", "file"):
        local = unquote(place.path) if place.scheme else os.path.abspath(path.removeprefix("file:"))
        return ["file", *_names(local)]
    return [place.scheme, place.netloc, *_names(place.path)]


def _names(path: str) -> list[str]:
    return [name for name in normpath(path).split("/") if name not in ("", ".")]
