"""The MQTT carrier: envelopes, names, and a real mosquitto between the gateway and a node."""

import asyncio
import base64
import hashlib
import json
import signal
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.bus import Bus
from headrace.carriers import mqtt
from headrace.carriers.carrier import BadMessage, CarrierLost, Outgoing
from headrace.carriers.mqtt import MqttCarrier, ReadAhead, envelope, opened
from headrace.clients.zeroctl import ZeroctlClient
from headrace.config.schema import CarrierConfig
from headrace.log import Log
from tests.carriers.brokers import Mosquitto
from tests.carriers.nodes import mqtt_node, received
from tests.gateway.gateways import GatewayProcess
from tests.streams import Certificates, make_certificates, run, steady, until

# What a node of the Go library sends.
SAMPLE = (
    b'{"headers":{"node-name":"testnode","node-uuid":"77ab2b23-4f1b-4247-be45-dcc2d93ffb94",'
    b'"sha256":"05ae4d88abed980f1f2eac2ec50bf5613fbc8bfc6f93b7a84f7d040039aa72a6",'
    b'"ts":"2020-04-12T22:04:55.123456789+02:00"},"body":"aGVyZSBpcyBzb21lIGNha2U="}'
)
CAKE = b"here is some cake"

# --- envelopes and names ------------------------------------------------------------------------------------


def test_envelope_of_a_real_node_is_opened() -> None:
    fields, body = opened(SAMPLE)
    assert body == CAKE
    assert fields["node-name"] == "testnode"


def test_envelope_has_reply_to_beside_the_headers() -> None:
    made = json.loads(envelope(Outgoing("a.b", {"node-name": "n", "reply-to": "reply.x"}, b"\xff")))
    assert made == {"headers": {"node-name": "n"}, "body": "/w==", "reply_to": "reply.x"}
    assert opened(json.dumps(made).encode()) == ({"node-name": "n", "reply-to": "reply.x"}, b"\xff")
    older = {"ReplyTo": "", "Headers": {"node-name": "n"}, "Body": None}
    assert opened(json.dumps(older).encode()) == ({"node-name": "n"}, b"")


@pytest.mark.parametrize(
    "payload", [b"", b"\xa8", b"[]", b"{}", b'{"headers":{},"body":"?"}', b'{"headers":{},"body":5}']
)
def test_what_is_no_envelope_is_refused(payload: bytes) -> None:
    with pytest.raises(BadMessage):
        opened(payload)


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    log = Log(tmp_path / "log", segment_bytes=1 << 18, pool_segments=1)
    made = Bus(log)
    yield made
    made.close()
    log.close()


@pytest.mark.parametrize(
    ("key", "topic"),
    [
        ("event.a.b", "z/root/event/a/b"),
        ("discovery.node.web1", "z/root/discovery/node-web1"),
        ("a/b", None),
        ("a.b+", None),
    ],
)
def test_keys_and_topics_map_both_ways(bus: Bus, key: str, topic: str | None) -> None:
    carrier = MqttCarrier(CarrierConfig(name="m", url="mqtt://x", prefix="z/root"), bus, "gw", "u")
    assert carrier.topic_of(key) == topic
    if topic is not None:
        assert carrier.key_of(topic) == key
    assert carrier.key_of("other/event") is None
    assert carrier.key_of("z/root/a.b") is None


def test_filters_become_what_mqtt_can_subscribe_to(bus: Bus) -> None:
    take = ["event.*.x", "service.#.png", "discovery.#", "a"]
    carrier = MqttCarrier(CarrierConfig(name="m", url="mqtt://x", take=take), bus, "gw", "u")
    assert list(carrier.topic_filters()) == [
        "event/+/x",
        "service/#",
        "discovery/+",
        "heartbeat/+",
        "discovery/#",
        "a",
    ]


# --- with a broker ------------------------------------------------------------------------------------------


@pytest.fixture
def broker(mosquitto: Mosquitto) -> Mosquitto:
    return mosquitto


def sets(broker: Mosquitto, **more: Any) -> tuple[str, ...]:
    table = {"name": "field", "url": broker.url, "reconnect_delay": 0.05, **more}
    inside = ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
    return (
        "listen.zeroctl.bind=127.0.0.1:0",
        "log.segment_bytes=1MiB",
        "log.retention_bytes=16MiB",
        f"carriers=[{{{inside}}}]",
    )


