"""``loop.py`` with a fault in the step that a stop plays on: ``LOOP_PLAYS=raise|kill|hang|none``, on the last rank.

Prints ``PLAYS rank`` as that step begins. ``LOOP_PLAYS=call:N``: SIGKILL at the Nth call of a function of the overlap's
from where it begins, on every rank; 0: never. Prints ``CALLS number`` with each hundredth.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

import torch
import torch.distributed as dist

from tests.jobs import loop
from tests.jobs.kit import say

_OVERLAP = ("prove/play_on.py", "prove/overlap.py", "prove/witness.py", "prove/digests.py", "prove/variables.py")


def kill_at_call(number: int) -> None:
    calls = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        code = frame.f_code
        if event != "call" or not code.co_filename.endswith(_OVERLAP):
            return
        if calls or (code.co_name == "_begin" and code.co_filename.endswith("prove/play_on.py")):
            calls += 1
            if calls % 100 == 0:
                say(f"CALLS {calls}")
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(note)


class Trainer(loop.Trainer):
    """Knows the step by the stop's file, which is there."""

    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        if loop.is_played_on(self.guard):
            rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
            say(f"PLAYS {rank}")
            fault = os.environ["LOOP_PLAYS"] if rank == size - 1 else "none"
            if fault == "raise":
                raise RuntimeError("only in the step that is played on")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hang":
                threading.Event().wait()
        super().step(x, y, number)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ["LOOP_PLAYS"].startswith("call:"):
        kill_at_call(int(os.environ["LOOP_PLAYS"].partition(":")[2]))
    Trainer(loop.parse()).run()
    if dist.is_initialized():
        dist.destroy_process_group()
