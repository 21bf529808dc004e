"""What is in a record batch, judged by a twin that reads the same log in plain Python."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.columns import ColumnReader
from headrace.drop import arrow_schema
from headrace.drop.parquet import writer
from headrace.log import Log, LogReader
from tests.log.patience import append
from tests.oracle import columns as twin
from tests.oracle import log as log_twin

OpenLog = Callable[..., Log]

HOUR = twin.HOUR
LOTS = (1 << 20, 1 << 28)


def plain(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows as the twin has them."""
    batch.validate(full=True)
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name == "ts":
            column = column.cast(pa.int64())
        values = column.to_pylist()
        if name == "headers":
            assert all(value is None or len(dict(value)) == len(value) for value in values)
            values = [None if value is None else dict(value) for value in values]
        columns[name] = values
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def read_all(reader: ColumnReader, max_rows: int = LOTS[0], max_bytes: int = LOTS[1]) -> list[pa.RecordBatch]:
    return list(iter(lambda: reader.read(max_rows, max_bytes), None))


# --- against the twin -----------------------------------------------------------------------------------------------

TOPICS = [b"a", b"a.b", b"a.c", b"b.c.d", "größe.\U0001f600".encode(), b"not utf-8 \xff\xfe", b"a..b"]
FILTERS = ["#", "a", "a.*", "*.c.#", "b.#", "größe.#", "#.b", "nobody"]
SOURCES = [b"", b"key@10.0.0.1:5000", "schlüssel@[::1]:1".encode(), b"\xc3\x28"]

json_text = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
).flatmap(lambda value: st.sampled_from([json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)]))
json_bytes = json_text.map(lambda text: text.encode(errors="surrogatepass"))


@st.composite
def nearly_json(draw: st.DrawFn) -> bytes:
    """JSON with a few bytes changed."""
    data = bytearray(draw(json_bytes))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data)))
        piece = draw(
            st.sampled_from(
                [b'"', b"\\", b",", b"{", b"]", b"0", b"-", b"\x1f", b"\xff", b"e", b" ", b"\\u12"]
            )
        )
        data[at : at + draw(st.integers(0, 1))] = piece
    return bytes(data)


headers = st.just(b"") | nearly_json() | st.dictionaries(st.text(max_size=5), json_bytes, max_size=12).map(
    lambda fields: b"{" + b",".join(json.dumps(k).encode() + b": " + v for k, v in fields.items()) + b"}"
)  # fmt: skip

