"""How missing programs are installed: with whose leave, by which package manager, and no daemon started."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.suites import Requirement

# An apt-get that knows one package, which holds one program, and that notes when daemons would not start.
APT_GET = """#!/bin/sh
echo "apt-get $*" >> {log}
test -e {policy} && echo "daemons stay off" >> {log}
case "$*" in
    *install\\ mill-2) echo "#!/bin/sh" > {mill}; chmod 755 {mill} ;;
    *install*) echo "no package like that" >&2; exit 100 ;;
esac
"""
SUDO = """#!/bin/sh
echo "sudo $*" >> {log}
test "$1" = -n && shift
exec env "$@"
"""


class Machine:
    """A directory of programs that stands for a whole system, and the log of what was run there."""

    def __init__(self, root: Path, packages: ModuleType) -> None:
        self.programs = root / "bin"
        self.mill = self.programs / "mill"
        self.policy = packages.POLICY
        self.packages = packages
        self.log = root / "log"
        self.log.touch()
        self.programs.mkdir()
        for name in ("sh", "cat", "chmod", "env", "rm", "true"):
            self.programs.joinpath(name).symlink_to(str(shutil.which(name)))

    def add(self, name: str, text: str) -> None:
        program = self.programs / name
        program.write_text(text.format(log=self.log, policy=self.policy, mill=self.mill))
        program.chmod(0o755)

    def ran(self) -> list[str]:
        return self.log.read_text().splitlines()

    def install(self, *names: str) -> bool:
        needed = Requirement("Mill 2", lambda: self.mill if self.mill.exists() else None, {"apt-get": names})
        done: bool = self.packages.install(needed)
        return done


@pytest.fixture
def machine(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    packages = script("system_packages")
    monkeypatch.setattr(packages, "POLICY", tmp_path / "policy-rc.d")
    machine = Machine(tmp_path, packages)
    monkeypatch.setenv("PATH", str(machine.programs))
    return machine


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.mark.usefixtures("as_root")
def test_root_installs_the_first_package_that_exists_and_starts_no_daemon(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.add("apt-get", APT_GET)
    assert machine.install("mill-3", "mill-2", "mill-1")
    assert "no package like that" not in capsys.readouterr().err
    first, *installs = [line for line in machine.ran() if line != "daemons stay off"]
    assert first.endswith("update")
    assert [line.split()[-1] for line in installs] == ["mill-3", "mill-2"]
    assert machine.ran().count("daemons stay off") == 2
    assert not machine.policy.exists()


@pytest.mark.usefixtures("as_root")
def test_a_policy_that_the_system_has_is_left_alone(machine: Machine) -> None:
    machine.add("apt-get", APT_GET)
    machine.policy.write_text("the system's own")
    assert machine.install("mill-2")
    assert machine.policy.read_text() == "the system's own"


@pytest.mark.usefixtures("as_root")
def test_when_nothing_could_be_installed_the_policy_is_taken_back_and_the_reason_shown(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.add("apt-get", APT_GET)
    assert not machine.install("mill-3")
    assert "install mill-3 failed: no package like that" in capsys.readouterr().err
    assert "daemons stay off" in machine.ran()
    assert not machine.policy.exists()


@pytest.mark.usefixtures("as_user")
def test_a_user_installs_through_sudo_when_it_asks_for_no_password(machine: Machine) -> None:
    machine.add("apt-get", APT_GET)
    machine.add("sudo", SUDO)
    assert machine.install("mill-2")
    assert [line for line in machine.ran() if line.startswith("sudo") and line.endswith("install mill-2")]
    assert not machine.policy.exists()


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("sudo", [None, "#!/bin/sh\nexit 1\n"], ids=["no sudo", "sudo wants a password"])
def test_a_user_who_may_not_install_runs_no_package_manager(machine: Machine, sudo: str | None) -> None:
    machine.add("apt-get", APT_GET)
    if sudo:
        machine.add("sudo", sudo)
    assert not machine.install("mill-2")
    assert machine.ran() == []


@pytest.mark.usefixtures("as_root")
def test_a_system_without_a_known_package_manager_installs_nothing(machine: Machine) -> None:
    assert not machine.install("mill-2")


@pytest.mark.usefixtures("as_user")
def test_what_could_not_be_installed_is_told_in_one_sentence(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Requirement("Mill 2", lambda: None, {"apt-get": ("mill-2", "mill-1"), "dnf": ("mill",)})
    present = Requirement("a shell", lambda: Path("/bin/sh"), {})
    monkeypatch.setattr(machine.packages, "REQUIREMENTS", {"mill": missing, "shell": present})
    machine.packages.main()
    assert capsys.readouterr().err == "Mill 2 was not found; install it (apt-get: mill-2, dnf: mill).\n"
