# Felix sessions: what they share, what one connection is, and the state of one stream. See felix.pyx.

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from headrace.bus cimport Bus, Member, Subscription
from headrace.log cimport Origin
from headrace.session cimport Session
from headrace.sessions.logged cimport LoggedSession
from headrace.sessions.rights cimport Rights
from headrace.wire.bytes cimport View
from headrace.wire.felix cimport RawFrame

cdef enum:
    MEMO_BYTES = 512                # names of a binary batch up to this long are remembered from one to the next
    MOST_IN_BATCH = 4096            # events in one frame


cdef struct Counts:
    uint64_t publishes              # requests, whatever came of them
    uint64_t batches
    uint64_t binary_batches
    uint64_t subscribes
    uint64_t cache_puts
    uint64_t cache_gets
    uint64_t cache_hits
    uint64_t cache_misses           # missing or expired
    uint64_t cache_expired          # found and removed because their time was over
    uint64_t cache_evicted          # removed for want of room
    uint64_t cache_refused          # values that are larger than the whole cache may be
    uint64_t bad_headers            # magic, version or length: the connection or stream was ended
    uint64_t bad_messages           # no JSON, no known type, or not what the type asks for
    uint64_t bad_batches
    uint64_t wrong_kind             # a message that does not belong on its kind of stream
    uint64_t unauthorized
    uint64_t not_found              # of streams and caches that the registry does not have
    uint64_t refused                # requests refused for any other reason
    uint64_t refused_silently       # of all that were refused, those whose sender was not told
    uint64_t dropped_full           # messages of publishes that nobody waited for: the log was full for block_timeout
    uint64_t refused_full           # publishes refused for the same reason
    uint64_t too_large              # messages that no frame or no log can carry
    uint64_t subscriptions_ended    # by the gateway: the right or the stream was taken away
    uint64_t unconfirmed            # streams ended because a sync failed: what was published can never be confirmed


cdef class Cache:
    cdef object entries             # an OrderedDict: (tenant, namespace, cache, key) -> (quoted Base64, deadline); least used first
    cdef public uint64_t max_entries
    cdef public uint64_t max_bytes
    cdef readonly uint64_t bytes    # of keys, values and what holding them costs
    cdef int put(self, tuple key, bytes value, int64_t deadline, Counts* counts) except -1
    cdef object get(self, tuple key, int64_t now, Counts* counts)
    cdef int drop(self, tuple key, object entry) except -1


cdef class Felix:
    """What all Felix streams of a gateway share."""
    cdef readonly Bus bus
    cdef readonly Cache cache
    cdef public uint32_t max_length             # largest length field
    cdef public int64_t block_timeout_us
    cdef public uint32_t max_subscriptions      # of one connection
    cdef public bint mild                       # a bad header ends its stream alone
    cdef public bint reference                  # how requests are read that do not show their dialect
    cdef public uint32_t batch_events           # most events in a frame
    cdef public uint64_t batch_bytes            # a frame ends when it has as many bytes of payload
    cdef public int64_t batch_delay_us          # how long a frame that is not full may wait for more
    cdef public object map                      # headrace.mapping.Map of "tenant/namespace/stream"; None: the protocol's own rule
    cdef bint strict                            # only what is registered exists
    cdef set streams                            # (tenant, namespace, stream)
    cdef set caches
    cdef readonly uint32_t registry_changes
    cdef uint64_t next_subscription             # id for those who choose none
    cdef uint32_t topics_seen                   # of the log's topics, those that were looked at for their address
    cdef uint64_t topics_without_address
    cdef View items[MOST_IN_BATCH]              # of the frame being written
    cdef Counts counts


cdef class FelixPeer:
    """One connection: who it is, what it may do, and what its streams have in common."""
    cdef readonly Felix shared
    cdef readonly str address
    cdef Rights rights                  # None: it may do nothing
    cdef object opener                  # called with each new event stream's session
    cdef Origin* origin
    cdef dict topics                    # (tenant, namespace, stream) -> topic id: those that it may publish to
    cdef uint32_t rights_changes        # when `topics` was found out
    cdef uint32_t registry_changes
    cdef uint32_t generation            # moves when what it may do, or what there is, may be something else
    cdef dict subscriptions             # id -> FelixEvents

    cdef int renew(self) except -1
    cdef uint32_t publish_topic(self, str tenant, str namespace, str stream) except? 0
    cdef bint may(self, bint publish, str topic) except -1


cdef class FelixStream(LoggedSession):
    """A stream that the client opened."""
    cdef Felix shared
    cdef readonly FelixPeer peer
    cdef readonly bint one_way          # only publishes may come, and nothing can be answered
    cdef public object violation        # why the connection has to be closed, or None
    cdef uint32_t memo_topic            # the topic of the last binary batch; 0: none
    cdef uint32_t memo_generation
    cdef uint16_t memo_size
    cdef uint8_t memo[MEMO_BYTES]

    cdef int on_message(self, RawFrame* frame, int64_t now) except -1
    cdef int on_binary(self, RawFrame* frame, int64_t now) except -1
    cdef int on_publish(self, object wish, int64_t now) except -1
    cdef int on_publish_batch(self, object wish, int64_t now) except -1
    cdef int on_subscribe(self, object wish, int64_t now) except -1
    cdef int on_cache_put(self, object wish, int64_t now) except -1
    cdef int on_cache_get(self, object wish, int64_t now) except -1
    cdef tuple scope(self, object wish, bint put)
    cdef int append(self, uint32_t topic, View payload, bint text, bint acked, uint64_t correlation, int64_t now) noexcept
    cdef int not_appended(self, int rc, object wish, bint acked, uint64_t messages, int64_t now) except -1
    cdef int confirm(self, object wish) except -1
    cdef int refuse(self, object wish, bint acked, str text) except -1
    cdef int refuse_with(self, object wish, bint acked, object error) except -1
    cdef int refuse_binary(self, str text) except -1
    cdef int say(self, object message) except -1
    cdef bint say_if_it_fits(self, object message) except -1
    cdef int end(self) except -1
    cdef int bad_header(self, int bad, const uint8_t* data) except -1


cdef class FelixEvents(Session):
    """A stream that the gateway opens: one subscription."""
    cdef Felix shared
    cdef Bus bus
    cdef readonly FelixPeer peer
    cdef readonly object id             # a number in the reference's dialect, a text in the specification's
    cdef readonly str topic
    cdef tuple address
    cdef bint binary
    cdef Member member
    cdef bytes event_head               # of a JSON event, up to its payload
    cdef bytes batch_head               # of a JSON event_batch, up to its first payload
    cdef uint32_t generation            # of the peer, when the right to it was last found

    cdef uint64_t cost(self, uint64_t payload) noexcept
    cdef int write_frame(self, uint32_t count) except -1
