"""The drop's columns as Spark types, made from the drop format's own list. Knows nothing of sessions or files.

Every column may be null for a reader, also those that a file never leaves empty: a drop can be configured to leave
columns out, and older files have fewer.
"""

from typing import Final

import pyarrow as pa
from pyspark.sql import types as T

from headrace.drop import COLUMNS, OPTIONAL_COLUMNS
from headrace.spark.errors import SparkError

# Read from the directories' names.
PARTITION_FIELDS: Final = (T.StructField("date", T.DateType()), T.StructField("hour", T.IntegerType()))

_SIMPLE: Final[dict[pa.DataType, T.DataType]] = {
    pa.string(): T.StringType(),
    pa.binary(): T.BinaryType(),
    pa.bool_(): T.BooleanType(),
    pa.int8(): T.ByteType(),
    pa.int16(): T.ShortType(),
    pa.int32(): T.IntegerType(),
    pa.int64(): T.LongType(),
    pa.float32(): T.FloatType(),
    pa.float64(): T.DoubleType(),
    pa.date32(): T.DateType(),
    pa.timestamp("us", tz="UTC"): T.TimestampType(),
    pa.timestamp("us"): T.TimestampNTZType(),
}
_SIMPLE_BACK: Final = {spark: arrow for arrow, spark in _SIMPLE.items()}


def spark_schema(payload_json: bool = False) -> T.StructType:
    """The columns of a drop's files; readers add `date` and `hour` behind them."""
    columns = [*COLUMNS, *(OPTIONAL_COLUMNS if payload_json else ())]
    return T.StructType([T.StructField(one.name, spark_type(one.type)) for one in columns])


def drop_schema(payload_json: bool = False) -> T.StructType:
    """What readers give: the columns of the files and those of the directories."""
    return T.StructType([*spark_schema(payload_json), *PARTITION_FIELDS])


def spark_type(arrow: pa.DataType) -> T.DataType:
    """An Arrow type as Spark's, with nulls allowed everywhere inside it."""
    if pa.types.is_list(arrow):
        return T.ArrayType(spark_type(arrow.value_type))
    if pa.types.is_map(arrow):
        return T.MapType(spark_type(arrow.key_type), spark_type(arrow.item_type))
    if pa.types.is_struct(arrow):
        return T.StructType([T.StructField(field.name, spark_type(field.type)) for field in arrow])
    if arrow not in _SIMPLE:
        raise SparkError(f"Spark has no type for Arrow's {arrow}.")
    return _SIMPLE[arrow]


def arrow_type(spark: T.DataType) -> pa.DataType:
    """A Spark type as the Arrow type that Spark takes it in, field names inside of lists and maps included."""
    match spark:
        case T.ArrayType():
            return pa.list_(pa.field("element", arrow_type(spark.elementType), spark.containsNull))
        case T.MapType():
            key = pa.field("key", arrow_type(spark.keyType), nullable=False)
            return pa.map_(key, pa.field("value", arrow_type(spark.valueType), spark.valueContainsNull))
        case T.StructType():
            return pa.struct(list(arrow_fields(spark)))
        case T.DecimalType():
            return pa.decimal128(spark.precision, spark.scale)
    if spark not in _SIMPLE_BACK:
        raise SparkError(f"The type {spark.simpleString()} is not supported here.")
    return _SIMPLE_BACK[spark]


def arrow_fields(schema: T.StructType) -> pa.Schema:
    """A Spark schema as an Arrow schema."""
    return pa.schema([pa.field(one.name, arrow_type(one.dataType), one.nullable) for one in schema])


def nullable(spark: T.DataType) -> T.DataType:
    """The type with nulls allowed everywhere inside it, as Spark's own readers make it."""
    match spark:
        case T.ArrayType():
            return T.ArrayType(nullable(spark.elementType))
        case T.MapType():
            return T.MapType(nullable(spark.keyType), nullable(spark.valueType))
        case T.StructType():
            return T.StructType([T.StructField(one.name, nullable(one.dataType)) for one in spark])
    return spark
