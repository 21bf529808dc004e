"""The types of headrace.trie: which filters match a topic, and which topics match a filter. Names are dotted
words; in a filter `*` is exactly one word and `#` any number of them. Knows nothing of subscriptions."""

from typing import final

def check_filter(filter: bytes | str) -> None:
    """Raises ValueError if a filter is empty, too long, has too many words or a NUL byte."""

def matches(filter: bytes | str, topic: bytes | str) -> bool:
    """Whether one filter matches one topic."""

@final
class Trie:
    """Filters, each with an id; finds those that match a topic.

    The same filter added twice has one id and two references. An id is at least 1 and belongs to its filter
    until the last reference is removed; later it may be given out again.
    """

    def __len__(self) -> int: ...
    def __sizeof__(self) -> int: ...
    @property
    def nodes(self) -> int:
        """How many words the tree holds; words that filters share from their start count once."""

    def add(self, filter: bytes) -> int:
        """Adds a filter, or a reference to it, and returns its id."""

    def remove(self, id: int) -> bool:
        """Drops one reference; True if it was the last and the filter is gone. KeyError for an unknown id."""

    def matches(self, topic: bytes | str) -> list[int]:
        """The ids of the filters that match a topic, in order."""

@final
class TopicTree:
    """Topics, each with an id that its owner chose; finds those that a filter matches."""

    def __len__(self) -> int: ...
    def __sizeof__(self) -> int: ...
    @property
    def nodes(self) -> int:
        """How many words the tree holds; words that topics share from their start count once."""

    def add(self, topic: bytes, id: int) -> None:
        """Adds a topic. ValueError if it is there already."""

    def remove(self, topic: bytes) -> None:
        """Takes a topic away. KeyError if it is not there."""

    def find(self, filter: bytes | str) -> list[int]:
        """The ids of the topics that a filter matches, in order."""
