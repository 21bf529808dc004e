"""The Felix codec: frames to bytes and bytes to frames, both directions, and the addresses that topics stand for. It
knows nothing of streams, rights or subscriptions: what a well-formed message means is for the session and the client
to say."""

# The grammar (all integers big-endian):
#
#   frame     = magic:u32 version:u16 flags:u16 length:u32 payload
#               magic is "FLX1", version 1; length counts the payload alone, at most 16777216. A header field that is
#               not right is judged as soon as its bytes are there: the stream cannot be read on.
#
#   flags               payload                                                                  sent by
#   0x0001  batch       tenant namespace stream count:u32 item*count ignored                     client
#           name        size:u16 utf8[size]
#           item        size:u32 bytes[size]
#   0x0002  events      subscription:u64 count:u32 item*count ignored                            server
#   else    message     a JSON object in UTF-8 with a `type`; see felix_json.py                  both
#
# Which of 0x0001 and 0x0002 counts depends on the direction: a client sends no events, a server no batches. Other
# bits mean nothing. Binary payloads of messages are Base64 in JSON: standard alphabet, with padding.

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize, PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memchr, memcpy

from headrace.wire.bytes cimport View, be16, be32, utf8_valid, view_of
from headrace.wire.decoding cimport StreamDecoder

from msgspec import Raw

from headrace.wire import felix_json


PROTOCOL_VERSION = VERSION
MAX_FRAME_LENGTH = MAX_LENGTH
HEADER_BYTES = HEADER_SIZE
FLAG_PUBLISH_BATCH = PUBLISH_BATCH
FLAG_EVENT_BATCH = EVENT_BATCH


class FrameError(ValueError):
    """The byte stream cannot be read on: a header that the protocol does not have.

    `kind` is "bad magic", "bad version" or "bad length"; `position` is where in the stream the field is.
    """

    def __init__(self, position, kind, reason):
        super().__init__(f"{kind} at byte {position}: {reason}")
        self.position = position
        self.kind = kind
        self.reason = reason

    def __reduce__(self):
        return FrameError, (self.position, self.kind, self.reason)


class PayloadError(ValueError):
    """A frame whose payload is not what its flags or its message type ask for.

    `kind` is "bad size", "bad count", "bad text", "bad base64" or "bad json"; the text says it to a person.
    """

    def __init__(self, kind, reason):
        super().__init__(reason)
        self.kind = kind

    def __reduce__(self):
        return PayloadError, (self.kind, str(self))


cdef dict COMPLAINTS = {
    BAD_SIZE: ("bad size", "the payload ends before its fields do"),
    BAD_COUNT: ("bad count", "the count is of more items than there are bytes for"),
    BAD_TEXT: ("bad text", "a name is not UTF-8"),
    BAD_BASE64: ("bad base64", "a payload is not Base64 with padding"),
    BAD_JSON: ("bad json", "a payload is not a text, or payloads not a list of texts"),
}


cdef object complaint(int bad):
    return PayloadError(*COMPLAINTS[bad])


@cython.final
cdef class Frame:
    """A frame taken off the wire. `start` and `end` are its byte range in the stream."""

    cdef readonly uint16_t flags
    cdef readonly bytes payload
    cdef readonly int64_t start
    cdef readonly int64_t end


@cython.final
cdef class Decoder(StreamDecoder):
    """Takes a byte stream in pieces of any size and gives back its frames."""

    cdef uint32_t max_length

    def __init__(self, max_frame=MAX_LENGTH):
        if not 0 <= max_frame <= 0xFFFFFFFF:
            raise ValueError(f"max_frame must be from 0 to {0xFFFFFFFF}, not {max_frame}")
        self.max_length = max_frame
        self.least = HEADER_SIZE
        self.judged = HEADER_SIZE

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
        if bad == BAD_MAGIC:
            self.error = FrameError(self.position, "bad magic", f"{bytes(data[:4])!r} is not b'FLX1'")
        elif bad == BAD_VERSION:
            self.error = FrameError(self.position + 4, "bad version", f"version {be16(data + 4)} is not {VERSION}")
        else:
            self.error = FrameError(self.position + 8, "bad length",
                                    f"length {be32(data + 8)} is above {self.max_length}")
        return 0

    cdef Frame decoded(self, RawFrame* raw):
        cdef Frame frame = Frame.__new__(Frame)
        frame.flags = raw.flags
        frame.payload = PyBytes_FromStringAndSize(<const char*>raw.payload, raw.size)
        frame.start = self.position
        self.position += HEADER_SIZE + <int64_t>raw.size
        frame.end = self.position
        return frame


