"""A LoRA adapter counts by its content, and by what the engine is known to compute with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from forebay.connectors.keys import weights_digest
from forebay.connectors.vllm.adapters import Adapters


@dataclass
class Request:
    """As vLLM's `LoRARequest`."""

    lora_path: str
    lora_int_id: int = 1
    lora_name: str = "adapter"
    load_inplace: bool = False


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"trained")
    (tmp_path / "adapter_config.json").write_text("{}")
    return tmp_path


def train_anew(directory: Path) -> None:
    """Under the same name, as big as before, and as if it were just as old."""
    path = directory / "adapter_model.safetensors"
    before = path.stat()
    other = directory / "other"
    other.write_bytes(b"anewned")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


def test_the_same_content_has_the_same_digest_wherever_it_lies(directory: Path) -> None:
    assert Adapters().digest(Request(str(directory))) == weights_digest(directory)


def test_an_adapter_that_changes_under_a_running_engine_is_left_alone(directory: Path) -> None:
    adapters, request = Adapters(), Request(str(directory))
    first = adapters.digest(request)
    assert adapters.digest(Request(str(directory), load_inplace=True)) == first
    train_anew(directory)
    assert adapters.digest(request) is None, "nobody knows which of the two the engine has loaded"
    assert adapters.digest(Request(str(directory), load_inplace=True)) is None, "its cache may still hold the old one's"
    again = Adapters().digest(request)
    assert again == weights_digest(directory) != first, "an engine that starts now loads what is there now"


def test_files_that_were_only_copied_are_the_same_adapter(directory: Path) -> None:
    adapters, request = Adapters(), Request(str(directory))
    first = adapters.digest(request)
    path = directory / "adapter_model.safetensors"
    (directory / "other").write_bytes(path.read_bytes())
    (directory / "other").rename(path)
    assert adapters.digest(request) == first


def test_an_adapter_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert Adapters().digest(Request(str(tmp_path / "none"))) is None
