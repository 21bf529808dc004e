"""What every session that publishes has to do with the log: promises that wait until it is safe, publishes that wait until
it has room, and what is left to say when it failed.

What of it a peer is told, and in which words, is its protocol's affair.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memset

from headrace.log cimport APPEND_FULL, Message
from headrace.session cimport Output, Session


cdef class LoggedSession(Session):
    def __cinit__(self, *args, **kwargs):
        memset(&self.message, 0, sizeof(Message))

    def __dealloc__(self):
        # What Log.close_origin() does; the garbage collector may have taken the log from here already.
        free(self.origin)

    cdef uint64_t safe_end(self) noexcept:
        return self.bus.log.safe_lsn()

    cdef int name_origin(self, str name) except -1:
        if self.origin != NULL:
            self.message.origin = NULL
            self.bus.log.close_origin(self.origin)
            self.origin = NULL
        peer = "" if self.connection is None else self.connection.peer
        self.message.origin = self.origin = self.bus.log.open_origin(f"{name}@{peer}".encode())
        return 0

    # --- safe ----------------------------------------------------------------------------------------------------------

    cdef int confirm_at(self, uint64_t lsn) noexcept:
        if lsn > self.confirmed_lsn:
            self.confirmed_lsn = lsn
            self.sync_wanted = True
        return 0

    cdef int gate(self) except -1:
        if self.confirmed_lsn > self.bus.log.safe_lsn():
            return self.out.gate(self.confirmed_lsn)
        return 0

    cdef int flush(self, int64_t now) except -1:
        self.bus.flush(now)
        if self.sync_wanted:
            self.sync_wanted = False
            if self.bus.log.safe_lsn() < self.confirmed_lsn:
                self.bus.log.ask_sync()
        return 0

    # --- full ----------------------------------------------------------------------------------------------------------

    cdef bint wait_for_room(self, int rc, int64_t patience, int64_t now) noexcept:
        if rc != APPEND_FULL:
            return False
        # In another segment than then, there was room in between.
        if self.full_since == 0 or self.full_segment != self.bus.log.active.number:
            self.full_since = now
            self.full_segment = self.bus.log.active.number
        if now - self.full_since >= patience:
            return False
        self.blocked = self.waits_space = True
        return True

    cdef int stop_waiting(self, int64_t patience, int64_t now) except -1:
        if self.blocked and self.waits_space and now - self.full_since >= patience:
            self.unblock()
        return 0

    cdef str why_not_appended(self):
        return self.bus.log.failed or self.bus.log.full or "the log has no room"

    # --- failed --------------------------------------------------------------------------------------------------------

    cdef int check_log(self) except -1:
        """What waits for a sync that failed would wait for ever. It is not said, and the connection ends, so that the peer
        knows that it was not confirmed."""
        cdef Output rest
        if (
            self.closing or not self.bus.log.open or self.confirmed_lsn <= self.bus.log.safe_lsn()
            or self.bus.log.failed is None
        ):
            return 0
        rest = Output()
        may_leave = self.out.take(self.bus.log.safe_lsn())
        if may_leave is not None:
            rest.write(may_leave)
        self.out = rest
        return self.unconfirmed()

    cdef int unconfirmed(self) except -1:
        self.closing = True
        return 0
