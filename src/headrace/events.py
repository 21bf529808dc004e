"""Log lines: one line an event, with a name and fields, for people on a terminal and as JSON elsewhere. Built
on the standard library's logging, so libraries' lines look alike; knows nothing of what the gateway does."""

import json
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePath
from types import TracebackType
from typing import Any, Final, Literal, TextIO, TypeAlias

from headrace import limits

Format: TypeAlias = Literal["auto", "human", "json"]
Raised: TypeAlias = BaseException | bool | None  # True: the exception that is being handled
ExceptionInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None]

ROOT: Final = "headrace"
LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

# What every line has; a field that is called the same gets an underscore.
_OWN_FIELDS: Final = frozenset({"ts", "level", "event", "logger", "suppressed", "exception"})


class EventLog:
    """Where a part of the gateway says what happened: `log.info("listener.open", protocol="blipmq")`.

    An event's name is constant, words with dots; what varies goes into fields."""

    def __init__(self, logger: logging.Logger, limiter: "RateLimiter") -> None:
        self._logger = logger
        self._limiter = limiter

    def debug(self, event: str, /, *, exc_info: Raised = None, **fields: object) -> None:
        self._emit(logging.DEBUG, event, fields, exc_info)

    def info(self, event: str, /, *, exc_info: Raised = None, **fields: object) -> None:
        self._emit(logging.INFO, event, fields, exc_info)

    def warning(self, event: str, /, *, exc_info: Raised = None, **fields: object) -> None:
        self._emit(logging.WARNING, event, fields, exc_info)

    def error(self, event: str, /, *, exc_info: Raised = None, **fields: object) -> None:
        self._emit(logging.ERROR, event, fields, exc_info)

    def exception(self, event: str, /, *, exc_info: Raised = True, **fields: object) -> None:
        """An error with the exception that is being handled."""
        self._emit(logging.ERROR, event, fields, exc_info)

    def limited(
        self,
        event: str,
        /,
        *,
        key: Hashable = None,
        every: float = limits.EVENT_EVERY,
        level: int = logging.WARNING,
        exc_info: Raised = None,
        **fields: object,
    ) -> None:
        """Like the others, for what a peer can make happen as often as it likes: after a burst, one line in
        `every` seconds for the same event and key, which says how many were suppressed before it."""
        if self._logger.isEnabledFor(level):
            suppressed = self._limiter.admit(event, key, every)
            if suppressed is not None:
                self._emit(level, event, fields, exc_info, suppressed)

    def _emit(
        self,
        level: int,
        event: str,
        fields: Mapping[str, object],
        exc_info: Raised,
        suppressed: int = 0,
    ) -> None:
        logger = self._logger
        if not logger.isEnabledFor(level):
            return
        error = sys.exc_info()[1] if exc_info is True else exc_info
        raised = (type(error), error, error.__traceback__) if isinstance(error, BaseException) else None
        # A record made here, because Logger.log() would search the stack for a line that nobody is shown.
        record = logger.makeRecord(logger.name, level, "", 0, event, (), raised)
        record.event = event
        record.fields = fields
        record.suppressed = suppressed
        logger.handle(record)


def get(name: str) -> EventLog:
    """The event log of a part of the gateway: get("gateway.listeners")."""
    return EventLog(logging.getLogger(f"{ROOT}.{name}"), _limiter)


def setup(level: str, format: Format = "auto", stream: TextIO | None = None) -> None:
    """Sends all log lines of the process to a stream, by default standard error. May be called again."""
    stream = stream if stream is not None else sys.stderr
    human = format == "human" or (format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_HumanFormatter(colours=_wants_colours(stream)) if human else _JsonFormatter())
    handler.set_name(ROOT)
    root = logging.getLogger()
    for old in [known for known in root.handlers if known.get_name() == ROOT]:
        root.removeHandler(old)
    root.addHandler(handler)
    set_level(level)


def set_level(level: str) -> None:
    """The least that is worth a line; libraries need to have at least a warning to say."""
    logging.getLogger(ROOT).setLevel(LEVELS[level])
    logging.getLogger().setLevel(max(LEVELS[level], logging.WARNING))


def report_suppressed() -> None:
    """One line for each event of which lines were suppressed that no later line has told of yet. To be called
    now and then and at the end, so that a flood that just stops leaves its number."""
    log = get("events")
    for event, count in _limiter.take_suppressed().items():
        log.warning("events.suppressed", of=event, count=count)


# --- rate limits --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Bucket:
    """Fills with one token in `every` seconds up to `size`; a line takes one."""

    tokens: float
    filled: float  # when `tokens` was right
    suppressed: int = 0

    def fill(self, now: float, every: float, size: int) -> bool:
        """Whether there is a token now."""
        self.tokens = min(size, self.tokens + (now - self.filled) / every)
        self.filled = now
        return self.tokens >= 1


