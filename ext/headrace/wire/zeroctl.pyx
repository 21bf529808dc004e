"""The zeroctl codec of our own carrier: frames to bytes and bytes to frames, and the rules for routing keys and JSON
headers. It knows nothing of nodes, rights or bindings: what a well-formed frame means is for the session to say."""

# The grammar (all integers big-endian):
#
#   frame     = length:u32 type:u8 id:u64 payload
#               length counts what follows it: 9 + size of payload. Below 9 or above the limit the peer hangs up.
#               A length is judged as soon as its 4 bytes are there, a type as soon as its byte is.
#
#   type              payload                                                                           sent by
#   0x01  OPEN        version:u8 size:u16 secret size:u16 node-name size:u8 node-uuid                   client
#   0x02  WELCOME     version:u8 keepalive:u16 max_header:u32 max_body:u32 size:u16 node-name
#                     size:u8 node-uuid                                                                 gateway
#   0x03  MESSAGE     flags:u8 size:u8 key size:u32 header body                                         client
#   0x04  CONFIRM     count:u32                                                                         gateway
#   0x05  REFUSE      code:u16 size:u16 text                                                            gateway
#   0x06  BIND        binding:u32 flags:u8 credit:u32 size:u16 filter size:u8 name count:u8 condition*  client
#   0x07  UNBIND      binding:u32                                                                       client
#   0x08  DELIVERY    binding:u32 flags:u8 deliveries:u8 size:u8 key size:u32 header body               gateway
#   0x09  ACK         binding:u32 tag:u64 tag:u64*                                                      client
#   0x0A  REJECT      binding:u32 delay_ms:u32 tag:u64 tag:u64*                                         client
#   0x0B  CREDIT      binding:u32 more:u32                                                              client
#   0x0C  PING        ignored                                                                           both
#   0x0D  PONG        ignored                                                                           both
#
#   condition = kind:u8 size:u8 key size:u16 value        kind is 1 equal, 2 present, 3 prefix
#
# A payload must be exactly its fields; `body` and `ignored` are any bytes, also none. A header is a JSON object in
# UTF-8. One that breaks these rules is malformed: that has an answer (REFUSE), but the connection goes on.

import json
from enum import IntEnum

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from headrace.wire.bytes cimport View, ascii_only, be32, be64, le64, put_be16, put_be32, put_be64, utf8_valid
from headrace.wire.decoding cimport StreamDecoder

cdef extern from *:
    """
    static inline int hr_first_bit(unsigned long long word) { return __builtin_ctzll(word); }
    """
    int hr_first_bit(unsigned long long word) noexcept nogil

FRAMING_VERSION = VERSION
MIN_MAX_HEADER = LEAST_HEADER
MIN_MAX_BODY = LEAST_BODY
MAX_MAX_HEADER = MOST_HEADER
MAX_MAX_BODY = MOST_BODY
MAX_KEY = KEY_CHARS
NO_LIMIT = 0xFFFFFFFF
MESSAGE_OVERHEAD = MESSAGE_ROOM

FrameType = IntEnum(
    "FrameType",
    [
        ("OPEN", OPEN),
        ("WELCOME", WELCOME),
        ("MESSAGE", MESSAGE),
        ("CONFIRM", CONFIRM),
        ("REFUSE", REFUSE),
        ("BIND", BIND),
        ("UNBIND", UNBIND),
        ("DELIVERY", DELIVERY),
        ("ACK", ACK),
        ("REJECT", REJECT),
        ("CREDIT", CREDIT),
        ("PING", PING),
        ("PONG", PONG),
    ],
    module=__name__,
)
cdef tuple FRAME_TYPES = (None, *FrameType)     # indexed by the byte on the wire

Condition = IntEnum("Condition", [("EQUAL", EQUAL), ("PRESENT", PRESENT), ("PREFIX", PREFIX)], module=__name__)

# What is wrong, by code: a short kind for programs, and a sentence for people.
cdef dict FAULTS = {
    BAD_SIZE: ("bad size", "the payload is too short, or longer than its fields"),
    BAD_INNER_LENGTH: ("bad inner length", "a length points past the payload"),
    BAD_TEXT: ("bad text", "a text is not UTF-8"),
    BAD_FLAGS: ("bad flags", "flags that mean nothing are set"),
    BAD_CONDITION: ("bad condition", "a condition is of no known kind, or its key is no header key"),
    BAD_KEY: (
        "bad key", "a routing key has 1 to 255 printable ASCII characters, and no word of it is '*' or '#'"),
    NOT_JSON: ("bad header", "the header is not a JSON object in UTF-8"),
    TOO_DEEP: ("bad header", f"the header has values nested deeper than {DEEPEST}"),
    LONG_NUMBER: ("bad header", f"the header has a number of more than {LONGEST_NUMBER} characters"),
    BAD_HEADER_KEY: ("bad header", "a header key has 1 to 250 printable ASCII characters"),
    TWICE: ("bad header", "a key is in the header twice"),
    NO_NODE_NAME: ("bad header", "node-name is missing"),
    NO_NODE_UUID: ("bad header", "node-uuid is missing"),
    NO_TS: ("bad header", "ts is missing"),
    NO_SHA256: ("bad header", "sha256 is missing"),
    BAD_NODE_NAME: ("bad header", "node-name is not a text of 1 to 256 bytes"),
    BAD_NODE_UUID: ("bad header", "node-uuid is not a UUID of 32 or 36 characters, nor 64 hex digits"),
    BAD_TS: ("bad header", "ts is neither unix time (s, ms or us; a number or decimal text) nor RFC 3339"),
    BAD_SHA256: ("bad header", "sha256 is not 64 hex digits"),
    BAD_PATH: ("bad header", "on-start and on-finish are routing keys"),
}


cdef str fault(int bad):
    return FAULTS[bad][1]


class FrameError(ValueError):
    """The byte stream cannot be read on: a length or a type that the framing does not have.

    `position` is the place of the offending field in the stream, `kind` is "bad length" or "bad type".
    """

    def __init__(self, position, kind, reason):
        super().__init__(position, kind, reason)
        self.position = position
        self.kind = kind
        self.reason = reason

    def __str__(self):
        return f"{self.reason}, at byte {self.position}"


class HeaderError(ValueError):
    """A header, or a routing key, that breaks the protocol's rules."""


# --- JSON, one pass -----------------------------------------------------------------------------------------

cdef struct Scan:
    const uint8_t* p
    const uint8_t* end
    bint begun              # a member was read
    Py_ssize_t longest      # number that is let through; 0: any, since it was judged before

cdef struct Member:
    const uint8_t* quote    # the key's opening quote
    View key                # between its quotes
    bint key_escaped        # with escapes in it
    const uint8_t* value    # where the value begins
    View text               # a string: between its quotes; else the whole value
    bint is_text
    bint text_escaped


