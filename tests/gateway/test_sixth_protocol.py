"""The protocol of docs/sixth-protocol.md, as it stands there: without a network, and in a gateway among the others."""

import asyncio
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bus import Bus
from headrace.clients.blipmq import BlipmqClient
from headrace.config.schema import dev_key
from headrace.log import Log, LogReader
from headrace.sessions.rights import Keyring
from tests.conftest import SOAK
from tests.gateway.gateways import MAIN, PATIENCE, GatewayProcess

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sixth-protocol.md").read_text("utf-8")
PROGRAM = "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
NOW = 1_700_000_000_000_000


def load(directory: Path) -> ModuleType:
    path = directory / "lines.py"
    path.write_text(PROGRAM, "utf-8")
    spec = importlib.util.spec_from_file_location("lines", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- without a network --------------------------------------------------------------------------------------------


class Passive:
    """A bus, and sessions of Lines that are fed by hand. What is published is safe at once."""

    def __init__(self, home: Path, **options: Any) -> None:
        self.module = load(home)
        self.log = Log(home / "log", sync="none", **{"segment_bytes": 256 * 1024, **options})
        self.bus = Bus(self.log)
        self.shared = self.module.Lines(self.bus, Keyring([dev_key()]))

    def session(self, *, known: bool = True) -> Any:
        made = self.module.LinesSession(self.shared)
        if known:
            assert made.feed(b"KEY dev-key\n", NOW) == b"OK\n"
        return made

    def close(self) -> None:
        self.bus.close()
        self.log.close()


@pytest.fixture
def passive(tmp_path: Path) -> Iterator[Passive]:
    made = Passive(tmp_path)
    yield made
    made.close()


def conversation() -> list[tuple[bytes, bytes]]:
    """What the page's conversation sends, and what it is answered with, turn by turn."""
    (text,) = re.findall(r"```lines\n(.*?)```", PAGE, re.DOTALL)
    turns: list[tuple[bytes, bytes]] = []
    for line in text.splitlines():
        said = line[2:].encode() + b"\n"
        if line[0] == ">" and (not turns or turns[-1][1]):
            turns.append((said, b""))
        elif line[0] == ">":
            turns[-1] = turns[-1][0] + said, b""
        else:
            turns[-1] = turns[-1][0], turns[-1][1] + said
    # A body has no end of line; on the page it has one, to be read.
    return [(sent.replace(b"21.5\n", b"21.5"), heard.replace(b"21.5\n", b"21.5")) for sent, heard in turns]


@pytest.mark.parametrize("step", [1, 1000])
def test_the_conversation_of_the_page_is_what_happens(passive: Passive, step: int) -> None:
    session = passive.session(known=False)
    for sent, heard in conversation():
        answer = b"".join(session.feed(sent[at : at + step], NOW) for at in range(0, len(sent), step))
        assert answer + session.pull(NOW) == heard
    assert passive.shared.counts == {
        "published": 1,
        "delivered": 1,
        "refused": 1,
        "topics_without_address": 0,
    }
    assert passive.bus.stats()["inflight"] == 0


def test_an_answer_waits_until_the_message_is_safe_and_later_ones_wait_behind_it(tmp_path: Path) -> None:
    home = Passive(tmp_path)
    session = home.session()
    session.on_safe_end = lambda: 0
    assert session.feed(b"PUT a 1\nxPUT a\n", NOW) == b""
    del session.on_safe_end
    assert session.elapse(NOW) == b"OK 0\nERR a PUT has a topic and a size\n"
    home.close()


def test_what_is_not_done_comes_again_and_what_cannot_be_said_is_counted(passive: Passive) -> None:
    session = passive.session()
    assert session.feed(b"TAKE #\n", NOW) == b"OK 1\n"
    passive.bus.publish("two words", b"unsaid", now=NOW)
    passive.bus.publish("word", b"said", now=NOW)
    first = session.pull(NOW)
    assert first == b"MSG 1 2 word 4\nsaid"
    later = NOW + 3_000_000
    passive.bus.tick(later)
    assert session.pull(later) == first
    assert session.feed(b"DONE 1 2\nDONE 1 2\nDONE 2 2\n", later) == b"ERR no such delivery waits\n" * 2
    assert passive.shared.counts["topics_without_address"] == 1
    session.leave(later)
    assert passive.bus.stats()["subscriptions"] == 0


def test_a_subscription_that_has_much_does_not_keep_others_waiting(passive: Passive) -> None:
    session = passive.session()
    session.feed(b"TAKE busy\nTAKE quiet\n", NOW)
    for _ in range(10):
        passive.bus.publish("busy", b"x" * 100, now=NOW)
    passive.bus.publish("quiet", b"y", now=NOW)
    assert session.pull(NOW, 1).startswith(b"MSG 1 ")
    assert session.more
    assert session.pull(NOW, 1).startswith(b"MSG 2 ")


def test_a_full_log_blocks_and_then_refuses(tmp_path: Path) -> None:
    home = Passive(tmp_path, retention_bytes=1024 * 1024)
    home.log.hold("test", 0)
    session = home.session()
    frame = b"PUT a 60000\n" + bytes(60000)
    deadline = time.monotonic() + PATIENCE
    while not (session.blocked and home.log.full is not None):
        assert time.monotonic() < deadline
        session.feed(b"" if session.blocked else frame, NOW)
    assert session.blocked
    assert session.waits_space
    assert session.kept == len(frame)
    assert session.feed(b"", NOW + 5_000_000).startswith(b"ERR ")
    assert not session.blocked
    home.close()


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"PUT a 65537\n", b"a body has 65536 bytes at most"),
        (b"x" * 1024, b"a line has less than 1024 bytes"),
    ],
)
def test_what_is_too_large_ends_the_connection_before_it_has_come(
    passive: Passive, sent: bytes, text: bytes
) -> None:
    session = passive.session()
    assert session.feed(sent, NOW) == b"ERR " + text + b"\n"
    assert session.closing


