"""The BlipMQ session: one peer's state machine on the bus. It owns no socket, no clock and no task.

One read event is one call of receive(): every whole frame is handled in C and answered in order into one buffer. A
publish goes from the peer's bytes into the log with one copy and no Python object.

What waits for the log's safe end, and how:
    PONG behind QoS 1 publishes     leaves behind a gate in the output, so that parsing goes on
    ACK of a SUBSCRIBE              the same: the subscription, or at least its id, is in the log
    POLL behind publishes           is not parsed until they are safe: its answer depends on them

Peers may send what they like: a frame is answered only while less than high_water bytes wait to be read, so that no
kind of request can make the output grow.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport UINT16_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from headrace.bus cimport BLIPMQ, Bus, Delivery, Subscription
from headrace.log cimport APPEND_OK, APPEND_TOO_LARGE, FLAG_CONFIRMED, Log
from headrace.sessions.logged cimport LoggedSession
from headrace.sessions.rights cimport Keyring, Rights
from headrace.wire.blipmq cimport (
    ACK, ACK_SIZE, AUTH, HELLO, MAX_LENGTH, MIN_LENGTH, PING, POLL, PONG_SIZE, PUBLISH, SUBSCRIBE, VERSION, RawFrame,
    RawPublish, RawSubscribe, nack_size, next_frame, parse_ack, parse_auth, parse_hello, parse_poll, parse_subscribe,
    publish_size, split_publish, write_ack, write_nack, write_pong, write_publish,
)
from headrace.wire.bytes cimport View as Slice, utf8_valid

from headrace.errors import BusError, LogError


cdef enum:
    SHOWN_CHARS = 100       # of a topic in an error's text


cdef class Share:
    pass


cdef class Blipmq:
    def __cinit__(self, Bus bus not None, Keyring keys not None, *, uint32_t max_length=MAX_LENGTH,
                  double handshake_timeout=0, double block_timeout=5, uint32_t max_subscriptions=10_000):
        if not MIN_LENGTH <= max_length <= MAX_LENGTH:
            raise ValueError(f"max_length must be from {MIN_LENGTH} to {MAX_LENGTH}")
        self.bus = bus
        self.keys = keys
        self.max_length = max_length
        self.handshake_timeout_us = <int64_t>(handshake_timeout * 1e6)
        self.block_timeout_us = <int64_t>(block_timeout * 1e6)
        self.max_subscriptions = max_subscriptions
        self.shares = {}
        self.ids_known = bus.ids_written    # opening a log syncs it

    def session(self):
        """A session for one new connection."""
        return BlipmqSession(self)

    def counters(self):
        """All that was counted since the start, by name."""
        return self.counts


cdef class BlipmqSession(LoggedSession):
    def __cinit__(self, Blipmq shared not None):
        self.shared = shared
        self.bus = shared.bus
        self.used = {}
        self.message.protocol = BLIPMQ

    cdef Py_ssize_t receive(self, const uint8_t* data, Py_ssize_t n, int64_t now) except -1:
        cdef Py_ssize_t at = 0, used = 0, wanted = 0
        cdef RawFrame frame
        cdef int found
        if not self.bus.log.open:       # the gateway is ending
            self.closing = True
            return n
        if self.began == 0:
            self.began = now
        if self.rights is not None and self.rights_changes != self.rights.changes:
            self.renew_rights(now)
        while not self.closing:
            found = next_frame(data + at, n - at, self.shared.max_length, &frame, &used, &wanted)
            if found == 0:
                self.wanted = wanted
                break
            if found < 0:
                self.shared.counts.bad_frames += 1
                self.closing = True
                break
            if self.out.size >= self.high_water:
                self.blocked = self.waits_room = True
                break
            if frame.type == PUBLISH and self.rights is not None:
                self.on_publish(&frame, now)
            else:
                self.on_frame(&frame, now)
            if self.blocked:
                break                   # this frame is not done: it comes again
            at += used
        self.flush(now)
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
        self.rights_changes = self.rights.changes
        self.name_origin(self.rights.name)
        self.shared.counts.authenticated += 1
        return self.ack(frame.correlation, 0)

    cdef int renew_rights(self, int64_t now) except -1:
        """The configuration was read again: what is remembered of the key's rights is stale. A key that was revoked is as
        good as none: its peer may authenticate again, and until then is as gone as one that hung up."""
        self.memo_topic = 0
        self.last_id = 0
        self.rights_changes = self.rights.changes
        if self.rights.revoked:
            self.rights = None
            self.began = now
            self.stop_using_all(now)
        return 0

    # --- publishing ----------------------------------------------------------------------------------------------------

    cdef int on_publish(self, RawFrame* frame, int64_t now) except -1:
        cdef RawPublish publish
        cdef const char* name
        cdef Py_ssize_t name_size
        cdef bytes mapped
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
            name = <const char*>publish.topic
            name_size = publish.topic_size
            if self.shared.map is not None:
                mapped = self.topic_of(publish.topic, publish.topic_size)
                if mapped is None:
                    return self.nack(
                        frame.correlation, 400, self.shared.map.refusal(publish.topic[:publish.topic_size]))
                name = PyBytes_AS_STRING(mapped)
                name_size = PyBytes_GET_SIZE(mapped)
            # The right is asked first: a topic that nobody may publish to is not made.
            topic = self.bus.log.find_topic(name, name_size)
            if not self.rights.may_publish(topic, name, name_size):
                return self.nack(frame.correlation, 401, self.forbidden("publish", <const uint8_t*>name, name_size))
            try:
                topic = self.bus.topic_id(name, name_size)
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
            self.confirm_at(self.bus.log.lsn())
        else:
            self.unfenced = True
        return 0

    cdef bytes topic_of(self, const uint8_t* address, Py_ssize_t n):
        """The bus's topic for one that a peer wrote; None if it has none."""
        return address[:n] if self.shared.map is None else self.shared.map.topic(address[:n])

    cdef int not_appended(self, int rc, uint8_t qos, uint64_t correlation, int64_t now) except -1:
        """A log without room stops the reading of this connection; after block_timeout what can be refused is."""
        if rc == APPEND_TOO_LARGE:
            self.shared.counts.too_large += 1
            return self.nack(correlation, 400, f"message too large: the log takes {self.bus.log.max_record} bytes at most")
        if self.wait_for_room(rc, self.shared.block_timeout_us, now):
            return 0
        if qos == 0:
            self.shared.counts.dropped_full += 1
            return 0
        self.shared.counts.refused_full += 1
        return self.nack(correlation, 500, f"durable publish failed: {self.why_not_appended()}")

    # --- subscribing ---------------------------------------------------------------------------------------------------

    cdef int on_subscribe(self, RawFrame* frame, int64_t now) except -1:
        cdef RawSubscribe wish
        cdef Subscription subscription
        cdef bytes name
        cdef uint32_t topic
        cdef Log log = self.bus.log
        if parse_subscribe(frame.payload, frame.size, &wish) != 0:
            return self.nack(frame.correlation, 400, "invalid SUBSCRIBE payload")
        if wish.topic_size == 0:
            return self.nack(frame.correlation, 400, "empty topic")
        if wish.qos > 1:
            return self.nack(frame.correlation, 400, "invalid QoS value")
        name = self.topic_of(wish.topic, wish.topic_size)
        if name is None:
            return self.nack(frame.correlation, 400, self.shared.map.refusal(wish.topic[:wish.topic_size]))
        topic = log.find_topic(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
        if not self.rights.may_subscribe(topic, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name)):
            return self.nack(
                frame.correlation, 401,
                self.forbidden("subscribe", <const uint8_t*>PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name)))
        if <uint32_t>len(self.used) >= self.shared.max_subscriptions:
            return self.nack(
                frame.correlation, 400, f"too many subscriptions: a connection has {self.shared.max_subscriptions} at most")
        self.bus.flush(now)             # what this connection published before is before the subscription's beginning
        try:
            subscription = self.bus.subscribe(
                name, exact=True, at_least_once=wish.qos == 1, durable=wish.qos == 1,
                owner=self.rights.name, protocol=BLIPMQ, now=now)
        except BusError as e:
            return self.nack(frame.correlation, 400, str(e))
        except LogError as e:
            return self.nack(frame.correlation, 500, f"subscribe failed: {e}")
        self.use(subscription, now)
        # An id that is told is never given out again, so the log must have the block of ids that it is from.
        if self.shared.ids_known != self.bus.ids_written:
            self.shared.ids_known = self.bus.ids_written
            self.shared.ids_lsn = log.lsn()
        self.confirm_at(log.lsn() if wish.qos else self.shared.ids_lsn)
        self.gate()
        return self.ack(frame.correlation, subscription.id)

    cdef Subscription own(self, uint64_t id):
        """The subscription with this id, if it is this key's; another key's is as good as none."""
        cdef Subscription subscription = self.bus.find(id)
        if subscription is None or subscription.protocol != BLIPMQ or subscription.owner != self.rights.name:
            return None
        return subscription

    cdef Share use(self, Subscription subscription, int64_t now):
        """Makes this connection one of those that the subscription is kept for."""
        cdef Share share = self.shared.shares.get(subscription.id)
        if share is None or share.member.gone:
            share = Share()
            share.member = subscription.join(None, -1, now)
            share.address = subscription.filter
            if self.shared.map is not None:
                share.address = self.shared.map.address(subscription.filter)
                if share.address is not None and PyBytes_GET_SIZE(share.address) > UINT16_MAX:
                    share.address = None    # a PUBLISH cannot say it
            self.shared.shares[subscription.id] = share
        share.users += 1
        self.used[subscription.id] = share
        return share

    cdef int stop_using(self, uint64_t id, int64_t now) except -1:
        cdef Share share = self.used.pop(id)
        share.users -= 1
        if share.users == 0:
            if self.shared.shares.get(id) is share:
                del self.shared.shares[id]
            share.member.leave(now)
        return 0

    cdef int stop_using_all(self, int64_t now) except -1:
        self.last_id = 0
        self.last_share = None
        for id in list(self.used):
            self.stop_using(id, now)
        return 0

    cdef Share share_of(self, uint64_t id, int64_t now):
        """This connection's part in a subscription of its key, or None."""
        cdef Subscription subscription
        cdef Share share
        if id == self.last_id and not self.last_share.member.gone:
            return self.last_share
        share = self.used.get(id)
        if share is not None and share.member.gone:
            self.stop_using(id, now)
            share = None
        if share is None:
            # Perhaps one that this key made on another connection, or before a restart: it goes on here.
            subscription = self.own(id)
            if subscription is None:
                return None
            share = self.use(subscription, now)
        subscription = share.member.subscription
        self.last_id = id
        self.last_share = share
        self.last_allowed = self.rights.may_subscribe(
            subscription.topic, PyBytes_AS_STRING(subscription.filter), PyBytes_GET_SIZE(subscription.filter))
        return share

    cdef int on_poll(self, RawFrame* frame, int64_t now) except -1:
        cdef uint64_t id = 0
        cdef Share share
        cdef Delivery delivery
        cdef Subscription subscription
        cdef const char* topic
        cdef uint16_t topic_size
        cdef bytes name
        cdef Py_ssize_t size
        cdef Log log = self.bus.log
        if parse_poll(frame.payload, frame.size, &id) != 0:
            return self.nack(frame.correlation, 400, "invalid POLL payload")
        if id == 0:
            return self.nack(frame.correlation, 400, "subscription_id must be non-zero")
        share = self.share_of(id, now)
        if share is None:
            return 0
        subscription = share.member.subscription
        name = subscription.filter
        if not self.last_allowed:
            return self.nack(
                frame.correlation, 401,
                self.forbidden("subscribe", <const uint8_t*>PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name)))
        if share.address is None:       # of before the map was another one
            return self.nack(frame.correlation, 400, f"no rule of [[map]] has an address for {name.decode()!r:.120}")
        topic = PyBytes_AS_STRING(share.address)
        topic_size = <uint16_t>PyBytes_GET_SIZE(share.address)
        log.make_readable()             # a poll sees what this connection published just before it
        if self.unfenced and subscription.at_least_once:
            self.unfenced = False       # and what is delivered at least once follows the safe end
            self.confirm_at(log.lsn())
        if self.confirmed_lsn > log.safe_lsn():
            self.bus.flush(now)
            log.ask_sync()
            self.blocked = True
            self.waits_safe = self.confirmed_lsn
            return 0
        self.shared.counts.polls += 1
        while subscription.take(share.member, now, &delivery):
            size = publish_size(topic_size, delivery.view.payload_len)
            if size - 4 > self.shared.max_length:
                self.shared.counts.too_large += 1
                if delivery.confirm:
                    subscription.bury_tag(delivery.tag, now, "too large for a BlipMQ frame")
                continue
            self.out.commit(write_publish(
                self.out.reserve(size), delivery.tag if delivery.confirm else frame.correlation, delivery.confirm,
                topic, topic_size, delivery.view.payload, delivery.view.payload_len))
            return 0
        self.shared.counts.polls_empty += 1
        return 0

    cdef int on_ack(self, RawFrame* frame, int64_t now) except -1:
        cdef uint64_t id = 0
        cdef Subscription subscription
        if parse_ack(frame.payload, frame.size, &id) != 0:
            return self.nack(frame.correlation, 400, "invalid ACK payload")
        if id == 0:
            return self.nack(frame.correlation, 400, "subscription_id must be non-zero")
        if id == self.last_id and not self.last_share.member.gone:
            subscription = self.last_share.member.subscription
        else:
            subscription = self.own(id)
        if subscription is None or frame.correlation == 0 or not subscription.ack_offset(frame.correlation - 1):
            return self.nack(frame.correlation, 404, "unknown subscription or delivery tag")
        self.shared.counts.acks += 1
        return 0

    cdef int on_ping(self, RawFrame* frame, int64_t now) except -1:
        self.shared.counts.pings += 1
        self.gate()
        self.out.commit(write_pong(self.out.reserve(PONG_SIZE), frame.correlation))
        return 0

    # --- time and ends -------------------------------------------------------------------------------------------------

    cdef int tick(self, int64_t now) except -1:
        if not self.bus.log.open:
            return 0
        if self.began == 0:
            self.began = now
        if self.rights is not None and self.rights_changes != self.rights.changes:
            self.renew_rights(now)
        if (
            self.rights is None and not self.closing and self.shared.handshake_timeout_us
            and now - self.began > self.shared.handshake_timeout_us
        ):
            self.shared.counts.handshakes_late += 1
            self.closing = True
        self.stop_waiting(self.shared.block_timeout_us, now)     # to be refused or dropped
        return self.check_log()

    cdef int drain(self, int64_t now) except -1:
        return self.check_log()

    cdef int unconfirmed(self) except -1:
        self.closing = True
        self.shared.counts.unconfirmed += 1
        return 0

    cdef int lost(self, int64_t now) except -1:
        if self.bus.log.open:           # else nothing is kept for anybody any more
            self.stop_using_all(now)
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
        cdef str shown = topic[:n].decode()
        if len(shown) > SHOWN_CHARS:
            shown = shown[:SHOWN_CHARS] + "…"
        return f"key {self.rights.name!r} may not {right} to {shown!r}"

    @property
    def authenticated(self):
        """The name of the key that this peer gave, or None."""
        return None if self.rights is None or self.rights.revoked else self.rights.name
