"""Carries bytes between an event loop's transports and sessions: one shared read buffer, bounded output, closing
without loss. It knows nothing of protocols, logs or configuration; asyncio and uvloop both run it.

Between two events a connection holds only what it must: the bytes of an unfinished frame and output that may not
leave yet. All that a read event brings goes to the session in one call, and all that it answers leaves in one write.
"""

import asyncio
import sys
from socket import AF_UNIX

from cpython.bytes cimport PyBytes_GET_SIZE
from cpython.buffer cimport PyBUF_WRITE
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcpy, memmove

from headrace.session cimport Session

cdef extern from "platform.h":
    int64_t hr_now_us() noexcept

cdef extern from "sockets.h":
    void hr_nodelay(int fd) noexcept
    void hr_quickack(int fd) noexcept
    bint hr_unsettled(int fd) noexcept

cdef enum:
    # An unfinished frame up to this size is copied to the front of the shared buffer for the next read; a longer one
    # is read on where it lies, so that a frame that trickles in is not copied again and again.
    COPIED_TAIL = 16 * 1024
    # A stated length is a stranger's word: beyond what arrived already, twice over, only this much is allocated.
    HEAD_START = 256 * 1024
    # Whoever sends this much at once does not wait for an acknowledgement of its last segment: it need not be hurried.
    BULK_READ = 64 * 1024
    # Memory beyond twice what is kept that is not worth giving back.
    SPARE_ROOM = 1024
    # How long input is thrown away after our last byte, if the peer keeps talking.
    LINGER_SECONDS = 2


cdef class Service:
    def __init__(self, str protocol not None, factory, *, Py_ssize_t max_frame, Py_ssize_t high_water,
                 Py_ssize_t max_connections, double stall_timeout, double idle_timeout=0.0, bint quickack=False):
        self.protocol = protocol
        self.factory = factory
        self.max_frame = max_frame
        self.high_water = high_water
        self.max_connections = max_connections
        self.stall_timeout = stall_timeout
        self.idle_timeout = idle_timeout
        self.quickack = quickack

    @property
    def connections(self):
        """How many connections are open now."""
        return self.tally.opened - self.tally.closed

    def counters(self):
        """All that was counted since the start, by name."""
        return self.tally


cdef class ReadBuffer:
    def __cinit__(self, Py_ssize_t size):
        if size < 2 * COPIED_TAIL:
            raise ValueError(f"a read buffer of {size} bytes is smaller than two tails")
        self.base = <uint8_t*> PyMem_RawMalloc(size)
        if self.base == NULL:
            raise MemoryError("read buffer")
        self.size = size
        self.whole = PyMemoryView_FromMemory(<char*> self.base, size, PyBUF_WRITE)

    def __dealloc__(self):
        PyMem_RawFree(self.base)


cdef class Switchboard:
    def __init__(self, loop, observer, *, Py_ssize_t read_bytes, double tick_seconds):
        self.loop = loop
        self.call_soon = loop.call_soon
        self.observer = observer
        self.reads = ReadBuffer(read_bytes)
        self.connections = set()
        self.safe_waiters = set()
        self.space_waiters = set()
        self.due = []
        self.tick_seconds = tick_seconds
        self.empty_waiters = []
        self.max_connections = sys.maxsize
        self.timer = loop.call_later(tick_seconds, self._sweep)

    def answer(self, Service service not None):
        """A protocol for one new connection to this service, as create_server() asks for them."""
        return StreamConnection(self, service)

    def __len__(self):
        return len(self.connections)

    cdef int schedule(self, Connection connection) except -1:
        if not connection.scheduled:
            connection.scheduled = True
            self.due.append(connection)
            if not self.turn_scheduled:
                self.turn_scheduled = True
                self.call_soon(self._turn)
        return 0

    def _turn(self):
        cdef list due = self.due
        cdef Connection connection
        cdef int64_t now = hr_now_us()
        self.due = []
        self.turn_scheduled = False
        for connection in due:
            connection.scheduled = False
            connection.turn(now)

    def _sweep(self):
        cdef Connection connection
        cdef double time = self.loop.time()
        cdef int64_t now = hr_now_us()
        self.timer = self.loop.call_later(self.tick_seconds, self._sweep)
        for connection in list(self.connections):
            connection.sweep(time, now)

    def safe_moved(self):
        """The log's safe end moved: output that waited for it leaves, and who was blocked on it goes on."""
        cdef Connection connection
        cdef set waiters = self.safe_waiters
        self.safe_waiters = set()
        for connection in waiters:
            connection.safe_moved()

    def space_made(self):
        """The log has space again: who was blocked on it goes on."""
        cdef Connection connection
        cdef set waiters = self.space_waiters
        self.space_waiters = set()
        for connection in waiters:
            connection.unblock()

    def drain(self):
        """Takes nothing new from any peer; each connection closes once all that it owes its peer has left."""
        cdef Connection connection
        cdef int64_t now = hr_now_us()
        self.draining = True
        for connection in list(self.connections):
            connection.begin_drain(now)

    async def wait_empty(self):
        """Returns when no connection is left."""
        if self.connections:
            waiter = self.loop.create_future()
            self.empty_waiters.append(waiter)
            await waiter

    def abort(self):
        """Drops all connections at once, with what they hold."""
        cdef Connection connection
        for connection in list(self.connections):
            connection.closed = True
            connection.transport.abort()

    def close(self):
        """Ends the sweep. The connections are not touched."""
        self.timer.cancel()

    cdef int forget(self, Connection connection) except -1:
        self.connections.discard(connection)
        self.safe_waiters.discard(connection)
        self.space_waiters.discard(connection)
        if not self.connections:
            for waiter in self.empty_waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self.empty_waiters.clear()
        return 0


