"""Carries bytes between one stream of a connection that has many (QUIC) and its session, as a Connection does for a
connection that is one stream. It knows nothing of protocols, logs, event loops or any transport: whoever owns the
connection calls it, and is told through a handful of methods.

All that came for a stream in a turn of the loop goes to the session in one call. Between two turns a stream holds only
what it must: the bytes of an unfinished frame, and output that may not leave yet or that the transport has no room for.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawFree, PyMem_RawRealloc
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcmp, memcpy, memmove

from headrace.connection cimport Service
from headrace.session cimport Session

cdef enum:
    # Memory that an idle stream may keep for the next bytes.
    SPARE_ROOM = 4096


def count(Service service not None, str what not None, int n=1):
    """Counts for a service what its connections' owner sees: opened, closed, refused, stalled, idled, failed, reads,
    bytes_in, writes or bytes_out."""
    if what == "reads":
        service.tally.reads += <uint64_t>n
    elif what == "bytes_in":
        service.tally.bytes_in += <uint64_t>n
    elif what == "writes":
        service.tally.writes += <uint64_t>n
    elif what == "bytes_out":
        service.tally.bytes_out += <uint64_t>n
    elif what == "opened":
        service.tally.opened += <uint64_t>n
    elif what == "closed":
        service.tally.closed += <uint64_t>n
    elif what == "refused":
        service.tally.refused += <uint64_t>n
    elif what == "stalled":
        service.tally.stalled += <uint64_t>n
    elif what == "idled":
        service.tally.idled += <uint64_t>n
    elif what == "failed":
        service.tally.failed += <uint64_t>n
    else:
        raise ValueError(f"{what!r} is not counted")


def same_connection(bytes data not None, Py_ssize_t size, Py_ssize_t id_size):
    """Whether datagrams of `size` bytes each, one after another, all have a short QUIC header and the same connection
    id: those that come together may be of several connections."""
    cdef const uint8_t* base = <const uint8_t*> PyBytes_AS_STRING(data)
    cdef Py_ssize_t n = PyBytes_GET_SIZE(data)
    cdef Py_ssize_t start = 0
    if size <= 0:
        return False
    while start < n:
        if n - start <= id_size or base[start] & 0x80 or memcmp(base + start + 1, base + 1, id_size) != 0:
            return False
        start += size
    return True


cdef class Substream:
    def __init__(self, Session session not None, Service service not None, owner, send, unsent, int64_t number, *,
                 bint readable, bint writable, str name not None, str peer not None):
        self.session = session
        self.service = service
        self.owner = owner
        self.send = send
        self.unsent = unsent
        self.number = number
        self.readable = readable
        self.writable = writable
        self.fin = not readable
        self.name = name
        self.peer = peer
        session.connection = self
        session.high_water = service.high_water

    def __dealloc__(self):
        PyMem_RawFree(self.kept)

    def __repr__(self):
        return f"<Substream {self.number} of {self.name} {self.peer}>"

    # What a session uses.

    def wake(self):
        """Has the session deliver in the next turn; as often as one likes within a turn."""
        self.deliver_due = True
        if self.session is not None and not self.stuck and not self.scheduled:
            self.owner.schedule(self)

    def wake_later(self, int64_t delay_us):
        """The same, after a while."""
        if self.session is not None and not self.deliver_due:
            self.owner.schedule_later(self, delay_us / 1e6)

    def unblock(self):
        """Has the session receive the kept bytes again in the next turn."""
        self.retry_due = True
        if self.session is not None and not self.scheduled:
            self.owner.schedule(self)

    # What the owner calls.

    def receive(self, bytes data not None, bint fin):
        """Takes what came for this stream; the session sees it in the next turn."""
        cdef Py_ssize_t n = PyBytes_GET_SIZE(data)
        cdef Py_ssize_t room
        cdef uint8_t* grown
        if self.session is None or self.session.closing:
            self.fin |= fin
            return
        if n:
            if self.kept_size + n > self.kept_room:
                # It grows with what arrives, not with what is announced.
                room = max(2 * self.kept_room, self.kept_size + n)
                grown = <uint8_t*> PyMem_RawRealloc(self.kept, room)
                if grown == NULL:
                    raise MemoryError("stream buffer")
                self.kept = grown
                self.kept_room = room
            memcpy(self.kept + self.kept_size, PyBytes_AS_STRING(data), n)
            self.kept_size += n
        if fin:
            self.fin = True
        self.arrived = True
        if not self.scheduled:
            self.owner.schedule(self)

    def turn(self, int64_t now):
        """Has the session take and give what it can now."""
        cdef Session session = self.session
        cdef Py_ssize_t used
        if session is None:
            return
        try:
            if self.retry_due:
                self.retry_due = False
                if session.blocked:
                    session.blocked = session.waits_space = session.waits_room = False
                    session.waits_safe = 0
                    self.arrived = True
            if self.arrived and not session.blocked and not self.draining:
                self.arrived = False
                if self.kept_size and self.kept_size >= session.wanted and not session.closing:
                    session.wanted = 0
                    used = session.receive(self.kept, self.kept_size, now)
                    if used > self.kept_size:
                        raise ValueError(f"{type(session).__name__} used {used} of {self.kept_size} bytes")
                    self.forget(self.kept_size if session.closing else used)
                    if max(session.wanted, 0 if session.blocked else self.kept_size) > self.service.max_frame:
                        raise ValueError(f"an unfinished frame is above the protocol's {self.service.max_frame} bytes")
            if self.deliver_due and self.may_deliver():
                session.more = False
                session.deliver(now, self.service.high_water - session.out.size)
                self.deliver_due = session.more
            self.settle()
        except Exception as error:
            self.owner.failed(self, error)

    def sent(self):
        """The transport has sent some of what it held."""
        if self.session is None or not self.stuck:
            return
        if self.unsent(self.number) <= self.service.high_water // 2:
            self.stuck = False
            if not self.scheduled:
                self.owner.schedule(self)

    def safe_moved(self):
        """The log's safe end moved."""
        cdef Session session = self.session
        if session is None:
            return
        try:
            if session.blocked and session.waits_safe > 0 and session.safe_end() >= session.waits_safe:
                self.unblock()
            self.settle()
        except Exception as error:
            self.owner.failed(self, error)

    def sweep(self, int64_t now):
        """A few times a second."""
        if self.session is None:
            return
        try:
            self.session.tick(now)
            self.settle()
        except Exception as error:
            self.owner.failed(self, error)

    def drain(self, int64_t now):
        """Nothing more is received or delivered; the stream ends when all that is owed has left."""
        if self.session is None:
            return
        self.draining = True
        try:
            self.session.drain(now)
            self.settle()
        except Exception as error:
            self.owner.failed(self, error)

    def lost(self, int64_t now):
        """The stream is over, for whatever reason."""
        cdef Session session = self.session
        if session is None:
            return
        self.session = None
        PyMem_RawFree(self.kept)
        self.kept = NULL
        self.kept_size = self.kept_room = 0
        session.connection = None
        session.lost(now)

    # Within.

    cdef int forget(self, Py_ssize_t n) except -1:
        cdef uint8_t* less
        self.kept_size -= n
        if self.kept_size == 0:
            if self.kept_room > SPARE_ROOM:
                PyMem_RawFree(self.kept)
                self.kept = NULL
                self.kept_room = 0
        elif n:
            memmove(self.kept, self.kept + n, self.kept_size)
            if self.kept_room > 4 * self.kept_size + SPARE_ROOM:
                less = <uint8_t*> PyMem_RawRealloc(self.kept, self.kept_size)
                if less != NULL:
                    self.kept = less
                    self.kept_room = self.kept_size
        return 0

    cdef bint may_deliver(self) noexcept:
        return not (
            self.stuck or self.draining or self.session.closing or self.session.out.size >= self.service.high_water
        )

    cdef int flush(self) except -1:
        cdef Session session = self.session
        cdef object data
        if session.out.size == 0 or self.stuck:
            return 0
        if self.unsent(self.number) >= self.service.high_water:
            self.stuck = True
            self.owner.wait_room(self)
            return 0
        data = session.released()
        if data is not None:
            self.service.tally.writes += 1
            self.send(self.number, data, False)
        return 0

    cdef int settle(self) except -1:
        # Called after every event: sends what may leave, then does what the session's state asks for.
        cdef Session session = self.session
        cdef bint ended
        if session is None:
            return 0
        if self.writable:
            self.flush()
        if session.out.gated() or (session.blocked and session.waits_safe > 0):
            self.owner.wait_safe(self)
        if session.blocked:
            if session.waits_space:
                self.owner.wait_space(self)
            if session.waits_room and not self.stuck and session.out.size < session.high_water:
                self.unblock()
        if self.draining and not session.closing:
            ended = not (session.blocked and session.waits_safe > 0)
        else:
            ended = session.closing or (self.readable and self.fin and not session.blocked and not self.arrived)
        if ended and session.out.size == 0:
            self.owner.over(self)
            return 0
        if self.deliver_due and not self.scheduled and self.may_deliver():
            self.owner.schedule(self)
        return 0
