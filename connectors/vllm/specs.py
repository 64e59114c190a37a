"""vLLM's KV cache specifications, and the tensors made by them, as groups of a schema; refuses what is not known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
)

from forebay.connectors.vllm.drafts import layer_number, redrafted
from forebay.connectors.vllm.groups import CacheGroup, CacheGroups
from forebay.connectors.vllm.messages import GroupFacts, WorkerFacts
from forebay.connectors.vllm.refusals import unsupported
from forebay.errors import ConfigInvalid

__all__ = ["cache_groups", "held_caches"]

_unsupported = partial(unsupported, field="kv_cache_spec")


def cache_groups(config: Any, kv_cache: Any) -> CacheGroups:
    """The groups of an engine, from vLLM's `VllmConfig` and `KVCacheConfig`, by vLLM's numbers.

    Raises `ConfigInvalid` for kinds that this connector does not know, in words that say what it is about.
    """
    _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache, config)
    groups = []
    for group in kv_cache.kv_cache_groups:
        if not group.enable_kv_transfer or group.host_resident or group.is_eagle_group:
            raise _unsupported("a KV cache group that is rebuilt, kept on the host or of a draft model")
        groups.append(_cache_group(group.kv_cache_spec))
    for cache in groups:
        if cache.block_tokens % hash_tokens:
            raise _unsupported(
                f"blocks of {cache.block_tokens} tokens over hashes of {hash_tokens}", field="block_size"
            )
    return CacheGroups(tuple(groups), hash_tokens, redrafted(config))


def _cache_group(spec: Any) -> CacheGroup:
    """One specification. Subclasses (MLA, sinks, compressed windows) are other kinds, and not taken for their bases."""
    if type(spec) is MambaSpec:
        if spec.mamba_cache_mode != "align":
            raise _unsupported(
                f"a state space model whose states are kept in mode {spec.mamba_cache_mode!r}: the engine says which "
                "block holds which state in mode 'align' only (--mamba-cache-mode align)",
                field="mamba_cache_mode",
            )
        if spec.num_speculative_blocks:
            raise _unsupported("a state space model with speculative decoding", field="speculative_config")
        return CacheGroup("mamba", spec.block_size)
    if type(spec).__name__ == "UniformTypeKVCacheSpecs":
        raise _unsupported(
            "layers of several sizes in one KV cache group, as with drafts of other heads than the model's"
        )
    if type(spec) not in (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec):
        raise _unsupported(f"{type(spec).__name__} yet")
    if spec.kv_quant_mode not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR):
        raise _unsupported(
            f"a {spec.kv_quant_mode.name} KV cache, whose scales are beside its blocks", field="kv_cache_dtype"
        )
    if spec.num_heads != spec.num_kv_heads or spec.state_content_bytes is not None or spec.tokens_per_state != 1:
        raise _unsupported("a KV cache whose blocks are packed")
    if type(spec) is SlidingWindowSpec:
        if spec.extra_retained_tokens:
            raise _unsupported("a sliding window that keeps tokens for drafts", field="speculative_config")
        return CacheGroup("sliding", spec.block_size, spec.sliding_window)
    if type(spec) is ChunkedLocalAttentionSpec:
        return CacheGroup("chunked", spec.block_size, spec.attention_chunk_size)
    return CacheGroup("full", spec.block_size)


def held_caches(
    config: Any, kv_cache: Any, kv_caches: Mapping[str, Any]
) -> tuple[Sequence[Sequence[Any]], WorkerFacts, Sequence[Sequence[str]]]:
    """What a worker holds: of each group the layers' tensors ``[blocks, heads, …]``; what they are, and their names.

    Raises `ConfigInvalid` for tensors of other shapes than are known.
    """
    groups = cache_groups(config, kv_cache)
    caches: list[Sequence[Any]] = []
    facts: list[GroupFacts] = []
    named: list[Sequence[str]] = []
    for group, cache in zip(kv_cache.kv_cache_groups, groups.groups, strict=True):
        names = sorted(group.layer_names, key=partial(layer_number, config))
        layers = [config.compilation_config.static_forward_context[name] for name in names]
        make = _states if cache.kind == "mamba" else _attention
        tensors, about = make(group.kv_cache_spec, kv_cache.num_blocks, {name: kv_caches[name] for name in names})
        caches.append(tensors)
        named.append(names)
        indices = tuple([layer_number(config, name) for name in names])
        heads, bytes_per_head, dtype, details = about
        if cache.kind != "mamba" and group.kv_cache_spec.kv_quant_mode == KVQuantMode.FP8_PER_TENSOR:
            dtype = _eight_bits(config.cache_config.cache_dtype)
        orders = {_order(layer) for layer in layers}
        if len(orders) > 1:
            raise _unsupported(
                "layers of one KV cache group with several attention backends", field="attention_backend"
            )
        backend, isa = orders.pop()
        parts = ["vllm/" + backend, *details, *([isa] if isa else [])]
        facts.append(GroupFacts(cache, indices, heads, bytes_per_head, dtype, ":".join(parts)))
    return caches, WorkerFacts(tuple(facts), groups.hash_tokens), named


def _order(layer: Any) -> tuple[str, str]:
    """What orders a layer's bytes: CPU attention orders the keys of a block as its instructions like them."""
    return layer.get_attn_backend().get_name().lower(), getattr(layer, "isa", "")


