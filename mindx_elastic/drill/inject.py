"""Carries out a fault inside a rank of a run that `mindx-elastic drill` has started.

The witness of the rank's guard (`prove.proof_witness`) makes an `Injector` where the control file names a fault, and
tells it of boundaries and forwards. What a fault does is real: signals, exceptions, a process that is gone.

Before anything happens it is noted in a file next to the job's checkpoint directories, so that a fault that never came
about is seen, and so that a rank that is started again does not do it again. Training thread.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from mindx_elastic.core.status_page import read_pages
from mindx_elastic.drill.faults import NOTE, Fault
from mindx_elastic.prove.control import Control

__all__ = ["DrillError", "Injector"]


class DrillError(RuntimeError):
    """The exception of the fault ``exception``, raised in the program."""


class Injector:
    """One per guard that is entered."""

    def __init__(self, control: Control, rank: int) -> None:
        assert control.fault is not None
        self._rank, self._fault = rank, Fault(**control.fault)
        self._note = control.directories / NOTE
        self._is_armed = self._fault.rank == rank and not self._note.exists()
        self._passed, self._series, self._stop_signal = -1, 0, int(signal.SIGTERM)
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
        self._passed = step
        if not self.is_due("boundary"):
            return False
        return self.fire()

    def is_due(self, place: str) -> bool:
        if not self._is_armed or self._fault.at != place or self._fault.guard != self._series:
            return False
        return self._passed >= self._fault.boundaries_before

    def _note_update(self, *_: object) -> None:
        """An optimizer has stepped: the weights are those of no boundary."""
        if self.is_due("update"):
            self.fire()

    # --- what it does ---

    def fire(self) -> bool:
        """Returns whether a stop is on its way."""
        self._is_armed, kind = False, self._fault.kind
        if self._note.exists():
            return False
        if kind == "kill-worker":
            return self._kill_worker()
        self.note()
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
            self.note(missed="the rank has no loader workers at this step")
            return False
        self.note()
        assert workers[0].pid is not None
        _kill(workers[0].pid)
        return False

    def note(self, **content: object) -> None:
        with self._note.open("x", encoding="utf-8") as file:
            json.dump({"clock": time.monotonic(), **content}, file)


def _kill(pid: int, signum: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def _other_ranks() -> list[int]:
    """The processes of the other ranks of this node: the agent's children that lead sessions, as this one does."""
    pages = read_pages(Path(os.environ["MINDX_AGENT_DIR"]))
    return [status.pid for status in pages.values() if status.pid not in (0, os.getpid())]
