"""Who may share blocks with this engine: vLLM's configuration, and what its workers hold, as a schema."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

from forebay.connectors.keys import STABLE_HASH, check_hash, model_digest, revision_digest, tiled, weights_digest
from forebay.connectors.vllm.drafts import check_drafts, check_method, has_drafts
from forebay.connectors.vllm.messages import GroupFacts, WorkerFacts
from forebay.connectors.vllm.processors import processor_digest
from forebay.connectors.vllm.refusals import need
from forebay.connectors.vllm.settings import Settings
from forebay.connectors.vllm.specs import cache_groups
from forebay.errors import ConfigInvalid
from forebay.ranks import held_tiles
from forebay.schema import Group, HashAlgorithm, Schema

__all__ = ["check_supported", "engine_schema", "schema_of"]

_PROBE_TOKENS = tuple(range(16))
_HASH_SETTING = "--prefix-caching-hash-algo"
_NOT_OF_THE_MODEL = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "max_model_len"})
"""Of a Hugging Face configuration: where it lies, who wrote it, and what is taken as it is in force."""
_TUNED_FROM_TOKENS = 32_768
"""Started for longer prompts than this, vLLM scales the attention of Llama 4."""

_AS_STORED = frozenset({"auto", "hf", "safetensors", "pt", "npcache", "dummy"})
"""Ways to load weights that give what is in the files, or in what a revision names."""


def check_supported(config: Any, kv_cache: Any, settings: Settings | None = None) -> None:
    """Refuse what would fail, or be wrong, at a later request. ``kv_cache`` is vLLM's `KVCacheConfig`.

    Raises `ConfigInvalid`, in words that say what it is about.
    """
    parallel = config.parallel_config
    role = config.kv_transfer_config.kv_role
    need(role == "kv_both", f"kv_role {role!r}: a cache is read and written, as kv_both", "kv_role")
    need(config.cache_config.enable_prefix_caching, "an engine without prefix caching", "enable_prefix_caching")
    need(parallel.pipeline_parallel_size == 1, "pipeline parallelism yet", "pipeline_parallel_size")
    need(parallel.decode_context_parallel_size == 1, "context parallelism yet", "decode_context_parallel_size")
    need(parallel.prefill_context_parallel_size == 1, "context parallelism yet", "prefill_context_parallel_size")
    check_method(config)
    groups = cache_groups(config, kv_cache)
    check_drafts(config, groups, settings)
    # A layer calls back once for each of them, at first when the tokens of the others are still to be computed.
    need(
        settings is None or settings.layer_groups == 1 or not parallel.use_ubatching,
        "layer_groups with micro-batches (--enable-dbo, --ubatch-size)",
        "layer_groups",
    )
    if settings is not None and settings.multimodal:
        _check_multimodal(config, settings)
    if settings is not None and settings.load == "layers":
        need(
            groups.plain,
            "load=layers with windows, states or several KV cache groups: vLLM could not be told of a failure in the "
            "middle of a step (load=async)",
            "load",
        )
        need(
            not config.scheduler_config.async_scheduling,
            "load=layers with asynchronous scheduling, with which vLLM delivers the tokens of a step that was "
            "scheduled after one whose load failed: start the engine with --no-async-scheduling (or with load=async)",
            "load",
        )
    check_hash(config.cache_config.prefix_caching_hash_algo, setting=_HASH_SETTING)


def _check_multimodal(config: Any, settings: Settings) -> None:
    # After a load that failed in its step vLLM 0.32 misses what it should have encoded anew, and ends.
    need(
        settings.load != "layers",
        "multimodal with load=layers, whose failures vLLM does not survive where images are to be encoded again "
        "(load=async)",
        "multimodal",
    )
    need(
        config.ec_transfer_config is None,
        "multimodal with embeddings that another engine computes (--ec-transfer-config)",
        "multimodal",
    )
    media = config.model_config.multimodal_config
    # The tokens behind a pruned video have positions that come with its embeddings, which a hit has no use for.
    need(
        media is None or not media.is_multimodal_pruning_enabled(),
        "multimodal with pruned videos (--video-pruning-rate)",
        "multimodal",
    )


def schema_of(config: Any, facts: WorkerFacts, settings: Settings) -> tuple[Schema, list[str]]:
    """The schema of an engine, and what its user should know about it.

    Reads all weights unless a revision is named. Raises `ConfigInvalid`, and `GridInvalid` where
    ranks hold parts of heads.
    """
    notes = []
    ranks = config.parallel_config.tensor_parallel_size
    largest = max(settings.max_tensor_parallel, ranks)
    if largest > settings.max_tensor_parallel:
        notes.append(
            f"this engine has more ranks than max_tensor_parallel ({settings.max_tensor_parallel}): it shares blocks "
            f"only with engines that have max_tensor_parallel={ranks}"
        )
    heads = config.model_config.get_total_num_kv_heads()
    groups = tuple([_group(held, heads, ranks, largest, settings.layer_groups) for held in facts.groups])
    if ranks > 1 and any(group.kind == "mamba" for group in groups):
        notes.append(
            f"states of this model are cut by {ranks} ranks in a way that no other number of ranks can read: blocks "
            f"are shared only with engines of tensor_parallel_size={ranks}"
        )
    schema, about_hashes = engine_schema(config, groups, facts.hash_tokens, settings)
    return schema, about_hashes + notes


def _group(held: GroupFacts, heads: int, ranks: int, largest: int, layer_groups: int) -> Group:
    """A group of the schema from what a rank holds of it. Raises `GridInvalid`, and `ConfigInvalid`."""
    if held.cache.kind == "mamba":
        heads = ranks  # each rank's part of a state is one tile
    elif max(1, heads // ranks) != held.heads:  # these layers have heads of their own number
        if held.heads == 1 and ranks > 1:
            raise ConfigInvalid(
                f"one KV head a rank of {heads} in layers with fewer: how many there are cannot be told",
                field="tensor_parallel_size",
            )
        heads = held.heads * ranks
    group = Group(
        kind=held.cache.kind,
        layers=held.layers,
        block_tokens=held.cache.block_tokens,
        kv_heads=heads,
        bytes_per_head=held.bytes_per_head,
        dtype=held.dtype,
        format=held.format,
        required=held.cache.required,
    )
    if held.cache.kind == "mamba":
        return replace(group, head_groups=ranks)
    group = tiled(group, max_ranks=largest, layer_groups=layer_groups)
    held_tiles(group, 0, ranks)
    return group


def engine_schema(
    config: Any, groups: tuple[Group, ...], hash_tokens: int, settings: Settings
) -> tuple[Schema, list[str]]:
    """The schema of blocks laid out as ``groups`` that an engine hashes by ``hash_tokens`` tokens, and notes on it.

    Reads all weights unless a revision is named. Raises `ConfigInvalid`.
    """
    note = check_hash(
        config.cache_config.prefix_caching_hash_algo, setting=_HASH_SETTING, seed=os.environ.get("PYTHONHASHSEED")
    )
    schema = Schema(
        engine="vllm",
        model=model_digest(_weights(config, settings.revision), _facts(config)),
        hash=HashAlgorithm(STABLE_HASH, hash_tokens),
        groups=groups,
        probe=_probe(),
        draft=_draft(config, settings),
        processor=processor_digest(config) if settings.multimodal else b"",
    )
    return schema, [] if note is None else [note]


def _draft(config: Any, settings: Settings) -> bytes:
    """The digest of the model of drafts; empty where blocks hold no layers of one.

    How many tokens it guesses at a time is not in it: the first of its passes computes all that is accepted anew.
    """
    if not has_drafts(config):
        return b""
    guesses = config.speculative_config
    draft = SimpleNamespace(
        model_config=guesses.draft_model_config,
        load_config=guesses.draft_load_config or config.load_config,
        lora_config=None,
        cache_config=config.cache_config,
    )
    facts = {**_facts(draft), "method": guesses.method, "layers": draft.model_config.get_total_num_hidden_layers()}
    return model_digest(_weights(draft, settings.draft_revision, "draft_revision"), facts)


def _weights(config: Any, revision: str, field: str = "revision") -> bytes:
    """Of the model of ``config``. The setting ``field`` is what names a ``revision``."""
    if revision:
        return revision_digest(revision)
    load_format = str(config.load_config.load_format)
    if load_format == "dummy":
        raise ConfigInvalid(f"load_format=dummy makes weights that no file tells apart: name a {field}", field=field)
    directory = Path(config.model_config.model)
    if not directory.is_dir():
        raise ConfigInvalid(
            f"the weights of {config.model_config.model!r} are not in a local directory: name a {field}, such as "
            "the model's name and commit",
            field=field,
        )
    return weights_digest(directory)


def _facts(config: Any) -> dict[str, object]:
    """What is done to the weights, in plain values."""
    model = config.model_config
    effective = _of_the_model(model.hf_config.to_dict())
    _as_tuned(model, effective)
    text = _text(effective)
    # vLLM takes the factors for long prompts, or those for short ones, by the longest that it was started for.
    longest = model.max_model_len if any(word in text for word in ('"longrope"', '"su"', '"dynamic"')) else 0
    code = [model.model_impl, model.model_class_overrides]
    usual = model.model_impl in ("auto", "vllm") and not model.model_class_overrides
    load, lora = config.load_config, config.lora_config
    as_stored = str(load.load_format) in _AS_STORED and not load.model_loader_extra_config
    lora_dtype = model.dtype if lora is None or lora.lora_dtype == "auto" else lora.lora_dtype
    modules = None if lora is None else lora.target_modules
    return {
        "config": text,
        "longest": longest,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization or ""),
        "quantization_config": _text(model.quantization_config),
        "loader": "" if as_stored else _text([str(load.load_format), load.model_loader_extra_config]),
        "implementation": "" if usual else _text(code),
        "lora_dtype": "" if lora_dtype == model.dtype else str(lora_dtype),
        "lora_modules": "" if modules is None else _text(sorted(modules)),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
    }


def _of_the_model(values: dict[str, Any]) -> dict[str, Any]:
    """Of a configuration what makes the model; EAGLE's has that of its layers in it once more, as ``model``."""
    kept = {k: v for k, v in values.items() if k not in _NOT_OF_THE_MODEL}
    if isinstance(inner := kept.get("model"), dict):
        kept["model"] = _of_the_model(inner)
    return kept


def _as_tuned(model: Any, effective: dict[str, Any]) -> None:
    """Note how vLLM scales Llama 4's attention, and so what its layers compute, whatever its configuration says.

    vLLM writes it into the configuration when it loads the model, which may be in another process.
    """
    for part in (effective, effective.get("text_config")):
        if isinstance(part, dict) and part.get("model_type") == "llama4_text":
            said = {**model.try_get_generation_config(), **model.override_generation_config}
            tuned = said.get("attn_temperature_tuning", model.max_model_len > _TUNED_FROM_TOKENS)
            part["attn_temperature_tuning"] = bool(tuned)


def _text(value: object) -> str:
    """As JSON, since it may hold types of a library."""
    return json.dumps(value, sort_keys=True, default=str)


def _probe() -> bytes:
    """The engine's own hash of a fixed block: another seed or another way to hash gives another one."""
    function = get_hash_fn_by_name(STABLE_HASH)
    init_none_hash(function)
    return bytes(hash_block_tokens(function, None, _PROBE_TOKENS))
