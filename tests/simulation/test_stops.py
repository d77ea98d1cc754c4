"""Thousands of stops of simulated jobs: whatever goes wrong, and whenever, the promises of a stop hold."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mindx_elastic.guard import last_resort
from tests.simulation.schedules import shrink
from tests.simulation.stops import Fault, Plan, plan_of, play
from tests.simulation.world import World

EACH = 100


OFTEN = [range(first, first + EACH) for first in range(0, 1_000, EACH)]
DRILLED = [range(first, first + 1_000) for first in range(0, 100_000, 1_000)]


@pytest.mark.parametrize(
    "seeds", [*OFTEN, *(pytest.param(seeds, marks=pytest.mark.drill) for seeds in DRILLED)], ids=str
)
def test_a_stop_keeps_its_promises_whatever_goes_wrong(seeds: range) -> None:
    wrong = {seed: found for seed in seeds if (found := play(plan_of(seed)).wrong)}
    assert not wrong, f"tell one with: python -m tests.simulation.stops --seed {min(wrong)}"


def test_a_seed_is_a_failure_that_comes_again() -> None:
    one, other = play(plan_of(11)), play(plan_of(11))
    assert one.story == other.story
    assert one.switches == other.switches > 100


def test_every_kind_of_fault_strikes_and_stops_end_as_they_do_in_life() -> None:
    outcomes = [play(plan_of(seed)) for seed in range(EACH)]
    told = {text.partition(" at rank")[0] for outcome in outcomes for _, text in outcome.story if " at rank" in text}
    assert told >= {"sigterm", "kill", "exception", "hang", "freeze", "pause", "cut off", "slow store", "full disk"}
    codes = {rank.process.exit_code for outcome in outcomes for rank in outcome.ranks}
    assert codes >= {143, 75, 1, 0, -9}
    assert any(step for outcome in outcomes for rank in outcome.ranks for step, agreed in rank.saved if agreed)


def test_a_failure_is_told_with_the_fewest_faults_that_show_it() -> None:
    faults = tuple(Fault(kind, 0, at=1.0 + number) for number, kind in enumerate(("pause", "kill", "slow store")))
    plan = Plan(1, 2, 5, step_s=0.1, update_s=0.0, save_s=0.1, window=1, collectives="fails", faults=faults)
    smaller = shrink(plan, lambda each: any(fault.kind == "kill" for fault in each.faults))
    assert [fault.kind for fault in smaller.faults] == ["kill"]


def test_a_thread_of_an_earlier_test_stays_in_the_real_world() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with World(0).replaced({}):
            seen: Any = vars(last_resort)["threading"]
            assert seen.main_thread() is None
            assert pool.submit(lambda: seen.main_thread().is_alive()).result()
