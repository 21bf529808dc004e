# The zeroctl codec for compiled callers: frames, payloads and JSON headers as borrowed pointers into the caller's
# memory, and writers into memory the caller has reserved. It knows nothing of Python objects, sessions or sockets.
#
# The grammar is at the top of zeroctl.pyx. The structs are called Raw... because Python sees classes of those names.

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from headrace.wire.bytes cimport View, be16, be32, be64, put_be16, put_be32, put_be64
from headrace.wire.bytes cimport utf8_valid, view_be16, view_be32, view_be64, view_of, view_slice, view_u8


cdef enum:                  # frame types
    OPEN = 0x01
    WELCOME = 0x02
    MESSAGE = 0x03
    CONFIRM = 0x04
    REFUSE = 0x05
    BIND = 0x06
    UNBIND = 0x07
    DELIVERY = 0x08
    ACK = 0x09
    REJECT = 0x0A
    CREDIT = 0x0B
    PING = 0x0C
    PONG = 0x0D

cdef enum:
    VERSION = 1             # the only version of the framing there is
    MIN_LENGTH = 9          # the length field counts type (1) and id (8)
    HEADER_SIZE = 13        # length (4), type (1), id (8)
    KEY_CHARS = 255         # of a routing key (zeroctl, "Routing key")
    HEADER_KEY_CHARS = 250  # of a key in a header (zeroctl, "Header")
    NODE_NAME_BYTES = 256   # of node-name (zeroctl, "required keys")
    LEAST_HEADER = 65536    # a carrier takes headers of at least so many bytes
    LEAST_BODY = 4194304    # and bodies of at least so many
    MOST_HEADER = 1048576
    MOST_BODY = 33554432
    # The longest length field of a message: type, id, the fixed fields of DELIVERY, key, header and body.
    MESSAGE_ROOM = 9 + 4 + 1 + 1 + 1 + KEY_CHARS + 4
    CONFIRM_SIZE = 17       # whole frames of a fixed size
    PING_SIZE = 13
    DEEPEST = 32            # objects and arrays inside one another, in a header
    LONGEST_NUMBER = 1000   # characters of a number in a header: many readers of JSON fail at some length

cdef enum:                  # flags of MESSAGE and DELIVERY
    WANTS_CONFIRM = 1       # MESSAGE: answer with CONFIRM when it is safe
    WANTS_ACK = 1           # DELIVERY: acknowledge it by its id
    REDELIVERED = 2         # DELIVERY: it was delivered before

cdef enum:                  # flags of BIND
    BIND_ACK = 1            # deliveries are acknowledged, and come again until they are
    BIND_QUEUE = 2          # those who bind the same filter under the same name share the messages
    BIND_DURABLE = 4        # it is kept when the connection goes (needs BIND_ACK)
    BIND_FLAGS = 7          # all that there are

cdef enum:                  # conditions of BIND
    EQUAL = 1
    PRESENT = 2
    PREFIX = 3

cdef enum:
    BAD_LENGTH = -1         # the length field is below 9 or above the limit: the connection cannot go on
    BAD_TYPE = -2           # there is no such type: the connection cannot go on
    BAD_SIZE = -3           # malformed payload: too short for its type, or longer than its fields
    BAD_INNER_LENGTH = -4   # malformed payload: a length in it points past its end
    BAD_TEXT = -5           # malformed payload: a text in it is not UTF-8
    BAD_FLAGS = -6          # malformed payload: bits that mean nothing are set
    BAD_CONDITION = -7      # malformed payload: a condition of a kind that there is not
    BAD_KEY = -8            # the routing key is no key
    # What is wrong with a header; check_header() answers these.
    NOT_JSON = -20          # no JSON object in UTF-8
    TOO_DEEP = -21
    BAD_HEADER_KEY = -22    # a key that is empty, above 250 characters, or not printable ASCII
    TWICE = -23             # a key that the gateway reads is there twice
    NO_NODE_NAME = -24
    NO_NODE_UUID = -25
    NO_TS = -26
    NO_SHA256 = -27
    BAD_NODE_NAME = -28
    BAD_NODE_UUID = -29
    BAD_TS = -30
    BAD_SHA256 = -31
    LONG_NUMBER = -33
    BAD_PATH = -32          # on-start or on-finish is no routing key

