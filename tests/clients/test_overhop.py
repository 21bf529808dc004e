"""The Overhop client against real sessions that are cut, restarted and slow, and against a scripted server."""

import asyncio
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headrace.clients.overhop import (
    ClientClosed,
    ConnectionFailed,
    ConnectionLost,
    Job,
    JobNotActive,
    OperationTimeout,
    OverhopClient,
    OverhopError,
    ProtocolError,
    QueueExists,
    QueueNotFound,
)
from headrace.wire import overhop as wire
from tests.clients.overhop_servers import OverhopBroker, OverhopPeer, OverhopScripted
from tests.streams import make_certificates, on_both_loops, run, until


@on_both_loops
def test_job_is_put_in_worked_on_and_done(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with OverhopBroker(tmp_path) as broker, OverhopClient(broker.address) as client:
            assert client.connected
            assert client.wid
            jid = await client.enqueue("mail", {"to": "you", "data": b"\x00"})
            async with client.work("mail", credits=4) as jobs:
                async for job in jobs:
                    assert (job.jid, job.payload) == (jid, {"to": "you", "data": b"\x00"})
                    assert (job.attempt, job.topic, job.deadline) == (1, "queue.mail.jobs", 60.0)
                    assert await client.stats("mail") == {
                        "new": 0,
                        "waiting": 0,
                        "delayed": 0,
                        "active": 1,
                        "completed": 0,
                        "failed": 0,
                    }
                    await job.extend()
                    await job.done()
                    with pytest.raises(JobNotActive):
                        await job.done()
                    break
            assert broker.stats() == {"completed": 1}
            assert await client.ping() > 0

    run(loop, main)


@pytest.mark.parametrize("credits", [1, 3, 64])
def test_every_job_comes_once_in_order_whatever_the_credits(tmp_path: Path, credits: int) -> None:
    async def main() -> None:
        async with OverhopBroker(tmp_path) as broker, OverhopClient(broker.address) as client:
            await client.enqueue_many("mail", range(500))
            got = []
            async with client.work("mail", credits=credits, auto_done=True) as jobs:
                async for job in jobs:
                    got.append(job.payload)
                    queue = broker.queues.get("mail")
                    assert queue is not None
                    assert queue.subscription.held <= credits
                    if len(got) == 500:
                        break
            assert got == list(range(500))
            await until(lambda: broker.stats() == {"completed": 500})

    run("uvloop", main)


def test_several_tasks_share_a_worker(tmp_path: Path) -> None:
    async def main() -> None:
        async with OverhopBroker(tmp_path) as broker, OverhopClient(broker.address) as client:
            got: list[int] = []

            async def work(jobs: object) -> None:
                async for job in jobs:  # type: ignore[attr-defined]
                    await asyncio.sleep(0)
                    got.append(job.payload)
                    await job.done()

            async with client.work("mail", credits=10) as jobs:
                tasks = [asyncio.create_task(work(jobs)) for _ in range(5)]
                await client.enqueue_many("mail", range(200))
                await until(lambda: broker.stats().get("completed") == 200)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            assert sorted(got) == list(range(200))

    run("asyncio", main)


def test_failed_job_comes_again_and_ends_in_the_dead_letters(tmp_path: Path) -> None:
    async def main() -> None:
        async with OverhopBroker(tmp_path) as broker, OverhopClient(broker.address) as client:
            jid = await client.enqueue("mail", 1, max_attempts=3, retry_interval=0.01)
            attempts = []
            async with client.work("mail") as jobs:
                async for job in jobs:
                    attempts.append(job.attempt)
                    await job.fail("not today", retry_in=0.001 if len(attempts) == 2 else None)
                    if len(attempts) == 3:
                        break
            assert attempts == [1, 2, 3]
            record = await client.job(jid)
            assert record is not None
            assert (record["status"], record["runtime"]["attempts_so_far"]) == ("failed", 3)

    run("uvloop", main)


def test_worker_that_waits_hears_that_its_queue_was_removed(tmp_path: Path) -> None:
    async def main() -> None:
        async with OverhopBroker(tmp_path) as broker, OverhopClient(broker.address) as client:
            await client.add_queue("short")
            async with client.work("short") as jobs:
                waiting = asyncio.create_task(anext(jobs))
                await client.remove_queue("short")
                with pytest.raises(QueueNotFound, match="'short' was removed"):
                    await waiting
            await client.enqueue("mail", 1)
            async with client.work("mail") as jobs:
                assert (await anext(jobs)).payload == 1

    run("asyncio", main)


def test_scheduled_job_waits(tmp_path: Path) -> None:
    async def main() -> None:
        async with OverhopBroker(tmp_path) as broker, OverhopClient(broker.address) as client:
            later = datetime.now(UTC) + timedelta(hours=1)
            jid = await client.enqueue("mail", scheduled_at=later)
            assert broker.stats() == {"delayed": 1}
            record = await client.job(jid)
            assert record is not None
            assert datetime.fromisoformat(record["execution_start_at"]) == later
            with pytest.raises(ValueError, match="time zone"):
                await client.enqueue("mail", scheduled_at=datetime(2026, 1, 1))
            await client.remove_job(jid)
            assert broker.stats() == {}

    run("uvloop", main)


def test_queues_are_looked_after(tmp_path: Path) -> None:
    async def main() -> None:
        async with OverhopBroker(tmp_path) as broker, OverhopClient(broker.address) as client:
            qid = await client.add_queue("news", concurrency_limit=2, allow_job_overrides=False)
            found = await client.queue("news")
            assert found is not None
            assert (found["id"], found["config"]["concurrency_limit"]) == (qid, 2)
            assert [queue["name"] for queue in await client.queues()] == ["_system", "mail", "news"]
            await client.pause("news")
            assert (await client.status())["queues"]["news"]["state"] == "paused"
            await client.resume("news")
            ids = await client.enqueue_many("news", "abc")
            assert [job["jid"] for job in await client.jobs("news", "waiting", page=2, page_size=2)] == ids[
                2:
            ]
            with pytest.raises(QueueExists):
                await client.add_queue("news")
            with pytest.raises(OverhopError, match="QUEUE_NOT_EMPTY"):
                await client.remove_queue("news")
            await client.add_queue("empty")
            await client.remove_queue("empty")
            assert await client.queue("empty") is None
            assert await client.job("news:00000000-0000-4000-8000-000000000000") is None

    run("uvloop", main)


def test_refusal_is_raised_as_what_it_is(tmp_path: Path) -> None:
    async def main() -> None:
        async with OverhopBroker(tmp_path) as broker, OverhopClient(broker.address) as client:
            with pytest.raises(QueueNotFound) as caught:
                await client.enqueue("missing")
            assert caught.value.code == "QUEUE_NOT_FOUND"
            with pytest.raises(QueueNotFound):
                async with client.work("missing"):
                    pass
            with pytest.raises(OverhopError, match="INVALID_MAX_ATTEMPTS"):
                await client.enqueue("mail", max_attempts=0)
            with pytest.raises(QueueNotFound):
                await client.enqueue_many("missing", range(10))
            async with client.work("mail"):
                with pytest.raises(OverhopError, match="DUPLICATE_SUBSCRIPTION"):
                    async with client.work("mail"):
                        pass
            for wrong in (1.5, {1: 2}, 2**63):
                with pytest.raises((TypeError, ValueError)):
                    await client.enqueue("mail", wrong)
            assert client.reconnects == 0

    run("uvloop", main)


def test_lost_connection_is_made_again_and_work_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            OverhopBroker(tmp_path, keep_finished=5000) as broker,
            OverhopClient(broker.address) as client,
        ):
            await client.enqueue_many("mail", range(300))
            done: list[int] = []
            async with client.work("mail", credits=20) as jobs:
                async for job in jobs:
                    if len(done) in (50, 120, 200):
                        await broker.cut()
                    await job.done()
                    done.append(job.payload)
                    if broker.stats().get("completed") == 300:
                        break
            assert sorted(set(done)) == list(range(300))
            assert len(done) == 300  # nobody else was there to take them: none was worked on twice
            assert client.reconnects == 3

    run("uvloop", main)