cdef class Connection:
    def __cinit__(self, Switchboard board not None, Service service not None):
        self.board = board
        self.service = service
        self.fd = -1

    def __dealloc__(self):
        PyMem_RawFree(self.kept)

    def __repr__(self):
        return f"<Connection {self.name} {self.peer}>"

    # What a session and the gateway use.

    @property
    def protocol(self):
        """The name of the protocol spoken here."""
        return self.service.protocol

    def wake(self):
        """Has the session deliver in the next turn of the loop; as often as one likes within a turn."""
        self.deliver_due = True
        if self.session is not None and not self.writing_paused:
            self.board.schedule(self)

    def unblock(self):
        """Has the session receive the kept bytes again in the next turn of the loop, and then read on."""
        self.retry_due = True
        if self.session is not None:
            self.board.schedule(self)

    # What the event loop calls.

    def connection_made(self, transport):
        cdef Service service = self.service
        self.transport = transport
        self.peer = _peer_text(transport)
        if (self.board.draining or len(self.board.connections) >= self.board.max_connections
                or <Py_ssize_t> (service.tally.opened - service.tally.closed) >= service.max_connections):
            self.refused = True
            service.tally.refused += 1
            self.name = f"{service.protocol}-refused"
            self.board.observer.refused(self)
            transport.abort()
            return
        service.tally.opened += 1
        self.name = f"{service.protocol}-{service.tally.opened}"
        self.board.connections.add(self)
        self.stirred_at = self.board.loop.time()
        self.write = transport.write
        self.tls = transport.get_extra_info("sslcontext") is not None
        socket = transport.get_extra_info("socket")
        if socket is not None:
            self.fd = socket.fileno()
            self.tcp = socket.family != AF_UNIX
            if self.tcp:
                hr_nodelay(self.fd)
        transport.set_write_buffer_limits(high=service.high_water, low=service.high_water // 4)
        try:
            self.session = service.factory()
            self.session.connection = self
            self.session.high_water = service.high_water
            self.settle()
        except Exception as error:
            self.fail(error)

    def get_buffer(self, sizehint):
        cdef ReadBuffer reads = self.board.reads
        cdef Py_ssize_t room
        self.reads_into_kept = False
        if self.kept_size == 0 or self.discarding or self.closed or self.session is None:
            return reads.whole
        if self.kept_size <= COPIED_TAIL:
            memcpy(reads.base, self.kept, self.kept_size)
            return PyMemoryView_FromMemory(
                <char*> reads.base + self.kept_size, reads.size - self.kept_size, PyBUF_WRITE)
        room = self.session.wanted if self.session.wanted > self.kept_size else 2 * self.kept_size
        room = min(room, 2 * self.kept_size + HEAD_START)
        if room > self.kept_room:
            self.grow(room)
        self.reads_into_kept = True
        return PyMemoryView_FromMemory(
            <char*> self.kept + self.kept_size, self.kept_room - self.kept_size, PyBUF_WRITE)

    def buffer_updated(self, Py_ssize_t nbytes):
        cdef int64_t now = hr_now_us()
        cdef const uint8_t* data
        cdef Py_ssize_t n
        self.service.tally.reads += 1
        self.service.tally.bytes_in += <uint64_t> nbytes
        self.stirred = True
        if nbytes < BULK_READ and self.tcp and self.service.quickack:
            hr_quickack(self.fd)
        if self.discarding or self.closed or self.session is None:
            return
        if self.reads_into_kept:
            self.kept_size += nbytes
            data = self.kept
            n = self.kept_size
        else:
            data = self.board.reads.base
            n = self.kept_size + nbytes
        try:
            if n < self.session.wanted or self.session.blocked:
                self.keep(data, n)
            else:
                self.consume(data, n, now)
            self.settle()
        except Exception as error:
            self.fail(error)

    def eof_received(self):
        """Whether the loop shall leave closing to us: what is owed to the peer may still have to leave."""
        self.eof = True
        if self.tls:
            self.closed = True  # a TLS stream has no half-closed state: the loop answers the end with its own
        if self.discarding or self.closed or self.session is None:
            return False
        try:
            self.settle()
        except Exception as error:
            self.fail(error)
        return not self.closed

    def pause_writing(self):
        self.writing_paused = True

    def resume_writing(self):
        self.writing_paused = False
        if self.session is None:
            return
        try:
            self.settle()
        except Exception as error:
            self.fail(error)

    def connection_lost(self, error):
        cdef Session session = self.session
        self.closed = True
        if self.refused:
            self.transport = None
            return
        self.service.tally.closed += 1
        self.session = None
        self.fd = -1
        PyMem_RawFree(self.kept)
        self.kept = NULL
        self.kept_size = self.kept_room = 0
        if session is not None:
            session.connection = None
            try:
                session.lost(hr_now_us())
            except Exception as failure:
                self.service.tally.failed += 1
                self.board.observer.failed(self, failure)
        self.write = None
        self.transport = None
        self.board.forget(self)

    # Input.

    cdef int grow(self, Py_ssize_t room) except -1:
        cdef uint8_t* grown = <uint8_t*> PyMem_RawRealloc(self.kept, room)
        if grown == NULL:
            raise MemoryError("unfinished frame")
        self.kept = grown
        self.kept_room = room
        return 0

    cdef int keep(self, const uint8_t* data, Py_ssize_t n) except -1:
        # Keeps exactly these bytes, which lie in the shared buffer or among those kept already.
        if n == 0:
            PyMem_RawFree(self.kept)
            self.kept = NULL
            self.kept_size = self.kept_room = 0
            return 0
        if self.kept <= data < self.kept + self.kept_room:
            if data != self.kept:
                memmove(self.kept, data, n)
                if self.kept_room > 2 * n + SPARE_ROOM:
                    self.grow(n)
        else:
            if not n <= self.kept_room <= 2 * n + SPARE_ROOM:
                self.grow(n)
            memcpy(self.kept, data, n)
        self.kept_size = n
        return 0

    cdef int consume(self, const uint8_t* data, Py_ssize_t n, int64_t now) except -1:
        cdef Session session = self.session
        cdef Py_ssize_t used
        session.wanted = 0
        used = session.receive(data, n, now)
        if used > n:
            raise ValueError(f"{type(session).__name__} used {used} of {n} bytes")
        if session.closing:
            return self.keep(NULL, 0)  # nobody will look at the rest
        if max(session.wanted, 0 if session.blocked else n - used) > self.service.max_frame:
            raise ValueError(f"an unfinished frame is above the protocol's {self.service.max_frame} bytes")
        return self.keep(data + used, n - used)

    # Output, and what follows from it.

    cdef int flush(self) except -1:
        cdef object data
        if self.writing_paused or self.closed:
            return 0
        data = self.session.released()
        if data is not None:
            self.service.tally.writes += 1
            self.service.tally.bytes_out += <uint64_t> PyBytes_GET_SIZE(data)
            self.sent += <uint64_t> PyBytes_GET_SIZE(data)
            self.stirred = True
            if not self.unflushed:
                self.unflushed = self.newly_unflushed = True
            self.write(data)
        return 0

    cdef int settle(self) except -1:
        # Called after every event: sends what may leave, then does what the session's state asks for.
        cdef Session session = self.session
        cdef bint over, ended
        if self.closed or self.discarding:
            return 0
        self.flush()
        if session.out.gated() or (session.blocked and session.waits_safe > 0):
            self.board.safe_waiters.add(self)
        if session.blocked and session.waits_space:
            self.board.space_waiters.add(self)
        if session.blocked and session.waits_room and not self.writing_paused and session.out.size < session.high_water:
            self.unblock()
        if self.draining and not session.closing:
            ended = not (session.blocked and session.waits_safe > 0)
        else:
            ended = session.closing or self.eof  # who is blocked is not read, so no end of input comes to it
        if ended and session.out.size == 0:
            return self.finish()
        over = ended or session.blocked or session.out.size > self.service.high_water
        if over != self.reading_paused and not self.eof:
            self.reading_paused = over
            if over:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()
        if self.deliver_due and self.may_deliver():
            self.board.schedule(self)
        return 0

    cdef bint may_deliver(self) noexcept:
        return not (
            self.writing_paused
            or self.draining
            or self.eof
            or self.session.closing
            or self.session.out.size >= self.service.high_water
        )

    cdef int finish(self) except -1:
        # Nothing is left to say. A socket that is closed with unread input is reset, which would take from the peer
        # what it has not read yet; so our side ends first, and input is thrown away for a little while.
        if self.eof or self.fd < 0 or self.tls:
            return self.close()
        if not self.unflushed and not hr_unsettled(self.fd):
            return self.close()
        self.discarding = True
        self.linger_until = self.board.loop.time() + LINGER_SECONDS
        self.keep(NULL, 0)
        self.transport.write_eof()
        if self.reading_paused:
            self.reading_paused = False
            self.transport.resume_reading()
        return 0

    cdef int close(self) except -1:
        self.closed = True
        self.transport.close()
        return 0

    cdef int fail(self, object error) except -1:
        # A session's error ends its own connection and nothing else.
        self.service.tally.failed += 1
        self.board.observer.failed(self, error)
        if not self.closed:
            self.close()
        return 0

    # Turns of the loop.

    cdef int turn(self, int64_t now) except -1:
        cdef Session session = self.session
        if session is None or self.closed or self.discarding:
            return 0
        try:
            if self.retry_due:
                self.retry_due = False
                if session.blocked:
                    session.blocked = session.waits_space = session.waits_room = False
                    session.waits_safe = 0
                    self.consume(self.kept if self.kept_size > 0 else self.board.reads.base, self.kept_size, now)
            if self.deliver_due and self.may_deliver():
                session.more = False
                session.deliver(now, self.service.high_water - session.out.size)
                self.deliver_due = session.more
            self.settle()
        except Exception as error:
            self.fail(error)
        return 0

    cdef int safe_moved(self) except -1:
        cdef Session session = self.session
        if session is None or self.closed:
            return 0
        try:
            if session.blocked and session.waits_safe > 0 and session.safe_end() >= session.waits_safe:
                self.unblock()
            self.settle()
        except Exception as error:
            self.fail(error)
        return 0

    cdef int begin_drain(self, int64_t now) except -1:
        if self.session is None or self.closed or self.discarding:
            return 0
        self.draining = True
        try:
            self.session.drain(now)
            self.settle()
        except Exception as error:
            self.fail(error)
        return 0

    cdef int sweep(self, double time, int64_t now) except -1:
        cdef Session session = self.session
        if session is None:
            return 0
        self.watch_flush(time)
        if self.closed or self.discarding:
            return 0
        try:
            session.tick(now)
            self.settle()
        except Exception as error:
            self.fail(error)
            return 0
        if self.stirred or self.reading_paused:  # who is not read cannot speak
            self.stirred = False
            self.stirred_at = time
        elif 0 < self.service.idle_timeout <= time - self.stirred_at and not self.closed:
            self.service.tally.idled += 1
            self.board.observer.idled(self)
            self.close()
        return 0

    cdef int watch_flush(self, double time) except -1:
        cdef uint64_t pending
        if self.unflushed:
            pending = self.transport.get_write_buffer_size()
            if pending == 0:
                self.unflushed = False
                self.linger_until = time + LINGER_SECONDS
            elif self.newly_unflushed or self.sent - pending != self.flushed:
                self.flushed_at = time
            elif time - self.flushed_at >= self.service.stall_timeout:
                self.service.tally.stalled += 1
                self.board.observer.stalled(self)
                self.closed = True
                self.transport.abort()
                return 0
            self.newly_unflushed = False
            self.flushed = self.sent - pending
        if self.discarding and not self.unflushed and not self.closed:
            if time >= self.linger_until or not hr_unsettled(self.fd):
                self.close()
        return 0


class StreamConnection(Connection, asyncio.BufferedProtocol):
    """A connection that both loops know for a buffered protocol: asyncio goes by the base class."""

    __slots__ = ()


def _peer_text(transport):
    name = transport.get_extra_info("peername")
    if isinstance(name, tuple):
        return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"
    socket = transport.get_extra_info("socket")
    return "unix" if socket is not None and socket.family == AF_UNIX else "unknown"
