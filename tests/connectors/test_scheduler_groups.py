"""The scheduler's half with several KV cache groups, and with loads into the step that computes with them."""

from __future__ import annotations

from forebay.connectors.vllm.groups import CacheGroup, CacheGroups
from forebay.connectors.vllm.messages import Load, Rows, WorkerReport
from forebay.schema import Group
from tests.connectors.bench import GROUP, Bench, Make
from tests.connectors.fakes import BLOCK, BLOCKS, Output, Request, hashes

NULL = 0
MIXED = CacheGroups(
    (CacheGroup("full", BLOCK), CacheGroup("sliding", BLOCK, BLOCK + 2), CacheGroup("mamba", 2 * BLOCK)), BLOCK
)
"""A window of up to two blocks, and a state every two; hits are multiples of 32 tokens."""
SCHEMA = (
    GROUP,
    Group("sliding", (2,), BLOCK, 2, 64, "float32", "test", required=MIXED.groups[1].required),
    Group("mamba", (3,), 2 * BLOCK, 1, 256, "float32", "test", required=MIXED.groups[2].required),
)


def mixed(make: Make, **settings: object) -> Bench:
    bench = make(groups=MIXED, schema=SCHEMA, **settings)
    bench.half.null_block = NULL
    return bench


def test_each_group_is_asked_for_what_it_needs(make: Make) -> None:
    bench, request = mixed(make), Request("r", hashes("a"))
    bench.put(hashes("a"))
    bench.put(hashes("a")[2:4], 1)
    bench.put([hashes("a")[3]], 2)
    assert bench.arrive(request) == (4 * BLOCK, True), "the state after four blocks, and the window before it"
    assert bench.count("hit_blocks") == 4 + 2 + 1
    assert bench.count("missed_blocks:behind_gap") == 1 and bench.count("missed_blocks:absent") == 1
    tables = [[10, 11, 12, 13], [NULL, NULL, 22, 23], [NULL, 31]]
    bench.half.allocated(request, tables, 4 * BLOCK)
    (load,) = bench.half.step(Output()).loads
    keys = hashes("a")
    assert load == Load(
        "r",
        (
            Rows(0, tuple(keys[:4]), (10, 11, 12, 13)),
            Rows(1, tuple(keys[2:4]), (22, 23)),
            Rows(2, (keys[3],), (31,)),
        ),
    )


def test_one_group_that_lacks_what_it_needs_shortens_the_hit(make: Make) -> None:
    bench, request = mixed(make), Request("r", hashes("b"))
    bench.put(hashes("b"))
    bench.put(hashes("b")[:3], 1)
    bench.put([hashes("b")[1], hashes("b")[3]], 2)
    assert bench.arrive(request) == (2 * BLOCK, True)
    assert bench.ask(request, 2 * BLOCK) == (0, False), "the engine has that now"


def test_the_last_token_is_computed(make: Make) -> None:
    bench, request = mixed(make), Request("r", hashes("c", 4), num_tokens=4 * BLOCK, num_prompt_tokens=4 * BLOCK)
    for group, keys in ((0, hashes("c", 4)), (1, hashes("c", 4)), (2, [hashes("c", 4)[1], hashes("c", 4)[3]])):
        bench.put(keys, group)
    assert bench.arrive(request) == (2 * BLOCK, True), "a state would take it twice"


def test_a_request_whose_load_failed_is_computed(make: Make) -> None:
    bench, request = mixed(make), Request("r", hashes("d"))
    for group, keys in ((0, hashes("d")), (1, hashes("d")), (2, [hashes("d")[1], hashes("d")[3]])):
        bench.put(keys, group)
    assert bench.arrive(request) == (4 * BLOCK, True)
    bench.half.allocated(request, [[10, 11, 12, 13], [NULL, NULL, 22, 23], [NULL, 31]], 4 * BLOCK)
    bench.half.step(Output())
    bench.half.heard(WorkerReport(loaded={"r": 0.1}), {"r"}, set(), {"r"})
    assert bench.half.matched(request, 0) == (0, False), "it comes to an end"


def test_each_group_saves_what_its_table_has(make: Make) -> None:
    bench, request = mixed(make), Request("r", hashes("e"))
    assert bench.arrive(request) == (0, False)
    tables = ([10, 11, 12, 13, 14, 15], [NULL, NULL, NULL, 23, 24, 25], [NULL, 31, 32])
    states = {"r": [(2, 31, 4 * BLOCK), (2, 39, 3 * BLOCK)]}  # one of them in the middle of a block
    saves = bench.half.step(Output({"r": request.num_prompt_tokens}, states, tables)).saves
    keys = hashes("e")
    assert [save.rows for save in saves] == [
        Rows(0, tuple(keys), (10, 11, 12, 13, 14)),
        Rows(1, tuple(keys[3:]), (23, 24)),
        Rows(2, (keys[3],), (31,)),
    ]
    assert bench.half.step(Output({"r": 1}, {}, tables)).saves == ()


