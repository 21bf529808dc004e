"""What both carriers are: zeroctl messages between a broker and the bus, at least once in both directions, without
echo, over a connection that is made again. It knows no broker's protocol.

A message that came from a carrier says so in the log (`_transport-carrier`), and does not go back there. One that goes
out says which gateways it has passed (`_transport-via`), so that it is not taken in again, however filters overlap.
"""

import asyncio
import hashlib
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace import events, limits
from headrace.bus import Bus, Received
from headrace.config.schema import CarrierConfig
from headrace.errors import BusError, HeadraceError, LogError, LogFailed, LogFull
from headrace.nodes.durable import ZEROCTL, drop_others, durable_member
from headrace.nodes.headers import encode_header, foreign_header
from headrace.trie import matches
from headrace.wake import CallbackWaker
from headrace.wire.zeroctl import HeaderError, escape, header_sha256, is_key_text, unescape

BATCH: Final = 64  # messages that wait for the broker's confirmation at once
RETRY_SECONDS: Final = 0.2
VIA: Final = "_transport-via"
CARRIER: Final = "_transport-carrier"
VIA_CHARS: Final = 1024  # some 27 gateways

log = events.get("carrier")


class CarrierError(HeadraceError):
    """A broker cannot be reached, or refuses."""


class CarrierLost(CarrierError):
    """The connection to a broker ended."""


class BadMessage(CarrierError):
    """A node's message that the protocol does not allow, or that the far side's cannot say."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for the broker's nodes."""

    key: str
    fields: dict[str, Any]
    body: bytes