cdef inline str text(View view):
    return PyUnicode_DecodeUTF8(<const char*>view.data, view.size, NULL)


cdef list items_of(View items, uint32_t count):
    cdef list found = PyList_New(count)
    cdef View item
    cdef bytes data
    cdef uint32_t i
    for i in range(count):
        item = next_item(&items)
        data = PyBytes_FromStringAndSize(<const char*>item.data, item.size)
        Py_INCREF(data)
        PyList_SET_ITEM(found, i, data)
    return found


def decode_publish_batch(bytes payload not None):
    """Tenant, namespace, stream and payloads of a binary publish batch; PayloadError says what is wrong."""
    cdef RawBatch raw
    cdef int bad = parse_batch(<const uint8_t*>PyBytes_AS_STRING(payload), <uint32_t>PyBytes_GET_SIZE(payload), &raw)
    if bad:
        raise complaint(bad)
    return text(raw.tenant), text(raw.namespace), text(raw.stream), items_of(raw.items, raw.count)


def decode_event_batch(bytes payload not None):
    """Subscription id and payloads of a binary event batch; PayloadError says what is wrong."""
    cdef RawEvents raw
    cdef int bad = parse_events(<const uint8_t*>PyBytes_AS_STRING(payload), <uint32_t>PyBytes_GET_SIZE(payload), &raw)
    if bad:
        raise complaint(bad)
    return raw.subscription, items_of(raw.items, raw.count)


def measure_batches(data):
    """How many payloads, and bytes of them, are in a buffer of whole publish batch frames: what a session reads of
    them before it appends, without a Python object for any."""
    cdef Py_buffer buffer
    cdef RawFrame raw
    cdef RawBatch batch
    cdef View item
    cdef Py_ssize_t used = 0, wanted = 0, at = 0
    cdef uint64_t count = 0, size = 0
    cdef uint32_t i
    cdef int bad
    PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE)
    try:
        while at < buffer.len:
            if next_frame(<const uint8_t*>buffer.buf + at, buffer.len - at, MAX_LENGTH, &raw, &used, &wanted) != 1:
                raise ValueError(f"there is no whole frame at byte {at}")
            bad = parse_batch(raw.payload, raw.size, &batch)
            if bad:
                raise complaint(bad)
            for i in range(batch.count):
                item = next_item(&batch.items)
                size += <uint64_t>item.size
            count += batch.count
            at += used
    finally:
        PyBuffer_Release(&buffer)
    return count, size


def decode_message(payload):
    """The JSON message in a payload; PayloadError says what is wrong. Its Raw fields borrow the payload's bytes."""
    cdef Py_buffer buffer
    cdef bint good
    PyObject_GetBuffer(payload, &buffer, PyBUF_SIMPLE)
    good = utf8_valid(<const uint8_t*>buffer.buf, buffer.len)
    PyBuffer_Release(&buffer)
    if not good:
        raise PayloadError("bad text", "the message is not UTF-8")
    try:
        return felix_json.decode(payload)
    except ValueError as error:
        raise PayloadError("bad json", str(error)) from None


# --- Base64 in messages ---------------------------------------------------------------------------------------

cdef bytes plain(raw):
    """A Raw field's JSON, without escapes."""
    cdef bytes held = bytes(raw)
    if memchr(PyBytes_AS_STRING(held), 0x5C, PyBytes_GET_SIZE(held)) == NULL:
        return held
    try:
        return felix_json.unescape(held)
    except ValueError:
        raise complaint(BAD_JSON) from None


