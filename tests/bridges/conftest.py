"""A gateway whose five protocols share topics: for each pair one of its own, which both sides can say."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from headrace.clients.face import Server
from headrace.clients.protocols import CLIENTS
from tests.gateway.gateways import GatewayProcess

PROTOCOLS: Final = tuple(sorted(CLIENTS))
RELINK_TX: Final = "relink-tx"  # Relink with every message in a transaction
ENDS: Final = (*PROTOCOLS, RELINK_TX)
CHANNEL: Final = 7
TIMEOUT: Final = 30.0


def topic_of(publisher: str, subscriber: str) -> str:
    """What one publishes to, and the other hears."""
    if publisher == "overhop":
        return f"queue.{publisher}-{subscriber}.jobs"
    return f"bridge.{publisher}-{subscriber}.{CHANNEL}"


def publish_address(publisher: str, subscriber: str) -> str:
    topic = topic_of(publisher, subscriber)
    match publisher:
        case "overhop":
            return f"overhop-{subscriber}"
        case "relink":
            return f"from-{subscriber}/{CHANNEL}"
        case "relink-tx":
            return f"tx-from-{subscriber}/{CHANNEL}?transactions=connector"
        case "felix":
            return topic.replace(".", "/")
        case _:
            return topic


def subscribe_address(publisher: str, subscriber: str) -> str:
    topic = topic_of(publisher, subscriber)
    match subscriber:
        case "overhop":
            return f"{publisher}-overhop"
        case "relink":
            return f"to-{publisher}/0"
        case "relink-tx":
            return f"tx-to-{publisher}/0?transactions=listener"
        case "felix":
            return topic.replace(".", "/")
        case _:
            return topic


def config_text() -> str:
    """Queues and endpoints for every pair that needs one."""
    lines: list[str] = []
    for other in ENDS:
        lines += ["[[queues]]", f'name = "{other}-overhop"', f'filter = "{topic_of(other, "overhop")}"']
        if other != "overhop":
            lines += ["[[queues]]", f'name = "overhop-{other}"']
        for end, prefix, transactions in (("relink", "", "false"), (RELINK_TX, "tx-", "true")):
            publish = topic_of(end, other).replace(str(CHANNEL), "{channel}")
            lines += ["[[endpoints]]", f'name = "{prefix}from-{other}"', f'publish = "{publish}"']
            lines += [f"connector_transactions = {transactions}"]
            lines += ["[[endpoints]]", f'name = "{prefix}to-{other}"', f'deliver = "{topic_of(other, end)}"']
            lines += [f"listener_transactions = {transactions}"]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the gateway keeps its log."""
    return tmp_path_factory.mktemp("bridges") / "data"


@pytest.fixture(scope="module")
def gateway(data: Path) -> Iterator[GatewayProcess]:
    config = data.parent / "headrace.toml"
    config.write_text(config_text())
    with GatewayProcess(
        data,
        "log.segment_bytes=16MiB",
        "log.retention_bytes=256MiB",
        "listen.blipmq.max_frame_bytes=4MiB",
        "listen.zeroctl.bind=127.0.0.1:0",
        config=config,
    ) as running:
        yield running


def server_of(gateway: GatewayProcess, protocol: str) -> Server:
    place = re.sub(r"^0\.0\.0\.0", "127.0.0.1", gateway.places[protocol])
    return Server(place, "dev-key", None, TIMEOUT)