cdef enum:                  # RawHeader.has
    HAS_NODE_NAME = 1
    HAS_NODE_UUID = 2
    HAS_TS = 4
    HAS_SHA256 = 8          # 64 digits are there; an empty one counts as none
    HAS_ON_START = 16
    HAS_ON_FINISH = 32
    HAS_SIG = 64            # _sec-sig
    HAS_RESERVED = 128      # keys that escape_header() has to prefix
    HAS_EMPTY_SHA256 = 256


cdef struct RawFrame:
    const uint8_t* payload  # borrowed: valid as long as the bytes given to next_frame
    uint64_t id
    uint32_t size           # of the payload
    uint8_t type

cdef struct RawOpen:
    View key                # the secret
    View node               # may be empty
    View uuid               # may be empty
    uint8_t version

cdef struct RawWelcome:
    View node
    View uuid
    uint32_t max_header
    uint32_t max_body
    uint16_t keepalive      # seconds; 0: none
    uint8_t version

cdef struct RawMessage:     # MESSAGE and DELIVERY
    const uint8_t* key
    const uint8_t* header
    const uint8_t* body
    uint32_t header_size
    uint32_t body_size
    uint32_t binding        # DELIVERY
    uint8_t key_size        # 0 is well-formed here; check_key() refuses it
    uint8_t flags
    uint8_t deliveries      # DELIVERY: this one included; 255 stands for more, too

cdef struct RawBind:
    View filter
    View name
    View conditions         # as many as `condition_count`, checked; walk them with next_condition()
    uint32_t binding
    uint32_t credit         # 0xFFFFFFFF: no limit
    uint8_t flags
    uint8_t condition_count

cdef struct RawCondition:
    View key
    View value
    uint8_t kind

cdef struct RawRefuse:
    const uint8_t* text
    uint16_t text_size
    uint16_t code

cdef struct RawHeader:      # what check_header() found; texts are as they stand between their quotes
    View node_name
    View node_uuid
    View ts
    View on_start
    View on_finish
    View sig
    uint32_t has
    uint32_t keys           # how many there are
    uint8_t sha256[32]


# --- reading ------------------------------------------------------------------------------------------------

# Looks for one frame at the start of data[0:n].
#   1  `out` is the frame, `used` its whole size;
#   0  it is unfinished: `wanted` is its whole size once the length field is there, else 0;
#   BAD_LENGTH, judged as soon as 4 bytes are there; BAD_TYPE, judged as soon as 5 are.
cdef inline int next_frame(const uint8_t* data, Py_ssize_t n, uint32_t max_length, RawFrame* out,
                           Py_ssize_t* used, Py_ssize_t* wanted) noexcept nogil:
    cdef uint32_t length
    used[0] = 0
    wanted[0] = 0
    if n < 4:
        return 0
    length = be32(data)
    if length < MIN_LENGTH or length > max_length:
        return BAD_LENGTH
    if n > 4 and (data[4] < OPEN or data[4] > PONG):
        return BAD_TYPE
    wanted[0] = 4 + <Py_ssize_t>length
    if n < wanted[0]:
        return 0
    out.type = data[4]
    out.id = be64(data + 5)
    out.payload = data + HEADER_SIZE
    out.size = length - MIN_LENGTH
    used[0] = wanted[0]
    return 1