def test_restarted_server_is_found_again_and_nothing_is_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with OverhopBroker(tmp_path) as broker, OverhopClient(broker.address) as client:
            first = await client.enqueue("mail", "before")
            await broker.stop()
            pending = asyncio.create_task(client.enqueue("mail", "meanwhile"))
            await asyncio.sleep(0.05)
            await broker.start()
            second = await pending
            got = []
            async with client.work("mail", auto_done=True) as jobs:
                async for job in jobs:
                    got.append(job.jid)
                    if len(got) == 2:
                        break
            assert got == [first, second]

    run("asyncio", main)


def test_job_that_went_to_another_cannot_be_finished(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            OverhopBroker(tmp_path, deadline=0.1) as broker,
            OverhopClient(broker.address) as slow,
            OverhopClient(broker.address) as other,
        ):
            await slow.enqueue("mail", 1)

            async def first(worker: object) -> Job:
                async for job in worker:  # type: ignore[attr-defined]
                    return job
                raise AssertionError

            async with slow.work("mail", credits=1) as jobs:
                lost = await first(jobs)
                async with other.work("mail", credits=1) as others:
                    taken = await first(others)
                    assert (taken.jid, taken.attempt) == (lost.jid, 2)
                    with pytest.raises(JobNotActive):
                        await lost.done()
                    await taken.done()

    run("uvloop", main)


