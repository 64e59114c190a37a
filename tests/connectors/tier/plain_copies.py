"""For tests only: vLLM's tiering spec on a CPU, which it refuses, with plain copies in place of those of a GPU.

``spec_name`` is PlainCopyTieringSpec, ``spec_module_path`` this module. Everything but the copies between the KV cache
and the host pool is vLLM's own: the connector, its scheduler, the pool in shared memory and the order of its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["PlainCopyTieringSpec"]


class PlainCopyTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """Copies are made when they are asked for, and are over then."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        canonical = self.config.canonical_layout
        if canonical:
            self._validate_canonical_refs(kv_caches)
        rank = 0 if self.replicated_layout else self.config.parallel.rank
        region = SharedOffloadRegion(
            self._engine_id, self.num_chunks, rank, self.kv_bytes_per_chunk, self.cpu_page_size_per_worker
        )
        return PlainCopies(kv_caches, region, self.blocks_per_chunk, canonical)


class PlainCopies(OffloadingWorker):  # type: ignore[misc]
    """A worker of one rank. Pages are bytes, ``[blocks, page]`` in the KV cache and ``[chunks, pages]`` in the pool."""

    def __init__(self, kv_caches: Any, region: Any, chunk_blocks: int, canonical: bool) -> None:
        self._region = region
        self._chunk_blocks = chunk_blocks
        self._canonical = canonical
        self._groups = kv_caches.group_data_refs
        self._pages = [each.tensor.numpy().view(np.uint8) for each in kv_caches.tensors]
        self._rows = []
        for number, each in enumerate(kv_caches.tensors):
            if canonical:
                refs = [ref for group in self._groups for ref in group if ref.tensor_idx == number]
                size = max(ref.mapping.canonical_page_size_bytes for ref in refs)
                view = region.create_next_canonical_view(size * chunk_blocks)
            else:
                view = region.create_next_worker_view(each.page_size_bytes * chunk_blocks)
            self._rows.append(view.numpy().view(np.uint8))
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for ref, block, chunk, place in self._pairs(src_spec, dst_spec):
            if self._canonical and not ref.mapping.is_writer(chunk * self._chunk_blocks + place):
                continue
            for there, here in self._slices(ref, block, chunk, place):
                there[...] = here
        self._ended.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for ref, block, chunk, place in self._pairs(dst_spec, src_spec):
            for there, here in self._slices(ref, block, chunk, place):
                here[...] = there
        self._ended.append(TransferResult(job_id, True))
        return True

    def _pairs(self, cache_spec: Any, pool_spec: Any) -> Iterator[tuple[Any, int, int, int]]:
        """Each layer's page of each block: its reference, the block, the chunk, and which of the chunk's blocks."""
        blocks, chunks = iter(cache_spec.block_ids.tolist()), pool_spec.block_ids.tolist()
        used = 0
        for refs, count, first in zip(self._groups, cache_spec.group_sizes, cache_spec.block_indices, strict=True):
            if not count:
                continue
            skipped = first % self._chunk_blocks
            for number in range(skipped, skipped + count):
                chunk, place = divmod(number, self._chunk_blocks)
                block = next(blocks)
                for ref in refs:
                    yield ref, block, chunks[used + chunk], place
            used += -(-(skipped + count) // self._chunk_blocks)

    def _slices(self, ref: Any, block: int, chunk: int, place: int) -> Iterator[tuple[Any, Any]]:
        """The same bytes in the pool and in the KV cache."""
        page, row = self._pages[ref.tensor_idx][block], self._rows[ref.tensor_idx][chunk]
        size = len(row) // self._chunk_blocks
        cell = row[place * size : (place + 1) * size]
        if not self._canonical:
            yield cell[: ref.page_size_bytes], page[: ref.page_size_bytes]
            return
        for run in ref.mapping.runs:
            for i in range(run.num_fragments):
                there = run.canonical_offset + i * run.canonical_stride
                here = run.local_offset + i * run.local_stride
                yield cell[there : there + run.fragment_size], page[here : here + run.fragment_size]

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        self._pages.clear()
        self._rows.clear()
        self._region.cleanup()
