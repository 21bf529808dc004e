"""The bus: topics and subscriptions on the log. A subscription's queue, its redeliveries and its replay are cursors.

It knows nothing of protocols, sockets or the loop: sessions publish into it and take from it, and it says when there is
something to take. All of it runs in the thread that appends to the log.

Publishing appends one record, notes its position in its topic's list and puts the topic on a list of dirty ones;
whoever subscribed is woken later, once per loop turn. So it costs the same with one subscription as with a thousand.
What must survive a restart is in the log as control records, and is carried forward when their segment is retired.
"""

import json
from collections import namedtuple

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, qsort, realloc
from libc.string cimport memcpy, memmove, memset
from posix.mman cimport MAP_FAILED, MAP_PRIVATE, MAP_SHARED, PROT_READ, mmap, munmap

from headrace.log cimport (
    APPEND_FAILED, APPEND_FULL, APPEND_OK, APPEND_TOO_LARGE, FLAG_CONFIRMED, FLAG_CONTROL, FLAG_PARTS, RECORD_HEADER,
    SEGMENT_HEADER, Keeper, Log, Message, Origin, RecordHeader, Segment, View, padded, view_record,
)
from headrace.trie cimport TopicTree, Trie, filter_matches
from headrace.wake cimport Waker

cdef extern from "platform.h" nogil:
    int64_t hr_now_us()
    void* hr_map_unnamed(const char* directory, const void* data, size_t size)

from headrace.errors import BusError, LogFull
from headrace.trie import check_filter

cdef enum:
    TOPIC_WORDS = 128        # what matching one topic against all filters may cost grows with its words
    ID_BLOCK = 1024          # subscription ids are reserved in the log this many at a time

PROTOCOL_NAMES = ("", "blipmq", "overhop", "relink", "zeroctl", "felix")

Received = namedtuple("Received", "offset time topic payload headers parts protocol kind flags correlation tag deliveries confirm")
Received.__doc__ = "One delivery as Python sees it. `confirm`: acknowledge it with `tag`."


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
    if index.kept != NULL:
        free(index.kept)
    elif index.mapped != NULL:
        munmap(<void*>index.mapped, index.mapped_size)
    free(index)


cdef Py_ssize_t memcount(const char* text, Py_ssize_t n, char wanted) noexcept nogil:
    cdef Py_ssize_t i, count = 0
    for i in range(n):
        count += text[i] == wanted
    return count


cdef void found_topic(void* ctx, uint32_t id) noexcept:
    (<list>ctx).append(id)


cdef class Member:
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