def carrier_of(gateway: GatewayProcess) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gateway.get("/api/nodes")[1])["carriers"][0]
    return {**found, **found["counts"]}


def zeroctl_client(gateway: GatewayProcess) -> ZeroctlClient:
    return ZeroctlClient(gateway.places["zeroctl"], key="dev-key", node="tcp-node")


@pytest.mark.needs("mosquitto")
def test_messages_pass_both_ways_without_echo(tmp_path: Path, broker: Mosquitto) -> None:
    both = ["event.#"]

    async def main() -> None:
        with GatewayProcess(tmp_path, *sets(broker, take=both, give=both)) as gateway:
            gateway.event("carrier.connected")
            async with (
                zeroctl_client(gateway) as client,
                client.bind("event.#") as messages,
                mqtt_node(broker, "event/#") as peer,
            ):
                await peer.publish("event/cake/kitchen", SAMPLE, qos=1)
                got = await anext(messages)
                assert (got.key, got.body) == ("event.cake.kitchen", CAKE)
                assert got.headers["node-name"] == "testnode"
                assert got.headers["_transport-carrier"] == "field"
                own = await received(peer)
                assert own.payload == SAMPLE

                await client.publish("event.tcp", b"out", {"reply-to": "reply.here", "_transport-ttl": "5"})
                await anext(messages)
                out = await received(peer)
                assert str(out.topic) == "event/tcp"
                made = json.loads(out.payload)
                assert base64.b64decode(made["body"]) == b"out"
                assert made["reply_to"] == "reply.here"
                assert made["headers"]["_transport-ttl"] == "5"
                assert made["headers"]["sha256"] == hashlib.sha256(b"out").hexdigest()

                # Neither came back: the next message is the next one sent.
                await client.publish("event.last", b"last")
                assert (await anext(messages)).key == "event.last"
                assert str((await received(peer)).topic) == "event/last"
                counts = {"echoes": 2, "taken": 1, "given": 2, "refused": 0}
                await asyncio.to_thread(gateway.until, lambda: carrier_of(gateway).items() >= counts.items())

    run("asyncio", main)


@pytest.mark.needs("mosquitto")
def test_message_without_sha256_is_taken_and_counted_and_a_wrong_one_is_refused(
    tmp_path: Path, broker: Mosquitto
) -> None:
    def changed(**fields: Any) -> bytes:
        made = json.loads(SAMPLE)
        made["headers"] |= fields
        return json.dumps(made).encode()

    async def main() -> None:
        with GatewayProcess(tmp_path, *sets(broker, take=["event.*.ok.#"])) as gateway:
            gateway.event("carrier.connected")
            async with (
                zeroctl_client(gateway) as client,
                client.bind("#") as messages,
                mqtt_node(broker) as peer,
            ):
                for payload in (
                    changed(sha256=""),
                    changed(sha256="0" * 64),
                    changed(**{"node-uuid": 5}),
                    b"no envelope",
                    SAMPLE,
                ):
                    await peer.publish("event/a/ok", payload, qos=1)
                await peer.publish("event/a/b/ok", SAMPLE, qos=1)
                first, second = await anext(messages), await anext(messages)
                digest = hashlib.sha256(CAKE).hexdigest()
                assert [one.headers["sha256"] for one in (first, second)] == [digest, digest]
                await asyncio.to_thread(gateway.until, lambda: carrier_of(gateway)["refused"] == 3)
                assert carrier_of(gateway)["unhashed"] == 1
                reasons = {event["reason"] for event in gateway.named("carrier.refused")}
                assert "sha256 is not that of the body" in reasons

    run("asyncio", main)


