"""Manifests of a job under ``mindx-elastic run`` for Kubernetes, JobSet, Kubeflow Trainer v2, Volcano and Slurm.

What they have in common: a graceful stop (143, 75) and an eviction cost none of the job's tries, an error of usage (2,
126, 127) is final, the pod lives longer than the workers' grace period, and ``/dev/shm`` has room for the snapshots.
Pure, but for the batch script that is read from beside this file.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindx_elastic.errors import UsageError

__all__ = ["KINDS", "JobNumbers", "manifest", "shared_memory_bytes"]

KINDS = ("kubernetes", "jobset", "trainer", "volcano", "slurm")
_AGENT_S = 15  # for the agent itself: what only memory holds, the last lines, result.json
_SLOTS = 2
_ROOM = 1.1  # headers, boundary rings
_OTHERS_BYTES = 1 << 30  # loader workers' batches, the process group's own
_FAULT_DIR = "/user/restore/fault/config"
_PORT = 29400
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_OBJECT_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9/._-]+(:[A-Za-z0-9._-]+)*")
_MOST_SLURM_S = 65535


@dataclass(frozen=True, kw_only=True)
class JobNumbers:
    """What a manifest is made of; checked."""

    name: str
    """Of the job: a label of DNS, 40 characters at most."""
    image: str
    command: tuple[str, ...]
    """The training program and its arguments."""
    nodes: int = 1
    nproc: int = 1
    """Workers on each node."""
    gpus: int = 0
    """Of each node."""
    grace_s: float = 45.0
    """What the workers get to save."""
    state_bytes: int = 1 << 30
    """Of one rank's checkpoint."""
    restarts: int = 3
    """Failures that Kubernetes answers with new pods."""
    claim: str = "checkpoints"
    """Persistent volume claim of the checkpoints and the run directory."""
    mount: str = "/checkpoints"
    faults: str = ""
    """ConfigMap with the platform's fault report; empty: none."""
    run_options: tuple[str, ...] = ()
    """Further options of ``mindx-elastic run``."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"--name {self.name}: give small letters, digits and -, a letter first, 40 at most")
        for what, name in (("--claim", self.claim), ("--faults", self.faults or "a")):
            if not _OBJECT_NAME.fullmatch(name):
                raise UsageError(f"{what} {name}: give the name of a Kubernetes object: small letters, digits, - and .")
        if not self.image or not self.image.isprintable() or " " in self.image:
            raise UsageError(f"--image {self.image!r}: give the name of an image, without blanks")
        if not self.command:
            raise UsageError("give the training program and its arguments behind --")
        if not self.mount.startswith("/") or ":" in self.mount or not self.mount.isprintable():
            raise UsageError(f"--mount {self.mount!r}: give a path that begins with / and has no : in it")
        if any("\0" in word for word in (*self.command, *self.run_options)):
            raise UsageError("a word of the command has a NUL byte in it, which no program can be given")

    @property
    def termination_s(self) -> int:
        """When the platform may kill the pod, in seconds after its SIGTERM."""
        return math.ceil(self.grace_s) + _AGENT_S


def shared_memory_bytes(numbers: JobNumbers) -> int:
    """Room in ``/dev/shm``: two snapshots of each rank's state, in whole GiB. Ranks that are replicas need less."""
    needed = numbers.nproc * numbers.state_bytes * _SLOTS * _ROOM + _OTHERS_BYTES
    return math.ceil(needed / (1 << 30)) << 30


def manifest(kind: str, numbers: JobNumbers) -> str:
    """The text of one of `KINDS`. Raises UsageError."""
    if kind == "slurm":
        return _slurm(numbers)
    makers = {"kubernetes": _kubernetes, "jobset": _jobset, "trainer": _trainer, "volcano": _volcano}
    documents = makers[kind](numbers)
    shm = shared_memory_bytes(numbers) >> 30
    head = (
        f"# {numbers.termination_s} s until a pod is killed: {numbers.grace_s:g} s for the workers (--grace), "
        f"{_AGENT_S} s for the agent.\n# {shm} GiB of /dev/shm: {_SLOTS} snapshots of each of {numbers.nproc} ranks "
        "of a node; they count as the container's memory.\n"
    )
    return head + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes each text that another YAML reader could take for something else: to kubectl's, ``1e-4`` is a number and
    ``y`` is true, to PyYAML's they are texts, which it leaves unquoted."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if _PLAIN.fullmatch(text) else '"')


