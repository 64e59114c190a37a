"""A connector of somebody else's, with a handshake of its own, that neither loads nor stores anything.

With ``lacks_tokens`` in its configuration it says once that it loads so many in the step, and then that it did not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)

__all__ = ["OtherConnector"]


@dataclass(frozen=True)
class Greeting(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What its workers tell its scheduler's side."""


@dataclass(frozen=True)
class Lacking(KVConnectorMetadata):  # type: ignore[misc]
    """The engine's blocks that it is to load in a step, and does not."""

    blocks: frozenset[int] = frozenset()


class OtherConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The least that vLLM takes for a connector."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._left: int = self._kv_transfer_config.kv_connector_extra_config.get("lacks_tokens", 0)
        self._block_tokens = vllm_config.cache_config.block_size
        self._blocks: frozenset[int] = frozenset()

    def get_handshake_metadata(self) -> Greeting:
        return Greeting()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0 if num_computed_tokens else self._left, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            (table,) = blocks.get_block_ids()
            self._blocks, self._left = frozenset(table[: num_external_tokens // self._block_tokens]), 0

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        lacking, self._blocks = Lacking(self._blocks), frozenset()
        return lacking

    def get_block_ids_with_load_errors(self) -> set[int]:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Lacking)
        return set(metadata.blocks)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
