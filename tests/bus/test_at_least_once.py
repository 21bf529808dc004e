"""Acknowledgements, redelivery, dead letters, queues and what survives a restart, on a clock that the test turns."""

import json
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from hypothesis.strategies import integers, sampled_from

from headrace.bus import Member, Subscription
from headrace.errors import LogFull
from tests.bus.conftest import SECOND, START, Place, payloads, take_all
from tests.log.patience import eventually


def durable(place: Place, topic: str = "t", **options: object) -> Subscription:
    return place.bus.subscribe(topic, exact=True, at_least_once=True, durable=True, owner="me", **options)  # type: ignore[arg-type]


def test_unacknowledged_comes_again_with_the_same_tag_after_a_growing_delay(place: Place) -> None:
    member = durable(place).join(None, -1, START)
    place.publish("t", b"x", confirmed=True)
    now = START
    (first,) = take_all(member, now)
    assert (first.deliveries, first.confirm) == (1, True)
    for deliveries, delay in ((2, 2), (3, 4), (4, 8), (5, 16)):
        assert take_all(member, now + delay * SECOND - 1) == []
        now += delay * SECOND
        (again,) = take_all(member, now)
        assert (again.tag, again.payload, again.deliveries) == (first.tag, b"x", deliveries)


def test_last_attempt_ends_in_the_dead_letter_topic(place: Place) -> None:
    subscription = durable(place, max_deliveries=2)
    member = subscription.join(None, -1, START)
    place.publish("t", b"poison", confirmed=True, headers=b'{"own": 1}', parts=(2, 4), correlation=9)
    take_all(member, START)
    take_all(member, START + 10 * SECOND)
    place.bus.tick(START + 100 * SECOND)
    (letter,) = take_all(place.bus.subscribe("dead.#", start=0).join(None, -1, START))
    assert (letter.topic, letter.payload, letter.parts, letter.correlation) == (
        b"dead.t",
        b"poison",
        (2, 4),
        9,
    )
    headers = json.loads(letter.headers)
    assert headers["own"] == 1
    assert headers["dead-topic"] == "t"
    assert headers["dead-deliveries"] == 2
    assert headers["dead-reason"]
    assert (subscription.inflight, subscription.dead, place.bus.stats()["dead"]) == (0, 1, 1)
    assert take_all(member, START + 1000 * SECOND) == []


def test_late_acknowledgement_of_what_waits_for_redelivery_counts(place: Place) -> None:
    subscription = durable(place)
    member = subscription.join(None, -1, START)
    place.publish("t", b"x", confirmed=True)
    (one,) = take_all(member, START)
    place.bus.tick(START + 3 * SECOND)
    assert subscription.ack(one.tag)
    assert not subscription.ack(one.tag)
    assert take_all(member, START + 100 * SECOND) == []


def test_acknowledgements_that_nobody_waits_for_are_refused(place: Place) -> None:
    subscription = durable(place)
    member = subscription.join(None, -1, START)
    place.publish("t", b"not to be confirmed")
    (one,) = take_all(member, START)
    assert not one.confirm
    for tag in (0, one.tag, 12345, 2**64 - 1):
        assert not subscription.ack(tag)


def test_no_more_is_in_flight_than_allowed(place: Place) -> None:
    subscription = durable(place, max_inflight=3)
    member = subscription.join(None, -1, START)
    for i in range(10):
        place.publish("t", b"%d" % i, confirmed=True)
    first = take_all(member, START)
    assert payloads(first) == [b"0", b"1", b"2"]
    subscription.ack(first[1].tag)
    assert payloads(take_all(member, START)) == [b"3"]


def test_rejected_comes_again_when_it_was_asked_for(place: Place) -> None:
    subscription = durable(place)
    member = subscription.join(None, -1, START)
    place.publish("t", b"x", confirmed=True)
    (one,) = take_all(member, START)
    assert subscription.reject(one.tag, delay=5, now=START)
    assert take_all(member, START + 4 * SECOND) == []
    assert [again.tag for again in take_all(member, START + 5 * SECOND)] == [one.tag]
    assert not subscription.reject(999)


