"""Runs where torch is: CRC-32C by torch operations against the CPU's, and tensors as destinations. Prints how many."""

import random

import torch

from forebay.checksum import crc32c
from forebay.client.buffers import destination
from forebay.client.device_checksum import device_crc32c
from forebay.errors import InvalidArgument

SEED = 20


def random_bytes(rng: random.Random, length_bytes: int, *, skip_bytes: int = 0) -> torch.Tensor:
    """A tensor that does not begin on a word where ``skip_bytes`` says so."""
    return torch.frombuffer(bytearray(rng.randbytes(length_bytes + skip_bytes + 1)), dtype=torch.uint8)[
        skip_bytes : skip_bytes + length_bytes
    ]


def checksums() -> int:
    """Every short length, powers of two and their neighbours, odd places in memory, one view and many."""
    rng = random.Random(SEED)
    lengths = [*range(70), *(2**k + d for k in range(7, 21) for d in (-1, 0, 1)), *rng.choices(range(1, 200_000), k=20)]
    views = [random_bytes(rng, length, skip_bytes=rng.randrange(4)) for length in lengths for _ in range(2)]
    views += [torch.zeros(4096, dtype=torch.uint8), torch.full((4096,), 255, dtype=torch.uint8)]
    rng.shuffle(views)
    seeds = [rng.choice((0, 0xFFFFFFFF, rng.getrandbits(32))) for _ in views]
    expected = [crc32c(view.numpy().tobytes(), seed) for view, seed in zip(views, seeds, strict=True)]
    assert device_crc32c(views, seeds) == expected, f"seed {SEED}"
    for view, seed, value in list(zip(views, seeds, expected, strict=True))[:40]:
        assert device_crc32c([view], [seed]) == [value], f"seed {SEED}"
    assert device_crc32c([], []) == []
    return len(views)


def one_bit() -> int:
    """Any bit that changes is seen."""
    rng = random.Random(SEED)
    view = random_bytes(rng, 4096)
    (before,) = device_crc32c([view], [7])
    for bit in rng.sample(range(8 * 4096), 64):
        view[bit // 8] ^= 1 << bit % 8
        assert device_crc32c([view], [7]) != [before]
        view[bit // 8] ^= 1 << bit % 8
    return 64


def tensors() -> int:
    """A host tensor is a buffer like others, whatever its type; one of another device is refused by name."""
    tensor = torch.zeros((2, 3), dtype=torch.bfloat16)
    view = destination(tensor, "b")
    assert isinstance(view, memoryview)
    view[:] = b"\x80\x3f" * 6
    assert tensor.tolist() == [[1.0] * 3] * 2
    try:
        destination(torch.empty(4, device="meta"), "b")
    except InvalidArgument as e:
        assert "meta" in e.message
    else:
        raise AssertionError("a tensor without memory was taken")
    return 2


if __name__ == "__main__":
    print(checksums() + one_bit() + tensors())
