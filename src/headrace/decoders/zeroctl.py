"""zeroctl's bytes, in our own framing, to lines."""

import hashlib
import json
from collections.abc import Iterable, Iterator

from headrace.decoders.lines import Line, Role, shown, unfinished
from headrace.wire import zeroctl

CLIENT_ONLY = {"OPEN", "MESSAGE", "BIND", "UNBIND", "ACK", "REJECT", "CREDIT"}
GATEWAY_ONLY = {"WELCOME", "CONFIRM", "REFUSE", "DELIVERY"}


def read_zeroctl(chunks: Iterable[bytes], role: Role) -> Iterator[Line]:
    decoder = zeroctl.Decoder()
    for chunk in chunks:
        try:
            frames = decoder.feed(chunk)
        except zeroctl.FrameError:
            frames = []
        for frame in frames:
            yield zeroctl_line(frame, role)
        if decoder.error is not None:
            bad = decoder.error
            yield {"error": bad.kind, "position": bad.position, "reason": bad.reason}
            return
    if decoder.pending:
        yield unfinished(decoder.position, decoder.pending, decoder.wanted)


def zeroctl_line(frame: zeroctl.Frame, role: Role) -> Line:
    line: Line = {"start": frame.start, "end": frame.end, "type": frame.type.name, "id": frame.id}
    if isinstance(frame, zeroctl.Malformed):
        line["malformed"] = frame.kind
        line["reason"] = frame.reason
        line |= shown("payload", frame.payload)
    else:
        for name, value in frame.fields().items():
            if name == "payload" and not value:
                continue
            if name == "header" and isinstance(value, bytes):
                line["header"] = json.loads(value)
            elif name == "conditions" and isinstance(frame, zeroctl.Bind):
                line["conditions"] = [
                    [kind.name.lower(), key, wanted] for kind, key, wanted in frame.conditions
                ]
            else:
                line |= shown(name, list(value) if isinstance(value, tuple) else value)
    warnings = list(zeroctl_warnings(frame, role))
    if warnings:
        line["warnings"] = warnings
    return line


def zeroctl_warnings(frame: zeroctl.Frame, role: Role) -> Iterator[str]:
    """What is well-formed and still not right."""
    name = frame.type.name
    if (role == "client" and name in GATEWAY_ONLY) or (role == "server" and name in CLIENT_ONLY):
        yield "unexpected direction"
    match frame:
        case zeroctl.Open() | zeroctl.Welcome() if frame.version != zeroctl.FRAMING_VERSION:
            yield "unsupported version of the framing"
        case zeroctl.Message() | zeroctl.Delivery():
            if zeroctl.header_sha256(frame.header) != hashlib.sha256(frame.body).digest():
                yield "sha256 is not that of the body"
        case zeroctl.Bind():
            if not frame.filter:
                yield "empty filter"
            if frame.flags & 4 and not frame.flags & 1:
                yield "a durable binding is one with acknowledgements"
        case zeroctl.Confirm() if frame.count == 0:
            yield "it confirms nothing"
        case zeroctl.Ping() | zeroctl.Pong() if frame.payload:
            yield "the payload is ignored"
