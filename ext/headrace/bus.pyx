"""The bus: topics and subscriptions on the log. A subscription's queue, its redeliveries and its replay are cursors.

It knows nothing of protocols, sockets or the loop: sessions publish into it and take from it, and it says when there is
something to take. All of it runs in the thread that appends to the log.

Publishing appends one record, notes its position in its topic's list and puts the topic on a list of dirty ones;
whoever subscribed is woken later, once per loop turn. So it costs the same with one subscription as with a thousand.
What must survive a restart is in the log as control records, and is carried forward when their segment is retired.
"""

import base64
import json
from array import array
from bisect import bisect_right
from collections import namedtuple

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport INT64_MAX, UINT32_MAX, UINT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, qsort, realloc
from libc.stdio cimport snprintf
from libc.string cimport memcmp, memcpy, memmove, memset
from posix.mman cimport munmap

from headrace.log cimport (
    APPEND_FAILED, APPEND_FULL, APPEND_OK, APPEND_TOO_LARGE, FLAG_ANSWERS, FLAG_CONFIRMED, FLAG_CONTROL, FLAG_PARTS, FLAG_TIMED,
    RECORD_HEADER, SEGMENT_HEADER, Keeper, Log, Message, Origin, RecordHeader, Segment, View, padded, view_record,
)
from headrace.trie cimport TOPIC_BYTES, TopicTree, Trie
from headrace.wake cimport Waker

cdef extern from *:
    int clz "__builtin_clzll"(unsigned long long value) noexcept nogil

cdef extern from "platform.h" nogil:
    int64_t hr_now_us()
    void* hr_map_unnamed(const char* directory, const void* data, size_t size)

from headrace.errors import BusError, LogError, LogFull
from headrace.trie import check_filter

cdef enum:
    TOPIC_WORDS = 128        # what matching one topic against all filters may cost grows with its words
    ID_BLOCK = 1024          # subscription ids are reserved in the log this many at a time
    MARK_EVERY = 256         # messages between two marks of a segment's index
    WALK = 1024              # records that a filter passes in vain before it asks the index where to go on
    FEW_TOPICS = 64          # of a filter: the index is asked for each of them by itself
    SHORT_WALK = 64          # and after so few records, because it answers soon
    OWNERS = 32              # flights that one CONTROL_CARRY names
    SPARE_FLIGHTS = 64       # done ones, and entries that hold no more, are kept up to as many as open ones and these
    ACKS_REPEATED = 4096     # acknowledgements above the floor that a restart has to remember one by one
    UNWRITTEN = 65536        # acknowledgements that wait for room in the log one by one
    KEY_BYTES = 512          # of a note
    PLACES = 3               # slashes of a note's key that it is looked up by: relink/kept/<link>/ has no more
    DUE_TIMES = 8192         # that a census tells apart; 16 bytes each
    BURY_AGAIN_US = 100_000  # after the log had no room for a dead letter

cdef uint64_t POSITION = (<uint64_t>1 << 40) - 1       # the part of an lsn that is not the segment's number

STATUS_NAMES = ("", "new", "waiting", "delayed", "active", "completed", "failed")

PROTOCOL_NAMES = ("", "blipmq", "overhop", "relink", "zeroctl", "felix")

ANSWERS = FLAG_ANSWERS

Received = namedtuple("Received", "offset time topic payload headers parts protocol kind flags correlation tag deliveries confirm")
Received.__doc__ = "One delivery as Python sees it. `confirm`: acknowledge it with `tag`."


# --- the index of a segment --------------------------------------------------------------------------------------------

cdef int by_topic(const void* a, const void* b) noexcept nogil:
    cdef uint32_t x = (<Positions**>a)[0].topic
    cdef uint32_t y = (<Positions**>b)[0].topic
    return (x > y) - (x < y)


cdef void free_index(Index* index) noexcept nogil:
    cdef uint32_t i
    if index.open_lists != NULL:
        for i in range(index.topics):
            free(index.open_lists[i].list)
            free(index.open_lists[i])
        free(index.open_lists)
    if index.marks_room:
        free(index.marks)
    if index.kept != NULL:
        free(index.kept)
    elif index.mapped != NULL:
        munmap(<void*>index.mapped, index.mapped_size)
    free(index)


# --- flights by time ---------------------------------------------------------------------------------------------------

cdef inline bint sooner(const Entry* a, const Entry* b) noexcept nogil:
    return a.key < b.key or (a.key == b.key and a.offset < b.offset)


cdef int heap_push(Heap* heap, int64_t key, uint64_t offset) noexcept nogil:
    cdef Entry* grown
    cdef Entry entry
    cdef uint32_t at, parent, room
    if heap.count == heap.room:
        room = heap.room * 2 + 16
        grown = <Entry*>realloc(heap.items, room * sizeof(Entry))
        if grown == NULL:
            return -1
        heap.items = grown
        heap.room = room
    entry.key = key
    entry.offset = offset
    at = heap.count
    heap.count += 1
    while at:
        parent = (at - 1) >> 1
        if not sooner(&entry, &heap.items[parent]):
            break
        heap.items[at] = heap.items[parent]
        at = parent
    heap.items[at] = entry
    return 0


cdef void heap_pop(Heap* heap) noexcept nogil:
    cdef Entry entry
    cdef uint32_t at = 0, child
    heap.count -= 1
    entry = heap.items[heap.count]
    while True:
        child = 2 * at + 1
        if child >= heap.count:
            break
        if child + 1 < heap.count and sooner(&heap.items[child + 1], &heap.items[child]):
            child += 1
        if not sooner(&heap.items[child], &entry):
            break
        heap.items[at] = heap.items[child]
        at = child
    heap.items[at] = entry


# --- messages by when they are due ------------------------------------------------------------------------------------
# Exact as long as there are no more than DUE_TIMES different times; beyond that, times near to each other become one.

cdef uint32_t find_due(const Delays* delays, int64_t until) noexcept nogil:
    """The first that is not before a time."""
    cdef uint32_t low = 0, high = delays.count, middle
    while low < high:
        middle = (low + high) // 2
        if delays.items[middle].until < until:
            low = middle + 1
        else:
            high = middle
    return low


cdef void merge_dues(Delays* delays) noexcept nogil:
    """Leaves out those that nothing is due at; where that gives too little room, fewer times are told apart."""
    cdef uint32_t i, kept
    cdef Due due
    while True:
        kept = 0
        for i in range(delays.count):
            due = delays.items[i]
            if due.count == 0:
                continue
            due.until |= delays.grain
            if kept and delays.items[kept - 1].until == due.until:
                delays.items[kept - 1].count += due.count
            else:
                delays.items[kept] = due
                kept += 1
        delays.count = kept
        if kept <= DUE_TIMES // 2:
            return
        delays.grain = delays.grain << 1 | 1


cdef int put_due(Delays* delays, int64_t time) noexcept nogil:
    """Counts a message that is due after delays.past; -1: no memory."""
    cdef uint32_t at, room
    cdef Due* grown
    if delays.count == DUE_TIMES:
        at = find_due(delays, time | delays.grain)
        if at == delays.count or delays.items[at].until != time | delays.grain:
            merge_dues(delays)
    at = find_due(delays, time | delays.grain)
    if at == delays.count or delays.items[at].until != time | delays.grain:
        if delays.count == delays.room:
            room = min(delays.room * 2 + 16, <uint32_t>DUE_TIMES)
            grown = <Due*>realloc(delays.items, room * sizeof(Due))
            if grown == NULL:
                return -1
            delays.items = grown
            delays.room = room
        memmove(delays.items + at + 1, delays.items + at, (delays.count - at) * sizeof(Due))
        delays.items[at].until = time | delays.grain
        delays.items[at].count = 0
        delays.count += 1
    delays.items[at].count += 1
    delays.messages += 1
    return 0


cdef void clear_dues(Delays* delays) noexcept nogil:
    free(delays.items)
    delays.items = NULL
    delays.count = delays.room = 0
    delays.grain = 0
    delays.messages = 0


cdef void drop_due(Delays* delays, int64_t time) noexcept nogil:
    """Counts a message no more, if it was not due by delays.past."""
    if time <= delays.past:
        return
    delays.items[find_due(delays, time | delays.grain)].count -= 1
    delays.messages -= 1
    if delays.messages == 0:
        clear_dues(delays)


cdef void pass_dues(Delays* delays, int64_t now) noexcept nogil:
    """Counts no more what is due by now."""
    cdef uint32_t i, gone = find_due(delays, now + 1)
    for i in range(gone):
        delays.messages -= delays.items[i].count
    if gone:
        delays.count -= gone
        memmove(delays.items, delays.items + gone, delays.count * sizeof(Due))
    if delays.messages == 0:
        clear_dues(delays)
    delays.past = max(delays.past, ((now + 1) & ~delays.grain) - 1)


# --- a message's own timing ------------------------------------------------------------------------------------------
# It is in the headers, so that it reaches the Parquet columns: a JSON object with whole numbers, and no spaces in it.

cdef uint32_t write_timing(char* out, const Timing* timing) noexcept nogil:
    """The headers of a message with FLAG_TIMED; `out` has TIMING_BYTES."""
    cdef uint32_t n = 0
    if timing.not_before > 0:
        n += snprintf(out + n, TIMING_BYTES - n, ',"not-before":%lld', <long long>timing.not_before)
    if timing.attempts:
        n += snprintf(out + n, TIMING_BYTES - n, ',"attempts":%u', timing.attempts)
    if timing.retry_us > 0:
        n += snprintf(out + n, TIMING_BYTES - n, ',"retry-us":%lld', <long long>timing.retry_us)
    if n == 0:
        return 0
    out[0] = c"{"
    out[n] = c"}"
    return n + 1


cdef void read_timing(const RecordHeader* record, Timing* out) noexcept nogil:
    cdef View view
    cdef const uint8_t* p
    cdef const uint8_t* end
    cdef const uint8_t* name
    cdef Py_ssize_t size
    cdef int64_t value
    memset(out, 0, sizeof(Timing))
    if not record.flags & FLAG_TIMED:
        return
    view_record(record, &view)
    p = view.headers
    end = p + view.headers_len
    while p + 2 < end and p[1] == c'"':
        p += 2
        name = p
        while p < end and p[0] != c'"':
            p += 1
        size = p - name
        p += 2                                            # the quote and the colon
        value = 0
        while p < end and c"0" <= p[0] <= c"9" and value < INT64_MAX // 10:
            value = value * 10 + (p[0] - c"0")
            p += 1
        if size == 10 and memcmp(name, "not-before", 10) == 0:
            out.not_before = value
        elif size == 8 and memcmp(name, "attempts", 8) == 0:
            out.attempts = <uint32_t>min(value, <int64_t>UINT32_MAX)
        elif size == 8 and memcmp(name, "retry-us", 8) == 0:
            out.retry_us = value


# --- topics and filters ------------------------------------------------------------------------------------------------

cdef inline Py_ssize_t delay_step(uint64_t delay) noexcept nogil:
    """Which of DELAY_STEPS a delay belongs to: up to 4 µs each has its own, then there are four to each doubling."""
    cdef int doublings
    if delay < 4:
        return <Py_ssize_t>delay
    doublings = 63 - clz(delay)
    return min(4 * (doublings - 1) + <int>((delay >> (doublings - 2)) & 3), DELAY_STEPS - 1)


