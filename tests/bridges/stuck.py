"""Subscribers that ask for everything and never read. They know nothing of what is measured beside them."""

import socket
from collections.abc import Callable, Collection
from typing import Self

from headrace.guarantees import PROTOCOLS
from headrace.wire import blipmq, overhop, relink, zeroctl
from headrace.wire.overhop import MessageType
from tests.gateway.gateways import GatewayProcess, Peer
from tests.gateway.quic_peers import QuicPeer

TOPIC = "site.line.temp"
# What the gateway has to be configured with.
CONFIG = f"""
[[queues]]
name = "stuck"
filter = "{TOPIC}"

[[endpoints]]
name = "stuck"
deliver = "{TOPIC}"
"""
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
    """A subscriber of each of these protocols that never reads."""

    def __init__(self, gateway: GatewayProcess, protocols: Collection[str] = PROTOCOLS) -> None:
        self._sockets: dict[str, socket.socket] = {}
        for protocol in REQUESTS.keys() & protocols:
            self._sockets[protocol] = self._connected(gateway.port(protocol))
            self._sockets[protocol].sendall(REQUESTS[protocol]())
        if "blipmq" in protocols:
            peer = Peer(self._connected(gateway.port("blipmq")))
            peer.send(blipmq.encode_subscribe(TOPIC, 0, 3))
            answer = peer.receive()
            assert isinstance(answer, blipmq.Ack)
            self._subscription = answer.subscription
            self._sockets["blipmq"] = peer.socket
        self._felix = QuicPeer(gateway.places["felix"], "aioquic") if "felix" in protocols else None

    @staticmethod
    def _connected(port: int) -> socket.socket:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", port))
        return one

    async def __aenter__(self) -> Self:
        if self._felix is not None:
            await self._felix.__aenter__()
            tenant, namespace, stream = TOPIC.split(".")
            about = {"tenant_id": tenant, "namespace": namespace, "stream": stream, "subscription_id": 1}
            await self._felix.ask(type="subscribe", **about)
            self._felix.deaf = True
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._felix is not None:
            await self._felix.__aexit__()
        for one in self._sockets.values():
            one.close()

    def poll(self, messages: int) -> None:
        """BlipMQ has to ask for each message."""
        if "blipmq" in self._sockets:
            self._sockets["blipmq"].sendall(blipmq.encode_poll(self._subscription, 4) * messages)
