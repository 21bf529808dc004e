"""The Overhop codec: frames to bytes and bytes to frames, both directions. It knows nothing of workers, queues or the
order of messages: what a sound envelope means is for the session and the client to say."""

# The grammar:
#
#   frame     = length:u32 (big-endian) payload          length counts the payload: 1 to the limit
#   payload   = one MessagePack map, and nothing behind it:
#                   v    int, 2
#                   t    int, the message's type: at most 100 from a client, above it from a server
#                   rid  string, not empty; "0" in what a server says unasked
#                   p    map, what the type has to say
#               Other keys mean nothing. Of a key that comes twice, the last one counts.
#   values    = int (of int64), str (UTF-8), bool, nil, array, map (with str keys), bin; nothing else, at any depth
#
# A length is judged as soon as its 4 bytes are there, the payload when all of it has arrived. What is wrong with either
# ends the stream: there is no answer to it.

from enum import IntEnum

import msgpack

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize, PyUnicode_DecodeUTF8
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from headrace.wire.bytes cimport View, be16, be32, be64, put_be16, put_be32, put_be64, utf8_valid
from headrace.wire.decoding cimport StreamDecoder

PROTOCOL_VERSION = VERSION
LEAST_PAYLOAD_LIMIT = LEAST_LIMIT
MOST_PAYLOAD_LIMIT = MOST_LIMIT
DEFAULT_PAYLOAD_LIMIT = USUAL_LIMIT
DEPTH_LIMIT = MAX_DEPTH

MessageType = IntEnum(
    "MessageType",
    [
        ("HELLO", HELLO),
        ("REGISTER", REGISTER),
        ("PING", PING),
        ("GQUEUE", GQUEUE),
        ("LQUEUES", LQUEUES),
        ("SUBSCRIBE", SUBSCRIBE),
        ("UNSUBSCRIBE", UNSUBSCRIBE),
        ("CREDIT", CREDIT),
        ("ADDQUEUE", ADDQUEUE),
        ("STATUS", STATUS),
        ("RMQUEUE", RMQUEUE),
        ("PAUSE", PAUSE),
        ("RESUME", RESUME),
        ("ENQUEUE", ENQUEUE),
        ("JOB", JOB),
        ("RMJOB", RMJOB),
        ("LSJOB", LSJOB),
        ("QSTATS", QSTATS),
        ("DONE", DONE),
        ("FAIL", FAIL),
        ("EXTEND", EXTEND),
        ("OK", OK),
        ("ERR", ERR),
        ("HI", HI),
        ("IDENT", IDENT),
        ("PONG", PONG),
        ("DELIVER", DELIVER),
        ("ENDED", ENDED),
    ],
    module=__name__,
)

cdef dict REASONS = {
    CUT: ("bad MessagePack", "the payload ends inside a value"),
    FORBIDDEN: ("forbidden type", "a float, an ext or no type of MessagePack at all"),
    WIDE_INT: ("bad integer", "an integer is beyond int64"),
    BAD_TEXT: ("bad text", "a string is not UTF-8"),
    BAD_KEY: ("bad key", "a map has a key that is no string"),
    TOO_DEEP: ("too deep", f"arrays and maps are nested deeper than {MAX_DEPTH}"),
    NOT_A_MAP: ("no map", "the payload is no map"),
    TRAILING: ("trailing bytes", "bytes follow the payload's map"),
    BAD_V: ("bad v", f"v is missing or not {VERSION}"),
    BAD_T: ("bad t", "t is missing or no integer"),
    BAD_RID: ("bad rid", "rid is missing, no string, or empty"),
    BAD_P: ("bad p", "p is missing or no map"),
}


# --- one pass over MessagePack --------------------------------------------------------------------------------

cdef struct Scan:
    const uint8_t* at
    const uint8_t* end


# What a head byte announces: containers have `count` entries behind them, others `size` bytes.
cdef enum Shape:
    PLAIN = 0       # all said with the bytes there are
    INTEGER = 1
    TEXT = 2
    BIN = 3
    ARRAY = 4
    MAP = 5
    NIL = 6


