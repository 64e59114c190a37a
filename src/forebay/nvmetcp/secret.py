"""Secrets of in-band authentication: how people and files write them, and what is made of them before use.

Neither `repr` nor an error shows a key. Sources: NVMe Base 2.0 §8.13.5.8 (representation, transformation).
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from forebay.errors import InvalidArgument
from forebay.nvmetcp.spec import DhchapHash, DhGroup

__all__ = ["HASH_NAMES", "HostSecrets", "Secret", "digest_bytes"]

HASH_NAMES: Final = {DhchapHash.SHA256: "sha256", DhchapHash.SHA384: "sha384", DhchapHash.SHA512: "sha512"}
_DIGEST_BYTES: Final = {DhchapHash.SHA256: 32, DhchapHash.SHA384: 48, DhchapHash.SHA512: 64}
_KEY_BYTES: Final = frozenset(_DIGEST_BYTES.values())
_PREFIX: Final = "DHHC-1:"
_PURPOSE: Final = b"NVMe-over-Fabrics"


def digest_bytes(hash_id: DhchapHash) -> int:
    """Length of the hash's output."""
    return _DIGEST_BYTES[hash_id]


@dataclass(frozen=True, slots=True)
class Secret:
    """A key of 32, 48 or 64 bytes, and the hash by which it is bound to the NQN that uses it (None: it is not)."""

    key: bytes = field(repr=False)
    transform: DhchapHash | None = DhchapHash.SHA256

    @classmethod
    def generate(cls, random: Callable[[int], bytes] = os.urandom) -> Secret:
        """A new one of 256 bits."""
        return cls(random(32))

    @classmethod
    def parse(cls, text: str) -> Secret:
        """Read ``DHHC-1:hh:base64 of key and its CRC-32:``. Raises `InvalidArgument`, without the text."""
        wrong = InvalidArgument("no secret of the form DHHC-1:hh:base64:", field="secret")
        kind, colon, rest = text.strip().removeprefix(_PREFIX).partition(":")
        if not text.strip().startswith(_PREFIX) or not colon or not rest.endswith(":"):
            raise wrong
        try:
            number, raw = int(kind, 16), base64.b64decode(rest[:-1], validate=True)
            transform = DhchapHash(number) if number else None
        except (ValueError, binascii.Error):
            raise wrong from None
        key, check = raw[:-4], raw[-4:]
        if len(kind) != 2 or len(key) not in _KEY_BYTES or zlib.crc32(key).to_bytes(4, "little") != check:
            raise wrong
        return cls(key, transform)

    def text(self) -> str:
        """As `parse` reads it."""
        raw = self.key + zlib.crc32(self.key).to_bytes(4, "little")
        return f"{_PREFIX}{self.transform or 0:02x}:{base64.b64encode(raw).decode()}:"

    def bound_to(self, nqn: str) -> bytes:
        """The key as the host or controller of that NQN uses it."""
        if self.transform is None:
            return self.key
        return hmac.digest(self.key, nqn.encode() + _PURPOSE, HASH_NAMES[self.transform])


@dataclass(frozen=True, slots=True)
class HostSecrets:
    """The secret by which a host proves who it is; with ``controller`` the target has to prove itself too."""

    host: Secret
    controller: Secret | None = None
    groups: tuple[DhGroup, ...] = tuple(DhGroup)
    """Diffie-Hellman groups that the host offers to agree on."""
