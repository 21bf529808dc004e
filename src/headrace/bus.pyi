"""The bus: topics and subscriptions on the log. A subscription's queue, its redeliveries and its replay are cursors.

It knows nothing of protocols, sockets or the loop. All of it belongs to the thread that appends to the log. Times are
microseconds since the epoch; where one is left out, it is now. Compiled sessions use bus.pxd.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, final

from typing_extensions import Buffer

from headrace.log import Log
from headrace.wake import Waker

PROTOCOL_NAMES: tuple[str, ...]
STATUS_NAMES: tuple[str, ...]
ANSWERS: int
"""The flag of a message whose publisher may publish to the return paths that its headers name."""

class Received(NamedTuple):
    """One delivery as Python sees it. `confirm`: acknowledge it with `tag`."""

    offset: int
    time: int
    topic: bytes
    payload: bytes
    headers: bytes
    parts: tuple[int, ...]
    protocol: int
    kind: int
    flags: int
    correlation: int
    tag: int
    deliveries: int
    confirm: bool

@final
class Member:
    """One peer's part of a subscription. Made by Subscription.join()."""

    credits: int
    @property
    def subscription(self) -> Subscription: ...
    @property
    def inflight(self) -> int: ...
    @property
    def gone(self) -> bool: ...
    def leave(self, now: int | None = None) -> None:
        """Gives back what it has not acknowledged, to be delivered to another member or to its successor."""

    def receive(self, now: int | None = None) -> Received | None:
        """The next delivery, or None."""

