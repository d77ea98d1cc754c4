"""Two of the seeds of ``make fuzz``: one dies by two signals, one by an exception."""

from __future__ import annotations

import pytest

from tests.fuzz.play import play
from tests.fuzz.write import write


@pytest.mark.slow
def test_scripts_that_die_and_go_on_end_with_the_numbers_of_their_runs_without_a_death() -> None:
    outcomes = {seed: play(seed) for seed in (33, 21)}
    assert {seed: outcome.said for seed, outcome in outcomes.items() if outcome.verdict != "equal"} == {}
    faults = {seed: write(seed).faults for seed in outcomes}
    assert {seed: outcome.num_fired for seed, outcome in outcomes.items()} == {33: 2, 21: 1}, f"not reached: {faults}"
