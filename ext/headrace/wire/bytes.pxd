# Reading and writing integers, slices and UTF-8 in memory, shared by all codecs. It knows no protocol, no
# Python object and no owner of memory: every pointer is borrowed from the caller.
#
# Integers are put together byte by byte: that is right on any byte order and any alignment, and compilers
# turn each function into one load or store (with a byte swap where it is needed).

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t


# --- integers at a pointer; the caller has checked that the bytes are there ---------------------------------

cdef inline uint16_t be16(const uint8_t* p) noexcept nogil:
    return <uint16_t>((<uint32_t>p[0] << 8) | p[1])


cdef inline uint32_t be32(const uint8_t* p) noexcept nogil:
    return (<uint32_t>p[0] << 24) | (<uint32_t>p[1] << 16) | (<uint32_t>p[2] << 8) | p[3]


cdef inline uint64_t be64(const uint8_t* p) noexcept nogil:
    return (
        (<uint64_t>p[0] << 56) | (<uint64_t>p[1] << 48) | (<uint64_t>p[2] << 40) | (<uint64_t>p[3] << 32)
        | (<uint64_t>p[4] << 24) | (<uint64_t>p[5] << 16) | (<uint64_t>p[6] << 8) | p[7]
    )


cdef inline uint16_t le16(const uint8_t* p) noexcept nogil:
    return <uint16_t>((<uint32_t>p[1] << 8) | p[0])


cdef inline uint32_t le32(const uint8_t* p) noexcept nogil:
    return (<uint32_t>p[3] << 24) | (<uint32_t>p[2] << 16) | (<uint32_t>p[1] << 8) | p[0]


cdef inline uint64_t le64(const uint8_t* p) noexcept nogil:
    return (
        (<uint64_t>p[7] << 56) | (<uint64_t>p[6] << 48) | (<uint64_t>p[5] << 40) | (<uint64_t>p[4] << 32)
        | (<uint64_t>p[3] << 24) | (<uint64_t>p[2] << 16) | (<uint64_t>p[1] << 8) | p[0]
    )


cdef inline void put_be16(uint8_t* p, uint16_t v) noexcept nogil:
    p[0] = <uint8_t>(v >> 8)
    p[1] = <uint8_t>v


cdef inline void put_be32(uint8_t* p, uint32_t v) noexcept nogil:
    p[0] = <uint8_t>(v >> 24)
    p[1] = <uint8_t>(v >> 16)
    p[2] = <uint8_t>(v >> 8)
    p[3] = <uint8_t>v


cdef inline void put_be64(uint8_t* p, uint64_t v) noexcept nogil:
    p[0] = <uint8_t>(v >> 56)
    p[1] = <uint8_t>(v >> 48)
    p[2] = <uint8_t>(v >> 40)
    p[3] = <uint8_t>(v >> 32)
    p[4] = <uint8_t>(v >> 24)
    p[5] = <uint8_t>(v >> 16)
    p[6] = <uint8_t>(v >> 8)
    p[7] = <uint8_t>v


cdef inline void put_le16(uint8_t* p, uint16_t v) noexcept nogil:
    p[0] = <uint8_t>v
    p[1] = <uint8_t>(v >> 8)


cdef inline void put_le32(uint8_t* p, uint32_t v) noexcept nogil:
    p[0] = <uint8_t>v
    p[1] = <uint8_t>(v >> 8)
    p[2] = <uint8_t>(v >> 16)
    p[3] = <uint8_t>(v >> 24)


cdef inline void put_le64(uint8_t* p, uint64_t v) noexcept nogil:
    p[0] = <uint8_t>v
    p[1] = <uint8_t>(v >> 8)
    p[2] = <uint8_t>(v >> 16)
    p[3] = <uint8_t>(v >> 24)
    p[4] = <uint8_t>(v >> 32)
    p[5] = <uint8_t>(v >> 40)
    p[6] = <uint8_t>(v >> 48)
    p[7] = <uint8_t>(v >> 56)


# --- untrusted bytes: a view that cannot be read past its end -----------------------------------------------

cdef struct View:
    const uint8_t* data     # the next byte not yet read
    Py_ssize_t size         # bytes left from there on


cdef inline View view_of(const void* data, Py_ssize_t size) noexcept nogil:
    cdef View view
    view.data = <const uint8_t*>data
    view.size = size
    return view