def test_without_reconnecting_everything_gets_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async with OverhopBroker(tmp_path) as broker:
            client = OverhopClient(broker.address, reconnect=False)
            await client.connect()
            async with client.work("mail") as jobs:
                waiting = asyncio.ensure_future(anext(jobs))
                await asyncio.sleep(0)
                await broker.cut()
                with pytest.raises(ConnectionLost):
                    await waiting
            with pytest.raises(ConnectionLost):
                await client.enqueue("mail")
            await client.close()

    run("uvloop", main)


def test_closed_client_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with OverhopBroker(tmp_path) as broker:
            client = OverhopClient(broker.address)
            with pytest.raises(ClientClosed):
                await client.enqueue("mail")
            async with client:
                pass
            with pytest.raises(ClientClosed):
                await client.enqueue("mail")

    run("uvloop", main)


def test_what_is_under_way_when_the_client_is_closed_is_told_so() -> None:
    async def main() -> None:
        async def deaf(peer: OverhopPeer) -> None:
            await peer.greet()

        async with OverhopScripted(deaf) as server:
            client = OverhopClient(server.address)
            await client.connect()
            asking = asyncio.ensure_future(client.ping())
            await asyncio.sleep(0)
            await client.close()
            with pytest.raises(ClientClosed):
                await asking

    run("uvloop", main)


def test_worker_waits_for_a_lost_connection_no_longer_than_it_may(tmp_path: Path) -> None:
    async def main() -> None:
        async with OverhopBroker(tmp_path) as broker:
            client = OverhopClient(broker.address, timeout=0.2, reconnect_delay=5)
            await client.connect()
            await broker.cut()
            await until(lambda: not client.connected)
            with pytest.raises(OperationTimeout, match="cannot work: there was no connection"):
                await client.work("mail").__aenter__()
            await client.close()

    run("uvloop", main)


def test_server_that_is_not_there_or_speaks_something_else_is_told() -> None:
    async def main() -> None:
        async def nonsense(peer: OverhopPeer) -> None:
            peer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        async def silence(peer: OverhopPeer) -> None:
            await peer.message()

        async def refusal(peer: OverhopPeer) -> None:
            message = await peer.message()
            peer.send(102, message.rid, {"code": "NO", "msg": "not you"})

        async with OverhopScripted(nonsense, silence, refusal) as server:
            with pytest.raises(ProtocolError):
                await OverhopClient(server.address).connect()
            with pytest.raises(OperationTimeout):
                await OverhopClient(server.address, timeout=0.1).connect()
            with pytest.raises(OverhopError, match=r"not you \(NO\)"):
                await OverhopClient(server.address).connect()
        with pytest.raises(ConnectionFailed):
            await OverhopClient(server.address).connect()

    run("uvloop", main)


