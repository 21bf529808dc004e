"""The configuration as typed structs: which keys there are, what each means, what it accepts and its default.
Knows nothing of files, the environment or how a value was given."""

import re
import socket
from typing import Annotated, Literal, TypeAlias

import msgspec

from headrace import limits
from headrace.config.addresses import Address, parse_address
from headrace.config.kinds import (
    Bind,
    Choice,
    Columns,
    Count,
    DropLocation,
    Duration,
    EndpointName,
    FelixNames,
    FilePath,
    Filters,
    Flag,
    KeyName,
    MapPattern,
    Name,
    NameOrNone,
    Networks,
    PublicKeys,
    QueueFilter,
    QueueName,
    RoutingKey,
    Secret,
    Size,
    SyncPolicy,
    Text,
    Texts,
    TopicPrefix,
    TopicRule,
    Url,
)
from headrace.config.settings import Section, Setting, TableArray, describe, leaves, setting, tables, value_at

Protocol: TypeAlias = Literal["blipmq", "overhop", "relink", "zeroctl", "felix"]
PROTOCOLS: tuple[Protocol, ...] = ("blipmq", "overhop", "relink", "zeroctl", "felix")

MAIN_DROP = "default"  # the name of [drop]

BIND = "Where to listen."
TOPICS = "Messages that go there, by topic."
LEAVE_OUT = "Columns that its files do not have; readers see null."
PAYLOAD_JSON = (
    "Whether there is a column `payload_json` as well: the payload as text where it is valid JSON, else null."
)


