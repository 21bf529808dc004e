# The log's C interface: what sessions and the bus append with, and what cursors read. See log.pyx for the format.

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef enum:
    SEGMENT_HEADER = 4096   # first record's position in a segment; one page, so that records and header never share one
    RECORD_HEADER = 48
    MAX_SEGMENT = 0x40000000
    PASSED_ROOM = 16        # segments that a reader keeps until it is told to sync; with more it syncs by itself

cdef enum Appended:         # what append() and append_control() answer
    APPEND_OK = 0
    APPEND_FULL = -1        # no room now: retention or the disk says so, or the next segment is still being prepared
    APPEND_TOO_LARGE = -2   # larger than max_record: it will never fit
    APPEND_FAILED = -3      # a sync has failed: the log takes nothing until it was reopened

cdef enum Flag:             # RecordHeader.flags
    FLAG_PARTS = 1          # the body begins with a count and that many part sizes
    FLAG_CONFIRMED = 2      # its publisher was or will be told that it is safe
    FLAG_MSGPACK = 4        # the payload is one MessagePack value, not opaque bytes
    FLAG_TIMED = 8          # the headers say when and how often queues deliver it, as the bus writes them
    FLAG_ANSWERS = 16       # its publisher may publish to the return paths that its headers name, so answers may go there
    FLAG_CONTROL = 0x8000   # a control record: no offset of its own, never exported

cdef enum Control:          # RecordHeader.kind of control records
    CONTROL_OPEN = 1        # first record of a segment; its offset is the segment's first
    CONTROL_SEAL = 2        # last record of a segment
    CONTROL_TOPIC = 3       # topic id -> name
    CONTROL_ORIGIN = 4      # origin id -> text
    CONTROL_GAP = 5         # stands where damage was found; correlation = how many offsets were lost
    CONTROL_CURSOR = 6      # a saved cursor: correlation = offset, payload = name
    CONTROL_BUS = 16        # 16 and above belong to the bus

cdef enum Event:            # bits that on_event() answers
    EVENT_SAFE = 1
    EVENT_SPACE = 2
    EVENT_FAILED = 4


cdef struct RecordHeader:
    uint32_t crc            # CRC-32C from `length` to the end of the padding, seeded with log id and segment number
    uint32_t length         # of header and body, without padding to 8
    uint64_t offset         # of this message; of the next message for a control record
    int64_t time            # microseconds since the epoch, never going back
    uint64_t correlation    # the sender's own id of the message
    uint32_t topic
    uint32_t origin         # which connection it came from
    uint8_t protocol
    uint8_t kind
    uint16_t flags
    uint32_t headers_len

cdef struct Segment:
    uint64_t number         # never reused: it is the generation that seeds the checksums
    uint8_t* base           # the mapping
    uint64_t size
    uint64_t end            # where the next record goes; final once sealed
    uint64_t first_offset
    uint64_t end_offset     # one past the last message
    int64_t last_time
    uint64_t synced         # up to where a sync has covered it; the sync thread's
    size_t piece            # what its file was written and is faulted in by; see platform.h
    int fd
    uint32_t seed
    int sealed
    void* index             # the bus hangs its positions here

cdef struct Origin:         # one connection, as long as it lives
    uint32_t id
    uint32_t text_len
    uint64_t written        # number of the segment that already has its CONTROL_ORIGIN record
    char* text

ctypedef void (*Filler)(uint8_t* out, const uint8_t* source, uint64_t n) noexcept nogil


cdef struct Message:        # what append() is given; every pointer is borrowed until it returns
    uint32_t topic
    uint8_t protocol
    uint8_t kind
    uint16_t flags
    Origin* origin          # or NULL
    uint64_t correlation
    const uint8_t* headers
    uint32_t headers_len
    uint32_t parts_count
    const uint32_t* parts
    const uint8_t* payload
    uint64_t payload_len
    Filler fill             # NULL, or writes the payload in its place from the `source_len` bytes at `payload`
    uint64_t source_len
    int64_t now
    uint64_t offset         # answered
    uint64_t position       # answered: where in `segment` the record begins
    Segment* segment        # answered

cdef struct View:           # one record, taken apart; pointers into the mapping
    const RecordHeader* record
    const uint8_t* headers
    uint32_t headers_len
    uint32_t parts_count
    const uint32_t* parts
    const uint8_t* payload
    uint64_t payload_len


cdef inline uint64_t padded(uint64_t length) noexcept nogil:
    return (length + 7) & ~<uint64_t>7


cdef inline void view_record(const RecordHeader* record, View* out) noexcept nogil:
    """Takes a record apart whose checksum held; `record.length` bounds everything."""
    cdef const uint8_t* body = <const uint8_t*>record + RECORD_HEADER
    out.record = record
    out.parts_count = 0
    out.parts = NULL
    if record.flags & FLAG_PARTS:
        out.parts_count = (<const uint32_t*>body)[0]
        out.parts = <const uint32_t*>body + 1
        body += 4 + 4 * <uint64_t>out.parts_count
    out.headers = body
    out.headers_len = record.headers_len
    out.payload = body + record.headers_len
    out.payload_len = record.length - (out.payload - <const uint8_t*>record)


cdef struct Name:           # one topic
    char* text
    uint32_t length
    uint32_t hash
    uint64_t written        # number of the segment that already has its CONTROL_TOPIC record


cdef struct State           # shared with the sync and prepare threads; private to log.pyx


cdef class Keeper:
    """Who keeps state that lives in segments (the bus): is asked before one is retired, and told after."""
    cdef int carry(self, Segment* segment, int64_t now) except -1    # 1: go ahead, 0: not now
    cdef int retired(self, Segment* segment) except -1