@final
class Subscription:
    """A cursor on the log. Made by Bus.subscribe()."""

    max_inflight: int
    max_deliveries: int
    redelivery_us: int
    max_redelivery_us: int
    max_pending: int
    max_active: int
    """How many deliveries members may have at once; 0: no limit but max_inflight."""
    deadline_us: int
    """How long a member may have one; 0: until its redelivery is due."""
    keep_finished: int
    """Of so many messages that were finished it is remembered how."""
    paused: bool
    """Whether nothing is handed out."""
    @property
    def id(self) -> int: ...
    @property
    def filter(self) -> bytes: ...
    @property
    def owner(self) -> str: ...
    @property
    def protocol(self) -> int: ...
    @property
    def exact(self) -> bool: ...
    @property
    def at_least_once(self) -> bool: ...
    @property
    def durable(self) -> bool: ...
    @property
    def queue(self) -> bool: ...
    @property
    def confirm_all(self) -> bool: ...
    @property
    def kept(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    @property
    def inflight(self) -> int:
        """How many deliveries wait for an acknowledgement, or for the next attempt."""

    @property
    def held(self) -> int:
        """Of these, those that a member has."""

    @property
    def member_count(self) -> int: ...
    @property
    def delivered(self) -> int: ...
    @property
    def redelivered(self) -> int: ...
    @property
    def acknowledged(self) -> int: ...
    @property
    def dead(self) -> int: ...
    @property
    def lost(self) -> int: ...
    def join(self, waker: Waker | None, credits: int, now: int) -> Member:
        """A peer that takes from this subscription; `waker` is told when there is something.

        `credits` is how many deliveries it takes, -1 without limit. Where members do not share the subscription, the
        newest one replaces the one before it.
        """

    def ack(self, tag: int, now: int | None = None) -> bool:
        """Acknowledges a delivery by its tag; False where none is waiting for it."""

    def reject(self, tag: int, *, delay: float = 0, now: int | None = None) -> bool:
        """Has a delivery made again after `delay` seconds, within its attempts; False where none is waiting."""

    def retry(
        self, tag: int, *, delay: float | None = None, reason: str = "it failed", now: int | None = None
    ) -> Literal["again", "buried"] | None:
        """Gives a delivery back unfinished: it is made again after `delay` seconds (None: as the message or the
        back-off says), or buried if it was the last. None where none is waiting."""

    def prolong(self, tag: int, now: int | None = None) -> bool:
        """Gives whoever has a delivery as much time for it again; False where nobody has it."""

    def status(self, offset: int, now: int | None = None) -> tuple[str, int] | None:
        """What became of a message ("new", "waiting", "delayed", "active", "completed" or "failed") and how often it
        was delivered; None where it was never for this subscription, or was finished too long ago."""

    def census(self, now: int | None = None) -> dict[str, int]:
        """How many messages are in each state. For filters."""

    def offsets(
        self, status: str, skip: int = 0, most: int = 1000, looks: int = ..., now: int | None = None
    ) -> list[int]:
        """Offsets of messages in a state, oldest first: up to `most`, after `skip`, among the first `looks` (by default
        all) of those that nobody was given yet. For filters."""

    def remove(self, offset: int, now: int | None = None) -> str | None:
        """Takes a message out that nobody has now. Its state until then: "active" ones stay; None where it is not
        known."""

@final
class Bus:
    """Topics and subscriptions on one log. `schedule`, if set, is called when dispatch() has something to do."""

    schedule: Callable[[], object] | None
    hold_for_subscriptions: bool
    @property
    def log(self) -> Log: ...
    @property
    def subscriptions(self) -> dict[int, Subscription]: ...
    @property
    def closed(self) -> bool: ...
    @property
    def max_topics(self) -> int: ...
    @property
    def durable_grace(self) -> float: ...
    @property
    def dead_prefix(self) -> str: ...
    @property
    def acknowledged(self) -> int: ...
    @property
    def redelivered(self) -> int: ...
    @property
    def dead(self) -> int: ...
    @property
    def lost(self) -> int: ...
    @property
    def expired(self) -> int: ...
    @property
    def carried_count(self) -> int: ...
    def __init__(
        self,
        log: Log,
        *,
        max_inflight: int = 1024,
        max_deliveries: int = 5,
        redelivery_delay: float = 2.0,
        max_redelivery_delay: float = 300.0,
        dead_letter_prefix: str = "dead.",
        durable_grace: float = 3600.0,
        max_pending: int = 0,
        max_topics: int = 1_000_000,
        hold_for_subscriptions: bool = False,
        now: int | None = None,
    ) -> None: ...
    def configure(
        self,
        *,
        max_inflight: int,
        max_deliveries: int,
        redelivery_delay: float,
        max_redelivery_delay: float,
        dead_letter_prefix: str,
        durable_grace: float,
        max_pending: int,
        hold_for_subscriptions: bool = False,
    ) -> None:
        """Sets what subscriptions made from now on begin with, and how long durable ones are kept."""

    def publish(
        self,
        topic: str | bytes,
        payload: Buffer,
        *,
        headers: Buffer = b"",
        parts: Sequence[int] = (),
        protocol: int = 0,
        kind: int = 0,
        confirmed: bool = False,
        answers: bool = False,
        correlation: int = 0,
        not_before: int | None = None,
        attempts: int | None = None,
        retry: float | None = None,
        now: int | None = None,
    ) -> int:
        """Publishes one message; its offset. Queues deliver it at the time `not_before` (microseconds) at the earliest,
        at most `attempts` times, `retry` seconds after it was given back; these take the place of other headers.
        `answers`: whoever it is from may publish to the return paths that the headers name."""

    def publish_many(
        self,
        topic: str | bytes,
        payloads: Buffer,
        size: int,
        *,
        protocol: int = 0,
        confirmed: bool = False,
        now: int | None = None,
    ) -> int:
        """Publishes `payloads`, cut into messages of `size` bytes, in one call; how many were taken before the log was
        full."""

    def subscribe(
        self,
        filter: str | bytes,
        *,
        exact: bool = False,
        at_least_once: bool = False,
        durable: bool = False,
        queue: bool = False,
        confirm_all: bool = False,
        kept: bool = False,
        owner: str = "",
        protocol: int = 0,
        start: int | None = None,
        now: int | None = None,
        max_inflight: int = ...,
        max_deliveries: int = ...,
        redelivery_us: int = ...,
        max_redelivery_us: int = ...,
        max_pending: int = ...,
        max_active: int = ...,
        deadline_us: int = ...,
        keep_finished: int = ...,
    ) -> Subscription:
        """A new subscription, from the end of the log or from the offset `start`.

        `exact`: `filter` is one topic's name, in which `*` and `#` mean nothing. `durable` (needs at_least_once): it
        and what it acknowledged survive a restart. `queue`: members share it. `confirm_all`: every message is to be
        acknowledged, however it was published. `kept`: nothing is to be acknowledged; whoever takes from it keeps its
        place. What is left out at the end is as the bus was configured.
        """

    def unsubscribe(self, subscription: Subscription, now: int | None = None) -> None:
        """Ends a subscription for good. Its members are woken, to find that they are gone."""

    def note(self, key: bytes, value: bytes, now: int | None = None) -> int:
        """Keeps a value under a key in the log, instead of the one before, through restarts and retention; the lsn from
        which on it is safe. LogFull where the log has no room, LogError where it is larger than a record can be."""

    def forget(self, key: bytes, now: int | None = None) -> int:
        """Keeps nothing under a key any more; the lsn from which on that is safe, or 0 where there was nothing."""

    def noted(self, key: bytes) -> bytes | None:
        """The value under a key, or None."""

    def notes(self, prefix: bytes = b"") -> dict[bytes, bytes]:
        """Every key that begins so, with its value. Slashes in keys are like those of paths: what is in no place that
        the prefix names is not looked at."""

    def dispatch(self) -> None:
        """Wakes whoever subscribed to a topic that was published to; to be called once per loop turn."""

    def on_safe(self) -> None:
        """Wakes those who met the log's safe end; to be called when it moved."""

    def tick(self, now: int | None = None) -> int | None:
        """Redeliveries, dead letters, subscriptions that nobody came back to; when to call it again, or None."""

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and how much there is of everything."""

    def close(self) -> None:
        """Lets go of the log; the log itself is closed by whoever opened it."""
