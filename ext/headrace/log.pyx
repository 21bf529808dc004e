# cython: freethreading_compatible=False
"""The log: a segmented, append-only, memory-mapped file of records with checksums, synced in groups off the event loop.

It knows nothing of protocols, subscriptions or sockets: it keeps records, says which of them are safe, and gives them
back in order.

A log directory holds

    LOG                      what it is: version, id, when it was made (text)
    LOCK                     held by the one process that writes
    00000000000000000007.seg segments; the number in the name is never reused
    aside/                   damaged segments as they were found, and tails that were cut

A segment is one page of header and then records, each aligned to 8 bytes, little-endian:

    0    8   magic "HEADRACE"
    8    4   version
    12   4   CRC-32C of bytes 16 to 63
    16   16  log id
    32   8   segment number
    40   8   segment size
    48   16  zero
    128  8   readable end: 40 bits of position, 24 bits that check it; stored with release order
    192  32  sync mark A: position u64, offset u64, count u64, CRC-32C u32, zero u32
    224  32  sync mark B
    the rest zero
    4096     records: struct RecordHeader (log.pxd), [part count u32, part sizes u32...], headers, payload, zeros to 8

The first record of a segment is CONTROL_OPEN, the last one CONTROL_SEAL. Each sync leaves a mark, written after the
sync and into the slot that is not the newest: whatever a mark covers was on disk, so damage before it is damage, and
what does not hold after it is a torn tail.
"""

import errno
import json
import os
import secrets
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport ENOENT, ENOMEM, ETIMEDOUT, errno as c_errno
from libc.limits cimport INT_MAX
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset, strncpy
from posix.fcntl cimport O_CREAT, O_EXCL, O_RDWR, open as c_open
from posix.mman cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap
from posix.stat cimport fstat, struct_stat
from posix.unistd cimport close as c_close, unlink as c_unlink


cdef extern from "<stdio.h>" nogil:
    int c_rename "rename"(const char* old, const char* new)

cdef extern from "<sys/file.h>" nogil:
    int flock(int fd, int operation)
    int LOCK_SH, LOCK_EX, LOCK_NB, LOCK_UN

cdef extern from "<fcntl.h>" nogil:
    int O_CLOEXEC

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    ctypedef struct pthread_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, void*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_cond_wait(pthread_cond_t*, pthread_mutex_t*)
    int pthread_cond_signal(pthread_cond_t*)
    int pthread_cond_broadcast(pthread_cond_t*)
    int pthread_cond_destroy(pthread_cond_t*)
    int pthread_join(pthread_t, void**)

cdef extern from "platform.h" nogil:
    uint64_t hr_load_acquire(const uint64_t* p)
    void hr_store_release(uint64_t* p, uint64_t v)
    int hr_load_int(const int* p)
    int hr_peek_int(const int* p)
    void hr_store_int(int* p, int v)
    int hr_swap_int(int* p, int v)
    int hr_or_int(int* p, int v)
    int64_t hr_now_us()
    int64_t hr_monotonic_us()
    int hr_cond_init(pthread_cond_t* cond)
    int hr_cond_wait_until(pthread_cond_t* cond, pthread_mutex_t* lock, int64_t until_us)
    int hr_thread(pthread_t* thread, void* (*run)(void*) noexcept nogil, void* arg)
    int hr_fdatasync(int fd)
    int hr_sync_range(int fd, uint8_t* base, uint64_t start, uint64_t end)
    int hr_sync_dir(const char* path)
    size_t HR_SMALL_PIECE, HR_LARGE_PIECE
    int hr_forget(int fd)
    int hr_fill(int fd, uint64_t start, uint64_t size, size_t piece)
    void hr_prefault(void* base, size_t size, size_t piece)
    void hr_prefetch_write(const void* p, size_t n)
    int hr_wake_open(int* fds)
    void hr_wake(int fd)
    void hr_wake_clear(int fd)
    void hr_wake_close(int* fds)

cdef extern from "crc32c.h" nogil:
    uint32_t (*hr_crc32c)(uint32_t state, const void* data, size_t n)
    uint32_t hr_crc32c_portable(uint32_t state, const void* data, size_t n)
    uint32_t (*hr_crc32c_record)(uint32_t state, const void* record, const void* payload, size_t n)
    void hr_crc32c_setup(int hardware)

hr_crc32c_setup(1)

from headrace.errors import LogDamaged, LogError, LogFailed, LogFull, LogLocked, LogVersion

VERSION = 1

cdef enum:
    FORMAT_VERSION = 1
    AT_CRC = 12
    AT_ID = 16
    AT_NUMBER = 32
    AT_SIZE = 40
    AT_END = 128
    AT_MARK = 192
    MARK_BYTES = 32
    STATIC_BYTES = 64
    MIN_SEGMENT = 65536
    DIR_ROOM = 4096
    PATH_ROOM = 4160
    POOL_ROOM = 256
    RESERVED_SEGMENTS = 1     # prepared ones that only retention may use, to carry forward what is still needed
    UNSURE = 1                # find_record() gave up; no record stands at 1
    CLOSED = -1               # State.failed of a log that was closed
    LAZY_SYNC_US = 1000000    # with sync "always", what nobody waits for is synced this much later,
    LAZY_SYNC_BYTES = 256 << 20         # or, where more than this came meanwhile, more than disks take in that time,
    LAZY_SYNC_LONGEST_US = 10000000     # this much later at the latest: retention may have taken much of it by then
    AHEAD = 2048               # how far before the end of the log its lines are fetched,
    MOST_AHEAD = 1024         # and how much of them at once: beyond it the CPU sees by itself where this goes
    RETRY_PREPARE_US = 500000 # after a segment could not be prepared (disk full), how soon to try again

cdef enum Policy:
    POLICY_ALWAYS = 0
    POLICY_EVERY = 1
    POLICY_INTERVAL = 2
    POLICY_NONE = 3

cdef struct Mark:
    uint64_t position
    uint64_t offset
    uint64_t count
    uint32_t crc
    uint32_t zero

cdef struct State:
    pthread_mutex_t lock
    pthread_cond_t sync_wanted
    pthread_cond_t sync_done
    pthread_cond_t prepare_wanted
    int locks_made
    pthread_t sync_thread
    pthread_t prepare_thread
    int sync_running
    int prepare_running
    int stop
    int wake_fds[2]
    int events                 # Event bits that nobody has fetched yet
    # sync: the loop thread publishes, the sync thread covers
    int policy
    uint64_t every
    int64_t lazy_us            # 0: never by itself
    int sync_asked
    int sync_lazy
    Segment* syncing           # what the sync thread is at work on, without the lock; it must stay
    Segment* sync_target       # the last segment that the sync under way will come to; it must stay too
    Segment* active
    uint64_t active_end        # published position in active
    uint64_t appended          # published offset
    uint64_t synced_offset
    uint64_t synced_lsn
    Segment** sealed           # sealed segments whose last bytes no sync has covered
    Py_ssize_t sealed_count
    Py_ssize_t sealed_room
    int failed                 # errno of the sync that failed, or CLOSED; final
    uint64_t syncs
    uint64_t sync_us
    uint64_t usual_sync        # bytes that a sync covers, a moving average
    uint64_t large_sync        # where that is as much, recycled segments get memory in large pieces
    uint64_t mark_count
    # prepare: segments made ahead of need
    Segment* pool[POOL_ROOM]
    int pool_count
    int pool_target
    Segment* leaving[POOL_ROOM]        # retired, oldest first: to be recycled, or unlinked where the pool is full
    uint64_t leaving_lsn[POOL_ROOM]    # what was carried forward from it ends there, and must be on disk before it goes
    int leaving_count
    int preparing              # one is being made right now
    int carrying               # retention writes what it carries: it may use the reserved segments
    int refusing               # a message found no room since the last change of segments
    uint64_t control_lsn       # where the newest control record ends that says what must survive
    int may_create             # how many new files retention still allows
    uint64_t next_number
    int prepare_error          # errno of the last try, 0 after a success
    uint64_t prepared_new
    uint64_t prepared_recycled
    uint64_t prepared_remade
    uint64_t segment_bytes
    uint8_t id[16]
    char dir[4096]


# --- bytes of the header page ---------------------------------------------------------------------------------------

cdef inline uint64_t checked_end(uint64_t position, uint64_t number) noexcept nogil:
    cdef uint64_t pair[2]
    pair[0] = position
    pair[1] = number
    return position | (<uint64_t>(hr_crc32c(0xffffffff, pair, 16) & 0xffffff) << 40)


cdef inline uint64_t readable_end(const uint8_t* base, uint64_t number) noexcept nogil:
    """The published end, or 0 where its check bits do not hold."""
    cdef uint64_t word = hr_load_acquire(<const uint64_t*>(base + AT_END))
    cdef uint64_t position = word & ((<uint64_t>1 << 40) - 1)
    return position if checked_end(position, number) == word else 0


cdef uint32_t seed_of(const uint8_t* id, uint64_t number) noexcept nogil:
    cdef uint32_t state = hr_crc32c(0xffffffff, id, 16)
    return hr_crc32c(state, &number, 8)


cdef void write_header(uint8_t* base, const uint8_t* id, uint64_t number, uint64_t size) noexcept nogil:
    """A fresh header page: no records, no marks."""
    memset(base, 0, SEGMENT_HEADER)
    memcpy(base, b"HEADRACE", 8)
    (<uint32_t*>(base + 8))[0] = FORMAT_VERSION
    memcpy(base + AT_ID, id, 16)
    (<uint64_t*>(base + AT_NUMBER))[0] = number
    (<uint64_t*>(base + AT_SIZE))[0] = size
    (<uint32_t*>(base + AT_CRC))[0] = hr_crc32c(0xffffffff, base + 16, STATIC_BYTES - 16)
    hr_store_release(<uint64_t*>(base + AT_END), checked_end(SEGMENT_HEADER, number))


cdef bint header_whole(const uint8_t* base) noexcept nogil:
    """Whether this is the header of some segment of some log."""
    return (
        memcmp(base, b"HEADRACE", 8) == 0
        and (<const uint32_t*>(base + 8))[0] == FORMAT_VERSION
        and (<const uint32_t*>(base + AT_CRC))[0] == hr_crc32c(0xffffffff, base + 16, STATIC_BYTES - 16)
    )


cdef bint header_holds(const uint8_t* base, const uint8_t* id, uint64_t number) noexcept nogil:
    return (
        header_whole(base)
        and memcmp(base + AT_ID, id, 16) == 0
        and (<const uint64_t*>(base + AT_NUMBER))[0] == number
    )


cdef bint header_of_another(const uint8_t* base, const uint8_t* id, uint64_t number) noexcept nogil:
    """A segment of this log under a name that is not its number: it was being recycled."""
    return header_holds(base, id, (<const uint64_t*>(base + AT_NUMBER))[0]) and not header_holds(base, id, number)


cdef void write_mark(uint8_t* base, uint32_t seed, uint64_t position, uint64_t offset, uint64_t count) noexcept nogil:
    """Into the slot that the newest mark does not use, so that a torn write loses only itself."""
    cdef Mark mark
    memset(&mark, 0, sizeof(Mark))
    mark.position = position
    mark.offset = offset
    mark.count = count
    mark.crc = hr_crc32c(seed, &mark, 24)
    memcpy(base + AT_MARK + MARK_BYTES * (count & 1), &mark, sizeof(Mark))


cdef int mark_state(const uint8_t* base, uint32_t seed, int slot, Mark* out) noexcept nogil:
    """1: a mark, 0: never written, -1: bytes that are neither."""
    cdef Mark empty
    memset(&empty, 0, sizeof(Mark))
    memcpy(out, base + AT_MARK + MARK_BYTES * slot, sizeof(Mark))
    if memcmp(out, &empty, sizeof(Mark)) == 0:
        return 0
    return 1 if out.crc == hr_crc32c(seed, out, 24) and out.zero == 0 else -1


cdef Mark newest_mark(const uint8_t* base, uint32_t seed) noexcept nogil:
    """The mark that covers most; its position is 0 where there is none."""
    cdef Mark mark, best
    cdef int slot
    memset(&best, 0, sizeof(Mark))
    for slot in range(2):
        if mark_state(base, seed, slot, &mark) == 1 and mark.position > best.position:
            best = mark
    return best


# --- records --------------------------------------------------------------------------------------------------------

cdef inline bint record_holds(const uint8_t* base, uint64_t position, uint64_t limit, uint32_t seed) noexcept nogil:
    """Whether a whole record with a right checksum stands at `position`; its length is bounded before it is believed."""
    cdef const RecordHeader* record
    cdef uint64_t whole, fixed
    if position + RECORD_HEADER > limit:
        return False
    record = <const RecordHeader*>(base + position)
    whole = padded(record.length)
    if record.length < RECORD_HEADER or whole > limit - position:
        return False
    if record.crc != hr_crc32c(seed, <const uint8_t*>record + 4, whole - 4):
        return False
    fixed = RECORD_HEADER + <uint64_t>record.headers_len
    if record.flags & FLAG_PARTS:
        if record.length < RECORD_HEADER + 4:
            return False
        fixed += 4 + 4 * <uint64_t>(<const uint32_t*>(<const uint8_t*>record + RECORD_HEADER))[0]
    return fixed <= record.length


cdef struct Scan:
    uint64_t end               # where the first record that does not hold would begin
    uint64_t first_offset
    uint64_t next_offset
    uint64_t records
    int64_t last_time
    int sealed


cdef void scan_records(
    const uint8_t* base, uint64_t limit, uint64_t size, uint32_t seed, uint64_t start, Scan* scan
) noexcept nogil:
    """Walks whole, valid, continuous records from `start` up to `limit`; `scan` carries what came before, and with no
    records there the first one's offset is believed."""
    cdef const RecordHeader* record
    cdef uint64_t position = start
    scan.sealed = 0
    while record_holds(base, position, limit, seed):
        record = <const RecordHeader*>(base + position)
        if scan.records == 0:
            scan.first_offset = scan.next_offset = record.offset
        elif record.offset != scan.next_offset:
            break
        scan.records += 1
        if record.flags & FLAG_CONTROL:
            if record.kind == CONTROL_GAP:
                scan.next_offset += record.correlation
        else:
            scan.next_offset += 1
        if record.time > scan.last_time:
            scan.last_time = record.time
        position += padded(record.length)
        if record.flags & FLAG_CONTROL and record.kind == CONTROL_SEAL:
            scan.sealed = 1
            break
        if position == size:
            scan.sealed = 1
            break
    scan.end = position


