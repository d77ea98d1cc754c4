"""What the jobs share: lines that tests wait for, a sudden death, a wait for other ranks, a digest to compare, a policy
of periodic saves."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mindx_elastic.core.position import Position

__all__ = ["Every", "digest_of", "kill_here", "say", "wait_for"]


def say(line: str) -> None:
    """One write a line: several ranks share the pipe, and their lines must not mix."""
    os.write(1, f"{line}\n".encode())


def kill_here(what: object) -> None:
    """What the kernel does to a process that takes too much memory."""
    say(f"KILLED {what}")
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(*paths: Path | str) -> None:
    """Wait until all these files are there, which other ranks make. `tests.watchdog` ends a job that does not go on."""
    while not all(map(os.path.exists, paths)):
        time.sleep(0.002)


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass
class Every:
    """A periodic policy of the program's own: every so many steps."""

    directory: Path
    steps: int = 1
    asynchronous: bool = False
    append_info: Sequence[object] = ()
    keep_max: int | None = None
    keep_per_n_minutes: float | None = None
    prefix: str = "every"

    def due(self, position: Position) -> bool:
        return position.step % self.steps == 0

    def name(self, position: Position) -> str:
        return f"{self.prefix}-{position.epoch}_{position.step_in_epoch}.safetensors"
