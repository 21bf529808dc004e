"""The Felix sessions: one for each stream of a QUIC connection, state machines on the bus. They own no socket, no clock
and no task.

A stream that the client opened is a FelixStream: requests in, answers out. A subscription is a FelixEvents, on a stream
of its own that the gateway opens. What they have in common is a FelixPeer, one for each connection.

Each request shows which dialect its sender speaks: a numeric id or a `cache` field is the reference's, anything else
the specification's; docs/protocols/felix.md has the table.

What waits for the log's safe end: the answer to an acknowledged publish leaves behind a gate in the output, so that
parsing goes on. Peers may send what they like: a request is answered only while less than high_water bytes wait to be
read, so that no kind of request can make the output grow.

A publish goes from the peer's bytes into the log with one copy, which decodes the Base64 that JSON has, and with no
Python object for any payload. A batch is appended as a whole or not at all, with nothing between its messages.
"""

from collections import OrderedDict

from cpython.buffer cimport PyBUF_READ, PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memchr, memcmp, memcpy

from headrace.bus cimport FELIX, Bus, Delivery, Subscription
from headrace.log cimport APPEND_OK, APPEND_TOO_LARGE, FLAG_CONFIRMED, RECORD_HEADER, Log, padded
from headrace.session cimport Session
from headrace.sessions.logged cimport LoggedSession
from headrace.sessions.rights cimport Rights
from headrace.wire.bytes cimport View, be16, be32, put_be32, put_be64, utf8_valid, view_of
from headrace.wire.felix cimport (
    BAD_BASE64, BAD_LENGTH, BAD_MAGIC, EVENT_BATCH, HEADER_SIZE, MAX_LENGTH, PUBLISH_BATCH, RawBatch, RawFrame, check_items,
    enter_list, hr_b64_decode, hr_b64_encode, hr_b64_known_size, hr_b64_length, hr_b64_size, next_frame, next_in_list,
    next_item, next_text, parse_batch, write_header, write_item,
)

from msgspec import UNSET, Raw

from headrace.errors import BusError, LogError
from headrace.wire import felix_json
from headrace.wire.felix import address_of, topic_of
from headrace.wire.felix_json import (
    CacheGet, CacheOk, CachePut, CacheValue, Error, EventStreamHello, Ok, Publish, PublishBatch, PublishError, PublishOk,
    Subscribe, Subscribed, encode, quote, unescape,
)

TOO_LARGE = "the answer is too large for a frame"


cdef enum:
    SHOWN_CHARS = 100           # of a name in an error's text
    MEMO_TOPICS = 4096          # addresses whose topic a connection remembers
    # What a cached value costs beside its bytes and its key's: tuples, the dict's slot, objects' headers.
    ENTRY_OVERHEAD = 400
    NAME_ALLOWANCE = 256        # of a topic's and an origin's control records, beside their texts


class Refused(Exception):
    """A request that cannot be done; the text is for its sender. `count` names what counts it."""

    def __init__(self, text, count="refused"):
        super().__init__(text)
        self.count = count


cdef str shown(str name):
    return name if len(name) <= SHOWN_CHARS else name[:SHOWN_CHARS] + "…"


cdef inline bint given(value):
    return value is not UNSET and value is not None


cdef inline bint numeric(value):
    return isinstance(value, int)


def cache_value(key, value, scope, id):
    """The answer to a cache_get."""
    if scope[0] is None:
        return CacheValue(key, value, request_id=id)
    return CacheValue(key, value, *scope, id)


# --- what all share --------------------------------------------------------------------------------------------------

cdef class Cache:
    """Values by scope and key, bounded in number and bytes. What was used least recently goes first; what has expired goes
    when it is asked for."""

    def __init__(self, uint64_t max_entries, uint64_t max_bytes):
        self.entries = OrderedDict()
        self.max_entries = max_entries
        self.max_bytes = max_bytes

    def __len__(self):
        return len(self.entries)

    cdef int drop(self, tuple key, object entry) except -1:
        del self.entries[key]
        self.bytes -= <uint64_t>cost_of(key, entry[0])
        return 0

    cdef int put(self, tuple key, bytes value, int64_t deadline, Counts* counts) except -1:
        cdef uint64_t cost = cost_of(key, value)
        entry = self.entries.get(key)
        if entry is not None:
            self.drop(key, entry)
        if cost > self.max_bytes:
            counts.cache_refused += 1
            raise Refused(f"the value is too large: the cache takes {self.max_bytes} bytes in all")
        self.entries[key] = (value, deadline)
        self.bytes += cost
        while <uint64_t>len(self.entries) > self.max_entries or self.bytes > self.max_bytes:
            oldest, entry = self.entries.popitem(False)
            self.bytes -= <uint64_t>cost_of(oldest, entry[0])
            counts.cache_evicted += 1
        return 0

    cdef object get(self, tuple key, int64_t now, Counts* counts):
        entry = self.entries.get(key)
        if entry is None:
            counts.cache_misses += 1
            return None
        if entry[1] <= now:
            self.drop(key, entry)
            counts.cache_expired += 1
            counts.cache_misses += 1
            return None
        counts.cache_hits += 1
        self.entries.move_to_end(key)   # it was used last
        return entry[0]


