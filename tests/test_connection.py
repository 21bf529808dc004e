"""Connections over real sockets on both loops: whatever the peer does, the session sees every byte once and
in order, memory stays bounded, and closing loses nothing."""

import asyncio
import os
import random
import socket
import ssl
import struct
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.connection import ReadBuffer, Service, StreamConnection, Switchboard
from headrace.session import PySession, Session
from tests.streams import (
    Certificates,
    Frames,
    Recorder,
    Server,
    frame,
    make_certificates,
    on_both_loops,
    read_frame,
    run,
    steady,
    until,
)

KiB = 1024
MiB = 1024 * KiB


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def server_context(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.cert, certificates.key)
    return context


# --- input --------------------------------------------------------------------------------------------------


@on_both_loops
def test_frames_are_answered_in_one_read_and_one_write(loop: str) -> None:
    async def main() -> None:
        async with Server(Frames) as server:
            reader, writer = await server.connect()
            bodies = [bytes([i]) * i for i in range(200)]
            writer.write(b"".join(map(frame, bodies)))
            assert [await read_frame(reader) for _ in bodies] == bodies
            [session] = server.sessions
            counted = server.service.counters()
            assert counted["reads"] == counted["writes"] == len(session.receives)
            assert counted["bytes_in"] == counted["bytes_out"] == sum(session.receives)
            writer.close()

    run(loop, main)


@on_both_loops
def test_a_stream_split_at_every_byte_is_the_same_stream(loop: str) -> None:
    async def main() -> None:
        async with Server(Frames) as server:
            reader, writer = await server.connect()
            bodies = [b"", b"a", b"bcd" * 5, b"x" * 40]
            for byte in b"".join(map(frame, bodies)):
                writer.write(bytes([byte]))
                await asyncio.sleep(0)
                await until(lambda: server.service.counters()["bytes_in"] >= 1)
            assert [await read_frame(reader) for _ in bodies] == bodies
            writer.close()

    run(loop, main)


@on_both_loops
@pytest.mark.parametrize("states_length", [True, False])
def test_frames_of_all_sizes_arrive_whole_in_pieces_of_all_sizes(loop: str, states_length: bool) -> None:
    choose = random.Random(7)
    sizes = [0, 1, 16 * KiB - 4, 16 * KiB, 256 * KiB - 4, 256 * KiB, 300_000, 3 * MiB, 5, 90_000, 17 * KiB]
    sizes += [choose.randrange(200_000) for _ in range(20)]
    bodies = [choose.randbytes(size) for size in sizes]

    async def main() -> None:
        async with Server(lambda: Frames(states_length)) as server:
            reader, writer = await server.connect()

            async def send() -> None:
                data = b"".join(map(frame, bodies))
                at = 0
                while at < len(data):
                    size = choose.choice([1, 100, 5_000, 60_000, 400_000])
                    writer.write(data[at : at + size])
                    at += size
                    await writer.drain()
                    await asyncio.sleep(0)

            sending = asyncio.create_task(send())
            for body in bodies:
                assert await read_frame(reader) == body
            await sending
            writer.close()

    run(loop, main)


@on_both_loops
def test_a_session_that_states_a_length_is_not_asked_again_before_it_is_there(loop: str) -> None:
    async def main() -> None:
        async with Server(Frames) as server:
            reader, writer = await server.connect()
            body = bytes(100_000)
            writer.write(frame(body)[:10])
            await until(lambda: server.service.counters()["bytes_in"] == 10)
            for start in range(10, 100_004, 20_000):
                arrived = server.service.counters()["bytes_in"]
                writer.write(frame(body)[start : start + 20_000])
                await until(lambda arrived=arrived: server.service.counters()["bytes_in"] > arrived)
            assert await read_frame(reader) == body
            assert server.sessions[0].receives == [10, 100_004]
            writer.close()

    run(loop, main)


@on_both_loops
def test_a_stated_length_is_not_believed_for_allocation(loop: str) -> None:
    async def main() -> None:
        async with Server(Frames, max_frame=1 << 30) as server:
            _, writer = await server.connect()
            tracemalloc.start()
            try:
                writer.write(struct.pack(">I", (1 << 30) - 4) + bytes(100_000))
                await until(lambda: server.service.counters()["bytes_in"] == 100_004)
                writer.write(bytes(100_000))
                await until(lambda: server.service.counters()["bytes_in"] == 200_004)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            # What arrived, a few times over (the stream, the session's own copy), and what is read ahead.
            assert peak < 3 * MiB
            writer.close()

    run(loop, main)


@on_both_loops
@pytest.mark.parametrize("states_length", [True, False])
def test_an_unfinished_frame_above_the_limit_ends_the_connection(loop: str, states_length: bool) -> None:
    async def main() -> None:
        async with Server(lambda: Frames(states_length), max_frame=50_000) as server:
            reader, writer = await server.connect()
            writer.write(struct.pack(">I", 60_000) + bytes(55_000))
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(1)
            assert server.service.counters()["failed"] == 1
            [(name, error)] = server.seen.failures
            assert name == "test-1"
            assert "50000" in str(error)
            writer.close()

    run(loop, main)


