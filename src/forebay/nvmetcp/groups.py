"""Finite-field Diffie-Hellman in the groups of RFC 7919, for DH-HMAC-CHAP.

Python's own integers do it. The primes are computed from their definition rather than listed (RFC 7919 §A). An exponent
has twice the group's strength (RFC 7919 §5.2), is used for one exchange and forgotten: what the time of an
exponentiation, which is not constant, tells of it is of no use afterwards. Why no library: ADR 13.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

from forebay.nvmetcp.spec import DhGroup

__all__ = ["Exchange", "public_bytes"]


class _Shape(NamedTuple):
    """Bits of the prime, the number that makes it one, bits of an exponent. RFC 7919 §A.1 to §A.5."""

    bits: int
    addend: int
    exponent_bits: int


_SHAPES: Final = {
    DhGroup.FFDHE2048: _Shape(2048, 560_316, 225),
    DhGroup.FFDHE3072: _Shape(3072, 2_625_351, 275),
    DhGroup.FFDHE4096: _Shape(4096, 5_736_041, 325),
    DhGroup.FFDHE6144: _Shape(6144, 15_705_020, 375),
    DhGroup.FFDHE8192: _Shape(8192, 10_965_728, 400),
}
_GENERATOR: Final = 2
_GUARD_BITS: Final = 64


@cache
def _prime(group: DhGroup) -> int:
    """``2^b - 2^(b-64) + (floor(2^(b-130) e) + X) 2^64 - 1``. RFC 7919 §A."""
    bits, addend, _ = _SHAPES[group]
    term = e = 1 << (bits - 130 + _GUARD_BITS)
    divisor = 1
    while term:
        term //= divisor
        e += term
        divisor += 1
    return (1 << bits) - (1 << (bits - 64)) + (((e >> _GUARD_BITS) + addend) << 64) - 1


def public_bytes(group: DhGroup) -> int:
    """Length of a public value, padded; 0 in the null group."""
    return _SHAPES[group].bits // 8 if group is not DhGroup.NULL else 0


class Exchange:
    """One end of one exchange: send ``public``, then `shared` with what the peer sent."""

    def __init__(self, group: DhGroup, random: Callable[[int], bytes] = os.urandom) -> None:
        self._group = group
        bits = _SHAPES[group].exponent_bits
        # The top bit is set, so that no exponent is short.
        self._exponent = int.from_bytes(random((bits + 7) // 8), "big") % (1 << (bits - 1)) | 1 << (bits - 1)
        self.public = pow(_GENERATOR, self._exponent, _prime(group)).to_bytes(public_bytes(group), "big")

    def shared(self, peer: bytes) -> bytes | None:
        """The secret, as long as the prime; None if the peer's value is none of the group's (RFC 7919 §5.1)."""
        prime, value = _prime(self._group), int.from_bytes(peer, "big")
        if len(peer) != public_bytes(self._group) or not 2 <= value <= prime - 2:
            return None
        return pow(value, self._exponent, prime).to_bytes(public_bytes(self._group), "big")
