"""A gateway's log, bus and Relink sessions without sockets, loop or clock: a test says which bytes arrive and what time
it is. It knows nothing of what the right answers are."""

import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from headrace.bus import Bus, Received
from headrace.config.schema import Key
from headrace.errors import LogFull
from headrace.log import Log
from headrace.sessions.relink import Endpoint, Relink, RelinkSession
from headrace.sessions.rights import Keyring
from headrace.wire import relink as wire
from headrace.wire.relink import AckType, GeneralType, OperationType
from tests.log.patience import eventually

SECOND = 1_000_000
SMALL_LOG: dict[str, Any] = {"segment_bytes": 1 << 18, "pool_segments": 1}


def demos() -> list[Endpoint]:
    return [
        Endpoint("demo"),
        Endpoint("demo-tx", connector_transactions=True, listener_transactions=True),
        Endpoint("odd", connector_size=3, listener_size=7),
        Endpoint("single", connector_size=0, listener_size=0, publish="one.in", deliver="one.out.#"),
    ]


class RelinkGateway:
    def __init__(
        self,
        path: Path,
        *,
        endpoints: Sequence[Endpoint] | None = None,
        keys: Sequence[Key] = (),
        log: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.path = path
        self.keys = Keyring(keys)
        self.now = time.time_ns() // 1000
        self.endpoints = demos() if endpoints is None else list(endpoints)
        self._log_options = {**SMALL_LOG, **(log or {})}
        self._options = options
        self.open()

    def open(self) -> None:
        self.log = Log(self.path, **self._log_options)
        self.bus = Bus(self.log, now=self.now)
        self.shared = Relink(self.bus, self.keys, self.endpoints, now=self.now, **self._options)
        self.log.sync_now()

    def close(self) -> None:
        self.bus.close()
        self.log.close()

    def restart(self, **options: Any) -> None:
        """Ends the process, as it were, and starts it again at once, perhaps otherwise set; nobody says goodbye."""
        self.close()
        self._options |= options
        self.open()

    def kill(self) -> None:
        """The same, but from the files as they are now: nothing was closed."""
        copy = self.path.with_name(self.path.name + "-killed")
        # While segments are on their way from one number to another, a copy would not be of one moment.
        eventually(self.quiet, "prepared segments")
        shutil.copytree(self.path, copy)
        self.close()
        self.path = copy
        self.open()

    def quiet(self) -> bool:
        self.log.on_event(self.now)
        return bool(self.log.stats()["pool_segments"] == self._log_options["pool_segments"])

    def published(self, filter: str = "#") -> list[Received]:
        """Every message that the log has of these topics."""
        member = self.bus.subscribe(filter, start=0).join(None, -1, self.now)
        found = []
        while (one := member.receive(self.now)) is not None:
            found.append(one)
        member.leave(self.now)
        return found

    def publish(self, topic: str, *payloads: bytes, **more: Any) -> None:
        """As a loop would: where the next segment is still being prepared, it lets the log work and tries again."""

        def taken(payload: bytes) -> bool:
            try:
                self.bus.publish(topic, payload, now=self.now, confirmed=True, **more)
            except LogFull:
                self.log.on_event(self.now)
                return False
            return True

        for payload in payloads:
            eventually(partial(taken, payload), "room in the log")
        self.log.sync_now()

    def connect(self, name: str = "demo", **hello: Any) -> "Peer":
        return Peer(self, name, **hello)


class Peer:
    """The connector of one session."""

    def __init__(
        self,
        gateway: RelinkGateway,
        name: str,
        *,
        epoch: int = 0,
        link: int = 0,
        require: bool = False,
        **overrides: Any,
    ) -> None:
        self.gateway = gateway
        self.name = name
        self.session: RelinkSession = gateway.shared.session()
        (endpoint,) = [one for one in gateway.endpoints if one.name == name] or [Endpoint(name)]
        self.connector_size = overrides.get("connector_size", endpoint.connector_size)
        self.listener_size = overrides.get("listener_size", endpoint.listener_size)
        flags = overrides.get("flags", endpoint.flags) | (4 if require else 0)
        self.decoder = wire.Decoder(
            "listener", connector_size=endpoint.connector_size, listener_size=endpoint.listener_size
        )
        said = self.send(
            wire.encode_version(overrides.get("version", 0))
            + wire.encode_hello(name, self.connector_size, self.listener_size, flags, epoch, link)
        )
        self.answer = next((one for one in said if isinstance(one, wire.Answer)), None)
        self.greeting = said

    @property
    def link(self) -> int:
        assert self.answer is not None
        return self.answer.link

    @property
    def epoch(self) -> int:
        assert self.answer is not None
        return self.answer.epoch

    @property
    def closed(self) -> bool:
        return bool(self.session.closing)

    def again(self, **hello: Any) -> "Peer":
        """A new connection for the same link; the old one just ends."""
        self.leave()
        return Peer(self.gateway, self.name, epoch=self.epoch, link=self.link, **hello)

    def send(self, *packets: bytes) -> list[wire.Item]:
        """Everything that these bytes are answered with, when all is safe and delivered."""
        answers = [self.session.feed(b"".join(packets), self.gateway.now)]
        if self.session.blocked:
            return self.decoder.feed(b"".join(answers))
        self.gateway.log.sync_now()
        answers.append(self.session.pull(self.gateway.now, 1 << 20))
        self.gateway.log.sync_now()
        answers.append(self.session.pull(self.gateway.now, 1 << 20))
        return self.decoder.feed(b"".join(answers))

    def leave(self) -> None:
        self.session.leave(self.gateway.now)

    # --- packets --------------------------------------------------------------------------------------------

    def message(self, channel: int | Sequence[int], *parts: bytes) -> bytes:
        return wire.encode_message(channel, self.connector_size, parts)

    def op(self, type: OperationType, channel: int | Sequence[int], sequence: int | None = None) -> bytes:
        return wire.encode_operation(type, channel, self.connector_size, sequence)

    def ack(self, type: AckType, channel: int | Sequence[int], sequence: int | None = None) -> bytes:
        return wire.encode_acknowledgement(type, channel, self.listener_size, sequence)

    def general(self, type: GeneralType) -> bytes:
        return wire.encode_general(type)


def shown(items: Sequence[wire.Item]) -> list[str]:
    """What was said, in words a test can be read by: "consumed 7 <=3", "message 7 a|b", "resume"."""
    words = []
    for item in items:
        if isinstance(item, wire.General):
            words.append(item.type.name.lower())
        elif isinstance(item, wire.Acknowledgement | wire.Operation):
            channels = ",".join(map(str, item.channels))
            number = "" if item.sequence is None else f" <={item.sequence}"
            words.append(f"{item.type.name.lower()} {channels}{number}")
        elif isinstance(item, wire.Message):
            parts = "|".join(part.decode("latin-1") for part in item.parts)
            words.append(f"message {','.join(map(str, item.channels))} {parts}")
        else:
            words.append(type(item).__name__.lower())
    return words
