"""The zeroctl session as docs/protocols/zeroctl.md has it: opening, publishing, binding, delivering."""

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.bus import ANSWERS
from headrace.config.schema import Key
from headrace.mapping import Map, Rule
from headrace.wire import zeroctl as wire
from headrace.wire.zeroctl import Condition
from tests.oracle.zeroctl import BadPayload, read_header
from tests.sessions.passive_gateway import break_syncs
from tests.sessions.passive_zeroctl import UUID, Peer, ZeroctlGateway, header, message

ACK, QUEUE, DURABLE = 1, 2, 4


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ZeroctlGateway]:
    made = ZeroctlGateway(tmp_path / "log")
    yield made
    made.close()


@pytest.fixture
def large_gateway(tmp_path: Path) -> Iterator[ZeroctlGateway]:
    made = ZeroctlGateway(tmp_path / "log", log={"segment_bytes": 1 << 24})
    yield made
    made.close()


# --- opening ------------------------------------------------------------------------------------------------


def test_open_is_answered_with_who_the_gateway_is_and_its_limits(gateway: ZeroctlGateway) -> None:
    (welcome,) = gateway.peer(None).send(wire.encode_open("dev-key", "n", UUID, 5))
    assert isinstance(welcome, wire.Welcome)
    assert (welcome.id, welcome.version, welcome.node) == (5, 1, "gw")
    assert (welcome.max_header, welcome.max_body, welcome.keepalive) == (65536, 4 << 20, 0)
    assert welcome.uuid == "00000000-0000-4000-8000-000000000001"


@pytest.mark.parametrize(
    ("frame", "refusal"),
    [
        (wire.encode_open("guess", "", "", 1), (401, "the key is unknown")),
        (wire.encode_open("", "", "", 1), (401, "a key is needed")),
        (wire.encode_open("dev-key", "", "", 1, 2), (426, "the version is 1, not 2")),
        (wire.encode_open("dev-key", "n" * 257, "", 1), (400, "OPEN: a node's name has 256 bytes at most")),
        (
            wire.encode_open("dev-key", "", "x", 1),
            (400, "OPEN: a node-uuid is a UUID of 32 or 36 characters, or 64 hex digits"),
        ),
        (struct.pack(">IBQ", 9, 1, 1), (400, "OPEN: the payload is too short, or longer than its fields")),
        (message("event.a", b"", 1), (401, "OPEN comes first")),
        (wire.encode_bind(1, "#", 1), (401, "OPEN comes first")),
    ],
)
def test_opening_that_fails_says_why_and_may_be_tried_again(
    gateway: ZeroctlGateway, frame: bytes, refusal: tuple[int, str]
) -> None:
    peer = gateway.peer(None)
    assert peer.refused(frame) == refusal
    (answer,) = peer.send(wire.encode_open("dev-key", "", "", 2))
    assert isinstance(answer, wire.Welcome)
    assert peer.refused(wire.encode_open("dev-key", "", "", 3)) == (400, "the connection is open already")


def test_anonymous_peer_has_the_rights_of_the_named_key(tmp_path: Path) -> None:
    guest = Key(name="guest", key="secret", publish=["event.#"], subscribe=[])
    gateway = ZeroctlGateway(tmp_path / "log", keys=[guest], anonymous="guest")
    peer = gateway.peer("")
    peer.publish("event.a", b"x")
    assert peer.refused(message("service.a", b"x", 9)) == (403, "key 'guest' may not publish to 'service.a'")
    assert gateway.counts["anonymous"] == 1
    gateway.close()


def test_anonymous_key_that_is_not_there_is_none(tmp_path: Path) -> None:
    gateway = ZeroctlGateway(tmp_path / "log", anonymous="nobody")
    assert gateway.peer(None).refused(wire.encode_open("", "", "", 1)) == (401, "a key is needed")
    gateway.close()


def test_peer_that_never_opens_is_closed(tmp_path: Path) -> None:
    gateway = ZeroctlGateway(tmp_path / "log", handshake_timeout=30)
    peer = gateway.peer(None)
    peer.session.elapse(gateway.now)
    peer.session.elapse(gateway.now + 31_000_000)
    assert peer.session.closing
    assert gateway.counts["handshakes_late"] == 1
    gateway.close()


# --- publishing ---------------------------------------------------------------------------------------------


def test_consecutive_messages_are_confirmed_together_and_a_refusal_has_its_place(
    gateway: ZeroctlGateway,
) -> None:
    peer = gateway.peer()
    wrong = wire.encode_message("event.a", header(b"other"), b"body", 12)
    answers = peer.send(
        message("event.a", b"1", 10),
        message("event.b", b"2", 11),
        wrong,
        message("event.a", b"3", 13),
        message("event.a", b"4", 99),
        message("event.a", b"5", 100, confirm=False),
        wire.encode_ping(5),
    )
    assert [(one.type.name, one.id, one.fields()) for one in answers] == [
        ("CONFIRM", 11, {"count": 2}),
        ("REFUSE", 12, {"code": 422, "text": "sha256 is not that of the body"}),
        ("CONFIRM", 13, {"count": 1}),
        ("CONFIRM", 99, {"count": 1}),
        ("PONG", 5, {"payload": b""}),
    ]
    assert gateway.counts["bad_digest"] == 1
    assert gateway.counts["confirmed"] == 4


