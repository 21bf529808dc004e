"""The errors that leave the package, as a small named hierarchy. Knows nothing of wire errors: each protocol
maps these to its own."""

from collections.abc import Sequence
from dataclasses import dataclass


class HeadraceError(Exception):
    """Anything that Headrace refuses or cannot do; its text is for the person who asked."""

    exit_code = 1  # of a command that ends with this error
    hint = ""  # what whoever runs a command can do about it


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration."""

    place: str  # "headrace.toml:12", "HEADRACE_LOG__SYNC", "--set log.sync=x"; empty if only the key is known
    key: str  # "log.sync"; empty where the text has no key (a syntax error)
    message: str  # what was expected

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, self.key, self.message) if part)


class ConfigError(HeadraceError):
    """A configuration was refused; carries every problem that was found, not only the first."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        title = "the configuration has a problem" if count == 1 else f"the configuration has {count} problems"
        super().__init__("\n".join([title + ":", *(f"  {problem}" for problem in self.problems)]))


class LogError(HeadraceError):
    """A log directory cannot be opened, read or appended to."""


class LogLocked(LogError):
    """Another process writes this log."""


class LogVersion(LogError):
    """The log has a format that this version does not read."""


class LogDamaged(LogError):
    """Bytes of the log do not hold; the text names the place."""


class LogFull(LogError):
    """The log cannot take messages now; it may later."""


class LogFailed(LogError):
    """A sync has failed: nothing more is confirmed until the log was reopened."""


class BusError(HeadraceError):
    """The bus refuses: a limit is reached, or a subscription is gone."""