cdef bytes decoded_text(View view):
    cdef Py_ssize_t size = hr_b64_size(view.data, view.size)
    cdef bytes data
    if size < 0:
        raise complaint(BAD_BASE64)
    data = PyBytes_FromStringAndSize(NULL, size)
    hr_b64_decode(<uint8_t*>PyBytes_AS_STRING(data), view.data, view.size)
    return data


def payload_of(raw):
    """The bytes of a `payload` or `value`; None for null."""
    cdef bytes held = plain(raw)
    cdef View rest = view_of(PyBytes_AS_STRING(held), PyBytes_GET_SIZE(held))
    cdef View found
    if held == b"null":
        return None
    if next_text(&rest, &found):
        raise complaint(BAD_JSON)
    return decoded_text(found)


def payloads_of(raw):
    """The bytes of all `payloads`."""
    cdef bytes held = plain(raw)
    cdef View rest = view_of(PyBytes_AS_STRING(held), PyBytes_GET_SIZE(held))
    cdef View found
    cdef list payloads = []
    cdef int more
    if enter_list(&rest):
        raise complaint(BAD_JSON)
    while True:
        more = next_in_list(&rest, &found)
        if more < 0:
            raise complaint(more)
        if more == 0:
            return payloads
        payloads.append(decoded_text(found))


cdef bytes quoted(data):
    cdef Py_buffer buffer
    cdef bytes out
    cdef uint64_t size
    PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE)
    try:
        size = hr_b64_length(buffer.len)
        out = PyBytes_FromStringAndSize(NULL, size + 2)
        PyBytes_AS_STRING(out)[0] = PyBytes_AS_STRING(out)[size + 1] = 0x22
        hr_b64_encode(<uint8_t*>PyBytes_AS_STRING(out) + 1, <const uint8_t*>buffer.buf, buffer.len)
    finally:
        PyBuffer_Release(&buffer)
    return out


def raw_payload(data):
    """These bytes as a message has them in `payload` or `value`; None becomes null."""
    return Raw(b"null" if data is None else quoted(data))


def raw_payloads(payloads):
    """These bytes as a message has them in `payloads`."""
    return Raw(b"[" + b",".join([quoted(data) for data in payloads]) + b"]")


# --- writing ------------------------------------------------------------------------------------------------
# Each function returns one whole frame. Values that do not fit their field are an error; values that a server
# would refuse (an empty name) are not: tests and tools need to send those too.

cdef inline int check_length(uint64_t length) except -1:
    if length > MAX_LENGTH:
        raise ValueError(f"the frame's length would be {length}, the most is {MAX_LENGTH}")
    return 0


cdef View utf8(str value, str what) except *:
    cdef View view
    view.data = <const uint8_t*>PyUnicode_AsUTF8AndSize(value, &view.size)
    if view.size > 0xFFFF:
        raise ValueError(f"{what} has {view.size} bytes in UTF-8, the most is {0xFFFF}")
    return view


cdef tuple as_bytes(payloads):
    """The payloads, each a bytes object: what is not could change its size between two looks at it."""
    cdef tuple given = tuple(payloads)
    cdef Py_ssize_t i
    for i in range(PyTuple_GET_SIZE(given)):
        if not PyBytes_Check(<object>PyTuple_GET_ITEM(given, i)):
            return tuple([one if isinstance(one, bytes) else bytes(memoryview(one)) for one in given])
    return given


cdef uint64_t items_size(tuple items) noexcept:
    cdef uint64_t total = 0
    cdef Py_ssize_t i
    for i in range(PyTuple_GET_SIZE(items)):
        total += 4 + <uint64_t>PyBytes_GET_SIZE(<object>PyTuple_GET_ITEM(items, i))
    return total


cdef void write_items(uint8_t* out, tuple items) noexcept:
    cdef Py_ssize_t i
    for i in range(PyTuple_GET_SIZE(items)):
        out += write_item(out, PyBytes_AS_STRING(<object>PyTuple_GET_ITEM(items, i)),
                          <uint32_t>PyBytes_GET_SIZE(<object>PyTuple_GET_ITEM(items, i)))


