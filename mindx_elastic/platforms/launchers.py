"""The ranks of this job as its launcher has set them, what launchers do at a stop, and whose ranks are not believed.

MindSpore's msrun, mpirun, srun and Horovod start several processes and name each one's rank in their own variables.
Each such process would take itself for the whole job: all train alone, into one directory, and a killed one resumes
from another one's end. So the start is refused with the way out. What a launcher sets for a job of one process is
no reason to refuse, nor is an allocation in which only one process was started: of Slurm's variables only those of a
step (``srun``) count, since SLURM_NTASKS and SLURM_PROCID are set for a batch script and (the first) in ``salloc`` too.

Sources: MindSpore's page on environment variables (MS_ROLE, MS_WORKER_NUM, RANK_ID, RANK_SIZE), Open MPI's and
MVAPICH2's FAQ, ``srun(1)``, MPICH's PMI. What each launcher does at a stop was measured: see ``docs/platforms.md``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from mindx_elastic.config import RankInfo, mpirun_grace_s
from mindx_elastic.errors import UsageError

__all__ = ["adopt_rank_id", "at_a_stop", "current_ranks", "refusal"]


def adopt_rank_id(env: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE and LOCAL_RANK from RANK_ID, RANK_SIZE and DEVICE_ID, where a script has started one process
    per device with these: torch reads the former."""
    if env.get("WORLD_SIZE", "").strip() or not (env.get("RANK_ID", "").strip() and env.get("RANK_SIZE", "").strip()):
        return
    ranks = RankInfo.from_env(env)
    env.update(RANK=str(ranks.rank), WORLD_SIZE=str(ranks.world_size), LOCAL_RANK=str(ranks.local_rank))


def current_ranks(env: RankInfo) -> RankInfo:
    """Rank and world size as torch.distributed has them, else as the environment says.

    Raises UsageError for one of several ranks without torch.distributed, whatever has started it.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        local_rank = _local_rank(os.environ, rank, size, env.local_rank)
        return RankInfo(rank=rank, world_size=size, local_rank=local_rank, attempt=env.attempt)
    if refused := refusal(os.environ):
        raise UsageError(refused)
    if env.world_size > 1:
        raise UsageError(
            f"WORLD_SIZE={env.world_size} but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() before entering the guard (Model.train does it by itself)"
        )
    return env


class _Launcher(NamedTuple):
    """Its variables of a process: the rank, the number of ranks, the rank on this machine."""

    rank: str
    size: str
    local: str
    instead: str
    """A command that starts the same job in a way that is read."""

    def found(self, env: Mapping[str, str]) -> str:
        """The variables that say that this process is one of several; empty: they do not."""
        rank, size = env.get(self.rank, "").strip(), env.get(self.size, "").strip()
        if self.rank == "MS_ROLE":
            is_one = bool(rank) or _is_several(size)
        elif self.rank == "RANK_ID":  # MindSpore's scripts may leave out the size
            is_one = size != "1" and bool(rank or size)
        else:
            is_one = _is_several(size)
        given = ((self.rank, rank), (self.size, size))
        return ", ".join(f"{name}={value}" for name, value in given if value) if is_one else ""


def _is_several(size: str) -> bool:
    return size.isdecimal() and int(size) > 1


_AGENT = "mindx-elastic run --nproc-per-node N SCRIPT"
# The innermost first: mpirun starts its daemons with srun, whose variables the processes inherit.
_LAUNCHERS = (
    _Launcher(
        rank="MS_ROLE",
        size="MS_WORKER_NUM",
        local="LOCAL_RANK",
        instead=f"mindx_elastic.cluster.init() at the program's start, or {_AGENT}",
    ),
    _Launcher(
        rank="RANK_ID",
        size="RANK_SIZE",
        local="DEVICE_ID",
        instead=f"mindx_elastic.cluster.init() at the program's start, or {_AGENT}",
    ),
    _Launcher(
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local="OMPI_COMM_WORLD_LOCAL_RANK",
        instead=_AGENT,
    ),
    _Launcher(
        rank="MV2_COMM_WORLD_RANK", size="MV2_COMM_WORLD_SIZE", local="MV2_COMM_WORLD_LOCAL_RANK", instead=_AGENT
    ),
    _Launcher(rank="HOROVOD_RANK", size="HOROVOD_SIZE", local="HOROVOD_LOCAL_RANK", instead=_AGENT),
    _Launcher(
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local="SLURM_LOCALID",
        instead=f"{_AGENT} in a batch script (as deploy/slurm/agent.sbatch does)",
    ),
    # MPICH and Intel MPI; also srun --mpi=pmi2, which the one above has found
    _Launcher(rank="PMI_RANK", size="PMI_SIZE", local="MPI_LOCALRANKID", instead=_AGENT),
)
_SINGLE = ("RANK_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""One of these being 1 settles it: a job of one process, whatever the allocation around it is."""