def test_request_that_is_not_answered_in_time_is_told_and_the_connection_made_anew() -> None:
    async def main() -> None:
        async def deaf(peer: OverhopPeer) -> None:
            await peer.greet()

        async def awake(peer: OverhopPeer) -> None:
            await peer.greet()
            peer.send(105, (await peer.message()).rid, {"server_time": "2026-01-01T00:00:00Z"})

        async with (
            OverhopScripted(deaf, awake) as server,
            OverhopClient(server.address, timeout=0.2) as client,
        ):
            with pytest.raises(OperationTimeout, match="did not answer"):
                await client.ping()
            await client.ping()
            assert client.reconnects == 1

    run("uvloop", main)


def test_jobs_that_are_sent_again_keep_their_order() -> None:
    sent: list[list[object]] = [[], []]

    async def loses_all(peer: OverhopPeer) -> None:
        await peer.greet()
        for _ in range(50):
            sent[0].append((await peer.message()).payload["job_payload"])
        peer.hang_up()

    async def takes_all(peer: OverhopPeer) -> None:
        await peer.greet()
        for i in range(50):
            message = await peer.message()
            sent[1].append(message.payload["job_payload"])
            peer.send(101, message.rid, {"jid": str(i)})

    async def main() -> None:
        async with OverhopScripted(loses_all, takes_all) as server:
            client = OverhopClient(server.address)
            await client.connect()
            ids = await client.enqueue_many("mail", list(range(50)))
            assert ids == [str(i) for i in range(50)]
            await client.close()
        assert sent == [list(range(50)), list(range(50))]

    run("asyncio", main)


def test_jobs_that_come_with_the_answer_to_subscribe_are_not_lost() -> None:
    async def main() -> None:
        async def eager(peer: OverhopPeer) -> None:
            await peer.greet()
            message = await peer.message()
            push = {"sid": "s", "jid": "mail:1", "job_payload": 7, "attempt": 1}
            peer.write(wire.encode(101, message.rid, {"sid": "s"}) + wire.encode(110, "0", push))
            peer.send(101, (await peer.message()).rid, {})

        async with (
            OverhopScripted(eager) as server,
            OverhopClient(server.address, reconnect=False) as client,
            client.work("mail", credits=5) as jobs,
        ):
            assert (await anext(jobs)).payload == 7

    run("uvloop", main)


@pytest.mark.parametrize("over", ["unix", "tls"])
def test_unix_sockets_and_tls_carry_it_too(tmp_path: Path, over: str) -> None:
    async def main() -> None:
        certificates = make_certificates(tmp_path)
        server_side = client_side = None
        if over == "tls":
            server_side, client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificates.client()
            server_side.load_cert_chain(certificates.cert, certificates.key)
        unix = tmp_path / "socket" if over == "unix" else None
        async with (
            OverhopBroker(tmp_path, unix=unix, tls=server_side) as broker,
            OverhopClient(broker.address, tls=client_side) as client,
        ):
            await client.enqueue("mail", "x")
            async with client.work("mail", auto_done=True) as jobs:
                assert (await anext(jobs)).payload == "x"

    run("uvloop", main)


