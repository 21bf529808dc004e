"""Felix over real QUIC, from the outside: connections, streams, certificates and everything that can end them, on both
engines."""

import asyncio
import datetime
import random
import re
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headrace.gateway.quic import source_of
from headrace.quic.datagrams import Batch
from headrace.quic.engine import Settings
from headrace.wire import felix as wire
from tests.gateway.gateways import GatewayProcess
from tests.gateway.gateways import Peer as BlipmqPeer
from tests.gateway.quic_peers import ENGINES, Ended, QuicPeer
from tests.sessions.felix_gateway import publish, publish_batch, subscribe

OK = {"type": "ok"}
UNI = 3  # the first stream that a server opens


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def gateway(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    data = tmp_path_factory.mktemp("gateway")
    with GatewayProcess(
        data, f"quic.engine={engine}", "drop.enabled=false", "log.retention_bytes=64MiB"
    ) as gateway:
        yield gateway


def run(
    gateway: GatewayProcess, engine: str, talk: Callable[[QuicPeer], Awaitable[Any]], **options: Any
) -> Any:
    """Has a peer talk to a gateway."""

    async def main() -> Any:
        async with QuicPeer(gateway.places["felix"], engine, **options) as peer:
            return await talk(peer)

    return asyncio.run(main())


def metric(gateway: GatewayProcess, name: str, **labels: str) -> float:
    text = gateway.get("/metrics")[1]
    wanted = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    for line in text.splitlines():
        match = re.fullmatch(r"(\w+)\{(.*)\} (.+)", line)
        if match and match[1] == name and ",".join(sorted(match[2].split(","))) == wanted:
            return float(match[3])
    raise AssertionError(f"{name} {wanted} is not there")


def counted(gateway: GatewayProcess, event: str) -> float:
    return metric(gateway, "headrace_session_events_total", protocol="felix", event=event)


# --- what is said -----------------------------------------------------------------------------------------------


def test_requests_of_both_dialects_are_answered(gateway: GatewayProcess, engine: str) -> None:
    async def talk(peer: QuicPeer) -> None:
        number = peer.open()
        peer.say(number, **publish(request_id=1))
        peer.say(number, **publish_batch([b"a", b"b"], ack="per_batch", request_id="two"))
        peer.say(number, type="cache_put", key="k", value="dg==", request_id="three")
        peer.say(number, True, type="cache_get", key="k", request_id="four")
        assert await peer.answers(number, 4) == [
            {"type": "publish_ok", "request_id": 1},
            OK | {"request_id": "two"},
            OK | {"request_id": "three"},
            {"type": "cache_value", "request_id": "four", "key": "k", "value": "dg=="},
        ]
        await peer.until(lambda: number in peer.finished)

    run(gateway, engine, talk)
    assert metric(gateway, "headrace_session_held", protocol="felix", what="cache_entries") == 1


def test_a_subscription_of_the_specification_has_a_stream_of_its_own(
    gateway: GatewayProcess, engine: str
) -> None:
    async def talk(peer: QuicPeer) -> None:
        control = peer.open()
        peer.say(control, **subscribe("spec"))
        assert await peer.answers(control, 1) == [OK]
        (hello,) = await peer.answers(UNI, 1)
        assert hello["type"] == "event_stream_hello"
        assert isinstance(hello["subscription_id"], str)
        peer.say(control, **publish(b"one", "spec"))
        event = (await peer.answers(UNI, 2))[1]
        assert event == {**publish(b"one", "spec"), "type": "event"}
        assert control not in peer.finished

    run(gateway, engine, talk)


def test_a_subscription_of_the_reference_gets_binary_batches(gateway: GatewayProcess, engine: str) -> None:
    async def talk(peer: QuicPeer) -> None:
        control = peer.open()
        peer.say(control, True, **subscribe("ref", subscription_id=1))
        assert await peer.answers(control, 1) == [{"type": "subscribed", "subscription_id": 1}]
        await peer.until(lambda: control in peer.finished)
        one_way = peer.open(one_way=True)
        peer.send(one_way, wire.encode_publish_batch("t", "n", "ref", [b"%d" % i for i in range(1000)]))
        await peer.until(lambda: len(peer.events(UNI)) == 1000)
        assert peer.events(UNI) == [b"%d" % i for i in range(1000)]

    run(gateway, engine, talk)


def test_messages_cross_from_and_to_another_protocol(gateway: GatewayProcess, engine: str) -> None:
    blipmq = BlipmqPeer.to(gateway)

    async def talk(peer: QuicPeer) -> None:
        await peer.ask(**subscribe("bridge", subscription_id=1))
        await asyncio.to_thread(blipmq.publish, "t.n.bridge", b"from BlipMQ")
        await peer.until(lambda: peer.events(UNI) == [b"from BlipMQ"])

    run(gateway, engine, talk)


@pytest.mark.parametrize("other", ENGINES)
def test_engines_talk_to_each_other(gateway: GatewayProcess, other: str) -> None:
    async def talk(peer: QuicPeer) -> None:
        await peer.ask(**subscribe(f"mixed-{other}", subscription_id=1))
        number = peer.open()
        batch = wire.encode_publish_batch("t", "n", f"mixed-{other}", [bytes(1000)] * 40)
        for _ in range(20):
            peer.send(number, batch)
        await peer.until(lambda: len(peer.events(UNI)) == 800)

    run(gateway, other, talk)


# --- streams that end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stop", "leave"])
def test_a_subscription_ends_when_its_stream_is_not_wanted(
    gateway: GatewayProcess, engine: str, how: str
) -> None:
    before = metric(gateway, "headrace_connections_closed_total", protocol="felix")

    def subscriptions() -> int:
        bus = gateway.status()["bus"]
        return int(bus["subscriptions"] - bus["durable"])  # queues have durable ones

    async def talk(peer: QuicPeer) -> None:
        await peer.ask(**subscribe("ending", subscription_id=1))
        await peer.answers(UNI, 1)
        assert await asyncio.to_thread(subscriptions) == 1
        if how == "stop":
            peer.stop(UNI, 0)
            await peer.until(lambda: UNI in peer.resets)
            assert await asyncio.to_thread(subscriptions) == 0
            assert await peer.ask(**publish(request_id=1)) == {"type": "publish_ok", "request_id": 1}

    gateway.until(lambda: subscriptions() == 0)
    run(gateway, engine, talk)
    gateway.until(lambda: subscriptions() == 0)
    gateway.until(lambda: metric(gateway, "headrace_connections_closed_total", protocol="felix") > before)


def test_a_reset_ends_its_stream_and_others_go_on(gateway: GatewayProcess, engine: str) -> None:
    async def talk(peer: QuicPeer) -> None:
        first, second = peer.open(), peer.open()
        peer.send(first, b"FLX1")
        peer.say(second, **publish(request_id=1))
        await peer.answers(second, 1)
        peer.reset(first, 7)
        await peer.until(lambda: first in peer.resets)
        peer.say(second, **publish(request_id=2))
        await peer.answers(second, 2)

    run(gateway, engine, talk)


def test_a_stream_that_ends_inside_a_frame_ends(gateway: GatewayProcess, engine: str) -> None:
    async def talk(peer: QuicPeer) -> None:
        number = peer.open()
        peer.send(number, b"FLX1\x00\x01\x00\x00\x00\x00\x00\x10{", fin=True)
        await peer.until(lambda: number in peer.finished)
        assert peer.frames(number) == []

    run(gateway, engine, talk)


def test_what_does_not_belong_on_a_one_way_stream_stops_it(gateway: GatewayProcess, engine: str) -> None:
    async def talk(peer: QuicPeer) -> None:
        number = peer.open(one_way=True)
        peer.say(number, **subscribe())
        await peer.until(lambda: peer.stops.get(number) == 0)
        assert await peer.ask(**publish(request_id=1)) == {"type": "publish_ok", "request_id": 1}

    run(gateway, engine, talk)


def test_a_malformed_header_closes_the_connection_with_a_code(gateway: GatewayProcess, engine: str) -> None:
    async def talk(peer: QuicPeer) -> Any:
        peer.send(peer.open(), b"GET / HTTP/1.1\r\n")
        await peer.until(lambda: peer.ended, or_ended=False)
        return peer.ended

    ended = run(gateway, engine, talk)
    assert (ended.code, ended.reason) == (1, "bad frame magic 47455420")
    assert "bad frame magic" in gateway.event("protocol.violation")["reason"]


def test_invalid_json_gets_an_error_on_its_stream(gateway: GatewayProcess, engine: str) -> None:
    async def talk(peer: QuicPeer) -> None:
        number = peer.open()
        peer.send(number, wire.encode_frame(b"{"))
        peer.say(number, type="hop")
        peer.say(number, **publish(request_id=1))
        first, second, third = await peer.answers(number, 3)
        assert first["type"] == second["type"] == "error"
        assert third == {"type": "publish_ok", "request_id": 1}

    run(gateway, engine, talk)


def test_datagrams_that_are_no_quic_do_no_harm(gateway: GatewayProcess, engine: str) -> None:
    host, _, port = gateway.places["felix"].rpartition(":")
    noise = random.Random(7)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for first in (0x00, 0x40, 0x7F, 0x80, 0xC0, 0xC3, 0xFF):
            for size in (0, 1, 8, 9, 25, 1200, 1400, 9000):
                sock.sendto(bytes([first])[:size] + noise.randbytes(max(0, size - 1)), (host, int(port)))
                versioned = bytes([first, 0, 0, 0, noise.choice([0, 1, 9])]) + noise.randbytes(size)
                sock.sendto(versioned, (host, int(port)))

    async def talk(peer: QuicPeer) -> None:
        assert await peer.ask(**publish(request_id=1)) == {"type": "publish_ok", "request_id": 1}

    run(gateway, engine, talk)
    assert not gateway.named("loop.error")


# --- a connection's life --------------------------------------------------------------------------------------------


def test_a_client_may_move_to_another_port_in_mid_stream(gateway: GatewayProcess, engine: str) -> None:
    async def talk(peer: QuicPeer) -> None:
        await peer.ask(**subscribe("moving", subscription_id=1))
        number = peer.open()
        sent = 0
        for _ in range(2):
            for _ in range(20):
                peer.send(number, wire.encode_publish_batch("t", "n", "moving", [b"%d" % sent]))
                sent += 1
            if sent == 20:
                peer.move()
        peer.say(number, **publish(b"last", "moving"))
        await peer.until(lambda: peer.events(UNI)[-1:] == [b"last"])
        assert peer.events(UNI) == [*(b"%d" % i for i in range(sent)), b"last"]

    run(gateway, engine, talk)


@pytest.mark.parametrize("offer", [None, ["felix"], ["h3", "other"]])
def test_the_first_alpn_offer_is_echoed_and_none_is_needed(
    gateway: GatewayProcess, engine: str, offer: list[str] | None
) -> None:
    async def talk(peer: QuicPeer) -> Any:
        assert await peer.ask(**publish(request_id=1)) == {"type": "publish_ok", "request_id": 1}
        return peer.alpn

    assert run(gateway, engine, talk, alpn=offer) == (offer[0] if offer else None)


def test_its_own_certificate_is_a_leaf_for_localhost_and_its_address(
    gateway: GatewayProcess, engine: str
) -> None:
    path = Path(gateway.event("certificate.made")["path"])
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(one.value) for one in names] == ["localhost", "127.0.0.1"]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert path.with_name("key.pem").stat().st_mode & 0o777 == 0o600

    async def talk(peer: QuicPeer) -> None:
        assert await peer.ask(**publish(request_id=1)) == {"type": "publish_ok", "request_id": 1}

    for name in ("localhost", "127.0.0.1"):
        run(gateway, engine, talk, authorities=path, verify=True, server_name=name)
    with pytest.raises(Ended):
        run(gateway, engine, talk, authorities=path, verify=True, server_name="elsewhere.example")


