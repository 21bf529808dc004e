"""A Felix client for asyncio, over QUIC: publish, subscribe, cache.

    async with FelixClient("127.0.0.1:5000") as client:
        await client.publish("t1", "default", "demo", b"hello")

        async with client.subscribe("t1", "default", "demo") as events:
            async for payload in events:
                print(payload)

        await client.cache_put("key", b"value", ttl=60)
        print(await client.cache_get("key"))

Everything is pipelined over a few pooled streams: no call waits for another's answer. What is published to one stream
goes over one QUIC stream, so it stays in order. It speaks the dialect of the protocol's reference, with numeric ids,
and reads both; it knows nothing of the gateway's insides.
"""

import asyncio
import contextlib
import importlib.util
import ipaddress
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

from typing_extensions import Buffer

from headrace.clients.errors import (
    ClientClosed,
    ClientError,
    ConnectionFailed,
    ConnectionLost,
    Limit,
    OperationTimeout,
    ProtocolError,
    again,
)
from headrace.clients.felix_link import FelixLink, FelixRefused, NotAllowed, NotFound, Requests
from headrace.clients.reconnect import Backoff
from headrace.config.addresses import HostPort, parse_address
from headrace.quic.engine import Identity, Settings, Trust, load_engine
from headrace.wire import felix as wire
from headrace.wire import felix_json as messages

__all__ = [
    "ClientClosed",
    "ClientError",
    "ConnectionFailed",
    "ConnectionLost",
    "FelixClient",
    "FelixRefused",
    "NotAllowed",
    "NotFound",
    "OperationTimeout",
    "ProtocolError",
    "Subscription",
]

log = logging.getLogger(__name__)

Scope = tuple[str, str, str]
EngineName = Literal["auto", "aioquic", "qh3"]

# Bytes of events that may wait for a slow consumer; beyond it the connection is not read.
MOST_WAITING: Final = 16 << 20