@on_both_loops
def test_one_connection_s_unfinished_frame_is_not_seen_by_another(loop: str) -> None:
    async def main() -> None:
        async with Server(Frames) as server:
            peers = [await server.connect() for _ in range(10)]
            bodies = [bytes([65 + i]) * (i * 3_000) for i in range(10)]
            pieces = [frame(body) for body in bodies]
            for start in range(0, max(map(len, pieces)), 1_000):
                for (_, writer), piece in zip(peers, pieces, strict=True):
                    writer.write(piece[start : start + 1_000])
                await asyncio.sleep(0.001)
            for (reader, writer), body in zip(peers, bodies, strict=True):
                assert await read_frame(reader) == body
                writer.close()

    run(loop, main)


# --- transports ---------------------------------------------------------------------------------------------


@on_both_loops
def test_both_loops_take_it_for_a_buffered_protocol(loop: str) -> None:
    async def main() -> None:
        async with Server(Frames) as server:
            protocol = server.board.answer(server.service)
            assert isinstance(protocol, StreamConnection)
            assert isinstance(protocol, asyncio.BufferedProtocol)
            assert not isinstance(protocol, asyncio.Protocol)

    run(loop, main)


@on_both_loops
@pytest.mark.parametrize("carrier", ["tcp", "tls", "unix", "unix-tls"])
def test_the_same_session_runs_over_every_stream(
    loop: str, carrier: str, certificates: Certificates, tmp_path: Path
) -> None:
    async def main() -> None:
        unix = tmp_path / "socket" if "unix" in carrier else None
        tls = server_context(certificates) if "tls" in carrier else None
        async with Server(Frames, unix=unix, tls=tls, quickack=True) as server:
            client = certificates.client() if tls else None
            if unix and client:
                reader, writer = await asyncio.open_unix_connection(
                    str(unix), ssl=client, server_hostname="127.0.0.1"
                )
            else:
                reader, writer = await server.connect(client)
            bodies = [b"", b"small", bytes(range(256)) * 4_000, b"x" * 20_000, b"end"]
            for body in bodies:
                writer.write(frame(body)[:7])
                await asyncio.sleep(0)
                writer.write(frame(body)[7:])
            assert [await read_frame(reader) for _ in bodies] == bodies
            [session] = server.sessions
            assert session.connection.name == "test-1"
            assert session.connection.protocol == "test"
            if unix:
                assert session.connection.peer == "unix"
            else:
                host, port = writer.get_extra_info("sockname")[:2]
                assert session.connection.peer == f"{host}:{port}"
            writer.close()
            await until(lambda: session.losses)
            assert session.losses == 1

    run(loop, main)


def option_of_peer(writer: asyncio.StreamWriter, option: int) -> int:
    """What the socket at the other end, which is in this process, has for an option of TCP."""
    ours = writer.get_extra_info("sockname")
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            other = socket.socket(fileno=os.dup(int(fd)))
        except OSError:
            continue
        with other:
            try:
                is_peer = other.getpeername() == ours
            except OSError:
                continue
            if is_peer:
                found.append(other.getsockopt(socket.IPPROTO_TCP, option))
    (value,) = found
    return value


@on_both_loops
def test_small_frames_are_not_delayed(loop: str) -> None:
    async def main() -> None:
        async with Server(Frames) as server:
            _, writer = await server.connect()
            await until(lambda: server.sessions)
            assert option_of_peer(writer, socket.TCP_NODELAY) == 1
            writer.close()

    run(loop, main)


@on_both_loops
@pytest.mark.parametrize("quickack", [True, False])
def test_what_is_read_is_acknowledged_at_once_where_a_protocol_wants_it(loop: str, quickack: bool) -> None:
    """A peer with Nagle's algorithm on holds its next small frame back until then. The kernel lets acknowledgements
    wait for answers as soon as there was one, so it has to be told anew with every read."""

    async def main() -> None:
        async with Server(Frames, quickack=quickack) as server:
            reader, writer = await server.connect()
            for _ in range(4):
                writer.write(frame(b"question"))
                assert await read_frame(reader) == b"question"
            reads = server.service.counters()["reads"]
            writer.write(frame(b"question")[:-1])  # no answer to this yet
            await until(lambda: server.service.counters()["reads"] > reads)
            assert option_of_peer(writer, socket.TCP_QUICKACK) == quickack
            writer.close()

    run(loop, main)


# --- a peer that goes ---------------------------------------------------------------------------------------


@on_both_loops
def test_a_reset_tells_the_session_once(loop: str) -> None:
    async def main() -> None:
        async with Server(Frames) as server:
            sock = socket.create_connection(("127.0.0.1", server.port))
            sock.send(frame(b"whole") + b"\0\0")
            await until(lambda: server.service.counters()["bytes_out"])
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
            [session] = server.sessions
            await until(lambda: session.losses)
            await asyncio.sleep(0.02)
            assert session.losses == 1
            assert session.connection is None
            assert len(server.board) == server.service.connections == 0
            assert server.seen.failures == []

    run(loop, main)


