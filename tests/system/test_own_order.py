"""Ranks whose samplers draw from generators of their own, killed where their last boundary is not in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Job, start_agent
from tests.system.conftest import Uninterrupted

drill = pytest.mark.drill


def orders(job: Job) -> list[str]:
    return sorted({m[0] for m in job.matches("ORDER .*")})


@pytest.mark.parametrize(
    ("ranks", "victim", "step", "recover"),
    [
        (2, 1, 4, "in-place"),
        pytest.param(2, 1, 4, "restart", marks=drill),
        pytest.param(2, 0, 7, "in-place", marks=drill),
        pytest.param(2, 1, 1, "restart", marks=drill),
        pytest.param(2, 1, 5, "in-place", marks=drill),
        pytest.param(2, 0, 6, "restart", marks=drill),
        pytest.param(3, 1, 4, "in-place", marks=drill),
    ],
)
def test_a_rank_killed_in_an_update_keeps_the_order_of_its_own_sampler(
    uninterrupted: Uninterrupted, tmp_path: Path, ranks: int, victim: int, step: int, recover: str
) -> None:
    """Steps 1, 4 and 7 are an epoch's first: what its order arises from is in the ring before they have ended."""
    expected = uninterrupted("own_order.py", ranks)
    options = ["--max-restarts", "1", "--recover", recover]
    args = (tmp_path / "job", victim, step)
    with start_agent("own_order.py", *args, ranks=ranks, options=options, run_dir=tmp_path / "run") as job:
        job.expect(0)
    assert len(job.matches(f"KILLED {victim}")) == 1, job.report()
    assert len(job.matches(r"recovery \d in place")) == (recover == "in-place"), job.report()
    assert len(job.matches(rf"READY \d \d+ {step}\b")) == ranks, job.report()
    made_again = (f"ORDER {victim} {step} ",)  # that step is the others' by then, and nobody trains it again
    assert orders(job) == [line for line in orders(expected) if not line.startswith(made_again)], job.report()
    assert job.hashes() == expected.hashes() and len(expected.hashes()) == ranks, job.report()
    assert not job.matches("WARNING.*killed before it had kept"), job.report()
