"""The zeroctl session on our own carrier: one node's state machine on the bus. It owns no socket, no clock and no task.

One read event is one call of receive(): every whole frame is handled in C and answered in order into one buffer. Messages
that come with consecutive ids are confirmed with one CONFIRM behind one gate, when the log has them safe.

Bindings are subscriptions on the bus: fan-out ones of their own, queues and durable ones by name. Each tells the session
when it has something, so that a connection with ten thousand of them looks only at those that do.

A body above `hash_inline` is hashed by a thread while the connection is not read: the frame stays where it is, and is
handled again when the digest is there, so that order is kept.
"""

import hashlib
from collections import deque

from cpython.buffer cimport PyBUF_READ
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from headrace.bus cimport ZEROCTL, Bus, Delivery, Subscription
from headrace.log cimport APPEND_OK, APPEND_TOO_LARGE, FLAG_ANSWERS, FLAG_CONFIRMED, Log
from headrace.sessions.logged cimport LoggedSession
from headrace.sessions.rights cimport Keyring, Rights
from headrace.wake cimport Waker
from headrace.wire.bytes cimport View as Slice, be64
from headrace.wire.zeroctl cimport (
    ACK, BIND, BIND_ACK, BIND_DURABLE, BIND_QUEUE, CONFIRM_SIZE, CREDIT, HAS_ON_FINISH, HAS_ON_START, HAS_RESERVED, LEAST_BODY,
    LEAST_HEADER, MESSAGE, MESSAGE_ROOM, MOST_BODY, MOST_HEADER, OPEN, PING, PING_SIZE, PONG, REDELIVERED, REJECT, UNBIND, VERSION,
    WANTS_ACK, WANTS_CONFIRM, RawBind, RawCondition, RawFrame, RawHeader, RawMessage, RawOpen, check_header,
    condition_holds, delivery_size, escape_header, fault, key_valid, may_be_escaped, next_condition, next_frame, parse_ack,
    parse_bind, parse_credit, parse_open, parse_reject, parse_u32, printable, split_message, unescape_header, uuid_valid,
    write_confirm, write_delivery_start, write_ping, write_refuse,
)

from headrace.errors import BusError, LogError
from headrace.nodes.headers import foreign_header
from headrace.wire.zeroctl import encode_welcome

cdef object sha256 = hashlib.sha256

cdef enum:
    SHOWN_CHARS = 100           # of a text in a refusal
    TURN = 64                   # deliveries of one binding before the next one has its turn
    MOST_SEEN = 4096            # deliveries of all bindings in one turn of the loop
    FOREIGN_HEADERS = 512       # headers of other protocols' messages that are remembered for the next binding
    FILTER_CHARS = 255
    LOOK_US = 60_000_000        # between two looks at who has no members
    SILENT_AFTER = 3            # keep-alive intervals after which a peer that says nothing is gone


cdef str shown(const uint8_t* text, Py_ssize_t n):
    cdef str said = text[:n].decode("utf-8", "replace")
    return repr(said if len(said) <= SHOWN_CHARS else said[:SHOWN_CHARS] + "…")


cdef bint offers_service(const uint8_t* filter, Py_ssize_t n) noexcept nogil:
    """Whether a filter can match keys of services: its first word is `service` or a wildcard."""
    cdef Py_ssize_t i = 0
    while i < n and filter[i] != c".":
        i += 1
    return (i == 7 and memcmp(filter, <const char*>"service", 7) == 0) or (
        i == 1 and (filter[0] == c"*" or filter[0] == c"#"))


