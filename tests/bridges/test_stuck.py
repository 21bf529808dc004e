"""One subscriber of each protocol that never reads, beside one of each that does, all on one topic: those who read get
everything, and what the others do not read costs the gateway no memory."""

import asyncio
import sys
from contextlib import AsyncExitStack
from typing import NamedTuple

import pytest

from headrace.clients.blipmq import BlipmqClient
from headrace.clients.face import Subscriber, Wish
from headrace.clients.protocols import CLIENTS
from headrace.guarantees import PROTOCOLS
from tests.bridges import stuck
from tests.bridges.conftest import TIMEOUT, server_of
from tests.bridges.stuck import TOPIC, Stuck
from tests.gateway.gateways import GatewayProcess

CONFIG = f"""
{stuck.CONFIG}
[[queues]]
name = "quick"
filter = "{TOPIC}"

[[endpoints]]
name = "quick"
deliver = "{TOPIC}"
"""
QUICK = {
    "blipmq": TOPIC,
    "felix": TOPIC.replace(".", "/"),
    "overhop": "quick",
    "relink": "quick/0",
    "zeroctl": TOPIC,
}
PAYLOAD = bytes(16 << 10)
ROUNDS, BATCH = 16, 64
MESSAGES = ROUNDS * BATCH  # 16 MiB
WARM_ROUNDS = 4  # until memory is measured first: all buffers are full


class Outcome(NamedTuple):
    heard: dict[str, int]  # messages of those who read, by protocol
    delivered: dict[str, int]  # to both of each protocol
    connections: dict[str, int]
    memory: tuple[int, int]  # bytes, early and late


async def talk(gateway: GatewayProcess) -> Outcome:
    heard = dict.fromkeys(PROTOCOLS, 0)
    progress = asyncio.Condition()

    async def hear(protocol: str, messages: Subscriber) -> None:
        async for message in messages:
            assert message.payload == PAYLOAD
            async with progress:
                heard[protocol] += 1
                progress.notify_all()

    async with asyncio.timeout(2 * TIMEOUT), AsyncExitStack() as stack, Stuck(gateway) as peers:
        tasks = []
        for protocol, address in QUICK.items():
            wish = Wish(address, qos=0 if protocol == "felix" else 1)
            subscriber = CLIENTS[protocol].subscriber(server_of(gateway, protocol), wish)
            messages = await stack.enter_async_context(subscriber)
            tasks.append(asyncio.create_task(hear(protocol, messages)))
        sender = await stack.enter_async_context(BlipmqClient(gateway.places["blipmq"], key="dev-key"))
        early = 0
        for turn in range(1, ROUNDS + 1):
            await sender.publish_many(TOPIC, [PAYLOAD] * BATCH, 1)
            peers.poll(BATCH)
            async with progress:
                await progress.wait_for(lambda turn=turn: min(heard.values()) >= turn * BATCH)
            if turn == WARM_ROUNDS:
                early = gateway.own_memory()
        late = gateway.own_memory()
        status = await asyncio.to_thread(gateway.status)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    connections = {one["protocol"]: one["connections"] for one in status["listeners"]}
    return Outcome(heard, status["bus"]["delivered"], connections, (early, late))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    home = tmp_path_factory.mktemp("stuck")
    config = home / "headrace.toml"
    config.write_text(CONFIG)
    with GatewayProcess(
        home / "data",
        "log.segment_bytes=16MiB",
        "log.retention_bytes=256MiB",
        "listen.zeroctl.bind=127.0.0.1:0",
        "drop.enabled=false",
        config=config,
    ) as gateway:
        return asyncio.run(talk(gateway))


def test_who_reads_gets_everything_beside_who_does_not(outcome: Outcome) -> None:
    assert outcome.heard == dict.fromkeys(PROTOCOLS, MESSAGES)
    for protocol in PROTOCOLS:
        assert outcome.connections[protocol] >= 2, protocol
        assert outcome.delivered[protocol] < 2 * MESSAGES, "somebody was not stuck"


if sys.platform == "linux":  # which tells what a process has for itself

    @pytest.mark.memory
    def test_what_is_not_read_takes_no_memory(outcome: Outcome) -> None:
        early, late = outcome.memory
        unread = len(PROTOCOLS) * (ROUNDS - WARM_ROUNDS) * BATCH * len(PAYLOAD)
        assert late - early < unread // 10
