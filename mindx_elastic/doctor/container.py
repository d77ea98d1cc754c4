"""Who stops this process, how long that one waits, and whether it starts it again: as far as it can be seen from here.

Nothing is asked over the network. Kubernetes tells a container neither its grace period nor its restart policy, Docker
neither; then the finding says how to look them up outside.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from mindx_elastic.core.first_process import DROPPED, WITH_AN_INIT
from mindx_elastic.core.printable import printable
from mindx_elastic.doctor.finding import Finding, unknown, warning
from mindx_elastic.platforms.launchers import at_a_stop

__all__ = ["judge_first_process", "look_at_container"]

_SHELLS = ("ash", "bash", "dash", "sh", "zsh")
_ENGINE_FILES = ("/.dockerenv", "/run/.containerenv")


def look_at_container(env: Mapping[str, str], grace_s: float) -> Iterator[Finding]:
    """What stops this process: Kubernetes, Docker or Podman, and launchers that do what nobody expects."""
    least = int(grace_s) + 5
    if env.get("KUBERNETES_SERVICE_HOST"):
        pod = env.get("HOSTNAME", "POD")
        yield unknown(
            "platform",
            f"Kubernetes: grace period and restart policy are not visible from inside a pod (30 s if not set; "
            f"yours must be {least} at least)",
            f"kubectl get pod {printable(pod)} -o jsonpath='{{.spec.terminationGracePeriodSeconds}} "
            "{.spec.restartPolicy}'",
        )
    elif any(os.path.exists(path) for path in _ENGINE_FILES):
        yield unknown(
            "platform",
            "a container: how long docker stop waits is not visible from inside (10 s if not set)",
            f"docker stop --time {least}, or docker run --stop-timeout {least}; --restart on-failure starts it again",
        )
    for fact, remedy in at_a_stop(env):
        yield warning("platform", fact, remedy)
    yield from judge_first_process(_first_process())


def _first_process() -> str:
    """The name of the program of process 1; empty: it cannot be seen."""
    try:
        return Path("/proc/1/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def judge_first_process(name: str) -> Iterator[Finding]:
    """Whether the first process hands signals on. `name`: of its program; that of a machine is none of these."""
    if name in _SHELLS:
        yield warning(
            "platform",
            f"process 1 of this container is {name}, which hands no SIGTERM to the program that it runs",
            "start the program with exec in that script, or with docker run --init",
        )
    elif name.startswith("python") or name == "mindx-elastic":
        yield warning("platform", DROPPED.replace("this program", f"{printable(name)}"), WITH_AN_INIT)
