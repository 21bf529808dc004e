"""From the wire to a table in Spark, with everything killed on the way: each acknowledged message is there once,
byte for byte."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pytest

from headrace.clients.face import Server, Wish
from headrace.clients.protocols import CLIENTS
from headrace.errors import HeadraceError
from tests.gateway.gateways import MAIN, SMALL, GatewayProcess, Peer

PATIENCE = 120.0
SETS = ("node.name=edge", "drop.roll_seconds=0.3", "log.retention_bytes=64MiB", "log.segment_bytes=1MiB")
TOPICS = ("plant.a.temperature", "plant.b.temperature", "orders")
MORE_SETS = ('queues=[{name="plant"}]', "listen.zeroctl.bind=127.0.0.1:0")
# What the other protocols call an address, and the topic that it is.
OTHERS = {
    "felix": ("plant/c/temperature", "plant.c.temperature"),
    "overhop": ("plant", "queue.plant.jobs"),
    "relink": ("demo/7", "demo.in.7"),
    "zeroctl": ("event.plant.temperature", "event.plant.temperature"),
}
ANSWER_SECONDS = 5.0  # then a gateway is taken for gone
# Between two messages, and between a few of the others: what is published meanwhile shall leave Spark a processor.
PAUSE, OTHERS_PAUSE = 0.002, 0.1


class Publisher:
    """Publishes with QoS 1 for as long as it is told, at whichever gateway is there, and remembers what was
    acknowledged. What was under way when a gateway went is sent to nobody again."""

    def __init__(self) -> None:
        self.acknowledged: list[tuple[str, bytes]] = []
        self.uncertain: list[tuple[str, bytes]] = []
        self._gateway: GatewayProcess | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def go_on_with(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def until(self, count: int) -> None:
        until(lambda: len(self.acknowledged) >= count)

    def _run(self) -> None:
        number = 0
        while not self._ended.is_set():
            gateway = self._gateway
            if gateway is None:
                time.sleep(0.01)
                continue
            peer = None
            try:
                peer = Peer.to(gateway)
                while not self._ended.is_set() and self._gateway is gateway:
                    message = (TOPICS[number % len(TOPICS)], b"%d " % number + os.urandom(number % 300))
                    number += 1
                    self.uncertain.append(message)
                    peer.publish(*message)
                    self.acknowledged.append(self.uncertain.pop())
                    time.sleep(PAUSE)
            except (OSError, AssertionError):
                time.sleep(0.05)
            finally:
                if peer is not None:
                    peer.close()


class OtherPublishers:
    """The same through each of the other protocols' clients, a few messages at a time: these are acknowledged when the
    client has said goodbye."""

    def __init__(self) -> None:
        self.acknowledged: list[tuple[str, bytes]] = []
        self.uncertain: list[tuple[str, bytes]] = []
        self.said = Counter[str]()
        self._gateway: GatewayProcess | None = None
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(protocol,)) for protocol in OTHERS]
        for thread in self._threads:
            thread.start()

    def go_on_with(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def until(self, each: int) -> None:
        """Until every protocol has had so many acknowledged since now."""
        before = self.said.copy()
        until(lambda: all(self.said[protocol] - before[protocol] >= each for protocol in OTHERS))

    def _run(self, protocol: str) -> None:
        address, topic = OTHERS[protocol]
        number = 0
        while not self._ended.is_set():
            gateway = self._gateway
            if gateway is None:
                time.sleep(0.01)
                continue
            payloads = [b"%s %d " % (protocol.encode(), number + i) + os.urandom(50) for i in range(10)]
            number += len(payloads)
            messages = [(topic, payload) for payload in payloads]
            try:
                asyncio.run(self._publish(protocol, gateway.places[protocol], address, payloads))
            except (OSError, HeadraceError, TimeoutError):
                self.uncertain += messages
                time.sleep(0.05)
            else:
                self.acknowledged += messages
                self.said[protocol] += len(messages)
                time.sleep(OTHERS_PAUSE)

    async def _publish(self, protocol: str, at: str, address: str, payloads: list[bytes]) -> None:
        server = Server(at, "dev-key", None, ANSWER_SECONDS)
        async with (
            asyncio.timeout(2 * ANSWER_SECONDS),
            CLIENTS[protocol].publisher(server, Wish(address, qos=1)) as publisher,
        ):
            await publisher.publish(payloads)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def until_more_files(drop: Path) -> None:
    def count() -> int:
        return len(list(drop.glob("date=*/hour=*/*.parquet")))

    before = count()
    until(lambda: count() > before)


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A `headrace` command, killed at the end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)  # with the JVM that it has started
        child.wait(PATIENCE)


def rows_of(table: Path) -> pa.Table:
    """What is in a table."""
    files = [str(path) for path in table.glob("date=*/hour=*/*.parquet")]
    return pyarrow.dataset.dataset(files, format="parquet").to_table(
        ["node", "log", "offset", "topic", "payload"]
    )


def taken(table: Path) -> int:
    try:
        return int(rows_of(table).num_rows)
    except (OSError, pa.ArrowException):  # a file went while it was looked at
        return 0


@pytest.mark.needs("java")
def test_every_acknowledged_message_is_in_the_table_once_whatever_is_killed(tmp_path: Path) -> None:
    data, table = tmp_path / "data", tmp_path / "table"
    ingest = ("spark", "ingest", str(data / "drop"), str(table), "--every", "200ms", "--quiet")
    publisher, others = Publisher(), OtherPublishers()
    try:
        with GatewayProcess(data, *SETS, *MORE_SETS) as gateway:
            publisher.go_on_with(gateway)
            others.go_on_with(gateway)
            others.until(20)
            publisher.until(300)
            until_more_files(data / "drop")
            with command(*ingest):
                publisher.until(600)
                gateway.kill()  # with its sink, in the middle of a file
                with GatewayProcess(data, *SETS, *MORE_SETS) as second:
                    publisher.go_on_with(second)
                    others.go_on_with(second)
                    others.until(20)
                    publisher.until(1200)
                    until(lambda: taken(table) > 300)
            # The query was killed; the third gateway leaves the drop to a process of its own.
        with GatewayProcess(data, *SETS, *MORE_SETS, "drop.run=false") as third:
            publisher.go_on_with(third)
            others.go_on_with(third)
            others.until(20)
            sink = (
                "sink",
                "--data",
                str(data),
                *(word for one in (*SMALL, *SETS, *MORE_SETS) for word in ("--set", one)),
            )
            with command(*sink):
                publisher.until(1800)
                before = len(list((data / "drop").glob("date=*/hour=*/*.parquet")))
                until(lambda: len(list((data / "drop").glob("date=*/hour=*/*.parquet"))) > before)
            publisher.until(2100)  # nobody exports meanwhile
            with command(*sink) as last, command(*ingest):
                until_more_files(data / "drop")
                publisher.end()
                others.end()
                assert third.stop() == 0
                last.send_signal(signal.SIGTERM)
                assert last.wait(PATIENCE) == 0
                until(lambda: taken(table) >= len(publisher.acknowledged) + len(others.acknowledged))
        with command(*ingest, "--once") as end:
            assert end.wait(PATIENCE) == 0
    finally:
        publisher.end()
        others.end()

    rows = rows_of(table).to_pylist()
    places = Counter((row["node"], row["log"], row["offset"]) for row in rows)
    assert [place for place, count in places.items() if count > 1] == []
    assert {place[0] for place in places} == {"edge"}
    found = Counter((row["topic"], row["payload"]) for row in rows)
    acknowledged = [*publisher.acknowledged, *others.acknowledged]
    assert [message for message in acknowledged if found[message] != 1] == []
    assert {topic for topic, _ in acknowledged} == {*TOPICS, *(topic for _, topic in OTHERS.values())}
    # Every one has its own bytes: nothing else is there but what was under way when a gateway was killed.
    assert found.keys() - set(acknowledged) <= {*publisher.uncertain, *others.uncertain}
    offsets = sorted(place[2] for place in places)
    assert offsets == list(range(len(offsets)))
