"""What must hold between settings that are each right."""

from pathlib import Path

import pytest

from headrace.config import load
from headrace.errors import ConfigError

SMALL = ["listen.blipmq.max_frame_bytes=64KiB", "log.segment_bytes=256KiB", "log.pool_segments=1"]


def problems(*sets: str, file: Path | None = None) -> list[str]:
    try:
        load(file, {}, sets)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_retention_must_hold_the_pool_and_two_segments_more() -> None:
    assert problems(*SMALL, "log.retention_bytes=1MiB") == []
    assert problems(*SMALL, "log.retention_bytes=1MiB", "log.pool_segments=3") == [
        "--set log.retention_bytes: log.retention_bytes: 1MiB is too little: 5 segments (log.pool_segments +"
        " 2) of 256KiB need 1280KiB"
    ]


def test_conflict_is_told_where_its_cause_was_set() -> None:
    assert problems("log.segment_bytes=1GiB") == [
        "--set log.segment_bytes: log.retention_bytes: 4GiB is too little: 5 segments (log.pool_segments + 2)"
        " of 1GiB need 5GiB"
    ]


def test_two_of_the_largest_messages_must_fit_in_a_segment() -> None:
    assert problems("log.segment_bytes=33MiB") == []
    assert problems("log.segment_bytes=32MiB") == [
        "--set log.segment_bytes: log.segment_bytes: 32MiB is too little: 2 messages of"
        " listen.blipmq.max_frame_bytes (16MiB) must fit in it with their headers"
    ]
    assert problems("log.segment_bytes=16MiB", "listen.blipmq.bind=") == []
    assert problems("log.segment_bytes=16MiB", "listen.blipmq.max_frame_bytes=7MiB") == []


def test_redelivery_must_not_begin_above_its_own_limit() -> None:
    assert problems("bus.redelivery_delay=300") == []
    assert problems("bus.redelivery_delay=301") == [
        "--set bus.redelivery_delay: bus.max_redelivery_delay: 5m is less than bus.redelivery_delay, 301s"
    ]


def test_certificate_and_key_need_each_other(tmp_path: Path) -> None:
    pem = tmp_path / "x.pem"
    pem.touch()
    section = "listen.zeroctl"
    assert (
        problems(f"{section}.tls_cert={pem}", f"{section}.tls_key={pem}", f"{section}.tls_client_ca={pem}")
        == []
    )
    assert problems(f"{section}.tls_cert={pem}") == [
        "--set listen.zeroctl.tls_cert: listen.zeroctl.tls_cert: a certificate needs its private key: set"
        " listen.zeroctl.tls_key"
    ]
    assert problems(f"{section}.tls_key={pem}") == [
        "--set listen.zeroctl.tls_key: listen.zeroctl.tls_key: a private key needs its certificate: set"
        " listen.zeroctl.tls_cert"
    ]
    assert problems(f"{section}.tls_client_ca={pem}") == [
        "--set listen.zeroctl.tls_client_ca: listen.zeroctl.tls_client_ca: client certificates need TLS: set"
        " listen.zeroctl.tls_cert and listen.zeroctl.tls_key"
    ]


def test_files_must_be_there(tmp_path: Path) -> None:
    absent = tmp_path / "absent.pem"
    found = problems(f"listen.felix.tls_cert={absent}", f"listen.felix.tls_key={tmp_path}")
    assert found == [
        f"--set listen.felix.tls_cert: listen.felix.tls_cert: {absent} does not exist",
        f"--set listen.felix.tls_key: listen.felix.tls_key: {tmp_path} is not a file",
    ]


def test_files_must_be_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pem = tmp_path / "x.pem"
    pem.touch()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert problems(f"listen.felix.tls_cert={pem}", f"listen.felix.tls_key={pem}") == [
        f"--set listen.felix.tls_cert: listen.felix.tls_cert: {pem} cannot be read",
        f"--set listen.felix.tls_key: listen.felix.tls_key: {pem} cannot be read",
    ]


def test_two_listeners_cannot_have_one_address() -> None:
    assert problems("listen.blipmq.bind=127.0.0.1:8600") == [
        "--set listen.blipmq.bind: admin.bind: 127.0.0.1:8600 is taken by listen.blipmq.bind"
    ]
    assert problems("listen.relink.bind=unix:/x", "listen.zeroctl.bind=unix:/x") == [
        "--set listen.zeroctl.bind: listen.zeroctl.bind: unix:/x is taken by listen.relink.bind"
    ]


def test_udp_and_tcp_ports_are_different_ones_and_port_0_is_nobodys() -> None:
    assert problems("listen.blipmq.bind=127.0.0.1:5000") == []
    assert problems("listen.blipmq.bind=127.0.0.1:0", "admin.bind=127.0.0.1:0") == []


def test_queues_have_names_of_their_own_and_filters_that_are_some() -> None:
    assert problems('queues=[{name="a"}, {name="b", filter="x.#"}]') == []
    assert problems('queues=[{name="a"}, {name="a"}]') == [
        '--set queues: queues[1].name: "a" is the name of queues[0], too'
    ]
    for wrong in (
        '{name="a.b"}',
        '{name="_x"}',
        f'{{name="a", filter="{"x" * 2000}"}}',
        '{name="a", concurrency_limit=-1}',
    ):
        assert len(problems(f"queues=[{wrong}]")) == 1, wrong


