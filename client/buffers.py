"""Any buffer of a caller as contiguous bytes, without a copy: memoryview, mmap, bytearray, numpy, torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from forebay.client.device import DeviceView, View
from forebay.errors import InvalidArgument

__all__ = ["destination", "readable", "writable"]


def destination(buffer: Any, field: str) -> View:
    """`writable`, and a CUDA tensor as bytes of its device."""
    torch = sys.modules.get("torch")  # nobody holds a tensor without having imported it
    if torch is not None and isinstance(buffer, torch.Tensor) and buffer.device.type == "cuda":
        return DeviceView(_flat(torch, buffer, field))
    return writable(buffer, field)


def writable(buffer: Any, field: str) -> memoryview:
    """``buffer`` as writable bytes. Raises `InvalidArgument` naming ``field`` if it is not contiguous or read-only."""
    view = _bytes(buffer, field)
    if view.readonly:
        raise InvalidArgument(f"{field} is read-only", field=field)
    return view


def readable(value: Any, field: str) -> memoryview:
    """``value`` as bytes to read. Raises `InvalidArgument` naming ``field``."""
    return _bytes(value, field)


def _bytes(buffer: Any, field: str) -> memoryview:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        if buffer.device.type != "cpu":
            raise InvalidArgument(f"{field} is on {buffer.device}: only host memory can be used here", field=field)
        buffer = _flat(torch, buffer, field).numpy()
    elif isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise InvalidArgument(f"{field} is an array that is not C-contiguous", field=field)
        if buffer.dtype.hasobject:
            raise InvalidArgument(f"{field} is an array of Python objects", field=field)
        buffer = buffer.reshape(-1).view(np.uint8)  # bfloat16 and its like have no buffer format of their own
    try:
        view = memoryview(buffer)
    except TypeError:
        raise InvalidArgument(f"{field} is a {type(buffer).__name__}, which is no buffer", field=field) from None
    if not view.c_contiguous:
        raise InvalidArgument(f"{field} is not contiguous", field=field)
    if view.format == "B" and view.ndim == 1:
        return view
    if not view.nbytes:
        return memoryview(b"" if view.readonly else bytearray())
    return view.cast("B")


def _flat(torch: Any, tensor: Any, field: str) -> Any:
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise InvalidArgument(f"{field} is a tensor that is not contiguous", field=field)
    return tensor.detach().reshape(-1).view(torch.uint8)
