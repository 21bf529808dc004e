# The Felix codec for compiled callers: frames, batches and texts as borrowed pointers into the caller's memory, and
# writers into memory the caller has reserved. It knows nothing of Python objects, sessions or sockets.
#
# The grammar is at the top of felix.pyx. Everything here is inline, needs no GIL and allocates nothing.

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memchr, memcpy

from headrace.wire.bytes cimport View, be16, be32, be64, put_be16, put_be32, put_be64, utf8_valid
from headrace.wire.bytes cimport view_be16, view_be32, view_be64, view_of, view_slice

cdef extern from "base64.h" nogil:
    Py_ssize_t hr_b64_size(const uint8_t* text, Py_ssize_t n) noexcept
    Py_ssize_t hr_b64_known_size(const uint8_t* text, Py_ssize_t n) noexcept
    void hr_b64_decode(uint8_t* out, const uint8_t* text, uint64_t n) noexcept
    uint64_t hr_b64_length(uint64_t n) noexcept
    void hr_b64_encode(uint8_t* out, const uint8_t* data, uint64_t n) noexcept


cdef enum:
    MAGIC = 0x464C5831      # "FLX1"
    VERSION = 1             # the only protocol version there is
    HEADER_SIZE = 12        # magic (4), version (2), flags (2), length (4)
    MAX_LENGTH = 16777216   # the length field may say at most 16 MiB; the whole frame is then 12 bytes longer

cdef enum:                  # flags; receivers take no notice of the others
    PUBLISH_BATCH = 0x0001
    EVENT_BATCH = 0x0002

cdef enum:
    BAD_MAGIC = -1          # of the header: the stream cannot go on
    BAD_VERSION = -2
    BAD_LENGTH = -3         # above the limit
    BAD_SIZE = -4           # of a payload: it ends before its fields do
    BAD_COUNT = -5          # more items than there are bytes for
    BAD_TEXT = -6           # a name is not UTF-8
    BAD_BASE64 = -7
    BAD_JSON = -8           # not a string, or not a list of strings


cdef struct RawFrame:
    const uint8_t* payload  # borrowed: valid as long as the bytes given to next_frame
    uint32_t size           # of the payload
    uint16_t flags

cdef struct RawBatch:
    View tenant             # borrowed from the payload, like the rest
    View namespace
    View stream
    View items              # `count` times size:u32 and bytes; all of it is there
    uint32_t count

cdef struct RawEvents:
    View items
    uint64_t subscription
    uint32_t count


# --- reading ------------------------------------------------------------------------------------------------

# Looks for one frame at the start of data[0:n].
#   1  `out` is the frame, `used` its whole size;
#   0  it is unfinished: `wanted` is its whole size once the header is there, else 0;
#   BAD_MAGIC, BAD_VERSION and BAD_LENGTH, judged as soon as the field's bytes are there.
cdef inline int next_frame(const uint8_t* data, Py_ssize_t n, uint32_t max_length, RawFrame* out,
                           Py_ssize_t* used, Py_ssize_t* wanted) noexcept nogil:
    cdef uint32_t length
    used[0] = 0
    wanted[0] = 0
    if n < 4:
        return 0
    if be32(data) != MAGIC:
        return BAD_MAGIC
    if n < 6:
        return 0
    if be16(data + 4) != VERSION:
        return BAD_VERSION
    if n < HEADER_SIZE:
        return 0
    length = be32(data + 8)
    if length > max_length:
        return BAD_LENGTH
    wanted[0] = HEADER_SIZE + <Py_ssize_t>length
    if n < wanted[0]:
        return 0
    out.flags = be16(data + 6)
    out.payload = data + HEADER_SIZE
    out.size = length
    used[0] = wanted[0]
    return 1


# One item of a batch that was checked.
cdef inline View next_item(View* items) noexcept nogil:
    cdef View item
    item.size = be32(items.data)
    item.data = items.data + 4
    items.data += 4 + item.size
    items.size -= 4 + item.size
    return item


