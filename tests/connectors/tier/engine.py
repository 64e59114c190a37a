"""A vLLM engine with Forebay as a tier: `python -m tests.connectors.tier.engine MODEL CONFIG`."""

from __future__ import annotations

import dataclasses
import queue
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.connectors.engine import Engine, changed, main


class TierEngine(Engine):
    """What may be asked of an engine, where it is another thing for a tier."""

    def __init__(self, model: Path, config: dict[str, Any]) -> None:
        super().__init__(model, config)
        self._told: list[Any] = []

    @property
    def _scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def _manager(self) -> Any:
        return self._scheduler.connector.connector_scheduler.manager

    @property
    def _tier(self) -> Any:
        (tier,) = self._manager.secondary_tiers
        return tier

    def connected(self) -> dict[str, Any]:
        return {"both": self._tier._link.client is not None}

    def settle(self) -> dict[str, Any]:
        """Step until everything has been stored, or could not be. An engine in a process of its own steps by itself."""
        here = hasattr(self.llm.llm_engine.engine_core, "engine_core")
        while here and self._scheduler.connector.has_pending_push_work():
            self.llm.llm_engine.step()
        return {}

    def forget(self) -> dict[str, Any]:
        """Drop the engine's own prefix cache and the host pool."""
        self.settle()
        return self.reset()

    def _client(self) -> Any:
        return self._tier._link.client

    def believe(self, checks: bool) -> dict[str, Any]:
        """Whether bytes are looked at before they are used."""
        from forebay.client import reader

        if not hasattr(self, "_verdict"):
            self._verdict = reader.verdict
        reader.verdict = self._verdict if checks else lambda *_: 0
        return {}

    def events(self) -> dict[str, Any]:
        """What vLLM has taken of the tier's events since the last call; from the first call on."""
        if "take_events" not in vars(self._tier):
            taking = self._tier.take_events

            def take_events() -> list[Any]:
                taken = list(taking())
                self._told.extend(taken)
                return taken

            self._tier.take_events = take_events
        self.generate([[1, 2, 3]], max_tokens=1)  # it takes them once a step
        told = [(event.removed, event.medium.value, key.hex()) for event in self._told for key in event.keys]
        self._told.clear()
        return {"told": told}

    def hinted(self, prompt: list[int], payload: dict[str, Any]) -> dict[str, Any]:
        """Compute a prompt for which a router hints; with which hints its blocks are stored."""
        from vllm import SamplingParams
        from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

        engine, transfers = self.llm.llm_engine, self._tier._transfers
        seen: list[Any] = []
        submit = transfers.submit

        def noting(job: Any) -> None:
            seen.append(job.hints)
            submit(job)

        transfers.submit = noting
        hints = KvHintsEnvelope("1", "message", [KvHintAction("action", "forebay.hints", "1", payload)])
        engine.add_request("hinted", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=1), kv_hints=hints)
        while engine.has_unfinished_requests():
            engine.step()
        self.settle()
        transfers.submit = submit
        return {"hints": [None if each is None else dataclasses.asdict(each) for each in seen]}

    def touch(self, keys: list[str]) -> dict[str, Any]:
        """Have vLLM's manager touch blocks, as it does where a request has use for them; what the node says."""
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key

        client, said = self._client(), queue.SimpleQueue[list[str]]()
        touch = client.touch
        client.touch = lambda *args, **options: said.put(touch(*args, **options))
        self._manager.touch([make_offload_key(bytes.fromhex(key), 0) for key in keys], ReqContext("any"))
        self.generate([[1, 2, 3]], max_tokens=1)  # told at the end of a step
        reasons = said.get(timeout=60)
        del client.touch
        return {"reasons": reasons}

    def delete(self) -> dict[str, Any]:
        """Delete every block of the namespace."""
        client = self._client()
        return {"deleted": client.delete([block.key for block in client.list()]).count("ok")}

    def refusals(self) -> dict[str, Any]:
        """What the tier says to this engine's configuration with one thing changed."""
        from forebay.connectors.vllm.tier.identity import configuration_of, tier_group
        from forebay.errors import ConfigInvalid

        config, offloading = self.llm.llm_engine.vllm_config, self._tier._offloading_spec.config
        kv_cache = self._scheduler.kv_cache_config
        tier_group(config, kv_cache, offloading)
        found: dict[str, Any] = {}
        for path, value in (
            ("cache_config.prefix_caching_hash_algo", "sha256"),
            ("lora_config", "any"),
            ("speculative_config", SimpleNamespace(method="ngram")),
            ("model_config.enable_prompt_embeds", True),
            ("kv_transfer_config.kv_role", "kv_consumer"),
            ("parallel_config.world_size", 2),  # and no executor that is known to keep to one host
        ):
            part, _, name = path.rpartition(".")
            fields = {part: changed(getattr(config, part), **{name: value})} if part else {name: value}
            try:
                tier_group(changed(config, **fields), kv_cache, offloading)
            except ConfigInvalid as e:
                found[name] = str(e)
        packed = dataclasses.replace(offloading, worker_kv_bytes_per_block=offloading.worker_kv_bytes_per_block + 4096)
        try:
            tier_group(config, kv_cache, packed)
        except ConfigInvalid as e:
            found["packed"] = str(e)
        try:
            configuration_of(offloading.engine_id)
        except ConfigInvalid as e:
            found["outside"] = str(e)
        return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], TierEngine)
