"""The embedded target answers control calls as SPDK's does: the judge is a transcript of SPDK's target (ADR 0003)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.appliance.target import rpc_script
from tests.appliance.target.conftest import eventually
from tests.appliance.target.rpc_script import STEPS, Transcript, shape
from tests.appliance.target.test_rpc import Control

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "spdk_rpc.json").read_text())
LABELS = [f"{at:02} {method}" for at, (method, _) in enumerate(STEPS)]


def covers(ours: Any, theirs: Any) -> str:
    """What `theirs` has and `ours` lacks, as a path; nothing if a client of theirs finds all that it knows in ours.

    Fields of our own may stand beside; elements of lists may come in another order.
    """
    if isinstance(theirs, dict):
        if not isinstance(ours, dict):
            return f" is {shape(ours)}"
        for name, one in theirs.items():
            if name not in ours:
                return f".{name} is missing"
            if found := covers(ours[name], one):
                return f".{name}{found}"
        return ""
    if isinstance(theirs, list):
        if not isinstance(ours, list) or len(ours) != len(theirs):
            return f" is {shape(ours)}, not {len(theirs)} elements"
        for at, one in enumerate(theirs):
            lacks = [covers(other, one) for other in ours]
            if all(lacks):
                return f"[{at}]{lacks[at]}"
        return ""
    return "" if shape(ours) == shape(theirs) else f" is {shape(ours)}, not {shape(theirs)}"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Transcript:
    directory = tmp_path_factory.mktemp("parity")
    control = Control(directory)
    try:
        return rpc_script.run(control.socket, directory)
    finally:
        control.close()


def test_the_transcript_is_of_this_script() -> None:
    assert GOLDEN["recorded_from"].startswith("SPDK v")
    assert [(step["method"], step["params"]) for step in GOLDEN["steps"]] == STEPS
    assert sum("error" in step for step in GOLDEN["steps"]) > 30


@pytest.mark.parametrize("at", range(len(STEPS)), ids=LABELS)
def test_it_answers_as_spdk_does(ours: Transcript, at: int) -> None:
    """Errors by code and message; results by keys and types, plain ones by value."""
    mine, golden = ours[at], GOLDEN["steps"][at]
    assert mine.get("error") == golden.get("error")
    if "result" in golden:
        assert not covers(mine["result"], golden["result"])
        if not isinstance(golden["result"], dict | list):
            assert mine["result"] == golden["result"]


@pytest.mark.spdk
def test_spdk_still_answers_like_the_transcript(tmp_path: Path) -> None:
    path = tmp_path / "spdk.sock"
    command = [os.environ["FOREBAY_SPDK_TGT"], "-m", "0x1", "-r", str(path), "-u", "--no-huge", "-s", "1024"]
    with (tmp_path / "spdk.log").open("wb") as log:
        process = subprocess.Popen([*command, "--interrupt-mode"], stdout=log, stderr=log)
        try:

            def answers() -> bool:
                assert process.poll() is None, (tmp_path / "spdk.log").read_text()
                with socket.socket(socket.AF_UNIX) as probe:
                    return probe.connect_ex(str(path)) == 0

            eventually(answers, "SPDK's target answers", 30)
            found = rpc_script.run(path, tmp_path)
        finally:
            process.terminate()
            process.wait(30)
    for mine, golden in zip(found, GOLDEN["steps"], strict=True):
        assert mine.get("error") == golden.get("error"), mine
        if "result" in golden:
            assert not covers(mine["result"], golden["result"]), mine
