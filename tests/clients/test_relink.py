"""The Relink connector against real sessions over real sockets, directly and through a proxy that cuts them."""

import asyncio
import ssl
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TypeVar

import pytest

from headrace.clients.relink import (
    Channel,
    ClientClosed,
    ConnectionFailed,
    ConnectionLost,
    LinkLost,
    OperationTimeout,
    RelinkConnector,
    Uncommitted,
)
from headrace.sessions.relink import Endpoint
from headrace.wire import relink as wire
from tests.clients.relink_servers import Proxy, RelinkBroker, Trouble
from tests.streams import make_certificates, on_both_loops, run, until

T = TypeVar("T")


def tx(address: str, **options: float) -> RelinkConnector:
    return RelinkConnector(
        address,
        endpoint="demo-tx",
        connector_transactions=True,
        listener_transactions=True,
        reconnect_delay=0.001,
        max_reconnect_delay=0.01,
        **options,  # type: ignore[arg-type]
    )


async def fail_inside(channel: Channel) -> None:
    async with channel.transaction():
        await channel.send(b"never")
        raise ZeroDivisionError


@on_both_loops
def test_messages_go_both_ways_with_their_parts(tmp_path: Path, loop: str) -> None:
    async def main() -> None:
        async with RelinkBroker(tmp_path, sync="always") as broker:
            async with RelinkConnector(broker.address, endpoint="demo") as link:
                assert link.link
                assert link.epoch == broker.sessions.epoch
                channel = link.channel(7)
                assert await channel.send(b"one") == 0
                assert await channel.send(b"t", b"", b"wo") == 1
                assert await channel.send() == 2
                await channel.flush()
                assert [(one.topic, one.payload, one.parts) for one in broker.published()] == [
                    (b"demo.in.7", b"one", (3,)),
                    (b"demo.in.7", b"two", (1, 0, 2)),
                    (b"demo.in.7", b"", ()),
                ]
                broker.bus.publish("demo.out.9", b"hello")
                broker.bus.publish("demo.out.8", b"xyz", parts=(1, 2))
                first, second = await link.receive(), await link.receive()
                assert (first.channel, first.payload, first.number) == (9, b"hello", 0)
                assert (second.channel, second.parts, second.payload) == (8, (b"x", b"yz"), b"xyz")
                link.consumed(first)
                link.consumed(second)
                await link.ping()
            await until(lambda: broker.count("links_ended") == 1)
            assert broker.count("violations") == broker.count("bad_packets") == 0

    run(loop, main)


def test_tls_works(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.cert, made.key)

    async def main() -> None:
        async with (
            RelinkBroker(tmp_path, tls=server) as broker,
            RelinkConnector(broker.address, endpoint="demo", tls=made.client()) as link,
        ):
            await link.channel(1).send(b"secret")
            await link.flush()
            assert len(broker.published()) == 1

    run("uvloop", main)


def test_window_makes_the_sender_wait(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            RelinkBroker(tmp_path) as broker,
            RelinkConnector(broker.address, endpoint="demo", window=4) as link,
        ):
            channel = link.channel(1)
            for i in range(50):
                await channel.send(b"%d" % i)
            await channel.flush()
            assert [one.payload for one in broker.published()] == [b"%d" % i for i in range(50)]

    run("asyncio", main)


def test_iterating_consumes_one_by_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            RelinkBroker(tmp_path, window=2) as broker,
            RelinkConnector(broker.address, endpoint="demo") as link,
        ):
            for i in range(20):
                broker.bus.publish("demo.out.1", b"%d" % i)
            got = []
            async for message in link:
                got.append(message.payload)
                if len(got) == 20:
                    break
            assert got == [b"%d" % i for i in range(20)]

    run("asyncio", main)


def test_channel_can_be_closed_and_opened_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            RelinkBroker(tmp_path, sync="always") as broker,
            RelinkConnector(broker.address, endpoint="demo") as link,
        ):
            channel = link.channel(1)
            for _ in range(3):
                assert await channel.send(b"a") == 0
                assert await channel.send(b"b") == 1
                await channel.close()
            assert [one.correlation for one in broker.published()] == [0, 1] * 3

    run("asyncio", main)


