"""Runs a trainer's job without a stop, and once stopped and started again; compares what both have written."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.harness import Job, run_job, start_agent

__all__ = ["by_seed", "check", "check_killed", "run", "written"]

_WRITTEN = r"^(STEP|MEAN|VALUE|EVAL|LOG|HASH) .*"
_PID = re.compile(r"^((?:STEP|MEAN|VALUE) \S+ \S+) \d+ ")


def by_seed(seed: int, steps: int, rank: int = 0, apart: int = 2) -> list[list[str]]:
    """Three stops, at steps that the seed chooses: never one behind the other, as ranks may agree on the next step.
    `apart`: at least so many steps; more than a window of accumulation has, for the stop waits for its end."""
    chosen = [apart * place + 1 for place in sorted(random.Random(seed).sample(range((steps - 1) // apart), 3))]
    return [["--stop-at", str(step), "--stop-rank", str(rank)] for step in chosen]


def written(*jobs: Job) -> list[str]:
    """What the jobs have written of their training, each line once, without process ids."""
    lines = {_PID.sub(r"\1 ", match[0]) for job in jobs for match in job.matches(_WRITTEN)}
    return sorted(lines)


def run(script: str, directory: Path, ranks: int, options: Sequence[str] = (), code: int = 0) -> Job:
    return run_job(f"integrations_{script}.py", directory, *options, ranks=ranks, code=code, fresh=True)


def check(
    script: str, tmp_path: Path, ranks: int, stop: Sequence[str] | Sequence[Sequence[str]], options: Sequence[str] = ()
) -> None:
    """The stopped and resumed job has written what the uninterrupted one has. `stop`: the options of the stop, or those
    of one after the other."""
    straight = run(script, tmp_path / "straight", ranks, options)
    is_one = bool(stop) and isinstance(stop[0], str)
    stops: list[Any] = [stop] if is_one else list(stop)
    jobs = []
    for number, each in enumerate(stops):
        stopped = run(script, tmp_path / "stopped", ranks, [*options, *each], code=143 if ranks == 1 else 1)
        assert not stopped.matches("^HASH"), f"the stop came too late\n{stopped.report()}"
        assert bool(stopped.matches("resumed from .*SIGTERM")) == (number > 0), stopped.report()
        jobs.append(stopped)
    jobs.append(run(script, tmp_path / "stopped", ranks, options))
    reports = "\n".join(job.report() for job in jobs)
    assert jobs[-1].matches(r"resumed from .*saved because of SIGTERM"), reports
    assert written(*jobs) == written(straight), reports


def check_killed(
    script: str, tmp_path: Path, ranks: int, step: int, options: Sequence[str] = (), *, named: str = ""
) -> None:
    """A job under the agent, of which the last rank was killed behind `step`, has written what the uninterrupted one
    has. A snapshot of each step is kept in memory. `named`: each rank's small state only, so that a warning says this,
    and an epoch's means may differ."""
    straight = run(script, tmp_path / "straight", ranks, options)
    kill = ["--kill", "--stop-at", str(step), "--stop-rank", str(ranks - 1)]
    args, limits = [tmp_path / "killed", *kill, *options], ["--snapshot-every", str(int(not named))]
    with start_agent(f"integrations_{script}.py", *args, ranks=ranks, options=limits, run_dir=tmp_path / "run") as job:
        job.expect(0)
    assert job.matches(f"^KILLED {ranks - 1}") and job.matches("resumed from"), job.report()
    assert not named or job.matches(named), job.report()
    seen, expected = ([x for x in written(each) if not named or not x.startswith("MEAN")] for each in (job, straight))
    assert seen == expected, f"{job.report()}\n{straight.report()}"
