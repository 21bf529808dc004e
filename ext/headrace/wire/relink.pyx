"""The Relink codec: handshake fields and packets to bytes and bytes to these, both directions. It knows nothing of links,
windows or sequences: what a well-formed packet means is for the session and the connector to say."""

# The grammar (all integers little-endian; padding is zero when sent and ignored when received):
#
#   connector = version:u8 pad[7]  hello  packet*
#   listener  = version:u8 pad[7]  answer packet*                    each part waits for the other side's before it
#   hello     = size:u8 name:utf8[size] connector's id size:u8 listener's id size:u8 flags:u8 pad(8) epoch:u64 link:u64
#   answer    = epoch:u64 link:u64
#
#   packet    = head:u8 short:u8 ...  padded to 8; pad(n) goes to a multiple of n bytes from the packet's beginning
#               head: bit 0 channel, bit 1 multicast, bits 2-4 format, bits 5-7 type (flags in a message)
#
#   general   (channel bit 0)    pad[7]                              0 nop, 1 ping, 2 pong, 3 resume, 4 shutdown
#   0  channel operation         targets                             0 commit, 1 rollback, 2 close
#   1  channel acknowledgement   targets                             0 received, 1 consumed, 2 committed,
#                                                                    3 uncommitted, 4 closed
#   2  sequence operation        targets pad(4) sequence:u32         0 commit, 1 rollback
#   3  sequence acknowledgement  targets pad(4) sequence:u32         0 received to 3 uncommitted
#   4  message                   targets pad(2) [length:u32] sizes data      bit 5 long, bit 6 large
#
#   targets   = id (unicast) | pad[2] count:u32 id[count] (multicast); ids have the size that the handshake gave to the
#               sender's channels, in acknowledgements to the receiver's
#   sizes     = u16[parts] pad(8) | pad(8) u64[parts] (large); parts is `short`, or `length` if long
#   data      = each part, padded to 8

from enum import IntEnum, IntFlag

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport UINT32_MAX, UINT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memset

from headrace.wire.bytes cimport le64, put_le16, put_le32, put_le64, utf8_valid
from headrace.wire.decoding cimport StreamDecoder

PROTOCOL_VERSION = VERSION
MAX_TARGETS = 1024
MAX_PARTS = 65536
MAX_PAYLOAD = 64 * 1024 * 1024

Flags = IntFlag(
    "Flags",
    [
        ("CONNECTOR_TRANSACTIONS", CONNECTOR_TRANSACTIONS),
        ("LISTENER_TRANSACTIONS", LISTENER_TRANSACTIONS),
        ("REQUIRE_LINK", REQUIRE_LINK),
    ],
    module=__name__,
)
GeneralType = IntEnum(
    "GeneralType",
    [("NOP", NOP), ("PING", PING), ("PONG", PONG), ("RESUME", RESUME), ("SHUTDOWN", SHUTDOWN)],
    module=__name__,
)
OperationType = IntEnum("OperationType", [("COMMIT", COMMIT), ("ROLLBACK", ROLLBACK), ("CLOSE", CLOSE)], module=__name__)
AckType = IntEnum(
    "AckType",
    [
        ("RECEIVED", RECEIVED), ("CONSUMED", CONSUMED), ("COMMITTED", COMMITTED), ("UNCOMMITTED", UNCOMMITTED),
        ("CLOSED", CLOSED),
    ],
    module=__name__,
)
cdef tuple GENERAL_TYPES = tuple(GeneralType)
cdef tuple OPERATION_TYPES = tuple(OperationType)
cdef tuple ACK_TYPES = tuple(AckType)

cdef dict REASONS = {
    BAD_TYPE: ("bad type", "an enumeration value that is not used"),
    BAD_COUNT: ("bad count", "more multicast targets than the limit"),
    BAD_LENGTH: ("bad length", "more parts than the limit"),
    BAD_SIZE: ("bad size", "more payload than the limit"),
}


class PacketError(ValueError):
    """The byte stream cannot be read on: a value that the protocol does not use, or more than a limit allows.

    `position` is where the offending packet begins in the stream, `kind` is "bad type", "bad count", "bad length",
    "bad size", or "bad hello" for a handshake that cannot be understood.
    """

    def __init__(self, position, kind, reason):
        super().__init__(f"at byte {position}: {reason}")
        self.position = position
        self.kind = kind
        self.reason = reason


