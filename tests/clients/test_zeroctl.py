"""The zeroctl client against a gateway in a process of its own, over real sockets."""

import asyncio
import contextlib
import hashlib
import json
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.clients import zeroctl
from headrace.clients.zeroctl import Condition, Message, Signer, ZeroctlClient
from headrace.nodes.headers import default_uuid
from headrace.nodes.signatures import public_key, verify
from headrace.wire import blipmq
from headrace.wire import zeroctl as wire
from tests.clients.zeroctl_servers import ZeroctlPeer, ZeroctlScripted
from tests.gateway.gateways import GatewayProcess, Peer
from tests.streams import run, until

SETS = (
    "listen.zeroctl.bind=127.0.0.1:0",
    "log.segment_bytes=16MiB",
    "log.pool_segments=1",
    "log.retention_bytes=96MiB",
    'keys=[{name="dev", key="dev-key", publish=["#"], subscribe=["#"]},'
    ' {name="narrow", key="narrow-key", publish=["open.#"], subscribe=["open.#"]}]',
    'listen.zeroctl.anonymous="narrow"',
    'listen.zeroctl.signed=["signed.#"]',
    'services=[{name="jobs", key="service.jobs.#", topic="queue.bulk.jobs"},'
    ' {name="told", key="service.told", topic="queue.told.jobs", finished="queue.told.done",'
    ' description="work elsewhere"}]',
)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path_factory.mktemp("gateway"), *SETS) as running:
        yield running


def client_of(gateway: GatewayProcess, key: str = "dev-key", **options: Any) -> ZeroctlClient:
    return ZeroctlClient(gateway.places["zeroctl"], key=key, **{"node": "test.node", **options})


def with_client(
    gateway: GatewayProcess, use: Callable[[ZeroctlClient], Awaitable[None]], **options: Any
) -> None:
    async def main() -> None:
        async with client_of(gateway, **options) as client:
            await use(client)

    run("uvloop", main)


async def take(binding: zeroctl.Binding, count: int) -> list[Message]:
    return [await anext(binding) for _ in range(count)]


def test_message_reaches_who_bound_its_key(gateway: GatewayProcess) -> None:
    async def use(client: ZeroctlClient) -> None:
        async with client.bind("event.first.#") as messages:
            await client.publish("event.first.a", b'{"n": 1}', {"priority": 3})
            await client.publish("event.other", b"no")
            await client.publish_many("event.first.b", [b"2", b"3"])
            got = await take(messages, 3)
        assert [(one.key, one.body) for one in got] == [
            ("event.first.a", b'{"n": 1}'),
            ("event.first.b", b"2"),
            ("event.first.b", b"3"),
        ]
        headers = got[0].headers
        assert (headers["node-name"], headers["node-uuid"]) == ("test.node", default_uuid("test.node"))
        assert headers["priority"] == 3
        assert headers["sha256"] == hashlib.sha256(b'{"n": 1}').hexdigest()
        assert client.gateway is not None
        assert client.gateway.max_body == 4 << 20

    with_client(gateway, use)


def test_default_uuid_is_what_other_clients_derive() -> None:
    assert default_uuid("testnode") == "fdcab500-b417-5e99-aa62-9d2db81df9e0"


def test_what_the_gateway_refuses_is_raised(gateway: GatewayProcess) -> None:
    async def use(client: ZeroctlClient) -> None:
        with pytest.raises(zeroctl.NotAllowed, match=r"key 'narrow' may not publish to 'event\.a' \(403\)"):
            await client.publish("event.a", b"")
        with pytest.raises(zeroctl.NotAllowed, match="may not bind to '#'"):
            async with client.bind("#"):
                pass
        with pytest.raises(zeroctl.BadMessage, match="a header has 65536 bytes at most"):
            await client.publish("open.a", b"", {"filler": "x" * 65536})
        with pytest.raises(zeroctl.BadMessage, match="a filter has 1 to 255"):
            async with client.bind("é"):
                pass
        with pytest.raises(ValueError, match="a routing key has"):
            await client.publish("open.*", b"")
        await client.publish("open.a", b"goes on")

    with_client(gateway, use, key="narrow-key")
    with_client(gateway, use, key="")


