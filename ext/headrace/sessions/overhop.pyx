"""The Overhop session: one peer's state machine on the bus. It owns no socket, no clock and no task.

One read event is one call of receive(): every whole envelope is handled and answered in order into one buffer. A job goes
from the peer's bytes into the log with one copy, and from there into a push, without a Python object.

What may be said, and when (overhop, Message Order Constraints; all else is a violation, which closes):

    state           may say                                        becomes
    anonymous       HELLO                                          greeted
    greeted         REGISTER (before IDENT's deadline, if asked)   worker
    worker          everything but these two                       worker

An answer that promises something (a job is in the log, a job is done, a queue is there) leaves when that is safe: all
answers of a read event from the first such one on wait behind one gate for what that event wrote.
"""

import resource
import sys
import uuid

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from headrace.bus cimport (
    ACTIVE, OVERHOP, STATUSES, TIMING_BYTES, UNKNOWN, WAITING, Bus, Delivery, Flight, Member, Subscription, Timing,
    read_timing, write_timing,
)
from headrace.log cimport (
    APPEND_OK, APPEND_TOO_LARGE, FLAG_CONFIRMED, FLAG_MSGPACK, FLAG_TIMED, View as RecordView,
)
from headrace.sessions.logged cimport LoggedSession
from headrace.sessions.queues cimport Queue, Queues
from headrace.sessions.rights cimport Keyring, Rights
from headrace.wire.bytes cimport View
from headrace.wire.overhop cimport (
    ADDQUEUE, CREDIT, DELIVER, DONE, ENDED, ENQUEUE, ERR, EXTEND, FAIL, GQUEUE, HELLO, HI, IDENT, JOB, LEAST_LIMIT, LQUEUES,
    LSJOB, MOST_LIMIT, OK, PAUSE, PING, PONG, QSTATS, REGISTER, RESUME, RMJOB, RMQUEUE, STATUS, SUBSCRIBE, TIME_CHARS, UNSUBSCRIBE,
    USUAL_LIMIT, Envelope, as_bin, as_int, as_text, bin_size, find_field, frame_size, int_size, is_nil, next_frame,
    open_frame, pack, put_bin, put_int, put_text, read_envelope, read_time, read_uuid, text_size, write_time, write_uuid,
)

from headrace import __version__
from headrace.bus import STATUS_NAMES
from headrace.errors import BusError, LogError
from headrace.limits import OVERHOP_LISTED_JOBS, OVERHOP_PAGE_JOBS, OVERHOP_RETRY_MS, OVERHOP_SUBSCRIPTIONS
from headrace.sessions.queues import BadQueueName, DuplicateQueue, TooManyQueues, check_name
from headrace.wire.overhop import Raw, time_text, unpack

cdef extern from "platform.h":
    int64_t hr_now_us() noexcept

# What the messages of on_rarer() may have in their payload; the rest is never looked at.
KNOWN_FIELDS = (b"q", b"credits", b"sid", b"name", b"config", b"jid", b"status", b"page", b"page_size")

cdef enum:
    MOST_FIELD = 65536          # bytes of a field that is a map or an array: objects take many times as much
    ANONYMOUS = 0
    GREETED = 1
    WORKER = 2
    SHOWN_CHARS = 100           # of a peer's text in an error's
    PAGE_JOBS = 15              # of LSJOB, if it does not say
    JID_ROOM = 255 + 1 + 36     # the longest name of a queue, a colon and a UUID

cdef int64_t MOST_CREDITS = ((<int64_t>1) << 32) - 1
cdef int64_t LAST_TIME = 253402300799999999        # of the year 9999

# What each state may say. The extension's three are asked about separately: they can be turned off.
cdef dict ORDER = {
    ANONYMOUS: frozenset({HELLO}),
    GREETED: frozenset({REGISTER}),
    WORKER: frozenset({
        PING, GQUEUE, LQUEUES, SUBSCRIBE, UNSUBSCRIBE, CREDIT, ADDQUEUE, STATUS, RMQUEUE, PAUSE, RESUME, ENQUEUE, JOB, RMJOB,
        LSJOB, QSTATS,
    }),
}
cdef frozenset EXTENSION = frozenset({DONE, FAIL, EXTEND})
cdef dict EXPECTED = {
    ANONYMOUS: "the first message is HELLO, not type", GREETED: "after HELLO comes REGISTER, not type",
    WORKER: "a worker does not send type",
}

cdef View ZERO
ZERO.data = <const uint8_t*>b"0"
ZERO.size = 1


class Refused(Exception):
    """An ERR that leaves the connection open."""

    def __init__(self, code, text):
        super().__init__(code, text)
        self.code = code
        self.text = text


class Violation(Exception):
    """An ERR that closes the connection: fields that are not as their message has them."""


cdef dict known_fields(const Envelope* envelope):
    """The fields of a payload that some message has. What is large and would become many objects is none of them."""
    cdef View value
    cdef bytes name
    cdef dict found = {}
    for name in KNOWN_FIELDS:
        if find_field(envelope, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name), &value):
            # maps and arrays: 80 to 9f, dc to df
            if value.size > MOST_FIELD and (0x80 <= value.data[0] <= 0x9f or 0xdc <= value.data[0] <= 0xdf):
                found[name.decode()] = ...
            else:
                found[name.decode()] = unpack(value.data[:value.size])
    return found