# --- loads into the step that computes with them ----------------------------------------------------------------------


def loading(make: Make, name: str, ranks: int = 1) -> tuple[Bench, Request]:
    """A request whose five blocks are loaded in the step that computes the rest, and that has been made."""
    bench, request = make(load="layers", ranks=ranks), Request(name, hashes(name))
    bench.put(request.block_hashes[:3])
    assert bench.arrive(request) == (3 * BLOCK, False), "vLLM is to compute at once"
    bench.half.allocated(request, [list(range(100, 106))], 3 * BLOCK)
    request.num_computed_tokens = 3 * BLOCK
    return bench, request


def test_a_step_that_loads_has_something_to_compute(make: Make) -> None:
    bench = make(load="layers")
    request = Request("r", hashes("f"), num_tokens=BLOCKS * BLOCK, num_prompt_tokens=BLOCKS * BLOCK)
    bench.put(request.block_hashes)
    assert bench.arrive(request) == ((BLOCKS - 1) * BLOCK, False)


def test_what_a_spoilt_step_computed_is_saved_when_it_has_been_computed_again(make: Make) -> None:
    bench, request = loading(make, "g")
    work = bench.half.step(Output({"g": 2 * BLOCK + 7}))
    (load,), (save,) = work.loads, work.saves
    assert load.in_step and save.rows.keys == tuple(request.block_hashes[3:])
    bench.half.heard(WorkerReport(loaded={"g": 0.1}), set(), {101})
    request.num_computed_tokens = BLOCK
    (again,) = bench.half.step(Output({"g": 4 * BLOCK + 7})).saves
    assert again.rows.keys == tuple(request.block_hashes), "whatever the node said it had"
    bench.half.heard(WorkerReport(saved={save.number: 1}, failed={save.number}), set(), set())
    assert bench.half._saves.has(0, request.block_hashes[3]), "by the second save"
    assert bench.half.matched(request, 0) == (0, False)


def test_a_step_that_had_everything_is_saved(make: Make) -> None:
    bench, request = loading(make, "h")
    (save,) = bench.half.step(Output({"h": 2 * BLOCK + 7})).saves
    bench.half.heard(WorkerReport(loaded={"h": 0.1}, saved={save.number: 1}), set(), set())
    request.num_computed_tokens += 2 * BLOCK + 7
    assert bench.half.step(Output({"h": 1})).saves == ()


def test_the_engine_forgets_what_is_given_up_in_the_middle_of_its_load(make: Make) -> None:
    blocks = set(range(100, 110))
    bench, request = loading(make, "i")
    bench.half.step(Output({"i": 2 * BLOCK + 7}))
    assert bench.half.ended(request, given_up=True) == blocks
    bench, request = loading(make, "j")
    bench.half.step(Output({"j": 2 * BLOCK + 7}))
    assert bench.half.ended(request) == set(), "it has been computed, with everything"
    bench, request = loading(make, "k")
    bench.half.step(Output({"k": 2 * BLOCK + 7}))
    assert bench.half.heard(WorkerReport(loaded={"k": 0.1}), set(), set()) == set()
    assert bench.half.ended(request, given_up=True) == set(), "long after"


def test_the_engine_forgets_what_a_spoilt_step_filled(make: Make) -> None:
    """Of whatever request: new ones would take it for computed before it is computed again."""
    bench, request = loading(make, "l")
    other = Request("o", hashes("o"), num_computed_tokens=4 * BLOCK)
    bench.arrive(other)
    bench.half.step(Output({"l": 2 * BLOCK + 7, "o": BLOCK}))
    assert bench.half.heard(WorkerReport(loaded={"l": 0.1}), set(), {102}) == set(range(100, 110))
    assert bench.half.matched(request, 0) == (0, False)


def test_what_a_step_loads_is_not_shared_in_that_step(make: Make) -> None:
    bench, _ = loading(make, "m")
    other = Request("o", hashes("m"))
    bench.half.arrived(other)
    assert bench.half.matched(other, 3 * BLOCK) == (None, False), "the engine has them, it believes"
    different = Request("d", hashes("different"))
    assert bench.arrive(different, BLOCK) == (0, False)
    bench.half.step(Output({"m": 2 * BLOCK + 7}))
    bench.half.heard(WorkerReport(loaded={"m": 0.1}), set(), set())
    assert bench.ask(other, 3 * BLOCK) == (0, False)
