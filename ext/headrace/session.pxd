# What every protocol session is to the rest of the gateway: bytes in, bytes out, time as an argument.
# It knows nothing of sockets, event loops, logs or any one protocol.

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint64_t

from headrace.wake cimport Waker


cdef struct Gate:
    uint64_t position       # place in the output stream from which on it holds
    uint64_t offset         # opens when the log's safe end has reached this


# A growable byte buffer whose later parts may be gated on the log's safe end. Owned by one session.
# An empty one holds no memory.
@cython.final
cdef class Output:
    cdef PyObject* store        # a bytes object nobody else has seen yet, filled in place; NULL while empty
    cdef uint8_t* base          # its first byte
    cdef Py_ssize_t capacity    # its length
    cdef Py_ssize_t start       # first byte that was not taken yet
    cdef Py_ssize_t end         # one past the last byte committed
    cdef Py_ssize_t usual       # how much was taken last: the size to begin with next time
    cdef readonly Py_ssize_t size   # bytes held: end - start
    cdef uint64_t taken         # bytes that ever left: the stream position of `start`
    cdef Gate* gates            # closed gates in order of position, each with a higher offset than the one before
    cdef Py_ssize_t gate_first
    cdef Py_ssize_t gate_end
    cdef Py_ssize_t gate_room

    cdef int make_room(self, Py_ssize_t n) except -1
    cdef void let_go(self) noexcept

    # Room for n more bytes at the end. The pointer is good until the next call of any method here.
    cdef uint8_t* reserve(self, Py_ssize_t n) except NULL
    # n bytes were written where reserve() said.
    cdef void commit(self, Py_ssize_t n) noexcept
    cdef int put(self, const void* data, Py_ssize_t n) except -1
    # Bytes put from here on may leave only when the safe end is at least this.
    cpdef int gate(self, uint64_t safe_offset) except -1
    # Where in the output stream the next byte is put.
    cdef uint64_t position(self) noexcept
    # The same as gate() for bytes that were put already, from a place in the stream on that did not leave yet. No gate may
    # wait for more than this one.
    cpdef int gate_from(self, uint64_t position, uint64_t safe_offset) except -1
    cdef int add_gate(self, uint64_t position, uint64_t safe_offset) except -1
    cdef bint gated(self) noexcept
    # How many bytes may leave now; forgets the gates that are open.
    cpdef Py_ssize_t releasable(self, uint64_t safe) noexcept
    # Those bytes as one bytes object, removed from here; None if there are none.
    cpdef object take(self, uint64_t safe)


cdef class Session(Waker):
    cdef readonly Output out
    cdef public bint closing        # flush what may leave, then close the connection
    cdef public bint blocked        # cannot parse on now: stop reading, keep the rest, call receive() with it again
                                    # after unblock()
    cdef public bint more           # deliver() stopped for want of room and has more for the peer now
    cdef public bint waits_space    # blocked until the log has space
    cdef public bint waits_room     # blocked until the peer has read most of `out`
    cdef public uint64_t waits_safe # blocked until the log's safe end has reached this; 0: not for that
    cdef public Py_ssize_t wanted   # whole length of the unfinished frame if known, else 0; bounded by the protocol's
                                    # own limit. receive() finds 0 here and is not called again before so much is there
    cdef public Py_ssize_t high_water   # bytes of output that a peer may leave unread; beyond it receive() does best to
                                    # stop, blocked with waits_room, where its answers can be larger than the requests
    cdef public object connection   # who carries the bytes: has wake(), unblock(), peer and name; None if nobody does
    cdef bytes tail                 # what feed() keeps between its calls

    # Parses all that is whole, answers into `out`. Returns how many bytes it is done with. The bytes are borrowed:
    # none may be referred to after it returned. After unblock() there may be none.
    cdef Py_ssize_t receive(self, const uint8_t* data, Py_ssize_t n, int64_t now) except -1
    # Fills `out` with up to about `room` bytes for the peer.
    cdef int deliver(self, int64_t now, Py_ssize_t room) except -1
    # A few times a second, for what depends on time.
    cdef int tick(self, int64_t now) except -1
    # The gateway is about to stop: a last word to the peer may be put. Nothing is received or delivered after it.
    cdef int drain(self, int64_t now) except -1
    # The connection is gone: free subscriptions and the like. Called once, whatever happened before.
    cdef int lost(self, int64_t now) except -1
    # The log's safe end, by which gates open. The base has no log, so all of its gates are open.
    cdef uint64_t safe_end(self) noexcept

    # Has receive() called again with the bytes that were kept.
    cpdef int unblock(self) except -1
    # What may leave now, or None.
    cdef object released(self)


# A session written in Python: for protocols where that is fast enough, and for tests.
cdef class PySession(Session):
    pass
