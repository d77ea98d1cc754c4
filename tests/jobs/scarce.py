"""``loop.py``, which from the step that it is held at on may take ``SCARCE_MIB`` MiB more of address space, no more."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch
import torch.distributed as dist

from tests.jobs import loop
from tests.jobs.kit import say


def limit(spare_mib: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * os.sysconf("SC_PAGE_SIZE") + (spare_mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    say(f"SCARCE {spare_mib}")


class Trainer(loop.Trainer):
    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        if self.guard.position.step + 1 == self.args.hold_at and self.guard.resumed_from_step is None:
            limit(int(os.environ["SCARCE_MIB"]))
        super().step(x, y, number)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Trainer(loop.parse()).run()
    if dist.is_initialized():
        dist.destroy_process_group()
