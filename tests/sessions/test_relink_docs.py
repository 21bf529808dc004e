"""The conversations in docs/protocols/relink.md, byte for byte as they stand there."""

import re
from pathlib import Path

import pytest

from headrace.sessions.relink import RelinkSession
from tests.sessions.relink_gateway import RelinkGateway

PAGE = (Path(__file__).parent.parent.parent / "docs" / "protocols" / "relink.md").read_text()
CONVERSATIONS = re.findall(r"```relink\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_conversation_in_the_documentation_is_what_happens(tmp_path: Path, conversation: str) -> None:
    gateway = RelinkGateway(tmp_path / "log")
    session: RelinkSession = gateway.shared.session()
    link = b""
    said = heard = b""
    for line in conversation.splitlines():
        mark, _, text = line.partition(" ")
        if mark == "=":
            assert heard == b""
            session.leave(gateway.now)
            session = gateway.shared.session()
        elif mark == ">":
            assert heard == b"", line
            text = text.replace("epoch", gateway.shared.epoch.to_bytes(8, "little").hex())
            said += bytes.fromhex(text.replace("link", link.hex()))
        elif mark == "<":
            if said:
                heard = session.feed(said, gateway.now)
                gateway.log.sync_now()
                heard += session.feed(b"", gateway.now)
                said = b""
            if "epoch link" in text:
                epoch, link = heard[:8], heard[8:16]
                assert epoch == gateway.shared.epoch.to_bytes(8, "little")
                expected = epoch + link
            else:
                expected = bytes.fromhex(text)
            assert heard[: len(expected)].hex(" ") == expected.hex(" "), line
            heard = heard[len(expected) :]
        else:
            assert mark == "#", line
    assert heard == b""
    assert session.feed(said, gateway.now) == b""
    assert not session.closing
    gateway.close()


def test_documentation_has_its_conversations() -> None:
    assert len(CONVERSATIONS) == 3
