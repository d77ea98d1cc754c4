"""Agents of several nodes under seeded faults: never two processes of a rank in one job, and every story ends."""

from __future__ import annotations

import pytest

from tests.simulation.agents import TIMEOUT_S, Job

_CALM_S = 4 * TIMEOUT_S


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


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_every_story_ends_with_one_process_a_rank(first: int) -> None:
    for seed in range(first, first + 100):
        play(seed)
