"""Filters against topics, one by one and through both trees, judged by the plain-Python twin."""

import random
import sys
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace import limits
from headrace.trie import TopicTree, Trie, check_filter, matches
from tests.oracle import filters as oracle

# A word of up to 16 bytes lies in a node, a longer one beside it; these two share their beginning.
AT_THE_BRIM = b"sixteen-bytes-ab"
OVER_THE_BRIM = b"sixteen-bytes-ab+"

ORDINARY = [b"a", b"b", b"", b"a*", b"#b", AT_THE_BRIM, OVER_THE_BRIM, b"\xff\xfe", b"\xc3\xa9"]
topic_words = st.one_of(st.sampled_from([b"a", b"b"]), st.sampled_from([*ORDINARY, b"*", b"#", b"\0"]))
filter_words = st.one_of(st.sampled_from([b"a", b"b", b"*", b"#"]), st.sampled_from(ORDINARY))
topics = st.lists(topic_words, min_size=1, max_size=6).map(b".".join).filter(bool)
filters = st.lists(filter_words, min_size=1, max_size=6).map(b".".join).filter(bool)

# Enough words for sets of positions that need more than one machine word.
long_topics = st.lists(st.sampled_from([b"a", b"b"]), min_size=50, max_size=150).map(b".".join)
long_filters = st.lists(
    st.sampled_from([b"a", b"a", b"a", b"*", b"*", b"#", b"b"]), min_size=50, max_size=128
).map(b".".join)


def found_by_trie(filter: bytes, topic: bytes) -> bool:
    trie = Trie()
    id = trie.add(filter)
    found = trie.matches(topic)
    assert found in ([], [id])
    return bool(found)


def found_by_topic_tree(filter: bytes, topic: bytes) -> bool:
    tree = TopicTree()
    tree.add(topic, 7)
    found = tree.find(filter)
    assert found in ([], [7])
    return bool(found)


WAYS = [matches, found_by_trie, found_by_topic_tree]
each_way = pytest.mark.parametrize("match", WAYS, ids=[way.__name__ for way in WAYS])

# ---- the rules ----


@each_way
@pytest.mark.parametrize(
    ("filter", "topic", "expected"),
    [
        # without wildcards a filter is the topic itself
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.b", "a", False),
        ("a", "a.b", False),
        ("a", "A", False),
        ("a", "ab", False),
        ("ab", "a", False),
        # `*` is exactly one word
        ("*", "a", True),
        ("*", "a.b", False),
        ("a.*", "a", False),
        ("a.*", "a.b", True),
        ("a.*", "a.", True),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.d", False),
        # `#` is any number of words, none included
        ("#", "a", True),
        ("#", "a.b.c", True),
        ("#", ".", True),
        ("a.#", "a", True),
        ("a.#", "a.b", True),
        ("a.#", "a.b.c", True),
        ("a.#", "b", False),
        ("a.#", "ab", False),
        ("#.b", "b", True),
        ("#.b", "a.b", True),
        ("#.b", "a.b.c", False),
        ("a.#.b", "a.b", True),
        ("a.#.b", "a.x.b", True),
        ("a.#.b", "a.b.b", True),
        ("a.#.b", "a.x.y.b", True),
        ("a.#.b", "a", False),
        ("a.#.b", "a.b.c", False),
        ("#.a.#", "a", True),
        ("#.a.#", "x.a.y", True),
        ("#.a.#", "x.y", False),
        ("#.#", "a", True),
        ("#.#.a", "a", True),
        ("#.#.a", "b", False),
        ("a.#.#.#.b", "a.b", True),
        ("#.*", "a", True),
        ("#.*.*", "a", False),
        ("*.#.*", "a.b", True),
        ("#.a.b", "a.a.b", True),
        ("#.a.#.b.#.c", "a.b.a.c.b.c", True),
        ("#.a.#.b.#.c", "b.a.c.c.b", False),
        # inside a longer word both are ordinary characters
        ("a*", "a*", True),
        ("a*", "ab", False),
        ("#a", "#a", True),
        ("#a", "a", False),
        ("**", "a", False),
        ("##", "a.b", False),
        # in a topic they are ordinary words
        ("a.b", "a.*", False),
        ("a.b", "a.#", False),
        ("a.*", "a.*", True),
        ("*", "#", True),
        # an empty word is a word
        ("a..b", "a..b", True),
        ("a..b", "a.b", False),
        ("a.b", "a..b", False),
        ("a.*.b", "a..b", True),
        ("a.", "a.", True),
        ("a.", "a", False),
        (".", ".", True),
        ("*.*", ".", True),
        ("*", ".", False),
        # a dot is the byte, whatever the language
        ("été.*", "été.température", True),
        ("été.*", "ete.température", False),
    ],
)
def test_filter_matches_as_the_rules_say(match, filter, topic, expected):
    assert oracle.matches(filter.encode(), topic.encode()) is expected
    assert match(filter.encode(), topic.encode()) is expected


