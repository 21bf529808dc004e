"""Felix's bytes to lines: those of one QUIC stream, as they are once QUIC has decrypted them."""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
from msgspec import UNSET, Raw

from headrace.decoders.lines import Line, Role, shown, unfinished
from headrace.wire import felix, felix_json

CLIENT_ONLY: Final = (
    felix_json.Publish,
    felix_json.PublishBatch,
    felix_json.Subscribe,
    felix_json.CachePut,
    felix_json.CacheGet,
)
KNOWN_FLAGS: Final = felix.FLAG_PUBLISH_BATCH | felix.FLAG_EVENT_BATCH


def read_felix(chunks: Iterable[bytes], role: Role) -> Iterator[Line]:
    decoder = felix.Decoder()
    for chunk in chunks:
        try:
            frames = decoder.feed(chunk)
        except felix.FrameError:
            frames = []
        for frame in frames:
            yield felix_line(frame, role)
        if decoder.error is not None:
            bad = decoder.error
            yield {"error": bad.kind, "position": bad.position, "reason": bad.reason}
            return
    if decoder.pending:
        yield unfinished(decoder.position, decoder.pending, decoder.wanted)


def felix_line(frame: felix.Frame, role: Role) -> Line:
    line: Line = {"start": frame.start, "end": frame.end}
    warnings: list[str] = []
    try:
        line |= _content(frame, role, warnings)
    except felix.PayloadError as bad:
        line |= {"malformed": bad.kind, "reason": str(bad), "flags": frame.flags}
        line |= shown("payload", frame.payload)
    if frame.flags & ~KNOWN_FLAGS:
        warnings.append(f"flags {frame.flags & ~KNOWN_FLAGS:#06x} mean nothing")
    if warnings:
        line["warnings"] = warnings
    return line


def _content(frame: felix.Frame, role: Role, warnings: list[str]) -> Line:
    if frame.flags & felix.FLAG_PUBLISH_BATCH and role != "server":
        tenant, namespace, stream, payloads = felix.decode_publish_batch(frame.payload)
        if not (tenant and namespace and stream):
            warnings.append("empty name")
        names = {"tenant_id": tenant, "namespace": namespace, "stream": stream}
        return {"type": "publish_batch", "binary": True, **names, "payloads": _all_shown(payloads)}
    if frame.flags & felix.FLAG_EVENT_BATCH and role != "client":
        subscription, payloads = felix.decode_event_batch(frame.payload)
        if not payloads:
            warnings.append("an empty batch ends a subscription in the reference's client")
        return {
            "type": "event_batch",
            "binary": True,
            "subscription_id": subscription,
            "payloads": _all_shown(payloads),
        }
    message = felix.decode_message(frame.payload)
    asks = isinstance(message, CLIENT_ONLY)
    if (role == "client" and not asks and not isinstance(message, felix_json.Error)) or (
        role == "server" and asks
    ):
        warnings.append("unexpected direction")
    line: Line = {"type": message.__struct_config__.tag}
    for name, value in msgspec.structs.asdict(message).items():
        if value is UNSET:
            continue
        if name == "payloads":
            line[name] = _all_shown(felix.payloads_of(value))
        elif isinstance(value, Raw):
            line |= shown(name, felix.payload_of(value))
        else:
            line[name] = value
    return line


def _all_shown(payloads: list[bytes]) -> list[object]:
    """Each as text where a person can read it, otherwise as hex in a table that says so."""
    found: list[object] = []
    for payload in payloads:
        ((name, value),) = shown("payload", payload).items()
        found.append(value if name == "payload" else {name.removeprefix("payload_"): value})
    return found