def test_connection_that_ends_behind_the_answer_to_a_subscription_is_made_again(tmp_path: Path) -> None:
    async def subscribed(peer: OverhopPeer) -> None:
        await peer.greet()
        peer.send(101, (await peer.message()).rid, {"sid": "s"})

    async def once(peer: OverhopPeer) -> None:
        await subscribed(peer)
        await asyncio.sleep(0.01)
        peer.hang_up()

    async def nonsense(peer: OverhopPeer) -> None:
        await peer.greet()
        # In one write, so that the client has both before it has done anything with the first.
        peer.write(wire.encode(101, (await peer.message()).rid, {"sid": "s"}) + bytes(4))

    async def sane(peer: OverhopPeer) -> None:
        await subscribed(peer)
        peer.send(105, (await peer.message()).rid, {})
        peer.send(101, (await peer.message()).rid, {})  # to UNSUBSCRIBE

    async def main() -> None:
        async with (
            OverhopScripted(once, nonsense, sane) as server,
            OverhopClient(server.address, reconnect_delay=0.001) as client,
            client.work("mail"),
        ):
            await until(lambda: not client.connected)
            assert await client.ping() > 0

    run("asyncio", main)


def test_jobs_of_a_connection_that_was_lost_before_its_use_are_not_kept() -> None:
    async def subscribed(peer: OverhopPeer, *subscriptions: str) -> None:
        await peer.greet()
        for sid in subscriptions:
            peer.send(101, (await peer.message()).rid, {"sid": sid})

    def push(peer: OverhopPeer, sid: str, attempt: int) -> None:
        peer.send(110, "0", {"sid": sid, "jid": "mail:1", "job_payload": 7, "attempt": attempt})

    async def once(peer: OverhopPeer) -> None:
        await subscribed(peer, "a1", "b1")
        await asyncio.sleep(0.05)
        peer.hang_up()

    async def half(peer: OverhopPeer) -> None:
        await subscribed(peer, "a2")
        push(peer, "a2", 1)
        await peer.message()
        await asyncio.sleep(0.05)
        peer.hang_up()

    async def whole(peer: OverhopPeer) -> None:
        await subscribed(peer, "a3", "b3")
        push(peer, "a3", 2)
        while True:
            peer.send(101, (await peer.message()).rid, {})

    async def main() -> None:
        async with (
            OverhopScripted(once, half, whole) as server,
            OverhopClient(server.address, reconnect_delay=0.001) as client,
            client.work("mail") as jobs,
            client.work("news"),
        ):
            await until(lambda: client.reconnects)
            job = await anext(jobs)
            assert (job.jid, job.attempt) == ("mail:1", 2)
            assert list(jobs._buffer) == []
            assert sorted(client._workers) == ["a3", "b3"]

    run("uvloop", main)


def test_a_queue_that_is_removed_right_behind_the_answer_to_subscribe_ends_its_worker() -> None:
    async def removed(peer: OverhopPeer) -> None:
        await peer.greet()
        message = await peer.message()
        peer.write(wire.encode(101, message.rid, {"sid": "s"}) + wire.encode(111, "0", {"sid": "s"}))

    async def main() -> None:
        async with (
            OverhopScripted(removed) as server,
            OverhopClient(server.address, reconnect=False) as client,
            client.work("mail") as jobs,
            asyncio.timeout(5),
        ):
            with pytest.raises(QueueNotFound, match="'mail' was removed"):
                await anext(jobs)

    run("uvloop", main)


def test_jobs_in_hand_count_among_the_credits_of_the_next_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            OverhopBroker(tmp_path) as broker,
            OverhopClient(broker.address, reconnect_delay=0.001) as client,
        ):
            await client.enqueue_many("mail", range(20))
            queue = broker.queues.get("mail")
            assert queue is not None
            async with client.work("mail", credits=2) as jobs:
                for turn in range(1, 6):
                    held = [await anext(jobs), await anext(jobs)]
                    await broker.cut()
                    await until(lambda turn=turn: client.reconnects == turn)  # type: ignore[misc]
                    await client.ping()
                    assert queue.subscription.held == 0  # both credits are in hand
                    for job in held:
                        await job.done()
                    assert broker.stats()["completed"] == 2 * turn
                    await until(lambda: queue.subscription.held == 2)
                    await client.ping()
                    assert queue.subscription.held == 2

    run("asyncio", main)