class FelixClient:
    """A client of one Felix server.

    `address` is "host:port" or "[v6]:port". A server's certificate has to be signed by, or be, one of `authorities` (a
    PEM file; by default those of the system) and name `server_name` (by default the host). With `verify` None, which is
    the default, a server on this machine's loopback is taken at its word unless `authorities` are given. `certificate`
    and `key` (PEM files) are what is shown to a server that asks.

    `connections` is how many QUIC connections there are, each made when it is first needed, and made again when it was
    lost; `cache_streams` is how many streams of each are for the cache. `timeout` is how many seconds any operation may
    take; a subscription waits for events without a limit.

    `engine` is the QUIC implementation: "auto" takes qh3 where it is installed. `on_refusal` is called for each error
    of the server that nobody waits for.
    """

    def __init__(
        self,
        address: str,
        *,
        authorities: str | Path | None = None,
        verify: bool | None = None,
        server_name: str | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        alpn: list[str] | None = None,
        engine: EngineName = "auto",
        settings: Settings | None = None,
        connections: int = 1,
        cache_streams: int = 2,
        keep_alive: float = 10.0,
        timeout: float = 10.0,
        on_refusal: Callable[[FelixRefused], None] | None = None,
    ) -> None:
        place = parse_address(address)
        if not isinstance(place, HostPort):
            raise ValueError(f'"{address}" is nothing to connect to with QUIC; it is "host:port"')
        if timeout <= 0:
            raise ValueError(f"a timeout is more than 0 seconds, not {timeout}")
        if connections < 1 or cache_streams < 1:
            raise ValueError("there is at least one connection, and one stream for the cache")
        if (certificate is None) != (key is None):
            raise ValueError("a certificate needs its key, and a key its certificate")
        if verify is None:
            verify = authorities is not None or not place.loopback
        if engine == "auto":
            engine = (
                "qh3" if importlib.util.find_spec("qh3") is not None and certificate is None else "aioquic"
            )
        self._place = place
        self._engine = load_engine(engine)
        self._settings = settings or Settings()
        self._trust = Trust(
            authorities=None if authorities is None else Path(authorities),
            verify=verify,
            server_name=server_name or _name_for(place.host),
            identity=None if certificate is None else Identity(Path(certificate), Path(str(key))),
            alpn=alpn,
        )
        self._cache_streams = cache_streams
        self._keep_alive = keep_alive
        self._timeout = timeout
        self._on_refusal = on_refusal
        self._refusal: FelixRefused | None = None
        self._pools = [Pool(self) for _ in range(connections)]
        self._subscriptions: set[Subscription] = set()
        self._next_cache = 0
        self._next_subscription = 1
        self._closed = False
        self.reconnects = 0
        """How many times a lost connection was made again."""

    @property
    def address(self) -> str:
        """Whom this client talks to."""
        return str(self._place)

    @property
    def engine(self) -> str:
        """The QUIC implementation that it uses."""
        return self._engine.name

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
        else:
            self.abort()

    async def connect(self) -> None:
        """Makes the first connection. ConnectionFailed or OperationTimeout say what was wrong."""
        await self._pools[0].link()

    async def close(self) -> None:
        """Waits until the server has handled all that was sent, then disconnects. Raises what flush() does."""
        try:
            if not self._closed:
                await self.flush()
        finally:
            self.abort()

    def abort(self) -> None:
        """Disconnects at once."""
        self._closed = True
        error = ClientClosed(f"the client of {self.address} was closed")
        for subscription in list(self._subscriptions):
            subscription._end(error)
        for pool in self._pools:
            pool.close(error)

    async def flush(self) -> None:
        """Returns when the server has handled everything that was sent before, also what is not acknowledged. Raises
        the first refusal that nobody waited for since the last flush()."""
        async with self._limit("flush"):
            for pool in self._pools:
                await pool.flush()
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            raise refusal

    # --- publishing -----------------------------------------------------------------------------------------

    async def publish(
        self, tenant: str, namespace: str, stream: str, payload: Buffer, *, ack: bool = True
    ) -> None:
        """Publishes one message. With `ack` it returns when the server has it safe, and raises FelixRefused if it does
        not take it; without, when it was handed over to be sent."""
        await self._publish(
            tenant,
            namespace,
            stream,
            ack,
            lambda id: messages.Publish(
                tenant, namespace, stream, wire.raw_payload(payload), id, "per_message" if ack else "none"
            ),
        )

    async def publish_batch(
        self,
        tenant: str,
        namespace: str,
        stream: str,
        payloads: Iterable[Buffer],
        *,
        ack: bool = True,
        binary: bool = False,
    ) -> None:
        """Publishes messages in order and together: the server takes all of them or none.

        A `binary` batch is smaller and much faster to read, and the protocol cannot acknowledge it: with `ack` this
        then returns when the server has handled it, which does not say that it took it.
        """
        if binary:
            frame = wire.encode_publish_batch(tenant, namespace, stream, payloads)
            async with self._limit("publish"):
                requests = await self._pool_of(tenant, namespace, stream).publishing()
                await requests.link.room(requests.number)
                requests.tell(frame)
                if ack:
                    await fence(requests)
            return
        given = list(payloads)
        await self._publish(
            tenant,
            namespace,
            stream,
            ack,
            lambda id: messages.PublishBatch(
                tenant, namespace, stream, wire.raw_payloads(given), id, "per_batch" if ack else "none"
            ),
        )

    async def _publish(
        self,
        tenant: str,
        namespace: str,
        stream: str,
        ack: bool,
        message: Callable[[int], messages.Message],
    ) -> None:
        async with self._limit("publish"):
            requests = await self._pool_of(tenant, namespace, stream).publishing()
            await requests.link.room(requests.number)
            id = requests.take_id()
            frame = wire.encode_message(message(id))
            if ack:
                await requests.ask(id, frame)
            else:
                requests.tell(frame)

    def _pool_of(self, *address: str) -> "Pool":
        """One address goes over one connection, so that order holds."""
        return self._pools[hash(address) % len(self._pools)]

    # --- subscribing ----------------------------------------------------------------------------------------

    def subscribe(
        self,
        tenant: str,
        namespace: str,
        stream: str,
        *,
        on_gap: Callable[["Subscription"], None] | None = None,
    ) -> "Subscription":
        """A subscription from now on; to be used as `async with client.subscribe(...) as events`. After a lost
        connection it is made anew: `gaps` counts that and `on_gap` is called, since what was published meanwhile is
        missed."""
        return Subscription(self, (tenant, namespace, stream), on_gap)

    # --- the cache ------------------------------------------------------------------------------------------

    async def cache_put(
        self, key: str, value: Buffer, *, ttl: float | None = None, scope: Scope | None = None
    ) -> None:
        """Stores a value, for `ttl` seconds or until it is evicted. `scope` is tenant, namespace and cache; without one
        it goes to a scope of its own."""
        names = dict(zip(("tenant_id", "namespace", "cache"), scope, strict=True)) if scope else {}
        put = messages.CachePut(
            key, wire.raw_payload(value), ttl_ms=None if ttl is None else round(ttl * 1000), **names
        )
        await self._ask_cache(put)

    async def cache_get(self, key: str, *, scope: Scope | None = None) -> bytes | None:
        """A value, or None if there is none."""
        names = dict(zip(("tenant_id", "namespace", "cache"), scope, strict=True)) if scope else {}
        answer = await self._ask_cache(messages.CacheGet(key, **names))
        if not isinstance(answer, messages.CacheValue):
            raise ProtocolError(f"{self.address} answered a cache_get with {type(answer).__name__}")
        return wire.payload_of(answer.value)

    async def _ask_cache(self, message: messages.CachePut | messages.CacheGet) -> Any:
        self._next_cache += 1
        async with self._limit("cache"):
            requests = await self._pools[self._next_cache % len(self._pools)].caching(self._next_cache)
            await requests.link.room(requests.number)
            message.request_id = id = requests.take_id()
            return await requests.ask(id, wire.encode_message(message))

    # --- within ---------------------------------------------------------------------------------------------

    def _limit(self, what: str) -> Limit:
        if self._closed:
            raise ClientClosed(f"the client of {self.address} was closed")
        return Limit(self._timeout, f"{self.address} did not answer a {what} within {self._timeout:g} s")

    def _new_link(self) -> FelixLink:
        return FelixLink(
            self._place,
            self._engine,
            self._settings,
            self._trust,
            self._keep_alive,
            on_refusal=self._refused,
            on_lost=lambda error: log.warning("%s; connecting again", error),
        )

    def _refused(self, error: FelixRefused) -> None:
        self._refusal = self._refusal or error
        if self._on_refusal is not None:
            self._on_refusal(error)


