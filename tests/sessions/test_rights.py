"""Keys and their rights: who is found by a secret, what a key may do, and what a reload changes."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.schema import Key
from headrace.sessions import rights as module
from headrace.sessions.rights import Keyring, Rights
from tests.oracle.filters import matches

words = st.sampled_from(["a", "b", "*", "#", "", "ü"])
names = st.lists(words, min_size=1, max_size=4).map(".".join).filter(bool)


def key(name: str, secret: str, publish: list[str] | None = None, subscribe: list[str] | None = None) -> Key:
    return Key(name=name, key=secret, publish=publish or [], subscribe=subscribe or [])


@given(st.lists(names, max_size=4), st.lists(names, max_size=4), names)
def test_right_is_there_where_a_filter_matches(publish: list[str], subscribe: list[str], topic: str) -> None:
    rights = Rights("k", publish, subscribe)
    assert rights.publishes(topic) == any(matches(one.encode(), topic.encode()) for one in publish)
    assert rights.subscribes(topic) == any(matches(one.encode(), topic.encode()) for one in subscribe)


def test_key_without_filters_may_do_nothing_and_nobody_may_use_the_empty_topic() -> None:
    assert not Rights("k").publishes("t")
    assert not Rights("k").subscribes("t")
    assert not Rights("k", ["#"], ["#"]).publishes("")
    assert not Rights("k", ["#"], ["#"]).subscribes("")


def test_secret_finds_its_key_and_nothing_else_does() -> None:
    ring = Keyring([key("a", "alpha"), key("b", "beta"), key("empty", "")])
    for secret, name in [(b"alpha", "a"), (b"beta", "b"), (b"", "empty")]:
        found = ring.lookup(secret)
        assert found is not None
        assert found.name == name
    for wrong in (b"alph", b"alpha\0", b"ALPHA", b"alphabeta", b"gamma", b"\xff"):
        assert ring.lookup(wrong) is None


def test_empty_ring_finds_nobody() -> None:
    assert Keyring().lookup(b"") is None
    assert Keyring().lookup(b"x") is None


@pytest.mark.parametrize("secret", [b"k0", b"k4", b"k9", b"none", b""])
def test_every_key_is_compared_in_constant_time_whoever_asks(
    monkeypatch: pytest.MonkeyPatch, secret: bytes
) -> None:
    compared: list[tuple[bytes, bytes]] = []
    genuine = module.compare_digest  # type: ignore[attr-defined]

    def compare(known: bytes, given: bytes) -> bool:
        compared.append((known, given))
        return bool(genuine(known, given))

    monkeypatch.setattr(module, "compare_digest", compare)
    ring = Keyring([key(f"n{n}", f"k{n}") for n in range(10)])
    found = ring.lookup(secret)
    assert (found is not None) == (secret in (b"k0", b"k4", b"k9"))
    assert compared == [(f"k{n}".encode(), secret) for n in range(10)]
    assert genuine.__module__ in ("_operator", "_hashlib")  # the standard library's, in C


def test_reload_changes_the_rights_of_those_who_have_the_key() -> None:
    ring = Keyring([key("a", "alpha", ["t"], ["u"])])
    rights = ring.lookup(b"alpha")
    assert rights is not None
    before = rights.changes
    ring.replace([key("a", "alpha", ["u"], ["t"])])
    assert ring.lookup(b"alpha") is rights
    assert rights.changes > before
    assert not rights.revoked
    assert [rights.publishes("t"), rights.publishes("u")] == [False, True]
    assert [rights.subscribes("t"), rights.subscribes("u")] == [True, False]


def test_key_that_is_gone_is_revoked_and_has_no_rights() -> None:
    ring = Keyring([key("a", "alpha", ["#"], ["#"]), key("b", "beta", ["#"], ["#"])])
    gone, stays = ring.lookup(b"alpha"), ring.lookup(b"beta")
    assert gone is not None
    assert stays is not None
    ring.replace([key("b", "beta", ["#"], ["#"])])
    assert gone.revoked
    assert not gone.publishes("t")
    assert not gone.subscribes("t")
    assert not stays.revoked
    assert ring.lookup(b"alpha") is None


def test_key_that_comes_back_is_another_one() -> None:
    ring = Keyring([key("a", "alpha", ["#"])])
    first = ring.lookup(b"alpha")
    ring.replace([])
    ring.replace([key("a", "alpha", ["#"])])
    second = ring.lookup(b"alpha")
    assert first is not None
    assert second is not None
    assert first.revoked
    assert not second.revoked


def test_changed_secret_revokes_who_showed_the_old_one() -> None:
    ring = Keyring([key("a", "old", ["#"])])
    old = ring.lookup(b"old")
    assert old is not None
    ring.replace([key("a", "new", ["#"])])
    assert old.revoked
    assert ring.lookup(b"old") is None
    new = ring.lookup(b"new")
    assert new is not None
    assert new.name == "a"
    assert not new.revoked


def test_secrets_that_change_hands_revoke_both() -> None:
    ring = Keyring([key("a", "one", ["a"]), key("b", "two", ["b"])])
    a, b = ring.lookup(b"one"), ring.lookup(b"two")
    assert a is not None
    assert b is not None
    ring.replace([key("a", "two", ["a"]), key("b", "one", ["b"])])
    assert a.revoked
    assert b.revoked
    found = ring.lookup(b"one")
    assert found is not None
    assert (found.name, found.publishes("b"), found.publishes("a")) == ("b", True, False)


@pytest.mark.parametrize(
    "bad",
    [
        SimpleNamespace(name="b", key="x", publish=[1], subscribe=[]),
        SimpleNamespace(name="b", key="x", publish=[], subscribe=["\ud800"]),
        SimpleNamespace(name="b", key=None, publish=[], subscribe=[]),
        SimpleNamespace(name=3, key="x", publish=[], subscribe=[]),
        SimpleNamespace(name="b", key="x", publish=[]),
    ],
)
def test_reload_that_fails_changes_nothing(bad: Any) -> None:
    ring = Keyring([key("a", "alpha", ["t"]), key("z", "zeta", ["t"])])
    rights, other = ring.lookup(b"alpha"), ring.lookup(b"zeta")
    assert rights is not None
    assert other is not None
    with pytest.raises((AttributeError, TypeError, UnicodeEncodeError)):
        ring.replace([key("a", "alpha", ["u"]), bad])
    assert ring.lookup(b"alpha") is rights
    assert ring.lookup(b"zeta") is other
    assert rights.publishes("t")
    assert not rights.publishes("u")
    assert not other.revoked


@pytest.mark.parametrize(
    ("allowed", "filter", "may"),
    [
        ("#", "a.#.b", True),
        ("a.#", "a", True),
        ("a.*", "a.#", False),
        ("a.#.#", "a.b.*", True),
        ("*.#", "#", False),
        ("a.b", "a.b", True),
        ("a.b", "a.*", False),
        ("*.*", "a.*", True),
    ],
)
def test_filter_may_be_followed_if_all_that_it_matches_may_be(allowed: str, filter: str, may: bool) -> None:
    assert Rights("k", [], [allowed]).follows(filter) == may
