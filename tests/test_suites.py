"""How the programs that some tests need are found on a system."""

from pathlib import Path

import pytest

from tests import suites


def pretend_java(home: Path, version: str) -> Path:
    """A Java that does nothing but say its version, as Java does: on standard error."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024-04-16' >&2\n")
    java.chmod(0o755)
    return java


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(suites, "JAVA_PLACES", ())


@pytest.mark.usefixtures("no_java")
def test_java_is_missing_where_there_is_none() -> None:
    assert suites.find_java() is None


@pytest.mark.usefixtures("no_java")
@pytest.mark.parametrize(
    ("version", "accepted"),
    [("17.0.11", True), ("21", True), ("25-ea", True), ("11.0.2", False), ("1.8.0_402", False)],
)
def test_java_is_found_when_it_is_new_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, accepted: bool
) -> None:
    java = pretend_java(tmp_path / "jvm", version)
    monkeypatch.setenv("PATH", str(java.parent))
    assert suites.find_java() == (java if accepted else None)


@pytest.mark.usefixtures("no_java")
def test_a_newer_java_beside_the_default_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    default = pretend_java(tmp_path / "default", "11.0.2")
    newer = pretend_java(tmp_path / "jvm" / "java-17", "17.0.11")
    monkeypatch.setenv("PATH", str(default.parent))
    monkeypatch.setattr(suites, "JAVA_PLACES", ((str(tmp_path / "jvm"), "*/bin/java"),))
    assert suites.find_java() == newer


@pytest.mark.usefixtures("no_java")
def test_java_home_goes_before_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen, on_path = pretend_java(tmp_path / "chosen", "21.0.1"), pretend_java(tmp_path / "other", "17.0.1")
    monkeypatch.setenv("JAVA_HOME", str(chosen.parents[1]))
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert suites.find_java() == chosen


def test_a_java_that_does_not_run_is_none(tmp_path: Path) -> None:
    broken = tmp_path / "java"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert suites.java_version(broken) == 0
    assert suites.java_version(tmp_path / "nothing") == 0