cdef uint64_t find_record(const uint8_t* base, uint64_t limit, uint32_t seed, uint64_t start, uint64_t offset) noexcept nogil:
    """The next position at or after `start` where a valid record stands that may follow `offset`; 0 where there is none.

    Payloads can look like headers, so a checksum is only computed where the offset fits, and not without bound: UNSURE
    is the answer where somebody made them so.
    """
    cdef uint64_t position = start
    cdef uint64_t budget = 16 * limit
    cdef uint64_t whole
    cdef const RecordHeader* record
    while position + RECORD_HEADER <= limit:
        record = <const RecordHeader*>(base + position)
        whole = padded(record.length)
        if (
            record.offset >= offset and record.offset - offset < (<uint64_t>1 << 32)
            and record.length >= RECORD_HEADER and whole <= limit - position
        ):
            if whole > budget:
                return UNSURE
            budget -= whole
            if record_holds(base, position, limit, seed):
                return position
        position += 8
    return 0


cdef uint64_t find_after_damage(const uint8_t* base, uint64_t limit, uint32_t seed, uint64_t at, uint64_t offset) noexcept nogil:
    """Where records go on behind the one at `at` that does not hold, or 0. Where a search cannot tell, the damaged
    record's own length is believed if what stands behind it fits."""
    cdef uint64_t found = find_record(base, limit, seed, at + RECORD_HEADER, offset)
    cdef const RecordHeader* next
    if found != UNSURE:
        return found
    found = at + padded((<const RecordHeader*>(base + at)).length)
    if found >= at + RECORD_HEADER and record_holds(base, found, limit, seed):
        next = <const RecordHeader*>(base + found)
        if next.offset == offset or next.offset == offset + 1:
            return found
    return 0


# --- the two threads ------------------------------------------------------------------------------------------------

cdef inline void raise_event(State* st, int bit) noexcept nogil:
    if not (hr_or_int(&st.events, bit) & bit):
        hr_wake(st.wake_fds[1])


cdef uint64_t unsynced_bytes(State* st) noexcept nogil:
    """How much was appended since the last sync, with the lock held; whole segments count in full. One of an earlier life
    may have been larger than those of this one."""
    cdef uint64_t end = (st.active.number << 40) | hr_load_acquire(&st.active_end)
    cdef uint64_t position = (<uint64_t>1 << 40) - 1
    cdef uint64_t upto = ((end >> 40) - (st.synced_lsn >> 40)) * st.segment_bytes + (end & position)
    return upto - (st.synced_lsn & position) if upto > st.synced_lsn & position else 0


cdef void* sync_main(void* arg) noexcept nogil:
    """Group commit: whatever was published while one fdatasync ran is covered by the next one."""
    cdef State* st = <State*>arg
    cdef Segment* active
    cdef Segment* segment
    cdef uint64_t offset, end, covered
    cdef int error
    cdef int64_t began, lazy_at, lazy_until = 0
    pthread_mutex_lock(&st.lock)
    while True:
        lazy_at = 0
        while not st.stop and not hr_load_int(&st.sync_asked):
            if hr_load_int(&st.sync_lazy):
                if lazy_at == 0:
                    lazy_at = hr_monotonic_us() + st.lazy_us
                    lazy_until = lazy_at - st.lazy_us + LAZY_SYNC_LONGEST_US
                if hr_cond_wait_until(&st.sync_wanted, &st.lock, lazy_at) == ETIMEDOUT:
                    if st.policy != POLICY_ALWAYS or lazy_at >= lazy_until or unsynced_bytes(st) <= LAZY_SYNC_BYTES:
                        break
                    lazy_at += st.lazy_us
            else:
                pthread_cond_wait(&st.sync_wanted, &st.lock)
        if st.stop and not hr_load_int(&st.sync_asked):
            break
        # Exchanges on both sides: who finds a flag set and so wakes nobody has published what is loaded below.
        hr_swap_int(&st.sync_asked, 0)
        hr_swap_int(&st.sync_lazy, 0)
        if st.failed:
            pthread_cond_broadcast(&st.sync_done)
            continue
        active = st.active
        offset = hr_load_acquire(&st.appended)        # before the end: the end then covers at least this offset
        end = hr_load_acquire(&st.active_end)
        if ((active.number << 40) | end) == st.synced_lsn:
            pthread_cond_broadcast(&st.sync_done)
            continue
        st.sync_target = active
        covered = unsynced_bytes(st) if st.synced_lsn else 0      # the first one covers all that was there before
        began = hr_now_us()
        error = 0
        # Sealed segments first, one at a time: one that goes away meanwhile needs no sync any more.
        while st.sealed_count and st.sealed[0] != active and not error:
            segment = st.sealed[0]
            error = sync_segment(st, segment, segment.end, segment.end_offset)
            if not error:
                drop_sealed(st, segment)
                c_close(segment.fd)                    # the mapping is enough from here on: a long log needs few descriptors
                segment.fd = -1
                pthread_cond_broadcast(&st.sync_done)
        if not error:
            error = sync_segment(st, active, end, offset)
        st.sync_target = NULL
        st.syncs += 1
        st.sync_us += <uint64_t>(hr_now_us() - began)
        st.usual_sync += (covered >> 3) - (st.usual_sync >> 3)
        if error:
            hr_store_int(&st.failed, error)
            raise_event(st, EVENT_FAILED)
        else:
            hr_store_release(&st.synced_lsn, (active.number << 40) | end)
            hr_store_release(&st.synced_offset, offset)
            if st.leaving_count:
                pthread_cond_signal(&st.prepare_wanted)
            raise_event(st, EVENT_SAFE)
        pthread_cond_broadcast(&st.sync_done)
    pthread_mutex_unlock(&st.lock)
    return NULL


cdef int sync_segment(State* st, Segment* segment, uint64_t end, uint64_t offset) noexcept nogil:
    """Makes a segment durable up to `end` and leaves a mark. Called with the lock, and lets go of it meanwhile."""
    cdef int error = 0
    st.syncing = segment
    pthread_mutex_unlock(&st.lock)
    if hr_sync_range(segment.fd, segment.base, segment.synced, end) != 0:
        error = c_errno
    else:
        segment.synced = end
        st.mark_count += 1
        write_mark(segment.base, segment.seed, end, offset, st.mark_count)
    pthread_mutex_lock(&st.lock)
    st.syncing = NULL
    return error


cdef void drop_sealed(State* st, Segment* segment) noexcept nogil:
    cdef Py_ssize_t i, kept = 0
    for i in range(st.sealed_count):
        if st.sealed[i] != segment:
            st.sealed[kept] = st.sealed[i]
            kept += 1
    st.sealed_count = kept


cdef void forget_sealed(State* st, Segment* segment) noexcept nogil:
    """Once the name of a retired segment is off the disk, no sync need cover it. Before that it must: a later mark says that
    all below it is there."""
    pthread_mutex_lock(&st.lock)
    while st.syncing == segment or st.sync_target == segment:
        pthread_cond_wait(&st.sync_done, &st.lock)
    drop_sealed(st, segment)
    pthread_mutex_unlock(&st.lock)


cdef void segment_path(State* st, uint64_t number, char* out) noexcept nogil:
    snprintf(out, PATH_ROOM, b"%s/%020llu.seg", st.dir, <unsigned long long>number)


cdef void unmap_segment(Segment* segment) noexcept nogil:
    if segment.base != NULL:
        munmap(segment.base, segment.size)
        segment.base = NULL
    if segment.fd >= 0:
        c_close(segment.fd)
        segment.fd = -1


cdef void free_segment(Segment* segment) noexcept nogil:
    unmap_segment(segment)
    free(segment)


cdef Segment* new_segment(State* st, uint64_t number, int fd, uint64_t size) noexcept nogil:
    """Maps an open file; owns `fd` from here on, also when it fails."""
    cdef Segment* segment = <Segment*>calloc(1, sizeof(Segment))
    if segment == NULL:
        c_close(fd)
        return NULL
    segment.number = number
    segment.fd = fd
    segment.size = size
    segment.seed = seed_of(st.id, number)
    segment.end = SEGMENT_HEADER
    segment.base = <uint8_t*>mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
    if <void*>segment.base == MAP_FAILED:
        segment.base = NULL
        free_segment(segment)
        return NULL
    return segment


cdef size_t wanted_piece(State* st, size_t piece) noexcept nogil:
    """What a segment should be prepared in that was prepared in such pieces before. A sync that covers little would write a
    large piece each time; where syncs are neither, all stays as it is."""
    cdef uint64_t usual = hr_load_acquire(&st.usual_sync)
    if usual >= st.large_sync:
        return HR_LARGE_PIECE
    return HR_SMALL_PIECE if usual < st.large_sync >> 2 else piece


cdef Segment* create_segment(State* st, uint64_t number, int* error) noexcept nogil:
    """A new file under its final name, allocated, zeroed and faulted in; its header synced. Large pieces of memory are had
    more slowly, so a log grows in small ones."""
    cdef char path[PATH_ROOM]
    cdef char temporary[PATH_ROOM]
    cdef uint8_t* page
    cdef Segment* segment
    cdef int fd
    segment_path(st, number, path)
    snprintf(temporary, PATH_ROOM, b"%s/prepare.tmp", st.dir)
    c_unlink(temporary)
    fd = c_open(temporary, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0o600)
    if fd < 0:
        error[0] = c_errno
        return NULL
    error[0] = hr_fill(fd, 0, st.segment_bytes, HR_SMALL_PIECE)
    if error[0]:
        c_close(fd)
        c_unlink(temporary)
        return NULL
    segment = new_segment(st, number, fd, st.segment_bytes)
    if segment == NULL:
        error[0] = ENOMEM
        c_unlink(temporary)
        return NULL
    segment.piece = HR_SMALL_PIECE
    write_header(segment.base, st.id, number, segment.size)
    # The header and where the file's blocks are must be on disk. Its zeros need not: blocks that were never written read
    # as zeros too, and waiting for them would make new segments no faster than the disk.
    if hr_sync_range(fd, segment.base, 0, SEGMENT_HEADER) != 0 or c_rename(temporary, path) != 0 or hr_sync_dir(st.dir) != 0:
        error[0] = c_errno
        free_segment(segment)
        c_unlink(temporary)
        return NULL
    hr_prefault(segment.base, segment.size, HR_SMALL_PIECE)
    return segment


cdef void unlink_segment(State* st, Segment* segment) noexcept nogil:
    """Takes a retired file off the disk, and its memory with it."""
    cdef char path[PATH_ROOM]
    segment_path(st, segment.number, path)
    c_unlink(path)
    hr_sync_dir(st.dir)
    forget_sealed(st, segment)
    free_segment(segment)


cdef int remake_segment(Segment* segment, size_t piece) noexcept nogil:
    """Gives a retired file memory in other pieces, and zeros. Its blocks stay its own, so a full disk is not met."""
    cdef uint8_t* fresh
    munmap(segment.base, segment.size)
    segment.base = NULL
    if hr_forget(segment.fd) != 0 or hr_fill(segment.fd, 0, segment.size, piece) != 0:
        return -1
    fresh = <uint8_t*>mmap(NULL, segment.size, PROT_READ | PROT_WRITE, MAP_SHARED, segment.fd, 0)
    if <void*>fresh == MAP_FAILED:
        return -1
    segment.base = fresh
    segment.piece = piece
    return 0


cdef Segment* recycle_segment(State* st, Segment* segment, uint64_t number) noexcept nogil:
    """A retired file under a new number, or NULL where it had to be unlinked (a reader holds it, or it has another size)."""
    cdef char old[PATH_ROOM]
    cdef char path[PATH_ROOM]
    cdef char temporary[PATH_ROOM]
    cdef char* fresh = path
    cdef size_t piece = wanted_piece(st, segment.piece)
    # That takes about as long as to make small pieces writable again that were synced, and is done once.
    cdef bint remade = segment.piece != piece
    cdef int fd = -1
    segment_path(st, segment.number, old)
    segment_path(st, number, path)
    if remade:
        snprintf(temporary, PATH_ROOM, b"%s/prepare.tmp", st.dir)
        fresh = temporary
    if segment.size == st.segment_bytes:
        fd = c_open(old, O_RDWR | O_CLOEXEC)          # its own one: the sync thread may be about to close the other
    # The new name must be on disk before the first byte changes: else a power cut could leave an old name on new bytes.
    if fd < 0 or flock(fd, LOCK_EX | LOCK_NB) != 0 or c_rename(old, fresh) != 0 or hr_sync_dir(st.dir) != 0:
        if fd >= 0:
            c_close(fd)
        c_unlink(fresh)
        unlink_segment(st, segment)
        return NULL
    forget_sealed(st, segment)
    if segment.fd >= 0:
        c_close(segment.fd)
    segment.fd = fd
    if remade and remake_segment(segment, piece) != 0:
        c_unlink(fresh)
        free_segment(segment)
        return NULL
    write_header(segment.base, st.id, number, segment.size)
    # Its header alone: what else it holds is not wanted any more, and stays writable where it is not written back.
    if hr_sync_range(fd, segment.base, 0, SEGMENT_HEADER) != 0 or (
        remade and (c_rename(temporary, path) != 0 or hr_sync_dir(st.dir) != 0)
    ):
        c_unlink(fresh)
        c_unlink(path)
        free_segment(segment)
        return NULL
    flock(fd, LOCK_UN)
    st.prepared_remade += remade
    segment.number = number
    segment.seed = seed_of(st.id, number)
    segment.end = SEGMENT_HEADER
    segment.first_offset = segment.end_offset = segment.synced = 0
    segment.last_time = 0
    segment.sealed = 0
    segment.index = NULL
    hr_prefault(segment.base, segment.size, segment.piece)
    return segment


