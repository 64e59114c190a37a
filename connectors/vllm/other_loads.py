"""Loads of connectors that stand beside this one in a `MultiConnector`, where the step under way computes with them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

__all__ = ["OtherLoads"]


class OtherLoads:
    """Whether what is being computed may be saved: not before it is known that others' loads had all of it.

    They tell of what they lack after the step, as this connector does; but its workers, which save at the end of the
    step, do not hear of that. Belongs to the scheduler's thread.
    """

    def __init__(self) -> None:
        self._asked: dict[str, tuple[Any, int]] = {}
        self._steps = 0
        """Steps that have been made, and whose output is not there yet."""
        self._doubtful = 0
        """So many of them have to be over before anything is saved again."""
        self._requests: set[str] = set()
        self._blocks: set[int] = set()

    def asked(self, request: Any, computed_tokens: int) -> None:
        """For the step being made the scheduler asks what can be loaded after so many tokens."""
        self._asked[request.request_id] = request, computed_tokens

    def made(self, output: Any, mine: Collection[str]) -> bool:
        """A step has been made (vLLM's `SchedulerOutput`), in which this connector loads for requests ``mine``.

        Answers whether anything may be saved in it.
        """
        asked, self._asked = self._asked, {}
        self._steps += 1
        if output.has_sync_kv_loads and any(
            ident in output.num_scheduled_tokens and ident not in mine and request.num_computed_tokens > tokens
            for ident, (request, tokens) in asked.items()
        ):
            self._doubtful = self._steps
        if self._doubtful:
            self._requests.update(output.num_scheduled_tokens)
            for ident in output.num_scheduled_tokens:
                self._blocks.update(*output.kv_connector_block_state.get_block_ids(ident))
        return not self._doubtful

    def failed(self) -> tuple[frozenset[str], frozenset[int]]:
        """Some blocks were not loaded: the requests that may have been computed with them, and the engine's blocks.

        vLLM leaves the blocks in its own cache; see `forebay.connectors.vllm.fills`.
        """
        return frozenset(self._requests), frozenset(self._blocks)

    def known(self) -> None:
        """The output of the oldest step under way has been dealt with."""
        self._steps = max(0, self._steps - 1)
        self._doubtful = max(0, self._doubtful - 1)
        if not self._doubtful:
            self._requests.clear()
            self._blocks.clear()
