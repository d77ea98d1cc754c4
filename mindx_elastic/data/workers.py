"""Loader worker processes: started so that a signal to the whole job cannot kill them, ended so that none can hang us.

torch and multiprocessing end workers with SIGTERM as the last resort. A shielded worker defers that for the grace
period, so a stuck one would hold the process up: theirs is SIGKILL here.

A worker is not shielded until its `worker_init_fn` runs, seconds after its start under "spawn". So it is started with
the signals blocked (children inherit the mask) and unblocks them once it is shielded.

The only file that touches torch's private loader state.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import signal_handling

from mindx_elastic.alarm.exit_codes import STOP_SIGNALS
from mindx_elastic.alarm.shield import WorkerShield
from mindx_elastic.config import Settings
from mindx_elastic.core.looks import asked
from mindx_elastic.data.random_streams import SeededDataset, as_collated
from mindx_elastic.data.sampler import ResumableBatchSampler

__all__ = ["WorkerStart", "end_workers", "make_torch_loader", "open_iterator", "shielded"]

_KILL_WAIT_S = 5.0

_exit_hook_pid: int | None = None


class WorkerStart:
    """A picklable ``worker_init_fn``, run inside a `WorkerShield`: opens the worker to signals, then calls
    the user's own.

    The user's function finds its own data set in ``get_worker_info().dataset``, not our wrapper.
    """

    def __init__(self, user_init: Callable[[int], None] | None = None) -> None:
        self.user_init = user_init

    def __call__(self, worker_id: int) -> None:
        signal.set_wakeup_fd(-1)  # a forked worker shares the trainer's: its own signals would ring there
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, SeededDataset):
            object.__setattr__(info, "dataset", info.dataset.wrapped)  # torch freezes the record; this is its twin
        if self.user_init is not None:
            self.user_init(worker_id)


def shielded(worker_init_fn: Callable[[int], None] | None, grace_s: float | None) -> WorkerShield:
    """`grace_s`: how long a signalled worker may live on (None: the environment's)."""
    life_s = Settings.from_env().grace_s if grace_s is None else grace_s
    return WorkerShield(WorkerStart(worker_init_fn), grace_s=life_s)


def make_torch_loader(
    template: DataLoader[Any],
    sampler: dict[str, Any],
    *,
    seed: int,
    grace_s: float | None,
    persistent: bool,
    is_seeded: bool = True,
) -> DataLoader[Any]:
    """A stock DataLoader with `template`'s settings as they are now, and shielded workers.

    Their base seed follows from `seed`, so that starting them does not draw from the global stream. `sampler` holds the
    sampler arguments; `is_seeded`: it gives a seed with each batch. `grace_s`: as for `shielded`.
    """
    dataset: Any = template.dataset
    collate_fn: Any = template.collate_fn
    if is_seeded:
        dataset, collate_fn = SeededDataset(dataset, collate_fn), as_collated
    workers: dict[str, Any] = {}
    if template.num_workers:
        workers = {
            "worker_init_fn": shielded(template.worker_init_fn, grace_s),
            "multiprocessing_context": template.multiprocessing_context,
            "prefetch_factor": template.prefetch_factor,
            "persistent_workers": persistent,
        }
    if template.pin_memory_device:
        workers["pin_memory_device"] = template.pin_memory_device
    return DataLoader(
        dataset,
        num_workers=template.num_workers,
        collate_fn=collate_fn,
        # Without an accelerator there is nothing to pin for; torch would warn at every epoch.
        pin_memory=template.pin_memory and torch.accelerator.is_available(),
        timeout=template.timeout,
        generator=torch.Generator().manual_seed(seed),
        **sampler,
        **workers,
    )


def open_iterator(loader: Any, begin: Callable[[Any], Iterator[Any]] = iter) -> Iterator[Any]:
    """``begin(loader)`` with the job's signals blocked in the calling thread while worker processes start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        _start_resource_tracker(loader)
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        with warnings.catch_warnings():
            # Python 3.12 warns when a process with threads forks, and torch itself starts threads. The workers do not
            # use them.
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            # torch draws a seed on the default device, from our generator, which is on the CPU. Workers would inherit a
            # device that is set here, and so would code of the program that makes the order.
            is_ours = isinstance(asked(loader, "batch_sampler"), ResumableBatchSampler)
            on_cpu = is_ours and not asked(loader, "num_workers", 0)
            with torch.device("cpu") if on_cpu else nullcontext():
                iterator: Any = begin(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if hasattr(iterator, "_worker_pids_set"):  # that of torch or torchdata, with workers
        _register_exit_hook()
        for process in iterator._workers:
            process._popen.terminate = process._popen.kill
    return iterator  # type: ignore[no-any-return]


def _start_resource_tracker(loader: Any) -> None:
    # Unless it forks, multiprocessing starts this helper with the first queue, and then unblocks SIGTERM and SIGINT.
    # The helper itself outlives these two, and SIGUSR1 if it inherits it blocked.
    if asked(loader, "num_workers", 0):
        context = asked(loader, "multiprocessing_context") or torch.multiprocessing
        if context.get_start_method() != "fork":
            resource_tracker.ensure_running()


def end_workers(iterator: Any, *, grace_s: float) -> None:
    """End the workers of a torch iterator as torch does, and after `grace_s` with SIGKILL. Any thread; does nothing for
    an iterator without workers."""
    if not hasattr(iterator, "_worker_pids_set"):
        return
    if iterator._worker_pids_set:  # or torch's SIGCHLD handler would raise in the training thread
        signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    # In a thread, because a worker that was killed while it held a lock would block us for ever.
    asking = threading.Thread(target=iterator._shutdown_workers, daemon=True)
    asking.start()
    asking.join(grace_s)
    for process in iterator._workers:
        if process.is_alive():
            process.kill()
    asking.join(_KILL_WAIT_S)


def _register_exit_hook() -> None:
    # A finalizer of multiprocessing: it runs in its child processes too, and before it ends the daemons that are left.
    global _exit_hook_pid
    if _exit_hook_pid != os.getpid():
        _exit_hook_pid = os.getpid()
        Finalize(None, signal.signal, args=(signal.SIGCHLD, signal.SIG_DFL), exitpriority=100)  # torch's would raise
