"""The drop directory as a format: what its files are called and what is in them. Its writer and its readers share
this and nothing else."""

from headrace.drop.layout import COMPACTED_SUFFIX, STAGING, FileName, hour_directory, parse_path
from headrace.drop.schema import COLUMNS, OPTIONAL_COLUMNS, SCHEMA_VERSION, arrow_schema

__all__ = [
    "COLUMNS",
    "COMPACTED_SUFFIX",
    "OPTIONAL_COLUMNS",
    "SCHEMA_VERSION",
    "STAGING",
    "FileName",
    "arrow_schema",
    "hour_directory",
    "parse_path",
]