def host_name() -> str:
    """The host's name, with what a node's name cannot have replaced."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")
    return name[: limits.NODE_NAME_CHARS] or "headrace"


class Node(Section, frozen=True):
    """Who this gateway is, among all that write into one drop directory."""

    name: Annotated[
        str,
        setting(
            "Name of this gateway in file names, columns and metrics. Two gateways that share a drop"
            " directory need different names.",
            Name(limits.NODE_NAME_CHARS),
            default="the name of the host",
        ),
    ] = msgspec.field(default_factory=host_name)


class LogConfig(Section, frozen=True):
    """The log, which is the bus: where every accepted message is written first."""

    sync: Annotated[
        str,
        setting(
            "When a message is safe. `always`: once it is on the disk, in group commits; a peer is told only"
            " then. `every:N` and `interval:MS` sync after so many messages or milliseconds, `none` leaves it"
            " to the system; with these a message is safe once it is appended, which survives a crash of the"
            " process but not of the machine.",
            SyncPolicy(),
        ),
    ] = "always"
    segment_bytes: Annotated[
        int,
        setting(
            "Size of a segment file.",
            Size(limits.LOG_SEGMENT_BYTES, multiple=limits.LOG_SEGMENT_MULTIPLE),
        ),
    ] = limits.LOG_SEGMENT_BYTES.default
    pool_segments: Annotated[
        int,
        setting("How many segments are kept ready ahead of need.", Count(limits.LOG_POOL_SEGMENTS)),
    ] = limits.LOG_POOL_SEGMENTS.default
    retention_bytes: Annotated[
        int,
        setting(
            "How much of the log is kept. At least pool_segments + 2 segments.",
            Size(limits.LOG_RETENTION_BYTES),
            reload=True,
        ),
    ] = limits.LOG_RETENTION_BYTES.default
    retention_seconds: Annotated[
        float,
        setting(
            "How long messages are kept.",
            Duration(limits.LOG_RETENTION_SECONDS, zero="only retention_bytes decides"),
            reload=True,
        ),
    ] = limits.LOG_RETENTION_SECONDS.default
    on_full: Annotated[
        Literal["block", "drop_oldest"],
        setting(
            "What happens when retention is reached and the oldest messages are not yet in the drop"
            " directory. `block`: publishers wait, and are refused after block_timeout. `drop_oldest`: the"
            " oldest go, and are counted.",
            Choice(("block", "drop_oldest")),
        ),
    ] = "block"
    block_timeout: Annotated[
        float,
        setting(
            "How long a publisher waits for room before it is refused.",
            Duration(limits.LOG_BLOCK_TIMEOUT),
            reload=True,
        ),
    ] = limits.LOG_BLOCK_TIMEOUT.default
    hold_for_subscriptions: Annotated[
        bool,
        setting("Whether durable subscriptions, too, may hold back retention.", Flag()),
    ] = False


class BusConfig(Section, frozen=True):
    """Subscriptions: what is in flight, when it is sent again, and when it is given up."""

    max_inflight: Annotated[
        int,
        setting(
            "Messages that a subscription may have delivered and not yet acknowledged.",
            Count(limits.BUS_MAX_INFLIGHT),
            reload=True,
        ),
    ] = limits.BUS_MAX_INFLIGHT.default
    redelivery_delay: Annotated[
        float,
        setting(
            "Time until a message that was not acknowledged is delivered again; it doubles with each"
            " delivery.",
            Duration(limits.BUS_REDELIVERY_DELAY),
            reload=True,
        ),
    ] = limits.BUS_REDELIVERY_DELAY.default
    max_redelivery_delay: Annotated[
        float,
        setting("Where the doubling stops.", Duration(limits.BUS_MAX_REDELIVERY_DELAY), reload=True),
    ] = limits.BUS_MAX_REDELIVERY_DELAY.default
    max_deliveries: Annotated[
        int,
        setting(
            "Deliveries of one message, the first included, before it goes to the dead-letter topic.",
            Count(limits.BUS_MAX_DELIVERIES),
            reload=True,
        ),
    ] = limits.BUS_MAX_DELIVERIES.default
    dead_letter_prefix: Annotated[
        str,
        setting("Stands before a topic to make its dead-letter topic.", TopicPrefix()),
    ] = "dead."
    durable_grace: Annotated[
        float,
        setting(
            "How long a durable subscription is kept after its peer has gone.",
            Duration(limits.BUS_DURABLE_GRACE),
            reload=True,
        ),
    ] = limits.BUS_DURABLE_GRACE.default
    max_pending: Annotated[
        int,
        setting(
            "Messages that a subscription may be behind; beyond it the oldest are skipped for that"
            " subscription and counted.",
            Count(limits.BUS_MAX_PENDING, zero="no limit"),
            reload=True,
        ),
    ] = limits.BUS_MAX_PENDING.default


class ListenerConfig(Section, frozen=True):
    """What every listener has."""

    bind: Annotated[list[str], setting(BIND, Bind())] = msgspec.field(default_factory=list)
    tls_cert: Annotated[
        str,
        setting("Certificate chain (PEM); with tls_key it turns TLS on.", FilePath()),
    ] = ""
    tls_key: Annotated[str, setting("Private key (PEM) of the certificate.", FilePath())] = ""
    tls_client_ca: Annotated[
        str,
        setting(
            "Certificates (PEM) that a client's certificate must be signed by; clients then need one.",
            FilePath(),
        ),
    ] = ""
    max_connections: Annotated[
        int,
        setting(
            "Connections at once; more are closed as they come.",
            Count(limits.LISTEN_MAX_CONNECTIONS),
            reload=True,
        ),
    ] = limits.LISTEN_MAX_CONNECTIONS.default
    idle_timeout: Annotated[
        float,
        setting(
            "How long a connection may be silent in both directions before it is closed.",
            Duration(limits.LISTEN_IDLE_TIMEOUT, zero="for ever"),
            reload=True,
        ),
    ] = limits.LISTEN_IDLE_TIMEOUT.default
    high_water: Annotated[
        int,
        setting(
            "Output that may wait for a slow peer; nothing more is delivered to it while there is more than"
            " this.",
            Size(limits.LISTEN_HIGH_WATER),
            reload=True,
        ),
    ] = limits.LISTEN_HIGH_WATER.default
    stall_timeout: Annotated[
        float,
        setting(
            "How long a peer may leave that output unread before it is dropped.",
            Duration(limits.LISTEN_STALL_TIMEOUT),
            reload=True,
        ),
    ] = limits.LISTEN_STALL_TIMEOUT.default
    backlog: Annotated[
        int,
        setting("Connections that may wait to be accepted.", Count(limits.LISTEN_BACKLOG)),
    ] = limits.LISTEN_BACKLOG.default

    @property
    def addresses(self) -> list[Address]:
        """`bind`, taken apart; empty if the listener is off."""
        return [parse_address(text) for text in self.bind]

    @property
    def largest_message(self) -> int:
        """Bytes of the largest message that a peer may send; 0 if the configuration does not bound it."""
        return 0


class BlipmqListener(ListenerConfig, frozen=True):
    """BlipMQ over TCP, TLS or a Unix socket."""

    bind: Annotated[list[str], setting(BIND, Bind())] = msgspec.field(
        default_factory=lambda: ["127.0.0.1:5555"]
    )
    max_frame_bytes: Annotated[
        int,
        setting(
            "Largest frame, in both directions: a longer one closes the connection, and what would need one is not"
            " offered. Two must fit in a segment of the log.",
            Size(limits.BLIPMQ_FRAME_BYTES),
        ),
    ] = limits.BLIPMQ_FRAME_BYTES.default
    handshake_timeout: Annotated[
        float,
        setting(
            "How long a connection may take to authenticate.",
            Duration(limits.BLIPMQ_HANDSHAKE_TIMEOUT, zero="for ever"),
            reload=True,
        ),
    ] = limits.BLIPMQ_HANDSHAKE_TIMEOUT.default

    @property
    def largest_message(self) -> int:
        return self.max_frame_bytes


class OverhopWireSession(Section, frozen=True):
    """How long a connection may take to become a worker. It is looked at as often as the shortest of these says."""

    unhelloed_max_lifetime_seconds: Annotated[
        int,
        setting(
            "Seconds until HELLO; then the connection is closed.", Count(limits.OVERHOP_UNHELLOED_SECONDS)
        ),
    ] = limits.OVERHOP_UNHELLOED_SECONDS.default
    helloed_unregistered_max_lifetime_seconds: Annotated[
        int,
        setting(
            "Seconds from HELLO until REGISTER; then IDENT asks for it.",
            Count(limits.OVERHOP_UNREGISTERED_SECONDS),
        ),
    ] = limits.OVERHOP_UNREGISTERED_SECONDS.default
    ident_register_timeout_seconds: Annotated[
        int,
        setting(
            "Seconds from IDENT until REGISTER; then the connection is closed.",
            Count(limits.OVERHOP_IDENT_SECONDS),
        ),
    ] = limits.OVERHOP_IDENT_SECONDS.default


class OverhopWire(Section, frozen=True):
    """What the protocol lets be set, by its own names."""

    max_envelope_size_bytes: Annotated[
        int,
        setting(
            "Largest payload of a frame, in both directions: a longer one closes the connection, and what would need"
            " one is not offered.",
            Size(limits.OVERHOP_ENVELOPE_BYTES),
        ),
    ] = limits.OVERHOP_ENVELOPE_BYTES.default
    session: OverhopWireSession = msgspec.field(default_factory=OverhopWireSession)


class OverhopListener(ListenerConfig, frozen=True):
    """Overhop over TCP, TLS or a Unix socket."""

    bind: Annotated[list[str], setting(BIND, Bind())] = msgspec.field(
        default_factory=lambda: ["127.0.0.1:9876"]
    )
    key: Annotated[
        str,
        setting(
            "The protocol has no keys of its own: every peer has the rights of the key with this name, on the"
            " topics `queue.NAME.jobs`; without one, peers may do everything.",
            KeyName(),
        ),
    ] = ""
    deliver: Annotated[
        bool,
        setting(
            "Whether jobs are pushed to workers that gave credits, which then finish or fail them; the protocol"
            " itself ends before that.",
            Flag(),
        ),
    ] = True
    job_deadline: Annotated[
        float,
        setting(
            "How long a worker may have a job before it is given to another; EXTEND begins it anew.",
            Duration(limits.OVERHOP_JOB_DEADLINE),
        ),
    ] = limits.OVERHOP_JOB_DEADLINE.default
    finished_jobs: Annotated[
        int,
        setting(
            "Jobs of each queue that are remembered after they were completed or failed, the newest ones.",
            Count(limits.OVERHOP_FINISHED_JOBS),
        ),
    ] = limits.OVERHOP_FINISHED_JOBS.default
    wire: OverhopWire = msgspec.field(default_factory=OverhopWire)


class RelinkListener(ListenerConfig, frozen=True):
    """Relink over TCP, TLS or a Unix socket."""

    bind: Annotated[list[str], setting(BIND, Bind())] = msgspec.field(
        default_factory=lambda: ["127.0.0.1:5600"]
    )
    max_message_bytes: Annotated[
        int,
        setting(
            "Largest message, all parts together, in both directions: a larger one closes the connection, and is not"
            " offered. So does one that is larger than a segment of the log can take. A link keeps the limit that it"
            " began with.",
            Size(limits.RELINK_MESSAGE_BYTES),
        ),
    ] = limits.RELINK_MESSAGE_BYTES.default
    max_parts: Annotated[int, setting("Parts of a message.", Count(limits.RELINK_PARTS))] = (
        limits.RELINK_PARTS.default
    )
    max_targets: Annotated[
        int, setting("Channels that a multicast packet may name.", Count(limits.RELINK_TARGETS))
    ] = limits.RELINK_TARGETS.default
    window: Annotated[
        int,
        setting(
            "Messages that a channel may have been sent and not yet consumed.",
            Count(limits.RELINK_WINDOW),
            reload=True,
        ),
    ] = limits.RELINK_WINDOW.default
    max_outstanding: Annotated[
        int,
        setting(
            "The same for all channels of a link together, those that wait for their window included; beyond it"
            " the link waits.",
            Count(limits.RELINK_OUTSTANDING),
            reload=True,
        ),
    ] = limits.RELINK_OUTSTANDING.default
    max_channels: Annotated[
        int,
        setting(
            "Channels of a link that are open at once, in each direction.", Count(limits.RELINK_CHANNELS)
        ),
    ] = limits.RELINK_CHANNELS.default
    max_links: Annotated[
        int,
        setting(
            "Links at once, those without a connection included.", Count(limits.RELINK_LINKS), reload=True
        ),
    ] = limits.RELINK_LINKS.default
    max_uncommitted_bytes: Annotated[
        int,
        setting(
            "Uncommitted messages of a link; a commit of more is refused.",
            Size(limits.RELINK_UNCOMMITTED_BYTES),
            reload=True,
        ),
    ] = limits.RELINK_UNCOMMITTED_BYTES.default
    grace: Annotated[
        float,
        setting("How long a link is kept without a connection.", Duration(limits.RELINK_GRACE), reload=True),
    ] = limits.RELINK_GRACE.default
    handshake_timeout: Annotated[
        float,
        setting(
            "How long the handshake may take.",
            Duration(limits.RELINK_HANDSHAKE_TIMEOUT, zero="for ever"),
            reload=True,
        ),
    ] = limits.RELINK_HANDSHAKE_TIMEOUT.default
    ping_interval: Annotated[
        float,
        setting(
            "How long a peer may be silent before it is sent a ping.",
            Duration(limits.RELINK_PING_INTERVAL, zero="for ever"),
            reload=True,
        ),
    ] = limits.RELINK_PING_INTERVAL.default
    ping_timeout: Annotated[
        float,
        setting(
            "How long it may then stay silent before the connection is closed.",
            Duration(limits.RELINK_PING_TIMEOUT),
            reload=True,
        ),
    ] = limits.RELINK_PING_TIMEOUT.default


class ZeroctlListener(ListenerConfig, frozen=True):
    """zeroctl over TCP, TLS or a Unix socket."""

    bind: Annotated[list[str], setting(BIND, Bind())] = msgspec.field(
        default_factory=lambda: ["127.0.0.1:5700"]
    )
    max_header_bytes: Annotated[
        int,
        setting("Largest header; a message with a larger one is refused.", Size(limits.ZEROCTL_HEADER_BYTES)),
    ] = limits.ZEROCTL_HEADER_BYTES.default
    max_body_bytes: Annotated[
        int,
        setting(
            "Largest body, in both directions: a message with a larger one is refused, and is not offered. Two should"
            " fit in a segment of the log.",
            Size(limits.ZEROCTL_BODY_BYTES),
        ),
    ] = limits.ZEROCTL_BODY_BYTES.default
    handshake_timeout: Annotated[
        float,
        setting(
            "How long a connection may take to open.",
            Duration(limits.ZEROCTL_HANDSHAKE_TIMEOUT, zero="for ever"),
            reload=True,
        ),
    ] = limits.ZEROCTL_HANDSHAKE_TIMEOUT.default
    keepalive: Annotated[
        float,
        setting(
            "How long a peer may be silent before it is asked whether it is there; after three times as long it"
            " is gone.",
            Duration(limits.ZEROCTL_KEEPALIVE, zero="for ever"),
            reload=True,
        ),
    ] = limits.ZEROCTL_KEEPALIVE.default
    anonymous: Annotated[
        str,
        setting(
            "Name of the key whose rights a peer has that presents none; without it, such a peer is refused.",
            NameOrNone(limits.KEY_NAME_CHARS),
            reload=True,
        ),
    ] = ""
    signed: Annotated[
        list[str],
        setting("Keys whose messages need a valid signature (`_sec-sig`, Ed25519).", Filters(), reload=True),
    ] = msgspec.field(default_factory=list)
    signers: Annotated[
        list[str],
        setting(
            "Keys that such a signature may be of. With none it must be of the key that the node has shown in its"
            " heartbeat.",
            PublicKeys(),
            reload=True,
        ),
    ] = msgspec.field(default_factory=list)


class FelixPeer(Section, frozen=True):
    """Who may do what, by address or client certificate. The first that fits a peer counts; one that fits none may
    do nothing. For a cache, putting needs the right to publish to `tenant.namespace.cache` and getting the right to
    subscribe; requests without a scope need it for `cache`."""

    name: Annotated[
        str,
        setting("Name of the peers in logs and in the `source` column.", Name(limits.KEY_NAME_CHARS)),
    ]
    networks: Annotated[
        list[str],
        setting("Where they come from; without any it does not matter.", Networks()),
    ] = msgspec.field(default_factory=list)
    certificates: Annotated[
        list[str],
        setting(
            "Names that their certificate must have one of, as common name or alternative name; without any it does"
            " not matter. Needs tls_client_ca.",
            Texts('names, like ["robot.example.org"]'),
        ),
    ] = msgspec.field(default_factory=list)
    publish: Annotated[list[str], setting("Topics that they may publish to.", Filters())] = msgspec.field(
        default_factory=list
    )
    subscribe: Annotated[list[str], setting("Topics that they may subscribe to.", Filters())] = msgspec.field(
        default_factory=list
    )


def local_peers() -> FelixPeer:
    """The embedded ones: whoever is on this machine."""
    return FelixPeer(name="local", networks=["127.0.0.0/8", "::1/128"], publish=["#"], subscribe=["#"])


class FelixListener(ListenerConfig, frozen=True):
    """Felix over QUIC, so its addresses are UDP. Without tls_cert a certificate is made and kept in the data
    directory. Of QUIC itself, see [quic]."""

    bind: Annotated[list[str], setting(BIND, Bind(("host", "fd")))] = msgspec.field(
        default_factory=lambda: ["127.0.0.1:5000"]
    )
    peers: Annotated[
        list[FelixPeer],
        tables("There may be any number; setting one replaces the embedded one.", reload=True),
    ] = msgspec.field(default_factory=lambda: [local_peers()])
    strict: Annotated[
        bool,
        setting(
            "Whether only the streams and caches that are listed exist; otherwise they are made when they are first"
            " used.",
            Flag(),
            reload=True,
        ),
    ] = False
    streams: Annotated[list[str], setting("Streams that there are.", FelixNames("stream"), reload=True)] = (
        msgspec.field(default_factory=list)
    )
    caches: Annotated[list[str], setting("Caches that there are.", FelixNames("cache"), reload=True)] = (
        msgspec.field(default_factory=list)
    )
    dialect: Annotated[
        Literal["specification", "reference"],
        setting(
            "Whose a request is that does not show it: a subscribe without an id, and a binary batch that is refused.",
            Choice(("specification", "reference")),
            reload=True,
        ),
    ] = "specification"
    bad_header: Annotated[
        Literal["connection", "stream"],
        setting(
            "What a frame with a wrong magic, version or length ends: the connection, or mildly its stream alone.",
            Choice(("connection", "stream")),
            reload=True,
        ),
    ] = "connection"
    max_frame_bytes: Annotated[
        int,
        setting(
            "Largest payload of a frame, in both directions: a longer one closes the connection, and what would need"
            " one is not offered. A message or batch that a segment of the log has no room for is refused.",
            Size(limits.FELIX_FRAME_BYTES),
        ),
    ] = limits.FELIX_FRAME_BYTES.default
    max_subscriptions: Annotated[
        int,
        setting("Subscriptions of one connection.", Count(limits.FELIX_MAX_SUBSCRIPTIONS), reload=True),
    ] = limits.FELIX_MAX_SUBSCRIPTIONS.default
    batch_events: Annotated[
        int, setting("Most events in one frame.", Count(limits.FELIX_BATCH_EVENTS), reload=True)
    ] = limits.FELIX_BATCH_EVENTS.default
    batch_bytes: Annotated[
        int,
        setting(
            "A frame of events ends when it has so many bytes.", Size(limits.FELIX_BATCH_BYTES), reload=True
        ),
    ] = limits.FELIX_BATCH_BYTES.default
    batch_delay: Annotated[
        float,
        setting(
            "How long events may wait for more of them.",
            Duration(limits.FELIX_BATCH_DELAY, zero="until the end of the loop's turn"),
            reload=True,
        ),
    ] = limits.FELIX_BATCH_DELAY.default
    cache_entries: Annotated[
        int, setting("Values that the cache holds at most.", Count(limits.FELIX_CACHE_ENTRIES), reload=True)
    ] = limits.FELIX_CACHE_ENTRIES.default
    cache_bytes: Annotated[
        int, setting("Bytes that the cache holds at most.", Size(limits.FELIX_CACHE_BYTES), reload=True)
    ] = limits.FELIX_CACHE_BYTES.default


class QuicConfig(Section, frozen=True):
    """QUIC, which carries Felix."""

    engine: Annotated[
        Literal["aioquic", "qh3"],
        setting(
            "The implementation. `aioquic` is always there; `qh3` is several times as fast, is installed by the extra"
            " `qh3`, and cannot ask clients for certificates.",
            Choice(("aioquic", "qh3")),
        ),
    ] = "aioquic"
    idle_timeout: Annotated[
        float,
        setting("How long a peer may not be heard of before it is gone.", Duration(limits.QUIC_IDLE_TIMEOUT)),
    ] = limits.QUIC_IDLE_TIMEOUT.default
    handshake_timeout: Annotated[
        float,
        setting("How long a handshake may take.", Duration(limits.QUIC_HANDSHAKE_TIMEOUT), reload=True),
    ] = limits.QUIC_HANDSHAKE_TIMEOUT.default
    keep_alive: Annotated[
        float,
        setting(
            "After how much silence a peer is asked for a sign of life, so that a quiet connection is kept.",
            Duration(limits.QUIC_KEEP_ALIVE, zero="never"),
            reload=True,
        ),
    ] = limits.QUIC_KEEP_ALIVE.default
    retry: Annotated[
        bool,
        setting(
            "Whether a new peer has to show that its address is its own before anything is kept for it: a round trip"
            " more, and no state for who lies about where it is.",
            Flag(),
        ),
    ] = False
    max_datagram_bytes: Annotated[
        int, setting("Largest datagram that is sent.", Count(limits.QUIC_DATAGRAM_BYTES))
    ] = limits.QUIC_DATAGRAM_BYTES.default
    probe_datagram_size: Annotated[
        bool,
        setting("Whether larger datagrams are tried out; only the engine `qh3` can.", Flag()),
    ] = True
    connection_window: Annotated[
        int,
        setting("Bytes that a peer may send ahead on a connection.", Size(limits.QUIC_CONNECTION_WINDOW)),
    ] = limits.QUIC_CONNECTION_WINDOW.default
    stream_window: Annotated[
        int,
        setting("Bytes that a peer may send ahead on a stream.", Size(limits.QUIC_STREAM_WINDOW)),
    ] = limits.QUIC_STREAM_WINDOW.default
    max_streams: Annotated[
        int,
        setting(
            "Streams of each kind that a peer may have open; the engine `qh3` always allows 100 and 103.",
            Count(limits.QUIC_MAX_STREAMS),
        ),
    ] = limits.QUIC_MAX_STREAMS.default


class Listen(Section, frozen=True):
    """One listener for each protocol."""

    blipmq: BlipmqListener = msgspec.field(default_factory=BlipmqListener)
    overhop: OverhopListener = msgspec.field(default_factory=OverhopListener)
    relink: RelinkListener = msgspec.field(default_factory=RelinkListener)
    zeroctl: ZeroctlListener = msgspec.field(default_factory=ZeroctlListener)
    felix: FelixListener = msgspec.field(default_factory=FelixListener)

    def of(self, protocol: Protocol) -> ListenerConfig:
        listener: ListenerConfig = getattr(self, protocol)
        return listener


class Key(Section, frozen=True):
    """Who may connect, and what they may do. A key without filters for a right does not have that right."""

    name: Annotated[
        str,
        setting("Name of the key in logs and in the `source` column.", Name(limits.KEY_NAME_CHARS)),
    ]
    key: Annotated[str, setting("What the client presents.", Secret())]
    publish: Annotated[list[str], setting("Topics that it may publish to.", Filters())] = msgspec.field(
        default_factory=list
    )
    subscribe: Annotated[list[str], setting("Topics that it may subscribe to.", Filters())] = msgspec.field(
        default_factory=list
    )

    def __repr__(self) -> str:
        return f"Key(name={self.name!r}, key=..., publish={self.publish!r}, subscribe={self.subscribe!r})"


def dev_key() -> Key:
    """The embedded key, for a gateway that only its own machine can reach."""
    return Key(name="dev", key="dev-key", publish=["#"], subscribe=["#"])


class QueueConfig(Section, frozen=True):
    """A queue of jobs for Overhop's workers, made when the gateway starts. It stays if it is taken out here."""

    name: Annotated[str, setting("Name of the queue.", QueueName())]
    filter: Annotated[
        str,
        setting(
            "What any protocol publishes to a topic that this matches is a job of the queue.", QueueFilter()
        ),
    ] = ""
    concurrency_limit: Annotated[
        int,
        setting(
            "Jobs that all workers together may have at once.",
            Count(limits.OVERHOP_CONCURRENCY, zero="no limit"),
        ),
    ] = limits.OVERHOP_CONCURRENCY.default
    allow_job_overrides: Annotated[
        bool,
        setting("Whether a job may say itself how often and in what interval it is tried.", Flag()),
    ] = True


