"""Topics, filters and cursors: who gets what, in which order, and what it costs the publisher."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bus import Bus
from headrace.errors import BusError
from headrace.log import Log
from headrace.trie import matches
from tests.bus.conftest import START, Place, payloads, take_all


def test_every_subscription_gets_every_message_of_its_topic_in_order(place: Place) -> None:
    members = [place.bus.subscribe("a.b", exact=True).join(None, -1, 1) for _ in range(3)]
    for i in range(100):
        place.publish("a.b", b"%d" % i)
        place.publish("a.c", b"other")
    for member in members:
        assert payloads(take_all(member)) == [b"%d" % i for i in range(100)]


def test_subscription_begins_at_the_end_unless_told_where(place: Place) -> None:
    for i in range(5):
        place.publish("t", b"%d" % i)
    late = place.bus.subscribe("t", exact=True).join(None, -1, 1)
    replay = place.bus.subscribe("t", exact=True, start=2).join(None, -1, 1)
    filtered = place.bus.subscribe("#", start=3).join(None, -1, 1)
    place.publish("t", b"5")
    assert payloads(take_all(late)) == [b"5"]
    assert payloads(take_all(replay)) == [b"2", b"3", b"4", b"5"]
    assert payloads(take_all(filtered)) == [b"3", b"4", b"5"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("site.*.temp", ["site.1.temp", "site.2.temp"]),
        ("site.#", ["site.1.temp", "site.2.temp", "site.1", "site"]),
        ("#", ["site.1.temp", "other", "site.2.temp", "site.1", "site"]),
        ("*", ["other", "site"]),
        ("#.temp", ["site.1.temp", "site.2.temp"]),
    ],
)
def test_filter_walks_the_log_in_order(place: Place, text: str, expected: list[str]) -> None:
    before = place.bus.subscribe(text).join(None, -1, 1)
    topics = ["site.1.temp", "other", "site.2.temp", "site.1", "site"]
    for topic in topics:
        place.publish(topic, topic.encode())
    after = place.bus.subscribe(text, start=0).join(None, -1, 1)
    assert payloads(take_all(before)) == [topic.encode() for topic in expected]
    assert payloads(take_all(after)) == [topic.encode() for topic in expected]


def test_wildcards_are_ordinary_characters_in_an_exact_topic(place: Place) -> None:
    member = place.bus.subscribe("a.*", exact=True).join(None, -1, 1)
    place.publish("a.b", b"no")
    place.publish("a.*", b"yes")
    assert payloads(take_all(member)) == [b"yes"]


def test_headers_parts_and_correlation_come_with_the_message(place: Place) -> None:
    member = place.bus.subscribe("t", exact=True).join(None, -1, 1)
    place.publish("t", b"abc", headers=b'{"k": "v"}', parts=(1, 2), correlation=2**64 - 1, protocol=3, kind=7)
    (one,) = take_all(member)
    assert (one.headers, one.parts, one.correlation, one.protocol, one.kind) == (
        b'{"k": "v"}', (1, 2), 2**64 - 1, 3, 7,
    )  # fmt: skip


def test_cursor_goes_on_over_segments_it_never_looked_at_while_they_were_open(place: Place) -> None:
    exact = place.bus.subscribe("t", exact=True).join(None, -1, 1)
    filtered = place.bus.subscribe("t").join(None, -1, 1)
    for i in range(60):
        place.publish("t", b"%d" % i + b"." * 4000)
    assert len(place.log.segments()) > 3
    assert [p.partition(b".")[0] for p in payloads(take_all(exact))] == [b"%d" % i for i in range(60)]
    assert [p.partition(b".")[0] for p in payloads(take_all(filtered))] == [b"%d" % i for i in range(60)]


def test_overtaken_cursor_moves_on_and_the_loss_is_counted(place: Place) -> None:
    exact = place.bus.subscribe("t", exact=True)
    filtered = place.bus.subscribe("*")
    members = [exact.join(None, -1, 1), filtered.join(None, -1, 1)]
    for i in range(400):
        place.publish("t", b"%d" % i + b"." * 4000)
        place.log.on_event()
    assert place.log.first > 0
    for subscription, member in zip((exact, filtered), members, strict=True):
        received = take_all(member)
        assert received[-1].offset == 399
        assert [one.offset for one in received] == list(range(received[0].offset, 400))
        assert subscription.lost == received[0].offset
    assert place.bus.lost == exact.lost + filtered.lost


def test_max_pending_skips_the_oldest_and_counts_them(place: Place) -> None:
    subscription = place.bus.subscribe("t", exact=True, max_pending=10)
    member = subscription.join(None, -1, 1)
    for i in range(100):
        place.publish("t", b"%d" % i + b"." * 2000)
    assert [p.partition(b".")[0] for p in payloads(take_all(member))] == [b"%d" % i for i in range(90, 100)]
    assert subscription.lost == 90


@given(st.integers(0, 2**41))
def test_a_delay_is_counted_no_shorter_and_at_most_a_quarter_longer(delay: int) -> None:
    with tempfile.TemporaryDirectory() as path:
        place = Place(Path(path) / "log")
        place.open()
        member = place.bus.subscribe("t", protocol=3).join(None, -1, 1)
        place.publish("t", b"", now=START)
        assert member.receive(START + delay) is not None
        delays = place.bus.stats()["delays"]
        place.close()
    assert delays["relink"]["seconds"] == pytest.approx(delay / 1e6)
    ((end, count),) = delays["relink"]["steps"]
    assert count == 1
    if delay < 2**40:  # the last step has no end
        assert delay < round(end * 1e6) <= max(delay + 1, delay * 1.25 + 1)
    assert all(not others["steps"] for name, others in delays.items() if name != "relink")


def test_unsubscribed_gets_nothing_more(place: Place) -> None:
    exact, filtered = place.bus.subscribe("t", exact=True), place.bus.subscribe("#")
    members = [exact.join(None, -1, 1), filtered.join(None, -1, 1)]
    place.publish("t", b"1")
    for subscription in (exact, filtered):
        place.bus.unsubscribe(subscription)
    place.publish("t", b"2")
    place.bus.dispatch()
    assert [member.receive() for member in members] == [None, None]
    assert place.bus.stats()["subscriptions"] == 0
    with pytest.raises(BusError):
        exact.join(None, -1, 1)


def test_many_topics_and_filters_work(place: Place) -> None:
    place.close()
    bus = place.open(retention_bytes=64 << 20)
    members = {i: bus.subscribe(f"site.{i}.#").join(None, -1, 1) for i in range(1000)}
    everything = bus.subscribe("#").join(None, -1, 1)
    for i in range(10_000):
        place.publish(f"site.{i % 1000}.sensor.{i}", b"%d" % i)
    assert len(take_all(everything)) == 10_000
    assert payloads(take_all(members[7])) == [b"%d" % i for i in range(7, 10_000, 1000)]
    assert bus.stats()["topics"] == 10_000


def test_limits_on_topics_and_their_words_are_clear_errors(tmp_path_factory: pytest.TempPathFactory) -> None:
    place = Place(tmp_path_factory.mktemp("limits") / "log")
    bus = place.open(max_topics=3)
    for i in range(3):
        bus.publish(f"t{i}", b"")
    with pytest.raises(BusError, match="too many topics: the limit is 3"):
        bus.publish("one.more", b"")
    bus.publish("t0", b"")
    with pytest.raises(BusError, match="128 words"):
        bus.publish("." * 200, b"")
    place.close()


def test_dispatch_is_scheduled_once_until_it_ran(place: Place) -> None:
    calls: list[int] = []
    place.bus.schedule = lambda: calls.append(1)
    place.publish("nobody.listens", b"")
    assert calls == []
    place.bus.subscribe("t", exact=True)
    for _ in range(5):
        place.publish("t", b"")
    assert calls == [1]
    place.bus.dispatch()
    place.publish("t", b"")
    assert calls == [1, 1]


def test_bus_that_is_opened_again_has_the_same_topics_and_messages(place: Place) -> None:
    offsets = [place.publish(f"t.{i % 7}", b"%d" % i + b"." * 3000) for i in range(100)]
    bus: Bus = place.reopen()
    member = bus.subscribe("t.3", exact=True, start=0).join(None, -1, 1)
    everything = bus.subscribe("t.#", start=0).join(None, -1, 1)
    assert [one.offset for one in take_all(member)] == offsets[3::7]
    assert [one.offset for one in take_all(everything)] == offsets


def test_kept_subscription_follows_the_safe_end_and_has_nothing_in_flight(place: Place) -> None:
    subscription = place.bus.subscribe("t.#", at_least_once=True, kept=True)
    member = subscription.join(None, -1, 1)
    for i in range(3):
        place.publish("t.1", b"%d" % i, confirmed=True)
    place.log.sync_now()
    received = take_all(member)
    assert payloads(received) == [b"0", b"1", b"2"]
    assert not any(one.confirm for one in received)
    assert subscription.inflight == 0


def test_filter_that_was_idle_for_long_goes_on_at_the_first_message_for_it(place: Place) -> None:
    idle = place.bus.subscribe("rare.#").join(None, -1, 1)
    sent, got = [], []
    for turn in range(40):
        for i in range(50):
            place.publish(f"busy.{i}", b"x")
        if turn % 7 == 0:
            for word in ("a", "b", "a"):
                place.publish(f"rare.{word}.{turn}", f"{turn}{word}".encode())
                sent.append(f"{turn}{word}".encode())
            if turn % 2:  # before anybody was told
                got += payloads(take_all(idle))
        if turn % 3 == 0:
            place.bus.dispatch()
            got += payloads(take_all(idle))
    place.bus.dispatch()
    got += payloads(take_all(idle))
    assert got == sent


@given(st.lists(st.tuples(st.sampled_from(["a.x", "a.y", "b.x", "c"]), st.sampled_from("pdtu")), max_size=60))
def test_filter_misses_nothing_in_any_order_of_publishing_dispatching_and_taking(
    steps: list[tuple[str, str]],
) -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        Log(directory, segment_bytes=1 << 18, pool_segments=1) as log,
    ):
        bus = Bus(log)
        filters = ["a.#", "*.x", "#", "c"]
        members = [bus.subscribe(filter).join(None, -1, 0) for filter in filters]
        safe = bus.subscribe("#.x", at_least_once=True, confirm_all=True).join(None, -1, 0)
        sent: list[str] = []
        taken: list[list[str]] = [[] for _ in members]
        safely: list[str] = []
        for topic, step in [*steps, ("", "d"), ("", "u"), ("", "t")]:
            if step == "p":
                bus.publish(topic, b"")
                sent.append(topic)
            elif step == "d":
                bus.dispatch()
            elif step == "u":
                log.sync_now()
            else:
                for member, found in zip(members, taken, strict=True):
                    while (received := member.receive()) is not None:
                        found.append(received.topic.decode())
                while (received := safe.receive()) is not None:
                    safely.append(received.topic.decode())
        for filter, found in zip(filters, taken, strict=True):
            assert found == [topic for topic in sent if matches(filter, topic)]
        assert safely == [topic for topic in sent if matches("#.x", topic)]
        bus.close()


@pytest.mark.parametrize("filter", ["few.3.#", "few.#", "*.7.x", "#"])
def test_filter_finds_all_of_its_messages_in_sealed_segments_and_in_the_open_one(
    place: Place, filter: str
) -> None:
    """With few topics each is looked up by itself, with many all are looked at; either way nothing is passed by."""
    sent = []
    for i in range(6000):
        topic = f"few.{i % 10}.x" if i % 97 == 0 else f"many.{i % 300}"
        place.publish(topic, bytes(150))
        sent.append(topic)
    assert len(place.log.segments()) > 3
    member = place.bus.subscribe(filter, start=0).join(None, -1, 1)
    found = [received.topic.decode() for received in take_all(member)]
    kept = sent[place.log.first :]  # retention lets the oldest go
    assert found == [topic for topic in kept if matches(filter, topic)]
    place.publish("few.3.x", b"")
    assert len(take_all(member)) == matches(filter, "few.3.x")