# --- return paths -------------------------------------------------------------------------------------------


@pytest.fixture(params=["asker", "asker@home"])
def asked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ZeroctlGateway]:
    """A gateway with a service, and a key that may ask it."""
    asker = Key(name=request.param, key="secret", publish=["service.#", "reply.#"], subscribe=["#"])
    made = ZeroctlGateway(tmp_path / "log", keys=[asker])
    made.zeroctl.set_served(["service.jobs.#"])
    yield made
    made.close()


def flags(gateway: ZeroctlGateway) -> list[int]:
    return [record.flags & ANSWERS for record in gateway.log.reader()]


@pytest.mark.parametrize("path", ["on_start", "on_finish"])
def test_answers_go_where_the_sender_of_the_request_may_publish(asked: ZeroctlGateway, path: str) -> None:
    peer = asked.peer("secret")
    name = peer.session.opened
    peer.publish("service.jobs.a", b"x", **{path: "reply.1"})
    code, text = peer.refused(message("service.jobs.a", b"x", 9, **{path: "cmd.door"}))
    assert (code, text) == (403, f"key '{name}' may not publish to 'cmd.door', where the answer would go")
    both = {"on_start": "reply.1", "on_finish": "reply.1", path: "cmd.door"}
    assert peer.refused(message("service.jobs.a", b"x", 9, **both))[0] == 403
    assert asked.counts["return_paths_refused"] == 2
    assert flags(asked) == [ANSWERS]


def test_request_to_another_provider_has_its_return_paths_judged_by_that_one(asked: ZeroctlGateway) -> None:
    peer = asked.peer("secret")
    peer.publish("service.other", b"x", on_start="cmd.door")
    peer.publish("service.other", b"x", on_start="reply.1")
    peer.publish("service.other", b"x")
    assert flags(asked) == [0, ANSWERS, 0]


def test_answers_go_nowhere_where_a_signature_is_needed(gateway: ZeroctlGateway) -> None:
    gateway.zeroctl.set_served(["service.#"])
    gateway.zeroctl.set_signing(["cmd.#"])
    peer = gateway.peer()
    peer.publish("service.a", b"x", on_finish="reply.1")
    refusal = (403, "answers are not signed, and 'cmd.door' needs it")
    assert peer.refused(message("service.a", b"x", 9, on_finish="cmd.door")) == refusal
    assert flags(gateway) == [ANSWERS]


def test_answers_go_only_to_keys_that_the_map_leaves_as_they_are(gateway: ZeroctlGateway) -> None:
    gateway.zeroctl.set_served(["service.#"])
    gateway.zeroctl.map = Map([Rule("edge.{x}", "plant.{x}"), Rule("service.{r...}", "service.{r...}")])
    peer = gateway.peer()
    peer.publish("service.a", b"x", on_finish="service.back")
    for wrong in ("edge.1", "plant.1", "other"):
        code, text = peer.refused(message("service.a", b"x", 9, on_finish=wrong))
        assert code == 403
        assert f"answers go to the topic '{wrong}', which by [[map]] is not the key's" in text
    assert flags(gateway) == [ANSWERS]


def test_confirmation_waits_until_the_log_is_safe(gateway: ZeroctlGateway) -> None:
    peer = gateway.peer()
    # A disk may be faster than this; not every time.
    assert any(peer.session.feed(message("event.a", b"x", id), gateway.now) == b"" for id in range(2, 50))
    assert peer.session.out.size
    gateway.log.sync_now()
    (answer,) = peer.decoder.feed(peer.session.feed(b"", gateway.now))
    assert isinstance(answer, wire.Confirm)


def test_failed_sync_ends_the_connection_without_a_confirmation(gateway: ZeroctlGateway) -> None:
    peer = gateway.peer()
    break_syncs(gateway.log)
    assert peer.session.feed(message("event.a", b"x", 2), gateway.now) == b""
    gateway.wait_for_log(lambda: gateway.log.failed)
    assert peer.session.elapse(gateway.now) == b""
    assert peer.session.closing
    assert gateway.counts["unconfirmed"] == 1


@pytest.mark.parametrize(
    ("frame", "refusal"),
    [
        (message("event.*", b"", 2), 400),
        (wire.encode_message("event.a", b"{}", b"", 2), (422, "node-name is missing")),
        (wire.encode_message("event.a", b"[]", b"", 2), (422, "the header is not a JSON object in UTF-8")),
        (message("event.a", b"", 2, sha256=""), (422, "sha256 is missing")),
        (message("event.a", b"", 2, on_start="#"), (422, "on-start and on-finish are routing keys")),
        (
            message("event.a", bytes((4 << 20) + 1), 2),
            (413, "a header has 65536 bytes at most, and a body 4194304"),
        ),
        (
            message("event.a", b"", 2, filler="x" * 65536),
            (413, "a header has 65536 bytes at most, and a body 4194304"),
        ),
        (wire.encode_confirm(1, 2), (400, "only the gateway sends such frames")),
        (
            struct.pack(">IBQ", 10, 3, 2) + b"\0",
            (400, "MESSAGE: the payload is too short, or longer than its fields"),
        ),
    ],
)
def test_message_that_breaks_a_rule_is_refused_with_the_reason(
    gateway: ZeroctlGateway, frame: bytes, refusal: int | tuple[int, str]
) -> None:
    peer = gateway.peer()
    code, text = peer.refused(frame)
    assert refusal in (code, (code, text))
    peer.publish("event.a", b"goes on")


