"""Payloads as typed columns: what decodes, what is quarantined and why, and that no row is lost either way."""

import datetime as dt
import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgpack
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from headrace.spark import SparkError, decode_json, decode_msgpack, split_parts, stream_drop
from tests.spark.files import message, write_file

pytestmark = pytest.mark.needs("java")

SCHEMA = (
    "a int, big bigint, f double, s string, ok boolean, t timestamp, d date, p decimal(5,2), bin binary, "
    "inner struct<x:int,y:array<int>>, m map<string,int>"
)


def payloads(spark: SparkSession, some: Sequence[bytes | None]) -> DataFrame:
    rows = [(place, None if one is None else bytearray(one)) for place, one in enumerate(some)]
    return spark.createDataFrame(rows, "place int, payload binary")


def set_fields(value: T.Row | None) -> dict[str, Any] | None:
    """A decoded value without its nulls."""
    if value is None:
        return None
    return {name: one for name, one in value.asDict(recursive=True).items() if one is not None}


# payload, what it is decoded to, or why it is not
JSON_CASES: list[tuple[bytes | None, dict[str, Any] | None, str | None]] = [
    (b'{"a": 1, "s": "x", "unknown": [1]}', {"a": 1, "s": "x"}, None),
    (
        b' \n{"big": 9223372036854775807, "f": 1, "ok": true}\t',
        {"big": 2**63 - 1, "f": 1.0, "ok": True},
        None,
    ),
    (b"{}", {}, None),
    (b'{"a": null}', {}, None),
    ('{"s": "Zürich"}'.encode(), {"s": "Zürich"}, None),
    (
        b'{"inner": {"x": 1, "y": [1, 2]}, "m": {"k": 3}}',
        {"inner": {"x": 1, "y": [1, 2]}, "m": {"k": 3}},
        None,
    ),
    (b'{"t": "2026-01-31T07:00:00Z"}', {"t": dt.datetime(2026, 1, 31, 7)}, None),
    (b'{"d": "2026-01-31", "p": 1.25}', {"d": dt.date(2026, 1, 31), "p": Decimal("1.25")}, None),
    (b'{"bin": "aGk="}', {"bin": bytearray(b"hi")}, None),
    (None, None, "there is no payload"),
    (b'\xff{"a": 1}', None, "not UTF-8"),
    (b'{"s": "\xff"}', None, "not UTF-8"),
    (b'{"s": "\xed\xa0\x80"}', None, "not UTF-8"),
    (b"", None, "not JSON"),
    (b" \n", None, "not JSON"),
    (b"hello", None, "not JSON"),
    (b'{"a": 1', None, "not JSON"),
    (b'{"a": 1}}', None, "not JSON"),
    (b'{"a": 1} garbage', None, "not JSON"),
    (b'{"a": 1}{"a": 2}', None, "not JSON"),
    (b'{"a": 1}, {"a": 2}', None, "not JSON"),
    (b'{"a": 1}] garbage', None, "not JSON"),
    (b'{"a": 1}, "x"] garbage', None, "not JSON"),
    (b"{'a': 1}", None, "not JSON"),
    (b'{"f": NaN}', None, "not JSON"),
    (b'{"a": 01}', None, "not JSON"),
    (b"null", None, "does not fit the schema"),
    (b"5", None, "does not fit the schema"),
    (b'"text"', None, "does not fit the schema"),
    (b'[{"a": 1}]', None, "does not fit the schema"),
    (b'{"a": "1"}', None, "does not fit the schema"),
    (b'{"a": 1.5}', None, "does not fit the schema"),
    (b'{"a": 2147483648}', None, "does not fit the schema"),
    (b'{"a": true}', None, "does not fit the schema"),
    (b'{"a": {"b": 1}}', None, "does not fit the schema"),
    (b'{"f": "1.5"}', None, "does not fit the schema"),
    (b'{"ok": "true"}', None, "does not fit the schema"),
    (b'{"ok": 1}', None, "does not fit the schema"),
    (b'{"t": "yesterday"}', None, "does not fit the schema"),
    (b'{"d": "2026-13-01"}', None, "does not fit the schema"),
    (b'{"p": 1234.5}', None, "does not fit the schema"),
    (b'{"inner": {"x": "1"}}', None, "does not fit the schema"),
    (b'{"inner": {"y": [1, "2"]}}', None, "does not fit the schema"),
    (b'{"m": {"k": "v"}}', None, "does not fit the schema"),
]


