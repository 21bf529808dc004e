"""The two ends, the sync policies, group commit, and what happens when a sync fails. The disk waits or
fails when told to."""

import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import LogFailed
from headrace.log import Log, LogReader, parse_sync, verify
from tests.log.conftest import SMALL
from tests.log.patience import append_many, eventually, fill_pool
from tests.log.remote import Disk, RemoteLog, remote_log

SAFE, SPACE, FAILED = 1, 2, 4


@pytest.fixture
def disk(disk_library: Path, tmp_path: Path) -> Disk:
    return Disk(disk_library, tmp_path)


@pytest.fixture
def remote(disk: Disk, directory: Path, request: pytest.FixtureRequest) -> Iterator[RemoteLog]:
    """A log with a disk of its own; the policy is the fixture's parameter."""
    with remote_log(disk, directory, sync=request.param, **SMALL) as log:
        settle(log)
        yield log


def with_policy(*policies: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("remote", policies, indirect=True)


def settle(log: RemoteLog) -> None:
    """Until the pool is full and nothing is left to be told."""

    def settled() -> bool:
        log.on_event()
        return bool(log.stats()["pool_segments"] >= 1)

    eventually(settled)
    log.on_event()


def events_until(log: RemoteLog, wanted: int) -> int:
    """What on_event() tells, all together, until `wanted` is among it."""
    seen = 0

    def told() -> bool:
        nonlocal seen
        seen |= log.wait()
        return bool(seen & wanted)

    eventually(told)
    return seen


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("always", ("always", 0)),
        ("none", ("none", 0)),
        ("every:7", ("every", 7)),
        ("interval:20", ("interval", 20)),
    ],
)
def test_policies_are_parsed(text: str, policy: tuple[str, int]) -> None:
    assert parse_sync(text) == policy


@pytest.mark.parametrize(
    "text",
    ["", "Always", "every", "every:", "every:0", "every:-1", "every:x", "interval:1.5", "none:", "every:1 "],
)
def test_other_policies_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected always, every:N, interval:MS or none"):
        parse_sync(text)


# --- always -------------------------------------------------------------------------------------------------


@with_policy("always")
def test_with_always_nothing_is_safe_before_its_sync(remote: Any, disk: Disk) -> None:
    topic = remote.topic("a")
    disk.hold()
    remote.append(topic, b"x")
    remote.request_sync()
    for _ in range(20):
        assert (remote.appended, remote.safe, remote.synced) == (1, 0, 0)
        assert remote.on_event() & SAFE == 0
        time.sleep(0.002)
    disk.release()
    assert events_until(remote, SAFE) & FAILED == 0
    assert (remote.appended, remote.safe, remote.synced) == (1, 1, 1)


@with_policy("always")
def test_with_always_a_message_becomes_safe_though_nobody_asks(remote: Any) -> None:
    topic = remote.topic("a")
    for count in range(1, 4):
        remote.append(topic, b"x")
        eventually(lambda: remote.safe == count)  # noqa: B023


@with_policy("always")
def test_what_is_appended_while_a_sync_runs_shares_the_next_one(remote: Any, disk: Disk) -> None:
    topic = remote.topic("a")
    disk.hold()
    before = remote.stats()["syncs"]
    for _ in range(500):
        remote.append(topic, b"x")
        remote.request_sync()
    disk.release()
    eventually(lambda: remote.safe == 500)
    assert remote.stats()["syncs"] - before <= 2


@with_policy("always")
def test_a_sync_covers_all_segments_that_were_sealed_meanwhile(remote: Any, disk: Disk) -> None:
    topic = remote.topic("a")
    disk.hold()
    remote.append(topic, b"x")
    remote.request_sync()
    while len(remote.segments()) < 2:
        remote.append(topic, bytes(1000))
    remote.append(topic, b"last")
    assert remote.safe == 0
    disk.release()
    remote.sync_now()
    assert remote.safe == remote.appended
    sealed, active = remote.segments()
    assert sealed.sealed
    assert (sealed.marked, active.marked) == (sealed.bytes, active.bytes)


@with_policy("always")
def test_readers_see_what_is_not_yet_safe(remote: Any, disk: Disk, directory: Path) -> None:
    topic = remote.topic("a")
    disk.hold()
    remote.append(topic, b"x")
    assert [record.payload for record in LogReader(directory)] == [b"x"]
    assert remote.safe == 0


# --- the other policies -------------------------------------------------------------------------------------


@with_policy("every:1000", "interval:60000", "none")
def test_with_the_other_policies_safe_is_appended(remote: Any, disk: Disk) -> None:
    topic = remote.topic("a")
    disk.hold()
    for count in range(1, 10):
        remote.append(topic, b"x")
        assert (remote.appended, remote.safe, remote.synced) == (count, count, 0)


@with_policy("every:10")
def test_every_n_syncs_after_n_messages_and_not_before(remote: Any) -> None:
    topic = remote.topic("a")
    before = remote.stats()["syncs"]
    for _ in range(9):
        remote.append(topic, b"x")
    time.sleep(0.05)
    assert (remote.synced, remote.stats()["syncs"]) == (0, before)
    remote.append(topic, b"x")
    eventually(lambda: remote.synced == 10)
    assert remote.append_many(topic, bytes(25), 1) == 25
    eventually(lambda: remote.synced == 35)
    assert remote.stats()["syncs"] <= before + 2
    remote.close()


