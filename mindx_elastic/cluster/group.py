"""`init`, `get_rank`, `get_group_size`: the process group of a program that is started by hand for every role.

`init` knows these starts, and looks for them in this order:

1. torch.distributed is initialised already: nothing is left to do.
2. ``MS_ROLE``: a dynamic cluster. The scheduler serves in `init` and the process ends there; a worker registers.
3. ``WORLD_SIZE``: torchrun or `mindx-elastic run`.
4. ``RANK_ID`` and ``RANK_SIZE``: one process per device, started by a script.
5. None of them: a job of one process.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mindx_elastic.cluster.connection import SchedulerConnection
from mindx_elastic.cluster.messages import Group
from mindx_elastic.cluster.worker_end import WorkerEnd
from mindx_elastic.config import ClusterSettings, KeySettings, RankInfo, RejoinSettings, Settings
from mindx_elastic.core.events import RankFilter, attach_console, logger
from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.launchers import adopt_rank_id, refusal

__all__ = ["get_group_size", "get_rank", "init"]


def init(backend: str | None = None) -> None:
    """Initialise torch.distributed for this process, as its variables say. Main thread, once, at the program's start.

    With ``MS_ROLE=MS_SCHED`` it serves as the scheduler until the job is over and then ends the process: its exit code
    is 0 when every worker has finished. In a worker it returns when all workers are there; the variables RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and their like are set then, and `Guard` and `Model` work as under torchrun.

    backend: of torch.distributed; None: gloo, and with CUDA also NCCL. Raises UsageError, which names
    variables that are missing, or a wrong one.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return
    settings = ClusterSettings.find()
    if settings is not None:
        if settings.is_scheduler:
            _schedule(settings)
        _join_cluster(settings, backend)
        return
    adopt_rank_id(os.environ)
    ranks = RankInfo.from_env()
    if ranks.world_size > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name, "").strip()]
        if missing:
            raise UsageError(
                f"{ranks.world_size} ranks, but {' and '.join(missing)} not set: give the address of rank 0's machine "
                "and a free port of it, the same for all ranks"
            )
        _start(backend, ranks.local_rank, {})
        return
    if refused := refusal(os.environ):
        raise UsageError(refused)
    _start(backend, 0, {"store": dist.HashStore(), "rank": 0, "world_size": 1})


def get_rank() -> int:
    """This process's rank, from 0; 0 in a job of one process. Raises UsageError before `init` in a job of several."""
    return _ranks().rank


def get_group_size() -> int:
    """The number of ranks. Raises UsageError before `init` in a job of several."""
    return _ranks().world_size


def _ranks() -> RankInfo:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return RankInfo(rank=dist.get_rank(), world_size=dist.get_world_size())
    if os.environ.get("MS_ROLE", "").strip() or refusal(os.environ) or RankInfo.from_env().world_size > 1:
        raise UsageError("the rank is not known before mindx_elastic.cluster.init(): call it at the program's start")
    return RankInfo()


def _schedule(settings: ClusterSettings) -> None:
    """Serve, and end the process."""
    from mindx_elastic.cluster.scheduler import Scheduler

    with _console("mindx_elastic scheduler"):
        raise SystemExit(Scheduler(settings, _key()).run())


def _key() -> bytes | None:
    """The job's key, if the user has given one: the scheduler knows none that the workers make for themselves."""
    from mindx_elastic.agreement.job_key import find_key

    settings = KeySettings.from_env()
    return find_key(KeySettings(text=settings.text, file=settings.file), 1)


def _join_cluster(settings: ClusterSettings, backend: str | None) -> None:
    connection = SchedulerConnection(settings, _key())
    end = WorkerEnd(connection, os.environ)
    with _console("mindx_elastic"):
        connection.start()
        group = connection.wait_for_group()
        if group.rank == 0 and RejoinSettings.from_env().in_place:
            logger.warning("MINDX_RECOVER=in-place: in a dynamic cluster every worker starts over when one dies")
    end.watch()
    _export_group(connection, group)
    import torch.distributed as dist

    store = dist.PrefixStore(f"mindx-cluster/{group.generation}", connection.store_of(group))
    local_rank = group.local_rank if settings.device is None else settings.device
    _start(backend, local_rank, {"store": store, "rank": group.rank, "world_size": group.size})
    end.has_joined()


@contextmanager
def _console(name: str) -> Iterator[None]:
    """Show the package's lines while no guard does, `name` in front."""
    handler = attach_console(RankFilter(process=name), Settings.from_env().log_level)
    try:
        yield
    finally:
        if handler is not None:
            logger.removeHandler(handler)


def _export_group(connection: SchedulerConnection, group: Group) -> None:
    """Set the variables that programs and this package read under torchrun."""
    device = connection.settings.device
    local_rank = group.local_rank if device is None else device
    os.environ.update(
        RANK=str(group.rank),
        WORLD_SIZE=str(group.size),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(group.local_size),
        RANK_ID=str(group.rank),
        RANK_SIZE=str(group.size),
        MASTER_ADDR=group.host,
        MASTER_PORT=str(group.port),
        MINDX_ATTEMPT=str(group.generation),
        MINDX_JOB_ID=connection.job,
        TORCHELASTIC_RUN_ID=f"{connection.job}-{group.generation}",
    )


def _start(backend: str | None, local_rank: int, more: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    if backend is None:
        backend = "gloo"
        if torch.cuda.is_available():
            if local_rank >= torch.cuda.device_count():
                raise UsageError(
                    f"LOCAL_RANK={local_rank}, but this process sees {torch.cuda.device_count()} CUDA devices; start "
                    "fewer workers on this machine, set DEVICE_ID in each, or call init(backend='gloo')"
                )
            torch.cuda.set_device(local_rank)
            backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, **more)
    atexit.register(_leave)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
