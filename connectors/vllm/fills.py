"""Blocks that the step under way fills, and vLLM's own cache: it has them from when the step is scheduled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from forebay.connectors.vllm.groups import CacheGroups
from forebay.connectors.vllm.messages import Load
from forebay.connectors.vllm.requests import Tracked

__all__ = ["StepFills"]


class StepFills:
    """What a step with loads fills, until it is known whether it had everything to compute with.

    If it had not, its blocks hold anything, and vLLM leaves them in its cache, to be computed again by the requests
    that loaded them: but these may be given up, and others take the blocks meanwhile (ADR 10). So it must forget them.
    For engines with one group of full attention.
    """

    def __init__(self, groups: CacheGroups) -> None:
        self._groups = groups
        self._first: list[tuple[int, bytes]] = []
        self._blocks: dict[str, set[int]] = {}
        self.loading: tuple[str, ...] = ()
        """The requests that the step under way loads for."""

    def load(self, tracked: Tracked) -> None:
        """The step being made is to load for a request, from its ``start_tokens`` on."""
        row = self._groups.blocks(0, tracked.start_tokens)
        self._first.append((row, self._hash(tracked.request, row)))

    def shared(self, request: Any, computed_tokens: int) -> bool:
        """Whether vLLM takes blocks for a request's own that the step being made is to load: it has to wait for them.

        If they were lost, the request would depend on another one to compute them again.
        """
        blocks = self._groups.blocks(0, computed_tokens)
        return any(row < blocks and self._hash(request, row) == first for row, first in self._first)

    def _hash(self, request: Any, row: int) -> bytes:
        return bytes(request.block_hashes[self._groups.hashed(0, row)])

    def made(self, loads: Iterable[Load], output: Any, requests: Mapping[str, Tracked]) -> None:
        """A step has been made (vLLM's `SchedulerOutput`), with these loads."""
        self._first.clear()
        self._blocks = {}
        self.loading = tuple([load.request for load in loads if load.in_step])
        for ident in output.num_scheduled_tokens if self.loading else ():
            tracked = requests.get(ident)
            if tracked is not None:
                start = tracked.start_tokens if ident in self.loading else tracked.request.num_computed_tokens
                (table,) = output.kv_connector_block_state.get_block_ids(ident)
                self._blocks[ident] = set(table[self._groups.blocks(0, start) :])

    def over(self, *, spoilt: bool) -> set[int]:
        """The step is over, and known to have had everything, or not (``spoilt``): what vLLM must forget."""
        blocks, self._blocks = self._blocks, {}
        self.loading = ()
        return set().union(*blocks.values()) if spoilt else set()

    def given_up(self, ident: str) -> set[int]:
        """A request was given up: what vLLM must forget, since it will not hear whether that was filled."""
        return self._blocks.get(ident, set())
