"""Opening a log directory: who may, what is refused and why, and that nothing is left behind when it fails."""

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import LogDamaged, LogError, LogLocked, LogVersion
from headrace.log import Log, LogReader, verify
from tests.log.conftest import SMALL
from tests.log.patience import append, append_many, fill_pool
from tests.oracle import log as twin

OpenLog = Callable[..., Log]

HOLD_OPEN = """
import sys
from headrace.log import Log
log = Log(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def in_use() -> tuple[int, int]:
    """Descriptors and threads of this process, without what only waits to be collected."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


# --- one writer ---------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_and_told_who_has_it(directory: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_OPEN, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(LogLocked, match=rf"is in use by another process \(pid {holder.pid}\)"):
            Log(directory)
        assert list(LogReader(directory)) == []
        assert verify(directory).problems == []
    finally:
        holder.kill()
        holder.communicate()
    with Log(directory) as log:  # the lock died with its holder
        assert log.recovery.damage == ()


def test_a_second_log_in_the_same_process_is_refused(directory: Path, open_log: OpenLog) -> None:
    log = open_log()
    with pytest.raises(LogLocked, match="already open in this process"):
        Log(directory)
    log.append(log.topic("a"), b"still works")
    log.close()
    assert [record.payload for record in open_log().reader()] == [b"still works"]


def test_logs_are_opened_one_after_another_and_side_by_side(tmp_path: Path) -> None:
    for _ in range(3):
        with Log(tmp_path / "a", **SMALL) as a, Log(tmp_path / "b", **SMALL) as b:
            a.append(a.topic("a"), b"for a")
            b.append(b.topic("b"), b"for b")
    with Log(tmp_path / "a", **SMALL) as a, Log(tmp_path / "b", **SMALL) as b:
        assert [record.payload for record in a.reader()] == [b"for a"] * 3
        assert [record.payload for record in b.reader()] == [b"for b"] * 3
        assert a.id != b.id


# --- what is not a log --------------------------------------------------------------------------------------


def test_a_newer_version_is_refused(directory: Path, open_log: OpenLog) -> None:
    open_log().close()
    stated = json.loads((directory / "LOG").read_text())
    (directory / "LOG").write_text(json.dumps(stated | {"version": 2}))
    for use in (Log, LogReader, verify):
        with pytest.raises(LogVersion, match="LOG: log format version 2; this headrace reads version 1"):
            use(directory)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"version": "x"}', '{"version": 1}', '{"version": 1, "id": "00"}', "\xff"],
)
def test_a_log_file_that_cannot_be_understood_is_damage(
    directory: Path, open_log: OpenLog, text: str
) -> None:
    open_log().close()
    (directory / "LOG").write_text(text, encoding="latin-1")
    for use in (Log, LogReader, verify):
        with pytest.raises(LogDamaged, match="not a log's identity"):
            use(directory)


def test_segments_without_their_log_file_are_refused_and_left_alone(
    directory: Path, open_log: OpenLog
) -> None:
    open_log().close()
    (directory / "LOG").unlink()
    before = sorted(os.listdir(directory))
    with pytest.raises(LogDamaged, match="has segments but no LOG file"):
        Log(directory)
    for use in (LogReader, verify):
        with pytest.raises(LogError, match="is not a headrace log: it has no LOG file"):
            use(directory)
    assert sorted(os.listdir(directory)) == before


def test_a_directory_of_something_else_is_refused_and_left_alone(directory: Path) -> None:
    directory.mkdir()
    (directory / "thesis.tex").touch()
    with pytest.raises(LogError, match=r"is not a headrace log, and not empty: it has thesis\.tex"):
        Log(directory)
    assert os.listdir(directory) == ["thesis.tex"]


def test_a_log_that_was_never_finished_making_is_made_now(directory: Path) -> None:
    directory.mkdir()
    (directory / "LOCK").touch()
    (directory / "LOG.tmp").write_text("{")
    (directory / "lost+found").mkdir()
    with Log(directory, **SMALL) as log:
        assert log.append(log.topic("a"), b"x") == 0


def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(LogError, match="cannot open the log"):
            Log(path)
        for use in (LogReader, verify):
            with pytest.raises(LogError, match="headrace log"):
                use(path)


def test_a_missing_directory_is_no_log_to_read(directory: Path) -> None:
    for use in (LogReader, verify):
        with pytest.raises(LogError, match="is not a headrace log"):
            use(directory)
    assert not directory.exists()


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="too long"):
        Log(tmp_path / ("a" * 4096))


