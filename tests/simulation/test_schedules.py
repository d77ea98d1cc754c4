"""Thousands of schedules of all simulations: whatever goes wrong, and whenever, the promises hold."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from tests.simulation.schedules import Fault, play_all, shrink
from tests.simulation.stops import Plan

SIMULATIONS = {
    "stops": (100, 1_000, 100_000),
    "agents": (25, 300, 100_000),
    "in_place": (15, 150, 15_000),
    "cluster": (50, 300, 100_000),
    "files": (100, 300, 100_000),
}
"""Schedules of one test, of each run, and of a drill."""
AT_ONCE = 1_000


def parts() -> Iterator[Any]:
    for name, (each, often, drilled) in SIMULATIONS.items():
        for first in range(0, often, each):
            yield pytest.param(name, range(first, first + each), id=f"{name} {first}")
        for first in range(0, drilled, AT_ONCE):
            seeds = range(first, first + AT_ONCE)
            yield pytest.param(name, seeds, id=f"{name} {first} and {AT_ONCE} more", marks=pytest.mark.drill)


@pytest.mark.parametrize(("simulation", "seeds"), [*parts()])
def test_the_promises_hold_whatever_goes_wrong(simulation: str, seeds: range) -> None:
    counts, wrong = play_all(simulation, seeds)
    assert counts["schedules"] == len(seeds)
    assert not wrong, f"tell one with: python -m tests.simulation {simulation} --seed {wrong[0][0]}"


@pytest.mark.parametrize("simulation", SIMULATIONS)
def test_a_seed_is_a_failure_that_comes_again(simulation: str) -> None:
    module = import_module(f"tests.simulation.{simulation}")
    one, other = module.play(module.plan_of(8)), module.play(module.plan_of(8))
    assert [text for _, text in one.story] == [text for _, text in other.story] or simulation == "files"
    assert one.count() == other.count()


def test_a_failure_is_told_with_the_fewest_faults_that_show_it() -> None:
    faults = tuple(Fault(kind, 0, at=1.0 + number) for number, kind in enumerate(("pause", "kill", "slow store")))
    plan = Plan(1, 2, 5, step_s=0.1, update_s=0.0, save_s=0.1, window=1, collectives="fails", faults=faults)
    smaller = shrink(plan, lambda each: any(fault.kind == "kill" for fault in each.faults))
    assert [fault.kind for fault in smaller.faults] == ["kill"]
