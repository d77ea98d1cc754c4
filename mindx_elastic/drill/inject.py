"""Carries out a fault inside a rank of a run that `mindx-elastic drill` has started.

The witness of the rank's guard (`prove.proof_witness`) makes an `Injector` where the control file names a fault, and
tells it of boundaries and forwards. What a fault does is real: signals, exceptions, a process that is gone in the
middle of a copy.

Before anything happens it is noted in a file, so that a fault that never came about is seen, and so that a rank that an
agent starts again does not do it again. Training thread.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mindx_elastic.core.status_page import read_page
from mindx_elastic.drill.faults import Fault
from mindx_elastic.memory import snapshots

__all__ = ["NOTES", "DrillError", "Injector"]

NOTES = "fault.jsonl"
"""The file in the fault's folder: ``fired``, or ``missed``."""
_FIRED = "fired"
_CHANGES = 3  # changes of a parameter's memory in the middle of an update


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
        self._modules: Mapping[str, nn.Module] = {}
        self._has_updated = False
        register_optimizer_step_post_hook(self._note_update)
        if not self._is_armed:
            return
        if self._fault.at == "update":
            _Update(self)
        elif self._fault.at == "copy":
            snapshots.reach = self._in_copy

    # --- what the witness says ---

    def entered(self, series: int, step: int, stop_signal: int, modules: Mapping[str, nn.Module]) -> None:
        """The guard is entered at the boundary `step`."""
        self._series, self._passed, self._stop_signal = series, step, stop_signal
        self._modules = modules

    def at_forward(self) -> None:
        """The first forward of a step begins."""
        if self.is_due("forward"):
            self.fire()
        elif self.is_due("backward"):
            parameter = next((p for m in self._modules.values() for p in m.parameters() if p.requires_grad), None)
            if parameter is not None:
                self._hook = parameter.register_hook(self._in_backward)

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

    def fire_once(self, place: str) -> None:
        if self.is_due(place):
            self.fire()

    def _in_backward(self, gradient: torch.Tensor) -> None:
        self._hook.remove()
        self.fire_once("backward")

    def _note_update(self, *_: object) -> None:
        self._has_updated = True

    def _in_copy(self, stage: str) -> None:
        # The step may be passed, or not: a copy goes on during the next one.
        if stage != "copying" or not self._is_armed:
            return
        if self._fault.guard == self._series and self._passed + 1 >= self._fault.step:
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
    agent, found = os.environ["MINDX_AGENT_DIR"], []
    for page in sorted(Path(agent).glob("rank_*.page")):
        status = read_page(page)
        if status is not None and status.pid not in (0, os.getpid()):
            found.append(status.pid)
    return found


class _Update:
    """Fires in the middle of ``optimizer.step()``: after some parameters' memory was changed, and before others' was.

    Not by a dispatch mode, which would stay on where an exception leaves the update.
    """

    def __init__(self, injector: Injector) -> None:
        self._injector, self._changes = injector, 0
        self._handles = [
            register_optimizer_step_pre_hook(self._begin),
            register_optimizer_step_post_hook(self._end),
        ]

    def _begin(self, *_: object) -> None:
        if self._injector.is_due("update"):
            self._changes = 0
            sys.setprofile(self._hear)

    def _hear(self, frame: object, event: str, called: Any) -> None:
        name = getattr(called, "__name__", "")
        if event != "c_return" or not name.endswith("_") or name.endswith("__"):
            return
        if not isinstance(getattr(called, "__self__", None), torch.Tensor) and not name.startswith(
            ("_foreach", "_fused")
        ):
            return
        self._changes += 1
        if self._changes >= _CHANGES or name.startswith("_f"):
            self._close()
            self._injector.fire_once("update")

    def _end(self, *_: object) -> None:
        if self._injector.is_due("update"):  # it has few parameters
            self._close()
            self._injector.fire_once("update")

    def _close(self) -> None:
        sys.setprofile(None)
        for handle in self._handles:
            handle.remove()
