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
    "lora_config": SimpleNamespace(lora_dtype=torch.float32),
}
THE_SAME: dict[str, Any] = {
    "model_config.hf_config._name_or_path": "/elsewhere",
    "model_config.max_model_len": 2048,
    "model_config.model": Path("/elsewhere"),
    "load_config.load_format": "safetensors",
    "lora_config": SimpleNamespace(lora_dtype="auto"),
}


def keyspace(path: str = "", value: object = None) -> bytes:
    """Of the plain configuration with one thing changed."""
    config = copy.deepcopy(PLAIN)
    if path:
        *owners, name = path.split(".")
        owner: Any = config
        for each in owners:
            owner = getattr(owner, each)
        setattr(owner, name, value)
    return schema_of(config, FACTS, SETTINGS)[0].keyspace


def main() -> None:
    plain = keyspace()
    changed = {path: keyspace(path, value) != plain for path, value in CHANGES.items()}
    same = {path: keyspace(path, value) == plain for path, value in THE_SAME.items()}
    print(json.dumps({"changed": changed, "same": same}))


if __name__ == "__main__":
    main()