def field(payload, name, kind, *, required=True):
    """A field of a payload, which has to be of this type; None where it may be missing, or nil, and is."""
    value = payload.get(name)
    if value is None and not required:
        return None
    if type(value) is not kind:
        raise Violation(f"{name} is missing or not of its type")
    return value


cdef class Seat:
    pass


cdef class Overhop:
    def __cinit__(self, Queues queues not None, Keyring keys not None, *, str key="", uint32_t limit=USUAL_LIMIT,
                  double unhelloed=10, double unregistered=10, double ident=2, double block_timeout=5, bint deliver=True,
                  now=None):
        if not LEAST_LIMIT <= limit <= MOST_LIMIT:
            raise ValueError(f"the limit must be from {LEAST_LIMIT} to {MOST_LIMIT}")
        self.bus = queues.bus
        self.queues = queues
        self.keys = keys
        self.key = key
        self.limit = limit
        self.unhelloed_us = <int64_t>(unhelloed * 1e6)
        self.unregistered_us = <int64_t>(unregistered * 1e6)
        self.ident_us = <int64_t>(ident * 1e6)
        self.block_timeout_us = <int64_t>(block_timeout * 1e6)
        self.deliver = deliver
        self.started = hr_now_us() if now is None else now

    def session(self):
        """A session for one new connection."""
        return OverhopSession(self)

    def counters(self):
        """All that was counted since the start, by name."""
        return self.counts

    @property
    def cadence_us(self):
        """How often the purge looks at a connection."""
        return min(self.unhelloed_us, self.unregistered_us, self.ident_us)

    cdef Rights rights(self):
        """What peers may do; None: nothing, the key is not there."""
        if self.rights_ is None or self.rights_.revoked or self.rights_.name != self.key:
            self.rights_ = self.keys.named(self.key)
        return self.rights_

    cdef bint may(self, bint publish, Queue queue) except -1:
        cdef Rights rights
        if not self.key:
            return True
        rights = self.rights()
        if rights is None:
            return False
        if publish:
            return rights.may_publish(
                queue.topic, PyBytes_AS_STRING(queue.topic_name), PyBytes_GET_SIZE(queue.topic_name))
        return rights.may_subscribe(queue.topic, PyBytes_AS_STRING(queue.topic_name), PyBytes_GET_SIZE(queue.topic_name))

    cdef bint may_add(self, str name) except -1:
        """Whether peers may make a queue of this name; BadQueueName if nobody may."""
        cdef Rights rights
        check_name(name)
        if not self.key:
            return True
        rights = self.rights()
        return rights is not None and rights.publishes(self.queues.topic_for(name))