class EndpointConfig(Section, frozen=True):
    """A service that Relink connectors ask for by name. Relink has no keys on the wire: what an endpoint may do are
    its two rules, or, if it names a key, what that key may do of it."""

    name: Annotated[str, setting("What connectors ask for.", EndpointName())]
    connector_id_bytes: Annotated[
        int,
        setting("Size of the ids of the channels on which connectors send.", Count(limits.RELINK_ID_BYTES)),
    ] = limits.RELINK_ID_BYTES.default
    listener_id_bytes: Annotated[
        int,
        setting("Size of the ids of the channels on which the gateway sends.", Count(limits.RELINK_ID_BYTES)),
    ] = limits.RELINK_ID_BYTES.default
    connector_transactions: Annotated[bool, setting("Whether connectors commit what they send.", Flag())] = (
        False
    )
    listener_transactions: Annotated[bool, setting("Whether the gateway commits what it sends.", Flag())] = (
        False
    )
    publish: Annotated[
        str,
        setting(
            "The topic that a channel's messages go to; empty: `NAME.in.{channel}`. Without `{channel}` all channels"
            " share it.",
            TopicRule(),
        ),
    ] = ""
    deliver: Annotated[
        str,
        setting(
            "The topics that are delivered on a channel; empty: `NAME.out.{channel}`. Without `{channel}` it is a"
            " filter, and all of it goes to channel 0.",
            TopicRule(filter=True),
        ),
    ] = ""
    key: Annotated[
        str,
        setting("The name of the key whose rights limit the rules; empty: none does.", KeyName()),
    ] = ""


