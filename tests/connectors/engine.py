"""A vLLM engine in a process of its own: `python -m tests.connectors.engine MODEL CONFIG`, where vLLM is installed.

CONFIG is JSON: the engine's arguments, ``kv_transfer_config`` among them, ``sizes`` for another model, and ``draft``,
the ``directory``, ``method`` and ``seed`` of a model of drafts. Reads requests from standard input, a JSON object a
line, and answers each with one on standard output; everything else goes to standard error. The model is a small Qwen2
with random weights, made when it is not there.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forebay.ids import BlockKey

VOCABULARY = 256
_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


SMALL_MODEL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "head_dim": 32,
}


def make_model(directory: Path, sizes: dict[str, Any]) -> None:
    """Random weights, large enough that every layer changes what comes out. ``sizes`` may name another ``config``."""
    import torch
    import transformers

    torch.manual_seed(0)
    make = getattr(transformers, sizes.pop("config", "Qwen2Config"))
    config = make(vocab_size=VOCABULARY, max_position_embeddings=4096, **sizes)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)


def make_adapter(directory: Path, seed: int) -> None:
    """A LoRA adapter of the small model with random weights, in the form in which they are published."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(exist_ok=True)
    random, rank, tensors = torch.Generator().manual_seed(seed), 8, {}
    hidden, heads, head = (SMALL_MODEL[name] for name in ("hidden_size", "num_attention_heads", "head_dim"))
    for layer in range(int(SMALL_MODEL["num_hidden_layers"])):
        for name, width in (("q_proj", heads * head), ("v_proj", SMALL_MODEL["num_key_value_heads"] * head)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, int(hidden), generator=random)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(int(width), rank, generator=random)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")


def changed(config: Any, **fields: Any) -> Any:
    """A copy of one of vLLM's configurations with other values, also of what is frozen or checked."""
    made = copy.copy(config)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