def test_a_slow_subscriber_is_bounded_and_delays_nobody(gateway: GatewayProcess, engine: str) -> None:
    settings = Settings(connection_window=64 << 10, stream_window=64 << 10)
    messages, size = 2000, 4000

    def has_all(peer: QuicPeer) -> bool:
        return len(peer.heard[UNI]) > messages * size and len(peer.events(UNI)) == messages

    async def main() -> None:
        at = gateway.places["felix"]
        async with (
            QuicPeer(at, engine, settings) as slow,
            QuicPeer(at, engine) as quick,
            QuicPeer(at, engine) as sender,
        ):
            for peer in (slow, quick):
                await peer.ask(**subscribe("slow", subscription_id=1))
            slow.deaf = True
            number = sender.open()
            for i in range(messages // 40):
                sender.send(number, wire.encode_publish_batch("t", "n", "slow", [bytes(size)] * 40))
                if i % 10 == 9:
                    sender.say(number, **publish(b"", "other", request_id=i))
                    await sender.until(
                        lambda i=i: any(one["request_id"] == i for one in sender.frames(number))
                    )
            await quick.until(lambda: has_all(quick))
            slow.deaf = False
            slow.connection.send_ping(1)
            slow.transmit()
            await slow.until(lambda: has_all(slow))

    asyncio.run(main())


def test_counters_and_addresses_are_shown(gateway: GatewayProcess, engine: str) -> None:
    (felix,) = [one for one in gateway.status()["listeners"] if one["protocol"] == "felix"]
    assert felix["addresses"] == [gateway.places["felix"]]
    assert felix["tls"]
    assert felix["counters"]["opened"] > 0
    assert felix["counters"]["bytes_in"] > 0
    assert counted(gateway, "publishes") > 0
    assert metric(gateway, "headrace_published_total", protocol="felix") > 0


# --- settings ---------------------------------------------------------------------------------------------------


def test_mildly_a_malformed_header_ends_its_stream_alone(engine: str, tmp_path: Path) -> None:
    async def talk(peer: QuicPeer) -> None:
        number = peer.open()
        peer.send(number, b"GET / HTTP/1.1\r\n")
        await peer.until(lambda: number in peer.finished and number in peer.stops)
        assert await peer.ask(**publish(request_id=1)) == {"type": "publish_ok", "request_id": 1}

    with GatewayProcess(tmp_path, f"quic.engine={engine}", "listen.felix.bad_header=stream") as gateway:
        run(gateway, engine, talk)


def test_with_retry_an_address_is_checked_first(engine: str, tmp_path: Path) -> None:
    async def talk(peer: QuicPeer) -> None:
        assert await peer.ask(**publish(request_id=1)) == {"type": "publish_ok", "request_id": 1}
        assert retried(peer)

    def retried(peer: QuicPeer) -> bool:
        found: bool = peer.connection._retry_count > 0
        return found

    with GatewayProcess(tmp_path, f"quic.engine={engine}", "quic.retry=true") as gateway:
        run(gateway, engine, talk)


def test_a_quiet_connection_is_kept_and_a_dead_peer_is_forgotten(engine: str, tmp_path: Path) -> None:
    sets = (f"quic.engine={engine}", "quic.idle_timeout=1s", "quic.keep_alive=300ms")

    def connections() -> float:
        return metric(gateway, "headrace_connections", protocol="felix")

    async def talk(peer: QuicPeer) -> None:
        await peer.ask(**publish(request_id=1))
        await asyncio.sleep(2)
        assert await peer.ask(**publish(request_id=2)) == {"type": "publish_ok", "request_id": 2}
        assert await asyncio.to_thread(connections) == 1
        peer.deaf = True
        if peer._timer is not None:
            peer._timer.cancel()
        await asyncio.to_thread(gateway.until, lambda: connections() == 0)

    with GatewayProcess(tmp_path, *sets) as gateway:
        run(gateway, engine, talk)


def test_a_subscriber_that_reads_nothing_loses_its_stream_alone(engine: str, tmp_path: Path) -> None:
    async def main() -> None:
        at = gateway.places["felix"]
        always = gateway.status()["bus"]["subscriptions"]  # those of the gateway itself
        async with QuicPeer(at, engine) as stuck, QuicPeer(at, engine) as sender:
            await stuck.ask(**subscribe(subscription_id=1))
            stuck.deaf = True
            number = sender.open()
            for _ in range(30):
                sender.send(number, wire.encode_publish_batch("t", "n", "s", [bytes(10_000)] * 10))
            await asyncio.to_thread(
                gateway.until, lambda: metric(gateway, "headrace_connections_stalled_total", protocol="felix")
            )
            assert gateway.status()["bus"]["subscriptions"] == always
            assert await sender.ask(**publish(request_id=1)) == {"type": "publish_ok", "request_id": 1}

    sets = ("listen.felix.stall_timeout=300ms", "listen.felix.high_water=16KiB", "drop.enabled=false")
    with GatewayProcess(tmp_path, f"quic.engine={engine}", *sets) as gateway:
        asyncio.run(main())
        gateway.event("stream.stalled")


def test_a_connection_on_which_nothing_is_said_is_closed_if_so_wished(engine: str, tmp_path: Path) -> None:
    async def talk(peer: QuicPeer) -> Any:
        await peer.ask(**publish(request_id=1))
        await peer.until(lambda: peer.ended, or_ended=False)
        return peer.ended

    sets = ("listen.felix.idle_timeout=400ms", "quic.keep_alive=100ms")
    with GatewayProcess(tmp_path, f"quic.engine={engine}", *sets) as gateway:
        ended = run(gateway, engine, talk)
        assert (ended.code, ended.reason) == (0, "idle")
        assert metric(gateway, "headrace_connections_idled_total", protocol="felix") == 1


def test_connections_above_the_limit_are_refused(engine: str, tmp_path: Path) -> None:
    async def talk(peer: QuicPeer) -> None:
        second = QuicPeer(gateway.places["felix"], engine)
        second.connection.connect(second.place, second.loop.time())
        second.transmit()
        await asyncio.to_thread(
            gateway.until, lambda: metric(gateway, "headrace_connections_refused_total", protocol="felix")
        )
        assert not second.connected
        await second.__aexit__()

    with GatewayProcess(tmp_path, f"quic.engine={engine}", "listen.felix.max_connections=1") as gateway:
        run(gateway, engine, talk)


def open_connections(gateway: GatewayProcess) -> float:
    return metric(gateway, "headrace_connections", protocol="felix")


def test_datagrams_that_only_look_like_a_beginning_hold_no_connections(engine: str, tmp_path: Path) -> None:
    noise = random.Random(11)

    def initial() -> bytes:
        ids = bytes([8]) + noise.randbytes(8) + bytes([8]) + noise.randbytes(8)
        return b"\xc3\0\0\0\1" + ids + b"\0" + (0x4000 | 1190).to_bytes(2, "big") + noise.randbytes(1190)

    sets = ("quic.idle_timeout=1h", "quic.handshake_timeout=1h", "listen.felix.max_connections=100")
    with GatewayProcess(tmp_path, f"quic.engine={engine}", *sets) as gateway:
        host, _, port = gateway.places["felix"].rpartition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for _ in range(20):
                sock.sendto(initial(), (host, int(port)))
            gateway.until(
                lambda: metric(gateway, "headrace_connections_closed_total", protocol="felix") == 20
            )
        assert open_connections(gateway) == 0
        assert not gateway.named("quic.failed")


def test_handshakes_that_nobody_ends_leave_room_for_others_and_end(engine: str, tmp_path: Path) -> None:
    async def main() -> None:
        at = gateway.places["felix"]
        silent = [QuicPeer(at, engine) for _ in range(20)]
        for peer in silent:
            peer.deaf = True
            peer.connection.connect(peer.place, peer.loop.time())
            peer.endpoint.send(peer.connection.datagrams_to_send(peer.loop.time()))
        await asyncio.to_thread(gateway.until, lambda: open_connections(gateway) == 2)
        async with QuicPeer(at, engine) as first, QuicPeer(at, engine) as second:
            for peer in (first, second):
                assert await peer.ask(**publish(request_id=1)) == {"type": "publish_ok", "request_id": 1}
                assert peer.connection._retry_count == 1  # asked to show that its address is its own
            await asyncio.to_thread(gateway.until, lambda: open_connections(gateway) == 2)
            third = QuicPeer(at, engine)
            async with third:
                assert third.connection._retry_count == 0
        for peer in silent:
            peer.endpoint.close()

    sets = (f"quic.engine={engine}", "quic.handshake_timeout=2s", "listen.felix.max_connections=8")
    with GatewayProcess(tmp_path, *sets) as gateway:
        asyncio.run(main())
        assert metric(gateway, "headrace_connections_idled_total", protocol="felix") == 2


class Stubborn(QuicPeer):
    """Shows that its address is its own, and then goes no further."""

    def _on_datagrams(self, batch: Batch) -> None:
        if not self.connection._retry_count:
            super()._on_datagrams(batch)


def test_an_address_that_begins_many_handshakes_keeps_others_out_no_more(engine: str, tmp_path: Path) -> None:
    async def main() -> None:
        at = gateway.places["felix"]
        stubborn = [Stubborn(at, engine) for _ in range(40)]
        for peer in stubborn:
            peer.connection.connect(peer.place, peer.loop.time())
            peer.transmit()
        while not all(peer.connection._retry_count for peer in stubborn):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(
            gateway.until, lambda: metric(gateway, "headrace_connections_refused_total", protocol="felix")
        )
        assert open_connections(gateway) == 16  # a quarter
        async with QuicPeer(at, engine, host="127.0.0.2") as other:
            assert await other.ask(**publish(request_id=1)) == {"type": "publish_ok", "request_id": 1}
            assert open_connections(gateway) == 17
        more = [Stubborn(at, engine, host="127.0.0.3") for _ in range(10)]
        for peer in more:
            peer.connection.connect(peer.place, peer.loop.time())
            peer.transmit()
        while not all(peer.connection._retry_count for peer in more):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(gateway.until, lambda: open_connections(gateway) == 20)  # its share
        for peer in (*stubborn, *more):
            await peer.__aexit__()

    sets = (
        f"quic.engine={engine}",
        "quic.retry=true",
        "quic.handshake_timeout=1h",
        "listen.felix.max_connections=64",
    )
    with GatewayProcess(tmp_path, *sets) as gateway:
        asyncio.run(main())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::1", True),
    ],
)
def test_a_network_of_ipv6_is_one_source(one: str, other: str, same: bool) -> None:
    assert (source_of((one, 1)) == source_of((other, 2))) is same


