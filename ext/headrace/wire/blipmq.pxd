# The BlipMQ codec for compiled callers: frames and payloads as borrowed pointers into the caller's memory,
# and writers into memory the caller has reserved. It knows nothing of Python objects, sessions or sockets.
#
# The grammar is at the top of blipmq.pyx. Everything here is inline, needs no GIL and allocates nothing.
# The structs are called Raw... because Python sees classes Frame, Publish, ... in the same module.

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from headrace.wire.bytes cimport View, be16, be32, be64, put_be16, put_be32, put_be64, utf8_valid
from headrace.wire.bytes cimport view_be16, view_be64, view_of, view_slice, view_u8


cdef enum:                  # frame types
    HELLO = 0x01
    AUTH = 0x02
    PUBLISH = 0x03
    SUBSCRIBE = 0x04
    ACK = 0x05
    NACK = 0x06
    PING = 0x07
    PONG = 0x08
    POLL = 0x09

cdef enum:
    VERSION = 1             # the only protocol version there is
    MIN_LENGTH = 9          # the length field counts type (1) and correlation (8)
    MAX_LENGTH = 16777216   # and may say at most 16 MiB; the whole frame is then 4 bytes longer
    HEADER_SIZE = 13        # length (4), type (1), correlation (8)
    HELLO_SIZE = 15         # whole frames of a fixed size
    ACK_SIZE = 21
    POLL_SIZE = 21
    PING_SIZE = 13
    PONG_SIZE = 13

cdef enum:
    BAD_LENGTH = -1         # the length field is below 9 or above the limit: the connection cannot go on
    BAD_TYPE = -2           # the type is none of the nine: the connection cannot go on
    BAD_SIZE = -3           # malformed payload: too short for its type, or longer than its fields
    BAD_INNER_LENGTH = -4   # malformed payload: a text length in it points past its end
    BAD_TEXT = -5           # malformed payload: topic, key or message text is not UTF-8


cdef struct RawFrame:
    const uint8_t* payload  # borrowed: valid as long as the bytes given to next_frame
    uint64_t correlation
    uint32_t size           # of the payload
    uint8_t type

cdef struct RawPublish:
    const uint8_t* topic    # borrowed from the payload, like `message`
    const uint8_t* message
    uint32_t message_size
    uint16_t topic_size     # 0 is well-formed here; the session refuses it
    uint8_t qos             # any byte; the session refuses all but 0 and 1

cdef struct RawSubscribe:
    const uint8_t* topic
    uint32_t trailing       # bytes after the qos byte; a server takes no notice of them
    uint16_t topic_size
    uint8_t qos

cdef struct RawNack:
    const uint8_t* text
    uint16_t text_size
    uint16_t code


# --- reading ------------------------------------------------------------------------------------------------

# Looks for one frame at the start of data[0:n].
#   1  `out` is the frame, `used` its whole size;
#   0  it is unfinished: `wanted` is its whole size once the length field is there, else 0;
#   BAD_LENGTH, judged as soon as 4 bytes are there; BAD_TYPE, judged only when the whole frame has arrived.
# `used` is 0 except for 1. `max_length` bounds the length field, so `wanted` is at most max_length + 4.
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
    wanted[0] = 4 + <Py_ssize_t>length
    if n < wanted[0]:
        return 0
    out.type = data[4]
    if out.type < HELLO or out.type > POLL:
        return BAD_TYPE
    out.correlation = be64(data + 5)
    out.payload = data + HEADER_SIZE
    out.size = length - MIN_LENGTH
    used[0] = wanted[0]
    return 1


# The parsers of payloads return 0, or one of the malformed codes with `out` undefined.

cdef inline int parse_hello(const uint8_t* payload, uint32_t size, uint16_t* version) noexcept nogil:
    if size != 2:
        return BAD_SIZE
    version[0] = be16(payload)
    return 0


cdef inline int parse_auth(const uint8_t* payload, uint32_t size, View* key) noexcept nogil:
    cdef View rest = view_of(payload, size)
    cdef uint16_t key_size = 0
    if not view_be16(&rest, &key_size):
        return BAD_SIZE
    if not view_slice(&rest, key_size, key):
        return BAD_INNER_LENGTH
    if rest.size != 0:
        return BAD_SIZE
    if not utf8_valid(key.data, key.size):
        return BAD_TEXT
    return 0


# Everything of parse_publish but the check that the topic is UTF-8: for a caller that finds the very same
# topic bytes among those it has checked before.
cdef inline int split_publish(const uint8_t* payload, uint32_t size, RawPublish* out) noexcept nogil:
    if size < 3:
        return BAD_SIZE
    out.qos = payload[0]
    out.topic_size = be16(payload + 1)
    if out.topic_size > size - 3:
        return BAD_INNER_LENGTH
    out.topic = payload + 3
    out.message = out.topic + out.topic_size
    out.message_size = size - 3 - out.topic_size
    return 0


cdef inline int parse_publish(const uint8_t* payload, uint32_t size, RawPublish* out) noexcept nogil:
    cdef int bad = split_publish(payload, size, out)
    if bad:
        return bad
    if not utf8_valid(out.topic, out.topic_size):
        return BAD_TEXT
    return 0


cdef inline int parse_subscribe(const uint8_t* payload, uint32_t size, RawSubscribe* out) noexcept nogil:
    cdef View rest = view_of(payload, size)
    cdef View topic
    if size < 3 or not view_be16(&rest, &out.topic_size):
        return BAD_SIZE
    if not view_slice(&rest, out.topic_size, &topic) or not view_u8(&rest, &out.qos):
        return BAD_INNER_LENGTH
    if not utf8_valid(topic.data, topic.size):
        return BAD_TEXT
    out.topic = topic.data
    out.trailing = <uint32_t>rest.size
    return 0


