"""CRC-32C: the portable and the hardware implementation against known answers and the plain-Python twin."""

import ctypes
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.log import crc32c
from tests.oracle import log as twin

# RFC 3720 §B.4, as registers without the final inversion.
VECTORS = [
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (
        bytes.fromhex(
            "01c000000000000000000000000000001400000000000400000000140000001828000000000000000200000000000000"
        ),
        0xD9963A56,
    ),
]

LONGEST = 2200  # beyond the last length at which the hardware's streams change their pace


@pytest.mark.parametrize("portable", [False, True], ids=["fastest", "portable"])
@pytest.mark.parametrize(("data", "expected"), VECTORS, ids=[f"{len(data)} bytes" for data, _ in VECTORS])
def test_known_answers(data: bytes, expected: int, portable: bool) -> None:
    assert crc32c(data, portable=portable) ^ 0xFFFFFFFF == expected


def test_both_implementations_agree_with_the_twin_at_every_length() -> None:
    data = random.Random(1).randbytes(LONGEST)
    state = 0xFFFFFFFF
    for length in range(LONGEST):
        assert crc32c(data[:length]) == crc32c(data[:length], portable=True) == state, length
        state = twin.crc32c(data[length : length + 1], state)


def test_both_implementations_agree_at_every_alignment_and_from_every_state() -> None:
    chance = random.Random(2)
    data = memoryview(chance.randbytes(LONGEST + 16))
    for start in range(16):
        for length in (
            0,
            1,
            7,
            8,
            9,
            15,
            48,
            71,
            72,
            73,
            95,
            96,
            191,
            192,
            383,
            384,
            767,
            768,
            769,
            1536,
            2199,
        ):
            state = chance.getrandbits(32)
            part = data[start : start + length]
            assert crc32c(part, state) == crc32c(part, state, portable=True), (start, length)


def test_a_register_goes_on_where_it_stopped() -> None:
    data = random.Random(3).randbytes(1000)
    for cut in range(0, 1000, 37):
        assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)


def test_bytes_that_cannot_be_read_as_memory_are_refused() -> None:
    with pytest.raises(TypeError):
        crc32c("text")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def probe(compile_c: Callable[[str], Path]) -> ctypes.CDLL:
    library = ctypes.CDLL(str(compile_c("crc32c_probe.c")))
    for name in ("record_crc", "plain_crc"):
        getattr(library, name).restype = ctypes.c_uint32
    return library


@pytest.mark.parametrize("hardware", [0, 1], ids=["portable", "fastest"])
def test_checksum_of_a_record_is_that_of_its_bytes_in_one_piece(probe: ctypes.CDLL, hardware: int) -> None:
    """It is computed from a header here and a payload there, which need not be aligned."""
    chance = random.Random(4)
    buffer = ctypes.create_string_buffer(LONGEST + 16)
    for size in (*range(200), 255, 256, 257, 767, 768, 769, 1024, 2199):
        for start in (0, 1, 4, 7):
            header, payload, state = chance.randbytes(48), chance.randbytes(size), chance.getrandbits(32)
            buffer[start : start + size] = payload
            whole = header[4:] + payload + bytes(-size % 8)
            where = ctypes.c_void_p(ctypes.addressof(buffer) + start)
            answer = probe.record_crc(hardware, ctypes.c_uint32(state), header, where, ctypes.c_size_t(size))
            assert answer == crc32c(whole, state, portable=True), (size, start)
            assert probe.plain_crc(hardware, ctypes.c_uint32(state), where, ctypes.c_size_t(size)) == crc32c(
                payload, state, portable=True
            )