cdef inline void skip_space(Scan* scan) noexcept nogil:
    while scan.p < scan.end and (scan.p[0] == c" " or scan.p[0] == c"\n" or scan.p[0] == c"\r" or scan.p[0] == c"\t"):
        scan.p += 1


cdef inline int hex_digit(uint8_t c) noexcept nogil:
    if c"0" <= c <= c"9":
        return c - c"0"
    if c"a" <= c <= c"f":
        return c - c"a" + 10
    if c"A" <= c <= c"F":
        return c - c"A" + 10
    return -1


cdef inline int hex4(const uint8_t* p) noexcept nogil:
    """The number of four hex digits, or -1. The caller has checked that four bytes are there."""
    cdef int i, digit, value = 0
    for i in range(4):
        digit = hex_digit(p[i])
        if digit < 0:
            return -1
        value = value * 16 + digit
    return value


cdef int scan_text(Scan* scan, View* out, bint* escaped) noexcept nogil:
    """A string, from its opening quote on; `out` is what stands between the quotes."""
    cdef const uint8_t* p = scan.p + 1
    cdef const uint8_t* end = scan.end
    cdef uint64_t word, x, y, found
    cdef int unit
    escaped[0] = False
    out.data = p
    while True:
        # Eight bytes at a time until one of them is a quote, a backslash or a control character.
        while end - p >= 8:
            word = le64(p)
            x = word ^ <uint64_t>0x2222222222222222
            y = word ^ <uint64_t>0x5C5C5C5C5C5C5C5C
            found = (
                ((x - <uint64_t>0x0101010101010101) & ~x) | ((y - <uint64_t>0x0101010101010101) & ~y)
                | ((word - <uint64_t>0x2020202020202020) & ~word)
            ) & <uint64_t>0x8080808080808080
            if found:
                p += hr_first_bit(found) >> 3
                break
            p += 8
        if p >= end:
            return NOT_JSON
        if p[0] == c'"':
            out.size = p - out.data
            scan.p = p + 1
            return 0
        if p[0] < 0x20:
            return NOT_JSON
        if p[0] != c"\\":
            p += 1
            continue
        escaped[0] = True
        if end - p < 2:
            return NOT_JSON
        if p[1] != c"u":
            if p[1] not in (c'"', c"\\", c"/", c"b", c"f", c"n", c"r", c"t"):
                return NOT_JSON
            p += 2
            continue
        if end - p < 6:
            return NOT_JSON
        unit = hex4(p + 2)
        if unit < 0 or 0xDC00 <= unit <= 0xDFFF:
            return NOT_JSON
        if 0xD800 <= unit <= 0xDBFF:        # the first half of a pair
            if end - p < 12 or p[6] != c"\\" or p[7] != c"u":
                return NOT_JSON
            unit = hex4(p + 8)
            if unit < 0xDC00 or unit > 0xDFFF:
                return NOT_JSON
            p += 6
        p += 6


cdef inline int scan_digits(Scan* scan) noexcept nogil:
    cdef const uint8_t* p = scan.p
    while scan.p < scan.end and c"0" <= scan.p[0] <= c"9":
        scan.p += 1
    return 0 if scan.p > p else NOT_JSON


cdef int scan_number(Scan* scan) noexcept nogil:
    cdef const uint8_t* begin = scan.p
    if scan.p[0] == c"-":
        scan.p += 1
    if scan.p < scan.end and scan.p[0] == c"0":
        scan.p += 1
    elif scan_digits(scan) != 0:
        return NOT_JSON
    if scan.p < scan.end and scan.p[0] == c".":
        scan.p += 1
        if scan_digits(scan) != 0:
            return NOT_JSON
    if scan.p < scan.end and (scan.p[0] == c"e" or scan.p[0] == c"E"):
        scan.p += 1
        if scan.p < scan.end and (scan.p[0] == c"+" or scan.p[0] == c"-"):
            scan.p += 1
        if scan_digits(scan) != 0:
            return NOT_JSON
    return LONG_NUMBER if scan.longest and scan.p - begin > scan.longest else 0


cdef inline int scan_word(Scan* scan, const char* word, Py_ssize_t n) noexcept nogil:
    if scan.end - scan.p < n or memcmp(scan.p, word, n) != 0:
        return NOT_JSON
    scan.p += n
    return 0


cdef int scan_colon(Scan* scan, View* key, bint* escaped) noexcept nogil:
    """The key of a member, up to where its value begins."""
    skip_space(scan)
    if scan.p >= scan.end or scan.p[0] != c'"' or scan_text(scan, key, escaped) != 0:
        return NOT_JSON
    skip_space(scan)
    if scan.p >= scan.end or scan.p[0] != c":":
        return NOT_JSON
    scan.p += 1
    skip_space(scan)
    return 0 if scan.p < scan.end else NOT_JSON


cdef int scan_nested(Scan* scan) noexcept nogil:
    """An object or an array, from its bracket on."""
    cdef uint64_t objects = 0               # a bit for each level: whether it is an object
    cdef int bad, depth = 0
    cdef View inner
    cdef bint escaped
    cdef uint8_t c
    while True:
        skip_space(scan)
        if scan.p >= scan.end:
            return NOT_JSON
        c = scan.p[0]
        if c == c"{" or c == c"[":
            depth += 1
            if depth >= DEEPEST:            # the header itself is one
                return TOO_DEEP
            objects = (objects << 1) | (c == c"{")
            scan.p += 1
            skip_space(scan)
            if scan.p < scan.end and scan.p[0] == (c"}" if c == c"{" else c"]"):
                scan.p += 1
                depth -= 1
                objects >>= 1
            else:
                if c == c"{" and scan_colon(scan, &inner, &escaped) != 0:
                    return NOT_JSON
                continue
        else:
            bad = scan_scalar(scan, &inner, &escaped)
            if bad < 0:
                return bad
        while True:                         # behind a value
            if depth == 0:
                return 0
            skip_space(scan)
            if scan.p >= scan.end:
                return NOT_JSON
            c = scan.p[0]
            scan.p += 1
            if c == c",":
                if objects & 1 and scan_colon(scan, &inner, &escaped) != 0:
                    return NOT_JSON
                break
            if c != (c"}" if objects & 1 else c"]"):
                return NOT_JSON
            depth -= 1
            objects >>= 1


