"""An Overhop client for asyncio: put jobs into queues, and work on them, over connections that come back by
themselves.

    async with OverhopClient("127.0.0.1:9876") as client:
        await client.enqueue("mail", {"to": "someone"})

        async with client.work("mail", credits=16) as jobs:
            async for job in jobs:
                print(job.payload)
                await job.done()

Requests are pipelined: what the tasks of one loop turn ask leaves in one write. Putting jobs in and looking after
queues works with any server of the protocol; jobs reach workers by this gateway's extension
(docs/protocols/overhop.md).
"""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Self

from headrace.clients.errors import (
    ClientClosed,
    ClientError,
    ConnectionFailed,
    ConnectionLost,
    Limit,
    OperationTimeout,
    ProtocolError,
    again,
)
from headrace.clients.overhop_link import (
    JobNotActive,
    JobNotFound,
    Link,
    NotAllowed,
    OverhopError,
    QueueExists,
    QueueNotFound,
    ServerError,
    Violation,
)
from headrace.clients.reconnect import FIRST_PAUSE, LONGEST_PAUSE, ReconnectingClient
from headrace.wire.overhop import DEFAULT_PAYLOAD_LIMIT, Message, MessageType

__all__ = [
    "ClientClosed",
    "ClientError",
    "ConnectionFailed",
    "ConnectionLost",
    "Job",
    "JobNotActive",
    "JobNotFound",
    "NotAllowed",
    "OperationTimeout",
    "OverhopClient",
    "OverhopError",
    "ProtocolError",
    "QueueExists",
    "QueueNotFound",
    "ServerError",
    "Violation",
    "Worker",
]

# Jobs that enqueue_many() has under way at once.
WINDOW_JOBS: Final = 1024


