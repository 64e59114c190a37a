"""CRC-32C of bytes in a GPU's memory, computed there: torch operations that give what `forebay.checksum` gives.

A CRC is linear over GF(2): with a start value of zero, that of ``a ‖ b`` is that of ``a``, carried over as many zeros
as ``b`` has bytes, XOR that of ``b``; and zeros in front change nothing. So a range is folded in half until one word is
left, all ranges and all words of a level at once. Carrying a word over zeros is a linear map of 32 bits, looked up
byte by byte in four tables. (Mark Adler's ``crc32_combine`` in zlib has the algebra.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

__all__ = ["device_crc32c"]

_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected
_PART_BYTES = 64 << 20
"""Ranges are worked through in parts of about this size: the first level takes ten times that in temporary memory."""


def device_crc32c(views: Sequence[Any], seeds: Sequence[int]) -> list[int]:
    """CRC-32C of each view, started from its seed, as `forebay.checksum.crc32c`.

    ``views`` are one-dimensional contiguous uint8 tensors on one device, of any lengths. Returns after the device has
    computed them; what was queued on the current stream before is seen.
    """
    sums = [0] * len(views)
    by_length: dict[int, list[int]] = {}
    for row, view in enumerate(views):
        by_length.setdefault(len(view), []).append(row)
    folded: list[tuple[list[int], Any]] = []
    for length_bytes, rows in by_length.items():
        if not length_bytes:
            continue
        step = max(1, _PART_BYTES // length_bytes)
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            folded.append((part, _fold([views[row] for row in part], length_bytes)))
    for part, words in folded:  # the device works on later parts while the first ones come
        for row, word in zip(part, words.tolist(), strict=True):
            sums[row] = word & 0xFFFFFFFF
    for row, (view, seed) in enumerate(zip(views, seeds, strict=True)):
        started = _carried(seed ^ 0xFFFFFFFF, len(view))
        sums[row] ^= started ^ 0xFFFFFFFF
    return sums


def _fold(views: Sequence[Any], length_bytes: int) -> Any:
    """The CRCs of views of one length, from a start value of zero and without the final complement: int32."""
    import torch

    device = views[0].device
    words_each = 1 << max(0, (length_bytes + 3) // 4 - 1).bit_length()
    if len(views) == 1 and words_each * 4 == length_bytes:
        padded = views[0].view(1, length_bytes)
    else:
        padded = torch.zeros((len(views), words_each * 4), dtype=torch.uint8, device=device)
        for row, view in enumerate(views):
            padded[row, words_each * 4 - length_bytes :] = view
    if padded.data_ptr() % 4:
        padded = padded.clone()
    words = padded.view(torch.int32)
    span_bytes = 4
    while words.shape[1] > 1:
        words = _carry(words[:, 0::2], span_bytes, device) ^ words[:, 1::2]
        span_bytes *= 2
    return _carry(words, 4, device)[:, 0]


def _carry(words: Any, zeros: int, device: Any) -> Any:
    """Each word carried over ``zeros`` bytes of zeros."""
    tables = _tables(zeros, device)
    carried = tables[0][words & 0xFF]
    for place in (1, 2, 3):
        carried ^= tables[place][(words >> 8 * place) & 0xFF]
    return carried


@lru_cache(maxsize=256)
def _tables(zeros: int, device: Any) -> Any:
    """What each value of each of a word's four bytes becomes: int32 [4, 256]."""
    import torch

    columns = _operator(zeros)
    rows = []
    for place in range(4):
        row = [0]
        for bit in range(8):  # the upper half of what is there so far is the lower half with one more bit
            row += [value ^ columns[8 * place + bit] for value in row]
        rows.append(row)
    table = torch.tensor(rows, dtype=torch.int64).to(torch.int32)
    return table.to(device)


@lru_cache(maxsize=256)
def _operator(zeros: int) -> tuple[int, ...]:
    """The linear map of ``zeros`` bytes of zeros: what each of the 32 bits becomes."""
    if zeros == 1:
        return tuple(_shifted(1 << bit) for bit in range(32))
    half = _operator(zeros // 2)
    whole = tuple(_apply(half, column) for column in half)
    return tuple(_apply(_operator(1), column) for column in whole) if zeros % 2 else whole


def _shifted(word: int) -> int:
    for _ in range(8):
        word = word >> 1 ^ (_POLYNOMIAL if word & 1 else 0)
    return word


def _apply(columns: Sequence[int], word: int) -> int:
    result = 0
    for bit, column in enumerate(columns):
        if word >> bit & 1:
            result ^= column
    return result


def _carried(word: int, zeros: int) -> int:
    return _apply(_operator(zeros), word) if zeros else word
