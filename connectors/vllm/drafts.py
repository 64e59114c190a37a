"""Models of drafts: with which of them an engine may guess tokens, and what of a block is theirs.

vLLM gives the layers of such a model places in the blocks of the model that it guesses for, so that a block holds both.
What is guessed is checked by the model: what lies in a draft's layers decides how many guesses are right, and never
which tokens come out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.model_executor.models.utils import extract_layer_index

from forebay.connectors.vllm.groups import CacheGroups
from forebay.connectors.vllm.refusals import need
from forebay.connectors.vllm.settings import Settings

__all__ = ["check_drafts", "check_method", "has_drafts", "layer_number", "redrafted"]

_METHODS = ("draft_model", "eagle", "eagle3")
_WITHOUT_LAYERS = ("ngram",)
"""What n-grams guess needs no cache."""
_PREFIX = "draft_model."
"""How vLLM names the layers of ``draft_model``, which it counts from 0; those of the others go on after the model's."""
_need = partial(need, field="speculative_config")


def has_drafts(config: Any) -> bool:
    """Whether blocks of this engine hold layers of a model of drafts."""
    guesses = config.speculative_config
    return guesses is not None and guesses.method not in _WITHOUT_LAYERS


def redrafted(config: Any) -> bool:
    """Whether the engine computes the last block of a prefix that it finds anew, for what a draft's layers hold of it.

    Of EAGLE a layer's KV at a token comes of the token after it too: at a block's last token its key does not say it.
    """
    return has_drafts(config) and bool(config.speculative_config.use_eagle_block_drop())


def check_method(config: Any) -> None:
    """Refuse ways to guess tokens that this connector was not tried with. Raises `ConfigInvalid`."""
    guesses = config.speculative_config
    known = (*_WITHOUT_LAYERS, *_METHODS)
    _need(
        guesses is None or guesses.method in known,
        f"speculative decoding by {getattr(guesses, 'method', None)!r} (it does {', '.join(known)})",
    )


def check_drafts(config: Any, groups: CacheGroups, settings: Settings | None) -> None:
    """Refuse drafts of which a block would not hold what its schema says. Raises `ConfigInvalid`."""
    if not has_drafts(config):
        return
    guesses, parallel = config.speculative_config, config.parallel_config
    _need(groups.plain, "a model of drafts beside windows, states or several KV cache groups")
    # The layers of a draft call back several times in a step.
    _need(
        settings is None or (settings.layer_groups == 1 and settings.load == "async"),
        "load=layers or layer_groups with a model of drafts",
        field="layer_groups",
    )
    _need(settings is None or not settings.multimodal, "multimodal with a model of drafts", field="multimodal")
    _need(not guesses.use_heterogeneous_vocab, "drafts in another vocabulary (use_heterogeneous_vocab)")
    _need(not guesses.parallel_drafting, "parallel drafting")
    draft, model = guesses.draft_model_config, config.model_config
    # A block's tiles are cut by the heads of the model: with other numbers a rank would hold other parts of a draft's.
    _need(
        guesses.draft_parallel_config.tensor_parallel_size == parallel.tensor_parallel_size,
        "a draft_tensor_parallel_size that is not tensor_parallel_size",
    )
    _need(
        draft.get_total_num_kv_heads() == model.get_total_num_kv_heads(),
        f"a model of drafts with {draft.get_total_num_kv_heads()} KV heads beside one with "
        f"{model.get_total_num_kv_heads()}",
    )
    # Steps with a longer request go without drafts, and leave in the draft's layers whatever was there.
    _need(
        draft.max_model_len >= model.max_model_len,
        f"a model of drafts for {draft.max_model_len} tokens beside one for {model.max_model_len} (--max-model-len)",
    )


def layer_number(config: Any, name: str) -> int:
    """The number of a layer, where those of a draft come after those of the model."""
    number = int(extract_layer_index(name))
    if has_drafts(config) and name.startswith(_PREFIX):
        number += int(config.model_config.get_total_num_hidden_layers())
    return number