# MESSAGE taken apart; neither key nor header are looked into.
cdef inline int split_message(const uint8_t* payload, uint32_t size, RawMessage* out) noexcept nogil:
    cdef uint32_t at
    if size < 6:
        return BAD_SIZE
    out.flags = payload[0]
    out.key_size = payload[1]
    at = 2 + <uint32_t>out.key_size
    if size - 4 < at:
        return BAD_INNER_LENGTH
    out.key = payload + 2
    out.header_size = be32(payload + at)
    at += 4
    if out.header_size > size - at:
        return BAD_INNER_LENGTH
    out.header = payload + at
    out.body = out.header + out.header_size
    out.body_size = size - at - out.header_size
    out.binding = 0
    out.deliveries = 0
    if out.flags & ~WANTS_CONFIRM:
        return BAD_FLAGS
    return 0


cdef inline int split_delivery(const uint8_t* payload, uint32_t size, RawMessage* out) noexcept nogil:
    cdef uint32_t at
    if size < 11:
        return BAD_SIZE
    out.binding = be32(payload)
    out.flags = payload[4]
    out.deliveries = payload[5]
    out.key_size = payload[6]
    at = 7 + <uint32_t>out.key_size
    if size - 4 < at:
        return BAD_INNER_LENGTH
    out.key = payload + 7
    out.header_size = be32(payload + at)
    at += 4
    if out.header_size > size - at:
        return BAD_INNER_LENGTH
    out.header = payload + at
    out.body = out.header + out.header_size
    out.body_size = size - at - out.header_size
    if out.flags & ~(WANTS_ACK | REDELIVERED):
        return BAD_FLAGS
    return 0


# The parsers of the other payloads return 0, or one of the malformed codes with `out` undefined.
cdef int parse_open(const uint8_t* payload, uint32_t size, RawOpen* out) noexcept nogil
cdef int parse_welcome(const uint8_t* payload, uint32_t size, RawWelcome* out) noexcept nogil
cdef int parse_bind(const uint8_t* payload, uint32_t size, RawBind* out) noexcept nogil
cdef int parse_refuse(const uint8_t* payload, uint32_t size, RawRefuse* out) noexcept nogil
# Moves past one condition; the parser has checked that they are there.
cdef void next_condition(View* conditions, RawCondition* out) noexcept nogil


cdef inline int parse_u32(const uint8_t* payload, uint32_t size, uint32_t* out) noexcept nogil:
    """CONFIRM and UNBIND."""
    if size != 4:
        return BAD_SIZE
    out[0] = be32(payload)
    return 0


cdef inline int parse_credit(const uint8_t* payload, uint32_t size, uint32_t* binding, uint32_t* more) noexcept nogil:
    if size != 8:
        return BAD_SIZE
    binding[0] = be32(payload)
    more[0] = be32(payload + 4)
    return 0


# ACK: `tags` points to `count` tags of 8 bytes each.
cdef inline int parse_ack(const uint8_t* payload, uint32_t size, uint32_t* binding, const uint8_t** tags,
                          uint32_t* count) noexcept nogil:
    if size < 12 or (size - 4) % 8:
        return BAD_SIZE
    binding[0] = be32(payload)
    tags[0] = payload + 4
    count[0] = (size - 4) // 8
    return 0


# REJECT: the same behind a delay in milliseconds.
cdef inline int parse_reject(const uint8_t* payload, uint32_t size, uint32_t* binding, uint32_t* delay,
                             const uint8_t** tags, uint32_t* count) noexcept nogil:
    if size < 16 or (size - 8) % 8:
        return BAD_SIZE
    binding[0] = be32(payload)
    delay[0] = be32(payload + 4)
    tags[0] = payload + 8
    count[0] = (size - 8) // 8
    return 0


# --- keys and headers ---------------------------------------------------------------------------------------