def test_every_short_filter_against_every_short_topic():
    short_filters = [
        b".".join(words) for n in range(1, 5) for words in product([b"a", b"b", b"*", b"#"], repeat=n)
    ]
    short_topics = [b".".join(words) for n in range(1, 6) for words in product([b"a", b"b"], repeat=n)]
    trie, tree = Trie(), TopicTree()
    ids = {filter: trie.add(filter) for filter in short_filters}
    for i, topic in enumerate(short_topics):
        tree.add(topic, i)
    pairs = {(f, t) for f in short_filters for t in short_topics if oracle.matches(f, t)}
    assert {(f, t) for f in short_filters for t in short_topics if matches(f, t)} == pairs
    for topic in short_topics:
        assert trie.matches(topic) == sorted(ids[f] for f in short_filters if (f, topic) in pairs)
    for filter in short_filters:
        assert tree.find(filter) == [i for i, t in enumerate(short_topics) if (filter, t) in pairs]


@each_way
@given(filter=filters, topic=topics)
@settings(max_examples=500, deadline=None)
def test_filter_matches_as_the_twin_does(match, filter, topic):
    assert match(filter, topic) is oracle.matches(filter, topic)


@each_way
@given(filter=long_filters, topic=long_topics)
@settings(max_examples=100, deadline=None)
def test_long_filter_matches_as_the_twin_does(match, filter, topic):
    assert match(filter, topic) is oracle.matches(filter, topic)


@each_way
@pytest.mark.parametrize("length", [63, 64, 65, 127, 128])
def test_every_word_of_a_long_filter_counts(match, length):
    words = [b"#", *(b"%d" % i for i in range(length - 1))]
    topic = b".".join([b"x", *words[1:]])
    assert match(b".".join(words), topic)
    for i in {1, 62, 63, 64, 126, length - 1} & set(range(1, length)):
        assert not match(b".".join([*words[:i], b"other", *words[i + 1 :]]), topic)


@given(filters_held=st.lists(filters, max_size=12), topic=topics)
@settings(max_examples=300, deadline=None)
def test_trie_finds_each_matching_filter_once(filters_held, topic):
    trie = Trie()
    ids = {filter: trie.add(filter) for filter in filters_held}
    assert trie.matches(topic) == sorted(id for filter, id in ids.items() if oracle.matches(filter, topic))


@given(topics_held=st.lists(topics, max_size=12, unique=True), filter=filters)
@settings(max_examples=300, deadline=None)
def test_topic_tree_finds_each_matching_topic_once(topics_held, filter):
    tree = TopicTree()
    for id, topic in enumerate(topics_held):
        tree.add(topic, id)
    assert tree.find(filter) == [id for id, topic in enumerate(topics_held) if oracle.matches(filter, topic)]


def test_text_and_its_utf_8_bytes_are_the_same_name():
    trie = Trie()
    id = trie.add("été.*".encode())
    tree = TopicTree()
    tree.add("été.midi".encode(), 3)
    assert trie.matches("été.midi") == trie.matches("été.midi".encode()) == [id]
    assert tree.find("été.*") == tree.find("été.*".encode()) == [3]
    assert matches("été.*", "été.midi".encode())


# ---- names that are refused ----


