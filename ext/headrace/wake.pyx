"""Whoever can be told that there is something to do: what lets the bus wake a session that it knows nothing of."""


cdef class Waker:
    """To be derived from; wake() is called at most once per loop turn and subscription, and must only take note."""

    cdef int wake(self) except -1:
        return 0
