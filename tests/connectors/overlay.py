"""Another version of vLLM on the kernels that are there: `python -m tests.connectors.overlay WHEEL DIRECTORY`.

Not every version has a build for CPUs. What the connector works with is Python: this unpacks a wheel's, beside the
kernels of the version that is installed for CPUs. Tests run with it where FOREBAY_VLLM_OVERLAY names the directory.
"""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

from tests.envs import ENVIRONMENTS

_LARGE_BYTES = 32 << 20
"""Of one file: no Python, and nothing that is needed on a CPU."""


def main(wheel: str, directory: str) -> None:
    """Make it."""
    target = Path(directory)
    with zipfile.ZipFile(wheel) as packed:
        for info in packed.infolist():
            if not info.filename.endswith(".so") and info.file_size < _LARGE_BYTES:
                packed.extract(info, target)
    (installed,) = ENVIRONMENTS["vllm"].directory.glob("lib/python*/site-packages/vllm")
    for kernels in installed.glob("*.so"):
        shutil.copy(kernels, target / "vllm")


if __name__ == "__main__":
    main(*sys.argv[1:])
