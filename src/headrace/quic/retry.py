"""The tokens by which a client shows that its address is its own: sealed by a key that lives as long as the process, so
that nothing is kept for who has not come back with one. It knows no engine."""

import ipaddress
import os
import struct
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from headrace.quic.engine import NetworkAddress

NONCE_BYTES: Final = 12
# A client comes back at once (RFC 9000 §8.1.4).
LIFETIME_SECONDS: Final = 30.0


class RetryTokens:
    def __init__(self) -> None:
        self._key = AESGCM(AESGCM.generate_key(bit_length=128))

    def make(self, addr: NetworkAddress, first: bytes, retry: bytes, now: float) -> bytes:
        """A token for who sent to the connection id `first` and is told to send to `retry`."""
        nonce = os.urandom(NONCE_BYTES)
        content = struct.pack(">dB", now, len(first)) + first + retry
        return nonce + self._key.encrypt(nonce, content, _place(addr))

    def open(self, token: bytes, addr: NetworkAddress, destination: bytes, now: float) -> bytes:
        """The connection id that the client first sent to; ValueError if the token is not good."""
        try:
            content = self._key.decrypt(token[:NONCE_BYTES], token[NONCE_BYTES:], _place(addr))
        except (InvalidTag, ValueError) as error:
            raise ValueError("the token is not ours, or not for this address") from error
        made, size = struct.unpack_from(">dB", content)
        first, retry = content[9 : 9 + size], content[9 + size :]
        if retry != destination:
            raise ValueError("the token is of another connection")
        if not 0 <= now - made <= LIFETIME_SECONDS:
            raise ValueError("the token is too old")
        return first


def _place(addr: NetworkAddress) -> bytes:
    return ipaddress.ip_address(addr[0].partition("%")[0]).packed + struct.pack(">H", addr[1])
