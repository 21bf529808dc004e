/* Loads one message system over loopback and prints what it saw as one line of JSON: the sender (and
 * receiver) that bench/peers uses for every system alike. It knows nothing of how servers are started,
 * of budgets, or of the figures of other runs.
 *
 * All connections live in one thread. Publishers write from a block of ready-made frames, a megabyte at
 * a time, so that the load costs little more than the kernel's copy. Everything goes to 127.0.0.1.
 *
 *   publish    a burst of N messages (or T seconds of them), then a fence that the server answers only
 *              when it has taken everything before it
 *   confirm    N messages, each confirmed by the server, at most WINDOW unconfirmed per connection
 *   deliver    N messages from the publishers to one subscriber; ends when the last one arrived
 *   latency    the same at a fixed rate; times from when a message was due to when it was read
 *   roundtrip  one message at a time: there, back, and acknowledged; N of them, or T seconds
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum mode { PUBLISH, CONFIRM, DELIVER, LATENCY, ROUNDTRIP, MODES };
static const char *const mode_names[MODES] = {"publish", "confirm", "deliver", "latency", "roundtrip"};

enum {
    MAX_CONNECTIONS = 1024,
    MAX_SIZE = 1 << 20,
    MAX_REPEAT = 1000,
    MAX_SECONDS_SEEN = 3600,
    BLOCK_BYTES = 1 << 20,     /* ready-made frames; small enough to stay in a last-level cache */
    IN_BYTES = 4 << 20,        /* must hold the largest frame; larger than one read */
    READ_BYTES = 512 << 10,    /* one read: bounded, so that publishing and receiving take turns */
    SEND_BUFFER = 256 << 10,   /* left to itself the kernel lets megabytes queue up, which fall out of the caches:
                                  the discarding reader then gets half as much, nats-server about the same */
    HEAD_BYTES = 512,          /* room for a publish frame before its payload */
    MAX_POLLS = 2048,          /* POLLs in one batch; a batch ends with a PING */
    MIN_POLLS = 64,
    POLL_BATCHES = 2,          /* batches under way, so that the server need not wait for the next one */
    QUANTUM_NS = 50 * 1000,    /* pacing: messages that are due are sent together, this often */
    PATIENCE_SECONDS = 10,     /* for an answer, while connecting and in round trips */
    REGION_BYTES = 256 << 20,  /* mapped file for the memory limit: larger than the caches */
};

struct system;

static struct {
    const struct system *system;
    enum mode mode;
    uint16_t port;
    unsigned size, connections, repeat, window, batch, qos, limit;
    uint64_t messages;
    double seconds, pause, rate;
    const char *key, *file;
} options = {
    .size = 100, .connections = 1, .repeat = 1, .window = 1024, .batch = 128, .limit = 120,
    .messages = 100000, .key = "dev-key",
};

/* One connection. */
struct peer {
    int fd;
    unsigned number;
    bool readable, writable;
    uint8_t *in;
    size_t in_used;
    uint8_t *out;                      /* small frames that wait to be written: fences, polls, acknowledgements */
    size_t out_at, out_used, out_room;
    const uint8_t *block;              /* ready-made publish frames, written over and over */
    size_t block_bytes, block_at;
    uint64_t granted;                  /* bytes of the block that may still be written now */
    uint64_t sent;                     /* bytes of the block that were written */
    uint64_t fences, confirmed, delivered, accepted;
    bool owes_pong;                    /* NATS servers ping their clients */
    uint64_t subscription;             /* BlipMQ: subscription id, once this peer polls */
    uint64_t at_last_batch;            /* BlipMQ: `delivered` when the last batch of polls was complete */
};

struct system {
    const char *name;
    unsigned modes;                                     /* bits of the modes it is spoken in */
    bool own_block;                                     /* publish frames differ between connections */
    const char *tail;                                   /* what follows the payload */
    size_t (*head)(uint8_t *at, unsigned peer, uint64_t id);
    size_t (*fence)(uint8_t *at);
    size_t (*parse)(struct peer *peer, const uint8_t *bytes, size_t n); /* returns what it used up */
    void (*greet)(struct peer *peer);                   /* blocking, until the server takes publishes */
    void (*subscribe)(struct peer *peer);               /* blocking, until the server knows of it */
};

static struct peer *peers;
static unsigned peer_count;
static int poller = -1;
static size_t frame_bytes;        /* one publish frame, payload and all */
static size_t payload_at;         /* where its payload begins */
static size_t unit_bytes;         /* what a publisher writes as a whole: a frame, or a batch and its fence */
static int64_t arrived_at;        /* when the bytes that are being parsed were read */

/* ---- small things -------------------------------------------------------------------------------- */

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("load: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void rest(double seconds) {
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&t, &t) < 0 && errno == EINTR) {
    }
}

