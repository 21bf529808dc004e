"""The base of all protocol sessions, and the output buffer with gates that each of them writes to.

It knows nothing of sockets, event loops, logs or any one protocol.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.object cimport PyObject
from libc.stdint cimport UINT64_MAX, int64_t, uint8_t, uint64_t
from libc.string cimport memcpy, memmove

from headrace.wake cimport Waker

cdef extern from "Python.h":
    PyObject* new_bytes "PyBytes_FromStringAndSize"(const char* data, Py_ssize_t n) except NULL
    int resize_bytes "_PyBytes_Resize"(PyObject** data, Py_ssize_t n) except -1
    char* bytes_of "PyBytes_AS_STRING"(PyObject* data) noexcept
    void Py_XDECREF(PyObject* o)
    Py_ssize_t PY_SSIZE_T_MAX

cdef extern from "platform.h":
    int64_t hr_now_us() noexcept

cdef enum:
    SMALLEST_STORE = 256
    # A connection that once had much to say does not begin with as much ever after.
    LARGEST_FIRST_STORE = 64 * 1024
    # Until a connection says what its listener allows.
    PASSIVE_HIGH_WATER = 256 * 1024


@cython.final
cdef class Output:
    def __dealloc__(self):
        Py_XDECREF(self.store)
        PyMem_Free(self.gates)

    cdef int make_room(self, Py_ssize_t n) except -1:
        cdef Py_ssize_t grown
        if n < 0 or n > PY_SSIZE_T_MAX // 4 - self.size:
            raise MemoryError("output buffer")
        if self.store == NULL:
            grown = max(n, max(SMALLEST_STORE, self.usual))
            self.store = new_bytes(NULL, grown)
        else:
            if self.start > 0:
                memmove(self.base, self.base + self.start, self.size)
                self.start = 0
                self.end = self.size
                # Moving down pays only if it frees much; else the next few puts would move it all again.
                if self.capacity - self.end >= n and self.size <= self.capacity // 2:
                    return 0
            grown = max(self.capacity * 2, self.size + n)
            try:
                resize_bytes(&self.store, grown)
            except MemoryError:
                self.let_go()
                raise
        self.base = <uint8_t*> bytes_of(self.store)
        self.capacity = grown
        return 0

    cdef void let_go(self) noexcept:
        # The store is no longer ours, or gone.
        self.store = NULL
        self.base = NULL
        self.capacity = self.start = self.end = self.size = 0

    cdef uint8_t* reserve(self, Py_ssize_t n) except NULL:
        if n > self.capacity - self.end or self.store == NULL:
            self.make_room(n)
        return self.base + self.end

    cdef void commit(self, Py_ssize_t n) noexcept:
        self.end += n
        self.size += n

    cdef int put(self, const void* data, Py_ssize_t n) except -1:
        if n == 0:
            return 0
        memcpy(self.reserve(n), data, n)
        self.commit(n)
        return 0

    cpdef int gate(self, uint64_t safe_offset) except -1:
        """Bytes put from here on may leave only when the log's safe end is at least this offset."""
        cdef uint64_t position = self.taken + <uint64_t> self.size
        cdef Gate* last
        if self.gate_first < self.gate_end:
            last = &self.gates[self.gate_end - 1]
            if safe_offset <= last.offset:
                return 0  # what is behind the last gate waits for as much already
            if last.position == position:
                last.offset = safe_offset
                return 0
        elif safe_offset == 0:
            return 0
        return self.add_gate(position, safe_offset)

    cdef uint64_t position(self) noexcept:
        return self.taken + <uint64_t> self.size

    cpdef int gate_from(self, uint64_t position, uint64_t safe_offset) except -1:
        """Bytes from this place in the stream on, some of which were put already, may leave only when the log's safe end is
        at least this offset, which no gate before waits for."""
        # Gates from there on wait for less than this one, which is before them.
        while self.gate_first < self.gate_end and self.gates[self.gate_end - 1].position >= position:
            self.gate_end -= 1
        if self.gate_first < self.gate_end and self.gates[self.gate_end - 1].offset >= safe_offset:
            return 0
        return self.add_gate(position, safe_offset)

    cdef int add_gate(self, uint64_t position, uint64_t safe_offset) except -1:
        cdef Gate* grown
        if self.gate_end == self.gate_room:
            if self.gate_first > self.gate_end // 2:
                memmove(self.gates, self.gates + self.gate_first, (self.gate_end - self.gate_first) * sizeof(Gate))
                self.gate_end -= self.gate_first
                self.gate_first = 0
            else:
                grown = <Gate*> PyMem_Realloc(self.gates, (2 * self.gate_room + 4) * sizeof(Gate))
                if grown == NULL:
                    raise MemoryError("output gates")
                self.gates = grown
                self.gate_room = 2 * self.gate_room + 4
        self.gates[self.gate_end] = Gate(position, safe_offset)
        self.gate_end += 1
        return 0

    cdef bint gated(self) noexcept:
        return self.gate_first < self.gate_end

    cpdef Py_ssize_t releasable(self, uint64_t safe) noexcept:
        """How many bytes may leave when the log's safe end is this; gates that it opens are forgotten."""
        while self.gate_first < self.gate_end:
            if self.gates[self.gate_first].offset > safe:
                return <Py_ssize_t> (self.gates[self.gate_first].position - self.taken)
            self.gate_first += 1
        if self.gate_end > 0:
            PyMem_Free(self.gates)
            self.gates = NULL
            self.gate_first = self.gate_end = self.gate_room = 0
        return self.size

    cpdef object take(self, uint64_t safe):
        """The bytes that may leave when the log's safe end is this, removed from here; None if there are none."""
        cdef Py_ssize_t n = self.releasable(safe)
        cdef PyObject* whole
        cdef object data
        if n == 0:
            return None
        self.usual = min(max(n, self.size), LARGEST_FIRST_STORE)
        if n < self.size:
            data = PyBytes_FromStringAndSize(<char*> self.base + self.start, n)
            self.start += n
            self.size -= n
        elif self.start > 0:
            data = PyBytes_FromStringAndSize(<char*> self.base + self.start, n)
            Py_XDECREF(self.store)
            self.let_go()
        else:
            # The store itself leaves, so nothing is copied.
            whole = self.store
            self.let_go()
            resize_bytes(&whole, n)
            data = <object> whole
            Py_XDECREF(whole)
        self.taken += <uint64_t> n
        return data

    def write(self, data):
        """Puts these bytes at the end."""
        cdef bytes held = bytes(data)
        self.put(PyBytes_AS_STRING(held), PyBytes_GET_SIZE(held))

    def __len__(self):
        return self.size


