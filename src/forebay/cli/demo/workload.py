"""What the demo stores: blocks of a named model, scaled to fit, whose every byte follows from the block's id."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.cli.demo.trace import BLOCK_TOKENS
from forebay.errors import InvalidArgument
from forebay.schema import Group, HashAlgorithm, Schema

__all__ = ["MODEL", "Contents", "Model", "Scale", "block_key", "block_schema"]

_KEY_PREFIX = b"demo"
_Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a model's KV cache."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    dtype_bytes: int

    @property
    def bytes_per_head(self) -> int:
        """K and V of one token, one layer and one head."""
        return 2 * self.head_dim * self.dtype_bytes

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.kv_heads * self.bytes_per_head


MODEL = Model("Llama-3.1-8B", layers=32, kv_heads=8, head_dim=128, dtype="bf16", dtype_bytes=2)
"""128 KiB a token (config.json of meta-llama/Llama-3.1-8B)."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a block is here: ``bytes_per_head`` of the model's own `Model.bytes_per_head`, all else unchanged."""

    model: Model
    bytes_per_head: int

    @classmethod
    def of(cls, model: Model, block_bytes: int) -> Scale:
        """The largest scale whose blocks take at most ``block_bytes``. Raises `InvalidArgument`."""
        unit = BLOCK_TOKENS * model.layers * model.kv_heads
        full = unit * model.bytes_per_head
        if not unit <= block_bytes < full:
            raise InvalidArgument(
                f"blocks of {block_bytes} bytes, where {BLOCK_TOKENS} tokens of {model.name} have {full} and one byte "
                f"a token, layer and head makes {unit}",
                field="block-size",
                limit=f"{unit} to {full - unit}",
            )
        return cls(model, block_bytes // unit)

    @property
    def block_bytes(self) -> int:
        return self.bytes_per_token * BLOCK_TOKENS

    @property
    def bytes_per_token(self) -> int:
        return self.model.layers * self.model.kv_heads * self.bytes_per_head

    @property
    def factor(self) -> float:
        """How many times smaller than the model's own blocks."""
        return self.model.bytes_per_head / self.bytes_per_head


def block_schema(scale: Scale) -> Schema:
    """The schema that an engine with this model would declare: 8 tiles a block, 2 head groups of 4 layer groups."""
    model = scale.model
    group = Group(
        kind="full",
        layers=tuple(range(model.layers)),
        block_tokens=BLOCK_TOKENS,
        kv_heads=model.kv_heads,
        bytes_per_head=scale.bytes_per_head,
        dtype=model.dtype,
        format="demo/layer-token-head",
        layer_groups=4,
        head_groups=2,
    )
    digest = blake2b(f"{model.name} scaled {scale.bytes_per_head}".encode(), digest_size=32).digest()
    return Schema("forebay-demo", digest, HashAlgorithm("blake2b-256", BLOCK_TOKENS), (group,))


def block_key(block: int) -> bytes:
    """The key of a block id of the trace: 36 bytes, variant and chained hash as engines make them."""
    return _KEY_PREFIX + blake2b(block.to_bytes(16, "little", signed=True), digest_size=32).digest()


class Contents:
    """The bytes of every block: a pattern of random 64-bit words, to which each block adds a number of its own.

    At one place no two blocks have an equal word, and the words of the pattern differ from place to place, so bytes
    of another block, tile or offset never pass for the right ones. Making and comparing both run at memory speed.
    """

    def __init__(self, block_bytes: int, seed: int) -> None:
        self.block_bytes = block_bytes
        rng = np.random.Generator(np.random.PCG64(seed))
        self._pattern: _Words = rng.integers(0, 1 << 64, block_bytes // 8, dtype=np.uint64)
        self._work: _Words = np.empty_like(self._pattern)

    @staticmethod
    def _number(block: int) -> np.uint64:
        return np.uint64(int.from_bytes(blake2b(block_key(block), digest_size=8).digest(), "little"))

    def fill(self, block: int, buffer: Any) -> None:
        """Write the block's bytes into a buffer of ``block_bytes``."""
        np.add(self._pattern, self._number(block), out=np.frombuffer(buffer, np.uint64))

    def matches(self, block: int, buffer: Any) -> bool:
        """Whether a buffer of ``block_bytes`` holds exactly the block's bytes."""
        np.add(self._pattern, self._number(block), out=self._work)
        return np.array_equal(np.frombuffer(buffer, np.uint64), self._work)
