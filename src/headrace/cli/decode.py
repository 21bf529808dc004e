"""`headrace decode`: bytes of a wire protocol to JSON lines, one a frame, and where and why they go wrong.

It looks at bytes alone; it opens no connection and knows nothing of a running gateway."""

import difflib
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final, cast

import click

from headrace.decoders import READERS
from headrace.decoders.lines import COMPLAINTS, Line, Role
from headrace.decoders.relink import read_relink

READ_SIZE: Final = 65536


class BadHex(ValueError):
    """Text that is not hex; `position` counts the bytes before it, line and column count from 1."""

    def __init__(self, position: int, line: int, column: int, reason: str) -> None:
        super().__init__(reason)
        self.position = position
        self.line = line
        self.column = column
        self.reason = reason


TOKEN: Final = re.compile(r"//.*|[^\s,:]+?(?=//|[\s,:]|$)")
DIGITS: Final = re.compile(r"(?:0[xX])?((?:[0-9a-fA-F]{2})+)")


def from_hex(lines: Iterable[str]) -> Iterator[bytes]:
    """The bytes of each line. Spaces, commas, colons, 0x prefixes and // comments may stand between them."""
    position = 0
    for number, line in enumerate(lines, 1):
        found = bytearray()
        for token in TOKEN.finditer(line):
            word = token.group()
            if word.startswith("//"):
                continue
            digits = DIGITS.fullmatch(word)
            if digits is None:
                yield bytes(found)
                reason = f"{word[:40]!r} is not pairs of hex digits"
                raise BadHex(position + len(found), number, token.start() + 1, reason)
            found += bytes.fromhex(digits[1])
        position += len(found)
        yield bytes(found)


def input_chunks(arguments: tuple[str, ...], raw: bool) -> Iterator[bytes]:
    if arguments:
        given = " ".join(arguments)
        if raw:
            yield os.fsencode(given)
        else:
            yield from from_hex(given.splitlines())
        return
    stream = cast(io.BufferedReader, sys.stdin.buffer)
    if raw:
        # read1 gives what is there: a capture that is still growing is shown as it grows.
        while chunk := stream.read1(READ_SIZE):
            yield chunk
    else:
        yield from from_hex(line.decode("utf-8", "replace") for line in stream)


def known_protocol(ctx: click.Context, param: click.Parameter, value: str) -> str:
    name = value.lower()
    if name in READERS:
        return name
    near = difflib.get_close_matches(name, READERS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(READERS)}."
    raise click.BadParameter(f"unknown protocol {value!r}; {hint}", ctx, param)


def two_sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = value.split(",")
    if len(sizes) != 2 or not all(size in "012345678" and size for size in sizes):
        raise click.BadParameter("two sizes from 0 to 8, like 4,4", ctx, param)
    return int(sizes[0]), int(sizes[1])


@click.command("decode", short_help="Show the frames in bytes of a wire protocol.")
@click.argument("protocol", callback=known_protocol)
@click.argument("given", metavar="[HEX]...", nargs=-1)
@click.option("--raw", is_flag=True, help="The input is the bytes themselves, not hex.")
@click.option(
    "--role",
    type=click.Choice(["any", "client", "server"]),
    default="any",
    show_default=True,
    help="Who sent the bytes; frames that only the other side sends are flagged.",
)
@click.option(
    "--id-sizes",
    metavar="C,L",
    callback=two_sizes,
    help="relink: bytes of the connector's and the listener's channel ids, which a server's stream does not tell."
    "  [default: 4,4]",
)
@click.option("--no-handshake", is_flag=True, help="relink: the stream begins with packets.")
@click.pass_context
def command(
    ctx: click.Context,
    protocol: str,
    given: tuple[str, ...],
    raw: bool,
    role: Role,
    id_sizes: tuple[int, int] | None,
    no_handshake: bool,
) -> None:
    """Show the frames of PROTOCOL in HEX, or in standard input, as JSON lines.

    Each line has the frame's byte range. Hex may have spaces, commas, colons, 0x prefixes and // comments.
    The exit code is 1 if anything was malformed, unfinished or not of the protocol; a line says where and
    why.
    """
    clean = True
    reader = READERS[protocol]
    if protocol == "relink":
        reader = partial(read_relink, sizes=id_sizes or (4, 4), handshake=not no_handshake)
    elif id_sizes is not None or no_handshake:
        raise click.UsageError("--id-sizes and --no-handshake are for relink")
    try:
        for line in reader(input_chunks(given, raw), role):
            clean = clean and COMPLAINTS.isdisjoint(line)
            emit(line)
    except BadHex as bad:
        clean = False
        emit(
            {
                "error": "bad hex",
                "position": bad.position,
                "line": bad.line,
                "column": bad.column,
                "reason": bad.reason,
            }
        )
    if not clean:
        ctx.exit(1)


def emit(line: Line) -> None:
    # As bytes: the output is UTF-8 whatever the terminal's encoding is.
    click.echo(json.dumps(line, ensure_ascii=False).encode())
