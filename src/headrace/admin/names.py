"""Every metric of the gateway with its kind, labels, unit and meaning. Knows nothing of where the values
come from.

No label grows with topics, clients or messages: `protocol` has one value for each protocol, the others are
listed where they are used. Counters count from the start of the process. An offset is a message's place in
the log."""

from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter's name ends with `_total`; a unit is the last word before that."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(f"headrace_{name}_total", "counter", help, labels)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(f"headrace_{name}", "gauge", help, labels)


# --- the process --------------------------------------------------------------------------------------------

INFO: Final = _gauge("info", "1, with what this gateway is as labels.", "version", "node", "log", "loop")
READY: Final = _gauge("ready", "1 while /readyz answers 200.")
START_TIME: Final = _gauge("start_time_seconds", "When the gateway started (Unix time).")

# --- connections, by protocol -------------------------------------------------------------------------------

CONNECTIONS: Final = _gauge("connections", "Connections that are open now.", "protocol")
MAX_CONNECTIONS: Final = _gauge("connections_limit", "Connections that may be open at once.", "protocol")
# Keys of Service.counters().
CONNECTION_COUNTERS: Final = {
    "opened": _counter("connections_opened", "Connections that were accepted.", "protocol"),
    "closed": _counter("connections_closed", "Connections that ended, for whatever reason.", "protocol"),
    "refused": _counter(
        "connections_refused", "Connections closed at once: above the limit, or while draining.", "protocol"
    ),
    "stalled": _counter(
        "connections_stalled",
        "Connections dropped because the peer did not read what it was sent.",
        "protocol",
    ),
    "idled": _counter(
        "connections_idled", "Connections closed because nothing was said for too long.", "protocol"
    ),
    "failed": _counter("session_failures", "Connections closed by an error inside the gateway.", "protocol"),
    "reads": _counter("reads", "Read events.", "protocol"),
    "bytes_in": _counter("received_bytes", "Bytes received.", "protocol"),
    "writes": _counter("writes", "Write calls.", "protocol"),
    "bytes_out": _counter("sent_bytes", "Bytes sent.", "protocol"),
}
SESSION_EVENTS: Final = _counter(
    "session_events",
    "What a protocol's sessions counted; the events are listed in docs/operations.md.",
    "protocol",
    "event",
)
SESSION_GAUGES: Final = _gauge(
    "session_held",
    "What a protocol's sessions hold now; what there is is listed in docs/operations.md.",
    "protocol",
    "what",
)

# --- the log ------------------------------------------------------------------------------------------------

LOG_FULL: Final = _gauge("log_full", "1 while the log takes no messages: the disk or retention says so.")
LOG_FAILED: Final = _gauge("log_failed", "1 after a sync failed: nothing is confirmed until a restart.")
LOG_RECOVERY_SECONDS: Final = _gauge("log_recovery_seconds", "How long opening the log took.")
LOG_RECOVERY_CUT: Final = _gauge(
    "log_recovery_cut_bytes", "Torn bytes that were cut off when the log was opened."
)
LOG_RECOVERY_DAMAGE: Final = _gauge(
    "log_recovery_damage", "Damaged places that were found when the log was opened."
)
# Keys of Log.stats(), but for what the bus tells too.
LOG: Final = {
    "records": _counter("log_records", "Records appended, control records included."),
    "bytes": _counter("log_appended_bytes", "Bytes of records appended."),
    "refused_full": _counter("log_refused_full", "Appends refused because the log was full."),
    "first_offset": _gauge("log_first_offset", "Oldest offset that is kept."),
    "appended_offset": _gauge("log_appended_offset", "Offset of the next message."),
    "safe_offset": _gauge("log_safe_offset", "Everything below this offset is safe by the sync policy."),
    "synced_offset": _gauge("log_synced_offset", "Everything below this offset was synced to the disk."),
    "segments": _gauge("log_segments", "Segments with messages."),
    "segment_bytes": _gauge("log_segment_bytes", "Size of a segment."),
    "max_segments": _gauge("log_segments_limit", "Segments that retention allows."),
    "pool_segments": _gauge("log_pool_segments", "Segments that are ready to be filled."),
    "syncs": _counter("log_syncs", "Syncs to the disk."),
    "sync_seconds": _counter("log_sync_seconds", "Time that syncs took."),
    "prepared_new": _counter("log_segments_created", "Segments prepared as new files."),
    "prepared_recycled": _counter("log_segments_recycled", "Segments prepared from retired ones."),
    "prepared_remade": _counter(
        "log_segments_remade", "Recycled segments that were given memory in larger or smaller pieces."
    ),
    "retired_segments": _counter("log_segments_retired", "Segments that retention let go."),
    "overrun_holds": _counter(
        "log_holds_overrun", "Times that a cursor lost messages because on_full is drop_oldest."
    ),
}

