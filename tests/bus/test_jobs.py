"""Queues with jobs: delays, attempts and retries of single messages, limits on what is active, pauses, and what became
of each message, on a clock that the test turns and through restarts and kills."""

import ctypes
import json
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import pytest

from headrace.bus import Subscription
from headrace.wake import CallbackWaker
from tests.bus.conftest import SECOND, START, Place, payloads, take_all

KEEP = 8


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("place") / "log")
    made.open(now=START)
    yield made
    made.close()


def queue(place: Place, **options: object) -> Subscription:
    return place.bus.subscribe(
        "jobs.#",
        at_least_once=True,
        durable=True,
        queue=True,
        confirm_all=True,
        deadline_us=60 * SECOND,
        keep_finished=KEEP,
        now=START,
        **options,  # type: ignore[arg-type]
    )


def again(place: Place) -> Subscription:
    """The only subscription there is, after a restart."""
    (one,) = place.bus.subscriptions.values()
    return one


def counts(subscription: Subscription, now: int) -> dict[str, int]:
    return {state: count for state, count in subscription.census(now).items() if count}


def safe(place: Place) -> None:
    place.log.sync_now()
    place.bus.on_safe()


@pytest.mark.parametrize("seed", range(20))
def test_census_counts_what_the_status_of_each_message_says(place: Place, seed: int) -> None:
    source = random.Random(seed)
    now, offsets, held = START, [], []
    jobs = queue(place, max_inflight=12)
    member = jobs.join(None, -1, now)
    for _ in range(400):
        act = source.randrange(9)
        if act <= 1:
            delay = source.choice([0, 0, 5, 50, 500])
            offsets.append(
                place.publish("jobs.x", b"", not_before=now + delay * SECOND if delay else None, now=now)
            )
            place.publish("other", b"", now=now)
        elif act == 2:
            safe(place)
        elif act == 3:
            held += [one.tag for one in [member.receive(now)] if one]
        elif act == 4 and held:
            jobs.ack(held.pop(source.randrange(len(held))), now)
        elif act == 5 and held:
            jobs.retry(held.pop(), delay=source.choice([0, 10]), now=now)
        elif act == 6 and offsets:
            jobs.remove(source.choice(offsets), now)
        elif act == 7:
            now += source.choice([0, 1, 20, 70]) * SECOND
        elif source.random() < 0.1:
            safe(place)
            place.reopen()
            jobs = again(place)
            member, held = jobs.join(None, -1, now), []
        elif source.random() < 0.2:
            jobs.paused = not jobs.paused
        if source.random() < 0.5:
            told = counts(jobs, now)
            seen = Counter(status[0] for one in offsets if (status := jobs.status(one, now)))
            assert told == dict(seen)


@pytest.mark.parametrize("seed", range(5))
def test_census_stays_right_where_retention_overtakes_the_cursor(place: Place, seed: int) -> None:
    source = random.Random(seed)
    place.close()
    place.open(retention_bytes=4 * 65536)
    now, offsets = START, []
    jobs = queue(place, max_inflight=12)
    member = jobs.join(None, -1, now)
    for step in range(600):
        delay = source.choice([0, 0, 5, 50, 500])
        offsets.append(
            place.publish("jobs.x", b"." * 4000, not_before=now + delay * SECOND if delay else None, now=now)
        )
        if source.random() < 0.3:
            place.publish("other", b"." * 4000, now=now)
        if source.random() < 0.5:
            jobs.remove(source.choice(offsets[-60:]), now)
        if source.random() < 0.2:
            safe(place)
            while (one := member.receive(now)) is not None and source.random() < 0.8:
                jobs.ack(one.tag, now)
        if source.random() < 0.1:
            now += source.choice([1, 20, 70]) * SECOND
        if source.random() < 0.3:
            told = counts(jobs, now)
            seen = Counter(status[0] for one in offsets if (status := jobs.status(one, now)))
            assert told == dict(seen), step
    assert jobs.lost > 0