# Reads a head and moves behind it. Answers a Shape, or minus a Fault with the scan unmoved.
cdef inline int read_head(Scan* s, uint32_t* size, int64_t* value) noexcept nogil:
    cdef const uint8_t* p = s.at
    cdef Py_ssize_t left = s.end - p
    cdef uint8_t head
    cdef uint64_t wide
    if left < 1:
        return -CUT
    head = p[0]
    if head < 0x80:
        value[0] = head
        s.at = p + 1
        return INTEGER
    if head >= 0xE0:
        value[0] = <int64_t>head - 256
        s.at = p + 1
        return INTEGER
    if head < 0x90:
        size[0] = head & 0x0F
        s.at = p + 1
        return MAP
    if head < 0xA0:
        size[0] = head & 0x0F
        s.at = p + 1
        return ARRAY
    if head < 0xC0:
        size[0] = head & 0x1F
        s.at = p + 1
        return TEXT
    if head == 0xC0:
        s.at = p + 1
        return NIL
    if head == 0xC2 or head == 0xC3:
        s.at = p + 1
        return PLAIN
    if head == 0xC4 or head == 0xD9:
        if left < 2:
            return -CUT
        size[0] = p[1]
        s.at = p + 2
        return BIN if head == 0xC4 else TEXT
    if head == 0xC5 or head == 0xDA or head == 0xDC or head == 0xDE:
        if left < 3:
            return -CUT
        size[0] = be16(p + 1)
        s.at = p + 3
        return BIN if head == 0xC5 else TEXT if head == 0xDA else ARRAY if head == 0xDC else MAP
    if head == 0xC6 or head == 0xDB or head == 0xDD or head == 0xDF:
        if left < 5:
            return -CUT
        size[0] = be32(p + 1)
        s.at = p + 5
        return BIN if head == 0xC6 else TEXT if head == 0xDB else ARRAY if head == 0xDD else MAP
    if head == 0xCC or head == 0xD0:
        if left < 2:
            return -CUT
        value[0] = p[1]
        if head == 0xD0 and p[1] >= 0x80:
            value[0] -= 256
        s.at = p + 2
        return INTEGER
    if head == 0xCD or head == 0xD1:
        if left < 3:
            return -CUT
        value[0] = be16(p + 1)
        if head == 0xD1 and p[1] >= 0x80:
            value[0] -= 65536
        s.at = p + 3
        return INTEGER
    if head == 0xCE or head == 0xD2:
        if left < 5:
            return -CUT
        value[0] = be32(p + 1)
        if head == 0xD2 and p[1] >= 0x80:
            value[0] -= <int64_t>1 << 32
        s.at = p + 5
        return INTEGER
    if head == 0xCF or head == 0xD3:
        if left < 9:
            return -CUT
        wide = be64(p + 1)
        if head == 0xCF and wide > <uint64_t>INT64_MAX:
            return -WIDE_INT
        value[0] = <int64_t>wide
        s.at = p + 9
        return INTEGER
    return -FORBIDDEN


# A string that has to be there, as a map's key. SOUND, or a Fault.
cdef inline int read_key(Scan* s, View* key) noexcept nogil:
    cdef const uint8_t* start = s.at
    cdef uint32_t size = 0
    cdef int64_t value
    cdef int shape = read_head(s, &size, &value)
    if shape < 0:
        return -shape
    if shape != TEXT:
        s.at = start
        return BAD_KEY
    if s.end - s.at < <Py_ssize_t>size:
        s.at = start
        return CUT
    if not utf8_valid(s.at, size):
        s.at = start
        return BAD_TEXT
    key.data = s.at
    key.size = size
    s.at += size
    return SOUND


# One value at any depth. SOUND with the scan behind it, or a Fault with the scan where it is.
cdef int skim(Scan* s, int depth) noexcept nogil:
    cdef const uint8_t* start = s.at
    cdef uint32_t size = 0
    cdef int64_t value
    cdef int shape = read_head(s, &size, &value)
    cdef int fault
    cdef View key
    if shape < 0:
        return -shape
    if shape == TEXT or shape == BIN:
        if s.end - s.at < <Py_ssize_t>size:
            s.at = start
            return CUT
        if shape == TEXT and not utf8_valid(s.at, size):
            s.at = start
            return BAD_TEXT
        s.at += size
    elif shape == ARRAY or shape == MAP:
        if depth >= MAX_DEPTH:
            s.at = start
            return TOO_DEEP
        # Every entry takes a byte at least, so a count beyond what is there ends with the bytes.
        while size:
            if shape == MAP:
                fault = read_key(s, &key)
                if fault:
                    return fault
            fault = skim(s, depth + 1)
            if fault:
                return fault
            size -= 1
    return SOUND


