"""The transition table itself, and the diagram that is generated from it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.nvmetcp import authentication
from forebay.nvmetcp.states import RECEIVE_INPUTS, TRANSITIONS, Input, Role, State, state_diagram

DIAGRAM = Path(__file__).parents[2] / "docs" / "nvmetcp-states.md"


def test_the_diagram_in_docs_is_the_table() -> None:
    wanted = state_diagram() + "\n" + authentication.state_diagram()
    assert DIAGRAM.read_text() == wanted, "python -m forebay.nvmetcp.states > docs/nvmetcp-states.md"


@pytest.mark.parametrize("role", Role)
def test_every_state_can_be_reached_and_left(role: Role) -> None:
    table = TRANSITIONS[role]
    assert set(table) == set(State)
    reached = {State.NEW}
    for _ in State:
        reached |= {target for state in reached for target in table[state].values()}
    assert reached == set(State)
    assert all(Input.END_OF_STREAM in table[state] for state in State if state is not State.CLOSED)


@pytest.mark.parametrize("role", Role)
def test_each_role_is_fed_only_by_pdus_of_the_other(role: Role) -> None:
    used = {cause for row in TRANSITIONS[role].values() for cause in row if cause.value.startswith("recv")}
    assert used - {Input.RECV_COMMAND_DATA} == set(RECEIVE_INPUTS[role].values())


@given(st.sampled_from(Role), st.lists(st.sampled_from(Input), max_size=30))
def test_nothing_follows_the_end(role: Role, inputs: list[Input]) -> None:
    state = State.NEW
    ended = False
    for cause in inputs:
        target = TRANSITIONS[role][state].get(cause)
        if target is None:
            continue
        assert not ended or target in (State.TERMINATED, State.CLOSED)
        state = target
        ended = state in (State.TERMINATED, State.CLOSED)