static double cpu_seconds(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec)
         + (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

static void *room_for(size_t bytes) {
    void *memory = malloc(bytes);
    if (!memory) die("no memory for %zu bytes", bytes);
    return memory;
}

static void put_be16(uint8_t *at, uint16_t value) { at[0] = (uint8_t)(value >> 8); at[1] = (uint8_t)value; }
static void put_be32(uint8_t *at, uint32_t value) { value = htonl(value); memcpy(at, &value, 4); }
static void put_be64(uint8_t *at, uint64_t value) { value = __builtin_bswap64(value); memcpy(at, &value, 8); }
static uint16_t be16(const uint8_t *at) { return (uint16_t)(at[0] << 8 | at[1]); }
static uint32_t be32(const uint8_t *at) { uint32_t v; memcpy(&v, at, 4); return ntohl(v); }
static uint64_t be64(const uint8_t *at) { uint64_t v; memcpy(&v, at, 8); return __builtin_bswap64(v); }

/* ---- times: a histogram with 128 steps an octave, that is within 0.8 % ------------------------------ */

enum { STEP_BITS = 7, STEPS = 1 << STEP_BITS, OCTAVES = 65 - STEP_BITS };
static struct {
    uint64_t counts[OCTAVES * STEPS];
    uint64_t total, worst;
} times;

static void record_time(int64_t ns) {
    uint64_t value = ns < 1 ? 1 : (uint64_t)ns;
    unsigned octave = value < STEPS ? 0 : 64 - STEP_BITS - (unsigned)__builtin_clzll(value);
    uint64_t step = octave ? (value >> (octave - 1)) - STEPS : value;
    times.counts[(octave * STEPS) + step]++;
    times.total++;
    if (value > times.worst) times.worst = value;
}

static double quantile_us(double q) {
    uint64_t wanted = (uint64_t)(q * (double)times.total), seen = 0;
    for (unsigned i = 0; i < OCTAVES * STEPS; i++) {
        seen += times.counts[i];
        if (seen > wanted) {
            unsigned octave = i / STEPS, step = i % STEPS;
            return octave ? (double)((uint64_t)(step + STEPS) << (octave - 1)) / 1e3 : step / 1e3;
        }
    }
    return (double)times.worst / 1e3;
}

/* ---- what every protocol reports --------------------------------------------------------------------- */

static void put(struct peer *peer, const void *bytes, size_t n) {
    if (peer->out_used + n > peer->out_room && peer->out_at > 0) {
        memmove(peer->out, peer->out + peer->out_at, peer->out_used - peer->out_at);
        peer->out_used -= peer->out_at;
        peer->out_at = 0;
    }
    if (peer->out_used + n > peer->out_room) {
        peer->out_room = (peer->out_used + n) * 2;
        peer->out = realloc(peer->out, peer->out_room);
        if (!peer->out) die("no memory for %zu bytes of output", peer->out_room);
    }
    memcpy(peer->out + peer->out_used, bytes, n);
    peer->out_used += n;
}

static uint64_t warm_until; /* messages with a smaller number are not timed */

static void take_delivery(struct peer *peer, const uint8_t *payload, size_t n) {
    if (n != options.size) die("a delivery has %zu bytes, the messages had %u", n, options.size);
    peer->delivered++;
    if (options.mode == LATENCY) {
        int64_t due;
        uint64_t number;
        memcpy(&due, payload, 8);
        memcpy(&number, payload + 8, 8);
        if (number >= warm_until) record_time(arrived_at - due);
    }
}

/* ---- BlipMQ ---------------------------------------------------------------------------------------------- */

enum { HELLO = 1, AUTH, PUBLISH_FRAME, SUBSCRIBE, ACK, NACK, PING, PONG, POLL };
enum { BLIP_HEADER = 13, BLIP_POLL = BLIP_HEADER + 8, BLIP_MAX_FRAME = 16 << 20 };
static const char blip_topic[] = "bench";
static uint8_t poll_batch[MAX_POLLS * BLIP_POLL + BLIP_HEADER]; /* a batch of k is the last k POLLs, and the PING */

static size_t blip_frame(uint8_t *at, uint8_t type, uint64_t id, size_t payload) {
    put_be32(at, (uint32_t)(9 + payload));
    at[4] = type;
    put_be64(at + 5, id);
    return BLIP_HEADER + payload;
}

static size_t blip_head(uint8_t *at, unsigned peer, uint64_t id) {
    (void)peer;
    size_t topic = sizeof blip_topic - 1;
    blip_frame(at, PUBLISH_FRAME, id, 3 + topic + options.size);
    at[13] = (uint8_t)options.qos;
    put_be16(at + 14, (uint16_t)topic);
    memcpy(at + 16, blip_topic, topic);
    return 16 + topic;
}

static size_t blip_fence(uint8_t *at) { return blip_frame(at, PING, UINT64_MAX, 0); }

static void blip_ask(struct peer *peer, uint64_t polls) {
    if (polls < MIN_POLLS) polls = MIN_POLLS;
    if (polls > MAX_POLLS) polls = MAX_POLLS;
    size_t bytes = polls * BLIP_POLL + BLIP_HEADER;
    put(peer, poll_batch + sizeof poll_batch - bytes, bytes);
}

static size_t blip_parse(struct peer *peer, const uint8_t *bytes, size_t n) {
    size_t at = 0;
    while (n - at >= BLIP_HEADER) {
        const uint8_t *frame = bytes + at, *body = frame + BLIP_HEADER;
        uint32_t length = be32(frame);
        if (length < 9 || length > BLIP_MAX_FRAME) die("the server sent a frame of length %u", length);
        if (n - at < 4 + (size_t)length) break;
        size_t size = length - 9;
        switch (frame[4]) {
        case PUBLISH_FRAME: {
            size_t skip = size < 3 ? SIZE_MAX : 3 + (size_t)be16(body + 1);
            if (skip > size) die("the server sent a malformed PUBLISH");
            take_delivery(peer, body + skip, size - skip);
            if (body[0] == 1) {
                uint8_t ack[BLIP_HEADER + 8];
                blip_frame(ack, ACK, be64(frame + 5), 8);
                put_be64(ack + BLIP_HEADER, peer->subscription);
                put(peer, ack, sizeof ack);
            }
            break;
        }
        case PONG:
            peer->fences++;
            if (options.mode == CONFIRM) peer->confirmed += options.batch;
            if (peer->subscription && options.mode != ROUNDTRIP) {
                /* Ask for twice what the last batch brought: few empty polls, and never too few polls. */
                blip_ask(peer, 2 * (peer->delivered - peer->at_last_batch));
                peer->at_last_batch = peer->delivered;
            }
            break;
        case ACK:
            if (size != 8) die("the server sent a malformed ACK");
            peer->accepted++;
            if (be64(body)) peer->subscription = be64(body);
            break;
        case NACK:
            if (size < 4 || (size_t)be16(body + 2) > size - 4) die("the server sent a malformed NACK");
            die("the server answered %u: %.*s", be16(body), (int)be16(body + 2), (const char *)body + 4);
        default:
            die("the server sent a frame of type %u", frame[4]);
        }
        at += 4 + (size_t)length;
    }
    return at;
}

/* ---- NATS, core and JetStream --------------------------------------------------------------------------- */

static const char nats_subject[] = "bench";
static const char nats_connect[] =
    "CONNECT {\"verbose\":false,\"pedantic\":false,\"lang\":\"c\",\"version\":\"1\",\"name\":\"bench\","
    "\"protocol\":1}\r\nPING\r\n";
static const char stream_config[] =
    "{\"name\":\"BENCH\",\"subjects\":[\"bench\"],\"storage\":\"file\",\"retention\":\"limits\",\"num_replicas\":1,"
    "\"max_msgs\":-1,\"max_bytes\":-1,\"max_consumers\":-1,\"discard\":\"old\"}";
static char delivery_line[128]; /* the line before each delivered payload, while the server keeps to one form */
static size_t delivery_line_bytes;

static size_t nats_head(uint8_t *at, unsigned peer, uint64_t id) {
    (void)peer, (void)id;
    return (size_t)sprintf((char *)at, "PUB %s %u\r\n", nats_subject, options.size);
}

static size_t jetstream_head(uint8_t *at, unsigned peer, uint64_t id) {
    (void)id; /* the inbox has a fixed width: frames are the same length on all connections */
    return (size_t)sprintf((char *)at, "PUB %s _INBOX.bench.%04u %u\r\n", nats_subject, peer, options.size);
}

static size_t nats_fence(uint8_t *at) { memcpy(at, "PING\r\n", 6); return 6; }

static bool begins(const uint8_t *bytes, size_t n, const char *with) {
    size_t length = strlen(with);
    return n >= length && memcmp(bytes, with, length) == 0;
}

static size_t nats_parse(struct peer *peer, const uint8_t *bytes, size_t n) {
    size_t at = 0;
    while (at < n) {
        const uint8_t *line = bytes + at;
        size_t left = n - at;
        if (delivery_line_bytes && left >= delivery_line_bytes
            && memcmp(line, delivery_line, delivery_line_bytes) == 0) {
            if (left < delivery_line_bytes + options.size + 2) break;
            take_delivery(peer, line + delivery_line_bytes, options.size);
            at += delivery_line_bytes + options.size + 2;
            continue;
        }
        const uint8_t *end = memchr(line, '\n', left);
        if (!end) {
            if (left > 65536) die("the server sent a line without an end");
            break;
        }
        size_t length = (size_t)(end - line) + 1;
        if (begins(line, length, "MSG ")) {
            const uint8_t *number = memrchr(line, ' ', length);
            unsigned long size = strtoul((const char *)number, NULL, 10);
            if (size > MAX_SIZE) die("the server announced a message of %lu bytes", size);
            if (left < length + size + 2) break;
            if (begins(line, length, "MSG _INBOX.bench.")) {
                if (memmem(end + 1, size, "\"error\"", 7)) die("JetStream answered: %.*s", (int)size, end + 1);
                peer->confirmed++;
            } else {
                take_delivery(peer, end + 1, size);
            }
            at += length + size + 2;
            continue;
        }
        if (begins(line, length, "PONG")) peer->fences++;
        else if (begins(line, length, "PING")) peer->owes_pong = true;
        else if (begins(line, length, "INFO")) peer->accepted++;
        else if (!begins(line, length, "+OK")) die("the server answered: %.*s", (int)(length - 1), line);
        at += length;
    }
    return at;
}

/* ---- Redis Streams ----------------------------------------------------------------------------------------- */

static size_t redis_head(uint8_t *at, unsigned peer, uint64_t id) {
    (void)peer, (void)id;
    return (size_t)sprintf((char *)at,
                           "*5\r\n$4\r\nXADD\r\n$5\r\nbench\r\n$1\r\n*\r\n$1\r\nd\r\n$%u\r\n", options.size);
}

static size_t no_fence(uint8_t *at) { (void)at; return 0; }

static size_t redis_parse(struct peer *peer, const uint8_t *bytes, size_t n) {
    size_t at = 0;
    while (at < n) {
        const uint8_t *line = bytes + at, *end = memchr(line, '\n', n - at);
        if (!end) {
            if (n - at > 65536) die("the server sent a line without an end");
            break;
        }
        size_t length = (size_t)(end - line) + 1;
        if (line[0] == '$') { /* the id of the new entry */
            long size = strtol((const char *)line + 1, NULL, 10);
            if (size < 0 || size > MAX_SIZE) die("the server answered: %.*s", (int)(length - 1), line);
            if (n - at < length + (size_t)size + 2) break;
            peer->confirmed++;
            at += length + (size_t)size + 2;
            continue;
        }
        if (line[0] != '+') die("the server answered: %.*s", (int)(length - 1), line);
        peer->accepted++;
        at += length;
    }
    return at;
}

/* ---- a reader that throws everything away: what the sender itself can do ------------------------------------ */

static size_t drain_parse(struct peer *peer, const uint8_t *bytes, size_t n) {
    (void)bytes;
    peer->fences += n;
    return n;
}

/* ---- connections ---------------------------------------------------------------------------------------------- */

static void write_all(struct peer *peer, const void *bytes, size_t n) {
    for (size_t at = 0; at < n;) {
        ssize_t wrote = send(peer->fd, (const uint8_t *)bytes + at, n - at, MSG_NOSIGNAL);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote < 0) die("write: %s", strerror(errno));
        at += (size_t)wrote;
    }
}

