"""Where the workers of a hanging job are: each writes its stacks itself (`faulthandler`, in C), into its own file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mindx_elastic.agent.workers import Workers, process_state
from mindx_elastic.core.status_page import Status
from mindx_elastic.guard.agent_link import STACK_SIGNAL

__all__ = ["write_stacks"]

_WAIT_S = 1.0
_STATES = {
    "T": "stopped by a signal (SIGSTOP, a debugger): it cannot write its stack",
    "D": "in an uninterruptible wait of the kernel (a disk, a network file system, a device): it may not answer",
    "Z": "ended, not yet reaped",
}


def write_stacks(workers: Workers, statuses: Mapping[int, Status], folder: Path, *, attempt: int) -> list[Path]:
    """Let every guarded worker write its stacks and wait for them a second at most. Main thread.

    Returns the files; a process that cannot answer has what the kernel says of it there.
    """
    files: dict[int, Path] = {}
    sizes: dict[int, int] = {}
    for rank, status in statuses.items():
        if not status.entered_ns:
            continue  # perhaps no handler yet: the signal would end it
        path = folder / f"attempt_{attempt}_rank_{rank}.txt"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            state = process_state(status.pid)
            where = _kernel_place(status.pid)
            now = time.strftime("%Y-%m-%d %H:%M:%S %z")
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"--- {now} rank {rank} pid {status.pid} step {status.step}: state {state}{where}\n")
                if state in _STATES:
                    file.write(f"{_STATES[state]}\n")
            files[rank], sizes[rank] = path, path.stat().st_size
            # Without a handler (its file could not be opened, its interpreter is ending) the signal would end it.
            if state != "T" and workers.catches(rank, STACK_SIGNAL):
                workers.send(rank, STACK_SIGNAL)
            else:
                del sizes[rank]
    _wait_for_growth(files, sizes)
    return [files[rank] for rank in sorted(files)]


def _wait_for_growth(files: Mapping[int, Path], sizes: dict[int, int]) -> None:
    end = time.monotonic() + _WAIT_S
    while sizes and time.monotonic() < end:
        time.sleep(0.02)
        for rank, size in list(sizes.items()):
            with suppress(OSError):
                if files[rank].stat().st_size > size:
                    del sizes[rank]


def _kernel_place(pid: int) -> str:
    with suppress(OSError):
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
        if name not in ("", "0"):
            return f", in the kernel's {name}"
    return ""
