"""Agents of several nodes under seeded faults: what must hold at each moment and in the end, see `agents`.

A story that fails prints its seed and what happened; ``python -m tests.simulation.agents --seed N`` tells it again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from mindx_elastic.agent.recovery import Recovery
from tests.simulation.agents import TICK_S, Job, play, play_any
from tests.simulation.nodes import TIMEOUT_S

_BLOCK = 100


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def play_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        play_any(seed)


@pytest.mark.few(4)
@pytest.mark.parametrize("block", range(100))
def test_every_story_of_three_nodes_ends_well(block: int) -> None:
    play_all(range(block * _BLOCK, (block + 1) * _BLOCK))


@pytest.mark.few(1)
@pytest.mark.parametrize("block", range(20))
def test_every_story_of_four_nodes_with_two_ranks_ends_well(block: int) -> None:
    for seed in range(block * _BLOCK, (block + 1) * _BLOCK):
        play(seed, num_nodes=4, ranks=2)


def test_the_stories_come_to_every_end() -> None:
    ends = Counter(
        "ended" if each.has_ended else "crashed" if each.is_crashed else "goes on"
        for seed in range(60)
        for each in play(seed).nodes
    )
    assert len(ends) == 3, ends
    assert any(node.recovery._machine.generation for seed in range(20) for node in play(seed).going())


def test_agents_that_settle_nothing_between_them_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has an opinion of its own on how the recovery has ended. `mutants` has more of them."""
    monkeypatch.setattr(Recovery, "_settle", lambda self, opinion: opinion)
    with pytest.raises(AssertionError, match=r"never ends|go on|goes on"):
        play_all(range(_BLOCK))


# --- defects that stories have found ---


def end_of(job: Job) -> Job:
    job.heal()
    job.calm_down()
    job.check_end()
    return job


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_that_could_not_be_read_is_read_again(seed: int) -> None:
    """The first agent has written it, and then it and its store stand still for a moment."""
    job = Job(seed)
    job.run(2.0)
    job.fault("kill", job.nodes[0])
    with job._patched():
        job.nodes[0].step()
        for node in job.nodes:
            node.watch_plans()
    job.fault("still", job.nodes[0])
    job.run(TICK_S)
    end_of(job)
    assert [node.recovery._machine.generation for node in job.going()] == [1, 1, 1], job.tale("the job is restarted")


@pytest.mark.parametrize("seed", range(5))
def test_an_agent_that_wakes_up_with_a_dead_rank_does_not_wait_for_those_that_restart(seed: int) -> None:
    job = Job(seed)
    job.run(2.0)
    job.fault("still", job.nodes[1])
    job.fault("kill", job.nodes[1])
    job.run(8.0)
    assert all(node.leaves_at is not None for node in (job.nodes[0], job.nodes[2]))
    job.heal()
    job.run(3.0)
    assert job.nodes[1].leaves_at is not None, job.tale("it has begun a recovery, and waits")
    end_of(job)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("node", range(3))
def test_the_loss_of_a_node_in_a_recovery_restarts_the_job(seed: int, node: int) -> None:
    job = Job(seed)
    job.run(2.0)
    job.fault("kill", job.nodes[1])
    job.run(TICK_S)
    job.fault("crash", job.nodes[node])
    job.run(TIMEOUT_S + 10.0)
    others = [each for each in job.nodes if each.node != node]
    assert all(each.leaves_at is not None for each in others), job.tale("a node waits")
    end_of(job)