def demo_endpoints() -> list[EndpointConfig]:
    """The embedded endpoints, to try the protocol with."""
    return [
        EndpointConfig(name="demo"),
        EndpointConfig(name="demo-tx", connector_transactions=True, listener_transactions=True),
    ]


class MapRule(Section, frozen=True):
    """A rule by which a listener's addresses become topics and topics its addresses. A listener that has rules has only
    these: what none of them maps is refused to publishers and subscribers, and not delivered."""

    listener: Annotated[Protocol, setting("Whose addresses it maps.", Choice(PROTOCOLS))]
    address: Annotated[
        str,
        setting(
            "Addresses as the protocol's peers write them. `{name}` is one word, without a dot or slash; `{name...}`,"
            " at the end, is all that comes.",
            MapPattern(),
        ),
    ]
    topic: Annotated[str, setting("Their topics, with the same names.", MapPattern(topic=True))]
    direction: Annotated[
        Literal["both", "publish", "deliver"],
        setting(
            "For `relink`, whose endpoints publish to other topics than they are delivered: which of the two.",
            Choice(("both", "publish", "deliver")),
        ),
    ] = "both"


class ZeroctlNode(Section, frozen=True):
    """This gateway as a node among zeroctl's nodes, whichever carrier they are on."""

    heartbeat_interval: Annotated[
        float,
        setting(
            "How often it sends its heartbeat; its time to live is three times as long.",
            Duration(limits.ZEROCTL_HEARTBEAT, zero="never, it is a transient node"),
            reload=True,
        ),
    ] = limits.ZEROCTL_HEARTBEAT.default