# --- what is taken off the wire -----------------------------------------------------------------------------

cdef class Item:
    """Something taken off the wire. `start` and `end` are its byte range in the stream."""

    cdef readonly int64_t start
    cdef readonly int64_t end

    def fields(self):
        """What it says, by the names of the grammar."""
        raise NotImplementedError

    def __repr__(self):
        fields = ", ".join(f"{name}={value!r}" for name, value in self.fields().items())
        return f"{type(self).__name__}({fields})"


@cython.final
cdef class Version(Item):
    """Either side's first word."""

    cdef readonly uint8_t version

    def fields(self):
        return {"version": self.version}


@cython.final
cdef class Hello(Item):
    """The connector's second one."""

    cdef readonly str name
    cdef readonly uint8_t connector_size
    cdef readonly uint8_t listener_size
    cdef uint8_t _flags
    cdef readonly uint64_t epoch
    cdef readonly uint64_t link

    @property
    def flags(self):
        return Flags(self._flags & 7)

    def fields(self):
        return {
            "name": self.name, "connector_size": self.connector_size, "listener_size": self.listener_size,
            "flags": self._flags & 7, "epoch": self.epoch, "link": self.link,
        }


@cython.final
cdef class Answer(Item):
    """The listener's second one."""

    cdef readonly uint64_t epoch
    cdef readonly uint64_t link

    def fields(self):
        return {"epoch": self.epoch, "link": self.link}


@cython.final
cdef class General(Item):
    cdef uint8_t _type

    @property
    def type(self):
        return GENERAL_TYPES[self._type]

    def fields(self):
        return {"type": self._type}


cdef class Targeted(Item):
    """A packet about channels, by their ids."""

    cdef readonly tuple channels
    cdef readonly bint multicast


@cython.final
cdef class Operation(Targeted):
    """About the sender's channels; `sequence` is None where none is given."""

    cdef uint8_t _type
    cdef readonly object sequence

    @property
    def type(self):
        return OPERATION_TYPES[self._type]

    def fields(self):
        return {
            "type": self._type, "channels": self.channels, "multicast": self.multicast, "sequence": self.sequence,
        }


@cython.final
cdef class Acknowledgement(Targeted):
    """About the receiver's channels; `sequence` is None where none is given."""

    cdef uint8_t _type
    cdef readonly object sequence

    @property
    def type(self):
        return ACK_TYPES[self._type]

    def fields(self):
        return {
            "type": self._type, "channels": self.channels, "multicast": self.multicast, "sequence": self.sequence,
        }


@cython.final
cdef class Message(Targeted):
    """A message on the sender's channels. Its parts are made when they are first asked for."""

    cdef bytes raw              # the packet from the sizes on
    cdef uint8_t flags
    cdef uint32_t count         # of parts
    cdef Py_ssize_t data        # where in `raw` they begin
    cdef readonly uint64_t size     # of the payload, all parts together
    cdef tuple made

    @property
    def long_form(self):
        return bool(self.flags & LONG)

    @property
    def large_form(self):
        return bool(self.flags & LARGE)

    @property
    def parts(self):
        cdef RawPacket packet
        cdef const uint8_t* p
        cdef Py_ssize_t size
        cdef uint32_t i
        cdef list found
        if self.made is None:
            packet.sizes = <const uint8_t*>PyBytes_AS_STRING(self.raw)
            packet.type = self.flags
            p = packet.sizes + self.data
            found = []
            for i in range(self.count):
                size = <Py_ssize_t>part_size(&packet, i)
                found.append(PyBytes_FromStringAndSize(<const char*>p, size))
                p += aligned(size, 8)
            self.made = tuple(found)
            self.raw = None
        return self.made

    @property
    def payload(self):
        """All parts, joined."""
        cdef tuple parts = self.parts
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def fields(self):
        return {
            "channels": self.channels, "multicast": self.multicast, "long": self.long_form, "large": self.large_form,
            "parts": self.parts,
        }


# --- reading a stream ---------------------------------------------------------------------------------------

cdef enum Stage:
    AT_VERSION = 0
    AT_SECOND = 1           # hello or answer
    AT_PACKETS = 2


