"""BlipMQ's bytes to lines."""

from collections.abc import Iterable, Iterator

from headrace.decoders.lines import Line, Role, shown, unfinished
from headrace.wire import blipmq


def read_blipmq(chunks: Iterable[bytes], role: Role) -> Iterator[Line]:
    decoder = blipmq.Decoder()
    for chunk in chunks:
        try:
            frames = decoder.feed(chunk)
        except blipmq.FrameError:
            frames = []
        for frame in frames:
            yield blipmq_line(frame, role)
        if decoder.error is not None:
            bad = decoder.error
            yield {"error": bad.kind, "position": bad.position, "reason": bad.reason}
            return
    if decoder.pending:
        yield unfinished(decoder.position, decoder.pending, decoder.wanted)


def blipmq_line(frame: blipmq.Frame, role: Role) -> Line:
    line: Line = {
        "start": frame.start,
        "end": frame.end,
        "type": frame.type.name,
        "correlation": frame.correlation,
    }
    if isinstance(frame, blipmq.Malformed):
        line["malformed"] = frame.kind
        line["reason"] = frame.reason
        line |= shown("payload", frame.payload)
    else:
        for name, value in frame.fields().items():
            if name in ("payload", "trailing") and not value:
                continue
            line |= shown(name, value)
    warnings = list(blipmq_warnings(frame, role))
    if warnings:
        line["warnings"] = warnings
    return line


def blipmq_warnings(frame: blipmq.Frame, role: Role) -> Iterator[str]:
    """What is well-formed and still not right; what a server would refuse is said in its own words."""
    both = {"PUBLISH", "ACK"}
    server_only = {"NACK", "PONG"}
    name = frame.type.name
    if (role == "client" and name in server_only) or (role == "server" and name not in both | server_only):
        yield "unexpected direction"
    match frame:
        case blipmq.Hello() if frame.version != blipmq.PROTOCOL_VERSION:
            yield "unsupported protocol version"
        case blipmq.Publish() | blipmq.Subscribe():
            if not frame.topic:
                yield "empty topic"
            if frame.qos > 1:
                yield "invalid QoS value"
            if isinstance(frame, blipmq.Subscribe) and frame.trailing:
                yield "bytes after the last field are ignored"
        case blipmq.Poll() if frame.subscription == 0:
            yield "subscription_id must be non-zero"
        case blipmq.Ack() if frame.subscription == 0 and role == "client":
            yield "subscription_id must be non-zero"
        case blipmq.Ping() | blipmq.Pong() if frame.payload:
            yield "the payload is ignored"
