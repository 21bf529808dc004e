"""Addresses to listen on, as text and as parts."""

import pytest

from headrace import limits
from headrace.config.addresses import HostPort, InheritedSocket, UnixPath, form_of, parse_address


@pytest.mark.parametrize(
    ("text", "address", "form"),
    [
        ("127.0.0.1:5555", HostPort("127.0.0.1", 5555), "host"),
        ("0.0.0.0:0", HostPort("0.0.0.0", 0), "host"),
        ("localhost:65535", HostPort("localhost", 65535), "host"),
        ("edge-1.example.com:80", HostPort("edge-1.example.com", 80), "host"),
        ("[::1]:5555", HostPort("::1", 5555), "host"),
        ("[fe80::1%eth0]:5555", HostPort("fe80::1%eth0", 5555), "host"),
        ("unix:/run/headrace/blipmq.sock", UnixPath("/run/headrace/blipmq.sock"), "unix"),
        ("fd:blipmq", InheritedSocket("blipmq"), "fd"),
    ],
)
def test_address_is_taken_apart_and_written_back(text: str, address: object, form: str) -> None:
    parsed = parse_address(text)
    assert parsed == address
    assert str(parsed) == text
    assert form_of(parsed) == form


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("localhost", "port is missing"),
        ("[::1]", "port is missing"),
        (":5555", "host is missing"),
        ("localhost:", "no port"),
        ("localhost:65536", "no port"),
        ("localhost:000080", "no port"),
        ("localhost:-1", "no port"),
        ("localhost:٣", "no port"),
        ("::1:5555", "brackets"),
        ("[127.0.0.1]:5555", "no IPv6 address"),
        ("300.1.1.1:80", "no IPv4 address"),
        ("1.2.3:80", "no IPv4 address"),
        ("*:5555", "no host name"),
        ("a..b:5555", "no host name"),
        ("-a:5555", "no host name"),
        ("a b:5555", "no host name"),
        ("unix:relative", "absolute path"),
        ("unix:", "absolute path"),
        ("unix:/a\0b", "NUL"),
        ("unix:/" + "x" * limits.UNIX_PATH_BYTES, "at most 107 bytes"),
        ("fd:", "name of a passed socket"),
        ("fd:a:b", "name of a passed socket"),
        ("fd:" + "x" * (limits.FD_NAME_CHARS + 1), "name of a passed socket"),
    ],
)
def test_bad_address_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_address(text)


def test_longest_unix_path_fits() -> None:
    path = "/" + "x" * (limits.UNIX_PATH_BYTES - 1)
    assert parse_address(f"unix:{path}") == UnixPath(path)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.1", False),
        ("edge.example.com", False),
    ],
)
def test_loopback_is_told_from_what_others_can_reach(host: str, loopback: bool) -> None:
    assert HostPort(host, 1).loopback is loopback
