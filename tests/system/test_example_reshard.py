"""The ResNet example on 4, 2 and 4 ranks: every picture of every epoch exactly once, over three starts of one command.

The example itself says nothing of the pictures that it trains on, and stays as it is: a small script around it counts
what the loader hands to the training, where the training takes it.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness import Job, start_job

pytestmark = [pytest.mark.slow, pytest.mark.drill]
NUM_PICTURES, EPOCHS = 58, 2


@contextmanager
def start(folder: Path, ranks: int, *flags: object) -> Iterator[Job]:
    (folder / "shm").mkdir(parents=True, exist_ok=True)
    given = ("--train-url", folder / "out", "--epochs", EPOCHS, "--batch-size", 5, "--limit-train", NUM_PICTURES)
    env = {"MINDX_ARENA_DIR": str(folder / "shm")}
    with start_job("resnet_counted.py", ranks, *given, *flags, env=env) as job:
        yield job


def stop_after(folder: Path, ranks: int, updates: int) -> Job:
    """SIGTERM for a rank that has done so many updates in this world."""
    with start(folder, ranks) as job:
        job.wait_for(rf"TOOK {ranks - 1} ", count=updates)
        job.wait_for(r"rank \d+ of \d+: pid \d+", count=ranks)
        pids = {int(m[1]): int(m[2]) for m in job.matches(r"rank (\d+) of \d+: pid (\d+)")}
        os.kill(pids[0], signal.SIGTERM)
        job.expect(143)
        assert len(job.matches("Graceful exit is triggered, stop training.")) == 1, job.report()
    return job


def taken(job: Job, upto: int) -> Counter[tuple[int, int]]:
    """(epoch, picture) of the updates up to step `upto`."""
    found: Counter[tuple[int, int]] = Counter()
    for m in job.matches(r"TOOK \d+ step (\d+) epoch (\d+): ([\d,]+)"):
        if int(m[1]) <= upto:
            found.update((int(m[2]), int(number)) for number in m[3].split(","))
    return found


def test_four_two_four(tmp_path: Path) -> None:
    jobs = [stop_after(tmp_path, 4, 2), stop_after(tmp_path, 2, 2)]
    with start(tmp_path, 4) as last:
        last.expect(0)
    jobs.append(last)
    report = "\n\n".join(job.report() for job in jobs)
    (end,) = [json.loads(line) for line in last.lines if line.startswith('{"event"')]
    assert end["epoch"] == EPOCHS, report
    resumed = [int(m[1]) for job in jobs[1:] for m in job.matches(r"rank 0\D*\] INFO resumed from .*: step (\d+) ")]
    assert len(resumed) == 2 and 0 < resumed[0] < resumed[1] < end["step"], report
    assert end["resumed_from_step"] == resumed[1], report
    together = sum(map(taken, jobs, [*resumed, end["step"]]), Counter[tuple[int, int]]())
    every = Counter((epoch, picture) for epoch in range(1, EPOCHS + 1) for picture in range(NUM_PICTURES))
    assert together == every, report
    assert not re.search("repeats", report), "and none had to be repeated to fill a step"
    for job, old, new in ((jobs[1], 4, 2), (jobs[2], 2, 4)):
        assert job.matches(f"not bit for bit the uninterrupted run: {old} ranks become {new}"), report
