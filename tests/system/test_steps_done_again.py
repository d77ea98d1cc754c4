"""Steps that are done again after a SIGKILL are compared with what the killed process has kept of them in memory.

Plain processes that are started by hand: `test_killed`.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness import events, start_agent

pytestmark = pytest.mark.slow


def agent(folder: Path, script: str, *args: object, ranks: int = 1) -> Any:
    (folder / "shm").mkdir()
    return start_agent(
        script,
        folder / "ckpt",
        *args,
        ranks=ranks,
        options=["--snapshot-every", "5"],
        env={"MINDX_ARENA_DIR": str(folder / "shm")},
        run_dir=folder / "run",
    )


def compared(folder: Path) -> list[tuple[int, str]]:
    found = events(folder / "ckpt", "compared")
    return [(event["step"], event["outcome"]) for event in found]


def test_steps_that_are_done_again_exactly_are_verified_on_all_ranks(tmp_path: Path) -> None:
    with agent(tmp_path, "loop.py", "--hold-at", 8, ranks=2) as job:
        job.wait_for("HOLD", 2)
        job.process.send_signal(signal.SIGSTOP)  # or it would ask the second rank to save
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for rank in (0, 1):
                job.signal_rank(rank, signum)
        job.process.send_signal(signal.SIGCONT)
        job.expect(0)
    assert job.resumed() == ["None", "None", "5", "5"], job.report()
    (line,) = job.matches(r"verified: (.*)")
    assert line[1].startswith("steps 6 to 8, done again, are what they were before"), job.report()
    assert "losses" in line[1] and not job.matches("is not what it was"), job.report()
    assert compared(tmp_path) == [(8, "verified")] * 2, job.report()
    assert not list((tmp_path / "shm").iterdir()), job.report()


@pytest.mark.drill
def test_a_step_that_is_done_again_and_differs_is_told_with_both_values(tmp_path: Path) -> None:
    with agent(tmp_path, "agent_guarded.py", "--kill-at", 13, "--steps", 16, "--own-count") as job:
        job.expect(0)
    assert job.resumed() == ["None", "10"], job.report()
    (line,) = job.matches(r"WARNING step 11, done again, is not what it was before: (.*)")
    values = re.match(r"loss \((\S+), now (\S+)\)\. ", line[1])
    assert values and float(values[1]) != float(values[2]), job.report()
    assert not job.matches("verified: ") and compared(tmp_path) == [(11, "differs")], job.report()
