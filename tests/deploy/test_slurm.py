"""The batch scripts of ``deploy/slurm``, with programs that only pretend."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

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