def test_a_segment_of_another_log_is_never_mended(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with Log(tmp_path / name, **SMALL) as log:
            log.append(log.topic("t"), name.encode())
            other = log.id_text
    stranger = twin.segment_path(tmp_path / "a", 1)
    shutil.copyfile(twin.segment_path(tmp_path / "b", 1), stranger)
    before = stranger.read_bytes()
    with pytest.raises(LogDamaged, match=f"00000000000000000001.seg belongs to log {other}"):
        Log(tmp_path / "a")
    assert stranger.read_bytes() == before
    assert [problem.segment for problem in verify(tmp_path / "a").problems][:1] == [1]


# --- nothing is left behind ---------------------------------------------------------------------------------


def test_opening_and_closing_leaves_no_descriptor_and_no_thread(directory: Path, open_log: OpenLog) -> None:
    open_log().close()
    before = in_use()
    for _ in range(5):
        log = open_log(sync="none")
        append_many(log, log.topic("a"), bytes(200 * 1000), 1000)
        reader = log.reader()
        assert next(reader)
        reader.close()
        log.close()
        log.close()
    assert in_use() == before


def test_a_log_that_is_only_dropped_lets_go(directory: Path) -> None:
    before = in_use()
    log = Log(directory, **SMALL)
    log.append(log.topic("a"), b"x")
    assert in_use() > before
    del log
    assert in_use() == before
    log = Log(directory, **SMALL)
    cycle = [log]
    cycle.append(cycle)  # type: ignore[arg-type]
    del log, cycle
    assert in_use() == before
    with Log(directory, **SMALL) as log:
        assert [record.payload for record in log.reader()] == [b"x"]


def test_an_opening_that_fails_leaves_nothing_open(tmp_path: Path) -> None:
    with Log(tmp_path / "locked", **SMALL) as holder:
        holder.append(holder.topic("a"), b"x")
        with Log(tmp_path / "broken", **SMALL) as log:
            log.append(log.topic("a"), b"x")
        twin.segment_path(tmp_path / "broken", 2).write_bytes(twin.Segment(bytes(16), 2).encode())
        (tmp_path / "newer").mkdir()
        (tmp_path / "newer" / "LOG").write_text('{"version": 9, "id": ""}')
        (tmp_path / "file").touch()
        before = in_use()
        for name in ("locked", "broken", "newer", "file"):
            for _ in range(3):
                with pytest.raises(LogError):
                    Log(tmp_path / name)
        with pytest.raises(ValueError, match="sync policy"):
            Log(tmp_path / "x", sync="?")
        with pytest.raises(TypeError):
            Log()  # type: ignore[call-arg]
        assert in_use() == before


def test_a_log_is_opened_only_once(open_log: OpenLog, directory: Path) -> None:
    log = open_log()
    with pytest.raises(LogError, match="opened once"):
        log.__init__(directory)  # type: ignore[misc]
    log.append(log.topic("a"), b"still works")


def test_a_long_log_holds_few_descriptors(open_log: OpenLog) -> None:
    log = open_log(retention_bytes=200 * 65536)
    before = in_use()[0]
    append_many(log, log.topic("a"), bytes(3000 * 1000), 1000)
    log.sync_now()
    assert len(log.segments()) > 40
    assert in_use()[0] < before + 10
    log.close()
    before = in_use()[0]
    log = open_log(retention_bytes=200 * 65536)
    assert in_use()[0] < before + 10


def test_segments_are_not_inherited_by_children(open_log: OpenLog) -> None:
    log = open_log()
    append_many(log, log.topic("a"), bytes(100 * 1000), 1000)
    fill_pool(log)
    own = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    assert any(name.endswith(".seg") for name in own)
    script = (
        "import os; print([os.path.realpath('/proc/self/fd/' + fd) for fd in os.listdir('/proc/self/fd')])"
    )
    seen = subprocess.run(
        [sys.executable, "-c", script], close_fds=False, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert ".seg" not in seen.stdout
    assert "LOCK" not in seen.stdout


def test_signals_stay_with_the_main_thread(open_log: OpenLog) -> None:
    """The log's threads block every signal: one that they took would interrupt a sync."""
    before = {int(task) for task in os.listdir("/proc/self/task")}
    open_log()
    started = {int(task) for task in os.listdir("/proc/self/task")} - before
    assert len(started) == 2
    for task in started:
        status = Path(f"/proc/self/task/{task}/status").read_text()
        blocked = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk")), 16)
        for signal in (1, 2, 14, 15, 17):
            assert blocked & 1 << (signal - 1)
    assert threading.active_count() >= 1


# --- sizes that change --------------------------------------------------------------------------------------


def test_a_log_goes_on_with_another_segment_size(directory: Path, open_log: OpenLog) -> None:
    log = open_log(sync="none")
    topic = log.topic("a")
    payloads = [bytes([i % 256]) * 3000 for i in range(100)]
    for payload in payloads[:40]:
        append(log, topic, payload)
    fill_pool(log)
    log.close()
    log = open_log(sync="none", segment_bytes=4 * 65536)
    topic = log.topic("a")
    append(log, topic, bytes(100_000))
    for payload in payloads[40:]:
        append(log, topic, payload)
    log.close()
    log = open_log(sync="none")
    assert [record.payload for record in log.reader()] == [*payloads[:40], bytes(100_000), *payloads[40:]]
    assert verify(directory).problems == []
    assert len({os.path.getsize(info.path) for info in log.segments()}) == 2
