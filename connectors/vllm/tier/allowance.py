"""How much of what the node has of a request is loaded: decided once for each, by the break-even guard."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.connectors.guard import Guard
from forebay.connectors.vllm.counters import Counters

__all__ = ["Allowance"]


@dataclass(slots=True)
class _Request:
    """How many of its blocks may be loaded, and which are."""

    blocks: int
    granted: set[bytes] = field(default_factory=set)


class Allowance:
    """Decisions for requests. A block has ``block_tokens`` tokens. Not thread-safe: it is the scheduler's."""

    def __init__(self, guard: Guard, counters: Counters, block_tokens: int) -> None:
        self._guard = guard
        self._counters = counters
        self._block_tokens = block_tokens
        self._requests: dict[str, _Request] = {}

    def grants(self, request: str, key: bytes, present: int) -> bool:
        """Whether a block of a request is loaded, of ``present`` that the node has of it."""
        known = self._requests.get(request)
        if known is None:
            verdict = self._guard.verdict(present, self._block_tokens)
            self._counters.add("decisions", reason=verdict.reason)
            if verdict.blocks < present:
                self._counters.add("lost_blocks", present - verdict.blocks, "guard")
            known = self._requests[request] = _Request(verdict.blocks)
        if key not in known.granted and len(known.granted) < known.blocks:
            known.granted.add(key)
        return key in known.granted

    def began(self, job: int, blocks: int) -> None:
        """A load has begun."""
        self._guard.began(str(job), blocks)

    def ended(self, job: int, seconds: float | None) -> None:
        """It took ``seconds``; None where it failed."""
        self._guard.ended(str(job), seconds)

    def forget(self, request: str) -> None:
        """A request has ended."""
        self._requests.pop(request, None)
