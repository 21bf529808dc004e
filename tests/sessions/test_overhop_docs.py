"""The conversations and tables in docs/protocols/overhop.md, as they stand there."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.wire import overhop as wire
from headrace.wire.overhop import MessageType as T
from tests.sessions.passive_overhop import OverhopGateway, Peer

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "protocols" / "overhop.md").read_text()
CONVERSATIONS = re.findall(r"```overhop\n(.*?)```", PAGE, re.DOTALL)


def fits(wanted: Any, found: Any, names: dict[str, str]) -> bool:
    """Whether a value is as written; what stands in <NAMES> is any text at first, and the same from then on."""
    if isinstance(wanted, dict):
        return (
            isinstance(found, dict)
            and set(wanted) == set(found)
            and all(fits(wanted[key], found[key], names) for key in wanted)
        )
    if isinstance(wanted, str) and (name := re.fullmatch(r"<([A-Z]+)>", wanted)):
        return bool(names.setdefault(name[1], found) == found)
    return bool(filled(wanted, names) == found)


def filled(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: filled(inner, names) for key, inner in value.items()}
    if isinstance(value, str):
        return re.sub(r"<([A-Z]+)>", lambda found: names.get(found[1], found[0]), value)
    return value


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_conversation_in_the_documentation_is_what_happens(tmp_path: Path, conversation: str) -> None:
    gateway = OverhopGateway(tmp_path)
    peer = Peer(gateway)
    names: dict[str, str] = {}
    heard: list[wire.Message] = []
    for line in conversation.splitlines():
        mark, _, rest = line.partition(" ")
        if mark == ">":
            assert heard == []
            kind, rid, payload = rest.split(" ", 2)
            frame = wire.encode(T[kind], rid, filled(json.loads(payload), names))
            heard = wire.Decoder().feed(peer.exchange(frame))
            gateway.settle()
            heard += wire.Decoder().feed(peer.session.pull(gateway.now))
        elif mark == "wait":
            gateway.elapse(float(rest))
            heard += wire.Decoder().feed(peer.session.pull(gateway.now))
        elif mark == "<":
            kind, rid, payload = rest.split(" ", 2)
            message = heard.pop(0)
            assert (message.name, message.rid) == (kind, rid)
            assert fits(json.loads(payload), message.payload, names), message.payload
        elif mark == "closed":
            assert peer.closing
        else:
            assert mark == "#", line
    assert heard == []
    assert peer.closing == ("\nclosed\n" in conversation)
    gateway.close()


def test_documentation_has_every_message_and_every_code_of_the_gateway() -> None:
    assert len(CONVERSATIONS) == 3
    for kind in T:
        assert kind.name in PAGE
        assert re.search(rf"\b{kind.value}\b", PAGE), kind
    source = (ROOT / "ext" / "headrace" / "sessions" / "overhop.pyx").read_text()
    codes = set(re.findall(r'"([A-Z]+(?:_[A-Z]+)+)"', source))
    assert len(codes) > 20
    assert [code for code in sorted(codes) if code not in PAGE] == []
    documented = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", PAGE))
    states = {"QUEUE_ALREADY_PAUSED", "QUEUE_ALREADY_RUNNING"}
    assert documented - states == codes
