"""A queue through everything that can happen to it, beside a model that fits on a page: workers that come and go, jobs
that are delayed, done, failed and too late, pauses, time, and restarts."""

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from hypothesis.strategies import booleans, data, integers, sampled_from

from headrace.wire import overhop as wire
from headrace.wire.overhop import MessageType as T
from tests.sessions.passive_overhop import SECOND, OverhopGateway, Peer

LIMIT = 3  # of the queue's concurrency
DEADLINE = 60 * SECOND


class ModelJob:
    def __init__(self, not_before: int, attempts: int, retry: int) -> None:
        self.not_before = not_before
        self.attempts = attempts
        self.retry = retry
        self.deliveries = 0
        self.counted = True  # whether the number of deliveries is known: a restart may forget a first one
        self.written = False  # unless it was written, as when it was failed
        self.blurred = False  # a restart does not know whether it was delivered before
        self.holder: Peer | None = None
        self.due = 0  # of the holder's time
        self.end = ""  # "completed", "failed" or "removed"


class Jobs(RuleBasedStateMachine):
    gateway: OverhopGateway

    @initialize()
    def begin(self) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="headrace-overhop-")
        self.gateway = OverhopGateway(Path(self.directory.name), queues={"keep_finished": 10_000})
        self.jobs: dict[str, ModelJob] = {}
        self.workers: dict[Peer, str] = {}
        self.credits: dict[Peer, int] = {}
        self.paused = False
        self.maker = self.gateway.worker()
        self.maker.ok(T.ADDQUEUE, name="q", config={"concurrency_limit": LIMIT})

    # --- what happens ---------------------------------------------------------------------------------------

    @rule(delay=sampled_from([0, 0, 0, 5, 100]), attempts=integers(1, 3), retry=integers(1, 30))
    def enqueue(self, delay: int, attempts: int, retry: int) -> None:
        at = self.gateway.now + delay * SECOND
        jid = self.maker.enqueue(
            "q",
            len(self.jobs),
            scheduled_at=wire.time_text(at) if delay else None,
            max_attempts=attempts,
            retry_interval_ms=retry * 1000,
        )
        self.jobs[jid] = ModelJob(at if delay else 0, attempts, retry)

    @precondition(lambda self: len(self.workers) < 4)
    @rule(credits=integers(0, 5))
    def arrive(self, credits: int) -> None:
        peer = self.gateway.worker()
        self.workers[peer] = peer.subscribe("q", credits)
        self.credits[peer] = credits

    @precondition(lambda self: self.workers)
    @rule(chosen=data(), unsubscribe=booleans())
    def leave(self, chosen: Any, unsubscribe: bool) -> None:
        peer = chosen.draw(sampled_from(list(self.workers)))
        self.take(peer)
        if unsubscribe:
            peer.ok(T.UNSUBSCRIBE, sid=self.workers[peer])
        peer.leave()
        del self.workers[peer], self.credits[peer]
        for job in self.jobs.values():
            if job.holder is peer:
                self.let_go(job, self.gateway.now)

    @precondition(lambda self: self.workers)
    @rule(chosen=data(), credits=integers(1, 4))
    def credit(self, chosen: Any, credits: int) -> None:
        peer = chosen.draw(sampled_from(list(self.workers)))
        peer.ok(T.CREDIT, sid=self.workers[peer], credits=credits)
        self.credits[peer] += credits

    @precondition(lambda self: self.workers)
    @rule(chosen=data())
    def receive(self, chosen: Any) -> None:
        self.take(chosen.draw(sampled_from(list(self.workers))))

    @precondition(lambda self: self.workers and self.jobs)
    @rule(chosen=data(), kind=sampled_from([T.DONE, T.DONE, T.FAIL, T.EXTEND]))
    def end(self, chosen: Any, kind: int) -> None:
        peer = chosen.draw(sampled_from(list(self.workers)))
        self.take(peer)
        jid = chosen.draw(sampled_from(list(self.jobs)))
        job = self.jobs[jid]
        self.pass_time()
        late = kind == T.DONE and job.holder is None and not job.end and (job.deliveries > 0 or job.blurred)
        answer = peer.ask(kind, jid=jid)
        if job.holder is not peer and not late:
            assert answer.payload["code"] == "JOB_NOT_ACTIVE"
            return
        if late and answer.type == T.ERR and (job.blurred or not job.counted):
            return
        assert answer.type == T.OK, answer
        if kind == T.DONE:
            job.end, job.holder = "completed", None
        elif kind == T.EXTEND:
            job.due = self.gateway.now + DEADLINE
        else:
            job.written = True
            self.let_go(job, self.gateway.now + job.retry * SECOND)

    @precondition(lambda self: self.jobs)
    @rule(chosen=data())
    def remove(self, chosen: Any) -> None:
        jid = chosen.draw(sampled_from(list(self.jobs)))
        status = self.maker.ok(T.JOB, jid=jid).get("status")
        answer = self.maker.ask(T.RMJOB, jid=jid)
        if status in ("delayed", "completed", "failed"):
            assert answer.type == T.OK
            self.jobs[jid].end = "removed"
        else:
            code = "JOB_NOT_FOUND" if status is None else "JOB_STATUS_NOT_REMOVABLE"
            assert answer.payload["code"] == code

    @rule(seconds=sampled_from([1, 5, 30, 59, 61, 200]))
    def wait(self, seconds: int) -> None:
        self.gateway.elapse(seconds)
        self.pass_time()

    @rule()
    def pause_or_resume(self) -> None:
        self.maker.ok(T.RESUME if self.paused else T.PAUSE, q="q")
        self.paused = not self.paused

    @rule()
    def restart(self) -> None:
        for peer in self.workers:
            self.take(peer)
        self.gateway.restart()
        self.workers, self.credits = {}, {}
        self.maker = self.gateway.worker()
        for job in self.jobs.values():
            job.counted = job.counted and (job.written or job.deliveries != 1)
            job.blurred = True
            if job.holder is not None:
                # One that had its last delivery is waited for a little longer: it may still be finished.
                job.holder = None
                job.not_before = 0

    # --- the model ------------------------------------------------------------------------------------------

    def let_go(self, job: ModelJob, again: int) -> None:
        job.holder = None
        if job.deliveries >= job.attempts and job.counted:
            job.end = "failed"
        else:
            job.not_before = again

    def pass_time(self) -> None:
        for job in self.jobs.values():
            if job.holder is not None and job.due <= self.gateway.now:
                self.let_go(job, self.gateway.now)

    def take(self, peer: Peer) -> None:
        """What is pushed to a worker may be pushed to it."""
        self.pass_time()
        for told in peer.jobs():
            job = self.jobs[told["jid"]]
            assert not job.end, "it was ended before"
            assert job.holder is None, "another one has it"
            assert job.not_before <= self.gateway.now, "its time has not come"
            assert not self.paused
            assert told["sid"] == self.workers[peer]
            self.credits[peer] -= 1
            assert self.credits[peer] >= 0, "there was no credit for it"
            if job.counted:
                assert told["attempt"] == job.deliveries + 1
            job.deliveries = told["attempt"]
            job.counted = True
            job.blurred = False
            assert job.deliveries <= job.attempts
            job.holder = peer
            job.due = self.gateway.now + DEADLINE
            assert sum(one.holder is not None for one in self.jobs.values()) <= LIMIT

    @invariant()
    def states_are_those_of_the_model(self) -> None:
        if not hasattr(self, "gateway"):
            return
        self.gateway.elapse(0)  # what had its last attempt is buried by a tick
        for peer in self.workers:
            self.take(peer)
        counts = dict.fromkeys(("new", "waiting", "delayed", "active", "completed", "failed"), 0)
        for jid, job in self.jobs.items():
            status = self.maker.ok(T.JOB, jid=jid).get("status")
            if job.end == "removed":
                assert status is None
                continue
            assert status is not None
            counts[status] += 1
            if job.end:
                assert status == job.end
            elif job.holder is not None:
                assert status == "active"
            else:
                assert status in ("waiting", "delayed", "failed")
                if status == "failed":  # after a restart, whose last attempt was waited for
                    assert job.deliveries >= job.attempts or not job.counted
                    job.end = "failed"
        assert self.maker.ok(T.QSTATS, q="q")["stats"] == counts

    def teardown(self) -> None:
        """With a worker that finishes everything, everything is finished."""
        if not hasattr(self, "gateway"):
            return
        if self.paused:
            self.maker.ok(T.RESUME, q="q")
            self.paused = False
        for peer in list(self.workers):
            peer.leave()
        for job in self.jobs.values():
            job.holder = None
        worker = self.gateway.worker()
        worker.subscribe("q", 10_000)
        for _ in range(30):
            self.gateway.elapse(30)
            while told := worker.jobs():
                for one in told:
                    assert self.jobs[one["jid"]].end in ("", "failed")
                    assert worker.ok(T.DONE, jid=one["jid"]) == {}
                    self.jobs[one["jid"]].end = "completed"
        for jid, job in self.jobs.items():
            status = self.maker.ok(T.JOB, jid=jid).get("status")
            assert status in (("completed", "failed") if job.end != "removed" else (None,)), (
                status,
                vars(job),
            )
        self.gateway.close()
        self.directory.cleanup()


def test_lives_of_a_queue(soak: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Jobs, settings=settings(max_examples=30 * soak, stateful_step_count=30, deadline=None)
    )