def test_largest_header_and_body_are_taken_and_delivered(large_gateway: ZeroctlGateway) -> None:
    peer = large_gateway.peer()
    peer.bind("event.#")
    body = bytes(range(256)) * (4 << 12)
    filler = "x" * (65536 - len(header(body, filler="")))
    peer.publish("event.big", body, filler=filler)
    (delivery,) = peer.pull()
    assert len(delivery.header) == 65536
    assert delivery.body == body


def test_stream_that_is_no_stream_of_frames_is_told_so_and_closed(gateway: ZeroctlGateway) -> None:
    peer = gateway.peer()
    answers = peer.send(message("event.a", b"x", 2), b"\0\0\0\1")
    assert [one.type.name for one in answers] == ["CONFIRM", "REFUSE"]
    assert peer.session.closing
    assert gateway.counts["bad_frames"] == 1


def test_log_keeps_header_and_body_and_who_sent_it(gateway: ZeroctlGateway) -> None:
    gateway.peer().publish("event.a", b"body", priority=3)
    member = gateway.bus.subscribe("#", start=0).join(None, -1, gateway.now)
    received = member.receive(gateway.now)
    assert received is not None
    assert (received.topic, received.payload, received.protocol) == (b"event.a", b"body", 4)
    assert json.loads(received.headers)["priority"] == 3


# --- binding and delivering ---------------------------------------------------------------------------------


def test_every_binding_sees_what_its_filter_matches(gateway: ZeroctlGateway) -> None:
    one, two = gateway.peer(), gateway.peer()
    one.bind("service.img.*.png", 1)
    one.bind("service.#.png", 2)
    two.bind("service.img.png", 1)
    for key in (
        "service.img.crop.png",
        "service.img.png",
        "service.img.dc1.crop.png",
        "service.png",
        "service.x",
    ):
        one.publish(key, key.encode())
    assert sorted((one.binding, one.key) for one in one.pull()) == [
        (1, "service.img.crop.png"),
        (2, "service.img.crop.png"),
        (2, "service.img.dc1.crop.png"),
        (2, "service.img.png"),
        (2, "service.png"),
    ]
    assert two.bodies() == [b"service.img.png"]


def test_delivery_has_key_header_and_body_as_they_came(gateway: ZeroctlGateway) -> None:
    peer = gateway.peer()
    peer.bind("#", 9)
    sent = header(b"body")[:-1] + b', "_sec-sig": "AQ==", "_transport-ttl" : 1.50, "_passed-x":null }'
    peer.send(wire.encode_message("event.a", sent, b"body", 2))
    (delivery,) = peer.pull()
    assert (delivery.binding, delivery.key, delivery.header, delivery.body) == (9, "event.a", sent, b"body")
    assert (delivery.flags, delivery.deliveries) == (0, 1)


def test_reserved_keys_of_a_peer_are_not_the_gateways_own_in_the_log(gateway: ZeroctlGateway) -> None:
    sent = header(b"")[:-1] + b', "_transport-ttl": 5}'
    gateway.peer().send(wire.encode_message("event.a", sent, b"", 2))
    received = gateway.bus.subscribe("#", start=0).join(None, -1, gateway.now).receive(gateway.now)
    assert received is not None
    assert json.loads(received.headers)["_passed-_transport-ttl"] == 5


def test_message_of_another_protocol_gets_the_gateways_header(gateway: ZeroctlGateway) -> None:
    peer = gateway.peer()
    peer.bind("#")
    gateway.bus.publish(
        "sensors.7", b"21.5", protocol=1, headers=b'{"unit": "C", "_transport-x": 1}', now=gateway.now
    )
    gateway.bus.publish("sensors.8", b"", protocol=5, now=gateway.now)
    first, second = peer.pull()
    assert first.headers == {
        "unit": "C",
        "node-name": "gw",
        "node-uuid": "00000000-0000-4000-8000-000000000001",
        "ts": pytest.approx(gateway.now / 1e6),
        "sha256": hashlib.sha256(b"21.5").hexdigest(),
        "_transport-protocol": "blipmq",
    }
    assert second.headers["_transport-protocol"] == "felix"
    assert wire.header_sha256(second.header) == hashlib.sha256(b"").digest()


@pytest.mark.parametrize("topic", ["t" * 256, "sensors.é", "a.*.b"])
def test_topic_that_is_no_routing_key_is_not_offered_and_counted(gateway: ZeroctlGateway, topic: str) -> None:
    peer = gateway.peer()
    peer.bind("#", flags=ACK)
    gateway.bus.publish(topic, b"no", protocol=1, now=gateway.now)
    peer.publish("event.a", b"yes")
    assert peer.bodies() == [b"yes"]
    assert gateway.counts["no_counterpart"] == 1


