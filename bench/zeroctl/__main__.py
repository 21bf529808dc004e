"""`python -m bench.zeroctl`: publish → deliver over TCP with confirmations, headers of 200 and bodies of 1,024 bytes,
sha256 on, through this gateway and through RabbitMQ's topic exchange, in turns in one run. Prints rates and ratios,
and writes them to bench/results.

Both get the same keys, headers and bodies over loopback sockets from one publisher and to one subscriber, with the
same window of unconfirmed messages. Frames are made before the clock starts, and counted by their size, so that the
measuring side costs both the same. RabbitMQ has a durable exchange, a durable queue and persistent messages; the
gateway syncs its log before it confirms (`log.sync = "always"`).
"""

import hashlib
import json
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
from pamqp import commands, frame, header
from pamqp.base import Frame

from bench.peers import machine, servers
from bench.peers.plan import Contender
from headrace.wire import zeroctl
from tests.carriers.brokers import Rabbit
from tests.gateway.gateways import GatewayProcess

RESULTS = Path(__file__).parents[1] / "results"
BODY = bytes(range(256)) * 4
NODE = "web1.example.com-parser"
UUID = "fdcab500-b417-5e99-aa62-9d2db81df9e0"
WINDOW = 4096  # unconfirmed messages
CHUNK = 128  # messages in one write
PATIENCE = 120.0
RECEIVE = 1 << 18


