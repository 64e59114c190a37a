"""One process of an engine that runs the decoder: `python -m tests.e2e.rank URL TOKEN`, in an environment with torch.

Reads requests from standard input, a JSON object a line, and answers each with one on standard output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from forebay.client import Client, ClientOptions, WritePlan, connect
from forebay.ranks import held_tiles, written_tiles
from tests.e2e.decoder import BLOCK_TOKENS, Cache, Decoder, block_keys

OPTIONS = ClientOptions(deadline_ms=20_000, connect_ms=20_000, attempt_ms=5_000)
STEPS = 12


class Rank:
    """A model, a client of its keyspace, and the KV cache of the prompt of the moment."""

    def __init__(self, url: str, token: str, dtype: str, session_token: str) -> None:
        self.model = Decoder(dtype)
        schema = self.model.schema
        self.group = schema.groups[0]
        self.client = (
            Client.join(url, token=token, schema=schema, session_token=bytes.fromhex(session_token), options=OPTIONS)
            if session_token
            else connect(url, token=token, schema=schema, options=OPTIONS)
        )
        self.prompt: list[int] = []
        self.cache = Cache(torch.empty(0))
        self.missing: list[int] = []

    @property
    def blocks(self) -> int:
        """Whole blocks of the prompt."""
        return len(self.prompt) // BLOCK_TOKENS

    def start(self, prompt: list[int]) -> None:
        """A prompt, and an empty cache for it."""
        self.prompt = prompt
        self.cache = self.model.cache(len(prompt) + STEPS)
        self.missing = []

    # --- requests ---------------------------------------------------------------------------------------------------

    def token(self) -> dict[str, Any]:
        """What another rank joins with."""
        return {"token": self.client.join_token.hex()}

    def compute(self, prompt: list[int]) -> dict[str, Any]:
        """Prefill and decode without ever asking the node."""
        self.start(prompt)
        return self.finish()

    def allocate(self) -> dict[str, Any]:
        """The leader's part."""
        plan = self.client.allocate(block_keys(self.prompt))
        return {"plan": plan.to_bytes().hex(), "reasons": plan.reasons}

    def put_tiles(self, plan: str, rank: int, ranks: int) -> dict[str, Any]:
        """Store this rank's KV heads, and no others."""
        tiles = written_tiles(self.group, rank, ranks)
        values = [self.part(self.block(i), tiles) for i in range(self.blocks)]
        results = self.client.put_tiles(WritePlan.from_bytes(bytes.fromhex(plan)), tiles, values)
        return {"reasons": [result.reason for result in results]}

    def put(self) -> dict[str, Any]:
        """Store all KV heads, as an engine without other ranks; where each block is."""
        keys = block_keys(self.prompt)
        results = self.client.put(keys, [self.block(i) for i in range(self.blocks)])
        blocks = [found.block for found in self.client.stat(keys)]
        places = [[block.volume, block.offset_bytes] for block in blocks if block is not None]
        return {"reasons": [result.reason for result in results], "places": places}

    def load(self, prompt: list[int], rank: int, ranks: int) -> dict[str, Any]:
        """Fill an empty cache from the node: the KV heads of this rank. What is missing stays zero."""
        self.start(prompt)
        tiles = held_tiles(self.group, rank, ranks)
        blocks = [torch.zeros(self.model.tiles_shape, dtype=self.model.dtype) for _ in range(self.blocks)]
        results = self.client.get_into(block_keys(prompt), [self.part(block, tiles) for block in blocks], tiles=tiles)
        for i, (block, result) in enumerate(zip(blocks, results, strict=True)):
            if result.hit:
                self.cache.set_block(i, block)
            else:
                self.missing.append(i)
        self.cache.tokens = self.blocks * BLOCK_TOKENS
        return {"reasons": [result.reason for result in results]}

    def give(self, path: str) -> dict[str, Any]:
        """Let another rank have this one's KV, as it was loaded."""
        torch.save(self.cache.kv, path)
        return {}

    def take(self, path: str, rank: int, ranks: int) -> dict[str, Any]:
        """Take the KV heads that another rank loaded: attention here is computed whole, whoever holds which heads."""
        each = self.group.kv_heads // ranks
        heads = slice(rank * each, (rank + 1) * each)
        self.cache.kv[:, heads] = torch.load(Path(path), weights_only=True)[:, heads]
        return {}

    def resume(self) -> dict[str, Any]:
        """Compute the blocks that are missing, then go on as if all had been there."""
        for number in self.missing:
            self.model.compute_block(number, self.prompt, self.cache)
        return {**self.finish(), "recomputed": self.missing}

    # --- parts of them ----------------------------------------------------------------------------------------------

    def finish(self) -> dict[str, Any]:
        logits = self.model.prefill(self.prompt, self.cache)
        tokens, seen = self.model.decode(logits, self.cache, STEPS)
        self.cache.tokens = self.blocks * BLOCK_TOKENS  # so that it can be done again
        return {"tokens": tokens, "logits": seen.hex()}

    def block(self, number: int) -> torch.Tensor:
        return self.cache.block(number, self.model.layout)

    def part(self, block: torch.Tensor, tiles: Sequence[int]) -> torch.Tensor:
        """The memory of some tiles, which a rank of this model holds one after the other."""
        return block.view(self.group.tiles, -1)[tiles[0] : tiles[-1] + 1]


def main(url: str, token: str) -> None:
    """Answer requests until there are none; each names the number type, which has a rank of its own."""
    ranks: dict[str, Rank] = {}
    for line in sys.stdin:
        request = json.loads(line)
        dtype, verb = request.pop("dtype"), request.pop("do")
        if verb == "open":
            ranks[dtype] = Rank(url, token, dtype, **request)
            answer: dict[str, Any] = {}
        else:
            answer = getattr(ranks[dtype], verb)(**request)
        print(json.dumps(answer), flush=True)
    for rank in ranks.values():
        rank.client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
