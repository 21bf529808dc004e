"""The BlipMQ codec: frames to bytes and bytes to frames, both directions. It knows nothing of handshakes,
rights or subscriptions: what a well-formed frame means is for the session and the client to say."""

# The grammar (all integers big-endian):
#
#   frame     = length:u32 type:u8 correlation:u64 payload
#               length counts what follows it: 9 + size of payload. Outside 9..16777216 the peer hangs up.
#               A length is judged as soon as its 4 bytes are there, a type when the whole frame has arrived.
#
#   type                payload                                           sent by
#   0x01  HELLO         version:u16                                       client
#   0x02  AUTH          size:u16 key:utf8[size]                           client
#   0x03  PUBLISH       qos:u8 size:u16 topic:utf8[size] message          client (publish), server (delivery)
#   0x04  SUBSCRIBE     size:u16 topic:utf8[size] qos:u8 ignored          client
#   0x05  ACK           subscription:u64                                  client (of a delivery), server
#   0x06  NACK          code:u16 size:u16 text:utf8[size]                 server
#   0x07  PING          ignored                                           client
#   0x08  PONG          ignored                                           server
#   0x09  POLL          subscription:u64                                  client
#
# A payload must be exactly its fields; `ignored` and `message` are any bytes, also none. One that is not is
# malformed: that has an answer (a NACK), but the connection goes on, and so does the decoder.

from enum import IntEnum

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport (
    PyBytes_AS_STRING,
    PyBytes_Check,
    PyBytes_FromStringAndSize,
    PyBytes_GET_SIZE,
)
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize, PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp

from headrace.wire.bytes cimport View, be16, be32, utf8_valid
from headrace.wire.decoding cimport StreamDecoder


PROTOCOL_VERSION = VERSION
MAX_FRAME_LENGTH = MAX_LENGTH

FrameType = IntEnum(
    "FrameType",
    [
        ("HELLO", HELLO),
        ("AUTH", AUTH),
        ("PUBLISH", PUBLISH),
        ("SUBSCRIBE", SUBSCRIBE),
        ("ACK", ACK),
        ("NACK", NACK),
        ("PING", PING),
        ("PONG", PONG),
        ("POLL", POLL),
    ],
    module=__name__,
)
cdef tuple FRAME_TYPES = (None, *FrameType)     # indexed by the byte on the wire

# What the text inside a payload is called, the payload's least size, and where the text's length sits in it.
cdef dict TEXT_FIELDS = {
    AUTH: ("key", 2, 0),
    PUBLISH: ("topic", 3, 1),
    SUBSCRIBE: ("topic", 3, 0),
    NACK: ("text", 4, 2),
}


class FrameError(ValueError):
    """The byte stream cannot be read on: a length or a type that the protocol does not have.

    `position` is the place of the offending field in the stream, `kind` is "bad length" or "bad type".
    """

    def __init__(self, position, kind, reason):
        super().__init__(position, kind, reason)
        self.position = position
        self.kind = kind
        self.reason = reason

    def __str__(self):
        return f"{self.reason}, at byte {self.position}"


# --- frames as Python sees them -----------------------------------------------------------------------------

cdef class Frame:
    """A frame taken off the wire. `start` and `end` are its byte range in the stream."""

    cdef uint8_t _type
    cdef readonly uint64_t correlation
    cdef readonly int64_t start
    cdef readonly int64_t end

    def __init__(self):
        raise TypeError("frames come out of a Decoder")

    @property
    def type(self):
        return FRAME_TYPES[self._type]

    def fields(self):
        """What the payload says, by the names of the grammar."""
        return {}

    def __repr__(self):
        inside = "".join(f" {name}={value!r}" for name, value in self.fields().items())
        return f"<{type(self).__name__} correlation={self.correlation}{inside} [{self.start}:{self.end}]>"


@cython.final
cdef class Hello(Frame):
    cdef readonly uint16_t version

    def fields(self):
        return {"version": self.version}


@cython.final
cdef class Auth(Frame):
    cdef readonly str key

    def fields(self):
        return {"key": self.key}


@cython.final
cdef class Publish(Frame):
    """A message: published if a client sent it, delivered if a server did (then `correlation` is the tag)."""

    cdef readonly str topic
    cdef readonly bytes message
    cdef readonly uint8_t qos

    def fields(self):
        return {"topic": self.topic, "qos": self.qos, "message": self.message}


