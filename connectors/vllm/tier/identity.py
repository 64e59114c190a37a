"""Who may share a tier's blocks: vLLM's configuration, which tiers are not given, and the layout of its host pool."""

from __future__ import annotations

import sys
from functools import partial
from types import FrameType
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from forebay.connectors.vllm.identity import check_supported, engine_schema
from forebay.connectors.vllm.refusals import need
from forebay.connectors.vllm.settings import Settings
from forebay.errors import ConfigInvalid
from forebay.schema import Group, Schema

__all__ = ["configuration_of", "tier_group", "tier_schema"]

_need = partial(need, part="tier")


def configuration_of(engine_id: str) -> tuple[Any, Any]:
    """VLLM's `VllmConfig` and `KVCacheConfig` of the engine whose connector is being made further up in the calls.

    vLLM makes a tier inside of the constructor of a connector, and tells it neither. Raises `ConfigInvalid` where there
    is no such connector, or it is of another engine.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, KVConnectorBase_V1):
            config = owner._vllm_config
            if config.kv_transfer_config.engine_id == engine_id:
                return config, owner._kv_cache_config
        frame = frame.f_back
    raise ConfigInvalid(
        "the tier was not made by a connector of vLLM, and cannot tell which model its blocks are of",
        field="kv_connector",
    )


def _check(config: Any, kv_cache: Any) -> None:
    """Refuse what the keys of a tier do not tell apart, and rows whose bytes are not known."""
    check_supported(config, kv_cache)
    model, parallel = config.model_config, config.parallel_config
    _need(
        parallel.world_size == 1 or (parallel.nnodes_within_dp == 1 and parallel.distributed_executor_backend == "mp"),
        "ranks that may be on several hosts: each host has a pool of its own, and the scheduler sees one",
        "distributed_executor_backend",
    )
    _need(
        config.lora_config is None,
        "LoRA: its keys hold an adapter's name and not its content; ForebayConnector does",
        "enable_lora",
    )
    text_only = model.multimodal_config is not None and model.multimodal_config.language_model_only
    _need(
        not model.is_multimodal_model or text_only,
        "images and the like: their identifiers are the users'; --language-model-only, or ForebayConnector",
        "language_model_only",
    )
    _need(not model.enable_prompt_embeds, "prompt embeddings", "enable_prompt_embeds")
    _need(config.speculative_config is None, "speculative decoding", "speculative_config")
    groups = kv_cache.kv_cache_groups
    _need(len(groups) == 1, f"models with {len(groups)} KV cache groups", "kv_cache_groups")
    spec = groups[0].kv_cache_spec
    _need(type(spec) is FullAttentionSpec, type(spec).__name__, "kv_cache_spec")
    _need(spec.kv_quant_mode == KVQuantMode.NONE, f"a {spec.kv_quant_mode.name} KV cache", "kv_cache_dtype")


def tier_group(config: Any, kv_cache: Any, offloading: Any) -> tuple[Group, list[str]]:
    """The group of blocks that are rows of the host pool, and what a user should know about it.

    ``offloading`` is vLLM's `OffloadingConfig`. Raises `ConfigInvalid` for what the tier does not support.
    """
    _check(config, kv_cache)
    (group,) = kv_cache.kv_cache_groups
    spec, ranks = group.kv_cache_spec, offloading.parallel.world_size
    names = tuple(group.layer_names)
    notes: list[str] = []
    bytes_per_head = spec.state_content_size_bytes
    page_bytes = spec.num_kv_heads * spec.block_size * bytes_per_head
    _need(
        offloading.worker_kv_bytes_per_block == page_bytes * len(names),
        "a KV cache whose blocks are packed or padded",
        "kv_cache_spec",
    )
    if ranks == 1:
        order, heads = "whole", spec.num_kv_heads
    elif offloading.canonical_layout and offloading.parallel.is_parallelism_agnostic:
        order, heads = "whole", config.model_config.get_total_num_kv_heads()
    else:
        _need(not offloading.canonical_layout, "a canonical_layout that depends on the ranks", "canonical_layout")
        order, heads = f"ranks-{ranks}", spec.num_kv_heads * ranks
        notes.append(
            f"the host pool keeps what each of {ranks} ranks holds by itself: these blocks are shared only by engines "
            f"with tensor_parallel_size={ranks}; with canonical_layout in kv_connector_extra_config every size shares"
        )
    chunk_blocks = offloading.cache.blocks_per_chunk
    parts = (order, str(offloading.kv_cache_layout), f"x{chunk_blocks}", _backend(config, names, spec))
    return (
        Group(
            kind="full",
            layers=tuple(extract_layer_index(name) for name in names),
            block_tokens=spec.block_size * chunk_blocks,
            kv_heads=heads,
            bytes_per_head=bytes_per_head,
            dtype=str(spec.dtype).removeprefix("torch."),
            format="vllm-tier/" + ":".join(parts),
        ),
        notes,
    )


def _backend(config: Any, names: tuple[str, ...], spec: Any) -> str:
    """The attention backend that orders a page's bytes, and the instruction set where it depends on it.

    Of the engine's own layers where they are in this process; where only its workers have them, as they choose it.
    """
    layer = config.compilation_config.static_forward_context.get(names[0])
    if layer is not None:
        backend, isa = layer.get_attn_backend().get_name(), getattr(layer, "isa", "")
    else:
        dtype, cache_dtype = config.model_config.dtype, config.cache_config.cache_dtype
        with set_current_vllm_config(config):
            backend = get_attn_backend(spec.head_size, dtype, cache_dtype).get_name()
        isa = _get_attn_isa(dtype, spec.block_size, spec.head_size, cache_dtype) if current_platform.is_cpu() else ""
    return ":".join(part for part in (backend.lower(), isa) if part)


def tier_schema(config: Any, kv_cache: Any, offloading: Any, settings: Settings) -> tuple[Schema, list[str]]:
    """The schema of a tier's blocks, and notes for its user. Reads all weights unless a revision is named.

    Raises `ConfigInvalid`.
    """
    group, notes = tier_group(config, kv_cache, offloading)
    schema, about_hashes = engine_schema(config, (group,), offloading.cache.tokens_per_hash, settings)
    return schema, about_hashes + notes
