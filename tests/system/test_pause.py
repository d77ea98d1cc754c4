"""``mindx-elastic pause`` and ``resume``: real jobs under the agent, paused at steps where they hold."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.core.status_page import Status, read_pages
from tests.harness import Job, events, free_port, job_status, run_command, start_command, wait_until
from tests.system import agents
from tests.system.agents import RUN, nothing_left
from tests.system.conftest import Uninterrupted

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_own_folder")]
drill = pytest.mark.drill

JOB = "paused.py"
IN_PLACE = ["--recover", "in-place", "--rejoin-timeout", "120"]
Whole = Callable[..., dict[int, str]]


@pytest.fixture
def whole(uninterrupted: Uninterrupted) -> Whole:
    """The final weights of a run without a pause."""
    return lambda ranks, *args: uninterrupted(JOB, ranks, *args).hashes()


def agent(*args: object, **more: Any) -> Any:
    return agents.agent(JOB, "ckpt", *args, **more)


def paused_at(text: str) -> int:
    match = re.search(r"paused at step (\d+)", text)
    assert match is not None, text
    return int(match[1])


def pages(run_dir: Path = RUN) -> list[Status]:
    """What the workers' pages say."""
    folder = Path(events(run_dir, "agent_start")[-1]["agent_dir"])
    return [*read_pages(folder).values()]


def wait_for_order(number: int) -> None:
    """Both ranks have heard of the pause (1), or of its end (2)."""
    wait_until(lambda: all(page.pause_order == number for page in pages()), f"order {number} on all ranks")


def pause_at_4(job: Job, ranks: int = 2) -> None:
    job.wait_for("^HOLD . 4$", ranks)
    assert paused_at(run_command("pause", RUN)) == 4


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=drill), pytest.param(3, marks=drill)])
def test_paused_three_times_it_trains_as_if_undisturbed(ranks: int, whole: Whole) -> None:
    options = {1: [], 2: ["--num-workers", 2], 3: ["--size", 90]}[ranks]
    with agent("--hold-at", "3,4,11", *options, ranks=ranks, options=["--hang-timeout", "100"]) as job:
        for count, step in enumerate((3, 4, 11), start=1):
            job.wait_for("^HOLD", count * ranks)
            assert paused_at(run_command("pause", RUN)) == step
            now = job_status(RUN)["pause"]
            assert (now["step"], now["ranks"]) == (step, list(range(ranks)))
            assert not job.matches(rf"^PASSED \d {step}$"), "no rank has gone on"
            assert f"step {step}" in run_command("resume", RUN)
        job.expect(0)
    assert job.hashes() == whole(ranks, *options), job.report()
    for name in ("pause", "pause_end"):
        assert [event["step"] for event in events(RUN, name)] == [3, 4, 11]
    (attempt,) = events(RUN, "attempt")
    waited = sum(event["duration_s"] for event in events(RUN, "pause_end"))
    assert attempt["paused_s"] == pytest.approx(waited, abs=0.01) and waited > 0
    assert not events(RUN, "hang") and nothing_left()


# --- where a pause comes ----------------------------------------------------------------------------------------------


@drill
@pytest.mark.parametrize("how", ["poll", "plain"])
def test_in_an_evaluation(how: str, whole: Whole) -> None:
    """A rank that polls waits in it, another one at its end."""
    with agent("--eval", how, ranks=2) as job:
        job.wait_for("^EVAL . 1$", 2)
        with start_command("pause", RUN) as pause:
            wait_for_order(1)
            if how == "plain":
                assert not any(page.paused_ns for page in pages())
                Path("go").touch()
            pause.expect(0)
        assert paused_at(pause.report()) == 6 and not job.matches("^PASSED . 7$")
        Path("go").touch()
        run_command("resume", RUN)
        job.expect(0)
    assert job.hashes() == whole(2)


# --- what happens in a pause ------------------------------------------------------------------------------------------


@drill
@pytest.mark.parametrize("what", ["agent", "rank", "flag"])
def test_a_stop_saves_the_step_of_the_pause(what: str, whole: Whole) -> None:
    with agent("--hold-at", "4", ranks=2) as job:
        pause_at_4(job)
        if what == "agent":
            job.process.send_signal(signal.SIGTERM)
        elif what == "rank":
            job.signal_rank(1)
        else:
            (RUN / "graceful_exit.json").write_text('{"GracefulExit": 1}')
        job.expect(75 if what == "flag" else 143)
    assert {match[1] for match in job.matches(r"step (\d+) saved in")} == {"4"}, job.report()
    assert not job.matches("^PASSED . 5$"), "one step is played on"
    (RUN / "graceful_exit.json").unlink(missing_ok=True)
    with agent(ranks=2) as again:
        again.expect(0)
    assert again.resumed() == ["4", "4"] and again.hashes() == whole(2), again.report()


@drill
@pytest.mark.parametrize("options", [[], IN_PLACE], ids=["restart", "in place"])
def test_a_killed_rank_ends_the_pause(options: list[str], whole: Whole) -> None:
    """In place the survivor keeps its process and comes out of its wait; both train on from the step of the pause."""
    with agent("--hold-at", "4", "--run", ranks=2, options=options) as job:
        pause_at_4(job)
        survivor = job.pids()[0]
        job.signal_rank(1, signal.SIGKILL)
        job.expect(0)
    assert job.resumed() == ["None", "None", "4", "4"] and job.hashes() == whole(2), job.report()
    assert (job.pids()[0] == survivor) == bool(options), job.report()
    assert job.matches("the pause at step 4 has ended after"), job.report()
    if not options:
        first, second = events(RUN, "attempt")
        assert first["paused_s"] > 0 and second["paused_s"] is None and first["steps_lost"] == 0


@drill
def test_the_ranks_of_two_nodes_wait_at_one_step(whole: Whole) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "7"]
    with (
        agent("--hold-at", "4", options=options, run_dir=Path("node0")) as first,
        agent("--hold-at", "4", options=options, run_dir=Path("node1")) as second,
    ):
        for job in (first, second):
            job.wait_for("^HOLD . 4$")
        assert paused_at(run_command("pause", "node0")) == 4
        for node in ("node0", "node1"):
            wait_until(lambda node=node: len(events(Path(node), "pause")) == 1, "both agents know of it")
        assert "training goes on" in run_command("resume", "node1")
        for job in (first, second):
            job.expect(0)
    assert first.hashes() | second.hashes() == whole(2)
    for node in ("node0", "node1"):
        assert len(events(Path(node), "pause_end")) == 1
