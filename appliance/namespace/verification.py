"""Whether blocks are what was stored: read at the target, whoever doubts them.

A bad one is dropped, its place kept from further use if it is the drive that lost it. What the target could not say of
stays as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from forebay.appliance.dataplane.interface import VolumeSpec
from forebay.appliance.namespace.engine import Engine
from forebay.appliance.namespace.quarantine import Quarantined
from forebay.appliance.namespace.records import FLUSHED
from forebay.appliance.namespace.retirement import Retirement
from forebay.checksum import tile_seeds
from forebay.errors import ForebayError, MetadataCorrupt, TargetFailed
from forebay.ids import LBA_BYTES, Extent, StoredKey, VolumeId, split_stored_key
from forebay.index import Rows, RowState, findable
from forebay.schema import Schema, TileLayout

__all__ = ["Verdict", "Verification", "tile_ranges"]

_log = logging.getLogger(__name__)
_BATCH = 64


def tile_ranges(
    stored_key: StoredKey, write_id: bytes, layout: TileLayout, offset_bytes: int
) -> list[tuple[int, int, int]]:
    """Where on the volume each tile of a block lies, its length, and the seed that its checksum starts from."""
    seeds = tile_seeds(stored_key, range(layout.tiles), write_id)
    return [(offset_bytes + o, n, s) for o, n, s in zip(layout.offsets, layout.lengths, seeds, strict=True)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `Verification.verify` found, in blocks; those that ended meanwhile are in none of the counts.

    ``unread``: the drive did not give the bytes. ``unknown``: the target did not answer, or they are bad and cannot be
    deleted before metadata can be written again.
    """

    good: int = 0
    bad: int = 0
    unread: int = 0
    unknown: int = 0

    @property
    def complete(self) -> bool:
        """Whether all are either served or gone."""
        return not self.unread + self.unknown


class _Asked(NamedTuple):
    """A block to be verified: its key, and offset, length and seed of each of its tiles."""

    stored_key: StoredKey
    ranges: Sequence[tuple[int, int, int]]