# --- the bus ------------------------------------------------------------------------------------------------

# Keys of Bus.stats().
BUS: Final = {
    "topics": _gauge("topics", "Topics that were ever published or subscribed to."),
    "subscriptions": _gauge("subscriptions", "Subscriptions, those without a peer included."),
    "durable": _gauge("subscriptions_durable", "Subscriptions that survive a restart."),
    "notes": _gauge("notes", "Values that sessions keep in the log: links, queues and the like."),
    "inflight": _gauge("inflight", "Messages that were delivered and not acknowledged yet."),
    "acknowledged": _counter("acknowledged", "Messages acknowledged by subscribers."),
    "redelivered": _counter("redelivered", "Deliveries after the first."),
    "dead": _counter("dead_letters", "Messages given up and put on their dead-letter topic."),
    "lost": _counter("overtaken", "Messages that a slow subscription did not get before they went."),
    "expired": _counter("subscriptions_expired", "Durable subscriptions dropped because nobody came back."),
    "carried": _counter("carried", "Unfinished deliveries carried forward from a segment that went."),
    "published": _counter("published", "Messages accepted.", "protocol"),
    "published_bytes": _counter("published_bytes", "Payload bytes of messages accepted.", "protocol"),
    "delivered": _counter("delivered", "Messages delivered to subscribers.", "protocol"),
}

DELAYS: Final = Metric(
    "headrace_delivery_delay_seconds",
    "histogram",
    "How long after a message came, or was due, it was first delivered to a subscriber.",
    ("protocol",),
)
DELAY_BOUNDS: Final = tuple(2**power / 1e6 for power in range(6, 27))  # 64 µs to about a minute

# --- zeroctl's nodes and carriers ---------------------------------------------------------------------------

NODES: Final = _gauge("zeroctl_nodes", "zeroctl nodes that were heard within their time to live.")
CARRIER_CONNECTED: Final = _gauge(
    "carrier_connected", "1 while there is a connection to the carrier's broker.", "carrier"
)
CARRIER_EVENTS: Final = _counter(
    "carrier_events",
    "What a carrier counted; the events are listed in docs/operations.md.",
    "carrier",
    "event",
)

# --- the sink, by drop --------------------------------------------------------------------------------------

SINK_COVERED: Final = _gauge(
    "sink_covered_offset", "Everything below this offset is in the drop, or is not for it.", "drop"
)
SINK_LAG_OFFSETS: Final = _gauge("sink_lag_offsets", "Offsets that the drop is behind the log.", "drop")
SINK_LAG_SECONDS: Final = _gauge(
    "sink_lag_seconds", "Age of the oldest message that is not in the drop yet; 0 if there is none.", "drop"
)
# Keys of Sink.stats(); only for drops that the gateway itself writes.
SINK: Final = {
    "files": _counter("sink_files", "Files committed.", "drop"),
    "rows": _counter("sink_rows", "Rows in committed files.", "drop"),
    "bytes": _counter("sink_written_bytes", "Bytes of committed files.", "drop"),
    "message_bytes": _counter("sink_message_bytes", "Bytes of messages in committed files.", "drop"),
    "missing": _counter("sink_missing", "Messages that the log lost before the sink came to them.", "drop"),
    "write_seconds": _counter("sink_write_seconds", "Time spent on reading, writing and committing.", "drop"),
    "last_commit": _gauge(
        "sink_last_commit_time_seconds", "When a file was last committed (Unix time).", "drop"
    ),
    "failing": _gauge(
        "sink_failing", "1 while the drop cannot be written; it is tried again and again.", "drop"
    ),
}
SINK_FAILURES: Final = _counter(
    "sink_failures",
    "Times that the drop could not be written; the reasons are listed in docs/operations.md.",
    "drop",
    "reason",
)

ALL: Final = (
    INFO,
    READY,
    START_TIME,
    CONNECTIONS,
    MAX_CONNECTIONS,
    *CONNECTION_COUNTERS.values(),
    SESSION_EVENTS,
    SESSION_GAUGES,
    LOG_FULL,
    LOG_FAILED,
    LOG_RECOVERY_SECONDS,
    LOG_RECOVERY_CUT,
    LOG_RECOVERY_DAMAGE,
    *LOG.values(),
    *BUS.values(),
    DELAYS,
    NODES,
    CARRIER_CONNECTED,
    CARRIER_EVENTS,
    SINK_COVERED,
    SINK_LAG_OFFSETS,
    SINK_LAG_SECONDS,
    *SINK.values(),
    SINK_FAILURES,
)
