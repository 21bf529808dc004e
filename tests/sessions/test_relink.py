"""The Relink listener, byte by byte: handshake, channels, acknowledgements, transactions, links that are resumed."""

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.config.schema import Key
from headrace.errors import LogFull
from headrace.sessions.relink import Endpoint
from headrace.wire import relink as wire
from headrace.wire.relink import AckType, GeneralType, OperationType
from tests.log.patience import eventually
from tests.sessions.relink_gateway import SECOND, Peer, RelinkGateway, shown

RECEIVED, CONSUMED, COMMITTED, UNCOMMITTED, CLOSED = AckType
COMMIT, ROLLBACK, CLOSE = OperationType
NOP, PING, PONG, RESUME, SHUTDOWN = GeneralType

Opened = Callable[..., RelinkGateway]


@pytest.fixture
def open_gateway(tmp_path: Path) -> Iterator[Opened]:
    opened: list[RelinkGateway] = []

    def make(**options: Any) -> RelinkGateway:
        gateway = RelinkGateway(tmp_path / f"log{len(opened)}", **options)
        opened.append(gateway)
        return gateway

    yield make
    for gateway in opened:
        gateway.close()


@pytest.fixture
def gateway(open_gateway: Opened) -> RelinkGateway:
    return open_gateway()


def topics(gateway: RelinkGateway, filter: str = "#") -> list[tuple[str, bytes, tuple[int, ...]]]:
    return [(one.topic.decode(), one.payload, one.parts) for one in gateway.published(filter)]


# --- the handshake ------------------------------------------------------------------------------------------


def test_new_link_gets_the_epoch_and_an_id(gateway: RelinkGateway) -> None:
    peers = [gateway.connect() for _ in range(3)]
    assert {peer.epoch for peer in peers} == {gateway.shared.epoch}
    assert len({peer.link for peer in peers}) == 3
    assert all(0 < peer.link < 2**63 for peer in peers)
    assert [shown(peer.greeting) for peer in peers] == [["version", "answer"]] * 3


def test_any_higher_version_is_answered_with_ours(gateway: RelinkGateway) -> None:
    peer = gateway.connect(version=200)
    (version, _) = peer.greeting
    assert isinstance(version, wire.Version)
    assert version.version == 0


@pytest.mark.parametrize(
    "hello",
    [
        {"name": "nobody"},
        {"name": ""},
        {"connector_size": 5},
        {"listener_size": 0},
        {"flags": 1},
        {"flags": 2},
        {"link": 2**63, "epoch": 1},
    ],
)
def test_disagreement_ends_the_connection_without_an_answer(
    gateway: RelinkGateway, hello: dict[str, Any]
) -> None:
    peer = gateway.connect(**{"name": "demo", **hello})
    assert (peer.closed, shown(peer.greeting)) == (True, ["version"])


def test_name_that_is_no_utf8_ends_the_connection(gateway: RelinkGateway) -> None:
    session = gateway.shared.session()
    session.feed(bytes(8) + b"\x02\xff\xfe\x04\x04\x00".ljust(24, b"\0"))
    assert session.closing


def test_unknown_old_link_is_answered_with_a_new_one(gateway: RelinkGateway) -> None:
    first = gateway.connect()
    for old in ({"link": 77, "epoch": first.epoch}, {"link": first.link, "epoch": 1}, {"link": first.link}):
        peer = gateway.connect(**old)
        assert peer.link not in (0, 77, first.link)
        assert "resume" not in shown(peer.greeting)


def test_required_link_that_is_unknown_is_refused_with_zero(gateway: RelinkGateway) -> None:
    for old in ({"link": 77, "epoch": gateway.shared.epoch}, {"link": 0}, {"link": 5, "epoch": 9}):
        peer = gateway.connect(require=True, **old)
        assert (peer.epoch, peer.link, peer.closed) == (gateway.shared.epoch, 0, True)


def test_link_of_another_endpoint_is_unknown(gateway: RelinkGateway) -> None:
    peer = gateway.connect("demo")
    other = gateway.connect("demo-tx", epoch=peer.epoch, link=peer.link)
    assert other.link != peer.link


def test_handshake_in_single_bytes_is_the_same(gateway: RelinkGateway) -> None:
    session = gateway.shared.session()
    said = b""
    for byte in wire.encode_version() + wire.encode_hello("demo", 4, 4) + wire.encode_general(PING):
        said += session.feed(bytes([byte]))
        gateway.log.sync_now()
    said += session.feed()
    items = wire.Decoder("listener", connector_size=4, listener_size=4).feed(said)
    assert shown(items) == ["version", "answer", "pong"]


def test_handshake_that_takes_too_long_ends(open_gateway: Opened) -> None:
    gateway = open_gateway(handshake_timeout=5)
    session = gateway.shared.session()
    session.feed(bytes(8), gateway.now)
    session.elapse(gateway.now + 4 * SECOND)
    assert not session.closing
    session.elapse(gateway.now + 6 * SECOND)
    assert session.closing


# --- receiving ----------------------------------------------------------------------------------------------


def test_messages_become_messages_of_their_channels_topics_with_their_parts(gateway: RelinkGateway) -> None:
    peer = gateway.connect()
    said = peer.send(
        peer.message(7, b"one"), peer.message(7, b"tw", b"", b"o"), peer.message(9), peer.message(7, b"")
    )
    assert shown(said) == ["consumed 7 <=2", "consumed 9"]
    assert topics(gateway) == [
        ("demo.in.7", b"one", (3,)),
        ("demo.in.7", b"two", (2, 0, 1)),
        ("demo.in.9", b"", ()),
        ("demo.in.7", b"", (0,)),
    ]
    assert [one.correlation for one in gateway.published()] == [0, 1, 0, 2]


def test_acknowledgement_leaves_only_when_the_log_is_safe(gateway: RelinkGateway) -> None:
    peer = gateway.connect()
    assert peer.session.feed(peer.message(1, b"x"), gateway.now) == b""
    gateway.log.sync_now()
    assert shown(peer.decoder.feed(peer.session.feed())) == ["consumed 1"]


def test_multicast_is_a_message_and_a_number_for_each_target(gateway: RelinkGateway) -> None:
    peer = gateway.connect()
    said = peer.send(peer.message([1, 2, 1], b"m"), peer.message([], b"nobody"), peer.message(2, b"n"))
    assert shown(said) == ["consumed 1 <=1", "consumed 2 <=1"]
    assert [one[:2] for one in topics(gateway)] == [
        ("demo.in.1", b"m"), ("demo.in.2", b"m"), ("demo.in.1", b"m"), ("demo.in.2", b"n"),
    ]  # fmt: skip


def test_ids_of_any_size_are_little_endian_numbers(gateway: RelinkGateway) -> None:
    peer = gateway.connect("odd")
    assert shown(peer.send(peer.message(0x010203, b"x"))) == ["consumed 66051"]
    gateway.publish(f"odd.out.{2**56 - 1}", b"top")
    gateway.publish(f"odd.out.{2**56}", b"too far")
    assert shown(peer.send()) == [f"message {2**56 - 1} top"]
    assert gateway.shared.counters()["unmapped"] == 1


def test_ids_of_no_bytes_are_one_channel(gateway: RelinkGateway) -> None:
    peer = gateway.connect("single")
    assert shown(peer.send(peer.message(0, b"x"), peer.message([0, 0], b"y"))) == ["consumed 0 <=2"]
    assert [one[:2] for one in topics(gateway)] == [("one.in", b"x"), ("one.in", b"y"), ("one.in", b"y")]
    gateway.publish("one.out", b"a")
    gateway.publish("one.out.deep.er", b"b")
    assert shown(peer.send()) == ["message 0 a", "message 0 b"]


