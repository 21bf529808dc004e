"""BlipMQ sessions where something has run out: room in the log, a peer that does not read, a disk that does
not sync. Nothing may be lost silently, said twice, or grow."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.schema import Key
from headrace.log import LogReader
from headrace.wire import blipmq as wire
from tests.oracle.blipmq import frame
from tests.sessions.passive_gateway import DEV, SECOND, Client, PassiveGateway, break_syncs
from tests.streams import Server, on_both_loops, run, until

TINY_LOG: dict[str, Any] = {"segment_bytes": 64 << 10, "pool_segments": 1, "retention_bytes": 3 * (64 << 10)}
BODY = bytes(1000)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[PassiveGateway]:
    """A gateway with a log of three small segments, which cannot let go of any."""
    gateway = PassiveGateway(tmp_path, log=TINY_LOG, block_timeout=5)
    gateway.log.hold("reader", 0)
    yield gateway
    gateway.close()


def make_room(gateway: PassiveGateway, hold: int | None = None) -> None:
    if hold is None:
        gateway.log.release("reader")
    else:
        gateway.log.hold("reader", hold)
    gateway.wait_for_log(lambda: gateway.log.full is None and gateway.log.stats()["pool_segments"] > 0)


def fill(gateway: PassiveGateway, qos: int = 0, first: int = 0) -> Client:
    """A client that has published until the log was full, and waits with one more message in its hands. The
    correlations of its messages count up."""
    client = gateway.connect()
    sent = first
    while True:
        client.session.feed(wire.encode_publish("t", BODY, qos, sent), gateway.now)
        if client.session.blocked:  # perhaps only until the next segment is prepared
            gateway.wait_for_log(lambda: gateway.log.full or gateway.log.stats()["pool_segments"] > 0)
            client.session.feed(b"", gateway.now)
        if client.session.blocked:
            return client
        sent += 1


def logged(gateway: PassiveGateway) -> list[int]:
    """The correlations of all messages in the log."""
    return [record.correlation for record in LogReader(gateway.log.path)]


# --- a full log ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1])
def test_full_log_blocks_a_publisher_and_neither_loses_nor_doubles_its_message(
    gateway: PassiveGateway, qos: int
) -> None:
    client = fill(gateway, qos)
    session = client.session
    stored = gateway.log.appended
    frame_size = len(wire.encode_publish("t", BODY, qos, 0))
    assert session.blocked
    assert session.waits_space
    assert not session.waits_room
    assert session.waits_safe == 0
    assert session.kept == frame_size
    for _ in range(5):  # nothing changes by trying again, nor by sending more
        assert session.feed(b"", gateway.now) == b""
        assert session.blocked
    assert session.feed(wire.encode_publish("t", BODY, qos, stored + 1), gateway.now) == b""
    assert session.kept == 2 * frame_size
    assert gateway.log.appended == stored
    make_room(gateway)
    session.feed(b"", gateway.now)
    assert not session.blocked
    assert gateway.log.appended == stored + 2
    kept = logged(gateway)
    assert kept == list(range(kept[0], stored + 2))
    assert client.send(wire.encode_ping(1)) != []
    assert gateway.shared.counters()["dropped_full"] == gateway.shared.counters()["refused_full"] == 0


def test_frames_behind_a_blocked_publish_wait_and_keep_their_order(gateway: PassiveGateway) -> None:
    client = fill(gateway)
    sent = gateway.log.appended
    behind = wire.encode_ping(7) + wire.encode_publish("t", b"last", 1, sent + 1) + wire.encode_poll(0, 8)
    assert client.session.feed(behind, gateway.now) == b""
    make_room(gateway)
    assert client.exchange(b"") == wire.encode_pong(7) + wire.encode_nack(
        400, "subscription_id must be non-zero", 8
    )
    assert logged(gateway)[-2:] == [sent, sent + 1]


def test_qos_1_publish_is_refused_with_the_reason_after_block_timeout(gateway: PassiveGateway) -> None:
    client = fill(gateway, qos=1)
    stored = gateway.log.appended
    gateway.now += 5 * SECOND - 1
    assert client.session.feed(b"", gateway.now) == b""
    assert client.session.blocked
    gateway.now += 1
    said = "durable publish failed: retention is reached and held back by reader at offset 0"
    assert client.exchange(b"") == wire.encode_nack(500, said, stored)
    assert not client.session.blocked
    assert client.session.kept == 0
    # From now on it is not waited again for each message.
    assert client.exchange(wire.encode_publish("t", BODY, 1, 77)) == wire.encode_nack(500, said, 77)
    assert client.exchange(wire.encode_ping(78)) == wire.encode_pong(78)
    assert gateway.log.appended == stored
    assert gateway.shared.counters()["refused_full"] == 2
    assert gateway.shared.counters()["nack_500"] == 2


def test_qos_0_publish_is_dropped_and_counted_after_block_timeout(gateway: PassiveGateway) -> None:
    client = fill(gateway)
    stored = gateway.log.appended
    gateway.now += 5 * SECOND
    many = b"".join(wire.encode_publish("t", BODY, 0, cid) for cid in range(9))
    assert client.exchange(many + wire.encode_ping(1)) == wire.encode_pong(1)
    assert not client.session.blocked
    assert gateway.log.appended == stored
    assert gateway.shared.counters()["dropped_full"] == 10
    assert gateway.shared.counters()["refused_full"] == 0


def test_block_timeout_of_0_refuses_at_once(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path, log=TINY_LOG, block_timeout=5)
    gateway.log.hold("reader", 0)
    fill(gateway)
    gateway.shared.block_timeout_us = 0
    (answer,) = gateway.connect().send(wire.encode_publish("t", BODY, 1, 9))
    assert isinstance(answer, wire.Nack)
    assert (answer.code, answer.correlation) == (500, 9)
    gateway.close()


def test_publisher_that_was_refused_is_served_again_once_there_is_room(gateway: PassiveGateway) -> None:
    client = fill(gateway, qos=1)
    gateway.now += 5 * SECOND
    assert client.send() != []
    make_room(gateway)
    client.publish("t", b"taken")
    assert logged(gateway)[-1] == 4


@pytest.mark.parametrize("qos", [0, 1])
def test_log_that_is_full_again_is_waited_for_again(gateway: PassiveGateway, qos: int) -> None:
    """Also by a publisher that was silent while there was room."""
    client = fill(gateway, qos)
    gateway.now += 5 * SECOND
    client.exchange(b"")
    end = gateway.log.appended
    make_room(gateway, hold=end)
    other = fill(gateway, first=end)
    assert other.session.blocked
    assert client.session.feed(wire.encode_publish("t", BODY, qos, 1000), gateway.now) == b""
    assert client.session.blocked
    assert client.session.waits_space
    make_room(gateway)
    assert client.exchange(b"") == b""
    assert not client.session.blocked
    assert logged(gateway)[-1] == 1000


def test_blocked_session_asks_to_go_on_when_its_time_is_up(gateway: PassiveGateway) -> None:
    client = fill(gateway, qos=1)
    asked: list[int] = []
    carrier: Any = SimpleNamespace(unblock=lambda: asked.append(gateway.now), wake=lambda: None)
    client.session.connection = carrier
    gateway.now += 5 * SECOND - 1
    client.session.elapse(gateway.now)
    assert asked == []
    gateway.now += 1
    client.session.elapse(gateway.now)
    assert asked == [gateway.now]


def test_subscribers_can_acknowledge_and_poll_while_the_log_is_full_and_it_is_remembered(
    gateway: PassiveGateway,
) -> None:
    consumer = gateway.connect()
    id = consumer.subscribe("t", 1)
    consumer.publish("t", *(str(n).encode() for n in range(50)))
    fill(gateway)
    tags = []
    for _ in range(50):
        delivery = consumer.poll(id)
        assert delivery is not None
        tags.append(delivery.correlation)
        assert consumer.ack(id, delivery.correlation)
    assert gateway.log.full is not None
    gateway.restart()
    consumer = gateway.connect()
    assert not consumer.ack(id, tags[0])
    assert consumer.poll(id) is None


def test_subscribe_works_while_the_log_is_full(gateway: PassiveGateway) -> None:
    fill(gateway)
    consumer = gateway.connect()
    assert [consumer.subscribe("t", qos) for qos in (0, 1)] == [1, 2]


def test_bursts_over_many_segments_lose_nothing(tmp_path: Path) -> None:
    """The log has no room for moments only, while its next segment is being prepared."""
    gateway = PassiveGateway(tmp_path, log={**TINY_LOG, "retention_bytes": 64 << 20})
    client = gateway.connect()
    id = client.subscribe("t", 0)
    blocked = 0
    client.session.feed(wire.encode_publish_many("t", [BODY] * 2000, 0, 0), gateway.now)
    while client.session.blocked:
        blocked += 1
        gateway.wait_for_log(lambda: gateway.log.stats()["pool_segments"] > 0)
        client.session.feed(b"", gateway.now)
    assert blocked > 0
    assert logged(gateway) == list(range(2000))
    assert len(client.poll_all(id)) == 2000
    assert gateway.shared.counters()["dropped_full"] == 0
    gateway.close()


# --- a sync that fails --------------------------------------------------------------------------------------


def fail_sync(gateway: PassiveGateway) -> None:
    break_syncs(gateway.log)
    gateway.log.request_sync()
    gateway.wait_for_log(lambda: gateway.log.failed)


def test_publishes_after_a_failed_sync_are_refused_or_dropped(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path)
    client = gateway.connect()
    client.publish("t", b"safe")
    gateway.bus.publish("t", b"not safe")
    fail_sync(gateway)
    (answer,) = client.send(wire.encode_publish("t", b"m", 0, 8), wire.encode_publish("t", b"m", 1, 9))
    assert isinstance(answer, wire.Nack)
    assert (answer.code, answer.correlation) == (500, 9)
    assert answer.text.startswith("durable publish failed: sync failed: ")
    assert client.send(wire.encode_subscribe("u", 1, 10))[0].fields()["code"] == 500
    assert client.exchange(wire.encode_ping(11)) == wire.encode_pong(11)
    assert not client.session.closing
    counters = gateway.shared.counters()
    assert (counters["dropped_full"], counters["refused_full"]) == (1, 1)
    gateway.log.close(sync=False)


@pytest.mark.parametrize("told_by", ["elapse", "stop"])
@pytest.mark.parametrize(
    "behind", [b"", wire.encode_ping(3), wire.encode_poll(1, 3)], ids=["", "ping", "poll"]
)
def test_peer_whose_publish_was_never_synced_is_not_told_so_and_its_connection_ends(
    tmp_path: Path, behind: bytes, told_by: str
) -> None:
    gateway = PassiveGateway(tmp_path)
    client, idle = gateway.connect(), gateway.connect()
    client.subscribe("t", 1)
    client.publish("t", b"safe")
    break_syncs(gateway.log)
    said = client.session.feed(
        wire.encode_ping(1) + wire.encode_publish("t", b"lost", 1, 2) + behind, gateway.now
    )
    assert said == wire.encode_pong(1)
    gateway.wait_for_log(lambda: gateway.log.failed)
    assert client.session.feed(b"", gateway.now) == b""
    for peer in (client, idle):
        assert getattr(peer.session, told_by)(gateway.now) == b""
        assert peer.session.out.size == 0
    assert client.session.closing
    assert not idle.session.closing
    assert client.session.feed(wire.encode_ping(4), gateway.now) == b""
    assert gateway.shared.counters()["unconfirmed"] == 1
    gateway.log.close(sync=False)


def test_what_was_safe_is_still_said_when_a_later_sync_fails(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path)
    session = gateway.connect().session
    break_syncs(gateway.log)
    session.feed(wire.encode_publish("t", b"lost", 1, 2), gateway.now)
    session.out.write(b"waits only for the peer to read")
    session.out.gate(1 << 63)
    session.out.write(b"waits for the sync")
    gateway.wait_for_log(lambda: gateway.log.failed)
    assert session.elapse(gateway.now) == b"waits only for the peer to read"
    assert session.closing
    assert session.out.size == 0
    gateway.log.close(sync=False)


# --- a peer that does not read ------------------------------------------------------------------------------


def bad_polls(client: Client) -> bytes:
    return wire.encode_poll(0, 1)


def forbidden_publishes(client: Client) -> bytes:
    return wire.encode_publish("private." + "x" * 500, b"", 0, 1)


def big_deliveries(client: Client) -> bytes:
    id = client.subscribe("big", 0)
    client.publish("big", *([bytes(900)] * 500), qos=0)
    return wire.encode_poll(id, 1)


FLOODS: dict[str, Callable[[Client], bytes]] = {
    "pings": lambda client: wire.encode_ping(1),
    "bad polls": bad_polls,
    "bad payloads": lambda client: frame(3, 1, b""),
    "unknown acks": lambda client: wire.encode_ack(99, 1),
    "forbidden publishes": forbidden_publishes,
    "handshakes again": lambda client: wire.encode_hello(1, 1) + wire.encode_auth("x", 2),
    "subscribes": lambda client: wire.encode_subscribe("t", 0, 1),
    "deliveries": big_deliveries,
}
LARGEST_SMALL_ANSWER = 1000


@pytest.mark.parametrize("flood", FLOODS)
def test_no_kind_of_request_makes_the_output_grow_beyond_high_water(tmp_path: Path, flood: str) -> None:
    gateway = PassiveGateway(
        tmp_path,
        keys=[Key(name="dev", key="dev-key", publish=["t", "big"], subscribe=["#"])],
        log={"sync": "none"},
    )
    client = gateway.connect()
    session = client.session
    session.high_water = 4096
    data = FLOODS[flood](client) * 500
    answers = [session.feed(data, gateway.now)]
    assert session.blocked
    assert session.waits_room
    while session.blocked:
        assert 4096 <= len(answers[-1]) < 4096 + LARGEST_SMALL_ANSWER
        assert session.kept > 0
        answers.append(session.feed(b"", gateway.now))
    assert session.kept == 0
    # Everything is answered once, in the end.
    reference = gateway.connect()
    reference.session.high_water = 1 << 30
    frames = client.decoder.feed(b"".join(answers))
    if flood == "deliveries":
        assert len(frames) == 500
    elif flood != "subscribes":
        assert b"".join(answers) == reference.session.feed(data, gateway.now)
    else:
        assert len({one.fields()["subscription"] for one in frames}) == 500
    gateway.close()


def test_unauthenticated_flood_is_bounded(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path)
    session = gateway.connect(None).session
    session.high_water = 4096
    said = session.feed(wire.encode_ping(1) * 1000, gateway.now)
    assert session.waits_room
    assert 4096 <= len(said) < 4096 + LARGEST_SMALL_ANSWER
    gateway.close()


def test_one_large_delivery_may_pass_high_water_and_the_next_one_waits(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path, log={"segment_bytes": 8 << 20})
    client = gateway.connect()
    session = client.session
    session.high_water = 4096
    id = client.subscribe("t", 0)
    client.publish("t", *([bytes(1 << 20)] * 3), qos=0)
    said = session.feed(wire.encode_poll(id, 1) * 3, gateway.now)
    assert session.waits_room
    assert len(client.decoder.feed(said)) == 1
    assert len(client.send()) == 2
    gateway.close()


def test_answers_that_wait_for_a_sync_count_as_output(tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path, log={"sync": "always"})
    client = gateway.connect()
    session = client.session
    session.high_water = 1300
    data = wire.encode_publish("t", b"m", 1, 1) + wire.encode_ping(2) * 1000
    said = session.feed(data, gateway.now)
    assert session.out.size + len(said) <= 1300
    assert said + client.exchange(b"") == wire.encode_pong(2) * 1000
    gateway.close()


@on_both_loops
def test_peer_on_a_socket_that_does_not_read_is_not_read_either(loop: str, tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path, keys=[DEV])
    high_water = 32 << 10
    hello = wire.encode_hello(1, 1) + wire.encode_auth("dev-key", 2)
    count = 400_000

    async def main() -> None:
        async with Server(gateway.shared.session, high_water=high_water, send_buffer=16 << 10) as server:
            reader, writer = await server.connect()
            writer.write(hello + wire.encode_ping(3) * count)
            await until(lambda: server.sessions and server.sessions[0].waits_room)
            await asyncio.sleep(0.05)
            assert server.sessions[0].out.size <= high_water + 13
            said = await asyncio.wait_for(reader.readexactly(42 + 13 * count), 30)
            assert said[42:] == wire.encode_pong(3) * count
            assert not server.sessions[0].blocked
            writer.close()

    run(loop, main)
    gateway.close()


@on_both_loops
def test_peer_on_a_socket_hears_of_syncs_and_room_as_they_come(loop: str, tmp_path: Path) -> None:
    gateway = PassiveGateway(tmp_path, log={**TINY_LOG, "retention_bytes": 64 << 20})
    bodies = [str(n).encode().ljust(1000) for n in range(1000)]

    async def main() -> None:
        async with Server(gateway.shared.session) as server:

            def on_log_event() -> None:
                happened = gateway.log.on_event()
                if happened & 1:
                    gateway.bus.on_safe()
                    server.board.safe_moved()
                if happened & 2:
                    server.board.space_made()

            asyncio.get_running_loop().add_reader(gateway.log.event_fd, on_log_event)
            reader, writer = await server.connect()
            writer.write(
                wire.encode_hello(1, 1)
                + wire.encode_auth("dev-key", 2)
                + wire.encode_subscribe("t", 1, 3)
                + wire.encode_publish_many("t", bodies, 1, 100)
                + wire.encode_ping(4)
                + b"".join(wire.encode_poll(1, 5) + wire.encode_ack(1, n + 1) for n in range(1000))
                + wire.encode_ping(6)
            )
            decoder, said = wire.Decoder(), list[wire.Frame]()
            while not said or said[-1].correlation != 6 or not isinstance(said[-1], wire.Pong):
                said += decoder.feed(await asyncio.wait_for(reader.read(1 << 16), 30))
            deliveries = [one for one in said if isinstance(one, wire.Publish)]
            assert [one.message for one in deliveries] == bodies
            assert [one.correlation for one in deliveries] == list(range(1, 1001))
            assert len(said) == 3 + 1 + 1000 + 1
            asyncio.get_running_loop().remove_reader(gateway.log.event_fd)
            writer.close()

    run(loop, main)
    gateway.close()
