"""A gateway's life from the outside and the inside: start, signals, reload, trouble with the log, end."""

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.bus import Bus
from headrace.config import PROTOCOLS, Config, Loaded, load, reloadable
from headrace.config.schema import SETTINGS
from headrace.errors import LogFull
from headrace.gateway import process
from headrace.gateway.process import Gateway, StartError, allow_files, choose_loop, merge
from headrace.gateway.protocols import QUIC_SPEAKERS, SPEAKERS
from headrace.gateway.systemd import Notifier, PassedSockets
from headrace.log import Log
from headrace.wire import blipmq
from tests.gateway import speakers
from tests.gateway.gateways import PATIENCE, SMALL, GatewayProcess, Peer
from tests.streams import frame, make_certificates, on_both_loops, read_frame, run, until


def rest_of(peer: socket.socket) -> bytes:
    """All that comes until the other side ends the stream."""
    return b"".join(iter(lambda: peer.recv(65536), b""))


# --- from the outside: start and end ------------------------------------------------------------------------


@on_both_loops
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_when_it_is_ready_and_ends_with_0(loop: str, number: signal.Signals, tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, f"gateway.loop={loop}", "listen.zeroctl.bind=127.0.0.1:0") as gateway:
        assert re.fullmatch(r"headrace ready( [a-z]+=127\.0\.0\.1:\d+)+\n", gateway.out[0])
        assert set(gateway.places) == {"admin", *SPEAKERS, *QUIC_SPEAKERS}
        assert gateway.get("/readyz") == (200, '{"ready": true, "reasons": [], "warnings": []}\n')
        assert gateway.status()["loop"] == loop
        Peer.to(gateway).publish("a.b", b"hello")
        gateway.signal(number)
        assert gateway.ended() == 0
        assert len(gateway.out) == 1
        assert gateway.event("gateway.stopping")["reason"] == f"signal {number.name}"
        assert gateway.events[-1]["event"] == "gateway.stopped"


def test_what_was_published_is_there_after_a_restart(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path) as gateway:
        peer = Peer.to(gateway)
        for i in range(20):
            peer.publish("a.b", str(i).encode())
        before = gateway.status()["log"]
        assert gateway.stop() == 0
    with GatewayProcess(tmp_path) as gateway:
        after = gateway.status()["log"]
        assert after["id"] == before["id"]
        assert after["stats"]["appended_offset"] == 20
        assert after["recovery"]["cut_bytes"] == 0
        assert after["recovery"]["damage"] == []
        assert gateway.event("log.open")["records"] >= 20


def test_it_runs_without_the_web_side_and_without_listeners(tmp_path: Path) -> None:
    silent = [f"listen.{name}.bind=" for name in PROTOCOLS]
    with GatewayProcess(tmp_path, "admin.bind=", *silent) as gateway:
        assert gateway.out == ["headrace ready\n"]
        assert gateway.stop() == 0


def one_sentence(gateway: GatewayProcess, code: int = 1) -> str:
    """What a gateway that could not start says, without the events before it."""
    assert gateway.ended() == code
    assert gateway.out == []
    [sentence] = [line for line in gateway.errors if not line.startswith("{")]
    assert sentence.startswith("Error: ")
    gateway.kill()
    return sentence.removeprefix("Error: ").rstrip()


def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        said = one_sentence(GatewayProcess(tmp_path, f"listen.blipmq.bind={place}"))
        assert said == f"listen.blipmq.bind: cannot listen on {place}: it is in use"
        said = one_sentence(GatewayProcess(tmp_path, f"admin.bind={place}"))
        assert said == f"admin.bind: cannot listen on {place}: it is in use"


def test_a_log_in_use_is_one_sentence(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path) as first:
        said = one_sentence(GatewayProcess(tmp_path))
        assert said == f"{tmp_path}/log is in use by another process (pid {first.child.pid})"


def test_a_data_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = one_sentence(GatewayProcess(tmp_path / "file" / "data"))
    assert said == f"cannot open the log in {tmp_path}/file/data/log: Not a directory"


def test_a_certificate_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    files = (f"listen.blipmq.tls_cert={wrong}", f"listen.blipmq.tls_key={wrong}")
    assert "wrong.pem" in one_sentence(GatewayProcess(tmp_path / "data", *files))


def test_a_wrong_configuration_does_not_start(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "data", "log.snyc=always")
    assert gateway.ended() == 2
    assert "log.sync" in "".join(gateway.errors)
    assert not (tmp_path / "data").exists()
    gateway.kill()


