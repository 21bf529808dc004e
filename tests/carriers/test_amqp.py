"""The AMQP carrier: the mapping of properties, and a real RabbitMQ between the gateway and a node."""

import asyncio
import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headrace.bus import Bus
from headrace.carriers.amqp import AmqpCarrier, plain, properties_of
from headrace.carriers.carrier import Outgoing
from headrace.clients.zeroctl import ZeroctlClient
from headrace.config.schema import CarrierConfig
from headrace.log import Log, LogReader
from tests.carriers.brokers import Rabbit
from tests.carriers.nodes import PREFIX, UUID, amqp_node
from tests.gateway.gateways import GatewayProcess
from tests.streams import run

# --- properties ---------------------------------------------------------------------------------------------


def test_header_becomes_table_and_properties_as_nodes_have_them() -> None:
    fields = {
        "node-name": "testnode",
        "node-uuid": UUID,
        "ts": 1586721895,
        "sha256": "ab",
        "correlation-id": "c",
        "reply-to": "amq.gen-X",
        "_transport-ttl": "1500",
        "list": [1, {"deep": 1 << 70}],
    }
    made = properties_of(Outgoing("service.jobs.bulk", fields, b'{"cmd":"x"}'))
    assert (made.app_id, made.correlation_id, made.reply_to) == ("testnode", "c", "amq.gen-X")
    assert (made.content_type, int(made.delivery_mode or 0), made.body) == (
        "application/json",
        2,
        b'{"cmd":"x"}',
    )
    at = datetime(2020, 4, 12, 20, 4, 55, tzinfo=UTC)
    assert made.timestamp == at
    assert made.expiration == 1.5
    assert made.headers == {
        "node-uuid": UUID,
        "ts": at,
        "sha256": "ab",
        "_transport-ttl": "1500",
        "list": [1, {"deep": str(1 << 70)}],
    }


def test_time_that_a_table_cannot_hold_exactly_stays_as_it_is() -> None:
    for ts in (1586721895.25, "2020-04-12T22:04:55.123456789+02:00", 1586721895123456):
        made = properties_of(Outgoing("a", {"ts": ts}, b""))
        assert made.headers == {"ts": ts}


def test_table_values_become_json() -> None:
    at = datetime(2020, 4, 12, 20, 4, 55, tzinfo=UTC)
    found = plain({"t": at, "b": b"\xffx", "n": None, "l": [at], "f": 1.5})
    assert found == {"t": 1586721895, "b": "\ufffdx", "n": None, "l": [1586721895], "f": 1.5}


def test_filters_are_bound_to_the_exchange_that_has_their_keys(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", segment_bytes=1 << 18, pool_segments=1)
    bus = Bus(log)
    take = ["event.#", "discovery.node.*", "#"]
    carrier = AmqpCarrier(CarrierConfig(name="a", url="amqp://x", take=take), bus, "gw", "u")
    assert list(carrier.bindings()) == [
        ("events", "event.#"),
        ("discovery", "discovery.node.*"),
        ("discovery", "#"),
        ("events", "#"),
    ]
    assert [carrier.exchange_of(key) for key in ("discovery.node.x", "event.a")] == ["discovery", "events"]
    bus.close()
    log.close()


# --- with a broker ------------------------------------------------------------------------------------------


@pytest.fixture
def broker(rabbit: Rabbit) -> Rabbit:
    return rabbit


def sets(broker: Rabbit, name: str, **more: Any) -> tuple[str, ...]:
    table = {"name": name, "url": broker.url, "prefix": PREFIX, "reconnect_delay": 0.05, **more}
    inside = ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
    return (
        "listen.zeroctl.bind=127.0.0.1:0",
        "log.segment_bytes=16MiB",
        "log.pool_segments=1",
        "log.retention_bytes=96MiB",
        f"carriers=[{{{inside}}}]",
    )


def carrier_of(gateway: GatewayProcess) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gateway.get("/api/nodes")[1])["carriers"][0]
    return {**found, **found["counts"]}


def zeroctl_client(gateway: GatewayProcess) -> ZeroctlClient:
    return ZeroctlClient(gateway.places["zeroctl"], key="dev-key", node="tcp-node", timeout=30.0)


@pytest.mark.needs("rabbitmq-server")
def test_messages_pass_both_ways_without_echo(tmp_path: Path, broker: Rabbit) -> None:
    both = ["event.#", "event.tcp.#"]

    async def main() -> None:
        with GatewayProcess(tmp_path, *sets(broker, "both", take=both, give=both)) as gateway:
            gateway.event("carrier.connected")
            async with (
                zeroctl_client(gateway) as client,
                client.bind("event.#") as messages,
                amqp_node(broker) as peer,
            ):
                await peer.bind("event.#")
                await peer.publish("event.cake", b"in", color="red")
                got = await anext(messages)
                assert (got.key, got.body) == ("event.cake", b"in")
                headers = got.headers
                assert headers["node-name"] == "testnode"
                assert headers["ts"] == 1586721895
                assert (headers["correlation-id"], headers["reply-to"]) == ("c-9", "amq.gen-X")
                assert (headers["color"], headers["_transport-carrier"]) == ("red", "both")
                assert (await peer.inbox.get()).body == b"in"

                await client.publish("event.tcp.out", b"out", {"correlation-id": "c-1"})
                await anext(messages)
                out = await peer.inbox.get()
                assert (out.routing_key, out.body, out.app_id) == ("event.tcp.out", b"out", "tcp-node")
                assert (out.correlation_id, out.content_type) == ("c-1", "application/json")
                assert out.headers["sha256"] == hashlib.sha256(b"out").hexdigest()
                assert "node-name" not in out.headers

                await client.publish("event.last", b"last")
                assert (await anext(messages)).key == "event.last"
                assert (await peer.inbox.get()).routing_key == "event.last"
                await asyncio.to_thread(gateway.until, lambda: carrier_of(gateway)["echoes"] == 2)
                counts = carrier_of(gateway)
                assert (counts["taken"], counts["given"], counts["refused"]) == (1, 2, 0)

    run("asyncio", main)


