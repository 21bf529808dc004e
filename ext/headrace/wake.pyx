"""Whoever can be told that there is something to do: what lets the bus wake a session that it knows nothing of."""


cdef class Waker:
    """To be derived from; wake() is called at most once per loop turn and subscription, and must only take note."""

    cdef int wake(self) except -1:
        return 0


cdef class CallbackWaker(Waker):
    """Calls a Python callable, for who is not compiled."""

    def __init__(self, callback):
        if not callable(callback):
            raise TypeError(f"{callback!r} cannot be called")
        self.callback = callback

    cdef int wake(self) except -1:
        self.callback()
        return 0
