"""`headrace log info|dump|verify`: what a log directory holds, also while it is written, and where it is damaged."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.bus import Bus
from headrace.cli import main
from headrace.log import Log
from tests.log.patience import fill_pool


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """A log of several segments, open for writing."""
    opened = Log(tmp_path / "log", segment_bytes=65536, pool_segments=1, retention_bytes=1 << 20)
    bus = Bus(opened)
    for i in range(300):
        fill_pool(opened)
        payload = b"\xff\xfe" if i == 3 else b"hello %d" % i + b"." * 400
        bus.publish(f"site.{i % 2}", payload, protocol=1, correlation=i, headers=b'{"a": "b"}', parts=(2,))
    bus.close()
    opened.sync_now()
    yield opened
    opened.close()


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["log", *words], catch_exceptions=False)


def test_info_shows_identity_and_segments_while_the_log_is_written(log: Log) -> None:
    result = run("info", log.path, "--json")
    assert result.exit_code == 0
    shown = json.loads(result.output)
    assert (shown["id"], shown["version"]) == (log.id_text, 1)
    assert (shown["first_offset"], shown["end_offset"]) == (0, 300)
    assert [one["number"] for one in shown["segments"]] == [one.number for one in log.segments()]
    assert sum(one["end_offset"] - one["first_offset"] for one in shown["segments"]) == 300
    assert log.id_text in run("info", log.path).output


def test_info_shows_what_repairs_have_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Log(path, segment_bytes=65536, pool_segments=1) as log:
        log.append(log.topic("a"), b"hurt")
        place = log.segments()[0].path
    assert json.loads(run("info", str(path), "--json").output)["aside"] == []
    with open(place, "r+b") as file:
        file.seek(4096 + 48 + 60)
        file.write(b"Z")
    Log(path, segment_bytes=65536, pool_segments=1).close()
    assert json.loads(run("info", str(path), "--json").output)["aside"] == ["00000000000000000001.seg"]
    assert "kept aside by a repair: aside/00000000000000000001.seg\n" in run("info", str(path)).output


def test_dump_shows_each_message_as_a_line(log: Log) -> None:
    lines = [json.loads(line) for line in run("dump", log.path).output.splitlines()]
    assert [line["offset"] for line in lines] == list(range(300))
    assert lines[5]["payload"] == "hello 5" + "." * 400
    assert base64.b64decode(lines[3]["payload_base64"]) == b"\xff\xfe"
    assert (lines[5]["topic"], lines[5]["protocol"], lines[5]["correlation"]) == ("site.1", "blipmq", 5)
    assert (lines[5]["headers"], lines[5]["parts"]) == ('{"a": "b"}', [2])


def test_dump_takes_a_beginning_a_count_a_topic_and_control_records(log: Log) -> None:
    result = run("dump", log.path, "--from", "100", "--count", "3", "--topic", "site.0")
    assert [json.loads(line)["offset"] for line in result.output.splitlines()] == [100, 102, 104]
    lines = [json.loads(line) for line in run("dump", log.path, "--controls").output.splitlines()]
    assert lines[0]["control"] == "open"
    assert {"site.0", "site.1"} <= {line["payload"] for line in lines if line.get("control") == "topic"}


def test_verify_is_content_with_a_whole_log(log: Log) -> None:
    result = run("verify", log.path)
    assert result.exit_code == 0
    assert "no problems" in result.output
    assert "300 messages, offsets 0 to 300" in result.output


def test_verify_and_dump_name_a_damaged_record_and_go_on_behind_it(log: Log) -> None:
    place = json.loads(run("dump", log.path, "--from", "42", "--count", "1").output)
    with open(log.segments()[0].path, "r+b") as file:
        file.seek(place["position"] + 60)
        file.write(b"Z")
    result = run("verify", log.path)
    assert result.exit_code == 1
    assert (
        f"{place['segment']:020d}.seg position {place['position']} (offset 42, 1 offset lost)"
        in result.output
    )
    problems = json.loads(run("verify", log.path, "--json").output)["problems"]
    assert [(one["segment"], one["position"]) for one in problems] == [(place["segment"], place["position"])]
    result = run("dump", log.path)
    assert result.exit_code == 1
    offsets = [json.loads(line)["offset"] for line in result.stdout.splitlines()]
    assert offsets == [offset for offset in range(300) if offset != 42]
    assert f"position {place['position']}" in result.stderr


def test_directory_that_is_no_log_is_said_so(tmp_path: Path) -> None:
    for words in (("info",), ("dump",), ("verify",)):
        result = run(*words, str(tmp_path))
        assert result.exit_code != 0
        assert "is not a headrace log" in result.output