@cython.final
cdef class Subscribe(Frame):
    """`trailing` are bytes behind the last field, which a server takes no notice of."""

    cdef readonly str topic
    cdef readonly bytes trailing
    cdef readonly uint8_t qos

    def fields(self):
        return {"topic": self.topic, "qos": self.qos, "trailing": self.trailing}


@cython.final
cdef class Ack(Frame):
    cdef readonly uint64_t subscription

    def fields(self):
        return {"subscription": self.subscription}


@cython.final
cdef class Nack(Frame):
    cdef readonly str text
    cdef readonly uint16_t code

    def fields(self):
        return {"code": self.code, "text": self.text}


@cython.final
cdef class Ping(Frame):
    """`payload` should be empty; a server takes no notice of it."""

    cdef readonly bytes payload

    def fields(self):
        return {"payload": self.payload}


@cython.final
cdef class Pong(Frame):
    cdef readonly bytes payload

    def fields(self):
        return {"payload": self.payload}


@cython.final
cdef class Poll(Frame):
    cdef readonly uint64_t subscription

    def fields(self):
        return {"subscription": self.subscription}


@cython.final
cdef class Malformed(Frame):
    """A frame whose type is known and whose payload is not what the type asks for.

    `kind` is "bad size", "bad inner length" or "bad text"; `reason` says it to a person.
    """

    cdef readonly bytes payload
    cdef readonly str kind
    cdef readonly str reason

    def fields(self):
        return {"payload": self.payload, "kind": self.kind, "reason": self.reason}


cdef Malformed malformed(RawFrame* raw, int bad):
    cdef Malformed frame = Malformed.__new__(Malformed)
    cdef str name = FRAME_TYPES[raw.type].name
    frame.payload = raw.payload[:raw.size]
    if raw.type not in TEXT_FIELDS:
        frame.kind = "bad size"
        frame.reason = f"the payload of {name} has {2 if raw.type == HELLO else 8} bytes, not {raw.size}"
        return frame
    what, least, length_at = TEXT_FIELDS[raw.type]
    if bad == BAD_INNER_LENGTH:
        frame.kind = "bad inner length"
        frame.reason = f"the {what} length {be16(raw.payload + <int>length_at)} points past the payload"
    elif bad == BAD_TEXT:
        frame.kind = "bad text"
        frame.reason = f"the {what} is not UTF-8"
    elif raw.size < <uint32_t>least:
        frame.kind = "bad size"
        frame.reason = f"the payload of {name} has at least {least} bytes, not {raw.size}"
    else:
        frame.kind = "bad size"
        frame.reason = f"bytes follow the {what}, which is the last field"
    return frame


# --- reading a stream ---------------------------------------------------------------------------------------

