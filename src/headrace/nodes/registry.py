"""The nodes that were heard: who sent a heartbeat, with which services, and until when it counts. Takes heartbeats from
the bus, whatever protocol brought them."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from headrace import limits
from headrace.bus import Bus, Member, Received
from headrace.nodes.headers import unix_seconds
from headrace.nodes.signatures import BadPacking, public_key, verify
from headrace.wire.zeroctl import unescape

NODES: Final = "discovery.node.#"
LEAST_TTL: Final = 1.0


@dataclass(slots=True)
class NodeEntry:
    """One node, as its last heartbeat told it."""

    name: str
    uuid: str
    key: str  # where its heartbeat goes
    heard: float  # Unix time, by our clock
    ttl: float
    interval: float
    ts: float | None  # what the node says the time was
    services: dict[str, Any] = field(default_factory=dict)
    info: Any = None
    pubkey: str | None = None
    signed: bool = False  # the heartbeat had a valid signature of that key

    def shown(self, now: float) -> dict[str, Any]:
        return {
            "node-name": self.name,
            "node-uuid": self.uuid,
            "heard": self.heard,
            "ttl": self.ttl,
            "expires_in": round(max(0.0, self.heard + self.ttl - now), 3),
            "hb-interval": self.interval,
            "ts": self.ts,
            "services": self.services,
            "node-info": self.info,
            "node-pubkey": self.pubkey,
            "signed": self.signed,
        }


class Registry:
    """Who was heard within their time to live."""

    def __init__(self, bus: Bus, clock: Callable[[], float] = time.time, *, listen: bool = True) -> None:
        self._bus = bus
        self._clock = clock
        self._nodes: dict[str, NodeEntry] = {}
        self.ignored = 0  # heartbeats that say nothing, or came when there were too many nodes
        self._member: Member | None = None
        if listen:
            self.listen()

    def listen(self) -> None:
        """Hears heartbeats from now on."""
        if self._member is None:
            # Nobody is woken: it is asked whenever somebody wants to know.
            self._member = self._bus.subscribe(NODES).join(None, -1, 0)

    def catch_up(self) -> None:
        """Takes in what has arrived."""
        while self._member is not None and (received := self._member.receive()) is not None:
            if not self._take(received):
                self.ignored += 1

    def knows(self, uuid: str) -> bool:
        """Whether this is a persistent node: it was heard, and its time to live has not passed."""
        self.catch_up()
        entry = self._nodes.get(plain(uuid))
        return entry is not None and entry.heard + entry.ttl >= self._clock()

    def public_key(self, uuid: str) -> str | None:
        """What this node said its key is."""
        self.catch_up()
        entry = self._nodes.get(plain(uuid))
        return entry.pubkey if entry is not None else None

    def expire(self) -> list[NodeEntry]:
        """Forgets those whose time has passed; who they were."""
        self.catch_up()
        now = self._clock()
        gone = [entry for entry in self._nodes.values() if entry.heard + entry.ttl < now]
        for entry in gone:
            del self._nodes[plain(entry.uuid)]
        return gone

    def shown(self) -> list[dict[str, Any]]:
        """All that are there, by name."""
        self.expire()
        now = self._clock()
        return [
            entry.shown(now) for entry in sorted(self._nodes.values(), key=lambda one: (one.name, one.uuid))
        ]

    def __len__(self) -> int:
        return len(self._nodes)

    def _take(self, received: Received) -> bool:
        key = received.topic.decode("utf-8", "replace")
        if not received.payload:  # how a last will says that its node is gone
            for gone in [known for known, entry in self._nodes.items() if entry.key == key]:
                del self._nodes[gone]
            return True
        if len(received.payload) > limits.ZEROCTL_HEARTBEAT_BYTES:
            return False
        try:
            beat = json.loads(received.payload, parse_float=finite, parse_constant=finite)
        except (ValueError, RecursionError):
            return False
        if not isinstance(beat, dict):
            return False
        name = beat.get("node-name", beat.get("name"))
        uuid = beat.get("node-uuid", beat.get("uuid"))
        if not isinstance(name, str) or not isinstance(uuid, str) or not name or not uuid:
            return False
        if plain(uuid) not in self._nodes and len(self._nodes) >= limits.ZEROCTL_NODES:
            self.expire_quietly()
            if len(self._nodes) >= limits.ZEROCTL_NODES:
                return False
        interval = number(beat.get("hb-interval"), limits.ZEROCTL_HEARTBEAT.maximum)
        services = beat.get("services")
        pubkey = beat.get("node-pubkey")
        entry = NodeEntry(
            name=name,
            uuid=uuid,
            key=key,
            heard=self._clock(),
            ttl=max(LEAST_TTL, min(number(beat.get("ttl"), 3 * interval), limits.ZEROCTL_MOST_TTL)),
            interval=interval,
            ts=unix_seconds(beat.get("ts")),
            services=services if isinstance(services, dict) else {},
            info=beat.get("node-info"),
            pubkey=pubkey if isinstance(pubkey, str) else None,
        )
        if entry.pubkey is not None:
            entry.signed = signed_by(entry.pubkey, received)
            before = self._nodes.get(plain(uuid))
            if before is not None and before.pubkey not in (None, entry.pubkey) and before.signed:
                return False  # a key that was shown with a signature is not replaced while its node lives
        self._nodes[plain(uuid)] = entry
        return True

    def expire_quietly(self) -> None:
        now = self._clock()
        self._nodes = {uuid: entry for uuid, entry in self._nodes.items() if entry.heard + entry.ttl >= now}


def plain(uuid: str) -> str:
    """A UUID in the one form that all its forms have in common."""
    return uuid.replace("-", "").lower()


def number(value: object, otherwise: float) -> float:
    """A number of seconds; a week is more than any that counts."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return otherwise
    return float(min(value, 7 * limits.DAY))


def finite(text: str) -> float:
    """What is shown of a node has to be JSON again, which has no other numbers."""
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"{text} is not a number")
    return found


def signed_by(pubkey: str, received: Received) -> bool:
    try:
        key = public_key(pubkey)
        header = json.loads(unescape(received.headers)) if received.headers else {}
    except (BadPacking, ValueError, RecursionError):
        return False
    return isinstance(header, dict) and verify(key, header.get("_sec-sig"), received.payload)


class Verifier:
    """Judges the signatures of messages that need one: by keys that the operator trusts, or, where there are none, by
    the one that the node itself has shown."""

    def __init__(self, registry: Registry, signers: list[str]) -> None:
        self._registry = registry
        self._trusted = [public_key(text) for text in signers]

    def __call__(self, header: bytes, body: bytes) -> str:
        """Why a message is not signed as it should be; empty if it is."""
        fields = json.loads(header)
        signature = fields.get("_sec-sig")
        if signature is None:
            return "the message needs a signature (_sec-sig)"
        if self._trusted:
            if any(verify(key, signature, body) for key in self._trusted):
                return ""
            return "the signature is of none of the keys that are trusted"
        pubkey = self._registry.public_key(fields["node-uuid"])
        if pubkey is None:
            return "the node has not shown the key that it signs with (node-pubkey in its heartbeat)"
        try:
            key = public_key(pubkey)
        except BadPacking as error:
            return f"the node's node-pubkey is no key: {error}"
        return "" if verify(key, signature, body) else "the signature is not that of the node's key"
