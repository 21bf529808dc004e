/* Puts jobs into a queue, takes them and finishes them, over several connections, each with so many jobs under way:
 * over Overhop (ENQUEUE, the push, DONE) or with lists of Redis (LPUSH, BRPOPLPUSH, LREM). Both do the same: a job is
 * put in when one was finished, taken once it is known to be in, and finished as soon as it is there. It measures, and
 * knows nothing of how servers are started.
 *
 *     load overhop|redis PORT CONNECTIONS WINDOW BYTES JOBS LIMIT_SECONDS
 *
 * Prints one line of JSON: jobs, seconds, and its own share of a processor. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER = 1 << 20, MOST_CONNECTIONS = 64, MOST_WINDOW = 1024, MOST_BYTES = 4096, JID_ROOM = 128 };

struct peer {
    int fd;
    uint8_t *in, *out;
    size_t in_size, out_size, out_sent;
    uint64_t put, done;         /* jobs that were put in, and those that are known to be finished */
    uint64_t owed;              /* Overhop: credits that were not given back yet */
    char sid[40];
    uint8_t kinds[4 * MOST_WINDOW]; /* Redis: what the replies to come answer, a ring */
    unsigned kinds_first, kinds_end;
};

static struct peer peers[MOST_CONNECTIONS];
static unsigned connections, window, bytes;
static uint64_t share;
static uint8_t payload[MOST_BYTES];
static bool overhop;