def refusal(env: Mapping[str, str]) -> str:
    """Why this process must not train on its own, and what to do; empty: nothing speaks against it.

    A WORLD_SIZE that is set is believed: it is the user's own word, or that of a launcher that is read.
    """
    if env.get("WORLD_SIZE", "").strip() or any(env.get(name, "").strip() == "1" for name in _SINGLE):
        return ""
    for launcher in _LAUNCHERS:
        found = launcher.found(env)
        if found:
            return (
                f"{found}, but no WORLD_SIZE: one of several processes, and each would train alone, into one "
                f"directory. Start the job with {launcher.instead}\n"
                "Other ways, and WORLD_SIZE=1 for a separate job: docs/platforms.md"
            )
    return ""


def _local_rank(env: Mapping[str, str], rank: int, world_size: int, known: int) -> int:
    """This process's rank on its machine, by the launcher whose variables say what the process group says; else
    `known`."""
    if env.get("LOCAL_RANK", "").strip():
        return known
    for launcher in _LAUNCHERS:
        if (env.get(launcher.rank), env.get(launcher.size)) == (str(rank), str(world_size)):
            local = env.get(launcher.local, "").strip()
            return int(local) if local.isdecimal() else known
    return known


def at_a_stop(env: Mapping[str, str], parent: str | None = None) -> Iterator[tuple[str, str]]:
    """What the launcher of this process does at a stop that its user would not expect, and the remedy.

    `parent`: the command line of the parent process; None: look it up.
    """
    parent = _parent() if parent is None else parent
    if (grace_s := mpirun_grace_s(env)) is not None and not env.get("MINDX_GRACE_S", "").strip():
        yield (
            f"mpirun kills this process {grace_s:g} s after its SIGTERM: a stop has {grace_s:g} s",
            "mpirun --mca odls_base_sigkill_timeout 30 (MINDX_GRACE_S, where a parameter file of Open MPI says it)",
        )
    if env.get("OMPI_COMM_WORLD_SIZE", "").strip() and env.get("PRTE_LAUNCHED", "").strip():
        yield (
            "a SIGTERM, SIGINT or SIGHUP to the mpirun of Open MPI 5 kills this process unheard",
            "kill -USR1 with mpirun's process ID: it hands that on, and all ranks stop and save",
        )
    if env.get("SLURM_STEP_ID", "").strip() and "slurmstepd" in parent:
        yield (
            "a SIGTERM to the srun client kills this process unheard",
            "scancel --signal=TERM JOB stops the job's steps; deploy/slurm/agent.sbatch does that",
        )
    for words, name in (("deepspeed/launcher", "deepspeed"), ("accelerate launch", "accelerate launch")):
        if words in parent.replace("deepspeed.launcher", "deepspeed/launcher"):
            yield (
                f"{name} dies of a SIGTERM and hands it to no rank",
                f"send it to the ranks themselves, or start with {_AGENT}",
            )
    if env.get("SUPERVISOR_ENABLED", "").strip():
        yield (
            "supervisord signals its direct child only, and kills it 10 s later",
            "stopwaitsecs=40, stopasgroup=true and autorestart=true in its [program:...] section",
        )


def _parent() -> str:
    try:
        line = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return ""
    return line.replace(b"\0", b" ").decode("utf-8", "replace")
