"""The Felix client against real gateways, on both engines: what it sends arrives, what it is refused is raised, and
what is lost is said."""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.clients.felix import (
    ClientClosed,
    ConnectionFailed,
    ConnectionLost,
    FelixClient,
    FelixRefused,
    NotAllowed,
    NotFound,
    OperationTimeout,
)
from headrace.log import LogReader
from tests.gateway.gateways import PATIENCE, GatewayProcess
from tests.gateway.quic_peers import ENGINES

PEERS = (
    'listen.felix.peers=[{name="local", networks=["127.0.0.0/8"], publish=["t.#", "cache"],'
    ' subscribe=["t.#", "cache"]}]'
)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, engine: str) -> Path:
    return tmp_path_factory.mktemp(engine)


@pytest.fixture(scope="module")
def gateway(engine: str, data: Path) -> Iterator[GatewayProcess]:
    sets = (f"quic.engine={engine}", "drop.enabled=false", "log.retention_bytes=64MiB", PEERS)
    with GatewayProcess(data, *sets) as gateway:
        yield gateway


def use(
    gateway: GatewayProcess, engine: Any, do: Callable[[FelixClient], Awaitable[Any]], **options: Any
) -> Any:
    async def main() -> Any:
        async with (
            asyncio.timeout(PATIENCE),
            FelixClient(gateway.places["felix"], engine=engine, **options) as client,
        ):
            assert client.engine == engine
            return await do(client)

    return asyncio.run(main())


async def take(events: Any, count: int) -> list[bytes]:
    return [await anext(events) for _ in range(count)]


@pytest.mark.parametrize("binary", [False, True])
def test_batches_arrive_whole_and_in_order(gateway: GatewayProcess, engine: Any, binary: bool) -> None:
    async def do(client: FelixClient) -> None:
        stream = f"batches-{binary}"
        async with client.subscribe("t", "n", stream) as events:
            await client.publish("t", "n", stream, b"first")
            for i in range(20):
                batch = [b"%d-%d" % (i, k) for k in range(50)]
                await client.publish_batch("t", "n", stream, batch, binary=binary)
            found = await take(events, 1001)
        assert found == [b"first", *(b"%d-%d" % (i, k) for i in range(20) for k in range(50))]

    use(gateway, engine, do)


def test_publishes_without_ack_are_there_after_a_flush(
    gateway: GatewayProcess, engine: Any, data: Path
) -> None:
    async def do(client: FelixClient) -> None:
        for i in range(100):
            await client.publish("t", "n", "flushed", b"%d" % i, ack=False)
        await client.publish_batch("t", "n", "flushed", [b"last"], ack=False)
        await client.flush()
        records = [one.payload for one in LogReader(str(data / "log")) if one.topic_name == b"t.n.flushed"]
        assert records == [*(b"%d" % i for i in range(100)), b"last"]

    use(gateway, engine, do)


def test_many_calls_at_once_are_pipelined_over_pooled_connections(
    gateway: GatewayProcess, engine: Any
) -> None:
    async def do(client: FelixClient) -> None:
        await asyncio.gather(*(client.publish("t", "n", f"s{i % 7}", b"x" * i) for i in range(300)))
        await asyncio.gather(*(client.cache_put(f"k{i}", b"%d" % i) for i in range(100)))
        found = await asyncio.gather(*(client.cache_get(f"k{i}") for i in range(100)))
        assert found == [b"%d" % i for i in range(100)]

    use(gateway, engine, do, connections=3, cache_streams=2)


def test_the_cache_keeps_scopes_apart_and_forgets(gateway: GatewayProcess, engine: Any) -> None:
    async def do(client: FelixClient) -> None:
        scope = ("t", "n", "c")
        await client.cache_put("k", b"\x00\xff", scope=scope)
        await client.cache_put("k", b"", ttl=60)
        assert await client.cache_get("k", scope=scope) == b"\x00\xff"
        assert await client.cache_get("k") == b""
        await client.cache_put("k", b"gone", ttl=0)
        assert await client.cache_get("k") is None

    use(gateway, engine, do)


