"""The twin of headrace.columns in plain Python: rows from records as LogReader.read() gives them. Knows nothing of
Arrow's memory."""

import base64
import json
from collections.abc import Collection, Iterator, Sequence
from json.decoder import JSONDecoder, scanstring  # type: ignore[attr-defined]
from typing import Any

from headrace.drop.schema import COLUMNS
from headrace.log import LogReader, Record
from tests.oracle import filters as filters_twin

PARTS = 1
PROTOCOLS = ("headrace", "blipmq", "overhop", "relink", "zeroctl", "felix")
HOUR = 3_600_000_000


def _refuse(text: str) -> None:
    raise ValueError(text)


# Digits stay text: Python has limits of its own for numbers.
STRICT: dict[str, Any] = {"parse_constant": _refuse, "parse_int": str, "parse_float": str}


def is_json(data: bytes) -> bool:
    """RFC 8259 in UTF-8, for values that are not nested deeper than Python likes."""
    try:
        json.loads(data.decode(), **STRICT)
    except ValueError:
        return False
    return True


def headers_of(raw: bytes) -> dict[str, str] | None:
    if not raw:
        return None
    text = raw.decode(errors="replace")
    if not is_json(raw) or not text.lstrip(" \t\r\n").startswith("{"):
        return {"": base64.b64encode(raw).decode()}

    def skip(at: int) -> int:
        while text[at] in " \t\r\n":
            at += 1
        return at

    decoder = JSONDecoder(**STRICT)
    found: dict[str, str] = {}
    at = skip(skip(0) + 1)
    while text[at] != "}":
        key, at = scanstring(text, at + 1, True)
        begin = skip(skip(at) + 1)
        value, at = decoder.raw_decode(text, begin)
        is_text = text[begin] == '"'
        found[_whole(key)] = _whole(value) if is_text else text[begin:at]
        at = skip(at)
        if text[at] == ",":
            at = skip(at + 1)
    return found


def _whole(text: str) -> str:
    return "".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in text)


def signed(number: int, bits: int) -> int:
    return number - (1 << bits) if number >> (bits - 1) else number


def row(record: Record, node: str, log: str) -> dict[str, Any]:
    known = record.protocol < len(PROTOCOLS)
    return {
        "node": node,
        "log": log,
        "offset": record.offset,
        "ts": record.time,
        "protocol": PROTOCOLS[record.protocol] if known else f"protocol-{record.protocol}",
        "topic": record.topic_name.decode(errors="replace"),
        "kind": record.kind,
        "source": record.origin_name.decode(errors="replace") or None,
        "correlation": signed(record.correlation, 64),
        "headers": headers_of(record.headers),
        "part_sizes": [signed(size, 32) for size in record.parts] if record.flags & PARTS else None,
        "payload": record.payload,
        "payload_json": record.payload.decode() if is_json(record.payload) else None,
    }


def wanted(record: Record, filters: Sequence[str]) -> bool:
    return any(filters_twin.matches(one.encode(), record.topic_name) for one in filters)


def rows(reader: LogReader, node: str, filters: Sequence[str] = ("#",)) -> Iterator[dict[str, Any]]:
    for record in reader:
        if wanted(record, filters):
            yield row(record, node, reader.id.hex())


def batches(
    rows: Sequence[dict[str, Any]], max_rows: int, sizes: Sequence[int], max_bytes: int
) -> list[list[dict[str, Any]]]:
    """Rows as read() would cut them, by what each counts for; names of topics and sources are not counted."""
    cut: list[list[dict[str, Any]]] = []
    size = 0
    for one, counts in zip(rows, sizes, strict=True):
        full = not cut or len(cut[-1]) >= max_rows or size >= max_bytes
        if full or cut[-1][-1]["ts"] // HOUR != one["ts"] // HOUR:
            cut.append([])
            size = 0
        cut[-1].append(one)
        size += counts
    return cut


def without(
    rows: list[dict[str, Any]], leave_out: Collection[str], payload_json: bool
) -> list[dict[str, Any]]:
    names = [column.name for column in COLUMNS if column.name not in leave_out]
    names += ["payload_json"] * payload_json
    return [{name: one[name] for name in names} for one in rows]
