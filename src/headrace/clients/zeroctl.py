"""A zeroctl client for asyncio, on Headrace's own carrier: publish, bind, request and provide services, over a
connection that comes back by itself.

    async with ZeroctlClient("127.0.0.1:5700", key="dev-key", node="web1-parser") as client:
        await client.publish("event.parser.web1", b'{"lines": 3}')

        async with client.bind("event.#") as messages:
            async for message in messages:
                print(message.key, message.headers, message.body)

A message is confirmed when the gateway has it safe. It knows nothing of the gateway's insides: what it goes by is
docs/protocols/zeroctl.md.
"""

import asyncio
import hashlib
import itertools
import json
import logging
import secrets
import ssl
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from headrace.clients.errors import (
    ClientClosed,
    ClientError,
    ConnectionFailed,
    ConnectionLost,
    Limit,
    OperationTimeout,
    again,
)
from headrace.clients.reconnect import FIRST_PAUSE, LONGEST_PAUSE, ReconnectingClient
from headrace.clients.zeroctl_link import (
    BadMessage,
    Busy,
    Conflict,
    Link,
    NotAllowed,
    NotOpened,
    Refused,
)
from headrace.nodes.headers import default_uuid, encode_header, required, word
from headrace.nodes.signatures import Signer, public_key, verify
from headrace.wire.zeroctl import (
    NO_LIMIT,
    Condition,
    Delivery,
    Welcome,
    check_key,
    encode_ack,
    encode_bind,
    encode_credit,
    encode_message,
    encode_reject,
    encode_unbind,
)

__all__ = [
    "BadMessage",
    "Binding",
    "Busy",
    "ClientClosed",
    "ClientError",
    "Condition",
    "Conflict",
    "ConnectionFailed",
    "ConnectionLost",
    "Message",
    "NotAllowed",
    "NotOpened",
    "OperationTimeout",
    "Provider",
    "Refused",
    "Request",
    "RequestRefused",
    "Signer",
    "Task",
    "ZeroctlClient",
]

log = logging.getLogger(__name__)

BIND_ACK: Final = 1
BIND_QUEUE: Final = 2
BIND_DURABLE: Final = 4
WANTS_ACK: Final = 1
REDELIVERED: Final = 2


class RequestRefused(ClientError):
    """A provider answered a request with a nak; the text is its reason."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message that was delivered. `raw_header` is its header as it came."""

    key: str
    raw_header: bytes
    body: bytes
    tag: int
    """The same at each delivery; what an acknowledgement names."""
    deliveries: int
    needs_ack: bool

    @property
    def headers(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.raw_header)
        return found

    @property
    def redelivered(self) -> bool:
        return self.deliveries > 1

    def signed_by(self, pubkey: str | Ed25519PublicKey) -> bool:
        """Whether the body was signed with this key, as a `node-pubkey` says it."""
        key = public_key(pubkey) if isinstance(pubkey, str) else pubkey
        return verify(key, self.headers.get("_sec-sig"), self.body)


class _Sent:
    """What waits for its CONFIRM: one message, BIND or UNBIND."""

    __slots__ = ("frame", "losses", "retry", "waiter")

    def __init__(self, frame: bytes, retry: bool, waiter: asyncio.Future[None]) -> None:
        self.frame = frame
        self.losses = 0
        self.retry = retry
        self.waiter = waiter


def give_up(waiters: Iterable[asyncio.Future[None]]) -> None:
    """Nobody waits for these any more: they are not sent again, and their errors are nobody's."""
    for waiter in waiters:
        if not waiter.cancel() and not waiter.cancelled():
            waiter.exception()


