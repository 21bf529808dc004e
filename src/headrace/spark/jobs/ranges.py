"""Which offsets of which logs are in a table already, as merged intervals. Its size follows the holes between the
intervals, not the files or messages that they were made of. Knows nothing of Spark or filesystems."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, Self, TypeAlias

from headrace.drop import FileName

Stream: TypeAlias = tuple[str, str]  # node and log
Interval: TypeAlias = tuple[int, int]  # first and last offset, both included


class Ranges:
    """Offsets by stream. Intervals that touch become one."""

    def __init__(self, names: Iterable[FileName] = ()) -> None:
        self._streams: dict[Stream, list[Interval]] = {}
        for name in names:
            self.add(name.stream, name.first, name.last)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self._streams == other._streams

    def __iter__(self) -> Iterator[tuple[Stream, Interval]]:
        for stream in sorted(self._streams):
            for interval in self._streams[stream]:
                yield stream, interval

    def __len__(self) -> int:
        """How many intervals there are."""
        return sum(len(intervals) for intervals in self._streams.values())

    def add(self, stream: Stream, first: int, last: int) -> None:
        intervals = self._streams.setdefault(stream, [])
        start = bisect_left(intervals, first, key=lambda one: one[1] + 1)
        end = bisect_right(intervals, last, key=lambda one: one[0] - 1)
        if start < end:
            first = min(first, intervals[start][0])
            last = max(last, intervals[end - 1][1])
        intervals[start:end] = [(first, last)]

    def update(self, other: "Ranges") -> None:
        for stream, (first, last) in other:
            self.add(stream, first, last)

    def covers(self, name: FileName) -> bool:
        """Whether every offset of a file is in."""
        intervals = self._streams.get(name.stream, [])
        place = bisect_right(intervals, name.first, key=lambda one: one[0]) - 1
        return place >= 0 and name.last <= intervals[place][1]

    def follows(self, name: FileName) -> bool:
        """Whether a file begins where an interval ends, or where a log begins, so that it leaves no hole."""
        intervals = self._streams.get(name.stream, [])
        place = bisect_right(intervals, name.first, key=lambda one: one[0]) - 1
        return name.first == 0 or (place >= 0 and name.first <= intervals[place][1] + 1)

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"node": node, "log": log, "intervals": [list(one) for one in intervals]}
            for (node, log), intervals in sorted(self._streams.items())
        ]

    @classmethod
    def from_json(cls, value: list[dict[str, Any]]) -> Self:
        made = cls()
        for one in value:
            for first, last in one["intervals"]:
                made.add((one["node"], one["log"]), first, last)
        return made


def overlap(names: Iterable[FileName]) -> bool:
    """Whether two of these files cover the same offset."""
    last: FileName | None = None
    for name in sorted(names):
        if last is not None and last.stream == name.stream and name.first <= last.last:
            return True
        last = name
    return False
