# One stream of a connection that has many, between whoever runs the transport and a session. See substream.pyx.

from libc.stdint cimport int64_t, uint8_t, uint64_t

from headrace.connection cimport Service
from headrace.session cimport Session


cdef class Substream:
    cdef readonly Session session       # None when the stream is over
    cdef Service service
    cdef readonly object owner          # the connection: schedule(), wait_safe(), wait_space(), violate(), over(), failed()
    cdef object send                    # send(number, bytes, fin)
    cdef object unsent                  # unsent(number): bytes that the transport holds and has not sent once
    cdef readonly int64_t number
    cdef readonly bint readable         # the peer may write to it
    cdef readonly bint writable         # we may
    cdef readonly str name
    cdef readonly str peer

    # The bytes that no whole frame was made of yet.
    cdef uint8_t* kept
    cdef readonly Py_ssize_t kept_size
    cdef Py_ssize_t kept_room

    # What goes on.
    cdef public bint scheduled          # the owner's: it is in the list of those that get a turn
    cdef bint arrived                   # bytes came since the last turn
    cdef bint deliver_due               # somebody called wake()
    cdef bint retry_due                 # somebody called unblock()
    cdef readonly bint fin              # the peer will say no more
    cdef readonly bint draining
    cdef readonly bint stuck            # output waits until the transport has sent what it holds
    cdef public uint64_t watched        # for the owner's sweep: what the transport held last, and since when
    cdef public double watched_at

    cdef int settle(self) except -1
    cdef int flush(self) except -1
    cdef int forget(self, Py_ssize_t n) except -1
    cdef bint may_deliver(self) noexcept
