"""What of a configuration makes another keyspace: `python -m tests.connectors.facts`, where vLLM is installed.

Prints a JSON object: for each change of a plain configuration, whether its model digest is another one.
"""

from __future__ import annotations

import copy
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config.multimodal import MultiModalConfig
from vllm.config.quantization import QuantizationConfigArgs

from forebay.connectors.vllm.groups import CacheGroup
from forebay.connectors.vllm.identity import schema_of
from forebay.connectors.vllm.messages import GroupFacts, WorkerFacts
from forebay.connectors.vllm.settings import Settings

FACTS = WorkerFacts((GroupFacts(CacheGroup("full", 16), (0, 1), 2, 64, "float32", "test"),), 16)
SETTINGS = Settings(revision="test", draft_revision="drafts")
SEEING = Settings(revision="test", multimodal=True)


class HfConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


PLAIN = SimpleNamespace(
    cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256_cbor", cache_dtype="auto"),
    parallel_config=SimpleNamespace(tensor_parallel_size=1),
    load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}),
    lora_config=None,
    speculative_config=None,
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
        multimodal_config=None,
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


def drafts(changes: dict[str, Any] | None = None, **guessing: Any) -> dict[str, Any]:
    """A configuration with a model of drafts, some things of which, or of how it guesses, are others."""
    model = copy.deepcopy(PLAIN.model_config)
    model.get_total_num_hidden_layers = lambda: 1
    for name, value in (changes or {}).items():
        setattr(model, name, value)
    usual = {"method": "eagle", "draft_load_config": None, "num_speculative_tokens": 3}
    return {"speculative_config": SimpleNamespace(draft_model_config=model, **{**usual, **guessing})}


def pairs() -> dict[str, tuple[dict[str, Any], dict[str, Any], bool]]:
    """Pairs of configurations, and whether they are in one keyspace."""
    llama, dynamic = {HF_CONFIG: LLAMA_4}, {HF_CONFIG: HfConfig(rope_scaling={"type": "dynamic"})}
    modules = {"lora_config": SimpleNamespace(lora_dtype="auto", target_modules=["v_proj"])}
    eagle, inside = drafts(), {"_name_or_path": "/elsewhere", "heads": 2}
    return {
        "a model of drafts": ({}, eagle, False),
        "n-grams": ({}, {"speculative_config": SimpleNamespace(method="ngram")}, True),
        "another way to guess with it": (eagle, drafts(method="eagle3"), False),
        "another number of guesses": (eagle, drafts(num_speculative_tokens=5), True),
        "another configuration of drafts": (eagle, drafts({"hf_config": HfConfig(rope_theta=1e4)}), False),
        "drafts in other numbers": (eagle, drafts({"dtype": torch.float16}), False),
        "more layers of drafts": (eagle, drafts({"get_total_num_hidden_layers": lambda: 2}), False),
        "drafts that lie elsewhere": (
            drafts({"hf_config": HfConfig(model=inside)}),
            drafts({"hf_config": HfConfig(model={**inside, "_name_or_path": "/model"})}),
            True,
        ),
        "adapters of some modules": ({}, modules, False),
        "Llama 4 with long prompts": (llama, {**llama, LONGEST: 65_536}, False),
        "Llama 4 with short prompts": (llama, {**llama, LONGEST: 2048}, True),
        "Llama 4 as it was told": ({**llama, LONGEST: 65_536}, {**llama, **LLAMA_4_SAID}, True),
        "Llama 4 in the process that loaded it": (llama, {HF_CONFIG: LLAMA_4_LOADED}, True),
        "MiniMax in the process that loaded it": ({HF_CONFIG: MINIMAX}, {HF_CONFIG: MINIMAX_LOADED}, True),
        "positions scaled by the longest prompt": (dynamic, {**dynamic, LONGEST: 65_536}, False),
    }


def seeing(directory: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any], bool]]:
    """The same for engines that keep what they see, of models below ``directory``."""

    def model(name: str, text: str, **media: Any) -> dict[str, Any]:
        folder = directory / name
        folder.mkdir(exist_ok=True)
        (folder / "preprocessor_config.json").write_text(text)
        for of_others in ("config.json", "tokenizer_config.json", "model.safetensors.index.json"):
            (folder / of_others).write_text(name)
        return {"model_config.model": str(folder), "model_config.multimodal_config": MultiModalConfig(**media)}

    def eight(name: str, scales: str) -> dict[str, Any]:
        path = directory / name / "scales"
        path.parent.mkdir()
        path.write_text(scales)
        return model(name, "{}", mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(path))

    plain, once = model("plain", "{}"), eight("once", "1.0")
    return {
        "the same files elsewhere": (plain, model("elsewhere", "{}"), True),
        "a cache of another size": (plain, model("cached", "{}", mm_processor_cache_gb=1), True),
        "the same scales elsewhere": (once, eight("twice", "1.0"), True),
        "other scales": (once, eight("thrice", "2.0"), False),
        "another file of the processor": (plain, model("smaller", '{"size": 7}'), False),
        "other arguments of the processor": (plain, model("argued", "{}", mm_processor_kwargs={"size": 7}), False),
        "media read in another way": (plain, model("read", "{}", media_io_kwargs={"video": {"fps": 1}}), False),
        "pruned videos": (plain, model("pruned", "{}", video_pruning_rate=0.5), False),
        "images made to fit other prompts": (plain, {**plain, LONGEST: 2048}, False),
        "a model of text": ({}, plain, False),
    }


def keyspace(changes: dict[str, Any], settings: Settings = SETTINGS) -> bytes:
    """Of the plain configuration with some things changed."""
    config = copy.deepcopy(PLAIN)
    for path, value in copy.deepcopy(changes).items():
        *owners, name = path.split(".")
        owner: Any = config
        for each in owners:
            owner = getattr(owner, each)
        setattr(owner, name, value)
    return schema_of(config, FACTS, settings)[0].keyspace


def main() -> None:
    plain = keyspace({})
    changed = {path: keyspace({path: value}) != plain for path, value in CHANGES.items()}
    same = {path: keyspace({path: value}) == plain for path, value in THE_SAME.items()}
    for name, (one, other, alike) in pairs().items():
        found = keyspace(one) == keyspace(other)
        (same if alike else changed)[name] = found if alike else not found
    changed["other weights of drafts"] = keyspace(drafts()) != keyspace(
        drafts(), replace(SETTINGS, draft_revision="others")
    )
    with tempfile.TemporaryDirectory() as directory:
        for name, (one, other, alike) in seeing(Path(directory)).items():
            found = keyspace(one, SEEING) == keyspace(other, SEEING)
            (same if alike else changed)[name] = found if alike else not found
            same[f"{name}, of text alone"] = LONGEST in other or keyspace(one) == keyspace(other)
    same["a model of text, asked for images"] = keyspace({}, SEEING) == plain
    print(json.dumps({"changed": changed, "same": same}))


if __name__ == "__main__":
    main()