def test_ping_is_answered_once_each_and_nop_is_not(gateway: RelinkGateway) -> None:
    peer = gateway.connect()
    assert shown(peer.send(*[peer.general(one) for one in (PING, NOP, PONG, PING)])) == ["pong", "pong"]


@pytest.mark.parametrize("head", [0xA0, 0x15, 0x61, 0xA5, 0x49, 0x8D])
def test_unused_value_ends_the_connection_after_what_was_before_it(gateway: RelinkGateway, head: int) -> None:
    peer = gateway.connect()
    said = peer.send(peer.message(1, b"before"), bytes([head]).ljust(8, b"\0"), peer.message(1, b"behind"))
    assert (shown(said), peer.closed) == (["consumed 1"], True)
    assert [one[1] for one in topics(gateway)] == [b"before"]


@pytest.mark.parametrize(
    "packet",
    [
        wire.encode_acknowledgement(CONSUMED, 1, 4),
        wire.encode_acknowledgement(CLOSED, 1, 4),
        wire.encode_operation(COMMIT, 1, 4),
        wire.encode_operation(ROLLBACK, 1, 4, 0),
        wire.encode_message([1] * 1025, 4, [b""]),
        wire.encode_message(1, 4, [bytes(2000)]),
        wire.encode_message(1, 4, [b""] * 300),
    ],
)
def test_violation_or_too_much_ends_the_connection(open_gateway: Opened, packet: bytes) -> None:
    gateway = open_gateway(max_message=1024, max_parts=256)
    peer = gateway.connect()
    peer.send(packet)
    assert peer.closed
    assert topics(gateway) == []


def test_messages_cut_at_every_place_are_appended_once(gateway: RelinkGateway) -> None:
    peer = gateway.connect()
    stream = b"".join([peer.message(i % 3, b"%d" % i, b"x" * i) for i in range(12)])
    for at in range(0, len(stream), 13):
        peer.send(stream[at : at + 13])
    assert [one[1] for one in topics(gateway)] == [b"%d" % i + b"x" * i for i in range(12)]


# --- delivering ---------------------------------------------------------------------------------------------


def test_topics_of_the_endpoint_are_delivered_on_their_channels_in_order(gateway: RelinkGateway) -> None:
    peer = gateway.connect()
    gateway.publish("demo.out.7", b"a")
    gateway.publish("demo.out.8", b"bc", parts=(1, 1))
    gateway.publish("demo.out.7", b"d")
    for other in (
        "demo.out.x",
        "demo.out.07",
        "demo.out.4294967296",
        "demo.out",
        "demo.out.1.2",
        "demo.in.1",
    ):
        gateway.publish(other, b"no")
    assert shown(peer.send()) == ["message 7 a", "message 8 b|c", "message 7 d"]
    assert gateway.shared.counters()["unmapped"] == 3


def test_every_link_of_an_endpoint_gets_everything(gateway: RelinkGateway) -> None:
    peers = [gateway.connect() for _ in range(3)]
    gateway.publish("demo.out.1", b"a", b"b")
    assert [shown(peer.send()) for peer in peers] == [["message 1 a", "message 1 b"]] * 3


def test_what_a_peer_sends_reaches_another_with_its_parts(open_gateway: Opened) -> None:
    gateway = open_gateway(
        endpoints=[Endpoint("left", publish="x.{channel}", deliver="y.{channel}"),
                   Endpoint("right", publish="y.{channel}", deliver="x.{channel}")]
    )  # fmt: skip
    left, right = gateway.connect("left"), gateway.connect("right")
    left.send(left.message(5, b"a", b"", b"c"), left.message(5), left.message(5, *[b"z"] * 300))
    left.send(left.message(6, bytes(70_000)))
    said = right.send()
    assert shown(said)[:3] == ["message 5 a||c", "message 5 ", "message 5 " + "|".join("z" * 300)]
    assert [len(one.parts) for one in said if isinstance(one, wire.Message)] == [3, 0, 300, 1]


def test_window_stops_a_channel_and_consumed_opens_it(open_gateway: Opened) -> None:
    gateway = open_gateway(window=3)
    peer = gateway.connect()
    gateway.publish("demo.out.1", *[b"%d" % i for i in range(7)])
    gateway.publish("demo.out.2", b"other")
    assert shown(peer.send()) == ["message 1 0", "message 1 1", "message 1 2", "message 2 other"]
    assert shown(peer.send(peer.ack(RECEIVED, 1, 2))) == []
    assert shown(peer.send(peer.ack(CONSUMED, 1))) == ["message 1 3"]
    assert shown(peer.send(peer.ack(CONSUMED, [1, 2]))) == ["message 1 4"]
    assert shown(peer.send(peer.ack(CONSUMED, 1, 4))) == ["message 1 5", "message 1 6"]
    assert not peer.closed


def test_link_stops_when_too_much_is_outstanding(open_gateway: Opened) -> None:
    gateway = open_gateway(window=2, max_outstanding=4)
    peer = gateway.connect()
    gateway.publish("demo.out.1", *[b"%d" % i for i in range(9)])
    gateway.publish("demo.out.2", b"behind")
    assert shown(peer.send()) == ["message 1 0", "message 1 1"]
    got = []
    for i in range(2, 9):
        got += shown(peer.send(peer.ack(CONSUMED, 1)))
        assert not peer.closed, i
    assert [one for one in got if "message 1" in one] == [f"message 1 {i}" for i in range(2, 9)]
    assert "message 2 behind" in got


@pytest.mark.parametrize(
    ("acks", "ends"),
    [
        ([(CONSUMED, None), (CONSUMED, None)], False),
        ([(CONSUMED, None)] * 3, True),
        ([(RECEIVED, 1), (RECEIVED, 1), (CONSUMED, 1), (CONSUMED, 1)], False),
        ([(RECEIVED, 2)], True),
        ([(RECEIVED, 1), (RECEIVED, 0)], True),
        ([(CONSUMED, 1), (RECEIVED, None)], True),
        ([(COMMITTED, None)], True),
    ],
)
def test_acknowledgement_counts_from_the_last_one_and_not_beyond_what_was_sent(
    gateway: RelinkGateway, acks: list[tuple[AckType, int | None]], ends: bool
) -> None:
    peer = gateway.connect()
    gateway.publish("demo.out.1", b"a", b"b")
    peer.send()
    peer.send(*[peer.ack(type, 1, number) for type, number in acks])
    assert peer.closed is ends


def test_too_many_channels_wait_for_idle_ones_to_close(open_gateway: Opened) -> None:
    gateway = open_gateway(max_channels=2)
    peer = gateway.connect()
    for channel in (1, 2, 3, 1):
        gateway.publish(f"demo.out.{channel}", b"%d" % channel)
    assert shown(peer.send()) == ["message 1 1", "message 2 2"]
    assert shown(peer.send(peer.ack(CONSUMED, 1))) == ["close 1"]
    assert shown(peer.send(peer.ack(CLOSED, 1))) == ["message 3 3"]
    assert shown(peer.send(peer.ack(CONSUMED, 2))) == ["close 2"]
    assert shown(peer.send(peer.ack(CLOSED, 2))) == ["message 1 1"]
    assert not peer.closed


# --- channels close and open --------------------------------------------------------------------------------


def test_channel_is_closed_after_its_acknowledgements_and_begins_at_zero_again(
    gateway: RelinkGateway,
) -> None:
    peer = gateway.connect()
    said = peer.send(peer.message(1, b"a"), peer.message(1, b"b"), peer.op(CLOSE, 1))
    assert shown(said) == ["consumed 1 <=1", "closed 1"]
    assert shown(peer.send(peer.message(1, b"c"))) == ["consumed 1"]
    assert [one.correlation for one in gateway.published()] == [0, 1, 0]


def test_message_before_the_channel_is_known_to_be_closed_is_a_violation(gateway: RelinkGateway) -> None:
    peer = gateway.connect()
    peer.send(peer.message(1, b"a"))
    peer.send(peer.op(CLOSE, 1), peer.message(1, b"b"))
    assert peer.closed
    assert [one[1] for one in topics(gateway)] == [b"a"]


