# What every codec's decoder of a byte stream is: see decoding.pyx.

from libc.stdint cimport int64_t, uint8_t


cdef class StreamDecoder:
    cdef readonly int64_t position      # where in the stream the first unfinished item begins
    cdef readonly Py_ssize_t wanted     # how many bytes that has at least, or 0 while it is not known
    cdef readonly object error          # what ended the stream, or None
    cdef bytearray tail                 # the unfinished item; grows with what arrives, not with what is announced
    cdef Py_ssize_t least               # bytes of an item that tell what is wanted
    cdef Py_ssize_t judged              # bytes after which an item that is not whole can no longer turn out to be bad

    cdef int read(self, const uint8_t* data, Py_ssize_t n, list items) except -1
    # A codec's own: how many bytes the item at the front has, which is then in `items`, with `position` behind it and
    # `wanted` as for the next one. 0: it is unfinished, and `wanted` says what is known; -1: `error` says what is wrong.
    cdef Py_ssize_t next_item(self, const uint8_t* data, Py_ssize_t n, list items) except -2