cdef class Log:
    cdef State* st
    cdef readonly bytes id
    cdef readonly str path
    cdef readonly str sync
    cdef readonly object recovery
    cdef readonly uint64_t max_record      # the largest record that append() takes
    cdef public Keeper keeper
    cdef public double retention_seconds
    cdef readonly bint drop_oldest
    cdef int lock_fd
    cdef bint open
    # the live segments, oldest first; the last one is appended to
    cdef Segment** segments_
    cdef Py_ssize_t segments_count
    cdef Py_ssize_t segments_room
    cdef Segment* active
    cdef uint64_t position                 # in active: where the next record goes
    cdef uint64_t next_offset
    cdef int64_t last_time
    cdef uint64_t published_               # lsn up to which readers may read
    cdef uint64_t sync_counted             # every:N: offset at the last request
    cdef Name* names                       # by topic id; 0 is not a topic
    cdef uint32_t names_count
    cdef uint32_t names_room
    cdef uint32_t* names_hash              # open addressing, topic ids
    cdef uint32_t names_mask
    cdef uint32_t next_origin
    cdef Py_ssize_t max_segments
    cdef dict cursors_                     # saved cursors: name -> [offset, segment number of its record]
    cdef dict holds_                       # name -> offset below which segments may go
    # counters
    cdef uint64_t refused_full
    cdef uint64_t appended_bytes
    cdef uint64_t appended_records
    cdef uint64_t retired_segments
    cdef uint64_t overrun_holds

    cdef int append_message(self, Message* m) noexcept nogil
    cdef int room_for(self, uint64_t whole) noexcept nogil  # an answer of append(): whether so many bytes of records,
                                                            # padded and with names, can be appended one after another
    cdef int append_control(self, uint8_t kind, uint32_t topic, uint32_t origin, uint64_t correlation, uint16_t flags,
                            const uint8_t* headers, uint32_t headers_len,
                            const uint8_t* payload, uint64_t payload_len, int64_t now) noexcept nogil
    cdef void make_readable(self) noexcept nogil
    cdef void ask_sync(self) noexcept nogil
    cdef const char* directory(self) noexcept nogil
    cdef uint64_t lsn(self) noexcept nogil              # where the log ends: (segment number << 40) | position
    cdef uint64_t safe_lsn(self) noexcept nogil         # everything below is safe by the policy
    cdef uint64_t safe_offset(self) noexcept nogil
    cdef uint32_t find_topic(self, const char* text, Py_ssize_t n) noexcept nogil       # 0: unknown
    cdef uint32_t make_topic(self, const char* text, Py_ssize_t n) noexcept nogil       # 0: no memory
    cdef Origin* open_origin(self, bytes text) except NULL
    cdef void close_origin(self, Origin* origin) noexcept
    cdef Segment* segment_of(self, uint64_t offset) noexcept nogil
    cdef RecordHeader* reserve(self, uint64_t length, bint control) noexcept nogil
    cdef int roll(self) noexcept nogil
    cdef int write_name(self, uint32_t topic, int64_t now) noexcept nogil
    cdef int write_origin(self, Origin* origin, int64_t now) noexcept nogil
    cdef void finish(self, RecordHeader* record, uint64_t whole) noexcept nogil
    cdef int add_segment(self, Segment* segment) noexcept nogil
    cdef int maintain(self, int64_t now) except -1
    cdef int put_name(self, uint32_t id, const char* text, Py_ssize_t n) noexcept nogil
    cdef int _activate(self, Segment* segment) except -1
    cdef void _mark_published(self) noexcept nogil
    cdef bint _held(self, Segment* segment) except -1
    cdef bint _carry_cursors(self, Segment* segment, int64_t now) except -1
    cdef int _write_cursor(self, str name, uint64_t offset, int64_t now) except -100
    cdef void _shut(self) noexcept


cdef class LogReader:
    cdef readonly str path
    cdef readonly bytes id
    cdef public bint check                 # verify checksums while reading
    cdef readonly uint64_t overtaken       # offsets that were retired before this reader came to them
    cdef readonly uint64_t lost            # offsets that damage took
    cdef readonly uint64_t offset          # of the next message
    cdef bint syncs                        # its segments are mapped so that it can sync them
    cdef int failed                        # errno of the sync that failed; final
    cdef bint busy                         # at work without the GIL: `current` and `passed` must stay
    cdef Segment current
    cdef bint mapped
    cdef uint64_t readable                 # in current: what glide() knows to be readable
    cdef Segment passed[PASSED_ROOM]       # read to the end, not yet synced
    cdef int passed_count
    cdef uint64_t skipped                  # segments before this one were neither read nor synced; 0: none
    cdef dict topics_                      # topic id -> name, of the current segment
    cdef dict origins_
    cdef int step(self, View* out) except -1            # 1: a record (message or control), 0: nothing more now
    cdef int glide(self, View* out) noexcept nogil      # 1: a message, 0: ask step(), which needs the GIL
    cdef void take_back(self, const View* view) noexcept nogil
    cdef int go_back(self, uint64_t offset) except -1
    cdef int enter(self, uint64_t number) except -1
    cdef int advance(self) except -1
    cdef void leave(self) noexcept
    cdef int pass_on(self) except -1
    cdef int _sync_read(self, Segment* segment) except -1
    cdef int _note_sync(self, int error, uint64_t number) except -1
    cdef void _drop(self) noexcept
    cdef object _record(self, View* view)