# --- transactions -------------------------------------------------------------------------------------------


def test_transaction_is_all_or_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with RelinkBroker(tmp_path, sync="always") as broker, tx(broker.address) as link:
            channel = link.channel(1)
            async with channel.transaction():
                await channel.send(b"a")
                await channel.send(b"b")
                await asyncio.sleep(0.05)
                assert broker.published() == []
            assert [one.payload for one in broker.published()] == [b"a", b"b"]
            with pytest.raises(ZeroDivisionError):
                await fail_inside(channel)
            async with channel.transaction():
                await channel.send(b"d")
            async with channel.transaction():
                pass
            assert [one.payload for one in broker.published()] == [b"a", b"b", b"d"]
            assert broker.count("rollbacks") == 1

    run("asyncio", main)


def test_refused_transaction_raises_and_the_next_one_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with RelinkBroker(tmp_path, max_uncommitted=1000) as broker, tx(broker.address) as link:
            channel = link.channel(1)
            with pytest.raises(Uncommitted):
                async with channel.transaction():
                    await channel.send(bytes(2000))
            async with channel.transaction():
                await channel.send(b"x")
            assert [one.payload for one in broker.published()] == [b"x"]

    run("asyncio", main)


def test_deliveries_are_committed_when_consumed_and_dead_when_rejected(tmp_path: Path) -> None:
    async def main() -> None:
        async with RelinkBroker(tmp_path) as broker, tx(broker.address) as link:
            broker.bus.publish("demo-tx.out.1", b"good")
            link.consumed(await link.receive())
            broker.bus.publish("demo-tx.out.1", b"bad")
            link.rejected(await link.receive())
            await until(lambda: broker.count("dead") == 1)
            assert [one.payload for one in broker.published("dead.#")] == [b"bad"]
            broker.bus.publish("demo-tx.out.1", b"good again")
            link.consumed(await link.receive())

    run("asyncio", main)


