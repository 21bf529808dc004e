"""zeroctl on MQTT 3.1.1: each message is one JSON object with headers and a body in base64, dots and stars of keys are
slashes and pluses of topics, discovery is retained, and a last will says that the gateway is gone."""

import asyncio
import base64
import binascii
import json
import math
import ssl
from collections.abc import Iterator
from typing import Any, Final, cast
from urllib.parse import unquote, urlsplit

import aiomqtt

from headrace.bus import Bus
from headrace.carriers.carrier import BadMessage, Carrier, CarrierLost, Outgoing, together
from headrace.config.schema import CarrierConfig
from headrace.nodes.headers import required, word
from headrace.trie import matches

CONFIRM_SECONDS: Final = 30.0
KEEPALIVE_SECONDS: Final = 30
# How nodes on MQTT write discovery.node.NAME; before 2020 they wrote it the second way.
HEARTBEATS: Final = ("discovery/node-", "heartbeat/node-")
NODE_KEY: Final = "discovery.node."
PORTS: Final = {"mqtt": 1883, "mqtts": 8883}
# The broker keeps a session, and what came meanwhile, under a name of at most so many characters; the standard asks
# for 23, all brokers in use take more.
IDENTIFIER_CHARS: Final = 64
# Payloads that are read ahead of the log, however few messages they are.
READ_AHEAD_BYTES: Final = 16 << 20


class ReadAhead(asyncio.Queue[aiomqtt.Message]):
    """What was read from the broker and not taken yet. While it is full the broker is not read, and the rest waits on
    the way or there: aiomqtt's own bound would throw it away. A broker that has to wait for two keep-alive intervals is
    connected to anew, and has kept what was not acknowledged."""

    def __init__(self, maxsize: int) -> None:
        super().__init__()
        self.client: aiomqtt.Client
        self.reads = asyncio.Event()
        self.reads.set()
        self._most = maxsize
        self._bytes = 0
        self._resting: Any = None  # the socket that is not read
        self._loop = asyncio.get_running_loop()
        self._read_since = self._loop.time()

    @property
    def read_since(self) -> float:
        """When the broker began to be read; now, while it is not."""
        return self._read_since if self.reads.is_set() else self._loop.time()

    def _put(self, item: aiomqtt.Message) -> None:
        super()._put(item)
        self._bytes += size_of(item)
        if self.qsize() >= self._most or self._bytes >= READ_AHEAD_BYTES:
            self.rest()

    def _get(self) -> aiomqtt.Message:
        item: aiomqtt.Message = super()._get()
        self._bytes -= size_of(item)
        if 2 * self.qsize() <= self._most and 2 * self._bytes <= READ_AHEAD_BYTES:
            self.go_on()
        return item

    def rest(self) -> None:
        sock = self.client._client.socket()
        if self._resting is None and sock is not None:
            self._resting = sock
            self.reads.clear()
            self._loop.remove_reader(sock.fileno())

    def go_on(self) -> None:
        if self._resting is not None:
            sock, self._resting = self._resting, None
            self._read_since = self._loop.time()
            self.reads.set()
            descriptor = sock.fileno()
            if descriptor >= 0:  # else it is closed
                self._loop.add_reader(descriptor, self._read)
                self._loop.call_soon(self._read)  # for what a TLS socket has deciphered already

    def _read(self) -> None:
        """What aiomqtt does when there is something to read, until it has to rest. Nothing but the socket tells of what
        TLS has deciphered, and paho may leave some of it."""
        paho = self.client._client
        try:
            deciphered = True
            while deciphered and self._resting is None:
                paho.loop_read()
                sock = paho.socket()
                deciphered = isinstance(sock, ssl.SSLSocket) and sock.pending() > 0
        except Exception as error:  # whatever paho raises: the connection is broken
            if not self.client._disconnected.done():
                self.client._disconnected.set_exception(error)


def size_of(message: aiomqtt.Message) -> int:
    return len(message.payload) if isinstance(message.payload, bytes) else 0


