"""One subscriber of each protocol that never reads, beside one of each that does, all on one topic: those who read get
everything, and what the others do not read costs the gateway no memory."""

import asyncio
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple, Self

import pytest

from headrace.clients.blipmq import BlipmqClient
from headrace.clients.face import Subscriber, Wish
from headrace.clients.protocols import CLIENTS
from headrace.guarantees import PROTOCOLS
from headrace.wire import blipmq, overhop, relink, zeroctl
from headrace.wire.overhop import MessageType
from tests.bridges.conftest import TIMEOUT, server_of
from tests.gateway.gateways import GatewayProcess, Peer
from tests.gateway.quic_peers import QuicPeer

TOPIC = "site.line.temp"
CONFIG = f"""
[[queues]]
name = "stuck"
filter = "{TOPIC}"

[[queues]]
name = "quick"
filter = "{TOPIC}"

[[endpoints]]
name = "stuck"
deliver = "{TOPIC}"

[[endpoints]]
name = "quick"
deliver = "{TOPIC}"
"""
QUICK = {
    "blipmq": TOPIC,
    "felix": TOPIC.replace(".", "/"),
    "overhop": "quick",
    "relink": "quick/0",
    "zeroctl": TOPIC,
}
PAYLOAD = bytes(16 << 10)
ROUNDS, BATCH = 16, 64
MESSAGES = ROUNDS * BATCH  # 16 MiB
WARM_ROUNDS = 4  # until memory is measured first: all buffers are full
NODE_UUID = "fdcab500-b417-5e99-aa62-9d2db81df9e0"


def overhop_requests() -> bytes:
    greeted = overhop.encode(MessageType.HELLO, "1", {}) + overhop.encode(MessageType.REGISTER, "2", {})
    return greeted + overhop.encode(MessageType.SUBSCRIBE, "3", {"q": "stuck", "credits": 1 << 20})


def relink_requests() -> bytes:
    return relink.encode_version() + relink.encode_hello("stuck", 4, 4)


def zeroctl_requests() -> bytes:
    return zeroctl.encode_open("dev-key", "stuck", NODE_UUID, 1) + zeroctl.encode_bind(1, TOPIC, 2)


# What each says to be sent all there is; they do not hear the answers either.
REQUESTS: dict[str, Callable[[], bytes]] = {
    "overhop": overhop_requests,
    "relink": relink_requests,
    "zeroctl": zeroctl_requests,
}


class Stuck:
    """A subscriber of each protocol that never reads."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._sockets = {one: self._connected(gateway.port(one)) for one in (*REQUESTS, "blipmq")}
        for protocol, requests in REQUESTS.items():
            self._sockets[protocol].sendall(requests())
        peer = Peer(self._sockets["blipmq"])
        peer.send(blipmq.encode_subscribe(TOPIC, 0, 3))
        answer = peer.receive()
        assert isinstance(answer, blipmq.Ack)
        self._subscription = answer.subscription
        self._felix = QuicPeer(gateway.places["felix"], "aioquic")

    @staticmethod
    def _connected(port: int) -> socket.socket:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", port))
        return one

    async def __aenter__(self) -> Self:
        await self._felix.__aenter__()
        tenant, namespace, stream = TOPIC.split(".")
        about = {"tenant_id": tenant, "namespace": namespace, "stream": stream, "subscription_id": 1}
        await self._felix.ask(type="subscribe", **about)
        self._felix.deaf = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._felix.__aexit__()
        for one in self._sockets.values():
            one.close()

    def poll(self, messages: int) -> None:
        """BlipMQ has to ask for each message."""
        self._sockets["blipmq"].sendall(blipmq.encode_poll(self._subscription, 4) * messages)


class Outcome(NamedTuple):
    heard: dict[str, int]  # messages of those who read, by protocol
    delivered: dict[str, int]  # to both of each protocol
    connections: dict[str, int]
    memory: tuple[int, int]  # bytes, early and late


def own_memory(gateway: GatewayProcess) -> int:
    """What the process has for itself, the mapped log left out; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    for line in Path(f"/proc/{gateway.child.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("there is no such line")


async def talk(gateway: GatewayProcess) -> Outcome:
    heard = dict.fromkeys(PROTOCOLS, 0)
    progress = asyncio.Condition()

    async def hear(protocol: str, messages: Subscriber) -> None:
        async for message in messages:
            assert message.payload == PAYLOAD
            async with progress:
                heard[protocol] += 1
                progress.notify_all()

    async with asyncio.timeout(2 * TIMEOUT), AsyncExitStack() as stack, Stuck(gateway) as stuck:
        tasks = []
        for protocol, address in QUICK.items():
            wish = Wish(address, qos=0 if protocol == "felix" else 1)
            subscriber = CLIENTS[protocol].subscriber(server_of(gateway, protocol), wish)
            messages = await stack.enter_async_context(subscriber)
            tasks.append(asyncio.create_task(hear(protocol, messages)))
        sender = await stack.enter_async_context(BlipmqClient(gateway.places["blipmq"], key="dev-key"))
        early = 0
        for turn in range(1, ROUNDS + 1):
            await sender.publish_many(TOPIC, [PAYLOAD] * BATCH, 1)
            stuck.poll(BATCH)
            async with progress:
                await progress.wait_for(lambda turn=turn: min(heard.values()) >= turn * BATCH)
            if turn == WARM_ROUNDS:
                early = own_memory(gateway)
        late = own_memory(gateway)
        status = await asyncio.to_thread(gateway.status)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    connections = {one["protocol"]: one["connections"] for one in status["listeners"]}
    return Outcome(heard, status["bus"]["delivered"], connections, (early, late))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    home = tmp_path_factory.mktemp("stuck")
    config = home / "headrace.toml"
    config.write_text(CONFIG)
    with GatewayProcess(
        home / "data",
        "log.segment_bytes=16MiB",
        "log.retention_bytes=256MiB",
        "listen.zeroctl.bind=127.0.0.1:0",
        "drop.enabled=false",
        config=config,
    ) as gateway:
        return asyncio.run(talk(gateway))


def test_who_reads_gets_everything_beside_who_does_not(outcome: Outcome) -> None:
    assert outcome.heard == dict.fromkeys(PROTOCOLS, MESSAGES)
    for protocol in PROTOCOLS:
        assert outcome.connections[protocol] >= 2, protocol
        assert outcome.delivered[protocol] < 2 * MESSAGES, "somebody was not stuck"


if sys.platform == "linux":  # which tells what a process has for itself

    @pytest.mark.memory
    def test_what_is_not_read_takes_no_memory(outcome: Outcome) -> None:
        early, late = outcome.memory
        unread = len(PROTOCOLS) * (ROUNDS - WARM_ROUNDS) * BATCH * len(PAYLOAD)
        assert late - early < unread // 10