def test_json_is_decoded_or_says_why_not(spark: SparkSession) -> None:
    rows = decode_json(payloads(spark, [case[0] for case in JSON_CASES]), SCHEMA)
    assert rows.columns == ["place", "payload", "value", "value_error"]
    found = rows.orderBy("place").collect()
    assert [(row.payload, set_fields(row.value), row.value_error) for row in found] == JSON_CASES


def test_json_that_knows_the_decoders_way_gains_nothing(spark: SparkSession) -> None:
    # The mark is another one in each call, so what worked for one does not for the next.
    plan = decode_json(payloads(spark, [b"{}"]), "a int")._jdf.queryExecution().analyzed().toString()
    mark = plan.split(',"')[1].split('"')[0]
    injected = b'{"a": 1},"%s"] garbage' % mark.encode()
    [row] = decode_json(payloads(spark, [injected]), "a int").collect()
    assert (row.value, row.value_error) == (None, "not JSON")


def test_split_gives_good_and_bad_rows_and_loses_none(spark: SparkSession) -> None:
    rows = payloads(spark, [b'{"a": 1}', b"bad", None, b'{"a": "x"}', b'{"a": 2}'])
    good, bad = decode_json(rows, "a int", into="body", quarantine="split")
    assert good.columns == ["place", "payload", "body"]
    assert [(row.place, row.body.a) for row in good.orderBy("place").collect()] == [(0, 1), (4, 2)]
    assert [(row.place, row.body_error) for row in bad.orderBy("place").collect()] == [
        (1, "not JSON"),
        (2, "there is no payload"),
        (3, "does not fit the schema"),
    ]


def test_field_names_may_be_anything(spark: SparkSession) -> None:
    schema = T.StructType(
        [T.StructField("a.b", T.IntegerType()), T.StructField("c d", T.StringType(), False)]
    )
    rows = payloads(spark, [b'{"a.b": 1, "c d": "x"}', b"{}"]).withColumnRenamed("place", "the.place")
    found = decode_json(rows, schema).collect()
    assert [row.value.asDict() for row in found] == [{"a.b": 1, "c d": "x"}, {"a.b": None, "c d": None}]
    assert found[0]["the.place"] == 0


T_EXTENSION = msgpack.Timestamp(1769842800, 250_000_000)


def pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


