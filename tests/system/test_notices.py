"""``mindx-elastic run --notice``: real jobs, and a file or a metadata service that says what it is told to."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.agent.result import read_result
from tests.harness import events
from tests.metadata_service import MetadataService
from tests.system import agents
from tests.system.agents import RUN, nothing_left
from tests.system.conftest import Reference
from tests.system.nodes import Nodes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_own_folder")]

LOOP = "loop.py"


def agent(*args: object, **more: Any) -> Any:
    return agents.agent(LOOP, "ckpt", *args, ranks=2, **more)


@pytest.fixture
def notice(in_own_folder: None) -> Path:
    return Path("notice.json").absolute()


def say(notice: Path, text: str = '{"stop": true, "seconds": 60, "reason": "maintenance"}') -> None:
    """In one step: the agent may look at any moment."""
    temp = notice.with_suffix(".tmp")
    temp.write_text(text)
    temp.rename(notice)


@pytest.mark.drill
def test_a_clouds_notice_stops_the_job_with_its_deadline_as_grace() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(MetadataService())
        options = ["--notice", f"gce={server.base}", "--grace", "10"]
        job = stack.enter_context(agent("--hold-at", 7, options=options))
        job.wait_for("HOLD", 2)
        server.answers["/computeMetadata/v1/instance/preempted"] = "TRUE"
        job.expect(75)
    (fault,) = events(RUN, "fault")
    assert fault["reason"] == "gce: preempted" and 10 < fault["grace_s"] <= 28, "longer than --grace"
    assert nothing_left()


def test_a_notice_stops_the_job_at_one_step_and_it_ends_like_an_uninterrupted_one(
    notice: Path, reference: Reference
) -> None:
    """The file is no notice at first, which is named once and stops nothing."""
    whole = reference(2).hashes()
    say(notice, "soon")
    with agent("--hold-at", 7, options=["--notice", notice, "--grace", "10"]) as job:
        job.wait_for("HOLD", 2)
        job.wait_for("is not readable JSON")
        say(notice)
        job.expect(75)
    (fault,) = events(RUN, "fault")
    assert fault["reason"] == f"notice file {notice}: maintenance" and 10 < fault["grace_s"] <= 58, (
        "longer than --grace"
    )
    left = [float(m[1]) for m in job.matches(r"maintenance.*must be gone in ([\d.]+) s")]
    assert left and min(left) > 10, job.report()
    assert len({match[1] for match in job.matches(r"step (\d+) saved in")}) == 1, job.report()
    assert len(job.matches("is not readable JSON")) == 1, "named once"
    (attempt,) = events(RUN, "attempt")
    assert (attempt["outcome"], attempt["steps_lost"]) == ("stopped", 0)
    result = read_result(RUN)
    assert result is not None and (result.exit_code, result.reason, result.attempts) == (75, fault["reason"], 1)
    assert (result.saved_step, result.progressed, result.retry) == (attempt["step"], True, True)
    assert nothing_left()
    with agent(options=["--notice", Path("another.json").absolute()]) as again:
        again.expect(0)
    assert again.hashes() == whole, again.report()


@pytest.mark.drill
def test_after_a_notice_no_restart_begins(notice: Path) -> None:
    """A rank is killed once the notice is heard: its machine is as good as gone."""
    with agent("--hold-at", 7, options=["--notice", notice]) as job:
        job.wait_for("HOLD", 2)
        job.signal_rank(1, signal.SIGSTOP)  # it is to live until then
        say(notice)
        job.wait_for("the job stops; the workers have")
        job.signal_rank(1, signal.SIGKILL)
        job.expect(75)
    assert not job.matches("restart 1 of"), job.report()


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_a_notice_on_one_node_stops_all_nodes_at_one_step(notice: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path / "nodes", 1, 1, "--hold-at", 7, nnodes="2", script=LOOP)
        nodes.start("--notice", str(notice))
        for job in nodes.jobs:
            job.wait_for("HOLD")
        say(notice)
        nodes.expect(75)
    assert len({match[1] for match in nodes.found(r"step (\d+) saved in")}) == 1, nodes.report()
    assert nodes.jobs[0].matches("has stopped: .*maintenance on rank"), nodes.report()