cdef uint64_t cost_of(tuple key, bytes value):
    cdef uint64_t cost = ENTRY_OVERHEAD + PyBytes_GET_SIZE(value)
    for part in key:
        if part is not None:
            cost += <uint64_t>len(part)
    return cost


cdef class Felix:
    def __cinit__(self, Bus bus not None, *, uint32_t max_length=MAX_LENGTH, double block_timeout=5,
                  uint32_t max_subscriptions=1024, uint64_t cache_entries=100_000, uint64_t cache_bytes=64 << 20):
        self.bus = bus
        self.cache = Cache(cache_entries, cache_bytes)
        self.max_length = max_length
        self.block_timeout_us = <int64_t>(block_timeout * 1e6)
        self.max_subscriptions = max_subscriptions
        self.batch_events = 64
        self.batch_bytes = 256 * 1024
        self.streams = set()
        self.caches = set()
        self.next_subscription = 1
        self.topics_seen = 1            # 0 is no topic

    def register(self, bint strict, streams, caches):
        """Which streams and caches there are, by tenant, namespace and name. Unless it is strict, others are made when they
        are first used."""
        self.strict = strict
        self.streams = set(streams)
        self.caches = set(caches)
        self.registry_changes += 1

    def peer(self, str address not None, Rights rights, opener):
        """A new connection. `opener` is called with the session of each event stream that it gets."""
        return FelixPeer(self, address, rights, opener)

    def counters(self):
        """All that was counted since the start, by name."""
        cdef Log log = self.bus.log
        while log.open and self.topics_seen <= log.names_count:
            name = log.topic_name(self.topics_seen) if log.names[self.topics_seen].text != NULL else None
            if name is not None and not self.has_address(name):
                self.topics_without_address += 1
            self.topics_seen += 1
        return {**self.counts, "topics_without_address": self.topics_without_address}

    def has_address(self, bytes topic not None):
        """Whether a topic is one that Felix's peers can name."""
        if self.map is None:
            return address_of(topic.decode("utf-8", "replace")) is not None
        return self.map.address(topic) is not None

    def topic_of(self, str tenant not None, str namespace not None, str stream not None):
        """The topic of a stream; ValueError if it has none."""
        if self.map is None:
            return topic_of(tenant, namespace, stream)
        address = f"{tenant}/{namespace}/{stream}".encode()
        topic = None if "/" in tenant or "/" in namespace else self.map.topic(address)
        if topic is None:
            raise ValueError(self.map.refusal(address))
        return topic.decode()

    def gauges(self):
        """What is held now, by name."""
        return {"cache_entries": len(self.cache.entries), "cache_bytes": self.cache.bytes}


