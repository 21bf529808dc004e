"""Which rights a Felix peer has, by address and certificate, and what a reload changes."""

import pytest

from headrace.config.schema import FelixPeer
from headrace.sessions.felix_peers import Peers

RULES = [
    FelixPeer(name="robots", certificates=["robot", "arm"], publish=["#"]),
    FelixPeer(name="hall", networks=["10.1.0.0/16", "fd00::/8"], subscribe=["#"]),
    FelixPeer(name="both", networks=["10.2.0.0/16"], certificates=["panel"], subscribe=["#"]),
]


@pytest.mark.parametrize(
    ("host", "names", "found"),
    [
        ("192.0.2.1", ["robot"], "robots"),
        ("10.1.2.3", ["x", "arm"], "robots"),
        ("10.1.2.3", [], "hall"),
        ("::ffff:10.1.2.3", [], "hall"),
        ("fd00::1%eth0", [], "hall"),
        ("10.2.0.1", ["panel"], "both"),
        ("10.2.0.1", [], None),
        ("10.3.0.1", ["panel"], None),
        ("192.0.2.1", [], None),
    ],
)
def test_the_first_rule_that_fits_counts(host: str, names: list[str], found: str | None) -> None:
    rights = Peers(RULES).find(host, names)
    assert (None if rights is None else rights.name) == found


def test_a_rule_without_conditions_fits_everybody() -> None:
    rights = Peers([FelixPeer(name="all", publish=["a.#"])]).find("192.0.2.1")
    assert rights is not None
    assert rights.publishes("a.b.c")
    assert not rights.subscribes("a.b.c")


def test_a_rule_that_stays_keeps_its_rights_and_others_are_revoked() -> None:
    peers = Peers(RULES)
    robots, hall = peers.find("192.0.2.1", ["robot"]), peers.find("10.1.0.1")
    assert robots is not None
    assert hall is not None
    peers.replace(
        [
            FelixPeer(name="robots", certificates=["arm", "robot"], publish=["only.#"]),
            FelixPeer(name="hall", networks=["10.9.0.0/16"], subscribe=["#"]),
        ]
    )
    assert peers.find("192.0.2.1", ["robot"]) is robots
    assert robots.publishes("only.this")
    assert not robots.publishes("t.n.s")
    assert hall.revoked
    assert peers.find("10.1.0.1") is None
