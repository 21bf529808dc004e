"""What a peer may send before it has to wait: a window beyond what has come, whatever it leaves out."""

from pathlib import Path
from typing import Any

import pytest

from headrace.quic.certificates import own_identity
from headrace.quic.engine import Settings, Trust, load_engine

WINDOW = 64 * 1024
SETTINGS = Settings(connection_window=2 * WINDOW, stream_window=WINDOW)
CLIENT, SERVER = ("127.0.0.1", 1), ("127.0.0.1", 2)


class Pair:
    """A client and a server without a network between them."""

    def __init__(self, engine_name: str, directory: Path) -> None:
        engine = load_engine(engine_name)
        self.events = engine.events
        self.now = 1000.0
        self.client: Any = engine.client(SETTINGS, Trust(verify=False, server_name="localhost"))
        self.client.connect(SERVER, self.now)
        first = self.client.datagrams_to_send(self.now)
        header = engine.header(first[0][0])
        assert header is not None
        identity, _ = own_identity(directory, [])
        self.server: Any = engine.server(SETTINGS, identity, None)(header.destination, None)
        for data, _ in first:
            self.server.receive_datagram(data, CLIENT, self.now)
        self.heard = 0
        self.settle()

    def settle(self) -> None:
        """Carries all that both have to say."""
        quiet = 0
        while quiet < 20:
            self.now += 0.005
            quiet += 1
            for one, other, address in (
                (self.server, self.client, SERVER),
                (self.client, self.server, CLIENT),
            ):
                at = one.get_timer()
                if at is not None and at <= self.now:
                    one.handle_timer(self.now)
                for data, _ in one.datagrams_to_send(self.now):
                    quiet = 0
                    other.receive_datagram(data, address, self.now)
            while (event := self.server.next_event()) is not None:
                if isinstance(event, self.events.StreamDataReceived):
                    self.heard += len(event.data)
            while self.client.next_event() is not None:
                pass


def test_bytes_far_ahead_open_no_window_and_take_no_memory(tmp_path: Path) -> None:
    pair = Pair("aioquic", tmp_path)
    streams = []
    for _ in range(4):
        number = pair.client.get_next_available_stream_id()
        pair.client.send_stream_data(number, b"")
        streams.append(pair.client._streams[number])
    for _ in range(6):
        for stream in streams:
            # One byte at the very end of what the server allows, and nothing before it.
            allowed = pair.client._remote_max_data - pair.client._remote_max_data_used
            sender = stream.sender
            last = min(stream.max_stream_data_remote, sender.highest_offset + allowed) - 1
            if last <= sender.highest_offset:
                continue
            pair.client._remote_max_data_used += last - sender.highest_offset
            sender._buffer, sender._buffer_start, sender._buffer_stop = bytearray(b"x"), last, last + 1
            sender.highest_offset = last
            sender._pending.add(last, last + 1)
            sender.buffer_is_empty = False
            if stream not in pair.client._streams_queue:
                pair.client._streams_queue.append(stream)
            pair.settle()
    assert pair.client._close_event is None
    held = [len(stream.receiver._buffer) for stream in pair.server._streams.values()]
    assert max(held) == WINDOW
    assert sum(held) <= 2 * WINDOW


@pytest.mark.parametrize("engine", ["aioquic", "qh3"])
def test_the_window_moves_with_what_has_come(engine: str, tmp_path: Path) -> None:
    pair = Pair(engine, tmp_path)
    numbers = []
    for _ in range(3):
        number = pair.client.get_next_available_stream_id()
        pair.client.send_stream_data(number, b"")
        numbers.append(number)
    for _ in range(10):
        for number in numbers:
            pair.client.send_stream_data(number, bytes(WINDOW))
        pair.settle()
    assert pair.heard == 30 * WINDOW
