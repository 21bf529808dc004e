"""Relink's bytes to lines. Who sent them matters: it decides what the handshake is and how large channel ids are."""

from collections.abc import Iterable, Iterator

from headrace.decoders.lines import Line, Role, shown, unfinished
from headrace.wire import relink

SENDERS = {"client": "connector", "server": "listener"}


def read_relink(
    chunks: Iterable[bytes], role: Role, sizes: tuple[int, int] = (4, 4), handshake: bool = True
) -> Iterator[Line]:
    """`sizes` are those of the connector's and the listener's channel ids, where the stream does not tell; without
    `handshake` it begins with packets."""
    if role not in SENDERS:
        yield {
            "error": "no role",
            "position": 0,
            "reason": "who sent the bytes decides how they are read: give --role client or --role server",
        }
        return
    decoder = relink.Decoder(
        SENDERS[role], handshake=handshake, connector_size=sizes[0], listener_size=sizes[1]
    )
    for chunk in chunks:
        try:
            items = decoder.feed(chunk)
        except relink.PacketError:
            items = []
        for item in items:
            yield relink_line(item)
        if decoder.error is not None:
            bad = decoder.error
            yield {"error": bad.kind, "position": bad.position, "reason": bad.reason}
            return
    if decoder.pending:
        yield unfinished(decoder.position, decoder.pending, decoder.wanted)


def relink_line(item: relink.Item) -> Line:
    line: Line = {"start": item.start, "end": item.end, "type": type(item).__name__.lower()}
    if isinstance(item, relink.General | relink.Operation | relink.Acknowledgement):
        line["type"] = item.type.name.lower()
    if isinstance(item, relink.Targeted):
        line["channels" if item.multicast else "channel"] = (
            list(item.channels) if item.multicast else item.channels[0]
        )
    if isinstance(item, relink.Operation | relink.Acknowledgement):
        if item.sequence is not None:
            line["sequence"] = item.sequence
        line["of"] = "receiver" if isinstance(item, relink.Acknowledgement) else "sender"
    elif isinstance(item, relink.Message):
        line["long"] = item.long_form
        line["large"] = item.large_form
        line["parts"] = [
            {name: value} if name.endswith("_hex") else value
            for name, value in (next(iter(shown("part", part).items())) for part in item.parts)
        ]
    elif isinstance(item, relink.Hello):
        line |= item.fields()
        line["flags"] = [flag.name.lower() for flag in relink.Flags if flag.name and flag in item.flags]
    elif isinstance(item, relink.Version | relink.Answer):
        line |= item.fields()
    return line
