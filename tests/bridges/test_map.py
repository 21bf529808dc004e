"""[[map]] through real sockets: every listener with addresses of its own for the same topics, and none for others."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.clients.blipmq import BlipmqClient
from headrace.clients.errors import ClientError
from headrace.clients.face import Wish
from headrace.clients.overhop import OverhopClient
from headrace.clients.protocols import CLIENTS
from headrace.clients.zeroctl import ZeroctlClient
from tests.bridges.conftest import CHANNEL, PROTOCOLS, TIMEOUT, server_of
from tests.bridges.test_matrix import PAIRS
from tests.gateway.gateways import GatewayProcess

RULES = {
    "blipmq": ("b/{pair}/{channel}", "mapped.{pair}.{channel}"),
    "zeroctl": ("z.{channel}.{pair}", "mapped.{pair}.{channel}"),
    "felix": ("f/{pair}/{rest...}", "mapped.{pair}.{rest...}"),
    "overhop": ("q-{pair}", f"mapped.{{pair}}.{CHANNEL}"),
}


def address(protocol: str, pair: str) -> str:
    match protocol:
        case "relink":
            return f"{pair}/{CHANNEL}"
        case "overhop":
            return f"q-{pair}"
        case "felix":
            return f"f/{pair}/{CHANNEL}"
        case "zeroctl":
            return f"z.{CHANNEL}.{pair}"
        case _:
            return f"b/{pair}/{CHANNEL}"


def config_text() -> str:
    lines: list[str] = []
    for protocol, (own, topic) in RULES.items():
        lines += ["[[map]]", f'listener = "{protocol}"', f'address = "{own}"', f'topic = "{topic}"']
    for direction in ("publish", "deliver"):
        lines += ["[[map]]", 'listener = "relink"', f'direction = "{direction}"']
        lines += ['address = "{pair}/{channel}"', 'topic = "mapped.{pair}.{channel}"']
    for publisher, subscriber in PAIRS:
        if "overhop" in (publisher, subscriber):
            lines += ["[[queues]]", f'name = "q-{publisher}-{subscriber}"']
        if "relink" in (publisher, subscriber):
            lines += ["[[endpoints]]", f'name = "{publisher}-{subscriber}"']
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def gateway(data: Path) -> Iterator[GatewayProcess]:
    config = data.parent / "headrace.toml"
    config.write_text(config_text())
    with GatewayProcess(data, "listen.zeroctl.bind=127.0.0.1:0", config=config) as running:
        yield running


@pytest.mark.parametrize(("publisher", "subscriber"), PAIRS)
def test_mapped_addresses_meet_in_their_topic(
    gateway: GatewayProcess, publisher: str, subscriber: str
) -> None:
    pair = f"{publisher}-{subscriber}"
    sent = [b"one", b"two", bytes(range(256))]

    async def passed() -> list[bytes]:
        to_hear = Wish(address(subscriber, pair), qos=0 if subscriber == "felix" else 1)
        heard: list[bytes] = []
        async with (
            asyncio.timeout(TIMEOUT),
            CLIENTS[subscriber].subscriber(server_of(gateway, subscriber), to_hear) as messages,
        ):
            wish = Wish(address(publisher, pair), qos=1)
            async with CLIENTS[publisher].publisher(server_of(gateway, publisher), wish) as sender:
                await sender.publish(sent)
            async for message in messages:
                heard.append(message.payload)
                if len(heard) == len(sent):
                    break
        return heard

    assert asyncio.run(passed()) == sent


UNMAPPED = {
    "blipmq": "mapped.x.7",  # a topic is no address where there are rules
    "zeroctl": "mapped.x.7",
    "felix": "mapped/x/7",
    "overhop": "other",
    "relink": "other/7",
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_address_without_a_rule_is_refused_to_publishers(gateway: GatewayProcess, protocol: str) -> None:
    async def publish() -> None:
        wish = Wish(UNMAPPED[protocol], qos=1)
        async with (
            asyncio.timeout(TIMEOUT),
            CLIENTS[protocol].publisher(server_of(gateway, protocol), wish) as sender,
        ):
            await sender.publish([b"x"])

    with pytest.raises(ClientError) as refused:
        asyncio.run(publish())
    if protocol not in ("relink", "overhop"):  # there an unknown name is unknown
        assert "no rule of [[map]] has a topic for" in str(refused.value)


@pytest.mark.parametrize("protocol", ["blipmq", "zeroctl", "felix"])
def test_address_without_a_rule_is_refused_to_subscribers(gateway: GatewayProcess, protocol: str) -> None:
    async def subscribe() -> None:
        async with (
            asyncio.timeout(TIMEOUT),
            CLIENTS[protocol].subscriber(server_of(gateway, protocol), Wish(UNMAPPED[protocol])) as messages,
        ):
            async for _ in messages:
                pass

    with pytest.raises(ClientError, match=r"no rule of \[\[map\]\] has a topic for"):
        asyncio.run(subscribe())


def test_queue_of_a_name_without_a_rule_is_not_made(gateway: GatewayProcess) -> None:
    async def add() -> None:
        async with OverhopClient(gateway.places["overhop"]) as client:
            await client.add_queue("other")

    with pytest.raises(ClientError, match=r"no rule of \[\[map\]\]"):
        asyncio.run(add())


def test_filter_follows_the_keys_of_one_rule_and_deliveries_have_keys_of_the_map(
    gateway: GatewayProcess,
) -> None:
    async def follow() -> tuple[list[str], str]:
        async with (
            asyncio.timeout(TIMEOUT),
            ZeroctlClient(gateway.places["zeroctl"], key="dev-key") as client,
        ):
            try:
                await client.bind("#").__aenter__()
                refusal = ""
            except ClientError as error:
                refusal = str(error)
            async with client.bind("z.*.all") as binding:
                async with BlipmqClient(gateway.places["blipmq"], key="dev-key") as other:
                    for channel in range(3):
                        await other.publish(f"b/all/{channel}", b"x", qos=1)
                keys = [(await anext(binding)).key for _ in range(3)]
        return keys, refusal

    keys, refusal = asyncio.run(follow())
    assert keys == [f"z.{channel}.all" for channel in range(3)]
    assert "a filter is for the keys of one rule" in refusal


def test_queues_and_subscriptions_outlive_a_change_of_the_map(tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(config_text())

    async def before(places: dict[str, str]) -> int:
        async with OverhopClient(places["overhop"]) as jobs:
            await jobs.add_queue("q-late")
            await jobs.enqueue("q-late", b"first")
        async with (
            BlipmqClient(places["blipmq"], key="dev-key") as client,
            client.subscribe("b/late/7", qos=1) as subscription,
        ):
            await client.publish("b/late/7", b"second", qos=1)
            return subscription.id

    async def after(places: dict[str, str], id: int) -> tuple[list[object], str, bytes]:
        async with OverhopClient(places["overhop"]) as jobs:
            await jobs.enqueue("q-late", b"third")
            found: list[object] = []
            async with jobs.work("q-late") as worker:
                async for job in worker:
                    found.append(job.payload)
                    await job.done()
                    if len(found) == 3:
                        break
        async with (
            BlipmqClient(places["blipmq"], key="dev-key") as client,
            client.resume(id, "mapped.late.7") as messages,
        ):
            message = await anext(aiter(messages))
            return found, message.topic, message.payload

    with GatewayProcess(tmp_path / "data", config=config) as running:
        id = asyncio.run(asyncio.wait_for(before(running.places), TIMEOUT))
    with GatewayProcess(tmp_path / "data") as running:
        found, topic, payload = asyncio.run(asyncio.wait_for(after(running.places, id), TIMEOUT))
    # What BlipMQ published went to the queue's topic too.
    assert found == [b"first", b"second", b"third"]
    assert (topic, payload) == ("mapped.late.7", b"second")