class ServiceConfig(Section, frozen=True):
    """A zeroctl service that this gateway provides: each request becomes a message for whoever does the work."""

    name: Annotated[
        str,
        setting("Name of the service in the gateway's heartbeat.", Name(limits.SERVICE_NAME_CHARS)),
    ]
    key: Annotated[str, setting("Requests that it takes.", RoutingKey(wildcards=True))]
    topic: Annotated[
        str, setting("Where the jobs go; those of an Overhop queue go to `queue.NAME.jobs`.", RoutingKey())
    ]
    finished: Annotated[
        str,
        setting(
            "Where finished jobs are reported: a message with the header `task-id` (or a JSON body that has it), and"
            " `nak` and `reason` for one that failed. Without it only a queue of this gateway can tell.",
            RoutingKey(wildcards=True, empty=True),
        ),
    ] = ""
    description: Annotated[
        str, setting("What the heartbeat says about it.", Text(limits.SERVICE_DESCRIPTION_CHARS))
    ] = ""


class CarrierConfig(Section, frozen=True):
    """A broker that zeroctl's nodes use. The gateway is its client, and passes messages between it and the bus."""

    name: Annotated[
        str,
        setting("Name of this carrier in metrics, logs and headers.", Name(limits.CARRIER_NAME_CHARS)),
    ]
    url: Annotated[
        str,
        setting(
            "The broker: AMQP 0-9-1 (extra `amqp`) or MQTT 3.1.1 (extra `mqtt`), with user and password.",
            Url(("amqp", "amqps", "mqtt", "mqtts")),
        ),
    ]
    prefix: Annotated[
        str,
        setting(
            "AMQP: stands before each exchange's name, without a separator. MQTT: words before each topic, separated by"
            " slashes.",
            Text(limits.CARRIER_PREFIX_CHARS),
        ),
    ] = ""
    exchange: Annotated[
        str,
        setting(
            "AMQP: the exchange for keys of all kinds but discovery, which has its own, `discovery`.",
            Name(limits.CARRIER_NAME_CHARS),
        ),
    ] = "events"
    take: Annotated[list[str], setting("Messages of the broker's nodes that come in.", Filters())] = (
        msgspec.field(default_factory=list)
    )
    give: Annotated[list[str], setting("Messages of the bus that go out.", Filters())] = msgspec.field(
        default_factory=list
    )
    prefetch: Annotated[
        int,
        setting(
            "AMQP: messages under way from the broker that are not safe yet. MQTT: messages that are read ahead of the"
            " log, of 16 MiB in all.",
            Count(limits.CARRIER_PREFETCH),
        ),
    ] = limits.CARRIER_PREFETCH.default
    reconnect_delay: Annotated[
        float,
        setting("Time between two attempts to connect.", Duration(limits.CARRIER_RECONNECT_DELAY)),
    ] = limits.CARRIER_RECONNECT_DELAY.default

    def __repr__(self) -> str:
        return f"CarrierConfig(name={self.name!r}, url=..., take={self.take!r}, give={self.give!r})"


