"""The Relink session: the listener's side of one connection, and of the links that outlive connections. It owns no
socket, no clock and no task.

A link is a subscription of what its endpoint delivers, and a number for every message of every channel. What it is must
survive a kill, so it is in the log, as notes:

    relink/epoch            the epoch: a new one is made only where the log was lost or cut
    relink/link/<id>        a link and all of its channels, as of some moment: a checkpoint
    relink/since/<id>       the channels that changed since, and the intent: which messages come next in the log
    relink/kept/<id>/<n>    uncommitted messages, as they came

Received messages are appended behind their intent, which says where the channels stand after them. After a kill the end
of the log tells how many of them are there, so a message that the peer sends again is never taken twice, and none that
it was promised is missed. What a peer is told (received, consumed, committed, closed, its link id) leaves behind a gate
in the output that opens when the log is safe up to there.

Sent messages need no note of their own: a channel's next number belongs to its next message in the log. A note has a
number and an offset to count from; what the peer tells when it resumes says how far it got.
"""

import struct
from os import urandom
from zlib import crc32

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.ref cimport PyObject
from libc.stdint cimport UINT32_MAX, UINT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memmove, memset

from headrace.bus cimport RELINK, Bus, Delivery, Member, Subscription
from headrace.log cimport (
    APPEND_FAILED, APPEND_FULL, APPEND_OK, APPEND_TOO_LARGE, FLAG_CONFIRMED, FLAG_CONTROL, FLAG_PARTS, RECORD_HEADER, Log,
    Message, RecordHeader, Segment, View, padded, view_record,
)
from headrace.sessions.logged cimport LoggedSession
from headrace.sessions.rights cimport Keyring, Rights
from headrace.wake cimport Waker
from headrace.wire.bytes cimport utf8_valid
from headrace.wire.relink cimport (
    ACKNOWLEDGEMENT, ANSWER_SIZE, CLOSE, CLOSED, COMMIT, COMMITTED, CONNECTOR_TRANSACTIONS, CONSUMED, GENERAL,
    GENERAL_SIZE, ID_BYTES, LARGE, LISTENER_TRANSACTIONS, LONG, MESSAGE, NAME_BYTES, NOP, OPERATION, PING, PONG,
    RECEIVED, REQUIRE_LINK, RESUME, SEQUENCE_ACKNOWLEDGEMENT, SEQUENCE_OPERATION, SHUTDOWN, UNCOMMITTED, VERSION,
    VERSION_SIZE, Bounds, RawHello, RawPacket, channel_id, fits, join_parts, largest_packet, message_head, next_hello,
    next_packet, part_size, write_answer, write_general, write_message_head, write_part, write_plain, write_sequence,
    write_version,
)

from headrace.errors import BusError, LogError, LogFull

cdef extern from "platform.h" nogil:
    int64_t hr_now_us()


cdef enum Stage:
    AT_VERSION = 0
    AT_HELLO = 1
    AT_PACKETS = 2

cdef enum:
    RECENT = 64             # changed channels that are noted one by one before all of them are
    LARGEST_ACK = 24        # bytes of an operation or acknowledgement of one channel
    OUTCOMES = 256          # changes between committed and not that a channel remembers, for a peer that asks again
    CLOSING = 1024          # closed channels that are looked through for those whose peers can have seen it
    ACKED = 4096            # acknowledgements of the peer that may wait for the next note
    SWEEP_US = 1_000_000    # how often links are looked through for those that nobody came back to
    KEPT_COST = 256         # bytes that an uncommitted message takes in memory beside its own
    NOTE_ROOM = 128         # bytes of a note beside its value, at most
    MOST_BURIED = 4096      # messages of which it is remembered that they are dead letters already

LINK_KEY = b"relink/link/"
SINCE_KEY = b"relink/since/"
KEPT_KEY = b"relink/kept/"
EPOCH_KEY = b"relink/epoch"

# Version of the format, flags, generation, floor, first offset of the intent, number of the next kept note, runs, entries.
# In a checkpoint: the endpoint's nature instead of the offset, and the size of its name instead of the runs.
cdef object HEAD = struct.Struct("<BBxxIQQQII")
cdef object RUN = struct.Struct("<QQQ")
# What it is, flags, count of outcomes, channel, and three numbers.
# A checkpoint begins with one that is no channel: the link's largest message. Format 1 did not have it.
cdef object ENTRY = struct.Struct("<cBxxIQQQQ")
# Of an uncommitted message: channel, sequence number, size of the packet.
cdef object KEPT = struct.Struct("<QQQ")

FORMAT = 2
CHANNEL = "{channel}"


# --- channels ----------------------------------------------------------------------------------------------------------

cdef inline uint32_t place_of(uint64_t id, uint32_t room) noexcept:
    return <uint32_t>((id * <uint64_t>0x9E3779B97F4A7C15) >> 40) & (room - 1)


cdef class Channels:
    def __cinit__(self):
        self.items = []

    def __dealloc__(self):
        free(self.table)

    cdef object find(self, uint64_t id):
        cdef uint32_t at
        if self.room == 0:
            return None
        at = place_of(id, self.room)
        while self.table[at] != NULL:
            if (<Channel>self.table[at]).id == id:
                return <Channel>self.table[at]
            at = (at + 1) & (self.room - 1)
        return None

    cdef int add(self, uint64_t id, object channel) except -1:
        self.items.append(channel)
        return self.rebuild(self.room if 2 * <uint32_t>len(self.items) <= self.room else max(8, 2 * self.room))

    cdef int remove(self, object channel) except -1:
        self.items.remove(channel)
        return self.rebuild(self.room)

    cdef int rebuild(self, uint32_t room) except -1:
        """Channels come and go seldom: the table is made anew."""
        cdef void** table = <void**>calloc(room, sizeof(void*))
        cdef Channel channel
        cdef uint32_t at
        if table == NULL:
            raise MemoryError
        for channel in self.items:
            at = place_of(channel.id, room)
            while table[at] != NULL:
                at = (at + 1) & (room - 1)
            table[at] = <void*>channel
        free(self.table)
        self.table = table
        self.room = room
        return 0


cdef class Channel:
    def __init__(self, uint64_t id):
        self.id = id


cdef class InChannel(Channel):
    def __cinit__(self):
        self.pending = []
        self.outcomes = []


cdef class OutChannel(Channel):
    def __dealloc__(self):
        free(self.ring)

    cdef Sent* at(self, uint64_t sequence) noexcept:
        return &self.ring[(self.first + <uint32_t>(sequence - self.base)) & (self.room - 1)]

    cdef int push(self, uint64_t offset, uint64_t lsn) except -1:
        cdef Sent* grown
        cdef uint32_t i
        if self.count == self.room:
            grown = <Sent*>malloc(max(16, 2 * self.room) * sizeof(Sent))
            if grown == NULL:
                raise MemoryError
            for i in range(self.count):
                grown[i] = self.at(self.base + i)[0]
            free(self.ring)
            self.ring = grown
            self.first = 0
            self.room = max(16, 2 * self.room)
        self.count += 1
        self.at(self.base + self.count - 1)[0] = Sent(offset, lsn)
        return 0

    cdef void pop(self) noexcept:
        self.base_offset = self.ring[self.first].offset + 1
        self.first = (self.first + 1) & (self.room - 1)
        self.base += 1
        self.count -= 1


cdef class Kept:
    pass


# --- endpoints ---------------------------------------------------------------------------------------------------------

cdef class Endpoint:
    """A service that connectors ask for by name: the sizes of its channels' ids, its transactions, and its topics.

    In the rules `publish` and `deliver`, "{channel}" stands for the number of a channel, as a word of the topic. A
    `publish` without it is one topic for all channels; a `deliver` without it is a filter, all of which goes to channel
    0. `rights` are those of the key that the endpoint names.
    """

    def __init__(self, str name not None, *, connector_size=4, listener_size=4, connector_transactions=False,
                 listener_transactions=False, str publish="", str deliver="", str key=""):
        if not (0 <= connector_size <= ID_BYTES and 0 <= listener_size <= ID_BYTES):
            raise ValueError(f"channel ids have 0 to {ID_BYTES} bytes")
        if len(name.encode()) > NAME_BYTES:
            raise ValueError(f"an endpoint's name has at most {NAME_BYTES} bytes")
        self.name = name
        self.connector_size = connector_size
        self.listener_size = listener_size
        self.flags = (CONNECTOR_TRANSACTIONS if connector_transactions else 0) | (
            LISTENER_TRANSACTIONS if listener_transactions else 0)
        self.publish = publish or f"{name}.in.{CHANNEL}"
        self.deliver = deliver or f"{name}.out.{CHANNEL}"
        self.key = key
        before, found, after = self.publish.partition(CHANNEL)
        self.publish_before, self.publish_after, self.publish_by_channel = before.encode(), after.encode(), bool(found)
        before, found, after = self.deliver.partition(CHANNEL)
        self.deliver_before, self.deliver_after, self.deliver_by_channel = before.encode(), after.encode(), bool(found)
        self.filter = self.deliver.replace(CHANNEL, "*").encode()

    def __dealloc__(self):
        free(self.known)
        free(self.channel_of)

    cdef uint64_t nature(self) except? 0:
        """What must be as it was for a link to go on: sizes, transactions, and what is delivered where."""
        return (
            self.connector_size | (self.listener_size << 8) | (self.flags << 16)
            | (<uint64_t>crc32(self.deliver.encode()) << 32)
        )

    cdef bytes topic_of(self, uint64_t channel):
        if not self.publish_by_channel:
            return self.publish_before
        return b"%s%d%s" % (self.publish_before, channel, self.publish_after)

    cdef bint channel_for(self, Bus bus, uint32_t topic, uint64_t* channel) except -1:
        """Which channel a topic's messages go to; False: none."""
        cdef uint8_t* known
        cdef uint64_t* channel_of
        cdef uint32_t room
        cdef bytes name, word
        if self.rights is not None and self.rights_changes != self.rights.changes:
            self.rights_changes = self.rights.changes
            if self.known_room:
                memset(self.known, 0, self.known_room)
        if topic >= self.known_room:
            room = max(<uint32_t>256, self.known_room)
            while room <= topic:
                room *= 2
            known = <uint8_t*>realloc(self.known, room)
            if known == NULL:
                raise MemoryError
            self.known = known
            channel_of = <uint64_t*>realloc(self.channel_of, room * sizeof(uint64_t))
            if channel_of == NULL:
                raise MemoryError
            self.channel_of = channel_of
            memset(known + self.known_room, 0, room - self.known_room)
            self.known_room = room
        if self.known[topic] == 0:
            self.known[topic] = 2
            name = bus.log.topic_name(topic)
            if self.rights is None or self.rights.may_subscribe(topic, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name)):
                if not self.deliver_by_channel:
                    self.known[topic] = 1
                    self.channel_of[topic] = 0
                else:
                    word = name[len(self.deliver_before):len(name) - len(self.deliver_after)]
                    # As it would be written, so that the way back is exact.
                    if len(word) <= 20 and word.isdigit():
                        number = int(word)
                        if b"%d" % number == word and number <= UINT64_MAX and fits(number, self.listener_size):
                            self.known[topic] = 1
                            self.channel_of[topic] = number
        channel[0] = self.channel_of[topic]
        return self.known[topic] == 1


