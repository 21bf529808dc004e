"""Recovery: torn tails are cut and kept, damage that a sync mark covers is found, named and kept, and what
was cut never
comes back. Logs are made by the plain-Python twin or by the log itself, and then hurt."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import LogDamaged
from headrace.log import Log, LogReader, verify
from tests.log.conftest import SMALL
from tests.log.patience import append, append_many, fill_pool
from tests.oracle import log as twin

OpenLog = Callable[..., Log]

LOG_ID = bytes(range(16))


def three_small_segments() -> list[twin.Segment]:
    """A few records of each kind in each of three segments; a mark in the last one covers all."""
    segments: list[twin.Segment] = []
    for number in (1, 2, 3):
        segment = twin.Segment(LOG_ID, number, first=segments[-1].next if segments else 0)
        segment.control(twin.TOPIC, b"a.b", topic=1)
        for i in range(3):
            segment.message(bytes([number]) * (5 + 9 * i))
        segment.control(twin.CURSOR, b"sink", correlation=number)
        segment.message(b"")
        if number < 3:
            segment.seal()
        segments.append(segment)
    segments[-1].mark()
    return segments


def messages_of(segments: list[twin.Segment]) -> dict[int, bytes]:
    return {
        record.offset: record.payload
        for segment in segments
        for _, _, record in segment.places
        if not record.control
    }


def read_all(directory: Path) -> dict[int, bytes]:
    with LogReader(directory) as reader:
        return {record.offset: record.payload for record in reader}


def patch(directory: Path, number: int, position: int, data: bytes) -> None:
    with twin.segment_path(directory, number).open("r+b") as file:
        file.seek(position)
        file.write(data)


def flip(directory: Path, number: int, position: int, bit: int) -> None:
    with twin.segment_path(directory, number).open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def aside(directory: Path) -> list[str]:
    return sorted(os.listdir(directory / "aside")) if (directory / "aside").exists() else []


def fresh_copy(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target


# --- torn tails ---------------------------------------------------------------------------------------------


@pytest.fixture
def torn(directory: Path) -> twin.Segment:
    """Ten messages of one size; a mark covers the first four, and no sync the rest."""
    segment = twin.Segment(LOG_ID, 1)
    segment.control(twin.TOPIC, b"a", topic=1)
    for i in range(4):
        segment.message(bytes([i]) * 16)
    segment.mark()
    for i in range(4, 10):
        segment.message(bytes([i]) * 16)
    twin.write_log(directory, LOG_ID, [segment])
    return segment


def place(segment: twin.Segment, offset: int) -> tuple[int, int]:
    return next((a, b) for a, b, record in segment.places if record.offset == offset and not record.control)


def test_torn_tail_is_cut_at_the_last_whole_record(
    directory: Path, torn: twin.Segment, open_log: OpenLog
) -> None:
    begin, _ = place(torn, 6)
    patch(directory, 1, begin + 50, b"\xff\xff")
    tail = torn.encode()[begin : torn.end]
    log = open_log()
    report = log.recovery
    assert (report.cut_segment, report.cut_position) == (1, begin)
    assert (report.cut_bytes, report.cut_records) == (torn.end - begin, 3)
    assert report.damage == ()
    assert log.appended == 6
    assert aside(directory) == [f"{1:020d}-{begin}.tail"]
    kept = (directory / "aside" / aside(directory)[0]).read_bytes()
    assert kept[:50] + tail[50:52] + kept[52:] == tail
    assert log.append(log.topic("a"), b"goes on") == 6
    assert read_all(directory) == {i: bytes([i]) * 16 for i in range(6)} | {6: b"goes on"}
    assert verify(directory).problems == []


def test_what_was_cut_never_comes_back(directory: Path, torn: twin.Segment, open_log: OpenLog) -> None:
    """The records behind the torn one are whole and valid. Once a new record of the same size stands where the torn one
    was, they would follow on."""
    begin, _ = place(torn, 6)
    patch(directory, 1, begin, bytes(4))
    log = open_log(sync="none")
    assert log.append(log.topic("a"), b"n" * 16) == 6
    log.close(sync=False)
    log = open_log(sync="none")
    assert log.appended == 7
    assert read_all(directory) == {i: bytes([i]) * 16 for i in range(6)} | {6: b"n" * 16}


def test_leftovers_of_a_segment_whose_first_record_is_torn_never_come_back(
    directory: Path, open_log: OpenLog
) -> None:
    """A power cut may lose the first page of the newest segment and keep the others: nothing shows that it
    was in use but
    records of its own generation in its middle."""
    first, second = twin.Segment(LOG_ID, 1), twin.Segment(LOG_ID, 2)
    first.control(twin.TOPIC, b"a", topic=1)
    first.message(b"one")
    first.seal()
    second.first = second.next = 1
    second.control(twin.TOPIC, b"a", topic=1)
    for i in range(1, 4):
        second.message(bytes([i]) * 16)
    twin.write_log(directory, LOG_ID, [first, second])
    page = bytearray(twin.header(LOG_ID, 2, second.size, twin.HEADER))
    patch(directory, 2, 0, bytes(page))
    patch(directory, 2, twin.HEADER, bytes(48))
    log = open_log(sync="none")
    assert (log.recovery.cut_segment, log.recovery.cut_position, log.recovery.cut_records) == (2, 4096, 3)
    assert aside(directory) == [f"{2:020d}.seg"]
    topic = log.topic("a")
    assert log.append(topic, b"n" * 16) == 1
    log.close(sync=False)
    assert open_log(sync="none").appended == 2
    assert read_all(directory) == {0: b"one", 1: b"n" * 16}


def test_a_tail_that_was_published_but_never_reached_the_disk_is_reported(
    directory: Path, torn: twin.Segment, open_log: OpenLog
) -> None:
    begin, _ = place(torn, 6)
    patch(directory, 1, begin, bytes(torn.end - begin))
    log = open_log()
    assert (log.recovery.cut_position, log.recovery.cut_bytes) == (begin, torn.end - begin)
    assert log.appended == 6


def test_segments_behind_a_torn_tail_are_set_aside(directory: Path, open_log: OpenLog) -> None:
    segments = three_small_segments()
    for segment in segments:
        segment.marked = 0
    segments[0].mark()
    twin.write_log(directory, LOG_ID, segments)
    begin, _ = place(segments[1], 5)
    patch(directory, 2, begin + 8, b"\xff")
    log = open_log()
    assert (log.recovery.cut_segment, log.recovery.cut_position) == (2, begin)
    assert log.recovery.cut_records == 2 + 4
    assert log.recovery.damage == ()
    assert log.appended == 5
    assert aside(directory) == [f"{2:020d}-{begin}.tail", f"{3:020d}.seg"]
    assert log.append(log.topic("a.b"), b"goes on") == 5
    expected = {offset: payload for offset, payload in messages_of(segments).items() if offset < 5}
    assert read_all(directory) == expected | {5: b"goes on"}
    assert verify(directory).problems == []


def test_a_record_torn_at_any_byte_is_cut(memory: Path, torn: twin.Segment, directory: Path) -> None:
    begin, end = place(torn, 9)
    whole = torn.encode()
    for cut in range(begin, end):
        work = fresh_copy(directory, memory / "work")
        patch(work, 1, cut, bytes(b ^ 0xFF for b in whole[cut:end]))
        with Log(work, sync="none", **SMALL) as log:
            assert log.appended == 9
            assert log.recovery.cut_position == begin
            assert log.recovery.damage == ()


def test_whole_records_that_were_not_published_are_kept(directory: Path, open_log: OpenLog) -> None:
    """A killed process leaves what it appended, also where it did not come to publish it."""
    segment = twin.Segment(LOG_ID, 1)
    segment.control(twin.TOPIC, b"a", topic=1)
    segment.message(b"one")
    published = segment.end
    segment.message(b"two")
    twin.write_log(directory, LOG_ID, [segment])
    patch(directory, 1, twin.END, twin.checked_end(published, 1).to_bytes(8, "little"))
    assert list(read_all(directory)) == [0]
    log = open_log()
    assert log.recovery.cut_bytes == 0
    assert read_all(directory) == {0: b"one", 1: b"two"}


def test_a_sealed_segment_with_an_old_readable_end_is_read_to_its_seal(
    directory: Path, open_log: OpenLog
) -> None:
    segments = three_small_segments()
    twin.write_log(directory, LOG_ID, segments)
    patch(directory, 1, twin.END, twin.checked_end(segments[0].places[3][0], 1).to_bytes(8, "little"))
    log = open_log()
    assert log.recovery.damage == ()
    assert read_all(directory) == messages_of(segments)


def test_lengths_are_bounded_before_they_are_believed(
    directory: Path, torn: twin.Segment, open_log: OpenLog
) -> None:
    begin, _ = place(torn, 9)
    for length in (0, 1, 47, 65536, 2**31, 2**32 - 1):
        patch(directory, 1, begin + 4, length.to_bytes(4, "little"))
        with (
            LogReader(directory) as reader,
            pytest.raises(LogDamaged, match=f"position {begin} does not hold"),
        ):
            list(reader)
        assert [(p.segment, p.position) for p in verify(directory).problems] == [(1, begin)]
    assert open_log().appended == 9


# --- damage -------------------------------------------------------------------------------------------------


def expected_damage(segment: twin.Segment, position: int) -> tuple[int, int]:
    """Where damage to a byte must be named, and how many offsets it takes."""
    for begin, end, record in segment.places:
        if begin <= position < end:
            return begin, int(not record.control)
    raise AssertionError(position)


def header_place(position: int) -> int | None:
    """Where damage to a byte of the header page must be named; nothing where the byte itself is the place."""
    if position < 64:
        return 0
    if twin.END <= position < twin.END + 8:
        return twin.END
    if twin.MARKS <= position < twin.MARKS + 64:
        return twin.MARKS + (position - twin.MARKS) // 32 * 32
    return None


def where_named(segment: twin.Segment, position: int) -> tuple[int, int]:
    """Where damage to any byte must be named, and how many offsets it takes."""
    if position >= twin.HEADER:
        return expected_damage(segment, position)
    named = header_place(position)
    return position if named is None else named, 0


def test_verify_names_every_flipped_byte(memory: Path) -> None:
    """One bit in each byte of every header page and every record, in all three segments at once."""
    segments = three_small_segments()
    twin.write_log(memory, LOG_ID, segments)
    assert verify(memory).problems == []
    chance = random.Random(4)
    for position in range(max(segment.end for segment in segments)):
        hurt = [segment for segment in segments if position < segment.end]
        bit = chance.randrange(8)
        for segment in hurt:
            flip(memory, segment.number, position, bit)
        found = [(p.segment, p.position, p.lost) for p in verify(memory).problems]
        assert found == [(segment.number, *where_named(segment, position)) for segment in hurt], position
        for segment in hurt:
            flip(memory, segment.number, position, bit)


def test_opening_names_every_flipped_byte_keeps_the_original_and_every_other_record(memory: Path) -> None:
    """The same for opening; of the bytes of a header page that mean nothing, some."""
    segments = three_small_segments()
    source, work = memory / "source", memory / "log"
    twin.write_log(source, LOG_ID, segments)
    messages = messages_of(segments)
    chance = random.Random(5)
    for position in range(max(segment.end for segment in segments)):
        if 264 <= position < twin.HEADER and position % 509:
            continue
        fresh_copy(source, work)
        # one segment alone, or all at once
        hurt = [segment for segment in segments if position < segment.end]
        hurt = hurt if chance.random() < 0.5 else [chance.choice(hurt)]
        for segment in hurt:
            flip(work, segment.number, position, chance.randrange(8))
        originals = [twin.segment_path(work, segment.number).read_bytes() for segment in hurt]
        with Log(work, sync="none", **SMALL) as log:
            report, appended = log.recovery, log.appended
        assert appended == len(messages)
        assert report.cut_bytes == 0
        found = [(d.segment, d.position, d.lost) for d in report.damage]
        assert found == [(segment.number, *where_named(segment, position)) for segment in hurt], position
        assert [(work / "aside" / name).read_bytes() for name in aside(work)] == originals
        lost = {d.offset for d in report.damage if d.lost}
        with LogReader(work) as reader:
            assert {r.offset: r.payload for r in reader} == {
                o: p for o, p in messages.items() if o not in lost
            }
            assert reader.lost == len(lost)
        reasons = [p.reason for p in verify(work).problems]
        gaps = len(hurt) if position >= twin.HEADER else 0
        assert reasons == ["damage that was found and set aside earlier"] * gaps


def test_random_damage_never_takes_what_it_does_not_touch(memory: Path, soak: int) -> None:
    """Stretches of garbage anywhere in front of the mark, several at once, in a log that the log itself wrote."""
    source, work = memory / "source", memory / "log"
    chance = random.Random(6)
    with Log(source, sync="none", **SMALL) as log:
        topics = [log.topic(f"t.{i}") for i in range(3)]
        payloads = [chance.randbytes(chance.randrange(2000)) for _ in range(250)]
        for payload in payloads:
            append(log, chance.choice(topics), payload)
        infos = log.segments()
    assert len(infos) >= 4
    places = {
        info.number: list(twin.walk(twin.segment_path(source, info.number).read_bytes(), log.id, info.number))
        for info in infos
    }
    for _ in range(40 * soak):
        fresh_copy(source, work)
        damaged: set[int] = set()
        touched: set[tuple[int, int]] = set()
        for _ in range(chance.randrange(1, 5)):
            info = chance.choice(infos)
            begin = chance.randrange(twin.HEADER, info.bytes)
            end = min(info.bytes, begin + chance.choice((1, 3, 8, 100, 5000)))
            patch(work, info.number, begin, bytes(255 - b for b in _read(work, info.number, begin, end)))
            for at, record in places[info.number]:
                if at < end and begin < at + len(record.encode(0)):
                    touched.add((info.number, at))
                    if not record.control:
                        damaged.add(record.offset)
        reported = verify(work).problems
        with Log(work, sync="none", **SMALL) as log:
            report = log.recovery
            assert log.appended == len(payloads)
        assert {(d.segment, d.position) for d in report.damage} <= touched
        assert {(p.segment, p.position) for p in reported} == {(d.segment, d.position) for d in report.damage}
        assert sum(d.lost for d in report.damage) == len(damaged)
        assert report.cut_bytes == 0
        survivors = {offset: payload for offset, payload in enumerate(payloads) if offset not in damaged}
        assert read_all(work) == survivors


def _read(directory: Path, number: int, begin: int, end: int) -> bytes:
    return twin.segment_path(directory, number).read_bytes()[begin:end]


def test_damage_at_the_very_end_of_what_is_marked_counts_its_offsets(
    directory: Path, open_log: OpenLog
) -> None:
    segments = three_small_segments()
    twin.write_log(directory, LOG_ID, segments)
    begin, _ = place(segments[2], 10)
    patch(directory, 3, begin, b"\xff" * (segments[2].end - begin))
    log = open_log()
    assert [(d.segment, d.position, d.offset, d.lost) for d in log.recovery.damage] == [(3, begin, 10, 2)]
    assert log.appended == 12
    assert log.append(log.topic("a.b"), b"x") == 12


def test_a_whole_segment_of_garbage_is_one_gap(directory: Path, open_log: OpenLog) -> None:
    segments = three_small_segments()
    twin.write_log(directory, LOG_ID, segments)
    patch(directory, 2, 0, random.Random(7).randbytes(65536))
    log = open_log()
    assert sum(d.lost for d in log.recovery.damage) == 4
    assert {d.segment for d in log.recovery.damage} == {2}
    expected = {offset: p for offset, p in messages_of(segments).items() if not 4 <= offset < 8}
    assert read_all(directory) == expected
    assert log.appended == 12


def test_a_missing_segment_is_damage(directory: Path, open_log: OpenLog) -> None:
    segments = three_small_segments()
    twin.write_log(directory, LOG_ID, segments)
    twin.segment_path(directory, 2).unlink()
    (missing, offsets) = verify(directory).problems
    assert (missing.segment, missing.reason) == (2, "the segment is missing")
    assert (offsets.segment, offsets.offset, offsets.lost) == (3, 4, 4)
    log = open_log()
    assert [(d.segment, d.lost) for d in log.recovery.damage] == [(2, 0), (3, 4)]
    assert log.appended == 12
    with log.reader() as reader:
        assert [record.offset for record in reader] == [0, 1, 2, 3, 8, 9, 10, 11]
        assert reader.overtaken == 4


@pytest.mark.parametrize("size", [0, 100, 4095, 4096, 5000, 65535])
def test_a_shortened_segment_is_damage_and_offsets_are_not_used_again(
    directory: Path, open_log: OpenLog, size: int
) -> None:
    segments = three_small_segments()
    twin.write_log(directory, LOG_ID, segments)
    os.truncate(twin.segment_path(directory, 3), size)
    problems = verify(directory).problems
    log = open_log()
    if size < segments[2].end:
        assert [p.segment for p in problems] == [3]
        assert log.recovery.damage or log.recovery.cut_bytes or size < twin.HEADER
    if size >= twin.HEADER:
        assert log.appended == 12
    expected = messages_of(segments)
    found = read_all(directory)
    assert found == {offset: expected[offset] for offset in found}
    assert set(range(8)) <= set(found)


def test_a_lost_name_is_found_in_another_segment(directory: Path, open_log: OpenLog) -> None:
    segments = three_small_segments()
    twin.write_log(directory, LOG_ID, segments)
    begin, _, record = segments[1].places[1]
    assert record.kind == twin.TOPIC
    patch(directory, 2, begin + 48, b"?")
    log = open_log()
    assert [(d.segment, d.position, d.lost) for d in log.recovery.damage] == [(2, begin, 0)]
    assert {record.topic_name for record in log.reader()} == {b"a.b"}
    assert log.topic("a.b") == 1


def test_an_id_whose_name_is_lost_is_not_given_to_another_topic(directory: Path, open_log: OpenLog) -> None:
    segment = twin.Segment(LOG_ID, 1)
    segment.control(twin.TOPIC, b"a.b", topic=3)
    segment.message(b"x", topic=3)
    segment.mark()
    twin.write_log(directory, LOG_ID, [segment])
    patch(directory, 1, segment.places[1][0] + 48, b"?")
    log = open_log()
    assert log.topic("new") > 3
    with pytest.raises(KeyError):
        log.topic_name(3)
    with pytest.raises(KeyError):
        log.append(3, b"")
    (record,) = log.reader()
    assert (record.topic, record.topic_name, record.payload) == (3, b"", b"x")


def test_payloads_made_to_look_like_records_do_not_hide_those_behind_damage(
    directory: Path, open_log: OpenLog
) -> None:
    """Each 16 bytes of the payload are a header with a fitting offset and a length of almost the whole
    segment: a search
    that checked them all would read the segment thousands of times."""
    segment = twin.Segment(LOG_ID, 1, size=1 << 20)
    segment.control(twin.TOPIC, b"a", topic=1)
    segment.message(((900_000 << 32).to_bytes(8, "little") + (5).to_bytes(8, "little")) * 5000)
    segment.message(b"behind")
    segment.message(b"and more")
    segment.mark()
    twin.write_log(directory, LOG_ID, [segment])
    begin, _ = place(segment, 0)
    patch(directory, 1, begin + 48, b"?")
    assert [(p.position, p.lost) for p in verify(directory).problems] == [(begin, 1)]
    log = open_log(segment_bytes=1 << 20)
    assert [(d.position, d.lost) for d in log.recovery.damage] == [(begin, 1)]
    assert read_all(directory) == {1: b"behind", 2: b"and more"}


def test_two_damaged_places_and_a_torn_tail_are_told_apart(
    directory: Path, torn: twin.Segment, open_log: OpenLog
) -> None:
    damaged = [place(torn, 1)[0], place(torn, 3)[0]]
    tail = place(torn, 7)[0]
    for position in (*damaged, tail):
        patch(directory, 1, position + 48, b"\xee")
    problems = verify(directory).problems
    assert [p.position for p in problems] == [*damaged, tail]
    assert ["no sync mark" in p.reason for p in problems] == [False, False, True]
    log = open_log()
    assert [d.position for d in log.recovery.damage] == damaged
    assert log.recovery.cut_position == tail
    assert list(read_all(directory)) == [0, 2, 4, 5, 6]
    assert log.appended == 7


def test_repair_is_done_once(directory: Path, open_log: OpenLog) -> None:
    segments = three_small_segments()
    twin.write_log(directory, LOG_ID, segments)
    flip(directory, 2, segments[1].places[2][0] + 49, 0)
    flip(directory, 2, 3, 0)
    log = open_log()
    assert len(log.recovery.damage) == 2
    kept = aside(directory)
    assert kept == [f"{2:020d}.seg"]
    log.close()
    assert open_log().recovery.damage == ()
    assert aside(directory) == kept


# --- marks --------------------------------------------------------------------------------------------------


def test_a_torn_mark_loses_only_itself(directory: Path, open_log: OpenLog) -> None:
    """Marks alternate between two slots, also across a restart: the newest one is never overwritten."""
    log = open_log(sync="none")
    topic = log.topic("a")
    seen: list[bytes] = []
    for _ in range(4):
        for _ in range(3):
            log.append(topic, b"x")
            log.sync_now()
            page = twin.segment_path(directory, 1).read_bytes()[twin.MARKS : twin.MARKS + 64]
            slots = [page[:32], page[32:]]
            if seen:
                assert seen[-1] in slots
            seen.append(max(slots, key=lambda slot: int.from_bytes(slot[:8], "little")))
        log.close(sync=False)
        log = open_log(sync="none")
        page = twin.segment_path(directory, 1).read_bytes()[twin.MARKS : twin.MARKS + 64]
        assert seen[-1] in (page[:32], page[32:])
        seen.append(max((page[:32], page[32:]), key=lambda slot: int.from_bytes(slot[16:24], "little")))


def test_closing_leaves_everything_covered_by_a_mark(directory: Path, open_log: OpenLog) -> None:
    for policy in ("always", "every:1000", "interval:60000", "none"):
        log = open_log(sync=policy)
        append_many(log, log.topic("a"), bytes(100 * 1000), 1000)
        end = log.segments()[-1].bytes
        log.close()
        log = open_log(sync=policy)
        assert (log.segments()[-1].bytes, log.segments()[-1].marked) == (end, end)
        log.close()


# --- recycled segments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 976], ids=["small", "large"])
def test_stale_records_of_a_recycled_segment_are_never_read(
    directory: Path, open_log: OpenLog, size: int
) -> None:
    """The worst case: all records have one size, so whole old records stand exactly where the next new one would."""
    log = open_log(sync="none", retention_bytes=0)
    for _ in range(4):
        topic = log.topic("a")
        while log.stats()["retired_segments"] < 8:
            append_many(log, topic, log.appended.to_bytes(8, "little") * (size // 8), size)
        fill_pool(log)
        first, appended = log.first, log.appended
        assert log.stats()["prepared_recycled"] > 0
        log.close(sync=False)
        log = open_log(sync="none", retention_bytes=0)
        assert log.recovery.cut_bytes == 0
        assert log.recovery.damage == ()
        assert (log.appended, log.first <= first) == (appended, True)
        for offset, record in enumerate(log.reader(), log.first):
            assert (record.offset, record.payload) == (offset, offset.to_bytes(8, "little") * (size // 8))
        assert verify(directory).problems == []


def test_a_stale_segment_under_a_new_number_is_never_read(directory: Path, open_log: OpenLog) -> None:
    """A power cut between the new name and the new header: all old records are there, under a number that
    is not theirs."""
    segments = three_small_segments()
    twin.write_log(directory, LOG_ID, segments)
    old = twin.Segment(LOG_ID, 0, first=12)
    old.control(twin.TOPIC, b"a.b", topic=1)
    for _ in range(3):
        old.message(b"stale")
    old.mark()
    twin.segment_path(directory, 4).write_bytes(old.encode())
    assert verify(directory).problems == []
    assert read_all(directory) == messages_of(segments)
    log = open_log()
    assert log.recovery.damage == ()
    assert log.recovery.cut_bytes == 0
    assert read_all(directory) == messages_of(segments)
    topic = log.topic("a.b")
    while len(log.segments()) < 4:
        append(log, topic, b"stale")
    assert [record.offset for record in log.reader()] == list(range(log.appended))
