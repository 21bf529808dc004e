"""A gateway's log, bus and zeroctl sessions without sockets, loop or clock: a test says which bytes arrive and what
time it is. It knows nothing of what the right answers are."""

import hashlib
import json
from typing import Any, TypeVar

from headrace.bus import Bus
from headrace.log import Log
from headrace.sessions.zeroctl import Zeroctl, ZeroctlSession
from headrace.wire import zeroctl as wire
from tests.sessions.passive_gateway import PassiveGateway

GATEWAY = {"node_name": "gw", "node_uuid": "00000000-0000-4000-8000-000000000001"}
UUID = "fdcab500-b417-5e99-aa62-9d2db81df9e0"

F = TypeVar("F", bound=wire.Frame)


def header(body: bytes, **more: Any) -> bytes:
    """A header that fits a body; underscores in names are dashes, None takes a key away."""
    fields = {
        "node-name": "testnode",
        "node-uuid": UUID,
        "ts": 1586721895,
        "sha256": hashlib.sha256(body).hexdigest(),
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def message(key: str, body: bytes, id: int, confirm: bool = True, **more: Any) -> bytes:
    return wire.encode_message(key, header(body, **more), body, id, confirm)


class KnownNodes:
    """A registry that a test fills."""

    def __init__(self) -> None:
        self.uuids: set[str] = set()

    def knows(self, uuid: str) -> bool:
        return uuid in self.uuids


class ZeroctlGateway(PassiveGateway):
    def open(self) -> None:
        self.log = Log(self.path, **self._log_options)
        self.bus = Bus(self.log, now=self.now, **self._bus_options)
        self.zeroctl = Zeroctl(self.bus, self.keys, **{**GATEWAY, **self._options})
        self.zeroctl.registry = self.nodes = KnownNodes()

    def peer(self, key: str | None = "dev-key", node: str = "testnode", uuid: str = UUID) -> "Peer":
        """A peer that was welcomed with this key, or one that has said nothing yet."""
        peer = Peer(self)
        if key is not None:
            (answer,) = peer.send(wire.encode_open(key, node, uuid, 1))
            assert isinstance(answer, wire.Welcome), answer
        return peer

    @property
    def counts(self) -> dict[str, int]:
        return self.zeroctl.counters()


class Peer:
    """The peer of one session."""

    def __init__(self, gateway: ZeroctlGateway) -> None:
        self.gateway = gateway
        self.session: ZeroctlSession = gateway.zeroctl.session()
        self.decoder = wire.Decoder()

    def send(self, *frames: bytes) -> list[wire.Frame]:
        """What these are answered with, however long it has to wait for a sync; deliveries are not asked for."""
        answers = [self.session.feed(b"".join(frames), self.gateway.now)]
        while self.session.waits_safe or self.session.waits_room or self.session.out.size:
            self.gateway.log.sync_now()
            answers.append(self.session.feed(b"", self.gateway.now))
        return self.decoder.feed(b"".join(answers))

    def refused(self, *frames: bytes) -> tuple[int, str]:
        """Code and text of the one refusal that this is answered with."""
        (answer,) = self.send(*frames)
        assert isinstance(answer, wire.Refuse), answer
        return answer.code, answer.text

    def publish(self, key: str, *bodies: bytes, **more: Any) -> None:
        """Publishes and has it confirmed."""
        answers = self.send(*(message(key, body, 100 + i, **more) for i, body in enumerate(bodies)))
        assert [(type(one), one.id, one.fields()) for one in answers] == [
            (wire.Confirm, 99 + len(bodies), {"count": len(bodies)})
        ]

    def bind(self, filter: str, binding: int = 1, **options: Any) -> None:
        (answer,) = self.send(wire.encode_bind(binding, filter, 7, **options))
        assert isinstance(answer, wire.Confirm), answer
        assert (answer.id, answer.count) == (7, 1)

    def pull(self, room: int = 1 << 20) -> list[wire.Delivery]:
        """All that there is for this peer now."""
        self.gateway.log.sync_now()
        self.gateway.bus.dispatch()
        self.gateway.bus.on_safe()
        found = self.decoder.feed(self.session.pull(self.gateway.now, room))
        assert all(isinstance(one, wire.Delivery) for one in found), found
        return found  # type: ignore[return-value]

    def bodies(self) -> list[bytes]:
        return [one.body for one in self.pull()]

    def leave(self) -> None:
        self.session.leave(self.gateway.now)
