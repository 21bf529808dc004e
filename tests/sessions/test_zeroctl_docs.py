"""The conversations in docs/protocols/zeroctl.md, byte for byte as they stand there."""

import re
from pathlib import Path

import pytest

from headrace.wire import zeroctl as wire
from tests.sessions.passive_gateway import DEV
from tests.sessions.passive_zeroctl import Peer, ZeroctlGateway
from tests.sessions.test_blipmq_docs import turns

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "protocols" / "zeroctl.md").read_text()
CONVERSATIONS = re.findall(r"```zeroctl\n(.*?)```", PAGE, re.DOTALL)


def exchange(peer: Peer, data: bytes) -> bytes:
    """All that these bytes are answered with, deliveries included."""
    gateway = peer.gateway
    answers = [peer.session.feed(data, gateway.now)]
    gateway.log.sync_now()
    gateway.bus.dispatch()
    answers.append(peer.session.feed(b"", gateway.now))
    answers.append(peer.session.pull(gateway.now))
    return b"".join(answers)


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_conversation_in_the_documentation_is_what_happens(tmp_path: Path, conversation: str) -> None:
    gateway = ZeroctlGateway(tmp_path, keys=[DEV])
    peer = gateway.peer(None)
    for sent, heard in turns(conversation):
        assert exchange(peer, sent).hex(" ") == heard.hex(" ")
    assert not peer.session.closing
    gateway.close()


def test_documentation_has_every_frame_and_every_refusal_of_the_gateway() -> None:
    assert len(CONVERSATIONS) == 3
    for kind in wire.FrameType:
        assert f"| {kind.value} | {kind.name} |" in PAGE
    assert f"above {wire.MESSAGE_OVERHEAD} and" in PAGE
    source = (ROOT / "ext" / "headrace" / "sessions" / "zeroctl.pyx").read_text()
    texts = re.findall(r'self\.refuse\(\s*(?:frame\.id|id|0), (\d+),\s*f?"([^"{]+)', source)
    assert len(texts) > 20
    for code, text in texts:
        assert f"| {code} |" in PAGE
        assert re.split("[:,]", text)[0].strip() in PAGE, text
