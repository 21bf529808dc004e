# cython: freethreading_compatible=False
"""Messages of the log as Arrow record batches: a cursor that fills columns without touching a Python object per row.

It knows the log and the schema of the drop, and nothing of files, directories or when to commit. Its buffers are handed
to pyarrow over the Arrow C data interface (https://arrow.apache.org/docs/format/CDataInterface.html), not copied.
"""

import pyarrow

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, qsort
from libc.string cimport memcmp, memcpy, memmove, memset

from headrace.log cimport (
    CONTROL_ORIGIN, CONTROL_TOPIC, FLAG_CONTROL, FLAG_PARTS, LogReader, RecordHeader, View,
)

from headrace.drop.schema import COLUMNS, KEY_COLUMNS, arrow_schema
from headrace.errors import LogDamaged
from headrace.trie import Trie, check_filter


cdef extern from *:
    """
    #include <stdlib.h>
    #include <sys/mman.h>

    #define HR_ALIGNMENT 64             /* what Arrow recommends for buffers */
    #define HR_HUGE ((size_t)2 << 20)

    /* Memory for a buffer, to be freed with free(); `*room` becomes what it has. A large one is in large pages where the
       system has them: filling fresh memory page by page takes longer than all else that is done with a message. */
    static inline void *hr_buffer(uint64_t *room)
    {
        size_t unit = *room >= 2 * HR_HUGE ? HR_HUGE : HR_ALIGNMENT;
        void *memory = NULL;
        *room = *room ? (*room + unit - 1) & ~(uint64_t)(unit - 1) : unit;
        if (posix_memalign(&memory, unit, *room) != 0) return NULL;
    #ifdef MADV_HUGEPAGE
        if (unit == HR_HUGE) madvise(memory, *room, MADV_HUGEPAGE);
    #endif
        return memory;
    }
    """
    void* hr_buffer(uint64_t* room) noexcept nogil


cdef extern from *:
    """
    #ifndef ARROW_C_DATA_INTERFACE
    #define ARROW_C_DATA_INTERFACE
    struct ArrowArray {
        int64_t length;
        int64_t null_count;
        int64_t offset;
        int64_t n_buffers;
        int64_t n_children;
        const void** buffers;
        struct ArrowArray** children;
        struct ArrowArray* dictionary;
        void (*release)(struct ArrowArray*);
        void* private_data;
    };
    #endif
    """
    struct ArrowArray:
        int64_t length
        int64_t null_count
        int64_t offset
        int64_t n_buffers
        int64_t n_children
        const void** buffers
        ArrowArray** children
        ArrowArray* dictionary
        void (*release)(ArrowArray*) noexcept nogil
        void* private_data


cdef enum:
    FEW_ROWS = 1024
    MOST_ROWS = 1 << 24
    # In one batch, before the last row. A record is below 2^30 bytes, and base64 makes 4 of 3: 4/3 (2^28 + 2^30) < 2^31,
    # so 32-bit offsets do not overflow in any column.
    MOST_BYTES = 1 << 28
    NAMES_KEPT = 1 << 16       # in a dictionary from one batch to the next; beyond that it begins anew
    NAMES_BYTES_KEPT = 1 << 20
    FEW_ENTRIES = 8            # headers with more are sorted to find keys that come twice
    MAX_DEPTH = 512            # of JSON
    DEPTH_WORDS = 8            # bits for that
    UNKNOWN = -2               # an id that was not met yet in this segment
    NONE = -1                  # topic: no filter matches it; source: null

cdef enum Why:                 # what fill() needs the GIL for
    WHY_STEP = 0
    WHY_FULL = 1
    WHY_JUMP = 2
    WHY_TOPIC = 3
    WHY_SOURCE = 4
    WHY_PROTOCOL = 5
    WHY_NEW_HOUR = 6           # the batch's first row is of another hour than the dictionaries
    WHY_OTHER_HOUR = 7         # the batch ends before this row
    WHY_MEMORY = 8

cdef int64_t HOUR = 3_600_000_000

_PROTOCOLS = ("headrace", "blipmq", "overhop", "relink", "zeroctl", "felix")

import_batch = pyarrow.RecordBatch._import_from_c


# --- growing memory -------------------------------------------------------------------------------------------------

cdef struct Buffer:
    uint8_t* data
    uint64_t size
    uint64_t room


cdef int buffer_grow(Buffer* buffer, uint64_t room) noexcept nogil:
    """At least `room` bytes; 0, or -1 without memory."""
    cdef void* data
    if room < 2 * buffer.room:
        room = 2 * buffer.room
    data = hr_buffer(&room)
    if data == NULL:
        return -1
    if buffer.size:
        memcpy(data, buffer.data, buffer.size)
    free(buffer.data)
    buffer.data = <uint8_t*>data
    buffer.room = room
    return 0


cdef inline int buffer_need(Buffer* buffer, uint64_t more) noexcept nogil:
    """Room for `more` bytes behind what is there."""
    if buffer.room - buffer.size >= more and buffer.data != NULL:
        return 0
    return buffer_grow(buffer, buffer.size + more)


cdef inline int buffer_put(Buffer* buffer, const void* data, uint64_t n) noexcept nogil:
    if buffer_need(buffer, n) != 0:
        return -1
    memcpy(buffer.data + buffer.size, data, n)
    buffer.size += n
    return 0


cdef inline int buffer_put_i32(Buffer* buffer, int32_t value) noexcept nogil:
    if buffer_need(buffer, 4) != 0:
        return -1
    (<int32_t*>(buffer.data + buffer.size))[0] = value
    buffer.size += 4
    return 0


cdef inline int buffer_put_i64(Buffer* buffer, int64_t value) noexcept nogil:
    if buffer_need(buffer, 8) != 0:
        return -1
    (<int64_t*>(buffer.data + buffer.size))[0] = value
    buffer.size += 8
    return 0


cdef void buffer_free(Buffer* buffer) noexcept nogil:
    free(buffer.data)
    memset(buffer, 0, sizeof(Buffer))


cdef struct Bits:              # which rows are not null
    Buffer bytes
    uint64_t nulls


cdef inline int bits_put(Bits* bits, uint64_t row, bint valid) noexcept nogil:
    if row & 7 == 0:
        if buffer_need(&bits.bytes, 1) != 0:
            return -1
        bits.bytes.data[bits.bytes.size] = 0
        bits.bytes.size += 1
    if valid:
        bits.bytes.data[row >> 3] |= <uint8_t>(1 << (row & 7))
    else:
        bits.nulls += 1
    return 0