class Confirmed:
    """How many messages the server has confirmed."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def reach(self, count: int) -> None:
        with self._changed:
            self.count = max(self.count, count)
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.count >= count, PATIENCE):
                raise TimeoutError(f"{self.count} of {count} messages were confirmed")


def send_all(connection: socket.socket, messages: list[bytes], confirmed: Confirmed) -> None:
    for start in range(0, len(messages), CHUNK):
        chunk = messages[start : start + CHUNK]
        confirmed.wait(start + len(chunk) - WINDOW)
        connection.sendall(b"".join(chunk))
    confirmed.wait(len(messages))


def receive_bytes(connection: socket.socket, wanted: int) -> None:
    room = bytearray(RECEIVE)
    while wanted > 0:
        got = connection.recv_into(room)
        if not got:
            raise ConnectionError("the server closed the connection")
        wanted -= got


def timed(receive: Callable[[], None], send: Callable[[], None]) -> float:
    """Seconds until everything was confirmed and delivered."""
    failures: list[BaseException] = []

    def receiving() -> None:
        try:
            receive()
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=receiving)
    reader.start()
    start = time.perf_counter()
    send()
    reader.join(PATIENCE)
    if failures or reader.is_alive():
        raise RuntimeError(f"not everything was delivered: {failures}")
    return time.perf_counter() - start


def connected(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.settimeout(PATIENCE)
    return made


def header_fields() -> dict[str, Any]:
    return {"node-uuid": UUID, "sha256": hashlib.sha256(BODY).hexdigest()}


# --- the gateway --------------------------------------------------------------------------------------------


def header_bytes() -> bytes:
    fields = {"node-name": NODE, **header_fields(), "ts": 1586721895}
    made = json.dumps(fields).encode()
    return made[:-1] + b" " * (200 - len(made)) + b"}"


class ZeroctlPeer:
    def __init__(self, port: int) -> None:
        self.socket = connected(port)
        self._decoder = zeroctl.Decoder()
        self._frames: list[zeroctl.Frame] = []
        self.call(zeroctl.encode_open("dev-key", NODE, UUID, 0))

    def call(self, data: bytes) -> None:
        self.socket.sendall(data)
        answer = self.receive()
        if isinstance(answer, zeroctl.Refuse):
            raise RuntimeError(answer.text)

    def receive(self) -> zeroctl.Frame:
        while not self._frames:
            self._frames += self._decoder.feed(self.socket.recv(RECEIVE))
        return self._frames.pop(0)

    def read_confirms(self, confirmed: Confirmed, count: int) -> None:
        while confirmed.count < count:
            answer = self.receive()
            if isinstance(answer, zeroctl.Confirm):
                confirmed.reach(answer.id)
            elif isinstance(answer, zeroctl.Refuse):
                raise RuntimeError(answer.text)


def through_gateway(port: int, keys: list[str], filters: list[str]) -> float:
    publisher, subscriber = ZeroctlPeer(port), ZeroctlPeer(port)
    for number, filter in enumerate(filters):
        subscriber.call(zeroctl.encode_bind(number, filter, number + 1))
    head = header_bytes()
    messages = [zeroctl.encode_message(key, head, BODY, i + 1) for i, key in enumerate(keys)]
    confirmed = Confirmed()
    confirms = threading.Thread(target=publisher.read_confirms, args=(confirmed, len(keys)), daemon=True)
    confirms.start()
    wanted = sum(13 + 11 + len(key) + len(head) + len(BODY) for key in keys)
    seconds = timed(
        lambda: receive_bytes(subscriber.socket, wanted),
        lambda: send_all(publisher.socket, messages, confirmed),
    )
    for peer in (publisher, subscriber):
        peer.socket.close()
    return seconds


# --- RabbitMQ -----------------------------------------------------------------------------------------------


class AmqpPeer:
    """As little of AMQP 0-9-1 as this takes, so that no library is what is measured."""

    def __init__(self, port: int) -> None:
        self.socket = connected(port)
        self._data = b""
        self.socket.sendall(b"AMQP\x00\x00\x09\x01")
        self.version = str(self.receive().server_properties.get("version", "?"))
        self.send(commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US"), 0)
        tune = self.receive()
        self.send(commands.Connection.TuneOk(tune.channel_max, tune.frame_max, 0), 0)
        self.send(commands.Connection.Open("/"), 0)
        self.receive()
        self.call(commands.Channel.Open())

    def send(self, command: Frame, channel: int = 1) -> None:
        self.socket.sendall(frame.marshal(command, channel))

    def call(self, command: Frame) -> Any:
        self.send(command)
        return self.receive()

    def receive(self) -> Any:
        while True:
            if len(self._data) >= 7:
                (size,) = struct.unpack_from(">I", self._data, 3)
                if len(self._data) >= size + 8:
                    used, _, found = frame.unmarshal(self._data)
                    self._data = self._data[used:]
                    return found
            got = self.socket.recv(RECEIVE)
            if not got:
                raise ConnectionError("RabbitMQ closed the connection")
            self._data += got

    def read_confirms(self, confirmed: Confirmed, count: int) -> None:
        """Whole frames only; acknowledgements come in order, singly or for all before."""
        singles: set[int] = set()
        reached = 0
        while reached < count:
            answer = self.receive()
            if isinstance(answer, commands.Basic.Ack):
                if answer.multiple:
                    reached = max(reached, answer.delivery_tag)
                else:
                    singles.add(answer.delivery_tag)
                while reached + 1 in singles:
                    reached += 1
                    singles.discard(reached)
                confirmed.reach(reached)
            elif isinstance(answer, commands.Channel.Close | commands.Connection.Close):
                raise RuntimeError(answer.reply_text)


def through_rabbit(port: int, keys: list[str], filters: list[str]) -> float:
    publisher, subscriber = AmqpPeer(port), AmqpPeer(port)
    name = f"bench{time.monotonic_ns()}"
    subscriber.call(commands.Exchange.Declare(exchange=name, exchange_type="topic", durable=True))
    subscriber.call(commands.Queue.Declare(queue=name, durable=True))
    for filter in filters:
        subscriber.call(commands.Queue.Bind(queue=name, exchange=name, routing_key=filter))
    subscriber.call(commands.Basic.Consume(queue=name, consumer_tag="c", no_ack=True))
    publisher.call(commands.Confirm.Select())
    properties = commands.Basic.Properties(
        content_type="application/json",
        delivery_mode=2,
        app_id=NODE,
        headers={**header_fields(), "ts": 1586721895},
    )
    head = frame.marshal(header.ContentHeader(0, len(BODY), properties), 1)
    body = b"\x03" + struct.pack(">HI", 1, len(BODY)) + BODY + b"\xce"
    messages = [
        frame.marshal(commands.Basic.Publish(exchange=name, routing_key=key), 1) + head + body for key in keys
    ]
    confirmed = Confirmed()
    confirms = threading.Thread(target=publisher.read_confirms, args=(confirmed, len(keys)), daemon=True)
    confirms.start()
    deliver = len(frame.marshal(commands.Basic.Deliver("c", 1, False, name, ""), 1))
    wanted = sum(deliver + len(key) + len(head) + len(body) for key in keys)
    seconds = timed(
        lambda: receive_bytes(subscriber.socket, wanted),
        lambda: send_all(publisher.socket, messages, confirmed),
    )
    subscriber.send(commands.Queue.Delete(queue=name))
    for peer in (publisher, subscriber):
        peer.socket.close()
    return seconds


# --- rounds -------------------------------------------------------------------------------------------------


@click.command()
@click.option("--messages", default=100_000, show_default=True, help="Of one key, in each round.")
@click.option("--rounds", default=3, show_default=True)
@click.option(
    "--filters", default=0, show_default=True, help="Also measure so many filters with ten keys each."
)
@click.option("--sync", default="always", show_default=True, help="The gateway's log.sync.")
@click.option("--work", type=click.Path(path_type=Path), default=RESULTS, show_default="bench/results")
def main(messages: int, rounds: int, filters: int, sync: str, work: Path) -> None:
    """Measure the gateway's zeroctl beside RabbitMQ's topic exchange."""
    work.mkdir(parents=True, exist_ok=True)
    facts = machine.describe(work, frozenset({Contender.HEADRACE}), servers.gateway_program())
    results: dict[str, Any] = {"log.sync": sync}
    with tempfile.TemporaryDirectory(dir=work) as home:
        sets = (
            "listen.zeroctl.bind=127.0.0.1:0",
            "log.segment_bytes=64MiB",
            "log.retention_bytes=2GiB",
            "drop.enabled=false",
            f"log.sync={sync}",
        )
        with Rabbit(Path(home, "rabbit")) as rabbit, GatewayProcess(Path(home, "data"), *sets) as gateway:
            ports = {"headrace": gateway.port("zeroctl"), "rabbitmq": rabbit.port}
            peer = AmqpPeer(rabbit.port)
            facts["rabbitmq"] = peer.version
            peer.socket.close()
            click.echo(machine.line(facts))
            title = "one key, one filter"
            results[title] = compare(title, ports, ["event.parser.web1"] * messages, ["event.#"], rounds)
            if filters:
                keys = [f"event.{i % filters}.{i // filters}" for i in range(10 * filters)]
                many = [f"event.{i}.#" for i in range(filters)]
                title = f"{filters} filters, {len(keys)} keys"
                results[title] = compare(title, ports, keys, many, 1)
    click.echo(f"Written: {machine.keep(work, 'zeroctl', facts, results)}")


def compare(
    title: str, ports: dict[str, int], keys: list[str], filters: list[str], rounds: int
) -> dict[str, Any]:
    """Messages a second of each, in turns."""
    rates: dict[str, list[float]] = {name: [] for name in ports}
    for _ in range(rounds):
        for name, run in (("headrace", through_gateway), ("rabbitmq", through_rabbit)):
            rates[name].append(len(keys) / run(ports[name], keys, filters))
    ours, theirs = median(rates["headrace"]), median(rates["rabbitmq"])
    for name, found in rates.items():
        click.echo(f"{title}: {name} {', '.join(f'{rate:,.0f}' for rate in found)} messages/s")
    click.echo(f"{title}: {ours / theirs:.1f} ×")
    return {"messages": len(keys), "messages_per_second": rates, "ratio_of_medians": ours / theirs}


if __name__ == "__main__":
    main()