# The map of `p`, with its entries noted.
cdef int skim_payload(Scan* s, Envelope* out, bint* is_map) noexcept nogil:
    cdef const uint8_t* start = s.at
    cdef uint32_t size = 0, i = 0
    cdef int64_t value
    cdef int shape = read_head(s, &size, &value)
    cdef int fault
    cdef View key
    cdef const uint8_t* at
    is_map[0] = shape == MAP
    if shape != MAP:
        s.at = start
        return skim(s, 1)
    out.entries = size
    out.inside.data = s.at
    while i < size:
        fault = read_key(s, &key)
        if fault:
            return fault
        at = s.at
        fault = skim(s, 2)
        if fault:
            return fault
        if i < FIELDS:
            out.fields[i].key = key
            out.fields[i].value.data = at
            out.fields[i].value.size = s.at - at
        i += 1
    out.inside.size = s.at - out.inside.data
    out.payload.data = start
    out.payload.size = s.at - start
    return SOUND


cdef int read_envelope(const uint8_t* data, Py_ssize_t size, Envelope* out, Py_ssize_t* bad_at) noexcept nogil:
    cdef Scan s
    cdef uint32_t entries = 0, inner = 0
    cdef int64_t value = 0, version = 0
    cdef int shape, fault = SOUND
    cdef View key
    cdef const uint8_t* start
    cdef bint has_v = False, has_t = False, has_rid = False, has_p = False
    s.at = data
    s.end = data + size
    out.rid.size = 0
    shape = read_head(&s, &entries, &value)
    if shape < 0:
        bad_at[0] = 0
        return -shape
    if shape != MAP:
        # What else it is must be sound first: so its fault is the same wherever it stands.
        s.at = data
        fault = skim(&s, 0)
        bad_at[0] = s.at - data if fault else 0
        return fault if fault else NOT_A_MAP
    while entries:
        fault = read_key(&s, &key)
        if fault:
            break
        if key.size == 1 and key.data[0] == c"p":
            fault = skim_payload(&s, out, &has_p)
        elif key.size == 1 and (key.data[0] == c"v" or key.data[0] == c"t"):
            start = s.at
            shape = read_head(&s, &inner, &value)
            if shape != INTEGER:
                s.at = start
                fault = skim(&s, 1)
            if key.data[0] == c"v":
                has_v = shape == INTEGER
                version = value
            else:
                has_t = shape == INTEGER
                out.type = value
        elif key.size == 3 and memcmp(key.data, "rid", 3) == 0:
            start = s.at
            fault = skim(&s, 1)
            if not fault:
                inner = 0
                s.at = start
                has_rid = read_head(&s, &inner, &value) == TEXT
                if has_rid:
                    out.rid.data = s.at
                    out.rid.size = inner
                    s.at += inner
                else:
                    s.at = start
                    skim(&s, 1)
        else:
            fault = skim(&s, 1)
        if fault:
            break
        entries -= 1
    if fault:
        bad_at[0] = s.at - data
        return fault
    bad_at[0] = s.at - data
    if s.at != s.end:
        return TRAILING
    bad_at[0] = 0
    if not has_v or version != VERSION:
        return BAD_V
    if not has_t:
        return BAD_T
    if not has_rid or out.rid.size == 0:
        return BAD_RID
    if not has_p:
        return BAD_P
    return SOUND


# --- reading what was validated ---------------------------------------------------------------------------------

