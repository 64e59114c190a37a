"""Fuzzing for as long as one likes: `python -m tests.fuzz [--seconds N] [NAME ...]`, or `make fuzz SECONDS=N`.

Guided by coverage (atheris), in the environment that `python -m tests.envs fuzz` makes; where that cannot be had,
inputs of the corpus are changed at random, and the summary says so. An input that fails goes to the corpus, where the
tests run it from then on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.envs import ENVIRONMENTS
from tests.fuzz.harnesses import CORPUS, HARNESSES, entries, load
from tests.fuzz.target import FOLDER, memory_dir

_EXECUTED = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_COVERED = re.compile(r"\bcov: (\d+)")
_TIMEOUT_S = 60
_MEMORY_MIB = 3072
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Result:
    """What one harness did. ``covered`` counts edges, and is None without guidance; ``failed`` are names of inputs."""

    harness: str
    guided: bool
    inputs: int
    seconds: float
    covered: int | None
    failed: tuple[str, ...]


def _grown(name: str) -> Path:
    """Where inputs that reached something new are kept from run to run."""
    cache = Path(os.environ.get("FOREBAY_CACHE") or Path.home() / ".cache" / "forebay")
    folder = cache / "fuzz" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _kept(name: str, found: Path) -> str:
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(found, folder / found.name)
    return found.name


def _guided(name: str, seconds: int, seed: int) -> Result:
    environment = ENVIRONMENTS["fuzz"]
    (CORPUS / name).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=memory_dir()) as files:
        command = [str(environment.python), "-m", "tests.fuzz.guided", name, str(_grown(name)), str(CORPUS / name)]
        command += [f"-max_total_time={seconds}", f"-seed={seed}", f"-artifact_prefix={folder}/"]
        command += [f"-timeout={_TIMEOUT_S}", f"-rss_limit_mb={_MEMORY_MIB}", f"-max_len={_MAX_BYTES}"]
        # Inputs are choices, one after the other: long ones from the start.
        command += ["-print_final_stats=1", "-len_control=0"]
        began = time.monotonic()
        variables = environment.variables() | {FOLDER: files}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        took = time.monotonic() - began
        failed = tuple(_kept(name, path) for path in sorted(Path(folder).iterdir()))
    told = done.stderr + done.stdout
    if done.returncode:
        print("\n".join(told.splitlines()[-60:]), file=sys.stderr)
        failed = failed or (f"exit {done.returncode}",)
    executed, covered = _EXECUTED.search(told), _COVERED.findall(told)
    inputs = int(executed.group(1)) if executed else 0
    return Result(name, True, inputs, round(took, 1), int(covered[-1]) if covered else 0, failed)


def _changed(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data[:_MAX_BYTES])
    for _ in range(rng.randrange(1, 9)):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 1:
            out[at:at] = rng.randbytes(rng.randrange(1, 33))
        elif kind == 2:
            del out[at : at + rng.randrange(1, 17)]
        else:
            out += rng.randbytes(rng.randrange(1, 65))
    return bytes(out)


def _unguided(name: str, seconds: int, seed: int) -> Result:
    harness, rng, inputs = load(name), random.Random(seed), 0
    known = [path.read_bytes() for path in entries(name)] or [b""]
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        data = _changed(rng, rng.choice(known))
        inputs += 1
        try:
            harness(data)
        except Exception as error:  # whatever it is, it is the finding
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"crash-{hashlib.sha1(data).hexdigest()}"
                path.write_bytes(data)
                print(f"{name}: {error!r}", file=sys.stderr)
                failed = _kept(name, path)
            return Result(name, False, inputs, round(time.monotonic() - began, 1), None, (failed,))
    return Result(name, False, inputs, round(time.monotonic() - began, 1), None, ())


def main(argv: list[str] | None = None) -> int:
    """Fuzz; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(HARNESSES)} (default: all)")
    parser.add_argument("--seconds", type=int, default=60, help="for all of them together (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="to repeat a run; 0: one of its own")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary to this file too")
    options = parser.parse_args(argv)
    unknown = set(options.names) - set(HARNESSES)
    if unknown:
        parser.error(f"no harness {', '.join(sorted(unknown))}")
    names = options.names or list(HARNESSES)
    seed = options.seed or random.SystemRandom().randrange(1, 1 << 31)
    why = ENVIRONMENTS["fuzz"].make()
    if why is not None:
        print(f"not guided by coverage: {why}", file=sys.stderr)
    each = max(1, options.seconds // len(names))
    results = []
    for name in names:
        result = _guided(name, each, seed) if why is None else _unguided(name, each, seed)
        results.append(result)
        rate = result.inputs / max(result.seconds, 0.1)
        print(f"{name:<18}{result.inputs:>10} inputs {rate:>7.0f}/s  covered {result.covered}  failed {result.failed}")
    summary = {"seed": seed, "guided": why is None, "inputs": sum(r.inputs for r in results)}
    text = json.dumps({**summary, "harnesses": [asdict(r) for r in results]}, indent=2)
    if options.json:
        options.json.write_text(text + "\n")
    print(f"{summary['inputs']} inputs, seed {seed}: {'failures' if any(r.failed for r in results) else 'no failure'}")
    return 1 if any(r.failed for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