words = st.sampled_from([b"KEY", b"PUT", b"TAKE", b"DONE", b"a.b", b"#", b"dev-key", b"1", b"4", b""])
lines = st.lists(words | st.binary(max_size=6), max_size=4).map(b" ".join)


@settings(max_examples=25 * SOAK)
@given(said=st.lists(lines, max_size=12), cut=st.integers(1, 40))
def test_arbitrary_lines_are_answered_or_kept(
    tmp_path_factory: pytest.TempPathFactory, said: list[bytes], cut: int
) -> None:
    home = Passive(tmp_path_factory.mktemp("fuzz"), segment_bytes=64 * 1024, retention_bytes=1024 * 1024)
    session = home.session()
    data = b"\n".join(said)
    for at in range(0, len(data), cut):
        session.feed(data[at : at + cut], NOW)
        session.pull(NOW)
    assert session.kept <= home.module.LinesSpeaker.max_frame
    session.leave(NOW)
    home.close()


# --- in a gateway -------------------------------------------------------------------------------------------------


@pytest.fixture
def started(tmp_path: Path) -> Callable[[], GatewayProcess]:
    load(tmp_path)
    main = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import lines; lines.main()"
    return lambda: GatewayProcess(tmp_path / "data", main=main)


def dial(gateway: GatewayProcess, name: str = "relink") -> socket.socket:
    host, _, port = gateway.places[name].rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    connection.sendall(b"KEY dev-key\n")
    assert heard(connection, 3) == b"OK\n"
    return connection


