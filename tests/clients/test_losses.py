"""Whoever watches a client is told when its connection is lost and when it is there again, whatever the protocol."""

import asyncio
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from headrace.clients.overhop import OverhopClient
from headrace.clients.relink import RelinkConnector
from headrace.clients.zeroctl import ZeroctlClient
from tests.gateway.gateways import PATIENCE, GatewayProcess

CLIENTS: dict[str, Callable[[str], AbstractAsyncContextManager[Any]]] = {
    "overhop": OverhopClient,
    "relink": lambda place: RelinkConnector(place, endpoint="demo"),
    "zeroctl": lambda place: ZeroctlClient(place, key="dev-key"),
}
SETS = ("listen.zeroctl.bind=127.0.0.1:0", "log.segment_bytes=16MiB", "log.retention_bytes=128MiB")


def test_a_loss_and_the_return_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def said(text: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while text not in caplog.messages:
                await asyncio.sleep(0.01)

    async def watch(gateway: GatewayProcess) -> None:
        places = {name: gateway.places[name] for name in CLIENTS}
        clients = [make(places[name]) for name, make in CLIENTS.items()]
        for client in clients:
            await client.__aenter__()
        gateway.signal(signal.SIGKILL)
        gateway.ended()
        for place in places.values():
            async with asyncio.timeout(PATIENCE):
                while not any(place in line and "connecting again" in line for line in caplog.messages):
                    await asyncio.sleep(0.01)
        fixed = (f"listen.{name}.bind={place}" for name, place in places.items())
        with GatewayProcess(tmp_path, *SETS, *fixed):
            for place in places.values():
                await said(f"connected to {place} again")
            for client in clients:
                await client.__aexit__(None, None, None)

    with GatewayProcess(tmp_path, *SETS) as gateway:
        asyncio.run(watch(gateway))
