"""Some of the seeds of ``make fuzz``: one dies by two signals, one by an exception, one by a flag file, and one by
fault reports: the second start refuses the first one, until what it says is done."""

from __future__ import annotations

import pytest

from tests.fuzz.play import play


@pytest.mark.slow
def test_scripts_that_die_and_go_on_end_with_the_numbers_of_their_runs_without_a_death() -> None:
    faults = {
        ("", 33): 2,
        ("", 21): 1,
        ("model", 6): 1,
        ("model", 22): 1,
    }  # on a loaded machine its training may end before the second report is heard
    outcomes = {(system, seed): play(seed, system=system) for system, seed in faults}
    assert {seed: outcome.said for seed, outcome in outcomes.items() if outcome.verdict != "equal"} == {}
    assert [seed for seed, outcome in outcomes.items() if outcome.num_fired < faults[seed]] == [], "not reached"