# --- ids of a segment -> places in a dictionary -----------------------------------------------------------------------

cdef struct Ids:               # open addressing; an id may be any number
    uint32_t* keys
    int32_t* values            # UNKNOWN: an empty place
    uint32_t mask
    uint32_t count


cdef inline uint32_t ids_hash(uint32_t id) noexcept nogil:
    return (id * <uint32_t>2654435769) ^ (id >> 15)


cdef inline int32_t ids_get(const Ids* ids, uint32_t id) noexcept nogil:
    cdef uint32_t i
    if ids.keys == NULL:
        return UNKNOWN
    i = ids_hash(id) & ids.mask
    while ids.values[i] != UNKNOWN:
        if ids.keys[i] == id:
            return ids.values[i]
        i = (i + 1) & ids.mask
    return UNKNOWN


cdef void ids_free(Ids* ids) noexcept nogil:
    free(ids.keys)
    free(ids.values)
    memset(ids, 0, sizeof(Ids))


cdef int ids_put(Ids* ids, uint32_t id, int32_t value) noexcept nogil:
    """Adds an id that is not there."""
    cdef Ids larger
    cdef uint32_t i, places
    if 2 * <uint64_t>(ids.count + 1) > <uint64_t>ids.mask + 1 or ids.keys == NULL:
        places = 64 if ids.keys == NULL else 2 * (ids.mask + 1)
        larger.keys = <uint32_t*>malloc(<size_t>places * sizeof(uint32_t))
        larger.values = <int32_t*>malloc(<size_t>places * sizeof(int32_t))
        if larger.keys == NULL or larger.values == NULL:
            free(larger.keys)
            free(larger.values)
            return -1
        larger.mask = places - 1
        larger.count = 0
        for i in range(places):
            larger.values[i] = UNKNOWN
        if ids.keys != NULL:
            for i in range(ids.mask + 1):
                if ids.values[i] != UNKNOWN:
                    ids_put(&larger, ids.keys[i], ids.values[i])
        ids_free(ids)
        ids[0] = larger
    i = ids_hash(id) & ids.mask
    while ids.values[i] != UNKNOWN:
        i = (i + 1) & ids.mask
    ids.keys[i] = id
    ids.values[i] = value
    ids.count += 1
    return 0


cdef class _Names:
    """The dictionary of one column. It goes on from batch to batch, so that those of one file have the same one."""
    cdef Buffer offsets
    cdef Buffer text
    cdef dict places

    def __cinit__(self):
        self.places = {}

    cdef int32_t place(self, bytes name) except -2:
        """Where a name stands; adds it if it is new."""
        found = self.places.get(name)
        if found is not None:
            return found
        if self.offsets.size == 0 and buffer_put_i32(&self.offsets, 0) != 0:
            raise MemoryError
        # What is not UTF-8 is replaced: two such names may look alike, but stay two.
        cdef bytes text = name.decode(errors="replace").encode()
        if (
            buffer_need(&self.offsets, 4) != 0
            or buffer_put(&self.text, PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text)) != 0
        ):
            raise MemoryError
        buffer_put_i32(&self.offsets, <int32_t>self.text.size)
        cdef int32_t place = <int32_t>len(self.places)
        self.places[name] = place
        return place

    cdef bint large(self) noexcept:
        return self.offsets.size > 4 * NAMES_KEPT or self.text.size > NAMES_BYTES_KEPT

    cdef int clear(self) except -1:
        self.places.clear()
        buffer_free(&self.offsets)
        buffer_free(&self.text)
        return 0

    cdef int copy(self, ArrowArray* out) noexcept:
        """A string array of the names; -1 without memory."""
        cdef Buffer offsets, text
        memset(&offsets, 0, sizeof(Buffer))
        memset(&text, 0, sizeof(Buffer))
        if (
            buffer_need(&offsets, self.offsets.size + 4) != 0
            or buffer_need(&text, self.text.size) != 0
            or array_make(out, len(self.places), 3, 0, False) != 0
        ):
            buffer_free(&offsets)
            buffer_free(&text)
            return -1
        memset(offsets.data, 0, 4)
        if self.offsets.size:
            memcpy(offsets.data, self.offsets.data, self.offsets.size)
        if self.text.size:
            memcpy(text.data, self.text.data, self.text.size)
        array_give(out, 1, &offsets)
        array_give(out, 2, &text)
        return 0

    def __dealloc__(self):
        buffer_free(&self.offsets)
        buffer_free(&self.text)


# --- arrays for others ------------------------------------------------------------------------------------------------

cdef struct Owned:             # ArrowArray.private_data
    const void* buffers[3]
    ArrowArray** pointers
    ArrowArray* children
    ArrowArray* dictionary


cdef void array_release(ArrowArray* array) noexcept nogil:
    """What an array owns, from whichever thread lets go of it last."""
    cdef Owned* owned = <Owned*>array.private_data
    cdef int64_t i
    for i in range(array.n_children):
        if array.children[i].release != NULL:         # a consumer may have moved it away
            array.children[i].release(array.children[i])
    if array.dictionary != NULL and array.dictionary.release != NULL:
        array.dictionary.release(array.dictionary)
    for i in range(3):
        free(<void*>owned.buffers[i])
    free(owned.pointers)
    free(owned.children)
    free(owned.dictionary)
    free(owned)
    array.release = NULL


cdef int array_make(ArrowArray* out, int64_t length, int n_buffers, int n_children, bint dictionary) noexcept nogil:
    """An array whose buffers, children and dictionary are still empty; it can be released at any time. -1 without memory."""
    cdef Owned* owned = <Owned*>calloc(1, sizeof(Owned))
    cdef int i
    memset(out, 0, sizeof(ArrowArray))
    if owned == NULL:
        return -1
    if n_children:
        owned.pointers = <ArrowArray**>calloc(n_children, sizeof(ArrowArray*))
        owned.children = <ArrowArray*>calloc(n_children, sizeof(ArrowArray))
    if dictionary:
        owned.dictionary = <ArrowArray*>calloc(1, sizeof(ArrowArray))
    if (
        (n_children and (owned.pointers == NULL or owned.children == NULL))
        or (dictionary and owned.dictionary == NULL)
    ):
        free(owned.pointers)
        free(owned.children)
        free(owned.dictionary)
        free(owned)
        return -1
    for i in range(n_children):
        owned.pointers[i] = &owned.children[i]
    out.length = length
    out.n_buffers = n_buffers
    out.n_children = n_children
    out.buffers = owned.buffers
    out.children = owned.pointers
    out.dictionary = owned.dictionary
    out.private_data = owned
    out.release = array_release
    return 0