def test_rights_of_overhop_are_those_of_a_key_that_is_there() -> None:
    assert problems("listen.overhop.key=dev") == []
    assert problems("listen.overhop.key=other") == [
        '--set listen.overhop.key: listen.overhop.key: there is no key "other"'
    ]


def test_open_overhop_listener_without_a_key_is_warned_of() -> None:
    assert load(None, {}, ["listen.overhop.bind=0.0.0.0:9876", "listen.overhop.key=dev"]).warnings == ()
    (warning,) = load(None, {}, ["listen.overhop.bind=0.0.0.0:9876"]).warnings
    assert "set listen.overhop.key" in warning


def test_keys_must_differ_and_have_a_right(tmp_path: Path) -> None:
    file = tmp_path / "h.toml"
    file.write_text(
        '[[keys]]\nname = "a"\nkey = "s3cret"\npublish = ["#"]\n'
        '[[keys]]\nname = "a"\nkey = "other"\npublish = ["#"]\n'
        '[[keys]]\nname = "c"\nkey = "s3cret"\n'
    )
    assert problems(file=file) == [
        f'{file}:6: keys[1].name: "a" is the name of keys[0], too',
        f"{file}:11: keys[2].key: it is the same as that of keys[0]",
        f'{file}:9: keys[2]: "c" may do nothing: give it filters to publish, to subscribe, or both, like'
        ' ["#"]',
    ]


def test_conflict_of_keys_outside_a_file_is_told_with_its_place() -> None:
    assert problems('keys=[{name="a", key="1", publish=["#"]}, {name="a", key="2", publish=["#"]}]') == [
        '--set keys: keys[1].name: "a" is the name of keys[0], too'
    ]


def test_no_conflict_is_told_with_a_value_that_was_refused() -> None:
    (problem,) = problems("log.segment_bytes=1GiB", "log.retention_bytes=lots")
    assert problem.startswith("--set log.retention_bytes=lots: log.retention_bytes: expected a size")
    (problem,) = problems('keys=[{name="a", key="1"}, {name="a", key=""}]')
    assert "an empty key" in problem


@pytest.mark.parametrize(
    ("sets", "warnings"),
    [
        ([], 0),
        (["listen.blipmq.bind=0.0.0.0:5555"], 1),
        (["listen.blipmq.bind=[::]:5555"], 1),
        (["listen.blipmq.bind=unix:/x"], 0),
        (["listen.blipmq.bind=0.0.0.0:5555", 'keys=[{name="a", key="own", publish=["#"]}]'], 0),
        (["keys=[]"], 1),
        (["keys=[]", "listen.blipmq.bind="], 0),
        (['keys=[{name="a", key="k", publish=["a.*.#", "größe.x"]}]'], 0),
        (['keys=[{name="a", key="k", subscribe=["a.b*"]}]'], 1),
    ],
)
def test_what_is_probably_not_meant_is_warned_of(sets: list[str], warnings: int) -> None:
    assert len(load(None, {}, sets).warnings) == warnings


def test_drops_have_names_places_and_messages_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(
        'drop.uri = "/srv/drop"\n'
        '[[drops]]\nname = "a"\ntopics = ["a.#"]\n'
        '[[drops]]\nname = "a"\ntopics = ["b.#"]\nuri = "/srv/drop/"\n'
        '[[drops]]\nname = "default"\ntopics = []\n'
    )
    assert [problem.partition(": ")[2] for problem in problems(file=file)] == [
        'drops[1].name: "a" is the name of drops[0], too',
        "drops[1].uri: /srv/drop is where drop writes, too",
        'drops[2].name: "default" is the name of drop, too',
        'drops[2].topics: nothing would go there: give it filters, like ["#"]',
    ]
    assert problems("drop.topics=[]") == [
        '--set drop.topics: drop.topics: nothing would go there: give it filters, like ["#"]'
    ]


def test_columns_that_name_a_row_cannot_be_left_out() -> None:
    assert problems('drop.leave_out=["source", "headers"]') == []
    (wrong,) = problems('drop.leave_out=["offset"]')
    assert '"offset" cannot be left out: node, log, offset, ts name a row' in wrong
    (wrong,) = problems('drop.leave_out=["no\\nsuch"]')
    assert '"no\\nsuch" is not one of the columns node, log, offset,' in wrong


def test_endpoints_have_names_of_their_own_topics_and_a_key_that_exists() -> None:
    endpoints = (
        'endpoints=[{name="a"}, {name="a"}, {name=""}, {name="", publish="x.{channel}", deliver="y.#"},'
        ' {name="b", key="nobody"}]'
    )
    assert [text.partition("endpoints[")[2] for text in problems(endpoints)] == [
        '1].name: "a" is the name of endpoints[0], too',
        '2].publish: "" is not made of words of a topic, so the rule has to be given',
        '2].deliver: "" is not made of words of a topic, so the rule has to be given',
        '3].name: "" is the name of endpoints[2], too',
        '4].key: there is no key with the name "nobody"',
    ]


@pytest.mark.parametrize(
    "rule",
    ['publish="a.{channel}.{channel}"', 'publish="a.x{channel}"', 'publish="a.#"', 'deliver="*.{channel}"'],
)
def test_rule_of_an_endpoint_has_its_channel_as_one_word(rule: str) -> None:
    assert len(problems('endpoints=[{name="a", ' + rule + "}]")) == 1
