"""The BlipMQ session: one peer's state machine on the bus. It owns no socket, no clock and no task.

One read event is one call of receive(): every whole frame is handled in C and answered in order into one buffer. A
publish goes from the peer's bytes into the log with one copy and no Python object.

What waits for the log's safe end, and how:
    PONG, and the ACK of a durable SUBSCRIBE    leaves behind a gate in the output, so that parsing goes on
    POLL behind QoS 1 publishes                 is not parsed until they are safe: its answer depends on them
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from headrace.bus cimport BLIPMQ, Bus, Delivery, Flight, Member, Subscription
from headrace.log cimport APPEND_FAILED, APPEND_FULL, APPEND_OK, APPEND_TOO_LARGE, FLAG_CONFIRMED, Log
from headrace.session cimport Session
from headrace.sessions.rights cimport Keyring, Rights
from headrace.wire.blipmq cimport (
    ACK, ACK_SIZE, AUTH, HELLO, MAX_LENGTH, NACK, PING, POLL, PONG, PONG_SIZE, PUBLISH, SUBSCRIBE, VERSION, RawFrame,
    RawPublish, RawSubscribe, nack_size, next_frame, parse_ack, parse_auth, parse_hello, parse_poll, parse_subscribe,
    publish_size, split_publish, write_ack, write_nack, write_pong, write_publish,
)
from headrace.wire.bytes cimport View as Slice, utf8_valid

from headrace.errors import BusError, LogError


cdef class Blipmq:
    def __init__(self, Bus bus not None, Keyring keys not None, *, uint32_t max_length=MAX_LENGTH,
                 double handshake_timeout=0, double block_timeout=5, uint32_t max_subscriptions=10_000):
        self.bus = bus
        self.keys = keys
        self.max_length = max_length
        self.handshake_timeout_us = <int64_t>(handshake_timeout * 1e6)
        self.block_timeout_us = <int64_t>(block_timeout * 1e6)
        self.max_subscriptions = max_subscriptions

    def session(self):
        """A session for one new connection."""
        return BlipmqSession(self)

    def counters(self):
        """All that was counted since the start, by name."""
        return self.counts


cdef class BlipmqSession(Session):
    def __init__(self, Blipmq shared not None):
        self.shared = shared
        self.bus = shared.bus
        self.members = {}
        memset(&self.message, 0, sizeof(Message))
        self.message.protocol = BLIPMQ

    def __dealloc__(self):
        if self.origin != NULL:
            self.bus.log.close_origin(self.origin)

    cdef uint64_t safe_end(self) noexcept:
        return self.bus.log.safe_lsn()

    cdef Py_ssize_t receive(self, const uint8_t* data, Py_ssize_t n, int64_t now) except -1:
        cdef Py_ssize_t at = 0, used = 0, wanted = 0
        cdef RawFrame frame
        cdef int found
        if self.began == 0:
            self.began = now
        if self.rights is not None and self.memo_changes != self.rights.changes:
            self.memo_topic = 0
            self.memo_changes = self.rights.changes
            if self.rights.revoked:
                self.rights = None
        while not self.closing:
            found = next_frame(data + at, n - at, self.shared.max_length, &frame, &used, &wanted)
            if found == 0:
                self.wanted = wanted
                break
            if found < 0:
                self.shared.counts.bad_frames += 1
                self.closing = True
                break
            if frame.type == PUBLISH and self.rights is not None:
                self.on_publish(&frame, now)
            else:
                self.on_frame(&frame, now)
            if self.blocked:
                break                   # this frame is not done: it comes again
            at += used
        self.bus.flush(now)
        if self.sync_wanted:
            self.sync_wanted = False
            if self.bus.log.safe_lsn() < self.confirmed_lsn:
                self.bus.log.ask_sync()
        return n if self.closing else at

    cdef int on_frame(self, RawFrame* frame, int64_t now) except -1:
        if frame.type == HELLO:
            return self.on_hello(frame, now)
        if frame.type == AUTH:
            return self.on_auth(frame, now)
        if self.rights is None:
            return self.nack(frame.correlation, 401, "unauthenticated")
        if frame.type == POLL:
            return self.on_poll(frame, now)
        if frame.type == ACK:
            return self.on_ack(frame, now)
        if frame.type == PING:
            return self.on_ping(frame, now)
        if frame.type == SUBSCRIBE:
            return self.on_subscribe(frame, now)
        return 0                        # PONG and NACK are a server's to send; from a client they mean nothing

    # --- the handshake -------------------------------------------------------------------------------------------------

    cdef int on_hello(self, RawFrame* frame, int64_t now) except -1:
        cdef uint16_t version = 0
        if self.greeted:
            return self.nack(frame.correlation, 400, "HELLO already performed")
        if parse_hello(frame.payload, frame.size, &version) != 0:
            return self.nack(frame.correlation, 400, "invalid HELLO payload")
        if version != VERSION:
            return self.nack(frame.correlation, 426, "unsupported protocol version")
        self.greeted = True
        self.shared.counts.hellos += 1
        return self.ack(frame.correlation, 0)

    cdef int on_auth(self, RawFrame* frame, int64_t now) except -1:
        cdef Slice key
        cdef bytes source
        if not self.greeted:
            return self.nack(frame.correlation, 400, "HELLO not performed")
        if self.rights is not None:
            return self.nack(frame.correlation, 400, "already authenticated")
        if parse_auth(frame.payload, frame.size, &key) != 0:
            return self.nack(frame.correlation, 400, "invalid AUTH payload")
        self.rights = self.shared.keys.find(key.data[:key.size])
        if self.rights is None:
            return self.nack(frame.correlation, 401, "invalid API key")
        self.memo_topic = 0
        self.memo_changes = self.rights.changes
        if self.origin != NULL:
            self.bus.log.close_origin(self.origin)
            self.origin = NULL
        peer = "" if self.connection is None else self.connection.peer
        source = f"{self.rights.name}@{peer}".encode()
        self.origin = self.bus.log.open_origin(source)
        self.message.origin = self.origin
        self.shared.counts.authenticated += 1
        return self.ack(frame.correlation, 0)

    # --- publishing ----------------------------------------------------------------------------------------------------

    cdef int on_publish(self, RawFrame* frame, int64_t now) except -1:
        cdef RawPublish publish
        cdef uint32_t topic
        cdef int rc
        if split_publish(frame.payload, frame.size, &publish) != 0:
            return self.nack(frame.correlation, 400, "invalid PUBLISH payload")
        if (
            self.memo_topic and publish.topic_size == self.memo_size
            and memcmp(publish.topic, self.memo, publish.topic_size) == 0
        ):
            topic = self.memo_topic
        else:
            if not utf8_valid(publish.topic, publish.topic_size):
                return self.nack(frame.correlation, 400, "invalid PUBLISH payload")
            if publish.topic_size == 0:
                return self.nack(frame.correlation, 400, "empty topic")
            if publish.qos > 1:
                return self.nack(frame.correlation, 400, "invalid QoS value")
            # The right is asked first: a topic that nobody may publish to is not made.
            topic = self.bus.log.find_topic(<const char*>publish.topic, publish.topic_size)
            if not self.rights.may_publish(topic, <const char*>publish.topic, publish.topic_size):
                return self.nack(frame.correlation, 401, self.forbidden("publish", publish.topic, publish.topic_size))
            try:
                topic = self.bus.topic_id(<const char*>publish.topic, publish.topic_size)
            except BusError as e:
                return self.nack(frame.correlation, 400, str(e))
            if publish.topic_size <= MEMO_BYTES:
                memcpy(self.memo, publish.topic, publish.topic_size)
                self.memo_size = publish.topic_size
                self.memo_topic = topic
        if publish.qos > 1:
            return self.nack(frame.correlation, 400, "invalid QoS value")
        self.message.topic = topic
        self.message.flags = FLAG_CONFIRMED if publish.qos else 0
        self.message.correlation = frame.correlation
        self.message.payload = publish.message
        self.message.payload_len = publish.message_size
        self.message.now = now
        rc = self.bus.publish_message(&self.message)
        if rc != APPEND_OK:
            return self.not_appended(rc, publish.qos, frame.correlation, now)
        self.full_since = 0
        if publish.qos:
            self.confirmed_lsn = self.bus.log.lsn()
            self.sync_wanted = True
        return 0

    cdef int not_appended(self, int rc, uint8_t qos, uint64_t correlation, int64_t now) except -1:
        """A log without room stops the reading of this connection; after block_timeout what can be refused is."""
        if rc == APPEND_TOO_LARGE:
            self.shared.counts.too_large += 1
            return self.nack(correlation, 400, f"message too large: the log takes {self.bus.log.max_record} bytes at most")
        if rc == APPEND_FULL:
            if self.full_since == 0:
                self.full_since = now
            if now - self.full_since < self.shared.block_timeout_us:
                self.blocked = True
                self.waits_space = True
                return 0
        if qos == 0:
            self.shared.counts.dropped_full += 1
            return 0
        self.shared.counts.refused_full += 1
        reason = self.bus.log.failed if rc == APPEND_FAILED else self.bus.log.full
        return self.nack(correlation, 500, f"durable publish failed: {reason or 'the log has no room'}")

    # --- subscribing ---------------------------------------------------------------------------------------------------

    cdef int on_subscribe(self, RawFrame* frame, int64_t now) except -1:
        cdef RawSubscribe wish
        cdef Subscription subscription
        cdef Log log = self.bus.log
        if parse_subscribe(frame.payload, frame.size, &wish) != 0:
            return self.nack(frame.correlation, 400, "invalid SUBSCRIBE payload")
        if wish.topic_size == 0:
            return self.nack(frame.correlation, 400, "empty topic")
        if wish.qos > 1:
            return self.nack(frame.correlation, 400, "invalid QoS value")
        if not self.rights.may_subscribe(<const char*>wish.topic, wish.topic_size):
            return self.nack(frame.correlation, 401, self.forbidden("subscribe", wish.topic, wish.topic_size))
        if <uint32_t>len(self.members) >= self.shared.max_subscriptions:
            return self.nack(
                frame.correlation, 400, f"too many subscriptions: a connection has {self.shared.max_subscriptions} at most")
        self.bus.flush(now)             # what this connection published before is before the subscription's beginning
        try:
            subscription = self.bus.subscribe(
                wish.topic[:wish.topic_size], exact=True, at_least_once=wish.qos == 1, durable=wish.qos == 1,
                owner=self.rights.name, protocol=BLIPMQ, now=now)
        except BusError as e:
            return self.nack(frame.correlation, 400, str(e))
        except LogError as e:
            return self.nack(frame.correlation, 500, f"subscribe failed: {e}")
        self.members[subscription.id] = subscription.join(None, -1, now)
        if wish.qos:
            self.confirmed_lsn = log.lsn()
            self.sync_wanted = True
            if log.safe_lsn() < self.confirmed_lsn:
                self.out.gate(self.confirmed_lsn)
        return self.ack(frame.correlation, subscription.id)

    cdef Member member_of(self, uint64_t id, int64_t now):
        """This connection's part in a subscription of its key, or None."""
        cdef Subscription subscription
        cdef Member member
        if id == self.last_id and not self.last_member.gone:
            return self.last_member
        member = self.members.get(id)
        if member is None or member.gone:
            subscription = self.bus.find(id)
            if subscription is None or subscription.protocol != BLIPMQ or subscription.owner != self.rights.name:
                return None
            # A subscription that this key made on another connection, or before a restart: it goes on here.
            member = subscription.join(None, -1, now)
            self.members[id] = member
        self.last_id = id
        self.last_member = member
        return member

    cdef int on_poll(self, RawFrame* frame, int64_t now) except -1:
        cdef uint64_t id = 0
        cdef Member member
        cdef Delivery delivery
        cdef Subscription subscription
        cdef Py_ssize_t size
        cdef Log log = self.bus.log
        if parse_poll(frame.payload, frame.size, &id) != 0:
            return self.nack(frame.correlation, 400, "invalid POLL payload")
        if id == 0:
            return self.nack(frame.correlation, 400, "subscription_id must be non-zero")
        if self.out.size >= self.high_water:
            self.blocked = self.waits_room = True
            return 0
        member = self.member_of(id, now)
        if member is None:
            return 0
        log.make_readable()             # a poll sees what this connection published just before it
        if self.confirmed_lsn > log.safe_lsn():
            self.bus.flush(now)
            log.ask_sync()
            self.blocked = True
            self.waits_safe = self.confirmed_lsn
            return 0
        self.shared.counts.polls += 1
        subscription = member.subscription
        while subscription.take(member, now, &delivery):
            size = publish_size(<uint16_t>PyBytes_GET_SIZE(subscription.filter), delivery.view.payload_len)
            if size - 4 > MAX_LENGTH:
                self.shared.counts.too_large += 1
                if delivery.confirm:
                    subscription.bury_tag(delivery.tag, now, "too large for a BlipMQ frame")
                continue
            self.out.commit(write_publish(
                self.out.reserve(size), delivery.tag if delivery.confirm else frame.correlation, delivery.confirm,
                PyBytes_AS_STRING(subscription.filter), <uint16_t>PyBytes_GET_SIZE(subscription.filter),
                delivery.view.payload, delivery.view.payload_len))
            return 0
        self.shared.counts.polls_empty += 1
        return 0

    cdef int on_ack(self, RawFrame* frame, int64_t now) except -1:
        cdef uint64_t id = 0
        cdef Member member
        if parse_ack(frame.payload, frame.size, &id) != 0:
            return self.nack(frame.correlation, 400, "invalid ACK payload")
        if id == 0:
            return self.nack(frame.correlation, 400, "subscription_id must be non-zero")
        member = self.member_of(id, now)
        if member is None or frame.correlation == 0 or not member.subscription.ack_offset(frame.correlation - 1):
            return self.nack(frame.correlation, 404, "unknown subscription or delivery tag")
        self.shared.counts.acks += 1
        return 0

    cdef int on_ping(self, RawFrame* frame, int64_t now) except -1:
        self.shared.counts.pings += 1
        if self.out.size >= self.high_water:
            self.blocked = self.waits_room = True
            return 0
        if self.confirmed_lsn > self.bus.log.safe_lsn():
            self.out.gate(self.confirmed_lsn)
        self.out.commit(write_pong(self.out.reserve(PONG_SIZE), frame.correlation))
        return 0

    # --- time and ends -------------------------------------------------------------------------------------------------

    cdef int tick(self, int64_t now) except -1:
        if self.began == 0:
            self.began = now
        if (
            self.rights is None and self.shared.handshake_timeout_us
            and now - self.began > self.shared.handshake_timeout_us
        ):
            self.shared.counts.handshakes_late += 1
            self.closing = True
        if self.blocked and self.waits_space and now - self.full_since >= self.shared.block_timeout_us:
            self.unblock()              # to be refused or dropped
        return 0

    cdef int lost(self, int64_t now) except -1:
        cdef Member member
        for member in self.members.values():
            member.leave(now)
        self.members.clear()
        self.last_id = 0
        self.last_member = None
        self.bus.flush(now)
        return 0

    # --- answers -------------------------------------------------------------------------------------------------------

    cdef int ack(self, uint64_t correlation, uint64_t id) except -1:
        self.out.commit(write_ack(self.out.reserve(ACK_SIZE), correlation, id))
        return 0

    cdef int nack(self, uint64_t correlation, uint16_t code, str text) except -1:
        cdef bytes said = text.encode()[:65535]
        cdef Counts* counts = &self.shared.counts
        if code == 400:
            counts.nack_400 += 1
        elif code == 401:
            counts.nack_401 += 1
        elif code == 404:
            counts.nack_404 += 1
        elif code == 426:
            counts.nack_426 += 1
        else:
            counts.nack_500 += 1
        self.out.commit(write_nack(
            self.out.reserve(nack_size(<uint16_t>PyBytes_GET_SIZE(said))), correlation, code, PyBytes_AS_STRING(said),
            <uint16_t>PyBytes_GET_SIZE(said)))
        return 0

    cdef str forbidden(self, str right, const uint8_t* topic, Py_ssize_t n):
        return f"key {self.rights.name!r} may not {right} to {topic[:min(n, 200)].decode(errors='replace')!r}"

    @property
    def authenticated(self):
        """The name of the key that this peer gave, or None."""
        return None if self.rights is None else self.rights.name
