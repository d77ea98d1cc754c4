"""Keeps DataLoader workers alive through the signals that end a job.

Launchers signal a whole process group or session, so loader workers get SIGTERM together with the trainer; torch's
worker then dies at once ("DataLoader worker ... killed by signal: Terminated") and takes the trainer with it before it
can save. The worker must outlive the alarm, but not for ever: if it ignored SIGTERM, `Process.terminate()` and the
interpreter's own exit (which joins daemon children) would hang on a stuck worker.

So the shield *defers*: the first signal arms SIGALRM, whose default action ends the worker after the grace period.
Rejected: SIG_IGN (hangs as above); a handler set at fork (torch's worker loop installs its own SIGTERM handler
afterwards; only `worker_init_fn` runs later than that).
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from types import FrameType

from mindx_elastic.alarm.exit_codes import STOP_SIGNALS
from mindx_elastic.config import DEFAULT_GRACE_S

__all__ = ["WorkerShield"]


class WorkerShield:
    """A picklable ``worker_init_fn``: shields the worker, then calls the user's own function.

    Runs in the worker process. `grace_s` is how long a signalled worker may live on, in seconds.
    """

    def __init__(self, user_init: Callable[[int], None] | None = None, *, grace_s: float = DEFAULT_GRACE_S) -> None:
        self.user_init = user_init
        self.grace_s = grace_s

    def __call__(self, worker_id: int) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._defer)
        if self.user_init is not None:
            self.user_init(worker_id)

    def _defer(self, signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(max(1, math.ceil(self.grace_s)))