cdef class Zeroctl:
    def __cinit__(self, Bus bus not None, Keyring keys not None, *, str node_name not None, str node_uuid not None,
                  uint32_t max_header=LEAST_HEADER, uint32_t max_body=LEAST_BODY, str anonymous="",
                  double handshake_timeout=0, double block_timeout=5, double keepalive=0,
                  uint32_t max_bindings=10_000, signing=(), Py_ssize_t hash_inline=1 << 18):
        if not LEAST_HEADER <= max_header <= MOST_HEADER:
            raise ValueError(f"max_header must be from {LEAST_HEADER} to {MOST_HEADER}")
        if not LEAST_BODY <= max_body <= MOST_BODY:
            raise ValueError(f"max_body must be from {LEAST_BODY} to {MOST_BODY}")
        self.bus = bus
        self.keys = keys
        self.node_name = node_name
        self.node_uuid = node_uuid
        self.max_header = max_header
        self.max_body = max_body
        self.max_length = MESSAGE_ROOM + max_header + max_body
        self.anonymous = anonymous
        self.handshake_timeout_us = <int64_t>(handshake_timeout * 1e6)
        self.block_timeout_us = <int64_t>(block_timeout * 1e6)
        self.keepalive_us = <int64_t>(keepalive * 1e6)
        self.max_bindings = max_bindings
        self.hash_inline = hash_inline
        self.signing = Rights("signing", signing)
        self.served = Rights("served")
        self.foreign_headers = {}
        self.keys_of = {}
        self.groups = {
            (subscription.owner, subscription.filter): subscription
            for subscription in bus.subscriptions.values() if subscription.protocol == ZEROCTL and subscription.durable
        }

    def session(self):
        """A session for one new connection."""
        return ZeroctlSession(self)

    def counters(self):
        """All that was counted since the start, by name."""
        return self.counts

    def set_signing(self, filters):
        """Other topics from now on that need a signature."""
        self.signing = Rights("signing", filters)

    cdef bytes key_of(self, uint32_t topic):
        """A topic's key by the map; None if it has none."""
        try:
            return self.keys_of[topic]
        except KeyError:
            self.keys_of[topic] = key = self.map.address(self.bus.log.topic_name(topic))
            return key

    def set_served(self, filters):
        """Other topics from now on whose messages are requests to the gateway's own services."""
        self.served = Rights("served", filters)

    cdef Subscription group(self, tuple identity):
        """The subscription that goes by this name, or None."""
        cdef Subscription subscription = self.groups.get(identity)
        if subscription is not None and subscription.closed:
            del self.groups[identity]
            return None
        return subscription

    cdef int expire(self, int64_t now) except -1:
        """Ends queues that have had no member for durable_grace: the bus keeps those of its own for ever."""
        cdef Subscription subscription
        if now < self.next_look:
            return 0
        self.next_look = now + LOOK_US
        for identity, subscription in list(self.groups.items()):
            if not subscription.closed and subscription.queue and subscription.alone_since and (
                identity[0].startswith("queue:")
                and subscription.alone_since + <int64_t>(self.bus.durable_grace * 1e6) <= now
            ):
                self.bus.unsubscribe(subscription, now)
                self.counts.expired += 1
            if subscription.closed:
                del self.groups[identity]
        return 0

    cdef bytes foreign_header(self, Delivery* delivery):
        """The header of a message that another protocol sent; the last ones are remembered for the next binding."""
        cdef uint64_t offset = delivery.tag - 1
        cdef bytes header = self.foreign_headers.get(offset)
        if header is not None:
            return header
        header = foreign_header(
            self.node_name, self.node_uuid, delivery.view.headers[:delivery.view.headers_len],
            PyMemoryView_FromMemory(<char*>delivery.view.payload, delivery.view.payload_len, PyBUF_READ),
            delivery.view.record.protocol, delivery.view.record.time)
        if len(self.foreign_headers) >= FOREIGN_HEADERS:
            self.foreign_headers.clear()
        self.foreign_headers[offset] = header
        return header


cdef bint printable_only(bytes text) except -1:
    return printable(<const uint8_t*>PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))


cdef class Binding(Waker):
    cdef int wake(self) except -1:
        return self.session.make_due(self)

    cdef bint holds(self, const uint8_t* header, Py_ssize_t n) noexcept:
        """Whether a header is as this binding wants it."""
        cdef Slice rest
        cdef RawCondition condition
        cdef uint8_t i
        rest.data = <const uint8_t*>PyBytes_AS_STRING(self.conditions)
        rest.size = PyBytes_GET_SIZE(self.conditions)
        for i in range(self.condition_count):
            next_condition(&rest, &condition)
            if not condition_holds(&condition, header, n):
                return False
        return True


