"""A stop plays on one step, whatever happens in it: real processes, real signals, under the agent and alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import events, start_agent, start_job
from tests.system.conftest import Reference
from tests.system.test_stop_resume import resume, saved_steps

pytestmark = pytest.mark.slow


def witnesses(directory: Path) -> int:
    return len(list(directory.rglob("*.witness.jsonl")))


@pytest.mark.parametrize(
    ("ranks", "fault"),
    [
        (2, "none"),
        (2, "kill"),
        *(pytest.param(*case, marks=pytest.mark.drill) for case in ((1, "none"), (2, "raise"), (2, "hang"))),
    ],
)
def test_the_stop_is_the_same_and_the_next_start_compares(
    tmp_path: Path, reference: Reference, ranks: int, fault: str
) -> None:
    env = {"LOOP_PLAYS": fault, "MINDX_ARENA_DIR": "none"}
    grace = ["--grace-s", 8] if fault == "hang" else []
    start = start_job if ranks == 1 else start_agent
    with start("played.py", tmp_path, "--hold-at", 7, *grace, ranks=ranks, env=env) as job:
        job.wait_for("HOLD", count=ranks)
        job.signal_rank(0)
        job.expect(143)
    assert len(job.matches("PLAYS")) >= 1, job.report()
    assert saved_steps(tmp_path) == dict.fromkeys(range(ranks), 8), job.report()
    assert not job.matches("attempt 1"), job.report()
    assert witnesses(tmp_path) == (ranks if fault == "none" else 0)
    resumed = resume(tmp_path, ranks)
    assert resumed.hashes() == reference(ranks).hashes(), resumed.report()
    compared = [event["outcome"] for event in events(tmp_path, "compared")]
    assert compared == ["verified"] * ranks if fault == "none" else not compared, resumed.report()


@pytest.mark.drill
@pytest.mark.parametrize("call", [1, 20, 500, 2000, 4000, 5000])
def test_a_kill_at_any_call_of_it_costs_the_comparison_only(tmp_path: Path, reference: Reference, call: int) -> None:
    """37 calls drawn by chance have been tried once, too."""
    env = {"LOOP_PLAYS": f"call:{call}", "MINDX_ARENA_DIR": "none"}
    with start_job("played.py", tmp_path, "--hold-at", 7, env=env) as job:
        job.wait_for("HOLD")
        job.signal_rank(0)
        job.expect(-9)
    assert saved_steps(tmp_path) == {0: 8} and witnesses(tmp_path) == 0
    resumed = resume(tmp_path, 1)
    assert resumed.hashes() == reference(1).hashes(), resumed.report()
    assert not events(tmp_path, "compared")
