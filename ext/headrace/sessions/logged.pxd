# What every session that publishes has to do with the log. See logged.pyx.

from libc.stdint cimport int64_t, uint64_t

from headrace.bus cimport Bus
from headrace.log cimport Message, Origin
from headrace.session cimport Session


cdef class LoggedSession(Session):
    cdef Bus bus
    cdef Origin* origin                 # whom the log names as the sender; freed with the session
    cdef Message message                # filled anew for each publish
    cdef uint64_t confirmed_lsn         # what this peer was told, or will be, is safe once the log is up to here
    cdef bint sync_wanted               # this read event moved confirmed_lsn
    cdef int64_t full_since             # the log has had no room for this peer since then; 0: it has
    cdef uint64_t full_segment          # number of the segment that was the last one then

    # The sender of what is published from now on.
    cdef int name_origin(self, str name) except -1
    # What is said to this peer from now on may imply that the log is safe up to here.
    cdef int confirm_at(self, uint64_t lsn) noexcept
    # What is put from here on leaves when all that confirm_at() was told is safe.
    cdef int gate(self) except -1
    # At the end of a read event: subscribers hear of it, and a sync is asked for if somebody waits for one.
    cdef int flush(self, int64_t now) except -1
    # What became of an append that was not done: True if the session is to wait for room, False if it did so long enough,
    # or if it is no use.
    cdef bint wait_for_room(self, int rc, int64_t patience, int64_t now) noexcept
    # For tick(): who waited long enough is called again, and then refused.
    cdef int stop_waiting(self, int64_t patience, int64_t now) except -1
    cdef str why_not_appended(self)
    # For tick() and drain(): a sync that failed is final.
    cdef int check_log(self) except -1
    # It failed, and this peer waited for it: counts it and ends the connection.
    cdef int unconfirmed(self) except -1
