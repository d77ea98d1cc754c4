"""One rank cannot enter the guard: all are told at once, by whom and why, wherever in the start it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_job

pytestmark = pytest.mark.slow

CLASSES = {
    "environment": ("UsageError", "UsageError"),
    "directory": ("UsageError", "UsageError"),
    "state": ("UnsupportedStateError", "UnsupportedStateError"),
    "layout": ("UsageError", "UsageError"),
    "copies": ("UsageError", "UsageError"),
    "last": ("OSError", "PeerStartError"),
}
"""Of the fault on its own rank, and on the others."""


@pytest.mark.parametrize(("ranks", "victim"), [(2, 1), pytest.param(3, 0, marks=pytest.mark.drill)])
def test_what_one_rank_cannot_ends_the_start_of_all(tmp_path: Path, ranks: int, victim: int) -> None:
    env = {"MINDX_ARENA_DIR": "none"}
    # Without the news the others would wait for half an hour; the job's own bound is two minutes.
    job = run_job("entering.py", tmp_path / "ckpt", victim, *CLASSES, ranks=ranks, env=env)
    for fault, (own, other) in CLASSES.items():
        told = {int(m[1]): (m[2], m[3]) for m in job.matches(rf"REFUSED {fault} (\d) (\w+) (.*)")}
        assert {rank: kind for rank, (kind, _) in told.items()} == {
            rank: own if rank == victim else other for rank in range(ranks)
        }, f"{fault}\n{job.report()}"
        if fault != "copies":  # all ranks find that out together
            assert all(f"rank {victim}" in text for rank, (_, text) in told.items() if rank != victim), job.report()
    assert len(job.matches("ENTERED")) == ranks, job.report()