def test_what_the_server_refuses_is_raised_by_its_call(gateway: GatewayProcess, engine: Any) -> None:
    async def do(client: FelixClient) -> None:
        with pytest.raises(NotAllowed, match=r"unauthorized: 'local' may not publish to 'u\.n\.s'"):
            await client.publish("u", "n", "s", b"")
        with pytest.raises(NotAllowed, match="unauthorized"):
            await client.publish_batch("u", "n", "s", [b""])
        with pytest.raises(NotAllowed, match="unauthorized"):
            async with client.subscribe("u", "n", "s"):
                pass
        with pytest.raises(NotAllowed, match="unauthorized"):
            await client.cache_put("k", b"", scope=("u", "n", "c"))
        with pytest.raises(FelixRefused, match="must not be empty"):
            await client.publish("t", "", "s", b"")
        with pytest.raises(ValueError, match="the most is 16777216"):
            await client.publish_batch("t", "n", "s", [bytes(20 << 20)])
        await client.publish("t", "n", "s", b"the others go on")
        await client.publish_batch("u", "n", "s", [b""], binary=True)  # nobody waits for its refusal
        with pytest.raises(NotAllowed):
            await client.flush()
        await client.flush()

    use(gateway, engine, do)


def test_large_messages_arrive(gateway: GatewayProcess, engine: Any) -> None:
    async def do(client: FelixClient) -> None:
        payload = bytes(range(256)) * 300
        async with client.subscribe("t", "n", "large") as events:
            await client.publish("t", "n", "large", payload)
            await client.publish_batch("t", "n", "large", [payload] * 2, binary=True)
            assert await take(events, 3) == [payload] * 3

    use(gateway, engine, do)


def test_leaving_a_subscription_ends_it(gateway: GatewayProcess, engine: Any) -> None:
    def subscriptions() -> int:
        bus = gateway.status()["bus"]
        return int(bus["subscriptions"] - bus["durable"])  # queues have durable ones

    async def do(client: FelixClient) -> None:
        async with client.subscribe("t", "n", "left"):
            pass
        await asyncio.to_thread(gateway.until, lambda: subscriptions() == 0)
        await client.publish("t", "n", "left", b"")

    gateway.until(lambda: subscriptions() == 0)
    use(gateway, engine, do)