def test_closing_a_channel_that_is_not_open_is_answered(gateway: RelinkGateway) -> None:
    peer = gateway.connect()
    assert shown(peer.send(peer.op(CLOSE, [4, 5]))) == ["closed 4", "closed 5"]


# --- transactions -------------------------------------------------------------------------------------------


def test_committed_messages_appear_together_and_rolled_back_ones_never(gateway: RelinkGateway) -> None:
    peer = gateway.connect("demo-tx")
    assert shown(peer.send(peer.message(1, b"a"), peer.message(1, b"b", b"b"))) == ["received 1 <=1"]
    assert topics(gateway) == []
    assert shown(peer.send(peer.op(COMMIT, 1, 1))) == ["consumed 1 <=1", "committed 1 <=1"]
    assert topics(gateway) == [("demo-tx.in.1", b"a", (1,)), ("demo-tx.in.1", b"bb", (1, 1))]
    said = peer.send(peer.message(1, b"c"), peer.op(ROLLBACK, 1), peer.message(1, b"d"), peer.op(COMMIT, 1))
    assert shown(said) == ["consumed 1 <=3", "committed 1 <=3"]
    assert [one[1] for one in topics(gateway)] == [b"a", b"bb", b"d"]
    assert not peer.closed


def test_part_of_what_was_received_may_be_committed(gateway: RelinkGateway) -> None:
    peer = gateway.connect("demo-tx")
    peer.send(*[peer.message(1, b"%d" % i) for i in range(5)])
    assert shown(peer.send(peer.op(COMMIT, 1))) == ["consumed 1", "committed 1 <=0"]
    assert shown(peer.send(peer.op(ROLLBACK, 1, 2))) == ["consumed 1 <=2"]
    assert shown(peer.send(peer.op(COMMIT, 1, 4))) == ["consumed 1 <=4", "committed 1 <=4"]
    assert [one[1] for one in topics(gateway)] == [b"0", b"3", b"4"]


@pytest.mark.parametrize("number", [2, 7, 2**32 - 1])
def test_committing_what_was_not_sent_is_a_violation(gateway: RelinkGateway, number: int) -> None:
    peer = gateway.connect("demo-tx")
    peer.send(peer.message(1, b"a"), peer.message(1, b"b"), peer.op(COMMIT, 1, 1))
    peer.send(peer.op(COMMIT, 1, number))
    assert peer.closed


def test_commit_of_more_than_may_be_kept_is_refused(open_gateway: Opened) -> None:
    gateway = open_gateway(max_uncommitted=400)
    peer = gateway.connect("demo-tx")
    said = peer.send(peer.message(1, bytes(60)), peer.message(1, bytes(60)), peer.op(COMMIT, 1, 1))
    assert shown(said)[-1] == "uncommitted 1 <=1"
    assert topics(gateway) == []
    assert shown(peer.send(peer.message(1, b"x"), peer.op(COMMIT, 1)))[-1] == "committed 1 <=2"
    assert len(topics(gateway)) == 1


def test_commit_without_the_right_is_refused_and_a_plain_message_ends_the_connection(
    open_gateway: Opened,
) -> None:
    key = Key(name="few", key="secret", publish=["*.in.1"], subscribe=["*.out.1"])
    gateway = open_gateway(
        keys=[key],
        endpoints=[Endpoint("tx", connector_transactions=True, key="few"), Endpoint("plain", key="few")],
    )
    peer = gateway.connect("tx")
    said = peer.send(peer.message(1, b"a"), peer.op(COMMIT, 1), peer.message(2, b"b"), peer.op(COMMIT, 2))
    assert [one for one in shown(said) if "committed" in one] == ["committed 1 <=0", "uncommitted 2 <=0"]
    plain = gateway.connect("plain")
    gateway.publish("plain.out.1", b"yes")
    gateway.publish("plain.out.2", b"no")
    assert shown(plain.send(plain.message(1, b"c"))) == ["consumed 1", "message 1 yes"]
    plain.send(plain.message(2, b"d"))
    assert plain.closed
    assert [one[1] for one in topics(gateway, "*.in.#")] == [b"a", b"c"]


def test_endpoint_of_an_unknown_key_is_refused(open_gateway: Opened) -> None:
    with pytest.raises(ValueError, match="which is unknown"):
        open_gateway(endpoints=[Endpoint("x", key="nobody")])


def test_deliveries_are_committed_and_what_is_not_goes_to_the_dead_letters(gateway: RelinkGateway) -> None:
    peer = gateway.connect("demo-tx")
    gateway.publish("demo-tx.out.1", b"a", b"b")
    assert shown(peer.send()) == ["message 1 a", "message 1 b", "commit 1 <=1"]
    peer.send(peer.ack(RECEIVED, 1, 1), peer.ack(CONSUMED, 1, 1), peer.ack(COMMITTED, 1, 1))
    gateway.publish("demo-tx.out.1", b"c")
    assert shown(peer.send()) == ["message 1 c", "commit 1 <=2"]
    peer.send(peer.ack(CONSUMED, 1), peer.ack(UNCOMMITTED, 1, 2))
    assert not peer.closed
    ((topic, payload, _),) = topics(gateway, "dead.#")
    assert (topic, payload) == ("dead.demo-tx.out.1", b"c")


# --- resuming -----------------------------------------------------------------------------------------------


@pytest.fixture(params=["reconnection", "restart", "kill"])
def come_back(request: pytest.FixtureRequest) -> Callable[[Peer], Peer]:
    """What happens to the gateway between two connections of a link."""

    def again(peer: Peer) -> Peer:
        if request.param == "restart":
            peer.gateway.restart()
        elif request.param == "kill":
            peer.gateway.kill()
        else:
            peer.leave()
        back = Peer(peer.gateway, peer.name, epoch=peer.epoch, link=peer.link, require=True)
        assert (back.epoch, back.link) == (peer.epoch, peer.link)
        return back

    return again


ComeBack = Callable[[Peer], Peer]


def test_resumed_link_tells_what_it_has_and_sends_what_the_peer_has_not(
    gateway: RelinkGateway, come_back: ComeBack
) -> None:
    peer = gateway.connect()
    peer.send(peer.message(7, b"a"), peer.message(7, b"b"), peer.message(8, b"c"))
    gateway.publish("demo.out.1", b"0", b"1", b"2")
    gateway.publish("demo.out.2", b"x")
    peer.send()
    back = come_back(peer)
    assert shown(back.greeting[2:]) == [
        "received 7 <=1", "consumed 7 <=1", "received 8 <=0", "consumed 8 <=0", "resume",
    ]  # fmt: skip
    assert shown(back.send(back.general(PING))) == ["pong"]
    assert shown(back.send(back.ack(RECEIVED, 1, 0), back.general(RESUME))) == [
        "message 1 1", "message 1 2", "message 2 x",
    ]  # fmt: skip
    assert shown(back.send(back.message(7, b"d"))) == ["consumed 7"]
    assert [(one.correlation, one.payload) for one in gateway.published("demo.in.7")] == [
        (0, b"a"), (1, b"b"), (2, b"d"),
    ]  # fmt: skip
    gateway.publish("demo.out.2", b"y")
    assert shown(back.send(back.general(RESUME))) == ["message 2 y"]


def test_peer_that_has_everything_gets_only_what_is_new(gateway: RelinkGateway, come_back: ComeBack) -> None:
    peer = gateway.connect()
    gateway.publish("demo.out.1", b"0", b"1", b"2")
    peer.send()
    peer.send(peer.ack(CONSUMED, 1))
    back = come_back(peer)
    gateway.publish("demo.out.1", b"3")
    back.send(back.ack(RECEIVED, 1, 2), back.ack(CONSUMED, 1, 1))
    assert shown(back.send(back.general(RESUME))) == ["message 1 3"]
    assert shown(back.send(back.ack(CONSUMED, 1, 3))) == []
    assert not back.closed


