"""What some tests need from the system beside Python, and how to tell that it is there.

A test asks for it with `@pytest.mark.needs("java")`. conftest.py leaves out tests whose needs are not met,
.ci/system_packages.py installs what is missing; this file knows nothing of either, and needs only Python.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

JAVA_OLDEST = 17  # Spark 4 runs on nothing older
JAVA_PLACES: tuple[tuple[str, str], ...] = (
    ("/usr/lib/jvm", "*/bin/java"),
    ("/opt/homebrew/opt", "openjdk*/bin/java"),
    ("/usr/local/opt", "openjdk*/bin/java"),
    ("/Library/Java/JavaVirtualMachines", "*/Contents/Home/bin/java"),
)


@dataclass(frozen=True)
class Requirement:
    """A program of the system that some tests run."""

    label: str
    """What it is called in a sentence."""
    find: Callable[[], Path | None]
    """The program's path, or nothing where it is missing or too old."""
    packages: Mapping[str, tuple[str, ...]]
    """By package manager: the packages that hold it, the first one that exists is taken."""

    @property
    def missing(self) -> str:
        """One sentence: what is not there, and what to do about it."""
        names = ", ".join(f"{manager}: {names[0]}" for manager, names in self.packages.items())
        return f"{self.label} was not found; install it ({names})"


def java_candidates() -> Iterator[Path]:
    """Where a Java may be: what the user chose, what the shell would run, where systems keep the others."""
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home, "bin", "java")
    if on_path := shutil.which("java"):
        yield Path(on_path)
    for directory, pattern in JAVA_PLACES:
        yield from sorted(Path(directory).glob(pattern), reverse=True)


def java_version(java: Path) -> int:
    """The major version that a Java says it has; 0 where it does not run."""
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    stated = re.search(r'version "(\d+)', answer.stderr)
    return int(stated[1]) if stated else 0


def find_java() -> Path | None:
    return next((java for java in java_candidates() if java_version(java) >= JAVA_OLDEST), None)


def find_program(name: str) -> Path | None:
    """A program by its name; daemons are often where only an administrator's shell looks."""
    found = shutil.which(
        name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    )
    return Path(found) if found else None


def private_mounts() -> list[str] | None:
    """What to put in front of a command so that it has mounts of its own, as root or with a user namespace; nothing
    where the system allows neither."""
    unshare = shutil.which("unshare")
    for rights in ([], ["--user", "--map-root-user"]) if unshare else ():
        prefix = [unshare, *rights, "--mount"]
        trial = subprocess.run([*prefix, "mount", "-t", "tmpfs", "none", "/tmp"], capture_output=True)
        if trial.returncode == 0:
            return prefix
    return None


REQUIREMENTS = {
    "java": Requirement(
        label=f"Java {JAVA_OLDEST} or later",
        find=find_java,
        packages={
            "apt-get": ("openjdk-21-jre-headless", "openjdk-17-jre-headless", "default-jre-headless"),
            "dnf": ("java-21-openjdk-headless", "java-17-openjdk-headless"),
            "apk": ("openjdk21-jre-headless", "openjdk17-jre-headless"),
            "brew": ("openjdk@21", "openjdk@17"),
        },
    ),
    "mount": Requirement(
        label="The right to mount a file system in a namespace of its own (as root, or with user namespaces)",
        find=lambda: Path(mounts[0]) if (mounts := private_mounts()) else None,
        packages={
            "apt-get": ("util-linux",),
            "dnf": ("util-linux",),
            "apk": ("util-linux", "util-linux-misc"),
        },
    ),
    "mosquitto": Requirement(
        label="mosquitto",
        find=lambda: find_program("mosquitto"),
        packages=dict.fromkeys(("apt-get", "dnf", "apk", "brew"), ("mosquitto",)),
    ),
    "nats-server": Requirement(
        label="nats-server",
        find=lambda: find_program("nats-server"),
        packages=dict.fromkeys(("apt-get", "dnf", "apk", "brew"), ("nats-server",)),
    ),
    "rabbitmq-server": Requirement(
        label="rabbitmq-server",
        find=lambda: find_program("rabbitmq-server"),
        packages={
            "apt-get": ("rabbitmq-server",),
            "dnf": ("rabbitmq-server",),
            "apk": ("rabbitmq-server",),
            "brew": ("rabbitmq",),
        },
    ),
}
