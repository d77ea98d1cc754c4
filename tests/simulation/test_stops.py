"""Thousands of stops of simulated jobs: whatever goes wrong, and whenever, the promises of a stop hold."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mindx_elastic.guard import last_resort
from tests.simulation.stops import plan_of, play
from tests.simulation.world import World

EACH = 100


def test_every_kind_of_fault_strikes_and_stops_end_as_they_do_in_life() -> None:
    outcomes = [play(plan_of(seed)) for seed in range(EACH)]
    told = {text.partition(" at rank")[0] for outcome in outcomes for _, text in outcome.story if " at rank" in text}
    assert told >= {"sigterm", "kill", "exception", "hang", "freeze", "pause", "cut off", "slow store", "full disk"}
    codes = {rank.process.exit_code for outcome in outcomes for rank in outcome.ranks}
    assert codes >= {143, 75, 1, 0, -9}
    assert any(step for outcome in outcomes for rank in outcome.ranks for step, agreed in rank.saved if agreed)


def test_a_thread_of_an_earlier_test_stays_in_the_real_world() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with World(0).replaced({}):
            seen: Any = vars(last_resort)["threading"]
            assert seen.main_thread() is None
            assert pool.submit(lambda: seen.main_thread().is_alive()).result()