@pytest.mark.needs("mosquitto")
def test_gateway_is_discovered_retained_and_its_will_says_that_it_is_gone(
    tmp_path: Path, broker: Mosquitto
) -> None:
    async def main() -> None:
        both = ["discovery.#"]
        heartbeat = "zeroctl.heartbeat_interval=40"
        with GatewayProcess(
            tmp_path, *sets(broker, take=both, give=both), heartbeat, "node.name=gw7"
        ) as gateway:
            gateway.event("carrier.connected")
            await asyncio.to_thread(gateway.until, lambda: carrier_of(gateway)["given"] == 1)
            async with mqtt_node(broker, "discovery/#") as peer:
                message = await received(peer)
                assert (str(message.topic), message.retain) == ("discovery/node-gw7-headrace", True)
                beat = json.loads(base64.b64decode(json.loads(message.payload)["body"]))
                assert (beat["node-name"], beat["ttl"]) == ("gw7-headrace", 120)

                body = json.dumps(
                    {"node-name": "m1", "node-uuid": "ab" * 16, "ts": 1, "hb-interval": 40, "ttl": 120}
                )
                headers = json.loads(SAMPLE)["headers"] | {"sha256": ""}
                made = {"headers": headers, "body": base64.b64encode(body.encode()).decode()}
                await peer.publish("discovery/node-m1", json.dumps(made), qos=1, retain=True)

                def names() -> list[str]:
                    nodes = json.loads(gateway.get("/api/nodes")[1])["nodes"]
                    return [one["node-name"] for one in nodes]

                await asyncio.to_thread(gateway.until, lambda: "m1" in names())
                await peer.publish("discovery/node-m1", b"", qos=1, retain=True)
                await asyncio.to_thread(gateway.until, lambda: "m1" not in names())
                gateway.kill()
                async for message in peer.messages:
                    if str(message.topic) == "discovery/node-gw7-headrace":
                        assert message.payload in (b"", None)
                        break

    run("asyncio", main)


@pytest.mark.needs("mosquitto")
def test_carrier_comes_back_after_the_broker_and_sends_what_waited(tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path / "mosquitto")
    broker.start()

    async def main() -> None:
        with GatewayProcess(tmp_path / "data", *sets(broker, give=["event.#"])) as gateway:
            gateway.event("carrier.connected")
            async with zeroctl_client(gateway) as client:
                broker.stop()
                gateway.event("carrier.lost")
                await client.publish("event.waited", b"waited")
                # The broker forgets everything; whoever listens has to be there first.
                await asyncio.to_thread(broker.start)
                async with mqtt_node(broker, "event/#") as peer:
                    await client.publish("event.after", b"after")
                    seen: set[str] = set()
                    while "event/after" not in seen:
                        seen.add(str((await received(peer)).topic))
                await asyncio.to_thread(gateway.until, lambda: carrier_of(gateway)["given"] == 2)
                assert carrier_of(gateway)["connects"] == 2

    try:
        run("asyncio", main)
    finally:
        broker.stop()


CARRIER = {"name": "here", "reconnect_delay": 0.05}
UUID = "77ab2b23-4f1b-4247-be45-dcc2d93ffb94"


class SlowCarrier(MqttCarrier):
    """Takes nothing before it may go on."""

    def __init__(self, config: CarrierConfig, bus: Bus) -> None:
        super().__init__(config, bus, "gw", UUID)
        self.may_go_on = asyncio.Event()
        self.taken: list[str] = []
        self.ahead: list[int] = []  # messages, each time that one was taken

    async def take(self, key: str, fields: dict[str, Any], body: bytes, done: Any) -> None:
        assert self._client is not None
        await self.may_go_on.wait()
        self.ahead.append(len(self._client.messages))
        self.taken.append(key)
        done()

    def is_full(self) -> bool:
        return self._client is not None and not self.queue.reads.is_set()

    @property
    def queue(self) -> ReadAhead:
        assert self._client is not None
        return cast(ReadAhead, self._client._queue)


async def take_slowly(carrier: SlowCarrier, broker: Mosquitto, qos: int) -> None:
    """Has the carrier's read-ahead filled by 300 messages, and then taken."""
    carrier.start()
    await until(lambda: carrier.connected)
    async with mqtt_node(broker) as node:
        for number in range(300):
            await node.publish(f"slow/{number}", SAMPLE, qos=qos)
    await until(carrier.is_full)
    await steady(lambda: len(carrier.queue._queue))  # type: ignore[attr-defined]
    carrier.may_go_on.set()
    # In time: the answer to a PINGREQ would wake a carrier that sleeps.
    async with asyncio.timeout(mqtt.KEEPALIVE_SECONDS / 2):
        await until(lambda: len(carrier.taken) == 300)
    await carrier.stop()


@pytest.mark.needs("mosquitto")
@pytest.mark.parametrize("qos", [0, 1])
def test_a_broker_is_read_no_further_ahead_than_it_should_and_nothing_is_lost(
    broker: Mosquitto, bus: Bus, qos: int
) -> None:
    async def main() -> None:
        config = CarrierConfig(
            **CARRIER | {"name": f"slow{qos}"}, url=broker.url, take=["slow.#"], prefetch=10
        )
        carrier = SlowCarrier(config, bus)
        await take_slowly(carrier, broker, qos)
        assert carrier.taken == [f"slow.{number}" for number in range(300)]
        assert max(carrier.ahead) <= 30

    run("uvloop", main)


