# The Relink codec for compiled callers: handshake fields and packets as borrowed pointers into the caller's memory, and
# writers into memory the caller has reserved. It knows nothing of Python objects, links or sockets.
#
# The grammar is at the top of relink.pyx. Everything here is inline, needs no GIL and allocates nothing. The structs
# are called Raw... because Python sees classes of the other names in the same module.

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from headrace.wire.bytes cimport le16, le32, le64, put_le16, put_le32, put_le64


cdef enum:
    VERSION = 0             # the only protocol version there is
    VERSION_SIZE = 8        # each side's first field, with its padding
    ANSWER_SIZE = 16        # the listener's epoch and link id
    NAME_BYTES = 255        # of an endpoint
    ID_BYTES = 8            # of a channel id, at most: they are integers here
    GENERAL_SIZE = 8

cdef enum:                  # handshake flags
    CONNECTOR_TRANSACTIONS = 1
    LISTENER_TRANSACTIONS = 2
    REQUIRE_LINK = 4

cdef enum:                  # packet formats; the odd ones are in the receiver's id space
    OPERATION = 0
    ACKNOWLEDGEMENT = 1
    SEQUENCE_OPERATION = 2
    SEQUENCE_ACKNOWLEDGEMENT = 3
    MESSAGE = 4
    GENERAL = 8             # not on the wire: the channel bit is not set

cdef enum:                  # types of general packets
    NOP = 0
    PING = 1
    PONG = 2
    RESUME = 3
    SHUTDOWN = 4

cdef enum:                  # types of operations
    COMMIT = 0
    ROLLBACK = 1
    CLOSE = 2

cdef enum:                  # types of acknowledgements
    RECEIVED = 0
    CONSUMED = 1
    COMMITTED = 2
    UNCOMMITTED = 3
    CLOSED = 4

cdef enum:                  # flags of messages
    LONG = 1
    LARGE = 2

cdef enum:
    BAD_TYPE = -1           # an enumeration value that is not used: the connection ends (relink, introduction)
    BAD_COUNT = -2          # more multicast targets than the limit
    BAD_LENGTH = -3         # more parts than the limit
    BAD_SIZE = -4           # more payload than the limit, or than 64 bits can count


cdef struct RawHello:
    const uint8_t* name     # borrowed
    uint8_t name_size
    uint8_t connector_size  # of channel ids; any byte, the session refuses those it does not know
    uint8_t listener_size
    uint8_t flags
    uint64_t epoch
    uint64_t link

cdef struct RawPacket:
    uint8_t format          # one of the formats above
    uint8_t type            # of a general packet, an operation or an acknowledgement; the flags of a message
    uint8_t id_size         # of the channel ids in this packet
    const uint8_t* head     # where the packet begins; borrowed
    bint multicast
    uint32_t count          # of channel ids; 1 for unicast, 0 in general packets
    const uint8_t* ids      # borrowed, like `sizes` and `data`; id_size bytes each
    uint32_t sequence       # of the sequence formats
    uint32_t parts          # of a message
    const uint8_t* sizes    # 2 bytes for each part, or 8 in a large message
    const uint8_t* data     # the parts, each padded to 8
    uint64_t payload        # the sum of the sizes, without padding

cdef struct Bounds:
    uint32_t max_targets    # of a multicast packet
    uint32_t max_parts      # of a message
    uint64_t max_payload    # bytes of a message, without padding


cdef inline Py_ssize_t aligned(Py_ssize_t n, Py_ssize_t to) noexcept nogil:
    return (n + to - 1) & ~(to - 1)


# A channel id of 0 to 8 bytes, little-endian.
cdef inline uint64_t channel_id(const uint8_t* p, uint8_t size) noexcept nogil:
    cdef uint64_t id = 0
    cdef int i
    if size == 4:
        return le32(p)
    if size == 8:
        return le64(p)
    for i in range(size):
        id |= <uint64_t>p[i] << (8 * i)
    return id


cdef inline void put_channel_id(uint8_t* p, uint64_t id, uint8_t size) noexcept nogil:
    cdef int i
    if size == 4:
        put_le32(p, <uint32_t>id)
        return
    for i in range(size):
        p[i] = <uint8_t>(id >> (8 * i))


# Whether a channel id can be said in so many bytes.
cdef inline bint fits(uint64_t id, uint8_t size) noexcept nogil:
    return size >= 8 or (id >> (8 * size)) == 0


cdef inline uint64_t part_size(const RawPacket* packet, uint32_t i) noexcept nogil:
    return le64(packet.sizes + 8 * <size_t>i) if packet.type & LARGE else le16(packet.sizes + 2 * <size_t>i)


# --- reading ------------------------------------------------------------------------------------------------

