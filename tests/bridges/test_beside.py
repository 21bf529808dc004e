"""What a protocol says beside the payload: given back where the other side can say it too, by the guarantees, and in
the record in any case."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from headrace.clients.face import Received, Wish
from headrace.clients.overhop import OverhopClient
from headrace.clients.protocols import CLIENTS
from headrace.clients.relink import RelinkConnector
from headrace.clients.zeroctl import ZeroctlClient
from headrace.guarantees import Beside, pairs
from headrace.log import LogReader, Record
from headrace.wire import overhop
from tests.bridges.conftest import (
    CHANNEL,
    TIMEOUT,
    publish_address,
    server_of,
    subscribe_address,
    topic_of,
)
from tests.gateway.gateways import GatewayProcess

HEADERS = {"room": "7", "list": [1, None, "x"], "_sec-note": "kept"}
PARTS = (b"two", b"", b"parts")
VALUE = {"to": ["someone", 7, None, True], "bin": b"\xff"}
FLAG_MSGPACK = 4  # of a record

CARRIED = [
    pytest.param(
        one.publisher,
        one.subscriber,
        beside,
        beside in one.carried,
        id=f"{one.publisher}-{one.subscriber}-{beside}",
    )
    for one in pairs()
    for beside in (*one.carried, *one.not_carried)
]


async def say_header(gateway: GatewayProcess, address: str) -> bytes:
    async with ZeroctlClient(gateway.places["zeroctl"], key="dev-key", node="teller") as client:
        await client.publish(address, b"with a header", HEADERS)
    return b"with a header"


async def say_parts(gateway: GatewayProcess, address: str) -> bytes:
    async with RelinkConnector(gateway.places["relink"], endpoint=address.partition("/")[0]) as link:
        await link.channel(CHANNEL).send(*PARTS)
        await link.flush()
    return b"".join(PARTS)


async def say_value(gateway: GatewayProcess, address: str) -> bytes:
    async with OverhopClient(gateway.places["overhop"]) as client:
        await client.enqueue(address, VALUE)
    return overhop.pack(VALUE)


async def say_timing(gateway: GatewayProcess, address: str) -> bytes:
    async with OverhopClient(gateway.places["overhop"]) as client:
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        await client.enqueue(address, b"tomorrow", scheduled_at=tomorrow, max_attempts=3)
    return b"tomorrow"


SAY: dict[Beside, Callable[[GatewayProcess, str], Awaitable[bytes]]] = {
    Beside.HEADER: say_header,
    Beside.PARTS: say_parts,
    Beside.VALUE: say_value,
    Beside.TIMING: say_timing,
}


def given(beside: Beside, about: dict[str, Any]) -> bool:
    """Whether a subscriber was told."""
    match beside:
        case Beside.HEADER:
            return HEADERS.items() <= about.get("headers", {}).items()
        case Beside.PARTS:
            return bool(about.get("part_sizes") == [len(part) for part in PARTS])
        case Beside.VALUE:
            return about.get("encoding") == "msgpack"
        case Beside.TIMING:
            return about.get("headers", {}).get("attempts") == 3 and "not-before" in about["headers"]


def kept(beside: Beside, record: Record) -> bool:
    """Whether the record has it."""
    match beside:
        case Beside.HEADER:
            return HEADERS.items() <= json.loads(record.headers).items()
        case Beside.PARTS:
            return record.parts == tuple(len(part) for part in PARTS)
        case Beside.VALUE:
            return bool(record.flags & FLAG_MSGPACK)
        case Beside.TIMING:
            return {"not-before", "attempts"} <= json.loads(record.headers).keys()


def record_of(data: Path, topic: str, payload: bytes) -> Record:
    """The last message with this payload on this topic."""
    with LogReader(data / "log") as reader:
        found = None
        while (record := reader.read()) is not None:
            if record.topic_name == topic.encode() and record.payload == payload:
                found = record
    assert found is not None
    return found


async def heard(
    gateway: GatewayProcess, publisher: str, subscriber: str, beside: Beside
) -> tuple[bytes, Received]:
    """What was sent as a payload, and what came."""
    wish = Wish(subscribe_address(publisher, subscriber), qos=0 if subscriber == "felix" else 1)
    async with (
        asyncio.timeout(TIMEOUT),
        CLIENTS[subscriber].subscriber(server_of(gateway, subscriber), wish) as messages,
    ):
        sent = await SAY[beside](gateway, publish_address(publisher, subscriber))
        async for message in messages:
            return sent, message
    raise AssertionError("the subscription ended")


@pytest.mark.parametrize(("publisher", "subscriber", "beside", "carried"), CARRIED)
def test_what_stands_beside_the_payload_is_given_back_where_it_can_be_said(
    gateway: GatewayProcess, data: Path, publisher: str, subscriber: str, beside: Beside, carried: bool
) -> None:
    topic = topic_of(publisher, subscriber)
    if (beside, subscriber) == (Beside.TIMING, "overhop"):
        # A queue does as it says instead of telling it.
        queue = publish_address(publisher, subscriber)
        sent, job = asyncio.run(delayed(gateway, queue))
        assert (job["status"], job["max_attempts"]) == ("delayed", 3)
        assert carried
    else:
        sent, message = asyncio.run(heard(gateway, publisher, subscriber, beside))
        assert message.payload == sent
        assert given(beside, message.about) is carried
    assert kept(beside, record_of(data, topic, sent))


async def delayed(gateway: GatewayProcess, queue: str) -> tuple[bytes, dict[str, Any]]:
    sent = await say_timing(gateway, queue)
    async with asyncio.timeout(TIMEOUT), OverhopClient(gateway.places["overhop"]) as client:
        while not (jobs := await client.jobs(queue, "delayed")):
            await asyncio.sleep(0.01)
        for job in jobs:
            await client.remove_job(job["jid"])
        return sent, jobs[0]


def test_other_protocols_messages_get_a_zeroctl_header_that_says_whose_they_are(
    gateway: GatewayProcess,
) -> None:
    sent, message = asyncio.run(heard(gateway, "relink", "zeroctl", Beside.PARTS))
    headers = message.about["headers"]
    assert isinstance(headers, dict)
    assert headers["_transport-protocol"] == "relink"
    assert {"node-name", "node-uuid", "ts", "sha256"} <= headers.keys()
    assert message.payload == sent
