# The bus's C interface: what sessions publish and take with. See bus.pyx.

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from headrace.log cimport Keeper, Log, Message, Origin, RecordHeader, Segment, View
from headrace.trie cimport TopicTree, Trie
from headrace.wake cimport Waker


cdef enum Protocol:         # RecordHeader.protocol
    NO_PROTOCOL = 0         # the gateway itself
    BLIPMQ = 1
    OVERHOP = 2
    RELINK = 3
    ZEROCTL = 4
    FELIX = 5
    PROTOCOLS = 8           # room in the counters
    DELAY_STEPS = 160       # of delays: four to each doubling of microseconds, up to 2^40

cdef enum BusControl:       # kinds of control records, from CONTROL_BUS on; all numbers are u64
    CONTROL_SUBSCRIPTION = 16   # correlation: subscription id; headers: what it is (JSON); payload: where it stands, as
                                # Subscription.write_state() says
    CONTROL_UNSUBSCRIBE = 17    # correlation: subscription id
    CONTROL_ACK = 18            # correlation: subscription id; payload: floor, offsets above it that are acknowledged
    CONTROL_ATTEMPT = 19        # correlation: subscription id; payload: offset, deliveries so far, and perhaps the time
                                # before which the next one is not made
    CONTROL_CARRY = 20          # correlation: offset; headers: who has it in flight, pairs of subscription id and
                                # deliveries; payload: the message record as it was, or nothing: as in the one before
    CONTROL_IDS = 21            # correlation: no subscription id at or above this was given out
    CONTROL_PART = 22           # correlation: subscription id; headers: which part; payload: the beginning of what the
                                # next CONTROL_SUBSCRIPTION has no room for
    CONTROL_PASSED = 23         # correlation: subscription id; payload: the offset from which on, and the one before
                                # which, everything was passed over for max_pending
    CONTROL_NOTE = 24           # headers: the key; payload: the value, which replaces any before
    CONTROL_FORGET = 25         # headers: the key of a note that is no more
    CONTROL_FINISHED = 32       # CONTROL_ACK of a queue: the floor; pairs of offset and outcome, with the deliveries above
                                # its lowest 8 bits

cdef enum:                  # statuses: of a message, as a queue sees it
    UNKNOWN = 0
    NEW = 1                 # not safe yet
    WAITING = 2
    DELAYED = 3             # its time, or that of its next attempt, has not come
    ACTIVE = 4              # a member has it
    COMPLETED = 5
    FAILED = 6
    STATUSES = 7

cdef enum:                  # outcomes: why a message needs no more deliveries; the first two as above
    OUT_COMPLETED = 5
    OUT_FAILED = 6
    OUT_REMOVED = 7
    OUT_REMOVED_AHEAD = 8   # before it was ever come to

cdef struct Timing:         # what a message's own headers say (FLAG_TIMED); 0: nothing
    int64_t not_before
    uint32_t attempts
    int64_t retry_us

cdef struct Finished:
    uint64_t offset
    uint32_t deliveries
    uint8_t outcome         # 0: removed since


cdef enum:
    TIMING_BYTES = 96           # what write_timing() needs at most

cdef void read_timing(const RecordHeader* record, Timing* out) noexcept nogil
cdef uint32_t write_timing(char* out, const Timing* timing) noexcept nogil


cdef struct Positions:      # where a topic's messages are in the open segment
    uint32_t* list          # in units of 8 bytes
    uint32_t count
    uint32_t room
    uint32_t topic

cdef struct Index:          # Segment.index: open it is a list of Positions, sealed a mapped file
    Positions** open_lists
    uint32_t topics
    uint32_t room
    uint32_t* marks         # where every MARK_EVERY-th message is, in units of 8 bytes: the others are not far from one
    uint32_t marks_count
    uint32_t marks_room     # 0: they are in the mapped words
    const uint32_t* mapped  # sealed: topics x (topic, start, count), sorted by topic; all positions; all marks
    size_t mapped_size
    uint32_t* kept          # sealed, but no file could be made: the same words in memory

cdef struct Topic:
    uint64_t segment        # number of the segment that `here` belongs to
    Positions* here
    uint64_t total          # messages that the index ever had of it
    void** subscriptions    # Subscription objects for exactly this topic, borrowed from Bus.subscriptions
    uint32_t subscriptions_count
    uint32_t subscriptions_room
    void** interests        # Interest objects that match it, borrowed from Bus.interests
    uint32_t interests_count
    uint32_t interests_room
    bint known              # filters were matched against it
    bint dirty              # it is on the list for the next dispatch
    uint64_t dirty_from     # lsn of the message that put it there
    uint64_t dirty_to       # and of the last one since

