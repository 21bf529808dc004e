"""Whoever can be told that there is something to do: what lets the bus wake a session that it knows nothing of."""

from collections.abc import Callable

class Waker:
    """To be derived from in compiled code; Python uses CallbackWaker."""

class CallbackWaker(Waker):
    """Calls a Python callable, for who is not compiled.

    It is called at most once per loop turn and subscription, and must only take note: it may not use the bus.
    """

    @property
    def callback(self) -> Callable[[], object]: ...
    def __init__(self, callback: Callable[[], object]) -> None: ...