static void flush_blocking(struct peer *peer) {
    write_all(peer, peer->out + peer->out_at, peer->out_used - peer->out_at);
    peer->out_at = peer->out_used = 0;
}

/* One read and the parsing of what it brought. False if there is nothing more to read now. */
static bool receive(struct peer *peer) {
    size_t room = IN_BYTES - peer->in_used, wanted = room < READ_BYTES ? room : READ_BYTES;
    ssize_t got = recv(peer->fd, peer->in + peer->in_used, wanted, 0);
    if (got < 0 && errno == EINTR) return true;
    if (got < 0 && errno == EAGAIN) return false;
    if (got < 0) die("read: %s", strerror(errno));
    if (got == 0) die("the server closed connection %u", peer->number);
    arrived_at = options.mode == LATENCY ? now_ns() : 0;
    peer->in_used += (size_t)got;
    size_t used = options.system->parse(peer, peer->in, peer->in_used);
    peer->in_used -= used;
    memmove(peer->in, peer->in + used, peer->in_used);
    return (size_t)got == wanted;
}

/* Blocking (connect_peer sets the patience): reads until *counter has reached `target`. */
static void await(struct peer *peer, const uint64_t *counter, uint64_t target, const char *what) {
    while (*counter < target) {
        errno = 0;
        if (!receive(peer) && errno == EAGAIN) die("no answer within %d s to %s", PATIENCE_SECONDS, what);
    }
}

