"""The scheduler's half against a real node: what it tells an engine to load and to save, without an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from forebay.client import Client, Hints, MatchResult, WritePlan
from forebay.connectors.vllm import scheduler
from forebay.connectors.vllm.advice import Advice
from forebay.connectors.vllm.messages import Load, Rows, Save, WorkerReport
from forebay.ranks import held_tiles
from forebay.schema import Schema
from tests.client.conftest import NodeProcess, eventually, halted
from tests.connectors.bench import GROUP, Bench, Make
from tests.connectors.fakes import BLOCK, BLOCKS, PLAIN, Adapter, Output, Request, hashes

VALUE = bytes(GROUP.layout().value_bytes)

T = TypeVar("T")


def until(something: Callable[[], T]) -> T:
    """What a function answers, as soon as it answers something."""
    answers: list[T] = []

    def answered() -> bool:
        answers.append(something())
        return bool(answers[-1])

    eventually(answered, "an answer", 60)
    return answers[-1]


def test_what_nobody_has_is_computed_and_saved_as_it_gets_whole(make: Make) -> None:
    bench, request = make(), Request("r", hashes("a"))
    assert bench.arrive(request) == (0, False)
    assert bench.count("missed_blocks:absent") == BLOCKS
    (first,) = bench.compute(request, 2 * BLOCK + 3).saves
    assert first.rows.keys == tuple(hashes("a")[:2]) and first.rows.blocks == (100, 101)
    assert bench.compute(request, 5).saves == (), "no further block is whole"
    (second,) = bench.compute(request, request.num_prompt_tokens - request.num_computed_tokens).saves
    assert second.rows.keys == tuple(hashes("a")[2:]) and second.rows.blocks == (102, 103, 104)


def test_a_long_step_is_saved_in_parts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_SAVE_BYTES", 2 * len(VALUE) + 1)
    bench, request = make(), Request("r", hashes("a"))
    bench.arrive(request)
    saves = bench.compute(request, request.num_prompt_tokens).saves
    assert [save.rows.keys for save in saves] == [tuple(hashes("a")[i : i + 2]) for i in (0, 2, 4)]
    assert [save.rows.blocks for save in saves] == [(100, 101), (102, 103), (104,)]
    bench.half.heard(WorkerReport(saved={saves[0].number: 1}), set(), set())
    other = Request("o", hashes("a"))
    bench.arrive(other)
    (again,) = bench.compute(other, other.num_prompt_tokens).saves
    assert again.rows.keys == tuple(hashes("a")[:2]), "the others are under way"


def test_decoded_tokens_count_once_they_are_accepted(make: Make) -> None:
    bench, request = make(), Request("r", hashes("a"))
    bench.arrive(request)
    bench.compute(request, request.num_prompt_tokens)
    request.num_tokens += 8  # they are 95 now, and the step below guesses four more
    assert bench.compute(request, 12).saves == (), "a block that ends in guesses is none"
    request.num_tokens += 1
    request.block_hashes.append(hashes("a", 6)[5])
    request.num_computed_tokens = request.num_tokens - 1
    (save,) = bench.compute(request, 1).saves
    assert save.rows.keys == (hashes("a", 6)[5],) and save.rows.blocks == (105,)


@pytest.mark.parametrize(("policy", "saved"), [("all", BLOCKS + 1), ("prompt", BLOCKS), ("none", 0)])
def test_policies_of_saving(make: Make, policy: str, saved: int) -> None:
    bench, request = make(save=policy), Request("r", hashes("a", BLOCKS + 1))
    request.num_tokens += BLOCK
    bench.arrive(request)
    assert sum(len(save) for save in bench.compute(request, request.num_tokens).saves) == saved


def test_a_prompt_that_is_too_short_is_not_saved(make: Make) -> None:
    request = Request("r", hashes("a"))
    for least, saved in ((request.num_prompt_tokens + 1, 0), (request.num_prompt_tokens, 1)):
        bench = make(save_min_tokens=least)
        request.num_computed_tokens = 0
        bench.arrive(request)
        assert len(bench.compute(request, request.num_prompt_tokens).saves) == saved


def test_blocks_are_saved_when_they_come_by_again(make: Make) -> None:
    bench = make(save="second_touch")
    first, second = Request("x", hashes("n")), Request("y", [*hashes("n", 3), *hashes("other", 2)])
    for request in (first, second):
        bench.arrive(request)
    assert bench.compute(first, first.num_prompt_tokens).saves == ()
    (save,) = bench.compute(second, second.num_prompt_tokens).saves
    assert save.rows.keys == tuple(hashes("n", 3)) and save.rows.blocks == (100, 101, 102)


def test_a_run_of_blocks_after_the_local_hit_is_loaded(make: Make) -> None:
    bench, request = make(), Request("r", hashes("b"))
    bench.put([request.block_hashes[i] for i in (0, 1, 2, 4)])
    assert bench.arrive(request, BLOCK) == (2 * BLOCK, True)
    assert bench.count("hit_blocks") == 2
    assert bench.count("missed_blocks:absent") == bench.count("missed_blocks:behind_gap") == 1
    bench.half.allocated(request, [[7, 8, 9]], 2 * BLOCK)
    (load,) = bench.half.step(Output()).loads
    assert load == Load("r", (Rows(0, tuple(request.block_hashes[1:3]), (8, 9)),))
    bench.half.allocated(request, [[7, 8, 9, 10]], 0)
    assert bench.half.step(Output()).loads == (), "the second call of an asynchronous load says nothing"
    bench.half.heard(WorkerReport(loaded={"r": 0.1}), {"r"}, set())
    request.num_computed_tokens = 3 * BLOCK
    (save,) = bench.compute(request, 2 * BLOCK + 7).saves
    assert save.rows.keys == (request.block_hashes[3],), "what the node has is not saved again"


def test_the_last_block_of_a_prefix_is_computed_anew_where_drafts_of_the_engine_need_it(make: Make) -> None:
    bench, request = make(groups=replace(PLAIN, redrafted=True)), Request("r", hashes("b"))
    bench.put(list(request.block_hashes[:3]))
    assert bench.arrive(request, BLOCK) == (BLOCK, True)
    assert bench.ask(request, BLOCK) == (BLOCK, True), "not one less each time"
    assert bench.ask(request, 2 * BLOCK) == (0, False)
    request.num_computed_tokens = 2 * BLOCK
    (save,) = bench.compute(request, 2 * BLOCK).saves
    assert save.rows.keys == (request.block_hashes[3],), "what the node has is not saved again"


def test_a_request_whose_load_failed_is_not_asked_again_and_saved_anew(make: Make) -> None:
    bench, request = make(), Request("r", hashes("c"))
    bench.put(request.block_hashes)
    assert bench.arrive(request) == (BLOCKS * BLOCK, True)
    bench.half.allocated(request, [list(range(BLOCKS))], BLOCKS * BLOCK)
    bench.half.step(Output())
    bench.half.heard(WorkerReport(loaded={"r": 0.1}), {"r"}, {2})
    assert bench.half.matched(request, 0) == (0, False), "however often vLLM comes back: no livelock"
    request.num_preemptions += 1
    assert bench.half.matched(request, 0) == (0, False)
    assert bench.compute(request, request.num_prompt_tokens).saves == ()
    other = Request("o", hashes("c"))
    assert bench.arrive(other) == (BLOCKS * BLOCK, True), "another request may try"


def test_one_rank_may_say_that_it_lacks_a_block_before_the_last_one_has_ended(make: Make) -> None:
    bench, request = make(ranks=2), Request("r", hashes("c"))
    bench.put(request.block_hashes)
    assert bench.arrive(request) == (BLOCKS * BLOCK, True)
    bench.half.allocated(request, [list(range(BLOCKS))], BLOCKS * BLOCK)
    bench.half.step(Output())
    bench.half.heard(WorkerReport(loaded={"r": 0.1}), set(), {0})
    bench.half.heard(WorkerReport(loaded={"r": 0.2}), {"r"}, set())
    assert bench.half.matched(request, 0) == (0, False), "vLLM comes back at once: no livelock"


def test_blocks_of_a_failed_load_are_saved_again(make: Make) -> None:
    bench, request = make(), Request("r", hashes("d"))
    bench.put(request.block_hashes)
    bench.arrive(request)
    bench.half.allocated(request, [list(range(BLOCKS))], BLOCKS * BLOCK)
    bench.half.step(Output())
    bench.half.heard(WorkerReport(), {"r"}, {0, 1, 2, 3, 4})
    (save,) = bench.compute(request, request.num_prompt_tokens).saves
    assert save.rows.keys == tuple(request.block_hashes), "the node sorts out which of them it still has"


def one_loads_for_three(bench: Bench, seed: str) -> tuple[Request, Request]:
    """Of three requests that begin alike "x" loads what is stored; the others, which wait for it."""
    first, second, third = (Request(name, hashes(seed)) for name in "xyz")
    bench.put(first.block_hashes)
    assert bench.arrive(first) == (BLOCKS * BLOCK, True)
    bench.half.allocated(first, [list(range(BLOCKS))], BLOCKS * BLOCK)
    bench.half.step(Output())
    for request in (second, third):
        bench.half.arrived(request)
    eventually(lambda: all(bench.half._requests[ident].answer is not None for ident in "yz"), "answers")
    assert [bench.half.matched(request, 0) for request in (second, third)] == [(None, False)] * 2
    return second, third


def test_what_one_request_loads_the_others_wait_for(make: Make) -> None:
    bench = make()
    other = Request("o", hashes("j"))
    bench.put(other.block_hashes)
    second, _ = one_loads_for_three(bench, "i")
    assert bench.arrive(other) == (BLOCKS * BLOCK, True), "which begins in another way"
    assert bench.ask(second, BLOCK) == ((BLOCKS - 1) * BLOCK, True), "after what is not being loaded"
    bench.half.heard(WorkerReport(loaded={"x": 0.1}), {"x"}, set())
    assert bench.half.matched(second, BLOCKS * BLOCK) == (0, False), "it has all of it from the engine"


def test_nobody_waits_twice(make: Make) -> None:
    """A load that fails late would hold up those that begin like it one after the other."""
    bench = make()
    second, third = one_loads_for_three(bench, "k")
    bench.half.heard(WorkerReport(loaded={"x": 0.1}), {"x"}, {0})
    for request in (second, third):
        assert bench.half.matched(request, 0) == (BLOCKS * BLOCK, True)
        bench.half.allocated(request, [list(range(BLOCKS))], BLOCKS * BLOCK)
    bench.half.ended(second)
    fourth = Request("w", hashes("k"))
    assert bench.arrive(fourth) == (BLOCKS * BLOCK, True), "who it would wait for was given up"


def test_a_preempted_request_is_asked_about_anew(make: Make) -> None:
    bench, request = make(), Request("r", hashes("e"))
    assert bench.arrive(request) == (0, False)
    bench.put(request.block_hashes[:3])
    assert bench.ask(request) == (0, False), "one answer serves until then"
    request.num_preemptions += 1
    assert bench.ask(request) == (3 * BLOCK, True)


def test_two_requests_do_not_save_the_same_block_at_once(make: Make) -> None:
    bench = make()
    first, second, third = (Request(name, hashes("f")) for name in "xyz")
    for request in (first, second, third):
        bench.arrive(request)
    (save,) = bench.compute(first, first.num_prompt_tokens).saves
    assert bench.compute(second, second.num_prompt_tokens).saves == ()
    bench.half.heard(WorkerReport(saved={save.number: 1}), set(), set())
    assert bench.compute(third, third.num_prompt_tokens).saves, "that save has ended, perhaps in vain"


def test_an_observer_counts_and_does_nothing(make: Make) -> None:
    bench, request = make(mode="observe"), Request("r", hashes("g"))
    bench.put(request.block_hashes[:2])
    assert bench.arrive(request) == (0, False)
    assert bench.count("hit_blocks") == 2
    work = bench.compute(request, request.num_prompt_tokens)
    assert (work.saves, work.offer) == ((), None)


def test_what_cannot_be_told_apart_is_left_alone(make: Make) -> None:
    bench = make()
    bench.put(hashes("h"))
    for odd in ({"mm_features": (1,)}, {"prompt_embeds": 1}, {"lora_request": Adapter()}):
        request = Request(next(iter(odd)), hashes("h"), **odd)
        assert bench.arrive(request) == (0, False)
        assert bench.compute(request, request.num_prompt_tokens).saves == ()
    later = Request("later", hashes("later"))
    bench.arrive(later)
    later.mm_features = (1,)  # as a session gets with its next input
    assert bench.compute(later, later.num_prompt_tokens).saves == ()
    salted = Request("s", hashes("h"), cache_salt="x")
    assert bench.arrive(salted) == (0, False)
    (save,) = bench.compute(salted, salted.num_prompt_tokens).saves
    assert {len(key) for key in save.rows.keys} == {64}


def test_images_are_looked_up_and_stored_where_the_schema_tells_processors_apart(make: Make) -> None:
    bench = make(multimodal=True)
    bench.put(hashes("h")[:2])
    image, embeddings = SimpleNamespace(modality="image"), SimpleNamespace(modality="prompt_embeds")
    seen = Request("seen", hashes("h"), mm_features=(image,))
    assert bench.arrive(seen) == (2 * BLOCK, True)
    (save,) = bench.compute(seen, seen.num_prompt_tokens).saves
    assert len(save.rows.keys) == BLOCKS - 2
    for odd in ({"mm_features": (image, embeddings)}, {"mm_features": (image,), "prompt_embeds": 1}):
        embedded = Request(str(len(odd)), hashes("h"), **odd)
        assert bench.arrive(embedded) == (0, False)
        assert bench.compute(embedded, embedded.num_prompt_tokens).saves == ()


def test_the_guard_has_the_last_word(make: Make) -> None:
    bench = make(guard=True, prefill_tokens_per_s=1 << 40)
    bench.put(hashes("i"))
    first, second = Request("x", hashes("i")), Request("y", hashes("i"))
    assert bench.arrive(first) == (BLOCKS * BLOCK, True)
    bench.half.allocated(first, [list(range(BLOCKS))], BLOCKS * BLOCK)
    bench.half.heard(WorkerReport(loaded={"x": 0.5}), {"x"}, set())
    assert bench.arrive(second) == (0, False)
    assert bench.count("decisions:unknown") == bench.count("decisions:slower") == 1
    assert bench.count("lost_blocks:guard") == BLOCKS


def test_a_step_that_computes_nothing_waits_for_an_answer(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, request = make(), Request("r", hashes("idle"))
    monkeypatch.setattr(scheduler, "_IDLE_S", 60)
    bench.half.arrived(request)
    bench.half.step(Output())
    assert bench.half.matched(request, 0) == (0, False)


def test_a_node_that_does_not_answer_is_not_waited_for(make: Make, shared_node: NodeProcess) -> None:
    bench, request = make(probe_timeout_ms=200), Request("r", hashes("j"))
    with halted(shared_node.process.pid):
        assert bench.arrive(request) == (0, False)
    assert sum(bench.count(f"missed_blocks:{why}") for why in ("deadline_exceeded", "unavailable")) == BLOCKS


def burst(bench: Bench, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[list[Request]], object]) -> int:
    """How many lookups are made of six requests at once when the first have no answer until ``meanwhile`` is over."""
    calls: list[int] = []
    answered = threading.Event()

    def match(client: Client, keys: Sequence[Any], **kwargs: Any) -> MatchResult:
        calls.append(len(keys))
        answered.wait(60)
        return MatchResult((False,) * len(keys), ("deadline_exceeded",) * len(keys), {}, 0.0, 0)

    monkeypatch.setattr(Client, "match", match)
    requests = [Request(str(i), hashes(f"burst {i}")) for i in range(6)]
    for request in requests:
        bench.half.arrived(request)
    meanwhile(requests)
    answered.set()
    probes = [bench.half._requests[request.request_id].probe for request in requests]
    eventually(lambda: all(probe is not None and probe.done() for probe in probes), "all answers", 60)
    return len(calls)


def test_lookups_that_nobody_waits_for_any_more_are_not_made(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(probe_timeout_ms=1)
    assert burst(bench, monkeypatch, lambda requests: [bench.ask(request) for request in requests]) <= 2


def test_lookups_that_wait_are_not_made_once_the_node_is_left_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(probe_timeout_ms=60_000)
    link = bench.half._link
    assert link is not None

    def meanwhile(requests: list[Request]) -> None:
        for _ in requests:
            link.note(["unavailable"])

    assert burst(bench, monkeypatch, meanwhile) <= 2


def test_a_node_is_not_blamed_for_lookups_that_had_waited(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(probe_timeout_ms=60_000)
    monkeypatch.setattr(
        Client, "match", lambda client, keys, **_: MatchResult((False,), ("deadline_exceeded",), {}, 0, 0)
    )
    half, link = bench.half, bench.half._link
    assert link is not None

    def look_up(left_ms: int) -> None:
        for _ in range(3):
            half._words([(b"any", 0)], half._clock.monotonic_ms() + left_ms)

    look_up(20_000)
    assert link.client is not None
    look_up(60_000)
    assert link.client is None


def test_a_request_that_wants_everything_computed_is_not_loaded(make: Make) -> None:
    bench = make()
    bench.put(hashes("logprobs"))
    assert bench.arrive(Request("r", hashes("logprobs"), skip_reading_prefix_cache=True)) == (0, False)
    assert bench.count("hit_blocks") == 0


def test_workers_have_a_session_for_whatever_they_are_to_do(make: Make) -> None:
    bench, stored, new = make(), Request("s", hashes("o")), Request("n", hashes("p"))
    bench.put(stored.block_hashes)
    assert bench.arrive(new) == (0, False)
    assert bench.arrive(stored) == (BLOCKS * BLOCK, True)
    link = bench.half._link
    assert link is not None
    for _ in range(3):
        link.note(["unavailable"])
    assert link.client is None, "the node is left alone from now on"
    bench.half.allocated(stored, [list(range(BLOCKS))], BLOCKS * BLOCK)
    work = bench.compute(new, new.num_prompt_tokens)
    assert work.offer is not None and work.loads


def test_a_rank_that_comes_late_is_not_sent_to_a_session_that_is_gone(make: Make) -> None:
    bench = make()
    offer = bench.half.step(Output()).offer
    assert offer is not None and bench.half.step(Output()).offer == offer
    gone = bench.half._offer = replace(offer, token=b"of a session that was lost")
    newer = bench.half.step(Output()).offer
    assert newer == replace(offer, number=2)
    bench.half.heard(WorkerReport(joined={0: (2, "host")}), set(), set())
    bench.half._offer = gone
    assert bench.half.step(Output()).offer is None, "who has joined opens one of its own"


class Ranks:
    """Two workers' clients in the session that a half offers."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        offer = bench.half.step(Output()).offer
        assert offer is not None
        arguments: dict[str, Any] = {"token": bench.node.token, "schema": Schema.from_cbor(offer.schema)}
        self.clients = [Client.join(bench.node.url, session_token=offer.token, **arguments) for _ in range(2)]
        joined = {rank: (offer.number, client.host_nqn) for rank, client in enumerate(self.clients)}
        bench.half.heard(WorkerReport(joined=joined), set(), set())
        assert bench.half.step(Output()).offer is None, "all have joined"

    def plan(self, request: Request) -> tuple[int, WritePlan]:
        """What they are told to write a request's blocks by."""
        (save,) = self.bench.compute(request, request.num_prompt_tokens).saves
        assert self.bench.half.waited_for, "the engine goes on stepping"
        ((number, plan),) = until(lambda: self.bench.half.step(Output()).plans)
        assert number == save.number and not self.bench.half.waited_for
        return number, WritePlan.from_bytes(plan)

    def write(self, rank: int, plan: WritePlan) -> list[str]:
        tiles = held_tiles(GROUP, rank, 2)
        value = VALUE[: sum(GROUP.layout().lengths[tile] for tile in tiles)]
        return [result.reason for result in self.clients[rank].put_tiles(plan, tiles, [value] * len(plan))]

    def close(self) -> None:
        for client in self.clients:
            client.close()


