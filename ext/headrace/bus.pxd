# The bus's C interface: what sessions publish and take with. See bus.pyx.

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from headrace.log cimport Keeper, Log, Message, Origin, RecordHeader, Segment, View
from headrace.trie cimport TopicTree, Trie
from headrace.wake cimport Waker


cdef enum Protocol:         # RecordHeader.protocol
    NO_PROTOCOL = 0         # the gateway itself: dead letters
    BLIPMQ = 1
    OVERHOP = 2
    RELINK = 3
    ZEROCTL = 4
    FELIX = 5
    PROTOCOLS = 8           # room in the counters

cdef enum BusControl:       # kinds of control records, from CONTROL_BUS on
    CONTROL_SUBSCRIPTION = 16   # the whole state of a durable subscription (JSON)
    CONTROL_UNSUBSCRIBE = 17    # correlation: subscription id
    CONTROL_ACK = 18            # correlation: subscription id; payload: floor, offsets above it that are acknowledged
    CONTROL_ATTEMPT = 19        # correlation: subscription id; payload: offset, deliveries so far
    CONTROL_CARRY = 20          # headers: subscription ids; payload: a message record as it was
    CONTROL_IDS = 21            # correlation: no subscription id at or above this was given out


cdef struct Positions:      # where a topic's messages are in the open segment
    uint32_t* list          # in units of 8 bytes
    uint32_t count
    uint32_t room
    uint32_t topic

cdef struct Index:          # Segment.index: open it is a list of Positions, sealed a mapped file
    uint64_t number
    Positions** open_lists
    uint32_t topics
    uint32_t room
    const uint32_t* mapped  # sealed: topics x (topic, start, count), sorted by topic; then all positions
    size_t mapped_size
    uint32_t* kept          # sealed, but no file could be made: the same words in memory

cdef struct Topic:
    uint64_t segment        # number of the segment that `here` belongs to
    Positions* here
    void** subscriptions    # Subscription objects that match, borrowed from Bus.subscriptions
    uint32_t subscriptions_count
    uint32_t subscriptions_room
    bint known              # filters were matched against it
    bint dirty              # it is on the list for the next dispatch

cdef struct Flight:         # delivered at least once, not yet acknowledged
    uint64_t offset
    uint64_t segment        # number
    uint64_t position
    int64_t due             # when to deliver it again; 0: now
    uint32_t deliveries
    uint32_t member         # who has it; 0: nobody
    bint done

cdef struct Delivery:
    View view
    uint64_t tag            # offset + 1: the same at each redelivery, and after a restart
    uint32_t deliveries     # this one included
    bint confirm            # an acknowledgement is expected


cdef class Subscription:
    cdef Bus bus
    cdef readonly uint64_t id
    cdef readonly bytes filter
    cdef readonly str owner             # whose it is: nobody else may use it
    cdef readonly uint8_t protocol
    cdef readonly bint exact            # `filter` is one topic's name
    cdef readonly bint at_least_once
    cdef readonly bint durable
    cdef readonly bint queue            # members share it
    cdef readonly bint confirm_all      # every message is to be acknowledged, however it was published
    cdef readonly bint closed
    cdef uint64_t restored_below        # offsets from before the restart that it came through
    cdef dict attempts                  # offset -> deliveries, from before that restart; None: none
    cdef uint32_t topic                 # exact: its id
    cdef uint32_t filter_id             # in the trie
    cdef uint64_t* interest             # filter: one bit per topic id
    cdef uint32_t interest_words
    # the cursor: everything before it was handed out
    cdef uint64_t segment               # number
    cdef uint64_t position              # filter: in the segment. exact: how many of the segment's list are behind
    cdef const uint32_t* list_          # exact, sealed segment: its list
    cdef uint32_t list_count
    cdef uint64_t list_segment          # number of the segment that list_ is of
    cdef uint64_t next_offset           # offset that the cursor is at or before
    # in flight
    cdef Flight* flights                # ring, ascending offsets
    cdef uint32_t flights_first
    cdef uint32_t flights_count
    cdef uint32_t flights_room          # a power of two
    cdef readonly uint32_t open_flights # not done
    cdef int64_t next_due
    cdef public uint32_t max_inflight
    cdef public uint32_t max_deliveries
    cdef public int64_t redelivery_us
    cdef public int64_t max_redelivery_us
    cdef public uint64_t max_pending    # 0: no limit; exact subscriptions only
    cdef set acked                      # offsets at or above the floor that were acknowledged in an earlier life
    cdef uint64_t* unwritten            # acknowledgements that the log does not have yet
    cdef uint32_t unwritten_count
    cdef uint32_t unwritten_room
    cdef bint ack_pending               # on the bus's list of those
    cdef bint waits_safe                # on the bus's list of those that met the safe end
    cdef uint64_t state_segment         # where its CONTROL_SUBSCRIPTION stands
    cdef list members
    cdef uint32_t next_member
    cdef Py_ssize_t turn                # round robin
    cdef int64_t alone_since            # no member since; 0: it has one
    cdef readonly uint64_t delivered
    cdef readonly uint64_t redelivered
    cdef readonly uint64_t acknowledged
    cdef readonly uint64_t dead
    cdef readonly uint64_t lost

    cpdef Member join(self, Waker waker, int64_t credits, int64_t now)
    cdef int take(self, Member member, int64_t now, Delivery* out) except -1
    cdef bint ack_offset(self, uint64_t offset) except -1
    cdef int settle(self) except -1
    cdef Flight* due_flight(self, int64_t now) except? NULL
    cdef int give_back(self, Flight* flight) except -1
    cdef int note_ack(self, uint64_t offset) except -1
    cdef bint matches(self, uint64_t offset) except -1
    cdef uint64_t low_water(self) noexcept
    cdef bint next_record(self, uint64_t limit, Segment** segment, uint64_t* position) except -1
    cdef void skip_one(self, Segment* segment, uint64_t position) noexcept
    cdef bint resolve(self, Segment* segment) noexcept
    cdef int seek_end(self) except -1
    cdef int seek(self, uint64_t offset) except -1
    cdef bint interested(self, uint32_t topic) noexcept nogil
    cdef int attach(self, uint32_t topic) except -1
    cdef Flight* flight(self, uint64_t offset) noexcept nogil
    cdef Flight* add_flight(self, uint64_t offset) except NULL
    cdef int64_t backoff(self, uint32_t deliveries) noexcept nogil
    cdef int bury(self, Flight* flight, int64_t now, str reason) except -1
    cdef int write_state(self, int64_t now) except -1
    cdef int write_acks(self, int64_t now) except -1
    cdef int leave(self, Member member, int64_t now) except -1
    cdef int wake_members(self) except -1
    cdef int overtaken(self, Segment* segment) except -1
    cdef int bury_tag(self, uint64_t tag, int64_t now, str reason) except -1
    cdef int64_t check_due(self, int64_t now) except -2
    cdef void apply_pending_limit(self) except *


