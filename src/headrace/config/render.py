"""Writes configurations for people: the commented default, the effective values as TOML, and the reference
page. Everything it says comes from the schema."""

import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from headrace import __version__
from headrace.config.kinds import toml_string
from headrace.config.load import PREFIX, RESERVED
from headrace.config.schema import Config
from headrace.config.settings import Section, Setting, Table, TableArray, describe, value_at

WIDTH = 100
REDACTED = "<redacted>"


# --- TOML ---------------------------------------------------------------------------------------------------


def default_toml() -> str:
    """Every key with what it means and its default; loads back to exactly the defaults."""
    introduction = (
        f"Headrace {__version__}: every key with its default. Delete what you do not change. "
        'Sizes are bytes or texts like "64MiB" and "10KB", durations are seconds or texts like "500ms" and'
        ' "1h".'
    )
    explained: set[tuple[str, str]] = set()

    def write(entry: Setting, key: str, value: Any) -> list[str]:
        # What all listeners have is explained at the first of them.
        known = (entry.name, _sentences(entry)) in explained
        explained.add((entry.name, _sentences(entry)))
        comment = [] if known else ["", *_comment(_sentences(entry))]
        if entry.default_text:  # differs by machine: a file that has it would not be the default on another
            return [*comment, f"# {entry.name} = {toml_string('...')}"]
        return [*comment, f"{entry.name} = {entry.kind.write(value)}"]

    lines = [*_comment(introduction), *_toml_table(describe(Config), Config(), write, _explain_table)]
    return "\n".join(lines) + "\n"


def effective_toml(
    config: Config, origins: Mapping[str, str], *, secrets: bool = False, origin: bool = False
) -> str:
    """The values of a configuration; with `origin`, where each that was set came from."""

    def write(entry: Setting, key: str, value: Any) -> list[str]:
        text = toml_string(REDACTED) if entry.secret and not secrets else entry.kind.write(value)
        source = f"  # {origins[key]}" if origin and key in origins else ""
        return [f"{entry.name} = {text}{source}"]

    def explain(table: Table | TableArray) -> list[str]:
        # An empty array has no key of its own that could say it.
        known = origin and isinstance(table, TableArray) and table.key in origins
        return [f"# {origins[table.key]}"] if known else []

    return "\n".join(_toml_table(describe(Config), config, write, explain)).lstrip("\n") + "\n"


WriteSetting = Callable[[Setting, str, Any], list[str]]
WriteTable = Callable[[Table | TableArray], list[str]]


def _toml_table(table: Table, values: Section, write: WriteSetting, explain: WriteTable) -> list[str]:
    """A table's own keys first, as TOML wants it, then the tables in it."""
    lines: list[str] = []
    for entry in table.entries.values():
        value = None if isinstance(entry, Table) else getattr(values, entry.name)
        if isinstance(entry, Setting):
            lines += write(entry, entry.key, value)
        elif isinstance(entry, TableArray) and not value:
            lines += [*explain(entry), f"{entry.name} = []"]
    for entry in table.entries.values():
        if isinstance(entry, Table):
            lines += _section(entry, getattr(values, entry.name), write, explain)
        elif isinstance(entry, TableArray):
            for index, item in enumerate(getattr(values, entry.name)):
                lines += ["", *(explain(entry) if index == 0 else []), f"[[{entry.key}]]"]
                for field in entry.item.entries.values():
                    assert isinstance(field, Setting)
                    lines += write(field, f"{entry.key}[{index}].{field.name}", getattr(item, field.name))
    return lines


def _section(table: Table, values: Section, write: WriteSetting, explain: WriteTable) -> list[str]:
    body = _toml_table(table, values, write, explain)
    has_keys = any(not isinstance(entry, Table) for entry in table.entries.values())
    return ["", *explain(table), f"[{table.key}]", *body] if has_keys else body


def _explain_table(table: Table | TableArray) -> list[str]:
    text = table.description
    if isinstance(table, TableArray):
        text = f"{table.item.description} {table.description}{_reload_note(table.reload)}"
    return _comment(text)


def _sentences(entry: Setting) -> str:
    default = f" Default: {entry.default_text}." if entry.default_text else ""
    return f"{entry.description} Accepts {entry.kind.expected}.{default}{_reload_note(entry.reload)}"


def _reload_note(reload: bool) -> str:
    return " May change while the gateway runs." if reload else ""


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


# --- the reference page -------------------------------------------------------------------------------------

