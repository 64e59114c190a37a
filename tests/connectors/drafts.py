"""Models of drafts for the tests, and what the connector says to others."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from forebay.connectors.vllm.drafts import check_drafts
from forebay.connectors.vllm.settings import Settings
from forebay.connectors.vllm.specs import cache_groups
from forebay.errors import ConfigInvalid
from tests.connectors.engine import SMALL_MODEL, VOCABULARY, changed


def make_draft(directory: Path, model: Path, method: str, seed: int) -> None:
    """A model of drafts for ``model``: the same with some noise, which guesses well; or random layers of EAGLE."""
    directory.mkdir()
    random = torch.Generator().manual_seed(seed)
    config = json.loads((model / "config.json").read_text())
    if method == "draft_model":
        tensors = load_file(model / "model.safetensors")
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                tensors[name] = tensor + 0.1 * tensor.std() * torch.randn(tensor.shape, generator=random)
    else:
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, max_position_embeddings=4096, **{**SMALL_MODEL, "num_hidden_layers": 1}
        ).to_dict()
        three = method == "eagle3"
        config["architectures"] = ["LlamaForCausalLMEagle3" if three else "LlamaForCausalLM"]
        hidden, between = int(SMALL_MODEL["hidden_size"]), int(SMALL_MODEL["intermediate_size"])
        shapes = {
            "self_attn.q_proj": (hidden, hidden * (1 + three)),
            "self_attn.k_proj": (hidden // 2, hidden * (1 + three)),
            "self_attn.v_proj": (hidden // 2, hidden * (1 + three)),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (between, hidden),
            "mlp.up_proj": (between, hidden),
            "mlp.down_proj": (hidden, between),
        }
        layer = "midlayer." if three else "layers.0."
        tensors = {f"{layer}{name}.weight": 0.2 * torch.randn(*s, generator=random) for name, s in shapes.items()}
        tensors["fc.weight"] = 0.2 * torch.randn(hidden, hidden * (2 + three), generator=random)
        norms = [f"{layer}post_attention_layernorm"]
        if three:
            config |= {"draft_vocab_size": VOCABULARY, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
            tensors["lm_head.weight"] = 0.2 * torch.randn(VOCABULARY, hidden, generator=random)
            norms += [f"{layer}hidden_norm", f"{layer}input_layernorm", "norm"]
        tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")


def refused(config: Any, kv_cache: Any) -> dict[str, str]:
    """What the connector says to an engine's configuration with one thing of its model of drafts changed."""
    groups = cache_groups(config, kv_cache)
    guesses, two = config.speculative_config, SimpleNamespace(tensor_parallel_size=2)
    heads = changed(guesses.draft_model_config, get_total_num_kv_heads=lambda: 1)
    shorter = changed(guesses.draft_model_config, max_model_len=config.model_config.max_model_len - 1)
    found: dict[str, str] = {}
    for case, name, value, settings in (
        ("vocabulary", "use_heterogeneous_vocab", True, Settings()),
        ("parallel", "parallel_drafting", True, Settings()),
        ("ranks", "draft_parallel_config", two, Settings()),
        ("heads", "draft_model_config", heads, Settings()),
        ("shorter", "draft_model_config", shorter, Settings()),
        ("layers", "method", guesses.method, Settings(load="layers")),
        ("images", "method", guesses.method, Settings(multimodal=True)),
        ("layer groups", "method", guesses.method, Settings(layer_groups=2)),
    ):
        other = changed(config, speculative_config=changed(guesses, **{name: value}))
        try:
            check_drafts(other, groups, settings)
        except ConfigInvalid as e:
            found[case] = str(e)
    return found
