"""``mindx-elastic msrun``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mindx_elastic.cluster.msrun import plan_of
from mindx_elastic.core.posix import start_ticks
from mindx_elastic.errors import UsageError
from tests.harness import JOBS, Job, _environment, free_port, wait_until

ONE = ["--worker_num=2", "--local_worker_num=2"]


def test_one_machine_has_the_scheduler_and_all_workers() -> None:
    plan = plan_of([*ONE, "--log_dir", "logs", "--cluster_time_out=30", "train.py", "--lr", "0.1"])
    assert [each.name for each in plan.processes] == ["scheduler", "worker_0", "worker_1"]
    assert [str(each.log) for each in plan.processes] == [
        "logs/scheduler.log",
        "logs/worker_0.log",
        "logs/worker_1.log",
    ]
    assert [each.env["MS_NODE_ID"] for each in plan.processes] == ["sched", "0", "1"]
    assert {each.env["MS_TOPO_TIMEOUT"] for each in plan.processes} == {"30"}
    assert plan.command == (sys.executable, "train.py", "--lr", "0.1") and not plan.joins


@pytest.mark.parametrize("dashes", ["--local-worker-num=1 --node-rank=1", "--local_worker_num 1 --node_rank 1"])
def test_a_second_machine_has_its_ranks_and_no_scheduler(dashes: str) -> None:
    plan = plan_of(["--worker_num=2", *dashes.split(), "--master_addr", "192.0.2.1", "train.py"])
    assert [(each.name, each.env["MS_NODE_ID"], each.env["DEVICE_ID"]) for each in plan.processes] == [
        ("worker_1", "1", "0")
    ]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--worker_num=2", "--local_worker_num=4", "train.py"], "is more than --worker_num=2"),
        (["--worker_num=0", "train.py"], "worker_num"),
        (["--worker_num=4", "--local_worker_num=2", "--node_rank=2", "train.py"], "does not fit into --worker_num=4"),
        (["--master_port=99999", *ONE, "train.py"], "99999 is not a number from 1 to 65535"),
        (["--cluster_time_out=0", *ONE, "train.py"], "0 is not a number from 1 to"),
        (["--join=maybe", *ONE, "train.py"], "neither True nor False"),
        (["--wrong=1", *ONE, "train.py"], "--wrong=1"),
        (ONE, "SCRIPT"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_refused(arguments: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        plan_of(arguments)


def start(*arguments: object, **env: str) -> Job:
    memory = Path("shm").absolute()  # of the test: a job that is stopped leaves its snapshots to the next start
    memory.mkdir(exist_ok=True)
    env = {"MINDX_ARENA_DIR": str(memory), **env}
    command = [sys.executable, "-m", "mindx_elastic.cli.main", "msrun", *ONE, f"--master_port={free_port()}"]
    return Job([*command, "--join=True", "--log_dir=logs", *map(str, arguments)], _environment(env))


@pytest.mark.drill
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)])
def test_the_outcome_of_a_job_is_returned_that_is_stopped_and_then_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    """SIGHUP: the terminal is gone."""
    monkeypatch.chdir(tmp_path)
    logs = [Path(f"logs/worker_{rank}.log") for rank in range(2)]
    job = start(JOBS / "clustered.py", "--hold-at=5", "--shared")
    try:
        wait_until(lambda: all(log.exists() and "HOLD" in log.read_text() for log in logs), "the hold")
        os.kill(job.process.pid, number)
        job.expect(code)
        assert all("step 6 saved in" in log.read_text() for log in logs), job.report()
    finally:
        job.end()
    job = start("--bind_core=True", JOBS / "clustered.py", "--shared")
    try:
        job.expect(0)
        assert job.matches("--bind_core has no effect here")
        assert all(f"DONE {rank} " in log.read_text() for rank, log in enumerate(logs))
        assert "all 2 workers have finished" in Path("logs/scheduler.log").read_text()
    finally:
        job.end()


@pytest.mark.drill
@pytest.mark.slow
def test_a_stop_before_the_workers_have_registered_ends_the_scheduler_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not know them, and would wait for them for --cluster_time_out."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "late.py"
    script.write_text(
        "import os, time\n"
        "if os.environ['MS_ROLE'] == 'MS_WORKER':\n"
        "    print('UP', flush=True)\n"
        "    time.sleep(1000)\n"
        "from mindx_elastic import cluster\n"
        "cluster.init()\n"
    )
    job = start(script)
    try:
        wanted = {"scheduler": "the scheduler waits", "worker_0": "UP", "worker_1": "UP"}
        logs = {Path(f"logs/{name}.log"): text for name, text in wanted.items()}
        wait_until(lambda: all(log.exists() and text in log.read_text() for log, text in logs.items()), "the start")
        os.kill(job.process.pid, signal.SIGTERM)
        job.expect(143)
        assert job.matches("scheduler has ended with exit code 143")
    finally:
        job.end()


def test_a_stop_while_the_processes_are_started_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lived on, and nothing waited for them."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "idle.py"
    script.write_text(
        "import os, sys, time\ntime.sleep(1000 if os.environ['MS_ROLE'] == 'MS_WORKER' else 2)\nsys.exit(9)\n"
    )
    job = start(script)
    try:
        job.wait_for("scheduler: pid")
        os.kill(job.process.pid, signal.SIGTERM)
        job.expect(9)
        assert not any(start_ticks(int(pid)) for pid in re.findall(r": pid (\d+)", job.report()))
    finally:
        job.end()


def test_a_closed_stderr_does_not_stop_the_job(tmp_path: Path) -> None:
    script = tmp_path / "short.py"
    script.write_text("import os\nopen(os.environ['MS_ROLE'], 'w').close()\n")
    closed, theirs = os.pipe()
    os.close(closed)
    command = [sys.executable, "-m", "mindx_elastic.cli.main", "msrun", *ONE, f"--master_port={free_port()}"]
    try:
        done = subprocess.run([*command, "--join=True", script], cwd=tmp_path, stderr=theirs, check=False)
    finally:
        os.close(theirs)
    assert done.returncode == 0
    assert (tmp_path / "MS_SCHED").exists() and (tmp_path / "MS_WORKER").exists()
