"""Manifests of a job under ``mindx-elastic run`` for Kubernetes, JobSet, Kubeflow Trainer v2, Volcano and Slurm.

What they have in common: a graceful stop (143, 75) and an eviction cost none of the job's tries, an error of usage (2,
126, 127) is final, the pod lives longer than the workers' grace period, and ``/dev/shm`` has room for the snapshots.
Pure, but for the templates next to this file, which it reads.
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import jinja2

from mindx_elastic.errors import UsageError

__all__ = ["KINDS", "JobNumbers", "manifest", "shared_memory_bytes"]

KINDS = ("kubernetes", "jobset", "trainer", "volcano", "slurm")
_AGENT_S = 15  # for the agent itself: what only memory holds, the last lines, result.json
_SLOTS = 2
_ROOM = 1.1  # headers, boundary rings
_OTHERS_BYTES = 1 << 30  # loader workers' batches, the process group's own
_PORT = 29400
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_OBJECT_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_MOST_SLURM_S = 65535


@dataclass(frozen=True, kw_only=True)
class JobNumbers:
    """What a manifest is made of; checked."""

    name: str
    """The job's name: a label of DNS, 40 characters at most."""
    image: str
    command: tuple[str, ...]
    """The training program and its arguments."""
    nodes: int = 1
    nproc: int = 1
    """Workers on each node."""
    gpus: int = 0
    """GPUs of each node."""
    grace_s: float = 45.0
    """What the workers get to save."""
    state_bytes: int = 1 << 30
    """Size of one rank's checkpoint."""
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
            raise UsageError("give the training program and its arguments after --")
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
    if kind == "volcano" and not numbers.restarts:
        raise UsageError("--restarts 0: Volcano takes that for its own default, 3; give at least 1")
    templates = jinja2.FileSystemLoader(Path(__file__).parent)
    made = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, loader=templates)
    made.filters["quoted"] = _quoted
    return made.get_template("manifest.yaml.j2").render(
        kind=kind,
        job=numbers,
        command=_command(kind, numbers),
        shm_gib=shared_memory_bytes(numbers) >> 30,
        slots=_SLOTS,
        agent_s=_AGENT_S,
    )


def _quoted(text: str) -> str:
    """A text for every YAML reader: unquoted, ``1e-4`` is a number and ``y`` is true to kubectl's."""
    shown = (f"\\{c}" if c in '"\\' else c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
    return f'"{"".join(shown)}"'


def _command(kind: str, numbers: JobNumbers) -> list[str]:
    """The words of each node's container; in a TrainJob nodes and rendezvous come from Trainer's own variables."""
    name = numbers.name
    words = ["mindx-elastic", "run", "--nproc-per-node", str(numbers.nproc), "--grace", f"{numbers.grace_s:g}"]
    first = {"kubernetes": f"{name}-0.{name}", "jobset": f"{name}-node-0-0.{name}", "volcano": f"{name}-node-0.{name}"}
    if numbers.nodes > 1 and kind in first:
        words += ["--nnodes", str(numbers.nodes), "--rdzv-backend", "c10d", "--rdzv-id", name]
        words += ["--rdzv-endpoint", f"{first[kind]}:{_PORT}"]
    where = f"{_literal(numbers.mount)}/run"
    if numbers.nodes > 1:  # the container's variable with the number of its node
        where += "-$(VC_TASK_INDEX)" if kind == "volcano" else "-$(JOB_COMPLETION_INDEX)"
    return [*words, "--run-dir", where, *map(_literal, (*numbers.run_options, *numbers.command))]


def _literal(word: str) -> str:
    """A word of a container's command that means itself: Kubernetes puts a variable in place of ``$(NAME)``, and ``$``
    in place of ``$$``."""
    return word.replace("$", "$$")


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