def encode_frame(payload, uint16_t flags=0):
    """A frame with this payload."""
    cdef Py_buffer buffer
    cdef bytes frame
    PyObject_GetBuffer(payload, &buffer, PyBUF_SIMPLE)
    try:
        check_length(buffer.len)
        frame = PyBytes_FromStringAndSize(NULL, HEADER_SIZE + buffer.len)
        write_header(<uint8_t*>PyBytes_AS_STRING(frame), flags, <uint32_t>buffer.len)
        if buffer.len:
            memcpy(PyBytes_AS_STRING(frame) + HEADER_SIZE, buffer.buf, buffer.len)
    finally:
        PyBuffer_Release(&buffer)
    return frame


def encode_message(message):
    """A frame with a JSON message."""
    return encode_frame(felix_json.encode(message))


def encode_publish_batch(str tenant not None, str namespace not None, str stream not None, payloads):
    """A binary publish batch."""
    cdef View names[3]
    cdef tuple items = as_bytes(payloads)
    cdef uint64_t length
    cdef bytes frame
    cdef uint8_t* out
    cdef int i
    names[0] = utf8(tenant, "tenant")
    names[1] = utf8(namespace, "namespace")
    names[2] = utf8(stream, "stream")
    length = 6 + names[0].size + names[1].size + names[2].size + 4 + items_size(items)
    check_length(length)
    frame = PyBytes_FromStringAndSize(NULL, HEADER_SIZE + length)
    out = <uint8_t*>PyBytes_AS_STRING(frame)
    out += write_header(out, PUBLISH_BATCH, <uint32_t>length)
    for i in range(3):
        out += write_name(out, names[i].data, <uint16_t>names[i].size)
    put_be32(out, <uint32_t>PyTuple_GET_SIZE(items))
    write_items(out + 4, items)
    return frame


def encode_event_batch(uint64_t subscription, payloads):
    """A binary event batch."""
    cdef tuple items = as_bytes(payloads)
    cdef uint64_t length = 12 + items_size(items)
    cdef bytes frame
    cdef uint8_t* out
    check_length(length)
    frame = PyBytes_FromStringAndSize(NULL, HEADER_SIZE + length)
    out = <uint8_t*>PyBytes_AS_STRING(frame)
    out += write_header(out, EVENT_BATCH, <uint32_t>length)
    put_be64(out, subscription)
    put_be32(out + 8, <uint32_t>PyTuple_GET_SIZE(items))
    write_items(out + 12, items)
    return frame


# --- addresses ----------------------------------------------------------------------------------------------
# A stream's topic is `tenant.namespace.stream`; inside the first two "%" is written "%25" and a dot "%2E", so that the
# way back is exact. The stream may have dots.

def topic_of(str tenant not None, str namespace not None, str stream not None):
    """The topic of an address; ValueError if it has none."""
    if not tenant or not namespace or not stream:
        raise ValueError("tenant_id, namespace and stream must not be empty")
    return f"{_word(tenant)}.{_word(namespace)}.{stream}"


def address_of(str topic not None):
    """Tenant, namespace and stream of a topic; None if it has no counterpart."""
    words = topic.split(".", 2)
    if len(words) < 3 or not all(words):
        return None
    tenant, namespace = _name(words[0]), _name(words[1])
    if tenant is None or namespace is None:
        return None
    return tenant, namespace, words[2]


def split_address(str text not None):
    """Tenant, namespace and stream of "tenant/namespace/stream"; a slash in the first two is written "%2F", "%" is
    "%25". ValueError says what is wrong."""
    parts = text.split("/", 2)
    if len(parts) < 3 or not all(parts):
        raise ValueError('an address is "tenant/namespace/stream"')
    tenant, namespace = (one.replace("%2F", "/").replace("%25", "%") for one in parts[:2])
    return tenant, namespace, parts[2]


def join_address(str tenant not None, str namespace not None, str stream not None):
    """The way back from split_address()."""
    first, second = (one.replace("%", "%25").replace("/", "%2F") for one in (tenant, namespace))
    return f"{first}/{second}/{stream}"


cdef str _word(str name):
    return name.replace("%", "%25").replace(".", "%2E") if "%" in name or "." in name else name


cdef object _name(str word):
    cdef str name = word.replace("%2E", ".").replace("%25", "%")
    return name if _word(name) == word else None
