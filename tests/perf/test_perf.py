"""Every comparison runs at a tiny size, so that none rots. No figure is judged here."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from perf import page, report
from perf.__main__ import main
from perf.harness import Row, Sample, Side, Sizes, file_system, gb_per_s_row, interleave, interval, latency_row
from perf.ratios import BENCHMARKS, OF_ENGINES
from perf.redis_peer import missing_redis
from perf.workload import Bench, Skipped, Workload, Wrong

TINY = Sizes(
    name="tiny",
    repeats=1,
    slot_bytes=1 << 20,
    slot_calls=128,
    working_bytes=1 << 20,
    node_bytes=64 << 20,
    batch=4,
    block_bytes=(128 << 10,),
    match_blocks=2_000,
    match_calls=5,
    flushes=2,
    scale_blocks=2_000,
    replay_s=0.5,
)
MEMORY = Path("/dev/shm")
VLLM = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(600)]
"""Engines take a while to start, up to four of them on two cores."""


@pytest.mark.skipif(file_system(MEMORY) != "tmpfs", reason="/dev/shm is not on tmpfs")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=VLLM if name in OF_ENGINES else []) for name in BENCHMARKS],
)
def test_comparison_runs(name: str, tmp_path: Path) -> None:
    if "redis" in name and (missing := missing_redis()):
        pytest.skip(missing)
    disk = None if file_system(tmp_path) == "tmpfs" else tmp_path
    try:
        rows = list(BENCHMARKS[name](Bench(TINY, MEMORY, disk)))
    except Skipped as reason:
        pytest.skip(str(reason))
    assert rows
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        told = json.loads(json.dumps(row.as_json()))
        assert told["ratio"]["low"] <= told["ratio"]["median"] <= told["ratio"]["high"]
        assert told["ratio"]["median"] > 0
        assert told["file_system"]
    assert report.table(rows).count("\n") == len(rows) + 1
    assert not list(tmp_path.iterdir())


def sample(gigabytes_per_s: float, cpu_s: float) -> Sample:
    return Sample(10**9, 1 / gigabytes_per_s, cpu_s, cpu_s / 2)


def test_ratio_is_taken_round_by_round() -> None:
    ours = [sample(1, 0.2), sample(2, 0.2), sample(4, 0.2)]
    baseline = [sample(2, 0.1), sample(4, 0.1), sample(8, 0.1)]
    row = gb_per_s_row("a/b", "a against b", ours, baseline, aim=0.9, cpu_aim=1.2, details={"block_bytes": 1})
    told = row.as_json()
    assert told["ratio"] == {"median": 0.5, "low": 0.5, "high": 0.5}
    assert told["met"] is False
    assert (told["ours"]["median"], told["baseline"]["median"]) == (2, 4)
    assert told["cpu_s_per_gb"] == {"client": 0.2, "server": 0.1, "both": 0.3}
    assert (told["cpu_ratio"], told["cpu_met"]) == (2, False)
    assert "a/b" in report.table([row])


def test_what_has_no_aim_is_neither_met_nor_missed() -> None:
    row = gb_per_s_row("a/b", "", [sample(1, 1)], [sample(1, 1)], aim=None, details={})
    assert row.met is None
    assert row.as_json()["cpu_met"] is None


def test_latency_is_held_from_above() -> None:
    latencies_s = [i / 1e3 for i in range(1, 101)]
    row = latency_row("m", "", latencies_s, quantile=0.99, aim_ms=99.5, details={})
    assert row.ours.median == pytest.approx(100)
    assert row.met is False
    assert row.as_json()["latency_ms"] == {"p50": 51, "p99": 100}
    assert latency_row("m", "", latencies_s, quantile=0.5, aim_ms=60, details={}).met is True


def test_interval_holds_the_median() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 100.0])
    assert found.median == 3
    assert found.low < 3 < found.high


def test_sides_take_turns_and_clean_up() -> None:
    order: list[str] = []

    def side(name: str) -> Side:
        def work() -> int:
            order.append(name)
            return 1

        return Side(name, work, before=lambda: order.append(f"-{name}"), after=lambda: order.append("end"))

    samples = interleave([side("a"), side("b")], 2)
    assert order == ["-a", "a", "-b", "b", "-b", "b", "-a", "a", "-a", "a", "-b", "b", "end", "end"]
    assert [len(s) for s in samples.values()] == [2, 2]


def test_other_bytes_are_not_measured() -> None:
    work = Workload(TINY, TINY.block_bytes[0], 2)
    with pytest.raises(Wrong):
        work.reading("liar", (), lambda first, end: None)


def test_command_prints_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(bench: Bench) -> Iterator[Row]:
        yield latency_row("m", "what", [0.001], quantile=0.5, aim_ms=2, details={"file_system": "x"})

    def absent(bench: Bench) -> Iterator[Row]:
        raise Skipped("nothing to compare with")

    monkeypatch.setattr("perf.__main__.BENCHMARKS", {"fake": fake, "absent": absent})
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    assert main(["--quick", "--save", "first"]) == 0
    said = capsys.readouterr()
    assert "[2/2] absent" in said.err
    assert "skipped: nothing to compare with" in said.err
    assert "yes" in said.out
    (path,) = (tmp_path / "results").iterdir()
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (row["name"], row["met"], row["sizes"]) == ("m", True, "quick")
    assert row["machine"]["cores"]
    assert main(["fake", "--json", "--repeats", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "m"


def test_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nonsense"])
    assert "no comparison is called nonsense" in capsys.readouterr().err


def test_page_is_made_from_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    flush = {"fdatasync_ms": {"p50": 0.1, "p99": 0.3}}
    rows = [
        gb_per_s_row("put/a", "put against a", [sample(1, 1)], [sample(2, 2)], aim=1, cpu_aim=0.6, details=flush),
        latency_row("m", "match", [0.001], quantile=0.5, aim_ms=2, details={}),
    ]
    told = [json.loads(line) for line in report.save(rows, "first", "quick").read_text().splitlines()]
    text = page.filled("# Performance\n\nRESULTS\n\n## After\n", told)
    assert "2 of 3 aims are met" in text
    assert "`put/a` | 1.00 | 2.00 | 0.50 [0.50–0.50] | ≥ 1 | **no** |" in text
    assert "put/a p50 0.1, p99 0.3" in text
    assert "`m` | 1.00 [1.00–1.00] ms | ≤ 2 | yes |" in text
    assert text.endswith("## After\n")
    assert page.filled(text, told) == text
    assert f"Measured {told[0]['date']} on " in text
    later = [told[0], {**told[1], "date": "2999-01-01"}]
    assert f"Measured {told[0]['date']} to 2999-01-01 on " in page.filled(text, later)
    again = {**told[1], "met": False}
    assert page.latest([json.dumps(row) for row in (*told, again)]) == [told[0], again]
    with pytest.raises(ValueError, match="RESULTS"):
        page.filled("no place\n", told)
