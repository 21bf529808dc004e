"""What a BlipMQ peer is answered, frame by frame, and where its connection ends: the protocol's text, its
daemon's behaviour where the text is silent, and docs/protocols/blipmq.md where this gateway does better."""

import gc
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.schema import Key
from headrace.log import LogReader
from headrace.mapping import Map, Rule
from headrace.sessions.blipmq import Blipmq, BlipmqSession
from headrace.wire import blipmq as wire
from tests.oracle.blipmq import frame
from tests.sessions.passive_gateway import SECOND, Client, PassiveGateway

CONTROL_SUBSCRIPTION, CONTROL_IDS = 16, 21  # of the bus, in the log
HELLO, AUTH, PUBLISH, SUBSCRIBE, ACK, NACK, PING, PONG, POLL = range(1, 10)
CIDS = [0, 1, 0x0102030405060708, 2**64 - 1]
MAX = 16 * 1024 * 1024


def text(value: bytes) -> bytes:
    return struct.pack(">H", len(value)) + value


def u64(value: int) -> bytes:
    return struct.pack(">Q", value)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[PassiveGateway]:
    gateway = PassiveGateway(tmp_path)
    yield gateway
    gateway.close()


def all_records(gateway: PassiveGateway) -> list[Any]:
    """Every record of the log, control records included."""
    reader = LogReader(gateway.log.path)
    return list(iter(lambda: reader.read(controls=True), None))


def in_state(gateway: PassiveGateway, state: str) -> Client:
    if state == "authenticated":
        return gateway.connect()
    client = gateway.connect(None)
    if state == "greeted":
        client.send(wire.encode_hello(1, 1))
    return client


def nack(code: int, said: str, cid: int) -> bytes:
    return wire.encode_nack(code, said, cid)


# --- each frame, its checks in order, and its answer (notes 1.2, 1.3) ---------------------------------------

# state, frame type, payload, NACK code, NACK text; a code of 0 is silence.
REFUSALS: list[tuple[str, int, bytes, int, str]] = [
    *[("fresh", HELLO, payload, 400, "invalid HELLO payload") for payload in (b"", b"\x01", b"\0\x01\0")],
    *[
        ("fresh", HELLO, struct.pack(">H", version), 426, "unsupported protocol version")
        for version in (0, 2, 256, 65535)
    ],
    ("fresh", AUTH, text(b"dev-key"), 400, "HELLO not performed"),
    ("fresh", AUTH, b"", 400, "HELLO not performed"),
    *[
        (state, kind, payload, 401, "unauthenticated")
        for state in ("fresh", "greeted")
        for kind, payload in [
            (PUBLISH, b"\0" + text(b"t") + b"m"),
            (PUBLISH, b""),
            (SUBSCRIBE, text(b"t") + b"\0"),
            (SUBSCRIBE, b""),
            (ACK, u64(1)),
            (ACK, b""),
            (NACK, b"\x01\x90" + text(b"no")),
            (NACK, b""),
            (PING, b""),
            (PONG, b""),
            (POLL, u64(1)),
            (POLL, b""),
        ]
    ],
    ("greeted", HELLO, b"\0\x01", 400, "HELLO already performed"),
    ("greeted", HELLO, b"\0\x02", 400, "HELLO already performed"),
    ("greeted", HELLO, b"", 400, "HELLO already performed"),
    *[
        ("greeted", AUTH, payload, 400, "invalid AUTH payload")
        for payload in (
            b"",
            b"\0",
            b"\0\x08dev-key",
            b"\0\x06dev-key",
            text(b"dev-key") + b"\0",
            b"\0\x01",
            text(b"\xff\xfe"),
            text(b"\xed\xa0\x80"),
            text(b"caf\xc3"),
        )
    ],
    *[
        ("greeted", AUTH, text(key), 401, "invalid API key")
        for key in (b"", b"dev-ke", b"dev-key2", b"DEV-KEY", b"dev-key\0", b"x" * 65535)
    ],
    ("authenticated", HELLO, b"\0\x01", 400, "HELLO already performed"),
    ("authenticated", HELLO, b"", 400, "HELLO already performed"),
    ("authenticated", AUTH, text(b"dev-key"), 400, "already authenticated"),
    ("authenticated", AUTH, text(b"wrong"), 400, "already authenticated"),
    ("authenticated", AUTH, b"", 400, "already authenticated"),
    *[
        ("authenticated", PUBLISH, payload, 400, "invalid PUBLISH payload")
        for payload in (
            b"",
            b"\0",
            b"\0\0",
            b"\x01\0\x02t",
            b"\x07\0\x02t",
            b"\x01\xff\xfft",
            b"\x01" + text(b"\xff"),
            b"\x07" + text(b"\xc0\xaf") + b"m",
        )
    ],
    ("authenticated", PUBLISH, b"\0" + text(b"") + b"m", 400, "empty topic"),
    ("authenticated", PUBLISH, b"\x07" + text(b""), 400, "empty topic"),
    *[
        ("authenticated", PUBLISH, bytes([qos]) + text(b"t") + b"m", 400, "invalid QoS value")
        for qos in (2, 3, 7, 255)
    ],
    *[
        ("authenticated", SUBSCRIBE, payload, 400, "invalid SUBSCRIBE payload")
        for payload in (
            b"",
            b"\0",
            b"\0\0",
            b"\0\x01t",
            b"\0\x02t\x01",
            b"\xff\xfft\x01",
            text(b"\xff") + b"\x01",
            text(b"\xf5\x80\x80\x80") + b"\x07",
        )
    ],
    ("authenticated", SUBSCRIBE, text(b"") + b"\x01", 400, "empty topic"),
    ("authenticated", SUBSCRIBE, text(b"") + b"\x07", 400, "empty topic"),
    *[
        ("authenticated", SUBSCRIBE, text(b"t") + bytes([qos]), 400, "invalid QoS value")
        for qos in (2, 3, 7, 255)
    ],
    *[
        ("authenticated", ACK, payload, 400, "invalid ACK payload")
        for payload in (b"", u64(0)[:7], u64(0) + b"\0")
    ],
    ("authenticated", ACK, u64(0), 400, "subscription_id must be non-zero"),
    *[
        ("authenticated", ACK, u64(id), 404, "unknown subscription or delivery tag")
        for id in (1, 2, 2**64 - 1)
    ],
    *[
        ("authenticated", POLL, payload, 400, "invalid POLL payload")
        for payload in (b"", u64(0)[:7], u64(0) + b"\0")
    ],
    ("authenticated", POLL, u64(0), 400, "subscription_id must be non-zero"),
    ("authenticated", POLL, u64(1), 0, ""),
    ("authenticated", POLL, u64(2**64 - 1), 0, ""),
    ("authenticated", PONG, b"", 0, ""),
    ("authenticated", PONG, b"junk", 0, ""),
    ("authenticated", NACK, b"\x01\x90" + text(b"no"), 0, ""),
    ("authenticated", NACK, b"junk", 0, ""),
]
NAMES = {
    1: "HELLO",
    2: "AUTH",
    3: "PUBLISH",
    4: "SUBSCRIBE",
    5: "ACK",
    6: "NACK",
    7: "PING",
    8: "PONG",
    9: "POLL",
}


