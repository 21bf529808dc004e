"""Queues of jobs on the bus: a queue is a durable queue subscription bound to a filter."""

from collections.abc import Callable, Iterator

from headrace.bus import Bus, Subscription
from headrace.errors import HeadraceError
from headrace.mapping import Map

SYSTEM_QUEUE: str

class QueueError(HeadraceError):
    """A queue cannot be made or changed as it was asked for."""

class DuplicateQueue(QueueError):
    """There is one of this name."""

class BadQueueName(QueueError):
    """No queue may have this name."""

class TooManyQueues(QueueError):
    """There are as many as there may be."""

def check_name(name: str) -> None:
    """Raises BadQueueName for what is no name of a queue: a letter or a digit, then also _ and -."""

def filter_for(name: str) -> str:
    """What a queue takes unless it is told otherwise, by the protocol's own rule."""

def topic_for(name: str) -> str:
    """Where jobs are put that are given to a queue by its name, by the protocol's own rule."""

class Queue:
    """One queue. Made by Queues.add()."""

    @property
    def name(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def filter(self) -> str: ...
    @property
    def subscription(self) -> Subscription: ...
    @property
    def concurrency_limit(self) -> int | None: ...
    @property
    def allow_job_overrides(self) -> bool: ...
    @property
    def paused(self) -> bool: ...
    @property
    def gone(self) -> bool: ...
    @property
    def state(self) -> str: ...
    @property
    def workers(self) -> int:
        """How many work for it."""
    def counts(self, now: int) -> dict[str, int]:
        """How many jobs are in each state."""

class Queues:
    """All queues of a gateway: those of before the last restart, those of the configuration, and those made
    since."""

    def __init__(
        self,
        bus: Bus,
        *,
        deadline: float = 60.0,
        keep_finished: int = 1000,
        most: int = 10_000,
        map: Map | None = None,
        now: int | None = None,
    ) -> None:
        """`deadline` is how many seconds a worker may have a job, `keep_finished` of how many finished jobs of a queue
        it is remembered what became of them, `most` how many queues there may be. With a `map` of names jobs go to
        the topic that it has for the queue's name, which is also what a queue takes unless it is told otherwise."""

    @property
    def bus(self) -> Bus: ...
    def report_to(self, on_finished: Callable[[int, int, bytes, bool], None]) -> None:
        """Has a callable told of every job that is completed or given up: its protocol, its headers, and whether it
        was completed."""

    def takes(self, topic: str) -> bool:
        """Whether what is published to a topic is a job of some queue."""

    def configure(
        self,
        name: str,
        filter: str | None,
        concurrency_limit: int | None,
        allow_job_overrides: bool,
        now: int | None = None,
    ) -> Queue:
        """A queue of the configuration: made if it is not there, and otherwise as it is told now."""

    def add(
        self,
        name: str,
        *,
        filter: str | None = None,
        concurrency_limit: int | None = None,
        allow_job_overrides: bool = True,
        now: int | None = None,
    ) -> Queue:
        """Makes a queue: jobs are what is published from now on. DuplicateQueue, BadQueueName, TooManyQueues,
        LogError."""

    def remove(self, queue: Queue, now: int | None = None) -> None:
        """Ends a queue; its jobs stay messages in the log."""

    def set_paused(self, queue: Queue, paused: bool, now: int | None = None) -> None:
        """Holds a queue's jobs back, or lets them go on."""

    def get(self, name: str) -> Queue | None:
        """The queue of this name, or None."""

    def __iter__(self) -> Iterator[Queue]: ...
    def __len__(self) -> int: ...
