"""UDP in batches, over real sockets."""

import asyncio
import socket
import sys
from typing import Any

import pytest

from headrace.quic.datagrams import Batch, DatagramSocket
from headrace.substream import same_connection
from tests.streams import run


async def exchange(datagrams: list[bytes], segments: bool) -> list[bytes]:
    """What arrives of these, in the order of arrival."""
    loop = asyncio.get_running_loop()
    found: list[bytes] = []
    done = loop.create_future()

    def handle(batch: Batch) -> None:
        for data, size, _ in batch:
            found.extend(data[start : start + size] for start in range(0, len(data), size))
        if len(found) >= len(datagrams) and not done.done():
            done.set_result(None)

    def bound(handler: Any) -> DatagramSocket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("127.0.0.1", 0))
        return DatagramSocket(sock, loop, handler)

    receiver, sender = bound(handle), bound(lambda batch: None)
    sender.segments = sender.segments and segments
    to = receiver.socket.getsockname()
    assert sender.send([(data, to) for data in datagrams]) == sum(map(len, datagrams))
    await asyncio.wait_for(done, 10)
    sender.close()
    receiver.close()
    sender.close()  # of no effect
    return found


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("segments", [False, True])
def test_runs_arrive_as_the_datagrams_that_they_are(loop: str, segments: bool) -> None:
    sizes = [1200] * 70 + [300] + [1350] * 3 + [20, 1200, 1200, 1]
    datagrams = [bytes([i]) * size for i, size in enumerate(sizes)]
    assert run(loop, lambda: exchange(datagrams, segments)) == datagrams


def test_a_paused_socket_is_not_read_until_it_goes_on() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        heard: list[bytes] = []
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("127.0.0.1", 0))
        endpoint = DatagramSocket(sock, loop, lambda batch: heard.extend(data for data, _, _ in batch))
        endpoint.pause(True)
        endpoint.pause(True)
        endpoint.send([(b"self", sock.getsockname())])
        await asyncio.sleep(0.05)
        assert heard == []
        endpoint.pause(False)
        while not heard:
            await asyncio.sleep(0.001)
        assert heard == [b"self"]
        endpoint.close()

    asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="others tell a socket of it later, or never")
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_refusal_is_told_whether_reading_or_sending_hears_of_it(count: int, segments: bool) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        nobody = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        nobody.bind(("127.0.0.1", 0))
        place = nobody.getsockname()
        nobody.close()
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.connect(place)
        heard = loop.create_future()
        refusals: list[ConnectionRefusedError] = []

        def refused(error: ConnectionRefusedError) -> None:
            refusals.append(error)
            if not heard.done():
                heard.set_result(None)
            endpoint.close()

        endpoint = DatagramSocket(sock, loop, lambda batch: None, refused)
        for _ in range(count):
            endpoint.send([(b"a", place), (b"b", place)] if segments else [(b"a", place)])
        assert not refusals  # who sends is not interrupted
        await asyncio.wait_for(heard, 10)
        await asyncio.sleep(0)
        assert len(refusals) == 1  # a closed one tells nothing

    asyncio.run(main())


@pytest.mark.parametrize(
    ("data", "same"),
    [
        (b"\x40AAAAAAAAxx\x40AAAAAAAAyy\x40AAAAAAAAz", True),
        (b"\x40AAAAAAAAxx\x40AAAAAAABxx", False),
        (b"\x40AAAAAAAAxx\xc0AAAAAAAAxx", False),
        (b"\x40AAAAAAAAxx\x40AAAA", False),
        (b"", True),
    ],
)
def test_datagrams_of_several_connections_are_told_apart(data: bytes, same: bool) -> None:
    assert same_connection(data, 11, 8) == same