@pytest.mark.parametrize(
    ("filter", "reason"),
    [
        (b"", "must not be empty"),
        (b"a" * 1025, "at most 1024 bytes, this one has 1025"),
        ("é" * 513, "at most 1024 bytes, this one has 1026"),
        (b"." * 128, "at most 128 words, this one has 129"),
        (b"a.\0.b", "NUL"),
    ],
)
def test_bad_filter_is_refused_with_the_reason_wherever_it_is_given(filter, reason):
    raw = filter.encode() if isinstance(filter, str) else filter
    trie = Trie()
    for refuse in (
        lambda: check_filter(filter),
        lambda: matches(filter, b"a"),
        lambda: trie.add(raw),
        lambda: TopicTree().find(filter),
    ):
        with pytest.raises(ValueError, match=reason):
            refuse()
    assert (len(trie), trie.nodes) == (0, 0)


@pytest.mark.parametrize(
    "filter", [b"a" * 1024, b"." * 127, "é" * 512, b"#", b"\xff", b".".join([b"#"] * 128)]
)
def test_filter_at_the_limits_is_accepted(filter):
    check_filter(filter)
    trie = Trie()
    trie.add(filter.encode() if isinstance(filter, str) else filter)
    assert len(trie) == 1


def test_empty_topic_is_refused():
    tree = TopicTree()
    for refuse in (lambda: Trie().matches(""), lambda: tree.add(b"", 1), lambda: matches("#", "")):
        with pytest.raises(ValueError, match="must not be empty"):
            refuse()
    assert (len(tree), tree.nodes) == (0, 0)


def test_topic_may_be_as_long_as_the_limit_and_no_longer():
    longest = b"x" * limits.TOPIC_BYTES
    trie = Trie()
    id = trie.add(b"*")
    tree = TopicTree()
    tree.add(longest, 1)
    assert trie.matches(longest) == [id]
    assert tree.find(b"*") == [1]
    tree.remove(longest)
    assert (len(tree), tree.nodes) == (0, 0)
    for refuse in (
        lambda: trie.matches(longest + b"x"),
        lambda: tree.add(longest + b"x", 2),
        lambda: matches("*", longest + b"x"),
    ):
        with pytest.raises(ValueError, match="at most 65535 bytes, this one has 65536"):
            refuse()


@pytest.mark.parametrize("name", [None, 5, bytearray(b"a"), ["a"]])
def test_what_is_no_name_is_refused(name):
    trie, tree = Trie(), TopicTree()
    for refuse in (
        lambda: check_filter(name),
        lambda: matches(name, "a"),
        lambda: matches("a", name),
        lambda: trie.add(name),
        lambda: trie.matches(name),
        lambda: tree.add(name, 1),
        lambda: tree.remove(name),
        lambda: tree.find(name),
    ):
        with pytest.raises(TypeError):
            refuse()


# ---- adding and removing ----


def test_filter_added_twice_has_one_id_and_stays_until_removed_twice():
    trie = Trie()
    id = trie.add(b"a.*")
    assert trie.add(b"a.*") == id
    assert len(trie) == 1
    assert trie.remove(id) is False
    assert trie.matches("a.b") == [id]
    assert trie.remove(id) is True
    assert trie.matches("a.b") == []
    assert (len(trie), trie.nodes) == (0, 0)


def test_unknown_filter_id_is_a_key_error():
    trie = Trie()
    way_station = trie.add(b"a")
    end = trie.add(b"a.b")
    trie.remove(way_station)
    for id in (0, way_station, end + 1, 2**32 - 1):
        with pytest.raises(KeyError):
            trie.remove(id)
    trie.remove(end)
    with pytest.raises(KeyError):
        trie.remove(end)


def test_removing_a_filter_keeps_those_that_begin_with_it_and_those_it_begins_with():
    trie = Trie()
    short, middle, long = trie.add(b"a"), trie.add(b"a.#"), trie.add(b"a.#.b")
    trie.remove(middle)
    assert trie.matches("a") == [short]
    assert trie.matches("a.b") == [long]
    trie.remove(long)
    assert trie.nodes == 1
    assert trie.matches("a") == [short]


