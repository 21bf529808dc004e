"""Configurations written for people, and that they mean what they say."""

import tomllib
from pathlib import Path

import pytest

from headrace.config import Config, load
from headrace.config.render import REDACTED, default_toml, effective_toml, reference_markdown
from headrace.config.schema import SETTINGS

OTHER = [
    "node.name=edge-1",
    "log.sync=interval:20",
    "log.segment_bytes=48MiB",
    "log.retention_bytes=1234567890",
    "log.block_timeout=250us",
    "log.hold_for_subscriptions=true",
    "bus.max_pending=17",
    'listen.blipmq.bind=["127.0.0.1:1", "[::1]:2", "unix:/run/é.sock"]',
    "listen.felix.bind=",
    "drop.uri=s3://bucket/a b",
    'keys=[{name="a", key="quote\\" \\\\ \\u0007", publish=["x.#", "y"]}, {name="b", key="k",'
    ' subscribe=["*"]}]',
]


def test_commented_default_loads_back_to_exactly_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "default.toml"
    file.write_text(default_toml())
    loaded = load(file, {}, [])
    assert loaded.config == Config()
    # Each key stands there, so that nothing loads as the default only because it is absent; a node's name
    # differs by host.
    assert set(SETTINGS) - set(loaded.origins) == {"node.name"}


def test_commented_default_explains_every_key_once() -> None:
    text = default_toml()
    for leaf in SETTINGS.values():
        first_words = " ".join(leaf.description.split()[:4])
        assert first_words in text.replace("\n# ", " "), leaf.key
    assert text.count("Certificate chain (PEM)") == 1
    assert all(len(line) <= 100 for line in text.split("\n"))


@pytest.mark.parametrize("sets", [[], OTHER, ["keys=[]"]])
def test_effective_configuration_loads_back_to_itself(sets: list[str], tmp_path: Path) -> None:
    loaded = load(None, {}, sets)
    file = tmp_path / "effective.toml"
    for origin in (False, True):
        file.write_text(effective_toml(loaded.config, loaded.origins, secrets=True, origin=origin))
        assert load(file, {}, []).config == loaded.config


def test_secrets_are_shown_only_on_request() -> None:
    config = load(None, {}, ['keys=[{name="a", key="s3cret", publish=["#"]}]']).config
    hidden = effective_toml(config, {})
    assert "s3cret" not in hidden
    assert tomllib.loads(hidden)["keys"][0]["key"] == REDACTED
    assert tomllib.loads(effective_toml(config, {}, secrets=True))["keys"][0]["key"] == "s3cret"


def test_origin_is_told_for_what_was_set_and_only_that(tmp_path: Path) -> None:
    file = tmp_path / "h.toml"
    file.write_text('[log]\npool_segments = 4\n[[keys]]\nname = "a"\nkey = "k"\npublish = ["#"]\n')
    loaded = load(file, {"HEADRACE_LOGGING__LEVEL": "debug"}, ["log.sync=none"])
    text = effective_toml(loaded.config, loaded.origins, origin=True)
    commented = [line for line in text.split("\n") if "  # " in line]
    assert commented == [
        'sync = "none"  # --set log.sync',
        f"pool_segments = 4  # {file}:2",
        f'name = "a"  # {file}:4',
        f'key = "{REDACTED}"  # {file}:5',
        f'publish = ["#"]  # {file}:6',
        f"subscribe = []  # {file}:3",
        'level = "debug"  # HEADRACE_LOGGING__LEVEL',
    ]
    assert "# " not in effective_toml(loaded.config, loaded.origins)


def test_origin_of_an_empty_array_is_told() -> None:
    loaded = load(None, {}, ["keys=[]"])
    text = effective_toml(loaded.config, loaded.origins, origin=True)
    assert text.startswith("# --set keys\nkeys = []\n")


def test_reference_page_is_what_the_schema_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text() == reference_markdown(), "run: headrace config reference > docs/configuration.md"


def test_reference_page_does_not_depend_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    before = reference_markdown()
    monkeypatch.setattr("socket.gethostname", lambda: "another-host")
    assert reference_markdown() == before
    assert "another-host" not in before