cdef void* prepare_main(void* arg) noexcept nogil:
    """Keeps the pool of prepared segments full, so that a full disk is an error here and never in the middle of a write."""
    cdef State* st = <State*>arg
    cdef Segment* old
    cdef Segment* segment
    cdef int64_t retry_at = 0
    cdef int error, recycled, surplus, i
    pthread_mutex_lock(&st.lock)
    while not st.stop:
        old = NULL
        surplus = st.pool_count >= st.pool_target
        if st.leaving_count and st.leaving_lsn[0] <= st.synced_lsn:
            # Oldest first, whatever becomes of it: what a crash leaves is then a run of segments without a hole.
            old = st.leaving[0]
            st.leaving_count -= 1
            for i in range(st.leaving_count):
                st.leaving[i] = st.leaving[i + 1]
                st.leaving_lsn[i] = st.leaving_lsn[i + 1]
        elif not surplus and st.may_create > 0:
            if retry_at > hr_monotonic_us():
                hr_cond_wait_until(&st.prepare_wanted, &st.lock, retry_at)
                continue
            st.may_create -= 1
        else:
            pthread_cond_wait(&st.prepare_wanted, &st.lock)
            continue
        st.preparing = 1
        pthread_mutex_unlock(&st.lock)
        error = recycled = 0
        segment = NULL
        if surplus:
            unlink_segment(st, old)
        else:
            if old != NULL:
                segment = recycle_segment(st, old, st.next_number)
                recycled = segment != NULL
            if segment == NULL:
                segment = create_segment(st, st.next_number, &error)
        pthread_mutex_lock(&st.lock)
        st.preparing = 0
        if segment != NULL:
            if recycled:
                st.prepared_recycled += 1
            else:
                st.prepared_new += 1
            st.next_number += 1
            st.pool[st.pool_count] = segment
            hr_store_int(&st.pool_count, st.pool_count + 1)
            retry_at = 0
        elif not surplus:
            st.may_create += 1
            retry_at = hr_monotonic_us() + RETRY_PREPARE_US
            if error == st.prepare_error:
                continue                               # said before: the loop need not hear of each try
        if not surplus:
            st.prepare_error = error
        raise_event(st, EVENT_SPACE)
    pthread_mutex_unlock(&st.lock)
    return NULL


# --- what Python sees -----------------------------------------------------------------------------------------------

SegmentInfo = namedtuple("SegmentInfo", "number path first_offset end_offset bytes sealed marked", module="headrace.log")
SegmentInfo.__doc__ = "One segment: how far its records reach (`bytes`) and how far a sync mark covers them (`marked`)."
Damage = namedtuple("Damage", "segment position offset lost reason", module="headrace.log")
Damage.__doc__ = "A place that does not hold: segment number, position, the offset expected there, offsets lost, and why."
Recovery = namedtuple("Recovery", "segments records seconds cut_segment cut_position cut_bytes cut_records damage", module="headrace.log")
Recovery.__doc__ = "What opening found: how much was read, the torn tail that was cut (0 bytes: none), and the damage."
Record = namedtuple(
    "Record",
    "offset time topic topic_name protocol kind flags origin origin_name correlation headers parts payload control "
    "segment position",
    module="headrace.log",
)
Record.__doc__ = "One record as `headrace log dump` shows it; `control` ones have no offset of their own."

CONTROL_NAMES = {
    CONTROL_OPEN: "open", CONTROL_SEAL: "seal", CONTROL_TOPIC: "topic", CONTROL_ORIGIN: "origin", CONTROL_GAP: "gap",
    CONTROL_CURSOR: "cursor",
}


def crc32c(data, uint32_t state=0xffffffff, bint portable=False):
    """CRC-32C register over `data`; `portable` uses the implementation for CPUs without an instruction for it."""
    cdef const uint8_t[::1] view = data
    cdef const uint8_t* start = &view[0] if view.shape[0] else NULL
    if portable:
        return hr_crc32c_portable(state, start, view.shape[0])
    return hr_crc32c(state, start, view.shape[0])


def parse_sync(str text):
    """A sync policy, taken apart: ("always", 0), ("every", N), ("interval", milliseconds), ("none", 0)."""
    name, colon, number = text.partition(":")
    if name in ("always", "none") and not colon:
        return name, 0
    if name in ("every", "interval") and number.isdecimal() and 0 < int(number) <= 1_000_000_000:
        return name, int(number)
    raise ValueError(f"sync policy {text!r}: expected always, every:N, interval:MS or none")


def segment_name(uint64_t number):
    return f"{number:020d}.seg"


def list_segments(path):
    """Segment numbers in a log directory, ascending."""
    numbers = []
    for name in os.listdir(path):
        if len(name) == 24 and name.endswith(".seg") and name[:20].isdecimal():
            numbers.append(int(name[:20]))
    return sorted(numbers)


def read_identity(path):
    """The LOG file of a log directory: {"version", "id", "made"}; raises where this is not one, or a newer one."""
    file = os.path.join(path, "LOG")
    try:
        with open(file, encoding="utf-8") as f:
            identity = json.load(f)
        version = int(identity["version"])
        if version != VERSION:
            raise LogVersion(f"{file}: log format version {version}; this headrace reads version {VERSION}")
        if len(bytes.fromhex(identity["id"])) != 16:
            raise ValueError("id is not 16 bytes")
    except FileNotFoundError:
        raise LogError(f"{path} is not a headrace log: it has no LOG file") from None
    except OSError as e:
        raise LogError(f"{path} cannot be read as a headrace log: {e.strerror}") from None
    except (ValueError, KeyError, TypeError) as e:
        raise LogDamaged(f"{file}: not a log's identity ({e})") from None
    return identity


def _sync_directory(path):
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _make_directory(path):
    """Makes a directory and its parents; each new name is on disk before anything is put below it."""
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        os.mkdir(path, 0o700)
        _sync_directory(os.path.dirname(path))


def _write_identity(path):
    identity = {"version": VERSION, "id": secrets.token_hex(16), "made": int(time.time())}
    temporary = os.path.join(path, "LOG.tmp")
    with open(temporary, "w", encoding="utf-8") as f:
        f.write(json.dumps(identity) + "\n")
        f.flush()
        os.fsync(f.fileno())
    os.rename(temporary, os.path.join(path, "LOG"))
    _sync_directory(path)
    return identity


cdef class Keeper:
    cdef int carry(self, Segment* segment, int64_t now) except -1:
        return 1

    cdef int retired(self, Segment* segment) except -1:
        return 0


