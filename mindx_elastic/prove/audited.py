"""In a process of an audit: what it has otherwise than the living job, whose steps it does again.

Each step is compared with what the living job has kept of it (`kept_steps`), the last one with its snapshot: every
tensor, number and text of the state. A rank whose state another rank has copied for all has no snapshot.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mindx_elastic.capture.loop_ends import without_end
from mindx_elastic.core.tensor_memory import flat_bytes
from mindx_elastic.memory.arena import STEPS_FILE
from mindx_elastic.memory.one_step import SNAPSHOT
from mindx_elastic.persist.flatten import flatten
from mindx_elastic.persist.reader import map_checkpoint
from mindx_elastic.prove.compare import unequal
from mindx_elastic.prove.digests import leaves
from mindx_elastic.prove.kept_steps import open_kept_steps
from mindx_elastic.prove.witness import Observed

__all__ = ["AuditedSteps", "Unlike"]

_MOST = 64


class Unlike(NamedTuple):
    """One thing that is not as in the living job."""

    step: int
    what: str
    """``scalar loss``, ``model.0.weight``."""
    before: str
    """In the living job."""
    again: str
    """In the audit."""


class AuditedSteps:
    """One per entered guard. Training thread."""

    def __init__(self, stack: ExitStack, seen: Observed, living: Path) -> None:
        """`living`: what the living job's ranks have kept (`memory.one_step`)."""
        self._seen, self._folder = seen, living / f"rank_{seen.ranks.rank}"
        path = self._folder / STEPS_FILE
        self.steps = open_kept_steps(stack, seen, path) if path.exists() else None
        """What compares each step with what was kept of it; None: nothing was (MINDX_OVERLAP=0)."""

    def differences(self) -> list[Unlike]:
        """At the last boundary: the first step that differs, then the state, at most 64 of it."""
        found: list[Unlike] = []
        if self.steps is not None and (first := self.steps.difference) is not None:
            part = first.parts[0]
            found.append(Unlike(first.step, f"{part.kind} {''.join(part.names[:1])}".strip(), part.first, part.second))
        if (self._folder / SNAPSHOT).exists():
            states = map_checkpoint(self._folder / SNAPSHOT).state, self._seen.collector.state()
            for progress in (state["progress"] for state in states):
                progress["loop"] = without_end(progress.get("loop", {}))  # variables and counters of the process
            found += _unlike(self._seen.loops.step, *states)
        return found


def _unlike(step: int, before: Any, again: Any) -> list[Unlike]:
    one, other = dict(leaves(before, depth=100)), dict(leaves(again, depth=100))
    names = unequal(one, other)[:_MOST]
    tensors = [flatten(state)[1] if names else {} for state in (before, again)]
    found = []
    for name in names:
        values = one.get(name, "nothing"), other.get(name, "nothing")
        if all(name in each for each in tensors):
            values = _first_values(*(each[name] for each in tensors)) or values
        found.append(Unlike(step, name, *values))
    return found


def _first_values(one: torch.Tensor, other: torch.Tensor) -> tuple[str, str] | None:
    """The first element that differs, of both; None: they are of another kind."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return None
    bytes_of = [flat_bytes(tensor.detach().cpu()) for tensor in (one, other)]
    at = int((bytes_of[0] != bytes_of[1]).nonzero()[0]) // one.element_size()
    place = [at // math.prod(one.shape[axis + 1 :]) % one.shape[axis] for axis in range(one.dim())]
    return tuple(f"{tensor[tuple(place)].item()!r} at {place}" for tensor in (one, other))  # type: ignore[return-value]
