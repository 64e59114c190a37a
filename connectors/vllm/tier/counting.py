"""What the tier counts, beside what vLLM counts of every tier (``vllm:kv_offload_tiering_…``)."""

from __future__ import annotations

__all__ = ["TIER_METRICS"]

TIER_METRICS = {
    "hit_blocks": "Chunks that were not in the host pool, and that the node has.",
    "missed_blocks": "Chunks that were asked for and are not to be had from the node, by reason.",
    "decisions": "Requests of which the node has something, by what the guard decided.",
    "loaded_blocks": "Chunks read from the node into the host pool.",
    "loaded_bytes": "Bytes read from the node into the host pool.",
    "load_seconds": "Time that load jobs took, each from when it was submitted to its end.",
    "lost_blocks": "Chunks that the node had and that could not be loaded, by reason.",
    "stored_blocks": "Chunks stored at the node.",
    "stored_bytes": "Bytes stored at the node.",
    "present_blocks": "Chunks that were not stored since somebody else had done so.",
    "unstored_blocks": "Chunks that could not be stored, by reason.",
}
"""What is counted: name and meaning. Each may have a reason."""
