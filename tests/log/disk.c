/* A disk for tests, to be preloaded: it can be told to wait or to fail when it is synced, and it remembers what would be
   left of a directory if the power were cut. It knows nothing of logs; what it writes down, power_cut.py reads.

   DISK_HOLD=FILE    while FILE exists, syncs of data wait
   DISK_FAIL=FILE    while FILE exists, syncs of data fail with EIO
   DISK_WATCH=DIR    what happens to files in DIR is remembered in
   DISK_SHADOW=DIR   n           the bytes of file n as they are on the disk: those of its last sync, and pages that were
                                 written back since at any time
                     journal     one line for each change of a name, in order:
                                 "+ n NAME" made, "> OLD NEW" renamed, "- NAME" removed, "= DIR" names of DIR synced
                     Where there is a journal already, another process was killed and its memory is lost, but not what
                     the kernel has of its files: this one goes on with that. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096
#define MOST 65536
#define MAPPINGS 1024

static const char *hold, *fail, *watch, *shadow;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int journal = -1;
static struct { ino_t inode; int file; } known[MOST];
static int known_count, files;
static struct { char *base; size_t size; int file; } mappings[MAPPINGS];

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (found == NULL) abort();
    return found;
}

static void note(const char *format, ...) {
    char line[2 * PATH_MAX];
    va_list arguments;
    int n;
    va_start(arguments, format);
    n = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (write(journal, line, (size_t)n) != n) abort();
}

/* The part of a path below the watched directory, or NULL; "" is the directory itself. */
static const char *below(const char *path) {
    size_t n = watch == NULL ? 0 : strlen(watch);
    if (n == 0 || strncmp(path, watch, n) != 0 || (path[n] != '/' && path[n] != 0)) return NULL;
    return path[n] == '/' ? path + n + 1 : path + n;
}

static const char *path_of(int fd, char *room) {
    char link[64];
    ssize_t n;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    n = readlink(link, room, PATH_MAX - 1);
    if (n < 0) return NULL;
    room[n] = 0;
    return below(room);
}

static int *file_of(ino_t inode) {
    for (int i = known_count - 1; i >= 0; i--)
        if (known[i].inode == inode) return &known[i].file;
    return NULL;
}

static int new_file(ino_t inode) {
    if (known_count == MOST) abort();
    known[known_count].inode = inode;
    known[known_count++].file = ++files;
    return files;
}

