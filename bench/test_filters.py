"""How fast topics meet filters, with 10,000 filters and 100,000 topics. It judges nothing."""

import random
import sys

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from headrace.trie import TopicTree, Trie, matches

SITES, DEVICES, MEASURES = 100, 100, 10


def all_topics() -> list[bytes]:
    """100,000 topics of five words."""
    return [
        f"site.{site}.device.{device:04}.measure-{measure}".encode()
        for site in range(SITES)
        for device in range(DEVICES)
        for measure in range(MEASURES)
    ]


def all_filters() -> list[bytes]:
    """10,000 different filters, of which about three match any one of the topics."""
    chance = random.Random(7)
    found: set[bytes] = set()
    while len(found) < 10_000:
        site, device, measure = chance.randrange(SITES), chance.randrange(DEVICES), chance.randrange(MEASURES)
        shape = chance.choice(
            [
                "site.{site}.device.{device:04}.measure-{measure}",
                "site.{site}.device.{device:04}.*",
                "site.{site}.*.{device:04}.measure-{measure}",
                "site.*.device.{device:04}.measure-{measure}",
                "site.{site}.#.measure-{measure}",
                "site.{site}.device.{device:04}.#",
                "#.{device:04}.measure-{measure}",
            ]
        )
        found.add(shape.format(site=site, device=device, measure=measure).encode())
    return sorted(found)


@pytest.fixture(scope="module")
def topics() -> list[bytes]:
    return all_topics()


@pytest.fixture(scope="module")
def filters() -> list[bytes]:
    return all_filters()


@pytest.fixture(scope="module")
def trie(filters: list[bytes]) -> Trie:
    trie = Trie()
    for filter in filters:
        trie.add(filter)
    return trie


@pytest.fixture(scope="module")
def tree(topics: list[bytes]) -> TopicTree:
    tree = TopicTree()
    for id, topic in enumerate(topics):
        tree.add(topic, id)
    return tree


def test_match_1_000_topics_with_10_000_filters(
    benchmark: BenchmarkFixture, trie: Trie, topics: list[bytes]
) -> None:
    sample = random.Random(8).sample(topics, 1_000)

    def match_all() -> int:
        return sum(len(trie.matches(topic)) for topic in sample)

    found = benchmark(match_all)
    benchmark.extra_info["topics"] = len(sample)
    benchmark.extra_info["filters found per topic"] = found / len(sample)
    benchmark.extra_info["bytes per node"] = sys.getsizeof(trie) / trie.nodes


def test_add_100_000_topics_against_10_000_filters(
    benchmark: BenchmarkFixture, trie: Trie, topics: list[bytes]
) -> None:
    def add_all() -> TopicTree:
        tree = TopicTree()
        for id, topic in enumerate(topics):
            tree.add(topic, id)
            trie.matches(topic)
        return tree

    tree = benchmark.pedantic(add_all, rounds=3)
    benchmark.extra_info["topics"] = len(tree)
    benchmark.extra_info["bytes per node"] = sys.getsizeof(tree) / tree.nodes
    benchmark.extra_info["bytes per topic"] = sys.getsizeof(tree) / len(tree)


def test_add_100_000_topics(benchmark: BenchmarkFixture, topics: list[bytes]) -> None:
    def add_all() -> int:
        tree = TopicTree()
        for id, topic in enumerate(topics):
            tree.add(topic, id)
        return len(tree)

    benchmark.extra_info["topics"] = benchmark.pedantic(add_all, rounds=5)


def test_add_and_remove_10_000_filters(benchmark: BenchmarkFixture, filters: list[bytes]) -> None:
    def add_and_remove_all() -> int:
        trie = Trie()
        ids = [trie.add(filter) for filter in filters]
        for id in ids:
            trie.remove(id)
        return len(ids)

    benchmark.extra_info["filters"] = benchmark(add_and_remove_all)


@pytest.mark.parametrize(
    "filter",
    [
        "site.50.device.0050.measure-5",
        "site.50.device.0050.*",
        "site.50.#",
        "site.*.device.0050.measure-5",
        "#.measure-5",
        "#.*." * 63 + "b",
    ],
    ids=["exact", "one-parent", "one-branch", "across-branches", "everywhere", "made-to-be-slow"],
)
def test_find_among_100_000_topics(benchmark: BenchmarkFixture, tree: TopicTree, filter: str) -> None:
    benchmark.extra_info["topics found"] = len(benchmark(tree.find, filter))


def test_one_filter_against_one_topic(benchmark: BenchmarkFixture) -> None:
    assert benchmark(matches, b"site.*.device.#.measure-5", b"site.50.device.0050.measure-5")