def test_nothing_is_delivered_at_least_once_before_it_is_safe(place: Place) -> None:
    place.close()
    place.open(sync="always")
    follows_appended = place.bus.subscribe("t", exact=True).join(None, -1, START)
    follows_safe = durable(place).join(None, -1, START)
    for i in range(200):
        offset = place.publish("t", b"%d" % i, confirmed=True)
        assert payloads(take_all(follows_appended)) == [b"%d" % i]
        safe = place.log.safe
        for one in take_all(follows_safe, START):
            assert one.offset < place.log.safe
        assert safe <= offset + 1
    place.log.sync_now()
    place.bus.on_safe()
    take_all(follows_safe, START)
    assert follows_safe.subscription.delivered == 200


def test_queue_gives_each_message_to_one_member_within_its_credits(place: Place) -> None:
    queue = place.bus.subscribe("jobs.#", at_least_once=True, queue=True, confirm_all=True)
    some, more = queue.join(None, 2, START), queue.join(None, 5, START)
    for i in range(10):
        place.publish("jobs.x", b"%d" % i)
    got = [*take_all(some, START), *take_all(more, START)]
    assert payloads(got) == [b"%d" % i for i in range(7)]
    assert (some.credits, more.credits, some.inflight, more.inflight) == (0, 0, 2, 5)
    some.credits = 10
    assert payloads(take_all(some, START)) == [b"7", b"8", b"9"]


def test_what_a_leaving_member_had_goes_to_another(place: Place) -> None:
    queue = place.bus.subscribe("jobs", exact=True, at_least_once=True, queue=True, confirm_all=True)
    leaver, stayer = queue.join(None, -1, START), queue.join(None, -1, START)
    for i in range(4):
        place.publish("jobs", b"%d" % i)
    had = take_all(leaver, START)
    queue.ack(had[0].tag)
    leaver.leave(START)
    again = take_all(stayer, START)
    assert [(one.tag, one.deliveries) for one in again] == [(one.tag, 2) for one in had[1:]]
    assert leaver.receive(START) is None


def test_only_the_newest_member_of_a_fan_out_subscription_takes(place: Place) -> None:
    subscription = durable(place)
    old = subscription.join(None, -1, START)
    place.publish("t", b"x", confirmed=True)
    (one,) = take_all(old, START)
    new = subscription.join(None, -1, START)
    assert old.gone
    assert [again.tag for again in take_all(new, START)] == [one.tag]


@pytest.mark.parametrize("end", ["reopen", "killed"])
def test_durable_subscription_and_its_acknowledgements_survive(place: Place, end: str) -> None:
    subscription = durable(place)
    member = subscription.join(None, -1, START)
    for i in range(10):
        place.publish("t", b"%d" % i, confirmed=True)
    taken = take_all(member, START)
    for one in (taken[0], taken[1], taken[4], taken[9]):
        subscription.ack(one.tag)
    getattr(place, end)()
    again = place.bus.subscriptions[subscription.id]
    assert (again.filter, again.owner, again.durable) == (b"t", "me", True)
    member = again.join(None, -1, START)
    received = take_all(member, START)
    assert [one.tag for one in received] == [taken[i].tag for i in (2, 3, 5, 6, 7, 8)]
    assert again.ack(taken[2].tag)


def test_acknowledgement_after_a_restart_of_what_was_delivered_before_it_counts(place: Place) -> None:
    subscription = durable(place)
    member = subscription.join(None, -1, START)
    for i in range(3):
        place.publish("t", b"%d" % i, confirmed=True)
    place.publish("other", b"")
    taken = take_all(member, START)
    place.killed()
    again = place.bus.subscriptions[subscription.id]
    assert again.ack(taken[1].tag)
    assert not again.ack(taken[1].tag)
    assert not again.ack(taken[2].tag + 1)  # of another topic
    member = again.join(None, -1, START)
    assert [one.tag for one in take_all(member, START)] == [taken[0].tag, taken[2].tag]
    place.killed()
    member = place.bus.subscriptions[subscription.id].join(None, -1, START)
    assert [one.tag for one in take_all(member, START)] == [taken[0].tag, taken[2].tag]