_Dumper.add_representer(str, _represent_text)


def _run(numbers: JobNumbers, endpoint: str = "", index: str = "JOB_COMPLETION_INDEX") -> list[str]:
    """index: the container's variable with the number of its node."""
    words = ["mindx-elastic", "run", "--nproc-per-node", str(numbers.nproc), "--grace", f"{numbers.grace_s:g}"]
    if endpoint:
        words += ["--nnodes", str(numbers.nodes), "--rdzv-backend", "c10d", "--rdzv-id", numbers.name]
        words += ["--rdzv-endpoint", f"{endpoint}:{_PORT}"]
    where = f"{_literal(numbers.mount)}/run"
    if numbers.nodes > 1:
        where += f"-$({index})"
    return [*words, "--run-dir", where, *map(_literal, (*numbers.run_options, *numbers.command))]


def _literal(word: str) -> str:
    """A word of a container's command that means itself: Kubernetes puts a variable in place of ``$(NAME)``, and ``$``
    in place of ``$$``."""
    return word.replace("$", "$$")


def _pod(numbers: JobNumbers, container: str, command: Sequence[str]) -> dict[str, Any]:
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "checkpoints", "mountPath": numbers.mount}]
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shared_memory_bytes(numbers) >> 30}Gi"}},
        {"name": "checkpoints", "persistentVolumeClaim": {"claimName": numbers.claim}},
    ]
    if numbers.faults:  # a folder, never a subPath: that would not follow the ConfigMap's changes
        mounts.append({"name": "faults", "mountPath": _FAULT_DIR})
        volumes.append({"name": "faults", "configMap": {"name": numbers.faults, "optional": True}})
    made: dict[str, Any] = {
        "name": container,
        "image": numbers.image,
        "command": list(command),
        "env": [{"name": "PYTHONUNBUFFERED", "value": "1"}],
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if numbers.gpus:
        made["resources"] = {"limits": {"nvidia.com/gpu": str(numbers.gpus)}}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": numbers.termination_s,
        "containers": [made],
        "volumes": volumes,
    }


def _job_spec(numbers: JobNumbers, container: str, command: Sequence[str]) -> dict[str, Any]:
    """The spec of a batch/v1 Job."""

    def codes(action: str, *values: int) -> dict[str, Any]:
        found = {"containerName": container, "operator": "In", "values": list(values)}
        return {"action": action, "onExitCodes": found}

    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        codes("FailJob", 2, 126, 127),
        codes("Ignore", 75, 143),
    ]
    several = {} if numbers.nodes == 1 else {"completionMode": "Indexed"}
    return {
        "parallelism": numbers.nodes,
        "completions": numbers.nodes,
        **several,
        "backoffLimit": numbers.restarts * numbers.nodes,
        "podReplacementPolicy": "Failed",  # no second pod while the first one still saves
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": _pod(numbers, container, command)},
    }


def _kubernetes(numbers: JobNumbers) -> list[dict[str, Any]]:
    name, documents = numbers.name, []
    endpoint = f"{name}-0.{name}" if numbers.nodes > 1 else ""
    spec = _job_spec(numbers, "train", _run(numbers, endpoint))
    if endpoint:
        spec["template"]["spec"]["subdomain"] = name
        chosen = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}}
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": chosen}
        documents.append(service)
    return [*documents, {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}]


def _jobset_spec(numbers: JobNumbers, command: Sequence[str], labels: dict[str, str] | None = None) -> dict[str, Any]:
    template: dict[str, Any] = {"spec": _job_spec(numbers, "node", command)}
    if labels:
        template = {"metadata": {"labels": labels}, **template}
    rule = {"name": "wrongusage", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "failurePolicy": {"maxRestarts": numbers.restarts, "restartStrategy": "BlockingRecreate", "rules": [rule]},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": template}],
    }


