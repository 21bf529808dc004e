"""The bytes of a log: what the compiled log writes the plain-Python twin reads, and the other way round."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import LogError
from headrace.log import Log, LogReader, verify
from tests.log.conftest import SMALL
from tests.log.patience import append
from tests.oracle import log as twin

messages = st.lists(
    st.fixed_dictionaries(
        {
            "payload": st.binary(max_size=300),
            "headers": st.binary(max_size=40),
            "parts": st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple),
            "protocol": st.integers(0, 255),
            "kind": st.integers(0, 255),
            "flags": st.sampled_from([0, 2, 4, 6]),
            "correlation": st.integers(0, 2**64 - 1),
            "now": st.integers(0, 2**62),
        }
    ),
    max_size=20,
)


def records_of(directory: Path, number: int = 1) -> list[tuple[int, twin.Record]]:
    data = twin.segment_path(directory, number).read_bytes()
    return list(twin.walk(data, twin.log_id(directory), number))


@given(messages)
def test_what_is_appended_stands_in_the_file_as_described(
    tmp_path_factory: pytest.TempPathFactory, messages: list[dict[str, object]]
) -> None:
    directory = tmp_path_factory.mktemp("log")
    with Log(directory, sync="none", **SMALL) as log:
        topic = log.topic("a.b")
        for message in messages:
            log.append(topic, **message)  # type: ignore[arg-type]
    found = [record for _, record in records_of(directory)]
    assert found[0].control
    assert found[0].kind == twin.OPEN
    if messages:
        named = found[1]
        assert (named.control, named.kind, named.topic, named.payload) == (True, twin.TOPIC, topic, b"a.b")
    latest = found[0].time
    for offset, (message, record) in enumerate(zip(messages, found[2:], strict=True)):
        latest = max(latest, message["now"])  # type: ignore[call-overload]
        assert record == twin.Record(
            offset, topic=topic, time=latest, **{k: v for k, v in message.items() if k != "now"}  # type: ignore[arg-type]
        )  # fmt: skip


@given(messages)
def test_a_log_made_by_the_twin_is_read_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, messages: list[dict[str, object]]
) -> None:
    directory = tmp_path_factory.mktemp("log")
    segment = twin.Segment(bytes(range(16)), 1)
    segment.control(twin.TOPIC, b"a.b", topic=7)
    for message in messages:
        fields = {name: value for name, value in message.items() if name != "now"}
        segment._put(twin.Record(segment.next, topic=7, time=5, **fields))  # type: ignore[arg-type]
        segment.next += 1
    segment.mark()
    twin.write_log(directory, segment.log, [segment])
    assert verify(directory).problems == []
    with LogReader(directory) as reader:
        for message, record in zip(messages, reader, strict=True):
            assert (record.topic, record.topic_name, record.time) == (7, b"a.b", 5)
            for name in ("payload", "headers", "parts", "protocol", "kind", "correlation"):
                assert getattr(record, name) == message[name]


def test_segment_header_is_as_described(directory: Path, open_log: Callable[..., Log]) -> None:
    log = open_log(sync="none")
    log.append(log.topic("a"), b"x")
    log.close()
    data = twin.segment_path(directory, 1).read_bytes()
    (*_, (position, last)) = records_of(directory)
    end = position + len(last.encode(twin.seed(log.id, 1)))
    page = bytearray(twin.header(log.id, 1, 65536, end))
    page[twin.MARKS : twin.MARKS + 64] = data[twin.MARKS : twin.MARKS + 64]
    assert data[: twin.HEADER] == bytes(page)
    newest = twin.mark(twin.seed(log.id, 1), end, 1, 2)
    assert newest in (data[twin.MARKS : twin.MARKS + 32], data[twin.MARKS + 32 : twin.MARKS + 64])


def test_segments_begin_with_open_and_end_with_seal(directory: Path, open_log: Callable[..., Log]) -> None:
    log = open_log(sync="none")
    topic = log.topic("a")
    while len(log.segments()) < 4:
        append(log, topic, bytes(1000))
    first = 0
    for info in log.segments():
        records = [record for _, record in records_of(directory, info.number)]
        assert (records[0].control, records[0].kind, records[0].offset) == (True, twin.OPEN, first)
        assert [r.kind for r in records if r.control and r.kind == twin.SEAL] == [twin.SEAL] * info.sealed
        assert (info.first_offset, info.end_offset) == (first, records[-1].offset + (not info.sealed))
        first = info.end_offset


def test_topic_names_stand_before_their_first_use_in_each_segment(
    directory: Path, open_log: Callable[..., Log]
) -> None:
    log = open_log(sync="none")
    topics = {log.topic(f"site.{i}"): f"site.{i}".encode() for i in range(5)}
    while len(log.segments()) < 4:
        for topic in topics:
            append(log, topic, bytes(700))
    for info in log.segments():
        named: dict[int, bytes] = {}
        for _, record in records_of(directory, info.number):
            if record.control and record.kind == twin.TOPIC:
                assert record.topic not in named
                named[record.topic] = record.payload
            elif not record.control:
                assert named[record.topic] == topics[record.topic]
    middle = log.segments()[2].first_offset
    record = next(log.reader(middle))
    assert (record.offset, record.topic_name) == (middle, topics[record.topic])


def test_log_file_states_version_and_id(directory: Path, open_log: Callable[..., Log]) -> None:
    log = open_log()
    stated = json.loads((directory / "LOG").read_text())
    assert stated["version"] == 1
    assert stated["id"] == log.id_text == log.id.hex()
    assert len(log.id) == 16


def test_each_new_log_has_its_own_id(tmp_path: Path) -> None:
    ids = set()
    for i in range(3):
        with Log(tmp_path / str(i), **SMALL) as log:
            ids.add(log.id)
    assert len(ids) == 3


def test_readable_end_detects_every_single_flipped_bit() -> None:
    for position in (4096, 65536 - 48, 0x3FFFFFF8):
        word = twin.checked_end(position, 12)
        for bit in range(64):
            flipped = word ^ 1 << bit
            assert twin.checked_end(flipped & (1 << 40) - 1, 12) != flipped


def test_a_name_that_cannot_share_a_segment_with_a_message_is_refused(open_log: Callable[..., Log]) -> None:
    log = open_log()
    longest = 65536 // 4
    topic = log.topic("a" * longest)
    log.append(topic, bytes(log.max_record - twin.RECORD.size))
    with pytest.raises(LogError, match="quarter of a segment"):
        log.topic("a" * (longest + 1))