@pytest.mark.parametrize(
    ("state", "kind", "payload", "code", "said"),
    REFUSALS,
    ids=[
        f"{state}-{NAMES[kind]}-{payload[:12].hex()}-{len(payload)}" for state, kind, payload, *_ in REFUSALS
    ],
)
def test_refused_frame_is_answered_with_its_code_text_and_correlation_and_leaves_the_connection_open(
    gateway: PassiveGateway, state: str, kind: int, payload: bytes, code: int, said: str
) -> None:
    client = in_state(gateway, state)
    for cid in CIDS:
        assert client.exchange(frame(kind, cid, payload)) == (nack(code, said, cid) if code else b"")
    assert not client.session.closing
    # It goes on as if nothing had been said.
    if state == "fresh":
        assert client.exchange(wire.encode_hello(1, 8)) == wire.encode_ack(0, 8)
    if state != "authenticated":
        assert client.exchange(wire.encode_auth("dev-key", 9)) == wire.encode_ack(0, 9)
    assert client.exchange(wire.encode_ping(10)) == wire.encode_pong(10)


@pytest.mark.parametrize("cid", CIDS)
def test_handshake_is_acknowledged_with_subscription_0_and_the_same_correlation(
    gateway: PassiveGateway, cid: int
) -> None:
    client = gateway.connect(None)
    assert client.session.authenticated is None
    assert client.exchange(wire.encode_hello(1, cid)) == wire.encode_ack(0, cid)
    assert client.session.authenticated is None
    assert client.exchange(wire.encode_auth("dev-key", cid)) == wire.encode_ack(0, cid)
    assert client.session.authenticated == "dev"


def test_the_samples_of_the_spec_are_a_conversation(gateway: PassiveGateway) -> None:
    client = gateway.connect(None)
    said = client.exchange(
        bytes.fromhex(
            "0000000b 01 0000000000000001 0001"
            "00000012 02 0000000000000002 0007 6465762d6b6579"
            "00000010 04 0000000000000003 0004 64656d6f 01"
            "00000012 03 0000000000000004 01 0004 64656d6f 6869"
            "00000011 09 0000000000000005 0000000000000001"
        )
    )
    assert said == bytes.fromhex(
        "00000011 05 0000000000000001 0000000000000000"
        "00000011 05 0000000000000002 0000000000000000"
        "00000011 05 0000000000000003 0000000000000001"
        "00000012 03 0000000000000001 01 0004 64656d6f 6869"
    )


def test_hello_can_be_tried_again_after_a_wrong_version_or_payload(gateway: PassiveGateway) -> None:
    client = gateway.connect(None)
    for _ in range(3):
        assert client.exchange(wire.encode_hello(2, 1)) == nack(426, "unsupported protocol version", 1)
        assert client.exchange(wire.encode_auth("dev-key", 2)) == nack(400, "HELLO not performed", 2)
    assert client.exchange(wire.encode_hello(1, 3)) == wire.encode_ack(0, 3)


def test_auth_can_be_tried_again_as_often_as_one_likes(gateway: PassiveGateway) -> None:
    client = gateway.connect(None)
    client.send(wire.encode_hello(1, 1))
    for attempt in range(100):
        assert client.exchange(wire.encode_auth(f"wrong-{attempt}", 2)) == nack(401, "invalid API key", 2)
    assert client.exchange(wire.encode_auth("other-key", 3)) == wire.encode_ack(0, 3)
    assert client.session.authenticated == "other"


def test_empty_key_is_accepted_only_where_it_is_configured(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path, keys=[Key(name="open", key="", publish=["#"])])
    assert gateway.connect("").session.authenticated == "open"
    gateway.close()


def test_key_beyond_ascii_is_its_utf_8(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path, keys=[Key(name="k", key="schlüssel-鍵-🔑", publish=["#"])])
    assert gateway.connect("schlüssel-鍵-🔑").session.authenticated == "k"
    gateway.close()


def test_without_keys_nobody_authenticates(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path, keys=[])
    client = gateway.connect(None)
    client.send(wire.encode_hello(1, 1))
    assert client.exchange(wire.encode_auth("", 2)) == nack(401, "invalid API key", 2)
    gateway.close()


