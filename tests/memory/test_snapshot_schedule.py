"""When snapshots are due, and how an interval is found that costs less than a percent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.memory.snapshot_schedule import SnapshotSchedule


def train(schedule: SnapshotSchedule, steps: range, *, step_s: float, cost_s: float) -> list[int]:
    """Play the training thread; the steps that were due."""
    taken = []
    extra = False
    for step in steps:
        if step > steps.start:
            schedule.note(step_s + cost_s * extra, extra=extra)
        extra = schedule.due(step)
        if extra:
            taken.append(step)
    return taken


@pytest.mark.parametrize(("every", "taken"), [(0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6]), (100, [])])
def test_a_given_interval(every: int, taken: list[int]) -> None:
    schedule = SnapshotSchedule(every)
    assert train(schedule, range(1, 8), step_s=1, cost_s=1) == taken
    assert schedule.proposal() is None
    assert schedule.synchronous is (every == 1)


@pytest.mark.parametrize(
    ("cost_s", "interval"),
    [(0.0, 2), (0.001, 2), (0.019, 2), (0.021, 4), (0.05, 8), (0.1, 16), (1.0, 128), (10.0, 1024), (1e9, 1 << 14)],
)
def test_a_measured_interval_costs_less_than_a_percent(cost_s: float, interval: int) -> None:
    schedule = SnapshotSchedule(None)
    train(schedule, range(1, 40), step_s=1.0, cost_s=cost_s)
    assert schedule.proposal() == interval
    assert cost_s / interval <= 0.01 or interval == 1 << 14


def test_trials_at_the_same_steps_on_all_ranks_and_no_more_of_them() -> None:
    assert train(SnapshotSchedule(None), range(1, 60), step_s=1, cost_s=1) == [12, 16, 20]
    assert train(SnapshotSchedule(None, start=102), range(103, 160), step_s=1, cost_s=1) == [114, 118, 122]


@pytest.mark.parametrize("window", [2, 3, 5, 7])
@pytest.mark.parametrize("first", [0, 1])
def test_boundaries_that_hit_no_multiple_are_kept_all_the_same(window: int, first: int) -> None:
    """Accumulation: there is a boundary at the end of each window only."""
    boundaries = range(first + window, 300, window)
    schedule = SnapshotSchedule(4, start=first)
    kept = [step for step in boundaries if schedule.due(step)]
    assert all(b - a <= 4 + window for a, b in zip([first, *kept], kept, strict=False))
    assert len(train(SnapshotSchedule(None, start=first), boundaries, step_s=1, cost_s=1)) == 3


def test_nothing_is_proposed_before_there_is_enough_to_compare() -> None:
    schedule = SnapshotSchedule(None)
    for number in range(7):
        schedule.note(1.0, extra=False)
        schedule.note(1.0, extra=True)
        assert schedule.proposal() is None, number
    schedule.note(1.0, extra=False)
    assert schedule.proposal() == 2


def test_the_rarest_proposal_is_agreed_on() -> None:
    schedule = SnapshotSchedule(None)
    train(schedule, range(1, 30), step_s=1, cost_s=0)
    assert not schedule.due(30)
    schedule.agree([2, 64, 8])
    assert [step for step in range(31, 200) if schedule.due(step)] == [64, 128, 192]
    assert not schedule.synchronous and schedule.proposal() is None
    before = schedule.every
    schedule.note(100.0, extra=True)
    assert schedule.every == before


def test_one_slow_step_changes_nothing() -> None:
    schedule = SnapshotSchedule(None)
    for number in range(20):
        schedule.note(50.0 if number == 3 else 1.0, extra=False)
    for cost in (0.1, 30.0, 0.1):
        schedule.note(1.0 + cost, extra=True)
    assert schedule.proposal() == 16


@given(st.lists(st.floats(0, 1e6), min_size=8, max_size=100), st.lists(st.floats(0, 1e6), min_size=3, max_size=3))
def test_any_measurement_gives_a_power_of_two(plain: list[float], trials: list[float]) -> None:
    schedule = SnapshotSchedule(None)
    for step_s in plain:
        schedule.note(step_s, extra=False)
    for step_s in trials:
        schedule.note(step_s, extra=True)
    interval = schedule.proposal()
    assert interval is not None and 2 <= interval <= 1 << 14 and interval & (interval - 1) == 0
