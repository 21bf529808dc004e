"""Payloads as typed columns. What cannot be decoded stays in the result, with the reason beside it, or goes to a second
DataFrame: no row is ever lost in silence. Everything here works on batches and on streams."""

import datetime as dt
import math
import secrets
from collections.abc import Callable, Iterable, Iterator
from decimal import Context, Decimal
from typing import Any, Final, Literal, overload

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from headrace.spark.errors import SparkError
from headrace.spark.schema import arrow_type, nullable

Split = tuple[DataFrame, DataFrame]

# Reasons, as they are in the column `<into>_error`.
NO_PAYLOAD: Final = "there is no payload"
NOT_UTF8: Final = "not UTF-8"
NOT_JSON: Final = "not JSON"
NOT_MSGPACK: Final = "not MessagePack"
UNFIT: Final = "does not fit the schema"
PARTS: Final = "the parts' sizes do not add up to the payload"

# What JSON (RFC 8259) does not allow.
_STRICT: Final = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}
_WHITESPACE: Final = r"\A[ \t\r\n]*\z"


@overload
def decode_json(
    df: DataFrame,
    schema: T.StructType | str,
    *,
    column: str = ...,
    into: str = ...,
    quarantine: Literal["column"] = ...,
) -> DataFrame: ...
@overload
def decode_json(
    df: DataFrame,
    schema: T.StructType | str,
    *,
    column: str = ...,
    into: str = ...,
    quarantine: Literal["split"],
) -> Split: ...
def decode_json(
    df: DataFrame,
    schema: T.StructType | str,
    *,
    column: str = "payload",
    into: str = "value",
    quarantine: Literal["column", "split"] = "column",
) -> DataFrame | Split:
    """Adds the column `into`: the payload as JSON, by a schema (a StructType or its DDL), and `<into>_error`: why it is
    null, or null. With quarantine="split", the rows that were decoded and those that were not, as two DataFrames.

    A field that is missing, or null, is null; one that the schema does not name is left out. A value of another type
    is an error, by the rules of Spark's from_json: a STRING takes any value as its JSON text, a DECIMAL is rounded to
    its scale, a TIMESTAMP takes a number as seconds, a DOUBLE takes what is too large as infinity.
    """
    wanted = _struct_type(df, schema)
    error = _check(df, column, into, quarantine)
    # Names that no payload has: else one could put words into the decoder's mouth.
    mark = secrets.token_hex(8)
    bad, parsed = f"_bad_{mark}", f"_parsed_{mark}"
    payload = F.col(column)
    text = payload.cast("string")
    # from_json is content with a JSON value at the beginning, whatever follows. Between brackets and before a second
    # element, the text has to be one value, and all of it.
    elements = F.from_json(F.concat(F.lit("["), text, F.lit(f',"{mark}"]')), "array<string>", _STRICT)
    is_one_value = F.coalesce((F.size(elements) == 2) & (F.element_at(elements, -1) == mark), F.lit(False))
    reason = (
        F.when(payload.isNull(), NO_PAYLOAD)
        .when(~F.is_valid_utf8(text), NOT_UTF8)
        .when(text.rlike(_WHITESPACE) | ~is_one_value, NOT_JSON)
        .when(F.col(parsed).isNull() | F.col(parsed)[bad].isNotNull(), UNFIT)
    )
    options = {**_STRICT, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": bad}
    asked = T.StructType([*wanted, T.StructField(bad, T.StringType())])
    value = F.struct(*(F.col(parsed)[one.name].alias(one.name) for one in wanted))
    rows = (
        df.withColumn(parsed, F.from_json(text, asked, options))
        .select("*", reason.alias(error))
        .select("*", F.when(F.col(error).isNull(), value).alias(into))
        .drop(parsed)
    )
    return _finish(rows, error, quarantine)


@overload
def decode_msgpack(
    df: DataFrame,
    schema: T.StructType | str,
    *,
    column: str = ...,
    into: str = ...,
    quarantine: Literal["column"] = ...,
) -> DataFrame: ...
@overload
def decode_msgpack(
    df: DataFrame,
    schema: T.StructType | str,
    *,
    column: str = ...,
    into: str = ...,
    quarantine: Literal["split"],
) -> Split: ...
def decode_msgpack(
    df: DataFrame,
    schema: T.StructType | str,
    *,
    column: str = "payload",
    into: str = "value",
    quarantine: Literal["column", "split"] = "column",
) -> DataFrame | Split:
    """The same for payloads that are one MessagePack map. Runs in Python, so the executors need the package.

    Types have to be right: an integer in its range for the integer types; a float, or an integer that it can hold
    exactly, for FLOAT and DOUBLE; an integer or a number as text, which must fit without rounding, for DECIMAL; a
    string in UTF-8 for STRING and bytes for BINARY; MessagePack's own timestamp, or text in ISO 8601, for TIMESTAMP
    (text has to say its zone), TIMESTAMP_NTZ (which must not) and DATE; maps for STRUCT and MAP.
    """
    wanted = _struct_type(df, schema)
    error = _check(df, column, into, quarantine)
    convert = _converter(wanted, "")
    type_ = arrow_type(wanted)
    made = T.StructType([*df.schema, T.StructField(error, T.StringType()), T.StructField(into, wanted)])

    def decode(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            values: list[Any] = []
            errors: list[str | None] = []
            for payload in batch.column(column):
                value, why = _unpack(payload.as_py(), convert)
                values.append(value)
                errors.append(why)
            columns = [*batch.columns, pa.array(errors, pa.string()), pa.array(values, type_)]
            yield pa.RecordBatch.from_arrays(columns, names=[*batch.schema.names, error, into])

    return _finish(df.mapInArrow(decode, made), error, quarantine)


@overload
def split_parts(
    df: DataFrame, *, column: str = ..., into: str = ..., quarantine: Literal["column"] = ...
) -> DataFrame: ...
@overload
def split_parts(
    df: DataFrame, *, column: str = ..., into: str = ..., quarantine: Literal["split"]
) -> Split: ...
def split_parts(
    df: DataFrame,
    *,
    column: str = "payload",
    into: str = "parts",
    quarantine: Literal["column", "split"] = "column",
) -> DataFrame | Split:
    """Adds the column `into`: the payload's parts as an array, and `<into>_error`. Where `part_sizes` is null, the
    message has no parts, and both are null."""
    error = _check(df, column, into, quarantine)
    payload, sizes = F.col(column), F.col("part_sizes")
    zero = F.lit(0).cast("bigint")

    def total(some: Column) -> Column:
        return F.aggregate(some, zero, lambda sum_, size: sum_ + size)

    def part(size: Column, number: Column) -> Column:
        begin = total(F.slice(sizes, F.lit(1), number)).cast("int")
        return F.substring(payload, begin + 1, size)

    # A size that is null makes the sum null, and is wrong too.
    right = ~F.exists(sizes, lambda size: size < 0) & (total(sizes) == F.octet_length(payload))
    reason = (
        F.when(sizes.isNull(), None)
        .when(payload.isNull(), NO_PAYLOAD)
        .when(~F.coalesce(right, F.lit(False)), PARTS)
    )
    parts = F.when(F.col(error).isNull() & sizes.isNotNull(), F.transform(sizes, part))
    rows = df.select("*", reason.cast("string").alias(error)).select("*", parts.alias(into))
    return _finish(rows, error, quarantine)


# --- what they share ----------------------------------------------------------------------------------------


def _struct_type(df: DataFrame, schema: T.StructType | str) -> T.StructType:
    if isinstance(schema, str):
        try:
            schema = df.sparkSession.createDataFrame([], schema).schema
        except PySparkException as error:
            raise SparkError(f"{schema!r} is no schema: {error}") from None
    if not isinstance(schema, T.StructType) or not schema.fields:
        raise SparkError("A schema is a StructType with at least one field, or its DDL.")
    if len(set(schema.names)) != len(schema.names):
        raise SparkError("The schema names a field twice.")
    asked = nullable(schema)
    assert isinstance(asked, T.StructType)
    return asked


def _check(df: DataFrame, column: str, into: str, quarantine: str) -> str:
    """The error column's name, if everything else can be used as well."""
    if quarantine not in ("column", "split"):
        raise SparkError(f'quarantine is "column" or "split", not {quarantine!r}.')
    if column not in df.columns:
        raise SparkError(f"There is no column {column} to decode; there are {', '.join(df.columns)}.")
    if not isinstance(df.schema[column].dataType, T.BinaryType):
        raise SparkError(f"The column {column} is {df.schema[column].dataType.simpleString()}, not binary.")
    error = f"{into}_error"
    present = {name.lower() for name in df.columns}
    for name in (into, error):
        if name.lower() in present:
            raise SparkError(f"There is a column {name} already; choose another name with into=.")
    return error


def _finish(rows: DataFrame, error: str, quarantine: str) -> DataFrame | Split:
    """Puts the error last; or takes the rows apart, where the good ones need no such column."""
    names = [name for name in rows.columns if name != error]
    rows = rows.select(*(rows[f"`{name}`"] for name in [*names, error]))
    if quarantine == "column":
        return rows
    bad = F.col(error).isNotNull()
    return rows.where(~bad).drop(error), rows.where(bad)


# --- MessagePack --------------------------------------------------------------------------------------------

Convert = Callable[[Any], Any]
"""A value as MessagePack has it, made into one of the wanted type; raises _Unfit."""

_FLOAT_MAX: Final = 3.4028234663852886e38  # of 32 bits
_EXACT: Final = Context(prec=200)


class _Unfit(Exception):
    """A value that has another type than the schema asks for."""


def _unpack(payload: bytes | None, convert: Convert) -> tuple[Any, str | None]:
    import msgpack

    if payload is None:
        return None, NO_PAYLOAD
    try:
        # A key may be anything that MessagePack has; the schema decides.
        value = msgpack.unpackb(payload, strict_map_key=False, timestamp=3)
    except UnicodeDecodeError:
        return None, f"{NOT_MSGPACK}: a string is not UTF-8"
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        return None, f"{NOT_MSGPACK}: {_why(error)}"
    try:
        if value is None:
            raise _Unfit("nil, not a map")
        return convert(value), None
    except _Unfit as error:
        return None, f"{UNFIT}: {error}"


def _why(error: Exception) -> str:
    import msgpack

    match error:
        case msgpack.ExtraData():
            return "bytes are left behind its end"
        case msgpack.StackError() | RecursionError():
            return "it is nested too deeply"
        case msgpack.FormatError():
            return "a byte begins no value"
        case TypeError():
            return "a map has a key that is a map or an array"
    # A length that exceeds the limits is one for which the payload has not bytes enough.
    short = any(word in str(error) for word in ("incomplete", "exceeds"))
    return "it ends too early" if short else "a value is out of range"


def _converter(type_: T.DataType, place: str) -> Convert:
    """What takes values to a type. `place` is the field's name in texts, with those around it."""

    def unfit(value: Any, wanted: str | None = None) -> _Unfit:
        wanted = wanted or type_.simpleString().split("<")[0]
        return _Unfit(f"{place or 'the value'} is {_kind(value)}, not {wanted}")

    def whole(low: int, high: int) -> Convert:
        def convert(value: Any) -> int:
            if type(value) is not int:
                raise unfit(value)
            if not low <= value <= high:
                raise _Unfit(f"{place} is out of range for {type_.simpleString()}")
            return value

        return convert

    def real(value: Any) -> float:
        if type(value) is int and abs(value) <= (1 << (24 if isinstance(type_, T.FloatType) else 53)):
            return float(value)
        if type(value) is not float:
            raise unfit(value)
        if isinstance(type_, T.FloatType) and math.isfinite(value) and abs(value) > _FLOAT_MAX:
            raise _Unfit(f"{place} is out of range for float")
        return value

    def decimal(value: Any) -> Decimal:
        assert isinstance(type_, T.DecimalType)
        if type(value) not in (int, str) or (type(value) is str and len(value) > 100):
            raise unfit(value)
        try:
            number = Decimal(value)
            scaled = number.scaleb(type_.scale, _EXACT)
        except ArithmeticError:
            raise _Unfit(f"{place} is no number for {type_.simpleString()}") from None
        if not number.is_finite() or abs(scaled) >= 10**type_.precision or scaled != int(scaled):
            raise _Unfit(f"{place} does not fit {type_.simpleString()} without rounding")
        return number.quantize(Decimal(1).scaleb(-type_.scale), context=_EXACT)

    def exactly(class_: type) -> Convert:
        def convert(value: Any) -> Any:
            if type(value) is not class_:
                raise unfit(value)
            return value

        return convert

    def time(value: Any) -> dt.datetime:
        with_zone = isinstance(type_, T.TimestampType)
        if isinstance(value, dt.datetime) and with_zone:
            return value
        if type(value) is not str:
            raise unfit(value)
        try:
            moment = dt.datetime.fromisoformat(value)
        except ValueError:
            raise _Unfit(f"{place} is no time in ISO 8601") from None
        if (moment.tzinfo is not None) != with_zone:
            raise _Unfit(f"{place} says {'no' if with_zone else 'a'} time zone")
        return moment

    def date(value: Any) -> dt.date:
        if type(value) is not str:
            raise unfit(value)
        try:
            return dt.date.fromisoformat(value)
        except ValueError:
            raise _Unfit(f"{place} is no date in ISO 8601") from None

    def optional(convert: Convert) -> Convert:
        return lambda value: None if value is None else convert(value)

    match type_:
        case T.BooleanType():
            return exactly(bool)
        case T.ByteType():
            return whole(-(1 << 7), (1 << 7) - 1)
        case T.ShortType():
            return whole(-(1 << 15), (1 << 15) - 1)
        case T.IntegerType():
            return whole(-(1 << 31), (1 << 31) - 1)
        case T.LongType():
            return whole(-(1 << 63), (1 << 63) - 1)
        case T.FloatType() | T.DoubleType():
            return real
        case T.DecimalType():
            return decimal
        case T.StringType():
            return exactly(str)
        case T.BinaryType():
            return exactly(bytes)
        case T.TimestampType() | T.TimestampNTZType():
            return time
        case T.DateType():
            return date
        case T.ArrayType():
            element = optional(_converter(type_.elementType, f"{place}[]"))

            def array(value: Any) -> list[Any]:
                if type(value) is not list:
                    raise unfit(value)
                return [element(one) for one in value]

            return array
        case T.MapType():
            key = _converter(type_.keyType, f"a key of {place}")
            item = optional(_converter(type_.valueType, f"{place}{{}}"))

            def pairs(value: Any) -> list[tuple[Any, Any]]:
                if type(value) is not dict:
                    raise unfit(value)
                return [(key(one), item(other)) for one, other in value.items()]

            return pairs
        case T.StructType():
            inner = f"{place}." if place else ""
            fields = [(one.name, optional(_converter(one.dataType, f"{inner}{one.name}"))) for one in type_]

            def struct(value: Any) -> dict[str, Any]:
                if type(value) is not dict:
                    raise unfit(value, "a map")
                return {name: convert(value.get(name)) for name, convert in fields}

            return struct
    raise SparkError(f"decode_msgpack has no rule for {place}, which is {type_.simpleString()}.")


def _kind(value: Any) -> str:
    """What MessagePack calls a value's type."""
    kinds = {type(None): "nil", bool: "a boolean", int: "an integer", float: "a float", str: "a string"}
    kinds |= {bytes: "bytes", list: "an array", dict: "a map", dt.datetime: "a timestamp"}
    return kinds.get(type(value), "an extension")
