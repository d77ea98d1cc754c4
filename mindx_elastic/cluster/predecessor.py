"""Ends the process that had a worker's place before, where it is on this machine and only stopped or cut off.

The scheduler holds it for dead, and a new process has taken its place. But it has the lock of the checkpoint directory,
and could write there if it went on. A process that the scheduler names is ended only if it was started as a worker of
this very cluster with this node id: what the scheduler knows of processes comes from the network.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Mapping
from contextlib import suppress

from mindx_elastic.cluster.messages import Identity
from mindx_elastic.core.posix import open_pidfd

__all__ = ["end_predecessor"]

_GONE_MS = 5000
_MOST_BYTES = 1 << 20
_SAME = ("MS_SCHED_HOST", "MS_SCHED_PORT", "MS_WORKER_NUM")


def end_predecessor(told: Identity | None, *, space: str, node_id: str, env: Mapping[str, str]) -> int | None:
    """Kill the process that the scheduler names in `told`. Returns its pid; None: there is nothing to end.

    `space`: of this process, see `alarm.peers`. `env`: with which this process was started.
    """
    if told is None or told.pid in (0, 1, os.getpid()) or not told.started or not space or told.space != space:
        return None
    pid = told.pid
    try:
        fd = open_pidfd(pid, told.started)
    except OSError:
        return None  # it is gone, or cannot be watched
    try:
        if not _is_worker(_environment(pid), node_id, env):
            return None
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(_GONE_MS)  # with it goes its lock
        return pid
    except OSError:
        return None
    finally:
        os.close(fd)


def _environment(pid: int) -> dict[str, str]:
    """With which a process was started; empty for one of another user."""
    found: dict[str, str] = {}
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        for each in file.read(_MOST_BYTES).split(b"\0"):
            name, _, value = os.fsdecode(each).partition("=")
            found[name] = value
    return found


def _is_worker(found: Mapping[str, str], node_id: str, env: Mapping[str, str]) -> bool:
    return (
        found.get("MS_ROLE", "").strip().upper() == "MS_WORKER"
        and all(found.get(name) == env.get(name) for name in _SAME)
        and found.get("MS_NODE_ID", "").strip() in ("", node_id)
    )
