"""The drop directory for PySpark 4: readers, decoders and a data source. Needs the package and a Spark session, and no
gateway."""

from headrace.spark.decode import decode_json, decode_msgpack, split_parts
from headrace.spark.errors import SparkError
from headrace.spark.readers import read_drop, stream_drop
from headrace.spark.schema import drop_schema, spark_schema
from headrace.spark.session import local_session
from headrace.spark.source import HeadraceSource, register

__all__ = [
    "HeadraceSource",
    "SparkError",
    "decode_json",
    "decode_msgpack",
    "drop_schema",
    "local_session",
    "read_drop",
    "register",
    "spark_schema",
    "split_parts",
    "stream_drop",
]
