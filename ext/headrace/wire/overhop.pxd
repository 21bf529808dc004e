# The Overhop codec's C interface: envelopes to slices and back, over memory that the caller owns. See overhop.pyx.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from headrace.wire.bytes cimport View

cdef enum:
    VERSION = 2
    LENGTH_SIZE = 4
    LEAST_LIMIT = 65536         # bounds of the configurable payload limit, and its default (overhop, Framing)
    MOST_LIMIT = 33554432
    USUAL_LIMIT = 8388608
    MAX_DEPTH = 512             # arrays and maps within one another, the envelope's own map included
    FIELDS = 16                 # entries of `p` that are noted in passing; with more they are looked up by walking

cdef enum Type:
    # worker to gateway
    HELLO = 1
    REGISTER = 2
    PING = 3
    GQUEUE = 4
    LQUEUES = 5
    SUBSCRIBE = 6
    UNSUBSCRIBE = 7
    CREDIT = 8
    ADDQUEUE = 9
    STATUS = 10
    RMQUEUE = 11
    PAUSE = 12
    RESUME = 13
    ENQUEUE = 14
    JOB = 15
    RMJOB = 16
    LSJOB = 17
    QSTATS = 18
    DONE = 64                   # these three are this gateway's extension
    FAIL = 65
    EXTEND = 66
    # gateway to worker
    OK = 101
    ERR = 102
    HI = 103
    IDENT = 104
    PONG = 105
    DELIVER = 110               # the extension's pushes
    ENDED = 111

cdef enum Fault:                # why a payload is no envelope; in the order in which a fault is found
    SOUND = 0
    CUT = 1                     # it ends inside a value
    FORBIDDEN = 2               # a float, an ext, or 0xC1, which is nothing
    WIDE_INT = 3                # beyond int64
    BAD_TEXT = 4                # a string that is not UTF-8
    BAD_KEY = 5                 # a map key that is no string
    TOO_DEEP = 6
    NOT_A_MAP = 7
    TRAILING = 8                # bytes behind the map
    BAD_V = 9
    BAD_T = 10
    BAD_RID = 11
    BAD_P = 12

cdef struct Field:
    View key                    # its text
    View value                  # its MessagePack

cdef struct Envelope:           # slices of the payload that it was read from
    int64_t type
    View rid                    # its text, never empty
    View payload                # the MessagePack of `p`, a map
    uint32_t entries            # of that map
    View inside                 # the entries' bytes
    Field fields[FIELDS]        # them, if there are not more

# One pass over a payload: SOUND, or what is wrong with it; then `bad_at` is where.
cdef int read_envelope(const uint8_t* data, Py_ssize_t size, Envelope* out, Py_ssize_t* bad_at) noexcept nogil

# One whole frame from the front of a stream. 1: it is in `frame` (its payload) and takes `used` bytes; 0: it is not all
# there, `wanted` is its size if that is known; -1: its length is not of the protocol.
cdef inline int next_frame(const uint8_t* data, Py_ssize_t n, uint32_t limit, View* frame, Py_ssize_t* used,
                           Py_ssize_t* wanted) noexcept nogil:
    cdef uint32_t length
    wanted[0] = 0
    if n < LENGTH_SIZE:
        return 0
    length = (<uint32_t>data[0] << 24) | (<uint32_t>data[1] << 16) | (<uint32_t>data[2] << 8) | data[3]
    if length == 0 or length > limit:
        return -1
    if n - LENGTH_SIZE < <Py_ssize_t>length:
        wanted[0] = LENGTH_SIZE + <Py_ssize_t>length
        return 0
    frame.data = data + LENGTH_SIZE
    frame.size = length
    used[0] = LENGTH_SIZE + <Py_ssize_t>length
    return 1

# What a handler reads from `p`; the values were validated with the envelope.
cdef bint find_field(const Envelope* envelope, const char* name, Py_ssize_t size, View* value) noexcept nogil
cdef bint as_int(const View* value, int64_t* out) noexcept nogil
cdef bint as_text(const View* value, View* out) noexcept nogil
cdef bint as_bin(const View* value, View* out) noexcept nogil
cdef bint is_nil(const View* value) noexcept nogil

# Sizes and writers of single values; each writer answers one past its last byte.
cdef inline Py_ssize_t text_size(Py_ssize_t n) noexcept nogil:
    return n + (1 if n < 32 else 2 if n < 256 else 3 if n < 65536 else 5)

cdef inline Py_ssize_t bin_size(Py_ssize_t n) noexcept nogil:
    return n + (2 if n < 256 else 3 if n < 65536 else 5)

cdef Py_ssize_t int_size(int64_t value) noexcept nogil
cdef uint8_t* put_int(uint8_t* p, int64_t value) noexcept nogil
cdef uint8_t* put_text(uint8_t* p, const void* text, Py_ssize_t n) noexcept nogil
cdef uint8_t* put_bin(uint8_t* p, const void* data, Py_ssize_t n) noexcept nogil

# A whole frame around a payload of `payload_size` bytes, which go where open_frame() answers.
cdef Py_ssize_t frame_size(Py_ssize_t payload_size, Py_ssize_t rid_size, int64_t type) noexcept nogil
cdef uint8_t* open_frame(uint8_t* out, Py_ssize_t payload_size, const void* rid, Py_ssize_t rid_size,
                         int64_t type) noexcept nogil

# RFC 3339 to and from microseconds since the epoch.
cdef enum:
    TIME_CHARS = 32
cdef bint read_time(const uint8_t* text, Py_ssize_t n, int64_t* out) noexcept nogil
cdef Py_ssize_t write_time(char* out, int64_t time) noexcept nogil

# The text of a UUID in any of its forms to 16 bytes, and back to 36 characters.
cdef bint read_uuid(const uint8_t* text, Py_ssize_t n, uint8_t* out) noexcept nogil
cdef void write_uuid(char* out, const uint8_t* bytes_) noexcept nogil

cpdef bytes pack(object value)
cpdef bytes encode(int64_t type, str rid, object payload)
