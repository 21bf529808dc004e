"""A gateway's log, bus and BlipMQ sessions without sockets, loop or clock: a test says which bytes arrive and
what time it is. It knows nothing of what the right answers are."""

import os
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.bus import Bus
from headrace.config.schema import Key
from headrace.log import Log
from headrace.sessions.blipmq import Blipmq, BlipmqSession
from headrace.sessions.rights import Keyring
from headrace.wire import blipmq as wire

SECOND = 1_000_000
DEV = Key(name="dev", key="dev-key", publish=["#"], subscribe=["#"])
OTHER = Key(name="other", key="other-key", publish=["#"], subscribe=["#"])
SMALL_LOG: dict[str, Any] = {"segment_bytes": 1 << 18, "pool_segments": 1}


class PassiveGateway:
    def __init__(
        self,
        path: Path,
        *,
        keys: Sequence[Key] = (DEV, OTHER),
        log: dict[str, Any] | None = None,
        bus: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.path = path
        self.keys = Keyring(keys)
        self.now = time.time_ns() // 1000
        self._log_options = {**SMALL_LOG, **(log or {})}
        self._bus_options = bus or {}
        self._options = options
        self.open()

    def open(self) -> None:
        self.log = Log(self.path, **self._log_options)
        self.bus = Bus(self.log, now=self.now, **self._bus_options)
        self.shared = Blipmq(self.bus, self.keys, **self._options)

    def close(self) -> None:
        self.bus.close()
        self.log.close()

    def restart(self) -> None:
        """Ends the process, as it were, and starts it again at once; nobody says goodbye."""
        self.close()
        self.open()

    def elapse(self, seconds: float) -> None:
        """Time passes, the bus sees to what is due, and all of it is safe."""
        self.now += round(seconds * SECOND)
        self.bus.tick(self.now)
        self.log.sync_now()

    def connect(self, key: str | None = "dev-key") -> "Client":
        """A peer that has authenticated with this key, or one that has said nothing yet."""
        client = Client(self)
        if key is not None:
            said = client.send(wire.encode_hello(1, 1), wire.encode_auth(key, 2))
            assert [type(frame) for frame in said] == [wire.Ack, wire.Ack]
        return client

    def wait_for_log(self, condition: Callable[[], object]) -> None:
        """Does what the loop does when the log has news, until the condition holds."""
        until = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < until
            select.select([self.log.event_fd], [], [], 0.1)
            self.log.on_event(self.now)


class Client:
    """The peer of one session."""

    def __init__(self, gateway: PassiveGateway) -> None:
        self.gateway = gateway
        self.session: BlipmqSession = gateway.shared.session()
        self.decoder = wire.Decoder()

    def exchange(self, data: bytes) -> bytes:
        """Everything that these bytes are answered with, however long it has to wait for a sync."""
        answers = [self.session.feed(data, self.gateway.now)]
        while self.session.waits_safe or self.session.waits_room or self.session.out.size:
            self.gateway.log.sync_now()
            answers.append(self.session.feed(b"", self.gateway.now))
        return b"".join(answers)

    def send(self, *frames: bytes) -> list[wire.Frame]:
        return self.decoder.feed(self.exchange(b"".join(frames)))

    def subscribe(self, topic: str, qos: int) -> int:
        (answer,) = self.send(wire.encode_subscribe(topic, qos, 3))
        assert isinstance(answer, wire.Ack), answer
        return answer.subscription

    def publish(self, topic: str, *messages: bytes, qos: int = 1) -> None:
        """Publishes, which is not answered, and has it safe."""
        assert self.send(*(wire.encode_publish(topic, message, qos, 4) for message in messages)) == []
        while self.session.waits_space:  # until the next segment is prepared
            self.gateway.wait_for_log(lambda: self.gateway.log.stats()["pool_segments"] > 0)
            assert self.send() == []
        self.gateway.log.sync_now()

    def poll(self, id: int) -> wire.Publish | None:
        answers = self.send(wire.encode_poll(id, 5))
        if not answers:
            return None
        (answer,) = answers
        assert isinstance(answer, wire.Publish), answer
        return answer

    def poll_all(self, id: int) -> list[bytes]:
        """The messages of this subscription, until there are no more."""
        found = []
        while (delivery := self.poll(id)) is not None:
            found.append(delivery.message)
        return found

    def ack(self, id: int, tag: int) -> bool:
        """Whether it was accepted."""
        answers = self.send(wire.encode_ack(id, tag))
        if not answers:
            return True
        (answer,) = answers
        assert isinstance(answer, wire.Nack), answer
        assert (answer.correlation, answer.code) == (tag, 404)
        return False

    def leave(self) -> None:
        self.session.leave(self.gateway.now)


def break_syncs(log: Log) -> None:
    """Makes the next sync of this log fail: the descriptors of its segments become a pipe, which has nothing
    to sync. The mappings stay as they are."""
    files = {(info.st_dev, info.st_ino) for info in (os.stat(segment.path) for segment in log.segments())}
    end, other = os.pipe()
    for fd in range(3, 1024):
        try:
            info = os.fstat(fd)
        except OSError:
            continue
        if (info.st_dev, info.st_ino) in files:
            os.dup2(other, fd, inheritable=False)
    os.close(end)
    os.close(other)