cdef class OverhopSession(LoggedSession):
    def __cinit__(self, Overhop shared not None):
        self.shared = shared
        self.bus = shared.bus
        self.seats = []
        self.by_sid = {}
        shared.anonymous += 1
        self.counted = True
        self.message.protocol = OVERHOP

    cdef Py_ssize_t receive(self, const uint8_t* data, Py_ssize_t n, int64_t now) except -1:
        cdef Py_ssize_t at = 0, used = 0, wanted = 0, bad_at = 0
        cdef View frame
        cdef Envelope envelope
        cdef int found
        if not self.bus.log.open:       # the gateway is ending
            self.closing = True
            return n
        if self.began == 0:
            self.began = self.checked = now
        while not self.closing:
            found = next_frame(data + at, n - at, self.shared.limit, &frame, &used, &wanted)
            if found == 0:
                self.wanted = wanted
                break
            if found < 0 or read_envelope(frame.data, frame.size, &envelope, &bad_at) != 0:
                self.shared.counts.bad_frames += 1
                self.closing = True
                break
            if self.out.size >= self.high_water:
                self.blocked = self.waits_room = True
                break
            self.on_envelope(&envelope, now)
            if self.blocked:
                break                   # this one is not done: it comes again
            at += used
        self.keep_promises(now)
        if self.hungry and not self.closing and self.out.size < self.high_water:
            self.more = False
            self.deliver(now, self.high_water - self.out.size)
            if self.more:
                self.wake()
        self.bus.flush(now)
        return n if self.closing else at

    cdef int on_envelope(self, Envelope* envelope, int64_t now) except -1:
        if self.state == WORKER:
            if envelope.type == ENQUEUE:
                return self.on_enqueue(envelope, now)
            if self.shared.deliver and (envelope.type == DONE or envelope.type == FAIL or envelope.type == EXTEND):
                return self.on_end_of_job(envelope, now)
            if envelope.type == CREDIT:
                return self.on_credit(envelope, now)
        if envelope.type not in <frozenset>ORDER[self.state]:
            return self.violation(&envelope.rid, f"{EXPECTED[self.state]} {envelope.type}")
        return self.on_rarer(envelope, now)

    # --- the handshake -------------------------------------------------------------------------------------------------

    cdef int on_register(self, Envelope* envelope, int64_t now) except -1:
        if self.ident_deadline and now > self.ident_deadline:
            self.shared.counts.timeouts += 1
            return self.error(&envelope.rid, "REGISTER_TIMEOUT", "REGISTER came after the deadline that IDENT gave", True)
        if envelope.entries:
            return self.violation(&envelope.rid, "the payload of REGISTER is empty")
        self.state = WORKER
        self.wid = str(uuid.uuid4())
        self.shared.anonymous -= 1
        self.shared.workers += 1
        self.shared.counts.registered += 1
        self.name_origin(self.shared.key or "overhop")
        return self.answer(&envelope.rid, OK, pack({"wid": self.wid}))

    # --- jobs ----------------------------------------------------------------------------------------------------------

    cdef Queue queue_named(self, const View* name):
        """The queue of this name, or None. Peers tend to name the same one again."""
        cdef Queue queue = self.last_queue
        if (
            queue is not None and not queue.gone and PyBytes_GET_SIZE(queue.label) == name.size
            and memcmp(PyBytes_AS_STRING(queue.label), name.data, name.size) == 0
        ):
            return queue
        queue = self.shared.queues.find(name.data, name.size)
        if queue is not None:
            self.last_queue = queue
        return queue

    cdef int on_enqueue(self, Envelope* envelope, int64_t now) except -1:
        cdef View value, name, payload, text
        cdef Timing timing
        cdef char timing_text[TIMING_BYTES]
        cdef int64_t attempts = 0, retry_ms = 0
        cdef bint has_attempts = False, has_retry = False, has_time = False, has_payload
        cdef Queue queue
        cdef uint8_t id[16]
        cdef uint8_t* p
        cdef Py_ssize_t size
        cdef int rc
        memset(&timing, 0, sizeof(Timing))
        if not find_field(envelope, "q", 1, &value) or not as_text(&value, &name):
            return self.violation(&envelope.rid, "ENQUEUE has a string q")
        has_payload = find_field(envelope, "job_payload", 11, &payload)
        if envelope.entries > 1 + has_payload:
            if find_field(envelope, "scheduled_at", 12, &value) and not is_nil(&value):
                has_time = True
                if not as_text(&value, &text) or not read_time(text.data, text.size, &timing.not_before):
                    return self.violation(&envelope.rid, "scheduled_at is a time as RFC 3339 has it")
            if find_field(envelope, "max_attempts", 12, &value) and not is_nil(&value):
                has_attempts = True
                if not as_int(&value, &attempts):
                    return self.violation(&envelope.rid, "max_attempts is an int")
            if find_field(envelope, "retry_interval_ms", 17, &value) and not is_nil(&value):
                has_retry = True
                if not as_int(&value, &retry_ms):
                    return self.violation(&envelope.rid, "retry_interval_ms is an int")
        queue = self.queue_named(&name)
        if queue is None:
            return self.error(&envelope.rid, "QUEUE_NOT_FOUND", f"there is no queue {shown(&name)}", False)
        if self.shared.key and not self.shared.may(True, queue):
            return self.error(&envelope.rid, "NOT_ALLOWED", f"no right to put jobs into {queue.name!r}", False)
        if has_attempts:
            if attempts < 1 or attempts > MOST_CREDITS:
                return self.error(&envelope.rid, "INVALID_MAX_ATTEMPTS", "max_attempts is 1 or more", False)
            if not queue.allow_job_overrides:
                return self.error(
                    &envelope.rid, "INVALID_MAX_ATTEMPTS", f"{queue.name!r} lets no job have its own max_attempts", False)
            timing.attempts = <uint32_t>attempts
        if has_retry:
            if retry_ms < 1 or retry_ms > <int64_t>OVERHOP_RETRY_MS:
                return self.error(
                    &envelope.rid, "INVALID_RETRY_INTERVAL_MS", f"retry_interval_ms is from 1 to {OVERHOP_RETRY_MS}", False)
            if not queue.allow_job_overrides:
                return self.error(
                    &envelope.rid, "INVALID_RETRY_INTERVAL_MS", f"{queue.name!r} lets no job have its own retry interval",
                    False)
            timing.retry_us = retry_ms * 1000
        self.message.flags = FLAG_CONFIRMED
        self.message.headers_len = 0
        if has_time or has_attempts or has_retry:
            self.message.headers_len = write_timing(timing_text, &timing)
            self.message.headers = <const uint8_t*>timing_text
            if self.message.headers_len:
                self.message.flags |= FLAG_TIMED
        if not has_payload:
            payload.data = <const uint8_t*>b"\xc0"
            payload.size = 1
        if as_bin(&payload, &value):
            self.message.payload = value.data
            self.message.payload_len = value.size
        else:
            self.message.flags |= FLAG_MSGPACK
            self.message.payload = payload.data
            self.message.payload_len = payload.size
        self.message.topic = queue.topic
        self.message.now = now
        rc = self.bus.publish_message(&self.message)
        if rc != APPEND_OK:
            return self.not_appended(rc, envelope, now)
        self.full_since = 0
        self.shared.counts.enqueued += 1
        self.promise()
        size = PyBytes_GET_SIZE(queue.label) + 1 + UUID_CHARS
        p = self.out.reserve(frame_size(5 + text_size(size), envelope.rid.size, OK))
        p = open_frame(p, 5 + text_size(size), envelope.rid.data, envelope.rid.size, OK)
        memcpy(p, b"\x81\xa3jid", 5)
        self.shared.queues.job_uuid(self.message.offset, id)
        put_jid(p + 5, queue, id)
        self.out.commit(frame_size(5 + text_size(size), envelope.rid.size, OK))
        return 0

    cdef int not_appended(self, int rc, Envelope* envelope, int64_t now) except -1:
        """A log without room stops the reading of this connection; after block_timeout the job is refused."""
        if rc == APPEND_TOO_LARGE:
            self.shared.counts.too_large += 1
            return self.error(
                &envelope.rid, "INVALID_JOB_PAYLOAD",
                f"the job is too large: the log takes {self.bus.log.max_record} bytes at most", False)
        if self.wait_for_room(rc, self.shared.block_timeout_us, now):
            return 0
        self.shared.counts.refused_full += 1
        return self.error(&envelope.rid, "JOB_PERSISTENCE_ERROR", f"the job is not in the log: {self.why_not_appended()}", False)

    cdef int find_job(self, const View* jid, uint64_t* offset) except -1:
        """Takes a job's id apart: 0 if it is none, 1 if it is not of a queue or log that is here; 2 with its offset, and
        its queue in last_queue."""
        cdef View name
        cdef Py_ssize_t at = jid.size
        cdef uint8_t id[16]
        while at > 0 and jid.data[at - 1] != c":":
            at -= 1
        if at < 2 or not read_uuid(jid.data + at, jid.size - at, id):
            return 0
        name.data = jid.data
        name.size = at - 1
        if self.queue_named(&name) is None or not self.shared.queues.job_offset(id, offset):
            return 1
        return 2

    cdef int on_end_of_job(self, Envelope* envelope, int64_t now) except -1:
        """DONE, FAIL and EXTEND (docs/protocols/overhop.md, Delivery to workers)."""
        cdef View value, jid, text
        cdef uint64_t offset = 0
        cdef int64_t delay_ms = -1
        cdef Subscription subscription
        cdef Flight* flight
        cdef Seat seat
        cdef bint ours = False, late
        cdef str reason = "the worker failed"
        cdef int found
        if not find_field(envelope, "jid", 3, &value) or not as_text(&value, &jid):
            return self.violation(&envelope.rid, "DONE, FAIL and EXTEND have a string jid")
        if envelope.type == FAIL and envelope.entries > 1:
            if find_field(envelope, "retry_in_ms", 11, &value) and not is_nil(&value):
                if not as_int(&value, &delay_ms) or not 0 <= delay_ms <= <int64_t>OVERHOP_RETRY_MS:
                    return self.violation(&envelope.rid, f"retry_in_ms is an int from 0 to {OVERHOP_RETRY_MS}")
            if find_field(envelope, "reason", 6, &value) and not is_nil(&value):
                if not as_text(&value, &text):
                    return self.violation(&envelope.rid, "reason is a string")
                reason = text.data[:text.size].decode()[:1000]
        found = self.find_job(&jid, &offset)
        if found == 0:
            return self.error(&envelope.rid, "INVALID_JOB_ID", f"no id of a job: {shown(&jid)}", False)
        if found == 1:
            return self.error(&envelope.rid, "JOB_NOT_FOUND", f"there is no job {shown(&jid)}", False)
        subscription = self.last_queue.subscription
        flight = subscription.flight(offset)
        if flight != NULL and flight.member != NULL:
            for seat in self.seats:
                if flight.member == <void*>seat.member:
                    ours = True
                    break
        if envelope.type == DONE:
            # Work that is done need not be done again, also if it was too late and nobody else has begun with it.
            late = flight == NULL or (flight.member == NULL and flight.deliveries > 0)
            if (ours or late) and self.shared.may(False, self.last_queue) and subscription.ack_offset(offset):
                self.shared.counts.done += 1
                self.hungry = True
                self.promise()
                return self.ok_empty(&envelope.rid)
        elif ours and envelope.type == FAIL:
            subscription.release(offset, now, -1 if delay_ms < 0 else delay_ms * 1000, reason)
            subscription.check_due(now)
            self.shared.counts.failed += 1
            self.hungry = True
            self.promise()
            return self.ok_empty(&envelope.rid)
        elif ours and subscription.extend(offset, now):
            self.shared.counts.extended += 1
            return self.ok_empty(&envelope.rid)
        return self.error(&envelope.rid, "JOB_NOT_ACTIVE", f"this worker does not have the job {shown(&jid)}", False)

    # --- credits and pushes --------------------------------------------------------------------------------------------

    cdef Seat seat_of(self, const View* sid, bint* valid):
        """The subscription with this id, or None; `valid`: it is an id at all."""
        cdef uint8_t id[16]
        valid[0] = read_uuid(sid.data, sid.size, id)
        if not valid[0]:
            return None
        return self.by_sid.get(PyBytes_FromStringAndSize(<const char*>id, 16))

    cdef int on_credit(self, Envelope* envelope, int64_t now) except -1:
        cdef View value, sid
        cdef int64_t credits = 0
        cdef bint valid = False
        cdef Seat seat = None
        if find_field(envelope, "sid", 3, &value) and as_text(&value, &sid):
            seat = self.seat_of(&sid, &valid)
        if not valid:
            return self.violation(&envelope.rid, "CREDIT has the UUID of a subscription in sid")
        if not find_field(envelope, "credits", 7, &value) or not as_int(&value, &credits) or not 1 <= credits <= MOST_CREDITS:
            return self.violation(&envelope.rid, f"credits is an int from 1 to {MOST_CREDITS}")
        if seat is None or seat.member.gone:
            return self.error(&envelope.rid, "SUBSCRIPTION_NOT_FOUND", f"there is no subscription {shown(&sid)}", False)
        seat.member.credits = min(seat.member.credits + credits, MOST_CREDITS)
        self.hungry = True
        return self.ok_empty(&envelope.rid)

    cdef int deliver(self, int64_t now, Py_ssize_t room) except -1:
        cdef Py_ssize_t i, count = len(self.seats), limit = self.out.size + room
        cdef Seat seat
        cdef Delivery delivery
        self.hungry = False
        if not self.shared.deliver or self.closing or not self.bus.log.open or count == 0:
            return 0
        if self.tell_ended(now):
            count = len(self.seats)
            if count == 0:
                return 0
        self.turn = (self.turn + 1) % count
        for i in range(count):
            seat = self.seats[(self.turn + i) % count]
            while not seat.member.gone:
                if self.out.size >= limit:
                    self.more = True
                    break
                if not seat.queue.subscription.take(seat.member, now, &delivery):
                    break
                self.push(seat, &delivery, now)
        self.bus.flush(now)
        return 0

    cdef int tell_ended(self, int64_t now) except -1:
        """Tells the worker which of its queues were removed, if it may be told, and has it leave them; how many."""
        cdef Seat seat
        cdef int told = 0
        for seat in list(self.seats):
            if not seat.member.gone:
                continue
            self.stand_up(seat, now)
            if not self.shared.deliver:
                continue
            self.shared.counts.subscriptions_ended += 1
            told += 1
            self.answer(&ZERO, ENDED, pack({"q": seat.queue.name, "sid": seat.sid[:UUID_CHARS].decode()}))
        return told

    cdef int push(self, Seat seat, const Delivery* delivery, int64_t now) except -1:
        cdef const RecordView* view = &delivery.view
        cdef Queue queue = seat.queue
        cdef Py_ssize_t jid = PyBytes_GET_SIZE(queue.label) + 1 + UUID_CHARS
        cdef bint packed = view.record.flags & FLAG_MSGPACK and view.record.protocol == OVERHOP
        cdef int64_t deadline_ms = queue.subscription.deadline_us // 1000
        cdef const char* topic = self.bus.log.names[view.record.topic].text
        cdef Py_ssize_t topic_size = self.bus.log.names[view.record.topic].length
        cdef Py_ssize_t size = 0
        cdef uint8_t id[16]
        cdef uint8_t* p
        if view.payload_len < MOST_LIMIT:
            size = (
                1 + 8 + int_size(delivery.deliveries) + 12 + int_size(deadline_ms) + 4 + text_size(jid) + 12
                + (<Py_ssize_t>view.payload_len if packed else bin_size(<Py_ssize_t>view.payload_len))
                + 4 + text_size(UUID_CHARS) + 6 + text_size(topic_size)
            )
        if size == 0 or frame_size(size, 1, DELIVER) - 4 > self.shared.limit:
            self.shared.counts.too_large += 1
            if seat.member.credits >= 0:
                seat.member.credits += 1
            queue.subscription.bury_tag(delivery.tag, now, "too large for an Overhop envelope")
            return 0
        p = open_frame(self.out.reserve(frame_size(size, 1, DELIVER)), size, b"0", 1, DELIVER)
        memcpy(p, b"\x86\xa7attempt", 9)
        p = put_int(p + 9, delivery.deliveries)
        memcpy(p, b"\xabdeadline_ms", 12)
        p = put_int(p + 12, deadline_ms)
        memcpy(p, b"\xa3jid", 4)
        self.shared.queues.job_uuid(view.record.offset, id)
        p = put_jid(p + 4, queue, id)
        memcpy(p, b"\xabjob_payload", 12)
        if packed:
            memcpy(p + 12, view.payload, view.payload_len)
            p += 12 + view.payload_len
        else:
            p = put_bin(p + 12, view.payload, <Py_ssize_t>view.payload_len)
        memcpy(p, b"\xa3sid", 4)
        p = put_text(p + 4, seat.sid, UUID_CHARS)
        memcpy(p, b"\xa5topic", 6)
        p = put_text(p + 6, topic, topic_size)
        self.out.commit(frame_size(size, 1, DELIVER))
        self.shared.counts.pushed += 1
        return 0

    cdef int stand_up(self, Seat seat, int64_t now) except -1:
        """Ends a subscription: what it had of the queue's jobs goes to others."""
        self.seats.remove(seat)
        del self.by_sid[PyBytes_FromStringAndSize(<const char*>seat.id, 16)]
        seat.member.leave(now)
        return 0

    # --- everything else -----------------------------------------------------------------------------------------------

    cdef int on_rarer(self, Envelope* envelope, int64_t now) except -1:
        cdef int type = <int>envelope.type
        cdef View* rid = &envelope.rid
        if type == HELLO:
            self.state = GREETED
            self.helloed = now
            self.shared.counts.hellos += 1
            return self.answer(rid, HI, b"\x80")
        if type == REGISTER:
            return self.on_register(envelope, now)
        if type == PING or type == LQUEUES or type == STATUS:
            payload = {"": None} if envelope.entries else {}    # that there is nothing in it is all that is asked
        else:
            payload = known_fields(envelope)
        try:
            if type == PING:
                self.shared.counts.pings += 1
                return self.answer(rid, PONG, pack(self._ping(payload, now)))
            if type == GQUEUE:
                return self.answer(rid, OK, pack(self._gqueue(payload)))
            if type == LQUEUES:
                return self.answer(rid, OK, pack(self._lqueues(payload)))
            if type == SUBSCRIBE:
                return self.answer(rid, OK, pack(self._subscribe(payload, now)))
            if type == UNSUBSCRIBE:
                self._unsubscribe(payload, now)
            elif type == ADDQUEUE:
                made = self._addqueue(payload, now)
                self.promise()
                return self.answer(rid, OK, pack(made))
            elif type == STATUS:
                return self.answer(rid, OK, pack(self._status(payload, now)))
            elif type == RMQUEUE:
                self._rmqueue(payload, now)
                self.promise()
            elif type == PAUSE or type == RESUME:
                self._set_paused(payload, type == PAUSE, now)
                self.promise()
            elif type == JOB:
                return self.answer(rid, OK, pack(self._job(payload, now)))
            elif type == RMJOB:
                self._rmjob(payload, now)
                self.promise()
            elif type == LSJOB:
                return self.answer(rid, OK, pack(self._lsjob(payload, now)))
            else:
                return self.answer(rid, OK, pack(self._qstats(payload, now)))
            return self.ok_empty(rid)
        except Violation as violation:
            return self.violation(rid, str(violation))
        except Refused as refused:
            return self.error(rid, refused.code, refused.text, False)

    def _ping(self, payload, now):
        if payload:
            raise Violation("the payload of PING is empty")
        return {"server_time": time_text(now)}

    def _gqueue(self, payload):
        cdef Queue queue = self.shared.queues.get(field(payload, "q", str))
        return {} if queue is None else described(queue)

    def _lqueues(self, payload):
        if payload:
            raise Violation("the payload of LQUEUES is empty")
        return {"queues": [described(queue) for queue in self.shared.queues]}

    def _queue(self, payload, publish, what):
        """The queue in `q`, which has to be there and which the peer must have the right for."""
        cdef str name = field(payload, "q", str)
        cdef Queue queue = self.shared.queues.get(name)
        if queue is None:
            raise Refused("QUEUE_NOT_FOUND", f"there is no queue {short(name)!r}")
        if not self.shared.may(publish, queue):
            raise Refused("NOT_ALLOWED", f"no right to {what} {queue.name!r}")
        return queue

    def _subscribe(self, payload, now):
        cdef Seat seat
        cdef Queue queue
        field(payload, "q", str)
        credits = payload.get("credits", 0)
        if type(credits) is not int or not 0 <= credits <= MOST_CREDITS:
            raise Violation(f"credits is an int from 0 to {MOST_CREDITS}")
        queue = self._queue(payload, False, "subscribe to")
        self.tell_ended(now)
        for seat in self.seats:
            if seat.queue is queue:
                raise Refused("DUPLICATE_SUBSCRIPTION", f"this worker is subscribed to {queue.name!r}")
        if len(self.seats) >= OVERHOP_SUBSCRIPTIONS:
            raise Refused("QUEUE_POOL_ERROR", f"a worker has {OVERHOP_SUBSCRIPTIONS} subscriptions at most")
        id = uuid.uuid4()
        seat = Seat()
        seat.queue = queue
        memcpy(seat.id, PyBytes_AS_STRING(id.bytes), 16)
        write_uuid(seat.sid, seat.id)
        seat.member = queue.subscription.join(self, credits, now)
        self.seats.append(seat)
        self.by_sid[id.bytes] = seat
        self.hungry = True
        return {"sid": str(id)}

    def _unsubscribe(self, payload, now):
        cdef bytes text = field(payload, "sid", str).encode()
        cdef View view
        cdef bint valid = False
        cdef Seat seat
        view.data = <const uint8_t*>PyBytes_AS_STRING(text)
        view.size = PyBytes_GET_SIZE(text)
        seat = self.seat_of(&view, &valid)
        if not valid:
            raise Violation("sid is the UUID of a subscription")
        if seat is None or seat.member.gone:
            raise Refused("SUBSCRIPTION_NOT_FOUND", f"there is no subscription {short(payload['sid'])}")
        self.stand_up(seat, now)

    def _addqueue(self, payload, now):
        cdef str name = field(payload, "name", str)
        cdef Queue known = self.shared.queues.get(name)
        config = field(payload, "config", dict, required=False) or {}
        limit = field(config, "concurrency_limit", int, required=False)
        if limit is not None and not 1 <= limit <= MOST_CREDITS:
            raise Violation(f"concurrency_limit is nil or an int from 1 to {MOST_CREDITS}")
        overrides = config.get("allow_job_overrides", True)
        if type(overrides) is not bool:
            raise Violation("allow_job_overrides is a bool")
        if name.startswith("_") and known is None:
            raise Refused("SYSTEM_QUEUE_FORBIDDEN", "names that begin with _ are the gateway's")
        try:
            if not (self.shared.may_add(name) if known is None else self.shared.may(True, known)):
                raise Refused("NOT_ALLOWED", f"no right to add {short(name)!r}")
            made = self.shared.queues.add(name, concurrency_limit=limit, allow_job_overrides=overrides, now=now)
        except DuplicateQueue as error:
            raise Refused("DUPLICATE_QUEUE", str(error)) from None
        except BadQueueName as error:
            raise Refused("INVALID_QUEUE_NAME", str(error)) from None
        except (TooManyQueues, BusError) as error:
            raise Refused("QUEUE_POOL_ERROR", str(error)) from None
        except LogError as error:
            raise Refused("QUEUE_PERSISTENCE_ERROR", str(error)) from None
        return {"qid": made.id}

    def _own_queue(self, payload, what):
        """The same for one that is to be changed, which no system queue is."""
        cdef Queue queue = self._queue(payload, True, what)
        if queue.system():
            raise Refused("SYSTEM_QUEUE_FORBIDDEN", f"{queue.name!r} is the gateway's own")
        return queue

    def _rmqueue(self, payload, now):
        cdef Queue queue = self._own_queue(payload, "remove")
        counts = queue.counts(now)
        left = sum(counts[state] for state in ("new", "waiting", "delayed", "active"))
        if left:
            raise Refused("QUEUE_NOT_EMPTY", f"{queue.name!r} has {left} jobs that are not finished")
        self.shared.queues.remove(queue, now)

    def _set_paused(self, payload, paused, now):
        cdef Queue queue = self._own_queue(payload, "pause or resume")
        if bool(queue.paused) == paused:
            state = "PAUSED" if paused else "RUNNING"
            raise Refused(f"QUEUE_ALREADY_{state}", f"{queue.name!r} is {state.lower()} already")
        try:
            self.shared.queues.set_paused(queue, paused, now)
        except LogError as error:
            raise Refused("QUEUE_PERSISTENCE_ERROR", str(error)) from None

    def _find(self, payload, publish, what):
        """The offset of the job in `jid`, with its queue in last_queue; None where it cannot be here."""
        cdef bytes text = field(payload, "jid", str).encode()
        cdef View view
        cdef uint64_t offset = 0
        cdef int found
        view.data = <const uint8_t*>PyBytes_AS_STRING(text)
        view.size = PyBytes_GET_SIZE(text)
        found = self.find_job(&view, &offset)
        if found == 0:
            raise Refused("INVALID_JOB_ID", f"no id of a job: {short(payload['jid'])!r}")
        if found == 1:
            return None
        if not self.shared.may(publish, self.last_queue):
            raise Refused("NOT_ALLOWED", f"no right to {what} jobs of {self.last_queue.name!r}")
        return offset

    def _job(self, payload, now):
        offset = self._find(payload, False, "see")
        return {} if offset is None else self._record(self.last_queue, offset, now, self.shared.limit) or {}

    def _rmjob(self, payload, now):
        cdef int status
        cdef uint32_t deliveries = 0
        offset = self._find(payload, True, "remove")
        if offset is not None:
            status = self.last_queue.subscription.status_of(offset, now, &deliveries)
            if status == ACTIVE or status == WAITING:
                raise Refused("JOB_STATUS_NOT_REMOVABLE", f"the job is {STATUS_NAMES[status]}")
            if status != UNKNOWN:
                self.last_queue.subscription.remove_offset(offset, now)
                return
        raise Refused("JOB_NOT_FOUND", f"there is no job {short(payload['jid'])!r}")

    def _record(self, Queue queue, uint64_t offset, now, room):
        """A job as JOB and LSJOB tell it; None where the log does not have it any more. A payload that would take more than
        `room` bytes is left out."""
        cdef RecordView view
        cdef Timing timing
        cdef uint32_t deliveries = 0
        cdef uint8_t id[16]
        cdef char text[UUID_CHARS]
        cdef Subscription subscription = queue.subscription
        cdef int status = subscription.status_of(offset, now, &deliveries)
        if status == UNKNOWN or not subscription.view_offset(offset, &view):
            return None
        read_timing(view.record, &timing)
        self.shared.queues.job_uuid(offset, id)
        write_uuid(text, id)
        job = text[:UUID_CHARS].decode()
        body = None
        if view.payload_len + 1024 < room:
            body = view.payload[:view.payload_len]
            if view.record.flags & FLAG_MSGPACK and view.record.protocol == OVERHOP:
                body = Raw(body)
        return {
            "created_at": time_text(view.record.time),
            "execution_start_at": time_text(timing.not_before) if 0 < timing.not_before <= LAST_TIME else None,
            "jid": f"{queue.name}:{job}",
            "max_attempts": timing.attempts or subscription.max_deliveries,
            "payload": body,
            "queue_name": queue.name,
            "retry_interval_ms": timing.retry_us // 1000 if timing.retry_us else None,
            "runtime": {"attempts_so_far": deliveries},
            "status": STATUS_NAMES[status],
            "uuid": job,
        }

    def _lsjob(self, payload, now):
        cdef Queue queue
        status = field(payload, "status", str)
        size = field(payload, "page_size", int, required=False)
        page = field(payload, "page", int, required=False)
        size = PAGE_JOBS if size is None else size
        page = 1 if page is None else page
        queue = self._queue(payload, False, "see jobs of")
        if status not in STATUS_NAMES[1:]:
            raise Refused("INVALID_JOB_STATUS_FILTER", f"a status is one of {', '.join(STATUS_NAMES[1:])}")
        if not 1 <= size <= OVERHOP_PAGE_JOBS:
            raise Refused("INVALID_PAGE_SIZE", f"page_size is from 1 to {OVERHOP_PAGE_JOBS}")
        if not 1 <= page <= MOST_CREDITS:
            raise Refused("INVALID_PAGE", "page is 1 or more")
        jobs = []
        room = self.shared.limit // 2
        for offset in queue.subscription.offsets(status, (page - 1) * size, size, looks=OVERHOP_LISTED_JOBS, now=now):
            record = self._record(queue, offset, now, room)
            if record is not None:
                body = record["payload"]
                room -= 1024 + (0 if body is None else len(body.data if isinstance(body, Raw) else body))
                jobs.append(record)
        return {"jobs": jobs, "page": page, "page_size": size, "q": queue.name, "status": status}

    def _qstats(self, payload, now):
        cdef Queue queue = self._queue(payload, False, "see")
        return {"q": queue.name, "stats": queue.counts(now)}

    def _status(self, payload, now):
        cdef Queue queue
        if payload:
            raise Violation("the payload of STATUS is empty")
        log = self.bus.log.stats()
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "application": {
                "name": "headrace", "version": __version__, "started_at": time_text(self.shared.started),
                "uptime_seconds": max(0, now - self.shared.started) // 1_000_000,
            },
            "memory": {"max_resident_bytes": most if sys.platform == "darwin" else most * 1024},
            "pools": {"anonymous": self.shared.anonymous, "workers": self.shared.workers},
            "queues": {
                queue.name: {
                    "filter": queue.filter, "state": queue.state, "stats": queue.counts(now), "workers": queue.workers,
                }
                for queue in self.shared.queues
            },
            "storage": {
                "engine": "log", "appended_offset": log["appended_offset"], "first_offset": log["first_offset"],
                "full": self.bus.log.full is not None, "safe_offset": log["safe_offset"], "segments": log["segments"],
            },
        }

    # --- promises ------------------------------------------------------------------------------------------------------

    cdef int promise(self) noexcept:
        """What is answered from here on in this read event waits until all that the event wrote is safe."""
        if not self.promised:
            self.promised = True
            self.promised_from = self.out.position()
        return 0

    cdef int keep_promises(self, int64_t now) except -1:
        if not self.promised:
            return 0
        self.promised = False
        self.bus.flush(now)                         # acknowledgements are written together
        self.confirmed_lsn = self.bus.log.lsn()
        if self.bus.log.safe_lsn() < self.confirmed_lsn:
            self.out.gate_from(self.promised_from, self.confirmed_lsn)
            self.bus.log.ask_sync()
        return 0

    # --- time and ends -------------------------------------------------------------------------------------------------

    cdef int tick(self, int64_t now) except -1:
        if not self.bus.log.open:
            return 0
        if self.began == 0:
            self.began = self.checked = now
        if self.state != WORKER and not self.closing and now - self.checked >= self.shared.cadence_us:
            self.checked += (now - self.checked) // self.shared.cadence_us * self.shared.cadence_us
            self.purge(now)
        self.stop_waiting(self.shared.block_timeout_us, now)     # to be refused
        return self.check_log()

    cdef int purge(self, int64_t now) except -1:
        """Who has not become a worker in time is asked, and then goes (overhop, Heartbeat-Driven Connection Purge)."""
        if self.state == ANONYMOUS:
            if now - self.began >= self.shared.unhelloed_us:
                self.shared.counts.timeouts += 1
                self.closing = True
        elif self.ident_deadline:
            if now >= self.ident_deadline:
                self.shared.counts.timeouts += 1
                self.error(&ZERO, "CONNECTION_TIMEOUT", "no REGISTER came before the deadline that IDENT gave", True)
        elif now - self.helloed >= self.shared.unregistered_us:
            self.ident_deadline = now + self.shared.ident_us
            self.shared.counts.idents += 1
            self.answer(&ZERO, IDENT, pack({
                "register_timeout_seconds": self.shared.ident_us // 1_000_000,
                "reply_deadline": time_text(self.ident_deadline),
            }))
        return 0

    cdef int drain(self, int64_t now) except -1:
        return self.check_log()

    cdef int unconfirmed(self) except -1:
        self.closing = True
        self.shared.counts.unconfirmed += 1
        return 0

    cdef int lost(self, int64_t now) except -1:
        cdef Seat seat
        if self.counted:
            self.counted = False
            if self.state == WORKER:
                self.shared.workers -= 1
            else:
                self.shared.anonymous -= 1
        if self.bus.log.open:           # else nothing is kept for anybody any more
            for seat in list(self.seats):
                self.stand_up(seat, now)
            self.bus.flush(now)
        return 0

    # --- answers -------------------------------------------------------------------------------------------------------

    cdef int answer(self, const View* rid, int type, bytes payload) except -1:
        cdef Py_ssize_t size = PyBytes_GET_SIZE(payload)
        cdef Py_ssize_t whole = frame_size(size, rid.size, type)
        memcpy(open_frame(self.out.reserve(whole), size, rid.data, rid.size, type), PyBytes_AS_STRING(payload), size)
        self.out.commit(whole)
        return 0

    cdef int ok_empty(self, const View* rid) except -1:
        cdef Py_ssize_t whole = frame_size(1, rid.size, OK)
        open_frame(self.out.reserve(whole), 1, rid.data, rid.size, OK)[0] = 0x80
        self.out.commit(whole)
        return 0

    cdef int error(self, const View* rid, str code, str text, bint closes) except -1:
        if closes:
            self.closing = True
        else:
            self.shared.counts.refused += 1
        return self.answer(rid, ERR, pack({"code": code, "msg": text}))

    cdef int violation(self, const View* rid, str text) except -1:
        self.shared.counts.violations += 1
        return self.error(rid, "PROTOCOL_VIOLATION", text, True)

    @property
    def subscriptions(self):
        """How many queues this worker is subscribed to."""
        return len(self.seats)


cdef inline uint8_t* put_jid(uint8_t* p, Queue queue, const uint8_t* id) noexcept:
    cdef char text[JID_ROOM]
    cdef Py_ssize_t n = PyBytes_GET_SIZE(queue.label)
    memcpy(text, PyBytes_AS_STRING(queue.label), n)
    text[n] = c":"
    write_uuid(text + n + 1, id)
    return put_text(p, text, n + 1 + UUID_CHARS)


cdef dict described(Queue queue):
    return {
        "config": {"allow_job_overrides": bool(queue.allow_job_overrides), "concurrency_limit": queue.concurrency_limit},
        "id": queue.id, "name": queue.name, "state": queue.state,
    }


cdef str shown(const View* text):
    return repr(short(text.data[:text.size].decode()))


cdef str short(str text):
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"