/* All bytes of an open file, as they are now, become what the disk has. */
static void remember(int fd, int file) {
    char path[PATH_MAX], temporary[PATH_MAX];
    static char buffer[1 << 20];
    off_t at = 0;
    ssize_t n;
    int out;
    snprintf(path, sizeof path, "%s/%d", shadow, file);
    snprintf(temporary, sizeof temporary, "%s/new", shadow);
    out = REAL(open)(temporary, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
    if (out < 0) abort();
    while ((n = pread(fd, buffer, sizeof buffer, at)) > 0) {
        if (pwrite(out, buffer, (size_t)n, at) != n) abort();
        at += n;
    }
    close(out);
    if (REAL(rename)(temporary, path) != 0) abort();
}

/* Pages reach the disk whenever the kernel likes: now and then some of some file do. */
static void *write_back(void *unused) {
    unsigned seed = (unsigned)getpid();
    char name[PATH_MAX], page[PAGE];
    (void)unused;
    for (;;) {
        struct timespec pause = {0, 100000 + rand_r(&seed) % 900000};
        struct stat info;
        struct dirent *entry;
        DIR *directory;
        int in, out, *file, pages, skip;
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&lock);
        directory = opendir(watch);
        skip = rand_r(&seed) % 16;
        while (directory != NULL && (entry = readdir(directory)) != NULL) {
            if (strstr(entry->d_name, ".seg") == NULL || skip-- > 0) continue;
            snprintf(name, sizeof name, "%s/%s", watch, entry->d_name);
            in = REAL(open)(name, O_RDONLY | O_CLOEXEC);
            if (in < 0) continue;
            if (fstat(in, &info) == 0 && (file = file_of(info.st_ino)) != NULL) {
                snprintf(name, sizeof name, "%s/%d", shadow, *file);
                out = REAL(open)(name, O_WRONLY | O_CLOEXEC);
                for (pages = rand_r(&seed) % 8; out >= 0 && pages > 0; pages--) {
                    off_t at = rand_r(&seed) % 4 ? rand_r(&seed) % (unsigned)(info.st_size / PAGE + 1) * PAGE : 0;
                    ssize_t n = pread(in, page, PAGE, at);
                    if (n > 0 && pwrite(out, page, (size_t)n, at) != n) abort();
                }
                if (out >= 0) close(out);
            }
            close(in);
            break;
        }
        if (directory != NULL) closedir(directory);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

static void know(const char *name, int file) {
    char path[PATH_MAX];
    struct stat info;
    snprintf(path, sizeof path, "%s/%s", watch, name);
    if (lstat(path, &info) != 0 || !S_ISREG(info.st_mode) || known_count == MOST) abort();
    known[known_count].inode = info.st_ino;
    known[known_count++].file = file;
}

/* Learns from the journal which file has which name now. */
static void go_on(FILE *lines) {
    static struct { char name[PATH_MAX]; int file; } names[MAPPINGS];
    char line[2 * PATH_MAX], first[PATH_MAX], second[PATH_MAX];
    int count = 0, n;
    while (fgets(line, sizeof line, lines) != NULL) {
        if (sscanf(line, "+ %d %s", &n, first) == 2) {
            if (n > files) files = n;
            for (int i = 0; i < count; i++)
                if (strcmp(names[i].name, first) == 0) names[i--] = names[--count];
            if (count == MAPPINGS) abort();
            strcpy(names[count].name, first);
            names[count++].file = n;
        } else if (sscanf(line, "> %s %s", first, second) == 2) {
            for (int i = 0; i < count; i++)
                if (strcmp(names[i].name, second) == 0) names[i--] = names[--count];
            for (int i = 0; i < count; i++)
                if (strcmp(names[i].name, first) == 0) strcpy(names[i].name, second);
        } else if (sscanf(line, "- %s", first) == 1)
            for (int i = 0; i < count; i++)
                if (strcmp(names[i].name, first) == 0) names[i--] = names[--count];
    }
    for (int i = 0; i < count; i++) know(names[i].name, names[i].file);
}

/* What is there at the very start is on the disk. */
static void begin(void) {
    char path[PATH_MAX];
    struct dirent *entry;
    DIR *directory = opendir(watch);
    while (directory != NULL && (entry = readdir(directory)) != NULL) {
        struct stat info;
        int fd;
        snprintf(path, sizeof path, "%s/%s", watch, entry->d_name);
        if (lstat(path, &info) != 0 || !S_ISREG(info.st_mode)) continue;
        know(entry->d_name, ++files);
        fd = REAL(open)(path, O_RDONLY | O_CLOEXEC);
        remember(fd, files);
        note("+ %d %s\n", files, entry->d_name);
        close(fd);
    }
    if (directory != NULL) closedir(directory);
    note("= \n");
}

__attribute__((constructor)) static void start(void) {
    char path[PATH_MAX];
    pthread_t thread;
    FILE *earlier;
    hold = getenv("DISK_HOLD");
    fail = getenv("DISK_FAIL");
    watch = getenv("DISK_WATCH");
    shadow = getenv("DISK_SHADOW");
    if (watch == NULL || shadow == NULL) {
        watch = NULL;
        return;
    }
    snprintf(path, sizeof path, "%s/journal", shadow);
    earlier = fopen(path, "re");
    journal = REAL(open)(path, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
    if (earlier == NULL) begin();
    else {
        go_on(earlier);
        fclose(earlier);
    }
    if (pthread_create(&thread, NULL, write_back, NULL) != 0) abort();
}

/* 0, or -1 where the disk was told to fail. */
static int may_sync(void) {
    while (hold != NULL && access(hold, F_OK) == 0) usleep(1000);
    if (fail == NULL || access(fail, F_OK) != 0) return 0;
    errno = EIO;
    return -1;
}

static int synced(int fd, int (*sync)(int)) {
    char room[PATH_MAX];
    const char *name;
    struct stat info;
    if (watch == NULL || (name = path_of(fd, room)) == NULL || fstat(fd, &info) != 0) return sync(fd);
    pthread_mutex_lock(&lock);
    if (S_ISDIR(info.st_mode)) note("= %s\n", name);
    else if (file_of(info.st_ino) != NULL) {
        int again = REAL(open)(room, O_RDONLY | O_CLOEXEC); /* the descriptor itself may be for writing only */
        if (again >= 0) {
            remember(again, *file_of(info.st_ino));
            close(again);
        }
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

int fdatasync(int fd) { return may_sync() != 0 ? -1 : synced(fd, REAL(fdatasync)); }

int fsync(int fd) { return synced(fd, REAL(fsync)); }

/* These pages of a file, as they are now, are what the disk has. */
static void remember_pages(int file, const char *from, size_t size, off_t at) {
    char path[PATH_MAX];
    int out;
    snprintf(path, sizeof path, "%s/%d", shadow, file);
    out = REAL(open)(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    if (out < 0 || pwrite(out, from, size, at) != (ssize_t)size) abort();
    close(out);
}

int msync(void *start, size_t size, int flags) {
    char *from = start;
    int found = 0;
    if (may_sync() != 0) return -1;
    if (watch == NULL) return REAL(msync)(start, size, flags);
    size = (size + PAGE - 1) & ~(size_t)(PAGE - 1);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAPPINGS; i++)
        if (mappings[i].base != NULL && from >= mappings[i].base && from + size <= mappings[i].base + mappings[i].size) {
            remember_pages(mappings[i].file, from, size, from - mappings[i].base);
            found = 1;
        }
    pthread_mutex_unlock(&lock);
    return found ? 0 : REAL(msync)(start, size, flags);
}

int sync_file_range(int fd, off64_t at, off64_t size, unsigned flags) {
    char room[PATH_MAX], page[PAGE];
    struct stat info;
    int *file;
    if (watch == NULL || path_of(fd, room) == NULL || fstat(fd, &info) != 0)
        return REAL(sync_file_range)(fd, at, size, flags);
    if (!(flags & SYNC_FILE_RANGE_WAIT_AFTER)) return 0; /* on its way, and lost with the power */
    pthread_mutex_lock(&lock);
    file = file_of(info.st_ino);
    for (off64_t end = at + size; file != NULL && at < end; at += PAGE)
        if (pread(fd, page, PAGE, at) == PAGE) remember_pages(*file, page, PAGE, at);
    pthread_mutex_unlock(&lock);
    return 0;
}

static void *mapped(void *base, size_t size, int fd) {
    char room[PATH_MAX];
    struct stat info;
    int *file;
    if (base == MAP_FAILED || fd < 0 || watch == NULL || path_of(fd, room) == NULL || fstat(fd, &info) != 0) return base;
    pthread_mutex_lock(&lock);
    file = file_of(info.st_ino);
    for (int i = 0; file != NULL; i++) {
        if (i == MAPPINGS) abort();
        if (mappings[i].base != NULL) continue;
        mappings[i].base = base;
        mappings[i].size = size;
        mappings[i].file = *file;
        break;
    }
    pthread_mutex_unlock(&lock);
    return base;
}

void *mmap(void *where, size_t size, int protection, int flags, int fd, off_t at) {
    return mapped(REAL(mmap)(where, size, protection, flags, fd, at), size, fd);
}

void *mmap64(void *where, size_t size, int protection, int flags, int fd, off64_t at) {
    return mapped(REAL(mmap64)(where, size, protection, flags, fd, at), size, fd);
}

int munmap(void *base, size_t size) {
    if (watch != NULL) {
        pthread_mutex_lock(&lock);
        for (int i = 0; i < MAPPINGS; i++)
            if (mappings[i].base == base) mappings[i].base = NULL;
        pthread_mutex_unlock(&lock);
    }
    return REAL(munmap)(base, size);
}

static int opened(const char *path, int flags, int fd) {
    struct stat info;
    const char *name;
    if (fd >= 0 && flags & O_CREAT && watch != NULL && (name = below(path)) != NULL) {
        pthread_mutex_lock(&lock);
        /* an inode that is used again is another file; one that was only opened is the same */
        if (fstat(fd, &info) == 0 && (flags & O_EXCL || file_of(info.st_ino) == NULL || info.st_size == 0))
            note("+ %d %s\n", new_file(info.st_ino), name);
        pthread_mutex_unlock(&lock);
    }
    return fd;
}

int open(const char *path, int flags, ...) {
    va_list arguments;
    mode_t mode;
    va_start(arguments, flags);
    mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    return opened(path, flags, REAL(open)(path, flags, mode));
}

int open64(const char *path, int flags, ...) {
    va_list arguments;
    mode_t mode;
    va_start(arguments, flags);
    mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    return opened(path, flags, REAL(open64)(path, flags, mode));
}

int rename(const char *old, const char *new) {
    int rc;
    if (watch == NULL || below(old) == NULL || below(new) == NULL) return REAL(rename)(old, new);
    pthread_mutex_lock(&lock);
    rc = REAL(rename)(old, new);
    if (rc == 0) note("> %s %s\n", below(old), below(new));
    pthread_mutex_unlock(&lock);
    return rc;
}

int unlink(const char *path) {
    int rc;
    if (watch == NULL || below(path) == NULL) return REAL(unlink)(path);
    pthread_mutex_lock(&lock);
    rc = REAL(unlink)(path);
    if (rc == 0) note("- %s\n", below(path));
    pthread_mutex_unlock(&lock);
    return rc;
}