class ZeroctlClient(ReconnectingClient[Link]):
    """A node that is a client of one gateway.

    `address` is "host:port", "[v6]:port" or "unix:/path", `key` the API key; without one the gateway has to allow
    anonymous nodes. `node` is the node-name, `node_uuid` its UUID, by default the one that goes with the name. With a
    `signer` every message is signed. `heartbeat` seconds (at most 120) make this a persistent node, which may provide
    services; provide() does that by itself.

    `timeout` is how many seconds any operation may take, waiting for a lost connection included. With `reconnect` a
    lost connection is made again; what it left unconfirmed is sent again once, so it may arrive twice, and bindings are
    made again.
    """

    def __init__(
        self,
        address: str,
        *,
        key: str = "",
        node: str = "headrace-client",
        node_uuid: str | None = None,
        signer: Signer | None = None,
        heartbeat: float = 0,
        tls: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        timeout: float = 10.0,
        reconnect: bool = True,
        reconnect_delay: float = FIRST_PAUSE,
        max_reconnect_delay: float = LONGEST_PAUSE,
    ) -> None:
        super().__init__(
            address,
            tls=tls,
            server_hostname=server_hostname,
            timeout=timeout,
            reconnect=reconnect,
            reconnect_delay=reconnect_delay,
            max_reconnect_delay=max_reconnect_delay,
        )
        if not 0 <= heartbeat <= 120:
            raise ValueError(f"a heartbeat comes every 120 seconds at least, not every {heartbeat}")
        self.node = node
        self.node_uuid = node_uuid or default_uuid(node)
        self.services: dict[str, dict[str, Any]] = {}
        """What the heartbeat says about services, by name."""
        self.damaged = 0
        """Deliveries that were dropped because their sha256 was not that of the body."""
        self.gateway: Welcome | None = None
        """Who answered, and its limits."""
        self._key = key
        self._signer = signer
        self._heartbeat = heartbeat
        self._ids = itertools.count(1)
        self._sent: dict[int, _Sent] = {}  # by id
        self._bindings: dict[int, Binding] = {}
        self._numbers = itertools.count(1)
        self._beating: asyncio.Task[None] | None = None
        self._rebinding: asyncio.Task[None] | None = None
        self._replies: Replies | None = None

    # --- connecting and closing -----------------------------------------------------------------------------

    def _new_link(self) -> Link:
        return Link(self._loop, self, self.address)

    async def _greet(self, link: Link) -> None:
        self.gateway = await link.open(self._key, self.node, self.node_uuid)

    def _is_final(self, error: ClientError) -> bool:
        return isinstance(error, NotOpened)

    async def connect(self) -> None:
        await super().connect()
        if self._heartbeat:
            try:
                await self.beat()
            except BaseException:
                await self._shut(at_once=True)
                raise
            self._beating = asyncio.create_task(self._beat_for_ever())

    async def _shut(self, *, at_once: bool = False) -> None:
        if self._replies is not None:
            await self._replies.close()
        for task in (self._beating, self._rebinding):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await super()._shut(at_once=at_once)

    # --- publishing -----------------------------------------------------------------------------------------

    def header(self, body: bytes, more: Mapping[str, Any] | None = None) -> bytes:
        """The header of a message of this node: the required keys, a signature if there is a signer, and these."""
        fields = required(self.node, self.node_uuid, body)
        if self._signer is not None:
            fields["_sec-sig"] = self._signer.sign(body)
        return encode_header({**fields, **more} if more else fields)

    async def publish(
        self,
        key: str,
        body: bytes,
        headers: Mapping[str, Any] | None = None,
        *,
        confirm: bool = True,
        retry: bool = True,
    ) -> None:
        """Publishes one message. With `confirm` it returns when the gateway has it safe; Refused says why it has not.
        Without, it returns when the message was handed over to be sent."""
        await self.publish_many(key, [body], headers, confirm=confirm, retry=retry)

    async def publish_many(
        self,
        key: str,
        bodies: Iterable[bytes],
        headers: Mapping[str, Any] | None = None,
        *,
        confirm: bool = True,
        retry: bool = True,
    ) -> None:
        """Publishes messages to one key, in order and together, as publish() does with one. If some are refused, the
        first refusal is raised; the others are safe."""
        check_key(key)
        link = await self._ready("publish")
        waiters: list[asyncio.Future[None]] = []
        try:
            for body in bodies:
                id = next(self._ids)
                frame = encode_message(key, self.header(body, headers), body, id, confirm)
                if confirm:
                    waiter: asyncio.Future[None] = self._loop.create_future()
                    self._sent[id] = _Sent(frame, retry, waiter)
                    waiters.append(waiter)
                if link.put(frame):
                    await asyncio.sleep(0)
                    link = await self._ready("publish")
            await self._all(waiters, "publish")
        finally:
            give_up(waiters)

    async def flush(self) -> None:
        """Returns when everything that was sent before has been confirmed or refused."""
        await self._all([sent.waiter for sent in self._sent.values()], "flush")

    async def _all(self, waiters: Sequence[asyncio.Future[None]], doing: str) -> None:
        """Returns when all are answered, and raises the first error among them. It leaves them to whose they are."""
        if not waiters:
            return
        async with Limit(self._timeout, lambda: self._late(doing)):
            await asyncio.wait(waiters)
        for waiter in waiters:
            if not waiter.cancelled():
                waiter.result()

    # --- binding --------------------------------------------------------------------------------------------

    def bind(
        self,
        filter: str,
        *,
        acknowledge: bool = False,
        queue: bool = False,
        durable: bool = False,
        name: str = "",
        conditions: Sequence[tuple[Condition, str, str]] = (),
        prefetch: int = 256,
        auto_ack: bool = True,
    ) -> "Binding":
        """Messages that a filter matches, from now on; to be used as `async with client.bind(...) as messages`.

        With `acknowledge` a message comes again until it is acknowledged: by Binding.ack(), or with `auto_ack` when the
        next one is asked for. `queue` shares the messages among all that bind the same filter under the same `name`.
        `durable` (with a `name`) has the gateway keep the binding, and what it has not acknowledged, while this client
        is away. `conditions` are header values: equal, present or prefix. At most `prefetch` messages are under way.
        """
        return Binding(
            self, filter, acknowledge or durable, queue, durable, name, tuple(conditions), prefetch, auto_ack
        )

    # --- services -------------------------------------------------------------------------------------------

    async def request(
        self,
        key: str,
        body: bytes,
        headers: Mapping[str, Any] | None = None,
        *,
        on_finish: bool = True,
    ) -> "Task":
        """Asks a service for something: returns when a provider has accepted it, with the task that it made of it.
        RequestRefused says why it has not; OperationTimeout that nobody answered."""
        if self._replies is None:
            self._replies = Replies(self)
        await self._replies.open()
        task = self._replies.expect(on_finish)
        paths = {"on-start": f"{task.path}.start"}
        if on_finish:
            paths["on-finish"] = f"{task.path}.finish"
        try:
            await self.publish(key, body, {**(headers or {}), **paths})
            async with Limit(
                self._timeout, f"nobody has answered the request to {key} for {self._timeout:g} s"
            ):
                await task.started
        except BaseException:
            self._replies.forget(task)
            raise
        return task

    def provide(
        self, filter: str, *, name: str, description: str = "", prefetch: int = 16, durable: bool = True
    ) -> "Provider":
        """Requests of a service that this node provides, shared with all others that provide it; to be used as
        `async with client.provide(...) as requests`. The node sends its heartbeat meanwhile."""
        return Provider(self, filter, name, description, prefetch, durable)

    async def beat(self) -> None:
        """Sends one heartbeat."""
        interval = self._heartbeat or 40.0
        beat: dict[str, Any] = {
            "node-name": self.node,
            "node-uuid": self.node_uuid,
            "ts": round(time.time(), 6),
            "hb-interval": interval,
            "ttl": 3 * interval,
            "services": self.services,
        }
        if self._signer is not None:
            beat["node-pubkey"] = self._signer.pubkey
        await self.publish(f"discovery.node.{word(self.node)}", json.dumps(beat).encode())

    async def _beat_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat)
            try:
                await self.beat()
            except ClientError as error:
                if self._end is not None:
                    return
                how = "was refused" if isinstance(error, Refused) else "did not get through"
                log.warning("the heartbeat %s: %s", how, error)

    async def be_persistent(self) -> None:
        """Sends a heartbeat now and from now on."""
        if not self._heartbeat:
            self._heartbeat = 40.0
        await self.beat()
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat_for_ever())

    # --- what a link tells ----------------------------------------------------------------------------------

    def on_confirm(self, first: int, last: int) -> None:
        for id in range(first, last + 1):
            sent = self._sent.pop(id, None)
            if sent is not None and not sent.waiter.done():
                sent.waiter.set_result(None)

    def on_refusal(self, id: int, error: Refused) -> None:
        sent = self._sent.pop(id, None)
        if sent is not None:
            if not sent.waiter.done():
                sent.waiter.set_exception(error)
        elif id == 0 and isinstance(error, NotOpened) and self._connection is not None:
            self._connection.fail(error)
        elif id == 0 and error.code in (403, 410):
            for binding in self._bindings.values():
                if error.text.startswith((f"binding {binding.number} ", f"binding {binding.number}:")):
                    binding.fail(error)
        else:
            log.warning("%s refused: %s", self.address, error)

    def on_delivery(self, delivery: Delivery) -> None:
        binding = self._bindings.get(delivery.binding)
        if binding is None:
            return
        headers = delivery.headers
        if headers.get("sha256") and hashlib.sha256(delivery.body).hexdigest() != headers["sha256"].lower():
            self.damaged += 1
            return
        binding.on_message(
            Message(
                delivery.key,
                delivery.header,
                delivery.body,
                delivery.id,
                delivery.deliveries,
                bool(delivery.flags & WANTS_ACK),
            )
        )

    # --- connections lost and found -------------------------------------------------------------------------

    def _leave(self, link: Link, error: ClientError, carry: bool) -> None:
        if not carry:
            return
        for id, sent in list(self._sent.items()):
            sent.losses += 1
            if not sent.retry or sent.losses > 1:
                del self._sent[id]
                if not sent.waiter.done():
                    sent.waiter.set_exception(ConnectionLost(str(error)))
        for binding in self._bindings.values():
            binding.on_gap()

    def _take_over(self, link: Link) -> None:
        super()._take_over(link)
        self._sent = {id: sent for id, sent in self._sent.items() if not sent.waiter.done()}
        for sent in self._sent.values():
            link.put(sent.frame)
        if self._beating is not None and self._bindings:
            # A gateway that was restarted has to hear of this node before it lets it provide anything.
            self._rebinding = asyncio.ensure_future(self._rebind_after_beat(link))
        else:
            self._rebind(link)

    async def _rebind_after_beat(self, link: Link) -> None:
        try:
            await self.beat()
        except ClientError as error:
            log.warning("the heartbeat did not get through: %s", error)
        if link is self._connection:
            self._rebind(link)

    def _rebind(self, link: Link) -> None:
        for binding in self._bindings.values():
            if binding.link is not None and binding.link is not link:
                self._put_bind(binding, link).add_done_callback(binding.on_rebound)

    def _put_bind(self, binding: "Binding", link: Link) -> asyncio.Future[None]:
        """Sends BIND; the future is of its answer."""
        binding.link = link
        id = next(self._ids)
        return self._put(binding.frame(id), id, link)

    def _finish(self, error: ClientError) -> None:
        super()._finish(error)
        for sent in self._sent.values():
            if not sent.waiter.done():
                sent.waiter.set_exception(again(error))
        self._sent.clear()
        for binding in list(self._bindings.values()):
            binding.fail(error)

    async def _call(self, frame: bytes, id: int, doing: str) -> None:
        """Sends a frame that is answered by its id."""
        await self._answer(self._put(frame, id, await self._ready(doing)), doing)

    async def _answer(self, waiter: asyncio.Future[None], doing: str) -> None:
        try:
            await self._all([waiter], doing)
        finally:
            give_up([waiter])

    def _put(self, frame: bytes, id: int, link: Link) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._sent[id] = _Sent(frame, False, waiter)
        link.put(frame)
        return waiter


