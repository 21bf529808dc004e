"""A QUIC peer that says and hears bytes: what a test needs to see of a gateway's streams, and nothing of what is said
on them."""

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

from headrace.quic.datagrams import Batch, DatagramSocket
from headrace.quic.engine import Settings, Trust, load_engine
from tests.gateway.gateways import PATIENCE
from tests.oracle import felix as twin

ENGINES = ["aioquic", "qh3"]


class Ended(Exception):
    """The connection was closed, with this code and these words."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason


class QuicPeer:
    """A connection to `at`; `async with` makes and ends it."""

    def __init__(
        self, at: str, engine: str, settings: Settings | None = None, host: str = "127.0.0.1", **trust: Any
    ) -> None:
        self.engine = load_engine(engine)
        self.host = host
        there, _, port = at.rpartition(":")
        self.place = (there, int(port))
        self.loop = asyncio.get_running_loop()
        trust.setdefault("verify", False)
        trust.setdefault("server_name", "localhost")
        self.connection: Any = self.engine.client(settings or Settings(), Trust(**trust))
        self.heard: dict[int, bytearray] = {}
        self.finished: set[int] = set()
        self.resets: dict[int, int] = {}
        self.stops: dict[int, int] = {}
        self.ended: Ended | None = None
        self.connected = False
        self.alpn: str | None = None
        self.largest = 0  # datagram that came
        self.deaf = False  # takes nothing in
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._bind()

    def _bind(self) -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind((self.host, 0))
        self.endpoint = DatagramSocket(sock, self.loop, self._on_datagrams)

    def move(self) -> None:
        """Goes on from another port."""
        self.endpoint.close()
        self._bind()

    async def __aenter__(self) -> "QuicPeer":
        self.connection.connect(self.place, self.loop.time())
        self.transmit()
        try:
            await self.until(lambda: self.connected)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.connection.close()
        self.transmit()
        if self._timer is not None:
            self._timer.cancel()
        self.endpoint.close()

    def _on_datagrams(self, batch: Batch) -> None:
        if self.deaf:
            return
        for data, size, address in batch:
            self.largest = max(self.largest, size)
            self.connection.receive_many(data, size, address, self.loop.time())
        self._look()
        self.transmit()

    def _look(self) -> None:
        kinds = self.engine.events
        while (event := self.connection.next_event()) is not None:
            if isinstance(event, kinds.StreamDataReceived):
                self.heard.setdefault(event.stream_id, bytearray()).extend(event.data)
                if event.end_stream:
                    self.finished.add(event.stream_id)
            elif isinstance(event, kinds.StreamReset):
                self.resets[event.stream_id] = event.error_code
            elif isinstance(event, kinds.StopSendingReceived):
                self.stops[event.stream_id] = event.error_code
            elif isinstance(event, kinds.HandshakeCompleted):
                self.connected = True
                self.alpn = event.alpn_protocol
            elif isinstance(event, kinds.ConnectionTerminated):
                self.ended = Ended(event.error_code, event.reason_phrase)
        self._changed.set()

    def transmit(self) -> None:
        self.endpoint.send(self.connection.datagrams_to_send(self.loop.time()))
        if self._timer is not None:
            self._timer.cancel()
        if (at := self.connection.get_timer()) is not None:
            self._timer = self.loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self.connection.handle_timer(self.loop.time())
        self._look()
        self.transmit()

    async def until(self, condition: Callable[[], object], or_ended: bool = True) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                if self.ended is not None and or_ended:
                    raise self.ended
                self._changed.clear()
                await self._changed.wait()

    # --- streams --------------------------------------------------------------------------------------------

    def open(self, one_way: bool = False) -> int:
        number: int = self.connection.get_next_available_stream_id(is_unidirectional=one_way)
        self.connection.send_stream_data(number, b"")
        return number

    def send(self, number: int, data: bytes, fin: bool = False) -> None:
        self.connection.send_stream_data(number, data, fin)
        self.transmit()

    def say(self, number: int, fin: bool = False, **message: Any) -> None:
        self.send(number, twin.encode_message(message), fin)

    def stop(self, number: int, code: int = 0) -> None:
        self.connection.stop_stream(number, code)
        self.transmit()

    def reset(self, number: int, code: int = 0) -> None:
        self.connection.reset_stream(number, code)
        self.transmit()

    def frames(self, number: int) -> list[Any]:
        """What was heard on a stream: JSON as it is, event batches as id and payloads."""
        decoder = twin.Decoder()
        found: list[Any] = []
        for frame in decoder.feed(bytes(self.heard.get(number, b""))):
            if frame.flags & twin.EVENT_BATCH:
                found.append(twin.decode_event_batch(frame.payload))
            else:
                found.append(json.loads(frame.payload))
        assert decoder.error is None
        return found

    async def answers(self, number: int, count: int) -> list[Any]:
        await self.until(lambda: len(self.frames(number)) >= count)
        return self.frames(number)

    async def ask(self, **message: Any) -> Any:
        """The answer to a request alone on its stream."""
        number = self.open()
        self.say(number, **message)
        return (await self.answers(number, 1))[0]

    def events(self, number: int) -> list[bytes]:
        """All payloads of an event stream of the reference's dialect."""
        return [payload for frame in self.frames(number) if isinstance(frame, tuple) for payload in frame[1]]