def test_several_ranks_write_by_one_plan(make: Make) -> None:
    bench, request = make(ranks=2), Request("r", hashes("k"))
    early = Request("early", hashes("early"))
    bench.arrive(early)
    assert bench.compute(early, early.num_prompt_tokens).saves == (), "not before all ranks have joined"
    ranks = Ranks(bench)
    bench.arrive(request)
    number, plan = ranks.plan(request)
    assert ranks.write(0, plan) == ["pending"] * BLOCKS
    assert ranks.write(1, plan) == ["ok"] * BLOCKS
    bench.half.heard(WorkerReport(saved={number: 2}), set(), set())
    assert bench.arrive(Request("o", hashes("k"))) == (BLOCKS * BLOCK, True)
    ranks.close()


def test_what_one_rank_cannot_write_is_given_up_for_all(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, request = make(ranks=2), Request("r", hashes("l"))
    ranks, given_up = Ranks(bench), list[int]()
    leader = bench.half._client()
    assert leader is not None
    abort = leader.abort
    monkeypatch.setattr(leader, "abort", lambda *args, **options: given_up.append(abort(*args, **options)))
    bench.arrive(request)
    number, plan = ranks.plan(request)
    assert ranks.write(0, plan) == ["pending"] * BLOCKS
    with bench.client() as client:

        def put() -> set[str]:
            return {result.reason for result in client.put(request.block_hashes, [VALUE] * BLOCKS)}

        assert put() == {"pending"}, "somebody is writing it"
        bench.half.heard(WorkerReport(saved={number: 2}, failed={number}), set(), set())
        eventually(lambda: given_up == [BLOCKS], "the places, which would be free some day by themselves", 60)
        eventually(lambda: put() == {"ok"}, "somebody else's blocks", 60)
    ranks.close()


def test_a_save_that_others_have_made_meanwhile_has_no_plan(make: Make) -> None:
    bench, request = make(ranks=2), Request("r", hashes("m"))
    ranks = Ranks(bench)
    bench.arrive(request)
    bench.put(request.block_hashes)
    (save,) = bench.compute(request, request.num_prompt_tokens).saves
    assert until(lambda: bench.half.step(Output()).dropped) == (save.number,)
    assert bench.count("present_blocks") == BLOCKS
    ranks.close()


def test_blocks_in_another_keyspace_are_counted_and_told_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    bench = make()
    other = replace(bench.schema, groups=(replace(GROUP, format="of another CPU"),))
    with bench.node.connect(schema=other) as there:
        assert there.put(hashes("elsewhere")[1:4], [VALUE] * 3)[0].stored
        bench.put(hashes("elsewhere")[:1])
        with caplog.at_level("WARNING", "vllm.forebay"):
            for ident in ("r", "again"):
                assert bench.arrive(Request(ident, hashes("elsewhere"))) == (BLOCK, True)
        assert bench.count("missed_blocks:other_keyspace") == 2 * (BLOCKS - 1), "what is behind the first one, too"
        assert bench.count("missed_blocks:absent") == 0
        (told,) = [record.getMessage() for record in caplog.records if "another" in record.getMessage()]
        assert other.keyspace.hex()[:16] in told and "groups[0].format: " in told


def test_blocks_of_another_generation(make: Make) -> None:
    bench = make(generation=3)
    with bench.node.connect(schema=bench.schema, generation=2) as before:
        assert before.put(hashes("before"), [VALUE] * BLOCKS)[0].stored
    assert bench.arrive(Request("r", hashes("before"))) == (0, False)
    assert bench.count("missed_blocks:other_generation") == BLOCKS


def test_what_a_request_says_goes_with_its_blocks(make: Make) -> None:
    bench = make()
    one = Request("one", hashes("one"), session_id="talk", priority=2)
    two = Request("two", hashes("two"))
    three = Request("three", [*hashes("one", 2), *hashes("three", 3)], session_id="late")
    for each in (one, two, three):
        bench.arrive(each)
    work = bench.half.step(Output({each.request_id: each.num_prompt_tokens for each in (one, two, three)}))
    first, second, third = work.saves
    assert first.advice.hints == Hints(priority_class=2, session="talk", origin="vllm")
    assert second.advice == Advice() and third.advice.hints == Hints(session="late", origin="vllm")
    assert first.rows.keys == tuple(hashes("one")) and first.parents == (b"", *hashes("one")[:-1])
    assert third.rows.keys == tuple(hashes("three", 3)), "what another saves in this step is saved once"
    assert third.parents == (hashes("one", 2)[1], *hashes("three", 2))


def beside(bench: Bench, request: Request, others: int) -> Sequence[Save]:
    """A step that computes a request after so many tokens that another connector loads in it, with what it saves."""
    assert bench.arrive(request) == (0, False)
    request.num_computed_tokens = others
    tokens = request.num_prompt_tokens - others
    work = bench.half.step(Output({request.request_id: tokens}, has_sync_kv_loads=True))
    request.num_computed_tokens += tokens
    return work.saves


def test_nothing_is_saved_before_it_is_known_that_another_connectors_load_was_whole(make: Make) -> None:
    bench, request, same = make(), Request("r", hashes("beside")), Request("s", hashes("same step"))
    before = Request("before", hashes("before it"))
    bench.arrive(before)
    assert bench.compute(before, BLOCK).saves, "a step that is still under way"
    assert beside(bench, request, 2 * BLOCK) == ()
    bench.arrive(same)
    assert bench.compute(same, same.num_prompt_tokens).saves == (), "it may begin with what is loaded"
    bench.half.stepped()
    assert bench.half.step(Output({"r": 1})).saves == (), "that was the step before"
    bench.half.stepped()
    (save,) = bench.half.step(Output({"r": 1})).saves
    assert save.rows.keys == tuple(hashes("beside"))
    (save,) = bench.half.step(Output({"s": 1})).saves
    assert save.rows.keys == tuple(hashes("same step"))


def test_what_was_computed_with_another_connectors_failed_load_is_never_saved(make: Make) -> None:
    bench, request, same = make(), Request("r", hashes("beside")), Request("s", hashes("same step"))
    assert beside(bench, request, 2 * BLOCK) == ()
    bench.arrive(same)
    assert bench.compute(same, same.num_prompt_tokens).saves == ()
    assert bench.half.heard(WorkerReport(), set(), {101}) == set(Output().tables[0]), "vLLM's own cache forgets it, too"
    for _ in range(2):
        bench.half.stepped()
    for ident in ("r", "s"):
        assert bench.half.step(Output({ident: 1})).saves == ()
    later = Request("later", hashes("later"))
    bench.arrive(later)
    (save,) = bench.compute(later, later.num_prompt_tokens).saves
    assert save.rows.keys == tuple(hashes("later"))


def test_a_step_of_own_loads_alone_is_saved_at_its_end(make: Make) -> None:
    bench = make(load="layers")
    loaded, cached = Request("loaded", hashes("loaded")), Request("cached", hashes("cached"))
    bench.put(hashes("loaded", 2))
    assert bench.arrive(loaded) == (2 * BLOCK, False)
    assert bench.arrive(cached, BLOCK) == (0, False)
    bench.half.allocated(loaded, [list(range(100, 105))], 2 * BLOCK)
    loaded.num_computed_tokens, cached.num_computed_tokens = 2 * BLOCK, BLOCK
    tokens = {each.request_id: each.num_prompt_tokens - each.num_computed_tokens for each in (loaded, cached)}
    saves = bench.half.step(Output(tokens, has_sync_kv_loads=True)).saves
    assert {key for save in saves for key in save.rows.keys} == {*hashes("loaded")[2:], *hashes("cached")}


def test_bounds_of_a_request_are_kept(make: Make) -> None:
    bench = make()
    bench.put(hashes("bound"))
    request = Request("r", hashes("bound"), kv_transfer_params={"max_load_tokens": 2 * BLOCK + 3})
    assert bench.arrive(request, BLOCK) == (2 * BLOCK, True)
    other = Request(
        "o", hashes("unbound"), kv_transfer_params={"max_load_tokens": 0, "max_offload_tokens": 3 * BLOCK - 1}
    )
    assert bench.arrive(other) == (0, False)
    (save,) = bench.compute(other, other.num_prompt_tokens).saves
    assert save.rows.keys == tuple(hashes("unbound", 2))
