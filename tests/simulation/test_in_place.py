"""Simulated jobs whose dead ranks are replaced in place: whatever goes wrong meanwhile, all go on from one boundary."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.agents import Outcome
from tests.simulation.in_place import Plan, play
from tests.simulation.schedules import Fault

QUIET = Plan(
    1, nodes=1, min_nodes=1, workers=3, steps=6, step_s=0.5, start_s=1.0, save_s=0.01, after_s=0.1, is_guarded=True,
    hears_connections=True, host_is_apart=False, max_restarts=3, faults=(), spares=0, enters_at_once=True,
    swallows=False, update_s=0.0, has_late_collective=False,
)  # fmt: skip


def played(plan: Plan, *faults: Fault) -> Outcome:
    outcome = play(replace(plan, faults=faults))
    assert not outcome.wrong, outcome.wrong
    story = [text for _, text in outcome.story]
    assert all(any(text.startswith(fault.name) for text in story) for fault in faults), "one has not happened"
    return outcome


def recoveries_of(outcome: Outcome) -> list[str]:
    """Their outcomes, as the agent tells them."""
    told = [text for _, text in outcome.story if ": rejoin (" in text]
    return [text.partition("outcome ")[2].partition(",")[0] for text in told]


@pytest.mark.parametrize("spares", [0, 1])
def test_two_deaths_one_after_the_other_cost_no_restart(spares: int) -> None:
    outcome = played(
        replace(QUIET, spares=spares, steps=12), Fault("kill worker", 0, 1, at=2.6), Fault("kill worker", 0, 0, at=4.6)
    )
    assert recoveries_of(outcome) == ["in place"] * 2
    assert [(agent.code, agent.restarts) for agent in outcome.agents] == [(0, 0)]


@pytest.mark.parametrize("spares", [0, 1])
def test_a_process_that_cannot_be_this_rank_is_followed_by_another_one(spares: int) -> None:
    """It ends before it has taken part, so the recovery goes on; and the one that stood in is told of."""
    plan = replace(QUIET, spares=spares, steps=12)
    outcome = played(plan, Fault("kill worker", 0, 1, at=2.6), Fault("unfit", on=("join", 1)))
    assert recoveries_of(outcome) == ["in place"]
    assert [(agent.code, agent.restarts) for agent in outcome.agents] == [(0, 0)]


def test_a_process_that_cannot_be_started_is_told_once_and_the_job_is_restarted() -> None:
    outcome = played(QUIET, Fault("no start", 0, 0, at=2.0), Fault("kill worker", 0, 1, at=2.6))
    assert recoveries_of(outcome) == ["restart"]
    assert [(agent.code, agent.restarts) for agent in outcome.agents] == [(0, 1)]


@pytest.mark.parametrize("stage", ["out", "connect", "donate", "load", "open"])
def test_a_second_death_in_a_recovery_is_mended_too(stage: str) -> None:
    """In place or by a restart."""
    started = {"load": 3, "open": 3}.get(stage, 0)  # at the start all pass these
    outcome = played(QUIET, Fault("kill worker", 0, 1, at=2.6), Fault("kill", on=(stage, started + 1)))
    assert [agent.code for agent in outcome.agents] == [0]
    assert recoveries_of(outcome)


@pytest.mark.parametrize("seed", range(5))
def test_a_stop_saves_no_boundary_that_follows_from_a_failed_collective(seed: int) -> None:
    """The program catches what the collective raises, and no recovery takes the rank out, because the job stops."""
    plan = replace(QUIET, seed=seed, workers=2, swallows=True)
    played(plan, Fault("sigterm agent", 0, 0, at=2.6), Fault("kill worker", 0, 1, at=2.61))


@pytest.mark.parametrize("seed", range(1, 8))
def test_a_stop_at_the_moment_of_success_does_not_hide_it(seed: int) -> None:
    """The agent has not looked at the board since the last rank came back."""
    last = 2 * QUIET.workers - 1
    plan = replace(QUIET, seed=seed)
    outcome = played(plan, Fault("kill worker", 0, 1, at=2.6), Fault("sigterm", on=("open", last + 1)))
    assert recoveries_of(outcome) == ["in place"]
    assert [agent.code for agent in outcome.agents] == [143]


@pytest.mark.parametrize("seed", [2, 3, 5, 6])
def test_a_stop_after_a_second_death_is_told_as_one(seed: int) -> None:
    """The record and the last line said that the job was restarted, where the agent had not looked in between."""
    deaths = Fault("kill worker", 0, 0, at=2.6), Fault("kill other", 0, 2, on=("join", 1))
    outcome = played(replace(QUIET, seed=seed), *deaths, Fault("sigterm", on=("join", 1), at=0.001))
    assert recoveries_of(outcome) == ["stopped"]
    assert [(agent.code, agent.restarts) for agent in outcome.agents] == [(143, 0)]


def test_two_deaths_that_are_seen_after_the_time_of_a_recovery_are_told_of_once() -> None:
    """The agent stood still meanwhile."""
    deaths = [Fault("kill worker", 0, rank, at=at) for rank, at in ((1, 2.6), (0, 4.2), (0, 5.0))]
    for at in (2.61, 2.65, 2.7, 2.75):
        outcome = played(replace(QUIET, workers=4), *deaths, Fault("freeze agent", at=at, length_s=8.0))
        assert recoveries_of(outcome) == ["restart"]


def test_ranks_that_leave_as_soon_as_a_recovery_is_refused_are_started_again() -> None:
    """All were cut off in an update. The agent had heard of the refusal by the end of the new process, and took the
    ends of the others, before its next look, for a stop."""
    plan = replace(
        QUIET, seed=5009871, workers=4, steps=8, step_s=0.6, start_s=0.1, save_s=0.3, after_s=1.0,
        enters_at_once=False, update_s=0.3, has_late_collective=True,
    )  # fmt: skip
    outcome = played(plan, Fault("kill worker", 0, 1, at=0.621))
    assert recoveries_of(outcome) == ["restart"]
    assert [(agent.code, agent.restarts) for agent in outcome.agents] == [(0, 1)]


def test_a_stop_shortly_before_the_time_of_a_recovery_is_over_is_its_end() -> None:
    """The ranks looked at it each half second, and said that others had not come."""
    told = Fault("hang", 0, 2, at=2.4), Fault("kill worker", 0, 0, at=2.6), Fault("sigterm agent", at=5.4)
    outcome = played(QUIET, *told)
    assert recoveries_of(outcome) == ["stopped"]
    assert any("reason rank 1: the job is being stopped" in text for _, text in outcome.story)