cdef int scan_scalar(Scan* scan, View* text, bint* escaped) noexcept nogil:
    """1: a string; 0: a number, true, false or null, of which `text` is the whole."""
    cdef const uint8_t* start = scan.p
    cdef uint8_t c = scan.p[0]
    cdef int bad
    if c == c'"':
        return NOT_JSON if scan_text(scan, text, escaped) != 0 else 1
    if c == c"t":
        bad = scan_word(scan, "true", 4)
    elif c == c"f":
        bad = scan_word(scan, "false", 5)
    elif c == c"n":
        bad = scan_word(scan, "null", 4)
    elif c == c"-" or c"0" <= c <= c"9":
        bad = scan_number(scan)
    else:
        bad = NOT_JSON
    text[0] = View(start, scan.p - start)
    escaped[0] = False
    return bad


cdef int next_member(Scan* scan, Member* out) noexcept nogil:
    """1: `out` is the next member of the header's object; 0: it has ended, and nothing but space follows."""
    cdef const uint8_t* start
    cdef int kind
    skip_space(scan)
    if scan.p >= scan.end:
        return NOT_JSON
    if not scan.begun:
        if scan.p[0] != c"{":
            return NOT_JSON
        scan.p += 1
        skip_space(scan)
        if scan.p >= scan.end:
            return NOT_JSON
    if scan.p[0] == c"}":
        scan.p += 1
        skip_space(scan)
        return 0 if scan.p == scan.end else NOT_JSON
    if scan.begun:
        if scan.p[0] != c",":
            return NOT_JSON
        scan.p += 1
        skip_space(scan)
    scan.begun = True
    out.quote = scan.p
    if scan_colon(scan, &out.key, &out.key_escaped) != 0:
        return NOT_JSON
    start = out.value = scan.p
    if start[0] == c"{" or start[0] == c"[":
        kind = scan_nested(scan)
        if kind != 0:
            return kind
        out.is_text = out.text_escaped = False
        out.text = View(start, scan.p - start)
        return 1
    kind = scan_scalar(scan, &out.text, &out.text_escaped)
    if kind < 0:
        return kind
    out.is_text = kind == 1
    return 1


# Decodes what stands between two quotes, a piece at a time: the bytes of the next character, at most 4; how many.
cdef inline int next_bytes(View* text, uint8_t* out) noexcept nogil:
    cdef uint8_t c = text.data[0]
    cdef uint32_t point, low
    if c != c"\\":
        out[0] = c
        text.data += 1
        text.size -= 1
        return 1
    c = text.data[1]
    if c != c"u":
        text.data += 2
        text.size -= 2
        out[0] = (
            c"\b" if c == c"b" else c"\f" if c == c"f" else c"\n" if c == c"n" else c"\r" if c == c"r"
            else c"\t" if c == c"t" else c
        )
        return 1
    point = <uint32_t>hex4(text.data + 2)
    text.data += 6
    text.size -= 6
    if 0xD800 <= point <= 0xDBFF:
        low = <uint32_t>hex4(text.data + 2)
        point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00)
        text.data += 6
        text.size -= 6
    if point < 0x80:
        out[0] = <uint8_t>point
        return 1
    if point < 0x800:
        out[0] = <uint8_t>(0xC0 | (point >> 6))
        out[1] = <uint8_t>(0x80 | (point & 0x3F))
        return 2
    if point < 0x10000:
        out[0] = <uint8_t>(0xE0 | (point >> 12))
        out[1] = <uint8_t>(0x80 | ((point >> 6) & 0x3F))
        out[2] = <uint8_t>(0x80 | (point & 0x3F))
        return 3
    out[0] = <uint8_t>(0xF0 | (point >> 18))
    out[1] = <uint8_t>(0x80 | ((point >> 12) & 0x3F))
    out[2] = <uint8_t>(0x80 | ((point >> 6) & 0x3F))
    out[3] = <uint8_t>(0x80 | (point & 0x3F))
    return 4


cdef Py_ssize_t decode_text(View text, uint8_t* out, Py_ssize_t room) noexcept nogil:
    """The text itself, into `room` bytes; its size, or -1 where it is longer."""
    cdef uint8_t piece[4]
    cdef Py_ssize_t size = 0
    cdef int n
    while text.size:
        n = next_bytes(&text, piece)
        if size + n > room:
            return -1
        memcpy(out + size, piece, n)
        size += n
    return size


cdef bint text_begins(View text, View wanted, bint whole) noexcept nogil:
    """Whether the text begins with these bytes, or, with `whole`, is them."""
    cdef uint8_t piece[4]
    cdef int n
    while wanted.size:
        if text.size == 0:
            return False
        n = next_bytes(&text, piece)
        if n > wanted.size or memcmp(piece, wanted.data, n) != 0:
            return False
        wanted.data += n
        wanted.size -= n
    return text.size == 0 or not whole


# --- keys and headers ---------------------------------------------------------------------------------------