def test_conditions_on_headers_hold_back_what_does_not_meet_them(gateway: ZeroctlGateway) -> None:
    peer = gateway.peer()
    every = [(Condition.EQUAL, "dc", "1"), (Condition.PRESENT, "host", ""), (Condition.PREFIX, "role", "web")]
    peer.bind("event.#", 1, conditions=every, credit=2)
    for number, more in enumerate(
        [
            {"dc": "1", "host": None, "role": "web"},
            {"dc": "2", "host": "h", "role": "web-a"},
            {"dc": "1", "host": "h", "role": "db"},
            {"dc": 1, "host": False, "role": "web-b"},
            {"dc": "1", "host": "h", "role": "web"},
        ]
    ):
        peer.publish("event.a", str(number).encode(), **more)
    assert peer.bodies() == [b"3", b"4"]
    assert gateway.counts["filtered"] == 3


def test_credit_bounds_what_is_delivered(gateway: ZeroctlGateway) -> None:
    peer = gateway.peer()
    peer.bind("event.#", 1, credit=2)
    peer.publish("event.a", b"1", b"2", b"3", b"4")
    assert peer.bodies() == [b"1", b"2"]
    assert peer.bodies() == []
    assert peer.send(wire.encode_credit(1, 1)) == []
    assert peer.bodies() == [b"3"]
    assert peer.send(wire.encode_credit(1, wire.NO_LIMIT)) == []
    assert peer.bodies() == [b"4"]


def test_output_stops_at_the_room_there_is_and_goes_on(gateway: ZeroctlGateway) -> None:
    peer = gateway.peer()
    peer.bind("event.#")
    bodies = [bytes([i]) * 1000 for i in range(20)]
    peer.publish("event.a", *bodies)
    got: list[bytes] = []
    while part := peer.pull(room=3000):
        assert len(part) <= 4
        got += [one.body for one in part]
    assert got == bodies


def test_bindings_take_turns(gateway: ZeroctlGateway) -> None:
    peer = gateway.peer()
    peer.bind("event.a", 1)
    peer.bind("event.b", 2)
    for key in ("event.a", "event.b"):
        peer.publish(key, *(b"x" for _ in range(200)))
    order = [one.binding for one in peer.pull()]
    assert len(order) == 400
    assert order[:200] != [order[0]] * 200


def test_acknowledged_delivery_does_not_come_again_and_another_does(gateway: ZeroctlGateway) -> None:
    peer = gateway.peer()
    peer.bind("event.#", 1, flags=ACK)
    peer.publish("event.a", b"1", b"2")
    first, second = peer.pull()
    assert (first.flags, second.flags) == (1, 1)
    assert peer.send(wire.encode_ack(1, [first.id])) == []
    gateway.elapse(3)
    (again,) = peer.pull()
    assert (again.body, again.id, again.flags, again.deliveries) == (b"2", second.id, 3, 2)
    assert peer.send(wire.encode_ack(1, [again.id])) == []
    assert peer.refused(wire.encode_ack(1, [again.id], 8)) == (
        404,
        f"no delivery {again.id} of binding 1 waits for an acknowledgement",
    )


def test_unconfirmed_message_is_to_be_acknowledged_all_the_same(gateway: ZeroctlGateway) -> None:
    peer = gateway.peer()
    peer.bind("event.#", 1, flags=ACK)
    peer.send(message("event.a", b"x", 1, confirm=False))
    (delivery,) = peer.pull()
    assert delivery.flags == 1


def test_rejected_delivery_comes_again_after_its_delay(gateway: ZeroctlGateway) -> None:
    peer = gateway.peer()
    peer.bind("event.#", 1, flags=ACK)
    peer.publish("event.a", b"1")
    (first,) = peer.pull()
    assert peer.send(wire.encode_reject(1, [first.id], delay=500)) == []
    assert peer.pull() == []
    gateway.elapse(0.6)
    (again,) = peer.pull()
    assert (again.id, again.deliveries) == (first.id, 2)


def test_what_nobody_acknowledges_goes_to_the_dead_letters_with_a_header(gateway: ZeroctlGateway) -> None:
    peer, undertaker = gateway.peer(), gateway.peer()
    undertaker.bind("dead.#")
    peer.bind("event.#", 1, flags=ACK)
    peer.publish("event.a", b"poison", shape="round")
    for _ in range(8):
        peer.pull()
        gateway.elapse(70)
    (letter,) = undertaker.pull()
    assert (letter.key, letter.body) == ("dead.event.a", b"poison")
    assert letter.headers["dead-reason"] == "no acknowledgement"
    assert (letter.headers["shape"], letter.headers["node-name"]) == ("round", "testnode")


def test_unbound_binding_gets_no_more_and_its_number_is_free(gateway: ZeroctlGateway) -> None:
    peer = gateway.peer()
    peer.bind("event.#", 1)
    assert peer.refused(wire.encode_bind(1, "event.#", 8)) == (409, "binding 1 is there already")
    (answer,) = peer.send(wire.encode_unbind(1, 9))
    assert isinstance(answer, wire.Confirm)
    assert peer.refused(wire.encode_unbind(1, 9)) == (404, "there is no binding 1")
    peer.publish("event.a", b"1")
    assert peer.pull() == []
    peer.bind("event.#", 1)


