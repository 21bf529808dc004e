"""The kinds of values that a setting may have: how each is read from what TOML gives, written back, and
described to a person. Knows nothing of which settings there are."""

import ipaddress
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from headrace import limits
from headrace.config.addresses import FORMS, Form, form_of, parse_address
from headrace.limits import Limit
from headrace.mapping import Pattern, TopicPattern
from headrace.trie import check_filter
from headrace.wire.felix import split_address

# Both families, because both are in use; a bare "K" is refused, because it could be either.
_SIZE_UNITS: Final = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": limits.KiB,
    "mib": limits.MiB,
    "gib": limits.GiB,
    "tib": limits.TiB,
}
_TIME_UNITS: Final = {
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86_400),
}
_QUANTITY: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)")

# What pyarrow.fs.FileSystem.from_uri() knows.
_DROP_SCHEMES: Final = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")

_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def toml_string(text: str) -> str:
    """A TOML basic string."""
    return '"' + "".join(_toml_character(character) for character in text) + '"'


def _toml_character(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"


def parse_size(text: str) -> int:
    """Bytes of "64MiB", "10KB" or "512"; ValueError says what is wrong."""
    size = _quantity(text, _SIZE_UNITS, "b", "KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    if size.denominator != 1:
        raise ValueError("it is not a whole number of bytes")
    return int(size)


def format_size(size: int) -> str:
    """The shortest exact way to say so many bytes."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = _SIZE_UNITS[unit.lower()]
        if size and size % scale == 0:
            return f"{size // scale}{unit}"
    return str(size)


def parse_duration(text: str) -> float:
    """Seconds of "500ms", "5s", "1h" or "2.5"; ValueError says what is wrong."""
    return float(_quantity(text, _TIME_UNITS, "s", "us, ms, s, m, h or d"))


def format_duration(seconds: float) -> str:
    """A duration in the unit that a person would choose."""
    for unit in ("d", "h", "m"):
        scale = int(_TIME_UNITS[unit])
        if seconds and seconds % scale == 0:
            return f"{seconds / scale:g}{unit}"
    return f"{seconds * 1000:g}ms" if 0 < seconds < 1 else f"{seconds:g}s"


def _quantity(text: str, units: Mapping[str, int | Fraction], plain: str, known: str) -> Fraction:
    match = _QUANTITY.fullmatch(text)
    if not match:
        raise ValueError("it is not a number with a unit")
    number, unit = match.groups()
    scale = units.get(unit.lower() or plain)
    if scale is None:
        raise ValueError(f'"{unit}" is not one of the units {known}')
    return Fraction(number) * scale


@dataclass(frozen=True)
class Kind(ABC):
    """What may stand behind a setting's `=`."""

    @property
    @abstractmethod
    def expected(self) -> str:
        """What is accepted, as the end of a sentence that begins with "expected"."""

    @property
    def constraints(self) -> dict[str, Any]:
        """What msgspec checks, as arguments for msgspec.Meta."""
        return {}

    @property
    def reason(self) -> str:
        """Why the limit is what it is; empty where there is none."""
        return ""

    @property
    def secret(self) -> bool:
        """Whether the value must not appear in messages."""
        return False

    def read(self, raw: object, base: Path) -> object:
        """The value of what TOML gave; relative paths start from `base`. ValueError says what is wrong beyond
        what the constraints say."""
        return raw

    def write(self, value: Any) -> str:
        """The value as TOML."""
        return toml_string(value)


@dataclass(frozen=True)
class Size(Kind):
    limit: Limit[int]
    multiple: int = 1

    @property
    def expected(self) -> str:
        bounds = f"a size from {format_size(self.limit.minimum)} to {format_size(self.limit.maximum)}"
        if self.multiple > 1:
            bounds += f", a multiple of {self.multiple}"
        return f'{bounds}, in bytes or like "{format_size(self.limit.default)}"'

    @property
    def constraints(self) -> dict[str, Any]:
        bounds = {"ge": self.limit.minimum, "le": self.limit.maximum}
        return bounds | ({"multiple_of": self.multiple} if self.multiple > 1 else {})

    @property
    def reason(self) -> str:
        return self.limit.reason

    def read(self, raw: object, base: Path) -> object:
        return parse_size(raw) if isinstance(raw, str) else raw

    def write(self, value: int) -> str:
        text = format_size(value)
        return text if text.isdigit() else toml_string(text)


@dataclass(frozen=True)
class Duration(Kind):
    limit: Limit[float]
    zero: str = ""  # what 0 means, where it means something else than "at once"

    @property
    def expected(self) -> str:
        zero = f" (0: {self.zero})" if self.zero else ""
        low = "0" if self.limit.minimum == 0 else format_duration(self.limit.minimum)
        high = format_duration(self.limit.maximum)
        return f'a duration from {low}{zero} to {high}, in seconds or like "500ms"'

    @property
    def constraints(self) -> dict[str, Any]:
        return {"ge": self.limit.minimum, "le": self.limit.maximum}

    @property
    def reason(self) -> str:
        return self.limit.reason

    def read(self, raw: object, base: Path) -> object:
        seconds = parse_duration(raw) if isinstance(raw, str) else raw
        if isinstance(seconds, float) and not math.isfinite(seconds):
            raise ValueError("it must be finite")
        return seconds

    def write(self, value: float) -> str:
        return repr(float(value))


@dataclass(frozen=True)
class Count(Kind):
    limit: Limit[int]
    zero: str = ""

    @property
    def expected(self) -> str:
        zero = f" (0: {self.zero})" if self.zero else ""
        return f"a whole number from {self.limit.minimum}{zero} to {self.limit.maximum}"

    @property
    def constraints(self) -> dict[str, Any]:
        return {"ge": self.limit.minimum, "le": self.limit.maximum}

    @property
    def reason(self) -> str:
        return self.limit.reason

    def write(self, value: int) -> str:
        return str(value)


@dataclass(frozen=True)
class Flag(Kind):
    @property
    def expected(self) -> str:
        return "true or false"

    def write(self, value: bool) -> str:
        return "true" if value else "false"


@dataclass(frozen=True)
class Choice(Kind):
    options: tuple[str, ...]

    @property
    def expected(self) -> str:
        *first, last = (toml_string(option) for option in self.options)
        return f"{', '.join(first)} or {last}"


@dataclass(frozen=True)
class Name(Kind):
    """A name that ends up in file names, metrics or log lines."""

    longest: int

    @property
    def expected(self) -> str:
        return f'a name of 1 to {self.longest} letters, digits, ".", "_" and "-", first a letter or digit'

    @property
    def constraints(self) -> dict[str, Any]:
        # "\Z", because "$" would let a final newline through.
        return {"pattern": r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z", "max_length": self.longest}


@dataclass(frozen=True)
class QueueName(Kind):
    @property
    def expected(self) -> str:
        longest = limits.OVERHOP_QUEUE_NAME_BYTES
        return f'a name of 1 to {longest} letters, digits, "_" and "-", first a letter or digit'

    @property
    def constraints(self) -> dict[str, Any]:
        return {"pattern": r"^[A-Za-z0-9][A-Za-z0-9_-]*\Z", "max_length": limits.OVERHOP_QUEUE_NAME_BYTES}


@dataclass(frozen=True)
class KeyName(Kind):
    @property
    def expected(self) -> str:
        return 'the name of one of the keys, or "" for none'


@dataclass(frozen=True)
class SyncPolicy(Kind):
    @property
    def expected(self) -> str:
        return (
            '"always", "none", '
            f'"every:N" (N messages, {limits.LOG_SYNC_EVERY.minimum} to {limits.LOG_SYNC_EVERY.maximum}) or '
            '"interval:MS" (milliseconds, '
            f"{limits.LOG_SYNC_INTERVAL_MS.minimum} to {limits.LOG_SYNC_INTERVAL_MS.maximum})"
        )

    def read(self, raw: object, base: Path) -> object:
        if not isinstance(raw, str) or raw in ("always", "none"):
            return raw
        name, _, number = raw.partition(":")
        limit = {"every": limits.LOG_SYNC_EVERY, "interval": limits.LOG_SYNC_INTERVAL_MS}.get(name)
        if limit is None:
            raise ValueError("there is no such policy")
        if not re.fullmatch(r"[1-9][0-9]{0,8}", number):
            raise ValueError(f'"{name}:" is followed by a whole number, like "{name}:{limit.default}"')
        if not limit.minimum <= int(number) <= limit.maximum:
            raise ValueError(f"{number} is out of bounds")
        return raw


@dataclass(frozen=True)
class Bind(Kind):
    forms: tuple[Form, ...] = ("host", "unix", "fd")

    @property
    def expected(self) -> str:
        return ", ".join(FORMS[form] for form in self.forms) + ', a list of these, or "" for none'

    def read(self, raw: object, base: Path) -> object:
        if raw == "":
            return []
        found = [raw] if isinstance(raw, str) else raw
        if isinstance(found, list):
            for text in found:
                if isinstance(text, str):
                    self._check(text)
            if len(set(map(str, found))) != len(found):
                raise ValueError("an address is there twice")
        return found

    def _check(self, text: str) -> None:
        try:
            form = form_of(parse_address(text))
        except ValueError as error:
            raise ValueError(f"{toml_string(text)}: {error}") from None
        if form not in self.forms:
            raise ValueError(f"{toml_string(text)} has a form that this listener cannot use")

    def write(self, value: Sequence[str]) -> str:
        if not value:
            return '""'
        return toml_string(value[0]) if len(value) == 1 else _toml_list(value)


@dataclass(frozen=True)
class FilePath(Kind):
    @property
    def expected(self) -> str:
        return 'the path of a file, or "" for none'

    def read(self, raw: object, base: Path) -> object:
        return _absolute(raw, base) if isinstance(raw, str) and raw else raw


@dataclass(frozen=True)
class DropLocation(Kind):
    where: str = "drop"  # in the data directory, if nothing is given

    @property
    def expected(self) -> str:
        schemes = ", ".join(f"{scheme}://" for scheme in _DROP_SCHEMES)
        return f'the path of a directory, a URI ({schemes}), or "" for `{self.where}` in the data directory'

    def read(self, raw: object, base: Path) -> object:
        if not isinstance(raw, str) or not raw:
            return raw
        scheme, separator, rest = raw.partition("://")
        if not separator:
            return _absolute(raw, base)
        if scheme not in _DROP_SCHEMES:
            raise ValueError(f'"{scheme}" is no filesystem that can be written to')
        if not rest.strip("/"):
            raise ValueError("there is nothing behind the scheme")
        return raw


@dataclass(frozen=True)
class Columns(Kind):
    """Columns that a drop may do without."""

    @property
    def expected(self) -> str:
        return 'a list of columns of the drop, like ["source", "headers"]'

    def read(self, raw: object, base: Path) -> object:
        if isinstance(raw, list) and raw:
            from headrace.drop.schema import (
                COLUMNS,
                KEY_COLUMNS,
            )  # Arrow, which is large and seldom asked for

            known = [column.name for column in COLUMNS]
            for name in raw:
                if name in KEY_COLUMNS:
                    raise ValueError(f'"{name}" cannot be left out: {", ".join(KEY_COLUMNS)} name a row')
                if isinstance(name, str) and name not in known:
                    raise ValueError(f"{toml_string(name[:40])} is not one of the columns {', '.join(known)}")
        return raw

    def write(self, value: Sequence[str]) -> str:
        return _toml_list(value)


@dataclass(frozen=True)
class TopicPrefix(Kind):
    @property
    def expected(self) -> str:
        longest = limits.DEAD_LETTER_PREFIX_CHARS
        return f'words that each end in a dot, like "dead.", at most {longest} characters'

    @property
    def constraints(self) -> dict[str, Any]:
        return {"pattern": r"^([^.*#]+\.)+\Z", "max_length": limits.DEAD_LETTER_PREFIX_CHARS}


@dataclass(frozen=True)
class Filters(Kind):
    @property
    def expected(self) -> str:
        return (
            f'a list of at most {limits.KEY_FILTERS} topic filters, like ["sensors.#", "rooms.*.temperature"]'
        )

    @property
    def constraints(self) -> dict[str, Any]:
        return {"max_length": limits.KEY_FILTERS}

    def read(self, raw: object, base: Path) -> object:
        if isinstance(raw, list):
            for text in raw:
                if isinstance(text, str):
                    self._check(text)
        return raw

    def _check(self, text: str) -> None:
        try:
            check_filter(text)
        except ValueError as error:
            raise ValueError(f"{toml_string(text[:40])}: {error}") from None

    def write(self, value: Sequence[str]) -> str:
        return _toml_list(value)


@dataclass(frozen=True)
class Networks(Kind):
    """Address ranges of peers."""

    @property
    def expected(self) -> str:
        return 'a list of address ranges, like ["127.0.0.0/8", "::1", "10.1.0.0/16"]'

    def read(self, raw: object, base: Path) -> object:
        if isinstance(raw, list):
            for text in raw:
                if isinstance(text, str):
                    self._check(text)
        return raw

    def _check(self, text: str) -> None:
        try:
            ipaddress.ip_network(text)
        except ValueError as error:
            raise ValueError(f"{toml_string(text[:60])}: {error}") from None

    def write(self, value: Sequence[str]) -> str:
        return _toml_list(value)


@dataclass(frozen=True)
class Texts(Kind):
    """A list of texts of which only whoever uses them knows more."""

    what: str  # what each is, as the end of "a list of"

    @property
    def expected(self) -> str:
        return f"a list of {self.what}"

    def write(self, value: Sequence[str]) -> str:
        return _toml_list(value)


@dataclass(frozen=True)
class FelixNames(Kind):
    """Streams or caches of Felix."""

    last: str

    @property
    def expected(self) -> str:
        return (
            f'a list of at most {limits.FELIX_REGISTERED} names, like ["tenant/namespace/{self.last}"]; a slash in the'
            ' first two is written "%2F", "%" is "%25"'
        )

    @property
    def constraints(self) -> dict[str, Any]:
        return {"max_length": limits.FELIX_REGISTERED}

    def read(self, raw: object, base: Path) -> object:
        if isinstance(raw, list):
            for text in raw:
                if isinstance(text, str):
                    self._check(text)
        return raw

    def _check(self, text: str) -> None:
        try:
            split_address(text)
        except ValueError:
            raise ValueError(f'{toml_string(text[:60])} is not "tenant/namespace/{self.last}"') from None

    def write(self, value: Sequence[str]) -> str:
        return _toml_list(value)


@dataclass(frozen=True)
class QueueFilter(Kind):
    @property
    def expected(self) -> str:
        return 'a topic filter, like "sensors.#", or "" for `queue.NAME.#`'

    def read(self, raw: object, base: Path) -> object:
        if isinstance(raw, str) and raw:
            check_filter(raw)
        return raw


@dataclass(frozen=True)
class EndpointName(Kind):
    """What a Relink connector asks for: any text, also none."""

    @property
    def expected(self) -> str:
        return f"a text of at most {limits.RELINK_ENDPOINT_BYTES} bytes"

    def read(self, raw: object, base: Path) -> object:
        if isinstance(raw, str) and len(raw.encode()) > limits.RELINK_ENDPOINT_BYTES:
            raise ValueError("it is too long")
        return raw


@dataclass(frozen=True)
class TopicRule(Kind):
    """A topic in which "{channel}" may be a word."""

    filter: bool = False  # "*" and "#" may be words, too

    @property
    def expected(self) -> str:
        what = "a topic filter" if self.filter else "a topic"
        return f'{what} in which "{{channel}}" may stand as a word, like "orders.{{channel}}"'

    def read(self, raw: object, base: Path) -> object:
        if isinstance(raw, str) and raw:
            words = raw.split(".")
            if words.count("{channel}") > 1 or any(
                "{channel}" in word and word != "{channel}" for word in words
            ):
                raise ValueError('"{channel}" stands alone between dots, and once')
            if "{channel}" in words and any(word in ("*", "#") for word in words):
                raise ValueError('with "{channel}" in it there is no "*" and no "#"')
            if not self.filter and any(word in ("*", "#") for word in words):
                raise ValueError('"*" and "#" are no words of a topic')
            check_filter(raw.replace("{channel}", "0"))
        return raw


@dataclass(frozen=True)
class MapPattern(Kind):
    """One side of a rule that maps addresses to topics."""

    topic: bool = False

    @property
    def expected(self) -> str:
        example = "plant.{site}.{rest...}" if self.topic else "sensors/{site}/{rest...}"
        return (
            f'a text in which "{{name}}" stands for a word and "{{name...}}" for the rest, like "{example}"'
        )

    @property
    def constraints(self) -> dict[str, Any]:
        return {"max_length": limits.MAP_PATTERN_CHARS}

    def read(self, raw: object, base: Path) -> object:
        if isinstance(raw, str):
            (TopicPattern if self.topic else Pattern)(raw)
        return raw


@dataclass(frozen=True)
class Secret(Kind):
    @property
    def expected(self) -> str:
        return f"a text of 1 to {limits.KEY_BYTES} bytes"

    @property
    def constraints(self) -> dict[str, Any]:
        return {"min_length": 1}

    @property
    def secret(self) -> bool:
        return True

    def read(self, raw: object, base: Path) -> object:
        if raw == "":
            raise ValueError("an empty key would let everybody in")
        if isinstance(raw, str) and len(raw.encode()) > limits.KEY_BYTES:
            raise ValueError("it is too long")
        return raw


@dataclass(frozen=True)
class NameOrNone(Name):
    """A name, or an empty text for none."""

    @property
    def expected(self) -> str:
        return f'{super().expected}; "" for none'

    @property
    def constraints(self) -> dict[str, Any]:
        return {"pattern": r"^([A-Za-z0-9][A-Za-z0-9._-]*)?\Z", "max_length": self.longest}


@dataclass(frozen=True)
class Text(Kind):
    """Any text for people."""

    longest: int

    @property
    def expected(self) -> str:
        return f"a text of at most {self.longest} characters"

    @property
    def constraints(self) -> dict[str, Any]:
        return {"max_length": self.longest}


@dataclass(frozen=True)
class RoutingKey(Kind):
    """A zeroctl routing key, or with `wildcards` a filter of such."""

    wildcards: bool = False
    empty: bool = False  # "" stands for none

    @property
    def expected(self) -> str:
        what = 'a filter, like "service.jobs.#"' if self.wildcards else 'a topic, like "queue.jobs.jobs"'
        none = '; "" for none' if self.empty else ""
        return f"{what}, of 1 to 255 printable ASCII characters{none}"

    @property
    def constraints(self) -> dict[str, Any]:
        return {"pattern": r"^[ -~]*\Z", "min_length": 0 if self.empty else 1, "max_length": 255}

    def read(self, raw: object, base: Path) -> object:
        if isinstance(raw, str) and not self.wildcards and {"*", "#"} & set(raw.split(".")):
            raise ValueError("it has wildcards, which only a filter has")
        return raw


@dataclass(frozen=True)
class PublicKeys(Kind):
    """Ed25519 keys as zeroctl's heartbeats say them."""

    @property
    def expected(self) -> str:
        return (
            f"a list of at most {limits.ZEROCTL_SIGNERS} public keys as node-pubkey has them: base64 of type 1,"
            " length 32 and the key"
        )

    @property
    def constraints(self) -> dict[str, Any]:
        return {"max_length": limits.ZEROCTL_SIGNERS}

    def read(self, raw: object, base: Path) -> object:
        if isinstance(raw, list) and raw:
            from headrace.nodes.signatures import (
                BadPacking,
                public_key,
            )  # cryptography, which is seldom asked for

            for text in raw:
                try:
                    public_key(text)
                except BadPacking as error:
                    raise ValueError(f"{toml_string(str(text)[:40])}: {error}") from None
        return raw

    def write(self, value: Sequence[str]) -> str:
        return _toml_list(value)


@dataclass(frozen=True)
class Url(Kind):
    """Where a broker is, with what it takes to log in."""

    schemes: tuple[str, ...]

    @property
    def expected(self) -> str:
        known = " or ".join(f"{scheme}://" for scheme in self.schemes)
        return f"a URL that begins with {known}"

    @property
    def constraints(self) -> dict[str, Any]:
        return {"min_length": 1, "max_length": limits.URL_CHARS}

    @property
    def secret(self) -> bool:
        return True

    def read(self, raw: object, base: Path) -> object:
        if isinstance(raw, str):
            scheme, separator, rest = raw.partition("://")
            if not separator or scheme not in self.schemes:
                raise ValueError("it has another scheme")
            if not rest.strip("/"):
                raise ValueError("there is nothing behind the scheme")
        return raw


def _absolute(path: str, base: Path) -> str:
    if "\0" in path:
        raise ValueError("a path has no NUL in it")
    return str(base / path)


def _toml_list(values: Sequence[str]) -> str:
    return "[" + ", ".join(toml_string(value) for value in values) + "]"
