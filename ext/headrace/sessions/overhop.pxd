# Overhop sessions: what they share, and the state of one. See overhop.pyx.

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from headrace.bus cimport Bus, Delivery, Member
from headrace.sessions.logged cimport LoggedSession
from headrace.sessions.queues cimport Queue, Queues
from headrace.sessions.rights cimport Keyring, Rights
from headrace.wire.bytes cimport View
from headrace.wire.overhop cimport Envelope

cdef enum:
    UUID_CHARS = 36


cdef struct Counts:
    uint64_t hellos
    uint64_t registered
    uint64_t pings
    uint64_t idents                 # asked to register at last
    uint64_t enqueued
    uint64_t pushed
    uint64_t done
    uint64_t failed
    uint64_t extended
    uint64_t bad_frames             # closed for a length, or for a payload that is no envelope
    uint64_t violations             # closed for a message out of order or with wrong fields
    uint64_t timeouts               # closed for not greeting or registering in time
    uint64_t subscriptions_ended    # workers told that a queue of theirs was removed
    uint64_t refused                # ERR without closing
    uint64_t refused_full           # ENQUEUEs refused because the log had no room for block_timeout, or had failed
    uint64_t too_large              # messages that no envelope or no log can carry
    uint64_t unconfirmed            # closed because a sync failed: what was promised can never be kept


cdef class Overhop:
    """What all Overhop sessions of a gateway share."""
    cdef readonly Bus bus
    cdef readonly Queues queues
    cdef Keyring keys
    cdef public str key                     # name of the key whose rights all peers have; "": they may do all
    cdef Rights rights_                     # of that key
    cdef public uint32_t limit              # bytes of a payload
    cdef public int64_t unhelloed_us        # the three times of the purge
    cdef public int64_t unregistered_us
    cdef public int64_t ident_us
    cdef public int64_t block_timeout_us
    cdef public bint deliver                # jobs are pushed, and can be finished: the extension
    cdef readonly int64_t started
    cdef readonly uint32_t workers
    cdef readonly uint32_t anonymous
    cdef Counts counts

    cdef bint may(self, bint publish, Queue queue) except -1
    cdef bint may_add(self, str name) except -1
    cdef Rights rights(self)


cdef class Seat:
    """One worker's subscription to a queue."""
    cdef Queue queue
    cdef Member member
    cdef uint8_t id[16]
    cdef char sid[UUID_CHARS]


cdef class OverhopSession(LoggedSession):
    cdef Overhop shared
    cdef uint8_t state                  # ANONYMOUS, GREETED or WORKER
    cdef bint counted                   # among the shared anonymous ones or workers
    cdef readonly str wid               # of a worker
    cdef list seats
    cdef dict by_sid                    # 16 bytes -> Seat
    cdef Py_ssize_t turn                # which seat is served first
    cdef bint hungry                    # something happened after which more may be pushed
    cdef int64_t began                  # when the session was first told the time
    cdef int64_t checked                # when the purge last looked
    cdef int64_t helloed
    cdef int64_t ident_deadline         # 0: not asked
    cdef bint promised                  # this read event wrote answers that have to wait until all of it is safe
    cdef uint64_t promised_from         # place in the output stream of the first of them
    cdef Queue last_queue               # the one that was named last

    cdef int on_envelope(self, Envelope* envelope, int64_t now) except -1
    cdef int on_rarer(self, Envelope* envelope, int64_t now) except -1
    cdef int on_register(self, Envelope* envelope, int64_t now) except -1
    cdef int on_enqueue(self, Envelope* envelope, int64_t now) except -1
    cdef int on_credit(self, Envelope* envelope, int64_t now) except -1
    cdef int on_end_of_job(self, Envelope* envelope, int64_t now) except -1
    cdef int not_appended(self, int rc, Envelope* envelope, int64_t now) except -1
    cdef Queue queue_named(self, const View* name)
    cdef int find_job(self, const View* jid, uint64_t* offset) except -1
    cdef Seat seat_of(self, const View* sid, bint* valid)
    cdef int stand_up(self, Seat seat, int64_t now) except -1
    cdef int tell_ended(self, int64_t now) except -1
    cdef int push(self, Seat seat, const Delivery* delivery, int64_t now) except -1
    cdef int promise(self) noexcept
    cdef int keep_promises(self, int64_t now) except -1
    cdef int purge(self, int64_t now) except -1
    cdef int answer(self, const View* rid, int type, bytes payload) except -1
    cdef int ok_empty(self, const View* rid) except -1
    cdef int error(self, const View* rid, str code, str text, bint closes) except -1
    cdef int violation(self, const View* rid, str text) except -1
