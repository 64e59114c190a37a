"""What the node is told of a request's blocks: hints, and what a router's index needs. Advice, never rights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from forebay.client import Describe, Hints
from forebay.connectors.vllm.tier.hints import hints_of

__all__ = ["Advice", "token_limit"]

_LONGEST = 128
"""Characters of a name: the node takes 4 KiB about a block, and a request may bring any."""
_HIGHEST = (1 << 32) - 1
_SILENT = Hints()


@dataclass(frozen=True, slots=True)
class Advice:
    """Of one request of the engine, and all blocks that it is the first to save.

    ``hints`` are None where it says nothing; ``adapter`` names its LoRA adapter.
    """

    hints: Hints | None = None
    adapter: str = ""

    @classmethod
    def of(cls, request: Any) -> Self:
        """What a request (vLLM's `Request`) says: its ``forebay_hints``, else vLLM's own priority and session.

        vLLM's priority 0 is the usual one, and the most urgent that the node is told of; higher ones are less urgent.
        """
        priority = min(max(0, int(getattr(request, "priority", 0) or 0)), _HIGHEST)
        session = _name(getattr(request, "session_id", None))
        params = getattr(request, "kv_transfer_params", None)
        said = hints_of(params if isinstance(params, dict) else None, None) or _SILENT
        hints = replace(said, priority_class=said.priority_class or priority, session=said.session or session)
        if hints != _SILENT:
            hints = replace(hints, origin=hints.origin or "vllm")
        adapter = request.lora_request
        return cls(None if hints == _SILENT else hints, _name(None if adapter is None else adapter.lora_name))

    def describe(self, parents: Sequence[bytes], block_tokens: int) -> Describe:
        """For new blocks with these parents: the keys of the blocks before them, empty for a first one."""
        return Describe(parents=parents, block_tokens=block_tokens, adapter=self.adapter)


def _name(text: Any) -> str:
    return "" if text is None else str(text).encode(errors="replace").decode()[:_LONGEST]


def token_limit(request: Any, name: str) -> int | None:
    """A bound that a request brings in its ``kv_transfer_params``, as vLLM's own offloading takes it; None without."""
    params = getattr(request, "kv_transfer_params", None)
    limit = params.get(name) if isinstance(params, dict) else None
    return limit if type(limit) is int and limit >= 0 else None
