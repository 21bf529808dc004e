"""Rules between addresses and topics: every way has its way back, and no two rules share one."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.mapping import CACHED, LONGEST_CACHED, Map, Pattern, Rule, TopicPattern
from headrace.trie import matches

NAMES = ("a", "b", "c")
words = st.text("xyZ-é$", min_size=1, max_size=4)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """A rule with up to three names in any order on both sides, and perhaps a rest."""
    names = [f"{{{name}}}" for name in NAMES[: draw(st.integers(0, 3))]]
    rest = ["{rest...}"] * draw(st.booleans())
    sides = []
    for topic in (False, True):
        parts = list(draw(st.permutations(names)))
        for at in range(len(parts)):
            if draw(st.booleans()):
                parts[at] = draw(words) + parts[at]
            if draw(st.booleans()):
                parts[at] += draw(words)
        literals = draw(st.lists(words, min_size=0 if parts or rest else 1, max_size=2))
        whole = [*literals, *parts, *rest]
        text = whole[0]
        for part in whole[1:]:
            text += draw(st.sampled_from("." if topic else "./")) + part
        sides.append(text)
    return Rule(*sides)


def some_text(draw: st.DrawFn, pattern: Pattern) -> bytes:
    values = {name: draw(words).encode() for name in pattern.names}
    if "rest" in values:
        values["rest"] = draw(st.text("xy./*#é", min_size=1, max_size=6)).encode()
    return pattern.write(values)


@given(rules(), st.data())
def test_way_there_is_the_way_back(rule: Rule, data: st.DataObject) -> None:
    own = Map([rule])
    address = some_text(data.draw, rule.address)
    topic = own.topic(address)
    assert topic is not None
    assert own.address(topic) == address
    topic = some_text(data.draw, rule.topic)
    back = own.address(topic)
    assert back is not None
    assert own.topic(back) == topic


@given(rules(), rules(), st.data())
def test_patterns_that_do_not_meet_have_no_text_in_common(
    one: Rule, other: Rule, data: st.DataObject
) -> None:
    for mine, theirs in ((one.address, other.address), (one.topic, other.topic)):
        assert mine.meets(theirs) == theirs.meets(mine)
        text = some_text(data.draw, mine)
        if theirs.read(text) is not None:
            assert mine.meets(theirs)


@given(rules(), st.data())
def test_every_pattern_meets_itself_and_its_texts(rule: Rule, data: st.DataObject) -> None:
    assert rule.address.meets(rule.address)
    assert rule.topic.meets(rule.topic)
    text = some_text(data.draw, rule.address).decode()
    if not set("{}") & set(text):
        assert rule.address.meets(Pattern(text))


@pytest.mark.parametrize(
    ("one", "other", "met"),
    [
        ("a.{x}", "a.b", True),
        ("a.{x}", "{y}.b", True),
        ("a.{x}", "b.{x}", False),
        ("a.{x}", "a.{x}.c", False),
        ("a/{x}", "a.{x}", False),
        ("dev-{x}", "{y}-a", True),
        ("dev-{x}", "sen-{y}", False),
        ("{x}-a", "{y}-b", False),
        ("{rest...}", "a", True),
        ("a.{rest...}", "a", False),
        ("a.{rest...}", "a.b.c", True),
        ("a.{rest...}", "a.{other...}", True),
        ("a.{rest...}", "b.{other...}", False),
        ("a.{rest...}", "a/{x}", False),
    ],
)
def test_patterns_meet(one: str, other: str, met: bool) -> None:
    assert Pattern(one).meets(Pattern(other)) is met
    assert Pattern(other).meets(Pattern(one)) is met


FILTERED = [
    ("{a}.{rest...}", "in.{a}.{rest...}"),
    ("x.{rest...}", "{rest...}"),
    ("x.{a}.{b}", "{b}.in.{a}"),
    ("x-{a}.y", "in.{a}"),
    ("x.{a}", "in-{a}.y"),
    ("x/{rest...}", "x.{rest...}"),
]


@given(st.sampled_from(FILTERED), st.data())
def test_mapped_filter_matches_the_topics_whose_addresses_the_filter_matches(
    pair: tuple[str, str], data: st.DataObject
) -> None:
    rule = Rule(*pair)
    own = Map([rule])

    def written(pattern: Pattern, some: list[str]) -> str:
        word = st.sampled_from(some)
        values = {name: data.draw(word) for name in pattern.names}
        if "rest" in values:
            values["rest"] = ".".join(data.draw(st.lists(word, min_size=1, max_size=3)))
        return pattern.write({name: value.encode() for name, value in values.items()}).decode()

    filter = written(rule.address, ["*", "#", "x", "y"])
    mapped = own.filter(filter.encode())
    if mapped is None:
        assert "*" in filter or "#" in filter
        return
    for _ in range(5):
        topic = written(rule.topic, ["x", "y", "zz"])
        address = own.address(topic.encode())
        assert address is not None
        assert matches(mapped, topic) == matches(filter, address.decode())


@given(st.lists(rules(), min_size=1, max_size=4), st.data())
def test_mapped_filter_follows_exactly_the_addresses_of_all_rules(
    some: list[Rule], data: st.DataObject
) -> None:
    apart: list[Rule] = []
    for rule in some:
        if not any(rule.address.meets(one.address) or rule.topic.meets(one.topic) for one in apart):
            apart.append(rule)
    own = Map(apart)
    words = some_text(data.draw, data.draw(st.sampled_from(apart)).address).decode().split(".")
    for at in range(len(words)):
        words[at] = data.draw(st.sampled_from([words[at], words[at], "*", "#"]))
    filter = ".".join(words)
    mapped = own.filter(filter.encode())
    if mapped is None:
        return
    for rule in apart:
        address = some_text(data.draw, rule.address)
        topic = own.topic(address)
        assert topic is not None
        assert matches(filter, address) == matches(mapped, topic)


@pytest.mark.parametrize(
    ("texts", "filter", "mapped"),
    [
        ([("a.{x}", "t.{x}"), ("a.{x}/{y}", "u.{x}.{y}")], "a.*", None),
        ([("a.{x}", "t.{x}"), ("a.{x}/{y}", "u.{x}.{y}")], "a.b", "t.b"),
        ([("a.{x}", "t.{x}"), ("a.{x}/{rest...}", "u.{x}.{rest...}")], "a.*", None),
        ([("a.{x}", "t.{x}"), ("a.{x}/{y}.c", "u.{x}.{y}")], "a.*", "t.*"),
        ([("{y}.{x}", "t.{x}.{y}"), ("a/b.{x}", "u.{x}")], "*.z", None),
        ([("a.{x}", "t.{x}"), ("b.{x}/{y}", "u.{x}.{y}")], "a.*", "t.*"),
        ([("x.{rest...}", "t.{rest...}"), ("x", "u")], "x.#", None),  # the filter matches "x", too
        ([("x.{rest...}", "t.{rest...}"), ("y", "u")], "x.#", "t.#"),
        ([("x.{rest...}", "t.{rest...}"), ("y", "t")], "x.#", None),  # and this one the topic of "y"
        ([("a.{x}", "t.{x}"), ("b.{x}", "t.{x}/y")], "a.*", None),
    ],
)
def test_filter_is_about_one_rule_or_refused(
    texts: list[tuple[str, str]], filter: str, mapped: str | None
) -> None:
    for some in (texts, texts[::-1]):
        found = Map(Rule(*pair) for pair in some).filter(filter.encode())
        assert found == (None if mapped is None else mapped.encode())


@pytest.mark.parametrize(
    ("address", "topic", "reason"),
    [
        ("", "x", "it is empty"),
        ("{", "x", "single"),
        ("a}", "x", "single"),
        ("{A}", "{A}", "is not like"),
        ("{a}{b}", "{a}.{b}", "a dot or a slash"),
        ("{a}-{b}", "{a}.{b}", "a dot or a slash"),
        ("{a}.{a}", "{a}", "twice"),
        ("{a}", "x", "not in the topic"),
        ("x", "{a}", "not in the address"),
        ("{a...}", "{a}", "whatever comes"),
        ("{a...}.b", "b.{a...}", "its end"),
        ("x{a...}", "{a...}", "begin a word"),
        ("{a...}x", "{a...}", "its end"),
        ("a", "b..c", "no word"),
        ("a", ".b", "no word"),
        ("a", "b.*", "no word"),
        ("a", "b.#.c", "no word"),
    ],
)
def test_rule_without_a_way_back_is_refused(address: str, topic: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        Rule(address, topic)


def test_names_stand_for_words_and_the_rest_for_anything() -> None:
    own = Map([Rule("sensors/{site}/{rest...}", "plant.{site}.{rest...}")])
    assert own.topic(b"sensors/n1/a/b.c") == b"plant.n1.a/b.c"
    assert own.topic(b"sensors/n1.2/a") is None
    assert own.topic(b"sensors//a") is None
    assert own.topic(b"sensors/n1/") is None
    assert own.topic(b"xsensors/n1/a") is None
    assert own.address("plant.é.\n".encode()) == "sensors/é/\n".encode()
    assert own.address(b"plant.n/1.a") is None


def test_wildcards_stay_wildcards_or_the_filter_has_no_counterpart() -> None:
    own = Map([Rule("cmd.{rest...}", "commands.{rest...}"), Rule("dev-{a}.{b}", "device.{a}.{b}")])
    assert own.filter(b"cmd.#") == b"commands.#"
    assert own.filter(b"cmd.*.x") == b"commands.*.x"
    assert own.filter(b"dev-1.*") == b"device.1.*"
    assert own.filter(b"dev-*.x") is None  # there a star is a star
    assert own.filter(b"dev-1.#") is None
    assert own.filter(b"#") is None
    assert own.filter(b"other.x") is None


def test_what_is_remembered_is_bounded() -> None:
    own = Map([Rule("a.{x}", "b.{x}")])
    for number in range(CACHED + 10):
        assert own.topic(b"a.%d" % number) == b"b.%d" % number
    assert len(own._topics) <= CACHED
    long = b"a." + b"x" * LONGEST_CACHED
    assert own.topic(long) == b"b" + long[1:]
    assert long not in own._topics


def test_topic_pattern_is_one_of_words() -> None:
    assert TopicPattern("a.{x}-b.c").names.keys() == {"x"}