def heard(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        assert more, data
        data += more
    return data


def test_it_reaches_other_protocols_and_they_reach_it(started: Callable[[], GatewayProcess]) -> None:
    async def talk(gateway: GatewayProcess, connection: socket.socket) -> None:
        async with BlipmqClient(gateway.places["blipmq"], key="dev-key") as client:
            async with client.subscribe("from.lines", qos=1) as messages:
                connection.sendall(b"PUT from.lines 3\n\x00\n\xff")
                assert heard(connection, 5) == b"OK 0\n"
                message = await anext(messages)
                assert message.payload == b"\x00\n\xff"
                await messages.ack(message)
            await client.publish("to.lines", b"hello", qos=1)
        delivery = b"MSG 1 2 to.lines 5\nhello"
        assert heard(connection, len(delivery)) == delivery

    with started() as gateway, dial(gateway) as connection:
        connection.sendall(b"TAKE to.*\n")
        assert heard(connection, 5) == b"OK 1\n"
        asyncio.run(talk(gateway, connection))


def test_what_was_confirmed_survives_a_kill_and_is_a_row_of_the_drop(
    tmp_path: Path, started: Callable[[], GatewayProcess]
) -> None:
    with started() as gateway, dial(gateway) as connection:
        connection.sendall(b"".join(b"PUT kept %d\n%b" % (len(b"%d" % n), b"%d" % n) for n in range(100)))
        answers = b"".join(b"OK %d\n" % n for n in range(100))
        assert heard(connection, len(answers)) == answers
        gateway.signal(signal.SIGKILL)
        gateway.ended()
    with LogReader(tmp_path / "data" / "log") as reader:
        assert [record.payload for record in reader] == [b"%d" % n for n in range(100)]
    with started() as gateway, dial(gateway) as connection:
        gateway.signal(signal.SIGTERM)
        last = b"ERR the gateway is stopping\n"
        assert heard(connection, len(last)) == last
        assert connection.recv(1) == b""
        assert gateway.ended() == 0
    rows = pq.ParquetDataset(tmp_path / "data" / "drop").read().to_pylist()
    assert [(row["topic"], row["payload"]) for row in rows] == [("kept", b"%d" % n) for n in range(100)]


# --- with a name of its own ---------------------------------------------------------------------------------------


def changes() -> Iterator[tuple[str, str, str]]:
    """What the page has changed: the file, what was there, and what is there then."""
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    for path, hunks in re.findall(r"^--- (\S+)\n((?:[-+@ ](?!--).*\n|\+\n)*)", diff, re.MULTILINE):
        for hunk in hunks.split("@@\n")[1:]:
            lines = hunk.splitlines(keepends=True)
            yield path, *("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with Lines among the protocols."""
    root = tmp_path_factory.mktemp("named")
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    load(root / "src" / "headrace" / "sessions")
    for path, before, after in changes():
        text = (root / path).read_text("utf-8")
        assert text.count(before) == 1, before
        (root / path).write_text(text.replace(before, after), "utf-8")
    return root / "src"


def test_with_a_name_of_its_own_it_is_a_listener_like_the_others(named: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    environ = {"PYTHONPATH": os.pathsep.join([str(named), *filter(None, sys.path)])}
    with GatewayProcess(data, "listen.lines.bind=127.0.0.1:0", environ=environ) as gateway:
        with dial(gateway, "lines") as connection:
            connection.sendall(b"PUT named.lines 3\nyes")
            assert heard(connection, 5) == b"OK 0\n"
            metrics = gateway.get("/metrics")[1]
        assert 'headrace_connections{protocol="lines"} 1' in metrics
        assert 'headrace_session_events_total{event="published",protocol="lines"} 1' in metrics
        assert gateway.stop() == 0
    rows = pq.ParquetDataset(data / "drop").read().to_pylist()
    assert [(row["topic"], row["payload"], row["protocol"]) for row in rows] == [
        ("named.lines", b"yes", "headrace")
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["config", "map", "lines", "a.b.c"], "lines    a.b.c\n"),
        (["config", "map", "blipmq", "two words"], "lines    -\n"),
        (["config", "default"], "[listen.lines]\n"),
    ],
)
def test_with_a_name_of_its_own_the_configuration_knows_it(named: Path, words: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(named), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert said in done.stdout


def test_the_code_of_the_page_is_typed(tmp_path: Path) -> None:
    load(tmp_path)
    options = ["--strict", "--no-error-summary", "--config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(tmp_path / "lines.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "")
