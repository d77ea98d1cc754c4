"""Which rank the others wait for: with invented waits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.core.pace import LEAST_S, LEAST_SHARE, Pace, pace_of, paces_of, slow_ranks
from mindx_elastic.core.status_page import NUM_STEPS, Status, WorkerPhase

MS = 1_000_000
Own = Callable[[int, int], float]
"""How long a rank is at work in a step, in ms: rank, step."""


def job(own: Own, ranks: int, *, reduce_ms: float = 2.0, steps: int = NUM_STEPS) -> dict[int, Status]:
    """Pages of a synchronous job: in each step all wait for the last one, and reduce."""
    works = [[own(rank, step) for rank in range(ranks)] for step in range(steps)]
    pages = {}
    for rank in range(ranks):
        waits = tuple(round(MS * (max(work) - work[rank] + reduce_ms)) for work in works)
        lengths = tuple(round(MS * (max(work) + reduce_ms)) for work in works)
        pages[rank] = Status(phase=WorkerPhase.TRAINING, waits_ns=waits, steps_ns=lengths, timed=steps)
    return pages


def named(own: Own, ranks: int, **more: float) -> list[int]:
    return [each.rank for each in slow_ranks(paces_of(job(own, ranks, **more)))]  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [2, 3, 4, 16, 1024])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_is_slow_in_every_step_is_named(ranks: int, slow: int) -> None:
    draw = random.Random(0)
    (found,) = slow_ranks(paces_of(job(lambda rank, _: 50 + 30 * (rank == slow) + draw.uniform(0, 3), ranks)))
    assert found.rank == slow and 25_000 < found.lag <= 33_000 and 80_000 < found.step < 90_000
    assert f"wait for rank {slow}, " in str(found)


def test_the_slowest_is_named_first() -> None:
    assert named(lambda rank, _: 50 + {5: 40, 2: 20}.get(rank, 0), 8) == [5, 2]


def test_the_ranks_of_a_slow_node_are_named_where_they_are_no_majority() -> None:
    assert named(lambda rank, _: 50 + 30 * (rank >= 8), 16) == [*range(8, 16)]
    assert named(lambda rank, _: 50 + 30 * (rank >= 7), 16) == []


@pytest.mark.parametrize(
    ("own", "ranks"),
    [
        (lambda rank, step: 50, 4),
        (lambda rank, step: 50 + 100 * (step % 2 == rank), 2),
        (lambda rank, step: 50 + 100 * (step % 3 == rank), 3),
        (lambda rank, step: 50 + 100 * (step % 4 < 3 and rank == 1), 3),
        (lambda rank, step: 50 + 5000 * (rank == 0 and step % 20 == 0), 4),
        (lambda rank, step: 50 + 4.9 * (rank == 1), 4),
        (lambda rank, step: 500 + 45 * (rank == 1), 4),
        (lambda rank, step: 50 + 30 * (rank != 1), 4),
        (lambda rank, step: 50, 1),
    ],
    ids=[
        *("all alike", "in turn, two", "in turn, three", "in three of four steps", "saves and evaluates"),
        *("too little of a second", "too little of the step", "one is faster", "alone"),
    ],
)
def test_no_rank_is_named_without_a_cause(own: Own, ranks: int) -> None:
    assert named(own, ranks) == []


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 30), ranks=st.integers(2, 9), spread=st.floats(0.1, 2.0))
def test_uneven_batches_name_nobody(seed: int, ranks: int, spread: float) -> None:
    """Lengths drawn anew for each rank and step, with tails."""
    draw = random.Random(seed)
    assert named(lambda rank, step: 50 * draw.lognormvariate(0, spread), ranks) == []


def test_what_is_not_known_is_not_judged() -> None:
    pages = job(lambda rank, _: 50 + 30 * (rank == 1), 3)
    unknown = pages[1]._replace(waits_ns=(-1,) * 7 + pages[1].waits_ns[7:])
    assert pace_of(1, unknown) is None and pace_of(1, pages[1]) is not None
    assert slow_ranks(paces_of({**pages, 1: unknown})) == ()
    assert paces_of(job(lambda rank, _: 50, 2, steps=40)) == ()
    assert len(paces_of({**pages, 2: pages[2]._replace(phase=WorkerPhase.STOPPING)})) == 2
    assert slow_ranks(()) == ()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**5), st.integers(0, 10**5), st.integers(1, 10**6)), min_size=2, max_size=9))
def test_more_than_half_of_the_others_wait_for_each_that_is_named(drawn: Sequence[tuple[int, int, int]]) -> None:
    paces = [Pace(rank, min(a, b), (a + b) // 2, max(a, b), step) for rank, (a, b, step) in enumerate(drawn)]
    slow = {each.rank for each in slow_ranks(paces)}
    for pace in paces:
        least = max(1e6 * LEAST_S, LEAST_SHARE * pace.step)
        others = [other.low - pace.high > least for other in paces if other is not pace]
        assert (pace.rank in slow) == (2 * sum(others) > len(others))