cdef class Member:
    """One peer's part of a subscription."""
    cdef readonly Subscription subscription
    cdef readonly uint32_t id
    cdef Waker waker
    cdef public int64_t credits         # how many more it takes; -1: no limit
    cdef readonly uint32_t inflight
    cdef readonly bint gone


cdef class Bus(Keeper):
    cdef readonly Log log
    cdef public object schedule         # called with nothing when dispatch() has something to do; once until it ran
    cdef readonly dict subscriptions    # id -> Subscription
    cdef dict by_filter                 # trie id -> list of Subscription
    cdef Trie filters
    cdef TopicTree names
    cdef Topic* topics
    cdef uint32_t topics_room
    cdef readonly uint32_t max_topics
    cdef uint64_t open_number           # of the segment that has open Positions
    cdef uint32_t* dirty
    cdef uint32_t dirty_count
    cdef uint32_t dirty_room
    cdef bint scheduled
    cdef list acking                    # subscriptions with unwritten acknowledgements
    cdef list safe_waiters              # subscriptions to wake when the safe end moved
    cdef uint64_t next_id
    cdef uint64_t ids_written           # ids below this need no new CONTROL_IDS
    cdef uint64_t ids_segment
    cdef readonly double durable_grace
    cdef readonly str dead_prefix
    cdef dict defaults
    cdef public bint hold_for_subscriptions     # durable subscriptions hold back retention
    cdef uint64_t published_count[PROTOCOLS]
    cdef uint64_t published_bytes[PROTOCOLS]
    cdef uint64_t delivered_count[PROTOCOLS]
    cdef readonly uint64_t acknowledged
    cdef readonly uint64_t redelivered
    cdef readonly uint64_t dead
    cdef readonly uint64_t lost
    cdef readonly uint64_t expired
    cdef readonly uint64_t carried_count

    cdef uint32_t topic_id(self, const char* text, Py_ssize_t n) except 0
    cdef int publish_message(self, Message* m) noexcept nogil
    cdef int flush(self, int64_t now) except -1
    cdef int put_position(self, Message* m) noexcept nogil
    cdef int seal_index(self, uint64_t number) noexcept nogil
    cdef Index* index_of(self, Segment* segment) noexcept nogil
    cdef int grow_topics(self, uint32_t id) except -1
    cdef int know_topic(self, uint32_t id) except -1
    cdef Segment* segment_at(self, uint64_t number) noexcept nogil
    cdef uint64_t end_for(self, Subscription subscription) noexcept nogil
    cdef int mark_dirty(self, uint32_t topic) noexcept nogil
    cdef Subscription find(self, uint64_t id)
    cdef int drop(self, Subscription subscription, int64_t now, bint write) except -1
    cdef int write_attempt(self, Subscription subscription, uint64_t offset, uint64_t deliveries, int64_t now) except -1
    cdef int _reserve_ids(self, int64_t now) except -1
    cdef int _carry_message(self, Segment* segment, uint64_t position, list ids, int64_t now) except -1
    cdef int _restore(self) except -1
    cdef int _replay(self, View* view, uint64_t number, uint64_t position, dict states, dict carried) except -1
    cdef int _revive(self, uint64_t id, dict state, dict carried) except -1
