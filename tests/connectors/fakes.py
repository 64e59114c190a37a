"""As much of vLLM's objects as the connector's halves look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from forebay.connectors.vllm.groups import CacheGroup, CacheGroups

BLOCK = 16
BLOCKS = 5
PLAIN = CacheGroups((CacheGroup("full", BLOCK),), BLOCK)


@dataclass
class Request:
    """As much of vLLM's `Request` as the connector looks at. A prompt of whole blocks and seven tokens."""

    request_id: str
    block_hashes: list[bytes]
    num_prompt_tokens: int = BLOCKS * BLOCK + 7
    num_tokens: int = BLOCKS * BLOCK + 7
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    mm_features: tuple[Any, ...] = ()
    prompt_embeds: Any = None
    lora_request: Any = None
    cache_salt: str | None = None
    priority: int = 0
    session_id: str | None = None
    kv_transfer_params: Any = None
    skip_reading_prefix_cache: bool = False


@dataclass
class Output:
    """As much of vLLM's `SchedulerOutput`."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    boundary_state_offloads: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    tables: tuple[list[int], ...] = (list(range(100, 100 + BLOCKS + 5)),)
    has_sync_kv_loads: bool = False

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    @property
    def kv_connector_block_state(self) -> Output:
        return self

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return self.tables


@dataclass
class Adapter:
    """As vLLM's `LoRARequest`."""

    lora_path: str = "/nowhere"
    lora_int_id: int = 1
    lora_name: str = "adapter"
    load_inplace: bool = False


def hashes(text: str, count: int = BLOCKS) -> list[bytes]:
    return [sha256(f"{text} {i}".encode()).digest() for i in range(count)]