def test_topic_is_there_once():
    tree = TopicTree()
    tree.add(b"a.b", 1)
    with pytest.raises(ValueError, match=r"b'a\.b' is there already"):
        tree.add(b"a.b", 2)
    assert tree.find("a.b") == [1]
    assert len(tree) == 1


def test_unknown_topic_is_a_key_error():
    tree = TopicTree()
    tree.add(b"a.b", 1)
    for topic in (b"a", b"b", b"a.b.c", b"", b"a.", b"x" * 70_000):
        with pytest.raises(KeyError):
            tree.remove(topic)
    assert tree.find("#") == [1]


@pytest.mark.parametrize("id", [0, 1, 2**32 - 1])
def test_topic_id_may_be_any_32_bit_number(id):
    tree = TopicTree()
    tree.add(b"a", id)
    assert tree.find("a") == tree.find("#") == tree.find("*") == [id]


@pytest.mark.parametrize("id", [-1, 2**32])
def test_topic_id_of_more_bits_is_refused(id):
    tree = TopicTree()
    with pytest.raises(OverflowError):
        tree.add(b"a", id)
    assert len(tree) == 0


class TrieLife(RuleBasedStateMachine):
    """A trie next to a dictionary of what it should hold."""

    @initialize(probes=st.lists(topics, min_size=1, max_size=8))
    def choose_probes(self, probes):
        self.trie = Trie()
        self.references: dict[bytes, int] = {}
        self.ids: dict[bytes, int] = {}
        self.probes = probes

    @rule(filter=filters)
    def add(self, filter):
        id = self.trie.add(filter)
        assert id >= 1
        assert self.ids.setdefault(filter, id) == id
        self.references[filter] = self.references.get(filter, 0) + 1

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def add_again(self, data):
        self.add(data.draw(st.sampled_from(sorted(self.references))))

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def remove(self, data):
        filter = data.draw(st.sampled_from(sorted(self.references)))
        self.references[filter] -= 1
        last = self.references[filter] == 0
        assert self.trie.remove(self.ids[filter]) is last
        if last:
            del self.references[filter], self.ids[filter]

    @invariant()
    def ids_are_different(self):
        assert len(set(self.ids.values())) == len(self.ids)

    @invariant()
    def matches_as_the_twin_does(self):
        for topic in self.probes:
            expected = sorted(id for filter, id in self.ids.items() if oracle.matches(filter, topic))
            assert self.trie.matches(topic) == expected

    @invariant()
    def holds_nothing_that_no_filter_needs(self):
        assert len(self.trie) == len(self.ids)
        assert self.trie.nodes == len(oracle.beginnings(set(self.ids)))


class TopicTreeLife(RuleBasedStateMachine):
    """A topic tree next to a dictionary of what it should hold."""

    @initialize(probes=st.lists(filters, min_size=1, max_size=8))
    def choose_probes(self, probes):
        self.tree = TopicTree()
        self.ids: dict[bytes, int] = {}
        self.probes = probes

    @rule(topic=topics, id=st.integers(0, 2**32 - 1))
    def add(self, topic, id):
        if topic in self.ids:
            with pytest.raises(ValueError, match="already"):
                self.tree.add(topic, id)
        else:
            self.tree.add(topic, id)
            self.ids[topic] = id

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def remove(self, data):
        topic = data.draw(st.sampled_from(sorted(self.ids)))
        self.tree.remove(topic)
        del self.ids[topic]

    @rule(topic=topics)
    def remove_what_is_not_there(self, topic):
        if topic not in self.ids:
            with pytest.raises(KeyError):
                self.tree.remove(topic)

    @invariant()
    def finds_as_the_twin_does(self):
        for filter in self.probes:
            expected = sorted(id for topic, id in self.ids.items() if oracle.matches(filter, topic))
            assert self.tree.find(filter) == expected

    @invariant()
    def holds_nothing_that_no_topic_needs(self):
        assert len(self.tree) == len(self.ids)
        assert self.tree.nodes == len(oracle.beginnings(set(self.ids)))


TrieLife.TestCase.settings = TopicTreeLife.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestTrieLife = TrieLife.TestCase
TestTopicTreeLife = TopicTreeLife.TestCase