@cython.final
cdef class Decoder(StreamDecoder):
    """Takes what one side sends, in pieces of any size, and gives back what is in it.

    `sender` is "connector" or "listener". With `handshake` the stream begins with it: a connector's tells the sizes of
    the channel ids, a listener's does not, so they are given, or set before packets come.
    """

    cdef readonly str sender
    cdef public uint8_t connector_size
    cdef public uint8_t listener_size
    cdef bint listens
    cdef int stage
    cdef Bounds bounds
    cdef uint64_t last_id               # the last unicast channel and its tuple: messages tend to repeat it
    cdef tuple last_channels

    def __init__(self, str sender not None, *, bint handshake=True, connector_size=0, listener_size=0,
                 uint32_t max_targets=MAX_TARGETS, uint32_t max_parts=MAX_PARTS, uint64_t max_payload=MAX_PAYLOAD):
        if sender not in ("connector", "listener"):
            raise ValueError(f'the sender is "connector" or "listener", not {sender!r}')
        if not (0 <= connector_size <= ID_BYTES and 0 <= listener_size <= ID_BYTES):
            raise ValueError(f"channel ids have 0 to {ID_BYTES} bytes")
        if max_payload > <uint64_t>1 << 40:
            raise ValueError("a message has at most 2^40 bytes here")
        self.sender = sender
        self.listens = sender == "listener"
        self.connector_size = connector_size
        self.listener_size = listener_size
        self.stage = AT_VERSION if handshake else AT_PACKETS
        self.bounds = Bounds(max_targets, max_parts, max_payload)
        self.wanted = VERSION_SIZE

    cdef Py_ssize_t next_item(self, const uint8_t* data, Py_ssize_t n, list items) except -2:
        cdef RawPacket packet
        cdef Py_ssize_t used = 0
        cdef int found
        cdef Item item
        if self.stage == AT_PACKETS:
            found = next_packet(
                data, n, self.listener_size if self.listens else self.connector_size,
                self.connector_size if self.listens else self.listener_size, &self.bounds, &packet, &used, &self.wanted)
            if found == 0:
                return 0
            if found < 0:
                kind, reason = REASONS[found]
                self.error = PacketError(self.position, kind, reason)
                return -1
            item = self.packet(&packet, data, used)
        else:
            item = self.greeting(data, n, &used)
            if item is None:
                return 0 if self.error is None else -1
        item.start = self.position
        self.position += used
        item.end = self.position
        self.wanted = 8
        items.append(item)
        return used

    cdef Item greeting(self, const uint8_t* data, Py_ssize_t n, Py_ssize_t* used):
        cdef RawHello raw
        cdef Version version
        cdef Hello hello
        cdef Answer answer
        if self.stage == AT_VERSION:
            self.wanted = VERSION_SIZE
            if n < VERSION_SIZE:
                return None
            version = Version.__new__(Version)
            version.version = data[0]
            used[0] = VERSION_SIZE
            self.stage = AT_SECOND
            return version
        if self.listens:
            self.wanted = ANSWER_SIZE
            if n < ANSWER_SIZE:
                return None
            answer = Answer.__new__(Answer)
            answer.epoch = le64(data)
            answer.link = le64(data + 8)
            used[0] = ANSWER_SIZE
            self.stage = AT_PACKETS
            return answer
        if next_hello(data, n, &raw, used, &self.wanted) == 0:
            self.wanted = max(self.wanted, 1)
            return None
        reason = None
        if not utf8_valid(raw.name, raw.name_size):
            reason = "the endpoint's name is not UTF-8"
        elif raw.connector_size > ID_BYTES or raw.listener_size > ID_BYTES:
            reason = f"channel ids of more than {ID_BYTES} bytes"
        if reason is not None:
            self.error = PacketError(self.position, "bad hello", reason)
            self.wanted = 0
            used[0] = 0
            return None
        hello = Hello.__new__(Hello)
        hello.name = raw.name[:raw.name_size].decode()
        hello.connector_size = self.connector_size = raw.connector_size
        hello.listener_size = self.listener_size = raw.listener_size
        hello._flags = raw.flags
        hello.epoch = raw.epoch
        hello.link = raw.link
        self.stage = AT_PACKETS
        return hello

    cdef tuple channels(self, RawPacket* packet):
        cdef uint64_t id
        cdef uint32_t i
        if not packet.multicast:
            id = channel_id(packet.ids, packet.id_size)
            if self.last_channels is None or id != self.last_id:
                self.last_id = id
                self.last_channels = (id,)
            return self.last_channels
        return tuple([
            channel_id(packet.ids + <size_t>i * packet.id_size, packet.id_size) for i in range(packet.count)])

    cdef Item packet(self, RawPacket* packet, const uint8_t* data, Py_ssize_t n):
        cdef General general
        cdef Operation operation
        cdef Acknowledgement ack
        cdef Message message
        if packet.format == MESSAGE:
            message = Message.__new__(Message)
            message.channels = self.channels(packet)
            message.multicast = packet.multicast
            message.flags = packet.type
            message.count = packet.parts
            message.size = packet.payload
            if packet.parts == 0:
                message.made = ()
            else:
                message.raw = PyBytes_FromStringAndSize(<const char*>packet.sizes, data + n - packet.sizes)
                message.data = packet.data - packet.sizes
            return message
        if packet.format == GENERAL:
            general = General.__new__(General)
            general._type = packet.type
            return general
        if packet.format & 1:
            ack = Acknowledgement.__new__(Acknowledgement)
            ack._type = packet.type
            ack.channels = self.channels(packet)
            ack.multicast = packet.multicast
            ack.sequence = packet.sequence if packet.format == SEQUENCE_ACKNOWLEDGEMENT else None
            return ack
        operation = Operation.__new__(Operation)
        operation._type = packet.type
        operation.channels = self.channels(packet)
        operation.multicast = packet.multicast
        operation.sequence = packet.sequence if packet.format == SEQUENCE_OPERATION else None
        return operation


