"""Which nodes count as there, and the signatures that are judged by their keys."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import limits
from headrace.bus import Bus
from headrace.log import Log
from headrace.nodes.headers import encode_header, required, unix_seconds, word
from headrace.nodes.registry import Registry, Verifier
from headrace.nodes.signatures import BadPacking, Signer, public_key

UUID = "fdcab500-b417-5e99-aa62-9d2db81df9e0"


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    log = Log(tmp_path / "log", segment_bytes=1 << 20, pool_segments=1)
    made = Bus(log)
    yield made
    made.close()
    log.close()


def beat(bus: Bus, signer: Signer | None = None, **changes: Any) -> None:
    fields: dict[str, Any] = {"node-name": "n", "node-uuid": UUID, "ts": 1, "hb-interval": 10, "ttl": 30}
    fields |= {name.replace("_", "-"): value for name, value in changes.items()}
    if signer is not None:
        fields["node-pubkey"] = signer.pubkey
    body = json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
    header = required("n", UUID, body)
    if signer is not None:
        header["_sec-sig"] = signer.sign(body)
    bus.publish("discovery.node.n", body, headers=encode_header(header), protocol=4)


def test_node_counts_until_its_time_to_live_has_passed(bus: Bus, clock: Clock) -> None:
    registry = Registry(bus, clock)
    assert not registry.knows(UUID)
    beat(bus)
    assert registry.knows(UUID)
    assert registry.knows(UUID.replace("-", "").upper())
    clock.now += 30
    assert registry.knows(UUID)
    clock.now += 1
    assert not registry.knows(UUID)
    assert [entry.name for entry in registry.expire()] == ["n"]
    assert registry.shown() == []


def test_time_to_live_is_three_intervals_where_none_is_said_and_bounded(bus: Bus, clock: Clock) -> None:
    registry = Registry(bus, clock)
    beat(bus, ttl=None)
    assert [one["ttl"] for one in registry.shown()] == [30]
    beat(bus, ttl=None, hb_interval=None)
    assert [one["ttl"] for one in registry.shown()] == [360]
    beat(bus, ttl=10**12)
    assert [one["ttl"] for one in registry.shown()] == [limits.ZEROCTL_MOST_TTL]


@pytest.mark.parametrize(
    "body", [b"no json", b"[]", b"{}", b'{"node-name":"n"}', b'{"node-name":1,"node-uuid":2}']
)
def test_heartbeat_that_says_nothing_is_ignored_and_counted(bus: Bus, clock: Clock, body: bytes) -> None:
    registry = Registry(bus, clock)
    bus.publish("discovery.node.n", body)
    assert registry.shown() == []
    assert registry.ignored == 1


def test_empty_heartbeat_says_that_a_node_is_gone(bus: Bus, clock: Clock) -> None:
    registry = Registry(bus, clock)
    beat(bus)
    assert registry.knows(UUID)
    bus.publish("discovery.node.n", b"")
    assert not registry.knows(UUID)


def test_number_of_nodes_is_bounded(bus: Bus, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ZEROCTL_NODES", 2)
    registry = Registry(bus, clock)
    for number in range(3):
        beat(bus, node_uuid=f"{number:032}")
    assert len(registry.shown()) == 2
    clock.now += 31
    beat(bus, node_uuid="9" * 32)
    assert [one["node-uuid"] for one in registry.shown()] == ["9" * 32]


def test_key_that_was_shown_with_a_signature_is_not_replaced(bus: Bus, clock: Clock) -> None:
    registry = Registry(bus, clock)
    mine, other = Signer.of_seed(bytes(32)), Signer.of_seed(bytes([1]) * 32)
    beat(bus, mine)
    beat(bus, other)
    assert registry.public_key(UUID) == mine.pubkey
    clock.now += 31
    registry.expire()
    beat(bus, other)
    assert registry.public_key(UUID) == other.pubkey


def test_signature_is_judged_by_the_node_or_by_those_who_are_trusted(bus: Bus, clock: Clock) -> None:
    registry = Registry(bus, clock)
    mine, other = Signer.of_seed(bytes(32)), Signer.of_seed(bytes([1]) * 32)

    def header(sig: str | None = None) -> bytes:
        return encode_header({**required("n", UUID, b"x"), **({"_sec-sig": sig} if sig else {})})

    verifier = Verifier(registry, [])
    assert verifier(header(), b"x") == "the message needs a signature (_sec-sig)"
    assert "has not shown the key" in verifier(header(sig=mine.sign(b"x")), b"x")
    beat(bus, mine)
    assert verifier(header(sig=mine.sign(b"x")), b"x") == ""
    assert verifier(header(sig=mine.sign(b"y")), b"x") == "the signature is not that of the node's key"
    trusting = Verifier(registry, [other.pubkey])
    assert trusting(header(sig=other.sign(b"x")), b"x") == ""
    assert (
        trusting(header(sig=mine.sign(b"x")), b"x") == "the signature is of none of the keys that are trusted"
    )


@pytest.mark.parametrize(
    "text", ["", "AAAA", "?", "ASADoQe", None, "AiADoQe/884Qvh1w3RjnS8CZZ+TWMJulDV8d3IZkElUxuA=="]
)
def test_what_is_no_key_is_refused(text: object) -> None:
    with pytest.raises(BadPacking):
        public_key(text)


@pytest.mark.parametrize(
    ("ts", "seconds"),
    [
        (1586721895, 1586721895.0),
        (1586721895123, 1586721895.123),
        (1586721895123456, 1586721895.123456),
        ("1586721895.5", 1586721895.5),
        ("2020-04-12T20:04:55Z", 1586721895.0),
        ("2020-04-12T22:04:55.500000+02:00", 1586721895.5),
        ("yesterday", None),
        (-1, None),
        (True, None),
        (None, None),
    ],
)
def test_times_of_all_forms_are_seconds(ts: object, seconds: float | None) -> None:
    assert unix_seconds(ts) == (pytest.approx(seconds) if seconds is not None else None)


def test_names_become_words_of_a_key() -> None:
    assert [word(name) for name in ("web1.example.com", "é x", "")] == ["web1_example_com", "_ x", "_"]


@pytest.mark.parametrize(
    "field",
    ['"ts":1%s', '"ttl":1%s', '"hb-interval":1%s', '"ttl":Infinity', '"hb-interval":1e999', '"ts":-1e999'],
)
def test_numbers_that_no_clock_has_are_not_believed(bus: Bus, clock: Clock, field: str) -> None:
    registry = Registry(bus, clock)
    numbers = field.replace("%s", "0" * 400)
    body = f'{{"node-name":"odd","node-uuid":"{UUID}",{numbers}}}'
    bus.publish("discovery.node.odd", body.encode())
    beat(bus, node_name="even", node_uuid=UUID[::-1])
    assert registry.knows(UUID[::-1])
    for node in registry.shown():
        json.dumps(node, allow_nan=False)


def test_heartbeats_beyond_their_size_are_not_kept(bus: Bus, clock: Clock) -> None:
    registry = Registry(bus, clock)
    beat(bus, services={"s": {"description": "x" * limits.ZEROCTL_HEARTBEAT_BYTES}})
    assert not registry.knows(UUID)
    assert registry.ignored == 1
    beat(bus, services={"s": {"description": "x" * 1000}})
    assert registry.knows(UUID)
