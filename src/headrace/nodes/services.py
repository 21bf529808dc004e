"""The gateway as a service provider: requests to a zeroctl service become messages for whoever works on them
elsewhere, an Overhop queue or another protocol's subscribers. It names the task, answers `on-start`, and answers
`on-finish` when the work is reported as done.

A request is taken from a durable queue subscription, so it survives a restart. Job, answer and acknowledgement are in
one log; a crash between them makes the same job again, under the same task id, which is made from the request's place
in the log.

Answers are published by the gateway on behalf of whoever asked. So each protocol's way in marks a request with the flag
ANSWERS if its sender could publish to the return paths itself; a request without it that names any is refused.

How a finished job is reported: finished() with the job's header, by whoever is in this process (a queue's session), or
a message on the service's `finished` topic, by anybody. Where there is neither, `on-start` says `no-on-finish: 1`.
"""

import functools
import json
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from headrace import events
from headrace.bus import ANSWERS, Bus, Member, Received
from headrace.config.schema import ServiceConfig
from headrace.errors import BusError, LogError, LogFailed, LogFull
from headrace.nodes.durable import ZEROCTL, drop_others, durable_member
from headrace.nodes.headers import encode_header, required, word
from headrace.wake import CallbackWaker
from headrace.wire.zeroctl import is_key_text

TASK_NOTE: Final = b"zeroctl/task/"
BATCH: Final = 64  # requests in one turn of the loop
RETRY_SECONDS: Final = 0.2
MOST_OWED: Final = 1000  # answers to `on-finish` that wait for room in the log

log = events.get("zeroctl")