cdef void array_give(ArrowArray* array, int place, Buffer* buffer) noexcept nogil:
    """A buffer's memory becomes the array's."""
    (<Owned*>array.private_data).buffers[place] = buffer.data
    memset(buffer, 0, sizeof(Buffer))


cdef void array_give_bits(ArrowArray* array, Bits* bits) noexcept nogil:
    array.null_count = <int64_t>bits.nulls
    if bits.nulls:
        array_give(array, 0, &bits.bytes)
    else:
        buffer_free(&bits.bytes)
    bits.nulls = 0


# --- JSON -------------------------------------------------------------------------------------------------------------

cdef extern from *:
    """
    /* Length of the UTF-8 character at p (its first byte is >= 0x80), or 0 where there is none: overlong forms, surrogates
       and what is above U+10FFFF are none. */
    static inline size_t hr_utf8_length(const uint8_t *p, const uint8_t *end)
    {
        size_t left = (size_t)(end - p);
        uint8_t c = p[0];
        if (c >= 0xC2 && c <= 0xDF) return left >= 2 && (p[1] & 0xC0) == 0x80 ? 2 : 0;
        if (c >= 0xE0 && c <= 0xEF) {
            if (left < 3 || (p[1] & 0xC0) != 0x80 || (p[2] & 0xC0) != 0x80) return 0;
            if (c == 0xE0 && p[1] < 0xA0) return 0;
            if (c == 0xED && p[1] > 0x9F) return 0;
            return 3;
        }
        if (c >= 0xF0 && c <= 0xF4) {
            if (left < 4 || (p[1] & 0xC0) != 0x80 || (p[2] & 0xC0) != 0x80 || (p[3] & 0xC0) != 0x80) return 0;
            if (c == 0xF0 && p[1] < 0x90) return 0;
            if (c == 0xF4 && p[1] > 0x8F) return 0;
            return 4;
        }
        return 0;
    }

    static inline int hr_hex(uint8_t c)
    {
        if (c >= '0' && c <= '9') return c - '0';
        c |= 0x20;
        return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    }

    /* Past the ordinary characters of a string: eight bytes at once while none of them is a control character, a quote, a
       backslash or beyond ASCII. */
    static inline const uint8_t *hr_plain(const uint8_t *p, const uint8_t *end)
    {
        const uint64_t ones = 0x0101010101010101ULL, highs = 0x8080808080808080ULL;
        while (end - p >= 8) {
            uint64_t w, quote, slash;
            memcpy(&w, p, 8);
            quote = w ^ (ones * '"');
            slash = w ^ (ones * '\\\\');
            if ((w | (w - ones * 0x20) | (quote - ones) | (slash - ones)) & highs) break;
            p += 8;
        }
        return p;
    }
    """
    size_t hr_utf8_length(const uint8_t* p, const uint8_t* end) noexcept nogil
    int hr_hex(uint8_t c) noexcept nogil
    const uint8_t* hr_plain(const uint8_t* p, const uint8_t* end) noexcept nogil


cdef const uint8_t* json_string(const uint8_t* p, const uint8_t* end) noexcept nogil:
    """Past a string whose first quote was read, or NULL where it is none."""
    cdef size_t n
    cdef int i
    while True:
        p = hr_plain(p, end)
        if p >= end:
            return NULL
        if p[0] == c'"':
            return p + 1
        if p[0] == c'\\':
            if end - p < 2:
                return NULL
            if p[1] == c'u':
                if end - p < 6:
                    return NULL
                for i in range(2, 6):
                    if hr_hex(p[i]) < 0:
                        return NULL
                p += 6
            elif (
                p[1] == c'"' or p[1] == c'\\' or p[1] == c'/' or p[1] == c'b' or p[1] == c'f' or p[1] == c'n'
                or p[1] == c'r' or p[1] == c't'
            ):
                p += 2
            else:
                return NULL
        elif p[0] < 0x20:
            return NULL
        elif p[0] < 0x80:
            p += 1
        else:
            n = hr_utf8_length(p, end)
            if n == 0:
                return NULL
            p += n


cdef const uint8_t* json_number(const uint8_t* p, const uint8_t* end) noexcept nogil:
    if p < end and p[0] == c'-':
        p += 1
    if p >= end or p[0] < c'0' or p[0] > c'9':
        return NULL
    if p[0] == c'0':
        p += 1
    else:
        while p < end and c'0' <= p[0] <= c'9':
            p += 1
    if p < end and p[0] == c'.':
        p += 1
        if p >= end or p[0] < c'0' or p[0] > c'9':
            return NULL
        while p < end and c'0' <= p[0] <= c'9':
            p += 1
    if p < end and (p[0] == c'e' or p[0] == c'E'):
        p += 1
        if p < end and (p[0] == c'+' or p[0] == c'-'):
            p += 1
        if p >= end or p[0] < c'0' or p[0] > c'9':
            return NULL
        while p < end and c'0' <= p[0] <= c'9':
            p += 1
    return p


cdef inline const uint8_t* json_space(const uint8_t* p, const uint8_t* end) noexcept nogil:
    while p < end and (p[0] == c' ' or p[0] == c'\n' or p[0] == c'\r' or p[0] == c'\t'):
        p += 1
    return p


