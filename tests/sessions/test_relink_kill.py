"""Relink's promises when the gateway's process is killed in the middle of traffic and transactions: the same epoch and
links go on, what was promised is there, and every message is there once."""

import asyncio
import random
from itertools import count
from pathlib import Path

from headrace.clients.relink import RelinkConnector
from headrace.log import Log
from tests.gateway.gateways import GatewayProcess, events_of
from tests.streams import run

ENDPOINTS = (
    'endpoints=[{name="demo"}, {name="feed", publish="demo.out.{channel}"}, {name="demo-tx",'
    " connector_transactions=true, listener_transactions=true},"
    ' {name="feed-tx", publish="demo-tx.out.{channel}"}]'
)
LOG = ("log.retention_bytes=256MiB", "drop.enabled=false", "log.segment_bytes=1MiB", "gateway.loop=uvloop")


class Traffic:
    """Connectors that know nothing of the kills, and what they sent and got."""

    def __init__(self, address: str, seed: int) -> None:
        options = {"reconnect_delay": 0.005, "max_reconnect_delay": 0.05, "timeout": 30.0}
        both = {"connector_transactions": True, "listener_transactions": True}
        self.random = random.Random(seed)
        self.over = False
        self.plain = RelinkConnector(address, endpoint="demo", **options)  # type: ignore[arg-type]
        self.feed = RelinkConnector(address, endpoint="feed", **options)  # type: ignore[arg-type]
        self.tx = RelinkConnector(address, endpoint="demo-tx", **options, **both)  # type: ignore[arg-type]
        self.feed_tx = RelinkConnector(address, endpoint="feed-tx", **options)  # type: ignore[arg-type]
        self.links = [self.plain, self.feed, self.tx, self.feed_tx]
        self.sent: dict[str, list[bytes]] = {}  # by topic
        self.committed: list[list[bytes]] = []
        self.got: dict[str, list[bytes]] = {}

    async def send(self, link: RelinkConnector, prefix: str) -> None:
        for i in count():
            if self.over:
                await link.flush()
                return
            channel = 1 + i % 3
            parts = [b"%d" % i, b"." * self.random.randrange(60)]
            self.sent.setdefault(f"{prefix}.{channel}", []).append(b"".join(parts))
            await link.channel(channel).send(*parts)
            if self.random.random() < 0.2:
                await asyncio.sleep(self.random.random() / 500)

    async def transact(self) -> None:
        channel = self.tx.channel(1)
        for i in count():
            if self.over:
                return
            messages = [b"%d/%d" % (i, k) for k in range(self.random.randrange(1, 5))]
            if self.random.random() < 0.2:
                try:
                    async with channel.transaction():
                        await channel.send(b"never")
                        raise ZeroDivisionError
                except ZeroDivisionError:
                    pass
            async with channel.transaction():
                for message in messages:
                    await channel.send(message)
            self.committed.append(messages)

    async def receive(self, link: RelinkConnector, prefix: str) -> None:
        while True:
            message = await link.receive()
            self.got.setdefault(f"{prefix}.{message.channel}", []).append(message.payload)
            link.consumed(message)


def test_links_resume_and_every_message_is_there_once_after_kills(tmp_path: Path, soak: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")

    async def main() -> None:
        gateway = GatewayProcess(tmp_path, ENDPOINTS, *LOG, "listen.relink.bind=127.0.0.1:0")
        await asyncio.to_thread(gateway.__enter__)
        at = gateway.places["relink"]
        traffic = Traffic(at, seed)
        for link in traffic.links:
            await link.connect()
        known = [(link.epoch, link.link) for link in traffic.links]
        receiving = [
            asyncio.create_task(traffic.receive(traffic.plain, "demo.out")),
            asyncio.create_task(traffic.receive(traffic.tx, "demo-tx.out")),
        ]
        sending = [
            asyncio.create_task(traffic.send(traffic.plain, "demo.in")),
            asyncio.create_task(traffic.send(traffic.feed, "demo.out")),
            asyncio.create_task(traffic.send(traffic.feed_tx, "demo-tx.out")),
            asyncio.create_task(traffic.transact()),
        ]
        try:
            for _ in range(6 * soak):
                before = len(traffic.committed), sum(map(len, traffic.got.values()))
                while (
                    len(traffic.committed) < before[0] + 3
                    or sum(map(len, traffic.got.values())) < before[1] + 30
                    or not all(link.connected for link in traffic.links)
                ):
                    await asyncio.sleep(0.005)
                    assert not any(task.done() for task in sending + receiving)
                await asyncio.sleep(traffic.random.random() / 20)
                await asyncio.to_thread(gateway.kill)
                gateway = GatewayProcess(tmp_path, ENDPOINTS, *LOG, f"listen.relink.bind={at}")
                await asyncio.to_thread(gateway.__enter__)
            traffic.over = True
            await asyncio.gather(*sending)
            wanted = sum(len(sent) for topic, sent in traffic.sent.items() if ".out." in topic)
            while sum(map(len, traffic.got.values())) < wanted:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            assert [(link.epoch, link.link) for link in traffic.links] == known
            assert all(link.links_lost == 0 for link in traffic.links)
            assert all(link.reconnects >= 6 * soak for link in traffic.links)
            events = events_of(gateway, "relink")
            assert (events["violations"], events["bad_packets"], events["lost"]) == (0, 0, 0)
        finally:
            for task in receiving + sending:
                task.cancel()
            await asyncio.wait(receiving + sending)
            for link in traffic.links:
                await link.abandon()
            await asyncio.to_thread(gateway.kill)
        assert traffic.got == {topic: sent for topic, sent in traffic.sent.items() if ".out." in topic}
        there: dict[str, list[bytes]] = {}
        log = Log(tmp_path / "log", segment_bytes=1 << 20)
        for record in log.reader():
            if not record.control:
                there.setdefault(record.topic_name.decode(), []).append(record.payload)
        log.close()
        assert there.pop("demo-tx.in.1") == [message for batch in traffic.committed for message in batch]
        assert there == traffic.sent

    run("asyncio", main)
