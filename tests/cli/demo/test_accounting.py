"""Hits, losses and estimates, against an in-memory stand-in for a node and against plain arithmetic."""

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from forebay.cli.demo.ledger import Ledger, audit
from forebay.cli.demo.replica import Outcome, Replica
from forebay.cli.demo.report import Inputs, Report, TimeToFirstToken, percentile
from forebay.cli.demo.trace import BLOCK_TOKENS, Request, ceiling_tokens
from forebay.cli.demo.workload import MODEL, Contents, Scale, block_key
from forebay.client.results import GetResult, MatchResult, PutResult, WatchEvent
from tests.cli.demo.test_trace import chains

SCALE = Scale.of(MODEL, 128 << 10)
CONTENTS = Contents(SCALE.block_bytes, seed=5)


class Shelf:
    """What a client shows of a node that forgets what it is told to."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytearray] = {}
        self.unreadable: set[bytes] = set()
        self.refused_puts = 0

    def match(self, keys: Sequence[bytes]) -> MatchResult:
        present = tuple(key in self.values for key in keys)
        prefix = present.index(False) if False in present else len(present)
        return MatchResult(present, tuple("ok" if p else "absent" for p in present), {0: prefix}, 0.0, 0)

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[GetResult]:
        results = []
        for key, buffer in zip(keys, buffers, strict=True):
            if key in self.unreadable or key not in self.values:
                results.append(GetResult(False, "checksum_mismatch" if key in self.unreadable else "absent"))
            else:
                buffer[:] = self.values[key]
                results.append(GetResult(True, "ok", None, len(buffer)))
        return results

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> list[PutResult]:
        if self.refused_puts:
            self.refused_puts -= 1
            return [PutResult(False, False, "unavailable")] * len(keys)
        results = []
        for key, value in zip(keys, values, strict=True):
            results.append(
                PutResult(key not in self.values, True, "ok" if key not in self.values else "already_exists")
            )
            self.values.setdefault(key, bytearray(value))
        return results


def serve(shelf: Shelf, requests: list[Request]) -> list[Outcome]:
    replica = Replica(cast("Any", shelf), CONTENTS)
    return [replica.serve(i, request) for i, request in enumerate(requests)]


@given(chains())
def test_one_replica_reaches_exactly_the_ceiling(requests: list[Request]) -> None:
    outcomes = serve(Shelf(), requests)
    assert sum(o.hit_tokens for o in outcomes) == ceiling_tokens(requests)
    blocks = {block for r in requests for block in r.blocks}
    assert sorted(block for o in outcomes for block in o.stored) == sorted(blocks)
    assert sum(o.written_bytes for o in outcomes) == len(blocks) * SCALE.block_bytes
    assert sum(o.read_bytes for o in outcomes) == ceiling_tokens(requests) // BLOCK_TOKENS * SCALE.block_bytes
    assert not any(o.wrong or o.misses or o.present for o in outcomes)


@given(st.integers(0, 5), st.booleans())
def test_a_bad_block_ends_the_prefix(at: int, unreadable: bool) -> None:
    shelf, request = Shelf(), Request(6 * BLOCK_TOKENS, tuple(range(6)))
    serve(shelf, [request])
    if unreadable:
        shelf.unreadable.add(block_key(at))
    else:
        shelf.values[block_key(at)][77] ^= 1
    (outcome,) = serve(shelf, [request])
    assert outcome.hit_tokens == at * BLOCK_TOKENS
    assert outcome.wrong == ([] if unreadable else [at])
    assert dict(outcome.misses) == ({"checksum_mismatch": 1} if unreadable else {})
    assert outcome.present == list(range(at, 6)) and outcome.stored == []


def test_what_could_not_be_stored_is_stored_when_the_node_is_back() -> None:
    shelf, request = Shelf(), Request(3 * BLOCK_TOKENS, (0, 1, 2))
    shelf.refused_puts = 3
    replica = Replica(cast("Any", shelf), CONTENTS)
    outcome = replica.serve(0, request)
    assert outcome.stored == [] and dict(outcome.misses) == {"unavailable": 3}
    replica.resume(outcome, request)
    assert outcome.stored == [0, 1, 2] and outcome.written_bytes == 3 * SCALE.block_bytes
    assert dict(outcome.misses) == {"unavailable": 3} and shelf.refused_puts == 0
    again = replica.serve(1, request)
    replica.resume(again, request)
    assert again.hit_tokens == 3 * BLOCK_TOKENS and again.present == []


def test_an_audit_names_what_is_missing_and_what_is_wrong() -> None:
    shelf = Shelf()
    serve(shelf, [Request(100 * BLOCK_TOKENS, tuple(range(100)))])
    del shelf.values[block_key(70)]
    shelf.unreadable.add(block_key(3))
    shelf.values[block_key(99)][0] ^= 255
    found = audit(cast("Any", shelf), CONTENTS, range(100))
    assert found.missing == {70: "absent", 3: "checksum_mismatch"} and found.wrong == (99,) and found.good == 97
    assert found.read_bytes == 98 * SCALE.block_bytes


def removed(block: int, reason: str = "evicted") -> WatchEvent:
    return WatchEvent(1, 1, "removed", block_key(block), reason=reason)


def test_only_evictions_excuse_a_missing_block() -> None:
    ledger = Ledger(range(10))
    ledger.acknowledge(Outcome(0, 0, stored=[1, 2, 3], present=[4]))
    assert ledger.lost([1, 4, 9], 0) == [1, 4]  # 9 was never acknowledged
    ledger.note(removed(1))
    ledger.note(removed(4, "deleted"))
    ledger.note(removed(999))
    assert ledger.lost([1, 4], 1) == [4]
    ledger.note(WatchEvent(1, 2, "stored", block_key(1)))
    assert ledger.lost([1], 0) == [1]


def test_evictions_that_were_counted_but_not_named_excuse_as_many() -> None:
    ledger = Ledger(range(10))
    ledger.acknowledge(Outcome(0, 0, stored=[1, 2, 3]))
    ledger.note(removed(1))
    assert ledger.lost([1, 2, 3], 1) == [2, 3]
    assert len(ledger.lost([1, 2, 3], 2)) == 1
    assert ledger.lost([1, 2, 3], 3) == []


def inputs(requests: list[Request]) -> Inputs:
    tokens = sum(r.input_tokens for r in requests)
    ceiling = ceiling_tokens(requests)
    return Inputs(
        "test", 1, MODEL.name, MODEL.bytes_per_token, SCALE.bytes_per_token, SCALE.block_bytes, 1, 1, len(requests),
        tokens, ceiling, 1 << 30,
    )  # fmt: skip


def test_the_report_counts_and_judges() -> None:
    requests = [Request(1024, (0, 1)), Request(1536, (0, 1, 2))]
    report = Report(inputs(requests))
    report.add(serve(Shelf(), requests), SCALE)
    assert (report.requests, report.input_tokens, report.hit_tokens) == (2, 2560, 1024)
    assert (report.blocks_written, report.blocks_read) == (3, 2)
    assert report.exit_code == 0 and json.loads(json.dumps(report.to_dict()))["ok"] is True
    console = Console(record=True, width=120)
    report.show(console)
    text = console.export_text()
    assert "40.0%" in text and "100% of it" in text and "Every byte read was right" in text
    for lost, wrong in ((1, 0), (0, 1)):
        report.lost_blocks, report.wrong_blocks = lost, wrong
        assert report.exit_code == 5 and report.to_dict()["ok"] is False
        report.show(console)
        assert "FAILED" in console.export_text()


def test_the_estimate_never_loads_what_is_slower_than_computing() -> None:
    # 512 tokens unscaled are 64 MiB. At 1 GiB/s they load in 62.5 ms.
    fast = Outcome(0, 1024, hit_tokens=512, match_ms=1.0, read_ms=1000.0, read_bytes=1 << 30)
    estimate = TimeToFirstToken.of([fast], SCALE, 1024.0, "test")
    assert estimate.mean_without_ms == pytest.approx(1000.0)
    assert estimate.mean_with_ms == pytest.approx(1.0 + 500.0 + 62.5)
    assert estimate.break_even_bytes_per_s == 1024 * (128 << 10)
    slow = Outcome(0, 1024, hit_tokens=512, match_ms=1.0, read_ms=1000.0, read_bytes=1 << 20)
    estimate = TimeToFirstToken.of([slow], SCALE, 1024.0, "test")
    assert estimate.mean_with_ms == pytest.approx(1.0 + 1000.0)
    assert TimeToFirstToken.of([Outcome(0, 512)], SCALE, 512.0, "test").mean_with_ms == pytest.approx(1000.0)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(1, 100))
def test_percentiles_are_values_that_so_many_do_not_exceed(values: list[float], percent: int) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(v <= found for v in values) * 100 >= percent * len(values)
    assert sum(v < found for v in values) * 100 < percent * len(values)


def test_percentile_of_nothing() -> None:
    assert percentile([], 50) == 0.0
