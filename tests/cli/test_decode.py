"""The decode command: hex and raw bytes to JSON lines, and where and why it stops."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli import decode
from headrace.wire import blipmq

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "blipmq.json").read_text("utf-8"))
HELLO = "0000000B 01 0000000000000001 0001"


def run(*arguments: str, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(decode.command, list(arguments), input=stdin)


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout_bytes.decode("utf-8").splitlines()]


def decode_frame(frame: bytes, role: str = "any") -> dict[str, Any]:
    (line,) = lines(run("blipmq", "--role", role, frame.hex()))
    return line


# --- frames -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
def test_sample_of_the_spec_is_shown_with_its_fields(vector: dict[str, Any]) -> None:
    result = run("blipmq", vector["hex"])
    assert result.exit_code == 0
    fields = {name: value for name, value in vector["fields"].items() if name != "trailing"}
    assert lines(result) == [
        {
            "start": 0,
            "end": len(bytes.fromhex(vector["hex"])),
            "type": vector["type"],
            "correlation": vector["correlation"],
            **fields,
        }
    ]


def test_each_frame_has_its_byte_range() -> None:
    result = run("blipmq", *(vector["hex"] for vector in VECTORS))
    ranges = [(line["start"], line["end"]) for line in lines(result)]
    assert ranges == [(0, 15), (15, 37), (37, 57), (57, 79), (79, 100)]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (b"", {"message": ""}),
        ("grün → ok\n".encode(), {"message": "grün → ok\n"}),
        (b"\x00\x01", {"message_hex": "0001"}),
        (b"\xff\xfe", {"message_hex": "fffe"}),
        ("\u200e".encode(), {"message_hex": "e2808e"}),
    ],
)
def test_message_is_text_where_printable_and_labelled_hex_elsewhere(
    message: bytes, shown: dict[str, str]
) -> None:
    line = decode_frame(blipmq.encode_publish("t", message, 0, 1))
    assert {name: value for name, value in line.items() if name.startswith("message")} == shown


def test_malformed_payload_is_shown_and_the_frames_behind_it_too() -> None:
    result = run("blipmq", "0000000C 05 0000000000000007 000102", HELLO)
    assert result.exit_code == 1
    bad, hello = lines(result)
    assert bad == {
        "start": 0,
        "end": 16,
        "type": "ACK",
        "correlation": 7,
        "malformed": "bad size",
        "reason": "the payload of ACK has 8 bytes, not 3",
        "payload_hex": "000102",
    }
    assert hello["type"] == "HELLO"


# --- bad input ----------------------------------------------------------------------------------------------


def test_bad_type_is_the_last_line_after_the_frames_before_it() -> None:
    result = run("blipmq", HELLO, "00000009 0A 0000000000000001", HELLO)
    assert result.exit_code == 1
    hello, error = lines(result)
    assert hello["type"] == "HELLO"
    assert error == {"error": "bad type", "position": 19, "reason": "frame type 0x0A is unknown"}


def test_bad_length_is_the_last_line() -> None:
    result = run("blipmq", "00000008")
    assert result.exit_code == 1
    assert lines(result) == [{"error": "bad length", "position": 0, "reason": "length 8 is below 9"}]


def test_unfinished_tail_says_how_much_is_missing() -> None:
    result = run("blipmq", HELLO, HELLO[:-5])
    assert result.exit_code == 1
    hello, tail = lines(result)
    assert hello["type"] == "HELLO"
    assert tail == {
        "unfinished": 13,
        "position": 15,
        "wanted": 15,
        "reason": "the input ends inside a frame: 13 of 15 bytes are there",
    }


def test_unfinished_length_field_wants_an_unknown_number() -> None:
    (tail,) = lines(run("blipmq", "0000"))
    assert tail == {
        "unfinished": 2,
        "position": 0,
        "wanted": None,
        "reason": "the input ends inside a frame: 2 bytes are there",
    }


def test_nothing_at_all_is_no_frame_and_no_complaint() -> None:
    result = run("blipmq")
    assert (result.exit_code, result.stdout) == (0, "")


# --- hex ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "0000000b010000000000000001 0001",
        "0X0000000B 0x01 0x0000000000000001 0x0001",
        "0x00, 0x00, 0x00, 0x0B, 01:00:00:00:00:00:00:00:01 , 00 01,",
        "00 00 00 0B   // length = 11\n01            // frame_type = HELLO\n"
        "00 00 00 00 00 00 00 01   // correlation_id = 1\r\n\n// 99\n00 01//protocol_version",
        "\t0000000b01 00000000\n00000001\n0001\n",
    ],
)
@pytest.mark.parametrize("source", ["argument", "standard input"])
def test_hex_may_be_written_as_people_write_it(text: str, source: str) -> None:
    result = run("blipmq", text) if source == "argument" else run("blipmq", stdin=text.encode())
    assert result.exit_code == 0
    assert lines(result) == [{"start": 0, "end": 15, "type": "HELLO", "correlation": 1, "version": 1}]


@pytest.mark.parametrize(
    ("text", "position", "line", "column", "word"),
    [
        (f"{HELLO}\n00 zz 01", 16, 2, 4, "zz"),
        (f"{HELLO}\n0", 15, 2, 1, "0"),
        (f"{HELLO}\n00 0x", 16, 2, 4, "0x"),
        (f"{HELLO} 001//", 15, 1, 35, "001"),
        (f"{HELLO} / 00", 15, 1, 35, "/"),
        (f"{HELLO} é", 15, 1, 35, "é"),
    ],
)
def test_what_is_not_hex_is_named_with_its_place_after_the_frames_before_it(
    text: str, position: int, line: int, column: int, word: str
) -> None:
    result = run("blipmq", stdin=text.encode())
    assert result.exit_code == 1
    hello, error = lines(result)
    assert hello["type"] == "HELLO"
    assert error == {
        "error": "bad hex",
        "position": position,
        "line": line,
        "column": column,
        "reason": f"{word!r} is not pairs of hex digits",
    }


@given(st.binary(max_size=60), st.data())
def test_hex_with_anything_tolerated_between_its_bytes_is_those_bytes(
    data: bytes, draw: st.DataObject
) -> None:
    between = st.sampled_from([" ", "\n", ", ", ":", " 0x", "\t", " // 12 zz\n", "\r\n"])
    text = "".join(f"{byte:02x}{draw.draw(between)}" for byte in data) + "00"
    assert b"".join(decode.from_hex(text.splitlines())) == data + b"\0"


# --- raw bytes ----------------------------------------------------------------------------------------------


def test_raw_bytes_come_from_standard_input() -> None:
    result = run("blipmq", "--raw", stdin=bytes.fromhex(HELLO) + blipmq.encode_ping(3))
    assert result.exit_code == 0
    assert [line["type"] for line in lines(result)] == ["HELLO", "PING"]


def test_raw_bytes_come_from_the_argument() -> None:
    result = run("blipmq", "--raw", "GET / HTTP/1.1")
    assert result.exit_code == 1
    (error,) = lines(result)
    assert (error["error"], error["position"]) == ("bad length", 0)
    assert str(struct.unpack(">I", b"GET ")[0]) in error["reason"]


def test_frames_are_shown_before_the_stream_has_ended() -> None:
    shown: list[str] = []

    def chunks() -> Iterator[bytes]:
        ping = blipmq.encode_ping(1)
        yield ping + ping[:5]
        shown.append("more is asked for")
        yield ping[5:]

    for line in decode.READERS["blipmq"](chunks(), "any"):
        shown.append(str(line["type"]))
    assert shown == ["PING", "more is asked for", "PING"]


# --- roles and warnings -------------------------------------------------------------------------------------

SAMPLES = {
    "HELLO": blipmq.encode_hello(1, 1),
    "AUTH": blipmq.encode_auth("k", 1),
    "PUBLISH": blipmq.encode_publish("t", b"m", 0, 1),
    "SUBSCRIBE": blipmq.encode_subscribe("t", 0, 1),
    "ACK": blipmq.encode_ack(1, 1),
    "NACK": blipmq.encode_nack(400, "empty topic", 1),
    "PING": blipmq.encode_ping(1),
    "PONG": blipmq.encode_pong(1),
    "POLL": blipmq.encode_poll(1, 1),
}


@pytest.mark.parametrize(
    ("role", "unexpected"),
    [
        ("any", set()),
        ("client", {"NACK", "PONG"}),
        ("server", {"HELLO", "AUTH", "SUBSCRIBE", "PING", "POLL"}),
    ],
)
def test_frames_that_only_the_other_side_sends_are_flagged(role: str, unexpected: set[str]) -> None:
    result = run("blipmq", "--role", role, *(sample.hex() for sample in SAMPLES.values()))
    assert result.exit_code == 0
    shown = lines(result)
    assert [line["type"] for line in shown] == list(SAMPLES)
    assert {line["type"] for line in shown if line.get("warnings") == ["unexpected direction"]} == unexpected
    assert {line["type"] for line in shown if "warnings" in line} == unexpected


@pytest.mark.parametrize(
    ("frame", "role", "warnings"),
    [
        (blipmq.encode_hello(2, 1), "any", ["unsupported protocol version"]),
        (blipmq.encode_publish("", b"m", 7, 1), "any", ["empty topic", "invalid QoS value"]),
        (blipmq.encode_subscribe("", 2, 1), "any", ["empty topic", "invalid QoS value"]),
        (blipmq.encode_poll(0, 1), "any", ["subscription_id must be non-zero"]),
        (blipmq.encode_ack(0, 1), "client", ["subscription_id must be non-zero"]),
        (struct.pack(">IBQ", 14, 0x04, 1) + b"\0\1t\1x", "any", ["bytes after the last field are ignored"]),
        (struct.pack(">IBQ", 10, 0x07, 1) + b"x", "any", ["the payload is ignored"]),
    ],
)
def test_what_a_server_would_refuse_or_ignore_is_a_warning(
    frame: bytes, role: str, warnings: list[str]
) -> None:
    assert decode_frame(frame, role)["warnings"] == warnings


def test_acknowledgement_of_a_handshake_is_no_reason_for_a_warning() -> None:
    assert "warnings" not in decode_frame(blipmq.encode_ack(0, 1), "server")


# --- usage --------------------------------------------------------------------------------------------------


def test_unknown_protocol_is_answered_with_the_nearest_name() -> None:
    result = run("blipmk", HELLO)
    assert result.exit_code == 2
    assert "unknown protocol 'blipmk'; did you mean 'blipmq'?" in result.stderr


def test_protocol_like_no_other_is_answered_with_all_names() -> None:
    result = run("xyz", HELLO)
    assert result.exit_code == 2
    assert "unknown protocol 'xyz'; there are: blipmq" in result.stderr


def test_name_of_the_protocol_may_be_written_as_in_its_spec() -> None:
    assert run("BlipMQ", HELLO).exit_code == 0
