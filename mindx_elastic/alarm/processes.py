"""What /proc says of a process: whether it ends, whose child it is, whether its number has been reused."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessStat", "members_of", "read_stat"]

_PF_EXITING = 0x4  # include/linux/sched.h; part of the kernel's interface through this file


@dataclass(frozen=True, kw_only=True)
class ProcessStat:
    """The fields of ``/proc/PID/stat`` that are used here."""

    state: str
    """One letter as in ps: R running, S sleeping, D uninterruptible, T stopped, t traced, Z and X ended."""
    parent: int
    group: int
    session: int
    flags: int
    """The kernel's flags of the main thread."""
    processor_ticks: int
    """Used so far by its threads, and by its children that have ended and were waited for; in clock ticks."""
    started: str
    """Clock ticks since the boot, as text: with the process id it names a process for good."""

    @property
    def is_ending(self) -> bool:
        """Whether its main thread is on its way out, or already gone while others of its threads still die."""
        return self.state in ("Z", "X", "x") or bool(self.flags & _PF_EXITING)


def read_stat(pid: int) -> ProcessStat | None:
    """None: there is no such process, or /proc does not tell. Any thread; reads one small file."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        # The name, in brackets, may contain anything; the fields behind it may not.
        fields = text.rpartition(")")[2].split()
        return ProcessStat(
            state=fields[0],
            parent=int(fields[1]),
            group=int(fields[2]),
            session=int(fields[3]),
            flags=int(fields[6]),
            processor_ticks=sum(map(int, fields[11:15])),
            started=fields[19],
        )
    except (OSError, IndexError, ValueError):
        return None


def members_of(sessions: Collection[int]) -> list[int]:
    """Process ids of all members of these sessions, ended ones that nobody has waited for included. Any thread.

    Two microseconds for each process of the machine. Empty where /proc does not tell.
    """
    found = []
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdecimal():
                with suppress(OSError):
                    if os.getsid(int(name)) in sessions:
                        found.append(int(name))
    return found