def test_connection_that_cannot_be_says_why(gateway: GatewayProcess) -> None:
    async def nothing(client: ZeroctlClient) -> None:
        pass

    with pytest.raises(zeroctl.NotOpened, match="the key is unknown"):
        with_client(gateway, nothing, key="guess")

    async def main() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with pytest.raises(zeroctl.ConnectionFailed, match="connection refused"):
            await ZeroctlClient(f"127.0.0.1:{port}").connect()

    run("asyncio", main)


def test_conditions_choose_by_header(gateway: GatewayProcess) -> None:
    async def use(client: ZeroctlClient) -> None:
        wanted = [(Condition.PREFIX, "host", "web"), (Condition.EQUAL, "dc", "1")]
        async with client.bind("event.cond", conditions=wanted) as messages:
            for host, dc in (("web1", 2), ("db", 1), ("web2", 1)):
                await client.publish("event.cond", host.encode(), {"host": host, "dc": dc})
            assert [one.body for one in await take(messages, 1)] == [b"web2"]

    with_client(gateway, use)


def test_rejected_message_comes_again_and_an_acknowledged_one_does_not(gateway: GatewayProcess) -> None:
    async def use(client: ZeroctlClient) -> None:
        async with client.bind("event.again", acknowledge=True, auto_ack=False) as messages:
            await client.publish_many("event.again", [b"1", b"2"])
            first, second = await take(messages, 2)
            messages.ack(second)
            messages.reject(first, 0.05)
            (again,) = await take(messages, 1)
            assert (again.body, again.tag, again.redelivered) == (b"1", first.tag, True)
            messages.ack(again)

    with_client(gateway, use)


def test_many_messages_arrive_in_order_through_a_small_prefetch(gateway: GatewayProcess) -> None:
    bodies = [str(i).encode() for i in range(5000)]

    async def use(client: ZeroctlClient) -> None:
        async with client.bind("event.many", prefetch=10) as messages:
            sending = asyncio.create_task(client.publish_many("event.many", bodies))
            assert [one.body for one in await take(messages, len(bodies))] == bodies
            await sending

    with_client(gateway, use)


def test_largest_body_is_hashed_off_the_loop_and_arrives(gateway: GatewayProcess) -> None:
    body = bytes(range(256)) * (4 << 12)

    async def use(client: ZeroctlClient) -> None:
        async with client.bind("event.large") as messages:
            await client.publish_many("event.large", [b"before", body, b"after"])
            assert [one.body for one in await take(messages, 3)] == [b"before", body, b"after"]

    with_client(gateway, use)
    (listener,) = (one for one in gateway.status()["listeners"] if one["protocol"] == "zeroctl")
    assert listener["events"]["hashed_off_loop"] >= 1


def test_messages_cross_to_blipmq_and_back(gateway: GatewayProcess) -> None:
    peer = Peer.to(gateway)
    peer.send(blipmq.encode_subscribe("cross.out", 0, 5))
    answer = peer.receive()
    assert isinstance(answer, blipmq.Ack)

    async def use(client: ZeroctlClient) -> None:
        async with client.bind("cross.#") as messages:
            peer.publish("cross.in", b"from blipmq")
            await client.publish("cross.out", b"from zeroctl")
            first, second = await take(messages, 2)
        assert (first.key, first.body) == ("cross.in", b"from blipmq")
        assert first.headers["_transport-protocol"] == "blipmq"
        assert first.headers["node-name"].endswith("-headrace")
        assert first.headers["sha256"] == hashlib.sha256(b"from blipmq").hexdigest()
        assert second.body == b"from zeroctl"

    with_client(gateway, use)
    peer.send(blipmq.encode_poll(answer.subscription, 6))
    delivered = peer.receive()
    assert isinstance(delivered, blipmq.Publish)
    assert delivered.message == b"from zeroctl"


