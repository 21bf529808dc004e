"""A zeroctl service whose requests are jobs of an Overhop queue: both sides with their real clients."""

import asyncio
import json
from pathlib import Path

import pytest

from headrace.bus import Bus
from headrace.clients.overhop import OverhopClient
from headrace.clients.zeroctl import NotAllowed, RequestRefused, ZeroctlClient
from headrace.log import Log, LogReader
from headrace.nodes.durable import ZEROCTL, durable_member
from headrace.nodes.headers import encode_header, required
from headrace.wake import CallbackWaker
from tests.gateway.gateways import PATIENCE, GatewayProcess

CONFIG = """
[[queues]]
name = "mail"

[[services]]
name = "mailer"
key = "service.mail.#"
topic = "queue.mail.jobs"

[[services]]
name = "void"
key = "service.void"
topic = "nobody.works.here"
"""

KEYS = """
[[keys]]
name = "asker"
key = "asker-key"
publish = ["service.#", "reply.#"]
subscribe = ["reply.#"]

[[keys]]
name = "door"
key = "door-key"
publish = ["cmd.#"]
subscribe = ["cmd.#"]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "headrace.toml"
    path.write_text(CONFIG)
    return path


def gateway_of(config: Path, *sets: str) -> GatewayProcess:
    return GatewayProcess(
        config.parent / "data",
        *sets,
        "listen.zeroctl.bind=127.0.0.1:0",
        "log.segment_bytes=16MiB",
        "log.retention_bytes=128MiB",
        "bus.max_deliveries=1",
        config=config,
    )


def test_request_is_told_when_a_worker_has_done_its_job_and_when_it_failed(config: Path) -> None:
    async def talk(gateway: GatewayProcess) -> None:
        asker = ZeroctlClient(gateway.places["zeroctl"], key="dev-key", node="asker")
        worker = OverhopClient(gateway.places["overhop"])
        async with asker, worker, worker.work("mail", credits=1) as jobs:
            good = await asker.request("service.mail.bulk", b"good")
            job = await anext(jobs)
            assert job.payload == b"good"
            await job.done()
            finished = await good.finished()
            assert finished.headers["ack"] == 1
            assert finished.headers["task-id"] == good.id

            bad = await asker.request("service.mail.bulk", b"bad")
            await (await anext(jobs)).fail("no such address")
            with pytest.raises(RequestRefused, match="failed"):
                await bad.finished()

    with gateway_of(config) as gateway:
        asyncio.run(talk(gateway))


def test_answers_go_only_where_the_requester_may_publish(config: Path) -> None:
    config.write_text(config.read_text() + KEYS)

    async def talk(gateway: GatewayProcess) -> None:
        at = gateway.places["zeroctl"]
        async with (
            ZeroctlClient(at, key="asker-key", node="asker") as asker,
            ZeroctlClient(at, key="door-key", node="door") as door,
            door.bind("cmd.door") as commands,
        ):
            for path in ("on-start", "on-finish"):
                with pytest.raises(NotAllowed, match="where the answer would go"):
                    await asker.publish("service.mail.bulk", b"x", {path: "cmd.door"}, confirm=True)
            task = await asker.request("service.mail.bulk", b"x")
            assert task.id
            await door.publish("cmd.door", b"last", confirm=True)
            assert (await anext(commands)).body == b"last"

    with gateway_of(config) as gateway:
        asyncio.run(talk(gateway))
        text = gateway.get("/metrics")[1]
    for event, count in (("return_paths_refused", 2), ("service_accepted", 1), ("service_refused", 0)):
        assert f'headrace_session_events_total{{event="{event}",protocol="zeroctl"}} {count}.0' in text


def test_who_cannot_be_told_is_told_so(config: Path) -> None:
    async def talk(gateway: GatewayProcess) -> None:
        async with ZeroctlClient(gateway.places["zeroctl"], key="dev-key", node="asker") as asker:
            task = await asker.request("service.void", b"x")
            assert not task.will_finish

    with gateway_of(config) as gateway:
        asyncio.run(talk(gateway))


@pytest.mark.parametrize("loop", ["asyncio", "auto"])
def test_requests_from_before_a_restart_find_the_queues_there(config: Path, loop: str) -> None:
    path = config.parent / "data" / "log"
    path.parent.mkdir()
    log = Log(path, segment_bytes=16 << 20, retention_bytes=128 << 20)
    bus = Bus(log)
    durable_member(bus, "service.mail.#", "service:mailer", CallbackWaker(lambda: None))
    fields = required("asker", "1" * 32, b"early") | {"on-start": "reply.start", "on-finish": "reply.finish"}
    bus.publish("service.mail.x", b"early", headers=encode_header(fields), protocol=ZEROCTL, answers=True)
    bus.close()
    log.close()

    async def work(gateway: GatewayProcess) -> object:
        async with OverhopClient(gateway.places["overhop"]) as worker, worker.work("mail", credits=1) as jobs:
            async with asyncio.timeout(PATIENCE):
                job = await anext(jobs)
            return job.payload

    with gateway_of(config, f"gateway.loop={loop}") as gateway:
        assert asyncio.run(work(gateway)) == b"early"
        with LogReader(path) as reader:
            (answer,) = [
                json.loads(record.headers) for record in reader if record.topic_name == b"reply.start"
            ]
    assert answer["ack"] == 1
    assert "no-on-finish" not in answer
