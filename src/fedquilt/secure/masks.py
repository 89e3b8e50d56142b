"""Keys that two clients agree on (X25519, HKDF), masks drawn from keys (ChaCha20), and sealed letters between clients.

All of it is `cryptography`'s; here is only how it is put together. Keys live for one round and one circle.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedquilt.secure.fixed_point import Whole

PUBLIC, SEED, BINDING = 32, 16, 32  # bytes
_NONCE = bytes(16)  # a key draws one stream or seals one letter each way, so that no nonce comes twice
_FRESH = secrets.token_bytes


def fresh_seed() -> bytes:
    """16 bytes that nobody can guess."""
    return _FRESH(SEED)


def derive(secret: bytes, purpose: bytes) -> bytes:
    """A key of 32 bytes for one purpose."""
    return HKDF(hashes.SHA256(), 32, None, b"fedquilt secure sums: " + purpose).derive(secret)


class KeyPair:
    """A key of a client's own, made of a seed: whoever puts the seed together has the key."""

    def __init__(self, seed: bytes) -> None:
        self._private = X25519PrivateKey.from_private_bytes(derive(seed, b"private key"))
        self.public = self._private.public_key().public_bytes_raw()

    def agreed(self, public: bytes, purpose: bytes) -> bytes:
        """The key that the owner of another public key comes to as well."""
        return derive(self._private.exchange(X25519PublicKey.from_public_bytes(public)), purpose)


def usable(public: bytes) -> bool:
    """Whether keys can be agreed on with a public key: with some, nobody comes to a secret.

    >>> usable(bytes(PUBLIC)), usable(KeyPair(b"seed").public)
    (False, True)
    """
    try:
        KeyPair(b"").agreed(public, b"trial")
    except ValueError:
        return False
    return True


def stream(key: bytes, count: int, dtype: np.dtype[Any]) -> Whole:
    """(count,) whole numbers drawn by a key, each as likely as any other."""
    drawn = Cipher(algorithms.ChaCha20(key, _NONCE), mode=None).encryptor().update(bytes(count * dtype.itemsize))
    return np.frombuffer(drawn, dtype)


def words(key: bytes) -> Callable[[int], NDArray[np.uint64]]:
    """A source of words of 64 bits drawn by a key, which goes on where it was."""
    encryptor = Cipher(algorithms.ChaCha20(key, _NONCE), mode=None).encryptor()
    return lambda count: np.frombuffer(encryptor.update(bytes(8 * count)), "<u8")


def seal(key: bytes, content: bytes) -> bytes:
    """Content that only who has the key can read, and nobody change."""
    return ChaCha20Poly1305(key).encrypt(_NONCE[:12], content, None)


def unseal(key: bytes, sealed: bytes) -> bytes:
    """What was sealed with this key; ValueError where it was not."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE[:12], sealed, None)
    except InvalidTag:
        raise ValueError("a sealed share was not sealed with the key that was agreed on") from None
