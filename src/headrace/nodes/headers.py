"""zeroctl headers as Python makes and reads them: the required keys, times, words of a key. It knows nothing of who
sends them."""

import hashlib
import json
import time
import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from typing_extensions import Buffer

from headrace.bus import PROTOCOL_NAMES
from headrace.wire.zeroctl import is_key_text

ZEROCTL: Final = 4  # RecordHeader.protocol

# What real nodes derive their UUID from when they are given none.
NODE_NAMESPACE: Final = uuid.UUID("63082cd1-0f91-48cd-923a-f1523a26549b")
# Up to these a ts is in seconds, in milliseconds and in microseconds: each from 1970 to the year 5138.
SECONDS_BELOW: Final = 1e11
MILLISECONDS_BELOW: Final = 1e14
LATEST: Final = 1e17


def default_uuid(node_name: str) -> str:
    """The UUID of a node that has no other: the same for the same name."""
    return str(uuid.uuid5(NODE_NAMESPACE, node_name))


def encode_header(fields: Mapping[str, Any]) -> bytes:
    """A header's JSON, as short as it gets."""
    return json.dumps(fields, separators=(",", ":")).encode()


def required(node_name: str, node_uuid: str, body: bytes, now: float | None = None) -> dict[str, Any]:
    """The keys that every message has."""
    return {
        "node-name": node_name,
        "node-uuid": node_uuid,
        "ts": round(time.time() if now is None else now, 6),
        "sha256": hashlib.sha256(body).hexdigest(),
    }


def foreign_header(
    node_name: str, node_uuid: str, kept: bytes, payload: Buffer, protocol: int, time_us: int
) -> bytes:
    """The header of a message that another protocol sent, or that lost its own on the way to a dead-letter topic: what
    the record has beside the payload, with the required keys as the gateway's own."""
    fields: dict[str, Any] = {}
    try:
        found = json.loads(kept) if kept else None
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        fields = {
            key: value
            for key, value in found.items()
            if 1 <= len(key) <= 250
            and key.isascii()
            and key.isprintable()
            and not key.startswith("_transport-")
        }
    if protocol != ZEROCTL or "node-uuid" not in fields or "node-name" not in fields:
        fields |= {
            "node-name": node_name,
            "node-uuid": node_uuid,
            "ts": round(time_us / 1e6, 6),
            "sha256": hashlib.sha256(payload).hexdigest(),
        }
        for path in ("on-start", "on-finish"):
            if path in fields and not (isinstance(fields[path], str) and is_key_text(fields[path])):
                del fields[path]
    fields["_transport-protocol"] = PROTOCOL_NAMES[protocol] or "headrace"
    return encode_header(fields)


def unix_seconds(ts: object) -> float | None:
    """A ts of any form in seconds; None where it is none."""
    if isinstance(ts, str):
        try:
            if "-" in ts[1:]:
                return datetime.fromisoformat(ts.replace(" ", "T")).timestamp()
            ts = float(ts)
        except ValueError:
            return None
    if isinstance(ts, bool) or not isinstance(ts, int | float) or not 0 <= ts <= LATEST:
        return None
    if ts < SECONDS_BELOW:
        return float(ts)
    return ts / (1e3 if ts < MILLISECONDS_BELOW else 1e6)


def word(name: str) -> str:
    """A name as one word of a routing key: dots are written as underscores, and so is what a key cannot have."""
    return "".join(c if " " <= c <= "~" and c != "." else "_" for c in name) or "_"
