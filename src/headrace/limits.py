"""Every limit of the gateway, with its default, its hard bounds and its reason. Knows nothing of who enforces
them: the configuration offers those that an operator may move, the rest are constants."""

from dataclasses import dataclass
from typing import Generic, TypeVar

Number = TypeVar("Number", int, float)

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

SECOND = 1.0
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR


@dataclass(frozen=True, slots=True)
class Limit(Generic[Number]):
    """A limit that an operator may move between two bounds."""

    default: Number
    minimum: Number
    maximum: Number
    reason: str

    def __post_init__(self) -> None:
        if not self.minimum <= self.default <= self.maximum:
            raise ValueError(f"default {self.default} is outside {self.minimum}..{self.maximum}")


# --- the log ------------------------------------------------------------------------------------------------

LOG_SEGMENT_BYTES = Limit(
    64 * MiB,
    256 * KiB,
    1 * GiB,
    "Large enough that a change of segments is rare, small enough that retention goes in fine steps and that"
    " preparing one is no burden; positions inside a segment stay below 1 GiB.",
)
LOG_SEGMENT_MULTIPLE = 4 * KiB  # segments are mapped, so they are whole pages
LOG_POOL_SEGMENTS = Limit(
    3,
    1,
    64,
    "A burst that fits in the pool goes into memory that is already faulted in; each more costs segment_bytes"
    " of disk and page cache.",
)
LOG_RETENTION_BYTES = Limit(
    4 * GiB,
    1 * MiB,
    1024 * TiB,
    "Enough to outlive a consumer that is away for a while, small enough for the disk of an edge machine.",
)
LOG_RETENTION_SECONDS = Limit(
    0.0, 0.0, 3650 * DAY, "By default only space decides; age is for data that must not stay."
)
LOG_BLOCK_TIMEOUT = Limit(
    5.0,
    0.0,
    1 * HOUR,
    "Longer than a segment takes to become free under load, shorter than the patience of most clients.",
)
LOG_SYNC_EVERY = Limit(
    64, 1, 1_000_000, "Beyond a million messages between syncs the policy is `none` in all but name."
)
LOG_SYNC_INTERVAL_MS = Limit(
    20, 1, 60_000, "A minute of messages is the most that a sync policy should put at stake."
)

# A record must fit in a segment, and what does not fit any more at a segment's end is lost space: with room
# for two of the largest messages that is less than half of it.
LOG_MESSAGES_PER_SEGMENT = 2
# More than a record has beside what its peer sent: a header of 48 bytes and padding to 8.
LOG_RECORD_OVERHEAD = 64
# Besides the prepared ones, the segment being filled and the oldest one, which is leaving, take up space.
LOG_SEGMENTS_BESIDE_POOL = 2

# --- the bus ------------------------------------------------------------------------------------------------

BUS_MAX_INFLIGHT = Limit(
    1024,
    1,
    65_536,
    "What is in flight is the only thing a subscription keeps in memory per message; a thousand fills any"
    " link with a round trip of milliseconds.",
)
BUS_REDELIVERY_DELAY = Limit(
    2.0, 0.01, 1 * HOUR, "Longer than a healthy consumer takes, short enough to notice one that died."
)
BUS_MAX_REDELIVERY_DELAY = Limit(
    300.0, 0.01, 1 * DAY, "Spares a consumer in trouble, and still does not let a message be forgotten."
)
BUS_MAX_DELIVERIES = Limit(
    5, 1, 1000, "2, 4, 8 and 16 s apart: half a minute of trouble is survived, poison is not repeated."
)
BUS_DURABLE_GRACE = Limit(
    1 * HOUR, 0.0, 365 * DAY, "A consumer that is redeployed comes back; one that is gone is forgotten."
)
BUS_MAX_PENDING = Limit(
    0, 0, 1 << 40, "Pending messages are positions on the log and cost no memory, so there is no limit."
)
# BlipMQ counts a topic's bytes with 16 bits; a longer one could not reach its subscribers.
TOPIC_BYTES = 65_535
# With room left for the topic itself behind it.
DEAD_LETTER_PREFIX_CHARS = 128

# --- listeners and connections ------------------------------------------------------------------------------

LISTEN_MAX_CONNECTIONS = Limit(
    10_000,
    1,
    1_000_000,
    "At 16 KiB for an idle connection this is 160 MiB; the limit on open files must allow as many.",
)
LISTEN_IDLE_TIMEOUT = Limit(
    0.0, 0.0, 7 * DAY, "A publisher may have nothing to say for days; a dead peer is TCP keep-alive's work."
)
LISTEN_HIGH_WATER = Limit(
    256 * KiB,
    16 * KiB,
    64 * MiB,
    "Enough that a reading peer does not run dry between two turns of the loop; a thousand peers that stop"
    " reading at once hold 256 MiB.",
)
LISTEN_STALL_TIMEOUT = Limit(
    30.0, 0.05, 1 * HOUR, "Longer than a network hiccup or a garbage collection at the peer."
)
LISTEN_BACKLOG = Limit(
    1024, 1, 65_535, "A reconnecting fleet arrives at once; the kernel caps this at net.core.somaxconn."
)

