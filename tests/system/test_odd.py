"""``Guard(odd=...)``: a step whose loss is no number on one rank is made again by all, under the agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import events
from tests.system import agents
from tests.system.agents import attempts, nothing_left
from tests.system.conftest import Uninterrupted

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_own_folder")]
drill = pytest.mark.drill

JOB = "odd.py"
WHOLE = ("--odd", "ignore", "--at", 99)


def agent(*args: object, ranks: int) -> Any:
    return agents.agent(JOB, "ckpt", *args, ranks=ranks, options=["--snapshot-every", "1"])


def odd_events() -> list[tuple[int, str]]:
    return [(event["step"], event["outcome"]) for event in events(Path("ckpt"), "odd")]


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=drill), pytest.param(3, marks=drill)])
def test_odd_once_is_made_again_with_the_same_batch_bit_for_bit(ranks: int, uninterrupted: Uninterrupted) -> None:
    """Other ranks have the step in memory, with weights that are no numbers; that is not used."""
    with agent(ranks=ranks) as job:
        job.expect(0)
    assert job.hashes() == uninterrupted(JOB, ranks, *WHOLE).hashes(), job.report()
    assert odd_events() == [(6, "back"), (6, "other")]
    assert [outcome for outcome, _ in attempts()] == ["failed", "finished"]
    assert len(job.matches(rf"odd on rank {ranks - 1} \(loss nan\), and is not when made again")) == 1
    assert sorted(match[1] for match in job.matches(r"RESUMED \d+ (\w+)")) == ["5"] * ranks + ["None"] * ranks
    assert nothing_left()


@drill
def test_odd_again_is_told_and_the_training_goes_on(uninterrupted: Uninterrupted) -> None:
    with agent("--always", ranks=2) as job:
        job.expect(0)
    assert job.hashes() == uninterrupted(JOB, 2, "--odd", "ignore", "--always").hashes(), job.report()
    assert odd_events() == [(6, "back"), (6, "own")]


@drill
def test_stop_ends_the_job_and_a_corrected_program_goes_on_before_the_step(uninterrupted: Uninterrupted) -> None:
    with agent("--always", "--odd", "stop", ranks=2) as job:
        job.expect(1)
    assert odd_events() == [(6, "back"), (6, "stop")] and len(attempts()) == 2, job.report()
    with agent("--odd", "stop", ranks=2) as job:
        job.expect(0)
    assert job.matches(r"RESUMED \d+ (\w+)")[0][1] == "5"
    assert job.hashes() == uninterrupted(JOB, 2, *WHOLE).hashes(), job.report()