cdef struct Flight:         # delivered at least once, not yet acknowledged
    uint64_t offset
    uint64_t segment        # number
    uint64_t position
    int64_t due             # when to deliver it again
    uint32_t deliveries
    bint ready              # its time has come: it waits for a taker
    bint done               # and only keeps its place
    void* member            # the Member who has it, borrowed from Subscription.members; NULL: nobody
    uint64_t last           # number of the Member who had it last; 0: nobody since the start

cdef struct Entry:
    int64_t key
    uint64_t offset         # of a flight; whether the entry still holds, the flight says

cdef struct Heap:           # the smallest key first
    Entry* items
    uint32_t count
    uint32_t room

cdef struct Due:            # how many messages are due at a time, or before it and after that of the one before
    int64_t until
    uint64_t count

cdef struct Delays:         # how many of the messages ahead of a cursor are due when, in bounded room
    Due* items              # ascending
    uint32_t count
    uint32_t room
    int64_t grain           # times that differ in no other bits than these are told as the last of them
    int64_t past            # messages that were due then or before are not counted any more
    uint64_t messages       # how many are

cdef struct Delivery:
    View view
    uint64_t tag            # offset + 1: the same at each redelivery, and after a restart
    uint32_t deliveries     # this one included
    bint confirm            # an acknowledgement is expected


# A filter and the topics that it matches, for all subscriptions that have it.
@cython.final
cdef class Interest:
    cdef uint32_t id                    # in the trie
    cdef list subscriptions
    cdef uint32_t count                 # topics
    cdef uint32_t* table                # few topics: their ids, open addressing; 0 is no topic
    cdef uint32_t table_room            # a power of two
    cdef uint64_t* bits                 # many topics: one bit for each id
    cdef uint32_t words
    cdef bint failed                    # for want of memory it does not know all of its topics

    cdef bint has(self, uint32_t topic) noexcept nogil
    cdef int admit(self, Bus bus, uint32_t topic) noexcept
    cdef int put(self, uint32_t topic, uint32_t topics) noexcept
    cdef void leave_topics(self, Bus bus) noexcept
    cdef bint few(self) noexcept nogil
    cdef uint64_t next_position(self, const Topic* topics, uint64_t number, const Index* index,
                                uint64_t start) noexcept nogil


# A durable subscription as the log tells it, while the log is read.
@cython.final
cdef class Remembered:
    cdef dict description               # the JSON part
    cdef uint64_t segment               # number of the first segment that a part of it is in
    cdef uint64_t cursor                # everything that matches below was handed out
    cdef uint64_t floor                 # everything that matches below is done with
    cdef dict open                      # offset -> deliveries: in flight then, or delivered again since
    cdef dict due                       # offset -> when the next delivery is to be made, where that was said
    cdef set ahead                      # removed before they were come to
    cdef list finished                  # pairs of offset and outcome, as CONTROL_FINISHED has them
    cdef set acked                      # acknowledged, at or above the cursor
    cdef list passed                    # pairs of offsets, ascending: from the first to before the second was passed over
    cdef Py_ssize_t prune_at            # with so many of these it is time to forget those below the cursor


# A small piece of state that a session keeps in the log.
@cython.final
cdef class Note:
    cdef bytes value
    cdef uint64_t segment               # number of the segment that its record is in; 0: it is still to be written


