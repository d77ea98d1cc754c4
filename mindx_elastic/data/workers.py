"""Loader worker processes: started so that a signal to the whole job cannot kill them, ended so that none can hang us.

The only file that touches torch's private loader state. Why torch's own ways are not enough:
- torch ends workers with SIGTERM as the last resort, and so does the interpreter's exit; a shielded worker
  defers SIGTERM for the grace period, so a stuck one would hold the process up. We end with SIGKILL, after
  torch has let go of the pids (its SIGCHLD handler would turn the kill into an exception in the training
  thread).
- A worker is not shielded until its `worker_init_fn` runs, seconds after its start under "spawn". So it is
  started with the signals blocked (children inherit the mask) and unblocks them once it is shielded.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
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
from mindx_elastic.data.random_streams import SeededDataset
from mindx_elastic.data.sampler import ResumableBatchSampler

__all__ = ["WorkerSet", "WorkerStart", "make_torch_loader", "open_iterator"]

_KILL_WAIT_S = 5.0

_open_sets: set[WorkerSet] = set()  # what the exit hook must end; strong, see WorkerSet
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


def make_torch_loader(
    template: DataLoader[Any],
    dataset: Any,
    sampler: dict[str, Any],
    collate_fn: Callable[[Any], Any] | None,
    *,
    generator: torch.Generator,
    grace_s: float | None,
    persistent: bool,
) -> DataLoader[Any]:
    """A stock DataLoader with `template`'s settings as they are now, and shielded workers.

    `generator` gives the workers' base seed, so that starting them does not draw from the global stream. `sampler`
    holds the sampler arguments. `grace_s`: how long a signalled worker may live on (None: the environment's).
    """
    workers: dict[str, Any] = {}
    if template.num_workers:
        life_s = Settings.from_env().grace_s if grace_s is None else grace_s
        workers = {
            "worker_init_fn": WorkerShield(WorkerStart(template.worker_init_fn), grace_s=life_s),
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
        generator=generator,
        **sampler,
        **workers,
    )


def open_iterator(loader: Any) -> tuple[Iterator[Any], WorkerSet | None]:
    """``iter(loader)`` with the job's signals blocked in the calling thread while worker processes start.

    The second result is None where there are no workers, or where they cannot be reached.
    """
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
                iterator: Iterator[Any] = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if not getattr(iterator, "_workers", None):
        return iterator, None
    _register_exit_hook()
    known = [workers for workers in _open_sets if workers.belongs_to(iterator)]
    return iterator, known[0] if known else WorkerSet(iterator)


def _start_resource_tracker(loader: Any) -> None:
    # Unless it forks, multiprocessing starts this helper with the first queue, and then unblocks SIGTERM and SIGINT.
    # The helper itself outlives these two, and SIGUSR1 if it inherits it blocked.
    if asked(loader, "num_workers", 0):
        context = asked(loader, "multiprocessing_context") or torch.multiprocessing
        if context.get_start_method() != "fork":
            resource_tracker.ensure_running()


class WorkerSet:
    """The worker processes of one torch iterator, and what is needed to end them.

    Kept in `_open_sets` and not with the iterator alone: when an iterator is freed as part of a reference cycle (an
    exception from a worker makes one), the queues would be closed before the workers could be told to end. It
    holds nothing of the user's, so it keeps nothing else alive.
    """

    def __init__(self, iterator: Any) -> None:
        self.processes: list[Any] = list(iterator._workers)
        self._queues: list[Any] = list(iterator._index_queues)
        self._results = iterator._worker_result_queue
        self._done = iterator._workers_done_event
        self._key = id(iterator)  # under which torch watches the processes
        self._owner = os.getpid()  # a forked child inherits the object, and must not end its parent's workers
        self._ended = False
        _open_sets.add(self)

    def belongs_to(self, iterator: Any) -> bool:
        return bool(self.processes == iterator._workers)

    def end(self, iterator: Any = None, *, grace_s: float) -> None:
        """Ask the workers to end, wait at most `grace_s` for all of them together, then SIGKILL; 0: SIGKILL at once.

        Any thread; does nothing the second time. `iterator` is the torch iterator, where the caller still has it.
        """
        if self._ended:
            return
        self._ended = True
        _open_sets.discard(self)
        # Whether torch itself, which ends the workers after the last batch, has not done so yet.
        first = iterator is not None and not iterator._shutdown
        if first:
            iterator._shutdown = True  # torch's own way, run when the iterator is freed, now finds nothing to do
        if self._owner != os.getpid():
            return
        self._unwatch(iterator)
        if grace_s > 0 and first:
            self._ask(iterator, grace_s)
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join(_KILL_WAIT_S)
        if first:
            for queue in [*self._queues, self._results]:
                queue.cancel_join_thread()
                queue.close()

    def _unwatch(self, iterator: Any) -> None:
        """Let go of the pids, so that torch's SIGCHLD handler does not raise in the training thread."""
        if iterator is None:
            with suppress(ValueError):  # torch has done so already
                signal_handling._remove_worker_pids(self._key)
                signal_handling._set_worker_pids(self._key, ())  # an entry that torch can take out later
        elif iterator._worker_pids_set:
            signal_handling._remove_worker_pids(self._key)
            iterator._worker_pids_set = False

    def _ask(self, iterator: Any, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        pinning = getattr(iterator, "_pin_memory_thread", None)
        if pinning is not None:
            # First, as torch does: ending workers may leave half an object in the queue that this thread reads.
            iterator._pin_memory_thread_done_event.set()
            self._results.put((None, None))
            pinning.join(_KILL_WAIT_S)
        # In a thread, because a worker that was killed while it held the event's lock would block us for ever.
        asking = threading.Thread(target=self._done.set, daemon=True)
        asking.start()
        asking.join(grace_s)
        for queue in self._queues:
            queue.put(None)
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))


def _register_exit_hook() -> None:
    # A finalizer of multiprocessing, because these run in its child processes too, and before it waits for the daemons
    # that are left, which would last as long as a shielded worker lives.
    global _exit_hook_pid
    if _exit_hook_pid != os.getpid():
        _exit_hook_pid = os.getpid()
        Finalize(None, _end_all_at_exit, exitpriority=100)


def _end_all_at_exit() -> None:
    for workers in list(_open_sets):
        workers.end(grace_s=0)  # as torch: no asking at exit (and no new threads, which Python 3.12 forbids)