@pytest.mark.parametrize(
    ("frame", "refusal"),
    [
        (wire.encode_bind(1, "", 2), (400, "a filter has 1 to 255 printable ASCII characters")),
        (wire.encode_bind(1, "é", 2), (400, "a filter has 1 to 255 printable ASCII characters")),
        (wire.encode_bind(1, "f" * 256, 2), (400, "a filter has 1 to 255 printable ASCII characters")),
        (wire.encode_bind(1, "#", 2, 8), (400, "BIND: flags that mean nothing are set")),
        (wire.encode_bind(1, "#", 2, DURABLE), (400, "a durable binding is one with acknowledgements")),
        (wire.encode_bind(1, "#", 2, DURABLE | ACK), (400, "a durable binding needs a name")),
        (wire.encode_credit(3, 1, 2), (404, "there is no binding 3")),
        (wire.encode_ack(3, [1], 2), (404, "there is no binding 3")),
        (wire.encode_reject(3, [1], 2), (404, "there is no binding 3")),
    ],
)
def test_wish_that_cannot_be_is_refused(
    gateway: ZeroctlGateway, frame: bytes, refusal: tuple[int, str]
) -> None:
    assert gateway.peer().refused(frame) == refusal


# --- queues, services and durable bindings --------------------------------------------------------------------


def test_competing_providers_get_each_request_once(gateway: ZeroctlGateway) -> None:
    gateway.nodes.uuids.add(UUID)
    one, two, client = gateway.peer(), gateway.peer(), gateway.peer()
    for provider in (one, two):
        provider.bind("service.nmap.#", 1, flags=QUEUE | ACK, credit=1)
    client.publish("service.nmap.dc1", *(bytes([i]) for i in range(6)))
    got: dict[int, list[bytes]] = {0: [], 1: []}
    for _ in range(6):
        for number, provider in enumerate((one, two)):
            for delivery in provider.pull():
                got[number].append(delivery.body)
                provider.send(wire.encode_ack(1, [delivery.id]), wire.encode_credit(1, 1))
    assert sorted(got[0] + got[1]) == [bytes([i]) for i in range(6)]
    assert got[0]
    assert got[1]


def test_request_of_a_provider_that_dies_goes_to_another(gateway: ZeroctlGateway) -> None:
    gateway.nodes.uuids.add(UUID)
    one, two = gateway.peer(), gateway.peer()
    one.bind("service.a", 1, flags=QUEUE | ACK)
    two.publish("service.a", b"job")
    assert one.bodies() == [b"job"]
    two.bind("service.a", 1, flags=QUEUE | ACK)
    assert two.bodies() == []
    one.leave()
    assert two.bodies() == [b"job"]


def test_requests_wait_for_a_provider_that_comes_back(gateway: ZeroctlGateway) -> None:
    gateway.nodes.uuids.add(UUID)
    provider = gateway.peer()
    provider.bind("service.a", 1, flags=QUEUE | ACK | DURABLE)
    provider.leave()
    gateway.peer().publish("service.a", b"waited")
    gateway.restart()
    gateway.nodes.uuids.add(UUID)
    again = gateway.peer()
    again.bind("service.a", 1, flags=QUEUE | ACK | DURABLE)
    assert again.bodies() == [b"waited"]


def two_of_a_queue(gateway: ZeroctlGateway, flags: int) -> tuple[Peer, Peer, int]:
    """The member of a queue that has a delivery, one that has none, and the delivery's tag."""
    first, second = gateway.peer(), gateway.peer()
    for peer in (first, second):
        peer.bind("event.#", 1, flags=flags, name="shared")
    first.publish("event.a", b"x")
    for holder, other in ((first, second), (second, first)):
        for delivery in holder.pull():
            return holder, other, delivery.id
    raise AssertionError("nobody got it")


@pytest.mark.parametrize("durable", [0, DURABLE])
def test_delivery_is_acknowledged_and_rejected_only_by_the_member_that_has_it(
    gateway: ZeroctlGateway, durable: int
) -> None:
    holder, other, tag = two_of_a_queue(gateway, ACK | QUEUE | durable)
    refusal = (404, f"no delivery {tag} of binding 1 waits for an acknowledgement")
    assert other.refused(wire.encode_ack(1, [tag])) == refusal
    assert other.refused(wire.encode_reject(1, [tag])) == refusal
    assert (gateway.counts["acks"], gateway.counts["rejects"]) == (0, 0)
    # While it waits to be delivered again it is still the business of who had it.
    assert holder.send(wire.encode_reject(1, [tag], delay=5000)) == []
    assert other.refused(wire.encode_ack(1, [tag])) == refusal
    assert holder.send(wire.encode_ack(1, [tag])) == []
    gateway.elapse(60)
    assert holder.pull() == other.pull() == []


def test_delivery_that_went_to_another_member_is_not_acknowledged_by_the_first(
    gateway: ZeroctlGateway,
) -> None:
    holder, other, tag = two_of_a_queue(gateway, ACK | QUEUE)
    holder.send(wire.encode_unbind(1, 8))
    assert [one.id for one in other.pull()] == [tag]
    holder.bind("event.#", 1, flags=ACK | QUEUE, name="shared")
    assert holder.refused(wire.encode_ack(1, [tag]))[0] == 404
    assert other.send(wire.encode_ack(1, [tag])) == []


