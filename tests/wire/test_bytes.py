"""The byte helpers that all codecs share, called one by one through a probe that is compiled for it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parent.parent.parent
SIZES = {"be16": 2, "be32": 4, "be64": 8, "le16": 2, "le32": 4, "le64": 8}


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    source = tmp_path_factory.mktemp("probe") / "bytes_probe.pyx"
    source.write_bytes((Path(__file__).parent / source.name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "Cython.Build.Cythonize", "-3", "-i", "-q", str(source)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "ext"), "CFLAGS": "-O1"},
        check=True,
    )
    spec = importlib.util.spec_from_file_location("bytes_probe", next(source.parent.glob("bytes_probe.*.so")))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def number(name: str, raw: bytes | bytearray) -> int:
    return int.from_bytes(raw, "big" if name.startswith("be") else "little")


@pytest.mark.parametrize("name", SIZES)
@given(st.binary(min_size=16, max_size=16), st.integers(0, 8))
def test_integer_is_read_at_any_alignment(probe: Any, name: str, data: bytes, at: int) -> None:
    assert probe.get(name, data, at) == number(name, data[at : at + SIZES[name]])


@pytest.mark.parametrize("name", SIZES)
@given(st.integers(0, 2**64 - 1), st.integers(0, 8))
def test_integer_is_written_at_any_alignment_and_nothing_around_it(
    probe: Any, name: str, value: int, at: int
) -> None:
    value %= 1 << 8 * SIZES[name]
    data = bytearray(b"\xaa" * 16)
    probe.put(name, value, data, at)
    assert number(name, data[at : at + SIZES[name]]) == value
    assert data[:at] + data[at + SIZES[name] :] == b"\xaa" * (16 - SIZES[name])


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["take", "slice"]), st.integers(-2, 12)),
        st.tuples(st.sampled_from(["u8", *SIZES]), st.none()),
        st.tuples(st.just("take"), st.sampled_from([sys.maxsize, -sys.maxsize])),
    ),
    max_size=12,
)


@given(st.binary(max_size=40), steps)
def test_view_gives_what_is_there_and_never_more(
    probe: Any, data: bytes, steps: list[tuple[str, int | None]]
) -> None:
    expected: list[tuple[object, int]] = []
    rest = data
    for name, asked in steps:
        size = asked if asked is not None else SIZES.get(name, 1)
        if not 0 <= size <= len(rest):
            expected.append((None, len(rest)))
            continue
        raw, rest = rest[:size], rest[size:]
        expected.append((raw if asked is not None else number(name, raw), len(rest)))
    assert probe.read(data, steps) == expected


@given(
    st.one_of(st.binary(max_size=40), st.text(max_size=20).map(lambda t: t.encode("utf-8", "surrogatepass")))
)
def test_utf8_is_what_python_decodes(probe: Any, data: bytes) -> None:
    try:
        data.decode()
    except UnicodeDecodeError:
        assert not probe.is_utf8(data)
    else:
        assert probe.is_utf8(data)


@pytest.mark.parametrize("code", [0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF])
def test_first_and_last_code_point_of_each_size_are_valid_anywhere(probe: Any, code: int) -> None:
    for before in range(20):
        for after in range(20):
            assert probe.is_utf8(b"a" * before + chr(code).encode() + b"z" * after)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(b"\x80", id="continuation alone"),
        pytest.param(b"\xc0\x80", id="overlong, two bytes"),
        pytest.param(b"\xc1\xbf", id="overlong, two bytes, last"),
        pytest.param(b"\xe0\x9f\xbf", id="overlong, three bytes"),
        pytest.param(b"\xf0\x8f\xbf\xbf", id="overlong, four bytes"),
        pytest.param(b"\xed\xa0\x80", id="first surrogate"),
        pytest.param(b"\xed\xbf\xbf", id="last surrogate"),
        pytest.param(b"\xf4\x90\x80\x80", id="above U+10FFFF"),
        pytest.param(b"\xf5\x80\x80\x80", id="lead byte above F4"),
        pytest.param(b"\xff", id="FF"),
        pytest.param(b"\xc3", id="cut after one"),
        pytest.param(b"\xe2\x82", id="cut after two"),
        pytest.param(b"\xf0\x9f\x98", id="cut after three"),
    ],
)
def test_bad_utf8_is_found_anywhere(probe: Any, bad: bytes) -> None:
    for before in range(20):
        for after in range(20):
            assert not probe.is_utf8(b"a" * before + bad + b"z" * after)


def test_one_high_bit_anywhere_is_not_ascii(probe: Any) -> None:
    for size in range(40):
        assert probe.is_ascii(b"\x7f" * size)
        for at in range(size):
            assert not probe.is_ascii(b"\x7f" * at + b"\x80" + b"\x7f" * (size - at - 1))
