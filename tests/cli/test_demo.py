"""`headrace demo`: all five protocols at once, on real sockets, and books that balance or say that they do not."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.cli import demo, main
from headrace.clients.load import Latencies
from headrace.demo.books import Numbers, Stray, Stream
from headrace.demo.plant import Plant
from tests.gateway.gateways import MAIN, PATIENCE

PAGE = Path(__file__).parents[2] / "docs" / "demo.md"
ALL_ADDS_UP = "the numbers add up, and every offset is in the drop once"
STREAMS = ("sensors", "meters", "jobs", "commands", "events", "requests")
PROTOCOLS = {"blipmq", "felix", "overhop", "relink", "zeroctl"}


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", MAIN, "demo", *words]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=4 * PATIENCE)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, ["demo", *words], catch_exceptions=False)


def rows(output: str) -> Iterator[tuple[str, str, str, list[int]]]:
    """Stream, publisher, reader, and the numbers of the summary."""
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if cells and cells[0] in STREAMS:
            yield cells[0], cells[1], cells[2], [int(cell.replace(",", "")) for cell in cells[3:9]]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One run, and the directory that it left."""
    home = tmp_path_factory.mktemp("demo") / "home"
    return home, run("--no-live", "--seconds", "2", "--rate", "700", "--data", str(home))


