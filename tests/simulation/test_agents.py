"""Simulated jobs of several nodes: whatever goes wrong, and whenever, their agents keep what the pages promise."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from mindx_elastic.memory.agent_folder import CONTROL_SIGNAL
from tests.simulation.agents import GRACE_S, Outcome, Plan, play
from tests.simulation.schedules import Fault

QUIET = Plan(
    1, nodes=2, min_nodes=2, workers=1, steps=4, step_s=1.0, start_s=0.5, save_s=0.1, after_s=0.1, is_guarded=True,
    hears_connections=True, host_is_apart=False, max_restarts=3, faults=(),
)  # fmt: skip


def played(nodes: int, *faults: Fault, **more: Any) -> Outcome:
    outcome = play(replace(QUIET, nodes=nodes, min_nodes=nodes, faults=faults, **more))
    assert not outcome.wrong, outcome.wrong
    return outcome


def test_a_failure_is_counted_once_on_all_nodes() -> None:
    outcome = played(3, Fault("kill worker", 1, 0, at=3.1))
    told = [[worker.meeting.restarts for worker in agent.workers] for agent in outcome.agents]
    assert told == [[0, 1]] * 3, "what each node's workers are told, at the start and when they start again"
    assert [agent.code for agent in outcome.agents] == [0] * 3


def test_a_node_that_stands_still_and_is_cut_off_meanwhile_is_lost() -> None:
    faults = Fault("freeze agent", 1, 0, at=2.0, length_s=8.0), Fault("reset", 1, 0, at=2.1)
    assert [agent.restarts for agent in played(2, *faults, host_is_apart=True).agents] == [1, 1]


def test_a_stop_of_one_agent_stops_all_nodes() -> None:
    outcome = played(3, Fault("sigterm agent", 1, 0, at=3.1))
    assert [(agent.code, agent.restarts) for agent in outcome.agents] == [(143, 0)] * 3


@pytest.mark.parametrize("kind", ["exception", "kill worker"])
@pytest.mark.parametrize("fails", [0, 1])
def test_a_stop_of_one_agent_stops_all_nodes_when_a_rank_fails_at_that_moment(kind: str, fails: int) -> None:
    """It left with the code of the failure, 75, and the others waited ten minutes for a node that did not come."""
    codes = {
        agent.code
        for told in (0, 1)
        for at in (3.0, 3.5, 3.99, 4.0, 4.01, 4.1, 4.6)
        for agent in played(2, Fault(kind, fails, 0, at=4.0), Fault("sigterm agent", told, 0, at=at), steps=9).agents
    }
    assert codes == {143}


def heard(outcome: Outcome, rank: int) -> list[tuple[float, int]]:
    """What the agent has sent to the first process of a rank, and how long after the first one."""
    worker = next(each for each in outcome.agents[0].workers if each.rank == rank)
    began = worker.process.heard[0][0]
    return [(round(when - began, 1), signum) for when, signum in worker.process.heard]


@pytest.mark.parametrize(("is_guarded", "sent"), [(True, CONTROL_SIGNAL), (False, signal.SIGTERM)])
def test_after_a_failure_plain_workers_get_sigterm_and_guarded_ones_an_order(is_guarded: bool, sent: int) -> None:
    kill = Fault("kill worker", 0, 0, at=3.1)
    outcome = played(1, kill, workers=3, is_guarded=is_guarded, hears_connections=False)
    assert [heard(outcome, rank) for rank in (1, 2)] == [[(0.0, sent)]] * 2
    assert [(agent.code, agent.restarts) for agent in outcome.agents] == [(0, 1)]


def test_who_does_not_stop_is_urged_at_half_time_and_then_killed() -> None:
    faults = Fault("deaf", 0, 1, at=1.1), Fault("kill worker", 0, 0, at=3.1)
    outcome = played(1, *faults, workers=2, hears_connections=False)
    times = 0.0, GRACE_S / 2, GRACE_S
    assert heard(outcome, 1) == [*zip(times, (CONTROL_SIGNAL, signal.SIGTERM, signal.SIGKILL), strict=True)]


@pytest.mark.parametrize("kind", ["kill worker", "sigterm agent"])
@pytest.mark.parametrize("nodes", [16, pytest.param(512, marks=pytest.mark.drill)])
def test_twice_the_nodes_send_twice_the_messages_and_take_no_longer(nodes: int, kind: str) -> None:
    """All of them meet; one fails and all meet again, or one is told to stop."""
    less, more = (played(number, Fault(kind, 1, 0, at=4.1)) for number in (nodes, 2 * nodes))
    assert [agent.code for agent in more.agents] == [0 if kind == "kill worker" else 143] * 2 * nodes
    assert more.messages < 2.4 * less.messages
    assert more.seconds < 1.5 * less.seconds


def test_what_a_lost_connection_had_sent_comes_after_what_the_next_one_says() -> None:
    """And is of no effect."""
    outcomes = [
        played(2, Fault("old connection", 1, at=at, length_s=4.0), steps=9, step_s=1.0) for at in (2.9, 3.0, 5.8, 6.0)
    ]
    assert sum(outcome.late_connections for outcome in outcomes) > 0
    assert {agent.restarts for outcome in outcomes for agent in outcome.agents} == {0}


def test_a_host_that_is_there_again_is_met_however_slow_the_network_is() -> None:
    """Its table had formed a group with a node that then gave up, before it had heard of it."""
    slow = Fault("slow network", 0, at=3.0, length_s=20.0)
    for seed in range(12, 20):
        outcome = played(3, slow, Fault("kill agent", 0, at=4.6, length_s=3.0), seed=seed, steps=9)
        assert [agent.code for agent in outcome.agents] == [-9, 0, 0, 0]


def test_a_rank_that_hangs_on_its_way_out_is_not_waited_for_without_end() -> None:
    """The other nodes waited for its node until they gave up."""
    faults = Fault("kill agent", 1, at=3.1, length_s=0.5), Fault("deaf", 2, at=3.3, length_s=8.0)
    outcome = played(3, *faults, save_s=0.01)
    assert {agent.code for agent in outcome.agents} == {-9, 0}


def test_a_node_whose_job_the_others_have_finished_says_so() -> None:
    """Its own ranks had ended while a new table, on the host that was killed, formed a group without it."""
    faults = Fault("kill node", 0, at=4.7, length_s=3.0), Fault("freeze worker", 1, at=5.1, length_s=8.0)
    outcome = play(replace(QUIET, min_nodes=1, steps=9, step_s=0.5, save_s=0.01, after_s=3.0, faults=faults))
    assert not outcome.wrong
    assert [agent.code for agent in outcome.agents] == [-9, 0, 0]


def test_an_agent_that_stands_still_twice_in_a_row_is_lost_like_one_that_does_so_for_long() -> None:
    faults = Fault("freeze agent", 1, at=2.0, length_s=8.0), Fault("freeze agent", 1, at=9.5, length_s=8.0)
    outcome = played(2, *faults, steps=3)
    assert {agent.restarts for agent in outcome.agents} == {1}


def test_a_rank_that_becomes_deaf_when_its_agent_is_lost_goes_with_the_machine() -> None:
    """Nothing on that machine sees it."""
    faults = Fault("deaf", 0, 1, at=3.1), Fault("lose host", 1, at=3.1)
    for seed in range(5):
        outcome = played(2, *faults, seed=seed, workers=2, hears_connections=False)
        assert outcome.agents[0].code == -9
