"""CRC-32C: the portable and the hardware implementation against known answers and the plain-Python twin."""

import random

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
