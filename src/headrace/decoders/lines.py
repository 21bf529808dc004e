"""What the decoders of all protocols share: how a frame, and where it goes wrong, becomes a line of JSON."""

from typing import Final

Line = dict[str, object]
Role = str  # who sent the bytes: "any", "client" or "server"

# A line with one of these keys says what is not as the protocol has it.
COMPLAINTS: Final = frozenset({"error", "unfinished", "malformed"})


def shown(name: str, value: object) -> Line:
    """Bytes as text where a person can read it, otherwise as hex under a name that says so."""
    if not isinstance(value, bytes):
        return {name: value}
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return {f"{name}_hex": value.hex()}
    if all(char.isprintable() or char in "\t\r\n" for char in text):
        return {name: text}
    return {f"{name}_hex": value.hex()}


def unfinished(position: int, there: int, wanted: int) -> Line:
    of = f" of {wanted}" if wanted else ""
    return {
        "unfinished": there,
        "position": position,
        "wanted": wanted or None,
        "reason": f"the input ends inside a frame: {there}{of} bytes are there",
    }