cdef inline int parse_ack(const uint8_t* payload, uint32_t size, uint64_t* subscription) noexcept nogil:
    if size != 8:
        return BAD_SIZE
    subscription[0] = be64(payload)
    return 0


cdef inline int parse_poll(const uint8_t* payload, uint32_t size, uint64_t* subscription) noexcept nogil:
    return parse_ack(payload, size, subscription)


cdef inline int parse_nack(const uint8_t* payload, uint32_t size, RawNack* out) noexcept nogil:
    cdef View rest = view_of(payload, size)
    cdef View text
    if not view_be16(&rest, &out.code) or not view_be16(&rest, &out.text_size):
        return BAD_SIZE
    if not view_slice(&rest, out.text_size, &text):
        return BAD_INNER_LENGTH
    if rest.size != 0:
        return BAD_SIZE
    if not utf8_valid(text.data, text.size):
        return BAD_TEXT
    out.text = text.data
    return 0


# --- writing ------------------------------------------------------------------------------------------------
# A writer needs room for the whole frame (the ..._size functions and constants say how much) and returns the
# number of bytes it wrote. The caller sees to it that the length field stays within MAX_LENGTH.

cdef inline Py_ssize_t auth_size(uint16_t key_size) noexcept nogil:
    return HEADER_SIZE + 2 + key_size


cdef inline Py_ssize_t publish_size(uint16_t topic_size, Py_ssize_t message_size) noexcept nogil:
    return HEADER_SIZE + 3 + topic_size + message_size


cdef inline Py_ssize_t subscribe_size(uint16_t topic_size) noexcept nogil:
    return HEADER_SIZE + 3 + topic_size


cdef inline Py_ssize_t nack_size(uint16_t text_size) noexcept nogil:
    return HEADER_SIZE + 4 + text_size


cdef inline Py_ssize_t write_header(uint8_t* out, uint8_t type, uint64_t correlation,
                                    Py_ssize_t payload_size) noexcept nogil:
    put_be32(out, <uint32_t>(MIN_LENGTH + payload_size))
    out[4] = type
    put_be64(out + 5, correlation)
    return HEADER_SIZE


cdef inline Py_ssize_t write_hello(uint8_t* out, uint64_t correlation, uint16_t version) noexcept nogil:
    write_header(out, HELLO, correlation, 2)
    put_be16(out + HEADER_SIZE, version)
    return HELLO_SIZE


cdef inline Py_ssize_t write_auth(uint8_t* out, uint64_t correlation, const void* key,
                                  uint16_t key_size) noexcept nogil:
    write_header(out, AUTH, correlation, 2 + <Py_ssize_t>key_size)
    put_be16(out + HEADER_SIZE, key_size)
    if key_size:
        memcpy(out + HEADER_SIZE + 2, key, key_size)
    return auth_size(key_size)


# Everything before the message; the caller puts `message_size` bytes right behind it.
cdef inline Py_ssize_t write_publish_header(uint8_t* out, uint64_t correlation, uint8_t qos,
                                            const void* topic, uint16_t topic_size,
                                            Py_ssize_t message_size) noexcept nogil:
    write_header(out, PUBLISH, correlation, 3 + topic_size + message_size)
    out[HEADER_SIZE] = qos
    put_be16(out + HEADER_SIZE + 1, topic_size)
    if topic_size:
        memcpy(out + HEADER_SIZE + 3, topic, topic_size)
    return HEADER_SIZE + 3 + topic_size


cdef inline Py_ssize_t write_publish(uint8_t* out, uint64_t correlation, uint8_t qos, const void* topic,
                                     uint16_t topic_size, const void* message,
                                     Py_ssize_t message_size) noexcept nogil:
    cdef Py_ssize_t at = write_publish_header(out, correlation, qos, topic, topic_size, message_size)
    if message_size:
        memcpy(out + at, message, message_size)
    return at + message_size


cdef inline Py_ssize_t write_subscribe(uint8_t* out, uint64_t correlation, const void* topic,
                                       uint16_t topic_size, uint8_t qos) noexcept nogil:
    write_header(out, SUBSCRIBE, correlation, 3 + <Py_ssize_t>topic_size)
    put_be16(out + HEADER_SIZE, topic_size)
    if topic_size:
        memcpy(out + HEADER_SIZE + 2, topic, topic_size)
    out[HEADER_SIZE + 2 + topic_size] = qos
    return subscribe_size(topic_size)


cdef inline Py_ssize_t write_ack(uint8_t* out, uint64_t correlation, uint64_t subscription) noexcept nogil:
    write_header(out, ACK, correlation, 8)
    put_be64(out + HEADER_SIZE, subscription)
    return ACK_SIZE


cdef inline Py_ssize_t write_nack(uint8_t* out, uint64_t correlation, uint16_t code, const void* text,
                                  uint16_t text_size) noexcept nogil:
    write_header(out, NACK, correlation, 4 + <Py_ssize_t>text_size)
    put_be16(out + HEADER_SIZE, code)
    put_be16(out + HEADER_SIZE + 2, text_size)
    if text_size:
        memcpy(out + HEADER_SIZE + 4, text, text_size)
    return nack_size(text_size)


cdef inline Py_ssize_t write_ping(uint8_t* out, uint64_t correlation) noexcept nogil:
    return write_header(out, PING, correlation, 0)


cdef inline Py_ssize_t write_pong(uint8_t* out, uint64_t correlation) noexcept nogil:
    return write_header(out, PONG, correlation, 0)


cdef inline Py_ssize_t write_poll(uint8_t* out, uint64_t correlation, uint64_t subscription) noexcept nogil:
    write_header(out, POLL, correlation, 8)
    put_be64(out + HEADER_SIZE, subscription)
    return POLL_SIZE
