"""zeroctl on AMQP 0-9-1: topic exchanges with a prefix, properties and headers as zeroctl's nodes map them, publisher
confirms, and a durable queue whose messages are acknowledged when they are safe here."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractIncomingMessage

from headrace.bus import Bus
from headrace.carriers.carrier import BadMessage, Carrier, CarrierLost, Outgoing
from headrace.config.schema import CarrierConfig
from headrace.nodes.headers import SECONDS_BELOW, word

DISCOVERY: Final = "discovery"
CONNECT_SECONDS: Final = 10.0
CONFIRM_SECONDS: Final = 30.0
# Replies go through the default exchange to the queue that a request names.
REPLY_QUEUES: Final = "amq.gen-"
# A header is one frame, and brokers take frames of 128 KiB.
LARGEST_HEADER: Final = (128 << 10) - 64
# What a table's integer can hold.
LARGEST_INTEGER: Final = 1 << 63


class AmqpCarrier(Carrier):
    kind = "amqp"

    def __init__(self, config: CarrierConfig, bus: Bus, node_name: str, node_uuid: str) -> None:
        super().__init__(config, bus, node_name, node_uuid)
        self._queue_name = f"{config.prefix}headrace-{word(node_name)}-{config.name}"
        self._channel: AbstractChannel | None = None
        self._exchanges: dict[str, AbstractExchange] = {}
        self._inbox: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
        self._acknowledging: set[asyncio.Task[None]] = set()

    def is_reply(self, key: str) -> bool:
        return key.startswith(REPLY_QUEUES)

    def exchange_of(self, key: str) -> str:
        """The exchange, without its prefix, that a key belongs to."""
        return DISCOVERY if key.partition(".")[0] == DISCOVERY else self.config.exchange

    def bindings(self) -> Iterator[tuple[str, str]]:
        """Exchange and filter for all that is to come in."""
        for filter in self.config.take:
            first = filter.partition(".")[0]
            if first in ("*", "#", DISCOVERY):
                yield DISCOVERY, filter
            if first != DISCOVERY:
                yield self.config.exchange, filter

    async def serve(self) -> None:
        connection = await aio_pika.connect(self.config.url, timeout=CONNECT_SECONDS)
        try:
            lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def on_close(sender: object, error: BaseException | None) -> None:
                if not lost.done():
                    lost.set_exception(
                        CarrierLost(str(error) if error else "the broker closed the connection")
                    )

            connection.close_callbacks.add(on_close)
            channel = await connection.channel(publisher_confirms=True)
            channel.close_callbacks.add(on_close)
            await channel.set_qos(prefetch_count=self.config.prefetch)
            for name in dict.fromkeys((self.config.exchange, DISCOVERY)):
                self._exchanges[name] = await channel.declare_exchange(
                    self.config.prefix + name, aio_pika.ExchangeType.TOPIC, durable=True
                )
            self._exchanges[""] = channel.default_exchange
            self._channel = channel
            self._inbox = asyncio.Queue()
            if self.config.take:
                queue = await channel.declare_queue(self._queue_name, durable=True)
                for name, filter in self.bindings():
                    await queue.bind(self._exchanges[name], filter)
                await queue.consume(self._inbox.put)
            self.ready()
            taking = asyncio.ensure_future(self._take_all())
            try:
                await asyncio.wait([lost, taking], return_when=asyncio.FIRST_COMPLETED)
                for one in (lost, taking):
                    if one.done():
                        one.result()
            finally:
                taking.cancel()
                await asyncio.wait([taking])
                if not lost.done():
                    lost.cancel()
                elif not lost.cancelled():
                    lost.exception()
        finally:
            self._channel = None
            await asyncio.shield(connection.close())

    async def _take_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            message = await self._inbox.get()
            key = message.routing_key or ""
            acknowledging = message

            def done(message: AbstractIncomingMessage = acknowledging) -> None:
                task = loop.create_task(self._acknowledge(message))
                self._acknowledging.add(task)
                task.add_done_callback(self._acknowledging.discard)

            try:
                await self.take(key, fields_of(message), message.body, done)
            except BadMessage as error:
                self.refused(key, error)
                await message.reject(requeue=False)

    async def _acknowledge(self, message: AbstractIncomingMessage) -> None:
        try:
            await message.ack()
        except Exception:  # the connection went: the broker delivers it again
            return

    async def send(self, message: Outgoing) -> None:
        if self._channel is None:
            raise CarrierLost("there is no connection")
        exchange = self._exchanges["" if self.is_reply(message.key) else self.exchange_of(message.key)]
        made = properties_of(message)
        try:
            size = len(made.properties.marshal())
        except Exception as error:  # whatever a table cannot hold
            raise BadMessage(f"its header is not one of AMQP: {error}") from None
        if size > LARGEST_HEADER:
            raise BadMessage(f"its header has {size} bytes in AMQP, the most is {LARGEST_HEADER}")
        await exchange.publish(made, message.key, mandatory=False, timeout=CONFIRM_SECONDS)


def fields_of(message: AbstractIncomingMessage) -> dict[str, Any]:
    """A header as zeroctl has it, from an AMQP message's table and properties."""
    fields = {str(key): plain(value) for key, value in (message.headers or {}).items()}
    moved = {
        "node-name": message.app_id,
        "correlation-id": message.correlation_id,
        "user-id": message.user_id,
        "reply-to": message.reply_to,
        "ts": int(message.timestamp.timestamp()) if message.timestamp is not None else None,
    }
    for key, value in moved.items():
        if value is not None and key not in fields:
            fields[key] = value
    return fields


def plain(value: Any) -> Any:
    """A table's value as JSON can say it."""
    if isinstance(value, datetime):
        return int((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp())
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def properties_of(message: Outgoing) -> aio_pika.Message:
    """An AMQP message: node-name, correlation-id and reply-to are properties if they fit, the rest is in the table."""
    fields = dict(message.fields)
    name, reply_to = (
        fields.pop(key) if is_property(fields.get(key)) else None for key in ("node-name", "reply-to")
    )
    correlation = fields.get("correlation-id")
    if correlation is not None:
        correlation = str(correlation) if is_property(str(correlation)) else None
    if correlation is not None:
        del fields["correlation-id"]
    ts = fields.get("ts")
    timestamp = None
    if isinstance(ts, int) and not isinstance(ts, bool) and 0 <= ts < SECONDS_BELOW:
        timestamp = datetime.fromtimestamp(ts, UTC)
    if timestamp is not None:
        fields["ts"] = timestamp
    return aio_pika.Message(
        message.body,
        headers={key: table_value(value) for key, value in fields.items()},
        content_type="application/json",
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        app_id=name,
        correlation_id=correlation,
        reply_to=reply_to,
        timestamp=timestamp,
        expiration=expiration_of(fields.get("_transport-ttl")),
    )


def is_property(value: Any) -> bool:
    """Whether a property's short string can hold it."""
    return isinstance(value, str) and len(value.encode()) <= 255


def expiration_of(ttl: Any) -> float | None:
    """Milliseconds in seconds, if they are as many as brokers take: others end the channel."""
    text = str(ttl) if isinstance(ttl, str | int) else ""
    if len(text) <= 10 and text.isascii() and text.isdecimal() and int(text) < 1 << 32:
        return int(text) / 1000
    return None


def table_value(value: Any) -> Any:
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and not -LARGEST_INTEGER <= value < LARGEST_INTEGER
    ):
        return str(value)
    if isinstance(value, dict):
        return {key[:128]: table_value(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [table_value(inner) for inner in value]
    return value