def test_a_gateway_that_comes_back_is_found_again(
    engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        gaps: list[int] = []
        with GatewayProcess(tmp_path, f"quic.engine={engine}") as first:
            at = first.places["felix"]
            client = FelixClient(at, engine=engine, timeout=PATIENCE)
            await client.connect()
            async with client.subscribe("t", "n", "s", on_gap=lambda one: gaps.append(one.gaps)) as events:
                await client.publish("t", "n", "s", b"one")
                assert await anext(events) == b"one"
                waiting = asyncio.ensure_future(anext(events))
                assert await asyncio.to_thread(first.stop) == 0
                with GatewayProcess(tmp_path, f"quic.engine={engine}", f"listen.felix.bind={at}"):
                    async with asyncio.timeout(PATIENCE):
                        while not gaps:
                            await asyncio.sleep(0.01)
                        await client.publish("t", "n", "s", b"two")
                        assert await waiting == b"two"
                    assert gaps == [1]
                    assert client.reconnects == 1
                    await client.close()
        told = [record.message for record in caplog.records if record.name == "headrace.clients.felix"]
        assert len(told) == 2
        assert told[0].startswith(f"the connection to {at} was lost: ")
        assert told[0].endswith("; connecting again")
        assert told[1] == f"connected to {at} again"

    asyncio.run(main())


def test_what_is_under_way_when_the_connection_is_lost_raises(engine: Any, tmp_path: Path) -> None:
    async def main() -> None:
        with GatewayProcess(tmp_path, f"quic.engine={engine}") as gateway:
            client = FelixClient(gateway.places["felix"], engine=engine, timeout=PATIENCE)
            await client.connect()
            gateway.kill()
            publishing = asyncio.ensure_future(client.publish("t", "n", "s", b""))
            await asyncio.sleep(0.1)
            link = client._pools[0]._link
            assert link is not None
            link._on_end(0, "test")
            with pytest.raises(ConnectionLost, match="test"):
                await publishing
            client.abort()

    asyncio.run(main())


def test_a_subscription_that_was_not_made_is_not_made_later(gateway: GatewayProcess, engine: Any) -> None:
    async def do(client: FelixClient) -> None:
        link = await client._pools[0].link()
        given_up = client.subscribe("t", "n", "given-up")
        entering = asyncio.create_task(given_up.__aenter__())
        while not link._claims:
            await asyncio.sleep(0)
        link.close(ConnectionLost("the network is gone"))
        with pytest.raises(ConnectionLost):
            await entering
        # A later one finds a new connection, and what was given up is not on it.
        async with client.subscribe("t", "n", "given-up") as events:
            await client.publish("t", "n", "given-up", b"x")
            assert await anext(events) == b"x"
            assert client.reconnects == 1
        await asyncio.sleep(0.3)
        assert (given_up.gaps, list(given_up._events)) == (0, [])

    use(gateway, engine, do)


def test_a_subscription_that_is_lost_right_behind_its_answer_is_made_once_more(
    gateway: GatewayProcess, engine: Any
) -> None:
    async def do(client: FelixClient) -> None:
        async with client.subscribe("t", "n", "twice") as events:
            begin, begun = events._begin, 0

            def lose() -> None:
                link = client._pools[0]._link
                assert link is not None
                link._on_end(0, "test")

            async def begin_and_lose() -> None:
                nonlocal begun
                await begin()
                begun += 1
                if begun == 1:
                    lose()

            events._begin = begin_and_lose  # type: ignore[method-assign]
            lose()
            while not events.gaps:
                await asyncio.sleep(0.01)
            assert begun == 2
            assert client.reconnects == 2
            await client.publish("t", "n", "twice", b"x")
            assert await anext(events) == b"x"
            assert events.gaps == 1

    use(gateway, engine, do)


def test_what_the_system_refuses_is_told(
    engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "no")

    async def main() -> None:
        monkeypatch.setattr(socket.socket, "connect", refuse)
        with pytest.raises(ConnectionFailed, match=r"^cannot connect to 127\.0\.0\.1:1: cannot assign"):
            await FelixClient("127.0.0.1:1", engine=engine).connect()
        missing = tmp_path / "missing.pem"
        client = FelixClient("127.0.0.1:1", engine=engine, certificate=missing, key=missing)
        with pytest.raises(ConnectionFailed, match=r"with these certificates: .*missing\.pem"):
            await client.connect()

    asyncio.run(main())


def test_nobody_there_and_silence_are_told_and_a_closed_client_says_so(engine: Any) -> None:
    async def main() -> None:
        with socket.socket(type=socket.SOCK_DGRAM) as silent:
            silent.bind(("127.0.0.1", 0))
            at = f"127.0.0.1:{silent.getsockname()[1]}"
            client = FelixClient(at, engine=engine, timeout=0.3)
            with pytest.raises(OperationTimeout, match="did not accept a connection"):
                await client.connect()
        with pytest.raises(ConnectionFailed, match=f"cannot connect to {at}: connection refused"):
            await client.connect()
        client.abort()
        with pytest.raises(ClientClosed):
            await client.publish("t", "n", "s", b"")

    asyncio.run(main())


def test_a_certificate_is_verified_where_it_should_be(
    gateway: GatewayProcess, engine: Any, data: Path
) -> None:
    async def do(client: FelixClient) -> None:
        await client.publish("t", "n", "s", b"")

    pem = data / "quic" / "certificate.pem"
    use(gateway, engine, do, authorities=pem)
    use(gateway, engine, do, authorities=pem, server_name="localhost")
    for options in ({"authorities": pem, "server_name": "elsewhere"}, {"verify": True}):
        with pytest.raises(ConnectionFailed):
            use(gateway, engine, do, **options)


def test_a_strict_registry_is_not_found(engine: Any, tmp_path: Path) -> None:
    async def do(client: FelixClient) -> None:
        await client.publish("t", "n", "known", b"")
        with pytest.raises(NotFound):
            await client.publish("t", "n", "unknown", b"")
        with pytest.raises(NotFound):
            await client.cache_get("k", scope=("t", "n", "c"))

    sets = (f"quic.engine={engine}", "listen.felix.strict=true", 'listen.felix.streams=["t/n/known"]')
    with GatewayProcess(tmp_path, *sets) as gateway:
        use(gateway, engine, do)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"address": "unix:/x"}, "nothing to connect to"),
        ({"timeout": 0}, "more than 0 seconds"),
        ({"connections": 0}, "at least one connection"),
        ({"certificate": "x.pem"}, "needs its key"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FelixClient(**{"address": "127.0.0.1:5000", **options})
