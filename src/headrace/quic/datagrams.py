"""UDP in batches: all datagrams that wait are read in one turn of the loop, and runs of equal ones are sent and
received with one system call each where the kernel can (UDP GSO and GRO, Linux). It knows nothing of what is in
them."""

import asyncio
import contextlib
import errno
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

# <linux/udp.h>, <linux/in.h>, <linux/in6.h>
SOL_UDP: Final = 17
UDP_SEGMENT: Final = 103
UDP_GRO: Final = 104
IP_MTU_DISCOVER: Final = 10
IPV6_MTU_DISCOVER: Final = 23
PMTUDISC_PROBE: Final = 3

LARGEST: Final = 65_535
# Of one send: the kernel takes 64 segments and what fits in one IP datagram.
MOST_SEGMENTS: Final = 64
MOST_BYTES: Final = 65_000
# In a turn, so that others get theirs: with 64 KiB each this is 4 MiB.
READS_PER_TURN: Final = 64
# What is not sent because the socket is full is kept up to here; the rest is as good as lost, which QUIC repairs.
MOST_WAITING: Final = 1024
BUFFER_BYTES: Final = 4 << 20

_CMSG_ROOM: Final = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0

Batch = list[tuple[bytes, int, Any]]


class DatagramSocket:
    """A UDP socket and the loop that reads it. `handle` gets all that a turn brought: bytes, the size of each of the
    datagrams in them (the last may be shorter), and whom they are from. `on_refused` is called when a connected
    socket hears that nobody listens where its datagrams went."""

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        handle: Callable[[Batch], None],
        on_refused: Callable[[ConnectionRefusedError], None] | None = None,
    ) -> None:
        self.socket = sock
        self._loop = loop
        self._handle = handle
        self._on_refused = on_refused
        self._number = sock.fileno()
        self._waiting: deque[tuple[bytes, int, Any]] = deque()
        self._paused = False
        self.segments = False  # several datagrams in one system call
        sock.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                sock.setsockopt(SOL_UDP, UDP_GRO, 1)
                self.segments = True
            # QUIC datagrams are not to be fragmented; what path they fit through is QUIC's own to find out.
            level, option = (
                (socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER)
                if sock.family == socket.AF_INET6
                else (socket.IPPROTO_IP, IP_MTU_DISCOVER)
            )
            with contextlib.suppress(OSError):
                sock.setsockopt(level, option, PMTUDISC_PROBE)
        loop.add_reader(self._number, self._readable)

    def close(self) -> None:
        if self._number >= 0:
            self._loop.remove_reader(self._number)
            self._loop.remove_writer(self._number)
            self._number = -1
            self._waiting.clear()
            self.socket.close()

    def pause(self, paused: bool) -> None:
        """Has nothing read for a while, or again."""
        if self._number >= 0 and paused != self._paused:
            self._paused = paused
            if paused:
                self._loop.remove_reader(self._number)
            else:
                self._loop.add_reader(self._number, self._readable)

    def _readable(self) -> None:
        batch: Batch = []
        receive = self.socket.recvmsg
        for _ in range(READS_PER_TURN):
            try:
                data, ancillary, _, address = receive(LARGEST, _CMSG_ROOM)
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionRefusedError as error:
                self._refused(error)
                if self._number < 0:
                    return
            except OSError:
                pass  # news of an earlier datagram that did not get through
            else:
                size = len(data)
                for level, kind, value in ancillary:
                    if level == SOL_UDP and kind == UDP_GRO:
                        size = struct.unpack_from("=i", value)[0]
                if data:
                    batch.append((data, size, address))
        if batch:
            self._handle(batch)

    def _refused(self, error: ConnectionRefusedError) -> None:
        if self._on_refused is not None and self._number >= 0:
            self._on_refused(error)

    def send(self, datagrams: Sequence[tuple[bytes, Any]]) -> int:
        """Sends these, or keeps them until the socket has room; the number of bytes."""
        total = 0
        if not self.segments or len(datagrams) == 1:
            for data, address in datagrams:
                total += len(data)
                self._send(data, 0, address)
            return total
        start, count = 0, len(datagrams)
        while start < count:
            first, address = datagrams[start]
            size = length = len(first)
            end = start + 1
            # A run: all as long as the first, the last perhaps shorter.
            while end < count and end - start < MOST_SEGMENTS:
                data, other = datagrams[end]
                if len(data) > size or other != address or length + len(data) > MOST_BYTES:
                    break
                length += len(data)
                end += 1
                if len(data) < size:
                    break
            if end - start == 1:
                self._send(first, 0, address)
            else:
                self._send(b"".join([data for data, _ in datagrams[start:end]]), size, address)
            total += length
            start = end
        return total

    def _send(self, data: bytes, segment: int, address: Any) -> None:
        if self._number < 0:
            return
        if self._waiting:
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append((data, segment, address))
            return
        if not self._try(data, segment, address):
            self._waiting.append((data, segment, address))
            self._loop.add_writer(self._number, self._writable)

    def _try(self, data: bytes, segment: int, address: Any) -> bool:
        """Whether there was room."""
        try:
            if segment:
                self.socket.sendmsg([data], [(SOL_UDP, UDP_SEGMENT, struct.pack("=H", segment))], 0, address)
            else:
                self.socket.sendto(data, address)
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionRefusedError as error:
            # Of an earlier datagram: the system tells it once, so reading hears of it no more. Who sends is told later.
            self._loop.call_soon(self._refused, error)
        except OSError as error:
            if segment and error.errno in (errno.EINVAL, errno.EIO, errno.EOPNOTSUPP, errno.EMSGSIZE):
                # This path does not take them together.
                self.segments = False
                for start in range(0, len(data), segment):
                    self._try(data[start : start + segment], 0, address)
            # Else it is lost, as on any network.
        return True

    def _writable(self) -> None:
        while self._waiting:
            if not self._try(*self._waiting[0]):
                return
            self._waiting.popleft()
        self._loop.remove_writer(self._number)