static void blip_greet(struct peer *peer) {
    uint8_t frame[HEAD_BYTES];
    size_t key = strlen(options.key);
    if (key > sizeof frame - BLIP_HEADER - 2) die("the key is too long");
    size_t n = blip_frame(frame, HELLO, 1, 2);
    put_be16(frame + BLIP_HEADER, 1);
    write_all(peer, frame, n);
    await(peer, &peer->accepted, 1, "HELLO");
    n = blip_frame(frame, AUTH, 2, 2 + key);
    put_be16(frame + BLIP_HEADER, (uint16_t)key);
    memcpy(frame + BLIP_HEADER + 2, options.key, key);
    write_all(peer, frame, n);
    await(peer, &peer->accepted, 2, "AUTH");
}

static void blip_subscribe(struct peer *peer) {
    uint8_t frame[HEAD_BYTES];
    size_t topic = sizeof blip_topic - 1;
    size_t n = blip_frame(frame, SUBSCRIBE, 3, 2 + topic + 1);
    put_be16(frame + BLIP_HEADER, (uint16_t)topic);
    memcpy(frame + BLIP_HEADER + 2, blip_topic, topic);
    frame[BLIP_HEADER + 2 + topic] = (uint8_t)options.qos;
    write_all(peer, frame, n);
    await(peer, &peer->accepted, 3, "SUBSCRIBE");
    for (unsigned i = 0; i < MAX_POLLS; i++) {
        blip_frame(poll_batch + i * BLIP_POLL, POLL, i, 8);
        put_be64(poll_batch + i * BLIP_POLL + BLIP_HEADER, peer->subscription);
    }
    blip_fence(poll_batch + MAX_POLLS * BLIP_POLL);
    if (options.mode != ROUNDTRIP)
        for (unsigned i = 0; i < POLL_BATCHES; i++) blip_ask(peer, 0);
}

static void nats_greet(struct peer *peer) {
    await(peer, &peer->accepted, 1, "the connection (a NATS server speaks first)");
    write_all(peer, nats_connect, sizeof nats_connect - 1);
    await(peer, &peer->fences, 1, "CONNECT");
    peer->fences = 0;
}

static void nats_subscribe(struct peer *peer) {
    static const char request[] = "SUB bench 1\r\nPING\r\n";
    delivery_line_bytes = (size_t)sprintf(delivery_line, "MSG bench 1 %u\r\n", options.size);
    write_all(peer, request, sizeof request - 1);
    await(peer, &peer->fences, 1, "SUB");
    peer->fences = 0;
}

static void jetstream_greet(struct peer *peer) {
    char request[HEAD_BYTES + sizeof stream_config];
    nats_greet(peer);
    int n = sprintf(request, "SUB _INBOX.bench.%04u 1\r\n", peer->number);
    if (peer->number == 0)
        n += sprintf(request + n, "PUB $JS.API.STREAM.CREATE.BENCH _INBOX.bench.0000 %zu\r\n%s\r\n",
                     sizeof stream_config - 1, stream_config);
    write_all(peer, request, (size_t)n);
    if (peer->number == 0) await(peer, &peer->confirmed, 1, "the creation of the stream");
    write_all(peer, "PING\r\n", 6);
    await(peer, &peer->fences, 1, "SUB");
    peer->fences = peer->confirmed = 0;
}

static void redis_greet(struct peer *peer) {
    static const char ping[] = "*1\r\n$4\r\nPING\r\n";
    write_all(peer, ping, sizeof ping - 1);
    await(peer, &peer->accepted, 1, "PING");
}

static void no_greeting(struct peer *peer) { (void)peer; }

#define MODE(name) (1u << (name))
static const struct system systems[] = {
    {"blipmq", MODE(PUBLISH) | MODE(CONFIRM) | MODE(DELIVER) | MODE(LATENCY) | MODE(ROUNDTRIP), false, "",
     blip_head, blip_fence, blip_parse, blip_greet, blip_subscribe},
    {"nats", MODE(PUBLISH) | MODE(DELIVER) | MODE(LATENCY) | MODE(ROUNDTRIP), false, "\r\n",
     nats_head, nats_fence, nats_parse, nats_greet, nats_subscribe},
    {"jetstream", MODE(CONFIRM), true, "\r\n", jetstream_head, no_fence, nats_parse, jetstream_greet, NULL},
    {"redis", MODE(CONFIRM), false, "\r\n", redis_head, no_fence, redis_parse, redis_greet, NULL},
    {"drain", MODE(PUBLISH), false, "", blip_head, no_fence, drain_parse, no_greeting, NULL},
    {"memory", MODE(PUBLISH), false, "", blip_head, NULL, NULL, NULL, NULL},
};

