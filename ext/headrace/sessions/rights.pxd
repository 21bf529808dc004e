# Who may publish and subscribe to what: keys and their filters, with the answers kept per topic. See rights.pyx.

from libc.stdint cimport uint8_t, uint32_t


cdef class Rights:
    cdef readonly str name
    cdef readonly bint revoked          # the key is gone from the configuration
    cdef readonly uint32_t changes      # how often the filters were replaced: answers kept elsewhere are stale after it
    cdef list publish_filters
    cdef list subscribe_filters
    cdef uint8_t* publish_answers       # by topic id: 0 not asked yet, 1 yes, 2 no
    cdef uint32_t publish_room

    cdef bint may_publish(self, uint32_t topic, const char* text, Py_ssize_t n) except -1
    cdef bint may_subscribe(self, const char* text, Py_ssize_t n) except -1


cdef class Keyring:
    cdef dict rights                    # name -> Rights
    cdef list secrets                   # (secret, Rights)
    cdef Rights find(self, bytes secret)