def test_attempts_survive_a_restart(place: Place) -> None:
    subscription = durable(place, max_deliveries=3)
    member = subscription.join(None, -1, START)
    place.publish("t", b"x", confirmed=True)
    take_all(member, START)
    take_all(member, START + 10 * SECOND)
    place.bus.tick(START + 10 * SECOND)
    place.killed()
    member = place.bus.subscriptions[subscription.id].join(None, -1, START)
    (one,) = take_all(member, START + 20 * SECOND)
    assert one.deliveries == 3


def test_unconfirmed_messages_are_not_delivered_again_after_a_restart(place: Place) -> None:
    subscription = durable(place)
    member = subscription.join(None, -1, START)
    place.publish("t", b"once")
    place.publish("t", b"until acknowledged", confirmed=True)
    assert len(take_all(member, START)) == 2
    place.killed()
    member = place.bus.subscriptions[subscription.id].join(None, -1, START)
    place.publish("t", b"new")
    assert payloads(take_all(member, START)) == [b"until acknowledged", b"new"]


def test_ids_are_never_given_out_twice(place: Place) -> None:
    seen: set[int] = set()
    for end in ("reopen", "killed", "reopen"):
        for _ in range(5):
            subscription = place.bus.subscribe("t", exact=True)
            assert subscription.id not in seen
            seen.add(subscription.id)
            place.bus.unsubscribe(subscription)
        place.roll(20)
        getattr(place, end)()
    assert min(seen) == 1


def test_subscription_that_nobody_came_back_to_is_dropped_and_counted(place: Place) -> None:
    subscription = durable(place)
    member = subscription.join(None, -1, START)
    member.leave(START)
    place.bus.tick(START + 3599 * SECOND)
    assert not subscription.closed
    place.bus.tick(START + 3601 * SECOND)
    assert subscription.closed
    assert place.bus.stats()["expired"] == 1
    place.reopen()
    assert place.bus.stats()["subscriptions"] == 0


def test_subscription_that_does_not_survive_ends_with_its_member(place: Place) -> None:
    subscription = place.bus.subscribe("t", exact=True)
    subscription.join(None, -1, START).leave(START)
    assert subscription.closed


@pytest.mark.parametrize("end", ["reopen", "killed"])
def test_unfinished_delivery_is_carried_past_its_segments_end(place: Place, end: str) -> None:
    first, second = durable(place), durable(place)
    members = [first.join(None, -1, START), second.join(None, -1, START)]
    place.publish("t", b"keep me", confirmed=True, parts=(3, 4))
    tags = [take_all(member, START)[0].tag for member in members]
    place.publish("t", b"seen by neither", confirmed=True)
    for _ in range(3):
        place.roll(20)
    assert place.log.first > 1
    assert place.bus.stats()["carried"] >= 2
    (again,) = take_all(members[0], START + 10 * SECOND)
    assert (again.payload, again.parts, again.tag, again.deliveries) == (b"keep me", (3, 4), tags[0], 2)
    assert second.lost == 1
    getattr(place, end)()
    subscription = place.bus.subscriptions[second.id]
    member = subscription.join(None, -1, START)
    (again,) = take_all(member, START + 10 * SECOND)
    assert (again.payload, again.tag) == (b"keep me", tags[1])
    assert subscription.ack(again.tag)
    place.roll(20)
    getattr(place, end)()
    assert take_all(place.bus.subscriptions[second.id].join(None, -1, START), START + 10 * SECOND) == []


def test_forgotten_subscription_does_not_pin_the_log_unless_asked_to(place: Place) -> None:
    durable(place)
    place.publish("t", b"x", confirmed=True)
    place.roll(40)
    assert place.log.first > 0


