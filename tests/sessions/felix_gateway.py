"""A gateway's log, bus and Felix sessions without sockets, loop or clock: a test says which bytes arrive on which
stream and what time it is. It knows nothing of what the right answers are."""

import json
import time
from pathlib import Path
from typing import Any

from headrace.bus import Bus
from headrace.log import Log
from headrace.session import Session
from headrace.sessions.felix import Felix, FelixEvents
from headrace.sessions.rights import Rights
from headrace.wire import felix as wire
from tests.oracle import felix as twin

SECOND = 1_000_000


class PassiveFelix:
    def __init__(self, path: Path, *, log: dict[str, Any] | None = None, **options: Any) -> None:
        self.log = Log(path, **{"segment_bytes": 1 << 18, "pool_segments": 1, "sync": "none", **(log or {})})
        self.now = time.time_ns() // 1000
        self.bus = Bus(self.log, now=self.now)
        self.shared = Felix(self.bus, **options)

    def close(self) -> None:
        self.bus.close()
        self.log.close()

    def connect(self, rights: Rights | None = None, nobody: bool = False) -> "Peer":
        return Peer(self, None if nobody else rights or Rights("dev", ["#"], ["#"]))

    def counted(self, name: str) -> int:
        return self.shared.counters()[name]

    def messages(self) -> list[tuple[str, bytes]]:
        """Topics and payloads of all messages in the log."""
        return [(self.log.topic_name(one.topic).decode(), one.payload) for one in self.log.reader()]


class Peer:
    """A connection; each stream() is one that it opens, `events` are those that it got."""

    def __init__(self, gateway: PassiveFelix, rights: Rights | None) -> None:
        self.gateway = gateway
        self.events: list[FelixEvents] = []
        self.peer = gateway.shared.peer("127.0.0.1:4000", rights, self.events.append)

    def stream(self, one_way: bool = False) -> "Stream":
        return Stream(self.gateway, self.peer.stream(one_way))

    def ask(self, **message: Any) -> list[Any]:
        """What a request alone on its stream is answered."""
        return self.stream().say(**message)

    def got(self, index: int = 0, room: int = 1 << 20) -> list[Any]:
        """What an event stream brings now."""
        self.gateway.bus.dispatch()
        return answers(self.events[index].pull(self.gateway.now, room))


class Stream:
    def __init__(self, gateway: PassiveFelix, session: Session) -> None:
        self.gateway = gateway
        self.session: Any = session

    def send(self, data: bytes) -> list[Any]:
        return answers(self.session.feed(data, self.gateway.now))

    def say(self, **message: Any) -> list[Any]:
        return self.send(twin.encode_message(message))


def answers(data: bytes) -> list[Any]:
    """Frames as what they say: JSON as it is, an event batch as its id and payloads."""
    decoder = twin.Decoder()
    found: list[Any] = []
    for frame in decoder.feed(data):
        if frame.flags & wire.FLAG_EVENT_BATCH:
            found.append(twin.decode_event_batch(frame.payload))
        else:
            found.append(json.loads(frame.payload))
    assert decoder.error is None
    assert not decoder.tail
    return found


def publish(payload: bytes = b"m", stream: str = "s", **more: Any) -> dict[str, Any]:
    return {
        "type": "publish",
        "tenant_id": "t",
        "namespace": "n",
        "stream": stream,
        "payload": twin.b64(payload),
        **more,
    }


def publish_batch(payloads: list[bytes], **more: Any) -> dict[str, Any]:
    texts = [twin.b64(payload) for payload in payloads]
    return {
        "type": "publish_batch",
        "tenant_id": "t",
        "namespace": "n",
        "stream": "s",
        "payloads": texts,
        **more,
    }


def subscribe(stream: str = "s", **more: Any) -> dict[str, Any]:
    return {"type": "subscribe", "tenant_id": "t", "namespace": "n", "stream": stream, **more}