def _jobset(numbers: JobNumbers) -> list[dict[str, Any]]:
    name = numbers.name
    endpoint = f"{name}-node-0-0.{name}" if numbers.nodes > 1 else ""
    spec = _jobset_spec(numbers, _run(numbers, endpoint))
    return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name}, "spec": spec}]


def _trainer(numbers: JobNumbers) -> list[dict[str, Any]]:
    """The runtime has what a TrainJob cannot say; nodes and rendezvous come from Trainer's PET_ variables."""
    name, command = numbers.name, _run(numbers)
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    policy = {"numNodes": numbers.nodes, "torch": {}}
    spec = {"mlPolicy": policy, "template": {"spec": _jobset_spec(numbers, command, labels)}}
    trainer: dict[str, Any] = {"numNodes": numbers.nodes, "numProcPerNode": numbers.nproc, "image": numbers.image}
    job = {"runtimeRef": {"kind": "TrainingRuntime", "name": name}, "trainer": {**trainer, "command": command}}
    api = "trainer.kubeflow.org/v1alpha1"
    return [
        {"apiVersion": api, "kind": "TrainingRuntime", "metadata": {"name": name}, "spec": spec},
        {"apiVersion": api, "kind": "TrainJob", "metadata": {"name": name}, "spec": job},
    ]


def _volcano(numbers: JobNumbers) -> list[dict[str, Any]]:
    """Its first policy that fits an event counts, so the exit codes stand in front. It has no way to leave a stop out
    of `maxRetry`."""
    name, several = numbers.name, numbers.nodes > 1
    if not numbers.restarts:
        raise UsageError("--restarts 0: Volcano takes that for its own default, 3; give at least 1")
    command = _run(numbers, f"{name}-node-0.{name}" if several else "", "VC_TASK_INDEX")
    policies: list[dict[str, Any]] = [{"exitCode": code, "action": "TerminateJob"} for code in (2, 126, 127)]
    policies += [{"event": event, "action": "RestartJob"} for event in ("PodFailed", "PodEvicted")]
    spec: dict[str, Any] = {"schedulerName": "volcano", "minAvailable": numbers.nodes, "maxRetry": numbers.restarts}
    if several:  # names that the pods find each other by, and VC_TASK_INDEX
        spec["plugins"] = {"env": [], "svc": ["--publish-not-ready-addresses=true"]}
    template = {"spec": _pod(numbers, "node", command)}
    spec |= {"policies": policies, "tasks": [{"name": "node", "replicas": numbers.nodes, "template": template}]}
    return [{"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": {"name": name}, "spec": spec}]


def _slurm(numbers: JobNumbers) -> str:
    """The batch script of ``deploy/slurm``, with these numbers in it."""
    if numbers.nodes > 1:
        raise UsageError(f"--nodes {numbers.nodes}: the batch script is for one node")
    if numbers.termination_s > _MOST_SLURM_S:
        most = _MOST_SLURM_S - _AGENT_S
        raise UsageError(f"--grace {numbers.grace_s:g}: Slurm's --signal takes {_MOST_SLURM_S} s at most; give {most}")
    text = Path(__file__).with_name("slurm_agent.sbatch").read_text(encoding="utf-8")
    words = " ".join(map(shlex.quote, (*numbers.run_options, *numbers.command)))
    gpus = f"#SBATCH --gpus={numbers.gpus}\n" if numbers.gpus else ""
    for old, new in (
        ("#SBATCH --job-name=train\n", f"#SBATCH --job-name={numbers.name}\n{gpus}"),
        ("#SBATCH --signal=B:TERM@60\n", f"#SBATCH --signal=B:TERM@{numbers.termination_s}\n"),
        ("${GRACE:-45}", f"${{GRACE:-{numbers.grace_s:g}}}"),
        ("${NPROC:-${SLURM_GPUS_ON_NODE:-1}}", f"${{NPROC:-{numbers.nproc}}}"),
        (
            "--signal=B:TERM@60 and GRACE=45 fit",
            f"--signal=B:TERM@{numbers.termination_s} and GRACE={numbers.grace_s:g} fit",
        ),
        ("and 60 s before the end", f"and {numbers.termination_s} s before the end"),
        ('"$@" &\n', f'{words} "$@" &\n'),  # the last one: what the words hold is not looked at
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text
