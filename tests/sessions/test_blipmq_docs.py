"""The conversations in docs/protocols/blipmq.md, byte for byte as they stand there."""

import re
from pathlib import Path

import pytest

from headrace.wire import blipmq as wire
from tests.sessions.passive_gateway import DEV, PassiveGateway

PAGE = (Path(__file__).parent.parent.parent / "docs" / "protocols" / "blipmq.md").read_text()
CONVERSATIONS = re.findall(r"```blipmq\n(.*?)```", PAGE, re.DOTALL)


def turns(conversation: str) -> list[tuple[bytes, bytes]]:
    """What is sent, and what it is answered with, turn by turn."""
    said: list[tuple[bytes, bytes]] = []
    for line in conversation.splitlines():
        mark, _, rest = line.partition(" ")
        if mark == "#":
            continue
        data = bytes.fromhex(rest)
        sent, heard = said[-1] if said else (b"", b"")
        if mark == ">" and (heard or not said):
            said.append((data, b""))
        elif mark == ">":
            said[-1] = sent + data, b""
        else:
            assert mark == "<", line
            said[-1] = sent, heard + data
    return said


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_conversation_in_the_documentation_is_what_happens(tmp_path: Path, conversation: str) -> None:
    gateway = PassiveGateway(tmp_path, keys=[DEV])
    client = gateway.connect(None)
    for sent, heard in turns(conversation):
        assert client.exchange(sent).hex(" ") == heard.hex(" ")
    assert not client.session.closing
    gateway.close()


def test_documentation_has_conversations_and_every_answer_of_the_gateway() -> None:
    assert len(CONVERSATIONS) == 4
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    raw = bytes.fromhex("".join(re.findall(r'^ +"([0-9a-f ]+)"', snippet, re.MULTILINE)))
    assert [frame.type.name for frame in wire.Decoder().feed(raw)] == ["HELLO", "AUTH", "PUBLISH", "PING"]
    source = Path(__file__).parent.parent.parent / "ext" / "headrace" / "sessions" / "blipmq.pyx"
    texts = re.findall(r'self\.nack\(\s*(?:frame\.)?correlation, (\d+), f?"([^"{]+)', source.read_text())
    assert len(texts) > 20
    for code, text in texts:
        assert code in PAGE
        assert text.partition(":")[0].strip() in PAGE, text