# struct sockaddr_un has 108 bytes, the last of them a NUL.
UNIX_PATH_BYTES = 107
# sd_listen_fds_with_names(3) allows this many characters for a name.
FD_NAME_CHARS = 255
# RFC 1035 §2.3.4.
HOST_NAME_CHARS = 253

BLIPMQ_FRAME_BYTES = Limit(
    16 * MiB,
    64 * KiB,
    16 * MiB,
    "The protocol's own limit, on type, correlation id and payload (blipmq, frame layout).",
)
BLIPMQ_HANDSHAKE_TIMEOUT = Limit(
    30.0,
    0.0,
    1 * HOUR,
    "The protocol has none, but a peer that never authenticates would hold a connection for nothing; 30 s is"
    " time for a slow link and for a second try with another key.",
)

ZEROCTL_HEADER_BYTES = Limit(
    64 * KiB, 64 * KiB, 1 * MiB, "64 KiB is the least that a transport has to carry (zeroctl, header)."
)
ZEROCTL_BODY_BYTES = Limit(
    4 * MiB,
    4 * MiB,
    32 * MiB,
    "4 MiB is the least that a transport has to carry (zeroctl, body).",
)
ZEROCTL_HANDSHAKE_TIMEOUT = Limit(
    30.0, 0.0, 1 * HOUR, "A peer that never says who it is would hold a connection for nothing."
)
ZEROCTL_KEEPALIVE = Limit(
    30.0,
    0.0,
    1 * HOUR,
    "A peer that has vanished is noticed after three of these; what it had not acknowledged goes to another one.",
)
ZEROCTL_HEARTBEAT = Limit(
    40.0,
    0.0,
    120.0,
    "The protocol's own limit is 120 s; its clients send one every 40 s (zeroctl, endpoints).",
)
# Longer than three of the longest heartbeat intervals by far: a node may not ask to be remembered for ever.
ZEROCTL_MOST_TTL = 1 * DAY
# Some 1 KiB each; a flood of invented nodes is bounded.
ZEROCTL_NODES = 10_000
# Beyond it a heartbeat is not believed: dozens of described services fit, and all nodes together stay below 160 MiB.
ZEROCTL_HEARTBEAT_BYTES = 16 * KiB
# Bodies above this are hashed in a thread: half a millisecond of work at the speed of one core.
ZEROCTL_HASH_INLINE = 256 * KiB
ZEROCTL_SIGNERS = 1000  # a signature is tried with each of them
FELIX_FRAME_BYTES = Limit(
    16 * MiB,
    64 * KiB,
    16 * MiB,
    "What the reference's broker and client take at most, payload only (felix, frame header).",
)
FELIX_MAX_SUBSCRIPTIONS = Limit(
    1024, 1, 65_536, "Each is a stream; the reference's client lets a server open 1024 on a connection."
)
FELIX_CACHE_ENTRIES = Limit(
    100_000,
    1,
    100_000_000,
    "With the overhead of an entry, some 400 bytes, this is 40 MB beside keys and values.",
)
FELIX_CACHE_BYTES = Limit(
    64 * MiB,
    1 * KiB,
    64 * GiB,
    "The cache is memory that survives nothing; an edge machine has more use for the rest.",
)
FELIX_BATCH_EVENTS = Limit(
    64, 1, 4096, "As the reference: beyond it a frame's header costs nothing any more."
)
FELIX_BATCH_BYTES = Limit(
    256 * KiB, 1, 16 * MiB, "As the reference: a subscriber can begin before all has come."
)
FELIX_BATCH_DELAY = Limit(
    0.0,
    0.0,
    1.0,
    "What comes in one turn of the loop goes together anyway; waiting longer is for slow links.",
)
FELIX_REGISTERED = 10_000  # streams and caches that a configuration may list

# --- QUIC ---------------------------------------------------------------------------------------------------

