"""A real computation: KV of a torch transformer, stored by ranks, read by others after the node was killed.

What is compared, to the last bit, are the logits of every decoding step: of a run whose KV cache never left memory, and
of runs whose cache for the prompt's whole blocks came from the node. Ranks split the **stored KV** by heads: each
stores and loads its own heads only, and where two loaded, they exchange heads in memory before they go on. The
arithmetic itself is never split, so that equality is exact and not a matter of tolerances.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import NodeProcess, eventually
from tests.envs import ENVIRONMENTS

DTYPES = ("f32", "bf16")
BLOCKS = 5
TOKENS = BLOCKS * 16 + 7  # the tail is no whole block, and is computed by everyone
STORED, ALL = ["ok"] * BLOCKS, list(range(BLOCKS))

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]  # two processes import torch on however busy a machine


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(97), k=TOKENS)


class RankProcess:
    """A process with torch and a client."""

    def __init__(self, node: NodeProcess) -> None:
        env = ENVIRONMENTS["torch"]
        command: list[str | Path] = [env.python, "-m", "tests.e2e.rank", node.url, node.token]
        self.process = subprocess.Popen(
            command, env=env.variables(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, do: str, dtype: str, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps({"do": do, "dtype": dtype, **request}), file=self.process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def end(self) -> None:
        self.process.communicate(timeout=60)


class Scene:
    """Two ranks that stored a prompt between them, and a process that came after the node was killed and restarted."""

    def __init__(self, data: Path) -> None:
        self.node = NodeProcess(data)
        self.ranks = [RankProcess(self.node) for _ in range(2)]
        self.computed: dict[str, list[dict[str, Any]]] = {}
        for dtype in DTYPES:
            leader, follower = self.ranks
            leader.ask("open", dtype, session_token="")
            follower.ask("open", dtype, session_token=leader.ask("token", dtype)["token"])
            self.computed[dtype] = [rank.ask("compute", dtype, prompt=prompt(1)) for rank in self.ranks]
            plan = leader.ask("allocate", dtype)
            assert plan["reasons"] == STORED
            part = follower.ask("put_tiles", dtype, plan=plan["plan"], rank=1, ranks=2)
            assert part["reasons"] == ["pending"] * BLOCKS
            assert leader.ask("put_tiles", dtype, plan=plan["plan"], rank=0, ranks=2)["reasons"] == STORED
        self.node.kill()
        self.node.start()
        self.one = RankProcess(self.node)
        for dtype in DTYPES:
            self.one.ask("open", dtype, session_token="")

    def load(self, process: RankProcess, dtype: str, seed: int, rank: int = 0, ranks: int = 1) -> list[str]:
        """Load a prompt, as soon as the process has found the node again."""
        reasons: list[str] = []

        def there() -> bool:
            reasons[:] = process.ask("load", dtype, prompt=prompt(seed), rank=rank, ranks=ranks)["reasons"]
            return not {"unavailable", "connection_lost"} & set(reasons)

        eventually(there, "the node")
        return reasons

    def corrupt(self, volume: int, offset_bytes: int) -> None:
        """Flip a bit on media, behind the target's back."""
        (path,) = self.node.data.rglob(f"volumes/{volume}.vol")
        with path.open("r+b") as file:
            file.seek(offset_bytes)
            (byte,) = file.read(1)
            file.seek(offset_bytes)
            file.write(bytes([byte ^ 1]))
            file.flush()
            os.fsync(file.fileno())


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("e2e") / "data")
    yield scene
    for process in (*scene.ranks, scene.one):
        process.end()
    scene.node.stop()


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ranks_stored_and_one_process_goes_on(scene: Scene, dtype: str) -> None:
    first, second = scene.computed[dtype]
    assert first == second, "the same model in two processes"
    assert scene.load(scene.one, dtype, 1) == STORED
    resumed = scene.one.ask("resume", dtype)
    assert resumed == {**first, "recomputed": []}
    assert len(set(first["tokens"])) > 3, "it decodes something"


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_process_stored_and_two_ranks_go_on(scene: Scene, dtype: str, tmp_path: Path) -> None:
    computed = scene.one.ask("compute", dtype, prompt=prompt(2))
    assert scene.one.ask("put", dtype)["reasons"] == STORED
    for number, rank in enumerate(scene.ranks):
        assert scene.load(rank, dtype, 2, number, 2) == STORED
        assert rank.ask("resume", dtype)["logits"] != computed["logits"], "half of the heads cannot be enough"
    for number, rank in enumerate(scene.ranks):
        rank.ask("give", dtype, path=str(tmp_path / str(number)))
    for number, rank in enumerate(scene.ranks):
        rank.ask("take", dtype, path=str(tmp_path / str(1 - number)), rank=1 - number, ranks=2)
        assert rank.ask("resume", dtype) == {**computed, "recomputed": []}


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_that_rotted_are_a_miss_and_computed_again(scene: Scene, dtype: str) -> None:
    computed = scene.one.ask("compute", dtype, prompt=prompt(3))
    places = scene.one.ask("put", dtype)["places"]
    for block, tile in ((1, 0), (3, 5)):
        volume, offset_bytes = places[block]
        scene.corrupt(volume, offset_bytes + tile * 4096 + 1000)
    # A rank sees what it holds, tiles 0 to 3 or 4 to 7; what it tells the node of is gone for all who come later.
    assert scene.load(scene.ranks[0], dtype, 3, 0, 2) == ["checksum_mismatch" if b == 1 else "ok" for b in ALL]
    after = {1: "absent", 3: "checksum_mismatch"}
    assert scene.load(scene.ranks[1], dtype, 3, 1, 2) == [after.get(b, "ok") for b in ALL]
    assert scene.load(scene.one, dtype, 3) == ["absent" if b in (1, 3) else "ok" for b in ALL]
    assert scene.one.ask("resume", dtype) == {**computed, "recomputed": [1, 3]}
