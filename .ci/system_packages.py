"""Installs what tests need from the system and do not find there; where this user may not, says what to do.

Which things those are is in tests/suites.py. It never fails: the test run names the suites that it left out.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.suites import REQUIREMENTS, Requirement

# Debian starts a daemon when its package is installed unless this program, which need not exist, answers 101.
POLICY = Path("/usr/sbin/policy-rc.d")
POLICY_TEXT = "#!/bin/sh\nexit 101\n"

REFRESH = {
    "apt-get": ["apt-get", "-qq", "update"],
    "apk": ["apk", "-q", "update"],
}
INSTALL = {
    "apt-get": ["apt-get", "-qqy", "-oDPkg::Lock::Timeout=120", "--no-install-recommends", "install"],
    "dnf": ["dnf", "-q", "-y", "--setopt=install_weak_deps=False", "install"],
    "apk": ["apk", "-q", "add"],
    "brew": ["brew", "install", "--quiet"],
}


def privilege(manager: str) -> list[str] | None:
    """What goes before a command that installs: nothing, or sudo if it asks no password; None is may not."""
    if manager == "brew" or os.geteuid() == 0:
        return []
    if shutil.which("sudo") and subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode == 0:
        return ["sudo", "-n", "env", "DEBIAN_FRONTEND=noninteractive"]
    return None


def run(command: list[str], text: str = "") -> str:
    """Runs a command with a text as its input; what it said if it failed, else nothing."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, env=environment, input=text, capture_output=True, text=True)
    return f"{' '.join(command)} failed: {done.stdout}{done.stderr}" if done.returncode else ""


@contextmanager
def daemons_not_started(manager: str, prefix: list[str]) -> Iterator[None]:
    """While this lasts, installing a package starts none of its daemons; an existing policy is kept."""
    if manager != "apt-get" or POLICY.exists():
        yield
        return
    run([*prefix, "sh", "-c", f"cat > {POLICY} && chmod 755 {POLICY}"], POLICY_TEXT)
    try:
        yield
    finally:
        run([*prefix, "rm", "-f", str(POLICY)])


def install(requirement: Requirement) -> bool:
    """Tries the packages of the first package manager that is here; true once the requirement is met."""
    manager = next((name for name in INSTALL if name in requirement.packages and shutil.which(name)), None)
    if manager is None or (prefix := privilege(manager)) is None:
        return False
    print(f"{requirement.label} was not found: installing it with {manager}", file=sys.stderr)
    complaints = [run([*prefix, *REFRESH[manager]])] if manager in REFRESH else []
    with daemons_not_started(manager, prefix):
        for package in requirement.packages[manager]:
            complaints.append(run([*prefix, *INSTALL[manager], package]))
            if requirement.find():
                return True
    print("\n".join(filter(None, complaints)), file=sys.stderr)
    return False


def main() -> None:
    for requirement in REQUIREMENTS.values():
        if requirement.find() is None and not install(requirement):
            print(f"{requirement.missing}.", file=sys.stderr)


if __name__ == "__main__":
    main()
