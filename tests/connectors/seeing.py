"""An engine whose model sees images: `python -m tests.connectors.seeing MODEL CONFIG`, where vLLM is installed.

The model is a small BLIP-2 with random weights, and a processor and a tokenizer made of nothing but settings. What it
sees comes before the prompt, in `QUERIES` tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.connectors.engine import SMALL_MODEL, VOCABULARY, Engine, changed, main

QUERIES = 40
"""Tokens of an image: more than a block."""
_SIDE = 32


def make_seeing(directory: Path) -> None:
    """Random weights, large enough that what is seen changes what comes out; every token is a word of its own."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "initializer_range": 0.2}
    former = transformers.Blip2QFormerConfig(**vision, num_hidden_layers=2, encoder_hidden_size=64, vocab_size=8)
    text = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=SMALL_MODEL["hidden_size"],
        word_embed_proj_dim=SMALL_MODEL["hidden_size"],
        ffn_dim=SMALL_MODEL["intermediate_size"],
        num_hidden_layers=SMALL_MODEL["num_hidden_layers"],
        num_attention_heads=SMALL_MODEL["num_attention_heads"],
        init_std=0.2,
        max_position_embeddings=1024,
    )
    config = transformers.Blip2Config(
        vision_config=transformers.Blip2VisionConfig(**vision, num_hidden_layers=1, image_size=_SIDE, patch_size=8),
        qformer_config=former,
        text_config=text,
        num_query_tokens=QUERIES,
        image_token_index=VOCABULARY - 1,
    )
    model = transformers.Blip2ForConditionalGeneration(config)
    torch.nn.init.normal_(model.query_tokens)
    model.save_pretrained(directory)
    words = {**{f"w{number}": number for number in range(VOCABULARY - 1)}, "<image>": VOCABULARY - 1}
    split = Tokenizer(models.WordLevel(words, unk_token="w0"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, unk_token="w0", pad_token="w0", additional_special_tokens=["<image>"]
    )
    images = transformers.BlipImageProcessor(size={"height": _SIDE, "width": _SIDE})
    transformers.Blip2Processor(images, tokenizer, num_query_tokens=QUERIES).save_pretrained(directory)


class Seeing(Engine):
    """The engine and what may be asked of it besides."""

    def __init__(self, model: Path, config: dict[str, Any]) -> None:
        super().__init__(model, {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}, **config})

    def see(self, image: int, prompt: list[int], name: str = "") -> dict[str, Any]:
        """Greedy tokens after an image of that number, or of that ``name``, and how many came from a cache."""
        import numpy as np
        from PIL import Image
        from vllm import SamplingParams

        pixels = np.random.default_rng(image).integers(0, 255, (40, 48, 3), dtype=np.uint8)
        asked: dict[str, Any] = {
            "prompt_token_ids": prompt,
            "multi_modal_data": {"image": Image.fromarray(pixels)},
            **({"multi_modal_uuids": {"image": [name]}} if name else {}),
        }
        params = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
        (done,) = self.llm.generate([asked], params, use_tqdm=False)
        return {"tokens": list(done.outputs[0].token_ids), "cached": done.num_cached_tokens}

    def forget(self) -> dict[str, Any]:
        """Drop what the engine computed of prompts, and what it saw."""
        self.llm.llm_engine.reset_encoder_cache()
        return super().forget()

    def _changed(self, **media: Any) -> Any:
        """The engine's configuration, with other settings for media."""
        config = self.llm.llm_engine.vllm_config
        model = config.model_config
        of_media = changed(model.multimodal_config, **media)
        return changed(config, model_config=changed(model, multimodal_config=of_media))

    def processor(self, kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
        """The processor's digest, as it would be for an engine started with these ``mm_processor_kwargs`` now."""
        from forebay.connectors.vllm.processors import processor_digest

        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
        digest = processor_digest(self._changed(mm_processor_kwargs=kwargs))
        return {"digest": digest.hex(), "schema": scheduler._schema.processor.hex()}

    def refused(self) -> dict[str, Any]:
        """What the connector says to this engine's configuration with one thing changed."""
        from forebay.connectors.vllm.identity import check_supported
        from forebay.connectors.vllm.settings import Settings
        from forebay.errors import ConfigInvalid

        encoded, found = changed(self.llm.llm_engine.vllm_config, ec_transfer_config=object()), {}
        kv_cache = self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        check_supported(encoded, kv_cache, Settings())
        for name, config, settings in (
            ("ec_transfer_config", encoded, Settings(multimodal=True)),
            ("video_pruning_rate", self._changed(video_pruning_rate=0.5), Settings(multimodal=True)),
            ("load", self._changed(), Settings(multimodal=True, load="layers")),
        ):
            try:
                check_supported(config, kv_cache, settings)
            except ConfigInvalid as e:
                found[name] = str(e)
        return found


if __name__ == "__main__":
    if not Path(sys.argv[1]).exists():
        make_seeing(Path(sys.argv[1]))
    main(sys.argv[1], sys.argv[2], Seeing)