# Whether this is a routing key: 1 to 255 printable ASCII characters, no word of which is `*` or `#`.
cdef bint key_valid(const uint8_t* key, Py_ssize_t n) noexcept nogil
cdef bint printable(const uint8_t* p, Py_ssize_t n) noexcept nogil
cdef bint uuid_valid(const uint8_t* p, Py_ssize_t n) noexcept nogil
# Judges a header in one pass: 0, or why it is none. `lenient`: node-name, node-uuid, ts and sha256 may be missing.
cdef int check_header(const uint8_t* header, Py_ssize_t n, bint lenient, RawHeader* out) noexcept nogil
# Writes a header that check_header() liked with `_passed-` before each key that begins with `_transport-` or
# `_passed-`, into n + 8 × keys bytes; how many it wrote. The other one takes one such prefix from each key.
cdef Py_ssize_t escape_header(const uint8_t* header, Py_ssize_t n, uint8_t* out) noexcept nogil
cdef Py_ssize_t unescape_header(const uint8_t* header, Py_ssize_t n, uint8_t* out) noexcept nogil
# Whether some key of a well-formed header may begin with `_passed-`.
cdef bint may_be_escaped(const uint8_t* header, Py_ssize_t n) noexcept nogil
# Whether a well-formed header holds a condition.
cdef bint condition_holds(const RawCondition* condition, const uint8_t* header, Py_ssize_t n) noexcept nogil


# What is wrong, as a sentence for people.
cdef str fault(int bad)


# --- writing ------------------------------------------------------------------------------------------------
# A writer needs room for the whole frame and returns the number of bytes it wrote.

cdef inline Py_ssize_t write_start(uint8_t* out, uint8_t type, uint64_t id, uint32_t payload_size) noexcept nogil:
    put_be32(out, MIN_LENGTH + payload_size)
    out[4] = type
    put_be64(out + 5, id)
    return HEADER_SIZE


cdef inline Py_ssize_t message_size(uint8_t key_size, Py_ssize_t header_size, Py_ssize_t body_size) noexcept nogil:
    return HEADER_SIZE + 6 + key_size + header_size + body_size


cdef inline Py_ssize_t delivery_size(uint8_t key_size, Py_ssize_t header_size, Py_ssize_t body_size) noexcept nogil:
    return HEADER_SIZE + 11 + key_size + header_size + body_size


# All of a MESSAGE but its header and body; they follow.
cdef inline Py_ssize_t write_message_start(
    uint8_t* out, uint64_t id, uint8_t flags, const void* key, uint8_t key_size, uint32_t header_size, uint32_t body_size,
) noexcept nogil:
    write_start(out, MESSAGE, id, 6 + key_size + header_size + body_size)
    out[13] = flags
    out[14] = key_size
    memcpy(out + 15, key, key_size)
    put_be32(out + 15 + key_size, header_size)
    return 19 + key_size


# All of a DELIVERY but its header and body.
cdef inline Py_ssize_t write_delivery_start(
    uint8_t* out, uint64_t tag, uint32_t binding, uint8_t flags, uint8_t deliveries, const void* key, uint8_t key_size,
    uint32_t header_size, uint32_t body_size,
) noexcept nogil:
    write_start(out, DELIVERY, tag, 11 + key_size + header_size + body_size)
    put_be32(out + 13, binding)
    out[17] = flags
    out[18] = deliveries
    out[19] = key_size
    memcpy(out + 20, key, key_size)
    put_be32(out + 20 + key_size, header_size)
    return 24 + key_size


cdef inline Py_ssize_t write_confirm(uint8_t* out, uint64_t id, uint32_t count) noexcept nogil:
    write_start(out, CONFIRM, id, 4)
    put_be32(out + 13, count)
    return CONFIRM_SIZE


cdef inline Py_ssize_t write_refuse(uint8_t* out, uint64_t id, uint16_t code, const void* text,
                                    uint16_t text_size) noexcept nogil:
    write_start(out, REFUSE, id, 4 + text_size)
    put_be16(out + 13, code)
    put_be16(out + 15, text_size)
    memcpy(out + 17, text, text_size)
    return 17 + text_size


cdef inline Py_ssize_t write_ping(uint8_t* out, uint8_t type, uint64_t id) noexcept nogil:
    return write_start(out, type, id, 0)
