"""What a key lets a BlipMQ peer do, and what happens to open connections when keys and rights change."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.config.schema import Key
from headrace.wire import blipmq as wire
from tests.sessions.passive_gateway import OTHER, SECOND, Client, PassiveGateway

LIMITED = Key(name="sensor-7", key="s3cret", publish=["in.#", "a.*"], subscribe=["out.#", "a.b"])
MASTER = Key(name="master", key="master-key", publish=["#"], subscribe=["#"])


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[PassiveGateway]:
    gateway = PassiveGateway(tmp_path, keys=[LIMITED, MASTER])
    yield gateway
    gateway.close()


def refusal(client: Client, frame: bytes) -> tuple[int, str, int]:
    (answer,) = client.send(frame)
    assert isinstance(answer, wire.Nack), answer
    return answer.code, answer.text, answer.correlation


def changed(
    publish: list[str] | None = None, subscribe: list[str] | None = None, key: str = "s3cret"
) -> list[Key]:
    return [
        Key(
            name="sensor-7",
            key=key,
            publish=LIMITED.publish if publish is None else publish,
            subscribe=LIMITED.subscribe if subscribe is None else subscribe,
        ),
        MASTER,
    ]


# --- rights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", ["out.x", "a", "a.b.c", "inn", "b", "#", "*"])
@pytest.mark.parametrize("qos", [0, 1])
def test_publish_without_the_right_is_a_401_that_names_key_and_topic(
    gateway: PassiveGateway, topic: str, qos: int
) -> None:
    client = gateway.connect("s3cret")
    assert refusal(client, wire.encode_publish(topic, b"m", qos, 9)) == (
        401,
        f"key 'sensor-7' may not publish to {topic!r}",
        9,
    )
    assert gateway.log.appended == 0
    assert not client.session.closing


@pytest.mark.parametrize("topic", ["in.x", "a", "a.c", "a.*", "#", "b"])
@pytest.mark.parametrize("qos", [0, 1])
def test_subscribe_without_the_right_is_a_401_that_names_key_and_topic(
    gateway: PassiveGateway, topic: str, qos: int
) -> None:
    client = gateway.connect("s3cret")
    assert refusal(client, wire.encode_subscribe(topic, qos, 9)) == (
        401,
        f"key 'sensor-7' may not subscribe to {topic!r}",
        9,
    )
    assert gateway.bus.stats()["subscriptions"] == 0


@pytest.mark.parametrize("topic", ["in", "in.x", "in.x.y", "in.*", "in.#", "a.b", "a.*", "a.#", "a."])
def test_rights_are_filters_but_topics_are_names(gateway: PassiveGateway, topic: str) -> None:
    master = gateway.connect("master-key")
    id = master.subscribe(topic, 1)
    gateway.connect("s3cret").publish(topic, b"m")
    assert master.poll_all(id) == [b"m"]


def test_topic_that_may_not_be_published_or_subscribed_to_is_not_made(gateway: PassiveGateway) -> None:
    client = gateway.connect("s3cret")
    for n in range(50):
        refusal(client, wire.encode_publish(f"private.{n}", b"m", n % 2, 1))
        refusal(client, wire.encode_subscribe(f"private.{n}", n % 2, 1))
    assert gateway.bus.stats()["topics"] == 0
    client.publish("in.x", b"m")
    assert gateway.bus.stats()["topics"] == 1


def test_checks_of_the_payload_come_before_the_right(gateway: PassiveGateway) -> None:
    client = gateway.connect("s3cret")
    assert refusal(client, wire.encode_publish("", b"m", 7, 1))[1] == "empty topic"
    assert refusal(client, wire.encode_publish("private", b"m", 7, 1))[1] == "invalid QoS value"
    assert refusal(client, wire.encode_subscribe("private", 7, 1))[1] == "invalid QoS value"


def test_right_is_asked_for_every_topic_also_of_the_same_connection_and_batch(
    gateway: PassiveGateway,
) -> None:
    client = gateway.connect("s3cret")
    said = client.send(
        *(
            wire.encode_publish(topic, b"m", 0, n)
            for n, topic in enumerate(["in.a", "no", "in.a", "no", "in.b", "in.b", "no"])
        )
    )
    assert [one.correlation for one in said] == [1, 3, 6]
    assert gateway.log.appended == 4
    # A topic that others made is no easier to publish to.
    gateway.connect("master-key").publish("no", b"m")
    assert refusal(client, wire.encode_publish("no", b"m", 0, 9))[0] == 401
    assert gateway.log.appended == 5


def test_long_and_odd_topics_are_shown_so_that_a_person_can_read_them(gateway: PassiveGateway) -> None:
    client = gateway.connect("s3cret")
    shown = repr("ü" * 100 + "…")
    assert refusal(client, wire.encode_publish("ü" * 30_000, b"", 0, 1))[1] == (
        f"key 'sensor-7' may not publish to {shown}"
    )
    assert refusal(client, wire.encode_publish("x\n\0'", b"", 0, 1))[1] == (
        "key 'sensor-7' may not publish to \"x\\n\\x00'\""
    )


# --- changed rights -----------------------------------------------------------------------------------------


def test_right_that_is_taken_away_is_gone_at_once_from_open_connections(gateway: PassiveGateway) -> None:
    client = gateway.connect("s3cret")
    for topic in ("in.x", "in.y", "in.x"):  # the answer for a topic that exists is remembered
        client.publish(topic, b"allowed")
    gateway.keys.replace(changed(publish=["other"]))
    assert refusal(client, wire.encode_publish("in.x", b"m", 1, 2)) == (
        401,
        "key 'sensor-7' may not publish to 'in.x'",
        2,
    )
    assert client.session.authenticated == "sensor-7"
    assert gateway.log.appended == 3


def test_right_that_is_given_is_there_at_once_for_open_connections(gateway: PassiveGateway) -> None:
    client = gateway.connect("s3cret")
    gateway.connect("master-key").publish("new", b"m")
    refusal(client, wire.encode_publish("new", b"m", 1, 2))
    refusal(client, wire.encode_subscribe("new", 1, 2))
    gateway.keys.replace(changed(publish=["#"], subscribe=["#"]))
    client.publish("new", b"m")
    assert client.subscribe("new", 1) == 1
    assert gateway.log.appended == 2


def test_subscription_whose_right_is_taken_away_is_not_delivered_until_it_is_given_back(
    gateway: PassiveGateway,
) -> None:
    client, master = gateway.connect("s3cret"), gateway.connect("master-key")
    id, allowed = client.subscribe("out.x", 1), client.subscribe("a.b", 1)
    master.publish("out.x", b"one", b"two")
    master.publish("a.b", b"three")
    first = client.poll(id)
    assert first is not None
    gateway.keys.replace(changed(subscribe=["a.b"]))
    for _ in range(2):
        assert refusal(client, wire.encode_poll(id, 5)) == (
            401,
            "key 'sensor-7' may not subscribe to 'out.x'",
            5,
        )
        assert client.poll_all(allowed) in ([b"three"], [])
    assert client.ack(id, first.correlation)  # what it has got, it may have done with
    gateway.keys.replace(changed())
    assert client.poll_all(id) == [b"two"]


def test_right_that_is_taken_away_holds_for_a_subscription_taken_up_again(gateway: PassiveGateway) -> None:
    client = gateway.connect("s3cret")
    id = client.subscribe("out.x", 1)
    gateway.connect("master-key").publish("out.x", b"m")
    client.leave()
    gateway.keys.replace(changed(subscribe=[]))
    client = gateway.connect("s3cret")
    assert refusal(client, wire.encode_poll(id, 5))[0] == 401
    gateway.restart()
    client = gateway.connect("s3cret")
    assert refusal(client, wire.encode_poll(id, 5))[0] == 401
    gateway.keys.replace(changed())
    assert client.poll_all(id) == [b"m"]


# --- revoked keys -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys", [[MASTER], [], changed(key="another secret")], ids=["gone", "all gone", "other secret"]
)
def test_peer_whose_key_is_revoked_is_unauthenticated(gateway: PassiveGateway, keys: list[Key]) -> None:
    client = gateway.connect("s3cret")
    id = client.subscribe("out.x", 1)
    client.publish("in.x", b"before")
    gateway.keys.replace(keys)
    assert client.session.authenticated is None
    for frame in (
        wire.encode_publish("in.x", b"m", 1, 9),
        wire.encode_subscribe("out.x", 1, 9),
        wire.encode_poll(id, 9),
        wire.encode_ack(id, 9),
        wire.encode_ping(9),
    ):
        assert refusal(client, frame) == (401, "unauthenticated", 9)
    assert not client.session.closing
    assert gateway.log.appended == 1


def test_revoked_peer_may_authenticate_again_without_another_hello(gateway: PassiveGateway) -> None:
    client = gateway.connect("s3cret")
    gateway.keys.replace([MASTER])
    assert refusal(client, wire.encode_auth("s3cret", 1)) == (401, "invalid API key", 1)
    assert refusal(client, wire.encode_hello(1, 2)) == (400, "HELLO already performed", 2)
    assert client.exchange(wire.encode_auth("master-key", 3)) == wire.encode_ack(0, 3)
    assert client.session.authenticated == "master"
    client.publish("anything", b"m")
    origins = {record.origin_name for record in gateway.log.reader()}
    assert origins == {b"master@"}


@pytest.mark.parametrize("last_used", [0, 1])
def test_subscriptions_of_a_revoked_key_are_not_those_of_the_next_one_on_the_connection(
    gateway: PassiveGateway, last_used: int
) -> None:
    client = gateway.connect("s3cret")
    ids = [client.subscribe("out.x", 1), client.subscribe("out.x", 0)]
    gateway.connect("master-key").publish("out.x", b"one", b"two")
    delivery = client.poll(ids[last_used])
    assert delivery is not None
    gateway.keys.replace([MASTER])
    client.send(wire.encode_auth("master-key", 1))
    for id in ids:
        assert client.poll(id) is None
        assert not client.ack(id, 1)


def test_subscriptions_of_a_revoked_key_are_treated_as_if_its_peers_had_gone(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path, keys=[LIMITED, MASTER], bus={"durable_grace": 100.0})
    client = gateway.connect("s3cret")
    durable = client.subscribe("out.x", 1)
    client.subscribe("out.x", 0)
    gateway.connect("master-key").publish("out.x", b"m")
    first = client.poll(durable)
    assert first is not None
    gateway.keys.replace([MASTER])
    client.session.elapse(gateway.now)  # it says nothing itself
    assert gateway.bus.stats()["subscriptions"] == 1
    gateway.elapse(99)
    # It was a mistake, and is put right within the grace.
    gateway.keys.replace([LIMITED, MASTER])
    assert refusal(client, wire.encode_ping(1)) == (401, "unauthenticated", 1)
    client.send(wire.encode_auth("s3cret", 2))
    again = client.poll(durable)
    assert again is not None
    assert again.correlation == first.correlation
    gateway.keys.replace([MASTER])
    client.session.elapse(gateway.now)
    gateway.elapse(100)
    assert gateway.bus.stats()["subscriptions"] == 0
    gateway.close()


def test_new_secret_goes_on_with_the_subscriptions_of_the_old_one(gateway: PassiveGateway) -> None:
    old = gateway.connect("s3cret")
    id = old.subscribe("out.x", 1)
    gateway.connect("master-key").publish("out.x", b"m")
    gateway.keys.replace(changed(key="fresh"))
    assert refusal(old, wire.encode_poll(id, 1)) == (401, "unauthenticated", 1)
    assert gateway.connect("fresh").poll_all(id) == [b"m"]


def test_revoked_peer_has_the_whole_handshake_time_again(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path, keys=[LIMITED, MASTER], handshake_timeout=30)
    client = gateway.connect("s3cret")
    gateway.now += 1000 * SECOND
    gateway.keys.replace([MASTER])
    client.session.elapse(gateway.now)
    assert not client.session.closing
    client.session.elapse(gateway.now + 30 * SECOND)
    assert not client.session.closing
    client.session.elapse(gateway.now + 30 * SECOND + 1)
    assert client.session.closing
    gateway.close()


def test_publish_that_waits_for_room_is_not_taken_from_a_key_that_was_revoked_meanwhile(
    tmp_path: Path,
) -> None:
    gateway = PassiveGateway(
        tmp_path,
        keys=[LIMITED, MASTER],
        log={"segment_bytes": 64 << 10, "pool_segments": 1, "retention_bytes": 3 * (64 << 10)},
    )
    gateway.log.hold("reader", 0)
    client = gateway.connect("s3cret")
    while not (client.session.blocked and gateway.log.full):
        client.session.feed(wire.encode_publish("in.x", bytes(1000), 1, 5), gateway.now)
        gateway.log.on_event(gateway.now)
    waiting = client.session.kept // len(wire.encode_publish("in.x", bytes(1000), 1, 5))
    stored = gateway.log.appended
    gateway.keys.replace([MASTER])
    assert client.exchange(b"") == wire.encode_nack(401, "unauthenticated", 5) * waiting
    assert gateway.log.appended == stored
    gateway.close()


def test_reload_that_changes_nothing_is_not_noticed(gateway: PassiveGateway) -> None:
    client = gateway.connect("s3cret")
    id = client.subscribe("out.x", 0)
    gateway.connect("master-key").publish("out.x", b"m")
    gateway.keys.replace([LIMITED, MASTER, OTHER])
    assert client.poll_all(id) == [b"m"]
    assert client.session.authenticated == "sensor-7"