def test_peer_that_acknowledges_what_was_never_sent_is_cut_off(
    gateway: RelinkGateway, come_back: ComeBack
) -> None:
    peer = gateway.connect()
    gateway.publish("demo.out.1", b"0")
    peer.send()
    back = come_back(peer)
    back.send(back.ack(RECEIVED, 1, 5), back.general(RESUME))
    assert back.closed


def test_numbers_go_on_over_many_lives(gateway: RelinkGateway, come_back: ComeBack) -> None:
    peer = gateway.connect()
    got: list[str] = []
    received = 0
    for life in range(5):
        for i in range(3):
            gateway.publish("demo.out.1", b"%d.%d" % (life, i))
            gateway.publish("demo.out.2", b"other %d.%d" % (life, i))
        messages = [one for one in shown(peer.send(peer.message(3, b"%d" % life))) if "message 1" in one]
        got += messages[:2]  # the third is lost on its way
        received += 2 if len(messages) > 1 else len(messages)
        peer = come_back(peer)
        assert f"received 3 <={life}" in shown(peer.greeting)
        said = shown(peer.send(peer.ack(RECEIVED, 1, received - 1), peer.general(RESUME)))
        rest = [one for one in said if "message 1" in one]
        got += rest
        received += len(rest)
        peer.send(peer.ack(CONSUMED, 1, received - 1))
        assert not peer.closed
    assert got == [f"message 1 {life}.{i}" for life in range(5) for i in range(3)]
    assert [one.payload for one in gateway.published("demo.in.3")] == [b"%d" % i for i in range(5)]


def test_channel_closed_before_is_opened_anew(gateway: RelinkGateway, come_back: ComeBack) -> None:
    peer = gateway.connect()
    peer.send(peer.message(1, b"a"), peer.message(1, b"b"), peer.op(CLOSE, 1))
    back = come_back(peer)
    assert shown(back.greeting[2:]) == ["resume"]
    assert shown(back.send(back.op(CLOSE, 1))) == ["closed 1"]
    assert shown(back.send(back.general(RESUME), back.message(1, b"c"))) == ["consumed 1"]
    assert [one.correlation for one in gateway.published()] == [0, 1, 0]


def test_uncommitted_messages_are_kept_and_committed_later(
    gateway: RelinkGateway, come_back: ComeBack
) -> None:
    peer = gateway.connect("demo-tx")
    peer.send(peer.message(1, b"a"), peer.message(1, b"b", b"c"), peer.message(2, b"z"))
    back = come_back(peer)
    assert shown(back.greeting[2:]) == ["received 1 <=1", "received 2 <=0", "resume"]
    assert topics(gateway) == []
    assert shown(back.send(back.general(RESUME), back.op(COMMIT, 1, 1)))[-1] == "committed 1 <=1"
    assert topics(gateway) == [("demo-tx.in.1", b"a", (1,)), ("demo-tx.in.1", b"bc", (1, 1))]
    third = come_back(back)
    assert shown(third.send(third.general(RESUME), third.op(ROLLBACK, 2))) == ["consumed 2"]
    assert shown(come_back(third).greeting[2:]) == [
        "received 1 <=1", "consumed 1 <=1", "received 2 <=0", "consumed 2 <=0", "resume",
    ]  # fmt: skip
    assert len(topics(gateway)) == 2
    assert gateway.bus.notes(b"relink/kept/") == {}


def test_commit_that_is_asked_for_again_has_the_same_outcome(
    open_gateway: Opened, come_back: ComeBack
) -> None:
    gateway = open_gateway(max_uncommitted=400)
    peer = gateway.connect("demo-tx")
    peer.send(peer.message(1, b"a"), peer.op(COMMIT, 1))
    peer.send(peer.message(1, bytes(200)), peer.op(COMMIT, 1))
    peer.send(peer.message(1, b"b"), peer.op(COMMIT, 1))
    back = come_back(peer)
    said = back.send(back.general(RESUME), *[back.op(COMMIT, 1, i) for i in range(3)])
    assert shown(said) == ["committed 1 <=0", "uncommitted 1 <=1", "committed 1 <=2"]
    assert [one[1] for one in topics(gateway)] == [b"a", b"b"]


def test_commits_without_an_answer_are_sent_again_one_by_one(
    gateway: RelinkGateway, come_back: ComeBack
) -> None:
    peer = gateway.connect("demo-tx")
    gateway.publish("demo-tx.out.1", b"a", b"b", b"c")
    peer.send()
    peer.send(peer.ack(CONSUMED, 1, 0), peer.ack(COMMITTED, 1, 0))
    back = come_back(peer)
    back.send(back.ack(RECEIVED, 1, 1))
    said = shown(back.send(back.general(RESUME)))
    assert said[-3:] == ["commit 1 <=1", "message 1 c", "commit 1 <=2"]
    # The first answer may not have been written down: then it is asked for again.
    assert said[:-3] in ([], ["commit 1 <=0"])


def test_pongs_die_with_the_connection(gateway: RelinkGateway) -> None:
    peer = gateway.connect()
    peer.session.feed(peer.general(PING))
    back = peer.again()
    assert "pong" not in shown(back.greeting)


def test_newest_connection_of_a_link_wins(gateway: RelinkGateway) -> None:
    peer = gateway.connect()
    back = Peer(gateway, "demo", epoch=peer.epoch, link=peer.link)
    assert back.link == peer.link
    assert peer.closed
    peer.leave()
    gateway.publish("demo.out.1", b"x")
    assert shown(back.send(back.general(RESUME))) == ["message 1 x"]


def test_resume_on_a_new_link_and_a_second_one_are_ignored(gateway: RelinkGateway) -> None:
    peer = gateway.connect()
    gateway.publish("demo.out.1", b"x")
    assert shown(peer.send(peer.general(RESUME), peer.general(RESUME))) == ["message 1 x"]


def test_link_is_forgotten_after_its_grace_time(open_gateway: Opened) -> None:
    gateway = open_gateway(grace=10)
    peer, other = gateway.connect(), gateway.connect()
    peer.leave()
    gateway.now += 5 * SECOND
    peer = Peer(gateway, "demo", epoch=peer.epoch, link=peer.link, require=True)
    assert peer.link
    peer.leave()
    gateway.now += 11 * SECOND
    assert Peer(gateway, "demo", epoch=peer.epoch, link=peer.link, require=True).link == 0
    assert other.send(other.general(PING))
    assert len(gateway.bus.notes(b"relink/link/")) == 1


def test_links_that_were_never_used_leave_room_for_others(open_gateway: Opened) -> None:
    gateway = open_gateway(max_links=4)
    connected, sender, reader = gateway.connect(), gateway.connect(), gateway.connect()
    sender.send(sender.message(1, b"x"))
    gateway.publish("demo.out.1", b"y")
    assert shown(reader.send()) == ["message 1 y"]
    reader.send(reader.ack(CONSUMED, 1))
    for peer in (sender, reader):
        peer.leave()
    flood = [gateway.connect()]
    for _ in range(20):
        flood[-1].leave()
        flood.append(gateway.connect())
    assert all(peer.link for peer in flood)
    assert gateway.shared.counters()["links_displaced"] == 20
    assert len(gateway.bus.notes(b"relink/link/")) == 4
    flood[-1].leave()
    gateway.restart()
    for peer in (sender, reader):
        assert Peer(gateway, "demo", epoch=peer.epoch, link=peer.link, require=True).link == peer.link
    newest = gateway.connect()  # those two of before the restart were never used either
    assert newest.link
    assert Peer(gateway, "demo", epoch=peer.epoch, link=connected.link, require=True).link == 0
    assert gateway.connect().link
    assert gateway.connect().answer is None
    assert gateway.shared.counters()["handshakes_refused"] == 1