@on_both_loops
def test_a_half_closed_peer_still_gets_its_answers(loop: str) -> None:
    class Gated(Frames):
        def on_frame(self, body: bytes) -> bool:
            self.gate(10)
            return super().on_frame(body)

    async def main() -> None:
        async with Server(Gated) as server:
            reader, writer = await server.connect()
            writer.write(frame(b"late") + b"\0\0\0")
            writer.write_eof()
            await until(lambda: server.sessions and server.sessions[0].receives)
            await asyncio.sleep(0.02)
            [session] = server.sessions
            assert session.losses == 0
            session.safe = 10
            server.board.safe_moved()
            assert await reader.read() == frame(b"late")
            await until(lambda: session.losses)
            writer.close()

    run(loop, main)


@on_both_loops
def test_bytes_before_the_end_are_processed_even_if_the_session_was_blocked(loop: str) -> None:
    async def main() -> None:
        async with Server(Blocking) as server:
            reader, writer = await server.connect()
            writer.write(frame(b"one") + frame(b"block") + frame(b"two"))
            writer.write_eof()
            assert await read_frame(reader) == b"one"
            await asyncio.sleep(0.02)
            [session] = server.sessions
            assert session.losses == 0
            session.free = True
            server.board.space_made()
            assert await reader.read() == frame(b"block") + frame(b"two")
            writer.close()

    run(loop, main)


@on_both_loops
def test_a_tls_peer_that_ends_its_stream_is_closed(loop: str, certificates: Certificates) -> None:
    async def main() -> None:
        async with Server(Frames, tls=server_context(certificates)) as server:
            reader, writer = await server.connect(certificates.client())
            writer.write(frame(b"x"))
            assert await read_frame(reader) == b"x"
            writer.close()
            await writer.wait_closed()
            await until(lambda: server.sessions[0].losses)
            assert len(server.board) == 0

    run(loop, main)


# --- a session that ends the connection ---------------------------------------------------------------------


class Farewell(Frames):
    def on_frame(self, body: bytes) -> bool:
        if body == b"bye":
            self.put(frame(b"b" * 500_000))
            self.closing = True
            return True
        return super().on_frame(body)


@on_both_loops
@pytest.mark.parametrize("unix", [False, True])
def test_closing_sends_all_output_first_though_the_peer_keeps_sending(
    loop: str, unix: bool, tmp_path: Path
) -> None:
    async def main() -> None:
        socket_path = tmp_path / "socket" if unix else None
        async with Server(Farewell, unix=socket_path, max_frame=100 * KiB) as server:
            reader, writer = await server.connect()
            # More than one read, so that input is unread when the session closes; its size is of no interest
            # any more.
            writer.write(frame(b"bye") + frame(bytes(400 * KiB)) * 2)
            assert await read_frame(reader) == b"b" * 500_000
            assert await reader.read() == b""
            writer.close()
            await until(lambda: server.sessions[0].losses)
            assert server.seen.failures == []

    run(loop, main)


@on_both_loops
def test_a_connection_that_was_finished_goes_though_the_peer_stays(loop: str) -> None:
    async def main() -> None:
        async with Server(Farewell) as server:
            reader, writer = await server.connect()
            writer.write(frame(b"bye"))
            assert len(await reader.read()) == 500_004
            await until(lambda: server.sessions[0].losses)
            writer.close()

    run(loop, main)


@on_both_loops
def test_a_session_s_error_ends_its_own_connection_only(loop: str) -> None:
    class Fragile(Frames):
        def on_frame(self, body: bytes) -> bool:
            if body == b"break":
                raise RuntimeError("broken")
            return super().on_frame(body)

    async def main() -> None:
        async with Server(Fragile) as server:
            reader, writer = await server.connect()
            other_reader, other_writer = await server.connect()
            writer.write(frame(b"break"))
            assert await reader.read() == b""
            other_writer.write(frame(b"fine"))
            assert await read_frame(other_reader) == b"fine"
            [(name, error)] = server.seen.failures
            assert name == "test-1"
            assert repr(error) == "RuntimeError('broken')"
            assert error.__traceback__ is not None
            assert server.service.counters()["failed"] == 1
            await until(lambda: server.sessions[0].losses)
            writer.close()
            other_writer.close()

    run(loop, main)


@on_both_loops
@pytest.mark.parametrize("where", ["on_deliver", "on_tick", "on_lost", "factory"])
def test_an_error_anywhere_in_a_session_ends_its_connection(loop: str, where: str) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    fragile: Callable[[], Session] = type("Fragile", (Frames,), {where: broken})
    if where == "factory":
        fragile = broken  # type: ignore[assignment]

    async def main() -> None:
        async with Server(fragile) as server:
            reader, writer = await server.connect()
            if where == "on_deliver":
                await until(lambda: server.sessions)
                server.sessions[0].connection.wake()
            if where == "on_lost":
                writer.close()
            else:
                assert await reader.read() == b""
            await until(lambda: server.service.counters()["closed"] == 1)
            [(name, error)] = server.seen.failures
            assert (name, str(error)) == ("test-1", "broken")
            assert len(server.board) == 0
            writer.close()

    run(loop, main)