@cython.final
cdef class Decoder(StreamDecoder):
    """Takes a byte stream in pieces of any size and gives back its frames."""

    cdef uint32_t max_length
    cdef bytes topic_bytes              # the last topic and its text: deliveries tend to repeat it
    cdef str topic

    def __init__(self, max_frame=MAX_LENGTH):
        if not MIN_LENGTH <= max_frame <= MAX_LENGTH:
            raise ValueError(f"max_frame must be from {MIN_LENGTH} to {MAX_LENGTH}, not {max_frame}")
        self.max_length = max_frame
        self.least = 4                  # the length field
        self.judged = 5                 # and the type
        self.topic_bytes = b""
        self.topic = ""

    cdef Py_ssize_t next_item(self, const uint8_t* data, Py_ssize_t n, list items) except -2:
        cdef RawFrame raw
        cdef Py_ssize_t used = 0
        cdef int found = next_frame(data, n, self.max_length, &raw, &used, &self.wanted)
        if found == 0:
            return 0
        if found < 0:
            self.fail(found, data)
            return -1
        items.append(self.decoded(&raw))
        self.wanted = 0
        return used

    cdef int fail(self, int bad, const uint8_t* data) except -1:
        cdef uint32_t length = be32(data)
        if bad == BAD_TYPE:
            self.error = FrameError(self.position + 4, "bad type", f"frame type 0x{data[4]:02X} is unknown")
        elif length < MIN_LENGTH:
            self.error = FrameError(self.position, "bad length", f"length {length} is below {MIN_LENGTH}")
        else:
            self.error = FrameError(self.position, "bad length",
                                    f"length {length} is above {self.max_length}")
        return 0

    cdef Frame decoded(self, RawFrame* raw):
        cdef Frame frame
        cdef int bad = 0
        if raw.type == PUBLISH:
            frame = self.publish(raw, &bad)
        else:
            frame = rarer(raw, &bad)
        if bad:
            frame = malformed(raw, bad)
        frame._type = raw.type
        frame.correlation = raw.correlation
        frame.start = self.position
        self.position += HEADER_SIZE + <int64_t>raw.size
        frame.end = self.position
        return frame

    cdef Publish publish(self, RawFrame* raw, int* bad):
        cdef RawPublish parts
        cdef Publish frame
        bad[0] = split_publish(raw.payload, raw.size, &parts)
        if bad[0]:
            return None
        if (parts.topic_size != PyBytes_GET_SIZE(self.topic_bytes)
                or memcmp(parts.topic, PyBytes_AS_STRING(self.topic_bytes), parts.topic_size) != 0):
            if not utf8_valid(parts.topic, parts.topic_size):
                bad[0] = BAD_TEXT
                return None
            self.topic = text(parts.topic, parts.topic_size)
            self.topic_bytes = parts.topic[:parts.topic_size]
        frame = Publish.__new__(Publish)
        frame.topic = self.topic
        frame.qos = parts.qos
        frame.message = PyBytes_FromStringAndSize(<const char*>parts.message, parts.message_size)
        return frame


cdef inline str text(const uint8_t* data, Py_ssize_t size):
    return PyUnicode_DecodeUTF8(<const char*>data, size, NULL)


# Every frame but PUBLISH. On a malformed payload `bad` says why, and the frame returned is not to be used.
cdef Frame rarer(RawFrame* raw, int* bad):
    cdef Hello hello
    cdef Auth auth
    cdef Subscribe subscribe
    cdef Ack ack
    cdef Nack nack
    cdef Ping ping
    cdef Pong pong
    cdef Poll poll
    cdef View key
    cdef RawSubscribe wish
    cdef RawNack refusal
    if raw.type == ACK:
        ack = Ack.__new__(Ack)
        bad[0] = parse_ack(raw.payload, raw.size, &ack.subscription)
        return ack
    if raw.type == POLL:
        poll = Poll.__new__(Poll)
        bad[0] = parse_poll(raw.payload, raw.size, &poll.subscription)
        return poll
    if raw.type == NACK:
        nack = Nack.__new__(Nack)
        bad[0] = parse_nack(raw.payload, raw.size, &refusal)
        if not bad[0]:
            nack.code = refusal.code
            nack.text = text(refusal.text, refusal.text_size)
        return nack
    if raw.type == PING:
        ping = Ping.__new__(Ping)
        ping.payload = raw.payload[:raw.size]
        return ping
    if raw.type == PONG:
        pong = Pong.__new__(Pong)
        pong.payload = raw.payload[:raw.size]
        return pong
    if raw.type == SUBSCRIBE:
        subscribe = Subscribe.__new__(Subscribe)
        bad[0] = parse_subscribe(raw.payload, raw.size, &wish)
        if not bad[0]:
            subscribe.topic = text(wish.topic, wish.topic_size)
            subscribe.qos = wish.qos
            subscribe.trailing = raw.payload[raw.size - wish.trailing:raw.size]
        return subscribe
    if raw.type == HELLO:
        hello = Hello.__new__(Hello)
        bad[0] = parse_hello(raw.payload, raw.size, &hello.version)
        return hello
    auth = Auth.__new__(Auth)
    bad[0] = parse_auth(raw.payload, raw.size, &key)
    if not bad[0]:
        auth.key = text(key.data, key.size)
    return auth


# --- writing ------------------------------------------------------------------------------------------------
# Each function returns one whole frame. Values that do not fit their field are an error; values that a server
# would refuse (an empty topic, a QoS of 7) are not: tests and tools need to send those too.

cdef View utf8(str value, str what) except *:
    cdef View view
    view.data = <const uint8_t*>PyUnicode_AsUTF8AndSize(value, &view.size)
    if view.size > 0xFFFF:
        raise ValueError(f"{what} has {view.size} bytes in UTF-8, the most is {0xFFFF}")
    return view


