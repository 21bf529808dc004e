"""The configuration's own account of itself: defaults, documentation, changes and what may be reloaded."""

import socket

import msgspec
import pytest

from headrace import limits
from headrace.config import Config, Key, load, reloadable
from headrace.config.addresses import HostPort
from headrace.config.schema import PROTOCOLS, SETTINGS, host_name
from headrace.config.settings import Setting


def test_embedded_default_listens_on_loopback_only() -> None:
    config = Config()
    bound = {protocol: config.listen.of(protocol).bind for protocol in PROTOCOLS}
    assert bound == {
        "blipmq": ["127.0.0.1:5555"],
        "overhop": ["127.0.0.1:9876"],
        "relink": ["127.0.0.1:5600"],
        "zeroctl": ["127.0.0.1:5700"],
        "felix": ["127.0.0.1:5000"],
    }
    assert config.admin.addresses == [HostPort("127.0.0.1", 8600)]
    assert config.keys == [Key(name="dev", key="dev-key", publish=["#"], subscribe=["#"])]
    assert config.log.sync == "always"
    assert config.log.segment_bytes == 64 << 20
    assert config.listen.blipmq.max_frame_bytes == 16 * 1024 * 1024


def test_every_key_is_documented_and_its_default_is_accepted() -> None:
    for key, leaf in SETTINGS.items():
        assert leaf.description.endswith("."), key
        if isinstance(leaf, Setting):
            assert msgspec.convert(leaf.default, leaf.type) == leaf.default, key


def test_two_defaults_share_nothing_that_can_be_altered() -> None:
    first = Config()
    first.listen.blipmq.bind.append("elsewhere")
    first.keys[0].publish.clear()
    assert Config().listen.blipmq.bind == ["127.0.0.1:5555"]
    assert Config().keys[0].publish == ["#"]


@pytest.mark.parametrize(
    ("host", "name"),
    [("edge-1", "edge-1"), ("Ed's pc", "Ed-s-pc"), ("..x", "x"), ("---", "headrace"), ("x" * 99, "x" * 64)],
)
def test_node_is_named_after_its_host(host: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert host_name() == name
    assert Config().node.name == name
    assert load(None, {}, [f"node.name={name}"]).config.node.name == name


def test_secret_of_a_key_is_not_in_its_repr() -> None:
    shown = repr(Config(keys=[Key(name="a", key="s3cret", publish=["#"])]))
    assert "s3cret" not in shown
    assert "name='a'" in shown


def test_changes_are_named_by_dotted_key() -> None:
    before = load(None, {}, []).config
    after = load(
        None,
        {},
        [
            "log.sync=none",
            "listen.felix.bind=",
            'keys=[{name="b", key="b", publish=["#"]}]',
            "bus.max_inflight=1024",
        ],
    ).config
    assert before.changes(before) == []
    assert before.changes(after) == ["log.sync", "listen.felix.bind", "keys"]
    assert after.changes(before) == ["log.sync", "listen.felix.bind", "keys"]


def test_only_what_the_gateway_can_change_while_running_is_reloadable() -> None:
    listener = {"max_connections", "idle_timeout", "high_water", "stall_timeout"}
    expected = {f"listen.{protocol}.{name}" for protocol in PROTOCOLS for name in listener} | {
        "keys",
        "logging.level",
        "gateway.drain_timeout",
        "listen.blipmq.handshake_timeout",
        "listen.zeroctl.handshake_timeout",
        "listen.zeroctl.keepalive",
        "listen.zeroctl.anonymous",
        "listen.zeroctl.signed",
        "listen.zeroctl.signers",
        "zeroctl.heartbeat_interval",
        "listen.felix.peers",
        "listen.felix.strict",
        "listen.felix.streams",
        "listen.felix.caches",
        "listen.felix.dialect",
        "listen.felix.bad_header",
        "listen.felix.max_subscriptions",
        "listen.felix.batch_events",
        "listen.felix.batch_bytes",
        "listen.felix.batch_delay",
        "listen.felix.cache_entries",
        "listen.felix.cache_bytes",
        "quic.keep_alive",
        "quic.handshake_timeout",
        "listen.relink.window",
        "listen.relink.max_outstanding",
        "listen.relink.max_links",
        "listen.relink.max_uncommitted_bytes",
        "listen.relink.grace",
        "listen.relink.handshake_timeout",
        "listen.relink.ping_interval",
        "listen.relink.ping_timeout",
        "bus.max_inflight",
        "bus.redelivery_delay",
        "bus.max_redelivery_delay",
        "bus.max_deliveries",
        "bus.durable_grace",
        "bus.max_pending",
        "log.retention_bytes",
        "log.retention_seconds",
        "log.block_timeout",
    }
    assert {key for key in SETTINGS if reloadable(key)} == expected


def test_limit_refuses_a_default_outside_its_bounds() -> None:
    with pytest.raises(ValueError, match=r"5 is outside 1\.\.4"):
        limits.Limit(5, 1, 4, "too much")


def test_every_limit_has_its_reason() -> None:
    found = {name: value for name, value in vars(limits).items() if isinstance(value, limits.Limit)}
    assert len(found) > 20
    for name, limit in found.items():
        assert limit.reason.endswith("."), name
