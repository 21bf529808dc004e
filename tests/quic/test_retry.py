"""Tokens for clients that have to show that their address is their own."""

import pytest

from headrace.quic.retry import LIFETIME_SECONDS, RetryTokens

HERE = ("127.0.0.1", 4000)


def test_a_token_brings_back_the_first_connection_id() -> None:
    tokens = RetryTokens()
    token = tokens.make(HERE, b"first", b"retry", 100.0)
    assert tokens.open(token, HERE, b"retry", 101.0) == b"first"
    there = ("fe80::1%eth0", 1, 0, 2)
    assert tokens.open(tokens.make(there, b"", b"retry", 100.0), there, b"retry", 100.0) == b""


@pytest.mark.parametrize(
    ("addr", "destination", "now"),
    [
        (("127.0.0.2", 4000), b"retry", 100.0),
        (("127.0.0.1", 4001), b"retry", 100.0),
        (HERE, b"other", 100.0),
        (HERE, b"retry", 101.0 + LIFETIME_SECONDS),
        (HERE, b"retry", 99.0),
    ],
)
def test_a_token_is_good_for_one_place_connection_and_time(
    addr: tuple[str, int], destination: bytes, now: float
) -> None:
    tokens = RetryTokens()
    token = tokens.make(HERE, b"first", b"retry", 100.0)
    with pytest.raises(ValueError, match="token"):
        tokens.open(token, addr, destination, now)


@pytest.mark.parametrize("token", [b"", b"x", bytes(12), bytes(100)])
def test_what_is_no_token_is_refused(token: bytes) -> None:
    with pytest.raises(ValueError, match="token"):
        RetryTokens().open(token, HERE, b"retry", 100.0)
    with pytest.raises(ValueError, match="token"):
        RetryTokens().open(RetryTokens().make(HERE, b"a", b"b", 1.0), HERE, b"b", 1.0)
