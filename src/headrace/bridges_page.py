"""docs/bridges.md, written from the guarantees. It prints nothing itself."""

from collections.abc import Iterable, Sequence
from typing import Final

from headrace.guarantees import (
    BESIDE,
    CEILINGS,
    DELIVERING,
    GIVES,
    PROTOCOLS,
    PUBLISHING,
    ROOM_TO_GIVE,
    ROOM_TO_TAKE,
    TAKES,
    Room,
    largest,
    pair,
    way,
)

NAMES: Final = {
    "blipmq": "BlipMQ",
    "felix": "Felix",
    "overhop": "Overhop",
    "relink": "Relink",
    "zeroctl": "zeroctl",
}

OPENING: Final = """\
# Bridges

Five protocols publish, five subscribe, and every publisher reaches every subscriber: 25 pairs. This page says what each
pair can count on. It is written by `headrace guarantees` from the same data as `/api/guarantees` and the tests of all
pairs, which include killing the gateway in the middle.

The payload arrives byte for byte, in all pairs. What a topic is called in [BlipMQ](protocols/blipmq.md),
[Felix](protocols/felix.md), [Overhop](protocols/overhop.md), [Relink](protocols/relink.md) and
[zeroctl](protocols/zeroctl.md), and how that can be changed, is in [Addresses and topics](addresses.md).
"""

PROMISES: Final = """\
A promise has two halves: whether a message can be missed, and whether it can come twice.

| | can be missed | can come twice |
| --- | --- | --- |
| exactly once | no | no |
| at least once | no | yes |
| at most once | yes | no |
| best effort | yes | yes |

Nothing is missed means: of what was *confirmed*, from when the subscription was made, while it is kept
(`bus.durable_grace`, for Relink `grace`), as far as retention has not overtaken it, and up to the last delivery that is
allowed; after that it is on its dead-letter topic. A message is *safe* when `log.sync` says so; with `always`, the
default, it is on the disk.

A message that is larger than a subscriber's protocol takes is accepted from its publisher all the same, and confirmed.
It is not offered to that subscriber, counted there (`too_large`), and goes to the dead letters if it was to be
acknowledged; see [Largest payloads](#largest-payloads).

A publisher that did not hear the acknowledgement, because its connection was lost, sends again; then the message may be
in the log twice, and both come. Relink's links know what they have, so there it is not.
"""

LARGEST: Final = """\
## Largest payloads

A protocol has one limit, which holds in both directions: it is what the gateway takes of a publisher and what it gives
a subscriber. What is left of it beside the rest of the message is the payload's. Between two protocols the smaller
payload counts; and the log takes half of `log.segment_bytes`, less 48 bytes and what it keeps beside the payload
(zeroctl's header, four bytes for each part of Relink and four more, Overhop's timing).

One byte more than a publisher's side allows is not published, and one byte more than a subscriber's side allows is not
offered there: nothing is delivered in part, and what follows arrives. How each protocol says so is in the tables of
publishing and delivering above. A link of Relink keeps the limit that it began with.
"""

LARGEST_BY_DEFAULT: Final = """\
MessagePack writes a text of 32 to 255 bytes with one byte more than counted here, and a longer one with two; a
`deadline_ms` above 65,535 takes two more. The largest payloads by the default limits, from publisher (left) to
subscriber (top), in bytes, without those of names; both in the way that the clients of this package use:
"""