cdef bint find_field(const Envelope* envelope, const char* name, Py_ssize_t size, View* value) noexcept nogil:
    """The last entry of `p` with this key."""
    cdef uint32_t i = envelope.entries
    cdef bint found = False
    cdef Scan s
    cdef View key
    cdef const uint8_t* at
    if i <= FIELDS:
        while i:
            i -= 1
            if envelope.fields[i].key.size == size and memcmp(envelope.fields[i].key.data, name, size) == 0:
                value[0] = envelope.fields[i].value
                return True
        return False
    s.at = envelope.inside.data
    s.end = s.at + envelope.inside.size
    while i:
        i -= 1
        if read_key(&s, &key) != SOUND:
            break
        at = s.at
        if skim(&s, 2) != SOUND:
            break
        if key.size == size and memcmp(key.data, name, size) == 0:
            value.data = at
            value.size = s.at - at
            found = True
    return found


cdef inline int shape_of(const View* value, Scan* s, uint32_t* size, int64_t* number) noexcept nogil:
    s.at = value.data
    s.end = value.data + value.size
    return read_head(s, size, number)


cdef bint as_int(const View* value, int64_t* out) noexcept nogil:
    cdef Scan s
    cdef uint32_t size = 0
    return shape_of(value, &s, &size, out) == INTEGER


cdef bint as_text(const View* value, View* out) noexcept nogil:
    cdef Scan s
    cdef uint32_t size = 0
    cdef int64_t number
    if shape_of(value, &s, &size, &number) != TEXT:
        return False
    out.data = s.at
    out.size = size
    return True


cdef bint as_bin(const View* value, View* out) noexcept nogil:
    cdef Scan s
    cdef uint32_t size = 0
    cdef int64_t number
    if shape_of(value, &s, &size, &number) != BIN:
        return False
    out.data = s.at
    out.size = size
    return True


cdef bint is_nil(const View* value) noexcept nogil:
    return value.size == 1 and value.data[0] == 0xC0


# --- writing ------------------------------------------------------------------------------------------------------

cdef Py_ssize_t int_size(int64_t value) noexcept nogil:
    if -32 <= value < 128:
        return 1
    if value >= 0:
        return 2 if value < 256 else 3 if value < 65536 else 5 if value < <int64_t>1 << 32 else 9
    return 2 if value >= -128 else 3 if value >= -32768 else 5 if value >= -(<int64_t>1 << 31) else 9


cdef uint8_t* put_int(uint8_t* p, int64_t value) noexcept nogil:
    """The shortest form: unsigned from 0 on, signed below."""
    cdef Py_ssize_t size = int_size(value)
    if size == 1:
        p[0] = <uint8_t>value
    elif size == 2:
        p[0] = 0xCC if value >= 0 else 0xD0
        p[1] = <uint8_t>value
    elif size == 3:
        p[0] = 0xCD if value >= 0 else 0xD1
        put_be16(p + 1, <uint16_t>value)
    elif size == 5:
        p[0] = 0xCE if value >= 0 else 0xD2
        put_be32(p + 1, <uint32_t>value)
    else:
        p[0] = 0xCF if value >= 0 else 0xD3
        put_be64(p + 1, <uint64_t>value)
    return p + size


cdef inline uint8_t* put_size(uint8_t* p, uint8_t wide, Py_ssize_t n, bint byte_form) noexcept nogil:
    """A head with a size behind it; `wide` is the 16-bit form's, and the 32-bit form's is the next one."""
    if byte_form and n < 256:
        p[0] = wide - 1
        p[1] = <uint8_t>n
        return p + 2
    if n < 65536:
        p[0] = wide
        put_be16(p + 1, <uint16_t>n)
        return p + 3
    p[0] = wide + 1
    put_be32(p + 1, <uint32_t>n)
    return p + 5


cdef uint8_t* put_text(uint8_t* p, const void* text, Py_ssize_t n) noexcept nogil:
    if n < 32:
        p[0] = 0xA0 | <uint8_t>n
        p += 1
    else:
        p = put_size(p, 0xDA, n, True)
    memcpy(p, text, n)
    return p + n


cdef uint8_t* put_bin(uint8_t* p, const void* data, Py_ssize_t n) noexcept nogil:
    p = put_size(p, 0xC5, n, True)
    if n:
        memcpy(p, data, n)
    return p + n