# --- writing ------------------------------------------------------------------------------------------------
# Each function returns one whole item. `id_size` is that of the id space in which `channel` is: the sender's, and in
# acknowledgements the receiver's. `channel` is one id, or a sequence of ids, which makes the packet a multicast.

cdef inline uint8_t* start_of(bytes packet) noexcept:
    return <uint8_t*>PyBytes_AS_STRING(packet)


cdef int check_size(uint8_t id_size) except -1:
    if id_size > ID_BYTES:
        raise ValueError(f"channel ids have 0 to {ID_BYTES} bytes, not {id_size}")
    return 0


cdef int check_id(uint64_t id, uint8_t id_size) except -1:
    if not fits(id, id_size):
        raise ValueError(f"channel {id} has no id of {id_size} bytes")
    return 0


def encode_version(uint8_t version=VERSION):
    cdef bytes item = PyBytes_FromStringAndSize(NULL, VERSION_SIZE)
    write_version(start_of(item), version)
    return item


def encode_hello(str name not None, uint8_t connector_size, uint8_t listener_size, uint8_t flags=0, uint64_t epoch=0,
                 uint64_t link=0):
    cdef bytes text = name.encode()
    cdef bytes item
    if len(text) > NAME_BYTES:
        raise ValueError(f"an endpoint's name has at most {NAME_BYTES} bytes, not {len(text)}")
    item = PyBytes_FromStringAndSize(NULL, hello_size(<uint8_t>len(text)))
    write_hello(start_of(item), PyBytes_AS_STRING(text), <uint8_t>len(text), connector_size, listener_size, flags, epoch,
                link)
    return item


def encode_answer(uint64_t epoch, uint64_t link):
    cdef bytes item = PyBytes_FromStringAndSize(NULL, ANSWER_SIZE)
    write_answer(start_of(item), epoch, link)
    return item


def encode_general(uint8_t type):
    cdef bytes item
    if type > SHUTDOWN:
        raise ValueError(f"there is no general packet of type {type}")
    item = PyBytes_FromStringAndSize(NULL, GENERAL_SIZE)
    write_general(start_of(item), type)
    return item


cdef bytes targeted(uint8_t format, uint8_t type, channel, uint8_t id_size, sequence):
    cdef bytes item
    cdef uint8_t out[24]
    cdef Py_ssize_t at, count, i
    cdef uint8_t* p
    check_size(id_size)
    if not isinstance(channel, (list, tuple)):
        check_id(channel, id_size)
        if sequence is None:
            at = write_plain(out, format, type, channel, id_size)
        else:
            at = write_sequence(out, format, type, channel, id_size, sequence)
        return PyBytes_FromStringAndSize(<char*>out, at)
    count = len(channel)
    if count > UINT32_MAX:
        raise ValueError("too many targets")
    at = 8 + count * id_size
    if sequence is not None:
        at = aligned(at, 4) + 4
    item = PyBytes_FromStringAndSize(NULL, aligned(at, 8))
    p = start_of(item)
    memset(p, 0, PyBytes_GET_SIZE(item))
    p[0] = 3 | (format << 2) | (type << 5)
    put_le32(p + 4, <uint32_t>count)
    for i in range(count):
        check_id(channel[i], id_size)
        put_channel_id(p + 8 + i * id_size, channel[i], id_size)
    if sequence is not None:
        put_le32(p + at - 4, sequence)
    return item


