"""Rules by which a protocol's addresses become topics and topics become addresses again, exactly.

A rule is a pair of patterns, like `sensors/{site}/{rest...}` and `plant.{site}.{rest...}`. `{name}` stands for one
word: one or more characters, none of them a dot or a slash. `{name...}`, at the end of both, stands for whatever comes.
Knows nothing of any one protocol.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

_TOKEN: Final = re.compile(r"\{([^{}]*)\}|([./])|([^{}./]+)|(.)", re.DOTALL)
_NAME: Final = re.compile(r"([a-z][a-z0-9_]*)(\.\.\.)?")
_WILDCARDS: Final = frozenset("*#")
CACHED: Final = 16_384  # addresses, and as many topics, whose counterpart a map remembers,
LONGEST_CACHED: Final = 256  # and how many bytes they have at most: peers may name what they like


@dataclass(frozen=True, slots=True)
class _Word:
    """What is between two separators: text, or a name with text around it."""

    before: str = ""
    name: str = ""
    after: str = ""
    rest: bool = False

    @property
    def expression(self) -> str:
        if not self.name:
            return re.escape(self.before)
        value = ".+" if self.rest else "[^./]+"
        return f"{re.escape(self.before)}(?P<{self.name}>{value}){re.escape(self.after)}"

    def meets(self, other: "_Word") -> bool:
        """Whether some word is both."""
        if not other.name:
            return re.fullmatch(self.expression, other.before) is not None
        if not self.name:
            return other.meets(self)
        shorter, longer = sorted((self.before, other.before), key=len)
        ends = sorted((self.after, other.after), key=len)
        return longer.startswith(shorter) and ends[1].endswith(ends[0])


class Pattern:
    """One side of a rule."""

    def __init__(self, text: str) -> None:
        """ValueError says what is wrong with it."""
        self.text = text
        self.words, self.separators = _split(text)
        self.names: dict[str, _Word] = {}
        for word in self.words:
            if not word.name:
                continue
            if word.name in self.names:
                raise ValueError(f'"{{{word.name}}}" is in it twice')
            self.names[word.name] = word
        for word in self.words[:-1]:
            if word.rest:
                raise ValueError(f'"{{{word.name}...}}" has to be its end')
        self._match = re.compile(
            "".join(word.expression + re.escape(sep) for word, sep in self._pairs()).encode(), re.DOTALL
        ).fullmatch
        # What is between two dots, as filters see it: there a slash is a character like any other.
        dotted = [""]
        for word, sep in self._pairs():
            dotted[-1] += ".*" if word.rest else word.expression
            if sep == ".":
                dotted.append("")
            else:
                dotted[-1] += sep
        self._dotted = [re.compile(expression.encode(), re.DOTALL).fullmatch for expression in dotted]
        self._open = self.words[-1].rest

    def _pairs(self) -> Iterator[tuple[_Word, str]]:
        return zip(self.words, [*self.separators, ""], strict=True)

    def read(self, text: bytes) -> dict[str, bytes] | None:
        """What each name stands for; None if the text is not like this."""
        found = self._match(text)
        return None if found is None else found.groupdict()

    def write(self, values: dict[str, bytes]) -> bytes:
        """The text in which the names stand for these."""
        parts = [
            word.before.encode()
            + (values[word.name] + word.after.encode() if word.name else b"")
            + sep.encode()
            for word, sep in self._pairs()
        ]
        return b"".join(parts)

    def alone(self, name: str) -> bool:
        """Whether a name is a whole word between dots."""
        at = next(index for index, word in enumerate(self.words) if word.name == name)
        around = self.separators[max(at - 1, 0) : at + 1]
        return self.words[at] == _Word(name=name, rest=self.words[at].rest) and set(around) <= {"."}

    def followed(self, filter: Sequence[bytes]) -> bool:
        """Whether a filter, given as its words, matches some text that is like this."""
        places = _beyond({0}, filter)  # in the filter, to which the words so far can have come
        for match in self._dotted:
            places = _beyond(
                {
                    at if filter[at] == b"#" else at + 1
                    for at in places
                    if at < len(filter) and (filter[at] in (b"*", b"#") or match(filter[at]))
                },
                filter,
            )
        return bool(places) if self._open else len(filter) in places

    def meets(self, other: "Pattern") -> bool:
        """Whether some text is like both."""
        for at, (mine, theirs) in enumerate(zip(self.words, other.words, strict=False)):
            if mine.rest or theirs.rest:
                # Whatever is left of the other one has at least a character.
                longer = other if mine.rest else self
                return bool(longer.words[at] != _Word() or len(longer.words) > at + 1)
            if not mine.meets(theirs) or self.separators[at : at + 1] != other.separators[at : at + 1]:
                return False
        return len(self.words) == len(other.words)


def _beyond(places: set[int], filter: Sequence[bytes]) -> set[int]:
    """These places, and those behind each "#" on which one is: it can be no word."""
    found = set(places)
    for at in range(min(found, default=len(filter)), len(filter)):
        if at in found and filter[at] == b"#":
            found.add(at + 1)
    return found


def _split(text: str) -> tuple[list[_Word], list[str]]:
    words, separators = [_Word()], []
    for token in _TOKEN.finditer(text):
        name, separator, plain, stray = token.groups()
        last = words[-1]
        if stray is not None:
            raise ValueError(f'there is a single "{stray}" in it; a name is written "{{name}}"')
        if separator:
            separators.append(separator)
            words.append(_Word())
        elif plain and last.name:
            if last.rest:
                raise ValueError(f'"{{{last.name}...}}" has to be its end')
            words[-1] = _Word(last.before, last.name, last.after + plain)
        elif plain:
            words[-1] = _Word(last.before + plain)
        else:
            words[-1] = _placed(name, last)
    if text == "":
        raise ValueError("it is empty")
    return words, separators


def _placed(name: str, last: _Word) -> _Word:
    parsed = _NAME.fullmatch(name)
    if not parsed:
        raise ValueError(
            f'"{{{name}}}" is not like "{{name}}" or "{{name...}}", with a name of a-z, 0-9 and _'
        )
    if last.name:
        raise ValueError(f'between "{{{last.name}}}" and "{{{parsed[1]}}}" there has to be a dot or a slash')
    if parsed[2] and last.before:
        raise ValueError(f'"{{{name}}}" has to begin a word')
    return _Word(last.before, parsed[1], "", bool(parsed[2]))


class TopicPattern(Pattern):
    """A pattern whose texts are topics."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        for word in "".join(("x" if word.name else word.before) + sep for word, sep in self._pairs()).split(
            "."
        ):
            if word in ("", "*", "#"):
                raise ValueError(f'"{word}" is no word of a topic')