def test_delivery_from_before_a_restart_is_acknowledged_after_it(gateway: ZeroctlGateway) -> None:
    _, _, tag = two_of_a_queue(gateway, ACK | QUEUE | DURABLE)
    gateway.restart()
    peer = gateway.peer()
    peer.bind("event.#", 1, flags=ACK | QUEUE | DURABLE, name="shared")
    assert peer.send(wire.encode_ack(1, [tag])) == []
    assert peer.pull() == []


def test_queues_under_other_names_and_conditions_are_others(gateway: ZeroctlGateway) -> None:
    peers = [gateway.peer() for _ in range(4)]
    peers[0].bind("event.#", 1, flags=QUEUE)
    peers[1].bind("event.#", 1, flags=QUEUE, name="audit")
    peers[2].bind("event.#", 1, flags=QUEUE, conditions=[(Condition.PRESENT, "ts", "")])
    peers[3].bind("event.#", 1, flags=QUEUE)
    peers[0].publish("event.a", b"x")
    counts = [len(peer.pull()) for peer in peers]
    assert counts[1:3] == [1, 1]
    assert counts[0] + counts[3] == 1


@pytest.mark.parametrize("filter", ["service.a", "service.#", "#", "*.a", "service"])
def test_transient_node_may_use_but_not_offer_a_service(gateway: ZeroctlGateway, filter: str) -> None:
    peer = gateway.peer()
    code, text = peer.refused(wire.encode_bind(1, filter, 7, QUEUE))
    assert code == 409
    assert text.startswith("a transient node cannot offer a service")
    peer.bind(filter, 1)
    peer.bind("event.#", 2, flags=QUEUE)
    peer.publish("service.a", b"request")
    gateway.nodes.uuids.add(UUID)
    peer.bind(filter, 3, flags=QUEUE)
    nameless = gateway.peer(uuid="")
    assert nameless.refused(wire.encode_bind(1, filter, 7, QUEUE))[0] == 409


def test_durable_binding_goes_on_after_a_restart(gateway: ZeroctlGateway) -> None:
    peer = gateway.peer()
    peer.bind("event.#", 1, flags=ACK | DURABLE, name="mine")
    peer.publish("event.a", b"1", b"2")
    first, _ = peer.pull()
    peer.send(wire.encode_ack(1, [first.id]))
    gateway.restart()
    gateway.peer("other-key").bind("event.#", 1, flags=ACK | DURABLE, name="mine")
    again = gateway.peer()
    again.bind("event.#", 5, flags=ACK | DURABLE, name="mine")
    assert again.bodies() == [b"2"]


def test_durable_binding_is_taken_over_by_the_newest_connection(gateway: ZeroctlGateway) -> None:
    old, new = gateway.peer(), gateway.peer()
    old.bind("event.#", 1, flags=ACK | DURABLE, name="mine")
    new.bind("event.#", 1, flags=ACK | DURABLE, name="mine")
    old.send(wire.encode_credit(1, 1))
    (told,) = old.decoder.feed(old.session.pull(gateway.now))
    assert isinstance(told, wire.Refuse)
    assert (told.id, told.code) == (0, 410)
    new.publish("event.a", b"1")
    assert new.bodies() == [b"1"]


def test_unbinding_a_durable_binding_ends_it(gateway: ZeroctlGateway) -> None:
    peer = gateway.peer()
    peer.bind("event.#", 1, flags=ACK | DURABLE, name="mine")
    peer.send(wire.encode_unbind(1, 2))
    peer.publish("event.a", b"missed")
    peer.bind("event.#", 1, flags=ACK | DURABLE, name="mine")
    assert peer.pull() == []


# --- rights -------------------------------------------------------------------------------------------------


def key(name: str, publish: list[str], subscribe: list[str]) -> Key:
    return Key(name=name, key=f"{name}-key", publish=publish, subscribe=subscribe)


@pytest.mark.parametrize(
    ("allowed", "filter", "may"),
    [
        ("event.#", "event.a", True),
        ("event.#", "event.*.x", True),
        ("event.#", "event.#", True),
        ("event.#", "event", True),
        ("event.#", "#", False),
        ("event.*", "event.#", False),
        ("event.*", "event.*", True),
        ("event.*", "event.a.b", False),
        ("event.*", "*.a", False),
        ("#.x", "a.#.x", True),
        ("#.x", "a.#", False),
    ],
)
def test_filter_needs_the_right_to_all_that_it_matches(
    gateway: ZeroctlGateway, allowed: str, filter: str, may: bool
) -> None:
    gateway.keys.replace([key("k", [], [allowed])])
    peer = gateway.peer("k-key")
    (answer,) = peer.send(wire.encode_bind(1, filter, 7))
    assert isinstance(answer, wire.Confirm if may else wire.Refuse), answer
    if not may:
        assert answer.fields() == {"code": 403, "text": f"key 'k' may not bind to '{filter}'"}


