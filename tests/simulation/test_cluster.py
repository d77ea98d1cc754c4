"""Hundreds of simulated dynamic clusters: whatever dies, freezes or is cut off, and whenever, its promises hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.cluster import Plan, plan_of, play
from tests.simulation.schedules import Fault


def test_every_kind_of_fault_strikes_and_clusters_end_as_they_do_in_life() -> None:
    outcomes = [play(plan_of(seed)) for seed in range(100)]
    struck = {kind for outcome in outcomes for kind in outcome.job.struck}
    assert len(struck) > 10 and {"kill", "freeze", "cut off", "kill scheduler", "full disk", "twice"} <= struck
    assert {outcome.job.scheduler_code for outcome in outcomes} >= {0, 1}
    assert max(generation for outcome in outcomes for _, generation, _ in outcome.job.meetings) >= 1


def plan(*faults: Fault, size: int = 2, recovery: bool = True) -> Plan:
    """Workers with a guard, each on its computer."""
    names = tuple(map(str, range(size)))
    return Plan(
        1,
        size,
        recovery,
        steps=4,
        step_s=0.3,
        node_ids=names,
        hosts=tuple(range(size)),
        has_guard=True,
        collectives="fails",
        heartbeat_s=5.0,
        key=None,
        faults=faults,
    )


def test_the_farewell_of_a_rank_survives_a_scheduler_that_is_killed_before_it_has_written_it_down() -> None:
    """Its end closed the connection, which passed for an answer: the finished rank was held for dead later."""
    for after_s in (0.0, 0.001, 0.002, 0.003):
        outcome = play(plan(Fault("kill scheduler", 0, at=after_s, length_s=0.5, on=("end", 1))))
        assert not outcome.wrong and outcome.job.scheduler_code == 0


def test_a_rank_that_dies_before_torchs_process_group_is_there_is_not_waited_for() -> None:
    """torch waits half an hour for it."""
    outcome = play(plan(Fault("kill", 1, at=0.0, length_s=0.5, on=("group", 1)), size=3))
    assert not outcome.wrong and outcome.job.struck
    assert outcome.job.ended_at < 20.0


@pytest.mark.parametrize("kind", ["kill scheduler", "reset"])
def test_a_worker_whose_connection_is_lost_when_a_death_is_told_hears_of_it_with_the_next_one(kind: str) -> None:
    """It waited for the dead rank, half an hour in torch's start of a process group; the job was over before."""
    killed = Fault("kill", 1, at=0.0, length_s=0.5, on=("group", 1))
    plans = [
        plan(killed, Fault(kind, 0, at=after_s, length_s=0.5, on=("write", 4)))
        for after_s in (0.0, 0.0005, 0.001, 0.002)
    ]
    outcomes = [play(replace(each, seed=seed)) for each in plans for seed in range(4)]
    assert not [wrong for outcome in outcomes for wrong in outcome.wrong]
    assert all(outcome.job.ended_at < 20.0 for outcome in outcomes)


def test_the_end_of_a_job_without_recovery_is_told_once_with_the_first_death() -> None:
    """Each worker that left then was a death that had ended the job, for all that were still there."""
    unguarded = replace(
        plan(Fault("kill", 1, at=0.2, length_s=0.5, on=("train", 5)), size=5, recovery=False), has_guard=False
    )
    outcome = play(unguarded, tells=True)
    told = [text for _, text in outcome.story if "the scheduler has ended the job" in text]
    assert len(told) == 4 and all("has ended the job: rank 1 " in text for text in told)


def test_a_scheduler_that_stands_still_in_the_midst_of_its_work_holds_nobody_for_dead() -> None:
    for event in (("write begins", 2), ("write", 2), ("end", 1)):
        outcome = play(plan(Fault("freeze scheduler", 0, at=0.0, length_s=9.0, on=event)))
        assert not outcome.wrong and outcome.job.struck and len(outcome.job.meetings) == 1


@pytest.mark.parametrize(("heartbeat_s", "gone_s"), [(5.0, 0.05), (5.0, 4.0), (5.0, 8.0), (1.0, 2.0), (1.0, 5.0)])
def test_a_scheduler_whose_machine_is_gone_for_seconds_holds_nobody_for_dead(heartbeat_s: float, gone_s: float) -> None:
    """No end of the old connections is heard: a worker looked for the new one ten seconds later, and had five."""
    for event in ("connect", "group", "train"):
        vanished = plan(Fault("vanish scheduler", 0, at=0.6, length_s=gone_s, on=(event, 2)))
        outcome = play(replace(vanished, heartbeat_s=heartbeat_s))
        assert not outcome.wrong and outcome.job.struck and len(outcome.job.meetings) == 1


def test_a_worker_that_is_held_for_dead_right_after_its_group_begins_anew() -> None:
    outcome = play(plan(Fault("freeze", 1, at=0.0, length_s=9.0, on=("group", 2))), tells=True)
    assert not outcome.wrong and any("this process starts over in place (pid" in text for _, text in outcome.story)


@pytest.mark.parametrize("kind", ["kill", "sigterm"])
@pytest.mark.parametrize("size", [32, pytest.param(512, marks=pytest.mark.drill)])
def test_the_start_and_a_death_or_a_stop_of_twice_the_nodes_take_twice_the_messages_and_no_longer(
    size: int, kind: str
) -> None:
    less, more = (
        play(plan(Fault(kind, 5, at=0.3, length_s=0.5, on=("train", nodes)), size=nodes)) for nodes in (size, 2 * size)
    )
    assert not less.wrong and not more.wrong
    assert len(less.job.meetings) == len(more.job.meetings) == (2 if kind == "kill" else 1)
    assert 1.8 * less.messages < more.messages < 2.5 * less.messages  # heartbeats come by the seconds
    assert more.job.ended_at < less.job.ended_at + 5.0


def test_what_a_lost_connection_had_sent_comes_after_what_the_next_one_says() -> None:
    """And is of no effect."""
    outcomes = [
        play(replace(plan(Fault("old connection", 1, at=at, length_s=4.0, on=("train", 2))), seed=seed, steps=8))
        for at in (0.0, 0.3, 0.6, 0.9)
        for seed in range(3)
    ]
    assert not [wrong for outcome in outcomes for wrong in outcome.wrong]
    assert sum(outcome.job.network.num_late for outcome in outcomes) > 3
    assert {len(outcome.job.meetings) for outcome in outcomes} == {1}


def test_a_scheduler_whose_disk_has_lied_goes_on_from_an_older_table_or_ends_the_job() -> None:
    outcomes = [play(plan(Fault("lying disk", 0, length_s=after_s, on=("write", 2)))) for after_s in (0.5, 1.0, 3.0)]
    assert not [wrong for outcome in outcomes for wrong in outcome.wrong]
    assert all("older table" in outcome.job.struck for outcome in outcomes)


def test_no_group_has_two_processes_of_one_rank_after_a_scheduler_has_forgotten_it() -> None:
    """One of its members was still waiting in the older table."""
    outcome = play(plan_of(5006030))
    assert not outcome.wrong and "older table" in outcome.job.struck


def test_a_rank_that_no_older_table_has_kept_is_given_anew() -> None:
    """The group was formed after the disk began to lie, and one of its processes had died."""
    outcome = play(plan_of(5011290))
    assert not outcome.wrong and "older table" in outcome.job.struck
    assert len(outcome.job.meetings) == 2