class Rule:
    """A pair of patterns, and so of an address and a topic for all that the names may stand for."""

    def __init__(self, address: str, topic: str) -> None:
        """ValueError says what is wrong with them."""
        self.address, self.topic = Pattern(address), TopicPattern(topic)
        for name, here, there in (
            *((name, self.address, self.topic) for name in self.address.names),
            *((name, self.topic, self.address) for name in self.topic.names),
        ):
            if name not in there.names:
                side = "address" if there is self.address else "topic"
                raise ValueError(f'"{{{name}}}" is not in the {side}, so that there is no way back')
            if here.names[name].rest != there.names[name].rest:
                raise ValueError(f'"{name}" is one word here and whatever comes there')

    def carries_wildcards(self, values: dict[str, bytes]) -> bool:
        """Whether what are wildcards in an address's filter are the same wildcards in the topic's."""
        for name, value in values.items():
            words = value.decode("utf-8", "replace").split(".")
            if not _WILDCARDS & set("".join(words)):
                continue
            whole = self.address.alone(name) and self.topic.alone(name)
            if not whole or (not self.address.names[name].rest and words != ["*"]):
                return False
        return True


class Map:
    """All rules of a listener. Every address has at most one topic, and every topic at most one address."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules: Sequence[Rule] = tuple(rules)
        self._topics: dict[bytes, bytes | None] = {}
        self._addresses: dict[bytes, bytes | None] = {}

    def topic(self, address: bytes) -> bytes | None:
        """The topic of an address; None if there is none."""
        try:
            return self._topics[address]
        except KeyError:
            return self._remember(self._topics, address, ((rule.address, rule.topic) for rule in self.rules))

    def address(self, topic: bytes) -> bytes | None:
        """The address of a topic; None if there is none."""
        try:
            return self._addresses[topic]
        except KeyError:
            return self._remember(self._addresses, topic, ((rule.topic, rule.address) for rule in self.rules))

    def filter(self, filter: bytes) -> bytes | None:
        """The filter for the topics of all addresses that a filter matches; None if these are not all of one rule."""
        for rule in self.rules:
            values = rule.address.read(filter)
            if values is not None:
                mapped = rule.topic.write(values) if rule.carries_wildcards(values) else None
                return None if mapped is None or self._shared(rule, filter, mapped) else mapped
        return None

    def _shared(self, rule: Rule, filter: bytes, mapped: bytes) -> bool:
        """Whether the filter or what it is mapped to matches something of another rule, too: "a.*" matches "a.b" and
        "a.b/c", though no address is like both "a.{x}" and "a.{x}/{y}"."""
        words, topic_words = filter.split(b"."), mapped.split(b".")
        return any(
            other.address.followed(words) or other.topic.followed(topic_words)
            for other in self.rules
            if other is not rule
        )

    @staticmethod
    def refusal(address: bytes) -> str:
        """What to tell somebody whose address has no topic."""
        shown = address.decode("utf-8", "replace")
        return f"no rule of [[map]] has a topic for {shown[:100]!r}{'…' if len(shown) > 100 else ''}"

    @staticmethod
    def _remember(
        known: dict[bytes, bytes | None], text: bytes, ways: Iterable[tuple[Pattern, Pattern]]
    ) -> bytes | None:
        found = next(
            (there.write(values) for here, there in ways if (values := here.read(text)) is not None), None
        )
        if len(text) <= LONGEST_CACHED:
            if len(known) >= CACHED:
                known.clear()
            known[text] = found
        return found