def test_every_n_counts_from_where_the_log_was_opened(open_log: Callable[..., Log]) -> None:
    for _ in range(2):
        log = open_log(sync="every:10")
        topic = log.topic("a")
        before = log.stats()["syncs"]
        log.append_many(topic, bytes(9), 1)
        time.sleep(0.02)
        assert (log.stats()["syncs"], log.appended - log.synced) == (before, 9)
        log.close()


@with_policy("interval:20")
def test_interval_syncs_by_itself(remote: Any) -> None:
    topic = remote.topic("a")
    for count in range(1, 4):
        remote.append(topic, b"x")
        eventually(lambda: remote.synced == count)  # noqa: B023


@with_policy("none")
def test_with_none_nothing_is_synced_unless_asked(remote: Any) -> None:
    topic = remote.topic("a")
    before = remote.stats()["syncs"]
    remote.append_many(topic, bytes(200 * 500), 500)
    assert len(remote.segments()) > 1
    time.sleep(0.05)
    assert (remote.synced, remote.stats()["syncs"]) == (0, before)
    remote.sync_now()
    assert remote.synced == remote.appended == 200
    assert remote.stats()["syncs"] == before + 1


@with_policy("always", "every:1000", "interval:60000", "none")
def test_sync_now_returns_when_all_is_covered(remote: Any) -> None:
    topic = remote.topic("a")
    for count in range(1, 20):
        remote.append(topic, b"x")
        remote.sync_now()
        assert remote.synced == remote.safe == count


# --- failure ------------------------------------------------------------------------------------------------


@with_policy("always", "every:1", "interval:1", "none")
def test_a_failed_sync_is_final(remote: Any, disk: Disk, directory: Path) -> None:
    topic = remote.topic("a")
    remote.append(topic, b"before")
    remote.sync_now()
    assert remote.failed is None
    disk.fail()
    try:
        remote.append(topic, b"after")
        remote.request_sync()
    except LogFailed:
        pass  # the policy has synced already
    events_until(remote, FAILED)
    assert remote.failed == "sync failed: Input/output error"
    ends = remote.appended, remote.safe, remote.synced
    assert ends[2] == 1
    disk.broken.unlink()  # what the disk does from now on makes no difference
    for use in (
        lambda: remote.append(topic, b"x"),
        lambda: remote.append_many(topic, b"x", 1),
        lambda: remote.save_cursor("sink", 0),
        lambda: remote.sync_now(),
    ):
        with pytest.raises(LogFailed, match="sync failed: Input/output error"):
            use()
    remote.request_sync()
    time.sleep(0.05)
    assert (remote.appended, remote.safe, remote.synced) == ends
    assert remote.on_event() & (SAFE | FAILED) == 0
    remote.close()
    with Log(directory, **SMALL) as log:  # until it was reopened
        assert [record.payload for record in log.reader()] == [b"before", b"after"][: log.appended]
        log.append(log.topic("a"), b"again")
        log.sync_now()
        assert log.failed is None
        assert log.safe == log.appended


@with_policy("always")
def test_what_waits_when_a_sync_fails_is_never_confirmed(remote: Any, disk: Disk) -> None:
    topic = remote.topic("a")
    disk.hold()
    remote.append(topic, b"one")
    remote.request_sync()
    remote.append(topic, b"two")
    disk.fail()
    disk.release()
    assert events_until(remote, FAILED) & SAFE == 0
    assert (remote.appended, remote.safe) == (2, 0)


def test_a_log_whose_first_sync_fails_does_not_open(disk: Disk, directory: Path) -> None:
    with Log(directory, **SMALL) as log:
        log.append(log.topic("a"), b"x")
    disk.fail()
    with pytest.raises(Exception, match="Input/output error"), remote_log(disk, directory, **SMALL):
        pass
    with Log(directory, **SMALL) as log:
        assert [record.payload for record in log.reader()] == [b"x"]
    assert verify(directory).problems == []


# --- the event descriptor -----------------------------------------------------------------------------------


def test_event_descriptor_is_readable_until_it_was_asked(open_log: Callable[..., Log]) -> None:
    log = open_log()
    log.append(log.topic("a"), b"x")
    log.sync_now()
    assert select.select([log.event_fd], [], [], 60)[0]
    seen = log.on_event()

    def quiet() -> bool:
        nonlocal seen
        if select.select([log.event_fd], [], [], 0.01)[0]:
            seen |= log.on_event()
            return False
        return True

    eventually(quiet)
    assert seen & SAFE
    assert log.on_event() == 0


def test_a_burst_beyond_the_pool_becomes_durable_whole(directory: Path, open_log: Callable[..., Log]) -> None:
    log = open_log()
    append_many(log, log.topic("a"), os.urandom(2000) * 1000, 2000)
    log.sync_now()
    assert log.safe == 1000
    for info in log.segments():
        assert info.marked == info.bytes
    assert verify(directory).problems == []


def test_more_than_disks_take_in_a_second_is_synced_too_though_nobody_asks(
    directory: Path, open_log: Callable[..., Log]
) -> None:
    segment = 32 << 20
    log = open_log(sync="always", segment_bytes=segment, pool_segments=9, retention_bytes=20 * segment)
    fill_pool(log, 9)
    before = log.stats()["syncs"]
    topic, payloads = log.topic("a"), bytes(1 << 20)
    for _ in range(264):
        append_many(log, topic, payloads, 1 << 18)
    appended = log.appended
    eventually(lambda: log.synced == appended)
    assert log.stats()["syncs"] > before
