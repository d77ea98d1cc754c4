"""``mindx-elastic run --notice``: real jobs, and a metadata service that says what it is told to."""

from __future__ import annotations

import json
import signal
import time
from contextlib import ExitStack
from datetime import datetime, timezone
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.agent.result import read_result
from tests.harness import events
from tests.metadata_server import AWS_ACTION, AZURE_EVENTS, AZURE_NAME, GCE, MetadataServer, reply
from tests.system import agents
from tests.system.agents import RUN, nothing_left
from tests.system.conftest import Reference
from tests.system.test_agent_nodes import Nodes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_own_folder")]

LOOP = "loop.py"
GOOGLE = {"Metadata-Flavor": "Google"}


def agent(*args: object, **more: Any) -> Any:
    return agents.agent(LOOP, "ckpt", *args, ranks=2, **more)


def later(seconds: float) -> datetime:
    return datetime.fromtimestamp(time.time() + seconds, timezone.utc)


def aws_notice() -> Any:
    return reply(json.dumps({"action": "terminate", "time": later(120).strftime("%Y-%m-%dT%H:%M:%SZ")}))


def test_a_notice_stops_the_job_at_one_step_with_its_deadline_as_grace() -> None:
    """The service is broken at first, which is named once and stops nothing."""
    with ExitStack() as stack:
        server = stack.enter_context(MetadataServer({GCE: reply("down", 500)}))
        options = ["--notice", f"gce={server.base}", "--grace", "10"]
        job = stack.enter_context(agent("--hold-at", 7, options=options))
        job.wait_for("HOLD", 2)
        job.wait_for("instance/preempted answers with status 500")
        server.wait_for_requests(2, GCE)
        server.answers[GCE] = reply("TRUE", headers=GOOGLE)
        job.expect(75)
    (fault,) = events(RUN, "fault")
    assert fault["reason"] == "GCE: preempted" and 10 < fault["grace_s"] <= 28, "longer than --grace"
    left = [float(m[1]) for m in job.matches(r"GCE: preempted.*must be gone in ([\d.]+) s")]
    assert left and min(left) > 10, job.report()
    assert len({match[1] for match in job.matches(r"step (\d+) saved in")}) == 1, job.report()
    assert len(job.matches("status 500")) == 1, "named once"
    assert [(e["outcome"], e["steps_lost"]) for e in events(RUN, "attempt")] == [("stopped", 0)]
    result = read_result(RUN)
    assert result is not None and (result.exit_code, result.reason, result.attempts) == (75, "GCE: preempted", 1)
    assert (result.saved_step, result.progressed, result.retry) == (fault_step(), True, True)
    assert nothing_left()


def fault_step() -> int:
    """The step that the job has stopped at."""
    (attempt,) = events(RUN, "attempt")
    return int(attempt["step"])


@pytest.mark.drill
@pytest.mark.parametrize("source", ["aws", "azure", "url", "file"])
def test_each_source_stops_a_job_that_then_ends_like_an_uninterrupted_one(source: str, reference: Reference) -> None:
    whole = reference(2).hashes()
    file = Path("notice.json").absolute()
    events_of_azure = {"Events": [{"EventType": "Preempt", "Resources": ["vm-7"]}]}
    events_of_azure["Events"][0]["NotBefore"] = format_datetime(later(60), usegmt=True)
    none = {AZURE_NAME: reply("vm-7"), AZURE_EVENTS: reply('{"Events": []}')}
    said = {
        AWS_ACTION: aws_notice(),
        AZURE_EVENTS: reply(json.dumps(events_of_azure)),
        "/n": reply('{"stop": true, "seconds": 60}'),
    }
    with MetadataServer(none) as server:
        where = {"url": f"{server.base}/n", "file": str(file)}.get(source, f"{source}={server.base}")
        with agent("--hold-at", 7, options=["--notice", where]) as job:
            job.wait_for("HOLD", 2)
            server.answers.update(said)
            file.write_text('{"stop": true, "seconds": 60, "reason": "maintenance"}')
            job.expect(75)
    with agent(options=["--notice", str(Path("another.json").absolute())]) as again:
        again.expect(0)
    assert again.hashes() == whole, again.report()


@pytest.mark.drill
def test_after_a_notice_no_restart_begins() -> None:
    """A rank is killed once the notice is heard: its machine is as good as gone."""
    with MetadataServer() as server, agent("--hold-at", 7, options=["--notice", f"{server.base}/n"]) as job:
        job.wait_for("HOLD", 2)
        job.signal_rank(1, signal.SIGSTOP)  # it is to live until then
        server.answers["/n"] = reply('{"stop": true, "seconds": 60}')
        job.wait_for("the job stops; the workers have")
        job.signal_rank(1, signal.SIGKILL)
        job.expect(75)
    assert not job.matches("restart 1 of"), job.report()


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_a_notice_on_one_node_stops_all_nodes_at_one_step() -> None:
    with MetadataServer() as server, ExitStack() as stack:
        options = ["--notice", f"{server.base}/n"]
        nodes = Nodes(stack, "--hold-at", 7, nnodes="2")
        nodes._options += options
        nodes.start("told")
        nodes._options = nodes._options[: -len(options)]
        nodes.start("other")
        for job in nodes.jobs.values():
            job.wait_for("HOLD")
        server.answers["/n"] = reply('{"stop": true, "seconds": 60, "reason": "maintenance"}')
        for job in nodes.jobs.values():
            job.expect(75)
    steps = {match[1] for job in nodes.jobs.values() for match in job.matches(r"step (\d+) saved in")}
    assert len(steps) == 1, nodes.report()
    assert nodes.jobs["other"].matches("has stopped: .*maintenance on rank"), nodes.report()


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_a_notice_ends_the_wait_for_other_nodes() -> None:
    with MetadataServer() as server, ExitStack() as stack:
        nodes = Nodes(stack, nnodes="2", options=["--notice", f"{server.base}/n"])
        job = nodes.start("told")
        server.wait_for_requests(3)
        server.answers["/n"] = reply('{"stop": true, "seconds": 60, "reason": "maintenance"}')
        job.expect(75)
    result = read_result(Path("told"))
    assert result is not None and result.reason.endswith("/n: maintenance"), job.report()
    assert (result.outcome, result.attempts, result.progressed, result.retry) == ("stopped", 0, None, True)
