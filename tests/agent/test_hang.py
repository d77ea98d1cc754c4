"""Which ranks are stuck in the training, and which of them the others wait for: with invented pages and times."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.agent.attempt import _culprits
from mindx_elastic.agent.hang import HangWatch, Stuck
from mindx_elastic.core.status_page import Status, WorkerPhase

POLL_S = 0.5


def ns(seconds: float) -> int:
    return round(seconds * 1_000_000_000)


class Job:
    """Ranks that pass boundaries, and a watch that looks at them every half second."""

    def __init__(self, timeout_s: float | None, num_ranks: int = 1) -> None:
        self.watch = HangWatch(timeout_s)
        self.now = 1000.0
        page = Status(phase=WorkerPhase.TRAINING, entered_ns=ns(self.now))
        self.pages = {rank: page._replace(pid=100 + rank) for rank in range(num_ranks)}

    def change(self, rank: int, **fields: Any) -> None:
        self.pages[rank] = self.pages[rank]._replace(**fields)

    def step(self, *ranks: int, at: float | None = None, count: int = 1) -> None:
        for rank in ranks or self.pages:
            page = self.pages[rank]
            boundary_ns = ns(self.now if at is None else at)
            self.change(rank, step=page.step + count, boundaries=page.boundaries + count, boundary_ns=boundary_ns)

    def phase(self, phase: WorkerPhase, *ranks: int) -> None:
        for rank in ranks or self.pages:
            self.change(rank, phase=phase)

    def look(self) -> list[Stuck]:
        return self.watch.observe(self.pages, ns(self.now))

    def wait(self, seconds: float) -> list[Stuck]:
        """Looks every half second; what the last look said."""
        found = self.look()
        for _ in range(round(seconds / POLL_S)):
            self.now += POLL_S
            found = self.look()
        return found

    def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.wait(seconds)
            self.step()
        self.look()


def test_a_rank_without_a_boundary_for_longer_than_the_timeout() -> None:
    job = Job(10)
    job.steps(3, 1.0)
    assert job.wait(10) == []
    (stuck,) = job.wait(1)
    assert (stuck.rank, stuck.step) == (0, 2) and stuck.idle_s == pytest.approx(11)
    job.step()
    assert job.wait(10) == []
    job.watch = HangWatch(0)
    assert job.wait(1000) == [] and job.watch.announcement is None


def test_a_rank_that_waits_for_one_in_an_evaluation_is_not_stuck() -> None:
    job = Job(10, num_ranks=3)
    job.steps(3, 1.0)
    job.phase(WorkerPhase.BETWEEN, 0)
    assert job.wait(100) == []
    job.phase(WorkerPhase.TRAINING, 0)
    assert job.wait(10) == []
    assert [stuck.rank for stuck in job.wait(1)] == [0, 1, 2]


def test_the_likeliest_culprit_comes_first() -> None:
    job = Job(10, num_ranks=4)
    job.steps(3, 1.0)
    job.now += 0.2
    job.step(0)
    job.step(3)
    job.change(2, boundary_ns=job.pages[2].boundary_ns - ns(0.1))
    found = job.wait(12)
    assert [stuck.rank for stuck in found] == [2, 1, 0, 3]
    assert [stuck.step for stuck in found] == [2, 2, 3, 3]


def test_the_timeout_is_learned_from_ten_steps_and_said_once() -> None:
    job = Job(None)
    job.steps(10, 2.0)  # the way to the first boundary is no step
    assert job.watch.timeout_s is None and job.watch.announcement is None and job.wait(500) == []
    job = Job(None)
    job.steps(11, 4.0)
    assert job.watch.timeout_s == pytest.approx(120)  # 30 times the mean
    text = job.watch.announcement
    assert text is not None and "120 s counts as stuck" in text and "4.0 s on average, 4.0 s at most" in text
    assert job.watch.announcement is None
    assert job.wait(120) == [] and len(job.wait(1)) == 1


def test_a_machine_that_stood_still_is_not_judged_by_it() -> None:
    job = Job(10, num_ranks=2)
    job.steps(10, 1.0)
    job.now += 3600
    assert job.look() == []
    assert job.wait(10) == []  # all clocks started again
    assert len(job.wait(1)) == 2
    learning = Job(None)
    learning.steps(11, 1.0)
    learning.now += 3600
    learning.steps(5, 1.0)
    assert learning.watch.timeout_s == 60


@settings(deadline=None, max_examples=40)  # each example looks thousands of times
@given(
    st.lists(st.floats(0.001, 100), min_size=12, max_size=60),
    st.sampled_from([0.1, 0.5, 1.0]),
    st.floats(0, 1),
)
def test_steps_like_those_before_are_never_stuck(steps: list[float], poll: float, phase: float) -> None:
    """Whatever the steps, none up to ten times the longest learned from is taken for a hang; timeouts never shrink."""
    job = Job(None)
    due, longest, timeout = job.now + steps[0], 0.0, 0.0
    job.now += phase * poll
    taken = 0
    while taken < len(steps):
        last = due
        while due <= job.now and taken < len(steps):
            job.step(at=due)
            longest = max(longest, steps[taken])
            taken += 1
            last, due = due, due + (steps[taken] if taken < len(steps) else 0)
        found = job.look()
        if max(steps) <= 60:
            assert found == []
        known = job.watch.timeout_s
        if known is not None:
            assert known >= max(60, timeout)
            timeout = known
        job.now += poll
    if timeout:
        assert timeout <= max(60, 10 * (longest + 2 * poll) * 3, 30 * (longest + 2 * poll))
    assert last <= job.now


@pytest.mark.parametrize(("states", "found"), [("SRS", [1]), ("SSD", [2]), ("SST", [2]), ("SSS", []), ("RRR", [])])
def test_who_the_others_wait_for_in_the_same_step(states: str, found: list[int]) -> None:
    page = Status(pid=1, phase=WorkerPhase.TRAINING, step=3, boundaries=3, entered_ns=1, boundary_ns=1)
    stuck = [Stuck(rank, 3, 60.0) for rank in range(3)]
    assert _culprits(stuck, dict(enumerate(states)), dict.fromkeys(range(3), page)) == found