static void die(const char *form, ...) {
    va_list rest;
    va_start(rest, form);
    vfprintf(stderr, form, rest);
    va_end(rest);
    fputc('\n', stderr);
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void put(struct peer *peer, const void *data, size_t n) {
    if (peer->out_size + n > BUFFER) die("more output than the window can be");
    memcpy(peer->out + peer->out_size, data, n);
    peer->out_size += n;
}

/* Who puts the next job in after one was finished: the connection that finished it, unless it has put all of its own.
 * Jobs are anybody's to take, so one connection may finish more than it puts. */
static struct peer *next_to_put(struct peer *peer) {
    for (unsigned i = 0; i < connections; i++) {
        struct peer *one = &peers[(peer - peers + i) % connections];
        if (one->put < share) return one;
    }
    return NULL;
}

/* --- Overhop ------------------------------------------------------------------------------------------------------- */

enum { ENQUEUE = 14, CREDIT = 8, DONE = 64, OK = 101, ERR = 102, PUSH = 110 };

/* A frame whose payload `p` is given; its request id is one letter, which says what it asked. */
static void put_frame(struct peer *peer, const uint8_t *p, size_t n, char rid, uint8_t type) {
    uint8_t head[7] = {0, 0, 0, 0, 0x84, 0xa1, 'p'};
    uint8_t tail[] = {0xa3, 'r', 'i', 'd', 0xa1, (uint8_t)rid, 0xa1, 't', type, 0xa1, 'v', 2};
    uint32_t length = htonl((uint32_t)(3 + n + sizeof tail));
    memcpy(head, &length, 4);
    put(peer, head, sizeof head);
    put(peer, p, n);
    put(peer, tail, sizeof tail);
}

static void overhop_put_job(struct peer *peer) {
    uint8_t p[MOST_BYTES + 64];
    size_t n = 0;
    static const char fields[] = "\x82\xa1q\xa5" "bench\xabjob_payload\xc5";
    memcpy(p, fields, sizeof fields - 1);
    n = sizeof fields - 1;
    p[n++] = (uint8_t)(bytes >> 8);
    p[n++] = (uint8_t)bytes;
    memcpy(p + n, payload, bytes);
    put_frame(peer, p, n + bytes, 'e', ENQUEUE);
    peer->put++;
}

static void overhop_give_credits(struct peer *peer, uint64_t credits) {
    uint8_t p[128];
    size_t n;
    p[0] = 0x82;
    memcpy(p + 1, "\xa3sid\xd9\x24", 6);
    memcpy(p + 7, peer->sid, 36);
    memcpy(p + 43, "\xa7" "credits\xcd", 9);
    n = 52;
    p[n++] = (uint8_t)(credits >> 8);
    p[n++] = (uint8_t)credits;
    put_frame(peer, p, n, 'c', CREDIT);
}

/* All whole frames. A push has "jid" in front of its payload; an answer's request id and type are at its end. */
static size_t overhop_parse(struct peer *peer, const uint8_t *at, size_t n) {
    size_t used = 0;
    while (n - used >= 4) {
        uint32_t length;
        memcpy(&length, at + used, 4);
        length = ntohl(length);
        if (n - used - 4 < length) break;
        const uint8_t *frame = at + used + 4, *end = frame + length;
        used += 4 + length;
        uint8_t type = end[-4];     /* ... rid, "t" <type>, "v" 2: types up to 127 are one byte */
        char rid = (char)end[-7];
        if (type == PUSH) {
            const uint8_t *jid = memmem(frame, length, "\xa3jid", 4);
            uint8_t p[JID_ROOM];
            if (jid == NULL || jid[4] != 0xd9) die("a push without a job id");
            size_t size = 2 + jid[5];
            p[0] = 0x81;
            memcpy(p + 1, jid, 4 + size);
            put_frame(peer, p, 5 + size, 'd', DONE);
            if (++peer->owed >= (window + 1) / 2) {
                overhop_give_credits(peer, peer->owed);
                peer->owed = 0;
            }
        } else if (type != OK) {
            die("the gateway answered %d: %.*s", type, (int)length, (const char *)frame);
        } else if (rid == 'd') {
            peer->done++;
            struct peer *next = next_to_put(peer);
            if (next != NULL) overhop_put_job(next);
        }
    }
    return used;
}

static void say(struct peer *peer, const char *p, size_t n, uint8_t type, uint8_t *answer, size_t room) {
    size_t got = 0;
    put_frame(peer, (const uint8_t *)p, n, 'x', type);
    if (write(peer->fd, peer->out, peer->out_size) != (ssize_t)peer->out_size) die("write: %s", strerror(errno));
    peer->out_size = 0;
    for (uint32_t length = UINT32_MAX - 4; got < 4 || got < 4 + (size_t)length;) {
        ssize_t more = read(peer->fd, answer + got, room - got);
        if (more <= 0) die("the gateway hung up in the handshake");
        got += (size_t)more;
        if (got >= 4) {
            memcpy(&length, answer, 4);
            length = ntohl(length);
        }
    }
}

static void overhop_greet(struct peer *peer) {
    uint8_t answer[1024], *sid;
    say(peer, "\x80", 1, 1, answer, sizeof answer);
    say(peer, "\x80", 1, 2, answer, sizeof answer);
    say(peer, "\x81\xa4name\xa5" "bench", 12, 9, answer, sizeof answer); /* from the second on it is there already */
    say(peer, "\x81\xa1q\xa5" "bench", 9, 6, answer, sizeof answer);
    sid = memmem(answer, sizeof answer, "\xa3sid\xd9\x24", 6);
    if (sid == NULL) die("no subscription");
    memcpy(peer->sid, sid + 6, 36);
    overhop_give_credits(peer, window);
}

/* --- Redis --------------------------------------------------------------------------------------------------------- */

enum { LPUSH, BRPOPLPUSH, LREM };

static void expect(struct peer *peer, uint8_t kind) {
    peer->kinds[peer->kinds_end++ % sizeof peer->kinds] = kind;
}

static void redis_put_job(struct peer *peer) {
    char head[64];
    put(peer, head, (size_t)sprintf(head, "*3\r\n$5\r\nLPUSH\r\n$5\r\nbench\r\n$%u\r\n", bytes));
    put(peer, payload, bytes);
    put(peer, "\r\n", 2);
    expect(peer, LPUSH);
    peer->put++;
}

static size_t redis_parse(struct peer *peer, const uint8_t *at, size_t n) {
    static const char take[] = "*4\r\n$10\r\nBRPOPLPUSH\r\n$5\r\nbench\r\n$4\r\nwork\r\n$1\r\n0\r\n";
    size_t used = 0;
    while (used < n) {
        const uint8_t *line = at + used, *end = memchr(line, '\n', n - used);
        char head[64];
        if (end == NULL) break;
        size_t whole = (size_t)(end - line) + 1;
        if (line[0] == '-') die("redis answered %.*s", (int)whole, (const char *)line);
        if (line[0] == '$') {
            size_t size = strtoul((const char *)line + 1, NULL, 10) + 2;
            if (n - used < whole + size) break;
            /* The oldest one is at the list's end. */
            put(peer, head, (size_t)sprintf(head, "*4\r\n$4\r\nLREM\r\n$4\r\nwork\r\n$2\r\n-1\r\n$%zu\r\n", size - 2));
            put(peer, line + whole, size);
            expect(peer, LREM);
            whole += size;
        } else if (peer->kinds[peer->kinds_first % sizeof peer->kinds] == LPUSH) {
            put(peer, take, sizeof take - 1);
            expect(peer, BRPOPLPUSH);
        } else {
            if (memcmp(line, ":1\r\n", 4) != 0) die("a job was not in the list");
            peer->done++;
            struct peer *next = next_to_put(peer);
            if (next != NULL) redis_put_job(next);
        }
        peer->kinds_first++;
        used += whole;
    }
    return used;
}

/* --- both ---------------------------------------------------------------------------------------------------------- */

static void connect_peer(struct peer *peer, int port) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int on = 1;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    peer->fd = socket(AF_INET, SOCK_STREAM, 0);
    peer->in = malloc(BUFFER);
    peer->out = malloc(BUFFER);
    if (peer->fd < 0 || connect(peer->fd, (struct sockaddr *)&to, sizeof to) != 0) die("connect: %s", strerror(errno));
    setsockopt(peer->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (overhop) overhop_greet(peer);
    fcntl(peer->fd, F_SETFL, O_NONBLOCK);
}

static void flush(struct peer *peer) {
    while (peer->out_sent < peer->out_size) {
        ssize_t n = write(peer->fd, peer->out + peer->out_sent, peer->out_size - peer->out_sent);
        if (n < 0 && errno == EAGAIN) break;
        if (n < 0) die("write: %s", strerror(errno));
        peer->out_sent += (size_t)n;
    }
    memmove(peer->out, peer->out + peer->out_sent, peer->out_size - peer->out_sent);
    peer->out_size -= peer->out_sent;
    peer->out_sent = 0;
}

static void receive(struct peer *peer) {
    ssize_t n = read(peer->fd, peer->in + peer->in_size, BUFFER - peer->in_size);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) die("the server hung up");
    peer->in_size += (size_t)n;
    size_t used = (overhop ? overhop_parse : redis_parse)(peer, peer->in, peer->in_size);
    memmove(peer->in, peer->in + used, peer->in_size - used);
    peer->in_size -= used;
}