def encode_operation(uint8_t type, channel, uint8_t id_size, sequence=None):
    if type > (CLOSE if sequence is None else ROLLBACK):
        raise ValueError(f"there is no such operation of type {type}")
    return targeted(OPERATION if sequence is None else SEQUENCE_OPERATION, type, channel, id_size, sequence)


def encode_acknowledgement(uint8_t type, channel, uint8_t id_size, sequence=None):
    if type > (CLOSED if sequence is None else UNCOMMITTED):
        raise ValueError(f"there is no such acknowledgement of type {type}")
    return targeted(
        ACKNOWLEDGEMENT if sequence is None else SEQUENCE_ACKNOWLEDGEMENT, type, channel, id_size, sequence)


def encode_message(channel, uint8_t id_size, parts, *, long_form=None, large_form=None):
    """One message. Its forms are chosen by what is needed where they are None."""
    cdef tuple pieces = tuple(parts)
    cdef Py_ssize_t count = PyTuple_GET_SIZE(pieces)
    cdef bint multicast = isinstance(channel, (list, tuple))
    cdef Py_ssize_t targets = len(channel) if multicast else 1
    cdef Py_ssize_t i, at, size, head, total = 0, most = 0
    cdef uint8_t flags = 0
    cdef bytes item, piece
    cdef uint8_t* p
    check_size(id_size)
    for i in range(count):
        if not isinstance(<object>PyTuple_GET_ITEM(pieces, i), bytes):
            pieces = tuple([piece if isinstance(piece, bytes) else bytes(memoryview(piece)) for piece in pieces])
            break
    for i in range(count):
        size = PyBytes_GET_SIZE(<object>PyTuple_GET_ITEM(pieces, i))
        most = max(most, size)
        total += aligned(size, 8)
    if count > UINT32_MAX or targets > UINT32_MAX:
        raise ValueError("too many parts or targets")
    if count > 0xFF if long_form is None else long_form:
        flags |= LONG
    if most > 0xFFFF if large_form is None else large_form:
        flags |= LARGE
    if count > 0xFF and not flags & LONG:
        raise ValueError(f"a short message has at most 255 parts, not {count}")
    if most > 0xFFFF and not flags & LARGE:
        raise ValueError(f"the parts of a small message have at most 65535 bytes, not {most}")
    head = message_head(multicast, <uint32_t>targets, id_size, flags, <uint32_t>count)
    item = PyBytes_FromStringAndSize(NULL, head + total)
    p = start_of(item)
    memset(p, 0, head)
    p[0] = 1 | (2 if multicast else 0) | (MESSAGE << 2) | (flags << 5)
    if multicast:
        put_le32(p + 4, <uint32_t>targets)
        for i in range(targets):
            check_id(channel[i], id_size)
            put_channel_id(p + 8 + i * id_size, channel[i], id_size)
        at = 8 + targets * id_size
    else:
        check_id(channel, id_size)
        put_channel_id(p + 2, channel, id_size)
        at = 2 + <Py_ssize_t>id_size
    at = aligned(at, 2)
    if flags & LONG:
        put_le32(p + at, <uint32_t>count)
        at += 4
    else:
        p[1] = <uint8_t>count
    if flags & LARGE:
        at = aligned(at, 8)
    for i in range(count):
        size = PyBytes_GET_SIZE(<object>PyTuple_GET_ITEM(pieces, i))
        if flags & LARGE:
            put_le64(p + at + 8 * i, <uint64_t>size)
        else:
            put_le16(p + at + 2 * i, <uint16_t>size)
    p += head
    for i in range(count):
        piece = <bytes>PyTuple_GET_ITEM(pieces, i)
        p += write_part(p, PyBytes_AS_STRING(piece), PyBytes_GET_SIZE(piece))
    return item
