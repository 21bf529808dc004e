"""Overhop's bytes to lines."""

import base64
from collections.abc import Iterable, Iterator
from typing import Any, Final

from headrace.decoders.lines import Line, Role, unfinished
from headrace.wire import overhop

LAST_OF_CLIENTS: Final = 100


def read_overhop(chunks: Iterable[bytes], role: Role) -> Iterator[Line]:
    decoder = overhop.Decoder(overhop.MOST_PAYLOAD_LIMIT)
    for chunk in chunks:
        try:
            messages = decoder.feed(chunk)
        except overhop.FrameError:
            messages = []
        for message in messages:
            yield overhop_line(message, role)
        if decoder.error is not None:
            bad = decoder.error
            yield {"error": bad.kind, "position": bad.position, "reason": bad.reason}
            return
    if decoder.pending:
        yield unfinished(decoder.position, decoder.pending, decoder.wanted)


def overhop_line(message: overhop.Message, role: Role) -> Line:
    line: Line = {
        "start": message.start,
        "end": message.end,
        "type": message.name if not message.name.lstrip("-").isdigit() else message.type,
        "rid": message.rid,
        "payload": as_json(message.payload),
    }
    if warnings := list(warnings_of(message, role)):
        line["warnings"] = warnings
    return line


def warnings_of(message: overhop.Message, role: Role) -> Iterator[str]:
    if message.name.lstrip("-").isdigit():
        yield "unknown type"
    if role != "any" and (message.type <= LAST_OF_CLIENTS) != (role == "client"):
        yield "unexpected direction"
    if message.rid == "0" and message.type <= LAST_OF_CLIENTS:
        yield "rid 0 is a server's"


def as_json(value: Any) -> Any:
    """A value of MessagePack for JSON, which has no bytes: they stand alone in an object that says so."""
    if isinstance(value, bytes):
        try:
            return {"bin": value.decode()}
        except UnicodeDecodeError:
            return {"bin_base64": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [as_json(inner) for inner in value]
    if isinstance(value, dict):
        return {key: as_json(inner) for key, inner in value.items()}
    return value
