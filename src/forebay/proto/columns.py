"""Columns of the control protocol: packed little-endian arrays to and from Python values.

Peers send these bytes, so every reader checks lengths and raises `InvalidArgument` naming the column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.errors import InvalidArgument, KeySize
from forebay.ids import MAX_BATCH_KEYS, MAX_KEY_BYTES, BlockKey, WriteId
from forebay.proto import forebay_pb2 as pb

__all__ = ["key_bytes", "key_bytes_to_proto", "keys_from_proto", "keys_to_proto", "pack", "rows16", "unpack"]

_DTYPES: dict[str, np.dtype[Any]] = {
    "u8": np.dtype("u1"),
    "u16": np.dtype("<u2"),
    "u32": np.dtype("<u4"),
    "u64": np.dtype("<u8"),
}


def pack(kind: str, values: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """``values`` as packed ``u8 | u16 | u32 | u64``."""
    return np.asarray(values, dtype=_DTYPES[kind]).tobytes()


def unpack(kind: str, data: bytes, field: str, count: int | None = None) -> list[int]:
    """The integers of a column; with ``count``, its rows must be as many. Raises `InvalidArgument`."""
    dtype = _DTYPES[kind]
    if len(data) % dtype.itemsize or (count is not None and len(data) != count * dtype.itemsize):
        want = f"{count} cells of {dtype.itemsize} bytes" if count is not None else f"cells of {dtype.itemsize} bytes"
        raise InvalidArgument(f"column {field} has {len(data)} bytes, not {want}", field=field)
    cells: list[int] = np.frombuffer(data, dtype).tolist()
    return cells


def rows16(data: bytes, field: str) -> list[WriteId]:
    """A column of 16-byte cells (write ids)."""
    if len(data) % 16:
        raise InvalidArgument(f"column {field} has {len(data)} bytes, not cells of 16 bytes", field=field)
    return [WriteId(data[i : i + 16]) for i in range(0, len(data), 16)]


def keys_to_proto(keys: Sequence[BlockKey]) -> pb.Keys:
    """A key column; columns that hold only defaults stay empty."""
    if not keys:
        return pb.Keys()
    raw, groups, scopes = zip(*keys, strict=True)
    message = key_bytes_to_proto(raw)
    if any(groups):
        message.groups = pack("u16", groups)
    if any(scopes):
        message.scopes = pack("u32", scopes)
    return message


def key_bytes_to_proto(keys: Sequence[bytes]) -> pb.Keys:
    """`keys_to_proto` of keys in group 0 of the default scope."""
    lengths = list(map(len, keys))
    if lengths and lengths[0] and lengths.count(lengths[0]) == len(lengths):
        return pb.Keys(data=b"".join(keys), stride=lengths[0])
    return pb.Keys(data=b"".join(keys), lengths=pack("u16", lengths))


def keys_from_proto(message: pb.Keys, field: str = "keys", *, allow_empty_key: bool = False) -> list[BlockKey]:
    """The keys of a column. Raises `InvalidArgument` or `KeySize`, naming the column and the row."""
    raw = key_bytes(message, field, allow_empty_key=allow_empty_key)
    if not message.groups and not message.scopes:
        return [BlockKey(k) for k in raw]
    count = len(raw)
    groups = unpack("u16", message.groups, f"{field}.groups", count) if message.groups else [0] * count
    scopes = unpack("u32", message.scopes, f"{field}.scopes", count) if message.scopes else [0] * count
    return [BlockKey(k, g, s) for k, g, s in zip(raw, groups, scopes, strict=True)]


def key_bytes(message: pb.Keys, field: str = "keys", *, allow_empty_key: bool = False) -> list[bytes]:
    """`keys_from_proto` without groups and scopes: where those columns are empty, all that there is to know."""
    data, stride = message.data, message.stride
    if stride:
        if stride > MAX_KEY_BYTES:
            raise KeySize(f"{field}.stride is {stride}", field=f"{field}.stride", limit=f"1 to {MAX_KEY_BYTES}")
        if message.lengths or len(data) % stride:
            raise InvalidArgument(
                f"{field}.data has {len(data)} bytes, not whole keys of {stride}", field=f"{field}.data"
            )
        raw = [data[i : i + stride] for i in range(0, len(data), stride)]
    else:
        raw, at = [], 0
        for i, length in enumerate(unpack("u16", message.lengths, f"{field}.lengths")):
            if length > MAX_KEY_BYTES or not (length or allow_empty_key):
                raise KeySize(f"{field}[{i}] has {length} bytes", field=f"{field}[{i}]", limit=f"1 to {MAX_KEY_BYTES}")
            raw.append(data[at : at + length])
            at += length
        if at != len(data):
            raise InvalidArgument(f"{field}.data has {len(data)} bytes where lengths say {at}", field=f"{field}.data")
    if not 1 <= len(raw) <= MAX_BATCH_KEYS:
        raise InvalidArgument(f"{field} has {len(raw)} keys", field=field, limit=f"1 to {MAX_BATCH_KEYS}")
    return raw
