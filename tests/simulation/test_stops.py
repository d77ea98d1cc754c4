"""Thousands of stops of simulated jobs: whatever goes wrong, and whenever, the promises of a stop hold."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from mindx_elastic.guard import last_resort
from tests.simulation.schedules import Fault
from tests.simulation.stops import plan_of, play
from tests.simulation.world import World


def test_every_kind_of_fault_strikes_and_stops_end_as_they_do_in_life() -> None:
    outcomes = [play(plan_of(seed)) for seed in range(100)]
    told = {text.partition(" at rank")[0] for outcome in outcomes for _, text in outcome.story if " at rank" in text}
    assert told >= {"sigterm", "kill", "exception", "hang", "freeze", "pause", "cut off", "slow store", "full disk"}
    codes = {rank.process.exit_code for outcome in outcomes for rank in outcome.ranks}
    assert codes >= {143, 75, 1, 0, -9}
    assert any(step for outcome in outcomes for rank in outcome.ranks for step, agreed in rank.saved if agreed)


def test_a_request_to_the_store_may_come_twice_and_late() -> None:
    """TCP does not do that; all that the ranks write would bear it."""
    told = [Fault("sigterm", rank, at=1.0) for rank in range(3)]
    faults = (Fault("doubled requests", 0, at=0.0, length_s=20.0), *told)
    outcomes = [
        play(replace(plan_of(seed), world_size=3, steps=20, step_s=0.1, faults=faults, window=1)) for seed in range(20)
    ]
    assert not [wrong for outcome in outcomes for wrong in outcome.wrong]
    assert all(outcome.doubled for outcome in outcomes)
    assert {rank.process.exit_code for outcome in outcomes for rank in outcome.ranks} == {143}


def test_each_rank_saves_its_boundary_where_the_store_is_lost_and_all_live() -> None:
    """It may come back empty: no connection of the ranks leads there."""
    lost = Fault("lost store", 0, at=0.5), Fault("sigterm", 1, at=0.6)
    outcomes = [play(replace(plan_of(seed), world_size=3, steps=20, step_s=0.1, faults=lost)) for seed in range(20)]
    assert not [wrong for outcome in outcomes for wrong in outcome.wrong]
    assert {tuple(rank.process.exit_code for rank in outcome.ranks) for outcome in outcomes} == {(75, 143, 75)}
    assert not any(agreed for outcome in outcomes for rank in outcome.ranks for _, agreed in rank.saved)


def test_a_thread_of_an_earlier_test_stays_in_the_real_world() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with World(0).replaced({}):
            seen: Any = vars(last_resort)["threading"]
            assert seen.main_thread() is None
            assert pool.submit(lambda: seen.main_thread().is_alive()).result()


def test_an_alarm_in_the_moment_in_which_the_training_ends_reaches_all_ranks() -> None:
    """The rank that had heard it saved and left, and the store with it, before the others were told: they left with 75,
    as after a death."""
    at_end = replace(plan_of(0), world_size=4, steps=4, step_s=0.1, update_s=0.01, save_s=0.001, window=1)
    told = Fault("sigterm", 0, on=("end", 4))
    outcomes = [play(replace(at_end, seed=seed, collectives="fails", faults=(told,))) for seed in range(80)]
    assert not [wrong for outcome in outcomes for wrong in outcome.wrong]
    assert {rank.process.exit_code for outcome in outcomes for rank in outcome.ranks} == {143, 0}


def test_a_rank_that_waits_for_its_stop_goes_on_when_all_have_finished() -> None:
    """It waited for the whole grace period, and ended after its deadline."""
    outcome = play(plan_of(9022972))
    assert not outcome.wrong
    assert {rank.process.exit_code for rank in outcome.ranks} == {0, -9}