# Moves past `n` bytes and returns where they begin; NULL, with the view unmoved, if fewer are left.
cdef inline const uint8_t* view_take(View* view, Py_ssize_t n) noexcept nogil:
    cdef const uint8_t* p = view.data
    if n < 0 or n > view.size:
        return NULL
    view.data += n
    view.size -= n
    return p


# The readers below return 1 and move on, or return 0 and leave both the view and `out` as they were.

cdef inline bint view_slice(View* view, Py_ssize_t n, View* out) noexcept nogil:
    cdef const uint8_t* p = view_take(view, n)
    if p == NULL:
        return 0
    out[0] = view_of(p, n)
    return 1


cdef inline bint view_u8(View* view, uint8_t* out) noexcept nogil:
    cdef const uint8_t* p = view_take(view, 1)
    if p == NULL:
        return 0
    out[0] = p[0]
    return 1


cdef inline bint view_be16(View* view, uint16_t* out) noexcept nogil:
    cdef const uint8_t* p = view_take(view, 2)
    if p == NULL:
        return 0
    out[0] = be16(p)
    return 1


cdef inline bint view_be32(View* view, uint32_t* out) noexcept nogil:
    cdef const uint8_t* p = view_take(view, 4)
    if p == NULL:
        return 0
    out[0] = be32(p)
    return 1


cdef inline bint view_be64(View* view, uint64_t* out) noexcept nogil:
    cdef const uint8_t* p = view_take(view, 8)
    if p == NULL:
        return 0
    out[0] = be64(p)
    return 1


cdef inline bint view_le16(View* view, uint16_t* out) noexcept nogil:
    cdef const uint8_t* p = view_take(view, 2)
    if p == NULL:
        return 0
    out[0] = le16(p)
    return 1


cdef inline bint view_le32(View* view, uint32_t* out) noexcept nogil:
    cdef const uint8_t* p = view_take(view, 4)
    if p == NULL:
        return 0
    out[0] = le32(p)
    return 1


cdef inline bint view_le64(View* view, uint64_t* out) noexcept nogil:
    cdef const uint8_t* p = view_take(view, 8)
    if p == NULL:
        return 0
    out[0] = le64(p)
    return 1


# --- UTF-8 --------------------------------------------------------------------------------------------------

# Whether no byte has its high bit set. Short strings (most topics) take two or three overlapping loads.
cdef inline bint ascii_only(const uint8_t* p, Py_ssize_t n) noexcept nogil:
    cdef uint64_t seen = 0
    cdef Py_ssize_t i = 0
    if n >= 8:
        while i <= n - 8:
            seen |= le64(p + i)
            i += 8
        seen |= le64(p + n - 8)
    elif n >= 4:
        seen = le32(p) | le32(p + n - 4)
    elif n > 0:
        seen = p[0] | p[n >> 1] | p[n - 1]
    return (seen & <uint64_t>0x8080808080808080) == 0


cdef inline bint is_continuation(uint8_t c) noexcept nogil:
    return (c & 0xC0) == 0x80


# Whether the bytes are UTF-8 as RFC 3629 has it: no overlong form, no surrogate, nothing above U+10FFFF.
cdef inline bint utf8_valid(const uint8_t* p, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i = 0
    cdef uint8_t c
    if ascii_only(p, n):
        return 1
    while i < n:
        if n - i >= 8 and (le64(p + i) & <uint64_t>0x8080808080808080) == 0:
            i += 8
            continue
        c = p[i]
        if c < 0x80:
            i += 1
        elif c < 0xC2:      # a continuation byte with nothing before it, or an overlong two-byte form
            return 0
        elif c < 0xE0:
            if n - i < 2 or not is_continuation(p[i + 1]):
                return 0
            i += 2
        elif c < 0xF0:
            if n - i < 3 or not is_continuation(p[i + 1]) or not is_continuation(p[i + 2]):
                return 0
            if c == 0xE0 and p[i + 1] < 0xA0:       # overlong
                return 0
            if c == 0xED and p[i + 1] > 0x9F:       # a surrogate
                return 0
            i += 3
        elif c < 0xF5:
            if (n - i < 4 or not is_continuation(p[i + 1]) or not is_continuation(p[i + 2])
                    or not is_continuation(p[i + 3])):
                return 0
            if c == 0xF0 and p[i + 1] < 0x90:       # overlong
                return 0
            if c == 0xF4 and p[i + 1] > 0x8F:       # above U+10FFFF
                return 0
            i += 4
        else:
            return 0
    return 1
