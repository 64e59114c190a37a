"""Saves of one rank: copied to host memory while the step that makes them whole is computed, and written by a thread.

From the end of the step on the engine may do with its blocks what it likes. Memory is bounded, and what finds no room
is not saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from forebay.client import Client, Describe, WritePlan
from forebay.connectors.vllm.blocks import HeldGroup
from forebay.connectors.vllm.counters import Counters
from forebay.connectors.vllm.host_memory import HostMemory, Space, room
from forebay.connectors.vllm.link import Link
from forebay.connectors.vllm.messages import Save
from forebay.connectors.vllm.settings import Settings

__all__ = ["Staging"]

_log = logging.getLogger("vllm.forebay")


@dataclass(slots=True)
class _Staged:
    """A save and its copies, ``[blocks, bytes]``, one a layer group, each once its layers have been computed.

    ``plan`` is what it is written by, None if there is none, or none yet. ``reasons`` are how each of its blocks
    fares, as far as its layer groups have been written.
    """

    save: Save
    held: HeldGroup
    space: Space
    copies: list[Any] = field(default_factory=list)
    plan: WritePlan | None = None
    reasons: list[str] = field(default_factory=list)

    @property
    def describe(self) -> Describe | None:
        """What routers are told of the blocks."""
        return self.save.advice.describe(self.save.parents, self.held.group.block_tokens)

    def rows(self, number: int) -> Any:
        """Where the copy of a layer group goes."""
        sizes = [part.tensors.value_bytes for part in self.held.parts]
        first = sum(room(len(self.save) * size) for size in sizes[:number])
        return torch.from_numpy(self.space.rows(len(self.save), sizes[number], first))


class Staging:
    """Saves of one rank of ``ranks``. ``ended(number, failed)`` is told of each, from whatever thread."""

    def __init__(self, settings: Settings, ranks: int, counters: Counters, ended: Callable[[int, bool], None]) -> None:
        self._settings = settings
        self._ranks = ranks
        self._counters = counters
        self._ended = ended
        self._storing = ThreadPoolExecutor(1, "forebay-save")
        self._memory = HostMemory(settings.staging_bytes)
        self._step: dict[int, _Staged | None] = {}
        self._unplanned: dict[int, _Staged] = {}
        self.link: Link | None = None
        """The way to the node, once a session has been joined."""

    @property
    def staged_bytes(self) -> int:
        """Host memory in use."""
        return self._memory.lent_bytes

    @property
    def waiting(self) -> bool:
        """Whether saves wait for the plan that they are written by."""
        return bool(self._unplanned)

    def settle(self) -> None:
        """Wait until everything that could be written so far has been, or could not be."""
        self._storing.submit(lambda: None).result()

    def close(self) -> None:
        """Finish what is being written."""
        self._storing.shutdown(wait=True)
        self._memory.close()

    # --- called by the engine's thread ------------------------------------------------------------------------------

    def computed(self, saves: Sequence[Save], groups: Sequence[HeldGroup], group: int, layer_group: int) -> None:
        """In the middle of a step: the last layer of a layer group has been computed. Copies it out, to be written."""
        for save in saves:
            staged = self._of_step(save, groups)
            if save.rows.group == group and staged is not None and len(staged.copies) == layer_group:
                self._copy(staged)

    def end(self, saves: Sequence[Save], groups: Sequence[HeldGroup], *, spoilt: bool) -> None:
        """The step has been computed; ``spoilt`` if what it computed with was not all there: then nothing is saved."""
        for save in saves:
            staged = self._of_step(save, groups)
            if staged is None:
                continue
            while not spoilt and len(staged.copies) < len(staged.held.parts) and self._copy(staged):
                pass
            whole = len(staged.copies) == len(staged.held.parts)
            if spoilt:
                self._counters.add("unstored_blocks", len(save), "recomputed")
            elif not whole:
                self._counters.add("unstored_blocks", len(save), "error")
            if (spoilt or not whole) and self._ranks == 1 and len(staged.held.parts) > 1:
                self._storing.submit(self._give_up, staged)  # some of it may have been written
            elif spoilt or not whole:
                self._finish(staged, failed=True)
            elif self._ranks > 1:
                self._unplanned[save.number] = staged
            else:
                self._storing.submit(self._store_last, staged)
        self._step.clear()

    def planned(self, number: int, plan: bytes) -> None:
        """What several ranks write a save by has become known."""
        staged = self._unplanned.pop(number, None)
        if staged is not None:
            self._storing.submit(self._store_planned, staged, plan)

    def dropped(self, number: int) -> None:
        """There is no plan for a save: nobody writes it."""
        staged = self._unplanned.pop(number, None)
        if staged is not None:
            self._memory.give(staged.space)

    def _of_step(self, save: Save, groups: Sequence[HeldGroup]) -> _Staged | None:
        """A save of this step, opened when it is first asked for."""
        if save.number not in self._step:
            self._step[save.number] = self._open(save, groups)
        return self._step[save.number]

    def _open(self, save: Save, groups: Sequence[HeldGroup]) -> _Staged | None:
        """Make room for a save of this step; None if there is none, or if another rank writes it."""
        held = groups[save.rows.group]
        if not held.writes(save.number):
            self._ended(save.number, False)
            return None
        space = self._memory.take(sum(room(len(save) * part.tensors.value_bytes) for part in held.parts))
        if space is None:
            self._counters.add("unstored_blocks", len(save), "no_staging")
            self._ended(save.number, True)
            return None
        return _Staged(save, held, space, reasons=["ok"] * len(save))

    def _copy(self, staged: _Staged) -> bool:
        """Take the next layer group, and have it written if it is not the last: whether that worked."""
        number, parts = len(staged.copies), staged.held.parts
        try:
            values = staged.rows(number)
            parts[number].tensors.gather(staged.save.rows.blocks, values)
        except Exception:  # the engine must live on, and the scheduler's half must hear of the end of each save
            _log.exception("a save failed")
            return False
        staged.copies.append(values)
        if self._ranks == 1 and number + 1 < len(parts):
            self._storing.submit(self._store_part, staged, number)
        return True

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _carry_out(self, staged: _Staged, write: Callable[[Link, Client], None]) -> None:
        """Call ``write``; blocks that it leaves undone are noted as such. Raises nothing."""
        why = "unavailable"
        try:
            assert self.link is not None, "a session is offered before the first save"
            client = self.link.wait(self._settings.save_timeout_ms)
            if client is not None:
                write(self.link, client)
                return
        except Exception:  # the engine must live on; what is not stored is a miss later
            _log.exception("a save failed")
            why = "error"
        staged.reasons = [why if reason == "ok" else reason for reason in staged.reasons]

    def _store_planned(self, staged: _Staged, plan: bytes) -> None:
        """All layer groups by the leader's plan."""

        def write(link: Link, client: Client) -> None:
            staged.plan = WritePlan.from_bytes(plan)
            for number in range(len(staged.copies)):
                self._write(link, client, staged, number)

        self._carry_out(staged, write)
        self._finish(staged, failed=not self._count(staged))

    def _store_part(self, staged: _Staged, number: int) -> None:
        """One layer group of several, which is not the last; the first has the save's place planned."""

        def write(link: Link, client: Client) -> None:
            if number == 0:
                self._plan(link, client, staged)
            self._write(link, client, staged, number)

        self._carry_out(staged, write)

    def _store_last(self, staged: _Staged) -> None:
        """What is left once the step has been computed: all of it where there is one layer group only."""

        def write(link: Link, client: Client) -> None:
            if len(staged.copies) == 1:
                self._put(link, client, staged)
            else:
                self._write(link, client, staged, len(staged.copies) - 1)

        self._carry_out(staged, write)
        done = self._count(staged)
        if not done:
            self._abort(staged)
        self._finish(staged, failed=not done)

    def _give_up(self, staged: _Staged) -> None:
        self._abort(staged)
        self._finish(staged, failed=True)

    def _finish(self, staged: _Staged, *, failed: bool) -> None:
        self._memory.give(staged.space)
        self._ended(staged.save.number, failed)

    def _abort(self, staged: _Staged) -> None:
        """Give up what has been planned here and is not visible yet. Raises nothing."""
        client = None if self.link is None else self.link.client
        if staged.plan is None or client is None:
            return
        try:
            client.abort(staged.plan, deadline_ms=self._settings.save_timeout_ms)
        except Exception:  # the engine must live on; what is not given up expires
            _log.exception("a save was not given up")

    def _plan(self, link: Link, client: Client, staged: _Staged) -> None:
        rows = staged.save.rows
        named = self._settings.named(client, rows.keys, rows.group)
        staged.plan = client.allocate(
            named,
            hosts=[client.host_nqn],
            hints=staged.save.advice.hints,
            describe=staged.describe,
            deadline_ms=self._settings.save_timeout_ms,
        )
        link.note(staged.plan.reasons)
        staged.reasons = list(staged.plan.reasons)

    def _write(self, link: Link, client: Client, staged: _Staged, number: int) -> None:
        """One layer group of the blocks that are still to be written."""
        plan = staged.plan
        if plan is None:  # it could not be had, which has been noted
            return
        rows = [i for i, reason in enumerate(staged.reasons) if reason == plan.reasons[i] == "ok"]
        if not rows:
            return
        values, tiles = staged.copies[number], staged.held.parts[number].tiles
        deadline_ms = self._settings.save_timeout_ms
        results = client.put_tiles(plan.take(rows), tiles, [values[i].numpy() for i in rows], deadline_ms=deadline_ms)
        link.note([result.reason for result in results])
        for row, result in zip(rows, results, strict=True):
            if not result.committed:
                staged.reasons[row] = result.reason

    def _put(self, link: Link, client: Client, staged: _Staged) -> None:
        """Whole blocks, by this rank alone."""
        rows = staged.save.rows
        named, values = self._settings.named(client, rows.keys, rows.group), list(staged.copies[0].numpy())
        hints, deadline_ms = staged.save.advice.hints, self._settings.save_timeout_ms
        results = client.put(named, values, hints=hints, describe=staged.describe, deadline_ms=deadline_ms)
        link.note([result.reason for result in results])
        staged.reasons = ["already_exists" if r.present and not r.stored else r.reason for r in results]

    def _count(self, staged: _Staged) -> bool:
        """Count how the save's blocks have fared; whether nothing is left to be given up."""
        planned = staged.plan.reasons if staged.plan is not None and self._ranks > 1 else ["ok"] * len(staged.save)
        # What was not planned for several ranks was counted by whoever planned.
        ended = [reason for reason, plan in zip(staged.reasons, planned, strict=True) if plan == "ok"]
        stored, present = ended.count("ok"), ended.count("already_exists")
        self._counters.add("stored_blocks", stored)
        self._counters.add("stored_bytes", stored * staged.held.value_bytes)
        if self._ranks == 1:
            self._counters.add("present_blocks", present)
        failed = [reason for reason in ended if reason not in ("ok", "already_exists")]
        for reason in failed:
            self._counters.add("unstored_blocks", reason=reason)
        return not failed
