"""What `headrace config map` tells of addresses is what the sessions do with them."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.bus import Bus
from headrace.config import Config, load
from headrace.config.maps import map_of
from headrace.gateway.addresses import addresses_of_topic, topic_of_address
from headrace.log import Log
from headrace.sessions.felix import Felix
from headrace.sessions.queues import QueueError, Queues
from headrace.wire.felix import split_address

RULES = """
[[map]]
listener = "felix"
address = "a/{x}/{rest...}"
topic = "fields.{x}.{rest...}"

[[map]]
listener = "overhop"
address = "jobs-{x}"
topic = "work.{x}"

[[queues]]
name = "jobs-all"
filter = "work.#"

[[endpoints]]
name = "demo"
connector_id_bytes = 1
listener_id_bytes = 2

[[endpoints]]
name = "one"
connector_id_bytes = 0
publish = "all.of.it"
deliver = "all.for.it"
"""


def configured(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "headrace.toml"
    file.write_text(text)
    return load(file, {}, ()).config


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    log = Log(tmp_path / "log", segment_bytes=256 * 1024, sync="none")
    made = Bus(log)
    yield made
    made.close()
    log.close()


def said(ask: Callable[..., str], *about: object) -> str:
    """A topic, or why there is none."""
    try:
        return ask(*about)
    except (ValueError, QueueError) as error:
        return f"refused: {error}"


@pytest.mark.parametrize("rules", ["", RULES])
@pytest.mark.parametrize(
    "address",
    [
        "a/b/c",
        "a/b.c/d",
        "a%2Fb/c/d",
        "a/b%2Fc/d",
        "a/b%25c/d",
        "a/b%25c/d/e.f",
        "x/b/c",
        "fields/b/c",
        "fields/b%25c/d/e",
        "fields/b.c/d",
    ],
)
def test_felix(tmp_path: Path, bus: Bus, rules: str, address: str) -> None:
    config = configured(tmp_path, rules)
    felix = Felix(bus)
    felix.map = map_of(config, "felix")
    topic = said(felix.topic_of, *split_address(address))
    assert said(topic_of_address, config, "felix", address) == topic
    assert addresses_of_topic(config, "felix", topic) == (
        [address] if not topic.startswith("refused") and felix.has_address(topic.encode()) else []
    )


def test_felix_with_a_registry(tmp_path: Path) -> None:
    config = configured(tmp_path, '[listen.felix]\nstrict = true\nstreams = ["a/b/c"]\n')
    assert topic_of_address(config, "felix", "a/b/c") == "a.b.c"
    assert addresses_of_topic(config, "felix", "a.b.c") == ["a/b/c"]
    with pytest.raises(ValueError, match=r"listen\.felix\.streams does not have 'a/b/d'"):
        topic_of_address(config, "felix", "a/b/d")
    assert addresses_of_topic(config, "felix", "a.b.d") == []


@pytest.mark.parametrize("rules", ["", RULES])
@pytest.mark.parametrize(
    "name", ["jobs-a", "mail", "", "-a", "jobs-ü", "a b", "jobs-a.b", "jobs-" + 251 * "a"]
)
def test_overhop(tmp_path: Path, bus: Bus, rules: str, name: str) -> None:
    config = configured(tmp_path, rules)
    queues = Queues(bus, map=map_of(config, "overhop"))
    topic = said(topic_of_address, config, "overhop", name)
    assert said(lambda: queues.add(name).filter) == (topic if rules else re.sub(r"\.jobs$", ".#", topic))


def test_overhops_queues_with_filters(tmp_path: Path) -> None:
    config = configured(tmp_path, RULES)
    assert addresses_of_topic(config, "overhop", "work.a.b") == ["jobs-all"]
    assert addresses_of_topic(config, "overhop", "other") == []


@pytest.mark.parametrize(
    ("address", "topic"),
    [
        ("demo/0", "demo.in.0"),
        ("demo/255", "demo.in.255"),
        ("demo/007", "demo.in.7"),  # as `headrace pub` takes it
        ("demo/256", None),
        ("demo/xyz", None),
        ("demo/-1", None),
        ("demo/", None),
        ("demo/٣", None),
        ("demo/" + 5000 * "1", None),
        ("one/0", "all.of.it"),
        ("one/1", None),
    ],
)
def test_relinks_channels_are_numbers_of_their_size(tmp_path: Path, address: str, topic: str | None) -> None:
    config = configured(tmp_path, RULES)
    if topic is not None:
        assert topic_of_address(config, "relink", address) == topic
        return
    with pytest.raises(ValueError, match=r"is a number of [01] bytes, not"):
        topic_of_address(config, "relink", address)


@pytest.mark.parametrize(
    ("topic", "addresses"),
    [
        ("demo.out.7", ["demo/7"]),
        ("demo.out.65535", ["demo/65535"]),
        ("demo.out.65536", []),
        ("demo.out.07", []),
        ("demo.out.٣", []),
        ("demo.out." + 5000 * "1", []),
        ("all.for.it", ["one/0"]),
    ],
)
def test_relinks_topics(tmp_path: Path, topic: str, addresses: list[str]) -> None:
    assert addresses_of_topic(configured(tmp_path, RULES), "relink", topic) == addresses


@pytest.mark.parametrize("address", ["", 65_536 * "x"])
def test_what_is_too_long_or_empty_is_no_topic(tmp_path: Path, address: str) -> None:
    with pytest.raises(ValueError, match=f"a topic has 1 to 65535 bytes, not {len(address)}"):
        topic_of_address(configured(tmp_path, ""), "blipmq", address)