def test_large_trees_forget_exactly_what_was_removed():
    chance = random.Random(20)
    names = [f"site.{i % 97}.device-with-a-long-name.{i}".encode() for i in range(20_000)]
    chance.shuffle(names)
    gone, kept = names[:12_000], names[12_000:]
    trie, tree = Trie(), TopicTree()
    ids = {name: trie.add(name) for name in names}
    for i, name in enumerate(names):
        tree.add(name, i)
    for name in gone:
        assert trie.remove(ids[name])
        tree.remove(name)
    assert len(trie) == len(tree) == len(kept)
    assert trie.nodes == tree.nodes == len(oracle.beginnings(set(kept)))
    for i, name in enumerate(names):
        assert trie.matches(name) == ([ids[name]] if i >= len(gone) else [])
        assert tree.find(name) == ([i] if i >= len(gone) else [])
    assert tree.find("site.#") == list(range(len(gone), len(names)))


def test_words_whose_hashes_collide_stay_apart():
    # Among 300,000 hashes of 32 bits ten pairs are equal on average, in the words and in the ways to them.
    tree = TopicTree()
    for i in range(300_000):
        tree.add(b"%06d.w" % i, i)
    assert tree.nodes == 600_000
    assert tree.find("#") == list(range(300_000))
    assert tree.find("123456.w") == [123_456]


def test_what_was_freed_is_used_again():
    trie, tree = Trie(), TopicTree()
    sizes = set()
    for turn in range(4):
        names = [f"{turn}.{'long-word-' * 3}{i}.{i}".encode() for i in range(1_000)]
        ids = [trie.add(name) for name in names]
        for i, name in enumerate(names):
            tree.add(name, i)
        trie.matches("x")
        sizes.add((sys.getsizeof(trie), sys.getsizeof(tree)))
        for id, name in zip(ids, names, strict=True):
            trie.remove(id)
            tree.remove(name)
    assert len(sizes) == 1


# ---- names made to be slow: trying the ways to read a filter one after the other would never end ----


@each_way
@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        (b"#." * 127 + b"a", True),
        (b"#." * 127 + b"b", False),
        (b"#.a." * 63 + b"#", True),
        (b"#.a." * 63 + b"b", False),
        (b"#.*." * 63 + b"b", False),
        (b"*.#." * 63 + b"*", True),
        (b"#." + b"a." * 126 + b"b", False),
    ],
)
def test_filter_with_many_wildcards_is_read_in_bounded_time(match, filter, expected):
    topic = b".".join([b"a"] * 2_000)
    assert match(filter, topic) is expected


def test_many_filters_with_many_wildcards_are_matched_in_bounded_time():
    trie = Trie()
    for length in range(1, 64):
        trie.add(b"#.a." * length + b"b")
        trie.add(b"#." * length + b"*.b")
        trie.add(b"*.#." * length + b"c")
    everything = trie.add(b"#.#.#")
    assert trie.matches(b".".join([b"a"] * 1_000)) == [everything]


def test_filter_with_many_wildcards_finds_among_many_topics_in_bounded_time():
    tree = TopicTree()
    for i in range(2**11):
        words = [b"a" if i >> bit & 1 else b"b" for bit in range(11)]
        tree.add(b".".join(words), i)
    assert tree.find(b"#.a." * 11 + b"#") == [2**11 - 1]
    assert tree.find(b"#.b." * 11 + b"#") == [0]
    assert tree.find(b"#.b." * 12 + b"#") == []


@each_way
def test_topic_of_nothing_but_dots_is_as_deep_as_its_limit_allows(match):
    topic = b"." * (limits.TOPIC_BYTES - 1) + b"x"
    assert match(b"#.x", topic)
    assert match(b"*.#.*.x", topic)
    assert match(b".#", topic)
    assert match(b"#", topic)
    assert not match(b"#.y", topic)
    assert not match(b"x.#", topic)


def test_deep_topic_leaves_nothing_behind():
    tree = TopicTree()
    topic = b"." * limits.TOPIC_BYTES
    tree.add(topic, 1)
    assert tree.nodes == limits.TOPIC_BYTES + 1
    tree.remove(topic)
    assert tree.nodes == 0
