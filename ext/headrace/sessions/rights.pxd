# Who may publish and subscribe to what: keys and their filters, with the answers kept per topic. See rights.pyx.

from libc.stdint cimport uint8_t, uint32_t


cdef struct Answers:                    # what a list of filters says, by topic id
    uint8_t* known                      # 0 not asked yet, 1 yes, 2 no
    uint32_t room


cdef class Rights:
    cdef readonly str name
    cdef readonly bint revoked          # the key is gone, or has another secret now
    cdef readonly uint32_t changes      # how often the filters were replaced: answers kept elsewhere are stale after it
    cdef list publish_filters
    cdef list subscribe_filters
    cdef Answers publish_answers
    cdef Answers subscribe_answers

    # `topic` is its id on the bus, or 0 where it has none yet: the answer is then not kept.
    cdef bint may_publish(self, uint32_t topic, const char* text, Py_ssize_t n) except -1
    cdef bint may_subscribe(self, uint32_t topic, const char* text, Py_ssize_t n) except -1
    cdef bint may_follow(self, bytes filter) except -1
    cdef int set_filters(self, list publish, list subscribe) except -1
    cdef int revoke(self) except -1


cdef class Keyring:
    cdef list keys                      # (secret, Rights)
    cdef Rights find(self, bytes secret)
    cdef Rights named(self, str name)
