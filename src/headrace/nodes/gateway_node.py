"""This gateway as a zeroctl node: its identity, which lives as long as its log, and its heartbeat."""

import json
import time
import uuid
from collections.abc import Callable
from typing import Any, Final

from headrace import __version__, events
from headrace.bus import Bus
from headrace.config import Config
from headrace.errors import BusError, LogError
from headrace.nodes.durable import ZEROCTL
from headrace.nodes.headers import encode_header, required, word
from headrace.nodes.registry import Registry
from headrace.nodes.services import Services

UUID_NOTE: Final = b"zeroctl/node-uuid"

log = events.get("zeroctl")


def node_name(config: Config) -> str:
    """The gateway's node-name: its own, and what it is."""
    return f"{config.node.name}-headrace"


def node_uuid(bus: Bus) -> str:
    """The gateway's node-uuid, made once and kept in the log."""
    known = bus.notes(UUID_NOTE).get(UUID_NOTE)
    if known is not None:
        return known.decode()
    made = str(uuid.uuid4())
    bus.note(UUID_NOTE, made.encode())
    return made


class GatewayNode:
    """The gateway's part among the nodes. tick() is to be called about once a second."""

    def __init__(
        self,
        bus: Bus,
        config: Config,
        schedule: Callable[[Callable[[], object]], object],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = node_name(config)
        self.uuid = node_uuid(bus)
        # Where nobody can be a node, nobody is listened for.
        nodes = bool(config.listen.zeroctl.bind or config.carriers or config.zeroctl.heartbeat_interval)
        self.registry = Registry(bus, clock, listen=nodes)
        self.services = Services(bus, self.name, self.uuid, config.services, schedule)
        self._bus = bus
        self._clock = clock
        self._interval = config.zeroctl.heartbeat_interval
        self._next = 0.0

    @property
    def key(self) -> str:
        """Where its heartbeat goes."""
        return f"discovery.node.{word(self.name)}"

    def configure(self, config: Config) -> None:
        """Takes over what may change while the gateway runs."""
        if config.zeroctl.heartbeat_interval != self._interval:
            self._interval = config.zeroctl.heartbeat_interval
            self._next = 0.0
            self.registry.listen()

    def tick(self) -> None:
        """Sends the heartbeat if it is due, tells what services still owe, and forgets nodes that were not heard in
        time."""
        now = self._clock()
        self.services.tick()
        if self._interval and now >= self._next:
            self._next = now + self._interval
            self.beat(now)
        for entry in self.registry.expire():
            log.info("node.gone", node=entry.name, uuid=entry.uuid, ttl=entry.ttl)

    def beat(self, now: float) -> None:
        body = json.dumps(self.heartbeat(now)).encode()
        header = encode_header(required(self.name, self.uuid, body, now))
        try:
            self._bus.publish(self.key, body, headers=header, protocol=ZEROCTL)
        except (LogError, BusError) as error:  # the next one may have better luck
            log.limited("heartbeat.not_sent", reason=str(error))

    def heartbeat(self, now: float) -> dict[str, Any]:
        """What the gateway says of itself."""
        return {
            "node-name": self.name,
            "node-uuid": self.uuid,
            "ts": round(now, 6),
            "hb-interval": self._interval,
            "ttl": 3 * self._interval,
            "node-info": {"headrace": __version__},
            "services": self.services.described(),
        }

    def shown(self) -> list[dict[str, Any]]:
        """The nodes that are there now, for the web side."""
        return self.registry.shown()

    def stop(self) -> None:
        self.services.stop()