cdef uint64_t end_of_delay_step(Py_ssize_t step) noexcept:
    """The first delay, in microseconds, that is beyond a step."""
    return step + 1 if step < 4 else <uint64_t>(5 + step % 4) << (step // 4 - 1)


cdef Py_ssize_t words_of(const char* topic, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i, count = 1
    for i in range(n):
        count += topic[i] == c"."
    return count


cdef inline uint64_t lsn_of(const Segment* segment, const RecordHeader* record) noexcept nogil:
    return (segment.number << 40) | <uint64_t>(<const uint8_t*>record - segment.base)


cdef inline uint32_t place_of(uint32_t topic, uint32_t room) noexcept nogil:
    return ((topic * <uint32_t>2654435769) >> 7) & (room - 1)


cdef void note_id(void* ctx, uint32_t id) noexcept:
    (<list>ctx).append(id)


cdef void note_topic(void* ctx, uint32_t id) noexcept:
    cdef Interest interest = <Interest>(<tuple>ctx)[0]
    if interest.admit(<Bus>(<tuple>ctx)[1], id) != 0:
        interest.failed = True


cdef uint32_t first_from(const uint32_t* list_, uint32_t count, uint32_t begin, uint32_t best) noexcept nogil:
    """The first position of a list at or after `begin`, if it is before `best`; else that."""
    cdef uint32_t low = 0, high, middle
    if count == 0 or list_[count - 1] < begin or list_[0] >= best:
        return best
    high = count - 1
    while low < high:
        middle = (low + high) // 2
        if list_[middle] < begin:
            low = middle + 1
        else:
            high = middle
    return min(best, list_[low])


cdef const uint32_t* entry_of(const Index* index, uint32_t topic) noexcept nogil:
    """A topic's entry in a sealed index: topic, start, count; NULL where it has none."""
    cdef uint32_t low = 0, high = index.topics, middle
    while low < high:
        middle = (low + high) // 2
        if index.mapped[3 * middle] < topic:
            low = middle + 1
        else:
            high = middle
    if low < index.topics and index.mapped[3 * low] == topic:
        return index.mapped + 3 * low
    return NULL


@cython.final
cdef class Interest:
    def __dealloc__(self):
        free(self.table)
        free(self.bits)

    cdef bint has(self, uint32_t topic) noexcept nogil:
        cdef uint32_t at
        if self.bits != NULL:
            return (topic >> 6) < self.words and (self.bits[topic >> 6] >> (topic & 63)) & 1
        if self.table == NULL:
            return False
        at = place_of(topic, self.table_room)
        while self.table[at]:
            if self.table[at] == topic:
                return True
            at = (at + 1) & (self.table_room - 1)
        return False

    cdef int admit(self, Bus bus, uint32_t topic) noexcept:
        """A topic that the filter matches; -1: no memory."""
        cdef Topic* entry = &bus.topics[topic]
        cdef void** grown
        if self.has(topic):
            return 0
        if entry.interests_count == entry.interests_room:
            grown = <void**>realloc(entry.interests, (entry.interests_room * 2 + 2) * sizeof(void*))
            if grown == NULL:
                return -1
            entry.interests = grown
            entry.interests_room = entry.interests_room * 2 + 2
        if self.put(topic, bus.log.names_count) != 0:
            return -1
        entry.interests[entry.interests_count] = <void*>self
        entry.interests_count += 1
        return 0

    cdef int put(self, uint32_t topic, uint32_t topics) noexcept:
        """Puts a topic into the set, which is a table as long as that is smaller than a bit for each topic there is."""
        cdef uint32_t* table
        cdef uint64_t* bits
        cdef uint32_t room, words, i, at
        if self.bits == NULL and 2 * (self.count + 1) > self.table_room:
            room = self.table_room * 2 if self.table_room else 8
            words = (max(topics, topic) >> 6) + 1
            if <uint64_t>room * sizeof(uint32_t) < <uint64_t>words * sizeof(uint64_t):
                table = <uint32_t*>calloc(room, sizeof(uint32_t))
                if table == NULL:
                    return -1
                for i in range(self.table_room):
                    if self.table[i]:
                        at = place_of(self.table[i], room)
                        while table[at]:
                            at = (at + 1) & (room - 1)
                        table[at] = self.table[i]
                free(self.table)
                self.table = table
                self.table_room = room
            else:
                bits = <uint64_t*>calloc(words, sizeof(uint64_t))
                if bits == NULL:
                    return -1
                for i in range(self.table_room):
                    if self.table[i]:
                        bits[self.table[i] >> 6] |= <uint64_t>1 << (self.table[i] & 63)
                free(self.table)
                self.table = NULL
                self.table_room = 0
                self.bits = bits
                self.words = words
        if self.bits != NULL:
            if (topic >> 6) >= self.words:
                words = max((topic >> 6) + 1, self.words * 2)
                bits = <uint64_t*>realloc(self.bits, words * sizeof(uint64_t))
                if bits == NULL:
                    return -1
                memset(bits + self.words, 0, (words - self.words) * sizeof(uint64_t))
                self.bits = bits
                self.words = words
            self.bits[topic >> 6] |= <uint64_t>1 << (topic & 63)
        else:
            at = place_of(topic, self.table_room)
            while self.table[at]:
                at = (at + 1) & (self.table_room - 1)
            self.table[at] = topic
        self.count += 1
        return 0

    cdef void leave_topics(self, Bus bus) noexcept:
        """Takes itself off its topics' lists: nobody has this filter any more."""
        cdef uint32_t i, k, n, topic, places = self.words * 64 if self.bits != NULL else self.table_room
        cdef Topic* entry
        for i in range(places):
            topic = i if self.bits != NULL else self.table[i]
            if topic == 0 or not self.has(topic):
                continue
            entry = &bus.topics[topic]
            n = entry.interests_count
            for k in range(n):
                if entry.interests[k] == <void*>self:
                    entry.interests[k] = entry.interests[n - 1]
                    entry.interests_count = n - 1
                    break

    cdef bint few(self) noexcept nogil:
        """Whether it has so few topics that looking each of them up costs less than looking at all that there are."""
        return self.bits == NULL and self.count <= FEW_TOPICS

    cdef uint64_t next_position(self, const Topic* topics, uint64_t number, const Index* index,
                                uint64_t start) noexcept nogil:
        """Where the first message of these topics at or after `start` stands, by the index of segment `number`;
        UINT64_MAX: nowhere."""
        cdef uint32_t begin = <uint32_t>(start >> 3), best = UINT32_MAX
        cdef uint32_t i, topic
        cdef const uint32_t* entry
        if self.few():
            for i in range(self.table_room):
                topic = self.table[i]
                if topic == 0:
                    continue
                if index.mapped == NULL:
                    if topics[topic].segment == number:
                        best = first_from(topics[topic].here.list, topics[topic].here.count, begin, best)
                else:
                    entry = entry_of(index, topic)
                    if entry != NULL:
                        best = first_from(index.mapped + entry[1], entry[2], begin, best)
        else:
            for i in range(index.topics):
                if index.mapped == NULL:
                    if self.has(index.open_lists[i].topic):
                        best = first_from(index.open_lists[i].list, index.open_lists[i].count, begin, best)
                elif self.has(index.mapped[3 * i]):
                    best = first_from(
                        index.mapped + index.mapped[3 * i + 1], index.mapped[3 * i + 2], begin, best)
        return UINT64_MAX if best == UINT32_MAX else <uint64_t>best << 3


@cython.final
cdef class Remembered:
    pass


@cython.final
cdef class Member:
    """One peer's part of a subscription. Made by Subscription.join()."""

    def leave(self, now=None):
        """Gives back what it has not acknowledged, to be delivered to another member or to its successor."""
        self.subscription.leave(self, hr_now_us() if now is None else now)

    def receive(self, now=None):
        """The next delivery, or None."""
        cdef Delivery out
        cdef const RecordHeader* record
        cdef Log log = self.subscription.bus.log
        if not self.subscription.take(self, hr_now_us() if now is None else now, &out):
            return None
        record = out.view.record
        return Received(
            record.offset, record.time, log.topic_name(record.topic), out.view.payload[:out.view.payload_len],
            out.view.headers[:out.view.headers_len], tuple([out.view.parts[i] for i in range(out.view.parts_count)]),
            record.protocol, record.kind, record.flags, record.correlation, out.tag, out.deliveries, bool(out.confirm),
        )


@cython.final
cdef class Subscription:
    """A cursor on the log. Made by Bus.subscribe()."""

    def __dealloc__(self):
        free(self.flights)
        free(self.later.items)
        free(self.ready.items)
        free(self.delays.items)
        free(self.unwritten)
        free(self.finished)

    # --- the cursor --------------------------------------------------------------------------------------------------

    cdef bint interested(self, uint32_t topic) noexcept nogil:
        return topic == self.topic if self.exact else self.interest.has(topic)

    cdef bint confirms(self, const RecordHeader* record) noexcept nogil:
        """Whether an acknowledgement is expected for a message."""
        return self.at_least_once and not self.kept and (self.confirm_all or record.flags & FLAG_CONFIRMED)

    cdef bint spared(self, const RecordHeader* record) except -1:
        """Whether a message is passed without a word: from before a restart, and acknowledged since, or one that may have
        been delivered and was never to be confirmed."""
        if self.removed is not None and record.offset in self.removed:
            return True
        return record.offset < self.restored_below and (not self.confirms(record) or record.offset in self.acked)

    cdef bint resolve(self, Segment* segment) noexcept:
        """Points `list_` to this topic's positions in a segment; False where it has none there."""
        cdef Topic* topic
        cdef Index* index
        cdef uint32_t low, high, middle
        if self.list_segment == segment.number:
            return self.list_count > 0
        self.list_segment = 0
        self.list_count = 0
        if segment.number == self.bus.open_number:
            topic = &self.bus.topics[self.topic]
            if topic.segment == segment.number:
                self.list_ = topic.here.list
                self.list_count = topic.here.count
            return self.list_count > 0
        index = <Index*>segment.index
        if index == NULL or index.mapped == NULL:
            return False                                  # no message is in it; one may come
        self.list_segment = segment.number
        low = 0
        high = index.topics
        while low < high:
            middle = (low + high) // 2
            if index.mapped[3 * middle] < self.topic:
                low = middle + 1
            else:
                high = middle
        if low < index.topics and index.mapped[3 * low] == self.topic:
            self.list_ = index.mapped + index.mapped[3 * low + 1]
            self.list_count = index.mapped[3 * low + 2]
        return self.list_count > 0

    cdef bint skip_to_news(self) noexcept:
        """Moves a filter's cursor past what it need not look at: every message that it matches has put its topic on the
        list of dirty ones, and the dispatch told where the first of them is. False where there is nothing new at all."""
        cdef Bus bus = self.bus
        cdef uint64_t lsn
        if bus.unmarked_topics:
            return True
        if ((self.segment << 40) | self.position) > self.waiting_to:
            self.waiting_from = 0
        lsn = self.waiting_from
        if lsn == 0:
            lsn = bus.dirty_from if bus.dirty_count else bus.log.published_
        if lsn > ((self.segment << 40) | self.position):
            self.segment = lsn >> 40
            self.position = lsn & POSITION
        return self.waiting_from != 0 or bus.dirty_count != 0

    cdef bint next_record(self, uint64_t limit, Segment** found, uint64_t* where) noexcept:
        """Moves the cursor to the next record that matches, below the lsn `limit`; False where there is none."""
        cdef Log log = self.bus.log
        cdef Segment* segment
        cdef RecordHeader* record
        cdef uint64_t position, end
        cdef uint32_t passed, walk = WALK
        cdef bint whole
        if not self.exact:
            if not self.skip_to_news():
                return False
            if self.interest.few():
                walk = SHORT_WALK
        while True:
            segment = self.bus.segment_at(self.segment)
            if segment == NULL:
                return False
            if segment.number != self.segment:
                self.segment = segment.number
                self.position = 0 if self.exact else SEGMENT_HEADER
            if self.exact:
                self.resolve(segment)
                if self.position < self.list_count:
                    position = <uint64_t>self.list_[self.position] << 3
                    if ((segment.number << 40) | position) >= limit:
                        return False
                    found[0] = segment
                    where[0] = position
                    return True
            else:
                if (limit >> 40) < segment.number:
                    return False
                end = segment.end
                whole = True
                if (limit >> 40) == segment.number and (limit & POSITION) < end:
                    end = limit & POSITION
                    whole = False
                position = self.position
                passed = 0
                while position < end:
                    record = <RecordHeader*>(segment.base + position)
                    if not record.flags & FLAG_CONTROL and self.interest.has(record.topic):
                        self.position = position
                        found[0] = segment
                        where[0] = position
                        return True
                    position += padded(record.length)
                    passed += 1
                    if passed == walk:
                        passed = 0
                        position = min(end, self.interest.next_position(
                            self.bus.topics, segment.number, <Index*>segment.index, position)
                            if segment.index != NULL else UINT64_MAX)
                self.position = position
                if not whole:
                    return False
            if segment == log.segments_[log.segments_count - 1]:
                return False
            self.segment += 1
            self.position = 0 if self.exact else SEGMENT_HEADER

    cdef bint more_beyond(self) noexcept:
        """After next_record() found nothing: whether there is something that is not safe yet."""
        cdef Segment* segment
        cdef uint64_t where, number = self.segment, position = self.position, waiting_from = self.waiting_from
        cdef bint found
        if self.exact:
            return self.position < self.list_count
        if self.searched > ((number << 40) | position):
            self.segment = self.searched >> 40
            self.position = self.searched & POSITION
        found = self.next_record(self.bus.log.published_, &segment, &where)
        self.searched = (self.segment << 40) | self.position
        self.move_back(number, position, waiting_from)
        return found

    cdef void move_back(self, uint64_t segment, uint64_t position, uint64_t waiting_from) noexcept:
        """Ends a look ahead: the cursor is where it was, and what was told about the way from there holds again."""
        self.segment = segment
        self.position = position
        self.waiting_from = waiting_from

    cdef int skip_one(self, Segment* segment, uint64_t position) except -1:
        cdef RecordHeader* record = <RecordHeader*>(segment.base + position)
        if self.exact:
            self.position += 1
            self.behind += 1
        else:
            self.uncount(record, (segment.number << 40) | position)
            self.position = position + padded(record.length)
        self.next_offset = record.offset + 1
        if record.offset < self.restored_below:
            self.acked.discard(record.offset)
        if self.removed is not None:
            self.removed.discard(record.offset)
            if not self.removed:
                self.removed = None
        return 0

    cdef int uncount(self, const RecordHeader* record, uint64_t lsn) except -1:
        """A message is about to be ahead of the cursor no more, or to be spared."""
        if lsn < self.counted and not self.spared(record):
            self.ahead -= 1
            drop_due(&self.delays, self.not_before(record))
        return 0

    cdef bint waits_in(self, Segment* segment) except -1:
        """Whether a segment has something for it that was never handed out."""
        cdef Segment* found
        cdef uint64_t where
        while self.next_record((segment.number << 40) | segment.end, &found, &where):
            if not self.spared(<RecordHeader*>(found.base + where)):
                return True
            self.skip_one(found, where)
        return False

    cdef void seek_end(self) noexcept:
        cdef Log log = self.bus.log
        self.segment = log.active.number
        self.next_offset = log.next_offset
        if self.exact:
            self.resolve(log.active)
            self.position = self.list_count
            self.behind = self.bus.topics[self.topic].total
        else:
            self.position = log.position

    cdef void seek(self, uint64_t offset) noexcept:
        """To the first matching record at or after `offset`."""
        cdef Log log = self.bus.log
        cdef Segment* segment = log.segment_of(offset)
        cdef RecordHeader* record
        cdef uint32_t low, high, middle
        cdef uint64_t waiting = 0
        cdef Py_ssize_t i
        self.waiting_from = 1                             # nobody told it what is there
        self.waiting_to = UINT64_MAX
        if segment == NULL:
            self.seek_end()
            return
        self.segment = segment.number
        self.next_offset = max(offset, segment.first_offset)
        if self.exact:
            for i in range(log.segments_count - 1, -1, -1):
                self.resolve(log.segments_[i])
                if log.segments_[i] == segment:
                    break
                waiting += self.list_count
            low = 0
            high = self.list_count
            while low < high:
                middle = (low + high) // 2
                record = <RecordHeader*>(segment.base + (<uint64_t>self.list_[middle] << 3))
                if record.offset < offset:
                    low = middle + 1
                else:
                    high = middle
            self.position = low
            self.behind = self.bus.topics[self.topic].total - waiting - (self.list_count - low)
        else:
            self.position = self.bus.walk_from(segment, offset)
            while self.position < segment.end:
                record = <RecordHeader*>(segment.base + self.position)
                if record.offset >= offset and not record.flags & FLAG_CONTROL:
                    break
                self.position += padded(record.length)

    cdef uint64_t pass_over(self, Segment* segment, uint64_t most) except? 0:
        """Moves the cursor past up to `most` matching messages of its segment and counts them as lost; how many it passed."""
        cdef RecordHeader* record
        cdef Segment* found
        cdef uint64_t where, passed = 0, gone = 0
        if self.exact and segment.first_offset >= self.restored_below:
            self.resolve(segment)
            passed = min(most, self.list_count - self.position if self.position < self.list_count else 0)
            gone = passed
            if passed:
                self.position += passed
                self.behind += passed
                record = <RecordHeader*>(segment.base + (<uint64_t>self.list_[self.position - 1] << 3))
                self.next_offset = record.offset + 1
        else:
            while passed < most:
                if self.exact:
                    self.resolve(segment)
                    if self.position >= self.list_count:
                        break
                    record = <RecordHeader*>(segment.base + (<uint64_t>self.list_[self.position] << 3))
                else:
                    if self.position >= segment.end:
                        break
                    record = <RecordHeader*>(segment.base + self.position)
                    if record.flags & FLAG_CONTROL or not self.interest.has(record.topic):
                        self.position += padded(record.length)
                        continue
                gone += not self.spared(record)
                passed += 1
                self.skip_one(segment, <const uint8_t*>record - segment.base)
        self.lost += gone
        self.bus.lost += gone
        return passed

    cdef int overtaken(self, Segment* segment) except -1:
        """The cursor's segment goes away: moves it to the next one, and counts what it did not see."""
        cdef Log log = self.bus.log
        if self.segment == segment.number:
            self.pass_over(segment, UINT64_MAX)
        else:
            self.counted = 0
        self.list_segment = 0
        self.segment = log.segments_[0].number
        self.position = 0 if self.exact else SEGMENT_HEADER
        self.next_offset = max(self.next_offset, log.segments_[0].first_offset)
        return 0

    cdef int apply_pending_limit(self, int64_t now) except -1:
        """max_pending: of what waits, the oldest beyond the limit is passed over. Without room the log is not told, and it
        may come again after a restart."""
        cdef uint64_t waiting = self.bus.topics[self.topic].total - self.behind
        cdef uint64_t surplus
        cdef uint64_t passed[2]
        cdef Segment* segment
        if waiting <= self.max_pending:
            return 0
        surplus = waiting - self.max_pending
        passed[0] = self.next_offset
        while surplus:
            segment = self.bus.segment_at(self.segment)
            if segment == NULL:
                break
            if segment.number != self.segment:
                self.segment = segment.number
                self.position = 0
            surplus -= self.pass_over(segment, surplus)
            if surplus:
                self.segment += 1
                self.position = 0
        passed[1] = self.next_offset
        if self.durable and self.bus.log.append_control(
            CONTROL_PASSED, 0, 0, self.id, 0, NULL, 0, <const uint8_t*>passed, 16, now
        ) == APPEND_OK:
            self.acks_above += 1
        return 0

    # --- taking and acknowledging --------------------------------------------------------------------------------------

    cpdef Member join(self, Waker waker, int64_t credits, int64_t now):
        """A peer that takes from this subscription; `waker` (or None) is told when there is something."""
        cdef Member member
        if self.closed:
            raise BusError(f"subscription {self.id} is gone")
        if self.members and not self.queue:
            # One peer at a time: the newest wins, as after a reconnection that the gateway has not noticed yet.
            self.take_off(self.members[0], now)
        member = Member()
        member.subscription = self
        member.waker = waker
        member.credits = credits
        self.joined += 1
        member.number = self.joined
        self.members.append(member)
        self.alone_since = 0
        return member

    cdef int take_off(self, Member member, int64_t now) except -1:
        """Takes a member off without ending the subscription, even if it was the last one."""
        cdef uint32_t i
        cdef Flight* flight
        member.gone = True
        for i in range(self.flights_count):
            flight = self.flight_at(i)
            if flight.member == <void*>member:
                flight.member = NULL
                self.schedule(flight, now)
        self.held -= member.inflight
        member.inflight = 0
        self.members.remove(member)
        return 0

    cdef int leave(self, Member member, int64_t now) except -1:
        if member.gone:
            return 0
        self.take_off(member, now)
        if self.members:
            self.wake_members()
        elif self.durable or self.queue:
            self.alone_since = now
        else:
            self.bus.drop(self, now, False)
        return 0

    cdef int64_t backoff(self, uint32_t deliveries) noexcept nogil:
        cdef int64_t wait = self.redelivery_us
        while deliveries > 1 and wait < self.max_redelivery_us:
            wait = wait * 2 if wait <= self.max_redelivery_us // 2 else self.max_redelivery_us
            deliveries -= 1
        return min(wait, self.max_redelivery_us)

    cdef int take(self, Member member, int64_t now, Delivery* out) except -1:
        """The next message for a member, in one struct of pointers into the log; 0 where there is none.

        The memory is good until the caller returns to the loop: segments are only retired from there.
        """
        cdef Bus bus = self.bus
        cdef Segment* segment
        cdef uint64_t position, limit
        cdef RecordHeader* record
        cdef Flight* flight
        cdef Py_ssize_t members
        cdef Timing timing
        cdef bint spared
        if member.gone or member.credits == 0 or self.paused_:
            return 0
        if self.at_least_once:
            members = len(self.members)
            if self.later.count and self.later.items[0].key <= now:
                if self.promote(now) > 1 and members > 1:
                    self.wake_members()                   # one cannot have them all
                if member.gone:
                    return 0
            if members > 1 and member.inflight >= (self.max_inflight + members - 1) // members:
                return 0                                  # one that never acknowledges leaves room for the others
            if self.max_active and self.held >= self.max_active:
                return 0
            flight = self.next_ready()
            if flight != NULL:
                return self.redeliver(flight, member, now, out)
            if self.open_flights >= self.max_inflight:
                return 0
        if self.max_pending and self.exact:
            self.apply_pending_limit(now)
        limit = bus.end_for(self)
        while self.next_record(limit, &segment, &position):
            record = <RecordHeader*>(segment.base + position)
            spared = (record.offset < self.restored_below or self.removed is not None) and self.spared(record)
            self.skip_one(segment, position)
            if spared:
                continue
            out.confirm = self.confirms(record)
            if self.queue and record.flags & FLAG_TIMED and out.confirm:
                read_timing(record, &timing)
                if timing.not_before > now:
                    flight = self.add_flight(record.offset)
                    flight.segment = segment.number
                    flight.position = position
                    self.schedule(flight, timing.not_before)
                    if self.open_flights >= self.max_inflight:
                        return 0
                    continue
            if out.confirm:
                flight = self.add_flight(record.offset)
                flight.segment = segment.number
                flight.position = position
                flight.deliveries = 1
                flight.member = <void*>member
                flight.last = member.number
                member.inflight += 1
                self.held += 1
                self.schedule(flight, now + self.patience(1))
            view_record(record, &out.view)
            out.tag = record.offset + 1
            out.deliveries = 1
            if member.credits > 0:
                member.credits -= 1
            self.delivered += 1
            bus.count_delivery(self.protocol, record.time, now)
            return 1
        if limit >= bus.log.published_:
            self.waiting_from = self.waiting_to = 0
        elif self.at_least_once and not self.waits_safe:
            if self.more_beyond():
                self.waits_safe = True
                bus.safe_waiters.append(self)
                bus.log.ask_sync()
            else:
                self.waiting_from = self.waiting_to = 0
        return 0

    cdef int redeliver(self, Flight* flight, Member member, int64_t now, Delivery* out) except -1:
        cdef Bus bus = self.bus
        cdef Timing timing
        view_record(self.record_of(flight), &out.view)
        flight.deliveries += 1
        flight.member = <void*>member
        flight.last = member.number
        member.inflight += 1
        self.held += 1
        if member.credits > 0:
            member.credits -= 1
        out.tag = flight.offset + 1
        out.deliveries = flight.deliveries
        out.confirm = True
        if self.durable:
            bus.write_attempt(self, flight.offset, flight.deliveries, 0, now)
        self.schedule(flight, now + self.patience(flight.deliveries))
        if flight.deliveries == 1:                        # it was only delayed
            self.delivered += 1
            read_timing(out.view.record, &timing)
            bus.count_delivery(self.protocol, max(out.view.record.time, timing.not_before), now)
        else:
            self.redelivered += 1
            bus.redelivered += 1
        return 1

    cdef bint may_settle(self, Member member, uint64_t offset) noexcept:
        """Whether a delivery is this member's to acknowledge or give back: it has it, or had it last. One from before a
        restart may be anybody's."""
        cdef Flight* flight = self.flight(offset)
        if flight == NULL or not self.queue:
            return True
        return flight.last == member.number or (flight.last == 0 and flight.deliveries > 0)

    cdef bint ack_offset(self, uint64_t offset) except -1:
        """Whether this was a delivery that waited for an acknowledgement; it does no more."""
        cdef Flight* flight = self.flight(offset)
        cdef RecordHeader* record
        cdef Segment* segment
        if flight != NULL:
            self.finish(flight, OUT_COMPLETED)
            self.settle()
            if len(self.members) > 1 and (
                self.open_flights + 1 == self.max_inflight or self.held + 1 == self.max_active
            ):
                self.wake_members()                       # there is room again, for whoever it may be
        else:
            # Delivered before a restart, acknowledged after it, and not come to again yet? No peer had more than
            # max_inflight of these.
            if not self.next_offset <= offset < self.restored_below or offset in self.acked:
                return False
            record = self.bus.record_at(offset, &segment)
            if record == NULL or not self.interested(record.topic) or not self.confirms(record):
                return False
            if self.late_acks >= self.max_inflight:
                return False
            self.late_acks += 1
            self.uncount(record, lsn_of(segment, record))
            self.acked.add(offset)
            self.remember(offset, 1, OUT_COMPLETED)
        self.acknowledged += 1
        self.bus.acknowledged += 1
        return True

    cdef int release(self, uint64_t offset, int64_t now, int64_t delay_us, str reason) except -1:
        cdef Flight* flight = self.flight(offset)
        cdef Timing timing
        cdef bint last
        if flight == NULL:
            return 0
        self.give_back(flight)
        read_timing(self.record_of(flight), &timing)
        last = flight.deliveries >= (timing.attempts or self.max_deliveries)
        if last:
            self.bury(flight, now, reason)
            self.settle()
        else:
            if delay_us < 0:
                delay_us = timing.retry_us or self.backoff(flight.deliveries)
            if self.durable and delay_us > 0:
                self.bus.write_attempt(self, offset, flight.deliveries, now + delay_us, now)
            self.schedule(flight, now + delay_us)
        if self.max_active and self.held + 1 == self.max_active:
            self.wake_members()
        return 2 if last else 1

    cdef bint extend(self, uint64_t offset, int64_t now) except -1:
        """A member that has a message gets as much time for it again as it had in the beginning."""
        cdef Flight* flight = self.flight(offset)
        if flight == NULL or flight.member == NULL:
            return False
        self.schedule(flight, now + self.patience(flight.deliveries))
        return True

    cdef int pause(self, bint paused) except -1:
        self.paused_ = paused
        if not paused:
            self.wake_members()
        return 0

    # --- what became of a message ----------------------------------------------------------------------------------------

    cdef int flight_status(self, const Flight* flight, int64_t now) noexcept nogil:
        if flight.member != NULL:
            return ACTIVE
        return WAITING if flight.ready or flight.due <= now else DELAYED

    cdef int status_ahead(self, const RecordHeader* record, uint64_t lsn, int64_t now) except -1:
        """Of a message that the cursor has not come to."""
        if self.spared(record):
            return UNKNOWN
        if lsn >= self.bus.log.safe_lsn():
            return NEW
        return DELAYED if self.not_before(record) > now else WAITING

    cdef int status_of(self, uint64_t offset, int64_t now, uint32_t* deliveries) except -1:
        """What became of a message, and how often it was delivered; UNKNOWN where it was never for this subscription, or was
        finished too long ago."""
        cdef Finished* finished = self.find_finished(offset)
        cdef Flight* flight
        cdef RecordHeader* record
        cdef Segment* segment = NULL
        deliveries[0] = 0
        if finished != NULL:
            deliveries[0] = finished.deliveries
            return finished.outcome
        flight = self.flight(offset)
        if flight != NULL:
            deliveries[0] = flight.deliveries
            return self.flight_status(flight, now)
        if offset < self.next_offset:
            return UNKNOWN
        record = self.bus.record_at(offset, &segment)
        if record == NULL or not self.interested(record.topic):
            return UNKNOWN
        return self.status_ahead(record, lsn_of(segment, record), now)

    cdef bint view_offset(self, uint64_t offset, View* out) noexcept:
        """A message by its offset, also where it was carried forward; good until the loop runs. False where it is gone."""
        cdef Flight* flight = self.flight(offset)
        cdef const RecordHeader* record
        cdef Segment* segment = NULL
        record = self.record_of(flight) if flight != NULL else self.bus.record_at(offset, &segment)
        if record == NULL:
            return False
        view_record(record, out)
        return True

    cdef int64_t not_before(self, const RecordHeader* record) noexcept nogil:
        """The time before which a message is not delivered; 0: none."""
        cdef Timing timing
        if not record.flags & FLAG_TIMED:
            return 0
        read_timing(record, &timing)
        return timing.not_before

    cdef int count_ahead(self, int64_t now) except -1:
        """Counts what came since it was last counted: each message once, however often it is asked. What was delayed then
        and is not any more is no longer among the delayed ones."""
        cdef uint64_t segment = self.segment, position = self.position, waiting_from = self.waiting_from
        cdef Segment* found
        cdef uint64_t where = 0
        cdef RecordHeader* record
        cdef int64_t due
        if self.counted <= ((segment << 40) | position):
            self.ahead = 0
            clear_dues(&self.delays)
            self.delays.past = 0
        else:
            self.segment = self.counted >> 40
            self.position = self.counted & POSITION
        pass_dues(&self.delays, now)
        while self.next_record(self.bus.log.published_, &found, &where):
            record = <RecordHeader*>(found.base + where)
            self.position = where + padded(record.length)
            if self.spared(record):
                continue
            due = self.not_before(record)
            if due > self.delays.past and put_due(&self.delays, due) != 0:
                self.counted = 0
                self.move_back(segment, position, waiting_from)
                raise MemoryError
            self.ahead += 1
        self.counted = (self.segment << 40) | self.position
        self.move_back(segment, position, waiting_from)
        return 0

    cdef int walk_ahead(self, int64_t now, int status, uint64_t skip, uint64_t most, uint64_t looks, list found) except -1:
        """Looks at what is ahead of the cursor one by one, at `looks` messages at most, and puts the offsets of those with
        this status into the list, after `skip`, until it has `most`."""
        cdef uint64_t segment_number = self.segment, position = self.position, waiting_from = self.waiting_from
        cdef uint64_t safe = self.bus.log.safe_lsn()
        cdef Segment* segment
        cdef uint64_t where = 0
        cdef RecordHeader* record
        if status == NEW and safe > ((self.segment << 40) | self.position):
            self.segment = safe >> 40
            self.position = safe & POSITION
        while looks and self.next_record(self.bus.log.published_, &segment, &where):
            looks -= 1
            record = <RecordHeader*>(segment.base + where)
            self.position = where + padded(record.length)
            if self.status_ahead(record, (segment.number << 40) | where, now) == status:
                if skip:
                    skip -= 1
                else:
                    found.append(record.offset)
                    if <uint64_t>len(found) >= most:
                        break
        self.move_back(segment_number, position, waiting_from)
        return 0

    cdef int count_statuses(self, int64_t now, uint64_t* counts) except -1:
        """How many messages are in each Status. Filters only. What it costs is what has come since it was last asked, and
        what is not safe yet."""
        cdef uint64_t segment, position, waiting_from, safe = self.bus.log.safe_lsn()
        cdef Segment* found = NULL
        cdef RecordHeader* record
        cdef uint64_t where = 0
        self.check_due(now)
        self.count_ahead(now)
        memset(counts, 0, STATUSES * sizeof(uint64_t))
        counts[ACTIVE] = self.held
        counts[COMPLETED] = self.completed_kept
        counts[FAILED] = self.failed_kept
        counts[DELAYED] = self.open_flights - self.held - self.ready_flights + self.delays.messages
        counts[WAITING] = self.ready_flights + self.ahead - self.delays.messages
        segment = self.segment
        position = self.position
        waiting_from = self.waiting_from
        if safe > ((segment << 40) | position):
            self.segment = safe >> 40
            self.position = safe & POSITION
        while self.next_record(self.bus.log.published_, &found, &where):
            record = <RecordHeader*>(found.base + where)
            self.position = where + padded(record.length)
            if not self.spared(record):
                counts[DELAYED if self.not_before(record) > self.delays.past else WAITING] -= 1
                counts[NEW] += 1
        self.move_back(segment, position, waiting_from)
        return 0

    cdef int remove_offset(self, uint64_t offset, int64_t now) except -1:
        """Takes a message out that nobody has: it is not delivered any more, nor kept among those that were finished. Its
        status until then."""
        cdef uint32_t deliveries = 0
        cdef int status = self.status_of(offset, now, &deliveries)
        cdef Finished* finished
        cdef Segment* segment = NULL
        cdef RecordHeader* record
        if status == UNKNOWN or status == ACTIVE:
            return status
        finished = self.find_finished(offset)
        if finished != NULL:
            self.drop_finished(finished)
            self.remember(offset, deliveries, OUT_REMOVED)
        elif self.flight(offset) != NULL:
            self.finish(self.flight(offset), OUT_REMOVED)
            self.settle()
        else:
            record = self.bus.record_at(offset, &segment)
            self.uncount(record, lsn_of(segment, record))
            if self.removed is None:
                self.removed = set()
            self.removed.add(offset)
            self.remember(offset, 0, OUT_REMOVED_AHEAD)
        return status

    cdef Finished* find_finished(self, uint64_t offset) noexcept nogil:
        cdef uint32_t i
        cdef Finished* one
        for i in range(self.finished_count):
            one = &self.finished[(self.finished_first + i) % self.finished_room]
            if one.offset == offset and one.outcome:
                return one
        return NULL

    cdef void drop_finished(self, Finished* one) noexcept nogil:
        if one.outcome == OUT_COMPLETED:
            self.completed_kept -= 1
        elif one.outcome == OUT_FAILED:
            self.failed_kept -= 1
        one.outcome = 0

    cdef int put_finished(self, uint64_t offset, uint32_t deliveries, uint8_t outcome) except -1:
        """Remembers how a message ended, in place of the one that ended first."""
        cdef Finished* grown
        cdef Finished* one
        cdef uint32_t i, room
        if outcome != OUT_COMPLETED and outcome != OUT_FAILED:
            one = self.find_finished(offset)
            if one != NULL:
                self.drop_finished(one)
            return 0
        while self.finished_count and self.finished_count >= self.keep_finished:
            self.drop_finished(&self.finished[self.finished_first])
            self.finished_first = (self.finished_first + 1) % self.finished_room
            self.finished_count -= 1
        if self.keep_finished == 0:
            return 0
        if self.finished_count == self.finished_room:
            room = min(self.keep_finished, self.finished_room * 2 + 16)
            grown = <Finished*>malloc(room * sizeof(Finished))
            if grown == NULL:
                raise MemoryError
            for i in range(self.finished_count):
                grown[i] = self.finished[(self.finished_first + i) % self.finished_room]
            free(self.finished)
            self.finished = grown
            self.finished_first = 0
            self.finished_room = room
        one = &self.finished[(self.finished_first + self.finished_count) % self.finished_room]
        self.finished_count += 1
        one.offset = offset
        one.deliveries = deliveries
        one.outcome = outcome
        if outcome == OUT_COMPLETED:
            self.completed_kept += 1
        else:
            self.failed_kept += 1
        return 0

    # --- in flight -------------------------------------------------------------------------------------------------------

    cdef const RecordHeader* record_of(self, const Flight* flight) noexcept nogil:
        return <const RecordHeader*>(self.bus.segment_at(flight.segment).base + flight.position)

    cdef uint32_t attempts_for(self, const RecordHeader* record) noexcept nogil:
        """How often a message may be delivered."""
        cdef Timing timing
        if not self.queue or not record.flags & FLAG_TIMED:
            return self.max_deliveries
        read_timing(record, &timing)
        return timing.attempts if timing.attempts else self.max_deliveries

    cdef int64_t patience(self, uint32_t deliveries) noexcept nogil:
        """How long an acknowledgement may take."""
        return self.deadline_us if self.deadline_us else self.backoff(deliveries)

    cdef Flight* flight_at(self, uint32_t i) noexcept nogil:
        return &self.flights[(self.flights_first + i) & (self.flights_room - 1)]

    cdef Flight* flight(self, uint64_t offset) noexcept nogil:
        """The open flight of a message, or NULL; good until the next flight is added or settle()."""
        cdef uint32_t low = 0, high = self.flights_count, middle
        cdef Flight* flight
        while low < high:
            middle = (low + high) // 2
            if self.flight_at(middle).offset < offset:
                low = middle + 1
            else:
                high = middle
        if low == self.flights_count:
            return NULL
        flight = self.flight_at(low)
        return flight if flight.offset == offset and not flight.done else NULL

    cdef Flight* add_flight(self, uint64_t offset) except NULL:
        cdef Flight* grown
        cdef Flight* flight
        cdef uint32_t i, room
        if self.flights_count == self.flights_room:
            room = self.flights_room * 2 if self.flights_room else 16
            grown = <Flight*>malloc(room * sizeof(Flight))
            if grown == NULL:
                raise MemoryError
            for i in range(self.flights_count):
                grown[i] = self.flight_at(i)[0]
            free(self.flights)
            self.flights = grown
            self.flights_first = 0
            self.flights_room = room
        flight = self.flight_at(self.flights_count)
        memset(flight, 0, sizeof(Flight))
        flight.offset = offset
        self.flights_count += 1
        self.open_flights += 1
        return flight

    cdef int take_up(self, uint64_t offset, uint64_t number, uint64_t position, uint32_t deliveries, int64_t due,
                     int64_t now) except -1:
        """A flight from before a restart; `due`: when it was to be delivered again, or 0."""
        cdef Flight* flight = self.add_flight(offset)
        cdef Timing timing
        flight.segment = number
        flight.position = position
        flight.deliveries = deliveries
        if deliveries >= self.attempts_for(self.record_of(flight)):
            # One that had its last delivery waits for nothing but a late acknowledgement.
            due = now + self.patience(deliveries)
        elif deliveries == 0:
            read_timing(self.record_of(flight), &timing)
            due = timing.not_before
        return self.schedule(flight, max(due, now))

    cdef int schedule(self, Flight* flight, int64_t due) except -1:
        """Has a flight looked at again when it is due."""
        cdef uint32_t i
        self.ready_flights -= flight.ready
        flight.due = due
        flight.ready = False
        if self.later.count > 2 * self.open_flights + SPARE_FLIGHTS:
            # Most entries are of flights that are done or due at another time.
            self.later.count = 0
            for i in range(self.flights_count):
                flight = self.flight_at(i)
                if not flight.done and not flight.ready and heap_push(&self.later, flight.due, flight.offset) != 0:
                    raise MemoryError
        elif heap_push(&self.later, due, flight.offset) != 0:
            raise MemoryError
        return 0

    cdef int make_ready(self, Flight* flight) except -1:
        cdef uint32_t i
        self.ready_flights += not flight.ready
        flight.ready = True
        if self.ready.count > 2 * self.open_flights + SPARE_FLIGHTS:
            self.ready.count = 0
            for i in range(self.flights_count):
                flight = self.flight_at(i)
                if not flight.done and flight.ready and heap_push(&self.ready, <int64_t>flight.offset, flight.offset) != 0:
                    raise MemoryError
        elif heap_push(&self.ready, <int64_t>flight.offset, flight.offset) != 0:
            raise MemoryError
        return 0

    cdef Flight* next_ready(self) noexcept:
        """The oldest message whose time has come again, or NULL."""
        cdef Flight* flight
        while self.ready.count:
            flight = self.flight(self.ready.items[0].offset)
            heap_pop(&self.ready)
            if flight != NULL and flight.ready:
                return flight
        return NULL

    cdef int promote(self, int64_t now) except -1:
        """Takes back what was not acknowledged in time, to be delivered again or, after its last delivery, buried; how
        many there are to deliver that were not before."""
        cdef Entry entry
        cdef Flight* flight
        cdef uint64_t dead = self.dead
        cdef int count = 0
        while self.later.count and self.later.items[0].key <= now:
            entry = self.later.items[0]
            heap_pop(&self.later)
            flight = self.flight(entry.offset)
            if flight == NULL or flight.ready or flight.due != entry.key:
                continue                                  # acknowledged, or due at another time since
            self.give_back(flight)
            if flight.deliveries >= self.attempts_for(self.record_of(flight)):
                self.bury(flight, now, "no acknowledgement")
            else:
                self.make_ready(flight)
                count += 1
        self.settle()
        if self.dead != dead:
            self.bus.flush(now)
        return count

    cdef int64_t check_due(self, int64_t now) except -2:
        """Wakes for what is due; when to look again, or -1."""
        if self.later.count and self.later.items[0].key <= now and self.promote(now):
            self.wake_members()
        return self.later.items[0].key if self.later.count else -1

    cdef void give_back(self, Flight* flight) noexcept:
        """Takes a flight from the member that has it."""
        if flight.member != NULL:
            (<Member>flight.member).inflight -= 1
            self.held -= 1
            flight.member = NULL

    cdef int finish(self, Flight* flight, uint8_t outcome) except -1:
        """It needs no more deliveries. settle() has to follow."""
        cdef View view
        self.give_back(flight)
        flight.done = True
        self.open_flights -= 1
        self.ready_flights -= flight.ready
        self.remember(flight.offset, flight.deliveries, outcome)
        if self.on_finished is not None and (outcome == OUT_COMPLETED or outcome == OUT_FAILED):
            view_record(self.record_of(flight), &view)
            self.on_finished(
                view.record.protocol, view.record.flags, view.headers[:view.headers_len], outcome == OUT_COMPLETED)
        return 0

    cdef int remember(self, uint64_t offset, uint32_t deliveries, uint8_t outcome) except -1:
        """Has the log told that a message needs no more deliveries."""
        cdef uint64_t* grown
        cdef uint32_t words = 2 if self.queue else 1
        if self.keep_finished:
            self.put_finished(offset, deliveries, outcome)
        if not self.durable:
            return 0
        if self.unwritten_count >= UNWRITTEN:
            # The log has had no room for long. Where the subscription stands now says as much, in less space.
            self.unwritten_count = 0
            self.state_segment = 0
            if self not in self.bus.stateless:
                self.bus.stateless.append(self)
            return 0
        if self.unwritten_count + words > self.unwritten_room:
            grown = <uint64_t*>realloc(self.unwritten, (self.unwritten_room * 2 + 16) * sizeof(uint64_t))
            if grown == NULL:
                raise MemoryError
            self.unwritten = grown
            self.unwritten_room = self.unwritten_room * 2 + 16
        self.unwritten[self.unwritten_count] = offset
        if words == 2:
            self.unwritten[self.unwritten_count + 1] = (<uint64_t>deliveries << 8) | outcome
        self.unwritten_count += words
        if not self.ack_pending:
            self.ack_pending = True
            self.bus.acking.append(self)
        return 0

    cdef void settle(self) noexcept:
        """Forgets flights that are done: at the front at once, elsewhere when they are most of them."""
        cdef uint32_t i, kept = 0
        while self.flights_count and self.flights[self.flights_first].done:
            self.flights_first = (self.flights_first + 1) & (self.flights_room - 1)
            self.flights_count -= 1
        if self.flights_count > 2 * self.open_flights + SPARE_FLIGHTS:
            for i in range(self.flights_count):
                if not self.flight_at(i).done:
                    self.flight_at(kept)[0] = self.flight_at(i)[0]
                    kept += 1
            self.flights_count = kept

    cdef int bury(self, Flight* flight, int64_t now, str reason) except -1:
        """Publishes a message that nobody finished to its dead-letter topic, with the reason in its headers. Where the log
        has no room it stays, and is tried again. settle() has to follow."""
        cdef Bus bus = self.bus
        cdef View view
        cdef Message m
        cdef bytes topic, original, name, headers
        cdef int rc = APPEND_OK
        view_record(self.record_of(flight), &view)
        topic = bus.log.topic_name(view.record.topic)
        name = bus.dead_prefix.encode()
        if not topic.startswith(name):                    # a dead letter that nobody finished is only counted
            name += topic
            if len(name) > TOPIC_BYTES:
                name = name[:TOPIC_BYTES].decode(errors="ignore").encode()
            original = view.headers[:view.headers_len]
            reasons = {
                "dead-reason": reason, "dead-topic": topic.decode(errors="replace"), "dead-deliveries": flight.deliveries,
                "dead-subscription": self.id, "dead-offset": flight.offset,
            }
            memset(&m, 0, sizeof(Message))
            m.topic = bus.make_topic(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
            m.protocol = view.record.protocol
            m.kind = view.record.kind
            m.flags = view.record.flags & ~(FLAG_PARTS | FLAG_CONTROL | FLAG_TIMED)
            m.correlation = view.record.correlation
            m.parts = view.parts
            m.parts_count = view.parts_count
            m.payload = view.payload
            m.payload_len = view.payload_len
            m.now = now
            # The largest messages leave no room for all of this, or for any of it.
            for headers in (with_reasons(original, reasons), json.dumps(reasons).encode(), original):
                m.headers = <const uint8_t*>PyBytes_AS_STRING(headers)
                m.headers_len = <uint32_t>PyBytes_GET_SIZE(headers)
                rc = bus.publish_message(&m)
                if rc != APPEND_TOO_LARGE:
                    break
            if rc == APPEND_FULL or rc == APPEND_FAILED:
                self.schedule(flight, now + max(self.redelivery_us, BURY_AGAIN_US))
                return 0
        if rc == APPEND_TOO_LARGE:                        # the log has smaller segments than when it took the message
            self.lost += 1
            bus.lost += 1
        else:
            self.dead += 1
            bus.dead += 1
        return self.finish(flight, OUT_FAILED)

    cdef int bury_tag(self, uint64_t tag, int64_t now, str reason) except -1:
        """Gives up on a delivery that its peer can never take."""
        cdef Flight* flight = self.flight(tag - 1) if tag else NULL
        if flight != NULL:
            self.give_back(flight)
            self.bury(flight, now, reason)
            self.settle()
        return 0

    cdef int wake_members(self) except -1:
        cdef Member member
        cdef Py_ssize_t i, count = len(self.members)
        if count == 0:
            return 0
        self.turn = (self.turn + 1) % count
        failure = None
        for member in self.members[self.turn:] + self.members[:self.turn] if count > 1 else list(self.members):
            if member.waker is not None and member.credits != 0 and not member.gone:
                try:
                    member.waker.wake()
                except Exception as e:                    # the others are woken all the same
                    failure = e
        if failure is not None:
            raise failure
        return 0

    cdef void shut(self) noexcept:
        """Nobody takes from it any more."""
        cdef Member member
        self.closed = True
        self.flights_count = self.open_flights = self.later.count = self.ready.count = self.unwritten_count = 0
        self.held = self.ready_flights = 0
        for member in self.members:
            member.gone = True
            member.inflight = 0
        self.members = []

    # --- what survives -------------------------------------------------------------------------------------------------

    cdef uint64_t low_water(self) noexcept:
        """Every matching offset below is done with."""
        return self.flights[self.flights_first].offset if self.flights_count else self.next_offset

    def _describe(self, parts, dues, ahead):
        """What it is, as JSON. Padded, because u64s come behind it."""
        text = json.dumps({
            "filter": self.filter.decode("utf-8", "surrogateescape"), "exact": self.exact, "owner": self.owner,
            "protocol": self.protocol, "queue": self.queue, "confirm_all": self.confirm_all,
            "max_inflight": self.max_inflight, "max_deliveries": self.max_deliveries, "redelivery_us": self.redelivery_us,
            "max_redelivery_us": self.max_redelivery_us, "max_pending": self.max_pending, "max_active": self.max_active,
            "deadline_us": self.deadline_us, "keep_finished": self.keep_finished, "parts": parts, "dues": dues,
            "ahead": ahead,
        }, ensure_ascii=False).encode("utf-8", "surrogateescape")
        return text + b" " * (-len(text) % 8)

    cdef int write_state(self, int64_t now) except -100:
        """All of it, in place of all that the log has of it, as append_control() answers.

        Where it stands is: the cursor's offset; how many are in flight; offset and deliveries of each; offset and time of
        those with a time for their next delivery; the offsets above the cursor that were acknowledged; those that were
        removed. How many there are of the third and last is in the description. What does not fit into one record begins
        in others before it.
        """
        cdef Log log = self.bus.log
        cdef Flight* flight
        cdef uint32_t i
        cdef bytes head, body
        cdef uint64_t room = (log.max_record - RECORD_HEADER) & ~<uint64_t>7
        cdef uint64_t at = 0, size, part = 0, parts = 0, begins = 0, dues = 0, ahead = 0
        cdef int rc
        words = array("Q", (self.next_offset, self.open_flights))
        for i in range(self.flights_count):
            flight = self.flight_at(i)
            if not flight.done:
                words.append(flight.offset)
                words.append(flight.deliveries)
        for i in range(self.flights_count):
            flight = self.flight_at(i)
            if not flight.done and not flight.ready and flight.member == NULL and flight.deliveries and flight.due > now:
                words.append(flight.offset)
                words.append(<uint64_t>flight.due)
                dues += 1
        words.extend([offset for offset in self.acked if offset >= self.next_offset])
        if self.removed is not None:
            words.extend(self.removed)
            ahead = len(self.removed)
        body = words.tobytes()
        head = self._describe(0, dues, ahead)
        if <uint64_t>(len(head) + len(body)) > room:
            parts = (len(body) + room - 9) // (room - 8)
            head = self._describe(parts, dues, ahead)
        while part < parts:
            size = min(room - 8, len(body) - at)
            rc = log.append_control(CONTROL_PART, 0, 0, self.id, 0, <const uint8_t*>&part, 8,
                                    <const uint8_t*>PyBytes_AS_STRING(body) + at, size, now)
            if rc != APPEND_OK:
                return rc
            if part == 0:
                begins = log.active.number
            at += size
            part += 1
        rc = log.append_control(CONTROL_SUBSCRIPTION, 0, 0, self.id, 0, <const uint8_t*>PyBytes_AS_STRING(head),
                                <uint32_t>PyBytes_GET_SIZE(head), <const uint8_t*>PyBytes_AS_STRING(body),
                                0 if parts else PyBytes_GET_SIZE(body), now)
        if rc != APPEND_OK:
            return rc
        self.state_segment = begins if parts else log.active.number
        if not self.queue:                                # else how they ended is still to be written
            self.unwritten_count = 0
        self.acks_above = 0
        return APPEND_OK

    cdef int write_acks(self, int64_t now) except -100:
        """The acknowledgements since the last time as one control record, as append_control() answers."""
        cdef Log log = self.bus.log
        cdef uint64_t floor = self.low_water()
        cdef uint64_t* words
        cdef uint32_t i, count = 1
        cdef int rc
        if self.unwritten_count == 0:
            return APPEND_OK
        if self.queue:
            return self.write_finished(now)
        words = <uint64_t*>malloc((self.unwritten_count + 1) * sizeof(uint64_t))
        if words == NULL:
            raise MemoryError
        words[0] = floor
        for i in range(self.unwritten_count):
            if self.unwritten[i] >= floor:
                words[count] = self.unwritten[i]
                count += 1
        if (
            self.acks_above + count > ACKS_REPEATED + 4 * <uint64_t>self.open_flights
            or RECORD_HEADER + count * sizeof(uint64_t) > log.max_record
        ):
            free(words)
            return self.write_state(now)                  # it is shorter
        rc = log.append_control(
            CONTROL_ACK, 0, 0, self.id, 0, NULL, 0, <const uint8_t*>words, count * sizeof(uint64_t), now)
        free(words)
        if rc == APPEND_OK:
            self.unwritten_count = 0
            self.acks_above += count - 1
        return rc

    cdef int write_finished(self, int64_t now) except -100:
        """The same for a queue, with how each of them ended, in as many records as it takes."""
        cdef Log log = self.bus.log
        cdef uint64_t floor = self.low_water()
        cdef uint64_t* words
        cdef uint32_t i, done = 0, count, most = <uint32_t>((log.max_record - RECORD_HEADER - 8) // 16) * 2
        cdef int rc = APPEND_OK
        while done < self.unwritten_count:
            count = min(self.unwritten_count - done, most)
            words = <uint64_t*>malloc((count + 1) * sizeof(uint64_t))
            if words == NULL:
                raise MemoryError
            words[0] = floor
            memcpy(words + 1, self.unwritten + done, count * sizeof(uint64_t))
            rc = log.append_control(
                CONTROL_FINISHED, 0, 0, self.id, 0, NULL, 0, <const uint8_t*>words, (count + 1) * sizeof(uint64_t), now)
            free(words)
            if rc != APPEND_OK:
                break
            for i in range(done, done + count, 2):
                self.acks_above += self.unwritten[i] >= floor
            done += count
        if done:
            memmove(self.unwritten, self.unwritten + done, (self.unwritten_count - done) * sizeof(uint64_t))
            self.unwritten_count -= done
        if rc == APPEND_OK and self.acks_above > ACKS_REPEATED + 4 * <uint64_t>self.open_flights:
            rc = self.write_state(now)
        return rc

    # --- Python --------------------------------------------------------------------------------------------------------

    def ack(self, uint64_t tag, now=None):
        """Acknowledges a delivery by its tag; False where none is waiting for it."""
        cdef bint done = tag > 0 and self.ack_offset(tag - 1)
        self.bus.flush(hr_now_us() if now is None else now)
        return done

    def reject(self, uint64_t tag, *, double delay=0, now=None):
        """Has a delivery made again after `delay` seconds, within its attempts; False where none is waiting."""
        cdef int64_t at = hr_now_us() if now is None else now
        cdef Flight* flight = self.flight(tag - 1) if tag else NULL
        if flight == NULL:
            return False
        self.give_back(flight)
        self.schedule(flight, at + <int64_t>(delay * 1e6))
        self.check_due(at)
        self.bus.flush(at)
        return True

    def retry(self, uint64_t tag, *, delay=None, str reason="it failed", now=None):
        """Gives a delivery back unfinished: it is made again after `delay` seconds (None: as the message or the back-off
        says), or buried if it was the last. "again", "buried", or None where none is waiting."""
        cdef int64_t at = hr_now_us() if now is None else now
        cdef int done = 0
        if tag:
            done = self.release(tag - 1, at, -1 if delay is None else <int64_t>(delay * 1e6), reason)
            self.check_due(at)
        self.bus.flush(at)
        return (None, "again", "buried")[done]

    def prolong(self, uint64_t tag, now=None):
        """Gives whoever has a delivery as much time for it again; False where nobody has it."""
        return bool(tag) and self.extend(tag - 1, hr_now_us() if now is None else now)

    @property
    def paused(self):
        """Whether nothing is handed out."""
        return bool(self.paused_)

    @paused.setter
    def paused(self, bint value):
        self.pause(value)

    def status(self, uint64_t offset, now=None):
        """What became of a message and how often it was delivered; None where it was never for this subscription, or was
        finished too long ago to be remembered."""
        cdef uint32_t deliveries = 0
        cdef int status = self.status_of(offset, hr_now_us() if now is None else now, &deliveries)
        return (STATUS_NAMES[status], deliveries) if status else None

    def census(self, now=None):
        """How many messages are in each state. For filters."""
        cdef uint64_t counts[STATUSES]
        self._check_filter()
        self.count_statuses(hr_now_us() if now is None else now, counts)
        return {STATUS_NAMES[i]: counts[i] for i in range(1, STATUSES)}

    def offsets(self, str status not None, uint64_t skip=0, uint64_t most=1000, uint64_t looks=UINT64_MAX, now=None):
        """Offsets of messages in a state, oldest first: up to `most`, after `skip`, among the first `looks` of those that
        nobody was given yet. For filters."""
        cdef int64_t at = hr_now_us() if now is None else now
        cdef int wanted = STATUS_NAMES.index(status, 1)
        cdef uint64_t passed = 0
        cdef uint32_t i
        cdef Finished* one
        cdef Flight* flight
        cdef list found = []
        self._check_filter()
        if most == 0:
            return found
        if wanted == COMPLETED or wanted == FAILED:
            for i in range(self.finished_count):
                one = &self.finished[(self.finished_first + i) % self.finished_room]
                if one.outcome == wanted:
                    if passed >= skip:
                        found.append(one.offset)
                        if <uint64_t>len(found) >= most:
                            break
                    passed += 1
            return found
        for i in range(self.flights_count):
            flight = self.flight_at(i)
            if not flight.done and self.flight_status(flight, at) == wanted:
                if passed >= skip:
                    found.append(flight.offset)
                    if <uint64_t>len(found) >= most:
                        return found
                passed += 1
        if wanted != ACTIVE:
            self.walk_ahead(at, wanted, skip - passed if skip > passed else 0, most, looks, found)
        return found

    def remove(self, uint64_t offset, now=None):
        """Takes a message out that nobody has now. Its state until then: "active" ones stay; None where it is not known."""
        cdef int64_t at = hr_now_us() if now is None else now
        cdef int status = self.remove_offset(offset, at)
        self.bus.flush(at)
        return STATUS_NAMES[status] or None

    def _check_filter(self):
        if self.exact:
            raise ValueError("this is for subscriptions with a filter")

    @property
    def inflight(self):
        """How many deliveries wait for an acknowledgement, or for the next attempt."""
        return self.open_flights

    @property
    def member_count(self):
        return len(self.members)


def with_reasons(original, reasons):
    """A message's headers with those of its dead letter. What is no JSON object stays as it was, in one of them."""
    try:
        fields = json.loads(original) if original else {}
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        fields = {"dead-headers": base64.b64encode(original).decode()}
    return json.dumps(fields | reasons).encode()


cdef bytes place_in(bytes key):
    """What a note's key has up to its last slash, or up to the PLACES-th: peers choose parts of some keys, and a place for
    each slash in them would take many times as much memory as the note."""
    cdef Py_ssize_t i, end = 0, slashes = 0
    for i in range(PyBytes_GET_SIZE(key)):
        if key[i] == c"/":
            end = i + 1
            slashes += 1
            if slashes == PLACES:
                break
    return key[:end]


@cython.final
cdef class Bus(Keeper):
    """Topics and subscriptions on one log. `schedule`, if set, is called when dispatch() has something to do."""

    def __cinit__(self):
        self.topics_room = 1024
        self.topics = <Topic*>calloc(self.topics_room, sizeof(Topic))
        if self.topics == NULL:
            raise MemoryError

    def __init__(self, Log log not None, *, uint32_t max_inflight=1024, uint32_t max_deliveries=5,
                 double redelivery_delay=2.0, double max_redelivery_delay=300.0, str dead_letter_prefix="dead.",
                 double durable_grace=3600.0, uint64_t max_pending=0, uint32_t max_topics=1_000_000,
                 bint hold_for_subscriptions=False, now=None):
        if not log.open:
            raise LogError(f"the log {log.path} is closed")
        self.log = log
        self.schedule = None
        self.subscriptions = {}
        self.interests = {}
        self.filters = Trie()
        self.names = TopicTree()
        self.acking = []
        self.safe_waiters = []
        self.stateless = []
        self.leaving = []
        self.kept_notes = {}
        self.note_places = {}
        self.unwritten_notes = []
        self.next_id = 1
        self.max_topics = max_topics
        self.configure(
            max_inflight=max_inflight, max_deliveries=max_deliveries, redelivery_delay=redelivery_delay,
            max_redelivery_delay=max_redelivery_delay, dead_letter_prefix=dead_letter_prefix,
            durable_grace=durable_grace, max_pending=max_pending, hold_for_subscriptions=hold_for_subscriptions)
        self.restore(hr_now_us() if now is None else now)
        log.keeper = self

    def configure(self, *, uint32_t max_inflight, uint32_t max_deliveries, double redelivery_delay,
                  double max_redelivery_delay, str dead_letter_prefix, double durable_grace, uint64_t max_pending,
                  bint hold_for_subscriptions=False):
        """Sets what subscriptions made from now on begin with, and how long durable ones are kept."""
        self.defaults = {
            "max_inflight": max(1, max_inflight), "max_deliveries": max(1, max_deliveries),
            "redelivery_us": int(redelivery_delay * 1e6), "max_redelivery_us": int(max_redelivery_delay * 1e6),
            "max_pending": max_pending, "max_active": 0, "deadline_us": 0, "keep_finished": 0,
        }
        self.dead_prefix = dead_letter_prefix
        self.durable_grace = durable_grace
        self.hold_for_subscriptions = hold_for_subscriptions

    def __dealloc__(self):
        cdef uint32_t i
        if self.topics != NULL:
            for i in range(self.topics_room):
                free(self.topics[i].subscriptions)
                free(self.topics[i].interests)
        free(self.topics)
        free(self.dirty)

    # --- topics ----------------------------------------------------------------------------------------------------------

    cdef int grow_topics(self, uint32_t id) except -1:
        cdef Topic* grown
        cdef uint32_t room = self.topics_room
        if id < room:
            return 0
        while room <= id:
            room *= 2
        grown = <Topic*>realloc(self.topics, room * sizeof(Topic))
        if grown == NULL:
            raise MemoryError
        memset(grown + self.topics_room, 0, (room - self.topics_room) * sizeof(Topic))
        self.topics = grown
        self.topics_room = room
        return 0

    cdef int know_topic(self, uint32_t id) except -1:
        """Matches a topic that appears against all filters, once."""
        cdef bytes name = self.log.topic_name(id)
        self.grow_topics(id)
        if self.topics[id].known:
            return 0
        if 0 < PyBytes_GET_SIZE(name) <= TOPIC_BYTES:
            ids = []
            self.filters.match(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name), note_id, <void*>ids)
            self.names.add(name, id)
            for filter_id in ids:
                if (<Interest>self.interests[filter_id]).admit(self, id) != 0:
                    raise MemoryError
        self.topics[id].known = True
        return 0

    cdef uint32_t topic_id(self, const char* text, Py_ssize_t n) except 0:
        """The id of a topic, known to all filters; made if it is new."""
        cdef uint32_t id = self.log.find_topic(text, n)
        if id and id < self.topics_room and self.topics[id].known:
            return id
        if self.closed:
            raise BusError("the bus is closed")
        if id == 0:
            if words_of(text, n) > TOPIC_WORDS:
                raise BusError(f"a topic has {TOPIC_WORDS} words at most")
            if self.log.names_count > self.max_topics:
                raise BusError(f"too many topics: the limit is {self.max_topics}")
        return self.make_topic(text, n)

    cdef uint32_t make_topic(self, const char* text, Py_ssize_t n) except 0:
        """The same without a limit: for what the bus itself cannot do without."""
        cdef uint32_t id = self.log.find_topic(text, n)
        if id == 0:
            if not 0 < n <= TOPIC_BYTES:
                raise BusError(f"a topic has 1 to {TOPIC_BYTES} bytes, not {n}")
            id = self.log.make_topic(text, n)
            if id == 0:
                raise MemoryError
        self.know_topic(id)
        return id

    # --- the index -------------------------------------------------------------------------------------------------------

    cdef Segment* segment_at(self, uint64_t number) noexcept nogil:
        """The live segment with this number, or the first one after it."""
        cdef Py_ssize_t low = 0, high = self.log.segments_count, middle
        cdef uint64_t first
        if high == 0:
            return NULL
        first = self.log.segments_[0].number
        if number >= first and number - first < <uint64_t>high and self.log.segments_[number - first].number == number:
            return self.log.segments_[number - first]
        while low < high:
            middle = (low + high) // 2
            if self.log.segments_[middle].number < number:
                low = middle + 1
            else:
                high = middle
        return self.log.segments_[low] if low < self.log.segments_count else NULL

    cdef uint64_t walk_from(self, Segment* segment, uint64_t offset) noexcept nogil:
        """A record's position in a segment, from which it is not far to the message `offset`."""
        cdef Index* index = <Index*>segment.index
        cdef uint32_t low = 0, high, middle
        if index == NULL or index.marks_count == 0:
            return SEGMENT_HEADER
        high = index.marks_count
        while low < high:
            middle = (low + high) // 2
            if (<RecordHeader*>(segment.base + (<uint64_t>index.marks[middle] << 3))).offset <= offset:
                low = middle + 1
            else:
                high = middle
        return <uint64_t>index.marks[low - 1] << 3 if low else SEGMENT_HEADER

    cdef RecordHeader* record_at(self, uint64_t offset, Segment** found) noexcept nogil:
        """The message with this offset, or NULL where the log does not have it any more."""
        cdef Segment* segment = self.log.segment_of(offset)
        cdef RecordHeader* record
        cdef uint64_t position
        if segment == NULL or offset < segment.first_offset:
            return NULL
        position = self.walk_from(segment, offset)
        while position < segment.end:
            record = <RecordHeader*>(segment.base + position)
            if not record.flags & FLAG_CONTROL and record.offset >= offset:
                found[0] = segment
                return record if record.offset == offset else NULL
            position += padded(record.length)
        return NULL

    cdef int put_position(self, Message* m) noexcept nogil:
        """Notes where a message stands, in its topic's list for the open segment."""
        cdef Topic* topic = &self.topics[m.topic]
        cdef Positions* here
        cdef Positions** lists
        cdef Index* index
        cdef uint32_t* list_
        if topic.segment != m.segment.number:
            if self.open_number != m.segment.number and self.open_segment(m.segment) != 0:
                return -1
            index = self.open_index
            if index.topics == index.room:
                lists = <Positions**>realloc(index.open_lists, (index.room * 2 + 16) * sizeof(Positions*))
                if lists == NULL:
                    return -1
                index.open_lists = lists
                index.room = index.room * 2 + 16
            here = <Positions*>calloc(1, sizeof(Positions))
            if here == NULL:
                return -1
            here.topic = m.topic
            index.open_lists[index.topics] = here
            index.topics += 1
            topic.here = here
            topic.segment = m.segment.number
        here = topic.here
        if here.count == here.room:
            list_ = <uint32_t*>realloc(here.list, (here.room * 2 + 4) * sizeof(uint32_t))
            if list_ == NULL:
                return -1
            here.list = list_
            here.room = here.room * 2 + 4
        if self.unmarked == 0:
            if self.put_mark(m.position) != 0:
                return -1
            self.unmarked = MARK_EVERY
        self.unmarked -= 1
        here.list[here.count] = <uint32_t>(m.position >> 3)
        here.count += 1
        topic.total += 1
        return 0

    cdef int open_segment(self, Segment* segment) noexcept nogil:
        """The first message of a segment: the one before it takes no more."""
        if self.open_number and self.seal_index() != 0:
            return -1
        if segment.index == NULL:
            segment.index = calloc(1, sizeof(Index))
            if segment.index == NULL:
                return -1
        self.open_index = <Index*>segment.index
        self.open_number = segment.number
        self.unmarked = 0
        return 0

    cdef int put_mark(self, uint64_t position) noexcept nogil:
        cdef Index* index = self.open_index
        cdef uint32_t* marks
        if index.marks_count == index.marks_room:
            marks = <uint32_t*>realloc(index.marks, (index.marks_room * 2 + 16) * sizeof(uint32_t))
            if marks == NULL:
                return -1
            index.marks = marks
            index.marks_room = index.marks_room * 2 + 16
        index.marks[index.marks_count] = <uint32_t>(position >> 3)
        index.marks_count += 1
        return 0

    cdef int seal_index(self) noexcept nogil:
        """Packs the open index, which gets no more messages, into one read-only file without a name, which the system may
        drop from memory and read again."""
        cdef Index* index = self.open_index
        cdef uint32_t* words
        cdef size_t total = 3 * <size_t>index.topics + index.marks_count
        cdef uint32_t i, at
        for i in range(index.topics):
            total += index.open_lists[i].count
        words = <uint32_t*>malloc(total * sizeof(uint32_t))
        if words == NULL:
            return -1
        qsort(index.open_lists, index.topics, sizeof(Positions*), by_topic)
        at = 3 * index.topics
        for i in range(index.topics):
            words[3 * i] = index.open_lists[i].topic
            words[3 * i + 1] = at
            words[3 * i + 2] = index.open_lists[i].count
            memcpy(words + at, index.open_lists[i].list, index.open_lists[i].count * sizeof(uint32_t))
            at += index.open_lists[i].count
            free(index.open_lists[i].list)
            free(index.open_lists[i])
        memcpy(words + at, index.marks, index.marks_count * sizeof(uint32_t))
        free(index.open_lists)
        free(index.marks)
        index.open_lists = NULL
        index.mapped_size = total * sizeof(uint32_t)
        index.mapped = <const uint32_t*>hr_map_unnamed(self.log.directory(), words, index.mapped_size)
        if index.mapped == NULL:
            index.kept = words
            index.mapped = words
        else:
            free(words)
        index.marks = <uint32_t*>index.mapped + at
        index.marks_room = 0
        self.open_number = 0
        self.open_index = NULL
        return 0

    cdef void free_indexes(self) noexcept:
        cdef Py_ssize_t i
        for i in range(self.log.segments_count):
            if self.log.segments_[i].index != NULL:
                free_index(<Index*>self.log.segments_[i].index)
                self.log.segments_[i].index = NULL
        self.open_number = 0
        self.open_index = NULL

    # --- publishing ------------------------------------------------------------------------------------------------------

    cdef int mark_dirty(self, uint32_t topic) noexcept nogil:
        cdef uint32_t* grown
        if self.dirty_count == self.dirty_room:
            grown = <uint32_t*>realloc(self.dirty, (self.dirty_room * 2 + 64) * sizeof(uint32_t))
            if grown == NULL:
                return -1
            self.dirty = grown
            self.dirty_room = self.dirty_room * 2 + 64
        self.dirty[self.dirty_count] = topic
        self.dirty_count += 1
        self.topics[topic].dirty = True
        return 0

    cdef int publish_message(self, Message* m) noexcept nogil:
        """Appends one message; `m.topic` comes from topic_id(). An answer of append_message(). flush() ends the batch."""
        cdef Topic* topic
        cdef int rc
        if self.closed or not self.log.open:
            return APPEND_FAILED
        rc = self.log.append_message(m)
        if rc != APPEND_OK:
            return rc
        topic = &self.topics[m.topic]
        if self.put_position(m) != 0:
            return APPEND_FAILED
        topic.dirty_to = (m.segment.number << 40) | m.position
        if not topic.dirty and (topic.subscriptions_count or topic.interests_count):
            if self.mark_dirty(m.topic) != 0:
                self.unmarked_topics = True
            else:
                topic.dirty_from = topic.dirty_to
                if self.dirty_count == 1:
                    self.dirty_from = topic.dirty_from
        self.published_count[m.protocol & (PROTOCOLS - 1)] += 1
        self.published_bytes[m.protocol & (PROTOCOLS - 1)] += m.payload_len
        return APPEND_OK

    cdef void count_delivery(self, uint8_t protocol, int64_t since, int64_t now) noexcept:
        """A first delivery of a message that could have been delivered since then."""
        cdef uint64_t delay = <uint64_t>(now - since) if now > since else 0
        self.delivered_count[protocol] += 1
        self.delays[protocol][delay_step(delay)] += 1
        self.delays_us[protocol] += delay

    cdef int flush(self, int64_t now) except -1:
        """Ends a batch: writes the acknowledgements, makes everything readable, and has dispatch() called."""
        cdef Subscription subscription
        cdef list waiting
        if self.closed or not self.log.open:
            return 0
        if self.stateless or self.leaving or self.unwritten_notes or (self.ids_written and not self.ids_segment):
            self.write_backlog(now)
        if self.acking:
            waiting = self.acking
            self.acking = []
            for subscription in waiting:
                if subscription.state_segment == 0 or subscription.write_acks(now) == APPEND_OK:
                    subscription.ack_pending = False
                else:
                    self.acking.append(subscription)
        self.log.make_readable()
        if self.dirty_count and not self.scheduled and self.schedule is not None:
            self.scheduled = True
            try:
                self.schedule()
            except BaseException:
                self.scheduled = False
                raise
        return 0

    cdef int write_backlog(self, int64_t now) except -1:
        """What the log had no room for when it should have been written is tried again."""
        cdef Subscription subscription
        cdef uint64_t id
        if self.ids_written and not self.ids_segment:
            if self.log.append_control(CONTROL_IDS, 0, 0, self.ids_written, 0, NULL, 0, NULL, 0, now) == APPEND_OK:
                self.ids_segment = self.log.active.number
        waiting = self.stateless
        self.stateless = []
        for subscription in waiting:
            if not subscription.closed and subscription.write_state(now) == APPEND_FULL:
                self.stateless.append(subscription)
        ids = self.leaving
        self.leaving = []
        for id in ids:
            if self.log.append_control(CONTROL_UNSUBSCRIBE, 0, 0, id, 0, NULL, 0, NULL, 0, now) != APPEND_OK:
                self.leaving.append(id)
        keys = self.unwritten_notes
        self.unwritten_notes = []
        for key in keys:
            if self.write_note(key, self.kept_notes.get(key), now) == APPEND_FULL:
                self.unwritten_notes.append(key)
        return 0

    # --- notes -----------------------------------------------------------------------------------------------------------

    cdef int write_note(self, bytes key, Note note, int64_t now) except -100:
        """The record of a note as it is now, or of its end where there is none; as append_control() answers."""
        cdef int rc
        if note is None:
            return self.log.append_control(
                CONTROL_FORGET, 0, 0, 0, 0, <const uint8_t*>PyBytes_AS_STRING(key), <uint32_t>PyBytes_GET_SIZE(key), NULL, 0,
                now)
        rc = self.log.append_control(
            CONTROL_NOTE, 0, 0, 0, 0, <const uint8_t*>PyBytes_AS_STRING(key), <uint32_t>PyBytes_GET_SIZE(key),
            <const uint8_t*>PyBytes_AS_STRING(note.value), PyBytes_GET_SIZE(note.value), now)
        if rc == APPEND_OK:
            note.segment = self.log.active.number
        return rc

    cdef uint64_t put_note(self, bytes key, bytes value, int64_t now) except 0:
        """Keeps a value under a key, instead of the one before; the lsn from which on it is safe."""
        cdef Note note = Note()
        cdef int rc
        self._check_open()
        if not 0 < PyBytes_GET_SIZE(key) <= KEY_BYTES:
            raise BusError(f"the key of a note has 1 to {KEY_BYTES} bytes, not {len(key)}")
        note.value = value
        rc = self.write_note(key, note, now)
        if rc != APPEND_OK:
            self.log._raise(rc, RECORD_HEADER + len(key) + len(value))
        if key not in self.kept_notes:
            self.place_note(key)
        self.kept_notes[key] = note
        return self.log.lsn()

    cdef uint64_t drop_note(self, bytes key, int64_t now) except? 0:
        """Keeps nothing under a key any more. Where the log has no room to say so, it is said as soon as there is."""
        self._check_open()
        if self.kept_notes.pop(key, None) is None:
            return 0
        self.displace_note(key)
        if self.write_note(key, None, now) == APPEND_FULL:
            self.unwritten_notes.append(key)
        return self.log.lsn()

    def note(self, bytes key not None, bytes value not None, now=None):
        """Keeps a value under a key in the log, instead of the one before, through restarts and retention. Answers the lsn
        from which on it is safe: a gate for what tells a peer of it. For few and small things: all of it is in memory."""
        return self.put_note(key, value, hr_now_us() if now is None else now)

    def forget(self, bytes key not None, now=None):
        """Keeps nothing under a key any more; the lsn from which on that is safe, or 0 where there was nothing."""
        return self.drop_note(key, hr_now_us() if now is None else now)

    def noted(self, bytes key not None):
        """The value under a key, or None."""
        cdef Note note = self.kept_notes.get(key)
        return None if note is None else note.value

    def notes(self, bytes prefix=b""):
        """Every key that begins so, with its value. The first slashes in keys are like those of paths: what is in no place
        that the prefix names is not looked at."""
        cdef dict found = {}
        self.find_notes(place_in(prefix), prefix, found)
        return found

    cdef int find_notes(self, bytes place, bytes prefix, dict found) except -1:
        cdef bytes name
        for name, more in self.note_places.get(place, {}).items():
            if name.startswith(prefix):
                if more:
                    self.find_notes(name, prefix, found)
                else:
                    found[name] = (<Note>self.kept_notes[name]).value
        return 0

    cdef int place_note(self, bytes key) except -1:
        """A note is there: it is in the place that its key names, and that in those above it."""
        cdef bytes name = key, place = place_in(key)
        cdef bint more = False, known
        while True:
            known = place in self.note_places
            self.note_places.setdefault(place, {})[name] = more
            if known or not place:
                return 0
            name, place, more = place, place_in(place[:len(place) - 1]), True

    cdef int displace_note(self, bytes key) except -1:
        """It is no more, nor are places that nothing else is in."""
        cdef bytes name = key, place = place_in(key)
        while True:
            del self.note_places[place][name]
            if self.note_places[place] or not place:
                return 0
            del self.note_places[place]
            name, place = place, place_in(place[:len(place) - 1])

    def dispatch(self):
        """Wakes whoever subscribed to a topic that was published to; to be called once per loop turn."""
        cdef uint32_t i, k
        cdef Topic* topic
        cdef Subscription subscription
        cdef list woken = []
        self.scheduled = False
        if self.closed:
            return
        for i in range(self.dirty_count):
            topic = &self.topics[self.dirty[i]]
            topic.dirty = False
            for k in range(topic.subscriptions_count):
                woken.append(<Subscription>topic.subscriptions[k])
            for k in range(topic.interests_count):
                for subscription in (<Interest>topic.interests[k]).subscriptions:
                    if subscription.waiting_from == 0 or topic.dirty_from < subscription.waiting_from:
                        subscription.waiting_from = topic.dirty_from
                    subscription.waiting_to = max(subscription.waiting_to, topic.dirty_to)
                    if not subscription.wake_due:         # it may match many of the topics
                        subscription.wake_due = True
                        woken.append(subscription)
        self.dirty_count = 0
        failure = None
        for subscription in woken:
            subscription.wake_due = False
            try:
                subscription.wake_members()
            except Exception as e:
                failure = e
        if failure is not None:
            raise failure

    def on_safe(self):
        """Wakes those who met the log's safe end; to be called when it moved."""
        cdef Subscription subscription
        waiting = self.safe_waiters
        self.safe_waiters = []
        failure = None
        for subscription in waiting:
            subscription.waits_safe = False
            try:
                subscription.wake_members()
            except Exception as e:
                failure = e
        if failure is not None:
            raise failure

    cdef uint64_t end_for(self, Subscription subscription) noexcept nogil:
        """How far a cursor may go: at-least-once delivery follows the safe end."""
        return self.log.safe_lsn() if subscription.at_least_once else self.log.published_

    def _check_open(self):
        if self.closed:
            raise BusError("the bus is closed")
        self.log._check_open()

    def publish(self, topic, payload, *, headers=b"", parts=(), uint8_t protocol=0, uint8_t kind=0, bint confirmed=False,
                bint answers=False, uint64_t correlation=0, not_before=None, attempts=None, retry=None, now=None):
        """Publishes one message; its offset. Queues deliver it at the time `not_before` (microseconds) at the earliest, at
        most `attempts` times, `retry` seconds after it was given back; these take the place of other headers. `answers`:
        whoever it is from may publish to the return paths that the headers name."""
        cdef Message m
        cdef Timing timing
        cdef char timing_text[TIMING_BYTES]
        cdef bytes name = topic.encode() if isinstance(topic, str) else topic
        cdef const uint8_t[::1] body = payload
        cdef const uint8_t[::1] head = headers
        cdef uint32_t[::1] sizes
        self._check_open()
        memset(&m, 0, sizeof(Message))
        m.topic = self.topic_id(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
        m.payload = &body[0] if body.shape[0] else NULL
        m.payload_len = body.shape[0]
        m.headers = &head[0] if head.shape[0] else NULL
        m.headers_len = <uint32_t>head.shape[0]
        m.protocol = protocol
        m.kind = kind
        m.flags = (FLAG_CONFIRMED if confirmed else 0) | (FLAG_ANSWERS if answers else 0)
        m.correlation = correlation
        m.now = hr_now_us() if now is None else now
        timing.not_before = not_before or 0
        timing.attempts = attempts or 0
        timing.retry_us = <int64_t>((retry or 0) * 1e6)
        if timing.not_before or timing.attempts or timing.retry_us:
            m.headers_len = write_timing(timing_text, &timing)
            m.headers = <const uint8_t*>timing_text
            m.flags |= FLAG_TIMED
        if parts:
            sizes = array("I", parts)
            m.parts = &sizes[0]
            m.parts_count = <uint32_t>sizes.shape[0]
        self.log._raise(self.publish_message(&m), body.shape[0])
        self.flush(m.now)
        return m.offset

    def publish_many(self, topic, payloads, Py_ssize_t size, *, uint8_t protocol=0, bint confirmed=False, now=None):
        """Publishes `payloads`, cut into messages of `size` bytes, in one call; how many were taken before the log was full."""
        cdef Message m
        cdef bytes name = topic.encode() if isinstance(topic, str) else topic
        cdef const uint8_t[::1] data = payloads
        cdef Py_ssize_t at = 0, end = data.shape[0], count = 0
        cdef int rc = APPEND_OK
        if size <= 0 or end % size:
            raise ValueError("the payloads' length must be a multiple of size")
        self._check_open()
        memset(&m, 0, sizeof(Message))
        m.topic = self.topic_id(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
        m.payload_len = size
        m.protocol = protocol
        m.flags = FLAG_CONFIRMED if confirmed else 0
        m.now = hr_now_us() if now is None else now
        with nogil:
            while at < end:
                m.payload = &data[at]
                rc = self.publish_message(&m)
                if rc != APPEND_OK:
                    break
                at += size
                count += 1
        self.flush(m.now)
        if rc != APPEND_FULL:
            self.log._raise(rc, size)
        return count

    # --- subscribing -----------------------------------------------------------------------------------------------------

    def subscribe(self, filter, *, bint exact=False, bint at_least_once=False, bint durable=False, bint queue=False,
                  bint confirm_all=False, bint kept=False, str owner="", uint8_t protocol=0, start=None, now=None,
                  **options):
        """A new subscription, from the end of the log or from the offset `start`.

        `exact`: `filter` is one topic's name, in which `*` and `#` mean nothing. `durable` (needs at_least_once): it and
        what it acknowledged survive a restart. `queue`: members share it. `confirm_all`: every message is to be
        acknowledged, however it was published. `kept`: nothing is to be acknowledged; whoever takes from it keeps its
        place. Options: max_inflight, max_deliveries, redelivery_us, max_redelivery_us, max_pending, max_active,
        deadline_us, keep_finished.
        """
        cdef bytes text = filter.encode() if isinstance(filter, str) else filter
        cdef int64_t at = hr_now_us() if now is None else now
        cdef Subscription subscription
        cdef int rc
        self._check_open()
        if durable and not at_least_once:
            raise ValueError("a durable subscription is an at-least-once one")
        if not exact:
            check_filter(text)
        unknown = set(options) - set(self.defaults)
        if unknown:
            raise TypeError(f"unknown option {', '.join(sorted(unknown))}")
        self.reserve_ids(at)
        subscription = self.make(self.next_id, text, {
            **self.defaults, **options, "exact": exact, "at_least_once": at_least_once, "durable": durable,
            "queue": queue, "confirm_all": confirm_all, "owner": owner, "protocol": protocol,
        }, True)
        subscription.kept = kept
        self.next_id += 1
        subscription.alone_since = at
        if start is None:
            subscription.seek_end()
        else:
            subscription.seek(start)
        if durable:
            rc = subscription.write_state(at)
            if rc != APPEND_OK:
                self.drop(subscription, at, False)
                if rc == APPEND_TOO_LARGE:
                    raise BusError("the topic is too long for a durable subscription with segments of this size")
                self.log._raise(rc, 0)
        self.flush(at)
        return subscription

    cdef int reserve_ids(self, int64_t now) except -1:
        """No id is ever given out twice while the log lives: it knows a bound, moved a block at a time."""
        cdef int rc
        if self.next_id < self.ids_written:
            return 0
        rc = self.log.append_control(CONTROL_IDS, 0, 0, self.next_id + ID_BLOCK, 0, NULL, 0, NULL, 0, now)
        if rc != APPEND_OK:
            self.log._raise(rc, 0)
        self.ids_written = self.next_id + ID_BLOCK
        self.ids_segment = self.log.active.number
        return 0

    cdef Subscription make(self, uint64_t id, bytes text, dict description, bint limited):
        """A subscription that follows its topics; it has no cursor yet. `limited`: no topic beyond the limit is made."""
        cdef Subscription subscription = Subscription()
        subscription.bus = self
        subscription.id = id
        subscription.filter = text
        subscription.exact = description["exact"]
        subscription.at_least_once = description["at_least_once"]
        subscription.durable = description["durable"]
        subscription.queue = description["queue"]
        subscription.confirm_all = description["confirm_all"]
        subscription.owner = description["owner"]
        subscription.protocol = description["protocol"] & (PROTOCOLS - 1)
        subscription.max_inflight = description["max_inflight"]
        subscription.max_deliveries = description["max_deliveries"]
        subscription.redelivery_us = description["redelivery_us"]
        subscription.max_redelivery_us = description["max_redelivery_us"]
        subscription.max_pending = description["max_pending"]
        subscription.max_active = description.get("max_active", 0)
        subscription.deadline_us = description.get("deadline_us", 0)
        subscription.keep_finished = description.get("keep_finished", 0)
        subscription.members = []
        subscription.acked = set()
        self.follow(subscription, limited)
        self.subscriptions[id] = subscription
        return subscription

    cdef int follow(self, Subscription subscription, bint limited) except -1:
        """Has a subscription woken for its topics from here on."""
        cdef bytes text = subscription.filter
        cdef const char* name = PyBytes_AS_STRING(text)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(text)
        cdef Topic* topic
        cdef void** grown
        cdef Interest interest
        if subscription.exact:
            subscription.topic = self.topic_id(name, size) if limited else self.make_topic(name, size)
            topic = &self.topics[subscription.topic]
            if topic.subscriptions_count == topic.subscriptions_room:
                grown = <void**>realloc(topic.subscriptions, (topic.subscriptions_room * 2 + 2) * sizeof(void*))
                if grown == NULL:
                    raise MemoryError
                topic.subscriptions = grown
                topic.subscriptions_room = topic.subscriptions_room * 2 + 2
            subscription.slot = topic.subscriptions_count
            topic.subscriptions[topic.subscriptions_count] = <void*>subscription
            topic.subscriptions_count += 1
            return 0
        id = self.filters.add(text)
        interest = self.interests.get(id)
        if interest is None:
            interest = Interest()
            interest.id = id
            interest.subscriptions = []
            pair = (interest, self)
            self.names.visit(name, size, note_topic, <void*>pair)
            if interest.failed:
                interest.leave_topics(self)
                self.filters.remove(id)
                raise MemoryError
            self.interests[id] = interest
        subscription.slot = <uint32_t>len(interest.subscriptions)
        interest.subscriptions.append(subscription)
        subscription.interest = interest
        return 0

    cdef int unfollow(self, Subscription subscription) except -1:
        cdef Topic* topic
        cdef void* last
        cdef Interest interest
        cdef Subscription other
        if subscription.exact:
            topic = &self.topics[subscription.topic]
            topic.subscriptions_count -= 1
            last = topic.subscriptions[topic.subscriptions_count]
            topic.subscriptions[subscription.slot] = last
            (<Subscription>last).slot = subscription.slot
            return 0
        interest = subscription.interest
        other = interest.subscriptions.pop()
        if other is not subscription:
            interest.subscriptions[subscription.slot] = other
            other.slot = subscription.slot
        if not interest.subscriptions:
            interest.leave_topics(self)
            del self.interests[interest.id]
        self.filters.remove(interest.id)
        return 0

    cdef Subscription find(self, uint64_t id):
        return self.subscriptions.get(id)

    cdef int drop(self, Subscription subscription, int64_t now, bint write) except -1:
        """Ends a subscription; `write`: the log forgets it too."""
        if subscription.closed:
            return 0
        subscription.shut()
        self.unfollow(subscription)
        if subscription.waits_safe:
            self.safe_waiters.remove(subscription)
        if subscription.ack_pending:
            self.acking.remove(subscription)
        if write and subscription.durable:
            if self.log.append_control(CONTROL_UNSUBSCRIBE, 0, 0, subscription.id, 0, NULL, 0, NULL, 0, now) != APPEND_OK:
                self.leaving.append(subscription.id)
        del self.subscriptions[subscription.id]
        return 0

    def unsubscribe(self, Subscription subscription not None, now=None):
        """Ends a subscription for good. Its members are woken, to find that they are gone."""
        cdef int64_t at = hr_now_us() if now is None else now
        cdef Member member
        self._check_open()
        if subscription.bus is not self:
            raise ValueError("a subscription of another bus")
        members = list(subscription.members)
        self.drop(subscription, at, True)
        self.flush(at)
        for member in members:
            if member.waker is not None:
                member.waker.wake()

    cdef int write_attempt(self, Subscription subscription, uint64_t offset, uint64_t deliveries, int64_t due,
                           int64_t now) noexcept:
        """So that a restart does not give a message its attempts back, nor forget when the next one is due (0: at once).
        Without room it is only remembered."""
        cdef uint64_t words[3]
        words[0] = offset
        words[1] = deliveries
        words[2] = <uint64_t>due
        return self.log.append_control(
            CONTROL_ATTEMPT, 0, 0, subscription.id, 0, NULL, 0, <const uint8_t*>words, 24 if due else 16, now)

    def tick(self, now=None):
        """Redeliveries, dead letters, subscriptions that nobody came back to; when to call it again (microseconds), or None."""
        cdef int64_t at = hr_now_us() if now is None else now
        cdef int64_t due, soonest = INT64_MAX
        cdef Subscription subscription
        self._check_open()
        failure = None
        for subscription in list(self.subscriptions.values()):
            if not subscription.at_least_once or subscription.closed:
                continue
            try:
                due = subscription.check_due(at)
            except Exception as e:                        # the others have their time too
                failure = e
                continue
            if due >= 0:
                soonest = min(soonest, due)
            if subscription.durable and subscription.alone_since and not subscription.queue:
                due = subscription.alone_since + <int64_t>(self.durable_grace * 1e6)
                if due <= at:
                    self.expired += 1
                    self.drop(subscription, at, True)
                else:
                    soonest = min(soonest, due)
        self.flush(at)
        if failure is not None:
            raise failure
        return None if soonest == INT64_MAX else soonest

    # --- retention -------------------------------------------------------------------------------------------------------

    cdef int carry(self, Segment* segment, int64_t now) except -1:
        """Copies what is still needed from a segment into the newest one; 0 where it must stay for now.

        That is so while room for it is on its way. Where none is, subscriptions do not hold back retention, unless they
        may: what cannot be carried is lost, and what has to be written is written as soon as there is room.
        """
        cdef Subscription subscription
        cdef Flight* flight
        cdef uint32_t i
        cdef uint64_t position, offset
        cdef int rc
        cdef dict wanted = {}
        if self.hold_for_subscriptions:
            for subscription in self.subscriptions.values():
                if (subscription.durable or subscription.kept) and subscription.waits_in(segment):
                    return 0
        for subscription in self.subscriptions.values():
            if subscription.open_flights:
                for i in range(subscription.flights_count):
                    flight = subscription.flight_at(i)
                    if flight.segment == segment.number and not flight.done:
                        wanted.setdefault(flight.position, []).append(subscription)
        for position, owners in wanted.items():
            rc = self.carry_message(segment, position, owners, now)
            if rc == APPEND_OK:
                continue
            if self.room_may_come(rc):
                return 0
            offset = (<RecordHeader*>(segment.base + position)).offset
            for subscription in owners:
                subscription.finish(subscription.flight(offset), OUT_REMOVED)
                subscription.settle()
                subscription.lost += 1
                self.lost += 1
        for subscription in self.subscriptions.values():
            if subscription.durable and 0 < subscription.state_segment <= segment.number:
                rc = subscription.write_state(now)
                if rc == APPEND_OK:
                    continue
                if self.room_may_come(rc):
                    return 0
                subscription.state_segment = 0
                self.stateless.append(subscription)
        for key, note in self.kept_notes.items():
            if 0 < (<Note>note).segment <= segment.number:
                rc = self.write_note(key, note, now)
                if rc == APPEND_OK:
                    continue
                if self.room_may_come(rc):
                    return 0
                (<Note>note).segment = 0
                self.unwritten_notes.append(key)
        if 0 < self.ids_segment <= segment.number:
            rc = self.log.append_control(CONTROL_IDS, 0, 0, self.ids_written, 0, NULL, 0, NULL, 0, now)
            if rc == APPEND_OK:
                self.ids_segment = self.log.active.number
            elif self.room_may_come(rc):
                return 0
            else:
                self.ids_segment = 0
        return 1

    cdef bint room_may_come(self, int rc) except -1:
        """Whether to wait, after a control record could not be written."""
        if rc == APPEND_TOO_LARGE:
            return False
        return rc == APPEND_FAILED or self.hold_for_subscriptions or self.log.full is None

    cdef int carry_message(self, Segment* segment, uint64_t position, list owners, int64_t now) except -100:
        """Copies one message that is in flight, as append_control() answers; its flights are moved to the copy."""
        cdef RecordHeader* record = <RecordHeader*>(segment.base + position)
        cdef Log log = self.log
        cdef Subscription subscription
        cdef Flight* flight
        cdef uint64_t pairs[2 * OWNERS]
        cdef uint64_t copy_segment = 0, copy_position = 0
        cdef uint32_t count = 0
        cdef Py_ssize_t i, n = len(owners)
        cdef int rc
        for i in range(n):
            subscription = owners[i]
            if subscription.durable:
                pairs[2 * count] = subscription.id
                pairs[2 * count + 1] = subscription.flight(record.offset).deliveries
                count += 1
            if (count < OWNERS and i < n - 1) or (count == 0 and copy_segment):
                continue
            rc = log.append_control(
                CONTROL_CARRY, record.topic, 0, record.offset, 0, <const uint8_t*>pairs, count * 16, <const uint8_t*>record,
                0 if copy_segment else record.length, now)
            if rc != APPEND_OK:
                return rc
            if copy_segment == 0:
                copy_segment = log.active.number
                copy_position = log.position - padded(RECORD_HEADER + count * 16 + record.length) + RECORD_HEADER + count * 16
                if log.names[record.topic].written != copy_segment:
                    # A topic's name stands in each segment in which it is used.
                    rc = log.write_name(record.topic, now)
                    if rc != APPEND_OK:
                        return rc
            count = 0
        for subscription in owners:
            flight = subscription.flight(record.offset)
            flight.segment = copy_segment
            flight.position = copy_position
        self.carried_count += 1
        return APPEND_OK

    cdef int retired(self, Segment* segment) except -1:
        cdef Subscription subscription
        if self.log.segments_count and self.log.segments_[0].number > segment.number:
            for subscription in self.subscriptions.values():
                if subscription.segment <= segment.number:
                    subscription.overtaken(segment)
        if self.open_number == segment.number:
            self.open_number = 0
            self.open_index = NULL
        if segment.index != NULL:
            free_index(<Index*>segment.index)
            segment.index = NULL
        return 0

    # --- restart ---------------------------------------------------------------------------------------------------------

    cdef int restore(self, int64_t now) except -1:
        """Builds the index and the durable subscriptions from the log."""
        cdef Log log = self.log
        cdef Segment* segment
        cdef RecordHeader* record
        cdef View view
        cdef Message m
        cdef uint64_t position
        cdef uint32_t id
        cdef Py_ssize_t i
        cdef dict states = {}
        cdef dict copies = {}
        cdef dict parts = {}
        self.free_indexes()
        self.grow_topics(log.names_count)
        for id in range(1, log.names_count):
            if log.names[id].text != NULL:
                self.know_topic(id)
        memset(&m, 0, sizeof(Message))
        for i in range(log.segments_count):
            segment = log.segments_[i]
            position = SEGMENT_HEADER
            while position < segment.end:
                record = <RecordHeader*>(segment.base + position)
                if not record.flags & FLAG_CONTROL:
                    self.grow_topics(record.topic)        # damage may have taken its name
                    m.topic = record.topic
                    m.segment = segment
                    m.position = position
                    if self.put_position(&m) != 0:
                        raise MemoryError
                elif record.kind >= CONTROL_SUBSCRIPTION:
                    view_record(record, &view)
                    self.replay(&view, segment.number, position, states, copies, parts)
                position += padded(record.length)
        for sub_id in sorted(states):
            self.revive(sub_id, states[sub_id], copies, now)
        for key in self.kept_notes:
            self.place_note(key)
        if self.ids_written:
            self.next_id = self.ids_written
        return 0

    cdef int replay(self, View* view, uint64_t number, uint64_t position, dict states, dict copies, dict parts) except -1:
        """One control record of the bus. `copies`: offset -> where it was carried to; `parts`: id -> what precedes its state."""
        cdef const RecordHeader* record = view.record
        cdef const uint64_t* words = <const uint64_t*>view.payload
        cdef const uint64_t* owners = <const uint64_t*>view.headers
        cdef uint64_t count = view.payload_len // 8
        cdef uint64_t i
        cdef Remembered state
        cdef Note note
        if record.kind == CONTROL_ACK:
            state = states.get(record.correlation)
            if state is not None and count:
                state.cursor = max(state.cursor, words[0])
                for i in range(1, count):
                    state.open.pop(words[i], None)
                    state.acked.add(words[i])
                if len(state.acked) > state.prune_at:
                    state.acked = {offset for offset in state.acked if offset >= state.cursor}
                    state.prune_at = 2 * len(state.acked) + 64
                if words[0] > state.floor:
                    state.floor = words[0]
        elif record.kind == CONTROL_FINISHED:
            state = states.get(record.correlation)
            if state is not None and count:
                state.cursor = max(state.cursor, words[0])
                for i in range(1, count - 1, 2):
                    state.finished.append((words[i], words[i + 1]))
                    if words[i + 1] & 0xFF == OUT_REMOVED_AHEAD:
                        state.ahead.add(words[i])
                        continue
                    state.open.pop(words[i], None)
                    state.due.pop(words[i], None)
                    if words[i] >= words[0]:
                        state.acked.add(words[i])
                keep = 2 * state.description.get("keep_finished", 0) + 64
                if <uint64_t>len(state.finished) > 2 * keep:
                    del state.finished[:-keep]
                if len(state.acked) > state.prune_at:
                    state.acked = {offset for offset in state.acked if offset >= state.cursor}
                    state.prune_at = 2 * len(state.acked) + 64
                if words[0] > state.floor:
                    state.floor = words[0]
        elif record.kind == CONTROL_ATTEMPT:
            state = states.get(record.correlation)
            if state is not None and count >= 2:
                state.open[words[0]] = words[1]
                if count > 2:
                    state.due[words[0]] = words[2]
                else:
                    state.due.pop(words[0], None)
        elif record.kind == CONTROL_PASSED:
            state = states.get(record.correlation)
            if state is not None and count == 2:
                state.passed.append((words[0], words[1]))
        elif record.kind == CONTROL_CARRY:
            if view.payload_len:
                copies[record.correlation] = (number, position + RECORD_HEADER + view.headers_len)
            for i in range(view.headers_len // 16):
                state = states.get(owners[2 * i])
                if state is not None:
                    state.open[record.correlation] = owners[2 * i + 1]
        elif record.kind == CONTROL_PART:
            if owners[0] == 0:
                parts[record.correlation] = [number]
            parts[record.correlation].append(view.payload[:view.payload_len])
        elif record.kind == CONTROL_SUBSCRIPTION:
            description = json.loads(view.headers[:view.headers_len].decode("utf-8", "surrogateescape"))
            body = view.payload[:view.payload_len]
            if description["parts"]:
                number, *pieces = parts.pop(record.correlation)
                body = b"".join(pieces)
            state = states.get(record.correlation)
            finished = [] if state is None else state.finished
            state = states[record.correlation] = remembered(description, number, body)
            state.finished = finished
        elif record.kind == CONTROL_UNSUBSCRIBE:
            states.pop(record.correlation, None)
        elif record.kind == CONTROL_NOTE:
            note = Note()
            note.value = view.payload[:view.payload_len]
            note.segment = number
            self.kept_notes[view.headers[:view.headers_len]] = note
        elif record.kind == CONTROL_FORGET:
            self.kept_notes.pop(view.headers[:view.headers_len], None)
        elif record.kind == CONTROL_IDS:
            self.ids_written = max(self.ids_written, record.correlation)
            self.ids_segment = number
        return 0

    cdef int revive(self, uint64_t id, Remembered state, dict copies, int64_t now) except -1:
        """A durable subscription as it was: everything that it did not acknowledge is delivered again."""
        cdef Subscription subscription
        cdef Segment* segment = NULL
        cdef RecordHeader* record
        cdef Timing timing
        cdef uint64_t offset, known, number, position
        subscription = self.make(
            id, state.description["filter"].encode("utf-8", "surrogateescape"),
            {**state.description, "at_least_once": True, "durable": True}, False)
        subscription.state_segment = state.segment
        subscription.acks_above = len(state.acked)
        subscription.restored_below = self.log.next_offset
        subscription.alone_since = now
        subscription.seek(state.cursor)
        passed = [offset for pair in state.passed for offset in pair]
        known = max(1 + max(max(state.acked, default=-1), max(state.open, default=-1)), max(passed, default=0))
        # What was in flight when the state was written, or was carried since.
        for offset in sorted(state.open):
            if state.floor <= offset < subscription.next_offset:
                if offset in copies:
                    number, position = copies[offset]
                else:
                    record = self.record_at(offset, &segment)
                    if record == NULL:
                        continue
                    number = segment.number
                    position = <const uint8_t*>record - segment.base
                subscription.take_up(offset, number, position, state.open[offset], state.due.get(offset, 0), now)
        for offset, outcome in state.finished:
            subscription.put_finished(offset, outcome >> 8, outcome & 0xFF)
        # What was handed out since: all that comes before something of which the log says so.
        while subscription.next_record(self.log.published_, &segment, &position):
            record = <RecordHeader*>(segment.base + position)
            if record.offset >= known:
                break
            subscription.skip_one(segment, position)
            if subscription.confirms(record) and record.offset not in state.acked and record.offset not in state.ahead and not (
                bisect_right(passed, record.offset) % 2
            ):
                # One with a time to wait for is there without a delivery; the first one would have been written.
                read_timing(record, &timing)
                subscription.take_up(
                    record.offset, segment.number, position,
                    state.open.get(record.offset, 0 if subscription.queue and timing.not_before > record.time else 1),
                    state.due.get(record.offset, 0), now)
        subscription.acked = {offset for offset in state.acked if offset >= subscription.next_offset}
        subscription.removed = {offset for offset in state.ahead if offset >= subscription.next_offset} or None
        return 0

    def close(self):
        """Lets go of the log; the log itself is closed by whoever opened it."""
        cdef Subscription subscription
        cdef Topic* topic
        cdef uint32_t i
        if self.closed:
            return
        try:
            self.flush(hr_now_us())
        finally:
            self.closed = True
            for subscription in self.subscriptions.values():
                subscription.shut()
            for i in range(self.topics_room):
                self.topics[i].subscriptions_count = self.topics[i].interests_count = 0
            self.dirty_count = 0
            self.subscriptions = {}
            self.interests = {}
            self.acking = []
            self.safe_waiters = []
            self.stateless = []
            if self.log.keeper is self:
                self.log.keeper = Keeper()
                self.free_indexes()

    def stats(self):
        """Counters since the start, and how much there is of everything."""
        cdef Subscription subscription
        inflight = durable = 0
        for subscription in self.subscriptions.values():
            inflight += subscription.open_flights
            durable += subscription.durable
        return {
            "topics": self.log.names_count - 1, "subscriptions": len(self.subscriptions), "durable": durable,
            "notes": len(self.kept_notes), "inflight": inflight, "acknowledged": self.acknowledged, "redelivered": self.redelivered, "dead": self.dead,
            "lost": self.lost, "expired": self.expired, "carried": self.carried_count,
            "published": {name: self.published_count[i] for i, name in enumerate(PROTOCOL_NAMES) if i},
            "published_bytes": {name: self.published_bytes[i] for i, name in enumerate(PROTOCOL_NAMES) if i},
            "delivered": {name: self.delivered_count[i] for i, name in enumerate(PROTOCOL_NAMES) if i},
            "delays": {name: self._delays(i) for i, name in enumerate(PROTOCOL_NAMES) if i},
        }

    def _delays(self, Py_ssize_t protocol):
        """How long first deliveries took: the sum in seconds, and for each step that there was its end and how many."""
        cdef Py_ssize_t step
        cdef list steps = []
        for step in range(DELAY_STEPS):
            if self.delays[protocol][step]:
                steps.append([end_of_delay_step(step) / 1e6, self.delays[protocol][step]])
        return {"seconds": self.delays_us[protocol] / 1e6, "steps": steps}


cdef Remembered remembered(dict description, uint64_t number, bytes body):
    """A state as write_state() wrote it."""
    cdef Remembered state = Remembered()
    words = array("Q")
    words.frombytes(body)
    cursor, in_flight = words[:2]
    end = 2 + 2 * in_flight
    dues = end + 2 * description.get("dues", 0)
    ahead = len(words) - description.get("ahead", 0)
    state.description = description
    state.segment = number
    state.cursor = cursor
    state.floor = 0
    state.open = dict(zip(words[2:end:2], words[3:end:2]))
    state.due = dict(zip(words[end:dues:2], words[end + 1:dues:2]))
    state.acked = set(words[dues:ahead])
    state.ahead = set(words[ahead:])
    state.finished = []
    state.passed = []
    state.prune_at = 2 * len(state.acked) + 64
    return state
