"""BlipMQ's promises when the process is killed at any moment, and while the disk takes its time: what was
confirmed is there, what was acknowledged does not come again, and nothing is confirmed before it is safe."""

import json
import random
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from headrace.log import LogReader
from headrace.wire import blipmq as wire
from tests.sessions.killable_gateway import KillableGateway

HANDSHAKE = wire.encode_hello(1, 1) + wire.encode_auth("dev-key", 2)
DISK = Path(__file__).parent.parent / "log" / "disk.c"


class Ledger:
    """What a client of one durable subscription knows over many lives of its gateway."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.published: set[bytes] = set()
        self.confirmed: set[bytes] = set()  # a PONG came behind it
        self.tags: dict[bytes, int] = {}
        self.acknowledging: set[bytes] = set()  # an ACK was sent
        self.acknowledged: set[bytes] = set()  # and a PONG came behind it
        self.fenced: tuple[set[bytes], set[bytes]]  # published and acknowledged in this life of the gateway
        self.fences: dict[
            int, tuple[set[bytes], set[bytes]]
        ] = {}  # by a PING's correlation: what it confirms
        self.next_cid = 100

    def connect(self, gateway: KillableGateway) -> None:
        self.fenced = set(), set()
        gateway.send(HANDSHAKE)
        assert [frame.fields() for frame in gateway.receive(2)] == [{"subscription": 0}] * 2

    def cid(self) -> int:
        self.next_cid += 1
        return self.next_cid

    def hear(self, frame: wire.Frame) -> None:
        if isinstance(frame, wire.Pong):
            published, acknowledging = self.fences[frame.correlation]
            self.confirmed |= published
            self.acknowledged |= acknowledging
            return
        assert isinstance(frame, wire.Publish), frame
        assert frame.message in self.published
        assert frame.message not in self.acknowledged
        assert (frame.topic, frame.qos) == ("t", 1)
        assert self.tags.setdefault(frame.message, frame.correlation) == frame.correlation

    def ping(self) -> bytes:
        cid = self.cid()
        published, acknowledging = self.fenced
        self.fences[cid] = set(published), set(acknowledging)
        return wire.encode_ping(cid)

    def ack(self, id: int, message: bytes) -> bytes:
        self.acknowledging.add(message)
        self.fenced[1].add(message)
        return wire.encode_ack(id, self.tags[message])

    def work(self, id: int, delivered: list[bytes]) -> bytes:
        """Something to send: publishes, polls, pings, acknowledgements of what was delivered in this life."""
        said = []
        delivered = list(delivered)
        for _ in range(200):
            action = self.random.random()
            if action < 0.35:
                message = f"message {len(self.published)} ".encode() * self.random.randrange(1, 40)
                self.published.add(message)
                self.fenced[0].add(message)
                said.append(wire.encode_publish("t", message, 1, self.cid()))
            elif action < 0.7 and delivered:
                said.append(self.ack(id, delivered.pop(self.random.randrange(len(delivered)))))
            elif action < 0.8:
                said.append(wire.encode_poll(id, self.cid()))
            else:
                said.append(self.ping())
        return b"".join(said)

    def drain(self, gateway: KillableGateway, id: int) -> list[bytes]:
        """Polls until there is nothing more; all that must come has come, in order."""
        found: list[wire.Publish] = []
        more = True
        while more:
            more = False
            gateway.send(wire.encode_poll(id, 7) * 50 + self.ping())
            while isinstance(frame := gateway.receive(1)[0], wire.Publish):
                self.hear(frame)
                found.append(frame)
                more = True
            self.hear(frame)
        assert [frame.correlation for frame in found] == sorted({frame.correlation for frame in found})
        messages = [frame.message for frame in found]
        assert self.confirmed - self.acknowledging <= set(messages)
        assert self.acknowledged.isdisjoint(messages)
        return messages


def test_what_was_confirmed_survives_a_kill_at_any_moment_and_what_was_acknowledged_does_not_return(
    tmp_path: Path, soak: int
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    ledger = Ledger(seed)
    with KillableGateway(tmp_path) as gateway:
        gateway.send(HANDSHAKE + wire.encode_subscribe("t", 1, 3))
        answer = gateway.receive(3)[2]
        assert isinstance(answer, wire.Ack)
        id = answer.subscription
    for _ in range(10 * soak):
        with KillableGateway(tmp_path) as gateway:
            ledger.connect(gateway)
            data = ledger.work(id, ledger.drain(gateway, id))
            data = data[: ledger.random.randrange(len(data) + 1)]  # perhaps in the middle of a frame
            for at in range(0, len(data), 4096):
                gateway.send(data[at : at + 4096])
            time.sleep(ledger.random.random() ** 3 * 0.05)
            for frame in gateway.kill():
                ledger.hear(frame)
    # In the end all of it can be done with.
    with KillableGateway(tmp_path) as gateway:
        ledger.connect(gateway)
        left = ledger.drain(gateway, id)
        gateway.send(b"".join(ledger.ack(id, message) for message in left) + ledger.ping())
        ledger.hear(*gateway.receive(1))
    with KillableGateway(tmp_path) as gateway:
        ledger.connect(gateway)
        assert ledger.drain(gateway, id) == []


def test_kill_right_after_the_confirmation_loses_nothing(tmp_path: Path) -> None:
    bodies = [str(n).encode() for n in range(500)]
    with KillableGateway(tmp_path) as gateway:
        gateway.send(HANDSHAKE + wire.encode_subscribe("t", 1, 3))
        gateway.receive(3)
        gateway.send(wire.encode_publish_many("t", bodies, 1, 10) + wire.encode_ping(4))
        gateway.receive(1)
    with KillableGateway(tmp_path) as gateway:
        gateway.send(HANDSHAKE + wire.encode_poll(1, 5) * 500)
        found = gateway.receive(502)[2:]
    assert [frame.fields()["message"] for frame in found] == bodies


class Poison:
    """A message that nobody acknowledges, on subscription 1, and its dead letter, on subscription 2, over many
    lives of the gateway."""

    BUS: ClassVar = {"max_deliveries": 3, "redelivery_delay": 0.2, "max_redelivery_delay": 0.2}

    def __init__(self, path: Path) -> None:
        self.path = path
        with self.gateway() as gateway:
            gateway.send(wire.encode_subscribe("t", 1, 3) + wire.encode_subscribe("dead.t", 1, 4))
            assert [frame.fields() for frame in gateway.receive(2)] == [
                {"subscription": 1},
                {"subscription": 2},
            ]
            gateway.send(wire.encode_publish("t", b"poison", 1, 5) + wire.encode_ping(6))
            gateway.receive(1)

    def gateway(self) -> KillableGateway:
        gateway = KillableGateway(self.path, bus=self.BUS)
        gateway.send(HANDSHAKE)
        gateway.receive(2)
        return gateway

    @staticmethod
    def poll(gateway: KillableGateway, id: int) -> tuple[int, str, bytes] | None:
        """Tag, topic and payload of what is delivered now."""
        gateway.send(wire.encode_poll(id, 7) + wire.encode_ping(8))
        frame = gateway.receive(1)[0]
        if isinstance(frame, wire.Pong):
            return None
        assert isinstance(frame, wire.Publish)
        assert gateway.receive(1)[0].correlation == 8
        return frame.correlation, frame.topic, frame.message

    def wait(self, gateway: KillableGateway, id: int, *, silent: int) -> tuple[int, str, bytes]:
        """What is delivered in the end, while the other subscription has nothing."""
        until = time.monotonic() + 60
        while (found := self.poll(gateway, id)) is None:
            assert self.poll(gateway, silent) is None
            assert time.monotonic() < until
            time.sleep(0.01)
        return found


def test_message_that_is_never_acknowledged_is_dead_lettered_once_over_kills_between_its_attempts(
    tmp_path: Path,
) -> None:
    poison = Poison(tmp_path)
    with poison.gateway() as gateway:
        first = poison.wait(gateway, 1, silent=2)
        assert first[1:] == ("t", b"poison")
    with poison.gateway() as gateway:  # the log does not know of a first delivery: it is given back
        assert poison.wait(gateway, 1, silent=2) == first
        assert poison.wait(gateway, 1, silent=2) == first
    with poison.gateway() as gateway:
        assert poison.wait(gateway, 1, silent=2) == first
    with poison.gateway() as gateway:  # that was the last one
        letter = poison.wait(gateway, 2, silent=1)
        assert letter[1:] == ("dead.t", b"poison")
    with poison.gateway() as gateway:
        assert poison.wait(gateway, 2, silent=1) == letter
        gateway.send(wire.encode_ack(2, letter[0]) + wire.encode_ping(9))
        assert gateway.receive(1)[0].correlation == 9
    with poison.gateway() as gateway:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            assert poison.poll(gateway, 1) is None
            assert poison.poll(gateway, 2) is None
            time.sleep(0.05)
    buried = [record for record in LogReader(tmp_path) if record.topic_name == b"dead.t"]
    assert [record.payload for record in buried] == [b"poison"]
    headers = json.loads(buried[0].headers)
    assert (headers["dead-reason"], headers["dead-deliveries"]) == ("no acknowledgement", 3)


if sys.platform == "linux":  # where a library can be preloaded

    @pytest.fixture(scope="module")
    def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A library to preload that holds or fails the syncs of a disk."""
        library = tmp_path_factory.mktemp("disk") / "disk.so"
        compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", library, DISK, "-ldl", "-lpthread"],
            check=True,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
        )
        return library

    @pytest.fixture
    def held(tmp_path: Path, disk: Path) -> Iterator[tuple[KillableGateway, Path, Path]]:
        """A gateway that has greeted, and two files: while the first exists the disk does not sync, while the
        second does it fails."""
        hold, fail = tmp_path / "hold", tmp_path / "fail"
        with KillableGateway(tmp_path / "log", disk, DISK_HOLD=str(hold), DISK_FAIL=str(fail)) as gateway:
            gateway.send(HANDSHAKE + wire.encode_subscribe("t", 1, 3) + wire.encode_subscribe("t", 0, 3))
            gateway.receive(4)
            yield gateway, hold, fail

    def test_pong_does_not_leave_before_the_disk_has_what_was_published(
        held: tuple[KillableGateway, Path, Path],
    ) -> None:
        gateway, hold, _ = held
        hold.touch()
        gateway.send(wire.encode_ping(4) + wire.encode_publish("t", b"m", 1, 5) + wire.encode_ping(6))
        assert gateway.receive(1)[0].correlation == 4
        assert gateway.silent(0.3)
        hold.unlink()
        assert gateway.receive(1)[0].correlation == 6

    def test_pong_behind_qos_0_publishes_leaves_at_once(held: tuple[KillableGateway, Path, Path]) -> None:
        gateway, hold, _ = held
        hold.touch()
        gateway.send(wire.encode_publish("t", b"m", 0, 5) + wire.encode_ping(6) + wire.encode_poll(2, 7))
        assert [frame.correlation for frame in gateway.receive(2)] == [6, 7]

    @pytest.mark.parametrize("subscription", [1, 2])
    def test_poll_behind_qos_1_publishes_waits_for_the_disk_and_is_answered_with_them(
        held: tuple[KillableGateway, Path, Path], subscription: int
    ) -> None:
        gateway, hold, _ = held
        hold.touch()
        gateway.send(
            wire.encode_publish("t", b"m", 1, 5) + wire.encode_poll(subscription, 6) + wire.encode_ping(7)
        )
        assert gateway.silent(0.3)
        hold.unlink()
        delivery, pong = gateway.receive(2)
        assert delivery.fields() == {"topic": "t", "qos": 2 - subscription, "message": b"m"}
        assert isinstance(pong, wire.Pong)

    @pytest.mark.parametrize("qos", [0, 1])
    def test_subscribe_is_acknowledged_only_when_its_id_cannot_be_given_out_again(
        tmp_path: Path, disk: Path, qos: int
    ) -> None:
        hold = tmp_path / "hold"
        with KillableGateway(tmp_path / "log", disk, DISK_HOLD=str(hold)) as gateway:
            gateway.send(HANDSHAKE)
            gateway.receive(2)
            hold.touch()
            gateway.send(wire.encode_subscribe("t", qos, 3))
            assert gateway.silent(0.3)
            hold.unlink()
            assert gateway.receive(1)[0].fields() == {"subscription": 1}

    def test_nothing_is_confirmed_and_the_connection_ends_when_the_disk_fails(
        held: tuple[KillableGateway, Path, Path],
    ) -> None:
        gateway, _, fail = held
        fail.touch()
        gateway.send(wire.encode_publish("t", b"m", 1, 5) + wire.encode_ping(6) + wire.encode_poll(1, 7))
        assert gateway.connection.recv(1 << 16) == b""