# The connector's second transmission at the start of data[0:n]: 1 and `used`, or 0 and `wanted`.
cdef inline int next_hello(const uint8_t* data, Py_ssize_t n, RawHello* out, Py_ssize_t* used,
                           Py_ssize_t* wanted) noexcept nogil:
    cdef Py_ssize_t at
    used[0] = 0
    wanted[0] = 0
    if n < 1:
        return 0
    at = aligned(4 + <Py_ssize_t>data[0], 8)
    wanted[0] = at + 16
    if n < wanted[0]:
        return 0
    out.name_size = data[0]
    out.name = data + 1
    out.connector_size = data[1 + out.name_size]
    out.listener_size = data[2 + out.name_size]
    out.flags = data[3 + out.name_size]
    out.epoch = le64(data + at)
    out.link = le64(data + at + 8)
    used[0] = wanted[0]
    return 1


# Looks for one packet at the start of data[0:n], sent by who has channel ids of `own` bytes to who has some of `other`.
#   1  `out` is the packet, `used` its whole size;
#   0  it is unfinished: `wanted` is how many bytes it has at least, as far as can be told from those that are there;
#   BAD_..., judged as soon as the field in question is there.
# `used` is 0 except for 1. Every count and size is held against `bounds` before anything is added up with it, so no sum
# here can overflow, and `wanted` is bounded by them.
cdef inline int next_packet(const uint8_t* data, Py_ssize_t n, uint8_t own, uint8_t other, const Bounds* bounds,
                            RawPacket* out, Py_ssize_t* used, Py_ssize_t* wanted) noexcept nogil:
    cdef uint8_t head, type
    cdef Py_ssize_t at
    cdef uint64_t size, whole
    cdef uint32_t i
    used[0] = 0
    wanted[0] = 8
    if n < 1:
        return 0
    head = data[0]
    type = head >> 5
    out.head = data
    if not head & 1:
        if type > SHUTDOWN:
            return BAD_TYPE
        if n < 8:
            return 0
        out.format = GENERAL
        out.type = type
        out.count = 0
        used[0] = 8
        return 1
    out.format = (head >> 2) & 7
    out.type = type
    if out.format == MESSAGE:
        out.type = type & (LONG | LARGE)
        out.id_size = own
    elif out.format == OPERATION:
        if type > CLOSE:
            return BAD_TYPE
        out.id_size = own
    elif out.format == ACKNOWLEDGEMENT:
        if type > CLOSED:
            return BAD_TYPE
        out.id_size = other
    elif out.format == SEQUENCE_OPERATION:
        if type > ROLLBACK:
            return BAD_TYPE
        out.id_size = own
    elif out.format == SEQUENCE_ACKNOWLEDGEMENT:
        if type > UNCOMMITTED:
            return BAD_TYPE
        out.id_size = other
    else:
        return BAD_TYPE
    if n < 8:
        return 0                        # no packet is shorter
    out.multicast = (head & 2) != 0
    if out.multicast:
        out.count = le32(data + 4)
        if out.count > bounds.max_targets:
            return BAD_COUNT
        out.ids = data + 8
        at = 8 + <Py_ssize_t>out.count * out.id_size
    else:
        out.count = 1
        out.ids = data + 2
        at = 2 + <Py_ssize_t>out.id_size
    if out.format != MESSAGE:
        if out.format >= SEQUENCE_OPERATION:
            at = aligned(at, 4) + 4
        wanted[0] = aligned(at, 8)
        if n < wanted[0]:
            return 0
        if out.format >= SEQUENCE_OPERATION:
            out.sequence = le32(data + at - 4)
        used[0] = wanted[0]
        return 1
    at = aligned(at, 2)
    if out.type & LONG:
        if n < at + 4:
            wanted[0] = aligned(at + 4, 8)
            return 0
        out.parts = le32(data + at)
        at += 4
    else:
        out.parts = data[1]
    if out.parts > bounds.max_parts:
        return BAD_LENGTH
    if out.type & LARGE:
        at = aligned(at, 8)
        out.sizes = data + at
        at += 8 * <Py_ssize_t>out.parts
    else:
        out.sizes = data + at
        at = aligned(at + 2 * <Py_ssize_t>out.parts, 8)
    if n < at:
        wanted[0] = at
        return 0
    out.data = data + at
    out.payload = 0
    whole = 0
    for i in range(out.parts):
        size = part_size(out, i)
        if size > bounds.max_payload - out.payload:
            return BAD_SIZE
        out.payload += size
        whole += (size + 7) & ~<uint64_t>7
    wanted[0] = at + <Py_ssize_t>whole
    if n < wanted[0]:
        return 0
    used[0] = wanted[0]
    return 1


# The largest packet that next_packet() lets through.
cdef inline Py_ssize_t largest_packet(const Bounds* bounds) noexcept nogil:
    return (
        32 + <Py_ssize_t>ID_BYTES * bounds.max_targets + 15 * <Py_ssize_t>bounds.max_parts
        + <Py_ssize_t>bounds.max_payload
    )