cdef class Log:
    """The writer's side of a log directory. One thread appends; two others sync and prepare segments.

    `sync` is the policy, `retention_bytes` and `retention_seconds` how much is kept, `on_full` whether a cursor that is
    behind holds back retention ("block") or is overrun ("drop_oldest").
    """

    def __cinit__(self):
        self.lock_fd = -1
        self.active = &nowhere
        self.st = <State*>calloc(1, sizeof(State))
        if self.st == NULL:
            raise MemoryError
        self.st.wake_fds[0] = self.st.wake_fds[1] = -1

    def __init__(self, path, *, str sync="always", uint64_t segment_bytes=64 << 20, int pool_segments=3,
                 uint64_t retention_bytes=4 << 30, double retention_seconds=0, str on_full="block",
                 uint64_t large_sync=16 << 20):
        cdef State* st = self.st
        if segment_bytes < MIN_SEGMENT or segment_bytes > MAX_SEGMENT or segment_bytes % 4096:
            raise ValueError(f"segment_bytes must be a multiple of 4096 from {MIN_SEGMENT} to {MAX_SEGMENT}")
        if self.st.locks_made:
            raise LogError("a Log is opened once; make another one")
        if not 1 <= pool_segments <= 128:
            raise ValueError("pool_segments must be from 1 to 128")
        if on_full not in ("block", "drop_oldest"):
            raise ValueError(f"on_full {on_full!r}: expected block or drop_oldest")
        policy, number = parse_sync(sync)
        self.path = os.path.abspath(os.fspath(path))
        encoded = os.fsencode(self.path)
        if len(encoded) >= DIR_ROOM:
            raise LogError(f"the path of the log is too long: {self.path}")
        self.sync = sync
        self.retention_seconds = retention_seconds
        self.drop_oldest = on_full == "drop_oldest"
        self.cursors_ = {}
        self.holds_ = {}
        self.keeper = Keeper()
        st.policy = {"always": POLICY_ALWAYS, "every": POLICY_EVERY, "interval": POLICY_INTERVAL, "none": POLICY_NONE}[policy]
        st.every = number if st.policy == POLICY_EVERY else 0
        st.lazy_us = LAZY_SYNC_US if st.policy == POLICY_ALWAYS else number * 1000 if st.policy == POLICY_INTERVAL else 0
        st.segment_bytes = segment_bytes
        st.large_sync = large_sync
        st.pool_target = pool_segments + RESERVED_SEGMENTS
        self.max_segments = max(<Py_ssize_t>(retention_bytes // segment_bytes), st.pool_target + 2)
        self.max_record = segment_bytes // 2
        strncpy(st.dir, encoded, DIR_ROOM - 1)
        self.names_room = 1024
        self.names = <Name*>calloc(self.names_room, sizeof(Name))
        self.names_count = 1
        self.names_mask = 4095
        self.names_hash = <uint32_t*>calloc(self.names_mask + 1, sizeof(uint32_t))
        self.next_origin = 1
        if self.names == NULL or self.names_hash == NULL:
            raise MemoryError
        if (
            pthread_mutex_init(&st.lock, NULL) != 0 or hr_cond_init(&st.sync_wanted) != 0
            or hr_cond_init(&st.sync_done) != 0 or hr_cond_init(&st.prepare_wanted) != 0
        ):
            raise MemoryError
        st.locks_made = 1
        try:
            if hr_wake_open(st.wake_fds) != 0:
                raise OSError(c_errno, os.strerror(c_errno), "an event descriptor")
            self._enter_directory()
            self._recover()
            self._start()
        except BaseException as e:
            self._shut()
            if isinstance(e, OSError):
                raise LogError(f"cannot open the log in {self.path}: {e.strerror}") from e
            raise

    def _enter_directory(self):
        """Makes the directory if need be, and its lock ours. Nothing is put into a directory that is something else."""
        _make_directory(self.path)
        if not os.path.exists(os.path.join(self.path, "LOG")):
            if list_segments(self.path):
                raise LogDamaged(f"{self.path} has segments but no LOG file, so their log is unknown")
            others = sorted(set(os.listdir(self.path)) - {"LOCK", "LOG.tmp", "lost+found"})
            if others:
                raise LogError(f"{self.path} is not a headrace log, and not empty: it has {others[0]}")
        self.lock_fd = os.open(os.path.join(self.path, "LOCK"), os.O_CREAT | os.O_RDWR, 0o600)
        if flock(self.lock_fd, LOCK_EX | LOCK_NB) != 0:
            holder = os.read(self.lock_fd, 64).decode(errors="replace").strip()
            raise LogLocked(
                f"{self.path} is already open in this process" if holder == str(os.getpid())
                else f"{self.path} is in use by another process" + (f" (pid {holder})" if holder else ""))
        try:
            # in place, so that it also works on a full disk; what it says is for people, the lock is what counts
            os.pwrite(self.lock_fd, f"{os.getpid():<15}\n".encode(), 0)
        except OSError:
            pass

    # --- opening -----------------------------------------------------------------------------------------------------

    def _recover(self):
        """Reads every segment, repairs what must be repaired, and leaves `segments_` and the pool as they were."""
        cdef State* st = self.st
        began = time.monotonic()
        if os.path.exists(os.path.join(self.path, "LOG")):
            identity = read_identity(self.path)
        else:
            identity = _write_identity(self.path)
        self.id = bytes.fromhex(identity["id"])
        memcpy(st.id, PyBytes_AS_STRING(self.id), 16)
        temporary = os.path.join(self.path, "prepare.tmp")
        if os.path.exists(temporary):
            os.unlink(temporary)

        opener = _Opening(self)
        opener.read()
        opener.repair()
        st.next_number = opener.next_number
        self.recovery = Recovery(
            self.segments_count, opener.records, time.monotonic() - began, opener.cut_segment, opener.cut_position,
            opener.cut_bytes, opener.cut_records, tuple(opener.damage),
        )

    def _start(self):
        """Gives the log a segment to append to and starts its threads."""
        cdef State* st = self.st
        cdef Segment* segment
        cdef int error = 0, i
        if self.segments_count and not self.segments_[self.segments_count - 1].sealed:
            self.active = self.segments_[self.segments_count - 1]
            self.position = self.active.end
            if self.position == SEGMENT_HEADER:
                self._write_open()
        else:
            if st.pool_count:
                segment = st.pool[0]
                st.pool_count -= 1
                for i in range(st.pool_count):
                    st.pool[i] = st.pool[i + 1]
            else:
                with nogil:
                    segment = create_segment(st, st.next_number, &error)
                if segment == NULL:
                    raise LogError(f"cannot make a segment in {self.path}: {os.strerror(error)}")
                st.next_number += 1
            self._activate(segment)
        st.active = self.active
        st.mark_count = newest_mark(self.active.base, self.active.seed).count
        self.sync_counted = self.next_offset
        self._mark_published()
        self._plan()
        if hr_thread(&st.sync_thread, sync_main, st) != 0:
            raise LogError("cannot start the sync thread")
        st.sync_running = 1
        if hr_thread(&st.prepare_thread, prepare_main, st) != 0:
            raise LogError("cannot start the prepare thread")
        st.prepare_running = 1
        self.open = True
        self.sync_now()

    cdef int _activate(self, Segment* segment) except -1:
        if self.add_segment(segment) != 0:
            free_segment(segment)
            raise MemoryError
        self.active = segment
        self.position = SEGMENT_HEADER
        segment.first_offset = segment.end_offset = self.next_offset
        self._write_open()
        return 0

    def _write_open(self):
        if self.append_control(CONTROL_OPEN, 0, 0, 0, 0, NULL, 0, NULL, 0, hr_now_us()) != APPEND_OK:
            raise LogError("a fresh segment has no room for its first record")

    cdef void _mark_published(self) noexcept nogil:
        hr_store_release(<uint64_t*>(self.active.base + AT_END), checked_end(self.position, self.active.number))
        hr_store_release(&self.st.active_end, self.position)
        hr_store_release(&self.st.appended, self.next_offset)
        self.published_ = (self.active.number << 40) | self.position

    cdef int add_segment(self, Segment* segment) noexcept nogil:
        cdef Segment** grown
        if self.segments_count == self.segments_room:
            grown = <Segment**>realloc(self.segments_, (self.segments_room * 2 + 16) * sizeof(Segment*))
            if grown == NULL:
                return -1
            self.segments_ = grown
            self.segments_room = self.segments_room * 2 + 16
        self.segments_[self.segments_count] = segment
        self.segments_count += 1
        return 0

    # --- appending ---------------------------------------------------------------------------------------------------

    cdef RecordHeader* reserve(self, uint64_t length, bint control) noexcept nogil:
        """Room for one record of `length` bytes in the active segment, rolling to the next one as needed; NULL: full.

        Room for the closing CONTROL_SEAL is always kept. While no segment is prepared beyond the reserved one, a part of the
        active one is kept for control records, so that acknowledgements still work and a full log can drain; and the
        reserved one is kept for what retention carries forward, so that acknowledgements cannot be in its way.
        """
        cdef uint64_t whole = padded(length)
        cdef uint64_t kept = RECORD_HEADER
        if not control and hr_load_int(&self.st.pool_count) <= RESERVED_SEGMENTS:
            kept += self.active.size >> 4
        if self.position + whole + kept > self.active.size:
            if self.roll() != 0:
                return NULL
            if not control and hr_load_int(&self.st.pool_count) <= RESERVED_SEGMENTS:
                kept = RECORD_HEADER + (self.active.size >> 4)
            else:
                kept = RECORD_HEADER
            if self.position + whole + kept > self.active.size:
                return NULL
        return <RecordHeader*>(self.active.base + self.position)

    cdef void finish(self, RecordHeader* record, uint64_t whole) noexcept nogil:
        record.crc = hr_crc32c(self.active.seed, <uint8_t*>record + 4, whole - 4)
        self.position += whole
        self.active.end = self.position
        self.appended_bytes += whole

    cdef int roll(self) noexcept nogil:
        """Seals the active segment and opens the next prepared one; -1 where there is none."""
        cdef State* st = self.st
        cdef Segment* old = self.active
        cdef Segment* fresh
        cdef Segment** grown
        cdef RecordHeader* record
        cdef int i
        if hr_load_int(&st.pool_count) <= (0 if st.carrying else RESERVED_SEGMENTS):
            return -1
        if self.segments_count == self.segments_room:
            grown = <Segment**>realloc(self.segments_, (self.segments_room * 2 + 16) * sizeof(Segment*))
            if grown == NULL:
                return -1
            self.segments_ = grown
            self.segments_room = self.segments_room * 2 + 16
        pthread_mutex_lock(&st.lock)
        if st.sealed_count == st.sealed_room:
            grown = <Segment**>realloc(st.sealed, (st.sealed_room * 2 + 64) * sizeof(Segment*))
            if grown == NULL:
                pthread_mutex_unlock(&st.lock)
                return -1
            st.sealed = grown
            st.sealed_room = st.sealed_room * 2 + 64
        fresh = st.pool[0]
        hr_store_int(&st.pool_count, st.pool_count - 1)
        for i in range(st.pool_count):
            st.pool[i] = st.pool[i + 1]

        record = <RecordHeader*>(old.base + self.position)
        memset(record, 0, RECORD_HEADER)
        record.length = RECORD_HEADER
        record.offset = self.next_offset
        record.time = self.last_time
        record.kind = CONTROL_SEAL
        record.flags = FLAG_CONTROL
        record.crc = hr_crc32c(old.seed, <uint8_t*>record + 4, RECORD_HEADER - 4)
        old.end = self.position + RECORD_HEADER
        old.end_offset = self.next_offset
        old.last_time = self.last_time
        old.sealed = 1
        hr_store_release(<uint64_t*>(old.base + AT_END), checked_end(old.end, old.number))
        st.sealed[st.sealed_count] = old
        st.sealed_count += 1

        self.segments_[self.segments_count] = fresh
        self.segments_count += 1
        self.active = fresh
        self.position = SEGMENT_HEADER
        fresh.first_offset = fresh.end_offset = self.next_offset
        record = <RecordHeader*>(fresh.base + SEGMENT_HEADER)
        memset(record, 0, RECORD_HEADER)
        record.length = RECORD_HEADER
        record.offset = self.next_offset
        record.time = self.last_time
        record.kind = CONTROL_OPEN
        record.flags = FLAG_CONTROL
        self.finish(record, RECORD_HEADER)
        st.active = fresh
        self._mark_published()
        st.refusing = 0
        pthread_cond_signal(&st.prepare_wanted)
        pthread_mutex_unlock(&st.lock)
        raise_event(st, EVENT_SPACE)      # the loop's turn to retire old segments
        return 0

    cdef int append_message(self, Message* m) noexcept nogil:
        """One message; it is readable after make_readable(). The caller's bytes are copied once, into the mapping."""
        cdef RecordHeader* record
        cdef uint64_t* words
        cdef uint8_t* body
        cdef uint64_t length = RECORD_HEADER + <uint64_t>m.headers_len + m.payload_len
        cdef uint64_t whole
        cdef int rc
        cdef bint parts = m.parts_count or m.flags & FLAG_PARTS     # none are some, where the flag says so
        if parts:
            length += 4 + 4 * <uint64_t>m.parts_count
        if length > self.max_record:
            return APPEND_TOO_LARGE
        if hr_peek_int(&self.st.failed):
            return APPEND_FAILED
        record = self.reserve(length, False)
        if record == NULL:
            return refuse(self, APPEND_FULL)
        # Names come before their first use in a segment; they may fill it, so the room is looked for again after them.
        while self.names[m.topic].written != self.active.number or (
            m.origin != NULL and m.origin.written != self.active.number
        ):
            rc = APPEND_OK
            if self.names[m.topic].written != self.active.number:
                rc = self.write_name(m.topic, m.now)
            if rc == APPEND_OK and m.origin != NULL and m.origin.written != self.active.number:
                rc = self.write_origin(m.origin, m.now)
            if rc != APPEND_OK:
                return refuse(self, rc)
            record = self.reserve(length, False)
            if record == NULL:
                return refuse(self, APPEND_FULL)
        if m.now > self.last_time:
            self.last_time = m.now
        whole = padded(length)
        words = <uint64_t*>record
        # The next records' lines are not in the cache: a recycled segment was last written long ago. Reading ahead of the
        # end of the mapping is harmless.
        hr_prefetch_write(<uint8_t*>record + whole + AHEAD, min(whole, MOST_AHEAD))
        words[(whole >> 3) - 1] = 0
        # Whole words, as the checksum reads them: see hr_crc32c_record.
        words[0] = length << 32
        words[1] = self.next_offset
        words[2] = <uint64_t>self.last_time
        words[3] = m.correlation
        words[4] = m.topic | (<uint64_t>(m.origin.id if m.origin != NULL else 0) << 32)
        words[5] = (
            m.protocol | (<uint64_t>m.kind << 8) | (<uint64_t>(m.flags | (FLAG_PARTS if parts else 0)) << 16)
            | (<uint64_t>m.headers_len << 32)
        )
        body = <uint8_t*>record + RECORD_HEADER
        if parts or m.headers_len or m.fill != NULL:
            if parts:
                (<uint32_t*>body)[0] = m.parts_count
                if m.parts_count:
                    memcpy(body + 4, m.parts, 4 * <size_t>m.parts_count)
                body += 4 + 4 * <size_t>m.parts_count
            if m.headers_len:
                memcpy(body, m.headers, m.headers_len)
                body += m.headers_len
            if m.fill != NULL:
                m.fill(body, m.payload, m.source_len)
            elif m.payload_len:
                memcpy(body, m.payload, m.payload_len)
            record.crc = hr_crc32c(self.active.seed, <uint8_t*>record + 4, whole - 4)
        else:
            if m.payload_len:
                memcpy(body, m.payload, m.payload_len)
            record.crc = hr_crc32c_record(self.active.seed, record, m.payload, m.payload_len)
        m.offset = self.next_offset
        m.position = self.position
        m.segment = self.active
        self.position += whole
        self.active.end = self.position
        self.appended_bytes += whole
        self.next_offset += 1
        self.active.end_offset = self.next_offset
        self.active.last_time = self.last_time
        self.appended_records += 1
        return APPEND_OK

    cdef int room_for(self, uint64_t whole) noexcept nogil:
        """Whether a batch of messages can be appended as a whole: what does not fit in the active segment any more has to
        fit in the next one."""
        cdef int pool = hr_load_int(&self.st.pool_count)
        cdef uint64_t size = self.active.size
        cdef uint64_t held_back = size >> 4
        if whole + held_back + SEGMENT_HEADER + 4 * RECORD_HEADER > size:
            return APPEND_TOO_LARGE
        if hr_peek_int(&self.st.failed):
            return APPEND_FAILED
        if self.position + whole + RECORD_HEADER + (held_back if pool <= RESERVED_SEGMENTS else 0) <= size:
            return APPEND_OK
        return APPEND_OK if pool > RESERVED_SEGMENTS else refuse(self, APPEND_FULL)

    cdef int append_control(self, uint8_t kind, uint32_t topic, uint32_t origin, uint64_t correlation, uint16_t flags,
                            const uint8_t* headers, uint32_t headers_len,
                            const uint8_t* payload, uint64_t payload_len, int64_t now) noexcept nogil:
        cdef RecordHeader* record
        cdef uint64_t length = RECORD_HEADER + <uint64_t>headers_len + payload_len
        cdef uint64_t whole = padded(length)
        if length > self.max_record + (self.max_record >> 2):      # a message of any size can be carried, with who wants it
            return APPEND_TOO_LARGE
        if hr_peek_int(&self.st.failed):
            return APPEND_FAILED
        record = self.reserve(length, True)
        if record == NULL:
            return APPEND_FULL
        if now > self.last_time:
            self.last_time = now
        (<uint64_t*>(<uint8_t*>record + whole - 8))[0] = 0
        record.length = <uint32_t>length
        record.offset = self.next_offset
        record.time = self.last_time
        record.correlation = correlation
        record.topic = topic
        record.origin = origin
        record.protocol = 0
        record.kind = kind
        record.flags = flags | FLAG_CONTROL
        record.headers_len = headers_len
        if headers_len:
            memcpy(<uint8_t*>record + RECORD_HEADER, headers, headers_len)
        if payload_len:
            memcpy(<uint8_t*>record + RECORD_HEADER + headers_len, payload, payload_len)
        self.finish(record, whole)
        if kind >= CONTROL_CURSOR:
            self.st.control_lsn = self.lsn()
        return APPEND_OK

    cdef int write_name(self, uint32_t topic, int64_t now) noexcept nogil:
        cdef Name* name = &self.names[topic]
        cdef int rc = self.append_control(CONTROL_TOPIC, topic, 0, 0, 0, NULL, 0, <const uint8_t*>name.text, name.length, now)
        if rc == APPEND_OK:
            name.written = self.active.number
        return rc

    cdef int write_origin(self, Origin* origin, int64_t now) noexcept nogil:
        cdef int rc = self.append_control(
            CONTROL_ORIGIN, 0, origin.id, 0, 0, NULL, 0, <const uint8_t*>origin.text, origin.text_len, now)
        if rc == APPEND_OK:
            origin.written = self.active.number
        return rc

    cdef void make_readable(self) noexcept nogil:
        """Publishes what was appended, once a batch, and asks for the sync that the policy wants."""
        cdef State* st = self.st
        if self.published_ == ((self.active.number << 40) | self.position) or hr_peek_int(&st.failed):
            return                        # after a failed sync nothing more is confirmed, whatever the policy
        self._mark_published()
        if st.lazy_us:
            if not hr_swap_int(&st.sync_lazy, 1):
                pthread_mutex_lock(&st.lock)
                pthread_cond_signal(&st.sync_wanted)
                pthread_mutex_unlock(&st.lock)
        elif st.every and self.next_offset - self.sync_counted >= st.every:
            self.sync_counted = self.next_offset
            self.ask_sync()

    cdef void ask_sync(self) noexcept nogil:
        """A sync as soon as the thread is free; those who ask while it is at work share the next one."""
        cdef State* st = self.st
        if not hr_swap_int(&st.sync_asked, 1):
            pthread_mutex_lock(&st.lock)
            pthread_cond_signal(&st.sync_wanted)
            pthread_mutex_unlock(&st.lock)

    cdef const char* directory(self) noexcept nogil:
        return self.st.dir

    cdef uint64_t lsn(self) noexcept nogil:
        return (self.active.number << 40) | self.position

    cdef uint64_t safe_lsn(self) noexcept nogil:
        if self.st.policy == POLICY_ALWAYS:
            return hr_load_acquire(&self.st.synced_lsn)
        return self.published_

    cdef uint64_t safe_offset(self) noexcept nogil:
        if self.st.policy == POLICY_ALWAYS:
            return hr_load_acquire(&self.st.synced_offset)
        return hr_load_acquire(&self.st.appended)

    # --- names -------------------------------------------------------------------------------------------------------

    cdef uint32_t find_topic(self, const char* text, Py_ssize_t n) noexcept nogil:
        cdef uint32_t hash = hr_crc32c(0x9e3779b9, text, n)
        cdef uint32_t slot = hash & self.names_mask
        cdef Name* name
        while self.names_hash[slot]:
            name = &self.names[self.names_hash[slot]]
            if name.hash == hash and name.length == <uint32_t>n and memcmp(name.text, text, n) == 0:
                return self.names_hash[slot]
            slot = (slot + 1) & self.names_mask
        return 0

    cdef uint32_t make_topic(self, const char* text, Py_ssize_t n) noexcept nogil:
        cdef uint32_t id = self.find_topic(text, n)
        # A name, an origin and the largest message must fit in one segment together.
        if id == 0 and <uint64_t>n <= self.max_record >> 1 and self.put_name(self.names_count, text, n) == 0:
            id = self.names_count - 1
        return id

    cdef int put_name(self, uint32_t id, const char* text, Py_ssize_t n) noexcept nogil:
        """Topic `id` is called `text` from here on; ids may come in any order when a log is opened."""
        cdef Name* grown
        cdef Name* name
        cdef char* copy
        cdef uint32_t* table
        cdef uint32_t room, i, slot, mask
        if id >= 0x7fffffff:
            return -1
        if id >= self.names_room:
            room = self.names_room
            while room <= id:
                room *= 2
            grown = <Name*>realloc(self.names, room * sizeof(Name))
            if grown == NULL:
                return -1
            memset(grown + self.names_room, 0, (room - self.names_room) * sizeof(Name))
            self.names = grown
            self.names_room = room
        if text == NULL:                  # an id that is taken, without a name
            self.names_count = max(self.names_count, id + 1)
            return 0
        if <uint64_t>self.names_count * 2 >= self.names_mask:
            mask = self.names_mask * 2 + 1
            table = <uint32_t*>calloc(<size_t>mask + 1, sizeof(uint32_t))
            if table == NULL:
                return -1
            for i in range(1, self.names_count):
                if self.names[i].text != NULL:
                    slot = self.names[i].hash & mask
                    while table[slot]:
                        slot = (slot + 1) & mask
                    table[slot] = i
            free(self.names_hash)
            self.names_hash = table
            self.names_mask = mask
        name = &self.names[id]
        if name.text != NULL:
            return 0
        copy = <char*>malloc(n + 1)
        if copy == NULL:
            return -1
        memcpy(copy, text, n)
        copy[n] = 0
        name.text = copy
        name.length = <uint32_t>n
        name.hash = hr_crc32c(0x9e3779b9, text, n)
        name.written = 0
        slot = name.hash & self.names_mask
        while self.names_hash[slot]:
            slot = (slot + 1) & self.names_mask
        self.names_hash[slot] = id
        if id >= self.names_count:
            self.names_count = id + 1
        return 0

    cdef Origin* open_origin(self, bytes text) except NULL:
        """A new sender: messages that name it carry its id, and `text` stands in each segment that they are in."""
        cdef Py_ssize_t n = min(PyBytes_GET_SIZE(text), 4096)
        cdef Origin* origin = <Origin*>calloc(1, sizeof(Origin) + n + 1)
        if origin == NULL:
            raise MemoryError
        origin.id = self.next_origin
        origin.text = <char*>origin + sizeof(Origin)
        origin.text_len = <uint32_t>n
        memcpy(origin.text, PyBytes_AS_STRING(text), n)
        self.next_origin = self.next_origin + 1 if self.next_origin < 0xffffffff else 1
        return origin

    cdef void close_origin(self, Origin* origin) noexcept:
        free(origin)

    cdef Segment* segment_of(self, uint64_t offset) noexcept nogil:
        """The segment that has `offset`, or the first one after it that has any; NULL beyond the end."""
        cdef Py_ssize_t low = 0, high = self.segments_count, middle
        while low < high:
            middle = (low + high) // 2
            if self.segments_[middle].end_offset <= offset:
                low = middle + 1
            else:
                high = middle
        return self.segments_[low] if low < self.segments_count else NULL

    # --- retention ---------------------------------------------------------------------------------------------------

    def _plan(self):
        """How many new files retention still allows; the prepare thread makes no more than that."""
        cdef State* st = self.st
        cdef Py_ssize_t files
        pthread_mutex_lock(&st.lock)
        files = self.segments_count + st.pool_count + st.leaving_count + st.preparing
        st.may_create = <int>min(max(0, self.max_segments - files), POOL_ROOM)
        if st.leaving_count or (st.may_create and st.pool_count < st.pool_target):
            pthread_cond_signal(&st.prepare_wanted)
        pthread_mutex_unlock(&st.lock)

    cdef int maintain(self, int64_t now) except -1:
        """Retires segments that are due, oldest first, and hands them on to be recycled. Returns how many."""
        cdef State* st = self.st
        cdef Segment* oldest
        cdef Py_ssize_t files, i
        cdef int retired = 0, coming, crowded
        cdef bint held, ready
        while self.segments_count > 1:
            oldest = self.segments_[0]
            pthread_mutex_lock(&st.lock)
            coming = st.pool_count + st.leaving_count + st.preparing
            crowded = st.leaving_count == POOL_ROOM
            pthread_mutex_unlock(&st.lock)
            files = self.segments_count + min(coming, st.pool_target)       # what is beyond that is on its way out
            if crowded or not (
                (files >= self.max_segments and coming < st.pool_target)
                or files > self.max_segments
                or (self.retention_seconds > 0 and now - oldest.last_time > <int64_t>(self.retention_seconds * 1e6))
            ):
                break
            held = self._held(oldest)
            if held and not self.drop_oldest:
                break
            st.carrying = 1
            try:
                ready = self.keeper.carry(oldest, now) and self._carry_cursors(oldest, now)
            finally:
                st.carrying = 0
            if not ready:
                break
            for i in range(self.segments_count - 1):
                self.segments_[i] = self.segments_[i + 1]
            self.segments_count -= 1
            self.keeper.retired(oldest)
            self.retired_segments += 1
            self.overrun_holds += held
            retired += 1
            pthread_mutex_lock(&st.lock)
            st.leaving[st.leaving_count] = oldest
            st.leaving_lsn[st.leaving_count] = st.control_lsn
            st.leaving_count += 1
            pthread_mutex_unlock(&st.lock)
        self.make_readable()
        if retired and st.control_lsn > hr_load_acquire(&st.synced_lsn):
            self.ask_sync()
        self._plan()
        return retired

    cdef bint _held(self, Segment* segment) except -1:
        """Whether somebody still wants messages of a segment."""
        for offset in self.holds_.values():
            if <uint64_t>offset < segment.end_offset:
                return True
        return False

    cdef bint _carry_cursors(self, Segment* segment, int64_t now) except -1:
        for name, saved in list(self.cursors_.items()):
            if saved[1] <= segment.number:
                if self._write_cursor(name, saved[0], now) != APPEND_OK:
                    return False
        return True

    cdef int _write_cursor(self, str name, uint64_t offset, int64_t now) except -100:
        cdef bytes text = name.encode()
        cdef int rc = self.append_control(CONTROL_CURSOR, 0, 0, offset, 0, NULL, 0,
                                          <const uint8_t*>PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text), now)
        if rc == APPEND_OK:
            self.cursors_[name] = (offset, self.active.number)
        return rc

    # --- Python ------------------------------------------------------------------------------------------------------

    @property
    def id_text(self):
        return self.id.hex()

    @property
    def appended(self):
        """The next message's offset: everything below is appended."""
        return self.next_offset

    @property
    def safe(self):
        """Everything below this offset is safe by the sync policy."""
        return self.safe_offset()

    @property
    def synced(self):
        """Everything below this offset was covered by an fdatasync, whatever the policy."""
        return hr_load_acquire(&self.st.synced_offset)

    @property
    def first(self):
        """The oldest offset that is kept."""
        return self.segments_[0].first_offset if self.segments_count else self.next_offset

    @property
    def event_fd(self):
        return self.st.wake_fds[0]

    @property
    def failed(self):
        """Why nothing is confirmed any more, or None."""
        cdef int error = hr_load_int(&self.st.failed)
        return f"sync failed: {os.strerror(error)}" if error > 0 else None

    @property
    def full(self):
        """Why messages cannot be taken now, or None. A segment that is just being prepared is no reason."""
        if not self.open or hr_load_int(&self.st.pool_count) > RESERVED_SEGMENTS or (
            not self.st.refusing and self.position + (self.active.size >> 4) + 4096 < self.active.size
        ):
            return None
        return self._why_full()

    def _why_full(self):
        cdef State* st = self.st
        cdef int error
        pthread_mutex_lock(&st.lock)
        error = st.prepare_error
        coming = st.leaving_count + st.preparing + st.may_create
        if st.pool_count > RESERVED_SEGMENTS:
            coming += 1                                # it came just now
        pthread_mutex_unlock(&st.lock)
        if error:
            return f"cannot prepare a segment: {os.strerror(error)}"
        if coming > 0:
            return None
        held = [f"{name} at offset {offset}" for name, offset in self.holds_.items()
                if self.segments_count and offset < self.segments_[0].end_offset]
        return "retention is reached" + (f" and held back by {', '.join(held)}" if held else "")

    @property
    def cursors(self):
        """Saved cursors: name -> offset."""
        return {name: saved[0] for name, saved in self.cursors_.items()}

    def topic(self, name):
        """The id of a topic, made if it is new."""
        cdef bytes text = name.encode() if isinstance(name, str) else name
        cdef uint32_t id = self.make_topic(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))
        if id == 0:
            if PyBytes_GET_SIZE(text) > <Py_ssize_t>(self.max_record >> 1):
                raise LogError(f"a topic's name of {len(text)} bytes is longer than a quarter of a segment")
            raise MemoryError
        return id

    def topic_name(self, uint32_t id):
        self._check_topic(id)
        return self.names[id].text[:self.names[id].length]

    def append(self, uint32_t topic, payload, *, headers=b"", parts=(), uint8_t protocol=0, uint8_t kind=0,
               uint16_t flags=0, uint64_t correlation=0, now=None):
        """Appends one message and makes it readable; its offset. Raises LogFull, LogFailed, or LogError if too large."""
        cdef Message m
        cdef const uint8_t[::1] body = payload
        cdef const uint8_t[::1] head = headers
        cdef uint32_t* sizes = NULL
        cdef Py_ssize_t i
        self._check_open()
        self._check_topic(topic)
        if head.shape[0] > <Py_ssize_t>self.max_record:
            self._raise(APPEND_TOO_LARGE, head.shape[0])
        memset(&m, 0, sizeof(Message))
        m.topic = topic
        m.payload = &body[0] if body.shape[0] else NULL
        m.payload_len = body.shape[0]
        m.headers = &head[0] if head.shape[0] else NULL
        m.headers_len = <uint32_t>head.shape[0]
        m.protocol = protocol
        m.kind = kind
        m.flags = flags & ~(FLAG_CONTROL | FLAG_PARTS)
        m.correlation = correlation
        m.now = hr_now_us() if now is None else now
        if parts:
            sizes = <uint32_t*>malloc(len(parts) * sizeof(uint32_t))
            if sizes == NULL:
                raise MemoryError
            try:
                for i in range(len(parts)):
                    sizes[i] = parts[i]
            except BaseException:
                free(sizes)
                raise
            m.parts = sizes
            m.parts_count = <uint32_t>len(parts)
        rc = self.append_message(&m)
        free(sizes)
        self._raise(rc, body.shape[0])
        self.make_readable()
        return m.offset

    def append_many(self, uint32_t topic, payloads, Py_ssize_t size, *, now=None):
        """Appends `payloads`, cut into messages of `size` bytes, in one call; how many were taken before the log was full."""
        cdef Message m
        cdef const uint8_t[::1] data = payloads
        cdef Py_ssize_t at = 0, end = data.shape[0]
        cdef Py_ssize_t count = 0
        cdef int rc = APPEND_OK
        if size <= 0 or end % size:
            raise ValueError("the payloads' length must be a multiple of size")
        self._check_open()
        self._check_topic(topic)
        memset(&m, 0, sizeof(Message))
        m.topic = topic
        m.payload_len = size
        m.now = hr_now_us() if now is None else now
        with nogil:
            while at < end:
                m.payload = &data[at]
                rc = self.append_message(&m)
                if rc != APPEND_OK:
                    break
                at += size
                count += 1
            self.make_readable()
        if rc != APPEND_FULL:
            self._raise(rc, size)
        return count

    def _raise(self, int rc, size):
        if rc == APPEND_FULL:
            raise LogFull(self._why_full() or "the next segment is still being prepared")
        if rc == APPEND_FAILED:
            self._check_open()
            raise LogFailed(self.failed)
        if rc == APPEND_TOO_LARGE:
            raise LogError(f"a message of {size} bytes is larger than half a segment ({self.max_record} bytes)")

    def _check_open(self):
        if not self.open:
            raise LogError(f"the log {self.path} is closed")

    def _check_topic(self, uint32_t topic):
        if topic == 0 or topic >= self.names_count or self.names[topic].text == NULL:
            raise KeyError(topic)

    def request_sync(self):
        """Asks for a sync and returns at once."""
        self._check_open()
        self.ask_sync()

    def sync_now(self):
        """Returns when everything appended so far was covered by an fdatasync, whatever the policy."""
        cdef State* st = self.st
        cdef uint64_t target
        self._check_open()
        self.make_readable()
        target = self.lsn()
        with nogil:
            pthread_mutex_lock(&st.lock)
            while not st.failed and st.synced_lsn < target:
                hr_store_int(&st.sync_asked, 1)
                pthread_cond_signal(&st.sync_wanted)
                pthread_cond_wait(&st.sync_done, &st.lock)
            pthread_mutex_unlock(&st.lock)
        if hr_load_int(&st.failed):
            raise LogFailed(self.failed)

    def save_cursor(self, str name, uint64_t offset):
        """Keeps a cursor in the log; the newest one of a name is found again when the log is opened."""
        self._check_open()
        self._raise(self._write_cursor(name, offset, hr_now_us()), 0)
        self.make_readable()

    def hold(self, str name, uint64_t offset):
        """Holds back retention: segments with messages at or after `offset` stay (on_full "block")."""
        self._check_open()
        self.holds_[name] = offset
        self.maintain(hr_now_us())

    def release(self, str name):
        self._check_open()
        self.holds_.pop(name, None)
        self.maintain(hr_now_us())

    def set_retention(self, uint64_t retention_bytes, double retention_seconds):
        self._check_open()
        self.max_segments = max(<Py_ssize_t>(retention_bytes // self.st.segment_bytes), self.st.pool_target + 2)
        self.retention_seconds = retention_seconds
        self.maintain(hr_now_us())

    def on_event(self, now=None):
        """To be called when event_fd is readable: which of SAFE=1, SPACE=2, FAILED=4 happened since the last call."""
        cdef int events
        hr_wake_clear(self.st.wake_fds[0])
        events = hr_swap_int(&self.st.events, 0)
        if events & (EVENT_SPACE | EVENT_SAFE) and self.open:
            self.maintain(hr_now_us() if now is None else now)
        return events

    def tick(self, now=None):
        """Retires what has become too old; to be called now and then."""
        self._check_open()
        return self.maintain(hr_now_us() if now is None else now)

    def segments(self):
        return [
            SegmentInfo(s.number, os.path.join(self.path, segment_name(s.number)), s.first_offset, s.end_offset, s.end,
                        bool(s.sealed), newest_mark(s.base, s.seed).position)
            for s in self.segments_[:self.segments_count]
        ]

    def stats(self):
        """Counters since the log was opened, and where it stands."""
        cdef State* st = self.st
        cdef uint64_t syncs, sync_us, made, recycled, remade
        pthread_mutex_lock(&st.lock)
        syncs, sync_us, made, recycled = st.syncs, st.sync_us, st.prepared_new, st.prepared_recycled
        remade = st.prepared_remade
        pthread_mutex_unlock(&st.lock)
        return {
            "records": self.appended_records, "bytes": self.appended_bytes, "refused_full": self.refused_full,
            "first_offset": self.first, "appended_offset": self.next_offset, "safe_offset": self.safe_offset(),
            "synced_offset": hr_load_acquire(&st.synced_offset), "segments": self.segments_count,
            "segment_bytes": st.segment_bytes, "pool_segments": max(0, hr_load_int(&st.pool_count) - RESERVED_SEGMENTS),
            "max_segments": self.max_segments, "syncs": syncs, "sync_seconds": sync_us / 1e6,
            "prepared_new": made, "prepared_recycled": recycled, "prepared_remade": remade,
            "retired_segments": self.retired_segments, "overrun_holds": self.overrun_holds,
            "topics": self.names_count - 1,
        }

    def reader(self, uint64_t offset=0):
        """A cursor over this log from `offset`; it sees what is readable, and goes on when there is more."""
        return LogReader(self.path, offset)

    def close(self, *, bint sync=True):
        """Syncs (unless told not to), stops the threads, and lets go of the directory."""
        cdef Py_ssize_t i
        if not self.open:
            return
        try:
            if sync and not hr_load_int(&self.st.failed):
                self.sync_now()
                # the marks of that sync reach the disk too, so that the whole log opens as covered
                hr_fdatasync(self.active.fd)
            self.make_readable()
            for i in range(self.segments_count):
                self.keeper.retired(self.segments_[i])
        finally:
            self._shut()

    cdef void _shut(self) noexcept:
        """Stops the threads and gives everything back to the system, once. It touches no Python object, so that
        __dealloc__ may use it."""
        cdef State* st = self.st
        cdef Py_ssize_t i
        self.open = False
        if st.sync_running or st.prepare_running:
            with nogil:
                pthread_mutex_lock(&st.lock)
                st.stop = 1
                pthread_cond_broadcast(&st.sync_wanted)
                pthread_cond_broadcast(&st.prepare_wanted)
                pthread_mutex_unlock(&st.lock)
                if st.sync_running:
                    pthread_join(st.sync_thread, NULL)
                if st.prepare_running:
                    pthread_join(st.prepare_thread, NULL)
            st.sync_running = st.prepare_running = 0
        if not st.failed:
            st.failed = CLOSED
        self.active = &nowhere
        for i in range(self.segments_count):
            free_segment(self.segments_[i])
        for i in range(st.pool_count):
            free_segment(st.pool[i])
        for i in range(st.leaving_count):
            free_segment(st.leaving[i])
        self.segments_count = st.pool_count = st.leaving_count = 0
        hr_wake_close(st.wake_fds)
        if self.lock_fd >= 0:
            c_close(self.lock_fd)
            self.lock_fd = -1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __dealloc__(self):
        cdef uint32_t i
        if self.st != NULL:
            self._shut()
            if self.st.locks_made:
                pthread_cond_destroy(&self.st.sync_wanted)
                pthread_cond_destroy(&self.st.sync_done)
                pthread_cond_destroy(&self.st.prepare_wanted)
                pthread_mutex_destroy(&self.st.lock)
            free(self.st.sealed)
            free(self.st)
        if self.names != NULL:
            for i in range(self.names_count):
                free(self.names[i].text)
            free(self.names)
        free(self.names_hash)
        free(self.segments_)


cdef int refuse(Log log, int rc) noexcept nogil:
    if rc == APPEND_FULL:
        log.refused_full += 1
        log.st.refusing = 1
    return rc


cdef Segment nowhere                   # where a closed log "appends": what still asks where it ends touches no freed memory
memset(&nowhere, 0, sizeof(Segment))


# --- opening and checking a log directory -----------------------------------------------------------------------------

cdef class _Found:
    """One segment file as it was found."""
    cdef Segment* segment
    cdef Scan scan
    cdef Mark mark                     # the newest one; its position is 0 where there is none
    cdef public bint header_good
    cdef public bint other_number      # a good header of this log, but of another segment: it was being recycled
    cdef public bint foreign           # a good header, but of another log
    cdef public uint64_t published     # 0 where it does not hold
    cdef public bint kept              # a copy of it is in aside/

    cdef int look(self, const uint8_t* id) except -1:
        """Reads the header page."""
        cdef Segment* segment = self.segment
        self.header_good = header_holds(segment.base, id, segment.number)
        self.other_number = header_of_another(segment.base, id, segment.number)
        self.foreign = header_whole(segment.base) and not self.header_good and not self.other_number
        self.mark = newest_mark(segment.base, segment.seed)
        self.published = readable_end(segment.base, segment.number)
        if self.published > segment.size:
            self.published = 0
        return 0

    def scan_all(self):
        self.scan_to(self.segment.size)

    cdef int scan_to(self, uint64_t limit) except -1:
        cdef Segment* segment = self.segment
        memset(&self.scan, 0, sizeof(Scan))
        with nogil:
            scan_records(segment.base, limit, segment.size, segment.seed, SEGMENT_HEADER, &self.scan)
        return 0

    @property
    def number(self):
        return self.segment.number

    @property
    def records(self):
        return self.scan.records

    @property
    def marked(self):
        return self.mark.position

    def __dealloc__(self):
        if self.segment != NULL:
            free_segment(self.segment)


cdef _Found find_segment(const uint8_t* id, str path, uint64_t number, bint writable):
    """Maps one segment file and looks at its header; a short file is made whole first if `writable`."""
    cdef _Found found = _Found()
    cdef struct_stat info
    cdef uint64_t size
    cdef int fd, error
    file = os.path.join(path, segment_name(number))
    fd = os.open(file, os.O_RDWR if writable else os.O_RDONLY)
    if fstat(fd, &info) != 0:
        error = c_errno
        c_close(fd)
        raise OSError(error, os.strerror(error), file)
    size = <uint64_t>info.st_size
    if writable and (size < MIN_SEGMENT or size % 4096):
        size = max(<uint64_t>MIN_SEGMENT, (size + 4095) & ~<uint64_t>4095)
        error = hr_fill(fd, <uint64_t>info.st_size, size, HR_SMALL_PIECE)
        if error:
            c_close(fd)
            raise OSError(error, os.strerror(error), file)
    elif size < SEGMENT_HEADER:
        c_close(fd)
        raise LogDamaged(f"{segment_name(number)} has only {size} bytes")
    found.segment = <Segment*>calloc(1, sizeof(Segment))
    if found.segment == NULL:
        c_close(fd)
        raise MemoryError
    found.segment.number = number
    found.segment.fd = fd
    found.segment.size = size
    found.segment.piece = HR_SMALL_PIECE
    found.segment.seed = seed_of(id, number)
    found.segment.base = <uint8_t*>mmap(NULL, size, PROT_READ | (PROT_WRITE if writable else 0), MAP_SHARED, fd, 0)
    if <void*>found.segment.base == MAP_FAILED:
        error = c_errno
        found.segment.base = NULL
        raise OSError(error, os.strerror(error), file)
    found.look(id)
    return found


cdef list header_problems(_Found found, uint64_t expected, int tries):
    """What does not hold in a header page. A mark is looked at `tries` more times: a writer may be at it right now, and
    what is torn for a moment is whole in the next."""
    cdef const uint8_t* base = found.segment.base
    cdef Mark mark
    cdef int slot, state
    cdef uint64_t i, low, high
    cdef list problems = []
    if not found.header_good:
        problems.append(Damage(found.number, 0, expected, 0, "the segment's header does not hold"))
    if found.published == 0:
        problems.append(Damage(found.number, AT_END, expected, 0, "the segment's readable end does not hold"))
    for slot in range(2):
        state = mark_state(base, found.segment.seed, slot, &mark)
        for _ in range(tries):
            if state >= 0:
                break
            time.sleep(0.001)
            state = mark_state(base, found.segment.seed, slot, &mark)
        if state < 0:
            problems.append(Damage(found.number, AT_MARK + MARK_BYTES * slot, expected, 0, "a sync mark does not hold"))
    for low, high in ((STATIC_BYTES, AT_END), (AT_END + 8, AT_MARK), (AT_MARK + 2 * MARK_BYTES, SEGMENT_HEADER)):
        for i in range(low, high):
            if base[i]:
                problems.append(Damage(found.number, i, expected, 0, "a byte of the header that is unused is not zero"))
                break
    return problems


cdef class _Opening:
    """Reads a log directory for the writer, and repairs it. Nothing is thrown away: what has to go is kept in aside/."""
    cdef Log log
    cdef list found
    cdef public uint64_t records, cut_segment, cut_position, cut_bytes, cut_records, next_number
    cdef public list damage

    def __init__(self, Log log):
        self.log = log
        self.found = []
        self.damage = []

    def read(self):
        for number in list_segments(self.log.path):
            self.found.append(find_segment(self.log.st.id, self.log.path, number, True))
        if self.found:
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                list(pool.map(_Found.scan_all, self.found))

    def repair(self):
        cdef _Found found
        cdef Log log = self.log
        cdef uint64_t expected = 0, covered, following, previous = 0
        cdef bint known, cut = False
        cdef Py_ssize_t i, last_data = -1, marked = -1
        for i in range(len(self.found)):
            found = self.found[i]
            if found.foreign:
                owner = PyBytes_FromStringAndSize(<char*>found.segment.base + AT_ID, 16).hex()
                raise LogDamaged(f"{segment_name(found.number)} belongs to log {owner}, but this is log {log.id_text}")
            if found.records or found.marked:
                last_data = i
            if found.marked:
                marked = i
        data = self.found[:last_data + 1]
        spare = self.found[last_data + 1:]
        known = bool(data) and data[0].number == 1        # whether `expected` is known: a log begins with segment 1, offset 0
        for i in range(len(data)):
            found = data[i]
            if cut:
                self._set_segment_aside(found, expected)
                continue
            if found.other_number and not found.records:
                raise LogDamaged(
                    f"{segment_name(found.number)} has the header of another segment in the middle of the log")
            if previous and found.number != previous + 1:
                self.damage.append(Damage(
                    previous + 1, 0, expected, 0, "the segment is missing" if found.number == previous + 2 else
                    f"the segments from here to {found.number - 1} are missing"))
            previous = found.number
            if known and found.records and found.scan.first_offset != expected:
                if i > marked:
                    cut = True                      # what lies between was never synced
                    self._set_segment_aside(found, expected)
                    continue
                self.damage.append(Damage(
                    found.number, SEGMENT_HEADER, expected,
                    found.scan.first_offset - expected if found.scan.first_offset > expected else 0,
                    "offsets are missing before this segment"))
            problems = header_problems(found, expected, 0)
            if problems:
                self._keep_copy(found)
                self.damage.extend(problems)
                self._mend_header(found)
            covered = found.segment.size if i < marked else min(found.mark.position, found.segment.size)
            following = 0
            if i < marked:
                following = next(((<_Found>f).scan.first_offset for f in data[i + 1:] if f.records), 0)
            self._mend_records(found, covered, expected, following, known)
            if found.records:
                expected = found.scan.next_offset
                known = True
            if not found.scan.sealed:
                cut = True
                self._cut_tail(found, expected)
            self._adopt(found, i >= marked)
        log.next_offset = expected
        self.next_number = log.segments_[log.segments_count - 1].number + 1 if log.segments_count else 1
        self._keep_spare(spare, expected)
        self._load()

    cdef int _adopt(self, _Found found, bint unsure) except -1:
        """Makes a segment the log's own; `unsure` ones may have bytes that no sync of an earlier life has covered."""
        cdef Segment* segment = found.segment
        cdef bint changed = found.kept
        segment.end = found.scan.end
        segment.sealed = found.scan.sealed
        segment.first_offset = found.scan.first_offset
        segment.end_offset = found.scan.next_offset
        segment.last_time = found.scan.last_time
        if readable_end(segment.base, segment.number) != segment.end:
            hr_store_release(<uint64_t*>(segment.base + AT_END), checked_end(segment.end, segment.number))
            changed = True
        if (changed or unsure) and hr_fdatasync(segment.fd) != 0:
            raise OSError(c_errno, os.strerror(c_errno), segment_name(segment.number))
        if segment.sealed:
            c_close(segment.fd)
            segment.fd = -1
        self.records += found.records
        if self.log.add_segment(segment) != 0:
            raise MemoryError
        found.segment = NULL
        return 0

    cdef int _mend_header(self, _Found found) except -1:
        """A fresh header page that keeps the marks that hold."""
        cdef Segment* segment = found.segment
        cdef Mark marks[2]
        cdef int states[2]
        cdef int slot
        for slot in range(2):
            states[slot] = mark_state(segment.base, segment.seed, slot, &marks[slot])
        write_header(segment.base, self.log.st.id, segment.number, segment.size)
        for slot in range(2):
            if states[slot] == 1:
                memcpy(segment.base + AT_MARK + MARK_BYTES * slot, &marks[slot], sizeof(Mark))
        return 0

    cdef int _mend_records(self, _Found found, uint64_t covered, uint64_t expected, uint64_t following, bint known) except -1:
        """Replaces each stretch that does not hold, and that a mark covers, by one CONTROL_GAP record."""
        cdef Segment* segment = found.segment
        cdef Scan* scan = &found.scan
        cdef uint64_t at, resume, lost, offset
        if scan.records == 0:
            scan.first_offset = scan.next_offset = expected
            scan.end = SEGMENT_HEADER
        while not scan.sealed and scan.end < covered:
            at = scan.end
            self._keep_copy(found)
            with nogil:
                resume = find_after_damage(segment.base, segment.size, segment.seed, at, scan.next_offset)
            if resume:
                offset = (<const RecordHeader*>(segment.base + resume)).offset
                if scan.records == 0 and not known:
                    scan.first_offset = scan.next_offset = offset
                lost = offset - scan.next_offset
            else:
                resume = covered
                offset = following if covered == segment.size and following else found.mark.offset
                lost = offset - scan.next_offset if offset > scan.next_offset else 0
            self.damage.append(Damage(segment.number, at, scan.next_offset, lost, "the record does not hold"))
            write_gap(segment, at, resume, scan, lost)
            if resume == segment.size:
                scan.sealed = 1
                break
            with nogil:
                scan_records(segment.base, segment.size, segment.size, segment.seed, resume, scan)
        return 0

    cdef int _cut_tail(self, _Found found, uint64_t expected) except -1:
        """Ends the log at the last whole record. What stood behind it in this segment is kept aside and zeroed, so that no
        record of it can ever follow a new one."""
        cdef Segment* segment = found.segment
        cdef uint64_t at = found.scan.end
        cdef uint64_t count = 0
        cdef uint64_t last = max(leftovers(segment, at, expected, &count), found.published)
        if last <= at:
            return 0
        self.cut_segment = segment.number
        self.cut_position = at
        self.cut_bytes += last - at
        self.cut_records += count
        self._keep(f"{segment.number:020d}-{at}.tail", segment.base + at, last - at)
        memset(segment.base + at, 0, segment.size - at)
        return 0

    cdef int _keep(self, str name, const uint8_t* data, uint64_t size) except -1:
        """Puts bytes aside, all the way to the disk before anything else changes."""
        directory = os.path.join(self.log.path, "aside")
        _make_directory(directory)
        stem, _, ending = name.rpartition(".")
        file = os.path.join(directory, name)
        count = 1
        while os.path.exists(file):
            count += 1
            file = os.path.join(directory, f"{stem}-{count}.{ending}")
        with open(file, "xb") as f:
            f.write(<const uint8_t[:size]>data)
            f.flush()
            os.fsync(f.fileno())
        _sync_directory(directory)
        return 0

    cdef int _keep_copy(self, _Found found) except -1:
        """The segment as it was found, once."""
        if not found.kept:
            self._keep(segment_name(found.number), found.segment.base, found.segment.size)
            found.kept = True
        return 0

    cdef int _set_segment_aside(self, _Found found, uint64_t expected) except -1:
        """A segment behind a torn tail: nothing in it was ever safe, and its offsets will be used again."""
        cdef Segment* segment = found.segment
        cdef uint64_t count = 0
        cdef uint64_t last = max(leftovers(segment, SEGMENT_HEADER, expected, &count), found.published)
        if self.cut_segment == 0:
            self.cut_segment, self.cut_position = found.number, SEGMENT_HEADER
        self.cut_bytes += last - SEGMENT_HEADER
        self.cut_records += count
        self._keep_copy(found)
        self._remove(found)
        return 0

    cdef int _remove(self, _Found found) except -1:
        number = found.number
        free_segment(found.segment)
        found.segment = NULL
        os.unlink(os.path.join(self.log.path, segment_name(number)))
        _sync_directory(self.log.path)
        return 0

    cdef int _keep_spare(self, list spare, uint64_t expected) except -1:
        """Prepared segments go back to the pool, as far as they follow on. One that a torn tail had reached is set aside:
        under the same number its leftovers would count again."""
        cdef State* st = self.log.st
        cdef _Found found
        cdef Segment* segment
        cdef uint64_t count = 0
        for found in spare:
            segment = found.segment
            if found.header_good and (
                found.published > SEGMENT_HEADER
                or leftovers(segment, SEGMENT_HEADER, expected, &count) > SEGMENT_HEADER
            ):
                self._set_segment_aside(found, expected)
            elif (
                found.header_good and segment.number == self.next_number and segment.size == st.segment_bytes
                and st.pool_count < st.pool_target
            ):
                write_header(segment.base, st.id, segment.number, segment.size)
                hr_prefault(segment.base, segment.size, HR_SMALL_PIECE)
                found.segment = NULL
                st.pool[st.pool_count] = segment
                st.pool_count += 1
                self.next_number += 1
            else:
                self._remove(found)
        return 0

    cdef int _load(self) except -1:
        """Names and saved cursors, from the control records."""
        cdef Log log = self.log
        cdef Segment* segment
        cdef RecordHeader* record
        cdef View view
        cdef uint64_t position
        cdef uint32_t topics = 0
        cdef Py_ssize_t i
        for i in range(log.segments_count):
            segment = log.segments_[i]
            log.last_time = max(log.last_time, segment.last_time)
            position = SEGMENT_HEADER
            while position < segment.end:
                record = <RecordHeader*>(segment.base + position)
                position += padded(record.length)
                if record.origin >= log.next_origin:
                    log.next_origin = record.origin + 1 if record.origin < 0xffffffff else 1
                if record.topic > topics:
                    topics = record.topic
                if not record.flags & FLAG_CONTROL:
                    continue
                view_record(record, &view)
                if record.kind == CONTROL_TOPIC:
                    if record.topic == 0 or log.put_name(record.topic, <const char*>view.payload, view.payload_len) != 0:
                        raise LogDamaged(f"{segment_name(segment.number)}: a topic's name does not fit")
                    log.names[record.topic].written = segment.number
                elif record.kind == CONTROL_CURSOR:
                    name = view.payload[:view.payload_len].decode(errors="replace")
                    log.cursors_[name] = (record.correlation, segment.number)
        # An id whose name was lost with a damaged record is still in use: it must not become another topic's.
        if topics >= log.names_count and log.put_name(topics, NULL, 0) != 0:
            raise MemoryError
        return 0


cdef uint64_t leftovers(Segment* segment, uint64_t at, uint64_t expected, uint64_t* messages) noexcept nogil:
    """How far records reach that may stand somewhere behind `at`, or `at`; adds up the messages among them."""
    cdef uint64_t last = at
    cdef uint64_t position = find_record(segment.base, segment.size, segment.seed, at, expected)
    while position > UNSURE:
        if not (<RecordHeader*>(segment.base + position)).flags & FLAG_CONTROL:
            messages[0] += 1
        last = position + padded((<RecordHeader*>(segment.base + position)).length)
        position = find_record(segment.base, segment.size, segment.seed, last, expected)
    return segment.size if position == UNSURE else last


cdef void write_gap(Segment* segment, uint64_t at, uint64_t resume, Scan* scan, uint64_t lost) noexcept nogil:
    """One control record over a stretch that does not hold."""
    cdef RecordHeader* record = <RecordHeader*>(segment.base + at)
    memset(record, 0, resume - at)
    record.length = <uint32_t>(resume - at)
    record.offset = scan.next_offset
    record.time = scan.last_time
    record.correlation = lost
    record.kind = CONTROL_GAP
    record.flags = FLAG_CONTROL
    record.crc = hr_crc32c(segment.seed, <uint8_t*>record + 4, resume - at - 4)
    scan.records += 1
    scan.next_offset += lost
    scan.end = resume


Verified = namedtuple("Verified", "segments records messages first_offset end_offset problems", module="headrace.log")
Verified.__doc__ = "What verify() read, and its problems as Damage tuples."


def verify(path):
    """Checks every byte of a log directory without changing it, also while it is written; all problems that it has."""
    cdef _Found found
    cdef Scan scan
    cdef Segment* segment
    cdef const uint8_t* own
    cdef uint64_t at, resume, limit, expected = 0, records = 0, messages = 0, opened = 0, previous = 0
    cdef bint known = False
    path = os.path.abspath(os.fspath(path))
    id = bytes.fromhex(read_identity(path)["id"])
    own = <const uint8_t*>PyBytes_AS_STRING(id)
    problems = []
    start = None
    numbers = list_segments(path)
    last, marked = _reach(path, id, numbers)
    for number in numbers:
        try:
            found = find_segment(own, path, number, False)
        except FileNotFoundError:
            previous, known = 0, False               # retired since it was listed, and so were those before it
            continue
        except LogDamaged as e:
            problems.append(Damage(number, 0, expected, 0, str(e)))
            previous = number
            continue
        segment = found.segment
        with nogil:
            flock(segment.fd, LOCK_SH)
        if not os.path.exists(os.path.join(path, segment_name(number))):
            previous, known = 0, False
            continue
        found.look(own)
        if number > last and found.other_number:
            continue                                 # on its way from one number to another when the writer stopped
        if previous and number != previous + 1:
            problems.append(Damage(
                previous + 1, 0, expected, 0, "the segment is missing" if number == previous + 2 else
                f"the segments from here to {number - 1} are missing"))
        previous = number
        problems.extend(header_problems(found, expected, 5))
        if number > last:
            continue
        opened += 1
        limit = found.published if number == last and found.published else segment.size
        found.scan_to(limit)
        scan = found.scan
        if number == 1:
            known = True
        if scan.records == 0:
            scan.first_offset = scan.next_offset = expected
            scan.end = SEGMENT_HEADER
        elif known and scan.first_offset != expected:
            problems.append(Damage(
                number, SEGMENT_HEADER, expected, scan.first_offset - expected if scan.first_offset > expected else 0,
                "offsets are missing before this segment"))
        at = SEGMENT_HEADER
        while True:
            for position, lost, offset in _gaps(segment, at, scan.end):
                problems.append(Damage(number, position, offset, lost, "damage that was found and set aside earlier"))
            at = scan.end
            if scan.sealed or at >= (min(found.mark.position, limit) if number == last and not found.published else limit):
                break
            with nogil:
                resume = find_after_damage(segment.base, limit, segment.seed, at, scan.next_offset)
            if resume:
                offset = (<const RecordHeader*>(segment.base + resume)).offset
                if scan.records == 0 and not known:
                    scan.first_offset = scan.next_offset = offset
            elif number < last:
                offset = _first_offset(path, id, numbers, number)
            else:
                offset = found.mark.offset
            lost = offset - scan.next_offset if offset > scan.next_offset else 0
            problems.append(Damage(
                number, at, scan.next_offset, lost,
                "the record does not hold" if number < marked or at < found.marked
                else "the record does not hold, and no sync mark covers it" if resume
                else "torn tail: no record holds from here on"))
            scan.next_offset += lost
            if not resume:
                break
            scan.records += 1
            at = resume
            with nogil:
                scan_records(segment.base, limit, segment.size, segment.seed, resume, &scan)
        records += scan.records
        messages += scan.next_offset - scan.first_offset
        expected = scan.next_offset
        if scan.records:
            known = True
            if start is None:
                start = scan.first_offset
    return Verified(opened, records, messages, start or 0, expected, problems)


def survey(path):
    """The segments of a log directory, also while it is written: how far whole records reach in each, up to what is
    published. One that is prepared has none, and ends where records begin."""
    cdef _Found found
    cdef const uint8_t* own
    path = os.path.abspath(os.fspath(path))
    id = bytes.fromhex(read_identity(path)["id"])
    own = <const uint8_t*>PyBytes_AS_STRING(id)
    segments = []
    for number in list_segments(path):
        try:
            found = find_segment(own, path, number, False)
        except (FileNotFoundError, LogDamaged):
            continue                                 # retired since it was listed, or not a segment: verify() says so
        with nogil:
            flock(found.segment.fd, LOCK_SH)
        found.look(own)
        if found.other_number:
            continue
        found.scan_to(found.published or found.segment.size)
        segments.append(SegmentInfo(
            number, os.path.join(path, segment_name(number)), found.scan.first_offset, found.scan.next_offset,
            found.scan.end, bool(found.scan.sealed), found.marked))
    return segments


def _first_offset(str path, bytes id, list numbers, number):
    """Where the segments behind `number` go on, by the first one that says so; 0 where none does."""
    cdef _Found found
    for later in numbers:
        if later > number:
            try:
                found = find_segment(<const uint8_t*>PyBytes_AS_STRING(id), path, later, False)
            except (FileNotFoundError, LogDamaged):
                continue
            if record_holds(found.segment.base, SEGMENT_HEADER, found.segment.size, found.segment.seed):
                return (<const RecordHeader*>(found.segment.base + SEGMENT_HEADER)).offset
    return 0


def _reach(str path, bytes id, list numbers):
    """The last segment that has records, and the last one that has a sync mark, by their headers."""
    cdef _Found found
    last = marked = 0
    for number in numbers:
        try:
            found = find_segment(<const uint8_t*>PyBytes_AS_STRING(id), path, number, False)
        except (FileNotFoundError, LogDamaged):
            continue
        if found.marked:
            marked = number
        if found.marked or found.published > SEGMENT_HEADER or record_holds(
                found.segment.base, SEGMENT_HEADER, found.segment.size, found.segment.seed):
            last = number
    return last, marked


cdef list _gaps(Segment* segment, uint64_t position, uint64_t end):
    """CONTROL_GAP records in a stretch that holds: where, how many offsets, from which."""
    cdef const RecordHeader* record
    cdef list gaps = []
    while position < end:
        record = <const RecordHeader*>(segment.base + position)
        if record.flags & FLAG_CONTROL and record.kind == CONTROL_GAP:
            gaps.append((position, record.correlation, record.offset))
        position += padded(record.length)
    return gaps


# --- reading from anywhere --------------------------------------------------------------------------------------------

cdef class LogReader:
    """A cursor over a log directory, in any thread or process, also while it is written.

    It sees whole, published records only. It holds a shared lock on the segment that it reads, so that this one is never
    recycled under it. With `sync` it needs to be allowed to write the segments' files, and keeps those that it has left
    until sync() has covered them. One thread at a time uses it.
    """

    def __cinit__(self):
        self.current.fd = -1

    def __init__(self, path, uint64_t offset=0, *, bint check=True, bint sync=False):
        self.path = os.path.abspath(os.fspath(path))
        self.id = bytes.fromhex(read_identity(self.path)["id"])
        self.check = check
        self.syncs = sync
        self.offset = offset
        self.topics_ = {}
        self.origins_ = {}
        self._find(offset)

    def _find(self, uint64_t offset):
        """Enters the newest segment that begins at or before `offset`, or the oldest one. One that does not hold is as
        good as gone, unless there is no other."""
        cdef uint64_t end
        while True:
            damaged = None
            oldest = 0
            numbers = list_segments(self.path)
            for number in reversed(numbers):
                try:
                    if not self.enter(number):
                        continue
                except LogDamaged as e:
                    damaged = e
                    continue
                end = readable_end(self.current.base, self.current.number)
                if end != SEGMENT_HEADER:
                    if number == numbers[0] or self._begins_by(offset):
                        break
                    oldest = number
                self.leave()
            if damaged is not None and not self.mapped and oldest:
                self.enter(oldest)
            if self.mapped or numbers == list_segments(self.path):
                break
        if self.mapped:
            self.skipped = self.current.number
            self._skip_to_first()
        elif damaged is not None:
            raise damaged

    cdef int enter(self, uint64_t number) except -1:
        """Maps a segment and takes its lock; 0 where it went away or became another one meanwhile."""
        cdef const uint8_t* id = <const uint8_t*>PyBytes_AS_STRING(self.id)
        cdef struct_stat info
        cdef int fd, error
        self.leave()
        try:
            # msync does nothing for the mapping of a file that was opened for reading only.
            fd = os.open(
                os.path.join(self.path, segment_name(number)),
                (os.O_RDWR if self.syncs else os.O_RDONLY) | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        with nogil:
            error = flock(fd, LOCK_SH)                  # waits for a writer that is recycling it right now
        if error or fstat(fd, &info) != 0 or info.st_size < SEGMENT_HEADER:
            c_close(fd)
            return 0
        self.current.fd = fd
        self.current.size = <uint64_t>info.st_size
        self.current.number = number
        self.current.seed = seed_of(id, number)
        self.current.base = <uint8_t*>mmap(NULL, self.current.size, PROT_READ, MAP_SHARED, fd, 0)
        if <void*>self.current.base == MAP_FAILED:
            error = c_errno
            self.current.base = NULL
            self.leave()
            raise OSError(error, os.strerror(error), segment_name(number))
        self.current.end = SEGMENT_HEADER               # here: where this cursor stands
        self.current.synced = SEGMENT_HEADER            # here: how far this cursor's sync() has covered it
        self.readable = SEGMENT_HEADER
        self.current.sealed = 0                         # here: whether to read past a readable end that does not hold
        self.mapped = True
        if not header_holds(self.current.base, id, number):
            if header_of_another(self.current.base, id, number):
                self.leave()
                return 0
            # Its records are seeded with log and number: if the first one holds, they can be read all the same.
            if not record_holds(self.current.base, SEGMENT_HEADER, self.current.size, self.current.seed):
                self.leave()
                raise LogDamaged(f"{segment_name(number)}: the segment's header does not hold")
        self.topics_.clear()
        self.origins_.clear()
        return 1

    cdef void leave(self) noexcept:
        unmap_segment(&self.current)
        self.mapped = False

    cdef int pass_on(self) except -1:
        """Leaves a segment that was read, which sync() will still have to cover."""
        if self.syncs and self.mapped and self.current.end > self.current.synced:
            if self.passed_count == PASSED_ROOM:
                self._begin()
                try:
                    self._sync_passed()
                finally:
                    self.busy = False
            self.passed[self.passed_count] = self.current
            self.passed_count += 1
            self.current.base = NULL
            self.current.fd = -1
        self.leave()
        return 0

    cdef int go_back(self, uint64_t offset) except -1:
        """To a message that was already read, wherever it is."""
        try:
            self.pass_on()
        except OSError:
            self.leave()                                # sync() says so from now on
        self.current.number = 0
        self.offset = offset
        return 0

    def sync(self):
        """Returns when everything that this cursor has passed is on disk, so that opening the log after a power cut finds
        it; OSError where that failed, now or earlier: what the system could not write it does not try again.

        The names of the segments need nothing: who prepares one syncs its header and the directory before it is used.
        """
        if not self.syncs:
            raise LogError("this reader was not opened to sync")
        self._begin()
        try:
            self._sync_skipped()
            self._sync_passed()
            if self.mapped:
                self._sync_read(&self.current)
        finally:
            self.busy = False

    def _begin(self):
        """Before the GIL is let go of: what is at work without it must stay mapped."""
        if self.busy:
            raise RuntimeError("another thread is using this reader")
        self.busy = True

    def _sync_skipped(self):
        """The segments before the one that this cursor began in: where one of them is torn, opening the log cuts all that
        follows."""
        cdef int fd, error
        if not self.skipped:
            return
        for number in list_segments(self.path):
            if number >= self.skipped:
                break
            try:
                fd = os.open(os.path.join(self.path, segment_name(number)), os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue                                # retired, so it is not needed any more
            with nogil:
                error = c_errno if hr_fdatasync(fd) != 0 else 0
                c_close(fd)
            self._note_sync(error, number)
        self.skipped = 0

    def _sync_passed(self):
        cdef int i
        while self.passed_count:
            self._sync_read(&self.passed[0])
            unmap_segment(&self.passed[0])
            self.passed_count -= 1
            for i in range(self.passed_count):
                self.passed[i] = self.passed[i + 1]

    cdef int _sync_read(self, Segment* segment) except -1:
        """What was read of one segment since the last time."""
        cdef int error = 0
        if self.failed == 0 and segment.end > segment.synced:
            with nogil:
                if hr_sync_range(segment.fd, segment.base, segment.synced, segment.end) != 0:
                    error = c_errno
        self._note_sync(error, segment.number)
        segment.synced = segment.end
        return 0

    cdef int _note_sync(self, int error, uint64_t number) except -1:
        if error and not self.failed:
            self.failed = error
        if self.failed:
            raise OSError(
                self.failed, f"cannot sync the log: {os.strerror(self.failed)}", os.path.join(self.path, segment_name(number)))
        return 0

    def _begins_by(self, uint64_t offset):
        """Whether this segment's first message is at or before `offset`; not where its first record does not hold."""
        return (
            record_holds(self.current.base, SEGMENT_HEADER, self.current.size, self.current.seed)
            and (<const RecordHeader*>(self.current.base + SEGMENT_HEADER)).offset <= offset
        )

    def _skip_to_first(self):
        """At the beginning of a segment: whatever came before it and was not read is gone."""
        cdef const RecordHeader* first = <const RecordHeader*>(self.current.base + SEGMENT_HEADER)
        if first.offset > self.offset and record_holds(
                self.current.base, SEGMENT_HEADER, self.current.size, self.current.seed):
            self.overtaken += first.offset - self.offset
            self.offset = first.offset

    cdef int advance(self) except -1:
        """From the end of a sealed segment to the next one that has records; 0 where there is none yet."""
        cdef uint64_t number = self.current.number
        while True:
            later = [n for n in list_segments(self.path) if n > number]
            if not later:
                return 0
            if self.enter(later[0]):
                break
            if os.path.exists(os.path.join(self.path, segment_name(later[0]))):
                return 0                                # it is not ready: its header is still that of another segment
        if readable_end(self.current.base, self.current.number) == SEGMENT_HEADER:
            # prepared, not yet used: stay with the old one's number and look again later
            self.leave()
            self.current.number = number
            return 0
        self._skip_to_first()
        return 1

    cdef int glide(self, View* out) noexcept nogil:
        """The next message of this segment, as step() would give it; 0 where step() has to be asked: at control records,
        damage and both kinds of end."""
        cdef const RecordHeader* record
        cdef uint64_t position = self.current.end
        if not self.mapped or self.current.sealed:
            return 0
        while True:
            if position >= self.readable:
                self.readable = readable_end(self.current.base, self.current.number)
                if position >= self.readable or self.readable > self.current.size:
                    self.readable = 0
                    return 0
            if self.check and not record_holds(self.current.base, position, self.readable, self.current.seed):
                return 0
            record = <const RecordHeader*>(self.current.base + position)
            if record.flags & FLAG_CONTROL:
                return 0
            position += padded(record.length)
            self.current.end = position
            if record.offset >= self.offset:
                self.offset = record.offset + 1
                view_record(record, out)
                return 1

    cdef void take_back(self, const View* view) noexcept nogil:
        """The message that was read last will be read again."""
        self.current.end = <const uint8_t*>view.record - self.current.base
        self.offset = view.record.offset

    cdef int step(self, View* out) except -1:
        """The next record; its memory is good until the next call."""
        cdef const RecordHeader* record
        cdef uint64_t end, position
        if self.busy:
            raise RuntimeError("another thread is using this reader")
        while True:
            if not self.mapped:
                if self.current.number == 0:
                    self._find(self.offset)
                    if not self.mapped:
                        return 0
                elif not self.advance():
                    return 0
            end = readable_end(self.current.base, self.current.number)
            position = self.current.end
            if self.current.sealed:
                end = self.current.size
            elif end == 0 or end > self.current.size:
                raise LogDamaged(f"{segment_name(self.current.number)}: the segment's readable end does not hold")
            if position >= end:
                if position < self.current.size:
                    return 0
                self.pass_on()
                continue
            if self.check or self.current.sealed:
                if not record_holds(self.current.base, position, end, self.current.seed):
                    raise LogDamaged(
                        f"{segment_name(self.current.number)}: the record at position {position} does not hold "
                        f"(offset {self.offset})")
            record = <const RecordHeader*>(self.current.base + position)
            self.current.end = position + padded(record.length)
            view_record(record, out)
            if record.flags & FLAG_CONTROL:
                if record.kind == CONTROL_SEAL:
                    try:
                        self.pass_on()
                    except OSError:
                        self.current.end = position     # it may be tried again
                        raise
                    continue
                if record.kind == CONTROL_TOPIC:
                    self.topics_[record.topic] = out.payload[:out.payload_len]
                elif record.kind == CONTROL_ORIGIN:
                    self.origins_[record.origin] = out.payload[:out.payload_len]
                elif record.kind == CONTROL_GAP and record.offset >= self.offset:
                    self.lost += record.correlation
                    self.offset = record.offset + record.correlation
                return 1
            if record.offset < self.offset:
                continue
            self.offset = record.offset + 1
            return 1

    def resume(self):
        """After LogDamaged: goes on behind the place that does not hold. What is lost there as a Damage, or None where all
        holds."""
        cdef uint64_t end, at, found, offset, lower
        if not self.mapped:
            return None
        end = readable_end(self.current.base, self.current.number)
        if (end == 0 or end > self.current.size) and not self.current.sealed:
            self.current.sealed = 1
            return Damage(self.current.number, AT_END, self.offset, 0, "the segment's readable end does not hold")
        if self.current.sealed:
            end = self.current.size
        at = self.current.end
        if at >= end or record_holds(self.current.base, at, end, self.current.seed):
            return None
        lower = self.offset - min(self.offset, <uint64_t>1 << 31)     # records below `offset` may still be skipped
        with nogil:
            found = find_after_damage(self.current.base, end, self.current.seed, at, lower)
        if not found:
            self.pass_on()
            return Damage(self.current.number, at, self.offset, 0, "no record holds from here to the end of the segment")
        self.current.end = found
        offset = (<const RecordHeader*>(self.current.base + found)).offset
        lost = offset - self.offset if offset > self.offset else 0
        self.lost += lost
        damage = Damage(self.current.number, at, self.offset, lost, "the record does not hold")
        self.offset += lost
        return damage

    def read(self, *, bint controls=False):
        """The next record, or None where there is none yet. Control records only if asked for."""
        cdef View view
        while self.step(&view):
            if controls or not view.record.flags & FLAG_CONTROL:
                return self._record(&view)
        return None

    cdef object _record(self, View* view):
        cdef const RecordHeader* record = view.record
        if record.topic and record.topic not in self.topics_:
            self.topics_[record.topic] = self._name_elsewhere(record.topic)
        return Record(
            record.offset, record.time, record.topic, self.topics_.get(record.topic, b""), record.protocol, record.kind,
            record.flags, record.origin, self.origins_.get(record.origin, b""), record.correlation,
            view.headers[:view.headers_len],
            tuple([view.parts[i] for i in range(view.parts_count)]),
            view.payload[:view.payload_len], bool(record.flags & FLAG_CONTROL), self.current.number,
            <const uint8_t*>record - self.current.base,
        )

    def _name_elsewhere(self, uint32_t topic):
        """A topic's name whose record in this segment was lost to damage: another segment may have it."""
        cdef _Found found
        cdef Segment* segment
        cdef const RecordHeader* record
        cdef View view
        cdef uint64_t position, end
        for number in list_segments(self.path):
            try:
                found = find_segment(<const uint8_t*>PyBytes_AS_STRING(self.id), self.path, number, False)
            except (FileNotFoundError, LogDamaged):
                continue
            segment = found.segment
            position, end = SEGMENT_HEADER, found.published
            while position < end and record_holds(segment.base, position, end, segment.seed):
                record = <const RecordHeader*>(segment.base + position)
                if record.flags & FLAG_CONTROL and record.kind == CONTROL_TOPIC and record.topic == topic:
                    view_record(record, &view)
                    return view.payload[:view.payload_len]
                position += padded(record.length)
        return b""

    def __iter__(self):
        return self

    def __next__(self):
        record = self.read()
        if record is None:
            raise StopIteration
        return record

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Lets go of the log, without a sync."""
        if self.busy:
            raise RuntimeError("another thread is using this reader")
        self._drop()
        self.current.number = 0

    cdef void _drop(self) noexcept:
        self.leave()
        while self.passed_count:
            self.passed_count -= 1
            unmap_segment(&self.passed[self.passed_count])

    def __dealloc__(self):
        self._drop()


# --- cursors that others saved ------------------------------------------------------------------------------------------

cdef int find_cursors(Segment* segment, uint64_t end, uint64_t** places, size_t* count) noexcept nogil:
    """Positions of CONTROL_CURSOR records up to `end`, also behind damage; -1 without memory."""
    cdef const RecordHeader* record
    cdef uint64_t* more
    cdef uint64_t position = SEGMENT_HEADER, offset = 0
    cdef size_t room = 0
    while position < end:
        if not record_holds(segment.base, position, end, segment.seed):
            position = find_after_damage(segment.base, end, segment.seed, position, offset)
            if not position:
                break
        record = <const RecordHeader*>(segment.base + position)
        offset = record.offset
        position += padded(record.length)
        if record.flags & FLAG_CONTROL:
            if record.kind == CONTROL_SEAL:
                break
            if record.kind == CONTROL_CURSOR:
                if count[0] == room:
                    room = 2 * room + 16
                    more = <uint64_t*>realloc(places[0], room * sizeof(uint64_t))
                    if more == NULL:
                        return -1
                    places[0] = more
                places[0][count[0]] = <const uint8_t*>record - segment.base
                count[0] += 1
    return 0


def saved_cursors(path):
    """The saved cursors of a log directory, name -> offset, also while it is written."""
    cdef _Found found
    cdef View view
    cdef uint64_t last = 0
    cdef uint64_t* places
    cdef size_t i, count
    cdef int rc
    path = os.path.abspath(os.fspath(path))
    id = bytes.fromhex(read_identity(path)["id"])
    cursors = {}
    # Oldest first, until no newer segment has come: what is retired meanwhile was carried into one that is still to be read.
    while True:
        numbers = [number for number in list_segments(path) if number > last]
        for number in numbers:
            try:
                found = find_segment(<const uint8_t*>PyBytes_AS_STRING(id), path, number, False)
            except (FileNotFoundError, LogDamaged):
                last = number
                continue
            with nogil:
                flock(found.segment.fd, LOCK_SH)
            found.look(<const uint8_t*>PyBytes_AS_STRING(id))
            if found.other_number or found.published == SEGMENT_HEADER:
                if os.path.exists(os.path.join(path, segment_name(number))):
                    break                               # not in use yet, and neither are those behind it
                last = number                           # retired since it was listed, and used again
                continue
            places, count = NULL, 0
            try:
                with nogil:
                    rc = find_cursors(found.segment, found.published or found.segment.size, &places, &count)
                if rc:
                    raise MemoryError
                for i in range(count):
                    view_record(<const RecordHeader*>(found.segment.base + places[i]), &view)
                    cursors[view.payload[:view.payload_len].decode(errors="replace")] = view.record.correlation
            finally:
                free(places)
            last = number
        else:
            if not numbers:
                return cursors
            continue
        return cursors