cdef class FelixPeer:
    def __cinit__(self, Felix shared not None, str address not None, Rights rights, opener):
        self.shared = shared
        self.address = address
        self.opener = opener
        self.topics = {}
        self.subscriptions = {}
        self.set_rights(rights, address)

    def __dealloc__(self):
        free(self.origin)               # what Log.close_origin() does; the log may be gone already

    def set_rights(self, Rights rights, str address not None):
        """Who it is now: the network knows its new address, or the configuration was read again."""
        cdef bytes source
        self.rights = rights
        self.address = address
        self.topics.clear()
        self.generation += 1
        self.rights_changes = rights.changes if rights is not None else 0
        if self.origin != NULL:
            free(self.origin)
            self.origin = NULL
        source = f"{rights.name if rights is not None else '?'}@{address}".encode()
        self.origin = self.shared.bus.log.open_origin(source)

    @property
    def name(self):
        """The name of the rights that it has, or None."""
        return None if self.rights is None or self.rights.revoked else self.rights.name

    cdef int renew(self) except -1:
        """Forgets what is no longer sure."""
        cdef uint32_t changes = self.rights.changes if self.rights is not None else 0
        if changes != self.rights_changes or self.registry_changes != self.shared.registry_changes:
            self.topics.clear()
            self.generation += 1
            self.rights_changes = changes
            self.registry_changes = self.shared.registry_changes
        return 0

    cdef bint may(self, bint publish, str topic) except -1:
        cdef bytes text = topic.encode()
        cdef uint32_t id = self.shared.bus.log.find_topic(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))
        if self.rights is None:
            return False
        if publish:
            return self.rights.may_publish(id, PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))
        return self.rights.may_subscribe(id, PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))

    cdef uint32_t publish_topic(self, str tenant, str namespace, str stream) except? 0:
        """The topic of a stream that this peer may publish to; Refused if there is none."""
        cdef tuple address = (tenant, namespace, stream)
        cdef bytes text
        cdef uint32_t id
        found = self.topics.get(address)
        if found is not None:
            return found
        topic = self.checked(address, True)
        text = topic.encode()
        try:
            id = self.shared.bus.topic_id(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))
        except BusError as error:
            raise Refused(str(error)) from None
        if len(self.topics) >= MEMO_TOPICS:
            self.topics.clear()
        self.topics[address] = id
        return id

    def checked(self, tuple address, bint publish):
        """The topic of an address, if it is there and allowed; Refused says why not."""
        tenant, namespace, stream = address
        if self.shared.strict and address not in self.shared.streams:
            raise Refused(
                f"stream not found: tenant={shown(tenant)} namespace={shown(namespace)} stream={shown(stream)}", "not_found")
        try:
            topic = self.shared.topic_of(tenant, namespace, stream)
        except ValueError as error:
            raise Refused(str(error)) from None
        # The right is asked before anything is made.
        if not self.may(publish, topic):
            raise Refused(
                f"unauthorized: {self.who()} may not {'publish' if publish else 'subscribe'} to {shown(topic)!r}",
                "unauthorized")
        return topic

    def who(self):
        return f"{self.rights.name!r}" if self.rights is not None else f"a peer at {self.address}"

    def stream(self, bint one_way=False):
        """A session for a stream that the client opened; `one_way` if it cannot be answered."""
        return FelixStream(self, one_way)


# --- requests --------------------------------------------------------------------------------------------------------

