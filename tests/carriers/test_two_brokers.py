"""One gateway between two brokers, each of which gets everything of the other: a message passes once, and nothing goes
round in a circle."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import aiomqtt
import pytest

from headrace.clients.blipmq import BlipmqClient
from headrace.log import LogReader
from tests.carriers.brokers import Mosquitto, Rabbit
from tests.carriers.nodes import PREFIX, UUID, AmqpNode, amqp_node, mqtt_node, received
from tests.gateway.gateways import GatewayProcess
from tests.streams import run

ALL = ["event.#"]


def carriers(rabbit: Rabbit, mosquitto: Mosquitto) -> str:
    both = f"take = {json.dumps(ALL)}, give = {json.dumps(ALL)}, reconnect_delay = 0.05"
    left = f'{{name = "left", url = "{rabbit.url}", prefix = "{PREFIX}", {both}}}'
    right = f'{{name = "right", url = "{mosquitto.url}", {both}}}'
    return f"carriers=[{left}, {right}]"


def counts(gateway: GatewayProcess) -> dict[str, dict[str, int]]:
    found = json.loads(gateway.get("/api/nodes")[1])["carriers"]
    return {one["name"]: one["counts"] for one in found}


def topics_of(data: Path) -> list[str]:
    """Of all messages in the log, in order."""
    found = []
    with LogReader(data / "log") as reader:
        while (record := reader.read()) is not None:
            if record.topic_name.startswith(b"event."):
                found.append(record.topic_name.decode())
    return found


def envelope(body: bytes) -> bytes:
    headers = {"node-name": "field", "node-uuid": UUID, "ts": 1586721895}
    return json.dumps({"headers": headers, "body": base64.b64encode(body).decode()}).encode()


async def hear_left(peer: AmqpNode, count: int) -> list[tuple[str | None, bytes]]:
    messages = [await peer.inbox.get() for _ in range(count)]
    return [(one.routing_key, one.body) for one in messages]


async def hear_right(peer: aiomqtt.Client, count: int) -> list[tuple[str, bytes]]:
    found = []
    for _ in range(count):
        message = await received(peer)
        made: dict[str, Any] = json.loads(message.payload)
        found.append((str(message.topic).replace("/", "."), base64.b64decode(made["body"])))
    return found


@pytest.mark.needs("rabbitmq-server", "mosquitto")
def test_message_of_one_broker_passes_to_the_other_once_and_never_comes_back(
    tmp_path: Path, rabbit: Rabbit, mosquitto: Mosquitto
) -> None:
    data = tmp_path / "data"

    async def main() -> None:
        with GatewayProcess(
            data,
            "log.segment_bytes=1MiB",
            "log.retention_bytes=16MiB",
            carriers(rabbit, mosquitto),
        ) as gateway:
            await asyncio.to_thread(gateway.until, lambda: len(gateway.named("carrier.connected")) == 2)
            client = BlipmqClient(gateway.places["blipmq"], key="dev-key")
            async with (
                asyncio.timeout(60),
                client,
                client.subscribe("event.left", 1, auto_ack=True) as messages,
                amqp_node(rabbit) as left,
                mqtt_node(mosquitto, "event/#") as right,
            ):
                await left.bind("event.#")
                await left.publish("event.left", b"from the left")
                # By the way of the bus it reaches another protocol, whose answer is a message of its own.
                assert (await anext(messages)).payload == b"from the left"
                assert await hear_left(left, 1) == [("event.left", b"from the left")]
                assert await hear_right(right, 1) == [("event.left", b"from the left")]
                await client.publish_many("event.again", [b"from the left"], 1)
                assert await hear_left(left, 1) == [("event.again", b"from the left")]
                assert await hear_right(right, 1) == [("event.again", b"from the left")]

                await right.publish("event/right", envelope(b"from the right"), qos=1)
                assert await hear_left(left, 1) == [("event.right", b"from the right")]
                assert await hear_right(right, 1) == [("event.right", b"from the right")]

                # Each broker tells the gateway what that has given it, and what is known from there is not taken again.
                await asyncio.to_thread(
                    gateway.until, lambda: [one["echoes"] for one in counts(gateway).values()] == [2, 2]
                )
                for name in ("left", "right"):
                    found = counts(gateway)[name]
                    assert (found["taken"], found["given"], found["refused"]) == (1, 2, 0), name

                # Whatever had gone round would be before the last.
                await client.publish_many("event.last", [b"last"], 1)
                assert await hear_left(left, 1) == [("event.last", b"last")]
                assert await hear_right(right, 1) == [("event.last", b"last")]
            assert topics_of(data) == ["event.left", "event.again", "event.right", "event.last"]

    run("asyncio", main)
