"""The ranks of this job as its launcher has set them, and launchers whose variables are not read as ranks.

MindSpore's msrun, mpirun, srun and Horovod start several processes and name each one's rank in variables of their own.
Each such process would take itself for the whole job: all train alone, into one directory, and a killed one resumes
from another one's end. So the start is refused with the way out. What a launcher sets for a job of one process is
no reason to refuse, nor is an allocation in which only one process was started: of Slurm's variables only those of a
step (``srun``) count, since SLURM_NTASKS and SLURM_PROCID are set for a batch script and (the first) in ``salloc`` too.

Sources: MindSpore's page on environment variables (MS_ROLE, MS_WORKER_NUM, RANK_ID, RANK_SIZE), Open MPI's and
MVAPICH2's FAQ, ``srun(1)``, MPICH's PMI.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

from mindx_elastic.config import RankInfo
from mindx_elastic.errors import UsageError

__all__ = ["adopt_rank_id", "current_ranks", "refusal"]


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
        return RankInfo(
            rank=dist.get_rank(), world_size=dist.get_world_size(), local_rank=env.local_rank, attempt=env.attempt
        )
    if env.world_size > 1 and (refused := refusal(os.environ)):
        raise UsageError(refused)
    if env.world_size > 1:
        raise UsageError(
            f"WORLD_SIZE={env.world_size} but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() before entering the guard (Model.train does it by itself)"
        )
    refused = refusal(os.environ)
    if refused:
        raise UsageError(refused)
    return env


@dataclass(frozen=True, kw_only=True)
class _Launcher:
    found: Callable[[Mapping[str, str]], str]
    """The variables that say so, for a person; empty: this launcher has not started several."""
    instead: str
    """A command that starts the same job in a way that is read."""
    variables: str
    """What to set in each process for a script that is to be started as it is."""


def _size(rank: str, size: str) -> Callable[[Mapping[str, str]], str]:
    def found(env: Mapping[str, str]) -> str:
        count = env.get(size, "").strip()
        if not count.isdecimal() or int(count) <= 1:
            return ""
        return f"{size}={count}" + (f", {rank}={env[rank].strip()}" if env.get(rank, "").strip() else "")

    return found


def _mindspore_cluster(env: Mapping[str, str]) -> str:
    role, workers = env.get("MS_ROLE", "").strip(), env.get("MS_WORKER_NUM", "").strip()
    if not role and not (workers.isdecimal() and int(workers) > 1):
        return ""
    return ", ".join(f"{name}={value}" for name, value in (("MS_ROLE", role), ("MS_WORKER_NUM", workers)) if value)


def _mindspore_rank(env: Mapping[str, str]) -> str:
    rank, size = env.get("RANK_ID", "").strip(), env.get("RANK_SIZE", "").strip()
    if size == "1" or not (rank or size):
        return ""
    return ", ".join(f"{name}={value}" for name, value in (("RANK_ID", rank), ("RANK_SIZE", size)) if value)


def _exports(rank: str, size: str, local: str) -> str:
    return f"RANK=${rank} WORLD_SIZE=${size} LOCAL_RANK=${local}"


_AGENT = "mindx-elastic run --nproc-per-node N SCRIPT"
_NODES = "--nnodes NODES --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29400 --rdzv-id ID"
_SEVERAL = f"mindx-elastic run {_NODES} --nproc-per-node N SCRIPT"
_BY_MPI = f"on one machine: {_AGENT}; on each of several: {_SEVERAL}"
# The innermost first: mpirun starts its daemons with srun, whose variables the processes inherit.
_LAUNCHERS = (
    _Launcher(
        found=_mindspore_cluster,
        instead="call mindx_elastic.cluster.init() at the program's start, or in place of the scheduler and the "
        f"workers, {_AGENT}; on each of several machines {_SEVERAL}",
        variables="RANK (each worker another, from 0), WORLD_SIZE=$MS_WORKER_NUM, LOCAL_RANK, and no scheduler",
    ),
    _Launcher(
        found=_mindspore_rank,
        instead="call mindx_elastic.cluster.init() at the program's start with RANK_ID, RANK_SIZE, MASTER_ADDR and "
        f"MASTER_PORT set, or in place of a start for each rank, {_AGENT}; on each of several machines {_SEVERAL}",
        variables="RANK=$RANK_ID, WORLD_SIZE (the number of ranks), LOCAL_RANK",
    ),
    _Launcher(
        found=_size("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        instead=_BY_MPI,
        variables=_exports("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ),
    _Launcher(
        found=_size("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        instead=_BY_MPI,
        variables=_exports("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ),
    _Launcher(
        found=_size("HOROVOD_RANK", "HOROVOD_SIZE"),
        instead=f"with torch.distributed in place of Horovod, {_AGENT}",
        variables=_exports("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK"),
    ),
    _Launcher(
        found=_size("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        instead=(
            "srun --ntasks-per-node=1 mindx-elastic run --nnodes $SLURM_NNODES --rdzv-backend c10d "
            "--rdzv-endpoint FIRST_NODE:29400 --rdzv-id $SLURM_JOB_ID --nproc-per-node N SCRIPT"
        ),
        variables=_exports("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ),
    _Launcher(
        found=_size("PMI_RANK", "PMI_SIZE"),  # MPICH and Intel MPI; also srun --mpi=pmi2, which the one above has found
        instead=_BY_MPI,
        variables=_exports("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ),
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
                f"{found}, but no WORLD_SIZE, and torch.distributed is not initialised: this process was started as "
                "one of several, and each of them would train alone, into one directory. Start the job as one: "
                f"{launcher.instead}. Or set in each process {launcher.variables}, with MASTER_ADDR and MASTER_PORT, "
                "and call torch.distributed.init_process_group() before the guard is entered (Model does it by "
                "itself). If each process is a job of its own, set WORLD_SIZE=1 and give each its own directory"
            )
    return ""
