"""What is said to a service manager, and what is taken from it, with a socket in its place."""

import os
import socket
from pathlib import Path

import pytest

from headrace.gateway import systemd
from headrace.gateway.systemd import ActivationError, Notifier, PassedSockets


@pytest.fixture
def manager(tmp_path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.bind(str(tmp_path / "notify"))
    listening.setblocking(False)
    return listening


def test_each_state_is_said_in_the_manager_s_words(manager: socket.socket) -> None:
    environ = {"NOTIFY_SOCKET": manager.getsockname()}
    notifier = Notifier(environ, 1)
    notifier.ready("serving")
    notifier.reloading()
    notifier.stopping("draining")
    notifier.alive()
    notifier.close()
    assert manager.recv(1000) == b"READY=1\nSTATUS=serving"
    reloading, moment = manager.recv(1000).split(b"\n")
    assert reloading == b"RELOADING=1"
    assert moment.startswith(b"MONOTONIC_USEC=")
    assert int(moment.partition(b"=")[2]) > 0
    assert manager.recv(1000) == b"STOPPING=1\nSTATUS=draining"
    assert manager.recv(1000) == b"WATCHDOG=1"
    manager.close()


def test_an_abstract_socket_is_found() -> None:
    name = f"headrace-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        notifier = Notifier({"NOTIFY_SOCKET": f"@{name}"}, 1)
        notifier.alive()
        notifier.close()
        assert manager.recv(1000) == b"WATCHDOG=1"


def test_without_a_manager_nothing_is_said() -> None:
    notifier = Notifier({}, 1)
    notifier.ready("serving")
    notifier.close()
    assert notifier.watchdog_seconds is None


def test_a_manager_that_is_gone_does_not_stop_the_service(
    manager: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname()}, 1)
    manager.close()
    notifier.ready("serving")
    notifier.close()
    assert [record.message for record in caplog.records] == ["systemd.unreachable"]


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "7"}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_fed_twice_in_its_time(environ: dict[str, str], seconds: float | None) -> None:
    assert Notifier(environ, 7).watchdog_seconds == seconds


def test_children_do_not_inherit_what_was_meant_for_us() -> None:
    environ = {
        "NOTIFY_SOCKET": "/nowhere",
        "WATCHDOG_USEC": "1",
        "WATCHDOG_PID": "7",
        "LISTEN_PID": "1",
        "LISTEN_FDS": "1",
        "LISTEN_FDNAMES": "a",
        "PATH": "/bin",
    }
    Notifier(environ, 7)
    PassedSockets.inherited(environ, 7)
    assert environ == {"PATH": "/bin"}


class Passing:
    """Descriptors in a row, as a manager passes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *sockets: socket.socket) -> None:
        # The real row begins at 3, which a test runner uses for its own.
        first = 200
        for index, one in enumerate(sockets):
            os.dup2(one.fileno(), first + index)
            one.close()
        monkeypatch.setattr(systemd, "FIRST_FD", first)

    def taken(self, count: int, names: str, pid: int = 7) -> PassedSockets:
        environ = {"LISTEN_PID": "7", "LISTEN_FDS": str(count), "LISTEN_FDNAMES": names}
        return PassedSockets.inherited(environ, pid)


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def test_sockets_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = [listening(), listening(), listening()]
    ports = [one.getsockname()[1] for one in sockets]
    passed = Passing(monkeypatch, *sockets).taken(3, "blipmq:admin:blipmq")
    both = passed.take("blipmq")
    assert [one.getsockname()[1] for one in both] == [ports[0], ports[2]]
    [admin] = passed.take("admin")
    assert admin.getsockname()[1] == ports[1]
    assert not os.get_inheritable(admin.fileno())
    assert not admin.getblocking()
    for one in (*both, admin):
        one.close()


def test_a_socket_without_a_name_is_called_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = Passing(monkeypatch, listening()).taken(1, "")
    [one] = passed.take("unknown")
    one.close()


def test_sockets_for_another_process_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = Passing(monkeypatch).taken(1, "blipmq", pid=8)
    assert passed.by_name == {}


def test_a_name_that_was_not_passed_is_an_error_that_says_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = Passing(monkeypatch, listening()).taken(1, "admin")
    with pytest.raises(ActivationError, match=r'"blipmq" was passed .*\(passed: admin\)'):
        passed.take("blipmq")
    passed.close_rest()
    with pytest.raises(ActivationError, match=r"passed: none"):
        passed.take("blipmq")


def test_a_socket_of_the_wrong_kind_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    not_listening = socket.socket()
    passed = Passing(monkeypatch, datagrams, not_listening).taken(2, "a:b")
    kept = [*passed.by_name["a"], *passed.by_name["b"]]
    for name in ("a", "b"):
        with pytest.raises(ActivationError, match="no stream socket that listens"):
            passed.take(name)
    for one in kept:
        one.close()


def test_what_nobody_took_is_closed_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    passed = Passing(monkeypatch, listening()).taken(1, "typo")
    [one] = passed.by_name["typo"]
    passed.close_rest()
    assert one.fileno() == -1
    assert [record.message for record in caplog.records] == ["systemd.socket_unused"]