# --- output -------------------------------------------------------------------------------------------------


class Spring(Frames):
    """Delivers without end as long as there is room."""

    def on_deliver(self, now: int, room: int) -> None:
        super().on_deliver(now, room)
        self.put(bytes(room))
        self.more = True


@on_both_loops
def test_many_wakes_in_a_turn_are_one_delivery(loop: str) -> None:
    async def main() -> None:
        async with Server(Frames) as server:
            _, writer = await server.connect()
            await until(lambda: server.sessions)
            [session] = server.sessions
            for _ in range(100):
                session.connection.wake()
            assert session.delivers == []
            await asyncio.sleep(0.01)
            assert session.delivers == [256 * KiB]
            session.connection.wake()
            await asyncio.sleep(0.01)
            assert len(session.delivers) == 2
            writer.close()

    run(loop, main)


@on_both_loops
def test_what_does_not_fit_is_delivered_as_the_peer_reads(loop: str) -> None:
    class Limited(Frames):
        left = 40

        def on_deliver(self, now: int, room: int) -> None:
            super().on_deliver(now, room)
            if self.left:
                self.left -= 1
                self.put(bytes([self.left]) * 100_000)
                self.more = self.left > 0

    async def main() -> None:
        async with Server(Limited, high_water=64 * KiB, send_buffer=64 * KiB) as server:
            reader, writer = await server.connect()
            await until(lambda: server.sessions)
            server.sessions[0].connection.wake()
            await asyncio.sleep(0.05)
            for i in reversed(range(40)):
                assert await reader.readexactly(100_000) == bytes([i]) * 100_000
            assert len(server.sessions[0].delivers) == 40
            writer.close()

    run(loop, main)


@on_both_loops
@pytest.mark.parametrize("carrier", ["tcp", "tls", "unix"])
def test_a_peer_that_reads_nothing_is_bounded_and_then_dropped(
    loop: str, carrier: str, certificates: Certificates, tmp_path: Path
) -> None:
    async def main() -> None:
        server = Server(
            Spring,
            unix=tmp_path / "socket" if carrier == "unix" else None,
            tls=server_context(certificates) if carrier == "tls" else None,
            high_water=64 * KiB,
            stall_timeout=0.3,
            send_buffer=64 * KiB,
        )
        async with server:
            reader, writer = await server.connect(certificates.client() if carrier == "tls" else None)
            await until(lambda: server.sessions)
            [session] = server.sessions
            writer.transport.pause_reading()
            session.connection.wake()
            await until(lambda: session.losses)
            assert server.seen.stalls == ["test-1"]
            assert server.service.counters()["stalled"] == 1
            assert session.out.size <= 64 * KiB
            # What the kernel takes is its own matter; beside that there is one high-water mark in the
            # transport and one on its way.
            assert server.service.counters()["bytes_out"] < 16 * MiB
            writer.transport.abort()
            del reader

    run(loop, main)


@on_both_loops
def test_answers_that_are_not_read_stop_the_reading_of_requests(loop: str) -> None:
    async def main() -> None:
        async with Server(Frames, high_water=64 * KiB, send_buffer=64 * KiB) as server:
            reader, writer = await server.connect()
            writer.transport.pause_reading()
            body = bytes(10_000)
            sent = 3000
            writer.write(frame(body) * sent)
            await until(lambda: server.sessions and server.sessions[0].out.size > 64 * KiB)
            taken = await steady(lambda: server.service.counters()["bytes_in"])
            assert taken < sent * len(body)
            # One read's answers above the mark, and no more.
            assert server.sessions[0].out.size < 64 * KiB + 300 * KiB
            writer.transport.resume_reading()
            for _ in range(sent):
                assert await read_frame(reader) == body
            writer.close()

    run(loop, main)


@on_both_loops
def test_a_session_can_wait_until_its_output_was_read(loop: str) -> None:
    class Amplifier(Frames):
        """Answers each request with 50 kB, and stops while its peer does not read."""

        most = 0

        def on_frame(self, body: bytes) -> bool:
            if self.out.size >= self.high_water:
                self.blocked = self.waits_room = True
                return False
            self.put(body * 50_000)
            self.most = max(self.most, self.out.size)
            return True

    async def main() -> None:
        async with Server(Amplifier, high_water=64 * KiB, send_buffer=64 * KiB) as server:
            reader, writer = await server.connect()
            writer.transport.pause_reading()
            writer.write(b"".join(frame(bytes([i])) for i in range(200)))
            await until(lambda: server.sessions and server.sessions[0].blocked)
            await asyncio.sleep(0.05)
            writer.transport.resume_reading()
            for i in range(200):
                assert await reader.readexactly(50_000) == bytes([i]) * 50_000
            assert server.sessions[0].most <= 64 * KiB + 50_000
            assert not server.sessions[0].blocked
            writer.close()

    run(loop, main)