class RateLimiter:
    """Which lines of a flood get through; its memory is bounded whatever keys are made up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._names: dict[str, _Bucket] = {}  # event names are constants of the program, so these are few
        # Quiet longest first. By the hash of the key, for a peer may choose how long a key is.
        self._keys: OrderedDict[tuple[str, int], _Bucket] = OrderedDict()

    def admit(self, event: str, key: Hashable, every: float) -> int | None:
        """None if this line is suppressed, else how many of its event and key were since the last one."""
        now = self._clock()
        with self._lock:
            name_bucket = self._names.get(event)
            if name_bucket is None:
                name_bucket = self._names[event] = _Bucket(limits.EVENT_NAME_BURST, now)
            bucket = self._key_bucket(event, hash(key), now)
            name_has = name_bucket.fill(now, 1 / limits.EVENT_NAME_RATE, limits.EVENT_NAME_BURST)
            if bucket.fill(now, every, limits.EVENT_BURST) and name_has:
                bucket.tokens -= 1
                name_bucket.tokens -= 1
                suppressed, bucket.suppressed = bucket.suppressed, 0
                return suppressed
            bucket.suppressed += 1
            return None

    def take_suppressed(self) -> dict[str, int]:
        """How many lines of each event were suppressed that admit() has not told of, and forgets them."""
        counts: dict[str, int] = {}
        with self._lock:
            held = [*self._names.items(), *((event, bucket) for (event, _), bucket in self._keys.items())]
            for event, bucket in held:
                if bucket.suppressed:
                    counts[event] = counts.get(event, 0) + bucket.suppressed
                    bucket.suppressed = 0
        return counts

    def _key_bucket(self, event: str, key: int, now: float) -> _Bucket:
        bucket = self._keys.get((event, key))
        if bucket is not None:
            self._keys.move_to_end((event, key))
            return bucket
        if len(self._keys) >= limits.EVENT_BUCKETS:
            (forgotten, _), old = self._keys.popitem(last=False)
            self._names[forgotten].suppressed += old.suppressed
        bucket = self._keys[event, key] = _Bucket(limits.EVENT_BURST, now)
        return bucket


_limiter = RateLimiter()


# --- formats ------------------------------------------------------------------------------------------------


class _JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        event, fields = _event_of(record)
        line["event"] = event
        for name, value in fields.items():
            line[f"{name}_" if name in _OWN_FIELDS else name] = _plain(value)
        if suppressed := getattr(record, "suppressed", 0):
            line["suppressed"] = suppressed
        if error := _error_of(record):
            line["exception"] = _cut(
                "".join(traceback.format_exception(*error)), limits.EVENT_EXCEPTION_CHARS
            )
        return json.dumps(line)  # ASCII only, so no byte of a peer's reaches a collector as it was


class _HumanFormatter(logging.Formatter):
    """Time, level, event and fields, in the order in which one reads; no byte of a peer's reaches the
    terminal unless it is printable."""

    _COLOURS: Final = {logging.DEBUG: "2", logging.INFO: "32", logging.WARNING: "33", logging.ERROR: "31"}

    def __init__(self, *, colours: bool) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        event, fields = _event_of(record)
        level = self._paint(f"{record.levelname.lower():<7}", self._COLOURS.get(record.levelno, "31"))
        parts = [self._paint(moment, "2"), level, self._paint(_readable(event), "1")]
        shown = dict(fields) if hasattr(record, "event") else {"logger": record.name, **fields}
        if suppressed := getattr(record, "suppressed", 0):
            shown["suppressed"] = suppressed
        if error := _error_of(record):
            shown["exception"] = _summary(error)
        parts += [
            f"{self._paint(f'{name}=', '36')}{_readable(_plain(value))}" for name, value in shown.items()
        ]
        return " ".join(parts)

    def _paint(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colours else text


def _wants_colours(stream: TextIO) -> bool:
    # https://no-color.org
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _event_of(record: logging.LogRecord) -> tuple[str, Mapping[str, object]]:
    """A record's event and fields; a library's record is an event `log` with its message."""
    event = getattr(record, "event", None)
    if event is None:
        return "log", {"message": record.getMessage()}
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return event, fields


def _error_of(record: logging.LogRecord) -> ExceptionInfo | None:
    info = record.exc_info
    return (info[0], info[1], info[2]) if info and info[0] is not None else None


def _summary(error: ExceptionInfo) -> str:
    """An exception in one line: what, and the way it took from the outermost to the innermost call."""
    kind, value, trace = error
    way = " > ".join(
        f"{PurePath(frame.filename).name}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(trace)
    )
    return f"{kind.__name__}: {value}" + (f" [{way}]" if way else "")


def _plain(value: object, depth: int = limits.EVENT_VALUE_DEPTH) -> Any:
    """A value that JSON has a word for, bounded in size."""
    match value:
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case str():
            return _cut(value)
        case bytes() | bytearray() | memoryview():
            shown = bytes(value[: limits.EVENT_VALUE_CHARS + 1])
            return _cut(shown.decode("ascii", "backslashreplace"))
        case Mapping() if depth:
            items = list(value.items())[: limits.EVENT_VALUE_ITEMS]
            return {_cut(str(name)): _plain(item, depth - 1) for name, item in items}
        case list() | tuple() | set() | frozenset() if depth:
            return [_plain(item, depth - 1) for item in list(value)[: limits.EVENT_VALUE_ITEMS]]
        case _:
            return _cut(str(value))


def _cut(text: str, longest: int = limits.EVENT_VALUE_CHARS) -> str:
    return text if len(text) <= longest else f"{text[:longest]}...({len(text) - longest} more)"


def _readable(value: object) -> str:
    """A plain value for a terminal: bare if it is one printable word, else quoted and escaped."""
    if isinstance(value, str):
        if value and value.isprintable() and not any(character in ' "=' for character in value):
            return value
        return '"' + "".join(_visible(character) for character in value) + '"'
    return json.dumps(value)


def _visible(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else character.encode("unicode_escape").decode()
