"""Saves of several ranks: one leader, the scheduler's half, has their place planned, and all of them write to it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from forebay.client import WritePlan
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.link import Link
from forebay.connectors.vllm.messages import Rows, Save
from forebay.connectors.vllm.requests import Whole
from forebay.ids import BlockKey

__all__ = ["Saves"]

_log = logging.getLogger("vllm.forebay")

_PLAN_MS = 5_000
"""How long a plan, or giving one up, may take at most: the engine is kept stepping while one is waited for."""


@dataclass(slots=True)
class _Saving:
    """A save until every rank has done with it. ``plan`` is on its way, or told, or (one rank) not needed."""

    save: Save
    plan: Future[WritePlan | None] | None
    told: bool = False
    spoilt: bool = False
    ranks_done: int = 0
    failed: bool = False


class Saves:
    """The saves under way. Belongs to the scheduler's thread; calls on the node are made by another one.

    With one rank there is no plan: it does all by itself.
    """

    def __init__(self, ranks: int, deadline_ms: int, counters: Counters) -> None:
        self._ranks = ranks
        self._deadline_ms = deadline_ms
        self._counters = counters
        self._calling = ThreadPoolExecutor(1, "forebay-plan")
        self._number = 0
        self._saving: dict[int, _Saving] = {}
        self._keys: dict[tuple[int, bytes], int] = {}
        self._fresh: list[int] = []
        self.hosts: dict[int, str] = {}
        """The NVMe host of each rank that has joined the session."""

    def close(self) -> None:
        """Plan nothing more; what is planned and not written expires at the node."""
        self._calling.shutdown(wait=False, cancel_futures=True)

    @property
    def ready(self) -> bool:
        """Whether all ranks can write: those that join later could not by a plan of now."""
        return self._ranks == 1 or len(self.hosts) == self._ranks

    @property
    def to_tell(self) -> bool:
        """Whether there are plans that workers wait for."""
        return any(not saving.told for saving in self._saving.values())

    def has(self, group: int, key: bytes) -> bool:
        """Whether a block is being saved."""
        return (group, key) in self._keys

    def begin(self, link: Link, scope: int, group: int, blocks: Sequence[tuple[bytes, Whole]]) -> Save:
        """Save these blocks of the engine, with their keys; all of one advice."""
        self._number += 1
        keys = tuple([key for key, _ in blocks])
        rows = Rows(group, keys, tuple([whole.block for _, whole in blocks]))
        save = Save(self._number, rows, tuple([whole.parent for _, whole in blocks]), blocks[0][1].advice)
        plan = None
        if self._ranks > 1:
            named = [BlockKey(key, group, scope) for key in keys]
            plan = self._calling.submit(self._plan, link, save, named, list(self.hosts.values()))
        self._saving[save.number] = _Saving(save, plan, told=plan is None)
        self._keys.update(((group, key), save.number) for key in keys)
        self._fresh.append(save.number)
        return save

    def _plan(self, link: Link, save: Save, keys: list[BlockKey], hosts: list[str]) -> WritePlan | None:
        """In a thread: what the ranks write by; None if there is nothing to write. Raises nothing."""
        client = link.client
        if client is None:  # the plans before it had no answer: the engine is not kept stepping for this one
            self._counters.add("unstored_blocks", len(keys), "unavailable")
            return None
        try:
            tokens = client.schema.groups[save.rows.group].block_tokens
            plan = client.allocate(
                keys,
                hosts=hosts,
                hints=save.advice.hints,
                describe=save.advice.describe(save.parents, tokens),
                deadline_ms=min(self._deadline_ms, _PLAN_MS),
            )
        except Exception:  # the engine must live on; what is not stored is a miss later
            _log.exception("no plan for a save")
            return None
        link.note(plan.reasons)
        for reason in plan.reasons:
            if reason == "already_exists":
                self._counters.add("present_blocks")
            elif reason != "ok":
                self._counters.add("unstored_blocks", reason=reason)
        return plan if "ok" in plan.reasons else None

    def tell(self, link: Link | None) -> tuple[list[tuple[int, bytes]], list[int]]:
        """Plans that have become known since, and saves that there is none for."""
        plans, dropped = [], []
        self._fresh.clear()
        for number, saving in list(self._saving.items()):
            if saving.told or saving.plan is None or not saving.plan.done():
                continue
            plan = saving.plan.result()
            if plan is None or saving.spoilt:
                dropped.append(number)
                self._end(number)
                if plan is not None:
                    self._calling.submit(self._abort, link, saving.plan)
            else:
                saving.told = True
                plans.append((number, plan.to_bytes()))
        return plans, dropped

    def spoil(self) -> None:
        """The last step computed with blocks that were not all there: its saves are given up, and may be made anew."""
        for number in self._fresh:
            saving = self._saving.get(number)
            if saving is not None:
                saving.spoilt = True
                self._forget(saving.save)

    def heard(self, link: Link | None, done: dict[int, int], failed: set[int]) -> None:
        """How many ranks have done with saves, and which saves a rank could not carry out: given up for all."""
        for number in failed:
            saving = self._saving.get(number)
            if saving is not None:
                saving.failed = True
        for number, ranks in done.items():
            saving = self._saving.get(number)
            if saving is None:
                continue
            saving.ranks_done += ranks
            if saving.ranks_done < self._ranks:
                continue
            self._end(number)
            if saving.failed and saving.plan is not None:
                self._calling.submit(self._abort, link, saving.plan)

    def _abort(self, link: Link | None, planned: Future[WritePlan | None]) -> None:
        """In the thread that made the plan, and so after it. Raises nothing."""
        try:
            plan, client = planned.result(), None if link is None else link.client
            if plan is not None and client is not None:
                client.abort(plan, deadline_ms=min(self._deadline_ms, _PLAN_MS))
        except Exception:  # the engine must live on; what is not given up expires
            _log.exception("a save was not given up")

    def _end(self, number: int) -> None:
        self._forget(self._saving.pop(number).save)

    def _forget(self, save: Save) -> None:
        """Its blocks are not being saved any more, unless by another save."""
        for key in save.rows.keys:
            if self._keys.get((save.rows.group, key)) == save.number:
                del self._keys[save.rows.group, key]
