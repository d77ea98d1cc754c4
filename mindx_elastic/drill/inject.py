"""Carries out a fault inside a rank of a run that `mindx-elastic drill` has started.

The witness of the rank's guard (`prove.proof_witness`) makes an `Injector` where the control file names a fault, and
tells it of boundaries and forwards. What a fault does is real: signals, exceptions, a process that is gone.

Before anything happens it is noted in a file, so that a fault that never came about is seen, and so that a rank that an
agent starts again does not do it again. Training thread.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from mindx_elastic.core.status_page import read_pages
from mindx_elastic.drill.faults import Fault

__all__ = ["NOTES", "DrillError", "Injector"]

NOTES = "fault.jsonl"
"""The file in the fault's folder: ``fired``, or ``missed``."""
_FIRED = "fired"


class DrillError(RuntimeError):
    """The exception of the fault ``exception``, raised in the program."""


class Injector:
    """One per guard that is entered."""

    def __init__(self, content: Mapping[str, Any], rank: int) -> None:
        """`content`: of the control file."""
        self._rank = rank
        self._fault = Fault(**content)
        self._mark = Path(self._fault.folder) / _FIRED
        self._is_armed = self._fault.rank == rank and not self._mark.exists()
        self._passed, self._series, self._stop_signal = -1, 0, int(signal.SIGTERM)
        self._has_updated = False
        register_optimizer_step_post_hook(self._note_update)

    # --- what the witness says ---

    def entered(self, series: int, step: int, stop_signal: int) -> None:
        """The guard is entered at the boundary `step`."""
        self._series, self._passed, self._stop_signal = series, step, stop_signal

    def at_forward(self) -> None:
        """The first forward of a step begins."""
        if self.is_due("forward"):
            self.fire()

    def at_boundary(self, step: int) -> bool:
        """Returns whether a stop is on its way, which the boundary may wait for."""
        self._passed, self._has_updated = step, False
        if not self.is_due("boundary"):
            return False
        return self.fire()

    def is_due(self, place: str) -> bool:
        if not self._is_armed or self._fault.at != place or self._fault.guard != self._series:
            return False
        return self._passed >= self._fault.boundaries_before

    def _note_update(self, *_: object) -> None:
        """An optimizer has stepped: the weights are those of no boundary."""
        self._has_updated = True
        if self.is_due("update"):
            self.fire()

    # --- what it does ---

    def fire(self) -> bool:
        """Returns whether a stop is on its way."""
        self._is_armed = False
        with suppress(FileExistsError):
            os.close(os.open(self._mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            return self._act(self._fault)
        return False

    def _act(self, fault: Fault) -> bool:
        kind = fault.kind
        if kind == "kill-worker":
            return self._kill_worker()
        # A script with several optimizers may be in the backward of a step that one of them has begun to update.
        self.note("fired", passed=self._passed, updated=self._has_updated)
        if kind == "kill":
            _kill(os.getpid())
        elif kind == "kill-all":
            for pid in _other_ranks():
                _kill(pid)
            _kill(os.getpid())
        elif kind == "lose-node":
            others = [int(os.environ["MINDX_AGENT_PID"]), *_other_ranks()]
            for signum in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: no one sees the death of another one
                for pid in others:
                    _kill(pid, signum)
            _kill(os.getpid())
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "exception":
            raise DrillError(f"an exception of the drill, rank {self._rank}, step {self._passed + 1}")
        elif kind in ("kill-agent", "terminate-agent"):
            os.kill(int(os.environ["MINDX_AGENT_PID"]), signal.SIGKILL if kind == "kill-agent" else signal.SIGTERM)
        elif kind == "terminate":
            os.kill(os.getpid(), self._stop_signal)
        return kind in ("terminate", "terminate-agent")

    def _kill_worker(self) -> bool:
        workers = [each for each in multiprocessing.active_children() if each.pid is not None]
        if not workers:
            self.note("missed", why="the rank has no loader workers at this step")
            return False
        self.note("fired", passed=self._passed)
        assert workers[0].pid is not None
        _kill(workers[0].pid)
        return False

    def note(self, what: str, **content: object) -> None:
        line = {"what": what, "rank": self._rank, "pid": os.getpid(), "clock": time.monotonic(), **content}
        notes = os.open(Path(self._fault.folder) / NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(notes, json.dumps(line).encode() + b"\n")
        finally:
            os.close(notes)


def _kill(pid: int, signum: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def _other_ranks() -> list[int]:
    """The processes of the other ranks of this node: the agent's children that lead sessions, as this one does."""
    pages = read_pages(Path(os.environ["MINDX_AGENT_DIR"]))
    return [status.pid for status in pages.values() if status.pid not in (0, os.getpid())]