static void connect_peer(struct peer *peer, unsigned number) {
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(options.port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    memset(peer, 0, sizeof *peer);
    peer->number = number;
    peer->in = room_for(IN_BYTES);
    peer->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (peer->fd < 0) die("socket: %s", strerror(errno));
    if (connect(peer->fd, (struct sockaddr *)&address, sizeof address) < 0)
        die("connect to 127.0.0.1:%u: %s", options.port, strerror(errno));
    /* A BlipMQ client of the wild has Nagle's algorithm on, and the round trip is measured as it sees it. */
    int nodelay = !(options.mode == ROUNDTRIP && options.system->parse == blip_parse);
    setsockopt(peer->fd, IPPROTO_TCP, TCP_NODELAY, &nodelay, sizeof nodelay);
    int send_buffer = SEND_BUFFER;
    setsockopt(peer->fd, SOL_SOCKET, SO_SNDBUF, &send_buffer, sizeof send_buffer);
    struct timeval patience = {PATIENCE_SECONDS, 0};
    setsockopt(peer->fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    options.system->greet(peer);
}

static void make_nonblocking(struct peer *peer) {
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.ptr = peer};
    if (fcntl(peer->fd, F_SETFL, O_NONBLOCK) < 0) die("fcntl: %s", strerror(errno));
    if (epoll_ctl(poller, EPOLL_CTL_ADD, peer->fd, &event) < 0) die("epoll_ctl: %s", strerror(errno));
}

/* Writes what waits, once: small frames first, then as much of the block as is granted. */
static void push(struct peer *peer) {
    const uint8_t *from;
    size_t n;
    bool whole = peer->granted == 0 || peer->block_at == 0; /* between frames, so that others fit in */
    if (whole && peer->owes_pong) {
        put(peer, "PONG\r\n", 6);
        peer->owes_pong = false;
    }
    bool small = peer->out_at < peer->out_used;
    if (small) {
        from = peer->out + peer->out_at;
        n = peer->out_used - peer->out_at;
    } else {
        from = peer->block + peer->block_at;
        n = peer->block_bytes - peer->block_at;
        if (n > peer->granted) n = (size_t)peer->granted;
    }
    ssize_t wrote = send(peer->fd, from, n, MSG_NOSIGNAL);
    if (wrote < 0 && errno == EINTR) return;
    if (wrote < 0 && errno != EAGAIN) die("write: %s", strerror(errno));
    if (wrote < (ssize_t)n) peer->writable = false;
    if (wrote < 0) return;
    if (small) {
        peer->out_at += (size_t)wrote;
        if (peer->out_at == peer->out_used) peer->out_at = peer->out_used = 0;
        return;
    }
    peer->block_at += (size_t)wrote;
    if (peer->block_at == peer->block_bytes) peer->block_at = 0;
    peer->granted -= (uint64_t)wrote;
    peer->sent += (uint64_t)wrote;
}

static bool wants_to_write(const struct peer *peer) {
    return peer->out_at < peer->out_used || peer->granted > 0 || peer->owes_pong;
}

/* One turn of the loop: learns what is ready, then reads once from and writes once to each connection that is.
 * Sleeps at most `sleep_ns`, and only if there is nothing to do. */
static void turn(int64_t sleep_ns) {
    struct epoll_event events[64];
    for (unsigned i = 0; i < peer_count && sleep_ns > 0; i++)
        if (peers[i].readable || (peers[i].writable && wants_to_write(&peers[i]))) sleep_ns = 0;
    struct timespec patience = {sleep_ns / 1000000000, sleep_ns % 1000000000};
    int ready = epoll_pwait2(poller, events, 64, &patience, NULL);
    if (ready < 0 && errno != EINTR) die("epoll_pwait2: %s", strerror(errno));
    for (int i = 0; i < ready; i++) {
        struct peer *peer = events[i].data.ptr;
        if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) peer->readable = true;
        if (events[i].events & EPOLLOUT) peer->writable = true;
    }
    for (unsigned i = 0; i < peer_count; i++) {
        struct peer *peer = &peers[i];
        if (peer->readable) peer->readable = receive(peer);
        if (peer->writable && wants_to_write(peer)) push(peer);
    }
}

static const int64_t WHILE = 100 * 1000 * 1000; /* a turn with nothing to do ends after this, to look at the time */

/* ---- the ready-made frames --------------------------------------------------------------------------------- */

static void fill_payload(uint8_t *at, uint64_t *seed) {
    for (unsigned i = 0; i < options.size; i++) {
        *seed ^= *seed << 13, *seed ^= *seed >> 7, *seed ^= *seed << 17;
        at[i] = (uint8_t)("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-"[*seed >> 58]);
    }
}

/* A block is a whole number of units, so that it can be written over and over. */
static uint8_t *build_block(unsigned peer, size_t *bytes) {
    unsigned per_unit = options.mode == CONFIRM ? options.batch : 1;
    uint8_t fence[HEAD_BYTES], head[HEAD_BYTES];
    size_t fence_bytes = options.mode == CONFIRM ? options.system->fence(fence) : 0;
    size_t tail_bytes = strlen(options.system->tail);
    payload_at = options.system->head(head, peer, 0);
    frame_bytes = payload_at + options.size + tail_bytes;
    unit_bytes = frame_bytes * per_unit + fence_bytes;
    size_t units = BLOCK_BYTES / unit_bytes ? BLOCK_BYTES / unit_bytes : 1;
    uint8_t *block = room_for(units * unit_bytes + HEAD_BYTES), *at = block;
    uint64_t seed = 0x9E3779B97F4A7C15u + peer, id = 0;
    for (size_t unit = 0; unit < units; unit++) {
        for (unsigned i = 0; i < per_unit; i++) {
            at += options.system->head(at, peer, ++id);
            fill_payload(at, &seed);
            at += options.size;
            memcpy(at, options.system->tail, tail_bytes);
            at += tail_bytes;
        }
        memcpy(at, fence, fence_bytes);
        at += fence_bytes;
    }
    *bytes = units * unit_bytes;
    return block;
}

static void give_blocks(struct peer *publishers, unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        if (i == 0 || options.system->own_block) {
            publishers[i].block = build_block(publishers[i].number, &publishers[i].block_bytes);
        } else {
            publishers[i].block = publishers[0].block;
            publishers[i].block_bytes = publishers[0].block_bytes;
        }
    }
}

/* ---- what is printed ---------------------------------------------------------------------------------------- */

static struct {
    unsigned runs;
    uint64_t messages[MAX_REPEAT];
    double seconds[MAX_REPEAT];
    unsigned seconds_seen;
    uint64_t per_second[MAX_SECONDS_SEEN];
    double cpu;
    uint64_t lost;
} seen;

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void note_run(uint64_t messages, int64_t ns) {
    seen.messages[seen.runs] = messages;
    seen.seconds[seen.runs++] = (double)ns / 1e9;
}

static void print_result(void) {
    double rates[MAX_REPEAT], sorted[MAX_REPEAT], busy = 0;
    for (unsigned i = 0; i < seen.runs; i++) {
        rates[i] = sorted[i] = (double)seen.messages[i] / seen.seconds[i];
        busy += seen.seconds[i];
    }
    qsort(sorted, seen.runs, sizeof *sorted, by_value);
    double median = (sorted[(seen.runs - 1) / 2] + sorted[seen.runs / 2]) / 2;
    printf("{\"system\":\"%s\",\"mode\":\"%s\",\"size\":%u,\"connections\":%u,\"qos\":%u,\"window\":%u,\"batch\":%u,"
           "\"frame_bytes\":%zu,\"rate\":%.1f,\"rates\":[",
           options.system->name, mode_names[options.mode], options.size, options.connections, options.qos,
           options.window, options.batch, frame_bytes, median);
    for (unsigned i = 0; i < seen.runs; i++) printf("%s%.1f", i ? "," : "", rates[i]);
    printf("],\"messages\":%llu,\"seconds\":%.6f,\"lost\":%llu,\"load_busy\":%.3f",
           (unsigned long long)seen.messages[seen.runs - 1], busy, (unsigned long long)seen.lost, seen.cpu / busy);
    if (seen.seconds_seen) {
        printf(",\"per_second\":[");
        for (unsigned i = 0; i < seen.seconds_seen; i++)
            printf("%s%llu", i ? "," : "", (unsigned long long)seen.per_second[i]);
        printf("]");
    }
    if (times.total)
        printf(",\"timed\":%llu,\"p50_us\":%.2f,\"p99_us\":%.2f,\"p999_us\":%.2f,\"max_us\":%.2f",
               (unsigned long long)times.total, quantile_us(0.5), quantile_us(0.99), quantile_us(0.999),
               (double)times.worst / 1e3);
    printf("}\n");
}

