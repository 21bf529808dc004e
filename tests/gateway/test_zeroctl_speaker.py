"""zeroctl's speaker takes over what may change while the gateway runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bus import Bus
from headrace.config import load
from headrace.gateway.protocols import ZeroctlSpeaker
from headrace.log import Log
from headrace.nodes.gateway_node import GatewayNode
from headrace.nodes.signatures import Signer
from headrace.sessions.rights import Keyring
from headrace.wire import zeroctl as wire
from tests.sessions.passive_zeroctl import message


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    log = Log(tmp_path / "log", segment_bytes=1 << 18, pool_segments=1)
    made = Bus(log)
    yield made
    made.close()
    log.close()


def test_reloaded_settings_hold_for_open_connections(bus: Bus) -> None:
    config = load(None, {}, []).config
    keys = Keyring(config.keys)
    speaker = ZeroctlSpeaker(bus, keys, config)
    node = GatewayNode(bus, config, lambda run: None)
    speaker.attach(node, config)
    session = speaker.session()
    assert isinstance(
        wire.Decoder().feed(session.feed(wire.encode_open("dev-key", "", "", 1)))[0], wire.Welcome
    )
    changed = load(
        None,
        {},
        [
            "listen.zeroctl.handshake_timeout=7",
            "listen.zeroctl.keepalive=8",
            'listen.zeroctl.anonymous="dev"',
            'listen.zeroctl.signed=["signed.#"]',
            f'listen.zeroctl.signers=["{Signer.of_seed(bytes(32)).pubkey}"]',
            "log.block_timeout=9",
        ],
    ).config
    speaker.configure(changed)
    shared = speaker._shared
    assert shared.handshake_timeout_us == 7_000_000
    assert shared.keepalive_us == 8_000_000
    assert shared.block_timeout_us == 9_000_000
    assert shared.anonymous == "dev"
    (refused,) = wire.Decoder().feed(session.feed(message("signed.a", b"x", 2)))
    assert refused.fields() == {"code": 403, "text": "the message needs a signature (_sec-sig)"}


def test_identity_of_the_gateway_lives_in_its_log(bus: Bus) -> None:
    config = load(None, {}, ['node.name="edge-7"']).config
    first = GatewayNode(bus, config, lambda run: None)
    again = GatewayNode(bus, config, lambda run: None)
    assert first.uuid == again.uuid
    assert (first.name, first.key) == ("edge-7-headrace", "discovery.node.edge-7-headrace")
    first.tick()
    first.tick()
    (entry,) = first.shown()
    assert (entry["node-name"], entry["ttl"]) == ("edge-7-headrace", 120)
