"""Two jobs and one directory, as real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from mindx_elastic.persist.storage import LOCK_FILE
from tests.harness import start_job

pytestmark = pytest.mark.slow
QUICK = {"MINDX_GRACE_S": "1"}
JOB, LONG = "agent_guarded.py", ("--steps", 10**6, "--step-s", 0.01)


@pytest.mark.drill
def test_a_second_job_is_refused_while_the_first_lives_and_a_killed_one_leaves_it_free(tmp_path: Path) -> None:
    with start_job(JOB, tmp_path, *LONG, "--fork", "--walk", env=QUICK) as first:
        (ready,) = first.wait_for(r"READY 0 (\d+)")
        (child,) = first.wait_for(r"CHILD (\d+)")
        try:
            with start_job(JOB, tmp_path, env=QUICK) as second:
                second.expect(1)
            assert second.matches(f"DirectoryInUseError.*in use by rank 0 of another job, process {ready[1]} on host")
            assert not second.matches("READY"), second.report()
            os.kill(int(ready[1]), signal.SIGKILL)
            first.process.wait()
            with start_job(JOB, tmp_path, env={"MINDX_GRACE_S": "600"}) as third:
                third.expect(0)
            assert not third.matches("waiting for its end"), third.report()
            os.kill(int(child[1]), 0)
        finally:
            os.kill(int(child[1]), signal.SIGKILL)
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_start_waits_for_the_dying_save_of_its_predecessor_and_goes_on_from_it(tmp_path: Path) -> None:
    directory, go = tmp_path / "ckpt", tmp_path / "go"
    with start_job(JOB, directory, *LONG, "--slow-save", go) as first:
        first.wait_for("READY")
        first.process.send_signal(signal.SIGTERM)
        first.wait_for("BLOCKED")
        with start_job(JOB, directory, "--steps", 1) as second:
            second.wait_for("in use by rank 0 of another job.*waiting for its end")
            assert not second.matches("READY")
            go.touch()
            first.expect(143)
            second.expect(0)
    (saved,) = first.matches(r"step (\d+) saved in")
    assert second.resumed() == [saved[1]], f"{first.report()}\n{second.report()}"
