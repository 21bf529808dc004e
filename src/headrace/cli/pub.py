"""`headrace pub`: publishes lines, files and arguments through any protocol's client. It knows where messages
come from and how fast they may go, and nothing of how a protocol says them."""

import asyncio
import itertools
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import BinaryIO, Final

import click

from headrace.clients.face import Client, Server, Wish
from headrace.clients.shell import ADDRESSES, run, server_options
from headrace.errors import HeadraceError

READ_BYTES: Final = 1 << 20
# Chunks of input that may wait for the network.
READ_AHEAD: Final = 4
# Messages that are repeated go in batches of about this many bytes, and at most so many.
BATCH_BYTES: Final = 1 << 18
BATCH_MESSAGES: Final = 1000


class BadInput(HeadraceError):
    """What was to be published cannot be."""


class Input:
    """Reads a file, pipe or terminal in a thread of its own, since any of them may block; one that is waited
    for no more is left behind."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue()
        self._room = threading.Semaphore(READ_AHEAD)
        threading.Thread(target=self._read, name="input", daemon=True).start()

    def _read(self) -> None:
        data: bytes | OSError = b"-"
        while data and not isinstance(data, OSError):
            self._room.acquire()
            try:
                data = os.read(self._descriptor, READ_BYTES)
            except OSError as error:
                data = error
            try:
                self._loop.call_soon_threadsafe(self._chunks.put_nowait, data)
            except RuntimeError:
                return  # the loop has ended meanwhile

    async def chunks(self) -> AsyncIterator[bytes]:
        """What is there, as soon as it is there."""
        while data := await self._chunks.get():
            if isinstance(data, OSError):
                raise BadInput(f"cannot read the input: {data.strerror}")
            self._room.release()
            yield data


async def lines(chunks: AsyncIterator[bytes], longest: int) -> AsyncIterator[list[bytes]]:
    """The lines that each chunk completes, without their ends; the last one needs none."""
    tail = bytearray()  # grows in place: a long line comes in many chunks
    async for chunk in chunks:
        if b"\n" in chunk:
            tail += chunk
            *whole, rest = bytes(tail).split(b"\n")
            tail = bytearray(rest)
            yield whole
        else:
            tail += chunk
        if len(tail) > longest:
            raise BadInput(f"a line is longer than a message can be ({longest} bytes)")
    if tail:
        yield [bytes(tail)]


async def whole(chunks: AsyncIterator[bytes], longest: int) -> bytes:
    message = bytearray()
    async for chunk in chunks:
        message += chunk
        if len(message) > longest:
            raise BadInput(f"the input is longer than a message can be ({longest} bytes)")
    return bytes(message)


def repeated(messages: list[bytes], count: int) -> Iterator[list[bytes]]:
    """So many messages, these over and over."""
    size = max(1, min(BATCH_MESSAGES, BATCH_BYTES * len(messages) // (sum(map(len, messages)) or 1)))
    endless = itertools.islice(itertools.cycle(messages), count)
    while batch := list(itertools.islice(endless, size)):
        yield batch


class Pace:
    """Lets so many messages through in each second, evenly."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._start = time.perf_counter()
        self._passed = 0

    async def allow(self, wanted: int) -> int:
        """How many of the wanted ones may go now; waits for the first."""
        while True:
            # The millionth keeps a moment that was slept until from counting as one before it.
            due = int((time.perf_counter() - self._start) * self._rate + 1e-6) + 1 - self._passed
            if due > 0:
                allowed = min(due, wanted)
                self._passed += allowed
                return allowed
            await asyncio.sleep(max(0.0, self._start + self._passed / self._rate - time.perf_counter()))


@click.command("pub", short_help="Publish messages.", epilog=ADDRESSES)
@server_options
@click.argument("address")
@click.argument("messages", metavar="[MESSAGE]...", nargs=-1)
@click.option(
    "--file",
    "-f",
    metavar="FILE",
    type=click.File("rb", lazy=False),
    help="Read messages from FILE instead of standard input.",
)
@click.option("--raw", is_flag=True, help="The whole input is one message, byte for byte.")
@click.option("--qos", type=click.Choice(["0", "1"]), default="0", show_default=True, help="1: confirmed.")
@click.option("--rate", metavar="N", type=click.FloatRange(min=0, min_open=True), help="Messages a second.")
@click.option(
    "--count",
    "-n",
    metavar="N",
    type=click.IntRange(min=1),
    help="Stop after N messages; MESSAGEs and --raw input are repeated until then.",
)
@click.option("--quiet", "-q", is_flag=True, help="No summary on standard error.")
def command(
    client: Client,
    server: Server,
    address: str,
    messages: tuple[str, ...],
    file: BinaryIO | None,
    raw: bool,
    qos: str,
    rate: float | None,
    count: int | None,
    quiet: bool,
) -> None:
    """Publish to ADDRESS: each MESSAGE, or else each line of standard input.

    ADDRESS is the protocol's own, as named at the end.

    A line's end is not part of its message; an empty line is an empty message. Lines leave as soon as they
    are read.

    With --qos 1 the command ends when the server has every message safe. What a lost connection left
    unconfirmed is sent again, and may then arrive twice.

    The exit code is 0 if the server took everything, 1 if not, 2 for a wrong command line and 130 for Ctrl-C.
    """
    if messages and (file is not None or raw):
        raise click.UsageError("messages come from the command line, or from --file and --raw input")
    wish = Wish(address, int(qos))
    descriptor = sys.stdin.fileno() if file is None else file.fileno()

    async def batches() -> AsyncIterator[list[bytes]]:
        if messages:
            given = [os.fsencode(message) for message in messages]
            for batch in repeated(given, count or len(given)):
                yield batch
        elif raw:
            message = await whole(Input(descriptor).chunks(), client.max_message)
            for batch in repeated([message], count or 1):
                yield batch
        else:
            async for batch in lines(Input(descriptor).chunks(), client.max_message):
                yield batch

    sent, seconds, losses = run(publish(client, server, wish, batches(), rate, count))
    if not quiet:
        click.echo(summary(sent, seconds, losses), err=True)


async def publish(
    client: Client,
    server: Server,
    wish: Wish,
    batches: AsyncIterator[list[bytes]],
    rate: float | None,
    count: int | None,
) -> tuple[int, float, int]:
    """How many messages were published, in how many seconds, and how often the connection was lost."""
    sent = 0
    try:
        async with client.publisher(server, wish) as publisher:
            start = time.perf_counter()
            pace = Pace(rate) if rate is not None else None
            async for batch in batches:
                if count is not None:
                    batch = batch[: count - sent]
                while batch:
                    size = len(batch) if pace is None else await pace.allow(len(batch))
                    await publisher.publish(batch[:size])
                    sent += size
                    batch = batch[size:]
                if sent == count:
                    break
    except ValueError as error:
        raise BadInput(f"cannot publish to {wish.address!r}: {error}") from None
    return sent, time.perf_counter() - start, publisher.losses


def summary(sent: int, seconds: float, losses: int) -> str:
    text = f"{sent:,} {'message' if sent == 1 else 'messages'} in {seconds:.2f} s ({sent / seconds:,.0f}/s)"
    if losses:
        times = "once" if losses == 1 else f"{losses} times"
        text += f"; the connection was lost {times}, some may be missing"
    return text