@on_both_loops
def test_gated_output_leaves_when_the_log_says_so_and_in_order(loop: str) -> None:
    class Confirming(Frames):
        def on_frame(self, body: bytes) -> bool:
            if body.isdigit():
                self.gate(int(body))
            return super().on_frame(body)

    async def main() -> None:
        async with Server(Confirming) as server:
            reader, writer = await server.connect()
            for body in (b"free", b"5", b"behind", b"9", b"last"):
                writer.write(frame(body))
            assert await read_frame(reader) == b"free"
            [session] = server.sessions
            await until(lambda: session.out.size == 10 + 5 + 8 + 5)
            session.safe = 4
            server.board.safe_moved()
            session.safe = 5
            server.board.safe_moved()
            assert [await read_frame(reader), await read_frame(reader)] == [b"5", b"behind"]
            assert session.out.size == 13
            session.safe = 100
            server.board.safe_moved()
            assert [await read_frame(reader), await read_frame(reader)] == [b"9", b"last"]
            writer.close()

    run(loop, main)


@on_both_loops
def test_deliveries_wait_while_gated_output_fills_the_buffer(loop: str) -> None:
    async def main() -> None:
        async with Server(Frames, high_water=64 * KiB) as server:
            reader, writer = await server.connect()
            await until(lambda: server.sessions)
            [session] = server.sessions
            session.gate(1)
            session.put(bytes(64 * KiB))
            session.connection.wake()
            await asyncio.sleep(0.03)
            assert session.delivers == []
            session.safe = 1
            server.board.safe_moved()
            assert await reader.readexactly(64 * KiB) == bytes(64 * KiB)
            await until(lambda: session.delivers)
            assert session.delivers == [64 * KiB]
            writer.close()

    run(loop, main)


# --- blocked sessions ---------------------------------------------------------------------------------------


class Blocking(Frames):
    """Blocks at the frame "block" until it is free, for space; at "safe" until offset 10 is safe."""

    free = False

    def on_frame(self, body: bytes) -> bool:
        if body == b"block" and not self.free:
            self.blocked = self.waits_space = True
            return False
        if body == b"safe" and self.safe < 10:
            self.blocked = True
            self.waits_safe = 10
            return False
        return super().on_frame(body)


@on_both_loops
def test_a_session_that_waits_for_space_goes_on_where_it_stopped(loop: str) -> None:
    async def main() -> None:
        async with Server(Blocking) as server:
            reader, writer = await server.connect()
            after = [bytes([i]) * 30_000 for i in range(100)]
            writer.write(frame(b"before") + frame(b"block") + b"".join(map(frame, after)))
            assert await read_frame(reader) == b"before"
            [session] = server.sessions
            taken = await steady(lambda: server.service.counters()["bytes_in"])
            assert taken <= 10 + 256 * KiB  # reading stopped with the read that blocked
            server.board.space_made()  # still none for this one
            server.board.safe_moved()
            await asyncio.sleep(0.02)
            assert session.blocked
            session.free = True
            server.board.space_made()
            assert await read_frame(reader) == b"block"
            for body in after:
                assert await read_frame(reader) == body
            assert not session.blocked
            writer.close()

    run(loop, main)


@on_both_loops
def test_a_session_that_waits_for_safe_goes_on_only_when_it_is(loop: str) -> None:
    async def main() -> None:
        async with Server(Blocking) as server:
            reader, writer = await server.connect()
            writer.write(frame(b"safe") + frame(b"after"))
            await until(lambda: server.sessions and server.sessions[0].blocked)
            [session] = server.sessions
            calls = len(session.receives)
            session.safe = 9
            server.board.safe_moved()
            await asyncio.sleep(0.02)
            assert len(session.receives) == calls
            session.safe = 10
            server.board.safe_moved()
            assert [await read_frame(reader), await read_frame(reader)] == [b"safe", b"after"]
            writer.close()

    run(loop, main)


@on_both_loops
def test_a_session_may_unblock_itself_when_time_has_passed(loop: str) -> None:
    class Patient(Blocking):
        ticks = 0

        def on_tick(self, now: int) -> None:
            self.ticks += 1
            if self.blocked and self.ticks > 5:
                self.free = True
                self.unblock()

    async def main() -> None:
        async with Server(Patient) as server:
            reader, writer = await server.connect()
            writer.write(frame(b"block"))
            assert await read_frame(reader) == b"block"
            assert server.sessions[0].ticks > 5
            writer.close()

    run(loop, main)


@on_both_loops
def test_a_blocked_peer_may_leave(loop: str) -> None:
    async def main() -> None:
        async with Server(Blocking) as server:
            sock = socket.create_connection(("127.0.0.1", server.port))
            sock.send(frame(b"block"))
            await until(lambda: server.sessions and server.sessions[0].blocked)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
            [session] = server.sessions
            session.free = True
            server.board.space_made()
            await until(lambda: session.losses)
            assert server.seen.failures == []

    run(loop, main)


# --- limits -------------------------------------------------------------------------------------------------