cdef class Session(Waker):
    def __cinit__(self, *args, **kwargs):
        self.out = Output()
        self.high_water = PASSIVE_HIGH_WATER

    cdef Py_ssize_t receive(self, const uint8_t* data, Py_ssize_t n, int64_t now) except -1:
        raise NotImplementedError(f"{type(self).__name__} does not receive")

    cdef int deliver(self, int64_t now, Py_ssize_t room) except -1:
        return 0

    cdef int tick(self, int64_t now) except -1:
        return 0

    cdef int drain(self, int64_t now) except -1:
        return 0

    cdef int lost(self, int64_t now) except -1:
        return 0

    cdef uint64_t safe_end(self) noexcept:
        return UINT64_MAX

    cdef int wake(self) except -1:
        if self.connection is not None:
            self.connection.wake()
        return 0

    cpdef int unblock(self) except -1:
        """Has receive() called again with the bytes that were kept."""
        if self.connection is not None:
            self.connection.unblock()
        return 0

    cdef object released(self):
        if self.out.size == 0:
            return None
        return self.out.take(self.safe_end() if self.out.gated() else UINT64_MAX)

    # The passive entry: what tests, fuzzers and replays call instead of a connection. It blocks on nothing: a
    # session that is blocked gets what was kept together with the next bytes, also if these are none.

    def feed(self, data=b"", now=None):
        """Receives these bytes after those that were left over, and returns all that may leave."""
        cdef bytes whole = bytes(data) if self.tail is None else self.tail + bytes(data)
        cdef Py_ssize_t n = len(whole)
        cdef Py_ssize_t used
        self.tail = whole
        self.blocked = False
        self.waits_space = self.waits_room = False
        self.waits_safe = 0
        self.wanted = 0
        used = self.receive(<const uint8_t*> PyBytes_AS_STRING(whole), n, hr_now_us() if now is None else now)
        if used > n:
            raise ValueError(f"{type(self).__name__} used {used} of {n} bytes")
        self.tail = whole[used:] if used < n else None
        return self.released() or b""

    def pull(self, now=None, Py_ssize_t room=1 << 16):
        """Has the session deliver about as many bytes as there is room for, and returns all that may leave."""
        self.more = False
        self.deliver(hr_now_us() if now is None else now, room)
        return self.released() or b""

    def elapse(self, now=None):
        """Tells the session the time, and returns all that may leave."""
        self.tick(hr_now_us() if now is None else now)
        return self.released() or b""

    def stop(self, now=None):
        """Tells the session that the gateway stops, and returns all that may leave."""
        self.drain(hr_now_us() if now is None else now)
        return self.released() or b""

    def leave(self, now=None):
        """Tells the session that its peer is gone."""
        self.tail = None
        self.lost(hr_now_us() if now is None else now)

    @property
    def kept(self):
        """How many bytes feed() keeps as an unfinished frame."""
        return 0 if self.tail is None else len(self.tail)


cdef class PySession(Session):
    cdef Py_ssize_t receive(self, const uint8_t* data, Py_ssize_t n, int64_t now) except -1:
        cdef Py_ssize_t used = self.on_bytes(PyBytes_FromStringAndSize(<const char*> data, n), now)
        if used < 0:
            raise ValueError(f"{type(self).__name__}.on_bytes returned {used}")
        return used

    cdef int deliver(self, int64_t now, Py_ssize_t room) except -1:
        self.on_deliver(now, room)
        return 0

    cdef int tick(self, int64_t now) except -1:
        self.on_tick(now)
        return 0

    cdef int drain(self, int64_t now) except -1:
        self.on_drain(now)
        return 0

    cdef int lost(self, int64_t now) except -1:
        self.on_lost(now)
        return 0

    cdef uint64_t safe_end(self) noexcept:
        # An error here must not open gates; Cython reports it as unraisable and 0 keeps them closed.
        return self.on_safe_end()

    def on_bytes(self, data, now):
        """Parses all that is whole and returns how many bytes it is done with."""
        raise NotImplementedError(f"{type(self).__name__}.on_bytes")

    def on_deliver(self, now, room):
        """Puts up to about `room` bytes for the peer; sets `more` if it stopped for want of room."""

    def on_tick(self, now):
        """A few times a second."""

    def on_drain(self, now):
        """The gateway is about to stop: a last word may be put."""

    def on_lost(self, now):
        """The connection is gone."""

    def on_safe_end(self):
        """The log's safe end, by which gates open; all are open unless this is overridden."""
        return UINT64_MAX

    def put(self, data):
        """Puts these bytes at the end of the output."""
        self.out.write(data)

    def gate(self, safe_offset):
        """Bytes put from here on may leave only when the log's safe end is at least this offset."""
        self.out.gate(safe_offset)