int main(int argc, char **argv) {
    struct pollfd watched[MOST_CONNECTIONS];
    struct rusage used;
    uint64_t done = 0, jobs;
    if (argc != 8) die("usage: load overhop|redis PORT CONNECTIONS WINDOW BYTES JOBS LIMIT_SECONDS");
    overhop = strcmp(argv[1], "overhop") == 0;
    connections = (unsigned)atoi(argv[3]);
    window = (unsigned)atoi(argv[4]);
    bytes = (unsigned)atoi(argv[5]);
    if (connections > MOST_CONNECTIONS || window > MOST_WINDOW || bytes > MOST_BYTES) die("too much of something");
    share = strtoull(argv[6], NULL, 10) / connections;
    jobs = share * connections;
    for (unsigned i = 0; i < bytes; i++) payload[i] = (uint8_t)('a' + i % 26);
    for (unsigned i = 0; i < connections; i++) connect_peer(&peers[i], atoi(argv[2]));
    int64_t start = now_ns(), limit = start + atoll(argv[7]) * 1000000000LL;
    for (unsigned i = 0; i < connections; i++)
        while (peers[i].put < window && peers[i].put < share) (overhop ? overhop_put_job : redis_put_job)(&peers[i]);
    while (done < jobs) {
        if (now_ns() > limit) die("%llu of %llu jobs were done in time", (unsigned long long)done, (unsigned long long)jobs);
        for (unsigned i = 0; i < connections; i++) {
            flush(&peers[i]);
            watched[i] = (struct pollfd){.fd = peers[i].fd, .events = POLLIN | (peers[i].out_size ? POLLOUT : 0)};
        }
        poll(watched, connections, 1000);
        done = 0;
        for (unsigned i = 0; i < connections; i++) {
            if (watched[i].revents & ~POLLOUT) receive(&peers[i]);
            done += peers[i].done;
        }
    }
    double seconds = (double)(now_ns() - start) / 1e9;
    getrusage(RUSAGE_SELF, &used);
    double cpu = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec)
        + (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
    printf("{\"jobs\": %llu, \"seconds\": %.6f, \"busy\": %.3f}\n", (unsigned long long)jobs, seconds, cpu / seconds);
    return 0;
}