def test_removed_jobs_that_retention_overtakes_are_forgotten(place: Place) -> None:
    jobs = queue(place)
    offsets = [place.publish("jobs.x", b"", not_before=START + SECOND, now=START) for _ in range(5000)]
    safe(place)
    tracemalloc.start()
    try:
        for offset in offsets:
            jobs.remove(offset, START)
        assert tracemalloc.get_traced_memory()[0] > 200_000
        place.roll(30)
        assert tracemalloc.get_traced_memory()[0] < 50_000
    finally:
        tracemalloc.stop()


def test_census_of_more_delays_than_it_tells_apart_is_right_but_for_jobs_due_about_now(place: Place) -> None:
    source = random.Random(3)
    place.close()
    place.open(retention_bytes=64 * 65536)
    jobs = queue(place)
    delays = source.sample(range(1, 40_001), 20_000)
    offsets = {
        place.publish("jobs.x", b"", not_before=START + delay * SECOND, now=START): delay for delay in delays
    }
    safe(place)
    for asked in (0, 1000, 20_000, 20_001, 39_000, 40_000, 50_000):
        for offset in source.sample(sorted(offsets), 1000):
            if jobs.remove(offset, START) == "delayed":
                del offsets[offset]
        told = jobs.census(START + asked * SECOND)
        assert told["waiting"] + told["delayed"] == len(offsets)
        # 40,000 s in 4096 parts or more are 10 s or less, made a power of two of microseconds.
        later = sum(delay > asked for delay in offsets.values())
        assert later <= told["delayed"] <= later + 17
    assert told["delayed"] == 0
    soon = place.publish("jobs.x", b"", not_before=START + 50_010 * SECOND, now=START)
    assert jobs.census(START + 50_009 * SECOND)["delayed"] == 1
    assert jobs.census(START + 50_010 * SECOND)["delayed"] == 0
    assert jobs.status(soon, START + 50_010 * SECOND) == ("waiting", 0)


def test_census_follows_a_cursor_that_passes_more_delays_than_it_tells_apart(place: Place) -> None:
    source = random.Random(4)
    place.close()
    place.open(retention_bytes=64 * 65536)
    jobs = queue(place, max_inflight=65536)
    for delay in source.sample(range(1, 40_001), 10_000):
        place.publish("jobs.x", b"", not_before=START + delay * SECOND, now=START)
        if delay % 10 == 0:
            place.publish("jobs.x", b"now", now=START)
    safe(place)
    ready = jobs.census(START)["waiting"]
    member = jobs.join(None, 0, START)
    for taken in range(1, ready + 1, 50):
        member.credits = 50 if taken > 1 else 1
        take_all(member, START)
        told = jobs.census(START)
        assert (told["active"], told["waiting"], told["delayed"]) == (taken, ready - taken, 10_000)


class MallocInfo(ctypes.Structure):
    _fields_ = (("numbers", ctypes.c_size_t * 10),)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc")
def test_census_of_many_delays_has_bounded_room_and_gives_it_back(place: Place) -> None:
    place.close()
    place.open(retention_bytes=64 * 65536)
    jobs = queue(place)
    offsets = [
        place.publish("jobs.x", b"", not_before=START + i * SECOND, now=START) for i in range(1, 30_000)
    ]
    safe(place)
    before = allocated()
    assert jobs.census(START)["delayed"] == len(offsets)
    assert allocated() - before < 200_000
    assert jobs.census(START + 40_000 * SECOND)["delayed"] == 0
    assert allocated() - before < 50_000