def test_outcomes_of_transactions_that_a_reconnection_came_between_are_told_one_by_one(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with RelinkBroker(tmp_path) as broker, tx(broker.address) as link:
            got = []
            for payload in (b"good", b"bad"):
                broker.bus.publish("demo-tx.out.1", payload)
                got.append(await link.receive())
            await broker.cut()
            await until(lambda: not link.connected)
            link.consumed(got[0])  # which the listener is not told
            while not link.connected:
                await asyncio.sleep(0)
            link.rejected(got[1])  # before the listener can have asked how either of them ended
            await until(lambda: broker.count("dead") > 0)
            broker.bus.publish("demo-tx.out.1", b"next")
            link.consumed(await link.receive())
            await link.ping()
            assert [one.payload for one in broker.published("dead.#")] == [b"bad"]
            assert (broker.count("violations"), link.reconnects) == (0, 1)

    run("asyncio", main)


def test_endpoint_without_transactions_has_none(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            RelinkBroker(tmp_path) as broker,
            RelinkConnector(broker.address, endpoint="demo") as link,
        ):
            with pytest.raises(ValueError, match="has no transactions"):
                async with link.channel(1).transaction():
                    pass

    run("asyncio", main)


# --- what goes wrong ----------------------------------------------------------------------------------------


def test_listener_that_disagrees_or_is_not_there_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with RelinkBroker(tmp_path) as broker:
            for options in ({"endpoint": "other"}, {"endpoint": "demo", "connector_id_bytes": 2}):
                with pytest.raises(ConnectionFailed, match="during the handshake"):
                    await RelinkConnector(broker.address, **options).connect()  # type: ignore[arg-type]
            address = broker.address
        with pytest.raises(ConnectionFailed, match="connection refused"):
            await RelinkConnector(address, endpoint="demo").connect()

    run("asyncio", main)


def test_waiting_ends_with_the_timeout_or_with_the_connector(tmp_path: Path) -> None:
    async def main() -> None:
        async with RelinkBroker(tmp_path) as broker:
            link = RelinkConnector(broker.address, endpoint="demo", timeout=0.2, reconnect_delay=5)
            await link.connect()
            await broker.cut()
            await until(lambda: not link.connected)
            with pytest.raises(OperationTimeout, match="was closed by the server"):
                await link.channel(1).send(b"x")
            reading = asyncio.create_task(link.receive())
            await asyncio.sleep(0)
            await link.abandon()
            with pytest.raises(ClientClosed):
                await reading

    run("asyncio", main)


def test_link_that_the_listener_forgot_is_lost_and_a_new_one_begins(tmp_path: Path) -> None:
    async def main() -> None:
        broker = RelinkBroker(tmp_path, grace=0)
        await broker.start()
        link = RelinkConnector(broker.address, endpoint="demo", reconnect_delay=0.2)
        await link.connect()
        before = link.link
        channel = link.channel(1)
        await channel.send(b"a")
        await channel.flush()
        await broker.cut()
        await channel.send(b"lost with the link")
        await until(lambda: not link.connected)
        waiting = asyncio.create_task(link.channel(1).send(b"b"))
        await asyncio.sleep(0)
        await until(lambda: link.connected and link.link != before)
        assert link.links_lost == 1
        assert await waiting == 0
        with pytest.raises(LinkLost):
            await link.flush()
        await link.flush()
        assert [(one.payload, one.correlation) for one in broker.published()] == [(b"a", 0), (b"b", 0)]
        await link.close()
        await broker.stop()

    run("asyncio", main)


def test_waiters_of_a_lost_link_are_told() -> None:
    async def main() -> None:
        from headrace.clients.relink_link import Link

        link = Link(
            sizes=(4, 4),
            transactions=(True, False),
            put=lambda data: None,
            deliver=lambda message: None,
            progress=lambda: None,
        )
        link.connected(1, 1)
        sending = link.sending(5)
        link.send(sending, [b"x"])
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        link.wish(sending, True, done)
        link.disconnected()
        assert not link.connected(1, 2)
        with pytest.raises(LinkLost):
            await done

    run("asyncio", main)


# --- through troubles ---------------------------------------------------------------------------------------


def at_every_item(items: int, pieces: int = 1 << 16) -> Callable[[int], Trouble]:
    """Connection after connection is cut at the next place: behind and in the middle of each item of each side,
    beginning with the handshake. When all places were had, connections are left in peace."""
    places = [
        Trouble(side, item, middle, pieces)
        for item in range(items)
        for side in ("connector", "listener")
        for middle in (False, True)
    ]
    return lambda n: [Trouble(item=9), *places, Trouble(pieces=pieces)][min(n, len(places) + 1)]


async def both_ways(broker: RelinkBroker, link: RelinkConnector, over: Callable[[], bool]) -> None:
    """Sends on three channels and publishes to three until it is over; then counts every message, exactly once and in
    order, at both ends."""
    endpoint = link.endpoint
    stop = asyncio.Event()
    got: dict[int, list[bytes]] = {1: [], 2: [], 3: []}

    async def send() -> int:
        for i in count():
            channel = link.channel(1 + i % 3)
            parts = (b"%d" % i, b"-" * (i % 11), b"")
            if link.transactional:
                async with channel.transaction():
                    await channel.send(*parts)
                    await channel.send(b"%d+" % i)
            else:
                await channel.send(*parts)
            broker.bus.publish(f"{endpoint}.out.{1 + i % 3}", b"%d" % i, confirmed=True)
            if i % 4 == 3:
                await asyncio.sleep(0)
            if over() and i > 50:
                return i + 1
        raise AssertionError

    async def receive() -> None:
        while not stop.is_set():
            message = await link.receive()
            got[message.channel].append(message.payload)
            link.consumed(message)

    receiving = asyncio.create_task(receive())
    sent = await send()
    await link.flush()
    await until(lambda: sum(map(len, got.values())) >= sent)
    await asyncio.sleep(0.02)
    receiving.cancel()
    await asyncio.wait([receiving])
    for channel in (1, 2, 3):
        numbers = [i for i in range(sent) if 1 + i % 3 == channel]
        assert got[channel] == [b"%d" % i for i in numbers]
        payloads = [one.payload for one in broker.published(f"{endpoint}.in.{channel}")]
        if link.transactional:
            assert payloads == [text for i in numbers for text in (b"%d" % i + b"-" * (i % 11), b"%d+" % i)]
        else:
            assert payloads == [b"%d" % i + b"-" * (i % 11) for i in numbers]
    assert broker.count("violations") == broker.count("bad_packets") == 0


@pytest.mark.parametrize("endpoint", ["demo", "demo-tx"])
@pytest.mark.parametrize("sync", ["always", "none"])
def test_every_message_arrives_once_through_cuts_at_every_packet(
    tmp_path: Path, endpoint: str, sync: str
) -> None:
    async def main() -> None:
        trouble = at_every_item(items=26 if endpoint == "demo" else 14)
        async with RelinkBroker(tmp_path, sync=sync) as broker, Proxy(broker.address, trouble) as proxy:
            transactions = endpoint == "demo-tx"
            async with RelinkConnector(
                proxy.address,
                endpoint=endpoint,
                connector_transactions=transactions,
                listener_transactions=transactions,
                reconnect_delay=0.0005,
                max_reconnect_delay=0.002,
            ) as link:
                places = 104 if endpoint == "demo" else 56
                await both_ways(broker, link, lambda: proxy.connections > places + 1)
                assert proxy.cuts == places + 1
                assert link.links_lost == 0

    run("uvloop", main)


def test_every_message_arrives_once_in_stalled_pieces_and_storms(tmp_path: Path) -> None:
    async def main() -> None:
        def trouble(n: int) -> Trouble:
            if n == 0:
                return Trouble(item=9)
            if n > 40:
                return Trouble(pieces=7 + n % 13)
            side = "connector" if n % 2 else "listener"
            return Trouble(side, 2 + (n * 7) % 23, n % 3 == 0, pieces=1 + n % 9, stall=0.0005 * (n % 3))

        async with (
            RelinkBroker(tmp_path, sync="always") as broker,
            Proxy(broker.address, trouble) as proxy,
            RelinkConnector(
                proxy.address, endpoint="demo", reconnect_delay=0.0005, max_reconnect_delay=0.002
            ) as link,
        ):
            await both_ways(broker, link, lambda: proxy.connections > 40)
            assert link.links_lost == 0

    run("asyncio", main)


def test_every_message_arrives_once_while_the_listener_restarts(tmp_path: Path) -> None:
    async def main() -> None:
        broker = RelinkBroker(tmp_path, sync="always")
        await broker.start()
        link = RelinkConnector(
            broker.address, endpoint="demo", reconnect_delay=0.0005, max_reconnect_delay=0.002
        )
        await link.connect()
        restarts = 0
        sent = 0
        got: list[bytes] = []

        async def receive() -> None:
            while True:
                message = await link.receive()
                got.append(message.payload)
                link.consumed(message)

        receiving = asyncio.create_task(receive())
        while restarts < 8:
            for _ in range(25):
                await link.channel(1).send(b"%d" % sent)
                broker.bus.publish("demo.out.1", b"%d" % sent, confirmed=True)
                sent += 1
                if sent % 5 == 0:
                    await asyncio.sleep(0)
            await broker.stop()
            await broker.start()
            restarts += 1
        await link.flush()
        await until(lambda: len(got) >= sent)
        receiving.cancel()
        await asyncio.wait([receiving])
        assert got == [b"%d" % i for i in range(sent)]
        assert [one.payload for one in broker.published("demo.in.1")] == got
        assert link.links_lost == 0
        await link.close()
        await broker.stop()

    run("uvloop", main)


def test_other_sizes_of_ids_work(tmp_path: Path) -> None:
    async def main() -> None:
        for connector, listener in ((0, 8), (1, 7), (6, 3), (8, 0)):
            endpoint = Endpoint("e", connector_size=connector, listener_size=listener)
            async with (
                RelinkBroker(tmp_path / f"{connector}", endpoints=[endpoint]) as broker,
                RelinkConnector(
                    broker.address, endpoint="e", connector_id_bytes=connector, listener_id_bytes=listener
                ) as link,
            ):
                top, listener_top = 2 ** (8 * connector) - 1, 2 ** (8 * listener) - 1
                await link.channel(top).send(b"x")
                await link.flush()
                assert [one.topic for one in broker.published()] == [b"e.in.%d" % top]
                broker.bus.publish(f"e.out.{listener_top}", b"y")
                message = await link.receive()
                assert message.channel == listener_top
                link.consumed(message)

    run("asyncio", main)


class ForgetfulListener:
    """A listener that knows no link: each connection gets a new one and, in the same bytes, messages."""

    def __init__(self, *messages: list[bytes]) -> None:
        self._messages = list(messages)
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "ForgetfulListener":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        await reader.readexactly(8)
        writer.write(wire.encode_version())
        await reader.readexactly(len(wire.encode_hello("demo", 4, 4)))
        number = len(self._writers)
        told = [wire.encode_message(1, 4, [body]) for body in self._messages[number - 1]]
        writer.write(wire.encode_answer(7, number) + b"".join(told))


def test_messages_that_come_with_a_new_links_id_are_not_taken_for_the_old_ones(tmp_path: Path) -> None:
    async def main() -> None:
        async with ForgetfulListener([b"old", b"older"], [b"new", b"newer"]) as listener:
            link = RelinkConnector(listener.address, endpoint="demo", reconnect_delay=0.001)
            await link.connect()
            assert (await link.receive()).payload == b"old"
            listener.cut()
            await until(lambda: link.links_lost == 1)
            assert [(await link.receive()).payload for _ in range(2)] == [b"new", b"newer"]
            await link.abandon()

    run("asyncio", main)


def test_message_of_a_lost_link_is_not_consumed_in_the_place_of_a_new_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with ForgetfulListener([b"old"], [b"new"]) as listener:
            link = RelinkConnector(listener.address, endpoint="demo", reconnect_delay=0.001)
            await link.connect()
            old = await link.receive()
            listener.cut()
            await until(lambda: link.links_lost == 1)
            new = await link.receive()
            assert (old.channel, old.number) == (new.channel, new.number)
            link.consumed(old)
            assert link._link.ins[1].consumed == 0
            link.consumed(new)
            assert link._link.ins[1].consumed == 1
            await link.abandon()

    run("asyncio", main)


def test_ping_that_is_cancelled_or_cut_off_says_which(tmp_path: Path) -> None:
    async def main() -> None:
        async with ForgetfulListener([], []) as listener:  # answers no ping
            link = RelinkConnector(listener.address, endpoint="demo", reconnect_delay=0.001)
            await link.connect()
            with pytest.raises(TimeoutError) as late:
                async with asyncio.timeout(0.01):
                    await link.ping()
            assert not isinstance(late.value, OperationTimeout)
            asked = asyncio.create_task(link.ping())
            await until(lambda: len(link._link.pongs) == 2)
            listener.cut()
            with pytest.raises(ConnectionLost):
                await asked
            await link.abandon()

    run("asyncio", main)


def test_transaction_that_loses_its_link_in_the_middle_is_not_committed_in_part(tmp_path: Path) -> None:
    async def main() -> None:
        async with RelinkBroker(tmp_path, grace=0) as broker:
            link = tx(broker.address)
            await link.connect()
            channel = link.channel(1)

            async def lose_the_link_inside() -> None:
                async with channel.transaction():
                    await channel.send(b"first")
                    await broker.cut()
                    await until(lambda: link.links_lost == 1)
                    await channel.send(b"second")

            with pytest.raises(LinkLost):
                await lose_the_link_inside()
            async with channel.transaction():
                await channel.send(b"third")
            assert [one.payload for one in broker.published("demo-tx.in.1")] == [b"third"]
            await link.abandon()

    run("asyncio", main)
