"""SIGTERM for the first process of a container, before there is a guard or an agent that hears it.

The kernel drops a signal for process 1 whose action is the default one, so a container that is stopped during its
imports would train on until SIGKILL. From ``import mindx_elastic`` on the process ends then, as any other one would.
What comes before that import is lost: no process can see it. ``docker run --init`` puts an init in front.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

__all__ = ["DROPPED", "WITH_AN_INIT", "end_on_sigterm", "leave", "take_default_action"]

DROPPED = (
    "this program is process 1 of its container: the kernel drops a SIGTERM that comes before `import mindx_elastic`"
)
WITH_AN_INIT = "docker run --init puts an init in front; in Kubernetes begin the command with tini -- or dumb-init"


def leave(signum: int, frame: FrameType | None) -> None:
    """The signal handler that stands for the default action."""
    raise SystemExit(128 + signum)


def end_on_sigterm() -> None:
    """Process 1, as long as nothing else answers SIGTERM: end by it. In another process, or thread, do nothing."""
    if os.getpid() != 1 or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, leave)
        os.register_at_fork(after_in_child=take_default_action)


def take_default_action() -> None:
    """A forked child is not process 1."""
    if signal.getsignal(signal.SIGTERM) is leave:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
