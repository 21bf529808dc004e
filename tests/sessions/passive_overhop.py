"""A gateway's log, bus, queues and Overhop sessions without sockets, loop or clock: a test says which bytes
arrive and what time it is. It knows nothing of what the right answers are."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.bus import Bus
from headrace.config.schema import Key
from headrace.log import Log
from headrace.sessions.overhop import Overhop, OverhopSession
from headrace.sessions.queues import Queues
from headrace.sessions.rights import Keyring
from headrace.wire import overhop as wire
from headrace.wire.overhop import MessageType as T

SECOND = 1_000_000
SMALL_LOG: dict[str, Any] = {"segment_bytes": 1 << 18, "pool_segments": 1}


class OverhopGateway:
    def __init__(
        self,
        path: Path,
        *,
        keys: Sequence[Key] = (),
        log: dict[str, Any] | None = None,
        bus: dict[str, Any] | None = None,
        queues: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.path = path
        self.keys = Keyring(keys)
        self.now = time.time_ns() // 1000
        self._log_options = {**SMALL_LOG, **(log or {})}
        self._bus_options = bus or {}
        self._queue_options = queues or {}
        self._options = options
        self.open()

    def open(self) -> None:
        self.log = Log(self.path, **self._log_options)
        self.bus = Bus(self.log, now=self.now, **self._bus_options)
        self.queues = Queues(self.bus, now=self.now, **self._queue_options)
        self.shared = Overhop(self.queues, self.keys, now=self.now, **self._options)
        self.log.sync_now()

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
        self.settle()

    def settle(self) -> None:
        self.log.sync_now()
        self.bus.on_safe()
        self.bus.dispatch()

    def connect(self) -> "Peer":
        """A peer that has said nothing yet."""
        return Peer(self)

    def worker(self) -> "Peer":
        """A peer that has registered."""
        peer = Peer(self)
        assert peer.ask(T.HELLO).type == T.HI
        assert peer.ask(T.REGISTER).type == T.OK
        return peer


class Peer:
    """The peer of one session."""

    def __init__(self, gateway: OverhopGateway) -> None:
        self.gateway = gateway
        self.session: OverhopSession = gateway.shared.session()
        self.decoder = wire.Decoder(wire.MOST_PAYLOAD_LIMIT)
        self.rid = 0
        self.pushes: list[wire.Message] = []

    @property
    def closing(self) -> bool:
        return self.session.closing

    def exchange(self, data: bytes) -> bytes:
        """Everything that these bytes are answered with, however long it has to wait for a sync."""
        answers = [self.session.feed(data, self.gateway.now)]
        while self.session.waits_safe or self.session.waits_room or self.session.out.size:
            self.gateway.log.sync_now()
            answers.append(self.session.feed(b"", self.gateway.now))
        return b"".join(answers)

    def send(self, *frames: bytes) -> list[wire.Message]:
        """The answers; pushes are put aside."""
        answers = []
        for message in self.decoder.feed(self.exchange(b"".join(frames))):
            (self.pushes if message.rid == "0" and message.type in (T.DELIVER, T.ENDED) else answers).append(
                message
            )
        return answers

    def say(self, type: int, payload: object = None, **fields: object) -> list[wire.Message]:
        """What one message is answered with; the answers must echo its request id."""
        self.rid += 1
        answers = self.send(wire.encode(type, f"r{self.rid}", fields if payload is None else payload))
        assert all(answer.rid == f"r{self.rid}" for answer in answers)
        return answers

    def ask(self, type: int, payload: object = None, **fields: object) -> wire.Message:
        (answer,) = self.say(type, payload, **fields)
        return answer

    def ok(self, type: int, payload: object = None, **fields: object) -> dict[str, Any]:
        """The payload of the OK that one message is answered with."""
        answer = self.ask(type, payload, **fields)
        assert answer.type == T.OK, answer
        return answer.payload

    def err(self, type: int, payload: object = None, **fields: object) -> str:
        """The code of the ERR that one message is answered with."""
        answer = self.ask(type, payload, **fields)
        assert answer.type == T.ERR, answer
        assert set(answer.payload) == {"code", "msg"}
        assert answer.payload["msg"]
        return str(answer.payload["code"])

    def subscribe(self, queue: str, credits: int = 0) -> str:
        return str(self.ok(T.SUBSCRIBE, q=queue, credits=credits)["sid"])

    def enqueue(self, queue: str, payload: object = b"", **fields: object) -> str:
        """Puts a job into a queue and has it safe; its id."""
        jid = str(self.ok(T.ENQUEUE, q=queue, job_payload=payload, **fields)["jid"])
        self.gateway.settle()
        return jid

    def pushed(self) -> list[wire.Message]:
        """What is pushed now, and was since the last time."""
        self.gateway.settle()
        self.pushes += self.decoder.feed(self.session.pull(self.gateway.now))
        found, self.pushes = self.pushes, []
        return found

    def jobs(self) -> list[dict[str, Any]]:
        """The same where it is jobs alone."""
        found = self.pushed()
        assert all((push.type, push.rid) == (T.DELIVER, "0") for push in found)
        return [push.payload for push in found]

    def tick(self) -> list[wire.Message]:
        return self.decoder.feed(self.session.elapse(self.gateway.now))

    def leave(self) -> None:
        self.session.leave(self.gateway.now)