@on_both_loops
def test_connections_above_the_limit_are_closed_at_once_and_counted(loop: str) -> None:
    async def main() -> None:
        async with Server(Frames, max_connections=2) as server:
            peers = [await server.connect() for _ in range(2)]
            await until(lambda: server.service.connections == 2)
            reader, writer = await server.connect()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(1)
            writer.close()
            assert server.service.counters()["refused"] == 1
            assert len(server.sessions) == 2
            host, port = writer.get_extra_info("sockname")
            assert server.seen.refusals == [f"{host}:{port}"]
            peers[0][1].close()
            await until(lambda: server.service.connections == 1)
            reader, writer = await server.connect()
            writer.write(frame(b"room again"))
            assert await read_frame(reader) == b"room again"
            writer.close()
            peers[1][1].close()

    run(loop, main)


@on_both_loops
def test_all_services_together_have_a_limit_too(loop: str) -> None:
    async def main() -> None:
        async with Server(Frames) as server:
            server.board.max_connections = 2
            peers = [await server.connect() for _ in range(2)]
            await until(lambda: server.service.connections == 2)
            reader, writer = await server.connect()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(1)
            writer.close()
            assert server.service.counters()["refused"] == 1
            server.board.max_connections = 3
            reader, writer = await server.connect()
            writer.write(frame(b"room again"))
            assert await read_frame(reader) == b"room again"
            for _, one in (*peers, (reader, writer)):
                one.close()

    run(loop, main)


@on_both_loops
def test_a_silent_connection_is_closed(loop: str) -> None:
    async def main() -> None:
        async with Server(Frames, idle_timeout=0.05) as server:
            reader, writer = await server.connect()
            assert await reader.read() == b""
            assert server.seen.idles == ["test-1"]
            assert server.service.counters()["idled"] == 1
            writer.close()

    run(loop, main)


@on_both_loops
def test_limits_that_are_lowered_hold_for_open_connections(loop: str) -> None:
    async def main() -> None:
        async with Server(Frames) as server:
            reader, writer = await server.connect()
            await until(lambda: server.sessions)
            server.service.idle_timeout = 0.05
            assert await reader.read() == b""
            writer.close()

    run(loop, main)


def test_a_read_buffer_must_have_room_beside_a_tail() -> None:
    with pytest.raises(ValueError, match="1000"):
        ReadBuffer(1000)


# --- draining -----------------------------------------------------------------------------------------------


class Parting(Blocking):
    def on_frame(self, body: bytes) -> bool:
        if body == b"gated":
            self.gate(10)
        return super().on_frame(body)

    def on_drain(self, now: int) -> None:
        self.put(frame(b"goodbye"))


@on_both_loops
def test_a_drain_ends_idle_connections_with_a_last_word(loop: str) -> None:
    async def main() -> None:
        async with Server(Parting) as server:
            reader, writer = await server.connect()
            await until(lambda: server.sessions)
            server.board.drain()
            assert await reader.read() == frame(b"goodbye")
            await server.board.wait_empty()
            assert server.sessions[0].losses == 1
            writer.close()

    run(loop, main)


@on_both_loops
def test_a_drain_waits_for_what_is_not_safe_yet(loop: str) -> None:
    async def main() -> None:
        async with Server(Parting) as server:
            reader, writer = await server.connect()
            other_reader, other_writer = await server.connect()
            writer.write(frame(b"gated"))
            other_writer.write(frame(b"safe") + frame(b"after"))
            await until(lambda: len(server.sessions) == 2 and all(s.receives for s in server.sessions))
            server.board.drain()
            writer.write(frame(b"too late"))
            await asyncio.sleep(0.03)
            assert len(server.board) == 2
            for session in server.sessions:
                session.safe = 10
            server.board.safe_moved()
            assert await reader.read() == frame(b"gated") + frame(b"goodbye")
            answers = await other_reader.read()
            assert answers == frame(b"goodbye") + frame(b"safe") + frame(b"after")
            await server.board.wait_empty()
            writer.close()
            other_writer.close()

    run(loop, main)


@on_both_loops
def test_a_drain_does_not_wait_for_space_nor_for_deliveries(loop: str) -> None:
    class Endless(Parting, Spring):
        pass

    async def main() -> None:
        async with Server(Endless) as server:
            reader, writer = await server.connect()
            writer.write(frame(b"block"))
            other_reader, other_writer = await server.connect()
            await until(lambda: len(server.sessions) == 2 and server.sessions[0].blocked)
            server.sessions[1].connection.wake()
            server.board.drain()
            assert await reader.read() == frame(b"goodbye")
            await other_reader.read()
            await server.board.wait_empty()
            writer.close()
            other_writer.close()

    run(loop, main)


@on_both_loops
def test_a_peer_that_comes_while_draining_is_refused(loop: str) -> None:
    async def main() -> None:
        async with Server(Parting) as server:
            server.board.drain()
            reader, writer = await server.connect()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(1)
            assert server.service.counters()["refused"] == 1
            assert server.sessions == []
            writer.close()

    run(loop, main)


