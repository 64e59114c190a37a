"""From which storage rate on a prefix is loaded faster than it is computed: nothing measured, all from `profiles`."""

from __future__ import annotations

from collections.abc import Iterator

from perf.engines.profiles import PROFILES, GpuProfile
from perf.harness import Interval, Row
from perf.workload import Bench

__all__ = ["run"]

_PREFIX_TOKENS = (1_024, 4_096, 16_384, 65_536, 131_072)
_GB_PER_S = (1, 2.5, 5, 10, 25, 50)
_LATENCY_S = 0.01
"""Before the first byte: about what `perf.engines.added` finds that a hit adds."""
_NEVER_GB_PER_S = 1e6


def run(bench: Bench) -> Iterator[Row]:
    """A row for each profile and length of prefix that its model takes."""
    for profile in PROFILES.values():
        for tokens in _PREFIX_TOKENS:
            if tokens <= profile.context_tokens:
                yield _row(profile, tokens)


def _row(profile: GpuProfile, tokens: int) -> Row:
    rate = profile.break_even_bytes_per_s(tokens, _LATENCY_S)
    gb_per_s = _NEVER_GB_PER_S if rate is None else rate / 1e9
    at = Interval(gb_per_s, gb_per_s, gb_per_s)
    loads = {f"{gb:g}": _rounded(profile.load_s(tokens, gb * 1e9, _LATENCY_S)) for gb in _GB_PER_S}
    return Row(
        f"break_even.{profile.name}.{tokens}",
        "break-even: load a prefix or compute it",
        "GB/s",
        at,
        None,
        at,
        "at least",
        None,
        1,
        {
            "profile": profile.what,
            "source": profile.source,
            "published": f"{profile.prompt_tokens:,} tokens in {profile.prompt_s * 1e3:.0f} ms",
            "prefix_tokens": tokens,
            "kv_bytes_per_token": profile.kv_bytes,
            "recompute_s": _rounded(profile.prefill_s(tokens)),
            "load_s_at_gb_per_s": loads,
            "latency_s": _LATENCY_S,
            "break_even_gb_per_s": None if rate is None else float(f"{gb_per_s:.4g}"),
            "file_system": "none",
        },
    )


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")