# The payload of a message without padding, into room for packet.payload bytes.
cdef inline void join_parts(const RawPacket* packet, uint8_t* out) noexcept nogil:
    cdef const uint8_t* p = packet.data
    cdef size_t size
    cdef uint32_t i
    for i in range(packet.parts):
        size = <size_t>part_size(packet, i)
        memcpy(out, p, size)
        out += size
        p += (size + 7) & ~<size_t>7


# --- writing ------------------------------------------------------------------------------------------------
# A writer needs room for the whole packet and returns the number of bytes it wrote.

cdef inline Py_ssize_t hello_size(uint8_t name_size) noexcept nogil:
    return aligned(4 + <Py_ssize_t>name_size, 8) + 16


cdef inline Py_ssize_t write_version(uint8_t* out, uint8_t version) noexcept nogil:
    put_le64(out, version)
    return VERSION_SIZE


cdef inline Py_ssize_t write_hello(uint8_t* out, const void* name, uint8_t name_size, uint8_t connector_size,
                                   uint8_t listener_size, uint8_t flags, uint64_t epoch, uint64_t link) noexcept nogil:
    cdef Py_ssize_t size = hello_size(name_size)
    put_le64(out + size - 24, 0)        # the padding, before what may share its word
    out[0] = name_size
    memcpy(out + 1, name, name_size)
    out[1 + name_size] = connector_size
    out[2 + name_size] = listener_size
    out[3 + name_size] = flags
    put_le64(out + size - 16, epoch)
    put_le64(out + size - 8, link)
    return size


cdef inline Py_ssize_t write_answer(uint8_t* out, uint64_t epoch, uint64_t link) noexcept nogil:
    put_le64(out, epoch)
    put_le64(out + 8, link)
    return ANSWER_SIZE


cdef inline Py_ssize_t write_general(uint8_t* out, uint8_t type) noexcept nogil:
    put_le64(out, <uint64_t>type << 5)
    return GENERAL_SIZE


# An operation or an acknowledgement of one channel; at most 24 bytes.
cdef inline Py_ssize_t write_plain(uint8_t* out, uint8_t format, uint8_t type, uint64_t id, uint8_t id_size) noexcept nogil:
    put_le64(out, 1 | (format << 2) | (<uint64_t>type << 5))
    if id_size > 6:
        put_le64(out + 8, 0)
    put_channel_id(out + 2, id, id_size)
    return 8 if id_size <= 6 else 16


# The same up to and including a sequence number.
cdef inline Py_ssize_t write_sequence(uint8_t* out, uint8_t format, uint8_t type, uint64_t id, uint8_t id_size,
                                      uint32_t sequence) noexcept nogil:
    cdef Py_ssize_t at = aligned(2 + <Py_ssize_t>id_size, 4)
    put_le64(out, 1 | (format << 2) | (<uint64_t>type << 5))
    if at >= 8 or at + 4 > 8:
        put_le64(out + 8, 0)
    put_channel_id(out + 2, id, id_size)
    put_le32(out + at, sequence)
    return aligned(at + 4, 8)


# Where the parts of a message begin, if it has so many channel ids and parts; without the parts it is so long.
cdef inline Py_ssize_t message_head(bint multicast, uint32_t count, uint8_t id_size, uint8_t flags, uint32_t parts) noexcept nogil:
    cdef Py_ssize_t at = 8 + <Py_ssize_t>count * id_size if multicast else 2 + <Py_ssize_t>id_size
    at = aligned(at, 2)
    if flags & LONG:
        at += 4
    if flags & LARGE:
        return aligned(at, 8) + 8 * <Py_ssize_t>parts
    return aligned(at + 2 * <Py_ssize_t>parts, 8)


# All of a unicast message but its parts: header, channel id, length and sizes, up to message_head().
cdef inline Py_ssize_t write_message_head(uint8_t* out, uint64_t id, uint8_t id_size, uint8_t flags, uint32_t parts,
                                          const uint32_t* sizes) noexcept nogil:
    cdef Py_ssize_t at = aligned(2 + <Py_ssize_t>id_size, 2)
    cdef Py_ssize_t end = message_head(False, 1, id_size, flags, parts)
    cdef uint32_t i
    memset(out, 0, end)
    out[0] = 1 | (MESSAGE << 2) | (flags << 5)
    put_channel_id(out + 2, id, id_size)
    if flags & LONG:
        put_le32(out + at, parts)
        at += 4
    else:
        out[1] = <uint8_t>parts
    if flags & LARGE:
        at = aligned(at, 8)
        for i in range(parts):
            put_le64(out + at + 8 * <Py_ssize_t>i, sizes[i])
    else:
        for i in range(parts):
            put_le16(out + at + 2 * <Py_ssize_t>i, <uint16_t>sizes[i])
    return end


# One part and its padding.
cdef inline Py_ssize_t write_part(uint8_t* out, const void* part, size_t size) noexcept nogil:
    cdef size_t whole = (size + 7) & ~<size_t>7
    if whole != size:
        put_le64(out + whole - 8, 0)
    if size:
        memcpy(out, part, size)
    return <Py_ssize_t>whole