cdef const uint8_t* json_value(const uint8_t* p, const uint8_t* end) noexcept nogil:
    """Past one value (RFC 8259) in UTF-8 that begins at `p`, or NULL where there is none."""
    cdef uint64_t objects[DEPTH_WORDS]                # by depth: whether it is an object or an array
    cdef int depth = 0
    cdef bint value = True                            # a value must come; else the comma or end of what contains it
    memset(objects, 0, sizeof(objects))
    while True:
        if value:
            if p >= end:
                return NULL
            if p[0] == c'"':
                p = json_string(p + 1, end)
                if p == NULL:
                    return NULL
            elif p[0] == c'{' or p[0] == c'[':
                if depth == MAX_DEPTH:
                    return NULL
                if p[0] == c'{':
                    objects[depth >> 6] |= <uint64_t>1 << (depth & 63)
                else:
                    objects[depth >> 6] &= ~(<uint64_t>1 << (depth & 63))
                depth += 1
                p = json_space(p + 1, end)
                if p >= end:
                    return NULL
                if objects[(depth - 1) >> 6] >> ((depth - 1) & 63) & 1:
                    if p[0] != c'}':
                        p = json_key(p, end)
                        if p == NULL:
                            return NULL
                        continue
                elif p[0] != c']':
                    continue
                p += 1
                depth -= 1
            elif p[0] == c't':
                if end - p < 4 or memcmp(p, b"true", 4) != 0:
                    return NULL
                p += 4
            elif p[0] == c'f':
                if end - p < 5 or memcmp(p, b"false", 5) != 0:
                    return NULL
                p += 5
            elif p[0] == c'n':
                if end - p < 4 or memcmp(p, b"null", 4) != 0:
                    return NULL
                p += 4
            else:
                p = json_number(p, end)
                if p == NULL:
                    return NULL
        if depth == 0:
            return p
        p = json_space(p, end)
        if p >= end:
            return NULL
        if p[0] == c',':
            p = json_space(p + 1, end)
            if objects[(depth - 1) >> 6] >> ((depth - 1) & 63) & 1:
                p = json_key(p, end)
                if p == NULL:
                    return NULL
            value = True
        elif p[0] == (c'}' if objects[(depth - 1) >> 6] >> ((depth - 1) & 63) & 1 else c']'):
            p += 1
            depth -= 1
            value = False
        else:
            return NULL


cdef const uint8_t* json_key(const uint8_t* p, const uint8_t* end) noexcept nogil:
    """Past a key, its colon and the space around it; NULL where there is none."""
    if p >= end or p[0] != c'"':
        return NULL
    p = json_string(p + 1, end)
    if p == NULL:
        return NULL
    p = json_space(p, end)
    if p >= end or p[0] != c':':
        return NULL
    return json_space(p + 1, end)


cdef bint json_valid(const uint8_t* p, uint64_t n) noexcept nogil:
    cdef const uint8_t* end = p + n
    p = json_value(json_space(p, end), end)
    return p != NULL and json_space(p, end) == end


cdef inline uint32_t json_unit(const uint8_t* p) noexcept nogil:
    """The four hexadecimal digits of an escape that was found to hold."""
    return <uint32_t>(hr_hex(p[0]) << 12 | hr_hex(p[1]) << 8 | hr_hex(p[2]) << 4 | hr_hex(p[3]))


cdef int json_unescape(const uint8_t* p, const uint8_t* end, Buffer* out) noexcept nogil:
    """What is between the quotes of a string that was found to hold, as UTF-8; half a surrogate pair is U+FFFD. It never
    becomes longer. -1 without memory."""
    cdef const uint8_t* run
    cdef uint8_t* to
    cdef uint32_t c, low
    if buffer_need(out, end - p) != 0:
        return -1
    to = out.data + out.size
    while p < end:
        run = p
        while p < end and p[0] != c'\\':
            p += 1
        memcpy(to, run, p - run)
        to += p - run
        if p == end:
            break
        c = p[1]
        p += 2
        if c == c'u':
            c = json_unit(p)
            p += 4
            if 0xD800 <= c < 0xE000:
                low = json_unit(p + 2) if c < 0xDC00 and end - p >= 6 and p[0] == c'\\' and p[1] == c'u' else 0
                if 0xDC00 <= low < 0xE000:
                    c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00)
                    p += 6
                else:
                    c = 0xFFFD
        elif c == c'b':
            c = 8
        elif c == c'f':
            c = 12
        elif c == c'n':
            c = 10
        elif c == c'r':
            c = 13
        elif c == c't':
            c = 9
        if c < 0x80:
            to[0] = <uint8_t>c
            to += 1
        elif c < 0x800:
            to[0] = <uint8_t>(0xC0 | c >> 6)
            to[1] = <uint8_t>(0x80 | (c & 0x3F))
            to += 2
        elif c < 0x10000:
            to[0] = <uint8_t>(0xE0 | c >> 12)
            to[1] = <uint8_t>(0x80 | (c >> 6 & 0x3F))
            to[2] = <uint8_t>(0x80 | (c & 0x3F))
            to += 3
        else:
            to[0] = <uint8_t>(0xF0 | c >> 18)
            to[1] = <uint8_t>(0x80 | (c >> 12 & 0x3F))
            to[2] = <uint8_t>(0x80 | (c >> 6 & 0x3F))
            to[3] = <uint8_t>(0x80 | (c & 0x3F))
            to += 4
    out.size = to - out.data
    return 0