class OverhopClient(ReconnectingClient[Link]):
    """A client of one Overhop server, registered as a worker.

    `address` is "host:port", "[v6]:port" or "unix:/path". With `tls` the connection is encrypted; `server_hostname` is
    the name to find in the server's certificate if it is not the host's. `limit` is the largest payload, as the server
    has it configured.

    `timeout` is how many seconds any operation may take, connecting and waiting for a lost connection included; then it
    raises OperationTimeout. Workers wait for jobs without a limit.

    With `reconnect` a lost connection is made again, with growing and randomly shortened pauses from `reconnect_delay`
    to `max_reconnect_delay`; operations wait for it meanwhile. Without, all that is under way and all that follows
    raises the reason.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        timeout: float = 10.0,
        limit: int = DEFAULT_PAYLOAD_LIMIT,
        reconnect: bool = True,
        reconnect_delay: float = FIRST_PAUSE,
        max_reconnect_delay: float = LONGEST_PAUSE,
    ) -> None:
        super().__init__(
            address,
            tls=tls,
            server_hostname=server_hostname,
            timeout=timeout,
            reconnect=reconnect,
            reconnect_delay=reconnect_delay,
            max_reconnect_delay=max_reconnect_delay,
        )
        self._limit = limit
        self._workers: dict[str, Worker] = {}  # by subscription id
        self._all_workers: dict[Worker, None] = {}  # in order
        self._subscribing = 0  # SUBSCRIBEs under way
        self._early: dict[str, list[Message]] = {}  # what came before its worker knew its id

    # --- connecting and closing -----------------------------------------------------------------------------

    @property
    def wid(self) -> str:
        """The worker id that the server gave to the connection; empty while there is none."""
        return self._connection.wid if self._connection is not None else ""

    def _new_link(self) -> Link:
        return Link(self._loop, self, self.address, self._limit)

    async def _greet(self, link: Link) -> None:
        await link.handshake()

    async def _prepare(self, link: Link) -> None:
        # What an attempt before this one has left is of its own connection.
        self._workers.clear()
        self._early.clear()
        for worker in list(self._all_workers):
            try:
                await worker.relink(link)
            except OverhopError as error:
                worker.fail(error)  # its queue has gone; the others go on

    def _leave(self, link: Link, error: ClientError, carry: bool) -> None:
        self._workers.clear()
        for worker in self._all_workers:
            worker.on_link_lost()

    def _finish(self, error: ClientError) -> None:
        super()._finish(error)
        for worker in list(self._all_workers):
            worker.fail(error)

    # --- asking ---------------------------------------------------------------------------------------------

    async def ask(
        self, type: int, payload: dict[str, Any] | None = None, *, retry: bool = True
    ) -> dict[str, Any]:
        """Sends any message and returns the payload of its answer; an ERR is raised as an OverhopError.

        A request whose connection was lost before its answer came is sent again by the next one, so it may be carried
        out twice; without `retry` ConnectionLost is raised.
        """
        link: Link | None = None
        try:
            async with Limit(self._timeout, lambda: self._late("ask")):
                while True:
                    link = await self._ready("ask")
                    try:
                        return (await link.call(type, payload or {})).payload
                    except ConnectionLost:
                        if not retry or not self._reconnect or self._end is not None:
                            raise
        except OperationTimeout as late:
            if link is not None:
                link.fail(late)  # answers come in order, so none will come before that one
            raise

    async def ping(self) -> float:
        """The time to the server and back, in seconds."""
        start = time.perf_counter()
        await self.ask(MessageType.PING)
        return time.perf_counter() - start

    async def enqueue(
        self,
        queue: str,
        payload: object = None,
        *,
        scheduled_at: datetime | None = None,
        max_attempts: int | None = None,
        retry_interval: float | None = None,
        retry: bool = True,
    ) -> str:
        """Puts a job into a queue; its id, once the server has it safe.

        `payload` is bytes, or None, a bool, an int, a str, or lists and dicts of these. The job is not given to a
        worker before `scheduled_at` (a time with a zone), at most `max_attempts` times, and `retry_interval` seconds
        after it failed. With `retry`, a lost connection may put it in twice.
        """
        job = job_fields(queue, payload, scheduled_at, max_attempts, retry_interval)
        return str((await self.ask(MessageType.ENQUEUE, job, retry=retry))["jid"])

    async def enqueue_many(self, queue: str, payloads: Iterable[object], *, retry: bool = True) -> list[str]:
        """Puts jobs into a queue, in order and together; their ids, once all of them are safe. The first that is
        refused is raised; those before it are in the queue, and those behind it may be."""
        ids: list[str] = []
        window: deque[asyncio.Future[str]] = deque()
        try:
            for payload in payloads:
                if len(window) >= WINDOW_JOBS:
                    ids.append(await window.popleft())
                window.append(asyncio.ensure_future(self.enqueue(queue, payload, retry=retry)))
            while window:
                ids.append(await window.popleft())
        finally:
            for left in window:
                left.cancel()
            if window:
                await asyncio.wait(window)
        return ids

    def work(self, queue: str, *, credits: int = 64, auto_done: bool = False) -> "Worker":
        """Jobs of a queue, as an asynchronous iterator that is used in an `async with` block.

        At most `credits` jobs are here at once, and each that is finished or failed makes room for another. With
        `auto_done` a job is done when the next one is asked for.
        """
        return Worker(self, queue, credits, auto_done)

    # --- queues and jobs ------------------------------------------------------------------------------------

    async def queues(self) -> list[dict[str, Any]]:
        """All queues, by name: each with `name`, `id`, `state` and `config`."""
        found: list[dict[str, Any]] = (await self.ask(MessageType.LQUEUES))["queues"]
        return found

    async def queue(self, name: str) -> dict[str, Any] | None:
        """One queue, or None."""
        return await self.ask(MessageType.GQUEUE, {"q": name}) or None

    async def add_queue(
        self, name: str, *, concurrency_limit: int | None = None, allow_job_overrides: bool = True
    ) -> str:
        """Makes a queue; its id. QueueExists, where there is one."""
        config = {"concurrency_limit": concurrency_limit, "allow_job_overrides": allow_job_overrides}
        made = await self.ask(MessageType.ADDQUEUE, {"name": name, "config": config}, retry=False)
        return str(made["qid"])

    async def remove_queue(self, name: str) -> None:
        """Removes a queue that has no unfinished jobs."""
        await self.ask(MessageType.RMQUEUE, {"q": name}, retry=False)

    async def pause(self, name: str) -> None:
        """Holds a queue's jobs back."""
        await self.ask(MessageType.PAUSE, {"q": name}, retry=False)

    async def resume(self, name: str) -> None:
        """Lets a paused queue go on."""
        await self.ask(MessageType.RESUME, {"q": name}, retry=False)

    async def stats(self, name: str) -> dict[str, int]:
        """How many jobs of a queue are in each state."""
        found: dict[str, int] = (await self.ask(MessageType.QSTATS, {"q": name}))["stats"]
        return found

    async def job(self, jid: str) -> dict[str, Any] | None:
        """A job's record, or None where the server does not know it any more."""
        return await self.ask(MessageType.JOB, {"jid": jid}) or None

    async def jobs(
        self, queue: str, status: str, *, page: int = 1, page_size: int = 15
    ) -> list[dict[str, Any]]:
        """The records of a queue's jobs in one state, a page of them."""
        wish = {"q": queue, "status": status, "page": page, "page_size": page_size}
        found: list[dict[str, Any]] = (await self.ask(MessageType.LSJOB, wish))["jobs"]
        return found

    async def remove_job(self, jid: str) -> None:
        """Removes a job that is new, delayed, completed or failed."""
        await self.ask(MessageType.RMJOB, {"jid": jid}, retry=False)

    async def status(self) -> dict[str, Any]:
        """What the server tells of itself."""
        return await self.ask(MessageType.STATUS)

    # --- what a link tells its owner ------------------------------------------------------------------------

    def on_push(self, link: Link, message: Message) -> None:
        if message.type not in (MessageType.DELIVER, MessageType.ENDED):
            return  # a server may say more than this client knows
        sid = str(message.payload.get("sid"))
        worker = self._workers.get(sid)
        if worker is not None:
            worker.on_push(message)
        elif self._subscribing:
            self._early.setdefault(sid, []).append(message)

    async def subscribe(self, worker: "Worker", link: Link, credits: int) -> None:
        """Has a worker's jobs pushed over this link."""
        late = f"{self.address} did not take a subscription within {self._timeout:g} s"
        self._subscribing += 1
        try:
            async with Limit(self._timeout, late):
                answer = await link.call(MessageType.SUBSCRIBE, {"q": worker.queue, "credits": credits})
            if not link.down:
                worker.sid = str(answer.payload["sid"])
                self._workers[worker.sid] = worker
                for message in self._early.pop(worker.sid, ()):
                    worker.on_push(message)
        except OperationTimeout as error:
            link.fail(error)
            raise
        finally:
            self._subscribing -= 1
            if not self._subscribing:
                self._early.clear()


