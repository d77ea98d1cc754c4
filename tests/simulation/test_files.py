"""Simulated disks that fail: whatever is lost or torn, a start finds what was reported as saved, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from tests.simulation.files import Plan, play
from tests.simulation.schedules import Fault


def test_a_file_with_an_older_step_has_its_second_name_durably_before_the_newer_one_takes_its_name() -> None:
    """One rank had lost the older step and the other one had yet to write the newer: no step was whole."""
    for at in range(13, 40):
        for seed in range(6):
            plan = Plan(seed, 2, (1, 2), keep=2, is_one_name=True, faults=(Fault("power cut", at=at),))
            assert not play(plan).wrong


def test_an_older_file_whose_second_name_is_refused_keeps_its_first_one() -> None:
    """It was moved, and a power cut may keep of a move that the first name is gone, and not the second one."""
    plans = [
        Plan(1, 1, (1, 2, 3), keep=2, is_one_name=True, faults=(Fault("broken", at=at), Fault("power cut", at=cut)))
        for at in range(28, 36)
        for cut in range(at + 1, at + 5)
    ]
    outcomes = [play(replace(each, seed=seed)) for each in plans for seed in range(4)]
    assert not [outcome.wrong for outcome in outcomes if outcome.wrong]
    assert {outcome.found for outcome in outcomes} == {2, 3}


def test_a_disk_that_lies_loses_steps_and_tears_files_that_are_told_from_whole_ones() -> None:
    plans = [Plan(seed, 1, (1, 2), keep=2, is_one_name=False, faults=(Fault("lies"),)) for seed in range(60)]
    outcomes = [play(plan) for plan in plans]
    assert not [outcome.wrong for outcome in outcomes if outcome.wrong]
    assert {outcome.found for outcome in outcomes} == {None, 1, 2}
    assert sum(outcome.damaged for outcome in outcomes) > 10