class MqttCarrier(Carrier):
    kind = "mqtt"

    def __init__(self, config: CarrierConfig, bus: Bus, node_name: str, node_uuid: str) -> None:
        super().__init__(config, bus, node_name, node_uuid)
        self._prefix = f"{config.prefix.strip('/')}/" if config.prefix.strip("/") else ""
        self._client: aiomqtt.Client | None = None
        self._will_topic = self.topic_of(f"{NODE_KEY}{word(node_name)}")
        # A name of its own for each carrier of each gateway, and the same after a restart.
        self._identifier = f"hr-{node_uuid.replace('-', '')}-{config.name}"[:IDENTIFIER_CHARS]

    # --- names ----------------------------------------------------------------------------------------------

    def topic_of(self, key: str) -> str | None:
        """A key as a topic; None for one with slashes, or with what has a meaning in MQTT."""
        if "/" in key or "+" in key or "#" in key:
            return None
        if key.startswith(NODE_KEY):
            return f"{self._prefix}{HEARTBEATS[0]}{key.removeprefix(NODE_KEY)}"
        return self._prefix + key.replace(".", "/")

    def key_of(self, topic: str) -> str | None:
        """A topic as a key; None for one that has dots, or another prefix."""
        if not topic.startswith(self._prefix) or "." in topic.removeprefix(self._prefix):
            return None
        name = topic.removeprefix(self._prefix)
        for start in HEARTBEATS:
            if name.startswith(start):
                return NODE_KEY + name.removeprefix(start).replace("/", ".")
        return name.replace("/", ".")

    def topic_filters(self) -> Iterator[str]:
        """What to subscribe to. MQTT has `#` only at the end, so what a filter says behind one is judged here."""
        found: dict[str, None] = {}
        for filter in self.config.take:
            words = filter.split(".")
            if "#" in words:
                words = words[: words.index("#") + 1]
            if matches(filter, "discovery.node.x") or words[:2] == ["discovery", "node"]:
                for start in HEARTBEATS:
                    found[f"{self._prefix}{start.partition('/')[0]}/+"] = None
            found[self._prefix + "/".join("+" if one == "*" else one for one in words)] = None
        yield from found

    # --- the connection -------------------------------------------------------------------------------------

    async def serve(self) -> None:
        place = urlsplit(self.config.url)
        client = aiomqtt.Client(
            place.hostname or "localhost",
            place.port or PORTS[place.scheme],
            username=unquote(place.username) if place.username else None,
            password=unquote(place.password) if place.password else None,
            identifier=self._identifier,
            protocol=aiomqtt.ProtocolVersion.V311,
            clean_session=False,
            keepalive=KEEPALIVE_SECONDS,
            will=aiomqtt.Will(str(self._will_topic), b"", qos=1, retain=True),
            tls_params=aiomqtt.TLSParameters() if place.scheme == "mqtts" else None,
            timeout=CONFIRM_SECONDS,
            queue_type=ReadAhead,
            max_queued_incoming_messages=self.config.prefetch,
        )
        cast(ReadAhead, client._queue).client = client
        # What nodes send with QoS 1 is acknowledged when it is safe here, which aiomqtt has no word for.
        client._client.manual_ack_set(True)
        async with client:
            self._client = client
            try:
                # What the broker has kept comes before its answer to SUBSCRIBE, and may be more than is read ahead.
                await together(self._subscribe(client), self._take_all(client))
            finally:
                self._client = None

    async def _subscribe(self, client: aiomqtt.Client) -> None:
        for filter in self.topic_filters():
            await client.subscribe(filter, qos=1)
        self.ready()

    async def _take_all(self, client: aiomqtt.Client) -> None:
        paho = client._client
        async for message in client.messages:
            mid, qos = message.mid, message.qos
            await self._take_one(message, lambda mid=mid, qos=qos: paho.ack(mid, qos) if qos else None)
        raise CarrierLost("the broker closed the connection")

    async def _take_one(self, message: aiomqtt.Message, done: Any) -> None:
        topic = str(message.topic)
        key = self.key_of(topic)
        if key is None or not any(matches(filter, key) for filter in self.config.take):
            if key is None:
                self.counts["no_counterpart"] += 1
            done()
            return
        payload = (
            message.payload if isinstance(message.payload, bytes) else str(message.payload or "").encode()
        )
        try:
            if not payload:
                if not key.startswith(NODE_KEY) or topic == self._will_topic:
                    done()
                    return
                # How a last will says that its node is gone.
                fields, body = required(self._node_name, self._node_uuid, b""), b""
            else:
                fields, body = opened(payload)
            await self.take(key, fields, body, done)
        except BadMessage as error:
            self.refused(key, error)
            done()

    async def send(self, message: Outgoing) -> None:
        client = self._client
        if client is None:
            raise CarrierLost("there is no connection")
        topic = self.topic_of(message.key)
        if topic is None:
            self.counts["no_counterpart"] += 1
            return
        ahead = cast(ReadAhead, client._queue)
        # The broker's confirmations are among what is not read.
        await ahead.reads.wait()
        retain = message.key.startswith("discovery.")
        publishing = asyncio.ensure_future(
            client.publish(topic, envelope(message), qos=1, retain=retain, timeout=math.inf)
        )
        try:
            await self._confirmed(publishing, ahead)
        except aiomqtt.MqttError as error:
            raise CarrierLost(str(error)) from None
        finally:
            publishing.cancel()

    async def _confirmed(self, publishing: asyncio.Future[None], ahead: ReadAhead) -> None:
        """Waits for the broker's confirmation, in time; the time in which the broker is not read does not count."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while True:
            since = max(begun, ahead.read_since)
            await asyncio.wait([publishing], timeout=since + CONFIRM_SECONDS - loop.time())
            if publishing.done():
                return publishing.result()
            if ahead.read_since <= since:
                raise CarrierLost(f"the broker did not confirm a message within {CONFIRM_SECONDS:g} s")


def opened(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and body of an envelope, with the names of any of its versions."""
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError):
        raise BadMessage("the payload is not a JSON envelope") from None
    if not isinstance(found, dict):
        raise BadMessage("the payload is not a JSON envelope")
    headers = found.get("headers", found.get("Headers"))
    body = found.get("body", found.get("Body"))
    reply_to = found.get("reply_to", found.get("ReplyTo"))
    if not isinstance(headers, dict):
        raise BadMessage("the envelope has no headers")
    if body is not None and not isinstance(body, str):
        raise BadMessage("the envelope's body is not base64")
    try:
        raw = base64.b64decode(body or "", validate=True)
    except (binascii.Error, ValueError):
        raise BadMessage("the envelope's body is not base64") from None
    if isinstance(reply_to, str) and reply_to and "reply-to" not in headers:
        headers["reply-to"] = reply_to
    return headers, raw


def envelope(message: Outgoing) -> bytes:
    fields = dict(message.fields)
    reply_to = fields.pop("reply-to", None)
    made: dict[str, Any] = {"headers": fields, "body": base64.b64encode(message.body).decode()}
    if isinstance(reply_to, str):
        made["reply_to"] = reply_to
    return json.dumps(made).encode()