/* ---- the modes ------------------------------------------------------------------------------------------------ */

static uint64_t share(void) { return (options.messages + options.connections - 1) / options.connections; }

static void run_publish(struct peer *publishers) {
    uint8_t fence[HEAD_BYTES];
    size_t fence_bytes = options.system->fence(fence);
    uint64_t each = share();
    int64_t start = now_ns(), second = start + 1000000000, end = start + (int64_t)(options.seconds * 1e9);
    bool timed = options.seconds > 0, fenced[MAX_CONNECTIONS] = {false};
    uint64_t sent_before = 0, at_second = 0, sent = 0, done_before[MAX_CONNECTIONS];
    unsigned done = 0;
    for (unsigned i = 0; i < options.connections; i++) {
        done_before[i] = publishers[i].fences;
        sent_before += publishers[i].sent;
        publishers[i].granted = timed ? UINT64_MAX / 2 : each * frame_bytes;
    }
    while (done < options.connections) {
        turn(WHILE);
        if (timed) {
            int64_t now = now_ns();
            if (now >= second && seen.seconds_seen < MAX_SECONDS_SEEN) {
                sent = 0;
                for (unsigned i = 0; i < options.connections; i++) sent += publishers[i].sent;
                seen.per_second[seen.seconds_seen++] = (sent - sent_before - at_second) / frame_bytes;
                at_second = sent - sent_before;
                second += 1000000000;
            }
            if (now >= end) {
                timed = false;
                for (unsigned i = 0; i < options.connections; i++)
                    publishers[i].granted = (frame_bytes - publishers[i].block_at % frame_bytes) % frame_bytes;
            }
        }
        done = 0;
        for (unsigned i = 0; i < options.connections; i++) {
            if (!timed && publishers[i].granted == 0 && !fenced[i]) {
                if (fence_bytes) put(&publishers[i], fence, fence_bytes);
                fenced[i] = true;
            }
            done += publishers[i].fences > done_before[i];
        }
    }
    int64_t took = now_ns() - start;
    sent = 0;
    for (unsigned i = 0; i < options.connections; i++) sent += publishers[i].sent;
    note_run((sent - sent_before) / frame_bytes, took);
}

static void run_confirm(struct peer *publishers) {
    uint64_t each = (share() + options.batch - 1) / options.batch * options.batch;
    uint64_t asked[MAX_CONNECTIONS] = {0}, before[MAX_CONNECTIONS];
    unsigned done = 0;
    for (unsigned i = 0; i < options.connections; i++) before[i] = publishers[i].confirmed;
    int64_t start = now_ns();
    while (done < options.connections) {
        done = 0;
        for (unsigned i = 0; i < options.connections; i++) {
            uint64_t confirmed = publishers[i].confirmed - before[i];
            while (asked[i] < each && asked[i] + options.batch - confirmed <= options.window) {
                publishers[i].granted += unit_bytes;
                asked[i] += options.batch;
            }
            done += confirmed == each;
        }
        if (done < options.connections) turn(WHILE);
    }
    note_run(each * options.connections, now_ns() - start);
}

/* How far publishers may be ahead of the subscriber: half of what makes nats-server hold publishers back. */
enum { AHEAD_BYTES = 16 << 20, GRANT_BYTES = 256 << 10 };

static void run_deliver(struct peer *subscriber, struct peer *publishers) {
    uint64_t each = share(), total = each * options.connections, before = subscriber->delivered, asked = 0;
    uint64_t left[MAX_CONNECTIONS], grant = GRANT_BYTES / frame_bytes ? GRANT_BYTES / frame_bytes : 1;
    uint64_t ahead = AHEAD_BYTES / frame_bytes > grant * options.connections ? AHEAD_BYTES / frame_bytes
                                                                              : grant * options.connections;
    for (unsigned i = 0; i < options.connections; i++) left[i] = each;
    int64_t start = now_ns();
    while (subscriber->delivered - before < total) {
        for (unsigned i = 0; i < options.connections; i++) {
            if (!left[i] || publishers[i].granted) continue;
            if (asked + grant - (subscriber->delivered - before) > ahead) continue;
            uint64_t n = left[i] < grant ? left[i] : grant;
            publishers[i].granted += n * frame_bytes;
            left[i] -= n;
            asked += n;
        }
        turn(WHILE);
    }
    note_run(total, now_ns() - start);
}

/* Sends each message when it is due, whatever became of the ones before; the time in it is when it was due. */
static void run_latency(struct peer *subscriber, struct peer *publishers) {
    enum { TURN_MESSAGES = 4096, HELD_BYTES = 8 << 20 };
    uint64_t total = (uint64_t)(options.rate * options.seconds), sent = 0, before = subscriber->delivered;
    double ns_each = 1e9 / options.rate;
    uint8_t *frame = room_for(frame_bytes);
    memcpy(frame, publishers[0].block, frame_bytes);
    warm_until = total / 10;
    int64_t start = now_ns(), next = start, patience = start + (int64_t)((options.seconds + 10) * 1e9);
    while (subscriber->delivered - before < total) {
        int64_t now = now_ns();
        if (now > patience) break;
        uint64_t due = (uint64_t)((double)(now - start) / ns_each);
        if (due > total) due = total;
        if (now < next) due = sent;
        else next = now + QUANTUM_NS;
        for (unsigned n = 0; sent < due && n < TURN_MESSAGES; n++, sent++) {
            struct peer *publisher = &publishers[sent % options.connections];
            if (publisher->out_used - publisher->out_at > HELD_BYTES) break;
            int64_t when = start + (int64_t)((double)sent * ns_each);
            memcpy(frame + payload_at, &when, 8);
            memcpy(frame + payload_at + 8, &sent, 8);
            put(publisher, frame, frame_bytes);
        }
        turn(sent < total ? next - now : WHILE);
    }
    seen.lost = total - (subscriber->delivered - before);
    note_run(total, now_ns() - start);
    free(frame);
}