QUIC_IDLE_TIMEOUT = Limit(
    30.0,
    1.0,
    1 * HOUR,
    "As most implementations have it: a peer whose machine is gone is forgotten after it.",
)
QUIC_HANDSHAKE_TIMEOUT = Limit(
    10.0,
    1.0,
    1 * HOUR,
    "Three round trips, and some that are lost; who never ends it would hold a connection for nothing.",
)
QUIC_KEEP_ALIVE = Limit(
    10.0,
    0.0,
    1 * HOUR,
    "A third of the idle timeout, so that two lost packets do not end a quiet connection.",
)
QUIC_DATAGRAM_BYTES = Limit(
    1350,
    1200,
    16_384,
    "Fits every path that carries Ethernet frames, tunnels included; 1200 is QUIC's own minimum. Beyond 1472"
    " it is for jumbo frames and this machine alone.",
)
QUIC_CONNECTION_WINDOW = Limit(
    16 * MiB, 64 * KiB, 1 * GiB, "Bytes that a peer may have under way: 100 MB/s over 160 ms."
)
QUIC_STREAM_WINDOW = Limit(
    8 * MiB,
    64 * KiB,
    1 * GiB,
    "Half of the connection's: one stream can use most of a link, and not all of it.",
)
QUIC_MAX_STREAMS = Limit(1024, 1, 65_536, "As the reference: streams of each kind that a peer may have open.")
# Bytes that a stream may hold of a peer whose session cannot go on; its frames are bounded, this is for what the
# peer may send before it learns that it must wait.
QUIC_BLOCKED_BYTES = 1 * MiB
# Of a client certificate's names, those that are looked at.
QUIC_CERTIFICATE_NAMES = 100
# A self-signed certificate is made anew when it ends; ten years is longer than most gateways live.
QUIC_CERTIFICATE_DAYS = 3650
OVERHOP_ENVELOPE_BYTES = Limit(
    8 * MiB,
    64 * KiB,
    32 * MiB,
    "The protocol's own range and default (overhop, Framing).",
)
OVERHOP_UNHELLOED_SECONDS = Limit(
    10, 1, 86_400, "The protocol's default; who connects to speak says HELLO at once."
)
OVERHOP_UNREGISTERED_SECONDS = Limit(10, 1, 86_400, "The protocol's default; then IDENT asks once more.")
OVERHOP_IDENT_SECONDS = Limit(2, 1, 86_400, "The protocol's default: time for one answer.")
OVERHOP_JOB_DEADLINE = Limit(
    60.0,
    0.1,
    30 * DAY,
    "Most jobs take less, and one that takes longer says so with EXTEND; a worker that hangs holds a job for"
    " no longer than this.",
)
OVERHOP_CONCURRENCY = Limit(0, 0, 2**32 - 1, "What the protocol's field can say; by default credits decide.")
OVERHOP_FINISHED_JOBS = Limit(
    1000,
    0,
    1_000_000,
    "Of each queue; 16 bytes of memory and of the log for each, and the time to look through them.",
)
# Jobs of one queue that wait for their time or for another attempt, or are being worked on: 72 bytes of memory for
# each, and 16 bytes of the log whenever all of them are written anew. Beyond it the queue's other jobs wait.
OVERHOP_QUEUE_OPEN = 262_144
# Jobs of one queue that workers have at once, whatever their credits.
OVERHOP_QUEUE_ACTIVE = 65_536
# Every queue is a subscription and a note; both are in memory.
OVERHOP_QUEUES = 10_000
# It is a word of a topic and part of a note's key, which has 512 bytes.
OVERHOP_QUEUE_NAME_BYTES = 255
# Queues that one worker works for: its turn looks at each of them.
OVERHOP_SUBSCRIPTIONS = 1000
# Of LSJOB; the answer is one envelope.
OVERHOP_PAGE_JOBS = 1000
# Jobs that wait for a first worker and that one LSJOB looks at: nobody else is served meanwhile.
OVERHOP_LISTED_JOBS = 100_000
# A retry that is this far away is no retry; and a scheduled time beyond the year 9999 cannot be written.
OVERHOP_RETRY_MS = 10 * 365 * 86_400_000
RELINK_MESSAGE_BYTES = Limit(
    16 * MiB,
    1 * KiB,
    256 * MiB,
    "The protocol counts with 64 bits and leaves the limit to us; as large as BlipMQ's.",
)
RELINK_PARTS = Limit(
    65_536, 1, 1 << 20, "Each part costs eight bytes of header before its first byte of payload comes."
)
RELINK_TARGETS = Limit(
    1024, 1, 65_536, "Without ids, eight bytes of header can ask for 2^32 - 1 deliveries of a message."
)
RELINK_WINDOW = Limit(
    1024, 1, 1 << 20, "Messages of a channel that are not consumed yet; a thousand fills any link."
)
RELINK_OUTSTANDING = Limit(
    65_536, 1, 1 << 24, "At 16 bytes each this is 1 MiB for a link whose peer acknowledges nothing."
)
RELINK_CHANNELS = Limit(
    1024, 1, 4096, "In each direction; all channels of a link fit into one note of the smallest log."
)
RELINK_LINKS = Limit(
    10_000, 1, 1_000_000, "As many as connections; each is a subscription and two notes in the log."
)
RELINK_UNCOMMITTED_BYTES = Limit(
    64 * MiB, 1 * KiB, 1 * GiB, "What is uncommitted is in memory; a commit of more than this is refused."
)
RELINK_GRACE = Limit(
    1 * HOUR,
    0.0,
    365 * DAY,
    "A peer that is redeployed comes back to its link; one that is gone is forgotten.",
)
RELINK_HANDSHAKE_TIMEOUT = Limit(
    30.0,
    0.0,
    1 * HOUR,
    "The protocol has none, but a peer that never speaks would hold a connection for nothing.",
)
RELINK_PING_INTERVAL = Limit(
    30.0, 0.0, 1 * HOUR, "Often enough to keep NAT entries alive, and seldom enough to cost nothing."
)
RELINK_PING_TIMEOUT = Limit(
    30.0, 0.1, 1 * HOUR, "Longer than a network hiccup or a garbage collection at the peer."
)
RELINK_ENDPOINT_BYTES = 255  # the handshake counts a name's bytes with 8 bits
RELINK_ID_BYTES = Limit(4, 0, 8, "Ids are integers here; the protocol's own size field has 8 bits.")