def test_link_on_which_the_peer_sent_stays_used_after_a_restart_also_without_channels(
    open_gateway: Opened,
) -> None:
    gateway = open_gateway(max_links=1)
    peer = gateway.connect()
    assert shown(peer.send(peer.message(1, b"x"), peer.op(CLOSE, 1))) == ["consumed 1", "closed 1"]
    for _ in range(2):
        gateway.restart()
        assert gateway.connect().answer is None
    assert peer.again(require=True).link == peer.link


def test_first_acknowledgement_makes_a_link_used_also_if_a_kill_comes_right_behind_it(
    open_gateway: Opened,
) -> None:
    gateway = open_gateway(max_links=1)
    peer = gateway.connect()
    gateway.publish("demo.out.1", b"y")
    assert shown(peer.send()) == ["message 1 y"]
    peer.send(peer.ack(RECEIVED, 1))
    gateway.kill()
    assert gateway.connect().answer is None
    assert peer.again(require=True).link == peer.link


def test_note_that_does_not_say_whether_its_link_was_used_is_read(open_gateway: Opened) -> None:
    gateway = open_gateway(max_links=2)
    used, unused = gateway.connect(), gateway.connect()
    used.send(used.message(1, b"x"))
    for key, value in gateway.bus.notes(b"relink/").items():
        if key.startswith((b"relink/link/", b"relink/since/")):
            version, flags, *rest = HEAD.unpack_from(value)
            gateway.bus.note(key, HEAD.pack(version, flags & 3, *rest) + value[HEAD.size :])
    gateway.restart()
    newest = gateway.connect()
    assert newest.link
    assert gateway.connect().answer is None
    newest.leave()
    assert used.again(require=True).link == used.link
    assert Peer(gateway, "demo", epoch=used.epoch, link=unused.link, require=True).link == 0


def test_links_of_an_endpoint_that_is_gone_leave_no_notes(open_gateway: Opened) -> None:
    gateway = open_gateway(endpoints=[Endpoint("demo", connector_transactions=True), Endpoint("other")])
    peers = [gateway.connect(name) for name in ("demo", "demo", "other")]
    for peer in peers:
        peer.send(peer.message(1, b"uncommitted"))
        peer.leave()
    assert len(gateway.bus.notes(b"relink/kept/")) == 2
    gateway.endpoints = [Endpoint("other")]
    gateway.restart()
    assert gateway.bus.notes(b"relink/kept/") == {}
    assert set(gateway.bus.notes(b"relink/link/")) == {b"relink/link/%016x" % peers[2].link}


def test_lost_log_is_a_new_epoch(open_gateway: Opened) -> None:
    peer = open_gateway().connect()
    gateway = open_gateway()
    back = Peer(gateway, "demo", epoch=peer.epoch, link=peer.link, require=True)
    assert (back.epoch != peer.epoch, back.link) == (True, 0)


@pytest.mark.parametrize(
    "endpoint",
    [
        Endpoint("other"),
        Endpoint("demo", connector_size=5),
        Endpoint("demo", listener_transactions=True),
        Endpoint("demo", deliver="elsewhere.{channel}"),
    ],
    ids=["gone", "sizes", "transactions", "topics"],
)
def test_link_does_not_go_on_with_an_endpoint_that_is_another_now(
    gateway: RelinkGateway, endpoint: Endpoint
) -> None:
    peer = gateway.connect()
    gateway.endpoints = [endpoint]
    gateway.restart()
    assert gateway.shared.epoch == peer.epoch
    assert gateway.shared.link(peer.link) is None
    assert gateway.bus.notes(b"relink/link/") == {}


def test_sequence_numbers_wrap(gateway: RelinkGateway) -> None:
    peer = gateway.connect()
    peer.send(peer.message(7, b"a"))
    gateway.publish("demo.out.1", b"0")
    peer.send()
    peer.send(peer.ack(CONSUMED, 1))
    peer.leave()
    # As if 2^32 - 2 more had gone each way.
    key = b"relink/since/%016x" % peer.link
    note = bytearray(gateway.bus.notes()[key])
    entries = note.index(struct.pack("<cBxxIQ", b"i", 0, 0, 7)) + 16
    struct.pack_into("<QQ", note, entries, 2**32 - 2, 2**32 - 2)
    entries = note.index(struct.pack("<cBxxIQ", b"o", 0, 0, 1)) + 16
    struct.pack_into("<QQ", note, entries, 2**32 - 2, 2**32 - 2)
    gateway.bus.note(key, bytes(note))
    gateway.restart()
    back = Peer(gateway, "demo", epoch=peer.epoch, link=peer.link, require=True)
    assert shown(back.greeting)[-3:] == [f"received 7 <={2**32 - 3}", f"consumed 7 <={2**32 - 3}", "resume"]
    back.send(back.general(RESUME))
    assert shown(back.send(*[back.message(7, b"x")] * 4)) == ["consumed 7 <=1"]
    gateway.publish("demo.out.1", *[b"%d" % i for i in range(5)])
    assert len(back.send()) == 5
    assert shown(back.send(back.ack(RECEIVED, 1, 2**32 - 1), back.ack(CONSUMED, 1, 1))) == []
    assert not back.closed
    assert [one.correlation for one in gateway.published("demo.in.7")][1:] == [2**32 - 2, 2**32 - 1, 0, 1]
    third = back.again(require=True)
    assert "consumed 7 <=1" in shown(third.greeting)
    assert shown(third.send(third.ack(RECEIVED, 1, 1), third.general(RESUME))) == ["message 1 4"]


# --- ends ---------------------------------------------------------------------------------------------------


def test_shutdown_of_both_ends_the_link(gateway: RelinkGateway) -> None:
    peer = gateway.connect()
    gateway.publish("demo.out.1", b"x")
    peer.send(peer.message(1, b"a"))
    assert shown(peer.send(peer.general(SHUTDOWN), peer.op(CLOSE, 1))) == ["closed 1"]
    gateway.publish("demo.out.2", b"late")
    assert shown(peer.send(peer.ack(CONSUMED, 1))) == ["close 1"]
    assert shown(peer.send(peer.ack(CLOSED, 1))) == ["shutdown"]
    assert peer.closed
    peer.leave()
    assert Peer(gateway, "demo", epoch=peer.epoch, link=peer.link, require=True).link == 0
    assert gateway.bus.notes(b"relink/link/") == {}


def test_open_channels_go_on_after_a_shutdown_and_new_ones_do_not(gateway: RelinkGateway) -> None:
    peer = gateway.connect()
    peer.send(peer.message(1, b"a"))
    assert shown(peer.send(peer.general(SHUTDOWN))) == ["shutdown"]
    assert shown(peer.send(peer.general(SHUTDOWN), peer.message(1, b"b"))) == ["consumed 1"]
    assert not peer.closed
    peer.send(peer.message(2, b"c"))
    assert peer.closed


def test_shutdown_is_remembered_over_reconnections(gateway: RelinkGateway, come_back: ComeBack) -> None:
    peer = gateway.connect()
    gateway.publish("demo.out.1", b"x")
    peer.send(peer.message(1, b"a"))
    peer.send(peer.general(SHUTDOWN))
    back = come_back(peer)
    assert shown(back.send(back.ack(CONSUMED, 1, 0), back.general(RESUME))) == ["close 1"]
    third = come_back(back)
    assert shown(third.send(third.ack(CONSUMED, 1, 0), third.general(RESUME))) == ["close 1"]
    assert shown(third.send(third.ack(CLOSED, 1), third.op(CLOSE, 1))) == ["shutdown", "closed 1"]
    assert third.closed