# p and rid come first, t and v last: the order in which the protocol's own server writes them.
cdef Py_ssize_t frame_size(Py_ssize_t payload_size, Py_ssize_t rid_size, int64_t type) noexcept nogil:
    return LENGTH_SIZE + 1 + 2 + payload_size + 4 + text_size(rid_size) + 2 + int_size(type) + 3


cdef uint8_t* open_frame(uint8_t* out, Py_ssize_t payload_size, const void* rid, Py_ssize_t rid_size,
                         int64_t type) noexcept nogil:
    cdef uint8_t* payload = out + LENGTH_SIZE + 3
    cdef uint8_t* p = payload + payload_size
    put_be32(out, <uint32_t>(frame_size(payload_size, rid_size, type) - LENGTH_SIZE))
    out[4] = 0x84
    out[5] = 0xA1
    out[6] = c"p"
    memcpy(p, "\xa3rid", 4)
    p = put_text(p + 4, rid, rid_size)
    p[0] = 0xA1
    p[1] = c"t"
    p = put_int(p + 2, type)
    p[0] = 0xA1
    p[1] = c"v"
    p[2] = VERSION
    return payload


@cython.final
cdef class Raw:
    """MessagePack that is written as it is, where a value is expected."""

    cdef readonly bytes data

    def __init__(self, bytes data not None):
        self.data = data

    def __eq__(self, other):
        return isinstance(other, Raw) and (<Raw>other).data == self.data

    def __hash__(self):
        return hash(self.data)

    def __repr__(self):
        return f"Raw({self.data!r})"


cdef uint8_t* enlarge(bytearray out, Py_ssize_t n) except NULL:
    cdef Py_ssize_t held = PyByteArray_GET_SIZE(out)
    PyByteArray_Resize(out, held + n)
    return <uint8_t*>PyByteArray_AS_STRING(out) + held


cdef int pack_into(bytearray out, object value, int depth) except -1:
    cdef const char* text
    cdef Py_ssize_t n
    cdef uint8_t head[5]
    if value is None:
        enlarge(out, 1)[0] = 0xC0
    elif value is True or value is False:
        enlarge(out, 1)[0] = 0xC3 if value else 0xC2
    elif isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"an integer of Overhop is one of int64, not {value}")
        put_int(enlarge(out, int_size(value)), value)
    elif isinstance(value, str):
        text = PyUnicode_AsUTF8AndSize(value, &n)
        put_text(enlarge(out, text_size(n)), text, n)
    elif isinstance(value, bytes):
        n = PyBytes_GET_SIZE(value)
        put_bin(enlarge(out, bin_size(n)), PyBytes_AS_STRING(value), n)
    elif isinstance(value, Raw):
        n = PyBytes_GET_SIZE((<Raw>value).data)
        memcpy(enlarge(out, n), PyBytes_AS_STRING((<Raw>value).data), n)
    elif isinstance(value, (bytearray, memoryview)):
        pack_into(out, bytes(value), depth)
    elif isinstance(value, (list, tuple, dict)):
        if depth >= MAX_DEPTH:
            raise ValueError(f"arrays and maps are nested deeper than {MAX_DEPTH}")
        n = len(value)
        if n < 16:
            head[0] = (0x80 if isinstance(value, dict) else 0x90) | <uint8_t>n
            memcpy(enlarge(out, 1), head, 1)
        else:
            size = put_size(head, 0xDE if isinstance(value, dict) else 0xDC, n, False) - head
            memcpy(enlarge(out, size), head, size)
        if isinstance(value, dict):
            for key, item in value.items():
                if not isinstance(key, str):
                    raise TypeError(f"a map of Overhop has strings for keys, not {key!r}")
                pack_into(out, key, depth)
                pack_into(out, item, depth + 1)
        else:
            for item in value:
                pack_into(out, item, depth + 1)
    else:
        raise TypeError(f"Overhop has no {type(value).__name__}: {value!r:.80}")
    return 0


cpdef bytes pack(object value):
    """A value as MessagePack, in the types that Overhop allows; a Raw is taken for what it holds."""
    cdef bytearray out = bytearray()
    pack_into(out, value, 0)
    return bytes(out)