# --- carriers and services ----------------------------------------------------------------------------------

CARRIER_NAME_CHARS = 32  # it is in metrics, log lines and headers
CARRIER_PREFETCH = Limit(
    256,
    1,
    65_535,
    "What a broker may send before the first of it is safe; enough for a round trip to the disk.",
)
CARRIER_RECONNECT_DELAY = Limit(
    5.0, 0.05, 10 * MINUTE, "Soon enough after a broker's restart, seldom enough not to be in its way."
)
CARRIER_PREFIX_CHARS = 64
SERVICE_NAME_CHARS = 64
SERVICE_DESCRIPTION_CHARS = 1024
URL_CHARS = 2048

# --- keys ---------------------------------------------------------------------------------------------------

KEY_BYTES = 65_535  # BlipMQ counts a key's bytes with 16 bits
KEY_NAME_CHARS = 64  # it is in logs and in the `source` column
KEY_FILTERS = 1000  # rights are a handful of filters; this bounds the work of checking them
MAP_PATTERN_CHARS = 1000  # of each side of a rule: what one can still read

# --- the drop directory -------------------------------------------------------------------------------------

DROP_ROLL_ROWS = Limit(
    1_000_000, 1, 100_000_000, "A few row groups a file: enough for Spark to skip by, small enough to hold."
)
DROP_ROLL_BYTES = Limit(
    128 * MiB,
    64 * KiB,
    8 * GiB,
    "Spark's default split is 128 MiB; smaller files cost it more to list than to read.",
)
DROP_ROLL_SECONDS = Limit(
    60.0, 0.1, 1 * HOUR, "How stale a quiet stream may be in Spark; a file never spans two hours anyway."
)

DROP_NAME_CHARS = 32  # it is in the names of cursors and locks

# --- the process --------------------------------------------------------------------------------------------

# It is part of file names, next to a log id and two offsets; all together may have 255 bytes.
NODE_NAME_CHARS = 64
GATEWAY_DRAIN_TIMEOUT = Limit(
    10.0, 0.0, 1 * HOUR, "Shorter than the 90 s after which systemd kills, long enough for a final sync."
)
# Thousands of keys fit; a wrong path to a large or endless file is found out early.
CONFIG_FILE_BYTES = 4 * MiB

# --- event lines --------------------------------------------------------------------------------------------

# Of one field, so that a peer's bytes cannot make a line that log collectors cut or drop.
EVENT_VALUE_CHARS = 1024
# Of a list or table in a field, for the same reason.
EVENT_VALUE_ITEMS = 32
# Nested deeper than this, a value is written as its text.
EVENT_VALUE_DEPTH = 4
# A traceback with its causes; what collectors take as one line begins at 16 KiB.
EVENT_EXCEPTION_CHARS = 12 * KiB
# Lines of one event and key at once, so that the beginning of an incident is seen whole.
EVENT_BURST = 5
# Seconds between them afterwards.
EVENT_EVERY = 1.0
# The same over all keys of an event: ten thousand peers are one flood.
EVENT_NAME_BURST = 100
# Lines of one event a second over all its keys, once that burst is used up.
EVENT_NAME_RATE = 20.0
# Keys remembered at once, at some 200 bytes each; the one that was quiet longest is forgotten first.
EVENT_BUCKETS = 4096
