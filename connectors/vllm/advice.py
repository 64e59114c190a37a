"""What the node is told of a request's blocks: hints, and what a router's index needs. Advice, never rights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from forebay.client import Describe, Hints

__all__ = ["Advice", "token_limit"]

_LONGEST = 128
"""Characters of a name: the node takes 4 KiB about a block, and a request may bring any."""
_HIGHEST = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Advice:
    """Of one request of the engine, and all blocks that it is the first to save.

    ``priority`` is vLLM's: 0 the usual, and the most urgent that the node is told of; a higher one is less urgent.
    ``session`` names a conversation of several requests, ``adapter`` a LoRA adapter.
    """

    priority: int = 0
    session: str = ""
    adapter: str = ""

    @classmethod
    def of(cls, request: Any) -> Self:
        """What a request (vLLM's `Request`) says of itself."""
        adapter = request.lora_request
        return cls(
            min(max(0, int(getattr(request, "priority", 0) or 0)), _HIGHEST),
            _name(getattr(request, "session_id", None)),
            _name(None if adapter is None else adapter.lora_name),
        )

    @property
    def hints(self) -> Hints | None:
        """For calls on these blocks; None if there is nothing to say."""
        if not self.priority and not self.session:
            return None
        return Hints(priority_class=self.priority, session=self.session, origin="vllm")

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
