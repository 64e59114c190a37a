"""What a node does between two looks at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.client import Admin, NamespaceInfo, NodeStatus

__all__ = ["Look", "Rates"]


@dataclass(frozen=True, slots=True)
class Look:
    """A node as it was at one moment, ``at_s`` of a clock of our own."""

    at_s: float
    status: NodeStatus
    namespaces: tuple[NamespaceInfo, ...]

    @classmethod
    def take(cls, admin: Admin, at_s: float) -> Look:
        """Ask the node. Raises what it answers."""
        return cls(at_s, admin.status(), tuple(admin.list_namespaces()))


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, between two looks; hit rates are None where nothing was asked for."""

    read_bytes: float
    written_bytes: float
    match_keys: float
    match_hit_rate: float | None
    load_keys: float
    load_hit_rate: float | None
    stored: float
    evicted: float
    removed: float

    @classmethod
    def between(cls, before: Look, now: Look) -> Rates:
        """Counters start anew with the daemon or the target: what one shows then is all since that."""
        seconds = max(1e-3, now.at_s - before.at_s)
        old, new = before.status, now.status

        def rise(*names: str) -> int:
            return sum(_rise(old.counters.get(name, 0), new.counters.get(name, 0)) for name in names)

        asked, found = rise("match_keys"), rise("match_hits")
        loaded, missed = rise("acquire_hits"), rise("acquire_misses")
        return cls(
            read_bytes=_rise(old.read_bytes, new.read_bytes) / seconds,
            written_bytes=_rise(old.written_bytes, new.written_bytes) / seconds,
            match_keys=asked / seconds,
            match_hit_rate=found / asked if asked else None,
            load_keys=(loaded + missed) / seconds,
            load_hit_rate=loaded / (loaded + missed) if loaded + missed else None,
            stored=rise("committed_blocks") / seconds,
            evicted=rise("blocks_evicted") / seconds,
            removed=rise("blocks_deleted", "blocks_expired", "blocks_stale", "blocks_cleared", "blocks_bad") / seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """As ``--json`` names them."""
        return {
            "read_bytes_per_s": round(self.read_bytes),
            "written_bytes_per_s": round(self.written_bytes),
            "match_keys_per_s": round(self.match_keys, 1),
            "match_hit_rate": self.match_hit_rate,
            "load_keys_per_s": round(self.load_keys, 1),
            "load_hit_rate": self.load_hit_rate,
            "stored_per_s": round(self.stored, 1),
            "evicted_per_s": round(self.evicted, 1),
            "removed_per_s": round(self.removed, 1),
        }


def _rise(before: int, now: int) -> int:
    return now - before if now >= before else now