/* Round trips: N of them, or as many as fit into --seconds, after a tenth of that which is not timed. */
struct trips {
    uint64_t timed;              /* how many were timed so far */
    int64_t warm_end, start, begin, end;
};

static struct trips plan_trips(void) {
    int64_t now = now_ns(), allowed = (int64_t)((options.seconds > 0 ? options.seconds : MAX_SECONDS_SEEN) * 1e9);
    return (struct trips){.warm_end = now + allowed / 10, .begin = now, .end = now + allowed};
}

static bool another_trip(struct trips *trips, uint64_t number) {
    trips->begin = now_ns();
    if (!trips->start && (number >= options.messages / 10 || trips->begin >= trips->warm_end))
        trips->start = trips->begin;
    if (trips->timed < options.messages && trips->begin < trips->end) return true;
    if (!trips->timed) die("not one round trip could be timed within %.1f s", options.seconds);
    note_run(trips->timed, trips->begin - trips->start);
    return false;
}

static void end_trip(struct trips *trips) {
    if (!trips->start) return;
    record_time(now_ns() - trips->begin);
    trips->timed++;
}

static void answer_ping(struct peer *peer) {
    if (peer->owes_pong) write_all(peer, "PONG\r\n", 6);
    peer->owes_pong = false;
}

static void run_roundtrip_blipmq(struct peer *peer) {
    uint8_t poll[BLIP_POLL];
    blip_frame(poll, POLL, 7, 8);
    put_be64(poll + BLIP_HEADER, peer->subscription);
    struct trips trips = plan_trips();
    for (uint64_t i = 0; another_trip(&trips, i); i++) {
        write_all(peer, peer->block + (i * frame_bytes) % peer->block_bytes, frame_bytes);
        write_all(peer, poll, sizeof poll);
        await(peer, &peer->delivered, i + 1, "POLL");
        flush_blocking(peer); /* the acknowledgement */
        end_trip(&trips);
    }
}

static void run_roundtrip_nats(struct peer *responder, struct peer *requester) {
    char line[HEAD_BYTES];
    uint8_t *request = room_for(HEAD_BYTES + options.size + 2), *reply = room_for(HEAD_BYTES + options.size + 2);
    const uint8_t *payload = requester->block + payload_at;
    size_t head = (size_t)sprintf(line, "PUB bench _INBOX.bench.1 %u\r\n", options.size), request_bytes = head;
    memcpy(request, line, head);
    memcpy(request + request_bytes, payload, options.size + 2);
    request_bytes += options.size + 2;
    head = (size_t)sprintf(line, "PUB _INBOX.bench.1 %u\r\n", options.size);
    memcpy(reply, line, head);
    memcpy(reply + head, payload, options.size + 2);
    size_t reply_bytes = head + options.size + 2;
    delivery_line_bytes = 0; /* a request's line also names its reply subject */
    static const char inbox[] = "SUB _INBOX.bench.1 2\r\nPING\r\n";
    write_all(requester, inbox, sizeof inbox - 1);
    await(requester, &requester->fences, 1, "SUB");
    struct trips trips = plan_trips();
    for (uint64_t i = 0; another_trip(&trips, i); i++) {
        write_all(requester, request, request_bytes);
        await(responder, &responder->delivered, i + 1, "a request");
        write_all(responder, reply, reply_bytes);
        await(requester, &requester->confirmed, i + 1, "a reply");
        end_trip(&trips);
        answer_ping(responder);
        answer_ping(requester);
    }
    free(request);
    free(reply);
}

static void run_memory(void) {
    size_t block_bytes, at = 0;
    uint8_t *block = build_block(0, &block_bytes);
    if (!options.file) die("the memory limit needs --file");
    int fd = open(options.file, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || posix_fallocate(fd, 0, REGION_BYTES))
        die("%s: cannot allocate %d bytes", options.file, REGION_BYTES);
    uint8_t *region = mmap(NULL, REGION_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (region == MAP_FAILED) die("mmap: %s", strerror(errno));
    memset(region, 0, REGION_BYTES);
    for (unsigned run = 0; run < options.repeat; run++) {
        if (run) rest(options.pause);
        int64_t start = now_ns();
        double cpu = cpu_seconds();
        size_t from = 0;
        for (uint64_t i = 0; i < options.messages; i++) {
            memcpy(region + at, block + from, frame_bytes);
            at += frame_bytes, from += frame_bytes;
            if (from == block_bytes) from = 0;
            if (at + frame_bytes > REGION_BYTES) at = 0;
        }
        note_run(options.messages, now_ns() - start);
        seen.cpu += cpu_seconds() - cpu;
    }
    free(block);
    close(fd);
}

/* The child reads, and answers one byte whenever a connection has sent a burst's worth. */
static pid_t start_drain(uint64_t burst_bytes) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, size) < 0 || listen(listener, 1024) < 0
        || getsockname(listener, (struct sockaddr *)&address, &size) < 0)
        die("cannot listen on 127.0.0.1: %s", strerror(errno));
    options.port = ntohs(address.sin_port);
    pid_t child = fork();
    if (child < 0) die("fork: %s", strerror(errno));
    if (child) {
        close(listener);
        return child;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    uint8_t *buffer = room_for(READ_BYTES);
    uint64_t read_bytes[MAX_CONNECTIONS] = {0};
    int fds[MAX_CONNECTIONS], ready = epoll_create1(EPOLL_CLOEXEC);
    for (unsigned i = 0; i < options.connections; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = i};
        fds[i] = accept(listener, NULL, NULL);
        if (fds[i] < 0 || epoll_ctl(ready, EPOLL_CTL_ADD, fds[i], &event) < 0) _exit(1);
    }
    for (;;) {
        struct epoll_event event;
        if (epoll_wait(ready, &event, 1, -1) < 0) continue;
        unsigned i = event.data.u32;
        ssize_t got = recv(fds[i], buffer, READ_BYTES, 0);
        if (got <= 0) _exit(0);
        read_bytes[i] += (uint64_t)got;
        if (read_bytes[i] >= burst_bytes) {
            read_bytes[i] -= burst_bytes;
            if (send(fds[i], "", 1, MSG_NOSIGNAL) < 0) _exit(0);
        }
    }
}

/* ---- the program ---------------------------------------------------------------------------------------------- */

