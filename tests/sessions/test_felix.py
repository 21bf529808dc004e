"""What a Felix peer is answered, request by request and in both dialects, and where its streams end: the protocol's
text, the reference's behaviour where the text is silent, and the rule for serving both."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.guarantees import ROOM_TO_GIVE
from headrace.sessions.rights import Rights
from headrace.wire import felix as wire
from tests.oracle import felix as twin
from tests.sessions.felix_gateway import (
    SECOND,
    PassiveFelix,
    Peer,
    answers,
    publish,
    publish_batch,
    subscribe,
)

SCOPE = {"tenant_id": "t", "namespace": "n", "cache": "c"}
OK = {"type": "ok"}


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[PassiveFelix]:
    gateway = PassiveFelix(tmp_path)
    yield gateway
    gateway.close()


@pytest.fixture
def peer(gateway: PassiveFelix) -> Peer:
    return gateway.connect()


# --- publishing (felix, publish; notes 1.4) -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "answer"),
    [
        ({}, []),
        ({"ack": None}, []),
        ({"ack": "none"}, []),
        ({"ack": "per_message"}, [OK]),
        ({"ack": "per_batch"}, [OK]),
        ({"ack": "per_message", "request_id": "r1"}, [OK | {"request_id": "r1"}]),
        ({"request_id": "r1"}, []),
        ({"request_id": 7}, [{"type": "publish_ok", "request_id": 7}]),
        ({"request_id": 7, "ack": "per_message"}, [{"type": "publish_ok", "request_id": 7}]),
        ({"request_id": 7, "ack": "none"}, []),
        ({"request_id": 2**64 - 1}, [{"type": "publish_ok", "request_id": 2**64 - 1}]),
    ],
)
def test_a_publish_is_answered_in_its_own_dialect(
    gateway: PassiveFelix, peer: Peer, wish: dict[str, Any], answer: list[Any]
) -> None:
    assert peer.ask(**publish(b"hello", **wish)) == answer
    assert peer.ask(**publish_batch([b"a", b"b"], **wish)) == answer
    assert gateway.messages() == [("t.n.s", b"hello"), ("t.n.s", b"a"), ("t.n.s", b"b")]


def test_an_empty_batch_is_confirmed_and_appends_nothing(gateway: PassiveFelix, peer: Peer) -> None:
    assert peer.ask(**publish_batch([], request_id=1)) == [{"type": "publish_ok", "request_id": 1}]
    assert peer.stream().send(wire.encode_publish_batch("t", "n", "s", [])) == []
    assert gateway.messages() == []


def test_a_binary_batch_is_published_in_order_and_not_answered(gateway: PassiveFelix, peer: Peer) -> None:
    stream = peer.stream()
    assert stream.send(wire.encode_publish_batch("t", "n", "s", [b"a", b"", b"c"])) == []
    assert stream.send(wire.encode_publish_batch("t", "n", "other", [b"d"]) * 2) == []
    assert gateway.messages() == [
        *(("t.n.s", one) for one in (b"a", b"", b"c")),
        ("t.n.other", b"d"),
        ("t.n.other", b"d"),
    ]


def test_names_with_dots_become_one_topic_each(gateway: PassiveFelix, peer: Peer) -> None:
    peer.ask(**{**publish(), "tenant_id": "a.b", "namespace": "50%", "stream": "x.y"})
    assert gateway.messages() == [("a%2Eb.50%25.x.y", b"m")]


def test_records_say_who_sent_them(gateway: PassiveFelix, peer: Peer) -> None:
    peer.ask(**publish(request_id=42))
    (record,) = list(gateway.log.reader())
    assert (record.origin_name, record.correlation, record.protocol) == (b"dev@127.0.0.1:4000", 42, 5)


def test_base64_with_escapes_is_published_as_what_it_means(gateway: PassiveFelix, peer: Peer) -> None:
    text = json.dumps(publish_batch([b"\xff\xff", b"a"])).replace("//8=", "\\/\\/\\u0038=")
    assert peer.stream().send(twin.frame(text.encode())) == []
    assert [payload for _, payload in gateway.messages()] == [b"\xff\xff", b"a"]


@pytest.mark.parametrize("payload", ["YQ", "YQ=", "YR==", "Y Q=", "-_8=", "YQ==\n", 1, None, ["YQ=="]])
def test_a_payload_that_is_no_base64_is_refused(gateway: PassiveFelix, peer: Peer, payload: Any) -> None:
    refusal = {"type": "error", "message": "payload is not Base64 with padding"}
    assert peer.ask(**{**publish(), "payload": payload}) == [refusal]
    (answer,) = peer.ask(**{**publish(request_id=3), "payload": payload})
    assert (answer["type"], answer["request_id"]) == ("publish_error", 3)
    assert peer.ask(**{**publish(request_id=3, ack="none"), "payload": payload}) == []
    assert gateway.messages() == []


def test_a_batch_with_one_bad_payload_is_refused_as_a_whole(gateway: PassiveFelix, peer: Peer) -> None:
    wish = publish_batch([b"a", b"b"], ack="per_batch", request_id="r")
    wish["payloads"].append("!")
    (answer,) = peer.ask(**wish)
    assert (answer["type"], answer["request_id"]) == ("error", "r")
    assert gateway.messages() == []


def test_publishes_on_one_stream_are_answered_in_order(peer: Peer) -> None:
    data = b"".join(twin.encode_message(publish(request_id=i)) for i in range(20))
    assert [one["request_id"] for one in peer.stream().send(data)] == list(range(20))


@pytest.mark.parametrize("field", ["payload", "more"])
def test_values_nested_too_deep_get_an_error_and_the_stream_goes_on(peer: Peer, field: str) -> None:
    deep = b'{"type":"publish","tenant_id":"t","namespace":"n","stream":"s","%b":%b%b}' % (
        field.encode(),
        b"[" * 100_000,
        b"]" * 100_000,
    )
    refused, done = peer.stream().send(twin.frame(deep) + twin.encode_message(publish(request_id=1)))
    assert refused["type"] == "error"
    assert done == {"type": "publish_ok", "request_id": 1}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(st.data())
def test_every_split_of_a_stream_gives_the_same_answers(peer: Peer, data: st.DataObject) -> None:
    said = b"".join(
        [
            twin.encode_message(publish(b"a", request_id=1)),
            wire.encode_publish_batch("t", "n", "s", [b"b"]),
            twin.encode_message({"type": "cache_get", "key": "none", "request_id": "x"}),
            twin.frame(b"no json"),
            twin.encode_message(publish_batch([b"c"], ack="per_batch")),
        ]
    )
    whole = peer.stream().send(said)
    assert len(whole) == 4
    at = data.draw(st.integers(0, len(said)))
    stream = peer.stream()
    assert (
        answers(
            stream.session.feed(said[:at], peer.gateway.now)
            + stream.session.feed(said[at:], peer.gateway.now)
        )
        == whole
    )


# --- what waits for the sync ----------------------------------------------------------------------------------


def test_a_publish_is_confirmed_only_when_it_is_safe(tmp_path: Path) -> None:
    gateway = PassiveFelix(tmp_path, log={"sync": "always"})
    try:
        stream = gateway.connect().stream()
        held = stream.send(
            twin.encode_message(publish(request_id=1)) + twin.encode_message(publish(ack="per_message"))
        )
        assert held == []
        gateway.log.sync_now()
        assert stream.send(b"") == [{"type": "publish_ok", "request_id": 1}, OK]
    finally:
        gateway.close()


def test_a_full_log_blocks_a_stream_and_then_refuses(tmp_path: Path) -> None:
    gateway = PassiveFelix(tmp_path, log={"retention_bytes": 1 << 20}, block_timeout=2)
    try:
        gateway.log.hold("test", 0)
        peer = gateway.connect()
        stream = peer.stream()
        batch = twin.encode_message(publish_batch([bytes(20_000)] * 3, request_id=1))
        count = 0
        while not (stream.session.blocked and gateway.log.full):
            if not stream.session.blocked:
                count += len(stream.send(batch))
            else:  # the next segment may still be being prepared
                time.sleep(0.01)
                count += len(stream.send(b""))
            gateway.log.tick(gateway.now)
        assert stream.session.waits_space
        # A batch is there as a whole or not at all.
        assert len(gateway.messages()) == 3 * count
        gateway.now += SECOND
        stream.send(b"")
        assert stream.session.blocked
        gateway.now += 2 * SECOND
        (refusal,) = stream.send(b"")
        assert (refusal["type"], refusal["request_id"]) == ("publish_error", 1)
        assert refusal["message"].startswith("publish failed: ")
        assert len(gateway.messages()) == 3 * count
        assert gateway.counted("refused_full") == 1
        binary = wire.encode_publish_batch("t", "n", "s", [bytes(20_000)] * 3)
        other = gateway.connect().stream(one_way=True)
        other.send(binary)
        assert other.session.blocked
        gateway.now += 3 * SECOND
        other.send(b"")
        assert not other.session.blocked
        assert gateway.counted("dropped_full") == 3
    finally:
        gateway.close()


def test_a_batch_larger_than_a_segment_is_refused(gateway: PassiveFelix, peer: Peer) -> None:
    (answer,) = peer.ask(**publish_batch([b"x"] * 5000, request_id=1))
    assert (answer["type"], answer["request_id"]) == ("publish_error", 1)
    assert gateway.messages() == []
    assert gateway.counted("too_large") == 5000


# --- subscribing (felix, subscribe; notes 1.4, 1.6) -----------------------------------------------------------


def test_a_subscription_of_the_specification_gets_json(gateway: PassiveFelix, peer: Peer) -> None:
    stream = peer.stream()
    assert stream.say(**subscribe()) == [OK]
    assert not stream.session.closing
    assert peer.got() == [{"type": "event_stream_hello", "subscription_id": "1"}]
    stream.say(**publish(b"one"))
    address = {"tenant_id": "t", "namespace": "n", "stream": "s"}
    assert peer.got() == [{"type": "event", **address, "payload": twin.b64(b"one")}]
    stream.say(**publish_batch([b"two", b"three"]))
    stream.say(**publish(b"four"))
    assert peer.got() == [
        {"type": "event_batch", **address, "payloads": [twin.b64(one) for one in (b"two", b"three", b"four")]}
    ]
    assert peer.got() == []


def test_a_subscription_of_the_reference_gets_binary_batches(gateway: PassiveFelix, peer: Peer) -> None:
    stream = peer.stream()
    said = twin.encode_message(subscribe(subscription_id=7)) + twin.encode_message(publish(request_id=1))
    assert stream.send(said) == [{"type": "subscribed", "subscription_id": 7}]
    assert stream.session.closing
    assert gateway.messages() == []  # what is pipelined behind it is not read
    assert peer.got() == [{"type": "event_stream_hello", "subscription_id": 7}]
    peer.ask(**publish(b"one"))
    assert peer.got() == [(7, [b"one"])]
    peer.ask(**publish_batch([b"two", b""]))
    assert peer.got() == [(7, [b"two", b""])]


@pytest.mark.parametrize(
    ("wish", "reference", "answer", "hello"),
    [
        ({"request_id": "r"}, False, OK | {"request_id": "r"}, "1"),
        ({"subscription_id": "mine"}, False, OK, "mine"),
        ({"request_id": 5}, False, {"type": "subscribed", "subscription_id": 1}, 1),
        ({}, True, {"type": "subscribed", "subscription_id": 1}, 1),
        ({"request_id": "r"}, True, OK | {"request_id": "r"}, "1"),
    ],
)
def test_the_dialect_of_a_subscription_shows_in_its_ids(
    gateway: PassiveFelix, peer: Peer, wish: dict[str, Any], reference: bool, answer: Any, hello: Any
) -> None:
    gateway.shared.reference = reference
    assert peer.ask(**subscribe(**wish)) == [answer]
    assert peer.got() == [{"type": "event_stream_hello", "subscription_id": hello}]


def test_a_subscription_begins_at_the_tail_and_ends_with_its_stream(
    gateway: PassiveFelix, peer: Peer
) -> None:
    peer.ask(**publish(b"before"))
    peer.ask(**subscribe(subscription_id=1))
    peer.got()
    assert peer.got() == []
    peer.events[0].leave(gateway.now)
    assert not gateway.bus.subscriptions
    assert peer.ask(**subscribe(subscription_id=1)) == [{"type": "subscribed", "subscription_id": 1}]


def test_an_id_is_used_once_on_a_connection(gateway: PassiveFelix, peer: Peer) -> None:
    peer.ask(**subscribe(subscription_id=1))
    assert peer.ask(**subscribe(subscription_id=1)) == [
        {"type": "error", "message": "subscription_id 1 is in use on this connection"}
    ]
    assert gateway.connect().ask(**subscribe(subscription_id=1)) == [
        {"type": "subscribed", "subscription_id": 1}
    ]


def test_subscriptions_of_a_connection_are_limited(gateway: PassiveFelix, peer: Peer) -> None:
    gateway.shared.max_subscriptions = 2
    for i in range(2):
        assert peer.ask(**subscribe(subscription_id=i)) == [{"type": "subscribed", "subscription_id": i}]
    (answer,) = peer.ask(**subscribe(subscription_id=9))
    assert answer["message"] == "too many subscriptions: a connection has 2 at most"


@pytest.mark.parametrize("ids", [{}, {"subscription_id": 3}])
def test_frames_of_events_end_by_count_and_by_bytes(
    gateway: PassiveFelix, peer: Peer, ids: dict[str, Any]
) -> None:
    gateway.shared.batch_events = 4
    gateway.shared.batch_bytes = 100
    peer.ask(**subscribe(**ids))
    peer.got()
    peer.stream().send(wire.encode_publish_batch("t", "n", "s", [b"x"] * 10 + [b"y" * 60] * 4))

    def sizes(frame: Any) -> int:
        if isinstance(frame, tuple):
            return len(frame[1])
        return len(frame["payloads"]) if "payloads" in frame else 1

    assert [sizes(frame) for frame in peer.got()] == [4, 4, 4, 2]


def test_delivery_stops_where_there_is_no_room(gateway: PassiveFelix, peer: Peer) -> None:
    gateway.shared.batch_events = 4
    peer.ask(**subscribe(subscription_id=3))
    peer.got()
    peer.stream().send(wire.encode_publish_batch("t", "n", "s", [bytes(100)] * 100))
    seen = peer.got(room=1000)
    assert 8 <= sum(len(frame[1]) for frame in seen) <= 12
    assert peer.events[0].more
    while peer.events[0].more:
        seen += peer.got(room=1000)
    assert sum(len(frame[1]) for frame in seen) == 100


def test_an_event_that_no_frame_can_carry_is_left_out_and_counted(tmp_path: Path) -> None:
    gateway = PassiveFelix(tmp_path, max_length=1000)
    try:
        peer = gateway.connect()
        peer.ask(**subscribe(subscription_id=1))
        peer.ask(**subscribe())
        peer.got(0), peer.got(1)
        topic = gateway.log.topic("t.n.s")
        gateway.bus.publish("t.n.s", bytes(900), now=gateway.now)
        gateway.bus.publish("t.n.s", b"small", now=gateway.now)
        assert topic
        assert peer.got(0) == [(1, [bytes(900), b"small"])]
        assert [one["payload"] for one in peer.got(1)] == [twin.b64(b"small")]
        assert gateway.counted("too_large") == 1
    finally:
        gateway.close()


def test_largest_event_is_the_one_that_the_guarantees_say(tmp_path: Path) -> None:
    room = {one.mode: one for one in ROOM_TO_GIVE if one.protocol == "felix"}
    as_json, as_binary = room["`event`"].largest(1000, len("tns")), room["binary events"].largest(1000)
    gateway = PassiveFelix(tmp_path, max_length=1000)
    try:
        peer = gateway.connect()
        peer.ask(**subscribe(subscription_id=1))
        peer.ask(**subscribe())
        peer.got(0), peer.got(1)
        for size in (as_json, as_json + 1, as_binary, as_binary + 1):
            gateway.bus.publish("t.n.s", bytes(size), now=gateway.now)
        events = [payload for _, payloads in peer.got(0) for payload in payloads]
        assert [len(payload) for payload in events] == [as_json, as_json + 1, as_binary]
        assert [one["payload"] for one in peer.got(1)] == [twin.b64(bytes(as_json))]
        assert gateway.counted("too_large") == 1 + 3
    finally:
        gateway.close()


def test_messages_of_other_protocols_arrive(gateway: PassiveFelix, peer: Peer) -> None:
    peer.ask(**subscribe(subscription_id=1))
    peer.got()
    gateway.bus.publish("t.n.s", b"from elsewhere", now=gateway.now)
    assert peer.got() == [(1, [b"from elsewhere"])]


def test_topics_without_an_address_are_counted(gateway: PassiveFelix) -> None:
    for topic in ("demo", "a.b", "a.b.c", "x%.y.z"):
        gateway.bus.publish(topic, b"", now=gateway.now)
    assert gateway.counted("topics_without_address") == 3
    assert gateway.counted("topics_without_address") == 3


# --- the cache (felix, cache; notes 1.8) ----------------------------------------------------------------------


def put(key: str, value: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "cache_put", "key": key, "value": twin.b64(value), **more}


def get(key: str, **more: Any) -> dict[str, Any]:
    return {"type": "cache_get", "key": key, **more}


def value_of(answer: list[Any]) -> bytes | None:
    (one,) = answer
    assert one["type"] == "cache_value"
    return None if one["value"] is None else twin.unb64(one["value"])


def test_the_cache_answers_in_the_specifications_dialect(peer: Peer) -> None:
    stream = peer.stream()
    assert stream.say(**put("k", b"v", request_id="1")) == [OK | {"request_id": "1"}]
    answer = {"type": "cache_value", "request_id": "2", "key": "k", "value": twin.b64(b"v")}
    assert stream.say(**get("k", request_id="2")) == [answer]
    assert stream.say(**get("none", request_id="3")) == [
        {"type": "cache_value", "request_id": "3", "key": "none", "value": None}
    ]
    assert stream.say(**put("k", b"w")) == [OK]
    assert value_of(stream.say(**get("k"))) == b"w"
    assert not stream.session.closing


def test_the_cache_answers_in_the_references_dialect(peer: Peer) -> None:
    stream = peer.stream()
    assert stream.say(**put("k", b"v", **SCOPE, request_id=1)) == [{"type": "cache_ok", "request_id": 1}]
    answer = {"type": "cache_value", **SCOPE, "key": "k", "value": twin.b64(b"v"), "request_id": 2}
    assert stream.say(**get("k", **SCOPE, request_id=2)) == [answer]
    assert not stream.session.closing
    # Without an id a stream is good for one request.
    one = peer.stream()
    assert one.say(**put("k", b"v", **SCOPE)) == [OK]
    assert one.session.closing
    two = peer.stream()
    (reply,) = two.say(**get("k", **SCOPE))
    assert "request_id" not in reply
    assert two.session.closing


def test_scopes_are_kept_apart(peer: Peer) -> None:
    peer.ask(**put("k", b"scoped", **SCOPE, request_id=1))
    peer.ask(**put("k", b"plain", request_id="1"))
    peer.ask(**put("k", b"other", **{**SCOPE, "cache": "d"}, request_id=1))
    assert value_of(peer.ask(**get("k", **SCOPE, request_id=1))) == b"scoped"
    assert value_of(peer.ask(**get("k", request_id="1"))) == b"plain"


def test_requests_are_pipelined(peer: Peer) -> None:
    data = b"".join(
        twin.encode_message(put(f"k{i}", b"%d" % i, request_id=f"p{i}"))
        + twin.encode_message(get(f"k{i}", request_id=f"g{i}"))
        for i in range(50)
    )
    found = peer.stream().send(data)
    assert [one["request_id"] for one in found] == [f"{kind}{i}" for i in range(50) for kind in "pg"]


def test_a_value_lives_as_long_as_its_ttl_says(gateway: PassiveFelix, peer: Peer) -> None:
    peer.ask(**put("k", b"v", ttl_ms=1000))
    peer.ask(**put("gone", b"v", ttl_ms=0))
    assert value_of(peer.ask(**get("gone"))) is None
    gateway.now += SECOND - 1
    assert value_of(peer.ask(**get("k"))) == b"v"
    gateway.now += 1
    assert len(gateway.shared.cache) == 1  # removed when it is asked for
    assert value_of(peer.ask(**get("k"))) is None
    assert len(gateway.shared.cache) == 0
    assert gateway.counted("cache_expired") == 2
    # Another put clears what the first one said.
    peer.ask(**put("k", b"v", ttl_ms=1000))
    peer.ask(**put("k", b"w", ttl_ms=None))
    gateway.now += 10 * SECOND
    assert value_of(peer.ask(**get("k"))) == b"w"
    assert peer.ask(**put("k", b"v", ttl_ms=2**64 - 1)) == [OK]
    assert value_of(peer.ask(**get("k"))) == b"v"


def test_the_cache_is_bounded_and_what_was_used_least_goes_first(gateway: PassiveFelix, peer: Peer) -> None:
    gateway.shared.cache.max_entries = 3
    for key in "abc":
        peer.ask(**put(key, b"v"))
    peer.ask(**get("a"))
    peer.ask(**put("d", b"v"))
    assert value_of(peer.ask(**get("b"))) is None
    assert value_of(peer.ask(**get("a"))) == b"v"
    assert gateway.shared.gauges()["cache_entries"] == 3
    assert gateway.counted("cache_evicted") == 1
    gateway.shared.cache.max_bytes = 5000
    for i in range(20):
        peer.ask(**put(f"large{i}", bytes(1000)))
    assert 0 < gateway.shared.gauges()["cache_bytes"] <= 5000
    (answer,) = peer.ask(**put("huge", bytes(5000), request_id="r"))
    assert (answer["type"], answer["request_id"]) == ("error", "r")
    assert gateway.counted("cache_refused") == 1


def said(gateway: PassiveFelix, **message: Any) -> Any:
    """What one request on a stream of its own is answered, in a frame that is no larger than frames are."""
    data = gateway.connect().stream().session.feed(twin.encode_message(message), gateway.now)
    assert len(data) <= wire.HEADER_BYTES + gateway.shared.max_length
    (answer,) = answers(data)
    return answer


@pytest.mark.parametrize("scope", [{}, SCOPE], ids=["plain", "scoped"])
def test_a_value_that_no_answer_can_have_is_not_taken(tmp_path: Path, scope: dict[str, str]) -> None:
    gateway = PassiveFelix(tmp_path, max_length=1000)
    key = "k" * 20
    largest = refused = 0
    for size in range(0, 800, 3):
        wish = put(key, bytes(size), **scope)
        if len(twin.encode_message(wish)) > wire.HEADER_BYTES + 1000:
            break
        answer = said(gateway, **wish)
        if answer == OK:
            largest = size
        else:
            refused += 1
            assert answer["message"] == "the value is too large: no frame could have it together with its key"
        assert twin.unb64(said(gateway, **get(key, **scope))["value"]) == bytes(largest)
    assert largest > 600
    assert gateway.counted("cache_refused") == refused > 0
    gateway.close()


def test_no_answer_is_larger_than_a_frame_whatever_it_echoes(tmp_path: Path) -> None:
    gateway = PassiveFelix(tmp_path, max_length=1000)
    assert said(gateway, **put("k", bytes(600))) == OK
    too_large = {"type": "error", "message": "the answer is too large for a frame"}
    assert said(gateway, **get("k", request_id="r" * 50))["type"] == "cache_value"
    assert said(gateway, **get("k", request_id="r" * 300)) == {**too_large, "request_id": "r" * 300}
    assert said(gateway, **get("k", request_id="r" * 930)) == too_large
    assert gateway.counted("too_large") == 3
    gateway.close()


def test_a_value_that_is_no_base64_is_refused(gateway: PassiveFelix, peer: Peer) -> None:
    (answer,) = peer.ask(**{**put("k", b""), "value": "!"})
    assert answer["message"] == "value is not Base64 with padding"
    assert len(gateway.shared.cache) == 0


def test_who_does_not_read_answers_is_not_read(gateway: PassiveFelix, peer: Peer) -> None:
    peer.ask(**put("k", bytes(50_000)))
    stream = peer.stream()
    stream.session.high_water = 100_000
    found = stream.send(b"".join(twin.encode_message(get("k", request_id=f"{i}")) for i in range(10)))
    assert len(found) == 2
    assert stream.session.waits_room
    while stream.session.kept:
        found += stream.send(b"")
    assert len(found) == 10


# --- the registry and rights ----------------------------------------------------------------------------------


def test_a_strict_registry_refuses_what_it_does_not_know(gateway: PassiveFelix, peer: Peer) -> None:
    gateway.shared.register(True, [("t", "n", "s")], [("t", "n", "c")])
    assert peer.ask(**publish(ack="per_message")) == [OK]
    text = "stream not found: tenant=t namespace=n stream=x"
    assert peer.ask(**publish(stream="x", ack="per_message")) == [{"type": "error", "message": text}]
    assert peer.ask(**publish(stream="x", request_id=1)) == [
        {"type": "publish_error", "request_id": 1, "message": text}
    ]
    assert peer.ask(**publish(stream="x", request_id=1, ack="none")) == []
    assert peer.ask(**subscribe(stream="x")) == [{"type": "error", "message": text}]
    stream = peer.stream()
    assert stream.say(**subscribe(stream="x", subscription_id=1)) == [{"type": "error", "message": text}]
    assert stream.session.closing
    assert peer.stream().send(wire.encode_publish_batch("t", "n", "x", [b"a"])) == [
        {"type": "error", "message": text}
    ]
    gateway.shared.reference = True
    assert peer.stream().send(wire.encode_publish_batch("t", "n", "x", [b"a"])) == []
    assert peer.ask(**put("k", b"v", **SCOPE, request_id=1)) == [{"type": "cache_ok", "request_id": 1}]
    other = {**SCOPE, "cache": "x"}
    assert peer.ask(**get("k", **other, request_id=1)) == [
        {"type": "error", "message": "cache scope not found: t/n/x"}
    ]
    assert gateway.counted("not_found") == 8
    assert [topic for topic, _ in gateway.messages()] == ["t.n.s"]


def test_a_stream_that_is_taken_from_the_registry_ends_its_subscriptions(
    gateway: PassiveFelix, peer: Peer
) -> None:
    gateway.shared.register(True, [("t", "n", "s")], [])
    peer.ask(**subscribe(subscription_id=1))
    stream = peer.stream()
    assert stream.say(**publish(request_id=1)) == [{"type": "publish_ok", "request_id": 1}]
    gateway.shared.register(True, [], [])
    peer.events[0].elapse(gateway.now)
    assert peer.events[0].closing
    (answer,) = stream.say(**publish(request_id=2))
    assert answer["type"] == "publish_error"


def test_a_missing_right_is_unauthorized(gateway: PassiveFelix) -> None:
    reader = gateway.connect(Rights("reader", [], ["t.n.#"]))
    (answer,) = reader.ask(**publish(ack="per_message", request_id="r"))
    assert answer == {
        "type": "error",
        "request_id": "r",
        "message": "unauthorized: 'reader' may not publish to 't.n.s'",
    }
    assert reader.ask(**subscribe()) == [OK]
    (answer,) = reader.ask(**subscribe(stream="s", request_id="r") | {"tenant_id": "u"})
    assert answer["message"].startswith("unauthorized")
    (answer,) = reader.ask(**put("k", b"v", **SCOPE, request_id=1))
    assert answer["message"].startswith("unauthorized")
    assert value_of(reader.ask(**get("k", **SCOPE, request_id=1))) is None
    (answer,) = reader.ask(**get("k"))
    assert answer["message"].startswith("unauthorized")
    assert (
        reader.stream()
        .send(wire.encode_publish_batch("t", "n", "s", [b"a"]))[0]["message"]
        .startswith("unauth")
    )
    nobody = gateway.connect(nobody=True)
    (answer,) = nobody.ask(**publish(request_id=1))
    assert (answer["type"], answer["message"][:12]) == ("publish_error", "unauthorized")
    assert gateway.messages() == []
    assert gateway.counted("unauthorized") == 6


def test_other_rights_hold_at_once_also_for_streams_that_are_open(gateway: PassiveFelix, peer: Peer) -> None:
    batch = wire.encode_publish_batch("t", "n", "s", [b"a"])
    stream = peer.stream()
    assert stream.send(batch) == []
    peer.ask(**subscribe(subscription_id=1))
    peer.got()
    peer.peer.set_rights(Rights("reader", [], ["t.#"]), "127.0.0.1:4001")
    assert stream.send(batch)[0]["message"].startswith("unauthorized: 'reader'")
    assert stream.say(**publish(request_id=1))[0]["type"] == "publish_error"
    peer.events[0].elapse(gateway.now)
    assert not peer.events[0].closing
    peer.peer.set_rights(Rights("writer", ["t.#"], []), "127.0.0.1:4002")
    assert stream.send(batch) == []
    peer.events[0].elapse(gateway.now)
    assert peer.events[0].closing
    peer.peer.set_rights(None, "127.0.0.1:4003")
    assert stream.send(batch)[0]["message"].startswith("unauthorized: a peer at 127.0.0.1:4003")
    sources = [record.origin_name for record in gateway.log.reader()]
    assert sources == [b"dev@127.0.0.1:4000", b"writer@127.0.0.1:4002"]


@pytest.mark.parametrize("names", [("", "n", "s"), ("t", "", "s"), ("t", "n", "")])
def test_empty_names_are_refused(peer: Peer, names: tuple[str, str, str]) -> None:
    tenant, namespace, stream = names
    wish = {**publish(ack="per_message"), "tenant_id": tenant, "namespace": namespace, "stream": stream}
    (answer,) = peer.ask(**wish)
    assert answer["message"] == "tenant_id, namespace and stream must not be empty"
    (answer,) = peer.stream().send(wire.encode_publish_batch(*names, [b""]))
    assert answer["type"] == "error"


# --- errors and kinds of streams (felix, error handling; notes 1.5) -------------------------------------------


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"HTTP/1.1 200", "bad frame magic 48545450"),
        (b"FLX1\x00\x02\x00\x00\x00\x00\x00\x00", "unsupported protocol version 2"),
        (b"FLX1\x00\x01\x00\x00\x01\x00\x00\x01", "frame length 16777217 is above 16777216"),
    ],
)
@pytest.mark.parametrize("mild", [False, True])
@pytest.mark.parametrize("one_way", [False, True])
def test_a_malformed_header_ends_the_connection_or_mildly_the_stream(
    gateway: PassiveFelix, peer: Peer, header: bytes, reason: str, mild: bool, one_way: bool
) -> None:
    gateway.shared.mild = mild
    stream = peer.stream(one_way)
    assert stream.send(header) == []
    assert stream.session.closing
    assert stream.session.violation == (None if mild else reason)
    assert gateway.counted("bad_headers") == 1


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"no json", b'{"type":"hop"}', b'{"type":"publish"}', b"\xff"]
)
def test_what_is_no_message_gets_an_error_and_the_stream_goes_on(peer: Peer, payload: bytes) -> None:
    stream = peer.stream()
    first, second = stream.send(twin.frame(payload) + twin.encode_message(publish(request_id=1)))
    assert first["type"] == "error"
    assert second == {"type": "publish_ok", "request_id": 1}


def test_unknown_flags_are_ignored(gateway: PassiveFelix, peer: Peer) -> None:
    batch = wire.encode_publish_batch("t", "n", "s", [b"a"])[12:]
    assert peer.stream().send(twin.frame(batch, 0xFFFF)) == []
    message = json.dumps(publish(b"b")).encode()
    assert peer.stream().send(twin.frame(message, 0xFFFE)) == []
    assert [payload for _, payload in gateway.messages()] == [b"a", b"b"]


@pytest.mark.parametrize("kind", ["ok", "subscribed", "publish_ok", "cache_ok", "event_stream_hello"])
def test_what_only_a_server_says_is_unexpected(gateway: PassiveFelix, peer: Peer, kind: str) -> None:
    stream = peer.stream()
    assert stream.say(type=kind) == [{"type": "error", "message": "unexpected message type"}]
    assert stream.session.closing
    stream = peer.stream()
    assert stream.say(type="error", message="sorry") == []
    assert stream.session.closing
    assert gateway.counted("wrong_kind") == 2


def test_a_one_way_stream_takes_publishes_alone(gateway: PassiveFelix, peer: Peer) -> None:
    stream = peer.stream(one_way=True)
    said = [
        twin.encode_message(publish(b"a", request_id=1)),
        twin.encode_message(publish_batch([b"b"], ack="per_batch")),
        wire.encode_publish_batch("t", "n", "s", [b"c"]),
        twin.encode_message(get("k")),
        twin.encode_message(publish(b"d")),
    ]
    assert stream.send(b"".join(said)) == []
    assert stream.session.closing
    assert [payload for _, payload in gateway.messages()] == [b"a", b"b", b"c"]
    for wrong in (subscribe(), put("k", b"v"), {"type": "hop"}):
        stream = peer.stream(one_way=True)
        assert stream.say(**wrong) == []
        assert stream.session.closing
    assert len(gateway.shared.cache) == 0


def test_a_malformed_batch_gets_an_error_and_the_stream_goes_on(gateway: PassiveFelix, peer: Peer) -> None:
    stream = peer.stream()
    bad = twin.frame(b"\0\1t\0\1n\0\1s\0\0\0\2\0\0\0\1a", wire.FLAG_PUBLISH_BATCH)
    assert stream.send(bad) == [{"type": "error", "message": "malformed publish batch"}]
    assert stream.send(twin.encode_message(publish(request_id=1))) == [
        {"type": "publish_ok", "request_id": 1}
    ]
    assert gateway.counted("bad_batches") == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans(), st.integers(0, 3))
def test_any_bytes_are_survived(peer: Peer, data: bytes, one_way: bool, flags: int) -> None:
    stream = peer.stream(one_way)
    stream.session.feed(data, peer.gateway.now)
    framed = peer.stream(one_way)
    framed.session.feed(twin.frame(data, flags), peer.gateway.now)
    assert framed.session.kept == 0