records = st.lists(
    st.builds(
        log_twin.Record,
        offset=st.just(0),
        payload=st.binary(max_size=40) | nearly_json(),
        kind=st.integers(0, 255),
        topic=st.integers(1, len(TOPICS)),
        time=st.sampled_from([0, 0, 0, 1, 1000, HOUR // 2, HOUR]),  # since the one before
        correlation=st.integers(0, 2**64 - 1),
        origin=st.integers(0, len(SOURCES)),
        protocol=st.integers(0, 7) | st.just(255),
        headers=headers,
        parts=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    ),
    max_size=30,
)


def write(directory: Path, records: Sequence[log_twin.Record], per_segment: int) -> None:
    """A log with so many messages in each segment, and the names in each where they are first needed."""
    log = bytes(range(16))
    segments: list[log_twin.Segment] = []
    time = 1_700_000_000_000_000
    for at in range(0, max(len(records), 1), per_segment):
        segment = log_twin.Segment(log, len(segments) + 1, first=at)
        topics: set[int] = set()
        origins: set[int] = set()
        for record in records[at : at + per_segment]:
            time += record.time
            if record.topic not in topics:
                topics.add(record.topic)
                segment.control(log_twin.TOPIC, TOPICS[record.topic - 1], topic=record.topic)
            if record.origin and record.origin not in origins:
                origins.add(record.origin)
                text = SOURCES[record.origin - 1]
                segment._put(
                    log_twin.Record(segment.next, text, log_twin.ORIGIN, control=True, origin=record.origin)
                )
            fields = {name: getattr(record, name) for name in record.__dataclass_fields__}
            segment._put(log_twin.Record(**fields | {"offset": segment.next, "time": time}))
            segment.next += 1
        if at + per_segment < len(records):
            segment.seal()
        segments.append(segment)
    log_twin.write_log(directory, log, segments)


@settings(max_examples=150)
@given(
    records=records,
    per_segment=st.integers(1, 12),
    begin=st.integers(0, 10),
    filters=st.lists(st.sampled_from(FILTERS), min_size=1, max_size=3),
    leave_out=st.sets(
        st.sampled_from(
            ["protocol", "topic", "kind", "source", "correlation", "headers", "part_sizes", "payload"]
        ),
        max_size=8,
    ),
    payload_json=st.booleans(),
    max_rows=st.integers(1, 12),
)
def test_batches_say_what_the_log_says(
    records: list[log_twin.Record],
    per_segment: int,
    begin: int,
    filters: list[str],
    leave_out: set[str],
    payload_json: bool,
    max_rows: int,
) -> None:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        write(directory, records, per_segment)
        with LogReader(directory, begin) as reader:
            expected = list(twin.rows(reader, "edge-1", filters))
        with ColumnReader(
            directory, begin, node="edge-1", filters=filters, leave_out=leave_out, payload_json=payload_json
        ) as columns:
            found = read_all(columns, max_rows)
            assert columns.offset == max(begin, len(records))
            assert columns.missing == []
        whole = twin.batches(expected, max_rows, [0] * len(expected), 1)
        assert [plain(batch) for batch in found] == [
            twin.without(batch, leave_out, payload_json) for batch in whole
        ]


def test_a_log_that_rolls_is_read_as_one(open_log: OpenLog, directory: Path) -> None:
    log = open_log()
    topics = [log.topic(f"t.{i}") for i in range(40)]
    for i in range(3000):
        append(log, topics[i * i % 40], b'{"i": %d}' % i + bytes(i % 300))
    assert len(log.segments()) > 5
    with log.reader() as reader:
        expected = list(twin.rows(reader, "n"))
    for max_rows, max_bytes in ((700, 1 << 28), (1 << 20, 20_000), (1 << 20, 1 << 28)):
        with ColumnReader(directory, node="n", payload_json=True) as columns:
            found = []
            for batch in read_all(columns, max_rows, max_bytes):
                assert batch.num_rows <= max_rows
                found += plain(batch)
        assert found == expected


# --- columns --------------------------------------------------------------------------------------------------------


def test_the_schema_is_that_of_the_drop(open_log: OpenLog, directory: Path) -> None:
    log = open_log()
    log.append(log.topic("a"), b"x", protocol=1)
    with ColumnReader(directory, node="n", payload_json=True, leave_out=["kind"]) as reader:
        batch = reader.read(*LOTS)
        assert batch is not None
        assert batch.schema.equals(reader.schema, check_metadata=True)
    expected = arrow_schema(["kind"], payload_json=True)
    assert batch.schema.metadata == expected.metadata
    assert batch.schema.names == expected.names
    names = pa.dictionary(pa.int32(), pa.string())
    for field in expected:
        has = batch.schema.field(field.name)
        assert has.nullable == field.nullable
        assert has.type == (
            names if field.name in ("node", "log", "protocol", "topic", "source") else field.type
        )


def test_a_drop_file_has_plain_strings(open_log: OpenLog, directory: Path, tmp_path: Path) -> None:
    log = open_log()
    topics = [log.topic(f"t.{i}") for i in range(7)]
    for i in range(500):
        append(log, topics[i % 7], b"%d" % i)
    with ColumnReader(directory, node="n") as reader:
        with writer(tmp_path / "file.parquet", reader.schema, {}) as out:
            for batch in read_all(reader, max_rows=100):
                out.write_table(pa.Table.from_batches([batch]))
        with log.reader() as records:
            expected = twin.without(list(twin.rows(records, "n")), (), False)
    table = pq.read_table(tmp_path / "file.parquet")
    assert table.schema.remove_metadata() == arrow_schema().remove_metadata()
    assert [row for batch in table.to_batches() for row in plain(batch)] == expected


def test_batches_of_one_hour_have_the_same_dictionary_once_all_names_are_known(
    open_log: OpenLog, directory: Path
) -> None:
    log = open_log()
    topics = [log.topic(f"t.{i}") for i in range(5)]
    now = 4_000_000_000_000_000 // HOUR * HOUR  # the log's time does not go back, so it is later than now
    for i in range(2000):
        append_at(log, topics[i % 5], bytes(200), now)
    append_at(log, topics[3], b"x", now + HOUR)
    with ColumnReader(directory, node="n") as reader:
        *first, last = read_all(reader, max_rows=100)
    dictionaries = [batch.column("topic").dictionary.to_pylist() for batch in first]
    assert dictionaries == [[f"t.{i}" for i in range(5)]] * 20
    assert last.column("topic").dictionary.to_pylist() == ["t.3"]


def test_dictionaries_begin_anew_when_they_have_grown_large(open_log: OpenLog, directory: Path) -> None:
    log = open_log(segment_bytes=1 << 22)
    for i in range(70):
        append(log, log.topic(f"{i:05d}" + "x" * 20_000), b"")
    with ColumnReader(directory, node="n") as reader:
        sizes = [len(batch.column("topic").dictionary) for batch in read_all(reader, max_rows=10)]
    assert sizes == [10, 20, 30, 40, 50, 60, 10]


@pytest.mark.parametrize("name", ["node", "log", "offset", "ts"])
def test_what_names_a_row_cannot_be_left_out(open_log: OpenLog, directory: Path, name: str) -> None:
    open_log()
    with pytest.raises(ValueError, match=f"the column {name} cannot be left out: it is part of a row's name"):
        ColumnReader(directory, node="n", leave_out=[name])


def test_what_is_asked_for_must_make_sense(open_log: OpenLog, directory: Path) -> None:
    open_log()
    with pytest.raises(ValueError, match="there is no column colour to leave out"):
        ColumnReader(directory, node="n", leave_out=["colour"])
    with pytest.raises(ValueError, match="at least one filter"):
        ColumnReader(directory, node="n", filters=[])
    with pytest.raises(ValueError, match="at least one filter"):
        ColumnReader(directory, node="n", filters="a.b")
    with pytest.raises(ValueError, match="empty"):
        ColumnReader(directory, node="n", filters=[""])
    with ColumnReader(directory, node="n") as reader:
        for limits in ((0, 1), (1, 0)):
            with pytest.raises(ValueError, match="at least one row and one byte"):
                reader.read(*limits)
    with pytest.raises(ValueError, match="closed"):
        reader.read(1, 1)


# --- JSON -----------------------------------------------------------------------------------------------------------

VALID = [
    b"0", b"-0", b"-0.5e+10", b"1E5", b"10", b'""', b" [ ] ", b"{}", b'\t{"a":[1,{"b":null}]}\r\n', b"true",
    b"false", b"null", b'"\\u00e9\\n\\"\\\\\\/\\b\\f\\r\\t"', '"ü€\U0001f600"'.encode(), b'"\\ud800"',
    b'{"a":1,"a":2}', b'"\x7f"', b'"12345678"', b'"1234567"', b'"123456789abcdefg"', b'"12345678\\n12345678"',
    b"1" * 5000,
]  # fmt: skip
INVALID = [
    b"", b" ", b"01", b"-", b"+1", b"1.", b".5", b"1e", b"1e+", b"0x1", b"NaN", b"Infinity", b"-Infinity",
    b"tru", b"nul", b"True", b'"', b'"\\"', b'"\\x41"', b'"\\u12g4"', b'"\\u123', b"'a'", b"[1,]", b"[,]",
    b"[1 2]", b"{", b"[", b"]", b"}", b'{"a"}', b'{"a":}', b'{"a":1,}', b"{1:2}", b'{"a":1]', b"[1}", b"1 2",
    b"\xef\xbb\xbf1", b'"\x00"', b'"\n"', b'"\x1f"', b'"\xff"', b'"\xc0\x80"', b'"\xed\xa0\x80"',
    b'"\xf4\x90\x80\x80"', b'"\xe2\x82"', b'"12345\xe2\x82', b'"\x80"', b"\xff", b'"1234567\x01"', b'"12345678',
    b"1\x00", b"\x00", "\u00a01".encode(), b'{"a":1}{', b"/**/1", b'["a]',
]  # fmt: skip


def payload_json(directory: Path, payloads: list[bytes]) -> list[str | None]:
    with Log(directory, sync="none", segment_bytes=1 << 22, pool_segments=1) as log:
        topic = log.topic("a")
        for payload in payloads:
            log.append(topic, payload)
        with ColumnReader(directory, node="n", payload_json=True) as reader:
            batch = reader.read(*LOTS)
            assert batch is not None
            batch.validate(full=True)
            assert batch.column("payload").to_pylist() == payloads
            texts: list[str | None] = batch.column("payload_json").to_pylist()
            return texts


def test_payload_json_is_the_payload_where_it_is_json(directory: Path) -> None:
    assert payload_json(directory, VALID + INVALID) == [one.decode() for one in VALID] + [None] * len(INVALID)
    assert all(twin.is_json(one) for one in VALID)
    assert not any(twin.is_json(one) for one in INVALID)


@pytest.mark.parametrize(("open_", "close"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"b": ', b"}]")])
def test_json_may_be_nested_so_deep_and_no_deeper(directory: Path, open_: bytes, close: bytes) -> None:
    levels = open_.count(b"[") + open_.count(b"{")
    deep = [open_ * (n // levels) + b"1" + close * (n // levels) for n in (512, 512 + levels, 100_000)]
    assert payload_json(directory, deep) == [deep[0].decode(), None, None]


@settings(max_examples=60)
@given(payloads=st.lists(nearly_json() | st.binary(max_size=12), min_size=1, max_size=60))
def test_json_is_as_strict_as_the_twin(payloads: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as place:
        expected = [payload.decode() if twin.is_json(payload) else None for payload in payloads]
        assert payload_json(Path(place) / "log", payloads) == expected


@settings(max_examples=60)
@given(raws=st.lists(headers, min_size=1, max_size=40))
@example(raws=[b'{"a": "\\ud83d\\ude00\\ud83d", "\\udc00": "\\ud800\\u0041", "n": null, "": ""}'])
@example(
    raws=[b'{"a":1,"b":2,"\\u0061":3}', b"{" + b",".join(b'"%d":"%d"' % (i % 7, i) for i in range(50)) + b"}"]
)
@example(
    raws=[
        b" {\n} ",
        b"{} x",
        b"[]",
        b'"{}"',
        b"\xff{}",
        b"x",
        b"xy",
        b"xyz",
        b'{"\xff":1}',
        b'{"a": [1, {"}": "]"}]}',
    ]
)
def test_headers_become_a_map(raws: list[bytes]) -> None:
    with (
        tempfile.TemporaryDirectory() as place,
        Log(place + "/log", sync="none", segment_bytes=1 << 20) as log,
    ):
        topic = log.topic("a")
        for raw in raws:
            log.append(topic, b"", headers=raw)
        with ColumnReader(place + "/log", node="n") as reader:
            batch = reader.read(*LOTS)
            assert batch is not None
            assert [row["headers"] for row in plain(batch)] == [twin.headers_of(raw) for raw in raws]
            assert reader.row_bytes == sum(map(len, raws))


def test_many_headers_with_few_names_take_no_quadratic_time(open_log: OpenLog, directory: Path) -> None:
    """Were it so, this would not end."""
    log = open_log(segment_bytes=1 << 24)
    raw = b"{" + b",".join(b'"%d":%d' % (i // 2, i) for i in range(400_000)) + b"}"
    log.append(log.topic("a"), b"", headers=raw)
    with ColumnReader(directory, node="n") as reader:
        batch = reader.read(*LOTS)
    assert batch is not None
    assert plain(batch)[0]["headers"] == {str(i): str(2 * i + 1) for i in range(200_000)}


def append_at(log: Log, topic: int, payload: bytes, now: int) -> None:
    while log.full or not log.stats()["pool_segments"]:
        log.on_event()
    log.append(topic, payload, now=now)
