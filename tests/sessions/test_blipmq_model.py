"""BlipMQ sessions judged by a plain-Python model: whole conversations of several peers, over disconnections,
restarts and changed keys; the same bytes in any pieces; and bytes that mean nothing."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.config.schema import Key
from tests.oracle import blipmq as codec
from tests.oracle.blipmq_session import Broker, Peer
from tests.sessions.passive_gateway import DEV, OTHER, SECOND, Client, PassiveGateway

PROBE = Key(name="probe", key="probe-key", publish=["#"], subscribe=["#"])
KEYSETS = [
    [DEV, OTHER, PROBE],
    [Key(name="dev", key="dev-key", publish=["t", "a.*"], subscribe=["t", "#.x"]), OTHER, PROBE],
    [OTHER, PROBE],
    [Key(name="dev", key="changed", publish=["#"], subscribe=["#"]), OTHER, PROBE],
]
BUS_OPTIONS = {"max_inflight": 4, "max_deliveries": 3, "durable_grace": 100.0}
MAX_SUBSCRIPTIONS = 6

topics = st.sampled_from(
    ["t", "t", "t", "u", "a.b", "a.*", "#", "dead.t", "deep.x", "", "." * 127, "." * 128, "t" * 300]
)
small = st.integers(0, 40)
cids = st.one_of(small, st.integers(0, 2**64 - 1))

# A command says what a peer sends; ids and tags are numbers that pick one of those in use when it is sent.
commands = st.one_of(
    st.tuples(st.just("publish"), topics, st.sampled_from([0, 0, 1, 1, 1, 7]), st.binary(max_size=6), cids),
    st.tuples(st.just("publish"), st.just("t"), st.integers(0, 1), st.binary(max_size=6), cids),
    st.tuples(st.just("subscribe"), topics, st.sampled_from([0, 1, 1, 2]), cids),
    st.tuples(st.just("poll"), small, cids),
    st.tuples(st.just("poll"), small, cids),
    st.tuples(st.just("ack"), small, small),
    st.tuples(st.just("ack"), small, small),
    st.tuples(st.just("ping"), cids),
    st.tuples(st.just("hello"), st.integers(0, 2), cids),
    st.tuples(st.just("auth"), st.sampled_from(["dev-key", "other-key", "changed", "", "wrong"]), cids),
    st.tuples(st.just("frame"), st.integers(1, 9), cids, st.binary(max_size=12)),
)
bad_frames = st.one_of(
    st.tuples(
        st.just("raw"), st.sampled_from([b"\0\0\0\0", b"\0\0\0\x08", b"\x01\0\0\x01", b"\xff\xff\xff\xff"])
    ),
    st.tuples(st.just("frame"), st.sampled_from([0, 10, 255]), cids, st.binary(max_size=3)),
)
batches = st.lists(commands, min_size=1, max_size=12)
cuts = st.lists(st.integers(0, 400), max_size=4)
steps = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 2), batches, cuts),
    st.tuples(st.just("send"), st.integers(0, 2), batches, cuts),
    st.tuples(st.just("send"), st.integers(0, 2), batches, cuts),
    st.tuples(st.just("elapse"), st.sampled_from([0.0, 0.5, 1.999999, 2.0, 4.0, 8.0, 99.0, 101.0])),
    st.tuples(st.just("leave"), st.integers(0, 2)),
    st.tuples(st.just("restart")),
    st.tuples(st.just("keys"), st.integers(0, 3)),
    st.tuples(st.just("close"), st.integers(0, 2), st.lists(commands, max_size=3), bad_frames),
)


class Both:
    """A gateway and its model, told the same; every answer is compared."""

    def __init__(self, path: Path, sync: str) -> None:
        self.real = PassiveGateway(
            path, keys=KEYSETS[0], log={"sync": sync}, bus=BUS_OPTIONS, max_subscriptions=MAX_SUBSCRIPTIONS
        )
        self.model = Broker(
            KEYSETS[0],
            max_inflight=4,
            max_deliveries=3,
            grace=100 * SECOND,
            max_subscriptions=MAX_SUBSCRIPTIONS,
        )
        self.keys = KEYSETS[0]
        self.given: list[int] = []  # subscription ids
        self.peers: dict[int, tuple[Client, Peer]] = {}

    def peer(self, slot: int) -> tuple[Client, Peer]:
        """The peer of this slot. A new one shakes hands: two of them with one key, the last with another."""
        if slot not in self.peers:
            self.peers[slot] = self.real.connect(None), self.model.connect()
            key = "other-key" if slot == 2 else "dev-key"
            self.exchange(slot, codec.encode_hello(1, 1) + codec.encode_auth(key, 2), [])
        return self.peers[slot]

    def exchange(self, slot: int, data: bytes, cuts: list[int]) -> None:
        client, peer = self.peers[slot]
        ends = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        before = set(self.model.subscriptions)
        said = b"".join(client.exchange(data[a:b]) for a, b in pairwise(ends))
        expected = peer.feed(data, self.real.now)
        self.given += sorted(set(self.model.subscriptions) - before)
        assert codec.Decoder().feed(said) == codec.Decoder().feed(expected)
        assert said == expected
        assert client.session.closing == peer.closing
        assert client.session.authenticated == (peer.key and peer.key.name)
        if not peer.closing:
            assert client.session.kept == len(peer.decoder.tail)
        self.real.log.sync_now()

    def encode(self, command: tuple[Any, ...]) -> bytes:
        name, *values = command
        if name == "raw":
            return bytes(values[0])
        if name == "frame":
            return codec.frame(*values)
        if name == "hello":
            return codec.encode_hello(*values)
        if name == "auth":
            return codec.encode_auth(*values)
        if name == "ping":
            return codec.encode_ping(*values)
        if name == "publish":
            topic, qos, body, cid = values
            return codec.encode_publish(topic, body, qos, cid)
        if name == "subscribe":
            return codec.encode_subscribe(*values)
        ids = [*self.given[-4:], self.model.next_id, self.model.next_id, 0]
        id = ids[values[0] % len(ids)]
        if name == "poll":
            return codec.encode_poll(id, values[1])
        subscription = self.model.subscriptions.get(id)
        tags = [offset + 1 for offset in sorted(subscription.flights)] if subscription else []
        tags += [0, *range(len(self.model.messages) - 2, len(self.model.messages) + 3)]
        tag = max(0, tags[values[1] % len(tags)])
        return codec.encode_ack(id, tag)

    def run(self, step: tuple[Any, ...]) -> None:
        name, *values = step
        if name == "send":
            slot, batch, cuts = values
            self.peer(slot)
            self.exchange(slot, b"".join(self.encode(command) for command in batch), cuts)
        elif name == "close":
            slot, batch, bad = values
            self.peer(slot)
            commands = [*batch, bad, ("ping", 1), ("publish", "t", 1, b"never", 1)]
            self.exchange(slot, b"".join(self.encode(command) for command in commands), [])
            self.leave(slot)
        elif name == "elapse":
            self.real.elapse(values[0])
            self.model.tick(self.real.now)
            for client, _ in self.peers.values():
                assert client.session.elapse(self.real.now) == b""
        elif name == "leave":
            self.leave(values[0])
        elif name == "keys":
            self.keys = KEYSETS[values[0]]
            self.real.keys.replace(self.keys)
            for client, _ in self.peers.values():
                assert client.session.elapse(self.real.now) == b""
            self.model.replace(self.keys, self.real.now)
        else:
            self.restart()

    def leave(self, slot: int) -> None:
        if slot in self.peers:
            client, peer = self.peers.pop(slot)
            client.leave()
            peer.leave(self.real.now)

    def restart(self) -> None:
        self.peers.clear()
        self.real.restart()
        probe = self.real.connect("probe-key")
        id = probe.subscribe("t", 0)
        assert id > max(self.given, default=0)
        probe.leave()
        self.model.restart(id + 1, self.real.now)


@contextmanager
def both(sync: str = "always") -> Iterator[Both]:
    with tempfile.TemporaryDirectory() as directory:
        pair = Both(Path(directory), sync)
        try:
            yield pair
        finally:
            pair.real.close()


@given(st.lists(steps, max_size=25), st.sampled_from(["always", "none"]))
@settings(max_examples=settings().max_examples * 2)
def test_conversations_of_several_peers_are_answered_as_the_model_answers_them(
    conversation: list[tuple[Any, ...]], sync: str
) -> None:
    with both(sync) as pair:
        for step in conversation:
            pair.run(step)


def encoded(pair: Both, batch: list[tuple[Any, ...]]) -> bytes:
    """As long as nothing was sent, the first ids are those that the batch will be given."""
    pair.given = [1, 2]
    return b"".join(
        codec.encode_ack(command[1] % 3, command[2] % 6) if command[0] == "ack" else pair.encode(command)
        for command in batch
    )


def answers(slot: int, batch: list[tuple[Any, ...]], size: int, first: int = 0) -> None:
    """Compares the answers to a batch that arrives `size` bytes at a time, after a first piece."""
    with both() as pair:
        pair.peer(slot)
        data = encoded(pair, batch)
        pair.given = []
        pair.exchange(slot, data, [*range(first, len(data), size)])


SPLIT_BATCH: list[tuple[Any, ...]] = [
    ("subscribe", "t", 1, 3),
    ("subscribe", "t", 0, 4),
    ("publish", "t", 1, b"one", 5),
    ("publish", "t", 0, b"zero", 6),
    ("poll", 0, 7),
    ("poll", 1, 8),
    ("ack", 1, 1),
    ("ack", 1, 1),
    ("poll", 0, 9),
    ("poll", 0, 10),
    ("frame", 3, 11, b"\x07\0\0"),
    ("ping", 12),
    ("frame", 10, 13, b"bad type"),
    ("ping", 14),
]


def test_every_split_point_gives_the_same_answers() -> None:
    with both() as pair:
        size = len(encoded(pair, SPLIT_BATCH))
    for cut in range(1, size):
        answers(0, SPLIT_BATCH, size, cut)


@given(st.lists(commands, min_size=1, max_size=10), st.integers(1, 40), st.integers(0, 2))
@example(SPLIT_BATCH, 1, 0)
@settings(max_examples=settings().max_examples // 2)
def test_pieces_of_any_size_give_the_same_answers(batch: list[tuple[Any, ...]], size: int, slot: int) -> None:
    answers(slot, batch, size)
    answers(slot, batch, 1)


@given(st.booleans(), st.lists(st.one_of(st.binary(max_size=60), st.binary(max_size=3)), max_size=8))
def test_noise_never_does_harm(known: bool, noise: list[bytes]) -> None:
    with both("none") as pair:
        if known:
            pair.peer(0)
        else:
            pair.peers[0] = pair.real.connect(None), pair.model.connect()
        for piece in noise:
            pair.exchange(0, piece, [])
            assert 0 <= pair.peers[0][0].session.wanted <= codec.MAX_LENGTH + 4


@given(
    st.lists(commands, min_size=1, max_size=10),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6),
    st.lists(st.integers(0, 400), max_size=5),
)
def test_damaged_conversations_are_answered_as_the_model_answers_them(
    batch: list[tuple[Any, ...]], damage: list[tuple[int, int]], cuts: list[int]
) -> None:
    with both("none") as pair:
        pair.peer(0)
        data = bytearray(encoded(pair, batch))
        pair.given = []
        for at, value in damage:
            data[at % len(data)] = value
        pair.exchange(0, bytes(data), cuts)
