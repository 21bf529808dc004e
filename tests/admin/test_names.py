"""Metric names keep to the conventions, and the manual lists all of them."""

import re
from pathlib import Path

from headrace.admin import names
from headrace.bus import Bus
from headrace.carriers.amqp import AmqpCarrier
from headrace.carriers.mqtt import MqttCarrier
from headrace.config.schema import CarrierConfig
from headrace.log import Log
from headrace.nodes.services import Services
from headrace.sessions.blipmq import Blipmq
from headrace.sessions.felix import Felix
from headrace.sessions.overhop import Overhop
from headrace.sessions.queues import Queues
from headrace.sessions.relink import Relink
from headrace.sessions.rights import Keyring
from headrace.sessions.zeroctl import Zeroctl

MANUAL = Path(__file__).parents[2] / "docs" / "operations.md"


def test_names_follow_the_conventions_of_prometheus() -> None:
    assert len({metric.name for metric in names.ALL}) == len(names.ALL)
    for metric in names.ALL:
        assert re.fullmatch(r"headrace_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")
        assert set(metric.labels) <= {
            "protocol",
            "event",
            "version",
            "node",
            "log",
            "loop",
            "drop",
            "reason",
            "what",
            "carrier",
        }


def test_the_manual_lists_every_metric_with_its_meaning() -> None:
    listed = re.findall(r"^\| `(headrace_\w+)` \| (.*?) \| (.*?) \|$", MANUAL.read_text(), re.MULTILINE)
    expected = [
        (metric.name, ", ".join(f"`{label}`" for label in metric.labels), metric.help) for metric in names.ALL
    ]
    assert listed == expected


def test_the_manual_lists_every_session_event(tmp_path: Path) -> None:
    with Log(tmp_path, segment_bytes=256 * 1024, pool_segments=1) as log:
        bus = Bus(log)
        counted = {
            "blipmq": list(Blipmq(bus, Keyring()).counters()),
            "overhop": list(Overhop(Queues(bus), Keyring()).counters()),
            "felix": list(Felix(bus).counters()),
            "relink": list(Relink(bus, Keyring(), []).counters()),
        }
        bus.close()
    for protocol, events in counted.items():
        manual = (
            MANUAL.read_text()
            .partition("### Session events")[2]
            .partition("label of `headrace_session_held`")[0]
        )
        rows = re.findall(rf"^\| {protocol} \| (.*?) \|", manual, re.MULTILINE)
        assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == events


def test_the_manual_lists_every_event_of_zeroctl_and_of_carriers(tmp_path: Path) -> None:
    with Log(tmp_path, segment_bytes=256 * 1024, pool_segments=1) as log:
        bus = Bus(log)
        counted = list(Zeroctl(bus, Keyring(), node_name="n", node_uuid="u").counters())
        counted += Services(bus, "n", "u", [], lambda run: None).counters()
        config = CarrierConfig(name="c", url="mqtt://x", take=["#"])
        carried = [list(kind(config, bus, "n", "u").counts) for kind in (AmqpCarrier, MqttCarrier)]
        bus.close()
    manual = MANUAL.read_text()
    for title, expected in (("zeroctl", counted), *(("carriers", counts) for counts in carried)):
        rows = re.findall(rf"^\| {title} \| (.*?) \|", manual, re.MULTILINE)
        assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == expected