@asynccontextmanager
async def behind_tls(broker: Mosquitto, certificates: Certificates) -> AsyncIterator[int]:
    """The port of what speaks TLS for a broker, and puts many packets into one record."""
    pipes: set[asyncio.Task[None]] = set()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer.transport):
            while data := await reader.read(16384):
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(0.02)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", broker.port)
        for one in (pipe(reader, inner_writer), pipe(inner_reader, writer)):
            pipes.add(asyncio.create_task(one))

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.cert, certificates.key)
    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in pipes:
            task.cancel()
        await asyncio.wait(pipes)


@pytest.mark.needs("mosquitto")
@pytest.mark.parametrize("qos", [0, 1])
def test_a_broker_behind_tls_is_read_to_its_last_message_after_a_rest(
    broker: Mosquitto, bus: Bus, qos: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = make_certificates(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))

    async def main() -> None:
        async with behind_tls(broker, certificates) as port:
            url = f"mqtts://127.0.0.1:{port}"
            config = CarrierConfig(**CARRIER | {"name": f"tls{qos}"}, url=url, take=["slow.#"], prefetch=10)
            carrier = SlowCarrier(config, bus)
            await take_slowly(carrier, broker, qos)
            assert carrier.taken == [f"slow.{number}" for number in range(300)]
            assert carrier.counts["connects"] == 1

    run("uvloop", main)


@pytest.mark.needs("mosquitto")
def test_what_a_broker_has_kept_may_be_more_than_is_read_ahead(broker: Mosquitto, bus: Bus) -> None:
    async def main() -> None:
        config = CarrierConfig(**CARRIER | {"name": "kept"}, url=broker.url, take=["kept.#"], prefetch=1)
        before = SlowCarrier(config, bus)
        before.start()
        await until(lambda: before.connected)
        await before.stop()
        async with mqtt_node(broker) as node:
            for number in range(50):
                await node.publish(f"kept/{number}", SAMPLE, qos=1)
        carrier = SlowCarrier(config, bus)
        carrier.may_go_on.set()
        carrier.start()
        await until(lambda: carrier.connected and len(carrier.taken) == 50)
        await carrier.stop()

    run("uvloop", main)


@pytest.mark.needs("mosquitto")
def test_a_message_is_not_late_because_the_broker_is_not_read(
    broker: Mosquitto, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        config = CarrierConfig(**CARRIER, url=broker.url, take=["rest.#"], prefetch=1)
        carrier = SlowCarrier(config, bus)
        carrier.start()
        await until(lambda: carrier.connected)
        monkeypatch.setattr(mqtt, "CONFIRM_SECONDS", 0.2)
        async with mqtt_node(broker, "out/#") as node:
            sent = asyncio.create_task(carrier.send(Outgoing("out.sent", {}, b"")))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            carrier.queue.rest()
            assert str((await received(node)).topic) == "out/sent"
            waiting = asyncio.create_task(carrier.send(Outgoing("out.waiting", {}, b"")))
            await asyncio.sleep(0.7)
            assert not sent.done()
            assert not waiting.done()
            assert len(node.messages) == 0
            carrier.queue.go_on()
            await sent
            await waiting
            assert str((await received(node)).topic) == "out/waiting"
        assert carrier.counts["losses"] == 0
        await carrier.stop()

    run("uvloop", main)


@pytest.mark.needs("mosquitto")
def test_a_broker_that_confirms_nothing_is_left(
    tmp_path: Path, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(broker: Mosquitto) -> None:
        carrier = SlowCarrier(CarrierConfig(**CARRIER, url=broker.url), bus)
        carrier.start()
        await until(lambda: carrier.connected)
        monkeypatch.setattr(mqtt, "CONFIRM_SECONDS", 0.2)
        assert broker.child is not None
        broker.child.send_signal(signal.SIGSTOP)
        with pytest.raises(CarrierLost, match=r"did not confirm a message within 0\.2 s"):
            await carrier.send(Outgoing("out.lost", {}, b""))
        await carrier.stop()

    with Mosquitto(tmp_path / "mosquitto") as broker:
        run("uvloop", lambda: main(broker))
