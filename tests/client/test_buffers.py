"""Buffers of every kind, as bytes, without a copy."""

import array
import mmap
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.client.buffers import readable, writable
from forebay.errors import InvalidArgument


def test_every_kind_is_the_same_memory() -> None:
    owned = bytearray(8)
    area = mmap.mmap(-1, 8)
    kinds: list[Any] = [
        owned,
        memoryview(bytearray(8)),
        memoryview(bytearray(16))[4:12],
        area,
        array.array("d", [0.0]),
        np.zeros(8, np.uint8),
        np.zeros((2, 2), np.float16),
        np.zeros((2, 4), np.uint8)[:, :],
        np.zeros(4, np.dtype("V2")),  # what bfloat16 is to the buffer protocol: no format at all
        np.zeros((), np.float64),
    ]
    for kind in kinds:
        view = writable(kind, "b")
        assert (view.nbytes, view.format, view.ndim) == (8, "B", 1)
        view[:] = b"12345678"
        copy = kind.tobytes() if hasattr(kind, "tobytes") else bytes(kind[:])
        assert copy == b"12345678", type(kind)
        view.release()
    area.close()


def test_nothing_is_a_buffer_too() -> None:
    assert writable(bytearray(), "b").nbytes == 0
    assert writable(np.zeros((0, 3)), "b").nbytes == 0
    assert readable(b"", "b").nbytes == 0


@pytest.mark.parametrize(
    "bad",
    [
        b"read-only",
        memoryview(b"read-only"),
        memoryview(bytearray(8))[::2],
        np.zeros((4, 4))[:, 1],
        np.asfortranarray(np.zeros((4, 4))),
        np.array([object()]),
        np.frombuffer(b"read-only!", np.uint8),
        "text",
        7,
        None,
        [1, 2],
    ],
)
def test_what_cannot_be_written_names_the_argument(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"buffers\[3\]") as caught:
        writable(bad, "buffers[3]")
    assert caught.value.field == "buffers[3]"


def test_read_only_values_can_be_read() -> None:
    assert bytes(readable(b"abc", "v")) == b"abc"
    assert bytes(readable(np.frombuffer(b"abcd", np.uint16), "v")) == b"abcd"


class _Tensor:
    """As much of torch.Tensor as is asked for."""

    def __init__(self, data: Any, *, device: str = "cpu", contiguous: bool = True) -> None:
        self.data = data
        self.device = SimpleNamespace(type=device)
        self.layout = "strided"
        self.contiguous = contiguous

    def is_contiguous(self) -> bool:
        return self.contiguous

    def detach(self) -> "_Tensor":
        return self

    def reshape(self, shape: int) -> "_Tensor":
        return _Tensor(self.data.reshape(shape))

    def view(self, dtype: Any) -> "_Tensor":
        return _Tensor(self.data.view(dtype))

    def numpy(self) -> Any:
        return self.data


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch, as it looks from here; the real one is too large to install for this."""
    module = SimpleNamespace(Tensor=_Tensor, uint8=np.uint8, strided="strided")
    monkeypatch.setitem(sys.modules, "torch", module)


@pytest.mark.usefixtures("torch")
def test_tensors_on_the_host() -> None:
    data = np.zeros((2, 4), np.float16)
    view = writable(_Tensor(data), "b")
    view[:] = bytes(range(16))
    assert data.tobytes() == bytes(range(16))


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("bad", [_Tensor(np.zeros(4), device="cuda"), _Tensor(np.zeros(4), contiguous=False)])
def test_tensors_that_cannot_be_filled(bad: _Tensor) -> None:
    with pytest.raises(InvalidArgument, match="b "):
        writable(bad, "b")