class Job:
    """A job that this worker has, until done() or fail()."""

    __slots__ = ("_ended", "_worker", "attempt", "deadline", "jid", "payload", "topic")

    def __init__(self, worker: "Worker", told: dict[str, Any]) -> None:
        self.jid: str = told["jid"]
        self.payload: Any = told.get("job_payload")
        self.attempt: int = told.get("attempt", 1)
        """1 for the first delivery, and so on."""
        self.topic: str = told.get("topic", "")
        """Where on the bus it was published."""
        self.deadline: float = told.get("deadline_ms", 0) / 1000
        """How many seconds there are for it, from its delivery or the last extend() on."""
        self._worker = worker
        self._ended = False

    async def done(self) -> None:
        """Finishes the job; returns when the server has that safe. JobNotActive, if it was too late."""
        await self._worker.end(self, MessageType.DONE, {"jid": self.jid})

    async def fail(self, reason: str = "", *, retry_in: float | None = None) -> None:
        """Gives the job back: it comes again after `retry_in` seconds, or as it or its queue says, or goes to the
        dead letters if this was its last attempt."""
        told: dict[str, Any] = {"jid": self.jid}
        if reason:
            told["reason"] = reason
        if retry_in is not None:
            told["retry_in_ms"] = round(retry_in * 1000)
        await self._worker.end(self, MessageType.FAIL, told)

    async def extend(self) -> None:
        """Begins the time for the job anew."""
        await self._worker.client.ask(MessageType.EXTEND, {"jid": self.jid})

    def __repr__(self) -> str:
        return f"<Job {self.jid} attempt {self.attempt}>"


