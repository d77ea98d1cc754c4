"""Agents of several nodes under seeded faults: never two processes of a rank in one job, and every story ends.

A story that fails prints its seed and what happened; ``play(seed)`` tells it again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from mindx_elastic.agent.recovery import Recovery
from tests.simulation.agents import TIMEOUT_S, Job

_CALM_S = 4 * TIMEOUT_S
_BLOCK = 100


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def play(seed: int, *, num_nodes: int = 3, ranks: int = 1) -> Job:
    """One story: up to six faults, seconds apart, and then all that stands still or is cut off comes back."""
    job = Job(seed, num_nodes=num_nodes, ranks=ranks)
    job.run(2.0)
    for _ in range(job.dice.randint(1, 6)):
        job.fault()
        job.run(job.dice.choice((0.25, 0.5, 1.0, 3.0, 12.0)))
    job.heal()
    job.run(_CALM_S)
    job.check_end()
    return job


def play_all(seeds: Iterable[int], **shape: int) -> None:
    for seed in seeds:
        play(seed, **shape)


@pytest.mark.few(3)
@pytest.mark.parametrize("block", range(100))
def test_every_story_of_three_nodes_ends_with_one_process_a_rank(block: int) -> None:
    play_all(range(block * _BLOCK, (block + 1) * _BLOCK))


@pytest.mark.few(1)
@pytest.mark.parametrize("block", range(20))
def test_every_story_of_four_nodes_with_two_ranks(block: int) -> None:
    play_all(range(block * _BLOCK, (block + 1) * _BLOCK), num_nodes=4, ranks=2)


def test_the_stories_come_to_every_end() -> None:
    ends = Counter(
        (each.outcome or ("crashed" if each.is_crashed else "goes on"), each.token[0])
        for seed in range(60)
        for each in play(seed).nodes
    )
    assert {("goes on", "t"), ("goes on", "n"), ("crashed", "t"), ("restart", "t"), ("out", "t")} <= set(ends)


def test_agents_that_settle_nothing_between_them_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has an opinion of its own on how the recovery has ended."""
    monkeypatch.setattr(Recovery, "_settle", lambda self, opinion: opinion)
    with pytest.raises(AssertionError, match=r"never ends|go on"):
        play_all(range(_BLOCK))


@pytest.mark.parametrize("seed", range(5))
def test_a_first_node_that_only_stood_still_puts_nobody_out(seed: int) -> None:
    """A connection was reset meanwhile, and has had no time to come back when it looks again."""
    job = Job(seed)
    job.run(2.0)
    job.nodes[0].is_still = True
    job.run(5.0)
    job.break_connection(job.nodes[1], 0.5)
    job.run(3.0)
    job.heal()
    job.run(_CALM_S)
    job.check_end()
    assert [node.recovery._machine.generation for node in job.going()] == [0, 0, 0], job.tale("a node was put out")
