# One peer's stream between an event loop and a session, and what the connections of a loop share.
# It knows nothing of protocols, logs or configuration.

from libc.stdint cimport int64_t, uint8_t, uint64_t

from headrace.session cimport Session


cdef struct Tally:
    uint64_t opened         # connections that got a session
    uint64_t closed         # of these, the ones that are gone
    uint64_t refused        # connections above the limit, or while draining
    uint64_t stalled        # dropped because the peer read nothing
    uint64_t idled          # closed because nothing was said
    uint64_t failed         # closed because the session raised an error
    uint64_t reads
    uint64_t bytes_in
    uint64_t writes
    uint64_t bytes_out


# What one protocol offers on all of its listeners: how sessions are made, their limits, and what was counted.
# Limits may be set at any time and hold for connections that are open, too.
cdef class Service:
    cdef readonly str protocol
    cdef public object factory              # called with nothing, returns a new Session
    cdef public Py_ssize_t max_frame        # no unfinished frame is kept beyond this
    cdef public Py_ssize_t high_water       # bytes of output from which on a peer must read before it gets more
    cdef public Py_ssize_t max_connections
    cdef public double stall_timeout        # seconds
    cdef public double idle_timeout         # seconds; 0: none
    cdef public bint quickack
    cdef Tally tally


# The memory that a read lands in, for all connections of a loop: between get_buffer() and the end of
# buffer_updated() it belongs to one connection, and to none at any other time.
cdef class ReadBuffer:
    cdef uint8_t* base
    cdef readonly Py_ssize_t size
    cdef object whole       # a view of all of it, for reads that begin at the front


# All connections of one loop.
cdef class Switchboard:
    cdef object loop
    cdef object call_soon
    cdef object observer            # told of refusals, stalls, idle closes and failures
    cdef ReadBuffer reads
    cdef set connections            # those with a session
    cdef set safe_waiters           # those with gated output, or blocked until something is safe
    cdef set space_waiters          # those blocked until the log has space
    cdef list due                   # those that asked for a turn
    cdef bint turn_scheduled
    cdef double tick_seconds
    cdef object timer               # of the next sweep
    cdef list empty_waiters         # futures of those who wait until no connection is left
    cdef readonly bint draining
    cdef public Py_ssize_t max_connections  # of all services together

    cdef int schedule(self, Connection connection) except -1
    cdef int forget(self, Connection connection) except -1


cdef class Connection:
    cdef Switchboard board
    cdef Service service
    cdef Session session            # None before connection_made() and after connection_lost()
    cdef object transport
    cdef object write               # transport.write
    cdef readonly str name          # "<protocol>-<n>"
    cdef readonly str peer          # "host:port", "[v6]:port" or "unix"
    cdef int fd                     # of the socket; -1 where the transport has none to show
    cdef bint tcp

    # The bytes that no whole frame was made of yet.
    cdef uint8_t* kept
    cdef Py_ssize_t kept_size
    cdef Py_ssize_t kept_room
    cdef bint reads_into_kept       # the read under way lands behind them, not in the shared buffer

    # What goes on.
    cdef bint tls
    cdef bint refused               # never got a session
    cdef bint reading_paused        # by us
    cdef bint writing_paused        # by the transport: the peer does not read
    cdef bint scheduled             # in the list of those that get a turn
    cdef bint deliver_due           # somebody called wake()
    cdef bint retry_due             # somebody called unblock()
    cdef bint eof                   # the peer will say no more
    cdef bint draining
    cdef bint discarding            # our side is finished; what still comes in is thrown away
    cdef bint closed                # the transport was told to close

    # For the sweep.
    cdef bint stirred               # bytes went in or out since the last one
    cdef bint unflushed             # the transport may hold bytes
    cdef bint newly_unflushed       # since the last sweep
    cdef uint64_t sent              # bytes given to the transport
    cdef uint64_t flushed           # of these, those that it did not hold at the last sweep
    cdef double stirred_at          # loop time
    cdef double flushed_at
    cdef double linger_until

    cdef int keep(self, const uint8_t* data, Py_ssize_t n) except -1
    cdef int grow(self, Py_ssize_t room) except -1
    cdef int consume(self, const uint8_t* data, Py_ssize_t n, int64_t now) except -1
    cdef int settle(self) except -1
    cdef int flush(self) except -1
    cdef bint may_deliver(self) noexcept
    cdef int finish(self) except -1
    cdef int turn(self, int64_t now) except -1
    cdef int safe_moved(self) except -1
    cdef int begin_drain(self, int64_t now) except -1
    cdef int sweep(self, double time, int64_t now) except -1
    cdef int watch_flush(self, double time) except -1
    cdef int close(self) except -1
    cdef int fail(self, object error) except -1