def test_right_that_is_taken_away_ends_its_bindings(gateway: ZeroctlGateway) -> None:
    gateway.keys.replace([key("k", ["#"], ["event.#", "service.#"])])
    peer = gateway.peer("k-key")
    peer.bind("event.#", 1)
    peer.bind("service.a", 2)
    gateway.keys.replace([key("k", ["event.a"], ["event.#"])])
    (told,) = peer.send(b"")
    assert told.fields() == {"code": 403, "text": "binding 2: key 'k' may not bind to 'service.a'"}
    assert peer.refused(message("event.b", b"", 3))[0] == 403
    peer.publish("event.a", b"1")
    assert peer.bodies() == [b"1"]


def test_key_that_is_taken_away_ends_the_connection(gateway: ZeroctlGateway) -> None:
    gateway.keys.replace([key("k", ["#"], ["#"])])
    peer = gateway.peer("k-key")
    peer.bind("#")
    gateway.keys.replace([])
    gateway.bus.publish("event.a", b"secret", now=gateway.now)
    gateway.bus.dispatch()
    (told,) = peer.decoder.feed(peer.session.pull(gateway.now))
    assert told.fields() == {"code": 401, "text": "the key 'k' is no longer known"}
    assert peer.session.closing


# --- signatures ---------------------------------------------------------------------------------------------


def test_message_that_needs_a_signature_is_judged_by_the_verifier(tmp_path: Path) -> None:
    gateway = ZeroctlGateway(tmp_path / "log", signing=["service.pay.#"])
    seen: list[tuple[bytes, bytes]] = []

    def verify(header: bytes, body: bytes) -> str:
        seen.append((header, body))
        return "" if b"_sec-sig" in header else "the message has no signature"

    gateway.zeroctl.verifier = verify
    peer = gateway.peer()
    peer.publish("service.other", b"1")
    assert peer.refused(message("service.pay.now", b"1", 2)) == (403, "the message has no signature")
    signed = header(b"1")[:-1] + b',"_sec-sig":"x"}'
    (answer,) = peer.send(wire.encode_message("service.pay.now", signed, b"1", 3))
    assert isinstance(answer, wire.Confirm)
    assert seen[-1] == (signed, b"1")
    gateway.close()


# --- time, room and large bodies ------------------------------------------------------------------------------


def test_silent_peer_is_asked_and_then_closed(tmp_path: Path) -> None:
    gateway = ZeroctlGateway(tmp_path / "log", keepalive=10)
    peer = gateway.peer()
    begin = gateway.now
    (ping,) = peer.decoder.feed(peer.session.elapse(begin + 11_000_000))
    assert isinstance(ping, wire.Ping)
    assert peer.session.elapse(begin + 12_000_000) == b""
    gateway.now = begin + 13_000_000
    assert peer.send(wire.encode_pong(0)) == []
    assert peer.session.elapse(begin + 14_000_000) == b""
    peer.session.elapse(begin + 44_000_000)
    assert peer.session.closing
    assert gateway.counts["silent"] == 1
    gateway.close()


def test_full_log_blocks_and_then_refuses_what_is_to_be_confirmed(tmp_path: Path) -> None:
    gateway = ZeroctlGateway(
        tmp_path / "log", log={"segment_bytes": 1 << 18, "retention_bytes": 3 << 18, "on_full": "block"}
    )
    gateway.log.hold("test", 0)
    peer = gateway.peer()
    number = 2
    while not peer.session.waits_space or gateway.log.full is None:
        number += 1
        peer.session.feed(message("event.a", bytes(60_000), number), gateway.now)
        if peer.session.waits_space and gateway.log.full is None:
            gateway.wait_for_log(lambda: gateway.log.full or gateway.log.stats()["pool_segments"] > 0)
            peer.session.feed(b"", gateway.now)
    gateway.log.sync_now()
    peer.decoder.feed(peer.session.feed(b"", gateway.now))
    gateway.now += 6_000_000
    answers = peer.decoder.feed(peer.session.feed(b"", gateway.now))
    refusals = [one for one in answers if isinstance(one, wire.Refuse)]
    assert [(one.id, one.code) for one in refusals] == [(number, 503)]
    assert gateway.counts["refused_full"] == 1
    gateway.close()


class Carrier:
    """As much of a connection as a session that is blocked needs."""

    peer = "test"
    name = "zeroctl-1"

    def __init__(self) -> None:
        self.unblocked = 0

    def wake(self) -> None:
        pass

    def unblock(self) -> None:
        self.unblocked += 1


def test_large_body_is_hashed_elsewhere_while_the_connection_waits_in_order(gateway: ZeroctlGateway) -> None:
    asked: list[tuple[bytes, Any]] = []
    gateway.zeroctl.hash_inline = 1000
    gateway.zeroctl.hash_later = lambda body, done: asked.append((body, done))
    peer = gateway.peer()
    peer.session.connection = carrier = Carrier()
    large = bytes(2000)
    frames = [message("event.a", b"small", 2), message("event.a", large, 3), message("event.a", b"after", 4)]
    early = peer.session.feed(b"".join(frames), gateway.now)  # the first one's, if it is safe by now
    assert peer.session.blocked
    assert [len(body) for body, _ in asked] == [2000]
    early += peer.session.feed(b"", gateway.now)
    assert len(asked) == 1
    asked[0][1](hashlib.sha256(large).digest())
    assert carrier.unblocked == 1
    answers = [*peer.decoder.feed(early), *peer.send()]
    assert sum(one.count for one in answers if isinstance(one, wire.Confirm)) == 3
    assert gateway.counts["hashed_off_loop"] == 1
    received = gateway.bus.subscribe("#", start=0).join(None, -1, gateway.now)
    kept = [received.receive(gateway.now) for _ in range(3)]
    assert [one.payload for one in kept if one] == [b"small", large, b"after"]