def allocated() -> int:
    """How many bytes the C library has given out."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = MallocInfo
    told = ask()
    return int(told.numbers[4] + told.numbers[7])  # hblkhd, uordblks


def test_asking_for_the_census_does_not_go_through_what_was_removed(place: Place) -> None:
    place.close()
    place.open(retention_bytes=64 * 65536)
    jobs = queue(place)
    offsets = [place.publish("jobs.x", b"", not_before=START + SECOND, now=START) for _ in range(10_000)]
    safe(place)
    for offset in offsets:
        assert jobs.remove(offset, START) == "delayed"
    assert counts(jobs, START) == {}
    tracemalloc.start()
    try:
        assert counts(jobs, START + SECOND) == {}
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()


def test_delayed_message_lets_others_pass_and_comes_at_its_time(place: Place) -> None:
    jobs = queue(place)
    member = jobs.join(None, -1, START)
    later = place.publish("jobs.x", b"later", not_before=START + 10 * SECOND)
    place.publish("jobs.x", b"now")
    safe(place)
    assert payloads(take_all(member, START)) == [b"now"]
    assert jobs.status(later, START) == ("delayed", 0)
    assert take_all(member, START + 10 * SECOND - 1) == []
    (one,) = take_all(member, START + 10 * SECOND)
    assert (one.payload, one.deliveries) == (b"later", 1)
    assert jobs.status(later, START + 10 * SECOND) == ("active", 1)
    assert (jobs.delivered, jobs.redelivered) == (2, 0)


def test_delayed_message_is_delivered_by_a_tick_that_wakes_a_member(place: Place) -> None:
    woken: list[int] = []
    jobs = queue(place)
    member = jobs.join(CallbackWaker(lambda: woken.append(1)), 1, START)
    place.publish("jobs.x", b"later", not_before=START + 10 * SECOND)
    safe(place)
    assert take_all(member, START) == []
    assert place.bus.tick(START) == START + 10 * SECOND
    woken.clear()
    place.bus.tick(START + 10 * SECOND)
    assert woken
    assert payloads(take_all(member, START + 10 * SECOND)) == [b"later"]


@pytest.mark.parametrize("kill", [False, True])
def test_delays_and_retries_survive(place: Place, kill: bool) -> None:
    jobs = queue(place)
    member = jobs.join(None, -1, START)
    delayed = place.publish("jobs.x", b"delayed", not_before=START + 100 * SECOND)
    retried = place.publish("jobs.x", b"retried", retry=50, attempts=2)
    held = place.publish("jobs.x", b"held")
    safe(place)
    one, _ = take_all(member, START)
    assert one.payload == b"retried"
    assert jobs.retry(one.tag, now=START) == "again"
    place.options["now"] = START + SECOND
    place.killed() if kill else place.reopen()
    jobs = again(place)
    now = START + SECOND
    assert jobs.status(delayed, now) == ("delayed", 0)
    assert jobs.status(retried, now) == ("delayed", 1)
    assert jobs.status(held, now) == ("waiting", 0)  # a first delivery is not written
    member = jobs.join(None, -1, now)
    (one,) = take_all(member, now)
    assert one.payload == b"held"
    jobs.ack(one.tag)
    assert payloads(take_all(member, START + 49 * SECOND)) == []
    (one,) = take_all(member, START + 50 * SECOND)
    assert (one.payload, one.deliveries) == (b"retried", 2)
    jobs.ack(one.tag)
    (one,) = take_all(member, START + 100 * SECOND)
    assert (one.payload, one.deliveries) == (b"delayed", 1)


def test_own_attempts_and_retry_interval_take_the_place_of_the_subscriptions(place: Place) -> None:
    jobs = queue(place, max_deliveries=5)
    member = jobs.join(None, -1, START)
    place.publish("jobs.x", b"twice", attempts=2, retry=0.5)
    safe(place)
    (one,) = take_all(member, START)
    assert jobs.retry(one.tag, now=START) == "again"
    assert take_all(member, START + SECOND // 2 - 1) == []
    (one,) = take_all(member, START + SECOND // 2)
    assert jobs.retry(one.tag, reason="no luck", now=START + SECOND) == "buried"
    assert jobs.status(one.offset, START + SECOND) == ("failed", 2)
    assert jobs.retry(one.tag) is None
    (letter,) = take_all(place.bus.subscribe("dead.#", start=0).join(None, -1, START))
    headers = json.loads(letter.headers)
    assert (headers["dead-reason"], headers["dead-deliveries"], headers["attempts"]) == ("no luck", 2, 2)
    assert letter.flags & 8 == 0  # its timing is history


def test_back_off_is_the_subscriptions_where_the_message_has_none(place: Place) -> None:
    jobs = queue(place, redelivery_us=SECOND)
    member = jobs.join(None, -1, START)
    place.publish("jobs.x", b"x")
    safe(place)
    now = START
    for pause in (1, 2, 4):
        (one,) = take_all(member, now)
        jobs.retry(one.tag, now=now)
        assert take_all(member, now + pause * SECOND - 1) == []
        now += pause * SECOND
    (one,) = take_all(member, now)
    jobs.retry(one.tag, delay=0, now=now)
    assert payloads(take_all(member, now)) == [b"x"]


def test_timing_is_only_for_queues(place: Place) -> None:
    fan_out = place.bus.subscribe("jobs.#", at_least_once=True, confirm_all=True).join(None, -1, START)
    place.publish("jobs.x", b"x", not_before=START + 10 * SECOND)
    safe(place)
    assert payloads(take_all(fan_out, START)) == [b"x"]


def test_deadline_takes_a_job_back_and_can_be_prolonged(place: Place) -> None:
    jobs = queue(place)
    slow, other = jobs.join(None, 1, START), jobs.join(None, 1, START)
    place.publish("jobs.x", b"x")
    safe(place)
    (one,) = take_all(slow, START)
    assert jobs.prolong(one.tag, START + 50 * SECOND)
    assert take_all(other, START + 109 * SECOND) == []
    (two,) = take_all(other, START + 110 * SECOND)
    assert (two.tag, two.deliveries) == (one.tag, 2)
    assert not jobs.prolong(999)
    assert (slow.inflight, other.inflight, jobs.held) == (0, 1, 1)


def test_no_more_are_active_than_allowed_and_a_freed_place_wakes(place: Place) -> None:
    woken: list[str] = []
    jobs = queue(place, max_active=2)
    first = jobs.join(CallbackWaker(lambda: woken.append("first")), -1, START)
    second = jobs.join(CallbackWaker(lambda: woken.append("second")), -1, START)
    for i in range(6):
        place.publish("jobs.x", b"%d" % i)
    safe(place)
    had = take_all(first, START)
    assert payloads(had) == [b"0", b"1"]
    assert take_all(second, START) == []
    woken.clear()
    jobs.ack(had[0].tag)
    assert "second" in woken
    assert payloads(take_all(second, START)) == [b"2"]
    woken.clear()
    jobs.retry(had[1].tag, delay=5, now=START)
    assert "second" in woken
    assert payloads(take_all(second, START)) == [b"3"]
    second.leave(START)
    assert jobs.held == 0
    assert payloads(take_all(first, START)) == [b"2", b"3"]


def test_paused_queue_holds_and_goes_on(place: Place) -> None:
    woken: list[int] = []
    jobs = queue(place)
    member = jobs.join(CallbackWaker(lambda: woken.append(1)), -1, START)
    jobs.paused = True
    place.publish("jobs.x", b"x")
    safe(place)
    assert take_all(member, START) == []
    assert counts(jobs, START) == {"waiting": 1}
    woken.clear()
    jobs.paused = False
    assert woken
    assert payloads(take_all(member, START)) == [b"x"]


def test_every_state_is_told_counted_and_listed(place: Place) -> None:
    place.close()
    place.open(sync="always")
    jobs = queue(place, max_deliveries=1)
    member = jobs.join(None, 3, START)
    done, dead, active = (place.publish("jobs.x", b"%d" % i) for i in range(3))
    delayed = place.publish("jobs.x", b"later", not_before=START + 10 * SECOND)
    waiting = [place.publish("jobs.y", b"y") for _ in range(5)]
    place.publish("other", b"not for it")
    ahead = place.publish("jobs.x", b"later still", not_before=START + 20 * SECOND)
    safe(place)
    first, second, _ = take_all(member, START)
    jobs.ack(first.tag)
    jobs.retry(second.tag, now=START)
    safe(place)
    states = {done: "completed", dead: "failed", active: "active", delayed: "delayed", ahead: "delayed"}
    states |= dict.fromkeys(waiting, "waiting")
    for offset, state in states.items():
        found = jobs.status(offset, START)
        assert found is not None
        assert found[0] == state
    assert counts(jobs, START) == {"completed": 1, "failed": 1, "active": 1, "delayed": 2, "waiting": 5}
    assert jobs.offsets("waiting", 1, 3, START) == waiting[1:4]
    assert jobs.offsets("waiting", 4, 3, START) == waiting[4:]
    assert jobs.offsets("delayed", now=START) == [delayed, ahead]
    assert jobs.offsets("delayed", 1, 5, START) == [ahead]
    assert [jobs.offsets(state, now=START) for state in ("active", "completed", "failed", "new")] == [
        [active],
        [done],
        [dead],
        [],
    ]
    assert jobs.status(ahead + 100, START) is None
    assert jobs.offsets("waiting", 0, 0, START) == []
    later = START + 30 * SECOND
    assert counts(jobs, later) == {"completed": 1, "failed": 1, "active": 1, "waiting": 7}


def test_counting_follows_what_is_published_taken_and_finished(place: Place) -> None:
    jobs = queue(place)
    member = jobs.join(None, -1, START)
    rolls = random.Random(7)
    expected = active = finished = 0
    for _ in range(300):
        if rolls.random() < 0.6:
            place.publish("jobs.x", b"x" * rolls.randrange(2000))
            expected += 1
        elif (one := member.receive(START)) is not None:
            expected -= 1
            if rolls.random() < 0.5:
                jobs.ack(one.tag)
                finished += 1
            else:
                active += 1
        if rolls.random() < 0.3:
            census = jobs.census(START)
            assert census["new"] + census["waiting"] == expected
            assert (census["active"], census["completed"]) == (active, min(finished, KEEP))


def test_what_is_not_safe_yet_is_new(place: Place) -> None:
    place.close()
    place.open(sync="always")
    jobs = queue(place)
    safe(place)
    seen = set()
    for i in range(100):
        offset = place.publish("jobs.x", b"x", not_before=START + SECOND if i % 2 else None)
        state = jobs.status(offset, START)
        census = jobs.census(START)
        assert sum(census.values()) == i + 1
        assert state is not None
        seen.add(state[0])
    assert "new" in seen
    safe(place)
    assert jobs.census(START)["new"] == 0


def test_finished_ones_are_kept_up_to_a_number(place: Place) -> None:
    jobs = queue(place)
    member = jobs.join(None, -1, START)
    offsets = [place.publish("jobs.x", b"x") for _ in range(20)]
    safe(place)
    for one in take_all(member, START):
        jobs.ack(one.tag)
    assert jobs.offsets("completed") == offsets[-KEEP:]
    assert jobs.status(offsets[0]) is None
    assert jobs.census(START)["completed"] == KEEP
    place.reopen()
    assert again(place).offsets("completed") == offsets[-KEEP:]


@pytest.mark.parametrize("kill", [False, True])
def test_what_became_of_finished_ones_survives(place: Place, kill: bool) -> None:
    jobs = queue(place, max_deliveries=2)
    member = jobs.join(None, -1, START)
    for i in range(4):
        place.publish("jobs.x", b"%d" % i)
    safe(place)
    done, dead, gone, _ = take_all(member, START)
    jobs.ack(done.tag)
    jobs.retry(dead.tag, delay=0, now=START)
    jobs.retry(take_all(member, START)[0].tag, now=START)
    jobs.ack(gone.tag)
    assert jobs.remove(gone.offset, START) == "completed"
    safe(place)
    place.killed() if kill else place.reopen()
    jobs = again(place)
    assert jobs.status(done.offset, START) == ("completed", 1)
    assert jobs.status(dead.offset, START) == ("failed", 2)
    assert jobs.status(gone.offset, START) is None
    assert jobs.census(START) | {"waiting": 0} == {
        "new": 0,
        "waiting": 0,
        "delayed": 0,
        "active": 0,
        "completed": 1,
        "failed": 1,
    }


@pytest.mark.parametrize("keep", [KEEP, 0])
@pytest.mark.parametrize("restart", ["none", "reopen", "killed"])
def test_removed_job_is_never_delivered(place: Place, restart: str, keep: int) -> None:
    jobs = queue(place)
    jobs.keep_finished = keep
    member = jobs.join(None, 1, START)
    place.publish("jobs.x", b"taken")
    taken_up = place.publish("jobs.x", b"taken up", not_before=START + 5 * SECOND)
    between = place.publish("jobs.x", b"between")
    ahead = place.publish("jobs.x", b"ahead", not_before=START + 5 * SECOND)
    after = place.publish("jobs.x", b"after")
    safe(place)
    (one,) = take_all(member, START)
    assert jobs.remove(one.offset, START) == "active"  # it stays
    assert jobs.status(one.offset, START) == ("active", 1)
    assert jobs.remove(ahead, START) == "delayed"
    assert jobs.remove(ahead, START) is None
    assert counts(jobs, START) == {"active": 1, "delayed": 1, "waiting": 2}
    assert jobs.remove(taken_up, START) == "delayed"
    assert jobs.remove(12345, START) is None
    safe(place)
    if restart != "none":
        place.options["now"] = START
        place.reopen() if restart == "reopen" else place.killed()
        jobs = again(place)
        assert jobs.status(between, START) == ("waiting", 0)  # it was not taken for handed out
        assert jobs.status(after, START) == ("waiting", 0)
        member = jobs.join(None, -1, START)
        assert payloads(take_all(member, START + 9 * SECOND)) == [b"taken", b"between", b"after"]
    else:
        member.credits = -1
        assert payloads(take_all(member, START + 9 * SECOND)) == [b"between", b"after"]


def test_delayed_and_removed_ones_survive_a_state_that_is_written_anew(place: Place) -> None:
    place.options["retention_bytes"] = 4 * 65536
    place.options["now"] = START
    place.reopen()
    jobs = queue(place)
    member = jobs.join(None, 1, START)
    place.publish("jobs.x", b"delayed", not_before=START + 100 * SECOND)
    place.publish("jobs.x", b"retried", retry=50)
    safe(place)
    (one,) = take_all(member, START)
    jobs.retry(one.tag, now=START)
    place.roll(12)  # what was in the first segments is carried forward
    removed = place.publish("jobs.x", b"removed", not_before=START + 5 * SECOND)
    place.roll(1)
    safe(place)
    assert jobs.remove(removed, START) == "delayed"
    place.roll(2)
    safe(place)
    place.killed()
    jobs = again(place)
    member = jobs.join(None, -1, START)
    assert take_all(member, START + 49 * SECOND) == []
    assert payloads(take_all(member, START + 50 * SECOND)) == [b"retried"]
    (one,) = take_all(member, START + 100 * SECOND)
    assert (one.payload, one.deliveries) == (b"delayed", 1)


def test_looking_at_a_queue_loses_nothing_that_is_not_safe_yet(place: Place) -> None:
    place.close()
    place.open(sync="always")
    jobs = queue(place)
    member = jobs.join(None, -1, START)
    expected = [b"%d" % i for i in range(100)]
    for i, payload in enumerate(expected):
        place.publish("jobs.x", payload)
        place.publish("others", b"")
        place.bus.dispatch()
        for _ in range(2):
            jobs.offsets("new", now=START)
            assert sum(jobs.census(START).values()) == i + 1
    safe(place)
    assert payloads(take_all(member, START)) == expected
