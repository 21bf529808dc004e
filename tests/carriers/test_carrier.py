"""What carriers do with messages that the other side cannot have: each is told of and passed by, and those behind it
go on."""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.bus import ANSWERS, Bus
from headrace.carriers.amqp import AmqpCarrier, properties_of
from headrace.carriers.carrier import BadMessage, Carrier, CarrierLost, Outgoing
from headrace.config.schema import CarrierConfig
from headrace.log import Log

UUID = "77ab2b23-4f1b-4247-be45-dcc2d93ffb94"
CONFIG = CarrierConfig(name="far", url="amqp://localhost", take=["#"], give=["event.#"])


class Sink:
    """An exchange that takes everything."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def publish(self, message: Any, key: str, **options: Any) -> None:
        self.bodies.append(message.body)


class Unplugged(AmqpCarrier):
    """A carrier whose broker is a list."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(CONFIG, bus, "gw", UUID)
        self.sink = Sink()

    async def serve(self) -> None:
        self._channel = self.sink  # type: ignore[assignment]
        self._exchanges = dict.fromkeys(("", "events", "discovery"), self.sink)  # type: ignore[arg-type]
        self.ready()
        await asyncio.Event().wait()


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    log = Log(tmp_path / "log", segment_bytes=1 << 20, pool_segments=1)
    made = Bus(log)
    yield made
    made.close()
    log.close()


def header(body: bytes, more: str = "") -> bytes:
    digest = hashlib.sha256(body).hexdigest()
    return f'{{"node-name":"n","node-uuid":"{UUID}","ts":1,"sha256":"{digest}"{more}}}'.encode()


@pytest.mark.parametrize(
    "more",
    [
        ',"digits":' + "1" * 5000,
        ',"wide":"' + "x" * (128 << 10) + '"',
    ],
    ids=["digits", "wide"],
)
def test_a_message_that_the_broker_cannot_have_stops_none_behind_it(bus: Bus, more: str) -> None:
    async def main() -> None:
        carrier = Unplugged(bus)
        carrier.start()
        bus.publish("event.bad", b"bad", headers=header(b"bad", more), protocol=4)
        bus.publish("event.good", b"good", headers=header(b"good"), protocol=4)
        bus.log.sync_now()
        bus.on_safe()
        async with asyncio.timeout(10):
            while not carrier.counts["given"]:
                bus.dispatch()
                await asyncio.sleep(0.01)
        await carrier.stop()
        assert carrier.sink.bodies == [b"good"]
        assert (carrier.counts["refused"], carrier.counts["given"], carrier.counts["connects"]) == (1, 1, 1)

    asyncio.run(main())


def test_a_broker_that_fails_often_gets_the_message_in_the_end(bus: Bus) -> None:
    class Failing(Carrier):
        failures = 0

        async def serve(self) -> None:
            self.ready()
            await asyncio.Event().wait()

        async def send(self, message: Outgoing) -> None:
            self.failures += 1
            if self.failures < 10:
                raise CarrierLost("the broker is gone")

    async def main() -> None:
        config = CarrierConfig(name="far", url="amqp://localhost", give=["#"], reconnect_delay=0.05)
        carrier = Failing(config, bus, "gw", UUID)
        carrier.start()
        bus.publish("event.x", b"x", headers=header(b"x"), protocol=4)
        async with asyncio.timeout(20):
            while not carrier.counts["given"]:
                bus.log.sync_now()
                bus.on_safe()
                bus.dispatch()
                bus.tick()
                await asyncio.sleep(0.01)
        await carrier.stop()
        assert [bus.log.topic_name(one.topic) for one in bus.log.reader()] == [b"event.x"]

    asyncio.run(main())


def test_a_message_that_no_log_takes_is_refused_at_once(bus: Bus) -> None:
    async def main() -> None:
        carrier = AmqpCarrier(CONFIG, bus, "gw", UUID)
        body = bytes(1 << 20)
        fields = json.loads(header(body))
        with pytest.raises(BadMessage, match="larger than"):
            async with asyncio.timeout(10):
                await carrier.take("event.large", fields, body, lambda: None)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "answers"),
    [("reply.1", True), ("amq.gen-X", True), ("cmd.door", False), ("amq.topic", False)],
)
def test_answers_go_where_the_nodes_of_the_broker_could_publish(bus: Bus, path: str, answers: bool) -> None:
    async def main() -> None:
        take = ["service.#", "reply.#"]
        config = CarrierConfig(name="far", url="amqp://localhost", take=take, give=["cmd.#"])
        carrier = AmqpCarrier(config, bus, "gw", UUID)
        carrier.served = ["service.jobs.#"]
        fields = json.loads(header(b"x")) | {"on-start": "reply.1", "on-finish": path}
        if answers:
            await carrier.take("service.jobs.a", fields, b"x", lambda: None)
        else:
            with pytest.raises(
                BadMessage, match=f"would go to '{path}', which is not taken from this broker"
            ):
                await carrier.take("service.jobs.a", fields, b"x", lambda: None)
        await carrier.take("service.other", fields, b"x", lambda: None)
        del fields["on-start"], fields["on-finish"]
        await carrier.take("service.jobs.a", fields, b"x", lambda: None)

    asyncio.run(main())
    marked = [record.flags & ANSWERS for record in bus.log.reader()]
    assert marked == ([ANSWERS, ANSWERS, 0] if answers else [0, 0])


def test_what_no_property_can_hold_stays_in_the_table() -> None:
    fields = {
        "node-name": "n" * 256,
        "correlation-id": "c" * 256,
        "reply-to": "r" * 256,
        "_transport-ttl": "4294967296",
    }
    made = properties_of(Outgoing("event.x", fields, b""))
    assert made.headers == fields
    assert (made.app_id, made.correlation_id, made.reply_to, made.expiration) == (None, None, None, None)
    made = properties_of(Outgoing("event.x", {"correlation-id": 7, "_transport-ttl": 4294967295}, b""))
    assert (made.correlation_id, made.expiration) == ("7", 4294967.295)