class Verification:
    """The one judge of blocks."""

    def __init__(self, engine: Engine, retirement: Retirement) -> None:
        self._e = engine
        self._retirement = retirement
        self._served: dict[int, int] = {}  # suspects that were served until somebody doubted them: row to write
        self._next_suspect = 0
        self._went_round = False
        self._schemas: dict[bytes, Schema] = {}

    async def verify(self, rows: Rows, stored_keys: Sequence[StoredKey]) -> Verdict:
        """Read blocks at the target and compare their checksums: bad ones are dropped, good suspects are served again.

        What the target could not say of stays as it was.
        """
        e, index = self._e, self._e.index
        by_volume: dict[VolumeId, dict[int, _Asked]] = {}
        away = self._e.away(rows)
        if away.any():
            there = np.flatnonzero(~away)
            rest = await self.verify(rows[there], [stored_keys[i] for i in there.tolist()])
            return replace(rest, unread=rest.unread + int(away.sum()))
        if not rows.size:
            return Verdict()
        corrupt: list[MetadataCorrupt] = []
        for row, key in zip(rows.tolist(), stored_keys, strict=True):
            try:
                ranges = self._ranges(row, key)
            except MetadataCorrupt as error:
                corrupt.append(error)
                continue
            asked = by_volume.setdefault(VolumeId(int(index.volume[row])), {})
            asked[row] = _Asked(key, ranges)  # once, however often it was asked for
        if corrupt:
            _log.error("%d blocks cannot be verified: %s", len(corrupt), corrupt[0])
        specs = {volume: e.space.specs[volume] for volume in by_volume}
        held = np.unique(rows)
        index.leases[held] += 1  # so that nobody reuses rows or extents meanwhile
        try:
            parts = [await self._verify(specs[volume], asked) for volume, asked in by_volume.items()]
        finally:
            index.leases[held] -= 1
            self._retirement.free_unleased(held)
        good, bad, unread, unknown = (sum(part) for part in zip((0, 0, len(corrupt), 0), *parts, strict=True))
        return Verdict(good, bad, unread, unknown)

    async def _verify(self, spec: VolumeSpec, asked: dict[int, _Asked]) -> tuple[int, int, int, int]:
        """`verify` within one volume, all rows held: good, bad, unread, unknown."""
        e = self._e
        try:
            found = await e.target.checksums(spec, [one for block in asked.values() for one in block.ranges])
        except TargetFailed as error:
            if len(asked) > 1:  # one of them cannot be read; which, or is it the drive?
                if (drive := await self._drive_reads(spec)) is not True:
                    return (0, 0, len(asked), 0) if drive is False else (0, 0, 0, len(asked))
                parts = [await self._verify(spec, {row: block}) for row, block in asked.items()]
                good, bad, unread, unknown = (sum(part) for part in zip(*parts, strict=True))
                return good, bad, unread, unknown
            _log.warning("volume %d: a block cannot be read: %s", spec.volume, error)
            return await self._unread(spec, asked)
        except ForebayError as error:
            _log.warning("volume %d: blocks cannot be verified: %s", spec.volume, error)
            return 0, 0, 0, len(asked)
        rows = np.array(list(asked), dtype=np.int64)
        standing = int(findable(e.index.state[rows]).sum())
        wrong = self._judge(rows, found)
        e.counters["blocks_verified"] += len(asked)
        if wrong.size and e.store.problem is not None:
            # they cannot be deleted at present: nobody gets them before they can be
            self.suspect(wrong)
            return standing - len(wrong), 0, 0, len(wrong)
        if wrong.size:
            # a suspect may have been lost with the power, which says nothing of the medium, unless it was flushed or
            # served
            settled = (e.index.state[wrong] == RowState.VISIBLE) | (e.index.flags[wrong] & FLUSHED != 0)
            settled |= [self._served.pop(row, None) == e.index.write_id[row, 0] for row in wrong.tolist()]
            keep = self._to_quarantine(wrong[settled], "checksum")
            _log.warning(
                "volume %d: bytes of blocks at %s are not those that were stored: dropped, %d of %d to quarantine",
                *(spec.volume, ", ".join(map(str, e.index.offset[wrong].tolist())), len(keep), len(wrong)),
            )
            await self._retirement.retire(wrong, [asked[row].stored_key for row in wrong.tolist()], "bad", keep)
        return standing - len(wrong), len(wrong), 0, 0

    async def _unread(self, spec: VolumeSpec, asked: dict[int, _Asked]) -> tuple[int, int, int, int]:
        """One block, held, that the drive did not give: it is bad if the drive gives others, such as the label."""
        e = self._e
        if (drive := await self._drive_reads(spec)) is not True:
            return (0, 0, 1, 0) if drive is False else (0, 0, 0, 1)
        rows = np.array(list(asked), dtype=np.int64)
        rows = rows[findable(e.index.state[rows])]
        if rows.size and e.store.problem is not None:
            return 0, 0, 0, 1
        if rows.size:
            keys = [asked[row].stored_key for row in rows.tolist()]
            await self._retirement.retire(rows, keys, "bad", self._to_quarantine(rows, "read_error"))
        return 0, len(rows), 0, 0

    async def _drive_reads(self, spec: VolumeSpec) -> bool | None:
        """Whether the drive gives at least the volume's label; None when the target does not say."""
        try:
            await self._e.target.checksums(spec, [(0, LBA_BYTES, 0)])
        except TargetFailed:
            return False
        except ForebayError:
            return None
        return True

    def _to_quarantine(self, rows: Rows, reason: str) -> list[Quarantined]:
        index = self._e.index
        places = zip(*(column[rows].tolist() for column in (index.volume, index.offset, index.length)), strict=True)
        extents = [Extent(VolumeId(volume), offset, length) for volume, offset, length in places]
        return self._e.space.to_quarantine(extents, reason, self._e.clock.wall_ms())

    def _judge(self, rows: Rows, found: Sequence[int]) -> Rows:
        """Let suspects whose checksums are as ``found`` be visible; the blocks that are not, of those still there."""
        index = self._e.index
        at, wrong = 0, []
        for row, tiles in zip(rows.tolist(), index.tiles[rows].tolist(), strict=True):
            if index.state[row] in (RowState.VISIBLE, RowState.SUSPECT):
                want = np.frombuffer(index.checksums(np.array([row])), "<u4").tolist()
                if found[at : at + tiles] == want:
                    index.state[row] = RowState.VISIBLE
                    self._served.pop(row, None)
                else:
                    wrong.append(row)
            at += tiles
        return np.array(wrong, dtype=np.int64)

    def suspect(self, rows: Rows) -> None:
        """Have blocks verified before they are served again."""
        served = rows[self._e.index.state[rows] == RowState.VISIBLE]
        self._served.update(zip(served.tolist(), self._e.index.write_id[served, 0].tolist(), strict=True))
        self._e.index.suspect(rows)

    async def verify_rows(self, rows: Rows) -> Verdict:
        """`verify` of blocks by their rows alone; those that metadata do not name are ``unread``."""
        try:
            keys = self._e.owners(rows)
        except MetadataCorrupt as error:
            _log.error("%d blocks cannot be verified: %s", len(rows), error)
            return Verdict(unread=len(rows))
        named = [i for i, key in enumerate(keys) if key is not None]
        if len(named) < len(rows):
            _log.error("%d blocks have no owner in metadata and cannot be verified", len(rows) - len(named))
        verdict = await self.verify(rows[named], [key for key in keys if key is not None])
        return replace(verdict, unread=verdict.unread + len(rows) - len(named))

    async def verify_some(self) -> int:
        """Verify a few suspects in the background, others each time; how many were looked at."""
        index = self._e.index
        if not index.suspects_left:
            return 0
        suspects = np.flatnonzero(index.state[: index.high] == RowState.SUSPECT)
        if not suspects.size:
            self._served.clear()
        suspects = suspects[~self._e.away(suspects)]
        index.suspects_left = bool(suspects.size)  # what is on a drive that is away is doubted anew when that is back
        if not suspects.size:
            self._next_suspect, self._went_round = 0, False
            return 0
        # on from the last one: those that cannot be verified at present keep no others waiting
        turn = suspects[suspects >= self._next_suspect][:_BATCH]
        if not turn.size:
            turn, self._went_round = suspects[:_BATCH], True
        self._next_suspect = int(turn[-1]) + 1
        await self.verify_rows(turn)
        return len(turn)

    @property
    def sweeping(self) -> bool:
        """Whether there are suspects that `verify_some` has not come to yet."""
        return self._e.index.suspects_left and not self._went_round

    def _ranges(self, row: int, stored: StoredKey) -> Sequence[tuple[int, int, int]]:
        index = self._e.index
        _, keyspace, _, block = split_stored_key(stored)
        layout = self.schema(keyspace).groups[block.group].layout(int(index.value_length[row]))
        return tile_ranges(stored, index.write_id[row].tobytes(), layout, int(index.offset[row]))

    def schema(self, keyspace: bytes) -> Schema:
        """The schema of a keyspace that blocks were stored under. Raises `MetadataCorrupt`."""
        schema = self._schemas.get(keyspace)
        if schema is None:
            data = self._e.store.get("keyspaces", keyspace)
            if data is None:
                raise MetadataCorrupt(f"keyspace {keyspace.hex()} has no schema", field="keyspaces")
            schema = self._schemas[keyspace] = Schema.from_cbor(data)
        return schema
