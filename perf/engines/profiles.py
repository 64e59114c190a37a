"""Named models on named GPUs: how fast they compute a prompt by public figures, and how large its KV cache is.

A figure is of one length of prompt. For others it is scaled by the model's floating-point operations: two a parameter
and token, and in attention, causal, two a token, position before it and element of a head's key and value. So a prefix
gets dearer by the token as it gets longer, and loading it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PROFILES", "GpuProfile"]


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """One model on one set of GPUs.

    Attributes:
        name: short, for rows.
        what: model, precision, GPUs and engine.
        parameters: that compute a token (of experts, the active ones), in billions.
        attention: elements of all heads' queries and values together, over all layers.
        kv_bytes: of one token, all layers, as the engine keeps it.
        context_tokens: the longest prompt that the model takes.
        prompt_tokens: the length of prompt of the figure,
        prompt_s: and how long the GPUs were busy with it.
        cache_bytes: what the GPUs have for KV, weights taken away, of nine tenths of their memory.
        source: where the figure is from.
    """

    name: str
    what: str
    parameters: float
    attention: int
    kv_bytes: int
    context_tokens: int
    prompt_tokens: int
    prompt_s: float
    cache_bytes: float
    source: str

    @property
    def tokens_per_s(self) -> float:
        """At the figure's length."""
        return self.prompt_tokens / self.prompt_s

    def _flops(self, tokens: float) -> float:
        return 2e9 * self.parameters * tokens + self.attention * tokens**2

    def prefill_s(self, tokens: float, cached: float = 0) -> float:
        """To compute a prompt of so many tokens, the KV of its first ``cached`` ones being there."""
        return self.prompt_s * (self._flops(tokens) - self._flops(cached)) / self._flops(self.prompt_tokens)

    def load_s(self, tokens: float, bytes_per_s: float, latency_s: float) -> float:
        """To load the KV of so many tokens instead."""
        return latency_s + tokens * self.kv_bytes / bytes_per_s

    def break_even_bytes_per_s(self, tokens: float, latency_s: float) -> float | None:
        """From where on loading a prefix is faster than computing it; None where the latency alone takes as long."""
        left_s = self.prefill_s(tokens) - latency_s
        return tokens * self.kv_bytes / left_s if left_s > 0 else None


def _attention(layers: int, heads: int, per_head: int) -> int:
    return layers * heads * per_head


_TENSORRT_LLM_PAGE = (
    "github.com/NVIDIA/TensorRT-LLM/blob/138f96d45f90b9667426f7c47297d8c06bafac73/docs/source/performance.md"
)
_TENSORRT_LLM = f"1st token latency, batch size 1: {_TENSORRT_LLM_PAGE}"
_GH200 = (
    "developer.nvidia.com/blog/low-latency-inference-chapter-2-blackwell-is-coming-nvidia-gh200-nvl32-with-nvlink-"
    "switch-gives-signs-of-big-leap-in-time-to-first-token-performance"
)
_LLAMA_70B = _attention(80, 64, 256)

PROFILES = {
    profile.name: profile
    for profile in (
        GpuProfile(
            name="llama-3-8b.rtx4090",
            what="Llama-3-8B, F16, one RTX 4090, llama.cpp",
            parameters=8.03,
            attention=_attention(32, 32, 256),
            kv_bytes=2 * 32 * 8 * 128 * 2,
            context_tokens=8192,
            prompt_tokens=4096,
            prompt_s=4096 / 6531.36,
            cache_bytes=0.9 * 24e9 - 16.1e9,
            source="github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference (May 2024, pp 4096)",
        ),
        GpuProfile(
            name="llama-2-70b.4xa100",
            what="Llama-2-70B, FP16, four A100, TensorRT-LLM",
            parameters=69,
            attention=_LLAMA_70B,
            kv_bytes=2 * 80 * 8 * 128 * 2,
            context_tokens=4096,
            prompt_tokens=2048,
            prompt_s=0.377,
            cache_bytes=0.9 * 4 * 80e9 - 138e9,
            source=_TENSORRT_LLM,
        ),
        GpuProfile(
            name="llama-2-70b.4xh100",
            what="Llama-2-70B, FP8 with FP8 KV, four H100, TensorRT-LLM",
            parameters=69,
            attention=_LLAMA_70B,
            kv_bytes=2 * 80 * 8 * 128,
            context_tokens=4096,
            prompt_tokens=2048,
            prompt_s=0.109,
            cache_bytes=0.9 * 4 * 80e9 - 69e9,
            source=_TENSORRT_LLM,
        ),
        GpuProfile(
            name="llama-2-7b.h100",
            what="Llama-2-7B (no grouped heads), FP8 with FP8 KV, one H100, TensorRT-LLM",
            parameters=6.74,
            attention=_attention(32, 32, 256),
            kv_bytes=2 * 32 * 32 * 128,
            context_tokens=4096,
            prompt_tokens=2048,
            prompt_s=0.036,
            cache_bytes=0.9 * 80e9 - 6.7e9,
            source=_TENSORRT_LLM,
        ),
        GpuProfile(
            name="llama-3.1-70b.32xgh200",
            what="Llama-3.1-70B, 16-bit KV, 32 GH200 (NVL32), TensorRT-LLM",
            parameters=70.6,
            attention=_LLAMA_70B,
            kv_bytes=2 * 80 * 8 * 128 * 2,
            context_tokens=131_072,
            prompt_tokens=32_768,
            prompt_s=0.472,
            cache_bytes=0.9 * 32 * 96e9 - 141e9,
            source=_GH200,
        ),
        GpuProfile(
            name="llama-3.1-405b.32xgh200",
            what="Llama-3.1-405B, 16-bit KV, 32 GH200 (NVL32), TensorRT-LLM",
            parameters=405.9,
            attention=_attention(126, 128, 256),
            kv_bytes=2 * 126 * 8 * 128 * 2,
            context_tokens=131_072,
            prompt_tokens=32_768,
            prompt_s=1.6,
            cache_bytes=0.9 * 32 * 96e9 - 812e9,
            source=_GH200,
        ),
        GpuProfile(
            name="deepseek-v3.8xh100",
            what="DeepSeek-V3, FP8 with 16-bit MLA KV, a node of eight H100 of four, SGLang",
            parameters=37,
            attention=_attention(61, 128, 192 + 128),
            kv_bytes=61 * (512 + 64) * 2,
            context_tokens=131_072,
            prompt_tokens=2000,
            prompt_s=2000 / 52_300,
            cache_bytes=0.9 * 8 * 80e9 - 671e9 / 4,
            source="lmsys.org/blog/2025-05-05-large-scale-ep",
        ),
    )
}