# --- links -------------------------------------------------------------------------------------------------------------

cdef class Link(Waker):
    """What two peers know of each other's messages, from one connection to the next."""

    cdef int wake(self) except -1:
        if self.session is not None:
            self.session.wake()
        return 0

    cdef int change(self, Channel channel) except -1:
        self.unwritten = True
        if not channel.dirty:
            channel.dirty = True
            self.changed.append(channel)
        return 0

    cdef uint8_t flags(self) noexcept:
        """As in its notes."""
        return self.peer_shut | (self.shut << 1) | (self.used << 2)

    cdef bytes state(self, list channels):
        """These channels as entries of a note: where they stand when all is done that was planned."""
        cdef InChannel inside
        cdef OutChannel outside
        cdef Channel channel
        cdef list found = []
        for channel in channels:
            if isinstance(channel, InChannel):
                inside = channel
                if self.ins.find(inside.id) is not inside:
                    if self.ins.find(inside.id) is None:
                        found.append(ENTRY.pack(b"x", 0, 0, inside.id, 0, 0, 0))
                    continue
                outcomes = [(end << 1) | committed for end, committed in inside.outcomes]
                resolved = inside.resolved
                if not self.endpoint.flags & CONNECTOR_TRANSACTIONS:
                    resolved = inside.received + inside.planned
                found.append(ENTRY.pack(
                    b"i", inside.doomed, len(outcomes), inside.id, inside.received + inside.planned, resolved,
                    inside.opened))
                found.append(struct.pack(f"<{len(outcomes)}Q", *outcomes))
            else:
                outside = channel
                if self.outs.find(outside.id) is not outside:
                    if self.outs.find(outside.id) is None:
                        found.append(ENTRY.pack(b"X", 0, 0, outside.id, 0, 0, 0))
                    continue
                found.append(ENTRY.pack(
                    b"o", outside.closing, 0, outside.id, outside.base, outside.consumed, outside.base_offset))
        return b"".join(found)

    cdef uint64_t write(self, Run* runs, uint32_t count, int64_t now) except 0:
        """Has the log know where the channels stand, and which messages follow; the lsn behind it."""
        cdef uint64_t lsn
        cdef bytes body
        if len(self.changed) > RECENT:
            self.checkpoint(now)
        if not self.recovering:
            self.floor = max(self.floor, self.holding.offset if self.held else self.subscription.next_offset)
        body = HEAD.pack(
            FORMAT, self.flags(), self.generation, self.floor, self.shared.bus.log.next_offset,
            self.next_kept, count, len(self.changed))
        body += PyBytes_FromStringAndSize(<const char*>runs, count * sizeof(Run)) if count else b""
        lsn = self.shared.bus.put_note(SINCE_KEY + b"%016x" % self.id, body + self.state(self.changed), now)
        self.unwritten = False
        self.acked = 0
        return lsn

    cdef uint64_t checkpoint(self, int64_t now) except 0:
        """All of it, so that the note of what changed since is short again."""
        cdef InChannel channel
        cdef Channel one
        cdef list ahead = [(channel, channel.planned) for channel in self.ins.items if channel.planned]
        cdef bytes name = self.endpoint.name.encode()
        cdef bytes head
        cdef uint64_t lsn
        if not self.recovering:
            self.floor = max(self.floor, self.holding.offset if self.held else self.subscription.next_offset)
        for channel, planned in ahead:
            channel.planned = 0
        head = HEAD.pack(
            FORMAT, self.flags(), self.generation + 1, self.floor, self.endpoint.nature(),
            self.next_kept, len(name),
            1 + len(self.ins.items) + len(self.outs.items))
        largest = ENTRY.pack(b"l", 0, 0, 0, self.max_message, 0, 0)
        try:
            lsn = self.shared.bus.put_note(
                LINK_KEY + b"%016x" % self.id,
                head + name + largest + self.state(self.ins.items) + self.state(self.outs.items), now)
        finally:
            for channel, planned in ahead:
                channel.planned = planned
        self.generation += 1
        for one in self.changed:
            one.dirty = False
        self.changed = []
        for channel, planned in ahead:
            self.change(channel)
        return lsn

    cdef int forget(self, int64_t now) except -1:
        """It is gone, for both peers."""
        cdef Bus bus = self.shared.bus
        self.shared.links.pop(self.id, None)
        self.shared.unused.pop(self.id, None)
        bus.unsubscribe(self.subscription, now)
        for key in bus.notes(KEPT_KEY + b"%016x/" % self.id):
            bus.drop_note(key, now)
        bus.drop_note(SINCE_KEY + b"%016x" % self.id, now)
        bus.drop_note(LINK_KEY + b"%016x" % self.id, now)
        bus.flush(now)
        return 0

    cdef InChannel open_in(self, uint64_t id):
        """A channel that the connector opens; None: it may not."""
        cdef InChannel channel
        if self.peer_shut or <uint32_t>len(self.ins.items) >= self.shared.max_channels:
            return None
        channel = InChannel(id)
        channel.opened = self.next_kept
        self.used = True
        self.find_topic(channel)
        self.ins.add(id, channel)
        self.change(channel)
        return channel

    cdef int find_topic(self, InChannel channel) except -1:
        """Where a channel's messages go, if its endpoint's key may publish there."""
        cdef Bus bus = self.shared.bus
        cdef Rights rights = self.endpoint.rights
        cdef bytes name = self.endpoint.topic_of(channel.id)
        channel.topic = 0
        channel.refusal = None
        if rights is not None and not rights.may_publish(
            bus.log.find_topic(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name)), PyBytes_AS_STRING(name),
            PyBytes_GET_SIZE(name),
        ):
            channel.refusal = f"key {rights.name!r} may not publish to {name.decode()!r}"
            return 0
        try:
            channel.topic = bus.topic_id(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
        except BusError as error:
            channel.refusal = str(error)
        return 0

    cdef int settle(self, OutChannel channel) except -1:
        """Forgets what the peer has for good."""
        cdef uint64_t done = channel.answered if self.endpoint.flags & LISTENER_TRANSACTIONS else channel.received
        cdef uint64_t before = channel.base
        while channel.count and channel.base < done:
            channel.pop()
        if channel.base != before:
            self.outstanding -= channel.base - before
            self.acked += channel.base - before
            self.change(channel)
        return 0

    cdef int put_out(self, OutChannel channel, uint64_t offset, uint64_t lsn) except -1:
        """Gives a message the channel's next number."""
        channel.push(offset, lsn)
        self.outstanding += 1
        self.settle(channel)
        if channel.base + channel.count > channel.sent and not channel.waiting:
            channel.waiting = True
            self.waiting.append(channel)
        return 0

    cdef int hold(self, uint64_t channel, uint64_t offset, uint64_t lsn) except -1:
        """A message that has no place yet. None is taken before it has."""
        self.held = True
        self.holding = Sent(offset, lsn)
        self.holding_channel = channel
        return 0

    cdef int drop_pending(self, InChannel channel, uint64_t below, int64_t now) except -1:
        """Uncommitted messages that need to be kept no more; notes are forgotten when nothing in them is needed."""
        cdef Kept kept
        cdef list pending = channel.pending
        cdef Py_ssize_t i = 0
        while i < len(pending) and pending[i][0] < below:
            self.drop_kept(pending[i][1], now)
            i += 1
        del pending[:i]
        return 0

    cdef int drop_kept(self, Kept kept, int64_t now) except -1:
        """One message less that a note is needed for. What it takes is free when none is: until then all of it is there."""
        kept.left -= 1
        if kept.left == 0:
            self.kept_bytes -= kept.cost
            self.shared.bus.drop_note(kept.key, now)
        return 0

    cdef int seek(self) except -1:
        """After a restart: to the first message that has no number yet, or may have to be sent again."""
        cdef OutChannel channel
        cdef uint64_t offset = self.floor
        for channel in self.outs.items:
            offset = min(offset, channel.base_offset)
        self.subscription.seek(offset)
        return 0


cdef class Relink:
    """What all Relink sessions of a gateway share: endpoints, the epoch and the links."""

    def __cinit__(self, Bus bus not None, Keyring keys not None, endpoints, *, uint32_t max_targets=1024,
                  uint32_t max_parts=65536, uint64_t max_message=16 << 20, double handshake_timeout=0,
                  double block_timeout=5, double ping_interval=0, double ping_timeout=30, double grace=3600,
                  uint32_t window=1024, uint32_t max_outstanding=65536, uint32_t max_channels=1024,
                  uint32_t max_links=10_000, uint64_t max_uncommitted=64 << 20, now=None):
        cdef Endpoint endpoint
        self.batch = <Planned*>malloc(BATCH * sizeof(Planned))
        if self.batch == NULL:
            raise MemoryError
        self.bus = bus
        self.keys = keys
        self.bounds = Bounds(max_targets, max_parts, max_message)
        self.handshake_timeout_us = <int64_t>(handshake_timeout * 1e6)
        self.block_timeout_us = <int64_t>(block_timeout * 1e6)
        self.ping_interval_us = <int64_t>(ping_interval * 1e6)
        self.ping_timeout_us = <int64_t>(ping_timeout * 1e6)
        self.grace_us = <int64_t>(grace * 1e6)
        self.window = max(1, window)
        self.max_outstanding = max(1, max_outstanding)
        self.max_channels = max(1, max_channels)
        self.max_links = max_links
        self.max_uncommitted = max_uncommitted
        self.links = {}
        self.unused = {}
        self.buried = {}
        self.endpoints = {}
        for endpoint in endpoints:
            self.endpoints[endpoint.name.encode()] = endpoint
        self.renew_keys()
        self.restore(hr_now_us() if now is None else now)

    def __dealloc__(self):
        free(self.batch)
        free(self.runs)
        free(self.joined)
        free(self.sizes)

    def renew_keys(self):
        """Looks the endpoints' keys up again, after they were replaced."""
        cdef Endpoint endpoint
        for endpoint in self.endpoints.values():
            if endpoint.key:
                rights = self.keys.named(endpoint.key)
                if rights is None and endpoint.rights is None:
                    raise ValueError(f"endpoint {endpoint.name!r} has the rights of key {endpoint.key!r}, which is unknown")
                if rights is not None and rights is not endpoint.rights:
                    endpoint.rights = rights
                    endpoint.rights_changes = rights.changes - 1

    def session(self):
        """A session for one new connection."""
        return RelinkSession(self)

    def counters(self):
        """All that was counted since the start, by name."""
        return self.counts

    def gauges(self):
        """What there is now, by name."""
        return {"links": len(self.links)}

    @property
    def max_packet(self):
        """Bytes of the largest packet."""
        return largest_packet(&self.bounds)

    def link(self, uint64_t id):
        """A link by its id, or None."""
        return self.links.get(id)

    # --- restart -------------------------------------------------------------------------------------------------------

    cdef int restore(self, int64_t now) except -1:
        """The epoch and the links that the log tells of. Where something is missing that peers were promised, no link is
        what they think it is: a new epoch says so."""
        cdef Link link
        cdef Log log = self.bus.log
        cdef dict notes = self.bus.notes(b"relink/")
        cdef bytes known = notes.get(EPOCH_KEY)
        recovery = log.recovery
        # With the policy `always` a cut took nothing that was promised: that was safe, and is before the cut.
        if known is not None and not recovery.damage and not (recovery.cut_bytes and log.sync != "always"):
            (self.epoch,) = struct.unpack("<Q", known)
        else:
            self.epoch = <uint64_t>max(now, 1)
            if known is not None:
                self.epoch = max(self.epoch, 1 + struct.unpack("<Q", known)[0])
            for key in notes:
                self.bus.drop_note(key, now)
            self.bus.put_note(EPOCH_KEY, struct.pack("<Q", self.epoch), now)
            notes = {}
        for key, value in notes.items():
            if key.startswith(LINK_KEY):
                name = key[len(LINK_KEY):]
                link = self.revive(int(name, 16), value, notes.get(SINCE_KEY + name, b""), now)
                if link is None:                          # its endpoint is no more, or is another
                    for other in (key, SINCE_KEY + name, *self.bus.notes(KEPT_KEY + name + b"/")):
                        self.bus.drop_note(other, now)
        self.bus.flush(now)
        return 0

    cdef Link revive(self, uint64_t id, bytes text, bytes since, int64_t now):
        cdef Link link
        cdef Endpoint endpoint
        cdef InChannel inside
        cdef OutChannel outside
        cdef Kept kept
        cdef uint64_t noted, missing, start, size
        format, flags, generation, floor, nature, next_kept, name_size, entries = HEAD.unpack_from(text)
        if format not in (1, FORMAT):
            return None
        name = text[HEAD.size:HEAD.size + name_size]
        endpoint = self.endpoints.get(name)
        if endpoint is None or nature != endpoint.nature():
            return None
        link = Link()
        link.id = id
        link.shared = self
        link.endpoint = endpoint
        link.ins = Channels()
        link.outs = Channels()
        link.waiting = []
        link.changed = []
        link.recovering = True
        link.alone_since = now
        link.generation = generation
        states = {}
        runs = []
        first = self.bus.log.next_offset
        self.read_entries(text, HEAD.size + name_size, entries, states)
        if since:
            _, later_flags, later, later_floor, later_first, later_kept, count, entries = HEAD.unpack_from(since)
            if later == generation:
                flags, floor, first, next_kept = later_flags, later_floor, later_first, later_kept
                at = HEAD.size
                for i in range(count):
                    runs.append(RUN.unpack_from(since, at))
                    at += RUN.size
                self.read_entries(since, at, entries, states)
        link.peer_shut = flags & 1
        link.shut = flags >> 1 & 1
        link.floor = floor
        largest = states.pop((b"l", 0), None)
        link.max_message = largest[1] if largest else UINT64_MAX
        noted = next_kept
        link.next_kept = next_kept
        transactions = endpoint.flags & CONNECTOR_TRANSACTIONS
        for (kind, id), (mark, a, b, c, outcomes) in states.items():
            if kind == b"i":
                inside = InChannel(id)
                inside.received = a
                inside.resolved = b
                inside.opened = c
                inside.doomed = mark
                inside.outcomes = [(word >> 1, bool(word & 1)) for word in outcomes]
                link.ins.add(id, inside)
            else:
                outside = OutChannel(id)
                outside.base = outside.answered = outside.commit_sent = a
                outside.consumed = b
                outside.received = outside.sent = outside.high = max(a, b)
                outside.base_offset = c
                outside.closing = mark
                link.outs.add(id, outside)
        # Uncommitted messages: what the log has of them was received, told or not.
        prefix = KEPT_KEY + b"%016x/" % link.id
        known = set()                                # a message that was planned again is in two notes
        for key, value in sorted(self.bus.notes(prefix).items()):
            kept = Kept()
            kept.key = key
            kept.value = value
            kept.number = int(key[len(prefix):], 16)
            link.next_kept = max(link.next_kept, kept.number + 1)
            at = 0
            while at < len(value):
                id, sequence, size = KEPT.unpack_from(value, at)
                at += KEPT.size
                inside = link.ins.find(id)
                if inside is None and kept.number >= noted:
                    inside = InChannel(id)
                    inside.opened = kept.number
                    link.ins.add(id, inside)
                if inside is not None and kept.number >= inside.opened and (id, sequence) not in known:
                    known.add((id, sequence))
                    inside.pending.append((sequence, kept, at, at + size))
                    inside.received = max(inside.received, sequence + 1)
                    kept.left += 1
                at += size
            kept.cost = len(value) + KEPT_COST * <uint64_t>kept.left
            if kept.left == 0:
                self.bus.drop_note(key, now)
            else:
                link.kept_bytes += kept.cost
        for inside in link.ins.items:
            inside.pending.sort(key=lambda entry: entry[0])
        link.subscription = self.bus.subscribe(
            endpoint.filter, at_least_once=True, kept=True, owner=f"relink/{link.id:016x}", protocol=RELINK,
            start=floor, now=now)
        link.member = link.subscription.join(link, -1, now)
        for inside in link.ins.items:
            link.find_topic(inside)
        # How far the intent was carried out, the end of the log tells.
        missing = sum([count for _, _, count in runs])
        missing -= min(missing, self.bus.log.next_offset - first)
        if transactions:
            if missing:
                self.redo(link, runs, self.bus.log.next_offset - first, now)
            for inside in link.ins.items:
                link.drop_pending(inside, inside.resolved, now)
        else:
            for id, start, count in reversed(runs):
                undone = min(missing, count)
                inside = link.ins.find(id)
                inside.received -= undone
                inside.resolved = inside.received
                missing -= undone
        # Notes did not always say so.
        link.used = flags >> 2 & 1 or bool(link.ins.items or [True for outside in link.outs.items if outside.base])
        link.checkpoint(now)
        self.links[link.id] = link
        if not link.used:
            self.unused[link.id] = link
        return link

    def read_entries(self, bytes text, at, count, dict states):
        """Entries of a note: (what, channel) -> flags, three numbers, outcomes. Later ones replace earlier ones."""
        for _ in range(count):
            if at >= len(text):
                return
            kind, mark, outcomes, id, a, b, c = ENTRY.unpack_from(text, at)
            at += ENTRY.size
            words = struct.unpack_from(f"<{outcomes}Q", text, at)
            at += 8 * outcomes
            if kind in b"xX":
                states.pop((b"i" if kind == b"x" else b"o", id), None)
            else:
                states[kind, id] = (mark, a, b, c, words)

    cdef int redo(self, Link link, list runs, uint64_t done, int64_t now) except -1:
        """A commit that was under way: the rest of its messages, which the log still has as uncommitted ones. Where it has no
        room for them, the peer, which was told nothing yet, asks again."""
        cdef InChannel channel
        cdef Message message
        cdef uint64_t seen = 0
        memset(&message, 0, sizeof(Message))
        message.protocol = RELINK
        message.flags = FLAG_CONFIRMED
        for id, start, count in runs:
            channel = link.ins.find(id)
            for entry in channel.pending:
                if start <= entry[0] < start + count:
                    seen += 1
                    if seen > done and self.publish_kept(link, channel, entry, &message, now) != APPEND_OK:
                        channel.resolved = entry[0]
                        channel.outcomes[len(channel.outcomes) - 1] = (entry[0], True)
                        channel.partial = True
                        return 0
        return 0

    cdef int publish_kept(self, Link link, InChannel channel, tuple entry, Message* message, int64_t now) except -100:
        """An uncommitted message becomes one of its topic; as append_message() answers."""
        cdef Kept kept = entry[1]
        cdef Py_ssize_t start = entry[2], used, wanted
        cdef RawPacket packet
        cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(kept.value) + start
        cdef uint8_t* joined = NULL
        cdef uint32_t* sizes = NULL
        cdef uint32_t i
        cdef int rc
        # It was let through by the limits of its time, which are perhaps not those of today.
        cdef Bounds bounds = Bounds(UINT32_MAX, UINT32_MAX, <uint64_t>1 << 40)
        memset(&packet, 0, sizeof(RawPacket))
        if next_packet(data, <Py_ssize_t>entry[3] - start, link.endpoint.connector_size, 0, &bounds, &packet, &used,
                       &wanted) != 1:
            raise LogError("an uncommitted message in the log is damaged")
        joined = <uint8_t*>malloc(packet.payload + 1)
        sizes = <uint32_t*>malloc((packet.parts + 1) * sizeof(uint32_t))
        try:
            if joined == NULL or sizes == NULL:
                raise MemoryError
            join_parts(&packet, joined)
            for i in range(packet.parts):
                sizes[i] = <uint32_t>part_size(&packet, i)
            message.topic = channel.topic
            message.flags = FLAG_CONFIRMED | FLAG_PARTS
            message.correlation = entry[0] & UINT32_MAX
            message.parts = sizes
            message.parts_count = packet.parts
            message.payload = joined
            message.payload_len = packet.payload
            message.now = now
            rc = self.bus.publish_message(message)
        finally:
            free(joined)
            free(sizes)
        return rc

    # --- links ---------------------------------------------------------------------------------------------------------

    cdef int sweep(self, int64_t now) except -1:
        """Lets go of links that nobody came back to."""
        cdef Link link
        if 0 <= now - self.last_sweep < SWEEP_US:
            return 0
        self.last_sweep = now
        for link in list(self.links.values()):
            if link.session is None and now - link.alone_since > self.grace_us:
                self.counts.links_expired += 1
                link.forget(now)
        return 0

    cdef bint room_for_link(self, int64_t now) except -1:
        """Whether there may be one more. Whoever connects makes one, and what nobody ever used is in nobody's way."""
        cdef Link link
        while <uint32_t>len(self.links) >= self.max_links:
            if not self.unused:
                return False
            link = next(iter(self.unused.values()))
            self.counts.links_displaced += 1
            link.forget(now)
        return True

    cdef Link new_link(self, Endpoint endpoint, int64_t now):
        cdef Link link = Link()
        cdef uint64_t id = 0
        while id == 0 or id in self.links:
            id = int.from_bytes(urandom(8), "little") >> 1      # nobody can guess another's
        link.id = id
        link.shared = self
        link.endpoint = endpoint
        link.ins = Channels()
        link.outs = Channels()
        link.waiting = []
        link.changed = []
        link.alone_since = now
        link.max_message = self.bounds.max_payload
        link.subscription = self.bus.subscribe(
            endpoint.filter, at_least_once=True, kept=True, owner=f"relink/{id:016x}", protocol=RELINK, now=now)
        try:
            link.member = link.subscription.join(link, -1, now)
            link.checkpoint(now)
        except BaseException:
            self.bus.unsubscribe(link.subscription, now)
            raise
        self.links[id] = link
        return link


# --- sessions ----------------------------------------------------------------------------------------------------------

cdef class RelinkSession(LoggedSession):
    def __cinit__(self, Relink shared not None):
        self.shared = shared
        self.bus = shared.bus
        self.touched = []
        self.committing = []
        self.closing_ids = {}
        self.closing_room = CLOSING
        self.message.protocol = RELINK

    cdef Py_ssize_t receive(self, const uint8_t* data, Py_ssize_t n, int64_t now) except -1:
        cdef Py_ssize_t at = 0, used = 0, wanted = 0
        cdef RawHello hello
        if not self.bus.log.open:       # the gateway is ending
            self.closing = True
            return n
        if self.began == 0:
            self.began = now
        if n:
            self.heard = now
            self.pinged = 0
        while not self.closing and self.stage != AT_PACKETS:
            if self.stage == AT_VERSION:
                if n - at < VERSION_SIZE:
                    self.wanted = VERSION_SIZE
                    break
                # Whatever it can do beyond it, it can do the only version there is.
                self.out.commit(write_version(self.out.reserve(VERSION_SIZE), VERSION))
                self.stage = AT_HELLO
                at += VERSION_SIZE
            else:
                if next_hello(data + at, n - at, &hello, &used, &wanted) == 0:
                    self.wanted = wanted
                    break
                self.on_hello(&hello, now)
                at += used
        if self.stage == AT_PACKETS and not self.closing:
            at += self.receive_packets(data + at, n - at, now)
        self.flush(now)
        return n if self.closing else at

    cdef int violate(self) except -1:
        """The peer did what the protocol does not allow here: the connection ends."""
        self.shared.counts.violations += 1
        self.closing = True
        return 0

    cdef int promise(self) except -1:
        """What is put from now on leaves when all that was appended is safe."""
        self.confirm_at(self.bus.log.lsn())
        return self.gate()

    # --- the handshake -------------------------------------------------------------------------------------------------

    cdef int on_hello(self, RawHello* hello, int64_t now) except -1:
        cdef Endpoint endpoint
        cdef Link link = None
        cdef RelinkSession older
        cdef Relink shared = self.shared
        shared.sweep(now)
        endpoint = shared.endpoints.get(hello.name[:hello.name_size])
        if (
            endpoint is None or hello.connector_size != endpoint.connector_size
            or hello.listener_size != endpoint.listener_size
            or (hello.flags & (CONNECTOR_TRANSACTIONS | LISTENER_TRANSACTIONS)) != endpoint.flags
            or (endpoint.rights is not None and endpoint.rights.revoked)
        ):
            shared.counts.handshakes_refused += 1
            self.closing = True
            return 0
        if hello.link >> 63:
            return self.violate()
        if hello.link and hello.epoch == shared.epoch:
            link = shared.links.get(hello.link)
            if link is not None and link.endpoint is not endpoint:
                link = None
            if link is not None and link.session is None and now - link.alone_since > shared.grace_us:
                shared.counts.links_expired += 1
                link.forget(now)
                link = None
        self.stage = AT_PACKETS
        if link is None and hello.flags & REQUIRE_LINK:
            shared.counts.links_refused += 1
            self.out.commit(write_answer(self.out.reserve(ANSWER_SIZE), shared.epoch, 0))
            self.closing = True
            return 0
        shared.counts.handshakes += 1
        if link is None:
            if not shared.room_for_link(now):
                shared.counts.handshakes_refused += 1
                self.closing = True
                return 0
            try:
                link = shared.new_link(endpoint, now)
            except (LogError, BusError):
                shared.counts.handshakes_refused += 1
                self.closing = True
                return 0
            shared.counts.links_new += 1
            self.may_send = True
        else:
            older = link.session
            if older is not None:       # the newest wins: the peer has noticed what we have not
                shared.counts.links_replaced += 1
                older.let_go(now)
                older.closing = True
                older.wake()
            shared.counts.links_resumed += 1
            self.resuming = True
        self.link = link
        link.session = self
        shared.unused.pop(link.id, None)
        if endpoint.rights is not None:
            self.rights_changes = endpoint.rights.changes
        self.name_origin(endpoint.name)
        self.promise()                  # a link that was told of is there after a kill
        self.out.commit(write_answer(self.out.reserve(ANSWER_SIZE), shared.epoch, link.id))
        if self.resuming:
            self.renotify(now)
        else:
            self.wake()
        return 0

    cdef int renotify(self, int64_t now) except -1:
        """All that was received and consumed, then resume (relink §3.5). Outcomes of commits are told to a peer that asks
        for them again: told out of turn they would contradict those that it knows."""
        cdef InChannel channel
        cdef uint8_t size = self.link.endpoint.connector_size
        for channel in self.link.ins.items:
            channel.told_received = channel.told_consumed = 0
            if channel.received:
                channel.told_received = channel.received
                self.out.commit(write_sequence(
                    self.out.reserve(LARGEST_ACK), SEQUENCE_ACKNOWLEDGEMENT, RECEIVED, channel.id, size,
                    <uint32_t>(channel.received - 1)))
            if channel.resolved:
                channel.told_consumed = channel.resolved
                self.out.commit(write_sequence(
                    self.out.reserve(LARGEST_ACK), SEQUENCE_ACKNOWLEDGEMENT, CONSUMED, channel.id, size,
                    <uint32_t>(channel.resolved - 1)))
        self.out.commit(write_general(self.out.reserve(GENERAL_SIZE), RESUME))
        return 0

    # --- batches -------------------------------------------------------------------------------------------------------

    cdef Py_ssize_t receive_packets(self, const uint8_t* data, Py_ssize_t n, int64_t now) except -1:
        """Takes all whole packets, in batches: first the intent, then packet by packet, then the acknowledgements."""
        cdef Py_ssize_t at = 0, ahead, used = 0, wanted = 0
        cdef uint32_t count, go, done
        cdef int found
        cdef uint8_t own = self.link.endpoint.connector_size, other = self.link.endpoint.listener_size
        while not self.closing and not self.blocked:
            if self.out.size >= self.high_water:
                self.blocked = self.waits_room = True
                break
            count = done = 0
            ahead = at
            found = 1
            while count < BATCH:
                found = next_packet(
                    data + ahead, n - ahead, own, other, &self.shared.bounds, &self.shared.batch[count].packet, &used, &wanted)
                if found <= 0:
                    break
                self.shared.batch[count].start = ahead
                ahead += used
                self.shared.batch[count].end = ahead
                count += 1
                if self.shared.batch[count - 1].packet.format == OPERATION and self.shared.batch[count - 1].packet.type == CLOSE:
                    break               # plan() goes no further: what follows would be read once more for each
            if count:
                go = self.plan(count, now)
                while done < go:
                    self.on_packet(&self.shared.batch[done].packet, now)
                    if self.closing or self.blocked:
                        break
                    self.targets_done = 0
                    at = self.shared.batch[done].end
                    done += 1
                self.finish_batch(now)
            if done < count:
                continue
            if found == 0:
                self.wanted = wanted
                break
            if found < 0:
                self.shared.counts.bad_packets += 1
                self.closing = True
        return at

    cdef uint32_t plan(self, uint32_t count, int64_t now) except? 0:
        """Writes down which messages of the batch come next in the log, before any does. Answers how many packets may be
        handled now; the others are planned when these have had their effect."""
        cdef RawPacket* packet
        cdef InChannel channel
        cdef uint32_t i, k
        cdef uint64_t id
        cdef bint transactions = self.link.endpoint.flags & CONNECTOR_TRANSACTIONS
        self.runs_count = 0
        self.left = 0
        for i in range(count):
            packet = &self.shared.batch[i].packet
            if packet.format == OPERATION and packet.type == CLOSE:
                count = i + 1
                break
            if packet.type == UNCOMMITTED and (
                packet.format == ACKNOWLEDGEMENT or packet.format == SEQUENCE_ACKNOWLEDGEMENT
            ):
                # It brings dead letters, and between an intent and its messages there is nothing else in the log.
                count = max(i, 1)
                break
            if packet.format != MESSAGE:
                continue
            for k in range(self.targets_done if i == 0 else 0, packet.count):
                id = channel_id(packet.ids + <size_t>k * packet.id_size, packet.id_size)
                channel = self.link.ins.find(id)
                if channel is None:
                    channel = self.may_open(id)
                if channel is None or (channel.topic == 0 and not transactions):
                    count = i + 1       # on_message() finds the same
                    break
                if not transactions:
                    self.add_run(id, channel.received + channel.planned)
                channel.planned += 1
                self.left += 1
                self.link.change(channel)
            else:
                continue
            break
        if self.left and self.full_since and not transactions and not self.has_room(count):
            self.forget_plan(now)          # before it is announced once more, in vain
            self.not_appended(APPEND_FULL, now)
            return 0
        if self.left:
            try:
                if transactions:
                    self.keep_uncommitted(count, now)
                else:
                    self.link.write(self.shared.runs, self.runs_count, now)
            except LogError as error:
                self.forget_plan(now)
                self.not_appended(APPEND_FULL if isinstance(error, LogFull) else APPEND_FAILED, now)
                return 0
        return count

    cdef bint has_room(self, uint32_t count) noexcept:
        """Whether the log has room for the batch's first message."""
        cdef uint32_t i
        cdef RawPacket* packet
        for i in range(count):
            packet = &self.shared.batch[i].packet
            if packet.format == MESSAGE and packet.count:
                return self.bus.log.reserve(
                    RECORD_HEADER + 4 + 4 * <uint64_t>packet.parts + packet.payload, False) != NULL
        return True

    cdef InChannel may_open(self, uint64_t id):
        """A channel that was not open, if it may be opened now."""
        if self.closing_ids:
            if self.closing_ids.get(id, 0) > self.out.taken:
                return None             # its peer cannot have seen yet that it is closed
            self.closing_ids.pop(id, None)
        return self.link.open_in(id)

    cdef int add_run(self, uint64_t channel, uint64_t start) except -1:
        cdef Run* grown
        cdef Run* last
        if self.runs_count:
            last = &self.shared.runs[self.runs_count - 1]
            if last.channel == channel:
                last.count += 1
                return 0
        if self.runs_count == self.shared.runs_room:
            grown = <Run*>realloc(self.shared.runs, (2 * self.shared.runs_room + 16) * sizeof(Run))
            if grown == NULL:
                raise MemoryError
            self.shared.runs = grown
            self.shared.runs_room = 2 * self.shared.runs_room + 16
        self.shared.runs[self.runs_count] = Run(channel, start, 1)
        self.runs_count += 1
        return 0

    cdef int forget_plan(self, int64_t now) except -1:
        """What was announced and not done comes again, and is announced again."""
        cdef InChannel channel
        for channel in self.link.ins.items:
            channel.planned = 0
        self.left = 0
        if self.kept_entries is not None:
            for channel, entry in self.kept_entries[self.kept_at:]:
                if entry is not None:
                    self.link.drop_kept(entry[1], now)
            self.kept_entries = None
        return 0

    cdef int finish_batch(self, int64_t now) except -1:
        if self.link is None:
            return 0
        if self.left:
            self.forget_plan(now)          # the intent said more than was done
            self.write_note(now)
        if self.note_due:
            self.note_due = False
            self.write_note(now)
        self.kept_entries = None
        self.acknowledge()
        if self.link.acked > ACKED:
            self.write_note(now)
        return 0

    cdef int write_note(self, int64_t now) except -1:
        """Where the channels stand now. Without room it is told later: it is what a restart begins from, and nothing that
        anybody was promised."""
        try:
            self.link.write(NULL, 0, now)
        except LogError:
            self.link.unwritten = True
        return 0

    cdef int keep_uncommitted(self, uint32_t count, int64_t now) except -1:
        """Writes the batch's messages down as they came, to become messages of their topics when they are committed."""
        cdef Link link = self.link
        cdef RawPacket* packet
        cdef InChannel channel
        cdef Kept kept = None
        cdef uint32_t i, k
        cdef uint64_t id, cost, added = 0
        cdef Py_ssize_t size, at = 0
        cdef Py_ssize_t most = self.bus.log.max_record - RECORD_HEADER - NOTE_ROOM
        cdef list pieces = [], entries = [], notes = []
        cdef dict ahead = {}
        for i in range(count):
            packet = &self.shared.batch[i].packet
            if packet.format != MESSAGE:
                continue
            size = self.shared.batch[i].end - self.shared.batch[i].start
            for k in range(self.targets_done if i == 0 else 0, packet.count):
                id = channel_id(packet.ids + <size_t>k * packet.id_size, packet.id_size)
                channel = link.ins.find(id)
                if channel is None:
                    break
                sequence = channel.received + ahead.get(id, 0)
                ahead[id] = ahead.get(id, 0) + 1
                cost = KEPT.size + size + KEPT_COST
                if KEPT.size + size > most or link.kept_bytes + cost > self.shared.max_uncommitted or channel.doomed:
                    entries.append((channel, None))
                    continue
                if kept is None or at + KEPT.size + size > most:
                    kept = Kept()
                    kept.number = link.next_kept + len(notes)
                    kept.key = KEPT_KEY + b"%016x/%016x" % (link.id, kept.number)
                    pieces = []
                    notes.append((kept, pieces))
                    at = 0
                pieces.append(KEPT.pack(id, sequence, size))
                pieces.append(PyBytes_FromStringAndSize(<const char*>packet.head, size))
                entries.append((channel, (sequence, kept, at + KEPT.size, at + KEPT.size + size)))
                kept.left += 1
                kept.cost += cost
                link.kept_bytes += cost
                added += cost
                at += KEPT.size + size
        try:
            for kept, pieces in notes:
                kept.value = b"".join(pieces)
                self.bus.put_note(kept.key, kept.value, now)
                link.next_kept = kept.number + 1
        except LogError:
            link.kept_bytes -= added
            for kept, pieces in notes:
                if kept.value is not None:
                    self.bus.drop_note(kept.key, now)
            raise
        self.kept_entries = entries
        self.kept_at = 0
        return 0

    cdef int on_packet(self, const RawPacket* packet, int64_t now) except -1:
        cdef uint32_t i
        if packet.format == MESSAGE:
            return self.on_message(packet, now)
        if packet.format == GENERAL:
            return self.on_general(packet.type, now)
        for i in range(self.targets_done, packet.count):
            if packet.format == OPERATION or packet.format == SEQUENCE_OPERATION:
                self.on_operation(packet, channel_id(packet.ids + <size_t>i * packet.id_size, packet.id_size), now)
            else:
                self.on_acknowledgement(
                    packet, channel_id(packet.ids + <size_t>i * packet.id_size, packet.id_size), now)
            if self.closing or self.blocked:
                self.targets_done = i
                break
        return 0

    cdef int on_general(self, uint8_t type, int64_t now) except -1:
        if type == PING:
            self.shared.counts.pings += 1
            self.out.commit(write_general(self.out.reserve(GENERAL_SIZE), PONG))
        elif type == RESUME:
            if self.resuming and not self.may_send:
                self.on_resume(now)
        elif type == SHUTDOWN:
            if not self.link.peer_shut:
                self.link.peer_shut = True
                self.link.unwritten = True
                self.write_note(now)
                self.consider_shutdown(now)
        return 0

    # --- messages of the peer ------------------------------------------------------------------------------------------

    cdef int touch(self, InChannel channel) except -1:
        if not channel.touched:
            channel.touched = True
            self.touched.append(channel)
        return 0

    cdef int on_message(self, const RawPacket* packet, int64_t now) except -1:
        cdef InChannel channel
        cdef uint32_t i
        cdef uint64_t id
        cdef int rc
        cdef bint transactions = self.link.endpoint.flags & CONNECTOR_TRANSACTIONS
        cdef bint filled = False
        for i in range(self.targets_done, packet.count):
            id = channel_id(packet.ids + <size_t>i * packet.id_size, packet.id_size)
            channel = self.link.ins.find(id)
            if channel is None or channel.planned == 0:
                return self.violate() if channel is None or channel.topic else self.forbid()
            if transactions:
                entry = self.kept_entries[self.kept_at]
                self.kept_at += 1
                if entry[1] is None:
                    channel.doomed = True
                    self.note_due = True
                    self.link.change(channel)
                else:
                    channel.pending.append(entry[1])
            else:
                if not filled:
                    self.fill(packet)
                    filled = True
                self.message.topic = channel.topic
                self.message.correlation = channel.received & UINT32_MAX
                self.message.now = now
                rc = self.bus.publish_message(&self.message)
                if rc != APPEND_OK:
                    self.targets_done = i
                    return self.not_appended(rc, now)
                self.full_since = 0
                channel.resolved += 1
            channel.received += 1
            channel.planned -= 1
            self.left -= 1
            self.shared.counts.messages += 1
            self.touch(channel)
        return 0

    cdef int forbid(self) except -1:
        self.shared.counts.forbidden += 1
        self.closing = True
        return 0

    cdef int fill(self, const RawPacket* packet) except -1:
        """The message as the log takes it: its parts without padding, and their sizes."""
        cdef uint32_t* sizes
        cdef uint8_t* joined
        cdef uint32_t i
        cdef uint64_t size
        cdef bint straight = True       # no part but the last has padding, so they are joined already
        if packet.parts > self.shared.sizes_room:
            sizes = <uint32_t*>realloc(self.shared.sizes, packet.parts * sizeof(uint32_t))
            if sizes == NULL:
                raise MemoryError
            self.shared.sizes = sizes
            self.shared.sizes_room = packet.parts
        for i in range(packet.parts):
            size = part_size(packet, i)
            self.shared.sizes[i] = <uint32_t>size
            if size & 7 and i + 1 < packet.parts:
                straight = False
        self.message.payload = packet.data
        if not straight:
            if <Py_ssize_t>packet.payload > self.shared.joined_room:
                joined = <uint8_t*>realloc(self.shared.joined, packet.payload)
                if joined == NULL:
                    raise MemoryError
                self.shared.joined = joined
                self.shared.joined_room = packet.payload
            join_parts(packet, self.shared.joined)
            self.message.payload = self.shared.joined
        self.message.flags = FLAG_CONFIRMED | FLAG_PARTS
        self.message.parts = self.shared.sizes
        self.message.parts_count = packet.parts
        self.message.payload_len = packet.payload
        return 0

    cdef int not_appended(self, int rc, int64_t now) except -1:
        """A log without room stops the reading of this connection. What was not committed cannot be refused in the
        protocol's words, so after block_timeout the connection ends; the peer has it all, and sends it again."""
        if self.wait_for_room(rc, self.shared.block_timeout_us, now):
            return 0
        if rc == APPEND_TOO_LARGE:
            self.shared.counts.too_large += 1
        else:
            self.shared.counts.refused_full += 1
        self.closing = True
        return 0

    cdef int acknowledge(self) except -1:
        """What this batch brought is in the log; the peer is told when it is safe there."""
        cdef InChannel channel
        if not self.touched:
            return 0
        self.promise()
        for channel in self.touched:
            channel.touched = False
            self.acknowledge_one(channel)
        self.touched = []
        return 0

    cdef int acknowledge_one(self, InChannel channel) except -1:
        """Consumed implies received, so that alone says both where it can."""
        cdef uint8_t size = self.link.endpoint.connector_size
        if channel.received > channel.told_received and channel.received > channel.resolved:
            self.tell(RECEIVED, channel.id, size, channel.told_received, channel.received)
        channel.told_received = channel.received
        if channel.resolved > channel.told_consumed:
            self.tell(CONSUMED, channel.id, size, channel.told_consumed, channel.resolved)
            channel.told_consumed = channel.resolved
        return 0

    cdef int tell(self, uint8_t type, uint64_t id, uint8_t size, uint64_t before, uint64_t upto) except -1:
        if upto == before + 1:
            self.out.commit(write_plain(self.out.reserve(LARGEST_ACK), ACKNOWLEDGEMENT, type, id, size))
        else:
            self.out.commit(write_sequence(
                self.out.reserve(LARGEST_ACK), SEQUENCE_ACKNOWLEDGEMENT, type, id, size, <uint32_t>(upto - 1)))
        return 0

    # --- operations of the peer ----------------------------------------------------------------------------------------

    cdef int on_operation(self, const RawPacket* packet, uint64_t id, int64_t now) except -1:
        cdef InChannel channel = self.link.ins.find(id)
        cdef uint64_t upto
        cdef uint32_t ahead
        if packet.format == OPERATION and packet.type == CLOSE:
            return self.on_close(channel, id, now)
        if channel is None or not self.link.endpoint.flags & CONNECTOR_TRANSACTIONS:
            return self.violate()
        if packet.format == OPERATION:
            upto = channel.resolved + 1
        else:
            # How far it is from the last one, by 32 bits; one that is behind was resolved before a reconnection.
            ahead = packet.sequence + 1 - <uint32_t>channel.resolved
            if ahead > channel.received - channel.resolved:
                if not self.resuming:
                    return self.violate()
                ahead = <uint32_t>channel.resolved - packet.sequence - 1
                if ahead > channel.resolved:
                    return self.violate()
                return self.answer_again(channel, channel.resolved - ahead) if packet.type == COMMIT else 0
            upto = channel.resolved + ahead
        if upto > channel.received:
            return self.violate()
        if upto == channel.resolved:
            return self.answer_again(channel, upto) if packet.type == COMMIT and upto else 0
        if packet.type == COMMIT:
            return self.on_commit(channel, upto, now)
        self.shared.counts.rollbacks += 1
        self.link.drop_pending(channel, upto, now)
        channel.resolved = upto
        channel.doomed = False
        self.note_due = True
        self.link.change(channel)
        return self.touch(channel)

    cdef int answer_again(self, InChannel channel, uint64_t upto) except -1:
        """The outcome of a commit that was answered before, which the peer did not hear of."""
        for end, committed in channel.outcomes:
            if end >= upto:
                return self.answer(channel, upto, committed)
        return 0                        # rolled back since, or long ago: there is nothing to tell

    cdef int answer(self, InChannel channel, uint64_t upto, bint committed) except -1:
        """Always by number, as is asked for after rollbacks (relink §3.2)."""
        self.promise()
        self.acknowledge_one(channel)
        self.out.commit(write_sequence(
            self.out.reserve(LARGEST_ACK), SEQUENCE_ACKNOWLEDGEMENT, COMMITTED if committed else UNCOMMITTED, channel.id,
            self.link.endpoint.connector_size, <uint32_t>(upto - 1)))
        return 0

    cdef int on_commit(self, InChannel channel, uint64_t upto, int64_t now) except -1:
        cdef Link link = self.link
        cdef Run run
        cdef list entries = []
        cdef uint64_t before = channel.resolved
        cdef uint64_t done = 0
        cdef int rc = APPEND_OK
        cdef bint refused = channel.doomed or channel.topic == 0
        for entry in channel.pending:
            if entry[0] >= upto:
                break
            entries.append(entry)
            # The sizes of parts take up to four bytes where the packet has two.
            refused = refused or 2 * (entry[3] - entry[2]) + RECORD_HEADER > self.bus.log.max_record and not self.fits(entry)
        if not refused:
            run = Run(channel.id, before, len(entries))
            outcomes = list(channel.outcomes)
            channel.resolved = upto
            self.outcome(channel, upto, True)
            link.change(channel)
            try:
                link.write(&run, 1, now)
                for entry in entries:
                    rc = self.shared.publish_kept(link, channel, entry, &self.message, now)
                    if rc != APPEND_OK:
                        break
                    done += 1
            except LogFull:
                rc = APPEND_FULL
            except LogError:
                rc = APPEND_FAILED
            if rc != APPEND_OK:
                # As far as it got. Once it has begun it is never refused, and waits for room as long as it takes.
                channel.outcomes = outcomes
                channel.resolved = before
                if done:
                    channel.partial = True
                    channel.resolved = entries[done - 1][0] + 1
                    link.drop_pending(channel, channel.resolved, now)
                self.write_note(now)
                if rc == APPEND_FULL and channel.partial:
                    self.blocked = self.waits_space = True
                    return 0
                self.not_appended(rc, now)
                if self.blocked or rc == APPEND_FAILED:
                    return 0
                self.closing = False    # it can be refused
                refused = True
        if refused:
            self.shared.counts.uncommitted += 1
            channel.doomed = False
            self.outcome(channel, upto, False)
            self.note_due = True
        else:
            self.shared.counts.commits += 1
        self.full_since = 0
        channel.partial = False
        channel.resolved = upto
        link.drop_pending(channel, upto, now)
        link.change(channel)
        self.touch(channel)
        if refused:
            self.write_note(now)        # so that the peer hears the same when it asks again
        return self.answer(channel, upto, not refused)

    cdef bint fits(self, tuple entry) except -1:
        """Whether the log takes an uncommitted message as a message."""
        cdef Kept kept = entry[1]
        cdef RawPacket packet
        cdef Py_ssize_t used, wanted
        cdef Bounds bounds = Bounds(UINT32_MAX, UINT32_MAX, <uint64_t>1 << 40)
        if next_packet(
            <const uint8_t*>PyBytes_AS_STRING(kept.value) + <Py_ssize_t>entry[2], entry[3] - entry[2],
            self.link.endpoint.connector_size, 0, &bounds, &packet, &used, &wanted,
        ) != 1:
            return False
        return RECORD_HEADER + 4 + 4 * <uint64_t>packet.parts + packet.payload <= self.bus.log.max_record

    cdef int outcome(self, InChannel channel, uint64_t upto, bint committed) except -1:
        cdef list outcomes = channel.outcomes
        cdef Py_ssize_t last = len(outcomes) - 1
        if last >= 0 and outcomes[last][1] == committed:
            outcomes[last] = (upto, committed)
        else:
            outcomes.append((upto, committed))
            if len(outcomes) > OUTCOMES:
                del outcomes[0]
        return 0

    cdef int on_close(self, InChannel channel, uint64_t id, int64_t now) except -1:
        """The channel ends: what is uncommitted is dropped, what was received is told first. One that is not open may have
        been closed before a reconnection."""
        cdef Link link = self.link
        if channel is not None:
            link.drop_pending(channel, UINT64_MAX, now)
            self.touch(channel)
            channel.resolved = channel.received
            self.acknowledge()
            link.ins.remove(channel)
            link.change(channel)
            self.write_note(now)
        self.promise()
        self.out.commit(write_plain(
            self.out.reserve(LARGEST_ACK), ACKNOWLEDGEMENT, CLOSED, id, link.endpoint.connector_size))
        self.closing_ids[id] = self.out.taken + <uint64_t>self.out.size
        if len(self.closing_ids) > self.closing_room:
            # Not before there are twice as many: none of them has to have left by then.
            self.closing_ids = {one: end for one, end in self.closing_ids.items() if end > self.out.taken}
            self.closing_room = max(CLOSING, 2 * len(self.closing_ids))
        return self.consider_shutdown(now)

    # --- acknowledgements of the peer ----------------------------------------------------------------------------------

    cdef int on_acknowledgement(self, const RawPacket* packet, uint64_t id, int64_t now) except -1:
        cdef Link link = self.link
        cdef OutChannel channel = link.outs.find(id)
        cdef bint transactions = link.endpoint.flags & LISTENER_TRANSACTIONS
        cdef uint64_t cursor, limit, sent
        cdef uint32_t ahead
        if packet.type == CLOSED:
            if channel is None or not channel.closing:
                return self.violate()
            link.outs.remove(channel)
            link.change(channel)
            if link.held:
                self.wake()
            return self.consider_shutdown(now)
        if channel is None:
            if not link.recovering or <uint32_t>len(link.outs.items) >= self.shared.max_channels:
                return self.violate()
            # It was opened after the last note: its first message is its first one from the note's floor on.
            channel = OutChannel(id)
            channel.base_offset = link.floor
            link.outs.add(id, channel)
            link.change(channel)
        # What it had of earlier connections it has told before it resumed; then there is only what this one was sent.
        sent = channel.sent if self.may_send else channel.high
        if packet.type == RECEIVED:
            cursor = channel.received
            limit = sent
        elif packet.type == CONSUMED:
            cursor = channel.consumed
            limit = sent
        else:
            if not transactions:
                return self.violate()
            cursor = channel.answered
            limit = channel.high if link.recovering else channel.commit_sent
        if link.recovering:
            limit = max(limit, cursor + 0x7FFFFFFF)     # on_resume() sees whether there are so many
        ahead = 1 if packet.format == ACKNOWLEDGEMENT else packet.sequence + 1 - <uint32_t>cursor
        if ahead > limit - cursor:
            return self.violate()
        if ahead == 0:
            return 0
        cursor += ahead
        if not link.used:
            link.used = True
            self.note_due = True
        if packet.type == UNCOMMITTED:
            cursor = self.on_uncommitted(channel, cursor, now)
        if packet.type == CONSUMED:
            channel.consumed = cursor
        elif packet.type != RECEIVED:
            channel.answered = cursor
            channel.commit_sent = max(channel.commit_sent, cursor)
        if cursor > channel.received:
            channel.received = cursor
        if link.recovering:
            channel.high = channel.sent = max(channel.high, channel.received)
        link.settle(channel)
        if link.waiting or link.held or self.stalled:
            self.wake()
        if link.peer_shut:
            self.consider_shutdown(now)
        return 0

    cdef uint64_t on_uncommitted(self, OutChannel channel, uint64_t upto, int64_t now) except? 0:
        """The peer failed to process these messages: they go to their dead-letter topics. Answers how far it got; where the
        log had no room for all, the packet is read again."""
        cdef uint64_t sequence
        cdef View view
        cdef int rc
        for sequence in range(max(channel.answered, channel.base), min(upto, channel.base + channel.count)):
            if not self.look(channel.at(sequence), &view):
                continue
            rc = self.bury(&view, b"uncommitted by the peer", now)
            if rc != APPEND_OK:
                self.not_appended(rc, now)
                return sequence
            self.full_since = 0
        return upto

    cdef int bury(self, const View* view, bytes reason, int64_t now) except -100:
        """Publishes a message that this peer does not get to its dead-letter topic; as append_message() answers, but for one
        that no log can carry: that is lost."""
        cdef Message m
        cdef bytes topic = self.bus.log.topic_name(view.record.topic)
        cdef bytes name = self.bus.dead_prefix.encode()
        cdef bytes headers
        cdef int rc = APPEND_OK
        if not topic.startswith(name):
            name = (name + topic)[:65535]
            memset(&m, 0, sizeof(Message))
            m.topic = self.bus.make_topic(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
            m.protocol = view.record.protocol
            m.kind = view.record.kind
            m.correlation = view.record.correlation
            m.parts = view.parts
            m.parts_count = view.parts_count
            m.payload = view.payload
            m.payload_len = view.payload_len
            m.now = now
            # The largest messages leave no room for the reason.
            for headers in (b'{"dead-reason": "%b", "dead-offset": "%d"}' % (reason, view.record.offset), b""):
                m.headers = <const uint8_t*>PyBytes_AS_STRING(headers)
                m.headers_len = <uint32_t>PyBytes_GET_SIZE(headers)
                rc = self.bus.publish_message(&m)
                if rc != APPEND_TOO_LARGE:
                    break
        if rc == APPEND_TOO_LARGE:
            self.shared.counts.lost += 1
            return APPEND_OK
        if rc == APPEND_OK:
            self.shared.counts.dead += 1
        return rc

    cdef int bury_too_large(self, const View* view, int64_t now) except -100:
        """The same for a message that is larger than the link takes: once, for however many links that is so."""
        cdef Link link = self.link
        cdef dict buried = self.shared.buried
        cdef int rc
        self.passed += RECORD_HEADER
        if view.record.offset < link.floor:
            return APPEND_OK                # before a restart
        if view.record.offset not in buried:
            self.passed += view.payload_len
            rc = self.bury(view, b"too large for the link", now)
            if rc != APPEND_OK:
                return rc
            buried[view.record.offset] = None
            if len(buried) > MOST_BURIED:
                del buried[next(iter(buried))]
        self.shared.counts.too_large += 1
        link.unwritten = True               # so that a restart does not come to it again
        return APPEND_OK

    # --- messages for the peer -----------------------------------------------------------------------------------------

    cdef bint look(self, const Sent* sent, View* view) noexcept:
        """A message in the log; False where retention has taken it."""
        cdef Segment* segment = self.bus.segment_at(sent.lsn >> 40)
        cdef uint64_t position = sent.lsn & ((<uint64_t>1 << 40) - 1)
        if segment == NULL or segment.number != sent.lsn >> 40 or position >= segment.end:
            return False
        view_record(<RecordHeader*>(segment.base + position), view)
        return True

    cdef int on_resume(self, int64_t now) except -1:
        """The peer has told all that it has of ours: what it has not goes again, in order, then the commits without an
        answer, one by one, so that each gets its own."""
        cdef Link link = self.link
        cdef OutChannel channel
        cdef Delivery delivery
        cdef uint64_t id = 0, sequence, lacking
        if link.recovering:
            link.seek()
            while True:
                lacking = 0
                for channel in link.outs.items:
                    if channel.received > channel.base + channel.count:
                        lacking += channel.received - channel.base - channel.count
                if lacking == 0:
                    break
                while lacking:
                    if not link.subscription.take(link.member, now, &delivery):
                        return self.violate()       # it acknowledged what was never sent
                    if not link.endpoint.channel_for(self.bus, delivery.view.record.topic, &id):
                        continue
                    if delivery.view.payload_len > link.max_message:
                        continue
                    channel = link.outs.find(id)
                    if channel is None or delivery.view.record.offset < channel.base_offset:
                        if channel is None and delivery.view.record.offset >= link.floor:
                            channel = OutChannel(id)
                            channel.base_offset = delivery.view.record.offset
                            link.outs.add(id, channel)
                            link.change(channel)
                        else:
                            continue
                    if channel.received > channel.base + channel.count:
                        lacking -= 1
                    link.put_out(channel, delivery.view.record.offset, self.lsn_of(&delivery))
            link.recovering = False
        self.may_send = True
        for channel in link.outs.items:
            channel.sent = channel.received
            if link.endpoint.flags & LISTENER_TRANSACTIONS:
                for sequence in range(channel.answered, channel.received):
                    self.out.commit(write_sequence(
                        self.out.reserve(LARGEST_ACK), SEQUENCE_OPERATION, COMMIT, channel.id,
                        link.endpoint.listener_size, <uint32_t>sequence))
                channel.commit_sent = max(channel.answered, channel.received)
            if channel.closing:
                self.out.commit(write_plain(
                    self.out.reserve(LARGEST_ACK), OPERATION, CLOSE, channel.id, link.endpoint.listener_size))
            if channel.base + channel.count > channel.sent and not channel.waiting:
                channel.waiting = True
                link.waiting.append(channel)
        if link.shut:
            self.out.commit(write_general(self.out.reserve(GENERAL_SIZE), SHUTDOWN))
        elif link.peer_shut:
            self.consider_shutdown(now)
        return self.wake()

    cdef uint64_t lsn_of(self, Delivery* delivery) noexcept:
        """Where the record stands that was just taken."""
        cdef Subscription subscription = self.link.subscription
        return (subscription.segment << 40) | (subscription.position - padded(delivery.view.record.length))

    cdef int deliver(self, int64_t now, Py_ssize_t room) except -1:
        cdef Link link = self.link
        cdef Delivery delivery
        cdef View view
        cdef Py_ssize_t limit = self.out.size + room
        cdef uint64_t id = 0
        if link is None or not self.may_send or self.closing or not self.bus.log.open:
            return 0
        self.stalled = False
        self.passed = 0
        self.send_waiting(limit, now)
        if link.held and not link.peer_shut:
            if not self.look(&link.holding, &view):
                link.held = False
                self.shared.counts.lost += 1
            else:
                link.held = False
                self.place(link.holding_channel, link.holding.offset, link.holding.lsn, &view, now)
        while self.out.size + self.passed < limit and not link.held and not link.peer_shut:
            if link.outstanding >= self.shared.max_outstanding:
                self.stalled = True
                break
            if not link.subscription.take(link.member, now, &delivery):
                break
            if link.endpoint.channel_for(self.bus, delivery.view.record.topic, &id):
                self.place(id, delivery.view.record.offset, self.lsn_of(&delivery), &delivery.view, now)
            else:
                self.shared.counts.unmapped += 1
                self.passed += RECORD_HEADER
        self.write_commits()
        self.bus.flush(now)             # dead letters
        if self.out.size + self.passed >= limit:
            self.more = True
        return 0

    cdef int place(self, uint64_t id, uint64_t offset, uint64_t lsn, View* view, int64_t now) except -1:
        """Gives a message its number and sends it, if its channel's window allows."""
        cdef Link link = self.link
        cdef OutChannel channel = link.outs.find(id)
        cdef OutChannel other
        if offset < (link.floor if channel is None else channel.base_offset):
            self.passed += RECORD_HEADER
            return 0                    # from before a restart, of a channel that has been closed since, or settled
        if view.payload_len > link.max_message:
            if self.bury_too_large(view, now) != APPEND_OK:
                link.hold(id, offset, lsn)              # until the log has room
            return 0
        if channel is None:
            if <uint32_t>len(link.outs.items) < self.shared.max_channels:
                channel = OutChannel(id)
                channel.base_offset = offset
                link.outs.add(id, channel)
                link.change(channel)
            else:
                # Channels that are idle make room for it.
                for other in link.outs.items:
                    if not other.closing and other.count == 0 and other.consumed == other.sent:
                        self.close_channel(other)
        if channel is None or channel.closing:
            return link.hold(id, offset, lsn)           # until it may be opened
        if (
            channel.base + channel.count == channel.sent and channel.sent - channel.consumed < self.shared.window
            and not channel.waiting
        ):
            channel.push(offset, lsn)
            link.outstanding += 1
            return self.transmit(channel, view)
        return link.put_out(channel, offset, lsn)

    cdef int transmit(self, OutChannel channel, View* view) except -1:
        """The channel's next message."""
        self.write_view(channel.id, view)
        if channel.sent < channel.high:
            self.shared.counts.resent += 1
        else:
            self.shared.counts.delivered += 1
        channel.sent += 1
        channel.high = max(channel.high, channel.sent)
        if self.link.endpoint.flags & LISTENER_TRANSACTIONS and not channel.uncommitted:
            channel.uncommitted = True
            self.committing.append(channel)
        return 0

    cdef int send_waiting(self, Py_ssize_t limit, int64_t now) except -1:
        """What has a number and was not sent, or has to be sent again."""
        cdef Link link = self.link
        cdef OutChannel channel
        cdef list still = []
        cdef View view
        cdef uint32_t i, index, gone
        if not link.waiting:
            return 0
        for channel in link.waiting:
            while (
                self.out.size < limit and channel.sent < channel.base + channel.count
                and channel.sent - channel.consumed < self.shared.window
            ):
                if self.look(channel.at(channel.sent), &view):
                    self.transmit(channel, &view)
                else:
                    # Retention took it, and perhaps more: the next one that is there gets its number.
                    index = <uint32_t>(channel.sent - channel.base)
                    gone = 1
                    while index + gone < channel.count and not self.look(channel.at(channel.sent + gone), &view):
                        gone += 1
                    for i in range(index, channel.count - gone):
                        channel.at(channel.base + i)[0] = channel.at(channel.base + i + gone)[0]
                    channel.count -= gone
                    link.outstanding -= gone
                    self.shared.counts.lost += gone
                    link.change(channel)
            channel.waiting = channel.sent < channel.base + channel.count
            if channel.waiting:
                still.append(channel)
        link.waiting = still
        return 0

    cdef int write_view(self, uint64_t id, View* view) except -1:
        """One record as a message: its own parts, or all of it as one."""
        cdef uint32_t whole = <uint32_t>view.payload_len
        cdef const uint32_t* sizes = &whole
        cdef uint32_t count = 1, i, most = 0
        cdef uint8_t flags = 0, size = self.link.endpoint.listener_size
        cdef Py_ssize_t head, total = 0
        cdef uint8_t* out
        cdef const uint8_t* part = view.payload
        if view.record.flags & FLAG_PARTS:
            sizes = view.parts
            count = view.parts_count
        for i in range(count):
            most |= sizes[i]
            total += padded(sizes[i])
        if count > 0xFF:
            flags |= LONG
        if most > 0xFFFF:               # as many bits as the largest one
            flags |= LARGE
        head = message_head(False, 1, size, flags, count)
        out = self.out.reserve(head + total)
        out += write_message_head(out, id, size, flags, count, sizes)
        for i in range(count):
            out += write_part(out, part, sizes[i])
            part += sizes[i]
        self.out.commit(head + total)
        return 0

    cdef int write_commits(self) except -1:
        """With transactions, all that one delivery sent on a channel is committed together."""
        cdef OutChannel channel
        if not self.committing:
            return 0
        for channel in self.committing:
            channel.uncommitted = False
            channel.commit_sent = channel.sent
            self.out.commit(write_sequence(
                self.out.reserve(LARGEST_ACK), SEQUENCE_OPERATION, COMMIT, channel.id, self.link.endpoint.listener_size,
                <uint32_t>(channel.sent - 1)))
        self.committing = []
        return 0

    # --- ends ----------------------------------------------------------------------------------------------------------

    cdef int close_channel(self, OutChannel channel) except -1:
        channel.closing = True
        self.link.change(channel)
        self.out.commit(write_plain(
            self.out.reserve(LARGEST_ACK), OPERATION, CLOSE, channel.id, self.link.endpoint.listener_size))
        return 0

    cdef int consider_shutdown(self, int64_t now) except -1:
        """The peer opens no more channels: ours are closed once they are settled, then it is told the same, and when its
        own are closed, too, the link is over (relink §3.6)."""
        cdef Link link = self.link
        cdef OutChannel channel
        if not link.peer_shut or not self.may_send:
            return 0
        for channel in link.outs.items:
            if not channel.closing and channel.count == 0 and channel.received == channel.sent:
                self.close_channel(channel)
        if not link.shut and not link.outs.items:
            link.shut = True
            link.unwritten = True
            self.write_note(now)
            self.out.commit(write_general(self.out.reserve(GENERAL_SIZE), SHUTDOWN))
        if link.shut and not link.outs.items and not link.ins.items:
            self.closing = True         # let_go() sees to the rest
        return 0

    cdef int let_go(self, int64_t now) except -1:
        """The connection leaves its link."""
        cdef Link link = self.link
        cdef OutChannel channel
        if link is None:
            return 0
        self.link = None
        link.session = None
        link.alone_since = now
        for channel in self.committing:
            channel.uncommitted = False
        self.committing = []
        if not self.bus.log.open:
            return 0
        if link.peer_shut and link.shut:
            self.shared.counts.links_ended += 1
            return link.forget(now)
        if link.unwritten:
            try:
                link.write(NULL, 0, now)
            except LogError:
                link.unwritten = True
        if not link.used:
            self.shared.unused[link.id] = link
        return 0

    cdef int tick(self, int64_t now) except -1:
        if not self.bus.log.open:
            return 0
        if self.began == 0:
            self.began = now
        self.shared.sweep(now)
        if self.closing:
            return self.check_log()
        if self.link is None:
            if self.shared.handshake_timeout_us and now - self.began > self.shared.handshake_timeout_us:
                self.shared.counts.handshakes_late += 1
                self.closing = True
            return self.check_log()
        if self.link.endpoint.rights is not None and self.rights_changes != self.link.endpoint.rights.changes:
            self.renew_rights(now)
        if self.shared.ping_interval_us and not self.blocked:
            if self.pinged:
                if now - self.pinged > self.shared.ping_timeout_us:
                    self.shared.counts.silent += 1
                    self.closing = True
            elif now - max(self.heard, self.began) > self.shared.ping_interval_us:
                self.pinged = now
                self.out.commit(write_general(self.out.reserve(GENERAL_SIZE), PING))
        self.stop_waiting(self.shared.block_timeout_us, now)     # to be refused, or to end
        if self.link.held:
            self.wake()                 # the log has room, perhaps
        if self.link.unwritten:
            self.write_note(now)
            self.bus.flush(now)
        return self.check_log()

    cdef int renew_rights(self, int64_t now) except -1:
        """The configuration was read again: what is remembered of the key's rights is stale."""
        cdef InChannel channel
        self.rights_changes = self.link.endpoint.rights.changes
        if self.link.endpoint.rights.revoked:
            return self.forbid()
        for channel in self.link.ins.items:
            self.link.find_topic(channel)
        return 0

    cdef int drain(self, int64_t now) except -1:
        if self.link is not None and self.link.unwritten and self.bus.log.open:
            self.write_note(now)
            self.bus.flush(now)
        return self.check_log()

    cdef int unconfirmed(self) except -1:
        self.closing = True
        self.shared.counts.unconfirmed += 1
        return 0

    cdef int lost(self, int64_t now) except -1:
        self.let_go(now)
        if self.bus.log.open:
            self.bus.flush(now)
        return 0