cdef int put_base64(const uint8_t* p, uint64_t n, Buffer* out) noexcept nogil:
    cdef const char* digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    cdef uint8_t* to
    cdef uint32_t three
    if buffer_need(out, 4 * ((n + 2) // 3)) != 0:
        return -1
    to = out.data + out.size
    while n:
        three = <uint32_t>p[0] << 16
        if n > 1:
            three |= <uint32_t>p[1] << 8
        if n > 2:
            three |= p[2]
        to[0] = <uint8_t>digits[three >> 18]
        to[1] = <uint8_t>digits[three >> 12 & 63]
        to[2] = <uint8_t>digits[three >> 6 & 63] if n > 1 else c'='
        to[3] = <uint8_t>digits[three & 63] if n > 2 else c'='
        to += 4
        p += 3
        n -= 3 if n > 3 else n
    out.size = to - out.data
    return 0


# --- headers as a map -------------------------------------------------------------------------------------------------

cdef struct Entries:           # all keys and values of a batch, one behind the other
    Buffer key_ends            # int32 offsets, the first one 0
    Buffer keys
    Buffer value_ends
    Buffer values
    int32_t count


cdef struct Key:
    const uint8_t* text
    uint32_t length
    int32_t entry


cdef int compare_keys(const void* a, const void* b) noexcept nogil:
    """By text, and the same text by which came first."""
    cdef const Key* x = <const Key*>a
    cdef const Key* y = <const Key*>b
    cdef int order
    if x.length != y.length:
        return -1 if x.length < y.length else 1
    order = memcmp(x.text, y.text, x.length)
    if order:
        return order
    return -1 if x.entry < y.entry else 1


cdef int entry_done(Entries* entries) noexcept nogil:
    """Key and value were put behind the others."""
    if (
        buffer_put_i32(&entries.key_ends, <int32_t>entries.keys.size) != 0
        or buffer_put_i32(&entries.value_ends, <int32_t>entries.values.size) != 0
    ):
        return -1
    entries.count += 1
    return 0


cdef bint has_repeated_key(const Entries* entries, int32_t first) noexcept nogil:
    """For few entries: whether two of them, from `first` on, have the same key."""
    cdef const int32_t* ends = <const int32_t*>entries.key_ends.data
    cdef int32_t i, k, length
    for i in range(first + 1, entries.count):
        length = ends[i + 1] - ends[i]
        for k in range(first, i):
            if (
                ends[k + 1] - ends[k] == length
                and memcmp(entries.keys.data + ends[k], entries.keys.data + ends[i], length) == 0
            ):
                return True
    return False


cdef int drop_repeated_keys(Entries* entries, int32_t first) noexcept nogil:
    """Of entries with the same key, from `first` on, the last one stays. -1 without memory."""
    cdef int32_t* key_ends = <int32_t*>entries.key_ends.data
    cdef int32_t* value_ends = <int32_t*>entries.value_ends.data
    cdef int32_t count = entries.count - first
    cdef int32_t i, kept, key_at, key_end, value_at, value_end
    cdef int32_t key_begin, value_begin
    cdef Key* keys = <Key*>malloc(<size_t>count * sizeof(Key))
    cdef uint8_t* dead = <uint8_t*>calloc(count, 1)
    if keys == NULL or dead == NULL:
        free(keys)
        free(dead)
        return -1
    for i in range(count):
        keys[i].text = entries.keys.data + key_ends[first + i]
        keys[i].length = <uint32_t>(key_ends[first + i + 1] - key_ends[first + i])
        keys[i].entry = i
    qsort(keys, count, sizeof(Key), compare_keys)
    for i in range(count - 1):
        if keys[i].length == keys[i + 1].length and memcmp(keys[i].text, keys[i + 1].text, keys[i].length) == 0:
            dead[keys[i].entry] = 1
    kept = first
    key_at = key_begin = key_ends[first]
    value_at = value_begin = value_ends[first]
    for i in range(count):
        key_end = key_ends[first + i + 1]
        value_end = value_ends[first + i + 1]
        if not dead[i]:
            memmove(entries.keys.data + key_at, entries.keys.data + key_begin, key_end - key_begin)
            memmove(entries.values.data + value_at, entries.values.data + value_begin, value_end - value_begin)
            key_at += key_end - key_begin
            value_at += value_end - value_begin
            kept += 1
            key_ends[kept] = key_at
            value_ends[kept] = value_at
        key_begin = key_end
        value_begin = value_end
    entries.count = kept
    entries.keys.size = key_at
    entries.values.size = value_at
    entries.key_ends.size = entries.value_ends.size = 4 * (<uint64_t>kept + 1)
    free(keys)
    free(dead)
    return 0


cdef int put_headers(const uint8_t* p, uint32_t n, Entries* entries) noexcept nogil:
    """The entries of one message. What is no JSON object is one entry without a name, in base64. -1 without memory."""
    cdef const uint8_t* end = p + n
    cdef const uint8_t* at
    cdef const uint8_t* begin = json_space(p, end)
    cdef int32_t first = entries.count
    if begin == end or begin[0] != c'{' or not json_valid(p, n):
        if put_base64(p, n, &entries.values) != 0:
            return -1
        return entry_done(entries)
    at = json_space(begin + 1, end)
    while at[0] != c'}':
        begin = at + 1
        at = json_string(begin, end)
        if json_unescape(begin, at - 1, &entries.keys) != 0:
            return -1
        at = json_space(json_space(at, end) + 1, end)         # the colon
        begin = at
        at = json_value(at, end)
        if begin[0] == c'"':
            if json_unescape(begin + 1, at - 1, &entries.values) != 0:
                return -1
        elif buffer_put(&entries.values, begin, at - begin) != 0:
            return -1
        if entry_done(entries) != 0:
            return -1
        at = json_space(at, end)
        if at[0] == c',':
            at = json_space(at + 1, end)
    if entries.count - first > FEW_ENTRIES or has_repeated_key(entries, first):
        return drop_repeated_keys(entries, first)
    return 0


# --- the reader -------------------------------------------------------------------------------------------------------

cdef struct Rows:              # the batch that is being filled; columns that are left out stay empty
    int64_t count
    Buffer offset
    Buffer ts
    Buffer protocol
    Buffer topic
    Buffer kind
    Buffer source
    Bits source_bits
    Buffer correlation
    Buffer headers             # int32 offsets into entries
    Bits headers_bits
    Entries entries
    Buffer part_ends
    Bits parts_bits
    Buffer parts
    Buffer payload_ends
    Buffer payload
    Buffer json_ends
    Bits json_bits
    Buffer json


cdef void rows_free(Rows* rows) noexcept nogil:
    buffer_free(&rows.offset)
    buffer_free(&rows.ts)
    buffer_free(&rows.protocol)
    buffer_free(&rows.topic)
    buffer_free(&rows.kind)
    buffer_free(&rows.source)
    buffer_free(&rows.source_bits.bytes)
    buffer_free(&rows.correlation)
    buffer_free(&rows.headers)
    buffer_free(&rows.headers_bits.bytes)
    buffer_free(&rows.entries.key_ends)
    buffer_free(&rows.entries.keys)
    buffer_free(&rows.entries.value_ends)
    buffer_free(&rows.entries.values)
    buffer_free(&rows.part_ends)
    buffer_free(&rows.parts_bits.bytes)
    buffer_free(&rows.parts)
    buffer_free(&rows.payload_ends)
    buffer_free(&rows.payload)
    buffer_free(&rows.json_ends)
    buffer_free(&rows.json_bits.bytes)
    buffer_free(&rows.json)
    memset(rows, 0, sizeof(Rows))


cdef inline int64_t hour_of(int64_t time) noexcept nogil:
    return time // HOUR if time >= 0 else -((HOUR - 1 - time) // HOUR)


cdef class ColumnReader:
    """A cursor over a log that gives its messages as record batches, each of one hour. One thread at a time uses it.

    What the log has lost, to damage or because retention was faster, is in `missing`; this reader goes on behind it.
    """
    cdef LogReader reader
    cdef readonly str node
    cdef readonly str log_id
    cdef readonly object schema            # of the batches
    cdef readonly list missing             # [first, last] offsets that the log has lost, as tuples
    cdef readonly object hour_of_next      # ts of the row that the last batch stopped before, if it is of another hour
    cdef readonly uint64_t row_bytes       # payloads, headers and parts in the last batch
    cdef uint64_t expected                 # everything below was looked at
    cdef bint busy
    cdef object filters                    # a Trie, or None where everything matches
    cdef bint has_protocol, has_topic, has_kind, has_source, has_correlation, has_headers, has_parts, has_payload, has_json
    cdef _Names topics, sources, protocols, nodes, logs
    cdef int64_t hour                      # of the dictionaries and the batch
    cdef Ids topic_ids
    cdef Ids source_ids
    cdef int32_t protocol_ids[256]
    cdef Rows rows
    cdef uint64_t weight                   # what counts for max_bytes: row_bytes and new names
    cdef uint64_t payload_before           # of the last batch: so much room is made at once for the next
    cdef int64_t rows_before

    def __init__(self, path, uint64_t offset=0, *, str node not None, filters=("#",), leave_out=(), bint payload_json=False):
        known = {column.name for column in COLUMNS}
        for name in leave_out:
            if name in KEY_COLUMNS:
                raise ValueError(f"the column {name} cannot be left out: it is part of a row's name")
            if name not in known:
                raise ValueError(f"there is no column {name} to leave out")
        if isinstance(filters, (str, bytes)) or not filters:
            raise ValueError("filters: expected a list with at least one filter")
        for one in filters:
            check_filter(one)
        self.filters = None
        if not any(set(one.split(".")) == {"#"} for one in filters):
            self.filters = Trie()
            for one in filters:
                self.filters.add(one.encode())
        schema = arrow_schema(leave_out, payload_json=payload_json)
        for name in ("node", "log", "protocol", "topic", "source"):
            i = schema.get_field_index(name)
            if i >= 0:
                schema = schema.set(i, schema.field(i).with_type(pyarrow.dictionary(pyarrow.int32(), pyarrow.string())))
        self.schema = schema
        self.has_protocol = "protocol" not in leave_out
        self.has_topic = "topic" not in leave_out
        self.has_kind = "kind" not in leave_out
        self.has_source = "source" not in leave_out
        self.has_correlation = "correlation" not in leave_out
        self.has_headers = "headers" not in leave_out
        self.has_parts = "part_sizes" not in leave_out
        self.has_payload = "payload" not in leave_out
        self.has_json = payload_json
        self.missing = []
        self.node = node
        self.topics, self.sources, self.protocols, self.nodes, self.logs = _Names(), _Names(), _Names(), _Names(), _Names()
        self._forget()
        self.reader = LogReader(path, offset, sync=True)
        self.log_id = self.reader.id.hex()
        self.nodes.place(node.encode())
        self.logs.place(self.log_id.encode())
        self.expected = offset
        self._note_jump(self.reader.offset)

    @property
    def offset(self):
        """The next offset to be looked at: everything below was given in a batch, left out by the filters, or is missing."""
        return self.expected

    def take_missing(self):
        """What was noted in `missing`, which is empty afterwards."""
        taken, self.missing = self.missing, []
        return taken

    def read(self, uint64_t max_rows, uint64_t max_bytes):
        """The next rows that match, all of one hour: at most `max_rows`, and no more behind the one that reaches `max_bytes`.
        None where there is nothing more to read now."""
        cdef uint64_t begin = self.expected
        if max_rows < 1 or max_bytes < 1:
            raise ValueError("a batch has room for at least one row and one byte")
        self._begin()
        known = len(self.missing)
        try:
            self.hour_of_next = None
            self.row_bytes = self.weight = 0
            if self.topics.large() or self.sources.large():
                self._forget()
            self._make_room(min(max_rows, <uint64_t>MOST_ROWS))
            self._fill(min(max_rows, <uint64_t>MOST_ROWS), min(max_bytes, <uint64_t>MOST_BYTES))
            self.payload_before = self.rows.payload.size
            self.rows_before = self.rows.count
            return self._export() if self.rows.count else None
        except BaseException:
            # The rows are not lost: the next batch begins where this one did.
            del self.missing[known:]
            self.expected = begin
            self.reader.go_back(begin)
            self._clear_ids()
            raise
        finally:
            rows_free(&self.rows)
            self.busy = False

    def _begin(self):
        if self.reader is None:
            raise ValueError("the reader is closed")
        if self.busy:
            raise RuntimeError("another thread is using this reader")
        self.busy = True

    def _make_room(self, uint64_t max_rows):
        """As much as the last batch had, so that a steady stream is never moved in memory."""
        cdef Rows* rows = &self.rows
        cdef uint64_t count = min(max_rows, max(<uint64_t>FEW_ROWS, <uint64_t>self.rows_before))
        cdef int rc = buffer_need(&rows.offset, 8 * count) | buffer_need(&rows.ts, 8 * count)
        if self.has_protocol:
            rc |= buffer_need(&rows.protocol, 4 * count)
        if self.has_topic:
            rc |= buffer_need(&rows.topic, 4 * count)
        if self.has_kind:
            rc |= buffer_need(&rows.kind, 4 * count)
        if self.has_source:
            rc |= buffer_need(&rows.source, 4 * count) | buffer_need(&rows.source_bits.bytes, count // 8 + 1)
        if self.has_correlation:
            rc |= buffer_need(&rows.correlation, 8 * count)
        if self.has_headers:
            rc |= buffer_need(&rows.headers_bits.bytes, count // 8 + 1)
            rc |= buffer_need(&rows.headers, 4 * count + 4) | buffer_put_i32(&rows.headers, 0)
            rc |= buffer_put_i32(&rows.entries.key_ends, 0) | buffer_put_i32(&rows.entries.value_ends, 0)
            rc |= buffer_need(&rows.entries.keys, 1) | buffer_need(&rows.entries.values, 1)
        if self.has_parts:
            rc |= buffer_need(&rows.parts_bits.bytes, count // 8 + 1)
            rc |= buffer_need(&rows.part_ends, 4 * count + 4) | buffer_put_i32(&rows.part_ends, 0)
            rc |= buffer_need(&rows.parts, 1)
        if self.has_payload:
            rc |= buffer_need(&rows.payload_ends, 4 * count + 4) | buffer_put_i32(&rows.payload_ends, 0)
            rc |= buffer_need(&rows.payload, self.payload_before + self.payload_before // 16 + 4096)
        if self.has_json:
            rc |= buffer_need(&rows.json_bits.bytes, count // 8 + 1)
            rc |= buffer_need(&rows.json_ends, 4 * count + 4) | buffer_put_i32(&rows.json_ends, 0)
            rc |= buffer_need(&rows.json, 1)
        if rc:
            raise MemoryError

    def _fill(self, uint64_t max_rows, uint64_t max_bytes):
        cdef View view
        cdef bint have = False                 # `view` is a message that was not added yet
        cdef Why why
        cdef int rc
        while True:
            with nogil:
                why = self.fill(&view, have, max_rows, max_bytes)
            have = True
            if why == WHY_STEP:
                rc = self._step(&view)
                if rc == 0:
                    break
                have = not view.record.flags & FLAG_CONTROL
            elif why == WHY_FULL:
                break
            elif why == WHY_JUMP:
                self._note_jump(view.record.offset)
            elif why == WHY_TOPIC:
                self._meet_topic(view.record.topic)
            elif why == WHY_SOURCE:
                self._meet_source(view.record.origin)
            elif why == WHY_PROTOCOL:
                self.protocol_ids[view.record.protocol] = self.protocols.place(
                    _PROTOCOLS[view.record.protocol].encode() if view.record.protocol < len(_PROTOCOLS)
                    else b"protocol-%d" % view.record.protocol)
            elif why == WHY_NEW_HOUR:
                # Another file begins, which need not have the names of the one before.
                self._forget()
                self.weight = 0
                self.hour = hour_of(view.record.time)
            elif why == WHY_OTHER_HOUR:
                self.hour_of_next = view.record.time
                self.reader.take_back(&view)
                break
            else:
                raise MemoryError
        self._note_jump(self.reader.offset)

    cdef Why fill(self, View* view, bint have, uint64_t max_rows, uint64_t max_bytes) noexcept nogil:
        """Adds messages until the GIL is needed: for `view` where the answer says so, which then is given again."""
        cdef const RecordHeader* record
        cdef int32_t topic, source
        cdef int64_t hour
        while True:
            if not have:
                if <uint64_t>self.rows.count >= max_rows or self.weight >= max_bytes:
                    return WHY_FULL
                if not self.reader.glide(view):
                    return WHY_STEP
            have = False
            record = view.record
            if record.offset != self.expected:
                return WHY_JUMP
            topic = ids_get(&self.topic_ids, record.topic)
            if topic == UNKNOWN:
                return WHY_TOPIC
            if topic != NONE:
                hour = hour_of(record.time)
                if hour != self.hour:
                    return WHY_OTHER_HOUR if self.rows.count else WHY_NEW_HOUR
                source = NONE
                if self.has_source and record.origin:
                    source = ids_get(&self.source_ids, record.origin)
                    if source == UNKNOWN:
                        return WHY_SOURCE
                if self.has_protocol and self.protocol_ids[record.protocol] == UNKNOWN:
                    return WHY_PROTOCOL
                if self.add(view, topic, source) != 0:
                    return WHY_MEMORY
            self.expected = record.offset + 1

    cdef int add(self, const View* view, int32_t topic, int32_t source) noexcept nogil:
        """One row; -1 without memory, and then the whole batch is given up."""
        cdef Rows* rows = &self.rows
        cdef const RecordHeader* record = view.record
        cdef uint64_t row = <uint64_t>rows.count
        cdef uint64_t bytes = 0
        cdef bint valid
        if buffer_put_i64(&rows.offset, <int64_t>record.offset) != 0 or buffer_put_i64(&rows.ts, record.time) != 0:
            return -1
        if self.has_protocol and buffer_put_i32(&rows.protocol, self.protocol_ids[record.protocol]) != 0:
            return -1
        if self.has_topic and buffer_put_i32(&rows.topic, topic) != 0:
            return -1
        if self.has_kind and buffer_put_i32(&rows.kind, record.kind) != 0:
            return -1
        if self.has_source and (
            buffer_put_i32(&rows.source, source if source >= 0 else 0) != 0
            or bits_put(&rows.source_bits, row, source >= 0) != 0
        ):
            return -1
        if self.has_correlation and buffer_put_i64(&rows.correlation, <int64_t>record.correlation) != 0:
            return -1
        if self.has_headers:
            valid = view.headers_len != 0
            if valid and put_headers(view.headers, view.headers_len, &rows.entries) != 0:
                return -1
            if buffer_put_i32(&rows.headers, rows.entries.count) != 0 or bits_put(&rows.headers_bits, row, valid) != 0:
                return -1
            bytes += view.headers_len
        if self.has_parts:
            valid = record.flags & FLAG_PARTS != 0
            if valid and buffer_put(&rows.parts, view.parts, 4 * <uint64_t>view.parts_count) != 0:
                return -1
            if (
                buffer_put_i32(&rows.part_ends, <int32_t>(rows.parts.size // 4)) != 0
                or bits_put(&rows.parts_bits, row, valid) != 0
            ):
                return -1
            bytes += 4 * <uint64_t>view.parts_count
        if self.has_payload:
            if (
                buffer_put(&rows.payload, view.payload, view.payload_len) != 0
                or buffer_put_i32(&rows.payload_ends, <int32_t>rows.payload.size) != 0
            ):
                return -1
        if self.has_json:
            valid = json_valid(view.payload, view.payload_len)
            if valid and buffer_put(&rows.json, view.payload, view.payload_len) != 0:
                return -1
            if (
                buffer_put_i32(&rows.json_ends, <int32_t>rows.json.size) != 0
                or bits_put(&rows.json_bits, row, valid) != 0
            ):
                return -1
        if self.has_payload or self.has_json:
            bytes += view.payload_len
        self.row_bytes += bytes
        self.weight += bytes
        rows.count += 1
        return 0

    cdef int _step(self, View* view) except -1:
        """The next record, behind damage if there is some; 0 where there is none now."""
        cdef uint64_t number = self.reader.current.number
        cdef int rc
        PyErr_CheckSignals()
        where = None
        while True:
            try:
                rc = self.reader.step(view)
                break
            except LogDamaged:
                # A segment that cannot be entered is passed by asking again.
                if self.reader.resume() is None and where == (self.reader.current.number, self.reader.current.end):
                    raise
                where = (self.reader.current.number, self.reader.current.end)
        if self.reader.current.number != number:
            self._clear_ids()                  # a segment has its own
        elif rc and view.record.flags & FLAG_CONTROL and (
            (view.record.kind == CONTROL_TOPIC and ids_get(&self.topic_ids, view.record.topic) != UNKNOWN)
            or (view.record.kind == CONTROL_ORIGIN and ids_get(&self.source_ids, view.record.origin) != UNKNOWN)
        ):
            self._clear_ids()
        return rc

    def _note_jump(self, uint64_t offset):
        """Offsets that the log passes over are lost."""
        if offset > self.expected:
            self.missing.append((self.expected, offset - 1))
        self.expected = offset

    def _clear_ids(self):
        ids_free(&self.topic_ids)
        ids_free(&self.source_ids)

    def _forget(self):
        """New dictionaries."""
        cdef int i
        self._clear_ids()
        for i in range(256):
            self.protocol_ids[i] = UNKNOWN
        self.topics.clear()
        self.sources.clear()
        self.protocols.clear()

    def _meet_topic(self, uint32_t id):
        """A topic's first message in this segment."""
        cdef int32_t place = NONE
        cdef uint64_t before = self.topics.text.size
        name = self.reader.topics_.get(id)
        if name is None:
            name = self.reader._name_elsewhere(id) if id else b""
            self.reader.topics_[id] = name
        if self.filters is None or (name and self.filters.matches(name)):
            place = self.topics.place(name) if self.has_topic else 0
        if ids_put(&self.topic_ids, id, place) != 0:
            raise MemoryError
        self.weight += self.topics.text.size - before

    def _meet_source(self, uint32_t id):
        cdef uint64_t before = self.sources.text.size
        text = self.reader.origins_.get(id)
        if ids_put(&self.source_ids, id, self.sources.place(text) if text else NONE) != 0:
            raise MemoryError
        self.weight += self.sources.text.size - before

    # --- handing over ---

    def _export(self):
        cdef ArrowArray batch
        if self._give(&batch) != 0:
            if batch.release != NULL:
                batch.release(&batch)
            raise MemoryError
        try:
            return import_batch(<uintptr_t>&batch, self.schema)
        finally:
            if batch.release != NULL:          # nobody took it
                batch.release(&batch)

    cdef int _give(self, ArrowArray* batch) except -2:
        """The rows as one array; -1 without memory, and then `batch` owns what it got so far."""
        cdef Rows* rows = &self.rows
        cdef int64_t n = rows.count
        cdef ArrowArray* column
        cdef ArrowArray* inner
        cdef int i = 0
        if array_make(batch, n, 1, len(self.schema), False) != 0:
            return -1
        if give_constant(batch.children[0], n, self.nodes) != 0 or give_constant(batch.children[1], n, self.logs) != 0:
            return -1
        if give_plain(batch.children[2], n, &rows.offset) != 0 or give_plain(batch.children[3], n, &rows.ts) != 0:
            return -1
        i = 4
        if self.has_protocol:
            if give_names(batch.children[i], n, &rows.protocol, self.protocols) != 0:
                return -1
            i += 1
        if self.has_topic:
            if give_names(batch.children[i], n, &rows.topic, self.topics) != 0:
                return -1
            i += 1
        if self.has_kind:
            if give_plain(batch.children[i], n, &rows.kind) != 0:
                return -1
            i += 1
        if self.has_source:
            if give_names(batch.children[i], n, &rows.source, self.sources) != 0:
                return -1
            array_give_bits(batch.children[i], &rows.source_bits)
            i += 1
        if self.has_correlation:
            if give_plain(batch.children[i], n, &rows.correlation) != 0:
                return -1
            i += 1
        if self.has_headers:
            column = batch.children[i]
            if array_make(column, n, 2, 1, False) != 0:
                return -1
            array_give_bits(column, &rows.headers_bits)
            array_give(column, 1, &rows.headers)
            inner = column.children[0]
            if (
                array_make(inner, rows.entries.count, 1, 2, False) != 0
                or give_text(inner.children[0], rows.entries.count, &rows.entries.key_ends, &rows.entries.keys) != 0
                or give_text(inner.children[1], rows.entries.count, &rows.entries.value_ends, &rows.entries.values) != 0
            ):
                return -1
            i += 1
        if self.has_parts:
            column = batch.children[i]
            if array_make(column, n, 2, 1, False) != 0:
                return -1
            array_give_bits(column, &rows.parts_bits)
            array_give(column, 1, &rows.part_ends)
            if give_plain(column.children[0], <int64_t>(rows.parts.size // 4), &rows.parts) != 0:
                return -1
            i += 1
        if self.has_payload:
            if give_text(batch.children[i], n, &rows.payload_ends, &rows.payload) != 0:
                return -1
            i += 1
        if self.has_json:
            if give_text(batch.children[i], n, &rows.json_ends, &rows.json) != 0:
                return -1
            array_give_bits(batch.children[i], &rows.json_bits)
            i += 1
        return 0

    # --- the rest ---

    def sync(self):
        """Returns when everything that was read is on disk, so that opening the log after a power cut finds it; OSError
        where that failed."""
        self._begin()
        try:
            self.reader.sync()
        finally:
            self.busy = False

    def close(self):
        """Lets go of the log, without a sync."""
        if self.busy:
            raise RuntimeError("another thread is using this reader")
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __dealloc__(self):
        rows_free(&self.rows)
        ids_free(&self.topic_ids)
        ids_free(&self.source_ids)


cdef int give_plain(ArrowArray* out, int64_t n, Buffer* values) noexcept nogil:
    if array_make(out, n, 2, 0, False) != 0:
        return -1
    array_give(out, 1, values)
    return 0


cdef int give_text(ArrowArray* out, int64_t n, Buffer* ends, Buffer* text) noexcept nogil:
    if array_make(out, n, 3, 0, False) != 0:
        return -1
    array_give(out, 1, ends)
    array_give(out, 2, text)
    return 0


cdef int give_names(ArrowArray* out, int64_t n, Buffer* places, _Names names) noexcept:
    if array_make(out, n, 2, 0, True) != 0:
        return -1
    array_give(out, 1, places)
    return names.copy(out.dictionary)


cdef int give_constant(ArrowArray* out, int64_t n, _Names names) noexcept:
    """The first name in every row."""
    cdef Buffer zeros
    memset(&zeros, 0, sizeof(Buffer))
    if buffer_need(&zeros, 4 * <uint64_t>n) != 0:
        return -1
    memset(zeros.data, 0, 4 * <uint64_t>n)
    if give_names(out, n, &zeros, names) != 0:
        buffer_free(&zeros)
        return -1
    return 0
