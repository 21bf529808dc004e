"""Appending: what is taken, what is refused, and what readers get back. Single writer, no crashes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import LogError, LogFull
from headrace.log import Log, verify
from tests.log.patience import append, append_many, eventually, fill_pool

OpenLog = Callable[..., Log]


def test_offsets_are_dense_from_zero_and_go_on_after_reopening(open_log: OpenLog) -> None:
    log = open_log()
    topic = log.topic("a")
    assert [log.append(topic, b"x") for _ in range(5)] == [0, 1, 2, 3, 4]
    log.close()
    log = open_log()
    assert (log.first, log.appended) == (0, 5)
    assert log.append(log.topic("a"), b"x") == 5


def test_every_field_comes_back(open_log: OpenLog) -> None:
    log = open_log()
    topic = log.topic("a.b")
    log.append(
        topic, b"payload", headers=b"headers", parts=(3, 4), protocol=5, kind=6, flags=2, correlation=7, now=2**60
    )  # fmt: skip
    record = next(log.reader())
    assert (record.offset, record.time, record.topic, record.topic_name) == (0, 2**60, topic, b"a.b")
    assert (record.protocol, record.kind, record.flags, record.correlation) == (5, 6, 2 | 1, 7)
    assert (record.headers, record.parts, record.payload) == (b"headers", (3, 4), b"payload")
    assert not record.control
    assert (record.segment, record.position) == (1, 4096 + 48 + 56)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096, 30000])
def test_payloads_of_every_size_come_back(open_log: OpenLog, size: int) -> None:
    log = open_log()
    payload = bytes(i % 251 for i in range(size))
    for _ in range(3):
        append(log, log.topic("a"), payload)
    assert [record.payload for record in log.reader()] == [payload] * 3


def test_many_parts_come_back(open_log: OpenLog) -> None:
    log = open_log()
    parts = tuple(range(5000))
    log.append(log.topic("a"), b"x", parts=parts)
    assert next(log.reader()).parts == parts


def test_flags_of_the_format_itself_cannot_be_forged(open_log: OpenLog) -> None:
    log = open_log()
    log.append(log.topic("a"), b"x", flags=0xFFFF)
    record = next(log.reader())
    assert (record.control, record.parts, record.payload) == (False, (), b"x")


def test_message_of_half_a_segment_is_the_largest(open_log: OpenLog) -> None:
    log = open_log()
    topic = log.topic("a")
    largest = log.max_record - 48
    assert log.max_record == 32768
    for _ in range(5):
        append(log, topic, bytes(largest))
    with pytest.raises(LogError, match="32721 bytes is larger than half a segment"):
        log.append(topic, bytes(largest + 1))
    with pytest.raises(LogError, match="larger than half a segment"):
        log.append(topic, b"", headers=bytes(2**20))
    with pytest.raises(LogError, match="larger than half a segment"):
        log.append(topic, b"", parts=(1,) * 2**14)
    with pytest.raises(LogError, match="larger than half a segment"):
        log.append_many(topic, bytes(largest + 1), largest + 1)
    assert [len(record.payload) for record in log.reader()] == [largest] * 5


def test_time_never_goes_back(open_log: OpenLog) -> None:
    log = open_log(sync="none")
    topic = log.topic("a")
    future = 2**60
    for now in (future, 5, future + 7, -3, future + 1):
        log.append(topic, b"", now=now)
    log.append(topic, b"")
    log.append_many(topic, b"ab", 1, now=9)
    expected = [future, future, *[future + 7] * 6]
    assert [record.time for record in log.reader()] == expected
    log.close()
    log = open_log(sync="none")
    log.append(log.topic("a"), b"", now=1)
    assert [record.time for record in log.reader()] == [*expected, future + 7]
    reader = log.reader()
    times = [record.time for record in iter(lambda: reader.read(controls=True), None)]
    assert len(times) > len(expected) + 1
    assert times == sorted(times)


def test_many_messages_go_in_one_call(open_log: OpenLog) -> None:
    log = open_log(sync="none")
    topic = log.topic("a")
    data = bytes(i % 256 for i in range(1600))
    assert log.append_many(topic, data, 16) == 100
    assert b"".join(record.payload for record in log.reader()) == data


def test_a_batch_stops_where_the_log_is_full_and_says_how_much_was_taken(open_log: OpenLog) -> None:
    log = open_log(sync="none", retention_bytes=4 * 65536)
    topic = log.topic("a")
    log.hold("test", 0)
    fill_pool(log)
    taken = log.append_many(topic, bytes(2**20), 1024)
    assert 0 < taken < 1024
    assert log.append_many(topic, bytes(1024), 1024) == 0
    assert log.appended == taken
    assert len(list(log.reader())) == taken


def test_a_batch_must_be_a_multiple_of_its_size(open_log: OpenLog) -> None:
    log = open_log()
    topic = log.topic("a")
    for data, size in ((b"abc", 2), (b"abc", 0), (b"abc", -1)):
        with pytest.raises(ValueError, match="multiple"):
            log.append_many(topic, data, size)
    assert log.append_many(topic, b"", 5) == 0


def test_unknown_topics_are_refused(open_log: OpenLog) -> None:
    log = open_log()
    log.topic("a")
    for topic in (0, 2, 2**32 - 1):
        with pytest.raises(KeyError):
            log.append(topic, b"")
        with pytest.raises(KeyError):
            log.append_many(topic, b"", 1)
        with pytest.raises(KeyError):
            log.topic_name(topic)
    assert log.appended == 0


def test_topics_keep_their_ids_and_names(open_log: OpenLog) -> None:
    log = open_log(sync="none", segment_bytes=1 << 20)
    names = {log.topic(f"site.{i}.é"): f"site.{i}.é".encode() for i in range(5000)}
    assert sorted(names) == list(range(1, 5001))
    assert {log.topic(name) for name in names.values()} == set(names)
    for topic in names:
        append(log, topic, b"")
    log.close()
    log = open_log(sync="none", segment_bytes=1 << 20)
    assert {topic: log.topic_name(topic) for topic in names} == names
    assert log.topic("new") == 5001


def test_a_payload_that_looks_like_records_is_only_a_payload(directory: Path, open_log: OpenLog) -> None:
    log = open_log(sync="none")
    topic = log.topic("a")
    log.append(topic, b"first")
    whole = (directory / "00000000000000000001.seg").read_bytes()[4096:8192]
    log.append(topic, whole)
    log.append(topic, b"last")
    log.close()
    log = open_log(sync="none")
    assert [record.payload for record in log.reader()] == [b"first", whole, b"last"]
    assert verify(directory).problems == []


def test_counters_count(open_log: OpenLog) -> None:
    log = open_log(sync="none", retention_bytes=5 * 65536)
    topic = log.topic("a")
    append_many(log, topic, bytes(500 * 1000), 1000)
    stats = log.stats()
    assert stats["records"] == stats["appended_offset"] == 500
    assert stats["bytes"] >= 500 * 1048
    assert stats["retired_segments"] > 0
    assert stats["prepared_recycled"] > 0
    assert stats["segments"] == len(log.segments())
    assert stats["first_offset"] == log.first == log.segments()[0].first_offset > 0
    assert stats["topics"] == 1


def test_a_full_log_keeps_room_for_control_records(open_log: OpenLog) -> None:
    log = open_log(sync="none", retention_bytes=0)
    topic = log.topic("a")
    log.hold("test", 0)
    fill_pool(log)
    while True:
        try:
            log.append(topic, bytes(100))
        except LogFull:
            break
    for i in range(50):
        log.save_cursor("sink", i)
    with pytest.raises(LogFull):
        log.append(topic, b"")
    with pytest.raises(LogFull):  # noqa: PT012 - sooner or later
        while True:
            log.save_cursor("sink", 99)
    # what is carried forward when retention goes on has a place of its own
    log.release("test")
    eventually(lambda: log.on_event() & 2, "a segment is recycled")
    append(log, topic, b"goes on")
    assert log.cursors == {"sink": 99}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"segment_bytes": 65535}, "multiple of 4096"),
        ({"segment_bytes": 32768}, "multiple of 4096 from 65536"),
        ({"segment_bytes": 2**31}, "to 1073741824"),
        ({"pool_segments": 0}, "from 1 to 128"),
        ({"pool_segments": 129}, "from 1 to 128"),
        ({"on_full": "wait"}, "expected block or drop_oldest"),
        ({"sync": "sometimes"}, "expected always, every:N, interval:MS or none"),
        ({"sync": "every:0"}, "expected always"),
        ({"sync": "interval:"}, "expected always"),
        ({"sync": "none:1"}, "expected always"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    directory: Path, options: dict[str, object], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        Log(directory, **options)  # type: ignore[arg-type]
    assert not directory.exists()


def test_a_closed_log_says_so(open_log: OpenLog) -> None:
    log = open_log()
    topic = log.topic("a")
    log.append(topic, b"x")
    log.close()
    for use in (
        lambda: log.append(topic, b"x"),
        lambda: log.append_many(topic, b"x", 1),
        lambda: log.save_cursor("sink", 0),
        lambda: log.sync_now(),
        lambda: log.request_sync(),
        lambda: log.tick(),
        lambda: log.hold("sink", 0),
        lambda: log.release("sink"),
        lambda: log.set_retention(0, 0),
    ):
        with pytest.raises(LogError, match="is closed"):
            use()
    log.on_event()
    assert (log.full, log.failed, log.segments(), log.appended) == (None, None, [], 1)
    assert log.stats()["records"] == 1
    assert [record.payload for record in log.reader()] == [b"x"]
    log.close()
