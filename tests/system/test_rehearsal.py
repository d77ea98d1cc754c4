"""A job that stops itself and goes on in new processes: real processes, as users start them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import events, run_job, start_agent
from tests.system.conftest import Reference

pytestmark = pytest.mark.slow


def found(directory: Path) -> list[tuple[int, str]]:
    return [(event["step"], event["outcome"]) for event in events(directory, "rehearsal")]


def test_the_agent_starts_all_ranks_again_and_counts_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    monkeypatch.chdir(tmp_path)
    with start_agent("loop.py", "ckpt", ranks=2, options=("--max-restarts", "0", "--rehearse", "5,epoch")) as job:
        job.expect(0)
    assert job.hashes() == reference(2).hashes()
    ends = [each["outcome"] for each in events(tmp_path / "mindx-run", "attempt")]
    assert ends == ["restarted for its rehearsal"] * 2 + ["finished"]
    (early, by_epoch) = sorted(set(found(tmp_path / "ckpt")))
    assert early == (5, "verified") and by_epoch[1] == "verified"
    assert job.resumed() == ["None", "None", "5", "5", *[str(by_epoch[0])] * 2]
    assert job.matches(r"rehearsal at step 5: [\d.]+ s from the save to the end of step 6; step 6 is the one of"), (
        job.lines
    )


def test_a_process_of_its_own_leaves_for_the_platform_and_is_not_rehearsed_again(
    tmp_path: Path, reference: Reference
) -> None:
    env = {"MINDX_REHEARSE": "5", "MINDX_REHEARSE_EXIT": "1"}
    run_job("loop.py", tmp_path, env=env, code=75)
    again = run_job("loop.py", tmp_path, env=env)
    assert again.hashes() == reference(1).hashes() and again.resumed() == ["5"]
    assert found(tmp_path) == [(5, "verified")]