# --- services -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(client: ZeroctlClient, filter: str, **how: Any) -> AsyncIterator[list[str]]:
    """A provider that answers with what it was sent; `bad` is refused, `fail` fails."""
    served: list[str] = []

    async def serve() -> None:
        async with client.provide(filter, name="echo") as requests:
            ready.set()
            async for request in requests:
                if request.body == b"bad":
                    await request.refuse("no such thing")
                    continue
                served.append(await request.accept(**how))
                await request.finish(request.body, failed="broke" if request.body == b"fail" else "")

    ready = asyncio.Event()
    task = asyncio.create_task(serve())
    await asyncio.wait([asyncio.create_task(ready.wait()), task], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield served
    finally:
        task.cancel()
        await asyncio.wait([task])


def test_request_is_accepted_under_a_unique_name_and_finished(gateway: GatewayProcess) -> None:
    async def main() -> None:
        async with (
            client_of(gateway) as client,
            client_of(gateway, node="provider") as provider,
            serving(provider, "service.echo.#") as served,
        ):
            task = await client.request("service.echo.dc1", b"x", {"correlation-id": "c-1"})
            answer = await task.finished()
            assert answer.body == b"x"
            assert answer.headers["correlation-id"] == "c-1"
            assert task.id == served[0]
            assert task.id.startswith("test_node.")
            other = await client.request("service.echo.dc1", b"y", on_finish=False)
            assert other.id != task.id
            with pytest.raises(zeroctl.RequestRefused, match="no such thing"):
                await client.request("service.echo.dc1", b"bad")
            failing = await client.request("service.echo.dc1", b"fail")
            with pytest.raises(zeroctl.RequestRefused, match="broke"):
                await failing.finished()

    run("uvloop", main)


def test_competing_providers_share_the_requests(gateway: GatewayProcess) -> None:
    async def main() -> None:
        async with (
            client_of(gateway) as client,
            client_of(gateway, node="p1") as one,
            client_of(gateway, node="p2") as two,
            serving(one, "service.shared.#") as first,
            serving(two, "service.shared.#") as second,
        ):
            tasks = await asyncio.gather(*(client.request("service.shared.x", b"%d" % i) for i in range(40)))
            await asyncio.gather(*(task.finished() for task in tasks))
            assert sorted(first + second) == sorted(task.id for task in tasks)

    run("uvloop", main)


def test_provider_that_cannot_tell_says_so(gateway: GatewayProcess) -> None:
    async def main() -> None:
        async with (
            client_of(gateway) as client,
            client_of(gateway, node="p3") as provider,
            serving(provider, "service.quiet", will_finish=False),
        ):
            task = await client.request("service.quiet", b"x")
            assert not task.will_finish
            with pytest.raises(zeroctl.RequestRefused, match="does not tell"):
                await task.finished()

    run("uvloop", main)


def test_transient_node_is_refused_as_a_provider(gateway: GatewayProcess) -> None:
    async def use(client: ZeroctlClient) -> None:
        with pytest.raises(zeroctl.Conflict, match="a transient node cannot offer a service"):
            async with client.bind("service.mine", queue=True, acknowledge=True):
                pass

    with_client(gateway, use, node="transient")


def test_gateway_provides_services_for_who_works_elsewhere(gateway: GatewayProcess) -> None:
    async def use(client: ZeroctlClient) -> None:
        async with client.bind("queue.#", acknowledge=True) as jobs:
            task = await client.request("service.jobs.bulk", b"work", {"size": 5})
            assert not task.will_finish
            (job,) = await take(jobs, 1)
            assert (job.key, job.body) == ("queue.bulk.jobs", b"work")
            assert (job.headers["task-id"], job.headers["size"]) == (task.id, 5)

            told = await client.request("service.told", b"more", {"correlation-id": "c-2"})
            (job,) = await take(jobs, 1)
            assert told.will_finish
            await client.publish("queue.told.done", json.dumps({"task-id": told.id}).encode())
            answer = await told.finished()
            assert (answer.headers["task-id"], answer.headers["correlation-id"]) == (told.id, "c-2")

            failing = await client.request("service.told", b"more")
            await client.publish(
                "queue.told.done", b"", {"task-id": failing.id, "nak": 1, "reason": "no disk"}
            )
            with pytest.raises(zeroctl.RequestRefused, match="no disk"):
                await failing.finished()
            with pytest.raises(zeroctl.RequestRefused, match="this service has no output"):
                await client.request("service.told", b"more", {"output-to": "event.out"})

    with_client(gateway, use)


def test_nodes_that_were_heard_are_listed(gateway: GatewayProcess) -> None:
    async def main() -> None:
        signer = Signer.of_seed(bytes(32))
        async with client_of(gateway, node="node.a", heartbeat=30, signer=signer):
            nodes = json.loads(gateway.get("/api/nodes")[1])["nodes"]
            (found,) = (one for one in nodes if one["node-name"] == "node.a")
            assert found["node-uuid"] == default_uuid("node.a")
            assert (found["hb-interval"], found["ttl"]) == (30, 90)
            assert (found["node-pubkey"], found["signed"]) == (signer.pubkey, True)

    run("uvloop", main)


# --- signatures ---------------------------------------------------------------------------------------------


def test_signature_and_key_are_packed_as_other_clients_do() -> None:
    signer = Signer.of_seed(bytes(range(32)))
    body = b"here is some cake"
    assert signer.pubkey == "ASADoQe/884Qvh1w3RjnS8CZZ+TWMJulDV8d3IZkElUxuA=="
    expected = "AUAvNLapLzsuIDKu2MMaq9pKxf9janlsv/zcOuQeiyWflbbganoRd1WX4T6Hemx6qCdnHPQYgSaIiDsXHsN9eAIJ"
    assert signer.sign(body) == expected
    assert verify(public_key(signer.pubkey), expected, body)
    assert not verify(public_key(signer.pubkey), expected, b"other cake")
    for wrong in (None, "", "AAAA", "AkAv", expected[:-4], 5):
        assert not verify(public_key(signer.pubkey), wrong, body)


def test_key_that_needs_a_signature_takes_only_signed_messages(gateway: GatewayProcess) -> None:
    async def main() -> None:
        signer, other = Signer.of_seed(bytes(32)), Signer.of_seed(bytes([1]) * 32)
        async with (
            client_of(gateway, node="signs", signer=signer, heartbeat=60) as signing,
            client_of(gateway, node="signs", signer=other) as forging,
            client_of(gateway, node="plain") as plain,
            plain.bind("signed.#") as messages,
        ):
            await signing.publish("signed.a", b"mine")
            with pytest.raises(zeroctl.NotAllowed, match="needs a signature"):
                await plain.publish("signed.a", b"unsigned")
            with pytest.raises(zeroctl.NotAllowed, match="is not that of the node's key"):
                await forging.publish("signed.a", b"forged")
            (got,) = await take(messages, 1)
            assert got.body == b"mine"
            assert got.signed_by(signer.pubkey)
            assert not got.signed_by(other.pubkey)

    run("uvloop", main)


# --- ends and beginnings ------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def test_client_goes_on_after_the_gateway_was_killed_and_nothing_confirmed_is_lost(tmp_path: Path) -> None:
    sets = (*SETS, f"listen.zeroctl.bind=127.0.0.1:{free_port()}")

    async def main() -> None:
        with GatewayProcess(tmp_path, *sets) as first:
            client = client_of(first, timeout=30.0)
            await client.connect()
            messages = client.bind("event.kept.#", durable=True, name="kept", auto_ack=False)
            await messages.__aenter__()
            await client.publish_many("event.kept.a", [b"%d" % i for i in range(50)])
            got = await take(messages, 10)
            for message in got:
                messages.ack(message)
            await client.publish("event.kept.a", b"50")  # behind the acknowledgements
            first.signal(signal.SIGKILL)
            await asyncio.to_thread(first.ended)
        with GatewayProcess(tmp_path, *sets):
            await client.publish("event.kept.a", b"51")
            rest = await take(messages, 42)
            assert {one.body for one in rest} == {b"%d" % i for i in range(10, 52)}
            assert (client.reconnects, messages.gaps) == (1, 1)
            await client.close()

    run("uvloop", main)


def test_provider_comes_back_with_its_heartbeat_after_a_restart(tmp_path: Path) -> None:
    sets = (*SETS, f"listen.zeroctl.bind=127.0.0.1:{free_port()}")

    async def main() -> None:
        with GatewayProcess(tmp_path, *sets) as first:
            provider = client_of(first, node="worker", timeout=30.0)
            await provider.connect()
            requests = provider.provide("service.back", name="back")
            await requests.__aenter__()
            assert await asyncio.to_thread(first.stop) == 0
        with GatewayProcess(tmp_path, *sets) as second:
            async with client_of(second, timeout=30.0) as client:
                asked = asyncio.create_task(client.request("service.back", b"x"))
                request = await anext(requests)
                await request.accept()
                await request.finish(b"y")
                assert (await (await asked).finished()).body == b"y"
            await provider.close()

    run("uvloop", main)


def test_closed_client_ends_its_iterators_and_refuses_more(gateway: GatewayProcess) -> None:
    async def main() -> None:
        client = client_of(gateway)
        await client.connect()
        messages = await client.bind("event.end").__aenter__()
        reading = asyncio.create_task(anext(messages, None))
        await asyncio.sleep(0)
        await client.close()
        assert await reading is None
        with pytest.raises(zeroctl.ClientClosed):
            await client.publish("event.end", b"")

    run("uvloop", main)


# --- with a server that a test scripts ----------------------------------------------------------------------


def scripted(server: ZeroctlScripted, **options: Any) -> ZeroctlClient:
    return ZeroctlClient(server.address, **{"node": "test.node", "reconnect_delay": 0.001, **options})


def test_a_bind_that_waited_for_the_connection_is_sent_once_and_behind_the_heartbeat() -> None:
    came: list[str] = []
    bound = asyncio.Event()

    async def first(peer: ZeroctlPeer) -> None:
        await peer.greet()
        peer.confirm(await peer.frame())  # the heartbeat
        peer.confirm(await peer.frame())  # the first binding
        await bound.wait()
        peer.hang_up()

    async def second(peer: ZeroctlPeer) -> None:
        await peer.greet()
        seen: set[int] = set()
        while True:
            frame = await peer.frame()
            if isinstance(frame, wire.Bind):
                came.append(frame.filter)
                if frame.binding in seen:
                    peer.refuse(frame, 409, f"binding {frame.binding} is there already")
                else:
                    seen.add(frame.binding)
                    peer.confirm(frame)
            elif isinstance(frame, wire.Unbind):
                peer.confirm(frame)
            elif isinstance(frame, wire.Message):
                came.append(frame.key)
                # As a disk that takes its time does: the answer to BIND overtakes it.
                asyncio.get_running_loop().call_later(0.05, peer.confirm, frame)

    async def main() -> None:
        async with (
            ZeroctlScripted(first, second) as server,
            scripted(server, heartbeat=60) as client,
            client.bind("event.before"),
        ):
            bound.set()
            await until(lambda: not client.connected)
            async with client.bind("service.waited", acknowledge=True, queue=True) as waited:
                await until(lambda: len(came) >= 3)
                await asyncio.sleep(0.1)
                assert waited._error is None
                assert came == ["discovery.node.test_node", "service.waited", "event.before"]

    run("uvloop", main)


@pytest.mark.parametrize("end", ["cancelled", "late"])
def test_a_flush_that_ends_early_leaves_the_publishes_alone(end: str) -> None:
    may_answer = asyncio.Event()

    async def slow(peer: ZeroctlPeer) -> None:
        await peer.greet()
        frame = await peer.frame()
        await may_answer.wait()
        peer.confirm(frame)

    async def main() -> None:
        async with ZeroctlScripted(slow) as server, scripted(server) as client:
            publishing = asyncio.create_task(client.publish("event.slow", b"x"))
            await until(lambda: client._sent)
            if end == "late":
                client._timeout = 0.05
                with pytest.raises(zeroctl.OperationTimeout):
                    await client.flush()
            else:
                flushing = asyncio.create_task(client.flush())
                await asyncio.sleep(0)
                flushing.cancel()
                await asyncio.wait([flushing])
            may_answer.set()
            await publishing

    run("uvloop", main)


def test_flush_passes_by_what_was_cancelled() -> None:
    async def silent(peer: ZeroctlPeer) -> None:
        await peer.greet()

    async def main() -> None:
        async with ZeroctlScripted(silent) as server, scripted(server) as client:
            publishing = asyncio.create_task(client.publish("event.x", b"x"))
            await until(lambda: client._sent)
            flushing = asyncio.create_task(client.flush())
            await asyncio.sleep(0)
            publishing.cancel()
            await flushing

    run("uvloop", main)


def test_what_was_given_up_is_not_sent_by_the_next_connection() -> None:
    came: list[bytes] = []
    given_up = asyncio.Event()

    async def silent(peer: ZeroctlPeer) -> None:
        await peer.greet()
        for _ in range(4):
            await peer.frame()
        await given_up.wait()
        peer.hang_up()

    async def second(peer: ZeroctlPeer) -> None:
        await peer.greet()
        while True:
            frame = await peer.frame()
            assert isinstance(frame, wire.Message)
            came.append(frame.body)
            peer.confirm(frame)

    async def main() -> None:
        async with ZeroctlScripted(silent, second) as server, scripted(server) as client:
            cancelled = asyncio.create_task(client.publish_many("event.x", [b"1", b"2"]))
            await until(lambda: len(client._sent) == 2)
            cancelled.cancel()
            client._timeout = 0.05
            with pytest.raises(zeroctl.OperationTimeout):
                await client.publish("event.x", b"3")
            client._timeout = 10.0
            kept = asyncio.create_task(client.publish("event.x", b"4"))
            await until(lambda: len(client._sent) == 4)
            given_up.set()
            await kept
            await client.publish("event.x", b"5")
        assert came == [b"4", b"5"]

    run("uvloop", main)


def test_heartbeats_go_on_after_one_whose_connections_were_lost(caplog: pytest.LogCaptureFixture) -> None:
    async def losing(peer: ZeroctlPeer) -> None:
        await peer.greet()
        await peer.frame()
        peer.hang_up()

    async def first(peer: ZeroctlPeer) -> None:
        await peer.greet()
        peer.confirm(await peer.frame())
        await peer.frame()
        peer.hang_up()

    beats: list[str] = []

    async def healthy(peer: ZeroctlPeer) -> None:
        await peer.greet()
        while True:
            frame = await peer.frame()
            assert isinstance(frame, wire.Message)
            beats.append(frame.key)
            peer.confirm(frame)

    async def main() -> None:
        async with (
            ZeroctlScripted(first, losing, healthy) as server,
            scripted(server, heartbeat=0.02) as client,
        ):
            await until(lambda: len(beats) >= 3)
            assert client.reconnects == 2
        assert "the heartbeat did not get through: " in caplog.text

    run("uvloop", main)


def test_client_whose_first_heartbeat_is_refused_is_closed() -> None:
    ended = asyncio.Event()

    async def refusing(peer: ZeroctlPeer) -> None:
        await peer.greet()
        peer.refuse(await peer.frame(), 403, "no")
        with contextlib.suppress(EOFError, ConnectionError):
            await peer.frame()
        ended.set()

    async def main() -> None:
        async with ZeroctlScripted(refusing) as server:
            client = scripted(server, heartbeat=60)
            with pytest.raises(zeroctl.NotAllowed):
                await client.connect()
            assert not client.connected
            await asyncio.wait_for(ended.wait(), 5)
            with pytest.raises(zeroctl.ClientClosed):
                await client.publish("event.x", b"")

    run("uvloop", main)
