# BlipMQ sessions: what they share, and the state of one. See blipmq.pyx.

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from headrace.bus cimport Bus, Member, Subscription
from headrace.sessions.logged cimport LoggedSession
from headrace.sessions.rights cimport Keyring, Rights
from headrace.wire.blipmq cimport RawFrame

cdef enum:
    MEMO_BYTES = 256                # a topic up to this long is remembered from one publish to the next


cdef struct Counts:
    uint64_t hellos
    uint64_t authenticated
    uint64_t polls
    uint64_t polls_empty
    uint64_t acks
    uint64_t pings
    uint64_t bad_frames             # closed for a length or a type
    uint64_t handshakes_late        # closed for not authenticating in time
    uint64_t nack_400
    uint64_t nack_401
    uint64_t nack_404
    uint64_t nack_426
    uint64_t nack_500
    uint64_t dropped_full           # QoS 0 publishes dropped: the log was full for block_timeout, or had failed
    uint64_t refused_full           # QoS 1 publishes refused for the same reasons
    uint64_t too_large              # messages that no BlipMQ frame or no log can carry
    uint64_t unconfirmed            # closed because a sync failed: what was published can never be confirmed


cdef class Share:
    """A subscription in use: all connections of its key that poll it do so as one member."""
    cdef Member member
    cdef bytes address              # its topic as peers write it; None if the map has none that fits
    cdef uint32_t users             # connections; the last one that goes leaves the subscription


cdef class Blipmq:
    """What all BlipMQ sessions of a gateway share."""
    cdef readonly Bus bus
    cdef readonly Keyring keys
    cdef public uint32_t max_length             # largest length field
    cdef public int64_t handshake_timeout_us    # 0: none
    cdef public int64_t block_timeout_us
    cdef public uint32_t max_subscriptions      # of one connection
    cdef public object map                      # headrace.mapping.Map of topics as peers write them; None: they are the bus's
    cdef dict shares                            # subscription id -> Share
    cdef uint64_t ids_known                     # Bus.ids_written when it was last looked at
    cdef uint64_t ids_lsn                       # the log has these ids for given out once it is safe up to here
    cdef Counts counts


cdef class BlipmqSession(LoggedSession):
    cdef Blipmq shared
    cdef bint greeted                   # HELLO was performed
    cdef Rights rights                  # of the key that authenticated; None before
    cdef dict used                      # subscription id -> Share, of the subscriptions used here
    cdef uint64_t last_id               # the subscription of the last POLL; 0: none, or its rights may have changed
    cdef Share last_share
    cdef bint last_allowed              # its topic may still be subscribed to
    cdef bint unfenced                  # QoS 0 messages were published since the last POLL that had to see them
    cdef int64_t began                  # when the session was first told the time, or lost its key
    cdef uint32_t memo_topic            # the last topic published to: allowed, known to the bus. 0: none
    cdef uint32_t rights_changes        # Rights.changes when what is remembered here was found out
    cdef uint16_t memo_size
    cdef uint8_t memo[MEMO_BYTES]

    cdef int on_frame(self, RawFrame* frame, int64_t now) except -1
    cdef int on_hello(self, RawFrame* frame, int64_t now) except -1
    cdef int on_auth(self, RawFrame* frame, int64_t now) except -1
    cdef int on_publish(self, RawFrame* frame, int64_t now) except -1
    cdef int on_subscribe(self, RawFrame* frame, int64_t now) except -1
    cdef int on_ack(self, RawFrame* frame, int64_t now) except -1
    cdef int on_poll(self, RawFrame* frame, int64_t now) except -1
    cdef int on_ping(self, RawFrame* frame, int64_t now) except -1
    cdef int renew_rights(self, int64_t now) except -1
    cdef Subscription own(self, uint64_t id)
    cdef Share share_of(self, uint64_t id, int64_t now)
    cdef bytes topic_of(self, const uint8_t* address, Py_ssize_t n)
    cdef Share use(self, Subscription subscription, int64_t now)
    cdef int stop_using(self, uint64_t id, int64_t now) except -1
    cdef int stop_using_all(self, int64_t now) except -1
    cdef int not_appended(self, int rc, uint8_t qos, uint64_t correlation, int64_t now) except -1
    cdef int ack(self, uint64_t correlation, uint64_t id) except -1
    cdef int nack(self, uint64_t correlation, uint16_t code, str text) except -1
    cdef str forbidden(self, str right, const uint8_t* topic, Py_ssize_t n)