class Service:
    """One entry of [[services]]."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.requests: Member
        self.reports: Member | None = None


class Services:
    """All services that this gateway provides."""

    def __init__(
        self,
        bus: Bus,
        node_name: str,
        node_uuid: str,
        services: Sequence[ServiceConfig],
        schedule: Callable[[Callable[[], object]], object],
    ) -> None:
        self._bus = bus
        self._node_name = node_name
        self._node_uuid = node_uuid
        self._schedule = schedule
        self._scheduled = False
        self._stopped = False
        self._made: set[int] = set()  # offsets of requests whose job is made, but not answered yet
        self._owed: deque[tuple[bytes, bool]] = deque()  # ends of jobs that the log had no room to tell of
        self.accepted = 0
        self.refused = 0
        self.done = 0
        self.told_here: Callable[[str], bool] = lambda topic: False
        """Whether somebody in this process calls finished() for the jobs of a topic."""
        self._services = [Service(one) for one in services]
        for service in self._services:
            name = service.config.name
            waker = CallbackWaker(self._wake)
            service.requests = durable_member(bus, service.config.key, f"service:{name}", waker)
            if service.config.finished:
                service.reports = durable_member(
                    bus, service.config.finished, f"service-finished:{name}", waker
                )
        kept = {(f"service:{one.name}", one.key) for one in services}
        kept |= {(f"service-finished:{one.name}", one.finished) for one in services}
        drop_others(bus, "service:", kept)
        drop_others(bus, "service-finished:", kept)
        if self._services:
            self._wake()

    @property
    def filters(self) -> list[str]:
        """The requests that are taken."""
        return [service.config.key for service in self._services]

    def counters(self) -> dict[str, int]:
        """What was counted since the start, by name."""
        return {
            "service_accepted": self.accepted,
            "service_refused": self.refused,
            "service_done": self.done,
        }

    def described(self) -> dict[str, Any]:
        """The services as a heartbeat says them."""
        return {
            service.config.name: {"path": service.config.key, "description": service.config.description}
            for service in self._services
        }

    def on_job(self, protocol: int, flags: int, header: bytes, completed: bool) -> None:
        """A queue's job was completed or given up; most of them are not of services."""
        if protocol != ZEROCTL or not flags & ANSWERS or not self._services or b'"task-id"' not in header:
            return
        if self._owed or not self._tell(header, completed):
            if len(self._owed) < MOST_OWED:
                self._owed.append((header, completed))
            else:
                log.limited("service.not_told", reason=f"{MOST_OWED} answers wait for room in the log")

    def tick(self) -> None:
        """Tells of the ends of jobs that the log had no room for. To be called about once a second."""
        while self._owed and not self._stopped and not self._bus.closed and self._tell(*self._owed[0]):
            self._owed.popleft()

    def _tell(self, header: bytes, completed: bool) -> bool:
        """Whether there is nothing more to tell."""
        try:
            self.finished(header, ok=completed)
        except LogFull:
            return False
        except (LogError, BusError) as error:
            log.limited("service.not_told", reason=str(error))
        return True

    # --- work -----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._scheduled and not self._stopped:
            self._scheduled = True
            self._schedule(self.run)

    def run(self) -> None:
        """Serves what there is, a batch at a time."""
        self._scheduled = False
        if self._stopped or self._bus.closed:
            return
        for service in self._services:
            if self._drain(service.requests, functools.partial(self._accept, service)):
                self._wake()
            if service.reports is not None and self._drain(service.reports, self._report):
                self._wake()

    def _drain(self, member: Member, handle: Callable[[Received], None]) -> bool:
        """Whether there may be more."""
        for _ in range(BATCH):
            received = member.receive()
            if received is None:
                return False
            try:
                handle(received)
            except (LogFull, LogFailed) as error:
                # No room now: it is delivered again, and by then there may be some.
                log.limited("service.not_served", reason=str(error))
                member.subscription.reject(received.tag, delay=RETRY_SECONDS)
                return False
            member.subscription.ack(received.tag)
        return True

    def _accept(self, service: Service, request: Received) -> None:
        fields = header_of(request)
        on_start, on_finish = path(fields, "on-start"), path(fields, "on-finish")
        if (on_start or on_finish) and not request.flags & ANSWERS:
            self._refuse(service, None, fields, "its sender may not publish where the answers would go")
            return
        wrong = invalid(fields)
        if wrong:
            self._refuse(service, on_start, fields, wrong)
            return
        task = self._task_name(fields, request.offset)
        try:
            if request.offset not in self._made:
                self._make_job(service, request, fields, task, on_finish)
        except (LogFull, LogFailed):
            raise
        except (
            LogError,
            BusError,
        ) as error:  # it is too large with its task's name, or the topic cannot be made
            self._bus.forget(TASK_NOTE + task.encode())
            self._refuse(service, on_start, fields, str(error))
            return
        if on_start:
            can_tell = service.reports is not None or self.told_here(service.config.topic)
            more = {} if can_tell or not on_finish else {"no-on-finish": 1}
            self._answer(on_start, fields, {"ack": 1, "task-id": task, **more})
        self._made.discard(request.offset)

    def _make_job(
        self, service: Service, request: Received, fields: dict[str, Any], task: str, on_finish: str | None
    ) -> None:
        job = {key: value for key, value in fields.items() if not key.startswith("_transport-")}
        job["task-id"] = task
        if on_finish and service.reports is not None:
            note = {"on-finish": on_finish, "correlation-id": fields.get("correlation-id")}
            self._bus.note(TASK_NOTE + task.encode(), json.dumps(note).encode())
        self._bus.publish(
            service.config.topic,
            request.payload,
            headers=encode_header(job),
            protocol=ZEROCTL,
            confirmed=True,
            answers=bool(request.flags & ANSWERS),
        )
        self._made.add(request.offset)
        self.accepted += 1

    def _refuse(self, service: Service, where: str | None, fields: dict[str, Any], reason: str) -> None:
        if where:
            self._answer(where, fields, {"nak": 1, "reason": reason})
        self.refused += 1
        log.limited("service.refused", key=service.config.name, service=service.config.name, reason=reason)

    def _task_name(self, fields: dict[str, Any], offset: int) -> str:
        node = fields.get("node-name")
        number = uuid.uuid5(uuid.UUID(bytes=self._bus.log.id[:16].ljust(16, b"\0")), f"task {offset}")
        return f"{word(node if isinstance(node, str) else self._node_name)}.{number}"

    def _answer(self, where: str, request: dict[str, Any], what: dict[str, Any], body: bytes = b"") -> None:
        fields = required(self._node_name, self._node_uuid, body) | what
        if "correlation-id" in request and request["correlation-id"] is not None:
            fields["correlation-id"] = request["correlation-id"]
        try:
            self._bus.publish(where, body, headers=encode_header(fields), protocol=ZEROCTL, confirmed=True)
        except (LogFull, LogFailed):
            raise
        except (
            LogError,
            BusError,
        ) as error:  # such a topic cannot be made, or such a message: not later either
            log.limited("service.not_answered", topic=where, reason=str(error))

    # --- finished jobs --------------------------------------------------------------------------------------

    def finished(self, header: bytes, *, ok: bool = True, reason: str = "", result: bytes = b"") -> bool:
        """A job is done, or given up: `header` is that of the job's message, as the record has it. Whether somebody had
        asked to be told."""
        fields = as_object(header)
        on_finish, task = path(fields, "on-finish"), fields.get("task-id")
        if not on_finish or not isinstance(task, str):
            return False
        if self._bus.noted(TASK_NOTE + task.encode("utf-8", "replace")) is not None:
            return False  # the service's `finished` topic will tell
        self._finish(on_finish, fields, task, ok, reason, result)
        return True

    def _finish(
        self, where: str, fields: dict[str, Any], task: str, ok: bool, reason: str, result: bytes
    ) -> None:
        what: dict[str, Any] = {"ack": 1} if ok else {"nak": 1, "reason": reason or "the job failed"}
        self._answer(where, fields, {**what, "task-id": task}, result)
        self.done += 1

    def _report(self, report: Received) -> None:
        """A message on a `finished` topic: its header, or its body if that is a JSON object, has the `task-id`, and
        `nak` and `reason` if the job failed."""
        fields = header_of(report)
        if not isinstance(fields.get("task-id"), str):
            fields = as_object(report.payload)
        task = fields.get("task-id")
        if not isinstance(task, str):
            return
        key = TASK_NOTE + task.encode("utf-8", "replace")
        kept = self._bus.noted(key)
        if kept is None:  # reported before, or nobody asked
            return
        asked = json.loads(kept)
        reason = fields.get("reason")
        self._finish(
            asked["on-finish"],
            asked,
            task,
            not fields.get("nak"),
            reason if isinstance(reason, str) else "",
            report.payload,
        )
        self._bus.forget(key)

    def stop(self) -> None:
        self._stopped = True


def as_object(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def header_of(received: Received) -> dict[str, Any]:
    return as_object(received.headers)


def path(fields: dict[str, Any], name: str) -> str | None:
    """A return path, if it is one."""
    found = fields.get(name)
    return found if isinstance(found, str) and found.isascii() and is_key_text(found) else None


def invalid(fields: dict[str, Any]) -> str:
    """Why a request cannot become a job; empty if it can."""
    if "output-to" in fields and "maybe-output-to" in fields:
        return "output-to and maybe-output-to exclude each other"
    if "output-to" in fields:
        return "this service has no output"
    for name in ("on-start", "on-finish"):
        if name in fields and path(fields, name) is None:
            return f"{name} is not a routing key"
    return ""