cdef bint printable(const uint8_t* p, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        if p[i] < 0x20 or p[i] > 0x7E:
            return False
    return True


cdef bint key_valid(const uint8_t* key, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    if n < 1 or n > KEY_CHARS or not printable(key, n):
        return False
    for i in range(n):
        if key[i] == c"*" or key[i] == c"#":
            if (i == 0 or key[i - 1] == c".") and (i == n - 1 or key[i + 1] == c"."):
                return False
    return True


cdef bint hex_only(const uint8_t* p, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        if hex_digit(p[i]) < 0:
            return False
    return True


cdef bint uuid_valid(const uint8_t* p, Py_ssize_t n) noexcept nogil:
    if n == 32 or n == 64:
        return hex_only(p, n)
    return (
        n == 36 and p[8] == p[13] == p[18] == p[23] == c"-" and hex_only(p, 8) and hex_only(p + 9, 4)
        and hex_only(p + 14, 4) and hex_only(p + 19, 4) and hex_only(p + 24, 12)
    )


cdef bint sha256_of_hex(const uint8_t* p, Py_ssize_t n, uint8_t* out) noexcept nogil:
    cdef int i, high, low
    if n != 64:
        return False
    for i in range(32):
        high = hex_digit(p[2 * i])
        low = hex_digit(p[2 * i + 1])
        if high < 0 or low < 0:
            return False
        out[i] = <uint8_t>(high * 16 + low)
    return True


cdef bint decimal_time(const uint8_t* p, Py_ssize_t n) noexcept nogil:
    """Digits, with a fraction or without; at most 17 before the point: microseconds until the year 5138."""
    cdef Py_ssize_t i = 0, begin
    while i < n and p[i] == c"0":
        i += 1
    begin = i
    while i < n and c"0" <= p[i] <= c"9":
        i += 1
    if i == 0 or i - begin > 17:
        return False
    if i == n:
        return True
    if p[i] != c"." or i == n - 1:
        return False
    for i in range(i + 1, n):
        if not c"0" <= p[i] <= c"9":
            return False
    return True


cdef inline int two_digits(const uint8_t* p) noexcept nogil:
    if not (c"0" <= p[0] <= c"9" and c"0" <= p[1] <= c"9"):
        return -1
    return (p[0] - c"0") * 10 + p[1] - c"0"


cdef bint rfc3339_time(const uint8_t* p, Py_ssize_t n) noexcept nogil:
    cdef int century, year, month, day, hour, minute, second, days
    cdef Py_ssize_t i = 19
    if n < 20 or p[4] != c"-" or p[7] != c"-" or p[13] != c":" or p[16] != c":":
        return False
    if p[10] != c"T" and p[10] != c"t" and p[10] != c" ":
        return False
    century = two_digits(p)
    year = two_digits(p + 2)
    month = two_digits(p + 5)
    day = two_digits(p + 8)
    hour = two_digits(p + 11)
    minute = two_digits(p + 14)
    second = two_digits(p + 17)
    if century < 0 or year < 0 or month < 1 or month > 12 or day < 1 or hour < 0 or hour > 23:
        return False
    if minute < 0 or minute > 59 or second < 0 or second > 60:
        return False
    year += century * 100
    if month == 2:
        days = 29 if (year % 4 == 0 and year % 100 != 0) or year % 400 == 0 else 28
    else:
        days = 30 if month in (4, 6, 9, 11) else 31
    if day > days:
        return False
    if p[i] == c".":
        i += 1
        if i >= n or not c"0" <= p[i] <= c"9":
            return False
        while i < n and c"0" <= p[i] <= c"9":
            i += 1
    if i == n - 1 and (p[i] == c"Z" or p[i] == c"z"):
        return True
    if n - i != 6 or (p[i] != c"+" and p[i] != c"-") or p[i + 3] != c":":
        return False
    hour = two_digits(p + i + 1)
    minute = two_digits(p + i + 4)
    return 0 <= hour <= 23 and 0 <= minute <= 59


cdef inline bint is_key(const uint8_t* key, Py_ssize_t n, const char* wanted, Py_ssize_t size) noexcept nogil:
    return n == size and memcmp(key, wanted, size) == 0


cdef inline bint reserved(const uint8_t* key, Py_ssize_t n) noexcept nogil:
    return (n >= 11 and memcmp(key, <const char*>"_transport-", 11) == 0) or (
        n >= 8 and memcmp(key, <const char*>"_passed-", 8) == 0)


cdef inline int set_once(RawHeader* out, uint32_t bit, View* place, const Member* member) noexcept nogil:
    if out.has & bit:
        return TWICE
    out.has |= bit
    place[0] = member.text
    return 0


cdef int judge_member(const Member* member, RawHeader* out) noexcept nogil:
    """What is wrong with one member of a header, or 0."""
    cdef uint8_t key_room[HEADER_KEY_CHARS]
    cdef uint8_t room[NODE_NAME_BYTES]
    cdef const uint8_t* key = member.key.data
    cdef Py_ssize_t n = member.key.size
    cdef const uint8_t* text = member.text.data
    cdef Py_ssize_t size = member.text.size
    cdef int bad = 0
    if member.key_escaped:
        n = decode_text(member.key, key_room, HEADER_KEY_CHARS)
        key = key_room
    if n < 1 or n > HEADER_KEY_CHARS or not printable(key, n):
        return BAD_HEADER_KEY
    if key[0] == c"_":
        if is_key(key, n, "_sec-sig", 8):
            return set_once(out, HAS_SIG, &out.sig, member)
        if reserved(key, n):
            out.has |= HAS_RESERVED
        return 0
    if n != 2 and n != 6 and n != 8 and n != 9:
        return 0
    if member.text_escaped:
        size = decode_text(member.text, room, NODE_NAME_BYTES)
        text = room
    if is_key(key, n, "node-name", 9):
        bad = set_once(out, HAS_NODE_NAME, &out.node_name, member)
        if bad == 0 and (not member.is_text or size < 1 or size > NODE_NAME_BYTES):
            bad = BAD_NODE_NAME
    elif is_key(key, n, "node-uuid", 9):
        bad = set_once(out, HAS_NODE_UUID, &out.node_uuid, member)
        if bad == 0 and (not member.is_text or not uuid_valid(text, size)):
            bad = BAD_NODE_UUID
    elif is_key(key, n, "ts", 2):
        bad = set_once(out, HAS_TS, &out.ts, member)
        if bad == 0 and not decimal_time(text, size) and not (member.is_text and rfc3339_time(text, size)):
            bad = BAD_TS
    elif is_key(key, n, "sha256", 6):
        if out.has & (HAS_SHA256 | HAS_EMPTY_SHA256):
            bad = TWICE
        elif member.is_text and size == 0:
            out.has |= HAS_EMPTY_SHA256
        elif not member.is_text or not sha256_of_hex(text, size, out.sha256):
            bad = BAD_SHA256
        else:
            out.has |= HAS_SHA256
    elif is_key(key, n, "on-start", 8):
        bad = set_once(out, HAS_ON_START, &out.on_start, member)
        if bad == 0 and (not member.is_text or member.text_escaped or not key_valid(text, size)):
            bad = BAD_PATH
    elif is_key(key, n, "on-finish", 9):
        bad = set_once(out, HAS_ON_FINISH, &out.on_finish, member)
        if bad == 0 and (not member.is_text or member.text_escaped or not key_valid(text, size)):
            bad = BAD_PATH
    return bad


cdef int check_header(const uint8_t* header, Py_ssize_t n, bint lenient, RawHeader* out) noexcept nogil:
    cdef Scan scan = Scan(header, header + n, False, LONGEST_NUMBER)
    cdef Member member
    cdef int more, bad = 0
    memset(out, 0, sizeof(RawHeader))
    if not utf8_valid(header, n):
        return NOT_JSON
    while True:
        more = next_member(&scan, &member)
        if more < 0:
            return more                     # what is no JSON comes before all else
        if more == 0:
            break
        out.keys += 1
        if bad == 0:
            bad = judge_member(&member, out)
    if bad:
        return bad
    if not out.has & HAS_NODE_NAME:
        return NO_NODE_NAME
    if not out.has & HAS_NODE_UUID:
        return NO_NODE_UUID
    if not out.has & HAS_TS:
        return NO_TS
    if not out.has & HAS_SHA256 and not lenient:
        return NO_SHA256
    return 0


cdef Py_ssize_t rewrite_header(const uint8_t* header, Py_ssize_t n, uint8_t* out, bint escape) noexcept nogil:
    cdef uint8_t room[HEADER_KEY_CHARS + 8]
    cdef Scan scan = Scan(header, header + n, False, 0)
    cdef Member member
    cdef const uint8_t* copied = header
    cdef const uint8_t* key
    cdef Py_ssize_t size, at = 0
    while next_member(&scan, &member) == 1:
        key = member.key.data
        size = member.key.size
        if escape:
            if member.key_escaped:
                size = decode_text(member.key, room, sizeof(room))
                key = room
            if not reserved(key, size):
                continue
            memcpy(out + at, copied, member.key.data - copied)
            at += member.key.data - copied
            memcpy(out + at, <const char*>"_passed-", 8)
            at += 8
            copied = member.key.data
        elif size >= 8 and memcmp(key, <const char*>"_passed-", 8) == 0:
            memcpy(out + at, copied, key - copied)
            at += key - copied
            copied = key + 8
    memcpy(out + at, copied, header + n - copied)
    return at + (header + n - copied)


cdef Py_ssize_t escape_header(const uint8_t* header, Py_ssize_t n, uint8_t* out) noexcept nogil:
    return rewrite_header(header, n, out, True)


cdef Py_ssize_t unescape_header(const uint8_t* header, Py_ssize_t n, uint8_t* out) noexcept nogil:
    return rewrite_header(header, n, out, False)


cdef extern from "string.h" nogil:
    const void* memchr(const void* data, int c, size_t n)


cdef bint may_be_escaped(const uint8_t* header, Py_ssize_t n) noexcept nogil:
    cdef const uint8_t* p = header
    cdef const uint8_t* end = header + n
    while end - p >= 8:
        p = <const uint8_t*>memchr(p, c"_", end - p - 7)
        if p == NULL:
            return False
        if memcmp(p, <const char*>"_passed-", 8) == 0:
            return True
        p += 1
    return False


cdef bint condition_holds(const RawCondition* condition, const uint8_t* header, Py_ssize_t n) noexcept nogil:
    cdef Scan scan = Scan(header, header + n, False, 0)
    cdef Member member
    while next_member(&scan, &member) == 1:
        if not text_begins(member.key, condition.key, True):
            continue
        if condition.kind == PRESENT:
            return True
        if member.is_text:
            return text_begins(member.text, condition.value, condition.kind == EQUAL)
        return (                            # an object or an array is equal to nothing
            condition.kind == EQUAL and member.value[0] not in (c"{", c"[") and member.text.size == condition.value.size
            and memcmp(member.text.data, condition.value.data, member.text.size) == 0
        )
    return False


# --- payloads -----------------------------------------------------------------------------------------------

cdef int parse_open(const uint8_t* payload, uint32_t size, RawOpen* out) noexcept nogil:
    cdef View rest = view_of(payload, size)
    cdef uint16_t length = 0
    cdef uint8_t short = 0
    if not view_u8(&rest, &out.version) or not view_be16(&rest, &length):
        return BAD_SIZE
    if not view_slice(&rest, length, &out.key):
        return BAD_INNER_LENGTH
    if not view_be16(&rest, &length):
        return BAD_SIZE
    if not view_slice(&rest, length, &out.node):
        return BAD_INNER_LENGTH
    if not view_u8(&rest, &short):
        return BAD_SIZE
    if not view_slice(&rest, short, &out.uuid):
        return BAD_INNER_LENGTH
    if rest.size != 0:
        return BAD_SIZE
    if (
        not utf8_valid(out.key.data, out.key.size) or not utf8_valid(out.node.data, out.node.size)
        or not ascii_only(out.uuid.data, out.uuid.size)
    ):
        return BAD_TEXT
    return 0


cdef int parse_welcome(const uint8_t* payload, uint32_t size, RawWelcome* out) noexcept nogil:
    cdef View rest = view_of(payload, size)
    cdef uint16_t length = 0
    cdef uint8_t short = 0
    if (
        not view_u8(&rest, &out.version) or not view_be16(&rest, &out.keepalive)
        or not view_be32(&rest, &out.max_header) or not view_be32(&rest, &out.max_body)
        or not view_be16(&rest, &length)
    ):
        return BAD_SIZE
    if not view_slice(&rest, length, &out.node):
        return BAD_INNER_LENGTH
    if not view_u8(&rest, &short):
        return BAD_SIZE
    if not view_slice(&rest, short, &out.uuid):
        return BAD_INNER_LENGTH
    if rest.size != 0:
        return BAD_SIZE
    if not utf8_valid(out.node.data, out.node.size) or not ascii_only(out.uuid.data, out.uuid.size):
        return BAD_TEXT
    return 0


cdef int parse_bind(const uint8_t* payload, uint32_t size, RawBind* out) noexcept nogil:
    cdef View rest = view_of(payload, size)
    cdef View ahead
    cdef RawCondition condition
    cdef uint16_t length = 0
    cdef uint8_t short = 0, i
    if (
        not view_be32(&rest, &out.binding) or not view_u8(&rest, &out.flags) or not view_be32(&rest, &out.credit)
        or not view_be16(&rest, &length)
    ):
        return BAD_SIZE
    if not view_slice(&rest, length, &out.filter):
        return BAD_INNER_LENGTH
    if not view_u8(&rest, &short):
        return BAD_SIZE
    if not view_slice(&rest, short, &out.name):
        return BAD_INNER_LENGTH
    if not view_u8(&rest, &out.condition_count):
        return BAD_SIZE
    out.conditions = rest
    for i in range(out.condition_count):
        if not view_u8(&rest, &condition.kind) or not view_u8(&rest, &short):
            return BAD_SIZE
        if not view_slice(&rest, short, &condition.key):
            return BAD_INNER_LENGTH
        if not view_be16(&rest, &length):
            return BAD_SIZE
        if not view_slice(&rest, length, &condition.value):
            return BAD_INNER_LENGTH
        if (
            condition.kind < EQUAL or condition.kind > PREFIX or short < 1 or short > HEADER_KEY_CHARS
            or not printable(condition.key.data, short)
        ):
            return BAD_CONDITION
        if not utf8_valid(condition.value.data, condition.value.size):
            return BAD_TEXT
    if rest.size != 0:
        return BAD_SIZE
    if not utf8_valid(out.filter.data, out.filter.size) or not utf8_valid(out.name.data, out.name.size):
        return BAD_TEXT
    if out.flags & ~BIND_FLAGS:
        return BAD_FLAGS
    return 0


cdef void next_condition(View* conditions, RawCondition* out) noexcept nogil:
    cdef uint8_t short = 0
    cdef uint16_t length = 0
    view_u8(conditions, &out.kind)
    view_u8(conditions, &short)
    view_slice(conditions, short, &out.key)
    view_be16(conditions, &length)
    view_slice(conditions, length, &out.value)


cdef int parse_refuse(const uint8_t* payload, uint32_t size, RawRefuse* out) noexcept nogil:
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


# --- frames as Python sees them -----------------------------------------------------------------------------

cdef class Frame:
    """A frame taken off the wire. `start` and `end` are its byte range in the stream."""

    cdef uint8_t _type
    cdef readonly uint64_t id
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
        return f"<{type(self).__name__} id={self.id}{inside} [{self.start}:{self.end}]>"


@cython.final
cdef class Open(Frame):
    cdef readonly uint8_t version
    cdef readonly str secret
    cdef readonly str node
    cdef readonly str uuid

    def fields(self):
        return {"version": self.version, "secret": self.secret, "node": self.node, "uuid": self.uuid}


@cython.final
cdef class Welcome(Frame):
    cdef readonly uint8_t version
    cdef readonly uint16_t keepalive
    cdef readonly uint32_t max_header
    cdef readonly uint32_t max_body
    cdef readonly str node
    cdef readonly str uuid

    def fields(self):
        return {
            "version": self.version, "keepalive": self.keepalive, "max_header": self.max_header,
            "max_body": self.max_body, "node": self.node, "uuid": self.uuid,
        }


@cython.final
cdef class Message(Frame):
    """`header` is the JSON as it came; `headers` are its keys and values."""

    cdef readonly uint8_t flags
    cdef readonly str key
    cdef readonly bytes header
    cdef readonly bytes body

    @property
    def headers(self):
        return json.loads(self.header)

    def fields(self):
        return {"flags": self.flags, "key": self.key, "header": self.header, "body": self.body}


@cython.final
cdef class Delivery(Frame):
    """`id` is the tag to acknowledge it by, where `flags` has bit 0."""

    cdef readonly uint32_t binding
    cdef readonly uint8_t flags
    cdef readonly uint8_t deliveries
    cdef readonly str key
    cdef readonly bytes header
    cdef readonly bytes body

    @property
    def headers(self):
        return json.loads(self.header)

    def fields(self):
        return {
            "binding": self.binding, "flags": self.flags, "deliveries": self.deliveries, "key": self.key,
            "header": self.header, "body": self.body,
        }


@cython.final
cdef class Confirm(Frame):
    """The messages `id` - `count` + 1 to `id` are safe; or the request `id` was done."""

    cdef readonly uint32_t count

    def fields(self):
        return {"count": self.count}


@cython.final
cdef class Refuse(Frame):
    cdef readonly uint16_t code
    cdef readonly str text

    def fields(self):
        return {"code": self.code, "text": self.text}


@cython.final
cdef class Bind(Frame):
    """`conditions` are tuples of kind, header key and value."""

    cdef readonly uint32_t binding
    cdef readonly uint8_t flags
    cdef readonly uint32_t credit
    cdef readonly str filter
    cdef readonly str name
    cdef readonly tuple conditions

    def fields(self):
        return {
            "binding": self.binding, "flags": self.flags, "credit": self.credit, "filter": self.filter,
            "name": self.name, "conditions": self.conditions,
        }


@cython.final
cdef class Unbind(Frame):
    cdef readonly uint32_t binding

    def fields(self):
        return {"binding": self.binding}


@cython.final
cdef class Ack(Frame):
    cdef readonly uint32_t binding
    cdef readonly tuple tags

    def fields(self):
        return {"binding": self.binding, "tags": self.tags}


@cython.final
cdef class Reject(Frame):
    cdef readonly uint32_t binding
    cdef readonly uint32_t delay
    cdef readonly tuple tags

    def fields(self):
        return {"binding": self.binding, "delay": self.delay, "tags": self.tags}


@cython.final
cdef class Credit(Frame):
    cdef readonly uint32_t binding
    cdef readonly uint32_t more

    def fields(self):
        return {"binding": self.binding, "more": self.more}


@cython.final
cdef class Ping(Frame):
    cdef readonly bytes payload

    def fields(self):
        return {"payload": self.payload}


@cython.final
cdef class Pong(Frame):
    cdef readonly bytes payload

    def fields(self):
        return {"payload": self.payload}


@cython.final
cdef class Malformed(Frame):
    """A frame whose type is known and whose payload is not what the type asks for; `reason` says it to a person."""

    cdef readonly bytes payload
    cdef readonly str kind
    cdef readonly str reason

    def fields(self):
        return {"payload": self.payload, "kind": self.kind, "reason": self.reason}


# --- reading a stream ---------------------------------------------------------------------------------------

cdef inline str text_of(const uint8_t* data, Py_ssize_t size):
    return PyUnicode_DecodeUTF8(<const char*>data, size, NULL)


cdef inline str text_in(View view):
    return PyUnicode_DecodeUTF8(<const char*>view.data, view.size, NULL)


cdef int check_limits(max_header, max_body) except -1:
    if not 0 < max_header <= MOST_HEADER or not 0 < max_body <= MOST_BODY:
        raise ValueError(f"max_header is from 1 to {MOST_HEADER} and max_body from 1 to {MOST_BODY}")
    return 0


@cython.final
cdef class Decoder(StreamDecoder):
    """Takes a byte stream in pieces of any size and gives back its frames."""

    cdef uint32_t max_length
    cdef bytes key_bytes                # the last key and its text: messages tend to repeat it
    cdef str key

    def __init__(self, max_header=MOST_HEADER, max_body=MOST_BODY):
        check_limits(max_header, max_body)
        self.max_length = MESSAGE_ROOM + max_header + max_body
        self.least = 4                  # the length field
        self.judged = 5                 # and the type
        self.key_bytes = b""
        self.key = ""

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
            self.error = FrameError(self.position, "bad length", f"length {length} is above {self.max_length}")
        return 0

    cdef Frame decoded(self, RawFrame* raw):
        cdef Frame frame
        cdef Malformed odd
        cdef int bad = 0
        if raw.type == MESSAGE or raw.type == DELIVERY:
            frame = self.message(raw, &bad)
        else:
            frame = rarer(raw, &bad)
        if bad:
            odd = Malformed.__new__(Malformed)
            odd.payload = raw.payload[:raw.size]
            odd.kind, odd.reason = FAULTS[bad]
            frame = odd
        frame._type = raw.type
        frame.id = raw.id
        frame.start = self.position
        self.position += HEADER_SIZE + <int64_t>raw.size
        frame.end = self.position
        return frame

    cdef Frame message(self, RawFrame* raw, int* bad):
        cdef RawMessage parts
        cdef RawHeader header
        cdef Message message
        cdef Delivery delivery
        bad[0] = (
            split_message(raw.payload, raw.size, &parts) if raw.type == MESSAGE
            else split_delivery(raw.payload, raw.size, &parts)
        )
        if bad[0]:
            return None
        if (
            parts.key_size != PyBytes_GET_SIZE(self.key_bytes)
            or memcmp(parts.key, PyBytes_AS_STRING(self.key_bytes), parts.key_size) != 0 or parts.key_size == 0
        ):
            if not key_valid(parts.key, parts.key_size):
                bad[0] = BAD_KEY
                return None
            self.key = text_of(parts.key, parts.key_size)
            self.key_bytes = parts.key[:parts.key_size]
        bad[0] = check_header(parts.header, parts.header_size, False, &header)
        if bad[0]:
            return None
        if raw.type == MESSAGE:
            message = Message.__new__(Message)
            message.flags = parts.flags
            message.key = self.key
            message.header = PyBytes_FromStringAndSize(<const char*>parts.header, parts.header_size)
            message.body = PyBytes_FromStringAndSize(<const char*>parts.body, parts.body_size)
            return message
        delivery = Delivery.__new__(Delivery)
        delivery.binding = parts.binding
        delivery.flags = parts.flags
        delivery.deliveries = parts.deliveries
        delivery.key = self.key
        delivery.header = PyBytes_FromStringAndSize(<const char*>parts.header, parts.header_size)
        delivery.body = PyBytes_FromStringAndSize(<const char*>parts.body, parts.body_size)
        return delivery


cdef tuple tags_of(const uint8_t* tags, uint32_t count):
    cdef uint32_t i
    return tuple([be64(tags + 8 * i) for i in range(count)])


# Every frame but MESSAGE and DELIVERY. On a malformed payload `bad` says why, and the frame is not to be used.
cdef Frame rarer(RawFrame* raw, int* bad):
    cdef Open open
    cdef Welcome welcome
    cdef Confirm confirm
    cdef Refuse refuse
    cdef Bind bind
    cdef Unbind unbind
    cdef Ack ack
    cdef Reject reject
    cdef Credit credit
    cdef Ping ping
    cdef Pong pong
    cdef RawOpen opening
    cdef RawWelcome welcoming
    cdef RawRefuse refusal
    cdef RawBind wish
    cdef RawCondition condition
    cdef const uint8_t* tags = NULL
    cdef uint32_t count = 0
    if raw.type == CONFIRM:
        confirm = Confirm.__new__(Confirm)
        bad[0] = parse_u32(raw.payload, raw.size, &confirm.count)
        return confirm
    if raw.type == ACK:
        ack = Ack.__new__(Ack)
        bad[0] = parse_ack(raw.payload, raw.size, &ack.binding, &tags, &count)
        ack.tags = tags_of(tags, count)
        return ack
    if raw.type == PING:
        ping = Ping.__new__(Ping)
        ping.payload = raw.payload[:raw.size]
        return ping
    if raw.type == PONG:
        pong = Pong.__new__(Pong)
        pong.payload = raw.payload[:raw.size]
        return pong
    if raw.type == REFUSE:
        refuse = Refuse.__new__(Refuse)
        bad[0] = parse_refuse(raw.payload, raw.size, &refusal)
        if not bad[0]:
            refuse.code = refusal.code
            refuse.text = text_of(refusal.text, refusal.text_size)
        return refuse
    if raw.type == BIND:
        bind = Bind.__new__(Bind)
        bad[0] = parse_bind(raw.payload, raw.size, &wish)
        if not bad[0]:
            bind.binding = wish.binding
            bind.flags = wish.flags
            bind.credit = wish.credit
            bind.filter = text_in(wish.filter)
            bind.name = text_in(wish.name)
            conditions = []
            for _ in range(wish.condition_count):
                next_condition(&wish.conditions, &condition)
                conditions.append((Condition(condition.kind), text_in(condition.key), text_in(condition.value)))
            bind.conditions = tuple(conditions)
        return bind
    if raw.type == UNBIND:
        unbind = Unbind.__new__(Unbind)
        bad[0] = parse_u32(raw.payload, raw.size, &unbind.binding)
        return unbind
    if raw.type == CREDIT:
        credit = Credit.__new__(Credit)
        bad[0] = parse_credit(raw.payload, raw.size, &credit.binding, &credit.more)
        return credit
    if raw.type == REJECT:
        reject = Reject.__new__(Reject)
        bad[0] = parse_reject(raw.payload, raw.size, &reject.binding, &reject.delay, &tags, &count)
        reject.tags = tags_of(tags, count)
        return reject
    if raw.type == WELCOME:
        welcome = Welcome.__new__(Welcome)
        bad[0] = parse_welcome(raw.payload, raw.size, &welcoming)
        if not bad[0]:
            welcome.version = welcoming.version
            welcome.keepalive = welcoming.keepalive
            welcome.max_header = welcoming.max_header
            welcome.max_body = welcoming.max_body
            welcome.node = text_in(welcoming.node)
            welcome.uuid = text_in(welcoming.uuid)
        return welcome
    open = Open.__new__(Open)
    bad[0] = parse_open(raw.payload, raw.size, &opening)
    if not bad[0]:
        open.version = opening.version
        open.secret = text_in(opening.key)
        open.node = text_in(opening.node)
        open.uuid = text_in(opening.uuid)
    return open


# --- rules, for who is not compiled --------------------------------------------------------------------------

def check_key(key not None):
    """Raises a HeaderError where this is no routing key."""
    cdef bytes raw = key.encode() if isinstance(key, str) else bytes(key)
    if not key_valid(<const uint8_t*>PyBytes_AS_STRING(raw), PyBytes_GET_SIZE(raw)):
        raise HeaderError(FAULTS[BAD_KEY][1])


def is_key_text(key not None):
    """Whether this is a routing key."""
    cdef bytes raw = key.encode() if isinstance(key, str) else bytes(key)
    return key_valid(<const uint8_t*>PyBytes_AS_STRING(raw), PyBytes_GET_SIZE(raw))


def header_sha256(bytes header not None, *, bint lenient=False):
    """Judges a header: raises a HeaderError, or gives the digest that it states (None: none, which `lenient`
    allows)."""
    cdef RawHeader found
    cdef int bad = check_header(
        <const uint8_t*>PyBytes_AS_STRING(header), PyBytes_GET_SIZE(header), lenient, &found)
    if bad:
        raise HeaderError(FAULTS[bad][1])
    return (<const char*>found.sha256)[:32] if found.has & HAS_SHA256 else None


def escape(bytes header not None):
    """A header as the gateway keeps it: with `_passed-` before each key that begins with `_transport-` or
    `_passed-`."""
    cdef RawHeader found
    cdef bytes out
    cdef Py_ssize_t n = PyBytes_GET_SIZE(header)
    cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(header)
    cdef int bad = check_header(data, n, True, &found)
    if bad:
        raise HeaderError(FAULTS[bad][1])
    if not found.has & HAS_RESERVED:
        return header
    out = PyBytes_FromStringAndSize(NULL, n + 8 * found.keys)
    return out[:rewrite_header(data, n, <uint8_t*>PyBytes_AS_STRING(out), True)]


def unescape(bytes header not None):
    """The other way."""
    cdef Py_ssize_t n = PyBytes_GET_SIZE(header)
    cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(header)
    cdef bytes out
    if not may_be_escaped(data, n):
        return header
    out = PyBytes_FromStringAndSize(NULL, n)
    return out[:rewrite_header(data, n, <uint8_t*>PyBytes_AS_STRING(out), False)]


def header_has(bytes header not None, int kind, str key not None, str value=""):
    """Whether a well-formed header holds a condition, as BIND has them."""
    cdef RawCondition condition
    cdef bytes raw_key = key.encode(), raw_value = value.encode()
    condition.kind = <uint8_t>kind
    condition.key = view_of(PyBytes_AS_STRING(raw_key), PyBytes_GET_SIZE(raw_key))
    condition.value = view_of(PyBytes_AS_STRING(raw_value), PyBytes_GET_SIZE(raw_value))
    return condition_holds(
        &condition, <const uint8_t*>PyBytes_AS_STRING(header), PyBytes_GET_SIZE(header))


# --- writing ------------------------------------------------------------------------------------------------

cdef bytes framed(uint8_t type, uint64_t id, bytes payload):
    cdef Py_ssize_t n = PyBytes_GET_SIZE(payload)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, HEADER_SIZE + n)
    cdef uint8_t* p = <uint8_t*>PyBytes_AS_STRING(out)
    write_start(p, type, id, <uint32_t>n)
    memcpy(p + HEADER_SIZE, PyBytes_AS_STRING(payload), n)
    return out


cdef bytes sized(str text, int bytes_of_size, str what):
    cdef bytes raw = text.encode()
    if PyBytes_GET_SIZE(raw) >= 1 << (8 * bytes_of_size):
        raise ValueError(f"{what} has {(1 << (8 * bytes_of_size)) - 1} bytes at most")
    return PyBytes_GET_SIZE(raw).to_bytes(bytes_of_size, "big") + raw


def encode_open(str secret not None, str node not None, str uuid not None, uint64_t id, uint8_t version=VERSION):
    return framed(
        OPEN, id,
        bytes([version]) + sized(secret, 2, "a key") + sized(node, 2, "a node's name") + sized(uuid, 1, "a UUID"))


def encode_welcome(
    str node not None, str uuid not None, uint16_t keepalive, uint32_t max_header, uint32_t max_body, uint64_t id,
    uint8_t version=VERSION,
):
    return framed(
        WELCOME, id,
        bytes([version]) + keepalive.to_bytes(2, "big") + max_header.to_bytes(4, "big") + max_body.to_bytes(4, "big")
        + sized(node, 2, "a node's name") + sized(uuid, 1, "a UUID"))


def encode_message(str key not None, bytes header not None, body, uint64_t id, bint confirm=True):
    """A MESSAGE. Neither key nor header are judged beyond their sizes."""
    cdef Py_buffer buffer
    cdef bytes raw = key.encode()
    cdef Py_ssize_t key_size = PyBytes_GET_SIZE(raw), header_size = PyBytes_GET_SIZE(header)
    cdef bytes out
    cdef uint8_t* p
    if key_size > KEY_CHARS:
        raise ValueError(FAULTS[BAD_KEY][1])
    if header_size > MOST_HEADER:
        raise ValueError(f"a header has {MOST_HEADER} bytes at most")
    PyObject_GetBuffer(body, &buffer, PyBUF_SIMPLE)
    try:
        if buffer.len > MOST_BODY:
            raise ValueError(f"a body has {MOST_BODY} bytes at most")
        out = PyBytes_FromStringAndSize(NULL, message_size(<uint8_t>key_size, header_size, buffer.len))
        p = <uint8_t*>PyBytes_AS_STRING(out)
        p += write_message_start(
            p, id, WANTS_CONFIRM if confirm else 0, PyBytes_AS_STRING(raw), <uint8_t>key_size, <uint32_t>header_size,
            <uint32_t>buffer.len)
        memcpy(p, PyBytes_AS_STRING(header), header_size)
        memcpy(p + header_size, buffer.buf, buffer.len)
    finally:
        PyBuffer_Release(&buffer)
    return out


def encode_delivery(
    str key not None, bytes header not None, bytes body not None, uint64_t tag, uint32_t binding, uint8_t flags=0,
    uint8_t deliveries=1,
):
    cdef bytes raw = key.encode()
    if PyBytes_GET_SIZE(raw) > KEY_CHARS:
        raise ValueError(FAULTS[BAD_KEY][1])
    return framed(
        DELIVERY, tag,
        binding.to_bytes(4, "big") + bytes([flags, deliveries, len(raw)]) + raw + len(header).to_bytes(4, "big")
        + header + body)


def encode_confirm(uint32_t count, uint64_t id):
    return framed(CONFIRM, id, count.to_bytes(4, "big"))


def encode_refuse(uint16_t code, str text not None, uint64_t id):
    return framed(REFUSE, id, code.to_bytes(2, "big") + sized(text, 2, "a text"))


def encode_bind(
    uint32_t binding, str filter not None, uint64_t id, uint8_t flags=0, uint32_t credit=0xFFFFFFFF, str name="",
    conditions=(),
):
    """`conditions` are tuples of kind, header key and value."""
    payload = (
        binding.to_bytes(4, "big") + bytes([flags]) + credit.to_bytes(4, "big") + sized(filter, 2, "a filter")
        + sized(name, 1, "a name"))
    if len(conditions) > 255:
        raise ValueError("a binding has 255 conditions at most")
    payload += bytes([len(conditions)])
    for kind, key, value in conditions:
        payload += bytes([kind]) + sized(key, 1, "a header key") + sized(value, 2, "a value")
    return framed(BIND, id, payload)


def encode_unbind(uint32_t binding, uint64_t id):
    return framed(UNBIND, id, binding.to_bytes(4, "big"))


def encode_ack(uint32_t binding, tags, uint64_t id=0):
    return framed(ACK, id, binding.to_bytes(4, "big") + b"".join([tag.to_bytes(8, "big") for tag in tags]))


def encode_reject(uint32_t binding, tags, uint64_t id=0, uint32_t delay=0):
    """`delay` is in milliseconds."""
    return framed(
        REJECT, id,
        binding.to_bytes(4, "big") + delay.to_bytes(4, "big") + b"".join([tag.to_bytes(8, "big") for tag in tags]))


def encode_credit(uint32_t binding, uint32_t more, uint64_t id=0):
    return framed(CREDIT, id, binding.to_bytes(4, "big") + more.to_bytes(4, "big"))


def encode_ping(uint64_t id):
    return framed(PING, id, b"")


def encode_pong(uint64_t id):
    return framed(PONG, id, b"")