cdef class Subscription:
    """A cursor on the log. Made by Bus.subscribe()."""

    def __dealloc__(self):
        free(self.interest)
        free(self.flights)
        free(self.unwritten)

    # --- the cursor --------------------------------------------------------------------------------------------------

    cdef bint interested(self, uint32_t topic) noexcept nogil:
        return (topic >> 6) < self.interest_words and (self.interest[topic >> 6] >> (topic & 63)) & 1

    cdef bint resolve(self, Segment* segment) noexcept:
        """Points `list_` to this topic's positions in a segment; False where it has none there."""
        cdef Topic* topic
        cdef Index* index
        cdef uint32_t low, high, middle
        if segment.number == self.bus.open_number:
            topic = &self.bus.topics[self.topic]
            self.list_segment = 0                         # it grows and moves: to be looked up again each time
            if topic.segment != segment.number:
                self.list_count = 0
                return False
            self.list_ = topic.here.list
            self.list_count = topic.here.count
            return True
        if self.list_segment == segment.number:
            return self.list_count > 0
        self.list_segment = 0
        self.list_count = 0
        index = <Index*>segment.index
        if index == NULL or index.mapped == NULL:
            return False                                  # nothing there yet: it may be opened, so that is not kept
        self.list_segment = segment.number
        low = 0
        high = index.topics
        while low < high:
            middle = (low + high) // 2
            if index.mapped[3 * middle] < self.topic:
                low = middle + 1
            else:
                high = middle
        if low == index.topics or index.mapped[3 * low] != self.topic:
            return False
        self.list_ = index.mapped + index.mapped[3 * low + 1]
        self.list_count = index.mapped[3 * low + 2]
        return True

    cdef bint next_record(self, uint64_t limit, Segment** found, uint64_t* where) except -1:
        """Moves the cursor to the next record that matches, below the lsn `limit`; False where there is none."""
        cdef Log log = self.bus.log
        cdef Segment* segment
        cdef RecordHeader* record
        cdef uint64_t position, end
        cdef Py_ssize_t i
        while True:
            segment = self.bus.segment_at(self.segment)
            if segment == NULL:
                return False
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
                end = segment.end
                if (limit >> 40) == segment.number:
                    end = limit & ((<uint64_t>1 << 40) - 1)
                elif (limit >> 40) < segment.number:
                    return False
                position = self.position
                while position < end:
                    record = <RecordHeader*>(segment.base + position)
                    if not record.flags & FLAG_CONTROL and self.interested(record.topic):
                        self.position = position
                        found[0] = segment
                        where[0] = position
                        return True
                    position += padded(record.length)
                self.position = position
            if segment == log.segments_[log.segments_count - 1]:
                return False
            for i in range(log.segments_count - 1):
                if log.segments_[i] == segment:
                    self.segment = log.segments_[i + 1].number
                    self.position = 0 if self.exact else SEGMENT_HEADER
                    break

    cdef void skip_one(self, Segment* segment, uint64_t position) noexcept:
        cdef RecordHeader* record = <RecordHeader*>(segment.base + position)
        if self.exact:
            self.position += 1
        else:
            self.position = position + padded(record.length)
        self.next_offset = record.offset + 1

    cdef int seek_end(self) except -1:
        cdef Log log = self.bus.log
        self.segment = log.active.number
        self.next_offset = log.next_offset
        if self.exact:
            self.resolve(log.active)
            self.position = self.list_count
        else:
            self.position = log.position
        return 0

    cdef int seek(self, uint64_t offset) except -1:
        """To the first matching record at or after `offset`."""
        cdef Log log = self.bus.log
        cdef Segment* segment = log.segment_of(offset)
        cdef RecordHeader* record
        cdef uint32_t low, high, middle
        if segment == NULL:
            return self.seek_end()
        self.segment = segment.number
        self.next_offset = max(offset, segment.first_offset)
        if self.exact:
            self.resolve(segment)
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
        else:
            self.position = SEGMENT_HEADER
            while self.position < segment.end:
                record = <RecordHeader*>(segment.base + self.position)
                if record.offset >= offset and not record.flags & FLAG_CONTROL:
                    break
                self.position += padded(record.length)
        return 0

    cdef int overtaken(self, Segment* segment) except -1:
        """The cursor's segment goes away: moves it to the next one, and counts what it did not see."""
        cdef Log log = self.bus.log
        cdef RecordHeader* record
        cdef uint64_t count = 0
        if self.exact:
            self.resolve(segment)
            count = self.list_count - self.position if self.position < self.list_count else 0
        else:
            while self.position < segment.end:
                record = <RecordHeader*>(segment.base + self.position)
                if not record.flags & FLAG_CONTROL and self.interested(record.topic):
                    count += 1
                self.position += padded(record.length)
        self.lost += count
        self.bus.lost += count
        self.list_segment = 0
        self.segment = log.segments_[0].number
        self.position = 0 if self.exact else SEGMENT_HEADER
        self.next_offset = max(self.next_offset, log.segments_[0].first_offset)
        return 0

    cdef void apply_pending_limit(self) except *:
        """max_pending: of what waits in the segments from the cursor on, the oldest beyond the limit is passed over."""
        cdef Log log = self.bus.log
        cdef uint64_t pending = 0, surplus, here
        cdef uint64_t segment_number = self.segment, position = self.position
        cdef Segment* segment
        cdef Py_ssize_t i
        cdef bint counting = False
        for i in range(log.segments_count):
            segment = log.segments_[i]
            if segment.number < segment_number:
                continue
            self.resolve(segment)
            pending += self.list_count - (position if segment.number == segment_number else 0)
        if pending <= self.max_pending:
            return
        surplus = pending - self.max_pending
        self.lost += surplus
        self.bus.lost += surplus
        for i in range(log.segments_count):
            segment = log.segments_[i]
            if segment.number < self.segment:
                continue
            self.segment = segment.number
            if segment.number != segment_number:
                self.position = 0
            self.resolve(segment)
            here = self.list_count - self.position
            if here > surplus:
                self.position += surplus
                break
            surplus -= here
            self.position = self.list_count
            if surplus == 0:
                break

    # --- taking and acknowledging --------------------------------------------------------------------------------------

    cpdef Member join(self, Waker waker, int64_t credits, int64_t now):
        """A peer that takes from this subscription; `waker` (or None) is told when there is something."""
        cdef Member member
        if self.closed:
            raise BusError(f"subscription {self.id} is gone")
        if self.members and not self.queue:
            # One peer at a time: the newest wins, as after a reconnection that the gateway has not noticed yet.
            for member in list(self.members):
                self.leave_quietly(member, now)
        member = Member()
        self.next_member += 1
        member.subscription = self
        member.id = self.next_member
        member.waker = waker
        member.credits = credits
        self.members.append(member)
        self.alone_since = 0
        return member

    def leave_quietly(self, Member member, int64_t now):
        """Takes a member off without ending the subscription, even if it was the last one."""
        cdef uint32_t i
        cdef Flight* flight
        if member.gone:
            return
        member.gone = True
        self.members.remove(member)
        for i in range(self.flights_count):
            flight = &self.flights[(self.flights_first + i) & (self.flights_room - 1)]
            if flight.member == member.id and not flight.done:
                flight.member = 0
                flight.due = now
                self.next_due = min(self.next_due, now)
        member.inflight = 0

    cdef int leave(self, Member member, int64_t now) except -1:
        if member.gone:
            return 0
        self.leave_quietly(member, now)
        if self.members:
            self.wake_members()
        elif self.durable:
            self.alone_since = now
        elif not self.queue:
            self.bus.drop(self, now, False)
        return 0

    cdef int64_t backoff(self, uint32_t deliveries) noexcept nogil:
        cdef int64_t wait = self.redelivery_us
        while deliveries > 1 and wait < self.max_redelivery_us:
            wait *= 2
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
        cdef bint confirm
        if member.gone or member.credits == 0:
            return 0
        if self.at_least_once and self.next_due <= now:
            flight = self.due_flight(now)
            if flight != NULL:
                segment = bus.segment_at(flight.segment)
                flight.deliveries += 1
                flight.due = now + self.backoff(flight.deliveries)
                flight.member = member.id
                member.inflight += 1
                if member.credits > 0:
                    member.credits -= 1
                self.next_due = min(self.next_due, flight.due)
                self.redelivered += 1
                bus.redelivered += 1
                if self.durable:
                    bus.write_attempt(self, flight.offset, flight.deliveries, now)
                view_record(<RecordHeader*>(segment.base + flight.position), &out.view)
                out.tag = flight.offset + 1
                out.deliveries = flight.deliveries
                out.confirm = True
                return 1
        if self.open_flights >= self.max_inflight:
            return 0
        if self.max_pending and self.exact:
            self.apply_pending_limit()
        limit = bus.end_for(self)
        while self.next_record(limit, &segment, &position):
            record = <RecordHeader*>(segment.base + position)
            self.skip_one(segment, position)
            confirm = self.at_least_once and (self.confirm_all or record.flags & FLAG_CONFIRMED)
            if record.offset < self.restored_below:
                # From before a restart: what may have been delivered and was never to be confirmed is not delivered again.
                if not confirm:
                    continue
                if record.offset in self.acked:
                    self.acked.discard(record.offset)
                    continue
            view_record(record, &out.view)
            out.tag = record.offset + 1
            out.deliveries = 1
            out.confirm = confirm
            if confirm:
                flight = self.add_flight(record.offset)
                flight.segment = segment.number
                flight.position = position
                flight.deliveries = 1
                if self.attempts is not None:
                    flight.deliveries += self.attempts.pop(record.offset, 0)
                    out.deliveries = flight.deliveries
                flight.due = now + self.backoff(flight.deliveries)
                flight.member = member.id
                member.inflight += 1
                self.next_due = min(self.next_due, flight.due)
            if member.credits > 0:
                member.credits -= 1
            self.delivered += 1
            bus.delivered_count[self.protocol] += 1
            return 1
        if self.at_least_once and not self.waits_safe and limit < bus.log.published_:
            self.waits_safe = True
            bus.safe_waiters.append(self)
            bus.log.ask_sync()
        return 0

    cdef Flight* due_flight(self, int64_t now) except? NULL:
        """The oldest delivery whose time has come again; those that had their last one are buried on the way."""
        cdef Flight* flight
        cdef Flight* answer = NULL
        cdef uint32_t i
        cdef int64_t next_due = INT64_MAX
        for i in range(self.flights_count):
            flight = &self.flights[(self.flights_first + i) & (self.flights_room - 1)]
            if flight.done:
                continue
            if flight.due <= now and answer == NULL:
                self.give_back(flight)
                if flight.deliveries >= self.max_deliveries:
                    self.bury(flight, now, "no acknowledgement")
                    if not flight.done:
                        next_due = min(next_due, flight.due)
                    continue
                answer = flight
                continue
            next_due = min(next_due, flight.due)
        self.next_due = next_due
        self.settle()
        return answer

    cdef int give_back(self, Flight* flight) except -1:
        """Takes a flight from the member that has it."""
        cdef Member member
        if flight.member:
            for member in self.members:
                if member.id == flight.member:
                    member.inflight -= 1
                    break
            flight.member = 0
        return 0

    cdef Flight* flight(self, uint64_t offset) noexcept nogil:
        cdef uint32_t low = 0, high = self.flights_count, middle
        cdef Flight* flight
        while low < high:
            middle = (low + high) // 2
            flight = &self.flights[(self.flights_first + middle) & (self.flights_room - 1)]
            if flight.offset < offset:
                low = middle + 1
            else:
                high = middle
        if low == self.flights_count:
            return NULL
        flight = &self.flights[(self.flights_first + low) & (self.flights_room - 1)]
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
                grown[i] = self.flights[(self.flights_first + i) & (self.flights_room - 1)]
            free(self.flights)
            self.flights = grown
            self.flights_first = 0
            self.flights_room = room
        flight = &self.flights[(self.flights_first + self.flights_count) & (self.flights_room - 1)]
        memset(flight, 0, sizeof(Flight))
        flight.offset = offset
        self.flights_count += 1
        self.open_flights += 1
        return flight

    cdef int settle(self) except -1:
        """Forgets what is done at the front of the flights."""
        while self.flights_count and self.flights[self.flights_first].done:
            self.flights_first = (self.flights_first + 1) & (self.flights_room - 1)
            self.flights_count -= 1
        return 0

    cdef bint ack_offset(self, uint64_t offset) except -1:
        """Whether this was a delivery that waited for an acknowledgement; it does no more."""
        cdef Flight* flight = self.flight(offset)
        if flight == NULL:
            if offset >= self.next_offset and offset < self.restored_below and offset not in self.acked:
                # Delivered before a restart, acknowledged after it, and not come to again yet.
                if not self.matches(offset):
                    return False
                self.acked.add(offset)
                self.note_ack(offset)
                return True
            return False
        self.give_back(flight)
        flight.done = True
        self.open_flights -= 1
        self.note_ack(offset)
        self.settle()
        return True

    cdef int note_ack(self, uint64_t offset) except -1:
        cdef uint64_t* grown
        self.acknowledged += 1
        self.bus.acknowledged += 1
        if not self.durable:
            return 0
        if self.unwritten_count == self.unwritten_room:
            grown = <uint64_t*>realloc(self.unwritten, (self.unwritten_room * 2 + 16) * sizeof(uint64_t))
            if grown == NULL:
                raise MemoryError
            self.unwritten = grown
            self.unwritten_room = self.unwritten_room * 2 + 16
        self.unwritten[self.unwritten_count] = offset
        self.unwritten_count += 1
        if not self.ack_pending:
            self.ack_pending = True
            self.bus.acking.append(self)
        return 0

    cdef bint matches(self, uint64_t offset) except -1:
        """Whether the message with this offset is one that this subscription delivers."""
        cdef uint64_t segment = self.segment, position = self.position, next_offset = self.next_offset
        cdef uint64_t where
        cdef Segment* found
        cdef bint answer
        self.seek(offset)
        answer = self.next_record(self.bus.log.published_, &found, &where) and (
            <RecordHeader*>(found.base + where)).offset == offset
        self.segment = segment
        self.position = position
        self.next_offset = next_offset
        return answer

    cdef int bury(self, Flight* flight, int64_t now, str reason) except -1:
        """Publishes a message that nobody finished to its dead-letter topic, with the reason in its headers."""
        cdef Bus bus = self.bus
        cdef View view
        cdef Message m
        cdef Segment* segment = bus.segment_at(flight.segment)
        cdef bytes topic, headers, name
        view_record(<RecordHeader*>(segment.base + flight.position), &view)
        topic = bus.log.topic_name(view.record.topic)
        if not topic.startswith(bus.dead_prefix.encode()):
            fields = {}
            if view.headers_len:
                try:
                    fields = json.loads(view.headers[:view.headers_len])
                except ValueError:
                    fields = {}
            fields.update({
                "dead-reason": reason, "dead-topic": topic.decode(errors="replace"),
                "dead-deliveries": flight.deliveries, "dead-subscription": self.id, "dead-offset": flight.offset,
            })
            headers = json.dumps(fields).encode()
            name = bus.dead_prefix.encode() + topic
            memset(&m, 0, sizeof(Message))
            m.topic = bus.topic_id(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
            m.protocol = view.record.protocol
            m.kind = view.record.kind
            m.flags = view.record.flags & ~(FLAG_PARTS | FLAG_CONTROL)
            m.correlation = view.record.correlation
            m.headers = <const uint8_t*>PyBytes_AS_STRING(headers)
            m.headers_len = <uint32_t>PyBytes_GET_SIZE(headers)
            m.parts = view.parts
            m.parts_count = view.parts_count
            m.payload = view.payload
            m.payload_len = view.payload_len
            m.now = now
            rc = bus.publish_message(&m)
            if rc == APPEND_FULL or rc == APPEND_FAILED:
                flight.due = now + self.redelivery_us      # it stays, and is tried again
                return 0
        flight.done = True
        self.open_flights -= 1
        self.dead += 1
        bus.dead += 1
        self.note_ack(flight.offset)
        self.acknowledged -= 1
        bus.acknowledged -= 1
        return 0

    cdef int bury_tag(self, uint64_t tag, int64_t now, str reason) except -1:
        """Gives up on a delivery that its peer can never take."""
        cdef Flight* flight = self.flight(tag - 1)
        if flight != NULL:
            self.give_back(flight)
            self.bury(flight, now, reason)
            self.settle()
        return 0

    cdef int64_t check_due(self, int64_t now) except -2:
        """Buries what is due and had its last delivery, and wakes for the rest; when to look again, or -1."""
        cdef uint32_t i
        cdef Flight* flight
        cdef bint due = False
        cdef int64_t next_due = INT64_MAX
        if self.next_due > now:
            return self.next_due if self.next_due != INT64_MAX else -1
        for i in range(self.flights_count):
            flight = &self.flights[(self.flights_first + i) & (self.flights_room - 1)]
            if flight.done:
                continue
            if flight.due <= now and flight.deliveries >= self.max_deliveries:
                self.give_back(flight)
                self.bury(flight, now, "no acknowledgement")
                if flight.done:
                    continue
            if flight.due <= now:
                due = True
            next_due = min(next_due, flight.due)
        self.next_due = next_due
        self.settle()
        if due:
            self.wake_members()
        return -1 if next_due == INT64_MAX else max(next_due, now + 100_000)

    cdef int wake_members(self) except -1:
        cdef Member member
        cdef Py_ssize_t i, count = len(self.members)
        if count == 0:
            return 0
        self.turn = (self.turn + 1) % count
        for i in range(count):
            member = self.members[(self.turn + i) % count]
            if member.waker is not None and member.credits != 0:
                member.waker.wake()
        return 0

    # --- what survives -------------------------------------------------------------------------------------------------

    cdef uint64_t low_water(self) noexcept:
        """Every matching offset below is acknowledged."""
        cdef uint32_t i
        cdef Flight* flight
        for i in range(self.flights_count):
            flight = &self.flights[(self.flights_first + i) & (self.flights_room - 1)]
            if not flight.done:
                return flight.offset
        return self.next_offset

    cdef int write_state(self, int64_t now) except -1:
        """The whole of it as one control record; 1 where the log had no room."""
        cdef uint64_t floor = self.low_water()
        cdef uint32_t i
        cdef Flight* flight
        acked = {offset for offset in self.acked if offset >= floor}
        attempts = dict(self.attempts) if self.attempts else {}
        for i in range(self.flights_count):
            flight = &self.flights[(self.flights_first + i) & (self.flights_room - 1)]
            if flight.done:
                acked.add(flight.offset)
            elif flight.deliveries > 1:
                attempts[flight.offset] = flight.deliveries
        state = json.dumps({
            "filter": self.filter.decode("utf-8", "surrogateescape"), "exact": self.exact, "owner": self.owner,
            "protocol": self.protocol, "queue": self.queue, "confirm_all": self.confirm_all, "floor": floor,
            "acked": sorted(acked), "attempts": attempts, "max_inflight": self.max_inflight,
            "max_deliveries": self.max_deliveries, "redelivery_us": self.redelivery_us,
            "max_redelivery_us": self.max_redelivery_us, "max_pending": self.max_pending,
        }).encode()
        rc = self.bus.log.append_control(
            CONTROL_SUBSCRIPTION, 0, 0, self.id, 0, NULL, 0, <const uint8_t*>PyBytes_AS_STRING(state),
            PyBytes_GET_SIZE(state), now)
        if rc != APPEND_OK:
            return 1
        self.state_segment = self.bus.log.active.number
        self.unwritten_count = 0
        return 0

    cdef int write_acks(self, int64_t now) except -1:
        """The acknowledgements since the last time as one control record; 1 where the log had no room."""
        cdef uint64_t floor = self.low_water()
        cdef uint64_t* words
        cdef uint32_t i, count = 1
        cdef int rc
        if self.unwritten_count == 0 or self.closed:
            return 0
        words = <uint64_t*>malloc((self.unwritten_count + 1) * sizeof(uint64_t))
        if words == NULL:
            raise MemoryError
        words[0] = floor
        for i in range(self.unwritten_count):
            if self.unwritten[i] >= floor:
                words[count] = self.unwritten[i]
                count += 1
        rc = self.bus.log.append_control(
            CONTROL_ACK, 0, 0, self.id, 0, NULL, 0, <const uint8_t*>words, count * sizeof(uint64_t), now)
        free(words)
        if rc != APPEND_OK:
            return 1
        self.unwritten_count = 0
        return 0

    cdef int attach(self, uint32_t topic) except -1:
        """This subscription delivers this topic from here on."""
        cdef uint64_t* grown
        cdef void** list_
        cdef uint32_t words
        cdef Topic* entry = &self.bus.topics[topic]
        if not self.exact:
            if (topic >> 6) >= self.interest_words:
                words = max((topic >> 6) + 1, self.interest_words * 2)
                grown = <uint64_t*>realloc(self.interest, words * sizeof(uint64_t))
                if grown == NULL:
                    raise MemoryError
                memset(grown + self.interest_words, 0, (words - self.interest_words) * sizeof(uint64_t))
                self.interest = grown
                self.interest_words = words
            if self.interested(topic):
                return 0
            self.interest[topic >> 6] |= <uint64_t>1 << (topic & 63)
        if entry.subscriptions_count == entry.subscriptions_room:
            list_ = <void**>realloc(entry.subscriptions, (entry.subscriptions_room * 2 + 2) * sizeof(void*))
            if list_ == NULL:
                raise MemoryError
            entry.subscriptions = list_
            entry.subscriptions_room = entry.subscriptions_room * 2 + 2
        entry.subscriptions[entry.subscriptions_count] = <void*>self
        entry.subscriptions_count += 1
        return 0

    # --- Python --------------------------------------------------------------------------------------------------------

    def ack(self, uint64_t tag):
        """Acknowledges a delivery by its tag; False where none is waiting for it."""
        cdef bint done = tag > 0 and self.ack_offset(tag - 1)
        self.bus.flush(hr_now_us())
        return done

    def reject(self, uint64_t tag, *, double delay=0, now=None):
        """Has a delivery made again after `delay` seconds, within its attempts; False where none is waiting."""
        cdef int64_t at = hr_now_us() if now is None else now
        cdef Flight* flight = self.flight(tag - 1) if tag else NULL
        if flight == NULL:
            return False
        self.give_back(flight)
        flight.due = at + <int64_t>(delay * 1e6)
        self.next_due = min(self.next_due, flight.due)
        self.check_due(at)
        self.bus.flush(at)
        return True

    @property
    def inflight(self):
        return self.open_flights

    @property
    def member_count(self):
        return len(self.members)


cdef class Bus(Keeper):
    """Topics and subscriptions on one log. `schedule`, if set, is called when dispatch() has something to do."""

    def __cinit__(self):
        self.topics_room = 1024
        self.topics = <Topic*>calloc(self.topics_room, sizeof(Topic))
        if self.topics == NULL:
            raise MemoryError

    def __init__(self, Log log, *, uint32_t max_inflight=1024, uint32_t max_deliveries=5, double redelivery_delay=2.0,
                 double max_redelivery_delay=300.0, str dead_letter_prefix="dead.", double durable_grace=3600.0,
                 uint64_t max_pending=0, uint32_t max_topics=1_000_000, bint hold_for_subscriptions=False):
        self.log = log
        self.schedule = None
        self.subscriptions = {}
        self.by_filter = {}
        self.filters = Trie()
        self.names = TopicTree()
        self.acking = []
        self.safe_waiters = []
        self.next_id = 1
        self.max_topics = max_topics
        self.configure(
            max_inflight=max_inflight, max_deliveries=max_deliveries, redelivery_delay=redelivery_delay,
            max_redelivery_delay=max_redelivery_delay, dead_letter_prefix=dead_letter_prefix,
            durable_grace=durable_grace, max_pending=max_pending, hold_for_subscriptions=hold_for_subscriptions)
        self._restore()
        log.keeper = self

    def configure(self, *, uint32_t max_inflight, uint32_t max_deliveries, double redelivery_delay,
                  double max_redelivery_delay, str dead_letter_prefix, double durable_grace, uint64_t max_pending,
                  bint hold_for_subscriptions=False):
        """Sets what subscriptions made from now on begin with."""
        self.defaults = {
            "max_inflight": max_inflight, "max_deliveries": max(1, max_deliveries),
            "redelivery_us": int(redelivery_delay * 1e6), "max_redelivery_us": int(max_redelivery_delay * 1e6),
            "max_pending": max_pending,
        }
        self.dead_prefix = dead_letter_prefix
        self.durable_grace = durable_grace
        self.hold_for_subscriptions = hold_for_subscriptions

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self.topics_room):
            free(self.topics[i].subscriptions)
        free(self.topics)
        free(self.dirty)

    # --- topics and the index --------------------------------------------------------------------------------------------

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
        self.topics[id].known = True
        self.names.add(name, id)
        ids = []
        self.filters.match(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name), found_topic, <void*>ids)
        for filter_id in ids:
            for subscription in self.by_filter.get(filter_id, ()):
                (<Subscription>subscription).attach(id)
        return 0

    cdef uint32_t topic_id(self, const char* text, Py_ssize_t n) except 0:
        """The id of a topic, known to all filters; made if it is new."""
        cdef uint32_t id = self.log.find_topic(text, n)
        if id and id < self.topics_room and self.topics[id].known:
            return id
        if id == 0:
            if memcount(text, n, b".") >= TOPIC_WORDS:
                raise BusError(f"a topic has {TOPIC_WORDS} words at most")
            if self.log.names_count > self.max_topics:
                raise BusError(f"too many topics: the limit is {self.max_topics}")
            id = self.log.make_topic(text, n)
            if id == 0:
                raise MemoryError
        self.know_topic(id)
        return id

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

    cdef Index* index_of(self, Segment* segment) noexcept nogil:
        if segment.index == NULL:
            segment.index = calloc(1, sizeof(Index))
            if segment.index != NULL:
                (<Index*>segment.index).number = segment.number
        return <Index*>segment.index

    cdef int put_position(self, Message* m) noexcept nogil:
        """Notes where a message stands, in its topic's list for the open segment."""
        cdef Topic* topic = &self.topics[m.topic]
        cdef Positions* here
        cdef Positions** lists
        cdef Index* index
        cdef uint32_t* list_
        if topic.segment != m.segment.number:
            if self.open_number != m.segment.number:
                if self.open_number and self.seal_index(self.open_number) != 0:
                    return -1
                self.open_number = m.segment.number
            index = self.index_of(m.segment)
            here = <Positions*>calloc(1, sizeof(Positions))
            if index == NULL or here == NULL:
                free(here)
                return -1
            if index.topics == index.room:
                lists = <Positions**>realloc(index.open_lists, (index.room * 2 + 16) * sizeof(Positions*))
                if lists == NULL:
                    free(here)
                    return -1
                index.open_lists = lists
                index.room = index.room * 2 + 16
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
        here.list[here.count] = <uint32_t>(m.position >> 3)
        here.count += 1
        return 0

    cdef int seal_index(self, uint64_t number) noexcept nogil:
        """Packs the lists of a segment that takes no more messages into one read-only file without a name, which the
        system may drop from memory and read again."""
        cdef Segment* segment = self.segment_at(number)
        cdef Index* index
        cdef uint32_t* words
        cdef size_t total
        cdef uint32_t i, at
        if segment == NULL or segment.number != number or segment.index == NULL:
            return 0
        index = <Index*>segment.index
        if index.open_lists == NULL:
            return 0
        qsort(index.open_lists, index.topics, sizeof(Positions*), by_topic)
        total = 3 * <size_t>index.topics
        for i in range(index.topics):
            total += index.open_lists[i].count
        words = <uint32_t*>malloc(total * sizeof(uint32_t))
        if words == NULL:
            return -1
        at = 3 * index.topics
        for i in range(index.topics):
            words[3 * i] = index.open_lists[i].topic
            words[3 * i + 1] = at
            words[3 * i + 2] = index.open_lists[i].count
            memcpy(words + at, index.open_lists[i].list, index.open_lists[i].count * sizeof(uint32_t))
            at += index.open_lists[i].count
            free(index.open_lists[i].list)
            free(index.open_lists[i])
        free(index.open_lists)
        index.open_lists = NULL
        index.mapped_size = total * sizeof(uint32_t)
        index.mapped = <const uint32_t*>hr_map_unnamed(self.log.directory(), words, index.mapped_size)
        if index.mapped == NULL:
            index.kept = words
            index.mapped = words
        else:
            free(words)
        return 0

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
        cdef int rc = self.log.append_message(m)
        if rc != APPEND_OK:
            return rc
        topic = &self.topics[m.topic]
        if self.put_position(m) != 0:
            return APPEND_FAILED
        if topic.subscriptions_count and not topic.dirty:
            self.mark_dirty(m.topic)
        self.published_count[m.protocol & (PROTOCOLS - 1)] += 1
        self.published_bytes[m.protocol & (PROTOCOLS - 1)] += m.payload_len
        return APPEND_OK

    cdef int flush(self, int64_t now) except -1:
        """Ends a batch: writes the acknowledgements, makes everything readable, and has dispatch() called."""
        cdef Subscription subscription
        cdef list waiting
        if self.acking:
            waiting = self.acking
            self.acking = []
            for subscription in waiting:
                subscription.ack_pending = False
                if subscription.write_acks(now):
                    subscription.ack_pending = True
                    self.acking.append(subscription)
        self.log.make_readable()
        if self.dirty_count and not self.scheduled and self.schedule is not None:
            self.scheduled = True
            self.schedule()
        return 0

    def dispatch(self):
        """Wakes whoever subscribed to a topic that was published to; to be called once per loop turn."""
        cdef uint32_t i, k, count = self.dirty_count
        cdef Topic* topic
        cdef list woken = []
        self.scheduled = False
        for i in range(count):
            topic = &self.topics[self.dirty[i]]
            topic.dirty = False
            for k in range(topic.subscriptions_count):
                woken.append(<Subscription>topic.subscriptions[k])
        self.dirty_count = 0
        for subscription in woken:
            (<Subscription>subscription).wake_members()

    def on_safe(self):
        """Wakes those who met the log's safe end; to be called when it moved."""
        waiting = self.safe_waiters
        self.safe_waiters = []
        for subscription in waiting:
            (<Subscription>subscription).waits_safe = False
            (<Subscription>subscription).wake_members()

    cdef uint64_t end_for(self, Subscription subscription) noexcept nogil:
        """How far a cursor may go: at-least-once delivery follows the safe end."""
        return self.log.safe_lsn() if subscription.at_least_once else self.log.published_

    def publish(self, topic, payload, *, headers=b"", parts=(), uint8_t protocol=0, uint8_t kind=0, bint confirmed=False,
                uint64_t correlation=0, now=None):
        """Publishes one message; its offset."""
        cdef Message m
        cdef bytes name = topic.encode() if isinstance(topic, str) else topic
        cdef const uint8_t[::1] body = payload
        cdef const uint8_t[::1] head = headers
        cdef uint32_t[::1] sizes
        memset(&m, 0, sizeof(Message))
        m.topic = self.topic_id(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
        m.payload = &body[0] if body.shape[0] else NULL
        m.payload_len = body.shape[0]
        m.headers = &head[0] if head.shape[0] else NULL
        m.headers_len = <uint32_t>head.shape[0]
        m.protocol = protocol
        m.kind = kind
        m.flags = FLAG_CONFIRMED if confirmed else 0
        m.correlation = correlation
        m.now = hr_now_us() if now is None else now
        if parts:
            from array import array
            sizes = array("I", parts)
            m.parts = &sizes[0]
            m.parts_count = <uint32_t>sizes.shape[0]
        self.log._raise(self.publish_message(&m), body.shape[0])
        self.flush(m.now)
        return m.offset

    def publish_many(self, topic, payloads, Py_ssize_t size, *, uint8_t protocol=0, now=None):
        """Publishes `payloads`, cut into messages of `size` bytes, in one call; how many were taken before the log was full."""
        cdef Message m
        cdef bytes name = topic.encode() if isinstance(topic, str) else topic
        cdef const uint8_t[::1] data = payloads
        cdef Py_ssize_t at = 0, end = data.shape[0], count = 0
        cdef int rc = APPEND_OK
        if size <= 0 or end % size:
            raise ValueError("the payloads' length must be a multiple of size")
        memset(&m, 0, sizeof(Message))
        m.topic = self.topic_id(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
        m.payload_len = size
        m.protocol = protocol
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
                  bint confirm_all=False, str owner="", uint8_t protocol=0, start=None, now=None, **options):
        """A new subscription, from the end of the log or from the offset `start`.

        `exact`: `filter` is one topic's name, in which `*` and `#` mean nothing. `durable` (needs at_least_once): it and
        what it acknowledged survive a restart. `queue`: members share it. `confirm_all`: every message is to be
        acknowledged, however it was published. Options: max_inflight, max_deliveries, redelivery_us,
        max_redelivery_us, max_pending.
        """
        cdef bytes text = filter.encode() if isinstance(filter, str) else filter
        cdef int64_t at = hr_now_us() if now is None else now
        cdef Subscription subscription
        if durable and not at_least_once:
            raise ValueError("a durable subscription is an at-least-once one")
        if exact:
            if not text:
                raise ValueError("a topic has at least one character")
        else:
            check_filter(text)
        unknown = set(options) - set(self.defaults)
        if unknown:
            raise TypeError(f"unknown option {', '.join(sorted(unknown))}")
        self._reserve_ids(at)
        subscription = self._make(
            self.next_id, text, exact, at_least_once, durable, queue, confirm_all, owner, protocol,
            {**self.defaults, **options})
        self.next_id += 1
        subscription.alone_since = at
        if start is None:
            subscription.seek_end()
        else:
            subscription.seek(start)
        if durable and subscription.write_state(at):
            self.drop(subscription, at, False)
            raise LogFull(self.log.full or "the next segment is still being prepared")
        self.flush(at)
        return subscription

    cdef int _reserve_ids(self, int64_t now) except -1:
        """No id is ever given out twice while the log lives: it knows a bound, moved a block at a time."""
        if self.next_id < self.ids_written:
            return 0
        if self.log.append_control(CONTROL_IDS, 0, 0, self.next_id + ID_BLOCK, 0, NULL, 0, NULL, 0, now) != APPEND_OK:
            raise LogFull(self.log.full or "the next segment is still being prepared")
        self.ids_written = self.next_id + ID_BLOCK
        self.ids_segment = self.log.active.number
        return 0

    def _make(self, uint64_t id, bytes text, bint exact, bint at_least_once, bint durable, bint queue, bint confirm_all,
              str owner, uint8_t protocol, dict options):
        cdef Subscription subscription = Subscription()
        subscription.bus = self
        subscription.id = id
        subscription.filter = text
        subscription.exact = exact
        subscription.at_least_once = at_least_once
        subscription.durable = durable
        subscription.queue = queue
        subscription.confirm_all = confirm_all
        subscription.owner = owner
        subscription.protocol = protocol & (PROTOCOLS - 1)
        subscription.max_inflight = options["max_inflight"]
        subscription.max_deliveries = options["max_deliveries"]
        subscription.redelivery_us = options["redelivery_us"]
        subscription.max_redelivery_us = options["max_redelivery_us"]
        subscription.max_pending = options["max_pending"]
        subscription.next_due = INT64_MAX
        subscription.members = []
        subscription.acked = set()
        if exact:
            subscription.topic = self.topic_id(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))
            subscription.attach(subscription.topic)
        else:
            subscription.filter_id = self.filters.add(text)
            self.by_filter.setdefault(subscription.filter_id, []).append(subscription)
            ids = []
            self.names.visit(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text), found_topic, <void*>ids)
            for topic in ids:
                subscription.attach(topic)
        self.subscriptions[id] = subscription
        return subscription

    cdef Subscription find(self, uint64_t id):
        return self.subscriptions.get(id)

    cdef int drop(self, Subscription subscription, int64_t now, bint write) except -1:
        """Ends a subscription; `write`: the log forgets it too."""
        cdef uint32_t i, k
        cdef Topic* topic
        cdef list topics
        if subscription.closed:
            return 0
        subscription.closed = True
        for member in subscription.members:
            (<Member>member).gone = True
        subscription.members = []
        if subscription.exact:
            topics = [subscription.topic]
        else:
            same = self.by_filter[subscription.filter_id]
            same.remove(subscription)
            if not same:
                del self.by_filter[subscription.filter_id]
            self.filters.remove(subscription.filter_id)
            topics = [64 * i + k for i in range(subscription.interest_words) for k in range(64)
                      if (subscription.interest[i] >> k) & 1]
        for id in topics:
            topic = &self.topics[<uint32_t>id]
            for i in range(topic.subscriptions_count):
                if topic.subscriptions[i] == <void*>subscription:
                    topic.subscriptions_count -= 1
                    memmove(&topic.subscriptions[i], &topic.subscriptions[i + 1],
                            (topic.subscriptions_count - i) * sizeof(void*))
                    break
        if subscription.waits_safe:
            self.safe_waiters.remove(subscription)
        if subscription.ack_pending:
            self.acking.remove(subscription)
        if write and subscription.durable:
            self.log.append_control(CONTROL_UNSUBSCRIBE, 0, 0, subscription.id, 0, NULL, 0, NULL, 0, now)
        del self.subscriptions[subscription.id]
        return 0

    def unsubscribe(self, Subscription subscription, now=None):
        """Ends a subscription for good."""
        cdef int64_t at = hr_now_us() if now is None else now
        self.drop(subscription, at, True)
        self.flush(at)

    cdef int write_attempt(self, Subscription subscription, uint64_t offset, uint64_t deliveries, int64_t now) except -1:
        """So that a restart does not give a message its attempts back. Without room it is only remembered."""
        cdef uint64_t pair[2]
        pair[0] = offset
        pair[1] = deliveries
        self.log.append_control(CONTROL_ATTEMPT, 0, 0, subscription.id, 0, NULL, 0, <const uint8_t*>pair, 16, now)
        return 0

    def tick(self, now=None):
        """Redeliveries, dead letters, subscriptions that nobody came back to; when to call it again (microseconds), or None."""
        cdef int64_t at = hr_now_us() if now is None else now
        cdef int64_t due, soonest = INT64_MAX
        cdef Subscription subscription
        for subscription in list(self.subscriptions.values()):
            if not subscription.at_least_once:
                continue
            due = subscription.check_due(at)
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
        return None if soonest == INT64_MAX else soonest

    # --- retention and restart -------------------------------------------------------------------------------------------

    cdef int carry(self, Segment* segment, int64_t now) except -1:
        """Copies what is still needed from a segment into the newest one; 0 where it must stay for now."""
        cdef Subscription subscription
        cdef Flight* flight
        cdef uint32_t i
        cdef dict wanted = {}
        if self.hold_for_subscriptions:
            for subscription in self.subscriptions.values():
                if subscription.durable and subscription.segment <= segment.number:
                    return 0
        for subscription in self.subscriptions.values():
            for i in range(subscription.flights_count):
                flight = &subscription.flights[(subscription.flights_first + i) & (subscription.flights_room - 1)]
                if flight.segment == segment.number and not flight.done:
                    wanted.setdefault(flight.position, []).append(subscription.id)
        for position, ids in wanted.items():
            if self._carry_message(segment, position, ids, now) != 0:
                return 0
        for subscription in self.subscriptions.values():
            if subscription.durable and subscription.state_segment <= segment.number:
                if subscription.write_state(now):
                    return 0
        if self.ids_written and self.ids_segment <= segment.number:
            if self.log.append_control(CONTROL_IDS, 0, 0, self.ids_written, 0, NULL, 0, NULL, 0, now) != APPEND_OK:
                return 0
            self.ids_segment = self.log.active.number
        return 1

    cdef int _carry_message(self, Segment* segment, uint64_t position, list ids, int64_t now) except -1:
        cdef RecordHeader* record = <RecordHeader*>(segment.base + position)
        cdef Subscription subscription
        cdef Flight* flight
        cdef uint64_t offset = record.offset
        cdef uint64_t copy
        cdef bytes owners = b"".join([(<uint64_t>id).to_bytes(8, "little") for id in ids])
        cdef Log log = self.log
        if log.write_name(record.topic, now) != APPEND_OK:
            return 1
        if log.append_control(CONTROL_CARRY, record.topic, 0, offset, 0, <const uint8_t*>PyBytes_AS_STRING(owners),
                              <uint32_t>PyBytes_GET_SIZE(owners), <const uint8_t*>record, record.length, now) != APPEND_OK:
            return 1
        copy = log.position - padded(RECORD_HEADER + PyBytes_GET_SIZE(owners) + record.length) + (
            RECORD_HEADER + PyBytes_GET_SIZE(owners))
        for id in ids:
            subscription = self.subscriptions[id]
            flight = subscription.flight(offset)
            flight.segment = log.active.number
            flight.position = copy
        self.carried_count += 1
        return 0

    cdef int retired(self, Segment* segment) except -1:
        cdef Subscription subscription
        if self.log.open:
            for subscription in self.subscriptions.values():
                if subscription.segment <= segment.number:
                    subscription.overtaken(segment)
        if self.open_number == segment.number:
            self.open_number = 0
        if segment.index != NULL:
            free_index(<Index*>segment.index)
            segment.index = NULL
        return 0

    cdef int _restore(self) except -1:
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
        cdef dict carried = {}
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
                    m.topic = record.topic
                    m.segment = segment
                    m.position = position
                    if self.put_position(&m) != 0:
                        raise MemoryError
                elif record.kind >= CONTROL_SUBSCRIPTION:
                    view_record(record, &view)
                    self._replay(&view, segment.number, position, states, carried)
                position += padded(record.length)
        for sub_id in sorted(states):
            self._revive(sub_id, states[sub_id], carried)
        if self.ids_written:
            self.next_id = self.ids_written
        return 0

    cdef int _replay(self, View* view, uint64_t number, uint64_t position, dict states, dict carried) except -1:
        cdef const RecordHeader* record = view.record
        cdef const uint64_t* words = <const uint64_t*>view.payload
        cdef uint64_t count = view.payload_len // 8
        cdef uint64_t i
        id = record.correlation
        if record.kind == CONTROL_SUBSCRIPTION:
            state = json.loads(view.payload[:view.payload_len])
            state["segment"] = number
            state["acked"] = set(state["acked"])
            state["attempts"] = {int(offset): n for offset, n in state["attempts"].items()}
            states[id] = state
        elif record.kind == CONTROL_UNSUBSCRIBE:
            states.pop(id, None)
        elif record.kind == CONTROL_ACK and id in states:
            state = states[id]
            state["floor"] = max(state["floor"], words[0])
            if count > 1:
                state["acked"].update([words[i] for i in range(1, count)])
            if len(state["acked"]) > 64:
                state["acked"] = {offset for offset in state["acked"] if offset >= state["floor"]}
        elif record.kind == CONTROL_ATTEMPT and id in states:
            states[id]["attempts"][words[0]] = words[1]
        elif record.kind == CONTROL_CARRY:
            for i in range(view.headers_len // 8):
                carried.setdefault((<const uint64_t*>view.headers)[i], {})[record.correlation] = (
                    number, position + RECORD_HEADER + view.headers_len)
        elif record.kind == CONTROL_IDS:
            self.ids_written = max(self.ids_written, record.correlation)
            self.ids_segment = number
        return 0

    cdef int _revive(self, uint64_t id, dict state, dict carried) except -1:
        """A durable subscription as it was: everything that it did not acknowledge is delivered again."""
        cdef Subscription subscription
        cdef Flight* flight
        cdef uint64_t floor = state["floor"]
        subscription = self._make(
            id, state["filter"].encode("utf-8", "surrogateescape"), state["exact"], True, True, state["queue"],
            state["confirm_all"], state["owner"], state["protocol"], state)
        subscription.state_segment = state["segment"]
        subscription.restored_below = self.log.next_offset
        subscription.acked = {offset for offset in state["acked"] if offset >= floor}
        subscription.attempts = {offset: n for offset, n in state["attempts"].items() if offset >= floor}
        subscription.alone_since = hr_now_us()
        subscription.seek(floor)
        for offset, (number, position) in sorted(carried.get(id, {}).items()):
            if floor <= offset < subscription.next_offset and offset not in subscription.acked:
                flight = subscription.add_flight(offset)
                flight.segment = number
                flight.position = position
                flight.deliveries = subscription.attempts.pop(offset, 1)
                flight.due = 0
                subscription.next_due = 0
        return 0

    def close(self):
        """Lets go of the log; the log itself is closed by whoever opened it."""
        cdef Py_ssize_t i
        self.flush(hr_now_us())
        self.log.keeper = Keeper()
        for i in range(self.log.segments_count):
            if self.log.segments_[i].index != NULL:
                free_index(<Index*>self.log.segments_[i].index)
                self.log.segments_[i].index = NULL
        self.open_number = 0

    def stats(self):
        """Counters since the start, and how much there is of everything."""
        cdef Subscription subscription
        inflight = durable = 0
        for subscription in self.subscriptions.values():
            inflight += subscription.open_flights
            durable += subscription.durable
        return {
            "topics": self.log.names_count - 1, "subscriptions": len(self.subscriptions), "durable": durable,
            "inflight": inflight, "acknowledged": self.acknowledged, "redelivered": self.redelivered, "dead": self.dead,
            "lost": self.lost, "expired": self.expired, "carried": self.carried_count,
            "published": {name: self.published_count[i] for i, name in enumerate(PROTOCOL_NAMES) if i},
            "published_bytes": {name: self.published_bytes[i] for i, name in enumerate(PROTOCOL_NAMES) if i},
            "delivered": {name: self.delivered_count[i] for i, name in enumerate(PROTOCOL_NAMES) if i},
        }
