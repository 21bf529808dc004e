"""The lines on which keys stand in a TOML text."""

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.kinds import toml_string
from headrace.config.places import Path, key_lines


def test_keys_and_tables_are_found_on_their_lines() -> None:
    lines = key_lines(
        'top = 1\n\n# a comment with [x] and y = 2\n[log]  # another\nsync = "a # b"\n\n  pool = 3\n'
    )
    assert lines == {("top",): 1, ("log",): 4, ("log", "sync"): 5, ("log", "pool"): 7}


def test_dotted_and_quoted_keys_are_found() -> None:
    lines = key_lines('a.b.c = 1\na . "d.e" = 2\n[ x . \'y z\' ]\n"\\u0041" = 3\n')
    assert lines == {
        ("a",): 1,
        ("a", "b"): 1,
        ("a", "b", "c"): 1,
        ("a", "d.e"): 2,
        ("x",): 3,
        ("x", "y z"): 3,
        ("x", "y z", "A"): 4,
    }


def test_each_table_of_an_array_has_its_own_lines() -> None:
    lines = key_lines(
        '[[keys]]\nname = "a"\n[[keys]]\nname = "b"\n[keys.more]\nx = 1\n[[keys.deep]]\ny = 2\n'
    )
    assert lines["keys",] == 1
    assert lines["keys", 0] == 1
    assert lines["keys", 0, "name"] == 2
    assert lines["keys", 1] == 3
    assert lines["keys", 1, "name"] == 4
    assert lines["keys", 1, "more", "x"] == 6
    assert lines["keys", 1, "deep", 0, "y"] == 8


def test_inline_tables_and_arrays_over_many_lines_are_found() -> None:
    lines = key_lines(
        'keys = [\n  # first\n  {name = "a", x.y = {z = [1, 2]}},\n  {name = "}]"},\n]\nafter = 1\n'
    )
    assert lines["keys", 0] == 3
    assert lines["keys", 0, "x", "y", "z", 1] == 3
    assert lines["keys", 1, "name"] == 4
    assert lines["after",] == 6


@pytest.mark.parametrize(
    "value",
    [
        '"""\none = 1\n[two]\n"""',
        '"""quotes at the end\n""""',
        '"""and two of them\n"""""',
        '"""escaped \\""" goes\non"""',
        "'''\nliteral \\'''",
        "'''one more\n''''",
        '"\\\\"',
        "'\\'",
        "[\n]",
        "{}",
        "1979-05-27 07:32:00",
        "-1.5e+3",
    ],
)
def test_lines_after_any_value_are_right(value: str) -> None:
    text = f"first = {value}\nlast = 1\n"
    assert set(key_lines(text)) == {("first",), ("last",)} == {(key,) for key in tomllib.loads(text)}
    assert key_lines(text)["last",] == text.count("\n")


# Documents of every shape: tables as headers or inline, arrays of tables likewise.

names = st.text("ab-_ .\"'\\#=[]{},é", min_size=1, max_size=4)
scalars = st.one_of(
    st.integers(-5, 5).map(str),
    st.booleans().map(lambda flag: str(flag).lower()),
    st.text("ab \"'\\#=[]{},\n", max_size=6).map(toml_string),
    st.text("ab\n\\#[]{}", max_size=6).map(lambda text: f"'''{text}'''"),
)
inline = st.recursive(
    scalars,
    lambda values: (
        st.lists(values, max_size=3).map(lambda items: "[" + ",\n # c\n".join(items) + "]")
        | st.dictionaries(names, values, max_size=3).map(
            lambda items: (
                "{" + ", ".join(f"{toml_string(name)} = {value}" for name, value in items.items()) + "}"
            )
        )
    ),
    max_leaves=6,
)
bodies = st.dictionaries(names, inline, max_size=3)


@st.composite
def documents(draw: st.DrawFn) -> str:
    def body(values: dict[str, str]) -> list[str]:
        return [f"{toml_string(name)} = {value}" for name, value in values.items()]

    lines = body(draw(bodies))
    taken = set(tomllib.loads("\n".join(lines)))
    for name in draw(st.lists(names, unique=True, max_size=3)):
        if name in taken:
            continue
        if draw(st.booleans()):
            lines += [f"[{toml_string(name)}] # table", *body(draw(bodies))]
        else:
            for _ in range(draw(st.integers(1, 3))):
                lines += ["", f"[[ {toml_string(name)} ]]", *body(draw(bodies))]
    return "\n".join(lines)


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, below in items:
        yield from paths(below, (*path, name))


@given(documents())
@settings(deadline=None)
def test_every_path_of_any_document_is_found_on_a_line_that_has_its_name(text: str) -> None:
    lines = key_lines(text)
    assert set(lines) == set(paths(tomllib.loads(text)))
    for path, line in lines.items():
        if isinstance(path[-1], str):
            assert toml_string(path[-1]) in text.split("\n")[line - 1]