def page() -> str:
    """The whole of it, as Markdown."""
    return "\n".join(
        [
            OPENING,
            "## The 25 pairs",
            "",
            "From publisher (left) to subscriber (top), each in its strongest way:",
            "",
            *_pairs(),
            PROMISES,
            "## Publishing",
            "",
            "What each way to publish promises, from the peer into the log.",
            "",
            *_table(
                ("protocol", "way", "promise", "acknowledgement"),
                ((NAMES[one.protocol], one.mode, one.promise, one.acknowledgement) for one in PUBLISHING),
            ),
            "An acknowledgement to a publisher says where its message is, never that a subscriber has it.",
            "",
            *_table(
                ("protocol", "order in the log", "too large"),
                ((NAMES[one], TAKES[one].order, TAKES[one].too_large) for one in PROTOCOLS),
            ),
            "## Delivering",
            "",
            "What each way to subscribe promises, from the log to the peer. *Of* says which messages it holds for: the",
            "others come at most once. *Survives* says that the subscription goes on after a lost connection, and",
            "after a restart or a kill of the gateway.",
            "",
            *_table(
                ("protocol", "way", "promise", "of", "survives", "acknowledgement"),
                (
                    (
                        NAMES[one.protocol],
                        one.mode,
                        one.promise,
                        "all" if one.of_all else "confirmed ones",
                        "yes" if one.survives else "no",
                        one.acknowledgement,
                    )
                    for one in DELIVERING
                ),
            ),
            *_table(
                ("protocol", "order", "too large for it"),
                ((NAMES[one], GIVES[one].order, GIVES[one].too_large) for one in PROTOCOLS),
            ),
            "## All ways",
            "",
            "The same for every way to publish (left) and to subscribe (top).",
            "",
            *_ways(),
            LARGEST,
            *_table(
                ("protocol", "limit", "default", "a publisher beyond it"),
                (
                    (
                        NAMES[one],
                        f"`{CEILINGS[one].setting}`",
                        f"{CEILINGS[one].default >> 20} MiB",
                        f"{'loses its connection' if CEILINGS[one].ends else 'is refused'}"
                        f" (`{CEILINGS[one].counted}`)",
                    )
                    for one in PROTOCOLS
                ),
            ),
            "What a message takes of the limit beside its payload:",
            "",
            *_table(
                ("", "said by", "bytes", "and those of", "the payload is"),
                [
                    *(("publishing", *_room(one)) for one in ROOM_TO_TAKE),
                    *(("delivering", *_room(one)) for one in ROOM_TO_GIVE),
                ],
            ),
            LARGEST_BY_DEFAULT,
            *_table(
                ("", *(NAMES[one] for one in PROTOCOLS)),
                (
                    (NAMES[publisher], *(f"{largest(publisher, one):,}" for one in PROTOCOLS))
                    for publisher in PROTOCOLS
                ),
            ),
            "## Beside the payload",
            "",
            *_table(
                ("", "is", "who cannot say it gets"),
                ((f"**{name}**", one.meaning, one.otherwise) for name, one in BESIDE.items()),
            ),
            "From publisher (left) to subscriber (top). What stands here is carried; what is ~~struck out~~ is not.",
            "",
            *_beside(),
            *_table(
                ("protocol", "when publishing also", "when delivering also"),
                ((NAMES[one], TAKES[one].also, GIVES[one].also) for one in PROTOCOLS),
            ),
            "No protocol is told another one's `correlation`, `source` and `kind`: the record and the drop have them.",
            "All five have one kind of message, which is 0.",
            "",
        ]
    )


def _room(one: Room) -> tuple[str, str, str, str]:
    left = "the rest, in Base64: three quarters of it" if one.base64 else "the rest"
    return f"{NAMES[one.protocol]} {one.mode}", str(one.beside), one.names, left


def _pairs() -> list[str]:
    return _table(
        ("", *(NAMES[one] for one in PROTOCOLS)),
        (
            (NAMES[publisher], *(pair(publisher, subscriber).best.whole for subscriber in PROTOCOLS))
            for publisher in PROTOCOLS
        ),
    )


def _ways() -> list[str]:
    return _table(
        ("", *(f"{NAMES[one.protocol]} {one.mode}" for one in DELIVERING)),
        (
            (f"{NAMES[out.protocol]} {out.mode}", *(way(out, into).whole for into in DELIVERING))
            for out in PUBLISHING
        ),
    )


def _beside() -> list[str]:
    def cell(publisher: str, subscriber: str) -> str:
        found = pair(publisher, subscriber)
        return ", ".join([*found.carried, *(f"~~{one}~~" for one in found.not_carried)])

    return _table(
        ("", *(NAMES[one] for one in PROTOCOLS)),
        (
            (NAMES[publisher], *(cell(publisher, subscriber) for subscriber in PROTOCOLS))
            for publisher in PROTOCOLS
            if TAKES[publisher].beside
        ),
    )


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [titles, ["---"] * len(titles), *rows]
    return [*(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines), ""]
