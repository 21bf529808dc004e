"""The BlipMQ client against real sessions over real sockets, and against a server that misbehaves by
script."""

import asyncio
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Awaitable
from pathlib import Path

import pytest

from headrace.clients import blipmq, blipmq_link
from headrace.clients.blipmq import (
    AuthenticationError,
    BadRequest,
    BlipmqClient,
    BlipmqNack,
    ClientClosed,
    ClientError,
    ConnectionFailed,
    ConnectionLost,
    Message,
    NotAllowed,
    OperationTimeout,
    ProtocolError,
    RefusedMessages,
    ServerError,
    Subscription,
    UnknownDelivery,
    VersionError,
)
from headrace.config import Key
from headrace.errors import HeadraceError
from headrace.wire import blipmq as wire
from tests.clients.blipmq_servers import EVERYTHING, KEY, BlipmqBroker, BlipmqPeer, BlipmqScripted
from tests.streams import make_certificates, on_both_loops, run, steady, until

NARROW = Key(name="narrow", key="narrow-key", publish=["open.#"], subscribe=["open.#"])


def client_of(server: BlipmqBroker | BlipmqScripted, key: str = KEY, **options: object) -> BlipmqClient:
    options = {"reconnect_delay": 0.005, "max_reconnect_delay": 0.02, **options}
    return BlipmqClient(server.address, key=key, **options)  # type: ignore[arg-type]


async def take(messages: Subscription, count: int) -> list[Message]:
    return [await anext(messages) for _ in range(count)]


# --- connecting ---------------------------------------------------------------------------------------------


@on_both_loops
def test_what_is_published_is_delivered(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker, client_of(broker) as client:
            async with client.subscribe("demo", qos=1) as messages:
                await client.publish("demo", b"first", qos=1)
                await client.publish("demo", bytearray(b"second"))
                await client.publish_many("demo", [b"third", memoryview(b"fourth")], qos=1)
                got = await take(messages, 4)
            assert [message.payload for message in got] == [b"first", b"second", b"third", b"fourth"]
            assert {message.topic for message in got} == {"demo"}
            assert [message.qos for message in got] == [1, 0, 1, 1]
            assert [message.tag is None for message in got] == [False, True, False, False]

    run(loop, main)


@on_both_loops
def test_it_connects_over_a_unix_socket(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path, unix=tmp_path / "socket") as broker, client_of(broker) as client:
            assert client.address == f"unix:{tmp_path / 'socket'}"
            assert await client.ping() > 0

    run(loop, main)


@on_both_loops
def test_it_connects_over_tls_and_checks_the_certificate(loop: str, tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.cert, certificates.key)

    async def main() -> None:
        async with BlipmqBroker(tmp_path, tls=context) as broker:
            async with client_of(broker, tls=certificates.client()) as client:
                await client.publish("demo", bytes(300_000), qos=1)
            assert broker.payloads() == [bytes(300_000)]
            with pytest.raises(ConnectionFailed, match="certificate is not trusted"):
                await client_of(broker, tls=ssl.create_default_context()).connect()

    run(loop, main)


def test_tls_over_a_unix_socket_takes_a_name_to_check(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.cert, certificates.key)

    async def main() -> None:
        async with BlipmqBroker(tmp_path, unix=tmp_path / "socket", tls=context) as broker:
            tls = certificates.client()
            async with client_of(broker, tls=tls, server_hostname="127.0.0.1") as client:
                await client.flush()
            with pytest.raises(ConnectionFailed, match="localhost"):
                await client_of(broker, tls=tls).connect()

    run("asyncio", main)


@on_both_loops
def test_nobody_listening_is_said_with_the_address(loop: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

    async def main() -> None:
        with pytest.raises(ConnectionFailed) as failed:
            await BlipmqClient(address, key=KEY).connect()
        assert str(failed.value) == f"cannot connect to {address}: connection refused"
        assert isinstance(failed.value, HeadraceError)
        assert isinstance(failed.value, ConnectionError)

    run(loop, main)


def test_a_name_that_nobody_has_is_a_failed_connection() -> None:
    async def main() -> None:
        with pytest.raises(ConnectionFailed, match=r"cannot connect to nobody\.invalid:5555: \w+"):
            await BlipmqClient("nobody.invalid:5555", key=KEY).connect()

    run("asyncio", main)


@on_both_loops
def test_a_wrong_key_is_an_authentication_error(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker:
            with pytest.raises(AuthenticationError) as refused:
                async with client_of(broker, key="wrong"):
                    pass
            assert (refused.value.code, refused.value.text) == (401, "invalid API key")
            assert str(refused.value) == "invalid API key (401)"
            assert isinstance(refused.value, BlipmqNack)
            await until(lambda: broker.service.connections == 0)

    run(loop, main)


def test_another_version_is_a_version_error() -> None:
    async def newer(peer: BlipmqPeer) -> None:
        hello, auth = await peer.frame(), await peer.frame()
        peer.send(wire.encode_nack(426, "unsupported protocol version", hello.correlation))
        peer.send(wire.encode_nack(400, "HELLO not performed", auth.correlation))

    async def main() -> None:
        async with BlipmqScripted(newer) as server:
            with pytest.raises(VersionError, match="unsupported protocol version"):
                await client_of(server).connect()

    run("asyncio", main)


def test_hello_and_auth_leave_together() -> None:
    async def main() -> None:
        arrived: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def first_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            arrived.set_result(await reader.read(1000))
            writer.close()

        server = await asyncio.start_server(first_read, "127.0.0.1", 0)
        client = BlipmqClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", key="k")
        with pytest.raises(ConnectionLost, match="closed by the server"):
            await client.connect()
        frames = wire.Decoder().feed(arrived.result())
        assert [type(frame) for frame in frames] == [wire.Hello, wire.Auth]
        server.close()

    run("asyncio", main)


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "length 1213486160 is above 16777216"),
        (wire.encode_pong(1), "a PONG came that answers no PING"),
        (wire.encode_ack(0, 1), "an ACK came that answers nothing"),
        (wire.encode_publish("t", b"", 0, 1), "a message came that no poll had asked for"),
        (wire.encode_poll(1, 1), "it sent <Poll"),
    ],
    ids=["another protocol", "pong", "ack", "delivery", "a client's frame"],
)
def test_what_is_not_of_the_protocol_ends_the_connection(answer: bytes, what: str) -> None:
    async def stranger(peer: BlipmqPeer) -> None:
        peer.send(answer)

    async def main() -> None:
        async with BlipmqScripted(stranger) as server:
            with pytest.raises(ProtocolError, match="does not speak BlipMQ as it should") as violated:
                await client_of(server).connect()
            assert what in str(violated.value)

    run("asyncio", main)