MSGPACK_SCHEMA = f"{SCHEMA}, small tinyint, f32 float, n timestamp_ntz"
MSGPACK_CASES: list[tuple[bytes | None, dict[str, Any] | None, str | None]] = [
    (pack({"a": 1, "s": "Zürich", "unknown": [1], 5: 6}), {"a": 1, "s": "Zürich"}, None),
    (pack({}), {}, None),
    (pack({"a": None}), {}, None),
    (
        pack({"big": -(2**63), "f": 1, "f32": 0.5, "ok": False}),
        {"big": -(2**63), "f": 1.0, "f32": 0.5, "ok": False},
        None,
    ),
    (pack({"t": T_EXTENSION}), {"t": dt.datetime(2026, 1, 31, 7, 0, 0, 250_000)}, None),
    (pack({"t": "2026-01-31T08:00:00+01:00"}), {"t": dt.datetime(2026, 1, 31, 7)}, None),
    (pack({"n": "2026-01-31T08:00:00"}), {"n": dt.datetime(2026, 1, 31, 8)}, None),
    (pack({"d": "2026-01-31", "p": "1.2"}), {"d": dt.date(2026, 1, 31), "p": Decimal("1.20")}, None),
    (pack({"p": "1.2e2"}), {"p": Decimal("120.00")}, None),
    (
        pack({"p": 7, "bin": b"\xff", "small": -128}),
        {"p": Decimal("7.00"), "bin": bytearray(b"\xff"), "small": -128},
        None,
    ),
    (
        pack({"inner": {"x": 1, "y": [1, None]}, "m": {"k": 3}}),
        {"inner": {"x": 1, "y": [1, None]}, "m": {"k": 3}},
        None,
    ),
    (None, None, "there is no payload"),
    (b"", None, "not MessagePack: it ends too early"),
    (pack({"a": 1})[:-1], None, "not MessagePack: it ends too early"),
    (pack({"a": 1}) + b"x", None, "not MessagePack: bytes are left behind its end"),
    (b"\xc1", None, "not MessagePack: a byte begins no value"),
    (b"\x81\xa1s\xa1\xff", None, "not MessagePack: a string is not UTF-8"),
    (b"\x81\x80\x01", None, "not MessagePack: a map has a key that is a map or an array"),
    (b"\x91" * 5000 + b"\x00", None, "not MessagePack: it is nested too deeply"),
    (b"\xdf\xff\xff\xff\xff", None, "not MessagePack: it ends too early"),
    (pack(None), None, "does not fit the schema: nil, not a map"),
    (pack([1]), None, "does not fit the schema: the value is an array, not a map"),
    (b"hello", None, "not MessagePack: bytes are left behind its end"),
    (pack({"a": "1"}), None, "does not fit the schema: a is a string, not int"),
    (pack({"a": True}), None, "does not fit the schema: a is a boolean, not int"),
    (pack({"a": 1.0}), None, "does not fit the schema: a is a float, not int"),
    (pack({"a": 2**31}), None, "does not fit the schema: a is out of range for int"),
    (pack({"big": 2**63}), None, "does not fit the schema: big is out of range for bigint"),
    (pack({"small": 128}), None, "does not fit the schema: small is out of range for tinyint"),
    (pack({"f": 2**53 + 1}), None, "does not fit the schema: f is an integer, not double"),
    (pack({"f32": 1e39}), None, "does not fit the schema: f32 is out of range for float"),
    (pack({"ok": 1}), None, "does not fit the schema: ok is an integer, not boolean"),
    (pack({"s": b"x"}), None, "does not fit the schema: s is bytes, not string"),
    (pack({"s": 5}), None, "does not fit the schema: s is an integer, not string"),
    (pack({"bin": "x"}), None, "does not fit the schema: bin is a string, not binary"),
    (pack({"s": msgpack.ExtType(7, b"x")}), None, "does not fit the schema: s is an extension, not string"),
    (pack({"t": 5}), None, "does not fit the schema: t is an integer, not timestamp"),
    (pack({"t": "2026-01-31T08:00:00"}), None, "does not fit the schema: t says no time zone"),
    (pack({"n": "2026-01-31T08:00:00Z"}), None, "does not fit the schema: n says a time zone"),
    (pack({"t": "yesterday"}), None, "does not fit the schema: t is no time in ISO 8601"),
    (pack({"d": "2026-13-01"}), None, "does not fit the schema: d is no date in ISO 8601"),
    (pack({"p": "1.234"}), None, "does not fit the schema: p does not fit decimal(5,2) without rounding"),
    (pack({"p": 1000}), None, "does not fit the schema: p does not fit decimal(5,2) without rounding"),
    (pack({"p": "1e999999"}), None, "does not fit the schema: p is no number for decimal(5,2)"),
    (pack({"p": "NaN"}), None, "does not fit the schema: p does not fit decimal(5,2) without rounding"),
    (pack({"p": "x"}), None, "does not fit the schema: p is no number for decimal(5,2)"),
    (pack({"inner": {"x": "1"}}), None, "does not fit the schema: inner.x is a string, not int"),
    (pack({"inner": {"y": [1, "2"]}}), None, "does not fit the schema: inner.y[] is a string, not int"),
    (pack({"m": {1: 1}}), None, "does not fit the schema: a key of m is an integer, not string"),
    (pack({"m": {"k": "v"}}), None, "does not fit the schema: m{} is a string, not int"),
    (pack({"m": [1]}), None, "does not fit the schema: m is an array, not map"),
]


def test_msgpack_is_decoded_or_says_why_not(spark: SparkSession) -> None:
    rows = decode_msgpack(payloads(spark, [case[0] for case in MSGPACK_CASES]), MSGPACK_SCHEMA)
    assert rows.columns == ["place", "payload", "value", "value_error"]
    found = rows.orderBy("place").collect()
    assert [(row.payload, set_fields(row.value), row.value_error) for row in found] == MSGPACK_CASES


def test_msgpack_splits_too(spark: SparkSession) -> None:
    good, bad = decode_msgpack(payloads(spark, [pack({"a": 1}), b"\xc1"]), "a int", quarantine="split")
    assert [row.value.a for row in good.collect()] == [1]
    assert [row.value_error for row in bad.collect()] == ["not MessagePack: a byte begins no value"]


