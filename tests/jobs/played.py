"""``loop.py`` with a fault in the step that a stop plays on: ``LOOP_PLAYS=raise|kill|hang|none``, on the last rank.

Prints ``PLAYS rank`` as that step begins.
"""

from __future__ import annotations

import os
import signal
import threading

import torch
import torch.distributed as dist

from tests.jobs import loop


class Trainer(loop.Trainer):
    """Knows the step by the stop's file, which is there."""

    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        if loop.is_played_on(self.guard):
            rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
            loop.say(f"PLAYS {rank}")
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
    Trainer(loop.parse()).run()
    if dist.is_initialized():
        dist.destroy_process_group()
