"""``run.py STOP SCRIPT ARGUMENTS``: runs a script as Python would, and sends SIGTERM to this process in step STOP.

The signal comes before the step's boundary, and the step ends when the ranks have agreed to stop there: so the job
always leaves at that boundary, or, within an accumulation window, at the end of that. 0: no signal. Prints how many
steps the script has done (``STEPS``). With ``NATURAL_KILL=PATH`` in the environment it is SIGKILL, once: then PATH is
there.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from typing import Any
from unittest import mock

from mindx_elastic import Guard


def stop_in(stop: int, rank: int) -> None:
    """Signal this process in step `stop` of the run, if it is rank `rank`."""
    original = Guard._end_step  # all of `step_end` and `boundary` goes through it
    signalled = False

    def end_step(guard: Guard, **arguments: Any) -> Any:
        nonlocal signalled
        step = guard._loops.step  # not `guard.step`: that the script reads its position is a thing to be tested
        if not signalled and step + 1 >= stop > 0 and int(os.environ.get("RANK", "0")) == rank:
            signalled = True
            if path := os.environ.get("NATURAL_KILL"):
                kill_once(path, stop)
                return original(guard, **arguments)
            os.kill(os.getpid(), signal.SIGTERM)
            end = time.monotonic() + 60
            while guard.stopper.agreed_step is None:
                if time.monotonic() > end:
                    sys.exit("the signal was not heard in 60 s")
                time.sleep(0.002)
            os.write(1, f"STOPPING {stop}\n".encode())
        return original(guard, **arguments)

    mock.patch.object(Guard, "_end_step", end_step).start()


def kill_once(path: str, stop: int) -> None:
    if not os.path.exists(path):
        with open(path, "x"):
            os.write(1, f"KILLING {stop}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)


def count_steps() -> list[int]:
    steps = [0]
    original = Guard._finish

    def finish(guard: Guard) -> None:
        steps[0] = guard._loops.step
        original(guard)

    mock.patch.object(Guard, "_finish", finish).start()
    return steps


if __name__ == "__main__":
    stop_in(int(sys.argv[1]), rank=int(os.environ.get("NATURAL_RANK", "0")))
    counted = count_steps()
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
    os.write(1, f"STEPS {counted[0]}\n".encode())  # one write: several ranks share the pipe