class Carrier(ABC):
    """One entry of [[carriers]]. A broker's own part is serve() and send()."""

    kind = ""

    def __init__(self, config: CarrierConfig, bus: Bus, node_name: str, node_uuid: str) -> None:
        self.config = config
        self.connected = False
        self.counts = dict.fromkeys(
            (
                "taken",
                "given",
                "refused",
                "unhashed",
                "echoes",
                "no_counterpart",
                "connects",
                "losses",
            ),
            0,
        )
        self._bus = bus
        self._node_name = node_name
        self._node_uuid = node_uuid
        self.served: Sequence[str] = ()
        """Filters of the requests that the gateway's own services take."""
        self._unsafe: deque[tuple[int, Callable[[], object]]] = deque()  # offset, what to do when it is safe
        self._work = asyncio.Event()
        owner = f"carrier:{config.name}"
        self._members = [
            durable_member(bus, filter, owner, CallbackWaker(self._work.set)) for filter in config.give
        ]
        self._task: asyncio.Task[None] | None = None

    # --- what a broker's carrier does -----------------------------------------------------------------------

    @abstractmethod
    async def serve(self) -> None:
        """Connects, calls ready(), and takes messages in until the connection ends, which raises."""

    @abstractmethod
    async def send(self, message: Outgoing) -> None:
        """Returns when the broker has taken it. BadMessage says why it never can."""

    def is_reply(self, key: str) -> bool:
        """Whether a key leads nowhere but to one node of this broker."""
        return False

    # --- its life -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"carrier-{self.config.name}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            try:
                await together(self.serve(), self._give())
            except asyncio.CancelledError:
                raise
            except Exception as error:  # whatever a broker or its library does: the gateway goes on
                log.limited(
                    "carrier.lost" if self.connected else "carrier.unreachable",
                    key=self.config.name,
                    carrier=self.config.name,
                    reason=str(error) or type(error).__name__,
                )
            finally:
                self.counts["losses"] += self.connected
                self.connected = False
                self._unsafe.clear()  # the broker sends again what was not acknowledged
            await asyncio.sleep(self.config.reconnect_delay)

    def ready(self) -> None:
        """The broker has let us in."""
        self.connected = True
        self.counts["connects"] += 1
        log.info("carrier.connected", carrier=self.config.name, kind=self.kind)
        self._work.set()

    # --- from the broker ------------------------------------------------------------------------------------

    async def take(self, key: str, fields: dict[str, Any], body: bytes, done: Callable[[], object]) -> None:
        """Publishes a node's message on the bus; `done` is called when it is safe, or not to be taken. BadMessage says
        what is wrong with it."""
        if not is_key_text(key):
            self.counts["no_counterpart"] += 1
            done()
            return
        if self._node_uuid in str(fields.get(VIA, "")).split(","):
            self.counts["echoes"] += 1
            done()
            return
        header = await self._judged(fields, body)
        paths = [fields[name] for name in ("on-start", "on-finish") if name in fields]
        wrong = [path for path in paths if not self._may_answer(path)]
        if wrong and any(matches(filter, key) for filter in self.served):
            raise BadMessage(f"its answer would go to {wrong[0]!r}, which is not taken from this broker")
        while True:
            try:
                offset = self._bus.publish(
                    key,
                    body,
                    headers=header,
                    protocol=ZEROCTL,
                    confirmed=True,
                    answers=bool(paths) and not wrong,
                )
                break
            except LogError as error:
                if not isinstance(error, LogFull | LogFailed) and not self._bus.closed:
                    raise BadMessage(str(error)) from None  # it is larger than any that the log takes
                # The broker waits with what it has not been told of.
                log.limited(
                    "carrier.waits", key=self.config.name, carrier=self.config.name, reason=str(error)
                )
                await asyncio.sleep(RETRY_SECONDS)
            except BusError as error:
                raise BadMessage(str(error)) from None
        self.counts["taken"] += 1
        self._unsafe.append((offset, done))
        self._bus.log.request_sync()
        self.on_safe()

    async def _judged(self, fields: dict[str, Any], body: bytes) -> bytes:
        """The header as the log gets it."""
        own: dict[str, Any] = {CARRIER: self.config.name}
        via = fields.get(VIA)
        if isinstance(via, str) and len(via) <= VIA_CHARS:
            own[VIA] = via
        passed = {key: value for key, value in fields.items() if key not in own and key != VIA}
        try:
            header = escape(encode_header(passed))
            stated = header_sha256(header, lenient=True)
        except (HeaderError, TypeError, ValueError, RecursionError) as error:
            raise BadMessage(str(error)) from None
        if len(body) > limits.ZEROCTL_HASH_INLINE:
            digest = await asyncio.to_thread(lambda: hashlib.sha256(body).digest())
        else:
            digest = hashlib.sha256(body).digest()
        if stated is None:
            # Real nodes leave it out, or empty; whoever gets the message shall have one.
            self.counts["unhashed"] += 1
            own["sha256"] = digest.hex()
        elif stated != digest:
            raise BadMessage("sha256 is not that of the body")
        return encode_header({**json.loads(header), **own})

    def _may_answer(self, path: str) -> bool:
        """Whether a node of the broker may have answers sent there: what it could publish there itself, it may."""
        return self.is_reply(path) or any(matches(filter, path) for filter in self.config.take)

    def refused(self, key: str, error: BadMessage) -> None:
        self.counts["refused"] += 1
        log.limited(
            "carrier.refused",
            key=self.config.name,
            carrier=self.config.name,
            routing_key=key,
            reason=str(error),
        )

    def on_safe(self) -> None:
        """The log's safe end may have moved: what is safe is acknowledged."""
        safe = self._bus.log.safe
        while self._unsafe and self._unsafe[0][0] < safe:
            _, done = self._unsafe.popleft()
            done()

    # --- to the broker --------------------------------------------------------------------------------------

    async def _give(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            if not self.connected:
                continue
            for number, member in enumerate(self._members):
                while batch := self._next_batch(number):
                    results = await asyncio.gather(
                        *(self.send(outgoing) for _, outgoing in batch), return_exceptions=True
                    )
                    for (tag, outgoing), result in zip(batch, results, strict=True):
                        if result is None:
                            member.subscription.ack(tag)
                            self.counts["given"] += 1
                        elif isinstance(result, BadMessage):
                            member.subscription.ack(tag)
                            self.refused(outgoing.key, result)
                        else:
                            member.subscription.reject(tag, delay=RETRY_SECONDS)
                    for result in results:
                        if isinstance(result, BaseException) and not isinstance(result, BadMessage):
                            raise result

    def _next_batch(self, number: int) -> list[tuple[int, Outgoing]]:
        member = self._members[number]
        batch: list[tuple[int, Outgoing]] = []
        while len(batch) < BATCH and (received := member.receive()) is not None:
            try:
                outgoing = self._outgoing(received, number)
            except BadMessage as error:
                self.refused(received.topic.decode("utf-8", "replace"), error)
                outgoing = None
            if outgoing is None:
                member.subscription.ack(received.tag)
            else:
                batch.append((received.tag, outgoing))
        return batch

    def _outgoing(self, received: Received, number: int) -> Outgoing | None:
        key = received.topic.decode("utf-8", "replace")
        if not is_key_text(received.topic):
            self.counts["no_counterpart"] += 1
            return None
        if any(matches(earlier, key) for earlier in self.config.give[:number]):
            return None  # it went out by that filter
        header = received.headers
        if received.protocol != ZEROCTL:
            header = foreign_header(
                self._node_name, self._node_uuid, header, received.payload, received.protocol, received.time
            )
        try:
            fields: dict[str, Any] = json.loads(unescape(header)) if header else {}
        except (HeaderError, ValueError, RecursionError) as error:
            raise BadMessage(f"its header cannot be said there: {error}") from None
        if fields.get(CARRIER) == self.config.name:
            return None
        via = [uuid for uuid in str(fields.get(VIA, "")).split(",") if uuid]
        fields[VIA] = ",".join([*via, self._node_uuid])
        fields.pop(CARRIER, None)
        return Outgoing(key, fields, received.payload)


async def together(*parts: Coroutine[Any, Any, None]) -> None:
    """Runs these until all are over or one of them fails, which ends the others; its error is raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    if errors:
        raise errors[0]


class Carriers:
    """All carriers of a gateway."""

    def __init__(
        self,
        configs: list[CarrierConfig],
        bus: Bus,
        node_name: str,
        node_uuid: str,
        served: Sequence[str] = (),
    ) -> None:
        drop_others(
            bus, "carrier:", {(f"carrier:{one.name}", filter) for one in configs for filter in one.give}
        )
        self._carriers = [make_carrier(config, bus, node_name, node_uuid) for config in configs]
        for carrier in self._carriers:
            carrier.served = served

    def start(self) -> None:
        for carrier in self._carriers:
            carrier.start()

    def on_safe(self) -> None:
        for carrier in self._carriers:
            carrier.on_safe()

    async def stop(self) -> None:
        for carrier in self._carriers:
            await carrier.stop()

    def __iter__(self) -> Iterator[Carrier]:
        return iter(self._carriers)


def make_carrier(config: CarrierConfig, bus: Bus, node_name: str, node_uuid: str) -> Carrier:
    """The carrier that speaks what the URL says; its library is an extra of this package."""
    scheme = config.url.partition("://")[0]
    extra = "amqp" if scheme.startswith("amqp") else "mqtt"
    try:
        if extra == "amqp":
            from headrace.carriers.amqp import AmqpCarrier

            return AmqpCarrier(config, bus, node_name, node_uuid)
        from headrace.carriers.mqtt import MqttCarrier

        return MqttCarrier(config, bus, node_name, node_uuid)
    except ImportError as error:
        raise CarrierError(
            f"carriers: {config.name} needs what is not installed: pip install 'headrace[{extra}]' ({error})"
        ) from None
