"""[[map]]: which rules go together, and what they come to."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.cli import main
from headrace.config import load
from headrace.config.maps import endpoint_rule, map_of
from headrace.errors import ConfigError


def written(tmp_path: Path, *rules: dict[str, str], more: str = "") -> Path:
    file = tmp_path / "headrace.toml"
    tables = ["[[map]]\n" + "".join(f"{key} = '{value}'\n" for key, value in rule.items()) for rule in rules]
    file.write_text(more + "\n".join(tables))
    return file


def problems(tmp_path: Path, *rules: dict[str, str], more: str = "") -> list[str]:
    try:
        load(written(tmp_path, *rules, more=more), {}, ())
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def rule(listener: str, address: str, topic: str, **more: str) -> dict[str, str]:
    return {"listener": listener, "address": address, "topic": topic, **more}


def test_listener_without_rules_has_no_map(tmp_path: Path) -> None:
    config = load(written(tmp_path, rule("blipmq", "a/{x}", "b.{x}")), {}, ()).config
    assert map_of(config, "felix") is None
    own = map_of(config, "blipmq")
    assert own is not None
    assert own.topic(b"a/1") == b"b.1"


def test_keys_of_nodes_and_services_stay_as_they_are(tmp_path: Path) -> None:
    config = load(written(tmp_path, rule("zeroctl", "a.{x}", "b.{x}")), {}, ()).config
    own = map_of(config, "zeroctl")
    assert own is not None
    assert own.topic(b"discovery.node.x") == b"discovery.node.x"
    assert own.address(b"service.x.y") == b"service.x.y"


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ([rule("blipmq", "a/{x}", "b.{y}")], '"{x}" is not in the topic, so that there is no way back'),
        (
            [rule("blipmq", "a/{x}", "b.{x}"), rule("blipmq", "a/1", "c.1")],
            'map[1]: "a/1" and "a/{x}" of map[0] have addresses in common',
        ),
        (
            [rule("blipmq", "a/{x}", "b.{x}"), rule("blipmq", "c/{x}", "b.{x}")],
            'map[1]: "b.{x}" and "b.{x}" of map[0] have topics in common',
        ),
        ([rule("zeroctl", "{rest...}", "x.{rest...}")], "is for zeroctl's nodes"),
        ([rule("zeroctl", "x.{rest...}", "{rest...}")], "is for zeroctl's nodes"),
        ([rule("zeroctl", "é.{x}", "e.{x}")], "printable ASCII"),
        ([rule("zeroctl", "a.*.{x}", "e.{x}")], 'no word of a routing key is "*"'),
        ([rule("felix", "a/{x}", "e.{x}")], '"tenant/namespace/stream"'),
        ([rule("overhop", "a.{x}", "e.{x}")], "a queue's name, which has no dots"),
        ([rule("relink", "{e}/{channel}", "e.{e}.{channel}")], 'say direction = "publish" or "deliver"'),
        (
            [rule("relink", "{e}/{number}", "e.{e}.{number}", direction="publish")],
            'an address of Relink is "endpoint/{channel}"',
        ),
        (
            [rule("relink", "{e}/{channel}", "e.{e}-{channel}x.y", direction="publish")],
            'between "{e}" and "{channel}"',
        ),
        (
            [rule("relink", "{e}/{channel}", "e.{e}.c{channel}", direction="publish")],
            "{channel} is a whole word",
        ),
        (
            [rule("relink", "other/{channel}", "e.{channel}", direction="deliver")],
            "endpoints[0].deliver: no rule of [[map]] has a topic for 'demo/{channel}'",
        ),
        ([rule("blipmq", "a/{x}", "b.{x}", direction="publish")], 'only listener = "relink" has a direction'),
        ([rule("mqtt", "a/{x}", "b.{x}")], "listener"),
        ([rule("blipmq", "a/{x", "b.{x}")], 'there is a single "{" in it'),
        ([rule("blipmq", "a/{x}", "b.#.{x}")], '"#" is no word of a topic'),
    ],
)
def test_rules_that_do_not_go_together_are_told(
    tmp_path: Path, rules: list[dict[str, str]], reason: str
) -> None:
    assert any(reason in problem for problem in problems(tmp_path, *rules)), problems(tmp_path, *rules)


def test_rules_of_two_listeners_may_share_topics(tmp_path: Path) -> None:
    assert problems(tmp_path, rule("blipmq", "a/{x}", "b.{x}"), rule("zeroctl", "z.{x}", "b.{x}")) == []


@pytest.mark.parametrize("filter", ["", 'filter = "post.#"'])
def test_queue_needs_a_rule_for_its_name(tmp_path: Path, filter: str) -> None:
    more = f'[[queues]]\nname = "jobs-a"\n[[queues]]\nname = "mail"\n{filter}\n'
    assert problems(tmp_path, rule("overhop", "jobs-{x}", "work.{x}"), more=more) == [
        f"{tmp_path}/headrace.toml:4: queues[1].name: no rule of [[map]] has a topic for 'mail'; give it one"
    ]
    assert problems(tmp_path, rule("blipmq", "jobs-{x}", "work.{x}"), more=more) == []
    assert len(problems(tmp_path, rule("overhop", "jobs-{x", "work.{x}"), more=more)) == 1


def test_endpoint_keeps_a_rule_of_its_own(tmp_path: Path) -> None:
    more = '[[endpoints]]\nname = "one"\n[[endpoints]]\nname = "two"\npublish = "own.{channel}"\n'
    config = load(
        written(tmp_path, rule("relink", "{e}/{channel}", "x.{channel}.{e}", direction="publish"), more=more),
        {},
        (),
    ).config
    assert endpoint_rule(config, config.endpoints[0], "publish") == "x.{channel}.one"
    assert endpoint_rule(config, config.endpoints[1], "publish") == "own.{channel}"
    assert endpoint_rule(config, config.endpoints[0], "deliver") == ""


ALL = (
    rule("blipmq", "sensors/{site}/{rest...}", "plant.{site}.{rest...}"),
    rule("zeroctl", "edge.{rest...}", "plant.{rest...}"),
    rule("overhop", "{name}", "plant.work.{name}"),
    rule("relink", "{endpoint}/{channel}", "plant.{endpoint}.{channel}", direction="publish"),
    rule("relink", "{endpoint}/{channel}", "plant.to-{endpoint}.{channel}", direction="deliver"),
)


@pytest.mark.parametrize(
    ("listener", "address", "answer"),
    [
        ("blipmq", "sensors/n1/t", ["plant.n1.t", "sensors/n1/t", "-", "-", "edge.n1.t", "plant/n1/t"]),
        ("zeroctl", "edge.work.clean", ["plant.work.clean", "sensors/work/clean", "clean", "-"]),
        ("overhop", "clean", ["plant.work.clean", "sensors/work/clean", "clean", "-", "edge.work.clean"]),
        ("felix", "plant/to-demo/7", ["plant.to-demo.7", "sensors/to-demo/7", "-", "demo/7"]),
        ("relink", "demo/7", ["plant.demo.7", "sensors/demo/7", "-", "-", "edge.demo.7", "plant/demo/7"]),
    ],
)
def test_command_shows_what_all_listeners_call_a_topic(
    tmp_path: Path, listener: str, address: str, answer: list[str]
) -> None:
    file = written(tmp_path, *ALL, more='[[queues]]\nname = "clean"\n')
    result = CliRunner().invoke(main, ["config", "map", "--config", str(file), listener, address])
    assert result.exit_code == 0, result.output
    told = [line.split()[1] for line in result.output.splitlines()]
    assert told[: len(answer)] == answer
    labels = [line.split()[0] for line in result.output.splitlines()]
    assert labels == ["topic", "blipmq", "overhop", "relink", "zeroctl", "felix"]


@pytest.mark.parametrize(
    ("listener", "address", "reason"),
    [
        ("blipmq", "other", "no rule of [[map]] has a topic for 'other'"),
        ("zeroctl", "a.*", "no routing key"),
        ("felix", "a/b", "tenant/namespace/stream"),
        ("relink", "other/1", "there is no endpoint 'other'"),
    ],
)
def test_command_says_why_an_address_has_no_topic(
    tmp_path: Path, listener: str, address: str, reason: str
) -> None:
    result = CliRunner().invoke(
        main, ["config", "map", "--config", str(written(tmp_path, *ALL)), listener, address]
    )
    assert result.exit_code == 1
    assert reason in result.output


def test_page_shows_what_the_command_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "addresses.md").read_text()
    (rules,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "headrace.toml").write_text(rules)
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"```console\n\$ headrace (.*?)\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 2
    for command, answer in shown:
        # The first one is about a gateway without rules.
        file = (tmp_path / "headrace.toml").rename(tmp_path / "kept.toml")
        if "--config" in command:
            file = file.rename(tmp_path / "headrace.toml")
        assert CliRunner().invoke(main, command.split()).output == answer
        file.rename(tmp_path / "headrace.toml")
