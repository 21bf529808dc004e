"""zeroctl sessions under any bytes: nothing fails, and how the bytes are cut changes no answer."""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.wire import zeroctl as wire
from tests.oracle import zeroctl as twin
from tests.sessions.passive_zeroctl import UUID, ZeroctlGateway, message

numbers = itertools.count()
small = st.integers(0, 3)
bodies = st.binary(max_size=20)
keys = st.sampled_from(["event.a", "event.b", "service.a", "event.*", ""])
filters = st.sampled_from(["event.#", "event.a", "#", "service.#", "", "*.a"])
frames = st.one_of(
    st.builds(
        lambda key, body, id, confirm: message(key, body, id, confirm), keys, bodies, small, st.booleans()
    ),
    st.builds(
        lambda number, filter, id, flags, credit, name: wire.encode_bind(
            number, filter, id, flags, credit, name
        ),
        small,
        filters,
        small,
        st.integers(0, 8),
        st.sampled_from([0, 2, wire.NO_LIMIT]),
        st.sampled_from(["", "n"]),
    ),
    st.builds(wire.encode_unbind, small, small),
    st.builds(
        lambda number, tags, id: wire.encode_ack(number, tags, id), small, st.lists(small, max_size=3), small
    ),
    st.builds(
        lambda number, tags, id: wire.encode_reject(number, tags, id),
        small,
        st.lists(small, max_size=3),
        small,
    ),
    st.builds(wire.encode_credit, small, small, small),
    st.builds(wire.encode_ping, small),
    st.builds(twin.frame, st.integers(1, 13), small, st.binary(max_size=30)),
)
streams = st.tuples(
    st.lists(frames, max_size=12).map(b"".join), st.one_of(st.just(b""), st.binary(max_size=20))
)


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)


def answers(directory: Path, pieces: list[bytes]) -> tuple[bytes, bool, int]:
    """What a fresh gateway answers to these pieces, whether it hangs up, and how many bytes it keeps."""
    gateway = ZeroctlGateway(directory / str(next(numbers)), log={"sync": "none"})
    gateway.now = 1_700_000_000_000_000
    gateway.nodes.uuids.add(UUID)
    peer = gateway.peer()
    said = [peer.session.feed(piece, gateway.now) for piece in pieces]
    said.append(peer.session.elapse(gateway.now))
    said.append(peer.session.pull(gateway.now))
    closing = peer.session.closing
    kept = peer.session.kept
    peer.leave()
    gateway.close()
    return b"".join(said), closing, kept


def merged(said: bytes) -> list[tuple[str, int, dict[str, object]]]:
    """Answers with each confirmed message by itself: one read event confirms what it can together."""
    found: list[tuple[str, int, dict[str, object]]] = []
    for frame in wire.Decoder().feed(said) if said else []:
        if isinstance(frame, wire.Confirm):
            found += [("CONFIRM", frame.id - back, {}) for back in range(frame.count - 1, -1, -1)]
        else:
            found.append((frame.type.name, frame.id, frame.fields()))
    return found


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(streams, st.lists(st.integers(0, 2000), max_size=5))
def test_any_stream_is_answered_the_same_however_it_is_cut(
    directory: Path, stream: tuple[bytes, bytes], at: list[int]
) -> None:
    data = b"".join(stream)
    edges = [0, *sorted(min(i, len(data)) for i in at), len(data)]
    whole, closing, kept = answers(directory, [data])
    cut, cut_closing, cut_kept = answers(directory, [data[a:b] for a, b in itertools.pairwise(edges)])
    assert merged(cut) == merged(whole)
    assert cut_closing == closing
    if not closing:
        assert cut_kept == kept