cpdef bytes encode(int64_t type, str rid, object payload):
    """One whole frame. What does not fit the protocol's types is an error; what a server would refuse is not: tests and
    tools need to send that too."""
    cdef bytearray body = bytearray()
    cdef Py_ssize_t rid_size = 0, n, whole
    cdef const char* rid_text = PyUnicode_AsUTF8AndSize(rid, &rid_size)
    cdef bytes frame
    pack_into(body, payload, 1)
    n = PyByteArray_GET_SIZE(body)
    whole = frame_size(n, rid_size, type)
    if whole - LENGTH_SIZE > MOST_LIMIT:
        raise ValueError(f"the payload would have {whole - LENGTH_SIZE} bytes, the most is {MOST_LIMIT}")
    frame = PyBytes_FromStringAndSize(NULL, whole)
    memcpy(open_frame(<uint8_t*>PyBytes_AS_STRING(frame), n, rid_text, rid_size, type), PyByteArray_AS_STRING(body), n)
    return frame


def unpack(data):
    """The value that MessagePack stands for; it must be sound."""
    return msgpack.unpackb(data, raw=False, strict_map_key=True)


# --- times and ids --------------------------------------------------------------------------------------------------

cdef bint digits(const uint8_t* p, int n, int* out) noexcept nogil:
    cdef int i
    out[0] = 0
    for i in range(n):
        if not c"0" <= p[i] <= c"9":
            return False
        out[0] = out[0] * 10 + (p[i] - c"0")
    return True


cdef int64_t days_before(int64_t year, int month, int day) noexcept nogil:
    """Days from the epoch to a date, in the Gregorian calendar; years begin in March, so that the leap day is last."""
    cdef int64_t y = year - (month <= 2)
    cdef int64_t era = (y if y >= 0 else y - 399) // 400
    cdef int64_t of_era = y - era * 400
    cdef int64_t of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719468


cdef int days_in(int year, int month) noexcept nogil:
    if month == 2:
        return 29 if (year % 4 == 0 and year % 100 != 0) or year % 400 == 0 else 28
    return 30 if month == 4 or month == 6 or month == 9 or month == 11 else 31


cdef bint read_time(const uint8_t* text, Py_ssize_t n, int64_t* out) noexcept nogil:
    """RFC 3339 §5.6; a leap second counts as the one after it. What is finer than a microsecond is cut off."""
    cdef int year, month, day, hour, minute, second, zone_hour, zone_minute
    cdef int64_t micros = 0, unit = 100000, zone = 0
    cdef Py_ssize_t at = 19
    if n < 20:
        return False
    if not (
        digits(text, 4, &year) and text[4] == c"-" and digits(text + 5, 2, &month) and text[7] == c"-"
        and digits(text + 8, 2, &day) and (text[10] == c"T" or text[10] == c"t" or text[10] == c" ")
        and digits(text + 11, 2, &hour) and text[13] == c":" and digits(text + 14, 2, &minute) and text[16] == c":"
        and digits(text + 17, 2, &second)
    ):
        return False
    if not (1 <= month <= 12 and 1 <= day <= days_in(year, month) and hour < 24 and minute < 60 and second <= 60):
        return False
    if text[at] == c".":
        at += 1
        if at >= n or not c"0" <= text[at] <= c"9":
            return False
        while at < n and c"0" <= text[at] <= c"9":
            micros += unit * (text[at] - c"0")
            unit //= 10
            at += 1
    if at >= n:
        return False
    if text[at] == c"Z" or text[at] == c"z":
        if at + 1 != n:
            return False
    elif text[at] == c"+" or text[at] == c"-":
        if at + 6 != n or text[at + 3] != c":" or not digits(text + at + 1, 2, &zone_hour) or not digits(
                text + at + 4, 2, &zone_minute) or zone_hour > 23 or zone_minute > 59:
            return False
        zone = (zone_hour * 60 + zone_minute) * 60
        if text[at] == c"-":
            zone = -zone
    else:
        return False
    out[0] = ((days_before(year, month, day) * 24 + hour) * 60 + minute) * 60 + second - zone
    out[0] = out[0] * 1000000 + micros
    return True