cdef class FelixStream(LoggedSession):
    def __cinit__(self, FelixPeer peer not None, bint one_way):
        self.peer = peer
        self.shared = peer.shared
        self.bus = peer.shared.bus
        self.one_way = one_way
        self.message.protocol = FELIX

    cdef Py_ssize_t receive(self, const uint8_t* data, Py_ssize_t n, int64_t now) except -1:
        cdef Py_ssize_t at = 0, used = 0, wanted = 0
        cdef RawFrame frame
        cdef int found
        if not self.bus.log.open:       # the gateway is ending
            self.closing = True
            return n
        self.peer.renew()
        self.message.origin = self.peer.origin
        while not self.closing:
            found = next_frame(data + at, n - at, self.shared.max_length, &frame, &used, &wanted)
            if found == 0:
                self.wanted = wanted
                break
            if found < 0:
                self.bad_header(found, data + at)
                break
            if self.out.size >= self.high_water:
                self.blocked = self.waits_room = True
                break
            if frame.flags & PUBLISH_BATCH:
                self.on_binary(&frame, now)
            else:
                self.on_message(&frame, now)
            if self.blocked:
                break                   # this frame is not done: it comes again
            at += used
        self.flush(now)
        return n if self.closing else at

    cdef int bad_header(self, int bad, const uint8_t* data) except -1:
        """felix, protocol errors: the connection is closed; the reference ends the stream alone."""
        self.shared.counts.bad_headers += 1
        if not self.shared.mild:
            if bad == BAD_MAGIC:
                self.violation = f"bad frame magic {bytes(data[:4]).hex()}"
            elif bad == BAD_LENGTH:
                self.violation = f"frame length {be32(data + 8)} is above {self.shared.max_length}"
            else:
                self.violation = f"unsupported protocol version {be16(data + 4)}"
        return self.end()

    cdef int end(self) except -1:
        self.closing = True
        return 0

    cdef int on_message(self, RawFrame* frame, int64_t now) except -1:
        if not utf8_valid(frame.payload, frame.size):
            self.shared.counts.bad_messages += 1
            return self.end() if self.one_way else self.say(Error("invalid JSON: it is not UTF-8"))
        try:
            wish = felix_json.decode(PyMemoryView_FromMemory(<char*>frame.payload, frame.size, PyBUF_READ))
        except ValueError as error:
            self.shared.counts.bad_messages += 1
            return self.end() if self.one_way else self.say(Error(f"invalid message: {error}"))
        kind = type(wish)
        if kind is Publish:
            return self.on_publish(wish, now)
        if kind is PublishBatch:
            return self.on_publish_batch(wish, now)
        if self.one_way:                # felix, stream types: nothing else belongs here
            self.shared.counts.wrong_kind += 1
            return self.end()
        if kind is CacheGet:
            return self.on_cache_get(wish, now)
        if kind is CachePut:
            return self.on_cache_put(wish, now)
        if kind is Subscribe:
            return self.on_subscribe(wish, now)
        self.shared.counts.wrong_kind += 1
        if kind is not Error:           # who tells us of an error wants no answer
            self.say(Error("unexpected message type"))
        return self.end()

    # --- publishing ----------------------------------------------------------------------------------------------------

    cdef int append(self, uint32_t topic, View payload, bint text, bint acked, uint64_t correlation, int64_t now) noexcept:
        self.message.topic = topic
        self.message.flags = FLAG_CONFIRMED if acked else 0
        self.message.correlation = correlation
        self.message.payload = payload.data
        self.message.source_len = payload.size
        if text:
            self.message.fill = hr_b64_decode
            self.message.payload_len = hr_b64_known_size(payload.data, payload.size)
        else:
            self.message.fill = NULL
            self.message.payload_len = payload.size
        self.message.now = now
        return self.bus.publish_message(&self.message)

    cdef int on_publish(self, object wish, int64_t now) except -1:
        cdef Py_buffer buffer
        cdef View rest, payload
        cdef bint acked = wish.ack in ("per_message", "per_batch") or (not given(wish.ack) and numeric(wish.request_id))
        cdef uint32_t topic
        cdef int rc
        try:
            topic = self.peer.publish_topic(wish.tenant_id, wish.namespace, wish.stream)
        except Refused as error:
            self.shared.counts.publishes += 1
            return self.refuse_with(wish, acked, error)
        raw = plain(wish.payload)
        PyObject_GetBuffer(raw, &buffer, PyBUF_SIMPLE)
        try:
            rest = view_of(buffer.buf, buffer.len)
            if next_text(&rest, &payload) or hr_b64_size(payload.data, payload.size) < 0:
                self.shared.counts.bad_messages += 1
                return self.refuse(wish, acked, "payload is not Base64 with padding")
            rc = self.append(topic, payload, True, acked, wish.request_id if numeric(wish.request_id) else 0, now)
        finally:
            PyBuffer_Release(&buffer)
        if rc != APPEND_OK:
            return self.not_appended(rc, wish, acked, 1, now)
        self.shared.counts.publishes += 1
        self.full_since = 0
        return self.confirm(wish) if acked else 0

    cdef int on_publish_batch(self, object wish, int64_t now) except -1:
        cdef Py_buffer buffer
        cdef View rest, payload
        cdef bint acked = wish.ack in ("per_message", "per_batch") or (not given(wish.ack) and numeric(wish.request_id))
        cdef uint32_t topic
        cdef uint64_t whole = 0, count = 0, correlation = wish.request_id if numeric(wish.request_id) else 0
        cdef Py_ssize_t size
        cdef int more = 1, rc = APPEND_OK
        cdef bint good
        try:
            topic = self.peer.publish_topic(wish.tenant_id, wish.namespace, wish.stream)
        except Refused as error:
            self.shared.counts.batches += 1
            return self.refuse_with(wish, acked, error)
        raw = plain(wish.payloads)
        PyObject_GetBuffer(raw, &buffer, PyBUF_SIMPLE)
        try:
            # First all is looked at, then all is appended.
            rest = view_of(buffer.buf, buffer.len)
            good = enter_list(&rest) == 0
            while good:
                more = next_in_list(&rest, &payload)
                if more <= 0:
                    good = more == 0
                    break
                size = hr_b64_size(payload.data, payload.size)
                if size < 0:
                    good = False
                    break
                if <uint64_t>size + RECORD_HEADER > self.bus.log.max_record:
                    rc = APPEND_TOO_LARGE
                whole += padded(RECORD_HEADER + <uint64_t>size)
                count += 1
            if not good:
                self.shared.counts.bad_messages += 1
                return self.refuse(wish, acked, "payloads is not a list of Base64 texts with padding")
            if rc == APPEND_OK and count:
                rc = self.bus.log.room_for(whole + self.peer.origin.text_len + self.bus.log.names[topic].length + NAME_ALLOWANCE)
            if rc == APPEND_OK:
                rest = view_of(buffer.buf, buffer.len)
                enter_list(&rest)
                while next_in_list(&rest, &payload) == 1 and rc == APPEND_OK:
                    rc = self.append(topic, payload, True, acked, correlation, now)
        finally:
            PyBuffer_Release(&buffer)
        if rc != APPEND_OK:
            return self.not_appended(rc, wish, acked, count, now)
        self.shared.counts.batches += 1
        self.full_since = 0
        return self.confirm(wish) if acked else 0

    cdef int on_binary(self, RawFrame* frame, int64_t now) except -1:
        cdef RawBatch batch
        cdef View item, items
        cdef uint64_t whole = 0
        cdef uint32_t i, topic
        cdef Py_ssize_t head
        cdef int rc = APPEND_OK
        if parse_batch(frame.payload, frame.size, &batch) != 0:
            self.shared.counts.bad_batches += 1
            return self.end() if self.one_way else self.refuse_binary("malformed publish batch")
        head = batch.stream.data + batch.stream.size - frame.payload
        if (
            self.memo_topic and head == self.memo_size and memcmp(frame.payload, self.memo, head) == 0
            and self.memo_generation == self.peer.generation
        ):
            topic = self.memo_topic
        else:
            try:
                topic = self.peer.publish_topic(
                    batch.tenant.data[:batch.tenant.size].decode(), batch.namespace.data[:batch.namespace.size].decode(),
                    batch.stream.data[:batch.stream.size].decode())
            except Refused as error:
                self.shared.counts.binary_batches += 1
                self.count(error)
                return self.refuse_binary(str(error))
            if head <= MEMO_BYTES:
                memcpy(self.memo, frame.payload, head)
                self.memo_size = <uint16_t>head
                self.memo_topic = topic
                self.memo_generation = self.peer.generation
        items = batch.items
        for i in range(batch.count):
            item = next_item(&items)
            if <uint64_t>item.size + RECORD_HEADER > self.bus.log.max_record:
                rc = APPEND_TOO_LARGE
            whole += padded(RECORD_HEADER + <uint64_t>item.size)
        if rc == APPEND_OK and batch.count:
            rc = self.bus.log.room_for(whole + self.peer.origin.text_len + self.bus.log.names[topic].length + NAME_ALLOWANCE)
        items = batch.items
        for i in range(batch.count):
            if rc != APPEND_OK:
                break
            item = next_item(&items)
            rc = self.append(topic, item, False, False, 0, now)
        if rc != APPEND_OK:
            return self.not_appended(rc, None, False, batch.count, now)
        self.shared.counts.binary_batches += 1
        self.full_since = 0
        return 0

    cdef int not_appended(self, int rc, object wish, bint acked, uint64_t messages, int64_t now) except -1:
        """A log without room stops the reading of this stream; after block_timeout what can be refused is."""
        cdef str text
        if rc == APPEND_TOO_LARGE:
            self.shared.counts.too_large += messages
            text = f"too large: the log takes {self.bus.log.max_record} bytes a message, and less than a segment a batch"
        else:
            if self.wait_for_room(rc, self.shared.block_timeout_us, now):
                return 0
            text = f"publish failed: {self.why_not_appended()}"
            if acked:
                self.shared.counts.refused_full += 1
            else:
                self.shared.counts.dropped_full += messages
        return self.refuse_binary(text) if wish is None else self.refuse(wish, acked, text)

    cdef int confirm(self, object wish) except -1:
        """Answers an acknowledged publish once everything up to here is safe."""
        if self.one_way:
            return 0
        self.confirm_at(self.bus.log.lsn())
        self.gate()
        return self.say(PublishOk(wish.request_id) if numeric(wish.request_id) else Ok(wish.request_id))

    # --- subscribing ---------------------------------------------------------------------------------------------------

    cdef int on_subscribe(self, object wish, int64_t now) except -1:
        cdef bint reference = (
            numeric(wish.subscription_id) or numeric(wish.request_id)
            or (self.shared.reference and not given(wish.subscription_id) and not given(wish.request_id))
        )
        cdef tuple address = (wish.tenant_id, wish.namespace, wish.stream)
        cdef Subscription subscription
        cdef FelixEvents events
        self.shared.counts.subscribes += 1
        id = wish.subscription_id
        if not given(id):
            id = self.shared.next_subscription if reference else str(self.shared.next_subscription)
            self.shared.next_subscription += 1
        try:
            if self.peer.opener is None:
                raise Refused("the connection is closing")
            topic = self.peer.checked(address, False)
            if id in self.peer.subscriptions:
                raise Refused(f"subscription_id {id} is in use on this connection")
            if <uint32_t>len(self.peer.subscriptions) >= self.shared.max_subscriptions:
                raise Refused(f"too many subscriptions: a connection has {self.shared.max_subscriptions} at most")
            self.bus.flush(now)         # what this connection published before is before the subscription's beginning
            try:
                subscription = self.bus.subscribe(
                    topic.encode(), exact=True, owner=self.peer.rights.name, protocol=FELIX, now=now)
            except (BusError, LogError) as error:
                raise Refused(f"subscribe failed: {error}") from None
            events = FelixEvents(self.peer, subscription, id, topic, address, reference or numeric(id), now)
            self.peer.subscriptions[id] = events
            try:
                self.peer.opener(events)
            except RuntimeError as error:
                events.lost(now)
                raise Refused(str(error)) from None
        except Refused as error:
            self.count(error)
            self.say(Error(str(error), wish.request_id))
            return self.end() if reference else 0
        if not reference:
            return self.say(Ok(wish.request_id))
        self.say(Subscribed(id))
        return self.end()               # the reference reads nothing behind it

    # --- the cache -----------------------------------------------------------------------------------------------------

    cdef tuple scope(self, object wish, bint put):
        """What keys are kept under; those without a scope have one of their own."""
        if not given(wish.cache):
            if not self.peer.may(put, "cache"):
                raise Refused(f"unauthorized: {self.peer.who()} may not use the cache", "unauthorized")
            return None, None, None
        if not given(wish.tenant_id) or not given(wish.namespace):
            raise Refused("a cache needs tenant_id and namespace", "bad_messages")
        scope = wish.tenant_id, wish.namespace, wish.cache
        if self.shared.strict and scope not in self.shared.caches:
            raise Refused(
                f"cache scope not found: {shown(scope[0])}/{shown(scope[1])}/{shown(scope[2])}", "not_found")
        try:
            topic = topic_of(*scope)
        except ValueError as error:
            raise Refused(str(error)) from None
        if not self.peer.may(put, topic):
            raise Refused(
                f"unauthorized: {self.peer.who()} may not {'put into' if put else 'get from'} {shown(topic)!r}", "unauthorized")
        return scope

    cdef int on_cache_put(self, object wish, int64_t now) except -1:
        cdef bint reference = given(wish.cache) or numeric(wish.request_id)
        cdef bytes value
        cdef View rest, text
        cdef int64_t deadline = INT64_MAX
        self.shared.counts.cache_puts += 1
        try:
            scope = self.scope(wish, True)
            value = bytes(plain(wish.value))
            rest = view_of(PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))
            if next_text(&rest, &text) or hr_b64_size(text.data, text.size) < 0:
                raise Refused("value is not Base64 with padding", "bad_messages")
            # Its key and scope are told beside it.
            if len(encode(cache_value(wish.key, Raw(b'""'), scope, UNSET))) - 2 + len(value) > min(
                self.shared.max_length, MAX_LENGTH
            ):
                self.shared.counts.cache_refused += 1
                raise Refused("the value is too large: no frame could have it together with its key")
            if given(wish.ttl_ms) and wish.ttl_ms < (INT64_MAX - now) // 1000:
                deadline = now + wish.ttl_ms * 1000
            self.shared.cache.put((*scope, wish.key), value, deadline, &self.shared.counts)
        except Refused as error:
            self.count(error)
            self.say(Error(str(error), UNSET if reference else wish.request_id))
        else:
            self.say(CacheOk(wish.request_id) if reference and given(wish.request_id) else Ok(wish.request_id))
        # The reference takes one request without an id on a stream.
        return self.end() if given(wish.cache) and not given(wish.request_id) else 0

    cdef int on_cache_get(self, object wish, int64_t now) except -1:
        cdef bint reference = given(wish.cache) or numeric(wish.request_id)
        self.shared.counts.cache_gets += 1
        try:
            scope = self.scope(wish, False)
        except Refused as error:
            self.count(error)
            self.say(Error(str(error), UNSET if reference else wish.request_id))
        else:
            found = self.shared.cache.get((*scope, wish.key), now, &self.shared.counts)
            id = wish.request_id if given(wish.request_id) else UNSET
            value = Raw(b"null" if found is None else found)
            if not self.say_if_it_fits(cache_value(wish.key, value, scope, id)):
                self.shared.counts.too_large += 1
                self.say(Error(TOO_LARGE, UNSET if reference else wish.request_id))
        return self.end() if given(wish.cache) and not given(wish.request_id) else 0

    # --- time and ends -------------------------------------------------------------------------------------------------

    cdef int tick(self, int64_t now) except -1:
        if not self.bus.log.open:
            return 0
        self.stop_waiting(self.shared.block_timeout_us, now)     # to be refused or dropped
        return self.check_log()

    cdef int drain(self, int64_t now) except -1:
        return self.check_log()

    cdef int unconfirmed(self) except -1:
        self.shared.counts.unconfirmed += 1
        return self.end()

    cdef int lost(self, int64_t now) except -1:
        if self.bus.log.open:
            self.bus.flush(now)
        return 0

    # --- answers -------------------------------------------------------------------------------------------------------

    cdef int say(self, object message) except -1:
        if not self.one_way and not self.say_if_it_fits(message):
            # The id that it would echo may be as long as the request: what is said without one fits.
            self.shared.counts.too_large += 1
            self.say_if_it_fits(Error(TOO_LARGE))
        return 0

    cdef bint say_if_it_fits(self, object message) except -1:
        """False where it is too large for a frame, and was not said."""
        cdef bytes text = encode(message)
        if <uint64_t>PyBytes_GET_SIZE(text) > min(self.shared.max_length, MAX_LENGTH):
            return False
        self.out.commit(write_header(self.out.reserve(HEADER_SIZE), 0, <uint32_t>PyBytes_GET_SIZE(text)))
        self.out.put(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))
        return True

    cdef int refuse_with(self, object wish, bint acked, object error) except -1:
        self.count(error)
        return self.refuse(wish, acked, str(error))

    def count(self, error):
        cdef Counts* counts = &self.shared.counts
        if error.count == "unauthorized":
            counts.unauthorized += 1
        elif error.count == "not_found":
            counts.not_found += 1
        elif error.count == "bad_messages":
            counts.bad_messages += 1
        else:
            counts.refused += 1

    cdef int refuse(self, object wish, bint acked, str text) except -1:
        """A publish that was not done. The reference tells only who waits for an answer."""
        if self.one_way or (numeric(wish.request_id) and not acked):
            self.shared.counts.refused_silently += 1
            return 0
        if numeric(wish.request_id):
            return self.say(PublishError(text, wish.request_id))
        return self.say(Error(text, wish.request_id))

    cdef int refuse_binary(self, str text) except -1:
        """The same for a binary batch, which shows no dialect; the reference's sender does not expect an answer."""
        if self.one_way or self.shared.reference:
            self.shared.counts.refused_silently += 1
            return 0
        return self.say(Error(text))