_About = tuple[int, int, str, list[str]]
"""Heads, bytes of each, type, and what else makes the order of bytes."""


def _attention(spec: Any, blocks: int, kv_caches: Mapping[str, Any]) -> tuple[list[Any], _About]:
    """Tensors ``[blocks, heads, tokens, content]``; the backend's smaller blocks are an axis before the tokens."""
    tensors, details = [], []
    for name, cache in kv_caches.items():
        # The backend may like smaller blocks than the scheduler's: a whole number of them, one after the other.
        split, rest = divmod(cache.shape[0], blocks)
        known = (blocks * split, spec.num_kv_heads, spec.block_size // max(1, split))
        if cache.ndim != 4 or rest or tuple(cache.shape[:3]) != known or cache.stride(3) != 1:
            raise _unknown(name, cache, (blocks, spec.num_kv_heads, spec.block_size, "content"))
        if split > 1:
            details = [f"by{known[2]}"]
        tensors.append(cache.unflatten(0, (blocks, split)).transpose(1, 2) if split > 1 else cache)
    first = next(iter(kv_caches.values()))
    return tensors, (spec.num_kv_heads, first.shape[3] * first.element_size(), _type(first.dtype), details)


def _states(spec: Any, blocks: int, kv_caches: Mapping[str, Any]) -> tuple[list[Any], _About]:
    """Tensors ``[blocks, 1, 1, content]``: all of a layer's states one after the other."""
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
    for name, cache in kv_caches.items():
        if tuple(cache.shape) != (blocks, 1, 1, size // cache.element_size()) or cache.stride(3) != 1:
            raise _unknown(name, cache, (blocks, 1, 1, f"{size} bytes"))
    shapes = ["x".join(str(axis) for axis in shape) for shape in spec.shapes]
    return list(kv_caches.values()), (1, size, "+".join(_type(dtype) for dtype in spec.dtypes), shapes)


def _eight_bits(cache_dtype: str) -> str:
    """What the bytes are, which the tensors do not say. Scales, one a layer, are of the weights."""
    if cache_dtype == "fp8_e5m2":
        return "float8_e5m2"
    if cache_dtype in ("fp8", "fp8_e4m3"):
        return _type(current_platform.fp8_dtype())
    raise _unsupported(f"a KV cache of type {cache_dtype} yet", field="kv_cache_dtype")


def _type(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _unknown(name: str, cache: Any, known: tuple[object, ...]) -> ConfigInvalid:
    return ConfigInvalid(
        f"the KV cache of {name} is {tuple(cache.shape)} with strides {cache.stride()}, and this connector knows "
        f"{known} with the content contiguous",
        field="kv_cache_layout",
    )
