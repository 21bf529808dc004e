"""What is said, before anything is installed, when a Python or its compiler cannot build the package."""

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def test_nothing_is_said_where_a_build_can_work(script: Callable[[str], ModuleType]) -> None:
    assert script("toolchain").obstacle() is None


def test_a_python_that_is_too_old_is_named(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2, "final", 0))
    sentence = script("toolchain").obstacle()
    assert "needs Python 3.11 or later" in sentence
    assert f"{sys.executable} is 3.9" in sentence


def test_a_python_without_venv_is_named(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    assert "python3-venv" in script("toolchain").obstacle()


def test_a_missing_compiler_is_named(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-cc -pthread")
    assert "no C compiler, no-such-cc was not found" in script("toolchain").obstacle()


def test_missing_python_headers_are_named(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert "python3-dev" in script("toolchain").obstacle()