def test_silent_peer_is_pinged_and_then_cut_off(open_gateway: Opened) -> None:
    gateway = open_gateway(ping_interval=10, ping_timeout=5)
    peer = gateway.connect()
    assert peer.session.elapse(gateway.now + 9 * SECOND) == b""
    assert shown(peer.decoder.feed(peer.session.elapse(gateway.now + 11 * SECOND))) == ["ping"]
    gateway.now += 12 * SECOND
    peer.send(peer.general(PONG))
    assert peer.session.elapse(gateway.now + 8 * SECOND) == b""
    peer.session.elapse(gateway.now + 11 * SECOND)
    peer.session.elapse(gateway.now + 17 * SECOND)
    assert peer.closed


def test_full_log_stops_reading_and_then_ends_the_connection_with_nothing_taken_twice(
    open_gateway: Opened,
) -> None:
    gateway = open_gateway(log={"segment_bytes": 1 << 16, "retention_bytes": 5 << 16}, block_timeout=5)
    gateway.log.hold("sink", 0)
    peer = gateway.connect()
    stream = b"".join([peer.message([1, 2], b"%06d" % i, bytes(500)) for i in range(400)])
    said = shown(peer.send(stream))
    while gateway.log.full is None:  # until no more segments can be prepared
        assert peer.session.blocked
        time.sleep(0.002)
        gateway.log.on_event(gateway.now)
        said += shown(peer.send())
    said += shown(peer.send())
    assert peer.session.blocked
    assert peer.session.waits_space
    there = gateway.published("demo.in.*")
    gateway.now += 6 * SECOND
    peer.send()
    assert peer.closed
    gateway.log.sync_now()
    peer.leave()
    for channel in (1, 2):
        numbers = [one.correlation for one in there if one.topic == b"demo.in.%d" % channel]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) > 20
    back = Peer(gateway, "demo", epoch=peer.epoch, link=peer.link, require=True)
    counted = {one.topic: one.correlation for one in there}
    assert f"received 1 <={counted[b'demo.in.1']}" in shown(back.greeting)
    assert f"received 2 <={counted[b'demo.in.2']}" in shown(back.greeting)


# --- killed in the middle of a batch ------------------------------------------------------------------------

HEAD = struct.Struct("<BBxxIQQQII")
RUN = struct.Struct("<QQQ")
ENTRY = struct.Struct("<cBxxIQQQQ")