# Whether `count` items are there; what follows them is cut off, since receivers take no notice of it.
cdef inline int check_items(View* items, uint32_t count) noexcept nogil:
    cdef View rest = items[0]
    cdef uint32_t i, size = 0
    cdef View item
    if <uint64_t>count * 4 > <uint64_t>rest.size:
        return BAD_COUNT
    for i in range(count):
        if not view_be32(&rest, &size) or not view_slice(&rest, size, &item):
            return BAD_SIZE
    items.size -= rest.size
    return 0


cdef inline int parse_name(View* rest, View* out) noexcept nogil:
    cdef uint16_t size = 0
    if not view_be16(rest, &size) or not view_slice(rest, size, out):
        return BAD_SIZE
    return 0 if utf8_valid(out.data, out.size) else BAD_TEXT


cdef inline int parse_batch(const uint8_t* payload, uint32_t size, RawBatch* out) noexcept nogil:
    cdef View rest = view_of(payload, size)
    cdef int bad = parse_name(&rest, &out.tenant)
    if not bad:
        bad = parse_name(&rest, &out.namespace)
    if not bad:
        bad = parse_name(&rest, &out.stream)
    if not bad and not view_be32(&rest, &out.count):
        bad = BAD_SIZE
    if bad:
        return bad
    out.items = rest
    return check_items(&out.items, out.count)


cdef inline int parse_events(const uint8_t* payload, uint32_t size, RawEvents* out) noexcept nogil:
    cdef View rest = view_of(payload, size)
    if not view_be64(&rest, &out.subscription) or not view_be32(&rest, &out.count):
        return BAD_SIZE
    out.items = rest
    return check_items(&out.items, out.count)


# --- JSON texts that hold Base64 ----------------------------------------------------------------------------
# The JSON parser has found them well-formed; nobody has looked at what they are. They have no escapes: texts that do
# are written anew before they come here.

cdef inline void skip_space(View* rest) noexcept nogil:
    while rest.size and (rest.data[0] == 0x20 or rest.data[0] == 0x09 or rest.data[0] == 0x0A or rest.data[0] == 0x0D):
        rest.data += 1
        rest.size -= 1


# What is between the quotes of the string that `rest` begins with; moves past it.
cdef inline int next_text(View* rest, View* out) noexcept nogil:
    cdef const uint8_t* end
    if rest.size < 2 or rest.data[0] != 0x22:
        return BAD_JSON
    end = <const uint8_t*>memchr(rest.data + 1, 0x22, rest.size - 1)
    if end == NULL:
        return BAD_JSON
    out[0] = view_of(rest.data + 1, end - rest.data - 1)
    rest.size -= end + 1 - rest.data
    rest.data = end + 1
    return 0


# The next item of a list whose `[` or last item was passed: 1 if there is one, 0 at its end.
cdef inline int next_in_list(View* rest, View* out) noexcept nogil:
    cdef int bad
    skip_space(rest)
    if rest.size and rest.data[0] == 0x2C:
        rest.data += 1
        rest.size -= 1
        skip_space(rest)
    if rest.size and rest.data[0] == 0x5D:
        return 0
    bad = next_text(rest, out)
    return bad if bad else 1


cdef inline int enter_list(View* rest) noexcept nogil:
    skip_space(rest)
    if not rest.size or rest.data[0] != 0x5B:
        return BAD_JSON
    rest.data += 1
    rest.size -= 1
    return 0


# --- writing ------------------------------------------------------------------------------------------------

cdef inline Py_ssize_t write_header(uint8_t* out, uint16_t flags, uint32_t length) noexcept nogil:
    put_be32(out, MAGIC)
    put_be16(out + 4, VERSION)
    put_be16(out + 6, flags)
    put_be32(out + 8, length)
    return HEADER_SIZE


cdef inline Py_ssize_t write_name(uint8_t* out, const void* text, uint16_t size) noexcept nogil:
    put_be16(out, size)
    if size:
        memcpy(out + 2, text, size)
    return 2 + <Py_ssize_t>size


cdef inline Py_ssize_t write_item(uint8_t* out, const void* data, uint32_t size) noexcept nogil:
    put_be32(out, size)
    if size:
        memcpy(out + 4, data, size)
    return 4 + <Py_ssize_t>size
