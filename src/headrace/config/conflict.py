"""What is said of settings that do not go together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Conflict:
    """Settings that do not go together; the first key is the one to name."""

    keys: tuple[str, ...]
    message: str