cdef inline int check_length(Py_ssize_t whole) except -1:
    if whole - 4 > MAX_LENGTH:
        raise ValueError(f"the frame's length would be {whole - 4}, the most is {MAX_LENGTH}")
    return 0


cdef inline bytes room(Py_ssize_t size):
    return PyBytes_FromStringAndSize(NULL, size)


cdef inline uint8_t* start_of(bytes frame) noexcept:
    return <uint8_t*>PyBytes_AS_STRING(frame)


def encode_hello(uint16_t version, uint64_t correlation):
    cdef bytes frame = room(HELLO_SIZE)
    write_hello(start_of(frame), correlation, version)
    return frame


def encode_auth(str key not None, uint64_t correlation):
    cdef View view = utf8(key, "key")
    cdef bytes frame = room(auth_size(<uint16_t>view.size))
    write_auth(start_of(frame), correlation, view.data, <uint16_t>view.size)
    return frame


def encode_publish(str topic not None, message, uint8_t qos, uint64_t correlation):
    cdef View view = utf8(topic, "topic")
    cdef Py_buffer buffer
    cdef Py_ssize_t size
    cdef bytes frame
    PyObject_GetBuffer(message, &buffer, PyBUF_SIMPLE)
    try:
        size = publish_size(<uint16_t>view.size, buffer.len)
        check_length(size)
        frame = room(size)
        write_publish(start_of(frame), correlation, qos, view.data, <uint16_t>view.size,
                      buffer.buf, buffer.len)
    finally:
        PyBuffer_Release(&buffer)
    return frame


def encode_publish_many(str topic not None, payloads, uint8_t qos, uint64_t first_correlation):
    """A PUBLISH frame for each payload, one after another; correlations count up from the first."""
    cdef View view = utf8(topic, "topic")
    cdef tuple messages = tuple(payloads)
    cdef Py_ssize_t count = PyTuple_GET_SIZE(messages)
    cdef Py_ssize_t total = 0
    cdef Py_ssize_t size
    cdef Py_ssize_t i
    cdef bytes frames
    cdef uint8_t* out
    for i in range(count):
        if not PyBytes_Check(<object>PyTuple_GET_ITEM(messages, i)):
            # Copied first: what is not bytes could change its size between the two loops.
            messages = tuple([m if isinstance(m, bytes) else bytes(memoryview(m)) for m in messages])
            break
    for i in range(count):
        size = publish_size(<uint16_t>view.size, PyBytes_GET_SIZE(<object>PyTuple_GET_ITEM(messages, i)))
        check_length(size)
        total += size
    frames = room(total)
    out = start_of(frames)
    for i in range(count):
        size = PyBytes_GET_SIZE(<object>PyTuple_GET_ITEM(messages, i))
        out += write_publish(out, first_correlation + <uint64_t>i, qos, view.data, <uint16_t>view.size,
                             PyBytes_AS_STRING(<object>PyTuple_GET_ITEM(messages, i)), size)
    return frames


def encode_subscribe(str topic not None, uint8_t qos, uint64_t correlation):
    cdef View view = utf8(topic, "topic")
    cdef bytes frame = room(subscribe_size(<uint16_t>view.size))
    write_subscribe(start_of(frame), correlation, view.data, <uint16_t>view.size, qos)
    return frame


def encode_ack(uint64_t subscription, uint64_t correlation):
    cdef bytes frame = room(ACK_SIZE)
    write_ack(start_of(frame), correlation, subscription)
    return frame


def encode_nack(uint16_t code, str text not None, uint64_t correlation):
    cdef View view = utf8(text, "text")
    cdef bytes frame = room(nack_size(<uint16_t>view.size))
    write_nack(start_of(frame), correlation, code, view.data, <uint16_t>view.size)
    return frame


def encode_ping(uint64_t correlation):
    cdef bytes frame = room(PING_SIZE)
    write_ping(start_of(frame), correlation)
    return frame


def encode_pong(uint64_t correlation):
    cdef bytes frame = room(PONG_SIZE)
    write_pong(start_of(frame), correlation)
    return frame


def encode_poll(uint64_t subscription, uint64_t correlation):
    cdef bytes frame = room(POLL_SIZE)
    write_poll(start_of(frame), correlation, subscription)
    return frame
