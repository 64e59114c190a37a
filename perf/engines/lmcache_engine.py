"""`perf.engines.engine` with LMCache's connector: `python -m perf.engines.lmcache_engine MODEL CONFIG`."""

from __future__ import annotations

import sys
from typing import Any

from perf.engines.engine import MeasuredEngine
from tests.connectors.engine import main

__all__ = ["hide_llvmlite"]


def hide_llvmlite() -> None:
    """Let vLLM for CPUs, which looks at every object of every module for its kernels, not look at llvmlite's.

    They come with numba, which LMCache imports, and have no attributes in the way that vLLM asks for them.
    """
    from vllm.triton_utils import dispatcher

    rebind = dispatcher._rebind_kernels

    def around(overrides: Any) -> None:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("llvmlite")}
        try:
            rebind(overrides)
        finally:
            sys.modules.update(hidden)

    dispatcher._rebind_kernels = around


if __name__ == "__main__":
    hide_llvmlite()
    main(sys.argv[1], sys.argv[2], MeasuredEngine)