def test_parts_are_cut_by_their_sizes(spark: SparkSession) -> None:
    cases: list[tuple[bytes | None, list[int | None] | None, list[bytes] | None, bool]] = [
        (b"abcdef", [1, 2, 3], [b"a", b"bc", b"def"], False),
        (b"abc", [0, 3, 0], [b"", b"abc", b""], False),
        (b"", [], [], False),
        (b"\xff\x00", [1, 1], [b"\xff", b"\x00"], False),
        (b"abc", None, None, False),
        (None, None, None, False),
        (b"abc", [1, 1], None, True),
        (b"abc", [4], None, True),
        (b"abc", [], None, True),
        (b"abc", [-1, 4], None, True),
        (b"abc", [2147483647, 2147483647], None, True),
        (b"abc", [3, None], None, True),
        (None, [1], None, True),
    ]
    rows = spark.createDataFrame(
        [(place, None if one[0] is None else bytearray(one[0]), one[1]) for place, one in enumerate(cases)],
        "place int, payload binary, part_sizes array<int>",
    )
    found = split_parts(rows).orderBy("place").collect()
    assert [(row.payload, row.part_sizes, row.parts, row.parts_error is not None) for row in found] == cases
    good, bad = split_parts(rows, quarantine="split")
    assert (good.count(), bad.count()) == (6, 7)
    assert {row.parts_error for row in bad.collect()} == {
        "the parts' sizes do not add up to the payload",
        "there is no payload",
    }


@pytest.mark.parametrize("kind", ["json", "msgpack"])
def test_streams_are_decoded_and_quarantined(
    spark: SparkSession, drop: Path, tmp_path: Path, kind: str
) -> None:
    encode = (lambda value: json.dumps(value).encode()) if kind == "json" else pack
    bodies = [encode({"n": 1}), b"\xc1", encode({"n": "x"}), encode({"n": 4})]
    parts = [[1, len(body) - 1] if len(body) > 1 else None for body in bodies]
    write_file(
        drop, [message(place, payload=body, part_sizes=parts[place]) for place, body in enumerate(bodies)]
    )
    decode = decode_json if kind == "json" else decode_msgpack
    rows = split_parts(decode(stream_drop(spark, str(drop)), "n int"))
    query = (
        rows.writeStream.format("parquet")
        .option("path", str(tmp_path / "out"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    found = spark.read.parquet(str(tmp_path / "out")).orderBy("offset").collect()
    assert [row.value and row.value.n for row in found] == [1, None, None, 4]
    assert [row.value_error is not None for row in found] == [False, True, True, False]
    assert [row.parts and b"".join(row.parts) for row in found] == [bodies[0], None, bodies[2], bodies[3]]


def test_a_watermark_outlives_decoding(spark: SparkSession, drop: Path) -> None:
    rows = stream_drop(spark, str(drop)).withWatermark("ts", "10 minutes")
    for decode in (decode_json, decode_msgpack):
        decoded = decode(rows, "n int").groupBy(F.window("ts", "1 minute")).count()
        # Without one, Spark refuses to append the result of an aggregation.
        query = decoded.writeStream.format("noop").outputMode("append").trigger(availableNow=True).start()
        query.awaitTermination()


@pytest.mark.parametrize(
    ("schema", "options", "text"),
    [
        ("a int", {"quarantine": "drop"}, 'quarantine is "column" or "split"'),
        ("a int", {"column": "body"}, "no column body"),
        ("a int", {"column": "place"}, "place is int, not binary"),
        ("a int", {"into": "Place"}, "a column Place already"),
        ("a nothing", {}, "is no schema"),
        (T.StructType([]), {}, "at least one field"),
        (T.ArrayType(T.IntegerType()), {}, "StructType"),
        (T.StructType([T.StructField("a", T.IntegerType())] * 2), {}, "names a field twice"),
    ],
)
def test_what_cannot_be_decoded_at_all_is_refused(
    spark: SparkSession, schema: Any, options: dict[str, Any], text: str
) -> None:
    for decode in (decode_json, decode_msgpack):
        with pytest.raises(SparkError, match=text):
            decode(payloads(spark, [b"{}"]), schema, **options)


def test_msgpack_refuses_types_that_it_has_no_rule_for(spark: SparkSession) -> None:
    with pytest.raises(SparkError, match="no rule for v, which is variant"):
        decode_msgpack(payloads(spark, [b"{}"]), "v variant")