class Worker:
    """Jobs of one queue, as an asynchronous iterator. Made by OverhopClient.work(). Several tasks may take from it."""

    def __init__(self, client: OverhopClient, queue: str, credits: int, auto_done: bool) -> None:
        if not 1 <= credits < 2**32:
            raise ValueError(f"credits are from 1 to {2**32 - 1}, not {credits}")
        self.client = client
        self.queue = queue
        self.sid = ""
        """What the server calls the subscription; empty while there is none."""
        self._credits = credits
        self._auto_done = auto_done
        self._buffer: deque[Job] = deque()
        self._out: dict[str, Job] = {}  # handed out and not ended, by id
        self._last: Job | None = None
        self._owed = 0  # credits that the server was not given back yet
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._entered = False
        self._error: ClientError | None = ClientClosed("the worker's block was not entered yet")

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a worker is entered once; make another one")
        self._entered = True
        self._error = None
        self.client._all_workers[self] = None
        try:
            link = await self.client._ready("work")
            while not self.sid:
                try:
                    await self.client.subscribe(self, link, self._credits)
                except ConnectionLost:
                    if not self.client._reconnect:
                        raise
                link = await self.client._ready("work")  # a new one has subscribed
        except BaseException:
            self.client._all_workers.pop(self, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sid = self.sid
        try:
            if kind is None and self._auto_done and self._last is not None and self._error is None:
                await self._last.done()
            if self._error is None and sid:
                self.client._workers.pop(sid, None)
                self.client._all_workers.pop(self, None)
                if self.client._connection is not None:  # else it ended with the connection
                    await self.client.ask(MessageType.UNSUBSCRIBE, {"sid": sid}, retry=False)
        except (ConnectionLost, OperationTimeout, OverhopError):
            if kind is None and self._auto_done and self._last is not None and not self._last._ended:
                raise
        finally:
            self.fail(ClientClosed("the worker's block was left"))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Job:
        if self._auto_done and self._last is not None:
            last, self._last = self._last, None
            await last.done()
        while not self._buffer:
            if self._error is not None:
                raise again(self._error)
            waiter: asyncio.Future[None] = self.client._loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except BaseException:
                if waiter.done() and not waiter.cancelled():
                    self._wake_one()  # what was meant for this task goes to another
                raise
        job = self._buffer.popleft()
        self._out[job.jid] = job
        self._last = job
        return job

    async def end(self, job: Job, type: int, told: dict[str, Any]) -> None:
        """DONE or FAIL of a job."""
        if job._ended:
            raise JobNotActive("JOB_NOT_ACTIVE", f"{job.jid} was ended before")
        job._ended = True
        connections = self.client.reconnects
        try:
            await self.client.ask(type, told)
        except JobNotActive:
            # The answer to the first of two DONEs may have been lost with its connection.
            if type != MessageType.DONE or self.client.reconnects == connections:
                raise
            record = await self.client.job(job.jid)
            if record is None or record["status"] != "completed":
                raise
        except (ConnectionLost, OperationTimeout):
            job._ended = False
            raise
        finally:
            if job._ended and self._out.get(job.jid) is job:
                del self._out[job.jid]
                self._give_back(1)
            if self._last is job and job._ended:
                self._last = None

    def _give_back(self, credits: int) -> None:
        """Lets the server push more, many at a time."""
        self._owed += credits
        link = self.client._connection
        if link is not None and self.sid and self._error is None and 2 * self._owed >= self._credits:
            owed, self._owed = self._owed, 0
            answer = link.call(MessageType.CREDIT, {"sid": self.sid, "credits": owed})
            answer.add_done_callback(self._credited)

    def _credited(self, answer: asyncio.Future[Message]) -> None:
        error = None if answer.cancelled() else answer.exception()
        if isinstance(error, OverhopError):
            self.fail(error)  # the subscription ended with its queue

    def _wake_one(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    # --- what the client tells --------------------------------------------------------------------------------

    def on_push(self, message: Message) -> None:
        if message.type == MessageType.ENDED:
            self.fail(QueueNotFound("QUEUE_NOT_FOUND", f"the queue {self.queue!r} was removed"))
        else:
            self.on_job(Job(self, message.payload))

    def on_job(self, job: Job) -> None:
        held = self._out.get(job.jid)
        if held is not None:
            held.attempt = job.attempt  # it came again while it is being worked on: it is this worker's still
            self._give_back(1)
            return
        self._buffer.append(job)
        self._wake_one()

    def on_link_lost(self) -> None:
        """What was not handed out yet is the server's again."""
        self._buffer.clear()
        self.sid = ""

    async def relink(self, link: Link) -> None:
        """Goes on with a new connection. The jobs that are being worked on have their credits still."""
        self.on_link_lost()
        self._owed = 0
        await self.client.subscribe(self, link, max(0, self._credits - len(self._out)))

    def fail(self, error: ClientError) -> None:
        """Ends it: whoever waits gets the error."""
        if self._error is None:
            self._error = error
        self._buffer.clear()
        self.client._workers.pop(self.sid, None)
        self.client._all_workers.pop(self, None)
        while self._waiters:
            self._wake_one()


def job_fields(
    queue: str,
    payload: object,
    scheduled_at: datetime | None,
    max_attempts: int | None,
    retry_interval: float | None,
) -> dict[str, Any]:
    """The payload of ENQUEUE."""
    fields: dict[str, Any] = {"q": queue, "job_payload": payload}
    if scheduled_at is not None:
        if scheduled_at.tzinfo is None:
            raise ValueError("scheduled_at needs a time zone")
        fields["scheduled_at"] = scheduled_at.astimezone(UTC).isoformat()
    if max_attempts is not None:
        fields["max_attempts"] = max_attempts
    if retry_interval is not None:
        fields["retry_interval_ms"] = max(1, round(retry_interval * 1000))
    return fields