def test_large_body_with_a_wrong_digest_is_refused_and_the_next_one_is_judged_anew(
    gateway: ZeroctlGateway,
) -> None:
    gateway.zeroctl.hash_inline = 1000
    gateway.zeroctl.hash_later = lambda body, done: done(hashlib.sha256(body).digest())
    peer = gateway.peer()
    peer.session.connection = Carrier()
    wrong = wire.encode_message("event.a", header(b"other"), bytes(2000), 2)
    first = peer.send(wrong, message("event.a", bytes(3000), 3))
    answers = first + peer.send() + peer.send()
    assert [(one.type.name, one.id) for one in answers] == [("REFUSE", 2), ("CONFIRM", 3)]


def test_stopping_gateway_says_so(gateway: ZeroctlGateway) -> None:
    peer = gateway.peer()
    (told,) = peer.decoder.feed(peer.session.stop(gateway.now))
    assert told.fields() == {"code": 503, "text": "the gateway is stopping"}


def test_peer_that_leaves_leaves_nothing_behind(gateway: ZeroctlGateway) -> None:
    peer = gateway.peer()
    for number in range(50):
        peer.bind(f"event.{number}.#", number)
    assert len(gateway.bus.subscriptions) == 50
    peer.leave()
    assert len(gateway.bus.subscriptions) == 0


@pytest.mark.parametrize("flags", [2, 3, 7], ids=["plain", "acknowledged", "durable"])
def test_queues_without_members_end_after_the_grace_time(gateway: ZeroctlGateway, flags: int) -> None:
    gateway.nodes.uuids.add(UUID)
    peer = gateway.peer()
    for number in range(5):
        peer.bind("event.#", number, flags=flags, name=f"queue-{number}")
    for number in range(4):
        assert isinstance(peer.send(wire.encode_unbind(number, 8))[0], wire.Confirm)
    gateway.elapse(3500)
    peer.session.elapse(gateway.now)
    assert len(gateway.bus.subscriptions) == 5
    gateway.elapse(200)
    peer.session.elapse(gateway.now)
    assert len(gateway.bus.subscriptions) == 1
    assert gateway.counts["expired"] == 4
    peer.bind("event.#", 0, flags=flags, name="queue-0")
    assert len(gateway.bus.subscriptions) == 2


@pytest.mark.parametrize("value", ["1" * 5000, "[-0." + "1" * 5000 + "]", '{"x":1e' + "1" * 5000 + "}"])
def test_numbers_that_many_readers_cannot_read_are_refused(gateway: ZeroctlGateway, value: str) -> None:
    peer = gateway.peer()
    said = header(b"x")[:-1] + b',"n":' + value.encode() + b"}"
    code, text = peer.refused(wire.encode_message("event.x", said, b"x", 1, True))
    assert (code, text) == (422, "the header has a number of more than 1000 characters")
    with pytest.raises(BadPayload, match="number of more than 1000"):
        read_header(said)
    said = header(b"x")[:-1] + b',"n":' + b"1" * 1000 + b"}"
    assert isinstance(peer.send(wire.encode_message("event.x", said, b"x", 2, True))[0], wire.Confirm)


def test_messages_that_conditions_leave_out_take_one_share_of_a_turn(large_gateway: ZeroctlGateway) -> None:
    peer = large_gateway.peer()
    peer.bind("event.#", conditions=[(Condition.EQUAL, "wanted", "yes")])
    for _ in range(50):
        peer.publish("event.x", *[b""] * 200)
    peer.publish("event.x", b"last", wanted="yes")
    assert peer.bodies() == []
    assert 0 < large_gateway.counts["filtered"] < 10_000
    assert peer.session.more
    assert [body for _ in range(3) for body in peer.bodies()] == [b"last"]
    assert large_gateway.counts["filtered"] == 10_000
    assert not peer.session.more


class Carrying:
    """Who carries a session's bytes."""

    peer = name = "test"

    def wake(self) -> None: ...
    def unblock(self) -> None: ...


def test_digest_of_a_refused_message_is_not_that_of_the_next(tmp_path: Path) -> None:
    gateway = ZeroctlGateway(tmp_path / "log", hash_inline=10)
    hashing: list[Any] = []
    gateway.zeroctl.hash_later = lambda body, done: hashing.append((body, done))
    peer = gateway.peer()
    peer.session.connection = Carrying()
    assert peer.send(message("event.x", b"a long body", 1)) == []
    gateway.keys.replace([Key(name="dev", key="dev-key", publish=["other.#"], subscribe=["#"])])
    ((body, done),) = hashing
    done(hashlib.sha256(body).digest())
    (refused,) = peer.send()
    assert isinstance(refused, wire.Refuse)
    assert refused.code == 403
    forged = wire.encode_message("other.x", header(b"a long body"), b"forged", 2, True)
    assert peer.refused(forged) == (422, "sha256 is not that of the body")
    gateway.close()
