"""Small models of several KV cache groups, by their Hugging Face configurations: sizes for an engine of tests."""

from __future__ import annotations

from tests.connectors.process import BLOCK

GEMMA = {
    "config": "Gemma3TextConfig",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 2 * BLOCK,
    "query_pre_attn_scalar": 32,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
NEEDED = 2
"""Blocks of a sliding group that the next token looks at."""
LLAMA_4 = {
    "config": "Llama4TextConfig",
    "hidden_size": 128,
    "intermediate_size": 256,
    "intermediate_size_mlp": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_chunk_size": 2 * BLOCK,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 5,
    "no_rope_layers": [1, 0, 1, 0],
    "initializer_range": 0.2,
}
QWEN_NEXT = {
    "config": "Qwen3NextConfig",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "initializer_range": 0.2,
}