cdef object plain(raw):
    """A Raw field's JSON without escapes; texts with escapes are rare, and written anew."""
    cdef Py_buffer buffer
    cdef bint escaped
    PyObject_GetBuffer(raw, &buffer, PyBUF_SIMPLE)
    escaped = memchr(buffer.buf, 0x5C, buffer.len) != NULL
    PyBuffer_Release(&buffer)
    if not escaped:
        return raw
    try:
        return unescape(bytes(raw))
    except ValueError:
        return b"null"                  # no text: the caller finds that out


# --- events ----------------------------------------------------------------------------------------------------------

cdef class FelixEvents(Session):
    def __cinit__(self, FelixPeer peer not None, Subscription subscription not None, id, str topic not None,
                  tuple address not None, bint binary, int64_t now):
        cdef bytes hello = encode(EventStreamHello(id))
        self.peer = peer
        self.shared = peer.shared
        self.bus = peer.shared.bus
        self.id = id
        self.topic = topic
        self.address = address
        self.binary = binary
        peer.renew()
        self.generation = peer.generation
        if not binary:
            names = b'"tenant_id":%b,"namespace":%b,"stream":%b' % tuple([quote(name) for name in address])
            self.event_head = b'{"type":"event",%b,"payload":"' % names
            self.batch_head = b'{"type":"event_batch",%b,"payloads":["' % names
        self.member = subscription.join(self, -1, now)
        self.out.commit(write_header(self.out.reserve(HEADER_SIZE), 0, <uint32_t>PyBytes_GET_SIZE(hello)))
        self.out.put(PyBytes_AS_STRING(hello), PyBytes_GET_SIZE(hello))

    cdef uint64_t safe_end(self) noexcept:
        return self.bus.log.safe_lsn()

    cdef int wake(self) except -1:
        cdef Subscription subscription = self.member.subscription
        if self.connection is None:
            return 0
        if (
            self.shared.batch_delay_us
            and self.bus.topics[subscription.topic].total - subscription.behind < self.shared.batch_events
        ):
            self.connection.wake_later(self.shared.batch_delay_us)
        else:
            self.connection.wake()
        return 0

    cdef uint64_t cost(self, uint64_t payload) noexcept:
        """Bytes of a frame that a payload takes."""
        return 4 + payload if self.binary else 3 + hr_b64_length(payload)

    cdef int deliver(self, int64_t now, Py_ssize_t room) except -1:
        cdef Subscription subscription = self.member.subscription
        cdef Delivery delivery
        cdef View* items = self.shared.items
        cdef uint64_t held = 0, size = 0, cost, most = min(self.shared.max_length, MAX_LENGTH)
        cdef uint64_t head = 12 if self.binary else PyBytes_GET_SIZE(self.batch_head) + 16
        cdef uint32_t count = 0, limit = max(1, min(self.shared.batch_events, MOST_IN_BATCH))
        cdef Py_ssize_t first = self.out.size
        if self.closing or not self.bus.log.open:
            return 0
        if self.member.gone:
            self.closing = True
            return 0
        while True:
            if self.out.size - first + <Py_ssize_t>size >= room:
                self.more = True        # if there is nothing, the next call finds that out
                break
            if not subscription.take(self.member, now, &delivery):
                break
            cost = self.cost(delivery.view.payload_len)
            if head + cost > most:
                self.shared.counts.too_large += 1
                continue
            if count and (head + size + cost > most or count == limit or held >= self.shared.batch_bytes):
                self.write_frame(count)
                count = 0
                held = size = 0
            items[count] = view_of(delivery.view.payload, delivery.view.payload_len)
            count += 1
            held += delivery.view.payload_len
            size += cost
        if count:
            self.write_frame(count)
        return 0

    cdef int write_frame(self, uint32_t count) except -1:
        """One frame with the items that were collected; they lie in the log."""
        cdef View* items = self.shared.items
        cdef uint64_t length, at
        cdef uint32_t i
        cdef uint8_t* out
        cdef bytes head
        if self.binary:
            length = 12
            for i in range(count):
                length += 4 + <uint64_t>items[i].size
            out = self.out.reserve(HEADER_SIZE + length)
            write_header(out, EVENT_BATCH, <uint32_t>length)
            put_be64(out + HEADER_SIZE, self.id)
            put_be32(out + HEADER_SIZE + 8, count)
            at = HEADER_SIZE + 12
            for i in range(count):
                at += write_item(out + at, items[i].data, <uint32_t>items[i].size)
            self.out.commit(at)
            return 0
        head = self.event_head if count == 1 else self.batch_head
        length = PyBytes_GET_SIZE(head) + (2 if count == 1 else 3)
        for i in range(count):
            length += hr_b64_length(items[i].size) + (3 if i else 0)
        out = self.out.reserve(HEADER_SIZE + length)
        at = write_header(out, 0, <uint32_t>length)
        memcpy(out + at, PyBytes_AS_STRING(head), PyBytes_GET_SIZE(head))
        at += PyBytes_GET_SIZE(head)
        for i in range(count):
            if i:
                memcpy(out + at, b'","', 3)
                at += 3
            hr_b64_encode(out + at, items[i].data, items[i].size)
            at += hr_b64_length(items[i].size)
        memcpy(out + at, b'"}' if count == 1 else b'"]}', 2 if count == 1 else 3)
        self.out.commit(HEADER_SIZE + length)
        return 0

    cdef int tick(self, int64_t now) except -1:
        """A right or a stream may have been taken away; a peer may have got another address, and with it other rights."""
        if self.closing or not self.bus.log.open:
            return 0
        self.peer.renew()
        if self.generation == self.peer.generation:
            return 0
        self.generation = self.peer.generation
        try:
            self.peer.checked(self.address, False)
        except Refused:
            self.shared.counts.subscriptions_ended += 1
            self.closing = True
        return 0

    cdef int lost(self, int64_t now) except -1:
        self.closing = True
        if self.peer.subscriptions.get(self.id) is self:
            del self.peer.subscriptions[self.id]
        if self.bus.log.open:
            self.member.leave(now)
        return 0