class Engine:
    """The engine and what may be asked of it."""

    def __init__(self, model: Path, config: dict[str, Any]) -> None:
        from vllm import LLM

        arguments: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "block_size": 32,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 1024,
            "dtype": "float32",
            "seed": 0,
            "disable_log_stats": False,
            "prefix_caching_hash_algo": "sha256_cbor",
        }
        self.llm = LLM(str(model), **{**arguments, **config})

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 8,
        salt: str = "",
        adapter: str = "",
        extra: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Greedy tokens of each prompt, and how many tokens of each came from a cache.

        ``adapter`` is the directory of a LoRA adapter, ``extra`` are the requests' ``kv_transfer_params``.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": extra} if extra else None,
        )
        lora = LoRARequest("trained", 1, adapter) if adapter else None
        asked: list[Any] = [
            {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})} for prompt in prompts
        ]
        done = self.llm.generate(asked, params, use_tqdm=False, lora_request=lora)
        return {
            "tokens": [list(each.outputs[0].token_ids) for each in done],
            "reasons": [each.outputs[0].finish_reason for each in done],
            "cached": [each.num_cached_tokens for each in done],
        }

    def drafted(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Greedy tokens of a prompt, how many tokens came from a cache, and all that a model of drafts guessed."""
        drafter = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
        propose, guesses = drafter.propose, []

        def proposing(*args: Any, **kwargs: Any) -> Any:
            proposed = propose(*args, **kwargs)
            guesses.append(proposed.tolist())
            return proposed

        drafter.propose = proposing
        answer = self.generate([prompt], max_tokens)
        del drafter.propose
        return {**answer, "guesses": guesses}

    def train(self, adapter: str, seed: int) -> dict[str, Any]:
        """Make a LoRA adapter of random weights, or another one in its place."""
        make_adapter(Path(adapter), seed)
        return {}

    def abort(self, prompt: list[int], status: str) -> dict[str, Any]:
        """Begin a request, give it up as soon as it has that status, and step until the engine has let go of it."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        params = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
        engine.add_request("given up", {"prompt_token_ids": prompt}, params)
        scheduler = engine.engine_core.engine_core.scheduler
        while (found := [request.status.name for request in scheduler.requests.values()]) not in ([], [status]):
            engine.step()
        engine.abort_request(["given up"])
        while scheduler.requests:
            engine.step()
        return {"status": found}

    def abort_in_step(self, prompt: list[int]) -> dict[str, Any]:
        """Begin a request, and give it up while the first step that computes it is under way."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        core = engine.engine_core.engine_core
        make = core.scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            output = make(*args, **kwargs)
            if output.num_scheduled_tokens:
                core.aborts_queue.put(list(output.num_scheduled_tokens))
            return output

        core.scheduler.schedule = schedule
        params = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
        engine.add_request("given up", {"prompt_token_ids": prompt}, params)
        while core.scheduler.requests:
            engine.step()
        core.scheduler.schedule = make
        engine.abort_request(["given up"])
        return {}

    def forget(self) -> dict[str, Any]:
        """Drop the engine's own prefix cache."""
        return {"dropped": self.llm.reset_prefix_cache()}

    def reset(self) -> dict[str, Any]:
        """Have everything dropped that vLLM has dropped when weights are updated."""
        return {"dropped": self.llm.reset_prefix_cache(reset_connector=True)}

    def manners(self, policy: str) -> dict[str, Any]:
        """What another connector of this engine's configuration warns of at its start, and whether it asks for more.

        ``policy`` is what vLLM is to do with requests whose load fails.
        """
        import logging

        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

        from forebay.connectors.vllm import ForebayConnector

        config = self.llm.llm_engine.vllm_config
        config = changed(config, kv_transfer_config=changed(config.kv_transfer_config, kv_load_failure_policy=policy))
        said: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        log = logging.getLogger("vllm.forebay")
        log.addHandler(handler)
        kv_cache = self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        connector = ForebayConnector(config, KVConnectorRole.SCHEDULER, kv_cache)
        log.removeHandler(handler)
        connector.shutdown()
        return {"warned": said, "delivery": connector.requires_kv_delivery}

    def connected(self) -> dict[str, Any]:
        """Whether both halves have reached the node: the worker's is told with the first step."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.generate([[1, 2, 3]], max_tokens=1)
        halves = (
            get_kv_transfer_group()._worker,
            self.llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler,
        )
        return {"both": all(half._link is not None and half._link.client is not None for half in halves)}

    def settle(self) -> dict[str, Any]:
        """Wait until everything that was to be saved so far has been, or could not be."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group()._worker._staging.settle()
        return {}

    def _client(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker._link.client

    def blocks(self, group: int = 0) -> dict[str, Any]:
        """Where each block of a group that the engine's namespace has lies: volume and offset, by key."""
        client = self._client()
        keys = [BlockKey(block.key, group) for block in client.list(group=group)]
        stats = client.stat(keys) if keys else []
        return {key.key.hex(): [s.block.volume, s.block.offset_bytes] for key, s in zip(keys, stats, strict=True)}

    def delete_blocks(self, keys: list[str], group: int) -> dict[str, Any]:
        """Delete blocks at the node."""
        return {"done": self._client().delete([BlockKey(bytes.fromhex(key), group) for key in keys])}

    def keys(self, prompt: list[int]) -> dict[str, Any]:
        """The keys of a prompt's hashed blocks, as the engine hashes them."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        core = self.llm.llm_engine.engine_core.engine_core
        request = Request("keys", prompt, SamplingParams(), None, block_hasher=core.request_block_hasher)
        return {"keys": [bytes(each).hex() for each in request.block_hashes]}

    def groups(self) -> dict[str, Any]:
        """What the engine's KV cache groups are, by their numbers."""
        groups = self.llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler._groups
        return {"kinds": [group.kind for group in groups.groups], "tokens": [g.block_tokens for g in groups.groups]}

    def forge(self) -> dict[str, Any]:
        """Put other bytes under every key that the engine's namespace has, as a whole and valid block."""
        client = self._client()
        listed = list(client.list())
        keys = [block.key for block in listed]
        client.delete(keys)
        results = client.put(keys, [b"\x11\x3e" * (block.length_bytes // 2) for block in listed])
        return {"stored": sum(result.stored for result in results)}

    def written_early(self, prompt: list[int]) -> dict[str, Any]:
        """Which tiles of a prompt's blocks are written before the step that computes them has ended."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker, client = get_kv_transfer_group()._worker, self._client()
        put, end = client.put_tiles, worker.end
        early: list[list[int]] = []
        ended: list[bool] = []

        def put_tiles(plan: Any, tiles: Any, *args: Any, **options: Any) -> Any:
            if not ended:
                early.append(list(tiles))
            return put(plan, tiles, *args, **options)

        def ending(work: Any) -> None:
            if work.saves:
                worker._staging.settle()  # what is to be written by now has been
                ended.append(True)
            end(work)

        client.put_tiles, worker.end = put_tiles, ending
        self.generate([prompt], max_tokens=1)
        del client.put_tiles, worker.end
        return {"tiles": early}

    def layers_refused(self) -> dict[str, Any]:
        """What the connector says to this engine when it is to load layer by layer; empty if nothing."""
        from forebay.connectors.vllm.identity import check_supported
        from forebay.connectors.vllm.settings import Settings
        from forebay.errors import ConfigInvalid

        kv_cache = self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        try:
            check_supported(self.llm.llm_engine.vllm_config, kv_cache, Settings(load="layers"))
        except ConfigInvalid as e:
            return {"why": str(e)}
        return {"why": ""}

    def drafts_refused(self) -> dict[str, Any]:
        """What the connector says to this engine's model of drafts with one thing changed."""
        from tests.connectors.drafts import refused

        kv_cache = self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        return refused(self.llm.llm_engine.vllm_config, kv_cache)

    def refusals(self) -> dict[str, Any]:
        """What the connector says to this engine's configuration with one thing changed, and to another version."""
        import vllm

        from forebay.connectors.vllm.identity import check_supported
        from forebay.connectors.vllm.settings import Settings
        from forebay.connectors.vllm.versions import check_version, imported
        from forebay.errors import ConfigInvalid

        config = self.llm.llm_engine.vllm_config
        kv_cache = self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        check_supported(config, kv_cache)
        found: dict[str, Any] = {}
        for part, name, value in (
            ("cache_config", "prefix_caching_hash_algo", "sha256"),
            ("cache_config", "enable_prefix_caching", False),
            ("parallel_config", "pipeline_parallel_size", 2),
            ("parallel_config", "decode_context_parallel_size", 2),
            ("parallel_config", "enable_dbo", True),
            ("kv_transfer_config", "kv_role", "kv_consumer"),
            (None, "speculative_config", SimpleNamespace(method="medusa")),
            ("scheduler_config", "async_scheduling", True),
        ):
            fields = {name: value} if part is None else {part: changed(getattr(config, part), **{name: value})}
            try:
                check_supported(changed(config, **fields), kv_cache, Settings(load="layers", layer_groups=2))
            except ConfigInvalid as e:
                found[name] = str(e)
        real, vllm.__version__ = vllm.__version__, "0.99.1"
        try:
            check_version(Settings(untested_engine=True))
            check_version(Settings())
        except ConfigInvalid as e:
            found["version"] = str(e)
        try:
            imported("forebay.connectors.vllm.of_another_vllm")
        except ConfigInvalid as e:
            found["import"] = str(e)
        finally:
            vllm.__version__ = real
        return found

    def described(self, keys: list[str]) -> dict[str, Any]:
        """What the node knows of blocks beside their bytes: parent, tokens and adapter, and hints."""
        stats = self._client().stat([bytes.fromhex(key) for key in keys])
        found = [(stat.block.describe, stat.block.hints) for stat in stats]
        return {
            key: {**{n: v.hex() if isinstance(v, bytes) else v for n, v in describe.items()}, "hints": dict(hints)}
            for key, (describe, hints) in zip(keys, found, strict=True)
        }

    def metrics(self) -> dict[str, Any]:
        """External tokens asked for and hit, and the connector's own counters."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if any(word in metric.name for word in ("forebay", "external", "preemptions", "spec_decode")):
                reason = metric.labels.get("reason", "")
                found[metric.name.removeprefix("vllm:") + (f":{reason}" if reason else "")] = getattr(
                    metric, "value", 0
                )
        return found


def main(model: str, config: str, kind: type[Engine] = Engine) -> None:
    """Serve requests until standard input ends."""
    os.environ.update({**_VARIABLES, **os.environ})
    answers_fd = os.dup(1)
    os.dup2(2, 1)  # vLLM and its libraries print where they like
    directory = Path(model)
    arguments = json.loads(config)
    sizes = arguments.pop("sizes", SMALL_MODEL)
    if not directory.exists():
        make_model(directory, sizes)
    if (draft := arguments.pop("draft", None)) is not None:
        folder = Path(draft.pop("directory"))
        if not folder.exists():
            from tests.connectors.drafts import make_draft

            make_draft(folder, directory, **draft)
        guessing = {"method": draft["method"], "model": str(folder), "num_speculative_tokens": 3}
        arguments["speculative_config"] = guessing
    engine = kind(directory, arguments)
    with os.fdopen(answers_fd, "w") as answers:
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps(getattr(engine, request.pop("do"))(**request)), file=answers, flush=True)
        engine.llm.llm_engine.engine_core.shutdown()
    os._exit(0)  # vLLM is shut down, and taking its objects apart takes seconds


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
