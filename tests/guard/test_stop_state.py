"""The state machine of a stop: which moves are possible, and which thread may make them."""

from __future__ import annotations

import itertools

import pytest

from mindx_elastic.guard.stop_save import MOVES, StopPhase, StopState

TRAINING, STOPPING, SAVING, SAVED, FAILED = StopPhase
WAY_TO = {
    TRAINING: [],
    STOPPING: [STOPPING],
    SAVING: [STOPPING, SAVING],
    SAVED: [STOPPING, SAVING, SAVED],
    FAILED: [STOPPING, SAVING, FAILED],
}


def state_at(phase: StopPhase) -> StopState:
    state = StopState()
    for each in WAY_TO[phase]:
        state.move(each)
    return state


def test_only_the_moves_of_the_table_are_possible() -> None:
    for before, after in itertools.product(StopPhase, StopPhase):
        state = state_at(before)
        if after in MOVES[before]:
            state.move(after)
            assert state.phase is after
        else:
            with pytest.raises(RuntimeError, match=f"cannot go from {before.name} to {after.name}"):
                state.move(after)


@pytest.mark.parametrize("phase", [TRAINING, SAVING, SAVED, FAILED])
def test_a_save_is_claimed_once(phase: StopPhase) -> None:
    assert not state_at(phase).claim()
    state = state_at(STOPPING)
    assert state.claim() and state.is_mine