@pytest.mark.parametrize("cid", CIDS)
@pytest.mark.parametrize("payload", [b"", b"junk"])
def test_ping_is_answered_with_an_empty_pong_whatever_it_carries(
    gateway: PassiveGateway, cid: int, payload: bytes
) -> None:
    assert gateway.connect().exchange(frame(PING, cid, payload)) == wire.encode_pong(cid)


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("body", [b"", b"m", b"\0" * 100_000])
def test_publish_is_not_answered(gateway: PassiveGateway, qos: int, body: bytes) -> None:
    client = gateway.connect()
    assert client.exchange(wire.encode_publish("t", body, qos, 1)) == b""
    assert client.session.pull() == client.session.elapse() == b""


@pytest.mark.parametrize("trailing", [b"", b"\0", b"more than a byte"])
def test_bytes_after_the_qos_of_a_subscribe_are_ignored(gateway: PassiveGateway, trailing: bytes) -> None:
    client = gateway.connect()
    assert client.exchange(frame(SUBSCRIBE, 3, text(b"t") + b"\x01" + trailing)) == wire.encode_ack(1, 3)


def test_qos_is_checked_also_when_the_topic_was_published_to_before(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    client.publish("t", b"good")
    for qos in (2, 255):
        assert client.exchange(frame(PUBLISH, 5, bytes([qos]) + text(b"t") + b"m")) == nack(
            400, "invalid QoS value", 5
        )
    assert client.exchange(frame(PUBLISH, 6, b"\x07" + text(b""))) == nack(400, "empty topic", 6)
    assert gateway.log.appended == 1


def test_errors_among_good_frames_keep_their_places(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    said = client.exchange(
        wire.encode_subscribe("t", 1, 1)
        + wire.encode_publish("t", b"a", 1, 2)
        + wire.encode_poll(0, 3)
        + wire.encode_poll(1, 4)
        + wire.encode_publish("", b"", 1, 5)
        + wire.encode_ping(6)
        + wire.encode_ack(1, 1)
        + wire.encode_ack(1, 1)
        + wire.encode_poll(1, 7)
        + wire.encode_ping(8)
    )
    assert said == (
        wire.encode_ack(1, 1)
        + nack(400, "subscription_id must be non-zero", 3)
        + wire.encode_publish("t", b"a", 1, 1)
        + nack(400, "empty topic", 5)
        + wire.encode_pong(6)
        + nack(404, "unknown subscription or delivery tag", 1)
        + wire.encode_pong(8)
    )


# --- closing (notes 1.1) ------------------------------------------------------------------------------------

BAD_LENGTHS = [0, 1, 8, MAX + 1, 2**31, 2**32 - 1]
BAD_TYPES = [0x00, 0x0A, 0x0B, 0x7F, 0xFF]


@pytest.mark.parametrize("state", ["fresh", "greeted", "authenticated"])
@pytest.mark.parametrize("length", BAD_LENGTHS)
def test_bad_length_closes_as_soon_as_it_is_there_and_nothing_is_said(
    gateway: PassiveGateway, state: str, length: int
) -> None:
    client = in_state(gateway, state)
    raw = struct.pack(">I", length)
    assert client.exchange(raw[:3]) == b""
    assert not client.session.closing
    assert client.exchange(raw[3:]) == b""
    assert client.session.closing


@pytest.mark.parametrize("state", ["fresh", "greeted", "authenticated"])
@pytest.mark.parametrize("kind", BAD_TYPES)
def test_bad_type_closes_when_its_frame_is_whole_and_nothing_is_said(
    gateway: PassiveGateway, state: str, kind: int
) -> None:
    client = in_state(gateway, state)
    raw = frame(kind, 7, b"payload")
    assert client.exchange(raw[:-1]) == b""
    assert not client.session.closing
    assert client.exchange(raw[-1:]) == b""
    assert client.session.closing


@pytest.mark.parametrize(
    "bad", [struct.pack(">I", 8), struct.pack(">I", MAX + 1), frame(0x0A, 1, b""), frame(0, 1, b"x")]
)
def test_frames_before_the_bad_one_are_handled_and_answered_and_none_after_it(
    gateway: PassiveGateway, bad: bytes
) -> None:
    client = gateway.connect()
    assert client.exchange(
        wire.encode_publish("t", b"before", 1, 1)
        + wire.encode_ping(2)
        + bad
        + wire.encode_publish("t", b"after", 1, 3)
        + wire.encode_ping(4)
    ) == wire.encode_pong(2)
    assert client.session.closing
    assert client.exchange(wire.encode_ping(5)) == b""
    assert [record.payload for record in gateway.log.reader()] == [b"before"]
    assert gateway.shared.counters()["bad_frames"] == 1


def test_largest_length_is_legal_and_one_more_is_not(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path, log={"segment_bytes": 64 << 20})
    client = gateway.connect()
    id = client.subscribe("t", 1)
    body = b"x" * (MAX - 9 - 3 - 1)
    raw = wire.encode_publish("t", body, 1, 1)
    assert raw[:4] == struct.pack(">I", MAX)
    assert client.exchange(raw[:4]) == b""
    assert not client.session.closing
    assert client.session.wanted == MAX + 4
    assert client.exchange(raw[4:]) == b""
    delivery = client.poll(id)
    assert delivery is not None
    assert delivery.message == body
    assert client.exchange(struct.pack(">I", MAX + 1)) == b""
    assert client.session.closing
    gateway.close()


def test_max_length_is_the_limit_of_the_length_field(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path, max_length=100)
    client = gateway.connect()
    assert client.exchange(frame(PING, 1, b"p" * 91)) == wire.encode_pong(1)
    assert not client.session.closing
    assert client.exchange(struct.pack(">I", 101)) == b""
    assert client.session.closing
    gateway.close()


@pytest.mark.parametrize("max_length", [0, 8, MAX + 1])
def test_max_length_is_within_the_protocol(gateway: PassiveGateway, max_length: int) -> None:
    with pytest.raises(ValueError, match="max_length"):
        Blipmq(gateway.bus, gateway.keys, max_length=max_length)


def test_end_in_the_middle_of_a_frame_is_silent(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    assert client.exchange(wire.encode_publish("t", b"whole", 1, 1) + wire.encode_ping(2)[:-1]) == b""
    assert client.session.kept == 12
    client.leave()
    assert client.session.kept == 0
    assert gateway.log.appended == 1


def test_wanted_is_the_whole_size_of_the_unfinished_frame(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    raw = wire.encode_publish("t", b"x" * 1000, 0, 1)
    for have in range(4):
        client.session.feed(raw[have : have + 1])
        assert client.session.wanted == (0 if have < 3 else len(raw))
    client.session.feed(raw[4:])
    assert client.session.wanted == 0


# --- topics -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "topic", ["*", "#", "a.*", "a.#", "*.b", "#.#", ".", "..", "a..b", " ", "a\0b", "ü.鍵.🔑"]
)
@pytest.mark.parametrize("qos", [0, 1])
def test_topics_match_exactly_and_no_character_is_special(
    gateway: PassiveGateway, topic: str, qos: int
) -> None:
    client = gateway.connect()
    id = client.subscribe(topic, qos)
    for other in ("a", "a.b", "b", "x.b", "a.b.c", topic + "x", topic.upper() + "y"):
        client.publish(other, b"not this", qos=qos)
    client.publish(topic, b"this", qos=qos)
    delivery = client.poll(id)
    assert delivery is not None
    assert (delivery.topic, delivery.message, delivery.qos) == (topic, b"this", qos)
    assert client.poll(id) is None


def test_topic_may_be_as_long_as_its_length_field_can_say(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path, log={"segment_bytes": 4 << 20})
    client = gateway.connect()
    topics = ["t" * 65_535, "t" * 65_534, "ü" * 32_767]
    ids = [client.subscribe(topic, 1) for topic in topics]
    for topic in topics:
        client.publish(topic, topic[-3:].encode())
    for topic, id in zip(topics, ids, strict=True):
        delivery = client.poll(id)
        assert delivery is not None
        assert delivery.topic == topic
    gateway.close()


def test_topics_are_told_apart_by_length_and_content_also_right_after_each_other(
    gateway: PassiveGateway,
) -> None:
    client = gateway.connect()
    topics = ["a" * 255, "a" * 256, "a" * 257, "a" * 255 + "b", "a", "b", "ab", "a" * 256 + "b"]
    ids = {topic: client.subscribe(topic, 0) for topic in topics}
    sequence = topics + topics[::-1] + topics
    client.send(*(wire.encode_publish(topic, str(n).encode(), 0, n) for n, topic in enumerate(sequence)))
    for topic, id in ids.items():
        assert client.poll_all(id) == [str(n).encode() for n, other in enumerate(sequence) if other == topic]


@pytest.mark.parametrize("kind", [PUBLISH, SUBSCRIBE])
def test_topic_of_too_many_words_is_refused_and_not_made(gateway: PassiveGateway, kind: int) -> None:
    client = gateway.connect()
    wide = b"." * 128
    payload = b"\0" + text(wide) + b"m" if kind == PUBLISH else text(wide) + b"\0"
    assert client.exchange(frame(kind, 1, payload)) == nack(400, "a topic has 128 words at most", 1)
    assert gateway.bus.stats()["topics"] == 0
    client.publish("." * 127, b"m")
    assert client.subscribe("." * 127, 1) == 1


# --- publishing and delivering ------------------------------------------------------------------------------


@pytest.mark.parametrize("published", [0, 1])
@pytest.mark.parametrize("subscribed", [0, 1])
def test_effective_qos_is_the_lower_one_and_decides_the_correlation_of_the_delivery(
    gateway: PassiveGateway, published: int, subscribed: int
) -> None:
    client = gateway.connect()
    client.publish("other", b"takes the first tag")
    id = client.subscribe("t", subscribed)
    client.publish("t", b"m", qos=published)
    delivery = client.send(wire.encode_poll(id, 77))[0]
    assert isinstance(delivery, wire.Publish)
    assert delivery.qos == min(published, subscribed)
    assert delivery.correlation == (2 if delivery.qos else 77)
    assert (delivery.topic, delivery.message) == ("t", b"m")
    assert client.ack(id, delivery.correlation) == bool(delivery.qos)
    assert not client.ack(id, delivery.correlation)


def test_everything_published_is_in_the_log_subscribed_or_not(gateway: PassiveGateway) -> None:
    client = gateway.connect("other-key")
    client.send(wire.encode_publish("nobody.listens", b"zero", 0, 7), wire.encode_publish("t", b"one", 1, 8))
    records = list(LogReader(gateway.log.path))
    assert [(r.topic_name, r.payload, r.correlation) for r in records] == [
        (b"nobody.listens", b"zero", 7),
        (b"t", b"one", 8),
    ]
    assert {r.origin_name for r in records} == {b"other@"}


def test_later_subscriber_sees_only_later_publishes(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    client.publish("t", b"before")
    said = client.send(
        wire.encode_publish("t", b"just before", 1, 1),
        wire.encode_subscribe("t", 1, 2),
        wire.encode_publish("t", b"after", 1, 3),
    )
    assert [type(one) for one in said] == [wire.Ack]
    assert client.poll_all(1) == [b"after"]


def test_every_subscription_gets_every_message_in_order_also_two_of_one_connection(
    gateway: PassiveGateway,
) -> None:
    client, second = gateway.connect(), gateway.connect("other-key")
    ids = [client.subscribe("t", 1), client.subscribe("t", 1), client.subscribe("t", 0)]
    theirs = second.subscribe("t", 1)
    assert [*ids, theirs] == [1, 2, 3, 4]
    bodies = [str(n).encode() for n in range(50)]
    for body in bodies:
        client.publish("t", body, qos=int(body) % 2)
    for id in ids:
        assert client.poll_all(id) == bodies
    assert second.poll_all(theirs) == bodies


def test_poll_takes_one_message_and_pipelined_ones_are_answered_in_order(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    id = client.subscribe("t", 0)
    client.publish("t", b"a", b"b", b"c", qos=0)
    said = client.send(*(wire.encode_poll(id, cid) for cid in range(10, 16)), wire.encode_ping(99))
    assert [(one.correlation, getattr(one, "message", None)) for one in said] == [
        (10, b"a"),
        (11, b"b"),
        (12, b"c"),
        (99, None),
    ]


def test_poll_is_answered_with_what_came_before_it_in_the_same_bytes(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    ids = [client.subscribe("t", 0), client.subscribe("t", 1)]
    for published in (0, 1):
        for id in ids:
            said = client.send(wire.encode_publish("t", b"m", published, 1), wire.encode_poll(id, 2))
            assert len(said) == 1
            assert isinstance(said[0], wire.Publish)
        for id in ids:
            client.poll_all(id)


def test_what_others_published_is_delivered_too(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    id = client.subscribe("t", 1)
    gateway.bus.publish("t", b"from the bus", confirmed=True, protocol=4)
    gateway.log.sync_now()
    assert client.poll_all(id) == [b"from the bus"]


def test_message_that_no_frame_can_carry_is_passed_over_and_counted(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path, log={"segment_bytes": 64 << 20})
    client = gateway.connect()
    exact, durable, dead = client.subscribe("t", 0), client.subscribe("t", 1), client.subscribe("dead.t", 0)
    gateway.bus.publish("t", b"x" * (MAX - 12), confirmed=True)  # with the topic it is one byte too long
    gateway.bus.publish("t", b"fits", confirmed=True)
    gateway.log.sync_now()
    assert client.poll_all(exact) == client.poll_all(durable) == [b"fits"]
    assert gateway.shared.counters()["too_large"] == 2
    assert gateway.bus.stats()["dead"] == 1
    assert client.send(wire.encode_poll(dead, 1)) == []  # which is as large
    gateway.close()


def test_message_that_the_log_cannot_take_is_refused(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    for qos in (0, 1):
        (answer,) = client.send(wire.encode_publish("t", b"x" * (1 << 18), qos, 9))
        assert isinstance(answer, wire.Nack)
        assert (answer.code, answer.correlation) == (400, 9)
        assert answer.text == "message too large: the log takes 131072 bytes at most"
    client.publish("t", b"x" * 130_000)
    assert gateway.log.appended == 1


# --- subscriptions and who may use them ---------------------------------------------------------------------


def test_first_subscription_id_is_1_and_they_count_up_over_all_peers(gateway: PassiveGateway) -> None:
    first, second = gateway.connect(), gateway.connect("other-key")
    assert [peer.subscribe("t", n % 2) for n, peer in enumerate([first, second, first, second])] == [
        1,
        2,
        3,
        4,
    ]


@pytest.mark.parametrize("qos", [0, 1])
def test_ids_are_never_given_out_again(gateway: PassiveGateway, qos: int) -> None:
    seen: set[int] = set()
    for _ in range(3):
        client = gateway.connect()
        for _ in range(3):
            id = client.subscribe("t", qos)
            assert id not in seen
            assert id > max(seen, default=0)
            seen.add(id)
        client.leave()
        gateway.elapse(4000)
        gateway.restart()


def test_id_of_an_expired_subscription_is_not_given_out_again_after_a_restart(
    gateway: PassiveGateway,
) -> None:
    client = gateway.connect()
    id = client.subscribe("t", 1)
    client.leave()
    gateway.elapse(4000)
    gateway.restart()
    client = gateway.connect()
    assert client.poll(id) is None
    assert client.subscribe("t", 1) > id


@pytest.mark.parametrize("qos", [0, 1])
def test_subscription_of_another_key_is_as_good_as_none(gateway: PassiveGateway, qos: int) -> None:
    owner, stranger = gateway.connect(), gateway.connect("other-key")
    id = owner.subscribe("t", qos)
    owner.publish("t", b"a", b"b")
    assert stranger.exchange(wire.encode_poll(id, 1)) == b""
    first = owner.poll(id)
    assert first is not None
    assert first.message == b"a"
    assert not stranger.ack(id, first.correlation)
    if qos:
        assert owner.ack(id, first.correlation)
    assert stranger.exchange(wire.encode_poll(id, 2)) == b""
    assert owner.poll_all(id) == [b"b"]


def test_subscription_that_is_not_blipmqs_is_as_good_as_none(gateway: PassiveGateway) -> None:
    subscription = gateway.bus.subscribe("t", owner="dev", protocol=4)
    client = gateway.connect()
    client.publish("t", b"m")
    assert client.poll(subscription.id) is None
    assert not client.ack(subscription.id, 1)


@pytest.mark.parametrize("qos", [0, 1])
def test_same_key_may_go_on_with_an_id_on_another_connection(gateway: PassiveGateway, qos: int) -> None:
    first, second = gateway.connect(), gateway.connect()
    id = first.subscribe("t", qos)
    first.publish("t", b"a", b"b", b"c")
    one, two = first.poll(id), second.poll(id)
    assert one is not None
    assert two is not None
    assert (one.message, two.message) == (b"a", b"b")
    if qos:
        assert second.ack(id, one.correlation)
        assert first.ack(id, two.correlation)
    first.leave()
    assert second.poll_all(id) == [b"c"]


def test_two_connections_of_a_key_share_a_subscription_without_taking_from_each_other(
    gateway: PassiveGateway,
) -> None:
    first, second = gateway.connect(), gateway.connect()
    id = first.subscribe("t", 1)
    first.publish("t", b"long work", b"other work")
    assert first.poll(id) is not None
    for _ in range(20):
        second.poll(id)
        assert first.poll(id) is None
    assert gateway.bus.stats()["redelivered"] == gateway.bus.stats()["dead"] == 0


def test_durable_subscription_without_a_connection_is_kept_for_the_grace_and_then_gone(
    tmp_path: Path,
) -> None:
    gateway = PassiveGateway(tmp_path, bus={"durable_grace": 100.0})
    client = gateway.connect()
    id = client.subscribe("t", 1)
    client.publish("t", b"a", b"b", b"c")
    a = client.poll(id)
    assert a is not None
    client.leave()
    gateway.elapse(99.9)
    client = gateway.connect()
    again, b = client.poll(id), client.poll(id)
    assert again is not None
    assert b is not None
    assert (again.correlation, again.message, b.message) == (a.correlation, b"a", b"b")
    gateway.elapse(1000)  # it has a connection again
    assert client.ack(id, again.correlation)
    client.leave()
    gateway.elapse(100)
    client = gateway.connect()
    assert client.poll(id) is None
    assert not client.ack(id, b.correlation)
    assert gateway.bus.stats()["expired"] == 1
    gateway.close()


def test_grace_begins_when_the_last_connection_has_gone(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path, bus={"durable_grace": 100.0})
    first, second = gateway.connect(), gateway.connect()
    id = first.subscribe("t", 1)
    second.poll(id)
    first.leave()
    gateway.elapse(500)
    second.publish("t", b"m")
    second.leave()
    gateway.elapse(99)
    assert gateway.connect().poll(id) is not None
    gateway.close()


def test_qos_0_subscription_is_dropped_when_its_connection_is_gone(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    id = client.subscribe("t", 0)
    client.publish("t", b"m", qos=0)
    client.leave()
    assert gateway.bus.stats()["subscriptions"] == 0
    assert gateway.connect().poll(id) is None


def test_what_a_gone_connection_had_not_acknowledged_comes_again_at_once_with_its_tag(
    gateway: PassiveGateway,
) -> None:
    client = gateway.connect()
    id = client.subscribe("t", 1)
    client.publish("t", b"a", b"b", b"c")
    assert client.poll_all(id) == [b"a", b"b", b"c"]
    assert client.ack(id, 2)
    client.leave()
    client = gateway.connect()
    again = [client.poll(id) for _ in range(3)]
    assert [one and (one.correlation, one.message) for one in again] == [(1, b"a"), (3, b"c"), None]


def test_too_many_subscriptions_of_a_connection_are_refused(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path, max_subscriptions=2)
    client = gateway.connect()
    client.subscribe("a", 0)
    client.subscribe("b", 1)
    said = "too many subscriptions: a connection has 2 at most"
    assert client.exchange(wire.encode_subscribe("c", 0, 7)) == nack(400, said, 7)
    assert gateway.connect().subscribe("c", 0) == 3
    gateway.close()


def test_unsubscribed_behind_the_back_of_its_connection_is_as_good_as_none(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    id = client.subscribe("t", 1)
    client.publish("t", b"m")
    delivery = client.poll(id)
    assert delivery is not None
    gateway.bus.unsubscribe(gateway.bus.subscriptions[id])
    assert client.poll(id) is None
    assert not client.ack(id, delivery.correlation)
    client.leave()


# --- acknowledging and redelivering -------------------------------------------------------------------------


def test_unacknowledged_delivery_comes_again_after_2_s_doubling_5_times_with_one_tag_then_is_dead(
    gateway: PassiveGateway,
) -> None:
    client = gateway.connect()
    id, dead = client.subscribe("t", 1), client.subscribe("dead.t", 1)
    client.publish("t", b"poison")
    first = client.poll(id)
    assert first is not None
    for wait in (2, 4, 8, 16):
        gateway.elapse(wait - 0.001)
        assert client.poll(id) is None
        gateway.elapse(0.001)
        again = client.poll(id)
        assert again is not None
        assert (again.correlation, again.message, again.qos) == (first.correlation, b"poison", 1)
        assert client.poll(id) is None
    gateway.elapse(31.999)
    assert client.poll(id) is None
    assert client.poll(dead) is None
    gateway.elapse(0.001)
    assert client.poll(id) is None
    buried = client.poll(dead)
    assert buried is not None
    assert (buried.topic, buried.message, buried.qos) == ("dead.t", b"poison", 1)
    assert not client.ack(id, first.correlation)
    assert client.ack(dead, buried.correlation)
    assert gateway.bus.stats()["dead"] == 1


def test_redelivery_options_are_followed(tmp_path: Path) -> None:
    gateway = PassiveGateway(
        tmp_path, bus={"redelivery_delay": 1.0, "max_redelivery_delay": 3.0, "max_deliveries": 4}
    )
    client = gateway.connect()
    id = client.subscribe("t", 1)
    client.publish("t", b"m")
    assert client.poll(id) is not None
    for wait in (1, 2, 3):
        gateway.elapse(wait)
        assert client.poll(id) is not None
    gateway.elapse(3)
    assert client.poll(id) is None
    assert gateway.bus.stats()["dead"] == 1
    gateway.close()


def test_late_ack_of_a_message_that_waits_for_redelivery_counts(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    id = client.subscribe("t", 1)
    client.publish("t", b"m")
    delivery = client.poll(id)
    assert delivery is not None
    gateway.elapse(60)
    assert client.ack(id, delivery.correlation)
    assert client.poll(id) is None
    assert not client.ack(id, delivery.correlation)


def test_acknowledged_delivery_does_not_come_again_and_others_do_in_order(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    id = client.subscribe("t", 1)
    client.publish("t", *(str(n).encode() for n in range(10)))
    tags = [delivery.correlation for delivery in (client.poll(id) for _ in range(10)) if delivery is not None]
    assert tags == list(range(1, 11))
    for tag in tags[::2]:
        assert client.ack(id, tag)
    client.publish("t", b"new")
    gateway.elapse(2)
    assert client.poll_all(id) == [b"1", b"3", b"5", b"7", b"9", b"new"]


@pytest.mark.parametrize("tag", [0, 2, 3, 2**63, 2**64 - 1])
def test_ack_of_a_tag_that_is_not_in_flight_is_unknown(gateway: PassiveGateway, tag: int) -> None:
    client = gateway.connect()
    id = client.subscribe("t", 1)
    client.publish("t", b"a", b"b")
    assert client.poll(id) is not None
    assert not client.ack(id, tag)
    assert client.ack(id, 1)


def test_ack_belongs_to_its_subscription(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    one, two = client.subscribe("t", 1), client.subscribe("t", 1)
    client.publish("t", b"m")
    delivery = client.poll(one)
    assert delivery is not None
    assert not client.ack(two, delivery.correlation)
    assert client.poll(two) is not None
    assert client.ack(two, delivery.correlation)
    assert client.ack(one, delivery.correlation)


def test_nothing_expires_by_itself(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    ids = [client.subscribe("t", 0), client.subscribe("t", 1)]
    client.publish("t", b"m")
    gateway.elapse(30 * 24 * 3600)
    assert [client.poll_all(id) for id in ids] == [[b"m"], [b"m"]]


def test_no_more_than_max_inflight_are_delivered_unacknowledged(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path, bus={"max_inflight": 3})
    client = gateway.connect()
    id = client.subscribe("t", 1)
    client.publish("t", *(str(n).encode() for n in range(5)))
    assert client.poll_all(id) == [b"0", b"1", b"2"]
    assert client.ack(id, 2)
    assert client.poll_all(id) == [b"3"]
    gateway.close()


@pytest.mark.parametrize("qos", [0, 1])
def test_max_pending_passes_over_the_oldest_and_counts_them(tmp_path: Path, qos: int) -> None:
    gateway = PassiveGateway(tmp_path, bus={"max_pending": 3})
    client = gateway.connect()
    id = client.subscribe("t", qos)
    client.publish("t", *(str(n).encode() for n in range(10)))
    assert client.poll_all(id) == [b"7", b"8", b"9"]
    assert gateway.bus.stats()["lost"] == 7
    client.publish("t", b"10")
    assert client.poll_all(id) == [b"10"]
    gateway.close()


# --- what survives a restart --------------------------------------------------------------------------------


def test_unacknowledged_deliveries_and_their_subscription_survive_a_restart_with_their_tags(
    gateway: PassiveGateway,
) -> None:
    client = gateway.connect()
    client.publish("t", b"before the subscription")
    id = client.subscribe("t", 1)
    client.publish("t", b"a", b"b", b"c", b"d", b"e")
    for _ in range(3):
        client.poll(id)
    assert client.ack(id, 3)
    gateway.restart()
    client = gateway.connect()
    found = []
    while (delivery := client.poll(id)) is not None:
        found.append((delivery.correlation, delivery.message))
    assert found == [(2, b"a"), (4, b"c"), (5, b"d"), (6, b"e")]
    assert not client.ack(id, 3)
    assert all(client.ack(id, tag) for tag, _ in found)
    gateway.restart()
    assert gateway.connect().poll(id) is None


def test_delivery_from_before_a_restart_can_be_acknowledged_after_it(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    id = client.subscribe("t", 1)
    client.publish("t", b"a", b"b")
    assert [client.poll(id) is not None for _ in range(2)] == [True, True]
    gateway.restart()
    client = gateway.connect()
    assert client.ack(id, 1)
    assert not client.ack(id, 1)
    assert client.poll_all(id) == [b"b"]


def test_subscription_of_another_key_is_as_good_as_none_after_a_restart(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    id = client.subscribe("t", 1)
    client.publish("t", b"m")
    gateway.restart()
    stranger = gateway.connect("other-key")
    assert stranger.poll(id) is None
    assert not stranger.ack(id, 1)
    assert gateway.connect().poll_all(id) == [b"m"]


def test_qos_0_subscription_does_not_survive_a_restart(gateway: PassiveGateway) -> None:
    id = gateway.connect().subscribe("t", 0)
    gateway.restart()
    client = gateway.connect()
    client.publish("t", b"m")
    assert client.poll(id) is None


@pytest.mark.parametrize("size", [65_534, 65_535])
def test_subscription_whose_address_is_too_long_under_other_rules_is_not_delivered(
    gateway: PassiveGateway, size: int
) -> None:
    client = gateway.connect()
    id = client.subscribe("t", 1)
    client.publish("t", b"m")
    gateway.restart()
    gateway.shared.map = Map([Rule("a" * size + "{name}", "{name}")])
    client = gateway.connect()
    (answer,) = client.send(wire.encode_poll(id, 7))
    if size == 65_534:
        assert answer.fields() == {"topic": "a" * size + "t", "qos": 1, "message": b"m"}
    else:
        text = "no rule of [[map]] has an address for 't'"
        assert answer.fields() == {"code": 400, "text": text}


def test_deliveries_are_counted_over_restarts(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    id = client.subscribe("t", 1)
    client.publish("t", b"poison")
    deliveries = 0
    for _ in range(20):
        gateway.restart()
        client = gateway.connect()
        for _ in range(2):  # the second one is a redelivery, which the log remembers
            if client.poll(id) is not None:
                deliveries += 1
            gateway.elapse(40)
    assert gateway.bus.stats()["subscriptions"] == 1
    assert 5 <= deliveries <= 7


# --- waiting for the sync -----------------------------------------------------------------------------------


def test_pong_behind_qos_1_publishes_leaves_only_when_they_are_safe(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    waited = 0
    for n in range(50):
        said = client.session.feed(wire.encode_publish("t", b"m", 1, n) + wire.encode_ping(n), gateway.now)
        if said == b"":
            waited += 1
            assert not client.session.blocked  # parsing goes on
            gateway.log.sync_now()
            said = client.session.feed(b"", gateway.now)
        assert gateway.log.safe == n + 1
        assert said == wire.encode_pong(n)
    assert waited > 0


def test_pong_behind_qos_0_publishes_does_not_wait(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    for n in range(20):
        said = client.session.feed(wire.encode_publish("t", b"m", 0, n) + wire.encode_ping(n), gateway.now)
        assert said == wire.encode_pong(n)


def test_subscription_that_is_told_is_in_the_log_and_so_is_its_id(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    for qos in (0, 1):
        said = client.session.feed(wire.encode_subscribe("t", qos, 1), gateway.now)
        if said == b"":
            gateway.log.sync_now()
            said = client.session.feed(b"", gateway.now)
        end = max(segment.marked for segment in gateway.log.segments())
        kinds = [r.kind for r in all_records(gateway) if r.control and r.position < end]
        assert kinds.count(CONTROL_IDS) == 1
        assert kinds.count(CONTROL_SUBSCRIPTION) == qos
        assert said == wire.encode_ack(1 + qos, 1)


def test_other_policies_wait_for_nothing(tmp_path: Path) -> None:
    for n, policy in enumerate(["none", "every:1000", "interval:60000"]):
        gateway = PassiveGateway(tmp_path / str(n), log={"sync": policy})
        session = gateway.connect().session
        assert session.feed(
            wire.encode_subscribe("t", 1, 1)
            + wire.encode_publish("t", b"m", 1, 2)
            + wire.encode_poll(1, 3)
            + wire.encode_ping(4),
            gateway.now,
        ) == wire.encode_ack(1, 1) + wire.encode_publish("t", b"m", 1, 1) + wire.encode_pong(4)
        assert gateway.log.synced == 0
        gateway.close()


# --- time and ends ------------------------------------------------------------------------------------------


def test_peer_that_does_not_authenticate_in_time_is_closed(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path, handshake_timeout=30)
    silent, talkative, known = gateway.connect(None), gateway.connect(None), gateway.connect()
    start = gateway.now
    for client in (silent, talkative, known):
        assert client.session.elapse(start) == b""
    talkative.send(wire.encode_hello(1, 1))
    for seconds in (10, 29.9):
        gateway.now = start + round(seconds * SECOND)
        talkative.send(wire.encode_auth("wrong", 2))
        for client in (silent, talkative, known):
            client.session.elapse(gateway.now)
            assert not client.session.closing
    for _ in range(3):
        gateway.now = start + 30 * SECOND + 1
        for client in (silent, talkative, known):
            assert client.session.elapse(gateway.now) == b""
    assert [client.session.closing for client in (silent, talkative, known)] == [True, True, False]
    assert gateway.shared.counters()["handshakes_late"] == 2
    gateway.close()


def test_without_a_handshake_timeout_a_peer_may_be_silent(gateway: PassiveGateway) -> None:
    client = gateway.connect(None)
    client.session.elapse(gateway.now)
    client.session.elapse(gateway.now + 10**12)
    assert not client.session.closing


def test_stopping_gateway_has_no_last_word(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    client.subscribe("t", 1)
    assert client.session.stop(gateway.now) == b""


def test_sessions_count_what_they_did(gateway: PassiveGateway) -> None:
    client = gateway.connect()
    id = client.subscribe("t", 1)
    client.publish("t", b"m")
    delivery = client.poll(id)
    assert delivery is not None
    client.poll(id)
    client.ack(id, delivery.correlation)
    client.ack(id, delivery.correlation)
    client.send(wire.encode_ping(1), wire.encode_hello(1, 1), wire.encode_poll(0, 1))
    counters = gateway.shared.counters()
    assert {name: count for name, count in counters.items() if count} == {
        "hellos": 1,
        "authenticated": 1,
        "polls": 2,
        "polls_empty": 1,
        "acks": 1,
        "pings": 1,
        "nack_400": 2,
        "nack_404": 1,
    }
    assert gateway.bus.stats()["published"]["blipmq"] == 1
    assert gateway.bus.stats()["delivered"]["blipmq"] == 1


def test_source_of_a_message_is_the_key_and_the_peer(gateway: PassiveGateway) -> None:
    client = gateway.connect(None)
    carrier: Any = SimpleNamespace(peer="192.0.2.7:1234", name="blipmq-1")
    client.session.connection = carrier
    client.send(wire.encode_hello(1, 1), wire.encode_auth("dev-key", 2))
    client.publish("t", b"m")
    (record,) = list(LogReader(gateway.log.path))
    assert record.origin_name == b"dev@192.0.2.7:1234"


def test_sessions_and_their_gateway_can_be_collected_in_any_order(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path)
    for n in range(20):
        client = gateway.connect()
        client.publish("t", b"m", qos=0)
        # A cycle through everything, which the collector takes apart in an order of its own.
        carrier: Any = SimpleNamespace(peer="p", name=f"blipmq-{n}", client=client, gateway=gateway)
        client.session.connection = carrier
    gateway.close()
    del client, carrier, gateway
    gc.collect()


def test_peer_that_goes_after_the_log_was_closed_does_no_harm(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path)
    client = gateway.connect()
    client.subscribe("t", 0)
    client.subscribe("t", 1)
    gateway.close()
    assert client.session.feed(wire.encode_publish("t", b"m", 1, 1) + wire.encode_ping(2)) == b""
    assert client.session.closing
    assert client.session.elapse() == client.session.stop() == b""
    client.leave()


def test_session_cannot_be_made_without_its_gateway(gateway: PassiveGateway) -> None:
    with pytest.raises(TypeError):
        BlipmqSession(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        BlipmqSession.__new__(BlipmqSession)
    with pytest.raises(TypeError):
        Blipmq(None, None)  # type: ignore[arg-type]
