"""One harness under atheris: `python -m tests.fuzz.guided NAME [libFuzzer's arguments]`, where that is installed."""

from __future__ import annotations

import sys

import atheris

from tests.fuzz.harnesses import load


def main() -> None:
    """Does not return."""
    name = sys.argv.pop(1)
    with atheris.instrument_imports(include=["forebay"]):
        harness = load(name)
        harness(b"")  # what it imports late
    atheris.Setup(sys.argv, harness)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
