"""Recovery in place over NCCL: what is different from gloo. It has to be asked for (``MINDX_REJOIN_NCCL=1``).

Seen on a real GPU with two ranks that share it (``tests/system/test_gpu.py``), never over NVLink, InfiniBand or several
GPUs. What it does:

* *Out of the collectives.* A collective on a GPU does not fail when a rank dies: its kernel waits. Aborting the
  communicator ends the kernel, as if it had come to its end, with any result. All communicators are aborted at the same
  moment, because one's abort may wait for another's kernel.
* *No wrong result in the weights.* The program is ahead of the device. When a communicator is aborted, the update that
  waits on the device after the collective would run, with wrong gradients. So the training thread waits for the
  device before each update and each boundary (`Devices.fence`), and goes no further if a communicator was aborted
  meanwhile.
* *New connections.* A new backend in the same group, with the old one's options, connected at once.
* *A broken context.* After an illegal memory access or an ECC error all calls of this process to CUDA fail. It cannot
  be a survivor, and ends itself, so that a new process takes its place.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NoReturn

import torch

from mindx_elastic.config import RejoinSettings
from mindx_elastic.core.events import logger

__all__ = [
    "BACKEND",
    "DUMP",
    "ERROR_HANDLING",
    "Devices",
    "broken_context",
    "end_process",
    "is_device_error",
    "new_backend",
    "problem",
]

BACKEND = "nccl"
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""With another value than 0 torch ends a process whose peer has died."""
DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"
"""With another value than 0 a rank whose peer has died writes to the store that all are to dump what they do, new ranks
too, and a thread of torch's that does so keeps the process from ending (seen on an H200, torch 2.11)."""
_NEEDED = ("abort", "eager_connect_single_device", "Options")
_ABORT_S = 10.0
_COPIED = ("is_high_priority_stream", "config", "_timeout")


def problem(devices: Iterable[str]) -> str:
    """Why groups whose backend is NCCL for these device types cannot get new connections; empty: they can."""
    if not RejoinSettings.from_env().nccl:
        return (
            "process groups with the backend nccl get new connections only with MINDX_REJOIN_NCCL=1, which has been "
            "run on a single GPU only"
        )
    backend = _backend_class()
    missing = [name for name in _NEEDED if not hasattr(backend, name)]
    if backend is None or missing:
        return f"this torch ({torch.__version__}) lacks {', '.join(missing)} of ProcessGroupNCCL"
    if others := sorted(set(devices) - {"cuda"}):
        return f"nccl is the backend of {', '.join(others)}"
    if os.environ.get(ERROR_HANDLING) != "0":
        return f"{ERROR_HANDLING} is not 0, so torch ends a process whose peer has died"
    return ""


def _backend_class() -> Any:
    return getattr(torch._C._distributed_c10d, "ProcessGroupNCCL", None)


def new_backend(
    store: Any, position: int, ranks: tuple[int, ...], name: str, old: Any, timeout: timedelta | None, *, is_world: bool
) -> Any:
    """A backend with connections to the other `ranks`, which is this process's `position` among them. All of them
    together, main thread. `old`: the backend in whose place it comes, None in a new process. Raises RuntimeError."""
    make = _backend_class()
    options = make.Options()
    for field in _COPIED:
        if hasattr(getattr(old, "options", None), field):
            setattr(options, field, getattr(old.options, field))
    if timeout is not None:
        options._timeout = timeout
    options.global_ranks_in_group = [] if is_world else list(ranks)
    options.group_name = name
    backend = make(store, position, len(ranks), options)
    # Else the first collective would connect, where a failure can only end in a restart.
    backend.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return backend


def is_device_error(error: BaseException | None) -> bool:
    """Whether CUDA has raised it. It need not break the context: there may just be no memory left."""
    kind = getattr(torch, "AcceleratorError", None)
    if kind is not None and isinstance(error, kind):
        return True
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)


def broken_context() -> str:
    """Why this process cannot use its device any more; empty: it can. Waits for what the device does. Such an error
    stays: every later call fails with it."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


class Devices:
    """The communicators of this process. `abort` any thread, the rest the training thread."""

    def __init__(self, backends: Callable[[], list[Any]]) -> None:
        """`backends`: those of NCCL, of all groups that this rank is in."""
        self._backends = backends
        self.is_used = False
        """Whether there are any, as of the last `look`."""
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] | None = None
        """The threads of the abort since the last `connected`; None: there was none."""
        self._errors: list[str] = []

    def look(self) -> None:
        """Find out which there are: with the guard open, and with new backends."""
        self.is_used = bool(self._backends())

    def abort(self) -> None:
        """Abort all communicators, once; returns at once, and never raises."""
        with self._lock:
            if self._threads is not None or not self.is_used:
                return
            try:
                backends = self._backends()
            except Exception as error:  # the program makes or destroys groups at this moment
                backends = []
                self._errors.append(f"{type(error).__name__}: {error}".partition("\n")[0])
            # One thread each: torch's abort returns when it is done, and may need the others' for that. NCCL's group
            # calls do not do it, because torch aborts in its own thread, and they count for the caller's.
            self._threads = [
                threading.Thread(target=self._abort, args=(backend,), name="mindx-abort", daemon=True)
                for backend in backends
            ]
        for thread in self._threads:
            thread.start()

    def _abort(self, backend: Any) -> None:
        try:
            backend.abort()
        except Exception as error:
            self._errors.append(f"{type(error).__name__}: {error}".partition("\n")[0])

    def wait_aborted(self, timeout_s: float = _ABORT_S) -> str:
        """Wait until they are aborted. Returns why they are not; empty: they are."""
        if not self.is_used:
            return ""
        self.abort()  # this rank may have come out by itself before it has heard of the death
        end = time.monotonic() + timeout_s
        for thread in self._threads or []:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                return f"a communicator could not be aborted within {timeout_s:g} s"
        return f"a communicator could not be aborted ({self._errors[0]})" if self._errors else ""

    def connected(self) -> None:
        """All groups have new backends."""
        with self._lock:
            self._threads, self._errors = None, []
        self.look()

    def fence(self) -> bool:
        """Wait for the device. Returns whether what it has computed can be used: False where a communicator was aborted
        before it came to its end. Raises RuntimeError where the device has failed."""
        if not self.is_used:
            return True
        torch.cuda.synchronize()
        return self._threads is None


def end_process(reason: str) -> NoReturn:
    """With a broken context: die, so that the agent sees a dead rank. Nothing of the device can be saved any more."""
    logger.critical("this process cannot use its device any more (%s); it ends, and a new one takes its place", reason)
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(1)
