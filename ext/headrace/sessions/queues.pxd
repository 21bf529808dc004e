# Queues of jobs on the bus: what they are and where they stand. See queues.pyx.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from headrace.bus cimport Bus, Subscription


cdef class Queue:
    cdef readonly str name
    cdef bytes label                    # the name's bytes
    cdef readonly str id                # a UUID
    cdef readonly str filter            # what is published there is a job
    cdef readonly Subscription subscription
    cdef uint32_t topic                 # where jobs are put that are given to the queue by name
    cdef bytes topic_name
    cdef readonly object concurrency_limit  # an int, or None
    cdef readonly bint allow_job_overrides
    cdef readonly bint paused
    cdef readonly bint gone             # it was removed

    cdef bint system(self) noexcept


cdef class Queues:
    cdef readonly Bus bus
    cdef dict by_label                  # name's bytes -> Queue
    cdef readonly uint32_t most
    cdef readonly int64_t deadline_us
    cdef readonly uint32_t keep_finished
    cdef object map                     # headrace.mapping.Map of names; None: the protocol's own rule
    cdef object on_finished             # Subscription.on_finished of all queues
    cdef uint8_t mark[16]               # what the ids of this log's jobs have in common

    cdef Queue find(self, const uint8_t* name, Py_ssize_t n)
    cdef void job_uuid(self, uint64_t offset, uint8_t* out) noexcept nogil
    cdef bint job_offset(self, const uint8_t* uuid, uint64_t* offset) noexcept nogil