class Admin(Section, frozen=True):
    """The web side: metrics, health and status over HTTP."""

    bind: Annotated[list[str], setting(BIND, Bind())] = msgspec.field(
        default_factory=lambda: ["127.0.0.1:8600"]
    )

    @property
    def addresses(self) -> list[Address]:
        """`bind`, taken apart; empty if there is no web side."""
        return [parse_address(text) for text in self.bind]


class Drop(Section, frozen=True):
    """The drop directory, where Spark finds every message as Parquet."""

    enabled: Annotated[
        bool,
        setting(
            "Whether there are drops at all. Without them the log is all there is, and retention waits for nobody.",
            Flag(),
        ),
    ] = True
    uri: Annotated[str, setting("Where the files go.", DropLocation())] = ""
    roll_rows: Annotated[
        int,
        setting("A file ends after so many rows.", Count(limits.DROP_ROLL_ROWS)),
    ] = limits.DROP_ROLL_ROWS.default
    roll_bytes: Annotated[
        int,
        setting("A file ends after so many bytes of messages.", Size(limits.DROP_ROLL_BYTES)),
    ] = limits.DROP_ROLL_BYTES.default
    roll_seconds: Annotated[
        float,
        setting("A file ends so long after its first row.", Duration(limits.DROP_ROLL_SECONDS)),
    ] = limits.DROP_ROLL_SECONDS.default
    run: Annotated[
        bool,
        setting(
            "Whether the gateway writes the files itself; `false` leaves it to a `headrace sink` process, which"
            " then holds back retention in the same way.",
            Flag(),
        ),
    ] = True
    compression: Annotated[
        Literal["zstd", "snappy", "gzip", "none"],
        setting("How the columns are compressed.", Choice(("zstd", "snappy", "gzip", "none"))),
    ] = "zstd"
    topics: Annotated[list[str], setting(TOPICS, Filters())] = msgspec.field(default_factory=lambda: ["#"])
    leave_out: Annotated[list[str], setting(LEAVE_OUT, Columns())] = msgspec.field(default_factory=list)
    payload_json: Annotated[bool, setting(PAYLOAD_JSON, Flag())] = False


