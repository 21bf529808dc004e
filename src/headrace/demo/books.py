"""The demo's books: what each stream published, what each of its readers got of it, and how long it took. Payloads are
numbered and stamped here, and are nothing to the gateway but bytes. It knows no protocol."""

import json
import time
from collections import defaultdict
from typing import Final

from headrace.clients.load import Latencies
from headrace.errors import HeadraceError

NO_LATENCY: Final = "–"


class Stray(HeadraceError):
    """A reader got what its stream never published."""


class Numbers:
    """Which numbers from 0 on were there. Those that come in order cost nothing."""

    def __init__(self) -> None:
        self._next = 0
        self._ahead: set[int] = set()

    def add(self, number: int) -> bool:
        """Whether it is new."""
        if number < self._next or number in self._ahead:
            return False
        self._ahead.add(number)
        while self._next in self._ahead:
            self._ahead.remove(self._next)
            self._next += 1
        return True


class Stream:
    """What the devices of one kind publish."""

    def __init__(self, name: str, protocol: str, topics: list[str]) -> None:
        self.name = name
        self.protocol = protocol
        self.topics = topics  # one for each device, or one for all
        self.published = 0  # and confirmed
        self.postponed = 0  # of these, jobs for a time after the demo
        self.readers: list[Reader] = []
        self._numbers: defaultdict[int, int] = defaultdict(int)  # the next, by device

    def payload(self, device: int, **values: object) -> bytes:
        """The next message of a device, stamped with the time of now."""
        number = self._numbers[device]
        self._numbers[device] += 1
        about = {"ts": time.time_ns() // 1000, "stream": self.name, "device": device, "number": number}
        return json.dumps({**about, **values}).encode()

    def read_by(self, protocol: str, queue: str = "") -> "Reader":
        reader = Reader(self, protocol, queue)
        self.readers.append(reader)
        return reader


class Reader:
    """One protocol's subscribers of a stream, together."""

    def __init__(self, stream: Stream, protocol: str, queue: str) -> None:
        self.stream = stream
        self.protocol = protocol
        self.queue = queue  # of jobs, which can be dead or held; empty: there is none
        self.delivered = 0  # different messages
        self.again = 0  # deliveries after a message's first
        self.dead = 0
        self.held = 0  # in the queue, as the gateway tells
        self.idle = True  # the queue has nothing that a worker could get now
        self.latencies = Latencies()
        self.recent = Latencies()  # since the last look
        self._seen: defaultdict[int, Numbers] = defaultdict(Numbers)
        self._dead: defaultdict[int, Numbers] = defaultdict(Numbers)

    @property
    def name(self) -> str:
        return f"{self.stream.name}, {self.stream.protocol} → {self.protocol}"

    @property
    def missing(self) -> int:
        """What was published and is in no column; less than 0, if something is in two."""
        return self.stream.published - self.delivered - self.dead - self.held

    @property
    def settled(self) -> bool:
        """Whether nothing more is to be expected."""
        return self.missing == 0 and self.idle

    def time(self, payload: bytes) -> None:
        """A message has come for the first time."""
        seconds = time.time() - json.loads(payload)["ts"] / 1e6
        self.latencies.add(seconds, 1)
        self.recent.add(seconds, 1)

    def count(self, payload: bytes) -> None:
        """A message needs no further delivery."""
        if self._new(payload, self._seen):
            self.delivered += 1
        else:
            self.again += 1

    def bury(self, payload: bytes) -> None:
        """A message was found among the dead letters."""
        if self._new(payload, self._dead):
            self.dead += 1

    def _new(self, payload: bytes, numbers: defaultdict[int, Numbers]) -> bool:
        about = json.loads(payload)
        if about["stream"] != self.stream.name:
            raise Stray(f"{self.name}: got a message of the stream {about['stream']}")
        return numbers[about["device"]].add(about["number"])

    def take_recent(self) -> Latencies:
        recent, self.recent = self.recent, Latencies()
        return recent


def stream_of(payload: bytes) -> str:
    """The name of the stream that a message is of."""
    return str(json.loads(payload)["stream"])


def milliseconds(latencies: Latencies) -> tuple[str, str]:
    """p50 and p99."""
    p50, p99 = latencies.percentiles([50, 99])
    return (f"{p50 * 1e3:.1f} ms", f"{p99 * 1e3:.1f} ms") if p99 else (NO_LATENCY, NO_LATENCY)
