"""What all clients share of losing and making connections, in the shape of one of them."""

import asyncio
from pathlib import Path

from headrace.clients.errors import ConnectionLost
from headrace.clients.overhop import OverhopClient
from tests.clients.overhop_servers import OverhopBroker
from tests.streams import run, until


def test_a_connection_that_is_lost_while_its_client_is_closed_is_not_made_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with OverhopBroker(tmp_path) as broker:
            client = OverhopClient(broker.address, reconnect_delay=0.001)
            await client.connect()
            await broker.cut()
            await until(lambda: client.reconnects)
            link = client._connection
            assert link is not None
            closing = asyncio.create_task(client.close())
            asyncio.get_running_loop().call_soon(link.fail, ConnectionLost("just now"))
            await closing
            await asyncio.sleep(0.05)
            assert not client.connected
            assert client.reconnects == 1

    run("uvloop", main)