@pytest.mark.needs("rabbitmq-server")
def test_bad_messages_are_refused_and_unhashed_ones_counted(tmp_path: Path, broker: Rabbit) -> None:
    large = bytes(range(256)) * (4 << 12)

    async def main() -> None:
        with GatewayProcess(tmp_path, *sets(broker, "strict", take=["strict.#"])) as gateway:
            gateway.event("carrier.connected")
            async with (
                zeroctl_client(gateway) as client,
                client.bind("strict.#") as messages,
                amqp_node(broker) as peer,
            ):
                await peer.publish("strict.a", b"wrong", sha256="0" * 64)
                await peer.publish("strict.a", b"nobody", **{"node-uuid": None})
                await peer.publish("strict.a", b"unhashed", sha256=None)
                await peer.publish("strict.a", large)
                first, second = await anext(messages), await anext(messages)
                assert first.body == b"unhashed"
                assert first.headers["sha256"] == hashlib.sha256(b"unhashed").hexdigest()
                assert second.body == large
                counts = carrier_of(gateway)
                assert (counts["refused"], counts["unhashed"], counts["taken"]) == (2, 1, 2)
                reasons = [event["reason"] for event in gateway.named("carrier.refused")]
                assert reasons == ["sha256 is not that of the body", "node-uuid is missing"]

    run("asyncio", main)


@pytest.mark.needs("rabbitmq-server")
def test_discovery_has_its_own_exchange_and_replies_go_to_their_queue(tmp_path: Path, broker: Rabbit) -> None:
    async def main() -> None:
        configured = sets(broker, "disc", take=["discovery.#"], give=["discovery.#", "amq.#"])
        with GatewayProcess(
            tmp_path, *configured, "zeroctl.heartbeat_interval=0.2", "node.name=gw9"
        ) as gateway:
            gateway.event("carrier.connected")
            async with zeroctl_client(gateway) as client, amqp_node(broker) as peer:
                queue = await peer.bind("discovery.#", "discovery")
                beat = await peer.inbox.get()
                assert beat.routing_key == "discovery.node.gw9-headrace"
                assert json.loads(beat.body)["node-name"] == "gw9-headrace"
                body = json.dumps(
                    {"node-name": "a1", "node-uuid": UUID, "hb-interval": 40, "ttl": 120}
                ).encode()
                await peer.publish("discovery.node.a1", body, "discovery")

                def heard() -> bool:
                    nodes = json.loads(gateway.get("/api/nodes")[1])["nodes"]
                    return "a1" in [one["node-name"] for one in nodes]

                await asyncio.to_thread(gateway.until, heard)
                assert queue.startswith("amq.gen-")
                await client.publish(queue, b"reply")
                while (message := await peer.inbox.get()).routing_key != queue:
                    pass
                assert (message.exchange, message.body) == ("", b"reply")

    run("asyncio", main)


@pytest.mark.needs("rabbitmq-server")
def test_nothing_is_lost_while_the_gateway_or_the_connection_is_away(tmp_path: Path, broker: Rabbit) -> None:
    configured = sets(broker, "kept", take=["kept.in"], give=["kept.out"], prefetch=4)

    async def main() -> None:
        async with amqp_node(broker) as peer:
            with GatewayProcess(tmp_path, *configured) as gateway:
                gateway.event("carrier.connected")
                await peer.bind("kept.out")
                for i in range(20):
                    await peer.publish("kept.in", b"%d" % i)
                await asyncio.to_thread(gateway.until, lambda: carrier_of(gateway)["taken"] >= 5)
                gateway.kill()
            for i in range(20, 40):
                await peer.publish("kept.in", b"%d" % i)
            with GatewayProcess(tmp_path, *configured) as gateway:
                gateway.event("carrier.connected")
                async with zeroctl_client(gateway) as client:
                    await client.publish_many("kept.out", [b"%d" % i for i in range(100)])
                got = {(await peer.inbox.get()).body for _ in range(100)}
                assert got == {b"%d" % i for i in range(100)}

                def taken() -> set[bytes]:
                    with LogReader(tmp_path / "log") as reader:
                        return {one.payload for one in reader if one.topic_name == b"kept.in"}

                wanted = {b"%d" % i for i in range(40)}
                await asyncio.to_thread(gateway.until, lambda: taken() == wanted)

    run("asyncio", main)


@pytest.mark.needs("rabbitmq-server")
def test_carrier_comes_back_after_the_broker(tmp_path: Path, broker: Rabbit) -> None:
    """The last test: the broker is killed, and started again."""

    async def main() -> None:
        with GatewayProcess(tmp_path, *sets(broker, "back", give=["back.#"])) as gateway:
            gateway.event("carrier.connected")
            broker.stop()
            gateway.event("carrier.lost")
            async with zeroctl_client(gateway) as client:
                await client.publish("back.a", b"waited")
            await asyncio.to_thread(broker.start)
            await asyncio.to_thread(gateway.until, lambda: carrier_of(gateway)["given"] == 1)
            assert carrier_of(gateway)["connects"] == 2

    run("asyncio", main)
