"""A byte stream in pieces of any size, given back as the items in it: what all codecs' decoders share. What an item is, each
codec knows."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from libc.stdint cimport uint8_t
from libc.string cimport memcpy


cdef class StreamDecoder:
    def __cinit__(self, *args, **kwargs):
        self.tail = bytearray()

    @property
    def pending(self):
        """How many bytes of the unfinished item are kept."""
        return PyByteArray_GET_SIZE(self.tail)

    def feed(self, data):
        """What `data` completes, in order.

        What is before a bad item is returned and the next call raises the error (`error` has it at once); if there is
        nothing before it, it is raised right away.
        """
        cdef Py_buffer buffer
        cdef list items = []
        if self.error is not None:
            raise self.error
        PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE)
        try:
            self.read(<const uint8_t*>buffer.buf, buffer.len, items)
        finally:
            PyBuffer_Release(&buffer)
        if self.error is not None:
            PyByteArray_Resize(self.tail, 0)
            self.wanted = 0
            if not items:
                raise self.error
        return items

    cdef int read(self, const uint8_t* data, Py_ssize_t n, list items) except -1:
        cdef Py_ssize_t held = PyByteArray_GET_SIZE(self.tail), before, take, used
        # First the kept item alone is completed, so that what follows it is read in place.
        while held and n:
            take = min(n, max((self.wanted if self.wanted else self.least) - held, 1))
            PyByteArray_Resize(self.tail, held + take)
            memcpy(PyByteArray_AS_STRING(self.tail) + held, data, take)
            data += take
            n -= take
            before = held
            held += take
            if held < self.wanted and before >= self.judged:
                return 0
            used = self.next_item(<const uint8_t*>PyByteArray_AS_STRING(self.tail), held, items)
            if used < 0:
                return 0
            if used:
                # What is wanted grows until the item is known, so nothing is held beyond its end.
                PyByteArray_Resize(self.tail, 0)
                held = 0
        while n:
            used = self.next_item(data, n, items)
            if used < 0:
                return 0
            if used == 0:
                PyByteArray_Resize(self.tail, n)
                memcpy(PyByteArray_AS_STRING(self.tail), data, n)
                return 0
            data += used
            n -= used
        return 0

    cdef Py_ssize_t next_item(self, const uint8_t* data, Py_ssize_t n, list items) except -2:
        raise NotImplementedError(f"{type(self).__name__} has no items")
