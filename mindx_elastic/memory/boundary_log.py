"""Keeps a replica's own small state of every boundary in shared memory; see `memory.boundary_ring`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from mindx_elastic.capture.collector import Collector
from mindx_elastic.core.events import logger
from mindx_elastic.errors import ArenaError, UnsupportedStateError
from mindx_elastic.memory.arena import RankArena
from mindx_elastic.memory.boundary_ring import BoundaryRing
from mindx_elastic.persist.packed import pack_state

__all__ = ["BOUNDARIES_FILE", "BoundaryLog"]

BOUNDARIES_FILE = "boundaries"
_SPARE = 2.0  # room for a state that grows (lists of numbers in a scheduler or a callback)
_LEAST = 1 << 16


class BoundaryLog:
    """One per guard of a replicated job. Training thread only."""

    def __init__(
        self, arena: RankArena, collector: Collector, modules: Iterable[nn.Module], next_step: Callable[[], int]
    ) -> None:
        """`modules`: the wrapped ones, whose forward ends before any gradient is reduced; `next_step`: the coming."""
        self._arena, self._collector, self._next_step = arena, collector, next_step
        self._ring: BoundaryRing | None = None
        self._run_id, self._attempt = "", 0
        self._trusted = False
        self._doubted = False  # once a forecast was wrong, none is trusted any more
        self._broken = False
        self._handles = [module.register_forward_hook(lambda *_: self._forward_ended()) for module in modules]

    def begin(self, run_id: str, attempt: int) -> None:
        """Keep all boundaries from here on. Not the one that the job starts from: that one is durable."""
        self._run_id, self._attempt = run_id, attempt

    def pin(self) -> None:
        """Keep the boundary that was just written for longer: another rank has taken a snapshot of it."""
        if self._run_id and not self._broken:
            self._write(self._collector.position.step, self._collector.volatile, pinned=True)

    def at_boundary(self) -> None:
        """A boundary has just been copied by the collector."""
        came_true = self._collector.forecast_correct = self._collector.forecast_came_true()
        if came_true is not None:
            self._doubted |= not came_true
            self._trusted = not self._doubted
        self._write(self._collector.position.step, self._collector.volatile)

    def _forward_ended(self) -> None:
        # Without gradients it is no training forward: what it draws shows at the boundary, as a forecast that failed.
        if self._run_id and not self._broken and not self._doubted and torch.is_grad_enabled():
            self._write(self._next_step(), self._collector.copy_ahead, forecast=True)

    def _write(
        self, step: int, collect: Callable[[], dict[str, Any] | None], *, forecast: bool = False, pinned: bool = False
    ) -> None:
        if self._broken:
            return
        try:
            state = collect()
            if state is None:
                return
            pieces = pack_state(state)
            kind = {"forecast": forecast, "trusted": self._trusted or not forecast, "pinned": pinned}
            ring = self._ring or self._open(pieces)
            if not ring.write(self._attempt, step, pieces, **kind):
                ring.close()
                self._open(pieces).write(self._attempt, step, pieces, **kind)
        except Exception as error:  # whatever it is: no reason to end a training
            self._broken = True
            expected = isinstance(error, (ArenaError, UnsupportedStateError, OSError))
            remedy = "boundaries are no longer kept in memory, training goes on"
            logger.warning("%s; %s", error, remedy, exc_info=not expected)

    def _open(self, pieces: Sequence[memoryview]) -> BoundaryRing:
        capacity = max(_LEAST, int(_SPARE * sum(piece.nbytes for piece in pieces)))
        capacity += -capacity % 64
        self._ring = BoundaryRing(self._arena.folder / BOUNDARIES_FILE, self._run_id, capacity)
        return self._ring

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._ring is not None:
            self._ring.close()
