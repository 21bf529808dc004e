"""Who may publish and subscribe to what: keys and their filters. It knows nothing of protocols, nor of how a
secret came here."""

from collections.abc import Iterable
from typing import Protocol

class Key(Protocol):
    """One of a configuration's keys."""

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def publish(self) -> Iterable[str]: ...
    @property
    def subscribe(self) -> Iterable[str]: ...

class Rights:
    """What one key may do."""

    def __init__(self, name: str, publish: Iterable[str] = (), subscribe: Iterable[str] = ()) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def revoked(self) -> bool:
        """Whether the key is gone, or has another secret now."""

    @property
    def changes(self) -> int:
        """How often the filters were replaced."""

    def publishes(self, topic: str) -> bool:
        """Whether it may publish to this topic."""

    def subscribes(self, topic: str) -> bool:
        """Whether it may subscribe to this topic."""

    def follows(self, filter: str) -> bool:
        """Whether it may subscribe to every topic that this filter matches."""

class Keyring:
    """The keys that are valid now. One object for the life of the gateway: a reload replaces its content."""

    def __init__(self, keys: Iterable[Key] = ()) -> None: ...
    def replace(self, keys: Iterable[Key]) -> None:
        """Takes over a configuration's keys, all of them or, on an error, none.

        A key that stays keeps its Rights object, so that open sessions have the new filters at once. One that
        goes is revoked, and so is one whose secret is another now: who showed the old one has to show the new
        one.
        """

    def lookup(self, secret: bytes) -> Rights | None:
        """Whose secret this is, or None."""