class Binding:
    """Messages of one filter. Made by ZeroctlClient.bind()."""

    def __init__(
        self,
        client: ZeroctlClient,
        filter: str,
        acknowledge: bool,
        queue: bool,
        durable: bool,
        name: str,
        conditions: tuple[tuple[Condition, str, str], ...],
        prefetch: int,
        auto_ack: bool,
    ) -> None:
        if prefetch < 1:
            raise ValueError(f"prefetch is 1 or more, not {prefetch}")
        self.filter = filter
        self.number = next(client._numbers)
        self.gaps = 0
        """How often the connection was lost: without `durable` or `queue`, messages may have been missed each time."""
        self.link: Link | None = None
        """The connection that it was asked for on last."""
        self._client = client
        self._flags = (
            (BIND_ACK if acknowledge else 0) | (BIND_QUEUE if queue else 0) | (BIND_DURABLE if durable else 0)
        )
        self._name = name
        self._conditions = conditions
        self._prefetch = prefetch
        self._auto_ack = auto_ack and acknowledge
        self._messages: deque[Message] = deque()
        self._taken = 0  # since credit was last given
        self._last: Message | None = None
        self._error: ClientError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def frame(self, id: int) -> bytes:
        credit = self._prefetch if self._prefetch < NO_LIMIT else NO_LIMIT
        return encode_bind(self.number, self.filter, id, self._flags, credit, self._name, self._conditions)

    async def __aenter__(self) -> Self:
        client = self._client
        doing = f"bind {self.filter!r}"
        self.link = None
        client._bindings[self.number] = self
        try:
            link = await client._ready(doing)
            await client._answer(client._put_bind(self, link), doing)
        except BaseException:
            client._bindings.pop(self.number, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._last is not None and self._auto_ack:
            self.ack(self._last)
        self._client._bindings.pop(self.number, None)
        if self._client._connection is None:
            return
        if self._flags & BIND_DURABLE and not self._flags & BIND_QUEUE:
            return  # it is kept; forget() ends it
        id = next(self._client._ids)
        try:
            await self._client._call(encode_unbind(self.number, id), id, "unbind")
        except ClientError as failure:
            log.debug("cannot unbind %s: %s", self.filter, failure)

    async def forget(self) -> None:
        """Ends a durable binding for good."""
        id = next(self._client._ids)
        self._client._bindings.pop(self.number, None)
        await self._client._call(encode_unbind(self.number, id), id, "unbind")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        if self._last is not None:
            if self._auto_ack:
                self.ack(self._last)
            self._last = None
        while not self._messages:
            if self._error is not None:
                if isinstance(self._error, ClientClosed):
                    raise StopAsyncIteration
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._messages.popleft()
        self._taken += 1
        if self._taken * 2 >= self._prefetch and self._client._connection is not None:
            self._client._connection.put(encode_credit(self.number, self._taken))
            self._taken = 0
        if message.needs_ack:
            self._last = message
        return message

    def ack(self, message: Message) -> None:
        """Says that a message needs no further delivery."""
        if message is self._last:
            self._last = None
        if message.needs_ack and self._client._connection is not None:
            self._client._connection.put(encode_ack(self.number, [message.tag]))

    def reject(self, message: Message, delay: float = 0.0) -> None:
        """Gives a message back, to be delivered again after so many seconds."""
        if message is self._last:
            self._last = None
        if message.needs_ack and self._client._connection is not None:
            self._client._connection.put(encode_reject(self.number, [message.tag], delay=round(delay * 1000)))

    # --- what the client tells ------------------------------------------------------------------------------

    def on_message(self, message: Message) -> None:
        self._messages.append(message)
        self._wake()

    def on_gap(self) -> None:
        self.gaps += 1
        self._taken = 0
        if self._flags & BIND_ACK:
            # What was not acknowledged is delivered again.
            self._messages.clear()
            self._last = None

    def on_rebound(self, waiter: asyncio.Future[None]) -> None:
        if not waiter.cancelled() and isinstance(error := waiter.exception(), Refused):
            self.fail(error)

    def fail(self, error: ClientError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


# --- requests -----------------------------------------------------------------------------------------------


class Task:
    """A request that a provider has accepted."""

    def __init__(self, replies: "Replies", path: str, on_finish: bool) -> None:
        loop = asyncio.get_running_loop()
        self.path = path
        self.id = ""
        """What the provider calls it."""
        self.will_finish = on_finish
        """Whether the provider tells when it is done: with `no-on-finish` it does not."""
        self.started: asyncio.Future[None] = loop.create_future()
        self._done: asyncio.Future[Message] = loop.create_future()
        self._replies = replies

    async def finished(self) -> Message:
        """The provider's last answer, however long it takes. RequestRefused says why the task failed."""
        if not self.will_finish:
            raise RequestRefused(f"the provider of task {self.id} does not tell when it is done")
        return await asyncio.shield(self._done)

    def on_answer(self, kind: str, message: Message) -> bool:
        """Whether it is over."""
        headers = message.headers
        task = headers.get("task-id")
        if isinstance(task, str):
            self.id = task
        error = RequestRefused(str(headers.get("reason", "no reason"))) if headers.get("nak") else None
        if kind == "start" and not self.started.done():
            if error is not None:
                self.started.set_exception(error)
                return True
            if headers.get("no-on-finish"):
                self.will_finish = False
            self.started.set_result(None)
            return not self.will_finish
        if kind == "finish" and not self._done.done():
            if not self.started.done():
                self.started.set_result(None)
            if error is not None:
                self._done.set_exception(error)
                self._done.exception()  # seen, also if nobody asks
            else:
                self._done.set_result(message)
            return True
        return False


class Replies:
    """Where the answers to a client's requests come to."""

    def __init__(self, client: ZeroctlClient) -> None:
        self._base = f"reply.{word(client.node)}.{secrets.token_hex(8)}"
        check_key(f"{self._base}.4294967295.finish")
        self._binding = client.bind(f"{self._base}.#", acknowledge=True)
        self._numbers = itertools.count(1)
        self._tasks: dict[str, Task] = {}
        self._reading: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        async with self._opening:
            if self._reading is None:
                await self._binding.__aenter__()
                self._reading = asyncio.create_task(self._read())

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
            await self._binding.__aexit__(None, None, None)

    def expect(self, on_finish: bool) -> Task:
        number = str(next(self._numbers))
        self._tasks[number] = task = Task(self, f"{self._base}.{number}", on_finish)
        return task

    def forget(self, task: Task) -> None:
        self._tasks.pop(task.path.rpartition(".")[2], None)

    async def _read(self) -> None:
        async for message in self._binding:
            *_, number, kind = message.key.split(".")
            task = self._tasks.get(number)
            if task is not None and task.on_answer(kind, message):
                self.forget(task)


# --- providers ----------------------------------------------------------------------------------------------


class Request:
    """A request to a service: to be accepted or refused, and finished."""

    def __init__(self, provider: "Provider", message: Message) -> None:
        self.message = message
        self.headers = message.headers
        self.task_id = f"{word(str(self.headers['node-name']))}.{uuid.uuid4()}"
        self._provider = provider

    @property
    def key(self) -> str:
        return self.message.key

    @property
    def body(self) -> bytes:
        return self.message.body

    async def accept(self, *, will_finish: bool = True) -> str:
        """Tells the client that the work begins, and under which name; `will_finish` whether finish() will be told."""
        more = {} if will_finish or "on-finish" not in self.headers else {"no-on-finish": 1}
        await self._answer("on-start", {"ack": 1, "task-id": self.task_id, **more})
        return self.task_id

    async def refuse(self, reason: str) -> None:
        """Tells the client that nothing will be done, and why. The request is over."""
        await self._answer("on-start", {"nak": 1, "reason": reason})
        self._provider.done(self.message)

    async def finish(self, body: bytes = b"", *, failed: str = "") -> None:
        """Tells the client that the work is done, or why it `failed`. The request is over."""
        said: dict[str, Any] = {"nak": 1, "reason": failed} if failed else {"ack": 1}
        await self._answer("on-finish", {**said, "task-id": self.task_id}, body)
        self._provider.done(self.message)

    async def _answer(self, path: str, said: dict[str, Any], body: bytes = b"") -> None:
        where = self.headers.get(path)
        if not isinstance(where, str):
            return
        if "correlation-id" in self.headers:
            said["correlation-id"] = self.headers["correlation-id"]
        await self._provider.client.publish(where, body, said)


class Provider:
    """Requests of one service. Made by ZeroctlClient.provide()."""

    def __init__(
        self, client: ZeroctlClient, filter: str, name: str, description: str, prefetch: int, durable: bool
    ) -> None:
        self.client = client
        self.name = name
        self._described = {"path": filter, "description": description}
        self._binding = client.bind(
            filter, acknowledge=True, queue=True, durable=durable, prefetch=prefetch, auto_ack=False
        )

    async def __aenter__(self) -> Self:
        self.client.services[self.name] = self._described
        await self.client.be_persistent()
        await self._binding.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.services.pop(self.name, None)
        await self._binding.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Request:
        return Request(self, await self._binding.__anext__())

    def done(self, message: Message) -> None:
        self._binding.ack(message)
