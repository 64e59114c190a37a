"""The demo from end to end: it succeeds, notices damage, and leaves nothing behind."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay.cli.demo.run as demo_run
from forebay.cli.demo.trace import generate, sample
from forebay.cli.demo.workload import MODEL, Contents, Scale
from forebay.cli.exits import INTERRUPTED, OK, REFUSED, USAGE, WRONG_BYTES
from forebay.cli.main import run

BLOCK = 128 << 10
SMALL = ["--block-size", "128KiB", "--budget", "24MiB", "--seed", "3"]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory whose path is short: the node's socket lies in it, and pytest's own paths grow."""
    with tempfile.TemporaryDirectory(prefix="fb-") as path:
        yield Path(path)


def processes_of(folder: Path) -> list[str]:
    """Command lines of running processes that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    return subprocess.Popen(
        [sys.executable, "-m", "forebay.cli.main", "demo", *SMALL, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "TMPDIR": str(folder)},
    )


def check_report(report: dict[str, object]) -> None:
    inputs = report["inputs"]
    assert isinstance(inputs, dict)
    assert report["ok"] is True and report["requests"] == inputs["requests"] > 0
    assert report["wrong_blocks"] == report["lost_blocks"] == 0
    assert report["found_after_kill"] == report["acknowledged_at_kill"] != 0, report["misses"]
    assert report["found_at_end"] == report["acknowledged"]
    hit, ceiling = report["hit_tokens"], inputs["ceiling_tokens"]
    assert isinstance(hit, int) and 0 < hit <= ceiling


def test_the_demo(tmp_path: Path) -> None:
    with start(tmp_path, "--json") as demo:
        out, err = demo.communicate(timeout=100)
    assert demo.returncode == OK, err
    check_report(json.loads(out))
    assert "SIGKILL" in err and "infinite cache" in err
    assert list(tmp_path.iterdir()) == [] and processes_of(tmp_path) == []


def test_a_trace_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    with trace.open("w") as file:
        for request in generate(5, 20):
            print(json.dumps({"input_length": request.input_tokens, "hash_ids": request.blocks}), file=file)
    assert run(["demo", "--trace", str(trace), *SMALL, "--data", str(tmp_path / "kept")]) == OK
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "trace trace.jsonl",
        "hit rate by tokens",
        "p99",
        "acknowledged blocks found and equal",
        "RTX 4090",
        "Every byte read was right",
    ):
        assert words in text
    assert (tmp_path / "kept" / "node").is_dir() and processes_of(tmp_path) == []


def test_evictions_are_no_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--block-size", "512KiB", "--budget", "200MiB", "--capacity", "64MiB", "--data", str(tmp_path / "d")]
    assert run(["demo", *options, "--json"]) == OK
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True and report["evicted"] > 0
    assert report["found_at_end"] < report["acknowledged"]


def test_a_drive_that_is_too_small_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--capacity", "1PiB", "--data", str(tmp_path / "d")]) == REFUSED
    captured = capsys.readouterr()
    assert "CapacityShort" in captured.err and "--block-size" in captured.err and captured.out == ""


def test_a_directory_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    assert run(["demo", "--data", str(tmp_path)]) == USAGE
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def flip_a_byte(data: Path) -> None:
    """Change one byte of an acknowledged block where it lies on the drive; of one that no later request stores again.

    It is of the second conversation's first turn, which the second replica served first.
    """
    part = sample(generate(3, demo_run._GENERATED_REQUESTS), 3, (24 << 20) // BLOCK)
    contents, value = Contents(Scale.of(MODEL, BLOCK).block_bytes, 3), bytearray(BLOCK)
    second = next(n for n, group in enumerate(part.groups) if group != part.groups[0])
    block = part.requests[second].blocks[-1]
    assert sum(block in request.blocks for request in part.requests) == 1
    contents.fill(block, value)
    for path in data.rglob("*"):
        if path.is_file() and path.stat().st_size >= 64 << 20:
            with path.open("r+b") as volume:
                at, chunk = 0, 1 << 20
                while at < path.stat().st_size:
                    found = os.pread(volume.fileno(), chunk, at).find(value[:4096])
                    if found >= 0:
                        os.pwrite(volume.fileno(), bytes([value[100] ^ 1]), at + found + 100)
                        return
                    at += chunk
    raise AssertionError("the block is on no volume")


def test_a_byte_that_rots_on_the_drive_fails_the_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_run, "run_demo", functools.partial(demo_run.run_demo, while_down=flip_a_byte))
    assert run(["demo", *SMALL, "--json", "--data", str(tmp_path / "d")]) == WRONG_BYTES
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["ok"] is False
    assert report["lost_blocks"] + report["wrong_blocks"] == 1
    # the reader meets the damage, or the node's own scrubber did before
    assert re.search(r"LOST: block \d+.*(checksum_mismatch|dropped by the node as bad|absent)", captured.err)
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("starting a node", signal.SIGINT),
        ("replicas serve", signal.SIGINT),
        ("SIGKILL", signal.SIGINT),
        ("SIGKILL", signal.SIGTERM),
    ],
)
def test_interrupted_it_leaves_nothing_behind(tmp_path: Path, moment: str, number: signal.Signals) -> None:
    with start(tmp_path) as demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            if moment in line:
                break
        demo.send_signal(number)
        _out, err = demo.communicate(timeout=60)
    assert demo.returncode == INTERRUPTED, err
    assert "Traceback" not in err and "interrupted" in err
    assert list(tmp_path.iterdir()) == [] and processes_of(tmp_path) == []