_INTRODUCTION = """\
# Configuration

Headrace runs without a configuration: everything below has a default, which keeps to the machine it runs on.
What you set comes from three places, each over the one before:

1. a TOML file, named with `--config FILE` or `{prefix}CONFIG`;
2. environment variables: the key in capitals behind `{prefix}`, with two underscores for a dot, so `log.sync`
   is `{prefix}LOG__SYNC`;
3. `--set KEY=VALUE` on the command line, as often as you like.

The data directory is not part of it: it is `--data DIR` or `{prefix}DATA`, by default `./headrace-data`. The
log lives in `log` below it.

Values in variables and in `--set` are read as TOML where that fits and as plain text otherwise, so
`--set log.sync=none` and `--set 'log.sync="none"'` are the same. Lists are set as a whole, also the array of
tables `keys`: `--set 'keys=[{{name="a", key="b", publish=["#"]}}]'`. Sizes are bytes or texts like `"64MiB"`
and `"10KB"`; durations are seconds or texts like `"500ms"` and `"1h"`. Relative paths in a file start from
that file's directory, others from the working directory.

An unknown key or a value that is not accepted stops the start. Everything that is wrong is reported at once,
with its file and line, variable or `--set`, what was expected, and the nearest name that exists. These
variables mean something else and are left alone: {reserved}.

| command | what it does |
| --- | --- |
| `headrace config default` | prints a commented file with every default |
| `headrace config check FILE` | checks a file; exit status 0 or 2 |
| `headrace config show` | prints what is in effect, without the secrets |
| `headrace config show --secrets` | the same with them |
| `headrace config show --origin` | also says where each value that was set came from |
| `headrace config reference` | prints this page |

SIGHUP reads the same places again. If anything is wrong, nothing changes. Keys marked *reload* change at
once; what has changed beside them needs a restart, and a log line names it.
"""


def reference_markdown() -> str:
    """The page docs/configuration.md."""
    reserved = ", ".join(f"`{name}`" for name in sorted(RESERVED))
    lines = [_INTRODUCTION.format(prefix=PREFIX, reserved=reserved)]
    explained: dict[tuple[str, str], str] = {}
    for entry in describe(Config).entries.values():
        assert not isinstance(entry, Setting), "every key is in a table"
        lines += _reference(entry, Config(), explained)
    return "\n".join(lines)


def _reference(
    entry: Table | TableArray, config: Config, explained: dict[tuple[str, str], str]
) -> Iterator[str]:
    """A table's chapter; `explained` has the tables in which rows stood that need not be repeated."""
    values = value_at(config, entry.key)
    if isinstance(entry, TableArray):
        note = " *reload*" if entry.reload else ""
        yield f"## `[[{entry.key}]]`\n\n{entry.item.description} {entry.description}{note}\n"
        if values:
            yield from _rows(entry.item, values[0], explained, default="in the embedded one")
        else:
            yield from _rows(entry.item, None, explained)
        return
    has_keys = any(not isinstance(below, Table) for below in entry.entries.values())
    title = f"`[{entry.key}]`" if has_keys else f"`{entry.key}`"
    yield f"{'###' if '.' in entry.key else '##'} {title}\n\n{entry.description}\n"
    if has_keys:
        yield from _rows(entry, values, explained)
    for below in entry.entries.values():
        if not isinstance(below, Setting):
            yield from _reference(below, config, explained)


def _rows(
    table: Table, values: Section | None, explained: dict[tuple[str, str], str], default: str = "default"
) -> Iterator[str]:
    """A table's keys with `values`, or with their defaults where there is no table."""
    yield f"| key | {default} | what it is |\n| --- | --- | --- |"
    repeated: dict[str, list[str]] = {}
    for setting in table.entries.values():
        if not isinstance(setting, Setting):
            continue
        reason = f" {setting.kind.reason}" if setting.kind.reason else ""
        note = " *reload*" if setting.reload else ""
        value = setting.default_text or _value(setting, values)
        needed = "Needed. " if setting.required else ""
        text = f"{needed}{setting.description} Accepts {setting.kind.expected}.{reason}{note}"
        row = f"| `{setting.name}` | {value} | {text} |"
        elsewhere = explained.setdefault((setting.name, row), table.key)
        if elsewhere == table.key:
            yield row
        else:
            repeated.setdefault(elsewhere, []).append(f"`{setting.name}`")
    for elsewhere, names in repeated.items():
        yield f"| {', '.join(names)} | | As in `[{elsewhere}]`. |"
    yield ""


def _value(setting: Setting, values: Section | None) -> str:
    if values is None and setting.required:
        return ""
    return f"`{setting.kind.write(setting.default if values is None else getattr(values, setting.name))}`"