# --- by a clock that the test sets --------------------------------------------------------------------------


class StillLoop:
    """What a switchboard asks of a loop; time passes and calls happen when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.soon: list[Callable[[], None]] = []
        self.sweep: Callable[[], None] = lambda: None

    def time(self) -> float:
        return self.now

    def call_soon(self, call: Callable[[], None]) -> None:
        self.soon.append(call)

    def call_later(self, delay: float, call: Callable[[], None]) -> None:
        self.sweep = call

    def turn(self) -> None:
        due, self.soon = self.soon, []
        for call in due:
            call()

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.sweep()
        self.turn()


class StillTransport(asyncio.Transport):
    """A transport over a pair of sockets on which nothing moves by itself."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__({"socket": connected, "peername": ("192.0.2.1", 7)})
        self.written = bytearray()
        self.held = 0  # bytes of these that did not leave
        self.calls: list[str] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.held

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.limits = (high, low)

    def pause_reading(self) -> None:
        self.calls.append("pause_reading")

    def resume_reading(self) -> None:
        self.calls.append("resume_reading")

    def write_eof(self) -> None:
        self.calls.append("write_eof")

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")


class Still:
    """One connection that only the test moves."""

    def __init__(self, session: Session, **limits: float) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.loop = StillLoop()
        self.seen = Recorder()
        self.board = Switchboard(self.loop, self.seen, read_bytes=1 << 18, tick_seconds=1)  # type: ignore[arg-type]
        given: dict[str, Any] = {"max_frame": 1 << 20, "high_water": 1 << 16, "max_connections": 1}
        service = Service("test", lambda: session, **{**given, "stall_timeout": 30, **limits})
        self.connection = self.board.answer(service)
        self.transport = StillTransport(self.ours)
        self.connection.connection_made(self.transport)

    def receives(self, data: bytes) -> None:
        self.connection.get_buffer(-1)[: len(data)] = data
        self.connection.buffer_updated(len(data))

    def __enter__(self) -> "Still":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.connection_lost(None)
        self.ours.close()
        self.theirs.close()


def test_a_stall_is_measured_from_when_output_began_to_wait() -> None:
    with Still(Frames(), stall_timeout=30) as still:
        still.receives(frame(b"gone at once"))
        still.loop.passes(1)
        still.loop.passes(1000)
        still.receives(frame(b"waits"))
        still.transport.held = 9
        still.loop.passes(1)
        still.loop.passes(29)
        assert still.transport.calls == []
        still.loop.passes(1)
        assert still.transport.calls == ["abort"]
        assert still.seen.stalls == ["test-1"]


def test_a_peer_that_reads_a_little_is_given_the_whole_time_again() -> None:
    with Still(Frames(), stall_timeout=30) as still:
        still.receives(frame(bytes(1000)))
        for held in range(1000, 0, -10):
            still.transport.held = held
            still.loop.passes(29)
        assert still.transport.calls == []
        still.loop.passes(30)
        assert still.transport.calls == ["abort"]


def test_waiting_for_the_log_is_not_the_peer_s_stall() -> None:
    class Gated(Frames):
        def on_frame(self, body: bytes) -> bool:
            self.gate(1)
            return super().on_frame(body)

    with Still(Gated(), stall_timeout=30) as still:
        still.receives(frame(b"waits for the log"))
        still.loop.passes(1)
        still.loop.passes(1000)
        assert still.transport.calls == []


def test_a_connection_that_is_not_read_is_not_idle() -> None:
    with Still(Blocking(), idle_timeout=10) as still:
        still.receives(frame(b"block"))
        assert still.transport.calls == ["pause_reading"]
        for _ in range(10):
            still.loop.passes(9)
        assert still.transport.calls == ["pause_reading"]


def test_bytes_in_either_direction_are_a_sign_of_life() -> None:
    session = Frames()
    with Still(session, idle_timeout=10) as still:
        for _ in range(5):
            still.loop.passes(9)
            session.put(b"said by us")
            still.loop.passes(0)
        for _ in range(5):
            still.loop.passes(9)
            still.receives(b"\0")
        still.loop.passes(1)
        assert still.transport.calls == []
        still.loop.passes(9)
        assert still.transport.calls == []
        still.loop.passes(1)
        assert still.transport.calls == ["close"]


def test_nothing_is_delivered_to_a_transport_that_is_full() -> None:
    session = Frames()
    with Still(session) as still:
        still.connection.pause_writing()
        still.connection.wake()
        still.loop.turn()
        still.loop.passes(1)
        assert session.delivers == []
        still.connection.resume_writing()
        still.loop.turn()
        assert len(session.delivers) == 1


def test_output_waits_while_the_transport_is_full() -> None:
    with Still(Frames()) as still:
        still.connection.pause_writing()
        still.receives(frame(b"answer"))
        assert still.transport.written == b""
        still.connection.resume_writing()
        assert still.transport.written == frame(b"answer")


