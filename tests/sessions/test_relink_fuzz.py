"""Relink sessions under peers that say anything at all, in any pieces, with restarts between: nothing breaks, and what
the log has of every channel is counted without a gap."""

from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.wire import relink as wire
from tests.sessions.relink_gateway import Peer, RelinkGateway

channels: st.SearchStrategy[Any] = st.one_of(
    st.integers(0, 3), st.lists(st.integers(0, 3), max_size=3), st.just(2**32 - 1)
)
numbers = st.one_of(st.none(), st.integers(0, 6), st.just(2**32 - 1))


def operation(type: int, channel: Any, number: int | None) -> bytes:
    return wire.encode_operation(type, channel, 4, None if type == 2 else number)


def acknowledgement(type: int, channel: Any, number: int | None) -> bytes:
    return wire.encode_acknowledgement(type, channel, 4, None if type == 4 else number)


messages = st.builds(
    lambda channel, parts: wire.encode_message(channel, 4, parts),
    channels,
    st.lists(st.binary(max_size=9), max_size=3),
)
packets = st.one_of(
    messages,
    messages,
    st.builds(operation, st.integers(0, 2), channels, numbers),
    st.builds(acknowledgement, st.integers(0, 4), channels, numbers),
    st.integers(0, 4).map(wire.encode_general),
)
# What to do: bytes to send, a message to deliver, a reconnection, a restart.
steps = st.lists(
    st.one_of(
        st.lists(packets, min_size=1, max_size=5).map(b"".join),
        st.binary(max_size=20),
        st.integers(0, 3),
        st.sampled_from(["cut", "restart"]),
    ),
    max_size=14,
)


@settings(max_examples=settings.default.max_examples // 2)
@given(st.sampled_from(["demo", "demo-tx"]), steps, st.integers(1, 50))
def test_whatever_a_peer_says_nothing_breaks_and_no_number_is_missing(
    name: str, script: list[Any], piece: int
) -> None:
    with TemporaryDirectory() as directory:
        gateway = RelinkGateway(Path(directory) / "log", window=2, max_channels=3, max_outstanding=4)
        peer = gateway.connect(name)
        for step in script:
            if isinstance(step, bytes):
                for at in range(0, len(step), piece):
                    peer.session.feed(step[at : at + piece], gateway.now)
                gateway.log.sync_now()
                peer.session.pull(gateway.now)
            elif isinstance(step, int):
                gateway.publish(f"{name}.out.{step}", b"x" * step)
                peer.session.pull(gateway.now)
            if peer.closed or isinstance(step, str):
                peer.leave()
                if step == "restart":
                    gateway.restart()
                peer = Peer(gateway, name, epoch=peer.epoch, link=peer.link)
        for channel in (0, 1, 2, 3, 2**32 - 1):
            seen = [one.correlation for one in gateway.published(f"{name}.in.{channel}")]
            for before, after in pairwise(seen):
                # The next one, or the first of a channel that was closed; with transactions some were rolled back.
                assert after == before + 1 or after == 0 or name == "demo-tx"
        gateway.close()
