# Shows the functions of headrace/wire/bytes.pxd to Python, so that tests can call each of them. Nothing else
# uses it; test_bytes.py compiles it.

from headrace.wire.bytes cimport (
    View, ascii_only, be16, be32, be64, le16, le32, le64, put_be16, put_be32, put_be64, put_le16, put_le32,
    put_le64, utf8_valid, view_be16, view_be32, view_be64, view_le16, view_le32, view_le64, view_of,
    view_slice, view_take, view_u8,
)
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t


def get(str name, const uint8_t[::1] data, Py_ssize_t at):
    cdef const uint8_t* p = &data[at]
    if name == "be16":
        return be16(p)
    if name == "be32":
        return be32(p)
    if name == "be64":
        return be64(p)
    if name == "le16":
        return le16(p)
    if name == "le32":
        return le32(p)
    if name == "le64":
        return le64(p)
    raise KeyError(name)


def put(str name, uint64_t value, uint8_t[::1] data, Py_ssize_t at):
    cdef uint8_t* p = &data[at]
    if name == "be16":
        put_be16(p, <uint16_t>value)
    elif name == "be32":
        put_be32(p, <uint32_t>value)
    elif name == "be64":
        put_be64(p, value)
    elif name == "le16":
        put_le16(p, <uint16_t>value)
    elif name == "le32":
        put_le32(p, <uint32_t>value)
    elif name == "le64":
        put_le64(p, value)
    else:
        raise KeyError(name)


def read(bytes data, list steps):
    """Reads fields of a view one after another; each result is a value or None, with the bytes left after it."""
    cdef View view = view_of(<const uint8_t*>data, len(data))
    cdef View piece
    cdef const uint8_t* p
    cdef uint8_t u8
    cdef uint16_t u16
    cdef uint32_t u32
    cdef uint64_t u64
    seen = []
    for name, size in steps:
        value = None
        if name == "take":
            p = view_take(&view, size)
            if p != NULL:
                value = p[:<Py_ssize_t>size]
        elif name == "slice":
            if view_slice(&view, size, &piece):
                value = piece.data[:piece.size]
        elif name == "u8":
            if view_u8(&view, &u8):
                value = u8
        elif name == "be16":
            if view_be16(&view, &u16):
                value = u16
        elif name == "be32":
            if view_be32(&view, &u32):
                value = u32
        elif name == "be64":
            if view_be64(&view, &u64):
                value = u64
        elif name == "le16":
            if view_le16(&view, &u16):
                value = u16
        elif name == "le32":
            if view_le32(&view, &u32):
                value = u32
        elif name == "le64":
            if view_le64(&view, &u64):
                value = u64
        else:
            raise KeyError(name)
        seen.append((value, view.size))
    return seen


def is_utf8(bytes data):
    return bool(utf8_valid(<const uint8_t*>data, len(data)))


def is_ascii(bytes data):
    return bool(ascii_only(<const uint8_t*>data, len(data)))
