"""``mindx-elastic run`` with scripts that have never heard of us: real processes."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness import JOBS, Job, children, events, start_agent, start_job, wait_until
from tests.system import agents
from tests.system.agents import RUN, nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_own_folder")]
drill = pytest.mark.drill

PLAIN = "agent_plain.py"


def agent(*args: object, **more: Any) -> Any:
    return agents.agent(PLAIN, *args, plain=True, **more)


def environments(job: Job) -> dict[int, dict[str, Any]]:
    found = [json.loads(match[1]) for match in job.matches(r"^ENV (.*)")]
    return {int(each["env"]["RANK"]): each for each in found}


# --- a drop-in for torchrun ---


def test_a_script_sees_what_it_sees_under_torchrun() -> None:
    Path("temporary").mkdir()
    fresh = {"TMPDIR": str(Path("temporary").absolute())}
    with agent("show", "--flag", "x y", ranks=2, under=["env"], env=fresh) as job:  # a fork would have imported more
        job.expect(0)
    assert not list(Path("temporary").iterdir()), "nothing is left in the folder for temporary files"
    ours = environments(job)
    assert sorted(ours) == [0, 1]
    env = ours[1]["env"]
    expected = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "MINDX_ATTEMPT": "0",
        "MINDX_SNAPSHOT_EVERY": "auto",
        "MINDX_AGENT_PID": str(job.process.pid),
        "OMP_NUM_THREADS": "1",
    }
    assert {name: env.get(name) for name in expected} == expected
    assert env["MASTER_ADDR"] and int(env["MASTER_PORT"]) and env["TORCHELASTIC_RUN_ID"]
    assert "MINDX_GRACE_S" not in env, "only told when it was given"
    assert env["MINDX_RUN_DIR"] == str(RUN.absolute())
    keys = {each["env"]["MINDX_JOB_KEY_FILE"] for each in ours.values()}
    assert keys == {f"{env['MINDX_AGENT_DIR']}/job.key"}, "by a file, which is not printed with the environment"
    assert ours[1]["argv"] == ["show", "--flag", "x y"]
    assert ours[1]["cwd"] == os.getcwd()
    assert nothing_left()
    assert events(RUN)[0]["event"] == "agent_start"
    assert events(RUN, "agent_end")[0]["exit_code"] == 0


def test_redirects_and_tee_write_logs_per_rank() -> None:
    with agent("show", ranks=2, options=["--log-dir", "logs", "--redirects", "3", "--tee", "0:1"]) as job:
        job.expect(0)
    assert len(list(Path("logs").glob("*/attempt_0/*/stdout.log"))) == 2
    err = next(Path("logs").glob("*/attempt_0/1/stderr.log"))
    assert err.read_text() == "ERR 1\n"
    assert job.matches(r"^\[default0\]:READY 0"), "rank 0 is shown as well"
    assert not job.matches("READY 1")


def test_a_module_and_a_program_that_is_no_python() -> None:
    with start_agent(None, "leave", "0", options=["-m", "tests.jobs.agent_plain"], plain=True) as job:
        job.expect(0)
    assert job.matches("READY 0")
    script = Path("script.sh")
    script.write_text("#!/bin/sh\necho SHELL $RANK $1\nexit 5\n")
    script.chmod(0o755)
    with start_agent("./script.sh", "word", options=["--no-python", "--max-restarts", "0"]) as job:
        job.expect(5)
    assert job.matches("^SHELL 0 word")


# --- exit codes ---


@pytest.mark.parametrize(
    ("action", "code"),
    [
        (("die", int(signal.SIGKILL), 1), 137),
        pytest.param(("leave", 3, 1), 3, marks=drill),  # rank 1 alone: the first failure counts, not those that follow
    ],
)
def test_the_script_s_exit_code_is_the_agent_s(action: Sequence[object], code: int) -> None:
    """A death by a signal is 128 and its number."""
    with agent(*action, ranks=2, options=["--max-restarts", "0"]) as job:
        job.expect(code)
    assert nothing_left() and bool(job.matches(r"rank 1 .*killed by SIGKILL")) == (code == 137)


# --- stops ---


def test_a_signal_to_the_agent_reaches_the_workers() -> None:
    with agent("wait", ranks=2) as job:
        job.wait_for("WAITING", 2)
        job.process.send_signal(signal.SIGTERM)
        job.expect(143)
    assert len(job.matches("READY")) == 2, "no restart"
    assert nothing_left()


@drill
def test_a_job_that_is_started_with_ignored_signals_outlives_them() -> None:
    """As a shell without job control does it for a command behind which stands "&": also after a restart, since torch
    takes the signals at each start of workers."""
    under = ["sh", "-c", 'trap "" INT QUIT; exec "$@"', "sh"]
    with agent("hold", "1", ranks=2, options=["--grace", "5"], under=under) as job:
        for attempt in range(2):
            job.wait_for(rf"^HOLDING \d {attempt} ignores SIGINT\+SIGQUIT$", 2)
            for number in (signal.SIGINT, signal.SIGQUIT):
                job.process.send_signal(number)
                os.killpg(job.process.pid, number)
                for pid in [int(match[2]) for match in job.matches(rf"^READY (\d) (\d+) {attempt}")]:
                    os.kill(pid, number)
            Path(f"go-{attempt}").touch()
        job.expect(0)
    assert job.matches("restart 1 of 3") and job.matches("SIGINT and SIGQUIT .*ignored")
    assert not events(RUN, "signal")


def test_workers_do_not_outlive_a_killed_agent() -> None:
    with agent("wait", ranks=2) as job:
        job.wait_for("WAITING", 2)
        pids = list(job.pids().values())
        assert set(pids) < set(children(job.process.pid)), "the shim has become the worker"
        job.process.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "end of the workers")
    assert not nothing_left()
    with agent("leave", "0") as job:
        job.expect(0)
    assert nothing_left(), "the next agent removes what the killed one left"


# --- an agent that breaks ---


@drill
def test_an_agent_that_fails_leaves_nothing() -> None:
    options = ["--nproc-per-node", "2", "--event-log-handler", "console", "--run-dir", "mindx-run", "--grace", "3"]
    env = {"MINDX_ARENA_DIR": str(Path("shm").absolute())}
    with start_job("broken_agent.py", *options, JOBS / PLAIN, "wait", env=env) as job:
        job.wait_for("WAITING", 2)
        Path("break").touch()
        job.expect(1)
    assert job.matches("^RuntimeError: broken by the test"), "with a traceback: it is an error of ours"
    said = r"an error of the agent \(RuntimeError: broken by the test\)"
    assert job.matches(rf"ERROR the job has failed: {said}; exit code 1")
    end = events(RUN, "agent_end")
    assert [(each["exit_code"], bool(re.fullmatch(said, each["reason"]))) for each in end] == [(1, True)]
    assert job.matches(r'"source": "AGENT".*"state": "FAILED"') or job.matches(r'"state": "FAILED".*"source": "AGENT"')
    assert all(not Path(f"/proc/{pid}").exists() for pid in job.pids().values())
    assert nothing_left()


# --- the platform ---


def test_fault_flushing_holds_the_start_back(tmp_path: Path) -> None:
    state = tmp_path / "reset" / "reset.json"
    state.parent.mkdir()
    state.write_text('{"FaultFlushing": true}')
    with agent("leave", "0", env={"MINDX_RESET_DIR": str(state.parent)}) as job:
        job.wait_for("held back")
        assert not job.matches("READY")
        state.write_text('{"FaultFlushing": false}')
        job.expect(0)
    assert job.matches("READY")
