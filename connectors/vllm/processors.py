"""How images, sounds and videos become embeddings and positions: what of it vLLM's block hashes leave out.

They cover which item stands where (its identifier and its offset) and what a request itself asks of the processor, but
neither the processor's own files and settings nor the code that reads media.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import cbor2
import vllm
from vllm import envs

from forebay.connectors.keys import files_digest

__all__ = ["processor_digest"]

_NOT_OF_EMBEDDINGS = frozenset(
    {
        "allow_missing_mm_embeddings",
        "interleave_mm_strings",
        "mm_encoder_fp8_scale_path",  # its content is taken
        "mm_encoder_fp8_scale_save_path",
        "mm_ipc_gpu_memory_gb",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
        "skip_mm_profiling",
    }
)
"""Of vLLM's `MultiModalConfig`: caches, ways between processes, and what only changes a prompt's tokens."""
_NOT_OF_A_PROCESSOR = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "config.json",  # in the model's digest, as it is in force
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    }
)
"""Beside the weights: what only changes a prompt's tokens, which are hashed, or what is drawn from the answer."""
_PACKAGES = ("transformers", "mistral-common", "pillow", "torchvision", "opencv-python-headless", "av", "librosa")
"""What decodes and resizes; defaults of processors change with their versions."""


def processor_digest(config: Any) -> bytes:
    """SHA-256 of all that decides what the model is given for an item: of vLLM's configuration, and files it names.

    Empty for a model that takes text alone. The files beside the weights are read wherever these are in a directory;
    else the revision that the model's digest is of stands for them. Raises `ConfigInvalid` for one that cannot be read.
    """
    model = config.model_config
    settings = model.multimodal_config
    if settings is None:
        return b""
    named = [field.name for field in fields(settings) if field.name not in _NOT_OF_EMBEDDINGS]
    scales = settings.mm_encoder_fp8_scale_path
    facts = {
        "files": _files(Path(model.model)),
        "settings": json.dumps({name: getattr(settings, name) for name in named}, sort_keys=True, default=str),
        "scales": b"" if scales is None else files_digest(Path(scales).parent, [Path(scales)]),
        "longest": model.max_model_len,  # some processors make images smaller to fit
        "video": envs.VLLM_VIDEO_LOADER_BACKEND,
        "versions": [vllm.__version__, *map(_version, _PACKAGES)],
    }
    return hashlib.sha256(cbor2.dumps(facts, canonical=True)).digest()


def _files(directory: Path) -> bytes:
    """Of settings and code below a model's directory, whatever they are called, but for those known to be of others."""
    if not directory.is_dir():
        return b""
    paths = [path for path in directory.rglob("*") if path.suffix in (".json", ".py") and ".git" not in path.parts]
    about = [path for path in paths if path.name not in _NOT_OF_A_PROCESSOR and not path.name.endswith(".index.json")]
    return files_digest(directory, [path for path in about if path.is_file()])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