def test_subscription_holds_back_the_log_where_the_operator_says_so(place: Place) -> None:
    place.bus.hold_for_subscriptions = True
    durable(place)
    place.publish("t", b"not seen yet", confirmed=True)

    def full() -> str | None:
        place.log.on_event()
        try:
            place.bus.publish("filler", b"." * 30000)
        except LogFull:
            return place.log.full
        return None

    assert "retention is reached" in (eventually(full, "an end to the log's room") or "")
    assert place.log.first == 0
    assert place.log.full is not None


class Deliveries(RuleBasedStateMachine):
    """A durable subscription through publishes, deliveries, acknowledgements, time and deaths of the process: what was
    confirmed and not acknowledged comes, what was acknowledged does not come again, and each in order."""

    place: Place
    subscription: Subscription
    member: Member

    @initialize(seed=integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="headrace-bus-")
        self.place = Place(Path(self.directory.name) / "log")
        # More than can be published in one life, so that retention takes nothing.
        self.place.open(max_deliveries=1000, retention_bytes=64 * 65536)
        self.random = random.Random(seed)
        self.subscription = durable(self.place)
        self.member = self.subscription.join(None, -1, START)
        self.now = START
        self.published: list[int] = []
        self.acked: set[int] = set()
        self.delivered: dict[int, int] = {}

    @rule(count=integers(1, 20), size=sampled_from([0, 10, 3000]))
    def publish(self, count: int, size: int) -> None:
        for _ in range(count):
            self.published.append(self.place.publish("t", b"." * size, confirmed=True))
            self.place.publish("other", b"." * size)

    @rule(count=integers(1, 30))
    def take(self, count: int) -> None:
        fresh = [
            offset for offset in self.published if offset not in self.delivered and offset not in self.acked
        ]
        for _ in range(count):
            one = self.member.receive(self.now)
            if one is None:
                assert not fresh, "there is something that was not delivered"
                return
            assert (one.topic, one.tag) == (b"t", one.offset + 1)
            assert one.offset not in self.acked
            if one.offset in self.delivered:
                self.delivered[one.offset] += 1
            else:
                assert one.offset == fresh.pop(0), "first deliveries are in order"
                self.delivered[one.offset] = one.deliveries  # those before a restart may be counted in
            assert one.deliveries == self.delivered[one.offset]

    @rule(share=integers(0, 100))
    def ack(self, share: int) -> None:
        for offset in [o for o in self.delivered if o not in self.acked]:
            if self.random.randrange(100) < share:
                assert self.subscription.ack(offset + 1)
                assert not self.subscription.ack(offset + 1)
                self.acked.add(offset)

    @rule(seconds=integers(0, 400))
    def wait(self, seconds: int) -> None:
        self.now += seconds * SECOND
        self.place.bus.tick(self.now)

    @rule(end=sampled_from(["reopen", "killed"]))
    def die(self, end: str) -> None:
        getattr(self.place, end)()
        self.subscription = self.place.bus.subscriptions[self.subscription.id]
        self.member = self.subscription.join(None, -1, self.now)
        # What was delivered and not acknowledged is delivered again, as if for the first time, in order.
        self.delivered = {}

    @rule()
    def rejoin(self) -> None:
        self.member.leave(self.now)
        self.member = self.subscription.join(None, -1, self.now)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "subscription"):
            assert self.subscription.lost == 0

    def teardown(self) -> None:
        if hasattr(self, "place"):
            self.now += 1000 * SECOND
            open_ = set(self.published) - self.acked
            received = {one.offset for one in take_all(self.member, self.now)}
            assert received == open_, "everything that is not acknowledged comes"
            self.place.close()
            self.directory.cleanup()


def test_lives_of_a_durable_subscription(soak: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Deliveries, settings=settings(max_examples=25 * soak, stateful_step_count=20)
    )


def test_waiting_for_the_sync_is_waited_for_by_the_subscription(place: Place) -> None:
    place.close()
    place.open(sync="always")
    member = durable(place).join(None, -1, START)
    place.publish("t", b"x", confirmed=True)

    def delivered() -> bool:
        place.log.on_event()
        place.bus.on_safe()
        return member.receive(START) is not None

    eventually(delivered, "the delivery")
