"""The guarantees as data: their rules, and that the page is what they say."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.bridges_page import page
from headrace.cli import main
from headrace.clients.protocols import CLIENTS
from headrace.guarantees import (
    DELIVERING,
    GIVES,
    PROTOCOLS,
    PUBLISHING,
    ROOM_TO_GIVE,
    ROOM_TO_TAKE,
    TAKES,
    Beside,
    Promise,
    Room,
    as_data,
    largest,
    pair,
    pairs,
    way,
)
from headrace.wire import blipmq, felix, overhop
from headrace.wire import felix_json as messages
from headrace.wire.overhop import MessageType


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ("exactly once", "exactly once", "exactly once"),
        ("exactly once", "at least once", "at least once"),
        ("at least once", "exactly once", "at least once"),
        ("at most once", "exactly once", "at most once"),
        ("at most once", "at least once", "best effort"),
        ("at least once", "at most once", "best effort"),
        ("best effort", "exactly once", "best effort"),
    ],
)
def test_of_two_promises_the_weaker_halves_are_left(first: str, second: str, both: str) -> None:
    assert Promise(first).then(Promise(second)) == both


def test_every_protocol_has_both_sides() -> None:
    assert set(PROTOCOLS) == set(CLIENTS) == set(TAKES) == set(GIVES)
    assert {one.protocol for one in PUBLISHING} == {one.protocol for one in DELIVERING} == set(PROTOCOLS)


def test_strongest_way_of_each_pair_comes_last() -> None:
    found = list(pairs())
    assert len(found) == 25
    for one in found:
        strength = [(way.survives, way.whole.keeps, not way.whole.repeats) for way in one.ways]
        assert strength[-1][:2] == max(strength)[:2], one


def test_subscription_of_confirmed_messages_gives_others_at_most_once() -> None:
    modes = {(one.protocol, one.mode): one for one in PUBLISHING}
    (qos_1,) = [one for one in DELIVERING if not one.of_all]
    assert way(modes["blipmq", "QoS 0"], qos_1).whole == Promise.AT_MOST_ONCE
    assert way(modes["blipmq", "QoS 1"], qos_1).whole == Promise.AT_LEAST_ONCE


def test_what_is_said_is_carried_or_not() -> None:
    for one in pairs():
        assert {*one.carried, *one.not_carried} == TAKES[one.publisher].beside
        assert not {*one.carried} & {*one.not_carried}
    assert pair("zeroctl", "zeroctl").carried == (Beside.HEADER,)
    assert pair("zeroctl", "overhop").not_carried == (Beside.HEADER,)


LIMIT = 100_000
NAMES = ("tenant", "name", "stream")
SID, UUID = "s" * 36, "u" * 36

# A message with this payload, by who says it; what the limit counts of it.
SAID: dict[tuple[str, str], Callable[[bytes], bytes]] = {
    ("blipmq", "PUBLISH"): lambda payload: blipmq.encode_publish("topic", payload, 1, 1)[4:],
    ("felix", "binary batch of one"): lambda payload: felix.encode_publish_batch(*NAMES, [payload])[
        felix.HEADER_BYTES :
    ],
    ("felix", "`publish`"): lambda payload: messages.encode(
        messages.Publish(*NAMES, felix.raw_payload(payload), 77, "per_message")
    ),
    ("felix", "`publish_batch` of one"): lambda payload: messages.encode(
        messages.PublishBatch(*NAMES, felix.raw_payloads([payload]), 77, "per_batch")
    ),
    ("overhop", "ENQUEUE"): lambda payload: overhop.encode(
        MessageType.ENQUEUE, "1f", {"q": "mail", "job_payload": payload}
    )[4:],
    ("overhop", "DELIVER"): lambda payload: overhop.encode(
        MessageType.DELIVER,
        "0",
        {
            "attempt": 1,
            "deadline_ms": 60_000,
            "jid": f"mail:{UUID}",
            "job_payload": payload,
            "sid": SID,
            "topic": "topic",
        },
    )[4:],
}
NAMED = {
    "topic": len("topic"),
    "tenant, namespace, stream": len("".join(NAMES)),
    "tenant, namespace, stream, `request_id`": len("".join(NAMES)) + len("77"),
    "queue, `rid`": len("mail") + len("1f"),
    "queue, topic": len("mail") + len("topic"),
    "": 0,
}


@pytest.mark.parametrize(
    "room",
    [one for one in (*ROOM_TO_TAKE, *ROOM_TO_GIVE) if (one.protocol, one.mode) in SAID],
    ids=lambda one: f"{one.protocol} {one.mode}",
)
def test_largest_payload_is_what_the_codec_has_room_for(room: Room) -> None:
    said = SAID[room.protocol, room.mode]
    most = room.largest(LIMIT, NAMED[room.names])
    assert len(said(bytes(most))) <= LIMIT < len(said(bytes(most + 1)))


def test_between_two_protocols_the_smaller_payload_counts() -> None:
    assert largest("blipmq", "zeroctl") == largest("zeroctl", "blipmq") == 4 << 20
    assert largest("relink", "blipmq") == (16 << 20) - 12


def test_page_is_what_the_data_says() -> None:
    written = Path(__file__).parents[1] / "docs" / "bridges.md"
    assert written.read_text() == page(), "run: headrace guarantees > docs/bridges.md"


def test_command_prints_the_page_or_the_data() -> None:
    assert CliRunner().invoke(main, ["guarantees"]).output == page()
    told = json.loads(CliRunner().invoke(main, ["guarantees", "--json"]).output)
    assert told == json.loads(json.dumps(as_data()))