cdef class ZeroctlSession(LoggedSession):
    def __cinit__(self, Zeroctl shared not None):
        self.shared = shared
        self.bus = shared.bus
        self.node = self.uuid = ""
        self.bindings = {}
        self.due = deque()
        self.message.protocol = ZEROCTL

    cdef Py_ssize_t receive(self, const uint8_t* data, Py_ssize_t n, int64_t now) except -1:
        cdef Py_ssize_t at = 0, used = 0, wanted = 0
        cdef RawFrame frame
        cdef int found
        if not self.bus.log.open:       # the gateway is ending
            self.closing = True
            return n
        if self.began == 0:
            self.began = now
        self.heard = now
        self.pinged = 0
        if self.rights is not None and self.rights_changes != self.rights.changes:
            self.renew_rights(now)
        while not self.closing:
            found = next_frame(data + at, n - at, self.shared.max_length, &frame, &used, &wanted)
            if found == 0:
                self.wanted = wanted
                break
            if found < 0:
                self.shared.counts.bad_frames += 1
                self.refuse(0, 400, f"a length is from 9 to {self.shared.max_length}, a type from 1 to 13")
                self.closing = True
                break
            if self.out.size >= self.high_water:
                self.blocked = self.waits_room = True
                break
            if frame.type == MESSAGE and self.rights is not None:
                self.on_message(&frame, now)
            else:
                self.on_frame(&frame, now)
            if self.blocked:
                break                   # this frame is not done: it comes again
            at += used
        self.say_confirmed()
        self.flush(now)
        return n if self.closing else at

    cdef int on_frame(self, RawFrame* frame, int64_t now) except -1:
        if frame.type == OPEN:
            return self.on_open(frame, now)
        if frame.type == PING:
            self.shared.counts.pings += 1
            self.say_confirmed()
            self.out.commit(write_ping(self.out.reserve(PING_SIZE), PONG, frame.id))
            return 0
        if frame.type == PONG:
            return 0
        if self.rights is None:
            return self.refuse(frame.id, 401, "OPEN comes first")
        if frame.type == ACK:
            return self.on_ack(frame, now)
        if frame.type == CREDIT:
            return self.on_credit(frame, now)
        if frame.type == REJECT:
            return self.on_reject(frame, now)
        if frame.type == BIND:
            return self.on_bind(frame, now)
        if frame.type == UNBIND:
            return self.on_unbind(frame, now)
        return self.refuse(frame.id, 400, "only the gateway sends such frames")

    # --- opening -------------------------------------------------------------------------------------------------------

    cdef int on_open(self, RawFrame* frame, int64_t now) except -1:
        cdef RawOpen wish
        cdef Rights rights
        cdef int bad
        if self.rights is not None:
            return self.refuse(frame.id, 400, "the connection is open already")
        bad = parse_open(frame.payload, frame.size, &wish)
        if bad:
            return self.refuse(frame.id, 400, f"OPEN: {fault(bad)}")
        if wish.version != VERSION:
            return self.refuse(frame.id, 426, f"the version is {VERSION}, not {wish.version}")
        if wish.node.size > 256:
            return self.refuse(frame.id, 400, "OPEN: a node's name has 256 bytes at most")
        if wish.uuid.size and not uuid_valid(wish.uuid.data, wish.uuid.size):
            return self.refuse(frame.id, 400, "OPEN: a node-uuid is a UUID of 32 or 36 characters, or 64 hex digits")
        if wish.key.size == 0 and self.shared.anonymous:
            rights = self.shared.keys.named(self.shared.anonymous)
            self.shared.counts.anonymous += rights is not None
        else:
            rights = self.shared.keys.find(wish.key.data[:wish.key.size])
        if rights is None:
            return self.refuse(frame.id, 401, "a key is needed" if wish.key.size == 0 else "the key is unknown")
        self.rights = rights
        self.rights_changes = rights.changes
        self.memo_topic = 0
        self.node = wish.node.data[:wish.node.size].decode()
        self.uuid = wish.uuid.data[:wish.uuid.size].decode().lower()
        self.name_origin(rights.name)
        self.shared.counts.opened += 1
        self.out.write(encode_welcome(
            self.shared.node_name, self.shared.node_uuid, min(65535, self.shared.keepalive_us // 1_000_000),
            self.shared.max_header, self.shared.max_body, frame.id))
        return 0

    cdef int renew_rights(self, int64_t now) except -1:
        """The configuration was read again: what is remembered of the key's rights is stale. A key that was revoked ends
        the connection; a binding that is not allowed any more ends alone."""
        cdef Binding binding
        self.memo_topic = 0
        self.rights_changes = self.rights.changes
        if self.rights.revoked:
            self.refuse(0, 401, f"the key {self.rights.name!r} is no longer known")
            self.closing = True
            return 0
        for binding in list(self.bindings.values()):
            if not self.rights.may_follow(binding.member.subscription.filter):
                self.refuse(0, 403, f"binding {binding.number}: {self.forbidden('bind', binding.member.subscription.filter)}")
                self.end_binding(binding, now)
        return 0

    def forbidden(self, str right, bytes address):
        return f"key {self.rights.name!r} may not {right} to {shown(<const uint8_t*>PyBytes_AS_STRING(address), len(address))}"

    # --- messages ------------------------------------------------------------------------------------------------------

    cdef int find_key(self, RawFrame* frame, RawMessage* message) except -1:
        """Sets `memo_topic` to a message's key; 1 where it was refused."""
        cdef uint32_t topic
        cdef const char* name = <const char*>message.key
        cdef Py_ssize_t name_size = message.key_size
        cdef bytes mapped
        if not key_valid(message.key, message.key_size):
            self.refuse(
                frame.id, 400, "a routing key has 1 to 255 printable ASCII characters, and no word of it is '*' or '#'")
            return 1
        if self.shared.map is not None:
            mapped = self.shared.map.topic(message.key[:message.key_size])
            if mapped is None:
                self.refuse(frame.id, 400, self.shared.map.refusal(message.key[:message.key_size]))
                return 1
            name = PyBytes_AS_STRING(mapped)
            name_size = PyBytes_GET_SIZE(mapped)
        # The right is asked first: a topic that nobody may publish to is not made.
        topic = self.bus.log.find_topic(name, name_size)
        if not self.rights.may_publish(topic, name, name_size):
            self.refuse(frame.id, 403, self.forbidden("publish", name[:name_size]))
            return 1
        try:
            topic = self.bus.topic_id(name, name_size)
        except BusError as e:
            self.refuse(frame.id, 400, str(e))
            return 1
        memcpy(self.memo, message.key, message.key_size)
        self.memo_size = message.key_size
        self.memo_topic = topic
        self.memo_signed = self.shared.signing.may_publish(topic, name, name_size)
        self.memo_served = self.shared.served.may_publish(topic, name, name_size)
        return 0

    cdef str wrong_path(self, Slice path):
        """Why answers may not go there, or None. The gateway publishes them, on this peer's behalf: so that has to have the
        right itself, and no topic that needs a signature is to be reached without one."""
        cdef uint32_t topic
        if path.size == 0:              # it was not asked for
            return None
        if self.shared.map is not None and self.shared.map.topic(path.data[:path.size]) != path.data[:path.size]:
            return f"answers go to the topic {shown(path.data, path.size)}, which by [[map]] is not the key's; reply.… is"
        topic = self.bus.log.find_topic(<const char*>path.data, path.size)
        if not self.rights.may_publish(topic, <const char*>path.data, path.size):
            return f"{self.forbidden('publish', path.data[:path.size])}, where the answer would go"
        if self.shared.signing.may_publish(topic, <const char*>path.data, path.size):
            return f"answers are not signed, and {shown(path.data, path.size)} needs it"
        return None

    cdef int check_body(self, RawMessage* message, RawHeader* header) except -1:
        """Whether the body is the one that the header's sha256 is of; 2 where the answer is still being computed."""
        cdef bytes digest = self.digest
        if digest is None:
            if (
                message.body_size > self.shared.hash_inline and self.shared.hash_later is not None
                and self.connection is not None
            ):
                if not self.hashing:
                    self.hashing = True
                    self.shared.hash_later(message.body[:message.body_size], self.hashed)
                return 2
            digest = sha256(PyMemoryView_FromMemory(<char*>message.body, message.body_size, PyBUF_READ)).digest()
        return memcmp(PyBytes_AS_STRING(digest), header.sha256, 32) == 0

    def hashed(self, bytes digest not None):
        """The digest of the body that the connection waits with."""
        self.hashing = False
        self.digest = digest
        self.shared.counts.hashed_off_loop += 1
        self.unblock()

    cdef int on_message(self, RawFrame* frame, int64_t now) except -1:
        cdef RawMessage message
        cdef RawHeader header
        cdef bint confirm
        cdef int rc
        rc = split_message(frame.payload, frame.size, &message)
        if rc:
            return self.refuse(frame.id, 400, f"MESSAGE: {fault(rc)}")
        if message.header_size > self.shared.max_header or message.body_size > self.shared.max_body:
            self.shared.counts.too_large += 1
            return self.refuse(
                frame.id, 413,
                f"a header has {self.shared.max_header} bytes at most, and a body {self.shared.max_body}")
        if not (
            self.memo_topic and message.key_size == self.memo_size
            and memcmp(message.key, self.memo, message.key_size) == 0
        ) and self.find_key(frame, &message):
            self.digest = None          # it may have come meanwhile
            return 0
        rc = check_header(message.header, message.header_size, False, &header)
        if rc:
            return self.refuse(frame.id, 422, fault(rc))
        rc = self.check_body(&message, &header)
        if rc == 2:
            self.blocked = True
            return 0
        if rc == 0:
            self.digest = None
            self.shared.counts.bad_digest += 1
            return self.refuse(frame.id, 422, "sha256 is not that of the body")
        if self.memo_signed and self.shared.verifier is not None:
            reason = self.shared.verifier(message.header[:message.header_size], message.body[:message.body_size])
            if reason:
                self.digest = None
                return self.refuse(frame.id, 403, reason)
        confirm = message.flags & WANTS_CONFIRM
        self.message.topic = self.memo_topic
        self.message.flags = FLAG_CONFIRMED if confirm else 0
        if header.has & (HAS_ON_START | HAS_ON_FINISH):
            reason = self.wrong_path(header.on_start) or self.wrong_path(header.on_finish)
            if reason is None:
                self.message.flags |= FLAG_ANSWERS
            elif self.memo_served:
                self.digest = None
                self.shared.counts.return_paths_refused += 1
                return self.refuse(frame.id, 403, reason)
        self.message.correlation = frame.id
        self.message.headers = message.header
        self.message.headers_len = message.header_size
        if header.has & HAS_RESERVED:
            self.message.headers = self.room_for(message.header_size + 8 * <Py_ssize_t>header.keys)
            self.message.headers_len = <uint32_t>escape_header(
                message.header, message.header_size, <uint8_t*>self.message.headers)
        self.message.payload = message.body
        self.message.payload_len = message.body_size
        self.message.now = now
        rc = self.bus.publish_message(&self.message)
        if rc != APPEND_OK:
            self.not_appended(rc, confirm, frame.id, now)
            if not self.blocked:
                self.digest = None
            return 0
        self.digest = None
        self.full_since = 0
        if confirm:
            if self.run_count == 0 or frame.id != self.run_id + 1 or self.run_count == 0xFFFFFFFF:
                self.say_confirmed()
            self.run_id = frame.id
            self.run_count += 1
        return 0

    cdef uint8_t* room_for(self, Py_ssize_t n) except NULL:
        """Memory for a header that is written anew, good until the next call."""
        if self.scratch is None or PyBytes_GET_SIZE(self.scratch) < n:
            self.scratch = PyBytes_FromStringAndSize(NULL, max(n, 4096))
        return <uint8_t*>PyBytes_AS_STRING(self.scratch)

    cdef int say_confirmed(self) except -1:
        """Puts the CONFIRM of the messages that wait for theirs, behind a gate."""
        if self.run_count == 0:
            return 0
        self.confirm_at(self.bus.log.lsn())
        self.gate()
        self.out.commit(write_confirm(self.out.reserve(CONFIRM_SIZE), self.run_id, self.run_count))
        self.shared.counts.confirmed += self.run_count
        self.run_count = 0
        return 0

    cdef int not_appended(self, int rc, bint confirm, uint64_t id, int64_t now) except -1:
        """A log without room stops the reading of this connection; after block_timeout what can be refused is."""
        if rc == APPEND_TOO_LARGE:
            self.shared.counts.too_large += 1
            return self.refuse(id, 413, f"the message is too large: the log takes {self.bus.log.max_record} bytes at most")
        if self.wait_for_room(rc, self.shared.block_timeout_us, now):
            return 0
        if not confirm:
            self.shared.counts.dropped_full += 1
            return 0
        self.shared.counts.refused_full += 1
        return self.refuse(id, 503, f"the message was not taken: {self.why_not_appended()}")

    # --- bindings ------------------------------------------------------------------------------------------------------

    cdef int on_bind(self, RawFrame* frame, int64_t now) except -1:
        cdef RawBind wish
        cdef bytes filter
        cdef int bad = parse_bind(frame.payload, frame.size, &wish)
        if bad:
            return self.refuse(frame.id, 400, f"BIND: {fault(bad)}")
        if wish.binding in self.bindings:
            return self.refuse(frame.id, 409, f"binding {wish.binding} is there already")
        if <uint32_t>len(self.bindings) >= self.shared.max_bindings:
            return self.refuse(frame.id, 400, f"a connection has {self.shared.max_bindings} bindings at most")
        filter = wish.filter.data[:wish.filter.size]
        if not 1 <= wish.filter.size <= FILTER_CHARS or not printable_only(filter):
            return self.refuse(frame.id, 400, f"a filter has 1 to {FILTER_CHARS} printable ASCII characters")
        if wish.flags & BIND_DURABLE and not wish.flags & BIND_ACK:
            return self.refuse(frame.id, 400, "a durable binding is one with acknowledgements")
        if wish.flags & BIND_DURABLE and not wish.flags & BIND_QUEUE and wish.name.size == 0:
            return self.refuse(frame.id, 400, "a durable binding needs a name")
        if self.shared.map is not None:
            mapped = self.shared.map.filter(filter)
            if mapped is None:
                return self.refuse(
                    frame.id, 400, f"{self.shared.map.refusal(filter)}; a filter is for the keys of one rule")
            filter = mapped
        if not self.rights.may_follow(filter):
            return self.refuse(frame.id, 403, self.forbidden("bind", filter))
        self.bus.flush(now)             # a heartbeat right before counts; and what was published is before the binding
        if (
            wish.flags & BIND_QUEUE and offers_service(wish.filter.data, wish.filter.size)
            and self.shared.registry is not None and not (self.uuid and self.shared.registry.knows(self.uuid))
        ):
            return self.refuse(
                frame.id, 409,
                "a transient node cannot offer a service: name the node in OPEN and send its heartbeat to discovery.node.<name>")
        return self.bind(frame, &wish, filter, now)

    cdef int bind(self, RawFrame* frame, RawBind* wish, bytes filter, int64_t now) except -1:
        cdef Binding binding = Binding()
        cdef Subscription subscription = None
        cdef Log log = self.bus.log
        cdef tuple identity = None
        cdef bint ack = wish.flags & BIND_ACK, queue = wish.flags & BIND_QUEUE, durable = wish.flags & BIND_DURABLE
        binding.session = self
        binding.number = wish.binding
        binding.condition_count = wish.condition_count
        binding.conditions = wish.conditions.data[:wish.conditions.size]
        owner = self.rights.name
        if queue or durable:
            # Who asks for anything else under this name gets something of their own.
            kind = f"{'queue' if queue else 'durable:' + owner}:{ack:d}{durable:d}"
            owner = f"{kind}:{wish.name.data[:wish.name.size].decode()}"
            if binding.condition_count:
                owner += f":{sha256(binding.conditions).hexdigest()[:32]}"
            identity = (owner, filter)
            subscription = self.shared.group(identity)
        if subscription is None:
            self.shared.expire(now)
            try:
                subscription = self.bus.subscribe(
                    filter, exact=bool(key_valid(wish.filter.data, wish.filter.size)), at_least_once=ack, durable=durable,
                    queue=queue, confirm_all=ack, owner=owner, protocol=ZEROCTL, now=now)
            except (BusError, ValueError) as e:
                return self.refuse(frame.id, 400, str(e))
            except LogError as e:
                return self.refuse(frame.id, 503, f"the binding was not made: {e}")
            if identity is not None:
                self.shared.groups[identity] = subscription
            if durable:
                self.confirm_at(log.lsn())
        binding.member = subscription.join(binding, -1 if wish.credit == 0xFFFFFFFF else <int64_t>wish.credit, now)
        self.bindings[binding.number] = binding
        self.shared.counts.bound += 1
        self.gate()
        self.done(frame.id)
        return self.make_due(binding)

    cdef int on_unbind(self, RawFrame* frame, int64_t now) except -1:
        cdef uint32_t number = 0
        cdef Binding binding
        cdef Subscription subscription
        if parse_u32(frame.payload, frame.size, &number):
            return self.refuse(frame.id, 400, "UNBIND has 4 bytes")
        binding = self.bindings.get(number)
        if binding is None:
            return self.refuse(frame.id, 404, f"there is no binding {number}")
        subscription = binding.member.subscription
        self.end_binding(binding, now)
        if subscription.durable and not subscription.queue and not subscription.closed:
            self.bus.unsubscribe(subscription, now)
        self.shared.counts.unbound += 1
        return self.done(frame.id)

    cdef int end_binding(self, Binding binding, int64_t now) except -1:
        del self.bindings[binding.number]
        if not binding.member.gone:
            binding.member.leave(now)
        return 0

    cdef int make_due(self, Binding binding) except -1:
        """Looks at a binding in the next turn."""
        if not binding.due:
            binding.due = True
            self.due.append(binding)
        return self.wake()

    cdef int on_ack(self, RawFrame* frame, int64_t now) except -1:
        cdef uint32_t number = 0, count = 0, i
        cdef const uint8_t* tags = NULL
        cdef uint64_t tag, unknown = 0
        cdef bint any_unknown = False
        cdef Binding binding
        if parse_ack(frame.payload, frame.size, &number, &tags, &count):
            return self.refuse(frame.id, 400, "ACK has 4 bytes and tags of 8 bytes each, at least one")
        binding = self.bindings.get(number)
        if binding is None:
            return self.refuse(frame.id, 404, f"there is no binding {number}")
        for i in range(count):
            tag = be64(tags + 8 * i)
            if (
                tag and binding.member.subscription.may_settle(binding.member, tag - 1)
                and binding.member.subscription.ack_offset(tag - 1)
            ):
                self.shared.counts.acks += 1
            else:
                unknown = tag
                any_unknown = True
        self.make_due(binding)          # there may be room in flight again
        if any_unknown:
            return self.refuse(frame.id, 404, f"no delivery {unknown} of binding {number} waits for an acknowledgement")
        return 0

    cdef int on_reject(self, RawFrame* frame, int64_t now) except -1:
        cdef uint32_t number = 0, delay = 0, count = 0, i
        cdef const uint8_t* tags = NULL
        cdef uint64_t tag, unknown = 0
        cdef bint any_unknown = False
        cdef Binding binding
        if parse_reject(frame.payload, frame.size, &number, &delay, &tags, &count):
            return self.refuse(frame.id, 400, "REJECT has 8 bytes and tags of 8 bytes each, at least one")
        binding = self.bindings.get(number)
        if binding is None:
            return self.refuse(frame.id, 404, f"there is no binding {number}")
        for i in range(count):
            tag = be64(tags + 8 * i)
            if (
                tag and binding.member.subscription.may_settle(binding.member, tag - 1)
                and binding.member.subscription.reject(tag, delay=delay / 1000.0, now=now)
            ):
                self.shared.counts.rejects += 1
            else:
                unknown = tag
                any_unknown = True
        self.make_due(binding)
        if any_unknown:
            return self.refuse(frame.id, 404, f"no delivery {unknown} of binding {number} waits for an acknowledgement")
        return 0

    cdef int on_credit(self, RawFrame* frame, int64_t now) except -1:
        cdef uint32_t number = 0, more = 0
        cdef Binding binding
        if parse_credit(frame.payload, frame.size, &number, &more):
            return self.refuse(frame.id, 400, "CREDIT has 8 bytes")
        binding = self.bindings.get(number)
        if binding is None:
            return self.refuse(frame.id, 404, f"there is no binding {number}")
        if more == 0xFFFFFFFF:
            binding.member.credits = -1
        elif binding.member.credits >= 0:
            binding.member.credits += more
        return self.make_due(binding)

    # --- deliveries ----------------------------------------------------------------------------------------------------

    cdef int deliver(self, int64_t now, Py_ssize_t room) except -1:
        cdef Py_ssize_t limit = self.out.size + room
        cdef Binding binding
        cdef Delivery delivery
        cdef int served, seen = 0
        if self.rights is None or not self.bus.log.open:
            return 0
        if self.rights_changes != self.rights.changes:
            self.renew_rights(now)
            if self.closing:
                return 0
        while self.due:
            binding = self.due[0]
            if binding.number not in self.bindings or self.bindings[binding.number] is not binding:
                binding.due = False
                self.due.popleft()
                continue
            if binding.member.gone:     # another connection took over a durable binding, or it ended
                binding.due = False
                self.due.popleft()
                self.end_binding(binding, now)
                self.refuse(0, 410, f"binding {binding.number} was taken over by another connection, or has ended")
                continue
            if seen >= MOST_SEEN:       # what is passed by fills nothing, and takes time that is the others' too
                self.more = True
                break
            served = 0
            while served < TURN and self.out.size < limit:
                if not binding.member.subscription.take(binding.member, now, &delivery):
                    break
                self.put_delivery(binding, &delivery, now)
                served += 1
                seen += 1
            else:
                if self.out.size >= limit:
                    self.more = True
                    break
                self.due.rotate(-1)
                continue
            binding.due = False
            self.due.popleft()
        self.bus.flush(now)
        return 0

    cdef int put_delivery(self, Binding binding, Delivery* delivery, int64_t now) except -1:
        """Writes one delivery, or deals with one that this peer is not to have."""
        cdef Log log = self.bus.log
        cdef Zeroctl shared = self.shared
        cdef Subscription subscription = binding.member.subscription
        cdef const uint8_t* key = <const uint8_t*>log.names[delivery.view.record.topic].text
        cdef Py_ssize_t key_size = log.names[delivery.view.record.topic].length
        cdef const uint8_t* header = delivery.view.headers
        cdef Py_ssize_t header_size = delivery.view.headers_len
        cdef bytes made, mapped
        cdef uint8_t* out
        cdef bint ours = delivery.view.record.protocol == ZEROCTL
        if ours and key_size >= 5 and memcmp(key, <const char*>"dead.", 5) == 0:
            ours = False                # its header may have been too large to be kept
        if shared.map is not None:
            mapped = shared.key_of(delivery.view.record.topic)
            key = NULL if mapped is None else <const uint8_t*>PyBytes_AS_STRING(mapped)
            key_size = 0 if mapped is None else PyBytes_GET_SIZE(mapped)
        if not key_valid(key, key_size):
            shared.counts.no_counterpart += 1
            return self.pass_by(binding, delivery.tag, delivery.confirm)
        if not ours:
            made = shared.foreign_header(delivery)
            shared.counts.foreign += 1
            header = <const uint8_t*>PyBytes_AS_STRING(made)
            header_size = PyBytes_GET_SIZE(made)
        if may_be_escaped(header, header_size):
            out = self.room_for(header_size)
            header_size = unescape_header(header, header_size, out)
            header = out
        if binding.condition_count and not binding.holds(header, header_size):
            shared.counts.filtered += 1
            return self.pass_by(binding, delivery.tag, delivery.confirm)
        if header_size > MOST_HEADER or delivery.view.payload_len > shared.max_body:
            shared.counts.too_large += 1
            if delivery.confirm:
                subscription.bury_tag(delivery.tag, now, "too large for zeroctl")
            return 0
        out = self.out.reserve(delivery_size(<uint8_t>key_size, header_size, delivery.view.payload_len))
        out += write_delivery_start(
            out, delivery.tag, binding.number,
            (WANTS_ACK if delivery.confirm else 0) | (REDELIVERED if delivery.deliveries > 1 else 0),
            <uint8_t>min(delivery.deliveries, 255), key, <uint8_t>key_size, <uint32_t>header_size,
            <uint32_t>delivery.view.payload_len)
        memcpy(out, header, header_size)
        memcpy(out + header_size, delivery.view.payload, delivery.view.payload_len)
        self.out.commit(delivery_size(<uint8_t>key_size, header_size, delivery.view.payload_len))
        return 0

    cdef int pass_by(self, Binding binding, uint64_t tag, bint confirm) except -1:
        """A message that this binding has nothing to do with: it costs no credit, and is done with."""
        if binding.member.credits >= 0:
            binding.member.credits += 1
        if confirm:
            binding.member.subscription.ack_offset(tag - 1)
        return 0

    # --- time and ends -------------------------------------------------------------------------------------------------

    cdef int tick(self, int64_t now) except -1:
        cdef int64_t every = self.shared.keepalive_us
        if not self.bus.log.open:
            return 0
        self.shared.expire(now)
        if self.began == 0:
            self.began = self.heard = now
        if self.rights is not None and self.rights_changes != self.rights.changes:
            self.renew_rights(now)
        if (
            self.rights is None and not self.closing and self.shared.handshake_timeout_us
            and now - self.began > self.shared.handshake_timeout_us
        ):
            self.shared.counts.handshakes_late += 1
            self.closing = True
        if self.blocked:
            self.heard = now            # who is not read cannot speak
            self.stop_waiting(self.shared.block_timeout_us, now)     # to be refused or dropped
        elif every and self.rights is not None and not self.closing and now - self.heard >= every:
            if now - self.heard >= SILENT_AFTER * every:
                self.shared.counts.silent += 1
                self.closing = True
            elif self.pinged == 0 or now - self.pinged >= every:
                self.pinged = now
                self.out.commit(write_ping(self.out.reserve(PING_SIZE), PING, 0))
        return self.check_log()

    cdef int drain(self, int64_t now) except -1:
        self.check_log()
        if not self.closing:
            self.refuse(0, 503, "the gateway is stopping")
        return 0

    cdef int unconfirmed(self) except -1:
        self.closing = True
        self.shared.counts.unconfirmed += 1
        return 0

    cdef int lost(self, int64_t now) except -1:
        cdef Binding binding
        if self.bus.log.open:           # else nothing is kept for anybody any more
            for binding in list(self.bindings.values()):
                self.end_binding(binding, now)
            self.bus.flush(now)
        self.bindings.clear()
        self.due.clear()
        return 0

    # --- answers -------------------------------------------------------------------------------------------------------

    cdef int done(self, uint64_t id) except -1:
        self.say_confirmed()
        self.out.commit(write_confirm(self.out.reserve(CONFIRM_SIZE), id, 1))
        return 0

    cdef int refuse(self, uint64_t id, uint16_t code, str text) except -1:
        cdef bytes said = text.encode()[:65535]
        cdef Counts* counts = &self.shared.counts
        self.say_confirmed()
        if code == 400:
            counts.refused_400 += 1
        elif code == 401:
            counts.refused_401 += 1
        elif code == 403:
            counts.refused_403 += 1
        elif code == 404:
            counts.refused_404 += 1
        elif code == 409:
            counts.refused_409 += 1
        elif code == 410:
            counts.refused_410 += 1
        elif code == 413:
            counts.refused_413 += 1
        elif code == 422:
            counts.refused_422 += 1
        elif code == 426:
            counts.refused_426 += 1
        else:
            counts.refused_503 += 1
        self.out.commit(write_refuse(
            self.out.reserve(17 + PyBytes_GET_SIZE(said)), id, code, PyBytes_AS_STRING(said),
            <uint16_t>PyBytes_GET_SIZE(said)))
        return 0

    @property
    def opened(self):
        """The name of the key that this peer has the rights of, or None."""
        return None if self.rights is None or self.rights.revoked else self.rights.name
