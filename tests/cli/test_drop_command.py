"""`headrace drop ls|verify|compact|prune`: what a person sees of a drop directory, and does to it."""

import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.cli import main
from headrace.drop.catalog import catalog
from headrace.drop.filesystems import place
from tests.drop.files import HOUR, LOG, NEXT_HOUR, put


@pytest.fixture
def drop(tmp_path: Path) -> Path:
    """Two hours of one node, one of another."""
    where = tmp_path / "data" / "drop"
    put(where, 0, 9)
    put(where, 10, 19)
    put(where, 20, 49, hour=NEXT_HOUR)
    put(where, 5, 9, node="gw-2")
    return where


@pytest.fixture
def compacted(drop: Path) -> Path:
    return drop.with_name("drop-compacted")


def run(*words: object, typed: str | None = None) -> Result:
    return CliRunner().invoke(
        main, ["drop", *(str(word) for word in words)], catch_exceptions=False, input=typed
    )


def lines(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def firsts(where: Path) -> list[tuple[str, int]]:
    return [(one.name.node, one.name.first) for one in catalog(place(where)).entries]


# --- ls -----------------------------------------------------------------------------------------------------


def test_ls_shows_each_hour_of_each_log(drop: Path) -> None:
    put(drop, 60, 69, hour=NEXT_HOUR, empty_before=3, filtered=True)
    found = lines(run("ls", drop, "--json"))
    assert [(one["hour"], one["node"], one["first"], one["last"]) for one in found] == [
        (HOUR, "gw-1", 0, 19),
        (HOUR, "gw-2", 5, 9),
        (NEXT_HOUR, "gw-1", 20, 69),
    ]
    assert [(one["files"], one["rows"], one["gaps"]) for one in found] == [(2, 20, 0), (1, 5, 0), (2, 40, 7)]
    assert found[0]["log"] == LOG
    assert found[1]["bytes"] == (drop / catalog(place(drop)).entries[2].path).stat().st_size
    shown = run("ls", drop).output
    assert re.search(rf"{HOUR} +│ gw-1 +│ {LOG} +│ 2 +│ 20 ", shown)
    assert "5 files, 65 rows" in shown


def test_ls_shows_each_file(drop: Path) -> None:
    found = lines(run("ls", drop, "--files", "--json"))
    assert [(one["node"], one["first"], one["last"], one["rows"]) for one in found] == [
        ("gw-1", 0, 9, 10),
        ("gw-1", 10, 19, 10),
        ("gw-1", 20, 49, 30),
        ("gw-2", 5, 9, 5),
    ]
    assert str(found[2]["file"]).startswith(NEXT_HOUR)
    assert str(found[2]["file"]) in run("ls", drop, "--files").output


def test_ls_says_where_it_cannot_read(drop: Path) -> None:
    file = drop / catalog(place(drop)).entries[0].path
    file.write_bytes(file.read_bytes()[:100])
    assert lines(run("ls", drop, "--files", "--json"))[0]["rows"] is None
    assert lines(run("ls", drop, "--json"))[0]["rows"] is None
    assert "?" in run("ls", drop).output


def test_ls_of_an_empty_directory_says_so(tmp_path: Path) -> None:
    assert run("ls", tmp_path).output == f"{tmp_path}: no files\n"


# --- which drop ---------------------------------------------------------------------------------------------


def test_drop_is_found_by_the_data_directory_and_the_configuration(drop: Path, tmp_path: Path) -> None:
    assert len(lines(run("ls", "--data", drop.parent, "--json"))) == 3
    other = tmp_path / "elsewhere"
    put(other, 0, 3)
    assert len(lines(run("ls", "--set", f"drop.uri={other}", "--json"))) == 1
    put(drop.parent / "drop-alarms", 0, 3)
    config = tmp_path / "headrace.toml"
    config.write_text('[[drops]]\nname = "alarms"\ntopics = ["alarm.#"]\n')
    found = lines(run("ls", "--config", config, "--data", drop.parent, "--name", "alarms", "--json"))
    assert [one["rows"] for one in found] == [4]
    result = run("ls", "--config", config, "--data", drop.parent, "--name", "alarm")
    assert result.exit_code == 1
    assert 'the configuration has no drop "alarm"; it has alarms, default' in result.stderr


@pytest.mark.parametrize("words", [("ls",), ("verify",), ("compact",), ("prune", "--older-than", "1d")])
def test_directory_that_is_not_there_is_said_so(tmp_path: Path, words: tuple[str, ...]) -> None:
    result = run(words[0], tmp_path / "nothing", *words[1:])
    assert result.exit_code == 1
    assert result.stderr == f"Error: {tmp_path}/nothing is not there\n"
    assert not (tmp_path / "nothing").exists()


# --- verify -------------------------------------------------------------------------------------------------


def test_verify_is_content_with_a_whole_drop(drop: Path) -> None:
    for words in ((), ("--quick",)):
        result = run("verify", drop, *words)
        assert result.exit_code == 0
        assert result.output == "no problems: 4 files with 55 rows, 0 compacted with 0\n"
    found = json.loads(run("verify", drop, "--json").output)
    assert (found["files"], found["rows"], found["problems"], found["missing"]) == (4, 55, [], [])


def test_verify_names_files_and_missing_offsets(drop: Path) -> None:
    wrong = put(drop, 60, 69, hour=NEXT_HOUR, offsets=range(60, 68))
    put(drop, 71, 79, hour=NEXT_HOUR)
    result = run("verify", drop)
    assert result.exit_code == 1
    assert f"{wrong}: it has 8 rows for 10 offsets" in result.output
    assert f"gw-1 {LOG}: offsets 50 to 59 missing before {wrong}\n" in result.output
    assert f"gw-1 {LOG}: offset 70 missing before " in result.output
    assert "3 problems: 6 files" in result.output
    result = run("verify", drop, "--quick", "--json")
    assert result.exit_code == 1
    found = json.loads(result.output)
    assert [(one["file"], one["kind"]) for one in found["problems"]] == [(str(wrong), "rows")]
    assert [(one["node"], one["first"], one["last"]) for one in found["missing"]] == [
        ("gw-1", 50, 59),
        ("gw-1", 70, 70),
    ]


def test_verify_says_what_the_log_had_lost(drop: Path) -> None:
    put(drop, 50, 59, hour=NEXT_HOUR, offsets=range(54, 60), missing=[(50, 53)])
    result = run("verify", drop)
    assert result.exit_code == 0
    assert "4 offsets lost by the log" in result.output


def test_verify_looks_at_the_compacted_directory_if_there_is_one(drop: Path, compacted: Path) -> None:
    put(compacted, 0, 19, payload=[b"?"] * 20)
    for words in ((), ("--compacted", compacted)):
        result = run("verify", drop, *words)
        assert result.exit_code == 1
        assert f"{compacted}/{HOUR}" in result.output
        assert "its rows are not those of" in result.output
    result = run("verify", drop, "--compacted", compacted / "nothing")
    assert result.exit_code == 1
    assert "nothing is not there" in result.stderr


# --- compact ------------------------------------------------------------------------------------------------


def test_compact_merges_past_hours_beside_the_drop(drop: Path, compacted: Path) -> None:
    result = run("compact", drop, "--dry-run")
    assert result.exit_code == 0
    assert "would make 3 files from 4" in result.output
    assert not compacted.exists()
    result = run("compact", drop)
    assert result.exit_code == 0
    assert "2 files, 20 rows" in result.output
    assert "made 3 files from 4" in result.output
    assert firsts(compacted) == [("gw-1", 0), ("gw-2", 5), ("gw-1", 20)]
    assert "made 0 files from 0" in run("compact", drop).output
    assert run("verify", drop).output == "no problems: 4 files with 55 rows, 3 compacted with 55\n"


def test_compact_takes_a_place_a_size_and_a_time(drop: Path, tmp_path: Path) -> None:
    run("compact", drop, "--to", tmp_path / "large", "--target-bytes", "1KiB")
    assert len(firsts(tmp_path / "large")) == 4
    run("compact", drop, "--to", tmp_path / "later", "--closed-after", "100000d")
    assert firsts(tmp_path / "later") == []
    result = run("compact", drop, "--target-bytes", "10K")
    assert result.exit_code == 2
    assert "is not one of the units" in result.stderr


def test_compact_says_what_it_left(drop: Path, compacted: Path) -> None:
    bad = put(drop, 10, 19, offsets=range(10, 18))
    result = run("compact", drop)
    assert result.exit_code == 1
    assert f"{bad} was left: it has 8 rows for 10 offsets" in result.stderr
    assert firsts(compacted) == [("gw-1", 0), ("gw-2", 5), ("gw-1", 20)]


def test_compact_says_that_another_one_runs(drop: Path, compacted: Path) -> None:
    with place(compacted).lock("compact"):
        result = run("compact", drop)
    assert result.exit_code == 1
    assert result.stderr == f"Error: another compact runs in {compacted}\n"


# --- prune --------------------------------------------------------------------------------------------------


def test_prune_asks_shows_and_removes(drop: Path) -> None:
    result = run("prune", drop, "--older-than", "1d", "--dry-run")
    assert result.exit_code == 0
    assert "would remove 2 files" in result.output
    result = run("prune", drop, "--older-than", "1d", typed="n\n")
    assert result.exit_code == 1
    result = run("prune", drop, "--older-than", "1d")  # nobody to ask
    assert result.exit_code == 1
    assert len(firsts(drop)) == 4
    result = run("prune", drop, "--older-than", "1d", typed="y\n")
    assert result.exit_code == 0
    assert "removed 2 files" in result.output
    assert firsts(drop) == [("gw-2", 5), ("gw-1", 20)]
    assert run("prune", drop, "--older-than", "1d", "--yes").output == "nothing to remove\n"


def test_prune_wants_to_know_what(drop: Path) -> None:
    result = run("prune", drop, "--yes")
    assert result.exit_code == 2
    assert "say what is to go" in result.stderr


def test_prune_by_bytes(drop: Path) -> None:
    total = sum(one.size for one in catalog(place(drop)).entries)
    assert run("prune", drop, "--keep-bytes", total, "--yes").output == "nothing to remove\n"
    run("prune", drop, "--keep-bytes", total - 1, "--yes")
    assert firsts(drop) == [("gw-1", 10), ("gw-2", 5), ("gw-1", 20)]


def test_prune_of_what_was_compacted(drop: Path, compacted: Path) -> None:
    run("compact", drop)
    assert run("prune", drop, "--compacted-only", "--yes").output == "nothing to remove\n"
    result = run("prune", drop, "--compacted-only", "--grace", "0s", "--yes")
    assert "removed 2 files" in result.output
    assert firsts(drop) == [("gw-2", 5), ("gw-1", 20)]
    assert len(firsts(compacted)) == 3
    assert run("verify", drop).exit_code == 0


def test_prune_of_compacted_files_by_age(drop: Path, compacted: Path) -> None:
    run("compact", drop)
    result = run("prune", drop, "--older-than", "100000d", "--to", compacted, "--yes")
    assert result.output == "nothing to remove\n"
    result = run("prune", drop, "--older-than", "1d", "--to", compacted, "--yes")
    assert "removed 5 files" in result.output
    assert firsts(compacted) == []
    assert firsts(drop) == [("gw-2", 5), ("gw-1", 20)]


def test_prune_tells_of_what_is_left_in_staging(drop: Path) -> None:
    staging = drop / "_staging"
    staging.mkdir()
    (staging / "half.parquet").write_bytes(b"12345")
    os.utime(staging / "half.parquet", (1_000_000, 1_000_000))
    result = run("prune", drop, "--keep-bytes", "1GiB", "--yes")
    assert "1 file left in _staging more than a day ago; --staging removes them" in result.stderr
    assert (staging / "half.parquet").exists()
    result = run("prune", drop, "--staging", "--yes")
    assert "removed 1 file, 5 bytes" in result.output
    assert not (staging / "half.parquet").exists()
