"""Makes a configuration from a TOML file, HEADRACE_ environment variables and --set texts, each over the one
before, and reports everything that is wrong with them at once. Knows nothing of single settings."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace import limits
from headrace.config import places
from headrace.config.checks import cautions, conflicts
from headrace.config.kinds import toml_string
from headrace.config.schema import SETTINGS, Config
from headrace.config.settings import Entry, Section, Setting, Table, TableArray, describe
from headrace.errors import ConfigError, Problem

PREFIX: Final = "HEADRACE_"
# Other parts of Headrace read these: the command line's options, the build, the tests.
RESERVED: Final = frozenset(
    PREFIX + name for name in ("CLIENT_KEY", "CONFIG", "DATA", "DEBUG", "ONLY", "SOAK")
)

_SYNTAX_PLACE: Final = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_SHOWN_CHARS: Final = 80  # of a refused value


@dataclass(frozen=True)
class Loaded:
    """A configuration and where it came from."""

    config: Config
    origins: Mapping[str, str]  # dotted key -> "headrace.toml:12", "HEADRACE_LOG__SYNC" or "--set log.sync"
    source: Path | None  # the file, if there was one
    warnings: Sequence[str] = ()  # what is allowed and yet probably not meant


def load(config_file: Path | None, environ: Mapping[str, str], sets: Sequence[str]) -> Loaded:
    """The effective configuration; ConfigError has everything that is wrong."""
    reading = _Reading()
    if config_file is not None:
        _read_file(reading, config_file)
    _read_environment(reading, environ)
    _read_sets(reading, sets)
    config: Config = _build(describe(Config), reading.values)
    for conflict in conflicts(config):
        # A refused value is not in the configuration, so what seems to conflict with it means nothing.
        if not any(reading.is_refused(key) for key in conflict.keys):
            place = next((reading.origins[key] for key in conflict.keys if key in reading.origins), "")
            reading.problems.append(Problem(place, conflict.keys[0], conflict.message))
    if reading.problems:
        raise ConfigError(reading.problems)
    return Loaded(config, reading.origins, config_file, tuple(cautions(config)))


# --- the three sources --------------------------------------------------------------------------------------


def _read_file(reading: "_Reading", path: Path) -> None:
    source = _File(str(path), Path.cwd() / path.parent)
    try:
        with path.open("rb") as file:
            data = file.read(limits.CONFIG_FILE_BYTES + 1)
    except OSError as error:
        reading.problems.append(Problem(source.name, "", f"cannot be read: {error.strerror or error}"))
        return
    if len(data) > limits.CONFIG_FILE_BYTES:
        reading.problems.append(Problem(source.name, "", f"is larger than {limits.CONFIG_FILE_BYTES} bytes"))
        return
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        reading.problems.append(Problem(f"{source.name}:{line}", "", "is not UTF-8 here, as TOML must be"))
        return
    text = text.replace("\r\n", "\n")
    try:
        raw = tomllib.loads(text)
        source.lines = places.key_lines(text)
    except tomllib.TOMLDecodeError as error:
        reading.problems.append(_syntax_problem(source.name, text, error))
    except ValueError as error:  # a number with more digits than Python converts
        reading.problems.append(Problem(source.name, "", f"is not TOML: {error}"))
    except RecursionError:
        reading.problems.append(Problem(source.name, "", "is nested too deeply"))
    else:
        reading.read_table(raw, describe(Config), (), source)


def _syntax_problem(name: str, text: str, error: tomllib.TOMLDecodeError) -> Problem:
    message = str(error)
    match = _SYNTAX_PLACE.search(message)
    line, column = (
        (match[1], match[2]) if match and match[1] else (str(text.rstrip("\n").count("\n") + 1), "")
    )
    message = _SYNTAX_PLACE.sub("", message)
    return Problem(f"{name}:{line}", "", f"is not TOML{f' at column {column}' if column else ''}: {message}")


def _read_environment(reading: "_Reading", environ: Mapping[str, str]) -> None:
    names = {_variable(key): tuple(key.split(".")) for key in SETTINGS}
    names |= {_variable(table.key): tuple(table.key.split(".")) for table in _sections(describe(Config))}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in RESERVED:
            continue
        if name in names:
            reading.read_text(environ[name], names[name], _Variable(name))
        else:
            # Compared without the prefix, which would make any two names look alike.
            known = [variable.removeprefix(PREFIX) for variable in (*names, *sorted(RESERVED))]
            nearest = _nearest(name.removeprefix(PREFIX).upper(), known)
            hint = f", did you mean {PREFIX}{nearest}?" if nearest else ""
            reading.problems.append(Problem(_shown(name), "", f"there is no such variable{hint}"))


def _variable(key: str) -> str:
    return PREFIX + key.upper().replace(".", "__")


def _read_sets(reading: "_Reading", sets: Sequence[str]) -> None:
    for text in sets:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals:
            reading.problems.append(
                Problem(f"--set {_shown(text)}", "", "expected KEY=VALUE, like log.sync=always")
            )
            continue
        path = tuple(word.strip() for word in key.split("."))
        reading.read_text(value.strip(), path, _Set(key, value.strip()))


class _Source:
    """Where values are being read from."""

    base: Path  # where relative paths start

    def place(self, path: places.Path) -> str:
        """Where the value stands, for a message about it."""
        raise NotImplementedError

    def origin(self, path: places.Path) -> str:
        """The same, for a listing, which has the value next to it."""
        return self.place(path)


@dataclass
class _File(_Source):
    name: str
    base: Path
    lines: dict[places.Path, int] = field(default_factory=dict)

    def place(self, path: places.Path) -> str:
        while path and path not in self.lines:  # a key that is not there is missing from what is around it
            path = path[:-1]
        return f"{self.name}:{self.lines[path]}" if path else self.name


@dataclass
class _Variable(_Source):
    name: str
    base: Path = field(default_factory=Path.cwd)

    def place(self, path: places.Path) -> str:
        return self.name


@dataclass
class _Set(_Source):
    key: str
    value: str
    base: Path = field(default_factory=Path.cwd)

    def place(self, path: places.Path) -> str:
        # The value is shown only where it is known to be no secret, which a misspelt key does not tell.
        leaf = SETTINGS.get(self.key)
        value = "..." if leaf is None or leaf.secret else _shown(self.value)
        return f"--set {_shown(self.key)}={value}"

    def origin(self, path: places.Path) -> str:
        return f"--set {_shown(self.key)}"


# --- reading values by what the schema says -----------------------------------------------------------------


class _Refused(Exception):
    """A value does not fit; the text says what was expected."""


@dataclass
class _Reading:
    """What was read so far, from all sources."""

    values: dict[str, Any] = field(default_factory=dict)  # nested like the configuration
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)  # keys whose latest value is not in `values`

    def is_refused(self, key: str) -> bool:
        """Whether the value of this key, or of one that it is in or holds, was refused."""
        return any(_within(key, refused) or _within(refused, key) for refused in self.refused)

    def read_table(self, raw: dict[str, Any], table: Table, path: places.Path, source: _Source) -> None:
        for name, value in raw.items():
            below = (*path, name)
            entry = table.entries.get(name)
            if entry is None:
                self._unknown(name, table, below, source)
            else:
                self._read_entry(value, entry, below, source)

    def read_text(self, text: str, path: tuple[str, ...], source: _Source) -> None:
        """Reads what was given for one key outside of a file: as TOML where that fits, else as a string."""
        table = describe(Config)
        entry: Entry = table
        for depth, name in enumerate(path):
            if not isinstance(entry, Table):
                # Where the schema has no table, the text goes too deep: "log.sync.now", "keys.0.name".
                what = "is set as a whole" if isinstance(entry, TableArray) else "has no keys below it"
                self._problem(source, path[: depth + 1], f'there is no such key: "{entry.key}" {what}')
                return
            if name not in entry.entries:
                self._unknown(name, entry, path[: depth + 1], source)
                return
            entry = entry.entries[name]
        self._read_entry(_fitting(text, entry, source), entry, path, source)

    def _read_entry(self, raw: object, entry: Entry, path: places.Path, source: _Source) -> None:
        if isinstance(entry, Table):
            if isinstance(raw, dict):
                self.read_table(raw, entry, path, source)
            else:
                names = ", ".join(entry.entries)
                self._problem(
                    source, path, f"expected a table with the keys {names}; got {_shown_value(raw)}"
                )
            return
        before = len(self.problems)
        if isinstance(entry, TableArray):
            value: object = self._read_tables(raw, entry, path, source)
        else:
            value = self._read_value(raw, entry, path, source)
        if len(self.problems) > before:
            self.refused.add(entry.key)
        else:
            self._keep(entry.key, value, source, path)

    def _keep(self, key: str, value: object, source: _Source, path: places.Path) -> None:
        *sections, name = key.split(".")
        table = self.values
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
        self.refused.discard(key)
        for old in [known for known in self.origins if _within(known, key)]:
            del self.origins[old]
        self.origins[key] = source.origin(path)
        if isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, Section):
                    self._keep_item_origins(f"{key}[{index}]", item, source, (*path, index))

    def _keep_item_origins(self, key: str, item: Section, source: _Source, path: places.Path) -> None:
        self.origins[key] = source.origin(path)
        for name in item.__struct_fields__:
            self.origins[f"{key}.{name}"] = source.origin((*path, name))

    def _read_value(self, raw: object, setting: Setting, path: places.Path, source: _Source) -> object:
        try:
            return _value(raw, setting, source.base)
        except _Refused as refused:
            self._problem(source, path, str(refused))
            return None

    def _read_tables(
        self, raw: object, array: TableArray, path: places.Path, source: _Source
    ) -> list[Section]:
        if not isinstance(raw, list) or not all(isinstance(item, dict) for item in raw):
            hint = f"write [[{array.key}]]" if isinstance(source, _File) else "write [{name = ...}, ...]"
            self._problem(source, path, f"expected an array of tables: {hint}")
            return []
        items = []
        for index, table in enumerate(raw):
            below = (*path, index)
            before = len(self.problems)
            values = {}
            for name, value in table.items():
                entry = array.item.entries.get(name)
                if isinstance(entry, Setting):
                    values[name] = self._read_value(value, entry, (*below, name), source)
                else:
                    self._unknown(name, array.item, (*below, name), source)
            for entry in array.item.entries.values():
                if isinstance(entry, Setting) and entry.required and entry.name not in table:
                    self._problem(source, below, f'"{entry.name}" is missing: expected {entry.kind.expected}')
            if len(self.problems) == before:
                items.append(array.item.struct(**values))
        return items

    def _unknown(self, name: str, table: Table, path: places.Path, source: _Source) -> None:
        key = _dotted(path)
        nearest = _nearest(name, table.entries)
        if nearest:
            hint = f", did you mean {toml_string(_dotted((*path[:-1], nearest)))}?"
        else:
            # Perhaps it is a good name in the wrong table.
            nearest = next((known for known in SETTINGS if known.rpartition(".")[2] == name), None)
            nearest = nearest or _nearest(key, SETTINGS)
            hint = (
                f", did you mean {toml_string(nearest)}?"
                if nearest
                else f"; known are {', '.join(table.entries)}"
            )
        self._problem(source, path, f"there is no such key{hint}")

    def _problem(self, source: _Source, path: places.Path, message: str) -> None:
        self.problems.append(Problem(source.place(path), _dotted(path), message))


def _value(raw: object, setting: Setting, base: Path) -> object:
    """The value of a setting, or _Refused."""
    reason = ""
    try:
        _check_text(raw)
        return msgspec.convert(setting.kind.read(raw, base), setting.type)
    except msgspec.ValidationError:
        pass
    except ValueError as error:
        reason = f" ({error})"
    shown = "" if setting.secret else f"; got {_shown_value(raw)}"
    raise _Refused(f"expected {setting.kind.expected}{shown}{reason}")


def _check_text(raw: object) -> None:
    """Refuses what environment variables may hold and UTF-8 cannot."""
    for text in raw if isinstance(raw, list) else [raw]:
        if isinstance(text, str):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ValueError("it is not UTF-8") from None


def _fitting(text: str, entry: Entry, source: _Source) -> object:
    """A text as a TOML value if it is one and fits, else as the string that it is."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    if parsed.keys() != {"value"}:  # a newline began another key
        return text
    raw: object = parsed["value"]
    if isinstance(entry, Setting):
        for candidate in (raw, text):
            try:
                _value(candidate, entry, source.base)
            except _Refused:
                continue
            return candidate
    return raw


