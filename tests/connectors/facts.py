"""What of a configuration makes another keyspace: `python -m tests.connectors.facts`, where vLLM is installed.

Prints a JSON object: for each change of a plain configuration, whether its model digest is another one.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config.quantization import QuantizationConfigArgs

from forebay.connectors.vllm.groups import CacheGroup
from forebay.connectors.vllm.identity import schema_of
from forebay.connectors.vllm.messages import GroupFacts, WorkerFacts
from forebay.connectors.vllm.settings import Settings

FACTS = WorkerFacts((GroupFacts(CacheGroup("full", 16), (0, 1), 2, 64, "float32", "test"),), 16)
SETTINGS = Settings(revision="test")


class HfConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


PLAIN = SimpleNamespace(
    cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256_cbor", cache_dtype="auto"),
    parallel_config=SimpleNamespace(tensor_parallel_size=1),
    load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}),
    lora_config=None,
    model_config=SimpleNamespace(
        model="/model",
        hf_config=HfConfig(rope_theta=1e6, _name_or_path="/model"),
        max_model_len=1024,
        model_impl="auto",
        model_class_overrides={},
        try_get_generation_config=dict,
        override_generation_config={},
        dtype=torch.bfloat16,
        quantization=None,
        quantization_config=None,
        get_total_num_kv_heads=lambda: 2,
    ),
)
CHANGES: dict[str, Any] = {
    "model_config.hf_config.rope_theta": 1e4,
    "model_config.dtype": torch.float16,
    "model_config.quantization": "fp8",
    "model_config.quantization_config": QuantizationConfigArgs(ignore=["lm_head"]),
    "load_config.load_format": "bitsandbytes",
    "load_config.model_loader_extra_config": {"tensorizer_uri": "s3://elsewhere"},
    "lora_config": SimpleNamespace(lora_dtype=torch.float32, target_modules=None),
    "model_config.model_impl": "transformers",
    "model_config.model_class_overrides": {"TestForCausalLM": "elsewhere:OfAnother"},
}
THE_SAME: dict[str, Any] = {
    "model_config.hf_config._name_or_path": "/elsewhere",
    "model_config.max_model_len": 2048,
    "model_config.model": Path("/elsewhere"),
    "load_config.load_format": "safetensors",
    "lora_config": SimpleNamespace(lora_dtype="auto", target_modules=None),
}
HF_CONFIG, LONGEST = "model_config.hf_config", "model_config.max_model_len"
LLAMA_4 = HfConfig(text_config={"model_type": "llama4_text", "attn_temperature_tuning": True})
LLAMA_4_LOADED = HfConfig(text_config={"model_type": "llama4_text", "attn_temperature_tuning": False})
"""As vLLM has it once it has loaded the model for short prompts."""
LLAMA_4_SAID = {"model_config.override_generation_config": {"attn_temperature_tuning": True}}
MINIMAX, MINIMAX_LOADED = HfConfig(model_type="minimax_m2"), HfConfig(model_type="minimax_m2", max_model_len=1024)


def pairs() -> dict[str, tuple[dict[str, Any], dict[str, Any], bool]]:
    """Pairs of configurations, and whether they are in one keyspace."""
    llama, dynamic = {HF_CONFIG: LLAMA_4}, {HF_CONFIG: HfConfig(rope_scaling={"type": "dynamic"})}
    modules = {"lora_config": SimpleNamespace(lora_dtype="auto", target_modules=["v_proj"])}
    return {
        "adapters of some modules": ({}, modules, False),
        "Llama 4 with long prompts": (llama, {**llama, LONGEST: 65_536}, False),
        "Llama 4 with short prompts": (llama, {**llama, LONGEST: 2048}, True),
        "Llama 4 as it was told": ({**llama, LONGEST: 65_536}, {**llama, **LLAMA_4_SAID}, True),
        "Llama 4 in the process that loaded it": (llama, {HF_CONFIG: LLAMA_4_LOADED}, True),
        "MiniMax in the process that loaded it": ({HF_CONFIG: MINIMAX}, {HF_CONFIG: MINIMAX_LOADED}, True),
        "positions scaled by the longest prompt": (dynamic, {**dynamic, LONGEST: 65_536}, False),
    }


def keyspace(changes: dict[str, Any]) -> bytes:
    """Of the plain configuration with some things changed."""
    config = copy.deepcopy(PLAIN)
    for path, value in copy.deepcopy(changes).items():
        *owners, name = path.split(".")
        owner: Any = config
        for each in owners:
            owner = getattr(owner, each)
        setattr(owner, name, value)
    return schema_of(config, FACTS, SETTINGS)[0].keyspace


def main() -> None:
    plain = keyspace({})
    changed = {path: keyspace({path: value}) != plain for path, value in CHANGES.items()}
    same = {path: keyspace({path: value}) == plain for path, value in THE_SAME.items()}
    for name, (one, other, alike) in pairs().items():
        found = keyspace(one) == keyspace(other)
        (same if alike else changed)[name] = found if alike else not found
    print(json.dumps({"changed": changed, "same": same}))


if __name__ == "__main__":
    main()
