/* What the log asks of the operating system, in one place: preparing files, syncing them, waking a loop, atomics.
   It knows nothing of records or segments. */
#ifndef HEADRACE_PLATFORM_H
#define HEADRACE_PLATFORM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sync_file_range */
#endif

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/eventfd.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "headrace maps little-endian files into memory and runs on little-endian machines only"
#endif

static inline uint64_t hr_load_acquire(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline void hr_store_release(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline int hr_load_int(const int *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
/* For a flag that only has to be seen some time soon; it orders nothing and costs nothing. */
static inline int hr_peek_int(const int *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline void hr_store_int(int *p, int v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline int hr_swap_int(int *p, int v) { return __atomic_exchange_n(p, v, __ATOMIC_ACQ_REL); }
static inline int hr_or_int(int *p, int v) { return __atomic_fetch_or(p, v, __ATOMIC_ACQ_REL); }

/* Fetches the cache lines of n bytes at `p` for writing. */
static inline void hr_prefetch_write(const void *p, size_t n) {
    for (size_t i = 0; i < n; i += 64) __builtin_prefetch((const char *)p + i, 1, 3);
}

static inline int64_t hr_now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* For deadlines: it never jumps, whatever happens to the time of day. */
static inline int64_t hr_monotonic_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static inline int hr_cond_init(pthread_cond_t *cond) {
#ifdef __APPLE__
    return pthread_cond_init(cond, NULL);
#else
    pthread_condattr_t attributes;
    int rc = pthread_condattr_init(&attributes);
    if (rc != 0) return rc;
    rc = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    if (rc == 0) rc = pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
    return rc;
#endif
}

/* pthread_cond_wait until hr_monotonic_us() says `until`; ETIMEDOUT then. */
static inline int hr_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t until) {
    struct timespec t;
#ifdef __APPLE__
    until -= hr_monotonic_us();
    if (until <= 0) return ETIMEDOUT;
#endif
    t.tv_sec = (time_t)(until / 1000000);
    t.tv_nsec = (long)(until % 1000000) * 1000;
#ifdef __APPLE__
    return pthread_cond_timedwait_relative_np(cond, lock, &t);
#else
    return pthread_cond_timedwait(cond, lock, &t);
#endif
}

/* A thread that takes no signals: those are the interpreter's, and must not interrupt a sync. */
static inline int hr_thread(pthread_t *thread, void *(*run)(void *), void *arg) {
    sigset_t all, before;
    int rc;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

static inline int hr_fdatasync(int fd) {
    int rc;
    do {
#ifdef __APPLE__
        rc = fcntl(fd, F_FULLFSYNC) == -1 ? fsync(fd) : 0; /* fsync alone does not reach the platter there */
#else
        rc = fdatasync(fd);
#endif
    } while (rc != 0 && errno == EINTR);
    return rc;
}

/* What the log's own threads do to a file they do in pieces, because a kernel that does not preempt itself lets others on
   this CPU run in between only. A piece is also what the page cache keeps together, where the filesystem can: its pages
   become dirty, are written back and are protected from writing together. So large pieces cost a five-hundredth of the
   page faults, and a sync of a few bytes writes a whole one. */
#define HR_SMALL_PIECE ((size_t)256 << 10)
#define HR_LARGE_PIECE ((size_t)2 << 20) /* what one entry of the page table's upper level maps */

/* Makes [from, to) of a mapped file durable, and its first page with it. Only what was written since the last time is
   given: syncing the whole file would write out, and write-protect, the pages that were faulted in ahead of need.
   0, or -1 with errno. */
static inline int hr_sync_range(int fd, uint8_t *base, uint64_t from, uint64_t to) {
#ifdef __linux__
    if (sync_file_range(fd, 0, 4096, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER) != 0 &&
        (errno != ENOSYS || msync(base, 4096, MS_SYNC) != 0))
        return -1;
    from &= ~(uint64_t)4095;
    /* A long range is first sent on its way piece by piece. */
    for (uint64_t at = from; to - from > HR_LARGE_PIECE && at < to; at += HR_LARGE_PIECE) {
        uint64_t part = to - at < HR_LARGE_PIECE ? to - at : HR_LARGE_PIECE;
        if (sync_file_range(fd, (off_t)at, (off_t)part, SYNC_FILE_RANGE_WRITE) != 0) {
            if (errno != ENOSYS) return -1;
            break;
        }
        sched_yield();
    }
    return msync(base + from, to - from, MS_SYNC); /* an fsync of this range: it ends with the device's flush */
#else
    (void)from;
    if (msync(base, to, MS_SYNC) != 0) return -1;
    return hr_fdatasync(fd);
#endif
}

static inline int hr_sync_dir(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC), rc, saved;
    if (fd < 0) return -1;
    rc = fsync(fd);
    saved = errno;
    close(fd);
    errno = saved;
    return rc;
}

/* Allocates the file's blocks and writes zeros over [from, size), so that a later store into its mapping needs no
   new block and cannot meet a full disk. 0 or an errno. */
static inline int hr_fill(int fd, uint64_t from, uint64_t size, size_t piece) {
    char *zeros;
#ifdef __linux__
    if (size > from) {
        int rc;
        do {
            rc = posix_fallocate(fd, (off_t)from, (off_t)(size - from));
        } while (rc == EINTR);
        if (rc != 0 && rc != EOPNOTSUPP && rc != EINVAL) return rc;
    }
#endif
    zeros = calloc(1, piece);
    if (zeros == NULL) return ENOMEM;
    while (from < size) {
        size_t want = size - from < piece ? (size_t)(size - from) : piece;
        ssize_t wrote = pwrite(fd, zeros, want, (off_t)from);
        if (wrote < 0) {
            int saved = errno;
            if (saved == EINTR) continue;
            free(zeros);
            return saved;
        }
        from += (uint64_t)wrote;
        sched_yield();
    }
    free(zeros);
    return 0;
}

/* Writes out a file that nobody maps, and has the system forget what it keeps of it in memory. 0, or -1 with errno. */
static inline int hr_forget(int fd) {
    if (hr_fdatasync(fd) != 0) return -1;
#ifdef POSIX_FADV_DONTNEED
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
#endif
    return 0;
}

/* Makes every page of a shared mapping present and writable without changing it, so that the first store into
   it takes no page fault. */
static inline void hr_prefault(void *base, size_t size, size_t piece) {
    size_t at = 0;
#ifdef __linux__
    while (at < size) {
        size_t part = size - at < piece ? size - at : piece;
        if (madvise((char *)base + at, part, 23) != 0) break; /* MADV_POPULATE_WRITE, newer than some headers */
        at += part;
        sched_yield();
    }
#endif
    for (; at < size; at += 4096) {
        volatile char *p = (volatile char *)base + at;
        *p = *p;
    }
}

/* A descriptor pair that wakes an event loop from any thread; on Linux both are one eventfd. */
static inline int hr_wake_open(int fds[2]) {
#ifdef __linux__
    fds[0] = fds[1] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return fds[0] < 0 ? -1 : 0;
#else
    if (pipe(fds) != 0) return -1;
    for (int i = 0; i < 2; i++) {
        fcntl(fds[i], F_SETFL, fcntl(fds[i], F_GETFL) | O_NONBLOCK);
        fcntl(fds[i], F_SETFD, FD_CLOEXEC);
    }
    return 0;
#endif
}

static inline void hr_wake(int fd) {
    uint64_t one = 1;
    ssize_t rc = write(fd, &one, 8);
    (void)rc; /* full means that a wake-up is already waiting */
}

static inline void hr_wake_clear(int fd) {
    uint64_t buffer[16];
    while (read(fd, buffer, sizeof buffer) == (ssize_t)sizeof buffer) {}
}

static inline void hr_wake_close(int fds[2]) {
    if (fds[0] >= 0) close(fds[0]);
    if (fds[1] >= 0 && fds[1] != fds[0]) close(fds[1]);
    fds[0] = fds[1] = -1;
}

/* `data` as a read-only mapping of a file in `directory` that has no name any more; NULL where that fails. */
static inline void *hr_map_unnamed(const char *directory, const void *data, size_t size) {
    char path[4160];
    size_t done = 0;
    void *mapped;
    int fd;
    snprintf(path, sizeof path, "%s/index.XXXXXX", directory);
    fd = mkstemp(path);
    if (fd < 0) return NULL;
    unlink(path);
    while (done < size) {
        ssize_t wrote = write(fd, (const char *)data + done, size - done);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) {
            close(fd);
            return NULL;
        }
        done += (size_t)wrote;
    }
    mapped = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    return mapped == MAP_FAILED ? NULL : mapped;
}

#endif
