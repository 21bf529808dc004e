"""Clients of a broker as zeroctl's nodes are. They know nothing of the gateway."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import aio_pika
import aiomqtt
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from tests.carriers.brokers import Mosquitto, Rabbit

UUID = "77ab2b23-4f1b-4247-be45-dcc2d93ffb94"
PREFIX = "zctl"


class AmqpNode:
    """A client of the broker as zeroctl's nodes are."""

    def __init__(self, channel: AbstractChannel) -> None:
        self.channel = channel
        self.inbox: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()

    async def bind(self, filter: str, exchange: str = "events") -> str:
        source = await self.channel.declare_exchange(
            PREFIX + exchange, aio_pika.ExchangeType.TOPIC, durable=True
        )
        queue = await self.channel.declare_queue(exclusive=True)
        await queue.bind(source, filter)
        await queue.consume(self.inbox.put, no_ack=True)
        return queue.name

    async def publish(self, key: str, body: bytes, exchange: str = "events", **changes: Any) -> None:
        source = await self.channel.get_exchange(PREFIX + exchange)
        headers: dict[str, Any] = {
            "node-uuid": UUID,
            "sha256": hashlib.sha256(body).hexdigest(),
            "ts": datetime(2020, 4, 12, 20, 4, 55, tzinfo=UTC),
            **changes,
        }
        message = aio_pika.Message(
            body,
            headers={name: value for name, value in headers.items() if value is not None},
            content_type="application/json",
            app_id="testnode",
            correlation_id="c-9",
            reply_to="amq.gen-X",
        )
        await source.publish(message, key)


@asynccontextmanager
async def amqp_node(broker: Rabbit) -> AsyncIterator[AmqpNode]:
    async with await aio_pika.connect(broker.url) as connection:
        yield AmqpNode(await connection.channel(publisher_confirms=True))


@asynccontextmanager
async def mqtt_node(broker: Mosquitto, *topics: str) -> AsyncIterator[aiomqtt.Client]:
    """A client of the broker as zeroctl's nodes are."""
    async with aiomqtt.Client("127.0.0.1", broker.port, protocol=aiomqtt.ProtocolVersion.V311) as client:
        for topic in topics:
            await client.subscribe(topic, qos=1)
        yield client


async def received(client: aiomqtt.Client) -> aiomqtt.Message:
    async for message in client.messages:
        return message
    raise AssertionError
