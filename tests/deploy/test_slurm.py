"""The batch scripts of ``deploy/slurm``: with programs that only pretend, and on a real Slurm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.slurm_cluster import SlurmCluster, start_slurm
from tests.harness import JOBS, wait_until

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "deploy" / "slurm"
PRETENDER = """\
#!/bin/bash
# Stands in for the agent, or the training: says that it runs, and on SIGTERM does what ON_TERM says.
trap 'eval "$ON_TERM"' TERM
echo RUNS "$@"
eval "${AT_START:-}"
while :; do sleep 0.02; done
"""

SCONTROL = """\
#!/bin/bash
if [ "$1" = show ]; then echo "JobState=${STATE:-RUNNING Reason=None}"; else echo "SCONTROL $*"; fi
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in {"pretender": PRETENDER, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run_script(name: str, folder: Path, *args: str, signals: int = 1, **env: str) -> tuple[int, str]:
    """Exit code and output of the script, which gets SIGTERM `signals` times."""
    given = {
        "SLURM_JOB_ID": "17",
        "LAUNCHER": str(folder / "pretender"),
        "PYTHON": str(folder / "pretender"),
        "SCONTROL": str(folder / "scontrol"),
        "TMPDIR": str(folder),
    }
    process = subprocess.Popen(
        ["bash", str(SCRIPTS / name), *args],
        env={**os.environ, **given, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(("RUNS", "AGAIN")) and signals:
            signals -= 1
            process.send_signal(signal.SIGTERM)
    process.stdout.close()
    return process.wait(60), "".join(lines)


RESULT = 'mkdir -p run-17; echo "{ \\"retry\\": %s }" > run-17/result.json; exit 143'


def test_an_agent_s_job_is_requeued_where_the_result_says_so(folder: Path) -> None:
    code, output = run_script("agent.sbatch", folder, "train.py", "--lr", "1", ON_TERM=RESULT % "true")
    assert code == 143 and "SCONTROL requeue 17" in output, output
    assert "RUNS --nproc-per-node 1 --run-dir run-17 --grace 45 train.py --lr 1" in output
    code, output = run_script("agent.sbatch", folder, ON_TERM=RESULT % "false")
    assert code == 143 and "not requeued" in output and "SCONTROL" not in output, output


def test_an_agent_without_a_result_is_not_requeued(folder: Path) -> None:
    code, output = run_script("agent.sbatch", folder, signals=0, ON_TERM="", AT_START="exit 137")
    assert code == 137 and "not requeued" in output, output


def test_a_second_signal_does_not_hide_the_exit_code(folder: Path) -> None:
    twice = 'if [ -z "${again:-}" ]; then again=1; echo AGAIN; else ' + RESULT % "true" + "; fi"
    code, output = run_script("agent.sbatch", folder, signals=2, ON_TERM=twice.replace("143", "75"))
    assert code == 75 and "SCONTROL requeue 17" in output, output


@pytest.mark.parametrize("state", ["COMPLETING Reason=None", "PENDING Reason=BeginTime"])
def test_a_cancelled_or_preempted_job_is_left_to_slurm(folder: Path, state: str) -> None:
    """After scancel a requeue would bring the job back; a preempted one is requeued already."""
    code, output = run_script("agent.sbatch", folder, ON_TERM=RESULT % "true", STATE=state)
    assert code == 143 and "SCONTROL requeue" not in output and "not requeued by this script" in output, output
    (folder / "ckpt").mkdir()
    saves = "touch -d '1 minute' ckpt/a.safetensors; exit 143"
    code, output = run_script("plain.sbatch", folder, "ckpt", "train.py", ON_TERM=saves, STATE=state)
    assert code == 143 and "SCONTROL requeue" not in output and "not requeued by this script" in output, output


SRUN = """\
#!/bin/bash
# As srun does: a SIGTERM to it kills its tasks, and it hands their exit code on.
"$@" & task=$!
echo $task > task
trap 'kill -KILL $task' TERM
wait $task
"""
SCANCEL = """\
#!/bin/bash
[ "$*" = "--signal=TERM 17" ] && kill -TERM $(cat task)
"""


def test_the_step_of_an_srun_is_signalled_by_slurm(folder: Path) -> None:
    texts = {"srun": SRUN, "scancel": SCANCEL, "squeue": "#!/bin/bash\ncat task 2>&1 && echo 17.0; echo 17.batch\n"}
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path, launcher = f"{folder}:{os.environ['PATH']}", f"{folder}/srun {folder}/pretender"
    code, output = run_script("agent.sbatch", folder, ON_TERM=RESULT % "true", LAUNCHER=launcher, PATH=path)
    assert code == 143 and "SCONTROL requeue 17" in output, output


def test_without_scontrol_the_script_says_what_to_do(folder: Path) -> None:
    code, output = run_script("agent.sbatch", folder, ON_TERM=RESULT % "true", SCONTROL="no-such-program")
    assert code == 143 and "RequeueExit=143" in output, output


@pytest.mark.parametrize(("saves", "requeued"), [("touch -d '1 minute' ckpt/a.safetensors; ", True), ("", False)])
def test_a_plain_job_is_requeued_where_something_was_saved(folder: Path, saves: str, requeued: bool) -> None:
    (folder / "ckpt").mkdir()
    (folder / "ckpt" / "old.safetensors").touch()
    os.utime(folder / "ckpt" / "old.safetensors", (1, 1))
    code, output = run_script("plain.sbatch", folder, "ckpt", "train.py", ON_TERM=f"{saves}exit 143")
    assert code == 143 and ("SCONTROL requeue 17" in output) is requeued, output
    assert "RUNS -u train.py" in output


def test_a_plain_job_that_fails_is_not_requeued(folder: Path) -> None:
    (folder / "ckpt").mkdir()
    at_start = "touch -d '1 minute' ckpt/a.safetensors; exit 1"
    code, output = run_script("plain.sbatch", folder, "ckpt", signals=0, ON_TERM="", AT_START=at_start)
    assert code == 1 and "SCONTROL" not in output, output


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    made, daemons = start_slurm(tmp_path_factory.mktemp("slurm"))
    try:
        yield made
    finally:
        subprocess.run(["scancel", "--user", "root"], check=False, env=made.env, timeout=60.0)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(60)


class Training:
    """A job of `tests/jobs/slurm.py` in the cluster."""

    def __init__(self, cluster: SlurmCluster, folder: Path, script: str, pause_s: str, *options: str) -> None:
        cluster.env |= {"LAUNCHER": f"{sys.executable} -m mindx_elastic.cli.main run", "PYTHON": sys.executable}
        cluster.env |= {"NPROC": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        folder.mkdir()
        (folder / "shm").mkdir()
        cluster.env["MINDX_ARENA_DIR"] = str(folder / "shm")
        self.output, self.pause, checkpoints = folder / "out", folder / "pause", str(folder / "ckpt")
        self.pause.write_text(pause_s)
        first = [checkpoints] if script == "plain.sbatch" else []
        where = ["--chdir", str(folder), f"--output={self.output}", *options, str(SCRIPTS / script)]
        self.number = cluster.submit(*where, *first, str(JOBS / "slurm.py"), checkpoints, str(self.pause))

    def found(self, pattern: str) -> list[str]:
        return re.findall(pattern, self.output.read_text() if self.output.exists() else "")

    def wait_for(self, pattern: str, count: int = 1) -> None:
        wait_until(lambda: len(self.found(pattern)) >= count, f"{count} times {pattern}", 1800.0)

    def hash(self) -> str:
        self.wait_for("HASH")
        (found,) = set(self.found(r"HASH (\w+)"))
        return found


@pytest.mark.drill
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("script", ["agent.sbatch", "plain.sbatch"])
def test_a_job_that_slurm_stops_twice_ends_like_one_that_it_does_not(
    cluster: SlurmCluster, tmp_path: Path, script: str
) -> None:
    """Its time limit is over twice, with --signal=B:TERM@60; each time it is requeued."""
    whole = Training(cluster, tmp_path / "whole", script, "0").hash()
    # Slurm sends the signal one to two minutes after the start: 12 of the 30 steps at most, each time.
    stopped = Training(cluster, tmp_path / "stopped", script, "10", "--time", "3")
    stopped.wait_for("--- requeued", 2)
    stopped.pause.write_text("0")
    assert stopped.hash() == whole, stopped.output.read_text()
    assert len(stopped.found("left with exit code 143")) == 2, stopped.output.read_text()
    assert not stopped.found("resumed from None"), stopped.output.read_text()


@pytest.mark.drill
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("script", ["agent.sbatch", "plain.sbatch"])
def test_a_preempted_job_is_requeued_and_ends_like_one_that_was_not(
    cluster: SlurmCluster, tmp_path: Path, script: str
) -> None:
    """A job of a partition with a higher priority takes the whole node: PreemptMode=REQUEUE, GraceTime."""
    whole = Training(cluster, tmp_path / "whole", script, "0").hash()
    stopped = Training(cluster, tmp_path / "stopped", script, "5")
    stopped.wait_for("STEP 3")
    taken = tmp_path / "taken"
    cluster.submit("--partition=high", "--exclusive", f"--output={tmp_path / 'high'}", f"--wrap=touch {taken}")
    stopped.wait_for("requeues it itself")
    stopped.pause.write_text("0")
    assert stopped.hash() == whole, stopped.output.read_text()
    assert taken.exists(), "the other job has run in between"
    assert f"preempted JobId={stopped.number}" in cluster.log(), cluster.logs()
    text = stopped.output.read_text()
    assert stopped.found("DUE TO PREEMPTION") and stopped.found("left with exit code 143"), text
    assert not stopped.found("resumed from None") and not stopped.found("TIME LIMIT"), text


@pytest.mark.drill
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("script", ["agent.sbatch", "plain.sbatch"])
def test_a_cancelled_job_saves_and_does_not_come_back(cluster: SlurmCluster, tmp_path: Path, script: str) -> None:
    stopped = Training(cluster, tmp_path / "stopped", script, "5")
    stopped.wait_for("STEP 2")
    cluster.run("scancel", stopped.number)
    stopped.wait_for("not requeued by this script")
    wait_until(lambda: not cluster.run("squeue", "-h", "-j", stopped.number, "-o", "%T"), "the job's end", 600.0)
    assert stopped.found("saved in"), stopped.output.read_text()
