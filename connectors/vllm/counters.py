"""What the connector counts."""

from __future__ import annotations

import threading
from collections import defaultdict

__all__ = ["METRICS", "Counters"]

METRICS = {
    "hit_blocks": "KV blocks that requests asked for and the node has.",
    "missed_blocks": (
        "KV blocks that requests asked for and do not get from the node, by reason; behind_gap: it has them, and not "
        "one before them."
    ),
    "decisions": (
        "Lookups with hits that the engine asked about, by what was decided: unknown (loaded, to learn), faster, "
        "partial, trial (loaded), slower, late (computed)."
    ),
    "loaded_blocks": "KV blocks read from the node, by each rank.",
    "loaded_bytes": "Bytes of the KV blocks read from the node.",
    "load_seconds": "Time that loads took, each from its start to its end.",
    "lost_blocks": "KV blocks that the node had and that could not be loaded and are computed, by reason.",
    "stored_blocks": "KV blocks stored at the node, by each rank.",
    "stored_bytes": "Bytes of the KV blocks stored at the node.",
    "present_blocks": "KV blocks that were not stored since somebody else had done so.",
    "unstored_blocks": "KV blocks that could not be stored, by reason.",
}
"""What is counted: name and meaning. Each may have a reason."""


class Counters:
    """Counts of one process since they were last taken. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, count: float = 1, reason: str = "") -> None:
        """Count, under a reason if there is one."""
        with self._lock:
            self._counts[f"{name}:{reason}" if reason else name] += count

    def take(self) -> dict[str, float]:
        """What was counted since the last call, by name or ``name:reason``."""
        with self._lock:
            taken = dict(self._counts)
            self._counts.clear()
        return taken