@on_both_loops
def test_a_server_that_says_nothing_is_a_timeout(loop: str) -> None:
    async def silent(peer: BlipmqPeer) -> None:
        await peer.until(wire.Ping)

    async def main() -> None:
        async with BlipmqScripted(silent) as server:
            with pytest.raises(OperationTimeout, match=r"did not accept a connection within 0\.05 s") as late:
                await client_of(server, timeout=0.05).connect()
            assert isinstance(late.value, TimeoutError)

    run(loop, main)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"address": "127.0.0.1"}, "the port is missing"),
        ({"address": "fd:blipmq"}, "nothing to connect to"),
        ({"timeout": 0}, "a timeout is more than 0 seconds"),
        ({"reconnect_delay": 2.0, "max_reconnect_delay": 1.0}, "at most max_reconnect_delay"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        BlipmqClient(**{"address": "127.0.0.1:5555", "key": KEY, **arguments})  # type: ignore[arg-type]


def test_topics_and_qos_are_checked_before_anything_is_sent() -> None:
    async def main() -> None:
        client = BlipmqClient("127.0.0.1:5555", key=KEY)
        with pytest.raises(ValueError, match="a topic has at least one character"):
            await client.publish("", b"")
        with pytest.raises(ValueError, match="QoS is 0 or 1, not 2"):
            await client.publish_many("t", [b""], qos=2)
        with pytest.raises(ValueError, match="QoS is 0 or 1"):
            client.subscribe("t", qos=7)
        with pytest.raises(ValueError, match="prefetch is 1 or more"):
            client.subscribe("t", prefetch=0)
        with pytest.raises(ValueError, match="max_wait"):
            client.subscribe("t", max_wait=0)
        with pytest.raises(ValueError, match="a subscription id is 1 or more"):
            client.resume(0, "t")

    run("asyncio", main)


def test_a_client_is_used_between_connect_and_close(tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker:
            client = client_of(broker)
            with pytest.raises(ClientClosed, match="not connected yet"):
                await client.flush()
            await client.connect()
            assert client.connected
            with pytest.raises(RuntimeError, match="was connected before"):
                await client.connect()
            await client.close()
            assert not client.connected
            await client.close()
            for used in (client.publish("t", b""), client.publish("t", b"", qos=1), client.ping()):
                with pytest.raises(ClientClosed, match="was closed"):
                    await used
            with pytest.raises(RuntimeError, match="was connected before"):
                await client.connect()

    run("asyncio", main)


# --- publishing ---------------------------------------------------------------------------------------------


@on_both_loops
def test_a_confirmed_publish_returns_only_after_the_answer(loop: str) -> None:
    async def main() -> None:
        asked: asyncio.Future[wire.Frame] = asyncio.get_running_loop().create_future()
        release = asyncio.Event()

        async def slow_disk(peer: BlipmqPeer) -> None:
            await peer.greet()
            frames = await peer.until(wire.Ping)
            asked.set_result(frames[0])
            await release.wait()
            peer.pong(frames[-1])

        async with BlipmqScripted(slow_disk) as server, client_of(server) as client:
            publishing = asyncio.create_task(client.publish("t", b"m", qos=1))
            message = await asked
            assert isinstance(message, wire.Publish)
            await asyncio.sleep(0.01)
            assert not publishing.done()
            release.set()
            await publishing

    run(loop, main)


@on_both_loops
def test_what_was_confirmed_is_on_the_disk(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path, sync="always") as broker, client_of(broker) as client:
            for number in range(20):
                await client.publish("t", b"%d" % number, qos=1)
                assert broker.log.safe == number + 1

    run(loop, main)


@on_both_loops
def test_publishes_of_one_turn_share_one_write_and_one_fence(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker, client_of(broker) as client:
            reads = broker.service.counters()["reads"]
            await asyncio.gather(*(client.publish("t", b"%d" % n, qos=1) for n in range(1000)))
            assert broker.count("pings") == 1
            assert broker.service.counters()["reads"] - reads == 1
            assert broker.payloads() == [b"%d" % n for n in range(1000)]

    run(loop, main)


@on_both_loops
def test_publish_many_has_one_fence_however_large_it_is(loop: str, tmp_path: Path) -> None:
    payloads = [os.urandom(2000) for _ in range(1500)]  # a dozen writes

    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker, client_of(broker) as client:
            await client.publish_many("t", iter(payloads), qos=1)
            assert broker.count("pings") == 1
            assert broker.payloads() == payloads
            await client.publish_many("t", payloads)
            await client.flush()
            assert broker.payloads() == payloads * 2
            await client.publish_many("t", [], qos=1)
            assert broker.count("pings") == 2

    run(loop, main)


@on_both_loops
def test_thousands_of_publishers_at_once_keep_their_own_order(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker, client_of(broker) as client:

            async def publisher(name: int) -> None:
                for number in range(20):
                    await client.publish("t", b"%d %d" % (name, number), qos=number % 2)

            await asyncio.gather(*(publisher(name) for name in range(500)))
            await client.flush()
            arrived = broker.payloads()
            assert len(arrived) == 10_000
            for name in range(500):
                own = [payload for payload in arrived if payload.startswith(b"%d " % name)]
                assert own == [b"%d %d" % (name, number) for number in range(20)]

    run(loop, main)


@on_both_loops
def test_a_refused_publish_raises_from_that_call_alone(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            BlipmqBroker(tmp_path, keys=[NARROW]) as broker,
            client_of(broker, key="narrow-key") as client,
        ):
            results = await asyncio.gather(
                client.publish("open.a", b"1", qos=1),
                client.publish("closed", b"2", qos=1),
                client.publish("open.b", b"3", qos=1),
                return_exceptions=True,
            )
            assert results[0] is results[2] is None
            refused = results[1]
            assert isinstance(refused, NotAllowed)
            assert not isinstance(refused, AuthenticationError)
            assert refused.code == 401
            assert refused.text == "key 'narrow' may not publish to 'closed'"
            assert refused.correlation >= 1 << 63
            assert broker.payloads() == [b"1", b"3"]

    run(loop, main)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, BadRequest),
        (401, NotAllowed),
        (404, UnknownDelivery),
        (426, VersionError),
        (500, ServerError),
        (503, BlipmqNack),
    ],
)
def test_each_code_has_its_exception(code: int, kind: type[BlipmqNack]) -> None:
    async def refuse(peer: BlipmqPeer) -> None:
        await peer.greet()
        publish, ping = await peer.until(wire.Ping)
        peer.send(wire.encode_nack(code, "no", publish.correlation), wire.encode_pong(ping.correlation))

    async def main() -> None:
        async with BlipmqScripted(refuse) as server, client_of(server) as client:
            with pytest.raises(BlipmqNack) as refused:
                await client.publish("t", b"", qos=1)
            assert type(refused.value) is kind
            assert (refused.value.code, refused.value.text) == (code, "no")

    run("asyncio", main)


def test_refused_messages_of_many_are_named_by_their_place() -> None:
    async def refuse_some(peer: BlipmqPeer) -> None:
        await peer.greet()
        frames = await peer.until(wire.Ping)
        for frame in frames[:-1]:
            assert isinstance(frame, wire.Publish)
            if frame.message in (b"2", b"7"):
                peer.send(wire.encode_nack(500, f"no {frame.message.decode()}", frame.correlation))
        peer.pong(frames[-1])

    async def main() -> None:
        async with BlipmqScripted(refuse_some) as server, client_of(server) as client:
            many = client.publish_many("t", [b"%d" % n for n in range(10)], qos=1)
            one = client.publish("t", b"7", qos=1)
            first, second = await asyncio.gather(many, one, return_exceptions=True)
            assert isinstance(first, RefusedMessages)
            assert {place: nack.text for place, nack in first.refused.items()} == {2: "no 2", 7: "no 7"}
            assert (first.code, first.text) == (500, "no 2")
            assert str(first) == "2 of 10 messages were refused, first: no 2 (500)"
            assert isinstance(second, ServerError)
            assert second.text == "no 7"

    run("asyncio", main)


@on_both_loops
def test_refused_unconfirmed_messages_are_told_to_a_callback_and_by_flush(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        told: list[BlipmqNack] = []
        async with BlipmqBroker(tmp_path, keys=[NARROW]) as broker:
            client = client_of(broker, key="narrow-key", on_refusal=told.append)
            await client.connect()
            await client.publish("closed", b"1")
            await client.publish("shut", b"2")
            await client.publish("open.a", b"3")
            with pytest.raises(NotAllowed, match="'closed'"):
                await client.flush()
            assert [nack.text.split()[-1] for nack in told] == ["'closed'", "'shut'"]
            await client.flush()
            await client.publish("closed", b"4")
            with pytest.raises(NotAllowed, match="'closed'"):
                await client.close()
            assert not client.connected

    run(loop, main)


@on_both_loops
def test_closing_waits_until_everything_was_handled(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker:
            async with client_of(broker) as client:
                for number in range(5000):
                    await client.publish("t", b"%d" % number)
            assert len(broker.payloads()) == 5000

    run(loop, main)


@on_both_loops
def test_closing_waits_for_what_other_tasks_have_sent(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path, sync="always") as broker:
            async with client_of(broker) as client:
                publishing = asyncio.create_task(client.publish("t", b"m", qos=1))
                await asyncio.sleep(0)
            await publishing
            assert broker.payloads() == [b"m"]

    run(loop, main)


def test_an_exception_in_the_block_is_not_replaced_by_one_of_closing(tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path, keys=[NARROW]) as broker:

            async def fails() -> None:
                async with client_of(broker, key="narrow-key") as client:
                    await client.publish("closed", b"")
                    raise LookupError

            with pytest.raises(LookupError):
                await fails()
            await until(lambda: broker.service.connections == 0)

    run("asyncio", main)


@on_both_loops
def test_publishers_wait_for_a_server_that_does_not_read(loop: str) -> None:
    async def main() -> None:
        reads = asyncio.Event()
        arrived: list[wire.Frame] = []

        async def reads_later(peer: BlipmqPeer) -> None:
            await peer.greet()
            await reads.wait()
            arrived.extend(await peer.until(wire.Ping))
            peer.pong(arrived.pop())

        async with BlipmqScripted(reads_later) as server, client_of(server) as client:
            sent = 0

            async def publish() -> None:
                nonlocal sent
                for number in range(4000):
                    await client.publish("t", b"%08d" % number + bytes(10_000))
                    sent += 1

            publishing = asyncio.create_task(publish())
            stuck = await steady(lambda: sent)
            assert 0 < stuck < 4000
            reads.set()
            await publishing
            await client.flush()
            numbers = [int(frame.message[:8]) for frame in arrived if isinstance(frame, wire.Publish)]
            assert numbers == list(range(4000))

    run(loop, main)


@on_both_loops
def test_a_server_that_does_not_read_in_time_is_a_timeout(loop: str) -> None:
    async def never_reads(peer: BlipmqPeer) -> None:
        await peer.greet()
        await asyncio.Event().wait()

    async def main() -> None:
        async def fill(client: BlipmqClient) -> None:
            while True:
                await client.publish("t", bytes(100_000))

        async with BlipmqScripted(never_reads) as server:
            client = client_of(server, timeout=0.1)
            await client.connect()
            with pytest.raises(OperationTimeout, match=r"cannot publish: .* has not read what was sent"):
                await fill(client)
            with pytest.raises(OperationTimeout):
                await client.close()

    run(loop, main)


@on_both_loops
def test_a_server_that_does_not_answer_in_time_is_a_timeout(loop: str) -> None:
    async def never_answers(peer: BlipmqPeer) -> None:
        await peer.greet()
        await peer.until(wire.Pong)

    async def main() -> None:
        for what in ("publish", "publish_many", "flush", "ping", "subscribe"):
            async with BlipmqScripted(never_answers) as server:
                client = client_of(server, timeout=0.05, reconnect=False)
                await client.connect()
                doing: dict[str, Awaitable[object]] = {
                    "publish": client.publish("t", b"", qos=1),
                    "publish_many": client.publish_many("t", [b""], qos=1),
                    "flush": client.flush(),
                    "ping": client.ping(),
                    "subscribe": client.subscribe("t").__aenter__(),
                }
                for other in doing.keys() - {what}:
                    doing[other].close()  # type: ignore[attr-defined]
                with pytest.raises(OperationTimeout, match=r"did not answer within 0\.05 s"):
                    await doing[what]
                await client.close()

    run(loop, main)


def test_the_time_to_answer_counts_from_each_request(tmp_path: Path) -> None:
    async def unhurried(peer: BlipmqPeer) -> None:
        await peer.greet()
        while True:
            frames = await peer.until(wire.Ping)
            await asyncio.sleep(0.02)
            peer.pong(frames[-1])

    async def main() -> None:
        async with (
            BlipmqScripted(unhurried) as server,
            client_of(server, timeout=0.3, reconnect=False) as client,
        ):
            for _ in range(30):  # together they take longer than one may
                await client.publish("t", b"", qos=1)

    run("asyncio", main)


@on_both_loops
def test_an_answer_that_waits_behind_a_blocked_loop_is_in_time(loop: str) -> None:
    async def main() -> None:
        blocked = threading.Event()

        def serve(listening: socket.socket) -> None:
            """Needs a thread, for the loop stands still. Its answer takes more than one read."""
            connected, _ = listening.accept()
            decoder = wire.Decoder()
            with connected:
                while data := connected.recv(65536):
                    for frame in decoder.feed(data):
                        if isinstance(frame, wire.Poll):
                            blocked.wait()
                            connected.sendall(
                                wire.encode_publish("t", bytes(12_000_000), 0, frame.correlation)
                            )
                        elif isinstance(frame, wire.Ping):
                            connected.sendall(wire.encode_pong(frame.correlation))
                        else:
                            connected.sendall(wire.encode_ack(1, frame.correlation))

        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = threading.Thread(target=serve, args=[listening])
            serving.start()
            address = f"127.0.0.1:{listening.getsockname()[1]}"
            async with (
                BlipmqClient(address, key=KEY, timeout=0.3, reconnect=False) as client,
                client.subscribe("t", qos=0) as messages,
            ):
                waiting = asyncio.create_task(anext(messages))
                await asyncio.sleep(0.02)
                blocked.set()
                time.sleep(0.6)
                assert len((await waiting).payload) == 12_000_000
            serving.join()

    run(loop, main)


@on_both_loops
def test_a_cancelled_publish_leaves_the_others_alone(loop: str) -> None:
    async def main() -> None:
        release = asyncio.Event()

        async def waits(peer: BlipmqPeer) -> None:
            await peer.greet()
            frames = await peer.until(wire.Ping)
            await release.wait()
            peer.send(
                wire.encode_nack(500, "no", frames[0].correlation), wire.encode_pong(frames[-1].correlation)
            )

        async with BlipmqScripted(waits) as server, client_of(server) as client:
            tasks = [asyncio.create_task(client.publish("t", b"%d" % n, qos=1)) for n in range(3)]
            await asyncio.sleep(0.01)
            tasks[0].cancel()
            await asyncio.wait(tasks[:1])
            assert tasks[0].cancelled()
            release.set()
            await asyncio.gather(*tasks[1:])

    run(loop, main)


def test_a_publish_cancelled_while_it_waits_for_the_server_to_read_is_not_sent() -> None:
    async def main() -> None:
        reads = asyncio.Event()
        arrived: list[wire.Frame] = []

        async def reads_later(peer: BlipmqPeer) -> None:
            await peer.greet()
            await reads.wait()
            arrived.extend(await peer.until(wire.Ping))
            peer.pong(arrived[-1])

        async with BlipmqScripted(reads_later) as server, client_of(server) as client:
            publishing: asyncio.Task[None] | None = None
            while publishing is None:
                publishing = asyncio.create_task(client.publish("t", bytes(1_000_000)))
                done, _ = await asyncio.wait([publishing], timeout=0.05)
                if done:
                    publishing = None
            late = asyncio.create_task(client.publish("t", b"late", qos=1))
            await asyncio.sleep(0)
            for task in (publishing, late):
                task.cancel()
            await asyncio.wait([publishing, late])
            reads.set()
            await client.publish("t", b"last")
            await client.flush()
            messages = [frame.message for frame in arrived if isinstance(frame, wire.Publish)]
            assert messages[-1] == b"last"
            assert b"late" not in messages

    run("asyncio", main)


# --- subscribing --------------------------------------------------------------------------------------------


@on_both_loops
def test_messages_come_in_order_and_each_once(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            BlipmqBroker(tmp_path) as broker,
            client_of(broker) as client,
            client_of(broker) as publisher,
        ):
            async with client.subscribe("t", qos=1) as messages:
                publishing = asyncio.create_task(
                    publisher.publish_many("t", [b"%d" % n for n in range(5000)], qos=1)
                )
                for number in range(5000):
                    message = await anext(messages)
                    assert message.payload == b"%d" % number
                    messages.ack_nowait(message)
                await publishing
                await client.flush()
            assert broker.count("acks") == 5000
            [subscription] = broker.bus.subscriptions.values()
            assert subscription.inflight == 0

    run(loop, main)


@on_both_loops
def test_two_subscriptions_of_one_topic_each_get_everything(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            BlipmqBroker(tmp_path) as broker,
            client_of(broker) as client,
            client.subscribe("t", qos=1) as first,
            client.subscribe("t", qos=0) as second,
            client.subscribe("other", qos=1) as third,
        ):
            assert len({first.id, second.id, third.id}) == 3
            await client.publish_many("t", [b"%d" % n for n in range(300)], qos=1)
            await client.publish("other", b"else", qos=1)
            got = await asyncio.gather(take(first, 300), take(second, 300), take(third, 1))
            for messages, qos in zip(got[:2], (1, 0), strict=True):
                assert [message.payload for message in messages] == [b"%d" % n for n in range(300)]
                assert {message.qos for message in messages} == {qos}
            assert got[2][0].payload == b"else"
            # Tags of both are the same, so these need fences of their own.
            await asyncio.gather(*(first.ack(message) for message in got[0]), third.ack(got[2][0]))

    run(loop, main)


def test_acknowledging_one_delivery_for_two_subscriptions_in_one_turn_is_kept_apart() -> None:
    async def main() -> None:
        fences: list[list[wire.Frame]] = []

        async def refuses_the_second(peer: BlipmqPeer) -> None:
            await peer.greet()
            for subscription in (1, 2):
                peer.send(wire.encode_ack(subscription, (await peer.frame()).correlation))
            while len(fences) < 2:
                frames = await peer.until(wire.Ping)
                fences.append([frame for frame in frames if isinstance(frame, wire.Ack)])
                if len(fences) == 2:
                    peer.send(wire.encode_nack(404, "unknown subscription or delivery tag", 9))
                peer.pong(frames[-1])

        message = Message("t", b"", 1, 9)
        async with (
            BlipmqScripted(refuses_the_second) as server,
            client_of(server) as client,
            client.subscribe("t") as first,
            client.subscribe("t") as second,
        ):
            results = await asyncio.gather(first.ack(message), second.ack(message), return_exceptions=True)
            assert results[0] is None
            assert isinstance(results[1], UnknownDelivery)
            assert results[1].correlation == 9
            assert [len(acks) for acks in fences] == [1, 1]

    run("asyncio", main)


@on_both_loops
def test_what_is_not_acknowledged_comes_again_with_its_tag(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            BlipmqBroker(tmp_path, redelivery_delay=0.05) as broker,
            client_of(broker) as client,
            client.subscribe("t") as messages,
        ):
            await client.publish_many("t", [b"kept", b"done"], qos=1)
            kept, done = await take(messages, 2)
            await messages.ack(done)
            again = await anext(messages)
            assert again == kept
            await messages.ack(again)
            with pytest.raises(UnknownDelivery, match="unknown subscription or delivery tag"):
                await messages.ack(kept)
            messages.ack_nowait(kept)
            await client.flush()
            assert messages.late_acks == 1

    run(loop, main)


def test_acknowledging_an_unconfirmed_message_does_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker, client_of(broker) as client:
            async with client.subscribe("t", qos=0) as messages:
                await client.publish("t", b"m", qos=1)
                message = await anext(messages)
                assert message.tag is None
                await messages.ack(message)
                messages.ack_nowait(message)
                await client.flush()
            assert broker.count("acks") == broker.count("nack_404") == 0

    run("asyncio", main)


@on_both_loops
def test_auto_ack_acknowledges_what_the_consumer_is_done_with(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker, client_of(broker) as client:
            async with client.subscribe("t", auto_ack=True) as messages:
                await client.publish_many("t", [b"1", b"2", b"3"], qos=1)
                await take(messages, 2)
                await client.flush()
                assert broker.count("acks") == 1
            await client.flush()
            assert broker.count("acks") == 2

            async def fails() -> None:
                async with client.subscribe("t", auto_ack=True) as messages:
                    await client.publish("t", b"4", qos=1)
                    await anext(messages)
                    raise LookupError

            with pytest.raises(LookupError):
                await fails()
            await client.flush()
            assert broker.count("acks") == 2

    run(loop, main)


def polls_of(frames: list[wire.Frame]) -> int:
    return sum(isinstance(frame, wire.Poll) for frame in frames)


async def round_of(peer: BlipmqPeer, *, deliver: int | None = None) -> int:
    """Answers the polls up to the next PING with messages, all of them or so many; how many polls there
    were."""
    frames = await peer.until(wire.Ping)
    asked = polls_of(frames)
    count = asked if deliver is None else deliver
    peer.send(*(wire.encode_publish("t", b"m", 0, 5) for _ in range(count)))
    peer.pong(frames[-1])
    return asked


def test_polls_grow_to_the_prefetch_while_rounds_come_back_full() -> None:
    async def main() -> None:
        asked: list[int] = []

        async def full(peer: BlipmqPeer) -> None:
            await peer.greet()
            peer.send(wire.encode_ack(1, (await peer.frame()).correlation))
            while True:
                asked.append(await round_of(peer))

        async with (
            BlipmqScripted(full) as server,
            client_of(server) as client,
            client.subscribe("t", qos=0, prefetch=16) as messages,
        ):
            await take(messages, 200)
        assert asked[0] == 1
        assert 8 <= max(asked) <= 16
        assert len(asked) < 60

    run("asyncio", main)


def test_a_slow_consumer_is_not_prefetched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blipmq, "MOST_BUFFERED_SECONDS", 0.0)

    async def main() -> None:
        asked: list[int] = []

        async def full(peer: BlipmqPeer) -> None:
            await peer.greet()
            peer.send(wire.encode_ack(1, (await peer.frame()).correlation))
            while True:
                asked.append(await round_of(peer))

        async with (
            BlipmqScripted(full) as server,
            client_of(server) as client,
            client.subscribe("t", qos=0) as messages,
        ):
            await take(messages, 10)
            await asyncio.sleep(0.02)
            assert asked == [1] * 10

    run("asyncio", main)


def test_polls_that_find_nothing_are_repeated_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        pauses: list[float] = []
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def noted(delay: float, *rest: object) -> asyncio.TimerHandle:
            if getattr(rest[0], "__name__", "") == "_ask_again":
                pauses.append(delay)
            return call_later(delay, *rest)  # type: ignore[arg-type]

        async def empty(peer: BlipmqPeer) -> None:
            await peer.greet()
            peer.send(wire.encode_ack(1, (await peer.frame()).correlation))
            for _ in range(6):
                await round_of(peer, deliver=0)
            await round_of(peer, deliver=1)
            while True:
                await round_of(peer, deliver=0)

        monkeypatch.setattr(loop, "call_later", noted)
        async with (
            BlipmqScripted(empty) as server,
            client_of(server) as client,
            client.subscribe("t", qos=0, max_wait=0.005) as messages,
        ):
            await anext(messages)
            assert pauses == [0.001, 0.002, 0.004, 0.005, 0.005, 0.005]
            waiting = asyncio.create_task(anext(messages))
            await until(lambda: len(pauses) > 8)
            assert pauses[6:9] == [0.001, 0.002, 0.004]
            waiting.cancel()

    run("asyncio", main)


@on_both_loops
def test_a_cancelled_wait_for_a_message_loses_none(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            BlipmqBroker(tmp_path) as broker,
            client_of(broker) as client,
            client.subscribe("t", qos=0, max_wait=0.002) as messages,
        ):

            async def publish() -> None:
                for number in range(100):
                    await client.publish("t", b"%d" % number)
                    await asyncio.sleep(0.001)

            publishing = asyncio.create_task(publish())
            got: list[int] = []
            cancelled = 0
            while len(got) < 100:
                waiting = asyncio.create_task(anext(messages))
                await asyncio.sleep(0.0005)
                waiting.cancel()
                await asyncio.wait([waiting])
                if waiting.cancelled():
                    cancelled += 1
                else:
                    got.append(int(waiting.result().payload))
            assert got == list(range(100))
            assert cancelled > 0
            await publishing

    run(loop, main)


def test_one_task_at_a_time_takes_messages(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            BlipmqBroker(tmp_path) as broker,
            client_of(broker) as client,
            client.subscribe("t") as messages,
        ):
            waiting = asyncio.create_task(anext(messages))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="one task at a time"):
                await anext(messages)
            await client.publish("t", b"m", qos=1)
            assert (await waiting).payload == b"m"

    run("asyncio", main)


def test_a_subscription_is_used_inside_its_block_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker, client_of(broker) as client:
            messages = client.subscribe("t")
            with pytest.raises(ClientClosed, match="was not entered yet"):
                await anext(messages)
            async with messages:
                with pytest.raises(RuntimeError, match="entered once"):
                    await messages.__aenter__()
            with pytest.raises(ClientClosed, match="was left"):
                await anext(messages)

    run("asyncio", main)


def test_leaving_a_subscription_ends_its_polls(tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker, client_of(broker) as client:
            async with client.subscribe("t", max_wait=0.002) as messages:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(messages), 0.01)
            await client.flush()
            polls = broker.count("polls")
            assert polls > 0
            await asyncio.sleep(0.02)
            assert broker.count("polls") == polls

    run("asyncio", main)


def test_a_refused_subscription_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            BlipmqBroker(tmp_path, keys=[NARROW]) as broker,
            client_of(broker, key="narrow-key") as client,
        ):
            with pytest.raises(NotAllowed, match="key 'narrow' may not subscribe to 'closed'"):
                async with client.subscribe("closed"):
                    pass
            async with client.subscribe("open.a") as messages:
                broker.keys.replace([Key(name="narrow", key="narrow-key", publish=["#"], subscribe=[])])
                with pytest.raises(NotAllowed, match=r"may not subscribe to 'open\.a'"):
                    await anext(messages)

    run("asyncio", main)


@on_both_loops
def test_closing_the_client_ends_what_waits(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker:
            client = client_of(broker)
            await client.connect()
            async with client.subscribe("t") as messages:
                waiting = asyncio.create_task(anext(messages))
                await asyncio.sleep(0.01)
                await client.close()
                with pytest.raises(ClientClosed, match="was closed"):
                    await waiting

    run(loop, main)


# --- lost connections ---------------------------------------------------------------------------------------


@on_both_loops
def test_a_durable_subscription_goes_on_after_a_lost_connection(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            BlipmqBroker(tmp_path) as broker,
            client_of(broker) as client,
            client_of(broker) as publisher,
        ):
            async with client.subscribe("t", auto_ack=True) as messages:
                subscription = messages.id
                got: set[int] = set()

                async def consume() -> None:
                    async for message in messages:
                        got.add(int(message.payload))

                consuming = asyncio.create_task(consume())
                for number in range(200):
                    await publisher.publish("t", b"%d" % number, qos=1)
                    if number % 50 == 25:
                        await broker.cut()
                await until(lambda: len(got) == 200)
                assert messages.id == subscription
                assert messages.gaps == 0
                consuming.cancel()
            assert client.reconnects > 0
            assert publisher.reconnects > 0
            assert len(broker.bus.subscriptions) == 1

    run(loop, main)


@on_both_loops
def test_what_is_still_here_is_not_taken_twice_after_a_lost_connection(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            BlipmqBroker(tmp_path) as broker,
            client_of(broker) as client,
            client.subscribe("t") as messages,
        ):
            await client.publish_many("t", [b"%d" % n for n in range(40)], qos=1)
            got: list[bytes] = []
            for number in range(40):
                message = await anext(messages)
                got.append(message.payload)
                if number == 20:
                    await client.flush()
                    assert len(messages._buffer) > 1
                    await broker.cut()
                    await until(lambda: client.reconnects == 1 and client.connected)
                messages.ack_nowait(message)
            assert got == [b"%d" % n for n in range(40)]
            await client.flush()
            assert broker.bus.subscriptions[messages.id].inflight == 0
            assert messages.late_acks == 0

    run(loop, main)


@on_both_loops
def test_acknowledgements_made_without_a_connection_are_sent_by_the_next(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            BlipmqBroker(tmp_path) as broker,
            client_of(broker) as client,
            client.subscribe("t") as messages,
        ):
            await client.publish_many("t", [b"1", b"2"], qos=1)
            first, second = await take(messages, 2)
            await broker.hide()
            await until(lambda: not client.connected)
            messages.ack_nowait(first)
            acknowledging = asyncio.create_task(messages.ack(second))
            await asyncio.sleep(0.01)
            await broker.listen()
            await acknowledging
            assert broker.bus.subscriptions[messages.id].inflight == 0

    run(loop, main)


def test_an_acknowledgement_that_got_through_before_the_loss_is_good() -> None:
    async def main() -> None:
        async def loses_the_answer(peer: BlipmqPeer) -> None:
            await peer.greet()
            peer.send(wire.encode_ack(1, (await peer.frame()).correlation))
            await peer.until(wire.Ping)
            peer.hang_up()

        async def knows_it_already(peer: BlipmqPeer) -> None:
            await peer.greet()
            ack, ping = await peer.until(wire.Ping)
            assert isinstance(ack, wire.Ack)
            peer.send(wire.encode_nack(404, "unknown", ack.correlation), wire.encode_pong(ping.correlation))

        async with (
            BlipmqScripted(loses_the_answer, knows_it_already) as server,
            client_of(server) as client,
            client.subscribe("t") as messages,
        ):
            await messages.ack(Message("t", b"", 1, 3))
            assert messages.late_acks == 0

    run("asyncio", main)


@on_both_loops
def test_an_acknowledgement_without_an_answer_is_a_timeout(loop: str) -> None:
    async def swallows(peer: BlipmqPeer) -> None:
        await peer.greet()
        peer.send(wire.encode_ack(1, (await peer.frame()).correlation))
        await peer.until(wire.Ping)
        peer.hang_up()

    async def main() -> None:
        async with BlipmqScripted(swallows) as server:
            client = client_of(server, timeout=0.2)
            await client.connect()
            async with client.subscribe("t") as messages:
                with pytest.raises(OperationTimeout, match="did not confirm an acknowledgement"):
                    await messages.ack(Message("t", b"", 1, 3))
            await client.close()

    run(loop, main)


@on_both_loops
def test_an_unconfirmed_subscription_is_made_anew_and_tells_of_the_gap(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        told: list[Subscription] = []
        async with (
            BlipmqBroker(tmp_path) as broker,
            client_of(broker) as client,
            client.subscribe("t", qos=0, on_gap=told.append) as messages,
        ):
            before = messages.id
            await client.publish("t", b"before")
            assert (await anext(messages)).payload == b"before"
            waiting = asyncio.create_task(anext(messages))
            await broker.hide()
            await until(lambda: not client.connected)
            broker.bus.publish("t", b"missed")
            await broker.listen()
            await until(lambda: told)
            assert told == [messages]
            assert messages.gaps == 1
            assert messages.id > before
            await client.publish("t", b"after")
            assert (await waiting).payload == b"after"

    run(loop, main)


@on_both_loops
def test_an_unconfirmed_message_is_sent_again_by_the_next_connection(loop: str) -> None:
    async def main() -> None:
        async def hangs_up(peer: BlipmqPeer) -> None:
            await peer.greet()
            await peer.until(wire.Ping)
            peer.hang_up()

        again: list[wire.Frame] = []

        async def answers(peer: BlipmqPeer) -> None:
            await peer.greet()
            again.extend(await peer.until(wire.Ping))
            peer.pong(again[-1])

        async with BlipmqScripted(hangs_up, answers) as server, client_of(server) as client:
            await asyncio.gather(
                client.publish("t", b"1", qos=1),
                client.publish_many("t", [b"2", b"3"], qos=1),
                client.publish("t", b"4", qos=1),
            )
            messages = [frame.message for frame in again if isinstance(frame, wire.Publish)]
            assert messages == [b"1", b"2", b"3", b"4"]
            assert client.reconnects == 1

    run(loop, main)


@on_both_loops
def test_a_large_publication_survives_the_loss_in_its_middle(loop: str, tmp_path: Path) -> None:
    payloads = [b"%06d" % number + bytes(5000) for number in range(2000)]

    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker, client_of(broker) as client:
            publishing = asyncio.create_task(client.publish_many("t", payloads, qos=1))
            await until(lambda: broker.log.appended > 100)
            await broker.cut()
            assert not publishing.done()
            await publishing
            arrived = broker.payloads()
            assert (
                arrived[-len(payloads) :] == payloads
            )  # all of them, in order, behind what came the first time

    run(loop, main)


@on_both_loops
def test_a_second_loss_raises(loop: str) -> None:
    async def hangs_up(peer: BlipmqPeer) -> None:
        await peer.greet()
        await peer.until(wire.Ping)
        peer.hang_up()

    async def main() -> None:
        async with BlipmqScripted(hangs_up, hangs_up) as server:
            client = client_of(server)
            await client.connect()
            with pytest.raises(ConnectionLost, match=r"the connection to .* was closed"):
                await client.publish("t", b"m", qos=1)
            assert server.connections == 2
            await client.close()

    run(loop, main)


def test_without_retry_the_first_loss_raises() -> None:
    async def hangs_up(peer: BlipmqPeer) -> None:
        await peer.greet()
        await peer.until(wire.Ping)
        peer.hang_up()

    async def idle(peer: BlipmqPeer) -> None:
        await peer.greet()
        ping = await peer.frame()
        assert isinstance(ping, wire.Ping)
        peer.pong(ping)

    async def main() -> None:
        async with BlipmqScripted(hangs_up, idle) as server, client_of(server) as client:
            with pytest.raises(ConnectionLost):
                await client.publish("t", b"m", qos=1, retry=False)
            await client.flush()  # nothing but its PING reaches the second connection

    run("asyncio", main)


def test_a_cancelled_message_is_not_sent_again() -> None:
    async def main() -> None:
        cut = asyncio.Event()

        async def hangs_up(peer: BlipmqPeer) -> None:
            await peer.greet()
            await peer.until(wire.Ping)
            cut.set()
            await asyncio.sleep(0.01)
            peer.hang_up()

        again: list[wire.Frame] = []

        async def answers(peer: BlipmqPeer) -> None:
            await peer.greet()
            again.extend(await peer.until(wire.Ping))
            peer.pong(again[-1])

        async with BlipmqScripted(hangs_up, answers) as server, client_of(server) as client:
            kept = asyncio.create_task(client.publish("t", b"kept", qos=1))
            dropped = asyncio.create_task(client.publish("t", b"dropped", qos=1))
            await cut.wait()
            dropped.cancel()
            await kept
            assert [frame.message for frame in again if isinstance(frame, wire.Publish)] == [b"kept"]

    run("asyncio", main)


@on_both_loops
def test_publishes_wait_for_a_server_that_comes_back(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker, client_of(broker) as client:
            await broker.stop()
            await until(lambda: not client.connected)
            waiting = [
                asyncio.create_task(client.publish("t", b"0")),
                asyncio.create_task(client.publish("t", b"1", qos=1)),
                asyncio.create_task(client.publish_many("t", [b"2", b"3"])),
            ]
            await asyncio.sleep(0.05)
            assert not any(task.done() for task in waiting)
            await broker.start()
            await asyncio.gather(*waiting)
            await client.flush()
            assert sorted(broker.payloads()) == [b"0", b"1", b"2", b"3"]

    run(loop, main)


@on_both_loops
def test_a_server_that_stays_away_is_a_timeout_with_the_reason(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker:
            client = client_of(broker, timeout=0.1)
            await client.connect()
            await broker.hide()
            await until(lambda: not client.connected)
            with pytest.raises(OperationTimeout) as late:
                await client.publish("t", b"m", qos=1)
            assert str(late.value) == (
                f"cannot publish: there was no connection to {client.address} for 0.1 s"
                f" (cannot connect to {client.address}: connection refused)"
            )
            await client.close()
            await broker.listen()

    run(loop, main)


@on_both_loops
def test_a_message_that_nobody_takes_in_time_is_a_timeout_though_it_was_to_be_sent_again(loop: str) -> None:
    async def hangs_up(peer: BlipmqPeer) -> None:
        await peer.greet()
        await peer.until(wire.Ping)
        peer.hang_up()

    async def main() -> None:
        async with BlipmqScripted(
            hangs_up
        ) as server:  # and does so without a word from the second connection on
            client = client_of(server, timeout=0.1)
            await client.connect()
            with pytest.raises(OperationTimeout, match=r"did not answer within 0\.1 s"):
                await client.publish("t", b"m", qos=1)
            await client.close()

    run(loop, main)


@on_both_loops
def test_without_reconnection_a_loss_is_final(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker:
            client = client_of(broker, reconnect=False)
            await client.connect()
            async with client.subscribe("t") as messages:
                waiting = asyncio.create_task(anext(messages))
                await asyncio.sleep(0.01)
                await broker.cut()
                with pytest.raises(ConnectionLost):
                    await waiting
            with pytest.raises(ConnectionLost):
                await client.publish("t", b"m")
            with pytest.raises(ConnectionLost):
                await client.flush()
            await client.close()

    run(loop, main)


@on_both_loops
def test_a_key_that_is_taken_away_ends_the_client(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path, keys=[EVERYTHING, NARROW]) as broker:
            client = client_of(broker, key="narrow-key")
            await client.connect()
            async with client.subscribe("open.t") as messages:
                waiting = asyncio.create_task(anext(messages))
                broker.keys.replace([EVERYTHING])
                with pytest.raises(NotAllowed):
                    await waiting
            with pytest.raises(AuthenticationError):
                await client.publish("open.t", b"m", qos=1)
            assert not client.connected
            await client.close()

    run(loop, main)


@on_both_loops
def test_a_key_that_is_gone_when_it_reconnects_ends_the_client(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path, keys=[EVERYTHING, NARROW]) as broker:
            client = client_of(broker, key="narrow-key")
            await client.connect()
            async with client.subscribe("open.t") as messages:
                waiting = asyncio.create_task(anext(messages))
                await broker.hide()
                broker.keys.replace([EVERYTHING])
                await broker.listen()
                with pytest.raises(AuthenticationError, match="invalid API key"):
                    await waiting
            await client.close()

    run(loop, main)


@on_both_loops
def test_a_durable_subscription_is_resumed_after_a_restart_of_both_sides(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker:
            async with client_of(broker) as client, client.subscribe("t") as messages:
                subscription = messages.id
                await client.publish_many("t", [b"1", b"2", b"3"], qos=1)
                first = await anext(messages)
                await messages.ack(first)
            await broker.stop()
            await broker.start()
            async with client_of(broker) as client, client.resume(subscription, "t") as messages:
                assert [message.payload for message in await take(messages, 2)] == [b"2", b"3"]

    run(loop, main)


@on_both_loops
def test_the_client_goes_on_through_a_restart_of_the_server(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            BlipmqBroker(tmp_path, redelivery_delay=0.1) as broker,
            client_of(broker) as client,
            client.subscribe("t", auto_ack=True) as messages,
        ):
            await client.publish("t", b"1", qos=1)
            assert (await anext(messages)).payload == b"1"
            await broker.stop()
            await broker.start()
            await client.publish("t", b"2", qos=1)
            assert (await anext(messages)).payload == b"2"

    run(loop, main)


def test_a_client_that_has_ended_resumes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker:
            async with client_of(broker) as client, client.subscribe("t") as messages:
                subscription = messages.id
            with pytest.raises(ClientClosed):
                async with client.resume(subscription, "t"):
                    pass
            assert client._subscriptions == {}

    run("asyncio", main)


def test_resuming_with_another_topic_is_noticed_at_the_first_message(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            BlipmqBroker(tmp_path) as broker,
            client_of(broker) as client,
            client.subscribe("t") as messages,
        ):
            await client.publish("t", b"m", qos=1)
            async with client.resume(messages.id, "u") as wrong:
                with pytest.raises(ProtocolError, match=r"subscription \d+ is of topic 't', not 'u'"):
                    await anext(wrong)

    run("asyncio", main)


def test_losses_and_reconnections_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with BlipmqBroker(tmp_path) as broker, client_of(broker) as client:
            await broker.cut()
            await until(lambda: client.reconnects == 1)

    with caplog.at_level(logging.WARNING, logger="headrace.clients"):
        run("asyncio", main)
    assert [record.message.split(";")[-1] for record in caplog.records] == [
        " connecting again",
        f"connected to {caplog.records[1].args[0]} again",  # type: ignore[index]
    ]


def test_pauses_between_attempts_grow_to_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        pauses: list[float] = []
        sleep = asyncio.sleep

        async def noted(delay: float) -> None:
            if delay:
                pauses.append(delay)
            await sleep(0)

        async def hangs_up(peer: BlipmqPeer) -> None:
            await peer.greet()
            peer.hang_up()

        async with BlipmqScripted(hangs_up) as server:
            monkeypatch.setattr("headrace.clients.reconnect.asyncio.sleep", noted)
            monkeypatch.setattr("headrace.clients.reconnect.random.uniform", lambda low, high: high)
            client = client_of(server, reconnect_delay=0.01, max_reconnect_delay=0.1)
            await client.connect()
            while len(pauses) < 6:
                await sleep(0.001)
            monkeypatch.undo()
            assert pauses[:6] == [0.01, 0.02, 0.04, 0.08, 0.1, 0.1]
            await client.close()

    run("asyncio", main)


def test_a_flush_that_the_connection_did_not_survive_raises() -> None:
    async def hangs_up(peer: BlipmqPeer) -> None:
        await peer.greet()
        await peer.until(wire.Ping)
        peer.hang_up()

    async def main() -> None:
        async with BlipmqScripted(hangs_up, hangs_up) as server:
            for used in (BlipmqClient.flush, BlipmqClient.ping):
                client = client_of(server)
                await client.connect()
                await client.publish("t", b"maybe lost")
                with pytest.raises(ConnectionLost):
                    await used(client)
                await client.close()

    run("asyncio", main)


def test_an_unconfirmed_batch_that_the_connection_did_not_survive_raises(tmp_path: Path) -> None:
    async def main() -> None:
        async def hangs_up(peer: BlipmqPeer) -> None:
            await peer.greet()
            await peer.frame()
            peer.hang_up()

        async def goes_on(peer: BlipmqPeer) -> None:
            await peer.greet()
            await peer.until(wire.Pong)

        async with BlipmqScripted(hangs_up, goes_on) as server:
            client = client_of(server)
            await client.connect()
            with pytest.raises(ConnectionLost, match="while 100000 messages were sent"):
                await client.publish_many("t", [bytes(1000)] * 100_000)
            await client.close()

    run("asyncio", main)


def test_every_error_says_something(tmp_path: Path) -> None:
    nack = BlipmqNack(500, "x", 1)
    for error in (ConnectionLost("gone"), nack, RefusedMessages({0: nack}, 2), OperationTimeout("late")):
        copy = blipmq.again(error)
        assert copy is not error
        assert type(copy) is type(error)
        assert str(copy) == str(error) != ""
        assert isinstance(copy, ClientError)


def test_correlation_ids_are_never_delivery_tags() -> None:
    assert blipmq_link.FIRST_CORRELATION > 1 << 62  # tags are positions in a log