@cython.final
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
    cdef readonly bint kept             # whoever takes from it keeps its place and what is in flight
    cdef readonly bint closed
    cdef uint32_t topic                 # exact: its id
    cdef uint32_t slot                  # its place in Topic.subscriptions or Interest.subscriptions
    cdef Interest interest              # filter
    # the cursor: everything before it was handed out
    cdef uint64_t segment               # number
    cdef uint64_t position              # filter: in the segment. exact: how many of the segment's list are behind
    cdef uint64_t behind                # exact: how many of Topic.total are
    cdef const uint32_t* list_          # exact: the segment's list, good until the next message is published
    cdef uint32_t list_count
    cdef uint64_t list_segment          # number of the sealed segment that list_ is of; 0: to be looked up
    cdef uint64_t next_offset           # offset that the cursor is at or before
    cdef uint64_t searched              # filter: nothing more is below this lsn, whether safe or not
    cdef uint64_t waiting_from          # filter: nothing for it is between the cursor and this lsn; 0: all that was
                                        # dispatched was handed out
    cdef uint64_t waiting_to            # and nothing that was dispatched is beyond this
    # in flight
    cdef Flight* flights                # ring, ascending offsets
    cdef uint32_t flights_first
    cdef uint32_t flights_count
    cdef uint32_t flights_room          # a power of two
    cdef uint32_t open_flights          # not done
    cdef readonly uint32_t held         # of these, those that a member has
    cdef uint32_t ready_flights         # of these, those whose time has come
    cdef Heap later                     # by when they are due
    cdef Heap ready                     # by offset: those whose time has come
    cdef public uint32_t max_inflight
    cdef public uint32_t max_deliveries
    cdef public int64_t redelivery_us
    cdef public int64_t max_redelivery_us
    cdef public uint64_t max_pending    # 0: no limit; exact subscriptions only
    cdef public uint32_t max_active     # how many of them members may have at once; 0: no limit but max_inflight
    cdef public int64_t deadline_us     # how long a member may have one; 0: until its redelivery is due
    cdef public uint32_t keep_finished  # of so many that were finished it is remembered how
    cdef bint paused_                   # nothing is handed out
    cdef public object on_finished      # None, or called with a message's protocol, flags, headers, and whether it was completed,
                                        # when one that a member was given is completed or given up
    # what was finished, a ring of the newest
    cdef Finished* finished
    cdef uint32_t finished_first
    cdef uint32_t finished_count
    cdef uint32_t finished_room
    cdef uint32_t completed_kept        # how many of them are in each state
    cdef uint32_t failed_kept
    # what is ahead of the cursor, as far as it was counted; filters only
    cdef uint64_t counted               # the lsn up to which; 0: not counted
    cdef uint64_t ahead                 # without those that are spared
    cdef Delays delays                  # of these, those whose time had not come when they were last counted
    # from before a restart
    cdef uint64_t restored_below        # offsets from before the last one that it came through
    cdef set acked                      # offsets at or above the cursor that are acknowledged
    cdef set removed                    # the same, removed by somebody who had not been given them; None: there are none
    cdef uint32_t late_acks             # how many of these came since
    # what the log has
    cdef uint64_t state_segment         # where its CONTROL_SUBSCRIPTION begins; 0: nowhere
    cdef uint64_t acks_above            # acknowledgements above the floor that were written since
    cdef uint64_t* unwritten            # acknowledgements that it does not have yet
    cdef uint32_t unwritten_count
    cdef uint32_t unwritten_room
    cdef bint ack_pending               # on the bus's list of those
    cdef bint waits_safe                # on the bus's list of those that met the safe end
    cdef bint wake_due                  # on the list of a dispatch
    cdef list members
    cdef uint64_t joined                # members that it ever had
    cdef Py_ssize_t turn                # round robin
    cdef int64_t alone_since            # no member since; 0: it has one
    cdef readonly uint64_t delivered
    cdef readonly uint64_t redelivered
    cdef readonly uint64_t acknowledged
    cdef readonly uint64_t dead
    cdef readonly uint64_t lost

    # What sessions use.
    cpdef Member join(self, Waker waker, int64_t credits, int64_t now)
    cdef int take(self, Member member, int64_t now, Delivery* out) except -1
    cdef bint ack_offset(self, uint64_t offset) except -1
    cdef bint may_settle(self, Member member, uint64_t offset) noexcept     # a delivery is that member's to acknowledge or reject
    cdef int bury_tag(self, uint64_t tag, int64_t now, str reason) except -1
    # Gives a delivery back unfinished. Answers 1: it is made again after `delay_us` (below 0: as the message or the
    # back-off says), 2: it was the last one, 0: there is none.
    cdef int release(self, uint64_t offset, int64_t now, int64_t delay_us, str reason) except -1
    cdef bint extend(self, uint64_t offset, int64_t now) except -1
    cdef int remove_offset(self, uint64_t offset, int64_t now) except -1
    cdef int status_of(self, uint64_t offset, int64_t now, uint32_t* deliveries) except -1
    cdef bint view_offset(self, uint64_t offset, View* out) noexcept
    cdef int count_statuses(self, int64_t now, uint64_t* counts) except -1
    cdef int pause(self, bint paused) except -1

    cdef bint interested(self, uint32_t topic) noexcept nogil
    cdef bint confirms(self, const RecordHeader* record) noexcept nogil
    cdef bint spared(self, const RecordHeader* record) except -1
    cdef bint resolve(self, Segment* segment) noexcept
    cdef bint skip_to_news(self) noexcept
    cdef bint next_record(self, uint64_t limit, Segment** segment, uint64_t* position) noexcept
    cdef bint more_beyond(self) noexcept
    cdef void move_back(self, uint64_t segment, uint64_t position, uint64_t waiting_from) noexcept
    cdef int skip_one(self, Segment* segment, uint64_t position) except -1
    cdef int uncount(self, const RecordHeader* record, uint64_t lsn) except -1
    cdef bint waits_in(self, Segment* segment) except -1
    cdef void seek_end(self) noexcept
    cdef void seek(self, uint64_t offset) noexcept
    cdef uint64_t pass_over(self, Segment* segment, uint64_t most) except? 0
    cdef int overtaken(self, Segment* segment) except -1
    cdef int apply_pending_limit(self, int64_t now) except -1
    cdef int leave(self, Member member, int64_t now) except -1
    cdef int take_off(self, Member member, int64_t now) except -1
    cdef int redeliver(self, Flight* flight, Member member, int64_t now, Delivery* out) except -1
    cdef int64_t backoff(self, uint32_t deliveries) noexcept nogil
    cdef Flight* flight_at(self, uint32_t i) noexcept nogil
    cdef Flight* flight(self, uint64_t offset) noexcept nogil
    cdef Flight* add_flight(self, uint64_t offset) except NULL
    cdef int take_up(self, uint64_t offset, uint64_t number, uint64_t position, uint32_t deliveries, int64_t due,
                     int64_t now) except -1
    cdef const RecordHeader* record_of(self, const Flight* flight) noexcept nogil
    cdef uint32_t attempts_for(self, const RecordHeader* record) noexcept nogil
    cdef int64_t patience(self, uint32_t deliveries) noexcept nogil
    cdef int flight_status(self, const Flight* flight, int64_t now) noexcept nogil
    cdef int status_ahead(self, const RecordHeader* record, uint64_t lsn, int64_t now) except -1
    cdef int count_ahead(self, int64_t now) except -1
    cdef int64_t not_before(self, const RecordHeader* record) noexcept nogil
    cdef int walk_ahead(self, int64_t now, int status, uint64_t skip, uint64_t most, uint64_t looks, list found) except -1
    cdef int put_finished(self, uint64_t offset, uint32_t deliveries, uint8_t outcome) except -1
    cdef Finished* find_finished(self, uint64_t offset) noexcept nogil
    cdef void drop_finished(self, Finished* one) noexcept nogil
    cdef int write_finished(self, int64_t now) except -100
    cdef int schedule(self, Flight* flight, int64_t due) except -1
    cdef int make_ready(self, Flight* flight) except -1
    cdef Flight* next_ready(self) noexcept
    cdef int promote(self, int64_t now) except -1
    cdef int64_t check_due(self, int64_t now) except -2
    cdef void give_back(self, Flight* flight) noexcept
    cdef int finish(self, Flight* flight, uint8_t outcome) except -1
    cdef int remember(self, uint64_t offset, uint32_t deliveries, uint8_t outcome) except -1
    cdef void settle(self) noexcept
    cdef int bury(self, Flight* flight, int64_t now, str reason) except -1
    cdef int wake_members(self) except -1
    cdef uint64_t low_water(self) noexcept
    cdef int write_state(self, int64_t now) except -100
    cdef int write_acks(self, int64_t now) except -100
    cdef void shut(self) noexcept