class Pool:
    """One connection at a time, and its streams."""

    def __init__(self, client: FelixClient) -> None:
        self._client = client
        self._link: FelixLink | None = None
        self._making = asyncio.Lock()
        self._publishing: Requests | None = None
        self._caching: dict[int, Requests] = {}

    async def link(self) -> FelixLink:
        """The connection; a lost one is made again."""
        if self._link is not None and self._link.down is None:
            return self._link
        async with self._making:
            if self._link is not None and self._link.down is None:
                return self._link
            lost_one = self._link is not None
            link = self._client._new_link()
            await link.connect(self._client._timeout)
            if self._client._closed:
                link.abort()
                raise ClientClosed(f"the client of {self._client.address} was closed")
            if lost_one:
                self._client.reconnects += 1
                log.warning("connected to %s again", self._client.address)
            self._link = link
            self._publishing = None
            self._caching.clear()
            return link

    async def publishing(self) -> Requests:
        link = await self.link()
        if self._publishing is None or self._publishing.ended:
            self._publishing = link.requests()
        return self._publishing

    async def caching(self, turn: int) -> Requests:
        link = await self.link()
        place = turn % self._client._cache_streams
        requests = self._caching.get(place)
        if requests is None or requests.ended:
            requests = self._caching[place] = link.requests()
        return requests

    async def flush(self) -> None:
        if self._link is None or self._link.down is not None:
            return
        if self._publishing is not None and not self._publishing.ended:
            await fence(self._publishing)
        await self._link.settled()

    def close(self, error: ClientError) -> None:
        if self._link is not None:
            self._link.close(error)


