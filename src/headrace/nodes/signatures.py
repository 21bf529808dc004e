"""Ed25519 signatures of zeroctl messages: `_sec-sig` signs the body. Keys and signatures travel as base64 of a type, a
length and the bytes; type 1 is raw Ed25519. It knows nothing of where a key comes from."""

import base64
import binascii
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

ED25519: Final = 1
PUBLIC_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64


class BadPacking(ValueError):
    """Text that is not base64 of a type, a length and as many bytes, or of another type."""


def pack(raw: bytes) -> str:
    return base64.b64encode(bytes([ED25519, len(raw)]) + raw).decode()


def unpack(text: object, size: int) -> bytes:
    """The bytes of a key or signature of type 1."""
    if not isinstance(text, str):
        raise BadPacking("it is not a text")
    try:
        packed = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadPacking("it is not base64") from None
    if len(packed) < 2 or packed[0] != ED25519:
        raise BadPacking("it is not of type 1, Ed25519")
    if packed[1] != size or len(packed) != 2 + size:
        raise BadPacking(f"it does not hold {size} bytes")
    return packed[2:]


def public_key(text: object) -> Ed25519PublicKey:
    """The key that a `node-pubkey` says."""
    return Ed25519PublicKey.from_public_bytes(unpack(text, PUBLIC_BYTES))


class Signer:
    """Signs bodies."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def of_seed(cls, seed: bytes) -> "Signer":
        """From the 32 bytes that a private key is made of."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @property
    def pubkey(self) -> str:
        """What a heartbeat says as `node-pubkey`."""
        return pack(self._key.public_key().public_bytes_raw())

    def sign(self, body: bytes) -> str:
        """The `_sec-sig` of a body."""
        return pack(self._key.sign(body))


def verify(key: Ed25519PublicKey, signature: object, body: bytes) -> bool:
    """Whether this is the key's signature of the body."""
    try:
        key.verify(unpack(signature, SIGNATURE_BYTES), body)
    except (BadPacking, InvalidSignature):
        return False
    return True
