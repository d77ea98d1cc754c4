"""Whether a process that a file speaks of is still the same one: process ids come again, in containers at once."""

from __future__ import annotations

import os
import time

from mindx_elastic.alarm.processes import read_stat

__all__ = ["is_alive", "start_ticks"]

_SLACK_S = 2.0  # the wall clock may have been adjusted a little in between


def start_ticks(pid: int) -> str:
    """When the running process `pid` began, in clock ticks since the boot, as /proc has it; empty when there is none,
    or only its exit status is left."""
    found = read_stat(pid)
    return "" if found is None or found.state in ("Z", "X") else found.started


def is_alive(pid: int, known_at: float | None) -> bool:
    """Whether the process `pid` of which something was heard at the unix time `known_at` is still there.

    One that began later has only inherited the number. None: any process of that number counts.
    """
    ticks = start_ticks(pid) if pid > 0 else ""
    if not ticks or known_at is None:
        return bool(ticks)
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot + int(ticks) / os.sysconf("SC_CLK_TCK") <= known_at + _SLACK_S
