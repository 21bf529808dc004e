"""What a configuration's structs say about themselves: every key with its kind, description, default and
whether it may change while the gateway runs. Knows the machinery, not the settings."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

import msgspec

from headrace.config.kinds import Kind


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table of the configuration."""


def setting(description: str, kind: Kind, *, reload: bool = False, default: str = "") -> msgspec.Meta:
    """The annotation of a field that holds a value. `default` describes a default that differs by machine."""
    extra = {"kind": kind, "reload": reload, "default": default}
    return msgspec.Meta(description=description, extra=extra, **kind.constraints)


def tables(description: str, *, reload: bool = False) -> msgspec.Meta:
    """The annotation of a field that holds an array of tables."""
    return msgspec.Meta(description=description, extra={"reload": reload})


@dataclass(frozen=True)
class Setting:
    """One key with a value."""

    name: str  # "sync"
    key: str  # "log.sync"
    kind: Kind
    type: Any  # what msgspec checks a value against, with its constraints
    description: str
    reload: bool
    required: bool
    default: object  # None if required
    default_text: str  # says the default where it differs by machine

    @property
    def secret(self) -> bool:
        return self.kind.secret


@dataclass(frozen=True)
class Table:
    """A group of keys."""

    name: str
    key: str  # empty for the whole configuration
    struct: type[Section]
    description: str
    entries: "dict[str, Entry]"


@dataclass(frozen=True)
class TableArray:
    """A key with any number of tables, which is set and changed as a whole."""

    name: str
    key: str
    item: Table
    description: str
    reload: bool
    default: object

    @property
    def secret(self) -> bool:
        return any(entry.secret for entry in self.item.entries.values() if not isinstance(entry, Table))


Entry: TypeAlias = Setting | Table | TableArray


@cache
def describe(struct: type[Section], key: str = "") -> Table:
    """What a struct, whose own key is `key`, consists of."""
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    entries: dict[str, Entry] = {}
    for name, hint in get_type_hints(struct, include_extras=True).items():
        entries[name] = _entry(name, f"{key}.{name}" if key else name, hint, fields[name])
    return Table(key.rpartition(".")[2], key, struct, inspect.getdoc(struct) or "", entries)


def _entry(name: str, key: str, hint: Any, field: msgspec.structs.FieldInfo) -> Entry:
    if isinstance(hint, type) and issubclass(hint, Section):
        return describe(hint, key)
    assert get_origin(hint) is Annotated, f"{key} has no annotation"
    inner, meta = get_args(hint)
    extra = meta.extra
    default = None if field.required else _default(field)
    if "kind" in extra:
        return Setting(
            name=name,
            key=key,
            kind=extra["kind"],
            type=hint,
            description=meta.description,
            reload=extra["reload"],
            required=field.required,
            default=default,
            default_text=extra["default"],
        )
    (item,) = get_args(inner)
    return TableArray(name, key, describe(item, key), meta.description, extra["reload"], default)


def _default(field: msgspec.structs.FieldInfo) -> object:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    assert callable(field.default_factory)
    return field.default_factory()


def leaves(table: Table) -> Iterator[Setting | TableArray]:
    """Every key that holds a value or an array of tables, in the order of the structs."""
    for entry in table.entries.values():
        if isinstance(entry, Table):
            yield from leaves(entry)
        else:
            yield entry


def value_at(config: Section, key: str) -> Any:
    """The value behind a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value
