"""A small transformer decoder in torch, whose KV cache can leave memory and come back.

Llama's architecture in small: RMSNorm, rotary positions, grouped-query attention, gated MLP, seeded random weights.
Tokens are always computed in the same pieces (whole blocks in the prompt, then the rest, then one at a time), so that
two runs that have equal KV do equal arithmetic to the last bit, whichever of them computed the KV and which read it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from forebay.schema import Group, HashAlgorithm, Schema

__all__ = ["BLOCK_TOKENS", "DTYPES", "Cache", "Decoder", "block_keys"]

VOCABULARY = 97
WIDTH = 128
LAYERS = 4
HEADS = 8
KV_HEADS = 4
HEAD_WIDTH = 16
HIDDEN = 256
BLOCK_TOKENS = 16
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

LAYER_GROUPS = 2
HEAD_GROUPS = KV_HEADS  # so that one, two or four ranks tile the grid


def block_keys(tokens: list[int]) -> list[bytes]:
    """Chained hashes of the whole blocks of a prompt."""
    keys, parent = [], b""
    for at in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        text = ",".join(map(str, tokens[at : at + BLOCK_TOKENS]))
        parent = hashlib.sha256(parent + text.encode()).digest()
        keys.append(parent)
    return keys


@dataclass
class Cache:
    """Keys and values of the tokens so far: ``[layer][KV head][K or V][token][dimension]``."""

    kv: torch.Tensor = field(repr=False)
    tokens: int = 0

    def block(self, number: int, layout: tuple[int, ...]) -> torch.Tensor:
        """The bytes of one block as the grid's tiles, ``[head group][layer group]`` and inside as in the cache."""
        part = self.kv[:, :, :, number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
        return part.reshape(layout).permute(2, 0, 1, 3, 4, 5, 6).contiguous()

    def set_block(self, number: int, tiles: torch.Tensor) -> None:
        """Take over a block from its tiles."""
        part = self.kv[:, :, :, number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
        part.copy_(tiles.permute(1, 2, 0, 3, 4, 5, 6).reshape(part.shape))
        self.tokens = max(self.tokens, (number + 1) * BLOCK_TOKENS)


class Decoder:
    """The model. Its weights follow from the seed alone."""

    def __init__(self, dtype: str, *, seed: int = 7) -> None:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        self.name = dtype
        self.dtype = DTYPES[dtype]
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(self.dtype)

        self.embedding = weight(VOCABULARY, WIDTH)
        self.head = weight(VOCABULARY, WIDTH)
        self.layers = [
            {
                "q": weight(HEADS * HEAD_WIDTH, WIDTH),
                "k": weight(KV_HEADS * HEAD_WIDTH, WIDTH),
                "v": weight(KV_HEADS * HEAD_WIDTH, WIDTH),
                "out": weight(WIDTH, HEADS * HEAD_WIDTH),
                "gate": weight(HIDDEN, WIDTH),
                "up": weight(HIDDEN, WIDTH),
                "down": weight(WIDTH, HIDDEN),
            }
            for _ in range(LAYERS)
        ]
        self.digest = hashlib.sha256(
            b"".join(
                _bytes(w) for w in [self.embedding, self.head, *[w for layer in self.layers for w in layer.values()]]
            )
        ).digest()

    @property
    def schema(self) -> Schema:
        """What makes this model's blocks what they are."""
        group = Group(
            "full",
            tuple(range(LAYERS)),
            BLOCK_TOKENS,
            KV_HEADS,
            2 * HEAD_WIDTH * self.embedding.element_size(),
            self.name,
            "layer head kv token dimension",
            layer_groups=LAYER_GROUPS,
            head_groups=HEAD_GROUPS,
        )
        return Schema("tests.e2e", self.digest, HashAlgorithm("sha256-chain", BLOCK_TOKENS), (group,))

    @property
    def layout(self) -> tuple[int, ...]:
        """A block's part of the cache with its axes of layers and heads cut into the grid's groups."""
        return (
            LAYER_GROUPS,
            LAYERS // LAYER_GROUPS,
            HEAD_GROUPS,
            KV_HEADS // HEAD_GROUPS,
            2,
            BLOCK_TOKENS,
            HEAD_WIDTH,
        )

    @property
    def tiles_shape(self) -> tuple[int, ...]:
        """A block as its tiles."""
        groups, layers, columns, heads, two, tokens, width = self.layout
        return (columns, groups, layers, heads, two, tokens, width)

    def cache(self, tokens: int) -> Cache:
        """An empty cache with room for so many tokens."""
        return Cache(torch.zeros(LAYERS, KV_HEADS, 2, tokens, HEAD_WIDTH, dtype=self.dtype))

    def prefill(self, prompt: list[int], cache: Cache) -> torch.Tensor:
        """Compute what of the prompt is not in the cache: the rest of its blocks one by one, then its tail.

        Logits of its last token. Block by block, so that a block that is missing can be recomputed alone.
        """
        last = torch.empty(0)
        whole = len(prompt) - len(prompt) % BLOCK_TOKENS
        ends = [*range(cache.tokens + BLOCK_TOKENS, whole + 1, BLOCK_TOKENS)]
        for end in ends if len(prompt) == whole else [*ends, len(prompt)]:
            last = self.step(prompt[cache.tokens : end], cache)
        return last

    def compute_block(self, number: int, prompt: list[int], cache: Cache) -> None:
        """Compute one block of the prompt again; those before it are in the cache."""
        after, cache.tokens = cache.tokens, number * BLOCK_TOKENS
        self.step(prompt[cache.tokens : cache.tokens + BLOCK_TOKENS], cache)
        cache.tokens = max(after, cache.tokens)

    def decode(self, logits: torch.Tensor, cache: Cache, steps: int) -> tuple[list[int], bytes]:
        """Go on greedily: the tokens, and the bytes of all logits that they were chosen by."""
        tokens, seen = [], [_bytes(logits)]
        for _ in range(steps):
            tokens.append(int(logits.argmax()))
            logits = self.step(tokens[-1:], cache)
            seen.append(_bytes(logits))
        return tokens, b"".join(seen)

    def step(self, tokens: list[int], cache: Cache) -> torch.Tensor:
        """Compute tokens after those in the cache, which grows by them. Logits of the last one."""
        start, count = cache.tokens, len(tokens)
        end = start + count
        x = self.embedding[torch.tensor(tokens)]
        mask = torch.arange(end)[None, :] <= torch.arange(start, end)[:, None]
        for number, layer in enumerate(self.layers):
            normal = _normal(x)
            q = _rotate(_heads(normal @ layer["q"].T, HEADS), start)
            cache.kv[number, :, 0, start:end] = _rotate(_heads(normal @ layer["k"].T, KV_HEADS), start)
            cache.kv[number, :, 1, start:end] = _heads(normal @ layer["v"].T, KV_HEADS)
            k, v = cache.kv[number, :, 0, :end], cache.kv[number, :, 1, :end]
            # Grouped queries: HEADS / KV_HEADS neighbouring query heads share a KV head.
            scores = q.reshape(KV_HEADS, -1, HEAD_WIDTH) @ k.transpose(1, 2) / HEAD_WIDTH**0.5
            scores = scores.reshape(KV_HEADS, -1, count, end).masked_fill(~mask, float("-inf"))
            mixed = torch.softmax(scores.float(), -1).to(self.dtype).reshape(KV_HEADS, -1, end) @ v
            mixed = mixed.reshape(HEADS, count, HEAD_WIDTH).transpose(0, 1).reshape(count, -1)
            x = x + mixed @ layer["out"].T
            normal = _normal(x)
            x = x + (torch.nn.functional.silu(normal @ layer["gate"].T) * (normal @ layer["up"].T)) @ layer["down"].T
        cache.tokens = end
        return (_normal(x[-1]) @ self.head.T).float()


def _normal(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """``[token][head × dimension]`` to ``[head][token][dimension]``."""
    return x.reshape(len(x), heads, HEAD_WIDTH).transpose(0, 1)


def _rotate(x: torch.Tensor, start: int) -> torch.Tensor:
    """Rotary positions, from ``start`` on."""
    half = HEAD_WIDTH // 2
    rates = 10_000 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(start, start + x.shape[1], dtype=torch.float32)[:, None] * rates
    one, other = x.float().split(half, -1)
    turned = [one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()]
    return torch.cat(turned, -1).to(x.dtype)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