cdef inline void put_digits(char* out, int n, int64_t value) noexcept nogil:
    while n:
        n -= 1
        out[n] = <char>(c"0" + value % 10)
        value //= 10


cdef Py_ssize_t write_time(char* out, int64_t time) noexcept nogil:
    """With 0, 3 or 6 digits behind the second, as many as it takes, and +00:00; `out` has TIME_CHARS. Times from the
    year 1 to 9999."""
    cdef int64_t seconds = time // 1000000, micros = time % 1000000
    cdef int64_t days, rest, era, of_era, of_year, year, shifted
    cdef int month, day
    cdef Py_ssize_t n = 19
    if micros < 0:
        micros += 1000000
        seconds -= 1
    days = seconds // 86400
    rest = seconds % 86400
    if rest < 0:
        rest += 86400
        days -= 1
    days += 719468
    era = (days if days >= 0 else days - 146096) // 146097
    days -= era * 146097
    of_era = (days - days // 1460 + days // 36524 - days // 146096) // 365
    of_year = days - (365 * of_era + of_era // 4 - of_era // 100)
    shifted = (5 * of_year + 2) // 153
    day = <int>(of_year - (153 * shifted + 2) // 5 + 1)
    month = <int>(shifted + 3 if shifted < 10 else shifted - 9)
    year = of_era + era * 400 + (month <= 2)
    memcpy(out, "0000-00-00T00:00:00", 19)
    put_digits(out, 4, year)
    put_digits(out + 5, 2, month)
    put_digits(out + 8, 2, day)
    put_digits(out + 11, 2, rest // 3600)
    put_digits(out + 14, 2, rest // 60 % 60)
    put_digits(out + 17, 2, rest % 60)
    if micros:
        out[n] = c"."
        if micros % 1000 == 0:
            put_digits(out + n + 1, 3, micros // 1000)
            n += 4
        else:
            put_digits(out + n + 1, 6, micros)
            n += 7
    memcpy(out + n, "+00:00", 6)
    return n + 6


def time_text(int64_t time):
    """Microseconds since the epoch as RFC 3339."""
    cdef char out[TIME_CHARS]
    if not -62135596800000000 <= time < 253402300800000000:
        raise ValueError(f"{time} is not in the years 1 to 9999")
    return out[:write_time(out, time)].decode()


def parse_time(str text not None):
    """RFC 3339 as microseconds since the epoch."""
    cdef bytes data = text.encode()
    cdef int64_t time
    if not read_time(<const uint8_t*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), &time):
        raise ValueError(f"{text!r} is not a time as RFC 3339 has it")
    return time


cdef inline int nibble(uint8_t c) noexcept nogil:
    if c"0" <= c <= c"9":
        return c - c"0"
    c |= 0x20
    if c"a" <= c <= c"f":
        return c - c"a" + 10
    return -1


cdef bint read_uuid(const uint8_t* text, Py_ssize_t n, uint8_t* out) noexcept nogil:
    """Hyphenated, 32 digits, in braces, or behind urn:uuid:, in any case."""
    cdef bint hyphens
    cdef int i, high, low
    cdef Py_ssize_t at = 0
    if n == 38 and text[0] == c"{" and text[37] == c"}":
        text += 1
        n = 36
    elif n == 45 and memcmp(text, "urn:uuid:", 9) == 0:
        text += 9
        n = 36
    if n != 36 and n != 32:
        return False
    hyphens = n == 36
    for i in range(16):
        if hyphens and (i == 4 or i == 6 or i == 8 or i == 10):
            if text[at] != c"-":
                return False
            at += 1
        high = nibble(text[at])
        low = nibble(text[at + 1])
        if high < 0 or low < 0:
            return False
        out[i] = <uint8_t>(high << 4 | low)
        at += 2
    return True


cdef void write_uuid(char* out, const uint8_t* bytes_) noexcept nogil:
    cdef const char* hex_ = "0123456789abcdef"
    cdef int i
    for i in range(16):
        if i == 4 or i == 6 or i == 8 or i == 10:
            out[0] = c"-"
            out += 1
        out[0] = hex_[bytes_[i] >> 4]
        out[1] = hex_[bytes_[i] & 15]
        out += 2


# --- envelopes as Python sees them ------------------------------------------------------------------------------------

class FrameError(ValueError):
    """The byte stream cannot be read on. `position` is the place in the stream, `kind` names the fault in two words."""

    def __init__(self, position, kind, reason):
        super().__init__(position, kind, reason)
        self.position = position
        self.kind = kind
        self.reason = reason

    def __str__(self):
        return f"{self.reason}, at byte {self.position}"


@cython.final
cdef class Message:
    """An envelope taken off the wire. `start` and `end` are its frame's byte range in the stream."""

    cdef readonly int64_t type
    cdef readonly str rid
    cdef readonly bytes packed          # `p` as MessagePack
    cdef readonly int64_t start
    cdef readonly int64_t end
    cdef object unpacked

    def __init__(self):
        raise TypeError("messages come out of a Decoder or of parse()")

    @property
    def payload(self):
        """`p` as a dict."""
        if self.unpacked is None:
            self.unpacked = unpack(self.packed)
        return self.unpacked

    @property
    def name(self):
        """The type's name, or its number in digits where it has none."""
        try:
            return MessageType(self.type).name
        except ValueError:
            return str(self.type)

    def __repr__(self):
        return f"<{self.name} rid={self.rid!r} {self.payload!r:.200} [{self.start}:{self.end}]>"


cdef Message message_of(const Envelope* envelope):
    cdef Message message = Message.__new__(Message)
    message.type = envelope.type
    message.rid = PyUnicode_DecodeUTF8(<const char*>envelope.rid.data, envelope.rid.size, NULL)
    message.packed = PyBytes_FromStringAndSize(<const char*>envelope.payload.data, envelope.payload.size)
    return message


def parse(data):
    """The message of one payload, a frame without its length; FrameError where it is no sound envelope."""
    cdef Py_buffer buffer
    cdef Envelope envelope
    cdef Py_ssize_t bad_at = 0
    cdef int fault
    cdef Message message
    PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE)
    try:
        fault = read_envelope(<const uint8_t*>buffer.buf, buffer.len, &envelope, &bad_at)
        if fault:
            kind, reason = REASONS[fault]
            raise FrameError(bad_at, kind, reason)
        message = message_of(&envelope)
        message.end = buffer.len
        return message
    finally:
        PyBuffer_Release(&buffer)


def check(data):
    """Whether one payload is a sound envelope; builds nothing."""
    cdef Py_buffer buffer
    cdef Envelope envelope
    cdef Py_ssize_t bad_at = 0
    PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE)
    try:
        return read_envelope(<const uint8_t*>buffer.buf, buffer.len, &envelope, &bad_at) == SOUND
    finally:
        PyBuffer_Release(&buffer)


@cython.final
cdef class Decoder(StreamDecoder):
    """Takes a byte stream in pieces of any size and gives back its messages."""

    cdef uint32_t limit

    def __init__(self, limit=USUAL_LIMIT):
        if not 1 <= limit <= MOST_LIMIT:
            raise ValueError(f"the limit must be from 1 to {MOST_LIMIT}, not {limit}")
        self.limit = limit
        self.least = LENGTH_SIZE
        self.judged = LENGTH_SIZE

    cdef Py_ssize_t next_item(self, const uint8_t* data, Py_ssize_t n, list items) except -2:
        cdef View frame
        cdef Envelope envelope
        cdef Message message
        cdef Py_ssize_t used = 0, bad_at = 0
        cdef int found = next_frame(data, n, self.limit, &frame, &used, &self.wanted), fault
        if found == 0:
            return 0
        if found < 0:
            reason = "length 0" if be32(data) == 0 else f"length {be32(data)} is above {self.limit}"
            self.error = FrameError(self.position, "bad length", reason)
            return -1
        fault = read_envelope(frame.data, frame.size, &envelope, &bad_at)
        if fault:
            kind, reason = REASONS[fault]
            self.error = FrameError(self.position + LENGTH_SIZE + bad_at, kind, reason)
            return -1
        message = message_of(&envelope)
        message.start = self.position
        self.position += used
        message.end = self.position
        items.append(message)
        self.wanted = 0
        return used
