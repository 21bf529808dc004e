"""Finds the line on which each key of a TOML text stands, which tomllib does not tell. Reads only texts that
tomllib has accepted, and knows nothing of what the keys mean."""

import re
import tomllib
from bisect import bisect_right
from typing import Final, TypeAlias

# ("keys", 0, "name"): numbers are places in an array.
Path: TypeAlias = tuple[str | int, ...]

_BLANK: Final = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE: Final = re.compile(r"[ \t]*")
# The three-quote forms come first; up to two more quotes may stand before the closing three.
_STRING: Final = re.compile(
    r'"""(?:\\.|[^\\])*?"""(?:"{0,2})'
    r"|'''.*?'''(?:'{0,2})"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_BARE_KEY: Final = re.compile(r"[^ \t\r\n.=\[\]{},#\"']+")
_BARE_VALUE: Final = re.compile(r"[^,\]}#\r\n]+")


def key_lines(text: str) -> dict[Path, int]:
    """The line, counted from 1, on which each key, table and array element first appears."""
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.line_ends = [match.start() for match in re.finditer("\n", text)]
        self.lines: dict[Path, int] = {}
        self.lengths: dict[Path, int] = {}  # how many tables each [[array]] has so far

    def scan(self) -> dict[Path, int]:
        table: Path = ()
        self._skip(_BLANK)
        while self.position < len(self.text):
            if self.text.startswith("[", self.position):
                table = self._header()
            else:
                self._assignment(table)
            self._skip(_BLANK)
        return self.lines

    def _header(self) -> Path:
        start = self.position
        is_array = self.text.startswith("[[", start)
        self.position += 2 if is_array else 1
        words = self._key()
        self.position += 2 if is_array else 1
        path: Path = ()
        for index, word in enumerate(words):
            path = (*path, word)
            self._note(path, start)
            last = index == len(words) - 1
            if is_array and last:
                self.lengths[path] = self.lengths.get(path, 0) + 1
            if path in self.lengths:  # a header that goes through an array means its latest table
                path = (*path, self.lengths[path] - 1)
                self._note(path, start)
        return path

    def _assignment(self, table: Path) -> None:
        start = self.position
        path = table
        for word in self._key():
            path = (*path, word)
            self._note(path, start)
        self.position += 1  # the equals sign
        self._skip(_SPACE)
        self._value(path)

    def _key(self) -> list[str]:
        words = []
        while True:
            self._skip(_SPACE)
            if self.text[self.position] in "\"'":
                quoted = self._take(_STRING)
                words.append(tomllib.loads(f"key = {quoted}")["key"])
            else:
                words.append(self._take(_BARE_KEY))
            self._skip(_SPACE)
            if not self.text.startswith(".", self.position):
                return words
            self.position += 1

    def _value(self, path: Path) -> None:
        match self.text[self.position]:
            case "[":
                self._array(path)
            case "{":
                self._inline_table(path)
            case '"' | "'":
                self._take(_STRING)
            case _:
                self._take(_BARE_VALUE)

    def _array(self, path: Path) -> None:
        self.position += 1
        index = 0
        while self._next_item("]"):
            self._note((*path, index), self.position)
            self._value((*path, index))
            index += 1

    def _inline_table(self, path: Path) -> None:
        self.position += 1
        while self._next_item("}"):
            self._assignment(path)

    def _next_item(self, end: str) -> bool:
        """Goes to the next item of an array or inline table, or behind its end."""
        self._skip(_BLANK)
        if self.text.startswith(",", self.position):
            self.position += 1
            self._skip(_BLANK)
        if self.text.startswith(end, self.position):
            self.position += 1
            return False
        return True

    def _note(self, path: Path, position: int) -> None:
        self.lines.setdefault(path, bisect_right(self.line_ends, position - 1) + 1)

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.position)
        assert match is not None, f"not TOML at {self.position}"
        self.position = match.end()
        return match.group()

    def _skip(self, pattern: re.Pattern[str]) -> None:
        self._take(pattern)