def intent(
    gateway: RelinkGateway, link: int, channel: int, start: int, count: int, outcomes: bytes = b""
) -> None:
    """What the log has when a kill comes between the intent of a batch and its messages."""
    key = b"relink/link/%016x" % link
    generation = HEAD.unpack_from(gateway.bus.notes()[key])[2]
    head = HEAD.pack(1, 0, generation, gateway.log.appended, gateway.log.appended, 9, 1, 1)
    after = start + count
    entry = ENTRY.pack(b"i", 0, len(outcomes) // 8, channel, after, after, 0) + outcomes
    gateway.bus.note(b"relink/since/%016x" % link, head + RUN.pack(channel, start, count) + entry)


@pytest.mark.parametrize("done", range(4))
def test_messages_of_an_intent_that_are_not_in_the_log_were_not_received(
    gateway: RelinkGateway, done: int
) -> None:
    peer = gateway.connect()
    peer.send(peer.message(7, b"first"))
    intent(gateway, peer.link, 7, 1, 3)
    gateway.publish("demo.in.7", *[b"%d" % i for i in range(done)])
    gateway.kill()
    back = Peer(gateway, "demo", epoch=peer.epoch, link=peer.link, require=True)
    assert shown(back.greeting[2:]) == [f"received 7 <={done}", f"consumed 7 <={done}", "resume"]
    gateway.publish("other", b"x", b"y", b"z")
    gateway.kill()
    back = Peer(gateway, "demo", epoch=peer.epoch, link=peer.link, require=True)
    assert shown(back.greeting[2:]) == [f"received 7 <={done}", f"consumed 7 <={done}", "resume"]


@pytest.mark.parametrize("done", range(4))
def test_commit_that_was_begun_is_finished(gateway: RelinkGateway, done: int) -> None:
    peer = gateway.connect("demo-tx")
    peer.send(*[peer.message(1, b"%d" % i, b"") for i in range(3)], peer.message(1, b"later"))
    intent(gateway, peer.link, 1, 0, 3, struct.pack("<Q", 3 << 1 | 1))
    gateway.publish("demo-tx.in.1", *[b"%d" % i for i in range(done)], parts=(1, 0))
    for _ in range(2):
        gateway.kill()
        back = Peer(gateway, "demo-tx", epoch=peer.epoch, link=peer.link, require=True)
        assert shown(back.greeting[2:]) == ["received 1 <=3", "consumed 1 <=2", "resume"]
        assert topics(gateway) == [("demo-tx.in.1", b"%d" % i, (1, 0)) for i in range(3)]
        assert shown(back.send(back.general(RESUME), back.op(COMMIT, 1, 2))) == ["committed 1 <=2"]
        back.leave()
    back = Peer(gateway, "demo-tx", epoch=peer.epoch, link=peer.link, require=True)
    back.send(back.general(RESUME), back.op(COMMIT, 1))
    assert [one[1] for one in topics(gateway)] == [b"0", b"1", b"2", b"later"]
    assert gateway.bus.notes(b"relink/kept/") == {}


def test_many_channels_are_checkpointed_and_come_back(gateway: RelinkGateway, come_back: ComeBack) -> None:
    peer = gateway.connect()
    for turn in range(3):
        for channel in range(200):
            peer.send(peer.message(channel, b"%d" % turn))
    for channel in range(100):
        gateway.publish(f"demo.out.{channel}", b"a", b"b")
    peer.send()
    peer.send(*[peer.ack(CONSUMED, channel) for channel in range(100)])
    back = come_back(peer)
    assert set(shown(back.greeting[2:])) == {
        "resume",
        *[f"{what} {channel} <=2" for channel in range(200) for what in ("received", "consumed")],
    }
    back.send(*[back.ack(RECEIVED, channel, 0) for channel in range(100)])
    assert sorted(shown(back.send(back.general(RESUME)))) == sorted(f"message {i} b" for i in range(100))


def filled_by_a_commit(gateway: RelinkGateway, size: int, answers: list[str]) -> Peer | None:
    """Sends and commits until the log is full; None if that was in the middle of sending."""
    peer = gateway.connect("demo-tx")
    gateway.log.hold("sink", 0)
    sent = 0

    def blocks(*packets: bytes) -> bool:
        """Waits where the next segment is only being prepared: that is not the full log which is meant."""
        answers.extend(shown(peer.send(*packets)))
        while peer.session.blocked and not gateway.log.full:
            gateway.log.on_event(gateway.now)
            answers.extend(shown(peer.send()))
        return bool(peer.session.blocked)

    while not blocks(*[peer.message(1, b"%d" % (sent + i), bytes(size)) for i in range(8)]):
        sent += 8
        if blocks(peer.op(COMMIT, 1, sent - 1)):
            return peer
    return None


def test_full_log_in_the_middle_of_a_commit_finishes_it_later(open_gateway: Opened) -> None:
    for size in range(900, 1500, 30):
        gateway = open_gateway(log={"segment_bytes": 1 << 16, "retention_bytes": 5 << 16}, block_timeout=5)
        answers: list[str] = []
        peer = filled_by_a_commit(gateway, size, answers)
        if peer is not None:
            break
    assert peer is not None
    gateway.now += 60 * SECOND
    gateway.log.release("sink")
    while peer.session.blocked:
        time.sleep(0.002)
        gateway.log.on_event(gateway.now)
        answers += shown(peer.send())
    assert not peer.closed
    expected: list[int] = []
    before = 0
    for answer in answers:
        what, _, number = answer.partition(" 1 <=")
        if what in ("committed", "uncommitted"):
            after = int(number) + 1
            expected += range(before, after) if what == "committed" else ()
            before = after
    # Retention may have taken the first ones, once it was let.
    there = [int(one.payload.rstrip(b"\0")) for one in gateway.published("demo-tx.in.1")]
    assert len(there) > 20
    assert there == expected[-len(there) :]


def test_closes_of_many_channels_in_one_read_take_each_its_own_time_only(gateway: RelinkGateway) -> None:
    # None of the answers has left before the last close: looking through all of them for each would not end.
    peer = gateway.connect()
    peer.session.high_water = 1 << 30
    said = peer.send(*[peer.op(CLOSE, channel) for channel in range(200_000)])
    assert len(said) == 200_000
    assert shown(said[:2] + said[-1:]) == ["closed 0", "closed 1", "closed 199999"]
    assert not peer.closed


def test_empty_messages_that_are_uncommitted_are_as_limited_as_others(open_gateway: Opened) -> None:
    gateway = open_gateway(max_uncommitted=1 << 16)
    peer = gateway.connect("demo-tx")
    peer.send(*[peer.message(1) for _ in range(2000)])
    (kept,) = gateway.bus.notes(b"relink/kept/").values()
    assert len(kept) // 32 < 250  # each takes more memory than its 8 bytes
    assert shown(peer.send(peer.op(COMMIT, 1, 1999)))[-1] == "uncommitted 1 <=1999"
    assert shown(peer.send(peer.message(1), peer.op(COMMIT, 1)))[-1] == "committed 1 <=2000"


def test_what_was_rolled_back_counts_until_the_note_that_it_is_in_is_gone(open_gateway: Opened) -> None:
    gateway = open_gateway(max_uncommitted=1 << 18, log={"segment_bytes": 1 << 22})
    peer = gateway.connect("demo-tx")
    for _ in range(20):
        # One note for both: the small one keeps it.
        peer.send(peer.message(1, b"small"), peer.message(2, bytes(60_000)))
        peer.send(peer.op(ROLLBACK, 2))
    assert sum(map(len, gateway.bus.notes(b"relink/kept/").values())) <= 1 << 18
    peer.send(peer.op(ROLLBACK, 1, 19))
    assert gateway.bus.notes(b"relink/kept/") == {}
    said = peer.send(peer.message(2, bytes(60_000)), peer.op(COMMIT, 2))
    assert shown(said)[-1] == "committed 2 <=20"


def test_restart_with_many_uncommitted_messages_takes_each_its_own_time_only(open_gateway: Opened) -> None:
    # Comparing each with all before it would not end.
    gateway = open_gateway(max_uncommitted=1 << 28, log={"segment_bytes": 1 << 24})
    peer = gateway.connect("demo-tx")
    count = 300_000
    assert shown(peer.send(peer.message(1) * count))[-1] == f"received 1 <={count - 1}"
    gateway.restart()
    back = gateway.connect("demo-tx", epoch=peer.epoch, link=peer.link)
    assert shown(back.greeting)[2:] == [f"received 1 <={count - 1}", "resume"]
    said = back.send(back.general(RESUME), *[back.op(COMMIT, 1)] * 500)
    assert shown(said)[-1] == "committed 1 <=499"
    assert len(topics(gateway)) == 500


@pytest.mark.parametrize("type", [RECEIVED, CONSUMED])
def test_acknowledging_after_resume_what_was_not_sent_again_is_a_violation(
    gateway: RelinkGateway, type: AckType
) -> None:
    peer = gateway.connect()
    gateway.publish("demo.out.1", *[b"%d" % i for i in range(10)])
    assert len(peer.send()) == 10
    back = peer.again()
    # In one read, so that nothing can be sent in between.
    back.send(back.ack(RECEIVED, 1, 4), back.general(RESUME), back.ack(type, 1, 9))
    assert back.closed
    once_more = back.again()
    said = once_more.send(once_more.ack(RECEIVED, 1, 4), once_more.general(RESUME))
    assert shown(said) == [f"message 1 {i}" for i in range(5, 10)]


def test_peer_that_comes_back_after_a_restart_has_no_more_channels_than_before(open_gateway: Opened) -> None:
    gateway = open_gateway(max_channels=3)
    peer = gateway.connect()
    gateway.restart()
    back = gateway.connect(epoch=peer.epoch, link=peer.link)
    back.send(*[back.ack(RECEIVED, channel, 0) for channel in range(3)])
    assert not back.closed
    back.send(back.ack(RECEIVED, 3, 0))
    assert back.closed


def test_messages_that_retention_took_from_a_link_are_passed_over_and_counted(open_gateway: Opened) -> None:
    gateway = open_gateway(log={"segment_bytes": 1 << 18, "retention_bytes": 4 << 18}, window=1)
    peer = gateway.connect()
    gateway.publish("demo.out.1", *[bytes(100)] * 2000)
    assert len(peer.send()) == 1
    peer.leave()
    # The first ones are gone, those that have numbers among them.
    gateway.publish("demo.out.1", *[bytes(100)] * 20_000)
    gateway.publish("demo.out.1", b"last")
    eventually(gateway.quiet, "prepared segments")
    back = gateway.connect(epoch=peer.epoch, link=peer.link)
    said = back.send(back.ack(CONSUMED, 1, 0), back.general(RESUME))
    number = 1
    while said:
        (message,) = said
        assert isinstance(message, wire.Message)
        said = back.send(back.ack(CONSUMED, 1, number))
        number += 1
    assert message.parts == (b"last",)
    counts = gateway.shared.counters()
    assert counts["lost"] == 1999
    assert counts["delivered"] == number
    assert (counts["violations"], counts["resent"]) == (0, 0)
    left = gateway.log.stats()["appended_offset"] - gateway.log.stats()["first_offset"]
    assert number == 1 + left


def test_dead_letters_never_stand_between_an_intent_and_its_messages(open_gateway: Opened) -> None:
    # After a kill the end of the log tells how much of an intent was done: a dead letter would count as a message.
    gateway = open_gateway(endpoints=[Endpoint("half", listener_transactions=True)])
    peer = gateway.connect("half")
    gateway.publish("half.out.1", b"a", b"b")
    peer.send()
    said = peer.send(
        peer.message(5, b"one"),
        peer.ack(UNCOMMITTED, 1),
        peer.message(5, b"two"),
        peer.ack(UNCOMMITTED, 1, 1),
    )
    assert [one for one in shown(said) if "consumed" in one] == ["consumed 5", "consumed 5"]
    (intent,) = gateway.bus.notes(b"relink/since/").values()
    offsets = {one.payload: one.offset for one in gateway.published("half.in.5")}
    (first,) = struct.unpack_from("<Q", intent, 16)
    assert first == offsets[b"two"]
    assert len(gateway.published("dead.#")) == 2


# --- messages that are too large for a link ---------------------------------------------------------------------


def test_message_beyond_the_limit_is_not_offered_and_has_no_number(open_gateway: Opened) -> None:
    gateway = open_gateway(max_message=1024)
    peer = gateway.connect()
    gateway.publish("demo.out.7", b"first", bytes(1025), b"next")
    assert shown(peer.send()) == ["message 7 first", "message 7 next"]
    counters = gateway.shared.counters()
    assert (counters["too_large"], counters["dead"], counters["delivered"]) == (1, 1, 2)
    (dead,) = gateway.published("dead.demo.out.7")
    assert dead.payload == bytes(1025)
    assert b"too large" in dead.headers


@pytest.mark.parametrize("later", [512, 4096])
def test_link_keeps_the_limit_that_it_began_with_so_that_its_numbers_hold(
    open_gateway: Opened, later: int
) -> None:
    gateway = open_gateway(max_message=1024)
    peer = gateway.connect()
    gateway.publish("demo.out.7", b"first", bytes(600), bytes(2000), b"fourth", b"fifth")
    assert len(shown(peer.send())) == 4
    gateway.restart(max_message=later)
    peer = peer.again(require=True)
    gateway.publish("demo.out.7", bytes(2001), b"last")
    # It had the first three of those that were sent; the one that was not has no number.
    said = shown(peer.send(peer.ack(RECEIVED, 7, 2), peer.general(RESUME)))
    assert [one for one in said if one.startswith("message")] == ["message 7 fifth", "message 7 last"]
    assert peer.gateway.shared.counters()["too_large"] == 1


def test_messages_that_are_too_large_wait_for_room_in_the_log_to_become_dead_letters(
    open_gateway: Opened,
) -> None:
    gateway = open_gateway(max_message=1024)
    peer = gateway.connect()
    bodies = [b"%04d" % i + bytes(2000) for i in range(1000)]
    gateway.publish("demo.out.7", *bodies, b"after")
    said = peer.send()  # more than the prepared segments take
    assert said == []
    assert gateway.shared.counters()["dead"] < len(bodies)

    def delivered() -> bool:
        gateway.log.on_event(gateway.now)
        said.extend(peer.decoder.feed(peer.session.elapse(gateway.now)))
        said.extend(peer.send())
        return bool(said)

    eventually(delivered, "the message behind them")
    assert shown(said) == ["message 7 after"]
    assert [one.payload for one in gateway.published("dead.demo.out.7")] == bodies
    counters = gateway.shared.counters()
    assert (counters["too_large"], counters["dead"], counters["lost"]) == (1000, 1000, 0)


def test_message_that_waits_for_room_to_become_a_dead_letter_survives_a_restart(open_gateway: Opened) -> None:
    gateway = open_gateway(max_message=1024)
    peer = gateway.connect()
    bodies = [b"%04d" % i + bytes(2000) for i in range(400)]
    gateway.publish("demo.out.7", *bodies)
    peer.send()
    assert 0 < gateway.shared.counters()["dead"] < len(bodies)
    peer.session.elapse(gateway.now)
    gateway.restart()
    peer = peer.again(require=True)
    peer.send(peer.general(RESUME))

    def buried() -> bool:
        gateway.log.on_event(gateway.now)
        peer.session.elapse(gateway.now)
        peer.send()
        return len(gateway.published("dead.demo.out.7")) >= len(bodies)

    eventually(buried, "all dead letters")
    assert [one.payload for one in gateway.published("dead.demo.out.7")] == bodies


def test_messages_that_a_peer_does_not_get_take_of_a_turns_room(open_gateway: Opened) -> None:
    gateway = open_gateway(max_message=1024)
    peer = gateway.connect()
    gateway.publish("demo.out.7", *[bytes(2000)] * 10)
    gateway.publish("demo.out.x", *[b""] * 1000)
    gateway.publish("demo.out.7", b"last")
    assert peer.session.pull(gateway.now, 5000) == b""
    counters = gateway.shared.counters()
    assert (counters["dead"], counters["unmapped"]) == (3, 0)
    said = []
    turns = 0
    while peer.session.more:
        before = gateway.shared.counters()
        said += peer.decoder.feed(peer.session.pull(gateway.now, 5000))
        after = gateway.shared.counters()
        assert after["dead"] - before["dead"] <= 3
        assert after["unmapped"] - before["unmapped"] <= 150
        turns += 1
    assert shown(said) == ["message 7 last"]
    assert turns >= 10


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("end", ["leave", "stop", "elapse"])
def test_message_beyond_the_limit_is_one_dead_letter_over_restarts(
    open_gateway: Opened, end: str, settled: bool
) -> None:
    gateway = open_gateway(max_message=1024)
    peer = gateway.connect()
    gateway.publish("demo.out.7", b"first")
    assert shown(peer.send()) == ["message 7 first"]
    if settled:
        peer.send(peer.ack(CONSUMED, 7))
        peer.session.elapse(gateway.now)
    gateway.publish("demo.out.7", bytes(1025))
    gateway.publish("demo.out.8", bytes(1025))
    assert peer.send() == []
    for _ in range(2):
        getattr(peer.session, end)(gateway.now)
        gateway.restart()
        peer = peer.again(require=True)
        said = peer.send(peer.ack(CONSUMED, 7, 0), peer.general(RESUME))
        assert said == []
    assert [one.topic for one in gateway.published("dead.#")] == [b"dead.demo.out.7", b"dead.demo.out.8"]
    gateway.publish("demo.out.7", b"next")
    assert shown(peer.send()) == ["message 7 next"]


def test_message_beyond_the_limit_is_one_dead_letter_for_all_links(open_gateway: Opened) -> None:
    gateway = open_gateway(max_message=1024)
    peers = [gateway.connect() for _ in range(5)]
    late = peers.pop()
    late.leave()
    gateway.publish("demo.out.7", *[bytes(1025)] * 3)
    for peer in peers:
        peer.send()
    late = late.again(require=True)
    late.send(late.general(RESUME))
    counters = gateway.shared.counters()
    assert (counters["too_large"], counters["dead"]) == (15, 3)
    assert len(gateway.published("dead.#")) == 3


@pytest.mark.parametrize("patient", [True, False])
@pytest.mark.parametrize("partly", [True, False])
def test_uncommitted_messages_wait_for_room_in_the_log_to_become_dead_letters(
    open_gateway: Opened, partly: bool, patient: bool
) -> None:
    gateway = open_gateway(
        endpoints=[Endpoint("half", listener_transactions=True)],
        log={"segment_bytes": 1 << 16, "retention_bytes": 8 << 16},
        block_timeout=5,
    )
    gateway.log.hold("sink", 0)
    peer = gateway.connect("half")
    bodies = [b"%02d" % i + bytes(500) for i in range(10)]

    def fill() -> bool:
        gateway.log.on_event(gateway.now)
        for size in (5000,) if partly else (5000, 0):
            with suppress(LogFull):
                while True:
                    gateway.bus.publish("other", bytes(size), now=gateway.now)
        return gateway.log.full is not None

    gateway.publish("other", *[bytes(1000)] * 300)
    gateway.publish("half.out.1", *bodies)
    assert len(peer.send()) == 11
    eventually(fill, "a full log")
    peer.send(peer.ack(UNCOMMITTED, 1, 9))
    assert peer.session.blocked
    assert peer.session.waits_space
    done = gateway.shared.counters()["dead"]
    assert (0 < done < 10) == partly
    if not patient:
        gateway.now += 6 * SECOND
        peer.send()
        assert peer.closed
        peer = peer.again(require=True)
        said = peer.send(peer.ack(RECEIVED, 1, 9), peer.general(RESUME))
        assert shown(said) == [f"commit 1 <={i}" for i in range(done, 10)]
        peer.send(peer.ack(UNCOMMITTED, 1, 9))
        assert peer.session.blocked
    gateway.log.release("sink")

    def room() -> bool:
        gateway.log.on_event(gateway.now)
        peer.send()
        return not peer.session.blocked

    eventually(room, "room in the log")
    assert not peer.closed
    assert [one.payload for one in gateway.published("dead.#")] == bodies
    assert gateway.shared.counters()["lost"] == 0


def test_largest_message_of_a_log_becomes_a_dead_letter_without_its_reason(open_gateway: Opened) -> None:
    gateway = open_gateway(max_message=1024)
    peer = gateway.connect()
    largest = gateway.log.max_record - 48  # a record's header
    gateway.publish("demo.out.7", bytes(largest))

    def buried() -> bool:
        gateway.log.on_event(gateway.now)
        peer.session.elapse(gateway.now)
        peer.send()
        return bool(gateway.shared.counters()["dead"])

    eventually(buried, "the dead letter")
    (dead,) = gateway.published("dead.#")
    assert (len(dead.payload), dead.headers) == (largest, b"")
    assert gateway.shared.counters()["lost"] == 0