class FurtherDrop(Section, frozen=True):
    """A further drop directory, for some of the messages. When its files end, how they are compressed and who
    writes them is as in [drop]."""

    name: Annotated[
        str,
        setting("Name of this drop in metrics, logs and saved cursors.", Name(limits.DROP_NAME_CHARS)),
    ]
    topics: Annotated[list[str], setting(TOPICS, Filters())]
    uri: Annotated[
        str,
        setting(
            "Where the files go; no other drop may have the same place.",
            DropLocation("drop-NAME"),
        ),
    ] = ""
    leave_out: Annotated[list[str], setting(LEAVE_OUT, Columns())] = msgspec.field(default_factory=list)
    payload_json: Annotated[bool, setting(PAYLOAD_JSON, Flag())] = False


class Logging(Section, frozen=True):
    """The gateway's own log lines, on standard error."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        setting(
            "The least that is worth a line.", Choice(("debug", "info", "warning", "error")), reload=True
        ),
    ] = "info"
    format: Annotated[
        Literal["auto", "human", "json"],
        setting("`auto` is for humans on a terminal and JSON elsewhere.", Choice(("auto", "human", "json"))),
    ] = "auto"


class Gateway(Section, frozen=True):
    """The process."""

    loop: Annotated[
        Literal["auto", "uvloop", "asyncio"],
        setting(
            "The event loop; `auto` is uvloop where it is installed.", Choice(("auto", "uvloop", "asyncio"))
        ),
    ] = "auto"
    drain_timeout: Annotated[
        float,
        setting(
            "How long work in flight may take to finish when the gateway stops.",
            Duration(limits.GATEWAY_DRAIN_TIMEOUT),
            reload=True,
        ),
    ] = limits.GATEWAY_DRAIN_TIMEOUT.default


class Config(Section, frozen=True):
    """Everything that an operator can set. `Config()` is the embedded default."""

    node: Node = msgspec.field(default_factory=Node)
    log: LogConfig = msgspec.field(default_factory=LogConfig)
    bus: BusConfig = msgspec.field(default_factory=BusConfig)
    listen: Listen = msgspec.field(default_factory=Listen)
    quic: QuicConfig = msgspec.field(default_factory=QuicConfig)
    keys: Annotated[
        list[Key],
        tables(
            "There may be any number; setting one replaces the embedded one.",
            reload=True,
        ),
    ] = msgspec.field(default_factory=lambda: [dev_key()])
    map: Annotated[
        list[MapRule],
        tables("There may be any number; no two of a listener may have an address or a topic in common."),
    ] = msgspec.field(default_factory=list)
    queues: Annotated[
        list[QueueConfig],
        tables("There may be any number, beside those that workers add."),
    ] = msgspec.field(default_factory=list)
    endpoints: Annotated[
        list[EndpointConfig],
        tables("There may be any number; setting one replaces the embedded ones."),
    ] = msgspec.field(default_factory=demo_endpoints)
    zeroctl: ZeroctlNode = msgspec.field(default_factory=ZeroctlNode)
    services: Annotated[
        list[ServiceConfig],
        tables("There may be any number. They need a queue, or somebody else, that does the work."),
    ] = msgspec.field(default_factory=list)
    carriers: Annotated[
        list[CarrierConfig],
        tables("There may be any number."),
    ] = msgspec.field(default_factory=list)
    admin: Admin = msgspec.field(default_factory=Admin)
    drop: Drop = msgspec.field(default_factory=Drop)
    drops: Annotated[
        list[FurtherDrop],
        tables("There may be any number. A message goes to every drop that has a filter for it."),
    ] = msgspec.field(default_factory=list)
    logging: Logging = msgspec.field(default_factory=Logging)
    gateway: Gateway = msgspec.field(default_factory=Gateway)

    def changes(self, other: "Config") -> list[str]:
        """The dotted keys whose values differ in `other`; an array of tables counts as one key."""
        return [key for key in SETTINGS if value_at(self, key) != value_at(other, key)]


SETTINGS: dict[str, Setting | TableArray] = {leaf.key: leaf for leaf in leaves(describe(Config))}


def reloadable(key: str) -> bool:
    """Whether a running gateway can take a new value for this key."""
    return SETTINGS[key].reload
