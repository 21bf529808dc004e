# Whoever can be told that there is something to do: what lets the bus wake a session that it knows nothing of.

cdef class Waker:
    cdef int wake(self) except -1


cdef class CallbackWaker(Waker):
    cdef readonly object callback