def test_tls_and_unix_sockets_reach_the_same_sessions(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    sets = [f"listen.blipmq.tls_cert={certificates.cert}", f"listen.blipmq.tls_key={certificates.key}"]
    with GatewayProcess(tmp_path / "data", *sets) as gateway:
        plain = socket.create_connection(("127.0.0.1", gateway.port()))
        tls = certificates.client().wrap_socket(plain, server_hostname="127.0.0.1")
        Peer(tls).publish("over.tls", b"x")
        assert gateway.status()["listeners"][0]["tls"] is True
        tls.close()
        assert gateway.stop() == 0
    with GatewayProcess(tmp_path / "data", f"listen.blipmq.bind=unix:{tmp_path}/s") as gateway:
        assert gateway.places["blipmq"] == f"unix:{tmp_path}/s"
        unix = socket.socket(socket.AF_UNIX)
        unix.connect(f"{tmp_path}/s")
        Peer(unix).publish("over.unix", b"x")
        assert gateway.status()["log"]["stats"]["appended_offset"] == 2
        unix.close()
        assert gateway.stop() == 0
    assert not (tmp_path / "s").exists()


# --- from the outside: draining -----------------------------------------------------------------------------


@on_both_loops
def test_a_drain_lets_what_is_on_its_way_arrive(loop: str, tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, f"gateway.loop={loop}", main=speakers.MAIN) as gateway:
        peer = gateway.connect()
        peer.sendall(frame(b"now") + frame(b"later"))
        assert peer.recv(7) == frame(b"now")
        gateway.signal(signal.SIGTERM)
        gateway.event("listener.closed")
        with pytest.raises(ConnectionRefusedError):
            gateway.connect()
        assert rest_of(peer) == frame(b"later") + frame(b"goodbye")
        peer.close()
        assert gateway.ended() == 0
        assert gateway.named("drain.cut_short") == []


@on_both_loops
def test_a_drain_takes_no_longer_than_it_may(loop: str, tmp_path: Path) -> None:
    sets = (f"gateway.loop={loop}", "gateway.drain_timeout=200ms")
    with GatewayProcess(tmp_path, *sets, main=speakers.MAIN) as gateway:
        peer = gateway.connect()
        peer.sendall(frame(b"now") + frame(b"never"))
        assert peer.recv(7) == frame(b"now")
        assert gateway.stop() == 0
        assert gateway.event("drain.cut_short")["connections"] == 1
        peer.close()


def test_while_it_drains_it_is_not_ready(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, "gateway.drain_timeout=3s", main=speakers.MAIN) as gateway:
        peer = gateway.connect()
        peer.sendall(frame(b"now") + frame(b"never"))
        assert peer.recv(7) == frame(b"now")
        gateway.signal(signal.SIGTERM)
        gateway.event("listener.closed")
        code, body = gateway.get("/readyz")
        assert (code, json.loads(body)) == (
            503,
            {"ready": False, "reasons": ["the gateway is stopping"], "warnings": []},
        )
        assert gateway.get("/healthz")[0] == 200
        peer.close()
        assert gateway.ended() == 0


@on_both_loops
def test_a_second_signal_ends_it_at_once(loop: str, tmp_path: Path) -> None:
    sets = (f"gateway.loop={loop}", "gateway.drain_timeout=1h")
    with GatewayProcess(tmp_path, *sets, main=speakers.MAIN) as gateway:
        peer = gateway.connect()
        peer.sendall(frame(b"now") + frame(b"never"))
        assert peer.recv(7) == frame(b"now")
        gateway.signal(signal.SIGTERM)
        gateway.event("listener.closed")
        gateway.signal(signal.SIGINT)
        assert gateway.ended() == 1
        assert gateway.event("gateway.aborted")["signal"] == "SIGINT"
        peer.close()


def test_an_error_in_a_session_is_told_and_the_gateway_goes_on(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, main=speakers.MAIN) as gateway:
        peer = gateway.connect()
        peer.sendall(frame(b"break"))
        assert rest_of(peer) == b""
        event = gateway.event("session.failed")
        assert event["connection"] == "blipmq-1"
        assert "a test asked for it" in event["exception"]
        other = gateway.connect()
        other.sendall(frame(b"fine"))
        assert other.recv(100) == frame(b"fine")
        assert gateway.status()["listeners"][0]["counters"]["failed"] == 1
        peer.close()
        other.close()


# --- from the outside: reloading ----------------------------------------------------------------------------


def test_a_reload_takes_over_what_it_can_and_names_what_it_cannot(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('[[keys]]\nname = "a"\nkey = "first"\npublish = ["#"]\n')
    with GatewayProcess(tmp_path / "data", config=file) as gateway:
        Peer.to(gateway, "first").publish("x", b"1")
        file.write_text(
            '[log]\nsync = "none"\nretention_bytes = "4MiB"\n'
            "[listen.blipmq]\nmax_connections = 7\n"
            '[[keys]]\nname = "b"\nkey = "second"\npublish = ["#"]\n'
        )
        gateway.signal(signal.SIGHUP)
        event = gateway.event("config.reloaded")
        # Retention is set on the command line, too, which wins over the file.
        assert event["changed"] == ["listen.blipmq.max_connections", "keys"]
        assert event["needs_restart"] == ["log.sync"]
        Peer.to(gateway, "second").publish("x", b"2")
        assert isinstance(Peer.to(gateway, "first").greetings[1], blipmq.Nack)
        status = gateway.status()
        assert status["listeners"][0]["max_connections"] == 7
        assert status["log"]["sync"] == "always"
        assert gateway.stop() == 0


def test_a_reload_of_a_wrong_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("[listen.blipmq]\nmax_connections = 9\n")
    with GatewayProcess(tmp_path / "data", config=file) as gateway:
        file.write_text("[listen.blipmq]\nmax_connections = 5\nbacklog = -1\n")
        gateway.signal(signal.SIGHUP)
        assert "listen.blipmq.backlog" in gateway.event("config.refused")["reason"]
        assert gateway.status()["listeners"][0]["max_connections"] == 9
        assert gateway.get("/readyz")[0] == 200


def test_a_reload_is_refused_whole_if_a_certificate_is_wrong(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    file = tmp_path / "headrace.toml"
    tls = f'[listen.blipmq]\ntls_cert = "{certificates.cert}"\ntls_key = "{certificates.key}"\n'
    file.write_text(tls)
    with GatewayProcess(tmp_path / "data", config=file) as gateway:
        certificates.cert.write_text("damaged")
        file.write_text(tls + "max_connections = 5\n")
        gateway.signal(signal.SIGHUP)
        assert "cannot be used" in gateway.event("config.refused")["reason"]
        assert gateway.status()["listeners"][0]["max_connections"] == Config().listen.blipmq.max_connections
        plain = socket.create_connection(("127.0.0.1", gateway.port()))
        with certificates.client().wrap_socket(plain, server_hostname="127.0.0.1") as peer:
            Peer(peer).publish("x", b"1")  # the certificate from before is still in use


# --- from the outside: the service manager ------------------------------------------------------------------


def test_the_service_manager_hears_of_every_state(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "100000"}

        def next_state() -> str:
            while (said := manager.recv(1000).decode()) == "WATCHDOG=1":
                pass
            return said.splitlines()[0]

        with GatewayProcess(tmp_path / "data", environ=environ) as gateway:
            assert next_state() == "READY=1"
            assert manager.recv(1000) == b"WATCHDOG=1"
            assert manager.recv(1000) == b"WATCHDOG=1"
            gateway.signal(signal.SIGHUP)
            assert next_state() == "RELOADING=1"
            assert next_state() == "READY=1"
            gateway.signal(signal.SIGTERM)
            assert next_state() == "STOPPING=1"
            assert gateway.ended() == 0


ACTIVATE = (
    "import os, sys\n"
    "os.dup2(int(sys.argv[1]), 3, inheritable=True)\n"
    "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1', LISTEN_FDNAMES=sys.argv[2])\n"
    "os.execv(sys.argv[3], sys.argv[3:])\n"
)


def test_a_socket_of_the_service_manager_is_used(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as passed:
        launcher = [sys.executable, "-c", ACTIVATE, str(passed.fileno()), "front"]
        options: dict[str, Any] = {"launcher": launcher, "pass_fds": [passed.fileno()]}
        with GatewayProcess(tmp_path, "listen.blipmq.bind=fd:front", **options) as gateway:
            assert gateway.port() == passed.getsockname()[1]
            Peer.to(gateway).publish("x", b"1")
            assert gateway.stop() == 0
        said = one_sentence(GatewayProcess(tmp_path, "listen.blipmq.bind=fd:back", **options))
        assert 'no socket called "back"' in said


# --- from the inside ----------------------------------------------------------------------------------------


@asynccontextmanager
async def running(
    data: Path, *sets: str, read: Callable[[], Loaded] | None = None
) -> AsyncIterator[tuple[Gateway, asyncio.Task[int]]]:
    """A gateway on the running loop, ready; ends with the block unless it has ended before."""
    read = read or (lambda: load(None, {}, [*SMALL, *sets]))
    gateway = Gateway(data, read(), read, "test", Notifier({}, 0), PassedSockets())
    ending = asyncio.create_task(gateway.run())
    await until(lambda: ending.done() or not gateway.not_ready())
    try:
        yield gateway, ending
    finally:
        if not ending.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await ending


def port_of(gateway: Gateway) -> int:
    return int(gateway.figures().listeners[0].addresses[0].rpartition(":")[2])


@on_both_loops
def test_what_is_published_wakes_a_subscriber(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(process.SPEAKERS, "blipmq", speakers.ObligingSpeaker)

    async def main() -> None:
        async with running(tmp_path) as (gateway, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway))
            writer.write(frame(b"subscribe"))
            assert await read_frame(reader) == b"subscribe"
            bus = bus_of(gateway)
            for i in range(10):
                bus.publish("news", str(i).encode())
            assert [await read_frame(reader) for _ in range(10)] == [str(i).encode() for i in range(10)]
            writer.close()

    run(loop, main)


def bus_of(gateway: Gateway) -> Bus:
    bus = gateway._bus
    assert bus is not None
    return bus


@on_both_loops
def test_what_is_never_acknowledged_becomes_a_dead_letter(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, "bus.redelivery_delay=10ms", "bus.max_deliveries=1") as (gateway, _):
            bus = bus_of(gateway)
            member = bus.subscribe("a", exact=True, at_least_once=True, confirm_all=True).join(None, -1, 0)
            bus.publish("a", b"poison", confirmed=True)
            await until(lambda: member.receive() is not None)
            await until(lambda: bus.stats()["dead"] == 1)

    run(loop, main)


@on_both_loops
def test_confirmed_publishes_are_answered_once_they_are_synced(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as (gateway, _):
            peer = await asyncio.to_thread(
                lambda: Peer(socket.create_connection(("127.0.0.1", port_of(gateway))))
            )
            for i in range(5):
                await asyncio.to_thread(peer.publish, "a", str(i).encode())
            log = bus_of(gateway).log
            assert log.synced == log.appended == 5
            peer.close()

    run(loop, main)


@on_both_loops
def test_a_full_log_makes_the_gateway_not_ready_and_blocks_publishers_until_there_is_room(
    loop: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with running(tmp_path, "log.block_timeout=1h", "log.pool_segments=1", "drop.enabled=false") as (
            gateway,
            _,
        ):
            bus = bus_of(gateway)
            bus.log.hold("sink", 0)
            await fill(bus)
            await until(gateway.not_ready)
            assert gateway.not_ready() == [f"the log is full: {bus.log.full}"]
            peer = await asyncio.to_thread(
                lambda: Peer(socket.create_connection(("127.0.0.1", port_of(gateway))))
            )
            publishing = asyncio.create_task(asyncio.to_thread(peer.publish, "a", bytes(60_000)))
            await asyncio.sleep(0.1)
            assert not publishing.done()
            bus.log.hold("sink", bus.log.appended)
            await publishing
            await until(lambda: not gateway.not_ready())
            peer.close()

    run(loop, main)


async def fill(bus: Bus) -> None:
    """Publishes until the log takes no more; a segment that is just being prepared is no reason to stop."""
    while bus.log.full is None:
        with contextlib.suppress(LogFull):
            bus.publish("filler", bytes(10_000))
        await asyncio.sleep(0.0001)


class FailingLog(Log):
    """A log whose sync fails when a test says so; nothing else about it is different."""

    trouble = ""
    told = False  # as a real one tells it once

    def on_event(self, now: int | None = None) -> int:
        happened: int = super().on_event(now)
        if self.trouble and not self.told:
            self.told = True
            happened |= process.Happened.FAILED
        return happened

    @property
    def failed(self) -> str | None:
        return self.trouble or super().failed

    def fail(self) -> None:
        type(self).trouble = "sync failed: a test said so"
        os.write(self.event_fd, (1).to_bytes(8, sys.byteorder))


@on_both_loops
def test_a_failed_log_ends_the_gateway_with_1(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "Log", FailingLog)
    monkeypatch.setattr(FailingLog, "trouble", "")

    async def main() -> None:
        async with running(tmp_path) as (gateway, ending):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway))
            log = bus_of(gateway).log
            assert isinstance(log, FailingLog)
            log.fail()
            assert await ending == 1
            assert await reader.read() == b""
            assert "the log has failed: sync failed: a test said so" in gateway.not_ready()
            writer.close()

    run(loop, main)
    failures = [record for record in caplog.records if record.message == "log.failed"]
    assert [record.levelname for record in failures] == ["ERROR"]


def test_a_signal_while_it_starts_ends_it_before_it_is_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Gateway._open_bus

    def open_slowly(gateway: Gateway) -> Bus:
        assert gateway.not_ready() == ["the gateway is starting"]
        os.kill(os.getpid(), signal.SIGTERM)
        return opened(gateway)

    monkeypatch.setattr(Gateway, "_open_bus", open_slowly)

    async def main() -> None:
        async with running(tmp_path) as (_, ending):
            assert await ending == 0

    run("asyncio", main)
    assert "ready" not in capsys.readouterr().out


# Another value than the default for everything that a reload can change.
RELOADED = {
    "log.retention_bytes": "3MiB",
    "log.retention_seconds": "1h",
    "log.block_timeout": "7s",
    "bus.max_inflight": "11",
    "bus.redelivery_delay": "3s",
    "bus.max_redelivery_delay": "30s",
    "bus.max_deliveries": "4",
    "bus.durable_grace": "2h",
    "bus.max_pending": "77",
    "listen.blipmq.max_connections": "12",
    "listen.blipmq.idle_timeout": "9m",
    "listen.blipmq.high_water": "32KiB",
    "listen.blipmq.stall_timeout": "6s",
    "listen.blipmq.handshake_timeout": "8s",
    "zeroctl.heartbeat_interval": "11s",
    "listen.felix.max_connections": "13",
    "listen.felix.idle_timeout": "8m",
    "listen.felix.high_water": "64KiB",
    "listen.felix.stall_timeout": "5s",
    "listen.felix.peers": '[{name="all", publish=["#"]}]',
    "listen.felix.strict": "true",
    "listen.felix.streams": '["t/n/s"]',
    "listen.felix.caches": '["t/n/c"]',
    "listen.felix.dialect": "reference",
    "listen.felix.bad_header": "stream",
    "listen.felix.max_subscriptions": "14",
    "listen.felix.batch_events": "15",
    "listen.felix.batch_bytes": "16KiB",
    "listen.felix.batch_delay": "2ms",
    "listen.felix.cache_entries": "17",
    "listen.felix.cache_bytes": "18KiB",
    "quic.keep_alive": "9s",
    "quic.handshake_timeout": "12s",
    "logging.level": "warning",
    "gateway.drain_timeout": "4s",
}
KEYS_TOML = '[[keys]]\nname = "other"\nkey = "other-key"\npublish = ["x"]\n'
# Protocols that are not listened for here have the same settings.
UNSPOKEN = ("listen.overhop.", "listen.relink.", "listen.zeroctl.")


def test_every_setting_that_may_change_while_running_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changeable = {key for key in SETTINGS if reloadable(key) and not key.startswith(UNSPOKEN)}
    assert changeable == {*RELOADED, "keys"}
    file = tmp_path / "headrace.toml"
    file.write_text("")
    changes: list[str] = []

    def read() -> Loaded:
        return load(file, {}, [*SMALL, *changes])

    async def main() -> None:
        async with running(tmp_path / "data", read=read) as (gateway, _):
            bus = bus_of(gateway)
            file.write_text(KEYS_TOML)
            changes.extend(f"{key}={value}" for key, value in RELOADED.items())
            wanted = read().config
            assert gateway.config != wanted
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: gateway.config == wanted)
            # What each of them is for.
            assert bus.log.stats()["max_segments"] == 12
            assert bus.log.retention_seconds == 3600
            subscription = bus.subscribe("a", exact=True, at_least_once=True)
            assert subscription.max_inflight == 11
            assert subscription.redelivery_us == 3_000_000
            assert subscription.max_redelivery_us == 30_000_000
            assert subscription.max_deliveries == 4
            assert subscription.max_pending == 77
            assert bus.durable_grace == 7200
            service = gateway._services["blipmq"]
            assert service.max_connections == 12
            assert service.idle_timeout == 540
            assert service.high_water == 32 * 1024
            assert service.stall_timeout == 6
            shared = gateway._speakers["blipmq"]._shared  # type: ignore[attr-defined]
            assert shared.handshake_timeout_us == 8_000_000
            assert gateway._node is not None
            assert gateway._node.heartbeat(0.0)["ttl"] == 33
            assert shared.block_timeout_us == 7_000_000
            assert shared.keys.lookup(b"other-key").name == "other"
            assert shared.keys.lookup(b"dev-key") is None
            assert not process.log._logger.isEnabledFor(20)
            service = gateway._services["felix"]
            assert service.max_connections == 13
            assert service.idle_timeout == 480
            assert service.high_water == 64 * 1024
            assert service.stall_timeout == 5
            felix = gateway._speakers["felix"].felix  # type: ignore[attr-defined]
            assert (felix.reference, felix.mild, felix.max_subscriptions) == (True, True, 14)
            assert (felix.batch_events, felix.batch_bytes, felix.batch_delay_us) == (15, 16 * 1024, 2000)
            assert (felix.cache.max_entries, felix.cache.max_bytes) == (17, 18 * 1024)
            assert felix.registry_changes == 2
            quic = gateway._quic
            assert quic is not None
            assert quic.keep_alive == 9
            assert quic.handshake_timeout == 12
            found = quic.peers.find("192.0.2.1")
            assert found is not None
            assert found.name == "all"

    try:
        run("asyncio", main)
    finally:
        process.events.set_level("info")


def test_a_reload_that_fits_only_after_a_restart_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes: list[str] = []

    def read() -> Loaded:
        return load(None, {}, [*SMALL, *changes])

    async def main() -> None:
        async with running(tmp_path, read=read) as (gateway, _):
            before = gateway.config
            # Fits with the smaller segments that need a restart, and not with those in use.
            changes.extend(["log.segment_bytes=128KiB", "log.pool_segments=1", "log.retention_bytes=400KiB"])
            changes.append("listen.blipmq.max_frame_bytes=64KiB")
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: [r for r in caplog.records if r.message == "config.refused"])
            assert gateway.config == before

    run("asyncio", main)


# --- small parts --------------------------------------------------------------------------------------------


def test_merging_takes_only_the_keys_that_were_asked_for() -> None:
    running_now = Config()
    wanted = load(None, {}, ["log.block_timeout=9s", "log.sync=none", "listen.blipmq.backlog=5"]).config
    merged = merge(running_now, wanted, ["log.block_timeout", "listen.blipmq.backlog"])
    assert running_now.changes(merged) == ["log.block_timeout", "listen.blipmq.backlog"]
    assert merged.log.block_timeout == 9
    assert running_now.log.block_timeout == 5


def test_the_loop_is_the_one_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_loop("auto")[0] == "uvloop"
    assert choose_loop("uvloop")[0] == "uvloop"
    assert choose_loop("asyncio")[0] == "asyncio"
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert choose_loop("auto")[0] == "asyncio"
    with pytest.raises(StartError, match="uvloop"):
        choose_loop("uvloop")


def test_the_limit_on_open_files_is_raised_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = {"limits": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: now["limits"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: now.update(limits=limits))

    def allowed(*connections: int) -> int:
        wishes = zip(("blipmq", "overhop", "relink", "zeroctl"), connections, strict=True)
        loaded = load(None, {}, [f"listen.{name}.max_connections={most}" for name, most in wishes])
        return allow_files(loaded.config, loaded.origins)

    assert allowed(100, 100, 50, 50) == 300
    assert now["limits"] == (1024, 4096)
    assert allowed(1000, 1000, 300, 200) == 2500
    assert now["limits"] == (2500 + 512, 4096)
    assert caplog.records == []
    assert allowed(9000, 500, 300, 200) == 4096 - 512
    assert now["limits"] == (4096, 4096)
    assert [(record.levelname, record.message) for record in caplog.records] == [("WARNING", "files.limited")]
    now["limits"] = (300, 300)
    assert allowed(9000, 500, 300, 200) == 150
    now["limits"] = (1024, resource.RLIM_INFINITY)
    assert allowed(9000, 500, 300, 200) == 10_000
    assert now["limits"] == (10_000 + 512, resource.RLIM_INFINITY)


def test_defaults_that_the_limit_on_open_files_does_not_allow_are_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    loaded = load(None, {}, [])
    with caplog.at_level("INFO"):
        assert allow_files(loaded.config, loaded.origins) == 4096 - 512
    assert [(record.levelname, record.message) for record in caplog.records] == [("INFO", "files.limited")]