def _build(table: Table, values: Mapping[str, Any]) -> Any:
    arguments = {}
    for name, value in values.items():
        entry = table.entries[name]
        arguments[name] = _build(entry, value) if isinstance(entry, Table) else value
    return table.struct(**arguments)


def _sections(table: Table) -> list[Table]:
    below = [entry for entry in table.entries.values() if isinstance(entry, Table)]
    return [section for entry in below for section in (entry, *_sections(entry))]


# --- words for messages -------------------------------------------------------------------------------------


def _dotted(path: places.Path) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            word = part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else toml_string(part)
            text += f".{word}" if text else word
    return text


def _within(key: str, outer: str) -> bool:
    """Whether a key is another or lies in it: "keys[0].name" is within "keys"."""
    return key == outer or key.startswith((f"{outer}.", f"{outer}["))


def _nearest(name: str, known: Sequence[str] | Mapping[str, Any]) -> str | None:
    matches = get_close_matches(name[:_SHOWN_CHARS], list(known), n=1)
    return matches[0] if matches else None


def _shown(text: str) -> str:
    """A text that may hold anything, short and printable."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def _shown_value(raw: object) -> str:
    match raw:
        case str():
            return toml_string(_shown(raw))
        case bool():
            return "true" if raw else "false"
        case list():
            return _shown("[" + ", ".join(_shown_value(item) for item in raw) + "]")
        case dict():
            return "a table"
        case int() if raw.bit_length() > 64:
            return "a number of more than 64 bits"
        case _:
            return _shown(str(raw))