def test_summary_adds_up(kept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, ended = kept
    assert ended.returncode == 0, ended
    assert ALL_ADDS_UP in ended.stdout
    found = list(rows(ended.stdout))
    assert {row[0] for row in found} == set(STREAMS)
    assert {row[1] for row in found} == {row[2] for row in found} == PROTOCOLS
    for stream, _, _, (published, delivered, dead, held, again, in_drop) in found:
        assert published == delivered + dead + held == in_drop > 0
        assert (dead > 0, held > 0) == (stream == "jobs", stream == "jobs")
        assert again > 0 or stream != "jobs"


def test_plain_lines_tell_rates_latencies_log_and_drop(
    kept: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, ended = kept
    line = (
        r"\d+ s  published .*/s\)  delivered .*  p50 [\d.]+ ms  p99 [\d.]+ ms  log [\d,]+  drop \d+ files?,"
    )
    assert re.search(line, ended.stdout), ended.stdout
    assert "\x1b" not in ended.stdout


@pytest.mark.needs("java")
def test_spark_follows_the_drop_and_takes_every_row(tmp_path: Path) -> None:
    ended = run("--no-live", "--seconds", "8", "--rate", "300", "--data", str(tmp_path / "home"), "--spark")
    assert ended.returncode == 0, ended
    assert ALL_ADDS_UP in ended.stdout
    [in_drop] = re.findall(r"the drop has .* with ([\d,]+) rows", ended.stdout)
    assert f"Spark's rollup, which followed the drop, took {in_drop} messages" in ended.stdout
    batches = re.findall(r"Spark's rollup: batch \d+: ([\d,]+) messages?", ended.stdout)
    assert sum(int(count.replace(",", "")) for count in batches) == int(in_drop.replace(",", ""))
    # And what a user would run over all of it afterwards.
    _, _, shown = ended.stdout.partition("$ headrace spark rollup")
    assert "plant.sensor.0" in shown


def test_what_it_kept_is_a_log_and_a_drop(kept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    home, ended = kept
    assert f"log and drop are in {home / 'data'}" in ended.stdout
    runner = CliRunner()
    assert runner.invoke(main, ["drop", "verify", str(home / "data" / "drop")]).exit_code == 0
    info = runner.invoke(main, ["log", "info", str(home / "data" / "log"), "--json"])
    end = json.loads(info.output)["end_offset"]
    assert f"the log has {end:,} offsets" in ended.stdout


def test_it_counts_from_nothing(kept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    home, _ = kept
    result = invoke("--data", str(home))
    assert result.exit_code == 1
    assert "is not empty" in result.output


def test_a_file_that_is_gone_is_found_out(tmp_path: Path) -> None:
    home = tmp_path / "home"
    gone: list[Path] = []
    over = threading.Event()

    def thief() -> None:
        while not gone and not over.wait(0.01):
            for file in home.glob("data/drop/date=*/hour=*/*.parquet"):
                file.unlink()
                gone.append(file)
                break

    stealing = threading.Thread(target=thief)
    stealing.start()
    ended = run("--no-live", "--seconds", "1.5", "--rate", "200", "--data", str(home))
    over.set()
    stealing.join()
    assert gone
    assert ended.returncode == 1, ended
    assert "are in no file" in ended.stdout
    assert "the numbers do not add up" in ended.stdout


def test_live_screen_that_is_interrupted_ends_with_the_summary(tmp_path: Path) -> None:
    screen, terminal = pty.openpty()
    seen = bytearray()

    def read() -> bool:
        assert select.select([screen], [], [], PATIENCE)[0], bytes(seen)
        try:
            data = os.read(screen, 65536)
        except OSError:  # nobody has the terminal any more
            return False
        seen.extend(data)
        return bool(data)

    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "60"}
    child = subprocess.Popen(
        command("--rate", "200"), stdin=terminal, stdout=terminal, stderr=terminal, env=environ
    )
    os.close(terminal)
    try:
        while b"newest drop files" not in seen:
            assert read(), bytes(seen)
        for word in ("streams", "protocols", "log and bus", "drops", "p99", "s left", "sensors", *PROTOCOLS):
            assert word.encode() in seen
        child.send_signal(signal.SIGINT)
        while read():
            pass
        assert child.wait(PATIENCE) == 0
        assert ALL_ADDS_UP.encode() in seen
    finally:
        child.kill()
        child.wait()
        os.close(screen)


def test_a_demo_that_is_killed_leaves_no_gateway_behind(tmp_path: Path) -> None:
    child = subprocess.Popen(
        command("--no-live", "--data", str(tmp_path / "home")), stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child.stdout as output:
        assert output.readline()
        places = output.readline()
        child.kill()
        child.wait(PATIENCE)
    assert "admin 127.0.0.1:" in places
    lines = tmp_path / "home" / "gateway.log"
    deadline = time.monotonic() + PATIENCE
    while "gateway.stopped" not in lines.read_text():
        assert time.monotonic() < deadline, lines.read_text()
        time.sleep(0.02)


def test_a_gateway_that_is_killed_is_told(tmp_path: Path) -> None:
    child = subprocess.Popen(command("--no-live"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        while "published" not in (line := child.stdout.readline()):
            assert line
        processes = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
        )
        (gateway,) = [
            int(pid)
            for pid, parent in map(str.split, processes.stdout.splitlines())
            if int(parent) == child.pid
        ]
        os.kill(gateway, signal.SIGKILL)
        _, errors = child.communicate(timeout=PATIENCE)
        assert child.returncode == 1
        assert "Error: the gateway ended with -9" in errors
    finally:
        child.kill()
        child.communicate()


def test_a_gateway_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.plants, "CONFIG", "[nonsense]")
    result = invoke("--no-live")
    assert result.exit_code == 1
    assert "the gateway could not start" in result.output
    assert "nonsense" in result.output


def test_spark_that_is_missing_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "pyspark" else object())
    result = invoke("--spark")
    assert result.exit_code == 1
    assert result.output.startswith("Error: --spark needs pyspark, which is not installed")


def test_java_that_is_missing_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    result = invoke("--spark")
    assert result.exit_code == 1
    assert result.output.startswith("Error: Spark needs Java 17 or later")


def test_a_rollup_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    assert demo.roll_up(tmp_path) == 1


# --- the books ----------------------------------------------------------------------------------------------


def test_a_message_counts_once_however_often_and_in_whatever_order_it_comes() -> None:
    stream = Stream("sensors", "blipmq", ["plant.sensor.0"])
    reader = stream.read_by("felix")
    payloads = [stream.payload(0) for _ in range(4)]
    stream.published = 4
    for payload in (payloads[2], payloads[0], payloads[2], payloads[1], payloads[0]):
        reader.count(payload)
    assert (reader.delivered, reader.again, reader.missing) == (3, 2, 1)
    assert not reader.settled
    reader.count(payloads[3])
    assert reader.settled


def test_what_is_delivered_and_dead_is_one_too_many() -> None:
    stream = Stream("jobs", "overhop", ["queue.work.jobs"])
    reader = stream.read_by("overhop", "work")
    payload = stream.payload(0)
    stream.published = 1
    reader.count(payload)
    reader.bury(payload)
    reader.bury(payload)
    assert reader.missing == -1


def test_a_message_of_another_stream_is_no_delivery() -> None:
    reader = Stream("sensors", "blipmq", ["a"]).read_by("felix")
    with pytest.raises(Stray, match="got a message of the stream meters"):
        reader.count(Stream("meters", "felix", ["b"]).payload(0))


def test_numbers_in_order_are_not_kept() -> None:
    numbers = Numbers()
    assert all(numbers.add(number) for number in (3, 1, 0, 2))
    assert not any(numbers.add(number) for number in range(4))
    assert not numbers._ahead


def test_latencies_of_several_readers_are_told_together() -> None:
    every, some, others = Latencies(), Latencies(), Latencies()
    for number in range(1, 101):
        every.add(number / 1000, 1)
        (some if number % 3 else others).add(number / 1000, 1)
    some.merge(others)
    assert some.percentiles([50, 99, 100]) == every.percentiles([50, 99, 100])


# --- the page -----------------------------------------------------------------------------------------------


def test_page_has_every_stream_and_who_reads_it() -> None:
    for stream in Plant({}, 1).streams.values():
        readers = " and ".join(reader.protocol for reader in stream.readers)
        assert f"| {stream.name} | {stream.protocol} | {readers} |" in PAGE.read_text()


def test_page_has_every_option() -> None:
    for option in demo.command.params:
        assert f"`{option.opts[0]}" in PAGE.read_text()


def test_what_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = invoke("--data", str(tmp_path / "file" / "below"), "--seconds", "1")
    assert result.exit_code == 1
    assert result.stderr == f"Error: {tmp_path / 'file' / 'below'}: Not a directory\n"
