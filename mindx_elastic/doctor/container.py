"""Who stops this process, how long that one waits, and whether it starts it again: as far as it can be seen from here.

Nothing is asked over the network. Kubernetes tells a container neither its grace period nor its restart policy, Docker
neither; then the finding says how to look them up outside.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from mindx_elastic.core.first_process import DROPPED, WITH_AN_INIT
from mindx_elastic.core.printable import printable
from mindx_elastic.doctor.finding import Finding, good, problem, unknown, warning
from mindx_elastic.platforms.launchers import at_a_stop

__all__ = ["judge_first_process", "judge_slurm", "look_at_container", "look_at_first_process"]

_SLURM_S = 5.0
_SHELLS = ("ash", "bash", "dash", "sh", "zsh")
_ENGINE_FILES = ("/.dockerenv", "/run/.containerenv")


def look_at_container(env: Mapping[str, str], grace_s: float) -> Iterator[Finding]:
    """What stops this process: Kubernetes, Docker or Podman, Slurm, torchrun."""
    in_pod = bool(env.get("KUBERNETES_SERVICE_HOST"))
    in_engine = any(os.path.exists(path) for path in _ENGINE_FILES)
    least = int(grace_s) + 5
    if in_pod:
        pod = env.get("HOSTNAME", "POD")
        yield unknown(
            "platform",
            f"Kubernetes: grace period and restart policy are not visible from inside a pod (30 s if not set; "
            f"yours must be {least} at least)",
            f"kubectl get pod {printable(pod)} -o jsonpath='{{.spec.terminationGracePeriodSeconds}} "
            "{.spec.restartPolicy}'",
        )
    elif in_engine:
        yield unknown(
            "platform",
            "a container: how long docker stop waits is not visible from inside (10 s if not set)",
            f"docker stop --time {least}, or docker run --stop-timeout {least}; --restart on-failure starts it again",
        )
    if env.get("SLURM_JOB_ID"):
        yield from _slurm(env, grace_s)
    for fact, remedy in at_a_stop(env):
        yield warning("platform", fact, remedy)
    if not (in_pod or in_engine or env.get("SLURM_JOB_ID")):
        remedy = f"who stops the job must wait {grace_s:g} s after SIGTERM, and start the same command again"
        yield unknown("platform", "no container, no Slurm: nothing says who stops this process", remedy)
    if in_pod or in_engine:
        yield from look_at_first_process()


def look_at_first_process() -> Iterator[Finding]:
    """Whether the container's first process hands signals on."""
    try:
        name = Path("/proc/1/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return
    yield judge_first_process(name)


def judge_first_process(name: str) -> Finding:
    """`name`: of the program of process 1."""
    if name in _SHELLS:
        return warning(
            "platform",
            f"process 1 of this container is {name}, which hands no SIGTERM to the program that it runs",
            "start the program with exec in that script, or with docker run --init",
        )
    if name.startswith("python") or name == "mindx-elastic":
        return warning("platform", DROPPED.replace("this program", f"{printable(name)}"), WITH_AN_INIT)
    return good("platform", f"process 1 of this container is {printable(name)}")


def _slurm(env: Mapping[str, str], grace_s: float) -> Iterator[Finding]:
    if shutil.which("scontrol") is None:
        yield unknown(
            "platform",
            "Slurm: scontrol is not here, so KillWait and Requeue are not visible",
            f"outside: scontrol show config | grep KillWait ({grace_s:g} or more); sbatch --requeue",
        )
        return
    texts = []
    for words in (["show", "config"], ["show", "job", env["SLURM_JOB_ID"]]):
        try:
            done = subprocess.run(
                ["scontrol", *words], capture_output=True, text=True, errors="replace", timeout=_SLURM_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            text = f"Slurm: scontrol {words[1]} does not answer ({type(error).__name__})"
            yield unknown("platform", text, "scontrol show config | grep KillWait; scontrol show job")
            return
        texts.append(done.stdout)
    yield from judge_slurm(texts[0], texts[1], grace_s)


def judge_slurm(config: str, job: str, grace_s: float) -> Iterator[Finding]:
    """`config`, `job`: what ``scontrol show config`` and ``scontrol show job`` print."""
    wait = re.search(r"^KillWait\s*=\s*(\d+)", config, re.MULTILINE)
    if wait is None:
        yield unknown("platform", "Slurm does not tell its KillWait", "scontrol show config | grep KillWait")
    elif int(wait[1]) < grace_s:
        yield problem(
            "platform",
            f"Slurm kills {wait[1]} s after SIGTERM (KillWait), and the grace period is {grace_s:g} s",
            f"--grace {wait[1]}; or have Slurm signal earlier: sbatch --signal=B:TERM@{int(grace_s) + 30}",
        )
    else:
        yield good("platform", f"Slurm waits {wait[1]} s after SIGTERM (KillWait)")
    requeue = re.search(r"\bRequeue=(\d)", job)
    if requeue is not None and requeue[1] == "0":
        text = "Slurm does not start this job again (Requeue=0)"
        yield warning("platform", text, "sbatch --requeue, and a batch script that gives the same command")
    elif requeue is not None:
        yield good("platform", "Slurm may start this job again (Requeue=1)")