@pytest.mark.parametrize("reason", ["the gateway drains", "the session closes", "the peer has ended"])
def test_nothing_is_delivered_once_the_end_has_begun(reason: str) -> None:
    session = Frames()
    with Still(session) as still:
        session.gate(1)
        session.put(b"waits")
        still.connection.wake()
        if reason == "the gateway drains":
            still.board.drain()
        elif reason == "the session closes":
            session.closing = True
        else:
            assert still.connection.eof_received()
        still.loop.turn()
        still.loop.passes(1)
        assert session.delivers == []
        session.safe = 1
        still.board.safe_moved()
        assert still.transport.written == b"waits"
        assert session.delivers == []


def test_a_peer_that_keeps_talking_after_the_end_is_closed_in_a_while() -> None:
    session = Frames()
    with Still(session) as still:
        still.theirs.send(b"never read")
        session.closing = True
        still.loop.passes(1)
        assert still.transport.calls == ["write_eof"]
        still.receives(b"thrown away")
        still.loop.passes(1.5)
        assert still.transport.calls == ["write_eof"]
        still.loop.passes(1)
        assert still.transport.calls == ["write_eof", "close"]
        assert session.receives == []


def test_a_finished_connection_waits_for_its_output_to_leave() -> None:
    session = Farewell()
    with Still(session, stall_timeout=30) as still:
        still.receives(frame(b"bye"))
        still.transport.held = 1000
        still.loop.passes(20)
        assert still.transport.calls == ["write_eof"]
        still.transport.held = 10
        still.loop.passes(20)
        assert still.transport.calls == ["write_eof"]
        still.transport.held = 0
        still.loop.passes(1)
        assert still.transport.calls == ["write_eof", "close"]


def test_a_finished_connection_whose_peer_does_not_read_is_dropped() -> None:
    with Still(Farewell(), stall_timeout=30) as still:
        still.receives(frame(b"bye"))
        still.transport.held = 1000
        still.loop.passes(1)
        still.loop.passes(30)
        assert still.transport.calls == ["write_eof", "abort"]


def test_a_quiet_connection_is_closed_without_ado() -> None:
    session = Frames()
    with Still(session) as still:
        session.closing = True
        still.loop.passes(1)
        assert still.transport.calls == ["close"]


# --- memory -------------------------------------------------------------------------------------------------

IDLE_CONNECTIONS = textwrap.dedent("""
    import asyncio, gc, resource, socket, sys
    from tests.streams import LOOPS, Frames, Server, frame, until

    def resident() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    async def main(count: int, path: str) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        async with Server(Frames, unix=path or None) as server:
            def connect() -> socket.socket:
                if path:
                    sock = socket.socket(socket.AF_UNIX)
                    sock.connect(path)
                else:
                    sock = socket.create_connection(("127.0.0.1", server.port))
                return sock

            async def open_and_talk(count: int) -> list[socket.socket]:
                socks = []
                for i in range(count):
                    socks.append(connect())
                    # Each was busy once: what it needed then must be gone.
                    data = frame(bytes(30_000)) + frame(bytes(10))
                    socks[-1].sendall(data[:20_000])
                    await until(lambda: server.service.counters()["bytes_in"] % len(data) == 20_000)
                    socks[-1].sendall(data[20_000:])
                    got = 0
                    while got < 30_018:
                        await asyncio.sleep(0)
                        try:
                            got += len(socks[-1].recv(65536, socket.MSG_DONTWAIT))
                        except BlockingIOError:
                            pass
                await asyncio.sleep(0.1)
                return socks

            warm = await open_and_talk(50)
            before = resident()
            socks = await open_and_talk(count)
            assert server.service.connections == count + 50
            print((resident() - before) // count)
            for sock in warm + socks:
                sock.close()

    with asyncio.Runner(loop_factory=LOOPS[sys.argv[1]]) as runner:
        runner.run(main(int(sys.argv[2]), sys.argv[3]))
""")


@pytest.mark.memory
@on_both_loops
@pytest.mark.parametrize("unix", [False, True])
def test_an_idle_connection_costs_at_most_16_kib(loop: str, unix: bool, tmp_path: Path) -> None:
    # In a process of its own, since other tests leave memory behind that would be used again unseen.
    socket_path = str(tmp_path / "socket") if unix else ""
    done = subprocess.run(
        [sys.executable, "-c", IDLE_CONNECTIONS, loop, "2000", socket_path],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert 0 < int(done.stdout) <= 16 * KiB


class Quiet(PySession):
    def on_bytes(self, data: bytes, now: int) -> int:
        return len(data)


@on_both_loops
def test_many_connections_come_and_go(loop: str, soak: int) -> None:
    async def main() -> None:
        async with Server(Quiet) as server:
            for _ in range(3 * soak):
                peers = [await server.connect() for _ in range(200)]
                for _, writer in peers:
                    writer.write(b"hello")
                for _, writer in peers:
                    writer.close()
                await until(lambda: server.service.connections == 0)
            counted = server.service.counters()
            assert counted["opened"] == counted["closed"] == 600 * soak
            assert counted["bytes_in"] == 5 * 600 * soak
            assert len(server.board) == 0

    run(loop, main)
