"""A rank that the others wait for is named, with its stack; real jobs under the agent."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness import events, job_status, run_command
from tests.system import agents
from tests.system.agents import RUN
from tests.system.nodes import Nodes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_own_folder")]

JOB = "slow.py"
NAMED = r"the others wait for rank (\d+), (\d+) ms or more in nearly each of the last 64 steps"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ranks", "args"),
    [
        (3, ("--where", "load", "--who", 0, "--batch-norm")),
        (2, ("--where", "after")),
        (2, ("--where", "load")),
        (2, ("--where", "forward")),
        (3, ("--where", "update", "--who", 2)),
        (3, ("--where", "load", "--who", 1, "--batch-norm")),
    ],
)
def test_a_rank_that_sleeps_in_each_step_is_named(ranks: int, args: tuple[object, ...]) -> None:
    who = int(args[args.index("--who") + 1]) if "--who" in args else 1  # type: ignore[call-overload]
    with agents.agent(JOB, "ckpt", *args, ranks=ranks) as job:
        (match,) = job.wait_for(NAMED)
        assert int(match[1]) == who, job.report()
        workers = {worker["rank"]: worker for worker in job_status(RUN)["workers"]}
        job.signal_launcher(signal.SIGTERM)
        job.expect(143)
    waits = {rank: worker["wait_s"] for rank, worker in workers.items()}
    assert min(waits, key=lambda rank: waits[rank]) == who and len(waits) == ranks
    event, *_ = events(RUN, "slow")
    assert (event["outcome"], event["ranks"]) == ("slow", [who])
    (stacks,) = event["stacks"]
    assert stacks.endswith(f"attempt_0_rank_{who}.txt") and "slow.py" in Path(stacks).read_text()
    assert f"slow: the others wait for rank {who}" in " ".join(run_command("status", RUN).split())


@pytest.mark.drill
@pytest.mark.parametrize("ranks", [2, 3])
def test_where_the_work_goes_from_rank_to_rank_nobody_is_named(ranks: int) -> None:
    """For longer than a rank has to be slow: 64 steps, and five seconds more."""
    args = ("--where", "forward", "--who", -1, "--steps", 300)
    with agents.agent(JOB, "ckpt", *args, ranks=ranks) as job:
        job.expect(0)
    assert len(job.matches("DONE . 300")) == ranks and not job.matches(NAMED), job.report()
    assert not events(RUN, "slow")


@pytest.mark.drill
def test_a_rank_of_another_node_is_named_and_its_own_agent_has_the_stack(tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path, 2, 1, "--where", "load", script=JOB)
        found = [job.wait_for(NAMED)[0] for job in nodes.jobs]
        assert {match[1] for match in found} == {"1"}, nodes.report()
        for job in nodes.jobs:
            job.signal_launcher(signal.SIGTERM)
        nodes.expect(143)
    stacks = [events(tmp_path / f"node{number}" / "run", "slow")[0]["stacks"] for number in range(2)]
    assert sorted(map(len, stacks)) == [0, 1], "of the node where the rank is"