# One peer's part of a subscription.
@cython.final
cdef class Member:
    cdef readonly Subscription subscription
    cdef Waker waker
    cdef public int64_t credits         # how many more it takes; -1: no limit
    cdef readonly uint32_t inflight
    cdef readonly bint gone
    cdef uint64_t number                # which of its subscription's members it is, counted from 1


@cython.final
cdef class Bus(Keeper):
    cdef readonly Log log
    cdef public object schedule         # called with nothing when dispatch() has something to do; once until it ran
    cdef readonly dict subscriptions    # id -> Subscription
    cdef readonly bint closed
    cdef dict interests                 # trie id -> Interest
    cdef Trie filters
    cdef TopicTree names
    cdef Topic* topics
    cdef uint32_t topics_room
    cdef readonly uint32_t max_topics
    cdef uint64_t open_number           # of the segment that has open Positions; 0: none
    cdef Index* open_index              # its index
    cdef uint32_t unmarked              # messages until the next mark in it
    cdef uint32_t* dirty
    cdef uint32_t dirty_count
    cdef uint32_t dirty_room
    cdef uint64_t dirty_from            # lsn of the message that put the first topic there
    cdef bint unmarked_topics           # for want of memory one is not there: cursors cannot be moved by it any more
    cdef bint scheduled
    cdef list acking                    # subscriptions with unwritten acknowledgements
    cdef list safe_waiters              # subscriptions to wake when the safe end moved
    cdef list stateless                 # durable subscriptions that the log knows nothing of any more
    cdef dict kept_notes                # key -> Note
    cdef dict note_places               # what keys have up to one of their first slashes -> {key of a note: False, the same
                                        # up to the next slash: True}
    cdef list unwritten_notes           # keys whose note or end the log had no room for
    cdef list leaving                   # ids of those that were dropped, which the log does not know
    cdef uint64_t next_id
    cdef uint64_t ids_written           # ids below this need no new CONTROL_IDS
    cdef uint64_t ids_segment           # where that stands; 0: nowhere
    cdef readonly double durable_grace
    cdef readonly str dead_prefix
    cdef dict defaults
    cdef public bint hold_for_subscriptions     # durable subscriptions hold back retention
    cdef uint64_t published_count[PROTOCOLS]
    cdef uint64_t published_bytes[PROTOCOLS]
    cdef uint64_t delivered_count[PROTOCOLS]
    cdef uint64_t delays[PROTOCOLS][DELAY_STEPS]    # first deliveries by how long after their messages came
    cdef uint64_t delays_us[PROTOCOLS]              # all of that together
    cdef readonly uint64_t acknowledged
    cdef readonly uint64_t redelivered
    cdef readonly uint64_t dead
    cdef readonly uint64_t lost
    cdef readonly uint64_t expired
    cdef readonly uint64_t carried_count

    # What sessions use.
    cdef uint32_t topic_id(self, const char* text, Py_ssize_t n) except 0
    cdef int publish_message(self, Message* m) noexcept nogil
    cdef int flush(self, int64_t now) except -1
    cdef Subscription find(self, uint64_t id)
    cdef void count_delivery(self, uint8_t protocol, int64_t since, int64_t now) noexcept
    cdef uint64_t put_note(self, bytes key, bytes value, int64_t now) except 0
    cdef uint64_t drop_note(self, bytes key, int64_t now) except? 0

    cdef uint32_t make_topic(self, const char* text, Py_ssize_t n) except 0
    cdef int grow_topics(self, uint32_t id) except -1
    cdef int know_topic(self, uint32_t id) except -1
    cdef int place_note(self, bytes key) except -1
    cdef int displace_note(self, bytes key) except -1
    cdef int find_notes(self, bytes place, bytes prefix, dict found) except -1
    cdef int write_note(self, bytes key, Note note, int64_t now) except -100
    cdef Segment* segment_at(self, uint64_t number) noexcept nogil
    cdef uint64_t walk_from(self, Segment* segment, uint64_t offset) noexcept nogil
    cdef RecordHeader* record_at(self, uint64_t offset, Segment** segment) noexcept nogil
    cdef int put_position(self, Message* m) noexcept nogil
    cdef int open_segment(self, Segment* segment) noexcept nogil
    cdef int put_mark(self, uint64_t position) noexcept nogil
    cdef int seal_index(self) noexcept nogil
    cdef void free_indexes(self) noexcept
    cdef uint64_t end_for(self, Subscription subscription) noexcept nogil
    cdef int mark_dirty(self, uint32_t topic) noexcept nogil
    cdef int write_backlog(self, int64_t now) except -1
    cdef Subscription make(self, uint64_t id, bytes text, dict description, bint limited)
    cdef int follow(self, Subscription subscription, bint limited) except -1
    cdef int unfollow(self, Subscription subscription) except -1
    cdef int drop(self, Subscription subscription, int64_t now, bint write) except -1
    cdef int write_attempt(self, Subscription subscription, uint64_t offset, uint64_t deliveries, int64_t due,
                           int64_t now) noexcept
    cdef int reserve_ids(self, int64_t now) except -1
    cdef int carry_message(self, Segment* segment, uint64_t position, list owners, int64_t now) except -100
    cdef bint room_may_come(self, int rc) except -1
    cdef int restore(self, int64_t now) except -1
    cdef int replay(self, View* view, uint64_t number, uint64_t position, dict states, dict copies, dict parts) except -1
    cdef int revive(self, uint64_t id, Remembered state, dict copies, int64_t now) except -1