static void out_of_time(int signal) {
    (void)signal;
    static const char text[] = "load: not finished within --limit seconds\n";
    ssize_t ignored = write(STDERR_FILENO, text, sizeof text - 1);
    (void)ignored;
    _exit(2);
}

static void run(void) {
    bool subscribing = options.mode == DELIVER || options.mode == LATENCY;
    bool pair = options.mode == ROUNDTRIP && options.system->parse == nats_parse;
    pid_t drain = 0;
    size_t unused;
    if (options.system->parse == drain_parse) {
        free(build_block(0, &unused)); /* for the size of a frame */
        drain = start_drain(share() * frame_bytes);
    }
    peer_count = options.connections + (subscribing || pair);
    peers = calloc(peer_count, sizeof *peers);
    if (!peers) die("no memory");
    poller = epoll_create1(EPOLL_CLOEXEC);
    for (unsigned i = 0; i < peer_count; i++) connect_peer(&peers[i], i);
    struct peer *subscriber = &peers[0], *publishers = subscribing || pair ? peers + 1 : peers;
    if (subscribing || options.mode == ROUNDTRIP) options.system->subscribe(subscriber);
    give_blocks(publishers, options.connections);
    if (options.mode != ROUNDTRIP)
        for (unsigned i = 0; i < peer_count; i++) make_nonblocking(&peers[i]);
    double cpu = cpu_seconds();
    for (unsigned i = 0; i < options.repeat; i++) {
        if (i) rest(options.pause);
        switch (options.mode) {
        case PUBLISH: run_publish(publishers); break;
        case CONFIRM: run_confirm(publishers); break;
        case DELIVER: run_deliver(subscriber, publishers); break;
        case LATENCY: run_latency(subscriber, publishers); break;
        case ROUNDTRIP:
            if (pair) run_roundtrip_nats(subscriber, publishers);
            else run_roundtrip_blipmq(subscriber);
            break;
        case MODES: break;
        }
    }
    seen.cpu = cpu_seconds() - cpu;
    for (unsigned i = 0; i < peer_count; i++) close(peers[i].fd);
    if (drain) waitpid(drain, NULL, 0);
}

static double number(const char *name, const char *text, double least, double most) {
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= least && value <= most))
        die("--%s takes a number from %.0f to %.0f, not '%s'", name, least, most, text);
    return value;
}

static void stay_on(unsigned cpu) {
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(cpu, &only);
    if (sched_setaffinity(0, sizeof only, &only) < 0) die("CPU %u: %s", cpu, strerror(errno));
}

static void read_options(int count, char **words) {
    static const struct option known[] = {
        {"system", 1, 0, 'S'}, {"mode", 1, 0, 'm'},        {"port", 1, 0, 'p'},    {"size", 1, 0, 's'},
        {"connections", 1, 0, 'c'}, {"messages", 1, 0, 'n'}, {"seconds", 1, 0, 't'}, {"repeat", 1, 0, 'r'},
        {"pause", 1, 0, 'P'},  {"window", 1, 0, 'w'},      {"batch", 1, 0, 'b'},   {"qos", 1, 0, 'q'},
        {"rate", 1, 0, 'R'},   {"key", 1, 0, 'k'},         {"file", 1, 0, 'f'},    {"limit", 1, 0, 'l'},
        {"cpu", 1, 0, 'C'},    {0, 0, 0, 0}};
    int option, which = 0;
    bool mode_given = false;
    while ((option = getopt_long(count, words, "", known, &which)) != -1) {
        const char *name = option == '?' ? "" : known[which].name;
        switch (option) {
        case 'S':
            for (size_t i = 0; i < sizeof systems / sizeof *systems; i++)
                if (!strcmp(optarg, systems[i].name)) options.system = &systems[i];
            if (!options.system) die("no system is called '%s'", optarg);
            break;
        case 'm':
            for (unsigned i = 0; i < MODES; i++)
                if (!strcmp(optarg, mode_names[i])) options.mode = i, mode_given = true;
            if (!mode_given) die("no mode is called '%s'", optarg);
            break;
        case 'p': options.port = (uint16_t)number(name, optarg, 1, 65535); break;
        case 's': options.size = (unsigned)number(name, optarg, 1, MAX_SIZE); break;
        case 'c': options.connections = (unsigned)number(name, optarg, 1, MAX_CONNECTIONS - 1); break;
        case 'n': options.messages = (uint64_t)number(name, optarg, 1, 1e12); break;
        case 't': options.seconds = number(name, optarg, 0, MAX_SECONDS_SEEN); break;
        case 'r': options.repeat = (unsigned)number(name, optarg, 1, MAX_REPEAT); break;
        case 'P': options.pause = number(name, optarg, 0, 3600); break;
        case 'w': options.window = (unsigned)number(name, optarg, 1, 1e6); break;
        case 'b': options.batch = (unsigned)number(name, optarg, 1, 1e6); break;
        case 'q': options.qos = (unsigned)number(name, optarg, 0, 1); break;
        case 'R': options.rate = number(name, optarg, 1, 1e9); break;
        case 'k': options.key = optarg; break;
        case 'f': options.file = optarg; break;
        case 'C': stay_on((unsigned)number(name, optarg, 0, CPU_SETSIZE - 1)); break;
        case 'l': options.limit = (unsigned)number(name, optarg, 1, 7200); break;
        default: exit(1);
        }
    }
    if (optind < count || !options.system || !mode_given)
        die("--system and --mode are needed, and nothing but options");
    if (!(options.system->modes & MODE(options.mode)))
        die("%s is not measured for %s", mode_names[options.mode], options.system->name);
    if (options.batch > options.window) die("--batch is larger than --window");
    if (options.mode == LATENCY && (options.size < 16 || options.rate <= 0 || options.seconds <= 0))
        die("latency needs --rate, --seconds, and a --size of at least 16");
    if (options.mode == LATENCY && options.repeat > 1) die("latency is measured once");
    if (options.mode == ROUNDTRIP && (options.connections > 1 || options.repeat > 1))
        die("round trips are made one at a time, on one connection, once");
}

int main(int count, char **words) {
    read_options(count, words);
    signal(SIGALRM, out_of_time);
    prctl(PR_SET_TIMERSLACK, 1000); /* pacing needs finer sleeps than the default slack of 50 us */
    alarm(options.limit);
    if (options.system->parse) run();
    else run_memory();
    print_result();
    return 0;
}
