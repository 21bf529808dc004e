"""The twin of headrace.trie: whether a filter matches a topic, word by word. Knows nothing of trees."""

from functools import cache


def matches(filter: bytes, topic: bytes) -> bool:
    pattern = filter.split(b".")
    words = topic.split(b".")

    @cache
    def rest_matches(p: int, w: int) -> bool:
        """Whether the pattern from its word p on matches the topic from its word w on."""
        if p == len(pattern):
            return w == len(words)
        if pattern[p] == b"#":
            return rest_matches(p + 1, w) or (w < len(words) and rest_matches(p, w + 1))
        if w == len(words):
            return False
        return pattern[p] in (b"*", words[w]) and rest_matches(p + 1, w + 1)

    return rest_matches(0, 0)


def beginnings(names: set[bytes]) -> set[tuple[bytes, ...]]:
    """Every different beginning of these names, in whole words: what a tree of them holds, and no more."""
    found: set[tuple[bytes, ...]] = set()
    for name in names:
        words = name.split(b".")
        found.update(tuple(words[:length]) for length in range(1, len(words) + 1))
    return found