async def fence(requests: Requests) -> None:
    """Returns when the server has handled all requests before: it answers those of a stream in order. What it answers
    to a look into the cache, also that it is not allowed, does not matter; the id is a text, so that the answer has
    it whatever it is, and an error without one is of something before."""
    id = f"fence-{requests.take_id()}"
    with contextlib.suppress(FelixRefused):
        await requests.ask(id, wire.encode_message(messages.CacheGet("", request_id=id)))


class Subscription:
    """Events of one stream, in order: an async iterator of payloads."""

    def __init__(
        self,
        client: FelixClient,
        address: tuple[str, str, str],
        on_gap: Callable[["Subscription"], None] | None,
    ) -> None:
        self._client = client
        self._address = address
        self._on_gap = on_gap
        self._id = 0
        self._link: FelixLink | None = None
        self._events: deque[bytes] = deque()
        self._waiting = 0  # bytes of them
        self._holds = False  # the connection is not read because of it
        self._arrived = asyncio.Event()
        self._error: ClientError | None = None
        self._begun = False  # until then a lost connection is whoever began it's to deal with
        self._over = False
        self._again: asyncio.Task[None] | None = None
        self.gaps = 0
        """How many times it was made anew after a lost connection."""

    @property
    def id(self) -> int:
        """Its id on its connection."""
        return self._id

    async def __aenter__(self) -> Self:
        await self._begin()
        self._client._subscriptions.add(self)
        self._begun = True
        if self._link is not None and self._link.down is not None:
            self._on_events(self._link.down)  # it was lost right behind the answer
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client._subscriptions.discard(self)
        self._over = True
        if self._again is not None:
            self._again.cancel()
            await asyncio.wait([self._again])
        self._release()
        if self._link is not None and self._link.down is None:
            self._link.unsubscribe(self._id)

    def _release(self) -> None:
        self._holds = False
        if self._link is not None:
            self._link.hold(self, False)

    async def _begin(self) -> None:
        client = self._client
        async with client._limit("subscribe"):
            self._id = client._next_subscription
            client._next_subscription += 1
            self._link = await client._pools[self._id % len(client._pools)].link()
            self._link.expect(self._id, self._on_events)
            requests = self._link.requests()
            frame = wire.encode_message(messages.Subscribe(*self._address, subscription_id=self._id))
            answer = requests.ask(self._id, frame)
            self._link.finish(requests)
            try:
                await answer
            except BaseException:
                self._link.unsubscribe(self._id)
                raise

    def _on_events(self, events: list[bytes] | ClientError | None) -> None:
        if isinstance(events, list):
            self._events.extend(events)
            self._waiting += sum(map(len, events))
            if self._waiting > MOST_WAITING and self._link is not None:
                self._holds = True
                self._link.hold(self, True)
        elif events is None:
            self._over = True
        elif isinstance(events, ConnectionLost) and not self._client._closed:
            if self._again is None and self._begun:
                self._again = asyncio.get_running_loop().create_task(self._begin_again())
            return
        else:
            self._end(events)
            return
        self._arrived.set()

    def _end(self, error: ClientError) -> None:
        self._error = self._error or error
        self._arrived.set()

    async def _begin_again(self) -> None:
        backoff = Backoff()
        try:
            while not self._over:
                try:
                    await self._begin()
                    if self._link is not None and self._link.down is not None:
                        raise again(self._link.down)  # it was lost right behind the answer
                except (ConnectionFailed, ConnectionLost, OperationTimeout):
                    await backoff.pause()
                except ClientError as error:
                    self._end(error)
                    return
                else:
                    self.gaps += 1
                    if self._on_gap is not None:
                        self._on_gap(self)
                    return
        finally:
            self._again = None

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._events:
            if self._error is not None:
                raise again(self._error)
            if self._over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        payload = self._events.popleft()
        self._waiting -= len(payload)
        if self._holds and self._waiting < MOST_WAITING // 2:
            self._release()
        return payload


def _name_for(host: str) -> str:
    """The name that a certificate must have. An address is its own."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host