def test_larger_datagrams_are_sent_where_both_sides_take_them(tmp_path: Path) -> None:
    async def talk(peer: QuicPeer) -> int:
        await peer.ask(**subscribe(subscription_id=1))
        peer.send(peer.open(), wire.encode_publish_batch("t", "n", "s", [bytes(10_000)] * 5))
        await peer.until(lambda: len(peer.events(UNI)) == 5)
        return peer.largest

    with GatewayProcess(tmp_path, "quic.max_datagram_bytes=8000") as gateway:
        assert run(gateway, "aioquic", talk, settings=Settings(max_datagram_bytes=8000)) == 8000
        # The other engine's clients take no more than an Ethernet frame holds, and say so.
        assert 1200 <= run(gateway, "qh3", talk) <= 1472


def test_rights_registry_and_rules_follow_a_reload(engine: str, tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    local = '[[listen.felix.peers]]\nname = "here"\nnetworks = ["127.0.0.0/8"]\nsubscribe = ["#"]\n'
    config.write_text(local + 'publish = ["t.#"]\n')

    async def talk(peer: QuicPeer) -> None:
        control = peer.open()
        peer.say(control, **subscribe(), request_id="s")
        peer.say(control, **publish(ack="per_message"))
        peer.say(control, **{**publish(ack="per_message"), "tenant_id": "u"})
        first, second, third = await peer.answers(control, 3)
        assert (first["type"], second, third["type"]) == ("ok", OK, "error")
        assert third["message"].startswith("unauthorized: 'here' may not publish")
        config.write_text(f'[listen.felix]\nstrict = true\nstreams = ["t/n/other"]\n{local}publish = ["#"]\n')
        await asyncio.to_thread(reload, gateway)
        peer.say(control, **{**publish(ack="per_message"), "stream": "other"})
        peer.say(control, **publish(ack="per_message"))
        *_, fourth, fifth = await peer.answers(control, 5)
        assert fourth == OK
        assert fifth["message"].startswith("stream not found")
        await peer.until(lambda: UNI in peer.finished)  # its stream is no more
        config.write_text('[[listen.felix.peers]]\nname = "x"\nnetworks = ["10.0.0.0/8"]\npublish = ["#"]\n')
        await asyncio.to_thread(reload, gateway)
        assert (await peer.ask(**publish(request_id=1)))["message"].startswith(
            "unauthorized: a peer at 127.0.0.1"
        )

    with GatewayProcess(tmp_path / "data", f"quic.engine={engine}", config=config) as gateway:
        run(gateway, engine, talk)


TRUSTED = '[[listen.felix.peers]]\nname = "trusted"\nnetworks = ["127.0.0.9/32"]\npublish = ["#"]\nsubscribe = ["#"]\n'


def sender_at(host: str) -> socket.socket:
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.bind((host, 0))
    return sender


def test_a_handshake_that_ends_elsewhere_has_no_rights_there(engine: str, tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(TRUSTED)

    async def main() -> None:
        peer = QuicPeer(gateway.places["felix"], engine)
        with sender_at("127.0.0.9") as elsewhere:

            def move(datagrams: list[tuple[bytes, Any]]) -> int:
                for data, place in datagrams:
                    elsewhere.sendto(data, place)
                return 0

            peer.connection.connect(peer.place, peer.loop.time())
            peer.transmit()
            # All behind the first flight comes from an address that is not the peer's own: it hears nothing there.
            peer.endpoint.send = move  # type: ignore[assignment,method-assign]
            await peer.until(lambda: peer.connected)
            peer.say(peer.open(), **publish(request_id=1))
            await asyncio.sleep(0.5)
            peer.say(peer.open(), **publish(request_id=2))
            await asyncio.sleep(0.5)
            await peer.__aexit__()
        assert counted(gateway, "publishes") == counted(gateway, "unauthorized")

    with GatewayProcess(tmp_path / "data", f"quic.engine={engine}", config=config) as gateway:
        asyncio.run(main())


def test_datagrams_that_others_make_up_take_no_rights_away(engine: str, tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(TRUSTED.replace("127.0.0.9", "127.0.0.1"))

    async def talk(peer: QuicPeer) -> None:
        control = peer.open()
        peer.say(control, **subscribe(), request_id="s")
        assert (await peer.answers(control, 1))[0]["type"] == "ok"
        await peer.until(lambda: UNI in peer.heard)
        ids: list[bytes] = []
        peer.endpoint.send = lambda datagrams: ids.extend(data[1:9] for data, _ in datagrams) or 0  # type: ignore
        peer.connection.send_ping(1)
        peer.transmit()
        del peer.endpoint.send
        with sender_at("127.0.0.9") as other:
            for _ in range(8):  # for two looks at who has which rights
                other.sendto(b"\x40" + ids[0] + bytes(40), peer.place)
                await asyncio.sleep(0.1)
        assert UNI not in peer.finished
        peer.say(control, **publish(ack="per_message"))
        assert (await peer.answers(control, 2))[1] == OK
        assert UNI not in peer.finished
        assert counted(gateway, "unauthorized") == 0

    with GatewayProcess(tmp_path / "data", f"quic.engine={engine}", config=config) as gateway:
        run(gateway, engine, talk)


def reload(gateway: GatewayProcess) -> None:
    before = len(gateway.named("config.reloaded"))
    gateway.signal(signal.SIGHUP)
    gateway.until(lambda: len(gateway.named("config.reloaded")) > before)


def test_what_is_owed_is_sent_before_the_gateway_ends(engine: str, tmp_path: Path) -> None:
    async def talk(peer: QuicPeer) -> None:
        await peer.ask(**subscribe(subscription_id=1))
        number = peer.open()
        peer.send(number, wire.encode_publish_batch("t", "n", "s", [bytes(1000)] * 20))
        peer.say(number, **publish(b"last", request_id=1))
        await peer.until(lambda: peer.events(UNI)[-1:] == [b"last"])
        gateway.signal(signal.SIGTERM)
        await peer.until(lambda: peer.ended, or_ended=False)
        assert peer.ended is not None
        assert (peer.ended.code, peer.ended.reason) == (0, "the gateway stops")
        assert UNI not in peer.finished  # its subscription has not ended
        assert peer.frames(number) == [{"type": "publish_ok", "request_id": 1}]

    with GatewayProcess(tmp_path, f"quic.engine={engine}") as gateway:
        run(gateway, engine, talk)
        assert gateway.ended() == 0
        assert not gateway.named("drain.cut_short")


def test_what_was_confirmed_survives_a_kill(engine: str, tmp_path: Path) -> None:
    confirmed: list[int] = []

    async def talk(peer: QuicPeer) -> None:
        number = peer.open()
        for i in range(200):
            peer.say(number, **publish(b"%d" % i, request_id=i))
        await peer.answers(number, 100)
        gateway.signal(signal.SIGKILL)
        await asyncio.to_thread(gateway.ended)
        confirmed.extend(one["request_id"] for one in peer.frames(number))

    with GatewayProcess(tmp_path, f"quic.engine={engine}", "drop.enabled=false") as gateway:
        run(gateway, engine, talk)
    with GatewayProcess(tmp_path, f"quic.engine={engine}", "drop.enabled=false") as gateway:
        there = gateway.status()["log"]["stats"]["appended_offset"]
    assert confirmed == list(range(len(confirmed)))
    assert 100 <= len(confirmed) <= there


def test_a_port_in_use_and_a_bad_certificate_are_one_sentence(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "one") as gateway:
        taken = gateway.places["felix"]
        other = GatewayProcess(tmp_path / "two", f"listen.felix.bind={taken}")
        assert other.ended() == 1
        assert any(
            f"listen.felix.bind: cannot listen on {taken}: it is in use" in line for line in other.errors
        )
        other.kill()
    pem = tmp_path / "bad.pem"
    pem.write_text("nothing")
    files = (f"listen.felix.tls_cert={pem}", f"listen.felix.tls_key={pem}")
    broken = GatewayProcess(tmp_path / "three", *files)
    assert broken.ended() == 1
    assert any(f"the certificate {pem} with the key {pem} cannot be used" in line for line in broken.errors)
    broken.kill()


def test_a_full_log_holds_publishers_back_and_then_refuses(engine: str, tmp_path: Path) -> None:
    sets = ("drop.run=false", "log.block_timeout=300ms")

    async def talk(peer: QuicPeer) -> None:
        number, other = peer.open(), peer.open()
        batch = wire.encode_publish_batch("t", "n", "s", [bytes(10_000)] * 10)
        for _ in range(30):
            peer.send(number, batch)
        peer.say(number, **publish_batch([bytes(10_000)] * 10, request_id=1))
        await peer.until(lambda: any("request_id" in one for one in peer.frames(number)))
        *batches, answer = peer.frames(number)
        assert all(one["type"] == "error" for one in batches)
        assert answer["type"] == "publish_error"
        assert answer["message"].startswith("publish failed: ")
        peer.say(other, type="cache_get", key="k", request_id="others go on")
        assert (await peer.answers(other, 1))[0]["request_id"] == "others go on"

    with GatewayProcess(tmp_path, f"quic.engine={engine}", *sets) as gateway:
        run(gateway, engine, talk)
        assert counted(gateway, "dropped_full") > 0
        assert counted(gateway, "refused_full") == 1


# --- certificates of clients ------------------------------------------------------------------------------------


class Authority:
    """Signs certificates."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        self.path = self.write("authority", self.sign(self.name, self.key.public_key(), ca=True))

    def sign(self, name: x509.Name, key: ec.EllipticCurvePublicKey, ca: bool = False) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self.name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)
        )
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def write(self, name: str, content: bytes) -> Path:
        path = self.directory / f"{name}.pem"
        path.write_bytes(content)
        return path

    def issue(self, common: str) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return self.write(common, self.sign(name, key.public_key())), self.write(f"{common}-key", private)


def test_a_configured_certificate_is_shown_and_those_of_clients_give_rights(tmp_path: Path) -> None:
    from headrace.quic.engine import Identity

    authority, stranger = Authority(tmp_path), Authority(tmp_path_of(tmp_path / "stranger"))
    certificate, key = authority.issue("server")
    config = tmp_path / "headrace.toml"
    config.write_text(
        f'[listen.felix]\ntls_cert = "{certificate}"\ntls_key = "{key}"\ntls_client_ca = "{authority.path}"\n'
        '[[listen.felix.peers]]\nname = "robots"\ncertificates = ["robot"]\npublish = ["t.#"]\nsubscribe = ["#"]\n'
        '[[listen.felix.peers]]\nname = "others"\nsubscribe = ["#"]\n'
    )

    async def talk(peer: QuicPeer) -> Any:
        return await peer.ask(**publish(request_id=1))

    with GatewayProcess(tmp_path / "data", config=config) as gateway:
        shown = {"authorities": authority.path, "verify": True}
        robot, other = Identity(*authority.issue("robot")), Identity(*authority.issue("other"))
        assert run(gateway, "aioquic", talk, identity=robot, **shown) == {
            "type": "publish_ok",
            "request_id": 1,
        }
        refused = run(gateway, "aioquic", talk, identity=other, **shown)
        assert refused["message"].startswith("unauthorized: 'others' may not publish")
        for identity in (None, Identity(*stranger.issue("robot"))):
            with pytest.raises(Ended):
                run(gateway, "aioquic", talk, identity=identity, **shown)


def tmp_path_of(path: Path) -> Path:
    path.mkdir()
    return path


def test_qh3_says_that_it_cannot_ask_clients_for_certificates(tmp_path: Path) -> None:
    pem = tmp_path / "ca.pem"
    pem.touch()
    gateway = GatewayProcess(tmp_path / "data", "quic.engine=qh3", f"listen.felix.tls_client_ca={pem}")
    assert gateway.ended() != 0
    assert any("qh3 cannot ask clients for certificates: use aioquic" in line for line in gateway.errors)
    gateway.kill()
